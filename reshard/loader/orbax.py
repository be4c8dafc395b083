"""The PyTree item of Orbax: `_METADATA`, `_sharding`, `array_metadatas/*` and zarr arrays.

Reads OCDBT and plain files, zarr v2 and v3. Facts about the documents are those of
orbax-checkpoint 0.4.4 to 0.12.8.
"""

import base64
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from reshard.arrays.handle import ArrayHandle, StoredArray, stored_name
from reshard.checkpoint import EMPTY_LEAVES, Checkpoint, Item, Leaf, Source
from reshard.errors import CheckpointFormatError, CorruptCheckpointError
from reshard.loader.array_metadata import parse_sharding, parse_zarr
from reshard.loader.detection import (
    ARRAYS_FOLDER,
    RECORD_FILE,
    RECORD_TEMPORARY,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
    ask_ahead,
)
from reshard.loader.json_documents import parse_json, read_json
from reshard.storage.array_store import ArrayStore, name_problem
from reshard.storage.bucket import REQUESTS
from reshard.storage.location import Location, not_a_file
from reshard.storage.ocdbt import MANIFEST, PROCESS
from reshard.tree import MAX_KEYS, Path, format_path
from reshard.units import format_bytes

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def read(item: Item, requests: int = REQUESTS) -> Checkpoint:
    """The checkpoint of an item, with so many requests to a bucket at once; see `reshard.open` for
    the errors."""
    directory = item.directory
    ask_ahead(directory)
    document = read_json(directory / TREE_FILE)
    if document is None:
        raise _without_tree(directory)
    entries = document.pop("tree_metadata", None)
    if not isinstance(entries, dict):
        raise CorruptCheckpointError(f"`{directory / TREE_FILE}` has no tree_metadata")
    store = _array_store(directory, document, requests)
    parsed = [_parse_entry(entry, directory) for entry in entries.values()]
    _check_tree([path for path, _, _ in parsed], directory)
    _check_container_types(document, directory)
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
    _ = store.values  # in a bucket, while the documents below are on their way
    shardings = read_json(directory / SHARDING_FILE) or {}
    described, key_impls = _array_metadatas(directory)
    strings = read_json(directory / STRINGS_FILE) or {}

    metadata = store.read_metadata(
        stored_name(path)
        for path, value_type, skipped in parsed
        if value_type in _ARRAYS and not skipped
    )
    leaves: dict[Path, Leaf] = {}
    by_name: dict[str, Path] = {}
    strings_by_name: dict[str, Path] = {}
    problems: list[str] = []
    for path, value_type, skipped in parsed:
        name = stored_name(path)
        if value_type in EMPTY_LEAVES:
            leaves[path] = EMPTY_LEAVES[value_type]
        elif value_type not in (*_ARRAYS, "string"):
            problems.append(f"{format_path(path)}: unknown value type {value_type!r:.40}")
        elif skipped:
            raise CheckpointFormatError(
                f"`{directory}` was saved with aggregate=True: its values are inside the msgpack "
                "file `checkpoint`, which is recognised but not read yet",
                hints=["restore it with PyTreeCheckpointer and save it again"],
            )
        elif value_type == "string":
            text = functools.reduce(_below, name.split("/"), strings)
            leaves[path] = text if isinstance(text, str) else ""
            other = strings_by_name.setdefault(name, path)
            if not isinstance(text, str):
                problems.append(f"{format_path(path)}: a string that `_strings.json` lacks")
            elif other != path:
                problems.append(
                    f"{format_path(other)} and {format_path(path)} are both stored as the string "
                    f"`{name}`: one of them has overwritten the other"
                )
        else:
            found = (store, next(metadata), shardings, key_impls)
            leaves[path] = _array(path, name, value_type, *found, problems)
            other = by_name.setdefault(name, path)
            if other != path:
                _mark_collision(leaves, other, path)
    if problems:
        raise CorruptCheckpointError(
            f"`{directory}` is not whole: leaves of its tree cannot be found or read", problems
        )
    # On a disk, the plan tells soon enough.
    state = "" if directory.is_local else directory.state((RECORD_FILE, RECORD_TEMPORARY))
    source = Source(**vars(item), store=store, metadata=document, described=described, state=state)
    notes = [f"step {step} was never committed and is left out" for step in item.uncommitted]
    return Checkpoint(leaves, source, tuple(notes))


def _below(node: Any, key: str) -> Any:
    """Orbax nests the strings' names at each slash."""
    return node.get(key) if isinstance(node, dict) else None


def _without_tree(directory: Location) -> Exception:
    legacy = directory / "checkpoint"
    if legacy.is_file():
        what = "holds its values in the msgpack file `checkpoint` (aggregate=True)"
        if b"PLACEHOLDER://" in legacy.beginning(1 << 20):
            file = "its tree is the msgpack file `checkpoint`"
            what = f"was written by Orbax 0.2 (no {TREE_FILE}; {file})"
        return CheckpointFormatError(
            f"`{directory}` {what}, which is recognised but not read yet",
            hints=["restore it with PyTreeCheckpointer and save it again"],
        )
    return CorruptCheckpointError(f"`{directory}` has no {TREE_FILE}: it was half written")


def _array_store(directory: Location, document: dict[str, Any], requests: int) -> ArrayStore:
    parts: tuple[str, ...] = ()
    if (directory / MANIFEST).exists():
        parts = ("",)
    else:
        names = (name for name in directory.names() if name.startswith(PROCESS))
        parts = tuple(name for name in names if (directory / name / MANIFEST).exists())
        merged = directory / "d"
        if parts and merged.is_dir() and merged.names():
            raise CorruptCheckpointError(
                f"`{directory}` has no manifest.ocdbt, and `{merged}` holds what it led to: the "
                "databases of its processes were merged, and the merged one has lost its manifest"
            )
    fills = not document.get("store_array_data_equal_to_fill_value", False)
    zarr3 = bool(document.get("use_zarr3", False))
    return ArrayStore(zarr3, directory, parts, fills, requests)


def _array_metadatas(directory: Location) -> tuple[bool, dict[str, str]]:
    """Whether there are any, and the PRNG implementation by name of the array."""
    folder = directory / ARRAYS_FOLDER
    if folder.is_symlink():
        raise not_a_file(folder)
    names = folder.names() if folder.is_dir() else []
    impls = {}
    for name in names:
        document = read_json(folder / name) or {}
        try:
            for entry in document.get("array_metadatas", ()):
                metadata = entry["array_metadata"]
                impl = (metadata.get("ext_metadata") or {}).get("random_key_impl")
                if impl:
                    if not isinstance(impl, str) or not impl.isprintable():
                        raise TypeError(impl)
                    impls[metadata["param_name"]] = impl
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"`{folder / name}` describes no arrays") from error
    return bool(names), impls


def _parse_entry(entry: Any, directory: Location) -> tuple[Path, str, bool]:
    try:
        path = tuple(_parse_key(key["key"], key["key_type"]) for key in entry["key_metadata"])
        value = entry["value_metadata"]
        return path, str(value["value_type"]), bool(value.get("skip_deserialize"))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"`{directory / TREE_FILE}` has an entry that cannot be read", [repr(entry)[:200]]
        ) from error


def _parse_key(key: Any, key_type: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"not a key: {key!r:.80}")
    if key_type != 1:
        return str(key)
    position = int(key)
    if position < 0 or str(position) != str(key):
        raise ValueError(f"not a position in a list: {key!r}")
    return position


def _check_tree(paths: Iterable[Path], directory: Location) -> None:
    """Raises CorruptCheckpointError unless the paths are those of the leaves of one tree."""
    containers: dict[tuple[str, ...], Path] = {}
    seen: dict[tuple[str, ...], Path] = {}
    problems = []
    for path in paths:
        if len(path) > MAX_KEYS:
            problems.append(f"{format_path(path)[:80]}...: it is {len(path)} levels deep")
            continue
        problem = name_problem(stored_name(path))
        if problem:
            problems.append(f"{format_path(path):.80}: {problem}")
        texts = tuple(map(str, path))
        if texts in seen:
            problems.append(f"{format_path(path):.80}: it is there twice")
        seen[texts] = path
        for end in range(len(texts) - 1, -1, -1):
            if texts[:end] in containers:
                break
            containers[texts[:end]] = path
    problems += [
        f"{format_path(path):.80}: it is a leaf, and {format_path(containers[texts]):.80} below it"
        for texts, path in seen.items()
        if texts in containers
    ]
    if problems:
        raise CorruptCheckpointError(f"`{directory / TREE_FILE}` describes no tree", problems)


def _check_container_types(document: dict[str, Any], directory: Location) -> None:
    """The record of container types is a JSON document of its own, inside a string."""
    record = document.get("value_metadata_tree")
    try:
        if record is not None:
            if not isinstance(record, str):
                raise ValueError("it is not text")
            parse_json(record)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"`{directory / TREE_FILE}`: its value_metadata_tree cannot be read: {error}"
        ) from error


def _array(
    path: Path,
    name: str,
    value_type: str,
    store: ArrayStore,
    metadata: bytes | None,
    shardings: dict[str, str],
    key_impls: dict[str, str],
    problems: list[str],
) -> ArrayHandle | None:
    if metadata is None:
        problems.append(f"{format_path(path)}: there is no array `{name}`")
        return None
    encoded = shardings.get(base64.urlsafe_b64encode(name.encode()).decode())
    key_impl = key_impls.get(name)
    try:
        array = parse_zarr(metadata, store.driver)
        sharding = None if encoded is None else parse_sharding(encoded, array.shape)
    except ValueError as error:
        problems.append(f"{format_path(path)}: its metadata cannot be read: {error}")
        return None
    store.keep(name, array.has_chunk)
    if not (store.ocdbt or store.directory.is_local):
        chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
        store.bound(name, chunk_bytes if array.plain_chunk is None else array.plain_chunk)
    wrong = [
        f"{format_path(path)}: its chunk `{key}` has {format_bytes(value.size)}, more than any of "
        f"{list(array.chunks)} can have"
        for key, value in store.values[name].items()
        if value.size > array.largest_chunk
    ]
    if key_impl is not None and (array.dtype != np.uint32 or not array.shape):
        wrong.append(f"{format_path(path)}: it is {array.dtype.name}, which no PRNG keys are")
    if wrong:
        problems += wrong
        return None
    if not store.ocdbt:
        # Files of chunks that cannot be whole: empty ones, and where it is known how many bytes
        # each has, all others that have not.
        for key, value in store.values[name].items():
            fits = value.size == array.plain_chunk if array.plain_chunk is not None else value.size
            if key != store.metadata_key and not fits:
                sizes = (value.size, array.plain_chunk or 1)
                store.values[name][key] = value._replace(truncated=sizes)
    return ArrayHandle(
        path=path,
        shape=array.shape,
        dtype=array.dtype,
        chunk_shape=array.chunks,
        sharding=sharding,
        saved_sharding=sharding,
        value_type=value_type,
        key_impl=key_impl,
        stored_dtype=array.dtype,
        data=StoredArray(store, name, array.metadata),
    )


def _mark_collision(leaves: dict[Path, Leaf], one: Path, other: Path) -> None:
    for path, same in ((one, other), (other, one)):
        handle = leaves[path]
        if isinstance(handle, ArrayHandle):
            leaves[path] = dataclasses.replace(handle, same_name=same)
