"""Opening every layout, and the errors for paths that are not complete checkpoints."""

import collections
import functools
import json
import operator
import pathlib
import pickle
import shutil
import subprocess
import sys

import flax.serialization
import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import v1
from in_process import reshard_in, shown
from jax.sharding import NamedSharding as JaxNamedSharding
from layouts import LAYOUTS, STEPS, bits, database, refused, saved_leaves
from sampling import some

import reshard
from reshard.sharding.mesh import Mesh, NamedSharding, SingleDeviceSharding
from reshard.tree import format_path

MESH = Mesh(("data", "model"), (2, 4), ("Auto", "Auto"), tuple(range(8)))


def is_array(leaf):
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float)


def stored(leaf):
    keys = isinstance(leaf, jax.Array) and layouts.is_key(leaf)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


# Layouts written by StandardCheckpointer, which saves numpy scalars as arrays.
STANDARD = ("standard", "manager", "items", "step", "bare")


def value_type(leaf, layout):
    if isinstance(leaf, jax.Array):
        return "jax.Array"
    if isinstance(leaf, np.generic):
        return "np.ndarray" if layout in STANDARD else "scalar"
    return "np.ndarray" if isinstance(leaf, np.ndarray) else "scalar"


def sharding(leaf):
    if not isinstance(leaf, jax.Array):
        return None
    if not isinstance(leaf.sharding, JaxNamedSharding):
        return SingleDeviceSharding(str(leaf.device))
    spec = [*leaf.sharding.spec, *[None] * layouts.is_key(leaf)]  # keys have a dimension more
    entries = (axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in spec)
    return NamedSharding(MESH, tuple(entries))


OF_VALUES = operator.attrgetter("shape", "dtype", "stored_dtype", "nbytes")
OF_STORED = operator.attrgetter("data.name", "value_type", "key_impl", "same_name")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(saved, layout):
    source = saved(layout)
    ckpt = reshard.open(source.path, **source.open)
    expected = saved_leaves(source.tree)
    if layout == "rich":  # it keeps empty named tuples, of which there are two
        expected |= {path: ckpt[path] for path in (("opt", 0), ("opt", 1, 1))}
    assert {p: tuple(map(type, p)) for p in ckpt} == {p: tuple(map(type, p)) for p in expected}
    others = {path: leaf for path, leaf in expected.items() if not is_array(leaf)}
    assert {path: ckpt[path] for path in others} == others
    assert {path: type(ckpt[path]) for path in others} == {p: type(x) for p, x in others.items()}

    arrays = {path: leaf for path, leaf in expected.items() if is_array(leaf)}
    handles = {handle.path: handle for handle in ckpt.arrays}
    assert set(handles) == set(arrays)
    for path, leaf in arrays.items():
        handle, value = handles[path], stored(leaf)
        assert ckpt[path] is handle and ckpt[format_path(path)] is handle
        name = ".".join(map(str, path))
        assert OF_VALUES(handle) == (value.shape, value.dtype, value.dtype, value.nbytes)
        key_impl = str(jax.random.key_impl(leaf)) if path[0] == "keys" else None
        assert OF_STORED(handle) == (name, value_type(leaf, layout), key_impl, None), path
        assert handle.sharding == handle.saved_sharding == sharding(leaf), path
        assert bits(handle.read()) == bits(value), path
        box = tuple(slice(size // 5, size - size // 7) for size in value.shape)
        assert bits(handle.read(box)) == bits(np.asarray(value[box])), path
    assert ckpt.nbytes == sum(stored(leaf).nbytes for leaf in arrays.values())
    assert ckpt.meshes == (MESH,)


def test_the_latest_step_is_the_default(saved):
    path, name = saved("manager").path, "params/embed"
    first, last, default = (reshard.open(path, step=step) for step in (*STEPS, None))
    assert [ckpt.source.step for ckpt in (first, last, default)] == ["3", "20", "20"]
    assert bits(last[name].read()) == bits(default[name].read()) != bits(first[name].read())


def test_step_names_with_a_prefix(tmp_path):
    tree = {"a": np.arange(3)}
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=6)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (2, 10):
            manager.save(step, args=ocp.args.StandardSave(tree))
    ckpt = reshard.open(tmp_path / "run")
    assert (ckpt.source.steps, ckpt.source.step) == ((2, 10), "ckpt_000010")
    assert reshard.open(tmp_path / "run", step=2).source.step == "ckpt_000002"


def test_the_only_tree_of_several_items(saved):
    source = saved("items")
    assert list(reshard.open(source.path)) == list(reshard.open(source.path, item="state"))
    step = reshard.open(source.path / "3")
    assert (step.source.kind, step.source.item) == ("step", "state")


@pytest.fixture(scope="module")
def two_trees(tmp_path_factory):
    """A manager's root whose step has two trees and a JSON document."""
    path = tmp_path_factory.mktemp("two") / "run"
    items = {
        "config": ocp.args.JsonSave({"a": 1}),
        "ema": ocp.args.StandardSave({"w": np.arange(4)}),
        "params": ocp.args.StandardSave({"w": np.arange(5)}),
    }
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.Composite(**items))
    return path


def test_several_items(two_trees):
    text = f"`{two_trees}/7` has several items\n  ema\n  params\n\n"
    not_found(f'{text}hint: item="ema"\nhint: item="params"', two_trees)
    assert reshard.open(two_trees, item="ema")["w"].shape == (4,)
    assert reshard.open(two_trees / "7", item="params")["w"].shape == (5,)
    assert reshard.open(two_trees / "7" / "params")["w"].shape == (5,)


def fails(error: type[Exception], builtin: type[Exception], text: str, path, **kwargs):
    assert issubclass(error, builtin)
    assert refused(error, reshard.open, path, **kwargs) == text


not_found = functools.partial(fails, reshard.CheckpointNotFoundError, FileNotFoundError)
not_a_format = functools.partial(fails, reshard.CheckpointFormatError, ValueError)
uncommitted = functools.partial(fails, reshard.UncommittedCheckpointError, ValueError)
corrupt = functools.partial(fails, reshard.CorruptCheckpointError, ValueError)


def test_missing_steps_and_items(saved, two_trees):
    text = f"`{two_trees}/7` has no item 'opt'\n\nhint: its items: config, ema, params"
    not_found(text, two_trees, item="opt")
    text = f"item 'config' of `{two_trees}/7` holds no arrays\n\n"
    not_a_format(f'{text}hint: item="ema"\nhint: item="params"', two_trees, item="config")
    path = saved("manager").path
    not_found(f"`{path}` has no step 4\n  its steps: 3, 20\n\nhint: step=3", path, step=4)
    for step, hint in {"20": "\n\nhint: step=20", "last": ""}.items():
        text = f"a step is a number, not text: {step!r}{hint}"
        assert refused(reshard.ArgumentError, reshard.open, path, step=step) == text
    for layout in ("standalone", "step", "bare", "v1"):
        path = saved(layout).path
        text = f"`{path}` is one checkpoint and has no steps\n\nhint: leave out step=..."
        not_found(text, path, step=3)
        if layout in ("standalone", "bare"):
            text = f"`{path}` is one tree and has no items\n\nhint: leave out item=..."
            not_found(text, path, item="params")


def deleted(step, item):
    """The error for an item with an unfinished deletion, and the hint that finishes it."""
    what = "`_CHECKPOINT_DELETION` next to it records an unfinished deletion"
    call = f'orbax.checkpoint.experimental.v1.delete("{step}", checkpointable_name="{item}")'
    return f"`{step}/{item}` is being deleted: {what}\n\n", f"hint: {call} finishes the deletion"


def test_an_item_with_an_unfinished_deletion(two_trees, copy, tmp_path):
    run = pathlib.Path(shutil.copytree(two_trees, tmp_path / "run"))
    layouts.record_deletion(run / "7", "ema")
    text, end = deleted(run / "7", "ema")
    for path in (run, run / "7"):
        not_found(f"{text}hint: other items: config, params\n{end}", path, item="ema")
        ckpt = reshard.open(path)
        assert (ckpt.source.item, ckpt.source.items) == ("params", ("config", "params"))
        assert ckpt.notes == ("item 'ema' is left out: its deletion is unfinished",)
        assert list(ckpt) == list(reshard.open(path, item="params")) == [("w",)]
    not_found(f"{text}{end}", run / "7" / "ema")
    assert reshard.open(run / "7" / "params")["w"].shape == (5,)
    shutil.rmtree(run / "7" / "ema")  # it was stopped later
    not_found(f"{text}hint: other items: config, params\n{end}", run, item="ema")
    assert reshard.open(run)["w"].shape == (5,)
    path = copy("items")  # of one tree
    layouts.record_deletion(path / "3", "state")
    text, end = deleted(path / "3", "state")
    not_found(f"{text}hint: other items: array, config, key\n{end}", path)
    not_found(text + end, path / "3" / "state")


@pytest.mark.skipif(not hasattr(v1.v1, "delete"), reason="Orbax has no partial deletions yet")
def test_the_hint_finishes_a_deletion(tmp_path):
    path = tmp_path / "saved"
    trees = {name: {"w": layouts.random((4, 6), seed=seed)} for seed, name in enumerate("ab")}
    v1.v1.save_checkpointables(path, trees)
    layouts.record_deletion(path, "b")
    assert set(v1.v1.load_checkpointables(path)) == {"a"}
    hint = refused(reshard.CheckpointNotFoundError, reshard.open, path, item="b").splitlines()[-1]
    call = hint.removeprefix("hint: ").removesuffix(" finishes the deletion")
    subprocess.run([sys.executable, "-c", f"import {call.split('.delete')[0]}; {call}"], check=True)
    assert not (path / "b").exists() and not (path / "_CHECKPOINT_DELETION").exists()
    assert reshard.open(path).notes == ()


@pytest.mark.parametrize("record", [{}, {"checkpointable_name": 3}, {"checkpointable_name": ""}])
def test_a_deletion_record_without_an_item(copy, record):
    path = copy("items")
    (path / "3" / "_CHECKPOINT_DELETION").write_text(json.dumps(record))
    text = f"`{path}/3/_CHECKPOINT_DELETION` does not name the item that Orbax was deleting"
    for place in (path, path / "3", path / "3" / "state"):
        corrupt(text, place)


NOTHING = "no _METADATA, no _CHECKPOINT_METADATA, no step directories, no zarr arrays"


def test_missing_paths_and_unsupported_urls(tmp_path):
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "b" / "20.orbax-checkpoint-tmp").mkdir(parents=True)
    for path, hint in {
        "c": "run` has: a, b",
        "a/x/y": "run/a` has: no directories",
        "b/20": "run/b/20.orbax-checkpoint-tmp` was never committed",
        "b/3": "run/b` has: only checkpoints that were never committed",
    }.items():
        missing = tmp_path / "run" / path
        not_found(f"nothing exists at `{missing}`\n\nhint: `{tmp_path}/{hint}", missing)
    not_a_format(f"`{tmp_path}` is not a checkpoint\n  {NOTHING}", tmp_path)
    hint = "a path, or a URL that begins with gs://, s3:// or file://"
    for scheme in ("hf", "https"):
        url = f"{scheme}://bucket/run/100"
        not_a_format(f"`{url}`: `{scheme}://` is not supported\n\nhint: {hint}", url)


PICKLE = "a pickle, which is never opened: reading it can run any code"
TREE = flax.serialization.msgpack_serialize({"params": {"w": np.arange(3)}})
PICKLED = [pickle.dumps({"w": [1, 2]}, number) for number in range(pickle.HIGHEST_PROTOCOL + 1)]
FILES = [
    ("model.gguf", b"GGUF\3\0\0\0", "a GGUF file, which is not supported"),
    ("x.npz", b"PK\3\4", "a zip file, as PyTorch and NumPy write them, which is not supported"),
    ("x.npy", b"\x93NUMPY\1\0", "a NumPy file, which is not supported"),
    *((f"x.{end}", PICKLED[2], PICKLE) for end in ("pt", "bin")),
    *((name, data, PICKLE) for name in ("checkpoint_10", "state") for data in PICKLED[2:]),
    *((f"state.{end}", PICKLED[0], PICKLE) for end in ("pkl", "pickle")),  # which is text
    ("notes.txt", b"hello", "a file, not a checkpoint directory"),
]


@pytest.mark.every_combination
@pytest.mark.parametrize(("name", "data", "what"), FILES)
def test_unsupported_files(tmp_path, name, data, what):
    (tmp_path / name).write_bytes(data)
    not_a_format(f"`{tmp_path / name}` is {what}", tmp_path / name)


def test_directories_of_pickles_and_msgpack_files(tmp_path):
    for name in ("checkpoint_10", "checkpoint", "state"):
        (tmp_path / name).write_bytes(PICKLED[-1])
    found = f"`checkpoint` is {PICKLE}\n  `checkpoint_10` is {PICKLE}"
    not_a_format(f"`{tmp_path}` is not a checkpoint\n  {NOTHING}\n  {found}", tmp_path)
    (tmp_path / "checkpoint_9").write_bytes(TREE)
    not_a_format(f"`{tmp_path / 'checkpoint_10'}` is {PICKLE}", tmp_path)


@pytest.fixture
def copy(saved, tmp_path):
    def make(layout: str, name: str = "copy") -> pathlib.Path:
        return shutil.copytree(saved(layout).path, tmp_path / name)

    return make


STOPPED = "hint: use an earlier step: the writer stopped before this one was complete"


def uncommit(path: pathlib.Path):
    layouts.edit_document(path / "_CHECKPOINT_METADATA", commit_timestamp_nsecs=None)
    (path / "commit_success.txt").unlink(missing_ok=True)  # of Orbax 0.12.3 and newer


NO_TIME = "was never committed: its _CHECKPOINT_METADATA has no commit time\n\n" + STOPPED


@pytest.mark.parametrize("layout", ["standalone", "step", "v1"])
def test_uncommitted_checkpoints(copy, layout):
    path = copy(layout, "100.orbax-checkpoint-tmp")
    name = "its name is that of a checkpoint in progress"
    uncommitted(f"`{path}` was never committed: {name}\n\n{STOPPED}", path)
    path = path.rename(path.with_name("100"))
    if layout == "step":
        (path / "default").rename(path / "default.orbax-checkpoint-tmp")
        item = "its `default.orbax-checkpoint-tmp` was never finished"
        uncommitted(f"`{path}` was never committed: {item}\n\n{STOPPED}", path)
        (path / "default.orbax-checkpoint-tmp").rename(path / "default")
    uncommit(path)
    uncommitted(f"`{path}` {NO_TIME}", path)


def test_uncommitted_steps(copy):
    path = copy("manager")
    uncommit(path / "20")
    shutil.copytree(path / "3", path / "30.orbax-checkpoint-tmp")
    ckpt = reshard.open(path)
    assert (ckpt.source.step, ckpt.source.steps) == ("3", (3,))
    uncommitted(f"`{path}/20` {NO_TIME}", path, step=20)
    text = f"`{path}` has no step 30\n  its steps: 3\n  never committed: 20, 30\n\nhint: step=3"
    not_found(text, path, step=30)
    uncommit(path / "3")
    text = f"`{path}` holds only checkpoints that were never committed\n"
    uncommitted(f"{text}  30.orbax-checkpoint-tmp", path)
    shutil.rmtree(path / "30.orbax-checkpoint-tmp")
    uncommitted(f"{text}  20\n  3", path)


def test_a_missing_manifest(copy):
    path = copy("standalone")
    if "use_ocdbt" not in json.loads((path / "_METADATA").read_text()):
        pytest.skip("older releases of Orbax do not note it")
    (path / "manifest.ocdbt").unlink()
    shutil.rmtree(path / "ocdbt.process_0")
    text = "is incomplete: _METADATA says OCDBT, but manifest.ocdbt is missing"
    corrupt(f"`{path}` {text}", path)


@pytest.mark.parametrize("folder", ["d", "ocdbt_meta"])
@pytest.mark.parametrize("layout", ["standalone", "zarr3-ocdbt"])
def test_a_merged_database_without_a_manifest(copy, layout, folder):
    """Its processes' databases are still there, and Orbax does not read them either."""
    path = copy(layout)
    (path / "manifest.ocdbt").unlink()
    (path / "d").rename(path / folder)
    text = f"is incomplete: `{path}/{folder}` holds its data, but manifest.ocdbt, which lists it,"
    corrupt(f"`{path}` {text} is missing", path)
    shutil.rmtree(path / folder)
    (path / folder).mkdir()
    assert reshard.open(path).source.format.startswith("OCDBT, never merged")


@pytest.mark.parametrize("layout", ["zarr2-files", "zarr3-files", "standalone"])
def test_missing_arrays_and_strings(copy, layout):
    path = copy(layout)
    for name in ("list.0", "params.embed"):
        if "files" in layout:
            shutil.rmtree(path / name)
        else:
            database(path).delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()
    error = layouts.raised(reshard.CorruptCheckpointError, reshard.open, path)
    assert sorted(error.problems) == [
        "list/0: its array is missing: `list.0`",
        "params/embed: its array is missing: `params.embed`",
    ]
    path = copy(layout, "without_strings")
    (path / "_strings.json").unlink()
    error = layouts.raised(reshard.CorruptCheckpointError, reshard.open, path)
    assert sorted(error.problems) == [
        f"text/{name}: its string is missing in `_strings.json`" for name in ("a.b", "name")
    ]


class Iterator:
    """The state of a data set, which another program saves with a handler of its own."""


class IteratorHandler(ocp.type_handlers.TypeHandler):
    def typestr(self):
        return "DatasetIterator"

    async def metadata(self, infos):
        return [ocp.metadata.value.Metadata(i.name, i.parent_dir) for i in infos]

    async def serialize(self, values, infos, args=None):
        for info in infos:
            folder = info.parent_dir / "python_0"
            folder.mkdir(exist_ok=True)
            (folder / f"{info.name}.json").write_text("{}")
        return []

    async def deserialize(self, infos, args=None):
        return [Iterator() for _ in infos]


@pytest.fixture
def with_iterator(tmp_path):
    """A tree as AXLearn saves it. Only its own program can restore one of the leaves."""
    array = layouts.put(layouts.random((6, 8)), "data", "model")
    tree = {"model": {"w": array, "b": np.arange(3.0)}, "input_iter": Iterator(), "step": 7}
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (int, ocp.type_handlers.ScalarHandler()),
        (Iterator, IteratorHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "run", tree)
    del tree["input_iter"]
    return tmp_path / "run", tree


UNKNOWN = (
    "some leaves have a type that only the program that saved them restores\n"
    "  input_iter: DatasetIterator\n\nhint: {}"
).format


def test_a_leaf_of_an_unknown_type_is_shown_and_can_be_dropped(with_iterator, tmp_path):
    path, tree = with_iterator
    ckpt = reshard.open(path)
    assert {format_path(p) for p in ckpt} == {"model/w", "model/b", "input_iter", "step"}
    for kept in (reshard.select(ckpt, drop="input_iter"), reshard.select(ckpt, ["model", "step"])):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        reshard.save(kept, out)
        layouts.assert_same_tree(layouts.load_pytree(out), tree)
        assert reshard.diff(kept, out, values=True).equal
        layouts.assert_same_tree(
            reshard.restore(kept, layouts.mesh((2, 4)))["model"]["w"], tree["model"]["w"]
        )
    assert reshard.digest(ckpt) == reshard.digest(kept)  # of values alone
    text = UNKNOWN('reshard.select(ckpt, drop=["input_iter"])')
    renamed = reshard.rename(ckpt, [("input_iter", "input")])
    for call in (
        lambda: reshard.save(ckpt, tmp_path / "no"),
        lambda: reshard.restore(ckpt, layouts.mesh((2, 4))),
        lambda: reshard.diff(ckpt, ckpt),
        lambda: reshard.to_nnx(reshard.rename(ckpt, [("^model/", "params/")])),
    ):
        assert refused(reshard.CheckpointFormatError, call) == text
    assert refused(reshard.TreeMismatchError, reshard.export, ckpt, tmp_path / "no") == (
        "2 leaves cannot be written as safetensors\n"
        "  input_iter: safetensors has no DatasetIterator\n"
        "  step: safetensors has no Python scalars\n\n"
        'hint: reshard.select(ckpt, drop=["input_iter", "step"]) leaves them out'
    )
    (problem,) = reshard.plan(renamed, tmp_path / "no").errors
    assert str(problem) == text.replace("input_iter", "input")
    target = {"model": {"w": layouts.laid_out(tree["model"]["w"], tree["model"]["w"].sharding)}}
    found = reshard.restore(reshard.select(ckpt, "model/w"), target)
    layouts.assert_same_tree(found["model"]["w"], tree["model"]["w"])


def test_a_leaf_of_an_unknown_type_on_the_command_line(with_iterator, tmp_path):
    path, tree = with_iterator
    assert "input_iter         DatasetIterator" in shown(tmp_path, "inspect", path)
    document = json.loads(shown(tmp_path, "inspect", path, "--json"))
    (leaf,) = (leaf for leaf in document["leaves"] if leaf["path"] == "input_iter")
    assert (leaf["type"], leaf["value"]) == ("DatasetIterator", None)
    status, _, text = reshard_in(tmp_path, "ckpt", path, "out")
    assert (status, text) == (2, f"Error: {UNKNOWN('--drop input_iter')}\n")
    assert reshard_in(tmp_path, "ckpt", path, "out", "--drop", "input_iter")[0] == 0
    layouts.assert_same_tree(layouts.load_pytree(tmp_path / "out"), tree)


def test_values_of_some_leaves_in_the_msgpack_file(tmp_path):
    """Older releases of Orbax save single leaves with `aggregate=True`; this one still reads it."""
    path = layouts.save_pytree(tmp_path / "saved", {"a": np.arange(6.0), "b": np.zeros(3)})
    document = json.loads((path / "_METADATA").read_text())
    document["tree_metadata"]["('b',)"]["value_metadata"]["skip_deserialize"] = True
    (path / "_METADATA").write_text(json.dumps(document))
    tree = {"a": "PLACEHOLDER://a", "b": np.arange(3.0)}
    (path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    assert refused(reshard.CheckpointFormatError, reshard.open, path) == (
        f"`{path}` holds some leaves in `checkpoint`, as Orbax saves them with `aggregate=True`, "
        "and others as arrays. `reshard` does not read both\n  b\n\n"
        "hint: restore it with orbax.checkpoint.PyTreeCheckpointer, and save it again"
    )
    layouts.assert_same_tree(layouts.load_pytree(path), {"a": np.arange(6.0), "b": np.arange(3.0)})


COLLISION = {"a": {"b.c": np.arange(6.0)}, "a.b": {"c": -np.arange(6.0)}, "other": np.arange(4)}


@pytest.fixture(params=[{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def collided(request, tmp_path):
    return reshard.open(layouts.save_pytree(tmp_path / "saved", COLLISION, **request.param))


def test_two_leaves_under_one_name(collided, tmp_path):
    summary = "two leaves were saved under one name, so one of them has overwritten the other"
    clash = "a/b.c and a.b/c are both stored as `a.b.c`"
    hint = 'drop both: reshard.select(ckpt, drop=["a/b.c", "a.b/c"])'
    assert set(collided) == {("a", "b.c"), ("a.b", "c"), ("other",)}
    text = refused(reshard.CorruptCheckpointError, reshard.save, collided, tmp_path / "out")
    assert text == f"{summary}\n  {clash}\n\nhint: {hint}"
    one = reshard.select(collided, ["a/b.c", "other"])
    for job in (
        collided["a/b.c"].view,
        lambda: reshard.select(collided, drop="a.b/c"),
        lambda: reshard.select(collided, ["a.b/c", "other"], drop="a/b.c"),
        lambda: reshard.save(one, tmp_path / "out"),
    ):
        assert refused(reshard.CorruptCheckpointError, job).startswith(summary)
    assert not (tmp_path / "out").exists()
    assert reshard.plan(collided).problems == (summary, clash)
    kept = reshard.select(collided, drop=["a/b.c", "a.b/c"])
    reshard.save(kept, tmp_path / "out")
    restored = layouts.load_pytree(tmp_path / "out")
    assert {name: bits(leaf) for name, leaf in restored.items()} == {
        "other": bits(COLLISION["other"])
    }


def never_merged(whole, path, processes, writers, apart=False):
    """A copy of a merged OCDBT checkpoint in which each process still has its own database.

    Process i holds every chunk whose position in its array is i modulo `processes`. The first
    `writers` of them hold the arrays' metadata: one of Orbax's processes writes them, or all do
    (where its `primary_host` is None). Each writes all at once, or each value apart, of which small
    ones are then within the B-tree.
    """
    names = ("d", "manifest.ocdbt", "ocdbt.process_*")
    shutil.copytree(whole, path, ignore=shutil.ignore_patterns(*names))
    merged = database(whole)
    parts = [None if apart else ts.Transaction() for _ in range(processes)]
    stores = [
        database(path / f"ocdbt.process_{i}").with_transaction(part) for i, part in enumerate(parts)
    ]
    counts = collections.Counter()
    for key in sorted(merged.list().result()):
        owners = stores[:writers]
        if not key.endswith((b".zarray", b"zarr.json")):
            name = key.rpartition(b"/")[0]
            owners = [stores[counts[name] % processes]]
            counts[name] += 1
        for store in owners:
            store[key] = merged[key]
    for part in filter(None, parts):
        part.commit_sync()
    return path


@pytest.mark.sampled
@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("layout", ["standalone", "zarr3-ocdbt"])
def test_unmerged_databases_of_several_processes(saved, tmp_path, layout, writers):
    source = saved(layout)
    path = never_merged(source.path, tmp_path / "unmerged", 3, writers)
    ckpt = reshard.open(path)
    whole = reshard.open(source.path)
    assert ckpt.source.format == whole.source.format.replace("OCDBT", "OCDBT, never merged")
    assert list(ckpt) == list(whole)
    for handle in whole.arrays:
        assert bits(ckpt[handle.path].read()) == bits(handle.read()), handle

    before = layouts.hashes(path)
    on = layouts.mesh((1, 8))
    expected = layouts.read_pytree(source, source.path)
    jobs = [(reshard.to_mesh(ckpt, "1x8"), "shard", on)]
    jobs += [(ckpt, "keep", None)] * len(some(range(3)))  # the order of a merge is up to chance
    for i, (job, chunks, target) in enumerate(jobs):
        reshard.save(job, tmp_path / f"out{i}", chunks=chunks)
        assert layouts.hashes(path) == before
        got = layouts.read_pytree(source, tmp_path / f"out{i}")
        layouts.assert_same_tree(got, expected)
        if chunks == "shard":
            layouts.assert_laid_out(got, expected, target)
    shutil.rmtree(path)
    layouts.assert_same_tree(layouts.read_pytree(source, tmp_path / "out1"), expected)
