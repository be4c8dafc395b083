"""JAX, imported at its first use: jobs from storage to storage do not need it."""

import importlib
import types
from typing import TYPE_CHECKING, Any


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import jax as jax
else:
    jax = _Lazy("jax")
