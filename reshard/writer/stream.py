"""Array bytes from the source to the destination, batch by batch, in bounded memory."""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, grid_boxes, inside, shape_of
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.engine.batches import Unit, in_batches, in_groups
from reshard.engine.budget import WINDOW, Budget, Reservation, copy_bytes
from reshard.engine.plan import ArrayPlan
from reshard.engine.read import READ_AHEAD, Destination, Read, read
from reshard.errors import CorruptCheckpointError, DestinationError, first_line
from reshard.storage.array_store import array_spec
from reshard.storage.location import Location, checked
from reshard.storage.refusals import refusal
from reshard.tree import Path
from reshard.writer.journal import ItemProgress
from reshard.writer.share_parts import BoxRange
from reshard.writer.target_format import TargetFormat

Report = Callable[[int], None]
# A value that is being read: its key, its key in the target, and its stored bytes.
_Copy = tuple[ts.Future, str, str, int]


class Target(NamedTuple):
    """Where and how arrays are written.

    Attributes:
      directory: the item's.
      specs, context: key-value stores, and their resources. In several, batches are committed at
        once: each is written to the one that its number says.
      format: that of the arrays.
      described: metadata of the arrays are written apart from them.
    """

    directory: Location
    specs: Sequence[dict[str, Any]]
    context: ts.Context
    format: TargetFormat
    described: bool

    def begin(self) -> ts.Transaction:
        """The transaction of a batch. On a disk it may be several commits, of what is encoded first
        and of the rest; in a bucket each would be three requests, one after another."""
        return ts.Transaction(atomic=self.format.ocdbt and not self.directory.is_local)

    def open(self) -> list[ts.KvStore]:
        return [ts.KvStore.open(spec, context=self.context).result() for spec in self.specs]


def write_boxes(
    groups: Sequence[BoxRange],
    sources: Mapping[Path, ArrayHandle],
    target: Target,
    digests: Mapping[Path, Digest],
    progress: ItemProgress,
    budget: Budget,
    committed: Callable[[], None],
    report: Report,
) -> None:
    """Reads, casts and writes boxes, but for what has been committed already, and takes the
    digests of what is written. Raises CorruptCheckpointError where stored bytes do not decode, and
    DestinationError where a write fails.

    While batches are written (encoded, and committed in one transaction each), others are read.
    One commit for many chunks matters for OCDBT: each commit writes the B-tree again.

    Args:
      sources: the arrays to read, by path; their metadata are written with their first box, unless
        they are written apart.
      budget: what is in flight; the batches are of a size that several fit into it.
      committed: called after a batch has been committed, and all before it.
      report: called with the number of decoded bytes of each batch that was handed over.
    """
    stores = target.open()
    targets: dict[tuple[Path, int], ts.TensorStore] = {}
    begin = progress.batches
    todo = in_batches(units(groups, sources, budget), budget.limit // WINDOW, budget.limit)
    for batch in itertools.islice(todo, begin):
        report(sum(read.nbytes for read in batch.reads))
    for number, filled in enumerate(read(todo, budget), begin + 1):
        filled.check()
        decoded = sum(read.nbytes for read in filled.batch.reads)
        boxes = [
            box
            for read, values in zip(filled.batch.reads, filled.values, strict=True)
            if (box := _whole_box(read, values)) is not None
        ]
        if not boxes:
            report(decoded)
            continue
        paths = {box.array.layout.path for box in boxes}
        for key in [key for key in targets if key[0] not in paths]:
            del targets[key]
        which = number % len(stores)
        store = stores[which]
        transaction = target.begin()
        writable = store.with_transaction(transaction)
        copies = []
        for array, box, values, _ in boxes:
            path = array.layout.path
            if (path, which) not in targets:
                metadata = target.format.metadata(sources[path], array.chunk)
                spec = array_spec(
                    target.format.driver,
                    metadata,
                    store_data_equal_to_fill_value=not target.format.fills,
                )
                name = stored_name(path)
                below = store / f"{name}/"
                opened = ts.open(spec, kvstore=below, context=target.context).result()
                targets[path, which] = opened
                if not target.described:
                    key = f"{name}/{target.format.metadata_key}"
                    copies.append(writable.write(key, metadata))
            array_target = targets[path, which].with_transaction(transaction)
            write = array_target[box].write(values, can_reference_source_data_indefinitely=True)
            copies.append(write.copy)
        for copy in copies:
            wait_written(copy, target.directory)
        states: dict[Path, Sequence[int]] = {}
        wait = functools.partial(wait_written, transaction.future, target.directory)
        done = functools.partial(_note, number, states, progress, committed)
        # Noted before it begins: one that an interrupt lets nobody wait for would go on writing
        # into a directory that is being removed.
        filled.free_after(wait, done, transaction.future.done)
        for box in boxes:
            if box.kept is not None:
                box.kept.free_after(wait)
        transaction.commit_async()
        for array, box, values, _ in boxes:  # while other threads encode what is committed
            digests[array.layout.path].add(box, values)
        states |= {path: digests[path].state for path in paths}
        report(decoded)
        del boxes, values  # only the transaction holds the buffers now, until it is committed


def _note(
    number: int,
    states: Mapping[Path, Sequence[int]],
    progress: ItemProgress,
    committed: Callable[[], None],
) -> None:
    """Notes that so many batches are written; unless an interrupt came before the digests of the
    last one were taken."""
    if states:
        progress.box_batch(number, states, committed)


def units(
    groups: Sequence[BoxRange], sources: Mapping[Path, ArrayHandle], budget: Budget
) -> Iterator[Unit]:
    """Boxes in order. Those of arrays that share stored chunks are read together; where an
    array is read in several passes, the chunks of a box are read one after another, into a buffer
    that is reserved in the budget."""
    for group, start, stop in groups:
        for together in zip(*(array.boxes(start, stop) for array in group), strict=True):
            pairs = [
                (array, sources[array.layout.path], box)
                for array, box in zip(group, together, strict=True)
            ]
            if group[0].serial:
                yield from _PiecewiseBox(*pairs[0], budget).units()
                continue
            sizes = [(math.prod(shape_of(box)), array.layout) for array, _, box in pairs]
            yield Unit(
                [Read(handle, box, array) for array, handle, box in pairs],
                sum(elements * layout.read_itemsize for elements, layout in sizes),
                sum(layout.held(elements) for elements, layout in sizes),
            )


class _Box(NamedTuple):
    """A box that has been read, of values as they are written; and what its buffer has reserved
    beyond its batch."""

    array: ArrayPlan
    box: Box
    values: np.ndarray
    kept: Reservation | None = None


class _PiecewiseBox:
    """A box whose stored chunks are read one after another, to hold one of them at a time."""

    def __init__(self, array: ArrayPlan, handle: ArrayHandle, box: Box, budget: Budget):
        self._array = array
        self._handle = handle
        self._box = box
        self._budget = budget
        self._buffer: np.ndarray | None = None
        self._reservation: Reservation | None = None
        self._left = 0

    def units(self) -> Iterator[Unit]:
        """What is read of it, in order."""
        pieces = list(source_pieces(self._array, self._box))
        self._left = len(pieces)
        kept = self._array.layout.held(math.prod(shape_of(self._box)))
        for number, piece in enumerate(pieces):
            read = Read(self._handle, piece, self, functools.partial(self._destination, piece))
            yield Unit([read], 0, 0, kept=0 if number else kept, alone=True)

    def _destination(self, piece: Box) -> list[Destination]:
        if self._buffer is None:
            self._buffer = np.empty(shape_of(self._box), self._handle.read_dtype)
            kept = self._array.layout.held(self._buffer.size)
            self._reservation = self._budget.reserve(kept)
        return [(piece, self._buffer[inside(piece, self._box)])]

    def read_one(self) -> _Box | None:
        """Notes that one piece has been read. The box, with the last one."""
        self._left -= 1
        if self._left or self._buffer is None:
            return None
        values, self._buffer = self._handle.rounded(self._buffer), None
        return _Box(self._array, self._box, values, self._reservation)


def _whole_box(read: Read, values: np.ndarray | None) -> _Box | None:
    """The box that a read has completed, if it has."""
    if isinstance(read.owner, _PiecewiseBox):
        return read.owner.read_one()
    assert values is not None
    return _Box(read.owner, read.box, values)


def source_pieces(array: ArrayPlan, box: Box) -> Iterator[Box]:
    """The parts of a box that lie in one source chunk each."""
    chunk = array.layout.source_chunk
    first = [part.start // c * c for part, c in zip(box, chunk, strict=True)]
    extent = tuple(part.stop - f for part, f in zip(box, first, strict=True))
    for piece in grid_boxes(extent, chunk):
        yield tuple(
            slice(max(p.start + f, b.start), min(p.stop + f, b.stop))
            for p, f, b in zip(piece, first, box, strict=True)
        )


def move_values(
    values: Sequence[tuple[ts.KvStore, str, str, int]],
    target: Target,
    progress: ItemProgress,
    budget: Budget,
    committed: Callable[[], None],
    report: Report,
) -> None:
    """Copies stored values as they are: for each where to read, its key there, its key in the
    target, and its stored bytes. What has been committed already is left out. While a batch is
    written, the next one is read."""
    stores = target.open()
    position = progress.values
    report(sum(size for _, _, _, size in values[:position]))
    ahead: collections.deque[tuple[int, Sequence[_Copy], Reservation]] = collections.deque()

    def write_oldest() -> None:
        start, batch, reservation = ahead.popleft()
        transaction = target.begin()
        writable = stores[start % len(stores)].with_transaction(transaction)
        writes = []
        for value, key, new, _ in batch:
            result = checked(value, f"the stored value `{key}`")
            if result.state != "value":
                raise CorruptCheckpointError(f"the stored value `{key}` is missing")
            writes.append(writable.write(new, result.value))
        for write in writes:
            wait_written(write, target.directory)
        wait = functools.partial(wait_written, transaction.future, target.directory)
        done = functools.partial(progress.value_batch, start + len(batch), committed)
        reservation.free_after(wait, done)
        transaction.commit_async()
        report(sum(size for _, _, _, size in batch))

    for some in in_groups(values[position:], lambda value: value[3], budget.limit // (2 * WINDOW)):
        nbytes = copy_bytes(sum(size for _, _, _, size in some))
        budget.make_room(nbytes)
        while ahead and (len(ahead) == READ_AHEAD or not budget.fits(nbytes)):
            write_oldest()
            budget.make_room(nbytes)
        reads = [(source.read(key), key, new, size) for source, key, new, size in some]
        ahead.append((position, reads, budget.reserve(nbytes)))
        position += len(some)
    while ahead:
        write_oldest()


def write_values(values: Mapping[str, bytes], target: Target, budget: Budget) -> None:
    """Writes small values, in one transaction, which is committed while others are."""
    if values:
        transaction = target.begin()
        store = target.open()[0].with_transaction(transaction)
        for write in [store.write(key, value) for key, value in values.items()]:
            wait_written(write, target.directory)
        wait = functools.partial(wait_written, transaction.future, target.directory)
        budget.reserve(sum(map(len, values.values()))).free_after(wait)
        transaction.commit_async()


def wait_written(write: ts.Future, directory: Location) -> None:
    """Waits for a write below a directory; raises DestinationError if it fails."""
    try:
        write.result()
    except ValueError as error:
        if refused := refusal(error, f"`{directory}`", "written"):
            raise DestinationError(refused.summary, refused.problems) from error
        raise DestinationError("the destination cannot be written", [first_line(error)]) from error
