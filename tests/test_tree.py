"""Paths: printing, splitting, globs, renaming. Globs are compared with a matcher by recursion."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling import examples

from reshard import tree
from reshard.errors import ArgumentError, TreeMismatchError

KEYS = st.text() | st.text('ab/".\\ *?\n', max_size=6) | st.integers(0, 1000)
PATHS = st.lists(KEYS, min_size=1, max_size=6).map(tuple)
QUOTES = 'hint: quote a key that holds a slash: `params/"mlp/linear"/w`'


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "."),
        (("params", "layer_0", 3), "params/layer_0/3"),
        (("params", "mlp/linear", "w"), 'params/"mlp/linear"/w'),
        (("a.b", "c-d", "e:f"), "a.b/c-d/e:f"),
        (("",), '""'),
        (("a", "", "b"), 'a/""/b'),
        (("two words",), '"two words"'),
        (('say "hi"',), r'"say \"hi\""'),
        (("back\\slash",), "back\\slash"),
        (("back\\slash/",), r'"back\\slash/"'),
        (("tab\there",), r'"tab\there"'),
        (("größe", "层"), "größe/层"),
        (("größe/层",), '"größe/层"'),
        (("*", "**", "?"), "*/**/?"),
    ],
)
def test_format_path(path, text):
    assert tree.format_path(path) == text
    if path:
        assert tree.split_path(text) == tuple(map(str, path))


@settings(deadline=None, max_examples=examples(500))
@given(PATHS)
@example(("/",))
@example(('"',))
@example(("", ""))
@example((".",))
@example(("..", "."))
@example(("\\",))
@example(("\\/",))
@example(('\\"/"\\',))
@example(("a\x00b", "\x1f", "\x7f", "\x85", "\u2028"))
@example((0, "0", 1))
def test_splitting_undoes_formatting(path):
    assert tree.split_path(tree.format_path(path)) == tuple(map(str, path))


@settings(deadline=None, max_examples=examples(300))
@given(PATHS)
def test_a_printed_path_has_no_control_characters(path):
    assert not set(tree.format_path(path)) & set(map(chr, range(32)))


@pytest.mark.parametrize(
    "text", ["", "/", "a//b", "/a", "a/", '"a', 'a"', 'a"b"', '"a"b', '"a"/"', 'a/"b"c/d', '"\\"']
)
def test_what_is_not_a_path(text):
    with pytest.raises(ArgumentError) as caught:
        tree.split_path(text)
    assert str(caught.value) == (
        f"`{text}` is not a path: a key is empty or its quotes do not close\n\n{QUOTES}"
    )


@pytest.mark.parametrize("text", [r'"a\q"', r'a/"\u12"', '"a\nb"'])
def test_a_bad_escape_in_a_quoted_key_is_our_error(text):
    with pytest.raises(ArgumentError, match="is not a path"):
        tree.split_path(text)


@pytest.mark.parametrize("key", ["a", '"/"'])
def test_a_path_has_no_more_keys_than_a_tree_that_is_read(key):
    assert len(tree.split_path("/".join([key] * 100))) == 100
    with pytest.raises(ArgumentError) as caught:
        tree.split_path("/".join([key] * 101))
    shown = "/".join([key] * 101)[:80]
    assert str(caught.value) == f"`{shown}...` is 101 levels deep: a tree has at most 100"


# Globs


def key_matches(pattern: str, key: str) -> bool:
    if not pattern:
        return not key
    if pattern[0] == "*":
        return any(key_matches(pattern[1:], key[i:]) for i in range(len(key) + 1))
    return bool(key) and pattern[0] in ("?", key[0]) and key_matches(pattern[1:], key[1:])


def glob_matches(pattern: tuple[str, ...], path: tuple) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return (
        bool(path) and key_matches(pattern[0], str(path[0])) and glob_matches(pattern[1:], path[1:])
    )


GLOB_KEYS = st.sampled_from(["*", "**", "?", "a*", "*b", "a?", "?*", "0", "1?"]) | st.text(
    'ab*?/". \n+01', max_size=4
)
SMALL_PATHS = st.lists(
    st.text('ab/". \n+*?01', max_size=3) | st.integers(0, 11), min_size=1, max_size=4
).map(tuple)


@settings(deadline=None, max_examples=examples(1000))
@given(st.lists(GLOB_KEYS, min_size=1, max_size=4).map(tuple), SMALL_PATHS)
@example(("**",), ("a",))
@example(("a", "**"), ("a",))
@example(("a", "**"), ("ab", "a"))
@example(("**", "a", "**"), ("b", "a", "b"))
@example(("a*", "b"), ("a", "x", "b"))
@example(("*",), ("a/b",))
@example(("?",), ("",))
@example(("a.b",), ("a+b",))
@example(("a",), ("a\n",))
@example(("1?",), (11,))
@example(("a", "1", "w"), ("a", 1, "w"))
@example(("a", "07", "**"), ("a", "07", "w"))
@example(("a", "101"), ("aA",))
def test_globs_match_as_by_recursion(pattern, path):
    regex = tree.compile_glob("/".join(map(tree.format_key, pattern)))
    matched = regex.fullmatch(tree.glob_text(path)) is not None
    assert matched == glob_matches(pattern, path)


LONG = "a" * 5000


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*a" * 12 + "*b", (LONG,), False),
        ("*a" * 12 + "*b", (LONG + "b",), True),
        ("*?a" * 12 + "b*", (LONG,), False),
        ("**/*a*a*a*/" * 12 + "b", (LONG,) * 20, False),
        ("**/*a*a*a*/" * 12 + "a*", (LONG,) * 20, True),
        ("**/**/**/" * 20 + "b", ("a",) * 100, False),
        ("**/" + "a/**/" * 30 + "b", ("a",) * 100, False),
    ],
)
def test_what_a_glob_has_found_is_not_looked_for_again(pattern, path, matches):
    # Which never ends where it is.
    regex = tree.compile_glob(pattern)
    assert (regex.fullmatch(tree.glob_text(path)) is not None) == matches
    assert (regex.match(tree.glob_text((*path, "below"))) is not None) == matches


@settings(deadline=None, max_examples=examples(1000))
@given(
    st.lists(st.sampled_from(["**", "*a*b*", "*ab*", "a*?b", "?*?", "*a*", r"*\**", r"a\?*a"])),
    st.lists(st.text("ab*?", max_size=6), max_size=5),
)
def test_globs_match_as_by_a_regex_that_tries_all(pattern, path):
    def any_of(key):
        wild = {"*": "[^/]*", "?": "[^/]", r"\*": r"\*", r"\?": r"\?"}
        return "".join(wild.get(part, part) for part in re.split(r"(\\?[*?])", key)) + "/"

    slow = re.compile("".join("(?:[^/]*/)*" if key == "**" else any_of(key) for key in pattern))
    fast = tree.compile_glob("/".join(pattern)) if pattern else re.compile("")
    text, whole = tree.glob_text(tuple(path)), "".join(f"{key}/" for key in path)
    assert (fast.fullmatch(text) is None) == (slow.fullmatch(whole) is None)
    assert (fast.match(text) is None) == (slow.match(whole) is None)


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(SMALL_PATHS, max_size=8, unique=True),
    st.lists(st.lists(GLOB_KEYS, min_size=1, max_size=3).map(tuple), max_size=3),
)
def test_match_globs_is_their_union_or_names_all_that_match_nothing(paths, patterns):
    texts = ["/".join(map(tree.format_key, pattern)) for pattern in patterns]

    def hits_of(pattern):
        exact = {path for path in paths if glob_matches(pattern, path)}
        return exact or {p for p in paths if glob_matches((*pattern, "**"), p)}

    hits = list(map(hits_of, patterns))
    if all(hits):
        assert tree.match_globs(paths, texts) == set().union(*hits)
    else:
        with pytest.raises(TreeMismatchError) as caught:
            tree.match_globs(paths, texts)
        assert caught.value.summary == "no leaf matches"
        assert caught.value.problems == tuple(
            f"`{text}`" for text, hit in zip(texts, hits, strict=True) if not hit
        )


LEAVES = [
    ("params", "dense", "kernel"),
    ("params", "dense", "bias"),
    ("params", "mlp/linear", "kernel"),
    ("opt_state", 0, "mu", "dense", "kernel"),
    ("opt_state", 1, "count"),
    ("step",),
]


@pytest.mark.parametrize(
    "path, glob",
    [
        (("a*",), r"a\*"),
        (("**",), r"\*\*"),
        (("x?y", 3, "w"), r"x\?y/3/w"),
        (("a/*",), r'"a/\\*"'),
        (("a\\*",), r"a\\*"),
        (("a\\", "b.c"), "a\\/b.c"),
    ],
)
def test_a_path_as_a_glob_names_it_alone(path, glob):
    assert tree.format_glob(path) == glob
    others = [("ab",), ("a",), ("xxy", 3, "w"), ("a/b",), ("a\\b",), ("a\\\\",), ("b.c",)]
    assert tree.match_globs([path, *others], [glob]) == {path}


def test_a_glob_that_matches_leaves_is_of_these_alone():
    """As it was when no glob was of modules; what it passes over is told."""
    paths = [("a", "kernel"), ("b", "kernel", "value"), ("c", "kernel", "value"), ("kernels",)]
    assert tree.match_globs(paths, ["**/kernel"]) == {paths[0]}
    assert tree.passed_over(paths, ["**/kernel", "c/kernel", "a/*", "a/**", "?"]) == [
        "`**/kernel` matches leaves, and is taken for these alone: b/kernel/value is in a module "
        "that it matches, too"
    ]
    assert tree.match_globs(paths, ["*/kern*", "b"]) == {*paths[:2]}
    assert tree.match_globs(paths, ["b/kernel", "kernel?"]) == {paths[1], paths[3]}


def test_a_glob_of_a_model_beside_its_optimizer_needs_no_model_ahead():
    paths = [
        ("model", "pe", "value"),
        ("model", "layers", "0", "pe", "value"),
        ("optimizer", "layers", "0", "pe"),
        ("optimizer", "step"),
    ]
    for globs, expected in (
        (["pe"], [0]),
        (["layers/0/pe"], [1]),
        (["layers"], [1]),
        (["**/pe"], [2]),  # as before: a leaf of that name
        (["step"], None),
        (["*/pe"], [0]),
    ):
        if expected is None:
            with pytest.raises(TreeMismatchError):
                tree.match_globs(paths, globs)
        else:
            assert tree.match_globs(paths, globs) == {paths[i] for i in expected}


def test_all_globs_that_match_nothing_are_named_with_a_hint_each():
    with pytest.raises(TreeMismatchError) as caught:
        tree.match_globs(
            LEAVES, ["step", "params/dense/kernle", "opt_state/*/nu", "xyzzy", "params/danse"]
        )
    assert str(caught.value) == (
        "no leaf matches\n"
        "  `params/dense/kernle`\n"
        "  `opt_state/*/nu`\n"
        "  `xyzzy`\n"
        "  `params/danse`\n"
        "\n"
        "hint: the nearest leaf is `params/dense/kernel`\n"
        "hint: the nearest leaf is `opt_state/1/count`\n"
        "hint: the nearest leaf is `params/dense/bias`"
    )


def test_nearest_is_at_most_three_best_first():
    paths = [("params", f"layer_{i}", "kernel") for i in range(9)] + [("step",)]
    near = tree.nearest("params/layer_4/kernel", paths)
    assert len(near) == 3
    assert near[0] == "params/layer_4/kernel"
    assert tree.nearest("zzz", paths) == []


# Renaming


def test_rename_applies_rules_in_order_and_leaves_the_rest_alone():
    renamed = tree.rename_paths(
        LEAVES, [("^params/", "model/"), ("/kernel$", "/w"), (r"^model/(\w+)/w", r"model/\1/W")]
    )
    assert renamed == {
        LEAVES[0]: ("model", "dense", "W"),
        LEAVES[1]: ("model", "dense", "bias"),
        LEAVES[2]: ("model", "mlp/linear", "w"),
        LEAVES[3]: ("opt_state", 0, "mu", "dense", "w"),
        LEAVES[4]: ("opt_state", 1, "count"),
        LEAVES[5]: ("step",),
    }


def test_rename_swaps_by_way_of_a_third_name():
    paths = [("a", "w"), ("b", "w")]
    rules = [("^a/", "t/"), ("^b/", "a/"), ("^t/", "b/")]
    assert tree.rename_paths(paths, rules) == {paths[0]: ("b", "w"), paths[1]: ("a", "w")}


def test_rename_without_rules_is_the_identity():
    paths = [("a", 0, "0"), ("a b", "c/d"), ()]
    assert tree.rename_paths(paths, []) == {path: path for path in paths}


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4).map(tuple))
def test_rename_of_a_prefix_keeps_the_keys_below_it(keys):
    old = ("root", *keys)
    assert tree.rename_paths([old], [("^root/", "top/")]) == {old: ("top", *keys)}


def test_list_positions_stay_positions_and_dict_keys_stay_dict_keys():
    paths = [("layers", 0, "w"), ("layers", 10, "w"), ("table", "0"), ("table", "10")]
    renamed = tree.rename_paths(paths, [("^layers", "blocks"), ("^table", "lookup")])
    assert renamed == {
        paths[0]: ("blocks", 0, "w"),
        paths[1]: ("blocks", 10, "w"),
        paths[2]: ("lookup", "0"),
        paths[3]: ("lookup", "10"),
    }
    assert [[type(key) for key in path] for path in renamed.values()] == [
        [str, int, str],
        [str, int, str],
        [str, str],
        [str, str],
    ]


def test_new_digits_are_dict_keys():
    paths = [("layers", "first"), ("layers", 0)]
    renamed = tree.rename_paths(paths[:1], [("first", "7")])
    assert renamed == {paths[0]: ("layers", "7")}
    assert tree.rename_paths(paths[1:], [("0", "7")]) == {paths[1]: ("layers", "7")}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("old", 0, "0", "w"), ("new", 0, "0", "w")),
        (("old", "0", 0, "w"), ("new", "0", 0, "w")),
        (("old", 1, "0", 0, "1"), ("new", 1, "0", 0, "1")),
    ],
)
def test_a_dict_key_does_not_become_a_position_of_the_same_digits(old, new):
    renamed = tree.rename_paths([old], [("^old/", "new/")])
    assert renamed == {old: new}
    assert list(map(type, renamed[old])) == list(map(type, new))


def test_leaves_that_meet_are_all_named():
    paths = [("a", "w"), ("b", "w"), ("c", "w"), ("d", "v"), ("e", "v"), ("f",)]
    with pytest.raises(TreeMismatchError) as caught:
        tree.rename_paths(paths, [("^[abc]/", "x/"), ("^[de]/", '"y z"/')])
    assert str(caught.value) == (
        "leaves would meet in one place after renaming\n"
        "  a/w and b/w -> x/w\n"
        "  a/w and c/w -> x/w\n"
        '  d/v and e/v -> "y z"/v'
    )


def test_a_leaf_that_stays_counts_as_taken():
    with pytest.raises(TreeMismatchError) as caught:
        tree.rename_paths([("new",), ("old",)], [("^old$", "new")])
    assert str(caught.value) == (
        "leaves would meet in one place after renaming\n  new and old -> new"
    )


def test_a_position_and_a_dict_key_of_the_same_digits_meet():
    with pytest.raises(TreeMismatchError) as caught:
        tree.rename_paths([("a", 0), ("b", "0")], [("^b/", "a/")])
    assert str(caught.value) == (
        "leaves would meet in one place after renaming\n  a/0 and b/0 -> a/0"
    )


def test_a_leaf_may_not_go_below_a_leaf():
    paths = [("params", "w"), ("scale",), ("deep", "x", "y")]
    with pytest.raises(TreeMismatchError) as caught:
        tree.rename_paths(paths, [("^scale$", "params/w/scale"), ("^deep/", "params/w/")])
    assert str(caught.value) == (
        "leaves would meet in one place after renaming\n"
        "  scale -> params/w/scale, below the leaf params/w -> params/w\n"
        "  deep/x/y -> params/w/x/y, below the leaf params/w -> params/w"
    )


def test_rules_that_match_nothing_are_all_named():
    with pytest.raises(TreeMismatchError) as caught:
        tree.rename_paths(LEAVES, [("^nope/", "x/"), ("^params/", "p/"), ("^params/", "q/")])
    assert str(caught.value) == (
        "a rename changes nothing\n  `^nope/` matches no leaf\n  `^params/` matches no leaf"
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("(", "x"), "rename `(=x`: missing ), unterminated subpattern at position 0"),
        (("^step$", r"\2"), r"rename `^step$=\2`: invalid group reference 2 at position 1"),
        (("^step$", r"\g<n>"), r"rename `^step$=\g<n>`: unknown group name 'n'"),
    ],
)
def test_a_rule_that_is_not_a_regex(rule, message):
    with pytest.raises(ArgumentError) as caught:
        tree.rename_paths(LEAVES, [rule])
    assert str(caught.value) == message


def test_a_rule_that_leaves_no_name():
    with pytest.raises(ArgumentError) as caught:
        tree.rename_paths(LEAVES, [("^step$", "")])
    assert str(caught.value) == (
        f"`` is not a path: a key is empty or its quotes do not close\n\n{QUOTES}"
    )


# Lists


@pytest.mark.parametrize(
    "paths",
    [
        [],
        [()],
        [("a", 0), ("a", 1), ("a", 2)],
        [("a", 1), ("a", 0)],
        [("a", 0, "x"), ("a", 0, "y"), ("a", 1, "x")],
        [("a", "1"), ("a", "3")],
        [(0, 0), (0, 1), (1, 0)],
    ],
)
def test_whole_lists_pass(paths):
    assert tree.check_lists(paths) is None


def test_every_list_with_a_gap_is_named():
    paths = [
        ("a", 0),
        ("a", 2),
        ("a", 5),
        ("b", 1, "w"),
        ("c", 0),
        ("c", 1),
        ("d", 0, "two words", 3),
        ("e", 0),
        ("e", "y"),
        ("e", "x z"),
        ("e", "w"),
        ("e", "v"),
    ]
    with pytest.raises(TreeMismatchError) as caught:
        tree.check_lists(paths)
    assert str(caught.value) == (
        "a list would lose positions, and what follows would shift\n"
        "  a has position 2 but no position 1\n"
        "  b has position 1 but no position 0\n"
        '  d/0/"two words" has position 3 but no position 0\n'
        '  e has list positions and dict keys: "x z", v, w\n'
        "\n"
        "hint: drop the whole list, or keep all of it"
    )


def test_a_gap_at_the_root():
    with pytest.raises(TreeMismatchError) as caught:
        tree.check_lists([(1,), (2,)])
    assert caught.value.problems == (". has position 1 but no position 0",)
