"""The work of a job in shares: the boxes and the stored values of each share.

Pure: no I/O and no jax. The work is in one order, that of the plan, and each box has a weight. A
share has the boxes that begin between two cuts. The cuts are equally far apart in sums of the
weights:

    share       0           1           2           3
          |-----------|-----------|-----------|-----------|     equal parts of the weight
    work  [ a0 | a1 | a2 | a3 ][   b0   |   b1   ][ c0 | c1 ]   boxes of arrays a, b and c

So a share is contiguous, each box is in exactly one share, and two shares differ by at most one
box. A division depends on the plan and the number of shares, not on the workers.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from reshard.arrays.boxes import Shape, grid_size
from reshard.engine.plan import ArrayPlan

# What a chunk takes beside its bytes, in bytes that could be moved meanwhile.
CHUNK_BYTES = 1 << 16


class Piece(Protocol):
    """A part of the work with an order of its own: `count` boxes or values."""

    @property
    def count(self) -> int: ...

    def weight(self, count: int) -> int:
        """The weight of the first `count` boxes or values."""
        ...


class Boxes:
    """The boxes of arrays that are read together: the first box of each, then the second box of
    each, and so on."""

    def __init__(self, arrays: Sequence[ArrayPlan]):
        self.arrays = arrays
        self.count = grid_size(arrays[0].layout.shape, arrays[0].box or ())

    def weight(self, count: int) -> int:
        """The weight, in bytes, of the first `count` boxes of each array: bytes read, bytes
        written, and `CHUNK_BYTES` for each chunk."""
        weight = 0
        for array in self.arrays:
            layout = array.layout
            elements, chunks = _sums(layout.shape, array.box or (), array.chunk)
            each = math.ceil(layout.source_itemsize * array.passes) + layout.target_itemsize
            weight += int(elements[count]) * each + int(chunks[count]) * CHUNK_BYTES
        return weight

    def nbytes(self, start: int, stop: int) -> int:
        """Decoded bytes of some boxes, as they are written."""
        nbytes = 0
        for array in self.arrays:
            elements, _ = _sums(array.layout.shape, array.box or (), array.chunk)
            nbytes += int(elements[stop] - elements[start]) * array.layout.target_itemsize
        return nbytes


class Values:
    """Stored values that are copied verbatim, with their sizes in bytes."""

    def __init__(self, sizes: Sequence[int]):
        self.count = len(sizes)
        self._sums = _summed(np.array(sizes, np.int64))

    def weight(self, count: int) -> int:
        """The weight, in bytes, of the first `count` values, as for `Boxes`."""
        return 2 * int(self._sums[count]) + count * CHUNK_BYTES

    def nbytes(self, start: int, stop: int) -> int:
        """Stored bytes of some of them."""
        return int(self._sums[stop] - self._sums[start])


class Part(NamedTuple):
    """A part of the work: the range `start` to `stop` of one piece."""

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
        """Share `number`, from 0, of `count` shares."""
        first, start = self._cut(number, count)
        last, stop = self._cut(number + 1, count)
        parts = [
            Part(n, start if n == first else 0, stop if n == last else self._pieces[n].count)
            for n in range(first, min(last + 1, len(self._pieces)))
        ]
        return [part for part in parts if part.start < part.stop]

    def weight(self, parts: Sequence[Part]) -> int:
        """The weight of a share."""
        pieces = self._pieces
        return sum(pieces[n].weight(stop) - pieces[n].weight(start) for n, start, stop in parts)

    def _cut(self, number: int, count: int) -> tuple[int, int]:
        """Where a share begins: the number of a piece, and the first box or value of it."""
        target = self._ends[-1] * number // count
        piece = bisect.bisect_right(self._ends, target) - 1
        if piece == len(self._pieces):
            return piece, 0
        found = self._pieces[piece]
        below = target - self._ends[piece]
        return piece, bisect.bisect_left(range(found.count + 1), below, key=found.weight)


@functools.lru_cache(maxsize=64)
def _sums(shape: Shape, box: Shape, chunk: Shape) -> tuple[np.ndarray, np.ndarray]:
    """The number of elements, and of chunks, in the first n boxes of a grid in row-major order, for
    each n from 0. The last boxes along an axis are clipped."""
    elements = chunks = np.ones((), np.int64)
    for size, step, part in zip(shape, box, chunk, strict=True):
        lengths = np.minimum(step, size - np.arange(0, size, step))
        elements = np.multiply.outer(elements, lengths)
        chunks = np.multiply.outer(chunks, -(-lengths // part))
    return _summed(elements), _summed(chunks)


def _summed(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
