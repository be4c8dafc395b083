"""Random rows of maps that apply to random leaves, one after another."""

import numpy as np
from hypothesis import strategies as st
from layouts import random_array

from reshard.arrays.operations import (
    Concat,
    Copies,
    Interleave,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.convert.leafmap import Row

KEYS = st.text(min_size=1, max_size=4) | st.text("ab/\"'\\{}^$.1 ", min_size=1, max_size=3)
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)
ORIGINS = st.sampled_from(["map", "path", "structure"])


def arrays_of(leaves, seed=0):
    """Random arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return {path: random_array(rng, shape) for path, shape in leaves.items()}


def bits(arrays):
    """Dtype, shape and bits of arrays."""
    return {path: (a.dtype, a.shape, a.tobytes()) for path, a in sorted(arrays.items())}


def apart(path, others):
    """Whether no path equals or is below another."""
    return all(path[: len(other)] != other and other[: len(path)] != path for other in others)


def alike(paths, shapes, shape, axis=None):
    """Up to three leaves of a shape, but for an axis."""

    def rest(sizes):
        return [None if n == axis else size for n, size in enumerate(sizes)]

    return [path for path in paths if rest(shapes[path]) == rest(shape)][:3]


@st.composite
def random_rows(draw):
    """Shapes of leaves, and rows for some of them."""
    leaves, used = {}, []

    def fresh():
        path = draw(PATHS.filter(lambda path: apart(path, used)))
        used.append(path)
        return path

    for _ in range(draw(st.integers(1, 4))):
        leaves[fresh()] = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    now, rows = dict(leaves), []
    for _ in range(draw(st.integers(0, 6))):
        paths = list(now)
        first = draw(st.sampled_from(paths))
        shape = now[first]
        axis = draw(st.integers(-len(shape), len(shape) - 1)) if shape else None
        kinds = ["transpose", "reshape", "pad", "stack", "rename", "copies"]
        axial = ["split", "unstack", "concat", "interleave"]
        kind = draw(st.sampled_from(kinds + axial * bool(shape)))
        inputs, operation = [first], None
        if kind == "transpose":
            operation = Transpose(tuple(draw(st.permutations(range(len(shape))))))
        elif kind == "reshape" and 0 not in shape:  # `derived.apply` refuses others
            sizes = draw(st.permutations([*shape, 1]))
            operation = Reshape((*sizes[:-2], int(np.prod(sizes[-2:]))))
        elif kind == "pad":
            width = st.tuples(st.integers(0, 2), st.integers(0, 2))
            widths = tuple(draw(width) for _ in shape)
            operation = Pad(widths, draw(st.floats(-9, 9, width=32) | st.integers(0, 3)))
        elif kind == "split":
            at = draw(st.integers(0, shape[axis]))
            operation = Split(axis, (at, shape[axis] - at))
        elif kind == "unstack" and shape[axis]:
            operation = Unstack(axis, shape[axis])
        elif kind == "copies":
            operation = Copies(draw(st.integers(1, 3)))
        elif kind == "interleave" and shape[axis]:
            operation = Interleave(axis, shape[axis], undo=draw(st.booleans()))
        elif kind == "stack":
            inputs = alike(draw(st.permutations(paths)), now, shape)
            names = draw(st.sampled_from([(), ("data", "model")]))
            operation = Stack(draw(st.integers(-len(shape) - 1, len(shape))), names)
        elif kind == "concat":
            operation = Concat(axis)
            inputs = alike(draw(st.permutations(paths)), now, shape, axis % len(shape))
        shapes = [now.pop(path) for path in inputs]
        shapes = shapes if operation is None else operation.shapes(shapes)
        free = [path for path in draw(st.permutations(used)) if path not in now]
        places = [path if draw(st.booleans()) else fresh() for path in free[: len(shapes)]]
        places += [fresh() for _ in shapes[len(places) :]]
        now.update(zip(places, shapes, strict=True))
        rows.append(Row(tuple(inputs), tuple(places), operation, draw(ORIGINS)))
    return leaves, rows
