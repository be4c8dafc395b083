"""Tuples with an entry for each axis of an array: shapes, partition specs, and boxes, which are
regions of arrays, a slice with both ends for each."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from reshard.errors import TreeMismatchError
from reshard.sharding.mesh import Shape, Spec

Box = tuple[slice, ...]
T = TypeVar("T")

MOST_AXES = 32  # of TensorStore
# Elements of one array, far above any model.
_MOST_ELEMENTS = 1 << 46


def grid_boxes(shape: Shape, chunk: Shape) -> Iterator[Box]:
    """The boxes of a regular grid over `shape`, the last ones clipped, in row-major order."""
    ranges = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, chunk, strict=True)
    ]
    return itertools.product(*ranges)


def grid_size(shape: Shape, chunk: Shape) -> int:
    """Number of chunks of a regular grid."""
    return math.prod(math.ceil(size / c) for size, c in zip(shape, chunk, strict=True))


def chunks_together(shape: Shape, chunk: Shape, count: int) -> Shape:
    """The shape of about `count` neighbouring chunks in row-major order."""
    together = list(chunk)
    for dim in reversed(range(len(shape))):
        across = math.ceil(shape[dim] / chunk[dim])
        taken = max(min(across, count), 1)
        together[dim] = taken * chunk[dim]
        count //= taken
        if taken < across:
            break
    return tuple(together)


def from_index(index: Sequence[slice], shape: Shape) -> Box:
    """An index of JAX or NumPy, of slices without steps, as a box."""
    ends = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return tuple(slice(start, max(start, stop)) for start, stop in ends)


def whole_box(shape: Shape) -> Box:
    return tuple(slice(0, size) for size in shape)


def start_of(box: Box) -> Shape:
    return tuple(part.start for part in box)


def shape_of(box: Box) -> Shape:
    return tuple(part.stop - part.start for part in box)


def chunk_ranges(box: Box, chunk: Shape) -> tuple[tuple[int, int], ...]:
    """The chunks of a grid that a box touches: for each axis the first, and the one after the
    last."""
    pairs = zip(box, chunk, strict=True)
    return tuple((part.start // size, -(-part.stop // size)) for part, size in pairs)


def bounding_box(boxes: Sequence[Box]) -> Box:
    dims = zip(*boxes, strict=True)
    return tuple(slice(min(p.start for p in d), max(p.stop for p in d)) for d in dims)


def intersection(one: Box, other: Box) -> Box | None:
    """The overlap of two boxes, or None."""
    pairs = zip(one, other, strict=True)
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return common if all(part.start < part.stop for part in common) else None


def inside(box: Box, outer: Box) -> Box:
    """A box relative to the first element of an outer box."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def from_front(axis: int, shape: Shape) -> int:
    """An axis, counted from the front."""
    if not -len(shape) <= axis < len(shape):
        raise TreeMismatchError(f"an array of {list(shape)} has no axis {axis}")
    return axis % len(shape)


def shape_text(shapes: Sequence[Shape]) -> str:
    return " and ".join(dict.fromkeys(str(list(shape)) for shape in shapes))


def one_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape of the only array."""
    if len(shapes) != 1:
        raise TreeMismatchError(f"this operation takes 1 array, not {len(shapes)}")
    return shapes[0]


def replaced(entries: tuple[T, ...], axis: int, entry: T) -> tuple[T, ...]:
    """Entries with another one for an axis."""
    return (*entries[:axis], entry, *entries[axis + 1 :])


def without(entries: tuple[T, ...], axis: int) -> tuple[T, ...]:
    """Entries without the one of an axis."""
    return entries[:axis] + entries[axis + 1 :]


def full_spec(spec: Spec, shape: Shape) -> Spec:
    """A partition spec with an entry for every axis."""
    return spec + ((),) * (len(shape) - len(spec))


def common_multiple(chunks: Sequence[Shape], shape: Shape) -> Shape:
    """A grid over a shape that cuts no chunk of any of several grids."""
    dims = zip(*chunks, strict=True)
    return tuple(
        max(min(math.lcm(*sizes), size), 1) for sizes, size in zip(dims, shape, strict=True)
    )


def check_size(shape: Shape) -> None:
    """Raises TreeMismatchError if an array of this shape cannot exist."""
    if len(shape) > MOST_AXES:
        raise TreeMismatchError(f"an array has at most {MOST_AXES} axes, not {len(shape)}")
    elements = math.prod(max(size, 1) for size in shape)
    if elements > _MOST_ELEMENTS:
        raise TreeMismatchError(
            f"an array of {list(shape)} would have {elements} elements, more than any model has"
        )
