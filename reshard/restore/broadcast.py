"""Which process reads which boxes, and how all others are given them: the same in every process.

    boxes in the order of storage     rows of bytes, of one size       round 0      round 1
    +---+---+---+---+---+---+         process 0   | a | b | c |  ->   | a   b |    | c ... |
    | a | b | c | d | e | f |         process 1   | d | e | f |  ->   | d   e |    | f ... |
    +---+---+---+---+---+---+
      process 0   process 1           each round all processes are given all rows

Boxes are stored chunks, or several small ones. What one process alone holds it reads, and no row
has it. Of what several hold, each process reads a run of about as many bytes that are stored next
to one another, whoever holds them: all are given all rows, and requests to a bucket, which fetch
what is between two chunks that are near, would fetch twice what another process reads there.
Pure: no I/O, and no jax but what a sharding says.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays import boxes
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.derived import sources
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.engine.cost import co_read_groups

# Small chunks are read up to so many bytes at once: each of many tiny ones would take as long.
_SMALL = 1 << 16
# Bytes of a row: room for what a process says that fails, and no more, with those of all processes,
# than take memory without making anything faster.
SMALLEST_ROW = 1 << 12
_LARGEST_ROW, _LARGEST_ROUND = 1 << 22, 1 << 25
# Bytes before those of a row; both are multiples of every itemsize.
HEADER = 16

Processes = tuple[int, ...]


class Group(NamedTuple):
    """Arrays of one shape and one grid, which are read box by box together.

    Attributes:
      numbers: what each array is known by.
      itemsizes: bytes of an element of each, as it is read.
      chunk, together: shapes of a chunk, and of what is read at once of many small ones.
      shardings: theirs; None for an array that every process has on its host.
      place: where a box is stored, which may be compared with that of any other box.
    """

    numbers: Sequence[int]
    itemsizes: Sequence[int]
    shape: Shape
    chunk: Shape
    together: Shape
    shardings: tuple[Any, ...]
    place: Callable[[Box], Any]

    def boxes(self, processes: int) -> "list[tuple[Box, Processes]]":
        """What is read at once, and the processes that hold a part of it."""
        return _held_boxes(self.shape, self.chunk, self.together, self.shardings, processes)

    def is_shared(self, processes: int) -> bool:
        """Whether several processes hold a part of some chunk."""
        return any(len(holders) > 1 for _, holders in self.boxes(processes))


def shared_groups(
    arrays: Sequence[ArrayHandle], shardings: Sequence[Any], processes: int, max_memory: int | None
) -> list[Group]:
    """Arrays of which several processes hold parts of some chunk. Those on devices of one process
    are its own: in their place other processes may have devices of theirs. One without a sharding
    goes to the host of every process."""
    numbers = [
        number
        for number, sharding in enumerate(shardings)
        if sharding is None or len({device.process_index for device in sharding.device_set}) > 1
    ]
    handles = [arrays[number] for number in numbers]
    stores = dict.fromkeys(id(data.store) for handle in handles for _, data in handle.roots())
    order = {store: number for number, store in enumerate(stores)}
    small = _SMALL if max_memory is None else min(_SMALL, max_memory // 16)
    found = []
    for places in co_read_groups(handles):
        together = [handles[place] for place in places]
        first = together[0]
        widths = [max(h.stored_dtype.itemsize, h.read_dtype.itemsize) for h in together]
        count = max(small // (math.prod(first.chunk_shape) * sum(widths)), 1)
        group = Group(
            [numbers[place] for place in places],
            [handle.dtype.itemsize for handle in together],
            first.shape,
            first.chunk_shape,
            boxes.chunks_together(first.shape, first.chunk_shape, count),
            tuple(dict.fromkeys(shardings[numbers[place]] for place in places)),
            functools.partial(_place, first, order),
        )
        if group.is_shared(processes):
            found.append(group)
    return found


def _place(handle: ArrayHandle, stores: Mapping[int, int], box: Box) -> tuple[int, str, int, int]:
    """Where the first chunk of a box is stored: the store's number, the file, the offset, and the
    bytes."""
    for stored, part in sources(handle, box):
        data = stored.data
        if not isinstance(data, StoredArray):
            continue
        cell = tuple(first for first, _ in boxes.chunk_ranges(part, stored.chunk_shape))
        key = data.encoding.chunk_key(cell)
        value = data.store.values[data.name].get(key)
        number = stores[id(data.store)]
        if value is None:  # it has the fill value
            return number, "", 0, 0
        return number, value.file or "", value.offset, value.size
    return 0, "", 0, 0


def in_waves(groups: Sequence[Group], staged: Sequence[int], limit: int) -> list[list[Group]]:
    """Groups that are exchanged at once: those whose buffers, of so many bytes, have room."""
    waves: list[list[Group]] = []
    used = 0
    for group, nbytes in zip(groups, staged, strict=True):
        if not waves or used + nbytes > limit:
            waves.append([])
            used = 0
        waves[-1].append(group)
        used += nbytes
    return waves


class Piece(NamedTuple):
    """Elements `start` to `stop` of a box, in row-major order, in the row that its owner sends in
    some round, `offset` bytes from its begin."""

    round: int
    owner: int
    offset: int
    number: int
    box: Box
    start: int
    stop: int


class ExchangePlan(NamedTuple):
    """What one process does.

    Attributes:
      rounds: how often rows are exchanged.
      reads: numbers of arrays, and boxes that it reads, those of a group next to one another; with
        what it sends of each, in the order of the rounds.
      received: for each round what it takes of the rows of others.
      digest: of all that any process sends, and of where that is stored: it differs where processes
        do not make the same plan, or do not read the same checkpoint.
    """

    rounds: int
    reads: list[tuple[int, Box, list[Piece]]]
    received: list[list[Piece]]
    digest: str


class _Placed(NamedTuple):
    """A box of a group, where it is stored, and who holds a part of it."""

    place: Any
    group: int
    start: Shape
    box: Box
    holders: Processes


def row_bytes(total: int, processes: int, max_memory: int | None) -> int:
    """Bytes that each process sends in a round, of `total` bytes that they exchange: with what they
    take in memory, a quarter of `max_memory` at most, but for the smallest row there is."""
    most = min(_LARGEST_ROW, _LARGEST_ROUND // processes)
    if max_memory is not None:
        most = min(most, max_memory // 4 // memory_bytes(1 - HEADER, processes) - HEADER)
    useful = 1 << (total // processes).bit_length()
    return max(min(most, useful), SMALLEST_ROW) // HEADER * HEADER


def memory_bytes(row: int, processes: int) -> int:
    """Bytes of memory for the row of a process and those of all, on the host and on a device."""
    return 2 * (processes + 1) * (HEADER + row)


def plan_exchange(groups: Sequence[Group], processes: int, here: int, row: int) -> ExchangePlan:
    """The part of one process, `here`, in what all do, with rows of `row` bytes."""
    own: list[_Placed] = []
    shared: list[_Placed] = []
    for number, group in enumerate(groups):
        for box, holders in group.boxes(processes):
            if len(holders) > 1 or here in holders:
                placed = _Placed(group.place(box), number, boxes.start_of(box), box, holders)
                (shared if len(holders) > 1 else own).append(placed)
    shared.sort(key=_order)
    sizes = [math.prod(boxes.shape_of(p.box)) * sum(groups[p.group].itemsizes) for p in shared]
    streams: list[list[_Placed]] = [[] for _ in range(processes)]
    for placed, owner in zip(shared, _runs(sizes, processes), strict=True):
        streams[owner].append(placed)
    rounds = 0
    sent: dict[tuple[int, Shape], list[Piece]] = {}
    received: dict[int, list[Piece]] = {}
    digest = hashlib.sha256()
    for owner, stream in enumerate(streams):
        position = 0
        for placed in stream:
            group = groups[placed.group]
            described = (owner, placed.place, group.numbers, group.itemsizes, placed.start)
            digest.update(repr((*described, placed.holders)).encode())
            for array, itemsize in zip(group.numbers, group.itemsizes, strict=True):
                pieces, position = _pieces(owner, array, placed.box, itemsize, position, row)
                if owner == here:
                    sent[array, placed.start] = pieces
                elif here in placed.holders:
                    for piece in pieces:
                        received.setdefault(piece.round, []).append(piece)
        rounds = max(rounds, -(-position // row))
    reads = [
        (array, placed.box, sent.get((array, placed.start), []))
        for placed in sorted([*streams[here], *own], key=_order)
        for array in groups[placed.group].numbers
    ]
    by_round = [received.get(number, []) for number in range(rounds)]
    return ExchangePlan(rounds, reads, by_round, digest.hexdigest())


def _order(placed: _Placed) -> Any:
    return placed[:3]


def _runs(sizes: Sequence[int], count: int) -> Iterator[int]:
    """For each of several things in order, which of `count` runs of about the same size has it."""
    total, before = sum(sizes), 0
    for size in sizes:
        yield (2 * before + size) * count // (2 * total)
        before += size


def _pieces(
    owner: int, array: int, box: Box, itemsize: int, position: int, row: int
) -> tuple[list[Piece], int]:
    """A box in the stream of its owner from some position on; and the position after it."""
    count, start, found = math.prod(boxes.shape_of(box)), 0, []
    position = -(-position // itemsize) * itemsize
    while start < count:
        number, offset = divmod(position, row)
        stop = min(count, start + (row - offset) // itemsize)
        found.append(Piece(number, owner, offset, array, box, start, stop))
        position += (stop - start) * itemsize
        start = stop
    return found, position


def stretches(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements `start` to `stop` of an array are, in row-major order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        rest = stretches(shape[1:], start - last * inner, stop - last * inner)
        yield from ((slice(last, first), *part) for part in rest)
        return
    for part in stretches(shape[1:], start - (first - 1) * inner, inner) if start % inner else ():
        yield (slice(first - 1, first), *part)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    for part in stretches(shape[1:], 0, stop - last * inner):
        yield (slice(last, last + 1), *part)


@functools.lru_cache(maxsize=64)
def _held_boxes(
    shape: Shape, chunk: Shape, together: Shape, shardings: tuple[Any, ...], processes: int
) -> list[tuple[Box, Processes]]:
    """Boxes of whole chunks with the processes that hold parts of them; models have few shapes and
    many arrays of each."""
    holders: dict[Shape, set[int]] = {}
    for held, those in _held_alike(shape, shardings, processes):
        touched = {cell for box in held for cell in _cells(box, chunk)}
        for cell in touched:
            holders.setdefault(cell, set()).update(those)
    found = []
    for box in boxes.grid_boxes(shape, together):
        cells = list(_cells(box, chunk))
        each = [tuple(sorted(holders.get(cell, ()))) for cell in cells]
        if len(set(each)) == 1:
            found.append((box, each[0]))
            continue
        for cell, those in zip(cells, each, strict=True):
            dims = zip(cell, chunk, shape, strict=True)
            found.append((tuple(slice(n * c, min(n * c + c, size)) for n, c, size in dims), those))
    return found


@functools.lru_cache(maxsize=1024)
def largest_held(shape: Shape, sharding: Any, processes: int) -> int:
    """Elements of an array that the process holds that holds most."""
    held = [found for found, _ in _held_alike(shape, (sharding,), processes)]
    return max(sum(math.prod(boxes.shape_of(box)) for box in found) for found in held)


def _cells(box: Box, chunk: Shape) -> Iterator[Shape]:
    """Places of the chunks that a box touches."""
    return itertools.product(*(range(*ends) for ends in boxes.chunk_ranges(box, chunk)))


def _held_alike(
    shape: Shape, shardings: tuple[Any, ...], processes: int
) -> Iterator[tuple[list[Box], list[int]]]:
    """The distinct sets of boxes that processes hold, of arrays that are laid out so, with the
    processes that hold them."""
    held: dict[int, dict[Any, Box]] = {}
    for sharding in shardings:
        if sharding is None:
            whole = tuple(slice(0, size) for size in shape)
            places = [(process, whole) for process in range(processes)]
        else:
            indices = sharding.devices_indices_map(shape).items()
            places = [(d.process_index, boxes.from_index(index, shape)) for d, index in indices]
        for process, box in places:
            held.setdefault(process, {})[boxes.start_of(box), boxes.shape_of(box)] = box
    alike: dict[frozenset, list[int]] = {}
    for process, found in held.items():
        alike.setdefault(frozenset(found), []).append(process)
    for those in alike.values():
        yield list(held[those[0]].values()), those
