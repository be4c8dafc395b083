"""Stored chunks into the shards of arrays on devices, each chunk fetched and decoded once.

    stored chunks            shards of this process          devices
    +-----+-----+            +---+---+---+---+               replicas share
    |     |     |   -read->  |   |   |   |   |   -alias->    one buffer
    +-----+-----+            +---+---+---+---+

Each distinct shard of an array has one buffer. On CPU devices the JAX arrays of all replicas are
these buffers. On accelerators they are transferred while other arrays are read.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from reshard.arrays import boxes
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.handle import ArrayHandle
from reshard.engine.batches import Unit, in_batches
from reshard.engine.cost import co_read_groups, decoded_together
from reshard.engine.memory import (
    WINDOW,
    MemoryLimiter,
    Reservation,
    check_fits,
    cores,
    cost_bytes,
    limiter_bytes,
)
from reshard.engine.read import Destination, Read, read
from reshard.errors import CorruptCheckpointError, MemoryLimitError, ReshardError, TreeMismatchError
from reshard.restore.device_shards import DeviceShards, local_shards
from reshard.restore.lazy_jax import jax
from reshard.tree import format_path
from reshard.units import format_bytes

# Arrays up to this size (decoded bytes) are read whole and split in memory, which is faster than a
# read for each shard.
READ_WHOLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Request:
    """One array to read."""

    handle: ArrayHandle
    dtype: np.dtype  # of the target: the handle's, or another integer dtype
    sharding: "jax.sharding.Sharding | None"  # of the target; None for a numpy array on the host
    on_host: bool = False  # the result is the buffers of this process's shards, by first elements


def read_arrays(
    requests: Sequence[Request],
    max_memory: int | None,
    progress: Callable[[int], None] = lambda count: None,
) -> list[Any]:
    """Read arrays onto their devices, in the order of the requests. Each process reads the shards
    of its own devices.

    Args:
      max_memory: bytes in flight at most beyond the results: chunks, stored and decoded, and bytes
        on their way to an accelerator. None for enough to keep all cores busy.

    Raises:
      MemoryLimitError: one stored chunk does not fit into `max_memory`; all such arrays are named.
      CorruptCheckpointError: chunks are missing, or stored bytes do not decode.
      TreeMismatchError: an integer does not fit the target's dtype.
    """
    check_stored(requests)
    arrays = list(map(_ArrayRead, requests))
    largest = cost_bytes(max((array.chunk_bytes for array in arrays), default=0), 0, 0)
    limit = limiter_bytes(sys.maxsize if max_memory is None else max_memory, cores(), largest)
    groups = _arranged(arrays, limit // WINDOW, max_memory)
    if max_memory is not None:
        check_fits(((array.handle.path, array.least) for array in arrays), max_memory)
    with MemoryLimiter(limit) as limiter:
        for array in arrays:
            if not array.boxes:
                array.finish()
        units = (
            array.unit(box, limiter)
            for group in groups
            for together in zip(*(array.boxes for array in group), strict=True)
            for array, box in zip(group, together, strict=True)
        )
        most = limit if max_memory is None else max_memory
        for filled in read(in_batches(units, limit // WINDOW, most), limiter):
            filled.check()
            for (_, box, array, _), values in zip(filled.batch.reads, filled.values, strict=True):
                array.accept(box, values)
            progress(sum(read.nbytes for read in filled.batch.reads))
    return [array.result for array in arrays]


def check_stored(requests: Sequence[Request]) -> None:
    """Raises CorruptCheckpointError with all arrays that lack stored chunks."""
    found = []
    for request in requests:
        try:
            request.handle.stored_sizes()
        except ReshardError as error:
            found.append(str(error))
    if found:
        raise CorruptCheckpointError("stored chunks are missing", found)


def least_memory(request: Request) -> int:
    """Bytes that the read of one chunk takes."""
    return _ArrayRead(request).least


def _arranged(
    arrays: "Sequence[_ArrayRead]", limit: int, max_memory: int | None
) -> "list[list[_ArrayRead]]":
    """Groups of arrays that share stored chunks, and are read together if a box of each fits."""
    groups = []
    for numbers in co_read_groups([array.handle for array in arrays]):
        group = [arrays[number] for number in numbers]
        chunks = decoded_together([array.handle for array in group]).nbytes
        least = max(array.takes(array.handle.chunk_shape, chunks, len(group)) for array in group)
        fits = max_memory is None or least <= max_memory
        for array in group:
            array.split_into_boxes(
                limit, *((chunks, len(group)) if fits else (array.chunk_bytes, 1))
            )
        starts = {tuple(map(boxes.start_of, array.boxes)) for array in group}
        groups += [group] if fits and len(starts) == 1 else [[array] for array in group]
    return groups


class _ArrayRead:
    """The read of one array, in one box or in boxes of whole chunks."""

    def __init__(self, request: Request):
        self.handle = handle = request.handle
        self._dtype = request.dtype
        self._sharding = request.sharding
        self.chunk_bytes = decoded_together([handle]).nbytes
        self._shards = local_shards(handle.shape, request.sharding)
        self._converts = handle.read_dtype != handle.dtype or handle.dtype != request.dtype
        held, several = self._shards.elements * request.dtype.itemsize, len(self._shards.boxes) > 1
        small = held <= READ_WHOLE and self._shards.fills_bounding_box and several
        # Read into a separate buffer first, and split or converted from there.
        self._through_buffer = self._converts or small
        # Bytes of the shards' buffers, unless they are the result.
        self._on_host = request.on_host
        self.staging = 0 if self._on_host or _aliases(request.sharding) else held
        self.boxes: list[Box] = []
        self.result: Any = None
        self._buffers: dict[Shape, np.ndarray] = {}
        self._reservation: Reservation | None = None
        self._piecewise = False
        self._on_devices: DeviceShards | None = None

    def split_into_boxes(self, limit: int, chunk_bytes: int, together: int) -> None:
        """Choose the boxes: the whole array, or one or more whole chunks of up to `limit` bytes.
        `chunk_bytes`: bytes to decode a chunk of each of the `together` arrays that are
        read with it."""
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
        self.boxes = [bounding_box]
        if whole > limit:
            self._through_buffer = self._converts or self._piecewise
            count = max(1, limit // self.takes(chunk, chunk_bytes, together))
            grid = boxes.grid_boxes(shape, boxes.chunks_together(shape, chunk, count))
            self.boxes = [box for box in grid if self._shards.parts(box)]

    def takes(self, shape: Shape, decoding: int, together: int) -> int:
        """Bytes that boxes of this shape take, one of each of the `together` arrays that are read
        together; `decoding`: bytes of their chunks."""
        buffers = together * self._buffer_bytes(shape)
        return cost_bytes(decoding, buffers, self._held(buffers), together)

    @property
    def least(self) -> int:
        """Bytes that the read of one chunk takes."""
        return self.takes(self.handle.chunk_shape, self.chunk_bytes, 1)

    def unit(self, box: Box, limiter: MemoryLimiter) -> Unit:
        """A box as a unit of a batch. The first box also takes the shards' buffers."""
        buffer = self._buffer_bytes(boxes.shape_of(box))
        kept = self.staging if self._reservation is None and box is self.boxes[0] else 0
        into = functools.partial(self._destinations, box, limiter)
        return Unit([Read(self.handle, box, self, into)], buffer, self._held(buffer), kept)

    def _buffer_bytes(self, shape: Shape) -> int:
        """Bytes of the separate buffer for a box of this shape."""
        if not self._through_buffer:
            return 0
        return math.prod(map(min, shape, self.handle.shape)) * self.handle.read_dtype.itemsize

    def _held(self, buffer: int) -> int:
        """Bytes of a buffer after the read: rounding and converting take two copies."""
        if not self._converts:
            return buffer
        read = self.handle.read_dtype.itemsize
        return buffer + 2 * (buffer // read) * max(read, self._dtype.itemsize)

    def _destinations(self, box: Box, limiter: MemoryLimiter) -> list[Destination] | None:
        """The parts of shards that a read of a box begins to fill; None for a separate buffer."""
        if self.staging and self._reservation is None:
            self._reservation = limiter.reserve(self.staging)
        if self._through_buffer:
            return None
        parts = self._shards.parts(box)
        return [(part.common, self._buffer(part.start)[(*part.in_shard, ...)]) for part in parts]

    def accept(self, box: Box, values: np.ndarray | None) -> None:
        """Take the values of a box, None if they are in shards. The last box makes the array."""
        if values is not None:
            values = self._converted(values)
            if self._piecewise:
                shape, sharding = self.handle.shape, self._sharding
                self._on_devices = self._on_devices or DeviceShards(shape, self._dtype, sharding)
                self._on_devices.put(box, values)
            else:
                for part in self._shards.parts(box):
                    self._buffer(part.start)[part.in_shard] = values[part.in_box]
        if box is self.boxes[-1]:
            self.finish()

    def _buffer(self, start: Shape) -> np.ndarray:
        try:
            self._buffers = self._buffers or self._shards.buffers(self._dtype)
        except MemoryError as error:
            path, size = format_path(self.handle.path), format_bytes(self.handle.nbytes)
            text = (
                f"{path}: this machine has too little memory for its shards of the array of {size}"
            )
            raise MemoryLimitError(text) from error
        return self._buffers[start]

    def _converted(self, values: np.ndarray) -> np.ndarray:
        if values.dtype == self._dtype:
            return values
        if values.dtype.kind == "V":  # ml_dtypes cannot cast between its own integers
            values = values.astype(np.int8)
        bounds = ml_dtypes.iinfo(self._dtype)
        if values.size and (int(values.min()) < bounds.min or int(values.max()) > bounds.max):
            raise TreeMismatchError(
                f"{format_path(self.handle.path)}: {self._dtype.name} cannot hold its values "
                f"from {values.min()} to {values.max()}, saved as {self.handle.dtype.name}"
            )
        return values.astype(self._dtype)

    def finish(self) -> None:
        shape, sharding = self.handle.shape, self._sharding
        if self._on_host:
            self.result = self._buffers
        elif sharding is None:
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
    """Whether JAX arrays can be buffers of the host."""
    devices = () if sharding is None else sharding.device_set
    return all(device.platform == "cpu" for device in devices)
