"""Reads all values of arrays once, box by box, for `verify`, `diff` and digests."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, Protocol

import numpy as np

from reshard.arrays.boxes import Shape, chunks_together, common_multiple, grid_size, shape_of
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, Derived
from reshard.engine.batches import Unit, in_batches
from reshard.engine.cost import co_read_groups, decoded_together
from reshard.engine.memory import (
    WINDOW,
    MemoryLimiter,
    check_fits,
    cores,
    cost_bytes,
    limiter_bytes,
)
from reshard.engine.read import Read, read
from reshard.engine.run import Report, check_tasks, run_tasks, task_count
from reshard.engine.shares import divide
from reshard.errors import ReshardError, StoreError
from reshard.tree import Path

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
# Arrays of one shape that are read at the same boxes: one, or two to be compared.
Group = tuple[ArrayHandle, ...]
# Where boxes begin along each axis, and where the last one ends.
Cuts = tuple[tuple[int, ...], ...]
# Number of a group -> place in it -> why that array could not be read.
Failed = dict[int, Mapping[int, ReshardError]]


class Accumulator(Protocol):
    """Accepts the values of a group, box by box, in any order, and keeps none of them."""

    add: Callable[..., None]
    merge: Callable[[Any], None]

    @property
    def state(self) -> Any: ...


def read_values(
    groups: Sequence[Group],
    accumulators: Sequence[Accumulator],
    max_memory: int,
    progress: Report,
    workers: int | None = None,
    executor: Executor | None = None,
) -> Failed:
    """Reads every element of all arrays once, for the accumulator of each group, in this process,
    in workers or in an executor. After an error, the rest of that group is skipped. Raises
    MemoryLimitError with all stored chunks that do not fit into `max_memory`, and StoreError if a
    bucket refuses a request."""
    if not groups:
        return {}
    least = [(group[0].path, least_memory(group)) for group in groups]
    check_fits(least, max_memory)
    limit = limiter_bytes(max_memory, cores(), max((nbytes for _, nbytes in least), default=0))
    turns = list(_turns(groups, limit // WINDOW, max_memory))
    if workers is None and executor is None:
        every = dict(enumerate(groups)), dict(enumerate(accumulators))
        return ReadTask(0, 1, 0, *every, turns, max_memory).run(progress)[1]
    count = task_count(sum(turn.nbytes for turn in turns), workers)
    weights = [np.linspace(0, turn.nbytes, turn.count + 1, dtype=np.int64) for turn in turns]
    tasks = []
    for number, ranges in enumerate(divide(weights, count)):
        own = [turns[n]._replace(start=start, stop=stop) for n, start, stop in ranges]
        if numbers := [n for turn in own for n in turn.numbers]:
            each = {n: groups[n] for n in numbers}, {n: accumulators[n] for n in numbers}
            weight = sum(int(weights[n][stop] - weights[n][start]) for n, start, stop in ranges)
            tasks.append(ReadTask(number, count, weight, *each, own, max_memory))
    check_tasks(tasks, executor)
    failed: Failed = {}
    for states, errors in run_tasks(tasks, progress, workers=workers, executor=executor):
        for number, state in states.items():
            accumulators[number].merge(state)
        failed = errors | failed  # of the first box, as in one process
    return failed


class _Turn(NamedTuple):
    """Boxes of groups, in turn: the first box of each group, then the second of each, and so on.

    Attributes:
      numbers: of the groups.
      start, stop: the first box, and the one after the last.
      count: boxes of each group.
      nbytes: decoded bytes of all boxes.
    """

    numbers: Sequence[int]
    cuts: Cuts
    start: int
    stop: int
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """One task of `read_values`; groups and accumulators by number of the group."""

    number: int
    of: int
    nbytes: int
    groups: Mapping[int, Group]
    accumulators: Mapping[int, Accumulator]
    turns: Sequence[_Turn]
    max_memory: int

    def __str__(self) -> str:
        return f"part {self.number + 1} of {self.of} of the reads"

    def run(self, report: Report) -> tuple[dict[int, Any], Failed]:
        largest = max(map(least_memory, self.groups.values()), default=0)
        limit = limiter_bytes(self.max_memory, cores(), largest)
        failed: Failed = {}
        for number, group in self.groups.items():
            if errors := _unreadable(group):
                failed[number] = errors
        units = self._units(failed)
        with MemoryLimiter(limit) as limiter:
            for filled in read(in_batches(units, limit // WINDOW, self.max_memory), limiter):
                reads, values = filled.batch.reads, filled.values
                stop = 0
                while stop < len(reads):
                    start, number = stop, reads[stop].owner
                    stop += len(self.groups[number])
                    places = range(start, stop)
                    errors = {n - start: filled.errors[n] for n in places if n in filled.errors}
                    for error in errors.values():
                        if isinstance(error, StoreError):
                            raise error
                    if errors:
                        failed.setdefault(number, errors)
                    elif number not in failed:
                        self.accumulators[number].add(reads[start].box, *values[start:stop])
                    values[start:stop] = [None] * len(places)  # the limiter no longer counts them
                    report(sum(read.nbytes for read in reads[start:stop]))
        return {number: each.state for number, each in self.accumulators.items()}, failed

    def _units(self, failed: Failed) -> Iterator[Unit]:
        """The boxes of all turns, less groups that have failed."""
        for numbers, cuts, start, stop, *_ in self.turns:
            axes = ([slice(*ends) for ends in itertools.pairwise(axis)] for axis in cuts)
            for box in itertools.islice(itertools.product(*axes), start, stop):
                for number in numbers:
                    if number not in failed:
                        group = self.groups[number]
                        reads = [Read(handle, box, number) for handle in group]
                        yield Unit(reads, *_buffers(group, math.prod(shape_of(box))))


def _unreadable(group: Group) -> dict[int, ReshardError]:
    """The errors of arrays whose data is missing, truncated, or saved under a shared name."""
    errors: dict[int, ReshardError] = {}
    for place, handle in enumerate(group):
        try:
            handle.stored_sizes()
            handle.view()
        except ReshardError as error:
            errors[place] = error
    return errors


def _turns(groups: Sequence[Group], limit: int, max_memory: int) -> Iterator[_Turn]:
    """All boxes. Groups that share chunks, and have the same boxes, are read in turn."""
    first = [next((h for h in group if isinstance(h.data, Derived)), group[0]) for group in groups]
    for together in co_read_groups(first):
        alike: dict[Cuts, list[int]] = {}
        for number in together:
            alike.setdefault(_cuts(groups[number], limit, max_memory), []).append(number)
        for cuts, numbers in alike.items():
            nbytes = sum(handle.nbytes for number in numbers for handle in groups[number])
            if count := math.prod(len(axis) - 1 for axis in cuts):
                yield _Turn(numbers, cuts, 0, count, count, nbytes)


def _cuts(group: Group, limit: int, max_memory: int) -> Cuts:
    """Boxes of whole chunks of all arrays of a group, several chunks if they are small. If such a
    box is too large, boxes end wherever a chunk of one of the arrays ends."""
    shape = group[0].shape
    chunks = [handle.chunk_shape for handle in group]
    box = common_multiple(chunks, shape)
    cost = _cost(group, box)
    if cost <= max_memory:
        chunks = [chunks_together(shape, box, max(limit // cost, 1))]
    return tuple(
        (*sorted({start for size in sizes for start in range(0, length, size)}), length)
        for length, *sizes in zip(shape, *chunks, strict=True)
    )


def _buffers(group: Group, elements: int) -> tuple[int, int]:
    """Bytes of the buffers for so many elements of each array, while they are read and afterwards.
    Arrays that are rounded then have two buffers."""
    read = sum(handle.read_dtype.itemsize for handle in group)
    rounded = sum(h.dtype.itemsize for h in group if h.read_dtype != h.dtype)
    return elements * read, elements * (read + rounded)


def least_memory(group: Group) -> int:
    """Bytes in flight for a box that is in one chunk of each array of a group."""
    return _cost(group, tuple(map(min, zip(*(h.chunk_shape for h in group), strict=True))))


def _cost(group: Group, box: Shape) -> int:
    """Bytes in flight for a box of this shape that begins where a chunk of each array does."""
    decoding = sum(
        grid_size(box, handle.chunk_shape) * decoded_together([handle]).nbytes for handle in group
    )
    elements = math.prod(map(min, box, group[0].shape))
    return cost_bytes(decoding, *_buffers(group, elements), len(group))


def counted(whole: int, progress: Progress | None) -> Report:
    """A function that accepts numbers of bytes, and reports their sum, of `whole` bytes."""
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
    """Path -> digest of each array that can be read, and path -> error of each other array. Raises
    as `read_values` does."""
    leaves = list(leaves)
    made = [Digest(leaf.shape, leaf.dtype) for leaf in leaves]
    groups = [(leaf,) for leaf in leaves]
    errors = read_values(groups, made, max_memory, progress, workers, executor)
    failed = {leaves[number].path: found[0] for number, found in errors.items()}
    pairs = zip(leaves, made, strict=True)
    return {leaf.path: found.text() for leaf, found in pairs if leaf.path not in failed}, failed
