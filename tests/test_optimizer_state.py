"""Optimizer state and its parameters, against optax."""

import itertools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import optimizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import EXHAUSTIVE

from reshard.sharding.optimizer_state import Parameters, matching_part

# The parameter of a leaf

OPTIMIZERS = {
    **optimizers.OPTIMIZERS,
    **optimizers.RESHAPING,
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "amsgrad": optax.amsgrad(1e-3),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
}
MATRIX, VECTOR = (4, 6), (6,)
TREES = {
    "modules": {
        "Dense_0": {"kernel": MATRIX, "bias": VECTOR},
        "Dense_1": {"kernel": MATRIX, "bias": VECTOR},
        "scale": VECTOR,
    },
    "nested": {
        "Dense_0": {"kernel": MATRIX, "bias": VECTOR},
        "Block_0": {"Dense_0": {"kernel": MATRIX}, "Block_0": {"Dense_0": {"kernel": MATRIX}}},
    },
    "lists": {"layers": [{"kernel": MATRIX}, {"kernel": MATRIX}], "head": [MATRIX, VECTOR]},
    "int keys": {"layers": {0: {"kernel": MATRIX}, 10: {"kernel": MATRIX}}},
    "slashes": {"mlp/linear": {"w": MATRIX}, "linear": {"w": MATRIX, "a/w": VECTOR}},
    "a list": [MATRIX, VECTOR, MATRIX],
    "names of moments": {"mu": {"kernel": MATRIX, "nu": VECTOR}, "count": VECTOR, "trace": MATRIX},
}


def parameters(shapes, larger=None):
    """Abstract parameters. The one with the number `larger` has a larger shape."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda value: isinstance(value, tuple))
    sizes = [tuple(size + 3 * (i == larger) for size in shape) for i, shape in enumerate(leaves)]
    return jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(size, "float32") for size in sizes])


def shapes_of(tx, params):
    leaves = layouts.saved_leaves(jax.eval_shape(tx.init, params), ("opt_state",))
    return {path: leaf.shape for path, leaf in leaves.items() if hasattr(leaf, "shape")}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_moment_belongs_to_the_parameter_that_optax_made_it_from(name, tree):
    """A moment grows with its parameter."""
    tx, shapes = OPTIMIZERS[name], TREES[tree]
    as_it_is = shapes_of(tx, parameters(shapes))
    count = len(jax.tree.leaves(parameters(shapes)))
    owner = {}
    for i in range(count):
        changed = shapes_of(tx, parameters(shapes, larger=i))
        owner |= {path: i for path, shape in as_it_is.items() if changed[path] != shape}
    assert owner
    for root in (("params",), ("state", "params"), ("params", "params"), ()):
        paths = list(layouts.saved_leaves(parameters(shapes), root))
        found = Parameters(iter(paths), iter(as_it_is))
        expected = {path: [paths[i]] for path, i in owner.items()}
        assert {path: found.followed_by(path) for path in expected} == expected


def test_the_longest_ending_decides_and_then_the_shortest_path():
    below = [("kernel",), ("Dense_0", "kernel"), ("Block_0", "Dense_0", "kernel")]
    below.append(("layers", 0, "kernel"))
    paths = [("params", *path) for path in below]
    expected = {("mu", *path): [whole] for path, whole in zip(below, paths, strict=True)}
    expected[("nu", "layers", "0", "kernel")] = [paths[3]]
    expected |= {("mu", "kernel", "v_row"): [], ("count",): [], (): []}
    found = Parameters(paths, expected)
    assert {path: found.followed_by(path) for path in expected} == expected
    assert Parameters([], [("mu", "w")]).followed_by(("mu", "w")) == []
    # Two that are as near are both named.
    others = [("opt_state", "mu", "w"), ("opt_state", "mu", "b"), ("opt_state", "slow", "w")]
    found = Parameters([("fast", "w"), ("slow", "w"), ("fast", "b")], others)
    assert found.followed_by(others[0]) == [("fast", "w"), ("slow", "w")]
    assert found.followed_by(others[1]) == [("fast", "b")]


# The part of a spec that fits a leaf

AXES = tuple((axis,) for axis in "abcde")


@settings(deadline=None)
@given(st.data())
def test_a_reduced_moment_keeps_what_is_left(data):
    shape = tuple(data.draw(st.permutations([2, 3, 5, 7])))[: data.draw(st.integers(1, 4))]
    summed = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    spec = AXES[: data.draw(st.integers(0, len(shape)))]
    full = spec + ((),) * (len(shape) - len(spec))
    whole = np.zeros(shape)
    kept = whole.sum(axis=tuple(summed), keepdims=True)
    part = matching_part(("v", "w"), kept.shape, shape, spec)
    if not summed:
        assert part == spec
    elif len(summed) == len(shape):
        assert part == ()
    else:
        assert part == tuple(() if dim in summed else full[dim] for dim in range(len(shape)))
        left = whole.sum(axis=tuple(summed)).shape
        expected = tuple(full[dim] for dim in range(len(shape)) if dim not in summed)
        assert matching_part(("v", "w"), left, shape, spec) == expected


def adafactor_axes(shape):
    """For each factored moment of `optax.scale_by_factored_rms` its shape, and for each of its
    dimensions that dimension of the parameter over which it varies if the gradient does."""
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    state = tx.init({"w": jnp.ones(shape)})

    @jax.jit
    @jax.vmap
    def update(gradient):
        return tx.update({"w": gradient}, state, {"w": jnp.ones(shape)})[1]

    lines = [np.arange(1.0, size + 1).reshape(size, *[1] * (len(shape) - 1)) for size in shape]
    lines = [np.moveaxis(line, 0, dim) for dim, line in enumerate(lines)]
    moments = update(np.stack([np.broadcast_to(line, shape) for line in lines]))
    found = {}
    for name in ("v_row", "v_col", "v"):
        moment = np.asarray(getattr(moments, name)["w"])
        axes = [None] * (moment.ndim - 1)
        for dim, axis in itertools.product(range(len(shape)), range(moment.ndim - 1)):
            if np.ptp(moment[dim], axis=axis).any():
                assert axes[axis] is None
                axes[axis] = dim
        found[name] = moment.shape[1:], axes
    return found


# Of four equal sizes and more, which one numpy's sort puts last differs between processors.
SHAPES = [s for rank in range(1, 4) for s in itertools.product((2, 3), repeat=rank)]
SHAPES += [(4, 1), (1, 1), (3, 1, 3), (2, 4, 3), (64, 16, 32)]
SOME = [(2,), (2, 2), (2, 3), (3, 2), (2, 2, 3), (3, 2, 3), (1, 1), (2, 4, 3)]


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=() if s in SOME else EXHAUSTIVE) for s in SHAPES]
)
def test_a_factored_moment_has_the_axes_that_adafactor_keeps(shape):
    spec = AXES[: len(shape)]
    for name, (moment, axes) in adafactor_axes(shape).items():
        part = matching_part(("opt_state", 0, name, "w"), moment, shape, spec)
        expected = tuple(() if dim is None else spec[dim] for dim in axes)
        # A dimension of one element varies over nothing, however it is called.
        part += ((),) * (len(moment) - len(part))
        pairs = zip(moment, part, strict=True)
        assert tuple(() if size == 1 else axes for size, axes in pairs) == expected


def test_a_factor_of_a_square_is_identified_by_its_name():
    spec = (("data",), ("model",))
    for name, shape, whole, part in (
        ("v_row", (4,), spec, (("data",),)),
        ("v_col", (4,), spec, (("model",),)),
        ("v", (4,), (("data",), ("data",)), (("data",),)),
        ("v", (4,), (), ((),)),
        ("v", (4, 1), spec, (("data",), ())),
        ("v", (1, 4), spec, ((), ("model",))),
    ):
        assert matching_part((name, "w"), shape, (4, 4), whole) == part


SEVERAL = "it may be over dimensions"
NO_PART = "its shape is not a part of the parameter's"


@pytest.mark.parametrize(
    ("name", "shape", "parameter", "reason"),
    [
        ("v", (4,), (4, 4), f"{SEVERAL} (0,) or (1,) of the parameter's [4, 4]"),
        ("v", (4, 2), (4, 2, 2), f"{SEVERAL} (0, 1) or (0, 2) of the parameter's [4, 2, 2]"),
        ("v_row/v_col", (4,), (4, 4), f"{SEVERAL} (0,) or (1,) of the parameter's [4, 4]"),
        ("mu", (5,), (4, 6), f"{NO_PART}, [4, 6]"),
        ("mu", (6, 4), (4, 6), f"{NO_PART}, [4, 6]"),
        ("mu", (4, 6, 3), (4, 6), f"{NO_PART}, [4, 6]"),
        ("mu", (0,), (4,), f"{NO_PART}, [4]"),
    ],
)
def test_reasons_why_no_part_fits(name, shape, parameter, reason):
    path = (*name.split("/"), "w")[:2]
    assert matching_part(path, shape, parameter, AXES[: min(len(parameter), 2)]) == reason
