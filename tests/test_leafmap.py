"""Leaf maps against brute force: random operations on random arrays, forwards and backwards."""

import pickle

import numpy as np
from by_numpy import in_numpy, viewed
from converted import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rows import arrays_of, bits, random_rows
from sampling import examples

from reshard.arrays.operations import Concat, Crop, Pad, Reshape, Split, Stack, Transpose
from reshard.convert.leafmap import (
    Filled,
    LeafMap,
    Output,
    Row,
    Source,
    applied,
    from_rows,
    renaming,
)

F32 = np.dtype("f4")


def evaluated(found, arrays):
    """What a map makes of arrays, by its values alone."""

    def value(held):
        if isinstance(held, Source):
            assert arrays[held.path].shape == held.shape
            return arrays[held.path]
        if isinstance(held, Filled):
            return np.zeros(held.shape, held.dtype)
        return in_numpy(held.call.operation, list(map(value, held.call.inputs)))[held.part]

    assert all(not arrays[path].any() for path in found.must_be_zero)
    return {path: value(held) for path, held in found.values.items()}


DROPPED = "the result of an operation cannot be dropped\n  x"


@settings(max_examples=examples(300), deadline=None)
@given(random_rows())
def test_a_map_is_its_rows_without_their_order(case):
    shapes, rows = case
    arrays = arrays_of(shapes)
    found = from_rows(rows, shapes)
    expected = viewed(rows, arrays)
    assert bits(evaluated(found, arrays)) == bits(expected)
    assert found.shapes == {path: array.shape for path, array in expected.items()}
    assert found.sources() == shapes
    again = found.sequence()
    assert bits(viewed(again, arrays)) == bits(expected)
    assert from_rows(again, shapes).values == found.values
    assert pickle.loads(pickle.dumps(found)) == found
    back = found.inverse()
    assert bits(evaluated(back, expected)) == bits(arrays)
    if not any(isinstance(row.operation, Pad) for row in rows):
        assert back.inverse().values.keys() == found.values.keys()
        assert bits(evaluated(back.inverse(), arrays)) == bits(expected)
        assert bits(evaluated(found.then(back), arrays)) == bits(arrays)


@settings(max_examples=examples(200), deadline=None)
@given(random_rows(), st.integers(0, 6))
def test_maps_follow_one_another(case, at):
    shapes, rows = case
    arrays = arrays_of(shapes)
    first = from_rows(rows[:at], shapes)
    second = from_rows(rows[at:], first.shapes)
    touched = {path for row in rows[at:] for path in (*row.inputs, *row.outputs)}
    less = {p: v for p, v in second.values.items() if v != Source(p, v.shape) or p in touched}
    for other in (second, LeafMap(less, second.origin)):  # what is not named stays
        found = first.then(other)
        assert found.values == from_rows(rows, shapes).values
        assert bits(evaluated(found, arrays)) == bits(viewed(rows, arrays))


def test_origins_are_told_together():
    shapes = {("a",): (2,), ("b",): (2,), ("c",): (1,)}
    first = from_rows([Row((("a",),), (("x",),), None, "map")], shapes)
    rows = [Row((("x",), ("b",)), (("y",),), Concat(0), "structure")]
    found = first.then(from_rows(rows, first.shapes))
    assert found.origin == {("y",): "map, structure"}
    assert found.rows() == [Row((("a",), ("b",)), (("y",),), Concat(0), "map, structure")]
    assert found.inverse().origin == {("a",): "map, structure", ("b",): "map, structure"}


def test_rows_name_what_is_between_operations():
    shapes = {("a",): (2, 3), ("b",): (2, 3), ("w",): (2, 4)}
    one, other = (applied(Transpose((1, 0)), [Source((key,), (2, 3))])[0] for key in "ab")
    (joined,) = applied(Concat(0), [one, other])
    (turned,) = applied(Transpose((1, 0)), [joined])
    parts = applied(Split(1, (1, 3)), [Source(("w",), (2, 4))])
    flat = applied(Reshape((6,)), parts[1:])[0]
    values = {("ab",): turned, ("p",): parts[0], ("q",): flat}
    assert list(map(str, LeafMap(values, dict.fromkeys(values, "path")).rows())) == [
        "a -> a  axes in the order 1, 0",
        "b -> b  axes in the order 1, 0",
        "a + b -> ab  2 joined along axis 0",
        "ab -> ab  axes in the order 1, 0",
        "w -> p + q  part 0-1 of 2 along axis 1",
        "q -> q  reshaped to [6]",
    ]
    assert from_rows(LeafMap(values).rows(), shapes).values == values


def test_leaves_change_places():
    shapes = dict.fromkeys([("a",), ("b",), ("c",)], (2,))
    sources = {path: Source(path, shape) for path, shape in shapes.items()}
    found = LeafMap({("a",): sources["b",], ("b",): sources["a",], ("c",): sources["c",]})
    assert list(map(str, found.rows())) == ["b -> a", "a -> b"]
    assert list(map(str, found.sequence())) == ["b -> b~", "a -> a~", "b~ -> a", "a~ -> b"]
    assert found.inverse() == found


def test_what_is_in_between_takes_no_path_of_what_was_moved_out_of_the_way():
    shapes = {("0",): (2, 1), ("1",): (1, 1), ("3",): (1, 1)}
    first, one, third = (Source(path, shape) for path, shape in shapes.items())
    low, high = applied(Split(0, (1, 1)), [first])
    stacked = applied(Stack(0), [low, one, high])[0]
    found = LeafMap({("0",): applied(Transpose((0, 1)), [third])[0], ("1",): stacked})
    assert list(map(str, found.sequence())) == [
        "0 -> 0~",
        "1 -> 1~",
        "3 -> 0  axes in the order 0, 1",
        "0~ -> 1 + 1~~  part 0-1 of 2 along axis 0",
        "1 + 1~ + 1~~ -> 1  3 stacked along axis 0",
    ]
    assert from_rows(found.sequence(), shapes).values == found.values


def test_what_is_left_out_goes_with_the_leaf():
    renamed = LeafMap({("x",): Source(("a",), (2,)), ("y",): Source(("b",), (3,))})
    zeros = Filled((3,), F32)
    found = renamed.then(LeafMap({}, {}, (("x",),), {("y",): zeros}))
    assert found == LeafMap({}, {}, (("a",),), {("b",): zeros})
    assert found.inverse() == LeafMap({("b",): zeros})
    assert found.inverse().inverse() == LeafMap({}, {}, (), {("b",): zeros})
    pair = applied(Split(0, (1, 1)), [Source(("a",), (2,))])
    both = LeafMap({("x",): pair[0], ("y",): pair[1]})
    assert refusal(both.then, LeafMap({}, {}, (("x",),))) == DROPPED


def test_what_must_be_zero_is_all_that_it_is_rearranged_from():
    zeros = Filled((6, 2), F32)
    below = LeafMap({}, {}, (), {("x",): zeros})
    parts = [Source(("a",), (2, 3)), Source(("b",), (2, 3))]
    (stacked,) = applied(Stack(0), parts)
    (turned,) = applied(Transpose((1, 2, 0)), [stacked])
    (joined,) = applied(Reshape((6, 2)), [turned])
    found = LeafMap({("x",): joined}).then(below)
    assert found == LeafMap({}, {}, (), {(name,): Filled((2, 3), F32) for name in "ab"})
    assert found.inverse().values == found.must_be_zero
    (padded,) = applied(Pad(((0, 3), (0, 0)), 1), [Source(("a",), (3, 2))])
    half, other = applied(Split(0, (6, 1)), [Source(("a",), (7, 2))])
    for values in ({("x",): padded}, {("x",): half, ("y",): other}):
        assert refusal(LeafMap(values).then, below) == DROPPED


def test_what_has_no_way_back():
    source = Source(("a",), (4,))
    (cropped,) = applied(Crop(((1, 1),)), [source])
    assert "a crop cannot be inverted" in refusal(LeafMap({("b",): cropped}).inverse)
    assert "a becomes two leaves" in refusal(LeafMap({("b",): source, ("c",): source}).inverse)


def test_all_rows_that_cannot_be_carried_out_are_told():
    rows = [
        Row((("a",),), (("b",),)),
        Row((("b",),), (("c",),), Transpose((0, 1))),
        Row((("x",), ("y",)), (("z",),), Concat(0)),
        Row((("d",),), (("e",),)),
    ]
    assert refusal(from_rows, rows, {("a",): (2,), ("d",): (), ("e",): ()}) == (
        "operations that cannot be applied\n"
        "  b -> c  axes in the order 0, 1: "
        "axes [0, 1] are not an order of all axes of [2], which are [0]\n"
        "  x + y -> z  2 joined along axis 0: there is no x\n"
        "  x + y -> z  2 joined along axis 0: there is no y\n"
        "  d -> e: there is a e already"
    )


def test_calls_are_shared():
    parts = applied(Split(0, (1, 1)), [Source(("a",), (2,))])
    found = pickle.loads(pickle.dumps(LeafMap({("x",): parts[0], ("y",): parts[1]})))
    first, second = found.values.values()
    assert isinstance(first, Output) and isinstance(second, Output)
    assert first.call is second.call and len(found.calls()) == 1


def test_no_leaf_replaces_another():
    """Neither one that stays where another is put, nor one of two that get the same path."""
    stays = LeafMap({("a",): Source(("x",), (2,)), ("b",): Source(("y",), (2,))})
    other = LeafMap({("b",): Source(("a",), (2,))})
    assert refusal(stays.then, other) == "two leaves would have the same path\n  b"
    names, shapes = {("a",): ("c",), ("b",): ("c",)}, {("a",): (2,), ("b",): (2,)}
    assert refusal(renaming, names, shapes) == "two leaves would have the same path\n  c"
    swapped = LeafMap({("b",): Source(("a",), (2,)), ("a",): Source(("b",), (2,))})
    assert stays.then(swapped).values == {
        ("b",): Source(("x",), (2,)),
        ("a",): Source(("y",), (2,)),
    }
