"""The map file: a conversion as TOML to be read, reviewed, edited and used again.

    to = 'nnx'                                 # or 'linen': for the other it is run backwards
    init = ['rngs/**', '**/dropout/rngs/**']   # globs: the target's own initial value stays

    [[rule]]                                   # every leaf, one rule after another, as `re.sub`
    from = '^params/layer_(\\d+)/'
    to = 'layers/\\1/'

    [[rule]]
    from = '^(.*)/mlp/gating_einsum$'
    unstack = { axis = 0, into = ['\\1/mlp/gate_proj/kernel', '\\1/mlp/up_proj/kernel'] }

So that one map serves several models, a rule with `optional = true` may match nothing; and so may
the globs of `optional = { init = [...], drop = [...] }` above the rules.

A rule has the key `from`, a regex that is searched for in printed paths (for `concat` and `stack`
it may be a list of them), and some of these, which are done in this order:

    drop = true                                         the leaf is left out; nothing else then
    apply = 'package.module:function'                   what it makes, of the same shape and dtype
    apply = { function = '...', shape = [8, 4], dtype = 'bfloat16' }    ... or of these
    transpose = [1, 0]                                  axis i of the result is this axis
    reshape = [8, -1]                                   the same elements in another shape
    reshape = { from = [8, 2, 4], to = [8, 8] }         ... of leaves that have the first
    pad = { widths = [[0, 0], [0, 64]], fill = 0.0 }    more before and after along each axis
    crop = { widths = [[0, 0], [0, 64]] }               less
    split = { axis = 0, sizes = [8, 4], into = [...] }  parts along an axis; without sizes, equal
    unstack = { axis = 0, into = [...] }                the parts of an axis, without it
    concat = { axis = -1, by = 1, order = ['i', 'f'] }  leaves of the same `to`, along an axis
    stack = { axis = 0, by = 1 }                        leaves of the same `to`, along a new axis
    to = 'layers/\\1/'                                  what takes the place of each match

`into` is a replacement for each part, or one for all of them in which `{}` is the position. `by`
says which piece of the whole a leaf is: a group of the regex, or a replacement; what it gives is a
number from 0, or a text of `order`. Where `from` is a list, that is the order of the pieces.
`sizes` of `concat` are what the pieces must have, `names` of `stack` the mesh axes over its axis.

In replacements, braces hold arithmetic: `'stages/{\\1 // 4}/{\\1 % 4}/'`. For uneven groups,
`nest = { sizes = [3, 4, 6, 3], flat = 1 }` gives it the names `outer` and `inner`: the group that a
number is in, and the place there. `nest = { sizes = [3, 4, 6, 3], outer = 1, inner = 2 }` gives it
`flat`.
"""

import collections
import graphlib
import heapq
import os
import re
import tomllib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from reshard.arrays.boxes import MOST_AXES, Shape
from reshard.arrays.dtypes import parse_dtype
from reshard.arrays.operations import (
    Apply,
    Concat,
    Constant,
    Crop,
    Operation,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.convert.leafmap import LeafMap, Row, Source, Value, Zeros
from reshard.convert.map_rules import (
    Divided,
    Gathered,
    Map,
    Nest,
    Reshaped,
    Rule,
    apply_map,
    inverse,
)
from reshard.convert.replacement import (
    PathTemplate,
    Pattern,
    Replacement,
    parse_pattern,
    parse_replacement,
    toml_text,
)
from reshard.convert.user_code import load_function
from reshard.errors import ArgumentError, ReshardError, TreeMismatchError
from reshard.tree import Path, format_glob, format_path, glob_text, named_by, split_path

_EXAMPLE = "\n      ".join(["[[rule]]", r"from = '^params/layer_(\d+)/'", r"to = 'layers/\1/'"])
_REGROUP = ("split", "unstack", "concat", "stack")
_EACH = ("apply", "transpose", "reshape", "pad", "crop")
# Tables and lists inside one another, of which files of rules have six.
_MAX_LEVELS = 50
_LARGEST = 1 << 63
Form = tuple[Callable[[Any], bool], str]


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML document, in which nothing is too deep or too large to be looked at and shown.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no TOML, it is nested too deeply, or a number has more than TOML's 64 bits.
    """
    with open(path, "rb") as file:
        try:
            document = tomllib.load(file)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    level: list[Any] = [document]
    for _ in range(_MAX_LEVELS):
        level = [
            value
            for node in level
            if isinstance(node, dict | list)
            for value in (node.values() if isinstance(node, dict) else node)
        ]
        if any(isinstance(value, int) and not -_LARGEST <= value < _LARGEST for value in level):
            raise ValueError("it has a number of more than 64 bits")
        if not level:
            return document
    raise ValueError("it is nested too deeply")


def read_map(path: str | os.PathLike[str]) -> Map:
    """The rules of a map file.

    Raises:
      ArgumentError: it is no such file; all that is wrong with its rules.
    """
    try:
        document = read_toml(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: it cannot be read", [str(error)], [_EXAMPLE]) from error
    return map_of(document, os.fspath(path))


def map_of(document: dict[str, Any], name: str) -> Map:
    """The rules of the document in a map file of this name.

    Raises:
      ArgumentError: all that is wrong with them.
    """
    problems: list[str] = []
    top = _Table("the file", document, problems)
    initial = top.take("init", _TEXTS) or []
    optional = top.inner("optional")
    may, ignored = [], []
    if optional is not None:
        may, ignored = (optional.take(key, _TEXTS) or [] for key in ("init", "drop"))
        optional.nothing_else()
    for key, globs in (("init", initial), ("optional", [*may, *ignored])):
        for glob in globs:
            try:
                split_path(glob)
            except ArgumentError as error:
                problems.append(f"`{key}`: {error.summary}")
    to = top.take("to", _API)
    tables = top.take("rule", _TABLES) or []
    top.nothing_else()
    rules = [_rule(number, table, problems) for number, table in enumerate(tables, 1)]
    if problems:
        raise ArgumentError(f"{name}: its rules cannot be read", problems, [_EXAMPLE])
    globs = map(tuple, (initial, may, ignored))
    return Map(name, tuple(rules), *globs, to=to)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_API: Form = (lambda value: value in ("nnx", "linen"), "`nnx` or `linen`")
_INT: Form = (_is_int, "a whole number")
_INTS: Form = (_list_of(_is_int), "a list of whole numbers")
_SIZES: Form = (_list_of(lambda v: _is_int(v) and v >= 0), "a list of sizes")
_NUMBER: Form = (lambda value: type(value) in (int, float), "a number")
_WIDTHS: Form = (
    _list_of(lambda value: _SIZES[0](value) and len(value) == 2),
    "a list of two sizes for each axis",
)
_TRUE: Form = (lambda value: value is True, "true")
_TEXT: Form = (_is_text, "a text")
_TEXTS: Form = (_list_of(_is_text), "a list of texts")
_ONE_OR_MORE: Form = (
    lambda v: _is_text(v) or (_TEXTS[0](v) and v != []),
    "a text or a list of them",
)
_GROUP: Form = (lambda v: (_is_int(v) and v >= 0) or _is_text(v), "a group or a text")
_TABLE: Form = (lambda value: isinstance(value, dict), "a table")
_TABLES: Form = (_list_of(_TABLE[0]), "a list of tables")
_NEW_SHAPE: Form = (
    lambda v: _INTS[0](v) and v.count(-1) <= 1 and all(size >= -1 for size in v),
    "a list of sizes, of which one may be -1",
)
_APPLY: Form = (lambda v: _is_text(v) or _TABLE[0](v), "a function, or a table with one")
_RESHAPE: Form = (
    lambda v: _TABLE[0](v) or _NEW_SHAPE[0](v),
    "a list of sizes, of which one may be -1, or a table",
)


class _Table:
    """A table of the file, whose keys are taken one by one; what is wrong is put on a list. Of a
    rule's tables `patterns` are the regexes."""

    def __init__(
        self,
        label: str,
        table: dict[str, Any],
        problems: list[str],
        patterns: Sequence[Pattern] = (),
    ):
        self.label = label
        self.table = dict(table)
        self.problems = problems
        self.patterns = patterns

    def take(self, key: str, form: Form, needed: bool = False) -> Any:
        """The value of a key; None if it has none, or not of this form."""
        value = self.table.pop(key, None)
        fits, words = form
        if value is None:
            if needed:
                self.wrong(f"`{key}` is missing")
        elif not fits(value):
            self.wrong(f"`{key}` is not {words}: {value!r}")
            value = None
        return value

    def inner(self, key: str) -> "_Table | None":
        """The table of a key, if it has one."""
        table = self.take(key, _TABLE)
        label = f"{self.label}: `{key}`"
        return None if table is None else _Table(label, table, self.problems, self.patterns)

    def replacement(
        self, key: str, value: str | int | None, names: Collection[str] = ()
    ) -> Replacement | None:
        """A replacement, or the group of a number."""
        if value is None:
            return None
        text = f"\\g<{value}>" if isinstance(value, int) else value
        try:
            return parse_replacement(text, self.patterns, names)
        except ValueError as error:
            self.wrong(f"`{key}`: {error}")
            return None

    def nothing_else(self) -> None:
        """All keys must have been taken."""
        for key in self.table:
            first = ": it goes before the first rule" if key in ("init", "to") else ""
            self.wrong(f"`{key}` is not known{first}")

    def wrong(self, text: str) -> None:
        self.problems.append(f"{self.label}: {text}")


def _rule(number: int, table: dict[str, Any], problems: list[str]) -> Rule:
    entry = _Table(f"rule {number}", table, problems)
    source = entry.take("from", _ONE_OR_MORE, needed=True)
    texts: list[str] = source if isinstance(source, list) else [] if source is None else [source]
    patterns = []
    for text in texts:
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            entry.wrong(str(error))
    if len(patterns) == len(texts) > 0:
        entry.label = f"rule {number}, {' + '.join(f'`{text}`' for text in texts)}"
    entry.patterns = patterns
    _check_keys(entry, isinstance(source, list))
    drop = entry.take("drop", _TRUE) is True
    optional = entry.take("optional", _TRUE) is True
    nest = _nest(entry)
    names = ["outer", "inner"] if nest and nest.flat else ["flat"] if nest else []
    to = entry.replacement("to", entry.take("to", _TEXT), names)
    each = _each(entry)
    regroup = None
    for kind in ("split", "unstack"):
        regroup = _divided(kind, entry.inner(kind), names) or regroup
    for kind in ("concat", "stack"):
        regroup = _gathered(kind, entry.inner(kind), names) or regroup
    entry.nothing_else()
    return Rule(number, tuple(patterns), to, drop, each, regroup, nest, optional)


def _check_keys(entry: _Table, several: bool) -> None:
    """Says which keys of a rule do not go together, or are missing."""
    keys = set(entry.table)
    regroups = [key for key in _REGROUP if key in keys]
    if "drop" in keys:
        if keys & {"to", "nest", *_EACH, *_REGROUP}:
            entry.wrong("`drop` stands alone")
    elif not keys & {"to", *_EACH, *_REGROUP}:
        entry.wrong("it does nothing; give it `to`, an operation or `drop = true`")
    if len(regroups) > 1:
        entry.wrong(f"{' and '.join(f'`{key}`' for key in regroups)} are for two rules")
    elif regroups and regroups[0] in ("split", "unstack"):
        if "to" in keys:
            entry.wrong("`to` is of no use, as `into` has the new paths")
    elif regroups and "to" not in keys:
        entry.wrong("`to` is missing, the path of the whole")
    if several and not keys & {"concat", "stack"}:
        entry.wrong("several regexes are for `concat` and `stack`")
    for key in regroups:
        by = isinstance(entry.table[key], dict) and "by" in entry.table[key]
        if key in ("concat", "stack") and by == several:
            entry.wrong(
                f"`{key}`: `by` is of no use, as the order of `from` is that of the pieces"
                if several
                else f"`{key}`: `by` is missing, the group that says which piece a leaf is"
            )


def _nest(entry: _Table) -> Nest | None:
    parts = ["i"] if entry.table.keys() & {"split", "unstack"} else []
    table = entry.inner("nest")
    if table is None:
        return None
    sizes = table.take("sizes", _SIZES, needed=True) or []
    keys = table.table.keys() & {"flat", "outer", "inner"}
    if keys not in ({"flat"}, {"outer", "inner"}):
        table.wrong("it has either `flat`, or `outer` and `inner`")
    flat, outer, inner = (
        table.replacement(key, table.take(key, _GROUP), parts) for key in ("flat", "outer", "inner")
    )
    table.nothing_else()
    return Nest(tuple(sizes), flat, outer, inner)


def _each(entry: _Table) -> tuple[Apply | Transpose | Reshaped | Pad | Crop, ...]:
    each: list[Apply | Transpose | Reshaped | Pad | Crop] = []
    each += _applied(entry)
    axes = entry.take("transpose", _INTS)
    if axes is not None:
        each.append(Transpose(tuple(axes)))
    shape = entry.take("reshape", _RESHAPE)
    if isinstance(shape, list):
        each.append(Reshaped(tuple(shape), None))
    elif shape is not None:
        table = _Table(f"{entry.label}: `reshape`", shape, entry.problems)
        before = table.take("from", _SIZES, needed=True) or []
        each.append(Reshaped(tuple(table.take("to", _NEW_SHAPE, True) or []), tuple(before)))
        table.nothing_else()
    for key in ("pad", "crop"):
        table = entry.inner(key)
        if table is not None:
            widths = tuple((a, b) for a, b in table.take("widths", _WIDTHS, needed=True) or [])
            fill = table.take("fill", _NUMBER, needed=True) if key == "pad" else None
            each.append(Crop(widths) if fill is None else Pad(widths, fill))
            table.nothing_else()
    if any(isinstance(kind, Reshaped) and len(kind.to) > MOST_AXES for kind in each):
        entry.wrong(f"`reshape`: arrays have {MOST_AXES} axes at most")
    return tuple(each)


def _applied(entry: _Table) -> list[Apply]:
    """The function of a rule, which is imported."""
    value = entry.take("apply", _APPLY)
    if value is None:
        return []
    shape = dtype = None
    if isinstance(value, dict):
        table = _Table(f"{entry.label}: `apply`", value, entry.problems)
        value = table.take("function", _TEXT, needed=True)
        shape, name = table.take("shape", _SIZES), table.take("dtype", _TEXT)
        table.nothing_else()
        try:
            dtype = None if name is None else parse_dtype(name)
        except ArgumentError as error:
            table.wrong(error.summary)
    try:
        function: Any = None if value is None else load_function(value)
    except ReshardError as error:
        entry.wrong("; ".join([error.summary, *error.problems]))
        return []
    if function is None or not callable(function.function):
        entry.wrong(f"`apply`: {value} is no function")
    shape = None if shape is None else tuple(shape)
    return [Apply(cast(Any, function), str(value), shape, dtype)]


def _divided(
    kind: Literal["split", "unstack"], table: _Table | None, names: Collection[str]
) -> Divided | None:
    if table is None:
        return None
    axis = table.take("axis", _INT, needed=True) or 0
    sizes = table.take("sizes", _SIZES) if kind == "split" else None
    value = table.take("into", _ONE_OR_MORE, needed=True)
    texts = value if isinstance(value, list) else [value]
    into = [table.replacement("into", text, {"i", *names}) for text in texts]
    if kind == "split" and isinstance(value, str) and sizes is None:
        table.wrong("`sizes` is missing, as `into` does not say how many parts there are")
    if isinstance(value, list) and sizes is not None and len(sizes) != len(value):
        table.wrong(f"`sizes` has {len(sizes)}, `into` has {len(value)}")
    table.nothing_else()
    parts = tuple(replacement for replacement in into if replacement is not None)
    one = isinstance(value, str) and len(parts) == 1
    return Divided(kind, axis, None if sizes is None else tuple(sizes), parts[0] if one else parts)


def _gathered(
    kind: Literal["concat", "stack"], table: _Table | None, names: Collection[str]
) -> Gathered | None:
    if table is None:
        return None
    axis = table.take("axis", _INT, needed=True) or 0
    given = table.take("by", _GROUP)
    by = table.replacement("by", given, names)
    order = table.take("order", _TEXTS)
    if order is not None and len(set(order)) < len(order):
        table.wrong("`order` has a piece twice")
    if order is not None and given is None:
        table.wrong("`order` goes with `by`")
    sizes = table.take("sizes", _SIZES) if kind == "concat" else None
    axes = table.take("names", _TEXTS) if kind == "stack" else None
    table.nothing_else()
    return Gathered(
        kind,
        axis,
        by,
        None if order is None else tuple(order),
        None if sizes is None else tuple(sizes),
        tuple(axes or ()),
    )


# A conversion as the text of a map file that says all of it, in as few rules.
#
# One rule says rows of the map that differ in numbers alone, those of all leaves of a module, and
# those of numbered modules:
#
#     params/layer_0/attn/q -> layers/0/attn/q
#     params/layer_0/attn/k -> layers/0/attn/k      ^params/layer_(\\d+)/attn/  ->  layers/\\1/attn/
#     params/layer_1/attn/q -> layers/1/attn/q
#     params/layer_1/attn/k -> layers/1/attn/k
#
# A regex must not match what its rule is not for, on either side: it is written only where these
# are all that it matches of the paths that there ever are.

_HEADER = """\
# A whole map between the leaves of two checkpoints. Each rule is for a leaf, for all leaves of a
# module (`^a/b/`), or for those that differ in numbers alone (`(\\d+)`), and sees what the rules
# before it have left. Any of it can be edited: `from` is a regex that is searched for in printed
# paths, `to` a replacement as `re.sub` takes it. As long as `from` has no other wildcards, and all
# of its numbers are in the new paths, the map can be used in the opposite direction, too: with the
# model that is made then, where an optimizer's state or a step is beside it. Where the
# source was renamed, selected from or cast before, that is not in it.
"""
_ORIGINS = """\
# Behind `[[rule]]` is what it was found by: equal paths after the standard conversions (path), or
# the order of modules of one class (structure).
"""
_WIDTH = 100
# The key and the value of a rule's operation.
Setting = tuple[str, Any] | None
_DIGITS = re.compile(r"(\d+)")
# A text with its numbers at odd places; None where they count the pieces of a whole.
Parted = tuple[str | None, ...]


class Block(NamedTuple):
    """Rows that one rule says: their places among all rows, and their paths before and after. If
    the only path of several pieces has the group 0, that is the number of the piece."""

    rows: tuple[int, ...]
    inputs: tuple[PathTemplate, ...]
    outputs: tuple[PathTemplate, ...]


def write_map(
    found: LeafMap, initial: Sequence[str] = (), to: str | None = None, own: Collection[Path] = ()
) -> str:
    """The text of a map file that `read_map` and `apply_map` make the same map of, and `inverse`
    and `apply_map` the way back. Rules that say more than their own leaves are not written.

    Args:
      found: the map.
      initial: globs of leaves of the target that keep the model's own initial value.
      to: the API that it converts to, `"nnx"` or `"linen"`.
      own: more leaves of the target that do.

    Raises:
      TreeMismatchError: a leaf is made of values that were given.
    """
    drops = [Row((path,), (), None, "map") for path in found.dropped]
    rows, settings = [*drops, *found.sequence()], []
    shapes = {**dict.fromkeys(found.dropped, ()), **found.sources()}
    for row in rows:
        inputs = [shapes.pop(path) for path in row.inputs]
        if row.outputs:
            made = inputs if row.operation is None else row.operation.shapes(inputs)
            shapes.update(zip(row.outputs, made, strict=True))
        if isinstance(row.operation, Constant):
            names = " and ".join(map(format_path, row.outputs))
            raise TreeMismatchError(f"no map can hold the values of {names}")
        settings.append(_setting(row.operation, inputs))
    resets = [Row((path,), (), None, "map") for path in own]
    globs = [block.inputs[0].glob for block in blocks_of(resets, [""] * len(resets), found.values)]
    others = {*found.sources(), *found.values, *found.must_be_zero, *own}
    short = _written(
        rows, settings, blocks_of(rows, list(map(repr, settings)), others), [*initial, *globs], to
    )
    if _says(short, found, own):
        return short
    every = [*initial, *map(format_glob, own)]
    return _written(rows, settings, list(map(literal_block, range(len(rows)), rows)), every, to)


def _written(
    rows: Sequence[Row],
    settings: Sequence[Setting],
    blocks: Sequence[Block],
    initial: Sequence[str],
    to: str | None,
) -> str:
    """The text of a map, with a rule for each block of rows."""
    texts = [_HEADER + (_ORIGINS if any(row.origin != "map" for row in rows) else "")]
    top = [("to", to)] * (to is not None) + [("init", initial)] * bool(initial)
    if top:
        texts.append("".join(f"{_assigned(key, value)}\n" for key, value in top))
    return "\n".join(
        [*texts, *(_rule_text(rows[b.rows[0]], settings[b.rows[0]], b) for b in blocks)]
    )


def _says(text: str, found: LeafMap, own: Collection[Path]) -> bool:
    """Whether a text says a map, in both directions if it has both."""
    values: dict[Path, Value] = {
        p: value for p, value in found.values.items() if not isinstance(value, Zeros)
    }
    whole = LeafMap(values)
    zeros = {path: zeros.shape for path, zeros in found.must_be_zero.items()}
    leaves = {**whole.sources(), **zeros, **dict.fromkeys(found.dropped, ())}
    stay = {path: Source(path, shape) for path, shape in zeros.items()}
    try:
        made = whole.inverse()
    except TreeMismatchError:  # an operation has none
        made = None
    try:
        rules = map_of(tomllib.loads(text), "the map")
        forth = apply_map(rules, leaves).map
        if made is None:
            return _are(forth, values | stay, found.dropped)
        undone = inverse(rules)
        back = apply_map(undone, whole.shapes | dict.fromkeys(own, ())).map
    except ReshardError:
        return False
    texts = {glob_text(path): path for path in leaves}
    named = {texts[text] for glob in undone.initial for text in named_by(texts, glob)}
    return (
        named == {*found.dropped}
        and _are(forth, values | stay, found.dropped)
        and _are(back, made.values, own)
    )


def _are(found: LeafMap, values: Mapping[Path, Value], dropped: Collection[Path]) -> bool:
    return found.values == values and {*found.dropped} == {*dropped}


def _rule_text(row: Row, setting: Setting, block: Block) -> str:
    """The rule of a block of rows like this one."""
    sources = [template.pattern().text for template in block.inputs]
    paths = [template.replacement(block.inputs[0]).text for template in block.outputs]
    numbers = block.inputs[0].groups
    joins, parts = (isinstance(row.operation, kind) for kind in (Concat | Stack, Split | Unstack))
    lines = ["[[rule]]" if row.origin == "map" else f"[[rule]]  # {row.origin}"]
    lines.append(_assigned("from", sources if joins and 0 not in numbers else sources[0]))
    if not paths:
        lines.append("drop = true")
    if setting is not None:
        key, value = setting
        if joins and 0 in numbers:
            value = value | {"by": numbers.index(0) + 1}
        if parts:
            value = value | {"into": paths[0] if 0 in block.outputs[0].groups else paths}
        lines.append(_assigned(key, value))
    if paths and not parts:
        lines.append(_assigned("to", paths[0]))
    return "\n".join(lines) + "\n"


def _setting(operation: Operation | None, inputs: Sequence[Shape]) -> Setting:
    """The key and the value of an operation on leaves of these shapes, less what paths have."""
    match operation:
        case None:
            return None
        case Transpose(axes=axes):
            return "transpose", axes
        case Reshape(shape=shape):
            return "reshape", {"from": inputs[0], "to": shape}
        case Pad(widths=widths, fill=fill):
            return "pad", {"widths": widths, "fill": fill}
        case Crop(widths=widths):
            return "crop", {"widths": widths}
        case Split(axis=axis, sizes=sizes):
            return "split", {"axis": axis, "sizes": sizes}
        case Unstack(axis=axis):
            return "unstack", {"axis": axis}
        case Concat(axis=axis):
            return "concat", {"axis": axis, "sizes": [shape[axis] for shape in inputs]}
        case Stack():
            names = {"names": operation.names} if operation.names else {}
            return "stack", {"axis": operation.axis} | names
        case Apply(name=name, shape=shape, dtype=dtype):
            sizes = {} if shape is None else {"shape": shape}
            kind = {} if dtype is None else {"dtype": dtype.name}
            return "apply", {"function": name, **sizes, **kind} if sizes or kind else name


def _assigned(key: str, value: Any) -> str:
    """A line of TOML; a list that makes it long is broken into lines."""
    line = f"{key} = {_toml(value)}"
    return line if len(line) <= _WIDTH else f"{key} = {_toml(value, broken=True)}"


def _toml(value: Any, broken: bool = False) -> str:
    """A value as TOML; if it is to be broken, with a line for each text of a list."""
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_toml(entry, broken)}" for key, entry in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, Sequence):
        entries = [_toml(entry, broken) for entry in value]
        if broken and entries and isinstance(value[0], str):
            return "".join(["[\n", *(f"    {entry},\n" for entry in entries), "]"])
        return f"[{', '.join(entries)}]"
    return repr(value)


# Rows that one rule says.


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
    return tuple(_DIGITS.split(format_path(path)))


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
        self._known: dict[Hashable, list[str]] = {}
        for whole, paths in ((True, ever), (False, above)):
            for path in paths:
                text = format_path(path)
                known = self._known.setdefault((whole, _parted(path)[::2]), [])
                known.append(text if whole else f"{text}/")

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
            if all(_has_all(side, len(groups)) for side in sides) and self._are_all(lines, block):
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

    def _are_all(self, lines: Sequence[_Line], block: Block) -> bool:
        """Whether the regexes of a block match no other texts than those of its lines."""
        first, templates = lines[0], (*block.inputs, *block.outputs)
        for at, (text, template) in enumerate(zip(first.texts, templates, strict=True)):
            matches = map(template.pattern().regex.search, self._known[first.whole, text[::2]])
            if sum(map(bool, matches)) != sum(line.pieces[at] for line in lines):
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
    sorter = graphlib.TopologicalSorter({n: needed - {n} for n, needed in before.items()})
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    found = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, (min(blocks[number].rows), number))
        _, number = heapq.heappop(ready)
        found.append(blocks[number])
        sorter.done(number)
    return found
