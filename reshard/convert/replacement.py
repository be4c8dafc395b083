"""The two texts of a map rule, and expressions. Pure.

A pattern is a regex that is searched for in printed paths. A replacement is one for `re.sub`, with
back-references. Between braces it may have arithmetic on back-references to whole numbers:

    stages/{\\1 // 4}/blocks/{\\1 % 4}/

Arithmetic has `+ - * // %`, parentheses, numbers, back-references and the names that a rule
defines. `{{` and `}}` are the braces themselves.
"""

import ast
import dataclasses
import functools
import itertools
import json
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes

from reshard.tree import format_path, glob_key, split_path

_WHOLE_PATH = re.compile(r"\^((?:[^\\.^$*+?{}\[\]|()]|\\[^a-zA-Z0-9])*)\$")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_BRACES = re.compile(r"\{\{|\}\}|\{(?P<sum>[^{}]*)\}|[{}]")
_REFERENCE = re.compile(r"\\(?:g<(\w+)>|(\d+))")
# The nodes that arithmetic on whole numbers, and on all numbers, may have.
_WHOLE = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_WHOLE += (ast.Name, ast.Load, ast.Constant, ast.UnaryOp, ast.USub, ast.BinOp)
_ALL = (*_WHOLE, ast.Div, ast.Pow)
# The largest whole number that can be computed: floats hold all smaller ones.
_LARGEST = 1 << 53
# The most characters of an expression, which limit its depth.
_MAX_EXPRESSION = 200
# The parts of templates: groups and texts.
_PATTERN = re.compile(r"(\(\\d\+\))|\\([1-9]\d?)|\\([^a-zA-Z0-9])|([^\\.^$*+?{}\[\]|()])")
_REPLACEMENT = re.compile(r"\\(?:g<([1-9]\d?)>|([1-9]\d?))|(\\)\\|([^\\]+)")
Names = Mapping[str, int]


class Mark(str):
    """A text that stands for an open leaf in the draft map of a refused conversion."""


TODO = Mark("TODO")


class Arithmetic(NamedTuple):
    """The content of braces: a Python expression, with names (`_1`, `_layer`) for back-references,
    and all of its names."""

    source: str
    names: frozenset[str]

    def value(self, match: re.Match[str], names: Names) -> int:
        """Its value. Raises ValueError if it has no value."""
        known = {}
        for name in self.names:
            group = name.removeprefix("_")
            text = "" if name in names else match[int(group) if group.isdigit() else group] or ""
            known[name] = names[name] if name in names else number(text)
        try:
            return evaluated(self.source, known)
        except ZeroDivisionError as error:
            raise ValueError("a division by zero") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A regex on printed paths. `literal` is the only path that it matches, if it is a whole path:
    `^params/w$`. Such a pattern is looked up, because compiling 100,000 takes too long."""

    text: str
    literal: str | None

    @property
    def regex(self) -> re.Pattern[str]:
        """Compiled."""
        return re.compile(self.text)


def parse_pattern(text: str) -> Pattern:
    """A pattern from the text of a regex. Raises ValueError: it is no regex."""
    whole = _WHOLE_PATH.fullmatch(text)
    if whole is not None:
        return Pattern(text, _ESCAPED.sub(r"\1", whole[1]))
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{text}` is not a regex: {error}") from error
    return Pattern(text, None)


def whole_path(text: str) -> Pattern:
    """The pattern that matches one printed path."""
    return Pattern(f"^{re.escape(text)}$", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacement:
    """The replacement of a match."""

    text: str  # in the file
    parts: tuple[str | Arithmetic, ...]  # templates of `re.sub`, and arithmetic
    constant: str | None  # the replacement of every match, if it is the same

    def expanded(self, match: re.Match[str], names: Names) -> str:
        """The replacement of this match. Raises ValueError: its arithmetic has no value."""
        if self.constant is not None:
            return self.constant
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(match.expand(part))
            else:
                value = part.value(match, names)
                if value < 0:
                    raise ValueError(f"`{self.text}` makes a number below zero, {value}")
                texts.append(str(value))
        return "".join(texts)

    def replaced(self, pattern: Pattern, text: str, names: Callable[[re.Match[str]], Names]) -> str:
        """A printed path in which every match is replaced. Raises ValueError: as `expanded`."""
        if pattern.literal is not None and self.constant is not None:
            return self.constant
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return pattern.regex.sub(self.parts[0], text)  # which parses the template only once
        return pattern.regex.sub(lambda match: self.expanded(match, names(match)), text)


def parse_replacement(
    text: str, patterns: Sequence[Pattern], names: Collection[str] = ()
) -> Replacement:
    """A replacement that may refer to groups of the patterns and, in arithmetic, to the names.
    Raises ValueError: one of these is missing, or braces do not hold arithmetic."""
    if not set(text) & set("\\{}"):
        return Replacement(text, (text,), text)
    regexes = [pattern.regex for pattern in patterns]
    parts: list[str | Arithmetic] = []
    template, end = "", 0
    for token in _BRACES.finditer(text):
        template += text[end : token.start()]
        end = token.end()
        if token["sum"] is not None:
            parts += [template, _arithmetic(token["sum"], regexes, names)]
            template = ""
        elif len(token.group()) == 2:
            template += token.group()[0]
        else:
            raise ValueError(f"`{token.group()}` has no partner; doubled it is the character")
    parts.append(template + text[end:])
    for part, regex in itertools.product(parts, regexes):
        try:
            regex.sub(part if isinstance(part, str) else "", "")  # templates are parsed first
        except (re.error, IndexError) as error:
            raise ValueError(str(error)) from error
    constant = None
    if (
        regexes
        and len(parts) == 1
        and not any(c == "g" or c.isdigit() for c in _ESCAPED.findall(text))
    ):
        constant = re.sub("^", template + text[end:], "")
    return Replacement(text, tuple(parts), constant)


def evaluate(text: str, numbers: Mapping[str, float]) -> float:
    """The value of an expression over named numbers, such as `head_dim ** -0.5`. Raises ValueError:
    it is no such expression, or it has no value."""
    names = _checked(text, text.strip(), _ALL, (int, float))
    if unknown := sorted(names - {*numbers}):
        raise ValueError(f"`{text}`: neither `[vars]` nor the config has `{unknown[0]}`")
    try:
        value = evaluated(text.strip(), numbers)
    except ArithmeticError as error:
        raise ValueError(f"`{text}` has no value: {error}") from error
    if not abs(value) <= _LARGEST:
        raise ValueError(f"`{text}` has no value")
    return value


def evaluated(source: str, names: Mapping[str, Any]) -> Any:
    """The value of a Python expression that is part of this package or was checked."""
    functions = {"**": _power, "bfloat16": lambda x: float(ml_dtypes.bfloat16(x))}
    return eval(_compiled(source), {"__builtins__": {}, **functions}, dict(names))


@functools.lru_cache(1 << 12)
def _compiled(source: str) -> types.CodeType:
    tree = _Powers().visit(ast.parse(source, mode="eval"))
    return compile(ast.fix_missing_locations(tree), source, "eval")


class _Powers(ast.NodeTransformer):
    """Turns `a ** b` into a call of `_power`, whose results are not larger than a float."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Pow):
            return node
        return ast.Call(ast.Name("**", ast.Load()), [node.left, node.right], [])


def _power(base: float, exponent: float) -> float:
    value = math.pow(base, exponent)
    whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0
    return int(value) if whole and abs(value) < _LARGEST else value


def literal_replacement(text: str) -> Replacement:
    """The replacement of every match by this text."""
    escaped = text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")
    return Replacement(escaped, (text.replace("\\", "\\\\"),), text)


def open_places(toml: str) -> bool:
    """Whether a line of TOML has a `TODO` of a draft map."""
    return bool(re.search(rf"""["']{TODO}\b""", toml))


def toml_text(text: str) -> str:
    """A text as TOML, unescaped if possible. The `TODO` of a leaf's name is escaped."""
    plain = text.isprintable() and "'''" not in text
    if plain and (isinstance(text, Mark) or not open_places(f"'{text}")):
        return f"'''{text}'''" if "'" in text else f"'{text}'"
    escaped = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return escaped if isinstance(text, Mark) else escaped.replace(TODO, r"\u0054ODO")


def number(text: str) -> int:
    """A whole number, zero or more, from its text. Raises ValueError: it is not such a number."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"`{text}` is not a number")
    return int(text)


def _arithmetic(
    text: str, regexes: Sequence[re.Pattern[str]], names: Collection[str]
) -> Arithmetic:
    """The arithmetic in braces. Raises ValueError if it is not arithmetic on groups and names."""
    source = _REFERENCE.sub(lambda found: f"_{found[1] or found[2]}", text.strip() or "i")
    used = _checked(f"{{{text}}}", source, _WHOLE, (int,))
    for name in sorted(used - {*names}):
        group = name.removeprefix("_")
        if name == group:
            known = " and ".join(f"`{known}`" for known in sorted(names))
            others = f"; there is {known}" if names else ""
            raise ValueError(f"`{{{text}}}`: there is no name `{name}` here{others}")
        for regex in regexes:
            numbered = group.isdigit() and int(group) <= regex.groups
            if not numbered and group not in regex.groupindex:
                raise ValueError(f"`{{{text}}}`: the regex has no group `{group}`")
    return Arithmetic(source, used)


def _checked(
    text: str, source: str, nodes: tuple[type, ...], constants: tuple[type, ...]
) -> frozenset[str]:
    """The names of an expression that has only these nodes. Raises ValueError for any other."""
    if len(text) > _MAX_EXPRESSION:
        raise ValueError(f"`{text[:40]}...` is longer than {_MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"`{text}` is not arithmetic") from error
    found = list(ast.walk(tree))
    values = [node.value for node in found if isinstance(node, ast.Constant)]
    if not all(isinstance(node, nodes) for node in found) or {*map(type, values)} - {*constants}:
        more = "/ ** " if ast.Pow in nodes else ""
        raise ValueError(f"`{text}` is not arithmetic: `+ - * {more}// %` and parentheses are all")
    return frozenset(node.id for node in found if isinstance(node, ast.Name))


# Patterns and replacements that can be exchanged, for the opposite direction.


class Group(NamedTuple):
    """The number that a group of a pattern matched, plus `more`. Group 0 is the position of a part,
    `{}` in a replacement."""

    number: int
    more: int = 0


class PathTemplate(NamedTuple):
    """A printed path, or its beginning, with groups in the place of numbers.

    ^params/layer_(\\d+)/w$   ('params/layer_', Group(1), '/w')
    ^params/layer_(\\d+)/     for all leaves of a module: ('params/layer_', Group(1), '/')
    layers/\\1/w              ('layers/', Group(1), '/w')
    """

    pieces: tuple[str | Group, ...]

    @classmethod
    def of(cls, pieces: Iterable[str | Group]) -> "PathTemplate":
        """A template of pieces. Neighbouring texts are joined."""
        found: list[str | Group] = []
        for piece in pieces:
            if isinstance(piece, str) and found and isinstance(found[-1], str):
                found[-1] += piece
            elif piece != "":
                found.append(piece)
        return cls(tuple(found))

    @property
    def whole(self) -> bool:
        """Whether it is a whole path, and not a module's path with a slash at its end."""
        return bool(self.pieces) and not str(self.pieces[-1]).endswith("/")

    @property
    def groups(self) -> tuple[int, ...]:
        """The numbers of its groups, in the order of the pattern."""
        groups = (piece.number for piece in self.pieces if isinstance(piece, Group))
        return tuple(dict.fromkeys(groups))

    @property
    def glob(self) -> str:
        """A glob for the paths that the pattern matches, with `*` for each number."""
        text = "".join("\uffff" if isinstance(piece, Group) else piece for piece in self.pieces)
        keys = split_path(text if self.whole else text.removesuffix("/"))
        return format_path(tuple(glob_key(key).replace("\uffff", "*") for key in keys))

    def pattern(self) -> Pattern:
        """The regex with a group for each number. Raises ValueError: two numbers would have no text
        between them."""
        if self.whole and not self.groups:
            return whole_path("".join(map(str, self.pieces)))
        plain = ("0" if isinstance(piece, Group) else piece for piece in self.pieces)
        if any(a[-1:].isdecimal() and b[:1].isdecimal() for a, b in itertools.pairwise(plain)):
            raise ValueError("two numbers are adjacent, so the end of the first is ambiguous")
        text, known = "^", []
        for piece in self.pieces:
            if isinstance(piece, str):
                text += re.escape(piece)
            elif piece.number in known:
                text += rf"\{known.index(piece.number) + 1}"
            else:
                text += r"(\d+)"
                known.append(piece.number)
        return Pattern(text + "$" * self.whole, None)

    def replacement(self, pattern: "PathTemplate") -> Replacement:
        """The replacement with the numbers that a pattern matched. Raises ValueError: the pattern
        lacks one of them."""
        if not self.groups:
            return literal_replacement("".join(map(str, self.pieces)))
        text = ""
        for piece, after in zip(self.pieces, (*self.pieces[1:], ""), strict=True):
            if isinstance(piece, str):
                text += literal_replacement(piece).text
            elif piece.number in pattern.groups:
                number = pattern.groups.index(piece.number) + 1
                sign = "-" if piece.more < 0 else "+"
                wide = rf"\g<{number}>" if str(after)[:1].isdecimal() else rf"\{number}"
                text += rf"{{\{number} {sign} {abs(piece.more)}}}" if piece.more else wide
            elif piece.number == 0:
                text += "{}"
            else:
                raise ValueError(f"the new path lacks group {piece.number}")
        return parse_replacement(text, [pattern.pattern()], ["i"])

    def numbered(self, group: int) -> "PathTemplate":
        """The template with the position of a part in the place of a group."""
        return PathTemplate(
            tuple(Group(0) if piece == Group(group) else piece for piece in self.pieces)
        )


def pattern_template(pattern: Pattern) -> PathTemplate:
    """The template of a pattern. Raises ValueError: the pattern has other wildcards."""
    if pattern.literal and not pattern.literal.endswith("/"):
        return PathTemplate((pattern.literal,))
    whole = pattern.text.endswith("$")
    body = pattern.text[1 : -1 if whole else None]
    tokens = _tokens(_PATTERN, body) if pattern.text.startswith("^") else None
    pieces: list[str | Group] = []
    count = 0
    for group, again, *texts in tokens or ():
        count += group is not None
        number = count if group is not None else int(again or 0)
        pieces.append(Group(number) if number else "".join(filter(None, texts)))
    template = PathTemplate.of(pieces)
    if tokens is None or template.whole != whole:
        raise ValueError(r"it is not `^...$` or `^.../` without wildcards but `(\d+)`")
    return template


def replacement_template(replacement: Replacement, whole: bool) -> PathTemplate:
    """The template of a replacement for whole paths, or for paths of modules. Raises ValueError: it
    is not made of texts and groups."""
    constant = replacement.constant
    pieces: list[str | Group] = [] if constant is None else [constant]
    for part in replacement.parts if constant is None else ():
        if isinstance(part, Arithmetic):
            tokens = [("0", None, None, None)] if part.source == "i" else None
        else:
            tokens = _tokens(_REPLACEMENT, part)
        if tokens is None:
            raise ValueError(f"`{replacement.text}` contains more than text and `\\1`")
        for named, group, slash, text in tokens:
            number = named or group
            pieces.append(Group(int(number)) if number else slash or text or "")
    template = PathTemplate.of(pieces)
    if template.whole != whole:
        kind = "`^...$`" if whole else "`^.../`"
        raise ValueError(f"`{replacement.text}` is not for a regex {kind}: only one ends with `/`")
    return template


def _tokens(regex: re.Pattern[str], text: str) -> list[Sequence[str | None]] | None:
    """The groups of the matches that a text consists of; None if there is other text."""
    found = list(regex.finditer(text))
    whole = "".join(match[0] for match in found) == text
    return [match.groups() for match in found] if whole else None
