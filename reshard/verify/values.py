"""The values of arrays, box by box: for whoever looks at all of them once."""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from reshard.arrays.boxes import (
    Box,
    Shape,
    chunks_together,
    common_multiple,
    grid_boxes,
    grid_size,
    shape_of,
)
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, Derived
from reshard.engine.batches import Unit, in_batches
from reshard.engine.budget import WINDOW, Budget, check_fits, cores, in_flight, in_memory
from reshard.engine.cost import co_read_groups, decoded_together
from reshard.engine.read import Read, read
from reshard.errors import ReshardError, StoreError
from reshard.tree import Path

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
# Arrays of one shape that are read at the same boxes: one, or two to be compared.
Group = tuple[ArrayHandle, ...]
# Takes a box, and the values of each array of a group there; it keeps none of them.
Taker = Callable[..., None]


def read_values(
    groups: Sequence[Group],
    takers: Sequence[Taker],
    max_memory: int,
    progress: Callable[[int], None],
) -> dict[int, Mapping[int, ReshardError]]:
    """Reads every element of all arrays once, for the taker of each group. An error does not end
    it: what follows of that group is left out. Raises MemoryLimitError with all stored chunks that
    do not fit into `max_memory`, and StoreError where a bucket does not give what it is asked for.

    Returns:
      Number of a group -> place in it -> why that array could not be read.
    """
    least = [(group[0].path, least_memory(group)) for group in groups]
    check_fits(least, max_memory)
    limit = in_flight(max_memory, cores(), max((nbytes for _, nbytes in least), default=0))
    failed: dict[int, Mapping[int, ReshardError]] = {}
    units = _units(groups, limit // WINDOW, max_memory, failed)
    with Budget(limit) as budget:
        for filled in read(in_batches(units, limit // WINDOW, max_memory), budget):
            reads, values = filled.batch.reads, filled.values
            stop = 0
            while stop < len(reads):
                start, number = stop, reads[stop].owner
                stop += len(groups[number])
                errors = {
                    n: filled.errors[start + n]
                    for n in range(stop - start)
                    if start + n in filled.errors
                }
                if refused := [e for e in errors.values() if isinstance(e, StoreError)]:
                    raise refused[0]
                if errors:
                    failed.setdefault(number, errors)
                elif number not in failed:
                    takers[number](reads[start].box, *values[start:stop])
                values[start:stop] = [None] * (stop - start)  # memory is counted without them
                progress(sum(read.nbytes for read in reads[start:stop]))
    return failed


def _units(
    groups: Sequence[Group], limit: int, max_memory: int, failed: Collection[int]
) -> Iterator[Unit]:
    """All boxes, group by group, less groups that have failed; those that share chunks in turn."""
    grids = [_grid(group, limit, max_memory) for group in groups]
    first = [next((h for h in group if isinstance(h.data, Derived)), group[0]) for group in groups]
    for together in co_read_groups(first):
        alike: dict[Hashable, list[int]] = {}
        for number in together:
            alike.setdefault(number if grids[number] is None else grids[number], []).append(number)
        for numbers in alike.values():
            boxes = (_boxes(groups[number], grids[number]) for number in numbers)
            for places in zip(*boxes, strict=True):
                for number, box in zip(numbers, places, strict=True):
                    if number not in failed:
                        reads = [Read(handle, box, number) for handle in groups[number]]
                        yield Unit(reads, *_buffers(groups[number], math.prod(shape_of(box))))


def _buffers(group: Group, elements: int) -> tuple[int, int]:
    """Bytes that so many elements of each array are read into, and bytes of them once they have
    been read: where they are rounded, as they were and as they are."""
    read = sum(handle.read_dtype.itemsize for handle in group)
    rounded = sum(h.dtype.itemsize for h in group if h.read_dtype != h.dtype)
    return elements * read, elements * (read + rounded)


def least_memory(group: Group) -> int:
    """Bytes that one box takes that is in one chunk of each array of a group."""
    return _cost(group, tuple(map(min, zip(*(h.chunk_shape for h in group), strict=True))))


def _cost(group: Group, box: Shape) -> int:
    """Bytes that a box of this shape takes, whose corner is that of a chunk of each array."""
    decoding = sum(
        grid_size(box, handle.chunk_shape) * decoded_together([handle]).nbytes for handle in group
    )
    elements = math.prod(map(min, box, group[0].shape))
    return in_memory(decoding, *_buffers(group, elements), len(group))


def counted(whole: int, progress: Progress | None) -> Callable[[int], None]:
    """What takes numbers of bytes that were read, and tells how much is done of `whole`."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, whole), whole)

    return count


def read_digests(
    leaves: Iterable[ArrayHandle], max_memory: int, progress: Callable[[int], None]
) -> tuple[dict[Path, str], dict[Path, ReshardError]]:
    """Path -> digest of the arrays that can be read, and path -> why not of the others. Raises
    MemoryLimitError as `read_values`."""
    failed: dict[Path, ReshardError] = {}
    readable: list[ArrayHandle] = []
    for leaf in leaves:
        try:
            leaf.stored_sizes()  # says so if chunks are missing
            leaf.view()
        except ReshardError as error:
            failed[leaf.path] = error
        else:
            readable.append(leaf)
    made = [Digest(leaf.shape, leaf.dtype) for leaf in readable]
    groups, takers = [(leaf,) for leaf in readable], [digest.add for digest in made]
    errors = read_values(groups, takers, max_memory, progress)
    failed |= {readable[number].path: found[0] for number, found in errors.items()}
    pairs = zip(readable, made, strict=True)
    return {leaf.path: found.text() for leaf, found in pairs if leaf.path not in failed}, failed


def _grid(group: Group, limit: int, max_memory: int) -> Shape | None:
    """Whole chunks of all arrays of a group, several if they are small; None where they are too
    large."""
    shape = group[0].shape
    box = common_multiple([handle.chunk_shape for handle in group], shape)
    cost = _cost(group, box)
    return None if cost > max_memory else chunks_together(shape, box, max(limit // cost, 1))


def _boxes(group: Group, grid: Shape | None) -> Iterator[Box]:
    """The boxes of a group: of a grid, or else cut wherever a chunk of one of its arrays ends."""
    shape = group[0].shape
    if grid is not None:
        return grid_boxes(shape, grid)
    cuts = [
        sorted({start for handle in group for start in range(0, size, handle.chunk_shape[axis])})
        for axis, size in enumerate(shape)
    ]
    return itertools.product(
        *(
            [slice(*ends) for ends in itertools.pairwise((*starts, size))]
            for starts, size in zip(cuts, shape, strict=True)
        )
    )
