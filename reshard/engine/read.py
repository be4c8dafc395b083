"""Boxes of stored arrays into buffers, read ahead of whoever uses them, within a budget.

    batches ->  [ reading | reading ]  ->  consumer  ->  [ pending | pending ]
                 stored chunks and          takes          what the consumer still holds:
                 buffers are counted        buffers        its transaction, its transfer

All that a batch reads is read in one `ts.Batch`: such reads share what they fetch and decode.
"""

import collections
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, shape_of
from reshard.arrays.handle import ArrayHandle
from reshard.engine.budget import Budget, Reservation
from reshard.errors import ReshardError
from reshard.storage.location import checked
from reshard.tree import format_path

# Batches that are read before the consumer asks for them.
READ_AHEAD = 2
# How often it is looked which of two things has come first.
_LOOK_SECONDS = 0.002

# Where the values of a part of a box go.
Destination = tuple[Box, np.ndarray]


class Read(NamedTuple):
    """One box to read.

    Attributes:
      owner: what its consumer knows it by.
      into: called when the read begins: the buffers of its parts, or None for one new buffer.
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
      reading: bytes of memory that it takes at most: stored chunks and buffers while it is read.
      held: bytes once it has been read, as long as its consumer holds it.
      kept: bytes of buffers that this batch begins and later ones fill, too. Whoever makes them
        reserves them.
    """

    reads: Sequence[Read]
    reading: int
    held: int
    kept: int = 0


class Filled:
    """What was read of a batch.

    Attributes:
      values: for each read its values, of the handle's dtype; None where it has buffers of its own,
        or failed.
      errors: number of a read -> why it failed.
    """

    def __init__(self, batch: Batch, errors: dict[int, ReshardError], reservation: Reservation):
        self.batch = batch
        self.values: list[np.ndarray | None] = []
        self.errors = errors
        self._reservation = reservation
        self._pending = False

    def check(self) -> None:
        """Raises the first error."""
        if self.errors:
            raise self.errors[min(self.errors)]

    def free_after(
        self,
        wait: Callable[[], object],
        done: Callable[[], object] = lambda: None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Counts what is held until `wait`, which blocks, has returned; then calls `done`, as
        `Reservation.free_after` does. Without it, that is free when the next batch is asked for."""
        self._pending = True
        self._reservation.free_after(wait, done, is_ready)

    def close(self) -> None:
        """Lets go of what nobody holds."""
        self.values.clear()
        if not self._pending:
            self._reservation.free()


def read(batches: Iterable[Batch], budget: Budget) -> Iterator[Filled]:
    """Reads batches in order, up to `READ_AHEAD` of them before they are asked for. One is asked
    for when there may be room for it in the budget, of which others reserve some, too."""
    views: dict[int, ts.TensorStore] = {}
    ahead: collections.deque[_Started] = collections.deque()
    try:
        for batch in batches:
            needed = batch.reading + batch.kept
            while (full := not budget.fits(needed)) or len(ahead) == READ_AHEAD:
                # What the consumer holds is waited for first: reads go on meanwhile. But where that
                # is not there yet, what has been read is handed over: no core need be busy with it.
                if full and budget.pending and _is_freed_first(budget, ahead):
                    budget.wait_oldest()
                elif ahead:
                    yield from _finish(ahead)
                else:
                    break
            ahead.append(_Started(batch, [], [], {}, budget.reserve(batch.reading)))
            _start(ahead[-1], views)
        while ahead:
            yield from _finish(ahead)
    finally:
        for started in ahead:  # buffers are written to until these have ended
            for future in itertools.chain.from_iterable(started.parts):
                future.exception()


class _Started(NamedTuple):
    """A batch that is being read: for each read its buffer, and the reads into its parts."""

    batch: Batch
    buffers: list[np.ndarray | None]
    parts: list[list[ts.Future]]
    errors: dict[int, ReshardError]
    reservation: Reservation


def _is_freed_first(budget: Budget, ahead: "collections.deque[_Started]") -> bool:
    """Waits until what the consumer holds is free, or the oldest batch has been read; which."""
    while ahead and not budget.is_ready():
        if all(future.done() for future in itertools.chain.from_iterable(ahead[0].parts)):
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _start(started: _Started, views: dict[int, ts.TensorStore]) -> None:
    """Begins the reads of a batch. `views` are those of the last batch's arrays."""
    reads = started.batch.reads
    handles = {id(read.handle) for read in reads}
    for known in [known for known in views if known not in handles]:
        del views[known]
    with ts.Batch() as together:
        for number, (handle, box, _, into) in enumerate(reads):
            buffer: np.ndarray | None = None
            futures: list[ts.Future] = []
            started.parts.append(futures)
            try:
                if id(handle) not in views:
                    views[id(handle)] = handle.view()
                view = views[id(handle)]
                parts = None if into is None else into()
                if parts is None:
                    buffer = np.empty(shape_of(box), handle.read_dtype)
                    parts = [(box, buffer)]
                for part, values in parts:
                    write = ts.array(values, copy=False).write(view[part], batch=together)
                    futures.append(write.commit)
            except ReshardError as error:
                started.errors[number] = error
            started.buffers.append(buffer)


def _finish(ahead: "collections.deque[_Started]") -> Iterator[Filled]:
    """What has been read of the oldest batch, which is no longer one of these then."""
    started = ahead[0]
    batch, errors = started.batch, started.errors
    filled = Filled(batch, errors, started.reservation)
    for number, (read, futures) in enumerate(zip(batch.reads, started.parts, strict=True)):
        for future in futures:
            try:
                checked(future, f"{format_path(read.handle.path)}: its stored bytes")
            except ReshardError as error:
                errors.setdefault(number, error)
        buffer = None if number in errors else started.buffers[number]
        filled.values.append(None if buffer is None else read.handle.rounded(buffer))
    ahead.popleft()
    started.buffers.clear()
    started.reservation.shrink(batch.held)
    yield filled
    filled.close()
