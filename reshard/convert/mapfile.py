"""The map file: a conversion as TOML to be read, reviewed, edited and used again.

    to = 'nnx'                                 # or 'linen': for the other it is run backwards
    init = ['rngs/**', '**/dropout/rngs/**']   # globs: the target's own initial value stays

    [[rule]]                                   # every leaf, one rule after another, as `re.sub`
    from = '^params/layer_(\\d+)/'
    to = 'layers/\\1/'

    [[rule]]
    from = '^(.*)/mlp/gating_einsum$'
    unstack = { axis = 0, into = ['\\1/mlp/gate_proj/kernel', '\\1/mlp/up_proj/kernel'] }

`reshard help maps` describes the keys. The operations of a rule are done in the order of `ORDER`,
and must be written in an order that makes the same.

A map is written with few rules. One rule is for rows of the map that differ only in numbers, for
all leaves of a module, or for numbered modules:

    params/layer_0/attn/q -> layers/0/attn/q
    params/layer_0/attn/k -> layers/0/attn/k      ^params/layer_(\\d+)/attn/  ->  layers/\\1/attn/
    params/layer_1/attn/q -> layers/1/attn/q
    params/layer_1/attn/k -> layers/1/attn/k

A regex must match only the paths of its rule, on either side. This is checked against all paths
that exist before or after any rule.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import tomllib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from reshard import tree
from reshard.arrays import boxes, dtypes
from reshard.arrays import operations as ops
from reshard.convert.leafmap import Filled, LeafMap, Row, Source
from reshard.convert.map_rules import (
    PARTS,
    Group,
    Map,
    Pattern,
    Rule,
    Step,
    Template,
    apply_map,
    evaluate,
    inverse,
    parse_pattern,
    parse_template,
    whole_path,
)
from reshard.convert.user_code import load_function
from reshard.errors import ArgumentError, ReshardError, TreeMismatchError

# Stands for an open leaf in the draft map of a refused conversion.
TODO = "TODO"
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


# Texts before it are closed, and it is in no comment.
_OPEN = re.compile(rf"""(?:[^"'#]|"(?:\\.|[^"\\])*"|'[^']*')*["']{TODO}\b""")
_EXAMPLE = "\n      ".join(["[[rule]]", r"from = '^params/layer_(\d+)/'", r"to = 'layers/\1/'"])
_REGROUP = ("split", "unstack", "concat", "stack", "equal")
# Levels of nested tables and lists. Map files have six.
_MAX_LEVELS = 50
_LARGEST = 1 << 63


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML document without deep nesting and huge numbers, which could not be shown.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not TOML, is nested too deeply, or has a number of more than 64 bits.
    """
    return _parsed(pathlib.Path(path).read_bytes().decode())


def _parsed(text: str) -> dict[str, Any]:
    """The document in a text. Raises as `read_toml`."""
    with contextlib.suppress(RecursionError):
        document = tomllib.loads(text)
        level: list[Any] = [document]
        for _ in range(_MAX_LEVELS):
            tables = [node.values() if isinstance(node, dict) else node for node in level]
            level = [value for node in tables if not isinstance(node, str) for value in node]
            if any(isinstance(value, int) and not -_LARGEST <= value < _LARGEST for value in level):
                raise ValueError("it has a number of more than 64 bits")
            level = [value for value in level if isinstance(value, dict | list)]
            if not level:
                return document
    raise ValueError("the TOML is nested too deeply")


def is_open(line: str) -> bool:
    """Whether a line of a draft map has a `TODO`."""
    return bool(_OPEN.match(line))


def read_map(path: str | os.PathLike[str], numbers: Mapping[str, float] = {}) -> Map:
    """The rules of a map file, whose expressions may name these numbers. Raises ArgumentError: the
    file cannot be read, has a `TODO` left, or its rules are wrong: all problems."""
    try:
        text = pathlib.Path(path).read_bytes().decode()
        document = _parsed(text)
    except (OSError, ValueError) as error:
        why, hints = str(error), [_EXAMPLE]
        if isinstance(error, OSError):
            file, names = pathlib.Path(path), []
            with contextlib.suppress(OSError):  # the name is too long, or the directory is closed
                names = [other.name for other in file.parent.glob("*") if other != file]
            near = get_close_matches(file.name, names, 1, 0.8)
            why = error.strerror or why
            hints = [f"the nearest file is `{file.with_name(other)}`" for other in near]
            hints.append("the names of ready maps begin with `hf:`, for example hf:llama-tunix")
        raise ArgumentError(f"{path}: it cannot be read", [why], hints) from error
    problems = [f"line {n}: {line}" for n, line in enumerate(text.splitlines(), 1) if is_open(line)]
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
    file = _File([], dict(numbers), [])
    variables = file.checked(document.get("vars", {}), _TABLE, "the file: `vars`") or {}
    for key, given in variables.items():
        where = f"the file: `vars`: `{key}`"
        if (value := file.checked(given, _NUMBER, where)) is None:
            continue
        if file.numbers.setdefault(key, value) != value:
            file.problems.append(f"{where} is {value}, but config.json has {file.numbers[key]}")
    rest = {key: value for key, value in document.items() if key != "vars"}
    top = file.checked(rest, _DOCUMENT, "the file") or {}
    optional = top["optional"] or {}
    initial, may, ignored = (
        globs or () for globs in (top["init"], optional.get("init"), optional.get("drop"))
    )
    for key, globs in (("init", initial), ("optional", (*may, *ignored))):
        for glob in globs:
            try:
                tree.split_path(glob)
            except ArgumentError as error:
                file.problems.append(f"`{key}`: {error.summary}")
    rules = [_rule(file, number, table) for number, table in enumerate(top["rule"] or (), 1)]
    if file.problems:
        raise ArgumentError(f"{name}: its rules cannot be read", file.problems, file.hints)
    return Map(name, tuple(filter(None, rules)), initial, may, ignored, to=top["to"])


# Whether a value has a form, and the form in words.
_Check = tuple[Callable[[Any], bool], str]
# The form of a value; or of the fields of a table, of which those with `?` may be missing.
_Form = _Check | dict[str, Any]


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_dtype(value: Any) -> bool:
    with contextlib.suppress(ValueError):
        return _is_text(value) and dtypes.kind_of(dtypes.parse_dtype(value)) in "biufc"
    return False


_API = (lambda value: value in ("nnx", "linen"), "`nnx` or `linen`")
_TRUE = (lambda value: value is True, "true")
_TEXT = (_is_text, "a text")
_TEXTS = (_list_of(_is_text), "a list of texts")
_ONE_OR_MORE = (
    lambda v: _is_text(v) or (_list_of(_is_text)(v) and v != []),
    "a text or a list of texts",
)
_GROUP = (lambda v: _is_size(v) or _is_text(v), "a group or a text")
_TABLE = (lambda value: isinstance(value, dict), "a table")
_TABLES = (_list_of(_TABLE[0]), "a list of tables")
_ROPE = (lambda value: value in ("pairs", "halves"), "`pairs` or `halves`")
_DTYPE = (_is_dtype, "a dtype")
_INT = (_is_int, "a whole number")
_COUNT = (lambda v: _is_int(v) and 0 < v <= 1 << 16, "a number from 1 to 65536")
_INTS = (_list_of(_is_int), "a list of whole numbers")
_SIZES = (_list_of(_is_size), "a list of sizes")
_NUMBER = (_is_number, "a number")
_FACTOR = (lambda value: _is_number(value) and value != 0, "a number other than 0")
_WIDTHS = (
    _list_of(lambda value: _list_of(_is_size)(value) and len(value) == 2),
    "a list of two sizes for each axis",
)
_NEW_SHAPE = (
    lambda v: (
        _list_of(_is_int)(v)
        and v.count(-1) <= 1
        and min(v, default=0) >= -1
        and len(v) <= boxes.MOST_AXES
    ),
    f"a list of at most {boxes.MOST_AXES} sizes; one may be -1",
)
# Their numbers may be expressions.
_NUMERIC = (_INT, _COUNT, _INTS, _SIZES, _NUMBER, _FACTOR, _WIDTHS, _NEW_SHAPE)
_PAD: _Form = {"widths": _WIDTHS, "fill": _NUMBER}
_INTERLEAVE: _Form = {"axis": _INT, "parts": _INT, "block?": _INT}
_RULE: _Form = {
    "from?": _ONE_OR_MORE,
    "to?": _ONE_OR_MORE,
    "drop?": _TRUE,
    "optional?": _TRUE,
    "nest?": {"sizes": _SIZES, "flat?": _GROUP, "outer?": _GROUP, "inner?": _GROUP},
    "fill?": {"value": _NUMBER, "shape": _SIZES, "dtype": _DTYPE, "count?": _COUNT},
    "apply?": {"function": _TEXT, "shape?": _SIZES, "dtype?": _DTYPE},
    "scale?": {"by": _FACTOR, "rounds?": _TRUE},
    "add?": _FACTOR,
    "interleave?": _INTERLEAVE,
    "deinterleave?": _INTERLEAVE,
    "rope?": {"axis": _INT, "head_size": _INT, "to": _ROPE},
    "transpose?": _INTS,
    "reshape?": {"to": _NEW_SHAPE, "from?": _SIZES},
    "pad?": {"axis": _INT, "to": _INT, "value": _NUMBER, "from?": _INT},
    "crop?": {"widths": _WIDTHS},
    "split?": {"axis": _INT, "into": _ONE_OR_MORE, "sizes?": _SIZES},
    "unstack?": {"axis": _INT, "into": _ONE_OR_MORE},
    "concat?": {"axis": _INT, "by?": _GROUP, "order?": _TEXTS, "sizes?": _SIZES},
    "stack?": {"axis": _INT, "by?": _GROUP, "order?": _TEXTS, "names?": _TEXTS},
    "equal?": _TRUE,
}
# A value that is no table stands for its first field.
_ALONE = ("apply", "scale", "reshape")
_OUTSIDE: _Form = {"init?": _TEXTS, "drop?": _TEXTS}
_DOCUMENT: _Form = {"to?": _API, "init?": _TEXTS, "optional?": _OUTSIDE, "rule?": _TABLES}


class _File(NamedTuple):
    """The problems of a file, the numbers that its expressions may name, and hints."""

    problems: list[str]
    numbers: dict[str, float]
    hints: list[str]

    def checked(self, value: Any, form: _Form, where: str) -> Any:
        """A value, with its expressions evaluated, and tuples for lists; None, and the problems, if
        it lacks the form. A table has None for a field that is missing or wrong."""
        if isinstance(form, dict):
            return self._table(value, form, where)
        fits, words = form
        try:
            value = self._evaluated(value) if form in _NUMERIC else value
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            return None
        if not fits(value):
            self.problems.append(f"{where} must be {words}, not {value!r:.80}")
            return None
        return _frozen(value)

    def _table(self, table: Any, form: dict[str, Any], where: str) -> dict[str, Any] | None:
        if not isinstance(table, dict):
            self.problems.append(f"{where} must be a table, not {table!r:.80}")
            return None
        made: dict[str, Any] = {name.rstrip("?"): None for name in form}
        for key, value in table.items():
            inner: Any = form.get(f"{key}?", form.get(key))
            if key not in made:
                near = get_close_matches(key, made, 1)
                hint = f": did you mean `{near[0]}`?" if near else ""
                hint = ": put it before the first rule" if key == "init" else hint
                self.problems.append(f"{where}: `{key}` is not known{hint}")
                continue
            if key in _ALONE and not isinstance(value, dict):
                value = {next(iter(inner)): value}
            if key == "pad" and isinstance(value, dict) and "widths" in value:
                inner = _PAD
            made[key] = self.checked(value, inner, f"{where}: `{key}`")
        needed = [name for name in form if name[-1] != "?"]
        missing = [f"{where}: `{key}` is missing" for key in needed if key not in table]
        self.problems.extend(missing)
        return None if any(made[key] is None for key in needed) else made

    def _evaluated(self, value: Any) -> Any:
        """A value with its expressions evaluated."""
        if isinstance(value, list):
            return list(map(self._evaluated, value))
        return evaluate(value, self.numbers) if isinstance(value, str) else value

    def template(
        self, value: str | int, patterns: Sequence[Pattern], names: Collection[str], where: str
    ) -> Template:
        """A replacement, or the group of a number; the empty one, and a problem, if it is wrong."""
        text = f"\\g<{value}>" if isinstance(value, int) else value
        try:
            return parse_template(text, patterns, names, self.numbers)
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            return Template(())


def _frozen(value: Any) -> Any:
    """A value with tuples for lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _texts(value: str | Sequence[str] | None) -> Sequence[str]:
    """The texts of a value that may be a text or a list of them."""
    return (value,) if isinstance(value, str) else value or ()


def _rule(file: _File, number: int, table: dict[str, Any]) -> Rule | None:
    """A rule; None if its `when` is 0."""
    where, given = f"rule {number}", {key: table[key] for key in table if key != "when"}
    if "when" in table and file.checked(table["when"], _NUMBER, f"{where}: `when`") == 0:
        return None
    if _ONE_OR_MORE[0](given.get("from")):
        where += f", {' + '.join(f'`{text}`' for text in _texts(given['from']))}"
    values: dict[str, Any] = file.checked(given, _RULE, where) or {}
    problems, turns = list(_wrong_keys(given)), _turns(given)
    if not problems and len(turns) > 1:
        done = ", ".join(f"`{key}`" for key in ORDER if key in table)
        problems.append(f"it is done in the order {done}: write it so, or write two rules")
        rules = "\n".join(map(_rule_toml, _one_by_one(table, turns))).rstrip("\n")
        text = "".join(f"\n      {line}" for line in rules.split("\n"))
        file.hints.append(f"rule {number} in the order in which it is written:{text}")
    patterns, each = list[Pattern](), list[ops.Operation | Step]()
    for text in _texts(values["from"]):
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            problems.append(str(error))
    for key, make in _EACH.items():
        if values[key] is None:
            continue
        try:
            each.append(make(values[key]))
        except ReshardError as error:
            problems.append("; ".join([error.summary, *error.problems]))
    file.problems.extend(f"{where}: {problem}" for problem in problems)
    drop, optional = values["drop"] is True, values["optional"] is True
    if "fill" not in given:
        found = _regrouped(file, where, patterns, values)
        return Rule(
            number, tuple(patterns), drop=drop, each=tuple(each), optional=optional, **found
        )
    if (fill := values["fill"]) is None:
        return None
    places = _texts(values["to"])
    if fill["count"] is not None:
        places = [x.replace("{}", str(n)) for x in places for n in range(fill["count"])]
    constant = Filled(fill["shape"], dtypes.parse_dtype(fill["dtype"]), fill["value"])
    return Rule(number, tuple(patterns), tuple(Template((x,)) for x in places), fill=constant)


def _regrouped(
    file: _File, where: str, patterns: Sequence[Pattern], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a rule for its new paths and for the leaves that it splits or joins."""

    def template(value: str | int, key: str, names: Collection[str]) -> Template:
        return file.template(value, patterns, names, f"{where}: {key}")

    key = next((key for key in _REGROUP if values[key] is not None), "")
    fields: Any = values[key] if key else None
    to, nest = values["to"], values["nest"]
    regroup, names, by = None, set[str](), None
    if nest is not None:
        group_sizes = nest.pop("sizes")
        numbers = {name: value for name, value in nest.items() if value is not None}
        if numbers.keys() not in ({"flat"}, {"outer", "inner"}):
            file.problems.append(f"{where}: `nest`: it needs either `flat`, or `outer` and `inner`")
        part = {"i"} if key in PARTS else set[str]()
        texts = {n: template(value, f"`nest`: `{n}`", part) for n, value in numbers.items()}
        names, nest = {"outer", "inner"} if "flat" in numbers else {"flat"}, (group_sizes, texts)
    if key in PARTS:
        to, sizes = fields.pop("into"), fields.get("sizes")
        fields["count"] = None if isinstance(to, str) else len(to)
        if key == "split" and sizes is None and isinstance(to, str):
            text = "`split`: `sizes` is missing, as `into` does not give the number of parts"
            file.problems.append(f"{where}: {text}")
        if sizes is not None and fields["count"] not in (None, len(sizes)):
            text = f"`split`: `sizes` has {len(sizes)}, `into` has {len(to)}"
            file.problems.append(f"{where}: {text}")
        names |= {"i"}
    elif isinstance(fields, dict):
        order = fields["order"]
        if order is not None and len(set(order)) < len(order):
            file.problems.append(f"{where}: `{key}`: `order` has a piece twice")
        if order is not None and fields["by"] is None:
            file.problems.append(f"{where}: `{key}`: `order` requires `by`")
        if fields["by"] is not None:
            by = template(fields["by"], f"`{key}`: `by`", names)
    if key:
        regroup = Step(key, {} if fields is True else fields)
    elif isinstance(to, tuple):
        regroup = Step("copies", {"count": len(to)})
    name = f"`{key}`: `into`" if key in PARTS else "`to`"
    paths = tuple(template(text, name, names) for text in _texts(to))
    return {"to": paths, "regroup": regroup, "by": by, "nest": nest}


def _wrong_keys(table: Mapping[str, Any]) -> Iterator[str]:
    """Why keys of a rule are missing or cannot be combined."""
    keys, several = set(table), isinstance(table.get("from"), list)
    kinds = [key for key in ("drop", "fill", *_REGROUP) if key in keys]
    if len(kinds) > 1:
        yield f"{' and '.join(f'`{key}`' for key in kinds)} need two rules"
        return
    kind = "".join(kinds)
    others = {"drop": {"to", "nest", *_EACH}, "split": {"to"}, "unstack": {"to"}}
    others["fill"] = {"nest", "optional", *_EACH}
    if wrong := [f"`{key}`" for key in table if key in others.get(kind, ())]:
        yield f"`{kind}` cannot be combined with {' and '.join(wrong)}"
    joins = kind in ("concat", "stack", "equal")
    if "from" not in keys and kind != "fill":
        yield "`from` is missing"
    if kind == "fill" and ("to" in keys) == ("from" in keys):
        yield "`fill` needs either `to` or `from`"
    if joins and not isinstance(table.get("to"), str):
        yield f"`{kind}` needs one path in `to`"
    if not (kind or keys & {"to", *_EACH}):
        yield "it has no effect: give it `to`, an operation or `drop = true`"
    if several and not (joins or kind == "fill"):
        yield "only `concat`, `stack` and `equal` take several regexes"
    if kind == "equal" and not several:
        yield "`equal` needs a list in `from`"
    if kind in ("concat", "stack") and isinstance(table[kind], dict):
        if "by" in table[kind] and several:
            yield f"`{kind}`: `by` cannot be combined with a list in `from`, which has an order"
        if not ("by" in table[kind] or several):
            yield f"`{kind}`: `by` is missing, the group with the number of the piece"


def _apply(values: Mapping[str, Any]) -> ops.Apply:
    """The operation of a function, which is imported. Raises ReshardError: there is none."""
    name, dtype = values["function"], values["dtype"]
    loaded: Any = load_function(name)
    if not callable(loaded.function):
        raise ArgumentError(f"`apply`: {name} is not a function")
    return ops.Apply(
        loaded, name, values["shape"], None if dtype is None else dtypes.parse_dtype(dtype)
    )


# The keys that change each leaf, in this order, and the operations of their values.
_EACH: dict[str, Callable[[Any], ops.Operation | Step]] = {
    "apply": _apply,
    "scale": lambda v: ops.Scale(v["by"], v["rounds"] is True),
    "add": ops.Add,
    "interleave": lambda v: ops.Interleave(**v),
    "deinterleave": lambda v: ops.Interleave(**v, undo=True),
    "rope": lambda v: ops.Interleave(v["axis"], 2, v["head_size"], v["to"] == "halves"),
    "transpose": ops.Transpose,
    "reshape": lambda v: Step("reshape", v),
    "pad": lambda v: ops.Pad(**v) if "widths" in v else Step("pad", v),
    "crop": lambda v: ops.Crop(**v),
}


# The order in which the operations of a rule are done.
ORDER = (*_EACH, *_REGROUP)
# Operations that change each element alone, and operations that only move or remove elements: one
# of these and one of those make the same in either order.
_ELEMENTWISE = {"scale", "add"}
_POSITIONS = {*ORDER} - {*_ELEMENTWISE, "apply", "pad", "equal"}


def _turns(table: Mapping[str, Any]) -> list[list[str]]:
    """The operations of a rule as they are written, cut before each one that would be done too
    early in one rule with those before it."""
    turns: list[list[str]] = [[]]
    for key in filter(ORDER.__contains__, table):
        late = {*turns[-1]}.intersection(ORDER[ORDER.index(key) :])
        if late - (
            _POSITIONS if key in _ELEMENTWISE else _ELEMENTWISE if key in _POSITIONS else set()
        ):
            turns.append([])
        turns[-1].append(key)
    return turns


def _one_by_one(table: dict[str, Any], turns: Sequence[Sequence[str]]) -> Iterator[_Setting]:
    """Rules that do the operations of a rule in its written order. A leaf that was split or joined
    has `~` in its path until the next of them."""
    both = {key: table[key] for key in ("when", "optional") if key in table}
    names = {key: table[key] for key in ("nest", "to") if key in table}
    sources = table["from"]
    for turn in turns:
        is_last, rule = turn is turns[-1], {key: table[key] for key in turn}
        key = next(filter(_REGROUP.__contains__, turn), None)
        rule |= names if key or is_last else {}
        if key in PARTS and not is_last:
            into = rule[key]["into"]
            marked = f"{into}~" if isinstance(into, str) else [f"{text}~" for text in into]
            rule[key] = rule[key] | {"into": marked}
        elif key and not is_last:
            rule["to"] += "~"
        for source in [sources] if key else _texts(sources):
            yield {"from": source, **both, **rule}
        if key:
            sources, names = "~", {"to": ""}


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
    own: Collection[tree.Path] = (),
    others: Collection[tree.Path] = (),
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
            globs = list(map(tree.format_glob, own))
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
            rules.setdefault(("to", value), []).append(tree.format_path(path))
    for path, value in found.must_be_zero.items():
        if value.fill is not None:
            rules.setdefault(("from", value), []).append(whole_path(tree.format_path(path)).text)
    return [
        _rule_toml({key: paths, "fill": {"value": v.fill, "shape": v.shape, "dtype": v.dtype.name}})
        for (key, v), paths in rules.items()
    ]


def draft_map(
    decided: LeafMap,
    to: str,
    own: Collection[tree.Path],
    open_rows: Sequence[Row],
    missing: Collection[tree.Path],
) -> str:
    """The text of a map file for the decided leaves, as `write_map` has it, with a `TODO` for each
    open leaf: for the source leaves of `open_rows`, whose outputs are the target leaves that they
    may become, and for `missing` target leaves."""
    others = {*missing, *(path for row in open_rows for path in (*row.inputs, *row.outputs))}
    resets = [_Mark(f"{TODO} {tree.format_glob(path)}") for path in missing]
    rules, mark = [write_map(decided, resets, to, own, others)], _Mark(TODO)
    for row in open_rows:
        texts = [str(Template((tree.format_path(path),))) for path in row.outputs]
        near = [*map(toml_text, texts[:MAX_CANDIDATES]), *["..."][: len(texts) > MAX_CANDIDATES]]
        rule: _Setting = {"from": whole_path(tree.format_path(row.inputs[0])).text}
        if isinstance(row.operation, ops.Unstack):
            rule["unstack"] = {"axis": row.operation.axis, "into": [mark] * len(texts)}
            comment = ", ".join(near)
        else:
            rule["to"] = mark
            comment = " or ".join(near) or (
                "no open leaf has its shape: it may need an operation; `drop = true` leaves it out"
            )
        rules.append(f"{_rule_toml(rule)[:-1]}  # {comment}\n")
    return "\n".join(rules)


def _says(text: str, found: LeafMap, own: Collection[tree.Path]) -> bool:
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
    texts = {tree.glob_text(path): path for path in leaves}
    named = {texts[text] for glob in undone.initial for text in tree.named_by(texts, glob)}
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
    return _rule_toml(rule, row.origin)


def rules_of(rows: Sequence[Row], leaves: Mapping[tree.Path, boxes.Shape]) -> list[str]:
    """The rules for rows on different leaves of these shapes."""
    settings = _settings(rows, leaves)
    blocks = _blocks(rows, settings, leaves)
    return [_rule_of(rows[b.rows[0]], settings[b.rows[0]], b) for b in blocks]


def renaming_rules(
    pairs: Iterable[tuple[tree.Path, tree.Path, bool]], leaves: Collection[tree.Path]
) -> list[str]:
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
    pairs: Iterable[tuple[tree.Path, tree.Path]], leaves: Collection[tree.Path], axes: Sequence[int]
) -> list[str]:
    """Rules that unstack modules: pairs of a module's path and the beginning of its layers' paths.
    They take the first of several possible axes."""
    rules = []
    for body in renaming_rules(((*pair, False) for pair in pairs), leaves):
        rule = tomllib.loads(body)
        groups = re.compile(rule["from"]).groups
        into = rule["to"].removesuffix("/") + rf"{{}}/\{groups + 1}"
        text = _rule_toml(
            {"from": rule["from"] + "(.*)$", "unstack": {"axis": axes[0], "into": into}}
        )
        others = " or ".join(map(str, axes[1:]))  # the shapes do not decide
        rules.append(f"{text[:-1]}  # or axis = {others}\n" if others else text)
    return rules


def _settings(rows: Sequence[Row], leaves: Mapping[tree.Path, boxes.Shape]) -> list[_Setting]:
    """The settings of rows that are carried out in order, on leaves of these shapes."""
    shapes, settings = dict(leaves), []
    for row in rows:
        inputs = [shapes.pop(path) for path in row.inputs]
        made = inputs if row.operation is None else row.operation.shapes(inputs)
        shapes.update(zip(row.outputs, made, strict=False))  # dropped leaves have no outputs
        if isinstance(row.operation, ops.Constant):
            names = " and ".join(map(tree.format_path, row.outputs))
            raise TreeMismatchError(f"a map file cannot hold these values in memory: {names}")
        settings.append({} if row.operation is None else _setting(row.operation, inputs))
    return settings


def _setting(operation: ops.Operation, inputs: Sequence[boxes.Shape]) -> _Setting:
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


def _rule_toml(table: _Setting, origin: str = "map") -> str:
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
    rows: Sequence[Row], settings: Sequence[_Setting], others: Collection[tree.Path]
) -> list[_Block]:
    """Rows as few blocks, in an order in which they can be carried out. `others`: paths of leaves,
    on either side, that are in no row. A row without outputs drops a leaf."""
    ever = {*others, *(path for row in rows for path in (*row.inputs, *row.outputs))}
    levels: list[int] = []  # rows of one level share no path
    at: dict[tree.Path, int] = {}
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


def _modules(
    rows: Sequence[Row], kinds: Sequence[Hashable], ever: Collection[tree.Path]
) -> list[_Line]:
    """Modules whose leaves all keep their relative paths in another module, outer modules first."""
    below = collections.Counter(path[:end] for path in ever for end in range(1, len(path)))
    members: dict[tuple[tree.Path, tree.Path, Hashable], list[int]] = {}
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


def _parted(path: tree.Path, module: bool = False) -> _Parted:
    return tuple(_DIGITS.split(tree.format_path(path) + "/" * module))


def _known(ever: Collection[tree.Path]) -> dict[Hashable, list[str]]:
    """All paths before and after any rule, and the modules that they are in, by their letters."""
    known: dict[Hashable, list[str]] = {}
    modules = {path[:end] for path in ever for end in range(1, len(path))}
    for module, paths in ((False, ever), (True, modules)):
        for path in paths:
            text = tree.format_path(path) + "/" * module
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
