"""Paths: printing, splitting, globs, renaming. Globs are compared with a matcher by recursion."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import refused
from sampling import examples

from reshard import tree
from reshard.errors import ArgumentError, TreeMismatchError, printable

KEYS = st.text() | st.text('ab/".\\ *?\n', max_size=6) | st.integers(0, 1000)
PATHS = st.lists(KEYS, min_size=1, max_size=6).map(tuple)
QUOTES = 'hint: quote a key that holds a slash: `params/"mlp/linear"/w`'


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "."),
        (("params", "layer_0", 3), "params/layer_0/3"),
        (("params", "mlp/linear", "w"), 'params/"mlp/linear"/w'),
        (("a.b", "", "e:f", "two words"), 'a.b/""/e:f/"two words"'),
        (('say "hi"', "tab\there"), r'"say \"hi\""/"tab\there"'),
        (("back\\slash", "back\\slash/"), r'back\slash/"back\\slash/"'),
        (("größe", "größe/层"), 'größe/"größe/层"'),
        (("*", "**", "?"), "*/**/?"),
    ],
)
def test_format_path(path, text):
    assert tree.format_path(path) == text
    if path:
        assert tree.split_path(text) == tuple(map(str, path))


@settings(deadline=None, max_examples=examples(500))
@given(PATHS)
@example(("/", '"', "", ".", "..", "\\", "\\/", '\\"/"\\', 0, "0"))
@example((".",))
@example(("",))
@example(("a\x00b", "\x1f", "\x7f", "\x85", "\u2028"))
def test_splitting_undoes_formatting(path):
    assert tree.split_path(tree.format_path(path)) == tuple(map(str, path))
    assert not set(tree.format_path(path)) & set(map(chr, range(32)))  # no control characters


NO_PATHS = ["", "/", "a//b", "/a", "a/", '"a', 'a"', 'a"b"', '"a"b', '"a"/"', 'a/"b"c/d', '"\\"']


@pytest.mark.parametrize("text", [*NO_PATHS, r'"a\q"', r'a/"\u12"', '"a\nb"'])
def test_what_is_not_a_path(text):
    told = refused(ArgumentError, tree.split_path, text)
    head, tail = f"`{printable(text)}` is not a path: ", f"\n\n{QUOTES}"
    assert told.startswith(head) and told.endswith(tail)
    if text in NO_PATHS:  # json's own words about the others
        assert told == f"{head}a key is empty or its quotes do not close{tail}"


@pytest.mark.parametrize("key", ["a", '"/"'])
def test_a_path_has_no_more_keys_than_a_tree_that_is_read(key):
    assert len(tree.split_path("/".join([key] * 100))) == 100
    shown = "/".join([key] * 101)[:80]
    text = f"`{shown}...` is 101 levels deep: a tree has at most 100"
    assert refused(ArgumentError, tree.split_path, "/".join([key] * 101)) == text


# Globs


def key_matches(pattern: str, key: str) -> bool:
    if not pattern:
        return not key
    if pattern[0] == "*":
        return any(key_matches(pattern[1:], key[i:]) for i in range(len(key) + 1))
    if pattern[:2] in (r"\*", r"\?"):
        return key[:1] == pattern[1] and key_matches(pattern[2:], key[1:])
    return bool(key) and pattern[0] in ("?", key[0]) and key_matches(pattern[1:], key[1:])


def glob_matches(pattern: tuple[str, ...], path: tuple) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return (
        bool(path) and key_matches(pattern[0], str(path[0])) and glob_matches(pattern[1:], path[1:])
    )


def lists_of(keys, least, most):
    return st.lists(keys, min_size=least, max_size=most).map(tuple)


GLOB_KEYS = st.sampled_from(["*", "**", "?", "a*", "*b", "a?", "?*", "0", "1?"])
GLOB_KEYS |= st.text('ab*?/". \n+01', max_size=4)
WILD_KEYS = st.sampled_from(["**", "*a*b*", "*ab*", "a*?b", "?*?", "*a*", r"*\**", r"a\?*a"])
SMALL_PATHS = lists_of(st.text('ab/". \n+*?01', max_size=3) | st.integers(0, 11), 1, 4)


@settings(deadline=None, max_examples=examples(2000))
@given(
    lists_of(GLOB_KEYS, 1, 4) | lists_of(WILD_KEYS, 1, 6),
    SMALL_PATHS | lists_of(st.text("ab*?", max_size=6), 0, 5),
)
@example(("a", "**"), ("a",))
@example(("a", "**"), ("ab", "a"))
@example(("**", "a", "**"), ("b", "a", "b"))
@example(("a*", "b"), ("a", "x", "b"))
@example(("*", "?"), ("a/b", ""))
@example(("a.b",), ("a+b",))
@example(("a",), ("a\n",))
@example(("1?", "1", "07", "**"), (11, 1, "07", "w"))
@example(("a", "101"), ("aA",))
def test_globs_match_as_by_recursion(pattern, path):
    regex, text = tree.compile_glob("/".join(map(tree.format_key, pattern))), tree.glob_text(path)
    assert (regex.fullmatch(text) is not None) == glob_matches(pattern, path)
    assert (regex.match(text) is not None) == glob_matches((*pattern, "**"), path)


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


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(SMALL_PATHS, max_size=8, unique=True),
    st.lists(lists_of(GLOB_KEYS, 1, 3), max_size=3),
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
    """A note lists what it passes over."""
    paths = [("a", "kernel"), ("b", "kernel", "value"), ("c", "kernel", "value")]
    assert tree.passed_over(paths, ["**/kernel", "c/kernel", "a/*", "a/**", "?"]) == [
        "`**/kernel` matches leaves, so it applies to these alone: b/kernel/value is in a module "
        "that it matches, too"
    ]


def test_a_glob_of_a_model_beside_its_optimizer_needs_no_model_ahead():
    paths = [
        ("model", "pe", "value"),
        ("model", "layers", "0", "pe", "value"),
        ("optimizer", "layers", "0", "pe"),
        ("optimizer", "step"),
    ]
    for glob, expected in (
        ("pe", 0),
        ("layers/0/pe", 1),
        ("layers", 1),
        ("**/pe", 2),  # as before: a leaf of that name
        ("*/pe", 0),
    ):
        assert tree.match_globs(paths, [glob]) == {paths[expected]}
    with pytest.raises(TreeMismatchError):
        tree.match_globs(paths, ["step"])


def test_all_globs_that_match_nothing_are_named_with_a_hint_each():
    globs = ["step", "params/dense/kernle", "opt_state/*/nu", "xyzzy", "params/danse"]
    near = ("params/dense/kernel", "opt_state/1/count", "params/dense/bias")
    assert refused(TreeMismatchError, tree.match_globs, LEAVES, globs) == "\n".join(
        [
            "no leaf matches",
            *(f"  `{glob}`" for glob in globs[1:]),
            "",
            *(f"hint: the nearest leaf is `{leaf}`" for leaf in near),
        ]
    )
    paths = [("params", f"layer_{i}", "kernel") for i in range(9)] + [("step",)]
    first, *others = tree.nearest("params/layer_4/kernel", paths)
    assert (first, len(others)) == ("params/layer_4/kernel", 2)
    for glob in ("**/kernal/**", "parms/**", "**/kernal"):
        assert tree.nearest(glob, paths) == ["params/layer_8/kernel"]


# Renaming


@pytest.mark.parametrize(
    ("paths", "rules", "expected"),
    [
        (  # in their order
            LEAVES,
            [("^params/", "model/"), ("/kernel$", "/w"), (r"^model/(\w+)/w", r"model/\1/W")],
            [
                *(("model", "dense", "W"), ("model", "dense", "bias")),
                *(("model", "mlp/linear", "w"), ("opt_state", 0, "mu", "dense", "w")),
                *(("opt_state", 1, "count"), ("step",)),
            ],
        ),
        (  # swapped by way of a third name
            [("a", "w"), ("b", "w")],
            [("^a/", "t/"), ("^b/", "a/"), ("^t/", "b/")],
            [("b", "w"), ("a", "w")],
        ),
        ([("a", 0, "0"), ("a b", "c/d")], [], [("a", 0, "0"), ("a b", "c/d")]),
        ([()], [], [()]),
        ([()], [(r"^\.$", "params/w")], [("params", "w")]),
        (  # positions stay positions, and dict keys dict keys
            [("layers", 0, "w"), ("layers", 10, "w"), ("table", "0"), ("table", "10")],
            [("^layers", "blocks"), ("^table", "lookup")],
            [("blocks", 0, "w"), ("blocks", 10, "w"), ("lookup", "0"), ("lookup", "10")],
        ),
        # New digits are dict keys.
        ([("layers", "first")], [("first", "7")], [("layers", "7")]),
        ([("layers", 0)], [("0", "7")], [("layers", "7")]),
        # A dict key does not become a position of the same digits.
        ([("old", 1, "0", 0, "1")], [("^old/", "new/")], [("new", 1, "0", 0, "1")]),
    ],
)
def test_rename_applies_rules_and_leaves_the_rest_alone(paths, rules, expected):
    renamed = tree.rename_paths(paths, rules)
    assert renamed == dict(zip(paths, expected, strict=True))
    types = [[type(key) for key in path] for path in renamed.values()]
    assert types == [[type(key) for key in path] for path in expected]


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4).map(tuple))
def test_rename_of_a_prefix_keeps_the_keys_below_it(keys):
    old = ("root", *keys)
    assert tree.rename_paths([old], [("^root/", "top/")]) == {old: ("top", *keys)}


MEET = "leaves would have the same path, or one below another, after renaming\n"


@pytest.mark.parametrize(
    ("paths", "rules", "text"),
    [
        (
            [("a", "w"), ("b", "w"), ("c", "w"), ("d", "v"), ("e", "v"), ("f",)],
            [("^[abc]/", "x/"), ("^[de]/", '"y z"/')],
            f'{MEET}  a/w and b/w -> x/w\n  a/w and c/w -> x/w\n  d/v and e/v -> "y z"/v',
        ),
        # A position, and a dict key of the same digits.
        ([("a", 0), ("b", "0")], [("^b/", "a/")], f"{MEET}  a/0 and b/0 -> a/0"),
        (
            [("params", "w"), ("scale",), ("deep", "x", "y")],
            [("^scale$", "params/w/scale"), ("^deep/", "params/w/")],
            f"{MEET}  scale -> params/w/scale, below the leaf params/w -> params/w\n"
            "  deep/x/y -> params/w/x/y, below the leaf params/w -> params/w",
        ),
        (
            LEAVES,
            [("^nope/", "x/"), ("^params/", "p/"), ("^params/", "q/")],
            "a rename changes nothing\n  `^nope/` matches no leaf\n  `^params/` matches no leaf",
        ),
    ],
)
def test_renames_that_cannot_be_are_all_named(paths, rules, text):
    assert refused(TreeMismatchError, tree.rename_paths, paths, rules) == text


INVALID = [
    ("(", "x", "missing ), unterminated subpattern at position 0"),
    ("^step$", r"\2", "invalid group reference 2 at position 1"),
    ("^step$", r"\g<n>", "unknown group name 'n'"),
]


def test_a_rule_that_is_not_a_regex_or_leaves_no_name():
    for regex, new, reason in INVALID:
        told = refused(ArgumentError, tree.rename_paths, LEAVES, [(regex, new)])
        assert told == f"rename `{regex}={new}` is invalid: {reason}"
    told = refused(ArgumentError, tree.rename_paths, LEAVES, [("^step$", "")])
    assert told.startswith("`` is not a path: ")


# Lists


def test_whole_lists_pass():
    for paths in ([], [()], [("a", 1), ("a", 0), ("b", "1"), ("b", "3")], [(0, 0), (0, 1), (1, 0)]):
        tree.check_lists(paths)


def test_every_list_with_a_gap_is_named():
    paths = [("a", 0), ("a", 2), ("a", 5), ("b", 1, "w"), ("c", 0), ("c", 1)]
    paths += [("d", 0, "two words", 3), ("e", 0), *(("e", key) for key in ("y", "x z", "w", "v"))]
    assert refused(TreeMismatchError, tree.check_lists, paths) == (
        "a list would lose positions, so later elements would shift\n"
        "  a has position 2 but no position 1\n"
        "  b has position 1 but no position 0\n"
        '  d/0/"two words" has position 3 but no position 0\n'
        '  e has list positions and dict keys: "x z", v, w\n'
        "\n"
        "hint: drop the whole list, or keep all of it"
    )
    said = refused(TreeMismatchError, tree.check_lists, [(1,), (2,)])
    assert said.splitlines()[1:2] == ["  . has position 1 but no position 0"]
