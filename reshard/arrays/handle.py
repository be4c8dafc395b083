"""`ArrayHandle`: one array of a checkpoint, stored or derived from stored arrays."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays import boxes
from reshard.arrays import operations as ops
from reshard.arrays.boxes import Shape
from reshard.arrays.dtypes import cast_once, is_floating, is_miscast
from reshard.arrays.zarr import Encoding, parse_encoding
from reshard.errors import ArgumentError, CorruptCheckpointError
from reshard.sharding.mesh import (
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    format_spec,
    sharding_document,
)
from reshard.storage.array_store import ArrayStore, StoredValue
from reshard.storage.identity import Identity, unchanged
from reshard.storage.location import checked
from reshard.tree import Path, as_python, format_path

# Bytes that `ArrayHandle.read` reads at once.
_READ = 1 << 26


class StoredChunk(NamedTuple):
    """A stored value: the name of its array, its key below that name, and a chunk's place."""

    name: str
    key: str
    value: StoredValue
    index: Shape = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a store: its name, and its zarr metadata as TensorStore writes it."""

    store: ArrayStore
    name: str
    metadata: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """With its own entries of the store's listing, which is not pickled with the store."""
        values = [(key, *value) for key, value in self.store.values[self.name].items()]
        files = self.store.identity(self.name).files
        return _unpickled, (self.store, self.name, self.metadata, values, files)

    @property
    def encoding(self) -> Encoding:
        return parse_encoding(self.metadata)

    @property
    def chunks(self) -> dict[str, StoredValue]:
        """Key below its name -> stored value, for each chunk in the store."""
        values = dict(self.store.values[self.name])
        values.pop(self.store.metadata_key, None)
        return values

    def view(self) -> ts.TensorStore:
        """A view. Raises CorruptCheckpointError if the header of a blosc chunk has another size. In
        a bucket and in plain files, only chunks that were never listed have the fill value; a
        listed chunk that is gone is an error, and one that is new is not read."""
        store, local = self.store, self.store.directory.is_local and self.store.ocdbt
        array = store.open_array(self.name, self.metadata, store.omits_fill and local)
        if local and not self.encoding.is_blosc:
            return array
        chunk = chunk_shape_of(array)
        if self.encoding.is_blosc:
            store.check_blosc(self.name, math.prod(chunk) * array.dtype.numpy_dtype.itemsize)
        if local or not store.omits_fill or len(self.chunks) == boxes.grid_size(array.shape, chunk):
            return array
        filling, stored = store.open_array(None, self.metadata, True), self.chunks
        absent = [
            filling[box]
            for box in boxes.grid_boxes(array.shape, chunk)
            if self.encoding.chunk_key(tuple(first for first, _ in boxes.chunk_ranges(box, chunk)))
            not in stored
        ]
        return ts.overlay([array, *absent])


def _unpickled(
    store: ArrayStore, name: str, metadata: bytes, values: Sequence[tuple[Any, ...]], files: Any
) -> StoredArray:
    store.files.update(files)
    known = vars(store).setdefault("values", {})
    known[name] = {key: StoredValue(*value) for key, *value in values}
    return StoredArray(store, name, metadata)


def chunk_shape_of(array: ts.TensorStore) -> Shape:
    """The shape of the stored chunks of an array that is open."""
    return tuple(size or 1 for size in array.chunk_layout.write_chunk.shape or ())


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of one operation over some arrays, stored or derived themselves."""

    operation: ops.Operation | ops.Constant
    inputs: "tuple[ArrayHandle, ...]"

    def __getstate__(self) -> dict[str, Any]:
        """Without open views and cached results."""
        return {"operation": self.operation, "inputs": self.inputs}

    @functools.cached_property
    def views(self) -> list[ts.TensorStore]:
        """Views of the outputs, of `stored_dtype`."""
        if isinstance(self.operation, ops.Apply):  # the function gets the values of a reader
            (handle,) = self.inputs
            return [self.operation.view(handle.view(), handle.dtype, handle.rounded)]
        views = [handle.stored_view() for handle in self.inputs]
        if not isinstance(self.operation, ops.Computed):
            dtype = widest(self.inputs)
            if dtype is not None and any(h.stored_dtype != dtype for h in self.inputs):
                views = [ts.cast(view, dtype) for view in views]
            return self.operation.views(views)
        first, shapes = self.inputs[0], [handle.shape for handle in self.inputs]
        (chunk,) = self.operation.chunks([handle.chunk_shape for handle in self.inputs], shapes)
        paths = [format_path(handle.path) for handle in self.inputs]
        return [ops.computed_view(self.operation, views, chunk, first.dtype, paths)]

    @functools.cached_property
    def remapped(self) -> "list[list[StoredChunk]] | None":
        """The stored chunks of each output; None if some are computed."""
        operation, grids = self.operation, {handle.chunk_shape for handle in self.inputs}
        if isinstance(operation, ops.Copies):
            chunks = self.inputs[0].remapped_chunks()
            return None if chunks is None else [chunks] * operation.count
        if not isinstance(operation, ops.Stack | ops.Unstack) or len(grids) > 1:
            return None
        if len({handle.stored_dtype for handle in self.inputs}) > 1:
            return None
        apart = isinstance(operation, ops.Unstack)
        if apart and self.inputs[0].chunk_shape[operation.axis] > 1:
            return None
        parts = [handle.remapped_chunks() for handle in self.inputs]
        if None in parts:
            return None
        found: list[list[StoredChunk]] = [[] for _ in range(operation.count if apart else 1)]
        axes = operation.origins(len(self.inputs[0].shape))
        for number, chunks in enumerate(parts):
            for chunk in chunks or ():
                index = tuple(number if axis is None else chunk.index[axis] for axis in axes)
                part = chunk.index[operation.axis] if apart else 0
                found[part].append(chunk._replace(index=index))
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """An array that is computed when it is read: one output of an operation over other arrays."""

    outputs: Outputs
    part: int

    @property
    def operation(self) -> ops.Operation | ops.Constant:
        return self.outputs.operation

    @property
    def inputs(self) -> "tuple[ArrayHandle, ...]":
        return self.outputs.inputs


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayHandle:
    """One array, stored or derived from stored arrays. It reads nothing until `read`.

    Attributes:
      path: its path in the tree.
      shape: its shape.
      dtype: the dtype of values that are read.
      chunk_shape: the shape of its stored chunks; for a derived array, a grid that cuts no stored
        chunk.
      sharding: its layout; None for host values.
      saved_sharding: its layout when it was saved.
      value_type: the type that Orbax restores: `"jax.Array"`, `"np.ndarray"` or `"scalar"`.
      key_impl: the PRNG implementation, if the array is the data of typed PRNG keys.
      stored_dtype: the dtype on disk; for a derived array, the dtype before a cast.
      data: the stored array, or the operation that computes it.
      same_name: the path of another leaf that was stored under the same name, if any: the stored
        values are those of one of the two, and it is not known of which.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]
    sharding: Sharding | None
    saved_sharding: Sharding | None
    value_type: str
    key_impl: str | None
    stored_dtype: np.dtype
    data: StoredArray | Derived
    same_name: Path | None = None

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored(self) -> StoredArray | None:
        """The stored array with its values; None if they are derived or cast."""
        if isinstance(self.data, StoredArray) and self.dtype == self.stored_dtype:
            return self.data
        return None

    def at(self, path: Path) -> "ArrayHandle":
        """The same array under another path."""
        return dataclasses.replace(self, path=path)

    def roots(self) -> "Iterator[tuple[ArrayHandle, StoredArray]]":
        """The stored arrays that it is derived from, or itself, with their data."""
        handles = ancestors(self)
        return ((h, h.data) for h in handles if isinstance(h.data, StoredArray))

    def identities(self) -> Iterator[Identity]:
        """The files that reading it takes, of each stored array."""
        return (data.store.identity(data.name) for _, data in self.roots())

    def stored_sizes(self) -> list[int]:
        """Stored bytes of each chunk of the stored arrays that it consists of.

        Raises CorruptCheckpointError if chunks are missing and do not stand for a fill value, or if
        a file is missing or shorter than its contents."""
        if isinstance(self.data, Derived):
            return [size for handle in self.data.inputs for size in handle.stored_sizes()]
        store, name = self.data.store, self.data.name
        sizes = [value.size for value in self.data.chunks.values()]
        expected = boxes.grid_size(self.shape, self.chunk_shape)
        if len(sizes) < expected and not store.omits_fill:
            raise CorruptCheckpointError(
                f"{format_path(self.path)}: {expected - len(sizes)} of its {expected} stored "
                "chunks are missing"
            )
        if text := store.truncated_file(name):
            raise CorruptCheckpointError(f"{format_path(self.path)}: its data file {text}")
        return sizes

    @property
    def read_dtype(self) -> np.dtype:
        """The dtype of `view`: `dtype`, or `stored_dtype` if TensorStore's cast is wrong."""
        return self.stored_dtype if is_miscast(self.stored_dtype, self.dtype) else self.dtype

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Values of `view` as `dtype`."""
        return values if values.dtype == self.dtype else cast_once(values, self.dtype)

    def view(self) -> ts.TensorStore:
        """A TensorStore view of `read_dtype` and `shape`. Raises CorruptCheckpointError if another
        leaf is stored under the same name."""
        if self.same_name is not None:
            raise collision_error([self])
        array = self.stored_view()
        return array if self.read_dtype == self.stored_dtype else ts.cast(array, self.read_dtype)

    def read(self, box: slice | tuple[slice, ...] = ()) -> np.ndarray:
        """Read its values, or those of a box, without jax.

        Beyond the result, this takes about 64 MiB, or one chunk of `chunk_shape` if that is larger.

        Args:
          box: a slice without a step for each axis, or for the first ones.

        Returns:
          An array of `dtype`, of the shape of the box.

        Raises:
          ArgumentError: `box` is not made of such slices.
          ChangedCheckpointError: files of this array have changed since they were opened.
          CorruptCheckpointError: stored bytes cannot be read.
          StoreError: a request to a bucket failed.

        Example:
          >>> reshard.open("run/1000")["params/layer_0/kernel"].read((slice(0, 2),)).shape
          (2, 32)
        """
        given = box if isinstance(box, tuple) else (box,)
        plain = all(isinstance(part, slice) and part.step in (None, 1) for part in given)
        if not plain or len(given) > len(self.shape):
            text = f"{format_path(self.path)}: {box!r:.80} is not a box of {self!r}"
            hint = "a box has one slice without a step for each axis, or for the first axes"
            raise ArgumentError(text, hints=[hint])
        rest = [slice(None)] * (len(self.shape) - len(given))
        whole = boxes.from_index((*given, *rest), self.shape)
        with unchanged(*self.identities()):
            return self._read(whole)

    def _read(self, whole: boxes.Box) -> np.ndarray:
        """The values of a box."""
        self.stored_sizes()  # raises where chunks are missing
        view, values = self.view(), np.empty(boxes.shape_of(whole), self.dtype)
        itemsize = max(self.dtype.itemsize, self.stored_dtype.itemsize)
        count = max(_READ // (math.prod(self.chunk_shape) * itemsize), 1)
        for part in boxes.grid_boxes(
            self.shape, boxes.chunks_together(self.shape, self.chunk_shape, count)
        ):
            if (found := boxes.intersection(part, whole)) is not None:
                read = view[found].read()
                what = f"{format_path(self.path)}: its stored bytes"
                values[boxes.inside(found, whole)] = self.rounded(checked(read, what))
        return values

    def stored_view(self) -> ts.TensorStore:
        """A view of `stored_dtype`."""
        if isinstance(self.data, Derived):
            return self.data.outputs.views[self.data.part]
        return self.data.view()

    def remapped_chunks(self) -> list[StoredChunk] | None:
        """The stored chunks that it consists of; None if it is computed from them."""
        if isinstance(self.data, Derived):
            remapped = self.data.outputs.remapped
            return None if remapped is None else remapped[self.data.part]
        rank = len(self.shape)
        encoding = self.data.encoding
        return [
            StoredChunk(self.data.name, key, value, encoding.chunk_index(key, rank))
            for key, value in self.data.chunks.items()
        ]

    def describe(self) -> str:
        """A short description: `float32[16,24] P('data', None)`."""
        sharded = isinstance(self.sharding, NamedSharding)
        text = array_text(self.dtype.name, self.shape)
        return f"{text} {sharding_text(self)}" if sharded else text

    def document(self) -> dict[str, Any]:
        """The array in `reshard inspect --json`."""
        return {
            "path": format_path(self.path),
            "keys": list(self.path),
            "type": self.value_type,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "bytes": self.nbytes,
            "chunk_shape": list(self.chunk_shape),
            "key_impl": self.key_impl,
            **sharding_document(self.sharding),
        }

    def _repr_html_(self) -> str:
        from reshard.report.page import framed

        return framed(self)

    def __repr__(self) -> str:
        return f"<{format_path(self.path)}: {self.describe()}>"


def ancestors(handle: ArrayHandle) -> Iterator[ArrayHandle]:
    """An array, and those that it is computed from."""
    todo = [handle]
    while todo:
        handle = todo.pop()
        yield handle
        if isinstance(handle.data, Derived):
            todo += handle.data.inputs[::-1]


def widest(handles: "Sequence[ArrayHandle]") -> np.dtype | None:
    """The dtype, of those that some arrays are stored as, that has all values of the others; None
    if there is none, or TensorStore gets the cast to it wrong."""
    dtypes = {handle.stored_dtype for handle in handles}
    for dtype in dtypes:
        others = dtypes - {dtype}
        if not others or dtype in (np.float32, np.float64):
            smaller = (is_floating(d) and d.itemsize < dtype.itemsize for d in others)
            if all(smaller) and not any(is_miscast(d, dtype) for d in others):
                return dtype
    return None


def array_text(dtype: str, shape: tuple[int, ...]) -> str:
    """`float32[16,24]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def sharding_text(handle: ArrayHandle) -> str:
    """An array's layout: `P('data', None)`, `on cpu:0`, `numpy`, or empty."""
    if isinstance(handle.sharding, NamedSharding):
        return format_spec(handle.sharding.spec)
    if isinstance(handle.sharding, SingleDeviceSharding):
        return f"on {handle.sharding.device}"
    return {"np.ndarray": "numpy", "scalar": "Python scalar"}.get(handle.value_type, "")


def stored_name(path: Path) -> str:
    """The name that Orbax stores a leaf under: its keys joined with `.`."""
    return ".".join(map(str, path))


def check_names(handles: Iterable[ArrayHandle]) -> None:
    """Raises CorruptCheckpointError with the arrays that share their stored name."""
    if collided := [handle for handle in handles if handle.same_name is not None]:
        raise collision_error(collided)


def collision_error(handles: Sequence[ArrayHandle]) -> CorruptCheckpointError:
    pairs = {frozenset((h.path, h.same_name)): h for h in reversed(handles)}
    problems, hints = [], []
    for handle in reversed(pairs.values()):
        names = [format_path(handle.path), format_path(handle.same_name or ())]
        _, data = next(handle.roots())
        problems.append(f"{names[0]} and {names[1]} are both stored as `{data.name}`")
        hints.append(f"drop both: reshard.select(ckpt, drop={as_python(names)})")
    text = "two leaves were saved under one name, so one of them has overwritten the other"
    return CorruptCheckpointError(text, problems, hints)
