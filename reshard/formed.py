"""Arrays formed of stored ones: what is known of them before anything is read.

A formed array is read through TensorStore views of what it is made of. Where several are parts of
one (layers of a scanned block, halves of a fused projection), a stored chunk may hold something of
each; such arrays are read together, so that it is decoded once.
"""

import dataclasses
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard import zarr
from reshard.boxes import Shape
from reshard.checkpoint import ArrayHandle, Formed, describe
from reshard.errors import TreeMismatchError
from reshard.mesh import NamedSharding, Sharding, fitting_spec
from reshard.operations import Constant, Operation, Split, Stack, Unstack
from reshard.store import StoredValue
from reshard.tree import Path, format_path


def form(
    operation: Operation, inputs: Sequence[ArrayHandle], outputs: Sequence[Path]
) -> list[ArrayHandle]:
    """The arrays that an operation makes of others.

    Args:
      operation: the operation.
      inputs: what it takes, at least one.
      outputs: paths of what it makes.

    Raises:
      TreeMismatchError: the operation does not apply to them, or they are of different kinds.
    """
    first = inputs[0]
    shapes = [handle.shape for handle in inputs]
    made = operation.shapes(shapes)
    for what in ("dtype", "stored_dtype", "value_type", "key_impl"):
        if len({getattr(handle, what) for handle in inputs}) > 1:
            texts = [f"{format_path(h.path)}  {describe(h)} {h.value_type}" for h in inputs]
            raise TreeMismatchError("arrays of different kinds cannot become one", texts)
    if first.key_impl is not None:
        raise TreeMismatchError(f"{format_path(first.path)}: PRNG keys are only moved as they are")
    formed = Formed(operation, tuple(inputs))
    chunks = operation.chunks([handle.chunk_shape for handle in inputs], shapes)
    now = _shardings(operation, [handle.sharding for handle in inputs], shapes, made)
    saved = _shardings(operation, [handle.saved_sharding for handle in inputs], shapes, made)
    return [
        dataclasses.replace(
            first,
            path=path,
            shape=shape,
            chunk_shape=chunks[part],
            sharding=now[part],
            saved_sharding=saved[part],
            metadata=zarr.dump(zarr.with_shape(json.loads(first.metadata), shape, chunks[part])),
            formed=formed,
            part=part,
        )
        for part, (path, shape) in enumerate(zip(outputs, made, strict=True))
    ]


def constant(path: Path, values: np.ndarray, like: ArrayHandle, **kind: Any) -> ArrayHandle:
    """An array of values that are in memory, to be stored as another one is.

    Args:
      path: its path.
      values: its values.
      like: an array from whose store and codec it takes its own.
      kind: other fields of the handle: `sharding`, `value_type`, `key_impl`.
    """
    chunk = tuple(max(size, 1) for size in values.shape)
    document = zarr.with_shape(json.loads(like.metadata), values.shape, chunk)
    return dataclasses.replace(
        like,
        path=path,
        shape=values.shape,
        dtype=values.dtype,
        stored_dtype=values.dtype,
        chunk_shape=chunk,
        metadata=zarr.dump(zarr.with_dtype(document, values.dtype)),
        same_name=None,
        formed=Formed(Constant(values), ()),
        part=0,
        **kind,
    )


def _shardings(
    operation: Operation,
    inputs: Sequence[Sharding | None],
    shapes: Sequence[Shape],
    made: Sequence[Shape],
) -> list[Sharding | None]:
    """Shardings of what an operation makes: on the mesh of its inputs, if they share one."""
    named = [sharding for sharding in inputs if isinstance(sharding, NamedSharding)]
    if len(named) < len(inputs) or len({sharding.mesh for sharding in named}) > 1:
        return [inputs[0]] * len(made) if len(set(inputs)) == 1 else [None] * len(made)
    mesh = named[0].mesh if named else None
    if mesh is None:
        return [None] * len(made)
    specs = operation.specs([sharding.spec for sharding in named], shapes)
    return [
        NamedSharding(mesh, fitting_spec(shape, mesh, spec))
        for shape, spec in zip(made, specs, strict=True)
    ]


class Family(NamedTuple):
    """Arrays that share stored chunks box by box.

    Attributes:
      key: the same for all of them.
      count: how many there are.
    """

    key: Hashable
    count: int


def family(handle: ArrayHandle) -> Family | None:
    """The arrays that are to be read together with this one; None where it shares no chunk."""
    levels: list[Hashable] = []
    together = 1
    while handle.formed is not None and len(handle.formed.inputs) == 1:
        operation, source = handle.formed.operation, handle.formed.inputs[0]
        group: Hashable = handle.part
        if isinstance(operation, Unstack):
            chunk = source.chunk_shape[operation.axis]
            group = handle.part // chunk
            together *= min(chunk, operation.count - group * chunk)
        elif isinstance(operation, Split) and _shares(operation, source):
            group = None
            together *= len(operation.sizes)
        levels.append((operation, group))
        handle = source
    if together == 1:
        return None
    root = id(handle.formed) if handle.formed is not None else (id(handle.store), handle.name)
    return Family((root, *levels), together)


def _shares(operation: Split, source: ArrayHandle) -> bool:
    """Whether stored chunks hold something of several parts, which are alike."""
    chunk = source.chunk_shape[operation.axis]
    return len(set(operation.sizes)) == 1 and operation.sizes[0] % chunk != 0


def rereads(handle: ArrayHandle) -> int:
    """How often the stored chunks of an array are read for it and for the other parts of what it is
    a part of, where these cannot be read together: parts of different sizes."""
    if handle.formed is None:
        return 1
    operation, inputs = handle.formed.operation, handle.formed.inputs
    times = max(map(rereads, inputs), default=1)
    if isinstance(operation, Split):
        chunk = inputs[0].chunk_shape[operation.axis]
        if len(set(operation.sizes)) > 1 and any(size % chunk for size in operation.sizes):
            times *= len(operation.sizes)
    return times


def stored_share(handle: ArrayHandle) -> int:
    """Stored bytes that belong to an array: of what it shares with others, by its elements."""
    if handle.formed is None:
        return sum(handle.stored_sizes())
    total = sum(handle.formed.sizes)
    whole = sum(map(stored_share, handle.formed.inputs))
    return whole * handle.formed.sizes[handle.part] // total if total else 0


class StoredChunk(NamedTuple):
    """A stored value that an array consists of.

    Attributes:
      name: the name of the stored array that it belongs to.
      key: its key below that name.
      new_key: its key below the name of the array that consists of it.
      value: where it is.
    """

    name: str
    key: str
    new_key: str
    value: StoredValue


def stored_chunks(handle: ArrayHandle) -> list[StoredChunk] | None:
    """The stored values that an array consists of as they are: chunks, and for arrays that are
    stored as they are also their metadata. None where it has to be decoded to be formed."""
    if handle.dtype != handle.stored_dtype:
        return None
    if handle.formed is None:
        values = handle.store.values[handle.name]
        return [StoredChunk(handle.name, key, key, value) for key, value in values.items()]
    kinds = {
        (zarr.encoding(json.loads(root.metadata)), math.prod(root.chunk_shape))
        for root in _roots(handle)
    }
    placed = _placed(handle)
    if placed is None or len(kinds) != 1 or None in dict(kinds):
        return None
    document = json.loads(handle.metadata)
    return [
        StoredChunk(root.name, key, zarr.chunk_key(document, index), value)
        for root, key, value, index in placed
    ]


def _roots(handle: ArrayHandle) -> Iterator[ArrayHandle]:
    if handle.formed is None:
        yield handle
        return
    for source in handle.formed.inputs:
        yield from _roots(source)


def _placed(
    handle: ArrayHandle,
) -> list[tuple[ArrayHandle, str, StoredValue, tuple[int, ...]]] | None:
    """The stored chunks that an array consists of, with their places in its grid: by stacks and
    unstacks of whole chunks alone."""
    formed = handle.formed
    if formed is None:
        document = json.loads(handle.metadata)
        return [
            (handle, key, value, zarr.chunk_index(document, key))
            for key, value in handle.store.values[handle.name].items()
            if key != handle.store.metadata_key
        ]
    parts = [_placed(source) for source in formed.inputs]
    operation = formed.operation
    if any(part is None for part in parts):
        return None
    if isinstance(operation, Stack) and len({h.chunk_shape for h in formed.inputs}) == 1:
        axis = operation.axis % len(handle.shape)
        return [
            (root, key, value, (*index[:axis], place, *index[axis:]))
            for place, part in enumerate(parts)
            for root, key, value, index in part or ()
        ]
    if isinstance(operation, Unstack):
        axis = operation.axis % len(formed.inputs[0].shape)
        if formed.inputs[0].chunk_shape[axis] == 1:
            return [
                (root, key, value, index[:axis] + index[axis + 1 :])
                for root, key, value, index in parts[0] or ()
                if index[axis] == handle.part
            ]
    return None
