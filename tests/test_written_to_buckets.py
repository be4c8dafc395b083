"""Checkpoints that are written to buckets: what is there, for whom and when, however a job ends."""

import concurrent.futures
import functools
import itertools
import os
import re
import signal
import subprocess
import threading

import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P
from jobs import MARKER, RESHARD, values
from sampling import few, some
from servers import Fault

import reshard
from reshard.loader.detection import RECORD
from reshard.storage.location import parse_location
from reshard.writer import commit
from reshard.writer.job import parsed

pytestmark = pytest.mark.usefixtures("short_tries")
# A data file of the first share.
SHARE = r"process_[0-9a-f]{16}0x0/d/"


def on(mesh, path, **kwargs):
    return reshard.to_mesh(reshard.open(path, **kwargs), mesh)


def assert_pruned(stores, url):
    """Nothing is in the bucket of a checkpoint but what it refers to, and its commit record."""
    record = parsed(parse_location(url) / RECORD)
    paths = [*record["files"], *(path for path, _ in record["markers"]), *record["kept"], RECORD]
    prefix = url.removeprefix(f"{top(url)}/")
    assert stores.keys(url) == sorted(f"{prefix}/{path}" for path in paths)


def top(url):
    return "/".join(url.split("/")[:3])


def assert_saved(url, source, stores, **options):
    reshard.save(on("1x8", source), url, **options)
    assert values(url) == values(source)
    assert_pruned(stores, url)


@pytest.mark.parametrize(
    "layout", few(["standalone", "zarr2-files", "items", "manager", "v1"], "standalone", "manager")
)
@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_from_a_disk_to_a_bucket_to_another_one_and_back(kind, layout, saved, stores, tmp_path):
    source = saved(layout)
    one, other = stores.bucket(kind), stores.bucket("conditional" if kind == "s3" else "s3")
    first = reshard.save(on("1x8", source.path, **source.open), f"{one}/a/run", max_memory="64MiB")
    there = reshard.open(f"{one}/a/run", **source.open)
    assert [str(mesh) for mesh in there.meshes] == ["data=1,model=8"]
    assert len(there.arrays) == len(first.arrays)
    reshard.save(reshard.to_mesh(there, "2x4"), f"{other}/run", verify="files" not in layout)
    assert_pruned(stores, f"{one}/a/run")
    assert_pruned(stores, f"{other}/run")
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
    gs, s3 = stores.bucket("conditional"), stores.bucket("s3")
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
    url = f"{stores.bucket('conditional')}/run"
    seen, keys = [], []

    def look(key):
        keys.append(key)
        with ocp.CheckpointManager(epath.Path(url)) as manager:
            seen.append(manager.all_steps())
        for path in (url, f"{url}/7"):
            with pytest.raises((reshard.CheckpointNotFoundError, reshard.CheckpointFormatError)):
                reshard.open(path)

    stores.faults += [Fault("write ", look, times=1000)]
    reshard.save(on("1x8", run), url)
    stores.faults = []
    assert seen == [[]] * len(keys)
    assert keys[-1] == f"{url[5:]}/7/{MARKER}"
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


@pytest.fixture
def small(tmp_path):
    mesh = layouts.mesh((2, 4))
    tree = layouts.small_tree(mesh, {"a": P("data", "model"), "b": P("model")}, (64, 96))
    return layouts.save_standard(tmp_path / "small", tree)


@pytest.fixture
def run(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        state = random_state(5, layouts.mesh((2, 4)))
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    return tmp_path / "run"


def refused(text, *args, error=reshard.DestinationError, **kwargs):
    with pytest.raises(error) as caught:
        reshard.save(*args, **kwargs)
    assert re.sub("process .*, since .* UTC: .*", "WRITER", str(caught.value)) == text


def failed(*args, **kwargs):
    """What is noted of a job that fails since the store does."""
    with pytest.raises((reshard.StoreError, reshard.DestinationError), match=" 403: ") as caught:
        reshard.save(*args, **kwargs)
    return getattr(caught.value, "__notes__", [])


COMPLETE = "`{}` is complete, and a complete checkpoint in a bucket is never replaced\n\n"
COMPLETE += "hint: write to another prefix, check the result, then delete this prefix"


def test_what_is_complete_is_not_replaced(small, stores, url):
    """Nor written into: it would be taken to be complete, too, while it is written."""
    ckpt = on("1x8", small)
    reshard.save(ckpt, url)
    keys = stores.keys(url)
    error = reshard.DestinationExistsError
    for options in ({}, {"overwrite": True}):
        refused(COMPLETE.format(url), ckpt, url, error=error, **options)
    refused(COMPLETE.format(url), on("2x4", small), url, error=error, resume=True)
    reshard.save(ckpt, url, resume=True)
    for below in ("extra", "extra/1000"):
        text = f"`{url}/{below}` is inside `{url}`, which is a complete checkpoint"
        refused(f"{text}\n\nhint: write to another prefix", ckpt, f"{url}/{below}")
        assert reshard.plan(ckpt, f"{url}/{below}").problems == (text,)
    assert stores.keys(url) == keys


def test_what_is_something_else_is_not_cleared(small, stores):
    bucket = stores.bucket("conditional")
    for name in ("out/notes.txt", "object", f"other/200/{MARKER}"):
        parse_location(f"{bucket}/{name}").write(b"kept")
    ckpt, error = reshard.open(small), reshard.DestinationExistsError
    text = (
        f"`{bucket}/out` holds objects that reshard did not write\n"
        f"  `{bucket}/out/notes.txt`\n\n"
        "hint: write to another prefix, or delete these while no job runs"
    )
    for options in ({}, {"overwrite": True}, {"resume": True}, {"share": (1, 2)}):
        refused(text, ckpt, f"{bucket}/out", error=error, **options)
        refused(COMPLETE.format(f"{bucket}/other"), ckpt, f"{bucket}/other", error=error, **options)
    refused(f"`{bucket}/object` is an object, not a prefix", ckpt, f"{bucket}/object")
    text = f"`{bucket}` is a bucket, not a path in a bucket\n\nhint: add a path: {bucket}/1000"
    refused(text, ckpt, bucket)
    reshard.save(ckpt, f"{bucket}/in")
    inside = f"the destination `{bucket}/in/2` and the source `{bucket}/in` overlap\n\n"
    inside += "hint: write to another prefix"
    refused(inside, reshard.open(f"{bucket}/in"), f"{bucket}/in/2")
    keys = [key for key in stores.keys(bucket) if not key.startswith("in/")]
    assert keys == ["object", f"other/200/{MARKER}", "out/notes.txt"]


def test_beside_steps_of_a_manager(small, stores):
    bucket = stores.bucket("conditional")
    assert reshard.plan(reshard.open(small), f"{bucket}/run/1").notes == ()
    reshard.save(reshard.open(small), f"{bucket}/run/1")
    (note,) = reshard.plan(reshard.open(small), f"{bucket}/run/2").notes
    assert note.startswith(f"`{bucket}/run` has other steps: a CheckpointManager that removes inc")


def test_a_directory_that_is_swept_away_while_it_is_written(run, stores, url):
    (run / "7" / "notes").mkdir()
    (run / "7" / "notes" / "note.txt").write_text("kept")
    location = parse_location(url)

    def remove(part):
        files = [found.path for found in location.walk() if found.is_file]
        location.remove_files([path for path in files if re.search(part, path)])

    short = rf"^1 of 1 shares of `{url}` is not complete\n  missing share numbers: 0\n"
    gone = rf"^files that the commit record names are missing\n(.|\n)*hint: delete `{url}` while no"
    for point, removed, text in (
        (r"process_\w+/0.json", "", short),
        (r"process_\w+/0.json", "x0/d/", short),
        (r"process_\w+/0.json", "unsharedxfiles/", short),
        (RECORD, "rootx/d/", gone),
    ):
        stores.faults = [Fault(f"write .*{point}", lambda key, removed=removed: remove(removed))]
        with pytest.raises(reshard.DestinationError, match=text):
            reshard.save(on("1x8", run, item="state"), url, overwrite=True)
        keys = stores.keys(url)
        assert all("ocdbt.process_" in key or key == f"out/{RECORD}" for key in keys)


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_a_store_that_refuses(kind, small, stores):
    url = f"{stores.bucket(kind)}/out"
    for point, there in (
        ("begun.json", None),
        (r"unshared\w+/", None),
        (SHARE, "the documents and other items are complete, and stay"),
        (f"/{RECORD}", "1 of 1 shares are complete, and stay"),
        ("/_METADATA", "1 of 1 shares are complete, and stay"),
        (f"/{MARKER}", ""),  # the record says all
    ):
        stores.faults += [Fault(f"write .*{point}", 403)]
        notes = failed(on("1x8", small), url, resume=True)
        assert notes == ([f"{there} in `{url}`: resume=True continues it"] if there else [])
        assert (stores.keys(top(url)) == []) == (there is None)
        with pytest.raises((reshard.CheckpointNotFoundError, reshard.CheckpointFormatError)):
            reshard.open(url)
    assert_saved(url, small, stores, resume=True)


@pytest.mark.parametrize("options", [{}, {"share": (0, 1)}])
def test_deletions_that_are_refused(options, small, stores, url):
    stores.faults += [Fault("delete ", 403, times=1000)]
    reshard.save(on("1x8", small), url, **options)
    if options:
        assert reshard.commit(url) is True
    assert values(url) == values(small)
    stores.faults = []
    assert reshard.commit(url) is False
    assert_pruned(stores, url)


def test_a_store_that_ignores_conditions(small, stores):
    url = f"{stores.bucket('gs')}/out"
    text = "cannot be written\n  this store ignores conditional writes, so two jobs could overwrite"
    for options in ({}, {"share": (0, 2)}):
        with pytest.raises(reshard.StoreError, match=text):
            reshard.save(on("1x8", small), url, **options)
    assert stores.keys(top(url)) == []


@pytest.mark.parametrize("kind", [429, 503, "cut"])
def test_what_passes_is_tried_again(kind, small, stores):
    url = f"{stores.bucket('conditional')}/out"
    stores.faults += [Fault("(write|read|delete) ", kind) for _ in range(2)]
    verbs = [f"{verb} .*/unshared.json" for verb in ("write", "read", "delete")]
    stores.faults += [Fault(pattern, kind) for pattern in [*verbs, "list "]]
    assert_saved(url, small, stores)


POINTS = [SHARE, r"process_\w+/0.json", RECORD, "/_METADATA", MARKER]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_a_killed_job_is_resumed(kind, point, small, stores):
    url = f"{stores.bucket(kind)}/out"
    running = concurrent.futures.Future()
    kill = Fault(f"write .*{point}", lambda key: os.kill(running.result().pid, signal.SIGKILL))
    stores.faults.append(kill)
    words = [RESHARD, "ckpt", str(small), url, "--to", "1x8"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        running.set_result(process)
    assert process.returncode == -signal.SIGKILL
    stores.wait()  # the request that it was killed in is still done
    recorded = f"out/{RECORD}" in stores.keys(url)
    assert recorded == (POINTS.index(point) >= POINTS.index(RECORD))
    if point != MARKER:
        with pytest.raises(reshard.UncommittedCheckpointError):
            reshard.open(url)
    if not recorded:
        error = reshard.DestinationExistsError
        left = "files but no finished" if point == SHARE else "finished"
        text = f"a stopped job left {left} shares of `{url}`\n  WRITER\n\n"
        text += "hint: resume=True continues it\nhint: overwrite=True starts again"
        refused(text, on("1x8", small), url, error=error)
        with pytest.raises(reshard.DestinationError, match="is not this job\n") as caught:
            reshard.save(on("2x4", small), url, resume=True)
        assert caught.value.hints[-1] == "overwrite=True starts again"
    assert_saved(url, small, stores, resume=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    mesh = layouts.mesh((1, 2))
    top = tmp_path_factory.mktemp("pair")
    trees = [layouts.small_tree(mesh, {"a": P("data", "model")}, (8, 12), seed) for seed in (1, 2)]
    return [layouts.save_standard(top / f"{n}", tree) for n, tree in enumerate(trees)]


def in_shares(ckpt, url):
    for number in range(2):
        reshard.save(ckpt, url, share=(number, 2))
    reshard.commit(url)


def ended(call, *args):
    """Whether a call reports success, and does not raise one of our own errors."""
    try:
        call(*args)
    except reshard.ReshardError:
        return False
    return True


def stalled(stores, number, one, other):
    """Runs a job, whose changing request of this number the store gets only when another job has
    ended; whether each of them reports success. None if there are not so many requests."""
    stalls, goes_on, numbers = threading.Event(), threading.Event(), itertools.count()

    def hold(key):
        if next(numbers) == number:
            stalls.set()
            assert goes_on.wait(60)

    stores.faults = [Fault("(write|delete) ", hold, times=100_000)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(one)
        first.add_done_callback(lambda _: stalls.set())
        stalls.wait()
        try:
            second = None if first.done() else other()
        finally:
            goes_on.set()
        return None if second is None else (first.result(), second)


ANEW, RESUMED = (functools.partial(reshard.save, **{o: True}) for o in ("overwrite", "resume"))
OTHERS = [reshard.save, ANEW, RESUMED, in_shares]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["s3", "conditional"])
@pytest.mark.parametrize("one", [reshard.save, in_shares])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("same", [False, True])
def test_a_job_that_stalls_at_a_request(pair, stores, monkeypatch, kind, one, other, same):
    """For as long as another one takes, which does not know whether the first has ended. The other
    jobs together meet every request."""
    monkeypatch.setattr(commit, "has_ended", lambda owner: None)
    jobs = [reshard.to_mesh(reshard.open(path), "1x4") for path in pair]
    bits = [values(path) for path in pair]
    jobs, bits = [(found[0], found[not same]) for found in (jobs, bits)]
    for number in some(range(OTHERS.index(other) % 3, 1000, 3)):
        url = f"{stores.bucket(kind)}/out"
        seen = []

        def other_job(url=url, seen=seen):
            done = ended(other, jobs[1], url)
            seen.extend([values(url)] if done else [])
            return done

        done = stalled(stores, number, lambda url=url: ended(one, jobs[0], url), other_job)
        if done is None:
            break
        assert any(done), number
        found = values(url)
        assert seen == [found] * done[1]
        assert found in bits
        for expected, call, is_done in zip(bits, (one, other), done, strict=True):
            # `commit` reports complete what is there, of whichever job.
            assert found == expected or not is_done or call == in_shares
        reshard.commit(url)
        assert reshard.verify(reshard.open(url)).ok
        assert_pruned(stores, url)
    assert number > 8


@pytest.mark.parametrize("below", ["200", "7/state/d/200"])
def test_a_job_that_fails_deletes_only_what_it_has_written(below, run, small, stores, url):
    def save(key):
        parse_location(f"{url}/notes.txt").write(b"kept")
        reshard.save(on("1x8", small), f"{url}/{below}")

    stores.faults += [Fault("write .*unsharedxfiles/", save)]
    stores.faults += [Fault("write .*/7/[^/]+/ocdbt.*_sharding", 403)]
    failed(on("1x8", run), url)
    assert stores.errors == []
    assert values(f"{url}/{below}") == values(small)
    keys = [key for key in stores.keys(url) if not key.startswith(f"out/{below}/")]
    assert keys == ["out/notes.txt"]


@pytest.mark.parametrize("below", ["200", "7/state/d/200"])
def test_a_job_deletes_nothing_of_a_checkpoint_inside_of_it(below, run, small, stores, url):
    inner = f"{url}/{below}"
    stores.faults += [Fault("write .*begun", lambda key: reshard.save(on("1x8", small), inner))]
    reshard.save(on("1x8", run), url)
    assert stores.errors == []
    assert values(url, step=7) == values(run)
    reshard.save(on("1x8", small), f"{url}/300")  # a step more
    assert reshard.commit(url) is False
    for path in (inner, f"{url}/300"):
        assert values(path) == values(small)


def test_the_markers_of_other_items_are_written_last_too(saved, stores):
    """Otherwise, what a killed job has left is taken to be complete."""
    source = saved("items")
    one, other = f"{stores.bucket('s3')}/run", f"{stores.bucket('conditional')}/run"
    reshard.save(on("1x8", source.path, **source.open), one)
    stores.faults += [Fault("write .*/_METADATA", 403)]
    failed(on("2x4", one, **source.open), other)
    assert [key for key in stores.keys(other) if MARKER in key] == []
    stores.faults = []
    reshard.save(on("2x4", one, **source.open), other, resume=True)
    markers = [[key for key in stores.keys(url) if MARKER in key] for url in (one, other)]
    assert markers[0] == markers[1] != []


def test_parts_of_an_item_are_no_items(url):
    parse_location(f"{url}/_CHECKPOINT_METADATA").write(b"{}")
    for part in "ab":
        parse_location(f"{url}/ocdbt.process_{part}/manifest.ocdbt").write(b"")
    with pytest.raises(reshard.UncommittedCheckpointError, match=MARKER.replace(".", "[.]")):
        reshard.open(url)
