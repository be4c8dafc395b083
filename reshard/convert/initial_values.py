"""The values that a model has when it is made, to the bit and of some of its leaves alone.

XLA rounds as it fuses, so what a constructor makes when it runs depends on what is compiled with
what. Here it is traced, what the wanted leaves do not need is dropped, and the rest is evaluated
one operation at a time, as JAX itself runs it; what is jitted in it stays jitted. (Functions of
JAX's own that it inlines when it traces, such as `jax.random.lognormal`, are taken apart by this.)
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reshard.compat import jaxprs_in_params
from reshard.errors import ArgumentError, MemoryLimitError
from reshard.restore.pytrees import saved_tree
from reshard.restore.target import maker
from reshard.tree import Path, format_path
from reshard.units import format_bytes

_JITTED = ("jit", "pjit")  # the name of the primitive of `jax.jit`, in newer and older versions


@dataclasses.dataclass(frozen=True)
class Initial:
    """Initial values by saved path, with the PRNG implementation where they are the data of typed
    keys; and the bytes that were needed at once, at most, to compute them."""

    values: dict[Path, tuple[np.ndarray, str | None]]
    peak: int


def initial_values(model: Any, paths: Iterable[Path], max_memory: int | None = None) -> Initial:
    """The initial values of a model's leaves. Only what these leaves need is computed.

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

    peak = 0
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
            needed = traced.jaxpr.replace(eqns=_needed(traced.jaxpr, traced.jaxpr.outvars))
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
    return Initial(result, peak)


def peak_bytes(jaxpr: Any) -> int:
    """Bytes that are needed at once, at most, to compute a jaxpr operation by operation: its inputs
    and outputs, too. What is compiled is taken for one operation after the other."""
    equations = _needed(jaxpr, jaxpr.outvars)
    uses = [_variables([*equation.invars, *equation.outvars]) for equation in equations]
    ends = _variables(jaxpr.outvars)
    now = peak = _bytes({*jaxpr.constvars} | ({*jaxpr.invars} & ends.union(*uses)))
    last = {variable: place for place, used in enumerate(uses) for variable in used}
    for place, equation in enumerate(equations):
        now += _bytes(equation.outvars)
        beside = (peak_bytes(each) - _ends(each) for each in jaxprs_in_params(equation.params))
        peak = max(peak, now + max((0, *beside)))
        now -= _bytes(v for v in uses[place] - ends if last[v] == place)
    return peak


def _needed(jaxpr: Any, outputs: Iterable[Any]) -> list[Any]:
    """The equations that some outputs of a jaxpr need, less what no output needs of a function that
    is jitted."""
    from jax.interpreters import partial_eval

    live, equations = _variables(outputs), []
    for equation in reversed(jaxpr.eqns):
        used = [variable in live for variable in equation.outvars]
        if not any(used) and not equation.effects:
            continue
        jitted = equation.primitive.name in _JITTED and not equation.effects
        if jitted and not all(used) and not _shares(equation.params["jaxpr"].jaxpr, used):
            _, equation = partial_eval.dce_rules[equation.primitive](used, equation)
            assert equation is not None
        live |= _variables(equation.invars)
        equations.append(equation)
    return equations[::-1]


def _shares(jaxpr: Any, wanted: Sequence[bool]) -> bool:
    """Whether the rest of a jaxpr uses floats that are computed on the way to the wanted ones of
    its outputs: compiled with that, they may be rounded in another way."""
    import jax

    outputs = [variable for variable, want in zip(jaxpr.outvars, wanted, strict=True) if want]
    inside = {v for equation in _needed(jaxpr, outputs) for v in equation.outvars}
    rest = [equation for equation in jaxpr.eqns if inside.isdisjoint(equation.outvars)]
    used = _variables(jaxpr.outvars).union(*(_variables(e.invars) for e in rest))
    return any(
        jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.inexact)
        for variable in (inside & used) - _variables(outputs)
    )


def _ends(jaxpr: Any) -> int:
    """Bytes of the inputs that the outputs of a jaxpr need, and of the outputs."""
    ends = _variables(jaxpr.outvars)
    used = ends.union(*(_variables(e.invars) for e in _needed(jaxpr, jaxpr.outvars)))
    return _bytes({*jaxpr.invars} & used) + _bytes(ends)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    """Those that are no literals."""
    return {atom for atom in atoms if not hasattr(atom, "val")}


def _bytes(variables: Iterable[Any]) -> int:
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)
