"""A small language model in Linen, with a gated MLP whose two projections are one array."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS = 96, 32, 4, 80, 3
TOKENS = jnp.arange(24).reshape(2, 12) * 7 % VOCABULARY


class GatedMlp(nn.Module):
    """A product of two projections, one of them after a gelu."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init: Any = nn.initializers.lecun_normal(batch_axis=0)
        gate, up = self.param("gating_einsum", init, (2, x.shape[-1], self.hidden))
        return nn.Dense(x.shape[-1], use_bias=False)(nn.gelu(x @ gate) * (x @ up))


class Block(nn.Module):
    """Attention and an MLP."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.RMSNorm()(x), mask=mask)
        return x + GatedMlp(self.hidden, name="mlp")(nn.RMSNorm()(x))


class LanguageModel(nn.Module):
    """Blocks between an embedding and its transpose."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH)
        x, mask = embed(tokens), nn.make_causal_mask(tokens)
        for i in range(LAYERS):
            x = Block(HEADS, HIDDEN, name=f"layer_{i}")(x, mask)
        return embed.attend(nn.RMSNorm()(x))


def train_state() -> TrainState:
    """The model's variables with adam."""
    model = LanguageModel()
    params = model.init(jax.random.key(0), TOKENS)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
