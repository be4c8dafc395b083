"""Runs a program as a child and measures it from outside: seconds, memory, bytes read.

Peak memory is the RSS summed over the process tree, sampled every 5 ms, and never less than the
kernel's own figure for the largest process, which misses no peak.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SAMPLE_SECONDS = 0.005
CHILDREN_SECONDS = 0.1
LIMIT_SECONDS = 600.0

IMPORTS = "import numpy, tensorstore, click, reshard"
_RESIDENT = "print(int(open('/proc/self/statm').read().split()[1]) * {page})"


@dataclass(frozen=True)
class Run:
    """One run of one program. Memory and reads are in bytes, start-up included."""

    status: int
    seconds: float
    peak_bytes: int
    read_bytes: int
    stdout: str
    stderr: str


class _Sampler(threading.Thread):
    """Watches a process tree until told to stop, and kills its root once the limit has passed."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._root = psutil.Process(pid)
        self._done = threading.Event()

    def run(self) -> None:
        start = listed = time.monotonic()
        tree = [self._root]
        while not self._done.wait(SAMPLE_SECONDS):
            now = time.monotonic()
            if now - listed >= CHILDREN_SECONDS:
                tree, listed = [self._root, *_children(self._root)], now
            self.peak_bytes = max(self.peak_bytes, sum(map(_rss, tree)))
            if now - start > LIMIT_SECONDS:
                self._root.kill()
                return

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak_bytes


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def read_bytes(pid: int) -> int:
    """Bytes a process has asked the kernel for, from the page cache or not."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def run(command: Sequence[str | Path]) -> Run:
    """Runs a command in the repository's root to its end, whatever its exit status."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT
        )
        try:
            sampler = _Sampler(child.pid)
            sampler.start()
            # Not reaped yet: the counters of a process last as long as it is a zombie.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            child.send_signal(signal.SIGKILL)
            child.wait()
            raise
        seconds = time.perf_counter() - start
        sampled = sampler.stop()
        read = read_bytes(child.pid)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    peak = max(sampled, usage.ru_maxrss * 1024)
    return Run(child.returncode, seconds, peak, read, *texts)


@dataclass(frozen=True)
class Baseline:
    """What a process has used, in bytes, before it does anything: its imports alone."""

    resident_bytes: int
    read_bytes: int


def baseline(imports: str = IMPORTS, runs: int = 3) -> Baseline:
    """The RSS right after the imports, and the bytes read by a process that does no more."""
    code = f"{imports}\n{_RESIDENT.format(page=os.sysconf('SC_PAGE_SIZE'))}"
    children = [run([sys.executable, "-c", code]) for _ in range(runs)]
    if failed := next((child for child in children if child.status), None):
        raise RuntimeError(f"`{imports}` failed:\n{failed.stderr}")
    return Baseline(
        int(statistics.median(int(child.stdout) for child in children)),
        int(statistics.median(child.read_bytes for child in children)),
    )
