"""Directories of Hugging Face: a model in the cache, with its snapshots, and a clone of git-lfs.

models--ORG--NAME/refs/main            the name of the snapshot that is current
models--ORG--NAME/snapshots/NAME/      links to the files of a model
models--ORG--NAME/blobs/               these files
"""

import os
import shlex

from reshard.errors import CheckpointFormatError, CheckpointNotFoundError
from reshard.storage.location import Location, parse_location

# The beginning of the file that stands for one that git-lfs has not fetched.
_POINTER = b"version https://git-lfs.github.com/spec/v1"


def check_no_pointer(file: Location) -> None:
    """Raises CheckpointFormatError for a file that git-lfs has not fetched."""
    if file.is_file() and file.part(0, len(_POINTER)) == _POINTER:
        raise CheckpointFormatError(
            f"`{file}` is a pointer of git-lfs, not the file itself",
            hints=[f"git -C {shlex.quote(str(file.parent))} lfs pull"],
        )


def snapshot(path: str | os.PathLike[str]) -> Location:
    """The current snapshot of a model's directory in a cache; of any other path, its location.
    Raises CheckpointNotFoundError if there is no such snapshot."""
    directory = parse_location(path)
    try:
        names = directory.names()
    except (FileNotFoundError, NotADirectoryError):
        return directory
    if "snapshots" not in names or {"refs", "blobs"}.isdisjoint(names):
        return directory
    snapshots, data = directory / "snapshots", (directory / "refs" / "main").read()
    name, present = (data or b"").decode(errors="replace").strip(), snapshots.directories()
    if name in present:
        return snapshots / name
    lacks = f"snapshot `{name:.80}`, which its `refs/main` names"
    lacks = "`refs/main`, which names the snapshot to open" if data is None else lacks
    hints = [str(snapshots / each) for each in present]
    raise CheckpointNotFoundError(f"`{directory}` has no {lacks}", hints=hints)
