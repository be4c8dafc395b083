"""Every standard layer, in Linen and in NNX, with random leaves: the same outputs."""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import converted
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from converted import Compact, Of, convert, random_variables, rngs, some
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from sampling import EXHAUSTIVE
from twins import named

import reshard
from reshard.convert.align import align
from reshard.convert.module_tree import linen_outline, path_outline
from reshard.restore.pytrees import flatten_state
from reshard.tree import format_path

pytestmark = pytest.mark.usefixtures("quickly_compiled")
LAYERS = json.loads((pathlib.Path(__file__).parent / "data/pairs/layers.json").read_text())
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Layer(NamedTuple):
    """A layer in both APIs, what both take, and what Linen's is called with besides."""

    linen: nn.Module
    nnx: Callable[[], Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012


def cell_inputs(*carry):
    return (carry if len(carry) > 1 else carry[0], some(2, 8))


def linear(features=4):
    return nnx.Linear(8, features, rngs=rngs())


def of(kind, *arguments, **options):
    """What makes a module of NNX."""
    return lambda: kind(*arguments, **options, rngs=rngs())


attention = functools.partial(of, nnx.MultiHeadAttention, 2, 8, decode=False)


LSTM_CARRY = (some(2, 4, seed=2), some(2, 4, seed=3))
ROWS, SEQUENCES, IMAGES = ((some(*shape),) for shape in ((3, 8), (2, 3, 8), (2, 8, 8, 3)))
TABLE = {
    "Dense": Layer(nn.Dense(16), of(nnx.Linear, 8, 16), ROWS),
    "DenseGeneral(2,4)": Layer(nn.DenseGeneral((2, 4)), of(nnx.LinearGeneral, 8, (2, 4)), ROWS),
    "DenseGeneral axis(-2,-1)": Layer(
        nn.DenseGeneral(5, axis=(-2, -1)),
        of(nnx.LinearGeneral, (3, 8), 5, axis=(-2, -1)),
        SEQUENCES,
    ),
    "DenseGeneral batch_dims": Layer(
        nn.DenseGeneral(5, batch_dims=(0,)),
        of(nnx.LinearGeneral, 8, 5, batch_axis={0: 2}),
        SEQUENCES,
    ),
    "Einsum": Layer(
        nn.Einsum((8, 2, 4), "bd,dhk->bhk"), of(nnx.Einsum, "bd,dhk->bhk", (8, 2, 4), (2, 4)), ROWS
    ),
    "Embed": Layer(nn.Embed(10, 8), of(nnx.Embed, 10, 8), (np.array([[3, 9], [0, 4]]),)),
    "LayerNorm": Layer(nn.LayerNorm(), of(nnx.LayerNorm, 8), ROWS),
    "RMSNorm": Layer(nn.RMSNorm(), of(nnx.RMSNorm, 8), ROWS),
    "GroupNorm": Layer(nn.GroupNorm(4), of(nnx.GroupNorm, 8, num_groups=4), SEQUENCES),
    "InstanceNorm": Layer(nn.InstanceNorm(), of(nnx.InstanceNorm, 8), SEQUENCES),
    "BatchNorm": Layer(
        nn.BatchNorm(),
        of(nnx.BatchNorm, 8, use_running_average=True),
        ROWS,
        {"use_running_average": True},
    ),
    "WeightNorm": Layer(
        nn.WeightNorm(nn.Dense(4)), lambda: nnx.WeightNorm(linear(), rngs=rngs()), ROWS
    ),
    "SpectralNorm": Layer(
        nn.SpectralNorm(nn.Dense(4)),
        lambda: nnx.SpectralNorm(linear(), update_stats=False, rngs=rngs()),
        ROWS,
        {"update_stats": False},
    ),
    "Conv": Layer(nn.Conv(4, (3, 3)), of(nnx.Conv, 3, 4, (3, 3)), IMAGES),
    "Conv groups": Layer(
        nn.Conv(6, (3, 3), feature_group_count=3),
        of(nnx.Conv, 3, 6, (3, 3), feature_group_count=3),
        IMAGES,
    ),
    "ConvTranspose": Layer(
        nn.ConvTranspose(4, (3, 3)), of(nnx.ConvTranspose, 3, 4, (3, 3)), IMAGES
    ),
    "ConvTranspose tk": Layer(
        nn.ConvTranspose(4, (3, 3), transpose_kernel=True),
        of(nnx.ConvTranspose, 3, 4, (3, 3), transpose_kernel=True),
        IMAGES,
    ),
    "MHDPA": Layer(nn.MultiHeadDotProductAttention(2), attention(), (*SEQUENCES, some(2, 5, 8))),
    "MHA qk norm": Layer(
        nn.MultiHeadDotProductAttention(2, normalize_qk=True),
        attention(normalize_qk=True),
        (*SEQUENCES, some(2, 5, 8)),
    ),
    "SelfAttention": Layer(nn.SelfAttention(2), attention(), SEQUENCES),
    "LSTMCell": Layer(nn.LSTMCell(4), of(nnx.LSTMCell, 8, 4), cell_inputs(*LSTM_CARRY)),
    "OptLSTM": Layer(
        nn.OptimizedLSTMCell(4), of(nnx.OptimizedLSTMCell, 8, 4), cell_inputs(*LSTM_CARRY)
    ),
    "GRU": Layer(nn.GRUCell(4), of(nnx.GRUCell, 8, 4), cell_inputs(some(2, 4))),
    "SimpleCell": Layer(nn.SimpleCell(4), of(nnx.SimpleCell, 8, 4), cell_inputs(some(2, 4))),
    "RNN(LSTM)": Layer(
        nn.RNN(nn.LSTMCell(4)), lambda: nnx.RNN(nnx.LSTMCell(8, 4, rngs=rngs())), SEQUENCES
    ),
    "Bidirectional": Layer(
        nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))),
        lambda: nnx.Bidirectional(
            *(nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs())) for _ in range(2)), rngs=rngs()
        ),
        SEQUENCES,
    ),
    "PReLU": Layer(nn.PReLU(), nnx.PReLU, ROWS),
    "Sequential": Layer(
        nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)]),
        lambda: nnx.Sequential(linear(), nnx.relu, nnx.Linear(4, 2, rngs=rngs())),
        ROWS,
    ),
    "Dropout": Layer(
        nn.Dropout(0.5, deterministic=True), of(nnx.Dropout, 0.5, deterministic=True), ROWS
    ),
}
# Layers that one of the two APIs does not have.
ONE_SIDED = {"LoRA", "MGU", "ConvLSTM", "ConvLocal"}
# Leaves without a place in NNX.
ZEROS = {
    "GRU": [("params", "hn", "bias")],
    "Bidirectional": [
        ("params", "backward_rnn", "cell", "hn", "bias"),
        ("params", "forward_rnn", "cell", "hn", "bias"),
    ],
}


def assert_same_outputs(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def carried(variables, make, zeros=()):
    """What `convert` makes, of which nothing is lost but some zeros, and all is filled."""
    made = convert(variables, make)
    assert (made.lost, made.unfilled) == (set(zeros), set())
    assert tuple(made.alignment.map.must_be_zero) == tuple(zeros)
    return made


def variables_of(layer, zeros=()):
    variables = random_variables(layer.linen, *layer.inputs, **layer.kwargs)
    return converted.zeroed(variables, zeros)


@pytest.mark.parametrize("name", TABLE)
def test_a_layer_gives_the_same_in_nnx(name):
    """Alone and in a model that holds it. The leaves of both are those on record, and their paths
    are enough where no class is known."""
    layer, zeros = TABLE[name], ZEROS.get(name, [])
    variables = variables_of(layer, zeros)
    made = carried(variables, layer.nnx, zeros)
    rows = made.alignment.map.rows()
    assert (made.alignment.abstentions, made.alignment.mismatches) == ([], [])
    assert {step.origin for step in rows} <= {"path"}
    expected = layer.linen.apply(variables, *layer.inputs, **layer.kwargs)

    leaves = flatten_dict(variables)
    others = {leaf.path: leaf for leaf in flatten_state(made.model).leaves}
    found = {"linen": {"/".join(k): f"{x.shape}:{x.dtype}" for k, x in leaves.items()}, "nnx": {}}
    for path, leaf in others.items():
        # Of variables alone, as which newer releases of flax hold the scales of a WeightNorm, too.
        if leaf.wrapper is not None and not {"rngs", "scales"} & {*path}:
            kind = type(leaf.wrapper).__name__
            found["nnx"]["/".join(path)] = f"{leaf.value.shape}:{leaf.value.dtype} <{kind}>"
    for side, record in LAYERS[name].items():
        assert found[side] == {path: text for path, text in record.items() if "rngs/" not in path}
    if name != "SimpleCell":
        outline = path_outline({path: leaf.value for path, leaf in others.items()})
        assert set(align(linen_outline(leaves), outline).map.rows()) == set(rows)
    assert_same_outputs(made.model(*layer.inputs), expected)

    class Held(nn.Module):
        layer: nn.Module

        def __call__(self, *inputs):
            return self.layer(*inputs, **layer_kwargs)

    layer_kwargs = layer.kwargs
    zeros = [("params", "layer", *path[1:]) for path in zeros]
    held = Held(layer.linen.clone(parent=None))
    variables = converted.zeroed(random_variables(held, *layer.inputs), zeros)
    made = carried(variables, lambda: Of(layer=layer.nnx()), zeros)
    expected = held.apply(variables, *layer.inputs)
    assert_same_outputs(made.model.layer(*layer.inputs), expected)


def test_the_table_has_every_layer():
    assert {*TABLE, "MHA decode"} | ONE_SIDED == set(LAYERS)


def told(leaves, outline):
    """The rows and the abstentions of an alignment, as text."""
    found = align(linen_outline(leaves), outline)
    return list(map(str, found.map.rows())), list(map(str, found.abstentions))


def test_a_simple_cell_is_not_taken_for_one_by_its_names_alone():
    layer = TABLE["SimpleCell"]
    others = {leaf.path: leaf.value for leaf in flatten_state(layer.nnx()).leaves}
    open_ = "h and i, perhaps dense_h and dense_i: ambiguous: neither names nor classes decide"
    assert told(flatten_dict(variables_of(layer)), path_outline(others)) == ([], [open_])


@pytest.mark.parametrize("batch_axes", [(2,), pytest.param((2, 3), marks=EXHAUSTIVE)])
def test_attention_decodes_on_from_a_cache(batch_axes, tmp_path):
    linen = nn.MultiHeadDotProductAttention(2, decode=True)
    whole, token = some(*batch_axes, 5, 8), some(*batch_axes, 1, 8)
    variables = random_variables(linen, whole)
    variables["cache"]["cache_index"] = jnp.int32(3)

    def make():
        layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs())
        layer.init_cache(whole.shape)
        return layer

    source = layouts.save_standard(tmp_path / "linen", variables)
    reshard.save(reshard.to_nnx(source, make), tmp_path / "nnx")
    model = reshard.restore(tmp_path / "nnx", make())
    for _ in range(2):
        expected, changed = linen.apply(variables, token, mutable=["cache"])
        variables = {**variables, **changed}
        assert_same_outputs(model(token), expected)
        for name, leaf in variables["cache"].items():
            assert_same_outputs(getattr(model, name)[...], leaf)
    assert reshard.diff(source, reshard.to_linen(tmp_path / "nnx"), values=True).equal


@pytest.mark.parametrize(
    ("linen", "kind"),
    [(nn.LSTMCell(4), nnx.OptimizedLSTMCell), (nn.OptimizedLSTMCell(4), nnx.LSTMCell)],
)
def test_each_lstm_of_linen_is_the_other_of_nnx(linen, kind):
    inputs = cell_inputs(*LSTM_CARRY)
    variables = random_variables(linen, *inputs)
    made = carried(variables, of(kind, 8, 4))
    assert_same_outputs(made.model(*inputs), linen.apply(variables, *inputs))


ONLY_LINEN = {
    "MGU": (nn.MGUCell, (4,), cell_inputs(some(2, 4))),
    "ConvLSTM": (nn.ConvLSTMCell, (4, (3, 3)), ((some(2, 8, 8, 4),) * 2, some(2, 8, 8, 3))),
    "ConvLocal": (nn.ConvLocal, (4, (3, 3)), (some(2, 8, 8, 3),)),
}


@pytest.mark.parametrize("name", ONLY_LINEN)
@pytest.mark.parametrize("named", [True, False])
def test_a_layer_that_nnx_lacks_becomes_no_other(name, named):
    kind, arguments, inputs = ONLY_LINEN[name]
    path = ("layer",) if named else (f"{kind.__name__}_0",)
    module = Compact(lambda *x: kind(*arguments, name="layer" if named else None)(*x))
    leaves = flatten_dict(random_variables(module, *inputs))
    for other in (nnx.GRUCell, nnx.LSTMCell, nnx.SimpleCell):
        outline = converted.outline_of(lambda other=other: nnx.Dict(layer=of(other, 8, 4)()))
        found = align(linen_outline(leaves), outline)
        assert found.map.rows() == []
        assert [entry.linen for entry in found.abstentions] == [(path,)]


def test_gates_that_differ_in_size_are_not_joined():
    leaves = flatten_dict(variables_of(TABLE["GRU"]))
    leaves["params", "ir", "kernel"] = np.zeros((8, 5))
    assert told(leaves, converted.outline_of(TABLE["GRU"].nnx)) == (
        [],
        ["hn, hr, hz, ... iz (6), perhaps dense_i and dense_h: they are different recurrent cells"],
    )


GATES = {nnx.SimpleCell: [""], nnx.GRUCell: [*"rzn"], nnx.LSTMCell: [*"ifgo"]}
HELD = "dense_i and dense_h"
OTHER_CELL = "{}, perhaps {}: they are different recurrent cells"


def refusal_of(folder, params, make):
    """What stands against the conversion of these parameters, and hints."""
    layouts.save_standard(folder / "linen", {"params": params})
    error = converted.refused(reshard.to_nnx, folder / "linen", make)
    return error.problems, error.hints


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("only", ["all", "h", "one"])
def test_gates_that_are_arrays_are_refused(only, kind, tmp_path):
    """Not layers with a kernel: the user's own cell."""
    cell = {
        f"{part}{gate}": some(8 if part == "i" else 4, 4) for part in "ih" for gate in GATES[kind]
    }
    if only == "h":
        cell = {
            name: array if name[0] == "h" else {"kernel": array} for name, array in cell.items()
        }
    elif only == "one":
        cell = dict([cell.popitem()])
    problems, hints = refusal_of(tmp_path, {"cell": cell}, lambda: Of(cell=of(kind, 8, 4)()))
    assert problems == (OTHER_CELL.format("cell", "cell"),)
    assert hints == ("source=..., the Linen model, supplies the classes",)


def test_gates_of_nnx_that_are_arrays_are_refused(tmp_path):
    layouts.save_standard(tmp_path / "nnx", {"dense_h": some(4, 4), "dense_i": some(8, 4)})

    def linen():
        return nn.SimpleCell(4).init(jax.random.key(0), some(2, 4), some(2, 8))

    error = converted.refused(reshard.to_linen, tmp_path / "nnx", linen)
    text = "ambiguous: neither names nor classes decide"
    assert error.problems == (f"h and i, perhaps dense_h and dense_i: {text}",)


def gates(names):
    return {name: {"kernel": some(8 if name[0] == "i" else 4, 4)} for name in names.split()}


CELL = of(nnx.GRUCell, 8, 4)


@pytest.mark.parametrize(
    "params, model, problem",
    [
        (gates("ir iz in hr hz"), CELL, OTHER_CELL.format("hr, hz, in, ... iz (5)", HELD)),
        (gates("i h"), CELL, OTHER_CELL.format("h and i", HELD)),
        (gates("ir"), CELL, OTHER_CELL.format("ir", HELD)),
        ({"w": some(8, 4)}, CELL, OTHER_CELL.format("params/w", HELD)),
        (
            {"Dense_0/kernel/scale": some(4)},
            lambda: nnx.WeightNorm(linear(), rngs=rngs()),
            'params/"Dense_0/kernel/scale", perhaps layer_instance and scales: '
            "the leaves that they normalise have no counterparts",
        ),
    ],
)
def test_a_model_that_is_another_layer(params, model, problem, tmp_path):
    problems, hints = refusal_of(tmp_path, params, model)
    assert problems == (problem,)
    assert not [hint for hint in hints if "NAME" in hint]


def test_leaves_of_another_collection_are_refused():
    leaves = flatten_dict(variables_of(TABLE["BatchNorm"]))
    moved = {path: leaf for path, leaf in leaves.items() if path[-1] in ("scale", "bias")}
    moved["params", "mean"] = leaves["batch_stats", "mean"]
    moved["statistics", "var"] = leaves["batch_stats", "var"]
    moved["batch_stats", "scale"] = moved.pop(("params", "scale"))
    found = align(linen_outline(moved), converted.outline_of(TABLE["BatchNorm"].nnx))
    assert {format_path(path) for step in found.map.rows() for path in step.inputs} == {
        "params/bias",
        "statistics/var",  # a name of the user's own
    }
    assert sorted(map(str, found.mismatches)) == [
        "batch_stats/scale and scale: batch_stats in Linen, Param in NNX",
        "params/mean and mean: params in Linen, BatchStat in NNX",
    ]


def test_a_name_in_two_collections_goes_by_the_class_of_the_variable():
    leaves = {("params", "scale"): some(3), ("batch_stats", "scale"): some(3, seed=2)}
    outline = converted.outline_of(lambda: Of(scale=nnx.BatchStat(jnp.zeros(3))))
    open_ = ["params/scale: NNX has no counterpart"]
    assert told(leaves, outline) == (["batch_stats/scale -> scale"], open_)
    several = "the same name in several collections"
    assert told(leaves, path_outline({("scale",): some(3)})) == (
        [],
        [f"batch_stats/scale and params/scale, perhaps scale: {several}"],
    )


class TestNorms:
    """Layers that name their own leaves after those of other layers."""

    def test_beside_what_they_wrap_in_a_compact_method(self):
        def function(x):
            # The outer layer is made first.
            return nn.Dense(3)(nn.WeightNorm(nn.Dense(4))(nn.WeightNorm(nn.Dense(8))(x)))

        def twin():
            second, first = (nnx.WeightNorm(linear(size), rngs=rngs()) for size in (4, 8))
            return Of(last=nnx.Linear(4, 3, rngs=rngs()), second=second, first=first)

        inputs = (some(5, 8),)
        variables = random_variables(Compact(function), *inputs)
        assert ("params", "WeightNorm_0", "Dense_1/kernel/scale") in flatten_dict(variables)
        made = carried(variables, twin)
        assert {step.origin for step in made.alignment.map.rows()} == {"structure"}
        model = made.model
        expected = Compact(function).apply(variables, *inputs)
        assert_same_outputs(model.last(model.second(model.first(*inputs))), expected)

    @pytest.mark.parametrize("kind", ["WeightNorm", "SpectralNorm"])
    def test_of_a_layer_that_the_model_has_too(self, kind):
        class Linen(nn.Module):
            def setup(self):
                self.dense = nn.Dense(4)
                self.normed = getattr(nn, kind)(self.dense)

            def __call__(self, x):
                return self.normed(x, **({} if kind == "WeightNorm" else {"update_stats": False}))

        def twin():
            normed = getattr(nnx, kind)(linear(), rngs=rngs())
            return Of(normed=normed, dense=normed.layer_instance)

        inputs = (some(5, 8),)
        variables = random_variables(Linen(), *inputs)
        made = carried(variables, twin)
        made.model.eval()
        assert_same_outputs(made.model.normed(*inputs), Linen().apply(variables, *inputs))

    def test_of_a_module_with_several_layers(self):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(nn.tanh(nn.Dense(8, name="deep")(x)))

        def function(x):
            return nn.SpectralNorm(Inner())(x, update_stats=False)

        inputs = (some(5, 8),)
        variables = random_variables(Compact(function), *inputs)
        key = ("batch_stats", "SpectralNorm_0", "Inner_0/Dense_0/kernel/u")
        assert key in flatten_dict(variables)
        twin = named("Inner", deep=lambda: linear(8), out=lambda: linear(3))
        twin.__call__ = lambda self, x: self.out(nnx.tanh(self.deep(x)))
        norm = functools.partial(nnx.SpectralNorm, update_stats=False)
        made = carried(variables, lambda: nnx.Dict(n=norm(twin(), rngs=rngs())))
        expected = Compact(function).apply(variables, *inputs)
        assert_same_outputs(made.model["n"](*inputs), expected)

    def test_without_the_layer_that_they_are_for(self):
        leaves = flatten_dict(variables_of(TABLE["WeightNorm"]))
        del leaves["params", "layer_instance", "kernel"]
        assert told(leaves, converted.outline_of(TABLE["WeightNorm"].nnx)) == (
            ["params/layer_instance/bias -> layer_instance/bias"],
            [
                'params/"layer_instance/kernel/scale", perhaps layer_instance and scales: '
                "the leaves that they normalise have no counterparts"
            ],
        )
