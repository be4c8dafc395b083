"""The cost of reading: the stored chunks that boxes touch, each counted once.

    a box of a derived array  ->  boxes of stored arrays  ->  ranges of their chunks
    layer_3 [0:16, 0:8]           layers [3:4, 0:16, 0:8]     (0, 1) (0, 1) (0, 2)

Counted per axis, never chunk by chunk. Boxes that are read together count the union of their
chunks: each chunk is fetched and decoded once. `engine.memory` counts the buffers.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard.arrays.boxes import Box, Shape, chunk_ranges, grid_boxes
from reshard.arrays.derived import sources
from reshard.arrays.handle import ArrayHandle, Derived
from reshard.arrays.operations import Apply

Ranges = tuple[tuple[int, int], ...]


class Decoded(NamedTuple):
    """The cost of decoding chunks: bytes, encoded and decoded, and the number of elements."""

    nbytes: int
    elements: int


class Chunks(NamedTuple):
    """A range of the chunks of a stored array: for each axis the first, and the one after the last.
    One takes `chunk_bytes`, encoded and decoded."""

    array: Hashable
    ranges: Ranges
    shape: Shape
    chunk_shape: Shape
    chunk_bytes: int


class ChunkUnion:
    """A set of chunks."""

    def __init__(self) -> None:
        # For each array disjoint ranges, and the smallest one around them.
        self._known: dict[Hashable, list[Ranges]] = {}
        self._hulls: dict[Hashable, Ranges] = {}

    def missing(self, chunks: Chunks) -> list[Chunks]:
        """The part of a range that is not in the set, as disjoint ranges."""
        hull = self._hulls.get(chunks.array)
        if hull is None or not _meet(hull, chunks.ranges):
            return [chunks]
        rest = [chunks.ranges]
        for known in self._known[chunks.array]:
            rest = [part for ranges in rest for part in _without(ranges, known)]
        return [chunks._replace(ranges=ranges) for ranges in rest]

    def add(self, chunks: Iterable[Chunks]) -> list[Chunks]:
        """Adds ranges. Returns the parts that were not in the set."""
        added = []
        for each in chunks:
            new = self.missing(each)
            self._known.setdefault(each.array, []).extend(part.ranges for part in new)
            hull = self._hulls.get(each.array)
            self._hulls[each.array] = each.ranges if hull is None else _hull(hull, each.ranges)
            added += new
        return added


def _without(one: Ranges, other: Ranges) -> Iterator[Ranges]:
    """Disjoint ranges that cover one range without the other."""
    if not _meet(one, other):
        yield one
        return
    rest = list(one)
    for axis, ((first, last), (start, stop)) in enumerate(zip(one, other, strict=True)):
        for part in ((first, start), (stop, last)):
            if part[0] < part[1]:
                yield (*rest[:axis], part, *rest[axis + 1 :])
        rest[axis] = (max(first, start), min(last, stop))


def _meet(one: Ranges, other: Ranges) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _hull(one: Ranges, other: Ranges) -> Ranges:
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def chunks_of(handle: ArrayHandle, box: Box) -> list[Chunks]:
    """The stored chunks that a box is decoded from; and what is computed on the way to it."""
    found = []
    for source, part in sources(handle, box):
        data, chunk = source.data, source.chunk_shape
        if isinstance(data, Derived):
            found.append(_computed(source, part))
        else:
            decoded = math.prod(chunk) * source.stored_dtype.itemsize
            chunk_bytes = decoded + data.store.largest_chunk(data.name)
            ranges, array = chunk_ranges(part, chunk), (id(data.store), data.name)
            found.append(Chunks(array, ranges, source.shape, chunk, chunk_bytes))
    return found


def _computed(made: ArrayHandle, box: Box) -> Chunks:
    """The cost of computing a box, as chunks without elements of their own: twice the inputs and
    the result. A function computes whole arrays."""
    assert isinstance(made.data, Derived)
    whole = isinstance(made.data.operation, Apply)
    chunk = made.shape if whole else made.chunk_shape
    ranges = ((0, 1),) * len(chunk) if whole else chunk_ranges(box, chunk)
    nbytes = math.prod(chunk) * made.stored_dtype.itemsize
    for given in made.data.inputs:
        itemsize = max(given.stored_dtype.itemsize, given.dtype.itemsize)
        nbytes += math.prod(given.shape if whole else chunk) * itemsize
    array = (id(made.data.outputs), "")
    return Chunks(array, (*ranges, (0, 1)), (*made.shape, 0), (*chunk, 1), 2 * nbytes)


def total(chunks: Iterable[Chunks]) -> Decoded:
    """The cost of decoding disjoint ranges."""
    nbytes = elements = 0
    for _, ranges, shape, chunk_shape, chunk_bytes in chunks:
        dims = zip(ranges, shape, chunk_shape, strict=True)
        nbytes += chunk_bytes * math.prod(stop - start for start, stop in ranges)
        elements += math.prod(min(stop * c, size) - start * c for (start, stop), size, c in dims)
    return Decoded(nbytes, elements)


def first_cell(handle: ArrayHandle) -> Box:
    """The first box of an array's grid."""
    dims = zip(handle.shape, handle.chunk_shape, strict=True)
    return tuple(slice(0, min(size, chunk)) for size, chunk in dims)


def decoded_together(handles: Sequence[ArrayHandle]) -> Decoded:
    """The largest cost of decoding one box of each array together. All have one grid of boxes."""
    first, data = handles[0], handles[0].data
    if len(handles) == 1 and not isinstance(data, Derived):  # one chunk: most arrays are read alone
        elements = math.prod(map(min, first.shape, first.chunk_shape))
        decoded = math.prod(first.chunk_shape) * first.stored_dtype.itemsize
        nbytes = decoded + data.store.largest_chunk(data.name)
        return Decoded(nbytes if elements else 0, elements)
    # Layers that are stacked may be in chunks of any sizes.
    cells = grid_boxes(handles[0].shape, handles[0].chunk_shape)
    unions = (
        total(ChunkUnion().add(c for handle in handles for c in chunks_of(handle, cell)))
        for cell in cells
    )
    return max(unions, default=Decoded(0, 0))


def co_read_groups(handles: Sequence[ArrayHandle]) -> list[list[int]]:
    """Numbers of arrays, in groups whose boxes share stored chunks and are read together."""
    alike: dict[Hashable, list[int]] = {}
    for number, handle in enumerate(handles):
        shared = isinstance(handle.data, Derived) and handle.data.inputs
        kind = (handle.shape, handle.chunk_shape, _lineage(handle)) if shared else number
        alike.setdefault(kind, []).append(number)
    return sorted(group for kind in alike.values() for group in _sharing(handles, kind))


def _lineage(handle: ArrayHandle) -> Hashable:
    """What an array comes from: equal for those that are parts of one array in the same way."""
    operations = []
    data = handle.data
    while isinstance(data, Derived) and len(data.inputs) == 1:
        operations.append(data.operation)
        data = data.inputs[0].data
    first = id(data.outputs) if isinstance(data, Derived) else (id(data.store), data.name)
    return first, *operations


def _sharing(handles: Sequence[ArrayHandle], numbers: list[int]) -> Iterator[list[int]]:
    """These numbers, in groups whose first boxes touch chunks of one another."""
    if len(numbers) == 1:
        yield numbers
        return
    first = {n: chunks_of(handles[n], first_cell(handles[n])) for n in numbers}
    group: list[int] = []
    hulls: dict[Hashable, Ranges] = {}
    for number in sorted(numbers, key=lambda n: [(c.array, c.ranges) for c in first[n]]):
        chunks = first[number]
        if group and not any(c.array in hulls and _meet(hulls[c.array], c.ranges) for c in chunks):
            yield sorted(group)
            group, hulls = [], {}
        group.append(number)
        hulls |= {c.array: _hull(hulls.get(c.array, c.ranges), c.ranges) for c in chunks}
    yield sorted(group)
