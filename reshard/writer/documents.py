"""The JSON documents of a PyTree item, as Orbax reads them.

Facts about the documents are those of orbax-checkpoint 0.12.8; older versions read a subset.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint, Leaf, empty_name
from reshard.loader.detection import ARRAYS_FOLDER, SHARDING_FILE, STRINGS_FILE, TREE_FILE
from reshard.loader.safetensors import INDEX
from reshard.sharding.mesh import (
    MAX_DEVICE_IDS,
    NamedSharding,
    Sharding,
    shard_shape,
    spec_entries,
)
from reshard.tree import Key, Path, nested
from reshard.writer.format import TargetFormat
from reshard.writer.plan import ItemPlan
from reshard.writer.safetensors import index


def documents(item: ItemPlan) -> dict[str, bytes]:
    """File name -> content of an item's documents."""
    if files := item.format.files:
        return {INDEX: index(files)} if len(files) > 1 else {}
    ckpt, chunks = item.ckpt, {array.layout.path: array.chunk for array in item.arrays}
    strings = nested(  # Orbax nests their names at each slash
        (tuple(stored_name(path).split("/")), leaf)
        for path, leaf in ckpt.items()
        if isinstance(leaf, str)
    )
    found = {TREE_FILE: _tree(ckpt, item.format), SHARDING_FILE: _shardings(ckpt)}
    if ckpt.source.described:
        found[f"{ARRAYS_FOLDER}/process_0"] = _array_metadatas(ckpt, chunks)
    if strings:
        found[STRINGS_FILE] = strings
    return {name: json.dumps(document).encode() for name, document in found.items()}


def _tree(ckpt: Checkpoint, target: TargetFormat) -> dict[str, Any]:
    entries = {}
    for path in _in_order(ckpt):
        leaf = ckpt[path]
        entries[str(tuple(map(str, path)))] = {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path
            ],
            "value_metadata": _value(leaf, ckpt.source.described),
        }
    document = {"tree_metadata": entries, **ckpt.source.metadata}
    store = ckpt.source.store
    if target.ocdbt != store.ocdbt:
        document["use_ocdbt"] = target.ocdbt
    if target.zarr3 != store.zarr3:
        document["use_zarr3"] = target.zarr3
    rich = document.pop("value_metadata_tree", None)
    if rich is not None and not ckpt.retyped:
        # Less the shapes of shards on the old mesh, which are optional in it.
        types = json.loads(
            rich, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k != "write_shape"}
        )
        document["value_metadata_tree"] = json.dumps(types)
    return document


def _in_order(paths: Iterable[Path]) -> Iterator[Path]:
    """The paths with the positions of each list ascending: Orbax before 0.12 appends to lists as it
    reads, so it fails where a position comes before a smaller one."""

    def below(node: dict[Key, Any]) -> Iterator[Path]:
        positions = all(isinstance(key, int) for key in node)
        for key in sorted(node) if positions else node:
            if isinstance(node[key], dict):
                yield from below(node[key])
            else:
                yield node[key]

    return below(nested((path, path) for path in paths))


def _value(leaf: Leaf, described: bool) -> dict[str, Any]:
    if isinstance(leaf, ArrayHandle):
        value: dict[str, Any] = {"value_type": leaf.value_type, "skip_deserialize": False}
        if described and leaf.value_type == "jax.Array":
            value["write_shape"] = list(shard_shape(leaf.shape, leaf.sharding))
        return value
    if isinstance(leaf, str):
        return {"value_type": "string", "skip_deserialize": False}
    return {"value_type": empty_name(leaf), "skip_deserialize": True}


def _shardings(ckpt: Checkpoint) -> dict[str, str]:
    texts: dict[int, str] = {}  # leaves share their shardings
    found = {}
    for array in ckpt.arrays:
        if array.sharding is not None:
            if id(array.sharding) not in texts:
                texts[id(array.sharding)] = json.dumps(_sharding(array.sharding))
            name = base64.urlsafe_b64encode(stored_name(array.path).encode()).decode()
            found[name] = texts[id(array.sharding)]
    return found


def _sharding(sharding: Sharding) -> dict[str, Any]:
    if not isinstance(sharding, NamedSharding):
        return {"sharding_type": "SingleDeviceSharding", "device_str": sharding.device}
    mesh = sharding.mesh
    document: dict[str, Any] = {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.axis_sizes),
        "axis_names": list(mesh.axis_names),
    }
    if mesh.axis_types is not None:
        document["axis_types"] = [f"AxisType.{name}" for name in mesh.axis_types]
    document["partition_spec"] = spec_entries(sharding.spec)
    if mesh.device_ids is not None and mesh.size <= MAX_DEVICE_IDS:
        ids = np.array([{"id": device} for device in mesh.device_ids])
        document["device_mesh"] = {"mesh": ids.reshape(mesh.axis_sizes).tolist()}
    return document


def _array_metadatas(ckpt: Checkpoint, chunks: Mapping[Path, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "array_metadatas": [
            {
                "array_metadata": {
                    "param_name": stored_name(array.path),
                    "write_shape": list(shard_shape(array.shape, array.sharding)),
                    "chunk_shape": list(chunks[array.path]),
                    "ext_metadata": (
                        {"random_key_impl": array.key_impl} if array.key_impl else None
                    ),
                }
            }
            for array in ckpt.arrays
            if array.value_type == "jax.Array"
        ]
    }
