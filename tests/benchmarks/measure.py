"""Runs a program as a child and measures it from outside: seconds, CPU time, memory.

Peak memory is the RSS summed over the process tree, sampled every 5 ms, and never less than the
kernel's own figure for the largest process, which misses no peak. Anonymous memory leaves out what
is mapped of files: pages of the page cache, which are there with or without the program.
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
_RESIDENT = "print(*(int(n) * {page} for n in open('/proc/self/statm').read().split()[1:3]))"


@dataclass(frozen=True)
class Run:
    """One run of one program. Memory is in bytes, start-up included; CPU time is that of
    the user and of the system, which noise of other programs changes least; page faults tell how
    much memory it has touched for the first time."""

    status: int
    seconds: float
    cpu_seconds: float
    page_faults: int
    peak_bytes: int
    anonymous_bytes: int
    stdout: str
    stderr: str


class _Sampler(threading.Thread):
    """Watches a process tree until told to stop, and kills its root once the limit has passed."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = self.anonymous_bytes = 0
        self._root = psutil.Process(pid)
        self._done = threading.Event()

    def run(self) -> None:
        start = listed = time.monotonic()
        tree = [self._root]
        while not self._done.wait(SAMPLE_SECONDS):
            now = time.monotonic()
            if now - listed >= CHILDREN_SECONDS:
                tree, listed = [self._root, *_children(self._root)], now
            sizes = [_memory(process) for process in tree]
            self.peak_bytes = max(self.peak_bytes, sum(rss for rss, _ in sizes))
            self.anonymous_bytes = max(self.anonymous_bytes, sum(own for _, own in sizes))
            if now - start > LIMIT_SECONDS:
                self._root.kill()
                return

    def stop(self) -> None:
        self._done.set()
        self.join()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _memory(process: psutil.Process) -> tuple[int, int]:
    """RSS, and what of it is anonymous."""
    try:
        found = process.memory_info()
    except psutil.Error:
        return 0, 0
    return found.rss, found.rss - found.shared


def run(command: Sequence[str | Path]) -> Run:
    """Runs a command in the repository's root to its end, whatever its exit status. Python keeps
    what it compiles, as it does where packages are installed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT, env=environment
        )
        try:
            sampler = _Sampler(child.pid)
            sampler.start()
            # Not reaped yet: the sampler still looks at it.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            child.send_signal(signal.SIGKILL)
            child.wait()
            raise
        seconds = time.perf_counter() - start
        sampler.stop()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Run(
        status=child.returncode,
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        page_faults=usage.ru_minflt,
        peak_bytes=max(sampler.peak_bytes, usage.ru_maxrss * 1024),
        anonymous_bytes=sampler.anonymous_bytes,
        stdout=texts[0],
        stderr=texts[1],
    )


@dataclass(frozen=True)
class Baseline:
    """What a process has used, in bytes, before it does anything: its imports alone."""

    resident_bytes: int
    anonymous_bytes: int


def baseline(imports: str = IMPORTS, runs: int = 3) -> Baseline:
    """The RSS right after the imports, of a process that does no more."""
    code = f"{imports}\n{_RESIDENT.format(page=os.sysconf('SC_PAGE_SIZE'))}"
    children = [run([sys.executable, "-c", code]) for _ in range(runs)]
    if failed := next((child for child in children if child.status), None):
        raise RuntimeError(f"`{imports}` failed:\n{failed.stderr}")
    sizes = [tuple(map(int, child.stdout.split())) for child in children]
    return Baseline(
        int(statistics.median(rss for rss, _ in sizes)),
        int(statistics.median(rss - shared for rss, shared in sizes)),
    )
