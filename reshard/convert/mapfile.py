"""The map file: a conversion as TOML to be read, reviewed, edited and used again.

    to = 'nnx'                                 # or 'linen': for the other it is run backwards
    init = ['rngs/**', '**/dropout/rngs/**']   # globs: the target's own initial value stays

    [[rule]]                                   # every leaf, one rule after another, as `re.sub`
    from = '^params/layer_(\\d+)/'
    to = 'layers/\\1/'

    [[rule]]
    from = '^(.*)/mlp/gating_einsum$'
    unstack = { axis = 0, into = ['\\1/mlp/gate_proj/kernel', '\\1/mlp/up_proj/kernel'] }

`reshard help maps` describes the keys. The operations of a rule are done in the order of `_EACH`,
and then one of `_REGROUP`.
"""

import contextlib
import itertools
import os
import pathlib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from reshard.arrays import operations as ops
from reshard.arrays.boxes import MOST_AXES
from reshard.arrays.dtypes import kind_of, parse_dtype
from reshard.convert.leafmap import Filled
from reshard.convert.map_rules import PARTS, Map, Nest, Rule, Step
from reshard.convert.replacement import (
    TODO,
    Pattern,
    Replacement,
    evaluate,
    open_places,
    parse_pattern,
    parse_replacement,
)
from reshard.convert.user_code import load_function
from reshard.errors import ArgumentError, ReshardError
from reshard.tree import split_path

_EXAMPLE = "\n      ".join(["[[rule]]", r"from = '^params/layer_(\d+)/'", r"to = 'layers/\1/'"])
_REGROUP = ("split", "unstack", "concat", "stack", "equal")
_EACH = ("apply", "scale", "add", "interleave", "deinterleave", "rope")
_EACH += ("transpose", "reshape", "pad", "crop")
# Names in the braces of a replacement, except names of groups.
_NAME = re.compile(r"(?<![\\<\w])[^\W\d]\w*")
# Levels of nested tables and lists. Map files have six.
_MAX_LEVELS = 50
_LARGEST = 1 << 63
Form = tuple[Callable[[Any], bool], str]


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML document without deep nesting and huge numbers, which could not be shown.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not TOML, is nested too deeply, or has a number of more than 64 bits.
    """
    return _parsed(pathlib.Path(path).read_bytes().decode())


def _parsed(text: str) -> dict[str, Any]:
    """The document in a text. Raises as `read_toml`."""
    try:
        document = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("the TOML is nested too deeply") from error
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
    raise ValueError("the TOML is nested too deeply")


def read_map(path: str | os.PathLike[str], numbers: Mapping[str, float] = {}) -> Map:
    """The rules of a map file, whose expressions may name these numbers. Raises ArgumentError: the
    file cannot be read, has a `TODO` left, or its rules are wrong: all problems."""
    try:
        text = pathlib.Path(path).read_bytes().decode()
        document = _parsed(text)
    except (OSError, ValueError) as error:
        hints = [] if isinstance(error, OSError) else [_EXAMPLE]
        raise ArgumentError(f"{path}: it cannot be read", [str(error)], hints) from error
    lines = enumerate(text.splitlines(), 1)
    problems = [f"line {n}: {line}" for n, line in lines if open_places(line)]
    if problems:
        hints = [
            f"in a rule, replace '{TODO}' by a path; the comment of its line lists the candidates",
            f"in `init`, delete the word {TODO} to keep the model's own initial value of the leaf",
        ]
        raise ArgumentError(f"{path}: `{TODO}` must be replaced", problems, hints)
    return map_of(document, os.fspath(path), numbers)


def config_numbers(config: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a Hugging Face `config.json`, by name; true is 1."""
    return {
        key: int(value) if isinstance(value, bool) else value
        for key, value in config.items()
        if isinstance(value, int | float)
    }


def map_of(document: dict[str, Any], name: str, numbers: Mapping[str, float] = {}) -> Map:
    """The rules of the document of a map file, whose expressions may name these numbers. Raises
    ArgumentError: all problems of the rules."""
    problems: list[str] = []
    known = dict(numbers)
    top = _Table("the file", document, problems, (), known)
    own = top.inner("vars")
    if own is not None:
        for key in list(own.table):
            if (value := own.take(key, _NUMBER)) is not None:
                known[key] = value
    initial = top.take("init", _TEXTS) or ()
    optional = top.fields("optional", {}, {"init": _TEXTS, "drop": _TEXTS}) or {}
    may, ignored = (optional.get(key) or () for key in ("init", "drop"))
    for key, globs in (("init", initial), ("optional", (*may, *ignored))):
        for glob in globs:
            try:
                split_path(glob)
            except ArgumentError as error:
                problems.append(f"`{key}`: {error.summary}")
    to = top.take("to", _API)
    tables = top.take("rule", _TABLES) or ()
    top.nothing_else()
    rules = [_rule(number, table, problems, known) for number, table in enumerate(tables, 1)]
    if problems:
        raise ArgumentError(f"{name}: its rules cannot be read", problems)
    made = tuple(rule for rule in rules if rule is not None)
    return Map(name, made, initial, may, ignored, to=to)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_dtype(value: Any) -> bool:
    with contextlib.suppress(ArgumentError):
        return _is_text(value) and kind_of(parse_dtype(value)) in "biufc"
    return False


_API: Form = (lambda value: value in ("nnx", "linen"), "`nnx` or `linen`")
_INT: Form = (_is_int, "a whole number")
_COUNT: Form = (lambda v: _is_int(v) and 0 < v <= 1 << 16, "a number from 1 to 65536")
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
_ROPE: Form = (lambda value: value in ("pairs", "halves"), "`pairs` or `halves`")
_DTYPE: Form = (_is_dtype, "a dtype")
_NUMERIC = (_INT, _COUNT, _INTS, _SIZES, _NUMBER, _FACTOR, _WIDTHS, _NEW_SHAPE)
# The fields of each key with a table: those that are needed, and others.
_FIELDS: dict[str, tuple[dict[str, Form], dict[str, Form]]] = {
    "apply": ({"function": _TEXT}, {"shape": _SIZES, "dtype": _DTYPE}),
    "scale": ({"by": _FACTOR}, {"rounds": _TRUE}),
    "interleave": ({"axis": _INT, "parts": _INT}, {"block": _INT}),
    "deinterleave": ({"axis": _INT, "parts": _INT}, {"block": _INT}),
    "rope": ({"axis": _INT, "head_size": _INT, "to": _ROPE}, {}),
    "reshape": ({"from": _SIZES, "to": _NEW_SHAPE}, {}),
    "pad": ({"widths": _WIDTHS, "fill": _NUMBER}, {}),
    "crop": ({"widths": _WIDTHS}, {}),
    "split": ({"axis": _INT, "into": _ONE_OR_MORE}, {"sizes": _SIZES}),
    "unstack": ({"axis": _INT, "into": _ONE_OR_MORE}, {}),
    "concat": ({"axis": _INT}, {"by": _GROUP, "order": _TEXTS, "sizes": _SIZES}),
    "stack": ({"axis": _INT}, {"by": _GROUP, "order": _TEXTS, "names": _TEXTS}),
    "fill": ({"value": _NUMBER, "shape": _SIZES, "dtype": _DTYPE}, {"count": _COUNT}),
}
_PAD_AXIS = {"axis": _INT, "to": _INT, "value": _NUMBER}, {"from": _INT}
# Keys whose value may be this, and the field of a table that it stands for.
_PLAIN: dict[str, tuple[str, Form]] = {
    "apply": ("function", _TEXT),
    "scale": ("by", _FACTOR),
    "add": ("by", _FACTOR),
    "transpose": ("axes", _INTS),
    "reshape": ("to", _NEW_SHAPE),
}


class _Table:
    """A table of the file. Its keys are taken one by one, and its problems are collected.
    `patterns` are the regexes of the table's rule. Expressions may name the `numbers`."""

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
        """The value of a key; None if it is missing or has another form."""
        value = self.table.pop(key, None)
        if value is None:
            if needed:
                self.wrong(f"`{key}` is missing")
            return None
        fits, words = form
        if form in _NUMERIC:
            try:
                value = self.evaluated(value)
            except ValueError as error:
                self.wrong(f"`{key}`: {error}")
                return None
        if not fits(value):
            self.wrong(f"`{key}` is not {words}: {value!r}")
            return None
        return _frozen(value)

    def evaluated(self, value: Any) -> Any:
        """A value with its expressions evaluated."""
        if isinstance(value, list):
            return list(map(self.evaluated, value))
        return evaluate(value, self.numbers) if isinstance(value, str) else value

    def inner(self, key: str) -> "_Table | None":
        """The table of a key, if it has one."""
        if (table := self.take(key, _TABLE)) is None:
            return None
        label = f"{self.label}: `{key}`"
        return _Table(label, table, self.problems, self.patterns, self.numbers)

    def fields(
        self, key: str, needed: Mapping[str, Form], others: Mapping[str, Form] = {}
    ) -> dict[str, Any] | None:
        """The values of a key's table; None if it has none, or one that is needed is missing."""
        table = self.inner(key)
        if table is None:
            return None
        values = {name: table.take(name, form, True) for name, form in needed.items()}
        missing = None in values.values()
        values |= {name: table.take(name, form) for name, form in others.items()}
        table.nothing_else()
        return None if missing else values

    def values(self, key: str) -> dict[str, Any] | None:
        """The values of an operation; None if it has none, or they are wrong."""
        if (given := self.table.get(key)) is None:
            return None
        needed, others = _FIELDS.get(key, ({}, {}))
        if key in _PLAIN and not (needed and isinstance(given, dict)):
            name, form = _PLAIN[key]
            value = self.take(key, form)
            return None if value is None else dict.fromkeys((*needed, *others)) | {name: value}
        if key == "pad" and isinstance(given, dict) and "widths" not in given:
            needed, others = _PAD_AXIS
        return self.fields(key, needed, others)

    def replacement(
        self, key: str, value: str | int | None, names: Collection[str] = ()
    ) -> Replacement | None:
        """A replacement, or the group of a number."""
        if value is None:
            return None
        text = f"\\g<{value}>" if isinstance(value, int) else value

        def named(name: re.Match[str]) -> str:
            value = self.numbers.get(name[0])
            return str(int(value)) if isinstance(value, int) else name[0]

        if self.numbers:
            # `{{` and `}}` are braces themselves.
            text = re.sub(r"\{\{|\}\}|\{[^{}]+\}", lambda braces: _NAME.sub(named, braces[0]), text)
        try:
            return parse_replacement(text, self.patterns, names)
        except ValueError as error:
            self.wrong(f"`{key}`: {error}")
            return None

    def nothing_else(self) -> None:
        """Reports the keys that were not taken."""
        for key in self.table:
            first = ": put it before the first rule" if key in ("init", "to") else ""
            self.wrong(f"`{key}` is not known{first}")

    def wrong(self, text: str) -> None:
        self.problems.append(f"{self.label}: {text}")


def _frozen(value: Any) -> Any:
    """A value with tuples for lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _rule(
    number: int, table: dict[str, Any], problems: list[str], numbers: Mapping[str, float]
) -> Rule | None:
    """A rule; None if its `when` is 0."""
    entry = _Table(f"rule {number}", table, problems, (), numbers)
    if entry.take("when", _NUMBER) == 0:
        return None
    source = entry.take("from", _ONE_OR_MORE, needed="fill" not in table)
    texts = (source,) if isinstance(source, str) else source or ()
    patterns = []
    for text in texts:
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            entry.wrong(str(error))
    if len(patterns) == len(texts) > 0:
        entry.label = f"rule {number}, {' + '.join(f'`{text}`' for text in texts)}"
    entry.patterns = patterns
    _check_keys(entry, isinstance(source, tuple))
    if "fill" in table:
        return _filled(number, entry)
    drop = entry.take("drop", _TRUE) is True
    optional = entry.take("optional", _TRUE) is True
    nest = _nest(entry)
    names = ["outer", "inner", "flat"] if "nest" in table else []
    if nest is not None:
        names = ["outer", "inner"] if nest.flat else ["flat"]
    to = entry.take("to", _ONE_OR_MORE)
    several = isinstance(to, tuple)
    to = [entry.replacement("to", text, names) for text in (to if several else (to,))]
    each = tuple(step for key in _EACH if (step := _step(entry, key)) is not None)
    regroup = Step("copies", {"count": len(to)}) if several else None
    by = None
    if entry.take("equal", _TRUE):
        regroup = Step("equal", {})
    for key in _REGROUP[:-1]:
        if (values := entry.values(key)) is None:
            continue
        regroup = Step(key, values)
        if key in PARTS:
            to = _parts(entry, regroup, names)
        else:
            _check_order(entry, regroup)
            by = entry.replacement(f"{key}`: `by", values["by"], names)
    entry.nothing_else()
    paths = tuple(path for path in to if path is not None)
    return Rule(
        number, tuple(patterns), paths, drop, each, regroup, by, nest=nest, optional=optional
    )


def _filled(number: int, entry: _Table) -> Rule | None:
    """A rule for leaves of a constant."""
    values = entry.values("fill")
    given = entry.take("to", _ONE_OR_MORE)
    entry.nothing_else()
    if values is None:
        return None
    places = (given,) if isinstance(given, str) else given or ()
    if values["count"] is not None:
        pairs = itertools.product(places, range(values["count"]))
        places = tuple(place.replace("{}", str(n)) for place, n in pairs)
    fill = Filled(values["shape"], parse_dtype(values["dtype"]), values["value"])
    return Rule(number, tuple(entry.patterns), fill=fill, places=places)


def _check_keys(entry: _Table, several: bool) -> None:
    """Reports keys of a rule that are missing or cannot be combined."""
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
                f"`{key}`: `by` cannot be combined with a list in `from`: the list is its order"
                if several
                else f"`{key}`: `by` is missing, the group with the number of the piece"
            )


def _nest(entry: _Table) -> Nest | None:
    parts = ["i"] if entry.table.keys() & {"split", "unstack"} else []
    groups = ("flat", "outer", "inner")
    values = entry.fields("nest", {"sizes": _SIZES}, dict.fromkeys(groups, _GROUP))
    if values is None:
        return None
    if {key for key in groups if values[key] is not None} not in ({"flat"}, {"outer", "inner"}):
        entry.wrong("`nest`: it needs either `flat`, or `outer` and `inner`")
    found = (entry.replacement(f"nest`: `{key}", values[key], parts) for key in groups)
    return Nest(values["sizes"], *found)


def _step(entry: _Table, key: str) -> ops.Operation | Step | None:
    """The operation of a key on each leaf, if the rule has it."""
    values = entry.values(key)
    if values is None:
        return None
    match key:
        case "apply":
            return _applied(entry, **values)
        case "scale":
            return ops.Scale(values["by"], values["rounds"] is True)
        case "add":
            return ops.Add(values["by"])
        case "interleave" | "deinterleave":
            return ops.Interleave(**values, undo=key == "deinterleave")
        case "rope":
            return ops.Interleave(values["axis"], 2, values["head_size"], values["to"] == "halves")
        case "transpose":
            return ops.Transpose(values["axes"])
        case "pad" if "widths" in values:
            return ops.Pad(values["widths"], values["fill"])
        case "crop":
            return ops.Crop(values["widths"])
        case "reshape" if len(values["to"]) > MOST_AXES:
            entry.wrong(f"`reshape`: arrays have {MOST_AXES} axes at most")
    return Step(key, values)


def _applied(entry: _Table, function: str, shape: Any, dtype: str | None) -> ops.Apply | None:
    """The function of a rule, which is imported."""
    try:
        loaded: Any = load_function(function)
    except ReshardError as error:
        entry.wrong("; ".join([error.summary, *error.problems]))
        return None
    if not callable(loaded.function):
        entry.wrong(f"`apply`: {function} is not a function")
    return ops.Apply(loaded, function, shape, None if dtype is None else parse_dtype(dtype))


def _parts(entry: _Table, step: Step, names: Collection[str]) -> list[Replacement | None]:
    """The new paths of the parts of a leaf. Adds their number to the step."""
    into, sizes = step.values.pop("into"), step.values.get("sizes")
    one = isinstance(into, str)
    step.values["count"] = None if one else len(into)
    if step.key == "split" and one and sizes is None:
        entry.wrong("`split`: `sizes` is missing, as `into` does not give the number of parts")
    if sizes is not None and not one and len(sizes) != len(into):
        entry.wrong(f"`split`: `sizes` has {len(sizes)}, `into` has {len(into)}")
    texts = [into] if one else into
    return [entry.replacement(f"{step.key}`: `into", text, {"i", *names}) for text in texts]


def _check_order(entry: _Table, step: Step) -> None:
    order, by = step.values["order"], step.values["by"]
    if order is not None and len(set(order)) < len(order):
        entry.wrong(f"`{step.key}`: `order` has a piece twice")
    if order is not None and by is None:
        entry.wrong(f"`{step.key}`: `order` requires `by`")
