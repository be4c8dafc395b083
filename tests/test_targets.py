"""The target builder against Flax, for every kind of model, mesh and rules."""

import contextlib
import functools
import itertools
import warnings
from typing import Any

import flax
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
import twins
from flax import linen as nn
from flax import nnx
from flax.core.spmd import logical_axis_rules
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS, RESHAPING
from releases import OUT_SHARDING
from sampling import few

import reshard
from reshard.errors import ShardingError
from reshard.restore.pytrees import flatten_state

pytestmark = pytest.mark.usefixtures("quickly_compiled")
MESH = layouts.mesh((2, 4))
NAMES = ("data", "model")
KINDS = {
    "Auto": MESH,
    "Explicit": layouts.mesh((2, 4), explicit=True),
    "AbstractMesh": AbstractMesh((2, 4), NAMES),
    "Explicit AbstractMesh": AbstractMesh((2, 4), NAMES, axis_types=(AxisType.Explicit,) * 2),
}
X = jnp.ones((8, 16))
KEY = jax.random.key(0)
RULES = (("batch", "data"), ("hidden", "model"), ("embed", "data"), ("layers", None))


class DotReluDot(nn.Module):
    """The layer of the Linen sharding guides; `axes` says how its parameters are annotated."""

    depth: int
    axes: str

    def named(self, init, *names):
        if self.axes == "logical":
            return nn.with_logical_partitioning(init, names)
        axes = {"embed": "data", "hidden": "model"}
        if self.axes == "mesh":
            return nn.with_partitioning(init, tuple(axes[name] for name in names))
        return init

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.xavier_normal()
        y = nn.Dense(self.depth, kernel_init=self.named(init, "embed", "hidden"))(x)
        w2 = self.param("W2", self.named(init, "hidden", "embed"), (self.depth, x.shape[-1]))
        return nn.relu(y) @ w2, None


class MLP(nn.Module):
    axes: str = "mesh"
    scan: bool = False
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        if self.scan:
            x, _ = nn.scan(
                DotReluDot,
                length=self.layers,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: "layers" if self.axes == "logical" else None},
            )(24, self.axes)(x)
        else:
            for _ in range(self.layers):
                x, _ = DotReluDot(24, self.axes)(x)
        return nn.BatchNorm(use_running_average=True)(x)


def train_state(model, tx, key=KEY, x=X):
    variables = model.init(key, x)
    return twins.TrainState.create(apply_fn=None, tx=tx, **variables)


def raised(*args, error: type[Exception] = ShardingError, **kwargs):
    return layouts.refused(error, reshard.target, *args, **kwargs)


def param(shape, *axes):
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.ones(shape), **{OUT_SHARDING: axes})


def logical(shape, *axes):
    return nn.LogicallyPartitioned(jnp.ones(shape), axes)


def shardings(tree):
    """Printed path -> sharding, boxes left out of the path."""
    return {p: getattr(x, "sharding", x) for p, x in layouts.flat(nn.meta.unbox(tree)).items()}


def assert_abstract_as(got, expected):
    """The same containers, metadata of boxes and variables included, around the same shapes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    one, other = (
        [(type(leaf), leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
        for tree in (got, expected)
    )
    assert one == other


def flax_shardings(abstract, mesh, rules=None):
    """Flax's shardings of a Linen state; it also has some for empty boxes."""
    if rules is None:
        found = nn.get_sharding(abstract, mesh)
    else:
        found = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)
    found = layouts.flat(found)
    return {path: found[path] for path in layouts.flat(nn.meta.unbox(abstract))}


@pytest.mark.parametrize(("axes", "rules"), [("mesh", None), ("logical", RULES)])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_linen_train_state_is_sharded_as_by_flax(optimizer, scan, axes, rules):
    make = functools.partial(train_state, MLP(axes, scan), OPTIMIZERS[optimizer])
    abstract = jax.eval_shape(make)
    got = reshard.target(make, mesh=MESH, rules=rules)
    assert_abstract_as(got, abstract)
    assert shardings(got) == flax_shardings(abstract, MESH, rules)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *RESHAPING])
def test_annotations_regexes_and_a_tree_of_specs_are_equivalent(optimizer, scan):
    tx = {**OPTIMIZERS, **RESHAPING}[optimizer]
    layers = (None,) * scan
    regexes = [
        ("^params/.*/kernel$", P(*layers, "data", "model")),
        ("^params/.*/W2$", P(*layers, "model", "data")),
    ]
    boxed = functools.partial(train_state, MLP("mesh", scan), tx)
    logical = functools.partial(train_state, MLP("logical", scan), tx)
    bare = functools.partial(train_state, MLP("none", scan), tx)
    abstract = jax.eval_shape(bare)
    expected = shardings(reshard.target(boxed, mesh=MESH))
    params = [path for path, leaf in expected.items() if leaf.spec == P(*layers, "data", "model")]
    assert len(params) >= (1 if scan else 2)
    assert shardings(reshard.target(logical, mesh=MESH, rules=RULES)) == expected
    for model, specs in itertools.product((bare, abstract), (regexes, dict(regexes))):
        got = reshard.target(model, mesh=MESH, specs=specs)
        assert_abstract_as(got, abstract)
        assert shardings(got) == expected
    # In place of the boxes, and in the places of bare leaves.
    in_boxes = nn.get_partition_spec(jax.eval_shape(boxed).params)
    for model in (boxed, bare):
        got = reshard.target(model, mesh=MESH, specs={"params": in_boxes})
        assert shardings(got) == expected


@pytest.mark.parametrize("apart", [False, True])
def test_optimizer_state_of_two_copies_with_one_spec(apart):
    """Two copies have one optimizer state. If their specs differ, the caller must choose."""
    tx = optax.lookahead(optax.adam(1e-3), sync_period=5, slow_step_size=0.5)

    def make():
        params = optax.LookaheadParams.init_synced({"w": jnp.ones((8, 8))})
        return {"params": params, "opt_state": tx.init(params)}

    specs = [("^params/fast", P("data", "model")), ("^params/slow", P("data", "model"))]
    expected = P("data", "model")
    if apart:
        specs[1] = ("^params/slow", P("model", "data"))
        problems = reshard.coverage(make, mesh=MESH, specs=specs).problems
        assert [problem.split()[0].rstrip(":") for problem in problems] == [
            "opt_state/fast_state/0/mu/w",
            "opt_state/fast_state/0/nu/w",
        ]
        specs.append(("^opt_state/.*/w$", expected := P("data")))
    moments = reshard.target(make, mesh=MESH, specs=specs)["opt_state"].fast_state[0]
    found = jax.tree.leaves((moments.mu, moments.nu))
    assert {leaf.sharding.spec for leaf in found} == {expected}


def test_variables_of_a_custom_type_are_parameters_of_their_optimizer():
    class Weight(nnx.Variable):
        pass

    def make():
        model = nnx.Dict(w=Weight(jnp.ones((8, 8))))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=Weight)}

    got = reshard.target(make, mesh=MESH, specs=[("^model/w$", P("data", "model"))])
    moments = got["optimizer"].opt_state[0]
    variables = (got["model"].w, moments.mu["w"], moments.nu["w"])
    assert {variable.get_value().sharding.spec for variable in variables} == {P("data", "model")}


FORMS = {
    "a module": lambda model: (model, (X,)),
    "a module and abstract inputs": lambda model: (model, [jax.ShapeDtypeStruct((8, 16), "f4")]),
    "a callable": lambda model: (lambda: model.init(KEY, X), ()),
    "a callable with inputs": lambda model: (model.init, (KEY, X)),
    "a callable that takes the module": lambda model: (
        lambda key, x, m, name: getattr(m, name)(key, x),
        (KEY, np.ones((8, 16), "float32"), model, "init"),
    ),
    "an abstract tree": lambda model: (jax.eval_shape(model.init, KEY, X), ()),
    "variables": lambda model: (jax.jit(model.init)(KEY, X), ()),
    "frozen": lambda model: (lambda: flax.core.freeze(model.init(KEY, X)), ()),
    "frozen variables": lambda model: (flax.core.freeze(jax.jit(model.init)(KEY, X)), ()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("axes", ["mesh", "logical"])
def test_every_form_of_a_linen_model_is_the_same_state(form, scan, axes):
    model = MLP(axes, scan)
    rules = RULES if axes == "logical" else None
    abstract = jax.eval_shape(model.init, KEY, X)
    if "frozen" in form:
        abstract = flax.core.freeze(abstract)
    given_model, inputs = FORMS[form](model)
    before = jax.tree.leaves(given_model)
    got = reshard.target(given_model, mesh=MESH, rules=rules, inputs=inputs)
    assert_abstract_as(got, abstract)
    assert shardings(got) == flax_shardings(abstract, MESH, rules)
    assert list(map(id, jax.tree.leaves(given_model))) == list(map(id, before))


def test_leaves_other_than_arrays_are_unchanged():
    tree = {"step": 7, "rate": 0.5, "flag": True, "name": "text", "none": None}
    tree |= {"empty": optax.EmptyState(), "masked": optax.MaskedNode(), "scalar": np.float32(3)}
    tree |= {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(1), 8)}
    layers = [{1: jnp.ones((4, 4), "bfloat16")}, (), []]
    tree |= {"w": np.ones((8, 8), "float16"), "layers": layers}
    specs = [("^w$", "data,model"), ("^keys", "model"), ("^layers/0/1$", ",model")]
    got = reshard.target(tree, mesh=MESH, specs=specs)

    def on(leaf, *spec):
        return layouts.laid_out(leaf, NamedSharding(MESH, P(*spec)))

    expected = tree | {
        "w": on(tree["w"], "data", "model"),
        "scalar": on(tree["scalar"]),
        "key": on(tree["key"]),
        "keys": on(tree["keys"], "model"),
        "layers": [{1: on(tree["layers"][0][1], None, "model")}, (), []],
    }
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert jax.tree.leaves(got) == jax.tree.leaves(expected)
    assert type(got["flag"]) is bool


def test_specs_that_are_shorter_than_the_rank():
    """Flax's `DenseGeneral` annotates a flattened kernel, not the kernel of its own rank."""
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "heads"))
    model = nn.DenseGeneral((4, 6), kernel_init=init)
    abstract = jax.eval_shape(model.init, KEY, X)
    assert abstract["params"]["kernel"].names == ("embed", "heads")
    rules = [("embed", "data"), ("heads", "model")]
    got = reshard.target(model, mesh=MESH, rules=rules, inputs=(X,))
    assert_abstract_as(got, abstract)
    assert shardings(got) == flax_shardings(abstract, MESH, rules)
    assert got["params"]["kernel"].value.sharding.spec == P("data", "model")


def test_a_sharded_state_keeps_its_specs_on_another_mesh():
    spec = {"a": P("data", "model"), "b": P(("model", "data")), "c": P(), "d": P(None, "model")}
    tree = layouts.small_tree(layouts.mesh((2, 2)), spec, (8, 16))
    tree["here"] = jnp.ones((3,))
    for model in (tree, layouts.abstract(tree, layouts.mesh((4, 2)))):
        got = reshard.target(model, mesh=MESH)
        assert {name: leaf.sharding for name, leaf in got.items()} == {
            name: NamedSharding(MESH, spec) for name, spec in {**spec, "here": P()}.items()
        }
    assert raised({"d": tree["d"], "c": tree["c"]}, mesh=layouts.mesh((8,), ("x",))) == (
        "the model does not fit the mesh `x=8`\n"
        "  d  [8, 16]: P(None, 'model') names axis 'model', which `x=8` lacks"
    )


def test_a_custom_box_has_a_spec_or_none():
    @flax.struct.dataclass
    class Spec(layouts.Named):
        def get_partition_spec(self):
            return P(*self.names)

    tree = {
        "own": layouts.Named(jnp.ones((8, 8)), (None, "model")),
        "spec": Spec(jnp.ones((8, 8)), (None, "model")),
    }
    got = reshard.target(tree, mesh=MESH)
    assert got["own"].value.sharding == NamedSharding(MESH, P())
    assert got["spec"].value.sharding == NamedSharding(MESH, P(None, "model"))


# NNX models


class SGDState(nnx.Variable):
    """The momentum of the optimizer of the NNX sharding guides."""


class SGD(nnx.Object):
    """The optimizer of the NNX sharding guides."""

    def __init__(self, params, lr, decay=0.9):
        def momentum(variable):
            zeros = jax.tree.map(jnp.zeros_like, variable.get_value())
            return SGDState(zeros, **variable.get_metadata())

        def is_variable(value):
            return isinstance(value, nnx.Variable)

        self.lr = lr
        self.params = nnx.data(params)
        self.momentum = nnx.data(jax.tree.map(momentum, params, is_leaf=is_variable))
        self.decay = decay


def to_mesh_axes(*names):
    return tuple({"embed": "data", "hidden": "model"}.get(name) for name in names)


def logical_axes(*names):
    return names


class Net(nnx.Module):
    def __init__(self, rngs, axes=to_mesh_axes, key=OUT_SHARDING):
        def names(*logical):
            return {OUT_SHARDING: axes(*logical)}

        self.embed = nnx.Embed(16, 8, rngs=rngs, embedding_metadata=names("hidden", None))
        self.head = self.embed
        self.tied = self.embed.embedding
        kernel, bias = names("embed", "hidden"), names("hidden")
        linear = nnx.Linear(8, 24, kernel_metadata=kernel, bias_metadata=bias, rngs=rngs)
        self.blocks = nnx.List([linear, nnx.LayerNorm(24, rngs=rngs)])
        self.w = nnx.Param(jnp.ones((24, 8)), **{key: axes("hidden", "embed")})
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.table = nnx.Variable(jnp.zeros((3, 5)))
        self.stacked = stacked_linear(rngs, axes)
        self.rate = 0.5


def stacked_linear(rngs, axes):
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: axes("layers")[0]})
    def make(rngs):
        return nnx.Linear(8, 24, rngs=rngs, kernel_metadata={OUT_SHARDING: axes("embed", "hidden")})

    return make(rngs.fork(split=3))


NNX_STATES = {
    "module": lambda net, tx: net,
    "Optimizer": lambda net, tx: nnx.Optimizer(net, tx, wrt=nnx.Param),
    "ModelAndOptimizer": lambda net, tx: nnx.ModelAndOptimizer(net, tx),
    "model and optimizer": lambda net, tx: (net, nnx.Optimizer(net, tx, wrt=nnx.Param)),
    "in a dict": lambda net, tx: {"all": [net, nnx.Optimizer(net, tx, wrt=nnx.Param), None]},
    "own SGD": lambda net, tx: SGD(nnx.variables(net, nnx.Param), 0.1),
    "model and own SGD": lambda net, tx: (net, SGD(nnx.variables(net, nnx.Param), 0.1)),
}


def nnx_shardings(make, mesh, rules=()):
    """Flax's shardings of an NNX state; it also has some for empty variables."""
    with nnx.use_eager_sharding(False), logical_axis_rules(rules):
        state = nnx.state(nnx.eval_shape(make))
        found = layouts.flat(nnx.get_named_sharding(state, mesh))
        paths, _ = jax.tree_util.tree_flatten_with_path(state)
        return {path: found[path] for path in (jax.tree_util.keystr(keys) for keys, _ in paths)}


def variables_of(tree):
    leaves = jax.tree.leaves(nnx.state(tree), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]


def assert_specs(got, expected):
    found = layouts.flat(nnx.state(got))
    assert {path: leaf.sharding for path, leaf in found.items()} == expected


def assert_nnx_as(got, real):
    """The same graph around abstract leaves of the same shapes, metadata included."""
    one, other = nnx.split(got), nnx.split(real)
    assert one[0] == other[0]
    assert jax.tree.structure(one[1]) == jax.tree.structure(other[1])
    for leaf, value in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("axes", [to_mesh_axes, logical_axes])
@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        *((form, "adam") for form in NNX_STATES),
        *few(
            itertools.product(["model and optimizer"], [*OPTIMIZERS][1:]),
            ("model and optimizer", "inject_hyperparams"),
        ),
    ],
)
def test_an_nnx_state_is_get_named_sharding_and_the_real_model(form, optimizer, axes):
    def make():
        return NNX_STATES[form](Net(nnx.Rngs(0), axes), OPTIMIZERS[optimizer])

    rules = RULES if axes is logical_axes else ()
    got = reshard.target(make, mesh=MESH, rules=rules or None)
    assert_specs(got, nnx_shardings(make, MESH, rules))
    with jax.set_mesh(MESH), logical_axis_rules(rules):
        assert_nnx_as(got, make())


@pytest.mark.parametrize("optimizer", few(RESHAPING, "some adafactor", "lbfgs"))
def test_nnx_optimizers_that_flax_cannot_shard(optimizer):
    """The variables have more names than dimensions, which Flax cannot apply."""

    def make():
        net = Net(nnx.Rngs(0), logical_axes)
        return net, nnx.Optimizer(net, RESHAPING[optimizer], wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        got = reshard.target(make, mesh=MESH, rules=RULES)
        assert_nnx_as(got, make())
    net, moments = got
    assert_specs(net, nnx_shardings(lambda: make()[0], MESH, RULES))
    for leaf in flatten_state(moments).leaves:
        leaf.value.sharding.shard_shape(leaf.value.shape)


def test_a_class_a_constructor_and_arguments_are_the_same_module():
    expected = nnx_shardings(lambda: Net(nnx.Rngs(0)), MESH)
    rngs = nnx.Rngs(0)
    before = nnx.state(rngs)
    modules = [
        reshard.target(Net, mesh=MESH),
        reshard.target(lambda: Net(nnx.Rngs(0)), mesh=MESH),
        reshard.target(lambda: Net(rngs=nnx.Rngs(7)), mesh=MESH),
        reshard.target(Net, mesh=MESH, inputs=(rngs,)),
        reshard.target(Net, mesh=MESH, inputs=(rngs, to_mesh_axes, OUT_SHARDING)),
        reshard.target(lambda seed: Net(nnx.Rngs(seed)), mesh=MESH, inputs=(3,)),
        reshard.target(lambda key: Net(nnx.Rngs(key)), mesh=MESH, inputs=(jax.random.key(0),)),
    ]
    for module in modules:
        assert type(module) is Net
        assert_specs(module, expected)
    layouts.assert_same_tree(nnx.state(rngs), before)
    with jax.set_mesh(MESH):
        assert_nnx_as(modules[0], Net(nnx.Rngs(0)))


def test_a_class_that_needs_no_rngs_is_called_without_arguments():
    class Fixed(nnx.Module):
        def __init__(self, size=8, rngs=None):
            assert rngs is None
            self.w = param((size, size), None, "model")

    class Keyword(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(rngs.params.uniform((8, 8)), **{OUT_SHARDING: (None, "model")})

    for model in (Fixed, Keyword):
        got = reshard.target(model, mesh=MESH)
        assert got.w.get_value().sharding == NamedSharding(MESH, P(None, "model"))


def test_a_class_with_other_required_arguments_is_refused():
    class Sized(nnx.Module):
        def __init__(self, size, rngs):
            self.w = nnx.Param(jnp.ones((size, size)))

    assert raised(Sized, mesh=MESH, error=reshard.ArgumentError) == (
        "`Sized` cannot be called: missing a required argument: 'size'\n\n"
        "hint: use a function without arguments, which calls `Sized`"
    )
    arguments = {"mesh": MESH, "inputs": (jnp.ones(2),), "error": reshard.ArgumentError}
    text = "`<lambda>` cannot be called: missing a required argument: 'y'"
    assert raised(lambda x, y: x, **arguments).startswith(f"{text}\n")


def test_results_without_variables_are_refused():
    def module():
        return [nn.Dense(3)]

    def nothing():
        return None

    assert raised(module, mesh=MESH, error=reshard.ArgumentError) == (
        "`module` returned the Linen module Dense, which holds no variables\n\n"
        "hint: return the variables: `Dense(...).init(jax.random.key(0), x)`"
    )
    text = "`nothing` returned None, not a state"
    assert raised(nothing, mesh=MESH, error=reshard.ArgumentError) == text


@pytest.mark.parametrize("key", dict.fromkeys([OUT_SHARDING, "sharding_names", "sharding"]))
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_every_key_of_the_metadata_names_axes(key):
    got = reshard.target(lambda: Net(nnx.Rngs(0), key=key), mesh=MESH)
    assert_specs(got, nnx_shardings(lambda: Net(nnx.Rngs(0)), MESH))
    assert got.w.get_value().sharding == NamedSharding(MESH, P("model", "data"))


AXES = ("model", None)


@pytest.mark.parametrize(
    "axes", [AXES, [*AXES], P(*AXES), NamedSharding(MESH, P(*AXES)), (("model",), None)]
)
def test_axes_may_be_a_spec_or_a_sharding(axes):
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones((8, 8)), **{OUT_SHARDING: axes})
    got = reshard.target(nnx.State({"w": variable}), mesh=layouts.mesh((1, 8)))
    assert got["w"].get_value().sharding == NamedSharding(layouts.mesh((1, 8)), P("model", None))
    assert got["w"].get_metadata() == variable.get_metadata()
    assert variable.get_value().sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_real_modules_optimizers_and_states():
    with jax.set_mesh(layouts.mesh((4, 2))):
        net = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(net, OPTIMIZERS["adam"], wrt=nnx.Param)
    given_models = [net, optimizer, (net, optimizer), nnx.state(net), nnx.state((net, optimizer))]
    for model, given_model in [*((x, x) for x in given_models), (lambda: net, net)]:
        graph, state = nnx.split(given_model)
        leaves = jax.tree.leaves(state)
        metadata = [dict(v.get_metadata()) for v in variables_of(state)]
        expected = nnx.get_named_sharding(state, MESH)
        got = reshard.target(model, mesh=MESH)
        assert_nnx_as(got, given_model)
        assert_specs(got, layouts.flat(expected))
        # The user's own is as it was.
        after_graph, after = nnx.split(given_model)
        assert after_graph == graph
        assert all(a is b for a, b in zip(jax.tree.leaves(after), leaves, strict=True))
        assert [v.get_metadata() for v in variables_of(after)] == metadata
        mine = set(map(id, variables_of(given_model)))
        assert not mine & set(map(id, variables_of(got)))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_an_abstract_module_as_the_model(kind):
    with jax.set_mesh(KINDS[kind]), nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    mesh = layouts.mesh((1, 8))
    got = reshard.target(abstract, mesh=mesh)
    assert nnx.graphdef(got) == nnx.graphdef(abstract)
    expected = nnx_shardings(lambda: Net(nnx.Rngs(0)), mesh)
    for path, leaf in layouts.flat(nnx.state(got)).items():
        assert leaf.sharding.mesh == mesh
        assert leaf.sharding.is_equivalent_to(expected[path], leaf.ndim), path


@pytest.mark.parametrize(
    "tree", [nnx.get_partition_spec, lambda s: nnx.get_named_sharding(s, MESH)]
)
def test_the_specs_that_flax_gives_of_an_nnx_state_are_taken(tree):
    def bare():
        return Net(nnx.Rngs(0), lambda *names: (None,) * len(names))

    with nnx.use_eager_sharding(False):
        specs = tree(nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0)))))
    got = reshard.target(bare, mesh=MESH, specs=specs)
    assert_specs(got, nnx_shardings(lambda: Net(nnx.Rngs(0)), MESH))


def test_linen_in_nnx_and_nnx_in_linen():
    def in_nnx(axes):
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(MLP(axes), rngs=nnx.Rngs(0)), X)

    for axes, rules in (("mesh", ()), ("logical", RULES)):
        make = functools.partial(in_nnx, axes)
        got = reshard.target(make, mesh=MESH, rules=rules or None)
        assert_specs(got, nnx_shardings(make, MESH, rules))

    in_linen = nnx.bridge.to_linen(
        nnx.Linear, 16, 24, kernel_metadata={OUT_SHARDING: ("data", "model")}
    )
    with nnx.use_eager_sharding(False):
        expected = flax_shardings(jax.eval_shape(in_linen.init, KEY, X), MESH)
    got = reshard.target(in_linen, mesh=MESH, inputs=(X,))
    assert shardings(got) == expected


# Meshes and contexts


class Constrained(nn.Module):
    mesh: Any = None

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, ("data", "model"))
        y = nn.Dense(24, kernel_init=init)(x)
        spec = P("data", "model")
        where = spec if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(y, where)


def constrained_nnx():
    spec = P("data", "model")
    kernel = jax.lax.with_sharding_constraint(nnx.Rngs(0).params.uniform((8, 24)), spec)
    return nnx.Dict(w=nnx.Param(kernel, **{OUT_SHARDING: spec}), v=param((24,), "model"))


def nnx_pair(axes):
    net = Net(nnx.Rngs(0), axes)
    return net, nnx.Optimizer(net, OPTIMIZERS["adam"], wrt=nnx.Param)


MODELS = {
    "Linen, mesh axes": (functools.partial(train_state, MLP(), OPTIMIZERS["adam"]), None),
    "Linen, logical axes": (
        functools.partial(train_state, MLP("logical", scan=True), OPTIMIZERS["adam"]),
        RULES,
    ),
    "NNX, mesh axes": (functools.partial(nnx_pair, to_mesh_axes), None),
    "NNX, logical axes": (functools.partial(nnx_pair, logical_axes), RULES),
    "Linen, constrained": (lambda: Constrained().init(KEY, X), None),
    "Linen, constrained on a mesh": (lambda: Constrained(layouts.mesh((4, 2))).init(KEY, X), None),
    "NNX, constrained": (constrained_nnx, None),
}
CONTEXTS = {
    "nothing": contextlib.nullcontext,
    "set_mesh": lambda: jax.set_mesh(KINDS["Auto"]),
    "set_mesh, Explicit": lambda: jax.set_mesh(KINDS["Explicit"]),
    "set_mesh, other names": lambda: jax.set_mesh(layouts.mesh((8,), ("x",))),
    "with mesh": lambda: KINDS["Auto"],
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(KINDS["AbstractMesh"]),
    "rules": lambda: logical_axis_rules((("embed", "model"), ("hidden", None))),
}


def global_state():
    """Thread-local and global state of Flax and JAX."""
    return (
        nnx.using_eager_sharding(),
        jax.sharding.get_abstract_mesh(),
        flax.core.meta.get_global_mesh(),
        flax.core.spmd.get_logical_axis_rules(),
        dict(jax.config.values),
    )


def plain(tree):
    """A target in a form that compares equal in any context."""
    found = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Pytree))
    graph = None
    if any(isinstance(leaf, nnx.Pytree) for leaf in found):
        graph, tree = nnx.split(tree)
    leaves = [
        (leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type) for leaf in jax.tree.leaves(tree)
    ]
    assert leaves
    return graph, jax.tree.structure(tree), leaves


@functools.cache
def outside(model):
    make, rules = MODELS[model]
    report = reshard.coverage(make, mesh=MESH, rules=rules)
    assert (report.problems, report.hints) == ((), ())
    return plain(reshard.target(make, mesh=MESH, rules=rules)), report


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_result_does_not_depend_on_the_mesh_or_the_context(model, kind, context):
    make, rules = MODELS[model]
    mesh = KINDS[kind]
    (graph, treedef, leaves), expected = outside(model)
    moved = [
        (shape, dtype, NamedSharding(mesh, sharding.spec), weak)
        for shape, dtype, sharding, weak in leaves
    ]
    with CONTEXTS[context]():
        before = global_state()
        got = plain(reshard.target(make, mesh=mesh, rules=rules))
        report = reshard.coverage(make, mesh=mesh, rules=rules)
        assert global_state() == before
    assert got == (graph, treedef, moved)
    assert (report.leaves, repr(report)) == (expected.leaves, repr(expected))


@pytest.mark.parametrize("kind", ["Explicit", "Explicit AbstractMesh"])
@pytest.mark.parametrize("context", ["nothing", "set_mesh", "set_mesh, Explicit"])
def test_a_model_for_explicit_axes(kind, context):
    def resharded():
        spec = P("data", "model")
        kernel = jax.sharding.reshard(nnx.Rngs(0).params.uniform((8, 24)), spec)
        v = nnx.Param(jnp.einsum("ij->j", kernel, out_sharding=P("model")))
        return nnx.Dict(w=nnx.Param(kernel, **{OUT_SHARDING: spec}), v=v)

    with CONTEXTS[context]():
        got = reshard.target(resharded, mesh=KINDS[kind], specs={"^v$": P("model")})
    assert got.w.get_value().sharding == NamedSharding(KINDS[kind], P("data", "model"))
    assert got.v.get_value().sharding == NamedSharding(KINDS[kind], P("model"))


@pytest.mark.parametrize("eager", [True, False])
def test_eager_sharding_is_unchanged(eager):
    make = functools.partial(nnx_pair, to_mesh_axes)
    with nnx.use_eager_sharding(eager):
        got = reshard.target(make, mesh=MESH)
        assert nnx.using_eager_sharding() is eager
        with jax.set_mesh(MESH):
            assert_nnx_as(got, make())


@pytest.mark.parametrize(("kind", "most"), [("Auto", 2), ("Explicit", 3)])
def test_a_failing_model_runs_once_in_each_context_and_raises_its_first_error(kind, most):
    calls = []

    def fails():
        calls.append(jax.sharding.get_abstract_mesh())
        raise RuntimeError(f"failure {len(calls)}")

    before = global_state()
    with pytest.raises(RuntimeError, match="failure 1"):
        reshard.target(fails, mesh=KINDS[kind])
    assert global_state() == before
    assert len(calls) == most
    assert len({str(mesh) for mesh in calls}) == most
    # One that needs no mesh is run once in all.
    calls.clear()

    def make():
        calls.append(1)
        return Net(nnx.Rngs(0))

    reshard.target(make, mesh=KINDS[kind])
    assert calls == [1]


def test_nothing_is_computed_and_no_device_is_needed():
    mesh = AbstractMesh((64, 64), ("data", "model"))
    init = nn.with_partitioning(nn.initializers.normal(), ("data", "model"))
    model = nn.Dense(1 << 22, kernel_init=init)
    x = jax.ShapeDtypeStruct((1, 1 << 20), "bfloat16")
    before = len(jax.live_arrays())
    got = reshard.target(model, mesh=mesh, inputs=(x,))
    assert len(jax.live_arrays()) == before
    kernel = got["params"]["kernel"].value
    assert kernel.shape == (1 << 20, 1 << 22)
    assert kernel.sharding == NamedSharding(mesh, P("data", "model"))


def test_a_name_without_a_rule_is_replicated_in_linen_and_an_error_in_nnx():
    rules = [("embed", "data")]
    linen = {"w": logical((8, 16), "embed", "hidden")}
    variable = param((8, 16), "embed", "hidden")
    message = (
        "the model does not fit the mesh `data=2,model=4`\n"
        "  w  [8, 16] ('embed', 'hidden'): P('data', 'hidden') names axis 'hidden', which "
        "`data=2,model=4` lacks\n\n"
        "hint: the rule (\"hidden\", None) replicates dimensions named 'hidden'"
    )
    for state in (linen, nnx.State({"w": variable})):
        got = reshard.target(state, mesh=MESH, rules=rules, semantics="linen")
        assert [leaf.sharding.spec for leaf in jax.tree.leaves(got)] == [P("data", None)]
        assert raised(state, mesh=MESH, rules=rules, semantics="nnx") == message
    assert reshard.coverage(linen, mesh=MESH, rules=rules).unmatched == {"hidden": (("w",),)}


def warned(*args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reshard.target(*args, **kwargs)
    assert {each.category for each in caught} <= {UserWarning}
    assert {each.filename for each in caught} <= {__file__}  # the caller's line
    return [str(each.message) for each in caught]


def test_warnings_of_names_without_a_rule_and_rules_without_a_name():
    def make():
        params = {
            "w": logical((8, 16), "embed", "hidden"),
            "b": logical((16,), "hidden"),
            "other": logical((4, 4), None, "kv"),
            "bare": jnp.ones((5,)),
        }
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, momentum=0.9))

    rules = [("embed", "data"), ("hiden", "model"), ("heads", ("data", "model")), ("none", None)]
    expected = (
        "no rule has the axis name `hidden`; the nearest rule is `hiden`. Leaves replicated along "
        "this axis: 4, 640 B a device",
        "no rule has the axis name `kv`. Leaves replicated along this axis: 2, 128 B a device",
        "rules whose axis name no leaf has: `hiden`, `heads`. Replicated in all: 300 B a device",
    )
    assert reshard.coverage(make, mesh=MESH, rules=rules).notes == expected
    assert warned(make, mesh=MESH, rules=rules) == [*expected]
    # In a state without names, rules reach nothing.
    bare = {"params": {"w": jnp.ones((8, 16))}}
    text = "rules whose axis name no leaf has: `embed`. Replicated in all: 512 B a device"
    assert warned(bare, mesh=MESH, rules=[("embed", "data")]) == [text]
    # A name of NNX's without a rule is an axis of the mesh, and the error has the nearest rule.
    state = nnx.State({"w": param((8, 16), "embed", "hidden")})
    assert raised(state, mesh=MESH, rules=rules).endswith(
        "\n\nhint: the rule (\"hidden\", None) replicates dimensions named 'hidden'; "
        "the nearest rule is `hiden`"
    )


def test_no_warning_if_every_name_has_a_rule():
    state = {"w": logical((8, 16), "embed", "hidden"), "b": logical((16,), "hidden")}
    given = dict(RULES)
    for rules in ([*RULES], given, given.__getitem__, given | {"unused": None}, []):
        assert warned(state, mesh=MESH, rules=rules) == []
    assert warned(state, mesh=AbstractMesh((1, 1), ("data", "model")), rules=[("x", "data")]) == []
    # A rule may be for activations.
    (note,) = reshard.coverage(state, mesh=MESH, rules=RULES).notes
    assert note == ("rules whose axis name no leaf has: `batch`. Replicated in all: 0 B a device")
    # What a regex lays out needs no rule.
    assert warned(state, mesh=MESH, rules=[("embed", "data")], specs={"w|b": P("model")}) == []


def test_all_problems_of_a_train_state_at_once():
    def make():
        params = {
            "odd": logical((7, 6), "embed", "hidden"),
            "twice": logical((8, 8), "embed", "embed"),
            "axis": nn.Partitioned(jnp.ones((8, 8)), ("data", "expert")),
            "both": nn.Partitioned(jnp.ones((8, 8)), ("model", "model")),
            "mixed": logical((8, 8), "model", None),
            "free": logical((7, 7), "vocab", None),
            "long": logical((4,), "hidden", "embed"),
            "right": logical((8, 8), "embed", "hidden"),
        }
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

    expected = (
        "the model does not fit the mesh `data=2,model=4`\n"
        "  params/axis  [8, 8] ('data', 'expert'): P('data', 'expert') names axis 'expert', "
        "which `data=2,model=4` lacks\n"
        "  params/both  [8, 8] ('model', 'model'): P('model', 'model') uses axis 'model' 2 times\n"
        "  params/long  [4] ('hidden', 'embed'): P('model', 'data') is for 2 dimensions, but the "
        "array has 1\n"
        "  params/mixed: no rule has the logical name 'model', which is also an axis of "
        "`data=2,model=4`\n"
        "  params/odd  [7, 6] ('embed', 'hidden'): "
        "dimension 0 has size 7, not a multiple of 2 (data)\n"
        "  params/odd  [7, 6] ('embed', 'hidden'): "
        "dimension 1 has size 6, not a multiple of 4 (model)\n"
        "  params/twice: its axes ('embed', 'embed') have the name 'embed' twice\n\n"
        "hint: the rule (\"expert\", None) replicates dimensions named 'expert'\n"
        'hint: the rule ("model", "model") shards this axis, ("model", None) replicates it'
    )
    assert raised(make, mesh=MESH, rules=RULES) == expected
    report = reshard.coverage(make, mesh=MESH, rules=RULES)
    with pytest.raises(ShardingError) as caught:
        reshard.target(make, mesh=MESH, rules=RULES)
    assert (caught.value.problems, caught.value.hints) == (report.problems, report.hints)
    assert report.unmatched == {
        "expert": (("params", "axis"),),
        "vocab": (("params", "free"),),
        "model": (("params", "mixed"),),
    }


def test_logical_names_without_rules():
    names = {"Dense_0/kernel": ("embed", "hidden"), "W2": ("hidden", "embed")}
    lines = [
        f"  params/{layer}/{path}: its axes have logical names {axes}, but no rules were given"
        for layer in ("DotReluDot_0", "DotReluDot_1")
        for path, axes in names.items()
    ]
    assert raised(MLP("logical"), mesh=MESH, inputs=(X,)).splitlines() == [
        "the model does not fit the mesh `data=2,model=4`",
        *lines,
        "",
        'hint: rules=[("embed", "data"), ...] gives them, rules=[] replicates',
    ]
    got = reshard.target(MLP("logical"), mesh=MESH, rules=[], inputs=(X,))
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(got)} == {True}


TREE = {"w": jnp.ones((8, 8)), "layer": {"b": jnp.ones((8,))}}


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (
            reshard.ArgumentError,
            {"model": nn.Dense(3)},
            "the Linen module Dense needs inputs to make its variables\n\n"
            "hint: give `inputs`, or a function that returns its variables",
        ),
        (
            reshard.ArgumentError,
            {"model": "net:Net"},
            "the model is the text 'net:Net'\n\n"
            "hint: import it, and give its class, or a function that returns its state",
        ),
        (
            reshard.ArgumentError,
            {"inputs": (X,)},
            "the model is a dict: only a module or a function takes `inputs`",
        ),
        (
            reshard.ArgumentError,
            {"semantics": "NNX"},
            "semantics='NNX' is unknown\n\nhint: semantics='linen'\nhint: semantics='nnx'",
        ),
        (
            ShardingError,
            {"specs": {"w": P("data"), "layers": {"b": P("data"), "c": P()}}},
            "the tree of specs has leaves that the model lacks\n  layers/b\n  layers/c\n\n"
            "hint: the model has `layer/b`",
        ),
        (
            ShardingError,
            {"mesh": None},
            "the mesh of a target must be a jax.sharding.Mesh or AbstractMesh, not None\n\n"
            'hint: jax.make_mesh((1, 8), ("data", "model"), '
            "axis_types=(jax.sharding.AxisType.Auto,) * 2)\n"
            "hint: jax.sharding.AbstractMesh(...)",
        ),
    ],
)
def test_wrong_arguments(error, arguments, message):
    arguments = {"model": TREE, "mesh": MESH, **arguments}
    for function in (reshard.target, reshard.coverage):
        assert layouts.refused(error, function, **arguments) == message


@pytest.mark.parametrize(
    "arguments",
    [
        {"mesh": "data=2,model=4"},
        {"rules": [("embed", 1)]},
        {"specs": [("xyzzy", None)]},
        {"specs": [("w", P(P.UNCONSTRAINED))]},
        {"mesh": {"data": 2, "model": 4}},
        {"specs": "data"},
        {"specs": 3},
        {"specs": [("w",)]},
        {"specs": ("w", "data")},
        {"specs": [(3, "data")]},
        {"model": {"w": nn.Partitioned(jnp.ones((8, 8)), (P.UNCONSTRAINED, None))}},
        {"model": {"w": nn.Partitioned(jnp.ones((8, 8)), (3, None))}},
    ],
)
def test_mistakes_raise_our_own_errors(arguments):
    for function in (reshard.target, reshard.coverage):
        with pytest.raises(ShardingError):
            function(**{"model": lambda: TREE, "mesh": MESH, **arguments})
