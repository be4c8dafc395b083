"""Two arrays of one shape compared element by element, while their values come in box by box. Pure.

Arrays of one dtype are equal where their bits are, so that 0.0 and -0.0 differ, and so do NaNs of
different payloads. With a tolerance, floating-point and complex elements a and b are equal where
|a - b| <= atol + rtol * |b|, if neither side overflows. NaN equals any NaN, and an infinity equals
itself alone. Arrays of two dtypes are compared as numbers. Differences of integers are exact; all
others are those of float64 or complex128.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from reshard.arrays.boxes import Box, Shape, shape_of, start_of
from reshard.arrays.dtypes import kind_of

# Elements that are looked at together: what is made of them stays in a core's cache.
_SLAB = 1 << 15


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
    abs_histogram: Mapping[int, int]
    rel_histogram: Mapping[int, int]


class ElementComparison:
    """The comparison of two arrays of one shape, while their values come in.

    Attributes:
      state: how the elements that came in differ; None if none does.
    """

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
        """Adds how other elements of the same arrays differ."""
        if self.state is None or state is None:
            self.state = self.state or state
            return
        found = self.state, state
        first = min(found, key=lambda each: each.index)
        self.state = dataclasses.replace(
            first,
            count=self.state.count + state.count,
            non_finite=self.state.non_finite + state.non_finite,
            max_abs=max((x.max_abs for x in found if x.max_abs is not None), default=None),
            max_rel=max((x.max_rel for x in found if x.max_rel is not None), default=None),
            abs_histogram=_sum(x.abs_histogram for x in found),
            rel_histogram=_sum(x.rel_histogram for x in found),
        )

    def _differing(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
        """The places at which two slabs differ, and there: |a - b|, |b|, and whether both are
        finite."""
        wide_a, wide_b, common = _numbers(a.dtype, b.dtype)
        inexact = common.kind in "fc"
        if a.dtype == b.dtype:
            word = np.dtype(f"u{min(a.itemsize, 8)}")
            bits = a.view(word) != b.view(word)
            places = np.flatnonzero(bits if a.itemsize <= 8 else bits.reshape(a.size, -1).any(1))
        elif inexact:
            places = np.arange(a.size)
        else:
            places = np.flatnonzero(a.astype(wide_a) != b.astype(wide_b))
        if not places.size:
            return (places,) * 4
        with np.errstate(all="ignore"):
            x, y = a[places].astype(common), b[places].astype(common)
            if not inexact:
                size = np.abs(y.astype(np.float64))
                return places, _integer_gap(x, y), size, np.full(x.size, True)
            gap, size = np.abs(x - y), np.abs(y)
            finite = np.isfinite(x) & np.isfinite(y)
            if a.dtype == b.dtype and not (self._rtol or self._atol):
                return places, gap, size, finite
            # Nothing is known to be near where |a - b| or |b| overflows.
            differs = ~(gap <= self._atol + self._rtol * size) | np.isinf(gap + size)
            differs[~finite] = _other_parts(x[~finite], y[~finite])
            return places[differs], gap[differs], size[differs], finite[differs]


def _histogram(values: np.ndarray) -> dict[int, int]:
    """k -> how many numbers are in 2^k to 2^(k + 1); without 0 and infinity."""
    values = values[(values > 0) & np.isfinite(values)]
    powers, counts = np.unique(np.frexp(values)[1] - 1, return_counts=True)
    return dict(zip(powers.tolist(), counts.tolist(), strict=True))


def _sum(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: collections.Counter[int] = collections.Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items()))


@functools.cache
def _numbers(one: np.dtype, other: np.dtype) -> tuple[np.dtype, np.dtype, np.dtype]:
    """The widest dtypes of the kinds of two dtypes, and the one that holds both; object, which is
    Python's integers, where no other holds the integers of both."""
    wide = _widest(one), _widest(other)
    mixed = {*wide} == {np.dtype(np.int64), np.dtype(np.uint64)}
    return *wide, np.dtype(object) if mixed else np.result_type(*wide)


def _widest(dtype: np.dtype) -> np.dtype:
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    if kind_of(dtype) in "iub":
        return np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    return np.dtype(np.float64)


def _integer_gap(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|; of integers of one dtype as uint64, which holds them all."""
    if x.dtype == object:
        return np.abs(x - y)
    return np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)


def _other_parts(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where numbers differ, NaN equal to NaN; the parts of complex ones each from its like."""
    words = x.itemsize // 8
    x, y = (part.view(np.float64).reshape(-1, words) for part in (x, y))
    return ((x != y) & ~(np.isnan(x) & np.isnan(y))).any(axis=1)
