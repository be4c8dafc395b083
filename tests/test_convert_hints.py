"""What a refused conversion says first, and what it offers: the cause before what follows from it,
and nothing that was not tried."""

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import reshard

WIDTH, HIDDEN, TOKENS, HEADS = 8, 12, 5, 2
NONE = "no name and no class tells which"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(y)
        y = nn.relu(nn.Dense(HIDDEN, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(y)


class Model(nn.Module):
    """`name`: of blocks, less their number; none for those that Linen gives."""

    layers: int = 2
    block: str = "blocks"

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(TOKENS, WIDTH)(tokens)
        for i in range(self.layers):
            x = Block(name=self.block and f"{self.block}_{i}")(x)
        return nn.Dense(TOKENS)(nn.LayerNorm()(x))


class NnxBlock(nnx.Module):
    def __init__(self, heads, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)


class NnxModel(nnx.Module):
    def __init__(self, heads=HEADS, layers=2):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)


def params_of(model, *inputs):
    """Random parameters of a Linen model."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: layouts.random_array(rng, leaf.shape), shapes)


def model_params(**options):
    return params_of(Model(**options), jnp.zeros((1, 3), int))


def saved(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def refused(call, *arguments, **keywords):
    with pytest.raises(reshard.TreeMismatchError) as info:
        call(*arguments, **keywords)
    return info.value


# The cause before its consequences


def test_other_heads_are_told_as_such(tmp_path):
    class Attention(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(8, 32, decode=False, rngs=nnx.Rngs(0))

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(4, name="attention")(x)

    params = params_of(Linen(), jnp.zeros((1, 3, 32)))
    path = saved(tmp_path / "linen", {"params": params, "opt_state": optax.adam(0.1).init(params)})
    error = refused(reshard.to_nnx, path, Attention)
    kernels, biases = "[32, 4, 8] in the checkpoint, [32, 8, 4] in the model", "[4, 8] in the "
    biases = f"{biases}checkpoint, [8, 4] in the model: transposed"
    assert error.problems == (
        f"attention/query/kernel: {kernels}: its axes are in another order",
        f"attention/query/bias: {biases}",
        f"attention/key/kernel: {kernels}: its axes are in another order",
        f"attention/key/bias: {biases}",
        f"attention/value/kernel: {kernels}: its axes are in another order",
        f"attention/value/bias: {biases}",
        "attention/out/kernel: [4, 8, 32] in the checkpoint, [8, 4, 32] in the model: "
        "its axes are in another order",
    )
    assert error.hints == ()
    # The other way round the model is Linen's.
    path = saved(tmp_path / "nnx", nnx.to_pure_dict(nnx.state(Attention())))
    error = refused(reshard.to_linen, path, lambda: {"params": params}, source=Attention)
    assert error.problems[0] == (
        "attention/query/kernel: [32, 8, 4] in the checkpoint, [32, 4, 8] in the model: "
        "its axes are in another order"
    )
    assert (len(error.problems), error.hints) == (7, ())


def test_modules_of_one_class_with_other_shapes_are_a_mismatch(tmp_path):
    class Two(nnx.Module):
        def __init__(self, heads):
            rngs = nnx.Rngs(0)
            self.one = nnx.MultiHeadAttention(heads, WIDTH, decode=False, rngs=rngs)
            self.two = nnx.MultiHeadAttention(heads, WIDTH, decode=False, rngs=rngs)

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.MultiHeadDotProductAttention(HEADS)(x)
            return x

    path = saved(tmp_path / "linen", {"params": params_of(Linen(), jnp.zeros((1, 3, WIDTH)))})
    error = refused(reshard.to_nnx, path, lambda: Two(4))
    assert error.problems[0] == (
        "params/MultiHeadDotProductAttention_0/query/kernel and one/query/kernel: [8, 2, 4] in the "
        "checkpoint, [8, 4, 2] in the model: its axes are in another order"
    )
    assert (len(error.problems), error.hints) == (14, ())


def test_an_order_that_shapes_contradict_is_left_open(tmp_path):
    """Another order would fit: it is no mismatch."""

    class Turned(nnx.Module):
        def __init__(self):
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=nnx.Rngs(0))
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0))

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH, name="Dense_1")(nn.Dense(HIDDEN, name="Dense_0")(x))

    path = saved(tmp_path / "linen", {"params": params_of(Linen(), jnp.zeros((1, WIDTH)))})
    error = refused(reshard.to_nnx, path, Turned)
    assert error.problems == (
        "Dense_0 and Dense_1, perhaps down and up: params/Dense_0/bias and down/bias: "
        "[12] in Linen, [8] in NNX",
    )


def test_what_is_a_mismatch_is_no_candidate_for_anything_else(tmp_path):
    class Own(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.zeros((3, 4)))
            self.other = nnx.Param(jnp.zeros(3))

    tree = {"params": {"table": np.ones((4, 3), "float32"), "odd": np.ones(3, "float32")}}
    error = refused(reshard.to_nnx, saved(tmp_path / "linen", tree), Own)
    assert error.problems == (
        "table: [4, 3] in the checkpoint, [3, 4] in the model: transposed",
        f"params/odd, perhaps other: {NONE}",
    )


# Layers by number


@pytest.mark.parametrize("block", ["layer", ""])
def test_numbered_layers_are_the_members_of_the_list(block, tmp_path):
    params = model_params(layers=11, block=block)
    path = saved(tmp_path / "linen", {"params": params})
    ckpt = reshard.to_nnx(path, lambda: NnxModel(layers=11))
    state = reshard.restore(ckpt, NnxModel(layers=11))
    for i in range(11):
        here, there = params[f"{block or 'Block'}_{i}"], state.blocks[i]
        np.testing.assert_array_equal(here["up"]["kernel"], there.up.kernel[...])
        np.testing.assert_array_equal(here["attention"]["out"]["bias"], there.attention.out.bias)
        np.testing.assert_array_equal(here["LayerNorm_1"]["scale"], there.mlp_norm.scale[...])
    told = [note for note in ckpt.notes if "by their numbers" in note]
    if block:
        shown = "layer_0, layer_1, layer_2, ... layer_10 (11)"
        assert told == [
            f"{shown} are blocks/0, blocks/1, blocks/2, ... blocks/10 (11) by their numbers"
        ]
        assert not any("up/" in note for note in ckpt.notes)
    else:
        # Linen's own numbers are an order: a warning.
        assert told == []
        assert any("Block_0/up -> blocks/0/up" in note for note in ckpt.notes)
    back = reshard.to_linen(ckpt, lambda: {"params": params}, source=lambda: NnxModel(layers=11))
    assert reshard.diff(path, back, values=True).equal


class Tower(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])


class TwoLists(Tower):
    def __init__(self):
        super().__init__()
        self.two = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(2)])


class MixedList(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs), Own()])


class Own(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((WIDTH, WIDTH)))
        self.bias = nnx.Param(jnp.zeros(WIDTH))


class Beside(Tower):
    def __init__(self):
        super().__init__()
        self.other = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


def linears(*names):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {n: {k: layouts.random_array(rng, s) for k, s in shapes.items()} for n in names}


@pytest.mark.parametrize(
    "names, model",
    [
        (("x_0", "x_1"), TwoLists),
        (("x_0", "x_1", "y_0", "y_1"), Tower),
        (("x_0", "x_1", "y_0", "y_1"), TwoLists),
        (("x_1", "x_2"), Tower),
        (("x_0", "x_2"), Tower),
        (("x_0", "x_1", "x_2"), Tower),
        (("x_0", "x_1"), MixedList),
        (("x_0", "x_1"), Beside),
        (("x_0", "x_1", "extra"), Tower),
        (("x_00", "x_1"), Tower),
    ],
)
def test_numbers_decide_nothing_where_something_else_may_be_meant(names, model, tmp_path):
    error = refused(reshard.to_nnx, saved(tmp_path / "linen", {"params": linears(*names)}), model)
    assert error.problems[0].startswith(names[0])
    assert "perhaps" in error.problems[0]


def test_layers_that_differ_are_not_paired_by_number(tmp_path):
    params = linears("x_0", "x_1")
    params["x_1"]["scale"] = np.ones(3, "float32")
    error = refused(reshard.to_nnx, saved(tmp_path / "linen", {"params": params}), Tower)
    assert error.problems == (f"x_0 and x_1, perhaps one/0 and one/1: {NONE}",)


def test_a_map_contradicts_numbers(tmp_path):
    path = saved(tmp_path / "linen", {"params": linears("x_0", "x_1")})
    (tmp_path / "map.toml").write_text(
        "[[rule]]\nfrom = '^params/x_0/kernel$'\nto = 'one/1/kernel'\n"
        "[[rule]]\nfrom = '^params/x_1/kernel$'\nto = 'one/0/kernel'\n"
    )
    error = refused(reshard.to_nnx, path, Tower, map_file=tmp_path / "map.toml")
    assert "x_0, perhaps one/1: the map puts other leaves of it there" in error.problems


# One representative


class Parts(nnx.Module):
    def __init__(self, inner):
        self.layers = nnx.List([inner() for _ in range(3)])


class Renamed(nnx.Module):
    """Whose second layer has a name that nothing is known of."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.same = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.there = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def test_what_is_open_in_each_layer_is_shown_once(tmp_path):
    params = {f"layer_{i}": linears("same", "here") for i in range(3)}
    path = saved(tmp_path / "linen", {"params": params})
    error = refused(reshard.to_nnx, path, lambda: Parts(Renamed))
    assert error.problems == (f"layer_*/here, perhaps layers/*/there: {NONE} (3 times)",)
    rule = r"from = '^params/layer_(\d+)/here/', to = 'params/layers/\1/there/'"
    assert error.hints[-1] == f"map_file=... decides, by rules such as: {rule}"
    # It is what it says it is.
    rule = rule.replace(", to", "\nto")
    (tmp_path / "map.toml").write_text(f"[[rule]]\n{rule}\n")
    ckpt = reshard.to_nnx(path, lambda: Parts(Renamed), map_file=tmp_path / "map.toml")
    state = reshard.restore(ckpt, Parts(Renamed))
    for i in range(3):
        here = params[f"layer_{i}"]
        np.testing.assert_array_equal(here["here"]["kernel"], state.layers[i].there.kernel[...])
        np.testing.assert_array_equal(here["same"]["bias"], state.layers[i].same.bias[...])
