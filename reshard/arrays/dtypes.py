"""Dtypes: their names, and the casts that TensorStore gets wrong.

From float64 to dtypes narrower than float32, TensorStore, like most libraries, rounds twice: first
to float32. The result is wrong if the first rounding produces a tie of the second. Rounding to odd
first makes it exact: Boldo and Melquiond, "When double rounding is odd", 2005.

From and to `float8_e8m0fnu`, TensorStore 0.1.86 gets nearly every value wrong: 1.0 becomes 5.4e-20.

A cast overflows where a finite number becomes an infinity or NaN, or is above the largest number of
a dtype that saturates, and where an infinity or NaN becomes something else.
"""

import functools
import re
from typing import Any

import ml_dtypes
import numpy as np

from reshard.errors import ArgumentError


@functools.lru_cache
def name_of(dtype: np.dtype) -> str:
    """The name of a dtype, cached: numpy makes it each time."""
    return dtype.name


def is_scale(dtype: np.dtype) -> bool:
    """Whether a dtype holds only powers of two: block scales of quantised weights."""
    return name_of(dtype) == "float8_e8m0fnu"


@functools.lru_cache
def saturates(dtype: np.dtype) -> bool:
    """Whether a floating-point dtype turns what is too large into its largest number, so that an
    overflow leaves no trace: those of four and six bits."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.asarray(np.inf).astype(dtype).astype(np.float32)))


@functools.lru_cache
def is_miscast(source: np.dtype, target: np.dtype) -> bool:
    """Whether TensorStore's cast between two dtypes gets some values wrong, or hides that it
    overflows."""
    twice = source == np.float64 and target.itemsize < 4
    hidden = is_floating(target) and saturates(target)
    return twice or hidden or is_scale(source) or is_scale(target)


@functools.lru_cache
def can_overflow(source: np.dtype, target: np.dtype) -> bool:
    """Whether the cast of some value overflows. Integers are not cast but checked one by one."""
    if source == target or not is_floating(source):
        return False
    largest = float(ml_dtypes.finfo(source).max)
    values = np.array([largest, -largest, np.inf, np.nan, 0.0])
    with np.errstate(all="ignore"):
        values = values.astype(source)
    return lost(values, cast_once(values, target)) is not None


def is_finite(values: np.ndarray) -> bool:
    """Whether all values of a dtype that does not saturate are finite. Where infinities and NaNs
    have the highest bits, it compares bits: that takes a tenth of the time."""
    size = values.dtype.itemsize
    largest = np.array(ml_dtypes.finfo(values.dtype).max, values.dtype)
    first, sign = int(largest.view(f"u{size}")) + 1, 1 << (8 * size - 1)
    if first >= sign:  # there is no sign, or NaN is the negative zero
        return bool(np.isfinite(values).all())
    if values.flags.c_contiguous:  # numpy 2.0 copies parts of an array of several axes
        values = values.reshape(-1)
    positive, negative = values.view(f"i{size}"), values.view(f"u{size}")
    return bool(positive.max(initial=0) < first and negative.max(initial=0) < first + sign)


def lost(values: np.ndarray, made: np.ndarray) -> tuple[int, int] | None:
    """How many elements of a cast of `values` overflow, and the first in row-major order; None if
    there are none."""
    hidden, largest = saturates(made.dtype), float(ml_dtypes.finfo(made.dtype).max)
    if not hidden and is_finite(made):
        return None
    count, first, values, made = 0, 0, values.reshape(-1), made.reshape(-1)
    for start in range(0, made.size, _BLOCK):
        with np.errstate(invalid="ignore"):  # of signalling NaNs
            old, new = (each[start : start + _BLOCK].astype(np.float64) for each in (values, made))
        kept = (old == new) | (np.isnan(old) & np.isnan(new))
        held = np.isfinite(new) & ((np.abs(old) <= largest) | (not hidden))
        gone = ~np.where(np.isfinite(old), held, kept)
        if gone.any():
            first = first if count else start + int(gone.argmax())
            count += int(np.count_nonzero(gone))
    return (count, first) if count else None


# Elements that are cast at once. Their memory is below the charge for any box
# (`reshard.engine.memory.READ_OVERHEAD`), and stays in the cache.
_BLOCK = 1 << 9


def cast_once(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` as `dtype`, rounded once as `ml_dtypes` rounds. NaN stays NaN, and overflow is as in
    numpy. Contiguous values are not copied."""
    flat = values.reshape(-1)
    made = np.empty(flat.shape, dtype)
    direct, scale = dtype == np.float32 or not is_floating(made.dtype), is_scale(made.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            made[block] = flat[block] if direct else _to_odd(flat[block], scale)
    return made.reshape(values.shape)


def _to_odd(values: np.ndarray, scale: bool) -> np.ndarray:
    """Values as float32. A float64 between two float32 values becomes the odd one of the two."""
    single = values.astype(np.float32)
    if values.dtype == np.float64:
        bits, inexact = single.view(np.uint32), np.isfinite(single) & (single != values)
        bits -= inexact & (np.abs(single) > np.abs(values))  # toward zero
        bits |= inexact
    if scale:  # ml_dtypes rounds these up, although 2**-127 is nearer
        single[(values > 0) & (values < 1.5 * 2.0**-127)] = 2.0**-127
    return single


def parse_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype in native byte order, from its name, including JAX's own (`bfloat16`,
    `float8_*`, `int4`)."""
    if isinstance(dtype, str):
        # Short names: `bf16`, `fp16`, `f32`, `fp8_e4m3fn`.
        name = re.sub(r"^(b?)(?:f|(?<!b)fp)(?=\d\d$|\d_)", r"\1float", dtype)
        dtype = getattr(ml_dtypes, name, name)
    try:
        if dtype is None or str(dtype) in ("f4", "f8"):
            raise TypeError("this name is ambiguous: write `float32` or `float64`")
        return np.dtype(dtype).newbyteorder("=")
    except TypeError as error:
        raise ArgumentError(
            f"not a dtype: {dtype!r}", hints=["`bfloat16`, `float16`, `float32`"]
        ) from error


def kind_of(dtype: np.dtype) -> str:
    """The kind of a dtype, for JAX's own dtypes by their names: `f`, `i` or `u`."""
    named = {"bfloat": "f", "float": "f", "int": "i", "uint": "u"}
    return next((kind for name, kind in named.items() if dtype.name.startswith(name)), dtype.kind)


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is floating-point, JAX's own included."""
    return kind_of(dtype) == "f"
