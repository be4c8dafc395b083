"""A small Flax model whose axes have logical names, for `quickstart.py` and README.md."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

LAYERS, DEPTH = 4, 512


class DotReluDot(nn.Module):
    """Two products with a relu between them."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.xavier_normal()
        kernel_init = nn.with_logical_partitioning(init, ("embed", "hidden"))
        y = nn.relu(nn.Dense(self.depth, kernel_init=kernel_init, use_bias=False)(x))
        w2_init: Any = nn.with_logical_partitioning(init, ("hidden", "embed"))
        return y @ self.param("W2", w2_init, (self.depth, x.shape[-1]))


class MLP(nn.Module):
    """DotReluDot layers, one after another."""

    layers: int
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = DotReluDot(self.depth)(x)
        return x


def variables() -> Any:
    """Random weights, each in a box that names its axes."""
    return MLP(LAYERS, DEPTH).init(jax.random.key(0), jnp.ones((8, DEPTH)))
