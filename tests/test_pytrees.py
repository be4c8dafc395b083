"""A user's state flattened to leaves with paths, and unflattened again."""

import collections
from typing import Any

import flax
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Named
from releases import OUT_SHARDING, older
from sampling import examples

import reshard
from reshard.restore import pytrees
from reshard.restore.pytrees import flatten_state

Point = collections.namedtuple("Point", ("x", "y"))


@flax.struct.dataclass
class Node:
    left: Any
    right: Any
    static: str = flax.struct.field(pytree_node=False, default="kept")


def paths(state):
    return {leaf.path: type(leaf.wrapper) for leaf in flatten_state(state).leaves}


class Block(nnx.Module):
    def __init__(self, rngs):
        names = {OUT_SHARDING: (None, "model"), "note": "kept"}
        self.linear = nnx.Linear(4, 8, rngs=rngs, kernel_metadata=names)
        self.norm = nnx.BatchNorm(8, rngs=rngs)


class Model(nnx.Module):
    """Every kind of attribute, a tied weight and a shared module."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.tied = self.embed.embedding
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.again = self.blocks[1]
        self.by_name = nnx.Dict(a=nnx.Param(jnp.ones(8)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.buffer = nnx.data(jnp.arange(3))
        self.pair = nnx.Param({"x": jnp.ones(8), "y": jnp.zeros(1)})
        self.width = 5


BLOCK = {
    ("linear", "bias"): nnx.Param,
    ("linear", "kernel"): nnx.Param,
    ("norm", "bias"): nnx.Param,
    ("norm", "mean"): nnx.BatchStat,
    ("norm", "scale"): nnx.Param,
    ("norm", "var"): nnx.BatchStat,
}
MODEL = {
    **{("again", *path): kind for path, kind in BLOCK.items()},
    **{("blocks", "0", *path): kind for path, kind in BLOCK.items()},
    ("buffer",): type(None),
    ("by_name", "a"): nnx.Param,
    ("count",): type(None),
    ("dropout", "rngs", "count"): nnx.RngCount,
    ("dropout", "rngs", "key"): nnx.RngKey,
    ("embed", "embedding"): nnx.Param,
    ("pair", "x"): nnx.Param,
    ("pair", "y"): nnx.Param,
}
if older("flax", "0.12.5"):  # to which numbers are structure
    del MODEL["count",]
TIED = {("embed", "embedding"): (("tied",),)} | {
    path: (("blocks", "1", *path[1:]),) for path in MODEL if path[0] == "again"
}


def aliases(state):
    return {leaf.path: leaf.aliases for leaf in flatten_state(state).leaves if leaf.aliases}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (jnp.ones(3), {(): type(None)}),
        (7, {(): type(None)}),
        (None, {}),
        ({}, {}),
        ([], {}),
        (optax.EmptyState(), {}),
        (optax.MaskedNode(), {}),
        ({"a": None, "b": optax.MaskedNode(), "c": (), "d": {}, "e": 1}, {("e",): type(None)}),
        ({"b": 1, "a": [2, (3, {"c": 4})]}, dict.fromkeys([
            ("a", 0), ("a", 1, 0), ("a", 1, 1, "c"), ("b",)
        ], type(None))),
        ({1: 1, 10: 2, 9: 3}, dict.fromkeys([("1",), ("9",), ("10",)], type(None))),
        ({"a/b": {"c.d": "text"}}, {("a/b", "c.d"): type(None)}),
        (Point(1, [2.5]), dict.fromkeys([("x",), ("y", 0)], type(None))),
        (Node({"a": 1}, True), dict.fromkeys([("left", "a"), ("right",)], type(None))),
        (FrozenDict({"a": {"b": 1}}), {("a", "b"): type(None)}),
        (nn.Partitioned(1, ("x",)), {(): nn.Partitioned}),
        ({"a": nn.Partitioned(1, ())}, {("a",): nn.Partitioned}),
        ({"a": nn.LogicallyPartitioned(1, ())}, {("a",): nn.LogicallyPartitioned}),
        ({"a": Named(1, ())}, {("a",): Named}),
        (
            {"a": nn.Partitioned({"x": 1, "y": [2]}, ())},
            dict.fromkeys([("a", "x"), ("a", "y", 0)], nn.Partitioned),
        ),
        ({"value": nn.Partitioned(1, ())}, {("value",): nn.Partitioned}),
        ({"value": {"value": 1}}, {("value", "value"): type(None)}),
        (nnx.Param(jnp.ones(2)), {(): nnx.Param}),
        ([nnx.Param(jnp.ones(2)), nnx.Variable(3.0)], {(0,): nnx.Param, (1,): nnx.Variable}),
        (nnx.Rngs(0), {("default", "count"): nnx.RngCount, ("default", "key"): nnx.RngKey}),
    ],
)  # fmt: skip
def test_paths(state, expected):
    assert paths(state) == expected
    assert list(paths(state)) == list(expected)


def test_paths_of_modules_and_of_what_they_share():
    with nnx.use_eager_sharding(False):
        model = Model(nnx.Rngs(0))
    model.count = nnx.data(3)
    assert paths(model) == MODEL
    assert paths(nnx.state(model)) == MODEL
    assert paths(nnx.to_pure_dict(nnx.state(model))) == dict.fromkeys(MODEL, type(None))
    assert paths([{"model": model}]) == {(0, "model", *path): kind for path, kind in MODEL.items()}
    assert aliases(model) == TIED
    assert aliases(nnx.state(model)) == {}
    assert aliases([{"model": model}]) == {
        (0, "model", *path): tuple((0, "model", *other) for other in others)
        for path, others in TIED.items()
    }


def test_a_module_that_holds_itself():
    with nnx.use_eager_sharding(False):
        model = Block(nnx.Rngs(0))
    model.itself = model
    model.linear.parent = model
    found = flatten_state(model)
    assert paths(model) == BLOCK
    # Every alias leads to the variable.
    for leaf in found.leaves:
        for path in (leaf.path, *leaf.aliases):
            node = model
            for key in path:
                node = getattr(node, key)
            assert node is leaf.wrapper or node[...] is leaf.value
    again = found.unflatten([leaf.value for leaf in found.leaves])
    assert again.itself is again and again.linear.parent is again


def test_aliases_lead_through_several_shared_nodes():
    with nnx.use_eager_sharding(False):
        model = Model(nnx.Rngs(0))
    outer = nnx.Dict(one=model, two=model, part=model.blocks[1].linear)
    kernel = ("one", "again", "linear", "kernel")
    everywhere = {
        (top, *below, "linear", "kernel")
        for top in ("one", "two")
        for below in (("again",), ("blocks", "1"))
    }
    assert {kernel, *aliases(outer)[kernel]} == {*everywhere, ("part", "kernel")}


LEAVES = st.one_of(
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.builds(lambda n: np.arange(n), st.integers(0, 3)),
    st.none(),
    st.just(optax.EmptyState()),
    st.just(optax.MaskedNode()),
)
KEYS = st.sampled_from(["a", "b", "value", "a/b", "x.y"])


def containers(inner):
    return st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.integers(0, 20), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(FrozenDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.builds(Node, inner, inner),
        inner.map(lambda value: nn.Partitioned(value, ("x",))),
        inner.map(lambda value: Named(value, ("x",))),
    )


@settings(deadline=None, max_examples=examples(200))
@given(st.recursive(LEAVES, containers, max_leaves=10))
def test_pytrees_come_back_as_they_were_or_with_other_values(state):
    found = flatten_state(state)
    values = [leaf.value for leaf in found.leaves]
    leaves, structure = jax.tree.flatten(state)
    assert all(a is b for a, b in zip(values, leaves, strict=True))
    assert len({leaf.path for leaf in found.leaves}) == len(values)
    for again in (found.unflatten(values), found.unflatten(values, in_place=True)):
        assert jax.tree.structure(again) == structure
        assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    numbers = list(range(len(values)))
    again = found.unflatten(numbers)
    assert jax.tree.structure(again) == structure
    assert jax.tree.leaves(again) == numbers
    assert [leaf.path for leaf in flatten_state(again).leaves] == [x.path for x in found.leaves]


def test_arrays_that_flax_takes_for_structure_are_leaves_of_abstract_modules_too():
    """The scales of a `WeightNorm` are in a dict, and in no variable; flax before 0.12.5
    takes those of attributes for structure, too."""

    class Bare(nnx.Module):
        def __init__(self):
            self.buffer = nnx.data(jnp.arange(3))

    def make():
        norm = nnx.WeightNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
        return {"a": norm, "b": Bare()}

    real, found = make(), flatten_state(nnx.eval_shape(make))
    held = {leaf.path: leaf.value for leaf in flatten_state(real).leaves}
    assert {leaf.path: leaf.value.shape for leaf in found.leaves} == {
        path: value.shape for path, value in held.items()
    }
    values = layouts.randomized([leaf.value for leaf in found.leaves])
    made = found.unflatten(values)
    again = {leaf.path: leaf.value for leaf in flatten_state(made).leaves}
    layouts.assert_same_tree(again, dict(zip((x.path for x in found.leaves), values, strict=True)))
    for name, module in made.items():
        assert nnx.graphdef(module) == nnx.graphdef(real[name])


@pytest.mark.parametrize("hold", [lambda x: x, nnx.state], ids=["module", "state"])
def test_variables_without_a_value_are_saved_as_such(hold, tmp_path):
    tx = optax.masked(optax.trace(0.9), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
    with nnx.use_eager_sharding(False):
        optimizer = nnx.Optimizer(Block(nnx.Rngs(0)), tx, wrt=nnx.Param)
    layouts.save_standard(tmp_path / "saved", nnx.state(optimizer))
    form = pytrees.saved_tree(hold(optimizer))
    saved = reshard.open(tmp_path / "saved")
    assert {tuple(map(str, p)): x is None for p, x in form.items()} == {
        tuple(map(str, path)): leaf is None for path, leaf in saved.items()
    }
    assert sum(leaf is None for leaf in saved.values()) == 3


def test_a_dimension_split_over_several_axes_may_be_a_list():
    (leaf,) = flatten_state(nn.Partitioned(jnp.ones((2, 3)), (["x", "y"], None))).leaves
    assert pytrees.annotation(leaf) == ((("x", "y"), None), "mesh", None)
