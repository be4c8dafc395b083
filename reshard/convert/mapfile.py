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

import os
import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, cast

from reshard.arrays.boxes import MOST_AXES
from reshard.arrays.dtypes import parse_dtype
from reshard.arrays.operations import Apply, Crop, Pad, Transpose
from reshard.convert.map_rules import Divided, Gathered, Map, Nest, Reshaped, Rule
from reshard.convert.replacement import Pattern, Replacement, parse_pattern, parse_replacement
from reshard.convert.user_code import load_function
from reshard.errors import ArgumentError, ReshardError
from reshard.tree import split_path

# What a map of a refused conversion has in the place of what is open.
TODO = "TODO"
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
    return _parsed(_text_of(path))


def _text_of(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return file.read().decode()


def _parsed(text: str) -> dict[str, Any]:
    """The document in a text. Raises as `read_toml`."""
    try:
        document = tomllib.loads(text)
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
    """The rules of a map file. Raises ArgumentError: it is no such file; all that is wrong with its
    rules, or still to be done."""
    try:
        text = _text_of(path)
        document = _parsed(text)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: it cannot be read", [str(error)], [_EXAMPLE]) from error
    left = re.compile(rf"""["']{TODO}\b""")
    problems = [
        f"line {n}: {line}" for n, line in enumerate(text.splitlines(), 1) if left.search(line)
    ]
    if problems:
        hint = "each stands for a leaf: its comment lists the candidates"
        raise ArgumentError(f"{path}: `{TODO}` must be replaced", problems, [hint])
    return map_of(document, os.fspath(path))


def map_of(document: dict[str, Any], name: str) -> Map:
    """The rules of the document in a map file of this name. Raises ArgumentError: all that is wrong
    with them."""
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
    "a list of sizes, where one may be -1",
)
_APPLY: Form = (lambda v: _is_text(v) or _TABLE[0](v), "a function, or a table with one")
_RESHAPE: Form = (
    lambda v: _TABLE[0](v) or _NEW_SHAPE[0](v),
    "a list of sizes, where one may be -1, or a table",
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
            first = ": put it before the first rule" if key in ("init", "to") else ""
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
            entry.wrong("`drop` cannot be combined with other keys")
    elif not keys & {"to", *_EACH, *_REGROUP}:
        entry.wrong("it has no effect: give it `to`, an operation or `drop = true`")
    if len(regroups) > 1:
        entry.wrong(f"{' and '.join(f'`{key}`' for key in regroups)} need two rules")
    elif regroups and regroups[0] in ("split", "unstack"):
        if "to" in keys:
            entry.wrong("`to` cannot be combined with `into`, which has the new paths")
    elif regroups and "to" not in keys:
        entry.wrong("`to` is missing, the path of the whole")
    if several and not keys & {"concat", "stack"}:
        entry.wrong("only `concat` and `stack` take several regexes")
    for key in regroups:
        by = isinstance(entry.table[key], dict) and "by" in entry.table[key]
        if key in ("concat", "stack") and by == several:
            entry.wrong(
                f"`{key}`: `by` cannot be combined with a list in `from`: it orders them"
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
        table.wrong("it needs either `flat`, or `outer` and `inner`")
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
        entry.wrong(f"`apply`: {value} is not a function")
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
        table.wrong("`sizes` is missing, as `into` does not give the number of parts")
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
        table.wrong("`order` requires `by`")
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
