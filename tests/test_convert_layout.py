"""What a saved tree is: real saves of what people save, with the stored values as the oracle; trees
that can be read in two ways; and made-up trees, of which every leaf has to be somewhere."""

import dataclasses
import functools
import pathlib
import re
from typing import Any

import converted
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from converted import Compact
from flax import linen as nn
from flax import nnx, serialization
from flax.core import freeze
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import OPTIMIZERS, RESHAPING
from sampling import examples, some
from twins import linear, made

import reshard
from reshard import TreeMismatchError
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.checkpoint import Checkpoint, Source
from reshard.convert.layout import KINDS, Layout, detect

X = jnp.ones((2, 4))


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


# A model of which all names are the user's, and one with keys that hold slashes.
CUSTOM = Compact(lambda x: nn.Dense(2, name="decoder")(nn.Dense(3, name="encoder")(x)))
WEIGHT_NORMED = Compact(lambda x: nn.WeightNorm(nn.Dense(3))(x))


class Temperature(nn.Module):
    """A parameter that is really called `value`."""

    boxed: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        init = nn.with_partitioning(init, (None,)) if self.boxed else init
        return x * self.param("value", init, (1,))


def scaled(boxed, name, inner=False):
    """A model with that parameter in a module: without a name, or with one; among boxes."""
    init = nn.initializers.lecun_normal()
    init = nn.with_partitioning(init, ("a", "b")) if boxed else init
    return Compact(lambda x: Temperature(inner, name=name)(nn.Dense(3, kernel_init=init)(x)))


class Count(nnx.Variable):
    """A variable of the user's own type."""


def batch_norm():
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


encoder, decoder = functools.partial(linear, 4, 3), functools.partial(linear, 3, 2)
# No more than variables and statistics; nothing that tells it from one of Linen's; and every kind
# of attribute.
Small = made(linear=encoder, norm=batch_norm)
Plain = made(encoder=encoder, decoder=decoder)
Model = made(
    linear=lambda: linear(4, 3, use_bias=False),
    norm=batch_norm,
    layers=lambda: nnx.List([linear(3, 3) for _ in range(2)]),
    seq=lambda: nnx.Sequential(linear(3, 3), jax.nn.relu, decoder()),
    value=lambda: linear(2, 2),
    drop=lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    count=lambda: Count(jnp.zeros((), jnp.int32)),
    by=lambda: nnx.Dict(a=nnx.Param(jnp.ones(2)), value=nnx.Param(jnp.ones(3))),
    buffer=lambda: nnx.data(jnp.arange(3)),
    pair=lambda: nnx.Param({"x": jnp.ones(2), "y": [jnp.ones(1)]}),
)
OPTIMIZERS = {**OPTIMIZERS, **RESHAPING, "plain sgd": optax.sgd(1e-3)}
VALUES = {
    "value": scaled(False, None),
    "value beside boxes": scaled(True, None),
    "value, named": scaled(False, "scaling"),
    "value in a box": scaled(True, None, True),
    "value, named, in a box": scaled(True, "scaling", True),
}

randomized = converted.filled


def init(module, *args):
    return randomized(jax.eval_shape(module.init, jax.random.key(0), *(args or (X,))))


def state_of(make):
    """The state of a module that a function makes."""
    return randomized(nnx.eval_shape(lambda: nnx.state(make())))


def filled(module):
    """The module with other values."""
    nnx.update(module, randomized(nnx.state(module)))
    return module


def train(params, tx=OPTIMIZERS["adam"], cls=train_state.TrainState, **fields):
    make = functools.partial(cls.create, apply_fn=None, tx=tx)
    state = jax.eval_shape(lambda params, fields: make(params=params, **fields), params, fields)
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
    """What is saved, of what kind it is, and by path what the model and the optimizer's state hold;
    the step counter, the saved paths of the rest, and the root of the optimizer's state."""

    tree: Any
    kind: str
    model: dict
    optimizer: dict = dataclasses.field(default_factory=dict)
    step: Any = None
    rest: tuple = ()
    root: tuple | None = None


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


def of_variables(tree, more=None):
    """A case of collections, with more beside them."""
    rest = tuple(layouts.saved_leaves(more)) if more else ()
    return Case({**tree, **(more or {})}, "linen-variables", plain(tree), rest=rest)


def of_params(params):
    return Case(params, "linen-params", plain({"params": params}))


def trained(state, model=None, tree=None, rest=(), kind="linen-train-state"):
    """A case of a train state, whose model is its parameters, unless another is given."""
    model = plain({"params": state.params} if model is None else model)
    optimizer, root = plain(state.opt_state), ("opt_state",)
    return Case(tree or state, kind, model, optimizer, state.step, rest, root)


def linen_cases():
    variables = init(Net())
    boxed, logical = init(Net(nn.with_partitioning)), init(Net(nn.with_logical_partitioning))
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    yield "variables", of_variables(variables)
    yield "frozen", dataclasses.replace(of_variables(variables), tree=freeze(variables))
    yield "partitioned", of_variables(boxed)
    yield "logical", of_variables(logical)
    yield "params", of_variables({"params": params})
    yield "statistics", of_variables(stats)
    attention = nn.MultiHeadDotProductAttention(2, decode=True)
    yield "cache", of_variables(init(attention, jnp.ones((1, 3, 4)), jnp.ones((1, 3, 4))))
    more = {"ema": params, "epoch": 3, "name": "run", "key": jnp.ones(2)}
    more |= {"rngs": {"dropout": jax.random.key(3)}, "history": [jnp.ones(2)]}
    yield "more", of_variables(variables, more)
    yield "bare", of_params(params)
    yield "bare boxed", of_params(boxed["params"])
    carry = nn.LSTMCell(3).initialize_carry(jax.random.key(0), (2, 4))
    yield "keywords", of_params(init(nn.LSTMCell(3), carry, X)["params"])
    yield "slashes", of_params(init(WEIGHT_NORMED)["params"])
    for name, module in VALUES.items():
        yield name, trained(train(init(module)["params"]))
    case = of_variables(init(scaled(True, "scaling")))
    # The tree is that of a parameter `scaling` in a box, too: a map can say otherwise.
    case.model["params", "scaling"] = case.model.pop(("params", "scaling", "value"))
    yield "value, named, among boxes", case

    for name, tx in OPTIMIZERS.items():
        yield name, trained(train(params, tx))
    for name in some([*OPTIMIZERS]):
        yield f"boxed {name}", trained(train(boxed["params"], OPTIMIZERS[name]))
    custom = train(init(CUSTOM)["params"])
    case = trained(custom)
    yield "custom names", case
    tree = serialization.to_state_dict(custom)
    yield ("state dict", dataclasses.replace(case, tree=tree, optimizer=plain(tree["opt_state"])))
    tree = {"params": custom.params, "opt": custom.opt_state, "step": jnp.uint32(8)}
    yield "a dict", dataclasses.replace(case, tree=tree, step=tree["step"], root=("opt",))
    for name, empty in {"no state": None, "empty state": {}}.items():
        yield name, trained(custom.replace(opt_state=empty, step=jnp.int32(5)))
    tree = {"params": custom.params, "step": 4}
    yield "a step", dataclasses.replace(case, tree=tree, step=4, optimizer={}, root=None)

    rest = {
        "ema_params": params,
        "dropout_key": jax.random.key(0),
        "dynamic_scale": {"fin_steps": jnp.ones((), jnp.int32), "scale": jnp.ones(())},
    }
    state = train(
        params, cls=BatchState, **stats, counts={"head": {"n": jnp.ones(2)}}, note=None, **rest
    )
    model = {name: getattr(state, name) for name in ("params", "batch_stats", "counts")}
    others = (*layouts.saved_leaves(rest), ("note",))
    yield "fields", trained(state, model, rest=others)
    state = train(params, cls=ModelState, model_state=stats)
    yield "model state", trained(state, {"params": state.params, **state.model_state})
    for name, tree in {"all variables": variables, "all boxed": boxed}.items():
        state = train(tree)
        yield name, trained(state, state.params)
    tree = {"params": variables}
    yield "only params", Case(tree, "linen-train-state", plain(variables))
    aux = nnx.to_pure_dict(nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.RngState))
    aux = {"decoder": {"dropout": aux}}
    state = train({"params": params})
    tree = {"params": state.params, "opt_state": state.opt_state, "step": state.step}
    tree["nnx_aux"] = {"model": aux}
    yield "maxtext", trained(state, {**state.params, "nnx_aux": aux}, tree, kind="maxtext")


def optimized(tree, kind, pure, model=None, at=(), rest=()):
    """A case of the state of an optimizer, whose pure dict is given, and perhaps of a model's."""
    model = {} if model is None else plain(model)
    held = "opt_state" in pure
    optimizer = plain(pure["opt_state"]) if held else {}
    root = (*at, "opt_state") if held else None
    return Case(tree, kind, model, optimizer, pure["step"], tuple(rest), root)


def nodes_of(*paths):
    """What the modules in these places have saved beside their attributes."""
    return [(*path, "_pytree__state") for path in paths]


def nnx_cases():
    for name, make in {
        "model": Model,
        "small": Small,
        "streams": lambda: nnx.Rngs(params=0, dropout=1),
        "attention": cached_attention,
        "spectral norm": lambda: nnx.SpectralNorm(encoder(), rngs=nnx.Rngs(0)),
        "weight norm": lambda: nnx.WeightNorm(encoder(), rngs=nnx.Rngs(0)),
        "stacked": lambda: stacked(nnx.Rngs(0).fork(split=2)),
        "from Linen": lambda: nnx.bridge.ToNNX(Net(), rngs=nnx.Rngs(0)).lazy_init(X),
    }.items():
        state = state_of(make)
        pure = nnx.to_pure_dict(state)
        yield f"nnx {name}", Case(state, "nnx-state", plain(pure))
        yield f"nnx pure {name}", Case(pure, "nnx-pure-dict", plain(pure))
    module = filled(Model())
    pure = nnx.to_pure_dict(nnx.state(module))
    nodes = [path for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    rest = {*nodes_of(*nodes), ("linear", "bias")}
    yield "nnx module", Case(module, "nnx-state", plain(pure), rest=tuple(rest))
    params = nnx.filter_state(nnx.state(module), nnx.Param)
    yield "nnx parameters", Case(params, "nnx-state", plain(nnx.to_pure_dict(params)))
    lstm = state_of(lambda: nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)))
    yield "nnx keywords", Case(lstm, "nnx-state", plain(nnx.to_pure_dict(lstm)))

    adam = OPTIMIZERS["adam"]

    def optimizer(module=Small, tx=adam, cls=nnx.Optimizer):
        return cls(module(), tx, wrt=nnx.Param)

    for name, tx in OPTIMIZERS.items():
        state = state_of(functools.partial(optimizer, tx=tx))
        pure = nnx.to_pure_dict(state)
        yield f"nnx {name}", optimized(state, "nnx-optimizer", pure)
        if name in some([*OPTIMIZERS]):
            yield f"nnx pure {name}", optimized(pure, "nnx-optimizer", pure)
    for name in ("adam", "MultiSteps", "plain sgd"):
        both = functools.partial(optimizer, tx=OPTIMIZERS[name], cls=nnx.ModelAndOptimizer)
        state = state_of(both)
        pure = nnx.to_pure_dict(state)
        kind, model = "nnx-model-and-optimizer", pure["model"]
        yield f"nnx both {name}", optimized(state, kind, pure, model)
        yield f"nnx pure both {name}", optimized(pure, kind, pure, model)

    model, state = state_of(Plain), state_of(lambda: optimizer(Plain))
    pure, pure_state = nnx.to_pure_dict(model), nnx.to_pure_dict(state)
    for name in ("optimizer", "opt"):
        for kind, one, other in (
            ("", model, state),
            ("pure ", pure, pure_state),
            ("half pure ", pure, state),
            ("other half pure ", model, pure_state),
        ):
            tree = {"model": one, name: other}
            yield f"nnx {kind}{name}", optimized(tree, "nnx-model", pure_state, pure, (name,))
    step = state_of(lambda: optimizer(Plain, OPTIMIZERS["plain sgd"]))
    more = {"epoch": 3, "ema": pure, "name": "run"}
    rest = layouts.saved_leaves(more)
    tree = {"model": model, "optimizer": step, **more}
    yield "nnx more", optimized(tree, "nnx-model", nnx.to_pure_dict(step), pure, rest=rest)

    # What was saved itself has all that a state leaves out.
    def pure_of(module):
        found = nnx.to_pure_dict(nnx.state(module))
        return found | {"opt_state": {**found["opt_state"], 1: None}}

    alone = filled(optimizer())
    pure, nodes = pure_of(alone), nodes_of(())
    yield "nnx optimizer module", optimized(alone, "nnx-optimizer", pure, rest=nodes)
    kind, places = "nnx-model-and-optimizer", [("model",), ("model", "linear"), ("model", "norm")]
    both = filled(optimizer(cls=nnx.ModelAndOptimizer))
    pure, nodes = pure_of(both), nodes_of((), *places)
    yield "nnx both module", optimized(both, kind, pure, pure["model"], rest=nodes)
    small = filled(Small())
    state, pure = nnx.state(small), pure_of(alone)
    model = nnx.to_pure_dict(state)
    tree, nodes = {"model": small, "optimizer": alone}, nodes_of(*places, ("optimizer",))
    yield "nnx modules", optimized(tree, "nnx-model", pure, model, ("optimizer",), nodes)
    tree, rest = {"model": state, "epoch": 3}, (("epoch",),)
    yield "nnx model alone", Case(tree, "nnx-model", plain(model), rest=rest)
    tree = {"model": state, "opt_state": alone.opt_state}
    yield "nnx opt_state", dataclasses.replace(optimized(tree, kind, pure, model), step=None)
    moments = randomized(adam.init(nnx.state(small, nnx.Param)))
    tree = {"model": state, "opt_state": moments}
    held = {name: nnx.to_pure_dict(getattr(moments[0], name)) for name in ("mu", "nu")}
    pure = {"opt_state": {"0": {"count": moments[0].count, **held}, "1": None}, "step": None}
    yield "nnx state of optax", optimized(tree, kind, pure, model)


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
        optimizer_root=case.root,
    )
    step = None if found.step is None else stored(ckpt, found.step)[2]
    assert step == (None if case.step is None else np.asarray(case.step).tobytes())
    places = [*found.model.values(), *found.optimizer.values(), *found.rest]
    places += [] if found.step is None else [found.step]
    assert sorted(places, key=str) == sorted(ckpt, key=str)


@pytest.mark.sampled
def test_every_tree_is_told_for_what_it_is(opened, cases):
    """Or is said to be."""
    for name, case in cases.items():
        layout = detect(opened[name], api="nnx" if case.kind.startswith("nnx") else "linen")
        assert layout.why, name
        assert_is(opened[name], case, layout)
        said = detect(opened[name], case.kind)
        assert said.why[0] == f"`{case.kind}` was asked for"
        assert dataclasses.replace(said, why=layout.why) == layout
    assert {case.kind for case in cases.values()} == set(KINDS)


STORE: Any = None  # which nothing here reads
FACTS: dict[str, Any] = {"metadata": {}, "metadata_apart": True, "identity": None}
SOURCE = Source(pathlib.Path("run"), "item", store=STORE, **FACTS)
OTHERS = {"None": None, "{}": {}, "text": "text"}


def made_up(text):
    """A checkpoint of leaves `path` or `path:dtype`, where a key `#0` is a list position; a leaf
    `path:None`, `path:{}` or `path:text` is no array."""
    leaves: dict[Any, Any] = {}
    for leaf in re.split(r" (?!'u')", text):
        printed, _, dtype = leaf.partition(":")
        keys = printed.split("/")
        path = tuple(int(key[1:]) if key.startswith("#") else key for key in keys)
        leaves[path] = OTHERS[dtype] if dtype in OTHERS else handle(path, dtype or "float32")
    return Checkpoint(leaves, SOURCE)


def handle(path, dtype="float32"):
    dtype = jnp.dtype(dtype)
    return ArrayHandle(
        path, (), dtype, (), None, None, "jax.Array", None, dtype, StoredArray(STORE, "", b"")
    )


def refused(ckpt, layout=None, api=None):
    """The text of the error."""
    with pytest.raises(TreeMismatchError) as error:
        detect(ckpt, layout, api)
    return str(error.value)


def printed(places):
    """Paths, as they are printed."""
    return ["/".join(path) for path in places]


# The reasons

FROM_NNX = "the conversion is from NNX, and nothing contradicts it"
LISTS = "has list positions, as in saved optax tuples"
KEYS_ONLY = "has keys only for positions with a value, as in `nnx.Optimizer`"


REASONS = [  # the leaves, the kind, and the reasons
    (
        *("batch_stats/Norm_0/mean params/Norm_0/scale/value params/b lr:text", "linen-variables"),
        "collections are at the top: `params`, `batch_stats`",
        "`params/Norm_0` has a name that Linen generates",
    ),
    (  # a list position does not outweigh a name of Linen's
        *("encoder/layer/0/kernel encoder/LayerNorm_0/scale", "linen-params"),
        "`encoder/LayerNorm_0` has a name that Linen generates",
    ),
    (
        *("params/w opt/#0/mu/w opt/#1 step:int32 list/#0 note:text", "linen-train-state"),
        *("`params` is next to `opt`, `step`", f"`opt` {LISTS}"),
    ),
    (
        *("nnx_aux/model/rngs/key:uint32 nnx_aux/other params/params/w opt_state/#0/w", "maxtext"),
        *("`nnx_aux` is next to `params`, as MaxText saves NNX runs", f"`opt_state` {LISTS}"),
    ),
    (
        "opt_state/1/0/mu/w/value opt_state/1/0/mu/b/value:None step/value:uint32",
        *("nnx-optimizer", "the tree holds only `opt_state`, `step`", f"`opt_state` {KEYS_ONLY}"),
    ),
    (
        *("model/w optimizer/step:uint32 optimizer/opt_state/0/w optimizer/model/w", "nnx-model"),
        "`optimizer` holds the state and the steps of an optimizer, as `nnx.Optimizer` does",
        f"`optimizer/opt_state` {KEYS_ONLY}",
    ),
    (
        *("drop/rngs/key:uint32 drop/rngs/count:uint32 Dense_0/w", "nnx-pure-dict"),
        "`drop/rngs` is a stream of random numbers (`key`, `count`)",
    ),
    (
        *("a/_pytree__state:None _pytree__state:None a/w/value step:uint32", "nnx-state"),
        "the tree is a module that was saved directly (`_pytree__state`)",
    ),
    (
        *("model/_pytree__state:None model/w/value", "nnx-model"),
        "`model` is a module that was saved directly (`_pytree__state`)",
    ),
    ("step:uint32", "nnx-optimizer", "the tree holds only `step`"),
    ("params/0/value params/1/value", "linen-variables", "collections are at the top: `params`"),
]


@pytest.mark.parametrize("case", REASONS)
@pytest.mark.every_combination
def test_the_reasons_for_a_layout(case):
    leaves, kind, *why = case
    layout = detect(made_up(leaves))
    assert (layout.kind, list(layout.why)) == (kind, why)


# Levels named `value`


STREAMS = "model/rngs/key:uint32 model/rngs/count:uint32 model/a/value step:uint32"
BOXED = [  # the leaves, the kind, the model and the optimizer's state
    (  # what only NNX has in a train state is in no box
        *("params/params/a/w/value nnx_aux/model/rngs/count:uint32 step:int32", "maxtext"),
        *("params/a/w nnx_aux/rngs/count", ""),
    ),
    (  # what another collection has in it is a module
        *("params/a/value params/b/kernel/value stats/a/n params/value", "linen-variables"),
        *("params/a/value params/b/kernel params/value stats/a/n", ""),
    ),
    (
        *("params/a/value params/b/kernel/value stats/a/n/value", "linen-variables"),
        *("params/a/value params/b/kernel stats/a/n", ""),
    ),
    (  # a module of that name is no box
        "params/attention/value/kernel/value params/w opt_state/#0/a/value/w:None",
        *("linen-train-state", "params/attention/value/kernel params/w", "0/a/value/w"),
    ),
    (  # an optimizer follows its parameters
        "params/Scale_0/value params/w/kernel/value params/value step:int32 "
        "opt_state/#0/mu/Scale_0/value opt_state/#0/mu/w/kernel/value:None "
        "opt_state/#0/mu/value opt_state/#1/value",
        *("linen-train-state", "params/Scale_0/value params/w/kernel params/value"),
        "0/mu/Scale_0/value 0/mu/w/kernel 0/mu/value 1/value",
    ),
    (  # a module called `params`
        *("params/params/w params/Dense_0/kernel step:int32", "linen-train-state"),
        *("params/params/w params/Dense_0/kernel", ""),
    ),
    (  # pure dicts keep a parameter called `value`
        *("rngs/key:uint32 rngs/count:uint32 scaling/value", "nnx-pure-dict"),
        *("rngs/key rngs/count scaling/value", ""),
    ),
    # Nothing is outside of variables; as in the model.
    *(
        (f"{STREAMS} {state}", "nnx-model-and-optimizer", "rngs/key rngs/count a/value", held)
        for state, held in (
            ("opt/a/value", "a"),
            ("opt/a/value opt/b", "a/value b"),
            ("opt/kernel/value opt/b", "kernel b"),
        )
    ),
]


def summary(layout):
    """The kind, the model's paths and those of the optimizer's state."""
    return layout.kind, " ".join(printed(layout.model)), " ".join(printed(layout.optimizer))


@pytest.mark.parametrize(("leaves", "kind", "model", "optimizer"), BOXED)
def test_levels_that_are_boxes(leaves, kind, model, optimizer):
    assert summary(detect(made_up(leaves))) == (kind, model, optimizer)


# What can be read in several ways, or in none


def apart(part, layout=""):
    """How to read a part of the tree."""
    text = f'reshard.rename(reshard.select(ckpt, "{part}/**"), [("^{part}/", "")])'
    return text + (f' with layout="{layout}"' if layout else "")


AS_PARAMS = 'reshard.rename(ckpt, [("^model/", "params/")])'
BELOW_MODEL = "Linen's parameters below `model`"
NO_MODEL = "the checkpoint is not a model: it holds no array, or one array without a path"
NEITHER = "the tree holds optimizer state, but neither `params` nor `model`\n  at the top are"
BARE = "encoder/kernel decoder/kernel"
VALUES_ONLY = "encoder/kernel/value encoder/bias/value"
TRACE = "model/w opt_state/trace/w"
EITHER = ["linen-params", "nnx-pure-dict"]
STATES = ["nnx-state", "nnx-pure-dict"]
BOTH = [
    "Linen: `Norm_0` has a name that Linen generates",
    "NNX: `Norm_0` holds parameters and statistics together",
]
NAMED = "model/Dense_0/w model/w optimizer/step:uint32 optimizer/opt_state/0/w"
SEVERAL = [  # the leaves, the API that is converted from, the readings, their proofs, and hints
    *((leaves, None, EITHER, []) for leaves in ("value/kernel", "params cache", BARE)),
    *((leaves, None, ["linen-params", "nnx-state"], []) for leaves in (VALUES_ONLY, "l/0/w/value")),
    ("a/value b", None, ["linen-params", *STATES], []),
    ("a/value b", "nnx", STATES, []),
    (
        *("params/a/key:uint32 params/a/count:uint32", None, ["linen-variables", "nnx-pure-dict"]),
        [
            "Linen: collections are at the top: `params`",
            "NNX: `params/a` is a stream of random numbers (`key`, `count`)",
        ],
    ),
    (
        *("params/a/key:uint32 params/a/count:uint32 step:int32", None, ["linen-train-state"]),
        [
            "Linen: `params` is next to `step`",
            "NNX: `params/a` is a stream of random numbers (`key`, `count`)",
        ],
    ),
    *(
        ("Norm_0/mean Norm_0/var Norm_0/scale", api, EITHER, BOTH, *hints)
        for api, *hints in ((None,), ("linen", 'layout="linen-params"'))
    ),
    (  # proofs of both
        *(NAMED, "nnx", ["nnx-model", BELOW_MODEL]),
        [
            "Linen: `model/Dense_0` has a name that Linen generates",
            "NNX: `optimizer` holds the state and the steps of an optimizer, as `nnx.Optimizer` "
            "does",
            f"NNX: `optimizer/opt_state` {KEYS_ONLY}",
        ],
        'layout="nnx-model"',
    ),
    (
        *("model/w", None, ["nnx-model", "linen-params", BELOW_MODEL], []),
        *('layout="nnx-model"', 'layout="linen-params"', AS_PARAMS),
    ),
    ("model/w", "linen", ["linen-params", BELOW_MODEL], [], 'layout="linen-params"', AS_PARAMS),
    (
        *(TRACE, None, ["nnx-model-and-optimizer", BELOW_MODEL], []),
        *('layout="nnx-model-and-optimizer"', AS_PARAMS),
    ),
    (
        *("model/w/value model/b opt_state/0/w/value step:uint32", "nnx"),
        *(["nnx-state below `model`", "nnx-pure-dict below `model`"], []),
        *(apart("model", kind) for kind in STATES),
    ),
    ("model/w lm_head/w", None, [*EITHER, "nnx-model"], []),
    (
        *("opt_state/#0/w step:int32", None, ["nnx-optimizer"]),
        [f"Linen: `opt_state` {LISTS}", "NNX: the tree holds only `opt_state`, `step`"],
    ),
]


@pytest.mark.parametrize("case", SEVERAL)
def test_what_can_be_read_in_several_ways(case):
    """The hints, by default, are the layouts of the readings."""
    leaves, api, readings, proofs, *hints = case
    lines = [f"the tree can be read as {' or as '.join(readings)}", *(f"  {p}" for p in proofs), ""]
    hints = hints or [f'layout="{name}"' for name in readings]
    assert refused(made_up(leaves), api=api).splitlines() == [
        *lines,
        *(f"hint: {h}" for h in hints),
    ]


NET = f'{NEITHER} `net`, `optimizer`\n\nhint: reshard.rename(ckpt, [("^net/", "model/")])'
NOT_AT_THE_TOP = "the state is not at the top of the tree"


@pytest.mark.parametrize(
    ("leaves", "text"),
    [
        (
            "model/w opt_state/#0/w step:int32",
            f"no supported layout has {BELOW_MODEL}\n  `opt_state` {LISTS}\n\nhint: {AS_PARAMS}",
        ),
        (
            "model/params/w model/batch_stats/n",
            "no supported layout has Linen's variables below `model`\n"
            "  `model/params` is a collection\n\n"
            'hint: reshard.rename(ckpt, [("^model/", "")])',
        ),
        (
            "net.1/w opt_state/#0/w step:int32",
            f"{NEITHER} `net.1`, `opt_state`, `step`\n\n"
            r'hint: reshard.rename(ckpt, [(r"^net\.1/", "params/")])',
        ),
        ("net/w/value optimizer/opt_state/0/w/value optimizer/step/value:uint32", NET),
        ("_pytree__state:None net/w/value optimizer/step/value:uint32", NET),
        ("opt/#0/w w", f"{NEITHER} `opt`, `w`"),
        (
            "optimizer/opt_state/0/w/value optimizer/step/value:uint32",
            f"{NOT_AT_THE_TOP}\n  there is `optimizer/opt_state`\n\nhint: {apart('optimizer')}",
        ),
        (
            "actor/params/w actor/opt_state/#0/w critic/params/Dense_0/w note:text",
            f"{NOT_AT_THE_TOP}\n  there is `actor/opt_state`, `actor/params`, `critic/params`\n\n"
            f"hint: {apart('actor')}\nhint: {apart('critic')}",
        ),
        (
            "params/params/w params/batch_stats/n batch_stats/n",
            "without the levels of collections and values, several leaves have the same path\n"
            "  batch_stats: `params/batch_stats`, `batch_stats`",
        ),
        ("note:text none:None", NO_MODEL),
        (
            "params/kernel batch_stats/b/_pytree__state:None",
            "the tree does not have the layout linen-variables\n"
            "  `batch_stats/b` is an NNX module that was saved directly",
        ),
    ],
)
def test_what_can_be_read_in_no_way(leaves, text):
    assert refused(made_up(leaves)) == text


def test_a_tree_that_is_one_array():
    assert refused(Checkpoint({(): handle(())}, SOURCE)) == NO_MODEL


# What the conversion is to says what it is converted from


@pytest.mark.parametrize(
    ("leaves", "api", "kind"),
    [
        (BARE, "linen", "linen-params"),
        (BARE, "nnx", "nnx-pure-dict"),
        (VALUES_ONLY, "linen", "linen-params"),
        (VALUES_ONLY, "nnx", "nnx-state"),
        ("model/w", "nnx", "nnx-model"),
        (TRACE, "nnx", "nnx-model-and-optimizer"),
    ],
)
def test_the_direction_decides_what_nothing_else_does(leaves, api, kind):
    found = detect(made_up(leaves), api=api)
    why = FROM_NNX.replace("NNX", {"linen": "Linen", "nnx": "NNX"}[api])
    assert (found.kind, found.api, found.why) == (kind, api, (why,))


def test_the_direction_does_not_outweigh_evidence():
    """What is NNX's for certain is told as that: it is not converted to NNX."""
    stream = made_up("dropout/rngs/key:uint32 dropout/rngs/count:uint32 a/kernel")
    assert detect(stream, api="linen").api == "nnx"
    assert detect(made_up("Dense_0/kernel"), api="nnx").api == "linen"


# What it is said to be


@pytest.mark.parametrize(
    ("leaves", "kind", "model", "optimizer"),
    [
        ("a/kernel/value step:int32", "linen-params", "params/a/kernel params/step", ""),
        ("a/kernel/value opt/n step:int32", "nnx-state", "a/kernel opt/n step", ""),
        ("a/mean a/var a/scale step:uint32", "nnx-pure-dict", "a/mean a/var a/scale step", ""),
        ("params/a/mean step:int32", "linen-variables", "params/a/mean", ""),
        (
            *("params/a/mean params/a/scale opt_state/#0/a step:int32", "linen-train-state"),
            *("params/a/mean params/a/scale", "0/a"),
        ),
        (
            *("attention/value/kernel/value 0/value/a 0/value/b 1/value/value", "nnx-state"),
            *("attention/value/kernel 0/a 0/b 1/value", ""),
        ),
        (  # a moment is as the parameter is whose path it ends with
            "params/kernel/value params/m/kernel/value stats/m/kernel/n "
            "opt_state/#0/kernel/value opt_state/#0/m/kernel/value",
            *("linen-train-state", "params/kernel params/m/kernel/value stats/m/kernel/n"),
            "0/kernel 0/m/kernel/value",
        ),
    ],
)
def test_what_is_asked_for_is_taken_where_several_readings_remain(leaves, kind, model, optimizer):
    layout = detect(made_up(leaves), kind)
    assert summary(layout) == (kind, model, optimizer)
    assert layout.why[0] == f"`{kind}` was asked for"
    assert layout.step == (("step",) if optimizer and "step:" in leaves else None)


MODULE = "`a/b` is an NNX module that was saved directly"
MIXED = "params/kernel/value opt_state/#0/w a/b/_pytree__state:None"
NO_PARAMS, NO_MODEL_KEY = "there is no `params` at the top", "there is no `model` at the top"
NO_AUX = "there is no `nnx_aux/model`"
OPT_STATE = "`opt_state` is next to the parameters"


@pytest.mark.parametrize(
    "case",
    [
        (MIXED, "linen-variables", MODULE, "`opt_state` is next to the collections"),
        (MIXED, "linen-params", MODULE, "`params` is a collection at the top", OPT_STATE),
        (MIXED, "linen-train-state", MODULE),
        (MIXED, "maxtext", MODULE, NO_AUX),
        (MIXED, "nnx-pure-dict", "`params/kernel/value` is in a `value` level"),
        (MIXED, "nnx-optimizer", "there is more at the top: `params`, `a`"),
        (MIXED, "nnx-model", NO_MODEL_KEY),
        ("w", "linen-variables", "no collection is at the top"),
        ("w", "linen-train-state", NO_PARAMS),
        ("w", "maxtext", NO_PARAMS, NO_AUX),
        ("w", "nnx-state", "no array is in a `value` level"),
        ("w", "nnx-model-and-optimizer", NO_MODEL_KEY, "there is no `opt_state` or `step`"),
        ("params/a:text w", "linen-variables", "there is no array in `params`"),
        ("model/a:text w", "nnx-model", "there is no array in `model`"),
        (
            *("params/w batch_stats/b/_pytree__state:None", "linen-variables"),
            "`batch_stats/b` is an NNX module that was saved directly",
        ),
    ],
)
def test_what_it_cannot_be(case):
    leaves, kind, *problems = case
    text = "\n  ".join([f"the tree does not have the layout {kind}", *problems])
    assert refused(made_up(leaves), kind) == text


def test_leaves_that_would_have_one_path():
    ckpt = made_up("a/value/value/x a/value/x/value b/kernel/value")
    assert refused(ckpt, "nnx-state").endswith(
        "\n  a/value/x: `a/value/value/x`, `a/value/x/value`"
    )


@pytest.mark.parametrize("leaves", ["a/0/w a/#0/w", "a/0 a/#0/w", "a/#0/b/w a/0/b", "#0/w 0"])
def test_positions_and_keys_of_the_same_name(leaves):
    there = min(leaves.replace("#", "").split(), key=len)
    text = f"the checkpoint has a list element and a dict entry with the same path\n  `{there}`"
    assert refused(made_up(leaves)) == text


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
        text = tuple(map(str, saved))
        inner = path if layout.api == "nnx" or path == text else path[1:]  # without the collection
        kept = [text, *(text[:i] + text[i + 1 :] for i, key in enumerate(text) if key == "value")]
        assert any(keys[len(keys) - len(inner) :] == inner for keys in kept)


MODULES = st.sampled_from(["a", "b", "Dense_0", "value", "attention"])
PARAMETERS = st.dictionaries(
    st.sampled_from(["kernel", "bias", "w", "table"]), st.booleans(), min_size=1
)
INSIDE = st.recursive(PARAMETERS, lambda inner: st.dictionaries(MODULES, inner, min_size=1))


@settings(deadline=None, max_examples=examples(120))
@given(st.dictionaries(MODULES, INSIDE, min_size=1))
def test_boxes_are_told_from_modules_where_a_layer_has_one(tree):
    """Some parameters are in boxes, among them one whose name is that of a layer's."""
    boxed = leaves_of(tree)
    boxed |= {("layer", "kernel"): True, ("layer", "bias"): False}
    saved = {path: (*path, "value") if held is True else path for path, held in boxed.items()}
    roots = (("params",), ("opt_state", 0, "mu"))
    places = [(*root, *path) for root in roots for path in saved.values()]
    state = Checkpoint({path: handle(path) for path in places}, SOURCE)
    layout = detect(state, "linen-train-state")
    assert layout.model == {("params", *p): ("params", *path) for p, path in saved.items()}
    moments = {("0", "mu", *p): ("opt_state", 0, "mu", *path) for p, path in saved.items()}
    assert layout.optimizer == moments
