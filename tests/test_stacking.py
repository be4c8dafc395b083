"""Layers on their own and in one array, against numpy, and against what optax and Orbax make of
parameters that are so from the start."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from converted import filled
from flax import nnx
from flax.core import meta
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import BY_NAME, kernels, labelled
from sampling import few
from twins import linear, made, norm

import reshard
from reshard.arrays.handle import ArrayHandle
from reshard.convert.stacking import stack, unstack
from reshard.errors import ShardingError, TreeMismatchError
from reshard.restore.pytrees import StateLeaf, saved_tree

COUNT = 3
BLOCK = {"kernel": (6, 5), "bias": (5,), "norm": {"scale": (4,), "shift": ()}}
# The second largest dimension is what adafactor looks at, from 128 on if not told otherwise.
LARGE = {"kernel": (160, 130), "heads": (4, 140, 135), "small": (5, 8), "bias": (7,), "gain": ()}
# It has factored the kernel from 4 on, and not the others.
FROM_4 = {"kernel": (9, 6), "heads": (8, 7, 5), "table": (12, 3), "bias": (7,)}


def kernels_of_nnx(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-2].key == "kernel", params)


def plain_adafactor(**kwargs):
    """What looks at whole arrays (clipping, parameter scale) is not the same for stacked layers."""
    return optax.adafactor(
        1e-3, clipping_threshold=None, multiply_by_parameter_scale=False, **kwargs
    )


OPTIMIZERS = {
    "no state": (BLOCK, optax.sgd(1e-3)),
    **{name: (BLOCK, tx) for name, tx in BY_NAME.items()},
    "adafactor": (LARGE, plain_adafactor()),
    "adafactor with momentum": (FROM_4, plain_adafactor(momentum=0.9, min_dim_size_to_factor=4)),
    "unfactored adafactor": (LARGE, plain_adafactor(factored=False)),
    "accumulated adafactor": (
        LARGE,
        optax.MultiSteps(plain_adafactor(), 2).gradient_transformation(),
    ),
    "some adafactor": (LARGE, labelled(kernels, plain_adafactor(), optax.adam(1e-3))),
}


def abstract(shapes):
    """A tree of parameters without values."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda value: isinstance(value, tuple),
    )


def arrays_of(shapes):
    """A tree of random arrays."""
    return filled(abstract(shapes))


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
    return state_of({"embed": {"kernel": (7, 5), "bias": (5,)}, **layers_of(block, count)}, tx)


def state_of(shapes, tx, seed=0):
    return randomized(train_state(abstract(shapes), tx), seed)


def layers_of(layer, count=2):
    return {f"layer_{i}": layer for i in range(count)}


def whole(layers, axis=0, into="layers"):
    """Layers in one array each, by numpy."""
    return {into: jax.tree.map(lambda *x: jnp.asarray(np.stack(x, axis)), *layers.values())}


def together(params, axis):
    """The parameters with the layers in one array each."""
    layers = {name: layer for name, layer in params.items() if name != "embed"}
    return {"embed": params["embed"], **whole(layers, axis)}


def put(path, tree):
    """The tree as a checkpoint."""
    shutil.rmtree(path, ignore_errors=True)
    return reshard.open(layouts.save_pytree(path, tree))


read = layouts.load_pytree


def got(ckpt, path):
    """The checkpoint as Orbax reads it once it is saved."""
    shutil.rmtree(path, ignore_errors=True)
    reshard.save(ckpt, path)
    return read(path)


def form(state):
    """Path -> shape and dtype, or the empty container, of all that Orbax saves of a state."""
    return {
        path: (np.shape(leaf.value), getattr(leaf.value, "dtype", np.dtype(type(leaf.value))))
        if isinstance(leaf, StateLeaf)
        else leaf
        for path, leaf in saved_tree(state).items()
    }


def form_of(ckpt):
    return {
        path: (leaf.shape, leaf.dtype) if isinstance(leaf, ArrayHandle) else leaf
        for path, leaf in ckpt.items()
    }


def by_path(tree):
    """Path -> all there is to each leaf."""
    return {path: layouts.bits(leaf) for path, leaf in layouts.saved_leaves(tree).items()}


def values(ckpt):
    """Path -> type and bits of each leaf, as its view has it."""
    return {
        path: (leaf.value_type, layouts.bits(leaf.view().read().result()))
        if isinstance(leaf, ArrayHandle)
        else leaf
        for path, leaf in ckpt.items()
    }


LAYERS = ("params/layer_{}", "params/layers")


def there_and_back(tmp_path, tree, where=LAYERS):
    """The checkpoint of a tree with its layers stacked, which is the tree again once they are on
    their own; and what Orbax reads of it."""
    ckpt = put(tmp_path / "a", tree)
    stacked = stack(ckpt, *where)
    assert_undone(unstack(stacked, *where[::-1]), ckpt)
    return stacked, got(stacked, tmp_path / "b")


def assert_undone(back, ckpt):
    assert form_of(back) == form_of(ckpt)
    assert values(back) == values(ckpt)


def expected(original, wanted, layers=("layer_0", "layer_1"), into="layers", axis=0):
    """What is in the saved form of a state, by numpy from the leaves before. `layers`: the keys of
    the layers, in order; several for each where they were in a container. `wanted`: the form that
    optax gives the state afterwards; its shapes show the axis where moments are parts."""
    result = {}
    for path, like in wanted.items():
        if into not in path:
            result[path] = layouts.bits(original[path])
            continue
        place = path.index(into)
        keys = [key if isinstance(key, tuple) else (key,) for key in layers]
        leaves = [original[(*path[:place], *key, *path[place + 1 :])] for key in keys]
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
    wanted = form(train_state(together(state.params, axis), tx))
    stacked = stack(ckpt, "params/layer_{}", "params/layers", axis)
    assert form_of(stacked) == wanted
    found = expected(fields(state), wanted, [f"layer_{i}" for i in range(COUNT)], axis=axis)
    assert by_path(got(stacked, tmp_path / "b")) == found
    params = {path: bits for path, bits in found.items() if path[0] == "params"}
    assert params == by_path({"params": together(state.params, axis)})
    saved = reshard.open(tmp_path / "b")
    assert_undone(unstack(saved, "params/layers", "params/layer_{}", axis), ckpt)


def parts(state):
    """A train state as a dict."""
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def fields(state):
    """The leaves of a train state, by path."""
    return layouts.saved_leaves(parts(state))


def test_random_state_is_stacked_and_unstacked_and_restored(tmp_path):
    """Keys of layers, beside their weights; the last axis of their data is that of one key."""
    keys = jax.random.split(jax.random.key(3), 3)
    layers = {f"layer_{i}": {"w": layouts.random((2,), seed=i), "key": keys[i]} for i in range(3)}
    path = layouts.save_standard(tmp_path / "in", {"params": layers})
    stacked = stack(reshard.open(path), "params/layer_{}", "params/layers")
    assert stacked["params/layers/key"].shape == (3, 2)
    reshard.save(stacked, tmp_path / "stacked")
    target = {"params": {"layers": {"w": jnp.zeros((3, 2)), "key": keys}}}
    made = reshard.restore(tmp_path / "stacked", target)["params"]["layers"]
    np.testing.assert_array_equal(jax.random.key_data(made["key"]), jax.random.key_data(keys))
    back = unstack(reshard.open(tmp_path / "stacked"), "params/layers", "params/layer_{}")
    assert reshard.diff(back, path, values=True).equal


EXTRA = {"none": None, "dict": {}, "list": [], "text": "relu"}


LAYERED = {  # the tree, where its layers are, the axis, the tree with stacks, undone
    "arrays": (
        {f"w{i:02}": np.full((2, 3), i, "float32") for i in range(12)},
        ("params/w{}", "params/w"),
        1,
        {"w": np.stack([np.full((2, 3), i, "float32") for i in range(12)], 1)},
        False,
    ),
    "several kinds of layers": (
        {"moe_0": {"w": np.ones(3)}, "moe_1": {"w": np.zeros(3)}, "mlp_0": {"v": np.ones(2)}},
        ("params/*_{}", "params/all_*"),
        0,
        {"all_moe": {"w": np.stack([np.ones(3), np.zeros(3)])}, "all_mlp": {"v": np.ones((1, 2))}},
        True,
    ),
    "keys with slashes and signs": (
        {f"mlp/l({i}) *": {"a.b": np.full((2,), i, "float32")} for i in range(2)},
        ('params/"mlp/l({}) *"', 'params/"all/l *"'),
        0,
        {"all/l *": {"a.b": np.stack([np.full((2,), i, "float32") for i in range(2)])}},
        True,
    ),
    "leaves that are no arrays follow if all layers have the same": (
        layers_of({"w": np.ones((2, 3)), **EXTRA}, 3),
        LAYERS,
        0,
        {"layers": {"w": np.ones((3, 2, 3)), **EXTRA}},
        True,
    ),
    "Python numbers become an array": (
        {f"layer_{i}": {"rate": 0.5 + i, "n": i} for i in range(3)},
        LAYERS,
        0,
        {"layers": {"rate": np.arange(3) + 0.5, "n": np.arange(3)}},
        False,
    ),
}


@pytest.mark.parametrize("name", LAYERED)
def test_layers_of_any_form(name, tmp_path):
    tree, where, axis, wanted, undone = LAYERED[name]
    ckpt = put(tmp_path / "a", {"params": tree})
    stacked = stack(ckpt, *where, axis)
    layouts.assert_same_tree(got(stacked, tmp_path / "b"), {"params": wanted})
    if undone:
        assert_undone(unstack(stacked, *where[::-1], axis), ckpt)


# Containers


Block = made(linear=lambda: linear(4, 6), norm=lambda: norm(6))
Looped, Stacked = (
    made(embed=lambda: nnx.Embed(5, 4, rngs=nnx.Rngs(0)), layers=layers)
    for layers in (
        lambda: nnx.List([Block() for _ in range(COUNT)]),
        lambda: nnx.vmap(lambda _: Block())(jnp.arange(COUNT)),
    )
)


def nnx_state(module, tx):
    """A model beside its optimizer, with all leaves random."""

    def make():
        model = module()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    return randomized(nnx.eval_shape(make))


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.masked(optax.lion(1e-3), kernels_of_nnx)])
def test_a_model_of_nnx_and_its_optimizer(tx, tmp_path):
    """List positions are keys, and variables are a level named `value`."""
    state = nnx_state(Looped, tx)
    ckpt = put(tmp_path / "a", state)
    wanted = form_of(put(tmp_path / "w", nnx_state(Stacked, tx)))
    stacked = stack(ckpt, "model/layers/{}", "model/layers")
    assert form_of(stacked) == wanted
    found = expected(
        layouts.saved_leaves(read(tmp_path / "a")),
        wanted,
        [("layers", str(i)) for i in range(COUNT)],
    )
    assert by_path(got(stacked, tmp_path / "b")) == found
    assert_undone(unstack(stacked, "model/layers", "model/layers/{}"), ckpt)


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
    layers = layers_of({"w": (6, 5), "b": (5,)}, COUNT)
    state = randomized(train_state(wrap(boxed({**plain, **layers}, ("embed",))), tx))
    stacks = {**plain, "layers": {"w": (COUNT, 6, 5), "b": (COUNT, 5)}}
    wanted = form(train_state(wrap(boxed(stacks, ("layers", "embed"))), tx))
    at = "/".join(("params", *collection))
    stacked, found = there_and_back(tmp_path, state, (f"{at}/layer_{{}}", f"{at}/layers"))
    assert form_of(stacked) == wanted
    original = layouts.saved_leaves(read(tmp_path / "a"))
    assert by_path(found) == expected(original, wanted, list(layers))


def test_lists_stay_lists(tmp_path):
    """In the pattern by their positions, or by a star; not those that the layers were."""
    block = layers_of({"w": (2, 3)})
    tree = arrays_of({"params": [block, {"w": (3,)}, block], "opt": [{"mu": [block, {}, block]}]})
    star, found = there_and_back(tmp_path, tree, ("params/*/layer_{}", "params/*/layers"))
    ckpt = reshard.open(tmp_path / "a")
    first = stack(ckpt, "params/0/layer_{}", "params/0/layers")
    both = stack(first, "params/2/layer_{}", "params/2/layers")
    assert values(star) == values(both)
    one, other, last = tree["params"]
    mu = tree["opt"][0]["mu"]
    wanted = {
        "params": [whole(one), other, whole(last)],
        "opt": [{"mu": [whole(mu[0]), {}, whole(mu[2])]}],
    }
    layouts.assert_same_tree(found, wanted)
    pair = put(tmp_path / "e", {"params": {"l": [one] * 2}})
    moved = stack(pair, "params/l/*/layer_{}", "params/moved/*/layers")
    assert {*moved} == {("params", "moved", i, "layers", "w") for i in range(2)}
    as_one = stack(pair, "params/l/{}", "params/l")
    assert form_of(as_one) == {
        ("params", "l", f"layer_{i}", "w"): ((2, 2, 3), np.dtype("float32")) for i in range(2)
    }


# Whose layers, and whose state


def test_other_layers_of_the_same_names_stay(tmp_path):
    """Encoder and decoder, with one optimizer; and the parameters' own names end alike."""
    side = {**layers_of({"w": (2, 3)}), "w": (3,)}
    tx = optax.adam(1e-3)
    shapes = {"encoder": side, "decoder": side, "w": (4,), "layer_0": {"w": (2, 3)}}
    state = state_of(shapes, tx)
    where = ("params/encoder/layer_{}", "params/encoder/layers")
    stacked, found = there_and_back(tmp_path, state, where)
    stacks = {**shapes, "encoder": {"layers": {"w": (2, 2, 3)}, "w": (3,)}}
    wanted = form(train_state(abstract(stacks), tx))
    assert form_of(stacked) == wanted
    assert by_path(found) == expected(fields(state), wanted)


def test_of_two_models_one_is_stacked(tmp_path):
    """Each has an optimizer, and both have layers of the same names."""
    tx = optax.adam(1e-3)
    one, other = (state_of(layers_of({"w": (2, 3)}), tx, seed) for seed in (0, 1))
    ckpt = put(tmp_path / "a", {"actor": one, "critic": other})
    stacks = train_state(abstract({"layers": {"w": (2, 2, 3)}}), tx)
    wanted = [expected(fields(state), form(stacks)) for state in (one, other)]
    for pattern, actor, critic, form_of_critic in (
        ("actor", wanted[0], by_path(parts(other)), other),
        ("*", *wanted, stacks),
    ):
        stacked = stack(ckpt, f"{pattern}/params/layer_{{}}", f"{pattern}/params/layers")
        assert form_of(stacked) == form({"actor": stacks, "critic": form_of_critic})
        assert by_path(got(stacked, tmp_path / "b")) == {
            **{("actor", *path): bits for path, bits in actor.items()},
            **{("critic", *path): bits for path, bits in critic.items()},
        }


def test_all_collections_at_once(tmp_path):
    """Statistics have their own pattern, and no moments; averages of parameters follow these, and
    are told of."""
    layers = layers_of({"w": (2, 3), "b": (3,)})
    shapes = {"params": layers, "batch_stats": layers_of({"mean": (3,)}), "ema_params": layers}
    tree = arrays_of({**shapes, "opt_state": [{"mu": layers, "count": ()}]})
    ckpt = put(tmp_path / "a", tree)
    state = {"mu": whole(tree["opt_state"][0]["mu"]), "count": tree["opt_state"][0]["count"]}
    wanted = {**{name: whole(tree[name]) for name in shapes}, "opt_state": [state]}
    layouts.assert_same_tree(got(stack(ckpt, "*/layer_{}", "*/layers"), tmp_path / "b"), wanted)
    params = stack(ckpt, "params/layer_{}", "params/layers")
    assert params.notes == ("`ema_params` follows the parameters: 2 leaves",)
    found = {**wanted, "batch_stats": tree["batch_stats"]}
    layouts.assert_same_tree(got(params, tmp_path / "c"), found)
    back = unstack(params, "params/layers", "params/layer_{}")
    assert back.notes == (*params.notes, "`ema_params` follows the parameters: 4 leaves")


def stays(*roots):
    return tuple(f"`{root}` has other layers than the parameters, and stays" for root in roots)


W = {"w": (7, 5)}
OTHERS = {  # layers of another model
    "more": layers_of(W, 4),
    "many more": layers_of(W, 5),
    "fewer": layers_of(W),
    "other numbers": {f"layer_{n}": W for n in (1, 2, 3)},
    "other names of numbers": {f"layer_0{n}": W for n in range(3)},
    "other shapes": layers_of({"w": (5, 7)}, 3),
    "one other shape": {**layers_of(W, 3), "layer_1": {"w": (5, 7)}},
    "more leaves": layers_of({**W, "b": (3,)}, 3),
    "more leaves in one": {**layers_of(W, 3), "layer_1": {**W, "b": (3,)}},
}
ADAFACTOR = optax.chain(plain_adafactor(momentum=0.9, min_dim_size_to_factor=2), optax.ema(0.5))


def assert_one_follows(tmp_path, tree, one, others, where=LAYERS):
    """Of some trees in one, the first is like that of a checkpoint of its own, the others stay."""
    whole = got(stack(put(tmp_path / "alone", one), *where), tmp_path / "stacked")
    made = stack(put(tmp_path / "a", tree), *where)
    layouts.assert_same_tree(got(made, tmp_path / "b"), {**whole, **others})
    back = unstack(reshard.open(tmp_path / "b"), *where[::-1])
    layouts.assert_same_tree(got(back, tmp_path / "c"), tree)
    return made.notes


@pytest.mark.every_combination
@pytest.mark.parametrize("tx", [optax.adam(1e-3), ADAFACTOR], ids=["adam", "adafactor"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_model_beside_stays_with_its_optimizer(name, tx, tmp_path):
    """At the same level, or one below."""
    one, other = (
        layouts.load_pytree(layouts.save_pytree(tmp_path / f"{n}", parts(state_of(shapes, tx, n))))
        for n, shapes in enumerate(({**layers_of(W, 3), "embed": W}, OTHERS[name]))
    )
    beside = {"critic": other, "old": {"params": other["params"]}}
    assert_one_follows(tmp_path, {**one, **beside}, one, beside)
    flat = {"disc_params": other["params"], "disc_opt_state": other["opt_state"]}
    notes = assert_one_follows(tmp_path, {**one, **flat}, one, flat)
    if "names" not in name:
        assert {*stays("disc_params")} <= {*notes}
    assert not any("follows" in note for note in notes)


@pytest.mark.parametrize("name", ["more", "fewer", "other shapes", "one other shape"])
def test_states_of_two_models_in_one_optimizer(name, tmp_path):
    """Whose it is, its layers show."""
    tx, shapes = optax.adam(1e-3), (layers_of(W, 3), OTHERS[name])
    one, other = (parts(state_of(each, tx, seed)) for seed, each in enumerate(shapes))
    tree = {"params": one["params"], "disc_params": other["params"]}
    tree["opt_state"] = {"gen": one["opt_state"], "disc": other["opt_state"]}
    stacked, found = there_and_back(tmp_path, tree)
    found_one = {"params": found["params"], "opt_state": found["opt_state"]["gen"]}
    alone = put(tmp_path / "one", {"params": one["params"], "opt_state": one["opt_state"]})
    layouts.assert_same_tree(found_one, got(stack(alone, *LAYERS), tmp_path / "d"))
    found_other = {"params": found["disc_params"], "opt_state": found["opt_state"]["disc"]}
    saved = put(tmp_path / "e", {"params": other["params"], "opt_state": other["opt_state"]})
    layouts.assert_same_tree(found_other, got(saved, tmp_path / "f"))
    roots = ("disc_params", "opt_state/disc/0/mu", "opt_state/disc/0/nu")
    assert {*stacked.notes} == {*stays(*roots)}


def test_a_model_of_the_same_layers_beside_follows_with_its_optimizer(tmp_path):
    """As an average of the parameters does; also where its state is factored."""
    one, other = (parts(state_of(layers_of(W, 3), ADAFACTOR, seed)) for seed in (0, 1))
    stacked, found = there_and_back(tmp_path, {**one, "critic": other})
    alone = got(stack(put(tmp_path / "c", other), *LAYERS), tmp_path / "d")
    layouts.assert_same_tree(found["critic"], alone)
    (note,) = stacked.notes
    assert note.startswith("`critic` follows the parameters: ")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_another_model_beside_stays_stacked(count, tmp_path):
    """Unless it has as many layers."""
    one, other = (arrays_of(layers_of({**W, "b": (5,)}, n)) for n in (3, count))
    apart, stacked = (
        {
            "params": form(one),
            "disc_params": make(other),
            "critic": {"params": make(other), "opt_state": {"nu": make(other)}},
            "opt_state": {"gen": {"mu": form(one)}, "disc": {"mu": make(other)}},
        }
        for form, make in ((dict, dict if count == 3 else whole), (whole, whole))
    )
    made = unstack(put(tmp_path / "a", stacked), *LAYERS[::-1])
    layouts.assert_same_tree(got(made, tmp_path / "b"), apart)
    roots = ("disc_params", "critic/params", "critic/opt_state/nu", "opt_state/disc/mu")
    follow = (
        "`disc_params` follows the parameters: 6 leaves",
        "`critic` follows the parameters: 6",
    )
    assert {*made.notes} == ({*stays(*roots)} if count != 3 else {*made.notes})
    assert all(any(note.startswith(start) for note in made.notes) for start in follow) == (
        count == 3
    )


def test_an_average_of_another_dtype_stays(tmp_path):
    params = arrays_of(layers_of(W, 3))
    small = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    embed = layouts.random((3, 2))
    tree = {"params": {**params, "embed": embed}, "ema_params": small, "opt_state": {"mu": params}}
    tree["old"] = {"embed": embed}  # which has no layers
    stacked, found = there_and_back(tmp_path, tree)
    both = {"params": {**whole(params), "embed": embed}, "opt_state": {"mu": whole(params)}}
    layouts.assert_same_tree(found, {**both, "ema_params": small, "old": tree["old"]})
    assert stacked.notes == stays("ema_params")


@pytest.mark.parametrize("leaves", [({"w": (2,)},) * 2, ({"w": (2,)}, {"b": (2,)})])
@pytest.mark.parametrize("indices", [None, [0, 1]])
def test_numbers_with_zeros_ahead_are_other_layers(leaves, indices, tmp_path):
    """Although they may have no leaf in common."""
    layers = {"l0": {"w": (2,), "b": (2,)}, "l1": leaves[0], "l01": leaves[1]}
    text = refused(stack, put(tmp_path / "a", tree_of(layers)), (*ALL, 0, indices))
    assert "\n  params/l01 and params/l1 are both 1" in text


def test_state_beside_parameters_that_are_not_in_params(tmp_path):
    """Where nothing is called `params` or `model`, what is below `opt_state` follows."""
    both = dict.fromkeys(("encoder", "decoder"), layers_of({"w": (2, 3)}))
    tree = arrays_of({**both, "opt_state": {"mu": both}})
    stacked = stack(put(tmp_path / "a", tree), "encoder/layer_{}", "encoder/layers")
    assert [path for path in stacked if "layers" in path] == [
        ("encoder", "layers", "w"),
        ("opt_state", "mu", "encoder", "layers", "w"),
    ]


def test_text_that_is_called_as_parameters_are_stays(tmp_path):
    """But a copy of them follows."""
    layers, names = layers_of({"w": jnp.ones((2, 3))}), layers_of({"w": "of a layer"})
    tree = {"params": layers, "ema_params": layers, "names": names}
    stacked, found = there_and_back(tmp_path, tree)
    assert stacked.notes == ("`ema_params` follows the parameters: 1 leaf",)
    both = dict.fromkeys(("params", "ema_params"), whole(layers))
    layouts.assert_same_tree(found, {**both, "names": names})


# Meshes


def on_mesh():
    """A state on a mesh, each leaf with a dimension of 128 over `model`."""
    mesh = layouts.mesh((2, 4), ("stage", "model"))

    def place(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        last = P("model") if leaf.shape == (128,) else P()
        return jax.device_put(
            leaf, NamedSharding(mesh, P(None, "model") if leaf.ndim == 2 else last)
        )

    tx = optax.adafactor(1e-3, momentum=0.9)
    return jax.tree.map(place, state_of(layers_of({"w": (256, 128), "b": (128,)}), tx))


def specs(ckpt):
    """Path -> the axes of the mesh for each dimension of an array."""
    return {
        path: (*leaf.sharding.spec, *((),) * len(leaf.shape))[: len(leaf.shape)]
        for path, leaf in ckpt.items()
        if isinstance(leaf, ArrayHandle) and leaf.sharding
    }


@pytest.mark.parametrize("names", [(), "stage", ("stage",)])
@pytest.mark.parametrize("axis", [0, -1])
def test_layers_on_a_mesh(names, axis, tmp_path):
    """The new axis is whole, or over the axes that are named; so it is in moments, of which
    adafactor's factors lack an axis."""
    state = on_mesh()
    ckpt = put(tmp_path / "a", state)
    stacked = stack(ckpt, "params/layer_{}", "params/layers", axis, names=names)
    reshard.save(stacked, tmp_path / "b")
    saved = reshard.open(tmp_path / "b")
    before, found, new = specs(ckpt), specs(saved), ("stage",) if names else ()
    for path, spec in found.items():
        expected = ((),) * len(spec)
        if "layers" in path and saved[path].shape != (1,):
            kept = before[tuple("layer_0" if key == "layers" else key for key in path)]
            expected = (new, *kept) if axis == 0 else (*kept, new)
        assert spec == expected
        assert saved[path].sharding.mesh.axis_sizes == (2, 4)
    assert {(path[-1], len(spec)) for path, spec in found.items()} >= {("w", 3), ("w", 2), ("b", 2)}
    back = unstack(saved, "params/layers", "params/layer_{}", axis)
    assert_undone(back, ckpt)
    assert specs(back) == before


# What is refused


def tree_of(shapes, root="params"):
    """Arrays of ones; a shape may be a leaf without a value, too."""
    make = lambda leaf: jnp.ones(leaf) if isinstance(leaf, tuple) else leaf  # noqa: E731
    return {root: jax.tree.map(make, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))}


ALIKE = {"l0": {"w": (2, 3)}, "l1": {"w": (2, 3)}}
ALL = ("params/l{}", "params/l")
PATTERN_HINT = (
    "\n\nhint: `params/layer_{}` stands for params/layer_0, params/layer_1 and so on; "
    "`*` for any key"
)
UNCLEAR = "the path does not name the layers"
NEAREST = "\n\nhint: the leaf nearest to `@` is `params/l0/w`" + PATTERN_HINT[1:]
UNLIKE = "the layers cannot be stacked"
KEYS = "`params/l0/w` holds PRNG keys, which can only be renamed, stacked or unstacked"
STEP = "operations that cannot be applied\n  params/layer_0/b + params/layer_1/b -> params/l/b  "
TAKEN = "leaves exist at these paths already"


def refused(function, ckpt, arguments, **names):
    """The text of the error."""
    before, after, *rest = arguments
    axis, indices = (*rest, *(0, None)[len(rest) :])
    with pytest.raises(reshard.ReshardError) as error:
        function(ckpt, before, after, axis, indices=indices, **names)
    kind = reshard.ArgumentError if error.value.summary == UNCLEAR else TreeMismatchError
    assert type(error.value) is (ShardingError if names else kind)
    return str(error.value)


NOT_ALL = "not all arrays have the {1}layers on axis {0}"
APART = ("params/l", "params/l{}")
REFUSED = [  # a function, the shapes of the tree, the arguments, and the lines of the message
    (
        *(stack, ALIKE, ("params/layer_{}", "params/layers")),
        "no layer matches `params/layer_{}`" + NEAREST.replace("@", "params/layer_{}"),
    ),
    (
        *(stack, ALIKE, (*ALL, 0, [4, 5])),
        "no layer matches `params/l{}`" + NEAREST.replace("@", "params/l{}"),
    ),
    (stack, ALIKE, ("zzz_{}", "params/l"), "no layer matches `zzz_{}`" + PATTERN_HINT),
    (
        *(stack, ALIKE, ("params/l", "params/*/l{}", 0, [0, 0]), UNCLEAR),
        "`params/l` must have one `{}`, for the number of a layer",
        "`params/*/l{}` must have no `{}`: it holds all layers",
        "`params/l` and `params/*/l{}` must have the same number of `*`",
        "indices [0, 0] must be numbers of layers, each once" + PATTERN_HINT,
    ),
    (
        *(stack, ALIKE, ("params/s{}/l{}", "params/l", 0, [-1]), UNCLEAR),
        "`params/s{}/l{}` must have one `{}`, for the number of a layer",
        "indices [-1] must be numbers of layers, each once" + PATTERN_HINT,
    ),
    (
        *(unstack, ALIKE, ("params/l{}", "params/*/l", 0, []), UNCLEAR),
        "`params/*/l` must have one `{}`, for the number of a layer",
        "`params/l{}` must have no `{}`: it holds all layers",
        "`params/*/l` and `params/l{}` must have the same number of `*`",
        "indices [] must be numbers of layers, each once" + PATTERN_HINT,
    ),
    # Gaps, and layers that differ.
    (
        stack,
        {"l1": {"w": (2,)}, "l2": {"w": (2,)}, "m0": {"w": (2,)}, "m2": {"w": (3,)}},
        *(("params/*{}", "params/all_*"), UNLIKE),
        "params/all_l: there is no layer 0, only 1, 2",
        "params/all_m: there is no layer 1, only 0, 2\n\n"
        'hint: reshard.stack(ckpt, "params/*{}", into="params/all_*", indices=[1, 2])\n'
        'hint: reshard.stack(ckpt, "params/*{}", into="params/all_*", indices=[0, 2])',
    ),
    (
        *(stack, ALIKE, (*ALL, 0, [1, 0, 7, 3]), UNLIKE),
        "params/l: there is no layer 7, 3, only 0, 1\n\n"
        'hint: reshard.stack(ckpt, "params/l{}", into="params/l", indices=[0, 1])',
    ),
    (
        stack,
        {
            "l0": {"a": (2,), "b": (2, 3), "c": (4,), "e": None, "n": (3,)},
            "l1": {"a": (2,), "b": (3, 3), "c": (4,), "d": (5,), "e": {}, "n": None},
            "l2": {"a": (2,), "b": (2, 3), "e": None, "n": (3,)},
        },
        *(ALL, UNLIKE),
        "params/l/b: its layers differ: jax.Array float32[2, 3], jax.Array float32[3, 3]",
        "params/l/c: layer 2 has no such leaf",
        "params/l/e: its layers differ: None, {}",
        "params/l/n: its layers differ: jax.Array float32[3], None",
        "params/l/d: layers 0, 2 have no such leaf",
    ),
    (
        stack,
        {"l0": {"w": jnp.ones(3, "bfloat16")}, "l1": {"w": np.ones(3)}, "l2": {"w": 1.0}},
        *(ALL, UNLIKE),
        "params/l/w: its layers differ: jax.Array bfloat16[3], np.ndarray float64[3], "
        "scalar float64[]",
    ),
    (
        *(stack, {"l0": {"w": (2,)}, "l00": {"w": (2,)}, "l1": {"w": (2,)}}, ALL, UNLIKE),
        "params/l0 and params/l00 are both 0",
    ),
    # Axes that arrays do not have.
    (
        *(stack, layers_of({"b": (3,), "w": (2, 3)}), ("params/layer_{}", "params/l", 2)),
        STEP + "2 stacked along axis 2: an array of [3, 1] has no axis 2",
    ),
    (
        *(stack, layers_of({"b": (), "w": (2, 3)}), ("params/layer_{}", "params/l", -2)),
        STEP + "2 stacked along axis -2: an array of [1] has no axis -2",
    ),
    (stack, {f"l{i}": {"w": jax.random.key(i)} for i in range(2)}, (*ALL, 1), KEYS),
    (
        *(unstack, {"l": {"w": jax.random.split(jax.random.key(0), 2)}}, (*APART, -1)),
        KEYS.replace("l0", "l"),
    ),
    (
        *(unstack, {"layers": {"w": (2,)}}, ("params/layer", "params/layer_{}")),
        "no leaf is below `params/layer`\n\n"
        "hint: the leaf nearest to `params/layer` is `params/layers/w`",
    ),
    (
        unstack,
        {"a": {"b": (2,), "w": (3, 2)}, "c": {"b": (3,), "w": (3, 2)}, "d": {"n": None}},
        *(("params/*", "params/*_{}"), NOT_ALL.format(0, "")),
        *("params/a/b: 2 layers", "params/a/w: 3 layers", "params/d: no array"),
    ),
    (
        *(unstack, {"l": {"b": (2,), "s": (), "w": (3, 2)}}, (*APART, -1), NOT_ALL.format(-1, "")),
        *("params/l/b: 2 layers", "params/l/s: no such axis"),
    ),
    (
        *(unstack, {"l": {"b": (2,)}}, (*APART, 1), NOT_ALL.format(1, "")),
        "params/l/b: no such axis",
    ),
    (
        *(unstack, {"l": {"b": (2,)}}, (*APART, 0, [0, 1, 2]), NOT_ALL.format(0, "3 ")),
        "params/l/b: 2 layers",
    ),
    # Places that are taken.
    (
        *(stack, {"l0": (2,), "l1": (2,), "l": {"w": (1,), "v": {"u": (1,)}}}, ALL, TAKEN),
        *("params/l/v/u, below the leaf params/l", "params/l/w, below the leaf params/l"),
    ),
    (
        *(stack, {**ALIKE, "l.w": (1,)}, ALL, TAKEN),
        "params/l.w and params/l/w -> `params.l.w`",
    ),
    (
        unstack,
        {"l": {"b": (2,), "w": (2, 3)}, "l0": {"b": (1,), "v": (1,)}, "l1": (1,)},
        *(APART, TAKEN, "params/l0/b", "params/l1/b, below the leaf params/l1"),
        "params/l1/w, below the leaf params/l1",
    ),
]


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_be_stacked_or_unstacked(case, tmp_path):
    function, shapes, arguments, *lines = case
    text = refused(function, put(tmp_path / "a", tree_of(shapes)), arguments)
    assert text == "\n  ".join(lines)


STATE_HINT = "\n\nhint: reshard.select(ckpt, drop=[...]) leaves it out"
FOLLOW = "optimizer state that cannot follow its parameters"


def test_moments_in_one_vector_are_refused(tmp_path):
    """Beside the optimizer's state there may be tables of anything. What else cannot follow is in
    `test_convert_optimizer.py`."""
    state = state_of(ALIKE, optax.flatten(optax.adam(1e-3)))
    tree = {"params": state.params, "table": np.arange(12.0)}
    problem = "float32[12] is of no parameter, and parameters change their order, shape or number"
    ckpt = put(tmp_path / "a", tree | {"opt_state": state.opt_state})
    assert refused(stack, ckpt, ALL) == (
        f"{FOLLOW}\n  opt_state/0/mu: {problem}\n  opt_state/0/nu: {problem}{STATE_HINT}"
    )
    assert "table" in stack(put(tmp_path / "b", tree), *ALL)


def test_placeholders_that_are_not_zero(tmp_path):
    """An optimizer may have a number for each parameter, which is of none of the stacked ones."""
    state = {name: {f"l{i}": {"w": np.full(1, i, "f4")} for i in range(2)} for name in ("a", "b")}
    state["c"] = {f"l{i}": {"w": np.zeros(1, "f4")} for i in range(2)}
    ckpt = put(tmp_path / "a", tree_of(ALIKE) | {"opt_state": state})
    message = "optimizer state that optax does not use must be zero, and is not"
    message += "\n  opt_state/a/l1/w\n  opt_state/b/l1/w"
    assert refused(stack, ckpt, ALL) == message


def test_axes_that_the_layers_cannot_be_partitioned_over(tmp_path):
    on = layouts.mesh((2, 4), ("stage", "model"))
    place = lambda shape, *spec: jax.device_put(np.ones(shape, "f4"), NamedSharding(on, P(*spec)))  # noqa: E731
    layers = {f"l{i}": {"w": place((4, 8), None, "model"), "b": place((4,))} for i in range(3)}
    ckpt = put(tmp_path / "a", {"params": layers})
    b, w = "params/l/b  float32[3, 4]", "params/l/w  float32[3, 4, 8]"
    alone = put(tmp_path / "b", tree_of(ALIKE))
    mixed = put(tmp_path / "c", {"params": {"l0": place((2, 3)), "l1": jnp.ones((2, 3))}})
    for layered, names, *problems in (
        (
            *(ckpt, "pipe"),
            f"{b}: P('pipe', None) names axis 'pipe', which `stage=2,model=4` lacks",
            f"{w}: P('pipe', None, 'model') names axis 'pipe', which `stage=2,model=4` lacks",
        ),
        (
            *(ckpt, "stage"),
            f"{b}: dimension 0 has size 3, not a multiple of 2 (stage)",
            f"{w}: dimension 0 has size 3, not a multiple of 2 (stage)",
        ),
        (
            *(ckpt, "model"),
            f"{b}: dimension 0 has size 3, not a multiple of 4 (model)",
            f"{w}: P('model', None, 'model') uses axis 'model' 2 times",
            f"{w}: dimension 0 has size 3, not a multiple of 4 (model)",
        ),
        (alone, ["stage", "model"], "params/l/w: not all layers are on one mesh"),
        (mixed, "stage", "params/l: not all layers are on one mesh"),
    ):
        message = "the layers cannot be stacked with these partition specs"
        assert refused(stack, layered, ALL, names=names) == "\n  ".join([message, *problems])
    moved = reshard.to_mesh(mixed, "stage=2,model=2")
    assert form_of(stack(moved, "params/l{}", "params/l", names="stage")) == {
        ("params", "l"): ((2, 2, 3), np.dtype("float32"))
    }


# What custom metadata say of the layers.

LORA = {"lora_rank": 8, "lora_module_path": "decoder/layers/.*"}
STALE = "`{}` in the custom metadata may be stale: it describes the tree that was saved"
NOW = "`scan_layers` in the custom metadata is now {}"
EXPORTED = {"model.safetensors", "reshard_digests.json", "commit_success.txt"}
DECODER = "params/params/decoder"


def described(path, custom, **layers):
    """A checkpoint of MaxText, which says in the metadata of the step how the layers are saved;
    and in those of the tree."""
    rng = np.random.default_rng(0)
    w = lambda shape: jnp.asarray(layouts.random_array(rng, shape))  # noqa: E731
    decoder = {
        f"{name}_{n}": {"wi_0": w((4, 6)), "norm": {"scale": w((4,))}}
        for name, count in layers.items()
        for n in range(count)
    }
    params = {"params": {"decoder": decoder | {"norm": {"scale": w((4,))}}}}
    state = {"params": params, "step": jnp.int32(3)}
    items = ocp.args.PyTreeSave(state, custom_metadata=custom | {"of": "the tree"})
    with layouts.open_manager(path, item_names=("items",)) as manager:
        also = {"metrics": layouts.metrics(3), "custom_metadata": custom | {"of": "the step"}}
        manager.save(3, args=ocp.args.Composite(items=items), **also)
    return reshard.open(path)


def description(path):
    """Custom metadata of the step and of the tree, as Orbax reads them, and the metrics."""
    with layouts.open_manager(path) as manager:
        step, measured = manager.metadata(3).custom_metadata, manager.metrics(3)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path / "3" / "items").item_metadata.custom_metadata
    assert (step.pop("of"), tree.pop("of")) == ("the step", "the tree")
    assert step == tree and measured == layouts.metrics(3)
    return step


def test_custom_metadata_say_whether_the_layers_are_stacked(tmp_path):
    ckpt = described(tmp_path / "a", {"scan_layers": False, "run": "abc"}, layers=3)
    where = (f"{DECODER}/layers_{{}}", f"{DECODER}/layers")
    stacked = stack(ckpt, *where)
    assert stacked.notes == (NOW.format("true"),)
    reshard.save(stacked, tmp_path / "b", verify=True)
    assert description(tmp_path / "b") == {"scan_layers": True, "run": "abc"}
    assert description(tmp_path / "a") == {"scan_layers": False, "run": "abc"}
    assert not reshard.verify(tmp_path / "b").problems
    old, new = (json.loads((tmp_path / x / "3/_CHECKPOINT_METADATA").read_text()) for x in "ab")
    assert new.pop("custom_metadata") != old.pop("custom_metadata") and new == old
    back = unstack(reshard.open(tmp_path / "b"), *where[::-1])
    assert back.notes == (NOW.format("false"),)
    reshard.save(back, tmp_path / "c")
    assert description(tmp_path / "c") == description(tmp_path / "a")
    assert reshard.diff(tmp_path / "a", tmp_path / "c", values=True).equal
    reshard.export(reshard.select(stacked, "params"), tmp_path / "exported")
    assert {p.name for p in (tmp_path / "exported").iterdir()} <= EXPORTED
    both = unstack(stack(ckpt, *where), *where[::-1])  # as it was
    assert both.notes == (NOW.format("false"),)
    reshard.save(both, tmp_path / "d")
    assert description(tmp_path / "d") == description(tmp_path / "a")


def test_custom_metadata_stay_if_some_layers_are_stacked_and_others_are_not(tmp_path):
    custom = {"scan_layers": False, "lora": LORA}
    ckpt = described(tmp_path / "a", custom, dense_layers=2, moe_layers=3)
    stale = (STALE.format("scan_layers"), STALE.format("lora"))
    dense, moe = (
        (f"{DECODER}/{kind}_layers_{{}}", f"{DECODER}/{kind}_layers") for kind in ("dense", "moe")
    )
    mixed = stack(stack(ckpt, *dense), *moe, indices=[0, 2])
    assert mixed.notes == stack(ckpt, *dense).notes == stale
    reshard.save(mixed, tmp_path / "b")
    assert description(tmp_path / "b") == custom
    stacked = stack(stack(ckpt, *dense), *moe)
    assert stacked.notes == (NOW.format("true"), STALE.format("lora"))
    reshard.save(stacked, tmp_path / "c")
    assert description(tmp_path / "c") == custom | {"scan_layers": True}
    renamed = described(tmp_path / "d", custom, block=2)  # which are not known as layers
    assert stack(renamed, f"{DECODER}/block_{{}}", f"{DECODER}/block").notes == stale


def test_a_map_leaves_custom_metadata_with_a_note(tmp_path):
    custom = {"scan_layers": False, "run": "abc"}
    ckpt = described(tmp_path / "a", custom, layers=2)
    rules = r"""[[rule]]
    from = 'layers_(\d+)/'
    to = 'layers/'
    stack = { axis = 0, by = 1 }
    [[rule]]
    from = '^(step|.*/norm/scale)$'
    to = '\1'
    """
    (tmp_path / "map.toml").write_text(rules)
    stacked = reshard.remap(ckpt, tmp_path / "map.toml")
    assert stacked[f"{DECODER}/layers/wi_0"].shape == (2, 4, 6)
    assert stacked.notes == (STALE.format("scan_layers"),)
    reshard.save(stacked, tmp_path / "b")
    assert description(tmp_path / "b") == custom


def test_custom_metadata_that_do_not_describe_the_layers(tmp_path):
    for name, custom in (("a", {}), ("b", {"scan_layers": "yes", "lora": None})):
        ckpt = described(tmp_path / name, custom, layers=2)
        stacked = stack(ckpt, f"{DECODER}/layers_{{}}", f"{DECODER}/layers")
        assert stacked.notes == ()
        reshard.save(stacked, tmp_path / f"{name}2")
        assert description(tmp_path / f"{name}2") == custom
