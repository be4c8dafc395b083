"""What a process takes of its machine: processors, threads, and how it keeps memory."""

import ctypes
import gc
import os
from typing import Any

# Parameters of mallopt: M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD.
_MALLOPT = -8, -3, -1
_MAX_ARENAS = 4
# Where each arena may keep so many bytes, there are more: enough that threads seldom share one.
_ARENA_BYTES = 128 << 20
_ENOUGH_ARENAS = 8
# Bytes of memory that a single arena keeps.
_KEPT = 1 << 30
# Files that a worker has open at once at least: one is read while another is waited for.
_FILES = 2
# Processes that divide the processors of this machine, this one among them.
_among = 1


def share_cores(among: int) -> None:
    """For a process that is one of several workers on a machine: it takes its part of the
    processors, also for what TensorStore decodes and encodes."""
    global _among
    _among = among


def cores() -> int:
    """Processors that this process may use, less those of workers beside it."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return max(found // _among, 1)


def thread_limits() -> dict[str, Any]:
    """What a context says of TensorStore's threads: nothing where the machine is not divided."""
    if _among == 1:
        return {}
    limits = {"data_copy_concurrency": cores(), "file_io_concurrency": max(cores(), _FILES)}
    return {name: {"limit": limit} for name, limit in limits.items()}


def tune_memory(max_memory: int = 0, large_arrays: bool = False) -> None:
    """For a process of this package, never for a library's user: few arenas of malloc, in which
    freed memory is kept and used again: on glibc, the difference between the budget and twice the
    budget. In a single one, threads that handle small chunks wait for one another for a quarter of
    the time, so a job of `max_memory` bytes has as many as that leaves room for. But other arenas
    than the first hold no large blocks, and to touch new memory for each of those takes a fifth of
    the time, so one that reads `large_arrays` has only that. It is decided once: a thread stays in
    its arena. And Python looks for cycles less often: in trees of 100,000 leaves, of which none is
    one, that takes a fifth of the time."""
    gc.set_threshold(100_000, 20, 20)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    roomy = min(max_memory // _ARENA_BYTES, _ENOUGH_ARENAS)
    several = max(min(cores(), _MAX_ARENAS), roomy)
    limits = (1, _KEPT, _KEPT) if large_arrays else (several, 32 << 20, 64 << 20)
    for parameter, limit in zip(_MALLOPT, limits, strict=True):
        mallopt(parameter, limit)
