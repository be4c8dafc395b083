"""The JSON documents of an item: those that Orbax reads, and the record of its digests.

The record has digests of what a job writes and of what it copies. Recorded digests of the source
are compared with what is read, and those of the destination with what was written, if that is read
back.

Facts about Orbax's documents are those of orbax-checkpoint 0.12.8; older versions read a subset.
"""

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard import errors
from reshard.arrays.dtypes import name_of
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint, Source, empty_name
from reshard.engine.memory import cost_bytes
from reshard.engine.plan import ArrayPlan
from reshard.loader import detection
from reshard.loader.orbax import array
from reshard.loader.safetensors import INDEX
from reshard.sharding import mesh as meshes
from reshard.storage.array_store import ArrayStore
from reshard.tree import Key, Path, as_python, format_path, nested
from reshard.verify import digest_record
from reshard.verify.values import least_memory, read_digests
from reshard.verify.verification import reason
from reshard.writer.format import TargetFormat, index
from reshard.writer.plan import ItemPlan
from reshard.writer.siblings import is_sibling


def documents(item: ItemPlan) -> dict[str, bytes]:
    """File name -> content of an item's documents."""
    if files := item.format.files:
        return {INDEX: index(files)} if len(files) > 1 else {}
    ckpt, source = item.ckpt, item.ckpt.source
    shapes = {array.path: _write_shape(array, source) for array in item.arrays}
    strings = nested(  # Orbax nests their names at each slash
        (tuple(stored_name(path).split("/")), leaf)
        for path, leaf in ckpt.items()
        if isinstance(leaf, str)
    )
    found: dict[str, Any] = {detection.TREE_FILE: _tree(ckpt, item.format, shapes)}
    if shardings := _shardings(ckpt):
        found[detection.SHARDING_FILE] = shardings
    if source.metadata_apart:
        found[f"{detection.ARRAYS_FOLDER}/process_0"] = _array_metadatas(item.arrays, shapes)
    if strings:
        found[detection.STRINGS_FILE] = strings
    return {name: json.dumps(document).encode() for name, document in found.items()}


def step_documents(checkpoints: Iterable[Checkpoint]) -> dict[str, bytes]:
    """Path below the destination -> content of each document of a step that a transform changed."""
    return {
        f"{c.source.step}/{detection.CHECKPOINT_FILE}".lstrip("/"): json.dumps(document).encode()
        for c in checkpoints
        if (document := c.source.step_document) is not None
    }


def _write_shape(array: ArrayPlan, source: Source) -> list[int]:
    """The shape that each process wrote: of an array that is copied on its sharding, that of the
    source. Orbax divides replicated arrays among their replicas."""
    handle, data = array.handle, array.handle.stored
    if data and data.store == source.store and handle.sharding == handle.saved_sharding:
        known = source.write_shapes.get(data.name, ())
        if array.verbatim and len(known) == len(handle.shape):
            return list(known)
    return list(meshes.shard_shape(handle.shape, handle.sharding))


def _tree(
    ckpt: Checkpoint, target: TargetFormat, shapes: Mapping[Path, list[int]]
) -> dict[str, Any]:
    entries = {}
    for path in [()] if () in ckpt else _in_order(nested((path, path) for path in ckpt)):
        leaf = ckpt[path]
        if isinstance(leaf, ArrayHandle):
            value: dict[str, Any] = {"value_type": leaf.value_type, "skip_deserialize": False}
            if ckpt.source.metadata_apart and leaf.value_type == "jax.Array":
                value["write_shape"] = shapes[path]
        elif isinstance(leaf, str):
            value = {"value_type": "string", "skip_deserialize": False}
        else:
            value = {"value_type": empty_name(leaf), "skip_deserialize": True}
        entries[str(tuple(map(str, path)))] = {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path
            ],
            "value_metadata": value,
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


def _in_order(node: Mapping[Key, Any]) -> Iterator[Path]:
    """The paths in a tree, with the positions of each list in ascending order. Orbax before 0.12
    appends to lists as it reads, and fails if a larger position comes first."""
    positions = all(isinstance(key, int) for key in node)
    for key in sorted(node) if positions else node:
        if isinstance(node[key], dict):
            yield from _in_order(node[key])
        else:
            yield node[key]


def _shardings(ckpt: Checkpoint) -> dict[str, str]:
    """Name -> sharding, empty if no leaf has one. If the document exists, Orbax looks up every
    `jax.Array` in it, and takes empty text for no sharding."""
    texts: dict[int, str] = {}  # leaves share their shardings
    found = {}
    for handle in ckpt.arrays:
        sharding = handle.sharding
        if sharding is not None or handle.value_type == "jax.Array":
            if id(sharding) not in texts:
                texts[id(sharding)] = json.dumps(_sharding(sharding)) if sharding else ""
            name = base64.urlsafe_b64encode(stored_name(handle.path).encode()).decode()
            found[name] = texts[id(sharding)]
    return found if any(found.values()) else {}


def _sharding(sharding: meshes.Sharding) -> dict[str, Any]:
    if not isinstance(sharding, meshes.NamedSharding):
        return {"sharding_type": "SingleDeviceSharding", "device_str": sharding.device}
    mesh = sharding.mesh
    document: dict[str, Any] = {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.axis_sizes),
        "axis_names": list(mesh.axis_names),
    }
    if mesh.axis_types is not None:
        document["axis_types"] = [f"AxisType.{name}" for name in mesh.axis_types]
    document["partition_spec"] = meshes.spec_entries(sharding.spec)
    if mesh.device_ids is not None and mesh.size <= meshes.MAX_DEVICE_IDS:
        ids = np.array([{"id": device} for device in mesh.device_ids])
        document["device_mesh"] = {"mesh": ids.reshape(mesh.axis_sizes).tolist()}
    return document


def _array_metadatas(
    arrays: Sequence[ArrayPlan], shapes: Mapping[Path, list[int]]
) -> dict[str, Any]:
    return {
        "array_metadatas": [
            {
                "array_metadata": {
                    "param_name": stored_name(array.path),
                    "write_shape": shapes[array.path],
                    "chunk_shape": list(array.chunk),
                    "ext_metadata": {"random_key_impl": impl} if impl else None,
                }
            }
            for array in arrays
            if array.handle.value_type == "jax.Array"
            for impl in [array.handle.key_impl]
        ]
    }


# The record of digests.

NO_RECORD = digest_record.Record({}, {}, {}, {})
NOT_READ_BACK = "the values read back differ from those written"


def source_record(ckpt: Checkpoint, handles: Sequence[ArrayHandle]) -> digest_record.Record:
    """The recorded digests of the source, by names in its store. Raises CorruptCheckpointError if
    arrays or documents differ from the record. Sibling items and files need only exist: `verify`
    compares them."""
    source = ckpt.source
    record = digest_record.read_record(source.store.directory / digest_record.FILE)
    if record is None:
        return NO_RECORD
    kinds = [(root.path, record.other_kind(root)) for root in _stored(handles).values()]
    problems = [f"{format_path(path)}: {text} on record" for path, text in kinds if text]
    problems += record.missing_arrays(source, "on record")
    source.store.directory.prefetch(record.files)
    files = record.changed_files(
        source, lambda file: None if is_sibling(ckpt, file) else file.sha256()
    )
    if problems or files:
        forget = (
            []
            if problems
            else [digest_record.forget_hint(source.store.directory / digest_record.FILE)]
        )
        raise errors.CorruptCheckpointError(
            f"`{source.path}` does not match its recorded digests",
            problems + files,
            [verify_hint(source), *forget],
        )
    return record


def read_again(
    arrays: Sequence[ArrayPlan], record: digest_record.Record, digest: bool
) -> tuple[list[ArrayHandle], list[ArrayHandle]]:
    """Arrays that are read only for their digests: recorded sources of cast and derived arrays, and
    with `digest` also arrays that are copied without a digest."""
    stored = ((array.handle.stored, array.verbatim) for array in arrays)
    as_read = {data.name for data, verbatim in stored if data is not None and not verbatim}
    roots = _stored(array.handle for array in arrays if array.handle.stored is None)
    sources = [h for name, h in roots.items() if name not in as_read and record.digest(h)]
    copied = (array.handle for array in arrays if digest and array.verbatim)
    verbatim = [handle for handle in copied if not record.digest(handle)]
    return sources, verbatim


def read_costs(item: ItemPlan, verify: bool) -> Iterator[tuple[Path, int]]:
    """Path, and bytes of a chunk, of all arrays that are read but not rewritten."""
    for handle in (*item.read_sources, *item.read_verbatim):
        yield handle.path, least_memory((handle,))
    if verify:
        for array in item.arrays:
            handle = array.handle
            if array.verbatim:
                yield handle.path, least_memory((handle,))
                continue
            # Once it is written; at most, since it is encoded anew.
            itemsize = handle.dtype.itemsize
            encoded = array.encoding.most_encoded(array.chunk, itemsize)
            decoded = math.prod(array.chunk) * itemsize
            yield handle.path, cost_bytes(encoded + decoded, decoded, decoded)


def item_record(
    item: ItemPlan, hashes: Mapping[str, str], max_memory: int, report: Callable[[int], None]
) -> digest_record.Record:
    """The record of an item whose documents have these hashes, without the digests that the shares
    compute. Reads the arrays that are read only for their digests. For arrays that are not read,
    the source's digests count. Raises CorruptCheckpointError if an array cannot be read, or
    differs from its recorded digest."""
    texts = {}
    if item.read_sources or item.read_verbatim:
        texts = _read_digests(item, max_memory, report)
    arrays = {
        stored_name(h.path): digest_record.ArrayRecord(
            name_of(h.dtype), h.shape, texts.get(h.path, item.record.digest(h))
        )
        for h in (array.handle for array in item.arrays)
    }
    return digest_record.record_of(item.ckpt, arrays, hashes)


def _read_digests(
    item: ItemPlan, max_memory: int, report: Callable[[int], None]
) -> dict[Path, str]:
    """Reads arrays that are read only for their digests. Returns those of verbatim copies."""
    # Apart, and by name: another leaf may have been renamed to the path of a source.
    sources = _stored(item.read_sources)
    by_name = [h.at((name,)) for name, h in sources.items()]
    found, failed = read_digests(by_name, max_memory, report)
    texts, failed_too = read_digests(item.read_verbatim, max_memory, report)
    source = item.ckpt.source
    if failures := {**failed, **failed_too}:
        raise errors.CorruptCheckpointError(
            f"arrays of `{source.path}` cannot be read",
            [f"{format_path(path)}: {reason(error, path)}" for path, error in failures.items()],
            [verify_hint(source)],
        )
    wrong = [h for name, h in sources.items() if item.record.digest(h) not in (None, found[name,])]
    if wrong:
        lines = [f"{format_path(h.path)}  {digest_record.stored_record(h)}" for h in wrong]
        raise other_values(str(source.path), lines, verify_hint(source))
    return texts


def other_values(source: str, lines: Sequence[str], hint: str) -> errors.CorruptCheckpointError:
    """The error for arrays that differ from their recorded digests, a line each."""
    return errors.CorruptCheckpointError(
        f"values read from `{source}` do not match its recorded digests", lines, [hint]
    )


def stored_arrays(store: ArrayStore, names: Iterable[str]) -> Iterator[ArrayHandle]:
    """Arrays of a store, by their names. Raises CorruptCheckpointError if one cannot be opened."""
    problems: list[str] = []
    for name, metadata in zip(names, store.read_metadata(names), strict=True):
        handle = array((name,), name, "jax.Array", store, metadata, {}, {}, problems)
        if handle is not None:
            yield handle
    if problems:
        raise errors.CorruptCheckpointError(NOT_READ_BACK, problems)


def read_back(
    written: Iterable[ArrayHandle],
    arrays: Mapping[str, Mapping[str, Any]],
    max_memory: int,
    report: Callable[[int], None],
) -> dict[str, str]:
    """Reads written arrays, and compares them with their new record, by their names. Returns the
    name and the problem of each array that cannot be read, or differs."""
    try:
        handles = [*written]
    except (
        errors.CorruptCheckpointError,
        errors.CheckpointFormatError,
        errors.CheckpointNotFoundError,
    ) as error:
        lines = "; ".join([error.summary, *error.problems])
        return {name: f"{name}: {lines}" for name in arrays}
    digests, failed = read_digests(handles, max_memory, report)
    names = {handle.path: stored_name(handle.path) for handle in handles}
    problems = {names[path]: reason(error, path) for path, error in failed.items()}
    for handle in handles:
        expected = arrays[names[handle.path]]
        found = {"dtype": name_of(handle.dtype), "shape": list(handle.shape)}
        if handle.path in digests and expected["digest"] is not None:
            found["digest"] = digests[handle.path]
        if any(expected[key] != value for key, value in found.items()):
            problems[names[handle.path]] = "its values differ from the written ones"
    problems |= dict.fromkeys(sorted(arrays.keys() - names.values()), "it is missing")
    return {name: f"{name}: {text}" for name, text in problems.items()}


def verify_hint(source: Source) -> str:
    """The call that checks a source."""
    step = as_python(str(source.place))
    if len(source.items) > 1:
        step = f"reshard.open({step}, item={as_python(source.item)})"
    return f"reshard.verify({step})"


def _stored(handles: Iterable[ArrayHandle]) -> dict[str, ArrayHandle]:
    """Name -> stored array, uncast: the stored arrays behind these."""
    found: dict[str, ArrayHandle] = {}
    for handle in handles:
        for root, data in handle.roots():
            cast = root.dtype != root.stored_dtype
            found.setdefault(
                data.name, dataclasses.replace(root, dtype=root.stored_dtype) if cast else root
            )
    return found
