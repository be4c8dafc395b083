"""What a job replaces on a disk: only the files that its plan has seen are ever deleted.

Another program may write into a destination while a job runs. So the plan lists it, the commit
compares it with this list, and the old checkpoint is deleted file by file, as the list says.
"""

from collections.abc import Sequence

from reshard.loader.detection import RECORD_FILES
from reshard.storage.disk import Entry
from reshard.storage.location import Location

# Path, bytes, and time of the last change in ns. Of a directory, the path alone counts.
Seen = tuple[str, int, int | str]


def seen_entry(entry: Entry) -> Seen:
    """What the plan notes of a name."""
    if entry.is_dir:
        return f"{entry.path}/", 0, 0
    return entry.path, entry.nbytes, entry.modified


def unseen(directory: Location, seen: Sequence[Seen]) -> list[str]:
    """Paths below a directory that are not as they were seen. Records of digests may be written at
    any time: they belong to the directories that were seen."""
    known: set[Seen] = {(path, nbytes, modified) for path, nbytes, modified in seen}
    return [
        entry.path
        for entry in directory.walk()
        if seen_entry(entry) not in known and not _is_record(entry.path, known)
    ]


def _is_record(path: str, known: set[Seen]) -> bool:
    folder, slash, name = path.rpartition("/")
    return name in RECORD_FILES and ((f"{folder}/", 0, 0) in known if slash else bool(known))


def remove_seen(directory: Location, seen: Sequence[Seen]) -> list[str]:
    """Deletes everything below a directory that is as it was seen. Returns the paths that stay."""
    stay = {*(kept := unseen(directory, seen))}
    gone = [entry for entry in directory.walk() if entry.path not in stay]
    directory.remove_files([entry.path for entry in gone if not entry.is_dir])
    for folder in [*(entry.path for entry in reversed(gone) if entry.is_dir), ""]:
        if (directory / folder).is_dir() and not (directory / folder).names():
            (directory / folder).remove_empty()
    return kept
