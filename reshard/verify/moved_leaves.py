"""Which leaves have moved: the same contents under another path. Pure."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.tree import Path

# What a path starts with and what it ends with.
_Ends = tuple[Path, Path]


def moves(removed: Mapping[Path, Any], added: Mapping[Path, Any]) -> dict[Path, Path]:
    """Old path -> new path, from what tells the contents of leaves apart that are on the old side
    alone, and on the new one."""
    groups: defaultdict[Any, tuple[list[Path], list[Path]]] = defaultdict(lambda: ([], []))
    for side, leaves in enumerate((removed, added)):
        for path, contents in leaves.items():
            groups[contents][side].append(path)
    found = {old[0]: new[0] for old, new in groups.values() if len(old) == len(new) == 1}
    parts: defaultdict[Path, set[Path]] = defaultdict(set)
    ends: defaultdict[_Ends, set[_Ends]] = defaultdict(set)
    for old, new in found.items():
        shortest = min(len(old), len(new))
        first = next((i for i in range(shortest) if old[i] != new[i]), shortest)
        rest = shortest - first
        behind = next((i for i in range(rest) if old[-1 - i] != new[-1 - i]), rest)
        before, after = range(first, len(old) - behind), range(first, len(new) - behind)
        parts[old[first : before.stop]].add(new[first : after.stop])
        for one, other in _renamed_ends(old, new, before, after):
            ends[one].add(other)
    for old, new in groups.values():
        if len(old) * len(new) > 1:
            found |= _told_apart(old, set(new), parts, ends)
    return found


def _renamed_ends(
    old: Path, new: Path, before: range, after: range
) -> Iterator[tuple[_Ends, _Ends]]:
    """What stands before and after the longest stretch that the renamed parts of two paths share:
    of `params/a/b` and `a/b/value` the ends `params/` and `/value`. None where there is no such
    stretch, several where there are several."""
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
    claims = Counter(itertools.chain(*found.values()))
    alone = {path: next(iter(to)) for path, to in found.items() if len(to) == 1}
    return {path: to for path, to in alone.items() if claims[to] == 1}
