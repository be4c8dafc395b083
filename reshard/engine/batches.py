"""Boxes in batches: what is read together, since it shares stored chunks or is small."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from reshard.engine.cost import ChunkUnion, chunks_of, total
from reshard.engine.memory import cost_bytes
from reshard.engine.read import Batch, Read

T = TypeVar("T")


class Unit(NamedTuple):
    """Boxes that are in one batch, since they share stored chunks.

    Attributes:
      buffers: bytes of what they are read into, unless that is part of a result.
      consumer_bytes: bytes of it once it has been read.
      shared_bytes: as for `Batch`.
      own_batch: nothing else is in its batch, for want of memory.
    """

    reads: Sequence[Read]
    buffers: int
    consumer_bytes: int
    shared_bytes: int = 0
    own_batch: bool = False


class _Sizes(NamedTuple):
    """Bytes that boxes take together, as of `Unit`, and how many boxes they are."""

    decoding: int = 0
    buffers: int = 0
    consumer_bytes: int = 0
    shared_bytes: int = 0
    boxes: int = 0

    @property
    def reading(self) -> int:
        return cost_bytes(self.decoding, self.buffers, self.consumer_bytes, self.boxes)


def in_batches(units: Iterable[Unit], limit: int, most: int) -> Iterator[Batch]:
    """All units in order, in batches of `limit` bytes, unless a single unit takes more; of `most`
    bytes where units share chunks with those before them, which are decoded once then."""
    reads: list[Read] = []
    sizes, union, own_batch = _Sizes(), ChunkUnion(), False
    for unit in units:
        chunks = [c for read in unit.reads for c in chunks_of(read.handle, read.box)]
        if len(chunks) > 1:
            chunks = ChunkUnion().add(chunks)
        new = [part for each in chunks for part in union.missing(each)]
        own = _Sizes(
            total(new).nbytes, unit.buffers, unit.consumer_bytes, unit.shared_bytes, len(unit.reads)
        )
        together = _Sizes(*map(operator.add, sizes, own))
        fits = together.reading + together.shared_bytes <= (most if new != chunks else limit)
        if reads and (unit.own_batch or own_batch or not fits):
            yield Batch(reads, sizes.reading, sizes.consumer_bytes, sizes.shared_bytes)
            reads, union, new = [], ChunkUnion(), chunks
            together = own._replace(decoding=total(chunks).nbytes)
        union.add(new)
        reads += unit.reads
        sizes, own_batch = together, unit.own_batch
    if reads:
        yield Batch(reads, sizes.reading, sizes.consumer_bytes, sizes.shared_bytes)


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
