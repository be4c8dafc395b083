"""The memory of a job: bytes in flight, and what frees them.

Whoever starts something reserves what it takes; a reservation ends when what it waits for has
ended: a transaction that is committed, an array that is on its device. A single reservation may be
larger than the limit, when nothing else is in flight.
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
# What handling a box takes beside its bytes: it matters for checkpoints of many small arrays.
READ_OVERHEAD = 1 << 14


def usable(max_memory: int) -> int:
    """Bytes of `max_memory` that several boxes may take together; one may take it all. A quarter
    is left for what the allocator keeps of memory that was freed."""
    return max_memory - max_memory // 4


def limiter_bytes(max_memory: int, cores: int, largest: int, remote: bool = False) -> int:
    """Bytes that a job of `max_memory` bytes keeps in flight, of which one box takes `largest` at
    most: half of them, as much as keeps every core busy, or such a box while another is written. Of
    large boxes as many as there are cores: each is of few chunks, and a single core decodes one. To
    or from a bucket (`remote`) there are more, for which cores only wait."""
    large = largest > 2 * IN_FLIGHT_PER_CORE
    boxes = largest * min(max(cores, 2), MOST_LARGE) if large else largest + largest // 2
    busy = IN_FLIGHT_PER_CORE * cores * (REMOTE if remote else 1)
    enough = max(min(busy, max_memory // 2), boxes)
    return min(usable(max_memory), enough)


def cost_bytes(decoding: int, buffers: int, consumer: int, boxes: int = 1) -> int:
    """Bytes of memory that boxes take that are read together: while they are read, what decoding
    their chunks takes and what they are read into; then what is held for their consumer. Plans,
    batches, and the refusal of what is too large all ask this."""
    return max(decoding + buffers + boxes * READ_OVERHEAD, consumer)


def copy_bytes(nbytes: int) -> int:
    """Bytes of memory that copying stored bytes takes: as they are read, and as they are
    written."""
    return 2 * nbytes


def check_fits(costs: Iterable[tuple[Path, int]], max_memory: int) -> None:
    """Raises MemoryLimitError for all boxes, each a path and its bytes, that are too large."""
    too_large = [(path, cost) for path, cost in costs if cost > max_memory]
    if too_large:
        least = max(cost for _, cost in too_large)
        raise MemoryLimitError(
            f"one chunk, encoded and decoded, does not fit into {format_bytes(max_memory)}",
            [f"{format_path(path)}: {format_bytes(cost)}" for path, cost in too_large],
            [f'max_memory="{whole_kib(least)}" is the least that reads it'],
            least,
        )


class Reservation:
    """So many bytes that are in use."""

    def __init__(self, limiter: "MemoryLimiter", nbytes: int):
        self.nbytes = nbytes
        self.is_pending = False
        self._limiter = limiter

    def shrink(self, nbytes: int = 0) -> None:
        """Gives back all but `nbytes` of them."""
        self._limiter.used -= self.nbytes - nbytes
        self.nbytes = nbytes

    def free_after(
        self,
        wait: Callable[[], object],
        done: Callable[[], object] = lambda: None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Gives them back once `wait`, which blocks unless it `is_ready`, has returned; then calls
        `done`, unless something has failed before. The thread that runs out of memory calls both,
        or they are called at the end, in the order of these calls."""
        self.wait, self.done, self.is_ready = wait, done, is_ready
        self.is_pending = True
        self._limiter.pending.append(self)


class MemoryLimiter:
    """The bytes in flight of one job, `used` of its `limit`, and what is waited for, oldest first.
    As a context, it ends when all that was begun has ended, after an error too; what fails then is
    ignored."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self.pending: collections.deque[Reservation] = collections.deque()
        self._failed = False

    def fits(self, nbytes: int) -> bool:
        """Whether so many more bytes are within the limit."""
        return self.used + nbytes <= self.limit

    def reserve(self, nbytes: int) -> Reservation:
        """Counts bytes as used, whether they fit or not."""
        self.used += nbytes
        return Reservation(self, nbytes)

    def make_room(self, nbytes: int) -> None:
        """Waits until so many bytes fit, or nothing is left to wait for."""
        while self.pending and not self.fits(nbytes):
            self.wait_oldest()

    def is_ready(self) -> bool:
        """Whether what has been pending for longest need not be waited for."""
        return self.pending[0].is_ready()

    def wait_oldest(self) -> None:
        """Waits for what has been pending for longest. What fails, or is interrupted, stays
        pending, and is waited for at the end."""
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
