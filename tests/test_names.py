"""Stored names of leaves: after any change of a tree, no two leaves have one name."""

import re

import jobs
import layouts
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from sampling import examples

import reshard
from reshard.tree import format_glob, format_path

FORMATS = [*jobs.FORMATS.values()]


def values(seed, shape=(3, 5)):
    return np.random.default_rng(seed).random(shape, np.float32)


def put(path, tree, **flags):
    return reshard.open(layouts.save_pytree(path, tree, **flags))


def by_reshard(ckpt):
    return {
        path: leaf.view().read().result() if isinstance(leaf, reshard.ArrayHandle) else leaf
        for path, leaf in ckpt.items()
    }


def assert_same(got, expected):
    assert set(got) == set(expected)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(got[path], leaf, strict=not isinstance(leaf, str))


FILES, FILES3 = {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}
# What stored chunks and metadata are called, in checkpoints without a database.
TAKEN = [
    (FILES, (5,), "a/0", "a/0"),
    (FILES, (5, 3), "a/0.1", "a/0.1"),
    (FILES, (5, 3), "a/.zarray", "a/.zarray"),
    (FILES3, (), "a/c", "a/c"),
    (FILES3, (5,), "a/c/0/b", "a/c/0"),
    (FILES3, (5,), "a/zarr.json", "a/zarr.json"),
]


CLASHES = [
    (
        {"params.dense": {"kernel": values(1)}, "bf": values(2)},
        {"^bf$": "params/dense.kernel"},
        "params/dense.kernel and params.dense/kernel -> `params.dense.kernel`",
    ),
    ({"a": values(1), "b.c": values(2)}, {"^a$": "b/c"}, "b/c and b.c -> `b.c`"),
    ({"a": values(1), "b": {"c": values(2)}}, {"^a$": "b.c"}, "b.c and b/c -> `b.c`"),
    ({"a": "one", "b.c": "other", "w": values(1)}, {"^a$": "b/c"}, "b/c and b.c -> `b.c`"),
    # Both leaves of a collision in the source get the values of others: it is a new one.
    (
        {"a": {"b": values(1)}, "a.b": values(2), "c": values(3), "d": values(4)},
        {"^a/b$": "x", r"^a\.b$": "y", "^c$": "a/b", "^d$": "a.b"},
        "a/b and a.b -> `a.b`",
    ),
    (
        {"a": "one", "b": "other", "w": values(1)},
        {"^b$": '"a/b"'},
        'a and "a/b": the string `a/b` would be inside `a`',
    ),
    *(
        (
            {"a": values(1, shape), "b": values(2)},
            {"^b$": f'"{name}"'},
            f'a and "{name}": `{file}` is a file of `a`',
            flags,
        )
        for flags, shape, name, file in TAKEN
    ),
]


@pytest.mark.parametrize("case", CLASHES, ids=lambda case: case[2])
def test_a_rename_into_the_stored_name_of_another_leaf(case, tmp_path):
    tree, rules, clash, *flags = case
    ckpt = put(tmp_path / "saved", tree, **dict(*flags))
    message = re.escape(f"two leaves would be stored under one name\n  {clash}")
    with pytest.raises(reshard.TreeMismatchError, match=message):
        reshard.save(reshard.rename(ckpt, rules), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("flags", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["a/0", "a/c", "a/c/0", "a/b"])
@pytest.mark.parametrize("fills", [False, True])
def test_a_leaf_below_the_name_of_another(flags, name, fills, tmp_path):
    """The chunks of `a` are `a/0.0`, or with zarr v3 below `a/c`: names of another array."""
    tree = {"a": values(1), name: values(2), "z": values(3)}
    ckpt = put(tmp_path / "saved", tree, **flags)
    if fills:  # as Orbax wrote by default once: chunks that are not there hold the fill value
        document = tmp_path / "saved" / "_METADATA"
        layouts.edit_document(document, store_array_data_equal_to_fill_value=False)
        ckpt = reshard.open(tmp_path / "saved")
    assert_same(by_reshard(ckpt), flatten_dict(tree))
    for chunks in ("keep", 24):
        out = tmp_path / f"out{chunks}"
        reshard.save(ckpt, out, chunks=chunks)
        assert_same(flatten_dict(layouts.load_pytree(out)), flatten_dict(tree))
        assert_same(by_reshard(reshard.open(out)), flatten_dict(tree))


# Keys that TensorStore's driver for files refuses, or takes for others.
NO_FILE = "TensorStore takes `\\` for `/`, and keeps names that end in `.__lock` for locks"
NOT_FILES = {
    **dict.fromkeys(["a\\b", "b\\", "c.__lock", "d.__lock/e"], NO_FILE),
    **dict.fromkeys(["f//g", "h/./i"], "its name is not a valid path"),
}


@pytest.mark.parametrize("zarr3", [False, True])
def test_names_that_files_cannot_have(zarr3, tmp_path):
    """All of it is in the plan; a database has no files, and Orbax reads it."""
    tree = {key: values(seed) for seed, key in enumerate(NOT_FILES)} | {"w": values(99)}
    ckpt, out = put(tmp_path / "saved", tree, use_zarr3=zarr3), tmp_path / "out"
    told = [f"{format_path((key,))}: {why}" for key, why in sorted(NOT_FILES.items())]
    summary = "some arrays cannot be stored as plain files"
    for plan in (reshard.plan(ckpt, ocdbt=False), reshard.plan(ckpt, out, ocdbt=False)):
        assert plan.problems == (summary, *told)
        assert plan.hints == ("ocdbt=True stores them in a database",)
    with pytest.raises(reshard.ArgumentError, match=summary):
        reshard.save(ckpt, out, ocdbt=False)
    assert not list(tmp_path.glob("*out*"))
    reshard.save(ckpt, out, ocdbt=True)
    assert_same(flatten_dict(layouts.load_pytree(out)), flatten_dict(tree))


SLASHED = {"a/": values(1), "b": {"c//": values(2, ()), "/": values(3, (4, 2))}, "w": values(4)}


@pytest.mark.parametrize("out", [{}, {"ocdbt": False}], ids=str)
@pytest.mark.parametrize("flags", FORMATS, ids=str)
def test_keys_that_end_in_a_slash(flags, out, tmp_path):
    """TensorStore stores the arrays `a/` and `a` in one place. `a/` is read, but only written under
    another name: readers may disagree on such names."""
    tree = dict(SLASHED)
    if not flags.get("use_ocdbt", True):  # where Orbax cannot save it
        tree["b"] = {"/": tree["b"]["/"]}
    ckpt = put(tmp_path / "saved", tree, **flags)
    assert_same(by_reshard(ckpt), flatten_dict(tree))
    slashed = sorted(path for path in ckpt if path != ("w",))
    with pytest.raises(reshard.TreeMismatchError) as caught:
        reshard.save(ckpt, tmp_path / "out", **out)
    assert caught.value.summary == "some names cannot be stored"
    lines = [f"{format_path(path)}: its name ends in `/`" for path in slashed]
    assert sorted(caught.value.problems) == sorted(lines)
    renamed = reshard.rename(ckpt, [('/+"$', '"')])
    reshard.save(renamed, tmp_path / "out", **out)
    read = flatten_dict(layouts.load_pytree(tmp_path / "out"))
    assert_same(read, {(*p[:-1], p[-1].rstrip("/")): x for p, x in flatten_dict(tree).items()})
    for wrong, why in {"w/": "ends in `/`", "../../evil": "points outside the checkpoint"}.items():
        back = reshard.rename(reshard.open(tmp_path / "out"), [("^w$", f'"{wrong}"')])
        assert reshard.plan(back).problems[1:] == (f'"{wrong}": its name {why}',)


def test_a_key_and_the_same_with_a_slash(tmp_path):
    """Orbax saves both as one array."""
    ckpt = put(tmp_path / "saved", {"a": values(1), "a/": values(2)})
    assert [leaf.same_name for leaf in ckpt.arrays] == [("a/",), ("a",)]


PARTS = ["\\", "/", ".", ".__lock/", "%2F", "*", "?", ":", "\n", "#"]
CHARACTERS = st.characters(exclude_categories=["Cs"])
ODD = st.lists(st.sampled_from(PARTS) | CHARACTERS, max_size=3).map(lambda p: f"x{''.join(p)}y")


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keys=st.sets(ODD, min_size=4, max_size=8), zarr3=st.booleans())
def test_orbax_reads_all_names_of_files_that_a_plan_allows(keys, zarr3, tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    keys = [key for key in keys if "\0" not in key and ".." not in key.split("/")]
    assume(are_apart(keys))
    ckpt = put(folder / "saved", {key: values(i) for i, key in enumerate(keys)}, use_zarr3=zarr3)
    problems = reshard.plan(ckpt, ocdbt=False).problems
    told = {line.rpartition(": ")[0] for line in problems}
    good = {path: leaf for path, leaf in by_reshard(ckpt).items() if format_path(path) not in told}
    assume(good)
    assert all(set(path[0]) & {*"\\/"} for path in ckpt if path not in good)
    kept = reshard.select(ckpt, drop=[format_glob(path) for path in ckpt if path not in good])
    reshard.save(kept, folder / "out", ocdbt=False)
    assert_same(flatten_dict(layouts.load_pytree(folder / "out")), good)


KEYS = ["a", "b", "a.b", "a/b", "b.a", "0", "c", "c/0", "a.b/c"]
PATHS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple)
LEAVES = st.sampled_from([(), (4,), (3, 5), "text"])


def are_apart(names, separator="/"):
    """Whether no name is another one, or below it."""
    return len(set(names)) == len(names) and not any(
        one.startswith(f"{other}{separator}") for one in names for other in names
    )


def is_tree(paths):
    return are_apart([*map("\0".join, paths)], "\0")


def name(path):
    return ".".join(path)


@st.composite
def renamed(draw):
    """Leaves that Orbax saves under names of their own, and several renames of some of them."""
    paths = [("w",)]
    for path in draw(st.lists(PATHS, min_size=2, max_size=5)):
        if is_tree([*paths, path]) and are_apart([*map(name, paths), name(path)]):
            paths.append(path)
    kinds = [draw(LEAVES) for _ in paths[1:]]
    leaves = {
        path: values(seed, kind) if isinstance(kind, tuple) else f"{kind} {seed}"
        for seed, (path, kind) in enumerate(zip(paths, [(2,), *kinds], strict=True))
    }
    # Half of the new paths spell the stored name of a leaf, or one below it, in another way.
    spelled = st.sampled_from(paths).flatmap(
        lambda path: st.sampled_from(
            [
                (name(path),),
                tuple(name(path).split(".")),
                tuple(name(path).split(".", 1)),
                (*path[:-1], f"{path[-1]}/c"),
                (*path[:-1], f"{path[-1]}/0"),
            ]
        )
    )
    renames = st.dictionaries(st.sampled_from(paths), PATHS | spelled, min_size=1, max_size=2)
    return leaves, draw(st.lists(renames, min_size=4, max_size=4))


@settings(
    max_examples=examples(12),
    deadline=None,
    phases=[Phase.generate],  # to shrink takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(job=renamed(), flags=st.sampled_from(FORMATS), chunks=st.sampled_from(["keep", 8]))
def test_renames_keep_values_or_are_refused(job, flags, chunks, tmp_path_factory):
    leaves, renames = job
    folder = tmp_path_factory.mktemp("names")
    ckpt = put(folder / "saved", unflatten_dict(leaves), **flags)
    assert_same(by_reshard(ckpt), leaves)
    for number, new in enumerate(renames):
        out = folder / f"out{number}"
        after = [new.get(path, path) for path in leaves]
        clear = is_tree(after) and are_apart([name(path) for path in after])
        # Through numbers, so that no rule matches the result of another.
        rules = [
            (f"^{re.escape(format_path(old))}$", f"number{i}") for i, old in enumerate(new)
        ] + [(f"^number{i}$", format_path(path)) for i, path in enumerate(new.values())]
        try:
            after_all = reshard.rename(ckpt, rules)
            shown = by_reshard(after_all)
            reshard.save(after_all, out, chunks=chunks)
        except reshard.TreeMismatchError:
            assert not clear
            assert not list(folder.glob(f"*out{number}*"))
            continue
        assert_same(shown, dict(zip(after, leaves.values(), strict=True)))
        assert_same(by_reshard(reshard.open(out)), shown)
        assert_same(flatten_dict(layouts.load_pytree(out)), shown)


@pytest.mark.parametrize("junk", [False, True])
def test_linked_arrays_keep_their_own_keys(junk, tmp_path):
    """A linked array takes no key of an array inside of it, nor one that belongs to no array."""
    rng = np.random.default_rng(0)
    tree = {name: rng.random((64, 64)) for name in ("a", "a/b", "c")}
    ckpt = put(tmp_path / "in", tree)
    if junk:
        layouts.database(tmp_path / "in").write("c/0.0.0", rng.bytes(1 << 14)).result()
        ckpt = reshard.open(tmp_path / "in")
    ckpt = reshard.rename(ckpt, {"^c$": "d", '^"a/b"$': "e", "^a$": "b"})
    plan = reshard.save(ckpt, tmp_path / "out")
    assert plan.shared_bytes > 0
    names = {"b": "a", "e": "a/b", "d": "c"}
    keys = {f"{new}/{key}".encode() for new in names for key in (".zarray", "0.0")}
    assert {*layouts.database(tmp_path / "out").list().result()} == keys
    assert reshard.verify(tmp_path / "out").ok
    found = layouts.load_pytree(tmp_path / "out")
    assert {n: found[n].tobytes() for n in found} == {
        n: tree[o].tobytes() for n, o in names.items()
    }


def test_a_linked_array_inside_the_name_of_one_that_is_dropped(tmp_path):
    """With zarr v3, the chunks of `a` are below the name of the array `a/c`."""
    rng = np.random.default_rng(0)
    tree = {"a": rng.random(16), "x": rng.random(16), "a/c": rng.random((256, 64))}
    ckpt = reshard.select(put(tmp_path / "in", tree, use_zarr3=True), drop="a")
    plan = reshard.save(reshard.rename(ckpt, {"^x$": "a"}), tmp_path / "out")
    assert plan.shared_bytes > 0
    found = layouts.load_pytree(tmp_path / "out")
    assert found["a"].tobytes() == tree["x"].tobytes()
    assert found["a/c"].tobytes() == tree["a/c"].tobytes()
