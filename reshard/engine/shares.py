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

import numpy as np

from reshard.arrays.boxes import Shape

# A part of a share: the number of a piece of work, the first box, and the box after the last one.
Range = tuple[int, int, int]


def divide(work: Sequence[np.ndarray], count: int, only: int | None = None) -> list[list[Range]]:
    """For each of `count` shares, or for `only` one, its ranges. `work` has, for each piece, the
    weight of its first n boxes, for each n from 0."""
    ends = [0, *itertools.accumulate(int(weights[-1]) for weights in work)]

    def cut(number: int) -> tuple[int, int]:
        """Where a share begins: the number of a piece, and its first box."""
        target = ends[-1] * number // count
        n = bisect.bisect_right(ends, target) - 1
        return n, 0 if n == len(work) else bisect.bisect_left(work[n], target - ends[n])

    shares = []
    cuts = range(count + 1) if only is None else (only, only + 1)
    for (first, start), (last, stop) in itertools.pairwise(map(cut, cuts)):
        boxes = [(n, 0, len(work[n]) - 1) for n in range(first, last)] + [(last, 0, stop)]
        boxes[0] = first, start, boxes[0][2]
        shares.append([each for each in boxes if each[1] < each[2]])
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
