"""The machine that the figures come from."""

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

_LIBRARIES = ("reshard", "orbax-checkpoint", "jax", "tensorstore", "numpy")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def _filesystem(path: Path) -> str:
    """The type and device of the filesystem that holds `path`."""
    parts = psutil.disk_partitions(all=True)
    mounts = [part for part in parts if path.resolve().is_relative_to(part.mountpoint)]
    nearest = max(mounts, key=lambda part: len(part.mountpoint))
    return f"{nearest.fstype} on {nearest.device}"


def describe(scratch: Path) -> dict[str, str]:
    """The processor, memory, kernel, the filesystem under `scratch`, and library versions."""
    memory = psutil.virtual_memory().total
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} x {_cpu()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(scratch),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
