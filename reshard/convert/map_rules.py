"""The rules of a map between two trees of leaves: their texts, their application, their inverse.
Pure.

A rule has patterns and replacements. A pattern is a regex that is searched for in printed paths. A
replacement is text with back-references, as in `re.sub`. Between braces it may have arithmetic on
back-references to whole numbers, with `+ - * / ** // %`, parentheses, numbers, and the names that
the rule defines:

    stages/{\\1 // 4}/blocks/{\\1 % 4}/

`{{` and `}}` are the braces themselves.
"""

import ast
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard import tree
from reshard.arrays import operations as ops
from reshard.arrays.boxes import Shape, from_front
from reshard.convert.align import listed
from reshard.convert.leafmap import Filled, LeafMap, Source, Value, applied
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.tree import Path, format_path

OPPOSITE = {"nnx": "linen", "linen": "nnx"}
# The keys that make several leaves of one, and one of several; each is the inverse of the other.
PARTS = {"split": "concat", "unstack": "stack", "copies": "equal"}
WHOLES = {whole: parts for parts, whole in PARTS.items()}
_WHOLE_PATH = re.compile(r"\^((?:[^\\.^$*+?{}\[\]|()]|\\[^a-zA-Z0-9])*)\$")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_REFERENCE = re.compile(r"\\(?:g<(\w+)>|(\d+))")
# A group, by its name or its number; a character that is doubled or escaped; arithmetic; text.
_REPLACEMENT = re.compile(
    r"\\(?:g<(\w+)>|([1-9]\d?))|(\\\\|\{\{|\}\})|\{([^{}]*)\}|([^\\{}]+)|.", re.DOTALL
)
# A group that is a number, a reference to a group, an escaped character, a character.
_PATTERN = re.compile(r"(\(\\d\+\))|\\([1-9]\d?)|\\([^a-zA-Z0-9])|([^\\.^$*+?{}\[\]|()])")
# The largest whole number that can be computed: floats hold all smaller ones.
_LARGEST = 1 << 53
# The most characters of an expression, which limit its depth.
_MAX_EXPRESSION = 200
Names = Mapping[str, int]


def _power(base: float, exponent: float) -> float:
    """A power that is not larger than a float."""
    value = math.pow(base, exponent)
    whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0
    return int(value) if whole and abs(value) < _LARGEST else value


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_NODES = (ast.Name, ast.Load, ast.Constant, ast.UnaryOp, ast.BinOp, *_OPERATORS)


class Group(NamedTuple):
    """The text of a group of a regex, by its number or name. With `more`, its number plus `more`.
    Group 0 is the position of a part, `{}` in a replacement."""

    key: int | str
    more: int = 0


class Arithmetic(NamedTuple):
    """An expression. Back-references in braces have names in its source (`_1`, `_layer`). The
    values of some names are known."""

    text: str
    source: str
    names: frozenset[str]
    known: Mapping[str, float] = {}


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

    def template(self) -> "Template":
        """The pattern as a template. Raises ValueError: it has other wildcards."""
        if self.literal and not self.literal.endswith("/"):
            return Template((self.literal,))
        whole = self.text.endswith("$")
        read, count, pieces = "^", 0, list[Piece]()
        for token in _PATTERN.finditer(self.text[1 : -1 if whole else None]):
            group, again, *texts = token.groups()
            read, count = read + token[0], count + (group is not None)
            key = count if group else int(again or 0)
            pieces.append(Group(key) if key else "".join(filter(None, texts)))
        template = Template.of(pieces)
        if read + "$" * whole != self.text or template.whole != whole:
            raise ValueError(r"it must be `^...$` or `^.../`, with no wildcard except `(\d+)`")
        return template


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


Piece = str | Group | Arithmetic


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """A printed path, or its beginning, with groups in the place of numbers. Its text is that of a
    replacement. A template without arithmetic can also be a pattern.

    ^params/layer_(\\d+)/w$   ('params/layer_', Group(1), '/w')
    ^params/layer_(\\d+)/     for all leaves of a module: ('params/layer_', Group(1), '/')
    layers/\\1/w              ('layers/', Group(1), '/w')
    """

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Template":
        """A template of pieces. Neighbouring texts are joined."""
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, str) and found and isinstance(found[-1], str):
                found[-1] += piece
            elif piece != "":
                found.append(piece)
        return cls(tuple(found))

    def __str__(self) -> str:
        texts = []
        for piece, after in itertools.zip_longest(self.pieces, self.pieces[1:], fillvalue=""):
            if isinstance(piece, str):
                piece = piece.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")
            elif isinstance(piece, Arithmetic):
                piece = piece.text
            elif piece.more:
                piece = rf"{{\{piece.key} {'-' if piece.more < 0 else '+'} {abs(piece.more)}}}"
            elif piece.key == 0:
                piece = "{}"
            else:
                wide = isinstance(piece.key, str) or str(after)[:1].isdecimal()
                piece = rf"\g<{piece.key}>" if wide else rf"\{piece.key}"
            texts.append(piece)
        return "".join(texts)

    @property
    def constant(self) -> str | None:
        """The path, if there are only texts."""
        texts = [piece for piece in self.pieces if isinstance(piece, str)]
        return "".join(texts) if len(texts) == len(self.pieces) else None

    @property
    def whole(self) -> bool:
        """Whether it is a whole path, and not a module's path with a slash at its end."""
        return bool(self.pieces) and not str(self.pieces[-1]).endswith("/")

    @property
    def groups(self) -> tuple[int | str, ...]:
        """Its groups, in the order of the pattern."""
        return tuple(dict.fromkeys(p.key for p in self.pieces if isinstance(p, Group)))

    @property
    def glob(self) -> str:
        """A glob for the paths that the pattern matches, with `*` for each number."""
        text = "".join(piece if isinstance(piece, str) else "\uffff" for piece in self.pieces)
        keys = tree.split_path(text if self.whole else text.removesuffix("/"))
        return format_path(tuple(tree.glob_key(key).replace("\uffff", "*") for key in keys))

    def exchangeable(self, whole: bool) -> "Template":
        """The template of a replacement for whole paths, or for paths of modules. Raises
        ValueError: it cannot become a pattern."""
        if any(isinstance(p, Arithmetic) for p in self.pieces) or any(
            isinstance(key, str) for key in self.groups
        ):
            raise ValueError(f"`{self}` contains more than text and `\\1`")
        if self.whole != whole:
            kind = "`^...$`" if whole else "`^.../`"
            raise ValueError(f"`{self}` is not for a regex {kind}: only one ends with `/`")
        return Template.of(self.pieces)

    def pattern(self) -> Pattern:
        """The regex with a group for each number. Raises ValueError: two numbers would have no text
        between them."""
        if self.whole and (literal := self.constant) is not None:
            return whole_path(literal)
        plain = (piece if isinstance(piece, str) else "0" for piece in self.pieces)
        if any(a[-1:].isdecimal() and b[:1].isdecimal() for a, b in itertools.pairwise(plain)):
            raise ValueError("two numbers are adjacent, so the end of the first is ambiguous")
        text, known = "^", []
        for piece in self.pieces:
            if isinstance(piece, str):
                text += re.escape(piece)
            elif piece[0] in known:
                text += rf"\{known.index(piece[0]) + 1}"
            else:
                text += r"(\d+)"
                known.append(piece[0])
        return Pattern(text + "$" * self.whole, None)

    def replacement(self, pattern: "Template") -> "Template":
        """The replacement with the numbers that a pattern matched. Raises ValueError: the pattern
        lacks one of them."""
        numbers = {key: at for at, key in enumerate(pattern.groups, 1)}
        if lacking := [key for key in self.groups if key and key not in numbers]:
            raise ValueError(f"the new path lacks group {lacking[0]}")
        return Template(
            tuple(
                p._replace(key=numbers.get(p.key, 0)) if isinstance(p, Group) else p
                for p in self.pieces
            )
        )

    def expanded(self, match: re.Match[str], names: Names) -> str:
        """The replacement of a match. Raises ValueError: its arithmetic has no value."""
        texts = []
        for piece in self.pieces:
            if isinstance(piece, Group):
                piece = str(names["i"]) if piece.key == 0 else _text_of(match, piece.key)
            elif isinstance(piece, Arithmetic):
                known = {**piece.known, **names}
                groups = {n: number(_text_of(match, n[1:])) for n in piece.names if n not in known}
                value = _value(piece, known | groups)
                if type(value) is not int:
                    raise ValueError(f"`{self}` makes {value}, which is not a whole number")
                if value < 0:
                    raise ValueError(f"`{self}` makes a number below zero, {value}")
                piece = str(value)
            texts.append(piece)
        return "".join(texts)

    def replaced(self, pattern: Pattern, text: str, names: Callable[[re.Match[str]], Names]) -> str:
        """A printed path in which every match is replaced. Raises ValueError: as `expanded`."""
        if pattern.literal is not None and (constant := self.constant) is not None:
            return constant
        return pattern.regex.sub(lambda match: self.expanded(match, names(match)), text)


def _text_of(match: re.Match[str], group: int | str) -> str:
    """The text of a group, by its name or number; empty if it matched nothing."""
    return match[int(group) if str(group).isdecimal() else group] or ""


def parse_template(
    text: str,
    patterns: Sequence[Pattern],
    names: Collection[str] = (),
    numbers: Mapping[str, float] = {},
) -> Template:
    """A replacement that may refer to groups of the patterns and, in arithmetic, to the names and
    the numbers. Raises ValueError: one of these is missing, or braces do not hold arithmetic."""
    pieces = list[Piece]()
    for token in _REPLACEMENT.finditer(text):
        name, index, doubled, source, plain = token.groups()
        if key := name or index:
            _check_group(token[0], key, patterns)
            # The whole match is `\g<0>`: its key stays a text.
            pieces.append(Group(int(key) if key.isdecimal() and int(key) else key))
        elif source is not None:
            pieces.append(_arithmetic(source, patterns, names, numbers))
        elif doubled or plain:
            pieces.append(doubled[0] if doubled else plain)
        else:
            raise ValueError(f"`{token[0]}` has no partner; doubled it is the character")
    return Template(tuple(pieces))


def number(text: str) -> int:
    """A whole number, zero or more, from its text. Raises ValueError: it is not such a number."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"`{text}` is not a number")
    return int(text)


def evaluate(text: str, numbers: Mapping[str, float]) -> float:
    """The value of an expression over named numbers, such as `head_dim ** -0.5`. Raises ValueError:
    it is no such expression, or it has no value."""
    expression = _parsed(text, text.strip())
    if unknown := sorted(expression.names - {*numbers}):
        raise ValueError(f"`{text}`: neither `[vars]` nor the config has `{unknown[0]}`")
    return _value(expression, numbers)


@functools.lru_cache(1 << 12)
def _tree(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _parsed(text: str, source: str) -> Arithmetic:
    """An expression. Raises ValueError: it has more than numbers, names and operators."""
    if len(text) > _MAX_EXPRESSION:
        raise ValueError(f"`{text[:40]}...` is longer than {_MAX_EXPRESSION} characters")
    try:
        nodes = list(ast.walk(_tree(source)))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"`{text}` is not arithmetic") from error
    constants = {type(node.value) for node in nodes if isinstance(node, ast.Constant)}
    if {*map(type, nodes)} - {*_NODES} or constants - {int, float}:
        raise ValueError(f"`{text}` is not arithmetic: `+ - * / ** // %` and parentheses are all")
    names = frozenset(node.id for node in nodes if isinstance(node, ast.Name))
    return Arithmetic(text, source, names)


def _value(expression: Arithmetic, names: Mapping[str, float]) -> float:
    """The value of an expression. Raises ValueError if it has none."""

    def of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return names[name]
            case ast.UnaryOp(op, operand):
                return _OPERATORS[type(op)](of(operand))
            case ast.BinOp(left, op, right):
                return _OPERATORS[type(op)](of(left), of(right))
        raise AssertionError(node)

    try:
        result = of(_tree(expression.source))
    except ArithmeticError as error:
        raise ValueError(f"`{expression.text}` has no value: {error}") from error
    if not abs(result) <= _LARGEST:
        raise ValueError(f"`{expression.text}` has no value")
    return result


def _arithmetic(
    text: str, patterns: Sequence[Pattern], names: Collection[str], numbers: Mapping[str, float]
) -> Arithmetic | Group:
    """The arithmetic in braces. Raises ValueError if it is not arithmetic on groups and names."""
    source = _REFERENCE.sub(lambda found: f"_{found[1] or found[2]}", text.strip() or "i")
    text = f"{{{text}}}"
    expression = _parsed(text, source)
    known = {name: numbers[name] for name in (expression.names - {*names}) & {*numbers}}
    for name in sorted(expression.names - {*names, *known}):
        if not name.startswith("_"):
            known = " and ".join(f"`{known}`" for known in sorted(names))
            others = f"; there is {known}" if names else ""
            raise ValueError(f"`{text}`: there is no name `{name}` here{others}")
        _check_group(text, name[1:], patterns)
    if source == "i" and "i" in names:
        return Group(0)
    return expression._replace(known=known)


def _check_group(text: str, group: str, patterns: Sequence[Pattern]) -> None:
    """Raises ValueError if a pattern lacks a group."""
    for regex in (pattern.regex for pattern in patterns):
        if not ((group.isdecimal() and int(group) <= regex.groups) or group in regex.groupindex):
            raise ValueError(f"`{text}`: the regex has no group `{group}`")


class Step(NamedTuple):
    """An operation that depends on the shapes of its leaves: a key of a rule, and its values.

    reshape         to, one of whose sizes may be -1; from, the required shape or None
    pad             axis, from (None for any size), to, value, undo (it cuts padding off)
    split, unstack  axis; sizes; count: the number of new paths, or None if one path has `{}`
    copies, equal   count
    concat, stack   axis; sizes of the pieces; names of mesh axes; order: the names of pieces
    """

    key: str
    values: dict[str, Any]

    def operation(self, shapes: Sequence[Shape]) -> ops.Operation:
        """The operation on leaves of these shapes. Raises TreeMismatchError: it does not fit."""
        shape, (key, values) = shapes[0], self
        fields: list[Any] = [values.get(name) for name in ("axis", "sizes", "count")]
        axis, sizes, count = fields
        match key:
            case "reshape":
                return _reshape(values["from"], values["to"], shape)
            case "pad":
                return _pad(shape, values)
            case "copies":
                return ops.Copies(count)
            case "equal":
                return ops.Equal(len(shapes))
            case "stack":
                return ops.Stack(axis, values.get("names") or ())
            case "concat":
                concat = ops.Concat(axis)
                concat.shapes(shapes)
                made = tuple(shape[axis] for shape in shapes)
                if sizes not in (None, made):
                    text = f"the sizes of its pieces are {list(made)}, not {list(sizes)}"
                    raise TreeMismatchError(text)
                return concat
        size, text = shape[from_front(axis, shape)], f"axis {axis} of {list(shape)}"
        if key == "unstack":
            if not size:
                raise TreeMismatchError(f"{text} cannot be divided into parts")
            return ops.Unstack(axis, size if count is None else count)
        if sizes is None and size % count:
            raise TreeMismatchError(
                f"{text} does not have {count} equal parts: give `sizes` in the rule"
            )
        return ops.Split(axis, (size // count,) * count if sizes is None else sizes)


def _reshape(before: Shape | None, to: Shape, shape: Shape) -> ops.Reshape:
    if before not in (None, shape):
        raise TreeMismatchError(f"its shape is {list(shape)}, not {list(before or ())}")
    rest = math.prod(size for size in to if size >= 0)
    if -1 in to and (rest == 0 or math.prod(shape) % rest):
        raise TreeMismatchError(f"{list(shape)} cannot be reshaped to {list(to)}")
    return ops.Reshape(tuple(math.prod(shape) // rest if size < 0 else size for size in to))


def _pad(shape: Shape, values: Mapping[str, Any]) -> ops.Pad | ops.Crop:
    axis, undo, after = from_front(values["axis"], shape), values.get("undo"), values["to"]
    size, named = shape[axis], f"axis {values['axis']} has the size {shape[axis]}"
    before = size if values["from"] is None else values["from"]
    if size != (wanted := after if undo else before):
        raise TreeMismatchError(f"{named}, not {wanted}")
    if after < before:
        raise TreeMismatchError(f"{named}, more than {after}: `pad` only enlarges an axis")
    widths = tuple((0, (after - before) * (at == axis)) for at in range(len(shape)))
    return (ops.Crop if undo else ops.Pad)(widths, values["value"])


def _same_numbers(texts: Sequence[str]) -> dict[str, None]:
    """Pairs of printed paths, up to a number, that differ only in zeros ahead of this number."""
    pairs, parts = dict[str, None](), dict[tuple[str, str], str]()
    for text in texts:
        for digits in re.finditer(r"\d+", text):
            part = text[: digits.end()]
            key = text[: digits.start()], digits[0].lstrip("0")
            if (other := parts.setdefault(key, part)) != part:
                pairs[f"{other} and {part}"] = None
    return pairs


def _nested(sizes: Sequence[int], flat: int = -1, outer: int = 0, inner: int = 0) -> Names:
    """The names that `nest` defines: of groups of these sizes, the number of a member among all,
    `flat`, defines its group and its number there; or these two define `flat`. Raises ValueError:
    there is no such member."""
    if flat < 0:
        if outer >= len(sizes) or inner >= sizes[outer]:
            raise ValueError(f"groups of {list(sizes)} have no number {inner} in {outer}")
        return {"flat": sum(sizes[:outer]) + inner}
    inner = flat
    for outer, size in enumerate(sizes):
        if inner < size:
            return {"outer": outer, "inner": inner}
        inner -= size
    raise ValueError(f"number {flat} is beyond the groups of the sizes {list(sizes)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
      number: its position in the file, from 1.
      patterns: the regexes of its leaves. Several regexes are for pieces, in their order.
      to: the new path; a path for each part of a leaf; none if the path stays.
      drop: whether the leaves are dropped. Such a rule does nothing else.
      each: the operations on each leaf, in this order.
      regroup: the operation after those, which splits or joins leaves.
      by: the piece that a leaf becomes: its number from 0, or a text of `order`. None if the
        position of the pattern decides.
      fill: a constant. Without patterns, the rule creates leaves of it at `to`. With patterns, it
        drops leaves that must hold the constant.
      nest: the sizes of groups, and the numbers that define names for arithmetic: see `_nested`.
      optional: whether it may match nothing.
    """

    number: int
    patterns: tuple[Pattern, ...]
    to: tuple[Template, ...] = ()
    drop: bool = False
    each: tuple[ops.Operation | Step, ...] = ()
    regroup: Step | None = None
    by: Template | None = None
    fill: Filled | None = None
    nest: tuple[tuple[int, ...], dict[str, Template]] | None = None
    optional: bool = False

    @property
    def joins(self) -> bool:
        """Whether leaves with one new path become one leaf."""
        return self.regroup is not None and self.regroup.key in WHOLES

    @property
    def computes(self) -> bool:
        """Whether new paths depend on the values of numbers, and not only on their texts."""
        pieces = itertools.chain(*(to.pieces for to in self.to))
        return bool(self.by or self.nest) or any(isinstance(p, Arithmetic) for p in pieces)

    def replaced(self, to: Template, pattern: Pattern, text: str, part: int | None = None) -> str:
        """A new path of a leaf, or of a part of it. Raises ValueError: `to` or `nest` has no value
        for it."""
        return to.replaced(pattern, text, lambda match: self._names(match, part))

    def _names(self, match: re.Match[str], part: int | None = None) -> Names:
        """The names for arithmetic."""
        names = {} if part is None else {"i": part}
        if self.nest is None:
            return names
        sizes, known = self.nest
        numbers = {key: number(text.expanded(match, names)) for key, text in known.items()}
        return {**names, **_nested(sizes, **numbers)}

    def piece(self, position: int, text: str) -> tuple[str, int]:
        """The path of the leaf that a leaf becomes a piece of, and the number of the piece. Raises
        ValueError: the piece is unknown."""
        pattern = self.patterns[position]
        target = self.replaced(self.to[0], pattern, text)
        if self.by is None:
            return target, position
        first, *more = pattern.regex.finditer(text)
        if more:
            raise ValueError(
                "the regex matches this path more than once; anchor it with `^` and `$`"
            )
        name, order = self.by.expanded(first, self._names(first)), self.pieces()
        if order is None:
            return target, number(name)
        if name not in order:
            raise ValueError(f"`{name}` is not in the list `order` of the rule")
        return target, order.index(name)

    def pieces(self) -> Sequence[str] | None:
        """The names of all pieces; None if they are numbered."""
        if self.by is not None and self.regroup is not None:
            return self.regroup.values.get("order")
        return [pattern.text for pattern in self.patterns]

    def __str__(self) -> str:
        texts = [pattern.text for pattern in self.patterns] or [self.to[0].constant]
        return f"rule {self.number}, {' + '.join(f'`{text}`' for text in texts)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """The rules of a file.

    Attributes:
      name: the name of the file.
      rules: the rules, in order.
      initial: globs of target leaves that keep the model's own initial value.
      optional: such globs of leaves that may be absent.
      ignored: globs of source leaves that are dropped if they exist.
      to: the API that it converts to, if given: `"nnx"` or `"linen"`.
      keeps: whether a rule that does not change a path still applies to the leaf.
      notes: notes on the model.
    """

    name: str
    rules: tuple[Rule, ...]
    initial: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    to: str | None = None
    keeps: bool = False
    notes: tuple[str, ...] = ()


def inverse(rules: Map) -> Map:
    """The map in the opposite direction. Dropped leaves become initial ones. Initial leaves are
    dropped if they exist. Optional rules stay optional. A rule for several paths may take leaves
    that it did not make, which `apply_inverse` finds. Raises TreeMismatchError: rules whose regex
    and replacement cannot be exchanged, or whose operations do not describe their inverse: all."""
    undone: list[Rule] = []
    dropped: list[str] = []
    optional = list(rules.ignored)
    problems: list[str] = []
    for rule in reversed(rules.rules):
        try:
            if rule.drop:
                globs = [pattern.template().glob for pattern in rule.patterns]
                (optional if rule.optional else dropped).extend(globs)
            else:
                undone += _undone(rule)
        except TreeMismatchError as error:
            problems.append(f"{rule}: {error.summary}")
        except ValueError as error:
            problems.append(f"{rule}: {error}")
    if problems:
        raise TreeMismatchError(
            f"{rules.name}: the map cannot be used in the opposite direction",
            problems[::-1],
            ["a map file that `reshard convert` has written works in both directions"],
        )
    ignored = (*rules.initial, *rules.optional)
    to = OPPOSITE.get(rules.to or "")
    outside = tuple(dropped[::-1]), tuple(optional), ignored, to, rules.keeps
    return Map(rules.name, tuple(undone), *outside)


def _undone(rule: Rule) -> list[Rule]:
    """The rules that undo a rule. Raises ValueError or TreeMismatchError if it has no inverse."""
    if rule.fill is not None:
        literals = [Template((pattern.literal,)) for pattern in rule.patterns if pattern.literal]
        if len(literals) < len(rule.patterns):
            raise ValueError("`from` is not the exact path of each leaf")
        patterns = tuple(whole_path(to.constant or "") for to in rule.to)
        return [Rule(rule.number, patterns, tuple(literals), fill=rule.fill)]
    each = tuple(map(_undone_step, reversed(rule.each)))
    sources = [pattern.template() for pattern in rule.patterns]
    whole = sources[0].whole
    if any(source.whole != whole for source in sources):
        raise ValueError("some of its regexes are for whole paths, and some for modules")
    targets = [to.exchangeable(whole) for to in rule.to] or sources
    groups, key, values = targets[0].groups, "", dict[str, Any]()
    if rule.regroup is not None:
        key, values = rule.regroup
    numbered = key in PARTS and values["count"] is None
    if key in PARTS and (numbered != (0 in groups) or any(t.groups != groups for t in targets)):
        raise ValueError("the paths of its parts contain different numbers")
    if values.get("order") is not None:
        raise ValueError(
            "`concat` with `order` has no inverse: number the pieces with `by` instead"
        )
    if key == "concat" and values["sizes"] is None:
        raise ValueError("`concat` lacks the `sizes` of the pieces")
    count = None if rule.by else len(sources)
    if rule.by is not None:
        if len(rule.by.pieces) != 1 or not {*rule.by.groups}.difference(groups):
            raise ValueError(f"`{rule.by}` in `by` must be a number and nothing else")
        pieces = (Group(0) if p == rule.by.pieces[0] else p for p in sources[0].pieces)
        sources = [Template(tuple(pieces))]
    patterns = tuple(target.pattern() for target in targets)
    to = tuple(source.replacement(targets[0]) for source in sources)
    if rule.regroup is None:
        return [Rule(rule.number, patterns, to, each=each, optional=rule.optional)]
    values = {"axis": values.get("axis"), "sizes": values.get("sizes"), "count": count}
    regroup = Step((PARTS | WHOLES)[key], values)
    by = Template((Group(groups.index(0) + 1),)) if numbered else None
    joined = Rule(rule.number, patterns, to, regroup=regroup, by=by, optional=rule.optional)
    changed = rule.patterns if each else []
    return [joined, *(Rule(rule.number, (p,), each=each, optional=rule.optional) for p in changed)]


def _undone_step(step: ops.Operation | Step) -> ops.Operation | Step:
    if not isinstance(step, Step):
        if isinstance(step, ops.Transpose) and sorted(step.axes) != [*range(len(step.axes))]:
            raise TreeMismatchError(f"axes {list(step.axes)} are not a permutation of the axes")
        return step.inverse([])
    key, values = step
    if (before := values["from"]) is None:
        word = "shape" if key == "reshape" else "size"
        raise TreeMismatchError(f"`{key}` lacks `from`, the {word} before it")
    if key == "pad":
        return Step(key, values | {"undo": not values.get("undo")})
    return Step(key, {"from": _reshape(None, values["to"], before).shape, "to": before})


def _applied(step: ops.Operation | Step, values: Sequence[Value]) -> Sequence[Value]:
    if isinstance(step, Step):
        step = step.operation([value.shape for value in values])
    return applied(step, values)


# Only so many rules get a hint, since the search for the nearest leaf is slow.
_MOST_HINTS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class MapResult:
    """The result of applying a map to leaves.

    Attributes:
      map: the map of all leaves. Leaves that a rule applied to have an origin, even if they keep
        their path.
      to: the API that its rules convert to.
      initial: globs of target leaves that keep the model's own initial value.
      optional: such globs of leaves that may be absent.
      notes: notes on optional rules and globs.
      idle: the optional rules that matched nothing.
      dropped: source leaves that are left out if the map is used in the opposite direction.
      hints: what may help.
      unexpected: leaves that the map is wrong about -> why.
    """

    map: LeafMap
    to: str
    initial: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    idle: tuple[Rule, ...] = ()
    dropped: tuple[Path, ...] = ()
    hints: tuple[str, ...] = ()
    unexpected: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    @property
    def untouched(self) -> list[Path]:
        """The leaves that no rule applied to."""
        return [path for path in self.map.values if path not in self.map.origin]


def apply_map(
    rules: Map, leaves: Mapping[Path, Shape], left_out: Collection[Path] = ()
) -> MapResult:
    """The leaf map that rules make of the source leaves, whose keys are all text. A rule that only
    drops leaves which were `left_out` before may match nothing.

    Raises:
      TreeMismatchError: rules that match nothing, leaves with one new path or below another leaf,
        missing pieces, operations that do not fit, texts that should be numbers: all of them.
    """
    current = _Tree(rules, leaves, left_out)
    for rule in rules.rules:
        current.apply(rule)
    return current.result()


def apply_inverse(rules: Map, leaves: Mapping[Path, Shape]) -> MapResult:
    """The leaf map that rules make in the opposite direction, of their results. Raises
    TreeMismatchError: as `inverse` and `apply_map`; or the rules would not make these leaves again;
    or several optional rules may have made a leaf."""
    back = apply_map(inverse(rules), leaves)
    literal = all(pattern.literal is not None for rule in rules.rules for pattern in rule.patterns)
    if literal and not any(rule.optional for rule in rules.rules):
        return back
    summary = f"{rules.name}: the map cannot be used in the opposite direction on these leaves"
    problems = [
        f"{text}: several rules may have made it: rule {rule.number} or a later one"
        for rule in back.idle
        for text in map(format_path, leaves)
        if any(pattern.regex.search(text) for pattern in rule.patterns)
    ]
    if problems:
        hints = ["model=..., the model to convert to, decides"]
        raise TreeMismatchError(summary, problems, hints)
    kept = tuple(dataclasses.replace(r, optional=True) for r in rules.rules if not r.drop)
    try:
        again = apply_map(Map(rules.name, kept, keeps=rules.keeps), back.map.shapes).map.inverse()
    except TreeMismatchError as error:
        raise TreeMismatchError(summary, error.problems, error.hints) from error
    made = back.map.made_of()
    problems = [
        f"{format_path(path)}: the map does not make {' and '.join(map(format_path, of))} of it"
        for path, value in back.map.values.items()
        for of in [made.get(path, [path])]
        if again.values.get(path) != value
    ]
    if problems:
        raise TreeMismatchError(summary, problems)
    return back


@dataclasses.dataclass(eq=False, slots=True)
class _Leaf:
    """A source leaf or the result of an operation, at the path that rules gave it."""

    text: str  # the printed path
    value: Value | None  # None after an operation that did not fit
    place: tuple[int, ...]  # in the tree, for sorting
    last: Rule | None = None  # the last rule that applied to it

    @property
    def source(self) -> Path | None:
        """Its path in the source, if it is a source leaf."""
        return self.value.path if isinstance(self.value, Source) else None


class _Move(NamedTuple):
    """Leaves that become other leaves together: the printed paths of both, and the new values. A
    value is None after an operation that does not fit."""

    before: list[str]
    after: list[str]
    values: Sequence[Value | None]


class _Tree:
    """The leaves while rules are applied to them."""

    def __init__(self, rules: Map, leaves: Mapping[Path, Shape], left_out: Collection[Path]):
        self.rules = rules
        self.left_out = [format_path(path) for path in left_out]
        self.leaves: dict[str, _Leaf] = {}
        for place, (path, shape) in enumerate(leaves.items()):
            text = format_path(path)
            self.leaves[text] = _Leaf(text, Source(path, tuple(shape)), (place,))
        self.count = len(leaves)
        self.dropped: list[Path] = []
        self.constant: dict[Path, Filled] = {}
        self.problems: list[str] = []
        self.hints: list[str] = []
        self.notes: list[str] = []
        self.idle: list[Rule] = []
        # Whether a rule failed and leaves are missing. Then later rules may match nothing.
        self.incomplete = False

    def apply(self, rule: Rule) -> None:
        """Applies a rule to every leaf that it matches."""
        found = [self.hits(pattern) for pattern in rule.patterns]
        if rule.optional and not any(found):
            self.notes.append(f"{rule} is optional, and matches no leaf")
            self.idle.append(rule)
            return
        if rule.computes:
            pairs = _same_numbers([leaf.text for leaf in itertools.chain(*found)])
            self.problems += [f"{rule}: {pair} have the same number" for pair in pairs]
        moves: list[_Move] = []
        if rule.drop or (rule.fill is not None and rule.patterns):
            for leaf in dict.fromkeys(itertools.chain(*found)):
                self.drop(rule, leaf)
        elif rule.fill is not None:
            places = [str(to.constant) for to in rule.to]
            moves = [_Move([], places, [rule.fill] * len(places))]
        elif rule.joins:
            moves = self.joined(rule, found)
        else:
            moves = [move for leaf in found[0] if (move := self.alone(rule, leaf)) is not None]
            if found[0] and not moves:
                self.problems.append(f"{rule}: it changes no path")
        for pattern, hits in zip(rule.patterns, found, strict=True):
            if not hits:
                self.matches_nothing(rule, pattern)
        self.carry_out(rule, moves)

    def hits(self, pattern: Pattern) -> list[_Leaf]:
        """The leaves that a pattern matches, in the order of the tree."""
        if pattern.literal is not None:
            leaf = self.leaves.get(pattern.literal)
            return [] if leaf is None else [leaf]
        search = pattern.regex.search
        return sorted(
            (leaf for text, leaf in self.leaves.items() if search(text)),
            key=lambda leaf: leaf.place,
        )

    def drop(self, rule: Rule, leaf: _Leaf) -> None:
        """Drops a leaf of the source."""
        del self.leaves[leaf.text]
        if not isinstance(leaf.value, Source):
            self.problem(rule, leaf.text, "an operation made it; drop its inputs")
        elif rule.fill is None:
            self.dropped.append(leaf.value.path)
        else:
            self.constant[leaf.value.path] = rule.fill
            if leaf.value.shape != rule.fill.shape:
                shapes = f"{list(leaf.value.shape)}, not {list(rule.fill.shape)}"
                self.problem(rule, leaf.text, f"its shape is {shapes}")

    def alone(self, rule: Rule, leaf: _Leaf) -> _Move | None:
        """What a rule does to one leaf; None if it only renames and changes nothing. (A rule for a
        whole path always applies.)"""
        values, to = self.made(rule, [leaf], leaf.text), rule.to
        if rule.regroup is not None and rule.regroup.values["count"] is None:
            to = to[:1] * len(values)
        after = []
        for part, template in enumerate(to):
            with self.collecting(rule, leaf.text):
                after.append(rule.replaced(template, rule.patterns[0], leaf.text, part))
        if rule.regroup is None:
            plain = not rule.each and rule.patterns[0].literal is None
            if plain and after == [leaf.text] and not self.rules.keeps:
                return None
            after = after or [leaf.text]
        elif not values:
            self.incomplete = True
        fits = len(values) == len(after)
        return _Move([leaf.text], after, values if fits else [None] * len(after))

    def made(self, rule: Rule, leaves: Sequence[_Leaf], where: str) -> Sequence[Value]:
        """What the operations of a rule make of leaves; empty if they do not fit."""
        values: list[Value] = []
        for leaf in leaves:
            with self.collecting(rule, leaf.text):
                made = [] if leaf.value is None else [leaf.value]
                for step in rule.each if made else ():
                    made = _applied(step, made)
                values += made
        if len(values) < len(leaves) or rule.regroup is None:
            return values if len(values) == len(leaves) else []
        with self.collecting(rule, where):
            return _applied(rule.regroup, values)
        return []

    @contextlib.contextmanager
    def collecting(self, rule: Rule, where: str) -> Iterator[None]:
        """Records why a rule does not fit, and whether a leaf has no new path."""
        try:
            yield
        except TreeMismatchError as error:
            self.problem(rule, where, error.summary)
        except ValueError as error:
            self.problem(rule, where, str(error))
            self.incomplete = True

    def joined(self, rule: Rule, found: Sequence[Sequence[_Leaf]]) -> list[_Move]:
        """Joins leaves with the same new path."""
        groups: dict[str, dict[int, list[_Leaf]]] = {}
        seen: set[_Leaf] = set()
        for position, hits in enumerate(found):
            for leaf in hits:
                with self.collecting(rule, leaf.text):
                    if leaf in seen:
                        raise ValueError("more than one of the regexes match it")
                    seen.add(leaf)
                    text, piece = rule.piece(position, leaf.text)
                    groups.setdefault(text, {}).setdefault(piece, []).append(leaf)
        moves = []
        for text, pieces in groups.items():
            wrong = self.wrong_pieces(rule, pieces, found)
            for problem in wrong:
                self.problem(rule, text, problem)
            leaves = [leaf for piece in sorted(pieces) for leaf in pieces[piece]]
            made = [] if wrong else self.made(rule, leaves, text)
            moves.append(_Move([leaf.text for leaf in leaves], [text], made or [None]))
        return moves

    @staticmethod
    def wrong_pieces(
        rule: Rule, pieces: Mapping[int, Sequence[_Leaf]], found: Sequence[Sequence[_Leaf]]
    ) -> list[str]:
        """Why pieces cannot be joined. Regexes that match nothing are reported elsewhere."""
        wrong = [
            f"{' and '.join(leaf.text for leaf in leaves)} would both be its piece {piece}"
            for piece, leaves in sorted(pieces.items())
            if len(leaves) > 1
        ]
        needed = rule.pieces()
        if needed is not None:
            lacking = [piece for piece in range(len(needed)) if piece not in pieces]
            lacking = [piece for piece in lacking if len(found) == 1 or found[piece]]
            return wrong + [f"there is no piece for `{needed[piece]}`" for piece in lacking]
        if sorted(pieces) != [*range(len(pieces))]:
            numbers = ", ".join(map(str, sorted(pieces)))
            wrong.append(f"its pieces have the numbers {numbers}, not 0 to {len(pieces) - 1}")
        return wrong

    def carry_out(self, rule: Rule, moves: Sequence[_Move]) -> None:
        """Moves all leaves at the same time. Leaves that a rule creates come last."""
        last = self.count, rule.number
        places = [min((self.leaves.pop(t).place for t in m.before), default=last) for m in moves]
        new: dict[str, str] = {}
        for move, place in zip(moves, places, strict=True):
            before = " + ".join(move.before) or "fill"
            for part, (text, value) in enumerate(zip(move.after, move.values, strict=True)):
                if text in new:
                    self.problems.append(f"{rule}: {new[text]} and {before} -> {text}")
                elif text in self.leaves:
                    self.problems.append(f"{rule}: {before} -> {text}: that leaf exists already")
                else:
                    at = (*place, part) if len(move.after) > 1 else place
                    self.leaves[text] = _Leaf(text, value, at, rule)
                    new[text] = before
                    continue
                self.incomplete = True

    def matches_nothing(self, rule: Rule, pattern: Pattern) -> None:
        """Reports a pattern that matches nothing, and a leaf that it may have been meant for."""
        search = pattern.regex.search
        if self.incomplete or (rule.drop and any(map(search, self.left_out))):
            return
        which = f": `{pattern.text}`" if len(rule.patterns) > 1 else ""
        self.problems.append(f"{rule}{which}: matches no leaf")
        if len(self.hints) >= _MOST_HINTS:
            return
        for leaf in self.leaves.values():
            source = format_path(leaf.source or ())
            if leaf.last and leaf.text != source and search(source):
                self.hints.append(f"rule {leaf.last.number} renamed `{source}` to `{leaf.text}`")
                return
        paths = (tuple(text.split("/")) for text in self.leaves)
        near = tree.nearest_to_regex(pattern.literal or pattern.text, paths)
        self.hints += [f"the nearest leaf to `{pattern.text}` is `{name}`" for name in near]

    def problem(self, rule: Rule | None, where: str, text: str) -> None:
        self.problems.append(f"{rule}: {where}: {text}")

    def under(self, globs: Sequence[str]) -> list[tuple[_Leaf, str]]:
        """The leaves that globs match, each with the first such glob."""
        leaves = {tree.glob_text(self.path(leaf)): leaf for leaf in self.leaves.values() if globs}
        found: dict[str, str] = {}
        for glob in globs:
            for text in tree.named_by(leaves, glob):
                found.setdefault(text, glob)
        return [(leaf, found[text]) for text, leaf in leaves.items() if text in found]

    def result(self) -> MapResult:
        """The result after all rules."""
        rules = self.rules
        ignored = [leaf for leaf, _ in self.under(rules.ignored) if leaf.last is None]
        if paths := [leaf.source for leaf in ignored if leaf.source is not None]:
            self.notes.append(f"left out, as `optional` says: {listed(paths)}")
            self.dropped += paths
        for leaf in ignored:
            del self.leaves[leaf.text]
        last = sorted(self.leaves.values(), key=lambda leaf: leaf.place)
        paths = [self.path(leaf) for leaf in last]
        if not self.incomplete:
            self.check_tree(last, paths)
        for leaf, glob in self.under((*rules.initial, *rules.optional)):
            # Leaves below a module of that name may be made.
            exact = tree.compile_glob(glob).fullmatch(tree.glob_text(self.path(leaf)))
            if leaf.last is not None and exact:
                self.problem(leaf.last, leaf.text, f"this rule makes it, but `init` has `{glob}`")
        if rules.keeps and (left := [leaf.text for leaf in last if leaf.last is None]):
            self.problems += [f"no rule applies to {text}" for text in left]
            self.hints.append("`drop = true` leaves a leaf out; a rule with its own path keeps it")
        if self.problems:
            raise TreeMismatchError(
                f"{rules.name}: the map does not fit the leaves", self.problems, self.hints
            )
        pairs = list(zip(paths, last, strict=True))
        values = {path: leaf.value for path, leaf in pairs if leaf.value is not None}
        origin = {path: "map" for path, leaf in pairs if leaf.last is not None}
        found = LeafMap(values, origin, tuple(self.dropped), self.constant)
        notes = (*rules.notes, *self.notes)
        outside = rules.initial, rules.optional, notes, tuple(self.idle)
        return MapResult(found, rules.to or "", *outside)

    def path(self, leaf: _Leaf) -> Path:
        """The path that rules gave a leaf."""
        if leaf.last is None and leaf.source is not None:
            return leaf.source
        try:
            return tree.split_path(leaf.text)
        except ArgumentError as error:
            problem = f"{leaf.last}: {error.summary}"
            if problem not in self.problems:
                self.problems.append(problem)
            return (leaf.text,)

    def check_tree(self, leaves: Sequence[_Leaf], paths: Sequence[Path]) -> None:
        """Finds leaves with the same path, and leaves below other leaves."""
        for other, leaf, above in tree.overlaps(zip(leaves, paths, strict=True)):
            problem = f"{other.text} and {leaf.text} are the same path"
            if above:
                problem = f"{leaf.text} would be below the leaf {other.text}"
            if rule := leaf.last or other.last if above else other.last or leaf.last:
                self.problems.append(f"{rule}: {problem}")
