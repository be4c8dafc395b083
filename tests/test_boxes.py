"""The arithmetic of boxes, against the elements that they hold."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from reshard.arrays import boxes

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def shapes_and_boxes(draw, count, empty=False):
    """A shape, and boxes of that rank inside it."""
    shape = draw(SHAPES)

    def part(size):
        start = draw(st.integers(0, size if empty else size - 1))
        return slice(start, draw(st.integers(start + (not empty), size)))

    return shape, [tuple(part(size) for size in shape) for _ in range(count)]


def elements(shape, box):
    """The numbers of the elements in a box."""
    return set(np.arange(math.prod(shape)).reshape(shape)[box].ravel().tolist())


@settings(deadline=None)
@given(st.data())
def test_an_index_of_jax_has_its_ends_written_out(data):
    shape = data.draw(SHAPES)

    def part(size):
        ends = st.one_of(st.none(), st.integers(0, size))
        step = data.draw(st.sampled_from([None, 1]))
        return slice(data.draw(ends), data.draw(ends), step)

    index = tuple(part(size) for size in shape)
    box = boxes.from_index(index, shape)
    assert all(isinstance(p.start, int) and isinstance(p.stop, int) for p in box)
    assert [p.step for p in box] == [None] * len(shape)
    assert elements(shape, box) == elements(shape, index)


@settings(deadline=None, max_examples=examples(200))
@given(shapes_and_boxes(2, empty=True))
def test_the_common_part_holds_the_common_elements(case):
    shape, (one, other) = case
    expected = elements(shape, one) & elements(shape, other)
    found = boxes.intersection(one, other)
    assert found == boxes.intersection(other, one)
    assert (found is None) == (not expected)
    if found is not None:
        assert elements(shape, found) == expected


@settings(deadline=None)
@given(shapes_and_boxes(2))
def test_a_box_as_seen_from_the_smallest_that_holds_it(case):
    shape, some = case
    outer, box = boxes.bounding_box(some), some[0]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    held = np.isin(numbers, [*set().union(*(elements(shape, each) for each in some))])
    assert outer == tuple(slice(min(d), max(d) + 1) for d in np.argwhere(held).T)
    seen = numbers[outer][boxes.inside(box, outer)]
    assert np.array_equal(seen, numbers[box])
    assert seen.shape == boxes.shape_of(box)


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
