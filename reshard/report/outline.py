"""A tree for the terminal: each level with its bytes. Levels with one child, and siblings that
are alike, take one line. Pure."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.tree import format_key
from reshard.units import format_runs

Document = Mapping[str, Any]
NUMBERED = re.compile(r"(.*?)(?<!\d)(0|[1-9][0-9]*)", re.DOTALL)
# Equal for leaves that are alike.
_KIND = ("type", "shape", "dtype", "chunk_shape", "mesh", "spec", "device", "key_impl", "value")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of an outline: `count` leaves below one key or several (`layers/{0..31}`). `leaf` is
    one of them, unless the line is a level."""

    depth: int
    name: str
    count: int
    nbytes: int
    leaf: Document | None
    children: tuple["Row", ...] = dataclasses.field(default=(), compare=False)

    def alike(self) -> Any:
        """Equal for rows that differ in their names alone."""
        if self.leaf is not None:
            return repr([self.leaf.get(name) for name in _KIND]), self.count
        return tuple((child.name, child.alike()) for child in self.children)


def outline(leaves: Sequence[Document]) -> list[Row]:
    """The lines for the leaves of `reshard inspect --json`, in the order of their tree."""
    top = [(tuple(map(format_key, leaf["keys"])) or (".",), leaf) for leaf in leaves]
    return list(_rows(_nodes(top), 0))


def _nodes(leaves: Sequence[tuple[tuple[str, ...], Document]]) -> tuple[Row, ...]:
    """The rows of a level, from its leaves with their keys below it."""
    below: dict[tuple[str, bool], list[tuple[tuple[str, ...], Document]]] = {}
    for keys, leaf in leaves:
        below.setdefault((keys[0], len(keys) > 1), []).append((keys[1:], leaf))
    nodes = []
    for (name, is_level), inside in below.items():
        children = _nodes(inside) if is_level else ()
        if len(children) == 1:
            node = dataclasses.replace(children[0], name=f"{name}/{children[0].name}")
        elif is_level:
            count, nbytes = sum(c.count for c in children), sum(c.nbytes for c in children)
            node = Row(0, name, count, nbytes, None, children)
        else:
            leaf = inside[0][1]
            node = Row(0, name, 1, leaf.get("bytes") or 0, leaf)
        nodes.append(node)
    return tuple(_folded(nodes))


def _folded(nodes: Sequence[Row]) -> Iterator[Row]:
    """The rows, with one row for those that differ only in the number at the end of their names."""
    groups: dict[Any, list[tuple[int, Row]]] = {}
    for place, node in enumerate(nodes):
        key, slash, rest = node.name.partition("/")
        match = NUMBERED.fullmatch(key)
        if match is None:
            groups[place] = [(0, node)]
        else:
            group = match[1], slash + rest, node.alike()
            groups.setdefault(group, []).append((int(match[2]), node))
    for group, members in groups.items():
        node = members[0][1]
        if len(members) > 1:
            name = folded_name(group[0], sorted(number for number, _ in members)) + group[1]
            node = _times(dataclasses.replace(node, name=name), len(members))
        yield node


def folded_name(name: str, numbers: Sequence[int]) -> str:
    """The common name of siblings with ascending numbers: `layer_{0..49}`."""
    return f"{name}{{{format_runs(numbers, to='..')}}}"


def _times(node: Row, times: int) -> Row:
    children = tuple(_times(child, times) for child in node.children)
    count, nbytes = node.count * times, node.nbytes * times
    return dataclasses.replace(node, children=children, count=count, nbytes=nbytes)


def _rows(nodes: Sequence[Row], depth: int) -> Iterator[Row]:
    for node in nodes:
        yield dataclasses.replace(node, depth=depth)
        yield from _rows(node.children, depth + 1)
