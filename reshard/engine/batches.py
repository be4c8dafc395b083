"""Boxes in batches: what is read together, since it shares stored chunks or is small."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard.engine.budget import READ_OVERHEAD
from reshard.engine.cost import Chunks, Decoded, chunks_of
from reshard.engine.read import Batch, Read


class Unit(NamedTuple):
    """Boxes that are in one batch, since they share stored chunks.

    Attributes:
      reads: the boxes.
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
    """All units in order, in batches.

    Args:
      units: what to read.
      limit: bytes that a batch takes, unless a single unit takes more.
      most: bytes that it takes at most where units share chunks with those before them, which are
        decoded once then.
    """
    open_batch = _OpenBatch()
    for unit in units:
        chunks: dict[Chunks, Decoded] = {}
        for read in unit.reads:
            chunks |= chunks_of(read.handle, read.box)
        shares = not open_batch.chunks.keys().isdisjoint(chunks)
        fits = open_batch.bytes_with(unit, chunks) <= (most if shares else limit)
        if open_batch.reads and (unit.alone or open_batch.alone or not fits):
            yield open_batch.close()
            open_batch = _OpenBatch()
        open_batch.add(unit, chunks)
    if open_batch.reads:
        yield open_batch.close()


class _OpenBatch:
    """A batch that units are added to. Attributes as of `Unit` and `Batch`, and `chunks`: those
    that it decodes."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.chunks: dict[Chunks, Decoded] = {}
        self.alone = False
        self._decoding = self._buffers = self._held = self._kept = 0

    def bytes_with(self, unit: Unit, chunks: dict[Chunks, Decoded]) -> int:
        """Bytes that it takes with one more unit."""
        decoding = self._decoding + self._more(unit, chunks)
        reading = decoding + self._buffers + unit.buffers
        return max(reading, self._held + unit.held) + self._kept + unit.kept

    def add(self, unit: Unit, chunks: dict[Chunks, Decoded]) -> None:
        """Adds a unit, which is decoded from these chunks."""
        self._decoding += self._more(unit, chunks)
        self.chunks |= chunks
        self.reads += unit.reads
        self.alone = unit.alone
        self._buffers += unit.buffers
        self._held += unit.held
        self._kept += unit.kept

    def _more(self, unit: Unit, chunks: dict[Chunks, Decoded]) -> int:
        """Bytes for chunks that it does not decode already, and for handling boxes."""
        new = sum(decoded.nbytes for key, decoded in chunks.items() if key not in self.chunks)
        return new + READ_OVERHEAD * len(unit.reads)

    def close(self) -> Batch:
        """The batch."""
        return Batch(self.reads, self._decoding + self._buffers, self._held, self._kept)
