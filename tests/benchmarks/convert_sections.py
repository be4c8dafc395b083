"""What is measured of `reshard convert`, section by section, each against the figure to reach."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.bench import DST, RESHARD, Bench, Program, module
from tests.benchmarks.convert import MAPS
from tests.benchmarks.sections import MIB, Row, bound_seconds, peak_mib, times


def _program(bench: Bench, job: str, source: Path, *flags: str) -> Program:
    """`reshard convert` by the map of a job."""
    map_file = bench.scratch / f"{job}.toml"
    map_file.write_text(MAPS[job])
    command = [RESHARD, "convert", source, DST, "--to", "nnx", "--map", map_file, *flags]
    return Program("reshard", source, command)


def _orbax(job: str, name: str, source: Path, rounds: int | None = None) -> Program:
    return Program("orbax", source, module("convert", job, name, source, DST), rounds)


def convert_paths(bench: Bench) -> Iterator[Row]:
    """W1 and W2 (1.1 and 3.4 GB), of which only the paths change, against Orbax."""
    for name in ("W1", "W2"):
        source = bench.source(name)
        ours, theirs = bench.compare(
            "convert_paths",
            _program(bench, "rename", source),
            _orbax("rename", name, source, rounds=2),
        )
        speed = times(theirs.seconds, ours.seconds)
        yield Row(f"{name}, paths only: faster than Orbax", "50x", "", speed)
        written = f"{ours.output_bytes / MIB:.2f} MiB"
        yield Row(f"{name}, paths only: bytes in new files and shared ones", "", "", written)


def convert_fused(bench: Bench) -> Iterator[Row]:
    """W1 with its layers stacked, its head split and the new mesh, in one pass: against Orbax and
    JAX, and against the bound in fresh memory; then its peak RSS at 256 MiB."""
    source = bench.source("W1")
    program = _program(bench, "fused", source, "--mesh", "1x8")
    ours, theirs, bound = bench.compare(
        "convert_fused",
        program,
        _orbax("fused", "W1", source),
        Program("bound", source, module("bound", source)),
    )
    measured = times(ours.seconds, bound_seconds(bound))
    yield Row("W1 stacked, split, 1x8: time, of the bound's", "1.7x", "1.35x", measured)
    speed = times(theirs.seconds, ours.seconds)
    yield Row("W1 stacked, split, 1x8: faster than Orbax", "1.8x", "3x", speed)
    (small,) = bench.compare(
        "convert_fused",
        _program(bench, "fused", source, "--mesh", "1x8", "--max-memory", "256MiB"),
    )
    resident = f"{peak_mib(small, bench.baseline()):.0f} MiB"
    yield Row("W1 stacked, split, 1x8 at 256 MiB: peak RSS", "320 MiB", "256 MiB", resident)


CONVERT_SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section for section in (convert_paths, convert_fused)
}
