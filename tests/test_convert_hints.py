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
