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
from reshard.engine import memory
from reshard.engine.batches import Unit, in_batches, in_groups
from reshard.engine.plan import ArrayPlan
from reshard.engine.read import READ_AHEAD, Destination, Read, read
from reshard.errors import CorruptCheckpointError
from reshard.storage import disk
from reshard.storage.array_store import array_spec
from reshard.storage.bucket import BucketLocation
from reshard.storage.location import Location, checked
from reshard.storage.ocdbt import MANIFEST, contents, new_context, stage_spec, wait_written
from reshard.tree import Path
from reshard.writer.format import File, TargetFormat

Report = Callable[[int], None]
# A box, and its values as they are written.
_Filled = tuple["_Box", np.ndarray]
# A value that is being read: its key, its key in the target, and its stored bytes.
_Copy = tuple[ts.Future, str, str, int]
# Each commit makes nodes that no later one reads, and a merge reads each node once: a large cache
# would only fill up with them.
CACHE_BYTES = 4 << 20


class BoxRange(NamedTuple):
    """Boxes, from one number to another, of arrays that are read together. Without `stop`, all."""

    arrays: Sequence[tuple[ArrayHandle, ArrayPlan]]
    start: int = 0
    stop: int | None = None


class ValueRange(NamedTuple):
    """The stored values, from one number to another, of an array that is copied verbatim. Without
    `stop`, all."""

    handle: ArrayHandle
    start: int = 0
    stop: int | None = None

    def chunks(self, form: TargetFormat) -> list[tuple[str, StoredChunk]]:
        """The stored chunks, each with its key in the target."""
        name = stored_name(self.handle.path)
        chunks = stored_chunks(self.handle, form.encoding(self.handle)) or {}
        own = [*chunks.items()][self.start : self.stop]
        return [(f"{name}/{key}", chunk) for key, chunk in own]


@dataclasses.dataclass(frozen=True)
class ItemShare:
    """The part of an item that is in a share. It pickles without open files.

    Attributes:
      item: the item's number.
      format: how its arrays are stored.
      metadata: metadata of arrays, by their keys.
      values: the values that are copied verbatim.
      boxes: the boxes that are rewritten.
      files: the safetensors files that hold the boxes, if that is the format.
    """

    item: int
    format: TargetFormat
    metadata: Mapping[str, bytes]
    values: Sequence[ValueRange]
    boxes: Sequence[BoxRange]
    files: Sequence[File] = ()

    def limiter_bytes(self, directory: Location, max_memory: int) -> int:
        """Bytes that writing it into a directory keeps in flight."""
        arrays = [pair for group in self.boxes for pair in group.arrays]
        handles = [*(handle for handle, _ in arrays), *(some.handle for some in self.values)]
        stores = (data.store.directory for handle in handles for _, data in handle.roots())
        is_remote = not all(place.is_local for place in (directory, *stores))
        largest = max((array.box_bytes for _, array in arrays), default=0)
        return memory.limiter_bytes(max_memory, memory.cores(), largest, is_remote)

    def new_digests(self) -> dict[Path, Digest]:
        """A digest for each array that is rewritten."""
        handles = (handle for group in self.boxes for handle, _ in group.arrays)
        return {handle.path: Digest(handle.shape, handle.dtype) for handle in handles}


class Written(NamedTuple):
    """The result of an attempt, for one item.

    Attributes:
      databases: name in the item's directory -> number of keys. None for plain files.
      files: data files below the item's directory -> bytes.
      nodes: the databases' other files -> bytes. They are not needed after the merge.
      digests: name of an array -> the state of its digest.
      chunks: final path of a plain file -> its path until the commit.
    """

    databases: Mapping[str, int] = {}
    files: Mapping[str, int] = {}
    nodes: Mapping[str, int] = {}
    digests: Mapping[str, Sequence[int]] = {}
    chunks: Mapping[str, str] = {}


def write_item(
    share: ItemShare, directory: Location, name: str, max_memory: int, report: Report
) -> Written:
    """Writes a share of an item below the item's directory, under names that begin with `name`. On
    a disk, the data is then durable.

    Raises CorruptCheckpointError if stored bytes do not decode, or written bytes are missing, and
    DestinationError if a write fails.
    """
    digests = share.new_digests()
    if share.files:
        written = _write_files(share, directory, f"{name}0", digests, max_memory, report)
    else:
        written = _write_databases(share, directory, name, digests, max_memory, report)
    states = {stored_name(path): digest.state for path, digest in digests.items()}
    return written._replace(digests=states)


def _write_files(
    share: ItemShare,
    directory: Location,
    name: str,
    digests: Mapping[Path, Digest],
    max_memory: int,
    report: Report,
) -> Written:
    """Writes safetensors files into a directory. For a bucket they are made on this machine's disk
    and uploaded."""
    target = directory / name
    with contextlib.ExitStack() as stack:
        folder = target if target.is_local else stack.enter_context(disk.temporary_directory())
        folder.make_directory()
        places: dict[Path, tuple[Location, int]] = {}
        for own, header, offsets, nbytes in share.files:
            disk.make_file(folder / own, header, nbytes)
            places |= {path: (folder / own, begin) for path, begin in offsets.items()}

        def write_boxes(boxes: Sequence[_Filled]) -> None:
            done = set()
            for box, values in boxes:
                file, begin = places[box.handle.path]
                shape = box.handle.shape
                disk.write_box(file, begin, shape, box.box, values)
                if all(
                    part.stop == size for part, size in zip(box.box[1:], shape[1:], strict=True)
                ):
                    done.add(file)  # its rows are complete: their pages are not written again
            for file in done:
                disk.write_back(file)

        def write(number: int, boxes: Sequence[_Filled], reservation: memory.Reservation) -> None:
            written = writer.submit(write_boxes, boxes)
            reservation.free_after(written.result, is_ready=written.done)
            for box, _ in boxes:
                if box.buffer_reservation is not None:
                    box.buffer_reservation.free_after(written.result)

        with (
            concurrent.futures.ThreadPoolExecutor(2) as writer,
            memory.MemoryLimiter(share.limiter_bytes(directory, max_memory)) as limiter,
        ):
            write_chunks(share, write, digests, limiter, report)
        for file in share.files:
            if isinstance(target, BucketLocation):
                (target / file.name).upload(folder / file.name)
    sync(target, [file.name for file in share.files])
    sizes = {f"{name}/{file.name}": file.nbytes for file in share.files}
    wrong = [path for path, nbytes in sizes.items() if (directory / path).file_bytes() != nbytes]
    _check_written([f"`{directory / path}` is missing or truncated" for path in wrong])
    return Written(files=sizes, chunks={path.rpartition("/")[2]: path for path in sizes})


def _write_databases(
    share: ItemShare,
    directory: Location,
    name: str,
    digests: Mapping[Path, Digest],
    max_memory: int,
    report: Report,
) -> Written:
    """Writes databases, or plain zarr files. In a bucket several databases take turns, since a
    commit is several requests, one after another."""
    ocdbt = share.format.ocdbt
    count = 1 if directory.is_local or not ocdbt else memory.WINDOW
    names = [f"{name}{number}" for number in range(count)]
    target = Target(directory, names, share.format)
    values = []
    for some in share.values:
        _, root = next(some.handle.roots())
        kvstore = functools.cache(root.store.kvstore)
        for key, chunk in some.chunks(share.format):
            values.append((kvstore(chunk.name), chunk.key, key, chunk.value.size))
    with memory.MemoryLimiter(share.limiter_bytes(directory, max_memory)) as limiter:
        write_values(share.metadata, target, limiter)
        copy_chunks(values, target, limiter, report)
        write_chunks(share, target.write, digests, limiter, report)
    sizes: dict[str, int] = {}
    databases: dict[str, int] = {}
    files: set[str] = set()
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        looked = pool.map(lambda name: _look(directory / name, ocdbt), names)
        for each, (found, listed) in zip(names, looked, strict=True):
            sizes |= {f"{each}/{path}": size for path, size in found.items()}
            if listed is not None:
                databases[each], used = listed
                files |= {f"{each}/{file}" for file in used}
    if not ocdbt:
        files = {*sizes}
    problems = [f"`{directory / file}` is missing" for file in files - sizes.keys()]
    # A chunk that holds only the fill value may be absent on a disk.
    missing = _key_count(share) - (sum(databases.values()) if ocdbt else len(sizes))
    if missing and not share.format.omits_fill:
        problems.append(f"{missing} chunks are missing")
    _check_written(problems)
    sync(directory, sizes)
    return Written(
        databases,
        {file: size for file, size in sizes.items() if file in files},
        {file: size for file, size in sizes.items() if file not in files},
        chunks={} if ocdbt else {file[len(names[0]) + 1 :]: file for file in sizes},
    )


def _look(directory: Location, ocdbt: bool) -> tuple[dict[str, int], tuple[int, set[str]] | None]:
    """The files that have been written, with their bytes; and the contents of the database."""
    with directory.cached_listing():
        directory.prefetch(unseen=[MANIFEST] if ocdbt else [], below=True)
        sizes = {entry.path: entry.nbytes for entry in directory.walk() if entry.is_file}
        return sizes, contents(directory) if ocdbt and MANIFEST in sizes else None


def sync(directory: Location, files: Collection[str]) -> None:
    """Makes files durable, and their names, if they are on a disk."""
    if directory.is_local:
        folders = {file.rpartition("/")[0] for file in files}
        for file in [*files, *folders]:
            disk.sync(directory / file)


def _key_count(share: ItemShare) -> int:
    """The number of keys, of chunks and metadata, in the databases of a share."""
    count = len(share.metadata) + sum(len(some.chunks(share.format)) for some in share.values)
    for group, start, stop in share.boxes:
        for _, array in group:
            for box in array.boxes(start, stop):
                count += math.prod(end - begin for begin, end in chunk_ranges(box, array.chunk))
    return count


def _check_written(problems: Sequence[str]) -> None:
    if problems:
        raise CorruptCheckpointError("the written data cannot be read back", problems)


class Target:
    """The databases, or the directory of plain files, that a share of an item is written into.
    Batches take turns in several databases, so that several commits run at once."""

    def __init__(self, directory: Location, names: Sequence[str], form: TargetFormat):
        self.directory = directory
        self._format = form
        self._context = new_context(CACHE_BYTES)
        self._data: Location | None = None  # data files that are written by this machine
        self._handed: collections.Counter[str] = collections.Counter()
        specs = [(directory / name).spec for name in names]
        if form.ocdbt:
            specs = [stage_spec(directory, name, form.file_bytes) for name in names]
            if directory.is_local:
                self._data = directory / names[0] / "d"
        self._stores = [ts.KvStore.open(spec, context=self._context).result() for spec in specs]
        self._arrays: dict[tuple[Path, int], ts.TensorStore] = {}

    def committed(self) -> None:
        """Called after the commit of a batch and of all earlier ones. Hands each new data file to
        the disk; the next call gives back its pages."""
        if self._data is not None and self._data.is_dir():
            for name in self._data.names():
                if self._handed[name] < 2:
                    self._handed[name] += 1
                    disk.write_back(self._data / name)

    def begin(self, number: int) -> tuple[ts.Transaction, ts.KvStore]:
        """The transaction of a batch, and its store. On a disk the transaction may be several
        commits, so that encoded chunks are written early. In a bucket each commit would be three
        requests."""
        atomic = self._format.ocdbt and not self.directory.is_local
        return ts.Transaction(atomic=atomic), self._stores[number % len(self._stores)]

    def write(self, number: int, boxes: Sequence[_Filled], reservation: memory.Reservation) -> None:
        """Encodes and writes boxes in one transaction. Its commit frees their memory."""
        transaction, store = self.begin(number)
        which = number % len(self._stores)
        paths = {box.handle.path for box, _ in boxes}
        for key in [key for key in self._arrays if key[0] not in paths]:
            del self._arrays[key]
        copies = []
        for box, values in boxes:
            key = box.handle.path, which
            if key not in self._arrays:
                self._arrays[key] = self._open(store, box.handle, box.array)
            array = self._arrays[key].with_transaction(transaction)
            write = array[box.box].write(values, can_reference_source_data_indefinitely=True)
            copies.append(write.copy)
        for copy in copies:
            wait_written(copy, self.directory)
        wait = functools.partial(wait_written, transaction.future, self.directory)
        # Noted before it begins: one that an interrupt lets nobody wait for would go on writing
        # into a directory that is being removed.
        reservation.free_after(wait, self.committed, transaction.future.done)
        for box, _ in boxes:
            if box.buffer_reservation is not None:
                box.buffer_reservation.free_after(wait)
        transaction.commit_async()

    def _open(self, store: ts.KvStore, handle: ArrayHandle, array: ArrayPlan) -> ts.TensorStore:
        """An array of the destination, whose metadata are written separately."""
        metadata = self._format.metadata(handle, array.chunk)
        options = {"store_data_equal_to_fill_value": not self._format.omits_fill}
        spec = array_spec(self._format.driver, metadata, **options)
        below = store / f"{stored_name(handle.path)}/"
        return ts.open(spec, kvstore=below, context=self._context).result()


def write_chunks(
    share: ItemShare,
    write: Callable[[int, Sequence[_Filled], memory.Reservation], object],
    digests: Mapping[Path, Digest],
    limiter: memory.MemoryLimiter,
    report: Report,
) -> None:
    """Reads, casts and writes boxes, and computes the digests of the written values.

    While some batches are encoded and committed, others are read. A batch is one transaction: each
    commit of an OCDBT database writes its B-tree again.

    Args:
      write: called with the number of a batch, its boxes, and their reservation.
      limiter: limits the bytes in flight. Several batches fit into it.
      report: called with the decoded bytes of each batch.
    """
    todo = in_batches(units(share.boxes, limiter), limiter.limit // memory.WINDOW, limiter.limit)
    for number, filled in enumerate(read(todo, limiter)):
        filled.check()
        decoded = sum(read.nbytes for read in filled.batch.reads)
        pairs = zip(filled.batch.reads, filled.values, strict=True)
        boxes = [whole for pair in pairs if (whole := _whole_box(*pair)) is not None]
        if boxes:
            write(number, boxes, filled.reservation)
        for box, values in boxes:  # while other threads encode what is committed
            digests[box.handle.path].add(box.box, values)
        report(decoded)
        boxes = pairs = values = (
            None  # only the transaction holds the buffers until it is committed
        )


class _Box:
    """A box that is read in one piece, or piece by piece into one buffer.

    Attributes:
      left: the number of pieces that are not read yet.
      buffer: the buffer of several pieces.
      buffer_reservation: the bytes of the buffer, which the batches of its pieces do not count.
    """

    def __init__(self, handle: ArrayHandle, array: ArrayPlan, box: Box):
        self.handle = handle
        self.array = array
        self.box = box
        self.elements = math.prod(shape_of(box))
        self.left = 1
        self.buffer: np.ndarray | None = None
        self.buffer_reservation: memory.Reservation | None = None

    def pieces(self, limiter: memory.MemoryLimiter) -> Iterator[Unit]:
        """The reads of its pieces, one source chunk each."""
        pieces = list(source_pieces(self.array, self.box))
        self.left = len(pieces)
        nbytes = self.array.layout.consumer_bytes(self.elements)
        for number, piece in enumerate(pieces):
            read = Read(self.handle, piece, self, functools.partial(self._part, piece, limiter))
            yield Unit([read], 0, 0, shared_bytes=0 if number else nbytes, own_batch=True)

    def _part(self, piece: Box, limiter: memory.MemoryLimiter) -> list[Destination]:
        if self.buffer is None:
            self.buffer = np.empty(shape_of(self.box), self.handle.read_dtype)
            self.buffer_reservation = limiter.reserve(
                self.array.layout.consumer_bytes(self.elements)
            )
        return [(piece, self.buffer[inside(piece, self.box)])]


def units(groups: Sequence[BoxRange], limiter: memory.MemoryLimiter) -> Iterator[Unit]:
    """Boxes in order. Boxes of arrays that share stored chunks are read together. If an array is
    read in several passes, the chunks of a box are read one after another into one buffer."""
    for group, start, stop in groups:
        for boxes in zip(*(array.boxes(start, stop) for _, array in group), strict=True):
            together = [_Box(*pair, box) for pair, box in zip(group, boxes, strict=True)]
            if group[0][1].serial:
                yield from together[0].pieces(limiter)
                continue
            yield Unit(
                [Read(box.handle, box.box, box) for box in together],
                sum(box.elements * box.array.layout.read_itemsize for box in together),
                sum(box.array.layout.consumer_bytes(box.elements) for box in together),
            )


def _whole_box(read: Read, values: np.ndarray | None) -> _Filled | None:
    """The box that a read completes, with its values as they are written; None if pieces of it are
    left."""
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
    limiter: memory.MemoryLimiter,
    report: Report,
) -> None:
    """Copies stored values verbatim. Each has its source store, its key there, its key in the
    target, and its stored bytes. While a batch is written, the next one is read."""
    ahead: collections.deque[tuple[int, Sequence[_Copy], memory.Reservation]] = collections.deque()

    def write_oldest() -> None:
        number, batch, reservation = ahead.popleft()
        transaction, store = target.begin(number)
        writable = store.with_transaction(transaction)
        writes = []
        for value, key, new, _ in batch:
            result = checked(value, f"the stored value `{key}`")
            if result.state != "value":
                raise CorruptCheckpointError(f"the stored value `{key}` is missing")
            writes.append(writable.write(new, result.value))
        for write in writes:
            wait_written(write, target.directory)
        wait = functools.partial(wait_written, transaction.future, target.directory)
        reservation.free_after(wait, target.committed)
        transaction.commit_async()
        report(sum(size for _, _, _, size in batch))

    groups = in_groups(values, lambda value: value[3], limiter.limit // (2 * memory.WINDOW))
    for number, some in enumerate(groups):
        nbytes = memory.copy_bytes(sum(size for _, _, _, size in some))
        limiter.make_room(nbytes)
        while ahead and (len(ahead) == READ_AHEAD or not limiter.fits(nbytes)):
            write_oldest()
            limiter.make_room(nbytes)
        reads = [(source.read(key), key, new, size) for source, key, new, size in some]
        ahead.append((number, reads, limiter.reserve(nbytes)))
    while ahead:
        write_oldest()


def write_values(
    values: Mapping[str, bytes], target: Target, limiter: memory.MemoryLimiter
) -> None:
    """Writes small values in one transaction, which is committed in the background."""
    if values:
        transaction, store = target.begin(0)
        store = store.with_transaction(transaction)
        for write in [store.write(key, value) for key, value in values.items()]:
            wait_written(write, target.directory)
        wait = functools.partial(wait_written, transaction.future, target.directory)
        limiter.reserve(sum(map(len, values.values()))).free_after(wait)
        transaction.commit_async()
