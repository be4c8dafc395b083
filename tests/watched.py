"""What jobs keep in memory, and what they read together."""

from reshard.engine import read as engine
from reshard.engine.budget import Budget
from reshard.restore import device_reads


def own_memory(patch):
    """Devices are taken to have memory of their own, as accelerators have."""
    patch.setattr(device_reads, "_aliases", lambda sharding: sharding is None)


class Watched:
    """All that is reserved and read while it is patched in.

    Attributes:
      batches: what has been read together.
      peak: bytes that were in use at most.
      used: bytes that are still in use.
    """

    def __init__(self, patch):
        self.batches = []
        self.peak = 0
        self._budgets = []
        begin, reserve, start = Budget.__init__, Budget.reserve, engine._start

        def watched_begin(budget, limit):
            begin(budget, limit)
            self._budgets.append(budget)

        def watched_reserve(budget, nbytes):
            reservation = reserve(budget, nbytes)
            self.peak = max(self.peak, budget.used)
            return reservation

        def watched_start(started, views):
            self.batches.append(started.batch)
            start(started, views)

        patch.setattr(Budget, "__init__", watched_begin)
        patch.setattr(Budget, "reserve", watched_reserve)
        patch.setattr(engine, "_start", watched_start)

    @property
    def used(self):
        return sum(budget.used for budget in self._budgets)
