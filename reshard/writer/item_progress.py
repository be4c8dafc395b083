"""How far the writing of an item is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.digests import Digest
from reshard.errors import DestinationError
from reshard.tree import Path, format_path


class CopiedFile(NamedTuple):
    """A file beside the arrays, as it was when it was copied or shared: bytes, time of its last
    change, and SHA-256 of what was read."""

    nbytes: int
    mtime_ns: int
    sha256: str

    @staticmethod
    def parse(entry: Sequence[Any]) -> "CopiedFile":
        """What JSON makes of it; raises ValueError or TypeError for anything else."""
        found = CopiedFile(*entry)
        if type(found.nbytes) is not int or type(found.mtime_ns) is not int:
            raise ValueError("a file that no job has copied")
        if len(bytes.fromhex(found.sha256)) != 32:
            raise ValueError("a hash that is none")
        return found


@dataclasses.dataclass
class ItemProgress:
    """What of an item has been committed.

    Attributes:
      values: stored values that were copied, of all in order.
      batches: batches of boxes that were rewritten, of all in order.
      digests: for each array the state of its digest after these.
      merged: the item's root database is complete.
    """

    values: int = 0
    batches: int = 0
    digests: dict[Path, Sequence[int]] = dataclasses.field(default_factory=dict)
    merged: bool = False

    def value_batch(self, values: int) -> None:
        """Notes that so many values have been copied."""
        self.values = values

    def box_batch(self, batches: int, digests: Mapping[Path, Sequence[int]]) -> None:
        """Notes that so many batches have been rewritten, with the digests of the last one."""
        self.batches = batches
        self.digests |= digests

    def resume(self, digests: Mapping[Path, Digest]) -> None:
        """Sets digests to where they were; raises DestinationError for those of other arrays."""
        for path, state in self.digests.items():
            if path not in digests:
                raise DestinationError(f"{format_path(path)}: the unfinished job never wrote it")
            digests[path].resume(state)

    def document(self) -> dict[str, Any]:
        """It as JSON."""
        digests = [[list(path), list(state)] for path, state in self.digests.items()]
        return {**vars(self), "digests": digests}

    @staticmethod
    def parse(document: Mapping[str, Any]) -> "ItemProgress":
        """What `document` gave; raises ValueError, KeyError or TypeError for anything else."""
        digests = {tuple(path): state for path, state in document["digests"]}
        found = ItemProgress(**{**document, "digests": digests})
        parts = [part for state in digests.values() for part in state]
        counts = [found.values, found.batches, *parts]
        if type(found.merged) is not bool or any(type(n) is not int or n < 0 for n in counts):
            raise ValueError("progress that no job has noted")
        if any(len(state) != 3 for state in digests.values()):
            raise ValueError("a digest that none has been")
        return found
