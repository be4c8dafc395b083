"""Compares two arrays of one shape element by element, box by box. Pure.

Elements of one dtype are equal if their bits are equal: 0.0 and -0.0 differ, and so do NaNs with
different payloads. With a tolerance, floating-point and complex elements a and b are equal if
|a - b| <= atol + rtol * |b| and neither side overflows. NaN then equals any NaN, and an infinity
only itself. Elements of two dtypes are compared as numbers. Differences of integers are exact; all
others are computed in float64 or complex128.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from reshard.arrays.boxes import Box, Shape, shape_of, start_of
from reshard.arrays.dtypes import kind_of

# Elements that are compared at once: their intermediate arrays stay in a core's cache.
_SLAB = 1 << 15


@dataclasses.dataclass(frozen=True)
class ElementDifference:
    """How the elements of two arrays differ.

    Attributes:
      count: elements that differ.
      size: elements of each array.
      non_finite: elements of `count` that are NaN or infinite on a side.
      max_abs: the largest finite |a - b|, an int if both are integers; None if there is none.
      max_rel: the largest |a - b| / |b| of these elements; infinite if b is 0.
      index: the first element that differs, in row-major order.
      a, b: its values, numpy scalars.
      abs_histogram: k -> number of elements with 2^k <= |a - b| < 2^(k + 1), in float64.
      rel_histogram: the same for |a - b| / |b|, where b is not 0.
    """

    count: int
    size: int
    non_finite: int
    max_abs: float | None
    max_rel: float | None
    index: tuple[int, ...]
    a: np.generic
    b: np.generic
    abs_histogram: Mapping[int, int]
    rel_histogram: Mapping[int, int]


class ElementComparison:
    """A comparison in progress. `state` is the difference so far, None if there is none."""

    def __init__(self, shape: Shape, rtol: float, atol: float):
        self.state: ElementDifference | None = None
        self._size = math.prod(shape)
        self._rtol = rtol
        self._atol = atol

    def add(self, box: Box, a: np.ndarray, b: np.ndarray) -> None:
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        for start in range(0, a.size, _SLAB):
            x, y = a[start : start + _SLAB], b[start : start + _SLAB]
            places, gap, size, finite = self._differing(x, y)
            if not places.size:
                continue
            first = start + int(places[0])
            offset = np.unravel_index(first, shape_of(box))
            index = tuple(int(i) + low for i, low in zip(offset, start_of(box), strict=True))
            gap, size = gap[finite], size[finite]
            max_abs = gap.max(keepdims=True).item() if gap.size else None
            gap = gap.astype(np.float64)
            with np.errstate(all="ignore"):
                ratio = np.where(gap == 0, 0.0, gap / size)
            self.merge(
                ElementDifference(
                    count=places.size,
                    size=self._size,
                    non_finite=places.size - gap.size,
                    max_abs=max_abs,
                    max_rel=ratio.max().item() if gap.size else None,
                    index=index,
                    a=a[first],
                    b=b[first],
                    abs_histogram=_histogram(gap),
                    rel_histogram=_histogram(ratio),
                )
            )

    def merge(self, state: ElementDifference | None) -> None:
        """Adds the difference of other elements of the same arrays."""
        if self.state is None or state is None:
            self.state = self.state or state
            return
        both = self.state, state
        first = min(both, key=lambda each: each.index)
        self.state = dataclasses.replace(
            first,
            count=self.state.count + state.count,
            non_finite=self.state.non_finite + state.non_finite,
            max_abs=max((x.max_abs for x in both if x.max_abs is not None), default=None),
            max_rel=max((x.max_rel for x in both if x.max_rel is not None), default=None),
            abs_histogram=_sum(x.abs_histogram for x in both),
            rel_histogram=_sum(x.rel_histogram for x in both),
        )

    def _differing(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
        """The places where two slabs differ, and for each |a - b|, |b|, and whether both are
        finite."""
        same = a.dtype == b.dtype
        places = np.arange(a.size)
        if same:
            word = np.dtype(f"u{min(a.itemsize, 8)}")
            bits = a.view(word) != b.view(word)
            places = np.flatnonzero(bits if a.itemsize <= 8 else bits.reshape(a.size, -1).any(1))
        if not places.size:
            return (places,) * 4
        common = _common(a.dtype, b.dtype)
        with np.errstate(all="ignore"):
            x, y = a[places].astype(common), b[places].astype(common)
            if common.kind in "fc":
                gap, size = np.abs(x - y), np.abs(y)
                finite = np.isfinite(x) & np.isfinite(y)
                if same and not (self._rtol or self._atol):
                    return places, gap, size, finite
                # If |a - b| or |b| overflows, the elements are not known to be near.
                differs = ~(gap <= self._atol + self._rtol * size) | np.isinf(gap + size)
                differs[~finite] = _other_parts(x[~finite], y[~finite])
            else:
                gap, size = _integer_gap(x, y), np.abs(y.astype(np.float64))
                finite = np.full(x.size, True)
                # Of one dtype, all places have different bits: four of the bits of an int4 are no
                # part of its number.
                differs = finite if same else x != y
        return places[differs], gap[differs], size[differs], finite[differs]


def _histogram(values: np.ndarray) -> dict[int, int]:
    """k -> how many numbers are in [2^k, 2^(k + 1)), without 0 and infinity."""
    values = values[(values > 0) & np.isfinite(values)]
    powers, counts = np.unique(np.frexp(values)[1] - 1, return_counts=True)
    return dict(zip(powers.tolist(), counts.tolist(), strict=True))


def _sum(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: collections.Counter[int] = collections.Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items()))


@functools.cache
def _common(one: np.dtype, other: np.dtype) -> np.dtype:
    """A dtype that holds the numbers of both: object, for Python's integers, if no other does."""
    wide = _widest(one), _widest(other)
    mixed = {*wide} == {np.dtype(np.int64), np.dtype(np.uint64)}
    return np.dtype(object) if mixed else np.result_type(*wide)


def _widest(dtype: np.dtype) -> np.dtype:
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    if kind_of(dtype) in "iub":
        return np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    return np.dtype(np.float64)


def _integer_gap(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|; for integers of one dtype as uint64, which holds all differences."""
    if x.dtype == object:
        return np.abs(x - y)
    return np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)


def _other_parts(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where numbers differ, with NaN equal to NaN. Complex numbers differ if a part does."""
    words = x.itemsize // 8
    x, y = (part.view(np.float64).reshape(-1, words) for part in (x, y))
    return ((x != y) & ~(np.isnan(x) & np.isnan(y))).any(axis=1)
