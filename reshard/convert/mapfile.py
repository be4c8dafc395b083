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
import dataclasses
import os
import pathlib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from reshard.arrays import operations as ops
from reshard.arrays.boxes import MOST_AXES
from reshard.arrays.dtypes import kind_of, parse_dtype
from reshard.convert.leafmap import Filled
from reshard.convert.map_rules import (
    PARTS,
    Map,
    Pattern,
    Rule,
    Step,
    Template,
    evaluate,
    parse_pattern,
    parse_template,
)
from reshard.convert.user_code import load_function
from reshard.errors import ArgumentError, ReshardError
from reshard.tree import split_path

# Stands for an open leaf in the draft map of a refused conversion.
TODO = "TODO"
_OPEN = re.compile(rf"""["']{TODO}\b""")
_EXAMPLE = "\n      ".join(["[[rule]]", r"from = '^params/layer_(\d+)/'", r"to = 'layers/\1/'"])
_REGROUP = ("split", "unstack", "concat", "stack", "equal")
# Names in the braces of a replacement, except names of groups. `{{` and `}}` are braces themselves.
_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]+\}")
_NAME = re.compile(r"(?<![\\<\w])[^\W\d]\w*")
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
    return bool(_OPEN.search(line))


def read_map(path: str | os.PathLike[str], numbers: Mapping[str, float] = {}) -> Map:
    """The rules of a map file, whose expressions may name these numbers. Raises ArgumentError: the
    file cannot be read, has a `TODO` left, or its rules are wrong: all problems."""
    try:
        text = pathlib.Path(path).read_bytes().decode()
        document = _parsed(text)
    except (OSError, ValueError) as error:
        hints = [] if isinstance(error, OSError) else [_EXAMPLE]
        raise ArgumentError(f"{path}: it cannot be read", [str(error)], hints) from error
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
    file = _File([], dict(numbers))
    variables = file.checked(document.get("vars", {}), _TABLE, "the file: `vars`") or {}
    for key, given in variables.items():
        if (value := file.checked(given, _NUMBER, f"the file: `vars`: `{key}`")) is not None:
            file.numbers[key] = value
    rest = {key: value for key, value in document.items() if key != "vars"}
    top = file.checked(rest, _DOCUMENT, "the file") or {}
    optional = top["optional"] or {}
    initial, may, ignored = (
        globs or () for globs in (top["init"], optional.get("init"), optional.get("drop"))
    )
    for key, globs in (("init", initial), ("optional", (*may, *ignored))):
        for glob in globs:
            try:
                split_path(glob)
            except ArgumentError as error:
                file.problems.append(f"`{key}`: {error.summary}")
    rules = [_rule(file, number, table) for number, table in enumerate(top["rule"] or (), 1)]
    if file.problems:
        raise ArgumentError(f"{name}: its rules cannot be read", file.problems)
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
        return _is_text(value) and kind_of(parse_dtype(value)) in "biufc"
    return False


_API = (lambda value: value in ("nnx", "linen"), "`nnx` or `linen`")
_TRUE = (lambda value: value is True, "true")
_TEXT = (_is_text, "a text")
_TEXTS = (_list_of(_is_text), "a list of texts")
_ONE_OR_MORE = (
    lambda v: _is_text(v) or (_list_of(_is_text)(v) and v != []),
    "a text or a list of them",
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
        and len(v) <= MOST_AXES
    ),
    f"a list of at most {MOST_AXES} sizes, where one may be -1",
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
    """The problems of a file, and the numbers that its expressions may name."""

    problems: list[str]
    numbers: dict[str, float]

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
            self.problems.append(f"{where} is not {words}: {value!r:.80}")
            return None
        return _frozen(value)

    def _table(self, table: Any, form: dict[str, Any], where: str) -> dict[str, Any] | None:
        if not isinstance(table, dict):
            self.problems.append(f"{where} is not a table: {table!r:.80}")
            return None
        made, wrong = dict[str, Any](), False
        for name, inner in form.items():
            key = name.rstrip("?")
            value, made[key] = table.get(key), None
            if value is None and key == name:
                self.problems.append(f"{where}: `{key}` is missing")
            elif value is not None:
                if key in _ALONE and not isinstance(value, dict):
                    value = {next(iter(inner)): value}
                if key == "pad" and isinstance(value, dict) and "widths" in value:
                    inner = _PAD
                made[key] = self.checked(value, inner, f"{where}: `{key}`")
            wrong |= key == name and made[key] is None
        for key in (key for key in table if key not in made):
            near = get_close_matches(key, made, 1)
            hint = f": did you mean `{near[0]}`?" if near else ""
            hint = ": put it before the first rule" if key == "init" else hint
            self.problems.append(f"{where}: `{key}` is not known{hint}")
        return None if wrong else made

    def _evaluated(self, value: Any) -> Any:
        """A value with its expressions evaluated."""
        if isinstance(value, list):
            return list(map(self._evaluated, value))
        return evaluate(value, self.numbers) if isinstance(value, str) else value

    def template(
        self, value: str | int, patterns: Sequence[Pattern], names: Collection[str], where: str
    ) -> Template:
        """A replacement, or the group of a number; the empty one, and a problem, if it is wrong."""

        def named(name: re.Match[str]) -> str:
            value = self.numbers.get(name[0])
            return str(int(value)) if isinstance(value, int) else name[0]

        text = f"\\g<{value}>" if isinstance(value, int) else value
        if self.numbers:
            text = _BRACES.sub(lambda braces: _NAME.sub(named, braces[0]), text)
        try:
            return parse_template(text, patterns, names)
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
    where, given = f"rule {number}", dict(table)
    if file.checked(given.pop("when", 1), _NUMBER, f"{where}: `when`") == 0:
        return None
    if _ONE_OR_MORE[0](given.get("from")):
        where += f", {' + '.join(f'`{text}`' for text in _texts(given['from']))}"
    values: dict[str, Any] = file.checked(given, _RULE, where) or {}
    problems = list(_wrong_keys(given))
    patterns, each = list[Pattern](), list[ops.Operation | Step]()
    for text in _texts(values["from"]):
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            problems.append(str(error))
    for key, make in _EACH.items():
        try:
            each += [] if values[key] is None else [make(values[key])]
        except ReshardError as error:
            problems.append("; ".join([error.summary, *error.problems]))
    file.problems.extend(f"{where}: {problem}" for problem in problems)
    rule = Rule(number, tuple(patterns), drop=values["drop"] is True, each=tuple(each))
    if "fill" in given:
        if (fill := values["fill"]) is None:
            return None
        places = _texts(values["to"])
        if fill["count"] is not None:
            places = [x.replace("{}", str(n)) for x in places for n in range(fill["count"])]
        constant = Filled(fill["shape"], parse_dtype(fill["dtype"]), fill["value"])
        to = tuple(Template((place,)) for place in places)
        return dataclasses.replace(rule, fill=constant, to=to)
    return dataclasses.replace(
        rule, optional=values["optional"] is True, **_regrouped(file, where, patterns, values)
    )


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
    return ops.Apply(loaded, name, values["shape"], None if dtype is None else parse_dtype(dtype))


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
