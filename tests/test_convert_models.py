"""Linen models and their NNX twins: the same outputs, the same further step, the same tree back.

First the twins themselves, whose map is written by hand; then what conversion makes of their
checkpoints.
"""

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
from twins import DECODER, TWINS

import reshard

pytestmark = pytest.mark.usefixtures("quickly_compiled")
FEW = pytest.mark.parametrize("name", few(TWINS, "scanned", "gru", "gated"))
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@functools.cache
def state_of(name):
    return TWINS[name].linen_state()


@functools.cache
def stepped(name):
    """Linen's loss, and its state after one more step."""
    return TWINS[name].linen_step(state_of(name))


@functools.cache
def outputs(name):
    """What Linen's model gives."""
    state = state_of(name)
    stats = {"batch_stats": state.batch_stats} if hasattr(state, "batch_stats") else {}
    return TWINS[name].linen_forward({"params": state.params, **stats})


def assert_holds(made, values):
    """An NNX model, or a dict of it and its optimizer, holds these values bit for bit."""
    found = {path: np.asarray(leaf) for path, leaf in twins.nnx_leaves(made).items()}
    assert {path: (x.shape, x.tobytes()) for path, x in found.items()} == {
        path: (x.shape, x.astype(found[path].dtype).tobytes()) for path, x in values.items()
    }


def assert_trains_on(name, training):
    """The NNX model gives what Linen's does, and so does a further step of training."""
    twin = TWINS[name]
    np.testing.assert_allclose(twin.nnx_forward(training["model"]), outputs(name), **CLOSE)
    loss, state = stepped(name)
    np.testing.assert_allclose(twin.nnx_step(training), loss, **CLOSE)
    got, expected = twins.nnx_leaves(training), twin.expected(state)
    assert got.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(got[path], leaf, **CLOSE, err_msg=path)


# The twins


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TWINS)
def test_twins_give_the_same_and_train_alike(name):
    assert_trains_on(name, TWINS[name].filled(state_of(name)))


# Where the axes of a language model go


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


# Conversion


def load_nnx(path, made):
    """A program without `reshard`: Flax's state of the model, filled by Orbax."""
    graph, state = nnx.split(made)
    return nnx.merge(graph, load(path, state))


def without_random(tree):
    """Path -> leaf of what Orbax gives for an NNX checkpoint without a target."""
    leaves = twins.linen_leaves(tree)
    return {p.removesuffix("/value"): x for p, x in leaves.items() if "/rngs/" not in p}


def choices(twin, folder):
    """What a conversion is told beside the model."""
    told = {}
    if nnx.to_flat_state(nnx.state(twin.blank_model(), nnx.RngState)):
        told["init"] = "**/rngs/**"
    if twin.map:
        told["map_file"] = folder / "map.toml"
        told["map_file"].write_text(twin.map)
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> the Linen checkpoint and the converted one."""

    @functools.cache
    def get(name):
        folder = tmp_path_factory.mktemp("converted")
        source = save(folder / "linen", state_of(name))
        converted = convert(reshard.open(source), name, folder)
        reshard.save(converted, folder / "nnx")
        return source, folder / "nnx"

    return get


def convert(ckpt, name, folder):
    return reshard.to_nnx(ckpt, TWINS[name].create, **choices(TWINS[name], folder))


@pytest.mark.parametrize("name", few(TWINS, "scanned"))
def test_a_program_without_reshard_trains_on(name, saved):
    _, converted = saved(name)
    expected = TWINS[name].expected(state_of(name))
    training = load_nnx(converted, TWINS[name].blank())
    assert_holds(training, expected)
    if name == "scanned":  # the same bits in the other twins train on as well
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
def test_a_linen_checkpoint_is_restored_into_the_nnx_model(name, saved, tmp_path):
    source, _ = saved(name)
    training = TWINS[name].blank()
    ckpt = convert(reshard.open(source), name, tmp_path)
    restored = reshard.restore(ckpt, training)
    assert {key: value is training[key] for key, value in restored.items()} == {
        "model": True,
        "optimizer": True,
    }
    assert_holds(training, TWINS[name].expected(state_of(name)))


@FEW
def test_trained_on_in_nnx_it_goes_back_with_the_linen_model(name, saved, tmp_path):
    """What Orbax saves of a trained model has lost the record of the Linen tree."""
    twin = TWINS[name]
    training = load_nnx(saved(name)[1], twin.blank())
    twin.nnx_step(training)
    path = save(tmp_path / "trained", nnx.state(training))
    model = functools.partial(jax.eval_shape, twin.linen_state)
    told = choices(twin, tmp_path)
    random = told.pop("init", ())
    ckpt = reshard.to_linen(path, model, source=twin.create, drop=random, **told)
    state = reshard.restore(ckpt, state_of(name))
    assert jax.tree.structure(state) == jax.tree.structure(state_of(name))
    assert_holds(training, twin.expected(state))


def test_the_cache_of_a_decoder_comes_along(tmp_path):
    variables = DECODER.linen_variables()
    path = save(tmp_path / "linen", variables)
    ckpt = reshard.to_nnx(reshard.open(path), DECODER.create_model, init="**/rngs/**")
    reshard.save(ckpt, tmp_path / "nnx")
    model = load_nnx(tmp_path / "nnx", DECODER.blank_model())
    assert_holds(model, DECODER.expected(variables))
    got = DECODER.nnx_forward(model)
    np.testing.assert_allclose(got, DECODER.linen_forward(variables), **CLOSE)
    back = reshard.to_linen(reshard.open(tmp_path / "nnx"))
    reshard.save(back, tmp_path / "back")
    layouts.assert_same_tree(load(tmp_path / "back"), load(path))


@pytest.mark.parametrize("name", few(["looped", "scanned", "scanned remat"], "scanned remat"))
def test_the_converted_leaves_are_sharded_as_the_model(name, tmp_path):
    """Saved where the Linen model's axes said, they are where the NNX model's say."""
    mesh = jax.make_mesh((2, 2, 3), ("data", "model", "stage"), axis_types=(AxisType.Auto,) * 3)
    state = dataclasses.replace(TWINS[name], boxed=True, step=jnp.int32(7)).linen_state()
    target = reshard.target(state, mesh=mesh, rules=RULES)
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, target)
    ckpt = convert(reshard.open(save(tmp_path / "linen", placed)), name, tmp_path)
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


def test_a_bias_that_nnx_lacks_is_refused_once_it_was_trained(tmp_path):
    path = save(tmp_path / "linen", stepped("gru")[1])
    with pytest.raises(reshard.TreeMismatchError) as error:
        convert(reshard.open(path), "gru", tmp_path)
    assert str(error.value) == (
        "leaves without a place in the result are not zero\n"
        "  params/GRUCell_0/hn/bias  float32[5]\n"
        "  params/GRUCell_1/hn/bias  float32[7]\n"
        "  opt_state/0/trace/GRUCell_0/hn/bias  float32[5]\n"
        "  opt_state/0/trace/GRUCell_1/hn/bias  float32[7]\n"
        "\n"
        "hint: NNX's GRUCell has no bias in its recurrent part: use your own cell with that bias"
    )
