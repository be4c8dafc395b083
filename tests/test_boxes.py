"""The arithmetic of boxes, against the elements that they hold."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from reshard.arrays import boxes


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
