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
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, grid_boxes, shape_of, start_of
from reshard.arrays.derived import stored_chunks
from reshard.arrays.digests import Digest
from reshard.arrays.handle import Derived, StoredChunk, stored_name
from reshard.engine import memory
from reshard.engine.batches import Unit, in_batches, in_groups
from reshard.engine.plan import ArrayPlan
from reshard.engine.read import READ_AHEAD, Read, read
from reshard.errors import CorruptCheckpointError
from reshard.storage import disk
from reshard.storage.array_store import array_spec, key_of
from reshard.storage.bucket import BucketLocation
from reshard.storage.location import Location, checked
from reshard.storage.ocdbt import MANIFEST, contents, new_context, stage_spec, wait_written
from reshard.tree import Path
from reshard.writer.format import File, TargetFormat

Report = Callable[[int], None]
# A box of an array, and its values as they are written.
_Filled = tuple[ArrayPlan, Box, np.ndarray]
# A stored chunk that is being read, with its key in the target.
_Copy = tuple[str, StoredChunk, ts.Future]
# Each commit makes nodes that no later one reads, and a merge reads each node once: a large cache
# would only fill up with them.
CACHE_BYTES = 4 << 20
# Target chunks of at least these decoded bytes are read into buffers of their own. NumPy uses huge
# pages only from 4 MiB; below, page faults cost as much as the copy that is saved.
_LARGE_CHUNK = 4 << 20
_NOT_WRITTEN = "the written data cannot be read back"


class Piece(NamedTuple):
    """A part of the work on an item, from one number to another: boxes of arrays that are read
    together, the first box of each, then the second of each, and so on; or the stored values of one
    array that is copied verbatim.

    Attributes:
      nbytes: bytes that are written: decoded ones of boxes, stored ones of values.
      chunks: the number of chunks that are written.
    """

    arrays: Sequence[ArrayPlan]
    start: int
    stop: int
    nbytes: int
    chunks: int


@dataclasses.dataclass(frozen=True)
class ItemShare:
    """The part of an item that is in a share. It pickles without open files.

    Attributes:
      item: the item's number.
      format: how its arrays are stored.
      metadata: metadata of arrays, by their keys.
      pieces: its work.
      files: the safetensors files that hold the boxes, if that is the format.
    """

    item: int
    format: TargetFormat
    metadata: Mapping[str, bytes]
    pieces: Sequence[Piece]
    files: Sequence[File] = ()

    @property
    def arrays(self) -> list[ArrayPlan]:
        """The arrays that it has work of."""
        return [array for piece in self.pieces for array in piece.arrays]

    def limiter(self, directory: Location, max_memory: int) -> memory.MemoryLimiter:
        """Limits the bytes in flight while it is written into a directory."""
        stores = (data.store.directory for a in self.arrays for _, data in a.handle.roots())
        is_remote = not all(place.is_local for place in (directory, *stores))
        largest = max((array.box_bytes for array in self.arrays), default=0)
        limit = memory.limiter_bytes(max_memory, memory.cores(), largest, is_remote)
        return memory.MemoryLimiter(limit)

    def chunks(self) -> Iterator[tuple[str, StoredChunk, ts.KvStore]]:
        """The stored chunks that are copied verbatim, with their keys in the target, and the stores
        that hold them."""
        for piece in self.pieces:
            array = piece.arrays[0]
            if array.verbatim:
                _, root = next(array.handle.roots())
                kvstore = functools.cache(root.store.kvstore)
                chunks = stored_chunks(array.handle, array.encoding) or {}
                for key, chunk in itertools.islice(chunks.items(), piece.start, piece.stop):
                    yield key_of(stored_name(array.path), key), chunk, kvstore(chunk.name)


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
    handles = (array.handle for array in share.arrays if not array.verbatim)
    digests = {handle.path: Digest(handle.shape, handle.dtype) for handle in handles}
    limiter = share.limiter(directory, max_memory)
    write = _write_files if share.files else _write_databases
    written = write(share, directory, name, digests, limiter, report)
    states = {stored_name(path): digest.state for path, digest in digests.items()}
    return written._replace(digests=states)


def _write_files(
    share: ItemShare,
    directory: Location,
    name: str,
    digests: Mapping[Path, Digest],
    limiter: memory.MemoryLimiter,
    report: Report,
) -> Written:
    """Writes safetensors files; for a bucket on this machine's disk, and then uploads them."""
    target = directory / f"{name}0"
    with contextlib.ExitStack() as stack:
        folder = target if target.is_local else stack.enter_context(disk.temporary_directory())
        folder.make_directory()
        places: dict[Path, tuple[Location, int]] = {}
        for own, header, offsets, nbytes in share.files:
            disk.make_file(folder / own, header, nbytes)
            places |= {path: (folder / own, begin) for path, begin in offsets.items()}

        def write_boxes(boxes: Sequence[_Filled]) -> None:
            done = set()
            for array, box, values in boxes:
                file, begin = places[array.path]
                shape = array.shape
                disk.write_box(file, begin, shape, box, values)
                if all(part.stop == size for part, size in zip(box[1:], shape[1:], strict=True)):
                    done.add(file)  # its rows are complete: their pages are not written again
            for file in done:
                disk.write_back(file)

        def write(number: int, boxes: Sequence[_Filled], reservation: memory.Reservation) -> None:
            written = writer.submit(write_boxes, boxes)
            reservation.free_after(written.result, is_ready=written.done)

        # One thread: of two, one gives back pages that the other still writes.
        with concurrent.futures.ThreadPoolExecutor(1) as writer, limiter:
            write_chunks(share, write, digests, limiter, report)
        for file in share.files:
            if isinstance(target, BucketLocation):
                (target / file.name).upload(folder / file.name)
    sync(target, [file.name for file in share.files])
    sizes = {f"{target.name}/{file.name}": file.nbytes for file in share.files}
    wrong = [path for path, nbytes in sizes.items() if (directory / path).file_bytes() != nbytes]
    if wrong:
        problems = [f"`{directory / path}` is missing or truncated" for path in wrong]
        raise CorruptCheckpointError(_NOT_WRITTEN, problems)
    return Written(files=sizes, chunks={path.rpartition("/")[2]: path for path in sizes})


def _write_databases(
    share: ItemShare,
    directory: Location,
    name: str,
    digests: Mapping[Path, Digest],
    limiter: memory.MemoryLimiter,
    report: Report,
) -> Written:
    """Writes databases, or plain zarr files. In a bucket, slow commits overlap in several ones."""
    ocdbt = share.format.ocdbt
    count = 1 if directory.is_local or not ocdbt else memory.WINDOW
    names = [f"{name}{number}" for number in range(count)]
    target = Target(directory, names, share.format)
    with limiter:
        copy_chunks(share, target, limiter, report)
        write_chunks(share, target.write, digests, limiter, report)
    sizes: dict[str, int] = {}
    databases: dict[str, int] = {}
    files: set[str] = set()

    def look(name: str) -> None:
        """Adds the files of a database, with their bytes, and its contents."""
        place = directory / name
        with place.cached_listing():
            place.prefetch(unseen=[MANIFEST] if ocdbt else [], below=True)
            found = {entry.path: entry.nbytes for entry in place.walk() if entry.is_file}
            if ocdbt and MANIFEST in found:
                databases[name], used = contents(place)
                files.update(f"{name}/{file}" for file in used)
        sizes.update({f"{name}/{path}": size for path, size in found.items()})

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(look, names))
    if not ocdbt:
        files = {*sizes}
    problems = [f"`{directory / file}` is missing" for file in files - sizes.keys()]
    # A chunk that holds only the fill value may be absent on a disk.
    keys = len(share.metadata) + sum(piece.chunks for piece in share.pieces)
    missing = keys - (sum(databases.values()) if ocdbt else len(sizes))
    if missing and not share.format.omits_fill:
        problems.append(f"{missing} chunks are missing")
    if problems:
        raise CorruptCheckpointError(_NOT_WRITTEN, problems)
    sync(directory, sizes)
    return Written(
        databases,
        {file: size for file, size in sizes.items() if file in files},
        {file: size for file, size in sizes.items() if file not in files},
        chunks={} if ocdbt else {file[len(names[0]) + 1 :]: file for file in sizes},
    )


def sync(directory: Location, files: Collection[str]) -> None:
    """Makes files durable, and their names, if they are on a disk."""
    if directory.is_local:
        folders = {file.rpartition("/")[0] for file in files}
        for file in [*files, *folders]:
            disk.sync(directory / file)


class Target:
    """The databases, or the directory of plain files, that a share of an item is written into.
    Batches take turns in several databases, so that several commits run at once."""

    def __init__(self, directory: Location, names: Sequence[str], form: TargetFormat):
        self._directory = directory
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

    def write(self, number: int, boxes: Sequence[_Filled], reservation: memory.Reservation) -> None:
        """Encodes and writes boxes in one transaction. Its commit frees their memory."""
        transaction, store = self._begin(number)
        which = number % len(self._stores)
        paths = {array.path for array, _, _ in boxes}
        for key in [key for key in self._arrays if key[0] not in paths]:
            del self._arrays[key]
        copies = []
        for array, box, values in boxes:
            key = array.path, which
            if key not in self._arrays:
                self._arrays[key] = self._open(store, array)
            target = self._arrays[key].with_transaction(transaction)[box]
            copies.append(target.write(values, can_reference_source_data_indefinitely=True).copy)
        self._commit(transaction, copies, reservation)

    def write_values(
        self, number: int, values: Iterable[tuple[str, bytes]], reservation: memory.Reservation
    ) -> None:
        """Writes stored values in one transaction."""
        transaction, store = self._begin(number)
        writable = store.with_transaction(transaction)
        self._commit(transaction, [writable.write(*pair) for pair in values], reservation)

    def _begin(self, number: int) -> tuple[ts.Transaction, ts.KvStore]:
        """The transaction of a batch, and its store. On a disk the transaction may be several
        commits, so that encoded chunks are written early. In a bucket each commit would be three
        requests."""
        atomic = self._format.ocdbt and not self._directory.is_local
        return ts.Transaction(atomic=atomic), self._stores[number % len(self._stores)]

    def _commit(
        self,
        transaction: ts.Transaction,
        writes: Sequence[ts.Future],
        reservation: memory.Reservation,
    ) -> None:
        for write in writes:
            wait_written(write, self._directory)
        wait = functools.partial(wait_written, transaction.future, self._directory)
        # Before the commit begins: after an interrupt, a commit that nobody waits for would still
        # write into a directory that is being removed.
        reservation.free_after(wait, self._committed, transaction.future.done)
        transaction.commit_async()

    def _committed(self) -> None:
        """Hands new data files to the disk after a commit; the next call gives back their pages."""
        if self._data is not None and self._data.is_dir():
            for name in self._data.names():
                if self._handed[name] < 2:
                    self._handed[name] += 1
                    disk.write_back(self._data / name)

    def _open(self, store: ts.KvStore, array: ArrayPlan) -> ts.TensorStore:
        """An array of the destination, whose metadata are written separately."""
        options = {"store_data_equal_to_fill_value": not self._format.omits_fill}
        spec = array_spec(self._format.driver, array.metadata, **options)
        below = store / key_of(stored_name(array.path))
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
      write: called with the number of a batch, its boxes, and its reservation.
      limiter: limits the bytes in flight. Several batches fit into it.
      report: called with the decoded bytes of each batch.
    """
    todo = in_batches(units(share), limiter.limit // memory.WINDOW, limiter.limit)
    for number, filled in enumerate(read(todo, limiter)):
        filled.check()
        reads = filled.batch.reads
        pairs = zip(reads, filled.values, strict=True)
        boxes = [(read.owner, read.box, values) for read, values in pairs if values is not None]
        write(number, boxes, filled.reservation)
        for array, box, values in boxes:  # while other threads encode what is committed
            digests[array.path].add(box, values)
        report(sum(read.nbytes for read in reads))
        boxes, values = [], None  # only the transaction holds the buffers until it is committed


def units(share: ItemShare) -> Iterator[Unit]:
    """Boxes in order. Boxes of arrays that share stored chunks are read together."""
    for group, start, stop, *_ in share.pieces:
        for boxes in zip(*(array.boxes(start, stop) for array in group), strict=True):
            elements = math.prod(shape_of(boxes[0]))
            pairs = zip(group, boxes, strict=True)
            yield Unit(
                [
                    Read(a.handle, part, a)
                    for a, box in pairs
                    for part in _chunk_boxes(share, a, box)
                ],
                elements * sum(array.read_itemsize for array in group),
                sum(array.consumer_bytes(elements) for array in group),
            )


def _chunk_boxes(share: ItemShare, array: ArrayPlan, box: Box) -> Iterable[Box]:
    """The parts of a box that are read into buffers of their own: each large target chunk, which is
    then encoded where it is. Columns of a larger buffer would first be copied into new memory. A
    derived box stays one part, so that its inputs are computed once."""
    large = math.prod(array.chunk) * array.target_itemsize >= _LARGE_CHUNK
    if share.files or not large or isinstance(array.handle.data, Derived):
        return [box]
    grid = grid_boxes(shape_of(box), array.chunk)
    return [
        tuple(slice(s + p.start, s + p.stop) for s, p in zip(start_of(box), part, strict=True))
        for part in grid
    ]


def copy_chunks(
    share: ItemShare, target: Target, limiter: memory.MemoryLimiter, report: Report
) -> None:
    """Writes metadata, and copies stored values, read ahead."""
    if metadata := share.metadata:
        reservation = limiter.reserve(sum(map(len, metadata.values())))
        target.write_values(0, metadata.items(), reservation)
    ahead: collections.deque[tuple[int, Sequence[_Copy], memory.Reservation]] = collections.deque()

    def write_oldest() -> None:
        number, batch, reservation = ahead.popleft()
        values = []
        for new, chunk, value in batch:
            result = checked(value, f"the stored value `{chunk.key}`")
            if result.state != "value":
                raise CorruptCheckpointError(f"the stored value `{chunk.key}` is missing")
            values.append((new, result.value))
        target.write_values(number, values, reservation)
        report(sum(chunk.value.size for _, chunk, _ in batch))

    most = limiter.limit // (2 * memory.WINDOW)
    for number, some in enumerate(in_groups(share.chunks(), lambda each: each[1].value.size, most)):
        nbytes = memory.copy_bytes(sum(chunk.value.size for _, chunk, _ in some))
        limiter.make_room(nbytes)
        while ahead and (len(ahead) == READ_AHEAD or not limiter.fits(nbytes)):
            write_oldest()
            limiter.make_room(nbytes)
        reads = [(key, chunk, store.read(chunk.key)) for key, chunk, store in some]
        ahead.append((number, reads, limiter.reserve(nbytes)))
    while ahead:
        write_oldest()
