"""Layers on their own and in one array, against numpy, and against what optax and Orbax make of
parameters that are so from the start."""

import functools
import shutil

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core import meta
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import examples, few

import reshard
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Concat, Transpose
from reshard.convert.leafmap import LeafMap, Row, Zeros, from_rows, renaming
from reshard.convert.stacking import stack, unstack
from reshard.errors import ShardingError, TreeMismatchError
from reshard.restore.pytrees import StateLeaf, saved_tree

COUNT = 3
BLOCK = {"kernel": (6, 5), "bias": (5,), "norm": {"scale": (4,), "shift": ()}}
# The second largest dimension is what adafactor looks at, from 128 on if not told otherwise.
LARGE = {"kernel": (160, 130), "heads": (4, 140, 135), "small": (5, 8), "bias": (7,), "gain": ()}
# It has factored the kernel from 4 on, and not the others.
FROM_4 = {"kernel": (9, 6), "heads": (8, 7, 5), "table": (12, 3), "bias": (7,)}


def is_kernel(path, _):
    return path[-1].key in ("kernel", "heads")


def kernels(params):
    return jax.tree_util.tree_map_with_path(is_kernel, params)


def kernels_of_nnx(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-2].key == "kernel", params)


def labels(params):
    return jax.tree.map(lambda kernel: "kernel" if kernel else "other", kernels(params))


def plain_adafactor(**kwargs):
    """What looks at whole arrays (clipping, parameter scale) is not the same for stacked layers."""
    return optax.adafactor(
        1e-3, clipping_threshold=None, multiply_by_parameter_scale=False, **kwargs
    )


# Masks and labels go by names: those that go by rank change when layers are stacked.
OPTIMIZERS = {
    "adam": (BLOCK, optax.adam(1e-3)),
    "adamw": (
        BLOCK,
        optax.chain(
            optax.clip(1.0),
            optax.masked(optax.add_decayed_weights(0.1), kernels),
            optax.adamw(optax.linear_schedule(1.0, 0.5, 9), mask=kernels),
        ),
    ),
    "momentum": (BLOCK, optax.sgd(1e-3, momentum=0.9)),
    "no state": (BLOCK, optax.sgd(1e-3)),
    "lion": (BLOCK, optax.lion(1e-3)),
    "MultiSteps": (BLOCK, optax.MultiSteps(optax.adam(1e-3), 2)),
    "inject_hyperparams": (BLOCK, optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)),
    "masked": (BLOCK, optax.masked(optax.adam(1e-3), kernels)),
    "multi_transform": (
        BLOCK,
        optax.multi_transform(
            {"kernel": optax.adam(1e-3), "other": optax.sgd(1e-3, momentum=0.9)}, labels
        ),
    ),
    "adafactor": (LARGE, plain_adafactor()),
    "adafactor with momentum": (FROM_4, plain_adafactor(momentum=0.9, min_dim_size_to_factor=4)),
    "unfactored adafactor": (LARGE, plain_adafactor(factored=False)),
    "accumulated adafactor": (LARGE, optax.MultiSteps(plain_adafactor(), 2)),
    "some adafactor": (
        LARGE,
        optax.multi_transform({"kernel": plain_adafactor(), "other": optax.adam(1e-3)}, labels),
    ),
}


def abstract(shapes):
    """A tree of parameters without values."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda value: isinstance(value, tuple),
    )


def train_state(params, tx):
    """A state without values, but for the step."""
    make = functools.partial(TrainState.create, apply_fn=None, tx=tx)
    return jax.eval_shape(lambda params: make(params=params), params).replace(step=7)


def randomized(state, seed=0):
    """A state with every leaf random but those that optax has in place of moments."""
    rng = np.random.default_rng(seed)

    def random(leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        if leaf.shape == (1,):
            return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.uniform(0.5, 1.0, leaf.shape).astype(leaf.dtype))
        return jnp.asarray(rng.integers(0, 2, leaf.shape).astype(leaf.dtype))

    return jax.tree.map(random, state)


def looped(block, tx, count=COUNT):
    """A random state of layers on their own."""
    layers = {f"layer_{i}": block for i in range(count)}
    shapes = {"embed": {"kernel": (7, 5), "bias": (5,)}, **layers}
    return randomized(train_state(abstract(shapes), tx))


def together(params, axis=0, into="layers"):
    """The parameters with the layers in one array each, by numpy."""
    layers = [params[f"layer_{i}"] for i in range(len(params) - 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves, axis)), *layers)
    return {"embed": params["embed"], into: stacked}


def put(path, tree):
    """The tree as a checkpoint."""
    shutil.rmtree(path, ignore_errors=True)
    return reshard.open(layouts.save_pytree(path, tree))


def read(path, like=None):
    """What Orbax reads."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        if like is None:
            return checkpointer.restore(path)
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        return checkpointer.restore(path, item=like, restore_args=arguments)


def got(ckpt, path):
    """The checkpoint as Orbax reads it once it is saved."""
    shutil.rmtree(path, ignore_errors=True)
    reshard.save(ckpt, path)
    return read(path)


def form(state):
    """Path -> shape and dtype, or the empty container, of all that Orbax saves of a state."""
    return {path: described(leaf) for path, leaf in saved_tree(state).items()}


def described(leaf):
    if not isinstance(leaf, StateLeaf):
        return leaf
    return np.shape(leaf.value), getattr(leaf.value, "dtype", np.dtype(type(leaf.value)))


def form_of(ckpt):
    return {
        path: (leaf.shape, leaf.dtype) if isinstance(leaf, ArrayHandle) else leaf
        for path, leaf in ckpt.items()
    }


def by_path(tree):
    """Path -> all there is to each leaf."""
    return {path: layouts.bits(leaf) for path, leaf in layouts.saved_leaves(tree).items()}


def expected(original, wanted, layers, into="layers", axis=0):
    """What is in the saved form of a state, from the leaves before by numpy.

    Args:
      original: the leaves before, by path.
      wanted: the form that optax gives the state afterwards: by its shapes the axis is found where
        moments are parts of their parameters.
      layers: the keys of the layers, in order.
      into: the key that they become.
      axis: the new axis of the parameters.
    """
    result = {}
    for path, like in wanted.items():
        if into not in path:
            result[path] = layouts.bits(original[path])
            continue
        place = path.index(into)
        leaves = [original[(*path[:place], key, *path[place + 1 :])] for key in layers]
        if like is None:
            assert leaves == [None] * len(leaves)
            result[path] = layouts.bits(None)
        elif like[0] == (1,):  # in place of a moment, and its shape is that of no parameter here
            assert not any(np.any(leaf) for leaf in leaves)
            result[path] = layouts.bits(jnp.asarray(np.zeros((1,), like[1])))
        else:
            ndim = leaves[0].ndim + 1
            stacks = [np.stack(leaves, place) for place in (axis % ndim, *range(ndim))]
            fitting = [each for each in stacks if each.shape == like[0]]
            result[path] = layouts.bits(jnp.asarray(fitting[0]))
    return result


# What optax has of stacked layers


CASES = [
    *((name, 0) for name in OPTIMIZERS),
    *((name, axis) for name in ("adam", "masked", "adafactor with momentum") for axis in (1, -1)),
    ("some adafactor", -2),
]


@pytest.mark.parametrize(("name", "axis"), few(CASES, *CASES[::2]))
def test_a_train_state_becomes_that_of_stacked_layers_and_back(name, axis, tmp_path):
    block, tx = OPTIMIZERS[name]
    if axis not in (0, -1):  # which scalars do not have
        block = {key: shape for key, shape in block.items() if shape not in ((), BLOCK["norm"])}
    state = looped(block, tx)
    ckpt = put(tmp_path / "a", state)
    wanted = train_state(together(state.params, axis), tx)
    stacked = stack(ckpt, "params/layer_{}", "params/layers", axis)
    assert form_of(stacked) == form(wanted)
    values = expected(fields(state), form(wanted), [f"layer_{i}" for i in range(COUNT)], axis=axis)
    assert by_path(got(stacked, tmp_path / "b")) == values
    params = {path: bits for path, bits in values.items() if path[0] == "params"}
    assert params == by_path({"params": together(state.params, axis)})
    saved = reshard.open(tmp_path / "b")
    back = unstack(saved, "params/layers", "params/layer_{}", axis)
    assert form_of(back) == form_of(ckpt)
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def parts(state):
    """A train state as a dict."""
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def fields(state):
    """The leaves of a train state, by path."""
    return layouts.saved_leaves(parts(state))


# Groups, numbers, nests


def test_layers_of_two_kinds_in_turn(tmp_path):
    """One kind after the other, by their numbers."""
    kinds = [{"w": (6, 5)}, {"w": (6, 5), "gate": (6, 4)}]
    tx = optax.lion(1e-3)
    shapes = {f"layer_{i}": kinds[i % 2] for i in range(6)}
    state = randomized(train_state(abstract(shapes), tx))
    ckpt = put(tmp_path / "a", state)
    first = stack(ckpt, "params/layer_{}", "params/dense", indices=[0, 2, 4])
    both = stack(first, "params/layer_{}", "params/moe", indices=(1, 3, 5))
    wanted = {"dense": {"w": (3, 6, 5)}, "moe": {"w": (3, 6, 5), "gate": (3, 6, 4)}}
    wanted = form(train_state(abstract(wanted), tx))
    found = by_path(got(both, tmp_path / "b"))
    dense = {path: like for path, like in wanted.items() if "moe" not in path}
    moe = {path: like for path, like in wanted.items() if "moe" in path}
    assert found == expected(
        fields(state), dense, ["layer_0", "layer_2", "layer_4"], "dense"
    ) | expected(fields(state), moe, ["layer_1", "layer_3", "layer_5"], "moe")
    one = unstack(both, "params/dense", "params/layer_{}", indices=[0, 2, 4])
    back = unstack(one, "params/moe", "params/layer_{}", indices=(1, 3, 5))
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def test_some_layers_remain(tmp_path):
    """Of seven layers four are stacked, in an order of their own, and three stay."""
    tx = optax.adam(1e-3)
    state = randomized(train_state(abstract({f"layer_{i}": {"w": (6, 5)} for i in range(7)}), tx))
    ckpt = put(tmp_path / "a", state)
    order = [3, 1, 0, 2]
    stacked = stack(ckpt, "params/layer_{}", "params/layers", indices=order)
    left = {f"layer_{i}": {"w": (6, 5)} for i in (4, 5, 6)}
    wanted = form(train_state(abstract({"layers": {"w": (4, 6, 5)}, **left}), tx))
    values = expected(fields(state), wanted, [f"layer_{i}" for i in order])
    assert by_path(got(stacked, tmp_path / "b")) == values
    back = unstack(stacked, "params/layers", "params/layer_{}", indices=order)
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def test_stages_of_layers(tmp_path):
    """Two new axes, as `remat_scan` has them: the layers of each stage, then the stages."""
    tx = optax.adam(1e-3)
    stage = {f"layer_{j}": {"w": (6, 5), "b": (5,)} for j in range(3)}
    state = randomized(train_state(abstract({f"stage_{i}": stage for i in range(2)}), tx))
    ckpt = put(tmp_path / "a", state)
    inner = stack(ckpt, "params/stage_*/layer_{}", "params/stage_*/layers")
    outer = stack(inner, "params/stage_{}", "params/stages", 1)
    shapes = {"stages": {"layers": {"w": (3, 2, 6, 5), "b": (3, 2, 5)}}}
    assert form_of(outer) == form(train_state(abstract(shapes), tx))
    original = fields(state)
    found = by_path(got(outer, tmp_path / "b"))
    for root in (("params",), ("opt_state", 0, "mu"), ("opt_state", 0, "nu")):
        for key in "wb":
            parts = [
                [original[(*root, f"stage_{i}", f"layer_{j}", key)] for j in range(3)]
                for i in range(2)
            ]
            whole = jnp.asarray(np.stack([np.stack(part) for part in parts], 1))
            assert found[(*root, "stages", "layers", key)] == layouts.bits(whole)
    stages = unstack(outer, "params/stages", "params/stage_{}", 1)
    back = unstack(stages, "params/stage_*/layers", "params/stage_*/layer_{}")
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def test_layers_that_are_arrays_themselves(tmp_path):
    state = {"params": {f"w{i:02}": np.full((2, 3), i, "float32") for i in range(12)}}
    stacked = stack(put(tmp_path / "a", state), "params/w{}", "params/w", 1)
    whole = np.stack([np.full((2, 3), i, "float32") for i in range(12)], 1)
    assert by_path(got(stacked, tmp_path / "b")) == by_path({"params": {"w": whole}})


def test_keys_with_slashes_and_signs(tmp_path):
    tree = {"params": {f"mlp/l({i}) *": {"a.b": np.full((2,), i, "float32")} for i in range(2)}}
    stacked = stack(put(tmp_path / "a", tree), 'params/"mlp/l({}) *"', 'params/"all/l *"')
    whole = np.stack([np.full((2,), i, "float32") for i in range(2)])
    wanted = {"params": {"all/l *": {"a.b": whole}}}
    assert by_path(got(stacked, tmp_path / "b")) == by_path(wanted)
    back = unstack(stacked, 'params/"all/l *"', 'params/"mlp/l({}) *"')
    assert by_path(got(back, tmp_path / "c")) == by_path(tree)


# Containers


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)


class Looped(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(COUNT)])


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.layers = nnx.split_rngs(splits=COUNT)(nnx.vmap(Block))(rngs)


def nnx_state(module, tx):
    """A model beside its optimizer, with all leaves random."""

    def make():
        model = module(nnx.Rngs(0))
        return {
            "model": nnx.state(model),
            "optimizer": nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param)),
        }

    return randomized(nnx.eval_shape(make))


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.masked(optax.lion(1e-3), kernels_of_nnx)])
def test_a_model_of_nnx_and_its_optimizer(tx, tmp_path):
    """List positions are keys, and variables are a level named `value`."""
    state = nnx_state(Looped, tx)
    ckpt = put(tmp_path / "a", state)
    wanted = form_of(put(tmp_path / "w", nnx_state(Stacked, tx)))
    stacked = stack(ckpt, "model/layers/{}", "model/layers")
    assert form_of(stacked) == wanted
    original, result = layouts.saved_leaves(read(tmp_path / "a")), {}
    for path in wanted:
        place = path.index("layers") + 1 if "layers" in path else None
        pieces = [
            original[(*path[:place], str(i), *path[place:])] for i in range(COUNT * bool(place))
        ]
        if not place:
            result[path] = layouts.bits(original[path])
        elif pieces == [None] * COUNT:
            result[path] = layouts.bits(None)
        else:
            result[path] = layouts.bits(jnp.asarray(np.stack(pieces)))
    assert by_path(got(stacked, tmp_path / "b")) == result
    back = unstack(stacked, "model/layers", "model/layers/{}")
    assert form_of(back) == form_of(ckpt)
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def boxed(shapes, names):
    return jax.tree.map(
        lambda leaf: meta.Partitioned(leaf, names=(*names, *(None,) * leaf.ndim)[: leaf.ndim]),
        abstract(shapes),
    )


@pytest.mark.parametrize("collection", [(), ("params",)])
def test_boxes_and_collections_inside_params(collection, tmp_path):
    """Partitioned parameters have a level named `value`, as their moments have; MaxText has
    `params` below `params`."""
    tx = optax.MultiSteps(optax.adamw(1e-3), 3)
    wrap = functools.partial(functools.reduce, lambda tree, key: {key: tree}, collection)
    plain = {"embed": {"w": (7, 5)}}
    layers = {f"layer_{i}": {"w": (6, 5), "b": (5,)} for i in range(COUNT)}
    state = randomized(train_state(wrap(boxed({**plain, **layers}, ("embed",))), tx))
    ckpt = put(tmp_path / "a", state)
    whole = {**plain, "layers": {"w": (COUNT, 6, 5), "b": (COUNT, 5)}}
    wanted = form(train_state(wrap(boxed(whole, ("layers", "embed"))), tx))
    at = "/".join(("params", *collection))
    stacked = stack(ckpt, f"{at}/layer_{{}}", f"{at}/layers")
    assert form_of(stacked) == wanted
    original = layouts.saved_leaves(read(tmp_path / "a"))
    values = expected(original, wanted, [f"layer_{i}" for i in range(COUNT)])
    assert by_path(got(stacked, tmp_path / "b")) == values
    back = unstack(stacked, f"{at}/layers", f"{at}/layer_{{}}")
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def random_arrays(tree, seed=0):
    """A tree with random arrays in the place of shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(layouts.random_array(rng, shape)),
        tree,
        is_leaf=lambda value: isinstance(value, tuple),
    )


def test_lists_stay_lists(tmp_path):
    """In the pattern by their positions, or by a star; not those that the layers were."""
    block = {f"layer_{i}": {"w": (2, 3)} for i in range(2)}
    tree = random_arrays(
        {"params": [block, {"w": (3,)}, block], "opt": [{"mu": [block, {}, block]}]}
    )
    ckpt = put(tmp_path / "a", tree)
    star = stack(ckpt, "params/*/layer_{}", "params/*/layers")
    first = stack(ckpt, "params/0/layer_{}", "params/0/layers")
    both = stack(first, "params/2/layer_{}", "params/2/layers")
    assert form_of(star) == form_of(both)
    leaves = layouts.saved_leaves(tree)

    def whole(*root):
        parts = [leaves[(*root, f"layer_{i}", "w")] for i in range(2)]
        return {"layers": {"w": jnp.asarray(np.stack(parts))}}

    wanted = {
        "params": [whole("params", 0), tree["params"][1], whole("params", 2)],
        "opt": [{"mu": [whole("opt", 0, "mu", 0), {}, whole("opt", 0, "mu", 2)]}],
    }
    layouts.assert_same_tree(got(star, tmp_path / "b"), wanted)
    layouts.assert_same_tree(got(both, tmp_path / "c"), wanted)
    back = unstack(star, "params/*/layers", "params/*/layer_{}")
    layouts.assert_same_tree(got(back, tmp_path / "d"), tree)
    as_one = stack(
        put(tmp_path / "e", {"params": {"l": [tree["params"][0]] * 2}}), "params/l/{}", "params/l"
    )
    assert form_of(as_one) == {
        ("params", "l", f"layer_{i}", "w"): ((2, 2, 3), np.dtype("float32")) for i in range(2)
    }


def test_what_has_no_array_follows_if_all_layers_have_the_same(tmp_path):
    extra = {"none": None, "dict": {}, "list": [], "text": "relu"}
    tree = {"params": {f"layer_{i}": {"w": jnp.ones((2, 3)), **extra} for i in range(3)}}
    ckpt = put(tmp_path / "a", tree)
    stacked = stack(ckpt, "params/layer_{}", "params/layers")
    wanted = {"params": {"layers": {"w": jnp.ones((3, 2, 3)), **extra}}}
    layouts.assert_same_tree(got(stacked, tmp_path / "b"), wanted)
    back = unstack(stacked, "params/layers", "params/layer_{}")
    layouts.assert_same_tree(got(back, tmp_path / "c"), tree)


def test_state_on_the_host(tmp_path):
    """numpy arrays stay such, the zeros of adafactor's too."""
    block, tx = OPTIMIZERS["adafactor with momentum"]
    state = jax.tree.map(np.asarray, looped(block, tx)).replace(step=7)
    ckpt = put(tmp_path / "a", state)
    stacked = stack(ckpt, "params/layer_{}", "params/layers")
    found = layouts.saved_leaves(got(stacked, tmp_path / "b"))
    assert {type(leaf) for leaf in found.values()} == {np.ndarray, int, type(None)}
    back = unstack(stacked, "params/layers", "params/layer_{}")
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def test_python_numbers_become_an_array(tmp_path):
    tree = {"params": {f"layer_{i}": {"rate": 0.5 + i, "n": i} for i in range(3)}}
    stacked = stack(put(tmp_path / "a", tree), "params/layer_{}", "params/layers")
    wanted = {"params": {"layers": {"rate": np.arange(3) + 0.5, "n": np.arange(3)}}}
    layouts.assert_same_tree(got(stacked, tmp_path / "b"), wanted)


# Whose layers, and whose state


def test_other_layers_of_the_same_names_stay(tmp_path):
    """Encoder and decoder, with one optimizer; and the parameters' own names end alike."""
    side = {**{f"layer_{i}": {"w": (2, 3)} for i in range(2)}, "w": (3,)}
    tx = optax.adam(1e-3)
    shapes = {"encoder": side, "decoder": side, "w": (4,), "layer_0": {"w": (2, 3)}}
    state = randomized(train_state(abstract(shapes), tx))
    ckpt = put(tmp_path / "a", state)
    stacked = stack(ckpt, "params/encoder/layer_{}", "params/encoder/layers")
    wanted = form(
        train_state(abstract({**shapes, "encoder": {"layers": {"w": (2, 2, 3)}, "w": (3,)}}), tx)
    )
    assert form_of(stacked) == wanted
    values = expected(fields(state), wanted, ["layer_0", "layer_1"])
    assert by_path(got(stacked, tmp_path / "b")) == values
    back = unstack(stacked, "params/encoder/layers", "params/encoder/layer_{}")
    assert by_path(got(back, tmp_path / "c")) == by_path(read(tmp_path / "a"))


def test_one_stacked_array_among_others_that_are_called_so(tmp_path):
    tree = random_arrays({"params": {"embed": {"w": (3, 5)}, "layers": {"w": (3, 2)}}})
    tree["opt_state"] = random_arrays({"mu": {"embed": {"w": (3, 5)}, "layers": {"w": (3, 2)}}}, 1)
    back = unstack(put(tmp_path / "a", tree), "params/layers", "params/layer_{}")
    for inner in (tree["params"], tree["opt_state"]["mu"]):
        layers = inner.pop("layers")["w"]
        inner |= {f"layer_{i}": {"w": layers[i]} for i in range(3)}
    layouts.assert_same_tree(got(back, tmp_path / "b"), tree)


def test_of_two_models_one_is_stacked(tmp_path):
    """Each has an optimizer, and both have layers of the same names."""
    tx = optax.adam(1e-3)
    looped_shapes = {f"layer_{i}": {"w": (2, 3)} for i in range(2)}
    one, other = (randomized(train_state(abstract(looped_shapes), tx), seed) for seed in (0, 1))
    ckpt = put(tmp_path / "a", {"actor": one, "critic": other})
    stacked = stack(ckpt, "actor/params/layer_{}", "actor/params/layers")
    whole = train_state(abstract({"layers": {"w": (2, 2, 3)}}), tx)
    assert form_of(stacked) == form({"actor": whole, "critic": other})
    values = expected(fields(one), form(whole), ["layer_0", "layer_1"])
    found = by_path(got(stacked, tmp_path / "b"))
    assert {p[1:]: bits for p, bits in found.items() if p[0] == "actor"} == values
    assert {p[1:]: bits for p, bits in found.items() if p[0] == "critic"} == by_path(parts(other))
    both = stack(ckpt, "*/params/layer_{}", "*/params/layers")
    assert form_of(both) == form({"actor": whole, "critic": whole})
    values = expected(fields(other), form(whole), ["layer_0", "layer_1"])
    found = by_path(got(both, tmp_path / "c"))
    assert {p[1:]: bits for p, bits in found.items() if p[0] == "critic"} == values


def test_all_collections_at_once(tmp_path):
    """Statistics have their own pattern, and no moments; averages of parameters follow these."""
    layers = {f"layer_{i}": {"w": (2, 3), "b": (3,)} for i in range(2)}
    stats = {f"layer_{i}": {"mean": (3,)} for i in range(2)}
    tree = random_arrays(
        {
            "params": layers,
            "batch_stats": stats,
            "ema_params": layers,
            "opt_state": [{"mu": layers, "count": ()}],
        }
    )
    ckpt = put(tmp_path / "a", tree)
    stacked = stack(ckpt, "*/layer_{}", "*/layers")
    leaves = layouts.saved_leaves(tree)
    wanted = {}
    for path, leaf in leaves.items():
        if "layer_0" in path:
            place = path.index("layer_0")
            parts = [leaves[(*path[:place], f"layer_{i}", *path[place + 1 :])] for i in range(2)]
            stack_of = jnp.asarray(np.stack(parts))
            wanted[(*path[:place], "layers", *path[place + 1 :])] = layouts.bits(stack_of)
        elif "layer_1" not in path:
            wanted[path] = layouts.bits(leaf)
    assert by_path(got(stacked, tmp_path / "b")) == wanted
    params = stack(ckpt, "params/layer_{}", "params/layers")
    assert {path for path in params if "layers" in path} == {
        path for path in wanted if "layers" in path and path[0] != "batch_stats"
    }


def test_state_beside_parameters_that_are_not_in_params(tmp_path):
    """Where nothing is called `params` or `model`, what is below `opt_state` follows."""
    layers = {f"layer_{i}": {"w": (2, 3)} for i in range(2)}
    tree = random_arrays(
        {
            "encoder": layers,
            "decoder": layers,
            "opt_state": {"mu": {"encoder": layers, "decoder": layers}},
        }
    )
    stacked = stack(put(tmp_path / "a", tree), "encoder/layer_{}", "encoder/layers")
    assert [path for path in stacked if "layers" in path] == [
        ("encoder", "layers", "w"),
        ("opt_state", "mu", "encoder", "layers", "w"),
    ]


def test_a_copy_of_the_parameters_follows_and_is_told(tmp_path):
    layers = {f"layer_{i}": {"w": (2, 3)} for i in range(2)}
    tree = random_arrays({"params": layers, "ema_params": layers})
    stacked = stack(put(tmp_path / "a", tree), "params/layer_{}", "params/layers")
    assert stacked.notes == ("`ema_params` follows the parameters: 1 leaf",)
    whole = {
        key: {"layers": {"w": np.stack([tree[key][f"layer_{i}"]["w"] for i in range(2)])}}
        for key in tree
    }
    assert {p: x[1:] for p, x in by_path(got(stacked, tmp_path / "b")).items()} == {
        p: x[1:] for p, x in by_path(whole).items()
    }
    back = unstack(stacked, "params/layers", "params/layer_{}")
    assert back.notes == (*stacked.notes, "`ema_params` follows the parameters: 2 leaves")


def test_text_that_is_called_as_parameters_are_stays(tmp_path):
    tree = {
        "params": {f"layer_{i}": {"w": jnp.ones((2, 3))} for i in range(2)},
        "names": {f"layer_{i}": {"w": f"of {i}"} for i in range(2)},
    }
    stacked = stack(put(tmp_path / "a", tree), "params/layer_{}", "params/layers")
    wanted = {"params": {"layers": {"w": jnp.ones((2, 2, 3))}}, "names": tree["names"]}
    layouts.assert_same_tree(got(stacked, tmp_path / "b"), wanted)


def test_nothing_is_read_and_the_source_stays(tmp_path):
    ckpt = put(tmp_path / "a", looped(BLOCK, optax.adam(1e-3)))
    before = layouts.hashes(tmp_path / "a")
    first = form_of(ckpt)
    stacked = stack(ckpt, "params/layer_{}", "params/layers")
    assert form_of(ckpt) == first
    assert stacked.retyped
    assert stacked.source is ckpt.source
    got(stacked, tmp_path / "b")
    assert layouts.hashes(tmp_path / "a") == before


# Meshes


def on_mesh(sizes, names, count=2):
    """A state on a mesh, and where its parameters are: two kinds of leaves."""
    mesh = layouts.mesh(sizes, names)
    tx = optax.adafactor(1e-3, momentum=0.9)
    shapes = {f"layer_{i}": {"w": (256, 128), "b": (128,)} for i in range(count)}
    state = randomized(train_state(abstract(shapes), tx))

    def spec(path, leaf):
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        if getattr(leaf, "ndim", 0) == 2:
            return P(None, names[1])
        whole = "w" in keys and leaf.shape == (128,)
        return P(names[1]) if whole or ("b" in keys and leaf.shape == (128,)) else P()

    def place(path, leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, spec(path, leaf)))

    return jax.tree_util.tree_map_with_path(place, state)


def specs(tree):
    """Path -> the spec of each array that Orbax has read."""
    return {
        path: leaf.sharding.spec
        for path, leaf in layouts.saved_leaves(tree).items()
        if isinstance(leaf, jax.Array)
    }


def full(spec, ndim):
    return (*spec, *(None,) * ndim)[:ndim]


@pytest.mark.parametrize("names", [(), "stage", ("stage",)])
@pytest.mark.parametrize("axis", [0, -1])
def test_layers_on_a_mesh(names, axis, tmp_path):
    """The new axis is whole, or over the axes that are named; so it is in moments, of which
    adafactor's factors lack an axis."""
    state = on_mesh((2, 4), ("stage", "model"))
    ckpt = put(tmp_path / "a", state)
    stacked = stack(ckpt, "params/layer_{}", "params/layers", axis, names=names)
    new = "stage" if names else None
    found = specs(got(stacked, tmp_path / "b"))
    ends = {
        ("w", 3): (new, None, "model") if axis == 0 else (None, "model", new),
        ("b", 2): (new, "model") if axis == 0 else ("model", new),
    }
    leaves = {path: leaf for path, leaf in stacked.items() if isinstance(leaf, ArrayHandle)}
    checked = set()
    for path, spec in found.items():
        ndim = len(leaves[path].shape)
        key = path[-1], ndim
        if "layers" not in path or leaves[path].shape == (1,):
            assert full(spec, ndim) == (None,) * ndim
        elif key in ends:
            assert full(spec, ndim) == ends[key]
        else:
            kept = "model" if "v_row" in path else None
            parts = (new, kept) if axis == 0 else (kept, new)
            assert (path[-1], full(spec, ndim)) == ("w", parts)
        checked.add((path[-1], ndim))
    assert checked >= {("w", 3), ("w", 2), ("b", 2)}
    assert {handle.sharding.mesh.axis_sizes for handle in leaves.values() if handle.sharding} == {
        (2, 4)
    }
    back = unstack(stacked, "params/layers", "params/layer_{}", axis)
    restored = got(back, tmp_path / "c")
    assert by_path(restored) == by_path(read(tmp_path / "a"))
    before, after = specs(read(tmp_path / "a")), specs(restored)
    ranks = {path: len(leaf.shape) for path, leaf in ckpt.items() if isinstance(leaf, ArrayHandle)}
    assert {path: full(spec, ranks[path]) for path, spec in after.items()} == {
        path: full(spec, ranks[path]) for path, spec in before.items()
    }


# What is refused


def tree_of(shapes, root="params"):
    """Arrays of ones; a shape may be a leaf without a value, too."""
    make = lambda leaf: jnp.ones(leaf) if isinstance(leaf, tuple) else leaf  # noqa: E731
    return {root: jax.tree.map(make, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))}


ALIKE = {"l0": {"w": (2, 3)}, "l1": {"w": (2, 3)}}
PATTERN_HINT = (
    "\n\nhint: `params/layer_{}` stands for params/layer_0, params/layer_1 and so on; "
    "`*` for any key"
)


def wrong(message):
    """The type of an error."""
    is_argument = message.startswith("that does not say which layers")
    return reshard.ArgumentError if is_argument else TreeMismatchError


@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        (
            ALIKE,
            ("params/layer_{}", "params/layers"),
            "no layer matches `params/layer_{}`\n\n"
            "hint: the nearest leaf is `params/l0/w`" + PATTERN_HINT[1:],
        ),
        (
            ALIKE,
            ("params/l{}", "params/l", 0, [4, 5]),
            "no layer matches `params/l{}`\n\n"
            "hint: the nearest leaf is `params/l0/w`" + PATTERN_HINT[1:],
        ),
        (
            ALIKE,
            ("zzz_{}", "params/l"),
            "no layer matches `zzz_{}`" + PATTERN_HINT,
        ),
        (
            ALIKE,
            ("params/l", "params/*/l{}", 0, [0, 0]),
            "that does not say which layers\n"
            "  `params/l` must have one `{}`, for the number of a layer\n"
            "  `params/*/l{}` must have no `{}`: it is all layers\n"
            "  `params/l` and `params/*/l{}` must have as many `*`\n"
            "  indices [0, 0] must be numbers of layers, each once" + PATTERN_HINT,
        ),
        (
            ALIKE,
            ("params/s{}/l{}", "params/l", 0, [-1]),
            "that does not say which layers\n"
            "  `params/s{}/l{}` must have one `{}`, for the number of a layer\n"
            "  indices [-1] must be numbers of layers, each once" + PATTERN_HINT,
        ),
        (
            ALIKE,
            ("params/l{}", "params/l", 0, []),
            "that does not say which layers\n"
            "  indices [] must be numbers of layers, each once" + PATTERN_HINT,
        ),
        # Gaps, and layers that differ.
        (
            {"l1": {"w": (2,)}, "l2": {"w": (2,)}, "m0": {"w": (2,)}, "m2": {"w": (3,)}},
            ("params/*{}", "params/all_*"),
            "the layers are not alike\n"
            "  params/all_l: there is no layer 0, only 1, 2\n"
            "  params/all_m: there is no layer 1, only 0, 2\n"
            "\nhint: indices=[1, 2]\nhint: indices=[0, 2]",
        ),
        (
            ALIKE,
            ("params/l{}", "params/l", 0, [1, 0, 7, 3]),
            "the layers are not alike\n"
            "  params/l: there is no layer 7, 3, only 0, 1\n"
            "\nhint: indices=[0, 1]",
        ),
        (
            {
                "l0": {"a": (2,), "b": (2, 3), "c": (4,), "e": None, "n": (3,)},
                "l1": {"a": (2,), "b": (3, 3), "c": (4,), "d": (5,), "e": {}, "n": None},
                "l2": {"a": (2,), "b": (2, 3), "e": None, "n": (3,)},
            },
            ("params/l{}", "params/l"),
            "the layers are not alike\n"
            "  params/l/b: it is jax.Array float32[2, 3] or jax.Array float32[3, 3]\n"
            "  params/l/c: layer 2 has none\n"
            "  params/l/e: it is None or {}\n"
            "  params/l/n: it is jax.Array float32[3] or None\n"
            "  params/l/d: layer 0, 2 has none",
        ),
        (
            {"l0": {"w": jnp.ones(3, "bfloat16")}, "l1": {"w": np.ones(3)}, "l2": {"w": 1.0}},
            ("params/l{}", "params/l"),
            "the layers are not alike\n"
            "  params/l/w: it is jax.Array bfloat16[3] or np.ndarray float64[3] "
            "or scalar float64[]",
        ),
        (
            {"l0": {"w": (2,)}, "l00": {"w": (2,)}, "l1": {"w": (2,)}},
            ("params/l{}", "params/l"),
            "the layers are not alike\n  params/l0/w and params/l00/w are both 0",
        ),
        # Axes that arrays do not have.
        (
            {"l0": {"b": (3,), "w": (2, 3)}, "l1": {"b": (3,), "w": (2, 3)}},
            ("params/l{}", "params/l", 2),
            "steps that cannot be carried out\n"
            "  params/l0/b + params/l1/b -> params/l/b  Stack(axis=2, names=()): "
            "[3, 1] has no axis 2",
        ),
        (
            {"l0": {"b": (), "w": (2, 3)}, "l1": {"b": (), "w": (2, 3)}},
            ("params/l{}", "params/l", -2),
            "steps that cannot be carried out\n"
            "  params/l0/b + params/l1/b -> params/l/b  Stack(axis=-2, names=()): "
            "[1] has no axis -2",
        ),
        # Places that are taken.
        (
            {**ALIKE, "l": {"w": (1,), "v": (1,)}, "m": (1,)},
            ("params/l{}", "params/l"),
            "there are leaves in these places already\n  params/l/w",
        ),
        (
            {**ALIKE, "l": (1,)},
            ("params/l{}", "params/l"),
            "there are leaves in these places already\n  params/l/w, below the leaf params/l",
        ),
        (
            {"l0": (2,), "l1": (2,), "l": {"w": (1,), "v": {"u": (1,)}}},
            ("params/l{}", "params/l"),
            "there are leaves in these places already\n"
            "  params/l/v/u, below the leaf params/l\n"
            "  params/l/w, below the leaf params/l",
        ),
        (
            {**ALIKE, "l.w": (1,)},
            ("params/l{}", "params/l"),
            "there are leaves in these places already\n"
            "  params/l/w, stored as `params.l.w`, as params/l.w is",
        ),
        (
            {"l0": {"w": jax.random.key(0)}, "l1": {"w": jax.random.key(1)}},
            ("params/l{}", "params/l"),
            "params/l0/w: PRNG keys are only moved as they are",
        ),
    ],
)
def test_layers_that_cannot_be_stacked(shapes, arguments, message, tmp_path):
    ckpt = put(tmp_path / "a", tree_of(shapes))
    layers, into, *rest = arguments
    axis, indices = (*rest, *(0, None)[len(rest) :])
    with pytest.raises(wrong(message)) as error:
        stack(ckpt, layers, into, axis, indices=indices)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        (
            ALIKE,
            ("params/layers", "params/layer_{}"),
            "no leaf is below `params/layers`\n\nhint: the nearest leaf is `params/l1/w`",
        ),
        (
            {"layers": {"w": (2,)}},
            ("params/layer", "params/layer_{}"),
            "no leaf is below `params/layer`\n\nhint: the nearest leaf is `params/layers/w`",
        ),
        (
            ALIKE,
            ("params/l{}", "params/*/l", 0, [1, 1]),
            "that does not say which layers\n"
            "  `params/*/l` must have one `{}`, for the number of a layer\n"
            "  `params/l{}` must have no `{}`: it is all layers\n"
            "  `params/*/l` and `params/l{}` must have as many `*`\n"
            "  indices [1, 1] must be numbers of layers, each once" + PATTERN_HINT,
        ),
        (
            {"a": {"b": (2,), "w": (3, 2)}, "c": {"b": (3,), "w": (3, 2)}, "d": {"n": None}},
            ("params/*", "params/*_{}"),
            "axis 0 is not that of the layers in all arrays\n"
            "  params/a/b: 2 layers\n"
            "  params/a/w: 3 layers\n"
            "  params/d: no array",
        ),
        (
            {"l": {"b": (2,), "s": (), "w": (3, 2)}},
            ("params/l", "params/l{}", -1),
            "axis -1 is not that of the layers in all arrays\n"
            "  params/l/b: 2 layers\n"
            "  params/l/s: no such axis",
        ),
        (
            {"l": {"b": (2,)}},
            ("params/l", "params/l{}", 1),
            "axis 1 is not that of the layers in all arrays\n  params/l/b: no such axis",
        ),
        (
            {"l": {"b": (2,)}},
            ("params/l", "params/l{}", 0, [0, 1, 2]),
            "axis 0 is not that of the 3 layers in all arrays\n  params/l/b: 2 layers",
        ),
        (
            {"l": {"b": (2,), "w": (2, 3)}, "l0": {"b": (1,)}, "l1": (1,)},
            ("params/l", "params/l{}"),
            "there are leaves in these places already\n"
            "  params/l0/b\n"
            "  params/l1/b, below the leaf params/l1\n"
            "  params/l1/w, below the leaf params/l1",
        ),
    ],
)
def test_layers_that_cannot_be_unstacked(shapes, arguments, message, tmp_path):
    ckpt = put(tmp_path / "a", tree_of(shapes))
    stacked, into, *rest = arguments
    axis, indices = (*rest, *(0, None)[len(rest) :])
    with pytest.raises(wrong(message)) as error:
        unstack(ckpt, stacked, into, axis, indices=indices)
    assert str(error.value) == message


STATE_HINT = "\n\nhint: drop it, and initialise it when restoring: `select(ckpt, drop=...)`"


@pytest.mark.parametrize(
    ("state", "problems"),
    [
        (
            {"mu": {"l0": {"w": (2, 3)}, "l1": {"w": None}}, "nu": {"l1": {"w": (2, 3)}}},
            [
                "  opt_state/mu/l0/w + opt_state/mu/l1/w: they become one, but opt_state/mu/l1/w "
                "has no value",
                "  opt_state/nu/l0/w + opt_state/nu/l1/w: they become one, but opt_state/nu/l0/w "
                "has no value",
            ],
        ),
        (
            {"history": {"l0": {"w": (5, 2, 3)}, "l1": {"w": (5, 2, 3)}}},
            [
                "  opt_state/history/l0/w + opt_state/history/l1/w: its shape is [5, 2, 3] and its "
                "parameter's [2, 3]",
            ],
        ),
        (
            {"mu": {"l0": {"w": [(2,), (3,)]}, "l1": {"w": {"value": (2, 3)}}}},
            [
                "  opt_state/mu/l0/w/0: it is not in the place of params/l0/w",
                "  opt_state/mu/l0/w/1: it is not in the place of params/l0/w",
                "  opt_state/mu/l1/w/value: it is not in the place of params/l1/w",
            ],
        ),
    ],
)
def test_state_that_cannot_follow(state, problems, tmp_path):
    ckpt = put(tmp_path / "a", tree_of(ALIKE) | tree_of(state, "opt_state"))
    with pytest.raises(TreeMismatchError) as error:
        stack(ckpt, "params/l{}", "params/l")
    summary = "optimizer state that cannot follow its parameters"
    assert str(error.value) == "\n".join([summary, *problems]) + STATE_HINT


def test_moments_in_one_vector_are_refused(tmp_path):
    """Beside the optimizer's state there may be tables of anything."""
    params = abstract({"l0": {"w": (2, 3)}, "l1": {"w": (2, 3)}})
    state = randomized(train_state(params, optax.flatten(optax.adam(1e-3))))
    tree = {"params": state.params, "table": np.arange(12.0)}
    ckpt = put(tmp_path / "a", tree | {"opt_state": state.opt_state})
    with pytest.raises(TreeMismatchError) as error:
        stack(ckpt, "params/l{}", "params/l")
    assert str(error.value) == (
        "optimizer state that cannot follow its parameters\n"
        + "\n".join(
            f"  opt_state/0/{name}: float32[12] mirrors no parameter, and parameters change their "
            "order, shape or number"
            for name in ("mu", "nu")
        )
        + STATE_HINT
    )
    assert "table" in stack(put(tmp_path / "b", tree), "params/l{}", "params/l")


def test_placeholders_that_are_not_zero(tmp_path):
    """An optimizer may have a number for each parameter, which is of none of the stacked ones."""
    state = {name: {f"l{i}": {"w": np.full(1, i, "f4")} for i in range(2)} for name in ("a", "b")}
    state["c"] = {f"l{i}": {"w": np.zeros(1, "f4")} for i in range(2)}
    ckpt = put(tmp_path / "a", tree_of(ALIKE) | {"opt_state": state})
    with pytest.raises(TreeMismatchError) as error:
        stack(ckpt, "params/l{}", "params/l")
    assert str(error.value) == (
        "placeholders that hold values\n  opt_state/a/l1/w\n  opt_state/b/l1/w"
    )


def test_axes_that_the_layers_cannot_be_partitioned_over(tmp_path):
    on = layouts.mesh((2, 4), ("stage", "model"))
    place = lambda shape, *spec: jax.device_put(np.ones(shape, "f4"), NamedSharding(on, P(*spec)))  # noqa: E731
    layers = {f"l{i}": {"w": place((4, 8), None, "model"), "b": place((4,))} for i in range(3)}
    ckpt = put(tmp_path / "a", {"params": layers})
    for names, message in {
        "pipe": "the layers cannot be partitioned over pipe\n"
        "  `stage=2,model=4` has no pipe\n\n"
        'hint: put it on a mesh that has them: `to_mesh(ckpt, "stage=2,model=4")`',
        "stage": "the layers cannot be partitioned so\n"
        "  params/l/b  float32[3, 4]: dimension 0 of 3 does not divide by 2 (stage)\n"
        "  params/l/w  float32[3, 4, 8]: dimension 0 of 3 does not divide by 2 (stage)",
        "model": "the layers cannot be partitioned so\n"
        "  params/l/b  float32[3, 4]: dimension 0 of 3 does not divide by 4 (model)\n"
        "  params/l/w  float32[3, 4, 8]: P('model', None, 'model') uses axis 'model' 2 times\n"
        "  params/l/w  float32[3, 4, 8]: dimension 0 of 3 does not divide by 4 (model)",
    }.items():
        with pytest.raises(ShardingError) as error:
            stack(ckpt, "params/l{}", "params/l", names=names)
        assert str(error.value) == message
    alone = put(tmp_path / "b", tree_of(ALIKE))
    with pytest.raises(ShardingError) as error:
        stack(alone, "params/l{}", "params/l", names=["stage", "model"])
    assert str(error.value) == (
        "the layers cannot be partitioned over stage and model\n"
        "  the checkpoint was saved on no mesh\n\n"
        'hint: put it on a mesh that has them: `to_mesh(ckpt, "stage=2,model=4")`'
    )
    mixed = put(tmp_path / "c", {"params": {"l0": place((2, 3)), "l1": jnp.ones((2, 3))}})
    with pytest.raises(ShardingError) as error:
        stack(mixed, "params/l{}", "params/l", names="stage")
    assert str(error.value) == (
        "the layers cannot be partitioned so\n  params/l: not all layers are on one mesh"
    )
    moved = reshard.to_mesh(mixed, "stage=2,model=2")
    assert form_of(stack(moved, "params/l{}", "params/l", names="stage")) == {
        ("params", "l"): ((2, 2, 3), np.dtype("float32"))
    }


def test_a_new_axis_over_a_mesh_that_it_is_put_on_first(tmp_path):
    """The mesh that it was saved on may lack the names."""
    on = layouts.mesh((2, 4))
    sharding = NamedSharding(on, P(None, "model"))
    layers = {f"l{i}": jax.device_put(np.full((4, 8), i, "f4"), sharding) for i in range(4)}
    ckpt = put(tmp_path / "a", {"params": layers})
    moved = reshard.to_mesh(ckpt, "stage=2,model=4")
    restored = got(stack(moved, "params/l{}", "params/l", names="stage"), tmp_path / "b")
    assert specs(restored) == {("params", "l"): P("stage", None, "model")}
    whole = jnp.asarray(np.stack([np.full((4, 8), i, "f4") for i in range(4)]))
    assert by_path(restored) == by_path({"params": {"l": whole}})


# There and back

SIZES = st.sampled_from([2, 3, 4, 140])
COUNTS = st.integers(1, 3)


def stacked_shapes(layer, count, axis):
    """The shapes of a layer, with the layers along a new axis."""
    if isinstance(layer, dict):
        return {key: stacked_shapes(shape, count, axis) for key, shape in layer.items()}
    return np.stack([np.empty(layer)] * count, axis).shape


@st.composite
def states(draw):
    """A random state with groups of layers beside other modules, a new axis, and what optax makes
    of stacked layers."""
    axis = draw(st.sampled_from([0, 0, 1, -1, -2]))
    shape = st.lists(SIZES, min_size=int(axis in (1, -2)), max_size=2).map(tuple)
    names = st.sampled_from(["kernel", "bias", "mu", "v", "w.x", "a/b"])
    module = st.dictionaries(names, shape, min_size=1, max_size=2)
    looped = {"embed": draw(module), "mu": draw(module)}
    stacked = dict(looped)
    for group in draw(st.lists(st.sampled_from(["dense", "moe", "nu"]), min_size=1, unique=True)):
        layer, count = {"attention": draw(module), "mlp": {"0": draw(module)}}, draw(COUNTS)
        looped |= {f"{group}_{i}": layer for i in range(count)}
        stacked[f"all_{group}"] = stacked_shapes(layer, count, axis)
    chain = draw(st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1, max_size=2, unique=True))
    txs = [OPTIMIZERS[name][1] for name in chain]
    tx = optax.chain(*(getattr(tx, "gradient_transformation", lambda tx=tx: tx)() for tx in txs))
    state = randomized(train_state(abstract(looped), tx), draw(st.integers(0, 99)))
    return state, axis, form(train_state(abstract(stacked), tx))


@settings(deadline=None, max_examples=examples(20))
@given(states())
def test_random_states_become_what_optax_has_of_stacked_layers_and_back(tmp_path_factory, case):
    """Or they are refused since adafactor would look at the layers all together."""
    state, axis, wanted = case
    folder = tmp_path_factory.mktemp("case")
    ckpt = put(folder / "a", state)
    try:
        stacked = stack(ckpt, "params/*_{}", "params/all_*", axis)
    except TreeMismatchError as error:
        assert error.summary == "optimizer state that cannot follow its parameters"
        reasons = ("would be factored over", "adafactor may factor a parameter of the shape")
        assert all(any(reason in text for reason in reasons) for text in error.problems)
        return
    assert form_of(stacked) == wanted
    back = unstack(stacked, "params/all_*", "params/*_{}", axis)
    assert form_of(back) == form_of(ckpt)
    assert by_path(got(back, folder / "b")) == by_path(read(folder / "a"))


# Leaf maps

ARRAYS = ("a", "b", "c", "d", "e")


def handles(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {key: layouts.random_array(rng, (2, 3)) for key in ARRAYS}
    tree = {"in": arrays, "z": np.zeros(1, "f4")}
    return tree, put(tmp_path / "a", tree)


def test_a_map_bound_to_leaves(tmp_path):
    tree, ckpt = handles(tmp_path)
    rows = [
        Row((("a",),), (("t",),)),
        Row((("b",), ("c",)), (("a",),), Concat(0)),
        Row((("a",),), (("x",),)),
        Row((("x",),), (("y",),), Transpose((1, 0))),
        Row((("t",),), (("b",),)),
    ]
    shapes = {path: leaf.shape for path, leaf in ckpt.items()}
    zeros = Zeros((1,), np.dtype("f4"))
    before = renaming({("in", key): (key,) for key in ARRAYS if key != "e"}, shapes)
    inside = before.then(from_rows(rows, before.shapes))
    after = renaming({path: ("out", *path) for path in inside.values}, inside.shapes)
    values = {**inside.then(after).values, ("out", "n"): zeros}
    found = LeafMap(values, {}, (), {("z",): zeros})
    assert found.not_zero(ckpt) == []
    made = found.bind(ckpt)
    assert {path: leaf.path for path, leaf in made.items()} == {path: path for path in made}
    result = ckpt.replace(made, retyped=True)
    whole = np.concatenate([tree["in"]["b"], tree["in"]["c"]]).T
    wanted = {"y": whole, "b": tree["in"]["a"], "d": tree["in"]["d"], "n": np.zeros(1, "f4")}
    assert by_path(got(result, tmp_path / "b")) == by_path({"out": wanted})
    back = result.replace(found.inverse().bind(result))
    del tree["in"]["e"]
    assert by_path(got(back, tmp_path / "c")) == by_path(tree)
    assert found.inverse().inverse() == found


def test_what_must_be_zero_is_looked_at(tmp_path):
    _, ckpt = handles(tmp_path)
    zeros = {path: Zeros(leaf.shape, leaf.dtype) for path, leaf in ckpt.items()}
    assert LeafMap({}, {}, (), zeros).not_zero(ckpt) == [("in", key) for key in ARRAYS]
