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


def specs_of(found):
    return {format_path(leaf.path): leaf.spec for leaf in found.leaves}


def sources_of(found):
    return {format_path(leaf.path): (leaf.spec, leaf.source, leaf.rules) for leaf in found.leaves}


def run(leaves, rules=RULES, specs=(), semantics=None, mesh=MESH):
    return cover(leaves, mesh, rules, specs, semantics)


# Where a spec comes from


def test_the_precedence_of_the_sources_of_specs():
    embed = ("embed", "mlp")
    saved = (("model",), ())
    leaves = [
        leaf("opt/mu/all", (8, 8), embed, saved=saved),
        leaf("opt/mu/named", (8, 8), embed, saved=saved),
        leaf("opt/mu/bare", (8, 8)),
        leaf("opt/mu/laid_out", (8, 8), saved=saved),
        leaf("opt/mu/nothing", (8, 8)),
        leaf("params/all", (8, 8), embed, saved=saved),
        leaf("params/named", (8, 8), embed, saved=saved),
        leaf("params/bare", (8, 8)),
        leaf("params/laid_out", (8, 8), saved=saved),
        leaf("params/nothing", (8, 8)),
        leaf("batch_stats/named", (8, 8), ("mlp", None), saved=saved),
        leaf("batch_stats/other", (8,), saved=(("data",),)),
        leaf("step", ()),
    ]
    found = run(leaves, specs=[("params/(all|bare)", P("data")), ("^opt/mu/all", "model,data")])
    data_model = (("data",), ("model",))
    assert found.problems == found.hints == ()
    assert sources_of(found) == {
        "opt/mu/all": ((("model",), ("data",)), "specs", ()),
        "opt/mu/named": (data_model, "optimizer", (0, 1)),
        "opt/mu/bare": ((("data",),), "optimizer", ()),
        "opt/mu/laid_out": (saved, "optimizer", ()),
        "opt/mu/nothing": ((), "optimizer", ()),
        "params/all": ((("data",),), "specs", ()),
        "params/named": (data_model, "names", (0, 1)),
        "params/bare": ((("data",),), "specs", ()),
        "params/laid_out": (saved, "sharding", ()),
        "params/nothing": ((), "none", ()),
        "batch_stats/named": ((("model",), ()), "names", (1,)),
        "batch_stats/other": ((("data",),), "sharding", ()),
        "step": ((), "none", ()),
    }


def test_a_moment_with_another_annotation_keeps_it():
    leaves = [
        leaf("params/w", (8, 8), ("embed", "mlp")),
        leaf("params/v", (8, 8), saved=(("data",),)),
        leaf("opt/same/w", (8, 8), ("embed", "mlp")),
        leaf("opt/other/w", (8, 8), ("mlp", "embed")),
        leaf("opt/none/w", (8, 8)),
        leaf("opt/laid_out/w", (8, 8), saved=(("model",),)),
        leaf("opt/same/v", (8, 8), saved=(("data",),)),
        leaf("opt/other/v", (8, 8), saved=(("model",),)),
    ]
    assert sources_of(run(leaves)) == {
        "params/w": ((("data",), ("model",)), "names", (0, 1)),
        "params/v": ((("data",),), "sharding", ()),
        "opt/same/w": ((("data",), ("model",)), "optimizer", (0, 1)),
        "opt/other/w": ((("model",), ("data",)), "names", (1, 0)),
        "opt/none/w": ((("data",), ("model",)), "optimizer", (0, 1)),
        "opt/laid_out/w": ((("model",),), "sharding", ()),
        "opt/same/v": ((("data",),), "optimizer", ()),
        "opt/other/v": ((("model",),), "sharding", ()),
    }


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
    assert found.hints == (
        'specs=[("^opt/v/square$", P(...))] says how to split it',
        'specs=[("^opt/w/square$", P(...))] says how to split it',
        r'specs=[(r"^opt/w\.1/square$", P(...))] says how to split it',
    )
    said = run(
        leaves,
        specs=[("^opt/v/square$", "model"), ("^opt/w/square$", ""), (r"^opt/w\.1/square$", "")],
    )
    assert said.problems == said.hints == ()
    assert specs_of(said) == {
        "params/square": (("data",), ("model",)),
        "params/free": (),
        "opt/v/square": (("model",),),
        "opt/w/square": (),
        "opt/w.1/square": (),
        "opt/v/free": ((),),
        "opt/w/free": (),
    }


# Names


@pytest.mark.parametrize("kind", ["mesh", "nnx"])
@pytest.mark.parametrize("rules", [None, [], {}])
def test_without_rules_names_are_mesh_axes(kind, rules):
    names = ("model", None, ("data",), "data")
    found = run([leaf("params/w", (8, 3, 2), names[:3], kind)], rules)
    assert found.problems == found.hints == ()
    assert found.unmatched == {}
    assert specs_of(found) == {"params/w": (("model",), (), ("data",))}
    # Those that a regex overrides are not looked at.
    leaves = [leaf("params/a", (8, 8), ("embed", "heads"), kind)]
    found = run(leaves, rules, [("a$", P(None, "model"))])
    assert (found.problems, found.hints, found.unmatched) == ((), (), {})
    assert specs_of(found) == {"params/a": ((), ("model",))}


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
    assert specs_of(found) == {"params/a": (("data",), ("model",)), "step": ()}
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
