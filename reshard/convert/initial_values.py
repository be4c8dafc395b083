"""Initial values of some of a model's leaves, to the bit.

XLA rounds as it fuses, so the values that a constructor makes depend on what is compiled together.
Here the constructor is traced, the operations that the leaves do not need are dropped, and the rest
is evaluated one operation at a time, as JAX itself runs it. A function that is jitted stays whole.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from reshard.errors import ArgumentError, MemoryLimitError
from reshard.restore.pytrees import saved_tree
from reshard.restore.target import maker
from reshard.tree import Path, format_path
from reshard.units import format_bytes


def initial_values(
    model: Any, paths: Iterable[Path], max_memory: int | None = None
) -> dict[Path, tuple[np.ndarray, str | None]]:
    """The initial values of a model's leaves by saved path, with the PRNG implementation of typed
    keys. Only what these leaves need is computed.

    Args:
      model: the model, as `reshard.target` takes it.
      paths: saved paths of the leaves.
      max_memory: bytes that may be needed at once; None for any number of them.

    Raises:
      ArgumentError: the model is an abstract state, which has none.
      MemoryLimitError: they take more than `max_memory`. Nothing has been computed then.
    """
    import jax
    import jax.core
    from flax import nnx

    wanted = list(paths)
    make = maker(model)

    def chosen(state: Any) -> list[Any]:
        leaves: Any = saved_tree(state)
        return [leaves[path].value for path in wanted]

    if make is None:
        found = saved_tree(model)
        abstract = [path for path in wanted if getattr(found[path], "abstract", False)]
        if abstract:
            raise ArgumentError(
                "an abstract model has no initial values",
                [format_path(path) for path in abstract],
                ["give the model's class, or a function that returns the model"],
            )
        values = chosen(model)
    else:
        with nnx.use_eager_sharding(False):  # or an annotated model asks for a mesh
            traced = jax.make_jaxpr(lambda: chosen(make()))()
            needed = traced.jaxpr.replace(eqns=_needed(traced.jaxpr))
            peak = peak_bytes(needed)
            if max_memory is not None and peak > max_memory:
                raise MemoryLimitError(
                    f"initial values of {len(wanted)} leaves take {format_bytes(peak)} to compute, "
                    f"more than {format_bytes(max_memory)}",
                    hints=[f'max_memory="{-(-peak // 2**20)}MiB"'],
                    least=peak,
                )
            values = jax.core.eval_jaxpr(needed, traced.consts)
    result = {}
    for path, value in zip(wanted, values, strict=True):
        impl = None
        if jax.numpy.issubdtype(getattr(value, "dtype", np.int64), jax.dtypes.prng_key):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        result[path] = (np.asarray(value), impl)
    return result


def peak_bytes(jaxpr: Any) -> int:
    """Bytes that are needed at once, at most, to compute a jaxpr operation by operation: its inputs
    and outputs, too. What is compiled is taken for one operation after the other."""
    import jax

    last = {variable: place for place, e in enumerate(jaxpr.eqns) for variable in _used(e)}
    ends = _variables(jaxpr.outvars)
    now = peak = _bytes({*jaxpr.constvars, *jaxpr.invars})
    for place, equation in enumerate(jaxpr.eqns):
        now += _bytes(equation.outvars)
        parts = (getattr(part, "jaxpr", part) for part in jax.tree.leaves(equation.params))
        inner = (part for part in parts if hasattr(part, "eqns"))
        beside = (peak_bytes(each) - _bytes([*each.invars, *each.outvars]) for each in inner)
        peak = max(peak, now + max((0, *beside)))
        now -= _bytes(v for v in _used(equation) - ends if last[v] == place)
    return peak


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that the outputs of a jaxpr need. What is jitted is one equation."""
    live, equations = _variables(jaxpr.outvars), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not live.isdisjoint(equation.outvars):
            live |= _variables(equation.invars)
            equations.append(equation)
    return equations[::-1]


def _used(equation: Any) -> set[Any]:
    """The variables that an equation reads or makes."""
    return _variables([*equation.invars, *equation.outvars])


def _variables(atoms: Iterable[Any]) -> set[Any]:
    """Those that are no literals."""
    return {atom for atom in atoms if not hasattr(atom, "val")}


def _bytes(atoms: Iterable[Any]) -> int:
    variables = _variables(atoms)
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)
