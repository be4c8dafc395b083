"""The values of arrays, box by box, in bounded memory: for whoever looks at all of them once."""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from reshard.boxes import Box, Shape, chunks_together, shape_of
from reshard.checkpoint import ArrayHandle
from reshard.digests import Digest
from reshard.errors import MemoryLimitError, ReshardError
from reshard.planner import grid_boxes
from reshard.schedule import IN_FLIGHT_PER_CORE, WINDOW, cores, room
from reshard.store import checked
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
      error: why they could not be read, in this box or an earlier one of the group.
    """

    group: int
    box: Box
    values: tuple[np.ndarray, ...]
    error: ReshardError | None = None


def read_boxes(
    groups: Sequence[Group], max_memory: int, progress: Callable[[int], None]
) -> Iterator[Read]:
    """Reads every element of all arrays once, group by group. An error does not end it: what
    follows of that group is left out.

    Args:
      groups: the arrays.
      max_memory: bytes in flight at most.
      progress: called with numbers of decoded bytes.

    Raises:
      MemoryLimitError: stored chunks that do not fit into `max_memory`: all of them.
    """
    limit = min(room(max_memory), IN_FLIGHT_PER_CORE * cores()) // WINDOW
    grids = [_grid(group, limit) for group in groups]
    boxes = zip(groups, grids, strict=True)
    check_fits(((group[0].path, grid, _itemsize(group)) for group, grid in boxes), max_memory)
    failed: dict[int, ReshardError] = {}
    under_way: collections.deque[list[_Started]] = collections.deque()
    for batch in _batches(groups, grids, limit):
        if len(under_way) == WINDOW - 1:
            yield from _finished(groups, under_way.popleft(), failed, progress)
        under_way.append(_start(groups, batch, failed))
    while under_way:
        yield from _finished(groups, under_way.popleft(), failed, progress)


def check_fits(boxes: Iterable[tuple[Path, Shape, int]], max_memory: int) -> None:
    """Raises MemoryLimitError for boxes of one chunk that cannot be read: all of them.

    Args:
      boxes: for each a path, its shape and the bytes of an element.
      max_memory: bytes in flight at most.
    """
    charges = [(path, _charge(shape, itemsize)) for path, shape, itemsize in boxes]
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
    for number, box, values, error in read_boxes(groups, max_memory, progress):
        if error is not None:
            failed.setdefault(groups[number][0].path, error)
        else:
            made[number].add(box, values[0])
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


def _grid(group: Group, limit: int) -> Shape:
    """Whole chunks of all arrays of a group where memory allows that, several of them if they are
    small; otherwise those of the first."""
    first = group[0]
    chunk = first.chunk_shape
    for other in group[1:]:
        pairs = zip(chunk, other.chunk_shape, first.shape, strict=True)
        together = tuple(max(min(math.lcm(a, b), size), 1) for a, b, size in pairs)
        chunk = together if _charge(together, _itemsize(group)) <= limit else chunk
    count = limit // _charge(chunk, _itemsize(group))
    return chunks_together(first.shape, chunk, max(count, 1))


def _itemsize(group: Group) -> int:
    return sum(handle.stored_dtype.itemsize for handle in group)


def _charge(box: Shape, itemsize: int) -> int:
    """Bytes of memory for one box: chunks, and what they are decoded into."""
    return 2 * math.prod(box) * itemsize + _BOX_OVERHEAD


def _batches(
    groups: Sequence[Group], grids: Sequence[Shape], limit: int
) -> Iterator[list[tuple[int, Box]]]:
    """All boxes, in batches of about `limit` bytes."""
    batch: list[tuple[int, Box]] = []
    held = 0
    for number, (group, grid) in enumerate(zip(groups, grids, strict=True)):
        for box in grid_boxes(group[0].shape, grid):
            charge = _charge(shape_of(box), _itemsize(group))
            if batch and held + charge > limit:
                yield batch
                batch, held = [], 0
            batch.append((number, box))
            held += charge
    if batch:
        yield batch


def _start(
    groups: Sequence[Group], batch: Sequence[tuple[int, Box]], failed: dict[int, ReshardError]
) -> list[_Started]:
    """Starts the reads of a batch, which share what they decode."""
    started = []
    views: dict[int, tuple[ts.TensorStore, ...]] = {}
    with ts.Batch() as together:
        for number, box in batch:
            group = groups[number]
            buffers, reads = (), ()
            if number not in failed:
                try:
                    if number not in views:
                        views[number] = tuple(handle.view() for handle in group)
                    buffers = tuple(np.empty(shape_of(box), h.read_dtype) for h in group)
                    reads = tuple(
                        ts.array(buffer, copy=False).write(view[box], batch=together).commit
                        for buffer, view in zip(buffers, views[number], strict=True)
                    )
                except ReshardError as error:
                    failed[number] = error
                    buffers = ()
            what = f"{format_path(group[0].path)}: its stored bytes"
            started.append(_Started(number, box, buffers, reads, what))
    return started


def _finished(
    groups: Sequence[Group],
    batch: Sequence[_Started],
    failed: dict[int, ReshardError],
    progress: Callable[[int], None],
) -> Iterator[Read]:
    """What has been read, as soon as it is there."""
    for number, box, buffers, reads, what in batch:
        for read in reads:
            try:
                checked(read, what)
            except ReshardError as error:
                failed.setdefault(number, error)
        error = failed.get(number)
        pairs = zip(groups[number], buffers, strict=True) if error is None else ()
        values = tuple(handle.rounded(buffer) for handle, buffer in pairs)
        yield Read(number, box, values, error)
        progress(sum(buffer.nbytes for buffer in buffers))
