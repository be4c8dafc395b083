"""What the Orbax of this environment reads: `python older_reader.py PATH...`, which needs nothing
else of the tests. Prints, for each path, printed path of a leaf -> its type, shape and digest."""

import hashlib
import json
import os
import sys

if __name__ == "__main__":  # whoever imports it has devices, and flags that they keep
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp


def described(leaf) -> str:
    if not isinstance(leaf, np.ndarray):
        return f"{type(leaf).__name__} {leaf!r}"
    return f"{leaf.dtype} {list(leaf.shape)} {hashlib.sha256(leaf.tobytes()).hexdigest()}"


def read(path: str) -> dict[str, str]:
    """On the host: devices have other names in other releases of JAX."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path)
        tree = getattr(getattr(metadata, "item_metadata", metadata), "tree", None)
        tree = metadata if tree is None else tree

        def arguments(leaf):
            text = type(leaf).__name__ == "StringMetadata"
            return ocp.RestoreArgs(restore_type=str if text else np.ndarray)

        restored = checkpointer.restore(path, restore_args=jax.tree.map(arguments, tree))
    found, _ = jax.tree_util.tree_flatten_with_path(restored)
    return {jax.tree_util.keystr(keys): described(leaf) for keys, leaf in found}


if __name__ == "__main__":
    print(json.dumps({path: read(path) for path in sys.argv[1:]}))
