"""What a saved tree is: real saves of what people save, with the stored values as the oracle; trees
that can be read in two ways; and made-up trees, of which every leaf has to be somewhere."""

import dataclasses
import pathlib
from typing import Any

import flax
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.core import freeze
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import OPTIMIZERS, RESHAPING
from sampling import examples

import reshard
from reshard import TreeMismatchError
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.checkpoint import Checkpoint, Source
from reshard.convert.layout import KINDS, Layout, detect

X = jnp.ones((2, 4))

# Models


class Net(nn.Module):
    """Modules with Linen's names and the user's, statistics, and a collection of the user's."""

    boxed: Any = None

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(3, kernel_init=self.boxed(init, ("a", "b")) if self.boxed else init)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        self.variable("counters", "n", lambda: jnp.zeros((), jnp.int32))
        return nn.Dense(2, name="head")(x)


class Custom(nn.Module):
    """A model of which all names are the user's."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="decoder")(nn.Dense(3, name="encoder")(x))


class WeightNormed(nn.Module):
    """Keys that hold slashes."""

    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(3))(x)


class Temperature(nn.Module):
    """A parameter that is really called `value`."""

    boxed: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        init = nn.with_partitioning(init, (None,)) if self.boxed else init
        return x * self.param("value", init, (1,))


class Scaled(nn.Module):
    """That parameter in a module: without a name, or with one; beside boxes or none."""

    boxed: bool
    name_of: str | None
    inner: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        init = nn.with_partitioning(init, ("a", "b")) if self.boxed else init
        return Temperature(self.inner, name=self.name_of)(nn.Dense(3, kernel_init=init)(x))


class Small(nnx.Module):
    """A model that is no more than variables and statistics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)


class Plain(nnx.Module):
    """A model that nothing tells from one of Linen's."""

    def __init__(self, rngs):
        self.encoder = nnx.Linear(4, 3, rngs=rngs)
        self.decoder = nnx.Linear(3, 2, rngs=rngs)


class Count(nnx.Variable):
    """A variable of the user's own type."""


class Model(nnx.Module):
    """Every kind of attribute."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.seq = nnx.Sequential(
            nnx.Linear(3, 3, rngs=rngs), jax.nn.relu, nnx.Linear(3, 2, rngs=rngs)
        )
        self.value = nnx.Linear(2, 2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.count = Count(jnp.zeros((), jnp.int32))
        self.by = nnx.Dict(a=nnx.Param(jnp.ones(2)), value=nnx.Param(jnp.ones(3)))
        self.buffer = nnx.data(jnp.arange(3))
        self.pair = nnx.Param({"x": jnp.ones(2), "y": [jnp.ones(1)]})


OPTIMIZERS = {**OPTIMIZERS, **RESHAPING, "plain sgd": optax.sgd(1e-3)}

# Saving


def randomized(tree):
    """The same tree with other values in all its arrays."""
    rng = np.random.default_rng(len(jax.tree.leaves(tree)))

    def new(leaf):
        if not hasattr(leaf, "dtype"):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), leaf.size)
            return keys.reshape(leaf.shape)
        return jnp.asarray(layouts.random_array(rng, leaf.shape, leaf.dtype))

    return jax.tree.map(new, tree)


def init(module, *args):
    return randomized(module.init(jax.random.key(0), *(args or (X,))))


def state_of(module):
    return randomized(nnx.state(module))


def train(params, tx=OPTIMIZERS["adam"], cls=train_state.TrainState, **fields):
    state = cls.create(apply_fn=None, params=params, tx=tx, **fields)
    return randomized(state).replace(step=2**31 + 7)


def plain(tree):
    """Path, with keys as text -> bits of a leaf, in a tree without boxes; None without a value."""
    leaves = layouts.saved_leaves(nn.meta.unbox(tree))
    return {tuple(map(str, path)): bits(leaf) for path, leaf in leaves.items()}


def bits(leaf):
    if not hasattr(leaf, "dtype"):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = np.asarray(leaf)
    return leaf.dtype.name, leaf.shape, leaf.tobytes()


def stored(ckpt, path):
    """The same of a saved leaf."""
    leaf = ckpt[path]
    return bits(leaf.view().read().result()) if isinstance(leaf, ArrayHandle) else leaf


@dataclasses.dataclass
class Case:
    """What is saved, and what its layout is to be.

    Attributes:
      tree: what is saved.
      kind: what it is.
      model: what the model holds, by path.
      optimizer: what the optimizer's state holds.
      step: the step counter.
      rest: the saved paths of the rest.
      roots: beginning of paths in the model -> of saved paths.
      root: of the optimizer's state.
    """

    tree: Any
    kind: str
    model: dict
    optimizer: dict = dataclasses.field(default_factory=dict)
    step: Any = None
    rest: tuple = ()
    roots: dict = dataclasses.field(default_factory=lambda: {(): ()})
    root: tuple | None = None


COLLECTIONS = {(name,): (name,) for name in ("params", "batch_stats", "counters")}
BARE = {("params",): ()}
UNDER_MODEL = {(): ("model",)}


class BatchState(train_state.TrainState):
    """A train state with more fields, collections and others."""

    batch_stats: Any
    counts: Any
    ema_params: Any
    dropout_key: Any
    dynamic_scale: Any
    note: Any


class ModelState(train_state.TrainState):
    model_state: Any


def linen_cases():
    variables = init(Net())
    boxed = {name: init(Net(box)) for name, box in {"partitioned": nn.with_partitioning}.items()}
    boxed["logical"] = init(Net(nn.with_logical_partitioning))
    trees = {"variables": variables, "frozen": freeze(variables), **boxed}
    for name, tree in trees.items():
        model = plain(flax.core.unfreeze(tree))
        yield name, Case(tree, "linen-variables", model, roots=COLLECTIONS)
    params = {"params": variables["params"]}
    yield "params", Case(params, "linen-variables", plain(params), roots={("params",): ("params",)})
    for name, tree in {"bare": variables, "bare boxed": boxed["partitioned"]}.items():
        model = plain({"params": tree["params"]})
        yield name, Case(tree["params"], "linen-params", model, roots=BARE)
    lstm = nn.LSTMCell(3)
    tree = init(lstm, lstm.initialize_carry(jax.random.key(0), (2, 4)), X)["params"]
    yield "keywords", Case(tree, "linen-params", plain({"params": tree}), roots=BARE)
    tree = init(WeightNormed())["params"]
    yield "slashes", Case(tree, "linen-params", plain({"params": tree}), roots=BARE)
    attention = nn.MultiHeadDotProductAttention(2, decode=True)
    tree = init(attention, jnp.ones((1, 3, 4)), jnp.ones((1, 3, 4)))
    roots = {(name,): (name,) for name in ("params", "cache")}
    yield "cache", Case(tree, "linen-variables", plain(tree), roots=roots)
    tree = {"batch_stats": variables["batch_stats"]}
    roots = {("batch_stats",): ("batch_stats",)}
    yield "statistics", Case(tree, "linen-variables", plain(tree), roots=roots)
    tree = {**variables, "ema": variables["params"], "epoch": 3, "name": "run", "key": jnp.ones(2)}
    tree = {**tree, "rngs": {"dropout": jax.random.key(3)}, "history": [jnp.ones(2)]}
    rest = [("ema", *p) for p in plain(variables["params"])]
    rest += [("epoch",), ("history", 0), ("key",), ("name",), ("rngs", "dropout")]
    model = plain(variables)
    yield "more", Case(tree, "linen-variables", model, rest=tuple(rest), roots=COLLECTIONS)

    at = {("params",): ("params",)}
    for name, tx in OPTIMIZERS.items():
        for box in ("", "boxed "):
            tree = (boxed["partitioned"] if box else variables)["params"]
            state = train(tree, tx)
            model = plain({"params": state.params})
            case = Case(state, "linen-train-state", model, roots=at, root=("opt_state",))
            case.optimizer, case.step = plain(state.opt_state), state.step
            yield box + name, case
    custom = train(init(Custom())["params"])
    case = Case(custom, "linen-train-state", plain({"params": custom.params}), roots=at)
    case.optimizer, case.step, case.root = plain(custom.opt_state), custom.step, ("opt_state",)
    yield "custom names", case
    case = dataclasses.replace(case, tree=serialization.to_state_dict(custom))
    case.optimizer = plain(case.tree["opt_state"])
    yield "state dict", case
    tree = {"params": custom.params, "opt": custom.opt_state, "step": jnp.uint32(8)}
    case = dataclasses.replace(case, tree=tree, step=tree["step"], root=("opt",))
    case.optimizer = plain(custom.opt_state)
    yield "a dict", case
    for name, empty in {"no state": None, "empty state": {}}.items():
        tree = custom.replace(opt_state=empty, step=jnp.int32(5))
        case = dataclasses.replace(case, tree=tree, step=tree.step, optimizer={(): empty})
        case.root = ("opt_state",)
        yield name, case
    tree = {"params": custom.params, "step": 4}
    case = dataclasses.replace(case, tree=tree, step=4, optimizer={}, root=None)
    yield "a step", case

    state = train(
        variables["params"],
        cls=BatchState,
        batch_stats=variables["batch_stats"],
        counts={"head": {"n": jnp.ones((2,))}},
        ema_params=variables["params"],
        dropout_key=jax.random.key(0),
        dynamic_scale={"fin_steps": jnp.ones((), jnp.int32), "scale": jnp.ones(())},
        note=None,
    )
    names = ("params", "batch_stats", "counts")
    model = plain({name: getattr(state, name) for name in names})
    rest = [("ema_params", *p) for p in plain(state.ema_params)] + [("dropout_key",)]
    rest += [("dynamic_scale", "fin_steps"), ("dynamic_scale", "scale"), ("note",)]
    roots = {(name,): (name,) for name in names}
    case = Case(state, "linen-train-state", model, rest=tuple(rest), roots=roots)
    case.optimizer, case.step, case.root = plain(state.opt_state), state.step, ("opt_state",)
    yield "fields", case
    stats = {"batch_stats": variables["batch_stats"]}
    state = train(variables["params"], cls=ModelState, model_state=stats)
    model = plain({"params": state.params, **state.model_state})
    roots = {("params",): ("params",), ("batch_stats",): ("model_state", "batch_stats")}
    case = Case(state, "linen-train-state", model, roots=roots, root=("opt_state",))
    case.optimizer, case.step = plain(state.opt_state), state.step
    yield "model state", case
    for name, tree in {"all variables": variables, "all boxed": boxed["partitioned"]}.items():
        state = train(tree)
        model = plain(state.params)
        roots = {(name,): ("params", name) for name in tree}
        case = Case(state, "linen-train-state", model, roots=roots, root=("opt_state",))
        case.optimizer, case.step = plain(state.opt_state), state.step
        yield name, case
    roots = {(name,): ("params", name) for name in variables}
    yield (
        "only params",
        Case({"params": variables}, "linen-train-state", plain(variables), roots=roots),
    )
    aux = nnx.to_pure_dict(nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.RngState))
    aux = {"model": {"decoder": {"dropout": aux}}}
    state = train(params)
    tree = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    tree = {k: tree[k] for k in ("params", "opt_state", "step")} | {"nnx_aux": aux}
    model = plain(state.params) | plain({"nnx_aux": aux["model"]})
    roots = {("params",): ("params", "params"), ("nnx_aux",): ("nnx_aux", "model")}
    case = Case(tree, "maxtext", model, roots=roots, root=("opt_state",))
    case.optimizer, case.step = plain(state.opt_state), state.step
    yield "maxtext", case


def nnx_cases():
    for name, module in {
        "model": Model(nnx.Rngs(0)),
        "small": Small(nnx.Rngs(0)),
        "streams": nnx.Rngs(params=0, dropout=1),
        "attention": cached_attention(),
        "spectral norm": nnx.SpectralNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
        "weight norm": nnx.WeightNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
        "stacked": stacked(nnx.Rngs(0).fork(split=2)),
        "from Linen": nnx.bridge.ToNNX(Net(), rngs=nnx.Rngs(0)).lazy_init(X),
    }.items():
        state = state_of(module)
        pure = nnx.to_pure_dict(state)
        yield f"nnx {name}", Case(state, "nnx-state", plain(pure))
        yield f"nnx pure {name}", Case(pure, "nnx-pure-dict", plain(pure))
    module = Model(nnx.Rngs(0))
    nnx.update(module, state_of(module))
    pure = nnx.to_pure_dict(nnx.state(module))
    nodes = [path for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    rest = {(*path, "_pytree__state") for path in nodes} | {("linear", "bias")}
    yield "nnx module", Case(module, "nnx-state", plain(pure), rest=tuple(rest))
    params = nnx.filter_state(nnx.state(module), nnx.Param)
    yield "nnx parameters", Case(params, "nnx-state", plain(nnx.to_pure_dict(params)))
    lstm = state_of(nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)))
    yield "nnx keywords", Case(lstm, "nnx-state", plain(nnx.to_pure_dict(lstm)))

    for name, tx in OPTIMIZERS.items():
        optimizer = nnx.Optimizer(Small(nnx.Rngs(0)), tx, wrt=nnx.Param)
        state = state_of(optimizer)
        pure = nnx.to_pure_dict(state)
        case = Case(state, "nnx-optimizer", {}, roots={}, root=("opt_state",))
        case.step, case.optimizer = pure["step"], plain(pure.get("opt_state", {}))
        if name == "plain sgd":
            case.optimizer, case.root = {}, None
        yield f"nnx {name}", case
        yield f"nnx pure {name}", dataclasses.replace(case, tree=pure)
    optimizer = nnx.Optimizer(Small(nnx.Rngs(0)), OPTIMIZERS["adam"], wrt=nnx.Param)
    nnx.update(optimizer, state_of(optimizer))
    pure = nnx.to_pure_dict(nnx.state(optimizer))
    case = Case(optimizer, "nnx-optimizer", {}, roots={}, root=("opt_state",))
    case.step, case.optimizer = pure["step"], plain(pure["opt_state"]) | {("1",): None}
    case.rest = (("_pytree__state",),)
    yield "nnx optimizer module", case
    both = nnx.ModelAndOptimizer(Small(nnx.Rngs(0)), OPTIMIZERS["adam"], wrt=nnx.Param)
    nnx.update(both, state_of(both))
    pure = nnx.to_pure_dict(nnx.state(both))
    case = Case(both, "nnx-model-and-optimizer", plain(pure["model"]), roots=UNDER_MODEL)
    case.step, case.optimizer = pure["step"], plain(pure["opt_state"]) | {("1",): None}
    nodes = ((), ("model",), ("model", "linear"), ("model", "norm"))
    case.rest, case.root = tuple((*p, "_pytree__state") for p in nodes), ("opt_state",)
    yield "nnx both module", case

    for name in ("adam", "MultiSteps", "plain sgd"):
        both = nnx.ModelAndOptimizer(Small(nnx.Rngs(0)), OPTIMIZERS[name], wrt=nnx.Param)
        state = state_of(both)
        pure = nnx.to_pure_dict(state)
        case = Case(state, "nnx-model-and-optimizer", plain(pure["model"]), roots=UNDER_MODEL)
        case.step, case.optimizer = pure["step"], plain(pure.get("opt_state", {}))
        case.root = ("opt_state",)
        if name == "plain sgd":
            case.optimizer, case.root = {}, None
        yield f"nnx both {name}", case
        yield f"nnx pure both {name}", dataclasses.replace(case, tree=pure)

    model = state_of(Plain(nnx.Rngs(0)))
    optimizer = nnx.Optimizer(Plain(nnx.Rngs(0)), OPTIMIZERS["adam"], wrt=nnx.Param)
    state = state_of(optimizer)
    pure, pure_state = nnx.to_pure_dict(model), nnx.to_pure_dict(state)
    case = Case(None, "nnx-model", plain(pure), roots=UNDER_MODEL)
    case.step, case.optimizer = pure_state["step"], plain(pure_state["opt_state"])
    for name in ("optimizer", "opt"):
        for kind, one, other in (
            ("", model, state),
            ("pure ", pure, pure_state),
            ("half pure ", pure, state),
            ("other half pure ", model, pure_state),
        ):
            tree, root = {"model": one, name: other}, (name, "opt_state")
            yield f"nnx {kind}{name}", dataclasses.replace(case, tree=tree, root=root)
    optimizer = nnx.Optimizer(Plain(nnx.Rngs(0)), OPTIMIZERS["plain sgd"], wrt=nnx.Param)
    step = state_of(optimizer)
    tree = {"model": model, "optimizer": step, "epoch": 3, "ema": pure, "name": "run"}
    rest = [("ema", *path) for path in plain(pure)] + [("epoch",), ("name",)]
    case = Case(tree, "nnx-model", plain(pure), rest=tuple(rest), roots=UNDER_MODEL)
    case.step = nnx.to_pure_dict(step)["step"]
    yield "nnx more", case
    small = Small(nnx.Rngs(0))
    optimizer = nnx.Optimizer(small, OPTIMIZERS["adam"], wrt=nnx.Param)
    nnx.update(small, state_of(small))
    nnx.update(optimizer, state_of(optimizer))
    pure = nnx.to_pure_dict(nnx.state(optimizer))
    case = Case({"model": small, "optimizer": optimizer}, "nnx-model", {}, roots=UNDER_MODEL)
    case.model = plain(nnx.to_pure_dict(nnx.state(small)))
    case.step, case.optimizer = pure["step"], plain(pure["opt_state"]) | {("1",): None}
    nodes = (("model",), ("model", "linear"), ("model", "norm"), ("optimizer",))
    case.rest, case.root = (
        tuple((*p, "_pytree__state") for p in nodes),
        ("optimizer", "opt_state"),
    )
    yield "nnx modules", case
    case = Case(None, "nnx-model", case.model, roots=UNDER_MODEL)
    case.tree = {"model": nnx.state(small), "epoch": 3}
    case.rest = (("epoch",),)
    yield "nnx model alone", case
    case = dataclasses.replace(case, kind="nnx-model-and-optimizer", rest=(), root=("opt_state",))
    case.tree = {"model": nnx.state(small), "opt_state": optimizer.opt_state}
    case.optimizer = plain(pure["opt_state"]) | {("1",): None}
    yield "nnx opt_state", case
    state = randomized(OPTIMIZERS["adam"].init(nnx.state(small, nnx.Param)))
    tree = {"model": nnx.state(small), "opt_state": state}
    moments = {name: nnx.to_pure_dict(getattr(state[0], name)) for name in ("mu", "nu")}
    pure = {"0": {"count": state[0].count, **moments}, "1": None}
    yield "nnx state of optax", dataclasses.replace(case, tree=tree, optimizer=plain(pure))


def cached_attention():
    attention = nnx.MultiHeadAttention(2, 4, decode=True, dropout_rate=0.1, rngs=nnx.Rngs(0))
    attention.init_cache((1, 3, 4))
    return attention


@nnx.vmap
def stacked(rngs):
    return nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs))


@pytest.fixture(scope="module")
def cases():
    found = [*linen_cases(), *nnx_cases()]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture(scope="module")
def opened(cases, tmp_path_factory):
    """Each case, saved and opened; all in one tree, for one save takes as long as any other."""
    folder = tmp_path_factory.mktemp("layouts")
    whole = save(folder, {name: case.tree for name, case in cases.items()})
    found = {name: {} for name in cases}
    for (name, *path), leaf in whole.items():
        found[name][tuple(path)] = leaf
    return {name: whole.replace(leaves) for name, leaves in found.items()}


def save(folder, tree):
    return reshard.open(layouts.save_pytree(folder / "saved", tree))


# What is saved


def assert_is(ckpt, case, layout):
    """A whole layout, less its reasons, with the stored values in the place of saved paths."""
    found = dataclasses.replace(layout, why=(), rest=tuple(sorted(layout.rest, key=str)))
    assert {path: stored(ckpt, saved) for path, saved in found.model.items()} == case.model
    assert {path: stored(ckpt, saved) for path, saved in found.optimizer.items()} == case.optimizer
    assert found == Layout(
        kind=case.kind,
        api="nnx" if case.kind.startswith("nnx") else "linen",
        why=(),
        model=found.model,
        optimizer=found.optimizer,
        step=found.step,
        rest=tuple(sorted(case.rest, key=str)),
        roots=case.roots,
        optimizer_root=case.root,
    )
    step = None if found.step is None else stored(ckpt, found.step)[2]
    assert step == (None if case.step is None else np.asarray(case.step).tobytes())
    places = [*found.model.values(), *found.optimizer.values(), *found.rest]
    places += [] if found.step is None else [found.step]
    assert sorted(places, key=str) == sorted(ckpt, key=str)


def test_every_tree_is_told_for_what_it_is(opened, cases):
    for name, case in cases.items():
        layout = detect(opened[name])
        assert layout.why, name
        assert_is(opened[name], case, layout)


def test_trees_that_are_saved_alone_are_no_other(opened, cases, tmp_path):
    for name in ("fields", "masked", "nnx module", "nnx both adam", "nnx opt_state"):
        alone = save(tmp_path / name, cases[name].tree)
        assert detect(alone) == detect(opened[name])


def test_a_tree_may_be_said_to_be_what_it_is(opened, cases):
    for name, case in cases.items():
        layout = detect(opened[name], case.kind)
        assert layout.why[0] == f"`{case.kind}` was asked for"
        assert_is(opened[name], case, layout)


def test_arrays_may_be_abstract(opened, cases):
    """As the tree that a model would save has them."""
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    for name, ckpt in opened.items():
        leaves = {}
        for path, leaf in ckpt.items():
            leaves[path] = leaf
            if isinstance(leaf, ArrayHandle):
                dtype = leaf.dtype if leaf.key_impl is None else key
                leaves[path] = jax.ShapeDtypeStruct(leaf.shape, dtype)
        assert detect(leaves) == detect(ckpt), name


def test_every_kind_is_among_them(cases):
    assert {case.kind for case in cases.values()} == set(KINDS)


# Made-up trees

STORE: Any = None  # which nothing here reads
SOURCE = Source(
    pathlib.Path("run"), "item", False, "", "", (), (), store=STORE, metadata={}, described=True
)
OTHERS = {"None": None, "{}": {}, "text": "text"}


def made(*texts):
    """A checkpoint of leaves `path` or `path:dtype`, where a key `#0` is a list position; a leaf
    `path:None`, `path:{}` or `path:text` is no array."""
    leaves: dict[Any, Any] = {}
    for text in texts:
        printed, _, dtype = text.partition(":")
        keys = printed.split("/")
        path = tuple(int(key[1:]) if key.startswith("#") else key for key in keys)
        leaves[path] = OTHERS[dtype] if dtype in OTHERS else handle(path, dtype or "float32")
    return Checkpoint(leaves, SOURCE)


def handle(path, dtype="float32"):
    dtype = jnp.dtype(dtype)
    return ArrayHandle(
        path, (), dtype, (), None, None, "jax.Array", None, dtype, StoredArray(STORE, "", b"")
    )


def refused(ckpt, layout=None):
    """The text of the error."""
    with pytest.raises(TreeMismatchError) as error:
        detect(ckpt, layout)
    return str(error.value)


def printed(places):
    """Paths, as they are printed."""
    return ["/".join(path) for path in places]


# Whole layouts, with the reasons


def test_linen_train_state(data):
    """One that Orbax 0.4.4 wrote."""
    assert detect(reshard.open(data / "orbax-0.4.4" / "default")) == Layout(
        kind="linen-train-state",
        api="linen",
        why=(
            "`params` is beside `opt`, `step`",
            "`opt` has list positions, as optax's tuples are saved",
        ),
        model={
            ("params", "dense", "bias"): ("params", "dense", "bias"),
            ("params", "dense", "kernel"): ("params", "dense", "kernel"),
        },
        optimizer={
            ("0", "count"): ("opt", 0, "count"),
            ("0", "mu", "k"): ("opt", 0, "mu", "k"),
            ("0", "nu", "k"): ("opt", 0, "nu", "k"),
            ("1",): ("opt", 1),
        },
        step=("step",),
        rest=(
            ("bf",),
            ("emptyd",),
            ("list", 0),
            ("lr",),
            ("name",),
            ("none",),
            ("np",),
            ("tup", 0),
        ),
        roots={("params",): ("params",)},
        optimizer_root=("opt",),
    )


def test_nnx_state():
    ckpt = made("layers/0/w/value", "layers/1/w/value/a", "layers/1/w/value/#0", "key/value:None")
    assert detect(ckpt) == Layout(
        kind="nnx-state",
        api="nnx",
        why=(
            "`layers` has positions as keys, as `nnx.List` does",
            "each array is in a `value` level, as NNX's variables are",
        ),
        model={
            ("layers", "0", "w"): ("layers", "0", "w", "value"),
            ("layers", "1", "w", "a"): ("layers", "1", "w", "value", "a"),
            ("layers", "1", "w", "0"): ("layers", "1", "w", "value", 0),
        },
        optimizer={},
        step=None,
        rest=(("key", "value"),),
        roots={(): ()},
        optimizer_root=None,
    )


@pytest.mark.parametrize(
    ("leaves", "kind", "why"),
    [
        (
            ("batch_stats/Norm_0/mean", "params/Norm_0/scale/value", "params/b", "lr:text"),
            "linen-variables",
            (
                "collections are at the top: `params`, `batch_stats`",
                "`params/Norm_0` has a name as Linen gives them",
            ),
        ),
        (
            ("cell/if/kernel", "head/kernel/value", "head/bias", "none:None"),
            "linen-params",
            (
                "`cell/if` cannot be an attribute",
                "`head/kernel/value` is in a box and `cell/if/kernel` is not, where NNX has "
                "variables throughout",
            ),
        ),
        (
            ("nnx_aux/model/rngs/key:uint32", "nnx_aux/other", "params/params/w", "opt_state/#0/w"),
            "maxtext",
            (
                "`nnx_aux` is beside `params`, as MaxText's runs of NNX save it",
                "`opt_state` has list positions, as optax's tuples are saved",
            ),
        ),
        (
            ("norm/mean", "norm/var", "norm/scale", "value/kernel", "temperature/value"),
            "nnx-pure-dict",
            ("`norm` holds parameters and statistics together",),
        ),
        (
            ("opt_state/1/0/mu/w/value", "opt_state/1/0/mu/b/value:None", "step/value:uint32"),
            "nnx-optimizer",
            (
                "there is nothing but `opt_state`, `step`",
                "`opt_state` has positions as keys, and only those with a value, as "
                "`nnx.Optimizer` does",
                "`step/value` is uint32, as `nnx.Optimizer` counts",
            ),
        ),
        (
            ("model/w/value", "opt_state/trace/w/value", "step/value:uint32"),
            "nnx-model-and-optimizer",
            (
                "each array is in a `value` level, as NNX's variables are",
                "`step/value` is uint32, as `nnx.Optimizer` counts",
                "`model` is beside `opt_state`, `step`",
            ),
        ),
        (
            ("model/w", "optimizer/step:uint32", "optimizer/opt_state/0/w", "optimizer/model/w"),
            "nnx-model",
            (
                "`optimizer` holds the state and the steps of an optimizer, as `nnx.Optimizer` "
                "does",
                "`optimizer/opt_state` has positions as keys, and only those with a value, as "
                "`nnx.Optimizer` does",
                "`optimizer/step` is uint32, as `nnx.Optimizer` counts",
                "`model` is beside `optimizer`",
            ),
        ),
        (
            ("drop/rngs/key:uint32", "drop/rngs/count:uint32", "Dense_0/w"),
            "nnx-pure-dict",
            ("`drop/rngs` is a stream of random numbers (`key`, `count`)",),
        ),
        (
            ("a/cached_key", "a/cached_value", "a/query/kernel"),
            "nnx-pure-dict",
            ("`a` holds parameters and a cache together",),
        ),
        (
            ("a/('kernel', 'u')", "a/kernel/value"),
            "nnx-state",
            ("`a/\"('kernel', 'u')\"` is a tuple as a key",),
        ),
        (
            ("cell/if_/kernel/value",),
            "nnx-state",
            (
                "`cell/if_` is how an attribute avoids a keyword",
                "each array is in a `value` level, as NNX's variables are",
            ),
        ),
        (
            ("a/_pytree__state:None", "_pytree__state:None", "a/w/value", "step:uint32"),
            "nnx-state",
            ("the tree is a module that was saved itself (`_pytree__state`)",),
        ),
        (
            ("drop/key:uint32", "drop/count:uint32", "sub/params/w"),
            "nnx-pure-dict",
            ("`drop` is a stream of random numbers (`key`, `count`)",),
        ),
        (
            ("model/_pytree__state:None", "model/w/value"),
            "nnx-model",
            (
                "`model` is a module that was saved itself (`_pytree__state`)",
                "each array is in a `value` level, as NNX's variables are",
            ),
        ),
        (
            ("step:uint32",),
            "nnx-optimizer",
            (
                "there is nothing but `step`",
                "`step` is uint32, as `nnx.Optimizer` counts",
            ),
        ),
    ],
)
@pytest.mark.every_combination
def test_the_reasons_for_a_layout(leaves, kind, why):
    layout = detect(made(*leaves))
    assert (layout.kind, layout.why) == (kind, why)


def test_one_thing_that_is_only_likely_under_nnx_does_not_outweigh_a_name_of_linens():
    layout = detect(made("encoder/layer/0/kernel", "encoder/LayerNorm_0/scale"))
    assert (layout.kind, layout.why) == (
        "linen-params",
        ("`encoder/LayerNorm_0` has a name as Linen gives them",),
    )


# Levels named `value`


@pytest.mark.parametrize(
    ("model", "expected", "doubtful"),
    [
        (Scaled(False, None), "Temperature_0/value", False),
        (Scaled(True, None), "Temperature_0/value", False),
        (Scaled(False, "scaling"), "scaling/value", True),
        (Scaled(True, None, True), "Temperature_0/value", False),
        (Scaled(True, "scaling", True), "scaling/value", False),
    ],
    ids=["automatic", "beside boxes", "named", "in a box itself", "named, in a box itself"],
)
def test_a_parameter_called_value(model, expected, doubtful, tmp_path):
    state = train(init(model)["params"])
    layout = detect(save(tmp_path, state))
    assert printed(layout.model) == printed(plain({"params": state.params}))
    assert printed(layout.optimizer) == printed(plain(state.opt_state))
    assert f"params/{expected}" in printed(layout.model)
    reason = (
        "`params/scaling/value` is taken for a parameter of that name: nothing else is in a box"
    )
    assert (reason in layout.why) == doubtful


def test_a_parameter_called_value_in_a_module_with_a_name_is_taken_for_a_box_among_boxes(tmp_path):
    """The saved tree is that of a boxed parameter `scaling`, too: a map can say otherwise."""
    layout = detect(save(tmp_path, init(Scaled(True, "scaling"))))
    assert printed(layout.model) == [
        "params/Dense_0/bias",
        "params/Dense_0/kernel",
        "params/scaling",
    ]


def test_what_only_nnx_has_in_a_train_state_is_in_no_box():
    ckpt = made("params/params/a/w/value", "nnx_aux/model/rngs/count:uint32", "step:int32")
    assert printed(detect(ckpt).model) == ["params/a/w", "nnx_aux/rngs/count"]


def test_what_another_collection_has_in_it_is_a_module():
    ckpt = made("params/a/value", "params/b/kernel/value", "stats/a/n", "params/value")
    model = ["params/a/value", "params/b/kernel", "params/value", "stats/a/n"]
    assert printed(detect(ckpt).model) == model
    ckpt = made("params/a/value", "params/b/kernel/value", "stats/a/n/value")
    assert printed(detect(ckpt).model) == ["params/a/value", "params/b/kernel", "stats/a/n"]


def test_a_module_called_value_is_no_box():
    ckpt = made("params/attention/value/kernel/value", "params/w", "opt_state/#0/a/value/w:None")
    layout = detect(ckpt)
    assert printed(layout.model) == ["params/attention/value/kernel", "params/w"]
    assert printed(layout.optimizer) == ["0/a/value/w"]
    ckpt = made("attention/value/kernel/value", "0/value/a", "0/value/b", "1/value/value")
    layout = detect(ckpt, "nnx-state")
    assert printed(layout.model) == ["attention/value/kernel", "0/a", "0/b", "1/value"]


def test_a_boxed_optimizer_follows_its_parameters():
    ckpt = made(
        *("params/Scale_0/value", "params/w/kernel/value", "params/value", "step:int32"),
        *("opt_state/#0/mu/Scale_0/value", "opt_state/#0/mu/w/kernel/value:None"),
        *("opt_state/#0/mu/value", "opt_state/#1/value"),
    )
    layout = detect(ckpt)
    assert printed(layout.model) == ["params/Scale_0/value", "params/w/kernel", "params/value"]
    optimizer = ["0/mu/Scale_0/value", "0/mu/w/kernel", "0/mu/value", "1/value"]
    assert printed(layout.optimizer) == optimizer


def test_an_optimizer_follows_the_parameter_whose_path_it_ends_with():
    ckpt = made(
        *("params/kernel/value", "params/m/kernel/value", "stats/m/kernel/n"),
        *("opt_state/#0/kernel/value", "opt_state/#0/m/kernel/value"),
    )
    layout = detect(ckpt, "linen-train-state")
    assert printed(layout.model) == ["params/kernel", "params/m/kernel/value", "stats/m/kernel/n"]
    assert printed(layout.optimizer) == ["0/kernel", "0/m/kernel/value"]


def test_pure_dicts_keep_a_parameter_called_value():
    stream = ("rngs/key:uint32", "rngs/count:uint32")
    layout = detect(made(*stream, "scaling/value"))
    assert (layout.kind, printed(layout.model)) == (
        "nnx-pure-dict",
        ["rngs/key", "rngs/count", "scaling/value"],
    )
    model = [*(f"model/{leaf}" for leaf in stream), "model/a/value", "step:uint32"]
    for state, expected in (
        (["opt/a/value"], ["a"]),  # nothing is outside of variables
        (["opt/a/value", "opt/b"], ["a/value", "b"]),  # as in the model
        (["opt/kernel/value", "opt/b"], ["kernel", "b"]),
    ):
        layout = detect(made(*model, *state))
        assert layout.kind == "nnx-model-and-optimizer"
        assert printed(layout.model) == ["rngs/key", "rngs/count", "a/value"]
        assert printed(layout.optimizer) == expected


def test_a_module_called_params():
    ckpt = made("params/params/w", "params/Dense_0/kernel", "step:int32")
    assert printed(detect(ckpt).model) == ["params/params/w", "params/Dense_0/kernel"]


# What can be read in several ways, or in none

EITHER = """\
the tree can be read as linen-params or as nnx-pure-dict
  linen-params: nothing against it
  nnx-pure-dict: nothing against it

hint: layout="linen-params"
hint: layout="nnx-pure-dict\""""
NEITHER = """\
there is the state of an optimizer, but neither `params` nor `model`
  at the top there is `net`, `optimizer`

hint: reshard.rename(ckpt, [("^net/", "model/")])"""


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        (
            ("value/kernel",),
            EITHER,
        ),
        (
            ("params", "cache"),
            EITHER,
        ),
        (
            ("encoder/kernel", "decoder/kernel"),
            EITHER,
        ),
        (
            ("encoder/kernel/value", "encoder/bias/value"),
            """\
the tree can be read as linen-params or as nnx-state
  linen-params: nothing against it
  nnx-state: each array is in a `value` level, as NNX's variables are

hint: layout="linen-params"
hint: layout="nnx-state\"""",
        ),
        (
            ("layers/0/kernel", "layers/1/kernel"),
            """\
the tree can be read as linen-params or as nnx-pure-dict
  linen-params: nothing against it
  nnx-pure-dict: `layers` has positions as keys, as `nnx.List` does

hint: layout="linen-params"
hint: layout="nnx-pure-dict\"""",
        ),
        (
            ("Norm_0/mean", "Norm_0/var", "Norm_0/scale"),
            """\
the tree can be read as linen-params or as nnx-pure-dict
  linen-params: `Norm_0` has a name as Linen gives them
  nnx-pure-dict: `Norm_0` holds parameters and statistics together

hint: layout="linen-params"
hint: layout="nnx-pure-dict\"""",
        ),
        (
            ("a/value", "b"),
            """\
the tree can be read as linen-params or as nnx-state or as nnx-pure-dict
  linen-params: nothing against it
  nnx-state: nothing against it
  nnx-pure-dict: nothing against it

hint: layout="linen-params"
hint: layout="nnx-state"
hint: layout="nnx-pure-dict\"""",
        ),
        (
            ("params/0/value", "params/1/value"),
            """\
the tree can be read as linen-variables or as nnx-state
  linen-variables: collections are at the top: `params`
  nnx-state: `params` has positions as keys, as `nnx.List` does; each array is in a `value` \
level, as NNX's variables are

hint: layout="linen-variables"
hint: layout="nnx-state\"""",
        ),
        (
            ("params/a/mean", "params/a/var", "params/a/scale", "opt_state/#0/a", "step:int32"),
            """\
the tree can be read as linen-train-state or as nnx-pure-dict below `params`
  linen-train-state: `params` is beside `opt_state`, `step`; `opt_state` has list positions, as \
optax's tuples are saved
  nnx-pure-dict below `params`: `params/a` holds parameters and statistics together

hint: layout="linen-train-state"
hint: reshard.rename(reshard.select(ckpt, "params/**"), [("^params/", "")]) \
with layout="nnx-pure-dict\"""",
        ),
        (
            ("model/w",),
            """\
the tree can be read as nnx-model or as linen-params or as Linen's parameters below `model`
  nnx-model: nothing against it
  linen-params: nothing against it
  Linen's parameters below `model`: nothing against it

hint: layout="nnx-model"
hint: layout="linen-params"
hint: reshard.rename(ckpt, [("^model/", "params/")])""",
        ),
        (
            ("model/w", "opt_state/trace/w"),
            """\
the tree can be read as nnx-model-and-optimizer or as Linen's parameters below `model`
  nnx-model-and-optimizer: `model` is beside `opt_state`
  Linen's parameters below `model`: nothing against it

hint: layout="nnx-model-and-optimizer"
hint: reshard.rename(ckpt, [("^model/", "params/")])""",
        ),
        (
            ("model/layers/0/w/value", "lm_head/w/value"),
            """\
the tree can be read as nnx-state or as nnx-model
  nnx-state: `model/layers` has positions as keys, as `nnx.List` does; each array is in a \
`value` level, as NNX's variables are
  nnx-model: `model` is at the top

hint: layout="nnx-state"
hint: layout="nnx-model\"""",
        ),
        (
            ("model/w", "lm_head/w"),
            """\
the tree can be read as linen-params or as nnx-pure-dict or as nnx-model
  linen-params: nothing against it
  nnx-pure-dict: nothing against it
  nnx-model: `model` is at the top

hint: layout="linen-params"
hint: layout="nnx-pure-dict"
hint: layout="nnx-model\"""",
        ),
        (
            ("opt_state/#0/w", "step:int32"),
            """\
the tree can be read as a Linen train state without `params` or as nnx-optimizer
  a Linen train state without `params`: `opt_state` has list positions, as optax's tuples are \
saved
  nnx-optimizer: nothing against it

hint: layout="nnx-optimizer\"""",
        ),
        (
            ("model/w", "opt_state/#0/w", "step:int32"),
            """\
no layout has Linen's parameters below `model`
  `opt_state` has list positions, as optax's tuples are saved

hint: reshard.rename(ckpt, [("^model/", "params/")])""",
        ),
        (
            ("model/params/w", "model/batch_stats/n"),
            """\
no layout has Linen's variables below `model`
  `model/params` is a collection

hint: reshard.rename(ckpt, [("^model/", "")])""",
        ),
        (
            ("net.1/w", "opt_state/#0/w", "step:int32"),
            """\
there is the state of an optimizer, but neither `params` nor `model`
  at the top there is `net.1`, `opt_state`, `step`

hint: reshard.rename(ckpt, [(r"^net\\.1/", "params/")])""",
        ),
        (
            ("net/w/value", "optimizer/opt_state/0/w/value", "optimizer/step/value:uint32"),
            NEITHER,
        ),
        (
            ("_pytree__state:None", "net/w/value", "optimizer/step/value:uint32"),
            NEITHER,
        ),
        (
            ("opt/#0/w", "w"),
            """\
there is the state of an optimizer, but neither `params` nor `model`
  at the top there is `opt`, `w`""",
        ),
        (
            ("optimizer/opt_state/0/w/value", "optimizer/step/value:uint32"),
            """\
what looks like a state is not at the top of the tree
  there is `optimizer/opt_state`

hint: reshard.rename(reshard.select(ckpt, "optimizer/**"), [("^optimizer/", "")])""",
        ),
        (
            ("actor/params/w", "actor/opt_state/#0/w", "critic/params/Dense_0/w", "note:text"),
            """\
what looks like a state is not at the top of the tree
  there is `actor/opt_state`, `actor/params`
  there is `critic/params`

hint: reshard.rename(reshard.select(ckpt, "actor/**"), [("^actor/", "")])
hint: reshard.rename(reshard.select(ckpt, "critic/**"), [("^critic/", "")])""",
        ),
        (
            ("params/params/w", "params/batch_stats/n", "batch_stats/n"),
            """\
a collection is saved in two places
  `batch_stats`: `params/batch_stats`, `batch_stats`

hint: drop=["params/batch_stats/**"]
hint: drop=["batch_stats/**"]""",
        ),
        (
            ("note:text", "none:None"),
            "the tree has no array below a key, so nothing of a model",
        ),
    ],
)
def test_what_is_not_decided(leaves, text):
    assert refused(made(*leaves)) == text


def test_a_tree_that_is_one_array():
    ckpt = Checkpoint({(): handle(())}, SOURCE)
    assert refused(ckpt) == "the tree has no array below a key, so nothing of a model"


# What the conversion is to says what it is converted from


@pytest.mark.parametrize(
    ("leaves", "api", "kind", "why"),
    [
        (("encoder/kernel", "decoder/kernel"), "linen", "linen-params", ()),
        (("encoder/kernel", "decoder/kernel"), "nnx", "nnx-pure-dict", ()),
        (("encoder/kernel/value", "encoder/bias/value"), "linen", "linen-params", ()),
        (
            ("encoder/kernel/value", "encoder/bias/value"),
            "nnx",
            "nnx-state",
            ("each array is in a `value` level, as NNX's variables are",),
        ),
        (("model/w",), "nnx", "nnx-model", ()),
        (
            ("model/w", "opt_state/trace/w"),
            "nnx",
            "nnx-model-and-optimizer",
            ("`model` is beside `opt_state`",),
        ),
    ],
)
def test_the_direction_decides_what_nothing_else_does(leaves, api, kind, why):
    found = detect(made(*leaves), api=api)
    names = {"linen": "Linen", "nnx": "NNX"}
    told = f"the conversion is from {names[api]}, and nothing speaks against it"
    assert (found.kind, found.api, found.why) == (kind, api, (*why, told))


@pytest.mark.parametrize(
    ("leaves", "api", "text"),
    [
        (  # evidence for both
            ("Norm_0/mean", "Norm_0/var", "Norm_0/scale"),
            "linen",
            """\
the tree can be read as linen-params or as nnx-pure-dict
  linen-params: `Norm_0` has a name as Linen gives them
  nnx-pure-dict: `Norm_0` holds parameters and statistics together

hint: layout="linen-params\"""",
        ),
        (
            ("Norm_0/mean", "Norm_0/var", "Norm_0/scale"),
            "nnx",
            """\
the tree can be read as linen-params or as nnx-pure-dict
  linen-params: `Norm_0` has a name as Linen gives them
  nnx-pure-dict: `Norm_0` holds parameters and statistics together

hint: layout="nnx-pure-dict\"""",
        ),
        (  # two things that one API saves
            ("a/value", "b"),
            "nnx",
            """\
the tree can be read as nnx-state or as nnx-pure-dict
  nnx-state: nothing against it
  nnx-pure-dict: nothing against it

hint: layout="nnx-state"
hint: layout="nnx-pure-dict\"""",
        ),
        (
            ("model/w",),
            "linen",
            """\
the tree can be read as linen-params or as Linen's parameters below `model`
  linen-params: nothing against it
  Linen's parameters below `model`: nothing against it

hint: layout="linen-params"
hint: reshard.rename(ckpt, [("^model/", "params/")])""",
        ),
        (
            ("model/w", "opt_state/trace/w"),
            "linen",
            """\
the tree can be read as nnx-model-and-optimizer or as Linen's parameters below `model`
  nnx-model-and-optimizer: `model` is beside `opt_state`
  Linen's parameters below `model`: nothing against it

hint: reshard.rename(ckpt, [("^model/", "params/")])""",
        ),
    ],
)
def test_what_the_direction_leaves_open(leaves, api, text):
    with pytest.raises(TreeMismatchError) as error:
        detect(made(*leaves), api=api)
    assert str(error.value) == text


def test_the_direction_does_not_outweigh_evidence():
    """What is NNX's for certain is told as that: it is not converted to NNX."""
    for leaves in (("dropout/rngs/key:uint32", "dropout/rngs/count:uint32", "a/kernel"),):
        assert detect(made(*leaves), api="linen").api == "nnx"
    assert detect(made("Dense_0/kernel"), api="nnx").api == "linen"


# What it is said to be


def test_what_is_asked_for_is_taken_where_several_readings_remain(tmp_path):
    plain_model = state_of(Plain(nnx.Rngs(0)))
    names = printed(plain(nnx.to_pure_dict(plain_model)))
    ckpt = save(tmp_path, plain_model)
    for kind, beginning in (("linen-params", "params/"), ("nnx-state", "")):
        layout = detect(ckpt, kind)
        assert (layout.kind, printed(layout.model)) == (kind, [beginning + n for n in names])
        assert layout.why == (f"`{kind}` was asked for",)


def test_what_is_asked_for_is_taken_for_a_model_in_a_train_state():
    ckpt = made("params/a/mean", "params/a/var", "params/a/scale", "opt_state/#0/a", "step:int32")
    layout = detect(ckpt, "linen-train-state")
    assert printed(layout.model) == ["params/a/mean", "params/a/var", "params/a/scale"]
    assert (printed(layout.optimizer), layout.step) == (["0/a"], ("step",))
    part = reshard.rename(reshard.select(ckpt, "params/**"), [("^params/", "")])
    layout = detect(part, "nnx-pure-dict")
    assert printed(layout.model) == ["a/mean", "a/var", "a/scale"]


def test_an_unknown_kind():
    with pytest.raises(reshard.ArgumentError) as error:
        detect(made("w"), "flax")
    text = str(error.value)
    assert text.splitlines()[0] == "there is no layout `flax`; there are"
    assert [line.partition(":")[0].strip() for line in text.splitlines()[1:]] == list(KINDS)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "linen-variables",
            """\
the tree cannot be linen-variables
  `a/b` is a module of NNX that was saved itself
  `opt_state` is at the top""",
        ),
        (
            "linen-params",
            """\
the tree cannot be linen-params
  `a/b` is a module of NNX that was saved itself
  `params` is a collection at the top
  `opt_state` is at the top""",
        ),
        (
            "linen-train-state",
            """\
the tree cannot be linen-train-state
  `a/b` is a module of NNX that was saved itself""",
        ),
        (
            "maxtext",
            """\
the tree cannot be maxtext
  `a/b` is a module of NNX that was saved itself
  there is no `nnx_aux/model`""",
        ),
        (
            "nnx-pure-dict",
            """\
the tree cannot be nnx-pure-dict
  `params/kernel/value` is in a `value` level""",
        ),
        (
            "nnx-optimizer",
            """\
the tree cannot be nnx-optimizer
  there is more at the top: `params`, `a`""",
        ),
        (
            "nnx-model",
            """\
the tree cannot be nnx-model
  there is no `model` at the top""",
        ),
    ],
)
def test_what_it_cannot_be(kind, text):
    ckpt = made("params/kernel/value", "opt_state/#0/w", "a/b/_pytree__state:None")
    assert refused(ckpt, kind) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("linen-variables", "no collection is at the top"),
        ("linen-train-state", "there is no `params` at the top"),
        ("maxtext", "there is no `params` at the top\n  there is no `nnx_aux/model`"),
        ("nnx-state", "no array is in a `value` level"),
        (
            "nnx-model-and-optimizer",
            "there is no `model` at the top\n  there is no `opt_state` or `step`",
        ),
    ],
)
def test_what_an_array_cannot_be(kind, text):
    assert refused(made("w"), kind) == f"the tree cannot be {kind}\n  {text}"


def test_a_model_of_which_it_is_not_known_whether_it_is_in_variables():
    ckpt = made("model/w/value", "model/b", "opt_state/0/w/value", "step:uint32")
    assert (
        refused(ckpt)
        == """\
the tree can be read as nnx-state below `model` or as nnx-pure-dict below `model`
  nnx-state below `model`: nothing against it
  nnx-pure-dict below `model`: nothing against it

hint: reshard.rename(reshard.select(ckpt, "model/**"), [("^model/", "")]) with layout="nnx-state"
hint: reshard.rename(reshard.select(ckpt, "model/**"), [("^model/", "")]) \
with layout="nnx-pure-dict\""""
    )


def test_leaves_that_would_have_one_path():
    ckpt = made("a/value/value/x", "a/value/x/value", "b/kernel/value")
    assert (
        refused(ckpt, "nnx-state")
        == """\
several leaves would have one path
  a/value/x: `a/value/value/x`, `a/value/x/value`"""
    )


@pytest.mark.parametrize(
    ("one", "other"), [("a/0/w", "a/#0/w"), ("a/0", "a/#0/w"), ("a/#0/b/w", "a/0/b"), ("#0/w", "0")]
)
def test_positions_and_keys_of_the_same_name(one, other):
    there = other.replace("#", "")
    text = f"a list position and a key of the same name are in one place\n  `{there}`"
    assert refused(made(one, other)) == text


# Any tree

KEYS = st.sampled_from(
    [
        *("params", "model", "opt_state", "step", "optimizer", "batch_stats", "nnx_aux"),
        *("value", "kernel", "Dense_0", "a", "a/b", "if", "count", "key", "0", "1", 0, 1),
        "_pytree__state",
    ]
)
DTYPES = st.sampled_from(["float32", "uint32", "int32", None, {}, "text"])
TREES = st.recursive(
    DTYPES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=4), max_leaves=12
)


def leaves_of(tree, path=()):
    if isinstance(tree, dict) and tree:
        return {p: v for key in tree for p, v in leaves_of(tree[key], (*path, key)).items()}
    known = isinstance(tree, str) and tree != "text"
    return {path: handle(path, tree) if known else tree}


@settings(deadline=None, max_examples=examples(600))
@given(TREES, st.sampled_from([None, *KINDS]))
def test_every_leaf_is_somewhere_once_or_the_tree_is_refused(tree, kind):
    ckpt = Checkpoint(leaves_of(tree), SOURCE)
    try:
        layout = detect(ckpt, kind)
    except TreeMismatchError as error:
        assert error.summary
        return
    assert layout.kind in KINDS
    assert layout.kind == (kind or layout.kind)
    places = [*layout.model.values(), *layout.optimizer.values(), *layout.rest]
    places += [] if layout.step is None else [layout.step]
    assert sorted(places, key=repr) == sorted(ckpt, key=repr)
    assert all(isinstance(ckpt[path], ArrayHandle) for path in layout.model.values())
    for path, saved in layout.model.items():
        start = max((s for s in layout.roots if path[: len(s)] == s), key=len)
        root, inner = layout.roots[start], path[len(start) :]
        text = tuple(map(str, saved))
        below = text[len(root) :]
        assert text[: len(root)] == root
        removed = [i for i in range(len(below)) if below[:i] + below[i + 1 :] == inner]
        assert below == inner or "value" in {below[i] for i in removed}


NAMES = st.sampled_from(["a", "b", "value", "kernel", "layers", "0", "1"])
MODELS = st.dictionaries(
    NAMES,
    st.recursive(
        st.just(None), lambda inner: st.dictionaries(NAMES, inner, min_size=1), max_leaves=8
    ),
    min_size=1,
)


@settings(deadline=None, max_examples=examples(120))
@given(MODELS)
def test_a_state_is_its_pure_dict_less_the_variables(tree):
    names = list(leaves_of(tree))
    state = Checkpoint({(*p, "value"): handle((*p, "value")) for p in names}, SOURCE)
    both = {("model", *path): leaf for path, leaf in state.items()}
    both |= {("opt_state", "0", "mu", *path): leaf for path, leaf in state.items()}
    assert detect(state, "nnx-state").model == {path: (*path, "value") for path in names}
    layout = detect(Checkpoint(both, SOURCE), "nnx-model-and-optimizer")
    assert list(layout.model) == names
    assert list(layout.optimizer) == [("0", "mu", *path) for path in names]


MODULES = st.sampled_from(["a", "b", "Dense_0", "value", "attention"])
PARAMETERS = st.sampled_from(["kernel", "bias", "w", "table"])
PARAMS = st.dictionaries(
    MODULES,
    st.recursive(
        st.dictionaries(PARAMETERS, st.booleans(), min_size=1),
        lambda inner: st.dictionaries(MODULES, inner, min_size=1),
        max_leaves=6,
    ),
    min_size=1,
)


@settings(deadline=None, max_examples=examples(120))
@given(PARAMS)
def test_boxes_are_told_from_modules_where_a_layer_has_one(tree):
    """Some parameters are in boxes, among them one whose name is that of a layer's."""
    boxed = leaves_of(tree)
    boxed |= {("layer", "kernel"): True, ("layer", "bias"): False}
    saved = {path: (*path, "value") if held is True else path for path, held in boxed.items()}
    state = {("params", *path): handle(path) for path in saved.values()}
    state |= {("opt_state", 0, "mu", *path): handle(path) for path in saved.values()}
    layout = detect(Checkpoint(state, SOURCE), "linen-train-state")
    assert layout.model == {("params", *p): ("params", *path) for p, path in saved.items()}
    moments = {("0", "mu", *p): ("opt_state", 0, "mu", *path) for p, path in saved.items()}
    assert layout.optimizer == moments


@pytest.mark.exhaustive
def test_a_hundred_thousand_leaves():
    names = [
        ("stack", f"layers_{i // 8}", f"Dense_{i % 8}", name, "value")
        for i in range(16_700)
        for name in ("kernel", "bias")
    ]
    places = [("params", *path) for path in names]
    places += [("opt_state", 0, moment, *path) for moment in ("mu", "nu") for path in names]
    layout = detect(Checkpoint({path: handle(path) for path in places}, SOURCE))
    assert list(layout.model.values()) == places[: len(names)]
    assert list(layout.optimizer.values()) == places[len(names) :]
    assert layout.kind == "linen-train-state"
