"""The values of arrays, box by box: for whoever looks at all of them once."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, Protocol

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
from reshard.engine.shares import Division
from reshard.engine.tasks import Report, task_count
from reshard.engine.workers import check_tasks, run_tasks
from reshard.errors import ReshardError, StoreError
from reshard.tree import Path

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
# Arrays of one shape that are read at the same boxes: one, or two to be compared.
Group = tuple[ArrayHandle, ...]


class Taker(Protocol):
    """Takes the values of a group, box by box, in any order."""

    @property
    def add(self) -> Callable[..., None]:
        """Takes a box, and the values of each array in it; keeps none of them."""
        ...

    @property
    def state(self) -> Any:
        """What comes of all that it has taken."""
        ...

    def merge(self, state: Any) -> None:
        """Adds what another one has taken, of other boxes."""
        ...


# Number of a group -> place in it -> why that array could not be read.
Failed = dict[int, Mapping[int, ReshardError]]


def read_values(
    groups: Sequence[Group],
    takers: Sequence[Taker],
    max_memory: int,
    progress: Report,
    workers: int | None = None,
    executor: Executor | None = None,
) -> Failed:
    """Reads every element of all arrays once, for the taker of each group; in so many workers, or
    in an executor, if that is said. An error does not end it: what follows of that group is left
    out. Raises MemoryLimitError with all stored chunks that do not fit into `max_memory`, and
    StoreError where a bucket does not give what it is asked for."""
    least = [(group[0].path, least_memory(group)) for group in groups]
    check_fits(least, max_memory)
    largest = max((nbytes for _, nbytes in least), default=0)
    limit = in_flight(max_memory, cores(), largest) // WINDOW
    turns = list(_turns(groups, limit, max_memory))
    if workers is None and executor is None:
        return _read(dict(enumerate(groups)), dict(enumerate(takers)), turns, max_memory, progress)
    division = Division(turns)
    count = task_count(sum(turn.nbytes for turn in turns), workers)
    tasks = []
    for number in range(count):
        if not (parts := division.share(number, count)):
            continue
        own = [turns[part.piece]._replace(start=part.start, stop=part.stop) for part in parts]
        numbers = [n for turn in own for n in turn.numbers]
        some, each = {n: groups[n] for n in numbers}, {n: takers[n] for n in numbers}
        tasks.append(ReadTask(number, count, division.weight(parts), some, each, own, max_memory))
    check_tasks(tasks, executor)
    failed: Failed = {}
    for states, errors in run_tasks(tasks, progress, workers=workers, executor=executor):
        for number, state in states.items():
            takers[number].merge(state)
        for number, error in errors.items():
            failed.setdefault(number, error)  # of the first box, as in one process
    return failed


class _Turn(NamedTuple):
    """Boxes of groups, of all of them the first one, then the second one, and so on.

    Attributes:
      numbers: those of the groups.
      grid: the shape of the boxes, as of `_boxes`.
      start, stop: the first box, and the one after the last one.
      count: boxes of each group.
      nbytes: decoded bytes of all boxes.
    """

    numbers: Sequence[int]
    grid: Shape | None
    start: int
    stop: int
    count: int
    nbytes: int

    def weight(self, count: int) -> int:
        """Bytes of the first so many boxes, as if all were of one size."""
        return self.nbytes * count // self.count


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """A part of what is read, and what takes it. Attributes as of `read_values`, by number of a
    group."""

    number: int
    of: int
    nbytes: int
    groups: Mapping[int, Group]
    takers: Mapping[int, Taker]
    turns: Sequence[_Turn]
    max_memory: int

    def __str__(self) -> str:
        return f"part {self.number + 1} of {self.of} of what is read"

    def run(self, report: Report) -> tuple[dict[int, Any], Failed]:
        failed = _read(self.groups, self.takers, self.turns, self.max_memory, report)
        return {number: taker.state for number, taker in self.takers.items()}, failed


def _read(
    groups: Mapping[int, Group],
    takers: Mapping[int, Taker],
    turns: Sequence[_Turn],
    max_memory: int,
    progress: Report,
) -> Failed:
    largest = max(map(least_memory, groups.values()), default=0)
    limit = in_flight(max_memory, cores(), largest)
    failed: Failed = {}
    units = _units(groups, turns, failed)
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
                    takers[number].add(reads[start].box, *values[start:stop])
                values[start:stop] = [None] * (stop - start)  # memory is counted without them
                progress(sum(read.nbytes for read in reads[start:stop]))
    return failed


def _turns(groups: Sequence[Group], limit: int, max_memory: int) -> Iterator[_Turn]:
    """All boxes, group by group; those that share chunks in turn."""
    grids = [_grid(group, limit, max_memory) for group in groups]
    first = [next((h for h in group if isinstance(h.data, Derived)), group[0]) for group in groups]
    for together in co_read_groups(first):
        alike: dict[Hashable, list[int]] = {}
        for number in together:
            alike.setdefault(number if grids[number] is None else grids[number], []).append(number)
        for numbers in alike.values():
            grid, some = grids[numbers[0]], groups[numbers[0]]
            sizes = map(len, _cuts(some)) if grid is None else [grid_size(some[0].shape, grid)]
            nbytes = sum(handle.nbytes for number in numbers for handle in groups[number])
            if count := math.prod(sizes):
                yield _Turn(numbers, grid, 0, count, count, nbytes)


def _units(
    groups: Mapping[int, Group], turns: Iterable[_Turn], failed: Container[int]
) -> Iterator[Unit]:
    """The boxes of turns, less groups that have failed."""
    for numbers, grid, start, stop, *_ in turns:
        boxes = (_boxes(groups[number], grid) for number in numbers)
        for places in itertools.islice(zip(*boxes, strict=True), start, stop):
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


def counted(whole: int, progress: Progress | None) -> Report:
    """What takes numbers of bytes that were read, and tells how much is done of `whole`."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, whole), whole)

    return count


def read_digests(
    leaves: Iterable[ArrayHandle],
    max_memory: int,
    progress: Report,
    workers: int | None = None,
    executor: Executor | None = None,
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
    groups = [(leaf,) for leaf in readable]
    errors = read_values(groups, made, max_memory, progress, workers, executor)
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
    return itertools.product(*_cuts(group)) if grid is None else grid_boxes(group[0].shape, grid)


def _cuts(group: Group) -> list[list[slice]]:
    """The parts of each axis in which no chunk of a group's arrays ends."""
    parts = []
    for axis, size in enumerate(group[0].shape):
        starts = {start for h in group for start in range(0, size, h.chunk_shape[axis])}
        parts.append([slice(*ends) for ends in itertools.pairwise((*sorted(starts), size))])
    return parts
