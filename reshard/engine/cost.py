"""What reading takes: the stored chunks that boxes touch, once however many boxes touch them.

    a box of a derived array  ->  boxes of stored arrays  ->  ranges of their chunks
    layer_3 [0:16, 0:8]           layers [3:4, 0:16, 0:8]     (0, 1) (0, 1) (0, 2)

Counted per axis, never chunk by chunk. Boxes that are read together count a range of chunks once:
it is fetched and decoded once. This is the one model of memory; plans, batches, and the refusal of
what is too large for `max_memory` all ask it.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard.arrays.boxes import Box
from reshard.arrays.derived import stored_boxes
from reshard.arrays.handle import ArrayHandle
from reshard.engine.plan import grid_boxes


class Chunks(NamedTuple):
    """A range of the chunks of a stored array.

    Attributes:
      array: the array, as one store has it.
      ranges: for each axis the first chunk, and the one after the last.
    """

    array: Hashable
    ranges: tuple[tuple[int, int], ...]


class Decoded(NamedTuple):
    """What decoding chunks takes.

    Attributes:
      nbytes: bytes of memory, encoded and decoded.
      elements: how many elements of the array they hold.
    """

    nbytes: int
    elements: int


def chunks_of(handle: ArrayHandle, box: Box) -> dict[Chunks, Decoded]:
    """The stored chunks that a box is decoded from."""
    found = {}
    for stored, part in stored_boxes(handle, box):
        count = elements = 1
        ranges = []
        for ends, size, chunk in zip(part, stored.shape, stored.chunk_shape, strict=True):
            start, stop = ends.start // chunk, -(-ends.stop // chunk)
            ranges.append((start, stop))
            count *= stop - start
            elements *= min(stop * chunk, size) - start * chunk
        decoded = math.prod(stored.chunk_shape) * stored.stored_dtype.itemsize
        each = decoded + stored.store.largest_chunk(stored.name)
        found[Chunks((id(stored.store), stored.name), (*ranges,))] = Decoded(count * each, elements)
    return found


def first_cell(handle: ArrayHandle) -> Box:
    """The first box of an array's grid."""
    dims = zip(handle.shape, handle.chunk_shape, strict=True)
    return tuple(slice(0, min(size, chunk)) for size, chunk in dims)


def decoded_together(handles: Sequence[ArrayHandle]) -> Decoded:
    """What decoding one box of each takes at most, where they are read together, in the grid that
    is the same for all of them."""
    if len(handles) == 1 and handles[0].formed is None:
        return _once([chunks_of(handles[0], first_cell(handles[0]))])
    # Layers that are stacked may be in chunks of any sizes.
    cells = grid_boxes(handles[0].shape, handles[0].chunk_shape)
    each = (_once(chunks_of(handle, cell) for handle in handles) for cell in cells)
    return max(each, default=Decoded(0, 0))


def _once(parts: Iterable[dict[Chunks, Decoded]]) -> Decoded:
    """What decoding all of these takes, a range of chunks once."""
    found = {chunks: decoded for part in parts for chunks, decoded in part.items()}.values()
    return Decoded(sum(d.nbytes for d in found), sum(d.elements for d in found))


def co_read_groups(handles: Sequence[ArrayHandle]) -> list[list[int]]:
    """Numbers of arrays that are to be read box by box together, since their boxes share stored
    chunks, in the place of the first of them; all others on their own."""
    alike: dict[Hashable, list[int]] = {}
    for number, handle in enumerate(handles):
        shared = handle.formed is not None and handle.formed.inputs
        kind = (handle.shape, handle.chunk_shape, _lineage(handle)) if shared else number
        alike.setdefault(kind, []).append(number)
    return sorted(group for kind in alike.values() for group in _sharing(handles, kind))


def _lineage(handle: ArrayHandle) -> Hashable:
    """The operations that an array comes from, and what they begin with: the same for those that
    are parts of one array in the same way."""
    operations = []
    while handle.formed is not None and len(handle.formed.inputs) == 1:
        operations.append(handle.formed.operation)
        handle = handle.formed.inputs[0]
    first = (id(handle.store), handle.name) if handle.formed is None else id(handle.formed)
    return first, *operations


def _sharing(handles: Sequence[ArrayHandle], numbers: list[int]) -> Iterator[list[int]]:
    """These numbers, in groups whose first boxes touch chunks of one another."""
    if len(numbers) == 1:
        yield numbers
        return
    first = {n: chunks_of(handles[n], first_cell(handles[n])) for n in numbers}
    group: list[int] = []
    hull: dict[Hashable, list[tuple[int, int]]] = {}
    for number in sorted(numbers, key=lambda n: [*first[n]]):
        if not any(_meet(hull.get(array), ranges) for array, ranges in first[number]):
            if group:
                yield sorted(group)
            group, hull = [], {}
        group.append(number)
        for array, ranges in first[number]:
            known = hull.get(array, ranges)
            hull[array] = [
                (min(a, c), max(b, d)) for (a, b), (c, d) in zip(known, ranges, strict=True)
            ]
    yield sorted(group)


def _meet(one: Sequence[tuple[int, int]] | None, other: Sequence[tuple[int, int]]) -> bool:
    return one is not None and all(
        max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)
    )
