"""Small files that are on the disk when a call returns."""

import contextlib
import os
import pathlib


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file."""
    _write(path, data)
    sync_directory(path.parent)


def replace(path: pathlib.Path, data: bytes, temporary: pathlib.Path) -> None:
    """Writes a file that is there whole or not at all, by way of another one beside it."""
    try:
        _write(temporary, data)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_directory(path.parent)


def sync_directory(directory: pathlib.Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: pathlib.Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # nothing is written through a link or into a pipe of others
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
