"""Shares that are written one by one, and their commit, against what one process writes."""

import contextlib
import functools
import importlib
import json
import os
import platform
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import layouts
import numpy as np
import pytest
import tensorstore as ts
from jobs import MARKER, Killed, assert_pruned, changed, make, misrecorded, refused, save
from layouts import bits, hashes
from sampling import few, some

import reshard
from reshard.arrays import derived
from reshard.arrays.applied import Apply
from reshard.arrays.operations import Split
from reshard.storage.location import Location
from reshard.verify import verification

pytestmark = pytest.mark.usefixtures("forked")
SHARES = 7
# A function has its name.
share_commit = importlib.import_module("reshard.writer.share_commit")
share_job = importlib.import_module("reshard.writer.share_job")
shares = importlib.import_module("reshard.writer.share_writing")

KINDS = ["ckpt zarr2", "ckpt zarr3", "ckpt zarr2-files", "ckpt zarr3-files", "ckpt manager"]
KINDS += ["convert zarr2", "convert zarr3", "convert zarr2-files"]
KILLED_KINDS = ["ckpt zarr2", "convert zarr3", "ckpt zarr2-files"]


def write(source, out, numbers=range(SHARES), count=SHARES, **options):
    for number in numbers:
        save(source, out, share=(number, count), **options)


def outer(out):
    return out.with_name(f".reshard-{out.name}.shares")


def items(path):
    """Directories of items below a checkpoint, relative to it."""
    return sorted(file.parent.relative_to(path) for file in path.rglob("_sharding"))


def stored(item):
    """Every key of an item's database, or of its files, with the value."""
    if not (item / "manifest.ocdbt").exists():
        keys = [file for file in item.rglob("*") if file.is_file() and file.parent != item]
        return {str(file.relative_to(item)): file.read_bytes() for file in keys}
    spec = {"driver": "ocdbt", "base": f"file://{item}/"}
    store = ts.KvStore.open(spec).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def documents(item):
    """What describes an item, and is in files of its own."""
    files = [file for file in item.iterdir() if file.is_file() and file.name != "manifest.ocdbt"]
    files += item.glob("array_metadatas/*")
    return {str(file.relative_to(item)): file.read_bytes() for file in files if file.name != MARKER}


def assert_same(out, whole):
    """The same values under the same keys, and the same files beside the arrays."""
    assert items(out) == items(whole) != []
    for item in items(whole):
        assert stored(out / item) == stored(whole / item) != {}
        assert documents(out / item) == documents(whole / item)
    beside = [
        {k: v for k, v in hashes(path).items() if not re.search(r"ocdbt|(^|/)d(/|$)|commit_su", k)}
        for path in (out, whole)
    ]
    assert beside[0] == beside[1]
    assert {str(f.relative_to(out)) for f in out.rglob(MARKER)} == {
        str(f.relative_to(whole)) for f in whole.rglob(MARKER)
    }
    assert not outer(out).exists()
    assert_pruned(out)


@pytest.mark.parametrize("kind", few(KINDS, *sorted({*KINDS} - {*KILLED_KINDS})))
def test_shares_in_any_order_are_what_one_process_writes(jobs, tmp_path, kind):
    (source, whole), out = jobs(kind), tmp_path / "out"
    write(source, out, random.Random(kind).sample(range(SHARES), SHARES))
    assert not out.exists()
    assert reshard.commit(out) is True
    assert_same(out, whole)
    assert reshard.commit(out) is False
    for step in reshard.open(out).source.steps or (None,):
        assert verification.verify(reshard.open(out, step=step)).ok
    if kind == "ckpt zarr3":  # Orbax reads it
        found, saved = (layouts.flat(layouts.load_pytree(path)) for path in (out, source))
        assert {k: bits(leaf) for k, leaf in found.items()} == {
            k: bits(leaf) for k, leaf in saved.items()
        }


def killed(after):
    """What is killed when it has been called so often."""
    left = [after]

    def call(*_, **__):
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return call


def killed_in(monkeypatch, module, name, dies, call, *args, **kwargs):
    """What is called is killed where it calls a function, which another one stands for."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, dies)
        call(*args, **kwargs)


def writing_dies(writing, stop, work, progress, memory, cores, committed, report):
    writing(work, progress, memory, cores, lambda: stop() or committed(), report)
    raise Killed


@pytest.mark.parametrize("kind", few(KINDS, *KILLED_KINDS))
def test_shares_that_are_killed_and_written_again_and_twice(jobs, tmp_path, monkeypatch, kind):
    """Three at a batch, two before their documents are there; two are written twice."""
    (source, whole), out = jobs(kind), tmp_path / "out"
    for number in (0, 2, 5):
        dies = functools.partial(writing_dies, shares.write_arrays, killed(number // 2))
        killed_in(monkeypatch, shares, "write_arrays", dies, write, source, out, [number])
    for number in (1, 4):
        job, dies = share_job.Job, killed(0)
        killed_in(monkeypatch, job, "write_document", dies, write, source, out, [number])
    write(source, out)
    again = json.loads((outer(out) / "3.json").read_text())
    (outer(out) / "3.json").unlink()
    (outer(out) / "rest.json").unlink()
    write(source, out, [3, 0])
    assert json.loads((outer(out) / "3.json").read_text())["job"] == again["job"]
    assert reshard.commit(out)
    assert_same(out, whole)


def test_a_share_that_is_written_is_not_written_again(jobs, tmp_path, monkeypatch):
    (source, _), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, [0, 1], 2)
    monkeypatch.setattr(shares, "write_arrays", killed(0))
    told = []
    save(source, out, share=(1, 2), progress=lambda *counts: told.append(counts))
    assert told[-1][0] == told[-1][1] > 0
    save(source, out, share=(0, 2))


# Where a commit stops: the module, the name, and whether what is called has been done then.
STOPS = [
    (share_commit.database, "merge_databases", False),
    (share_commit.database, "merge_databases", True),
    (share_commit.Job, "write_document", False),
    (share_commit.Job, "write_document", True),
    (share_commit.database, "prune_all_but", False),
    (share_commit.database, "prune_all_but", True),
    (share_commit, "write_markers", False),
    (share_commit, "write_markers", True),
    (share_commit.directory_commit.posix, "rename", False),
    (share_commit.directory_commit.posix, "rename", True),
    (share_commit.directory_commit, "finish", True),
    (share_commit, "_remove", True),
]


def dying(call, done):
    """What is killed before a call, or after it."""

    def dies(*args, **kwargs):
        if done:
            call(*args, **kwargs)
        raise Killed

    return dies


@pytest.mark.parametrize("numbers", [None, range(2), [1]])
def test_what_is_to_replace_another_is_missed(jobs, tmp_path, monkeypatch, numbers):
    """Where its job was killed as it began, or all was swept away before the commit."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    shutil.copytree(jobs("convert zarr2")[1], out)
    before = hashes(out)
    if numbers is None:
        dies, options = dying(share_job._first, True), {"overwrite": True}
        killed_in(monkeypatch, share_job, "_first", dies, write, source, out, [1], 2, **options)
    else:
        write(source, out, numbers, 2, overwrite=True)
        (checkpoint,) = outer(out).glob("checkpoint*")
        shutil.rmtree(checkpoint)
    with pytest.raises(reshard.DestinationError, match="missing: 0"):
        reshard.commit(out)
    assert hashes(out) == before
    write(source, out, range(2), 2, overwrite=True)
    assert reshard.commit(out)
    assert_same(out, whole)


def test_what_is_gone_of_a_share_is_missed(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out)
    for what in ("manifest.ocdbt", "d", "file", "longer"):
        document = json.loads((outer(out) / "2.json").read_text())
        (checkpoint,) = outer(out).glob("checkpoint-*")
        file = checkpoint / next(iter(document["items"]["0"]["files"]))
        (stage,) = (p for p in file.parents if p.name.startswith("ocdbt.process_2_"))
        gone = {"file": [file], "d": [*stage.glob("d/*")], "longer": []}
        for path in gone.get(what, [stage / what]):
            path.unlink()
        if what == "longer":
            file.write_bytes(file.read_bytes() + b"x")
        with pytest.raises(reshard.DestinationError, match=r"(?s)1 of 7 shares .*missing: 2\n"):
            reshard.commit(out)
        write(source, out, [2])
    reshard.commit(out)
    assert_same(out, whole)


def test_a_share_of_a_job_that_was_removed_writes_into_no_other(jobs, tmp_path, monkeypatch):
    (source, whole), out = jobs("ckpt zarr2-files"), tmp_path / "out"
    removed = []

    def removes(*args):
        if not removed:
            removed.append(shutil.rmtree(outer(out)))
            write(source, out, range(2), 2)
        return moves(*args)

    item_arrays = importlib.import_module("reshard.writer.item_arrays")
    moves = item_arrays.write_boxes
    monkeypatch.setattr(item_arrays, "write_boxes", removes)
    with pytest.raises(reshard.DestinationError, match="was stopped, or is complete"):
        save(source, out, share=(1, 2), codec="none")
    assert len(removed) == 1
    assert reshard.commit(out)
    assert_same(out, whole)


@pytest.mark.parametrize("overwrite", few([False, True], True))
def test_a_commit_that_is_stopped_anywhere(jobs, tmp_path, monkeypatch, overwrite):
    source, whole = jobs("ckpt manager")
    for number, (module, name, done) in some([*enumerate(STOPS)]):
        out = tmp_path / str(number)
        if overwrite:
            shutil.copytree(whole, out)
        write(source, out, range(2), 2, overwrite=overwrite)
        dies = dying(getattr(module, name), done)
        killed_in(monkeypatch, module, name, dies, reshard.commit, out)
        assert reshard.commit(out) is (name != "_remove")  # after which nothing is left to do
        assert_same(out, whole)
        assert [*tmp_path.glob(f"*{number}.replaced*")] == []
        shutil.rmtree(out)


@pytest.mark.parametrize(
    "options", [{"verify": True}, {"digest": True}, {"link": False}, {"chunks": "keep"}]
)
def test_options_of_a_job_in_shares(jobs, tmp_path, options):
    (source, whole), out, told = jobs("ckpt zarr2"), tmp_path / "out", []
    if "verify" not in options:
        save(source, whole := tmp_path / "whole", **options)
    write(source, out, range(2), 2, **options)
    assert reshard.commit(out, progress=lambda *counts: told.append(counts))
    assert_same(out, whole)
    assert bool(told) == ("verify" in options)
    assert not told or told[-1][0] == told[-1][1] == reshard.open(out).nbytes


def doubled(values):
    return values + values


def test_values_in_memory_and_functions(jobs, tmp_path):
    """What nothing has stored is in no share; a function is called where its array is written."""
    ckpt = reshard.open(jobs("ckpt zarr2")[0])
    like = ckpt["params/w0"]
    values = layouts.random_array(np.random.default_rng(0), (96, 33))
    made = derived.constant(("made", "constant"), values, like)
    called = derived.apply(Apply(doubled, "here:doubled"), [like], [("made", "called")])
    halves = derived.apply(Split(0, (32, 64)), [made], [("made", "a"), ("made", "b")])
    leaves = {leaf.path: leaf for leaf in (*ckpt.arrays, made, *called, *halves)}
    ckpt = reshard.to_mesh(ckpt.replace(leaves, retyped=True), "1x8")
    reshard.save(ckpt, tmp_path / "whole", max_memory="8MiB")
    for number in range(4):
        reshard.save(ckpt, tmp_path / "out", max_memory="8MiB", share=(number, 4))
    reshard.commit(tmp_path / "out")
    assert_same(tmp_path / "out", tmp_path / "whole")
    found = reshard.open(tmp_path / "out")
    assert bits(found["made/constant"].view().read().result()) == bits(values)


# Refusals.


def test_missing_shares_are_listed_as_a_range(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, [1, 2, 4], 10)
    several = f"7 of 10 shares of `{out}` are not complete\n  missing: 0,3,5-9\n"
    several += "  share 0 writes what is in no share, and has not done so\n\n"
    several += 'hint: write what is missing: share=(i, n) with i in "0,3,5-9"'
    refused(reshard.DestinationError, several, reshard.commit, out)
    write(source, out, [0, 3, 5, 6, 7, 8], 10)
    one = f"1 of 10 shares of `{out}` is not complete\n  missing: 9\n\n"
    one += 'hint: write what is missing: share=(i, n) with i in "9"'
    refused(reshard.DestinationError, one, reshard.commit, out)
    write(source, out, [9], 10)
    reshard.commit(out)
    assert_same(out, whole)


OTHERS = {
    "other arguments": {"chunks": "64KiB"},
    "shares: 7 then, 8 now": {"share": (1, 8)},
    "overwrite: False then, True now": {"overwrite": True},
    "verify: False then, True now": {"verify": True},
    "max_memory: 3.00 MiB then, 4.00 MiB now; it decides what is rewritten together": {
        "max_memory": "4MiB"
    },
}


def test_shares_of_other_jobs(jobs, tmp_path, monkeypatch):
    (source, _), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, [2])
    before = hashes(outer(out))
    for told, options in OTHERS.items():
        with pytest.raises(reshard.DestinationError) as caught:
            save(source, out, **{"share": (1, 7)} | options)
        assert caught.value.summary == f"`{outer(out)}` holds shares of another job"
        assert caught.value.problems == (told,)
        assert caught.value.hints[-1] == f"rm -r '{outer(out)}' begins anew"
    now = share_job.fingerprint(reshard.plan(changed(source)[0]))["version"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    with pytest.raises(reshard.DestinationError, match=f"reshard {now} then, 9.9 now"):
        write(source, out, [3])
    assert hashes(outer(out)) == before


@pytest.mark.parametrize("before_share", [True, False])
def test_a_source_that_changes(tmp_path, before_share):
    """It is told by the next share, or else by the commit."""
    out, source = tmp_path / "out", make(tmp_path / "source", "ckpt zarr2", 1)
    write(source, out, range(1 if before_share else 2), 2)
    (source / "_METADATA").write_bytes((source / "_METADATA").read_bytes() + b" ")
    if before_share:
        with pytest.raises(reshard.DestinationError, match=f"has changed since: `{source}`"):
            write(source, out, [1], 2)
    else:
        text = f"the source changed while it was read\n  `{source}`\n\n"
        text += f"hint: rm -r '{outer(out)}' begins anew"
        refused(reshard.CorruptCheckpointError, text, reshard.commit, out)
    assert not out.exists()


def test_values_that_are_not_those_on_record(tmp_path):
    out, source = tmp_path / "out", make(tmp_path / "source", "ckpt zarr2", 1)
    misrecorded(source, "params.w0")
    write(source, out, range(2), 2)
    text = f"values were read from `{source}` that are not those its digests were recorded of\n"
    text += f'  params/w0  float32[512,512]\n\nhint: reshard.verify("{source}")'
    refused(reshard.CorruptCheckpointError, text, reshard.commit, out)


def test_other_jobs_and_commits_where_shares_are_or_are_not(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    text = f"there are no shares of `{out}`\n\nhint: share=(..., ...) writes one of them"
    refused(reshard.CheckpointNotFoundError, text, reshard.commit, out)
    text = "`0` is no number of workers"
    refused(reshard.ArgumentError, text, save, source, out, workers=0)
    assert [*tmp_path.iterdir()] == []
    write(source, out, [1], 2)
    text = f"shares of a job for `{out}` are in `{outer(out)}`\n\n"
    text += f'hint: reshard.commit("{out}") completes them\n'
    text += "hint: the same call with workers=... and resume=True writes those that are missing, "
    text += f"and completes them\nhint: rm -r '{outer(out)}' begins anew"
    refused(reshard.DestinationError, text, save, source, out)
    text = "a share is written whole or again, by one process\n\n"
    text += "hint: share=(i, n) without resume, workers and executor"
    for options in ({"resume": True}, {"workers": 2}, {"executor": ThreadPoolExecutor(1)}):
        refused(reshard.ArgumentError, text, save, source, out, share=(0, 2), **options)
    shutil.rmtree(outer(out))
    write(source, out, range(2), 2)
    reshard.commit(out)
    assert_same(out, whole)
    with pytest.raises(reshard.DestinationError, match="exists"):
        write(source, out, [1], 2)


def flipped(data, rng):
    """A JSON object with one bit flipped, which is still one."""
    while True:
        copy = bytearray(data)
        copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(ValueError):
            if isinstance(json.loads(copy), dict):
                return bytes(copy)


@pytest.mark.parametrize("name", ["2.json", "rest.json", "job.json", "merged.json"])
def test_documents_that_are_damaged_are_refused(jobs, tmp_path, monkeypatch, name):
    """By the commit, and those of a share can be written again."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, range(3), 3)
    if name == "merged.json":
        module = share_commit.database
        killed_in(monkeypatch, module, "prune_all_but", killed(0), reshard.commit, out)
    file, rng = outer(out) / name, random.Random(name)
    content = file.read_bytes()
    anew = f"hint: rm -r '{outer(out)}' begins anew"
    again = {"2.json": 2, "rest.json": 0}.get(name)
    if again is not None:
        anew = f"hint: rm '{file}', then write share {again} again\n{anew}"
    for damaged in [b"{", *(flipped(content, rng) for _ in range(20))]:
        file.write_bytes(damaged)
        refused(reshard.DestinationError, f"`{file}` is damaged\n\n{anew}", reshard.commit, out)
    file.write_bytes(content)
    if again is not None:
        file.unlink()
        with pytest.raises(reshard.DestinationError, match=rf"missing: {again}\n"):
            reshard.commit(out)
        write(source, out, [again], 3)
    assert reshard.commit(out)
    assert_same(out, whole)


def test_a_missing_share_that_was_begun_says_how_far_it_is(jobs, tmp_path, monkeypatch):
    (source, _), out = jobs("ckpt zarr2"), tmp_path / "out"
    monkeypatch.setattr(share_job, "_LOOK_SECONDS", {True: 0.0})
    monkeypatch.setattr(share_job, "_NOTE_SECONDS", {True: 0.0})
    told = []

    def progress(done, whole):
        with pytest.raises(reshard.DestinationError) as caught:
            reshard.commit(out)
        told.append(caught.value.problems)
        (outer(out) / "2.running").write_bytes(b"{")  # one that cannot be read says nothing

    save(source, out, share=(1, 3), progress=progress)
    line = rf"share 1: process {os.getpid()} on {re.escape(platform.node())} had written "
    line += r"(\d+)% of it at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    done = []
    for missing, _, *running in told[:-1]:
        assert (missing, len(running)) == ("missing: 0-2", 1)
        done.append(int(re.fullmatch(line, running[0])[1]))
    assert done == sorted(done) and done[0] == 0 and 50 < done[-1] < 100
    with pytest.raises(reshard.DestinationError) as caught:
        reshard.commit(out)
    assert caught.value.problems[0] == "missing: 0,2" and len(caught.value.problems) == 2


def test_a_task_that_runs_again_after_its_job_was_committed(jobs, tmp_path):
    """It begins a job again, which it says, and nothing comes of that."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, range(2), 2, overwrite=True)
    reshard.commit(out)
    before = hashes(out)
    note = f"it begins a job that is to replace `{out}`: if that is what this very job has made, "
    note += f"and a task of it ran again, remove `{outer(out)}`"
    assert save(source, out, share=(1, 2), overwrite=True).notes[-1] == note
    assert note not in save(source, out, share=(1, 2), overwrite=True).notes
    with pytest.raises(reshard.DestinationError, match=r"missing: 0\n"):
        reshard.commit(out)
    assert hashes(out) == before
    shutil.rmtree(outer(out))
    assert reshard.commit(out) is False
    assert_same(out, whole)


def test_what_a_commit_leaves_that_was_killed_at_its_end(jobs, tmp_path, monkeypatch):
    """The same job, begun again, is not complete."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, range(2), 2, overwrite=True)
    removing = Location.remove

    def remove(file):
        removing(file)
        if file.name == "job.json":
            raise Killed

    killed_in(monkeypatch, Location, "remove", remove, reshard.commit, out)
    assert [path.name for path in outer(out).iterdir()] == ["named.json"]
    write(source, out, [1], 2, overwrite=True)
    with pytest.raises(reshard.DestinationError, match="missing: 0"):
        reshard.commit(out)
    write(source, out, [0], 2, overwrite=True)
    assert reshard.commit(out)
    assert_same(out, whole)


def test_nothing_is_written_to_what_is_merged(jobs, tmp_path, monkeypatch):
    """Neither by a share nor by a job that is resumed, which commits it."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, range(2), 2)
    killed_in(monkeypatch, share_commit, "write_markers", killed(0), reshard.commit, out)
    before = hashes(outer(out))
    for number in range(2):
        text = f"the shares of `{out}` are merged already\n\n"
        text += f'hint: reshard.commit("{out}") completes it'
        refused(reshard.DestinationError, text, save, source, out, share=(number, 2))
        assert hashes(outer(out)) == before
    save(source, out, workers=2, resume=True)
    assert_same(out, whole)


@pytest.mark.parametrize("how", ["stopped", "removed"])
def test_a_share_ends_where_its_job_does(jobs, tmp_path, monkeypatch, how):
    (source, _), out = jobs("ckpt zarr2"), tmp_path / "out"
    monkeypatch.setattr(share_job, "_LOOK_SECONDS", {True: 0.0})
    seen = []

    def progress(done, whole):
        seen.append(done)
        if how == "stopped":
            (outer(out) / "stop").touch()
        else:
            (outer(out) / "job.json").unlink(missing_ok=True)

    text = f"the job in `{outer(out)}` was stopped, or is complete"
    refused(reshard.DestinationError, text, save, source, out, share=(1, 2), progress=progress)
    assert len(seen) < 20 and not (outer(out) / "1.json").exists()
