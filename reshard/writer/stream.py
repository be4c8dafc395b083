"""Array bytes from the source to the destination, batch by batch, in bounded memory.

While batches are written (encoded, and committed in one transaction each), the next one is read.
That keeps the cores busy with a few batches in memory, sized for that by `reshard.engine.batches`.
One commit for many chunks matters for OCDBT: each commit writes the B-tree again.
"""

import collections
import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays import zarr
from reshard.arrays.boxes import shape_of
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle
from reshard.engine.batches import WINDOW, Batch, room
from reshard.engine.plan import ArrayPlan, Box, grid_boxes
from reshard.errors import CorruptCheckpointError, DestinationError
from reshard.storage.array_store import checked, first_line
from reshard.tree import Path, format_path
from reshard.writer.item_progress import ItemProgress

Progress = Callable[[int], None]
Done = Callable[[], None]


class Target(NamedTuple):
    """Where arrays are written.

    Attributes:
      spec: the key-value store.
      context: its resources.
      driver: TensorStore's name of the array driver.
      fills: chunks that hold the fill value alone are left out, as they are in the source.
    """

    spec: dict[str, Any]
    context: ts.Context
    driver: str
    fills: bool

    def open(self) -> ts.KvStore:
        """The key-value store."""
        return ts.KvStore.open(self.spec, context=self.context).result()


class Pending:
    """Transactions under way, oldest first, and the memory that they hold.

    Args:
      max_memory: bytes that the job may take.
      committed: called after one has been committed, and all before it.
    """

    def __init__(self, max_memory: int, committed: Callable[[], None]):
        self._room = room(max_memory)
        self._committed = committed
        self._under_way: collections.deque[tuple[int, ts.Future, Done]] = collections.deque()

    def make_room(self, charge: int) -> None:
        """Waits until `charge` bytes fit, and until another batch is within the window."""
        while self._under_way and (
            sum(held for held, _, _ in self._under_way) + charge > self._room
            or len(self._under_way) >= WINDOW
        ):
            self._wait_oldest()

    def add(self, charge: int, transaction: ts.Transaction, done: Done) -> None:
        """Starts to commit a transaction; `done` is called when it and all before it are. It is
        noted first: one that an interrupt lets nobody wait for would go on writing into a directory
        that is being removed."""
        self._under_way.append((charge, transaction.future, done))
        transaction.commit_async()

    def finish(self) -> None:
        """Waits for all of them."""
        while self._under_way:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        wait_written(self._under_way[0][1])
        _, _, done = self._under_way.popleft()
        done()
        self._committed()

    def abandon(self) -> None:
        """Waits for all of them and ignores how they end: the job has failed already."""
        while self._under_way:
            with contextlib.suppress(ValueError):
                self._under_way[0][1].result()
            self._under_way.popleft()


def stream_boxes(
    batches: Iterator[Batch],
    sources: Mapping[Path, ArrayHandle],
    target: Target,
    names: Mapping[Path, str],
    digests: Mapping[Path, Digest],
    so_far: ItemProgress,
    pending: Pending,
    progress: Progress,
) -> None:
    """Reads, casts and writes all boxes, and takes the digests of what is written.

    Args:
      batches: what to do, from `reshard.engine.batches.batches`.
      sources: the arrays to read, by path.
      target: where to write. The arrays' metadata are written with their first box.
      names: the arrays' names in the target.
      digests: for each array the digest that its values are added to.
      so_far: what has been committed already, and is left out.
      pending: transactions under way.
      progress: called with the number of decoded bytes of each batch that was handed over.

    Raises:
      CorruptCheckpointError: stored bytes that do not decode.
      DestinationError: a write fails.
    """
    store = target.open()
    views: dict[Path, ts.TensorStore] = {}
    targets: dict[Path, ts.TensorStore] = {}
    for number, batch in enumerate(batches, 1):
        if number <= so_far.batches:
            progress(sum(_decoded(array, box) for array, box in batch.boxes))
            continue
        pending.make_room(batch.charge)
        wanted = {array.layout.path for array, _ in batch.boxes}
        for cache in (views, targets):
            for path in [path for path in cache if path not in wanted]:
                del cache[path]
        reads = []
        with ts.Batch() as together:
            for array, box in batch.boxes:
                path = array.layout.path
                if path not in views:
                    views[path] = sources[path].view()
                dtype = sources[path].read_dtype
                reads.append(_start_read(array, box, views[path], dtype, together))
        transaction = ts.Transaction()
        writable = store.with_transaction(transaction)
        copies, written = [], []
        for (array, box), (buffer, read) in zip(batch.boxes, reads, strict=True):
            path = array.layout.path
            _wait_read(read, path)
            buffer = sources[path].rounded(buffer)
            if path not in targets:
                metadata = target_metadata(sources[path], array.chunk)
                targets[path] = _open_target(target, names[path], metadata)
                key = f"{names[path]}/{sources[path].store.metadata_key}"
                copies.append(writable.write(key, metadata))
            array_target = targets[path].with_transaction(transaction)
            write = array_target[box].write(buffer, can_reference_source_data_indefinitely=True)
            copies.append(write.copy)
            written.append((path, box, buffer))
        for copy in copies:
            wait_written(copy)
        states: dict[Path, Sequence[int]] = {}
        pending.add(batch.charge, transaction, functools.partial(so_far.box_batch, number, states))
        for path, box, buffer in written:  # while other threads encode what is committed
            digests[path].add(box, buffer)
        states |= {path: digests[path].state for path in wanted}
        del (
            reads,
            written,
            buffer,
        )  # only the transaction holds the buffers now, until it is committed
        progress(sum(_decoded(array, box) for array, box in batch.boxes))


def _decoded(array: ArrayPlan, box: Box) -> int:
    """Decoded bytes of a box as it is written."""
    return math.prod(shape_of(box)) * array.layout.target_itemsize


def _start_read(
    array: ArrayPlan, box: Box, view: ts.TensorStore, dtype: np.dtype, batch: ts.Batch
) -> tuple[np.ndarray, ts.Future | None]:
    """A buffer, and the read that fills it; reads of one batch share what they decode.

    Where the array is read in several passes, its source chunks are read into the box one after
    another, to hold one of them at a time.
    """
    buffer = np.empty([part.stop - part.start for part in box], dtype)
    if not array.serial:
        return buffer, ts.array(buffer, copy=False).write(view[box], batch=batch).commit
    for piece in _source_pieces(array, box):
        inside = tuple(
            slice(p.start - b.start, p.stop - b.start) for p, b in zip(piece, box, strict=True)
        )
        part = ts.array(buffer[inside], copy=False)
        _wait_read(part.write(view[piece]).commit, array.layout.path)
    return buffer, None


def _source_pieces(array: ArrayPlan, box: Box) -> Iterator[Box]:
    """The parts of a box that lie in one source chunk each."""
    chunk = array.layout.source_chunk
    first = [part.start // c * c for part, c in zip(box, chunk, strict=True)]
    extent = tuple(part.stop - f for part, f in zip(box, first, strict=True))
    for piece in grid_boxes(extent, chunk):
        yield tuple(
            slice(max(p.start + f, b.start), min(p.stop + f, b.stop))
            for p, f, b in zip(piece, first, box, strict=True)
        )


def _open_target(target: Target, name: str, metadata: bytes) -> ts.TensorStore:
    return ts.open(
        {
            "driver": target.driver,
            "kvstore": target.spec | {"path": f"{target.spec.get('path', '')}{name}/"},
            "metadata": json.loads(metadata),
            "assume_metadata": True,
            "store_data_equal_to_fill_value": not target.fills,
        },
        context=target.context,
    ).result()


def target_metadata(handle: ArrayHandle, chunk: Sequence[int]) -> bytes:
    """The source's zarr metadata with another chunk shape and, for a cast, another dtype."""
    document = zarr.with_chunks(json.loads(handle.metadata), chunk)
    if handle.dtype != handle.stored_dtype:
        document = zarr.with_dtype(document, handle.dtype)
    return zarr.dump(document)


def move_values(
    values: Sequence[tuple[ts.KvStore, str, str, int]],
    target: Target,
    batch_bytes: int,
    so_far: ItemProgress,
    pending: Pending,
    progress: Progress,
) -> None:
    """Copies stored values as they are.

    Args:
      values: for each, where to read, its key there, its key in the target, and its stored bytes.
      target: where to write.
      batch_bytes: bytes for a transaction.
      so_far: what has been committed already, and is left out.
      pending: transactions under way.
      progress: called with the number of bytes of each batch.
    """
    store = target.open()
    position = so_far.values
    progress(sum(size for _, _, _, size in values[:position]))
    while position < len(values):
        batch, size = [], 0
        while position < len(values) and (not batch or size + values[position][3] <= batch_bytes):
            batch.append(values[position])
            size += values[position][3]
            position += 1
        pending.make_room(2 * size)
        reads = [(source.read(key), key, new) for source, key, new, _ in batch]
        transaction = ts.Transaction()
        writable = store.with_transaction(transaction)
        writes = []
        for read, key, new in reads:
            result = checked(read, f"the stored value `{key}`")
            if result.state != "value":
                raise CorruptCheckpointError(f"the stored value `{key}` is missing")
            writes.append(writable.write(new, result.value))
        for write in writes:
            wait_written(write)
        pending.add(2 * size, transaction, functools.partial(so_far.value_batch, position))
        progress(size)


def write_values(values: Mapping[str, bytes], target: Target) -> None:
    """Writes small values, in one transaction."""
    if values:
        transaction = ts.Transaction()
        store = target.open().with_transaction(transaction)
        for write in [store.write(key, value) for key, value in values.items()]:
            wait_written(write)
        wait_written(transaction.commit_async())


def _wait_read(read: ts.Future | None, path: Path) -> None:
    if read is not None:
        checked(read, f"{format_path(path)}: its stored bytes")


def wait_written(write: ts.Future) -> None:
    """Waits for a write; raises DestinationError if it fails."""
    try:
        write.result()
    except ValueError as error:
        raise DestinationError("the destination cannot be written", [first_line(error)]) from error
