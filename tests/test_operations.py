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

from reshard.arrays.boxes import replaced
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
    if least and not total:
        return ()
    cuts = draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=3)) if total > 1 else set()
    ends = [0, *sorted(cuts), total]
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    if not least and draw(st.booleans()):
        sizes.insert(draw(st.integers(0, len(sizes))), 0)
    return tuple(sizes)


@st.composite
def cases(draw, kinds=KINDS, least=0):
    """Any operation on arrays of up to a few hundred elements, with at least so many along each
    axis, and their shapes; axes counted from either end."""
    kind = draw(st.sampled_from(kinds))
    some = st.sampled_from((1, 2, 3, 4, 6, 8, 0)[: -1 if least else None])
    axial = kind in ("split", "concat", "unstack", "interleave")
    shape = tuple(draw(st.lists(some, min_size=int(axial), max_size=3)))
    rank = len(shape)
    among = rank + 1 if kind == "stack" else rank
    axis = draw(st.integers(-among, among - 1)) if among else 0
    if kind == "transpose":
        return Transpose(tuple(draw(st.permutations(range(rank))))), [shape]
    if kind == "reshape":
        shape = tuple(size or 1 for size in shape)  # no array has a size of 0
        return Reshape(tuple(draw(st.permutations(draw(factors(math.prod(shape))))))), [shape]
    if kind == "split":
        return Split(axis, draw(sums(shape[axis], least)) or (0,)), [shape]
    if kind == "concat":
        at = axis % rank
        lengths = draw(st.lists(some, min_size=1, max_size=3))
        return Concat(axis), [(*shape[:at], length, *shape[at + 1 :]) for length in lengths]
    if kind == "stack":
        names = draw(st.sampled_from([(), ("layers",)]))
        return Stack(axis, names), [shape] * draw(st.integers(1, 3))
    if kind == "unstack":
        return Unstack(axis, shape[axis]), [shape]
    if kind == "copies":
        return Copies(draw(st.integers(1, 3))), [shape]
    if kind == "interleave":
        parts, rows, blocks = (draw(st.integers(1, 3)) for _ in range(3))
        block = draw(st.sampled_from([parts * rows] + [None] * (blocks == 1)))
        shape = replaced(shape, axis % rank, parts * rows * blocks)
        return Interleave(axis, parts, block, draw(st.booleans())), [shape]
    width = st.integers(0, 3)
    widths = tuple(draw(st.tuples(width, width)) for _ in shape)
    if kind == "pad":
        return Pad(widths, 1), [shape]
    return Crop(widths), [tuple(a + n + b for n, (a, b) in zip(shape, widths, strict=True))]


def read(view):
    """A view's values; views count from 0, as arrays do."""
    assert tuple(view.domain.origin) == (0,) * view.rank
    return np.asarray(view.read().result())


def assert_equal(got, expected):
    assert [(x.shape, x.dtype, x.tobytes()) for x in got] == [
        (x.shape, x.dtype, np.ascontiguousarray(x).tobytes()) for x in expected
    ]


# Values, shapes, inverses.


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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_any_fill(value, dtype):
    x = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
    one = Pad(((1, 0), (0, 2)), value)
    assert_equal(map(read, one.views([ts.array(x)])), in_numpy(one, [x]))


def test_a_constant():
    values = np.arange(12, dtype="uint16").reshape(3, 4).T
    one = Constant(values)
    assert one.shapes([]) == [(4, 3)]
    assert_equal(map(read, one.views([])), [values])
    assert one == one and one != Constant(values)


def test_operations_are_values():
    """So that arrays with the same history can be told."""
    assert Split(1, (2, 3)) == Split(1, (2, 3)) != Split(1, (3, 2))
    assert len({Stack(0), Stack(0, ("x",)), Stack(0), Unstack(0, 2)}) == 3


# Specs.


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


def labels(shape, chunk, first=0):
    """For each element, the number of the chunk that holds it."""
    result = np.zeros(shape, int)
    for dim, (size, step) in enumerate(zip(shape, chunk, strict=True)):
        along = (np.arange(size) // step).reshape([-1] + [1] * (len(shape) - dim - 1))
        result = result * math.ceil(size / step) + along
    return result + first


def assert_no_chunk_is_cut(operation, shapes, chunks):
    """The grids of the outputs, none of whose boxes shares a chunk with another."""
    inside = [
        labels(shape, chunk, 10_000 * (i + 1))
        for i, (shape, chunk) in enumerate(zip(shapes, chunks, strict=True))
    ]
    grids = operation.chunks(chunks, shapes)
    made = [read(view) for view in operation.views([ts.array(x) for x in inside])]
    for output, grid in zip(made, grids, strict=True):
        assert len(grid) == output.ndim and min(grid, default=1) >= 1
        boxes = labels(output.shape, grid).reshape(-1)
        pairs = {(chunk, box) for chunk, box in zip(output.reshape(-1), boxes, strict=True)}
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
    (Reshape((8, 6)), [(48,)], [(9,)], [(8, 6)]),
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


# Nothing at all.


def test_parts_of_nothing():
    assert Split(0, (0, 3, 1)).chunks([(2,)], [(4,)]) == [(1,), (3,), (1,)]
    assert Split(0, (0, 0)).chunks([(2,)], [(0,)]) == [(1,), (1,)]
    assert Concat(0).chunks([(1,), (2,)], [(0,), (0,)]) == [(1,)]
    assert Unstack(0, 0).shapes([(0, 3)]) == []
    assert Unstack(0, 0).views([ts.array(np.zeros((0, 3)))]) == []


# Errors.

ERRORS = [
    (
        Transpose((1, 0)),
        [(2, 3, 4)],
        "axes [1, 0] are not an order of all axes of [2, 3, 4], which are [0, 1, 2]",
    ),
    (
        Transpose((0, -1)),
        [(2, 3)],
        "axes [0, -1] are not an order of all axes of [2, 3], which are [0, 1]",
    ),
    (Transpose((1, 0)), [], "this operation takes 1 array, not 0"),
    (Reshape((4, 2)), [(3, 3)], "[3, 3] cannot be reshaped to [4, 2]"),
    (Reshape((-3, -3)), [(3, 3)], "[3, 3] cannot be reshaped to [-3, -3]"),
    (
        Split(1, (2, 2)),
        [(4, 5)],
        "axis 1 of [4, 5] cannot be split into [2, 2]: positive sizes must add up to 5",
    ),
    (
        Split(0, (-1, 5)),
        [(4,)],
        "axis 0 of [4] cannot be split into [-1, 5]: positive sizes must add up to 4",
    ),
    (
        Split(-1, ()),
        [(4, 5)],
        "axis -1 of [4, 5] cannot be split into []: positive sizes must add up to 5",
    ),
    (Split(2, (4,)), [(4, 5)], "an array of [4, 5] has no axis 2"),
    (
        Concat(0),
        [(2, 3), (2, 4)],
        "[2, 3] and [2, 4] cannot be joined along axis 0: their other axes must be equal",
    ),
    (
        Concat(0),
        [(2,), (2, 3), (2,)],
        "[2] and [2, 3] cannot be joined along axis 0: their other axes must be equal",
    ),
    (
        Stack(0),
        [(2, 3), (3, 2), (2, 3)],
        "[2, 3] and [3, 2] cannot be stacked: their shapes must be equal",
    ),
    (Stack(3), [(2, 3), (2, 3)], "an array of [2, 3, 1] has no axis 3"),
    (Unstack(0, 3), [(2, 3)], "axis 0 of [2, 3] makes 2 arrays, not 3"),
    (Unstack(-3, 3), [(2, 3)], "an array of [2, 3] has no axis -3"),
    (
        Pad(((1, 1),), 0),
        [(2, 3)],
        "[(1, 1)] cannot pad [2, 3]: each axis needs two widths, of 0 or more",
    ),
    (
        Pad(((1, -1), (0, 0)), 0),
        [(2, 3)],
        "[(1, -1), (0, 0)] cannot pad [2, 3]: each axis needs two widths, of 0 or more",
    ),
    (Pad((), 0), [(), ()], "this operation takes 1 array, not 2"),
    (
        Interleave(0, 2, 4),
        [(6,)],
        "axis 0 of [6] cannot be divided into blocks of 4, each of 2 equal parts",
    ),
    (Interleave(1, 4), [(2, 6)], "axis 1 of [2, 6] cannot be divided into 4 equal parts"),
    (
        Interleave(0, 0, 0),
        [(0,)],
        "axis 0 of [0] cannot be divided into blocks of 0, each of 0 equal parts",
    ),
    (Interleave(1, 2), [(2,)], "an array of [2] has no axis 1"),
    (Copies(0), [(2,)], "the number of copies must be 1 to 65536, not 0"),
    (Equal(2), [(2,), (3,)], "arrays of [2] and [3] cannot be equal"),
    (Equal(2), [(2,)], "arrays of [2] cannot be equal"),
    (Scale(0.0), [(2,)], "an array cannot be scaled by 0.0: the number must be finite, and not 0"),
    (
        Add(math.inf),
        [(2,)],
        "an array cannot be increased by inf: the number must be finite, and not 0",
    ),
    (Crop(((1, 2),)), [(2,)], "[2] cannot be the result of padding by [(1, 2)]"),
    (Crop(((1, 0),)), [(2, 3)], "[2, 3] cannot be the result of padding by [(1, 0)]"),
]


@pytest.mark.parametrize(("operation", "shapes", "text"), ERRORS)
def test_operations_that_do_not_apply(operation, shapes, text):
    with pytest.raises(TreeMismatchError) as error:
        operation.shapes(shapes)
    assert str(error.value) == text


def test_operations_without_an_inverse():
    for operation, shapes, text in (
        (Crop(((1, 2),)), [(5,)], "a crop cannot be inverted: the cut elements are lost"),
        (
            Constant(np.zeros(3)),
            [],
            "values that are not from the checkpoint cannot be converted back",
        ),
    ):
        with pytest.raises(TreeMismatchError) as error:
            operation.inverse(shapes)
        assert str(error.value) == text
