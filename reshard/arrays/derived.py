"""Arrays derived from stored arrays.

A derived array is read through TensorStore views of its inputs. Several derived arrays may be parts
of one (layers of a scanned block, halves of a fused projection), and share its stored chunks. Such
arrays are read together, so that each chunk is decoded once.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from reshard import units
from reshard.arrays import boxes, zarr
from reshard.arrays import operations as ops
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.dtypes import is_floating, is_scale, saturates
from reshard.arrays.handle import (
    ArrayHandle,
    Derived,
    Outputs,
    StoredArray,
    StoredChunk,
    ancestors,
    check_names,
    widest,
)
from reshard.errors import TreeMismatchError
from reshard.sharding.mesh import NamedSharding, Sharding, fitting_spec, replicated
from reshard.storage.array_store import StoredValue
from reshard.tree import Path, format_path


def apply(
    operation: ops.Operation, inputs: Sequence[ArrayHandle], outputs: Sequence[Path]
) -> list[ArrayHandle]:
    """Apply an operation to at least one array. The results get the paths `outputs`. Raises
    TreeMismatchError: the operation does not apply to these arrays, they are of different kinds, or
    a result cannot be stored; CorruptCheckpointError: an input shares its stored name."""
    first, shapes = inputs[0], [handle.shape for handle in inputs]
    made = operation.shapes(shapes)
    check_names(inputs)
    if operation == ops.Reshape(first.shape):  # it only says which shape the array must have
        return [first.at(outputs[0])]
    stored = widest(inputs) if isinstance(operation, ops.Concat | ops.Stack) else None
    if len({(h.dtype, stored or h.stored_dtype, h.value_type, h.key_impl) for h in inputs}) > 1:
        raise TreeMismatchError(
            "arrays that differ in dtype, stored dtype or type cannot be combined",
            [
                f"{format_path(h.path)}  {h.describe()} {h.value_type}"
                + (f", stored as {h.stored_dtype.name}" if h.dtype != h.stored_dtype else "")
                + (f", PRNG keys of {h.key_impl}" if h.key_impl is not None else "")
                for h in inputs
            ],
        )
    if first.key_impl is not None and not _of_whole_keys(operation, first.shape):
        text = "holds PRNG keys, which can only be renamed, stacked or unstacked"
        raise TreeMismatchError(f"`{format_path(first.path)}` {text}")
    pairs = zip(outputs, made, strict=True)
    if empty := [f"{format_path(p)}  {first.dtype.name}{list(s)}" for p, s in pairs if 0 in s]:
        raise TreeMismatchError("an operation must not make an array without elements", empty)
    if stored is not None:
        first = dataclasses.replace(first, stored_dtype=stored)
    first = _with_dtypes(operation, first)
    derived = Outputs(operation, tuple(inputs))
    chunks = operation.chunks([handle.chunk_shape for handle in inputs], shapes)
    now = _shardings(operation, [handle.sharding for handle in inputs], shapes, made)
    saved = _shardings(operation, [handle.saved_sharding for handle in inputs], shapes, made)
    found = []
    for part, (path, shape) in enumerate(zip(outputs, made, strict=True)):
        try:
            zarr.check_size(shape, chunks[part], first.dtype.itemsize)
        except ValueError as error:
            raise TreeMismatchError(f"{format_path(path)}: {error}") from error
        array = first.value_type == "scalar" and shape
        found.append(
            dataclasses.replace(
                first,
                path=path,
                shape=shape,
                chunk_shape=chunks[part],
                sharding=now[part],
                saved_sharding=saved[part],
                value_type="np.ndarray" if array else first.value_type,
                data=Derived(derived, part),
            )
        )
    return found


def _with_dtypes(operation: ops.Operation, handle: ArrayHandle) -> ArrayHandle:
    """An array with the dtypes of an operation's result. Checks the numbers of the operation."""
    dtype, stored = handle.dtype, handle.stored_dtype
    if isinstance(operation, ops.Pad):
        _check_fill(handle, operation.fill)
    if isinstance(operation, ops.Apply):
        dtype = stored = dtype if operation.dtype is None else operation.dtype
    if isinstance(operation, ops.Scale | ops.Add):
        stored, problem = ops.AFFINE, ""
        if not is_floating(dtype) or is_scale(dtype):
            problem = "only arrays of floating-point numbers can be scaled and increased"
        elif saturates(dtype):
            problem = "its dtype has no infinity that would show an overflow"
        if problem:
            text = f"{format_path(handle.path)}: {dtype.name} cannot be {operation}: {problem}"
            raise TreeMismatchError(text)
    return dataclasses.replace(handle, dtype=dtype, stored_dtype=stored)


def _check_fill(handle: ArrayHandle, fill: float) -> None:
    """Raises TreeMismatchError if a cast, which follows the padding, would change its value."""
    for dtype in (handle.dtype, handle.stored_dtype):
        if not has_value(dtype, fill):
            raise TreeMismatchError(
                f"{format_path(handle.path)}: the constant {fill} of the map does not exist in "
                f"{dtype.name}"
            )
    with np.errstate(all="ignore"):
        once = np.asarray(fill).astype(handle.dtype)
        twice = np.asarray(fill).astype(handle.stored_dtype).astype(handle.dtype)
    if once != twice and once == once:
        raise TreeMismatchError(
            f"{format_path(handle.path)}: padding of {fill} would be rounded to "
            f"{handle.stored_dtype.name} before the cast to {handle.dtype.name}",
            hints=[
                "leave out the cast, and cast the result in a second job, if rounded padding is "
                "right"
            ],
        )


def _of_whole_keys(operation: ops.Operation, shape: Shape) -> bool:
    """Whether an operation on data of PRNG keys keeps the last axis, which is a key's own."""
    rank = len(shape) + isinstance(operation, ops.Stack)
    return isinstance(operation, ops.Stack | ops.Unstack) and operation.axis % rank != rank - 1


def has_value(dtype: np.dtype, value: float) -> bool:
    """Whether a dtype has a value, possibly rounded, but not to zero, an infinity, NaN or the
    largest number. A dtype of powers of two must have the exact value."""
    with np.errstate(all="ignore"):
        held = float(np.real(np.asarray(value, np.float64).astype(dtype)))
    floating = is_floating(dtype) and not is_scale(dtype)
    if not floating and dtype.kind != "c":
        return held == value
    if floating and saturates(dtype) and not abs(value) <= float(ml_dtypes.finfo(dtype).max):
        return False
    tests = (math.isinf, math.isnan, lambda number: number == 0)
    return all(test(held) == test(value) for test in tests)


def _shardings(
    operation: ops.Operation,
    inputs: Sequence[Sharding | None],
    shapes: Sequence[Shape],
    made: Sequence[Shape],
) -> Sequence[Sharding | None]:
    """Shardings of the outputs of an operation: on the mesh of its inputs, if they share one."""
    named = [sharding for sharding in inputs if isinstance(sharding, NamedSharding)]
    if len(named) < len(inputs) or len({sharding.mesh for sharding in named}) > 1:
        return [inputs[0] if len(set(inputs)) == 1 else None] * len(made)
    mesh = named[0].mesh
    specs = operation.specs([sharding.spec for sharding in named], shapes)
    return [
        NamedSharding(mesh, fitting_spec(shape, mesh, spec))
        for shape, spec in zip(made, specs, strict=True)
    ]


def constant(
    path: Path, values: np.ndarray, like: ArrayHandle, key_impl: str | None = None
) -> ArrayHandle:
    """An array of values in memory (or of the data of PRNG keys), replicated on the mesh of
    another array."""
    sharding = replicated(like.sharding)
    return ArrayHandle(
        path=path,
        shape=values.shape,
        dtype=values.dtype,
        chunk_shape=tuple(max(size, 1) for size in values.shape),
        sharding=sharding,
        saved_sharding=sharding,
        value_type="jax.Array",
        key_impl=key_impl,
        stored_dtype=values.dtype,
        data=Derived(Outputs(ops.Constant(values), ()), 0),
    )


def zeros(
    path: Path, shape: Shape, dtype: np.dtype, fill: float | None, like: ArrayHandle
) -> ArrayHandle:
    """An array of zeros, or of another constant, stored as another array is. Raises
    TreeMismatchError: the dtype has no such value."""
    boxes.check_size(shape)
    if 0 in shape:
        raise TreeMismatchError(
            f"{format_path(path)}: a new array of {list(shape)} has no elements"
        )
    value = 0 if fill is None else fill
    if not has_value(dtype, value):
        raise TreeMismatchError(
            f"{format_path(path)}: the constant {value} of the map does not exist in {dtype.name}"
        )
    values = np.broadcast_to(np.array(value).astype(dtype), shape)  # one, however many they are
    value_type = "np.ndarray" if like.value_type == "scalar" else like.value_type
    return dataclasses.replace(constant(path, values, like), value_type=value_type)


def _operations(handle: ArrayHandle) -> Iterator[ops.Made]:
    return (h.data.operation for h in ancestors(handle) if isinstance(h.data, Derived))


def from_memory(handle: ArrayHandle) -> bool:
    """Whether an array consists of values that are not stored."""
    return any(isinstance(operation, ops.Constant) for operation in _operations(handle))


class Rounded(NamedTuple):
    """Arrays that are rounded when a map computes them, and their bytes."""

    arrays: int
    bytes: int
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{units.count_of(self.arrays, 'array')}, {units.format_bytes(self.bytes)}"


def rounded(handles: Iterable[ArrayHandle]) -> Rounded:
    """Which of some arrays are rounded."""
    found = [handle for handle in handles if rounds(handle)]
    paths = tuple(format_path(handle.path) for handle in found)
    return Rounded(len(found), sum(handle.nbytes for handle in found), paths)


def rounds(handle: ArrayHandle) -> bool:
    """Whether an operation of a map rounds the values of an array. Casts are not counted, and
    nothing is known of functions."""
    found = (each for each in _operations(handle) if isinstance(each, ops.Computed))
    return not all(operation.exact for operation in found)


def comparisons(handle: ArrayHandle) -> list[ArrayHandle]:
    """The arrays that one is computed from, or itself, that are several equal ones."""
    return [
        each
        for each in ancestors(handle)
        if isinstance(each.data, Derived) and isinstance(each.data.operation, ops.Equal)
    ]


def sources(handle: ArrayHandle, box: Box) -> Iterator[tuple[ArrayHandle, Box]]:
    """The arrays, with a box of each, that a box of an array is computed from: stored ones, and
    those that are computed on the way, functions' as a whole."""
    data = handle.data
    computed = ops.Apply | ops.Cast | ops.Computed
    if isinstance(data, StoredArray) or isinstance(data.operation, computed):
        yield handle, box
    if isinstance(data, Derived):
        shapes = [source.shape for source in data.inputs]
        for number, part in data.operation.sources(data.part, box, shapes):
            yield from sources(data.inputs[number], part)


def stored_share(handle: ArrayHandle) -> int:
    """Stored bytes of an array. It shares those of its inputs in proportion to its elements."""
    if isinstance(handle.data, StoredArray):
        return sum(handle.stored_sizes())
    whole = sum(map(stored_share, handle.data.inputs))
    of = sum(math.prod(source.shape) for source in handle.data.inputs)
    if isinstance(handle.data.operation, ops.Apply) or not of:
        return whole
    return whole * min(math.prod(handle.shape), of) // of


def stored_chunks(handle: ArrayHandle, encoding: zarr.Encoding) -> dict[str, StoredChunk] | None:
    """The stored values that are copied verbatim for an array in an encoding, by their keys below
    its name: chunks, and the metadata if it is the same. None if the array must be decoded."""
    if (data := unchanged(handle, encoding)) is not None:
        values = data.store.values[data.name]
        return {key: StoredChunk(data.name, key, value) for key, value in values.items()}
    if handle.dtype != handle.stored_dtype:
        return None
    data = handle.data
    if isinstance(data, StoredArray):
        if data.encoding.codecs != encoding.codecs:
            return None
    else:
        kinds = {(stored.encoding, root.chunk_shape) for root, stored in handle.roots()}
        alike = {(e.codecs, e.ignores_unit_axes, math.prod(chunk)) for e, chunk in kinds}
        if alike != {(encoding.codecs, True, math.prod(handle.chunk_shape))}:
            return None
    remapped = handle.remapped_chunks()
    return None if remapped is None else {encoding.chunk_key(c.index): c for c in remapped}


def unchanged(handle: ArrayHandle, encoding: zarr.Encoding) -> StoredArray | None:
    """The stored array that can be copied with its keys and its metadata; None if it must be
    decoded, or its keys or metadata change."""
    data = handle.stored
    same = data is not None and not data.store.ranged and data.encoding == encoding
    return data if same else None  # a ranged store has no metadata


def stored_values(handle: ArrayHandle, encoding: zarr.Encoding) -> list[StoredValue] | None:
    """The values of `stored_chunks`."""
    if (data := unchanged(handle, encoding)) is not None:
        return [*data.store.values[data.name].values()]
    chunks = stored_chunks(handle, encoding)
    return None if chunks is None else [chunk.value for chunk in chunks.values()]
