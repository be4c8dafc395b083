"""Reshapes of stored arrays: what they do to grids and specs, and how views are put together of
slices, since TensorStore has no reshape of its own.
"""

import math

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, Shape
from reshard.sharding.mesh import Spec


def reshaped_spec(spec: Spec, old: Shape, new: Shape) -> Spec:
    """A partition spec, of full rank, after a reshape: of dimensions that are merged or split the
    first one keeps its mesh axes."""
    if 0 in old:
        return ((),) * len(new)
    entries: list[tuple[str, ...]] = []
    for before, after in _groups(old, new):
        first = spec[before.start] if len(before) else ()
        entries += [first, *[()] * (len(after) - 1)][: len(after)]
    return tuple(entries)


def reshaped_chunk(chunk: Shape, old: Shape, new: Shape) -> Shape:
    """A grid over the new shape that cuts no chunk."""
    if 0 in old:
        return tuple(max(size, 1) for size in new)
    sizes: list[int] = []
    for before, after in _groups(old, new):
        part = slice(before.start, before.stop)
        sizes += _regrouped(chunk[part], old[part], new[after.start : after.stop])
    return tuple(sizes)


def reshaped_box(box: Box, old: Shape, new: Shape) -> Box:
    """The smallest box over the new shape that holds all elements of a box over the old one."""
    if 0 in old:
        return tuple(slice(0, size) for size in new)
    found: list[slice] = []
    for before, after in _groups(old, new):
        if len(before) == len(after) == 1:
            found.append(box[before.start])
            continue
        first = last = 0
        for axis in before:
            first = first * old[axis] + box[axis].start
            last = last * old[axis] + box[axis].stop - 1
        own: list[slice] = []
        for axis in reversed(after):
            first, start = divmod(first, new[axis])
            last, end = divmod(last, new[axis])
            # Between two rows of the axes before, this one is passed from end to end.
            own.append(slice(start, end + 1) if first == last else slice(0, new[axis]))
        found += own[::-1]
    return tuple(found)


def reshaped_view(view: ts.TensorStore, shape: Shape) -> ts.TensorStore:
    """A view of another shape, by slices along the dimensions that are merged or split."""
    if 0 in shape:
        return ts.array(np.empty(shape, view.dtype.numpy_dtype))
    # All that is merged first, since there are not as many axes as both shapes may have together.
    groups, axis = _groups(tuple(view.shape), shape), 0
    for before, after in groups:
        for _ in range(len(before) - 1):
            view = _merge(view, axis)
        if not len(after):
            view = view[ts.d[axis][0]]
        elif len(before):
            axis += 1
    axis = 0
    for before, after in groups:
        if not len(before):
            view = view[ts.d[axis][ts.newaxis]]
        for place in after[:-1]:
            view = _divide(view, axis, shape[place])
            axis += 1
        axis += 1 if len(after) else 0
    return view


def cut(view: ts.TensorStore, axis: int, start: int, stop: int) -> ts.TensorStore:
    """A part along an axis, counted from 0."""
    return view[ts.d[axis][start:stop]][ts.d[axis].translate_to[0]]


def _merge(view: ts.TensorStore, axis: int) -> ts.TensorStore:
    """An axis and the next one as one."""
    rows = [view[ts.d[axis][i]] for i in range(view.shape[axis])]
    return rows[0] if len(rows) == 1 else ts.concat(rows, axis=axis)


def _divide(view: ts.TensorStore, axis: int, count: int) -> ts.TensorStore:
    """An axis as `count` rows of a new axis before it."""
    size = view.shape[axis] // count
    rows = [cut(view, axis, i * size, (i + 1) * size) for i in range(count)]
    return ts.stack(rows, axis=axis)


def _groups(old: Shape, new: Shape) -> list[tuple[range, range]]:
    """The smallest groups of neighbouring dimensions that hold the same number of elements before
    and after a reshape; none is 0. Those of size 1 make groups of their own where they can."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first = i, j
        a = old[i] if i < len(old) else 1
        b = new[j] if j < len(new) else 1
        if a == b and i < len(old) and j < len(new):
            i, j = i + 1, j + 1
        elif i < len(old) and a == 1:
            i += 1
        elif j < len(new) and b == 1:
            j += 1
        else:
            i, j = i + 1, j + 1
            while a != b:
                if a < b:
                    a, i = a * old[i], i + 1
                else:
                    b, j = b * new[j], j + 1
        groups.append((range(first[0], i), range(first[1], j)))
    return groups


def _regrouped(chunk: Shape, old: Shape, new: Shape) -> list[int]:
    """The grid over a group of dimensions that cuts no chunk, from the grid before a reshape."""
    if len(old) == 1 and len(new) == 1:
        return list(chunk)
    # Chunks that are one row of the first dimensions and whole in the last are runs of elements.
    run, lead = 1, True
    for size, whole in zip(reversed(chunk), reversed(old), strict=True):
        if whole % size or (not lead and size != 1):
            return list(new)
        run *= size
        lead = lead and size == whole
    total = math.prod(new)
    if run and total % run:
        return list(new)
    made: list[int] = []
    for size in reversed(new):
        if run % size == 0:
            made.append(size)
            run //= size
        elif size % run == 0:
            made.append(run)
            run = 1
        else:
            return list(new)
    return made[::-1]
