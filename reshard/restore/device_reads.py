"""Stored chunks into the shards of arrays on devices, each chunk fetched and decoded once.

    stored chunks            shards of this process          devices
    +-----+-----+            +---+---+---+---+               replicas share
    |     |     |   -read->  |   |   |   |   |   -alias->    one buffer
    +-----+-----+            +---+---+---+---+

Each distinct shard of an array gets one buffer. On CPU devices the JAX arrays are these buffers,
for every replica; to accelerators they are transferred while others are read.
"""

import collections
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reshard.arrays import boxes
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.handle import ArrayHandle
from reshard.engine.batches import Unit, in_batches
from reshard.engine.budget import (
    IN_FLIGHT_PER_CORE,
    WINDOW,
    Budget,
    Reservation,
    check_fits,
    cores,
    in_flight,
    in_memory,
)
from reshard.engine.cost import co_read_groups, decoded_together
from reshard.engine.read import Destination, Read, read
from reshard.errors import CorruptCheckpointError, MemoryLimitError, ReshardError, TreeMismatchError
from reshard.restore.broadcast import (
    ExchangePlan,
    Group,
    Piece,
    in_waves,
    largest_held,
    memory_bytes,
    plan_exchange,
    row_bytes,
    shared_groups,
    stretches,
)
from reshard.restore.device_shards import DeviceShards, local_shards
from reshard.restore.exchange import Exchange
from reshard.restore.lazy_jax import jax
from reshard.tree import format_path
from reshard.units import format_bytes

# Arrays up to this size (decoded bytes) are read whole, and cut into shards in memory: cheaper than
# a read for each shard.
READ_WHOLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Request:
    """One array to read: `dtype` is the target's, which is the handle's or another integer dtype;
    without a sharding it becomes a numpy array on the host."""

    handle: ArrayHandle
    dtype: np.dtype
    sharding: "jax.sharding.Sharding | None"


def read_arrays(
    requests: Sequence[Request],
    max_memory: int | None,
    progress: Callable[[int], None] = lambda count: None,
    exchange: Exchange | None = None,
) -> list[Any]:
    """The arrays, on their devices, in the order of the requests. Each process reads what its own
    devices hold; in an `exchange`, of what several processes hold, its part alone.

    Args:
      max_memory: bytes in flight at most beyond the results: chunks, stored and decoded, and what
        is on its way to an accelerator. None for as much as keeps all cores busy.

    Raises:
      MemoryLimitError: one stored chunk does not fit into `max_memory`; all such arrays are named.
      CorruptCheckpointError: chunks are missing, or stored bytes do not decode.
      TreeMismatchError: an integer does not fit the target's dtype.
    """
    shared: list[Group] = []
    if exchange is not None:
        handles, shardings = [r.handle for r in requests], [r.sharding for r in requests]
        shared = shared_groups(handles, shardings, exchange.processes, max_memory)
    exchanged = {number for group in shared for number in group.numbers}
    loads, found = [], []
    for number, request in enumerate(requests):
        try:
            loads.append(_Load(request, number in exchanged))
        except ReshardError as error:
            found.append(error)
    if found:
        raise CorruptCheckpointError("stored chunks are missing", [str(error) for error in found])
    own = [load for number, load in enumerate(loads) if number not in exchanged]
    largest = in_memory(max((load.chunk_bytes for load in loads), default=0), 0, 0)
    total = sum(loads[number].handle.nbytes for number in exchanged)

    def row(memory: int | None) -> int:
        return 0 if exchange is None else row_bytes(total, exchange.processes, memory)

    def beside(memory: int) -> int:
        return 0 if exchange is None else memory_bytes(row(memory), exchange.processes)

    left = None if max_memory is None else max(max_memory - beside(max_memory), 0)
    limit = in_flight(sys.maxsize if left is None else left, cores(), largest)
    groups = _arranged(own, limit // WINDOW, left)
    if max_memory is not None:
        check_fits(
            (
                (load.handle.path, load.least + beside(load.least + load.least // 3))
                for load in loads
            ),
            max_memory,
        )
    with Budget(limit) as budget:
        if exchange is not None:
            _exchange(shared, loads, exchange, row(max_memory), budget, left, progress)
        for load in own:
            if not load.boxes:
                load.finish()
        units = (
            load.unit(box, budget)
            for group in groups
            for together in zip(*(load.boxes for load in group), strict=True)
            for load, box in zip(group, together, strict=True)
        )
        most = limit if left is None else left
        for filled in read(in_batches(units, limit // WINDOW, most), budget):
            filled.check()
            for (_, box, load, _), values in zip(filled.batch.reads, filled.values, strict=True):
                load.take(box, values)
            progress(sum(read.nbytes for read in filled.batch.reads))
    if exchange is not None:
        exchange.end()
    return [load.result for load in loads]


def _exchange(
    shared: Sequence[Group],
    loads: "Sequence[_Load]",
    exchange: Exchange,
    row: int,
    budget: Budget,
    max_memory: int | None,
    progress: Callable[[int], None],
) -> None:
    """Reads a part of what several processes hold, and gives all of them what they hold of it; rows
    of so many bytes are not counted in `max_memory`. What decides is the same in all processes."""
    least = max((loads[number].least for group in shared for number in group.numbers), default=0)
    limit = 4 * max(IN_FLIGHT_PER_CORE, least)
    if max_memory is not None:
        limit = min(limit, max(max_memory // 2 - least, 0))
    staged = [
        sum(loads[number].stage(limit, exchange.processes) for number in group.numbers)
        for group in shared
    ]
    waves = in_waves(shared, staged, limit)
    plans = [plan_exchange(wave, exchange.processes, exchange.here, row) for wave in waves]
    exchange.begin(sum(plan.rounds for plan in plans), row, _described(loads, plans, row))
    for wave, plan in zip(waves, plans, strict=True):
        loads_now = {number: loads[number] for group in wave for number in group.numbers}
        given = collections.Counter(p.number for pieces in plan.received for p in pieces)
        own: dict[int, list[Box]] = {number: [] for number in loads_now}
        for number, box, _ in plan.reads:
            own[number].append(box)
        budget.make_room(sum(load.staging for load in loads_now.values()))
        for number, load in loads_now.items():
            load.begin(own[number], given[number], budget)
        _run(plan, loads, exchange, budget, max_memory, progress)


def _described(loads: "Sequence[_Load]", plans: Sequence[ExchangePlan], row: int) -> list[str]:
    """What is restored, and in what way, as far as all processes have to agree on it."""
    arrays = [
        (load.handle.path, load.handle.shape, load.handle.dtype.name, load.handle.chunk_shape)
        for load in loads
    ]
    digests = [plan.digest for plan in plans]
    digest = hashlib.sha256(repr((arrays, digests)).encode()).hexdigest()
    return [f"{len(arrays)} arrays of digest {digest[:12]}", f"{row} bytes a round"]


def _run(
    plan: ExchangePlan,
    loads: "Sequence[_Load]",
    exchange: Exchange,
    budget: Budget,
    max_memory: int | None,
    progress: Callable[[int], None],
) -> None:
    """All rounds of a plan."""
    most = budget.limit if max_memory is None else max_memory
    received = iter(plan.received)

    def swap() -> None:
        rows = exchange.gather()
        for piece in next(received):
            progress(loads[piece.number].receive(piece, rows[piece.owner]))

    done = 0
    todo = iter(plan.reads)
    units = (loads[number].unit(box, budget) for number, box, _ in plan.reads)
    for filled in read(in_batches(units, budget.limit // WINDOW, most), budget):
        filled.check()
        for values in filled.values:
            number, box, pieces = next(todo)
            assert values is not None
            data = values.reshape(-1).view(np.uint8)
            loads[number].take(box, values)
            for piece in pieces:
                for _ in range(done, piece.round):
                    swap()
                done = piece.round
                itemsize = values.dtype.itemsize
                part = data[piece.start * itemsize : piece.stop * itemsize]
                exchange.row[piece.offset : piece.offset + len(part)] = part
        progress(sum(read.nbytes for read in filled.batch.reads))
    for _ in range(done, plan.rounds):
        swap()


def _arranged(loads: "Sequence[_Load]", limit: int, max_memory: int | None) -> "list[list[_Load]]":
    """Arrays that are read box by box together, since they share stored chunks and memory has room
    for a box of each; all others on their own. All of them are cut into boxes."""
    groups = []
    for numbers in co_read_groups([load.handle for load in loads]):
        group = [loads[number] for number in numbers]
        chunks = decoded_together([load.handle for load in group]).nbytes
        least = max(load.takes(load.handle.chunk_shape, chunks, len(group)) for load in group)
        if max_memory is None or least <= max_memory:
            for load in group:
                load.cut(limit, chunks, len(group))
            starts = {tuple(map(boxes.start_of, load.boxes)) for load in group}
            groups += [group] if len(starts) == 1 else [[load] for load in group]
            continue
        for load in group:
            load.cut(limit, load.chunk_bytes, 1)
            groups.append([load])
    return groups


class _Load:
    """One array, as its shards are read in boxes of whole chunks, or in one of all that this
    process needs; its `result` is there once all have been read."""

    def __init__(self, request: Request, exchanged: bool):
        self.handle = handle = request.handle
        self._dtype = request.dtype
        self._sharding = request.sharding
        handle.stored_sizes()  # says so if chunks are missing
        self.chunk_bytes = decoded_together([handle]).nbytes
        self._shards = local_shards(handle.shape, request.sharding)
        self._converts = handle.read_dtype != handle.dtype or handle.dtype != request.dtype
        held = sum(map(math.prod, self._shards.shapes)) * request.dtype.itemsize
        small = (
            held <= READ_WHOLE and self._shards.fills_bounding_box and len(self._shards.boxes) > 1
        )
        # Read into a buffer of its own first, and cut up or converted from there.
        self._through_buffer = self._converts or small or exchanged
        # Bytes of the shards' buffers, if they are not the result themselves.
        self.staging = 0 if _aliases(request.sharding) else held
        self.boxes: list[Box] = []
        self.result: Any = None
        self._buffers: dict[Shape, np.ndarray] = {}
        self._reservation: Reservation | None = None
        self._piecewise = False
        self._on_devices: DeviceShards | None = None
        self._left = 0

    def cut(self, limit: int, chunk_bytes: int, together: int) -> None:
        """Decides what is read at once: everything, or boxes of whole chunks that take no more than
        `limit` bytes, and at least one chunk. `chunk_bytes` is what decoding a chunk of its grid
        takes, with those of all `together` arrays that are read with it."""
        if not self._shards.boxes:
            return
        shape, chunk = self.handle.shape, self.handle.chunk_shape
        one_chunk = self.takes(chunk, chunk_bytes, together)
        room = min(2 * limit, WINDOW * limit - one_chunk)
        if self.staging and self.staging * together > room:
            self._piecewise, self._through_buffer, self.staging = True, True, 0
        bounding_box = self._shards.bounding_box
        chunks = math.prod(stop - start for start, stop in boxes.chunk_ranges(bounding_box, chunk))
        whole = self.takes(boxes.shape_of(bounding_box), chunks * chunk_bytes, together)
        if whole <= limit:
            self.boxes = [bounding_box]
        else:
            self._through_buffer = self._converts or self._piecewise
            count = max(1, limit // self.takes(chunk, chunk_bytes, together))
            grid = boxes.grid_boxes(shape, boxes.chunks_together(shape, chunk, count))
            self.boxes = [box for box in grid if self._shards.parts(box)]
        self._left = len(self.boxes)

    def stage(self, limit: int, processes: int) -> int:
        """Decides how an array that processes exchange gets to its devices: through buffers of all
        its shards, or piece by piece where these take more than `limit` bytes on some process.
        Returns how many they take."""
        if _aliases(self._sharding):
            return 0
        elements = largest_held(self.handle.shape, self._sharding, processes)
        needed = elements * self._dtype.itemsize
        if needed > limit:
            self._piecewise, self.staging = True, 0
            return 0
        return needed

    def begin(self, own: list[Box], given: int, budget: Budget) -> None:
        """Begins an array of which this process reads its `own` boxes, and is given some parts."""
        self.boxes, self._left = own, len(own) + given
        if not self._left:
            self.finish()
        elif self.staging:
            self._reservation = budget.reserve(self.staging)

    def takes(self, shape: Shape, decoding: int, together: int) -> int:
        """Bytes that a box of this shape takes, with those of all `together` arrays that are read
        with it; `decoding` is what their chunks take."""
        buffers = together * self._buffer_bytes(shape)
        return in_memory(decoding, buffers, self._held(buffers), together)

    @property
    def least(self) -> int:
        """Bytes that reading a single chunk takes."""
        return self.takes(self.handle.chunk_shape, self.chunk_bytes, 1)

    def unit(self, box: Box, budget: Budget) -> Unit:
        """What it takes to read a box; the first one takes the shards' buffers, too."""
        buffer = self._buffer_bytes(boxes.shape_of(box))
        kept = self.staging if self._reservation is None and box is self.boxes[0] else 0
        into = functools.partial(self._destinations, box, budget)
        return Unit([Read(self.handle, box, self, into)], buffer, self._held(buffer), kept)

    def _buffer_bytes(self, shape: Shape) -> int:
        """Bytes of the values of a box of this shape, if they are not read into its shards."""
        if not self._through_buffer:
            return 0
        return math.prod(map(min, shape, self.handle.shape)) * self.handle.read_dtype.itemsize

    def _held(self, buffer: int) -> int:
        """Bytes for a buffer that has been read: rounding and converting take copies."""
        return 3 * buffer if self._converts else buffer

    def _destinations(self, box: Box, budget: Budget) -> list[Destination] | None:
        """Where a box goes, when its read begins: into shards; or None, into a buffer first."""
        if self.staging and self._reservation is None:
            self._reservation = budget.reserve(self.staging)
        if self._through_buffer:
            return None
        parts = self._shards.parts(box)
        return [(part.common, self._buffer(part.start)[(*part.in_shard, ...)]) for part in parts]

    def take(self, box: Box, values: np.ndarray | None) -> None:
        """Takes what was read of a box; with the last one the array is made."""
        if values is not None:
            self._put(box, values)
        self._count()

    def receive(self, piece: Piece, row: np.ndarray) -> int:
        """Takes what another process has read, out of its row; bytes of it."""
        count = piece.stop - piece.start
        nbytes = count * self.handle.dtype.itemsize
        values = row[piece.offset : piece.offset + nbytes].view(self.handle.dtype)
        begin = 0
        for part in stretches(boxes.shape_of(piece.box), piece.start, piece.stop):
            shape = boxes.shape_of(part)
            end = begin + math.prod(shape)
            self._put(boxes.outside(part, piece.box), values[begin:end].reshape(shape))
            begin = end
        self._count()
        return nbytes

    def _put(self, box: Box, values: np.ndarray) -> None:
        if not self._shards.boxes:  # it is read for others alone
            return
        values = self._converted(values)
        if self._piecewise:
            if self._on_devices is None:
                shape, sharding = self.handle.shape, self._sharding
                self._on_devices = DeviceShards(shape, self._dtype, sharding)
            self._on_devices.put(box, values)
        else:
            for part in self._shards.parts(box):
                self._buffer(part.start)[part.in_shard] = values[part.in_box]

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            self.finish()

    def _buffer(self, start: Shape) -> np.ndarray:
        if not self._buffers:
            try:
                self._buffers = self._shards.buffers(self._dtype)
            except MemoryError as error:
                size = format_bytes(self.handle.nbytes)
                path = format_path(self.handle.path)
                raise MemoryLimitError(f"{path}: there is no memory for its {size}") from error
        return self._buffers[start]

    def _converted(self, values: np.ndarray) -> np.ndarray:
        if values.dtype == self._dtype:
            return values
        fitting = values.astype(self._dtype)
        if not np.array_equal(fitting, values):
            raise TreeMismatchError(
                f"{format_path(self.handle.path)}: its values do not fit {self._dtype.name}",
                [f"from {values.min()} to {values.max()}, saved as {values.dtype.name}"],
            )
        return fitting

    def finish(self) -> None:
        shape, sharding = self.handle.shape, self._sharding
        if sharding is None:
            self.result = self._buffer((0,) * len(shape))
        elif self._on_devices is not None:
            self.result = self._on_devices.array()
        else:
            self.result = jax.make_array_from_callback(
                shape,
                sharding,
                lambda index: self._buffer(tuple(part.start or 0 for part in index or ())),
                dtype=self._dtype,
            )
        self._buffers = {}
        if self._reservation is not None:
            self._reservation.free_after(self.result.block_until_ready)


def _aliases(sharding: Any) -> bool:
    """Whether JAX arrays can be the host's buffers."""
    if sharding is None:
        return True
    return all(device.platform == "cpu" for device in sharding.device_set)
