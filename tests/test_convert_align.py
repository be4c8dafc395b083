"""Which leaf is which: right where structure decides, and nothing where it does not."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from by_numpy import viewed
from converted import Compact, convert, outline_of, random_variables, rngs, some, zeroed
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from twins import linear, made, named

from reshard.arrays.operations import Concat, Transpose
from reshard.convert.align import align
from reshard.convert.layers import Match, Move, moves
from reshard.convert.leafmap import from_rows
from reshard.convert.model import nnx_outline
from reshard.convert.module_tree import Leaf, Module, linen_outline, without
from reshard.tree import format_path

pytestmark = pytest.mark.usefixtures("quickly_compiled")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


square, norm = functools.partial(linear, 4, 4), functools.partial(twins.norm, 4)


def printed(alignment):
    """Steps, abstentions and mismatches as text."""
    return (
        sorted(map(str, alignment.map.rows())),
        list(map(str, alignment.abstentions)),
        list(map(str, alignment.mismatches)),
    )


def pairs_of(alignment):
    """Printed path in Linen -> in NNX, of leaves that only change their path."""
    rows = alignment.map.rows()
    assert all(step.operation is None for step in rows)
    return {format_path(step.inputs[0]): format_path(step.outputs[0]) for step in rows}


def aligned(linen, model, classes=None):
    """The alignment of Linen's leaves with the model that a function makes."""
    return align(linen_outline(linen, classes), outline_of(model))


def arrays(**shapes):
    """Linen leaves: `Dense_0__kernel=(2, 3)` is `params/Dense_0/kernel`."""
    return {
        ("params", *name.split("__")): np.zeros(shape, "float32") for name, shape in shapes.items()
    }


def dense(name, before=4, after=4, bias=True):
    """The leaves of a layer as `arrays` takes them."""
    found = {f"{name}__kernel": (before, after)}
    return found | ({f"{name}__bias": (after,)} if bias else {})


def of_layers(names, leaves=("kernel", "bias")):
    """Printed path in Linen -> in NNX, of the leaves of layers."""
    return {
        f"params/{one}/{leaf}": f"{other}/{leaf}" for one, other in names.items() for leaf in leaves
    }


def layer_norm(name, size=4):
    return {f"{name}__scale": (size,), f"{name}__bias": (size,)}


def assert_converted(function, make, call, variables, *inputs):
    """Linen's variables fill the whole model that `make` makes, and what a call of it gives is what
    the Linen module, or a compact method that is given, gives. Returns the conversion."""
    got = convert(variables, make)
    assert (got.alignment.abstentions, got.alignment.mismatches) == ([], [])
    assert (got.lost, got.unfilled) == (set(got.alignment.map.must_be_zero), set())
    module = function if isinstance(function, nn.Module) else Compact(function)
    expected = jax.jit(module.apply)(variables, *inputs)
    found = nnx.jit(lambda model, *inputs: call(model, *inputs))(got.model, *inputs)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)
    return got


# Nested models, on real arrays


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(7)(nn.LayerNorm()(x))
        return nn.LayerNorm()(x + nn.Dense(6)(nn.gelu(y))), None


LinenBlock.__name__ = "Block"


class Block(nnx.Module):
    """Attributes against the alphabet."""

    def __init__(self, *, rngs):
        self.pre = nnx.LayerNorm(6, rngs=rngs)
        self.up = nnx.Linear(6, 7, rngs=rngs)
        self.down = nnx.Linear(7, 6, rngs=rngs)
        self.last = nnx.LayerNorm(6, rngs=rngs)

    def __call__(self, x):
        return self.last(x + self.down(nnx.gelu(self.up(self.pre(x)))))


def through(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def scanned(model, x):
    return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)


def stack_of(make, count):
    """`count` modules in one, by `vmap`."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap
    def stack(rngs):
        return make(rngs=rngs)

    return stack(rngs())


INPUT = some(2, 5, 6)


def assert_all_alike(cases, make, call):
    """The first of several functions and variables is converted, and the model that `make` makes
    has the same leaves by all others."""
    (function, variables), *_ = cases
    assert_converted(function, make, call, variables, INPUT)
    model, found = outline_of(make), []
    for _, variables in cases:
        leaves = flatten_dict(variables)
        alignment = align(linen_outline(leaves), model)
        assert {step.origin for step in alignment.map.rows()} == {"structure"}
        arrays = viewed(alignment.map, leaves)
        found.append({path: array.tobytes() for path, array in arrays.items()})
    assert found == found[:1] * len(cases)


def test_blocks_of_a_loop_are_the_members_of_a_list():
    """However they are lifted."""
    make, cases = made(blocks=lambda: nnx.List([Block(rngs=rngs()) for _ in "ab"])), []
    for lift in (lambda block: block, nn.remat, nn.jit, nn.fold_rngs):

        def function(x, lift=lift):
            for _ in range(2):
                x, _ = lift(LinenBlock)()(x)
            return x

        cases.append((function, random_variables(Compact(function), INPUT)))
    assert_all_alike(cases, make, lambda model, x: through(model.blocks, x))


def test_a_scan_on_any_axis_is_a_stack_on_the_first():
    """Whatever it is called."""
    make, cases = made(layers=lambda: stack_of(Block, 3)), []
    for axis, remat, name in (
        (0, False, None),
        (0, True, "layers"),
        (1, True, None),
        (1, False, "layers"),
        (-1, True, None),
    ):
        block = nn.remat(LinenBlock) if remat else LinenBlock

        def function(x, axis=axis, block=block, name=name):
            scan = nn.scan(block, {"params": axis}, split_rngs={"params": True}, length=3)
            return scan(name=name)(x, None)[0]

        variables = random_variables(Compact(function), INPUT)
        if cases:
            turned = [np.moveaxis(x, 0, axis) for x in jax.tree.leaves(cases[0][1])]
            assert [x.shape for x in turned] == [x.shape for x in jax.tree.leaves(variables)]
            variables = jax.tree.unflatten(jax.tree.structure(variables), turned)
        cases.append((function, variables))
    assert_all_alike(cases, make, lambda model, x: scanned(model.layers, x))


def test_a_remat_scan_has_two_axes_of_layers():
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x):
            return LinenBlock()(x)[0]

    class Twin(nnx.Module):
        def __init__(self, *, rngs):
            self.block = Block(rngs=rngs)

        def __call__(self, x):
            return self.block(x)

    Twin.__name__ = "Step"

    def stack(lengths):
        return stack_of(lambda rngs: stack_of(Twin, lengths[1]), lengths[0])

    def function(x, lengths=(2, 3)):
        return nn.remat_scan(Step, lengths=lengths)()(x)

    variables = random_variables(Compact(function), INPUT)
    outer = nnx.scan(lambda x, inner: scanned(inner, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    make = made(x=lambda: stack((2, 3)))
    got = assert_converted(function, make, lambda model, x: outer(x, model.x), variables, INPUT)
    # Two axes of one size are no others.
    square = random_variables(Compact(functools.partial(function, lengths=(2, 2))), INPUT)
    found = aligned(flatten_dict(square), made(x=lambda: stack((2, 2))))
    assert (found.abstentions, found.mismatches) == ([], [])
    assert found.map.rows() == got.alignment.map.rows()


@pytest.mark.parametrize("axis", [0, 1])
def test_gates_of_cells_are_joined_in_a_stack(axis):
    cell = nn.vmap(
        nn.OptimizedLSTMCell,
        variable_axes={"params": axis},
        split_rngs={"params": True},
        axis_size=3,
        in_axes=(0, 0),
    )

    def function(carry, x):
        return cell(4)(carry, x)

    inputs = ((some(3, 2, 4), some(3, 2, 4, seed=2)), some(3, 2, 6))
    variables = random_variables(Compact(function), *inputs)

    make = made(cells=lambda: stack_of(functools.partial(nnx.OptimizedLSTMCell, 6, 4), 3))
    apply = nnx.vmap(lambda cell, carry, x: cell(carry, x))
    call = lambda model, *inputs: apply(model.cells, *inputs)  # noqa: E731
    got = assert_converted(function, make, call, variables, *inputs)
    kinds = {type(step.operation) for step in got.alignment.map.rows()}
    assert kinds == ({Concat, Transpose} if axis else {Concat})


def test_lists_and_dicts_of_setup():
    class Model(nn.Module):
        def setup(self):
            self.layers = [nn.Dense(5), nn.Dense(6), nn.Dense(5)]
            self.d = {"a": nn.Dense(6), "b": {"c": nn.Dense(6)}}
            self.n = [[nn.LayerNorm(), nn.Dense(6)], [nn.Dense(6)]]
            self.seq = nn.Sequential([nn.Dense(7), nn.relu, nn.Dense(6)])
            self.rnn = nn.RNN(nn.LSTMCell(6))

        def __call__(self, x):
            x = through([*self.layers, self.d["a"], self.d["b"]["c"], *self.n[0]], x)
            return self.rnn(self.seq(self.n[1][0](x)))

    class Twin(nnx.Module):
        def __init__(self):
            self.seq = nnx.Sequential(linear(6, 7), nnx.relu, linear(7, 6))
            self.n = nnx.data([[twins.norm(6), linear(6, 6)], [linear(6, 6)]])
            self.d = nnx.Dict(a=linear(5, 6), b=nnx.data({"c": linear(6, 6)}))
            self.layers = nnx.List([linear(6, 5), linear(5, 6), linear(6, 5)])
            self.rnn = nnx.RNN(nnx.LSTMCell(6, 6, rngs=rngs()))

        __call__ = Model.__call__

    variables = random_variables(Model(), INPUT)
    got = assert_converted(Model(), Twin, Twin.__call__, variables, INPUT)
    assert {step.origin for step in got.alignment.map.rows()} == {"path"}


def test_a_list_of_one_api_is_a_sequential_of_the_other():
    leaves = arrays(**dense("blocks_0", 2, 3), **dense("blocks_2", 3, 4), **dense("q__layers_1"))
    model = made(
        blocks=lambda: nnx.Sequential(linear(2, 3), nnx.relu, linear(3, 4)),
        q=lambda: nnx.List([nnx.relu, square()]),
    )
    names = {"blocks_0": "blocks/layers/0", "blocks_2": "blocks/layers/2", "q/layers_1": "q/1"}
    assert pairs_of(aligned(leaves, model)) == of_layers(names)


def test_what_a_compact_method_makes_beside_a_wrapper():
    def function(x):
        x = nn.Sequential([nn.Dense(7), nn.relu, nn.Dense(6)])(x)
        x = nn.Bidirectional(nn.RNN(nn.LSTMCell(3)), nn.RNN(nn.LSTMCell(3)))(x)
        x = nn.RNN(nn.LSTMCell(5))(x)
        return nn.Dense(4)(nn.RNN(nn.GRUCell(3))(x))

    class Twin(nnx.Module):
        def __init__(self):
            self.z = nnx.Sequential(linear(6, 7), nnx.relu, linear(7, 6))
            cells = [nnx.LSTMCell(6, 3, rngs=rngs()) for _ in range(2)]
            self.y = nnx.Bidirectional(*map(nnx.RNN, cells), rngs=rngs())
            self.x = nnx.RNN(nnx.OptimizedLSTMCell(6, 5, rngs=rngs()))
            self.w = nnx.RNN(nnx.GRUCell(5, 3, rngs=rngs()))
            self.head = linear(3, 4)

        def __call__(self, x):
            return through([self.z, self.y, self.x, self.w, self.head], x)

    variables = random_variables(Compact(function), INPUT)
    assert sorted(variables["params"]) == [
        *("Dense_0", "Dense_1", "Dense_2", "GRUCell_0", "LSTMCell_0", "LSTMCell_1", "LSTMCell_2")
    ]
    bias = [("params", "GRUCell_0", "hn", "bias")]
    got = assert_converted(function, Twin, Twin.__call__, zeroed(variables, bias), INPUT)
    assert tuple(got.alignment.map.must_be_zero) == tuple(bias)


def test_shared_modules_and_tied_embeddings():
    embed, shared = functools.cache(lambda: nnx.Embed(9, 4, rngs=rngs())), functools.cache(square)
    leaves = arrays(token__embedding=(9, 4), **dense("shared"), **layer_norm("head__LayerNorm_0"))
    head = made(embed=embed, norm=norm)
    found = aligned(leaves, made(token=embed, head=head, shared=shared, again=shared))
    assert (found.abstentions, found.mismatches) == ([], [])
    assert pairs_of(found) == {
        "params/token/embedding": "head/embed/embedding",
        **of_layers({"shared": "again"}),
        **of_layers({"head/LayerNorm_0": "head/norm"}, ("scale", "bias")),
    }


def test_copies_that_nnx_has_once_are_left_open():
    shared = functools.cache(square)
    leaves = arrays(**dense("one"), **dense("two"))
    steps, abstentions, _ = printed(aligned(leaves, made(one=shared, two=shared)))
    assert (steps, sorted(abstentions)) == (
        [],
        [
            f"params/one/{leaf} and params/two/{leaf}, perhaps one/{leaf}: "
            "NNX has one leaf for them"
            for leaf in ("bias", "kernel")
        ],
    )


def test_a_shared_module_counts_once():
    def model(**first):
        return made(**first, inner=lambda: nnx.Dict(other=shared()), own=square, last=shared)()

    leaves = arrays(**dense("Dense_0"), **dense("Dense_1"))
    shared = functools.cache(square)
    found = aligned(leaves, lambda: model(z=shared))
    assert pairs_of(found) == of_layers({"Dense_0": "inner/other", "Dense_1": "own"})
    # Now it is first met in a container: whether it or the other was made first is unknown.
    shared = functools.cache(square)
    assert printed(aligned(leaves, model))[:2] == (
        [],
        [
            "Dense_0 and Dense_1, perhaps inner/other and own: "
            "which of them was made first is unknown: they are not in one list"
        ],
    )


def test_parameters_without_statistics_are_paired_all_the_same():
    leaves = arrays(**layer_norm("BatchNorm_0"), **layer_norm("BatchNorm_1", 5))
    model = made(b=lambda: nnx.BatchNorm(4, rngs=rngs()), a=lambda: nnx.BatchNorm(5, rngs=rngs()))
    names = {"BatchNorm_0": "b", "BatchNorm_1": "a"}
    assert pairs_of(aligned(leaves, model)) == of_layers(names, ("bias", "scale"))


# What structure does not decide


bare = functools.partial(square, use_bias=False)


def block_of(size):
    return named("Block", linear=square, ln=lambda: twins.norm(size))()


BLOCKS = {
    name: shape
    for i in range(2)
    for part in (layer_norm(f"Block_{i}__LayerNorm_0", 4 + i), dense(f"Block_{i}__Mlp_0__Dense_0"))
    for name, shape in part.items()
}
ANY_AXIS = (
    "the axis of the layers in params is unknown: "
    "axis 0 to 0 or axis 0 to 1 or axis 0 to -2 or axis 0 to -1 or axis -1 to 0"
)
ONE_SIDE = "one side is stacked, the other is not"
block = named("Block", dense=bare)
TWO, SQUARES = dense("Dense_0") | dense("Dense_1"), {"a": square, "b": square}
UNDECIDED = {
    "fewer in Linen": (
        *(layer_norm("LayerNorm_0") | layer_norm("LayerNorm_1"), {"a": norm, "b": norm, "c": norm}),
        "LayerNorm_0 and LayerNorm_1, perhaps a, b and c: 2 in Linen, 3 in NNX",
    ),
    "fewer in NNX": (TWO, {"a": square}, "Dense_0 and Dense_1, perhaps a: 2 in Linen, 1 in NNX"),
    "one of Linen's is missing": (
        *(dense("Dense_0") | dense("Dense_2"), SQUARES),
        "Dense_0 and Dense_2, perhaps a and b: in Linen they are numbered 0, 2, in NNX those "
        "with leaves are 0, 1",
    ),
    "shapes in another order": (
        dense("Dense_0", 4, 7, bias=False) | dense("Dense_1", 7, 4, bias=False),
        {"b": lambda: linear(7, 4, use_bias=False), "a": lambda: linear(4, 7, use_bias=False)},
        "Dense_0 and Dense_1, perhaps b and a: params/Dense_0/kernel and b/kernel: [4, 7] in "
        "Linen, [7, 4] in NNX",
    ),
    "a bias more": (
        *(dense("Dense_0") | dense("Dense_1", bias=False), {"b": bare, "a": square}),
        "Dense_0 and Dense_1, perhaps b and a: b has no bias",
    ),
    "a bias less": (
        *(dense("Dense_0", bias=False), {"a": square}),
        "Dense_0, perhaps a: Dense_0 has no bias",
    ),
    "with a transform and without": (
        *(dense("Dense_0") | dense("JitDense_0"), SQUARES),
        "Dense_0 and JitDense_0, perhaps a and b: which of Dense_0 and JitDense_0 was made "
        "first is unknown",
    ),
    "in two lists": (
        *(TWO, {"a": lambda: nnx.List([square()]), "b": lambda: nnx.List([square()])}),
        "Dense_0 and Dense_1, perhaps a/0 and b/0: which of them was made first is "
        "unknown: they are not in one list",
    ),
    "in a list of lists": (
        *(TWO, {"a": lambda: nnx.List([nnx.List([square()]), nnx.List([square()])])}),
        "Dense_0 and Dense_1, perhaps a/0/0 and a/1/0: which of them was made first is "
        "unknown: they are not in one list",
    ),
    "in a dict": (
        *(TWO, {"a": lambda: nnx.data({"y": square(), "x": square()})}),
        "Dense_0 and Dense_1, perhaps a/x and a/y: the order in which NNX defines them is unknown",
    ),
    "another that may be one of them": (
        *(dense("Dense_0") | dense("head"), {"a": square}),
        "Dense_0, perhaps a: head in Linen may be, or hold, one of them\n"
        "head: NNX has no counterpart",
    ),
    "another that may be one of two": (
        dense("Dense_0", bias=False) | dense("Dense_1") | dense("head"),
        {"a": bare, "b": square},
        "Dense_0 and Dense_1, perhaps a and b: head in Linen may be, or hold, one of them\n"
        "head: NNX has no counterpart",
    ),
    "another that is neither of two": (
        dense("Dense_0", bias=False) | dense("Dense_1") | layer_norm("ln"),
        {"a": bare, "b": square},
        "params/Dense_0/kernel -> a/kernel\n"
        "params/Dense_1/bias -> b/bias\n"
        "params/Dense_1/kernel -> b/kernel\n"
        "ln: NNX has no counterpart",
    ),
    "another that may hold one of them": (
        *(dense("Dense_0") | dense("Mlp_0__Dense_0"), {"a": square}),
        "Dense_0, perhaps a: Mlp_0 in Linen may be, or hold, one of them\n"
        "Mlp_0: NNX has no counterpart",
    ),
    "one in a module of NNX's": (
        *(dense("Dense_0"), {"a": square, "b": named("Mlp", c=square)}),
        "Dense_0, perhaps a: b in NNX may hold one of them",
    ),
    "modules of one class without a common name": (
        *(dense("Mlp_0__Dense_0"), {"a": named("Mlp", b=named("Wrap", c=square))}),
        "Mlp_0, perhaps a: the two sides have no name in common",
    ),
    "a whole model": (
        {"cls": (3,)} | dense("Body__one"),
        {"token": lambda: nnx.Param(jnp.zeros(3)), "layers": lambda: nnx.List([square()])},
        "params/cls and Body, perhaps layers/0 and token: "
        "ambiguous: neither names nor classes decide",
    ),
    "flattened": (
        dense("MlpBlock_0__Dense_0") | dense("MlpBlock_0__Dense_1"),
        {"linear1": square, "linear2": square},
        "MlpBlock_0, perhaps linear1 and linear2: ambiguous: neither names nor classes decide",
    ),
    "classes of other names": (
        *(dense("Block_0__Dense_0"), {"a": named("Layer", b=square)}),
        "Block_0, perhaps a: ambiguous: neither names nor classes decide",
    ),
    "a class that holds something else": (
        dense("Mlp_0__gate") | dense("Mlp_0__up"),
        {"a": named("Mlp", gate_up=lambda: linear(4, 8))},
        "Mlp_0, perhaps a: Linen has one bias [4] more than NNX",
    ),
    "blocks that differ inside": (
        dense("Block_0__Dense_0", 4, 4) | dense("Block_1__Dense_0", 4, 5),
        {"x": named("Block", d=lambda: linear(4, 5)), "y": named("Block", d=square)},
        "Block_0 and Block_1, perhaps x and y: params/Block_0/Dense_0/bias and x/d/bias: [4] "
        "in Linen, [5] in NNX",
    ),
    "a leaf of another name": (
        *({"pos_embedding": (3, 4)}, {"pos_embeddings": lambda: nnx.Param(jnp.zeros((3, 4)))}),
        "params/pos_embedding, perhaps pos_embeddings: ambiguous: neither names nor classes decide",
    ),
    "the same name twice": (
        *(dense("a_0"), {"a": lambda: nnx.List([square()]), "a_0": square}),
        "a_0, perhaps a_0 and a/0: the same name for several",
    ),
    "the same name twice, of leaves": (
        {"a_0": (4,)},
        {"a": lambda: nnx.List([nnx.Param(jnp.zeros(4))]), "a_0": lambda: nnx.Param(jnp.zeros(4))},
        "params/a_0, perhaps a_0 and a/0: the same name for several",
    ),
    "nothing there": (dense("head"), {}, "head: NNX has no counterpart"),
    "something in blocks": (
        *(BLOCKS, {"blocks": lambda: nnx.List([block_of(4), block_of(5)])}),
        "params/Block_0/LayerNorm_0/bias -> blocks/0/ln/bias\n"
        "params/Block_0/LayerNorm_0/scale -> blocks/0/ln/scale\n"
        "params/Block_1/LayerNorm_0/bias -> blocks/1/ln/bias\n"
        "params/Block_1/LayerNorm_0/scale -> blocks/1/ln/scale\n"
        "Block_0/Mlp_0, perhaps blocks/0/linear: ambiguous: neither names nor classes decide\n"
        "Block_1/Mlp_0, perhaps blocks/1/linear: ambiguous: neither names nor classes decide",
    ),
    "an axis that shapes do not tell, of a scan": (
        {"ScanDense_0__kernel": (3, 3, 3), "ScanDense_0__bias": (3, 3)},
        {"layers": lambda: stack_of(functools.partial(nnx.Linear, 3, 3), 3)},
        f"ScanDense_0, perhaps layers: {ANY_AXIS}",
    ),
    "an axis that shapes do not tell": (
        {"layers__kernel": (3, 3, 3), "layers__bias": (3, 3)},
        {"layers": lambda: stack_of(functools.partial(nnx.Linear, 3, 3), 3)},
        f"layers, perhaps layers: {ANY_AXIS}",
    ),
    "no axis fits": (
        {"layers__kernel": (3, 5, 4), "layers__bias": (3, 5)},
        {"layers": lambda: stack_of(functools.partial(nnx.Linear, 4, 5), 3)},
        "layers, perhaps layers: no axis of the layers fits all leaves in params\n"
        "params/layers/kernel and layers/kernel: [3, 5, 4] in Linen, [3, 4, 5] in NNX",
    ),
    "unrolled in NNX": (
        {"ScanBlock_0__Dense_0__kernel": (2, 4, 4)},
        {"blocks": lambda: nnx.List([block(), block()])},
        f"ScanBlock_0, perhaps blocks/0 and blocks/1: {ONE_SIDE}",
    ),
    "unrolled in NNX, by path": (
        {"a__blocks__Dense_0__kernel": (2, 4, 4)},
        {"a": lambda: nnx.Dict(blocks=nnx.List([block(), block()]))},
        f"a/blocks, perhaps a/blocks: {ONE_SIDE}",
    ),
    "unrolled in Linen": (
        {"Block_0__Dense_0__kernel": (4, 4), "Block_1__Dense_0__kernel": (4, 4)},
        {"blocks": lambda: stack_of(lambda rngs: block(), 2)},
        f"Block_0 and Block_1, perhaps blocks: {ONE_SIDE}",
    ),
    "unrolled in Linen, by path": (
        {"a__blocks_0__Dense_0__kernel": (4, 4), "a__blocks_1__Dense_0__kernel": (4, 4)},
        {"a": lambda: nnx.Dict(blocks=stack_of(lambda rngs: block(), 2))},
        f"a/blocks_0 and a/blocks_1, perhaps a/blocks: {ONE_SIDE}",
    ),
    "all shapes differ in the only module of a class": (
        dense("Net_0__one", 4, 5) | dense("Net_0__two", 4, 6, bias=False) | layer_norm("ln"),
        {
            "net": named("Net", one=lambda: linear(4, 7), two=lambda: linear(4, 8, use_bias=False)),
            "ln": norm,
        },
        "params/ln/bias -> ln/bias\n"
        "params/ln/scale -> ln/scale\n"
        "params/Net_0/one/bias and net/one/bias: [5] in Linen, [7] in NNX\n"
        "params/Net_0/one/kernel and net/one/kernel: [4, 5] in Linen, [4, 7] in NNX\n"
        "params/Net_0/two/kernel and net/two/kernel: [4, 6] in Linen, [4, 8] in NNX",
    ),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_is_not_decided_is_left_open(name):
    linen, attributes, expected = UNDECIDED[name]
    steps, abstentions, mismatches = printed(aligned(arrays(**linen), made(**attributes)))
    assert [*steps, *abstentions, *mismatches] == expected.splitlines()


def test_what_else_a_model_needs_does_not_hinder():
    """Modules in which only random numbers are, or nothing, are no candidates and leave no gap."""
    twin = made(
        dropout=lambda: nnx.Dropout(0.1, rngs=rngs()),
        bare=lambda: norm(use_bias=False, use_scale=False),
        full=norm,
        act=lambda: nnx.relu,
    )
    found = aligned(arrays(**layer_norm("LayerNorm_1")), twin)
    assert pairs_of(found) == of_layers({"LayerNorm_1": "full"}, ("bias", "scale"))
    assert found.abstentions == []
    assert printed(aligned(arrays(**layer_norm("LayerNorm_0")), twin))[:2] == (
        [],
        ["LayerNorm_0, perhaps full: in Linen they are numbered 0, in NNX those with leaves are 1"],
    )


def test_the_order_of_a_list_is_known_in_a_module_of_which_it_is_not():
    twin = made(norms=lambda: nnx.List([norm(), norm()]), b=square, a=square)
    norms = layer_norm("LayerNorm_0") | layer_norm("LayerNorm_1")
    leaves = arrays(**norms, **dense("Dense_0"), **dense("Dense_1"))
    found = align(linen_outline(leaves), nnx_outline(nnx.merge(*nnx.split(twin())))[1])
    names = {f"LayerNorm_{i}": f"norms/{i}" for i in range(2)}
    assert pairs_of(found) == of_layers(names, ("scale", "bias"))
    assert list(map(str, found.abstentions)) == [
        "Dense_0 and Dense_1, perhaps a and b: the order in which NNX defines them is unknown"
    ]


def test_leaves_that_a_map_has_taken_no_longer_count():
    twin = made(one=square, fused=lambda: linear(4, 8), two=square)
    leaves = arrays(**dense("Dense_0"), **dense("gate"), **dense("up"), **dense("Dense_1"))
    linen, model = linen_outline(leaves), outline_of(twin)
    assert align(linen, model).map.rows() == []
    taken = [("params", name, leaf) for name in ("gate", "up") for leaf in ("kernel", "bias")]
    model = without(model, [("fused", "kernel"), ("fused", "bias")])
    # The place of `fused` stays: what has it in Linen has another name.
    assert align(without(linen, taken), model).map.rows() == []
    found = align(linen_outline(arrays(**dense("Dense_0"), **dense("Dense_2"))), model)
    assert pairs_of(found) == of_layers({"Dense_0": "one", "Dense_2": "two"})


# Linen modules with names of their own, whose classes are known


@pytest.mark.parametrize(
    ("names", "attributes", "told"),
    [
        (["query", "value"], ["v", "q"], "query and value, perhaps v and q"),
        (["Dense_0", "out"], ["a", "b"], "Dense_0 and out, perhaps a and b"),
        (
            [f"block_{i}" for i in range(11)],
            [f"x{i}" for i in range(11)],
            "block_0, block_1, block_2, ... block_10 (11), perhaps x0, x1, x2, ... x10 (11)",
        ),
    ],
)
def test_names_of_their_own_have_no_order(names, attributes, told):
    leaves = arrays(**{k: v for name in names for k, v in dense(name).items()})
    found = aligned(leaves, made(**dict.fromkeys(attributes, square)), classes_of(names))
    assert printed(found)[:2] == ([], [f"{told}: their names do not show their order"])


def classes_of(names):
    """Those that their names do not tell."""
    return {(name,): "Dense" for name in names if name != "Dense_0"}


@pytest.mark.parametrize("name", ["Dense", "block"])
def test_more_than_ten_are_the_members_of_a_list_in_the_order_of_their_numbers(name):
    """By the names that Linen gives, and by names of their own."""
    names = {f"{name}_{i}": f"layers/{i}" for i in range(12)}
    leaves = arrays(**{k: v for each in names for k, v in dense(each).items()})
    model = made(layers=lambda: nnx.List([square() for _ in names]))
    classes = {} if name == "Dense" else classes_of(names)
    assert pairs_of(aligned(leaves, model, classes)) == of_layers(names)


# Layers in one array each


def test_each_collection_has_an_axis_of_its_own():
    leaves = {
        ("params", "ScanBlock_0", "BatchNorm_0", "scale"): np.zeros((4, 3)),
        ("params", "ScanBlock_0", "BatchNorm_0", "bias"): np.zeros((4, 3)),
        ("batch_stats", "ScanBlock_0", "BatchNorm_0", "mean"): np.zeros((3, 4)),
        ("batch_stats", "ScanBlock_0", "BatchNorm_0", "var"): np.zeros((3, 4)),
    }
    block = named("Block", norm=lambda: nnx.BatchNorm(4, rngs=rngs()))
    found = aligned(leaves, made(blocks=lambda: stack_of(lambda rngs: block(), 3)))
    assert {step.inputs[0][0]: step.operation for step in found.map.rows()} == {
        "params": Transpose((1, 0)),
        "batch_stats": None,
    }
    assert len(found.map.rows()) == 4


@pytest.mark.parametrize("classes", [{}, {("layers",): "Block"}])
def test_an_axis_that_shapes_do_not_tell_and_no_class(classes):
    """The class is that of what was stacked, or of a layer in it."""
    leaves = arrays(layers__Dense_0__kernel=(3, 3, 3), layers__Dense_0__bias=(3, 3))
    if classes:
        leaves |= arrays(layers__Dense_1__kernel=(3, 3, 3), layers__Dense_1__bias=(3, 3))
    names = [f"dense{i}" for i in range(1 + len(classes))]
    inner = named("Inner", **dict.fromkeys(names, functools.partial(linear, 3, 3)))
    one, other = ("",) * 2 if classes else ("/Dense_0", "/dense0")
    found = aligned(leaves, made(layers=lambda: stack_of(lambda rngs: inner(), 3)), classes)
    assert printed(found) == ([], [f"layers{one}, perhaps layers{other}: {ANY_AXIS}"], [])


def test_a_scan_that_stacks_nothing():
    """Of a cell over time, whose parameters are broadcast."""
    leaves = arrays(
        **{f"ScanLSTMCell_0__h{gate}__kernel": (4, 4) for gate in "ifgo"},
        **{f"ScanLSTMCell_0__h{gate}__bias": (4,) for gate in "ifgo"},
        **{f"ScanLSTMCell_0__i{gate}__kernel": (4, 4) for gate in "ifgo"},
    )
    found = aligned(leaves, made(cell=lambda: nnx.LSTMCell(4, 4, rngs=rngs())))
    assert (len(found.map.rows()), found.abstentions) == (12, [])
    assert {step.operation for step in found.map.rows()} == {None}


@pytest.mark.parametrize("before, after", [((5, 4), (5, 6)), ((5, 4), (4, 5)), ((5, 6), (7,))])
def test_shapes_that_differ_although_names_agree_are_reported(before, after):
    leaves = arrays(a__w=before, a__v=(3,))
    own = made(w=lambda: nnx.Param(jnp.zeros(after)), v=lambda: nnx.Param(jnp.zeros(3)))
    assert printed(aligned(leaves, made(a=own))) == (
        ["params/a/v -> a/v"],
        [],
        [f"params/a/w and a/w: {list(before)} in Linen, {list(after)} in NNX"],
    )


def test_the_size_of_a_cache_says_nothing_of_the_module():
    name = "MultiHeadDotProductAttention_0"
    shapes = {f"{name}__{part}__kernel": (4, 2, 3) for part in ("query", "key", "value")}
    leaves = arrays(**shapes, **{f"{name}__out__kernel": (2, 3, 4)})
    leaves["cache", name, "cached_key"] = np.zeros((7, 5, 2, 3))

    def make():
        layer = nnx.MultiHeadAttention(2, 4, 6, use_bias=False, decode=True, rngs=rngs())
        layer.init_cache((1, 5, 4))
        return layer

    found = aligned(leaves, made(mix=make))
    assert len(found.map.rows()) == 4
    assert list(map(str, found.mismatches)) == [
        "cache/MultiHeadDotProductAttention_0/cached_key and mix/cached_key: "
        "[7, 5, 2, 3] in Linen, [1, 5, 2, 3] in NNX"
    ]


# Properties


@dataclasses.dataclass(frozen=True)
class Tree:
    """A model of which both outlines are made: a class, its leaves, and modules in order."""

    kind: str
    leaves: tuple[tuple[str, tuple[int, ...]], ...] = ()
    children: tuple["Tree", ...] = ()


SIZE = st.sampled_from([2, 3])
LEAVES = st.builds(
    lambda a, b, c: Tree("Dense", (("kernel", (a, b)), ("bias", (c,)))), SIZE, SIZE, SIZE
) | st.just(Tree("RMSNorm", (("scale", (3,)),)))


def modules(children):
    return st.builds(
        Tree,
        st.sampled_from(["Block", "Mlp"]),
        st.sampled_from([(), (("w", (4,)),)]),
        st.lists(children, min_size=1, max_size=4).map(tuple),
    )


TREES = st.lists(st.recursive(LEAVES, modules, max_leaves=5), min_size=1, max_size=5).map(
    lambda children: Tree("Model", (), tuple(children))
)
NNX_KINDS = {"Dense": "Linear"}


@dataclasses.dataclass
class Twins:
    """Both outlines of a tree, and the map between them, as they are made.

    Each module may be changed on one side: `changes` is asked what to do with it.
    """

    change: Callable[[], str]
    linen: dict[tuple[str, ...], np.ndarray] = dataclasses.field(default_factory=dict)
    truth: dict[tuple[str, ...], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    count: int = 0

    def build(self, tree, linen, nnx):
        """NNX's outline of a tree that is at these paths. Linen's leaves are added to `linen`; no
        path (None) leaves a side out."""
        numbers, children = collections.Counter(), {}
        for child in tree.children:
            self.count += 1
            name = f"{'zyxw'[self.count % 4]}{self.count}"
            change = self.change()
            if linen is None or change == "not in Linen":
                inner = None
            elif change == "named":
                inner = (*linen, f"own{self.count}")
            elif change == "wrapped in Linen":
                inner = (*linen, f"Wrap_{self.count}", f"{child.kind}_0")
            else:
                inner = (*linen, f"{child.kind}_{numbers[child.kind]}")
                numbers[child.kind] += 1
            if nnx is None or change == "not in NNX":
                self.build(child, inner, None)
            elif change == "wrapped in NNX":
                path = (*nnx, name)
                made = self.build(child, inner, (*path, "inner"))
                wrap = f"Wrap{self.count}"
                children[name] = Module(path, wrap, children={"inner": made}, ordered=True)
            else:
                children[name] = self.build(child, inner, (*nnx, name))
        leaves = {}
        for name, shape in tree.leaves:
            if linen is not None:
                self.linen["params", *linen, name] = np.zeros(shape, "float32")
            if nnx is not None:
                leaf = Leaf((*nnx, name), shape, np.dtype("float32"), "Param")
                leaves[name] = (leaf,)
                if linen is not None:
                    self.truth["params", *linen, name] = leaf.path
        kind = NNX_KINDS.get(tree.kind, tree.kind)
        return Module(nnx or (), kind, children=children, leaves=leaves, ordered=True)


def answers(alignment):
    return {step.inputs[0]: step.outputs[0] for step in alignment.map.rows()}


@settings(deadline=None, max_examples=examples(150))
@given(TREES, st.randoms(use_true_random=False))
def test_models_that_correspond_are_solved_whatever_the_order_of_leaves(tree, rng):
    twins = Twins(lambda: "")
    model = twins.build(tree, (), ())
    paths = list(twins.linen)
    rng.shuffle(paths)
    found = align(linen_outline({path: twins.linen[path] for path in paths}), model)
    assert answers(found) == twins.truth
    assert (found.abstentions, found.mismatches) == ([], [])
    assert align(linen_outline(twins.linen), model) == found
    shapes = {path: leaf.shape for path, leaf in twins.linen.items()}
    assert from_rows(found.map.rows(), shapes).shapes == {
        leaf.path: leaf.shape for leaf in model.all_leaves()
    }


# What may be done to modules and still leave a trace on one of the sides.
CHANGES = {
    "Linen": ["not in Linen", "named", "wrapped in Linen"],
    "NNX": ["not in NNX", "wrapped in NNX"],
    "names and NNX": ["named", "not in NNX", "wrapped in NNX"],
    "both wrapped": ["wrapped in Linen", "wrapped in NNX"],
}


@settings(deadline=None, max_examples=examples(400))
@given(TREES, st.sampled_from(sorted(CHANGES)), st.data())
def test_where_sides_differ_no_answer_is_wrong(tree, side, data):
    choices = ["", "", "", *CHANGES[side]]
    twins = Twins(lambda: data.draw(st.sampled_from(choices)))
    model = twins.build(tree, (), ())
    found = align(linen_outline(twins.linen), model)
    wrong = {p: q for p, q in answers(found).items() if twins.truth.get(p) != q}
    assert wrong == {}
    # What has no answer is told.
    told = {path for entry in found.abstentions for path in entry.linen}
    told |= {leaf.path for entry in found.mismatches for leaf in entry.inputs}
    for path in twins.linen.keys() - answers(found).keys():
        assert path in told or any(path[1 : len(p) + 1] == p for p in told)


def match_of(before, after):
    """A match of leaves of these shapes, in Linen and in NNX."""
    return Match(
        (Leaf(("params", "w"), before, None, "params"),), Leaf(("w",), after, None, "Param")
    )


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(2, 5),
    st.data(),
)
def test_moves_are_all_that_make_the_shapes(shapes, length, data):
    rank = min(len(shape) for shape in shapes) + 1
    places = [
        (one, other)
        for one, other in itertools.product(range(-rank, rank), repeat=2)
        if 0 in (one, other) or min(one, other) > 0
    ]
    before, after = data.draw(st.sampled_from(places))
    arrays = []
    for shape in shapes:
        weight = np.arange(length * np.prod(shape)).reshape((length, *shape))
        arrays.append((np.moveaxis(weight, 0, before), np.moveaxis(weight, 0, after)))

    def moved(one, other):
        return tuple(np.moveaxis(weight, one, other).tobytes() for weight, _ in arrays)

    expected = {
        moved(one, other)
        for one, other in places
        if len({weight.shape[one] for weight, _ in arrays}) == 1
        if all(np.moveaxis(a, one, other).shape == b.shape for a, b in arrays)
    }
    assert tuple(weight.tobytes() for _, weight in arrays) in expected
    found = moves([match_of(a.shape, b.shape) for a, b in arrays])
    assert [moved(move.before, move.after) for move in found] == list(
        dict.fromkeys(moved(move.before, move.after) for move in found)
    )
    assert {moved(move.before, move.after) for move in found} == expected
    for move in found:
        for weight, _ in arrays:
            got = np.transpose(weight, move.order(weight.ndim))
            np.testing.assert_array_equal(got, np.moveaxis(weight, move.before, move.after))


def test_a_scalar_has_no_axis_of_layers():
    assert moves([match_of((), (3,)), match_of((3, 4), (4, 3))]) == []
    assert Move(0, 0).order(0) == ()
