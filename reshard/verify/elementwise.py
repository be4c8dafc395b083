"""Two arrays of one shape compared element by element, while their values come in box by box. Pure.

Arrays of one dtype are equal where their bits are, so that 0.0 and -0.0 differ, and so do NaNs of
different payloads. With a tolerance, floating-point and complex elements a and b are equal where
|a - b| <= atol + rtol * |b|, and NaN equals any NaN; an infinity equals itself alone. Arrays of two
dtypes are compared as numbers. Differences of integers are exact; all others are those of float64
or complex128.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.arrays.boxes import Box, Shape, shape_of, start_of
from reshard.arrays.dtypes import kind_of

# Elements that are looked at together: what is made of them stays in a core's cache.
_SLAB = 1 << 13
# Positive float64 numbers are 2^k to 2^(k + 1) with k from here, and less than minus that.
_LEAST_POWER = -1075


@dataclasses.dataclass(frozen=True)
class ElementDifference:
    """How the elements of two arrays differ.

    Attributes:
      count: elements that differ.
      size: elements that there are.
      non_finite: those of `count` that are NaN or infinite on a side.
      max_abs: the largest |a - b| of the others, an int where both are integers; None if there are
        no others.
      max_rel: the largest |a - b| / |b| of the others; infinite where b is 0.
      index: the first element that differs, in row-major order.
      a: what it is on the one side, a numpy scalar.
      b: what it is on the other.
      abs_histogram: k -> how many have 2^k <= |a - b| < 2^(k + 1), in float64.
      rel_histogram: the same of |a - b| / |b|, where b is not 0.
    """

    count: int
    size: int
    non_finite: int
    max_abs: float | None
    max_rel: float | None
    index: tuple[int, ...]
    a: np.generic
    b: np.generic
    abs_histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rel_histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)


class ElementComparison:
    """The comparison of two arrays of one shape, while their values come in."""

    def __init__(self, shape: Shape, rtol: float, atol: float):
        self._size = math.prod(shape)
        self._rtol = rtol
        self._atol = atol
        self._count = 0
        self._non_finite = 0
        self._max_abs: float | None = None
        self._max_rel: float | None = None
        self._abs_powers = np.zeros(-2 * _LEAST_POWER, np.int64)
        self._rel_powers = np.zeros(-2 * _LEAST_POWER, np.int64)
        self._first: tuple[tuple[int, ...], np.generic, np.generic] | None = None

    def add(self, box: Box, a: np.ndarray, b: np.ndarray) -> None:
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        first = None
        for start in range(0, a.size, _SLAB):
            x, y = a[start : start + _SLAB], b[start : start + _SLAB]
            places = self._differing(x, y)
            if places.size and first is None:
                first = start + int(places[0])
        if first is not None:
            offset = np.unravel_index(first, shape_of(box))
            index = tuple(int(i) + low for i, low in zip(offset, start_of(box), strict=True))
            self._add_first(index, a[first], b[first])

    @property
    def state(self) -> tuple[Any, ...]:
        """What has been found so far, for `merge`."""
        measured = self._count, self._non_finite, self._max_abs, self._max_rel
        return *measured, self._abs_powers, self._rel_powers, self._first

    def merge(self, state: tuple[Any, ...]) -> None:
        """Adds what another comparison of the same arrays has found in other boxes."""
        count, non_finite, max_abs, max_rel, abs_powers, rel_powers, first = state
        self._count += count
        self._non_finite += non_finite
        self._abs_powers += abs_powers
        self._rel_powers += rel_powers
        if max_abs is not None:
            self._max_abs = _larger(self._max_abs, max_abs)
            self._max_rel = _larger(self._max_rel, max_rel)
        if first is not None:
            self._add_first(*first)

    def _add_first(self, index: tuple[int, ...], a: np.generic, b: np.generic) -> None:
        if self._first is None or index < self._first[0]:
            self._first = index, a, b

    def difference(self) -> ElementDifference | None:
        """What differs; None if nothing does."""
        if self._first is None:
            return None
        index, a, b = self._first
        return ElementDifference(
            self._count,
            self._size,
            self._non_finite,
            self._max_abs,
            self._max_rel,
            index,
            a,
            b,
            _histogram(self._abs_powers),
            _histogram(self._rel_powers),
        )

    def _differing(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The places at which two slabs differ; they are counted, and measured."""
        same_dtype = a.dtype == b.dtype
        common = _common(a.dtype, b.dtype)
        mixed = common.kind == "O"
        if same_dtype:
            places = _other_bits(a, b)
        elif mixed:
            places = _other_integers(a, b)
        else:
            places = np.arange(a.size)
        if not places.size:
            return places
        with np.errstate(all="ignore"):
            x, y = a[places].astype(common), b[places].astype(common)
            gap = _gap(x, y)
            close = common.kind in "fc" and (self._rtol or self._atol)
            if close or not (same_dtype or mixed):
                apart = self._apart(x, y, gap)
                places, x, y, gap = places[apart], x[apart], y[apart], gap[apart]
            self._measure(x, y, gap)
        return places

    def _apart(self, x: np.ndarray, y: np.ndarray, gap: np.ndarray) -> np.ndarray:
        """Which elements differ as numbers."""
        if x.dtype.kind not in "fc":
            return gap != 0
        finite = np.isfinite(x) & np.isfinite(y)
        close = gap <= self._atol + self._rtol * np.abs(y)
        return ~np.where(finite, close, _same(x, y))

    def _measure(self, x: np.ndarray, y: np.ndarray, gap: np.ndarray) -> None:
        self._count += x.size
        integers = y.dtype.kind in "iuO"
        if not integers:
            finite = np.isfinite(x) & np.isfinite(y)
            self._non_finite += x.size - int(np.count_nonzero(finite))
            y, gap = y[finite], gap[finite]
        if gap.size:
            size = np.abs(y.astype(np.float64) if integers else y)
            relative = np.where(gap == 0, 0.0, gap.astype(np.float64) / size)
            self._max_abs = _larger(self._max_abs, gap.max(keepdims=True).item())
            self._max_rel = _larger(self._max_rel, relative.max().item())
            self._abs_powers += _powers(gap.astype(np.float64))
            self._rel_powers += _powers(relative)


def _larger(one: float | None, other: float) -> float:
    return other if one is None else max(one, other)


def _powers(values: np.ndarray) -> np.ndarray:
    """How many numbers are in 2^k to 2^(k + 1), from the least k on; without 0 and infinity."""
    values = values[(values > 0) & np.isfinite(values)]
    exponents = np.frexp(values)[1] - 1
    return np.bincount(exponents - _LEAST_POWER, minlength=-2 * _LEAST_POWER)


def _histogram(powers: np.ndarray) -> dict[int, int]:
    return {int(k) + _LEAST_POWER: int(powers[k]) for k in np.flatnonzero(powers)}


def _other_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The places at which the bits of two arrays of one dtype differ."""
    itemsize = a.dtype.itemsize
    word = np.dtype(f"u{min(itemsize, 8)}")
    other = a.view(word) != b.view(word)
    return np.flatnonzero(other if itemsize <= 8 else other.reshape(a.size, -1).any(axis=1))


def _other_integers(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The places at which integers differ, of which one side alone is uint64."""
    if a.dtype == np.uint64:
        a, b = b, a
    signed = a.astype(np.int64)
    return np.flatnonzero((signed < 0) | (signed.astype(np.uint64) != b))


@functools.cache
def _common(one: np.dtype, other: np.dtype) -> np.dtype:
    """The dtype in which numbers of two dtypes are compared; object, which is Python's integers,
    where no other holds the integers of both."""
    widest = {_widest(one), _widest(other)}
    mixed = widest == {np.dtype(np.int64), np.dtype(np.uint64)}
    return np.dtype(object) if mixed else np.result_type(*widest)


def _widest(dtype: np.dtype) -> np.dtype:
    """The widest dtype of the kind of a dtype."""
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    if kind_of(dtype) in "iub":
        return np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    return np.dtype(np.float64)


def _gap(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|; of integers of one dtype as uint64, which holds them all."""
    if x.dtype.kind in "iu":
        return np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    return np.abs(x - y)


def _same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where numbers are equal, NaN to NaN; the parts of complex ones each to its like."""
    if x.dtype.kind == "c":
        return _same(np.real(x), np.real(y)) & _same(np.imag(x), np.imag(y))
    return (x == y) | (np.isnan(x) & np.isnan(y))
