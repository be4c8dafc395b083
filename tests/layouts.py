"""Random trees on a simulated mesh, every layout in which Orbax saves them, and a box."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import v1
from flax.core import meta
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from releases import older

from reshard.storage import machine
from reshard.writer import commit, job

DTYPES = "bfloat16 float16 float32 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz"
DTYPES += " float8_e5m2fnuz float8_e3m4 float8_e8m0fnu float4_e2m1fn int2 int4 int8 int16 int32"
DTYPES += " uint8 uint16 uint32 bool complex64"
# TensorStore before 0.1.85 lacks float8_e8m0fnu.
DTYPES = tuple(name for name in DTYPES.split() if hasattr(ts, name))
CUSTOM = {"note": "keep me", "n": [1, 2]}
STEPS = (3, 20)
V1 = ("v1",) if v1.READS_ANY else ()


@flax.struct.dataclass
class Named(meta.AxisMetadata[Any]):
    """A box of the user's own."""

    value: Any
    names: tuple = flax.struct.field(pytree_node=False)

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


def mesh(
    sizes: Sequence[int], names: Sequence[str] = ("data", "model"), explicit: bool = False
) -> Mesh:
    types = (AxisType.Explicit,) * len(sizes) if explicit else None
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names, axis_types=types)


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: Any = "float32"):
    """Any bit pattern that the dtype has, NaNs with payloads and subnormals among them."""
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.name in ("int2", "int4", "uint2", "uint4"):
        limits = jnp.iinfo(dtype)
        values = rng.integers(int(limits.min), int(limits.max) + 1, shape)
        return values.astype(np.int8).astype(dtype)
    if dtype.name == "float4_e2m1fn":
        return rng.integers(0, 16, shape).astype(np.uint8).view(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8)
    return raw.view(dtype)[..., 0]


def random(shape: Sequence[int], dtype: Any = "float32", seed: int = 0):
    return random_array(np.random.default_rng(seed), shape, dtype)


def held(values: np.ndarray, dtype: Any = "bfloat16") -> np.ndarray:
    """Values with ones for infinities, NaNs and what another dtype cannot hold."""
    return np.where(np.abs(values) <= float(jnp.finfo(dtype).max), values, values.dtype.type(1))


def random_on(on: Mesh, seed: Any = 0) -> Callable[..., jax.Array]:
    """A function that makes random arrays on a mesh, from a shape and the entries of a spec."""
    rng = np.random.default_rng(seed)

    def made(shape: Sequence[int], *spec: Any, dtype: Any = "float32") -> jax.Array:
        return jax.device_put(random_array(rng, shape, dtype), NamedSharding(on, P(*spec)))

    return made


def random_tree(on: Mesh, seed: int, *, strings: bool = True, rich: bool = True) -> dict[str, Any]:
    """A tree with every kind of leaf and container, each leaf random.

    Args:
      on: a mesh with the axes "data" and "model".
      seed: of the values.
      strings: with string leaves.
      rich: with tuples and numpy scalars, which Orbax's v1 API does not save.
    """
    rng = np.random.default_rng(seed)

    # Orbax slices on its devices what is replicated, and XLA does not keep the bits of NaNs in
    # dtypes that it computes in wider ones: bfloat16 and float8 are split over all axes.
    put = random_on(on, rng)
    params = {
        "embed": put((64, 96), "data", "model"),
        "uneven": put((6, 40), "data", "model"),
        "mlp/linear": {
            "w.0": put((8, 24), None, ("data", "model"), dtype="bfloat16"),
            "b": put((24,), "model"),
        },
        "two words": {"(0, 'x')": put((8, 4, 6), "model", None, "data")},
        "replicated": put((16, 8)),
        "column": put((2, 64), None, "model", dtype="float16"),
    }
    state = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(
        {"w": put((48, 80), "model", "data"), "b": put((16,), "model")}
    )

    def randomize(leaf):
        values = random_array(rng, leaf.shape, leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 8)
    tree = {
        "params": params,
        "opt": jax.tree.map(randomize, state),
        "dtypes": {
            name: put((2, 24), None, ("data", "model") if "float" in name else "model", dtype=name)
            for name in DTYPES
        },
        "layers": {1: put((8,), "model"), 2: put((2, 16), "data"), 10: put(())},
        "list": [put((8,), "model"), [put((4,), "data"), {"deep": put((3, 5))}], None],
        "one_device": jnp.asarray(random_array(rng, (5, 7))),
        "host": random_array(rng, (3, 5), "float64"),
        "keys": {
            "one": jax.random.key(int(rng.integers(1 << 30))),
            "sharded": jax.device_put(keys, NamedSharding(on, P("model"))),
            "rbg": jax.random.key(int(rng.integers(1 << 30)), impl="rbg"),
        },
        "step": int(rng.integers(1 << 20)),
        "lr": float(rng.standard_normal()),
        "flag": True,
        "none": None,
        "digits": {"10": put((3,)), "9": put((8,), "model")},
        "empty": {"dict": {}, "list": []},
    }
    if older("orbax-checkpoint", "0.12"):  # which takes no typed keys in a target
        del tree["keys"]
    if strings:
        tree["text"] = {"name": 'größe/层 "x"', "a.b": ""}
    if rich:
        tree["tuple"] = (put((7,)), jnp.int32(rng.integers(100)))
        tree["empty"]["tuple"] = ()
        tree["scalar"] = np.float32(rng.standard_normal())
    return tree


def small_tree(on: Mesh, specs: Mapping[str, P], shape: Sequence[int], seed: int = 0):
    """One random float32 array of `shape` for each spec."""
    made = random_on(on, seed)
    return {name: made(shape, *spec) for name, spec in specs.items()}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint on disk and what was saved.

    Attributes:
      path: what a user would open.
      tree: the tree that was saved.
      mesh: the mesh it was on.
      inner: the PyTree item's directory, relative to `path`.
      open: keyword arguments of `reshard.open`.
      readers: names of `READERS` that read it.
      step: the directory that Orbax's v1 API reads, relative to `path`.
    """

    path: pathlib.Path
    tree: Any
    mesh: Mesh
    inner: str = ""
    open: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    readers: tuple[str, ...] = ()
    step: str = ""

    @property
    def target_readers(self) -> tuple[str, ...]:
        """The readers that take a target; StandardCheckpointer takes no strings in one."""
        strings = any(isinstance(leaf, str) for leaf in jax.tree.leaves(self.tree))
        return tuple(name for name in self.readers if name != "standard" or not strings)

    @property
    def directory(self) -> pathlib.Path:
        """The PyTree item's directory."""
        return self.path / self.inner


def save_pytree(path: pathlib.Path, tree: Any, **kwargs: Any) -> pathlib.Path:
    with ocp.PyTreeCheckpointer(**kwargs) as checkpointer:
        checkpointer.save(path, tree)
    return path


def load_pytree(path: pathlib.Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def save_standard(path: pathlib.Path, tree: Any, **kwargs: Any) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree, **kwargs)
    return path


def load_standard(path: pathlib.Path, target: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def database(path: pathlib.Path, **spec: Any) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/", **spec}).result()


def edit_document(file: pathlib.Path, **entries: Any) -> None:
    """Changes entries of a JSON document."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | entries))


def rewrite_database(item: pathlib.Path, **spec: Any) -> None:
    """Writes the database of an item again, with other options of TensorStore's."""
    old = database(item)
    values = {key: old[key] for key in old.list().result()}
    for path in [item / "d", *item.glob("ocdbt.process_*")]:
        shutil.rmtree(path)
    (item / "manifest.ocdbt").unlink()
    new = database(item, **spec)
    with ts.Transaction(atomic=True) as transaction:
        for key, value in values.items():
            new.with_transaction(transaction)[key] = value


def split_database(item: pathlib.Path) -> None:
    """Moves the values and the nodes of a database into folders apart, as newer releases of Orbax
    can do it."""
    nodes = ("btree_node_data_prefix", "version_tree_node_data_prefix")
    folders = dict.fromkeys(nodes, "ocdbt_meta/") | {"value_data_prefix": "ocdbt_data/"}
    rewrite_database(item, **folders)
    (item / "ocdbt_tmp_meta").mkdir()  # what a writer may have left
    (item / "ocdbt_tmp_meta" / "0123").write_bytes(b"node")


def record_deletion(step: pathlib.Path, item: str) -> None:
    """Leaves a step as Orbax's v1 API does if the deletion of an item is interrupted."""
    before = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    handlers = {name: kind for name, kind in before["item_handlers"].items() if name != item}
    record = {
        "checkpointable_name": item,
        "destination": None,
        "operation_id": "0123456789abcdef" * 2,
        "original_metadata": before,
        "updated_metadata": before | {"item_handlers": handlers},
    }
    (step / "_CHECKPOINT_DELETION").write_text(json.dumps(record))


def raised(error: type[Exception], call: Callable, *arguments: Any, **keywords: Any) -> Any:
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    return caught.value


def refused(error: type[Exception], call: Callable, *arguments: Any, **keywords: Any) -> str:
    """The text of the error that a call raises."""
    return str(raised(error, call, *arguments, **keywords))


def assert_equal_or_nan(got: Any, expected: Any) -> None:
    """Equal bit for bit, except the payloads of NaNs, which a cast does not keep."""
    one, other = np.asarray(got), np.asarray(expected)
    nan = np.isnan(other.astype("float64"))
    assert one.dtype == other.dtype
    assert np.array_equal(np.isnan(one.astype("float64")), nan)
    assert one[~nan].tobytes() == other[~nan].tobytes()


def metrics(step: int) -> dict[str, float]:
    return {"loss": step + 0.5}


def open_manager(path: pathlib.Path, **kwargs: Any) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    return ocp.CheckpointManager(path, options=options, **kwargs)


def save(layout: str, folder: pathlib.Path) -> Saved:
    """Saves a random tree on a 2x4 mesh in one of `LAYOUTS`."""
    on = mesh((2, 4))
    path = folder / "saved"
    seed = list(LAYOUTS).index(layout)
    return LAYOUTS[layout](path, on, seed)


def _alone(save: Callable, inner: str = "", **leaves: bool) -> Callable[..., Saved]:
    def make(path: pathlib.Path, on: Mesh, seed: int) -> Saved:
        tree = random_tree(on, seed, **leaves)
        save(path, tree)
        readers = ("pytree", "standard", *(V1 or ("v1",) * (inner == v1.ITEM)))
        return Saved(path, tree, on, inner, readers=readers)

    return make


def _make_manager(path: pathlib.Path, on: Mesh, seed: int) -> Saved:
    trees = [random_tree(on, 100 * seed + i, strings=False) for i in range(len(STEPS))]
    with open_manager(path, metadata={"root": "kept"}) as manager:
        for step, tree in zip(STEPS, trees, strict=True):
            also = {"metrics": metrics(step), "custom_metadata": CUSTOM}
            manager.save(step, args=ocp.args.StandardSave(tree), **also)
    step = str(STEPS[-1])
    readers = ("pytree", "standard", "manager", *V1)
    return Saved(path, trees[-1], on, f"{step}/default", {}, readers, step)


def _make_items(path: pathlib.Path, on: Mesh, seed: int) -> Saved:
    tree = random_tree(on, seed, strings=False)
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(tree),
        config=ocp.args.JsonSave({"width": 3}),
        key=ocp.args.JaxRandomKeySave(jax.random.key(1)),
        array=ocp.args.ArraySave(jnp.arange(6)),
    )
    with ocp.CheckpointManager(path, item_names=("state", "config", "key", "array")) as manager:
        manager.save(STEPS[0], args=items)
    readers = ("pytree", "standard", "manager", *V1)
    step = str(STEPS[0])
    return Saved(path, tree, on, f"{step}/state", {"item": "state"}, readers, step)


def _step(whole: Saved) -> Saved:
    step = whole.path / str(STEPS[-1])
    return Saved(step, whole.tree, whole.mesh, "default", readers=("pytree", "standard", *V1))


def _bare(whole: Saved) -> Saved:
    return Saved(whole.directory, whole.tree, whole.mesh, readers=("pytree", "standard"))


# Layouts that are parts of a manager's root.
PARTS = {"step": _step, "bare": _bare}


def _save_rich(path: pathlib.Path, tree: Any) -> None:
    options = PyTreeMetadataOptions(support_rich_types=True)
    handler = ocp.PyTreeCheckpointHandler(pytree_metadata_options=options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree)


LAYOUTS: dict[str, Callable[[pathlib.Path, Mesh, int], Saved]] = {
    "standalone": _alone(save_pytree),
    "standard": _alone(partial(save_standard, custom_metadata=CUSTOM), strings=False),
    "zarr2-files": _alone(partial(save_pytree, use_ocdbt=False)),
    "zarr3-ocdbt": _alone(partial(save_pytree, use_zarr3=True)),
    "zarr3-files": _alone(partial(save_pytree, use_zarr3=True, use_ocdbt=False)),
    "manager": _make_manager,
    "items": _make_items,
    "step": lambda *arguments: _step(_make_manager(*arguments)),
    "bare": lambda *arguments: _bare(_make_manager(*arguments)),
    "v1": _alone(partial(v1.save, custom_metadata=CUSTOM), v1.ITEM, rich=False),
    "rich": _alone(_save_rich),
}


def read_pytree(saved: Saved, path: pathlib.Path, target: Any = None) -> Any:
    """The tree that `PyTreeCheckpointer` reads at `path`, in the layout of `saved`."""
    if target is None:
        return load_pytree(path / saved.inner)
    with ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(path / saved.inner, item=target, restore_args=arguments)


def read_standard(saved: Saved, path: pathlib.Path, target: Any = None) -> Any:
    return load_standard(path / saved.inner, target)


def read_manager(saved: Saved, path: pathlib.Path, target: Any = None) -> Any:
    arguments = ocp.args.StandardRestore(target)
    with ocp.CheckpointManager(path) as manager:
        step, _, item = saved.inner.partition("/")
        if item == "default":
            return manager.restore(int(step), args=arguments)
        return manager.restore(int(step), args=ocp.args.Composite(**{item: arguments}))[item]


def read_v1(saved: Saved, path: pathlib.Path, target: Any = None) -> Any:
    return v1.load(path / saved.step, target, checkpointable_name=saved.open.get("item", "AUTO"))


READERS = {"pytree": read_pytree, "standard": read_standard, "manager": read_manager, "v1": read_v1}
# Each layout with each of Orbax's readers that reads it.
ORACLES = [
    (layout, reader)
    for layout in LAYOUTS
    for reader in READERS
    if not (reader == "manager" and layout not in ("manager", "items"))
    and not (reader == "v1" and layout == "bare")  # which v1 does not read
    and not (reader == "v1" and layout != "v1" and not V1)
]
# Each layout, and each reader.
SOME_ORACLES = [
    (layout, readers[-1 - number % len(readers)])
    for number, layout in enumerate(LAYOUTS)
    for readers in [[reader for found, reader in ORACLES if found == layout]]
]
assert {reader for _, reader in SOME_ORACLES} == READERS.keys()


def projected(leaf: Any, on: Mesh) -> Any:
    """The sharding that a leaf has once it is laid out on another mesh; None for host values."""
    if not isinstance(leaf, jax.Array):
        return None
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
    return NamedSharding(on, spec)


def plain_scalars(tree: Any) -> Any:
    """numpy scalars as Python ones: Orbax gives those back."""
    return jax.tree.map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, tree)


def abstract(tree: Any, on: Mesh) -> Any:
    """A target: the tree's structure, its arrays as shape, dtype and sharding on `on`."""
    return jax.tree.map(
        lambda leaf: laid_out(leaf, projected(leaf, on)) if isinstance(leaf, jax.Array) else leaf,
        plain_scalars(tree),
    )


def laid_out(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def randomized(tree: Any, seed: int = 0) -> Any:
    """The tree with any bits in every array, and any keys."""
    rng = np.random.default_rng(seed)

    def other(leaf):
        if is_key(leaf):
            data = jax.random.key_data(leaf)
            return jax.random.wrap_key_data(random_array(rng, data.shape, data.dtype))
        return jnp.asarray(random_array(rng, leaf.shape, leaf.dtype))

    return jax.tree.map(other, tree)


def bits(leaf: Any) -> Any:
    """Everything but the sharding of a leaf: type, dtype, shape and bits."""
    if isinstance(leaf, jax.Array) and is_key(leaf):
        return str(jax.random.key_impl(leaf)), bits(jax.random.key_data(leaf))
    kind = jax.Array if isinstance(leaf, jax.Array) else type(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        return kind, array.dtype, array.shape, array.tobytes()
    return kind, leaf


def flat(tree: Any) -> dict[str, Any]:
    """Printed path -> leaf, `None` among them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def assert_same_tree(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    one, other = flat(got), flat(expected)
    assert {p: bits(leaf) for p, leaf in one.items()} == {p: bits(x) for p, x in other.items()}


def shardings(tree: Any) -> dict[str, Any]:
    """Printed path -> sharding, None for host values."""
    return {path: getattr(leaf, "sharding", None) for path, leaf in flat(tree).items()}


def assert_laid_out(tree: Any, like: Any, on: Mesh) -> None:
    """Every device array is on `on`, with the spec that it has in `like`."""
    assert shardings(tree) == {path: projected(leaf, on) for path, leaf in flat(like).items()}


def saved_leaves(tree: Any, path: tuple = ()) -> dict[tuple, Any]:
    """Path -> leaf as Orbax stores them: named tuples as dicts, empty ones as None."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        tree = tree._asdict() or None
    if isinstance(tree, dict) and tree:
        children = [(str(key), tree[key]) for key in tree]
    elif isinstance(tree, list | tuple) and tree:
        children = list(enumerate(tree))
    else:
        return {path: tree}
    return {
        p: leaf for key, child in children for p, leaf in saved_leaves(child, (*path, key)).items()
    }


def put(values: Any, *spec: Any, sizes: Sequence[int] = (2, 4)) -> jax.Array:
    return jax.device_put(values, NamedSharding(mesh(sizes), P(*spec)))


def hashes(path: str | os.PathLike) -> dict[str, str]:
    """Relative path -> digest of every file, and of nothing for a directory."""
    path = pathlib.Path(path)
    return {
        str(file.relative_to(path)): hashlib.sha256(
            file.read_bytes() if file.is_file() else b""
        ).hexdigest()
        for file in sorted(path.rglob("*"))
    }


def data_inodes(path: str | os.PathLike) -> dict[int, str]:
    """Inode -> relative path of each OCDBT data file."""
    path = pathlib.Path(path)
    return {os.stat(file).st_ino: str(file.relative_to(path)) for file in sorted(path.rglob("d/*"))}


def bytes_read():
    """Bytes that TensorStore has read from files so far. It counts a read a moment after it has
    answered it."""
    found, now = None, -1
    while found != now:
        time.sleep(0.02)
        metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        found, now = now, sum(value["value"] for metric in metrics for value in metric["values"])
    return now


class KilledError(Exception):
    """The error that ends a job that is `killed_at_the_end`."""


def _begun(attempt: Any, whole: bool) -> Any:
    attempt.begin()
    return contextlib.nullcontext()


@contextlib.contextmanager
def killed_at_the_end():
    """Ends a job before its last step, without a cleanup, as if its process had ended."""
    gone = {**machine.this_process(), "started": "before"}
    owner = mock.patch.object(job, "this_process", lambda: gone)
    dies = mock.patch.object(commit, "publish", side_effect=KilledError)
    at_once = mock.patch.object(commit, "attempted", _begun)
    with owner, dies, at_once, contextlib.suppress(KilledError):
        yield
