"""Casts between float dtypes: every pair, and the memory that casts outside TensorStore take."""

import tracemalloc

import jax
import jax.numpy as jnp
import layouts
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from reshard.arrays.dtypes import cast_once
from reshard.engine.memory import READ_OVERHEAD

TARGETS = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]
FLOATS = [jnp.dtype(name) for name in ("float64", *layouts.DTYPES) if "float" in name]
# Casts outside TensorStore.
OWN = [("float64", target.name) for target in TARGETS]
if "float8_e8m0fnu" in layouts.DTYPES:
    OWN += [("float8_e8m0fnu", "bfloat16"), ("float8_e8m0fnu", "float64")]
    OWN += [("float32", "float8_e8m0fnu")]


def cast_cases(dtype):
    """All values of a dtype of up to 16 bits. Of a wider one: values of the narrower ones, the
    middles between two neighbours of these, what is next to the middles, and random bits."""
    if dtype.itemsize <= 2:
        bits = 4 if dtype.name == "float4_e2m1fn" else 8 * dtype.itemsize
        return np.arange(1 << bits).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    found = [layouts.random((1000,), dtype), np.array([np.inf, -np.inf, np.nan, -0.0], dtype)]
    for narrow in FLOATS:
        if narrow.itemsize <= 2:
            values = cast_cases(narrow).astype("float32").astype(dtype)
            values = np.unique(values[np.isfinite(values)])[:: 5 ** (narrow.itemsize - 1)]
            middles = values[1:] / 2 + values[:-1] / 2
            found += [values, middles, np.nextafter(middles, 0), np.nextafter(middles, 2 * middles)]
    return np.concatenate(found)


def expected_cast(values, dtype):
    """What ml_dtypes makes of values. It takes float64 by way of float32: to a narrower dtype these
    are float32 already, but for what is next to a middle, which is moved away from it."""
    if values.dtype == np.float64 and dtype.itemsize < 4:
        single = values.astype("float32")
        away = np.where(values > single, np.inf, -np.inf).astype("float32")
        moved = np.isfinite(single) & (single != values)
        values = np.where(moved, np.nextafter(single, away), single)
    return values.astype("float64" if values.dtype == "float64" else "float32").astype(dtype)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A checkpoint with every value for every pair of float dtypes, and the values after a cast."""
    path = tmp_path_factory.mktemp("pairs") / "saved"
    saved: dict[str, dict[str, np.ndarray]] = {new.name: {} for new in FLOATS}
    expected: dict[str, dict[str, np.ndarray]] = {new.name: {} for new in FLOATS}
    with np.errstate(all="ignore"):
        for old in FLOATS:
            values = cast_cases(old)
            values = np.resize(values, -(-len(values) // 16) * 16)  # for the devices of a mesh
            for new in FLOATS:
                if new != old:
                    saved[new.name][old.name] = values
                    expected[new.name][old.name] = expected_cast(values, new)
    return layouts.save_pytree(path, saved), expected


def assert_cast(got, expected):
    """Every value is right, but for the payloads of NaNs; all wrong pairs are named together."""
    wrong = []
    for new, leaves in expected.items():
        for old, leaf in leaves.items():
            try:
                layouts.assert_equal_or_nan(got[new][old], leaf)
            except AssertionError:
                wrong.append(f"{old} to {new}")
    assert wrong == []


def peak(job):
    """The most bytes of numpy's that are held while a job runs, and its result."""
    tracemalloc.start()
    try:
        result = job()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_every_pair_of_dtypes_when_a_checkpoint_is_written(pairs, tmp_path):
    path, expected = pairs
    ckpt = reshard.open(path)
    for new in expected:
        ckpt = reshard.cast(ckpt, new, f"{new}/*")
    reshard.save(ckpt, tmp_path / "out", verify=True)
    assert_cast(layouts.load_pytree(tmp_path / "out"), expected)


@pytest.mark.parametrize("memory", ["8MiB", None])
def test_every_pair_of_dtypes_when_a_target_is_restored(pairs, memory):
    """Arrays of the host and, as far as JAX has the dtype by default, on a mesh."""
    path, expected = pairs
    on = NamedSharding(layouts.mesh((1, 8)), P("model"))
    target = jax.tree.map(np.zeros_like, expected)
    assert_cast(reshard.restore(path, target, cast="lossy", max_memory=memory), expected)
    expected = {new: leaves for new, leaves in expected.items() if new != "float64"}
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), expected)
    options = {"cast": "lossy", "unexpected": "ignore", "max_memory": memory}
    assert_cast(reshard.restore(path, target, **options), expected)


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
    values = np.asarray(np.random.default_rng(0).uniform(1, 400, shape))
    most, rounded = peak(lambda: cast_once(values, dtype))
    np.testing.assert_array_equal(rounded, once(values, dtype), strict=True)
    assert most - rounded.nbytes <= READ_OVERHEAD
    np.testing.assert_array_equal(cast_once(values.T, dtype), rounded.T, strict=True)


@pytest.mark.parametrize("memory", ["200KiB", "1GiB"], ids=["again", "one pass"])
@pytest.mark.parametrize(("old", "new"), OWN)
def test_what_is_charged_for_a_box(old, new, memory, tmp_path):
    saved = np.random.default_rng(0).random((32, 256)).astype(jnp.dtype(old))
    layouts.save_pytree(tmp_path / "saved", {"a": saved})
    ckpt = reshard.to_mesh(
        reshard.cast(reshard.open(tmp_path / "saved"), new, "a"),
        "data=1,model=32",
        [("a", (None, "model"))],
    )
    plan = reshard.plan(ckpt, max_memory=memory, link=False)
    (array,), (handle,) = plan.arrays, ckpt.arrays
    assert plan.problems == ()
    assert (handle.read_dtype, handle.dtype) == (saved.dtype, jnp.dtype(new))
    for box in array.boxes():
        values = handle.stored_view()[box].read().result()

        def rounded(values=values):
            return handle.rounded(np.array(values))

        most, _ = peak(rounded)
        assert array.consumer_bytes(values.size) + READ_OVERHEAD >= most
    assert plan.peak_memory <= reshard.units.parse_bytes(memory)


@pytest.mark.parametrize(("old", "new"), OWN)
def test_what_a_restore_holds_beside_its_result(old, new, tmp_path):
    saved = np.random.default_rng(0).random(1 << 18).astype(jnp.dtype(old))
    path = layouts.save_pytree(tmp_path / "saved", {"a": saved})
    target = {"a": np.zeros(saved.shape, jnp.dtype(new))}
    with pytest.raises(reshard.MemoryLimitError) as caught:
        reshard.restore(path, target, cast="lossy", max_memory="1KiB")
    least = caught.value.least
    most, got = peak(lambda: reshard.restore(path, target, cast="lossy", max_memory=least))
    assert most - got["a"].nbytes <= least
