"""The values of arrays, box by box, in bounded memory: for whoever looks at all of them once."""

import collections
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, Shape, chunks_together, shape_of
from reshard.arrays.derived import amplification, family
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle
from reshard.engine.batches import IN_FLIGHT_PER_CORE, WINDOW, cores, room
from reshard.engine.plan import grid_boxes
from reshard.errors import MemoryLimitError, ReshardError
from reshard.storage.array_store import checked
from reshard.tree import Path, format_path
from reshard.units import format_bytes

# Arrays of one shape that are read at the same places: one, or two to be compared.
Group = tuple[ArrayHandle, ...]
# What a box takes beside its bytes; it matters where arrays are small and many.
_BOX_OVERHEAD = 1 << 14


class Read(NamedTuple):
    """What was read of a group in one box.

    Attributes:
      group: its number.
      box: the box.
      values: for each array of the group its values, of its dtype; empty after an error.
      errors: place in the group -> why that array could not be read, in this box or an earlier one.
    """

    group: int
    box: Box
    values: tuple[np.ndarray, ...]
    errors: Mapping[int, ReshardError] = MappingProxyType({})


def read_boxes(
    groups: Sequence[Group], max_memory: int, progress: Callable[[int], None]
) -> Iterator[Read]:
    """Reads every element of all arrays once. An error does not end it: what follows of that group
    is left out. The values of a box are to be let go before the next one is asked for.

    Args:
      groups: the arrays.
      max_memory: bytes in flight at most.
      progress: called with numbers of decoded bytes.

    Raises:
      MemoryLimitError: stored chunks that do not fit into `max_memory`: all of them.
    """
    charged = [[_charged(handle) for handle in group] for group in groups]
    least = (sum(array.chunk for array in arrays) + _BOX_OVERHEAD for arrays in charged)
    _refuse(
        ((group[0].path, charge) for group, charge in zip(groups, least, strict=True)), max_memory
    )
    limit = min(room(max_memory), IN_FLIGHT_PER_CORE * cores()) // WINDOW
    grids = [
        _grid(group, arrays, limit, max_memory)
        for group, arrays in zip(groups, charged, strict=True)
    ]
    failed: dict[int, dict[int, ReshardError]] = {}
    under_way: collections.deque[_Batch] = collections.deque()
    for boxes, charge in _batches(_in_order(groups, charged, grids), charged, limit, max_memory):
        while under_way and (
            sum(batch.charge for batch in under_way) + charge > room(max_memory)
            or len(under_way) == WINDOW - 1
        ):
            yield from _finished(groups, under_way.popleft().started, failed, progress)
        under_way.append(_Batch(_start(groups, boxes, failed), charge))
    while under_way:
        yield from _finished(groups, under_way.popleft().started, failed, progress)


def check_fits(boxes: Iterable[tuple[Path, Shape, int]], max_memory: int) -> None:
    """Raises MemoryLimitError for boxes of one chunk that cannot be read: all of them.

    Args:
      boxes: for each a path, its shape and the bytes of an element.
      max_memory: bytes in flight at most.
    """
    _refuse(
        ((p, 2 * math.prod(shape) * size + _BOX_OVERHEAD) for p, shape, size in boxes), max_memory
    )


def _refuse(charges: Iterable[tuple[Path, int]], max_memory: int) -> None:
    """Raises MemoryLimitError for what takes more than `max_memory`: all of it."""
    too_large = [(path, charge) for path, charge in charges if charge > max_memory]
    if too_large:
        least = max(charge for _, charge in too_large)
        raise MemoryLimitError(
            f"one chunk, encoded and decoded, does not fit into {format_bytes(max_memory)}",
            [f"{format_path(path)}: {format_bytes(charge)}" for path, charge in too_large],
            [f"--max-memory {math.ceil(least / 2**20)}MiB"],
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
      MemoryLimitError: as `read_boxes`.
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
    for number, box, values, errors in read_boxes(groups, max_memory, progress):
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


class _Started(NamedTuple):
    group: int
    box: Box
    buffers: tuple[np.ndarray, ...]
    reads: tuple[ts.Future, ...]
    what: str


class _Batch(NamedTuple):
    started: list[_Started]
    charge: int


class _Charged(NamedTuple):
    """What reading an array takes.

    Attributes:
      family: the same for arrays that share stored chunks, box by box; None for all others.
      chunk_shape: the grid of its chunks.
      chunk: bytes that one of them takes, encoded and decoded; of a formed array, all the stored
        chunks that it is made of.
      together: the same for all arrays that share these.
      itemsize: bytes of an element that was read.
    """

    family: Hashable
    chunk_shape: Shape
    chunk: int
    together: int
    itemsize: int

    def chunks(self, box: Box) -> int:
        """How many chunks a box touches."""
        pairs = zip(box, self.chunk_shape, strict=True)
        return math.prod(math.ceil(part.stop / c) - part.start // c for part, c in pairs)

    def first_chunk(self, box: Box) -> Shape:
        """The place of the first one of them."""
        return tuple(part.start // c for part, c in zip(box, self.chunk_shape, strict=True))


def _charged(handle: ArrayHandle) -> _Charged:
    shared = family(handle)
    decoded = 2 * math.prod(handle.chunk_shape) * handle.stored_dtype.itemsize
    chunk = math.ceil(decoded * amplification(handle))
    together = chunk if shared is None else max(math.ceil(decoded * shared.decoded), chunk)
    itemsize = handle.read_dtype.itemsize
    return _Charged(shared and shared.key, handle.chunk_shape, chunk, together, itemsize)


def _grid(group: Group, arrays: Sequence[_Charged], limit: int, max_memory: int) -> Shape | None:
    """Whole chunks of all arrays of a group, several of them if they are small; None where memory
    does not allow that."""
    first = group[0]
    box = first.chunk_shape
    for other in group[1:]:
        sizes = zip(box, other.chunk_shape, first.shape, strict=True)
        box = tuple(max(min(math.lcm(a, b), size), 1) for a, b, size in sizes)
    whole = tuple(slice(0, size) for size in box)
    charge = sum(array.chunks(whole) * array.chunk for array in arrays) + _BOX_OVERHEAD
    if charge > max_memory:
        return None
    return chunks_together(first.shape, box, max(limit // charge, 1))


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


def _in_order(
    groups: Sequence[Group],
    charged: Sequence[Sequence[_Charged]],
    grids: Sequence[Shape | None],
) -> Iterator[tuple[int, Box]]:
    """All boxes, group by group; groups that share stored chunks in turn, box by box."""
    together: dict[Hashable, list[int]] = {}
    for number, (group, arrays, grid) in enumerate(zip(groups, charged, grids, strict=True)):
        families = [array.family for array in arrays if array.family is not None]
        alone = not families or grid is None
        key = number if alone else (families[0], group[0].shape, grid)
        together.setdefault(key, []).append(number)
    for numbers in together.values():
        boxes = (_boxes(groups[number], grids[number]) for number in numbers)
        for there in zip(*boxes, strict=True):
            yield from zip(numbers, there, strict=True)


def _batches(
    boxes: Iterable[tuple[int, Box]],
    charged: Sequence[Sequence[_Charged]],
    limit: int,
    max_memory: int,
) -> Iterator[tuple[list[tuple[int, Box]], int]]:
    """Batches of about `limit` bytes, each with what it takes: more where boxes share chunks, which
    a batch decodes once."""
    batch: list[tuple[int, Box]] = []
    held: dict[Hashable, _Held] = {}
    charge = 0
    for number, box in boxes:
        more = _held_with(held, charged[number], number, box)
        shares = not held.keys().isdisjoint(more)
        added = _BOX_OVERHEAD + sum(
            h.charge - held.get(k, _NOTHING).charge for k, h in more.items()
        )
        if batch and charge + added > (max_memory if shares else limit):
            yield batch, charge
            batch, held = [], {}
            more = _held_with(held, charged[number], number, box)
            charge, added = 0, _BOX_OVERHEAD + sum(h.charge for h in more.values())
        batch.append((number, box))
        held |= more
        charge += added
    if batch:
        yield batch, charge


class _Held(NamedTuple):
    """What a batch holds of chunks.

    Attributes:
      decoded: their bytes, encoded and decoded.
      read: bytes of what is read of them.
    """

    decoded: int
    read: int

    @property
    def charge(self) -> int:
        """Bytes of memory for it. What is encoded is gone when that is there which is read."""
        return max(self.decoded, self.decoded // 2 + self.read)


_NOTHING = _Held(0, 0)


def _held_with(
    held: Mapping[Hashable, _Held], arrays: Sequence[_Charged], number: int, box: Box
) -> dict[Hashable, _Held]:
    """What a batch holds, with a box of a group, of the chunks that this box touches.

    Args:
      held: what it holds so far.
      arrays: the arrays of the group.
      number: the number of the group.
      box: the box.
    """
    more: dict[Hashable, _Held] = {}
    for side, array in enumerate(arrays):
        key = (array.family or (number, side), array.first_chunk(box))
        decoded, read = more.get(key, held.get(key, _NOTHING))
        chunks = array.chunks(box)
        decoded = max(decoded, min(decoded + chunks * array.chunk, chunks * array.together))
        more[key] = _Held(decoded, read + math.prod(shape_of(box)) * array.itemsize)
    return more


def _start(
    groups: Sequence[Group],
    batch: Sequence[tuple[int, Box]],
    failed: dict[int, dict[int, ReshardError]],
) -> list[_Started]:
    """Starts the reads of a batch, which share what they decode."""
    started = []
    views: dict[int, tuple[ts.TensorStore, ...]] = {}
    with ts.Batch() as together:
        for number, box in batch:
            group = groups[number]
            buffers, reads = (), ()
            if number not in failed and number not in views:
                views[number], errors = _views(group)
                if errors:
                    failed[number] = errors
            if number not in failed:
                buffers = tuple(np.empty(shape_of(box), h.read_dtype) for h in group)
                reads = tuple(
                    ts.array(buffer, copy=False).write(view[box], batch=together).commit
                    for buffer, view in zip(buffers, views[number], strict=True)
                )
            what = f"{format_path(group[0].path)}: its stored bytes"
            started.append(_Started(number, box, buffers, reads, what))
    return started


def _views(group: Group) -> tuple[tuple[ts.TensorStore, ...], dict[int, ReshardError]]:
    """Views of the arrays of a group that can be opened, and why the others cannot."""
    views, errors = [], {}
    for place, handle in enumerate(group):
        try:
            views.append(handle.view())
        except ReshardError as error:
            errors[place] = error
    return tuple(views), errors


def _finished(
    groups: Sequence[Group],
    batch: Sequence[_Started],
    failed: dict[int, dict[int, ReshardError]],
    progress: Callable[[int], None],
) -> Iterator[Read]:
    """What has been read, as soon as it is there."""
    for number, box, buffers, reads, what in batch:
        for place, read in enumerate(reads):
            try:
                checked(read, what)
            except ReshardError as error:
                failed.setdefault(number, {}).setdefault(place, error)
        errors = failed.get(number, {})
        pairs = () if errors else zip(groups[number], buffers, strict=True)
        values = tuple(handle.rounded(buffer) for handle, buffer in pairs)
        yield Read(number, box, values, errors)
        progress(sum(buffer.nbytes for buffer in buffers))
