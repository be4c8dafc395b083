"""A tree as a terminal shows it: each level with its bytes, levels of one child and siblings that
are alike in one line each. Pure."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.tree import format_key
from reshard.units import format_runs

Document = Mapping[str, Any]
_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)
# What leaves of one kind have in common.
_KIND = ("type", "shape", "dtype", "chunk_shape", "mesh", "spec", "device", "key_impl", "value")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of an outline.

    Attributes:
      depth: how far it is indented.
      name: its key, or several: `layers/{0..31}`.
      count: how many leaves it stands for.
      nbytes: their bytes.
      leaf: one of them, if it is no level.
    """

    depth: int
    name: str
    count: int
    nbytes: int
    leaf: Document | None


@dataclasses.dataclass(frozen=True)
class _Node:
    name: str
    children: tuple["_Node", ...]
    leaf: Document | None
    count: int
    nbytes: int

    def alike(self) -> Any:
        """What it is apart from its name."""
        if self.leaf is not None:
            return repr([self.leaf.get(name) for name in _KIND]), self.count
        return tuple((child.name, child.alike()) for child in self.children)


def outline(leaves: Sequence[Document]) -> list[Row]:
    """The lines for leaves, as `reshard inspect --json` has them, in the order of their tree."""
    top = [(tuple(map(format_key, leaf["keys"])) or (".",), leaf) for leaf in leaves]
    return list(_rows(_nodes(top), 0))


def _nodes(leaves: Sequence[tuple[tuple[str, ...], Document]]) -> tuple[_Node, ...]:
    """The level of these leaves, by their keys from there on; what is alike in one node."""
    below: dict[tuple[str, bool], list[tuple[tuple[str, ...], Document]]] = {}
    for keys, leaf in leaves:
        below.setdefault((keys[0], len(keys) > 1), []).append((keys[1:], leaf))
    nodes = []
    for (name, is_level), inside in below.items():
        if is_level:
            nodes.append(_level(name, _nodes(inside)))
        else:
            leaf = inside[0][1]
            nodes.append(_Node(name, (), leaf, 1, leaf.get("bytes") or 0))
    return tuple(_folded(nodes))


def _level(name: str, children: tuple[_Node, ...]) -> _Node:
    if len(children) == 1:
        return dataclasses.replace(children[0], name=f"{name}/{children[0].name}")
    count, nbytes = sum(c.count for c in children), sum(c.nbytes for c in children)
    return _Node(name, children, None, count, nbytes)


def _folded(nodes: Sequence[_Node]) -> Iterator[_Node]:
    """The nodes, with those that differ in a number at the end of their name alone as one."""
    groups: dict[Any, list[tuple[int, _Node]]] = {}
    for place, node in enumerate(nodes):
        key, _, rest = node.name.partition("/")
        match = _NUMBERED.fullmatch(key)
        plain = match is None or str(int(match[2])) != match[2]
        group = place if match is None or plain else (match[1], rest, node.alike())
        number = 0 if match is None or plain else int(match[2])
        groups.setdefault(group, []).append((number, node))
    for members in groups.values():
        first = members[0][1]
        if len(members) > 1:
            key, slash, rest = first.name.partition("/")
            prefix = key.rstrip("0123456789")
            numbers = format_runs(sorted(n for n, _ in members), to="..")
            name = f"{prefix}{{{numbers}}}{slash}{rest}"
            yield _times(dataclasses.replace(first, name=name), len(members))
        else:
            yield first


def _times(node: _Node, times: int) -> _Node:
    children = tuple(_times(child, times) for child in node.children)
    count, nbytes = node.count * times, node.nbytes * times
    return dataclasses.replace(node, children=children, count=count, nbytes=nbytes)


def _rows(nodes: Sequence[_Node], depth: int) -> Iterator[Row]:
    for node in nodes:
        yield Row(depth, node.name, node.count, node.nbytes, node.leaf)
        yield from _rows(node.children, depth + 1)
