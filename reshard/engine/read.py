"""Boxes of stored arrays are read into buffers, ahead of their consumer, within a limiter.

    batches ->  [ reading | reading ]  ->  consumer  ->  [ pending | pending ]
                 stored chunks and          takes          what the consumer still holds:
                 buffers are counted        buffers        its transaction, its transfer

All that a batch reads is read in one `ts.Batch`: such reads share what they fetch and decode.
"""

import collections
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, shape_of
from reshard.arrays.handle import ArrayHandle
from reshard.engine.memory import MemoryLimiter, Reservation
from reshard.errors import ReshardError
from reshard.storage.location import checked
from reshard.tree import format_path

# Batches that are read before the consumer asks for them.
READ_AHEAD = 2
# Seconds between two looks which of two things has come first.
_LOOK_SECONDS = 0.002

# Where the values of a part of a box go.
Destination = tuple[Box, np.ndarray]


class Read(NamedTuple):
    """One box to read.

    Attributes:
      owner: the consumer's own value for it.
      into: called when the read begins. Returns the buffers of its parts, or None for one new
        buffer.
    """

    handle: ArrayHandle
    box: Box
    owner: Any = None
    into: Callable[[], Iterable[Destination] | None] | None = None

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the box."""
        return math.prod(shape_of(self.box)) * self.handle.dtype.itemsize


class Batch(NamedTuple):
    """Boxes that are read together.

    Attributes:
      reading: bytes of memory, at most, while it is read: stored chunks and buffers.
      consumer_bytes: bytes of memory once it has been read, while its consumer holds it.
      shared_bytes: bytes of buffers that later batches fill, too. Their owner reserves them.
    """

    reads: Sequence[Read]
    reading: int
    consumer_bytes: int
    shared_bytes: int = 0


class Filled:
    """A batch that is being read, and then its values.

    Attributes:
      values: the values of each read, of the handle's dtype. None if it has buffers of its own,
        or failed.
      errors: number of a read -> why it failed.
      parts: number of a read, a part of its box, its buffer, and the future of it.
      reservation: the consumer's bytes. They are free when the next batch is asked for, unless
        the consumer calls `free_after`.
    """

    def __init__(self, batch: Batch, reservation: Reservation):
        self.batch = batch
        self.values: list[np.ndarray | None] = []
        self.errors: dict[int, ReshardError] = {}
        self.parts: list[tuple[int, Box, np.ndarray, ts.Future]] = []
        self.reservation = reservation

    def check(self) -> None:
        """Raises the first error."""
        if self.errors:
            raise self.errors[min(self.errors)]

    def begin(self, views: dict[int, ts.TensorStore]) -> None:
        """Begins the reads. `views` has the open arrays of the last batch."""
        handles = {id(read.handle) for read in self.batch.reads}
        for known in [known for known in views if known not in handles]:
            del views[known]
        with ts.Batch() as together:
            for number, (handle, box, _, into) in enumerate(self.batch.reads):
                self.values.append(None)
                try:
                    if id(handle) not in views:
                        views[id(handle)] = handle.view()
                    parts = None if into is None else into()
                    if parts is None:
                        buffer = np.empty(shape_of(box), handle.read_dtype)
                        self.values[number] = buffer
                        parts = [(box, buffer)]
                    for part, values in parts:
                        source = views[id(handle)][part]
                        write = ts.array(values, copy=False).write(source, batch=together)
                        self.parts.append((number, part, values, write.commit))
                except ReshardError as error:
                    self.errors[number] = error

    def wait(self) -> None:
        """Waits until everything has been read."""
        reads = self.batch.reads
        for number, _, _, future in self.parts:
            try:
                checked(future, f"{format_path(reads[number].handle.path)}: its stored bytes")
            except ReshardError as error:
                self.errors.setdefault(number, error)
        for number, box, buffer, _ in self.parts:  # now: it takes the memory of the reads
            try:
                if number not in self.errors:
                    values = reads[number].handle.rounded(buffer, box)
                    self.values[number] = None if self.values[number] is None else values
            except ReshardError as error:
                self.errors[number] = error
        for number in self.errors:
            self.values[number] = None
        self.reservation.shrink(self.batch.consumer_bytes)


def read(batches: Iterable[Batch], limiter: MemoryLimiter) -> Iterator[Filled]:
    """Reads batches in order, up to `READ_AHEAD` of them before they are asked for. The next batch
    begins when the limiter has enough bytes for it. Others reserve bytes of the limiter, too."""
    views: dict[int, ts.TensorStore] = {}
    ahead: collections.deque[Filled] = collections.deque()
    try:
        for batch in batches:
            needed = batch.reading + batch.shared_bytes
            while (full := not limiter.fits(needed)) or len(ahead) == READ_AHEAD:
                # Wait for the consumer's bytes first: reads go on meanwhile. But if a batch is
                # read before they are free, hand it over: then the cores have work.
                if full and limiter.pending and _is_freed_first(limiter, ahead):
                    limiter.wait_oldest()
                elif ahead:
                    yield from _oldest(ahead)
                else:
                    break
            ahead.append(Filled(batch, limiter.reserve(batch.reading)))
            ahead[-1].begin(views)
        while ahead:
            yield from _oldest(ahead)
    finally:
        for filled in ahead:  # buffers are written to until these have ended
            for *_, future in filled.parts:
                future.exception()


def _is_freed_first(limiter: MemoryLimiter, ahead: "collections.deque[Filled]") -> bool:
    """Waits for the consumer's oldest bytes or the oldest batch; whether the bytes came first."""
    while ahead and not limiter.is_ready():
        if all(future.done() for *_, future in ahead[0].parts):
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _oldest(ahead: "collections.deque[Filled]") -> Iterator[Filled]:
    """The values of the oldest batch, which is removed from the queue."""
    filled = ahead[0]
    filled.wait()
    ahead.popleft()
    yield filled
    filled.values.clear()
    if not filled.reservation.is_pending:  # the consumer does not hold the buffers
        filled.reservation.shrink()
