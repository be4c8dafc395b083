"""A share of a plan: its boxes, from the source to databases of its own, in bounded memory.

    stored chunks  ->  [ read | read ]  ->  boxes  ->  [ encoded | committed ]  ->  a database

Databases are Orbax's own layout: array bytes in `ocdbt.process_*/d/`. A share of plain files writes
a directory of the same kind of name, with a file for each chunk.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, chunk_ranges, grid_boxes, inside, shape_of
from reshard.arrays.derived import stored_chunks
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, StoredChunk, stored_name
from reshard.engine.batches import Unit, in_batches, in_groups
from reshard.engine.budget import WINDOW, Budget, Reservation, copy_bytes, cores, in_flight
from reshard.engine.plan import ArrayPlan
from reshard.engine.read import READ_AHEAD, Destination, Read, read
from reshard.errors import CorruptCheckpointError
from reshard.storage import disk
from reshard.storage.array_store import array_spec
from reshard.storage.location import Location, checked
from reshard.storage.ocdbt import MANIFEST, contents, new_context, stage_spec, wait_written
from reshard.tree import Path
from reshard.writer.format import TargetFormat

Report = Callable[[int], None]
# A value that is being read: its key, its key in the target, and its stored bytes.
_Copy = tuple[ts.Future, str, str, int]
# Each commit makes nodes that no later one reads, and a merge reads each node once: a large cache
# would only fill up with them.
CACHE_BYTES = 4 << 20


class BoxRange(NamedTuple):
    """Boxes of arrays that are read together, of each from one number to another: all, without a
    last one."""

    arrays: Sequence[tuple[ArrayHandle, ArrayPlan]]
    start: int = 0
    stop: int | None = None


class ValueRange(NamedTuple):
    """Stored values of an array that is copied verbatim, from one number to another: all, without a
    last one."""

    handle: ArrayHandle
    start: int = 0
    stop: int | None = None

    def chunks(self, form: TargetFormat) -> list[tuple[str, StoredChunk]]:
        """Where each of them is, with its key in the target."""
        name = stored_name(self.handle.path)
        chunks = stored_chunks(self.handle, form.encoding(self.handle)) or {}
        own = [*chunks.items()][self.start : self.stop]
        return [(f"{name}/{key}", chunk) for key, chunk in own]


@dataclasses.dataclass(frozen=True)
class ItemShare:
    """What of an item is in a share. It pickles without anything open.

    Attributes:
      item: the item's number.
      format: how its arrays are stored.
      metadata: metadata of arrays, by their keys.
      values: what is copied verbatim.
      boxes: what is rewritten.
    """

    item: int
    format: TargetFormat
    metadata: Mapping[str, bytes]
    values: Sequence[ValueRange]
    boxes: Sequence[BoxRange]

    @property
    def handles(self) -> list[ArrayHandle]:
        """The arrays that are rewritten."""
        return [handle for group in self.boxes for handle, _ in group.arrays]


class Written(NamedTuple):
    """What has been written of an item, by one attempt.

    Attributes:
      databases: those in the item's directory, and how many keys each has; none for plain files.
      files: data files below the item's directory, and their bytes.
      nodes: the same of what else the databases consist of, and is not needed once they are merged.
      digests: name of an array -> the state of its digest, after what was written of it.
      chunks: in plain files, where a chunk will be -> where it was written.
    """

    databases: Mapping[str, int] = {}
    files: Mapping[str, int] = {}
    nodes: Mapping[str, int] = {}
    digests: Mapping[str, Sequence[int]] = {}
    chunks: Mapping[str, str] = {}


def write_item(
    share: ItemShare,
    directory: Location,
    database: str,
    max_memory: int,
    report: Report,
) -> Written:
    """Writes what a share has of an item, into databases in the item's directory whose names begin
    with that of one: on a disk one; in a bucket several take turns, since a commit is several
    requests, one after another. On a disk, what is written is durable then.

    Raises CorruptCheckpointError where stored bytes do not decode, or what was written is not
    there, and DestinationError where a write fails."""
    count = 1 if directory.is_local or not share.format.ocdbt else WINDOW
    names = [f"{database}{number}" for number in range(count)]
    digests = _write(share, directory, names, max_memory, report)
    states = {stored_name(path): digest.state for path, digest in digests.items()}
    there: dict[str, int] = {}
    databases: dict[str, int] = {}
    files: set[str] = set()
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        looked = pool.map(lambda name: _look(directory / name, share.format.ocdbt), names)
        for name, (sizes, listed) in zip(names, looked, strict=True):
            there |= {f"{name}/{path}": size for path, size in sizes.items()}
            if listed is not None:
                databases[name], used = listed
                files |= {f"{name}/{file}" for file in used}
    if not share.format.ocdbt:
        files = {*there}
    count = sum(databases.values()) if share.format.ocdbt else len(there)
    _check_there(share, directory, count, files - there.keys())
    sync(directory, there)
    return Written(
        databases,
        {file: size for file, size in there.items() if file in files},
        {file: size for file, size in there.items() if file not in files},
        states,
        {} if share.format.ocdbt else {file[len(names[0]) + 1 :]: file for file in there},
    )


def _look(directory: Location, ocdbt: bool) -> tuple[dict[str, int], tuple[int, set[str]] | None]:
    """Files that have been written, with their bytes; and what is in a database, if it is one."""
    with directory.cached_listing():
        directory.prefetch(unseen=[MANIFEST] if ocdbt else [], below=True)
        sizes = {entry.path: entry.nbytes for entry in directory.walk() if entry.is_file}
        return sizes, contents(directory) if ocdbt and MANIFEST in sizes else None


def sync(directory: Location, files: Collection[str]) -> None:
    """Makes files durable, and their names, where that is not so once they are written."""
    if directory.is_local:
        folders = {file.rpartition("/")[0] for file in files}
        for file in [*files, *folders]:
            disk.sync(directory / file)


def _check_there(share: ItemShare, directory: Location, count: int, gone: Collection[str]) -> None:
    """Raises CorruptCheckpointError where not all keys are there that were written. A chunk that
    holds a fill value alone may be absent on a disk."""
    problems = [f"`{directory / file}` is missing" for file in gone]
    missing = len(share.metadata) - count + sum(len(v.chunks(share.format)) for v in share.values)
    for group, start, stop in share.boxes:
        for _, array in group:
            for box in array.boxes(start, stop):
                missing += math.prod(end - begin for begin, end in chunk_ranges(box, array.chunk))
    if missing and not share.format.fills:
        problems.append(f"{missing} chunks are missing")
    if problems:
        raise CorruptCheckpointError("the written data cannot be read back", problems)


class Target(NamedTuple):
    """Where and how arrays are written.

    Attributes:
      directory: the item's.
      stores: key-value stores; in several, batches are committed at once: each is written to the
        one that its number says.
      context: their resources.
      format: that of the arrays.
    """

    directory: Location
    stores: Sequence[ts.KvStore]
    context: ts.Context
    format: TargetFormat

    def begin(self) -> ts.Transaction:
        """The transaction of a batch. On a disk it may be several commits, of what is encoded first
        and of the rest; in a bucket each would be three requests, one after another."""
        return ts.Transaction(atomic=self.format.ocdbt and not self.directory.is_local)


def _write(
    share: ItemShare, directory: Location, names: Sequence[str], max_memory: int, report: Report
) -> dict[Path, Digest]:
    """Writes a share of an item. The digests of what was rewritten, as far as it was here."""
    context = new_context(CACHE_BYTES)
    if share.format.ocdbt:
        specs = [stage_spec(directory, name, share.format.file_bytes) for name in names]
    else:
        specs = [(directory / name).spec for name in names]
    stores = [ts.KvStore.open(spec, context=context).result() for spec in specs]
    target = Target(directory, stores, context, share.format)
    digests = {handle.path: Digest(handle.shape, handle.dtype) for handle in share.handles}
    values = []
    for some in share.values:
        _, root = next(some.handle.roots())
        kvstore = functools.cache(root.store.kvstore)
        for key, chunk in some.chunks(share.format):
            values.append((kvstore(chunk.name), chunk.key, key, chunk.value.size))
    boxes = (array.box_bytes for group in share.boxes for _, array in group.arrays)
    largest = max(boxes, default=0)
    limit = in_flight(max_memory, cores(), largest, _is_remote(share, directory))
    writeback = None
    if share.format.ocdbt and directory.is_local:
        writeback = disk.Writeback(directory / names[0] / "d")
    committed = (lambda: None) if writeback is None else writeback.advance
    with contextlib.ExitStack() as stack:
        if writeback is not None:
            stack.callback(writeback.finish)
        budget = stack.enter_context(Budget(limit))
        write_values(share.metadata, target, budget)
        copy_chunks(values, target, budget, committed, report)
        write_chunks(share, target, digests, budget, committed, report)
    return digests


def _is_remote(share: ItemShare, directory: Location) -> bool:
    """Whether something is read from a bucket, or written to one."""
    handles = (*share.handles, *(some.handle for some in share.values))
    stores = (data.store for handle in handles for _, data in handle.roots())
    return not (directory.is_local and all(s.directory.is_local for s in stores))


def write_chunks(
    share: ItemShare,
    target: Target,
    digests: Mapping[Path, Digest],
    budget: Budget,
    committed: Callable[[], object],
    report: Report,
) -> None:
    """Reads, casts and writes boxes, and takes the digests of what is written.

    While batches are written (encoded, and committed in one transaction each), others are read.
    One commit for many chunks matters for OCDBT: each commit writes the B-tree again.

    Args:
      budget: what is in flight; the batches are of a size that several fit into it.
      committed: called after a batch has been committed, and all before it.
      report: called with the number of decoded bytes of each batch that was handed over.
    """
    targets: dict[tuple[Path, int], ts.TensorStore] = {}
    todo = in_batches(units(share.boxes, budget), budget.limit // WINDOW, budget.limit)
    for number, filled in enumerate(read(todo, budget)):
        filled.check()
        decoded = sum(read.nbytes for read in filled.batch.reads)
        pairs = zip(filled.batch.reads, filled.values, strict=True)
        boxes = [whole for pair in pairs if (whole := _whole_box(*pair)) is not None]
        if not boxes:
            report(decoded)
            continue
        paths = {box.handle.path for box, _ in boxes}
        for key in [key for key in targets if key[0] not in paths]:
            del targets[key]
        which = number % len(target.stores)
        transaction = target.begin()
        copies = []
        for box, values in boxes:
            key = box.handle.path, which
            if key not in targets:
                targets[key] = _open(target, which, box.handle, box.array)
            array = targets[key].with_transaction(transaction)
            write = array[box.box].write(values, can_reference_source_data_indefinitely=True)
            copies.append(write.copy)
        for copy in copies:
            wait_written(copy, target.directory)
        wait = functools.partial(wait_written, transaction.future, target.directory)
        # Noted before it begins: one that an interrupt lets nobody wait for would go on writing
        # into a directory that is being removed.
        filled.reservation.free_after(wait, committed, transaction.future.done)
        for box, _ in boxes:
            if box.kept is not None:
                box.kept.free_after(wait)
        transaction.commit_async()
        for box, values in boxes:  # while other threads encode what is committed
            digests[box.handle.path].add(box.box, values)
        report(decoded)
        del boxes, pairs, values  # only the transaction holds the buffers until it is committed


def _open(target: Target, which: int, handle: ArrayHandle, array: ArrayPlan) -> ts.TensorStore:
    """An array of the destination, whose metadata are written apart from it."""
    metadata = target.format.metadata(handle, array.chunk)
    options = {"store_data_equal_to_fill_value": not target.format.fills}
    spec = array_spec(target.format.driver, metadata, **options)
    below = target.stores[which] / f"{stored_name(handle.path)}/"
    return ts.open(spec, kvstore=below, context=target.context).result()


class _Box:
    """A box on its way, in one piece, or in pieces that are read one after another into one buffer.

    Attributes:
      left: pieces that are still to be read.
      buffer: what several pieces are read into.
      kept: what the buffer has reserved beyond the batches of its pieces.
    """

    def __init__(self, handle: ArrayHandle, array: ArrayPlan, box: Box):
        self.handle = handle
        self.array = array
        self.box = box
        self.elements = math.prod(shape_of(box))
        self.left = 1
        self.buffer: np.ndarray | None = None
        self.kept: Reservation | None = None

    def pieces(self, budget: Budget) -> Iterator[Unit]:
        """What is read of it, one source chunk at a time."""
        pieces = list(source_pieces(self.array, self.box))
        self.left = len(pieces)
        kept = self.array.layout.held(self.elements)
        for number, piece in enumerate(pieces):
            read = Read(self.handle, piece, self, functools.partial(self._part, piece, budget))
            yield Unit([read], 0, 0, kept=0 if number else kept, alone=True)

    def _part(self, piece: Box, budget: Budget) -> list[Destination]:
        if self.buffer is None:
            self.buffer = np.empty(shape_of(self.box), self.handle.read_dtype)
            self.kept = budget.reserve(self.array.layout.held(self.elements))
        return [(piece, self.buffer[inside(piece, self.box)])]


def units(groups: Sequence[BoxRange], budget: Budget) -> Iterator[Unit]:
    """Boxes in order. Those of arrays that share stored chunks are read together; where an
    array is read in several passes, the chunks of a box are read one after another, into a buffer
    that is reserved in the budget."""
    for group, start, stop in groups:
        for boxes in zip(*(array.boxes(start, stop) for _, array in group), strict=True):
            together = [_Box(*pair, box) for pair, box in zip(group, boxes, strict=True)]
            if group[0][1].serial:
                yield from together[0].pieces(budget)
                continue
            yield Unit(
                [Read(box.handle, box.box, box) for box in together],
                sum(box.elements * box.array.layout.read_itemsize for box in together),
                sum(box.array.layout.held(box.elements) for box in together),
            )


def _whole_box(read: Read, values: np.ndarray | None) -> tuple[_Box, np.ndarray] | None:
    """The box that a read has completed, if it has, and its values as they are written."""
    box: _Box = read.owner
    box.left -= 1
    if box.left:
        return None
    if values is None:
        assert box.buffer is not None
        values, box.buffer = box.handle.rounded(box.buffer), None
    return box, values


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


def copy_chunks(
    values: Sequence[tuple[ts.KvStore, str, str, int]],
    target: Target,
    budget: Budget,
    committed: Callable[[], object],
    report: Report,
) -> None:
    """Copies stored values verbatim: for each where to read, its key there, its key in the target,
    and its stored bytes. While a batch is written, the next one is read."""
    ahead: collections.deque[tuple[int, Sequence[_Copy], Reservation]] = collections.deque()

    def write_oldest() -> None:
        number, batch, reservation = ahead.popleft()
        transaction = target.begin()
        writable = target.stores[number % len(target.stores)].with_transaction(transaction)
        writes = []
        for value, key, new, _ in batch:
            result = checked(value, f"the stored value `{key}`")
            if result.state != "value":
                raise CorruptCheckpointError(f"the stored value `{key}` is missing")
            writes.append(writable.write(new, result.value))
        for write in writes:
            wait_written(write, target.directory)
        reservation.free_after(
            functools.partial(wait_written, transaction.future, target.directory), committed
        )
        transaction.commit_async()
        report(sum(size for _, _, _, size in batch))

    groups = in_groups(values, lambda value: value[3], budget.limit // (2 * WINDOW))
    for number, some in enumerate(groups):
        nbytes = copy_bytes(sum(size for _, _, _, size in some))
        budget.make_room(nbytes)
        while ahead and (len(ahead) == READ_AHEAD or not budget.fits(nbytes)):
            write_oldest()
            budget.make_room(nbytes)
        reads = [(source.read(key), key, new, size) for source, key, new, size in some]
        ahead.append((number, reads, budget.reserve(nbytes)))
    while ahead:
        write_oldest()


def write_values(values: Mapping[str, bytes], target: Target, budget: Budget) -> None:
    """Writes small values, in one transaction, which is committed while others are."""
    if values:
        transaction = target.begin()
        store = target.stores[0].with_transaction(transaction)
        for write in [store.write(key, value) for key, value in values.items()]:
            wait_written(write, target.directory)
        wait = functools.partial(wait_written, transaction.future, target.directory)
        budget.reserve(sum(map(len, values.values()))).free_after(wait)
        transaction.commit_async()
