"""Which leaves have moved: the same contents under another path. Pure."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.tree import Path


def moves(removed: Mapping[Path, Any], added: Mapping[Path, Any]) -> dict[Path, Path]:
    """Old path -> new path.

    Args:
      removed: path -> what tells contents apart, of leaves that are on the old side alone.
      added: the same of those on the new side alone.
    """
    groups: dict[Any, tuple[list[Path], list[Path]]] = {}
    for side, leaves in enumerate((removed, added)):
        for path, contents in leaves.items():
            groups.setdefault(contents, ([], []))[side].append(path)
    found = {old[0]: new[0] for old, new in groups.values() if len(old) == len(new) == 1}
    renames: dict[Path, set[Path]] = {}
    for old, new in found.items():
        before, after = _renamed_part(old, new)
        renames.setdefault(before, set()).add(after)
    for old, new in groups.values():
        if len(old) * len(new) > 1:
            found |= _told_apart(old, set(new), renames)
    return found


def _renamed_part(old: Path, new: Path) -> tuple[Path, Path]:
    """Two paths less what they share at the start and at the end."""
    shortest = min(len(old), len(new))
    ahead = next((i for i in range(shortest) if old[i] != new[i]), shortest)
    behind = next(
        (i for i in range(shortest - ahead) if old[-1 - i] != new[-1 - i]), shortest - ahead
    )
    return old[ahead : len(old) - behind], new[ahead : len(new) - behind]


def _told_apart(
    old: Sequence[Path], new: set[Path], renames: Mapping[Path, set[Path]]
) -> dict[Path, Path]:
    """Moves of leaves of the same contents that are renamed as others are, and as one alone is."""
    found = {}
    for path in old:
        parts = itertools.combinations_with_replacement(range(len(path) + 1), 2)
        found[path] = {
            renamed
            for start, stop in parts
            for part in renames.get(path[start:stop], ())
            if (renamed := path[:start] + part + path[stop:]) in new
        }
    claims = collections.Counter(itertools.chain(*found.values()))
    alone = {path: next(iter(to)) for path, to in found.items() if len(to) == 1}
    return {path: to for path, to in alone.items() if claims[to] == 1}
