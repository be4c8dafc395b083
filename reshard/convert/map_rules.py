"""The rules of a map between two trees of leaves, and their operations for given shapes. Pure."""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard import tree
from reshard.arrays import operations as ops
from reshard.arrays.boxes import Shape, from_front
from reshard.convert.align import listed
from reshard.convert.leafmap import Filled, LeafMap, Source, Value, applied
from reshard.convert.replacement import (
    Pattern,
    Replacement,
    number,
    parse_replacement,
    pattern_template,
    replacement_template,
    whole_path,
)
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.tree import Path, format_path

OPPOSITE = {"nnx": "linen", "linen": "nnx"}
# The keys that make several leaves of one, and one of several; each is the inverse of the other.
PARTS = {"split": "concat", "unstack": "stack", "copies": "equal"}
WHOLES = {whole: parts for parts, whole in PARTS.items()}


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
        size = shape[from_front(axis, shape)]
        if key == "unstack":
            if not size:
                text = f"axis {axis} of {list(shape)} cannot be divided into parts"
                raise TreeMismatchError(text)
            return ops.Unstack(axis, size if count is None else count)
        if sizes is None and size % count:
            text = f"axis {axis} of {list(shape)} does not have {count} equal parts; give `sizes`"
            raise TreeMismatchError(text)
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
    before = shape[axis] if values["from"] is None else values["from"]
    size, wanted, named = shape[axis], after if undo else before, f"axis {values['axis']}"
    if size != wanted:
        raise TreeMismatchError(f"{named} has the size {size}, not {wanted}")
    if after < before:
        text = f"{named} has the size {size}, more than {after}: `pad` only enlarges an axis"
        raise TreeMismatchError(text)
    widths = tuple((0, (after - before) * (at == axis)) for at in range(len(shape)))
    return (ops.Crop if undo else ops.Pad)(widths, values["value"])


@dataclasses.dataclass(frozen=True, slots=True)
class Nest:
    """Groups of these sizes. The number of a member among all, `flat`, defines the names `outer`,
    its group, and `inner`, its number there; or these two define `flat`."""

    sizes: tuple[int, ...]
    flat: Replacement | None
    outer: Replacement | None
    inner: Replacement | None

    def names(self, number_of: Callable[[Replacement], int]) -> dict[str, int]:
        """The names for a match. Raises ValueError: no group has such a member."""
        if self.flat is not None:
            inner = flat = number_of(self.flat)
            for outer, size in enumerate(self.sizes):
                if inner < size:
                    return {"outer": outer, "inner": inner}
                inner -= size
            raise ValueError(f"number {flat} is beyond the groups of the sizes {list(self.sizes)}")
        assert self.outer is not None and self.inner is not None
        outer, inner = number_of(self.outer), number_of(self.inner)
        if outer >= len(self.sizes) or inner >= self.sizes[outer]:
            raise ValueError(f"groups of {list(self.sizes)} have no number {inner} in {outer}")
        return {"flat": sum(self.sizes[:outer]) + inner}


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
      fill: a constant. The rule creates leaves of it at `places`. With patterns, it drops leaves
        that must hold the constant.
      places: the printed paths of the leaves that it creates.
      nest: defines names for arithmetic.
      optional: whether it may match nothing.
    """

    number: int
    patterns: tuple[Pattern, ...]
    to: tuple[Replacement, ...] = ()
    drop: bool = False
    each: tuple[ops.Operation | Step, ...] = ()
    regroup: Step | None = None
    by: Replacement | None = None
    fill: Filled | None = None
    places: tuple[str, ...] = ()
    nest: Nest | None = None
    optional: bool = False

    @property
    def joins(self) -> bool:
        """Whether leaves with one new path become one leaf."""
        return self.regroup is not None and self.regroup.key in WHOLES

    def replaced(
        self, to: Replacement, pattern: Pattern, text: str, part: int | None = None
    ) -> str:
        """A new path of a leaf, or of a part of it. Raises ValueError: `to` or `nest` has no value
        for it."""
        return to.replaced(pattern, text, lambda match: self.names(match, part))

    def names(self, match: re.Match[str], part: int | None = None) -> dict[str, int]:
        """The names for arithmetic. Raises ValueError: `nest` has no names for the match."""
        names = {} if part is None else {"i": part}
        if self.nest is not None:
            names |= self.nest.names(lambda text: number(text.expanded(match, names)))
        return names

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
        name, order = self.by.expanded(first, self.names(first)), self.pieces()
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
        texts = self.places[:1] or [pattern.text for pattern in self.patterns]
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
    """

    name: str
    rules: tuple[Rule, ...]
    initial: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    to: str | None = None
    keeps: bool = False


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
                globs = [pattern_template(pattern).glob for pattern in rule.patterns]
                (optional if rule.optional else dropped).extend(globs)
            elif rule.places:
                patterns = tuple(map(whole_path, rule.places))
                undone.append(Rule(rule.number, patterns, fill=rule.fill))
            elif rule.fill is not None:
                places = tuple(pattern.literal or "" for pattern in rule.patterns)
                if "" in places:
                    raise ValueError("`from` is not the exact path of each leaf")
                undone.append(Rule(rule.number, (), fill=rule.fill, places=places))
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
    may = {rule.number for rule in rules.rules if rule.optional}
    to = OPPOSITE.get(rules.to or "")
    undone = [dataclasses.replace(back, optional=back.number in may) for back in undone]
    ignored = (*rules.initial, *rules.optional)
    outside = tuple(dropped[::-1]), tuple(optional), ignored
    return Map(rules.name, tuple(undone), *outside, to, rules.keeps)


def _undone(rule: Rule) -> list[Rule]:
    """The rules that undo a rule. Raises ValueError or TreeMismatchError if it has no inverse."""
    each = tuple(map(_undone_step, reversed(rule.each)))
    sources = [pattern_template(pattern) for pattern in rule.patterns]
    whole = sources[0].whole
    if any(source.whole != whole for source in sources):
        raise ValueError("some of its regexes are for whole paths, and some for modules")
    targets = [replacement_template(to, whole) for to in rule.to] or sources
    regroup = by = None
    if rule.regroup is not None:
        key, values = rule.regroup
        regroup = Step((PARTS | WHOLES)[key], {"axis": values.get("axis")})
        regroup.values["sizes"], numbered = values.get("sizes"), False
        if rule.joins:
            if values.get("order") is not None:
                text = "`order` cannot be inverted: number the pieces, or list a regex for each"
                raise ValueError(text)
            if key == "concat" and regroup.values["sizes"] is None:
                raise ValueError("`concat` lacks the `sizes` of the pieces")
            if rule.by is not None:
                piece, groups = replacement_template(rule.by, True), targets[0].groups
                if len(piece.pieces) > len(piece.groups) or piece.groups in [(), *zip(groups)]:
                    text = f"`{rule.by.text}` in `by` must be a number and nothing else"
                    raise ValueError(text)
                sources = [sources[0].numbered(piece.groups[0])]
            regroup.values["count"] = None if rule.by is not None else len(sources)
        else:
            groups, numbered = targets[0].groups, values["count"] is None
            if any(part.groups != groups for part in targets) or (0 in groups) != numbered:
                raise ValueError("the paths of its parts contain different numbers")
    patterns = tuple(target.pattern() for target in targets)
    if regroup is not None and numbered:
        by = parse_replacement(rf"\{targets[0].groups.index(0) + 1}", patterns)
    to = tuple(source.replacement(targets[0]) for source in sources)
    if regroup is None:
        return [Rule(rule.number, patterns, to, each=each)]
    changed = [Rule(rule.number, (pattern,), each=each) for pattern in rule.patterns if each]
    return [Rule(rule.number, patterns, to, regroup=regroup, by=by), *changed]


def _undone_step(step: ops.Operation | Step) -> ops.Operation | Step:
    if not isinstance(step, Step):
        if isinstance(step, ops.Transpose) and sorted(step.axes) != [*range(len(step.axes))]:
            raise TreeMismatchError(f"axes {list(step.axes)} are not a permutation of the axes")
        return step.inverse([])
    before = step.values["from"]
    if before is None:
        word = "shape" if step.key == "reshape" else "size"
        raise TreeMismatchError(f"`{step.key}` lacks `from`, the {word} before it")
    if step.key == "pad":
        return Step("pad", step.values | {"undo": not step.values.get("undo")})
    return Step("reshape", {"from": _reshape(None, step.values["to"], before).shape, "to": before})


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
      problems: why the map cannot be used.
      hints: what may help.
      unexpected: new paths that the target does not have.
    """

    map: LeafMap
    to: str
    initial: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    idle: tuple[Rule, ...] = ()
    dropped: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    unexpected: frozenset[Path] = frozenset()

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
    leaves_now = _Tree(leaves, list(map(format_path, left_out)), rules.keeps)
    for rule in rules.rules:
        leaves_now.apply(rule)
    leaves_now.ignore(rules.ignored)
    return leaves_now.result(rules)


def apply_inverse(rules: Map, leaves: Mapping[Path, Shape]) -> MapResult:
    """The leaf map that rules make in the opposite direction, of their results. Raises
    TreeMismatchError: as `inverse` and `apply_map`; or the rules would not make these leaves again;
    or several optional rules may have made a leaf."""
    back = apply_map(inverse(rules), leaves)
    literal = all(pattern.literal is not None for rule in rules.rules for pattern in rule.patterns)
    if literal and not any(rule.optional for rule in rules.rules):
        return back
    kept = tuple(dataclasses.replace(r, optional=True) for r in rules.rules if not r.drop)
    summary = f"{rules.name}: the map cannot be used in the opposite direction on these leaves"
    texts = dict.fromkeys(map(format_path, leaves))
    problems = [
        f"{text}: rule {rule.number} or a later one may have made it"
        for rule in back.idle
        for pattern in rule.patterns
        for text in ([pattern.literal] if pattern.literal else texts)
        if text in texts and pattern.regex.search(text)
    ]
    if problems:
        hints = ["model=..., the model to convert to, decides"]
        raise TreeMismatchError(summary, problems, hints)
    try:
        again = apply_map(Map(rules.name, kept, keeps=rules.keeps), back.map.shapes).map.inverse()
    except TreeMismatchError as error:
        raise TreeMismatchError(summary, error.problems, error.hints) from error
    told, made = again.made_of(), back.map.made_of()
    problems = [
        f"{format_path(path)} would be made of {_names(made.get(path, [path]))}, but makes "
        f"{_names(told.get(path, [path]))}"
        for path, value in back.map.values.items()
        if again.values.get(path) != value
    ]
    if problems:
        raise TreeMismatchError(summary, problems)
    return back


def _names(paths: Sequence[Path]) -> str:
    return " and ".join(map(format_path, paths))


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

    def __init__(self, leaves: Mapping[Path, Shape], left_out: Sequence[str], keeps: bool):
        self.left_out = left_out
        self.keeps = keeps
        self.here: dict[str, _Leaf] = {}
        for place, (path, shape) in enumerate(leaves.items()):
            text = format_path(path)
            self.here[text] = _Leaf(text, Source(path, tuple(shape)), (place,))
        self.count = len(leaves)
        self.dropped: list[Path] = []
        self.constant: dict[Path, Filled] = {}
        self.problems: list[str] = []
        self.hints: list[str] = []
        self.notes: list[str] = []
        self.idle: list[Rule] = []
        # Whether a rule failed and leaves are missing. Then later rules may match nothing.
        self.incomplete = False

    def ignore(self, globs: Sequence[str]) -> None:
        """Drops the leaves that globs match and no rule applied to."""
        untouched = [leaf for leaf, _ in self.under(globs) if leaf.last is None]
        gone = {leaf.source: leaf for leaf in untouched if leaf.source is not None}
        if gone:
            self.notes.append(f"left out, as `optional` says: {listed(list(gone))}")
        for leaf in gone.values():
            self.drop(leaf)

    def under(self, globs: Sequence[str]) -> list[tuple[_Leaf, str]]:
        """The leaves that globs match, each with the first such glob."""
        leaves = {tree.glob_text(self.path(leaf)): leaf for leaf in self.here.values() if globs}
        found: dict[str, str] = {}
        for glob in globs:
            for text in tree.named_by(leaves, glob):
                found.setdefault(text, glob)
        return [(leaf, found[text]) for text, leaf in leaves.items() if text in found]

    def drop(self, leaf: _Leaf) -> None:
        """Drops a leaf of the source."""
        del self.here[leaf.text]
        if leaf.source is not None:
            self.dropped.append(leaf.source)

    def drop_constants(self, rule: Rule, fill: Filled, leaves: Collection[_Leaf]) -> None:
        """Drops leaves that must hold a constant."""
        for leaf in leaves:
            if leaf.source is None or leaf.value is None:
                self.problem(rule, leaf.text, "an operation made it: `fill` is for stored leaves")
                continue
            del self.here[leaf.text]
            self.constant[leaf.source] = fill
            if leaf.value.shape != fill.shape:
                shapes = f"{list(leaf.value.shape)}, not {list(fill.shape)}"
                self.problem(rule, leaf.text, f"its shape is {shapes}")

    def apply(self, rule: Rule) -> None:
        """Applies a rule to every leaf that it matches."""
        found = [self.hits(pattern) for pattern in rule.patterns]
        moves: list[_Move] = []
        if rule.fill is not None:
            self.drop_constants(rule, rule.fill, dict.fromkeys(itertools.chain(*found)))
            moves = [_Move([], list(rule.places), [rule.fill] * len(rule.places))]
        elif rule.drop:
            for leaf in found[0]:
                if leaf.source is None:
                    self.problem(rule, leaf.text, "an operation made it; drop its inputs")
                self.drop(leaf)
        elif rule.joins:
            moves = self.joined(rule, found)
        else:
            moves = [move for leaf in found[0] if (move := self.alone(rule, leaf)) is not None]
            if found[0] and not moves:
                self.problems.append(f"{rule}: it changes no path")
        for pattern, hits in zip(rule.patterns, found, strict=True):
            if not hits and not (rule.optional and not any(found)):
                self.matches_nothing(rule, pattern)
        if rule.optional and not any(found) and not rule.places:
            self.notes.append(f"{rule} is optional, and matches no leaf")
            self.idle.append(rule)
        self.carry_out(rule, moves)

    def hits(self, pattern: Pattern) -> list[_Leaf]:
        """The leaves that a pattern matches, in the order of the tree."""
        if pattern.literal is not None:
            leaf = self.here.get(pattern.literal)
            return [] if leaf is None else [leaf]
        search = pattern.regex.search
        return sorted(
            (leaf for text, leaf in self.here.items() if search(text)), key=lambda leaf: leaf.place
        )

    def alone(self, rule: Rule, leaf: _Leaf) -> _Move | None:
        """What a rule does to one leaf; None if it only renames and changes nothing. (A rule for a
        whole path always applies.)"""
        parts = self.made(rule, [leaf], leaf.text)
        to: Sequence[Replacement | None] = rule.to or [None]
        if rule.regroup is not None and rule.regroup.values["count"] is None:
            to = [rule.to[0]] * len(parts)
        after = []
        for part, replacement in enumerate(to):
            with self.telling(rule, leaf.text):
                pattern = rule.patterns[0]
                after.append(
                    leaf.text
                    if replacement is None
                    else rule.replaced(replacement, pattern, leaf.text, part)
                )
        if rule.regroup is None:
            plain = not rule.each and rule.patterns[0].literal is None
            if plain and after == [leaf.text] and not self.keeps:
                return None
            after = after or [leaf.text]
        elif not parts:
            self.incomplete = True
        return _Move([leaf.text], after, parts if len(parts) == len(after) else [None] * len(after))

    def made(self, rule: Rule, leaves: Sequence[_Leaf], where: str) -> Sequence[Value]:
        """What the operations of a rule make of leaves; empty if they do not fit."""
        values: list[Value] = []
        for leaf in leaves:
            value = leaf.value
            for step in rule.each:
                if value is not None:
                    whole, value = value, None
                    with self.telling(rule, leaf.text):
                        (value,) = _applied(step, [whole])
            values += [] if value is None else [value]
        if len(values) < len(leaves):
            return []
        if rule.regroup is None:
            return values
        with self.telling(rule, where):
            return _applied(rule.regroup, values)
        return []

    @contextlib.contextmanager
    def telling(self, rule: Rule, where: str) -> Iterator[None]:
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
                with self.telling(rule, leaf.text):
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
        if needed is None:
            if set(pieces) != set(range(len(pieces))):
                numbers = ", ".join(map(str, sorted(pieces)))
                wrong.append(f"its pieces have the numbers {numbers}, not 0 to {len(pieces) - 1}")
            return wrong
        return wrong + [
            f"there is no piece for `{name}`"
            for piece, name in enumerate(needed)
            if piece not in pieces and (len(found) == 1 or found[piece])
        ]

    def carry_out(self, rule: Rule, moves: Sequence[_Move]) -> None:
        """Moves all leaves at the same time. Leaves that a rule creates come last."""
        last = self.count, rule.number
        places = [min((self.here.pop(t).place for t in m.before), default=last) for m in moves]
        new: dict[str, str] = {}
        for move, place in zip(moves, places, strict=True):
            before = " + ".join(move.before) or "fill"
            for part, (text, value) in enumerate(zip(move.after, move.values, strict=True)):
                if text in new:
                    self.problems.append(f"{rule}: {new[text]} and {before} -> {text}")
                elif text in self.here:
                    self.problems.append(f"{rule}: {before} -> {text}: that leaf exists already")
                else:
                    at = (*place, part) if len(move.after) > 1 else place
                    self.here[text] = _Leaf(text, value, at, rule)
                    new[text] = before
                    continue
                self.incomplete = True

    def matches_nothing(self, rule: Rule, pattern: Pattern) -> None:
        if self.incomplete or (rule.drop and any(map(pattern.regex.search, self.left_out))):
            return
        which = f": `{pattern.text}`" if len(rule.patterns) > 1 else ""
        self.problems.append(f"{rule}{which}: matches no leaf")
        if len(self.hints) >= _MOST_HINTS:
            return
        for leaf in self.here.values():
            source = format_path(leaf.source or ())
            if leaf.last and leaf.text != source and pattern.regex.search(source):
                self.hints.append(f"`{source}` is `{leaf.text}` by rule {leaf.last.number}")
                return
        paths = (tuple(text.split("/")) for text in self.here)
        near = tree.nearest_to_regex(pattern.literal or pattern.text, paths)
        self.hints += [f"the nearest leaf to `{pattern.text}` is `{name}`" for name in near]

    def problem(self, rule: Rule, where: str, text: str) -> None:
        self.problems.append(f"{rule}: {where}: {text}")

    def result(self, rules: Map) -> MapResult:
        """The result after all rules."""
        last = sorted(self.here.values(), key=lambda leaf: leaf.place)
        paths = [self.path(leaf) for leaf in last]
        if not self.incomplete:
            self.check_tree(last, paths)
        for leaf, glob in self.under((*rules.initial, *rules.optional)):
            # Leaves below a module of that name may be made.
            exact = tree.compile_glob(glob).fullmatch(tree.glob_text(self.path(leaf)))
            if leaf.last is not None and exact:
                self.problem(leaf.last, leaf.text, f"this rule makes it, but `init` has `{glob}`")
        if self.keeps and (left := [leaf.text for leaf in last if leaf.last is None]):
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
        outside = rules.initial, rules.optional
        return MapResult(found, rules.to or "", *outside, tuple(self.notes), tuple(self.idle))

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
