"""Operations on whole arrays, against numpy: values, shapes, inverses, specs and grids."""

import itertools
import math

import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import tensorstore as ts
from by_numpy import in_numpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling import examples
from test_planner import labels

from reshard.arrays import boxes
from reshard.arrays.operations import (
    Add,
    Concat,
    Constant,
    Copies,
    Crop,
    Equal,
    Interleave,
    Pad,
    Reshape,
    Scale,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.errors import TreeMismatchError

KINDS = ("transpose", "reshape", "split", "concat", "stack", "unstack", "pad", "crop")
KINDS += ("interleave", "copies")


@st.composite
def factors(draw, count):
    """Up to five sizes whose product is `count`, ones among them."""
    sizes = []
    while count > 1 and len(sizes) < 2:
        sizes.append(draw(st.sampled_from([n for n in range(2, count + 1) if count % n == 0])))
        count //= sizes[-1]
    sizes += [count] * (count > 1)
    return tuple(draw(st.permutations([*sizes, *[1] * draw(st.integers(0, 2))])))


@st.composite
def sums(draw, total, least=0):
    """Sizes that are `total` together."""
    cuts = draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=3)) if total > 1 else set()
    ends = [0, *sorted(cuts), total]
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    if not least and draw(st.booleans()):
        sizes.insert(draw(st.integers(0, len(sizes))), 0)
    return tuple(sizes)


@st.composite
def operations(draw, kind, shape, least=0, most_parts=1000):
    """An operation of a kind on arrays of a shape, axes counted from either end, whose results have
    at least so many elements along each axis. An unstacked axis has at most so many parts."""
    rank = len(shape)
    axes = [axis for axis in range(-rank, rank) if kind != "unstack" or shape[axis] <= most_parts]
    axes = range(-rank - 1, rank + 1) if kind == "stack" else axes or [0]
    axis = draw(st.sampled_from(axes))
    width = st.integers(0, 3)
    match kind:
        case "transpose":
            return Transpose(tuple(draw(st.permutations(range(rank)))))
        case "reshape":
            return Reshape(tuple(draw(st.permutations(draw(factors(math.prod(shape)))))))
        case "split":
            return Split(axis, draw(sums(shape[axis], least)) or (0,))
        case "concat":
            return Concat(axis)
        case "stack":
            return Stack(axis, draw(st.sampled_from([(), ("layers",)])))
        case "unstack":
            return Unstack(axis, shape[axis])
        case "copies":
            return Copies(draw(st.integers(1, 3)))
        case "pad":
            return Pad(tuple(draw(st.tuples(width, width)) for _ in shape), 1)
        case "crop":
            widths = []
            for size in shape:
                first = draw(st.integers(0, min(size - least, 3)))
                widths.append((first, draw(st.integers(0, min(size - least - first, 3)))))
            return Crop(tuple(widths))
    raise AssertionError(kind)


@st.composite
def cases(draw, kinds=KINDS, least=0):
    """Any operation on arrays of up to a few hundred elements, with at least so many along each
    axis, and their shapes."""
    kind = draw(st.sampled_from(kinds))
    some = st.sampled_from((1, 2, 3, 4, 6, 8, 0)[: -1 if least else None])
    axial = kind in ("split", "concat", "unstack", "interleave")
    shape = tuple(draw(st.lists(some, min_size=int(axial), max_size=3)))
    if kind == "interleave":
        axis = draw(st.integers(-len(shape), len(shape) - 1))
        parts, rows, blocks = (draw(st.integers(1, 3)) for _ in range(3))
        block = draw(st.sampled_from([parts * rows] + [None] * (blocks == 1)))
        shape = boxes.replaced(shape, axis % len(shape), parts * rows * blocks)
        return Interleave(axis, parts, block, draw(st.booleans())), [shape]
    if kind == "reshape":
        shape = tuple(size or 1 for size in shape)  # no array has a size of 0
    operation, shapes = draw(operations(kind, shape, least)), [shape]
    if kind == "concat":
        lengths = draw(st.lists(some, min_size=1, max_size=3))
        shapes = [boxes.replaced(shape, operation.axis % len(shape), length) for length in lengths]
    if kind == "stack":
        shapes *= draw(st.integers(1, 3))
    return operation, shapes


def read(view):
    assert tuple(view.domain.origin) == (0,) * view.rank
    return np.asarray(view.read().result())


def assert_equal(got, expected):
    assert [(x.shape, x.dtype, x.tobytes()) for x in got] == [
        (x.shape, x.dtype, np.ascontiguousarray(x).tobytes()) for x in expected
    ]


@settings(deadline=None, max_examples=examples(300))
@given(cases(), st.sampled_from(["float32", "bfloat16", "int8", "int4", "bool", "complex64"]))
def test_shapes_and_views_are_those_of_numpy(case, dtype):
    operation, shapes = case
    rng = np.random.default_rng(math.prod(shapes[0]))
    arrays = [layouts.random_array(rng, shape, dtype) for shape in shapes]
    expected = in_numpy(operation, arrays)
    assert operation.shapes(shapes) == [x.shape for x in expected]
    views = operation.views([ts.array(x) for x in arrays])
    assert_equal(map(read, views), expected)


@settings(deadline=None, max_examples=examples(300))
@given(cases(kinds=[kind for kind in KINDS if kind not in ("crop", "copies")]))
def test_the_inverse_undoes_an_operation(case):
    operation, shapes = case
    arrays = [
        np.arange(math.prod(shape)).reshape(shape) + 1000 * i for i, shape in enumerate(shapes, 1)
    ]
    there = in_numpy(operation, arrays)
    inverse = operation.inverse(shapes)
    assume(there)  # of nothing, there is no way back
    assert inverse.shapes([x.shape for x in there]) == shapes
    assert_equal(map(read, inverse.views([ts.array(x) for x in there])), arrays)
    if not isinstance(operation, Stack | Pad):  # names and the fill are not in the inverse
        again = inverse.inverse([x.shape for x in there])
        assert again.shapes(shapes) == [x.shape for x in there]


@pytest.mark.parametrize("value", [0, 1, -2.5, float("inf"), float("nan"), True])
def test_any_fill(value):
    one, x = Pad(((1, 0), (0, 2)), value), np.arange(6).reshape(2, 3).astype(jnp.bfloat16)
    assert_equal(map(read, one.views([ts.array(x)])), in_numpy(one, [x]))


def test_a_constant():
    values = np.arange(12, dtype="uint16").reshape(3, 4).T
    one = Constant(values)
    assert one.shapes([]) == [(4, 3)]
    assert_equal(map(read, one.views([])), [values])
    assert one == one and one != Constant(values)


SPECS = [
    (Transpose((2, 0, 1)), [(2, 4, 8)], ["a,b,"], [",a,b"]),
    (Reshape((8, 8)), [(2, 4, 8)], ["a,b,c"], ["a,c"]),
    (Reshape((2, 4, 8)), [(8, 8)], ["a,b"], ["a,,b"]),
    (Reshape((8, 4, 2)), [(8, 8)], ["a+b,c"], ["a+b,c,"]),
    (Reshape((64,)), [(8, 8)], [",c"], [""]),
    (Reshape((1, 8, 1, 8)), [(8, 8)], ["a,b"], [",a,,b"]),
    (Reshape((1, 1)), [()], [None], [","]),
    (Split(1, (2, 6)), [(4, 8)], ["a,b"], ["a,b", "a,b"]),
    (Split(-1, (8,)), [(4, 8)], ["a"], ["a,"]),
    (Unstack(1, 2), [(4, 2, 8)], ["a,,b"], ["a,b", "a,b"]),
    (Unstack(0, 1), [(1, 8)], ["a,b"], ["b"]),
    (Pad(((0, 1), (2, 0)), 0), [(4, 8)], ["a"], ["a,"]),
    (Crop(((0, 1), (2, 0))), [(4, 8)], ["a,b"], ["a,b"]),
    (Concat(0), [(4, 4)] * 2, ["a,b", "a,b"], ["a,b"]),
    (Concat(0), [(4, 4)] * 2, ["a,b", "a"], ["a,"]),
    (Concat(1), [(4, 4)] * 2, ["a,b", ",b"], [",b"]),
    (Stack(0), [(4, 4)] * 2, ["a,b", "a,b"], [",a,b"]),
    (Stack(0, ("layers",)), [(4, 4)] * 2, ["a,b", "b,a"], ["layers,,"]),
    (Stack(-1, ("x", "y")), [(4, 4)] * 2, ["a,b", "a,b"], ["a,b,x+y"]),
]


def spec(text):
    """`"a,b+c,"` as a spec; None for that of a scalar."""
    entries = [] if text is None else text.split(",")
    return tuple(tuple(entry.split("+")) if entry else () for entry in entries)


@pytest.mark.parametrize(("operation", "shapes", "before", "after"), SPECS)
def test_specs(operation, shapes, before, after):
    assert operation.specs(list(map(spec, before)), shapes) == list(map(spec, after))


# Grids.


def assert_no_chunk_is_cut(operation, shapes, chunks):
    """The grids of the outputs, none of whose boxes shares a chunk with another."""
    inside = [
        labels(shape, chunk) + 10_000 * i
        for i, (shape, chunk) in enumerate(zip(shapes, chunks, strict=True), 1)
    ]
    grids = operation.chunks(chunks, shapes)
    made = [read(view) for view in operation.views([ts.array(x) for x in inside])]
    for output, grid in zip(made, grids, strict=True):
        assert len(grid) == output.ndim and min(grid, default=1) >= 1
        in_box = labels(output.shape, grid).reshape(-1)
        pairs = {(chunk, box) for chunk, box in zip(output.reshape(-1), in_box, strict=True)}
        held = [chunk for chunk, _ in pairs if chunk >= 10_000]  # less is what pads
        assert len(held) == len(set(held))
    return grids


@settings(deadline=None, max_examples=examples(800))
@given(st.data(), cases())
def test_no_box_cuts_a_chunk(data, case):
    operation, shapes = case
    chunks = [tuple(data.draw(st.integers(1, size + 1)) for size in s) for s in shapes]
    if data.draw(st.booleans()):
        chunks = [chunks[0]] * len(chunks)
    assert_no_chunk_is_cut(operation, shapes, chunks)


@settings(deadline=None, max_examples=examples(300))
@given(st.data(), cases(least=1))
def test_a_box_is_made_of_its_sources(data, case):
    """Of all that is in them and of nothing else, but for the rows that a reshape passes, and the
    blocks that are interleaved."""
    operation, shapes = case
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    inputs = [
        np.arange(math.prod(s)).reshape(s) + start for s, start in zip(shapes, starts, strict=False)
    ]
    padded = Pad(operation.widths, -1) if isinstance(operation, Pad) else operation
    for part, made in enumerate(in_numpy(padded, inputs)):
        ends = (
            sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2)))
            for n in made.shape
        )
        box = tuple(slice(*pair) for pair in ends)
        sources = operation.sources(part, box, shapes)
        found = {n for number, source in sources for n in inputs[number][source].ravel().tolist()}
        expected = {*made[box].ravel().tolist()} - {-1}
        more = isinstance(operation, Reshape | Interleave)
        assert found >= expected if more else found == expected


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_chunks_together_are_the_longest_run_that_is_a_box(data):
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    chunk = tuple(data.draw(st.integers(1, 10)) for _ in shape)
    count = data.draw(st.integers(-1, 40))
    found = boxes.chunks_together(shape, chunk, count)
    grid = [math.ceil(size / c) for size, c in zip(shape, chunk, strict=True)]
    numbers = np.arange(math.prod(grid)).reshape(grid)

    def run(taken):
        """How many chunks are in the first box of this many, if they are next to each other."""
        first = numbers[tuple(slice(t) for t in taken)].ravel().tolist()
        return len(first) if first == list(range(len(first))) else 0

    candidates = itertools.product(*[range(1, size + 1) for size in grid])
    most = max(n for n in map(run, candidates) if n <= max(count, 1))
    taken = tuple(f // c for f, c in zip(found, chunk, strict=True))
    assert found == tuple(t * c for t, c in zip(taken, chunk, strict=True))
    assert all(1 <= t <= size for t, size in zip(taken, grid, strict=True))
    assert run(taken) == most


@settings(deadline=None)
@given(st.data())
def test_chunks_together_of_empty_arrays_are_chunks(data):
    shape = (*data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)), 0)
    chunk = tuple(data.draw(st.integers(1, 4)) for _ in shape)
    found = boxes.chunks_together(shape, chunk, data.draw(st.integers(0, 10)))
    assert all(f % c == 0 and f for f, c in zip(found, chunk, strict=True))


# Of grids in which no chunk is cut, fine ones take less memory: layers apart, heads apart.
GRIDS = [
    # Grids go with their dimensions.
    (Transpose((2, 0, 1)), [(6, 16, 24)], [(1, 8, 6)], [(6, 1, 8)]),
    (Transpose(()), [()], [()], [()]),
    # (D, H * h) <-> (D, H, h): whole heads, parts of a head, neither.
    (Reshape((16, 4, 8)), [(16, 32)], [(4, 16)], [(4, 2, 8)]),
    (Reshape((16, 4, 8)), [(16, 32)], [(4, 4)], [(4, 1, 4)]),
    (Reshape((16, 4, 8)), [(16, 32)], [(4, 12)], [(4, 4, 8)]),
    (Reshape((16, 32)), [(16, 4, 8)], [(4, 2, 8)], [(4, 16)]),
    (Reshape((16, 32)), [(16, 4, 8)], [(4, 2, 4)], [(4, 32)]),
    (Reshape((16, 32)), [(16, 4, 8)], [(4, 3, 8)], [(4, 32)]),
    # (H, h, D) <-> (H * h, D), and all in one.
    (Reshape((32, 16)), [(4, 8, 16)], [(1, 8, 2)], [(8, 2)]),
    (Reshape((512,)), [(4, 8, 16)], [(1, 2, 16)], [(32,)]),
    (Reshape((8, 6)), [(4, 12)], [(1, 12)], [(2, 6)]),
    # Sizes of 1 come and go.
    (Reshape((1, 6, 1, 4)), [(6, 4)], [(2, 3)], [(1, 2, 1, 3)]),
    (Reshape((1,)), [()], [()], [(1,)]),
    # Layers.
    (Stack(0), [(16, 24)] * 3, [(8, 6)] * 3, [(1, 8, 6)]),
    (Stack(-1), [(16, 24)] * 3, [(8, 6)] * 3, [(8, 6, 1)]),
    (Stack(1), [(16, 24)] * 2, [(8, 6), (4, 12)], [(8, 1, 12)]),
    (Stack(0), [(10,)] * 2, [(4,), (3,)], [(1, 10)]),
    (Stack(0), [()] * 2, [()] * 2, [(1,)]),
    (Unstack(0, 6), [(6, 16, 24)], [(1, 8, 6)], [(8, 6)] * 6),
    (Unstack(0, 2), [(2,)], [(1,)], [()] * 2),
    # Parts at the edges of chunks, and elsewhere.
    (Split(1, (8, 8, 16)), [(16, 32)], [(4, 8)], [(4, 8)] * 3),
    (Split(1, (16, 16)), [(16, 32)], [(4, 32)], [(4, 16)] * 2),
    (Split(0, (12, 4)), [(16, 32)], [(8, 4)], [(12, 4), (4, 4)]),
    (Concat(1), [(16, 8), (16, 24)], [(4, 8)] * 2, [(4, 8)]),
    (Concat(1), [(16, 22), (16, 8)], [(4, 8)] * 2, [(4, 30)]),
    (Concat(1), [(16, 8), (16, 16)], [(4, 8), (8, 16)], [(8, 24)]),
    # Blocks of interleaved elements stay whole.
    (Interleave(0, 2, 8), [(32, 6)], [(4, 3)], [(8, 3)]),
    (Interleave(-1, 2, 8), [(6, 32)], [(4, 12)], [(4, 24)]),
    (Interleave(1, 2, None, True), [(6, 32)], [(4, 8)], [(4, 32)]),
    (Copies(2), [(6, 32)], [(4, 8)], [(4, 8)] * 2),
    # Edges.
    (Pad(((0, 3), (8, 1)), 0), [(16, 32)], [(8, 4)], [(8, 4)]),
    (Pad(((2, 0), (0, 0)), 0), [(16, 32)], [(8, 4)], [(18, 4)]),
    (Crop(((0, 3), (8, 1))), [(16, 32)], [(8, 4)], [(8, 4)]),
    (Crop(((2, 0), (0, 0))), [(16, 32)], [(8, 4)], [(14, 4)]),
    # No larger than what is left: such arrays could be written, and were refused when opened.
    (Split(0, (8, 8, 5)), [(21,)], [(8,)], [(8,), (8,), (5,)]),
    (Crop(((8, 1),)), [(21,)], [(4,)], [(4,)]),
    (Crop(((0, 1),)), [(21,)], [(21,)], [(20,)]),
]


@pytest.mark.parametrize(("operation", "shapes", "chunks", "grids"), GRIDS)
def test_grids(operation, shapes, chunks, grids):
    assert assert_no_chunk_is_cut(operation, shapes, chunks) == grids


def test_parts_of_nothing():
    assert Split(0, (0, 3, 1)).chunks([(2,)], [(4,)]) == [(1,), (3,), (1,)]
    assert Split(0, (0, 0)).chunks([(2,)], [(0,)]) == [(1,), (1,)]
    assert Concat(0).chunks([(1,), (2,)], [(0,), (0,)]) == [(1,)]
    assert Unstack(0, 0).shapes([(0, 3)]) == []
    assert Unstack(0, 0).views([ts.array(np.zeros((0, 3)))]) == []


ERRORS = {
    "axes {} are not an order of all axes of {}, which are {}": [
        (Transpose((1, 0)), [(2, 3, 4)], [1, 0], [2, 3, 4], [0, 1, 2]),
        (Transpose((0, -1)), [(2, 3)], [0, -1], [2, 3], [0, 1]),
    ],
    "this operation takes 1 array, not {}": [(Transpose((1, 0)), [], 0)],
    "{} cannot be reshaped to {}": [
        (Reshape((4, 2)), [(3, 3)], [3, 3], [4, 2]),
        (Reshape((-3, -3)), [(3, 3)], [3, 3], [-3, -3]),
    ],
    "axis {} of {} cannot be split into {}: positive sizes must add up to {}": [
        (Split(1, (2, 2)), [(4, 5)], 1, [4, 5], [2, 2], 5),
        (Split(0, (-1, 5)), [(4,)], 0, [4], [-1, 5], 4),
    ],
    "an array of {} has no axis {}": [
        (Split(2, (4,)), [(4, 5)], [4, 5], 2),
        (Stack(3), [(2, 3), (2, 3)], [2, 3, 1], 3),
        (Unstack(-3, 3), [(2, 3)], [2, 3], -3),
    ],
    "{} and {} cannot be joined along axis 0: their other axes must be equal": [
        (Concat(0), [(2, 3), (2, 4)], [2, 3], [2, 4]),
        (Concat(0), [(2,), (2, 3), (2,)], [2], [2, 3]),
    ],
    "{} and {} cannot be stacked: their shapes must be equal": [
        (Stack(0), [(2, 3), (3, 2), (2, 3)], [2, 3], [3, 2])
    ],
    "axis {} of {} makes {} arrays, not {}": [(Unstack(0, 3), [(2, 3)], 0, [2, 3], 2, 3)],
    "{} cannot pad {}: each axis needs two widths, of 0 or more": [
        (Pad(((1, 1),), 0), [(2, 3)], [(1, 1)], [2, 3]),
        (Pad(((1, -1), (0, 0)), 0), [(2, 3)], [(1, -1), (0, 0)], [2, 3]),
    ],
    "{} cannot be the result of padding by {}": [
        (Crop(((1, 2),)), [(2,)], [2], [(1, 2)]),
        (Crop(((1, 0),)), [(2, 3)], [2, 3], [(1, 0)]),
    ],
    "axis {} of {} cannot be divided into {} equal parts": [
        (Interleave(0, 2, 4), [(6,)], 0, [6], "blocks of 4, each of 2"),
        (Interleave(1, 4), [(2, 6)], 1, [2, 6], 4),
        (Interleave(0, 0, 0), [(0,)], 0, [0], "blocks of 0, each of 0"),
    ],
    "the number of copies must be 1 to 65536, not {}": [(Copies(0), [(2,)], 0)],
    "arrays of {} cannot be equal": [
        (Equal(2), [(2,), (3,)], "[2] and [3]"),
        (Equal(2), [(2,)], [2]),
    ],
    "an array cannot be {}: the number must be finite, and not 0": [
        (Scale(0.0), [(2,)], "scaled by 0.0"),
        (Add(math.inf), [(2,)], "increased by inf"),
    ],
}


@pytest.mark.parametrize(("text", "row"), [(text, row) for text in ERRORS for row in ERRORS[text]])
def test_operations_that_do_not_apply(text, row):
    operation, shapes, *values = row
    assert layouts.refused(TreeMismatchError, operation.shapes, shapes) == text.format(*values)


def test_operations_without_an_inverse():
    text = "a crop cannot be inverted: the cut elements are lost"
    assert layouts.refused(TreeMismatchError, Crop(((1, 2),)).inverse, [(5,)]) == text
    text = "values that are not from the checkpoint cannot be converted back"
    assert layouts.refused(TreeMismatchError, Constant(np.zeros(3)).inverse, []) == text
