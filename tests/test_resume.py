"""Jobs that are killed or fail: what they leave, and what a later run makes of it."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys

import layouts
import pytest
from jobs import (
    SHARE_BYTES,
    StopError,
    ended,
    flip,
    refused,
    save,
    started,
    stop_at,
    unfinished,
)
from layouts import hashes
from sampling import some
from test_shares_written import assert_same

import reshard
from reshard.cli import unfinished as unfinished_jobs
from reshard.storage import machine
from reshard.writer import commit, plan

saving = importlib.import_module("reshard.writer.save")

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(autouse=True)
def _several_shares(monkeypatch):
    monkeypatch.setattr(plan, "SHARE_BYTES", SHARE_BYTES)


def values(path):
    """The digests of each step's arrays, as `reshard` reads them."""
    steps = reshard.open(path).source.steps or (None,)
    return [reshard.digest(reshard.open(path, step=step)) for step in steps]


def assert_whole(out, whole):
    """The destination is what one process writes, and nothing else is beside it."""
    assert os.listdir(out.parent) == [out.name]
    assert_same(out, whole)


def parts(directory):
    """Documents of parts that are written."""
    found = directory.rglob("ocdbt.process_*/*.json")
    return {f.stem: f for f in found if f.stem != "begun" and "x" not in f.parent.name[29:]}


# SIGKILL. A killed job leaves nothing that could be opened, and its source as it was.

MOMENTS = [
    ("reshard.writer.save:write_share", 1),
    ("reshard.writer.save:write_share", 3),
    ("reshard.writer.save:write_unshared", 1),
    ("reshard.writer.save:write_linked", 1),
    ("reshard.writer.job:Attempt.begin", 1),
    ("reshard.writer.job:Attempt.publish", 2),
    ("reshard.writer.save:build_root", 1),
    ("reshard.writer.commit:disk.link", 2),
    ("reshard.writer.commit:disk.rename", 1),
    ("reshard.writer.commit:disk.rename", 2),
    ("reshard.writer.commit:_prune", 1),
    ("os:replace", 2),
    ("os:unlink", 3),
]


@pytest.mark.sampled
def test_killed_at_a_moment_of_interest(jobs, tmp_path):
    """Before it, and then after it, unless the job is complete by then."""
    kind = "ckpt manager"
    (source, whole), out = jobs(kind), tmp_path / "out"
    killed = 0
    moments = some(MOMENTS)
    for name, count in moments:
        for after in (False, True):
            killed += ended(started(source, out, {"resume": True}, name, count, after)) != 0
            if out.exists():
                break
            with pytest.raises(reshard.CheckpointNotFoundError):
                reshard.open(out)
        else:
            assert ended(started(source, out, {"resume": True})) == 0
        assert values(out) == values(whole)
        shutil.rmtree(out)
        for directory in unfinished(out):
            shutil.rmtree(directory)
    assert killed > len(moments) // 2


def killed(source, out, name="reshard.writer.save:build_root", count=1, **options):
    """Leaves what a job has written that was killed; its documents of parts, by name."""
    assert ended(started(source, out, options, name, count)) == -signal.SIGKILL
    [directory] = unfinished(out)
    return parts(directory)


@pytest.mark.parametrize("how", ["resume", "overwrite", "commit"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_the_exchange(jobs, tmp_path, after, how):
    """Before it the job has a private name, where `doctor` and all that finish a job find it. After
    it that is the name of the old checkpoint, which is never a job."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    reshard.save(reshard.open(source), out)
    before = hashes(out)
    options = {"overwrite": True}
    process = started(source, out, options, "reshard.storage.disk:exchange", 1, after)
    assert ended(process) == -signal.SIGKILL
    [left] = unfinished(out)
    assert left.name.endswith(".commit")
    assert (hashes(left if after else out)) == before
    assert bool(unfinished_jobs.unfinished(str(out))[0]) is not after
    if how == "commit":
        assert reshard.commit(out) is not after
    else:
        planned = save(source, out, overwrite=True, resume=how == "resume")
        assert any("resumed" in note for note in planned.notes) is (how == "resume" and not after)
    if not (after and how == "commit"):  # which then does nothing
        assert_whole(out, whole)


@pytest.mark.parametrize("kind", ["ckpt zarr2", "convert zarr3-files"])
def test_only_what_is_missing_is_written(jobs, tmp_path, monkeypatch, kind):
    (source, whole), out = jobs(kind), tmp_path / "out"
    found = killed(source, out, "reshard.writer.save:write_share", 3)
    assert set(found) == {"unshared", "0", "1"}
    written = []
    write = saving.write_share

    def noted(attempt, share, report):
        written.append(share.number)
        write(attempt, share, report)

    monkeypatch.setattr(saving, "write_share", noted)
    planned = save(source, out, resume=True)
    count = planned.share_count()
    assert written == list(range(2, count))
    assert planned.notes[-1] == f"resumed: 2 of {count} shares were complete"
    assert_whole(out, whole)


def test_a_job_that_was_stopped_is_refused_resumed_or_begun_anew(jobs, tmp_path):
    source, whole = jobs("ckpt zarr2")
    for how in ("resume", "overwrite"):
        out = tmp_path / how / "out"
        document = json.loads(killed(source, out)["unshared"].read_bytes())
        lines = layouts.refused(reshard.DestinationExistsError, save, source, out).splitlines()
        who = f"process {document['owner']['pid']} on {document['owner']['host']}"
        assert lines[0] == f"a stopped job left finished shares of `{out}`"
        assert lines[1].startswith(f"  {who}, since {document['since']}: ")
        assert lines[-2:] == ["hint: resume=True continues it", "hint: overwrite=True starts again"]
        save(source, out, **{how: True})
        assert_whole(out, whole)


def test_what_has_no_finished_part_is_removed_unasked(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    assert killed(source, out, "reshard.writer.siblings:copy_siblings") == {}
    save(source, out)
    assert_whole(out, whole)


@pytest.mark.parametrize("ended", [False, None])
def test_another_job_that_runs_or_of_which_nobody_knows(jobs, tmp_path, monkeypatch, ended):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    killed(source, out, "reshard.writer.siblings:copy_siblings")
    monkeypatch.setattr(commit, "has_ended", lambda owner: ended)
    for options in [{}, *([{"resume": True}, {"overwrite": True}] if ended is False else [])]:
        lines = layouts.refused(reshard.DestinationError, save, source, out, **options).splitlines()
        assert lines[0] == f"another job is writing `{out}`"
        assert lines[-3:] == [
            "hint: wait until it ends",
            "hint: resume=True continues it",
            "hint: overwrite=True starts again",
        ]
    if ended is None:
        save(source, out, resume=True)
        assert values(out) == values(whole)


def test_whether_a_process_has_ended():
    process = subprocess.Popen(["sleep", "60"])
    there = machine.this_process()
    other = {**there, "pid": process.pid, "started": machine._started(process.pid)}
    assert machine.has_ended(there) is False
    assert machine.has_ended(other) is False
    assert machine.has_ended({**other, "started": "1"}) is True  # the id of another one by now
    assert machine.has_ended({**other, "machine": "another boot"}) is None
    assert machine.has_ended({**other, "machine": ""}) is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert machine.has_ended(other) is True  # a zombie
    process.wait()
    assert machine.has_ended(other) is True


def stopped(source, out, part=0.6, **options):
    with pytest.raises(StopError) as error:
        save(source, out, progress=stop_at(part), **options)
    return getattr(error.value, "__notes__", [])


def test_a_job_that_fails_leaves_its_finished_shares_and_says_so(jobs, tmp_path, monkeypatch):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/reshard", "ckpt", "run", "my out"])
    [note] = stopped(source, out)
    [directory] = unfinished(out)
    found = parts(directory)
    count = json.loads(found["unshared"].read_bytes())["count"]
    shares = set(found) - {"unshared"}
    assert 0 < len(shares) < count
    assert note == (
        f"{len(shares)} of {count} shares are complete, and stay in `{directory}`: "
        "resume=True continues it"
    )
    databases = {path.name for path in directory.glob("ocdbt.process_*x0")}
    own = next(iter(databases))[:30]
    assert databases == {f"{own}{part}x0" for part in shares}  # and nothing of others
    with pytest.raises(reshard.DestinationError) as refused:
        reshard.commit(out)
    assert refused.value.hints == ("reshard ckpt run 'my out' --resume",)
    save(source, out, resume=True)
    assert_whole(out, whole)


def test_a_job_that_fails_in_its_first_share_leaves_nothing(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SHARE_BYTES", 1 << 30)
    source, out = jobs("convert zarr2")[0], tmp_path / "out"
    monkeypatch.setattr(saving, "write_unshared", lambda *arguments: None)
    assert stopped(source, out, 0.0) == []
    assert os.listdir(tmp_path) == []


def test_other_arguments(jobs, tmp_path):
    source, out = jobs("ckpt zarr2")[0], tmp_path / "out"
    killed(source, out)
    given = {"max_memory": "4MiB", "format": "zarr3", "chunks": "keep", "digest": True}
    for name, value in given.items():
        options = {"resume": True, name: value}
        lines = layouts.refused(reshard.DestinationError, save, source, out, **options).splitlines()
        assert lines[0] == f"the unfinished job for `{out}` is not this job"
        assert lines[2].startswith("  process ")
        assert lines[-1] == "hint: overwrite=True starts again"


def test_a_flipped_bit(jobs, tmp_path):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    found = killed(source, out)
    for path in found.values():
        [item] = json.loads(path.read_bytes())["items"].values()
        if item["digests"]:
            flip(path.parents[1] / max(item["files"].items(), key=lambda pair: pair[1])[0])
            break
    text = "the values read back differ from those written"
    with pytest.raises(reshard.CorruptCheckpointError, match=text):
        save(source, out, resume=True)
    with pytest.raises(reshard.DestinationError, match="not complete"):
        reshard.commit(out)
    save(source, out, resume=True)
    assert_whole(out, whole)


@pytest.mark.parametrize("name", ["{}.reshard.orbax-checkpoint-tmp", ".reshard-{}.unfinished"])
def test_what_an_earlier_version_has_left(jobs, tmp_path, name):
    path = tmp_path / name.format("out")
    path.mkdir()
    text = f"an earlier version of reshard left an unfinished job: `{path}`"
    text += f"\n  this version cannot resume it\n\nhint: rm -r '{path}', then start again"
    refused(reshard.DestinationError, text, save, jobs("ckpt zarr2")[0], tmp_path / "out")
    assert os.listdir(tmp_path) == [path.name]


def test_shares_of_different_divisions_are_not_mixed(tmp_path, monkeypatch):
    """Two processes that begin at once do not see one another's number of shares."""
    specs = dict.fromkeys("abcdef", ())
    tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (8, 24))
    source, out = reshard.open(layouts.save_pytree(tmp_path / "in", tree)), tmp_path / "out"
    begin = commit.begin
    with monkeypatch.context() as patch:
        patch.setattr(commit, "begin", lambda *a, **k: (begin(*a, **k)[0], None, frozenset()))
        for share in ((1, 2), (0, 3), (2, 3)):
            reshard.save(source, out, share=share, link=False)
    error = layouts.raised(reshard.DestinationError, reshard.commit, out)
    assert str(error).startswith(f"several unfinished jobs exist for `{out}`\n")
    reshard.save(source, out, resume=True, link=False)
    assert reshard.diff(source, reshard.open(out), values=True).equal


@pytest.mark.parametrize(
    "name", [".reshard-1.0123456789abcdef", "1.replaced-by-reshard.0123456789abcdef"]
)
def test_a_checkpoint_with_the_name_of_a_leftover(jobs, tmp_path, name):
    text = f"`{tmp_path / name}` has a name that is reserved for unfinished jobs"
    text += "\n\nhint: choose another name"
    refused(reshard.DestinationError, text, save, jobs("ckpt zarr2")[0], tmp_path / name)


def test_metadata_that_change_where_no_chunk_does(tmp_path):
    """All chunks are linked, so that no share has bytes; the first one has the metadata."""
    tree = layouts.small_tree(layouts.mesh((2, 4)), {"w": ()}, (8, 24))
    source = reshard.open(layouts.save_pytree(tmp_path / "in", tree))
    assert reshard.save(source, tmp_path / "out", format="zarr3").share_count() == 1
    assert reshard.diff(source, reshard.open(tmp_path / "out"), values=True).equal
