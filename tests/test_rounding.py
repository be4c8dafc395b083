"""Casts between float dtypes: every pair, by exact arithmetic, what a dtype cannot hold, several
casts of one array, and the memory that casts outside TensorStore take."""

import functools
import math
import re
import shlex
import tracemalloc
from fractions import Fraction

import jax
import jax.numpy as jnp
import layouts
import ml_dtypes
import numpy as np
import pytest
from in_process import refused, shown
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from releases import older

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
    """Random values of a dtype of up to 16 bits, or all if these are few. Of a wider one: values of
    the narrower ones, the middles between two neighbours of these, what is next to the middles, and
    random bits. Infinities and NaNs are among them."""
    rng = np.random.default_rng(0)
    if dtype.itemsize <= 2:
        bits = 4 if dtype.name == "float4_e2m1fn" else 8 * dtype.itemsize
        codes = np.arange(1 << bits) if bits <= 8 else rng.permutation(1 << bits)[: 1 << 12]
        values = codes.astype(f"uint{8 * dtype.itemsize}").view(dtype)
        special = [] if bits <= 8 else [0.0, -0.0, np.inf, -np.inf, np.nan]
        return np.concatenate([values, np.array(special, dtype)])
    found = [layouts.random((1000,), dtype), np.array([np.inf, -np.inf, np.nan, -0.0], dtype)]
    for narrow in (each for each in FLOATS if each.itemsize < dtype.itemsize):
        values = layouts.random((1000,), narrow) if narrow.itemsize > 2 else cast_cases(narrow)
        values = np.unique(values.astype("float64")).astype(dtype)
        values = values[np.isfinite(values)]
        middles = values[1:] / 2 + values[:-1] / 2
        found += [values, middles, np.nextafter(middles, 0), np.nextafter(middles, 2 * middles)]
        codes = np.array(values[values != 0], narrow).view(f"uint{8 * narrow.itemsize}") + 1
        following = codes.view(narrow).astype(dtype)  # of neighbours in the narrow dtype
        ties = values[values != 0] / 2 + following / 2
        found += [ties, np.nextafter(ties, 0), np.nextafter(ties, 2 * ties)]
    return np.concatenate(found)


def nearest(value, dtype):
    """The nearest number of a dtype, of two the one with the even significand, by exact arithmetic;
    None if the dtype cannot hold the value."""
    if not math.isfinite(value):
        with np.errstate(all="ignore"):
            held = float(np.array(value).astype(dtype))
        return held if held == value or (math.isnan(held) and math.isnan(value)) else None
    if dtype.name == "float8_e8m0fnu" and value <= 0:
        return None
    info, exact = ml_dtypes.finfo(dtype), abs(Fraction(value))
    power = max(math.frexp(value)[1] - 1, info.minexp)
    unit = Fraction(2) ** (power - info.nmant)
    found = round(exact / unit) * unit
    if dtype.name == "float8_e8m0fnu":
        found = max(found, Fraction(float(info.smallest_normal)))
    over = exact if dtype.name == "float4_e2m1fn" else found
    return None if over > Fraction(float(info.max)) else math.copysign(float(found), value)


@functools.cache
def rounded(old, new):
    """The cases of a dtype, what another dtype makes of them, and where it cannot hold them."""
    values = cast_cases(old)
    found = [nearest(value, new) for value in values.astype("float64").tolist()]
    lost = np.array([value is None for value in found])
    made = np.array([1.0 if value is None else value for value in found])
    return values, made.astype(new), lost


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A checkpoint with every value for every pair of float dtypes, and the values after a cast."""
    path = tmp_path_factory.mktemp("pairs") / "saved"
    saved: dict[str, dict[str, np.ndarray]] = {new.name: {} for new in FLOATS}
    expected: dict[str, dict[str, np.ndarray]] = {new.name: {} for new in FLOATS}
    for old in FLOATS:
        for new in FLOATS:
            if new != old:
                values, made, lost = rounded(old, new)
                size = -(-np.count_nonzero(~lost) // 16) * 16  # for the devices of a mesh
                saved[new.name][old.name] = np.resize(values[~lost], size)
                expected[new.name][old.name] = np.resize(made[~lost], size)
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


# What a dtype cannot hold.


def test_what_each_dtype_cannot_hold(tmp_path):
    """Every number that would become infinite, NaN or the largest, and every infinity and NaN that
    would become something else, in every pair."""
    lost = {}
    for old in FLOATS:
        for new in FLOATS:
            values, _, wrong = rounded(old, new)
            if new != old and wrong.any():
                order = np.random.default_rng(0).permutation(len(values))
                values, wrong = np.resize(values[order], (1, len(values))), wrong[order]
                lost.setdefault(new.name, {})[old.name] = values, wrong
    saved = jax.tree.map(lambda x: x[0], lost, is_leaf=lambda x: isinstance(x, tuple))
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", saved))
    told, expected = {}, {}
    for new, leaves in lost.items():
        for old, (values, wrong) in leaves.items():
            path, (first, *_) = f"{new}/{old}", np.flatnonzero(wrong)
            with np.errstate(all="ignore"):
                became = values[0, first].astype("float32").astype(jnp.dtype(new))
            count = np.count_nonzero(wrong)
            expected[path] = (
                f"{path}: {new} cannot hold at least {count} of its elements; "
                f"the first, at [0, {first}], is {values[0, first]} and would become {became}\n\n"
                f'hint: reshard.cast(ckpt, {{"**": "{new}", "{path}": "{old}"}})'
            )
            handle = reshard.cast(ckpt, new, path)[path]
            told[path] = layouts.refused(reshard.TreeMismatchError, handle.read)
    assert told == expected
    names = {each.name for each in FLOATS}
    if older("tensorstore", "0.1.86"):  # without float8_e8m0fnu, all others hold these
        names.discard("float4_e2m1fn")
    assert {old for leaves in lost.values() for old in leaves} == names


MASK = np.finfo("float32").min


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A checkpoint of several chunks: one array with numbers that no narrower dtype holds, others
    with infinities and NaNs; and the start of what is said of the former."""
    on = layouts.mesh((2, 4))
    rng = np.random.default_rng(0)
    tree = {name: rng.standard_normal((16, 24)).astype("f4") for name in ("mask", "plain", "nan")}
    tree["mask"][13, 20:] = MASK
    tree["nan"][3] = -np.inf
    tree["nan"][:, 5] = np.nan
    tree["count"] = np.arange(16, dtype="i4")
    arrays = {key: layouts.put(x, *["data", "model"][: x.ndim]) for key, x in tree.items()}
    path = layouts.save_pytree(tmp_path_factory.mktemp("masked") / "in", arrays)
    layouts.save_pytree(path.parent / "halves", half(tree, "float16"))
    first = f"the first, at [13, 20], is {MASK} and would become -inf"
    assert on.size == 8
    return path, tree, f"mask: float16 cannot hold at least 4 of its elements; {first}"


def half(tree, dtype, *names):
    """The floats in another dtype, without the mask unless it is named."""
    with np.errstate(all="ignore"):
        return {
            key: x.astype(dtype) if x.dtype == "f4" and (key != "mask" or key in names) else x
            for key, x in tree.items()
        }


def on_mesh(tree):
    on = NamedSharding(layouts.mesh((1, 8)), P("model"))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), tree)


READERS = {
    "save": lambda path, tree, ckpt: reshard.save(ckpt, path.parent / "out"),
    "workers": lambda path, tree, ckpt: reshard.save(ckpt, path.parent / "out", workers=2),
    "files": lambda path, tree, ckpt: reshard.save(ckpt, path.parent / "out", ocdbt=False),
    "export": lambda path, tree, ckpt: reshard.export(
        reshard.select(ckpt, drop="count"), path.parent / "out"
    ),
    "stacked": lambda path, tree, ckpt: reshard.save(
        reshard.unstack(ckpt, "mask", into="mask_{}"), path.parent / "out"
    ),
    "read": lambda path, tree, ckpt: ckpt["mask"].read((slice(12, 16), slice(19, 23))),
    "digest": lambda path, tree, ckpt: reshard.digest(ckpt),
    "a mesh": lambda path, tree, ckpt: reshard.restore(ckpt, layouts.mesh((1, 8))),
    "the host": lambda path, tree, ckpt: reshard.restore(
        path, half(tree, "float16", "mask"), cast="lossy"
    ),
    "shards": lambda path, tree, ckpt: reshard.restore(
        path, on_mesh(half(tree, "float16", "mask")), cast="lossy"
    ),
    "little memory": lambda path, tree, ckpt: reshard.restore(
        path, on_mesh(half(tree, "float16", "mask")), cast="lossy", max_memory="24KiB"
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_what_a_dtype_cannot_hold(masked, name):
    path, tree, told = masked
    ckpt = reshard.cast(reshard.open(path), "float16")
    error = layouts.raised(reshard.ReshardError, READERS[name], path, tree, ckpt)
    text = str(error)
    if name == "stacked":
        told = told.replace("mask:", "mask_13:").replace("[13, 20]", "[20]")
    if name == "read":
        told = told.replace("4 of", "3 of")
    # Of the elements in one box, which may be a chunk or a part of a shard.
    said = re.sub(r"at least \d+", "", told)
    assert said in re.sub(r"at least \d+", "", text)
    (count,) = re.findall(r"at least (\d+) of its elements", text)
    assert 1 <= int(count) <= 4
    assert not (path.parent / "out").exists()
    if name == "digest":
        return
    assert type(error) is reshard.TreeMismatchError
    hint = 'reshard.cast(ckpt, {"**": "float16", "mask": "float32"})'
    restores = name in ("the host", "shards", "little memory")
    assert error.hints == ("give this leaf its saved dtype in the target" if restores else hint,)


def test_the_hints_of_what_a_dtype_cannot_hold_work(masked, tmp_path):
    path, tree, told = masked
    ckpt = reshard.open(path)
    error = layouts.raised(
        reshard.TreeMismatchError, reshard.save, reshard.cast(ckpt, "float16"), tmp_path / "no"
    )
    expected = half(tree, "float16")
    reshard.save(eval(error.hints[0], {"reshard": reshard, "ckpt": ckpt}), tmp_path / "python")
    job = ["ckpt", path, tmp_path / "flags", "--to", "1x8", "--dtype", "float16"]
    said = refused(tmp_path, *job)
    assert said == f"Error: {told}\n\nhint: --dtype mask=float32\n"
    shown(tmp_path, *job, *shlex.split(said.rpartition("hint: ")[2]), "--quiet")
    # Of leaves that a map has joined, the leaves before the map.
    (tmp_path / "map.toml").write_text(
        "[[rule]]\nfrom = '^(mask|nan)$'\nstack = { axis = 0, by = 1, order = ['nan', 'mask'] }\n"
        "to = 'both'\n[[rule]]\nfrom = '^(plain|count)$'\nto = '\\1'\n"
    )
    job = ["ckpt", path, tmp_path / "joined", "--dtype", "float16", "--map", "map.toml"]
    said = refused(tmp_path, *job)
    told = told.replace("mask:", "both:").replace("[13", "[1, 13")
    assert said == f"Error: {told}\n\nhint: --dtype nan=float32 --dtype mask=float32\n"
    shown(tmp_path, *job, *shlex.split(said.rpartition("hint: ")[2]), "--quiet")
    joined = np.stack([tree["nan"], tree["mask"]])
    for name, both in (("python", False), ("flags", False), ("joined", True)):
        got = layouts.load_pytree(tmp_path / name)
        rest = {key: x for key, x in expected.items() if not (both and key in ("nan", "mask"))}
        assert got.keys() == rest.keys() | ({"both"} if both else set())
        for key, leaf in (rest | ({"both": joined} if both else {})).items():
            layouts.assert_equal_or_nan(got[key], leaf)
    target = half(tree, "float16")
    restored = reshard.restore(path, target, cast="lossy")
    jax.tree.map(layouts.assert_equal_or_nan, restored, target)


def test_a_scaled_array_that_overflows_after_its_cast(tmp_path):
    layouts.save_pytree(tmp_path / "in", {"a": np.float32([2, 70000]), "b": np.float32([4, 8])})
    map_file = tmp_path / "map.toml"
    rule = "[[rule]]\nfrom = '^(a|b)$'\nto = '\\1'\nscale = "
    map_file.write_text(rule + "4")
    ckpt = reshard.cast(reshard.open(tmp_path / "in"), "float16")
    said = layouts.refused(
        reshard.TreeMismatchError, reshard.save, reshard.remap(ckpt, map_file), tmp_path / "out"
    )
    assert said == (
        "a: float16 cannot hold at least 1 of its elements; the first, at [1], is 280000.0 and "
        'would become inf\n\nhint: reshard.cast(ckpt, {"**": "float16", "a": "float32"})'
    )
    map_file.write_text(rule + "{ by = 0.5, rounds = true }")  # the result is rounded
    reshard.save(reshard.remap(ckpt, map_file), tmp_path / "out")
    got = layouts.load_pytree(tmp_path / "out")
    assert got["a"].tolist() == [1, 35008] and got["a"].dtype == np.float16


@pytest.mark.parametrize("workers", [None, 2])
def test_diff_and_verify_report_what_a_dtype_cannot_hold(masked, workers):
    path, _, told = masked
    cast, halves = reshard.cast(reshard.open(path), "float16"), path.parent / "halves"
    other = reshard.select(reshard.open(halves), drop="mask")
    assert reshard.diff(cast, other, values=True, drop="mask", workers=workers).equal
    moved = reshard.diff(cast, reshard.rename(cast, {"mask": "new"}), values=True, workers=workers)
    expected = [("removed", ("mask",)), ("added", ("new",))]
    assert [(each.what, each.path) for each in moved.differences] == expected
    found = reshard.diff(cast, cast, values=True, workers=workers)
    assert [(each.what, each.path) for each in found.differences] == [("invalid", ("mask",))]
    (one,) = found.differences
    assert one.texts() == (told, told) and found.document()["differences"][0]["a"] == told
    assert (found.equal, found.compared, found.not_compared) == (False, 3, 1)
    assert f"invalid  mask  A: {told}  B: {told}\n1 difference: 1 invalid\n" in found.report()
    checked = reshard.verify(cast, workers=workers)
    assert checked.problems == (told,) and len(checked.digests) == 3


# Several casts.


def test_each_cast_rounds(tmp_path):
    """Casts of stored, stacked and renamed arrays, in every reader and on every route."""
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal((6, 40)) for name in ("a_0", "a_1", "b")}
    values["b"][0, 0] = 1 + 2.0**-8 + 2.0**-30
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "in", values))
    chains = [("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "float16", "float64")]
    for number, chain in enumerate((*chains, ("float8_e5m2", "float8_e4m3fn", "bfloat16"))):
        made, expected = ckpt, {}
        for place, dtype in enumerate(chain):
            if place == 1:
                made = reshard.rename(reshard.stack(made, "a_{}", into="a"), {"^b$": "c"})
            made = reshard.cast(made, dtype)
        for key, x in {"a": np.stack([values["a_0"], values["a_1"]]), "c": values["b"]}.items():
            expected[key] = functools.reduce(lambda x, d: cast_exactly(x, jnp.dtype(d)), chain, x)
        out = tmp_path / f"out{number}"
        reshard.save(made, out, workers=number % 2 + 1, max_memory="1MiB", verify=True)
        for got in (
            layouts.load_pytree(out),
            {path[0]: made[path].read() for path in made},
            reshard.restore(made, jax.tree.map(np.zeros_like, expected)),
        ):
            jax.tree.map(layouts.assert_equal_or_nan, dict(got), expected)
        assert reshard.verify(out, against=made).ok and reshard.diff(made, out, values=True).equal
        assert (
            made["c"].read((slice(2, 5), slice(7, 9))).tolist() == expected["c"][2:5, 7:9].tolist()
        )
    twice, once = (reshard.cast(reshard.cast(ckpt, d), "bfloat16") for d in ("float32", "float64"))
    assert (float(twice["b"].read()[0, 0]), float(once["b"].read()[0, 0])) == (1, 1 + 2.0**-7)
    assert reshard.cast(twice, "bfloat16")["b"] == twice["b"]  # which rounds nothing
    several = reshard.cast(ckpt, {"**": "float32", "b": "bfloat16", "a_*": "bfloat16"})
    assert {x.dtype.name for x in several.arrays} == {"bfloat16"}
    assert float(several["b"].read()[0, 0]) == 1 + 2.0**-7
    text = "where=... is for one dtype: several have globs of their own"
    several = {"**": "float32"}
    assert layouts.refused(reshard.ArgumentError, reshard.cast, ckpt, several, "b") == text


def cast_exactly(values, dtype):
    flat = values.astype("float64").reshape(-1).tolist()
    return np.array([nearest(x, dtype) for x in flat]).reshape(values.shape).astype(dtype)


def test_the_first_of_two_casts_overflows(masked):
    path, _, told = masked
    ckpt = reshard.cast(reshard.cast(reshard.open(path), "float16"), "float32")
    error = layouts.raised(reshard.TreeMismatchError, ckpt["mask"].read)
    assert error.summary == told
    assert error.hints == ('reshard.cast(ckpt, {"**": "float16", "mask": "float32"})',)


def test_the_last_dtype_that_names_a_leaf_decides(tmp_path):
    value = 1 + 2.0**-8 + 2.0**-30
    tree = {"a": np.full(3, value), "b": np.full(3, value), "c": np.full(3, value)}
    layouts.save_pytree(tmp_path / "in", tree)
    words = ("ckpt", "in", "out", "--quiet", "--dtype")
    shown(
        tmp_path,
        *words,
        "float32",
        "--dtype",
        "b=bfloat16",
        "--dtype",
        "?=float16",
        "--dtype",
        "c=bfloat16",
    )
    got = layouts.load_pytree(tmp_path / "out")
    assert {key: (x.dtype.name, float(x[0])) for key, x in got.items()} == {
        "a": ("float16", 1 + 2.0**-8),
        "b": ("float16", 1 + 2.0**-8),
        "c": ("bfloat16", 1 + 2.0**-7),
    }
    for first, second, glob in (("float32", "**=float16", "**"), ("b=float32", "b=float32", "b")):
        said = refused(tmp_path, "ckpt", "in", "no", "--dtype", first, "--dtype", second)
        dtypes = [text.rpartition("=")[2] for text in (first, second)]
        assert f"two dtypes for `{glob}`: `{dtypes[0]}` and `{dtypes[1]}`" in said


# Memory.


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

        def made(values=values, box=box):
            return handle.rounded(np.array(values), box)

        most, _ = peak(made)
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
