"""JAX checkpoints on another mesh: opened, planned and rewritten on disk, without devices."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.checkpoint import ArrayHandle as ArrayHandle
    from reshard.checkpoint import Checkpoint as Checkpoint
    from reshard.convert.conversion import to_linen as to_linen
    from reshard.convert.conversion import to_nnx as to_nnx
    from reshard.convert.stacking import stack as stack
    from reshard.convert.stacking import unstack as unstack
    from reshard.engine.plan import Plan as Plan
    from reshard.errors import CheckpointFormatError as CheckpointFormatError
    from reshard.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from reshard.errors import CorruptCheckpointError as CorruptCheckpointError
    from reshard.errors import DestinationError as DestinationError
    from reshard.errors import DestinationExistsError as DestinationExistsError
    from reshard.errors import MemoryLimitError as MemoryLimitError
    from reshard.errors import ReshardError as ReshardError
    from reshard.errors import ShardingError as ShardingError
    from reshard.errors import TreeMismatchError as TreeMismatchError
    from reshard.errors import UncommittedCheckpointError as UncommittedCheckpointError
    from reshard.loader import open as open
    from reshard.restore.restore import restore as restore
    from reshard.restore.target import coverage as coverage
    from reshard.restore.target import target as target
    from reshard.transforms import cast as cast
    from reshard.transforms import rename as rename
    from reshard.transforms import select as select
    from reshard.transforms import to_mesh as to_mesh
    from reshard.verify.comparison import diff as diff
    from reshard.verify.differences import Diff as Diff
    from reshard.verify.verification import Verification as Verification
    from reshard.verify.verification import digest as digest
    from reshard.verify.verification import verify as verify
    from reshard.writer import plan as plan
    from reshard.writer import save as save

# Modules are imported when a name of theirs is first used: `reshard --help` needs none of them.
_HOMES = {
    "reshard.checkpoint": ("ArrayHandle", "Checkpoint"),
    "reshard.verify.comparison": ("diff",),
    "reshard.convert.conversion": ("to_linen", "to_nnx"),
    "reshard.convert.stacking": ("stack", "unstack"),
    "reshard.verify.differences": ("Diff",),
    "reshard.errors": (
        "CheckpointFormatError",
        "CheckpointNotFoundError",
        "CorruptCheckpointError",
        "DestinationError",
        "DestinationExistsError",
        "MemoryLimitError",
        "ReshardError",
        "ShardingError",
        "TreeMismatchError",
        "UncommittedCheckpointError",
    ),
    "reshard.loader": ("open",),
    "reshard.engine.plan": ("Plan",),
    "reshard.restore.restore": ("restore",),
    "reshard.restore.target": ("coverage", "target"),
    "reshard.transforms": ("cast", "rename", "select", "to_mesh"),
    "reshard.verify.verification": ("Verification", "digest", "verify"),
    "reshard.writer": ("plan", "save"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'reshard' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
