"""Linen models carried over to NNX by what an alignment says, on real arrays with random leaves."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from by_numpy import viewed
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from twins import blank

from reshard.convert.align import align
from reshard.convert.model import definition_orders, nnx_outline
from reshard.convert.module_tree import Module, linen_outline
from reshard.convert.pairing import Alignment
from reshard.restore.pytrees import flatten_state
from reshard.restore.target import state_of

Path = tuple[str, ...]


class Compact(nn.Module):
    """A compact method that is given, whose modules have names of Linen's."""

    function: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def random_variables(module: nn.Module, *inputs: Any, seed: int = 0, **kwargs: Any) -> Any:
    """What `init` returns, every leaf random; the counter of a cache counts one."""
    rng = np.random.default_rng(seed)
    init = functools.partial(module.init, **kwargs)
    made = nn.meta.unbox(jax.eval_shape(init, jax.random.key(0), *inputs))

    def value(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.ones(leaf.shape, leaf.dtype)
        return jnp.asarray(rng.uniform(0.2, 1.0, leaf.shape) * rng.choice([-1, 1]), leaf.dtype)

    made = jax.tree.map(value, made)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: jnp.abs(leaf) if keys[-1].key == "var" else leaf, made
    )


def zeroed(variables: Any, paths: Any) -> Any:
    """Variables with zeros in some leaves."""
    leaves = flatten_dict(variables)
    return unflatten_dict(leaves | {path: jnp.zeros_like(leaves[path]) for path in paths})


def outline_of(make: Callable[[], Any]) -> Module:
    """The outline of the NNX model that a function makes."""
    with definition_orders() as orders:
        state = state_of(make)
    return nnx_outline(state, orders)[1]


@dataclasses.dataclass(frozen=True)
class Converted:
    """An NNX model with Linen's values.

    Attributes:
      model: the model.
      alignment: what said so.
      lost: leaves of Linen's that were not used.
      unfilled: leaves of the model that were not filled, other than random numbers.
    """

    model: Any
    alignment: Alignment
    lost: set[Path]
    unfilled: set[Path]


def convert(variables: Any, make: Callable[[], Any]) -> Converted:
    """Aligns Linen variables with the NNX model that a function makes, and fills it with them."""
    leaves = flatten_dict(variables)
    alignment = align(linen_outline(leaves), outline_of(make))
    made = viewed(alignment.map, leaves)
    values = {path: made[path] for path in alignment.map.values}
    parts = flatten_state(blank(make))
    filled = []
    for leaf in parts.leaves:
        value = values.pop(leaf.path, None)
        assert value is None or (value.shape, value.dtype) == (leaf.value.shape, leaf.value.dtype)
        filled.append(leaf.value if value is None else jnp.asarray(value))
    assert not values, "the model has other leaves than its outline"
    outputs = {path for step in alignment.map.rows() for path in step.outputs}
    return Converted(
        parts.update(filled),
        alignment,
        set(leaves) - {p for step in alignment.map.rows() for p in step.inputs},
        {
            leaf.path
            for leaf in parts.leaves
            if leaf.path not in outputs and not isinstance(leaf.wrapper, nnx.RngState)
        },
    )
