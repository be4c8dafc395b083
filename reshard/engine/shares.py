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
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from reshard.arrays.boxes import Shape

# The fixed cost of a chunk, as bytes that could be copied in the same time.
CHUNK_BYTES = 1 << 16


class Piece(Protocol):
    """A part of the work: boxes or values, from number `start` to number `stop`. A named tuple."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def weight(self, count: int) -> int:
        """The weight of the first `count` boxes or values."""
        ...

    def _replace(self, **fields: Any) -> Any: ...


P = TypeVar("P", bound=Piece)


def divide(pieces: Sequence[P], count: int) -> list[list[P]]:
    """The pieces of each of `count` shares. All of them begin with number 0."""
    ends = [0, *itertools.accumulate(piece.weight(piece.stop) for piece in pieces)]

    def cut(number: int) -> tuple[int, int]:
        """Where a share begins: the number of a piece, and its first box or value."""
        target = ends[-1] * number // count
        n = bisect.bisect_right(ends, target) - 1
        if n == len(pieces):
            return n, 0
        boxes = range(pieces[n].stop + 1)
        return n, bisect.bisect_left(boxes, target - ends[n], key=pieces[n].weight)

    shares = []
    for (first, start), (last, stop) in itertools.pairwise(map(cut, range(count + 1))):
        parts = [*pieces[first : last + 1]]
        if last < len(pieces):
            parts[-1] = parts[-1]._replace(stop=stop)
        if parts:
            parts[0] = parts[0]._replace(start=start)
        shares.append([part for part in parts if part.start < part.stop])
    return shares


@functools.lru_cache(maxsize=64)
def grid_sums(shape: Shape, box: Shape, chunk: Shape) -> tuple[np.ndarray, np.ndarray]:
    """The number of elements, and of chunks, in the first n boxes of a grid in row-major order, for
    each n from 0. The last boxes along an axis are clipped."""
    elements = chunks = np.ones((), np.int64)
    for size, step, part in zip(shape, box, chunk, strict=True):
        lengths = np.minimum(step, size - np.arange(0, size, step))
        elements = np.multiply.outer(elements, lengths)
        chunks = np.multiply.outer(chunks, -(-lengths // part))
    return sums(elements), sums(chunks)


def sums(sizes: np.ndarray) -> np.ndarray:
    """The sum of the first n sizes, for each n from 0."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
