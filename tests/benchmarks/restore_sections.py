"""What is measured of `reshard.restore`, section by section, each against the figure to reach.

The seconds are those of the call alone, which `restore.py` takes inside the measured process.
They are said once the rounds are over; what each round says is of the whole process, start-up
included.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.bench import Bench, Program, Result, compare_timed, module, timed_seconds
from tests.benchmarks.restore import MESHES, TOOLS, Restored
from tests.benchmarks.sections import MIB, Row, rate, times


def _program(bench: Bench, tool: str, name: str, mesh: str, *flags: str, **options: Any) -> Program:
    """`restore.py` with these flags; `options` are the `Program`'s."""
    source = bench.source(name)
    command = module("restore", tool, name, source, mesh, *flags)
    return Program(" ".join((tool, mesh, *flags)), source, command, **options)


def _extra(result: Result) -> str:
    """Peak memory beyond what was there before and the result: anonymous, and RSS."""
    runs = [Restored(**json.loads(run.stdout)) for run in result.runs]
    pairs = zip(*(run.extra_bytes for run in runs), strict=True)
    anonymous, rss = (statistics.median(sizes) / MIB for sizes in pairs)
    return f"{anonymous:.0f} MiB (RSS {rss:.0f} MiB)"


def restore(bench: Bench) -> Iterator[Row]:
    """W1 and W2 from 2x4 into live arrays, on 1x8 (columns) and 8x1 (rows): against Orbax, and
    against decoding every chunk once, while it is read from files into fresh memory.
    """
    meshes = ("1x8", "8x1")
    for name in ("W1", "W2"):
        source = bench.source(name)
        tools = [_program(bench, tool, name, mesh) for mesh in meshes for tool in TOOLS]
        bound = Program("decode bound", source, module("bound", source, "--decode-only", "--files"))
        results = compare_timed(bench, "restore", *tools, bound)
        decode = timed_seconds(results.pop())
        for mesh, ours, theirs in zip(meshes, results[::2], results[1::2], strict=True):
            what, seconds = f"{name} restored on {mesh}", timed_seconds(ours)
            yield Row(f"{what}: rate, of decoding's", "1.15", "1.35", rate(decode, seconds))
            faster = times(timed_seconds(theirs), seconds)
            yield Row(f"{what}: faster than Orbax", "2x", "2.4x", faster)


def _times_orbax(bench: Bench, section: str, name: str, mesh: str) -> str:
    """How many times faster than Orbax, which runs twice, a workload is restored."""
    programs = (
        _program(bench, "reshard", name, mesh),
        _program(bench, "orbax", name, mesh, rounds=2),
    )
    ours, theirs = compare_timed(bench, section, *programs)
    return times(timed_seconds(theirs), timed_seconds(ours))


def restore_replicated(bench: Bench) -> Iterator[Row]:
    """W1 on each of the eight devices, against Orbax, which fills eight copies; `reshard`'s
    devices, all of them simulated in one memory, share one.
    """
    faster = _times_orbax(bench, "restore_replicated", "W1", "replicated")
    yield Row("W1 restored, replicated: faster than Orbax", "8x", "15x", faster)


def restore_small(bench: Bench) -> Iterator[Row]:
    """W4, 5,000 small arrays, on 1x8, against Orbax."""
    faster = _times_orbax(bench, "restore_small", "W4", "1x8")
    yield Row("W4 restored on 1x8: faster than Orbax", "3x", "6x", faster)


def restore_raw(bench: Bench) -> Iterator[Row]:
    """W1 on 1x8, uncompressed against compressed."""
    ours, zstd = compare_timed(
        bench,
        "restore_raw",
        *(_program(bench, "reshard", name, "1x8") for name in ("W1-raw", "W1")),
    )
    faster = times(timed_seconds(zstd), timed_seconds(ours))
    yield Row("W1 uncompressed restored on 1x8: faster than compressed", "1.5x", "3x", faster)


def restore_first(bench: Bench) -> Iterator[Row]:
    """A plain pytree of one small array: the first call in a process, beyond the second one."""
    program = Program("first", bench.source("tiny"), module("first", bench.source("tiny")))
    (ours,) = compare_timed(bench, "restore_first", program)
    yield Row("first restore in a process", "0.1 s", "0.05 s", f"{timed_seconds(ours):.3f} s")


def restore_memory(bench: Bench) -> Iterator[Row]:
    """W1 at 256 MiB on every mesh: peak memory beyond the result."""
    flags = ("--max-memory", "256MiB")
    programs = [_program(bench, "reshard", "W1", mesh, *flags) for mesh in MESHES]
    results = compare_timed(bench, "restore_memory", *programs)
    for mesh, ours in zip(MESHES, results, strict=True):
        what = f"W1 restored on {mesh} at 256 MiB".replace("on replicated", "replicated")
        floor, reach = ("320 MiB", "256 MiB") if mesh == "1x8" else ("", "")
        yield Row(f"{what}: peak memory beyond the result", floor, reach, _extra(ours))


RESTORE_SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section
    for section in (
        restore,
        restore_replicated,
        restore_small,
        restore_raw,
        restore_first,
        restore_memory,
    )
}
