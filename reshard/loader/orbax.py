"""The PyTree item of Orbax: `_METADATA`, `_sharding`, `array_metadatas/*` and zarr arrays.

Reads OCDBT and plain files, zarr v2 and v3, as orbax-checkpoint 0.4.4 to 0.12.8 writes them.
"""

import base64
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reshard.arrays.handle import ArrayHandle, StoredArray, stored_name
from reshard.checkpoint import Checkpoint, Item, Leaf, Source, without_value
from reshard.errors import CheckpointFormatError, CorruptCheckpointError
from reshard.loader import detection
from reshard.loader.array_metadata import ZarrArray, parse_sharding, parse_zarr
from reshard.loader.json_documents import parse_json, read_json
from reshard.storage import identity
from reshard.storage.array_store import ArrayStore, name_problem
from reshard.storage.disk import UNKNOWN, Location, not_a_file
from reshard.storage.ocdbt import FOLDERS, MANIFEST, PROCESS
from reshard.tree import MAX_KEYS, Path, format_path, overlaps
from reshard.units import format_bytes

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
# Documents of an item that are read, and its marker.
_DOCUMENTS = (detection.TREE_FILE, detection.SHARDING_FILE, detection.STRINGS_FILE)
_DOCUMENTS += (detection.MARKER,)


def read(item: Item, requests: int, seen: identity.Files) -> Checkpoint:
    """The checkpoint of an item. Sends at most `requests` to a bucket at once. Adds the entries of
    the files that it reads to those that were `seen`. See `reshard.open` for the errors."""
    directory = item.directory
    described = _array_documents(directory)
    seen |= directory.look([*_DOCUMENTS, *described])
    document = read_json(directory / detection.TREE_FILE)
    if document is None:
        raise without_tree(directory)
    parsed = _parse_tree(document, directory)
    array_paths = [path for path, value_type in parsed if value_type in _ARRAYS]
    store = _array_store(directory, document, requests)
    if document.get("use_ocdbt") and not store.ocdbt and array_paths:
        raise CorruptCheckpointError(
            f"`{directory}` is incomplete: _METADATA says OCDBT, but manifest.ocdbt is missing"
        )
    if not store.ocdbt and () in array_paths:
        raise CheckpointFormatError(
            f"`{directory}` is a single array without OCDBT: its files are among the documents, "
            "and `reshard` does not read them",
            hints=["restore it with Orbax, and save it with OCDBT or inside a dict"],
        )
    _ = store.values  # in a bucket, while the requests for the documents below run
    shardings = read_json(directory / detection.SHARDING_FILE) or {}
    key_impls, write_shapes = _array_metadatas(directory, described)
    strings = read_json(directory / detection.STRINGS_FILE) or {}

    metadata = store.read_metadata(stored_name(path).removesuffix("/") for path in array_paths)
    leaves: dict[Path, Leaf] = {}
    by_name: dict[tuple[bool, str], Path] = {}
    problems: list[str] = []
    for path, value_type in parsed:
        name = stored_name(path)
        if value_type == "string":
            text = functools.reduce(_below, name.split("/"), strings)
            leaves[path] = text if isinstance(text, str) else ""
            other = by_name.setdefault((True, name), path)
            if not isinstance(text, str):
                problems.append(f"{format_path(path)}: its string is missing in `_strings.json`")
            elif other != path:
                problems.append(
                    f"{format_path(other)} and {format_path(path)} are both stored as the string "
                    f"`{name}`: one of them has overwritten the other"
                )
        elif value_type in _ARRAYS:
            stored = (store, next(metadata), shardings, key_impls)
            leaves[path] = array(path, name, value_type, *stored, problems)
            other = by_name.setdefault((False, name.removesuffix("/")), path)
            for one, same in ((path, other), (other, path)) if other != path else ():
                if isinstance(handle := leaves[one], ArrayHandle):
                    leaves[one] = dataclasses.replace(handle, same_name=same)
        else:
            leaves[path] = without_value(value_type)
    if problems:
        raise CorruptCheckpointError(
            f"`{directory}` is damaged: some of its leaves cannot be found or read", problems
        )
    apart = {"metadata_apart": bool(described), "write_shapes": write_shapes}
    source = source_of(item, store, document, seen, **apart)
    return Checkpoint(leaves, source, item.left_out)


def step_document(source: Source) -> Mapping[str, Any]:
    """The `_CHECKPOINT_METADATA` document of a step, as transforms have changed it."""
    if source.step_document is not None or source.is_foreign:
        return source.step_document or {}
    return read_json(source.root / source.step / detection.CHECKPOINT_FILE) or {}


def source_of(
    item: Item,
    store: ArrayStore,
    document: dict[str, Any],
    seen: identity.Files,
    metadata_apart: bool = True,
    **facts: Any,
) -> Source:
    """The source of a checkpoint. Its identity is the files that were `seen`, with those of the
    arrays. Adds the metadata of arrays, which was read, to what was `seen`."""
    named = {value.file for values in store.values.values() for value in values.values()}
    named |= store.index
    files = {file: entry for file, entry in store.files.items() if file in named} | seen
    found = identity.listed(store.directory, files)
    store.files.update(found.files)
    seen |= {f: files[f] for f in files if f in store.index or f.endswith(store.metadata_key)}
    facts |= {"metadata": document, "metadata_apart": metadata_apart, "identity": found}
    of_item = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return Source(**of_item, store=store, **facts)


def _entries(document: dict[str, Any], file: Location) -> list[tuple[Path, str, bool]]:
    """Takes from the document each leaf's path, value type, and whether its value is elsewhere."""
    entries = document.pop("tree_metadata", None)
    if not isinstance(entries, dict):
        raise CorruptCheckpointError(
            f"`{file}` is damaged: it lacks `tree_metadata`, the list of leaves"
        )
    return [_parse_entry(entry, file) for entry in entries.values()]


def array_names(directory: Location) -> frozenset[str]:
    """The names of an item's arrays that are plain files, from its document; none if a database has
    them."""
    document = read_json(directory / detection.TREE_FILE)
    if document is None or (directory / MANIFEST).exists():
        return frozenset()
    entries = _entries(document, directory / detection.TREE_FILE)
    return frozenset(stored_name(path) for path, _, _ in entries)


def _parse_tree(document: dict[str, Any], directory: Location) -> list[tuple[Path, str]]:
    """The path and value type of each leaf."""
    file = directory / detection.TREE_FILE
    parsed = _entries(document, file)
    if problems := tree_problems([path for path, _, _ in parsed]):
        raise CorruptCheckpointError(f"`{file}` does not describe a tree", problems)
    values = document.get("value_metadata_tree")  # a JSON document inside a string
    try:
        if values is not None:
            if not isinstance(values, str):
                raise ValueError("it is not text")
            parse_json(values)
    except ValueError as error:
        text = f"`{file}`: its value_metadata_tree cannot be read: {error}"
        raise CorruptCheckpointError(text) from error
    return [(path, value_type) for path, value_type, _ in parsed]


def _below(node: Any, key: str) -> Any:
    """The child of a node: Orbax nests the names of strings at each slash."""
    return node.get(key) if isinstance(node, dict) else None


def without_tree(directory: Location) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"`{directory}` has no _METADATA: it is incomplete")


def values_file(item: Item) -> Location | None:
    """The msgpack file of an item, if it holds values, and not only the tree."""
    file = item.directory / "checkpoint"
    if detection.describe_file(file) != detection.MSGPACK:
        return None
    file.file_bytes()  # raises for a link, whose target may be outside the checkpoint
    document = read_json(item.directory / detection.TREE_FILE)
    if document is None:
        return file
    entries = _entries(document, item.directory / detection.TREE_FILE)
    values = [(path, skips) for path, kind, skips in entries if kind in (*_ARRAYS, "string")]
    aggregated = [format_path(path) for path, skips in values if skips]
    if 0 < len(aggregated) < len(values):
        raise CheckpointFormatError(
            f"`{item.directory}` holds some leaves in `checkpoint`, as Orbax saves them with "
            "`aggregate=True`, and others as arrays. `reshard` does not read both",
            aggregated,
            ["restore it with orbax.checkpoint.PyTreeCheckpointer, and save it again"],
        )
    return file if aggregated else None


def _array_store(directory: Location, document: dict[str, Any], requests: int) -> ArrayStore:
    parts: tuple[str, ...] = ()
    if (directory / MANIFEST).exists():
        parts = ("",)
    else:
        names = (name for name in directory.names() if name.startswith(PROCESS))
        parts = tuple(name for name in names if (directory / name / MANIFEST).exists())
        folders = (directory / name for name in FOLDERS if parts)
        merged = next((folder for folder in folders if folder.is_dir() and folder.names()), None)
        if merged is not None:
            raise CorruptCheckpointError(
                f"`{directory}` is incomplete: `{merged}` holds its data, but manifest.ocdbt, "
                "which lists it, is missing"
            )
    fills = not document.get("store_array_data_equal_to_fill_value", False)
    zarr3 = bool(document.get("use_zarr3", False))
    return ArrayStore(zarr3, directory, parts, fills, requests)


def _array_documents(directory: Location) -> list[str]:
    """The documents of array metadata."""
    folder = directory / detection.ARRAYS_FOLDER
    entry = folder.entry()
    if entry is not None and not entry.is_file and not entry.is_dir:
        raise not_a_file(folder)
    return [f"{folder.name}/{name}" for name in (folder.names() if entry and entry.is_dir else ())]


def _array_metadatas(
    directory: Location, names: Iterable[str]
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The PRNG implementation and the write shape of arrays, by name."""
    impls, shapes = {}, {}
    for name in names:
        document = read_json(directory / name) or {}
        try:
            for entry in document.get("array_metadatas", ()):
                metadata = entry["array_metadata"]
                impl = (metadata.get("ext_metadata") or {}).get("random_key_impl")
                if impl:
                    if not isinstance(impl, str) or not impl.isprintable():
                        raise TypeError(impl)
                    impls[metadata["param_name"]] = impl
                shape = metadata.get("write_shape")
                if isinstance(shape, list) and all(type(size) is int for size in shape):
                    shapes[str(metadata["param_name"])] = shape
        except (TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"`{directory / name}` is damaged: its entries do not describe arrays"
            ) from error
    return impls, shapes


def _parse_entry(entry: Any, file: Location) -> tuple[Path, str, bool]:
    try:
        path = tuple(_parse_key(key["key"], key["key_type"]) for key in entry["key_metadata"])
        value = entry["value_metadata"]
        if not (kind := str(value["value_type"])).isprintable():
            raise ValueError("not the name of a type")
        return path, kind, bool(value.get("skip_deserialize"))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"`{file}` is damaged: an entry of `tree_metadata` cannot be read", [repr(entry)[:200]]
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


def tree_problems(paths: Iterable[Path]) -> list[str]:
    """The reasons why paths are not the leaves of one tree."""
    problems, texts, kept = [], [], []
    for path in paths:
        if len(path) > MAX_KEYS:
            problems.append(f"{format_path(path)[:80]}...: it is {len(path)} levels deep")
            continue
        if problem := name_problem(stored_name(path)):
            problems.append(f"{format_path(path):.80}: {problem}")
        texts.append(format_path(path)[:80])
        kept.append(path)
    for one, other, above in overlaps(enumerate(kept)):
        text = f"it is a leaf, and {texts[other]} below it" if above else "it occurs twice"
        problems.append(f"{texts[one]}: {text}")
    return problems


def array(
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
        problems.append(f"{format_path(path)}: its array is missing: `{name}`")
        return None
    encoded = shardings.get(base64.urlsafe_b64encode(name.encode()).decode())
    key_impl = key_impls.get(name)
    name = name.removesuffix("/")  # TensorStore stores `a/` as `a`
    try:
        array = parse_zarr(metadata, store.driver)
        sharding = parse_sharding(str(encoded), len(array.shape)) if encoded else None
    except ValueError as error:
        problems.append(f"{format_path(path)}: its metadata cannot be read: {error}")
        return None
    wrong = _keep_chunks(path, name, array, store)
    if key_impl is not None and (array.dtype != np.uint32 or not array.shape):
        wrong.append(f"{format_path(path)}: it is {array.dtype.name}, but PRNG keys are not")
    if wrong:
        problems += wrong
        return None
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


def _keep_chunks(path: Path, name: str, array: ZarrArray, store: ArrayStore) -> list[str]:
    """Removes the values below an array's name that are neither its metadata nor its chunks: no
    reader uses them. Marks truncated plain chunks. Returns a line for each chunk that is larger
    than any chunk of the array can be."""
    wrong, kept = [], {}
    for key, value in store.values[name].items():
        if key != store.metadata_key:
            if not array.has_chunk(key):
                continue
            if value.size > array.largest_chunk:
                wrong.append(
                    f"{format_path(path)}: its chunk `{key}` has {format_bytes(value.size)}, more "
                    f"than any of {list(array.chunks)} can have"
                )
            if value.size == UNKNOWN:  # in a bucket
                value = value._replace(size=math.prod(array.chunks) * array.dtype.itemsize)
            elif not store.ocdbt and value.size != (array.plain_chunk or value.size or 1):
                value = value._replace(truncated=(value.size, array.plain_chunk or 1))
        kept[key] = value
    store.values[name] = kept
    return wrong
