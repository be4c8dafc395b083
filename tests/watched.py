"""The memory of jobs, and the arrays that they read together."""

from reshard.engine.memory import MemoryLimiter
from reshard.engine.read import Filled
from reshard.restore import device_reads


def own_memory(patch):
    """Make CPU devices count as accelerators."""
    patch.setattr(device_reads, "_aliases", lambda sharding: sharding is None)


class Watched:
    """Reservations and reads while it is patched in.

    Attributes:
      batches: what has been read together.
      peak: bytes that were in use at most.
      used: bytes that are still in use.
      budgets: those that have begun.
    """

    def __init__(self, patch):
        self.batches = []
        self.peak = 0
        self.budgets = []
        begin, reserve, start = MemoryLimiter.__init__, MemoryLimiter.reserve, Filled.begin

        def watched_begin(limiter, limit):
            begin(limiter, limit)
            self.budgets.append(limiter)

        def watched_reserve(limiter, nbytes):
            reservation = reserve(limiter, nbytes)
            self.peak = max(self.peak, limiter.used)
            return reservation

        def watched_start(filled, views):
            self.batches.append(filled.batch)
            start(filled, views)

        patch.setattr(MemoryLimiter, "__init__", watched_begin)
        patch.setattr(MemoryLimiter, "reserve", watched_reserve)
        patch.setattr(Filled, "begin", watched_start)

    @property
    def used(self):
        return sum(limiter.used for limiter in self.budgets)
