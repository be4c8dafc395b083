"""The examples, which are Flax's guides to sharding: what they save comes back as it was, on other
meshes, in its boxes and variables. `test_examples` shows that training goes on.

Where an array belongs is Flax's word: `nn.get_sharding`, `nn.logical_to_mesh_sharding` and
`nnx.get_named_sharding`.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import layouts
import optax
import pytest
from flax import nnx
from flax.core import freeze, meta
from flax.training.train_state import TrainState
from layouts import assert_same_tree, flat
from releases import OUT_SHARDING

import reshard
from reshard.errors import ShardingError

pytestmark = pytest.mark.usefixtures("quickly_compiled")
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
# The mesh that is saved on, and the one that is restored on: all devices along one axis, other
# sizes of both axes, fewer devices, more devices, all along the other axis, and nothing changes.
PAIRS = [("2x4", "1x8"), ("1x8", "4x2"), ("2x4", "2x2"), ("4x2", "2x8"), ("2x4", "8x1")]
PAIRS += [("2x4", "2x4")]


def load(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


linen_train_state = load("linen_train_state")
linen_logical_axes = load("linen_logical_axes")
nnx_own_optimizer = load("nnx_own_optimizer")
nnx_optimizer = load("nnx_optimizer")


def mesh_of(text):
    return layouts.mesh([int(size) for size in text.split("x")])


# The examples, all in one form


@dataclasses.dataclass(frozen=True, eq=False)
class Guide:
    """An example as the tests drive it. A state is a `TrainState`, or what holds NNX modules.

    Attributes:
      create: what makes a fresh state, as `reshard.target` takes it.
      start: a mesh and rules -> a fresh state on that mesh, as the example makes it.
      save: a path and a state: saves its raw arrays.
      shardings: a mesh and rules -> Flax's own sharding of each raw array, in its place.
      rules: the rules that it is saved under, and those that it is restored under.
    """

    create: Callable
    start: Callable
    save: Callable
    shardings: Callable
    rules: tuple[Any, Any] = (None, None)


def linen_guide(scanned, frozen=False):
    example = linen_train_state
    model = example.MLP(3, 64, scanned)
    create = functools.partial(example.create_state, model, optax.adam(1e-3))
    if frozen:
        create = functools.partial(create_frozen, create)

    def shardings(mesh, rules):
        with jax.set_mesh(mesh):
            return nn.get_sharding(jax.eval_shape(create), mesh)

    return Guide(
        create,
        start=lambda mesh, rules: example.create_on(mesh, create),
        save=example.save,
        shardings=shardings,
    )


def create_frozen(create):
    """The state as it was when `init` returned a `FrozenDict`."""
    state = create()
    return TrainState.create(apply_fn=state.apply_fn, params=freeze(state.params), tx=state.tx)


def logical_guide(scanned, saved_as, restored_as):
    example = linen_logical_axes
    model = example.MLP(3, 64, scanned)
    create = functools.partial(example.create_state, model, optax.adam(1e-3))

    def shardings(mesh, rules):
        specs = nn.get_partition_spec(jax.eval_shape(create))
        return nn.logical_to_mesh_sharding(specs, mesh, rules)

    return Guide(
        create,
        start=lambda mesh, rules: example.create_on(mesh, rules, create),
        save=example.save,
        shardings=shardings,
        rules=(example.RULES[saved_as], example.RULES[restored_as]),
    )


def nnx_guide(save, create, create_sharded):
    def start(mesh, rules):
        with jax.set_mesh(mesh):
            return create_sharded()

    def shardings(mesh, rules):
        with jax.set_mesh(mesh):
            state = nnx.state(nnx.eval_shape(create))
        return nnx.to_pure_dict(nnx.get_named_sharding(state, mesh))

    return Guide(create, start, save, shardings)


def create_both():
    """A model in its optimizer."""
    model = nnx_optimizer.MLP(2, 64, rngs=nnx.Rngs(0))
    return nnx.ModelAndOptimizer(model, nnx_optimizer.ADAM, wrt=nnx.Param)


@nnx.jit
def create_both_sharded():
    both = create_both()
    state = nnx.state(both)
    nnx.update(both, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return both


own, stock = nnx_own_optimizer, nnx_optimizer
GUIDES = {
    "linen looped": linen_guide(scanned=False),
    "linen scanned": linen_guide(scanned=True),
    "linen frozen": linen_guide(scanned=True, frozen=True),
    "logical looped": logical_guide(False, "tensor parallel", "fully sharded"),
    "logical scanned": logical_guide(True, "tensor parallel", "fully sharded"),
    "logical scanned back": logical_guide(True, "fully sharded", "tensor parallel"),
    "nnx own optimizer": nnx_guide(own.save, own.create_model, own.create_model),
    "nnx optimizer": nnx_guide(stock.save, stock.create, stock.create_sharded),
    "nnx both": nnx_guide(stock.save, create_both, create_both_sharded),
}


@pytest.fixture(params=GUIDES)
def guide(request):
    return GUIDES[request.param]


def is_linen(state):
    return isinstance(state, TrainState)


def whole(state):
    """A state as a pytree that says all of it: NNX modules with their graph."""
    return state if is_linen(state) else nnx.split(state)


def raw(state):
    """The values alone, in the places that the raw arrays have."""
    return meta.unbox(state) if is_linen(state) else nnx.to_pure_dict(nnx.state(state))


def changed(state, change):
    """A copy with other values in the same boxes and variables."""
    if is_linen(state):
        return change(state)
    graph, inside = nnx.split(state)
    return nnx.merge(graph, change(inside))


def put(state, shardings):
    """A copy that is moved in memory."""

    def moved(tree):
        places = jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(shardings))
        return jax.device_put(tree, places)

    return changed(state, moved)


def annotations(state):
    """Path -> the type of the box or the variable, and all that it says beside its value."""
    if is_linen(state):
        found, _ = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda node: isinstance(node, meta.AxisMetadata)
        )
        return {
            jax.tree_util.keystr(path): (type(box), vars(box) | {"value": None})
            for path, box in found
            if isinstance(box, meta.AxisMetadata)
        }
    return {
        path: (type(variable), variable.get_metadata())
        for path, variable in nnx.to_flat_state(nnx.state(state))
    }


def randomized(state, seed):
    """Any bits in every leaf: after training, many leaves are equal."""
    return changed(state, functools.partial(layouts.randomized, seed=seed))


@functools.cache
def fresh(guide):
    """A fresh state on 2x4, made once."""
    return guide.start(mesh_of("2x4"), guide.rules[0])


# What comes back


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_bit_comes_back_in_its_box_and_where_flax_puts_it(guide, first, second, tmp_path):
    saved_rules, rules = guide.rules
    state = put(randomized(fresh(guide), seed=0), guide.shardings(mesh_of(first), saved_rules))
    guide.save(tmp_path / "saved", state)
    saved = jax.tree.leaves_with_path(layouts.load_pytree(tmp_path / "saved"))
    assert {names_of(path): layouts.bits(leaf) for path, leaf in saved} == {
        names_of(path): layouts.bits(leaf) for path, leaf in jax.tree.leaves_with_path(raw(state))
    }
    mesh = mesh_of(second)
    flax_shardings = flat(guide.shardings(mesh, rules))

    # Within a mesh Flax applies shardings itself, as soon as it sees a box or a variable.
    for context in (contextlib.nullcontext, functools.partial(jax.set_mesh, mesh)):
        with context():
            target = reshard.target(guide.create, mesh=mesh, rules=rules)
            restored = reshard.restore(tmp_path / "saved", target)
        assert {type(leaf) for leaf in flat(raw(target)).values()} == {jax.ShapeDtypeStruct}
        assert layouts.shardings(raw(target)) == layouts.shardings(raw(restored)) == flax_shardings
        assert annotations(target) == annotations(restored) == annotations(state)
        assert_same_tree(whole(restored), whole(state))


def names_of(keys):
    return tuple(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", None)))) for k in keys)


def test_a_state_that_is_there_already_is_filled(guide, tmp_path):
    """NNX modules in place; a `TrainState` is a new one."""
    state = randomized(fresh(guide), seed=1)
    guide.save(tmp_path / "saved", state)
    shardings = guide.shardings(mesh_of("1x8"), guide.rules[1])
    there = put(fresh(guide), shardings)
    before = whole(there)

    restored = reshard.restore(tmp_path / "saved", there)
    assert_same_tree(whole(restored), whole(state))
    assert layouts.shardings(raw(restored)) == flat(shardings)
    assert annotations(restored) == annotations(state)
    if is_linen(there):
        assert_same_tree(there, before)
    else:
        assert_same_tree(whole(there), whole(state))


# What is particular to one guide


def test_the_optimizer_of_ones_own_holds_the_variables_of_the_model(tmp_path):
    """Its parameters are the model's, saved once; its momentum has a type of its own."""
    guide = GUIDES["nnx own optimizer"]
    guide.save(tmp_path / "saved", fresh(guide))
    target = reshard.target(guide.create, mesh=mesh_of("1x8"))
    restored = reshard.restore(tmp_path / "saved", target)
    names = ["b1", "w1", "w2"]
    model, optimizer = restored["model"], restored["optimizer"]
    assert list(optimizer.params) == list(optimizer.momentum) == names
    assert all(optimizer.params[name] is getattr(model, name) for name in names)
    assert {type(optimizer.momentum[name]) for name in names} == {own.Momentum}
    assert (optimizer.rate, optimizer.decay) == (0.1, 0.9)


def test_mesh_rules_may_be_the_targets_instead_of_the_constructors():
    """The model keeps its logical names, and the rules are given to `reshard.target`."""
    mesh = mesh_of("4x2")

    def create():
        return own.MLP(64, lambda *names: names, rngs=nnx.Rngs(0))

    target = reshard.target(create, mesh=mesh, rules=own.RULES)
    with nnx.use_eager_sharding(False):
        abstract = nnx.state(nnx.eval_shape(create))
    with nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
        expected = nnx.to_pure_dict(nnx.get_named_sharding(abstract, mesh))
    assert layouts.shardings(raw(target)) == flat(expected)
    assert {
        path: metadata[OUT_SHARDING] for path, (_, metadata) in annotations(target).items()
    } == {("b1",): ("mlp",), ("w1",): ("embed", "mlp"), ("w2",): ("mlp", "embed")}


def test_an_annotation_that_does_not_divide_is_named():
    """The guide itself splits the one column of `w2`, in the model and in the momentum."""

    class AsWritten(own.MLP):
        def __init__(self):
            super().__init__(64, lambda *names: names, rngs=nnx.Rngs(0))
            self.w2.set_metadata(**{OUT_SHARDING: ("embed", "mlp")})

    def create():
        model = AsWritten()
        return {"model": model, "optimizer": own.SGD(nnx.state(model, nnx.Param), 0.1)}

    arguments = {"mesh": mesh_of("2x4"), "rules": own.RULES}
    assert layouts.refused(ShardingError, reshard.target, create, **arguments) == (
        "the model does not fit the mesh `data=2,model=4`\n"
        "  model/w2  [64, 1] ('embed', 'mlp'): dimension 1 of 1 does not divide by 4 (model)\n"
        "  optimizer/momentum/w2  [64, 1]: dimension 1 of 1 does not divide by 4 (model)"
    )
