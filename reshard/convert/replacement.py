"""The two texts of a map rule. Pure.

A pattern is a regex that is searched for in printed paths. A replacement is what `re.sub` takes,
with back-references, and between braces it may hold arithmetic over those that are whole numbers:

    stages/{\\1 // 4}/blocks/{\\1 % 4}/

`+ - * // %`, parentheses, numbers, back-references and the names that a rule gives are all there
is; `{{` and `}}` are the braces themselves.
"""

import ast
import dataclasses
import itertools
import json
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence

_WHOLE = re.compile(r"\^((?:[^\\.^$*+?{}\[\]|()]|\\[^a-zA-Z0-9])*)\$")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_BRACES = re.compile(r"\{\{|\}\}|\{(?P<sum>[^{}]*)\}|[{}]")
_REFERENCE = re.compile(r"\\(?:g<(\w+)>|(\d+))")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# Characters of arithmetic: as deep as it can be nested, which has to fit on the stack.
_MAX_ARITHMETIC = 200
Names = Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A regex on printed paths.

    Attributes:
      text: the regex.
      literal: the one path that it matches, if it is a whole path: `^params/w$`. Such a pattern is
        looked up and never compiled, which would take longer than all else for 100,000 of them.
    """

    text: str
    literal: str | None

    @property
    def regex(self) -> re.Pattern[str]:
        """Compiled."""
        return re.compile(self.text)


def parse_pattern(text: str) -> Pattern:
    """A pattern from the text of a regex.

    Raises:
      ValueError: it is no regex.
    """
    whole = _WHOLE.fullmatch(text)
    if whole is not None:
        return Pattern(text, _ESCAPED.sub(r"\1", whole[1]))
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{text}` is no regex: {error}") from error
    return Pattern(text, None)


def whole_path(text: str) -> Pattern:
    """The pattern that matches one printed path."""
    return Pattern(f"^{re.escape(text)}$", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacement:
    """What takes the place of a match.

    Attributes:
      text: as it is written.
      parts: templates of `re.sub`, and arithmetic.
      constant: the same text for every match, if that is so.
    """

    text: str
    parts: tuple[str | ast.expr, ...]
    constant: str | None

    def expanded(self, match: re.Match[str], names: Names) -> str:
        """What takes the place of this match.

        Raises:
          ValueError: the arithmetic has no answer.
        """
        if self.constant is not None:
            return self.constant
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(match.expand(part))
            else:
                value = _value(part, match, names)
                if value < 0:
                    raise ValueError(f"`{self.text}` makes a number below zero, {value}")
                texts.append(str(value))
        return "".join(texts)

    def replaced(self, pattern: Pattern, text: str, names: Callable[[re.Match[str]], Names]) -> str:
        """A printed path in which every match is replaced.

        Raises:
          ValueError: as `expanded`.
        """
        if pattern.literal is not None and self.constant is not None:
            return self.constant
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return pattern.regex.sub(self.parts[0], text)  # which parses the template only once
        return pattern.regex.sub(lambda match: self.expanded(match, names(match)), text)


def parse_replacement(
    text: str, patterns: Sequence[Pattern], names: Collection[str] = ()
) -> Replacement:
    """A replacement from its text.

    Args:
      text: the text.
      patterns: whose groups it may refer to.
      names: the names that arithmetic may use.

    Raises:
      ValueError: a group or a name that there is not, or what is between braces is no arithmetic.
    """
    if not set(text) & set("\\{}"):
        return Replacement(text, (text,), text)
    regexes = [pattern.regex for pattern in patterns]
    parts: list[str | ast.expr] = []
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
    _check_templates([part for part in parts if isinstance(part, str)], regexes)
    constant = None
    if (
        regexes
        and len(parts) == 1
        and not any(c == "g" or c.isdigit() for c in _ESCAPED.findall(text))
    ):
        constant = re.sub("^", template + text[end:], "")
    return Replacement(text, tuple(parts), constant)


def literal_replacement(text: str) -> Replacement:
    """The replacement that is this text for every match."""
    escaped = text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")
    return Replacement(escaped, (text.replace("\\", "\\\\"),), text)


def toml_text(text: str) -> str:
    """A text as TOML: as it is, where quotes and what it holds allow that."""
    if text.isprintable() and "'''" not in text:
        return f"'''{text}'''" if "'" in text else f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def number(text: str) -> int:
    """A whole number, zero or more.

    Raises:
      ValueError: it is none.
    """
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"`{text}` is no number")
    return int(text)


def _check_templates(templates: Sequence[str], regexes: Sequence[re.Pattern[str]]) -> None:
    for template, regex in itertools.product(templates, regexes):
        try:
            regex.sub(template, "")  # templates are parsed before anything is searched for
        except (re.error, IndexError) as error:
            raise ValueError(str(error)) from error


def _arithmetic(text: str, regexes: Sequence[re.Pattern[str]], names: Collection[str]) -> ast.expr:
    """The syntax tree of what is between braces, with back-references as names: `_1`, `_layer`."""
    if len(text) > _MAX_ARITHMETIC:
        raise ValueError(f"`{{{text[:40]}...}}` is longer than {_MAX_ARITHMETIC} characters")
    source = _REFERENCE.sub(lambda found: f"_{found[1] or found[2]}", text.strip() or "i")
    try:
        body = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"`{{{text}}}` is no arithmetic") from error
    _check_arithmetic(body, text, regexes, names)
    return body


def _check_arithmetic(
    node: ast.expr, text: str, regexes: Sequence[re.Pattern[str]], names: Collection[str]
) -> None:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            pass
        case ast.Name(id=name):
            group = name.removeprefix("_")
            if name in names:
                return
            if name == group:
                known = " and ".join(f"`{known}`" for known in sorted(names))
                others = f"; there is {known}" if names else ""
                raise ValueError(f"`{{{text}}}`: there is no name `{name}` here{others}")
            for regex in regexes:
                if group not in regex.groupindex and not (
                    group.isdigit() and int(group) <= regex.groups
                ):
                    raise ValueError(f"`{{{text}}}`: the regex has no group `{group}`")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check_arithmetic(operand, text, regexes, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check_arithmetic(left, text, regexes, names)
            _check_arithmetic(right, text, regexes, names)
        case _:
            raise ValueError(f"`{{{text}}}` is no arithmetic: `+ - * // %` and parentheses are all")


def _value(node: ast.expr, match: re.Match[str], names: Names) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            group = name.removeprefix("_")
            return number(match[int(group) if group.isdigit() else group] or "")
        case ast.UnaryOp(operand=operand):
            return -_value(operand, match, names)
        case ast.BinOp(left=left, op=op, right=right):
            second = _value(right, match, names)
            if second == 0 and isinstance(op, ast.FloorDiv | ast.Mod):
                raise ValueError("a division by zero")
            return _OPERATORS[type(op)](_value(left, match, names), second)
        case _:
            raise AssertionError(ast.dump(node))
