"""What older releases of JAX lack, each with the release that makes it unnecessary."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def jaxprs_in_params(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation: from JAX 0.10 on, what
    `jax.extend.core.jaxprs_in_params` gives."""
    from jax.extend import core

    for value in params.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def bound(equation: Any, inputs: Sequence[Any]) -> Any:
    """What the primitive of an equation makes of its inputs: from JAX 0.10 on, `get_bind_params`
    gives keyword arguments alone, before it functions and keyword arguments."""
    given = equation.primitive.get_bind_params(equation.params)
    functions, params = given if isinstance(given, tuple) else ((), given)
    return equation.primitive.bind(*functions, *inputs, **params)
