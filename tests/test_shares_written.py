"""Shares that are written one by one, and their commit, against what one process writes."""

import contextlib
import importlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import layouts
import numpy as np
import pytest
from jobs import (
    MARKER,
    RECORD,
    SHARE_BYTES,
    Killed,
    assert_pruned,
    make,
    refused,
    save,
    stop_at,
    unfinished,
)
from layouts import bits, hashes
from sampling import few

import reshard
from reshard.arrays import derived
from reshard.arrays.operations import Apply, Split
from reshard.errors import CorruptCheckpointError
from reshard.verify import verification
from reshard.writer import plan
from reshard.writer.job import Attempt, job_token

pytestmark = pytest.mark.usefixtures("forked")
SHARES = 7
ROUNDS = 12
# A function has its name.
saving = importlib.import_module("reshard.writer.save")

KINDS = ["ckpt zarr2", "ckpt zarr3", "ckpt zarr2-files", "ckpt zarr3-files", "ckpt manager"]
KINDS += ["convert zarr2", "convert zarr3", "convert zarr2-files"]
EXECUTED_KINDS = ["ckpt zarr2", "ckpt manager", "ckpt zarr3-files", "convert zarr3"]
KILLED_KINDS = ["ckpt zarr2", "convert zarr3", "ckpt zarr2-files"]


def write(source, out, numbers=range(SHARES), count=SHARES, **options):
    for number in numbers:
        save(source, out, share=(number, count), **options)


def part(out, name):
    """The document of a part that is written; the latest one."""
    [directory] = unfinished(out)
    return max(directory.rglob(f"ocdbt.process_*/{name}.json"), key=lambda f: f.stat().st_mtime_ns)


def items(path):
    return sorted(file.parent.relative_to(path) for file in path.rglob("_METADATA"))


def stored(item):
    """Every key of an item's database, or of its files, with the value."""
    if not (item / "manifest.ocdbt").exists():
        keys = [file for file in item.rglob("*") if file.is_file() and file.parent != item]
        return {str(file.relative_to(item)): file.read_bytes() for file in keys}
    store = layouts.database(item)
    return {key: store[key] for key in store.list().result()}


def assert_same(out, whole):
    """The same values under the same keys, and the same files beside the arrays."""
    assert items(out) == items(whole) != []
    for item in items(whole):
        assert stored(out / item) == stored(whole / item) != {}
    beside = [
        {k: v for k, v in hashes(path).items() if not re.search(r"ocdbt|(^|/)d(/|$)|commit_su", k)}
        for path in (out, whole)
    ]
    assert beside[0] == beside[1]
    assert {str(f.relative_to(out)) for f in out.rglob(MARKER)} == {
        str(f.relative_to(whole)) for f in whole.rglob(MARKER)
    }
    assert unfinished(out) == []
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


def killed_in(monkeypatch, module, name, call, *args, **kwargs):
    """What is called is killed where it calls a function, and so tidies nothing up."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed = mock.Mock(side_effect=Killed)
        patch.setattr(module, name, killed)
        patch.setattr(Attempt, "abandon", killed)
        call(*args, **kwargs)


@pytest.mark.parametrize("kind", few(KINDS, *KILLED_KINDS))
def test_shares_that_are_killed_and_written_again_and_twice(jobs, tmp_path, monkeypatch, kind):
    (source, whole), out = jobs(kind), tmp_path / "out"
    for number, (module, name) in enumerate([(saving, "write_item"), (Attempt, "publish")] * 3):
        killed_in(monkeypatch, module, name, write, source, out, [number])
    write(source, out)
    again = json.loads(part(out, 3).read_bytes())
    part(out, 3).unlink()
    part(out, "unshared").unlink()
    write(source, out, [3, 0])
    assert json.loads(part(out, 3).read_bytes())["job"] == again["job"]
    assert reshard.commit(out)
    assert_same(out, whole)


@pytest.mark.parametrize("numbers", [None, [1]])
def test_what_is_to_replace_another_is_missed(jobs, tmp_path, monkeypatch, numbers):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    shutil.copytree(jobs("convert zarr2")[1], out)
    before = hashes(out)
    if numbers is None:
        arguments = (source, out, [1], 2)
        killed_in(monkeypatch, saving, "write_share", write, *arguments, overwrite=True)
    else:
        write(source, out, numbers, 2, overwrite=True)
    with pytest.raises(reshard.DestinationError, match="missing share numbers: 0"):
        reshard.commit(out)
    assert hashes(out) == before
    write(source, out, range(2), 2, overwrite=True)
    assert reshard.commit(out)
    assert_same(out, whole)


def test_what_is_gone_of_a_share_is_missed(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out)
    for what in ("files", "nodes", "longer"):
        document = part(out, 2)
        written = json.loads(document.read_bytes())["items"]["0"]
        file = document.parents[1] / next(iter(written.get(what, written["files"])))
        if what == "longer":
            file.write_bytes(file.read_bytes() + b"x")
        else:
            file.unlink()
        text = r"(?s)1 of 7 shares .*missing share numbers: 2\n"
        with pytest.raises(reshard.DestinationError, match=text):
            reshard.commit(out)
        write(source, out, [2])
    reshard.commit(out)
    assert_same(out, whole)


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


def test_missing_shares_are_listed_as_a_range(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, [1, 2, 4], 10)
    several = f"7 of 10 shares of `{out}` are not complete\n  missing share numbers: 0,3,5-9\n"
    several += "  share 0, which also writes documents and other items, is not finished\n\n"
    several += "hint: write the missing shares: 0,3,5-9"
    refused(reshard.DestinationError, several, reshard.commit, out)
    write(source, out, [0, 3, 5, 6, 7, 8], 10)
    one = f"1 of 10 shares of `{out}` is not complete\n  missing share numbers: 9\n\n"
    one += "hint: write the missing shares: 9"
    refused(reshard.DestinationError, one, reshard.commit, out)
    write(source, out, [9], 10)
    reshard.commit(out)
    assert_same(out, whole)


def test_shares_of_other_jobs(jobs, tmp_path, monkeypatch):
    (source, _), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, [2])
    [left] = unfinished(out)
    before = hashes(left)
    for options in ({"codec": "none"}, {"max_memory": "4MiB"}):
        with pytest.raises(reshard.DestinationError) as caught:
            save(source, out, share=(1, 7), **options)
        assert caught.value.summary == f"the unfinished job for `{out}` is not this job"
        told = "its arguments, its source or its version of reshard differ from those of this job"
        assert caught.value.problems[0] == told
        assert caught.value.problems[1].startswith(f"process {os.getpid()} on {platform.node()}, ")
        assert caught.value.hints == (f"rm -r '{left}', then start again",)
    text = f"the job of `{out}` has 7 shares, not 8\n\n"
    text += "hint: share=(..., ...) writes one of the 7 shares of that job"
    refused(reshard.DestinationError, text, write, source, out, [1], 8)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    with pytest.raises(reshard.DestinationError, match="is not this job"):
        write(source, out, [3])
    assert hashes(left) == before


@pytest.mark.parametrize("before_share", [True, False])
def test_a_source_that_changes(tmp_path, before_share):
    out, source = tmp_path / "out", make(tmp_path / "source", "ckpt zarr2", 1)
    write(source, out, range(1 if before_share else 2), 2)
    (source / "_METADATA").write_bytes((source / "_METADATA").read_bytes() + b" ")
    if before_share:
        with pytest.raises(reshard.DestinationError, match="is not this job"):
            write(source, out, [1], 2)
    else:
        text = f"`{source / '_METADATA'}` has changed since it was opened\n  it had "
        assert layouts.refused(reshard.ChangedCheckpointError, reshard.commit, out).startswith(text)
        error = layouts.raised(reshard.ChangedCheckpointError, reshard.commit, out)
        assert error.hints == (f"rm -r '{unfinished(out)[0]}', then start again",)
    assert not out.exists()


def test_values_that_are_not_those_on_record(tmp_path):
    out, source = tmp_path / "out", make(tmp_path / "source", "ckpt zarr2", 1)
    reshard.digest(source, write=True)
    record = json.loads((source / RECORD).read_bytes())
    record["arrays"]["params.w0"]["digest"] = "0" * 32
    (source / RECORD).write_text(json.dumps(record))
    write(source, out, range(2), 2)
    text = f"values read from `{source}` do not match its recorded digests\n"
    text += f'  params/w0  float32[512,512]\n\nhint: reshard.verify("{source}")'
    refused(reshard.CorruptCheckpointError, text, reshard.commit, out)


def test_other_jobs_and_commits_where_shares_are_or_are_not(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    text = f"no shares exist for `{out}`\n\nhint: share=(..., ...) writes one of them"
    refused(reshard.CheckpointNotFoundError, text, reshard.commit, out)
    text = "workers must be a whole number of 1 or more, not 0"
    refused(reshard.ArgumentError, text, save, source, out, workers=0)
    assert [*tmp_path.iterdir()] == []
    for number, left in ((0, "files but no finished"), (1, "finished")):
        write(source, out, [number], 2)
        if number == 0:
            part(out, "0").unlink()
        text = f"^a stopped job left {left} shares of `{out}`\n"
        with pytest.raises(reshard.DestinationExistsError, match=text):
            save(source, out)
    text = "a share cannot be combined with resume, workers or executor\n\n"
    text += "hint: leave these out"
    for options in ({"resume": True}, {"workers": 2}, {"executor": ThreadPoolExecutor(1)}):
        refused(reshard.ArgumentError, text, save, source, out, share=(0, 2), **options)
    save(source, out, workers=2, resume=True)
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


@pytest.mark.parametrize("name", ["2", "unshared"])
def test_documents_that_are_damaged_are_refused(jobs, tmp_path, name):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, range(3), 3)
    file, rng = part(out, name), random.Random(name)
    content = file.read_bytes()
    text = f"`{file}` is damaged\n\nhint: rm '{file}'; resume=True writes its part again"
    for damaged in [b"{", *(flipped(content, rng) for _ in range(20))]:
        file.write_bytes(damaged)
        refused(reshard.DestinationError, text, reshard.commit, out)
    file.unlink()
    missing = {"unshared": 0}.get(name, name)
    with pytest.raises(reshard.DestinationError, match=rf"missing share numbers: {missing}\n"):
        reshard.commit(out)
    write(source, out, [int(missing)], 3)
    assert reshard.commit(out)
    assert_same(out, whole)


def test_a_task_that_runs_again_after_its_job_was_committed(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    write(source, out, range(2), 2, overwrite=True)
    reshard.commit(out)
    before = hashes(out)
    write(source, out, [1], 2, overwrite=True)
    with pytest.raises(reshard.DestinationError, match=r"missing share numbers: 0\n"):
        reshard.commit(out)
    assert hashes(out) == before
    shutil.rmtree(*unfinished(out))
    assert reshard.commit(out) is False
    assert_same(out, whole)


COMMITS = """
import sys
import reshard

for out in sys.stdin:
    try:
        print(reshard.commit(out.strip()), flush=True)
    except reshard.DestinationError as error:
        print(error.summary, flush=True)
"""


def test_two_processes_that_commit_at_once(saved, tmp_path):
    """One of them does, and the old checkpoint is never back."""
    ckpt = reshard.open(saved("standalone").path)
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", COMMITS], **streams) for _ in range(2)]
    try:
        for number in range(ROUNDS):
            out = tmp_path / str(number) / "out"
            reshard.save(reshard.to_mesh(ckpt, "1x4"), out)
            for share in range(2):
                reshard.save(reshard.to_mesh(ckpt, "1x8"), out, share=(share, 2), overwrite=True)
            for process in processes:
                process.stdin.write(f"{out}\n")
                process.stdin.flush()
            answers = [process.stdout.readline().strip() for process in processes]
            running = f"another process commits the job for `{out}`"
            ended = f"the job for `{out}` was completed, removed or stopped while a part of it was "
            assert "True" in answers
            assert {*answers} <= {"True", "False", running, f"{ended}being written"}
            assert [str(mesh) for mesh in reshard.open(out).meshes] == ["data=1,model=8"]
            assert reshard.verify(out).ok
            assert reshard.commit(out) is False
    finally:
        for process in processes:
            process.communicate()


def test_jobs_that_differ_have_different_tokens(tmp_path):
    """In a name, a dtype, or a leaf that is no array."""
    layouts.save_pytree(tmp_path / "in", {"w": np.ones(4, "f4"), "a": "x", "b": "y"})
    ckpt = reshard.open(tmp_path / "in")
    others = [ckpt, *(reshard.rename(ckpt, {"^w$": name}) for name in "vu")]
    others += [reshard.cast(ckpt, dtype) for dtype in ("float16", "bfloat16")]
    others += [reshard.select(ckpt, drop=name) for name in "ab"]
    tokens = {job_token(reshard.plan(each, tmp_path / "out"), False) for each in others}
    assert len(tokens) == len(others)


# Jobs whose shares others write, at the same time.


@pytest.fixture
def _many_shares(monkeypatch):
    monkeypatch.setattr(plan, "SHARE_BYTES", SHARE_BYTES)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as executor:
        yield executor


@pytest.mark.usefixtures("_many_shares")
@pytest.mark.parametrize("kind", few(EXECUTED_KINDS, "ckpt zarr2", "ckpt manager"))
def test_an_executor_writes_what_one_process_does(jobs, threads, tmp_path, kind):
    (source, whole), out, told = jobs(kind), tmp_path / "out", []
    options = {"verify": True, "executor": threads, "workers": 3}
    planned = save(source, out, progress=lambda *counts: told.append(counts), **options)
    assert isinstance(planned, reshard.Plan)
    assert_same(out, whole)
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.usefixtures("_many_shares")
@pytest.mark.parametrize("workers", few([1, 2, 3, 5], 2))
def test_workers_write_what_one_process_does(jobs, tmp_path, workers):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    save(source, out, workers=workers, overwrite=True)
    assert_same(out, whole)


@pytest.mark.usefixtures("_many_shares")
def test_a_job_of_an_executor_that_fails_is_resumed(jobs, tmp_path, monkeypatch):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    writing, begun = saving.write_share, []

    def write_share(attempt, share, report):
        begun.append(share.number)
        if len(begun) == 3:
            raise CorruptCheckpointError("the third one fails")
        writing(attempt, share, report)

    monkeypatch.setattr(saving, "write_share", write_share)
    with ThreadPoolExecutor(1) as thread:
        text = "the third one fails"
        error = refused(CorruptCheckpointError, text, save, source, out, executor=thread)
        [left] = unfinished(out)
        document = json.loads(part(out, "unshared").read_bytes())
        done = {int(file.stem) for file in left.rglob("*.json") if file.stem.isdigit()}
        told = f"{len(done)} of {document['count']} shares are complete, and stay in `{left}`: "
        assert error.__notes__ == [f"{told}resume=True continues it"]
        with pytest.raises(reshard.DestinationExistsError, match="left finished shares"):
            save(source, out, executor=thread)
        begun[:] = [None] * 3
        save(source, out, executor=thread, workers=40, resume=True)
    assert done >= {0, 1}
    assert begun[3:] == [number for number in range(document["count"]) if number not in done]
    assert_same(out, whole)


@pytest.mark.usefixtures("_many_shares")
def test_an_interrupt_ends_all_shares(jobs, threads, tmp_path, monkeypatch):
    """Those that run are waited for: nothing is written to what is removed."""
    monkeypatch.setattr(saving, "_LOOK_SECONDS", 0.0)
    source, whole = jobs("ckpt manager")
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = hashes(out)
    with pytest.raises(KeyboardInterrupt):
        interrupt = stop_at(0, KeyboardInterrupt)
        save(source, out, executor=threads, overwrite=True, progress=interrupt)
    left = unfinished(out)
    for directory in left:
        parts = {file.stem for file in directory.rglob("*.json")} - {"unshared"}
        assert parts and all(part.isdigit() for part in parts)  # a share is complete
    assert hashes(out) == before


@pytest.mark.usefixtures("_many_shares")
def test_a_share_ends_where_its_job_does(jobs, threads, tmp_path, monkeypatch):
    (source, _), out = jobs("ckpt zarr2"), tmp_path / "out"
    monkeypatch.setattr(saving, "_LOOK_SECONDS", 0.0)
    writing = saving.write_share

    def write_share(attempt, share, report):
        for file in unfinished(out)[0].rglob("begun.json"):
            file.unlink(missing_ok=True)
        writing(attempt, share, report)

    monkeypatch.setattr(saving, "write_share", write_share)
    text = f"^(the job for `{out}` was completed, removed or stopped|`{out}` cannot be written)"
    with pytest.raises(reshard.DestinationError, match=text):
        save(source, out, executor=threads)
