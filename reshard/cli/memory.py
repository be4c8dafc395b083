"""How a command uses memory. For its own process only, never for a library's user."""

import ctypes
import gc

from reshard.engine.budget import cores

_MALLOC_ARENA_MAX, _MALLOC_MMAP_THRESHOLD, _MALLOC_TRIM_THRESHOLD = -8, -3, -1
_MOST_ARENAS = 4


def tune_memory() -> None:
    """Few arenas of malloc, in which freed memory is kept and used again: on glibc, the difference
    between the budget and twice the budget. In a single one, threads that encode small chunks wait
    for one another for a quarter of the time. And Python looks for cycles less often: in trees of
    100,000 leaves, of which none is one, that takes a fifth of the time."""
    gc.set_threshold(100_000, 20, 20)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MALLOC_ARENA_MAX, min(cores(), _MOST_ARENAS))
    mallopt(_MALLOC_MMAP_THRESHOLD, 32 << 20)
    mallopt(_MALLOC_TRIM_THRESHOLD, 64 << 20)
