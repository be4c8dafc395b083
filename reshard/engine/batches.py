"""Batches of boxes: boxes that share stored chunks, or are small, are read together."""

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
      reads: one box of each array, whole or in parts.
      buffers: bytes of their buffers, without buffers that belong to a result.
      consumer_bytes: bytes that their consumer holds once they have been read.
      shared_bytes: as for `Batch`.
    """

    reads: Sequence[Read]
    buffers: int
    consumer_bytes: int
    shared_bytes: int = 0


class _Sizes(NamedTuple):
    """The bytes of several units, as in `Unit`, and the number of their boxes."""

    decoding: int = 0
    buffers: int = 0
    consumer_bytes: int = 0
    shared_bytes: int = 0
    boxes: int = 0

    @property
    def reading(self) -> int:
        return cost_bytes(self.decoding, self.buffers, self.consumer_bytes, self.boxes)


def in_batches(units: Iterable[Unit], limit: int, most: int) -> Iterator[Batch]:
    """All units in order, in batches of at most `limit` bytes, unless a single unit takes more. A
    batch may have `most` bytes if its units share chunks, which are then decoded once."""
    reads: list[Read] = []
    sizes, union = _Sizes(), ChunkUnion()
    for unit in units:
        chunks = [c for read in unit.reads for c in chunks_of(read.handle, read.box)]
        if len(chunks) > 1:
            chunks = ChunkUnion().add(chunks)
        new = [part for each in chunks for part in union.missing(each)]
        boxes = len({id(read.handle) for read in unit.reads})
        held = unit.consumer_bytes, unit.shared_bytes
        own = _Sizes(total(new).nbytes, unit.buffers, *held, boxes)
        together = _Sizes(*map(operator.add, sizes, own))
        fits = together.reading + together.shared_bytes <= (most if new != chunks else limit)
        if reads and not fits:
            yield Batch(reads, sizes.reading, sizes.consumer_bytes, sizes.shared_bytes)
            reads, union, new = [], ChunkUnion(), chunks
            together = own._replace(decoding=total(chunks).nbytes)
        union.add(new)
        reads += unit.reads
        sizes = together
    if reads:
        yield Batch(reads, sizes.reading, sizes.consumer_bytes, sizes.shared_bytes)


def in_groups(
    items: Iterable[T], nbytes: Callable[[T], int], limit: int, most: int | None = None
) -> Iterator[list[T]]:
    """Items in order, in groups of at most `limit` bytes, or one item, and at most `most` items."""
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
