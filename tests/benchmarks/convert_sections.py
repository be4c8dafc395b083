"""What is measured of `reshard convert`, section by section, each against the figure to reach."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.bench import (
    DST,
    RESHARD,
    Bench,
    Program,
    compare_timed,
    module,
    timed_seconds,
)
from tests.benchmarks.convert import MAPS
from tests.benchmarks.sections import Row, peak, times


def _program(bench: Bench, job: str, source: Path, *flags: str) -> Program:
    """`reshard convert` by the map of a job."""
    map_file = bench.scratch / f"{job}.toml"
    map_file.write_text(MAPS[job])
    command = [RESHARD, "convert", source, DST, "--to", "nnx", "--map", map_file, *flags]
    return Program("reshard", source, command)


def _call(
    bench: Bench, tool: str, job: str, name: str, label: str, rounds: int | None = None
) -> Program:
    """A job done in Python, which times itself."""
    source = bench.source(name)
    return Program(label, source, module("convert", tool, job, name, source, DST), rounds)


def convert_paths(bench: Bench) -> Iterator[Row]:
    """W1 (1.1 GB) and the same arrays in 4.0 GB, of which only the paths change, against Orbax;
    whole processes, and the calls alone."""
    for name in ("W1", "W1-4GB"):
        command = _program(bench, "rename", bench.source(name))
        call = _call(bench, "reshard", "rename", name, "reshard, the call")
        orbax = _call(bench, "orbax", "rename", name, "orbax", rounds=3)
        (whole,) = bench.compare("convert_paths", command)
        ours, theirs = compare_timed(bench, "convert_paths", call, orbax)
        speed = times(timed_seconds(theirs), timed_seconds(ours))
        yield Row(f"{name}, paths only, the call: faster than Orbax", "50x", "", speed)
        speed = times(theirs.seconds, whole.seconds)
        yield Row(f"{name}, paths only, with start-up: faster than Orbax", "50x", "", speed)
        seconds = f"{timed_seconds(ours):.3f} s"
        yield Row(f"{name}, paths only, the call: time", "", "the same", seconds)


def convert_fused(bench: Bench) -> Iterator[Row]:
    """W1 with its layers stacked, its head split and the new mesh, in one pass: against Orbax and
    JAX, and against the bound in fresh memory; then its peak RSS at 256 MiB."""
    source = bench.source("W1")
    program = _program(bench, "fused", source, "--mesh", "1x8")
    ours, theirs, bound = bench.compare(
        "convert_fused",
        program,
        _call(bench, "orbax", "fused", "W1", "orbax"),
        Program("bound", source, module("bound", source)),
    )
    measured = times(ours.seconds, timed_seconds(bound))
    yield Row("W1 stacked, split, 1x8: time, of the bound's", "1.7x", "1.35x", measured)
    speed = times(theirs.seconds, ours.seconds)
    yield Row("W1 stacked, split, 1x8: faster than Orbax", "1.8x", "3x", speed)
    (small,) = bench.compare(
        "convert_fused",
        _program(bench, "fused", source, "--mesh", "1x8", "--max-memory", "256MiB"),
    )
    memory = peak(small, bench.baseline())
    yield Row("W1 stacked, split, 1x8 at 256 MiB: peak memory", "320 MiB", "256 MiB", memory)


CONVERT_SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section for section in (convert_paths, convert_fused)
}
