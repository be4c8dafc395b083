"""Rows of a map that one rule says: those that differ in numbers alone, those of all leaves of a
module, and those of numbered modules. Pure.

    params/layer_0/attn/q -> layers/0/attn/q
    params/layer_0/attn/k -> layers/0/attn/k      ^params/layer_(\\d+)/attn/  ->  layers/\\1/attn/
    params/layer_1/attn/q -> layers/1/attn/q
    params/layer_1/attn/k -> layers/1/attn/k

A regex must not match what its rule is not for, on either side: it is written only where these are
all that it matches of the paths that there ever are.
"""

import collections
import heapq
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.operations import Concat, Split, Stack, Unstack
from reshard.convert.leafmap import Row
from reshard.convert.path_template import PathTemplate
from reshard.tree import Path, format_path

_NUMBER = re.compile(r"(\d+)")
# A text with its numbers at odd places; None where they count the pieces of a whole.
Parted = tuple[str | None, ...]


class Block(NamedTuple):
    """Rows that one rule says: their places among all rows, and their paths before and after. If
    the only path of several pieces has the group 0, that is the number of the piece."""

    rows: tuple[int, ...]
    inputs: tuple[PathTemplate, ...]
    outputs: tuple[PathTemplate, ...]


class _Line(NamedTuple):
    """A row, or all rows of a module.

    Attributes:
      rows: their places.
      texts: the paths before and after.
      inputs: how many of these are before.
      pieces: how many paths each of the texts is.
      whole: whether they are paths of leaves.
    """

    rows: tuple[int, ...]
    texts: tuple[Parted, ...]
    inputs: int
    pieces: tuple[int, ...]
    whole: bool = True


def blocks_of(
    rows: Sequence[Row], settings: Sequence[Hashable], others: Collection[Path]
) -> list[Block]:
    """Rows as few blocks, in an order in which they can be carried out, one after another.

    Args:
      rows: the rows, each on what earlier ones have left; one without outputs drops a leaf.
      settings: what else a rule says of each row, but its paths.
      others: paths of leaves, on either side, that no row is for.
    """
    ever = {*others, *(path for row in rows for path in (*row.inputs, *row.outputs))}
    texts = _Texts(ever)
    levels = _levels(rows)
    kinds = [
        (row.origin, levels[place], setting)
        for place, (row, setting) in enumerate(zip(rows, settings, strict=True))
    ]
    # A regex rule that changes nothing is refused.
    still = [row.operation is None and row.inputs == row.outputs for row in rows]
    left = {place: None for place in range(len(rows)) if not still[place]}
    modules = _modules(rows, left, kinds, ever)
    found: list[Block] = []

    def take(blocks: Sequence[Block]) -> None:
        found.extend(blocks)
        for block in blocks:
            for place in block.rows:
                left.pop(place, None)

    for lines in modules:
        free = [line for line in lines if line.rows[0] in left]
        folded = texts.folded(free)
        take(folded or ([_literal(free[0])] if len(free) == 1 else []))
    leaves: dict[Hashable, list[_Line]] = {}
    for place in left:
        line = _line(rows[place], place)
        leaves.setdefault((_letters(line), line.inputs, kinds[place]), []).append(line)
    for lines in leaves.values():
        take(texts.folded(lines))
    for lines in modules:
        take([_literal(line) for line in lines if left.keys() >= {*line.rows}])
    alone = [place for place in range(len(rows)) if place in left or still[place]]
    take([literal_block(place, rows[place]) for place in alone])
    return _in_order(found, rows)


def _levels(rows: Sequence[Row]) -> list[int]:
    """For each row how many follow from one another up to it. Rows of one level share no path."""
    at: dict[Path, int] = {}
    levels: list[int] = []
    for row in rows:
        paths = (*row.inputs, *row.outputs)
        level = 1 + max(at.get(path, 0) for path in paths)
        at |= dict.fromkeys(paths, level)
        levels.append(level)
    return levels


def _modules(
    rows: Sequence[Row], places: Collection[int], kinds: Sequence[Hashable], ever: Collection[Path]
) -> list[list[_Line]]:
    """Modules all of whose leaves get the same relative paths in another one: outer ones first,
    those that differ in numbers alone together."""
    under = collections.Counter(path[:end] for path in ever for end in range(1, len(path)))
    members: dict[tuple[Path, Path, Hashable], list[int]] = {}
    for place in places:
        row = rows[place]
        if row.operation is not None or not row.outputs:  # what is dropped is named by leaf
            continue
        before, after = row.inputs[0], row.outputs[0]
        while before[1:] and after[1:] and before[-1] == after[-1]:
            before, after = before[:-1], after[:-1]
            members.setdefault((before, after, kinds[place]), []).append(place)
    groups: dict[Hashable, list[_Line]] = {}
    for (before, after, kind), inside in sorted(members.items(), key=lambda item: len(item[0][0])):
        if 1 < len(inside) == under[before] == under[after]:
            line = _Line(tuple(inside), (_parted(before), _parted(after)), 1, (1, 1), False)
            groups.setdefault((_letters(line), kind), []).append(line)
    return list(groups.values())


def _line(row: Row, place: int) -> _Line:
    """A row, with the paths of numbered pieces as one."""
    before, after = (list(map(_parted, side)) for side in (row.inputs, row.outputs))
    if isinstance(row.operation, Concat | Stack):
        before = _numbered(before)
    if isinstance(row.operation, Split | Unstack):
        after = _numbered(after)
    counts = [len(row.inputs) // len(before)] * len(before)
    counts += [len(row.outputs) // len(after) for _ in after]
    return _Line((place,), (*before, *after), len(before), tuple(counts))


def literal_block(place: int, row: Row) -> Block:
    """A row as a block of its own."""
    sides = tuple(map(_parted, (*row.inputs, *row.outputs)))
    return _literal(_Line((place,), sides, len(row.inputs), (1,) * len(sides)))


def _numbered(texts: list[Parted]) -> list[Parted]:
    """Texts that count from 0 in one place, and are the same elsewhere, as one."""
    if len({text[::2] for text in texts}) > 1:
        return texts
    columns = list(zip(*texts, strict=True))
    differ = [place for place, column in enumerate(columns) if len({*column}) > 1]
    if [columns[place] for place in differ] != [tuple(map(str, range(len(texts))))]:
        return texts
    return [(*texts[0][: differ[0]], None, *texts[0][differ[0] + 1 :])]


def _parted(path: Path) -> Parted:
    return tuple(_NUMBER.split(format_path(path)))


def _letters(line: _Line) -> Hashable:
    """A line without its numbers."""
    return tuple(
        (text[::2], tuple(place for place, number in enumerate(text) if number is None))
        for text in line.texts
    )


def _literal(line: _Line) -> Block:
    return _block([line], {})


def _block(lines: Sequence[_Line], numbers: Mapping[tuple[int, int], int]) -> Block:
    """Lines as a block, with groups for the numbers at some places."""
    first, sides = lines[0], []
    for at, text in enumerate(first.texts):
        pieces = [
            numbers.get((at, place), 0 if piece is None else piece)
            for place, piece in enumerate(text)
        ]
        sides.append(PathTemplate.of(pieces + ["/"] * (not first.whole), first.whole))
    rows = tuple(place for line in lines for place in line.rows)
    return Block(rows, tuple(sides[: first.inputs]), tuple(sides[first.inputs :]))


class _Texts:
    """The texts of all paths that there ever are, and of the modules that they are in."""

    def __init__(self, ever: Collection[Path]):
        above = {path[:end] for path in ever for end in range(1, len(path))}
        self._known: dict[Hashable, list[Parted]] = {}
        for whole, paths in ((True, ever), (False, above)):
            for path in paths:
                parted = _parted(path)
                self._known.setdefault((whole, parted[::2]), []).append(parted)

    def folded(self, lines: Sequence[_Line]) -> list[Block]:
        """Blocks of lines that differ in numbers alone; there may be lines that are in none."""
        if not lines:
            return []
        varying = {
            (at, place): column
            for at, text in enumerate(lines[0].texts)
            for place in range(1, len(text), 2)
            if len({*(column := tuple(line.texts[at][place] for line in lines))}) > 1
        }
        groups = {
            column: number for number, column in enumerate(dict.fromkeys(varying.values()), 1)
        }
        if groups or any(None in text for text in lines[0].texts):
            numbers = {key: groups[column] for key, column in varying.items()}
            block = _block(lines, numbers)
            sides = (block.inputs, block.outputs)
            if all(_has_all(side, len(groups)) for side in sides) and self._are_all(lines, numbers):
                return [block]
        if not groups:
            return []
        # Numbers that are not on both sides, or else those that there are fewest of, stay.
        common = {*groups}
        for side in range(len(lines[0].texts)):
            common &= {column for (at, _), column in varying.items() if at == side}
        column = min(groups, key=lambda column: (column in common, len({*column})))
        parts: dict[str | None, list[_Line]] = {}
        for line, number in zip(lines, column, strict=True):
            parts.setdefault(number, []).append(line)
        return [block for part in parts.values() for block in self.folded(part)]

    def _are_all(self, lines: Sequence[_Line], numbers: Mapping[tuple[int, int], int]) -> bool:
        """Whether no other texts are as these are, with any numbers at the places of groups."""
        first = lines[0]
        for at, text in enumerate(first.texts):
            groups = {place: group for (side, place), group in numbers.items() if side == at}
            known = self._known[first.whole, text[::2]]
            like = sum(_is_like(other, text, groups) for other in known)
            if like != sum(line.pieces[at] for line in lines):
                return False
        return True


def _is_like(other: Parted, text: Parted, groups: Mapping[int, int]) -> bool:
    """Whether a text has the numbers of another one, but for those of groups and pieces."""
    seen: dict[int, str | None] = {}
    for place in range(1, len(text), 2):
        wanted = text[place]
        if place in groups:
            wanted = seen.setdefault(groups[place], other[place])
        if wanted not in (None, other[place]):
            return False
    return True


def _has_all(sides: Sequence[PathTemplate], count: int) -> bool:
    """Whether each of several paths has all groups, in the same order."""
    orders = {tuple(group for group in side.groups if group) for side in sides}
    return len(orders) <= 1 and all(len(order) == count for order in orders)


def _in_order(blocks: Sequence[Block], rows: Sequence[Row]) -> list[Block]:
    """Blocks in the order of their first rows, as far as each finds what it takes."""
    block_of = {place: number for number, block in enumerate(blocks) for place in block.rows}
    last: dict[Path, int] = {}
    before: dict[int, set[int]] = {number: set() for number in range(len(blocks))}
    for place, row in enumerate(rows):
        for path in (*row.inputs, *row.outputs):
            before[block_of[place]].add(last.get(path, block_of[place]))
            last[path] = block_of[place]
    after: dict[int, list[int]] = {}
    for number, needed in before.items():
        needed.discard(number)
        for other in needed:
            after.setdefault(other, []).append(number)
    ready = [(min(blocks[number].rows), number) for number, needed in before.items() if not needed]
    heapq.heapify(ready)
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(blocks[number])
        for other in after.get(number, ()):
            before[other].discard(number)
            if not before[other]:
                heapq.heappush(ready, (min(blocks[other].rows), other))
    return found
