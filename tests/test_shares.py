"""Shares of a plan: each box and each stored value in exactly one, all of about one size."""

import collections
import dataclasses
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
from reshard.arrays.boxes import grid_boxes
from reshard.engine.plan import co_read
from reshard.engine.shares import divide, grid_sums, sums
from reshard.writer.plan import ItemPlan, Plan, _boxes


@given(st.data())
def test_sums_of_a_grid_are_those_of_its_boxes(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
    chunk = tuple(data.draw(st.integers(1, 13)) for _ in shape)
    box = tuple(c * data.draw(st.integers(1, 3)) for c in chunk)
    sizes = [tuple(part.stop - part.start for part in each) for each in grid_boxes(shape, box)]
    counts = [len(list(grid_boxes(size, chunk))) for size in sizes]
    expected = [[*itertools.accumulate(n, initial=0)] for n in (map(math.prod, sizes), counts)]
    assert [found.tolist() for found in grid_sums(shape, box, chunk)] == expected


@given(st.lists(st.lists(st.integers(1, 10**6), max_size=20), max_size=5), st.integers(1, 17))
def test_every_box_is_in_one_share_and_they_are_as_equal_as_boxes_are(weights, count):
    shares = divide([sums(np.array(each, int)) for each in weights], count)
    found = [(n, k) for share in shares for n, start, stop in share for k in range(start, stop)]
    assert found == [(n, k) for n, each in enumerate(weights) for k in range(len(each))]
    total = [sum(sum(weights[n][start:stop]) for n, start, stop in share) for share in shares]
    largest = max(itertools.chain(*weights), default=0)
    assert all(abs(each - sum(total) / count) <= largest for each in total)


def test_arrays_that_are_read_together_are_cut_at_the_same_box():
    grid = (2, 4)
    arrays = [layout((8, 4), grid, grid, path=(n,), co_read=3, chunk=grid, box=grid) for n in "abc"]
    (group,) = co_read(arrays)
    work = _boxes(0, group)
    assert divide([work.nbytes], 3) == [[(0, 0, 2)], [(0, 2, 3)], [(0, 3, 4)]]
    piece = work.piece(1, 3)
    assert (piece.nbytes, piece.chunks) == (2 * 3 * 8 * 4, 2 * 3)


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
            every = [array.handle for array in item.arrays]
            stores = {id(data.store): data.store for h in every for _, data in h.roots()}
            named = {data.name for h in every for _, data in h.roots()}
            assert {name for store in stores.values() for name in store.values} == named
            whole = {a.path: a.handle for a in planned.items[item.item].arrays}
            for group in item.pieces:
                for array in group.arrays:
                    handle, path = array.handle, array.path
                    for box in array.boxes(group.start, group.stop):
                        boxes[item.item, path, str(box)] += 1
                        read = handle.view()[box].read().result()
                        assert read.tobytes() == whole[path].view()[box].read().result().tobytes()
                        nbytes += read.size * array.target_itemsize
                if group.arrays[0].verbatim:
                    path = group.arrays[0].handle.path
                    values.update((item.item, path, n) for n in range(group.start, group.stop))
                    found = group.arrays[0].values
                    nbytes += sum(value.size for value in found[group.start : group.stop])
        assert share.nbytes == nbytes
    assert boxes == collections.Counter(
        (n, array.path, str(box))
        for n, item in enumerate(planned.items)
        for array in item.arrays
        for box in array.boxes()
    )
    assert values == collections.Counter(
        (n, array.handle.path, k)
        for n, item in enumerate(planned.items)
        for array in item.arrays
        if array.verbatim
        for k in range(len(array.values))
    )


@pytest.mark.parametrize("kind", ["ckpt zarr2", "ckpt manager"])
def test_one_share_is_made_without_the_others(tmp_path, kind, monkeypatch):
    """And leaves nothing in the plan that is pickled or compared."""
    source = make(tmp_path / "source", kind, 2)
    planned = reshard.plan(changed(source), tmp_path / "out", max_memory="3MiB", link=False)
    before, made = pickle.dumps(planned), []
    item_share = ItemPlan.share
    monkeypatch.setattr(
        ItemPlan, "share", lambda *given, **named: made.append(0) or item_share(*given, **named)
    )
    whole = planned.shares(7)
    assert len(made) == 7 * len(planned.items)
    for number in range(7):
        made.clear()
        assert pickle.dumps(planned.share(number, 7)) == pickle.dumps(whole[number])
        assert len(made) == len(planned.items)
    again = pickle.loads(pickle.dumps(planned))
    assert again == pickle.loads(before)
    assert vars(again).keys() == {field.name for field in dataclasses.fields(Plan)}


@pytest.mark.parametrize("number, count", [(3, 3), (-1, 3), (0, 0)])
def test_shares_that_there_are_not(number, count):
    planned = Plan(())
    text = f"there is no share {number} of {count}: shares are numbered from 0"
    with pytest.raises(reshard.ArgumentError, match=f"^{text}$"):
        planned.share(number, count)
