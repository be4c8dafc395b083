"""Which leaves have moved: the same contents under another path. Pure."""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.tree import Path

# What a path starts with and what it ends with.
_Ends = tuple[Path, Path]


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
    parts: dict[Path, set[Path]] = {}
    ends: dict[_Ends, set[_Ends]] = {}
    for old, new in found.items():
        before, after = _renamed_part(old, new)
        parts.setdefault(before, set()).add(after)
        for one, other in _renamed_ends(old, new):
            ends.setdefault(one, set()).add(other)
    for old, new in groups.values():
        if len(old) * len(new) > 1:
            found |= _told_apart(old, set(new), parts, ends)
    return found


def _shared(old: Path, new: Path) -> tuple[int, int]:
    """How many keys two paths share at the start, and of the others at the end."""
    shortest = min(len(old), len(new))
    ahead = next((i for i in range(shortest) if old[i] != new[i]), shortest)
    behind = next(
        (i for i in range(shortest - ahead) if old[-1 - i] != new[-1 - i]), shortest - ahead
    )
    return ahead, behind


def _renamed_part(old: Path, new: Path) -> tuple[Path, Path]:
    """Two paths less what they share at the start and at the end."""
    ahead, behind = _shared(old, new)
    return old[ahead : len(old) - behind], new[ahead : len(new) - behind]


def _renamed_ends(old: Path, new: Path) -> Iterator[tuple[_Ends, _Ends]]:
    """What stands before and after the longest stretch that their renamed parts share: of
    `params/a/b` and `a/b/value` the ends `params/` and `/value`. None where there is no such
    stretch, several where there are several."""
    ahead, behind = _shared(old, new)
    before, after = range(ahead, len(old) - behind), range(ahead, len(new) - behind)
    for size in range(min(len(before), len(after)), 0, -1):
        places = [
            (i, j)
            for i in before[: len(before) - size + 1]
            for j in after[: len(after) - size + 1]
            if old[i : i + size] == new[j : j + size]
        ]
        for i, j in places:
            yield (old[:i], old[i + size :]), (new[:j], new[j + size :])
        if places:
            return


def _told_apart(
    old: Sequence[Path],
    new: set[Path],
    parts: Mapping[Path, set[Path]],
    ends: Mapping[_Ends, set[_Ends]],
) -> dict[Path, Path]:
    """Moves of leaves of the same contents that are renamed as others are, and as one alone is."""
    found = {}
    for path in old:
        stretches = list(itertools.combinations_with_replacement(range(len(path) + 1), 2))
        renamed = {
            path[:start] + part + path[stop:]
            for start, stop in stretches
            for part in parts.get(path[start:stop], ())
        }
        renamed |= {
            first + path[start:stop] + last
            for start, stop in stretches
            if start < stop
            for first, last in ends.get((path[:start], path[stop:]), ())
        }
        found[path] = renamed & new
    claims = collections.Counter(itertools.chain(*found.values()))
    alone = {path: next(iter(to)) for path, to in found.items() if len(to) == 1}
    return {path: to for path, to in alone.items() if claims[to] == 1}
