"""The work of a job in shares: which boxes and which stored values each of them has.

Pure: no I/O and no jax. The work is in one order, that of the plan, and has a weight; a share is
what begins between two cuts of it, each found by arithmetic on sums, without walking the boxes:

    share       0           1           2           3
          |-----------|-----------|-----------|-----------|     equal parts of the weight
    work  [ a0 | a1 | a2 | a3 ][   b0   |   b1   ][ c0 | c1 ]   boxes of arrays a, b and c

So a share is contiguous, each box is in exactly one, and two shares differ by one box at most. It
depends on the plan and on the number of shares, and not on who carries them out.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from reshard.arrays.boxes import grid_size
from reshard.engine.plan import ArrayPlan

# What a chunk takes beside its bytes, in bytes that could be moved meanwhile.
CHUNK_BYTES = 1 << 16


class Piece(Protocol):
    """Some of the work, in an order of its own: `count` boxes or values."""

    @property
    def count(self) -> int: ...

    def weight(self, count: int) -> int:
        """What the first so many weigh."""
        ...


class Boxes:
    """The boxes of arrays that are read together: of all of them the first one, then the second
    one, and so on."""

    def __init__(self, arrays: Sequence[ArrayPlan]):
        self.arrays = arrays
        self.count = grid_size(arrays[0].layout.shape, arrays[0].box or ())

    def weight(self, count: int) -> int:
        """Bytes that the first so many boxes of each array weigh: those that are read, those that
        are written, and what their chunks take."""
        weight = 0
        for array in self.arrays:
            layout = array.layout
            elements, chunks = _first_boxes(array, count)
            read = math.ceil(layout.source_itemsize * array.passes)
            weight += elements * (read + layout.target_itemsize) + chunks * CHUNK_BYTES
        return weight

    def nbytes(self, start: int, stop: int) -> int:
        """Decoded bytes of some boxes, as they are written."""
        nbytes = 0
        for array in self.arrays:
            elements = _first_boxes(array, stop)[0] - _first_boxes(array, start)[0]
            nbytes += elements * array.layout.target_itemsize
        return nbytes


class Values:
    """Stored values that are copied as they are, of so many bytes each."""

    def __init__(self, sizes: Sequence[int]):
        self.count = len(sizes)
        self._sums = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def weight(self, count: int) -> int:
        """Bytes that the first so many weigh, as of `Boxes`."""
        return 2 * int(self._sums[count]) + count * CHUNK_BYTES

    def nbytes(self, start: int, stop: int) -> int:
        """Stored bytes of some of them."""
        return int(self._sums[stop] - self._sums[start])


class Part(NamedTuple):
    """A part of the work: of the piece with a number, what is from `start` to `stop`."""

    piece: int
    start: int
    stop: int


class Division:
    """Work that is divided into shares: boxes and values in order."""

    def __init__(self, pieces: Sequence[Piece]):
        self._pieces = pieces
        weights = (piece.weight(piece.count) for piece in pieces)
        self._ends = [0, *itertools.accumulate(weights)]

    def share(self, number: int, count: int) -> list[Part]:
        """Share `number` of so many, from 0."""
        first, start = self._cut(number, count)
        last, stop = self._cut(number + 1, count)
        parts = [
            Part(n, start if n == first else 0, stop if n == last else self._pieces[n].count)
            for n in range(first, min(last + 1, len(self._pieces)))
        ]
        return [part for part in parts if part.start < part.stop]

    def weight(self, parts: Sequence[Part]) -> int:
        """What a share weighs."""
        pieces = self._pieces
        return sum(pieces[n].weight(stop) - pieces[n].weight(start) for n, start, stop in parts)

    def _cut(self, number: int, count: int) -> tuple[int, int]:
        """Where a share begins: the number of a piece, and what is the first of it."""
        target = self._ends[-1] * number // count
        piece = bisect.bisect_right(self._ends, target) - 1
        if piece == len(self._pieces):
            return piece, 0
        found = self._pieces[piece]
        below = target - self._ends[piece]
        return piece, bisect.bisect_left(range(found.count + 1), below, key=found.weight)


def _first_boxes(array: ArrayPlan, count: int) -> tuple[int, int]:
    """Elements, and chunks, of the first so many boxes of an array, the last ones clipped, in
    row-major order."""
    shape, box = array.layout.shape, array.box
    assert box is not None
    if not shape or not count:
        return count, count
    places = []
    for size, step in zip(reversed(shape), reversed(box), strict=True):
        count, place = divmod(count, math.ceil(size / step))
        places.append(place)
    places[-1] += count * math.ceil(shape[0] / box[0])  # all of them: past the last one
    elements = chunks = 0
    below_elements = below_chunks = 1  # of a box of the axes that follow, all of it
    for place, size, step, part in zip(
        places, reversed(shape), reversed(box), reversed(array.chunk), strict=True
    ):
        begin, end = min(place * step, size), min((place + 1) * step, size)
        elements = begin * below_elements + (end - begin) * elements
        chunks = math.ceil(begin / part) * below_chunks + math.ceil((end - begin) / part) * chunks
        below_elements *= size
        below_chunks *= math.ceil(size / part)
    return elements, chunks
