"""Boxes: regions of arrays, a slice with both ends for each dimension."""

import math
from collections.abc import Sequence

Shape = tuple[int, ...]
Box = tuple[slice, ...]


def chunks_together(shape: Shape, chunk: Shape, count: int) -> Shape:
    """The shape of about `count` chunks that are next to each other in row-major order."""
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
    """An index of JAX's with its ends written out."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def start_of(box: Box) -> Shape:
    return tuple(part.start for part in box)


def shape_of(box: Box) -> Shape:
    return tuple(part.stop - part.start for part in box)


def bounding_box(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all boxes."""
    dims = zip(*boxes, strict=True)
    return tuple(slice(min(p.start for p in d), max(p.stop for p in d)) for d in dims)


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    pairs = zip(one, other, strict=True)
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return common if all(part.start < part.stop for part in common) else None


def inside(box: Box, outer: Box) -> Box:
    """A box as seen from the first element of another that holds it."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)
