"""Linen models and their NNX twins: the same outputs, the same further step, the same tree back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import twins
from flax import nnx
from jax.sharding import AxisType
from layouts import load_standard as load
from layouts import save_standard as save
from sampling import few
from twins import TWINS

import reshard

pytestmark = pytest.mark.usefixtures("quickly_compiled")
FEW = pytest.mark.parametrize("name", few(TWINS, "scanned"))
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@functools.cache
def state_of(name):
    return TWINS[name].linen_state()


@functools.cache
def stepped(name):
    """Linen's loss, and its state after one more step."""
    return TWINS[name].linen_step(state_of(name))


def assert_holds(made, values):
    """An NNX model, or a dict of it and its optimizer, holds these values bit for bit."""
    found = {path: np.asarray(leaf) for path, leaf in twins.nnx_leaves(made).items()}
    assert {path: (x.shape, x.tobytes()) for path, x in found.items()} == {
        path: (x.shape, x.astype(found[path].dtype).tobytes()) for path, x in values.items()
    }


def assert_trains_on(name, training):
    """The NNX model gives what Linen's does, and so does a further step of training."""
    twin = TWINS[name]
    outputs = twin.linen_forward(state_of(name).params)
    np.testing.assert_allclose(twin.nnx_forward(training["model"]), outputs, **CLOSE)
    loss, state = stepped(name)
    np.testing.assert_allclose(twin.nnx_step(training), loss, **CLOSE)
    got, expected = twins.nnx_leaves(training), twin.expected(state)
    assert got.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(got[path], leaf, **CLOSE, err_msg=path)


RULES = [
    ("vocab", "model"),
    ("embed", "data"),
    ("heads", None),
    ("kv", "model"),
    ("mlp", "model"),
    ("layers", "stage"),
]


def specs(leaves):
    """Path -> partition spec of full rank."""
    found = {path: tuple(leaf.sharding.spec) for path, leaf in leaves.items()}
    return {path: x + (None,) * (leaves[path].ndim - len(x)) for path, x in found.items()}


def load_nnx(path, twin):
    """A program without `reshard`: Flax's state of the model, filled by Orbax."""
    graph, state = nnx.split(twins.blank(twin.create))
    return nnx.merge(graph, load(path, state))


def without_random(tree):
    """Path -> leaf of what Orbax gives for an NNX checkpoint without a target."""
    leaves = twins.linen_leaves(tree)
    return {p.removesuffix("/value"): x for p, x in leaves.items() if "/rngs/" not in p}


RANDOM = "**/rngs/**"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> the Linen checkpoint and the converted one."""

    @functools.cache
    def get(name):
        folder = tmp_path_factory.mktemp("converted")
        source = save(folder / "linen", state_of(name))
        converted = reshard.to_nnx(source, TWINS[name].create, init=RANDOM)
        reshard.save(converted, folder / "nnx")
        return source, folder / "nnx"

    return get


@FEW
def test_a_program_without_reshard_trains_on(name, saved):
    _, converted = saved(name)
    expected = TWINS[name].expected(state_of(name))
    training = load_nnx(converted, TWINS[name])
    assert_holds(training, expected)
    fresh = jax.jit(lambda: nnx.state(TWINS[name].create_model(), nnx.RngState))()
    layouts.assert_same_tree(nnx.state(training["model"], nnx.RngState), fresh)
    assert_trains_on(name, training)
    found = without_random(load(converted))
    assert {path: np.asarray(leaf).tobytes() for path, leaf in found.items()} == {
        path: leaf.astype(found[path].dtype).tobytes() for path, leaf in expected.items()
    }


@FEW
def test_there_and_back_is_the_same_tree(name, saved, tmp_path):
    source, converted = saved(name)
    reshard.save(reshard.to_linen(reshard.open(converted)), tmp_path / "back")
    layouts.assert_same_tree(load(tmp_path / "back"), load(source))
    state = reshard.restore(tmp_path / "back", state_of(name))
    layouts.assert_same_tree(state, state_of(name))


@FEW
def test_trained_on_in_nnx_it_goes_back_with_the_linen_model(name, saved, tmp_path):
    """What Orbax saves of a trained model has lost the record of the Linen tree."""
    twin = TWINS[name]
    training = load_nnx(saved(name)[1], twin)
    twin.nnx_step(training)
    path = save(tmp_path / "trained", nnx.state(training))
    model = functools.partial(jax.eval_shape, twin.linen_state)
    ckpt = reshard.to_linen(path, model, source=twin.create, drop=RANDOM)
    state = reshard.restore(ckpt, state_of(name))
    assert jax.tree.structure(state) == jax.tree.structure(state_of(name))
    assert_holds(training, twin.expected(state))


@pytest.mark.parametrize("name", few(["scanned", "scanned remat"], "scanned remat"))
def test_the_converted_leaves_are_sharded_as_the_model(name, tmp_path):
    """Saved where the Linen model's axes said, they are where the NNX model's say."""
    mesh = jax.make_mesh((2, 2, 3), ("data", "model", "stage"), axis_types=(AxisType.Auto,) * 3)
    state = dataclasses.replace(TWINS[name], boxed=True, step=jnp.int32(7)).linen_state()
    target = reshard.target(state, mesh=mesh, rules=RULES)
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, target)
    ckpt = reshard.to_nnx(save(tmp_path / "linen", placed), TWINS[name].create, init=RANDOM)
    reshard.save(ckpt, tmp_path / "nnx")
    model = reshard.target(TWINS[name].create, mesh=mesh, rules=RULES)
    found = specs(without_random(load(tmp_path / "nnx")))
    assert found == specs(twins.nnx_leaves(model))
    assert {axis for spec in found.values() for axis in spec} >= {"data", "model", None}
    reshard.save(reshard.to_linen(tmp_path / "nnx"), tmp_path / "back")
    back, linen = (layouts.flat(load(tmp_path / it)) for it in ("back", "linen"))
    arrays = [path for path, leaf in linen.items() if isinstance(leaf, jax.Array)]
    assert back.keys() == linen.keys()
    one, other = (specs({path: tree[path] for path in arrays}) for tree in (back, linen))
    assert one == other
