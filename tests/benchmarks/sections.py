"""What is measured of `reshard ckpt`, section by section, each against the figure to reach."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.bench import (
    DST,
    RESHARD,
    Bench,
    Program,
    Result,
    compare_timed,
    module,
    problem,
    reshard,
    timed_seconds,
)
from tests.benchmarks.measure import Baseline

MIB = 2**20

# One arena, and freed memory kept: what is touched once is used again.
KEEP_MEMORY = (
    "MALLOC_ARENA_MAX=1",
    "MALLOC_TRIM_THRESHOLD_=1073741824",
    "MALLOC_MMAP_THRESHOLD_=1073741824",
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    measure: str
    floor: str
    reach: str
    measured: str


def _orbax(name: str, source: Path, rounds: int | None = None) -> Program:
    return Program("orbax", source, module("orbax_reshard", name, source, DST), rounds)


def _copy(source: Path) -> Program:
    return Program("cp; sync", source, ["sh", "-c", 'cp -r "$1" "$2"; sync', "sh", source, DST])


def peak(result: Result, start: Baseline) -> str:
    """Peak memory above the imports: anonymous, and RSS."""
    anonymous = (result.anonymous_bytes - start.anonymous_bytes) / MIB
    return f"{anonymous:.0f} MiB (RSS {(result.peak_bytes - start.resident_bytes) / MIB:.0f} MiB)"


def times(slow: float, fast: float) -> str:
    """How many times longer the slow one takes, and both times in seconds, the slow one's first."""
    return f"{slow / fast:.2f}x ({slow:.2f} s to {fast:.2f} s)"


def rate(other: float, ours: float) -> str:
    """Our rate as a part of another's, and both times in seconds, ours first."""
    return f"{other / ours:.2f} ({ours:.2f} s to {other:.2f} s)"


def disk(bench: Bench) -> Iterator[Row]:
    """W1 and W2 from 2x4 to 1x8, with zstd: against Orbax, and against the bound, which is taken
    twice, once in fresh memory and once in memory touched before.
    """
    for name in ("W1", "W2"):
        source = bench.source(name)
        command = module("bound", source)
        ours, theirs, fresh, warm = bench.compare(
            "disk",
            reshard(source, "--to", "1x8"),
            _orbax(name, source),
            Program("bound", source, command),
            Program("bound, warm", source, ["env", *KEEP_MEMORY, *command, "--warm"]),
        )
        for memory, least in (("fresh", fresh), ("warm", warm)):
            measure = f"{name}: time, of the bound's in {memory} memory"
            measured = times(ours.seconds, timed_seconds(least))
            yield Row(measure, "1.4x", "1.2x", measured)
        speed = times(theirs.seconds, ours.seconds)
        yield Row(f"{name}: faster than Orbax", "2.8x", "3.3x", speed)
        size = ours.output_bytes / theirs.output_bytes
        yield Row(f"{name}: bytes written, of Orbax's", "1.02x", "", f"{size:.3f}x")


def raw(bench: Bench) -> Iterator[Row]:
    """W1 without compression, against `cp -r` and `sync`."""
    source = bench.source("W1-raw")
    ours, theirs = bench.compare("raw", reshard(source, "--to", "1x8"), _copy(source))
    measured = rate(theirs.seconds, ours.seconds)
    yield Row("W1 uncompressed: rate, of `cp -r; sync`'s", "0.6", "0.8", measured)


def database(bench: Bench) -> Iterator[Row]:
    """W1 from plain files into a database, whose chunks stay as they are, against `cp -r` and
    `sync`.
    """
    source = bench.source("W1-files")
    ours, theirs = bench.compare("database", reshard(source, "--ocdbt"), _copy(source))
    measured = times(ours.seconds, theirs.seconds)
    yield Row("W1, plain files to OCDBT: time, of `cp -r; sync`'s", "1.3x", "1x", measured)


def small(bench: Bench) -> Iterator[Row]:
    """W4, 5,000 small arrays, against Orbax, which takes most of a minute and runs twice."""
    source = bench.source("W4")
    ours, theirs = bench.compare(
        "small", reshard(source, "--to", "1x8"), _orbax("W4", source, rounds=2)
    )
    speed = times(theirs.seconds, ours.seconds)
    size = ours.output_bytes / theirs.output_bytes
    yield Row("W4: faster than Orbax", "12x", "20x", speed)
    yield Row("W4: bytes written, of Orbax's", "1.02x", "", f"{size:.3f}x")


def memory(bench: Bench) -> Iterator[Row]:
    """Peak memory of W1 and W1-opt at 256 MiB, and of W1 at 128 MiB."""
    for name, limit in (("W1", 128), ("W1", 256), ("W1-opt", 256)):
        flags = ("--to", "1x8", "--max-memory", f"{limit}MiB")
        (ours,) = bench.compare("memory", reshard(bench.source(name), *flags))
        floor, reach = f"{limit + limit // 4} MiB", f"{limit} MiB"
        found = peak(ours, bench.baseline())
        yield Row(f"{name} at {limit} MiB: peak memory", floor, reach, found)


def large(bench: Bench) -> Iterator[Row]:
    """W2 at 1 GiB, which is to hold, and at 256 MiB, to be refused or subdivided, once."""
    source = bench.source("W2")
    flags = ("--to", "1x8", "--max-memory")
    whole = reshard(source, *flags, "1GiB", label="1GiB")
    tight = reshard(source, *flags, "256MiB", label="256MiB", rounds=1, refuses=True)
    ours, less = bench.compare("large", whole, tight)
    start = bench.baseline()
    yield Row("W2 at 1 GiB: peak memory", "1280 MiB", "1024 MiB", peak(ours, start))
    last = less.runs[-1]
    bench.say(f"W2 at 256 MiB says:\n{last.stdout}{last.stderr}")
    answer = problem(last) if last.status else f"done: {less.seconds:.2f} s, {peak(less, start)}"
    yield Row("W2 at 256 MiB", "refused or subdivided, and why", "", answer)


def big(bench: Bench) -> Iterator[Row]:
    """One array of 2 GiB in 16 MiB chunks at 64 MiB.

    Shards of 1x8 are whole chunks, so those may be moved as they are stored; shards of 1x32 are
    narrower than a chunk, so every one is decoded.
    """
    source = bench.source("BIG")
    meshes = ("1x8", "1x32")
    results = bench.compare(
        "big",
        *(
            reshard(source, "--to", mesh, "--max-memory", "64MiB", label=f"--to {mesh}")
            for mesh in meshes
        ),
    )
    start = bench.baseline()
    for mesh, ours in zip(meshes, results, strict=True):
        measure = f"2 GiB array to {mesh} at 64 MiB: peak memory"
        yield Row(measure, "160 MiB", "96 MiB", peak(ours, start))


def keep(bench: Bench) -> Iterator[Row]:
    """What leaves every chunk as it is, on W1 and on W1-opt, which has three times the bytes."""
    jobs = {
        "--chunks keep": ("--to", "1x8", "--chunks", "keep"),
        "identity": ("--to", "2x4"),
        "relabel": ("--to", "dp=2,tp=4", "--axis", "data=dp", "--axis", "model=tp"),
    }
    sources = [bench.source(name) for name in ("W1", "W1-opt")]
    for label, flags in jobs.items():
        one, three = bench.compare(
            "keep", *(reshard(source, *flags, label=label) for source in sources)
        )
        measured = f"{one.seconds:.2f} s, {three.seconds:.2f} s"
        goals = ("no array byte moved", "time independent of bytes")
        yield Row(f"{label}: W1, W1-opt", *goals, measured)


def buckets(bench: Bench) -> Iterator[Row]:
    """W1 from a bucket to a bucket, both on loopback, with 50 ms more for each request, and
    without.
    """
    source = bench.source("W1")
    command = module("buckets", source)
    slow, fast = compare_timed(
        bench,
        "buckets",
        Program("50 ms a request", source, [*command, "--delay", "0.05"]),
        Program("without", source, command),
    )
    measured = times(timed_seconds(slow), timed_seconds(fast))
    yield Row("W1, bucket to bucket: time with 50 ms a request", "1.5x", "1.15x", measured)


def workers(bench: Bench) -> Iterator[Row]:
    """`--workers 2` against one process, on W1 and W4; and 4 workers against 1 where each request
    to the source takes 50 ms more and each worker has one at a time.
    """
    for name, floor, reach in (("W1", "0.95", "1.1"), ("W4", "1.2", "1.6")):
        source = bench.source(name)
        jobs = {"1 process": (), "--workers 2": ("--workers", "2")}
        one, two = bench.compare(
            "workers",
            *(reshard(source, "--to", "1x8", *more, label=label) for label, more in jobs.items()),
        )
        measured = rate(one.seconds, two.seconds)
        yield Row(f"{name}: rate of 2 workers, of 1 process's", floor, reach, measured)
    source = bench.source("W5-files")
    command = module("buckets", source, "--kind", "s3", "--delay", "0.05", "--out", DST)
    one, four = compare_timed(
        bench,
        "workers",
        *(
            Program(
                f"--workers {count}", source, [*command, "--concurrency", "1", "--workers", count]
            )
            for count in ("1", "4")
        ),
    )
    measured = times(timed_seconds(one), timed_seconds(four))
    yield Row("W5, from a bucket, 50 ms a request: 4 workers against 1", "3x", "3.8x", measured)


def start(bench: Bench) -> Iterator[Row]:
    """`reshard --help`, ten times."""
    ten = Bench(bench.scratch, 10, bench.say, bench.log)
    program = Program("--help", Path(__file__).parent, [RESHARD, "--help"])
    (ours,) = ten.compare("start", program)
    yield Row("`reshard --help`", "0.3 s", "0.15 s", f"{ours.seconds:.2f} s")


CKPT_SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section
    for section in (disk, raw, database, small, memory, large, big, keep, buckets, workers, start)
}
