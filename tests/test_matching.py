"""Matching saved leaves with target leaves, on checkpoints in memory."""

import itertools
import pathlib
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layouts import DTYPES
from sampling import examples

import reshard
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.checkpoint import Checkpoint, Source
from reshard.restore import matching
from reshard.restore.matching import Mismatch, TargetLeaf, match, mismatch_error

STORE: Any = None  # which nothing here reads
FACTS: dict[str, Any] = {"metadata": {}, "metadata_apart": True, "identity": None}
SOURCE = Source(pathlib.Path("run"), "item", store=STORE, **FACTS)


def handle(path, shape=(), dtype="float32", value_type="jax.Array", key_impl=None):
    dtype, data = jnp.dtype(dtype), StoredArray(STORE, "", b"")
    return ArrayHandle(path, shape, dtype, shape, None, None, value_type, key_impl, dtype, data)


def saved(leaves):
    """A checkpoint of (shape, dtype, ...) tuples, and of leaves that are not arrays."""
    return Checkpoint(
        {
            path: handle(path, *leaf) if isinstance(leaf, tuple) and leaf else leaf
            for path, leaf in leaves.items()
        },
        SOURCE,
    )


def array(path, shape=(), dtype="float32", **kwargs):
    return TargetLeaf(path, "array", shape, jnp.dtype(dtype), **kwargs)


def no_array(kind, shape=(), impl=None):
    return TargetLeaf(("a",), kind, shape, key_impl=impl)


def keys(shape, impl):
    return shape, "uint32", "jax.Array", impl


# Levels named `value`.

KEYS = st.sampled_from(["a", "b", "value", "1", 0])
TREES = st.recursive(
    st.just(None), lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: tree is not None)


def paths_of(tree, path=()):
    if tree is None:
        return [path]
    return [p for key, below in tree.items() for p in paths_of(below, (*path, key))]


def with_levels(tree, draw):
    """The tree with levels named `value` put above some of its nodes."""
    if tree is not None:
        tree = {key: with_levels(below, draw) for key, below in tree.items()}
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        tree = {"value": tree}
    return tree


def matched(wanted, present, **kwargs):
    ckpt = saved(dict.fromkeys(present, ((3,), "float32")))
    return match([array(path, (3,)) for path in wanted], ckpt, **kwargs)


@settings(deadline=None, max_examples=examples(400))
@given(TREES, st.data())
def test_trees_match_whatever_levels_either_has(tree, data):
    one, other = (paths_of(with_levels(tree, data.draw)) for _ in range(2))
    assert matched(one, other) == (other, [])


def boxed(tree, draw):
    """The tree with a level named `value` above some of its leaves, as Orbax saves boxes."""
    if tree is not None:
        return {key: boxed(below, draw) for key, below in tree.items()}
    return {"value": None} if draw(st.booleans()) else None


@settings(deadline=None, max_examples=examples(400))
@given(TREES, st.data())
def test_a_part_of_a_tree_matches_that_part_of_a_boxed_tree(tree, data):
    """`value` may be the name of an attention module whose siblings the target lacks."""
    one, other = paths_of(tree), paths_of(boxed(tree, data.draw))
    chosen = [i for i in range(len(one)) if data.draw(st.booleans())]
    assume(chosen)
    part = [other[i] for i in chosen]
    assert matched([one[i] for i in chosen], other, ignore=True) == (part, [])


@settings(deadline=None, max_examples=examples(400))
@given(TREES, TREES)
def test_no_two_leaves_get_one_saved_leaf(tree, other):
    found, problems = matched(paths_of(tree), paths_of(other))
    hits = [path for path in found if path is not None]
    assert len(set(hits)) == len(hits)
    # Everything is matched, missing or unexpected.
    missing = [problem.path for problem in problems if problem.what == "missing"]
    unexpected = [problem.path for problem in problems if problem.what == "unexpected"]
    pairs = zip(paths_of(tree), found, strict=True)
    assert missing == [path for path, hit in pairs if hit is None]
    assert unexpected == [path for path in paths_of(other) if path not in hits]
    assert len(problems) == len(missing) + len(unexpected)


@pytest.mark.parametrize(
    ("wanted", "present"),
    [
        # The root.
        ([()], [()]),
        ([()], [("value",)]),
        ([("value",)], [()]),
        # Positions, and keys of digits.
        ([("a", 0), ("a", 1)], [("a", "0"), ("a", "1")]),
        ([("a", "0", "value")], [("a", 0)]),
        # A part, in a box itself; below a module of that name: saved in a box, and in one above.
        ([("a", "value")], [("a",), ("b",)]),
        ([("a", "value", "w")], [("a", "value", "w", "value"), ("a", "value", "value", "w")]),
        ([("a", "value", "w")], [("a", "value", "value", "w"), ("a", "w")]),
    ],
)
def test_levels_named_value(wanted, present):
    part = present[: len(wanted)]
    assert matched(wanted, present, ignore=present != part) == (part, [])


def test_a_sibling_keeps_a_level_named_value():
    """A `value` with siblings is not the level of a box."""
    present = [("a", "value"), ("a", "b")]
    found, problems = matched([("a",)], present)
    assert found == [None]
    expected = [("missing", ("a",)), *(("unexpected", path) for path in present)]
    assert [(problem.what, problem.path) for problem in problems] == expected


@pytest.mark.parametrize("leaf", [None, {}, [], ()])
def test_empty_leaves_are_neither_missing_nor_unexpected(leaf):
    ckpt = saved({("a",): ((3,), "float32"), ("b",): leaf, ("c", "value"): leaf})
    assert match([array(("a",), (3,))], ckpt) == ([("a",)], [])
    missing = [Mismatch("missing", "b  float32[3]: missing", ("b",))]
    assert match([array((key,), (3,)) for key in "ab"], ckpt) == ([("a",), None], missing)


# Kinds of leaves.

FLOATS = ["float64", *(name for name in DTYPES if "float" in name)]
INTS = ["int64", "uint64", *(name for name in DTYPES if "int" in name)]


def patterns(dtype):
    """Every value of a narrow dtype; of a wide one those that show its precision and range."""
    dtype = jnp.dtype(dtype)
    width = {"float4_e2m1fn": 4}.get(dtype.name, dtype.itemsize * 8)
    if width <= 16:
        storage = np.arange(1 << width).astype(f"uint{max(width, 8)}")
        return storage.view(dtype)
    info = ml_dtypes.finfo(dtype)
    exact = [info.max, info.min, info.tiny, info.smallest_subnormal, 1 + info.eps, 0, 1 / 3]
    return np.array([*exact, np.inf, -np.inf, np.nan], dtype)


def test_a_dtype_keeps_values_if_every_value_survives_there_and_back():
    for old, new in itertools.product(FLOATS, repeat=2):
        values = patterns(old)
        with np.errstate(all="ignore"):
            exact = values.astype("float64")
            back = exact.astype(jnp.dtype(new)).astype("float64")
        number = ~np.isnan(exact)  # a zero has a sign
        survive = np.array_equal(exact, back, equal_nan=True) and np.array_equal(
            np.signbit(exact[number]), np.signbit(back[number])
        )
        assert matching.keeps_values(jnp.dtype(old), jnp.dtype(new)) == survive, (old, new)


@pytest.mark.parametrize("cast", [False, True, "lossy"])
def test_which_dtypes_fit(cast):
    for old, new in itertools.product([*FLOATS, *INTS, "bool", "complex64"], repeat=2):
        if old in FLOATS and new in FLOATS:
            keeps = matching.keeps_values(jnp.dtype(old), jnp.dtype(new))
            fits = cast == "lossy" or (cast is True and keeps) or old == new
        else:
            fits = old == new or (bool(cast) and old in INTS and new in INTS)
        found, problems = match([array(("a",), (3,), new)], saved({("a",): ((3,), old)}), cast=cast)
        text = f"a: the target has {new}[3], the checkpoint {old}[3]"
        assert (found, problems) == ([("a",)], [] if fits else [Mismatch("dtype", text, ("a",))])


@pytest.mark.parametrize("cast", [False, True, "lossy"])
@pytest.mark.parametrize(
    ("wanted", "leaf"),
    [
        # Python scalars have no dtype of their own.
        (array(("a",), dtype="int32"), ((), "int64", "scalar")),
        (array(("a",), weak=True), ((), "float64", "scalar")),
        (array(("a",), dtype="bool"), ((), "bool", "scalar")),
        (no_array("int"), ((), "int64", "scalar")),
        (no_array("int"), ((), "uint32")),
        (no_array("float"), ((), "bfloat16")),
        (no_array("bool"), ((), "bool")),
        (no_array("str"), "text"),
        (array(("a",), (3,), "float64"), ((3,), "float64", "np.ndarray")),
        (no_array("key", (8,), "rbg"), keys((8, 4), "rbg")),
        (no_array("key", (), "threefry2x32"), keys((2,), "threefry2x32")),
    ],
)
def test_leaves_that_fit(wanted, leaf, cast):
    assert match([wanted], saved({("a",): leaf}), cast=cast) == ([("a",)], [])


SCALAR = "a Python scalar (float64)"


@pytest.mark.parametrize(
    ("wanted", "leaf", "what", "has", "found"),
    [
        (array(("a",), (3,)), ((3, 1), "int8"), "shape", "float32[3]", "int8[3, 1]"),
        (array(("a",)), ((1,), "float32"), "shape", "float32[]", "float32[1]"),
        (array(("a",)), ((), "float64", "scalar"), "dtype", "float32[]", SCALAR),
        (
            array(("a",), (), "int8", weak=True),
            ((), "float64", "scalar"),
            "dtype",
            "int8[]",
            SCALAR,
        ),
        (array(("a",), (3,)), "text", "kind", "float32[3]", "'text'"),
        (no_array("str"), ((), "float32"), "kind", "a Python str", "float32[]"),
        (no_array("int"), ((), "float64", "scalar"), "kind", "a Python int", SCALAR),
        (no_array("int"), ((), "bool"), "kind", "a Python int", "bool[]"),
        (no_array("bool"), ((), "int32"), "kind", "a Python bool", "int32[]"),
        (no_array("float"), ((), "int32"), "kind", "a Python float", "int32[]"),
        (no_array("float"), ((1,), "float32"), "kind", "a Python float", "float32[1]"),
        (no_array("int"), "7", "kind", "a Python int", "'7'"),
        (no_array("complex"), ((), "int32"), "kind", "a Python complex", "int32[]"),
        (no_array("bytes"), ((), "int32"), "kind", "a Python bytes", "int32[]"),
        (no_array("key", (8,), "rbg"), ((8, 4), "uint32"), "kind", "rbg keys[8]", "uint32[8, 4]"),
        (no_array("key", (8,), "rbg"), keys((8, 4), "x"), "kind", "rbg keys[8]", "x keys[8]"),
        (no_array("key", (8,), "rbg"), keys((4, 4), "rbg"), "kind", "rbg keys[8]", "rbg keys[4]"),
        (array(("a",), (2,), "uint32"), keys((2,), "x"), "kind", "uint32[2]", "x keys[]"),
    ],
)
def test_leaves_that_do_not_fit(wanted, leaf, what, has, found):
    floats = "scalar" in leaf and what == "dtype" and wanted.dtype == "float32"
    problems = [Mismatch(what, f"a: the target has {has}, the checkpoint {found}", ("a",))]
    for cast in (False, "lossy"):
        expected = [] if cast and floats else problems
        assert match([wanted], saved({("a",): leaf}), cast=cast) == ([("a",)], expected)


def tied(path, *aliases, shape=(3,)):
    return array(path, shape, aliases=aliases)


@pytest.mark.parametrize("place", [("a",), ("b", "x"), ("c",)])
@pytest.mark.parametrize("level", [(), ("value",)])
def test_a_tied_leaf_is_found_in_any_of_its_places(place, level):
    wanted = [tied(("a",), ("b", "x"), ("c",)), array(("other",), (3,))]
    paths = [(*place, *level), ("other", *level)]
    ckpt = saved(dict.fromkeys(paths, ((3,), "float32")))
    assert match(wanted, ckpt) == (paths, [])


@pytest.mark.parametrize("ignore", [False, True])
def test_a_tied_leaf_that_was_saved_twice(ignore):
    ckpt = saved({("a",): ((3,), "float32"), ("b", "value"): ((3,), "float32")})
    text = "a: one leaf of the target, saved as a and b/value"
    problems = [Mismatch("tied", text, ("a",), copy=("b", "value"))]
    assert match([tied(("a",), ("b",))], ckpt, ignore=ignore) == ([("a",)], problems)


def several(texts):
    return [tuple(text.split("/")) for text in texts.split()]


@pytest.mark.parametrize(
    ("wanted", "present", "hint"),
    [
        # The first level was added or removed.
        ("model/a/w model/a/b model/c/w", "a/w a/b c/w", '(ckpt, [("^", "model/")])'),
        ("a/w c/w", "x.y/a/w/value x.y/c/w/value", r'(ckpt, [(r"^x\.y/", "")])'),
        # A model in a train state.
        (
            "a/w",
            "params/a/w mu/params/a/w",
            '(reshard.select(ckpt, "params/**"), [("^params/", "")])',
        ),
        # Nothing is guessed: another name, two candidates, a leaf, leaves that are found.
        ("a/c/w a/c/b a/w", "a/d/w a/d/b a/w", None),
        ("a/w c/w", "b/w c/w", None),
        ("a/w", "params/a/w ema/a/w", None),
        ("model/a/w ema/a/w", "a/w", None),
        ("a/w b", "m/a/w m/b/value a/b b", None),
        ("0/nu/a/w 0/nu/b", "0/trace/a/w 0/trace/b", None),
    ],
)
def test_the_hint_adds_or_removes_the_first_level(wanted, present, hint):
    wanted, ckpt = several(wanted), saved(dict.fromkeys(several(present), ((3,), "float32")))
    leaves = [array(path, (3,)) for path in wanted]
    error = mismatch_error(match(leaves, ckpt)[1], leaves, ckpt, of_nnx=False)
    assert list(error.hints) == ([] if hint is None else ["reshard.rename" + hint])
    if hint:
        renamed = eval("reshard.rename" + hint, {"reshard": reshard, "ckpt": ckpt})
        assert match(leaves, renamed)[1] == []


NAMES = ["a", "b", "kernel", "x.y", "a b", "a/b", "1", 'q"', "[0]", "value", "\\"]
NAMED = st.recursive(
    st.just(None),
    lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=examples(100))
@given(NAMED, st.sampled_from(NAMES), st.booleans())
def test_a_hinted_rename_supplies_all_leaves(tree, top, added):
    one, other = paths_of(tree), paths_of({top: tree})
    wanted, present = (one, other) if added else (other, one)
    leaves = [array(path, (3,)) for path in wanted]
    ckpt = saved(dict.fromkeys(present, ((3,), "float32")))
    for hint in mismatch_error(match(leaves, ckpt)[1], leaves, ckpt, of_nnx=False).hints:
        renamed = eval(hint, {"reshard": reshard, "ckpt": ckpt})
        assert match(leaves, renamed)[1] == []


def test_matching_grows_with_the_leaves():
    present = [("params", f"layer_{i}", "kernel", "value") for i in range(10_000)]
    wanted = [path[:-1] for path in present]
    assert matched(wanted, present) == (present, [])
