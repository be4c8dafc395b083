"""A process and its machine: processors, threads, memory, and the identity of processes."""

import contextlib
import ctypes
import gc
import os
import platform
from collections.abc import Mapping
from typing import Any

from reshard.storage.disk import kernel_text

# mallopt's M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: arenas, and bytes.
_MALLOPT = {-8: 4, -3: 32 << 20, -1: 64 << 20}
# Files that a worker opens at once, at least: it reads one while it waits for another.
_FILES = 2
# How many workers share the processors of this machine.
_among = 1


def share_cores(among: int) -> None:
    """Makes this process, one of `among` workers on a machine, use its part of the processors, also
    for TensorStore's decoding and encoding."""
    global _among
    _among = among


def cores() -> int:
    """Processors that this process may use. Workers on one machine share them equally."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(count // _among, 1)


def thread_limits() -> dict[str, Any]:
    """TensorStore's context resources for threads: none unless workers share the machine."""
    if _among == 1:
        return {}
    limits = {"data_copy_concurrency": cores(), "file_io_concurrency": max(cores(), _FILES)}
    return {name: {"limit": limit} for name, limit in limits.items()}


def tune_memory() -> None:
    """Tunes memory for a process of this package, never for a user of the library. On glibc, few
    arenas keep freed memory; with an arena for each thread, a job takes twice its budget. Python
    looks for cycles less often. In trees of 100,000 leaves, that saves a fifth of the time."""
    gc.set_threshold(1_000_000, 20, 20)
    with contextlib.suppress(OSError, AttributeError):  # another libc
        for parameter, limit in _MALLOPT.items():
            ctypes.CDLL(None).mallopt(parameter, limit)


def this_process() -> dict[str, Any]:
    """The identity of this process: host, boot and process namespace, process id, start time."""
    pid = os.getpid()
    own = {"pid": pid, "started": _started(pid)}
    return {"host": platform.node(), "machine": _machine()} | own


def has_ended(process: Mapping[str, Any]) -> bool | None:
    """Whether a process, identified as by `this_process`, has ended; None if it is on another
    machine, whose processes are unknown here."""
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
    """The same for all processes that see each other's process ids; empty if unknown. The name of
    the host is not enough: containers on different machines may share it."""
    boot, ids = kernel_text("sys/kernel/random/boot_id"), kernel_text("self/ns/pid")
    return f"{boot.strip()} {ids}" if boot and ids else ""


def _started(pid: int) -> str:
    """The start time of a process, in ticks since boot; empty if unknown."""
    fields = kernel_text(f"{pid}/stat").rpartition(")")[2].split()
    return "" if not fields else "ended" if fields[0] in "ZX" else fields[19]
