"""Ordered (path regex, spec) pairs, and logical names through rules, as Flax resolves them."""

import dataclasses
import re

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core.spmd import from_sharding_rules
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layouts import raised, refused
from releases import OUT_SHARDING
from sampling import examples

from reshard.errors import ShardingError
from reshard.sharding.mesh import normalize_spec
from reshard.sharding.rules import match_specs, parse_rules, resolve_names
from reshard.tree import format_path, match_globs, regex_of_glob

LEAVES = [
    ("params", "dense", "kernel"),
    ("params", "dense", "bias"),
    ("params", "mlp/linear", "kernel"),
    ("opt_state", 0, "mu", "dense", "kernel"),
    ("step",),
]


def test_the_first_regex_that_matches_the_printed_path_wins():
    rules = [
        ("^params/dense/kernel$", P("data", "model")),
        ('^params/"mlp/linear"/', "data+model,"),
        ("^opt_state/0/mu", [None, ("model",)]),
        ("kernel|bias", None),
    ]
    assert match_specs(iter(LEAVES), rules) == {
        LEAVES[0]: (("data",), ("model",)),
        LEAVES[1]: (),
        LEAVES[2]: (("data", "model"), ()),
        LEAVES[3]: ((), ("model",)),
    }


@settings(deadline=None)
@given(
    st.lists(st.text("ab/", max_size=4).map(lambda t: ("r", t)), unique=True),
    st.lists(st.tuples(st.text("ab.$", min_size=1, max_size=3), st.sampled_from(["x", "y", ""]))),
)
def test_match_specs_against_a_plain_loop(paths, rules):
    dead = tuple(
        f"`{regex}`"
        for regex, _ in rules
        if not any(re.search(regex, format_path(path)) for path in paths)
    )
    if dead:
        assert raised(ShardingError, match_specs, paths, rules).problems == dead
        return
    hits = {
        path: [spec for regex, spec in rules if re.search(regex, format_path(path))]
        for path in paths
    }
    assert match_specs(paths, rules) == {
        path: ((specs[0],),) if specs[0] else () for path, specs in hits.items() if specs
    }


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            [("^param/dense/kernel", "data"), ("kernel", "data"), ("bais$", "")],
            "no array matches the regex of a spec\n  `^param/dense/kernel`\n  `bais$`\n\n"
            "hint: the nearest leaf is `params/dense/kernel`\n"
            "hint: the nearest leaf is `params/dense/bias`",
        ),
        (  # one is a glob
            [("(", "data"), ("kernel", "data"), ("params/den?e/**", "")],
            "the specs cannot be read\n"
            "  `(` is not a regex: missing ), unterminated subpattern at position 0\n"
            "  `params/den?e/**` is not a regex: multiple repeat at position 14\n\n"
            "hint: as a regex, the glob `params/den?e/**` is `^params/den[^/]e/`",
        ),
    ],
)
def test_every_regex_that_matches_nothing_or_does_not_compile_is_named(rules, text):
    assert refused(ShardingError, match_specs, LEAVES, rules) == text


def test_the_regex_of_a_glob_matches_the_same_paths():
    for glob in ("**/kernel", "params/**", "*/den*/kernel", "**/den?e/**", "params/dense/kernel"):
        regex = re.compile(regex_of_glob(glob))
        assert {p for p in LEAVES if regex.search(format_path(p))} == match_globs(LEAVES, [glob])


# Logical names: the forms of rules.


@dataclasses.dataclass(unsafe_hash=True)
class MeshRules:
    """The dataclass of the NNX sharding guides."""

    embed: str | None = None
    mlp: str | None = None
    vocab: tuple[str, ...] | None = None

    def __call__(self, *keys):
        return tuple(getattr(self, key) for key in keys)


PARSED = (("embed", ()), ("mlp", ("model",)), ("vocab", ("data", "model")))
BY_NAME = {"embed": None, "mlp": "model", "vocab": ("data", "model")}
LISTS = {"embed": [], "mlp": "model", "vocab": ["data", "model"]}


@pytest.mark.parametrize(
    "rules",
    [
        *(BY_NAME, [*BY_NAME.items()], iter(BY_NAME.items()), BY_NAME.__getitem__),
        *(PARSED, [[*rule] for rule in LISTS.items()], LISTS.__getitem__),
        MeshRules(mlp="model", vocab=("data", "model")),
    ],
)
def test_every_form_of_rules_means_the_same(rules):
    assert parse_rules(rules, iter(["embed", "mlp", "vocab"])) == PARSED


@pytest.mark.parametrize("error", [AttributeError, KeyError, ValueError])
def test_a_name_that_a_callable_refuses_has_no_rule(error):
    def rules(name):
        if name == "other":
            raise error(name)
        return name.upper()

    assert parse_rules(rules, ["a", "other", "b"]) == (("a", ("A",)), ("b", ("B",)))
    with pytest.raises(ZeroDivisionError):  # other errors are the callable's own
        parse_rules(lambda name: 1 / 0, ["a"])


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        *(("embed", ["'embed'"]), ("", ["''"]), (3, ["3"]), (["ab"], ["'ab'"])),
        (("embed", "data"), ["'embed'", "'data'"]),
        ([("embed",), ("mlp", "model"), ("a", "b", "c")], ["('embed',)", "('a', 'b', 'c')"]),
        ([(1, "data"), ("mlp", ("data", 1))], ["(1, 'data')", "('mlp', ('data', 1))"]),
        ([("embed", ("data", None))], ["('embed', ('data', None))"]),
        ({"embed": 1, "mlp": "model", None: "x"}, ["('embed', 1)", "(None, 'x')"]),
        (lambda name: 7, ["('embed', 7)"]),
    ],
)
def test_all_wrong_rules_are_listed(rules, named):
    lines = "".join(f"  {name}\n" for name in named)
    assert refused(ShardingError, parse_rules, rules, ["embed"]) == (
        "a rule must be a pair: a logical name, and a mesh axis, a tuple of mesh axes, or "
        f"None\n{lines}\n"
        'hint: rules=[("embed", "data"), ("vocab", ("data", "model")), ("kv", None)]'
    )


# Logical names: what rules make of them, against Flax.

NAMES = st.sampled_from(["embed", "mlp", "heads", "kv", "x", "y"])
AXES = st.sampled_from(["x", "y", "z", "w"])
VALUES = st.one_of(st.none(), AXES, st.lists(AXES, max_size=3, unique=True).map(tuple))
RULES = st.lists(st.tuples(NAMES, VALUES), max_size=9)
# No name twice, which Linen refuses.
ENTRIES = st.one_of(
    NAMES, st.none(), st.lists(AXES, min_size=1, max_size=2, unique=True).map(tuple)
)
UNIQUE = st.lists(ENTRIES, max_size=5, unique_by=lambda n: n if isinstance(n, str) else object())
ANY = st.lists(ENTRIES, max_size=5)


def without_rule(names, rules):
    known = {name for name, _ in rules}
    return [name for name in names if isinstance(name, str) and name not in known]


@settings(deadline=None, max_examples=examples(400))
@given(UNIQUE.map(tuple), RULES)
def test_linen_is_logical_to_mesh_axes(names, rules):
    missing = without_rule(names, rules)
    for passes in (False, True):
        found = resolve_names(names, parse_rules(rules, ()), "linen", passes)
        # Names that are mesh axes take them first.
        axes = tuple((name,) if passes and name in missing else name for name in names)
        assert found.spec == normalize_spec(nn.logical_to_mesh_axes(axes, tuple(rules)))
        assert found.unmatched == tuple(missing)


@settings(deadline=None, max_examples=examples(400))
@given(ANY.map(tuple), RULES)
def test_nnx_is_get_partition_spec(names, rules):
    """By the last rule of each name; names without one may be replicated."""
    parsed, missing = parse_rules(rules, ()), without_rule(names, rules)
    found = resolve_names(names, parsed, "nnx", passes=True)
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.zeros(()), **{OUT_SHARDING: names}, sharding_rules=tuple(rules))
    assert found.spec == normalize_spec(nnx.get_partition_spec(variable).get_value())
    assert found.spec == normalize_spec(from_sharding_rules(names, rules))
    assert found.unmatched == tuple(dict.fromkeys(missing))
    last = {name: position for position, (name, _) in enumerate(rules)}
    assert found.used == tuple(last[name] for name in names if name in last)
    kept = tuple(None if name in missing else name for name in names)
    replicated = resolve_names(names, parsed, "nnx", passes=False)
    assert replicated.spec == normalize_spec(from_sharding_rules(kept, rules))


def test_a_name_that_occurs_twice():
    """Linen refuses it. Here each dimension takes one rule: the caller reports a problem."""
    rules = parse_rules([("a", "x"), ("a", "y"), ("b", "z")], ())
    names = ("a", "b", "a")
    with pytest.raises(ValueError, match="occur more than once"):
        nn.logical_to_mesh_axes(names, rules)
    assert resolve_names(names, rules, "linen", False) == ((("x",), ("z",), ("y",)), (0, 2, 1), ())
    assert resolve_names(names, rules, "nnx", True) == ((("y",), ("z",), ("y",)), (1, 2, 1), ())
