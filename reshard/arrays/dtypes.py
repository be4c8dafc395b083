"""Dtypes: their names, and float64 to those narrower than float32, rounded once.

TensorStore (as most libraries) goes by way of float32 and rounds twice, which differs where the
first rounding lands on a tie of the second. Rounding to odd on the way makes the second one exact:
Boldo and Melquiond, "When double rounding is odd", 2005.
"""

import functools
from typing import Any

import ml_dtypes
import numpy as np

from reshard.errors import ArgumentError


@functools.lru_cache
def name_of(dtype: np.dtype) -> str:
    """The name of a dtype, which numpy puts together each time."""
    return dtype.name


def rounds_twice(source: np.dtype, target: np.dtype) -> bool:
    """Whether a cast through float32 could differ from the nearest value."""
    return source == np.float64 and target.itemsize < 4


# Elements that are rounded at once: what that takes beside the result is within what is charged for
# any box (`reshard.engine.budget.READ_OVERHEAD`), and stays in the cache.
_BLOCK = 1 << 9


def round_once(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 `values` as `dtype`, to nearest even. NaN stays NaN, overflow is as in numpy.

    Takes no memory to speak of beside the values and the result, if the values are contiguous.
    """
    flat = values.reshape(-1)
    rounded = np.empty(flat.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            rounded[block] = _to_odd(flat[block])
    return rounded.reshape(values.shape)


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 values as float32, those in between two of its values as the odd one of the two."""
    single = values.astype(np.float32)
    inexact = np.isfinite(single) & (single != values)
    away = np.abs(single) > np.abs(values)
    toward_zero = np.where(away, np.nextafter(single, np.float32(0)), single)
    odd = (toward_zero.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(inexact, odd, single)


def parse_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype from its name; JAX's own (`bfloat16`, `float8_*`, `int4`) among them."""
    if isinstance(dtype, str) and hasattr(ml_dtypes, dtype):
        dtype = getattr(ml_dtypes, dtype)
    try:
        if dtype is None:
            raise TypeError("numpy takes it for float64")
        return np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(
            f"not a dtype: {dtype!r}", hints=["`bfloat16`, `float16`, `float32`"]
        ) from error


def kind_of(dtype: np.dtype) -> str:
    """The kind of a dtype: of JAX's own as well `f`, `i` or `u`, by their names."""
    named = {"bfloat": "f", "float": "f", "int": "i", "uint": "u"}
    return next((kind for name, kind in named.items() if dtype.name.startswith(name)), dtype.kind)


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is floating-point, JAX's own included."""
    return kind_of(dtype) == "f"
