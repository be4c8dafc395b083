"""Orbax's v1 API under the names that it has since 0.12, for the tests with older releases too."""

import os
from typing import Any

import orbax.checkpoint.experimental.v1 as v1

# Whether it finds the item of a checkpoint that it has not written.
READS_ANY = hasattr(v1, "load")
if READS_ANY:
    ITEM = "state"
    save, load, metadata = v1.save, v1.load, v1.metadata
else:
    ITEM = "pytree"
    save, metadata = v1.save_pytree, v1.pytree_metadata

    def load(path: str | os.PathLike, target: Any = None, *, checkpointable_name: str = ITEM):
        """As `v1.load`; "AUTO" is the item that is loaded if none is named."""
        name = ITEM if checkpointable_name == "AUTO" else checkpointable_name
        return v1.load_pytree(path, target, checkpointable_name=name)


checkpointables_metadata = v1.checkpointables_metadata
