"""The results of operations: by numpy, and by their views."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from reshard.arrays import operations as ops
from reshard.convert.leafmap import LeafMap, Row


def in_numpy(operation: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """An operation, by numpy."""
    match operation:
        case ops.Concat(axis):
            return [np.concatenate(arrays, axis)]
        case ops.Stack(axis):
            return [np.stack(arrays, axis)]
        case ops.Constant(values):
            return [values]
        case ops.Equal():
            assert len({array.tobytes() for array in arrays}) == 1
            return [arrays[0]]
    (one,) = arrays
    match operation:
        case ops.Transpose(axes):
            return [np.transpose(one, axes)]
        case ops.Reshape(shape):
            return [one.reshape(shape)]
        case ops.Split(axis, sizes):
            return np.split(one, list(itertools.accumulate(sizes))[:-1], axis)
        case ops.Unstack(axis, count):
            return [np.take(one, i, axis) for i in range(count)]
        case ops.Pad(widths, fill):
            sizes = [a + n + b for n, (a, b) in zip(one.shape, widths, strict=True)]
            whole = np.full(sizes, np.array(fill, one.dtype), one.dtype)
            whole[tuple(slice(a, n - b) for n, (a, b) in zip(sizes, widths, strict=True))] = one
            return [whole]
        case ops.Interleave(axis, parts, block, undo):
            block = one.shape[axis] if block is None else block
            first = np.moveaxis(one, axis, 0)
            blocks = first.reshape(len(first) // block, block, *first.shape[1:])
            places = np.arange(block).reshape(parts, -1).T.ravel()
            places = np.argsort(places) if undo else places
            return [np.moveaxis(blocks[:, places].reshape(first.shape), 0, axis)]
        case ops.Copies(count):
            return [one] * count
        case ops.Crop(widths):
            inside = (slice(a, n - b) for n, (a, b) in zip(one.shape, widths, strict=True))
            return [one[tuple(inside)]]
    raise AssertionError(operation)


def viewed(rows: LeafMap | Iterable[Row], arrays: Mapping[Any, Any]) -> dict[Any, np.ndarray]:
    """The results of rows, or of a map, by the views of their operations."""
    views = {path: ts.array(np.asarray(array)) for path, array in arrays.items()}
    for one in rows.sequence() if isinstance(rows, LeafMap) else rows:
        inputs = [views.pop(path) for path in one.inputs]
        outputs = inputs
        if isinstance(one.operation, ops.Computed):
            dtype, chunk = inputs[0].dtype.numpy_dtype, [max(n, 1) for n in inputs[0].shape]
            outputs = [ops.computed_view(one.operation, inputs, chunk, dtype)]
        elif one.operation is not None:
            outputs = one.operation.views(inputs)
        for path, view in zip(one.outputs, outputs, strict=True):
            assert path not in views
            views[path] = view
    return {path: np.asarray(view.read().result()) for path, view in views.items()}
