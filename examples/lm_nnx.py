"""The language model of `lm_linen.py` as it might be written in NNX."""

import flax.linen as nn
import jax
from flax import nnx
from lm_linen import HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH


class GatedMlp(nnx.Module):
    """A product of two projections, one of them after a gelu."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = GatedMlp(WIDTH, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class LanguageModel(nnx.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, mask = self.embed(tokens), nn.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.norm(x))
