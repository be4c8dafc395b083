"""Linen models carried over to NNX by what an alignment says, on real arrays with random leaves;
and what tests of conversions say often."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import layouts
import numpy as np
from by_numpy import viewed
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from twins import blank

from reshard.convert.align import Alignment, align
from reshard.convert.model import definition_orders, nnx_outline
from reshard.convert.module_tree import Module, linen_outline
from reshard.errors import TreeMismatchError
from reshard.restore.pytrees import flatten_state
from reshard.restore.target import state_of
from reshard.tree import format_path

Path = tuple[str, ...]


def refused(
    call: Callable[..., Any],
    *arguments: Any,
    of: type[Exception] = TreeMismatchError,
    **options: Any,
) -> Any:
    """The error that a conversion ends with."""
    return layouts.raised(of, call, *arguments, **options)


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Its text."""
    return str(refused(call, *arguments, **options))


def map_of(folder: pathlib.Path, *rules: str | tuple[str, str]) -> pathlib.Path:
    """A map file of these rules: pairs of a regex and a replacement, or texts of TOML."""
    texts = (
        rule if isinstance(rule, str) else "from = {}, to = {}".format(*map(json.dumps, rule))
        for rule in rules
    )
    (folder / "map.toml").write_text("rule = [{}]".format(", ".join(f"{{ {x} }}" for x in texts)))
    return folder / "map.toml"


def by_path(tree: Any) -> dict[str, Any]:
    """Printed path -> all there is to each leaf, as Orbax stores it."""
    return {format_path(p): layouts.bits(x) for p, x in layouts.saved_leaves(tree).items()}


def filled(tree: Any, seed: int = 0, bits: bool = True) -> Any:
    """Every leaf random: any bits at all, or numbers that a model can calculate with."""
    rng = np.random.default_rng(seed)

    def value(leaf):
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), leaf.size)
            return keys.reshape(shape)
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 100, shape), dtype)
        if bits:
            return jnp.asarray(layouts.random_array(rng, shape, dtype))
        return jnp.asarray(rng.uniform(0.2, 1.0, shape), dtype)

    return jax.tree.map(value, tree)


def some(*shape: int, seed: int = 1) -> np.ndarray:
    """Random numbers that a model can calculate with."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def sharded(tree: Any, specs: Mapping[str, PartitionSpec], on: Mesh) -> Any:
    """A tree on a mesh: specs by the last key, for arrays that have as many dimensions."""

    def place(keys, leaf):
        spec = specs.get(getattr(keys[-1], "key", None), PartitionSpec())
        spec = spec if leaf.ndim >= len(spec) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(on, spec))

    return jax.tree_util.tree_map_with_path(place, tree)


class Of(nnx.Module):
    """With these attributes, in this order."""

    def __init__(self, **attributes: Any):
        for name, value in attributes.items():
            setattr(self, name, value)


class Compact(nn.Module):
    """A compact method that is given, whose modules have names of Linen's."""

    function: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.function(*inputs, **options)


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


class Converted(NamedTuple):
    """An NNX model with Linen's values, and what said so; leaves of Linen's that were not used, and
    leaves of the model, other than random numbers, that were not filled."""

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
        parts.unflatten(filled, in_place=True),
        alignment,
        set(leaves) - {p for step in alignment.map.rows() for p in step.inputs},
        {
            leaf.path
            for leaf in parts.leaves
            if leaf.path not in outputs and not isinstance(leaf.wrapper, nnx.RngState)
        },
    )
