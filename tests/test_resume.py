"""Killed and stopped jobs: what they leave, and what a later run with `resume` makes of it."""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import json
import operator
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import jobs
import layouts
import orbax.checkpoint as ocp
import pytest
from jobs import (
    EARLIER,
    FORMATS,
    MAP,
    MARKER,
    MEMORY,
    PROGRESS,
    RECORD,
    RESHARD,
    StopError,
    assert_pruned,
    changed,
    ended,
    flip,
    make,
    save,
    started,
    stop_at,
    touched,
)
from layouts import hashes, kept, unfinished
from sampling import few, some

import reshard
from reshard.engine.budget import WINDOW
from reshard.engine.read import Filled
from reshard.units import format_bytes, parse_bytes
from reshard.verify import verification

pytestmark = pytest.mark.usefixtures("forked")
# A function has its name.
executing = importlib.import_module("reshard.writer.execution")
ANEW = "hint: without resume=True the job begins anew"
REMOVED = "hint: the same call begins anew: what was kept is removed"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Sources by kind and size, made once: `ckpt zarr2`, ... A job of a large one takes half a
    second."""
    before = {}

    @functools.cache
    def made(kind, size):
        path = tmp_path_factory.mktemp(kind.replace(" ", "-")) / "source"
        source = make(path, kind, {"large": 12, "small": 6, "tiny": 2}[size])
        before[source] = hashes(source)
        return source

    yield lambda kind, size="small": made(kind, size)
    assert {path: hashes(path) for path in before} == before


# What is to be there.


def files(path):
    """Every file, less those of B-trees and of arrays in OCDBT, and what tells of their packing."""
    found = {}
    for name, digest in hashes(path).items():
        parts = name.split("/")
        if "d" in parts or parts[-1] in ("manifest.ocdbt", "ocdbt.process_0"):
            continue
        if parts[-1] == MARKER:
            digest = "the commit marker"
        if parts[-1] == RECORD:
            digest = json.loads((path / name).read_bytes())
            digest["files"].pop("manifest.ocdbt", None)
        found[name] = digest
    return found


def digested(found):
    """All there is to some leaves, as a digest: what is expected of many jobs is kept."""
    return {key: hashlib.sha256(repr(leaf).encode()).digest() for key, leaf in found.items()}


def values(path):
    steps = reshard.open(path).source.steps or (None,)
    return [digested(jobs.values(path, step=step)) for step in steps]


def restored(path):
    """What Orbax reads."""
    trees = [layouts.load_pytree(file.parent) for file in sorted(path.rglob("_METADATA"))]
    return [digested({k: layouts.bits(x) for k, x in layouts.flat(t).items()}) for t in trees]


@pytest.fixture(scope="module")
def expected(sources, tmp_path_factory):
    """What an uninterrupted job makes of a source: kind -> its path, values, and what Orbax reads
    of it."""

    @functools.cache
    def made(kind, size):
        path = tmp_path_factory.mktemp("whole") / "out"
        save(sources(kind, size), path)
        assert_pruned(path)
        return path, values(path), restored(path)

    return lambda kind, size="small": made(kind, size)


def assert_same(out, expected, killed=False):
    """The destination is what an uninterrupted job makes, and nothing else is beside it: but what
    may be left of a lock, where the job was killed."""
    path, arrays, *_ = expected
    left = unfinished(out)
    if killed and left.exists():
        assert all(name.startswith("lock") for name in os.listdir(left))
        assert set(os.listdir(out.parent)) == {out.name, left.name}
    else:
        assert os.listdir(out.parent) == [out.name]
    assert files(out) == files(path)
    assert values(out) == arrays
    assert_pruned(out)


def assert_whole(out, expected, killed=False):
    """And Orbax reads it."""
    assert_same(out, expected, killed)
    assert restored(out) == expected[2]


def assert_absent(out):
    """Nothing is there that could be opened."""
    assert set(os.listdir(out.parent)) <= {unfinished(out).name}
    with pytest.raises(reshard.CheckpointNotFoundError):
        reshard.open(out)
    for temporary in unfinished(out).glob("*.orbax-checkpoint-tmp"):
        with pytest.raises(reshard.UncommittedCheckpointError):
            reshard.open(temporary)
        with pytest.raises(ValueError, match="incomplete checkpoint"):
            ocp.PyTreeCheckpointer().restore(temporary)


def status_of(path):
    """Enough of each file to know that nobody has written to it."""
    found = {file: os.stat(file) for file in path.rglob("*") if file.is_file()}
    return {file: (s.st_size, s.st_mtime_ns, s.st_ino) for file, s in found.items()}


# SIGKILL at random moments.

KINDS = [f"ckpt {name}" for name in (*FORMATS, "manager")] + [f"convert {name}" for name in FORMATS]
# 50 for each command and mode.
KILLS = {"ckpt": len(some(range(10))), "convert": len(some(range(13)))}
SIZE = some(["small", "large"])[-1]
KILLED = [(kind, resume) for kind in KINDS for resume in (False, True)]
SOME_KILLED = [
    *(("ckpt zarr2", False), ("ckpt zarr3-files", True)),
    *(("convert zarr3-files", False), ("convert zarr2", True)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "resume"), few(KILLED, *SOME_KILLED))
def test_killed_at_random_moments(sources, expected, tmp_path, kind, resume):
    source, whole = sources(kind, SIZE), expected(kind, SIZE)
    before = status_of(source)
    out = tmp_path / "out"
    seconds = []
    for _ in range(2):  # what a job takes that nobody kills
        begin = time.perf_counter()
        assert ended(started(source, out, {"resume": resume})) == 0
        seconds.append(time.perf_counter() - begin)
        shutil.rmtree(out)
    rng = random.Random(kind)
    kills = 0
    while kills < KILLS[kind.split()[0]]:
        begin = time.perf_counter() + rng.uniform(0, 1.1 * min(seconds))
        process = started(source, out, {"resume": resume})
        time.sleep(max(begin - time.perf_counter(), 0))
        process.kill()
        kills += ended(process) != 0
        assert status_of(source) == before
        if out.exists():
            assert_whole(out, whole, killed=True)
            shutil.rmtree(out)
        else:
            assert_absent(out)
    assert ended(started(source, out, {"resume": resume})) == 0
    assert_whole(out, whole)


# SIGKILL at moments of interest.

# Which call of what.
MOMENTS = [
    ("reshard.writer.siblings:Location.copy", 1),
    ("reshard.writer.database:posix.link", 2),
    ("os:replace", 1),
    ("os:replace", 4),
    ("reshard.engine.budget:Reservation.free_after", 3),
    ("reshard.writer.journal:ItemProgress.value_batch", 1),
    ("reshard.writer.journal:ItemProgress.box_batch", 5),
    ("reshard.writer.database:merge", 1),
    ("os:unlink", 2),
    ("os:unlink", 7),
    ("reshard.writer.database:prune", 1),
    ("reshard.writer.orbax_documents:documents", 1),
    *(("reshard.writer.execution:records", count) for count in (1, 2)),
    ("reshard.writer.execution:write_markers", 1),
    ("reshard.writer.journal:Journal.close", 1),
    ("os:rename", 1),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["ckpt manager", "convert zarr3-files"])
def test_killed_at_a_moment_of_interest(sources, expected, tmp_path, kind):
    """Before it, and then after it, unless the job is done by then."""
    source, whole = sources(kind, "tiny"), expected(kind, "tiny")
    out = tmp_path / "out"
    killed = 0
    moments = some(MOMENTS)
    for name, count in moments:
        for after in (False, True):
            killed += ended(started(source, out, {"resume": True}, [name], count, after)) != 0
            if out.exists():
                break
            assert_absent(out)
        else:
            assert ended(started(source, out, {"resume": True})) == 0
        assert_same(out, whole, killed=True)
        shutil.rmtree(out)
    assert killed > len(moments) // 2


# Stopped in this process.


always = pytest.fixture(jobs.note_all)


def kept_note(out, call="call with resume=True"):
    return f"`{unfinished(out)}` is kept: the same {call} goes on with it"


def stopped(source, out, part=0.6, **options):
    """A job that is stopped in the middle; its temporary directory."""
    with pytest.raises(StopError) as caught:
        save(source, out, resume=True, progress=stop_at(part), **options)
    assert caught.value.__notes__ == [kept_note(out)]
    assert os.listdir(out.parent) == [unfinished(out).name]
    assert os.listdir(unfinished(out)) == [kept(out).name]
    return kept(out)


def noted(temporary):
    """What is noted of the first item."""
    return json.loads((temporary / PROGRESS).read_bytes())["job"]["items"][0]


def progress_of(temporary):
    """How far it is."""
    return operator.itemgetter("values", "batches", "merged")(noted(temporary))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "kind", few(["ckpt zarr2", "ckpt zarr2-files", "convert zarr3"], "ckpt zarr2", "convert zarr3")
)
def test_stopped_again_and_again(sources, expected, tmp_path, kind):
    out = tmp_path / "out"
    far = [progress_of(stopped(sources(kind), out, part / 5)) for part in range(6)]
    assert far == sorted(far) and len(set(far)) > 3
    save(sources(kind), out, resume=True)
    assert_whole(out, expected(kind))


@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt zarr2-files"])
def test_only_what_was_in_flight_is_done_again(sources, expected, tmp_path, monkeypatch, kind):
    """All that was written by then is noted when a job is stopped."""
    out, written, free_after = tmp_path / "out", [], Filled.free_after
    monkeypatch.setattr(
        Filled, "free_after", lambda *of: written.append(of[0].batch) or free_after(*of)
    )
    save(sources(kind), out)
    every = len(written)
    shutil.rmtree(out)
    written.clear()
    _, batches, _ = progress_of(stopped(sources(kind), out))
    assert 4 < batches == len(written) < every
    save(sources(kind), out, resume=True)
    # A batch that waits to be committed keeps less than while it is read.
    assert every <= len(written) <= every + 2 * WINDOW
    assert_same(out, expected(kind))


@pytest.mark.usefixtures("always")
def test_another_number_of_cores(sources, tmp_path, monkeypatch):
    source, path, out = sources("ckpt zarr2"), tmp_path / "whole", tmp_path / "new" / "out"
    save(source, path, max_memory="64MiB")
    monkeypatch.setattr("reshard.engine.budget.IN_FLIGHT_PER_CORE", 4 << 20)
    far = []
    for cores, part in ((1, 0.4), (16, 0.8)):
        monkeypatch.setattr(executing, "cores", lambda cores=cores: cores)
        far.append(progress_of(stopped(source, out, part, max_memory="64MiB")))
    assert (0, 0, False) < far[0] < far[1]
    monkeypatch.setattr(executing, "cores", lambda: 1)
    save(source, out, resume=True, max_memory="64MiB")
    assert_same(out, (path, values(path)))


@pytest.mark.usefixtures("always")
def test_links_that_are_forbidden_at_times(sources, expected, tmp_path, monkeypatch):
    kind, out = "ckpt zarr3", tmp_path / "out"

    def forbidden(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    # Stopped before all values are copied, and without links ever after.
    for part, forbids in ((0.3, False), (0.1, True), (0.2, True), (0.5, False), (1, False)):
        with monkeypatch.context() as patch:
            if forbids:
                patch.setattr(os, "link", forbidden)
            if part < 1:
                stopped(sources(kind), out, part)
            else:
                assert save(sources(kind), out, resume=True).shared_bytes == 0
    assert_same(out, expected(kind))


@pytest.mark.usefixtures("always")
def test_other_checks_and_overwrite_are_no_other_job(sources, expected, tmp_path):
    """The old destination stays until the new one is complete."""
    kind, out = "ckpt zarr2", tmp_path / "out"
    stopped(sources(kind), out, 0.3)
    save(sources("ckpt zarr3"), tmp_path / "old")
    (tmp_path / "old").rename(out)
    before = hashes(out)
    with pytest.raises(StopError):
        save(sources(kind), out, resume=True, overwrite=True, progress=stop_at(0.6))
    assert hashes(out) == before
    assert sorted(os.listdir(tmp_path)) == [unfinished(out).name, "out"]
    far, seen = progress_of(kept(out)), []

    def progress(*_):
        seen.append(progress_of(kept(out)))

    save(sources(kind), out, resume=True, overwrite=True, verify=True, progress=progress)
    assert seen[0] >= far > (0, 0, False)
    assert_same(out, expected(kind))


# Nothing to go on with.


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_job_without_resume_left_and_what_it_finds_is_removed(
    sources, expected, tmp_path, resumed
):
    kind, out = "ckpt zarr2-files", tmp_path / "out"
    if resumed:
        name = "reshard.writer.orbax_documents:documents"
        assert ended(started(sources(kind), out, {"resume": False}, [name], 1)) == -signal.SIGKILL
    else:
        stopped(sources(kind), out)
    (kept(out) / "junk").write_text("half")
    (unfinished(out) / "lock.0123").write_text("of a job that was killed as it removed its lock")
    save(sources(kind), out, resume=resumed)
    assert_whole(out, expected(kind))


def test_stopped_before_anything_is_written(sources, tmp_path, monkeypatch):
    def interrupt(*_):
        raise StopError

    monkeypatch.setattr(executing, "clear", interrupt)
    with pytest.raises(StopError) as caught:
        save(sources("ckpt zarr2"), tmp_path / "out", resume=True)
    assert not hasattr(caught.value, "__notes__")
    assert os.listdir(tmp_path) == []


def test_half_written_files_and_a_source_that_holds_a_progress_file(sources, expected, tmp_path):
    kind, out = "ckpt zarr2-files", tmp_path / "new" / "out"
    source = shutil.copytree(sources(kind), tmp_path / "source")
    (source / PROGRESS).write_text("{}")
    temporary = stopped(source, out)
    (temporary / f"{PROGRESS}.new").write_text("{")
    for name in ("params.kept0", "params.w5"):
        (temporary / name).mkdir(exist_ok=True)
        (temporary / name / "0.0.__lock").write_bytes(b"half a chunk" * 100_000)
    save(source, out, resume=True)
    assert_same(out, expected(kind))


# Refusals.


def refused(text, source, out, call=save, **options):
    options = {"resume": True} | options
    error = jobs.refused(reshard.DestinationError, text, call, source, out, **options)
    assert not hasattr(error, "__notes__")


def another_job(temporary, *problems, hint=None):
    hints = [f"hint: {hint}", ANEW] if hint else [ANEW]
    lines = [f"the unfinished job in `{temporary}` is another one", *problems]
    return "\n  ".join(lines) + "\n\n" + "\n".join(hints)


def other_arguments(temporary):
    return another_job(temporary, "other arguments", hint="the arguments that it had")


def other_memory(temporary, now):
    problem = f"max_memory: 3.00 MiB then, {now} now; it decides what is rewritten together"
    return another_job(temporary, problem, hint=f'max_memory="{MEMORY}"')


ARGUMENTS = [
    lambda c: (reshard.to_mesh(c, "1x4", [("serial", ("model", None))]), {}),
    lambda c: (reshard.cast(c, "bfloat16", "params/kept0"), {}),
    lambda c: (reshard.select(c, drop="none"), {}),
    lambda c: (reshard.rename(c, [("w0", "u0")]), {}),
    lambda c: (reshard.to_mesh(c, "1x8", [("w0", ("model",))]), {}),
    lambda c: (c, {"chunks": "64KiB"}),
    lambda c: (c, {"chunks": "keep"}),
]


def test_other_arguments(sources, expected, tmp_path, monkeypatch):
    kind, out = "ckpt zarr2-files", tmp_path / "out"
    temporary = stopped(sources(kind), out)
    before = hashes(temporary)
    for change in ARGUMENTS:
        ckpt, options = change(*changed(sources(kind)))
        options = {"call": reshard.save, "max_memory": MEMORY} | options
        refused(other_arguments(temporary), ckpt, out, **options)
        assert hashes(temporary) == before
    for memory, text in (("4MiB", "4.00 MiB"), ("1GiB", "1.00 GiB"), (3 << 20 | 1, "3.00 MiB")):
        refused(other_memory(temporary, text), sources(kind), out, max_memory=memory)
    with monkeypatch.context() as patch:
        now = importlib.metadata.version("reshard")
        patch.setattr(importlib.metadata, "version", lambda _: "99.1")
        problem = f"reshard {now} then, 99.1 now"
        refused(another_job(temporary, problem), sources(kind), out)
    # In the same process: each refusal has given its lock back; and with the memory that was named.
    save(sources(kind), out, resume=True, max_memory=MEMORY)
    assert_same(out, expected(kind))


def test_memory_that_is_no_whole_number_of_units(sources, tmp_path):
    source, out = sources("ckpt zarr2"), tmp_path / "out"
    for memory, text in ((3072 << 10 | 1, "3145729"), (3073 << 10, "3073KiB"), ("2GiB", "2GiB")):
        temporary = stopped(source, out, 0.1, max_memory=memory)
        with pytest.raises(reshard.DestinationError) as caught:
            save(source, out, resume=True)
        assert caught.value.hints[0] == f'max_memory="{text}"'
        shutil.rmtree(temporary)


def test_other_memory_for_the_same_plan(sources, tmp_path):
    """The batches are others."""
    source, out = sources("convert zarr2"), tmp_path / "out"
    (ckpt,) = changed(source)
    plans = [reshard.plan(ckpt, max_memory=memory).arrays for memory in (MEMORY, "3200KiB")]
    assert repr(plans[0]) == repr(plans[1])
    text = other_memory(stopped(source, out), "3.12 MiB")
    refused(text, source, out, max_memory="3200KiB")


def test_without_links_is_another_job(sources, tmp_path):
    """Also where only what is in the B-tree itself stays in its place."""
    source, out = sources("ckpt zarr2"), tmp_path / "out"
    temporary = stopped(source, out, chunks="64KiB")
    refused(other_arguments(temporary), source, out, chunks="64KiB", link=False)
    save(source, out, chunks="64KiB", resume=True)


def test_other_steps(sources, tmp_path):
    source, out = sources("ckpt manager"), tmp_path / "out"
    temporary = stopped(source, out)
    one, two = (f"`{source}/{step}/default`" for step in (1, 2))
    for steps, now in (([0], one), ([1], two), ([1, 0], f"{two} and {one}")):
        ckpts = [changed(source)[step] for step in steps]
        text = another_job(temporary, f"the source: {one} and {two} then, {now} now")
        refused(text, ckpts, out, call=reshard.save, max_memory=MEMORY)


def test_another_conversion(sources, tmp_path):
    source = shutil.copytree(sources("convert zarr2"), tmp_path / "source")
    out = tmp_path / "new" / "out"
    (tmp_path / "map.toml").write_text(MAP)
    temporary = stopped(source, out)
    swapped = MAP.replace("left", "middle").replace("right", "left").replace("middle", "right")
    (tmp_path / "map.toml").write_text(swapped)
    refused(other_arguments(temporary), source, out)


def grown(file):
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    with file.open("ab") as stream:
        stream.write(b"\0")
    os.utime(file, ns=times)


def replaced(file):
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)


def gone_beside(file):
    touched(file)
    (file.parent / "another").write_text("")


@pytest.mark.parametrize("kind", ["ckpt zarr3", "ckpt zarr2-files"])
@pytest.mark.parametrize("change", [touched, grown, replaced, gone_beside])
def test_another_source(sources, expected, tmp_path, kind, change):
    source = shutil.copytree(sources(kind), tmp_path / "source")
    out = tmp_path / "new" / "out"
    temporary = stopped(source, out)
    data = sorted(file for file in source.glob("**/*") if file.is_file() and file.parent != source)
    change(data[-1])
    refused(another_job(temporary, f"the source has changed since: `{source}`"), source, out)
    if change in (touched, replaced):
        save(source, out)
        assert_same(out, expected(kind))


@pytest.mark.usefixtures("always")
def test_an_array_with_the_name_of_what_is_beside_it(sources, tmp_path):
    """What was staged of it stays, also where absent chunks would be its fill value."""
    source = shutil.copytree(sources("ckpt zarr2-files"), tmp_path / "source")
    (source / "taken").mkdir()
    (source / "taken" / "notes").write_text("rain")
    (ckpt,) = changed(source)
    ckpt = reshard.rename(ckpt, [("^params/kept0$", "taken")])

    def saved(out, **options):
        reshard.save(ckpt, out, max_memory=MEMORY, link=False, **options)

    saved(tmp_path / "whole")
    out = tmp_path / "new" / "out"
    with pytest.raises(StopError):
        saved(out, resume=True, progress=stop_at(0.6))
    saved(out, resume=True)
    assert files(out) == files(tmp_path / "whole")
    assert values(out) == values(tmp_path / "whole")


# Digests that are recorded meanwhile.


@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt zarr2-files", "ckpt manager"])
def test_digests_are_recorded_while_a_job_reads(sources, expected, tmp_path, kind):
    source = shutil.copytree(sources(kind, "tiny"), tmp_path / "source")
    out, recorded = tmp_path / "new" / "out", []

    def progress(done, whole):
        if not recorded:
            assert done < whole / 4
            recorded.append(reshard.digest(source, write=True))

    save(source, out, progress=progress)
    assert_same(out, expected(kind, "tiny"))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["ckpt zarr2", "convert zarr2-files"])
def test_digests_are_recorded_between_two_runs(sources, tmp_path, kind):
    """The result is that of a job that had them from the beginning."""
    source = tmp_path / "source" / "saved"
    shutil.copytree(sources(kind).parent, source.parent)
    (source.parent / "source").rename(source)
    out = tmp_path / "new" / "out"
    stopped(source, out)
    reshard.digest(source, write=True)
    seen = []
    save(source, out, resume=True, progress=lambda done, whole: seen.append(done / whole))
    assert seen == sorted(seen) and seen[-1] == 1
    path = tmp_path / "whole" / "out"
    save(source, path)
    assert_same(out, (path, values(path)))
    assert reshard.verify(out).ok


@pytest.mark.usefixtures("always")
def test_wrong_digests_are_recorded_between_two_runs(sources, tmp_path):
    source = shutil.copytree(sources("ckpt zarr2-files"), tmp_path / "source")
    out = tmp_path / "new" / "out"
    begun = noted(stopped(source, out))["digests"]
    assert ["params", "serial0"] in [path for path, _ in begun]
    jobs.misrecorded(source, "params.serial0")
    text = f"values were read from `{source}` that are not those its digests were recorded of\n"
    text += f'  params/serial0  float32[512,512]\n\nhint: reshard.verify("{source}")'
    for anew in (f"\n{REMOVED}", ""):  # which is a job that had these from the beginning
        jobs.refused(reshard.CorruptCheckpointError, text + anew, save, source, out, resume=True)
        assert os.listdir(out.parent) == []


# What an earlier run has written, and something has changed.


@pytest.mark.usefixtures("always")
def test_a_flipped_bit_in_what_an_earlier_run_wrote(tmp_path):
    """Of a source whose stored bytes are its values, so that any others are values as well."""
    source, out = tmp_path / "source", tmp_path / "new" / "out"
    layouts.save_pytree(source, jobs.plain_tree(0, 6), use_ocdbt=False, use_compression=False)
    for verify in (False, True):
        temporary = stopped(source, out, 0.9)
        for name in ("params.w0", "params.serial1"):
            flip(sorted((temporary / name).glob("?.?"))[-1])
        text = (
            "what was written is not what is read back\n"
            "  params/serial1: its values are not those on record\n"
            "  params/w0: its values are not those on record\n\n"
            f'hint: reshard.verify("{source}")\n{REMOVED}'
        )
        again = functools.partial(save, source, out, resume=True, verify=verify)
        jobs.refused(reshard.CorruptCheckpointError, text, again)
        assert os.listdir(out.parent) == []
    save(source, out, resume=True)
    assert reshard.verify(out, changed(source)[0]).ok


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("kind", "change"),
    [("ckpt zarr2", flip), ("ckpt zarr3-files", flip), ("ckpt zarr2", pathlib.Path.unlink)],
)
def test_a_file_that_an_earlier_run_wrote_is_damaged_or_gone(sources, tmp_path, kind, change):
    """Where every array is rewritten."""
    source, out = sources(kind), tmp_path / "out"
    temporary = stopped(source, out, 0.9, chunks="64KiB")
    written = [*temporary.glob("ocdbt.process_0/d/*"), *temporary.glob("params.kept0/c/*/*")]
    status = {file: file.stat() for file in written}
    own = [file for file in written if status[file].st_nlink == 1 and status[file].st_size > 40_000]
    first = min(own, key=lambda file: status[file].st_mtime_ns)  # what came last is done again
    change(first)
    with pytest.raises(reshard.CorruptCheckpointError) as caught:
        save(source, out, resume=True, chunks="64KiB")
    if change is flip:
        assert caught.value.summary == "what was written is not what is read back"
    else:
        text, where = str(caught.value).split(" is gone from ")
        assert text == f"the data file `{first.relative_to(temporary)}`"
        assert re.fullmatch(rf"`{unfinished(out)}/\w+\.orbax-checkpoint-tmp`\n\n{REMOVED}", where)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("always")
def test_only_what_an_earlier_run_wrote_is_read_back(sources, tmp_path, monkeypatch):
    source, out = sources("ckpt zarr2"), tmp_path / "out"
    read = []
    original = verification.read_digests

    def read_digests(leaves, *rest):
        read.append([leaf.path for leaf in leaves])
        return original(leaves, *rest)

    monkeypatch.setattr(verification, "read_digests", read_digests)
    wholes = []
    save(source, out, progress=lambda done, whole: wholes.append(whole))
    shutil.rmtree(out)
    begun = [tuple(path) for path, _ in noted(stopped(source, out, 0.7))["digests"]]
    seen = []
    planned = save(source, out, resume=True, progress=lambda *counts: seen.append(counts))
    assert [sorted(paths) for paths in read] == [sorted(begun)]
    assert 1 < len(begun) < sum(not array.moved for array in planned.arrays)
    back = sum(h.nbytes for h in reshard.open(source).arrays if h.path in begun)
    assert seen[-1] == (wholes[-1] + back, wholes[-1] + back)
    # All of it, once; and nothing where no earlier run was.
    for options, count in (({"verify": True}, 1), ({}, 0)):
        read.clear()
        shutil.rmtree(out)
        if count:
            stopped(source, out, 0.4)
        save(source, out, resume=True, **options)
        assert [len(paths) for paths in read] == [len(changed(source)[0].arrays)] * count


@pytest.mark.usefixtures("always")
def test_what_does_not_fit_into_memory_is_not_read_back(sources, expected, tmp_path, monkeypatch):
    """It is not the end of a job that was carried over in this memory."""
    kind, out = "ckpt zarr2-files", tmp_path / "out"
    stopped(sources(kind), out)

    def check_fits(boxes, max_memory):
        for path, _, _ in boxes:
            if path[-1].startswith("serial"):
                raise reshard.MemoryLimitError("it does not fit")

    monkeypatch.setattr("reshard.writer.prepare.check_fits", check_fits)
    save(sources(kind), out, resume=True)
    assert_same(out, expected(kind))


def test_it_is_told_that_a_job_went_on(sources, expected, tmp_path):
    source, out = sources("ckpt zarr2"), tmp_path / "out"
    assert save(source, out, resume=True).notes == ()
    assert_whole(out, expected("ckpt zarr2"))
    shutil.rmtree(out)
    stopped(source, out)
    planned = save(source, out, resume=True)
    rewritten = sum(a.decoded_bytes for a in planned.arrays if not a.moved)
    (note,) = planned.notes
    written = "resumed what an earlier run had written"
    told = re.fullmatch(rf"{written}: (.*) of (.*) are rewritten", note)
    assert told[2] == format_bytes(rewritten)
    assert told[1] == "0 B" or parse_bytes(told[1]) < rewritten
    # Also of one that rewrites nothing.
    ckpt, out = reshard.open(sources("ckpt zarr2-files")), tmp_path / "copied"
    with pytest.raises(StopError):
        reshard.save(ckpt, out, resume=True, progress=stop_at(0.6))
    assert reshard.save(ckpt, out, resume=True).notes == (written,)


# No JSON, no object, and no job.
GARBAGE = [b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}", b'{"sha256": "", "job": {}}']


def test_a_damaged_progress_file(sources, expected, tmp_path):
    kind, out = "ckpt zarr2-files", tmp_path / "out"
    temporary = stopped(sources(kind), out)
    genuine = (temporary / PROGRESS).read_bytes()
    rng = random.Random(0)
    flipped = [bytearray(genuine) for _ in range(20)]
    for data in flipped:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(7)
    text = f"`{temporary / PROGRESS}` is damaged: nothing says how far the unfinished job is"
    for garbage in (*GARBAGE, genuine[: len(genuine) // 2], genuine[:-1], *flipped):
        if garbage.translate(None, b" \n\t\r") != genuine.translate(None, b" \n\t\r"):
            (temporary / PROGRESS).write_bytes(garbage)
            refused(f"{text}\n\n{ANEW}", sources(kind), out)
    save(sources(kind), out)
    assert_same(out, expected(kind))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt zarr2-files"])
def test_progress_that_is_ahead_of_the_data(sources, expected, tmp_path, kind):
    """As after a disk that lied about what is durable."""
    out = tmp_path / "out"
    temporary = stopped(sources(kind), out, 0.8)
    for file in [*temporary.glob("ocdbt.process_0/d/*"), *temporary.glob("params.w*/0.*")]:
        if file.stat().st_nlink == 1:
            file.unlink()
    with pytest.raises(reshard.ReshardError) as caught:
        save(sources(kind), out, resume=True)
    assert not out.exists()
    if isinstance(caught.value, reshard.CorruptCheckpointError):
        assert os.listdir(tmp_path) == []
    save(sources(kind), out)
    assert_same(out, expected(kind))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt zarr2-files"])
def test_progress_that_is_behind_the_data(sources, expected, tmp_path, kind):
    out = tmp_path / "out"
    temporary = stopped(sources(kind), out, 0.4)
    early = (temporary / PROGRESS).read_bytes()
    stopped(sources(kind), out, 0.5)  # of more, as it reads back what it writes; before the merge
    assert not progress_of(kept(out))[2]
    (kept(out) / PROGRESS).write_bytes(early)
    save(sources(kind), out, resume=True)
    assert_same(out, expected(kind))


# Faults of the disk and of the source.


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt zarr2-files", "convert zarr3"])
def test_a_full_disk_and_room_again(sources, expected, tmp_path, kind):
    """A limit on the size of files makes the file system refuse writes from the middle on."""
    source, out = sources(kind), tmp_path / "out"
    before = status_of(source)
    with contextlib.ExitStack() as full, pytest.raises(reshard.DestinationError) as caught:

        def fill(done, whole):
            if done > whole // 2:
                full.enter_context(jobs.limited(10_000))

        save(source, out, resume=True, progress=fill)
    assert str(caught.value).startswith(
        ("the destination cannot be written\n  ", f"`{out}` cannot be written: File too large")
    )
    assert caught.value.__notes__ == [kept_note(out)]
    assert status_of(source) == before
    assert_absent(out)
    assert progress_of(kept(out)) > (0, 0, False)
    save(source, out, resume=True)
    assert_same(out, expected(kind))


def test_what_was_kept_takes_no_room_twice(sources, expected, tmp_path, monkeypatch):
    kind, out = "ckpt zarr2-files", tmp_path / "out"
    temporary = stopped(sources(kind), out, 0.8)
    kept = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
    (ckpt,) = changed(sources(kind))
    needed = int(reshard.plan(ckpt, max_memory=MEMORY).bytes_written * 1.1)
    assert kept > needed // 4
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - kept // 2))
    save(sources(kind), out, resume=True)
    assert_same(out, expected(kind))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["ckpt zarr2", "convert zarr2-files"])
@pytest.mark.parametrize("resume", [False, True])
def test_what_an_earlier_version_has_left(sources, expected, tmp_path, kind, resume):
    """It had another name; and a job of that version locks the directory itself."""
    out = tmp_path / "out"
    temporary = stopped(sources(kind), out)
    far = progress_of(temporary)
    earlier = temporary.rename(tmp_path / f"out{EARLIER}")
    unfinished(out).rmdir()
    held = os.open(earlier, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    for resumed in (True, False):
        refused(f"another job is writing `{earlier}`", sources(kind), out, resume=resumed)
    os.close(held)
    seen = []

    def progress(*_):
        if resume:
            seen.append(progress_of(kept(out)))

    save(sources(kind), out, resume=resume, progress=progress)
    assert not resume or seen[0] >= far > (0, 0, False)
    assert_same(out, expected(kind))


# The command line.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["ckpt zarr2", "convert zarr2"])
def test_a_signal_keeps_what_is_written(sources, expected, tmp_path, kind, number):
    """As soon as some batches are on the disk."""
    source, out = sources(kind, "large"), tmp_path / "out" / "1"
    options = ("--to", "1x8", "--spec", "serial=model,")
    if "convert" in kind:
        options = ("--to", "nnx", "--map", source.with_name("map.toml"), "--mesh", "1x4")
    words = [RESHARD, kind.split()[0], source, "out/1", *options, "--max-memory", MEMORY]

    def begun(*more):
        return subprocess.Popen(
            [*words, "--resume", *more],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    process = begun()
    # The first progress file says nothing yet: what is written after it can be seen.
    while not [*unfinished(out).glob("*/ocdbt.process_0/manifest.ocdbt")]:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    note = kept_note(out, "command with --resume")
    assert process.communicate() == ("", f"\nInterrupted; {note}\n")
    assert process.returncode == 130
    assert os.listdir(out.parent) == [unfinished(out).name]
    other = begun("--chunks", "64KiB")
    text = other_arguments(kept(out)).replace("resume=True", "--resume")
    assert other.communicate() == ("", f"Error: {text}\n")
    assert other.returncode == 2
    shown, _ = begun().communicate()
    (note,) = [line for line in shown.splitlines() if line.startswith("note     resumed")]
    assert re.fullmatch(
        r"note     resumed what an earlier run had written: \S+ \S+ of \S+ MiB are rewritten", note
    )
    assert_same(out, expected(kind, "large"))
