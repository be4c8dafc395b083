"""What is measured, section by section, each against the figure to reach."""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tests.benchmarks.job import MAPS
from tests.benchmarks.measure import Baseline, run
from tests.benchmarks.restore import MESHES, TOOLS, Restored

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


def _called(
    bench: Bench, tool: str, job: str, name: str, label: str, rounds: int | None = None
) -> Program:
    """A job done in Python, which times itself."""
    source = bench.source(name)
    return Program(label, source, module("job", tool, job, name, source, DST), rounds)


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
            reshard(source, "--to", "1x8"),
            _called(bench, "orbax", "mesh", name, "orbax"),
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
    ours, theirs = bench.compare(reshard(source, "--to", "1x8"), _copy(source))
    measured = rate(theirs.seconds, ours.seconds)
    yield Row("W1 uncompressed: rate, of `cp -r; sync`'s", "0.6", "0.8", measured)


def small(bench: Bench) -> Iterator[Row]:
    """W4, 5,000 small arrays, against Orbax, which takes most of a minute and runs twice."""
    ours, theirs = bench.compare(
        reshard(bench.source("W4"), "--to", "1x8"),
        _called(bench, "orbax", "mesh", "W4", "orbax", rounds=2),
    )
    speed = times(theirs.seconds, ours.seconds)
    size = ours.output_bytes / theirs.output_bytes
    yield Row("W4: faster than Orbax", "12x", "20x", speed)
    yield Row("W4: bytes written, of Orbax's", "1.02x", "", f"{size:.3f}x")


def memory(bench: Bench) -> Iterator[Row]:
    """Peak memory of W1 and W1-opt at 256 MiB, and of W1 at 128 MiB."""
    for name, limit in (("W1", 128), ("W1", 256), ("W1-opt", 256)):
        flags = ("--to", "1x8", "--max-memory", f"{limit}MiB")
        (ours,) = bench.compare(reshard(bench.source(name), *flags))
        floor, reach = f"{limit + limit // 4} MiB", f"{limit} MiB"
        found = peak(ours, bench.baseline())
        yield Row(f"{name} at {limit} MiB: peak memory", floor, reach, found)


def large(bench: Bench) -> Iterator[Row]:
    """W2 at 1 GiB, which is to hold, and at 256 MiB, to be refused or subdivided, once."""
    source = bench.source("W2")
    flags = ("--to", "1x8", "--max-memory")
    whole = reshard(source, *flags, "1GiB", label="1GiB")
    tight = reshard(source, *flags, "256MiB", label="256MiB", rounds=1, refuses=True)
    ours, less = bench.compare(whole, tight)
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
    meshes, limit = ("1x8", "1x32"), ("--max-memory", "64MiB")
    jobs = [reshard(source, "--to", mesh, *limit, label=f"--to {mesh}") for mesh in meshes]
    results = bench.compare(*jobs)
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
        one, three = bench.compare(*(reshard(source, *flags, label=label) for source in sources))
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
        Program("50 ms a request", source, [*command, "--delay", "0.05"]),
        Program("without", source, command),
    )
    measured = times(timed_seconds(slow), timed_seconds(fast))
    yield Row("W1, bucket to bucket: time with 50 ms a request", "1.5x", "1.15x", measured)
    chain = (timed_seconds(slow) - timed_seconds(fast)) / 0.05
    measure = "W1, bucket to bucket: requests that wait for one another"
    yield Row(measure, "40", "30", f"{chain:.0f}")


def workers(bench: Bench) -> Iterator[Row]:
    """`--workers 2` against one process, on W1 and W4; and 4 workers against 1 where each request
    to the source takes 50 ms more and each worker has one at a time.
    """
    for name, floor, reach in (("W1", "0.95", "1.1"), ("W4", "1.2", "1.6")):
        source = bench.source(name)
        jobs = {"1 process": (), "--workers 2": ("--workers", "2")}
        one, two = bench.compare(
            *(reshard(source, "--to", "1x8", *more, label=label) for label, more in jobs.items())
        )
        measured = rate(one.seconds, two.seconds)
        yield Row(f"{name}: rate of 2 workers, of 1 process's", floor, reach, measured)
    source = bench.source("W5-files")
    command = module("buckets", source, "--kind", "s3", "--delay", "0.05", "--out", DST)
    command += ["--concurrency", "1", "--workers"]
    jobs = [Program(f"--workers {count}", source, [*command, count]) for count in ("1", "4")]
    one, four = compare_timed(bench, *jobs)
    measured = times(timed_seconds(one), timed_seconds(four))
    yield Row("W5, from a bucket, 50 ms a request: 4 workers against 1", "3x", "3.8x", measured)


# `reshard.restore`: the seconds are those of the call alone, which `restore.py` takes inside the
# measured process. They are said once the rounds are over; what each round says is of the whole
# process, start-up included.


def _restored(
    bench: Bench, tool: str, name: str, mesh: str, *flags: str, **options: Any
) -> Program:
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
        tools = [_restored(bench, tool, name, mesh) for mesh in meshes for tool in TOOLS]
        bound = Program("decode bound", source, module("bound", source, "--decode-only", "--files"))
        results = compare_timed(bench, *tools, bound)
        decode = timed_seconds(results.pop())
        for mesh, ours, theirs in zip(meshes, results[::2], results[1::2], strict=True):
            what, seconds = f"{name} restored on {mesh}", timed_seconds(ours)
            yield Row(f"{what}: rate, of decoding's", "1.15", "1.35", rate(decode, seconds))
            faster = times(timed_seconds(theirs), seconds)
            yield Row(f"{what}: faster than Orbax", "2x", "2.4x", faster)


def _times_orbax(bench: Bench, name: str, mesh: str) -> str:
    """How many times faster than Orbax, which runs twice, a workload is restored."""
    ours = _restored(bench, "reshard", name, mesh)
    theirs = _restored(bench, "orbax", name, mesh, rounds=2)
    return times(*map(timed_seconds, compare_timed(bench, theirs, ours)))


def restore_replicated(bench: Bench) -> Iterator[Row]:
    """W1 on each of the eight devices, against Orbax, which fills eight copies; `reshard`'s
    devices, all of them simulated in one memory, share one.
    """
    faster = _times_orbax(bench, "W1", "replicated")
    yield Row("W1 restored, replicated: faster than Orbax", "8x", "15x", faster)


def restore_small(bench: Bench) -> Iterator[Row]:
    """W4, 5,000 small arrays, on 1x8, against Orbax."""
    faster = _times_orbax(bench, "W4", "1x8")
    yield Row("W4 restored on 1x8: faster than Orbax", "3x", "6x", faster)


def restore_memory(bench: Bench) -> Iterator[Row]:
    """W1 at 256 MiB on every mesh: peak memory beyond the result."""
    flags = ("--max-memory", "256MiB")
    programs = [_restored(bench, "reshard", "W1", mesh, *flags) for mesh in MESHES]
    results = compare_timed(bench, *programs)
    for mesh, ours in zip(MESHES, results, strict=True):
        what = f"W1 restored on {mesh} at 256 MiB".replace("on replicated", "replicated")
        floor, reach = ("320 MiB", "256 MiB") if mesh == "1x8" else ("", "")
        yield Row(f"{what}: peak memory beyond the result", floor, reach, _extra(ours))


# `reshard convert`.


def _converted(bench: Bench, job: str, source: Path, *flags: str) -> Program:
    """`reshard convert` by the map of a job."""
    map_file = bench.scratch / f"{job}.toml"
    map_file.write_text(MAPS[job])
    command = [RESHARD, "convert", source, DST, "--to", "nnx", "--map", map_file, *flags]
    return Program("reshard", source, command)


def convert_paths(bench: Bench) -> Iterator[Row]:
    """W1 (1.1 GB) and the same arrays in 4.0 GB, of which only the paths change, against Orbax;
    whole processes, and the calls alone."""
    for name in ("W1", "W1-4GB"):
        command = _converted(bench, "rename", bench.source(name))
        call = _called(bench, "reshard", "rename", name, "reshard, the call")
        orbax = _called(bench, "orbax", "rename", name, "orbax", rounds=3)
        (whole,) = bench.compare(command)
        ours, theirs = compare_timed(bench, call, orbax)
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
    program = _converted(bench, "fused", source, "--mesh", "1x8")
    ours, theirs, bound = bench.compare(
        program,
        _called(bench, "orbax", "fused", "W1", "orbax"),
        Program("bound", source, module("bound", source)),
    )
    measured = times(ours.seconds, timed_seconds(bound))
    yield Row("W1 stacked, split, 1x8: time, of the bound's", "1.7x", "1.35x", measured)
    speed = times(theirs.seconds, ours.seconds)
    yield Row("W1 stacked, split, 1x8: faster than Orbax", "1.8x", "3x", speed)
    (small,) = bench.compare(
        _converted(bench, "fused", source, "--mesh", "1x8", "--max-memory", "256MiB")
    )
    memory = peak(small, bench.baseline())
    yield Row("W1 stacked, split, 1x8 at 256 MiB: peak memory", "320 MiB", "256 MiB", memory)


# What trust costs: digests in a save, and reading a checkpoint to verify it.


def digests(bench: Bench) -> Iterator[Row]:
    """W1 from 2x4 to 1x8, with digests and without."""
    ours, without = compare_timed(
        bench,
        _called(bench, "reshard", "mesh", "W1", "with digests"),
        _called(bench, "without-digests", "mesh", "W1", "without"),
    )
    more = timed_seconds(ours) / timed_seconds(without) - 1
    yield Row("W1: wall time that digests add", "15%", "5%", f"{more:.1%}")


def verify(bench: Bench) -> Iterator[Row]:
    """W1 and W2 verified, against decoding every chunk once in memory; start-up included."""
    for name in ("W1", "W2"):
        source = bench.source(name)
        (ours,) = bench.compare(Program("verify", source, [RESHARD, "verify", source]))
        bound = Program("decode bound", source, module("bound", source, "--decode-only"))
        (decode,) = compare_timed(bench, bound)
        measured = rate(timed_seconds(decode), ours.seconds)
        yield Row(f"{name} verified: rate, of decoding's", "0.7", "0.9", measured)


# Hugging Face's format.

SPECS = ("--spec", "(q|k|v|gate|up|lm_head)$=data,model", "--spec", "(o|down|embed)$=model,data")


def safetensors(bench: Bench) -> Iterator[Row]:
    """W2 to one safetensors file and back, and restored from it: against decoding and encoding it
    once, and against Orbax; peak memory at 256 MiB; and 723 tensors in 30 files planned."""
    source, w1 = bench.source("W2"), bench.source("W1")
    flags = ("--max-memory", "256MiB")
    export = Program("reshard export", source, [RESHARD, "export", source, DST])
    script = Program(
        "Orbax, save_file", source, module("safetensors", "save", "W2", source, DST), rounds=2
    )
    decode = Program("decode bound", source, module("bound", source, "--decode-only", "--files"))
    ours, theirs, bound = bench.compare(export, script, decode)
    measured = times(ours.seconds, timed_seconds(bound))
    yield Row("W2 exported: time, of decoding's", "1.6x", "1.2x", measured)
    speed = times(theirs.seconds, ours.seconds)
    yield Row("W2 exported: faster than Orbax and save_file", "1.5x", "3x", speed)
    files = bench.scratch / "W2-safetensors"
    if not files.exists():
        run([RESHARD, "export", source, files])
    ckpt = [RESHARD, "ckpt", files, DST, "--to", "data=1,model=8", *SPECS]
    imported, bound = bench.compare(
        Program("reshard ckpt", files, ckpt), Program("bound", source, module("bound", source))
    )
    encode = statistics.median(json.loads(each.stdout)["encode"] for each in bound.runs)
    measured = times(imported.seconds, encode)
    yield Row("W2 from safetensors to 1x8: time, of encoding's", "1.5x", "1.15x", measured)
    small = bench.compare(
        # A stored chunk of W2 does not fit into it.
        Program("export at 256 MiB", w1, [RESHARD, "export", w1, DST, *flags]),
        Program("ckpt at 256 MiB", files, [*ckpt, *flags]),
    )
    for name, result in zip(("W1 to", "W2 from"), small, strict=True):
        measured = peak(result, bench.baseline())
        yield Row(f"{name} safetensors at 256 MiB: peak memory", "320 MiB", "256 MiB", measured)
    restored = [
        Program(tool, files, module("safetensors", tool, "W2", files), rounds)
        for tool, rounds in (("reshard", None), ("orbax", 2))
    ]
    faster, slower = map(timed_seconds, compare_timed(bench, *restored))
    yield Row("W2 restored from it: faster than Orbax", "1.5x", "3x", times(slower, faster))
    (planned,) = compare_timed(bench, Program("plan", files, module("safetensors", "plan")))
    measured = f"{timed_seconds(planned):.2f} s"
    yield Row("723 tensors in 30 files, opened and planned", "0.5 s", "0.2 s", measured)


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section
    for section in (
        *(disk, raw, small, memory, large, big, keep, buckets, workers),
        *(restore, restore_replicated, restore_small, restore_memory),
        *(convert_paths, convert_fused, digests, verify, safetensors),
    )
}
