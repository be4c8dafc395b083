"""Shares of a plan: each box and each stored value in exactly one, all of about one size."""

import collections
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import changed, make
from test_planner import layout

import reshard
from reshard.arrays.boxes import grid_boxes, grid_size
from reshard.engine.plan import ArrayPlan, co_read
from reshard.engine.shares import CHUNK_BYTES, divide, sums
from reshard.writer.arrays import BoxRange, ValueRange
from reshard.writer.plan import Plan

SIZES = st.integers(1, 13)


@st.composite
def grids(draw, group):
    """Arrays of one grid of boxes, that are read together."""
    rank = draw(st.integers(0, 3))
    chunk = tuple(draw(SIZES) for _ in range(rank))
    box = tuple(c * draw(st.integers(1, 3)) for c in chunk)
    shape = tuple(draw(st.integers(0 if n == 0 else 1, 40)) for n in range(rank))
    co_read = draw(st.integers(1, 3))
    return [
        ArrayPlan(
            layout(
                shape,
                tuple(draw(SIZES) for _ in range(rank)),
                chunk,
                path=(group, n),
                group=group,
                co_read=co_read,
                source_itemsize=draw(st.sampled_from([1, 2, 4])),
                target_itemsize=draw(st.sampled_from([1, 2, 4])),
            ),
            chunk,
            box,
            draw(st.sampled_from([1.0, 1.5, 7.25])),
            1,
        )
        for n in range(co_read)
    ]


def boxes(arrays, number=0):
    """All boxes of arrays."""
    count = grid_size(arrays[0].layout.shape, arrays[0].box)
    return BoxRange(number, arrays, 0, count)


@st.composite
def works(draw):
    pieces = []
    for number in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            sizes = draw(st.lists(st.integers(0, 10**6), max_size=20))
            values = ValueRange(number, None, sums(np.array(sizes, np.int64)), 0, len(sizes))
            pieces.append(values)
        else:
            pieces.append(boxes(draw(grids(number)), number))
    return pieces


def weights(piece):
    """What each of its units weighs, by brute force."""
    if isinstance(piece, ValueRange):
        return [2 * size + CHUNK_BYTES for size in np.diff(piece.sums)]
    found = []
    for together in zip(*(array.boxes() for array in piece.arrays), strict=True):
        weight = 0
        for array, box in zip(piece.arrays, together, strict=True):
            shape = tuple(part.stop - part.start for part in box)
            item = array.layout
            read = math.ceil(item.source_itemsize * array.passes)
            weight += math.prod(shape) * (read + item.target_itemsize)
            weight += len(list(grid_boxes(shape, array.chunk))) * CHUNK_BYTES
        found.append(weight)
    return found


@given(works(), st.integers(1, 17))
def test_every_box_is_in_one_share_and_they_are_as_equal_as_boxes_are(pieces, count):
    shares = divide(pieces, count)
    units = [(n, k) for n, piece in enumerate(pieces) for k in range(piece.stop)]
    each = [[(p.item, k) for p in share for k in range(p.start, p.stop)] for share in shares]
    assert list(itertools.chain.from_iterable(each)) == units
    weight = {(n, k): w for n, piece in enumerate(pieces) for k, w in enumerate(weights(piece))}
    total = [sum(weight[unit] for unit in units) for units in each]
    cuts = [[p.weight(p.stop) - p.weight(p.start) for p in share] for share in shares]
    assert [sum(found) for found in cuts] == total
    largest = max(weight.values(), default=0)
    mean = sum(weight.values()) / count
    assert all(abs(found - mean) <= largest for found in total)
    cut = collections.Counter()
    for part in itertools.chain.from_iterable(shares):
        cut[part.item] += part.nbytes
    assert [cut[n] for n in range(len(pieces))] == [piece.nbytes for piece in pieces]


def test_arrays_that_are_read_together_are_cut_at_the_same_box():
    layouts = [layout((8, 4), (2, 4), (2, 4), path=(n,), co_read=3) for n in "abc"]
    arrays = [ArrayPlan(one, (2, 4), (2, 4), 1.0, 1) for one in layouts]
    (group,) = co_read(arrays)
    found = [[(part.start, part.stop) for part in share] for share in divide([boxes(group)], 3)]
    assert found == [[(0, 2)], [(2, 3)], [(3, 4)]]


@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt manager", "convert zarr3-files"])
def test_shares_of_a_plan_are_all_of_it_and_pickle_alone(tmp_path, kind):
    """Each share reads its boxes where it is unpickled, and knows nothing of other arrays."""
    source = make(tmp_path / "source", kind, 2)
    planned = reshard.plan(changed(source), tmp_path / "out", max_memory="3MiB", link=False)
    shares = [pickle.dumps(planned.share(number, 5)) for number in range(5)]
    boxes, values = collections.Counter(), collections.Counter()
    for share in map(pickle.loads, shares):
        nbytes = 0
        for item in share.items:
            arrays = [array for group in item.boxes for array in group.arrays]
            every = [*(a.handle for a in arrays), *(some.handle for some in item.values)]
            stores = {id(data.store): data.store for h in every for _, data in h.roots()}
            named = {data.name for h in every for _, data in h.roots()}
            assert {name for store in stores.values() for name in store.values} == named
            whole = {handle.path: handle for handle in planned.items[item.item].handles}
            for group in item.boxes:
                for array in group.arrays:
                    handle, path = array.handle, array.layout.path
                    for box in array.boxes(group.start, group.stop):
                        boxes[item.item, path, str(box)] += 1
                        read = handle.view()[box].read().result()
                        assert read.tobytes() == whole[path].view()[box].read().result().tobytes()
                        nbytes += read.size * array.layout.target_itemsize
            for some in item.values:
                values.update(
                    (item.item, some.handle.path, n) for n in range(some.start, some.stop)
                )
                found = planned.items[item.item].values(whole[some.handle.path])
                nbytes += sum(value.size for value in found[some.start : some.stop])
        assert share.nbytes == nbytes
    assert boxes == collections.Counter(
        (n, array.layout.path, str(box))
        for n, item in enumerate(planned.items)
        for array in item.arrays
        for box in array.boxes()
    )
    assert values == collections.Counter(
        (n, array.handle.path, k)
        for n, item in enumerate(planned.items)
        for array in item.arrays
        if array.verbatim
        for k in range(len(item.values(array.handle)))
    )


@pytest.mark.parametrize("number, count", [(3, 3), (-1, 3), (0, 0)])
def test_shares_that_there_are_not(number, count):
    planned = Plan(())
    text = f"there is no share {number} of {count}: they are numbered from 0"
    with pytest.raises(reshard.ArgumentError, match=f"^{text}$"):
        planned.share(number, count)
