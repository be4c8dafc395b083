"""The values of arrays, box by box: for whoever looks at all of them once."""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from reshard.arrays.boxes import Box, Shape, chunks_together, shape_of
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, Derived
from reshard.engine.batches import Unit, in_batches
from reshard.engine.budget import READ_OVERHEAD, WINDOW, Budget, cores, in_flight
from reshard.engine.cost import co_read_groups, decoded_together
from reshard.engine.plan import grid_boxes, grid_size
from reshard.engine.read import Read, read
from reshard.errors import MemoryLimitError, ReshardError
from reshard.hints import Hint
from reshard.tree import Path, format_path
from reshard.units import format_bytes

# Arrays of one shape that are read at the same places: one, or two to be compared.
Group = tuple[ArrayHandle, ...]


class Values(NamedTuple):
    """What was read of a group in one box.

    Attributes:
      group: its number.
      box: the box.
      values: for each array of the group its values, of its dtype; empty after an error.
      errors: place in the group -> why that array could not be read.
    """

    group: int
    box: Box
    values: tuple[np.ndarray, ...]
    errors: Mapping[int, ReshardError] = MappingProxyType({})


def read_values(
    groups: Sequence[Group], max_memory: int, progress: Callable[[int], None]
) -> Iterator[Values]:
    """Reads every element of all arrays once. An error does not end it: what follows of that group
    is left out. The values of a box are to be let go before the next one is asked for.

    Args:
      groups: the arrays.
      max_memory: bytes in flight at most.
      progress: called with numbers of decoded bytes.

    Raises:
      MemoryLimitError: stored chunks that do not fit into `max_memory`: all of them.
    """
    least = [(group[0].path, _least(group)) for group in groups]
    _refuse(least, max_memory)
    limit = in_flight(max_memory, cores(), max((nbytes for _, nbytes in least), default=0))
    failed: set[int] = set()
    units = _units(groups, limit // WINDOW, max_memory, failed)
    with Budget(limit) as budget:
        for filled in read(in_batches(units, limit // WINDOW, max_memory), budget):
            position = 0
            while position < len(filled.values):
                first = filled.batch.reads[position]
                number = first.owner
                here = range(position, position + len(groups[number]))
                position = here.stop
                errors = {n - here.start: filled.errors[n] for n in here if n in filled.errors}
                if errors and number not in failed:
                    failed.add(number)
                    yield Values(number, first.box, (), errors)
                elif number not in failed:
                    values = (value for n in here if (value := filled.values[n]) is not None)
                    yield Values(number, first.box, (*values,))
                for n in here:
                    filled.values[n] = None
                progress(sum(_decoded(filled.batch.reads[n]) for n in here))


def _decoded(read: Read) -> int:
    return math.prod(shape_of(read.box)) * read.handle.read_dtype.itemsize


def _units(
    groups: Sequence[Group], limit: int, max_memory: int, failed: Collection[int]
) -> Iterator[Unit]:
    """All boxes, group by group, less those of groups that have failed; groups that share stored
    chunks in turn, box by box."""
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
                        elements = math.prod(shape_of(box))
                        buffers = elements * sum(h.read_dtype.itemsize for h in groups[number])
                        held = elements * sum(map(_held, groups[number]))
                        reads = [Read(handle, box, number) for handle in groups[number]]
                        yield Unit(reads, buffers, held)


def _held(handle: ArrayHandle) -> int:
    """Bytes of an element that has been read: where it is rounded, as it was and as it is."""
    rounds = handle.read_dtype != handle.dtype
    return handle.read_dtype.itemsize + rounds * handle.dtype.itemsize


def _least(group: Group) -> int:
    """Bytes that one box takes that is in one chunk of each array of a group."""
    return _cost(group, tuple(map(min, zip(*(h.chunk_shape for h in group), strict=True))))


def _cost(group: Group, box: Shape) -> int:
    """Bytes that a box of this shape takes, whose corner is that of a chunk of each array."""
    decoding = sum(
        grid_size(box, handle.chunk_shape) * decoded_together([handle]).nbytes for handle in group
    )
    dims = zip(box, group[0].shape, strict=True)
    elements = math.prod(min(size, whole) for size, whole in dims)
    buffers = elements * sum(handle.read_dtype.itemsize for handle in group)
    reading = decoding + buffers + READ_OVERHEAD * len(group)
    return max(reading, elements * sum(map(_held, group)))


def check_fits(boxes: Iterable[tuple[Path, Shape, int]], max_memory: int) -> None:
    """Raises MemoryLimitError for boxes of one chunk that cannot be read: all of them.

    Args:
      boxes: for each a path, its shape and the bytes of an element.
      max_memory: bytes in flight at most.
    """
    _refuse(
        ((p, 3 * math.prod(shape) * size + READ_OVERHEAD) for p, shape, size in boxes), max_memory
    )


def _refuse(charges: Iterable[tuple[Path, int]], max_memory: int) -> None:
    """Raises MemoryLimitError for what takes more than `max_memory`: all of it."""
    too_large = [(path, charge) for path, charge in charges if charge > max_memory]
    if too_large:
        least = max(charge for _, charge in too_large)
        raise MemoryLimitError(
            f"one chunk, encoded and decoded, does not fit into {format_bytes(max_memory)}",
            [f"{format_path(path)}: {format_bytes(charge)}" for path, charge in too_large],
            [Hint(("max_memory", f"{math.ceil(least / 2**20)}MiB"))],
            least,
        )


def nbytes(handles: Iterable[ArrayHandle]) -> int:
    """Bytes of what arrays are decoded into."""
    return sum(math.prod(h.shape) * h.read_dtype.itemsize for h in handles)


def counted(
    handles: Iterable[ArrayHandle], progress: Callable[[int, int], None] | None
) -> Callable[[int], None]:
    """What takes numbers of bytes that were read, and tells how much is done of all of these."""
    whole = nbytes(handles)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, whole)

    return count


def read_digests(
    leaves: Iterable[ArrayHandle], max_memory: int, progress: Callable[[int], None]
) -> tuple[dict[Path, str], dict[Path, ReshardError]]:
    """Path -> digest of the arrays that can be read, and path -> why not of the others.

    Raises:
      MemoryLimitError: as `read_values`.
    """
    failed: dict[Path, ReshardError] = {}
    groups: list[Group] = []
    for leaf in leaves:
        try:
            leaf.stored_sizes()  # says so if chunks are missing
            leaf.view()
            groups.append((leaf,))
        except ReshardError as error:
            failed[leaf.path] = error
    made = [Digest(leaf.shape, leaf.dtype) for (leaf,) in groups]
    for number, box, values, errors in read_values(groups, max_memory, progress):
        if errors:
            failed.setdefault(groups[number][0].path, errors[0])
        else:
            made[number].add(box, values[0])
        del values  # memory is counted without it
    digests = {
        leaf.path: digest.text()
        for (leaf,), digest in zip(groups, made, strict=True)
        if leaf.path not in failed
    }
    return digests, failed


def _grid(group: Group, limit: int, max_memory: int) -> Shape | None:
    """Whole chunks of all arrays of a group, several of them if they are small; None where memory
    does not allow that."""
    first = group[0]
    box = first.chunk_shape
    for other in group[1:]:
        sizes = zip(box, other.chunk_shape, first.shape, strict=True)
        box = tuple(max(min(math.lcm(a, b), size), 1) for a, b, size in sizes)
    cost = _cost(group, box)
    return None if cost > max_memory else chunks_together(first.shape, box, max(limit // cost, 1))


def _boxes(group: Group, grid: Shape | None) -> Iterator[Box]:
    """The boxes of a group: of a grid, or else cut wherever a chunk of one of its arrays ends, so
    that a box is in one chunk of each."""
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
