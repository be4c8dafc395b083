"""float64 to dtypes narrower than float32, rounded once.

TensorStore (as most libraries) goes by way of float32 and rounds twice, which differs where the
first rounding lands on a tie of the second. Rounding to odd on the way makes the second one exact:
Boldo and Melquiond, "When double rounding is odd", 2005.
"""

import numpy as np


def rounds_twice(source: np.dtype, target: np.dtype) -> bool:
    """Whether a cast through float32 could differ from the nearest value."""
    return source == np.float64 and target.itemsize < 4


def round_once(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 `values` as `dtype`, to nearest even. NaN stays NaN, overflow is as in numpy."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        inexact = np.isfinite(single) & (single != values)
        toward_zero = np.where(
            np.abs(single) > np.abs(values), np.nextafter(single, np.float32(0)), single
        )
        odd = (toward_zero.view(np.uint32) | np.uint32(1)).view(np.float32)
        return np.where(inexact, odd, single).astype(dtype)
