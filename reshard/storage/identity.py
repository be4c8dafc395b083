"""The identity of an opened checkpoint: its files as they were before their first byte was read.

Whoever reads compares it first and last: what changes in between is still changed at the end. In a
bucket, where each look is a request, the last one is enough.
"""

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reshard.errors import ChangedCheckpointError, ReshardError, raise_all
from reshard.storage.disk import UNKNOWN, Entry, on_local_disk
from reshard.storage.location import Location

# Path -> entry.
Files = dict[str, Entry]


class Identity(NamedTuple):
    """Files below a directory, by their paths, each with its entry when it was opened."""

    directory: Location
    files: Files


def listed(directory: Location, files: Files) -> Identity:
    """The identity of files that were listed. Looks at the versions that a bucket's list lacks."""
    lacking = [] if directory.is_local else [f for f in files if files[f].modified == UNKNOWN]
    return Identity(directory, files | directory.look(lacking))


def check_unchanged(opened: Iterable[Identity], error: Exception | None = None) -> None:
    """Raises ChangedCheckpointError, because of `error`, if files have changed or were removed."""
    found, hints = [], ["open it again: reshard.open(path)"]
    every: dict[Location, Files] = {}
    for directory, files in opened:
        every.setdefault(directory, {}).update(files)
    for directory, files in every.items():
        now = directory.look(files)
        for file, before in files.items():
            if (after := now.get(file)) is None:
                text = f"`{directory / file}` was removed"
                found.append(ChangedCheckpointError(text, (), hints))
            elif before[1:] != after[1:] and (lines := _differences(directory, before, after)):
                text = f"`{directory / file}` has changed since it was opened"
                found.append(ChangedCheckpointError(text, lines, hints))
    try:
        raise_all(found)
    except ChangedCheckpointError as changed:
        raise changed from error


@contextlib.contextmanager
def unchanged(*opened: Identity) -> Iterator[None]:
    """Raises ChangedCheckpointError if files have changed since they were opened: at the beginning,
    at the end, or instead of another error. An identity may grow meanwhile."""
    check_unchanged(each for each in opened if each.directory.is_local)
    try:
        yield
    except (ReshardError, OSError) as error:
        check_unchanged(opened, error)
        raise
    check_unchanged(opened)


def _differences(directory: Location, before: Entry, after: Entry) -> list[str]:
    """What has changed. Other file systems than local disks may change the inode of a file."""
    if before[1:-1] != after[1:-1]:
        return [f"it had {_described(before)}", f"it has {_described(after)}"]
    moved = 0 != before.inode != after.inode and on_local_disk(directory)
    return [f"another file has its name, also of {_described(after)}"] if moved else []


def _described(entry: Entry) -> str:
    """The size and the time of a file, or the version of an object."""
    if isinstance(entry.modified, str):
        size = "" if entry.nbytes == UNKNOWN else f"{entry.nbytes} bytes, "
        return f"{size}version {entry.modified}"
    seconds, rest = divmod(entry.modified, 10**9)
    time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{entry.nbytes} bytes, modified at {time:%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"
