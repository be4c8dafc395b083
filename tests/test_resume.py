"""Killed and stopped jobs: what they leave, and what a later run with `resume` makes of it."""

import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sysconfig
import time

import layouts
import orbax.checkpoint as ocp
import pytest
from jobs import FORMATS, MAP, changed, ended, make, plain_tree, started
from layouts import bits, hashes, kept, unfinished
from sampling import few, some

import reshard
from reshard.engine.budget import WINDOW
from reshard.engine.read import Filled
from reshard.storage.ocdbt import node_files, value_files
from reshard.units import format_bytes, parse_bytes
from reshard.verify import verification
from reshard.writer import journal

pytestmark = pytest.mark.usefixtures("forked")
# A function has its name.
executing = importlib.import_module("reshard.writer.execution")

RESHARD = pathlib.Path(sysconfig.get_path("scripts")) / "reshard"
EARLIER = ".reshard.orbax-checkpoint-tmp"
PROGRESS = "reshard_progress.json"
RECORD = "reshard_digests.json"
MARKER = "commit_success.txt"
MEMORY = "3MiB"
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


def save(source, out, **options):
    return reshard.save(changed(source), out, **{"max_memory": "3MiB"} | options)


# One job.


def taken(source, out, resume, seconds=None):
    """The status of a job in a process of its own, that is killed so long after its start, and how
    long it ran."""
    begin = time.perf_counter()
    process = started(source, out, {"resume": resume})
    if seconds is not None:
        time.sleep(max(begin + seconds - time.perf_counter(), 0))
        process.kill()
    return ended(process), time.perf_counter() - begin


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


def opened(path):
    steps = reshard.open(path).source.steps or (None,)
    return [reshard.open(path, step=step) for step in steps]


def digested(leaf):
    """All there is to a leaf, its bytes as a digest: what is expected of many jobs is kept."""
    *rest, data = bits(leaf)
    return *rest, hashlib.sha256(data).digest() if isinstance(data, bytes) else data


def values(path):
    return [
        {h.path: digested(h.view().read().result()) for h in ckpt.arrays} for ckpt in opened(path)
    ]


def restored(path):
    """What Orbax reads."""
    items = [path / ckpt.source.step / ckpt.source.item for ckpt in opened(path)]
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = [layouts.flat(checkpointer.restore(item)) for item in items]
    return [{name: digested(leaf) for name, leaf in tree.items()} for tree in found]


def assert_pruned(path):
    """Every file of every OCDBT database is in use."""
    for ckpt in opened(path):
        if ckpt.source.store.ocdbt:
            item = ckpt.source.store.directory
            top = pathlib.Path(item)
            data = [*top.glob("d/**/*"), *top.glob("ocdbt.process_*/**/*")]
            found = {str(file.relative_to(top)) for file in data if file.is_file()}
            assert found == node_files(item) | value_files(item)


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


def usual_seconds(source, out, resume):
    """How long a job takes that nobody kills."""
    found = []
    for _ in range(2):
        status, seconds = taken(source, out, resume)
        assert status == 0
        found.append(seconds)
        shutil.rmtree(out)
    return min(found)


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "resume"), few(KILLED, *SOME_KILLED))
def test_killed_at_random_moments(sources, expected, tmp_path, kind, resume):
    source, whole = sources(kind, SIZE), expected(kind, SIZE)
    before = status_of(source)
    out = tmp_path / "out"
    seconds = usual_seconds(source, out, resume)
    rng = random.Random(kind)
    kills = 0
    while kills < KILLS[kind.split()[0]]:
        status, _ = taken(source, out, resume, rng.uniform(0, 1.1 * seconds))
        kills += status != 0
        assert status_of(source) == before
        if out.exists():
            assert_whole(out, whole, killed=True)
            shutil.rmtree(out)
        else:
            assert_absent(out)
    assert taken(source, out, resume)[0] == 0
    assert_whole(out, whole)


# SIGKILL at moments of interest.

# Which call of what, and whether after it rather than before.
MOMENTS = [
    ("reshard.writer.siblings:Location.copy", 1, True),
    ("reshard.writer.database:posix.link", 2, False),
    ("reshard.storage.posix:replace", 1, False),
    ("os:replace", 1, False),
    ("os:replace", 1, True),
    ("os:replace", 4, False),
    ("reshard.engine.budget:Reservation.free_after", 3, True),
    ("reshard.writer.journal:ItemProgress.value_batch", 1, True),
    ("reshard.writer.journal:ItemProgress.box_batch", 5, False),
    ("reshard.writer.database:merge", 1, False),
    ("reshard.writer.database:merge", 1, True),
    ("reshard.writer.database:prune", 1, False),
    ("os:unlink", 2, True),
    ("os:unlink", 7, True),
    ("reshard.writer.database:prune", 1, True),
    ("reshard.writer.orbax_documents:documents", 1, True),
    ("reshard.writer.execution:records", 1, True),
    ("reshard.writer.execution:records", 2, False),
    ("reshard.writer.execution:write_markers", 1, True),
    ("reshard.writer.journal:Journal.close", 1, False),
    ("reshard.writer.journal:Journal.close", 1, True),
    ("os:rename", 1, True),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["ckpt manager", "convert zarr3-files"])
def test_killed_at_a_moment_of_interest(sources, expected, tmp_path, kind):
    source, whole = sources(kind, "tiny"), expected(kind, "tiny")
    out = tmp_path / "out"
    killed = 0
    moments = some(MOMENTS)
    for name, *moment in moments:
        # Twice at the same place, unless it is done by then.
        for _ in range(2):
            killed += ended(started(source, out, {"resume": True}, [name], *moment)) != 0
            if out.exists():
                break
            assert_absent(out)
        else:
            assert ended(started(source, out, {"resume": True})) == 0
        assert_same(out, whole, killed=True)
        shutil.rmtree(out)
    assert killed > len(moments) // 2


# Stopped in this process.


class StopError(Exception):
    """What the tests throw into a running job."""


@pytest.fixture
def always(monkeypatch):
    """Every batch is made durable."""
    monkeypatch.setattr(journal, "_SYNC_SECONDS", -1)
    monkeypatch.setattr(journal, "_SYNC_SHARE", float("inf"))


def stop_at(part):
    """A callback for progress that raises an error once this part is done."""

    def progress(done, whole):
        if done >= part * whole:
            raise StopError

    return progress


def stopped(source, out, part=0.6, **options):
    """A job that is stopped in the middle; its temporary directory."""
    with pytest.raises(StopError) as caught:
        save(source, out, resume=True, progress=stop_at(part), **options)
    assert caught.value.__notes__ == [
        f"`{unfinished(out)}` is kept: the same call with resume=True goes on with it"
    ]
    assert os.listdir(out.parent) == [unfinished(out).name]
    assert os.listdir(unfinished(out)) == [kept(out).name]
    return kept(out)


def progress_of(temporary):
    """How far the first item is: values, batches, merged."""
    item = json.loads((temporary / PROGRESS).read_bytes())["job"]["items"][0]
    return item["values"], item["batches"], item["merged"]


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

    for part, forbids in ((0.3, False), (0.5, True), (0.7, True), (0.8, False), (1, True)):
        with monkeypatch.context() as patch:
            if forbids:
                patch.setattr(os, "link", forbidden)
            if part < 1:
                stopped(sources(kind), out, part)
            else:
                save(sources(kind), out, resume=True)
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


def refused(text, source, out, **options):
    with pytest.raises(reshard.DestinationError) as caught:
        save(source, out, **{"resume": True} | options)
    assert str(caught.value) == text
    assert not hasattr(caught.value, "__notes__")


def another_job(temporary, *problems, hint=None):
    hints = [f"hint: {hint}", ANEW] if hint else [ANEW]
    lines = [f"the unfinished job in `{temporary}` is another one", *problems]
    return "\n  ".join(lines) + "\n\n" + "\n".join(hints)


def other_arguments(temporary):
    return another_job(temporary, "other arguments", hint="the arguments that it had")


def other_memory(temporary, now):
    problem = f"max_memory: 3.00 MiB then, {now} now; it decides what is rewritten together"
    return another_job(temporary, problem, hint=f'max_memory="{MEMORY}"')


ARGUMENTS = {
    "mesh": lambda c: (reshard.to_mesh(c, "1x4", [("serial", ("model", None))]), {}),
    "dtype": lambda c: (reshard.cast(c, "bfloat16"), {}),
    "dtype of one": lambda c: (reshard.cast(c, "bfloat16", "params/kept0"), {}),
    "select": lambda c: (reshard.select(c, "params/**"), {}),
    "drop": lambda c: (reshard.select(c, drop="none"), {}),
    "rename": lambda c: (reshard.rename(c, [("w0", "u0")]), {}),
    "spec": lambda c: (reshard.to_mesh(c, "1x8", [("w0", ("model",))]), {}),
    "chunks": lambda c: (c, {"chunks": "64KiB"}),
    "kept chunks": lambda c: (c, {"chunks": "keep"}),
    "links": lambda c: (c, {"link": False}),
}


def test_other_arguments(sources, expected, tmp_path, monkeypatch):
    kind, out = "ckpt zarr2", tmp_path / "out"
    temporary = stopped(sources(kind), out)
    before = hashes(temporary)
    for change in ARGUMENTS.values():
        ckpt, options = change(*changed(sources(kind)))
        with pytest.raises(reshard.DestinationError) as caught:
            reshard.save(ckpt, out, resume=True, **{"max_memory": MEMORY} | options)
        assert str(caught.value) == other_arguments(temporary)
        assert hashes(temporary) == before
    for memory, text in (("4MiB", "4.00 MiB"), ("1GiB", "1.00 GiB"), (3 << 20 | 1, "3.00 MiB")):
        refused(other_memory(temporary, text), sources(kind), out, max_memory=memory)
    with monkeypatch.context() as patch:
        now = importlib.metadata.version("reshard")
        patch.setattr(journal.importlib.metadata, "version", lambda _: "99.1")
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
        with pytest.raises(reshard.DestinationError) as caught:
            reshard.save(ckpts, out, max_memory=MEMORY, resume=True)
        problem = f"the source: {one} and {two} then, {now} now"
        assert str(caught.value) == another_job(temporary, problem)


def test_another_conversion(sources, tmp_path):
    source = shutil.copytree(sources("convert zarr2"), tmp_path / "source")
    out = tmp_path / "new" / "out"
    (tmp_path / "map.toml").write_text(MAP)
    temporary = stopped(source, out)
    (tmp_path / "map.toml").write_text(MAP.replace("'left', 'right'", "'right', 'left'"))
    with pytest.raises(reshard.TreeMismatchError):
        (tmp_path / "map.toml").write_text(MAP.replace("left", "right"))
        save(source, out, resume=True)
    swapped = MAP.replace("left", "middle").replace("right", "left").replace("middle", "right")
    (tmp_path / "map.toml").write_text(swapped)
    refused(other_arguments(temporary), source, out)


def touched(file):
    os.utime(file, ns=(file.stat().st_mtime_ns, file.stat().st_mtime_ns + 1))


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
    temporary = stopped(source, out)
    begun = json.loads((temporary / PROGRESS).read_bytes())["job"]["items"][0]["digests"]
    assert ["params", "serial0"] in [path for path, _ in begun]
    reshard.digest(source, write=True)
    record = json.loads((source / RECORD).read_bytes())
    record["arrays"]["params.serial0"]["digest"] = "0" * 32
    (source / RECORD).write_text(json.dumps(record))
    with pytest.raises(reshard.CorruptCheckpointError) as caught:
        save(source, out, resume=True)
    assert str(caught.value) == (
        f"values were read from `{source}` that are not those its digests were recorded of\n"
        f'  params/serial0  float32[512,512]\n\nhint: reshard.verify("{source}")\n{REMOVED}'
    )
    assert os.listdir(out.parent) == []


# What an earlier run has written, and something has changed.


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.usefixtures("always")
def test_a_flipped_bit_in_what_an_earlier_run_wrote(tmp_path):
    """Of a source whose stored bytes are its values, so that any others are values as well."""
    source, out = tmp_path / "source", tmp_path / "new" / "out"
    layouts.save_pytree(source, plain_tree(0, 6), use_ocdbt=False, use_compression=False)
    for verify in (False, True):
        temporary = stopped(source, out, 0.9)
        for name in ("params.w0", "params.serial1"):
            flip(sorted((temporary / name).glob("?.?"))[-1])
        with pytest.raises(reshard.CorruptCheckpointError) as caught:
            save(source, out, resume=True, verify=verify)
        assert str(caught.value) == (
            "what was written is not what is read back\n"
            "  params/serial1: its values are not those on record\n"
            "  params/w0: its values are not those on record\n\n"
            f'hint: reshard.verify("{source}")\n{REMOVED}'
        )
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
    temporary = stopped(source, out, 0.7)
    begun = json.loads((temporary / PROGRESS).read_bytes())["job"]["items"][0]["digests"]
    seen = []
    save(source, out, resume=True, progress=lambda done, whole: seen.append((done, whole)))
    assert [sorted(paths) for paths in read] == [sorted(tuple(path) for path, _ in begun)]
    rewritten = sum(not a.moved for a in reshard.plan(changed(source), max_memory=MEMORY).arrays)
    assert 1 < len(begun) < rewritten
    arrays = reshard.open(source).arrays
    back = sum(h.nbytes for h in arrays if list(h.path) in [path for path, _ in begun])
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


GARBAGE = [
    b"{",
    b"[]",
    b"{}",
    b"null",
    b"\xff\xfe" * 100,
    b"\0" * 4096,
    b"[" * 100_000,
    b'{"sha256": "", "job": {}}',
    b'{"sha256": 3, "job": null}',
]


def test_a_damaged_progress_file(sources, expected, tmp_path):
    kind, out = "ckpt zarr2-files", tmp_path / "out"
    temporary = stopped(sources(kind), out)
    genuine = (temporary / PROGRESS).read_bytes()
    rng = random.Random(0)
    flipped = []
    for _ in range(20):
        place = rng.randrange(len(genuine))
        changed = bytes([genuine[place] ^ 1 << rng.randrange(7)])
        flipped.append(genuine[:place] + changed + genuine[place + 1 :])
    text = f"`{temporary / PROGRESS}` is damaged: nothing says how far the unfinished job is"
    cut = [genuine[: len(genuine) // 2], genuine[:-1]]
    for garbage in (*GARBAGE, *cut, *flipped):
        if garbage.translate(None, b" \n\t\r") == genuine.translate(None, b" \n\t\r"):
            continue
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
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(done, whole):
        if done > whole // 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))

    before = status_of(source)
    try:
        with pytest.raises(reshard.DestinationError) as caught:
            save(source, out, resume=True, progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value).startswith(
        ("the destination cannot be written\n  ", f"`{out}` cannot be written: File too large")
    )
    assert caught.value.__notes__ == [
        f"`{unfinished(out)}` is kept: the same call with resume=True goes on with it"
    ]
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


def test_a_source_that_changes_is_nothing_to_go_on_with(sources, tmp_path):
    source = shutil.copytree(sources("ckpt zarr2-files"), tmp_path / "source")
    out = tmp_path / "new" / "out"

    def change(done, whole):
        if done > whole // 2:
            touched(source / "params.w0" / "0.0")

    with pytest.raises(reshard.CorruptCheckpointError) as caught:
        save(source, out, resume=True, progress=change)
    assert str(caught.value) == f"the source changed while it was read\n  `{source}`"
    assert not hasattr(caught.value, "__notes__")
    assert os.listdir(out.parent) == []


@pytest.mark.usefixtures("always")
def test_values_that_are_not_those_on_record_are_nothing_to_go_on_with(sources, tmp_path):
    source = tmp_path / "source"
    save(sources("ckpt zarr2-files"), source)
    record = json.loads((source / RECORD).read_bytes())
    record["arrays"]["params.w0"]["digest"] = "0" * 32
    (source / RECORD).write_text(json.dumps(record))
    out = tmp_path / "new" / "out"
    with pytest.raises(reshard.CorruptCheckpointError, match="not those its digests"):
        save(source, out, resume=True, chunks="64KiB")
    assert os.listdir(out.parent) == []


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["ckpt zarr2", "convert zarr2-files"])
@pytest.mark.parametrize("resume", [False, True])
def test_what_an_earlier_version_has_left(sources, expected, tmp_path, kind, resume):
    """It had another name."""
    out = tmp_path / "out"
    temporary = stopped(sources(kind), out)
    far = progress_of(temporary)
    temporary.rename(tmp_path / f"out{EARLIER}")
    unfinished(out).rmdir()
    seen = []

    def progress(*_):
        if resume:
            seen.append(progress_of(kept(out)))

    save(sources(kind), out, resume=resume, progress=progress)
    assert not resume or seen[0] >= far > (0, 0, False)
    assert_same(out, expected(kind))


def test_another_job_holds_it(sources, expected, tmp_path):
    """One of an earlier version, which locks the directory itself."""
    kind, out = "ckpt zarr2", tmp_path / "out"
    temporary = stopped(sources(kind), out).rename(tmp_path / f"out{EARLIER}")
    descriptor = os.open(temporary, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for resume in (True, False):
        refused(f"another job is writing `{temporary}`", sources(kind), out, resume=resume)
    os.close(descriptor)
    save(sources(kind), out, resume=True)
    assert_same(out, expected(kind))


# The command line.


TO = ("--to", "1x8", "--spec", "serial=model,")


def command(kind, source, *options):
    if kind == "ckpt":
        return [RESHARD, "ckpt", source, "out/1", *TO, "--max-memory", MEMORY, *options]
    arguments = ("--to", "nnx", "--map", source.with_name("map.toml"), "--mesh", "1x4")
    return [RESHARD, "convert", source, "out/1", *arguments, "--max-memory", MEMORY, *options]


def interrupted(arguments, cwd, number):
    """How a command ends that gets a signal as soon as some of its batches are on the disk."""
    process = subprocess.Popen(
        arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    temporary = unfinished(cwd / "out" / "1")
    # The first progress file says nothing yet: what is written after it can be seen.
    while process.poll() is None and not [
        *temporary.glob("*/params.w1*/*"),
        *temporary.glob("*/plain.1*/*"),
        *temporary.glob("*/ocdbt.process_0/manifest.ocdbt"),
    ]:
        time.sleep(0.001)
    process.send_signal(number)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["ckpt zarr2", "convert zarr2"])
def test_a_signal_keeps_what_is_written(sources, expected, tmp_path, kind, number):
    source = sources(kind, "large")
    api, _ = kind.split()
    left = unfinished(tmp_path / "out" / "1")
    ended = interrupted(command(api, source, "--resume"), tmp_path, number)
    text = f"`{left}` is kept: the same command with --resume goes on with it"
    assert ended == (130, "", f"\nInterrupted; {text}\n")
    assert os.listdir(tmp_path / "out") == [left.name]
    other = subprocess.run(
        [*command(api, source, "--resume"), "--chunks", "64KiB"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (other.returncode, other.stdout) == (2, "")
    refused = other_arguments(kept(tmp_path / "out" / "1")).replace("resume=True", "--resume")
    assert other.stderr == f"Error: {refused}\n"
    went_on = subprocess.run(
        command(api, source, "--resume"), cwd=tmp_path, check=True, capture_output=True, text=True
    )
    (note,) = [line for line in went_on.stdout.splitlines() if line.startswith("note     resumed")]
    assert re.fullmatch(
        r"note     resumed what an earlier run had written: \S+ \S+ of \S+ MiB are rewritten", note
    )
    assert os.listdir(tmp_path / "out") == ["1"]
    assert_same(tmp_path / "out" / "1", expected(kind, "large"))
