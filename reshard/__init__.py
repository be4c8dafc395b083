"""JAX checkpoints on another mesh: opened, planned and rewritten on disk, without devices.

The public names are those of `__init__.pyi`. Their modules are imported when a name is first used:
`reshard --help` needs none of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
