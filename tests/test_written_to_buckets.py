"""Checkpoints that are written to buckets: what is there, for whom and when, however a job ends."""

import json
import os
import re
import signal
import subprocess
import threading

import jax
import jobs
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from in_process import command
from jax.sharding import PartitionSpec as P
from jobs import MARKER, RESHARD, values
from sampling import few
from servers import Fault

import reshard
from reshard.storage import bucket, lock
from reshard.storage.location import parse_location

pytestmark = pytest.mark.usefixtures("short_tries")


def on(mesh, path, **kwargs):
    return reshard.to_mesh(reshard.open(path, **kwargs), mesh)


def leftovers(stores, url):
    """Keys of a bucket that no reader of a checkpoint asks for."""
    parts = r"reshard_progress|\.reshard-|process_\w+/manifest"
    return [key for key in stores.keys(url) if re.search(parts, key)]


def top(url):
    return "/".join(url.split("/")[:3])


def assert_saved(url, source, stores, **options):
    """A job does its work, and leaves nothing behind; one that was stopped goes on."""
    done = reshard.save(on("1x8", source), url, **options)
    resumed = any("resumed what an earlier run had written" in note for note in done.notes)
    assert resumed == options.get("resume", False)
    assert values(url) == values(source)
    assert leftovers(stores, top(url)) == []


def locked(destination):
    """A lock of this process on a destination."""
    return lock.Lock(destination.beside(f".reshard-{destination.name}.lock"), destination)


# What is written is read.


@pytest.mark.parametrize(
    "layout", few(["standalone", "zarr2-files", "items", "manager", "v1"], "standalone", "manager")
)
@pytest.mark.parametrize("kind", ["s3", "gs", "conditional"])
def test_from_a_disk_to_a_bucket_to_another_one_and_back(kind, layout, saved, stores, tmp_path):
    source = saved(layout)
    one, other = stores.bucket(kind), stores.bucket("conditional" if kind == "s3" else "s3")
    first = reshard.save(on("1x8", source.path, **source.open), f"{one}/a/run", max_memory="64MiB")
    there = reshard.open(f"{one}/a/run", **source.open)
    assert [str(mesh) for mesh in there.meshes] == ["data=1,model=8"]
    assert len(there.arrays) == len(first.arrays)
    reshard.save(reshard.to_mesh(there, "2x4"), f"{other}/run", verify=True)
    assert leftovers(stores, one) == leftovers(stores, other) == []
    back = reshard.open(f"{other}/run", **source.open)
    reshard.save(back, tmp_path / "back")
    near = [reshard.open(path, **source.open) for path in (source.path, tmp_path / "back")]
    assert reshard.diff(*near, values=True).equal


@pytest.fixture
def url(stores):
    return f"{stores.bucket('conditional')}/out"


def random_state(seed, mesh):
    tree = layouts.small_tree(mesh, {"w": P("data", "model"), "b": P(None, "model")}, (8, 24), seed)
    return {"params": tree, "step": jax.numpy.asarray(seed)}


def test_orbax_reads_what_is_on_gs(run, stores, tmp_path):
    """And on a disk, a plain copy of what is on s3."""
    mesh, other = layouts.mesh((2, 4)), layouts.mesh((1, 8))
    state = random_state(5, mesh)
    target = layouts.abstract(state, other)
    gs, s3 = stores.bucket("gs"), stores.bucket("s3")
    reshard.save(on("1x8", run, item="state"), f"{gs}/run")
    reshard.save(on("1x8", f"{gs}/run", item="state"), f"{s3}/run")
    for key in stores.keys(s3):
        file = tmp_path / key.replace("run/", "copy/", 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(parse_location(f"{s3}/{key}").read() or b"")

    def assert_restored(found):
        layouts.assert_same_tree(found, state)
        assert found["params"]["w"].sharding.mesh == other

    for root in (epath.Path(f"{gs}/run"), epath.Path(tmp_path / "copy")):
        with ocp.CheckpointManager(root) as manager:
            assert manager.all_steps() == [7]
            args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            assert_restored(manager.restore(7, args=args)["state"])
        assert_restored(layouts.load_standard(root / "7" / "state", target))


def test_nobody_sees_a_step_before_its_last_marker(run, stores):
    url = f"{stores.bucket('gs')}/run"
    seen = []

    def look(key):
        with ocp.CheckpointManager(epath.Path(url)) as manager:
            seen.append(manager.all_steps())
        for path in (url, f"{url}/7"):
            try:
                reshard.open(path)
            except reshard.UncommittedCheckpointError as error:
                seen.append(type(error))
        seen.append([key for key in stores.keys(url) if "reshard_progress" in key])

    stores.faults += [Fault(f"write .*/7/{MARKER}", look)]
    reshard.save(on("1x8", run), url)
    assert seen == [[], *[reshard.UncommittedCheckpointError] * 2, []]
    assert reshard.open(url).source.step == "7"
    markers = [key for key in stores.keys(url) if MARKER in key]
    assert markers == [f"run/7/{MARKER}", f"run/7/state/{MARKER}"]
    assert parse_location(f"{url}/7/{MARKER}").read() == (
        f"Checkpoint commit was successful to {url}/7".encode()
    )


def test_data_files_are_small_enough_to_be_held_in_memory(stores, tmp_path, url):
    rng = np.random.default_rng(0)
    tree = {f"{i}": rng.standard_normal((512, 1024)).astype("float32") for i in range(6)}
    ckpt = reshard.open(layouts.save_standard(tmp_path / "in", tree))
    reshard.save(ckpt, url, max_memory="16MiB", codec="none")
    files = [r.sent for r in stores.answered("write", r"process_\w+/d/")]
    assert sum(files) > 12 << 20
    assert max(files) <= (4 << 20) + (1 << 16)


# What is there already.


@pytest.fixture
def small(tmp_path):
    """A small checkpoint, on a disk."""
    mesh = layouts.mesh((2, 4))
    tree = layouts.small_tree(mesh, {"a": P("data", "model"), "b": P("model")}, (64, 96))
    return layouts.save_standard(tmp_path / "small", tree)


@pytest.fixture
def run(tmp_path):
    """A manager's root with one step, on a disk."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        state = random_state(5, layouts.mesh((2, 4)))
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    return tmp_path / "run"


def refused(text, *args, error=reshard.DestinationError, **kwargs):
    return jobs.refused(error, text, reshard.save, *args, **kwargs)


def failed(*args, **kwargs):
    """What is noted of a job that fails since the store does."""
    with pytest.raises(reshard.StoreError) as caught:
        reshard.save(*args, **kwargs)
    return getattr(caught.value, "__notes__", [])


HINT = "hint: name a new destination, or delete what is there"
# What is said of a job that was stopped.
UNFINISHED = (
    "`{}` holds what an earlier run has not completed\n\n"
    "hint: resume=True goes on with it if that was given then, too\n"
    "hint: overwrite=True clears it and begins anew"
)


def test_what_is_complete_is_not_replaced(small, stores, url):
    """Nor written into: it would be taken to be complete, too, while it is written."""
    ckpt = on("1x8", small)
    reshard.save(ckpt, url)
    keys = stores.keys(url)
    text = (
        f"`{url}` is complete, and a bucket has no renames to replace it with\n\n"
        "hint: write to another prefix, and delete this one when you have looked at it"
    )
    for overwrite in (False, True):
        refused(text, ckpt, url, overwrite=overwrite, error=reshard.DestinationExistsError)
        assert reshard.plan(ckpt, url, overwrite=overwrite).problems == (text.split("\n")[0],)
    assert stores.keys(url) == keys
    for below in ("extra", "extra/1000"):
        text = f"`{url}/{below}` is inside of `{url}`, which is complete"
        refused(f"{text}\n\nhint: write to a prefix beside it", ckpt, f"{url}/{below}")
        assert reshard.plan(ckpt, f"{url}/{below}").problems == (text,)
    assert stores.keys(url) == keys


def test_what_is_something_else_is_not_cleared(small, stores):
    bucket = stores.bucket("conditional")
    for name in ("out/notes.txt", "object"):
        parse_location(f"{bucket}/{name}").write(b"kept")
    ckpt = reshard.open(small)
    text = f"`{bucket}/out` exists, and is no unfinished job's\n\n{HINT}"
    for overwrite in (False, True):
        refused(text, ckpt, f"{bucket}/out", overwrite=overwrite)
    refused(f"`{bucket}/object` is an object, and not a prefix of others", ckpt, f"{bucket}/object")
    refused(f"`{bucket}` is a whole bucket\n\nhint: a name in it: {bucket}/1000", ckpt, bucket)
    reshard.save(ckpt, f"{bucket}/in")
    inside = f"the destination `{bucket}/in/2` and the source `{bucket}/in` are inside one another"
    hint = "hint: write to a prefix beside the source"
    refused(f"{inside}\n\n{hint}", reshard.open(f"{bucket}/in"), f"{bucket}/in/2")
    assert {"object", "out/notes.txt"} <= set(stores.keys(bucket))


def test_beside_steps_of_a_manager(small, stores):
    bucket = stores.bucket("conditional")
    assert reshard.plan(reshard.open(small), f"{bucket}/run/1").notes == ()
    reshard.save(reshard.open(small), f"{bucket}/run/1")
    assert reshard.plan(reshard.open(small), f"{bucket}/run/2").notes == (
        f"`{bucket}/run` holds steps: a CheckpointManager that cleans up deletes what is not "
        "complete there, and so this job's; another prefix is safe",
    )


def test_a_directory_that_is_swept_away_while_it_is_written(run, stores, url):
    """As such a manager does it; or some of it."""
    (run / "7" / "notes").mkdir()
    (run / "7" / "notes" / "note.txt").write_text("kept")
    note = parse_location(f"{url}/7/notes/note.txt")

    def remove(part):
        location = parse_location(url)
        files = [found.path for found in location.walk() if found.is_file]
        bucket.remove_files(location, [path for path in files if part in path])

    changed = f"files were removed or changed while others were written\n  `{note}`"
    missing = "data file .* (is gone|missing)"
    for change, error, text in (
        (lambda key: remove(""), reshard.ReshardError, None),
        (lambda key: remove("/d/"), reshard.CorruptCheckpointError, missing),
        (lambda key: note.remove(), reshard.DestinationError, f"^{changed}$"),
        (lambda key: note.write(b"other"), reshard.DestinationError, f"^{changed}$"),
    ):
        stores.faults = [Fault("write .*/_METADATA", change)]
        with pytest.raises(error, match=text):
            reshard.save(on("1x8", run, item="state"), url)
        assert stores.keys(top(url)) == []


# Jobs that fail, and jobs that are killed.


@pytest.mark.parametrize("resume", [False, True])
def test_a_store_that_refuses(resume, small, stores, url):
    stores.faults += [Fault(r"write .*process_\w+/d/", 403)]
    text = f"`{url}` cannot be written\n  403: there are no credentials that allow it"
    refused(text, on("1x8", small), url, resume=resume)
    keys = stores.keys(top(url))
    assert ("out/reshard_progress.json" in keys) == resume == bool(keys)
    assert_saved(url, small, stores, resume=resume)


def test_deletions_that_are_refused(small, stores, url):
    stores.faults += [Fault("write .*/_METADATA", 403), Fault("delete .*/out/", 403, times=1000)]
    notes = failed(on("1x8", small), url)
    left = stores.keys(url)
    assert notes == [
        f"`{url}` is left, uncommitted, with {len(left)} objects that could not be deleted: "
        "overwrite=True clears it and begins anew"
    ]
    stores.faults = []
    text, error = UNFINISHED.format(url), reshard.DestinationExistsError
    refused(text, on("1x8", small), url, error=error)
    text = text.replace("hint: resume=True goes on with it if that was given then, too\n", "")
    refused(text, on("1x8", small), url, error=error, resume=True)
    assert_saved(url, small, stores, overwrite=True)


@pytest.mark.parametrize("kind", [429, 503, "cut"])
def test_what_passes_is_tried_again(kind, small, stores):
    url = f"{stores.bucket('conditional')}/out"
    stores.faults += [Fault("(write|read|delete) ", kind) for _ in range(2)]
    stores.faults += [Fault(f"{verb} .*/out/", kind) for verb in ("write", "read", "list")]
    assert_saved(url, small, stores)


def killed_at(point, words, stores):
    """Runs `reshard ckpt`, and kills it when it asks for what a pattern says, which is done."""
    started = threading.Event()
    running = []

    def kill(key):
        started.wait()
        os.kill(running[0].pid, signal.SIGKILL)

    stores.faults += [Fault(point, kill)]
    with subprocess.Popen([RESHARD, "ckpt", *words], stderr=subprocess.PIPE) as process:
        running.append(process)
        started.set()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "point",
    [
        "write .*_METADATA",
        "write .*/manifest.ocdbt",
        r"write .*process_\w+/d/",
        "delete .*/reshard_progress.json",  # all that is left to do is the last marker
    ],
)
@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_a_killed_job_is_resumed(kind, point, small, stores):
    url = f"{stores.bucket(kind)}/out"
    killed_at(point, [str(small), url, "--to", "1x8", "--resume"], stores)
    with pytest.raises(reshard.UncommittedCheckpointError):
        reshard.open(url)
    refused(UNFINISHED.format(url), on("1x8", small), url)
    with pytest.raises(reshard.DestinationError, match="is another one") as caught:
        reshard.save(on("2x4", small), url, resume=True)
    assert caught.value.hints[-1] == "overwrite=True instead of resume=True begins anew"
    assert_saved(url, small, stores, resume=True)


@pytest.mark.usefixtures("forked")
def test_a_job_that_is_killed_before_its_last_marker(run, small, stores):
    """It is cleared like any other, as long as what it has written is there."""
    point, here = "delete .*/reshard_progress.json", stores.bucket("conditional")
    killed_at(point, [str(run), f"{here}/run", "--to", "1x8", "--resume"], stores)
    assert_saved(f"{here}/run", run, stores, resume=True)
    url = f"{here}/out"
    killed_at(point, [str(small), url, "--to", "1x8"], stores)
    refused(UNFINISHED.format(url), on("1x8", small), url)
    assert_saved(url, small, stores, overwrite=True)
    killed_at(point, [str(small), f"{url}2", "--to", "1x8"], stores)
    parse_location(f"{url}2/_METADATA").write(b"another one's")
    text = f"`{url}2` exists, and is no unfinished job's\n\n{HINT}"
    refused(text, on("1x8", small), f"{url}2", overwrite=True)


# Two writers.


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_a_second_writer_is_told_who_writes(kind, small, stores):
    url = f"{stores.bucket(kind)}/out"
    held = locked(parse_location(url))
    text = f"another job is writing `{url}`\n  process {os.getpid()} on {os.uname().nodename}"
    refused(text, on("1x8", small), url)
    held.release()
    stores.faults += [Fault("delete .*lock", 403)]
    reshard.save(on("1x8", small), url)
    # One that could not be removed is free for the same process.
    assert ".reshard-out.lock" in stores.keys(top(url))
    locked(parse_location(url)).release()
    assert ".reshard-out.lock" not in stores.keys(top(url))


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_a_lock_without_a_heartbeat_is_taken_over(kind, stores, monkeypatch):
    destination = parse_location(f"{stores.bucket(kind)}/out")
    held = locked(destination)
    held._released.set()
    held._thread.join()
    monkeypatch.setitem(held._owner, "machine", "another")
    held._file.write(held._content())
    with monkeypatch.context() as patch:
        patch.setattr(lock, "STALE_SECONDS", 0.1)
        patch.setattr(lock, "BEAT_SECONDS", 0.05)
        taken = locked(destination)
    held._file.write(held._content())  # too late
    taken.check()
    with pytest.raises(reshard.DestinationError, match="no longer this job's"):
        held.check()
    held.release()
    taken.check()
    taken.release()
    assert stores.keys(top(str(destination))) == []


def take_lock(url):
    """Another job's lock, in the place of one."""
    other = {"host": "h", "machine": "m", "pid": 1, "started": "1", "token": "t"}
    location = parse_location(url)
    location.beside(f".reshard-{location.name}.lock").write(json.dumps(other).encode())


@pytest.mark.parametrize("at", ["7/state/_METADATA", f"7/state/{MARKER}", ".reshard-out.journal"])
def test_who_has_lost_the_lock_commits_nothing_and_deletes_nothing(at, run, stores, url):
    """Nor does it write more markers."""
    stores.faults += [Fault(f"write .*/{at}", lambda key: take_lock(url))]
    text = f"the lock on `{url}` is no longer this job's"
    with pytest.raises(reshard.DestinationError, match=text) as caught:
        reshard.save(on("1x8", run), url)
    assert caught.value.__notes__ == [
        f"`{url}` is left, uncommitted ({text}): overwrite=True clears it and begins anew"
    ]
    keys = stores.keys(url)
    assert {"out/reshard_progress.json", "out/7/state/_METADATA"} <= {*keys}
    assert (f"out/7/state/{MARKER}" in keys) == ("_METADATA" not in at)
    assert f"out/7/{MARKER}" not in keys
    with pytest.raises(reshard.UncommittedCheckpointError):
        reshard.open(url)


def test_deletions_end_when_the_lock_is_lost(small, stores, monkeypatch, url):
    monkeypatch.setattr(bucket, "_DELETIONS", 1)
    stores.faults += [Fault("write .*/_METADATA", 403)]
    failed(on("1x8", small), url)
    assert stores.keys(url) == []
    deleted = len(stores.answered("delete", "/out/"))
    stores.reset()

    def take_at_deletion(key):
        stores.faults += [Fault("delete .*/out/", lambda key: take_lock(url))]

    stores.faults += [Fault("write .*/_METADATA", take_at_deletion)]
    stores.faults += [Fault("write .*/_sharding", 403)]
    (note,) = failed(on("1x8", small), url)
    assert "is no longer this job's" in note
    assert len(stores.answered("delete", "/out/")) < deleted
    assert "out/reshard_progress.json" in stores.keys(url)


def test_a_job_that_was_stopped_does_not_remove_the_next_ones_progress(small, stores, url):
    progress = parse_location(f"{url}/reshard_progress.json")
    stores.faults += [Fault("write .*/_METADATA", lambda key: progress.write(b'{"token": "t"}'))]
    with pytest.raises(reshard.DestinationError, match="was removed while it was written"):
        reshard.save(on("1x8", small), url)
    assert f"out/{MARKER}" not in stores.keys(url)


def test_who_has_given_no_sign_for_long_goes_on_only_with_a_new_one(stores):
    """And knows its own where the answer to a heartbeat was lost."""
    destination = parse_location(f"{stores.bucket('conditional')}/out")
    held = locked(destination)
    held._renewed -= lock.STALE_SECONDS
    seen = held._file.read()
    held.check()
    assert held._file.read() != seen
    held._renewed -= lock.STALE_SECONDS
    stores.faults += [Fault("write .*lock", 403)]
    with pytest.raises(reshard.DestinationError, match="no longer this job's"):
        held.check()
    held.check()
    lost = re.sub(rb'"beat": "\d', b'"beat": "9', held._content())
    file = bucket.LockFile(destination.beside(".reshard-out.lock"))
    assert file.take(held._file.read(), lost)
    held._renew()
    assert held._file.read() == held._content() != lost
    held.release()
    assert stores.keys(top(str(destination))) == []


# What others have there.


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("below", ["200", "7/state/d/200"])
def test_a_job_that_fails_deletes_only_what_it_has_written(below, running, run, small, stores, url):
    """And nothing where another one is running inside of it."""
    held, part = "out/7/state/.reshard-d.lock", "out/7/state/d/"

    def save(key):
        parse_location(f"{url}/notes.txt").write(b"kept")
        reshard.save(on("1x8", small), f"{url}/{below}")
        for name in (held, f"{part}half") if running else ():
            parse_location(f"{top(url)}/{name}").write(b"another job's")

    stores.faults += [Fault("write .*/7/[^/]+/_METADATA", save)]
    stores.faults += [Fault("write .*/7/[^/]+/_sharding", 403)]
    failed(on("1x8", run), url)
    assert stores.errors == []
    assert values(f"{url}/{below}") == values(small)
    keys = [key for key in stores.keys(url) if not key.startswith(f"out/{below}/")]
    assert (f"{part}half" in keys) == running
    keys = [key for key in keys if not (running and key.startswith(part))]
    assert keys == [held] * running + ["out/notes.txt"]


def test_what_is_complete_is_not_cleared(run, small, stores):
    """Not a copy without its marker, and not a step that was written where a job was killed."""
    bucket = stores.bucket("conditional")
    reshard.save(on("1x8", small), f"{bucket}/copy")
    parse_location(f"{bucket}/copy/{MARKER}").remove()
    keys = stores.keys(bucket)
    text = f"`{bucket}/copy` exists, and is no unfinished job's\n\n{HINT}"
    refused(text, on("1x8", small), f"{bucket}/copy", overwrite=True)
    assert stores.keys(bucket) == keys
    reshard.save(on("1x8", small), f"{bucket}/run/200")
    parse_location(f"{bucket}/run/reshard_progress.json").write(b"")
    keys = stores.keys(bucket)
    text = (
        f"`{bucket}/run` holds what an earlier run has not completed, and also what is complete, "
        f"or what another job writes\n  `{bucket}/run/200/{MARKER}`\n\n{HINT}"
    )
    for overwrite in (False, True):
        refused(text, on("1x8", run), f"{bucket}/run", overwrite=overwrite)
    assert stores.keys(bucket) == keys


def test_the_markers_of_other_items_are_written_last_too(saved, stores):
    """Otherwise, what a killed job has left is taken to be complete."""
    source = saved("items")
    one, other = f"{stores.bucket('s3')}/run", f"{stores.bucket('conditional')}/run"
    reshard.save(on("1x8", source.path, **source.open), one)
    stores.faults += [Fault("write .*/_METADATA", 403), Fault("delete .*/run/", 403, times=1000)]
    failed(on("2x4", one, **source.open), other)
    assert [key for key in stores.keys(other) if MARKER in key] == []
    stores.faults = []
    reshard.save(on("2x4", one, **source.open), other, overwrite=True)
    markers = [[key for key in stores.keys(url) if MARKER in key] for url in (one, other)]
    assert markers[0] == markers[1] != []


@pytest.mark.parametrize("kind", ["conditional", "s3"])
def test_a_last_marker_that_is_refused(kind, small, stores):
    url = f"{stores.bucket(kind)}/out"
    stores.faults += [Fault(f"write .*/{MARKER}", 403)]
    assert failed(on("1x8", small), url, resume=True) == [
        f"`{url}` is kept, uncommitted: the same call with resume=True goes on with it"
    ]
    stores.reset()
    assert_saved(url, small, stores, resume=True)


def test_what_an_unfinished_job_has_left_is_no_checkpoint(small, stores, url):
    """Whatever markers it has, and however little of it is there."""
    reshard.save(on("1x8", small), url)
    progress = parse_location(f"{url}/reshard_progress.json")
    progress.write(b"")
    text = (
        f"`{url}` was never committed: its `reshard_progress.json` is there as long as a job "
        "has not completed it\n\nhint: if none is running: the job that wrote it goes on with "
        "resume=True if that was given then, too; with overwrite=True it begins anew"
    )
    for key in stores.keys(url):
        jobs.refused(reshard.UncommittedCheckpointError, text, reshard.open, url)
        if "progress" not in key:
            parse_location(f"{top(url)}/{key}").remove()


def test_parts_of_an_item_are_no_items(url):
    parse_location(f"{url}/_CHECKPOINT_METADATA").write(b"{}")
    for part in "ab":
        parse_location(f"{url}/ocdbt.process_{part}/manifest.ocdbt").write(b"")
    with pytest.raises(reshard.UncommittedCheckpointError, match=MARKER.replace(".", "[.]")):
        reshard.open(url)


# What is told before.


def test_the_plan_says_what_crosses_the_network(stores, tmp_path):
    """In fewer requests than there are chunks."""
    specs = {f"layer_{i}": P("data", "model") for i in range(60)}
    tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (8, 16))
    near = layouts.save_standard(tmp_path / "in", tree)
    one, other = f"{stores.bucket('s3')}/in", f"{stores.bucket('conditional')}/out"
    reshard.save(reshard.open(near), one)
    status, out, _ = command(["ckpt", one, other, "--to", "1x8", "--dry-run"])
    assert status == 0
    pattern = r"network  fetch \S+ KiB in at most \d+ requests, send \S+ KiB in at most \d+"
    assert re.search(f"(?m)^{pattern}$", out)
    ckpt = on("1x8", one)
    stores.reset()
    planned = reshard.save(ckpt, other)
    network = planned.network
    arrays = r"process_\w+/d/|out/d/"
    assert len(stores.requests) < planned.chunks_read
    assert len(stores.answered("read", "/d/")) <= network.fetches + 8
    assert sum(r.sent for r in stores.answered("write", arrays)) <= 2 * network.sent + (1 << 14)
    assert network.fetched == planned.bytes_read
    assert reshard.plan(on("1x8", near)).network is None
