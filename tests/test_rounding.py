"""Rounding float64 to 8 and 16 bits: the memory that it takes, and what is charged for it."""

import tracemalloc

import layouts
import ml_dtypes
import numpy as np
import pytest

import reshard
from reshard.arrays.dtypes import round_once
from reshard.engine.budget import READ_OVERHEAD

TARGETS = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]


def peak(job):
    """The most bytes of numpy's that are held while a job runs, and its result."""
    tracemalloc.start()
    try:
        result = job()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def once(values, dtype):
    """Of the two nearest values of a dtype the nearer one, by exact arithmetic in float64."""
    unsigned = f"uint{8 * dtype.itemsize}"
    found = values.astype(np.float32).astype(dtype).view(unsigned)
    for other in (found - 1, found + 1):
        distance, best = (abs(x.view(dtype).astype(float) - values) for x in (other, found))
        better = (distance < best) | ((distance == best) & (other % 2 == 0))
        found = np.where(better, other, found).astype(unsigned)
    return found.view(dtype)


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7, 300), (300, 1000), (2, 3, 100_001)], ids=str)
def test_what_rounding_once_takes_beside_its_result(dtype, shape):
    """It is the same of what is not contiguous."""
    values = np.asarray(np.random.default_rng(0).uniform(1, 400, shape))
    most, rounded = peak(lambda: round_once(values, dtype))
    np.testing.assert_array_equal(rounded, once(values, dtype), strict=True)
    assert most - rounded.nbytes <= READ_OVERHEAD
    np.testing.assert_array_equal(round_once(values.T, dtype), rounded.T, strict=True)


@pytest.mark.parametrize("memory", ["200KiB", "1GiB"], ids=["serial", "one pass"])
@pytest.mark.parametrize("dtype", TARGETS, ids=str)
def test_what_is_charged_for_a_box(dtype, memory, tmp_path):
    """Its values as they are read and as they are rounded are in memory at once."""
    layouts.save_pytree(tmp_path / "saved", {"a": np.random.default_rng(0).random((32, 256))})
    ckpt = reshard.to_mesh(
        reshard.cast(reshard.open(tmp_path / "saved"), dtype),
        "data=1,model=32",
        [("a", (None, "model"))],
    )
    plan = reshard.plan(ckpt, max_memory=memory, link=False)
    (array,), (handle,) = plan.arrays, ckpt.arrays
    assert plan.problems == ()
    for box in array.boxes():
        values = handle.stored_view()[box].read().result()

        def rounded(values=values):
            return handle.rounded(np.array(values))

        most, _ = peak(rounded)
        assert array.layout.held(values.size) + READ_OVERHEAD >= most
    assert plan.peak_memory <= reshard.units.parse_bytes(memory)
