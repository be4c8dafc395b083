"""What a process takes of its machine: processors, threads, and how it keeps memory."""

import ctypes
import gc
import os
import platform
from collections.abc import Mapping
from typing import Any

from reshard.storage.disk import kernel_text

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
    """For a process of this package, never for a library's user: few arenas of malloc, which keep
    freed memory, or a job takes twice its budget on glibc. In a single arena, threads that handle
    small chunks wait for a quarter of the time, so a job of `max_memory` bytes has as many as that
    leaves room for. Only the first arena holds large blocks, and to touch new memory takes a fifth
    of the time, so a job that reads `large_arrays` has only that. A thread stays in its arena. And
    Python looks for cycles less often, which in trees of 100,000 leaves takes a fifth of the time.
    """
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


def this_process() -> dict[str, Any]:
    """What tells a process from all others: host, boot and process namespace, id and start time."""
    pid = os.getpid()
    own = {"pid": pid, "started": _started(pid)}
    return {"host": platform.node(), "machine": _machine()} | own


def has_ended(process: Mapping[str, Any]) -> bool | None:
    """Whether a process, as of `this_process`, has ended; None for one of another machine, of which
    nobody here knows."""
    pid, started = process.get("pid"), process.get("started")
    if not process.get("machine") or process["machine"] != _machine() or type(pid) is not int:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    now = _started(pid)
    return bool(now and started) and now != started


def _machine() -> str:
    """What two processes have in common that know each other's process ids; empty if unknown.

    Not the name of the host: containers on different machines may have the same."""
    boot, ids = kernel_text("sys/kernel/random/boot_id"), kernel_text("self/ns/pid")
    return f"{boot.strip()} {ids}" if boot and ids else ""


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; empty if unknown."""
    fields = kernel_text(f"{pid}/stat").rpartition(")")[2].split()
    return "" if not fields else "ended" if fields[0] in "ZX" else fields[19]
