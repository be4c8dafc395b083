"""JAX, imported when something of it is first used: what opens and plans does without."""

import importlib
import types
from typing import TYPE_CHECKING, Any


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # from then on it is found without this function
        return value


if TYPE_CHECKING:
    import jax as jax
else:
    jax = _Lazy("jax")
