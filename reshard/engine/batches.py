"""Boxes in batches: what is read together, since it shares stored chunks or is small."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from reshard.engine.budget import in_memory
from reshard.engine.cost import Chunks, ChunkUnion, chunks_of, total
from reshard.engine.read import Batch, Read

T = TypeVar("T")


class Unit(NamedTuple):
    """Boxes that are in one batch, since they share stored chunks.

    Attributes:
      buffers: bytes of what they are read into, unless that is part of a result.
      held: bytes of it once it has been read.
      kept: as for `Batch`.
      alone: nothing else is in its batch, for want of memory.
    """

    reads: Sequence[Read]
    buffers: int
    held: int
    kept: int = 0
    alone: bool = False


def in_batches(units: Iterable[Unit], limit: int, most: int) -> Iterator[Batch]:
    """All units in order, in batches of `limit` bytes, unless a single unit takes more; of `most`
    bytes where units share chunks with those before them, which are decoded once then."""
    open_batch = _OpenBatch()
    for unit in units:
        chunks = [c for read in unit.reads for c in chunks_of(read.handle, read.box)]
        if len(chunks) > 1:
            chunks = ChunkUnion().add(chunks)
        new = open_batch.missing(chunks)
        fits = open_batch.bytes_with(unit, new) <= (most if new != chunks else limit)
        if open_batch.reads and (unit.alone or open_batch.alone or not fits):
            yield open_batch.close()
            open_batch, new = _OpenBatch(), chunks
        open_batch.add(unit, new)
    if open_batch.reads:
        yield open_batch.close()


def in_groups(
    items: Iterable[T], nbytes: Callable[[T], int], limit: int, most: int | None = None
) -> Iterator[list[T]]:
    """Items in order, in groups of `limit` bytes, unless a single one has more, and of `most`."""
    group: list[T] = []
    size = 0
    for item in items:
        if group and (len(group) == most or size + nbytes(item) > limit):
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


class _OpenBatch:
    """A batch that units are added to. Attributes as of `Unit` and `Batch`."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.alone = False
        self._chunks = ChunkUnion()
        self._decoding = self._buffers = self._held = self._kept = 0

    def missing(self, chunks: Sequence[Chunks]) -> list[Chunks]:
        """Those of these chunks that it does not decode already."""
        return [part for each in chunks for part in self._chunks.missing(each)]

    def bytes_with(self, unit: Unit, new: Sequence[Chunks]) -> int:
        """Bytes that it takes with one more unit, for which it decodes more chunks."""
        decoding = self._decoding + total(new).nbytes
        buffers, held = self._buffers + unit.buffers, self._held + unit.held
        boxes = len(self.reads) + len(unit.reads)
        return in_memory(decoding, buffers, held, boxes) + self._kept + unit.kept

    def add(self, unit: Unit, new: Sequence[Chunks]) -> None:
        """Adds a unit, for which it decodes more chunks."""
        self._decoding += total(new).nbytes
        self._chunks.add(new)
        self.reads += unit.reads
        self.alone = unit.alone
        self._buffers += unit.buffers
        self._held += unit.held
        self._kept += unit.kept

    def close(self) -> Batch:
        """The batch."""
        # Rounded values are made beside what was read.
        most = in_memory(self._decoding, self._buffers, self._held, len(self.reads))
        return Batch(self.reads, most, self._held, self._kept)
