"""Llama with the tree of Tunix, and inputs for `--check`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HEADS, KV_HEADS, SIZE, WIDTH, FFN, VOCAB = 4, 4, 8, 24, 40, 48


class Weight(nnx.Module):
    def __init__(self, *shape):
        self.w = nnx.Param(jnp.ones(shape))


class Norm(Weight):
    def __call__(self, x):
        return self.w * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotated(x):
    angle = jnp.arange(x.shape[1])[:, None] * 1e6 ** -(jnp.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self):
        self.q_proj = Weight(WIDTH, HEADS, SIZE)
        self.k_proj, self.v_proj = Weight(WIDTH, KV_HEADS, SIZE), Weight(WIDTH, KV_HEADS, SIZE)
        self.o_proj = Weight(HEADS, SIZE, WIDTH)

    def __call__(self, x):
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", x, part.w[...])
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return jnp.einsum("btnh,nhd->btd", mixed, self.o_proj.w[...])


class Mlp(nnx.Module):
    def __init__(self):
        def linear(one, other):
            return nnx.Linear(one, other, use_bias=False, rngs=nnx.Rngs(0))

        self.gate_proj, self.up_proj = linear(WIDTH, FFN), linear(WIDTH, FFN)
        self.down_proj = linear(FFN, WIDTH)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self):
        self.attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(WIDTH), Norm(WIDTH)

    def __call__(self, x):
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedder(nnx.Module):
    def __init__(self):
        self.input_embedding = nnx.Param(jnp.ones((VOCAB, WIDTH)))


class Llama(nnx.Module):
    def __init__(self):
        self.embedder, self.final_norm = Embedder(), Norm(WIDTH)
        self.lm_head = Weight(WIDTH, VOCAB)
        self.layers = nnx.List([Layer() for _ in range(3)])

    def __call__(self, tokens, scale=1.0):
        x = self.embedder.input_embedding[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return scale * (self.final_norm(x) @ self.lm_head.w[...])


def inputs():
    return {"nnx": ((np.arange(30, dtype="int32").reshape(3, 10),), {"scale": 1.0})}
