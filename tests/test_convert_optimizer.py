"""Optimizer state that follows its parameters, against what optax makes of parameters that are as
they are afterwards."""

import hypothesis
import jax
import layouts
import numpy as np
import optax
import pytest
from by_numpy import in_numpy, viewed
from flax.traverse_util import unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import BY_NAME
from random_rows import random_rows
from sampling import examples

from reshard.arrays.operations import (
    Concat,
    Copies,
    Crop,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.convert.leafmap import Filled, LeafMap, Row, Source, from_rows, renaming
from reshard.convert.optimizer import Followed, mirrored
from reshard.convert.optimizer import followed as optimizer_state
from reshard.tree import split_path

F32 = np.dtype("float32")


OPTIMIZERS = {
    **BY_NAME,
    "momentum": optax.sgd(optax.linear_schedule(1.0, 0.0, 9), momentum=0.9),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "chain": optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.ema(0.9)),
    "adafactor": optax.adafactor(1e-3, momentum=0.9),
    "accumulated adafactor": optax.MultiSteps(optax.adafactor(1e-3), 2).gradient_transformation(),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def nested(shapes):
    """A tree of abstract parameters from their paths."""
    return unflatten_dict({p: jax.ShapeDtypeStruct(shape, F32) for p, shape in shapes.items()})


def state_of(tx, shapes):
    """What optax makes of parameters: path below the state -> shape and dtype, None without one."""
    leaves = layouts.saved_leaves(jax.eval_shape(tx.init, nested(shapes)))
    return {
        path: (leaf.shape, np.dtype(leaf.dtype)) if hasattr(leaf, "shape") else None
        for path, leaf in leaves.items()
    }


def below(shapes, *root):
    return {(*root, *path): shape for path, shape in shapes.items()}


def row(before, after, operation=None, origin="map"):
    """A row of printed paths, with blanks between several."""
    places = [tuple(tuple(path.split("/")) for path in text.split()) for text in (before, after)]
    return Row(*places, operation, origin)


def renaming_rows(names, *collection):
    return [Row(((*collection, *old),), (new,)) for old, new in names.items()]


def follow(rows, parameters, leaves, ahead=None):
    """What becomes of optimizer state when rows say what becomes of the parameters."""
    made = {path for row in rows for path in row.outputs}
    others = {path: (4, 6) for row in rows for path in row.inputs if path not in made}
    model = from_rows(rows, others | parameters)
    named = {path: value for path, value in model.values.items() if path in model.origin}
    return optimizer_state(LeafMap(named, model.origin), parameters, leaves, ahead)


def whole(found, leaves):
    """The map of all optimizer state that has values."""
    arrays = {path: leaf[0] for path, leaf in leaves.items() if leaf}
    return renaming({path: path for path in arrays}, arrays).then(found.map)


def carried(found, leaves):
    """The optimizer state after its map, as `state_of` gives it."""
    made = {}
    for path, value in whole(found, leaves).values.items():
        if isinstance(value, Filled):
            made[path] = value.shape, value.dtype
        else:
            (dtype,) = {leaves[source][1] for source in LeafMap({path: value}).sources()}
            made[path] = value.shape, dtype
    gone = {path for sources in found.placeholders.values() for path in sources}
    empty = dict.fromkeys(path for path, leaf in leaves.items() if not leaf and path not in gone)
    return {**made, **empty, **dict.fromkeys(found.placeholders)}


def followed(steps, shapes, tx, after):
    """The steps of a state of optax's, which must become the state of the parameters afterwards."""
    leaves = state_of(tx, shapes)
    found = follow(steps, below(shapes, "params"), leaves)
    assert found.problems == ()
    assert carried(found, leaves) == state_of(tx, after)
    return found


def one(operation, before, after):
    """A step from `params/old`, or several, to `new`, or several."""
    inputs = tuple(("params", f"old_{i}", "kernel") for i in range(before))
    return Row(inputs, tuple((f"new_{i}", "kernel") for i in range(after)), operation)


def at(name, shapes):
    return {(f"{name}_{i}", "kernel"): shape for i, shape in enumerate(shapes)}


PARAMETERS = [  # before, after, the shape
    ("Dense_0/kernel", "linear/kernel", (4, 6)),
    ("Dense_0/bias", "linear/bias", (6,)),
    ("Block_0/Dense_0/kernel", "block/inner/0/kernel", (6, 4)),
    ("Block_0/scale", "block/scale", ()),
    ("embedding", "embedding", (7, 4)),
]
NAMES = {split_path(before): shape for before, _, shape in PARAMETERS}
RENAMED = {split_path(before): split_path(after) for before, after, _ in PARAMETERS}


FULL = [
    (Transpose((2, 0, 1)), [(4, 6, 2)]),
    (Reshape((24,)), [(4, 6)]),
    (Split(-1, (3, 3)), [(4, 6)]),
    (Concat(0), [(4, 6), (2, 6)]),
    (Concat(-1), [(6,), (5,), (6,)]),
    (Stack(0), [(4, 6)] * 3),
    (Stack(-1), [(4,)] * 3),
    (Stack(0), [()] * 3),
    (Unstack(0, 3), [(3, 4, 6)]),
    (Unstack(-1, 6), [(4, 6)]),
    (Pad(((0, 2), (1, 0)), 0), [(4, 6)]),
    (Pad(((0, 2),), -0.0), [(4,)]),
    (Crop(((0, 2), (1, 0))), [(4, 6)]),
    # Adafactor has a leaf of shape (1,) where it keeps no moment. Here it is one.
    (Stack(0), [(1,)] * 3),
    (Unstack(0, 3), [(3, 1)]),
    (Concat(0), [(1,), (1,)]),
    (Split(0, (1, 1)), [(2,)]),
]


@EACH
@pytest.mark.parametrize(("operation", "shapes"), FULL, ids=[f"{o} {s[0]}" for o, s in FULL])
def test_an_operation_on_parameters_is_done_to_their_moments(name, operation, shapes):
    made = operation.shapes(shapes)
    step = one(operation, len(shapes), len(made))
    found = followed([step], at("old", shapes), OPTIMIZERS[name], at("new", made))
    assert {(row.operation, row.origin) for row in found.map.rows()} == {(operation, "map")}


def test_placeholders_know_what_they_were():
    shapes = {("params", f"layer_{i}", "b"): (4,) for i in range(2)}
    steps = [
        row("params/layer_0/b params/layer_1/b", "both/b", Concat(0)),
        row("both/b", "one/b other/b", Split(0, (2, 6))),
    ]
    leaves = {("0", "mu", f"layer_{i}", "b"): None for i in range(2)}
    found = follow(steps, shapes, leaves)
    made = [("0", "mu", name, "b") for name in ("one", "other")]
    assert found.placeholders == dict.fromkeys(made, tuple(leaves))
    assert carried(found, leaves) == dict.fromkeys(made)


def test_what_is_neither_changed_nor_a_mirror_is_left_alone():
    shapes = below(NAMES, "params")
    leaves = {
        **state_of(OPTIMIZERS["inject_hyperparams"], NAMES),
        ("extra", "kernel"): ((4, 6), F32),
        ("extra", "loss_scale"): ((), F32),
        ("history", "Dense_1", "kernel"): ((4, 6), F32),
        ("nothing",): None,
    }
    found = follow([row("params/Dense_0/kernel", "params/Dense_0/weight")], shapes, leaves)
    state = ("inner_state", 0)
    values = {
        (*state, moment, "Dense_0", "weight"): Source((*state, moment, "Dense_0", "kernel"), (4, 6))
        for moment in ("mu", "nu")
    }
    assert found == Followed(LeafMap(values, dict.fromkeys(values, "map")), {}, ())
    step = row("params/Dense_0/kernel", "params/last/kernel")
    assert follow([step], shapes, leaves).problems == tuple(
        f"{path}: float32[4,6] is of no parameter, and parameters change their order, shape or "
        "number"
        for path in ("extra/kernel", "history/Dense_1/kernel")
    )


@EACH
def test_what_is_ahead_of_parameters_is_not_the_same_before_and_after(name):
    """Linen's parameters are below a collection that optimizer state may lack, NNX's are not, and
    may be below an attribute of the same name."""
    renamed = {old: ("params", *new) for old, new in RENAMED.items()}
    steps = renaming_rows(renamed, "params")
    linen, nnx = NAMES, {new: NAMES[old] for old, new in renamed.items()}
    leaves = state_of(OPTIMIZERS[name], linen)
    found = follow(steps, below(linen, "params"), leaves, ())
    assert found.problems == ()
    made = carried(found, leaves)
    assert made == state_of(OPTIMIZERS[name], nnx)
    steps_back = [Row(row.outputs, row.inputs) for row in steps]
    back = follow(steps_back, nnx, made, ("params",))
    assert back.problems == ()
    assert carried(back, made) == leaves
    inside = follow(steps_back, nnx, made)
    assert carried(inside, made) == state_of(OPTIMIZERS[name], below(linen, "params"))


# Whose a leaf is


@pytest.mark.parametrize(
    ("shapes", "optimizers"),
    [
        (
            {
                "mu/kernel": (4, 6),
                "mu/nu": (6,),
                "nu/mu/kernel": (6, 4),
                "v_row/v": (3,),
                "kernel": (2, 2),
            },
            ["adam", "momentum", "adafactor", "MultiSteps", "chain"],
        ),
        (
            {"count": (), "b1": (6,), "w1": (4, 6), "b2": (5,), "scale": ()},
            ["adam", "momentum", "inject_hyperparams", "MultiSteps", "multi_transform"],
        ),
    ],
)
def test_parameters_that_are_called_as_what_optimizers_have(shapes, optimizers):
    """Moments; and counters and hyperparameters, which are nobody's."""
    shapes = {split_path(path): shape for path, shape in shapes.items()}
    names = {path: tuple(f"{key}_x" for key in path) for path in shapes}
    after = {names[path]: shape for path, shape in shapes.items()}
    for name in optimizers:
        followed(renaming_rows(names, "params"), shapes, OPTIMIZERS[name], after)


def test_a_scalar_of_every_parameter_follows_under_a_new_name():
    shapes = {("params", "x", "a"): (4, 6), ("params", "x", "b"): ()}
    leaves = {("scales", "x", key): ((), F32) for key in "ab"}
    found = follow([row(f"params/x/{key}", f"y/{key}") for key in "ab"], shapes, leaves)
    assert carried(found, leaves) == {("scales", "y", key): ((), F32) for key in "ab"}


def test_what_mirrors_what():
    one, other = ("encoder", "layer", "w"), ("decoder", "layer", "w")
    parameters = {("params", *path): (2,) for path in (one, other, ("w",))}
    places = {
        (0, "mu", *one): (("params", *one), (0, "mu")),
        (0, "mu", *other): (("params", *other), (0, "mu")),
        (0, "mu", "w"): (("params", "w"), (0, "mu")),
        # The others lack the collection: the name is the optimizer's.
        ("ema", "params", *one): (("params", *one), ("ema", "params")),
    }
    leaves = dict.fromkeys([*places, (0, "other", "layer", "w"), (0, "count")])
    assert mirrored(parameters, leaves) == [(path, *found) for path, found in places.items()]


# Moments of a part of the shape

MOMENTS = ("v_row", "v_col", "v")


@jax.jit
def moments(gradient):
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    params = {"a": gradient}
    _, state = tx.update(params, tx.init(params), params)
    return [getattr(state, name)["a"] for name in MOMENTS]


def factors(gradient):
    """Adafactor's moments of one parameter, after a step with a gradient."""
    return dict(zip(MOMENTS, map(np.asarray, moments(gradient)), strict=True))


def check_factors(operation, shapes, seed=0):
    """What becomes of the moments of parameters of these shapes is what optax has of what becomes
    of the gradients; or the problems, if there are some."""
    rng = np.random.default_rng(seed)
    gradients = [rng.uniform(0.5, 2.0, shape).astype(F32) for shape in shapes]

    def moments_of(gradients, name):
        return {
            ("0", moment, f"{name}_{i}", "w"): leaf
            for i, gradient in enumerate(gradients)
            for moment, leaf in factors(gradient).items()
        }

    made = in_numpy(operation, gradients)
    parameters = {("params", f"old_{i}", "w"): shape for i, shape in enumerate(shapes)}
    step = Row(tuple(parameters), tuple((f"new_{i}", "w") for i in range(len(made))), operation)
    leaves = moments_of(gradients, "old")
    described = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    found = follow([step], parameters, described)
    if found.problems:
        return found.problems
    assert not any(leaves.pop(path).any() for path in found.map.must_be_zero)
    values = viewed(found.map.rows(), leaves) | {
        path: np.zeros(value.shape, value.dtype)
        for path, value in found.map.values.items()
        if isinstance(value, Filled)
    }
    expected = moments_of(made, "new")
    assert {path: leaf.shape for path, leaf in values.items()} == {
        path: leaf.shape for path, leaf in expected.items()
    }
    for path, leaf in expected.items():
        np.testing.assert_allclose(values[path], leaf, rtol=1e-5, err_msg=str(path))
    return ()


@st.composite
def part_cases(draw):
    """Shapes that adafactor factors, and an operation that can be done to factors."""
    kind = draw(st.sampled_from(["transpose", "stack", "unstack"]))
    rank = draw(st.integers(3 if kind == "unstack" else 2, 4 if kind == "unstack" else 3))
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 5]), min_size=rank, max_size=rank)))
    if kind == "transpose":
        return Transpose(tuple(draw(st.permutations(range(rank))))), [shape]
    axis = draw(st.integers(-rank, rank - 1))
    if kind == "unstack":
        return Unstack(axis, shape[axis]), [shape]
    return Stack(axis), [shape] * draw(st.sampled_from([1, 2, 4]))


@settings(deadline=None, max_examples=examples(40))
@given(part_cases(), st.integers(0, 99))
def test_factors_become_what_optax_has_of_the_whole(case, seed):
    operation, shapes = case
    problems = check_factors(operation, shapes, seed)
    whole = operation.shapes(shapes)[0] if isinstance(operation, Stack) else shapes[0]
    last, two, *rest = (*sorted(whole)[::-1], 0)
    tied = two in (last, rest[0])
    if isinstance(operation, Transpose):
        assert bool(problems) == tied
    else:
        assert bool(problems) == (whole[operation.axis] >= two or (tied and len(whole) > 3))


WOULD = "adafactor would factor it over the layers, axis {} of {}"
HAS = "adafactor has factored it over the layers, axis {} of {}"
SEVERAL = "it is a part of a parameter that has several largest dimensions"
EITHER = "it may be over dimensions (0, 1, 3) or (0, 2, 3) of the parameter's [5, 3, 3, 2]"


def whole_only(name):
    """Why an operation cannot be done to the factors."""
    end = f"of its parameter's [4, 6], and {name} cannot be applied to a part"
    return [f"its shape [{size}] is a part {end}" for size in (4, 6)]


@pytest.mark.parametrize(
    ("operation", "shapes", "reasons"),
    [
        (Transpose((1, 0)), [(6, 6)], [SEVERAL] * 2),
        (Transpose((1, 2, 0)), [(3, 6, 3)], [SEVERAL] * 2),
        # Of four sizes and more, which of equal ones comes last differs between processors.
        (Stack(0), [(4, 4, 3)] * 2, [SEVERAL] * 2),
        (Unstack(3, 2), [(5, 3, 3, 2)], [SEVERAL, EITHER]),
        (Stack(0), [(3, 6)] * 3, [WOULD.format(0, [3, 3, 6])] * 2),
        (Stack(-1), [(3, 6)] * 7, [WOULD.format(2, [3, 6, 7])] * 2),
        (Unstack(0, 5), [(5, 4, 6)], [HAS.format(0, [5, 4, 6])] * 2),
        (Unstack(-2, 4), [(4, 4, 6)], [HAS.format(1, [4, 4, 6])] * 2),
        (Reshape((24,)), [(4, 6)], whole_only("reshape")),
        (Pad(((0, 2), (0, 0)), 0), [(4, 6)], whole_only("pad")),
        (Crop(((0, 2), (1, 0))), [(4, 6)], whole_only("crop")),
        (Split(0, (2, 2)), [(4, 6)], whole_only("split")),
        (Concat(1), [(4, 6), (4, 5)], whole_only("concat")),
        # What is factored and what is not.
        (
            *(Concat(0), [(2, 6), (1, 6)]),
            ["only some of them have a moment"] * 3,
        ),
    ],
)
def test_factors_that_would_not_be_those_of_the_new_parameter(operation, shapes, reasons):
    assert check_factors(operation, shapes) == tuple(
        " + ".join(f"0/{name}/old_{i}/w" for i in range(len(shapes))) + f": {why}"
        for name, why in zip(MOMENTS, reasons, strict=False)
    )


def test_the_zeros_that_adafactor_has_instead_of_moments_stay_what_they_are():
    """They are not stacked; what is there of them afterwards has no other source."""
    shapes = {(f"layer_{i}", "w"): (200, 150) for i in range(2)}
    steps = [
        row("params/layer_0/w params/layer_1/w", "both/w", Stack(0)),
        row("both/w", "layers/w", Transpose((0, 2, 1))),
    ]
    leaves = state_of(optax.scale_by_factored_rms(), shapes)
    found = follow(steps, below(shapes, "params"), leaves)
    zeros = Filled((1,), F32)
    assert found.map.must_be_zero == dict.fromkeys(
        [("v", f"layer_{i}", "w") for i in (0, 1)], zeros
    )
    assert found.map.values["v", "layers", "w"] == zeros
    assert [row.operation for row in found.map.rows()] == [Stack(0), Transpose((0, 1))] * 2
    after = {("layers", "w"): (2, 150, 200)}
    assert carried(found, leaves) == state_of(optax.scale_by_factored_rms(), after)


FROM_4 = optax.adafactor(1e-3, min_dim_size_to_factor=4)
FROM_128, NOTHING = optax.adafactor(1e-3), optax.adafactor(1e-3, factored=False)


@pytest.mark.parametrize(
    ("tx", "others", "operation", "shapes", "refused"),
    [
        # By default from 128 on, and every parameter here is smaller or larger than that.
        (FROM_128, [], Stack(0), [(200,)] * 128, True),
        (FROM_128, [(128, 130)], Stack(0), [(200,)] * 128, True),
        (FROM_128, [(127, 500)], Reshape((128, 128)), [(16384,)], True),
        (FROM_128, [], Concat(0), [(64, 256), (64, 256)], True),
        (FROM_128, [], Pad(((0, 28), (0, 0)), 0), [(100, 200)], True),
        (FROM_128, [], Stack(0), [(200,)] * 127, False),
        (FROM_128, [(128, 130)], Stack(0), [(200,)] * 127, False),
        (FROM_128, [(127, 500)], Reshape((127, 128)), [(16256,)], False),
        # It has factored less, and whether it would the others is not known.
        (FROM_4, [(4, 6)], Stack(0), [(9,)] * 3, True),
        (FROM_4, [(4, 6), (2, 8)], Stack(1), [(9,)] * 3, True),
        (FROM_4, [(4, 6), (3, 8)], Stack(0), [(9,)] * 3, False),
        # It has not factored these, so perhaps it does so from 301 on.
        (NOTHING, [(300, 400)], Stack(0), [(999,)] * 301, True),
        (NOTHING, [(300, 400)], Stack(0), [(999,)] * 300, False),
        # Moments of full shape are what they are.
        (optax.adam(1e-3), [], Stack(0), [(200,)] * 300, False),
    ],
)
def test_what_adafactor_may_factor_is_not_carried_along_whole(
    tx, others, operation, shapes, refused
):
    before = at("old", shapes) | at("other", others)
    (shape,) = operation.shapes(shapes)
    step = one(operation, len(shapes), 1)
    if refused:
        found = follow([step], below(before, "params"), state_of(tx, before))
        names = " + ".join(f"0/v/old_{i}/kernel" for i in range(len(shapes)))
        text = f"{names}: adafactor may factor a parameter of the shape {list(shape)}"
        assert found.problems == (text,)
    else:
        same = [Row((("params", *path),), (path,)) for path in at("other", others)]
        followed([step, *same], before, tx, at("new", [shape]) | at("other", others))


# What cannot be carried along

PAIR = {("params", "a"): (4, 6), ("params", "b"): (4, 6)}
BOTH = row("params/a params/b", "layers/w", Stack(0))
TURNED = row("params/a", "w", Transpose((1, 0)))
BECOME_ONE = "they become one, but"
PARTS = "mu/a + mu/b: they have different parts of their parameters"


def mu(*shapes):
    """A moment of the parameters with these names; None without a value."""
    return {("mu", key): shape and (shape, F32) for key, shape in zip("abcd", shapes, strict=False)}


WHY = [  # steps, parameters, state, and the problems
    ([BOTH], PAIR, mu((4, 6), None), f"mu/a + mu/b: {BECOME_ONE} mu/b has no value"),
    (
        *([BOTH], PAIR, mu(None, (4, 6)) | {("nu", "a"): ((4, 6), F32)}),
        f"mu/a + mu/b: {BECOME_ONE} mu/a has no value",
        f"nu/a + nu/b: {BECOME_ONE} nu/b has no value",
    ),
    ([BOTH], PAIR, mu(None), f"mu/a + mu/b: {BECOME_ONE} mu/b has no value"),
    (
        [row("params/a params/b params/c", "layers/w", Stack(0))],
        *({**PAIR, ("params", "c"): (4, 6)}, mu(None, (4, 6))),
        f"mu/a + mu/b + mu/c: {BECOME_ONE} mu/a and mu/c have no value",
    ),
    (
        [
            row("rest/m", "params/c", Crop(((0, 1), (0, 0)))),
            row("params/a params/c", "w", Concat(0)),
        ],
        *(PAIR, mu((4, 6), (4, 6)), f"mu/a + mu/rest/m: {BECOME_ONE} mu/rest/m has no value"),
    ),
    (
        *([row("params/a rest/m", "w", Concat(0))], PAIR, mu((4, 6), (4, 6))),
        f"mu/a + mu/rest/m: {BECOME_ONE} mu/rest/m has no value",
    ),
    (
        *([row("params/a", "w", Pad(((0, 0), (1, 0)), 1.5))], PAIR, mu((4, 6), (4, 6))),
        "mu/a: a moment cannot be padded with 1.5: that is not a linear operation",
    ),
    # Shapes that no optimizer of optax has, or that are not alike.
    ([BOTH], PAIR, mu((4, 6), (4,)), PARTS),
    ([row("params/a params/b", "w", Concat(0))], PAIR, mu((4,), (6,)), PARTS),
    (
        [row("params/m/a", "w b", Split(0, (1, 3)))],
        {("params", "m", "a"): (4, 6), ("params", "b"): (4,)},
        {("scale", "m", "a"): ((), F32)},
        "scale/m/a: its shape [] is a part of its parameter's [4, 6], and split cannot be applied "
        "to a part",
    ),
    (
        *([BOTH], PAIR, mu((5, 4, 6), (5, 4, 6))),
        "mu/a + mu/b: it has the shape [5, 4, 6], and its parameter has [4, 6]",
    ),
    (
        [TURNED],
        PAIR,
        mu((4, 1), (4, 1)),
        "mu/a: it has the shape [4, 1], and its parameter has [4, 6]",
    ),
    ([TURNED], PAIR, mu((5,), (5,)), "mu/a: its shape is not a part of the parameter's, [4, 6]"),
    (
        [row("params/a", "w", Transpose((1, 0, 2)))],
        *({("params", "a"): (6, 6, 4), ("params", "b"): (4,)}, mu((6, 4), (4,))),
        "mu/a: it may be over dimensions (0, 2) or (1, 2) of the parameter's [6, 6, 4]",
    ),
    # A moment without an axis that is not one of the two largest.
    (
        [row("params/a", "w", Transpose((2, 1, 0)))],
        *({("params", "a"): (2, 6, 4), ("params", "b"): (4,)}, mu((6, 4), (4,))),
        "mu/a: its shape [6, 4] is a part of its parameter's [2, 6, 4], and transpose cannot be "
        "applied to a part",
    ),
    # What comes of something that is told of is not told of again.
    (
        [
            BOTH,
            row("layers/w", "x y", Split(0, (1, 1))),
            row("x params/c", "z", Concat(0)),
            row("y", "params/b", Reshape((4, 6))),
            row("params/b", "v", Transpose((1, 0))),
            row("params/d", "w", Pad(((1, 0),), 1.0)),
        ],
        {**PAIR, ("params", "c"): (3, 4, 6), ("params", "d"): (2,)},
        mu((4, 6), None, (3, 4, 6), (2,)),
        f"mu/a + mu/b: {BECOME_ONE} mu/b has no value",
        "mu/d: a moment cannot be padded with 1.0: that is not a linear operation",
    ),
]


@pytest.mark.parametrize("case", WHY)
def test_why_state_cannot_follow(case):
    steps, parameters, leaves, *problems = case
    assert list(follow(steps, parameters, leaves).problems) == problems


def test_state_near_the_place_of_a_parameter_is_not_left_behind():
    """A list in place of each moment, and moments that are boxed where parameters are not."""
    shapes = {("block", "w"): (4, 6), ("block", "b"): (6,), ("head", "w"): (6,)}
    leaves = {
        **state_of(optax.sm3(1e-3), shapes),
        ("ema", "block", "w", "value"): ((4, 6), F32),
        ("ema", "block", "b", "value"): None,
        ("ema", "head", "w", "value"): ((6,), F32),
    }
    found = follow([row("params/block/w", "layer/kernel")], below(shapes, "params"), leaves)
    assert found.problems == (
        "0/mu/block/w/0: its path does not match that of its parameter params/block/w",
        "0/mu/block/w/1: its path does not match that of its parameter params/block/w",
        "ema/block/w/value: its path does not match that of its parameter params/block/w",
    )
    boxed = {(*path, "value"): shape for path, shape in below(shapes, "params").items()}
    step = row("params/block/w/value", "layer/kernel")
    leaves = state_of(optax.lion(1e-3), shapes)
    assert follow([step], boxed, leaves).problems == (
        "0/mu/block/w: its path does not match that of its parameter params/block/w/value",
    )


# Whose state is the same whatever parameters are called.
CHAINS = st.lists(
    st.sampled_from(["adam", "momentum", "lion", "rmsprop", "MultiSteps", "inject_hyperparams"]),
    min_size=1,
    max_size=2,
    unique=True,
)


@settings(deadline=None, max_examples=examples(200))
@given(random_rows(), CHAINS)
def test_any_map_gives_optax_state_of_the_new_parameters_and_back(case, names):
    """Step by step, and then the axes of all that is made are turned."""
    leaves, rows = case
    hypothesis.assume(not any(isinstance(each.operation, Copies) for each in rows))
    tx = optax.chain(*(OPTIMIZERS[name] for name in names))
    shapes, steps, after = {(*path, "w"): shape for path, shape in leaves.items()}, [], {}
    for each in rows:
        sides = (tuple(("params", *p, "w") for p in side) for side in (each.inputs, each.outputs))
        pad = isinstance(each.operation, Pad)
        steps.append(Row(*sides, Pad(each.operation.widths, 0) if pad else each.operation))
    for path, shape in from_rows(steps, below(shapes, "params")).shapes.items():
        axes = tuple(range(len(shape)))[::-1]
        steps.append(Row((path,), (path[1:],), Transpose(axes) if axes[1:] else None))
        after[path[1:]] = shape[::-1]
    found = followed(steps, shapes, tx, after)
    forth = whole(found, state_of(tx, shapes))
    assert forth.then(forth.inverse()).shapes == forth.sources()
