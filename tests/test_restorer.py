"""Checkpoints restored into targets: what was saved, and what Orbax restores with the same target.

Every layout on every mesh, every container, what is refused and what is left untouched, casts,
what is read how often, threads.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import shutil
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
import v1
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, meta
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS, Named, bits, flat, save_pytree, shardings
from layouts import save_standard as save_v0
from optimizers import RESHAPING
from sampling import few
from test_pytrees import BLOCK, Block, Model, Node, Point
from test_targets import SGD
from watched import own_memory

import reshard
from reshard.engine.memory import READ_OVERHEAD
from reshard.restore.pytrees import flatten_state

LITTLE = "36KiB"  # for a chunk, and not for two


def some_sharding(shape, on, rng, shorter=True):
    """Any sharding of an array of this shape: axes of the mesh in dimensions that they divide.

    Its spec may be shorter than the rank, which JAX itself does not keep for typed keys.
    """
    spec: list[list[str]] = [[] for _ in shape]
    parts = [1] * len(shape)
    for axis in rng.permutation(on.axis_names):
        dim = int(rng.integers(-1, len(shape)))
        if dim >= 0 and shape[dim] % (parts[dim] * on.shape[axis]) == 0:
            spec[dim].append(str(axis))
            parts[dim] *= on.shape[axis]
    entries: list[Any] = [tuple(axes) if len(axes) > 1 else (*axes, None)[0] for axes in spec]
    while shorter and entries and entries[-1] is None and rng.integers(2):
        entries.pop()
    return NamedSharding(on, P(*entries))


def abstract(tree, on, seed=0):
    """The tree with its device arrays abstract, on shardings of `on` that have nothing to do with
    the ones that they were saved with."""
    rng = np.random.default_rng(seed)

    def target(leaf):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        sharding = some_sharding(leaf.shape, on, rng, shorter=not layouts.is_key(leaf))
        return layouts.laid_out(leaf, sharding)

    return jax.tree.map(target, tree)


def assert_restored(got, target, expected):
    """The result has the target's containers and shardings, and the saved values."""
    layouts.assert_same_tree(got, expected)
    assert shardings(got) == shardings(target)
    devices = [leaf for leaf in jax.tree.leaves(got) if isinstance(leaf, jax.Array)]
    assert all(leaf.committed for leaf in devices)


def assert_restores(path, expected, on, seed=0, make=abstract, **kwargs):
    target = make(expected, on, seed)
    assert_restored(reshard.restore(path, target, **kwargs), target, expected)


def reordered():
    devices = np.array(jax.devices()[15:7:-1]).reshape(2, 4)
    return Mesh(devices, ("model", "data"), axis_types=(AxisType.Explicit, AxisType.Auto))


SIZES = [(1, 8), (8, 1), (4, 2), (1, 1), (2, 8)]
MESHES = {f"{a}x{b}": functools.partial(layouts.mesh, (a, b)) for a, b in SIZES} | {
    "2x2x2": lambda: layouts.mesh((2, 2, 2), ("x", "y", "z")),
    "16": lambda: layouts.mesh((16,), ("all",)),
    "2x4 in another order": reordered,
}


@pytest.mark.parametrize(
    ("aliases", "memory"),
    few(
        itertools.product((True, False), (None, "1MiB", LITTLE)),
        *((True, None), (False, None), (False, "1MiB"), (True, LITTLE)),
    ),
)
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_every_mesh(saved, monkeypatch, layout, on, aliases, memory):
    """Also where devices have memory of their own, and what is read is transferred to them. What is
    stored is read once: of a database also the nodes of its tree."""
    if not aliases:
        own_memory(monkeypatch)
    source = saved(layout)
    expected, seed = layouts.plain_scalars(source.tree), len(layout + on)
    ckpt = reshard.open(source.path, **source.open)
    stored = sum(sum(handle.stored_sizes()) for handle in ckpt.arrays)
    before, counts = layouts.bytes_read(), []
    options = {"max_memory": memory, "progress": counts.append}
    assert_restores(ckpt, expected, MESHES[on](), seed, **options)
    read = layouts.bytes_read() - before
    if "files" in layout:
        assert read == stored
    else:
        nodes = [f for f in source.directory.rglob("*") if f.parent.name == "d"]
        nodes += list(source.directory.rglob("manifest.ocdbt"))
        assert read <= sum(file.stat().st_size for file in nodes)
    assert sum(counts) == ckpt.nbytes


def test_paths_and_checkpoints(saved):
    source = saved("v1")
    on = layouts.mesh((1, 8))
    for form in (source.path, str(source.path), f"file://{source.path}", reshard.open(source.path)):
        assert_restores(form, layouts.plain_scalars(source.tree), on)
    with pytest.raises(reshard.CheckpointNotFoundError):
        reshard.restore(source.path / "none", on)


@pytest.mark.parametrize("memory", [None, LITTLE])
@pytest.mark.parametrize("layout", few(LAYOUTS, "standard", "zarr2-files", "bare", "v1", "rich"))
def test_a_bare_mesh(saved, layout, memory):
    """Nested dicts and lists, as Orbax restores them without a target."""
    source = saved(layout)
    on = layouts.mesh((1, 8))
    ckpt, counts = reshard.open(source.path, **source.open), []
    got = reshard.restore(ckpt, on, max_memory=memory, progress=counts.append)
    assert sum(counts) == ckpt.nbytes
    with warnings.catch_warnings(action="ignore"):
        expected = layouts.read_pytree(source, source.path)
    if layout == "rich":  # which keeps named tuples, and empty ones too
        got["opt"][0] = got["opt"][1][1] = None
    layouts.assert_same_tree(got, expected)
    layouts.assert_laid_out(got, expected, on)


def refused(path, target, error: type[Exception] = reshard.TreeMismatchError, **kwargs):
    return layouts.refused(error, reshard.restore, path, target, **kwargs)


@pytest.mark.parametrize("option", ["cast", "keep", "unexpected"])
@pytest.mark.parametrize("target", [layouts.mesh((1, 8)), AbstractMesh((1, 8), ("data", "model"))])
def test_options_for_a_state_are_refused_with_a_bare_mesh(saved, target, option):
    value = {"cast": True, "keep": "params/**", "unexpected": "ignore"}[option]
    path = saved("standalone").path
    assert refused(path, target, reshard.ArgumentError, **{option: value}) == (
        "cast, keep and unexpected require a state as the target, not a mesh\n\n"
        'hint: reshard.cast(ckpt, "bfloat16")\n'
        'hint: reshard.select(ckpt, "params/**")'
    )


def test_an_abstract_mesh_has_no_devices(saved):
    on = AbstractMesh((1, 8), ("data", "model"))
    text = refused(saved("standalone").path, on, reshard.ShardingError)
    assert text.startswith("an AbstractMesh has no devices to restore to\n\nhint: jax.make_mesh(")


@pytest.mark.parametrize(
    ("target", "what", "given"),
    [
        (nnx.Linear, "a class, `Linear`", "model, mesh=mesh"),
        (nn.Dense, "a Linen module", "Dense(...), mesh=mesh, inputs=(x,)"),
        (nn.Dense(3), "a Linen module", "Dense(...), mesh=mesh, inputs=(x,)"),
        (layouts.mesh, "a function, `mesh`", "model, mesh=mesh"),
        ("1x8", "the text '1x8'", "model, mesh=mesh"),
    ],
)
def test_a_module_a_class_a_function_and_a_text_are_refused_as_targets(saved, target, what, given):
    ckpt = reshard.open(saved("standalone").path)
    for call in (reshard.restore, functools.partial(reshard.to_mesh, mesh="1x8")):
        assert layouts.refused(reshard.ArgumentError, call, ckpt, target=target) == (
            f"the target is {what}, not a state or a `jax.sharding.Mesh`\n\n"
            f"hint: reshard.target({given})\n"
            'hint: jax.make_mesh((1, 8), ("data", "model"), '
            "axis_types=(jax.sharding.AxisType.Auto,) * 2)"
        )


# Real states.


def real(tree, on, seed=0):
    """The tree with zeros on devices of `on`, and other values everywhere else."""

    def made(leaf, target):
        if not isinstance(leaf, jax.Array):
            return np.zeros_like(leaf)[()] if hasattr(leaf, "dtype") else type(leaf)()
        if layouts.is_key(leaf):
            zeros = jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(leaf)), leaf.shape)
        else:
            zeros = np.zeros(leaf.shape, leaf.dtype)
        return jax.device_put(zeros, target.sharding)

    return jax.tree.map(made, tree, abstract(tree, on, seed))


@pytest.mark.parametrize("on", ["1x8", "2x2x2", "16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_state(saved, layout, on):
    source = saved(layout)
    target = real(source.tree, MESHES[on](), seed=len(layout))
    before = {path: bits(leaf) for path, leaf in flat(target).items()}
    got = reshard.restore(reshard.open(source.path, **source.open), target)
    assert_restored(got, target, source.tree)
    assert {path: bits(leaf) for path, leaf in flat(target).items()} == before


def test_a_real_state_whose_buffers_were_donated(saved):
    source = saved("standard")
    target = real(source.tree["params"], layouts.mesh((1, 8)))
    jax.tree.map(lambda leaf: leaf.delete(), target)
    ckpt = reshard.select(reshard.open(source.path), "params/**")
    got = reshard.restore(ckpt, {"params": target})
    layouts.assert_same_tree(got, {"params": source.tree["params"]})
    assert shardings(got["params"]) == shardings(target)


ADAM = optax.adam(1e-2)


def loss_step(state, x):
    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def new_state(on, seed=0):
    """A TrainState as it is made eagerly: parameters sharded, and what optax adds to them on one
    device, where it is bound to none."""
    rng = np.random.default_rng(seed)
    shape = {"w": ((16, 8), P(None, "model")), "b": ((8,), P("model"))}
    params = {
        name: jax.device_put(rng.standard_normal(size).astype("float32"), NamedSharding(on, spec))
        for name, (size, spec) in shape.items()
    }
    return TrainState.create(apply_fn=None, params=params, tx=ADAM)


@pytest.mark.parametrize("save", ["v0", "v1"])
def test_uncommitted_leaves_stay_uncommitted_and_training_continues(tmp_path, save):
    step = jax.jit(loss_step, donate_argnums=0)
    x = np.random.default_rng(1).standard_normal((4, 16)).astype("float32")
    state = new_state(layouts.mesh((2, 4)))
    for _ in range(3):
        state = step(state, x)
    SAVE[save](tmp_path / "saved", state)
    expected = jax.device_get(state)
    fresh = new_state(layouts.mesh((1, 8)), seed=5)
    got = reshard.restore(tmp_path / "saved", fresh)
    layouts.assert_same_tree(jax.device_get(got), expected.replace(step=3))
    assert type(got.step) is int
    arrays = jax.tree.leaves(got)[1:], jax.tree.leaves(fresh)[1:]
    assert [a.committed for a in arrays[0]] == [a.committed for a in arrays[1]]
    assert False in [a.committed for a in arrays[0]]
    assert shardings(got) == shardings(fresh)
    for _ in range(2):
        state, got = step(state, x), step(got, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert got.params["w"].sharding == fresh.params["w"].sharding


def test_saved_without_shardings(saved, tmp_path):
    source = saved("standard")
    path = shutil.copytree(source.path, tmp_path / "copy")
    (path / "_sharding").unlink()
    assert_restores(path, layouts.plain_scalars(source.tree), layouts.mesh((1, 8)))
    ckpt = reshard.select(reshard.open(path), "params/embed")
    assert refused(ckpt, layouts.mesh((1, 8)), reshard.ShardingError) == (
        "specs that do not fit the mesh `data=1,model=8`\n"
        "  params/embed  float32[64, 96]: it was saved without a sharding\n\n"
        'hint: specs=[("(^|/)embed$", "")] replicates it'
    )


SAVE = {"v0": save_v0, "pytree": save_pytree, "v1": v1.save}
every_api = pytest.mark.parametrize("save", SAVE)


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(layouts.random_array(rng, shape, dtype)) for shape in shapes]


def variety():
    a, b, c, d, e, f, g, h = arrays((8,), (4, 6), (3,), (2, 8), (), (5,), (16,), (8, 8))
    adam = optax.adam(1e-3).init({"w": h})
    return {
        "fields": Point(a, [b, Point(c, 3)]),
        "node": Node({"a": d}, e),
        "frozen": FrozenDict({"x": {"y": f}}),
        "optax": (optax.EmptyState(), jax.tree.map(lambda x: x + 3, adam)),
        "masked": {"on": g, "off": optax.MaskedNode()},
        "none": [None, a, None],
        "empty": {"dict": {}, "list": [], "frozen": FrozenDict({})},
        "ints": {3: b, 20: {1: c}, 100: [d]},
        "deep": [[[e], f], {"x": [g]}],
        "python": {"int": 7, "float": 0.1, "yes": True, "no": False, "negative": -(2**40)},
        "host": np.arange(6.0).reshape(2, 3),
        "keys": {
            "one": jax.random.key(1),
            "rbg": jax.random.key(2, impl="rbg"),
            "unsafe": jax.random.key(2, impl="unsafe_rbg"),
            "many": jax.random.split(jax.random.key(3), 8),
            "grid": jax.random.split(jax.random.key(4, impl="rbg"), (4, 2)),
        },
        "with.dot/and slash": {'"quoted"': h},
    }


@every_api
@pytest.mark.parametrize("on", ["1x8", "2x2x2"])
def test_every_container(tmp_path, save, on):
    tree = variety()
    SAVE[save](tmp_path / "saved", tree)
    for make in (abstract, real):
        assert_restores(tmp_path / "saved", tree, MESHES[on](), make=make)


def one_device():
    return SingleDeviceSharding(jax.devices()[0])


def struct(shape, dtype, **kwargs):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=one_device(), **kwargs)


def on_device(value, dtype):
    return jax.device_put(np.asarray(value, dtype), jax.devices()[0])


# A saved leaf, the leaf of the target, and the result.
SCALARS: list[tuple] = [
    (-(2**40), 0, -(2**40)),
    (7, jnp.int32(0), jnp.int32(7)),
    (7, struct((), "int32", weak_type=True), on_device(7, "int32")),
    (7, struct((), "uint8"), on_device(7, "uint8")),
    (7, np.int64(0), np.int64(7)),
    (7, np.zeros((), "int8"), np.asarray(7, "int8")),
    (0.1, 0.0, 0.1),
    (0.1, np.zeros(()), np.asarray(0.1)),
    (0.1, jnp.asarray(0.0), jnp.float32(0.1)),
    (0.1, struct((), "float32", weak_type=True), on_device(0.1, "float32")),
    (False, True, False),
    (True, np.bool_(False), np.bool_(True)),
    (True, struct((), "bool"), on_device(True, "bool")),
    (np.float32(0.1), 0.0, float(np.float32(0.1))),
    (np.float32(0.1), np.float32(0), np.float32(0.1)),
    (np.int16(7), 0, 7),
    (jnp.uint32(7), 0, 7),
    (jnp.bfloat16(0.1), 0.0, float(jnp.bfloat16(0.1))),
    (jnp.bool_(True), False, True),
    (jnp.int32(7), np.int32(0), np.int32(7)),
    (jnp.ones(3), np.zeros(3, "float32"), np.ones(3, "float32")),
    (np.ones(3, "float32"), struct((3,), "float32"), on_device(np.ones(3), "float32")),
    (np.ones(3, "float32"), jnp.zeros(3), jnp.ones(3)),
]


@every_api
def test_scalars_and_host_arrays_on_either_side(tmp_path, save):
    leaves, targets, expected = map(list, zip(*SCALARS, strict=True))
    if save == "v1":  # it does not take numpy scalars
        leaves = [np.asarray(x) if isinstance(x, np.generic) else x for x in leaves]
    SAVE[save](tmp_path / "saved", {"a": leaves})
    got = reshard.restore(tmp_path / "saved", {"a": targets})
    layouts.assert_same_tree(got, {"a": expected})
    for one, target in zip(got["a"], targets, strict=True):
        if isinstance(target, jax.Array):
            assert one.committed == target.committed


def boxed_tree():
    put = layouts.random_on(layouts.mesh((2, 4)))
    rules = (("embed", "data"), ("mlp", "model"))
    return {
        "plain": put((8, 4), "data"),
        "kernel": nn.Partitioned(put((4, 16), None, "model"), (None, "model")),
        "in": {
            "logical": nn.LogicallyPartitioned(put((8, 8), "data"), ("embed", "mlp"), rules=rules),
            "own": Named(put((16,), "model"), ("x",)),
        },
        "tree": nn.Partitioned({"a": put((8,)), "b": [put((4,), "model")]}, ("model",)),
        "layers": [nn.Partitioned(put((8,), "data"), ("data",)), put((4,))],
    }


FORMS = {
    "boxed": lambda tree: tree,
    "raw": meta.unbox,
    "levels": lambda tree: jax.tree.map(lambda leaf: {"value": leaf}, meta.unbox(tree)),
}


@every_api
@pytest.mark.parametrize("old", FORMS)
@pytest.mark.parametrize("new", FORMS)
def test_boxed_or_not_on_either_side(tmp_path, save, old, new):
    tree = boxed_tree()
    SAVE[save](tmp_path / "saved", FORMS[old](tree))
    expected = FORMS[new](tree)
    for on, make in itertools.product(("1x8", "2x2x2"), (abstract, real)):
        assert_restores(tmp_path / "saved", expected, MESHES[on](), make=make)


@pytest.mark.parametrize("explicit", [False, True])
def test_boxes_in_the_context_of_a_mesh(tmp_path, explicit):
    """In a context, flax unboxes with a constraint, which abstract values do not support."""
    tree = boxed_tree()
    save_v0(tmp_path / "saved", meta.unbox(tree))
    on = layouts.mesh((1, 8), explicit=explicit)
    target = abstract(tree, on)
    with jax.set_mesh(on):
        got = reshard.restore(tmp_path / "saved", target)
    assert_restored(got, target, tree)


# NNX.


def lazy(make):
    """A module without a mesh for its annotations."""
    with nnx.use_eager_sharding(False):
        return make()


def model():
    return Model(nnx.Rngs(0))


CLIPPED = optax.chain(optax.clip(1.0), optax.adam(1e-3))
NNX = {
    "module": model,
    "optimizer": lambda: nnx.Optimizer(model(), CLIPPED, wrt=nnx.Param),
    "model and optimizer": lambda: nnx.ModelAndOptimizer(model(), CLIPPED),
    "own optimizer": lambda: SGD(nnx.variables(model(), nnx.Param), 0.1),
    "both": lambda: (one := model(), SGD(nnx.variables(one, nnx.Param), 0.1)),
    "both that share": lambda: (one := model(), nnx.ModelAndOptimizer(one, CLIPPED)),
    "factored": lambda: nnx.ModelAndOptimizer(model(), RESHAPING["adafactor"]),
    "rngs": lambda: nnx.Rngs(params=0, dropout=1),
}


def put(module, on, seed=0):
    state = nnx.state(module)
    target = abstract(state, on, seed)
    nnx.update(module, jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), state, target))
    return module


def variables(module):
    return {path: x for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Variable)}


def metadata(module):
    return {path: variable.get_metadata() for path, variable in variables(module).items()}


@pytest.fixture(scope="module")
def nnx_saved(tmp_path_factory):
    """An NNX state that was saved as a state or as a pure dict, and what it holds."""

    @functools.cache
    def get(name, form, save):
        state = layouts.randomized(nnx.state(lazy(NNX[name])), seed=len(name))
        path = tmp_path_factory.mktemp("nnx") / "saved"
        SAVE[save](path, nnx.to_pure_dict(state) if form == "pure" else state)
        return path, state

    return get


every_form = pytest.mark.parametrize("form", ["state", "pure"])
every_nnx = pytest.mark.parametrize("name", NNX)


@pytest.mark.parametrize("save", ["v0", "v1"])
@every_form
@every_nnx
def test_an_abstract_nnx_state(nnx_saved, name, form, save):
    path, state = nnx_saved(name, form, save)
    for expected in (state, nnx.to_pure_dict(state)):
        assert_restores(path, expected, MESHES["1x8"](), seed=7)
        assert_restores(path, expected, MESHES["2x2x2"](), seed=8, make=real)


@pytest.mark.parametrize("save", ["v0", "v1"])
@every_form
@every_nnx
def test_a_real_module(nnx_saved, name, form, save):
    path, state = nnx_saved(name, form, save)
    module = put(lazy(NNX[name]), layouts.mesh((1, 8)), seed=3)
    held, known, laid_out = variables(module), metadata(module), shardings(nnx.state(module))
    got = reshard.restore(path, module)
    assert got is module or all(a is b for a, b in zip(got, module, strict=True))
    layouts.assert_same_tree(nnx.state(module), state)
    assert shardings(nnx.state(module)) == laid_out
    now = variables(module)
    assert now.keys() == held.keys() and all(now[key] is held[key] for key in held)
    assert metadata(module) == known


@every_form
@every_nnx
def test_an_abstract_module(nnx_saved, name, form):
    path, state = nnx_saved(name, form, "v0")
    module, graphdef = abstract_module(NNX[name], layouts.mesh((1, 8)))
    target = leaves_by_path(module)
    got = reshard.restore(path, module)
    assert type(got) is type(module)
    assert nnx.graphdef(nnx.eval_shape(lambda: got)) == graphdef
    layouts.assert_same_tree(nnx.state(got), state)
    assert shardings(leaves_by_path(got)) == shardings(target)
    # The given one is as abstract as before.
    assert leaves_by_path(module) == target
    assert {type(leaf) for leaf in target.values()} == {jax.ShapeDtypeStruct}


def leaves_by_path(module):
    return {leaf.path: leaf.value for leaf in flatten_state(module).leaves}


def abstract_module(make, on):
    """A module with shardings, and its graph. Flax before 0.12.5 does not count arrays in no
    variable as state."""
    graphdef, empty = nnx.split(nnx.eval_shape(lambda: lazy(make)))
    module = nnx.merge(graphdef, abstract(empty, on))
    for _, node in nnx.iter_graph(module):
        if isinstance(node, Model) and node.buffer.sharding is None:
            replicated = NamedSharding(on, P())
            node.buffer = nnx.data(jax.ShapeDtypeStruct((3,), "int32", sharding=replicated))
    return module, graphdef


def test_a_module_beside_arrays_and_counters(tmp_path):
    module = lazy(lambda: Block(nnx.Rngs(0)))
    state = {"model": nnx.state(module), "step": 7, "ema": jnp.arange(8.0), "none": None}
    state |= {"model": layouts.randomized(state["model"]), "abstract": jnp.arange(8.0)}
    save_v0(tmp_path / "saved", state)
    target = {"model": module, "step": 0, "ema": jnp.zeros(8), "none": None}
    sharding = NamedSharding(layouts.mesh((1, 8)), P("model"))
    target["abstract"] = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)
    got = reshard.restore(tmp_path / "saved", target)
    assert got["abstract"].sharding == sharding
    layouts.assert_same_tree(got["abstract"], state["abstract"])
    assert got["model"] is module and got["step"] == 7 and target["step"] == 0
    layouts.assert_same_tree(nnx.state(module), state["model"])
    layouts.assert_same_tree(got["ema"], state["ema"])
    layouts.assert_same_tree(target["ema"], jnp.zeros(8))


def test_a_module_saved_without_splitting_off_its_state(tmp_path):
    """Orbax saves all its attributes, with further levels. Tied weights are stored twice, and only
    the caller knows that they are equal."""
    module = lazy(model)
    nnx.update(module, layouts.randomized(nnx.state(module)))
    save_v0(tmp_path / "saved", module)
    text = refused(tmp_path / "saved", module)
    places = ["again/" + "/".join(path) for path in BLOCK] + ["embed/embedding"]
    twice = ["blocks/1/" + "/".join(path) for path in BLOCK] + ["tied"]
    dropped = ", ".join(f'"{name}/value"' for name in twice)
    lines = [
        f"  {one}: one leaf of the target, saved as {one}/value and {other}/value\n"
        for one, other in zip(places, twice, strict=True)
    ]
    assert text == (
        f"`{tmp_path}/saved` {HEAD}: 7 tied in the target only\n{''.join(lines)}\n"
        f"hint: ckpt = reshard.select(reshard.open(path), drop=[{dropped}])"
    )
    ckpt = reshard.select(reshard.open(tmp_path / "saved"), drop=[f"{x}/value" for x in twice])
    fresh = put(lazy(lambda: Model(nnx.Rngs(5))), layouts.mesh((1, 8)))
    assert reshard.restore(ckpt, fresh) is fresh
    layouts.assert_same_tree(nnx.state(fresh), nnx.state(module))


# Errors, and leaves that stay as they are.


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    put = layouts.random_on(layouts.mesh((2, 4)))
    tree = {
        "params": {
            "layer_0": {"kernel": put((8, 16), None, "model"), "bias": put((16,))},
            "layer_1": {"kernel": put((8, 16)), "bias": put((16,))},
            "head": {"kernel": put((16, 32)), "bias": put((32,), dtype="bfloat16")},
        },
        "step": 7,
        "rng": jax.random.key(1),
        "ema": put((5, 7)),
        "name": "run",
    }
    return save_pytree(tmp_path_factory.mktemp("plain") / "saved", tree), tree


@pytest.fixture
def target(plain):
    return abstract(plain[1], layouts.mesh((1, 8)))


HEAD = "does not match the target"


def test_one_error_lists_all_mismatches(plain, target):
    path, _ = plain
    params = target["params"]
    target["parameters"] = {"head": params.pop("head")}
    params["layer_0"]["kernel"] = struct((8, 16), "bfloat16")
    params["layer_0"]["bias"] = struct((17,), "float32")
    params["layer_1"]["bias"] = jax.ShapeDtypeStruct((16,), "float32")
    target["step"] = 0.5
    target["extra"], target["note"] = 1, ""
    del target["name"]
    assert refused(path, target) == (
        f"`{path}` {HEAD}: 4 missing in the checkpoint, 3 not in the target, 1 of another kind, "
        "1 of another shape, 1 of another dtype, 1 without a usable sharding\n"
        "  extra  a Python int: missing\n"
        "  note  a Python str: missing\n"
        "  parameters/head/bias  bfloat16[32]: missing\n"
        "  parameters/head/kernel  float32[16, 32]: missing\n"
        "  name  'run': not in the target\n"
        "  params/head/bias  bfloat16[32]: not in the target\n"
        "  params/head/kernel  float32[16, 32]: not in the target\n"
        "  step: the target has a Python float, the checkpoint a Python scalar (int64)\n"
        "  params/layer_0/bias: the target has float32[17], the checkpoint float32[16]\n"
        "  params/layer_0/kernel: the target has bfloat16[8, 16], the checkpoint float32[8, 16]\n"
        "  params/layer_1/bias: in the target, it has no sharding\n\n"
        'hint: cast="lossy" allows all float casts\n'
        "hint: reshard.target(state, mesh=mesh, ...) gives every leaf a sharding"
    )
    ckpt = reshard.open(path)
    before = layouts.bytes_read()
    refused(ckpt, target)
    assert layouts.bytes_read() == before


@pytest.mark.parametrize("key", ["params", "model"])
def test_a_model_beside_its_optimizer_is_selected_and_renamed(key, tmp_path):
    params = {"a*": {"kernel": np.ones((2, 3), "float32")}, "b": np.arange(3.0)}
    moments = {"0": {"count": np.int32(3), "mu": params}}
    tree = {key: params, "opt_state": moments, "step": np.int32(3)}
    path = save_v0(tmp_path / "run", tree)
    text = refused(path, params)
    hint = next(line for line in text.splitlines() if "rename" in line)
    chosen = f'reshard.select(reshard.open(path), "{key}/**")'
    assert hint == f'hint: reshard.rename({chosen}, [("^{key}/", "")])'
    ckpt = reshard.rename(reshard.select(reshard.open(path), f"{key}/**"), [(f"^{key}/", "")])
    layouts.assert_same_tree(reshard.restore(ckpt, params), params)
    # A tree of which that key is a part needs no new names.
    assert "rename" not in refused(path, {key: params})


@pytest.mark.parametrize("inside", [True, False])
def test_optimizer_state_at_another_level_is_renamed_and_not_reset(inside, tmp_path):
    """In flax 0.10 an `nnx.Optimizer` has the model inside. Others save it beside the model."""

    def made(seed, inside):
        model = nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
        if inside:
            return nnx.ModelAndOptimizer(model, optax.adam(1e-3))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)}

    def state(made):
        if not isinstance(made, dict):
            return nnx.to_pure_dict(nnx.state(made))
        return {key: nnx.to_pure_dict(nnx.state(value)) for key, value in made.items()}

    def leaves(made):
        parts = state(made)
        inside = parts.pop("optimizer", {})
        return {path: bits(leaf) for path, leaf in flat(parts | inside).items()}

    source = made(0, inside)
    numbers = itertools.count(1)
    nnx.update(source, jax.tree.map(lambda x: x * 0 + next(numbers), nnx.state(source)))
    saved = nnx.state(source) if inside else {key: nnx.state(x) for key, x in source.items()}
    path = save_v0(tmp_path / "run", saved)
    target = made(1, not inside)
    for named in ({}, {"unexpected": "ignore"}):
        (hint,) = refused(path, target, **named).partition("\n\n")[2].splitlines()
        ckpt = eval(hint.removeprefix("hint: "), {"reshard": reshard, "path": path})
        reshard.restore(ckpt, target)
        assert leaves(target) == leaves(source)


def test_keep_is_not_for_a_leaf_that_may_have_another_name(tmp_path):
    path = save_v0(tmp_path / "run", {"a": jnp.ones(3), "old": jnp.ones((2, 2))})
    target = {"a": jnp.ones(3), "new": jnp.zeros((2, 2))}
    assert "keep=" not in refused(path, target)
    assert "keep=" not in refused(path, target, unexpected="ignore")
    assert "keep=" in refused(path, target | {"new": jnp.zeros((2, 3))}, unexpected="ignore")


LOSSLESS, LOSSY = (
    "cast=True allows casts that keep every value",
    'cast="lossy" allows all float casts',
)


@pytest.mark.parametrize(
    "saved, wanted, helps",
    [
        (["int32"], ["float32"], {}),
        (["int8"], ["int32"], {False: [LOSSLESS]}),
        (["bfloat16"], ["float32"], {False: [LOSSLESS]}),
        (["float32"], ["bfloat16"], {False: [LOSSY], True: [LOSSY]}),
        (["bfloat16", "float32"], ["float32", "bfloat16"], {False: [LOSSY], True: [LOSSY]}),
        (["bfloat16", "int32"], ["float32", "float32"], {False: [LOSSLESS]}),
    ],
)
def test_a_cast_is_proposed_where_it_helps(saved, wanted, helps, tmp_path):
    path = save_v0(tmp_path / "run", [jnp.ones(3, dtype) for dtype in saved])
    target = [jnp.zeros(3, dtype) for dtype in wanted]
    for cast in (False, True, "lossy"):
        try:
            reshard.restore(path, target, cast=cast)
        except reshard.TreeMismatchError as error:
            assert [*error.hints] == helps.get(cast, [])
        else:
            assert cast not in helps


def test_keep(plain):
    """Kept leaves keep their values and are not read, even if they do not fit or are missing."""
    path, tree = plain
    target = real(tree, layouts.mesh((1, 8)))
    target["params"]["lora"] = {"a": jnp.ones(3), "b": jnp.zeros((2, 2))}
    assert refused(path, target) == (
        f"`{path}` {HEAD}: 2 missing in the checkpoint\n"
        "  params/lora/a  float32[3]: missing\n"
        "  params/lora/b  float32[2, 2]: missing\n\n"
        'hint: keep=("params/lora/a",) keeps its value; globs work'
    )
    target["params"]["head"] = {"kernel": layouts.put(np.ones((16, 99))), "bias": jnp.ones(5, int)}
    target |= {"step": 1.5, "name": "mine"}
    keep = ("params/head/**", "params/lora/*", "step", "na*", "**/layer_1/bias")
    got = reshard.restore(path, target, keep=keep)
    kept = [(p["head"], p["lora"], p["layer_1"]["bias"]) for p in (got["params"], target["params"])]
    for one, other in zip(*map(jax.tree.leaves, kept), strict=True):
        assert one is other
    expected = tree | {"step": 1.5, "name": "mine"}
    expected["params"] = {key: target["params"][key] for key in ("head", "lora")} | {
        "layer_0": tree["params"]["layer_0"],
        "layer_1": {"kernel": tree["params"]["layer_1"]["kernel"], "bias": jnp.zeros(16)},
    }
    layouts.assert_same_tree(got, expected)


def test_keep_of_missing_leaves_and_of_leaves_without_a_value(plain, target):
    path, tree = plain
    assert refused(path, target, keep=["params/hed/**", "step"]) == (
        "no leaf matches\n  `params/hed/**`\n\nhint: the nearest leaf is `params/head/bias`"
    )
    assert refused(path, target, keep=("params/head/*", "step")) == (
        f"`{path}` {HEAD}: 2 kept without a value\n"
        "  params/head/bias: keep names it, but in the target it has no value\n"
        "  params/head/kernel: keep names it, but in the target it has no value\n\n"
        "hint: pass a target whose kept leaves are arrays, not abstract leaves"
    )
    target["params"]["head"] = real(tree["params"]["head"], layouts.mesh((1, 8)))
    got = reshard.restore(path, target, keep=("params/head/*", "step"))
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(got))
    assert got["params"]["head"]["kernel"] is target["params"]["head"]["kernel"]


def test_keep_by_another_name_of_a_tied_weight(nnx_saved):
    path, _ = nnx_saved("module", "state", "v0")
    module = put(lazy(model), layouts.mesh((1, 8)))
    own = module.tied[...]
    reshard.restore(path, module, keep=("tied",))
    assert module.tied[...] is own and module.embed.embedding[...] is own


def test_unknown_options(plain, target):
    bytes_hint = "is not a number of bytes\n\nhint: `256MiB`, `1GiB`"
    known = "is unknown\n\nhint:"
    for name, value, text in [
        ("cast", "yes", f"cast='yes' {known} cast=False\nhint: cast=True\nhint: cast='lossy'"),
        ("unexpected", 1, f"unexpected=1 {known} unexpected='error'\nhint: unexpected='ignore'"),
        ("max_memory", -5, f"`-5` {bytes_hint}"),
        ("max_memory", 0, f"`0` {bytes_hint}"),
        ("keep", ["*", 3], "a glob must be text\n  keep: 3\n\nhint: `params/**`, `**/kernel`"),
    ]:
        assert refused(plain[0], target, reshard.ArgumentError, **{name: value}) == text


def frozen(module):
    """The arrays of a module and their metadata, to detect any change."""
    return {
        path: (
            [(id(leaf), bits(leaf)) for leaf in jax.tree.leaves(x.get_value())],
            x.get_metadata(),
        )
        for path, x in variables(module).items()
    }


@pytest.mark.parametrize("memory", [None, "20KiB"])
@pytest.mark.parametrize(
    "name", ["opt_state.1.0.nu.pair.value.y", "model.blocks.0.linear.bias.value"]
)
def test_a_module_is_unchanged_if_a_read_fails(tmp_path, name, memory):
    module = put(lazy(NNX["model and optimizer"]), layouts.mesh((1, 8)))
    state = layouts.randomized(nnx.state(module))
    layouts.save_pytree(tmp_path / "saved", state, use_ocdbt=False)
    file = next(f for f in (tmp_path / "saved" / name).rglob("*") if f.name[0] != ".")
    file.write_bytes(b"\x55" * file.stat().st_size)
    before = frozen(module)
    error = reshard.CorruptCheckpointError
    assert refused(tmp_path / "saved", module, error, max_memory=memory) == (
        f"{name.replace('.', '/')}: its stored bytes cannot be read\n"
        f'  FAILED_PRECONDITION: Error reading local file "{file}": '
        "ZSTD_decompressStream() failed: Unknown frame descriptor; at byte 0; "
        "at uncompressed byte 0"
    )
    assert frozen(module) == before


def test_a_cast_of_the_checkpoint(plain):
    path, tree = plain
    ckpt = reshard.cast(reshard.open(path), "bfloat16", "params/**")
    with pytest.raises(reshard.TreeMismatchError):
        reshard.restore(ckpt, abstract(tree, layouts.mesh((1, 8))), cast=True)
    expected = tree | {"params": jax.tree.map(lambda x: x.astype("bfloat16"), tree["params"])}
    target = abstract(expected, layouts.mesh((1, 8)))
    got = reshard.restore(ckpt, target)
    assert shardings(got) == shardings(target)
    jax.tree.map(layouts.assert_equal_or_nan, got.pop("params"), expected.pop("params"))
    layouts.assert_same_tree(got, expected)


# Dtypes of 64 bits, and meshes without devices.


def test_dtypes_that_jax_makes_narrower(tmp_path):
    tree = {"a": np.arange(8.0), "b": np.arange(8), "c": np.arange(8, dtype="complex128")}
    save_pytree(tmp_path / "saved", tree)
    target = {
        name: jax.ShapeDtypeStruct((8,), value.dtype, sharding=one_device())
        for name, value in tree.items()
    }
    assert refused(tmp_path / "saved", target) == (
        f"`{tmp_path}/saved` {HEAD}: 3 wider than JAX allows by default\n"
        "  a: JAX makes no float64 arrays by default\n"
        "  b: JAX makes no int64 arrays by default\n"
        "  c: JAX makes no complex128 arrays by default\n\n"
        'hint: jax.config.update("jax_enable_x64", True)'
    )
    with jax.enable_x64(True):
        got = reshard.restore(tmp_path / "saved", target)
        assert_restored(got, target, jax.tree.map(jnp.asarray, tree))
    # Host arrays are as wide as they were saved.
    layouts.assert_same_tree(
        reshard.restore(tmp_path / "saved", jax.tree.map(np.zeros_like, tree)), tree
    )


def test_a_bare_mesh_and_dtypes_that_jax_makes_narrower(tmp_path):
    on = layouts.mesh((1, 8))
    with jax.enable_x64(True):
        tree = jax.device_put(
            {"a": np.arange(8.0), "b": np.arange(16), "c": np.ones(8, "float32")},
            NamedSharding(layouts.mesh((2, 4)), P("model")),
        )
        save_pytree(tmp_path / "saved", tree)
    assert refused(tmp_path / "saved", on) == (
        "JAX cannot make arrays of these dtypes without jax_enable_x64\n"
        "  a  float64[8]\n  b  int64[16]\n\n"
        'hint: jax.config.update("jax_enable_x64", True)'
    )
    with jax.enable_x64(True):
        got = reshard.restore(tmp_path / "saved", on)
        layouts.assert_same_tree(got, tree)
        layouts.assert_laid_out(got, tree, on)


@pytest.mark.parametrize("explicit", [False, True])
def test_an_abstract_mesh_is_the_one_in_context(plain, explicit):
    path, tree = plain
    on = layouts.mesh((1, 8), explicit=explicit)
    target = abstract(tree, on.abstract_mesh)
    arrays = [x for x in jax.tree.leaves(target) if isinstance(x, jax.ShapeDtypeStruct)]
    assert len(arrays) == 8
    text = refused(path, target)
    assert text.startswith(f"`{path}` {HEAD}: 8 without a usable sharding\n")
    assert (
        text.count("in the target, its sharding is on an AbstractMesh, which has no devices") == 8
    )
    with jax.set_mesh(on):
        got = reshard.restore(path, target)
    expected = abstract(tree, on)
    assert_restored(got, expected, tree)
    # Another mesh in context is no help.
    with jax.set_mesh(layouts.mesh((2, 4))):
        assert refused(path, target) == text


def test_a_chunk_that_does_not_fit(tmp_path):
    tree = layouts.small_tree(layouts.mesh((1, 1)), {"a": P(), "b": P()}, (1200, 512))
    tree["c"] = jnp.ones(3)
    save_v0(tmp_path / "saved", tree)
    on = layouts.mesh((1, 8))
    with pytest.raises(reshard.MemoryLimitError) as caught:
        reshard.restore(tmp_path / "saved", abstract(tree, on), max_memory="1MiB")
    a, b, _ = reshard.open(tmp_path / "saved").arrays
    charges = [max(h.stored_sizes()) + h.nbytes + READ_OVERHEAD for h in (a, b)]
    least = max(charges)
    assert caught.value.problems == tuple(
        f"{name}: {charge / 2**20:.2f} MiB" for name, charge in zip("ab", charges, strict=True)
    )
    assert caught.value.least == least
    for enough in (least, f"{-(-least // 1024)}KiB"):
        assert_restores(tmp_path / "saved", tree, on, max_memory=enough)
    with pytest.raises(reshard.MemoryLimitError):
        reshard.restore(tmp_path / "saved", on, max_memory="1MiB")


def test_threads_restore_at_once(saved, nnx_saved):
    shared = reshard.open(saved("standard").path)
    jobs: list = []
    for i, layout in enumerate(["standalone", "zarr3-files", "v1", "standard", "standard"]):
        source = saved(layout)
        expected = layouts.plain_scalars(source.tree)
        ckpt = shared if layout == "standard" else reshard.open(source.path, **source.open)
        on = [layouts.mesh((1, 8)), layouts.mesh((2, 2, 2), ("x", "y", "z")), layouts.mesh((16, 1))]
        jobs.append((ckpt, abstract(expected, on[i % 3], seed=i), expected, [None, LITTLE][i % 2]))
    path, state = nnx_saved("module", "state", "v0")
    modules = [put(lazy(model), layouts.mesh((1, 8)), seed=i) for i in range(2)]
    jobs += [(path, module, state, None) for module in modules]
    start = threading.Barrier(len(jobs))

    def run(ckpt, target, _, memory):
        start.wait()
        return [reshard.restore(ckpt, target, max_memory=memory) for _ in range(3)]

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run, *zip(*jobs, strict=True)))
    for (_, target, expected, _), found in zip(jobs, results, strict=True):
        for got in found:
            if isinstance(target, nnx.Module):
                assert got is target
                layouts.assert_same_tree(nnx.state(got), expected)
            else:
                assert_restored(got, target, expected)


def test_the_accelerators_path_inside_a_mesh_and_into_other_memory(tmp_path, monkeypatch):
    on = layouts.mesh((1, 8))
    rng = np.random.default_rng(0)
    values = layouts.random_array(rng, (256, 256), "bfloat16")
    tree = {"a": jax.device_put(values, NamedSharding(layouts.mesh((8, 1)), P("data")))}
    save_pytree(tmp_path / "saved", tree)
    own_memory(monkeypatch)
    for kind in (None, "pinned_host"):
        sharding = NamedSharding(on, P(None, "model"), memory_kind=kind)
        target = {"a": jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=sharding)}
        for context in (contextlib.nullcontext, functools.partial(jax.set_mesh, on)):
            with context():
                got = reshard.restore(tmp_path / "saved", target, max_memory=100_000)
            assert got["a"].sharding == sharding
            layouts.assert_same_tree(got, tree)
