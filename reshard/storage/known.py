"""What has been found in a bucket, while nobody needs to know of changes."""

from collections.abc import Iterable
from typing import NamedTuple

import tensorstore as ts

from reshard.storage import posix
from reshard.storage.posix import Entry


class Known(NamedTuple):
    """What has been found below a directory, while nobody needs to know of changes: what is in
    directories, of which some are known with all that is below them, and documents, of which some
    are on the way."""

    top: str
    children: "dict[str, dict[str, Entry]]"
    whole: set[str]
    documents: dict[str, bytes | None]
    coming: dict[str, ts.Future]

    def is_whole(self, path: str) -> bool:
        """Whether all that is below a directory is known."""
        return any(f"{path}/".startswith(f"{top}/") for top in self.whole)

    def is_gone(self, path: str) -> bool:
        """Whether it is known that nothing is below a directory."""
        above, _, name = path.rpartition("/")
        names = self.children.get(above)
        return names is not None and not (name in names and names[name].is_dir)

    def add(self, top: str, found: Iterable[Entry]) -> None:
        """Notes all that is below a directory."""
        entries = list(found)  # or nothing, where it cannot be listed
        self.children[top] = {}
        for entry in entries:
            *above, name = entry.path.split("/")
            folder = top
            for part in above:
                names = self.children[folder]
                if part not in names or not names[part].is_dir:
                    names[part] = joined(names.get(part), directory_entry(part))
                folder = f"{folder}/{part}"
                self.children.setdefault(folder, {})
            names = self.children[folder]
            names[name] = joined(names.get(name), entry._replace(path=name))
        self.whole.add(top)


def nothing_known(top: str) -> Known:
    """Nothing yet, of what is below a directory."""
    return Known(top, {}, set(), {}, {})


def joined(one: Entry | None, other: Entry) -> Entry:
    """What has a name that both have: an object may have the name of a directory."""
    if one is None or one.is_file == other.is_file:
        return other
    return (one if one.is_file else other)._replace(is_dir=True)


def file_entry(name: str, nbytes: int = posix.UNKNOWN, version: int = posix.UNKNOWN) -> Entry:
    return Entry(name, True, False, nbytes, version, (-1, -1), 1, nbytes)


def directory_entry(name: str) -> Entry:
    return Entry(name, False, True, 0, 0, (-1, -1), 1, 0)
