"""What was opened is what is read: a source that changes afterwards is refused."""

import concurrent.futures
import functools
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import flax.serialization
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from in_process import reshard_in
from jobs import unfinished
from layouts import raised, refused
from servers import Fault
from test_buckets import put
from test_zarr_tree import write

import reshard
from reshard import ChangedCheckpointError
from reshard.engine.read import Filled
from reshard.storage import disk
from reshard.storage.array_store import ArrayStore
from reshard.storage.disk import Location
from reshard.writer import save as writing
from reshard.writer.export import plan_export
from reshard.writer.save import execute

# Of arrays that are too large for the nodes of OCDBT, and of one that is not.
SHAPES = {"m/a": (48, 32), "m/b": (2000,), "z/c": (3,)}


def arrays(seed=0, dtype="f4"):
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    return {name: (9999 * each).astype(dtype) for name, each in values.items()}


def tree(**which):
    return unflatten_dict(arrays(**which), sep="/")


def save_tensors(path, tree):
    path.mkdir()
    save_file(path / "model.safetensors", tree)


def save_file(path, tree):
    tensors = flatten_dict(tree, sep=".")
    safetensors.numpy.save_file(tensors, path)


def save_msgpack(path, tree):
    path.write_bytes(flax.serialization.msgpack_serialize(tree))


def save_zarr(driver, ocdbt, path, tree):
    write(f"file://{path}/", driver, ocdbt, flatten_dict(tree, sep="/"))


def save_unmerged(path, tree):
    layouts.save_pytree(path, tree)
    layouts.split_database(path)


FORMS: dict[str, Callable[[pathlib.Path, Any], object]] = {
    "zarr2": layouts.save_pytree,
    "zarr3": functools.partial(layouts.save_pytree, use_zarr3=True),
    "zarr2-files": functools.partial(layouts.save_pytree, use_ocdbt=False),
    "zarr3-files": functools.partial(layouts.save_pytree, use_zarr3=True, use_ocdbt=False),
    "unmerged": save_unmerged,
    "tensors": save_tensors,
    "file": save_file,
    "msgpack": save_msgpack,
    "tree": functools.partial(save_zarr, "zarr", False),
    "tree-ocdbt": functools.partial(save_zarr, "zarr3", True),
}


def make(path, form="zarr2", **which):
    FORMS[form](path, tree(**which))
    return path


def files_of(ckpt, name):
    """The files that hold the chunks of an array."""
    data = ckpt[f"m/{name}"].data
    return {data.store.directory / chunk.file for chunk in data.chunks.values()}


def replace(file):
    """By another file of the same size and time."""
    status, other = os.stat(file), f"{file}-2"
    pathlib.Path(other).write_bytes(bytes(status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, file)


def rewrite(file):
    """In place, with the same size."""
    pathlib.Path(file).write_bytes(bytes(os.stat(file).st_size))


TOLD = {
    replace: "has changed since it was opened\n  another file has its name, also of ",
    rewrite: "has changed since it was opened\n  it had ",
    os.unlink: "was removed\n\nhint: open it again: reshard.open(path)",
}


def transformed(ckpt):
    """By all that keeps a source."""
    ckpt = reshard.rename(reshard.select(ckpt, "m/*"), [("^m/", "n/")])
    return reshard.to_mesh(reshard.cast(ckpt, "bfloat16"), "data=1,model=1")


def calls(ckpt, folder):
    """What reads a checkpoint."""
    other = reshard.open(make(folder / "other.safetensors", "file", seed=1))
    yield reshard.restore, ckpt, tree()
    yield reshard.digest, ckpt
    for one, two in ((ckpt, other), (other, ckpt)):
        yield reshard.verify, one, two
        yield reshard.diff, one, two
    for each in (ckpt, transformed(ckpt)):
        yield reshard.plan, each, folder / "out"
        yield reshard.save, each, folder / "out"
        yield reshard.export, each, folder / "out"


@pytest.mark.every_combination
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", TOLD, ids=lambda change: change.__name__)
def test_a_file_that_changes_after_it_was_opened(tmp_path, form, change):
    name = "a.safetensors" if form == "file" else "a"
    ckpt = reshard.open(make(tmp_path / name, form))
    plans = [reshard.plan(each, tmp_path / "out") for each in (ckpt, transformed(ckpt))]
    (file,) = files_of(ckpt, "a")
    data, copied = file.read_whole(), pickle.loads(pickle.dumps(ckpt))
    change(file)
    text = f"`{file}` {TOLD[change]}"
    reads = [(array.read,) for array in (ckpt["m/a"], transformed(ckpt)["n/a"])]
    for call in (*calls(ckpt, tmp_path), *((execute, plan) for plan in plans), *reads):
        assert refused(ChangedCheckpointError, *call).startswith(text), call
    assert {*os.listdir(tmp_path)} <= {name, "other.safetensors"}
    # Another process, perhaps on another host, sees another inode.
    if change is replace:
        times = os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns
        pathlib.Path(file).write_bytes(data)
        os.utime(file, ns=times)
        assert np.array_equal(copied["m/a"].read(), arrays()["m/a"])
        return
    for call in ((copied["m/a"].read,), (reshard.save, copied, tmp_path / "out")):
        assert refused(ChangedCheckpointError, *call).startswith(text)


@pytest.mark.parametrize("form", ["zarr2-files", "zarr3-files", "tree"])
def test_an_array_needs_its_own_files_alone(tmp_path, form):
    source, values = make(tmp_path / "source", form), arrays()
    ckpt = reshard.open(source)
    for file in files_of(ckpt, "b"):
        os.utime(file)
    assert np.array_equal(ckpt["m/a"].read(), values["m/a"])
    raised(ChangedCheckpointError, ckpt["m/b"].read)
    raised(ChangedCheckpointError, reshard.digest, ckpt)
    ckpt = reshard.open(source)
    metadata = next(source.rglob("*a/.zarray" if form != "zarr3-files" else "*a/zarr.json"))
    os.utime(metadata)
    assert f"`{metadata}` has changed" in refused(ChangedCheckpointError, ckpt["m/a"].read)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "_sharding", "array_metadatas/*"])
def test_a_document_that_changes(tmp_path, name):
    layouts.save_pytree(tmp_path / "source", {"m": {"a": layouts.put(np.ones((8, 4)), "data")}})
    ckpt = reshard.open(tmp_path / "source")
    (file,) = (tmp_path / "source").glob(name)
    os.utime(file)
    assert refused(ChangedCheckpointError, reshard.digest, ckpt).startswith(f"`{file}` has changed")
    plan = (reshard.plan, ckpt, tmp_path / "out")
    assert refused(ChangedCheckpointError, *plan).startswith(f"`{file}` has changed")


def test_several_files(tmp_path):
    ckpt = reshard.open(make(tmp_path / "source", "zarr2-files"))
    (a,), (b,) = files_of(ckpt, "a"), files_of(ckpt, "b")
    os.unlink(a)
    os.truncate(b, 3)
    error = raised(ChangedCheckpointError, reshard.verify, ckpt)
    assert error.summary == "2 problems"
    told = {line.partition(" of ")[0] for line in error.problems}
    assert {f"`{a}` was removed", f"`{b}` has changed since it was opened"} <= told


def test_a_link_that_points_elsewhere(tmp_path):
    """Above the opened directory, and the opened path itself."""
    for name, seed in (("one", 0), ("two", 1)):
        make(tmp_path / name / "step", seed=seed)
    os.symlink("one", tmp_path / "link")
    os.symlink("one/step", tmp_path / "latest")
    opened = [reshard.open(tmp_path / path) for path in ("link/step", "latest")]
    for name, target in (("link", "two"), ("latest", "two/step")):
        os.symlink(target, tmp_path / "new")
        os.replace(tmp_path / "new", tmp_path / name)
    for ckpt in opened:
        raised(ChangedCheckpointError, ckpt["m/a"].read)
        raised(ChangedCheckpointError, reshard.restore, ckpt, tree())


def test_a_step_that_is_saved_again_with_another_dtype(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        ckpt = reshard.open(tmp_path / "run")
        manager.delete(1)
        manager.save(1, args=ocp.args.StandardSave(tree(dtype="i4")))
    for call in ((ckpt["m/a"].read,), *calls(ckpt, tmp_path)):
        raised(ChangedCheckpointError, *call)


def test_what_may_change(tmp_path):
    """Other steps, files of the root, records of digests, other names in it, and attributes of its
    files that are not what is in them."""
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(tree(seed=step)))
        manager.wait_until_finished()
        (root / "log").write_text("1")
        item = root / "2" / "default"
        ckpt = reshard.open(root)
        plan = reshard.plan(ckpt, tmp_path / "out")
        manager.save(3, args=ocp.args.StandardSave(tree(seed=3)))
        manager.delete(1)
    (root / "log").write_text("12")
    reshard.digest(reshard.open(root, step=2), write=True)
    (item / "new").write_text("new")
    for number, file in enumerate(f for f in item.rglob("*") if f.is_file()):
        os.link(file, tmp_path / f"link{number}")
        os.chmod(file, 0o640)
    assert np.array_equal(ckpt["m/a"].read(), arrays(seed=2)["m/a"])
    assert reshard.verify(ckpt) and reshard.diff(ckpt, ckpt, values=True).equal
    layouts.assert_same_tree(reshard.restore(ckpt, tree()), tree(seed=2))
    execute(plan)
    assert reshard.verify(reshard.open(tmp_path / "out"), ckpt)


def test_a_chunk_that_is_new_is_not_read(tmp_path):
    """It had the fill value when it was opened."""
    source = tmp_path / "source"
    write(f"file://{source}/", "zarr", False, {"m/a": np.ones((4, 4)), "n/b": np.ones(3)})
    chunk = source / "m/a/0.0"
    chunk.rename(tmp_path / "chunk")
    ckpt = reshard.open(source)
    (tmp_path / "chunk").rename(chunk)
    assert not ckpt["m/a"].read().any()
    assert reshard.diff(ckpt, reshard.open(source), values=True).differences[0].path == ("m", "a")


# At any moment.

EVENTS = [(Location, name) for name in ("entry", "look", "names", "part", "read_whole")]
EVENTS += [(ArrayStore, "kvstore"), (Filled, "begin"), (writing, "write_unshared")]
EVENTS += [(writing, "write_share"), (writing, "complete")]


def watched(patch, happens):
    """Calls a function with the number of each event, before it."""
    numbers = iter(range(1 << 20))

    def wrapped(original):
        def call(*arguments, **keywords):
            happens(next(numbers))
            return original(*arguments, **keywords)

        return call

    for owner, name in EVENTS:
        patch.setattr(owner, name, wrapped(getattr(owner, name)))


def restored(source, out):
    return reshard.restore(reshard.open(source), layouts.mesh((1, 1)))


def read(source, out):
    return {"/".join(path): each.read() for path, each in reshard.open(source).items()}


def written(source, out, **options):
    reshard.save(reshard.open(source), out, **options)
    return read(out, None)


def exported(source, out):
    reshard.export(reshard.open(source), out)
    return read(out, None)


def by_shares(source, out):
    ckpt = reshard.open(source)
    reshard.save(ckpt, out, share=(0, 1), chunks="keep", codec="zstd:9")
    reshard.commit(out)
    return read(out, None)


MADE = {
    "restore": restored,
    "read": read,
    "copy": written,
    "save": functools.partial(written, codec="zstd:9"),
    "export": exported,
    "shares": by_shares,
}


@pytest.mark.parametrize("form", ["zarr2", "zarr3-files", "tensors", "tree", "msgpack"])
@pytest.mark.parametrize("made", MADE)
def test_a_source_that_is_replaced_at_any_moment(tmp_path, form, made):
    """By another checkpoint, in one step: what is made of it is of one of the two, or nothing."""
    source, other, out = (tmp_path / name for name in ("source", "other", "out"))
    whole = [arrays(), arrays(seed=1, dtype="i4")]
    count, results, refusals = 0, [], set()

    def at(moment):
        def happens(number):
            nonlocal count
            count = max(count, number)
            if number == moment:
                assert disk.exchange(source, other)

        for left in (source, other, out, *unfinished(out)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        make(source, form)
        make(other, form, seed=1, dtype="i4")
        with pytest.MonkeyPatch.context() as patch:
            watched(patch, happens)
            try:
                found = flatten_dict(MADE[made](source, out), sep="/")
            except reshard.ReshardError as error:
                assert not out.exists()
                refusals.add(type(error))
                return
        results.append([same(found, each) for each in whole])

    at(-1)
    for moment in range(0, count, max(count // 30, 1)):
        at(moment)
    assert results[:2] == [[True, False], [False, True]]
    assert all(any(result) for result in results)
    assert ChangedCheckpointError in refusals


def same(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == values.dtype and np.array_equal(found[name], values)
        for name, values in expected.items()
    )


def test_a_source_that_is_another_while_a_share_is_written(tmp_path, monkeypatch):
    """Then it is the first again, with its times: the commit sees no difference."""
    source, other, out = (tmp_path / name for name in ("source", "other", "out"))
    for place, seed in ((source, 0), (other, 1)):
        make(place, "zarr2-files", seed=seed)
    ckpt, write_item = reshard.cast(reshard.open(source), "bfloat16"), writing.write_item

    def exchanged(*arguments):
        disk.exchange(source, other)
        return write_item(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_item", exchanged)
        raised(ChangedCheckpointError, reshard.save, ckpt, out, share=(0, 1))
    disk.exchange(source, other)
    raised(reshard.DestinationError, reshard.commit, out)
    reshard.save(ckpt, out, share=(0, 1))
    reshard.commit(out)
    assert reshard.diff(ckpt, out, values=True).equal


def test_hosts_that_see_other_inodes(tmp_path):
    """Shares of one job, resumed and committed where the source is a copy with the same times."""
    source, out = make(tmp_path / "source"), tmp_path / "out"
    reshard.save(reshard.open(source), out, share=(0, 1))
    shutil.move(source, tmp_path / "old")
    shutil.copytree(tmp_path / "old", source)
    reshard.save(reshard.open(source), out, share=(0, 1))  # is of the same job
    reshard.commit(out)
    assert reshard.verify(out, source)


def test_workers(tmp_path):
    """Of an executor: they compare, too, and what they have not seen does not count."""
    ckpt = reshard.open(make(tmp_path / "source", "zarr3-files"))
    plan = reshard.plan(reshard.cast(ckpt, "bfloat16"), tmp_path / "out")
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        assert reshard.verify(ckpt, executor=executor)
        execute(plan, executor=executor)
        (file,) = files_of(ckpt, "a")
        rewrite(file)
        plan = pickle.loads(pickle.dumps(plan))
        shutil.rmtree(tmp_path / "out")
        for call in ((reshard.verify, ckpt), (execute, plan)):
            told = refused(ChangedCheckpointError, *call, executor=executor)
            assert told.startswith(f"`{file}` has changed since it was opened")
    assert not (tmp_path / "out").exists()


def test_a_resumed_job(tmp_path):
    source, out = make(tmp_path / "source"), tmp_path / "out"
    with layouts.killed_at_the_end():
        reshard.save(reshard.open(source), out)
    ckpt = reshard.open(source)
    (file,) = files_of(ckpt, "a")
    os.utime(file)
    raised(ChangedCheckpointError, reshard.save, ckpt, out, resume=True)
    again = reshard.open(source), out
    assert "is not this job" in refused(reshard.DestinationError, reshard.save, *again, resume=True)


def test_a_model_that_is_slow(tmp_path):
    """While it is imported, a file is replaced by one with the same tensors in another order."""
    path = tmp_path / "st" / "model.safetensors"
    path.parent.mkdir()
    a, b = np.zeros((2, 2), "f4"), np.ones((2, 2), "f4")
    safetensors.numpy.save_file({"a": a, "b": b}, path)
    safetensors.numpy.save_file({"a": b, "b": a}, tmp_path / "other")
    model = f"import os, jax\nos.replace('other', {str(path)!r})\n"
    model += "variables = {name: jax.ShapeDtypeStruct((2, 2), 'float32') for name in 'ab'}\n"
    (tmp_path / "slow.py").write_text(model)
    words = ["ckpt", path.parent, "out", "--to", "data=1", "--model", "slow:variables"]
    status, out, err = reshard_in(tmp_path, *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: `{path}` has changed since it was opened\n  ")
    assert "hint: open it again: reshard inspect PATH" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["zarr2", "tensors"])
def test_doctor_does_not_call_it_damage(tmp_path, monkeypatch, form):
    source = make(tmp_path / "source", form)
    name = "_METADATA" if form == "zarr2" else "model.safetensors"
    look = Location.look

    def looked(*arguments):
        found = look(*arguments)
        os.utime(source / name)
        return found

    monkeypatch.setattr(Location, "look", looked)
    status, out, err = reshard_in(tmp_path, "doctor", source)
    assert (status, out) == (2, "")
    assert f"`{source / name}` has changed since it was opened" in err


@pytest.mark.parametrize("change", TOLD, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["config.json", "README.md", "model-1-of-1.safetensors"])
def test_what_an_export_copies(tmp_path, name, change):
    """From a directory that is the source, too: a configuration that is changed, and a text."""
    like, out = tmp_path / "like", tmp_path / "out"
    like.mkdir()
    file = like / name

    def made():
        save_file(like / "model-1-of-1.safetensors", tree())
        (like / "config.json").write_text('{"torch_dtype": "float16"}')
        (like / "README.md").write_text("A model.")
        return reshard.open(like)

    plan = plan_export(made(), out, like=like)
    change(file)
    told = f"`{file}` {TOLD[change]}".partition("\n\nhint")[0]
    assert refused(ChangedCheckpointError, execute, plan).startswith(told)
    assert sorted(os.listdir(tmp_path)) == ["like"]
    ckpt = made()
    for number in (0, 1):
        reshard.export(ckpt, out, like=like, share=(number, 2))
    # Each host sees other inodes, and the commit may be made on any of them.
    (os.utime if change is replace else change)(file)
    told = f"`{file}` {'was removed' if change is os.unlink else 'has changed'}"
    assert refused(ChangedCheckpointError, reshard.commit, out).startswith(told)
    assert not out.exists()


def test_a_link_to_a_blob_that_points_to_another_one(tmp_path):
    """In a cache of Hugging Face: both blobs stay what they are."""
    cache, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/1", "blobs"))
    for folder in (cache, blobs):
        folder.mkdir(parents=True)
    for seed in (0, 1):
        save_file(blobs / f"{seed}", tree(seed=seed))
        os.utime(blobs / f"{seed}", ns=(0, 0))
    file = cache / "model.safetensors"
    file.symlink_to("../../blobs/0")
    ckpt, same = reshard.open(cache), make(tmp_path / "same.safetensors", "file")
    assert np.array_equal(ckpt["m/a"].read(), arrays()["m/a"])
    plan = reshard.plan(ckpt, tmp_path / "out")
    (cache / "new").symlink_to("../../blobs/1")
    os.replace(cache / "new", file)
    read = (ckpt["m/a"].read,), (execute, plan), (reshard.verify, same, ckpt)
    for call in (*calls(ckpt, tmp_path), *read):
        assert refused(ChangedCheckpointError, *call).startswith(f"`{file}` {TOLD[replace]}")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def looks(monkeypatch):
    """The paths whose status is asked for."""
    paths = []

    def watch(name):
        original = getattr(os, name)

        def watched(path, *arguments, **keywords):
            paths.append("" if isinstance(path, int) else path)
            return original(path, *arguments, **keywords)

        monkeypatch.setattr(os, name, watched)

    watch("stat")
    watch("lstat")
    return paths


@pytest.mark.parametrize(
    ("form", "most"), [("zarr2", 26), ("zarr2-files", 621), ("zarr3-files", 821), ("root", 44)]
)
def test_looks_of_opening(tmp_path, looks, form, most):
    """A root and plain files take no more than before there was an identity. An item of OCDBT took
    19: its six files are looked at when all is read, and its documents before they are read."""
    source = tmp_path / "source"
    values = {name: layouts.put(np.ones(4, "f4"), None) for name in map(str, range(200))}
    if form == "root":
        with ocp.CheckpointManager(source) as manager:
            for step in (1, 2, 3):
                manager.save(step, args=ocp.args.StandardSave(values))
    else:
        FORMS[form](source, values)
    looks.clear()
    ckpt = reshard.open(source)
    found = [path for path in map(os.fspath, looks) if path.startswith(str(source))]
    assert len(ckpt.arrays) == 200
    assert most // 2 < len(found) <= most


# In a bucket.


@pytest.mark.parametrize("form", ["zarr2", "zarr2-files", "tensors"])
@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_an_object_that_is_replaced(stores, tmp_path, kind, form):
    """Before it is read, and while it is read."""
    source = make(tmp_path / "source", form)
    if form.startswith("zarr"):
        (source / "commit_success.txt").write_text("")
    for early in (True, False):
        url = put(f"{stores.bucket(kind)}/run", source)
        ckpt = reshard.open(url)
        (file,) = files_of(ckpt, "a")
        data = file.read_whole()

        def change(*_, file=file, data=data):
            file.write(data + b"x")

        text = f"`{file}` has changed since it was opened\n  it had {len(data)} bytes, version "
        for call in (*calls(ckpt, tmp_path), (ckpt["m/a"].read,)):
            if early:
                change()
            elif call[0] is not reshard.plan:
                file.write(data)
                call = [reshard.open(url) if each is ckpt else each for each in call]
                stores.faults.append(Fault(f"read .*{file.name}", change))
            else:
                continue
            assert refused(ChangedCheckpointError, *call).startswith(text), call
            assert not (tmp_path / "out").exists()
