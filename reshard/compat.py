"""What older releases of JAX lack, each with the release that makes it unnecessary."""

from collections.abc import Iterator, Mapping
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
