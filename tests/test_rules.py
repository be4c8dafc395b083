"""Ordered (path regex, spec) pairs."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from reshard.errors import ShardingError
from reshard.rules import match_specs
from reshard.tree import format_path

LEAVES = [
    ("params", "dense", "kernel"),
    ("params", "dense", "bias"),
    ("params", "mlp/linear", "kernel"),
    ("opt_state", 0, "mu", "dense", "kernel"),
    ("step",),
]


def test_the_first_match_wins_and_the_rest_is_left_out():
    rules = [
        ("^params/dense/kernel$", P("data", "model")),
        ("mlp", "data+model,"),
        ("kernel", [None, ("model",)]),
        ("bias", None),
    ]
    assert match_specs(iter(LEAVES), rules) == {
        LEAVES[0]: (("data",), ("model",)),
        LEAVES[1]: (),
        LEAVES[2]: (("data", "model"), ()),
        LEAVES[3]: ((), ("model",)),
    }


def test_order_decides():
    specific, general = ("^params/dense/kernel$", "data"), ("kernel$", "model")
    assert match_specs(LEAVES[:1], [specific, general]) == {LEAVES[0]: (("data",),)}
    assert match_specs(LEAVES[:1], [general, specific]) == {LEAVES[0]: (("model",),)}


def test_a_rule_sees_the_printed_path():
    assert match_specs(LEAVES, [('^params/"mlp/linear"/', "data")]) == {LEAVES[2]: (("data",),)}
    assert match_specs(LEAVES, [("^opt_state/0/mu", "data")]) == {LEAVES[3]: (("data",),)}


def test_without_rules_nothing_is_chosen():
    assert match_specs(LEAVES, []) == {}


def test_a_rule_that_earlier_ones_shadow_is_no_error():
    assert match_specs(LEAVES, [("step", ""), ("^st", "data")]) == {LEAVES[4]: ()}


@settings(deadline=None)
@given(
    st.lists(st.text("ab/", max_size=4).map(lambda t: ("r", t)), unique=True),
    st.lists(st.tuples(st.text("ab.$", min_size=1, max_size=3), st.sampled_from(["x", "y", ""]))),
)
def test_match_specs_by_going_through_all(paths, rules):
    dead = tuple(
        f"`{regex}`"
        for regex, _ in rules
        if not any(re.search(regex, format_path(path)) for path in paths)
    )
    if dead:
        with pytest.raises(ShardingError) as caught:
            match_specs(paths, rules)
        assert caught.value.summary == "no array matches the regex of a spec"
        assert caught.value.problems == dead
        return
    expected = {}
    for path in paths:
        for regex, spec in rules:
            if re.search(regex, format_path(path)):
                expected[path] = ((spec,),) if spec else ()
                break
    assert match_specs(paths, rules) == expected


def test_every_regex_that_matches_nothing_is_named():
    rules = [("^param/dense/kernel", "data"), ("kernel", "data"), ("xyzzy", ""), ("bais$", "")]
    with pytest.raises(ShardingError) as caught:
        match_specs(LEAVES, rules)
    assert str(caught.value) == (
        "no array matches the regex of a spec\n"
        "  `^param/dense/kernel`\n"
        "  `xyzzy`\n"
        "  `bais$`\n"
        "\n"
        "hint: the nearest leaf is `params/dense/kernel`\n"
        "hint: the nearest leaf is `params/dense/bias`"
    )


def test_every_regex_that_does_not_compile_is_named():
    with pytest.raises(ShardingError) as caught:
        match_specs(LEAVES, [("(", "data"), ("kernel", "data"), ("[a", "")])
    assert str(caught.value) == (
        "the spec rules cannot be read\n"
        "  `(` is not a regex: missing ), unterminated subpattern at position 0\n"
        "  `[a` is not a regex: unterminated character set at position 0"
    )


def test_a_spec_that_is_none():
    with pytest.raises(ShardingError) as caught:
        match_specs(LEAVES, [("kernel", ["data", 3])])
    assert str(caught.value) == "not a partition spec: ['data', 3]"
