"""The work of a job in shares: which boxes and which stored values each of them has.

Pure: no I/O and no jax. The work is in one order, that of the plan, and has a weight; a share is
what begins between two cuts of it, each found in sums of the weights:

    share       0           1           2           3
          |-----------|-----------|-----------|-----------|     equal parts of the weight
    work  [ a0 | a1 | a2 | a3 ][   b0   |   b1   ][ c0 | c1 ]   boxes of arrays a, b and c

So a share is contiguous, each box is in exactly one, and two shares differ by one box at most. It
depends on the plan and on the number of shares, and not on who carries them out.
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
    """Stored values that are copied as they are, of so many bytes each."""

    def __init__(self, sizes: Sequence[int]):
        self.count = len(sizes)
        self._sums = _summed(np.array(sizes, np.int64))

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


@functools.lru_cache(maxsize=64)
def _sums(shape: Shape, box: Shape, chunk: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Elements, and chunks, of the first boxes of a grid, in row-major order: of none of them, of
    one, and so on. The last boxes along an axis are clipped."""
    elements = chunks = np.ones((), np.int64)
    for size, step, part in zip(shape, box, chunk, strict=True):
        lengths = np.minimum(step, size - np.arange(0, size, step))
        elements = np.multiply.outer(elements, lengths)
        chunks = np.multiply.outer(chunks, -(-lengths // part))
    return _summed(elements), _summed(chunks)


def _summed(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
