"""A whole conversion as the text of a map file with few rules.

One rule is for rows of the map that differ only in numbers, for all leaves of a module, or for
numbered modules:

    params/layer_0/attn/q -> layers/0/attn/q
    params/layer_0/attn/k -> layers/0/attn/k      ^params/layer_(\\d+)/attn/  ->  layers/\\1/attn/
    params/layer_1/attn/q -> layers/1/attn/q
    params/layer_1/attn/k -> layers/1/attn/k

A regex must match only the paths of its rule, on either side. This is checked against all paths
that exist before or after any rule.
"""

import collections
import dataclasses
import json
import re
import tomllib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays import operations as ops
from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Operation
from reshard.convert.leafmap import Filled, LeafMap, Row, Source
from reshard.convert.map_rules import Group, Template, apply_map, inverse, whole_path
from reshard.convert.mapfile import TODO, is_open, map_of
from reshard.errors import ReshardError, TreeMismatchError
from reshard.tree import Path, format_glob, format_path, glob_text, named_by

_HEADER = """\
# The map between the leaves of two checkpoints. A rule is for one leaf, for all leaves of a
# module (`^a/b/`), or for leaves that differ only in numbers (`(\\d+)`). The rules are applied in
# order. You may edit them: `from` is a regex for printed paths, and `to` a replacement, as in
# `re.sub`. The map also works in the opposite direction, if `from` has no other wildcards and the
# new paths contain all of its numbers. With optimizer state or a step, name the model there, too.
# If the source was renamed, selected or cast before, the map does not include that.
"""
_ORIGINS = """\
# The word behind `[[rule]]` shows how it was found: by equal paths after the standard conversions
# (path), or by the order of modules of one class (structure).
"""
# Characters of a list in one line.
_WIDTH = 80
# Candidates of an open leaf that the comment of its rule lists.
MAX_CANDIDATES = 8
_JOINS = ops.Concat | ops.Stack | ops.Equal
_PARTS = ops.Split | ops.Unstack
_DIGITS = re.compile(r"(\d+)")
# The keys of a rule's operation and their values, without paths.
_Setting = dict[str, Any]
# A text with its numbers at odd places; None in the place of a number that counts pieces.
_Parted = tuple[str | None, ...]


class _Mark(str):
    """A text that stands for an open leaf."""


class _Block(NamedTuple):
    """Rows that one rule describes: their places among all rows, and their paths before and after.
    If one path stands for several pieces, its group 0 is the number of the piece."""

    rows: tuple[int, ...]
    inputs: tuple[Template, ...]
    outputs: tuple[Template, ...]


def write_map(
    found: LeafMap,
    initial: Sequence[str] = (),
    to: str | None = None,
    own: Collection[Path] = (),
    others: Collection[Path] = (),
) -> str:
    """The text of a map file. `apply_map` makes the same map of it, and `inverse` its inverse. No
    rule matches more than its own leaves.

    Args:
      found: the map.
      initial, own: globs and paths of target leaves that keep the model's own initial value.
      to: the API that it converts to, `"nnx"` or `"linen"`.
      others: leaves of either side that are not in the map.

    Raises:
      TreeMismatchError: a leaf is made of values in memory.
    """
    rows = [*(Row((path,), ()) for path in found.dropped), *found.sequence()]
    settings = _settings(rows, {**dict.fromkeys(found.dropped, ()), **found.sources()})
    head = [_HEADER + (_ORIGINS if any(row.origin != "map" for row in rows) else "")]
    ever = {*found.sources(), *found.values, *found.must_be_zero, *own, *others}
    text = ""
    for grouped in (True, False):
        if grouped:
            blocks = _blocks(rows, settings, ever)
            kept = _blocks([Row((path,), ()) for path in own], [{}] * len(own), found.values)
            globs = [block.inputs[0].glob for block in kept]
        else:
            blocks = [_block([_line(row, place, False)]) for place, row in enumerate(rows)]
            globs = list(map(format_glob, own))
        top = {} if to is None else {"to": to}
        top |= {"init": [*initial, *globs]} if initial or globs else {}
        rules = [_rule_of(rows[b.rows[0]], settings[b.rows[0]], b) for b in blocks]
        text = "\n".join([*head, *filter(None, [_lines(top)]), *rules, *_fills(found)])
        if _says(text, found, own):
            break
    return text


def _fills(found: LeafMap) -> list[str]:
    """The rules for leaves that a rule has filled, and for those that must hold a constant."""
    rules: dict[tuple[str, Filled], list[str]] = {}
    for path, value in found.values.items():
        if isinstance(value, Filled) and value.fill is not None:
            rules.setdefault(("to", value), []).append(format_path(path))
    for path, value in found.must_be_zero.items():
        if value.fill is not None:
            rules.setdefault(("from", value), []).append(whole_path(format_path(path)).text)
    return [
        _rule({key: paths, "fill": {"value": v.fill, "shape": v.shape, "dtype": v.dtype.name}})
        for (key, v), paths in rules.items()
    ]


def draft_map(
    decided: LeafMap,
    to: str,
    own: Collection[Path],
    open_rows: Sequence[Row],
    missing: Collection[Path],
) -> str:
    """The text of a map file for the decided leaves, as `write_map` has it, with a `TODO` for each
    open leaf: for the source leaves of `open_rows`, whose outputs are the target leaves that they
    may become, and for `missing` target leaves."""
    others = {*missing, *(path for row in open_rows for path in (*row.inputs, *row.outputs))}
    resets = [_Mark(f"{TODO} {format_glob(path)}") for path in missing]
    rules, mark = [write_map(decided, resets, to, own, others)], _Mark(TODO)
    for row in open_rows:
        texts = [str(Template((format_path(path),))) for path in row.outputs]
        near = [*map(toml_text, texts[:MAX_CANDIDATES]), *["..."][: len(texts) > MAX_CANDIDATES]]
        rule: _Setting = {"from": whole_path(format_path(row.inputs[0])).text}
        if isinstance(row.operation, ops.Unstack):
            rule["unstack"] = {"axis": row.operation.axis, "into": [mark] * len(texts)}
            comment = ", ".join(near)
        else:
            rule["to"] = mark
            comment = " or ".join(near) or "nothing fits: `drop = true` leaves it out"
        rules.append(f"{_rule(rule)[:-1]}  # {comment}\n")
    return "\n".join(rules)


def _says(text: str, found: LeafMap, own: Collection[Path]) -> bool:
    """Whether a text describes a map, in both directions if both exist."""
    constant = {path: value for path, value in found.must_be_zero.items() if value.fill is not None}
    whole = LeafMap(
        {p: v for p, v in found.values.items() if not isinstance(v, Filled) or v.fill is not None},
        {},
        found.dropped,
        constant,
    )
    zeros = {path: value.shape for path, value in found.must_be_zero.items()}
    stay = {path: Source(path, shape) for path, shape in zeros.items() if path not in constant}
    leaves = {**whole.sources(), **zeros, **dict.fromkeys(found.dropped, ())}
    try:
        expected = whole.inverse()
    except TreeMismatchError:  # an operation has none
        expected = None
    try:
        rules = map_of(tomllib.loads(text), "the map")
        forth = apply_map(rules, leaves).map
        if forth.values != whole.values | stay or forth.must_be_zero != constant:
            return False
        if {*forth.dropped} != {*found.dropped} or expected is None:
            return expected is None
        undone = inverse(rules)
        back = apply_map(undone, whole.shapes | dict.fromkeys(own, ())).map
    except ReshardError:
        return False
    texts = {glob_text(path): path for path in leaves}
    named = {texts[text] for glob in undone.initial for text in named_by(texts, glob)}
    return (named, back.values, {*back.dropped}) == ({*found.dropped}, expected.values, {*own})


def _rule_of(row: Row, setting: _Setting, block: _Block) -> str:
    """The rule for a block of rows that are like this row."""
    sources = [template.pattern().text for template in block.inputs]
    paths = [str(template.replacement(block.inputs[0])) for template in block.outputs]
    numbers, joins = block.inputs[0].groups, isinstance(row.operation, _JOINS)
    rule: _Setting = {"from": sources if joins and 0 not in numbers else sources[0]}
    if not paths:
        rule["drop"] = True
    for key, value in setting.items():
        if joins and 0 in numbers:
            value = value | {"by": numbers.index(0) + 1}
        if isinstance(row.operation, _PARTS):
            value = value | {"into": paths[0] if 0 in block.outputs[0].groups else paths}
        rule[key] = value
    if isinstance(row.operation, ops.Copies):
        rule["to"] = paths
    elif paths and not isinstance(row.operation, _PARTS):
        rule["to"] = paths[0]
    return _rule(rule, row.origin)


def rules_of(rows: Sequence[Row], leaves: Mapping[Path, Shape]) -> list[str]:
    """The rules for rows on different leaves of these shapes."""
    settings = _settings(rows, leaves)
    blocks = _blocks(rows, settings, leaves)
    return [_rule_of(rows[b.rows[0]], settings[b.rows[0]], b) for b in blocks]


def renaming_rules(pairs: Iterable[tuple[Path, Path, bool]], leaves: Collection[Path]) -> list[str]:
    """The bodies of rules that rename some leaves or modules: the path before, the path after, and
    whether they are paths of leaves."""
    groups: dict[Hashable, list[_Line]] = {}
    ever = {*leaves}
    for place, (before, after, whole) in enumerate(dict.fromkeys(pairs)):
        line = _Line((place,), (_parted(before, not whole), _parted(after, not whole)))
        groups.setdefault(line.letters, []).append(line)
        ever.add(after if whole else (*after, "_"))
    known = _known(ever)
    blocks = [block for lines in groups.values() for block in _folded(lines, known, shift=True)]
    return [
        _lines({"from": one.pattern().text, "to": str(other.replacement(one))}).rstrip()
        for _, (one,), (other,) in sorted(blocks, key=lambda block: min(block.rows))
    ]


def unstacking_rules(
    pairs: Iterable[tuple[Path, Path]], leaves: Collection[Path], axes: Sequence[int]
) -> list[str]:
    """Rules that unstack modules: pairs of a module's path and the beginning of its layers' paths.
    They take the first of several possible axes."""
    rules = []
    for body in renaming_rules(((*pair, False) for pair in pairs), leaves):
        rule = tomllib.loads(body)
        groups = re.compile(rule["from"]).groups
        into = rule["to"].removesuffix("/") + rf"{{}}/\{groups + 1}"
        text = _rule({"from": rule["from"] + "(.*)$", "unstack": {"axis": axes[0], "into": into}})
        others = " or ".join(map(str, axes[1:]))  # the shapes do not decide
        rules.append(f"{text[:-1]}  # or axis = {others}\n" if others else text)
    return rules


def _settings(rows: Sequence[Row], leaves: Mapping[Path, Shape]) -> list[_Setting]:
    """The settings of rows that are carried out in order, on leaves of these shapes."""
    shapes, settings = dict(leaves), []
    for row in rows:
        inputs = [shapes.pop(path) for path in row.inputs]
        made = inputs if row.operation is None else row.operation.shapes(inputs)
        shapes.update(zip(row.outputs, made, strict=False))  # dropped leaves have no outputs
        if isinstance(row.operation, ops.Constant):
            names = " and ".join(map(format_path, row.outputs))
            raise TreeMismatchError(f"no map can hold the values of {names}")
        settings.append({} if row.operation is None else _setting(row.operation, inputs))
    return settings


def _setting(operation: Operation, inputs: Sequence[Shape]) -> _Setting:
    """The setting of an operation on leaves of these shapes."""
    match operation:
        case ops.Copies():
            return {}
        case ops.Transpose(axes=axes):
            return {"transpose": axes}
        case ops.Reshape(shape=shape):
            return {"reshape": {"from": inputs[0], "to": shape}}
        case ops.Crop(widths=widths):
            return {"crop": {"widths": widths}}
        case ops.Unstack(axis=axis):
            return {"unstack": {"axis": axis}}
        case ops.Concat(axis=axis):
            return {"concat": {"axis": axis, "sizes": [shape[axis] for shape in inputs]}}
        case ops.Equal():
            return {"equal": True}
        case ops.Scale(constant=factor, rounds=rounds):
            return {"scale": {"by": factor, "rounds": True} if rounds else factor}
        case ops.Add(constant=addend):
            return {"add": addend}
        case ops.Apply(name=name, shape=shape, dtype=dtype):
            fields = {} if shape is None else {"shape": shape}
            fields |= {} if dtype is None else {"dtype": dtype.name}
            return {"apply": {"function": name, **fields} if fields else name}
    key = type(operation).__name__.lower()
    fields = dataclasses.asdict(operation)
    key = "deinterleave" if fields.pop("undo", False) else key
    plain = [("block", None), ("names", ())]  # the defaults
    return {key: {k: v for k, v in fields.items() if (k, v) not in plain}}


def _rule(table: _Setting, origin: str = "map") -> str:
    """A rule as TOML."""
    return ("[[rule]]" if origin == "map" else f"[[rule]]  # {origin}") + "\n" + _lines(table)


def _lines(table: _Setting) -> str:
    """Keys and their values as TOML."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())


def _toml(value: Any) -> str:
    """A value as TOML. A long list of texts has a line for each."""
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, Sequence):
        entries = list(map(_toml, value))
        if sum(map(len, entries)) > _WIDTH and isinstance(value[0], str):
            return "".join(["[\n", *(f"    {entry},\n" for entry in entries), "]"])
        return f"[{', '.join(entries)}]"
    return "true" if value is True else repr(value)


def toml_text(text: str) -> str:
    """A text as TOML, unescaped if possible. The `TODO` of a leaf's name is escaped."""
    mark = isinstance(text, _Mark)
    if text.isprintable() and "'''" not in text and (mark or not is_open(f"'{text}")):
        return f"'''{text}'''" if "'" in text else f"'{text}'"
    escaped = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return escaped if mark else escaped.replace(TODO, r"\u0054ODO")


class _Line(NamedTuple):
    """A row, or all rows of a module: their places among all rows, the paths before and after, how
    many of these are before, and the numbers of paths that they stand for on each side."""

    rows: tuple[int, ...]
    texts: tuple[_Parted, ...]
    before: int = 1
    counts: tuple[int, int] = (1, 1)

    @property
    def letters(self) -> Hashable:
        """The line without its numbers."""
        nones = tuple(place for text in self.texts for place, n in enumerate(text) if n is None)
        return (self.before, nones, *(text[::2] for text in self.texts))


def _blocks(
    rows: Sequence[Row], settings: Sequence[_Setting], others: Collection[Path]
) -> list[_Block]:
    """Rows as few blocks, in an order in which they can be carried out. `others`: paths of leaves,
    on either side, that are in no row. A row without outputs drops a leaf."""
    ever = {*others, *(path for row in rows for path in (*row.inputs, *row.outputs))}
    levels: list[int] = []  # rows of one level share no path
    at: dict[Path, int] = {}
    kinds: list[Hashable] = []
    for place, row in enumerate(rows):
        paths = (*row.inputs, *row.outputs)
        levels.append(1 + max(at.get(path, 0) for path in paths))
        at |= dict.fromkeys(paths, levels[-1])
        # A regex rule that changes no path is refused, so such a row has its own rule.
        still = row.operation is None and row.inputs == row.outputs
        copies = isinstance(row.operation, ops.Copies)
        kind = row.origin, levels[-1], repr(settings[place]), copies, place if still else None
        kinds.append(kind)
    places = range(len(rows))
    lines = [*_modules(rows, kinds, ever)]
    lines += [_line(rows[place], place, counted) for counted in (True, False) for place in places]
    groups: dict[Hashable, list[_Line]] = {}
    for line in dict.fromkeys(lines):  # many rows have no pieces that can be counted
        groups.setdefault((line.letters, kinds[line.rows[0]]), []).append(line)
    known, left, found = _known(ever), {*places}, list[_Block]()
    for alike in groups.values():
        rest = [line for line in alike if left.issuperset(line.rows)]
        blocks = _folded(rest, known) if rest else []
        left.difference_update(*(block.rows for block in blocks))
        found += blocks
    return sorted(found, key=lambda block: (levels[block.rows[0]], min(block.rows)))


def _modules(rows: Sequence[Row], kinds: Sequence[Hashable], ever: Collection[Path]) -> list[_Line]:
    """Modules whose leaves all keep their relative paths in another module, outer modules first."""
    below = collections.Counter(path[:end] for path in ever for end in range(1, len(path)))
    members: dict[tuple[Path, Path, Hashable], list[int]] = {}
    for place, row in enumerate(rows):
        if row.operation is None and row.outputs:  # dropped leaves have rules of their own
            before, after = row.inputs[0], row.outputs[0]
            while before[1:] and after[1:] and before[-1] == after[-1]:
                before, after = before[:-1], after[:-1]
                members.setdefault((before, after, kinds[place]), []).append(place)
    return [
        _Line(tuple(inside), (_parted(before, True), _parted(after, True)))
        for (before, after, _), inside in sorted(members.items(), key=lambda x: len(x[0][0]))
        if 1 < len(inside) == below[before] == below[after]
    ]


def _line(row: Row, place: int, counted: bool) -> _Line:
    """A row. If `counted`, the paths of numbered pieces are one text."""
    before, after = (tuple(map(_parted, side)) for side in (row.inputs, row.outputs))
    if counted and isinstance(row.operation, ops.Concat | ops.Stack):
        before = _counted(before)
    if counted and isinstance(row.operation, _PARTS):
        after = _counted(after)
    return _Line((place,), before + after, len(before), (len(row.inputs), len(row.outputs)))


def _counted(texts: tuple[_Parted, ...]) -> tuple[_Parted, ...]:
    """Texts that differ only in one number, which counts from 0, as one text."""
    if len({text[::2] for text in texts}) > 1:
        return texts
    columns = list(zip(*texts, strict=True))
    differ = [place for place, column in enumerate(columns) if len({*column}) > 1]
    if [columns[place] for place in differ] != [tuple(map(str, range(len(texts))))]:
        return texts
    return ((*texts[0][: differ[0]], None, *texts[0][differ[0] + 1 :]),)


def _parted(path: Path, module: bool = False) -> _Parted:
    return tuple(_DIGITS.split(format_path(path) + "/" * module))


def _known(ever: Collection[Path]) -> dict[Hashable, list[str]]:
    """All paths before and after any rule, and the modules that they are in, by their letters."""
    known: dict[Hashable, list[str]] = {}
    modules = {path[:end] for path in ever for end in range(1, len(path))}
    for module, paths in ((False, ever), (True, modules)):
        for path in paths:
            text = format_path(path) + "/" * module
            known.setdefault(_parted(path, module)[::2], []).append(text)
    return known


def _folded(
    lines: Sequence[_Line], known: Mapping[Hashable, Sequence[str]], shift: bool = False
) -> list[_Block]:
    """Lines that differ only in numbers, as few blocks; none for a line that has no regex of its
    own. Places with the same numbers share a group. With `shift`, so do places whose numbers differ
    by a constant."""
    varying: dict[tuple[int, int], tuple[Any, ...]] = {}
    for at, texts in enumerate(zip(*(line.texts for line in lines), strict=True)):
        columns = enumerate(zip(*texts, strict=True))
        varying |= {(at, place): column for place, column in columns if len({*column}) > 1}
    first: dict[Any, tuple[int, int]] = {}
    groups: dict[tuple[int, int], Group] = {}
    for place, column in varying.items():
        plain = shift and all(str(int(number)) == number for number in column)
        start = int(column[0]) if plain else 0
        steps = tuple(int(number) - start for number in column) if plain else column
        group, base = first.setdefault(steps, (len(first) + 1, start))
        groups[place] = Group(group, start - base)
    block = _block(lines, groups)
    if _fits(lines, block, known):
        return [block]
    if not varying:
        return []
    # Split by a number that is not on both sides, or else by the one with the fewest values.
    texts_of: dict[Any, set[int]] = {}
    for (at, _), column in varying.items():
        texts_of.setdefault(column, set()).add(at)
    every = len(lines[0].texts)
    column = min(texts_of, key=lambda column: (len(texts_of[column]) == every, len({*column})))
    parts: dict[str | None, list[_Line]] = {}
    for line, number in zip(lines, column, strict=True):
        parts.setdefault(number, []).append(line)
    return [block for part in parts.values() for block in _folded(part, known, shift)]


def _block(lines: Sequence[_Line], groups: Mapping[tuple[int, int], Group] = {}) -> _Block:
    """Lines as a block, with groups for the numbers at some places."""
    templates = tuple(
        Template.of(
            groups.get((at, place), Group(0) if piece is None else piece)
            for place, piece in enumerate(text)
        )
        for at, text in enumerate(lines[0].texts)
    )
    rows, before = tuple(place for line in lines for place in line.rows), lines[0].before
    return _Block(rows, templates[:before], templates[before:])


def _fits(lines: Sequence[_Line], block: _Block, known: Mapping[Hashable, Sequence[str]]) -> bool:
    """Whether all paths of a block have the same groups, in one order on each side, and its regexes
    match only the paths of its lines."""
    groups = {group for side in block[1:] for template in side for group in template.groups}
    for side, templates in enumerate(block[1:] if groups else ()):
        orders = {tuple(filter(None, template.groups)) for template in templates}
        if len(orders) > 1 or any({*order} != groups - {0} for order in orders):
            return False
        texts = lines[0].texts[lines[0].before :] if side else lines[0].texts[: lines[0].before]
        matches = 0
        for template, text in zip(templates, texts, strict=True):
            matches += sum(map(bool, map(template.pattern().regex.search, known[text[::2]])))
        if matches != sum(line.counts[side] for line in lines):
            return False
    return True
