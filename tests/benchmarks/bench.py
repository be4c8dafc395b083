"""Interleaved rounds: every program once, then every program again, from the same cache state."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Baseline, Run, baseline, run

DST = "{DST}"
RESHARD = Path(sys.executable).parent / "reshard"


@dataclass(frozen=True)
class Program:
    """A command to time; `{DST}` in it stands for a destination that does not exist yet.

    `rounds` limits how often a slow one runs; `refuses` says that exit status 2, with a reason, is
    an answer too.
    """

    label: str
    source: Path
    command: Sequence[str | Path]
    rounds: int | None = None
    refuses: bool = False


@dataclass(frozen=True)
class Result:
    """All runs of one program, and the bytes in the files it left at its destination."""

    runs: list[Run]
    output_bytes: int

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> float:
        return statistics.median(run.peak_bytes for run in self.runs)

    @property
    def anonymous_bytes(self) -> float:
        return statistics.median(run.anonymous_bytes for run in self.runs)


class FailedError(Exception):
    """A program that was to be measured did not do its job."""


def stored_bytes(path: Path) -> int:
    """Bytes in the files under a directory, each file once however many links it has."""
    files = (file.lstat() for file in path.rglob("*") if file.is_file())
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


def reshard(source: Path, *flags: str, label: str = "reshard", **options: Any) -> Program:
    """`reshard ckpt` from `source`, with these flags; `options` are the `Program`'s."""
    return Program(label, source, [RESHARD, "ckpt", source, DST, *flags], **options)


def module(name: str, *arguments: str | Path) -> list[str | Path]:
    """The command that runs a module of this package in a process of its own."""
    return [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]


def problem(result: Run) -> str:
    """How a run ended, in one line: its status and what it said last, or first if it explained."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error:")]
    return f"exit {result.status}: {(errors or lines[-1:] or ['no message'])[0]}"


@dataclass
class Bench:
    """Where to work, how often to run, whom to tell; collects every raw figure in `log`."""

    scratch: Path
    rounds: int
    say: Callable[[str], None]
    log: list[dict[str, Any]] = field(default_factory=list)
    section: str = ""  # what is measured now
    _baseline: Baseline | None = None

    def source(self, name: str) -> Path:
        """The workload of that name, made now if it is not there; a half-made one is not kept."""
        path = self.scratch / name
        if not path.exists():
            self.say(f"making {path}")
            partial = self.scratch / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            made = run(module("workloads", name, partial))
            if made.status:
                raise FailedError(f"{name} could not be made: {problem(made)}")
            partial.rename(path)
        return path

    def baseline(self) -> Baseline:
        """What a process with `reshard`'s imports has used before it starts work."""
        if self._baseline is None:
            try:
                self._baseline = baseline()
            except RuntimeError as error:
                raise FailedError(str(error).strip().splitlines()[-1]) from None
            self.say(f"baseline: {self._baseline}")
            self.log.append({"label": "baseline", **asdict(self._baseline)})
        return self._baseline

    def compare(self, *programs: Program) -> list[Result]:
        """Runs the programs in turn, round after round; one `Result` each, in their order.

        Raises `FailedError` at the end of a round in which one of them failed.
        """
        runs: list[list[Run]] = [[] for _ in programs]
        sizes = [0] * len(programs)
        for number in range(1, self.rounds + 1):
            failures = []
            for i, program in enumerate(programs):
                if number <= (program.rounds or self.rounds):
                    result, sizes[i] = self._once(program)
                    self._record(number, program, result, sizes[i])
                    runs[i].append(result)
                    if result.status not in ((0, 2) if program.refuses else (0,)):
                        failures.append(f"{program.source.name} {program.label}: {problem(result)}")
            if failures:
                raise FailedError("; ".join(failures))
        return [Result(*pair) for pair in zip(runs, sizes, strict=True)]

    def _once(self, program: Program) -> tuple[Run, int]:
        target = self.scratch / "destination"
        shutil.rmtree(target, ignore_errors=True)
        # Nothing of an earlier program's left to write, and the whole source in the page cache.
        os.sync()
        read = 'find "$1" -type f -exec cat {} + > /dev/null'
        subprocess.run(["sh", "-c", read, "sh", program.source], check=True)
        command = [target if part == DST else part for part in program.command]
        try:
            result = run(command)
            return result, stored_bytes(target)
        except FileNotFoundError:
            raise FailedError(f"{command[0]} is not there: install reshard beside Python") from None
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _record(self, number: int, program: Program, result: Run, output_bytes: int) -> None:
        told = {"section": self.section, "round": number, "label": program.label}
        told |= {"source": program.source.name, "output_bytes": output_bytes}
        self.log.append(told | asdict(result))
        peak, anonymous, output = (
            f"{size / 2**20:.0f} MiB"
            for size in (result.peak_bytes, result.anonymous_bytes, output_bytes)
        )
        self.say(
            f"{self.section} {number}: {program.source.name} {program.label}: "
            f"{result.seconds:.2f} s, CPU {result.cpu_seconds:.2f} s, "
            f"{result.page_faults / 1000:.0f}k page faults, "
            f"peak {peak}, anonymous {anonymous}, output {output}"
            + (f", {problem(result)}" if result.status else "")
        )


def compare_timed(bench: Bench, *programs: Program) -> list[Result]:
    """`Bench.compare` of programs that time their own work and print it, and says these times."""
    results = bench.compare(*programs)
    for program, result in zip(programs, results, strict=True):
        seconds = ", ".join(f"{seconds:.3f} s" for seconds in _timed(result))
        bench.say(
            f"{bench.section}: {program.source.name} {program.label}: timed itself: {seconds}"
        )
    return results


def timed_seconds(result: Result) -> float:
    """The median of what a program timed itself."""
    return statistics.median(_timed(result))


def _timed(result: Result) -> list[float]:
    return [json.loads(run.stdout)["seconds"] for run in result.runs]
