"""Digests of array values: the same on any mesh, chunk grid, codec and storage format.

An array's last axis is read as 64-bit words, the last one of a row padded with zeros. The other
axes, flattened, number the rows. The digest consists of two sums over all words X, modulo 2^64:

    sum of row_weight[row] * word_weight[word] * X,    and the same of X >> 32

The weights are odd and come from splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014). Boxes can be added in any order and by several processes: bits of one
word in two boxes add up without a carry.

The digest detects any change of one bit, because an odd number times a power of two below 2^64 is
not 0 modulo 2^64. Up to a chance of about 2^-64 it detects any other change of values, and rows,
columns, blocks or arrays of equal shape that trade places. The second sum detects pairs of top
bits, whose first sum is 2^64. It is no cryptographic hash: values can be made to fit a digest.
"""

import functools
import hashlib
import json
import math
from collections.abc import Sequence

import numpy as np

from reshard.arrays.boxes import Box, Shape, whole_box
from reshard.arrays.dtypes import name_of

_ROWS, _WORDS = np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344)  # digits of pi
# Words that are summed at a time: they and their upper halves stay in a processor's cache.
_SLAB_WORDS = 1 << 16


class Digest:
    """The digest of an array, of which `elements` have been added."""

    def __init__(self, shape: Shape, dtype: np.dtype):
        self._shape = tuple(shape)
        self._dtype = np.dtype(dtype)
        self._sums: tuple[int, int] = (0, 0)
        self.elements = 0

    @property
    def complete(self) -> bool:
        """Whether all elements have been added."""
        return self.elements == math.prod(self._shape)

    def add(self, box: Box, values: np.ndarray) -> None:
        """Add the values of one box. Boxes must not overlap."""
        assert values.dtype == self._dtype, (values.dtype, self._dtype)
        self.elements += values.size
        if not values.size:
            return
        *rows, (first, last) = [(part.start, part.stop) for part in box] or [(0, 1)]
        data = np.ascontiguousarray(values.reshape(-1, last - first)).view(np.uint8)
        first *= self._dtype.itemsize  # the byte of the array's rows at which the box begins
        start, stop = first // 8, -(-(first + data.shape[1]) // 8)
        width = min(stop - start, _SLAB_WORDS)
        height = max(_SLAB_WORDS // width, 1)
        many = _SLAB_WORDS // height * height  # rows whose weights are made at once
        upper = np.empty((height, width), np.uint64)
        low, high = self._sums
        for top in range(0, len(data), height):
            block = top // many * many
            ends = block, min(block + many, len(data))
            weights = _row_weights(tuple(rows), self._shape[:-1], *ends)[top - block :][:height]
            for left in range(start, stop, width):
                right = min(left + width, stop)
                slab = _words(data[top : top + height], left * 8 - first, right * 8 - first)
                columns = _word_weights(left, right)
                shifted = upper[: slab.shape[0], : slab.shape[1]]
                np.right_shift(slab, np.uint64(32), out=shifted)
                low += _weighted(slab, columns, weights)
                high += _weighted(shifted, columns, weights)
        self._sums = low % 2**64, high % 2**64

    @property
    def state(self) -> tuple[int, int, int]:
        """The sums of the added boxes, for `merge`."""
        return (*self._sums, self.elements)

    def merge(self, state: Sequence[int]) -> None:
        """Add the state of another digest of the same array, of other boxes."""
        low, high, elements = state
        self._sums = (self._sums[0] + low) % 2**64, (self._sums[1] + high) % 2**64
        self.elements += elements

    def text(self) -> str:
        """32 hexadecimal digits, of shape, dtype and all values."""
        assert self.complete, (self.elements, self._shape)
        known = json.dumps([name_of(self._dtype), list(self._shape), *self._sums])
        return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def digest_of(values: np.ndarray) -> str:
    found = Digest(values.shape, values.dtype)
    found.add(whole_box(values.shape), values)
    return found.text()


@functools.lru_cache(maxsize=16)
def _row_weights(
    rows: tuple[tuple[int, int], ...], shape: Shape, start: int, stop: int
) -> np.ndarray:
    """The weights of some of a box's rows, in order, by their numbers in the whole array."""
    left = np.arange(start, stop, dtype=np.uint64)
    numbers = np.zeros_like(left)
    stride = 1
    for axis in reversed(range(len(shape))):
        first, last = rows[axis]
        own, extent = left, np.uint64(last - first)
        if axis:
            left = own // extent
            own = own - left * extent
        numbers += (own + np.uint64(first)) * np.uint64(stride)
        stride *= shape[axis]
    return _weights(numbers, _ROWS)


def _words(data: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The words of rows from one byte to another, with zeros outside the rows."""
    if start >= 0 and stop <= data.shape[1]:
        return data[:, start:stop].view("<u8")
    filled = np.zeros((len(data), stop - start), np.uint8)
    found = data[:, max(start, 0) : stop]
    filled[:, max(-start, 0) :][:, : found.shape[1]] = found
    return filled.view("<u8")


def _weighted(slab: np.ndarray, columns: np.ndarray, rows: np.ndarray) -> int:
    return int(np.einsum("r,r->", np.einsum("rw,w->r", slab, columns), rows))


@functools.lru_cache(maxsize=16)
def _word_weights(start: int, stop: int) -> np.ndarray:
    """The weights of some words of a row."""
    return _weights(np.arange(start, stop, dtype=np.uint64), _WORDS)


def _weights(numbers: np.ndarray, seed: np.uint64) -> np.ndarray:
    """The weights of these numbers: splitmix64's outputs, made odd."""
    with np.errstate(over="ignore"):
        x = seed + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)
