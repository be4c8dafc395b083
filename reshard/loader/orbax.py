"""The PyTree item of Orbax: `_METADATA`, `_sharding`, `array_metadatas/*` and zarr arrays.

Reads OCDBT and plain files, zarr v2 and v3. Facts about the documents are those of
orbax-checkpoint 0.4.4 to 0.12.8.
"""

import base64
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np

from reshard.checkpoint import (
    EMPTY_LEAVES,
    ArrayHandle,
    Checkpoint,
    Leaf,
    Source,
    parse_dtype,
    stored_name,
)
from reshard.errors import CheckpointFormatError, CorruptCheckpointError
from reshard.loader.layout import TREE_FILE, Location, read_json
from reshard.mesh import Mesh, NamedSharding, Sharding, SingleDeviceSharding, normalize_spec
from reshard.store import ArrayStore
from reshard.tree import Path, format_path

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def read(location: Location) -> Checkpoint:
    """The checkpoint at a location; see `reshard.open` for the errors."""
    directory = location.directory
    document = read_json(directory / TREE_FILE)
    if document is None:
        raise _without_tree(directory)
    entries = document.pop("tree_metadata", None)
    if not isinstance(entries, dict):
        raise CorruptCheckpointError(f"`{directory / TREE_FILE}` has no tree_metadata")
    store = _array_store(directory, document)
    parsed = [_parse_entry(entry, directory) for entry in entries.values()]
    if any(not path for path, _, _ in parsed):
        raise CheckpointFormatError(
            f"the tree of `{directory}` is a single leaf, which is recognised but not read yet",
            hints=["restore it with Orbax and save it inside a dict"],
        )
    holds_arrays = any(value_type in _ARRAYS for _, value_type, skipped in parsed if not skipped)
    if document.get("use_ocdbt") and not store.ocdbt and holds_arrays:
        raise CorruptCheckpointError(
            f"`{directory}` has no manifest.ocdbt, which its {TREE_FILE} promises: it was half "
            "written"
        )
    shardings = read_json(directory / "_sharding") or {}
    described, key_impls = _array_metadatas(directory)
    strings = read_json(directory / "_strings.json") or {}

    leaves: dict[Path, Leaf] = {}
    by_name: dict[str, Path] = {}
    strings_by_name: dict[str, Path] = {}
    problems: list[str] = []
    for path, value_type, skipped in parsed:
        name = stored_name(path)
        if value_type in EMPTY_LEAVES:
            leaves[path] = EMPTY_LEAVES[value_type]
        elif value_type not in (*_ARRAYS, "string"):
            problems.append(f"{format_path(path)}: unknown value type {value_type!r}")
        elif skipped:
            raise CheckpointFormatError(
                f"`{directory}` was saved with aggregate=True: its values are inside the msgpack "
                "file `checkpoint`, which is recognised but not read yet",
                hints=["restore it with PyTreeCheckpointer and save it again"],
            )
        elif value_type == "string":
            text = functools.reduce(_below, name.split("/"), strings)
            leaves[path] = str(text)
            other = strings_by_name.setdefault(name, path)
            if not isinstance(text, str):
                problems.append(f"{format_path(path)}: a string that `_strings.json` lacks")
            elif other != path:
                problems.append(
                    f"{format_path(other)} and {format_path(path)} are both stored as the string "
                    f"`{name}`: one of them has overwritten the other"
                )
        else:
            leaves[path] = _array(path, name, value_type, store, shardings, key_impls, problems)
            other = by_name.setdefault(name, path)
            if other != path:
                _mark_collision(leaves, other, path)
    if problems:
        raise CorruptCheckpointError(
            f"`{directory}` is not whole: leaves of its tree cannot be found or read", problems
        )
    source = Source(
        location.root,
        location.kind,
        location.v1,
        location.step,
        location.item,
        location.steps,
        location.items,
        store,
        document,
        described,
    )
    notes = [f"step {step} was never committed and is left out" for step in location.uncommitted]
    return Checkpoint(leaves, source, tuple(notes))


def _below(node: Any, key: str) -> Any:
    """Orbax nests the strings' names at each slash."""
    return node.get(key) if isinstance(node, dict) else None


def _without_tree(directory: pathlib.Path) -> Exception:
    legacy = directory / "checkpoint"
    if legacy.is_file() and b"PLACEHOLDER://" in legacy.read_bytes()[: 1 << 20]:
        return CheckpointFormatError(
            f"`{directory}` was written by Orbax 0.2 (no {TREE_FILE}; its tree is the msgpack file "
            "`checkpoint`), which is recognised but not read yet",
            hints=["restore it with PyTreeCheckpointer and save it again"],
        )
    if legacy.is_file():
        return CheckpointFormatError(
            f"`{directory}` holds its values in the msgpack file `checkpoint` (aggregate=True), "
            "which is recognised but not read yet",
            hints=["restore it with PyTreeCheckpointer and save it again"],
        )
    return CorruptCheckpointError(f"`{directory}` has no {TREE_FILE}: it was half written")


def _array_store(directory: pathlib.Path, document: dict[str, Any]) -> ArrayStore:
    parts: tuple[str, ...] = ()
    if (directory / "manifest.ocdbt").exists():
        parts = ("",)
    else:
        names = (e.name for e in os.scandir(directory) if e.name.startswith("ocdbt.process_"))
        parts = tuple(sorted(n for n in names if (directory / n / "manifest.ocdbt").exists()))
    fills = not document.get("store_array_data_equal_to_fill_value", False)
    return ArrayStore(directory, parts, bool(document.get("use_zarr3", False)), fills)


def _array_metadatas(directory: pathlib.Path) -> tuple[bool, dict[str, str]]:
    """Whether there are any, and the PRNG implementation by name of the array."""
    folder = directory / "array_metadatas"
    names = sorted(e.name for e in os.scandir(folder)) if folder.is_dir() else []
    impls = {}
    for name in names:
        document = read_json(folder / name) or {}
        try:
            for entry in document.get("array_metadatas", ()):
                metadata = entry["array_metadata"]
                impl = (metadata.get("ext_metadata") or {}).get("random_key_impl")
                if impl:
                    impls[metadata["param_name"]] = impl
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"`{folder / name}` cannot be read: {error!r}") from error
    return bool(names), impls


def _parse_entry(entry: Any, directory: pathlib.Path) -> tuple[Path, str, bool]:
    try:
        path = tuple(
            int(key["key"]) if key["key_type"] == 1 else str(key["key"])
            for key in entry["key_metadata"]
        )
        value = entry["value_metadata"]
        return path, str(value["value_type"]), bool(value.get("skip_deserialize"))
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(
            f"`{directory / TREE_FILE}` has an entry that cannot be read", [repr(entry)[:200]]
        ) from error


def _array(
    path: Path,
    name: str,
    value_type: str,
    store: ArrayStore,
    shardings: dict[str, str],
    key_impls: dict[str, str],
    problems: list[str],
) -> ArrayHandle | None:
    metadata = store.array_metadata(name)
    if metadata is None:
        problems.append(f"{format_path(path)}: there is no array `{name}`")
        return None
    encoded = shardings.get(base64.urlsafe_b64encode(name.encode()).decode())
    try:
        shape, chunks, dtype = _parse_zarr(metadata)
        sharding = None if encoded is None else _parse_sharding(encoded)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"{format_path(path)}: its metadata cannot be read: {error!r}")
        return None
    return ArrayHandle(
        path=path,
        shape=shape,
        dtype=dtype,
        chunk_shape=chunks,
        sharding=sharding,
        saved_sharding=sharding,
        value_type=value_type,
        key_impl=key_impls.get(name),
        stored_dtype=dtype,
        store=store,
        name=name,
        metadata=metadata,
    )


def _mark_collision(leaves: dict[Path, Leaf], one: Path, other: Path) -> None:
    for path, same in ((one, other), (other, one)):
        handle = leaves[path]
        if isinstance(handle, ArrayHandle):
            leaves[path] = dataclasses.replace(handle, same_name=same)


@functools.lru_cache(maxsize=4096)
def _parse_zarr(metadata: bytes) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype]:
    """Shape, chunk shape and dtype. Equal documents share their result: checkpoints repeat."""
    document = json.loads(metadata)
    if document["zarr_format"] == 2:
        chunks, dtype = document["chunks"], document["dtype"]
    else:
        chunks = document["chunk_grid"]["configuration"]["chunk_shape"]
        dtype = document["data_type"]
    return tuple(document["shape"]), tuple(chunks), parse_dtype(dtype)


@functools.lru_cache(maxsize=4096)
def _parse_sharding(encoded: str) -> Sharding | None:
    """A sharding as Orbax writes it: a JSON document inside a JSON string."""
    document = json.loads(encoded)
    if document["sharding_type"] == "SingleDeviceSharding":
        return SingleDeviceSharding(document["device_str"])
    if document["sharding_type"] != "NamedSharding":
        return None
    types = document.get("axis_types")
    devices = document.get("device_mesh")
    mesh = Mesh(
        tuple(document["axis_names"]),
        tuple(document["shape"]),
        tuple(text.rpartition(".")[2] for text in types) if types else None,
        tuple(_device_ids(devices["mesh"])) if devices else None,
    )
    return NamedSharding(mesh, normalize_spec(document["partition_spec"]))


def _device_ids(nested: Any) -> list[int]:
    if isinstance(nested, dict):
        return [nested["id"]]
    return [device for part in nested for device in _device_ids(part)]
