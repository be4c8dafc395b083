"""The memory of a job: bytes in flight, and what frees them.

Each reader and writer reserves the bytes that it needs. A reservation ends when its transaction is
committed, or its array is on its device. A single reservation may exceed the limit if nothing else
is in flight.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable

from reshard.errors import MemoryLimitError
from reshard.storage.machine import cores as cores
from reshard.tree import Path, format_path
from reshard.units import format_bytes, whole_kib

# Beyond this, more bytes in flight make no core busier; they only touch more memory.
IN_FLIGHT_PER_CORE = 72 << 20
# To and from a bucket, that many times as much: a request takes time in which no core is busy.
REMOTE = 3
# Large boxes in flight at most.
MOST_LARGE = 4
# Batches that fit into memory together: one is read while others are encoded and written. With
# fewer, cores wait for the last chunk of a batch; with more, batches are too small.
WINDOW = 4
# Bytes for handling a box, besides its own: they matter for checkpoints of many small arrays.
READ_OVERHEAD = 1 << 14


def usable(max_memory: int) -> int:
    """The part of `max_memory` that several boxes may take together. One box may take it all. A
    quarter is left for freed memory that the allocator keeps."""
    return max_memory - max_memory // 4


def limiter_bytes(max_memory: int, cores: int, largest: int, remote: bool = False) -> int:
    """The bytes that a job keeps in flight. Half of `max_memory`, but no more than keeps every core
    busy; or enough for the `largest` box while another one is written. A large box has few
    chunks, and one core decodes a chunk: so one box for each core. A `remote` job has more,
    since its cores wait for requests."""
    large = largest > 2 * IN_FLIGHT_PER_CORE
    boxes = largest * min(max(cores, 2), MOST_LARGE) if large else largest + largest // 2
    busy = IN_FLIGHT_PER_CORE * cores * (REMOTE if remote else 1)
    enough = max(min(busy, max_memory // 2), boxes)
    return min(usable(max_memory), enough)


def cost_bytes(decoding: int, buffers: int, consumer: int, boxes: int = 1) -> int:
    """Bytes of memory for boxes: while they are read, and then while their consumer has them."""
    return max(decoding + buffers + boxes * READ_OVERHEAD, consumer)


def copy_bytes(nbytes: int) -> int:
    """Bytes of memory to copy stored bytes: as they are read, and as they are written."""
    return 2 * nbytes


def check_fits(costs: Iterable[tuple[Path, int]], max_memory: int) -> None:
    """Raises MemoryLimitError with all boxes, each a path and its bytes, that are too large."""
    too_large = [(path, cost) for path, cost in costs if cost > max_memory]
    if too_large:
        least = max(cost for _, cost in too_large)
        raise MemoryLimitError(
            f"one chunk, encoded and decoded, takes more than the memory limit of "
            f"{format_bytes(max_memory)}",
            [f"{format_path(path)}: {format_bytes(cost)}" for path, cost in too_large],
            [f'max_memory="{whole_kib(least)}" is the least that is enough'],
            least,
        )


class Reservation:
    """Bytes that are in use."""

    def __init__(self, limiter: "MemoryLimiter", nbytes: int):
        self.nbytes = nbytes
        self.is_pending = False
        self._limiter = limiter

    def shrink(self, nbytes: int = 0) -> None:
        """Frees all but `nbytes` of them."""
        self._limiter.used -= self.nbytes - nbytes
        self.nbytes = nbytes

    def free_after(
        self,
        wait: Callable[[], object],
        done: Callable[[], object] = lambda: None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Frees them when `wait` has returned, which blocks unless `is_ready`; then calls `done`,
        unless something failed before. Reservations are freed in the order of these calls, when
        memory is needed or at the end."""
        self.wait, self.done, self.is_ready = wait, done, is_ready
        self.is_pending = True
        self._limiter.pending.append(self)


class MemoryLimiter:
    """The bytes in flight of one job: `used` of its `limit`, and the pending reservations, oldest
    first. As a context, it ends when all pending work has ended, also after an error. Later
    errors are ignored."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self.pending: collections.deque[Reservation] = collections.deque()
        self._failed = False

    def fits(self, nbytes: int) -> bool:
        """Whether this many more bytes are within the limit."""
        return self.used + nbytes <= self.limit

    def reserve(self, nbytes: int) -> Reservation:
        """Counts bytes as used, even if they do not fit."""
        self.used += nbytes
        return Reservation(self, nbytes)

    def make_room(self, nbytes: int) -> None:
        """Waits until this many bytes fit, or nothing is pending."""
        while self.pending and not self.fits(nbytes):
            self.wait_oldest()

    def is_ready(self) -> bool:
        """Whether the oldest pending work has ended."""
        return self.pending[0].is_ready()

    def wait_oldest(self) -> None:
        """Waits for the oldest pending work. If it fails or is interrupted, it stays pending, and
        the end of the context waits for it."""
        oldest = self.pending[0]
        try:
            oldest.wait()
            self.pending.popleft()
            oldest.shrink()
            if not self._failed:
                oldest.done()
        except Exception:
            self._failed = True
            raise

    def __enter__(self) -> "MemoryLimiter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self.pending:
                self.wait_oldest()
        finally:
            while self.pending:
                oldest = self.pending[0]
                with contextlib.suppress(Exception):
                    self.wait_oldest()
                if self.pending and self.pending[0] is oldest:
                    self.pending.popleft()
