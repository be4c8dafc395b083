"""A tree for the terminal: each level with its bytes. Levels with one child, and siblings that
are alike, take one line. Pure."""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.tree import format_key
from reshard.units import format_runs

Document = Mapping[str, Any]
NUMBERED = re.compile(r"(.*?)(?<!\d)(0|[1-9][0-9]*)", re.DOTALL)
# Equal for leaves that are alike.
_KIND = ("type", "shape", "dtype", "chunk_shape", "mesh", "spec", "device", "key_impl", "value")
# The keys of a leaf below a level, its kind, and the leaf.
_Below = tuple[tuple[str, ...], str, Document]


class Row(NamedTuple):
    """A line of an outline: `count` leaves below one key or several (`layers/{0..31}`). `leaf` is
    one of them, unless the line is a level."""

    depth: int
    name: str
    count: int
    nbytes: int
    leaf: Document | None


def outline(leaves: Sequence[Document]) -> list[Row]:
    """The lines for the leaves of `reshard inspect --json`, in the order of their tree."""
    kinds = [repr([leaf.get(name) for name in _KIND]) for leaf in leaves]
    keys = [tuple(map(format_key, leaf["keys"])) or (".",) for leaf in leaves]
    return list(_rows(list(zip(keys, kinds, leaves, strict=True)), 0, 1))


def _rows(leaves: Sequence[_Below], depth: int, times: int) -> Iterator[Row]:
    """The lines of a level that occurs `times` times."""
    children = collections.defaultdict[Any, list[_Below]](list)
    for keys, kind, leaf in leaves:
        children[keys[0], len(keys) > 1].append((keys[1:], kind, leaf))
    groups: dict[Any, list[tuple[int, str, list[_Below]]]] = {}
    for (name, is_level), inside in children.items():
        match = NUMBERED.fullmatch(name)
        alike = tuple((keys, kind) for keys, kind, _ in inside)
        group = (match[1], alike) if match else (name, is_level)
        groups.setdefault(group, []).append((int(match[2]) if match else 0, name, inside))
    for group, members in groups.items():
        _, name, inside = members[0]
        if len(members) > 1:
            name = folded_name(group[0], sorted(number for number, *_ in members))
        often = times * len(members)
        below = list(_rows(inside, depth + 1, often)) if inside[0][0] else []
        if sum(row.depth == depth + 1 for row in below) == 1:
            below = [row._replace(depth=row.depth - 1) for row in below]
            yield below[0]._replace(name=f"{name}/{below[0].name}")
            yield from below[1:]
        else:
            nbytes = often * sum(leaf.get("bytes") or 0 for *_, leaf in inside)
            yield Row(depth, name, often * len(inside), nbytes, None if below else inside[0][2])
            yield from below


def folded_name(name: str, numbers: Sequence[int]) -> str:
    """The common name of siblings with ascending numbers: `layer_{0..49}`."""
    return f"{name}{{{format_runs(numbers, to='..')}}}"
