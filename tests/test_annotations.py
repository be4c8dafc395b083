"""Specs of annotated leaves: their sources, specs that do not fit, and the coverage."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.sharding.annotations import AnnotatedLeaf, cover
from reshard.sharding.mesh import Mesh, spec_problems
from reshard.tree import format_path, split_path

MESH = Mesh(("data", "model"), (2, 4))
RULES = [("embed", "data"), ("mlp", "model")]


def leaf(path, shape, names=None, kind="", **kwargs):
    parameter = path.startswith("params/")
    if names is not None:
        kind = kind or "logical"
    arguments = {"path": split_path(path), "shape": shape, "itemsize": 4, "names": names}
    return AnnotatedLeaf(**{**arguments, "kind": kind, "parameter": parameter, **kwargs})


def sources_of(found):
    return {format_path(leaf.path): (leaf.spec, leaf.source, leaf.rules) for leaf in found.leaves}


def run(leaves, rules=RULES, specs=(), semantics=None, mesh=MESH):
    return cover(leaves, mesh, rules, specs, semantics)


# Where a spec comes from


DATA, MODEL = (("data",),), (("model",),)
BOTH, SWAPPED = (("data",), ("model",)), (("model",), ("data",))
NAMED = {"names": ("embed", "mlp")}
SAVED = {"saved": (("model",), ())}


def check_sources(cases, specs=()):
    """Cases: path of an 8x8 leaf, what is known of it -> its spec, source and rules."""
    found = run([leaf(path, (8, 8), **known) for path, known, *_ in cases], specs=specs)
    assert found.problems == found.hints == ()
    assert sources_of(found) == {path: tuple(expected) for path, _, *expected in cases}


def test_the_precedence_of_the_sources_of_specs():
    cases = [
        ("opt/mu/all", NAMED | SAVED, SWAPPED, "specs", ()),
        ("opt/mu/named", NAMED | SAVED, BOTH, "optimizer", (0, 1)),
        ("opt/mu/bare", {}, DATA, "optimizer", ()),
        ("opt/mu/laid_out", SAVED, SAVED["saved"], "optimizer", ()),
        ("opt/mu/nothing", {}, (), "optimizer", ()),
        ("params/all", NAMED | SAVED, DATA, "specs", ()),
        ("params/named", NAMED | SAVED, BOTH, "names", (0, 1)),
        ("params/bare", {}, DATA, "specs", ()),
        ("params/laid_out", SAVED, SAVED["saved"], "sharding", ()),
        ("params/nothing", {}, (), "none", ()),
        ("batch_stats/named", {"names": ("mlp", None)} | SAVED, (("model",), ()), "names", (1,)),
        ("batch_stats/other", {"saved": DATA}, DATA, "sharding", ()),
        ("step", {}, (), "none", ()),
    ]
    check_sources(cases, [("params/(all|bare)", P("data")), ("^opt/mu/all", "model,data")])


def test_a_moment_with_another_annotation_keeps_it():
    cases = [
        ("params/w", NAMED, BOTH, "names", (0, 1)),
        ("params/v", {"saved": DATA}, DATA, "sharding", ()),
        ("opt/same/w", NAMED, BOTH, "optimizer", (0, 1)),
        ("opt/other/w", {"names": ("mlp", "embed")}, SWAPPED, "names", (1, 0)),
        ("opt/none/w", {}, BOTH, "optimizer", (0, 1)),
        ("opt/laid_out/w", {"saved": MODEL}, MODEL, "sharding", ()),
        ("opt/same/v", {"saved": DATA}, DATA, "optimizer", ()),
        ("opt/other/v", {"saved": MODEL}, MODEL, "sharding", ()),
    ]
    check_sources(cases)


def test_an_ambiguous_moment_is_a_problem():
    leaves = [
        leaf("params/square", (8, 8), ("embed", "mlp")),
        leaf("params/free", (8, 8)),
        leaf("opt/v/square", (8,), ("embed", "mlp")),
        leaf("opt/w/square", (8,)),
        leaf("opt/w.1/square", (3, 3)),
        leaf("opt/v/free", (8,)),
        leaf("opt/w/free", (3, 3)),
    ]
    found = run(leaves)
    where = "it belongs to params/square, which is P('data', 'model'), and"
    may = "it may be over dimensions (0,) or (1,) of the parameter's [8, 8]"
    assert found.problems == (
        f"opt/v/square  [8]: {where} {may}",
        f"opt/w/square  [8]: {where} {may}",
        f"opt/w.1/square  [3, 3]: {where} its shape is not a part of the parameter's, [8, 8]",
    )
    regexes = ['"^opt/v/square$"', '"^opt/w/square$"', r'r"^opt/w\.1/square$"']
    assert found.hints == tuple(f"specs=[({x}, P(...))] says how to split it" for x in regexes)
    said = run(leaves, specs=[("^opt/v/square$", "model"), (r"^opt/w(\.1)?/square$", "")])
    assert said.problems == said.hints == ()
    specs = [BOTH, (), MODEL, (), (), ((),), ()]
    assert [each.spec for each in said.leaves] == specs


# Names


@pytest.mark.parametrize("kind", ["mesh", "nnx"])
@pytest.mark.parametrize("rules", [None, [], {}])
def test_without_rules_names_are_mesh_axes(kind, rules):
    names = ("model", None, ("data",), "data")
    found = run([leaf("params/w", (8, 3, 2), names[:3], kind)], rules)
    assert found.problems == found.hints == ()
    assert found.unmatched == {}
    assert [each.spec for each in found.leaves] == [(("model",), (), ("data",))]
    # Those that a regex overrides are not looked at.
    leaves = [leaf("params/a", (8, 8), ("embed", "heads"), kind)]
    found = run(leaves, rules, [("a$", P(None, "model"))])
    assert (found.problems, found.hints, found.unmatched) == ((), (), {})
    assert [each.spec for each in found.leaves] == [((), ("model",))]


def test_rules_of_an_annotation_come_after_those_of_the_caller():
    own = (("embed", "model"), ("mlp", "model"), ("heads", "data"))
    leaves = [
        leaf("params/a", (8, 8, 8), ("embed", "mlp", "heads"), own_rules=own),
        leaf("params/b", (8, 8), ("embed", "heads"), "nnx", own_rules=dict(own)),
        leaf("params/c", (8, 8), ("embed", "heads")),
    ]
    found = run(leaves, [("embed", None)])
    assert found.problems == found.hints == ()
    assert sources_of(found) == {
        "params/a": (((), ("model",), ("data",)), "names", (0,)),
        "params/b": (((), ("data",)), "names", (0,)),
        "params/c": (((), ()), "names", (0,)),
    }
    assert found.unmatched == {"heads": (("params", "c"),)}
    alone = run(leaves[:2], None)
    assert alone.problems == alone.hints == ()
    assert sources_of(alone) == {
        "params/a": ((("model",), (), ("data",)), "names", ()),
        "params/b": ((("model",), ("data",)), "names", ()),
    }


def test_a_callable_is_asked_about_the_names_of_all_leaves():
    asked = []

    def rules(name):
        asked.append(name)
        return {"embed": "data", "mlp": ("model",)}[name]

    leaves = [
        leaf("params/a", (8, 8), ("mlp", None)),
        leaf("params/b", (8, 8, 8), ("embed", "mlp", ("x", "y"))),
        leaf("params/c", (8,), ("heads",)),
    ]
    found = run(leaves, rules)
    assert asked == ["mlp", "embed", "heads"]
    assert found.rules == (("mlp", ("model",)), ("embed", ("data",)))
    assert found.reached == ((("params", "a"), ("params", "b")), (("params", "b"),))
    assert found.unmatched == {"heads": (("params", "c"),)}


# The report


def test_the_printed_report_is_short_and_ends_with_problems():
    leaves = [leaf(f"params/a{i}", (i,)) for i in range(1, 13)]
    found = run([*leaves, leaf("params/w", (100,), ("x",), "nnx")], None)
    largest = "".join(f"            {4 * i} B  params/a{i}  [{i}]\n" for i in range(12, 3, -1))
    assert repr(found) == (
        "13 array leaves on `data=2,model=4`, 712 B a device: 1 by the names of their axes, "
        "12 by nothing\n"
        "no rule     x: 1 leaf, params/w the first\n"
        "replicated  13 leaves, 712 B a device\n"
        "            400 B  params/w  [100]\n"
        f"{largest}"
        "            ... and 3 more\n"
        "problem     params/w  [100] ('x',): P('x') names axis 'x', which `data=2,model=4` lacks\n"
        "hint        the rule (\"x\", None) replicates dimensions named 'x'"
    )


def test_on_one_device_nothing_is_replicated():
    found = run([leaf("params/a", (8, 8), ("embed", "mlp")), leaf("step", ())], mesh=ONE)
    assert [each.spec for each in found.leaves] == [BOTH, ()]
    assert (found.replicated, found.device_bytes, found.problems) == ((), 260, ())


ONE = Mesh(("data", "model"), (1, 1))
SPEC = st.lists(
    st.lists(st.sampled_from(["data", "model", "x"]), max_size=2).map(tuple), max_size=3
).map(tuple)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 16), max_size=3).map(tuple), SPEC), max_size=4))
def test_bytes_and_replicas_are_as_in_jax(cases):
    """A leaf is replicated if every shard is the whole array. It has the bytes of JAX's shard."""
    leaves = [leaf(f"params/a{i}", shape) for i, (shape, _) in enumerate(cases)]
    specs = [(f"/a{i}$", spec) for i, (_, spec) in enumerate(cases)]
    found = run(leaves, specs=specs)
    assert [leaf.spec for leaf in found.leaves] == [spec for _, spec in cases]
    wrong = [spec_problems(shape, MESH, spec) for shape, spec in cases]
    assert list(found.problems) == [
        f"params/a{i}  {list(shape)}: {problem}"
        for i, (shape, _) in enumerate(cases)
        for problem in wrong[i]
    ]
    on = AbstractMesh((2, 4), ("data", "model"))
    for entry, (shape, spec), problems in zip(found.leaves, cases, wrong, strict=True):
        if problems:
            continue
        sharding = NamedSharding(on, P(*spec))
        shard = sharding.shard_shape(shape)
        assert entry.device_bytes == 4 * math.prod(shard)
        assert entry.replicated == sharding.is_fully_replicated
