"""`diff`: every kind of difference, contents against numpy, and the command."""

import cmath
import dataclasses
import functools
import importlib
import itertools
import json
import math
import shutil

import in_process
import jax
import jax.numpy as jnp
import layouts
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from in_process import refused
from layouts import save_pytree as save
from sampling import examples

import reshard
from reshard.arrays.digests import digest_of
from reshard.report.facts import page_of
from reshard.verify import comparison
from reshard.verify.digest_record import FILE, ArrayRecord, Record
from reshard.verify.elementwise import ElementComparison

DTYPES = (*layouts.DTYPES, "float64", "int64", "uint64", "complex128", "uint4")
SPECIAL = (0.0, -0.0, 1.0, math.nan, math.inf, -math.inf)


def record(path, tree):
    arrays = {k: ArrayRecord(x.dtype.name, x.shape, digest_of(x)) for k, x in tree.items()}
    (path / FILE).write_text(json.dumps(Record(arrays, {}, {}, {}).document()))


@pytest.fixture
def two(tmp_path):
    """Saves two trees, A and B, and gives their paths."""
    return lambda *trees, **how: [
        save(tmp_path / name, tree, **how) for name, tree in zip("ab", trees, strict=True)
    ]


@pytest.fixture
def taken(monkeypatch):
    """Collects the first keys of the arrays that are read."""
    names, read = [], comparison.read_values

    def counted(groups, *arguments):
        names.extend(handle.path[0] for group in groups for handle in group)
        return read(groups, *arguments)

    for name in ("comparison", "values"):
        module = importlib.import_module(f"reshard.verify.{name}")
        monkeypatch.setattr(module, "read_values", counted)
    return names


def told(diff, *lines):
    """The report of a difference that ends with these lines."""
    return "\n".join([f"A: {diff.a}", f"B: {diff.b}", *lines])


HINT = "hint: values=True compares contents, and finds moved leaves"


def found(diff, *what):
    """The differences of some kinds, without how many elements differ."""
    return [(d.what, d.path, d.a, d.b) for d in diff.of(*what)]


# Layouts, which are no difference unless they are asked for.


def put(sizes, *spec):
    return layouts.put(np.zeros((8, 16), "f4"), *spec, sizes=sizes)


def test_layouts_are_compared_on_request(tmp_path):
    def tree(sizes, **others):
        kernel = put(sizes, "data", "model")
        return {"kernel": kernel, "trailing": put(sizes), "same": np.zeros(3, "f4")} | others

    a = save(tmp_path / "a", tree((2, 4), step=3, host=np.zeros(3)))
    other = tree((1, 8), step=np.int64(3), host=jnp.zeros(3))
    b = save(tmp_path / "b", other, use_zarr3=True, use_ocdbt=False)
    diff = reshard.diff(a, b, drop="host")
    assert (diff.equal, diff.differences, diff.compared) == (True, (), 4)
    diff = reshard.diff(a, b, layout=True, values=False, drop=["host", "step"])
    assert diff.report() == told(
        diff,
        "format            .         A: OCDBT, zarr2  B: plain files, zarr3",
        "sharding, chunks  kernel    A: P('data', 'model') on data=2,model=4, [4,4]  "
        "B: P('data', 'model') on data=1,model=8, [8,2]",
        "sharding          trailing  A: P() on data=2,model=4  B: P() on data=1,model=8",
        "4 differences: 1 format, 2 sharding, 1 chunks",
        "no arrays compared by recorded digests, 3 not compared",
        HINT,
    )
    assert found(reshard.diff(a, b, layout=True, select="host"), "sharding", "dtype") == [
        ("dtype", ("host",), "float64", "float32"),
        ("sharding", ("host",), "numpy", f"on {jax.devices()[0]}"),
    ]
    # Entries of a spec that split nothing are no difference.
    c = save(tmp_path / "c", {"w": put((2, 4), "data")})
    d = save(tmp_path / "d", {"w": put((2, 4), "data", None)})
    assert reshard.diff(c, d, layout=True).differences == ()


# Trees.


def test_every_kind_of_difference_between_trees(two):
    ones = np.ones((2, 3), "f4")
    same = {"same": ones, "text": "same", "none": None, "empty": {"dict": {}, "list": []}}
    a = {
        "shape": ones,
        "dtype": ones,
        "both": ones,
        "list": [ones, ones],
        "key": jax.random.key(0),
        "impl": jax.random.key(0),
        "kind": {"array": ones, "string": "text", "none": None, "dict": {}, "list": []},
        "string": 'größe "1"',
        "removed": {"array": ones[:1], "string": "x" * 99, "empty": {}, "a/b": 1},
    }
    b = {
        "shape": ones[:1],
        "dtype": ones.astype("f8"),
        "both": ones[:1].astype("i4"),
        "list": {"0": ones, "1": ones},
        "key": np.zeros(2, "u4"),
        "impl": jax.random.key(0, impl="rbg"),
        "kind": {"array": "text", "string": None, "none": ones, "dict": [], "list": ()},
        "string": "größe 1",
        "added": {"array": jnp.ones((4,), "bfloat16"), "key": jax.random.key(1), "none": None},
    }
    a, b = two(same | a, same | b)
    rows = [
        "shape, dtype  both            A: [2,3], float32  B: [1,3], int32",
        "dtype         dtype           A: float32  B: float64",
        "key, shape    impl            A: threefry2x32, [2]  B: rbg, [4]",
        "key           key             A: threefry2x32  B: no key",
        "kind          kind/array      A: float32[2,3]  B: 'text'",
        "kind          kind/dict       A: {}  B: []",
        "kind          kind/list       A: []  B: ()",
        "kind          kind/none       A: None  B: float32[2,3]",
        "kind          kind/string     A: 'text'  B: None",
        "position      list/0          A: list/[0]  B: list/0",
        "position      list/1          A: list/[1]  B: list/1",
        'removed       removed/"a/b"   A: int64[]',
        "removed       removed/array   A: float32[1,3]",
        "removed       removed/empty   A: {}",
        f"removed       removed/string  A: '{'x' * 59}...",
        "shape         shape           A: [2,3]  B: [1,3]",
        "string        string          A: 'größe \"1\"'  B: 'größe 1'",
        "added         added/array     B: bfloat16[4]",
        "added         added/key       B: key<threefry2x32> uint32[2]",
        "added         added/none      B: None",
    ]
    counts = "3 shape, 2 dtype, 2 key, 5 kind, 2 position, 4 removed, 1 string, 3 added"
    counts = f"22 differences: {counts}"
    unknown = ("no arrays compared by recorded digests, 4 not compared", HINT)
    diff = reshard.diff(a, b, values=False)
    assert diff.report() == told(diff, *rows, counts, *unknown)
    known = "5 arrays compared: bit for bit, as numbers where dtypes differ"
    for values in (None, True):
        assert reshard.diff(a, b, values=values).report() == told(diff, *rows, counts, known)
    assert diff.report(2) == told(
        diff,
        "shape, dtype  both   A: [2,3], float32  B: [1,3], int32",
        "dtype         dtype  A: float32  B: float64",
        "... and 18 more leaves",
        counts,
        *unknown,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        diff.differences = ()
    assert (diff.a, diff.b, diff.equal) == (str(a), str(b), False)
    assert reshard.diff(a, a, values=True).equal
    # Documents have the whole text, and the keys.
    entries = {x.pop("path"): [*x.values()] for x in diff.document()["differences"]}
    assert entries["removed/string"] == ["removed", ["removed", "string"], f"'{'x' * 99}'", None]
    assert entries["list/1"] == ["position", ["list", 1], "list/[1]", "list/1"]
    assert entries["string"] == ["string", ["string"], 'größe "1"', "größe 1"]


def test_two_are_equal_only_if_all_contents_were_compared(two):
    tree = {"w": np.arange(4), "x": np.arange(3), "text": "same"}
    a, b = two(tree, tree)
    arrays = {name: tree[name] for name in ("w", "x")}
    unknown = reshard.diff(a, b, values=False)
    assert (unknown.equal, bool(unknown), unknown.document()["equal"]) == (None, False, None)
    for values in (None, True):
        known = reshard.diff(a, b, values=values)
        assert (known.equal, bool(known), known.document()["equal"]) == (True, True, True)
        assert (known.values, known.by_digests, known.compared) == (True, 0, 2)
    assert repr(unknown) == told(
        unknown,
        "no differences found; the contents of 2 arrays were not compared",
        "no arrays compared by recorded digests, 2 not compared",
        HINT,
    )
    assert reshard.diff(a, b, values=False, select="text").equal is True
    record(a, arrays)
    record(b, arrays)
    assert reshard.diff(a, b, values=False).equal is True
    other = save(b.with_name("other"), tree | {"text": "other", "w": np.arange(4) + 1})
    differs = reshard.diff(a, other, values=False)
    assert (differs.equal, bool(differs), differs.not_compared) == (False, False, 2)
    # Values are compared even if the recorded digests are equal; records of another kind, or
    # without a digest, do not count; and damaged ones are an error.
    record(other, arrays)
    assert reshard.diff(a, other, select=["w", "x"]).equal
    assert not reshard.diff(a, other, select=["w", "x"], values=True).equal
    known = {
        "w": ArrayRecord("int64", (4,), None),
        "x": ArrayRecord("int64", (1, 3), digest_of(tree["x"])),
    }
    (b / FILE).write_text(json.dumps(Record(known, {}, {}, {}).document()))
    diff = reshard.diff(a, b, values=False)
    assert (diff.equal, diff.compared, diff.not_compared) == (None, 0, 2)
    (b / FILE).write_text("{")
    error = layouts.refused(reshard.CorruptCheckpointError, reshard.diff, a, b)
    assert error.startswith(f"`{b / FILE}` is not a record of digests\n")


def test_contents_without_digests_on_both_sides_are_read(two, taken):
    rng = np.random.default_rng(3)
    one = {name: layouts.random_array(rng, (3, 5)) for name in ("both", "first", "neither")}
    one["cast"] = rng.standard_normal((3, 5)).astype("f4")
    old = {name: layouts.random_array(rng, (7,), "int32") for name in ("p", "q")}
    a, b = two(one | old, one | {"cast": one["cast"].astype("f8"), "r": old["p"], "s": old["q"]})
    record(a, {name: leaf for name, leaf in (one | old).items() if name not in ("neither", "q")})
    record(b, {"both": one["both"], "r": old["p"]})
    diff = reshard.diff(a, b)
    assert diff.report() == told(
        diff,
        "dtype  cast  A: float32  B: float64",
        "moved  p     B: r",
        "moved  q     B: s",
        "3 differences: 1 dtype, 2 moved",
        "1 array compared by recorded digests",
        "2 moved arrays compared by digests",
        "3 other arrays compared: bit for bit, as numbers where dtypes differ",
    )
    assert (diff.values, diff.by_digests, diff.compared, diff.not_compared) == (True, 1, 4, 0)
    compared = page_of(diff.document()).facts[2]
    assert compared.answer == "4 arrays, bit for bit"
    assert compared.details[0] == "1 of them by recorded digests."
    assert sorted(taken) == sorted([*["cast", "first", "neither"] * 2, "q", "s"])
    # Values that differ are found, whoever lacks the digest.
    wrong = {name: leaf.copy() for name, leaf in one.items()}
    for name in ("both", "first", "neither"):
        wrong[name].view("u4")[2, 4] ^= 1
    c = save(b.with_name("c"), wrong)
    record(c, {"both": wrong["both"], "neither": wrong["neither"]})
    differs = reshard.diff(a, c, drop=["p", "q"])
    assert [d.path for d in differs.of("values")] == [("both",), ("first",), ("neither",)]
    assert [d.elements and d.elements.index for d in differs.differences] == [None, (2, 4), (2, 4)]


# Which leaves.


def test_globs_may_match_leaves_of_either_side(two):
    ones = np.ones(3, "f4")
    other = {"x": ones, "params": {"new": ones}, "y": ones[:1]}
    a, b = two({"x": ones, "old": ones, "y": ones}, other)
    assert reshard.diff(a, b, select="x").differences == ()
    added = [("added", ("params", "new"), None, "float32[3]")]
    for select in ("params", ["x", "params/new"]):
        assert found(reshard.diff(a, b, select=select), "added", "removed", "shape") == added
    assert reshard.diff(a, b, drop=["old", "params", "y"]).differences == ()
    # Those that match nothing are told together.
    refused = functools.partial(layouts.refused, reshard.TreeMismatchError, reshard.diff, a, b)
    assert refused(select=["parans", "x", "nothing"]) == (
        "no leaf matches\n  `parans`\n  `nothing`\n\nhint: the nearest leaf is `params/new`"
    )
    assert refused(drop="**") == "no leaf is left to compare\n  `**` is dropped"


# Contents.


def test_a_report_has_the_place_and_the_size_of_differences(two):
    smallest, largest = -(2**63), 2**63 - 1
    bits = np.uint32([[0x7FC00000, 0x7FC00000], [0x7FC00000, 0x7FC00001]])
    same = np.float32([math.nan, -0.0, math.inf])
    pairs = {
        "float": np.float32([[[1.5, 2, 3], [4, 5, 6]], [[1.5, 2, 4], [4, 5, 5]]]),
        "zero": np.float32([[0, 1], [-0.0, 1]]),
        "int": np.int64([[7, smallest], [7, largest]]),
        "bool": np.array([[True, False], [False, False]]),
        "half": jnp.array([[1, 2, 3], [1, 2, 3.5]], "bfloat16"),
        "complex": np.complex64([[3 + 4j, 0], [0, 0]]),
        "nan": np.float32([[1, math.nan, math.inf, 2], [1, 5, -math.inf, 4]]),
        "payload": bits.view("f4"),
        "scalar": (3, 4),
        "same": (same, same),
    }
    a, b = two(*({name: pair[i] for name, pair in pairs.items()} for i in (0, 1)))
    done, nbytes = [], sum(reshard.open(path).nbytes for path in (a, b))
    diff = reshard.diff(a, b, values=True, progress=lambda *now: done.append(now))
    assert done == sorted(done) and done[-1] == (nbytes, nbytes)
    elements = "elements, the first at"
    assert diff.report() == told(
        diff,
        f"values  bool     A: True  B: False  1 of 2 {elements} [0]; max abs 1, max rel inf",
        f"values  complex  A: (3+4j)  B: 0j  1 of 2 {elements} [0]; max abs 5, max rel inf",
        f"values  float    A: 3.0  B: 4.0  2 of 6 {elements} [0,2]; max abs 1, max rel 0.25",
        f"values  half     A: 3  B: 3.5  1 of 3 {elements} [2]; max abs 0.5, max rel 0.142857",
        f"values  int      A: {smallest}  B: {largest}  "
        f"1 of 2 {elements} [1]; max abs {2**64 - 1}, max rel 2",
        "values  nan      A: nan  B: 5.0  "
        f"3 of 4 {elements} [1]; max abs 2, max rel 0.5; 2 NaN or infinite",
        "values  payload  A: nan (0x7fc00000)  B: nan (0x7fc00001)  "
        f"1 of 2 {elements} [1]; 1 NaN or infinite",
        f"values  scalar   A: 3  B: 4  1 of 1 {elements} []; max abs 1, max rel 0.25",
        f"values  zero     A: 0.0  B: -0.0  1 of 2 {elements} [0]; max abs 0, max rel 0",
        "9 differences: 9 values",
        "10 arrays compared: bit for bit",
    )
    document = json.loads(json.dumps(diff.document()), parse_constant=lambda name: 1 / 0)
    by_path = {entry.pop("path"): entry for entry in document["differences"]}
    expected = {"what": "values", "keys": ["float"], "a": 3.0, "b": 4.0, "index": [0, 2]}
    expected |= {"count": 2, "size": 6, "non_finite": 0, "max_abs": 1.0, "max_rel": 0.25}
    expected |= {"abs_histogram": {"0": 2}, "rel_histogram": {"-3": 1, "-2": 1}}
    assert by_path["float"] == expected
    assert [by_path["complex"][key] for key in ("a", "b", "max_rel")] == ["(3+4j)", "0j", "inf"]
    assert [by_path["nan"][key] for key in ("a", "b", "non_finite")] == ["nan", 5.0, 2]
    assert [by_path["payload"][key] for key in ("a", "max_abs")] == ["nan (0x7fc00000)", None]
    assert [by_path["int"][key] for key in ("a", "max_abs")] == [smallest, 2**64 - 1]
    assert not reshard.diff(a, b, select=["payload", "zero"], values=True).equal
    assert reshard.diff(a, b, select=["payload", "zero"], values=True, atol=1e-9).equal


def test_tolerances_are_for_floating_point_and_complex_arrays(two):
    one = {"f": np.float32([1, 100]), "c": np.complex64([1 + 1j]), "i": np.int32([100])}
    other = {"f": np.float32([1.5, 101]), "c": np.complex64([1 + 1.5j]), "i": np.int32([101])}
    a, b = two(one, other)
    diff = reshard.diff(a, b, values=True, atol=0.5, rtol=0.01)
    assert diff.report() == told(
        diff,
        "values  i  A: 100  B: 101  1 of 1 elements, the first at [0]; max abs 1, "
        "max rel 0.00990099",
        "1 difference: 1 values",
        "3 arrays compared: |A - B| <= 0.5 + 0.01 * |B|, integers exactly",
    )
    differ = reshard.diff(a, b, values=True, atol=0.49).of("values")
    assert [each.path[0] for each in differ] == ["c", "f", "i"]


def test_wrong_tolerances(tmp_path):
    no_number = "a tolerance must be a finite number, 0 or more\n"
    for tolerances, text in (
        ({"rtol": -1.0}, f"{no_number}  rtol=-1.0"),
        ({"rtol": "1"}, f"{no_number}  rtol='1'"),
        ({"rtol": math.nan, "atol": math.inf}, f"{no_number}  rtol=nan\n  atol=inf"),
        ({"values": False, "rtol": 0.1}, "tolerances require values=True\n\nhint: values=True"),
    ):
        asked = {"values": True} | tolerances
        told = layouts.refused(reshard.ArgumentError, reshard.diff, tmp_path, tmp_path, **asked)
        assert told == text


def test_arrays_of_other_dtypes_are_compared_as_numbers(two):
    numbers = [0.0, 1.0, -3.0, 96.0]
    one = {name: np.array(numbers, "f4") for name in ("equal", "int", "third")}
    other = {
        "equal": jnp.array(numbers, "bfloat16"),
        "int": np.array([0, 1, -3, 95], "i2"),
        "third": np.array([0, 1, -3, 96.5], "f8"),
    }
    a, b = two(one | {"big": np.array([2**62 + 1], "i8")}, other | {"big": np.uint32([1])})
    diff = reshard.diff(a, b, values=True)
    dtypes = ["int64 uint32", "float32 bfloat16", "float32 int16", "float32 float64"]
    assert [f"{each.a} {each.b}" for each in diff.of("dtype")] == dtypes
    assert found(diff, "values") == [
        ("values", ("big",), 2**62 + 1, 1),
        ("values", ("int",), 96.0, 95),
        ("values", ("third",), 96.0, 96.5),
    ]
    assert [d.elements.max_abs for d in diff.of("values")] == [2**62, 1.0, 0.5]
    for rtol, names in ((0.01, ["big", "int"]), (0.011, ["big"])):
        differ = reshard.diff(a, b, values=True, rtol=rtol).of("values")
        assert [each.path[0] for each in differ] == names


# Element by element, against a plain walk through the elements.


def oracle(a, b, rtol, atol):
    """Differing indices, and of the finite ones the largest absolute and relative difference."""
    exact = a.dtype == b.dtype and not ((rtol or atol) and inexact(a.dtype))
    places, sizes, ratios = [], [], []
    for index in np.ndindex(a.shape):
        x, y = number(a[index]), number(b[index])
        finite = cmath.isfinite(x) and cmath.isfinite(y)
        gap = distance(x, y) if finite else None
        if exact or (a[index].tobytes() == b[index].tobytes() and a.dtype == b.dtype):
            differs = a[index].tobytes() != b[index].tobytes()
        elif finite:
            differs = gap > (atol + rtol * abs(y) if inexact(a.dtype) or inexact(b.dtype) else 0)
        else:
            differs = not all(
                p == q or (math.isnan(p) and math.isnan(q))
                for p, q in zip((x.real, x.imag), (y.real, y.imag), strict=True)
            )
        if differs:
            places.append(index)
            if finite:
                sizes.append(gap)
                with np.errstate(all="ignore"):
                    ratios.append(0.0 if gap == 0 else float(np.float64(gap) / np.float64(abs(y))))
    return places, max(sizes, default=None), max(ratios, default=None)


def inexact(dtype):
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))


def number(element):
    """As a Python number, exactly."""
    if element.dtype.kind == "c":
        return complex(element)
    return float(element) if inexact(element.dtype) else int(element)


def distance(x, y):
    try:
        return abs(x - y)
    except OverflowError:
        return math.inf


@st.composite
def pairs(draw):
    """Two arrays that agree in most elements, and boxes of a grid over them."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    a = sample(rng, shape, dtype)
    b = np.where(
        rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 1.0])), sample(rng, shape, dtype), a
    )
    grid = [draw(st.integers(1, max(size, 1))) for size in shape]
    return a, b.astype(dtype).reshape(shape), grid


def sample(rng, shape, dtype):
    """Random bits, and among them few values that are close to each other, and special ones."""
    values = layouts.random_array(rng, shape, dtype)
    if dtype.name == "complex128":  # of which all bits would have sizes that overflow
        values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    small = rng.integers(0, 4, shape).astype(np.float64)
    with np.errstate(all="ignore"):
        if dtype.kind in "fc" or dtype == ml_dtypes.bfloat16:
            special = np.array(SPECIAL).astype(dtype)[rng.integers(0, len(SPECIAL), shape)]
            values = np.where(rng.random(shape) < 0.3, special, values)
        values = np.where(rng.random(shape) < 0.4, small.astype(dtype), values)
    return np.asarray(values).astype(dtype).reshape(shape)


def compared(a, b, grid, rtol, atol):
    comparison = ElementComparison(a.shape, rtol, atol)
    parts = [
        [slice(i, min(i + step, size)) for i in range(0, size, step)]
        for size, step in zip(a.shape, grid, strict=True)
    ]
    for box in itertools.product(*parts):
        comparison.add(box, a[box], b[box])
    return comparison.state


def check(a, b, grid, rtol, atol):
    got = compared(a, b, grid, rtol, atol)
    places, max_abs, max_rel = oracle(a, b, rtol, atol)
    if not places:
        assert got is None
        return
    assert (got.count, got.size, got.index) == (len(places), a.size, places[0])
    assert (got.a.tobytes(), got.b.tobytes()) == (a[places[0]].tobytes(), b[places[0]].tobytes())
    assert (got.a.dtype, got.b.dtype) == (a.dtype, b.dtype)
    finite = [i for i in places if np.isfinite(number(a[i])) and np.isfinite(number(b[i]))]
    assert got.non_finite == len(places) - len(finite)
    if max_abs is None:
        assert (got.max_abs, got.max_rel) == (None, None)
    else:
        assert got.max_abs == pytest.approx(max_abs, rel=1e-15)
        assert got.max_rel == pytest.approx(max_rel, rel=1e-15)


@settings(deadline=None, max_examples=examples(300))
@given(pairs(), st.sampled_from([0.0, 1e-3, 0.5]), st.sampled_from([0.0, 1.0]))
@example((np.arange(3) * 1j, np.array([0, 1j, 5]), [3]), 0.0, 0.0)  # of two words each
def test_elements_are_compared_as_by_a_plain_loop(pair, rtol, atol):
    check(*pair, rtol, atol)


@pytest.mark.parametrize("rtol", [0.0, 1e-6, 1.5])
@pytest.mark.parametrize(
    ("one", "other"), [(0, 1.7e308 + 1.7e308j), (1.6e308 + 1.7e308j, 1.7e308 + 1.7e308j)]
)
def test_distances_that_overflow_are_differences(one, other, rtol):
    """|b| is infinite, and so may |a - b| be."""
    a, b = np.array([one], complex), np.array([other], complex)
    assert compared(a, b, [1], rtol, 1e-6).count == 1
    assert compared(b, a, [1], rtol, 1e-6).count == 1


@settings(deadline=None, max_examples=examples(150))
@given(pairs(), st.sampled_from(DTYPES), st.sampled_from([0.0, 1e-3]))
def test_elements_of_two_dtypes_are_compared_as_by_a_plain_loop(pair, name, rtol):
    a, b, grid = pair
    dtype = np.dtype(name)
    # float64, which a test may take for the numbers themselves, does not hold all 64-bit integers.
    integers = not (inexact(a.dtype) or inexact(dtype))
    assume(dtype != a.dtype)
    assume(integers or {a.dtype.name, name}.isdisjoint({"int64", "uint64"}))
    with np.errstate(all="ignore"):
        if integers:
            other = b.astype(np.int64)
        else:
            other = b.real if b.dtype.kind == "c" else b.astype(np.float64)
        other = np.asarray(other).astype(dtype)
    check(a, other, grid, rtol, 0.0)


def test_integers_of_any_two_dtypes_are_compared_exactly():
    signed = np.array([2**53 + 1, -1, -(2**63), 5, 2**63 - 1], np.int64)
    unsigned = np.array([2**53, 2**64 - 1, 2**64 - 1, 5, 2**63], np.uint64)
    for a, b in ((signed, unsigned), (unsigned, signed)):
        check(a, b, [2], 0.0, 0.0)
        check(a, b, [5], 0.5, 0.5)
    assert compared(signed[:1], unsigned[:1], [1], 0.0, 0.0).max_abs == 1
    assert compared(signed[2:3], unsigned[2:3], [1], 0.0, 0.0).max_abs == 2**64 + 2**63 - 1
    assert compared(unsigned[:1] + np.uint64(1), signed[:1], [1], 0.0, 0.0) is None
    small = np.array([-1, 7]).astype(ml_dtypes.int4)
    check(small, np.array([2**64 - 1, 7], np.uint64), [2], 0.0, 0.0)


def test_bits_that_are_no_part_of_a_4_bit_integer_differ():
    """TensorStore stores them in a byte each, and does not check the other four bits."""
    a, b = (np.array(x, np.uint8).view(ml_dtypes.int4) for x in ([1, 2, 3], [1, 18, 3]))
    found = compared(a, b, (3,), 0.0, 0.0)
    assert found is not None
    assert (found.count, found.index) == (1, (1,))


def test_long_arrays_are_compared_in_slabs():
    a = np.zeros((3, 50_000), np.float32)
    b = a.copy()
    b[1, 49_999], b[2, 7] = 2, -3
    got = compared(a, b, a.shape, 0.0, 0.0)
    assert (got.count, got.index, got.max_abs, got.max_rel) == (2, (1, 49_999), 3.0, 1.0)


# Stored arrays.


@settings(deadline=None, max_examples=examples(12))
@given(st.integers(0, 2**32), st.sampled_from(["48KiB", "80KiB", "1MiB"]))
def test_uneven_chunk_grids_in_little_memory(tmp_path_factory, seed, max_memory):
    folder, rng = tmp_path_factory.mktemp("grids"), np.random.default_rng(seed)
    a, b = layouts.random_array(rng, (2, 60, 84))
    b = np.where(rng.random(a.shape) < rng.choice([0, 1e-3]), b, a)
    one = save(folder / "a", {"w": layouts.put(a, "data", "model")})
    other = save(folder / "b", {"w": layouts.put(b, "model", "data", sizes=(3, 4))})
    diff = reshard.diff(one, other, values=True, max_memory=max_memory)
    places = np.argwhere(a.view("u4") != b.view("u4"))
    expected = [(len(places), tuple(places[0]))] if len(places) else []
    assert [(each.elements.count, each.elements.index) for each in diff.differences] == expected


def test_transformed_checkpoints_are_compared_as_they_would_be_saved(tmp_path):
    double = np.random.default_rng(3).standard_normal((8, 4))
    ckpt = reshard.open(save(tmp_path / "a", {"double": double}))
    for dtype in ("bfloat16", "float32"):
        saved = save(tmp_path / dtype, {"double": double.astype(jnp.dtype(dtype))})
        cast = reshard.cast(ckpt, dtype)
        assert reshard.diff(cast, saved, values=True).equal
        assert reshard.diff(saved, cast, values=True).equal


# Leaves that have moved.


def test_moved_leaves_are_identified_by_their_contents(two):
    rng = np.random.default_rng(0)
    kernel, head = layouts.random_array(rng, (4, 6)), layouts.random_array(rng, (4, 6))
    key, data = jax.random.key(3), jax.random.key_data(jax.random.key(4))
    a, b = two(
        {"old": {"kernel": kernel, "head": head}, "keys": {"a": key, "plain": jax.random.key(4)}},
        {"new": {"kernel": kernel, "head": head + 1}, "keys": {"b": key, "data": data}},
    )
    diff = reshard.diff(a, b, values=True)
    assert diff.report() == told(
        diff,
        "moved    keys/a      B: keys/b",
        "removed  keys/plain  A: key<threefry2x32> uint32[2]",
        "removed  old/head    A: float32[4,6]",
        "moved    old/kernel  B: new/kernel",
        "added    keys/data   B: uint32[2]",
        "added    new/head    B: float32[4,6]",
        "6 differences: 2 moved, 2 removed, 2 added",
        "2 moved arrays compared by digests",
        "no other arrays compared",
    )
    # Nothing is known of contents: never by shape alone.
    assert found(reshard.diff(a, b, values=False), "moved") == []
    assert len(reshard.diff(a, b, values=False).of("added", "removed")) == 8


def test_leaves_with_the_same_contents_are_removed_and_added(two):
    """Several zeros cannot be paired."""
    kernel, zeros = np.arange(4.0), np.zeros(4)
    a, b = two({"k": kernel, "x": zeros, "y": zeros}, {"l": kernel, "v": zeros, "w": zeros})
    diff = reshard.diff(a, b, values=True)
    kinds = [f"{d.what} {d.path[0]}" for d in diff.differences]
    assert kinds == ["moved k", "removed x", "removed y", "added v", "added w"]
    one = reshard.diff(a, b, drop=["y", "w"]).of("moved")
    assert [(d.a, d.b) for d in one] == [("k", "l"), ("x", "v")]


# Digests on record.


def test_recorded_digests_replace_values_and_identify_moved_leaves(two):
    one = {"equal": np.arange(4), "other": np.arange(6), "cast": np.arange(3.0), "old": np.ones(9)}
    new = {"equal": np.arange(4), "other": np.arange(6) + 1, "cast": np.float32([0, 1, 2])}
    new |= {"new": np.ones(9)}
    a, b = two(one | {"bare": np.ones(2)}, new | {"bare": np.ones(2)})
    assert reshard.diff(a, b, values=False).not_compared == 3
    record(a, one)
    assert reshard.diff(a, b, values=False).not_compared == 3
    record(b, new)
    old_digest, new_digest = digest_of(one["other"]), digest_of(new["other"])
    diff = reshard.diff(a, b, values=False)
    assert diff.report() == told(
        diff,
        "dtype   cast   A: float64  B: float32",
        "moved   old    B: new",
        f"values  other  A: digest {old_digest}  B: digest {new_digest}",
        "3 differences: 1 dtype, 1 moved, 1 values",
        "2 arrays compared by recorded digests, 1 not compared",
        HINT,
    )
    assert not reshard.diff(a, b, select="other").equal
    # A cast array is not what the digest was recorded of.
    cast = [reshard.cast(reshard.open(p), "float32") for p in (a, b)]
    assert reshard.diff(*cast, values=False).compared == 2


# What cannot be read.


def test_unreadable_arrays_are_listed_with_their_side(two, taken):
    """All are listed together, and nothing is read twice."""
    tree = {name: np.arange(8, dtype="f4") + i for i, name in enumerate(("w", "x", "y", "z", "ok"))}
    moved = {name: leaf for name, leaf in tree.items() if name != "z"} | {"new": tree["z"]}
    a, b = two(tree, moved, use_ocdbt=False)
    for path in (a / "w", a / "x", b / "x", b / "y", b / "new"):
        (path / "0").write_bytes(b"garbage")
    with pytest.raises(reshard.CorruptCheckpointError) as error:
        reshard.diff(a, b, values=True)
    assert error.value.summary == f"arrays cannot be read; A is `{a}`, B is `{b}`"
    starts = [problem.partition(" cannot be read: ")[0] for problem in error.value.problems]
    leaves = ("A: w", "A: x", "B: x", "B: y", "B: new")
    assert starts == [f"{leaf}: its stored bytes" for leaf in leaves]
    assert sorted(taken) == sorted((*tree, *moved))
    assert reshard.diff(a, b, values=True, select="ok").equal


def test_two_leaves_under_one_name_are_refused_if_values_are_compared(two):
    tree = {"a": {"b": np.ones(3)}, "a.b": np.zeros(3), "c": np.ones(3)}
    a, b = two(tree, {"c": np.ones(3), "a.b": np.zeros(3), "a": {"b": np.ones(3)}})
    assert reshard.diff(a, b, values=False).differences == ()
    text = "two leaves were saved under one name, so one of them has overwritten the other"
    for values in (None, True):
        told = layouts.refused(reshard.CorruptCheckpointError, reshard.diff, a, b, values=values)
        assert told.split("\n")[0] == text
    assert reshard.diff(a, b, values=True, drop=["a.b", "a/b"]).equal


# The command.


@pytest.fixture
def command(tmp_path):
    return functools.partial(in_process.reshard_in, tmp_path, "diff")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`run`: a manager's root with steps 1 and 2; `copy`: step 1 in another format."""
    directory = tmp_path_factory.mktemp("runs")
    trees = [{"w": np.float32([[1, 2], [3, n]]), "n": np.int32([n])} for n in (4, 5)]
    with ocp.CheckpointManager(directory / "run") as manager:
        for step, tree in enumerate(trees, 1):
            manager.save(step, args=ocp.args.StandardSave(tree))
    save(directory / "copy", trees[0], use_zarr3=True)
    save(directory / "last", trees[1], use_zarr3=True)
    shutil.copytree(directory / "copy", directory / "broken")
    for file in (directory / "broken" / "d").iterdir():
        file.write_bytes(bytes(len(file.read_bytes())))
    return directory


def test_exit_status_0_only_if_all_contents_are_compared_and_equal(runs, command):
    run, a, b = runs / "run", runs / "run" / "1", runs / "copy"
    unknown = "Error: the contents of 2 arrays were not compared\n\nhint: --values reads them\n"
    assert command(a, b, "--no-values", "--quiet") == (2, "", unknown)
    status, out, err = command(a, b, "--no-values", "--select", "w", "--json")
    assert (status, err) == (2, unknown.replace("2 arrays", "1 array"))
    assert json.loads(out)["equal"] is None
    equal = f"A: {a}\nB: {b}\nno differences\n2 arrays compared: bit for bit\n"
    for values in ((), ("--values",)):
        assert command(a, b, *values, "--quiet") == (0, "", "")
        assert command(a, b, *values) == (0, equal, "")
    # The step counts for each as far as it has steps.
    for status, *words in (
        (0, run, a, "--step", 1),
        (0, run, b, "--step", 1),
        (1, run, b, "--step", 2),
        (0, b, run, "--step", 1),
        (0, run, runs / "last"),
        (0, run, run, "--step", 1, "--item", "default"),
    ):
        assert command(*words)[0] == status, words
    told = refused(runs, "diff", b, runs / "last", "--step", 1)
    assert told.startswith(f"Error: `{b}` is one checkpoint and has no steps\n")


def test_exit_status_1_if_something_differs(runs, command):
    a, b = runs / "run" / "1", runs / "run"
    for status, *words in (
        (1, b),
        (0, b, "--rtol", "0.2", "--drop", "n"),
        (1, b, "--atol", "0.9", "--select", "w"),
        (1, runs / "copy", "--layout"),
    ):
        assert command(a, *words, "--values", "--quiet") == (status, "", "")
    status, out, err = command(a, b, "--values", "--json")
    assert (status, err) == (1, "")
    assert json.loads(out) == reshard.diff(a, b, values=True).document()


def test_the_command_compares_each_step_with_the_same_step(runs, command, tmp_path):
    root = shutil.copytree(runs / "run", tmp_path / "other")
    every = ("--step", "all")
    status, out, err = command(runs / "run", root, *every)
    assert (status, err) == (0, "")
    assert out == "".join(
        f"step {step}\nA: {runs}/run/{step}\nB: {root}/{step}\nno differences\n"
        "2 arrays compared: bit for bit\n"
        for step in (1, 2)
    )
    shutil.rmtree(root / "2")
    shutil.copytree(root / "1", root / "2")
    assert command(runs / "run", root, "--step", "1")[0] == 0
    assert command(runs / "run", root, *every, "--quiet") == (1, "", "")
    documents = json.loads(command(runs / "run", root, *every, "--json")[1])["steps"]
    assert [(one["step"], one["equal"]) for one in documents] == [(1, True), (2, False)]
    assert command(runs / "run", runs / "copy", *every)[0] == 1  # which is like step 1
    # A step of B alone is not passed over.
    shutil.copytree(root / "1", root / "7")
    status, _, err = command(runs / "run", root, *every)
    told = f"Error: step 7: `{runs}/run` has no step 7\n  its steps: 1, 2\n\nhint: --step 2\n"
    assert (status, err) == (2, told)
    text = (
        "Error: step {}: the contents of 2 arrays were not compared\n\nhint: --values reads them\n"
    )
    words = (runs / "run", runs / "run", "--step", "1..6", "--no-values", "--quiet")
    assert command(*words) == (2, "", text.format(1) + text.format(2))


def test_exit_status_2_if_diff_cannot_run(runs):
    a = runs / "run" / "1"
    for text, *words in (
        ("a tolerance must be a finite number, 0 or more\n", a, "--values", "--rtol", "nan"),
        (f"nothing exists at `{runs / 'nothing'}`\n", runs / "nothing"),
        (f"the OCDBT database in `{runs / 'broken'}`", runs / "broken", "--values"),
        ("one chunk, ", runs / "copy", "--values", "--max-memory", "1KiB"),
    ):
        assert refused(runs, "diff", a, *words).startswith(f"Error: {text}")
