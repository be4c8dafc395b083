"""JAX checkpoints on another mesh: opened, planned and rewritten on disk, without devices.

The public names are those of `__init__.pyi`. Their modules are imported when a name is first used:
`reshard --help` needs none of them.
"""

import ast
import importlib
import pathlib
import sys
import types
from typing import Any


def _modules() -> dict[str, str]:
    """Public name -> the module that defines it."""
    stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text())
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULE_OF = _modules()


class _Surface(types.ModuleType):
    """The package. `reshard.restore` and `reshard.verify` are functions, and stay functions when
    the folders of the same names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'reshard' has no attribute '{name}'")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted(_MODULE_OF)


sys.modules[__name__].__class__ = _Surface
