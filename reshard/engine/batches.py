"""Boxes in batches: what is read together, since it shares stored chunks or is small."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from reshard.engine.budget import in_memory
from reshard.engine.cost import ChunkUnion, chunks_of, total
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


class _Sizes(NamedTuple):
    """Bytes that boxes take together, as of `Unit`, and how many boxes they are."""

    decoding: int = 0
    buffers: int = 0
    held: int = 0
    kept: int = 0
    boxes: int = 0

    @property
    def reading(self) -> int:
        return in_memory(self.decoding, self.buffers, self.held, self.boxes)


def in_batches(units: Iterable[Unit], limit: int, most: int) -> Iterator[Batch]:
    """All units in order, in batches of `limit` bytes, unless a single unit takes more; of `most`
    bytes where units share chunks with those before them, which are decoded once then."""
    reads: list[Read] = []
    sizes, union, alone = _Sizes(), ChunkUnion(), False
    for unit in units:
        chunks = [c for read in unit.reads for c in chunks_of(read.handle, read.box)]
        if len(chunks) > 1:
            chunks = ChunkUnion().add(chunks)
        new = [part for each in chunks for part in union.missing(each)]
        own = _Sizes(total(new).nbytes, unit.buffers, unit.held, unit.kept, len(unit.reads))
        together = _Sizes(*map(operator.add, sizes, own))
        fits = together.reading + together.kept <= (most if new != chunks else limit)
        if reads and (unit.alone or alone or not fits):
            yield Batch(reads, sizes.reading, sizes.held, sizes.kept)
            reads, union, new = [], ChunkUnion(), chunks
            together = own._replace(decoding=total(chunks).nbytes)
        union.add(new)
        reads += unit.reads
        sizes, alone = together, unit.alone
    if reads:
        yield Batch(reads, sizes.reading, sizes.held, sizes.kept)


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
