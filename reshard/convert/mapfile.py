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

A rule has the key `from`, a regex that is searched for in printed paths (for `concat`, `stack` and
`equal` it may be a list of them), and some of these, which are done in this order:

    drop = true                                         the leaf is left out; nothing else then
    apply = 'package.module:function'                   what it makes, of the same shape and dtype
    apply = { function = '...', shape = [8, 4], dtype = 'bfloat16' }    ... or of these
    scale = 0.125                                       times a number
    scale = { by = 0.125, rounds = true }               ... which may underflow
    add = 1                                             plus a number
    interleave = { axis = 0, parts = 2 }                parts of an axis, element by element
    deinterleave = { axis = 0, parts = 2 }              ... and back
    rope = { axis = 0, head_size = 64, to = 'pairs' }   halves of each head as pairs; to = 'halves'
    transpose = [1, 0]                                  axis i of the result is this axis
    reshape = [8, -1]                                   the same elements in another shape
    reshape = { from = [8, 2, 4], to = [8, 8] }         ... of leaves that have the first
    pad = { widths = [[0, 0], [0, 64]], fill = 0.0 }    more before and after along each axis
    pad = { axis = 0, from = 500, to = 512, value = 0 } more at the end of one axis
    crop = { widths = [[0, 0], [0, 64]] }               less
    split = { axis = 0, sizes = [8, 4], into = [...] }  parts along an axis; without sizes, equal
    unstack = { axis = 0, into = [...] }                the parts of an axis, without it
    concat = { axis = -1, by = 1, order = ['i', 'f'] }  leaves of the same `to`, along an axis
    stack = { axis = 0, by = 1 }                        leaves of the same `to`, along a new axis
    equal = true                                        leaves that are equal, as one
    to = 'layers/\\1/'                                  what takes the place of each match
    to = ['embed/w', 'head/w']                          ... under several paths

`into` is a replacement for each part, or one for all of them in which `{}` is the position. `by`
says which piece of the whole a leaf is: a group of the regex, or a replacement; what it gives is a
number from 0, or a text of `order`. Where `from` is a list, that is the order of the pieces.
`sizes` of `concat` are what the pieces must have, `names` of `stack` the mesh axes over its axis.

`fill` makes a leaf of nothing: `to = 'norm/bias'` and `fill = { value = 0, shape = [8], dtype =
'float32' }`. With `count = 4` it makes four, and `{}` in `to` is the number. With `from` instead of
`to`, the leaf is left out, and must hold that value.

A number may be an expression over names: `scale = 'head_dim ** -0.5'`. The names are those of the
`[vars]` table above the rules, and of the caller's. `when` is a number; where it is 0, there is no
such rule.

In replacements, braces hold arithmetic: `'stages/{\\1 // 4}/{\\1 % 4}/'`. For uneven groups,
`nest = { sizes = [3, 4, 6, 3], flat = 1 }` gives it the names `outer` and `inner`: the group that a
number is in, and the place there. `nest = { sizes = [3, 4, 6, 3], outer = 1, inner = 2 }` gives it
`flat`.
"""

import itertools
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from reshard.arrays import operations as ops
from reshard.arrays.boxes import MOST_AXES
from reshard.arrays.dtypes import parse_dtype
from reshard.convert.leafmap import Zeros
from reshard.convert.map_rules import (
    Divided,
    Each,
    Gathered,
    Map,
    Nest,
    Reshaped,
    Resized,
    Rule,
)
from reshard.convert.replacement import (
    Pattern,
    Replacement,
    evaluate,
    parse_pattern,
    parse_replacement,
)
from reshard.convert.user_code import load_function
from reshard.errors import ArgumentError, ReshardError
from reshard.tree import split_path

# What a map of a refused conversion has in the place of what is open.
TODO = "TODO"
_EXAMPLE = "\n      ".join(["[[rule]]", r"from = '^params/layer_(\d+)/'", r"to = 'layers/\1/'"])
_REGROUP = ("split", "unstack", "concat", "stack", "equal")
_EACH = ("apply", "scale", "add", "interleave", "deinterleave", "rope")
_EACH += ("transpose", "reshape", "pad", "crop")
# Names in the braces of a replacement, less those of groups.
_NAME = re.compile(r"(?<![\\<\w])[^\W\d]\w*")
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


def read_map(path: str | os.PathLike[str], numbers: Mapping[str, float] = {}) -> Map:
    """The rules of a map file, whose expressions may name these numbers. Raises ArgumentError: it
    is no such file; all that is wrong with its rules, or still to be done."""
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
    return map_of(document, os.fspath(path), numbers)


def config_numbers(config: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a Hugging Face `config.json`, by name; true is 1. Those of its `text_config`
    are among them."""
    inner = config.get("text_config")
    every = {**(inner if isinstance(inner, dict) else {}), **config}
    return {key: value for key, value in every.items() if isinstance(value, int | float)}


def map_of(document: dict[str, Any], name: str, numbers: Mapping[str, float] = {}) -> Map:
    """The rules of the document in a map file of this name, whose expressions may name these
    numbers. Raises ArgumentError: all that is wrong with them."""
    problems: list[str] = []
    known = dict(numbers)
    top = _Table("the file", document, problems, (), known)
    own = top.inner("vars")
    if own is not None:
        for key in list(own.table):
            if (value := own.take(key, _NUMBER)) is not None:
                known[key] = value
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
    rules = [_rule(number, table, problems, known) for number, table in enumerate(tables, 1)]
    if problems:
        raise ArgumentError(f"{name}: its rules cannot be read", problems, [_EXAMPLE])
    globs = map(tuple, (initial, may, ignored))
    return Map(name, tuple(rule for rule in rules if rule is not None), *globs, to=to)


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
_FACTOR: Form = (lambda value: type(value) in (int, float) and value != 0, "a number other than 0")
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
_SCALE: Form = (lambda v: _TABLE[0](v) or _FACTOR[0](v), "a number other than 0, or a table")
_ROPE: Form = (lambda value: value in ("pairs", "halves"), "`pairs` or `halves`")
_APPLY: Form = (lambda v: _is_text(v) or _TABLE[0](v), "a function, or a table with one")
_RESHAPE: Form = (
    lambda v: _TABLE[0](v) or _NEW_SHAPE[0](v),
    "a list of sizes, where one may be -1, or a table",
)
_NUMERIC = (_INT, _INTS, _SIZES, _NUMBER, _FACTOR, _WIDTHS, _NEW_SHAPE, _RESHAPE, _SCALE)


class _Table:
    """A table of the file, whose keys are taken one by one; what is wrong is put on a list. Of a
    rule's tables `patterns` are the regexes. Expressions may name the `numbers`."""

    def __init__(
        self,
        label: str,
        table: dict[str, Any],
        problems: list[str],
        patterns: Sequence[Pattern] = (),
        numbers: Mapping[str, float] = {},
    ):
        self.label = label
        self.table = dict(table)
        self.problems = problems
        self.patterns = patterns
        self.numbers = numbers

    def take(self, key: str, form: Form, needed: bool = False) -> Any:
        """The value of a key; None if it has none, or not of this form."""
        value = self.table.pop(key, None)
        fits, words = form
        if form in _NUMERIC:
            try:
                value = self.evaluated(value)
            except ValueError as error:
                self.wrong(f"`{key}`: {error}")
                return None
        if value is None:
            if needed:
                self.wrong(f"`{key}` is missing")
        elif not fits(value):
            self.wrong(f"`{key}` is not {words}: {value!r}")
            value = None
        return value

    def evaluated(self, value: Any) -> Any:
        """A value with its expressions evaluated."""
        if isinstance(value, list):
            return list(map(self.evaluated, value))
        return evaluate(value, self.numbers) if isinstance(value, str) else value

    def inner(self, key: str) -> "_Table | None":
        """The table of a key, if it has one."""
        table = self.take(key, _TABLE)
        return None if table is None else self.below(key, table)

    def below(self, key: str, table: dict[str, Any]) -> "_Table":
        label = f"{self.label}: `{key}`"
        return _Table(label, table, self.problems, self.patterns, self.numbers)

    def dtype(self, key: str, needed: bool = False) -> np.dtype | None:
        """The dtype that a key names."""
        name = self.take(key, _TEXT, needed)
        try:
            return None if name is None else parse_dtype(name)
        except ArgumentError as error:
            self.wrong(error.summary)
            return None

    def replacement(
        self, key: str, value: str | int | None, names: Collection[str] = ()
    ) -> Replacement | None:
        """A replacement, or the group of a number."""
        if value is None:
            return None
        text = f"\\g<{value}>" if isinstance(value, int) else value
        numbers = {key: number for key, number in self.numbers.items() if _is_int(number)}

        def named(braces: re.Match[str]) -> str:
            return _NAME.sub(lambda name: str(numbers.get(name[0], name[0])), braces[0])

        text = re.sub(r"\{[^{}]+\}", named, text)
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


def _rule(
    number: int, table: dict[str, Any], problems: list[str], numbers: Mapping[str, float]
) -> Rule | None:
    """A rule; None if its `when` is 0."""
    entry = _Table(f"rule {number}", table, problems, (), numbers)
    if entry.take("when", _NUMBER) == 0:
        return None
    source = entry.take("from", _ONE_OR_MORE, needed="fill" not in table)
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
    if "fill" in table:
        return _filled(number, entry)
    drop = entry.take("drop", _TRUE) is True
    optional = entry.take("optional", _TRUE) is True
    nest = _nest(entry)
    names = ["outer", "inner"] if nest and nest.flat else ["flat"] if nest else []
    given = entry.take("to", _ONE_OR_MORE)
    several = [
        entry.replacement("to", text, names) for text in given or () if isinstance(given, list)
    ]
    to = entry.replacement("to", given, names) if isinstance(given, str) else None
    each = _each(entry)
    regroup = None
    if isinstance(given, list):
        regroup = Divided("copies", 0, None, tuple(text for text in several if text is not None))
    if entry.take("equal", _TRUE):
        regroup = Gathered("equal", 0)
    for kind in ("split", "unstack"):
        regroup = _divided(kind, entry.inner(kind), names) or regroup
    for kind in ("concat", "stack"):
        regroup = _gathered(kind, entry.inner(kind), names) or regroup
    entry.nothing_else()
    return Rule(number, tuple(patterns), to, drop, each, regroup, nest=nest, optional=optional)


def _filled(number: int, entry: _Table) -> Rule | None:
    """A rule for leaves of a constant."""
    table = entry.inner("fill")
    given = entry.take("to", _ONE_OR_MORE)
    if table is None:
        return None
    value = table.take("value", _NUMBER, needed=True)
    shape = table.take("shape", _SIZES, needed=True)
    dtype = table.dtype("dtype", needed=True)
    count = table.take("count", _INT)
    table.nothing_else()
    entry.nothing_else()
    places = [given] if isinstance(given, str) else given or []
    if count is not None:
        pairs = itertools.product(places, range(count))
        places = [place.replace("{}", str(n)) for place, n in pairs]
    if None in (value, shape, dtype):
        return None
    fill = Zeros(tuple(shape), cast(Any, dtype), value)
    return Rule(number, tuple(entry.patterns), fill=fill, places=tuple(places))


def _check_keys(entry: _Table, several: bool) -> None:
    """Says which keys of a rule do not go together, or are missing."""
    keys = set(entry.table)
    if "fill" in keys:
        if keys & {"drop", "nest", "optional", *_EACH, *_REGROUP} or ("to" in keys) == bool(
            entry.patterns
        ):
            entry.wrong("`fill` needs either `to` or `from`, and no other key")
        return
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
    if isinstance(entry.table.get("to"), list) and regroups:
        entry.wrong(f"`to` is a list: `{regroups[0]}` needs another rule")
    if several and not keys & {"concat", "stack", "equal"}:
        entry.wrong("only `concat`, `stack` and `equal` take several regexes")
    if "equal" in keys and not several:
        entry.wrong("`equal` needs a list in `from`")
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


def _each(entry: _Table) -> tuple[Each, ...]:
    each: list[Each] = []
    each += _applied(entry)
    each += _computed(entry)
    each += _interleaved(entry)
    axes = entry.take("transpose", _INTS)
    if axes is not None:
        each.append(ops.Transpose(tuple(axes)))
    shape = entry.take("reshape", _RESHAPE)
    if isinstance(shape, list):
        each.append(Reshaped(tuple(shape), None))
    elif shape is not None:
        table = entry.below("reshape", shape)
        before = table.take("from", _SIZES, needed=True) or []
        each.append(Reshaped(tuple(table.take("to", _NEW_SHAPE, True) or []), tuple(before)))
        table.nothing_else()
    for key in ("pad", "crop"):
        table = entry.inner(key)
        if table is not None and key == "pad" and "widths" not in table.table:
            axis, after = (table.take(key, _INT, needed=True) or 0 for key in ("axis", "to"))
            before, fill = table.take("from", _INT), table.take("value", _NUMBER, needed=True)
            each.append(Resized(axis, before, after, fill or 0))
            table.nothing_else()
        elif table is not None:
            widths = tuple((a, b) for a, b in table.take("widths", _WIDTHS, needed=True) or [])
            fill = table.take("fill", _NUMBER, needed=True) if key == "pad" else None
            each.append(ops.Crop(widths) if fill is None else ops.Pad(widths, fill))
            table.nothing_else()
    if any(isinstance(kind, Reshaped) and len(kind.to) > MOST_AXES for kind in each):
        entry.wrong(f"`reshape`: arrays have {MOST_AXES} axes at most")
    return tuple(each)


def _computed(entry: _Table) -> list[Each]:
    """Arithmetic with constants."""
    made: list[Each] = []
    factor, rounds = entry.take("scale", _SCALE), False
    if isinstance(factor, dict):
        table = entry.below("scale", factor)
        factor, rounds = table.take("by", _FACTOR, needed=True), table.take("rounds", _TRUE) is True
        table.nothing_else()
    if factor is not None:
        made.append(ops.Scale(factor, rounds))
    addend = entry.take("add", _FACTOR)
    return made if addend is None else [*made, ops.Add(addend)]


def _interleaved(entry: _Table) -> list[Each]:
    made: list[Each] = []
    for key in ("interleave", "deinterleave", "rope"):
        if (table := entry.inner(key)) is None:
            continue
        axis, parts = table.take("axis", _INT, needed=True) or 0, 2
        if key == "rope":
            block = table.take("head_size", _INT, needed=True)
            undo = table.take("to", _ROPE, needed=True) == "halves"
        else:
            parts = table.take("parts", _INT, needed=True) or 1
            block, undo = table.take("block", _INT), key == "deinterleave"
        table.nothing_else()
        made.append(ops.Interleave(axis, parts, block, undo))
    return made


def _applied(entry: _Table) -> list[ops.Apply]:
    """The function of a rule, which is imported."""
    value = entry.take("apply", _APPLY)
    if value is None:
        return []
    shape = dtype = None
    if isinstance(value, dict):
        table = entry.below("apply", value)
        value = table.take("function", _TEXT, needed=True)
        shape, dtype = table.take("shape", _SIZES), table.dtype("dtype")
        table.nothing_else()
    try:
        function: Any = None if value is None else load_function(value)
    except ReshardError as error:
        entry.wrong("; ".join([error.summary, *error.problems]))
        return []
    if function is None or not callable(function.function):
        entry.wrong(f"`apply`: {value} is not a function")
    shape = None if shape is None else tuple(shape)
    return [ops.Apply(cast(Any, function), str(value), shape, dtype)]


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
