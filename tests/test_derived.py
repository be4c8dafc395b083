"""Derived arrays of real checkpoints, against numpy, as Orbax reads them."""

import functools
import itertools
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import layouts
import ml_dtypes
import numpy as np
import pytest
from by_numpy import in_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import FORMATS
from layouts import bits, put, random
from sampling import examples, few
from test_format import stored_so
from test_operations import operations
from watched import Watched

import reshard
from reshard import units
from reshard.arrays.derived import apply, constant
from reshard.arrays.handle import Derived
from reshard.arrays.operations import (
    Add,
    Concat,
    Crop,
    Equal,
    Pad,
    Reshape,
    Scale,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.engine.cost import decoded_together
from reshard.restore import device_reads
from reshard.restore.device_reads import Request, read_arrays
from reshard.sharding.mesh import Mesh, fitting_spec
from reshard.storage import array_store

LAYERS = 6
# name -> shape, spec, dtype. On 2x4 devices a chunk is a shard: layers in one chunk, in two, in one
# each; parts of a projection in one chunk.
ARRAYS = {
    "together": ((LAYERS, 16, 24), P(None, "data", "model"), "float32"),
    "halves": ((LAYERS, 16, 24), P("data", None, "model"), "float32"),
    "each": ((8, 16, 24), P(("data", "model")), "float32"),
    "inner": ((16, LAYERS, 24), P("data", None, "model"), "bfloat16"),
    "nested": ((2, 3, 8, 16), P(None, None, "data", "model"), "bfloat16"),
    "qkv": ((16, 36), P("data"), "float32"),
    "glu": ((16, 64), P("data", "model"), "bfloat16"),
    "heads": ((16, 4, 8), P("data", "model"), "float16"),
    "rows": ((4, 8, 16), P("model"), "int8"),
    "bias": ((36,), P("model"), "float32"),
    "odd": ((5, 7), P(), "uint32"),
    **{f"layer_{i}": ((32, 96), P("data", "model"), "float32") for i in range(4)},
    **{f"norm_{i}": ((24,), P("model"), "bfloat16") for i in range(3)},
    **{f"flag_{i}": ((), P(), "bool") for i in range(2)},
}


def write(path, tree, **kwargs):
    return reshard.open(layouts.save_pytree(path, tree, **kwargs))


def load(path):
    """Path -> leaf, as Orbax reads it."""
    return layouts.saved_leaves(layouts.load_pytree(path))


def saved_and_restored(ckpt, out, sizes=(1, 8)):
    """The leaves by path, as Orbax loads them after a save, and as `restore` returns them."""
    reshard.save(ckpt, out)
    return load(out), layouts.saved_leaves(reshard.restore(ckpt, layouts.mesh(sizes)))


def values_of(tree):
    """Path -> dtype, shape and every bit."""
    return {path: bits(np.asarray(leaf))[1:] for path, leaf in tree.items()}


def saved_once(folders, arrays, made=lambda values: values):
    """Checkpoints of these arrays by their format, saved when they are first asked for, and their
    values."""

    @functools.cache
    def get(name):
        values = {
            key: made(random(shape, dtype, seed))
            for seed, (key, (shape, _, dtype)) in enumerate(arrays.items())
        }
        tree = {key: put(values[key], *spec) for key, (_, spec, _) in arrays.items()}
        return write(folders.mktemp(name) / "saved", tree, **FORMATS[name]), values

    return get


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved_once(tmp_path_factory, ARRAYS)


class Forming:
    """The handles of a checkpoint and its values, with the same operations applied to both."""

    def __init__(self, ckpt, values):
        self.ckpt = ckpt
        self.handles = {path[0]: ckpt[path] for path in ckpt}
        self.values = dict(values)

    def step(self, operation, inputs, outputs, keep=False):
        """Apply an operation. Its inputs leave the tree unless `keep`."""
        handles = [self.handles[name] for name in inputs]
        arrays = [self.values[name] for name in inputs]
        for name in () if keep else set(inputs):
            del self.handles[name], self.values[name]
        made = apply(operation, handles, [(name,) for name in outputs])
        assert [handle.path for handle in made] == [(name,) for name in outputs]
        self.handles.update(zip(outputs, made, strict=True))
        self.values.update(zip(outputs, in_numpy(operation, arrays), strict=True))
        return self

    def steps(self, steps):
        """Several steps."""
        for one in steps:
            self.step(*one)
        return self

    def only(self, *names):
        self.handles = {name: self.handles[name] for name in names}
        self.values = {name: self.values[name] for name in names}
        return self

    def checkpoint(self, sizes=None):
        """The tree as a checkpoint, on another mesh if `sizes` are given."""
        leaves = {handle.path: handle for handle in self.handles.values()}
        ckpt = self.ckpt.replace(leaves, retyped=True)
        return ckpt if sizes is None else on_mesh(ckpt, sizes)

    @property
    def expected(self):
        return values_of({(name,): value for name, value in self.values.items()})


def on_mesh(ckpt, sizes):
    """The checkpoint on another mesh, without axes that do not fit."""
    new = Mesh(("data", "model"), sizes)
    specs = [
        (f"^{re.escape(str(handle.path[0]))}$", fitting_spec(handle.shape, new, h.spec))
        for handle in ckpt.arrays
        if (h := handle.sharding) is not None
    ]
    return reshard.to_mesh(ckpt, layouts.mesh(sizes), specs)


def assert_formed(forming, out, sizes=None, **kwargs):
    """Saved, it is what numpy makes, as Orbax loads it, on the shardings that were planned; and so
    is what `restore` makes of it without saving. Returns the plan."""
    ckpt = forming.checkpoint(sizes)
    planned = reshard.plan(ckpt, out, **kwargs)
    assert planned.problems == ()
    done = reshard.save(ckpt, out, **kwargs)
    assert done.arrays == planned.arrays
    loaded = load(out)
    assert values_of(loaded) == forming.expected
    on = layouts.mesh(sizes or (2, 4))
    for path, leaf in loaded.items():
        assert leaf.sharding == sharding_of(ckpt[path], on), path
    assert json.loads((out / "_METADATA").read_text())["tree_metadata"].keys() == {
        str((name,)) for name in forming.values
    }
    live = reshard.restore(ckpt, on)
    assert values_of(layouts.saved_leaves(live)) == forming.expected
    return done


def sharding_of(handle, on):
    return NamedSharding(on, P(*(entry or None for entry in handle.sharding.spec)))


def plans_of(plan):
    return {array.path[0]: array for array in plan.arrays}


def names(prefix, count):
    return [f"{prefix}{i}" for i in range(count)]


def unstack(name, axis=0, count=LAYERS):
    return Unstack(axis, count), [name], names(f"{name}_", count)


OPERATIONS = [
    (Transpose((2, 0, 1)), ["together"], ["t"]),
    (Transpose((1, 0)), ["odd"], ["o"]),
    (Reshape((16, 32)), ["heads"], ["merged"]),
    (Reshape((16, 4, 9)), ["qkv"], ["divided"]),
    (Reshape((1, 4, 9)), ["bias"], ["one"]),
    (Split(1, (18, 18)), ["qkv"], ["q", "kv"]),
    (Split(-1, (32, 32)), ["glu"], ["gate", "up"]),
    (Split(0, (4, 8, 24)), ["bias"], ["b0", "b1", "b2"]),
    (Concat(1), names("layer_", 3), ["joined"]),
    (Concat(0), ["norm_1", "norm_0", "norm_0"], ["norms"]),
    (Stack(0), names("layer_", 3), ["s"]),
    (Stack(0), ["layer_0", "layer_0"], ["twice"]),
    (Stack(-1), ["norm_0", "norm_2"], ["n"]),
    (Stack(0), ["flag_0", "flag_1"], ["f"]),
    *(unstack("together"), unstack("halves"), unstack("each", count=8)),
    *(unstack("inner", 1), unstack("odd", -1, 7)),
    (Pad(((0, 4), (2, 0)), -1.0), ["qkv"], ["padded"]),
    (Pad(((1, 3), (0, 0), (0, 8)), -7), ["rows"], ["more"]),
    (Crop(((0, 4), (2, 2))), ["qkv"], ["cropped"]),
    (Crop(((1, 1), (0, 0), (8, 0))), ["rows"], ["less"]),
]


@pytest.mark.parametrize("name", FORMATS)
def test_orbax_loads_what_was_formed(source, tmp_path, name):
    forming = Forming(*source(name))
    for operation, inputs, outputs in OPERATIONS:
        forming.step(operation, inputs, outputs, keep=True)
    forming.only("odd", *(key for key in forming.handles if key not in ARRAYS))
    before = layouts.hashes(forming.ckpt.source.root)
    assert_formed(forming, tmp_path / "out", (1, 8))
    assert layouts.hashes(forming.ckpt.source.root) == before


@st.composite
def steps(draw, shapes):
    """Up to four operations on arrays of these shapes and dtypes, and for each whether what it
    takes also stays in the tree as it is."""
    there, made = dict(shapes), []
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(there)))
        shape, dtype = there[name]
        kinds = ["transpose", "reshape", "stack", "pad", "crop", *["split", "concat"] * bool(shape)]
        kind = draw(st.sampled_from(kinds + ["unstack"] * (0 < min(shape, default=0) <= 8)))
        inputs = [name]
        if kind in ("stack", "concat"):
            alike = sorted(other for other, it in there.items() if it == there[name])
            inputs = draw(st.lists(st.sampled_from(alike), min_size=1, max_size=3))
        operation = draw(operations(kind, shape, least=1, most_parts=8))
        new = operation.shapes([shape] * len(inputs))
        outputs = [f"made{number}_{i}" for i in range(len(new))]
        keep = draw(st.booleans())
        if not keep:
            for other in set(inputs):
                del there[other]
        there.update({out: (s, dtype) for out, s in zip(outputs, new, strict=True)})
        made.append((operation, inputs, outputs, keep))
    return made


@settings(deadline=None, max_examples=examples(30))
@given(
    steps({name: (shape, dtype) for name, (shape, _, dtype) in ARRAYS.items()}),
    st.sampled_from(list(FORMATS)),
    st.sampled_from([(1, 8), (8, 1), (4, 2), (2, 4), (1, 1)]),
    st.sampled_from(["shard", "keep", 512]),
    st.sampled_from(["1GiB", "1MiB"]),
    st.booleans(),
)
def test_any_steps(source, tmp_path_factory, made, name, sizes, chunks, memory, link):
    forming = Forming(*source(name)).steps(made)
    kept = {key for _, inputs, _, keep in made for key in inputs if keep}
    forming.only(*(key for key in forming.handles if key in kept or key not in ARRAYS))
    out = tmp_path_factory.mktemp("any") / "out"
    plan = assert_formed(forming, out, sizes, chunks=chunks, max_memory=memory, link=link)
    assert plan.peak_memory <= (1 << 30 if memory == "1GiB" else 1 << 20)
    shutil.rmtree(out)


def test_host_values_and_single_devices(tmp_path):
    """Numpy arrays stay on the host; scalars that become an array are one on the host."""
    one, two = (jnp.asarray(random((4, 6), seed=n)) for n in range(2))
    a, b = (random((6, 4), "float64", n) for n in range(2))
    tree = {"a": a, "b": b, "n": 3, "m": 1 << 40, "f": 0.5, "g": 0.25, "one": one, "two": two}
    ckpt = write(tmp_path / "in", tree)
    leaves = []
    for operation, inputs, paths in (
        (Stack(0), "ab", [("host",)]),
        (Unstack(1, 4), "a", [("part", i) for i in range(4)]),
        (Stack(0), "nm", [("counts",)]),
        (Reshape((1,)), "f", [("rate",)]),
        (Reshape(()), "g", [("scalar",)]),
        (Concat(0), ["one", "two"], [("single",)]),
    ):
        leaves += apply(operation, [ckpt[name] for name in inputs], paths)
    new = ckpt.replace({leaf.path: leaf for leaf in leaves}, retyped=True)
    assert [leaf.value_type for leaf in leaves] == ["np.ndarray"] * 7 + ["scalar", "jax.Array"]
    expected = {("host",): np.stack([a, b]), **{("part", i): a[:, i] for i in range(4)}}
    expected |= {("counts",): np.array([3, 1 << 40]), ("rate",): np.array([0.5])}
    expected["single",] = np.concatenate([one, two])
    for found in (got := saved_and_restored(new, tmp_path / "out")):
        assert found.pop(("scalar",)) == 0.25
        assert values_of(found) == values_of(expected)
    devices = {path for path, leaf in got[0].items() if isinstance(leaf, jax.Array)}
    assert devices == {("single",)} and got[0]["single",].sharding == one.sharding


MOVES = {
    "stack": [
        (Stack(0), names("layer_", 4), ["s"]),
        (Stack(1), names("norm_", 3), ["n"]),
        (Stack(0), ["flag_0", "flag_1"], ["f"]),
    ],
    "unstack": [unstack("each", count=8)],
    "unstack and stack again": [
        unstack("each", count=8),
        (Stack(2), ["each_7", "each_3", "each_0"], ["some"]),
    ],
    "nested": [
        (Stack(0), ["layer_0", "layer_1"], ["a"]),
        (Stack(0), ["layer_2", "layer_3"], ["b"]),
        (Stack(1), ["a", "b"], ["both"]),
    ],
    "there and back": [
        (Stack(0), names("layer_", 4), ["s"]),
        (Unstack(0, 4), ["s"], names("again_", 4)),
    ],
}


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("name", FORMATS)
def test_whole_chunks_are_moved_undecoded(source, tmp_path, monkeypatch, name, moves, link):
    def opened(*args):
        raise AssertionError("an array was opened")

    original, values = source(name)
    copy = tmp_path / "copy"
    shutil.copytree(original.source.root, copy)
    forming = Forming(reshard.open(copy), values).steps(MOVES[moves])
    monkeypatch.setattr(array_store.ArrayStore, "open_array", opened)
    plan = reshard.save(forming.checkpoint(), tmp_path / "out", link=link)
    assert all(array.verbatim for array in plan.arrays)
    assert {array.passes for array in plan.arrays} == {1.0}
    links = link and original.source.store.ocdbt
    moved = sum(array.stored_bytes for array in plan.arrays)
    expected_bytes = (0 if links else moved) + plan.other_bytes
    assert (plan.bytes_read, plan.bytes_written) == (expected_bytes, expected_bytes)
    inodes = layouts.data_inodes(copy), layouts.data_inodes(tmp_path / "out")
    assert bool(set(inodes[0]) & set(inodes[1])) == links
    shutil.rmtree(copy)
    assert values_of(load(tmp_path / "out")) == forming.expected


@pytest.mark.parametrize("keep", [True, False])
def test_operations_that_need_decoding(source, keep):
    steps = [
        (Transpose((1, 0)), ["layer_0"], ["transposed"]),
        (Concat(0), ["layer_1", "layer_2"], ["joined"]),
        (Split(0, (16, 16)), ["layer_3"], ["a", "b"]),
        (Reshape((16, 2, 32)), ["glu"], ["divided"]),
        (Pad(((0, 8), (0, 0)), 0), ["qkv"], ["padded"]),
        (Crop(((0, 2), (0, 0))), ["odd"], ["cropped"]),
        unstack("together"),
        (Stack(0), ["a", "b"], ["stacked"]),
    ]
    forming = Forming(*source("zarr2")).steps(steps)
    made = {key for key, handle in forming.handles.items() if isinstance(handle.data, Derived)}
    plan = reshard.plan(forming.checkpoint(), chunks="keep" if keep else "shard")
    assert made == {key for key, array in plans_of(plan).items() if not array.verbatim}


# Arrays of different kinds.


def rewritten(path, name, **metadata):
    """Rewrite an array of a plain checkpoint with the same values and another encoding."""
    handle = reshard.open(path)[name]
    document = json.loads(handle.data.metadata) | metadata
    stored_so(path, name, document, np.asarray(handle.view().read().result()))


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ENCODINGS = {
    "zarr2-files": [
        {"compressor": {"id": "zstd", "level": 5}},
        {"compressor": None},
        {"order": "F"},
        {"dimension_separator": "/"},
        {"fill_value": 1.5},
        {"chunks": [8, 24]},
        {"chunks": [12, 64]},
    ],
    "zarr3-files": [
        {"codecs": [LITTLE]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
        {"chunk_key_encoding": {"name": "v2"}},
        {"fill_value": 1.5},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 12]}}},
        {
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {"chunk_shape": [8, 24], "codecs": [LITTLE]},
                }
            ]
        },
    ],
}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("name", "encoding"),
    few(
        ((name, e) for name, some in ENCODINGS.items() for e in some),
        *(("zarr2-files", ENCODINGS["zarr2-files"][n]) for n in (1, 2, 6)),
        *(("zarr3-files", ENCODINGS["zarr3-files"][n]) for n in (2, 3, 4, 5)),
    ),
)
def test_arrays_that_are_encoded_differently(source, tmp_path, name, encoding, count):
    original, values = source(name)
    path = tmp_path / "in"
    shutil.copytree(original.source.root, path)
    if "chunk_grid" in encoding:  # inner chunks have to fit
        encoding = encoding | {"codecs": [LITTLE]}
    for i in range(count):
        rewritten(path, f"layer_{i}", **encoding)
    forming = Forming(reshard.open(path), values)
    forming.step(Stack(0), names("layer_", 4), ["s"])
    moves = forming.ckpt["layer_0"].data.encoding.ignores_unit_axes
    alike = moves and (
        count == 4 or encoding.keys() <= {"dimension_separator", "chunk_key_encoding"}
    )
    plan = assert_formed(forming, tmp_path / "out", chunks="keep")
    assert plans_of(plan)["s"].verbatim == alike


DIFFERENT = "arrays that differ in dtype, stored dtype or type cannot be combined\n"
EMPTY = "an operation must not make an array without elements\n"


def mismatch(operation, handles, outputs=1):
    paths = [("made", i) for i in range(outputs)]
    return layouts.refused(reshard.TreeMismatchError, apply, operation, handles, paths)


def test_what_does_not_apply_is_refused(source, tmp_path):
    ckpt, _ = source("zarr2")
    cast = reshard.cast(ckpt, "bfloat16", ["layer_1", "bias"])
    keys = jax.random.split(jax.random.key(3), 4)
    own = {"a": random((4,)), "b": put(random((4,))), "n": 3, "f": 0.5, "d": np.zeros(4)}
    own = write(tmp_path / "in", own | {"keys": keys})
    keys_stay = "`keys` holds PRNG keys, which can only be renamed, stacked or unstacked"
    for operation, handles, text in [
        (
            *(Stack(0), [ckpt["layer_0"], cast["layer_1"]]),
            f"{DIFFERENT}  layer_0  float32[32,96] P('data', 'model') jax.Array\n"
            "  layer_1  bfloat16[32,96] P('data', 'model') jax.Array, stored as float32",
        ),
        (
            *(Concat(0), [ckpt["norm_0"], ckpt["bias"]]),
            f"{DIFFERENT}  norm_0  bfloat16[24] P('model') jax.Array\n"
            "  bias  float32[36] P('model') jax.Array",
        ),
        (  # though they are read as one dtype: bits are compared as they are stored
            *(Equal(2), [own["a"], reshard.cast(own, "float32", "d")["d"]]),
            f"{DIFFERENT}  a  float32[4] np.ndarray\n  d  float32[4] np.ndarray, stored as float64",
        ),
        (
            *(Stack(0), [own["a"], own["b"]]),
            f"{DIFFERENT}  a  float32[4] np.ndarray\n  b  float32[4] P() jax.Array",
        ),
        (
            *(Stack(0), [own["n"], own["f"]]),
            f"{DIFFERENT}  n  int64[] scalar\n  f  float64[] scalar",
        ),
        (Unstack(1, 2), [own["keys"]], keys_stay),
        (Transpose((1, 0)), [own["keys"]], keys_stay),
        (Stack(2), [own["keys"]], keys_stay),
        (Stack(-1), [own["keys"]], keys_stay),
        (Concat(0), [own["keys"]], keys_stay),
        (  # which Orbax neither saves nor loads
            *(Split(0, (0, 36, 0)), [ckpt["bias"]]),
            f"{EMPTY}  made/0  float32[0]\n  made/2  float32[0]",
        ),
        (Crop(((16, 16), (0, 0))), [ckpt["layer_0"]], f"{EMPTY}  made/0  float32[0, 96]"),
    ]:
        outputs = {Unstack: 4, Split: 3}.get(type(operation), 1)
        assert mismatch(operation, handles, outputs) == text


def test_fills(source, tmp_path):
    forming, made = Forming(*source("zarr3")), []
    wrong = {"rows": (0.5, 200), "odd": (-1, math.nan), "flag_0": (2,), "heads": (1e6,)}
    for name, fill in ((name, fill) for name, fills in wrong.items() for fill in fills):
        shape, _, dtype = ARRAYS[name]
        text = f"{name}: the constant {fill} of the map does not exist in {dtype}"
        assert mismatch(Pad(((0, 0),) * len(shape), fill), [forming.ckpt[name]]) == text
    right = {"heads": (0.1, -math.inf), "norm_0": (math.nan,), "rows": (-128,), "flag_0": (True,)}
    for name, fill in ((name, fill) for name, fills in right.items() for fill in fills):
        made.append(f"{name}_{fill}")
        widths = ((1, 0),) * len(ARRAYS[name][0])
        forming.step(Pad(widths, fill), [name], made[-1:], keep=True)
    assert_formed(forming.only(*made), tmp_path / "out")


def test_leaves_that_were_saved_under_one_name_are_refused(tmp_path):
    tree = {"a": {"b.c": random((4,))}, "a.b": {"c": random((4,), seed=1)}, "d": random((4,))}
    ckpt = write(tmp_path / "in", tree)
    one, other = ckpt["a", "b.c"], ckpt["d"]
    for handles in ([one], [one, other], [other, other, one]):
        error = reshard.CorruptCheckpointError
        assert layouts.refused(error, apply, Concat(0), handles, [("made",)]) == (
            "two leaves were saved under one name, so one of them has overwritten the other\n"
            "  a/b.c and a.b/c are both stored as `a.b.c`\n\n"
            'hint: drop both: reshard.select(ckpt, drop=["a/b.c", "a.b/c"])'
        )


def sparse(source, path, name, fills=True):
    """A checkpoint with absent chunks, which hold the fill value."""
    original, values = source(name)
    shutil.copytree(original.source.root, path)
    layouts.edit_document(path / "_METADATA", store_array_data_equal_to_fill_value=not fills)
    values = {key: value.copy() for key, value in values.items()}
    absent = {"layer_1": (0, 2), "layer_2": (1, 0), "each": (3, 0, 0), "norm_2": (1,)}
    absent |= {"together": (0, 1, 1), "qkv": (3, 0), "flag_1": ()}
    for key, place in absent.items():
        (path / key / original[key].data.encoding.chunk_key(place)).unlink()
        chunk = original[key].chunk_shape
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunk, strict=True))
        values[key][box] = np.zeros((), values[key].dtype)
    return Forming(reshard.open(path), values)


@pytest.mark.parametrize("name", ["zarr2-files", "zarr3-files"])
def test_absent_chunks_stay_the_fill_value(source, tmp_path, name):
    forming = sparse(source, tmp_path / "sparse", name)
    chunks = [
        sum(len(forming.ckpt.source.store.values[key]) - 1 for key in made)
        for made in (names("layer_", 4), ["each"])
    ]
    steps = [
        *(*MOVES["stack"], *MOVES["unstack"], unstack("together")),
        (Split(1, (20, 16)), ["qkv"], ["q", "kv"]),
        (Transpose((1, 0)), ["q"], ["qt"]),
    ]
    forming.steps(steps)
    plan = assert_formed(forming, tmp_path / "out")
    by_name = plans_of(plan)
    assert all(by_name[key].verbatim for key in ("s", "n", "f", *names("each_", 8)))
    values = reshard.open(tmp_path / "out").source.store.values
    assert len(values["s"]) - 1 == chunks[0] == 4 * 8 - 2
    assert sum(len(values[key]) - 1 for key in names("each_", 8)) == chunks[1] == 7


def test_missing_chunks_are_found_before_anything_is_written(source, tmp_path):
    forming = sparse(source, tmp_path / "sparse", "zarr2-files", fills=False)
    forming.step(Stack(0), names("layer_", 4), ["s"]).step(*unstack("together"))
    forming.step(Transpose((1, 0)), ["qkv"], ["t"])
    forming.only("s", "together_0", "t", "norm_2")
    ckpt = forming.checkpoint()
    for first, job in {
        "4 problems": lambda: reshard.save(ckpt, tmp_path / "out"),
        "stored chunks are missing": lambda: reshard.restore(ckpt, layouts.mesh((1, 8))),
    }.items():
        assert layouts.refused(reshard.CorruptCheckpointError, job).splitlines() == [
            first,
            *(
                f"  {name}: 1 of its 8 stored chunks are missing"
                for name in ("layer_1", "together", "qkv", "norm_2")
            ),
        ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("like", ["layer_0", "odd", "flag_0", "stacked"])
def test_constants(source, tmp_path, name, like):
    forming = Forming(*source(name)).step(Stack(0), ["norm_0", "norm_1"], ["stacked"])
    given_values = {
        **{f"{dtype}_": random((3, 5), dtype) for dtype in layouts.DTYPES},
        "none": np.zeros((4, 2), "float32"),
        "scalar": np.asarray(np.float32(2.5)),
        "turned": np.arange(12, dtype="int16").reshape(3, 4).T,
    }
    for key, values in given_values.items():
        forming.handles[key] = constant((key,), values, forming.handles[like])
        forming.values[key] = values
    forming.only("odd", *given_values)
    for dtype in layouts.DTYPES:
        forming.step(Pad(((0, 1), (1, 0)), 1), [f"{dtype}_"], [f"{dtype}_padded"], keep=True)
    out = tmp_path / "out"
    plan = assert_formed(forming, out, (1, 8))
    assert {array.stored_bytes for array in plans_of(plan).values()} == {
        0,
        plans_of(plan)["odd"].stored_bytes,
    }


def test_a_constant_of_keys(source, tmp_path):
    ckpt, _ = source("zarr2")
    keys = jax.random.split(jax.random.key(7), 3)
    data = np.asarray(jax.random.key_data(keys))
    made = constant(("rng",), data, ckpt["layer_0"], key_impl="threefry2x32")
    new = reshard.to_mesh(ckpt.replace({made.path: made}, retyped=True), "data=1,model=8")
    for found in saved_and_restored(new, tmp_path / "out"):
        assert bits(found["rng",]) == bits(keys)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", few(FORMATS, "zarr2", "zarr3-files"))
def test_casts_before_and_after(source, tmp_path, name, first):
    ckpt, values = source(name)
    cast = reshard.cast(ckpt, "bfloat16", ["**"]) if first else ckpt
    steps = [
        unstack("together"),
        (Transpose((1, 0)), ["together_2"], ["t"]),
        (Stack(0), names("layer_", 4), ["s"]),
        (Split(1, (20, 16)), ["qkv"], ["q", "kv"]),
        (Pad(((0, 4),), 0.1), ["bias"], ["padded"]),
        unstack("each", count=8),
    ]
    forming = Forming(cast, values).steps(steps)
    new = forming.checkpoint((1, 8))
    new = new if first else reshard.cast(new, "bfloat16", "**")
    for key, array in plans_of(reshard.plan(new)).items():
        assert not (array.verbatim and forming.values[key].dtype in (np.float32, np.float16))
    for got in saved_and_restored(new, tmp_path / "out"):
        for path, leaf in got.items():
            expected = forming.values[path[0]]
            if expected.dtype in (np.float32, np.float16):
                with np.errstate(invalid="ignore", over="ignore"):
                    expected = expected.astype(jnp.bfloat16)
            layouts.assert_equal_or_nan(leaf, expected)


def test_float64_is_rounded_once(tmp_path):
    """To the nearest bfloat16. Rounded to float32 first, these would become ties."""
    tie = 1 + 2.0**-8  # between 1 and 1 + 2**-7
    above, below, odd = tie + 2.0**-40, tie - 2.0**-40, tie + 2.0**-7
    values = np.array([[above, below, tie], [-above, odd - 2.0**-40, odd]])
    step = 2.0**-7
    rounded = np.array([[1 + step, 1, 1], [-1 - step, 1 + step, 1 + 2 * step]], jnp.bfloat16)
    ckpt = write(tmp_path / "in", {"a": values, "b": values[::-1]})
    steps = [
        (Stack(0), ["a", "b"], ["s"], True),
        (Transpose((1, 0)), ["a"], ["t"]),
        (Unstack(1, 3), ["b"], names("u", 3)),
    ]
    for first in (True, False):
        cast = reshard.cast(ckpt, "bfloat16") if first else ckpt
        forming = Forming(cast, {"a": rounded, "b": rounded[::-1]}).steps(steps)
        new = forming.checkpoint()
        new = new if first else reshard.cast(new, "bfloat16")
        for found in saved_and_restored(new, tmp_path / f"out{first}"):
            assert values_of(found) == forming.expected


# Reads of each chunk, and memory.

LARGE = {
    "together": ((8, 64, 64), P(None, "data", "model"), "float32"),
    "halves": ((8, 64, 64), P("data", None, "model"), "float32"),
    "qkv": ((64, 192), P("data", "model"), "float32"),
    "qkv3": ((4, 64, 32), P(None, "data", "model"), "float32"),
    "layer_0": ((64, 64), P("data", "model"), "float32"),
    "layer_1": ((64, 64), P("data", "model"), "float32"),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint whose chunks do not compress, of numbers that bfloat16 holds."""
    return saved_once(tmp_path_factory, LARGE, layouts.held)


ONCE = {
    "layers in one chunk": [unstack("together", count=8)],
    "layers in two chunks": [unstack("halves", count=8)],
    "turned layers": [
        unstack("halves", count=8),
        *[(Transpose((1, 0)), [f"halves_{i}"], [f"t{i}"]) for i in range(8)],
    ],
    "two halves": [(Split(1, (96, 96)), ["qkv"], ["gate", "up"])],
    "three parts": [(Split(1, (64, 64, 64)), ["qkv"], ["q", "k", "v"])],
    "parts of layers": [
        unstack("together", count=8),
        *[(Split(1, (32, 32)), [f"together_{i}"], [f"g{i}", f"u{i}"]) for i in range(8)],
    ],
    "layers of parts": [
        (Split(2, (32, 32)), ["halves"], ["g", "u"]),
        unstack("g", count=8),
        unstack("u", count=8),
    ],
    "a part at edges of chunks": [(Split(1, (48, 144)), ["qkv"], ["a", "b"])],
    "all in one again": [
        (Reshape((64, 3, 64)), ["qkv"], ["r"]),
        (Transpose((1, 0, 2)), ["r"], ["t"]),
    ],
    "joined": [
        (Concat(1), ["layer_0", "layer_1"], ["j"]),
        (Pad(((0, 0), (0, 1)), 0), ["j"], ["p"]),
    ],
}
# Chunks that are read several times. The plan reports the factor.
AGAIN = {
    "unequal parts of layers": (
        [
            unstack("qkv3", 0, 4),
            *[(Split(1, (20, 12)), [f"qkv3_{i}"], [f"q{i}", f"k{i}"]) for i in range(4)],
        ],
        (24 + 16) / 32,
    ),
    "unequal parts": ([(Split(1, (128, 32, 32)), ["qkv"], ["q", "k", "v"])], 5 / 4),
    "some layers": (
        [unstack("together", count=8)],
        8 / 3,
        "together_0",
        "together_5",
        "together_6",
    ),
    "one layer of each half": ([unstack("halves", count=8)], 4, "halves_1", "halves_7"),
    "one of three parts": ([(Split(1, (64, 64, 64)), ["qkv"], ["q", "k", "v"])], 1.5, "k"),
    "layers that differ": (
        [
            unstack("together", count=8),
            *[(Transpose((1, 0)), [f"together_{i}"], [f"t{i}"]) for i in range(4)],
        ],
        2,
    ),
}


def formed_of(source, steps, *kept):
    forming = Forming(*source).steps(steps)
    return forming.only(*(kept or (key for key in forming.handles if key not in LARGE)))


def read_by_save(ckpt, out, **kwargs):
    """Bytes of chunks that a job reads, without those of planning, and its plan."""
    start = layouts.bytes_read()
    reshard.plan(ckpt, out, **kwargs)
    planned = layouts.bytes_read()
    plan = reshard.save(ckpt, out, share=(0, 1), **kwargs)
    count = layouts.bytes_read() - planned - (planned - start)
    assert reshard.commit(out)  # which reads documents and B-trees
    return count, plan


def stored_bytes(forming):
    roots = [root for handle in forming.handles.values() for root, _ in handle.roots()]
    return sum({root.data.name: sum(root.stored_sizes()) for root in roots}.values())


@pytest.mark.parametrize("memory", ["1GiB", "1MiB", "600KiB"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ONCE)
def test_a_job_reads_each_chunk_once(large, tmp_path, case, name, memory):
    forming = formed_of(large(name), ONCE[case])
    ckpt = forming.checkpoint((1, 8))
    count, plan = read_by_save(ckpt, tmp_path / "out", max_memory=memory)
    stored = stored_bytes(forming)
    assert {array.passes for array in plan.arrays} == {1.0} and plan.passes == 1
    assert count == stored if "files" in name else stored <= count < 1.5 * stored
    assert stored - len(plan.arrays) <= plan.bytes_read - plan.other_bytes <= stored
    assert plan.peak_memory <= units.parse_bytes(memory)
    assert values_of(load(tmp_path / "out")) == forming.expected


@pytest.mark.parametrize("name", ["zarr2-files", "zarr3-files"])
@pytest.mark.parametrize("case", AGAIN)
def test_a_job_says_how_often_it_reads(large, tmp_path, case, name):
    steps, times, *kept = AGAIN[case]
    forming = formed_of(large(name), steps, *kept)
    ckpt = forming.checkpoint((1, 8))
    # In more, all that shares a chunk would happen to be in one batch.
    memory = "200KiB" if case.startswith("unequal") else "600KiB"
    count, plan = read_by_save(ckpt, tmp_path / "out", max_memory=memory)
    assert plan.passes == pytest.approx(times, rel=0.01)
    assert plan.bytes_read - plan.other_bytes == pytest.approx(count, rel=0.01)
    assert values_of(load(tmp_path / "out")) == forming.expected


CASES = ONCE | {key: steps for key, (steps, *_) in AGAIN.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("narrow", [True, False])
def test_the_least_memory_is_enough(large, tmp_path, case, narrow):
    """A budget that is too small is refused, with one that is enough to carry the job out; and so
    is every larger one."""
    forming = formed_of(large("zarr2-files"), CASES[case])
    ckpt = forming.checkpoint((1, 8))
    if narrow:
        ckpt = reshard.cast(ckpt, "bfloat16")
    with pytest.raises(reshard.MemoryLimitError) as error:
        reshard.save(ckpt, tmp_path / "out", max_memory=1000)
    (least,) = re.findall(r'^max_memory="(\d+)KiB" is the least', "\n".join(error.value.hints))
    with pytest.MonkeyPatch.context() as patch:
        seen = Watched(patch)
        count, plan = read_by_save(ckpt, tmp_path / "out", max_memory=f"{least}KiB")
    assert seen.peak <= plan.peak_memory <= int(least) << 10
    assert seen.batches and seen.used == 0
    assert count <= (plan.bytes_read - plan.other_bytes) * 1.01 + 100
    if not narrow:
        assert values_of(load(tmp_path / "out")) == forming.expected
    for more in range(int(least), 4 * int(least), int(least) // 2):
        plan = reshard.plan(ckpt, max_memory=f"{more}KiB")
        assert plan.problems == () and plan.peak_memory <= more << 10


def requests_of(forming, on=None):
    return [
        Request(handle, handle.dtype, None if on is None else sharding_of(handle, on))
        for handle in forming.handles.values()
    ]


def assert_read(forming, requests, memory):
    """Reads the requests, and asserts that their values are right and that the memory suffices."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Watched(patch)
        arrays = read_arrays(requests, memory)
    assert memory is None or seen.peak <= memory
    assert seen.batches and seen.used == 0
    for name, array in zip(forming.handles, arrays, strict=True):
        assert bits(np.asarray(array))[1:] == forming.expected[name,], name


@pytest.mark.parametrize(
    ("on", "memory"),
    [
        *few(itertools.product(["host", "devices"], [None, 4 << 20, 600 << 10]), ("devices", None)),
        ("accelerators", 500 << 10),
    ],
)
@pytest.mark.parametrize("case", ONCE)
def test_a_restore_reads_each_chunk_once(large, monkeypatch, case, memory, on):
    """Arrays larger than the memory are read box by box, all that share a chunk at once, to
    accelerators as well."""
    if on == "accelerators":
        monkeypatch.setattr(device_reads, "_aliases", lambda sharding: sharding is None)
        monkeypatch.setattr(device_reads, "READ_WHOLE", 0)
    forming = formed_of(large("zarr2-files"), ONCE[case])
    requests = requests_of(forming, None if on == "host" else layouts.mesh((2, 4)))
    before = layouts.bytes_read()
    assert_read(forming, requests, memory)
    assert layouts.bytes_read() - before == stored_bytes(forming)


@pytest.mark.parametrize("case", CASES)
def test_a_restore_in_the_least_memory(large, case):
    """Arrays that do not fit in memory together are read one by one."""
    forming = formed_of(large("zarr2-files"), CASES[case])
    requests = requests_of(forming)
    text = layouts.refused(reshard.MemoryLimitError, read_arrays, requests, 1000)
    (least,) = re.findall(r'max_memory="(\d+)KiB" is the least that is enough', text)
    with pytest.raises(reshard.MemoryLimitError):
        read_arrays(requests, (int(least) - 1) << 10)
    assert_read(forming, requests, int(least) << 10)


# Arrays that are read together.


def test_a_last_chunk_that_is_not_full(tmp_path):
    """Seven layers in chunks of three: the last chunk holds one layer."""
    values = random((7, 16, 16))
    path = tmp_path / "in"
    write(path, {"w": put(values)}, use_ocdbt=False)
    rewritten(path, "w", chunks=[3, 16, 16])
    forming = Forming(reshard.open(path), {"w": values}).step(*unstack("w", count=7))
    decoded = [decoded_together([handle]).elements for handle in forming.handles.values()]
    assert decoded == [3 * 256] * 6 + [256]
    count, plan = read_by_save(forming.checkpoint((1, 8)), tmp_path / "out")
    assert count == stored_bytes(forming) and plan.passes == 1
    assert values_of(load(tmp_path / "out")) == forming.expected


def test_layers_whose_chunks_compress_unlike(tmp_path):
    """The largest chunk counts for memory, not that of the first layer."""
    values = [np.zeros((64, 64), "float32"), random((64, 64), "float32")]
    path = tmp_path / "in"
    write(path, {f"l{i}": put(x) for i, x in enumerate(values)}, use_ocdbt=False)
    forming = Forming(reshard.open(path), dict(zip(["l0", "l1"], values, strict=True)))
    forming.step(Stack(0), ["l0", "l1"], ["s"]).only("s")
    (stacked,) = forming.handles.values()
    largest = max(stacked.stored_sizes())
    assert largest > 2 * min(stacked.stored_sizes())
    elements = math.prod(stacked.chunk_shape)
    assert decoded_together([stacked]) == (elements * 4 + largest, elements)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "float8_e8m0fnu"])
def test_values_that_a_narrow_dtype_lacks(source, name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    handle = constant(("x",), np.ones(2, dtype), source("zarr2")[0]["bias"])
    value = 3 if "e8m0" in name else 100
    assert (
        mismatch(Pad(((0, 1),), value), [handle])
        == f"x: the constant {value} of the map does not exist in {name}"
    )
    apply(Pad(((0, 1),), 2), [handle], [("y",)])
    for operation in (Scale(2), Add(1)):
        assert mismatch(operation, [handle]).startswith(f"x: {name} cannot be {operation}: ")


@pytest.mark.parametrize("operation", [Stack(0), Concat(0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_one_dtype_that_are_stored_as_two(tmp_path, operation, dtype):
    tree = {"a": random((4,)).astype(jnp.bfloat16), "b": random((4,))}
    ckpt = reshard.cast(write(tmp_path / "in", tree), dtype)
    (made,) = apply(operation, [ckpt["a"], ckpt["b"]], [("made",)])
    (expected,) = in_numpy(operation, [tree["a"].astype(dtype), tree["b"].astype(dtype)])
    assert made.read().tobytes() == expected.tobytes()
    reshard.save(ckpt.replace({("made",): made}), tmp_path / "out")
    assert reshard.open(tmp_path / "out")["made"].read().tobytes() == expected.tobytes()
