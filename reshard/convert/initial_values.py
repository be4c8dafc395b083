"""The values that a model has when it is made, to the bit and of some of its leaves alone.

XLA rounds as it fuses, so what a constructor makes when it runs depends on what is compiled with
what. Here it is traced, what the wanted leaves do not need is dropped, and the rest is evaluated
one operation at a time, as JAX itself runs it; what is jitted in it stays jitted. (Functions of
JAX's own that it inlines when it traces, such as `jax.random.lognormal`, are taken apart by this.)
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reshard.compat import bound, jaxprs_in_params
from reshard.errors import ArgumentError, MemoryLimitError
from reshard.hints import Hint
from reshard.restore.pytrees import saved_tree
from reshard.restore.target import maker
from reshard.tree import Path, format_path
from reshard.units import format_bytes

_JITTED = ("jit", "pjit")  # the name of the primitive of `jax.jit`, in newer and older versions


@dataclasses.dataclass(frozen=True)
class Initial:
    """Initial values.

    Attributes:
      values: saved path -> value; with the PRNG implementation where it is of typed keys, of which
        it is the data.
      peak: bytes that were needed at once, at most, to compute them.
    """

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
                ["give what makes the model: its class, or a function that returns it"],
            )
        values = chosen(model)
    else:
        with nnx.use_eager_sharding(False):  # or an annotated model asks for a mesh
            traced = jax.make_jaxpr(lambda: chosen(make()))()
            needed = _needed(traced.jaxpr, [True] * len(wanted))
            peak = _peak(needed)
            if max_memory is not None and peak > max_memory:
                raise MemoryLimitError(
                    f"initial values of {len(wanted)} leaves take {format_bytes(peak)} to compute, "
                    f"more than {format_bytes(max_memory)}",
                    hints=[Hint(("max_memory", f"{-(-peak // 2**20)}MiB"))],
                    least=peak,
                )
            values = _evaluated(needed, traced.consts, [])
    result = {}
    for path, value in zip(wanted, values, strict=True):
        impl = None
        if jax.numpy.issubdtype(getattr(value, "dtype", np.int64), jax.dtypes.prng_key):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        result[path] = (np.asarray(value), impl)
    return Initial(result, peak)


def peak_bytes(jaxpr: Any) -> int:
    """Bytes that are needed at once, at most, to compute a jaxpr operation by operation: its inputs
    and outputs, too."""
    return _peak(_needed(jaxpr, [True] * len(jaxpr.outvars)))


@dataclasses.dataclass(frozen=True)
class _Part:
    """What some outputs of a jaxpr need of it.

    Attributes:
      jaxpr: the jaxpr, whole.
      equations: those that are needed, each with what is needed of the function that it calls, if
        that is jitted and not needed as a whole.
      inputs: places of the inputs that are needed.
      outputs: places of the outputs.
    """

    jaxpr: Any
    equations: list[tuple[Any, "_Part | None"]]
    inputs: list[int]
    outputs: list[int]

    @property
    def results(self) -> list[Any]:
        """The outputs, as variables or literals."""
        return [self.jaxpr.outvars[place] for place in self.outputs]


def _needed(jaxpr: Any, wanted: Sequence[bool]) -> _Part:
    """The part of a jaxpr that the wanted ones of its outputs need."""
    outputs = [place for place, want in enumerate(wanted) if want]
    live = _variables(jaxpr.outvars[place] for place in outputs)
    equations = []
    for equation in reversed(jaxpr.eqns):
        used = [variable in live for variable in equation.outvars]
        if not any(used) and not equation.effects:
            continue
        inner, inputs = None, equation.invars
        if equation.primitive.name in _JITTED and not all(used) and not equation.effects:
            part = _needed(equation.params["jaxpr"].jaxpr, used)
            if not _shares(part):
                inner, inputs = part, [inputs[place] for place in part.inputs]
        live |= _variables(inputs)
        equations.append((equation, inner))
    inputs = [place for place, variable in enumerate(jaxpr.invars) if variable in live]
    return _Part(jaxpr, equations[::-1], inputs, outputs)


def _shares(part: _Part) -> bool:
    """Whether the rest of a jaxpr uses floats that a part of it computes on the way to its outputs:
    compiled with that, they may be rounded in another way."""
    import jax

    kept = {id(equation) for equation, _ in part.equations}
    rest = [equation for equation in part.jaxpr.eqns if id(equation) not in kept]
    used = _variables(part.jaxpr.outvars).union(*(_variables(e.invars) for e in rest))
    inside = {variable for equation, _ in part.equations for variable in equation.outvars}
    return any(
        jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.inexact)
        for variable in (inside & used) - _variables(part.results)
    )


def _evaluated(part: _Part, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a part, computed one operation at a time.

    Args:
      part: the part.
      constants: the constants of its jaxpr.
      inputs: the inputs that it needs.
    """
    import jax

    held = dict(zip(part.jaxpr.constvars, constants, strict=True))
    held |= {part.jaxpr.invars[p]: value for p, value in zip(part.inputs, inputs, strict=True)}

    def read(atoms: Iterable[Any]) -> list[Any]:
        return [atom.val if _is_literal(atom) else held[atom] for atom in atoms]

    for (equation, inner), done in zip(part.equations, _last_uses(part), strict=True):
        if inner is None:
            made_at = equation.outvars
            with equation.ctx.manager:
                made = bound(equation, read(equation.invars))
            made = made if equation.primitive.multiple_results else [made]
        else:
            constants = equation.params["jaxpr"].consts
            compiled = jax.jit(functools.partial(_evaluated, inner, constants))
            made = compiled(read(equation.invars[place] for place in inner.inputs))
            made_at = [equation.outvars[place] for place in inner.outputs]
        held.update(zip(made_at, made, strict=True))
        for variable in done:
            held.pop(variable, None)
    return read(part.results)


def _peak(part: _Part) -> int:
    """Bytes that are needed at once, at most, to compute a part: its own inputs and outputs, too.
    What is compiled is taken for one operation after the other."""
    constants = set(part.jaxpr.constvars)
    now = _bytes(constants) + _bytes(part.jaxpr.invars[place] for place in part.inputs)
    peak = now
    for (equation, inner), done in zip(part.equations, _last_uses(part), strict=True):
        called = jaxprs_in_params(equation.params)
        parts = [inner] if inner else [_needed(each, [True] * len(each.outvars)) for each in called]
        now += _bytes(equation.outvars)
        beside = max((_peak(each) - _ends(each) for each in parts), default=0)
        peak = max(peak, now + max(beside, 0))
        now -= _bytes(done)
    return peak


def _ends(part: _Part) -> int:
    """Bytes of the inputs and outputs of a part."""
    inputs = (part.jaxpr.invars[place] for place in part.inputs)
    return _bytes(inputs) + _bytes(_variables(part.results))


def _last_uses(part: _Part) -> list[set[Any]]:
    """For each equation the variables that nothing needs after it."""
    later = _variables(part.results)
    found = []
    for equation, _ in reversed(part.equations):
        found.append(_variables([*equation.invars, *equation.outvars]) - later)
        later |= found[-1]
    return found[::-1]


def _variables(atoms: Iterable[Any]) -> set[Any]:
    """Those that are no literals."""
    return {atom for atom in atoms if not _is_literal(atom)}


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _bytes(variables: Iterable[Any]) -> int:
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)
