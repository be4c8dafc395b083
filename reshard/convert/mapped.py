"""What the rules of a map make of a tree of leaves. Pure.

Rules are applied one after another, each to every leaf as earlier ones left it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.boxes import Shape
from reshard.convert.leafmap import LeafMap, Source, Value, applied
from reshard.convert.map_rules import Divided, Gathered, Map, Reshaped, Rule, inverse
from reshard.convert.pairing import listed
from reshard.convert.replacement import Pattern, Replacement
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.hints import Hint
from reshard.tree import Path, compile_glob, format_path, glob_text, named_by, nearest, split_path

# Looking for the nearest leaf takes longer than all else: it is done for so many rules.
_MOST_HINTS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """What a map makes of leaves.

    Attributes:
      map: of all leaves. Those that a rule applies to have an origin, even if they keep their path.
      initial: globs of leaves of the target that keep the model's own initial value.
      optional: the same, of leaves that may not be there.
      notes: what came of rules and globs that may match nothing.
      idle: the rules that may match nothing, and have not.
    """

    map: LeafMap
    initial: tuple[str, ...]
    optional: tuple[str, ...]
    notes: tuple[str, ...] = ()
    idle: tuple[Rule, ...] = ()

    @property
    def untouched(self) -> list[Path]:
        """The leaves that no rule applies to."""
        return [path for path in self.map.values if path not in self.map.origin]


def apply_map(rules: Map, leaves: Mapping[Path, Shape], left_out: Collection[Path] = ()) -> Mapped:
    """The leaf map that rules make.

    Args:
      rules: from `read_map` or `inverse`.
      leaves: the leaves of the source with their shapes; all keys are text.
      left_out: leaves that it does not have any more: rules that drop these have done so.

    Raises:
      TreeMismatchError: rules that match nothing, leaves that would meet in one path or be below
        another, pieces that are missing, operations that do not fit, numbers that are none: all of
        them, by rule.
    """
    tree = _Tree(leaves, list(map(format_path, left_out)))
    for rule in rules.rules:
        tree.apply(rule)
    tree.ignore(rules.ignored)
    return tree.mapped(rules)


def apply_inverse(rules: Map, leaves: Mapping[Path, Shape]) -> Mapped:
    """The leaf map that rules make in the opposite direction.

    Args:
      rules: from `read_map`.
      leaves: as for `apply_map`, of what the rules lead to.

    Raises:
      TreeMismatchError: as for `inverse` and `apply_map`; or rules that would not make these leaves
        of what they come from, as they are for other leaves, too; or several that may match nothing
        and may have made a leaf.
    """
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
        hints = [Hint(("model",), ", of what is made then, tells which")]
        raise TreeMismatchError(summary, problems, hints)
    try:
        again = apply_map(Map(rules.name, kept), back.map.shapes).map.inverse()
    except TreeMismatchError as error:
        raise TreeMismatchError(summary, error.problems, error.hints) from error
    told, made = again.made_of(), back.map.made_of()
    problems = [
        f"{format_path(path)} would be made of {_names(made.get(path, [path]))}, and makes "
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
    """A leaf of the source, or what an operation made, under the path that rules have given it.

    Attributes:
      text: the printed path.
      value: what it is; None after an operation that did not fit.
      place: where it is in the tree, to sort by.
      touched: whether a rule has applied to it.
      last: the last rule that named it.
    """

    text: str
    value: Value | None
    place: tuple[int, ...]
    touched: bool = False
    last: Rule | None = None

    @property
    def source(self) -> Path | None:
        """The path in the source, if it is a leaf of that."""
        return self.value.path if isinstance(self.value, Source) else None


class _Move(NamedTuple):
    """Leaves that become others together.

    Attributes:
      before: their printed paths.
      place: of the first of them in the tree.
      after: the printed paths of what they become.
      values: what that is; None after an operation that does not fit.
    """

    before: list[str]
    place: tuple[int, ...]
    after: list[str]
    values: list[Value | None]


class _Tree:
    """The leaves while rules are applied to them."""

    def __init__(self, leaves: Mapping[Path, Shape], left_out: Sequence[str]):
        self.left_out = left_out
        self.here: dict[str, _Leaf] = {}
        for place, (path, shape) in enumerate(leaves.items()):
            text = format_path(path)
            self.here[text] = _Leaf(text, Source(path, tuple(shape)), (place,))
        self.dropped: list[Path] = []
        self.problems: list[str] = []
        self.hints: list[str] = []
        self.notes: list[str] = []
        self.idle: list[Rule] = []
        # Whether leaves are missing because a rule failed: then later ones may well match nothing.
        self.incomplete = False

    def ignore(self, globs: Sequence[str]) -> None:
        """Drops the leaves that globs match and no rule has applied to."""
        untouched = [leaf for leaf, _ in self.under(globs) if not leaf.touched]
        gone = {leaf.source: leaf for leaf in untouched if leaf.source is not None}
        if gone:
            self.notes.append(f"left out, as `optional` says: {listed(list(gone))}")
        for leaf in gone.values():
            self.drop(leaf)

    def under(self, globs: Sequence[str]) -> list[tuple[_Leaf, str]]:
        """The leaves that globs name, with the first that does."""
        leaves = {glob_text(self.path(leaf)): leaf for leaf in self.here.values() if globs}
        found: dict[str, str] = {}
        for glob in globs:
            for text in named_by(leaves, glob):
                found.setdefault(text, glob)
        return [(leaf, found[text]) for text, leaf in leaves.items() if text in found]

    def drop(self, leaf: _Leaf) -> None:
        """Drops a leaf of the source."""
        del self.here[leaf.text]
        if leaf.source is not None:
            self.dropped.append(leaf.source)

    def apply(self, rule: Rule) -> None:
        """Applies a rule to every leaf that it matches."""
        found = [self.hits(pattern) for pattern in rule.patterns]
        if rule.drop:
            for leaf in found[0]:
                if leaf.source is None:
                    self.problem(rule, leaf.text, "an operation made it; drop what it is made of")
                self.drop(leaf)
            moves = []
        elif isinstance(rule.regroup, Gathered):
            moves = self.gathered(rule, rule.regroup, found)
        else:
            moves = [move for leaf in found[0] if (move := self.alone(rule, leaf)) is not None]
            if found[0] and not moves:
                self.problems.append(f"{rule}: every path stays as it is")
        for pattern, hits in zip(rule.patterns, found, strict=True):
            if not hits and not (rule.optional and not any(found)):
                self.matches_nothing(rule, pattern)
        if rule.optional and not any(found):
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
        whole path says that this is so, and always applies.)"""
        before, divided = leaf.text, rule.regroup
        leaf = self.operated(rule, leaf)
        if isinstance(divided, Divided):
            return self.divided(rule, divided, before, leaf)
        try:
            after = before if rule.to is None else self.replaced(rule, rule.to, before)
        except ValueError as error:
            self.problem(rule, before, str(error))
            self.incomplete = True
            after = before
        else:
            if after == before and not rule.each and rule.patterns[0].literal is None:
                return None
        return _Move([before], leaf.place, [after], [leaf.value])

    def operated(self, rule: Rule, leaf: _Leaf) -> _Leaf:
        """A leaf after what a rule does to each, under the path that it has."""
        for kind in rule.each:
            value = None
            if leaf.value is not None:
                shape = leaf.value.shape
                try:
                    operation = kind.operation(shape) if isinstance(kind, Reshaped) else kind
                    (value,) = applied(operation, [leaf.value])
                except TreeMismatchError as error:
                    self.problem(rule, leaf.text, error.summary)
            leaf = _Leaf(leaf.text, value, leaf.place, True, leaf.last)
        return leaf

    def divided(self, rule: Rule, divided: Divided, before: str, leaf: _Leaf) -> _Move:
        """One leaf as several."""
        parts: tuple[Value, ...] | None = None
        if leaf.value is not None:
            try:
                parts = applied(divided.operation(leaf.value.shape), [leaf.value])
            except TreeMismatchError as error:
                self.problem(rule, before, error.summary)
        count = len(parts or ())
        into = divided.into if isinstance(divided.into, tuple) else (divided.into,) * count
        self.incomplete = self.incomplete or parts is None
        after = []
        for position, replacement in enumerate(into):
            try:
                after.append(self.replaced(rule, replacement, before, position))
            except ValueError as error:
                self.problem(rule, before, str(error))
                self.incomplete = True
        values = parts if parts is not None and len(after) == count else [None] * len(after)
        return _Move([before], leaf.place, after, list(values))

    def replaced(
        self, rule: Rule, replacement: Replacement, text: str, position: int | None = None
    ) -> str:
        return replacement.replaced(rule.patterns[0], text, lambda m: rule.names(m, position))

    def gathered(
        self, rule: Rule, gathered: Gathered, found: Sequence[Sequence[_Leaf]]
    ) -> list[_Move]:
        """Leaves that would get the same path as one."""
        groups: dict[str, dict[int, list[_Leaf]]] = {}
        seen: set[_Leaf] = set()
        for position, hits in enumerate(found):
            for leaf in hits:
                try:
                    if leaf in seen:
                        raise ValueError("more than one of the regexes match it")
                    seen.add(leaf)
                    text, piece = rule.piece(gathered, position, leaf.text)
                    groups.setdefault(text, {}).setdefault(piece, []).append(leaf)
                except ValueError as error:
                    self.problem(rule, leaf.text, str(error))
                    self.incomplete = True
        moves = []
        for text, pieces in groups.items():
            wrong = self.wrong_pieces(rule, pieces, found)
            for problem in wrong:
                self.problem(rule, text, problem)
            before = [leaf.text for piece in sorted(pieces) for leaf in pieces[piece]]
            leaves = [self.operated(rule, self.here[name]) for name in before]
            values = [leaf.value for leaf in leaves if leaf.value is not None]
            made: Value | None = None
            if not wrong and len(values) == len(leaves):
                try:
                    operation = gathered.operation([value.shape for value in values])
                    (made,) = applied(operation, values)
                except TreeMismatchError as error:
                    self.problem(rule, text, error.summary)
            moves.append(_Move(before, min(leaf.place for leaf in leaves), [text], [made]))
        return moves

    @staticmethod
    def wrong_pieces(
        rule: Rule, pieces: Mapping[int, Sequence[_Leaf]], found: Sequence[Sequence[_Leaf]]
    ) -> list[str]:
        """What keeps pieces from being a whole. A regex that matches nothing at all is told of
        elsewhere."""
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
        """Moves leaves, all at once."""
        for move in moves:
            for text in move.before:
                del self.here[text]
        new: dict[str, _Move] = {}
        for move in moves:
            several = len(move.after) > 1
            pairs = zip(move.after, move.values, strict=True)
            for part, (text, value) in enumerate(pairs):
                place = (*move.place, part) if several else move.place
                if text in self.here:
                    self.meets(rule, move, new.get(text), text)
                else:
                    self.here[text] = _Leaf(text, value, place, True, rule)
                    new[text] = move

    def meets(self, rule: Rule, move: _Move, other: _Move | None, text: str) -> None:
        mine = " + ".join(move.before)
        self.incomplete = True
        if other is None:
            self.problems.append(f"{rule}: {mine} -> {text}: there is such a leaf already")
        else:
            self.problems.append(f"{rule}: {' + '.join(other.before)} and {mine} -> {text}")

    def matches_nothing(self, rule: Rule, pattern: Pattern) -> None:
        if self.incomplete or (rule.drop and any(map(pattern.regex.search, self.left_out))):
            return
        which = f": `{pattern.text}`" if len(rule.patterns) > 1 else ""
        self.problems.append(f"{rule}{which}: matches no leaf")
        if len(self.hints) >= _MOST_HINTS:
            return
        for leaf in self.here.values():
            source = format_path(leaf.source or ())
            if leaf.text != source and pattern.regex.search(source):
                self.hints.append(f"`{source}` is `{leaf.text}` by rule {rule.number}")
                return
        plain = "".join(c for c in pattern.literal or pattern.text if c not in r"\^$*+?()|[]{}")
        near = nearest(plain, (tuple(text.split("/")) for text in self.here))
        self.hints += [f"the nearest leaf to `{pattern.text}` is `{name}`" for name in near[:1]]

    def problem(self, rule: Rule, where: str, text: str) -> None:
        self.problems.append(f"{rule}: {where}: {text}")

    def mapped(self, rules: Map) -> Mapped:
        """The result, once all rules are applied."""
        last = sorted(self.here.values(), key=lambda leaf: leaf.place)
        paths = [self.path(leaf) for leaf in last]
        if not self.incomplete:
            self.check_tree(last, paths)
        for leaf, glob in self.under((*rules.initial, *rules.optional)):
            # What is in a module of that name may be made: the target may have a leaf of it, too.
            exact = compile_glob(glob).fullmatch(glob_text(self.path(leaf)))
            if leaf.last is not None and exact:
                self.problem(leaf.last, leaf.text, f"`init` has `{glob}`, but it is made here")
        if self.problems:
            raise TreeMismatchError(
                f"{rules.name}: the map does not fit the leaves", self.problems, self.hints
            )
        pairs = list(zip(paths, last, strict=True))
        values = {path: leaf.value for path, leaf in pairs if leaf.value is not None}
        origin = {path: "map" for path, leaf in pairs if leaf.touched}
        return Mapped(
            LeafMap(values, origin, tuple(self.dropped)),
            rules.initial,
            rules.optional,
            tuple(self.notes),
            tuple(self.idle),
        )

    def path(self, leaf: _Leaf) -> Path:
        """The path that rules have given a leaf."""
        if leaf.last is None and leaf.source is not None:
            return leaf.source
        try:
            return split_path(leaf.text)
        except ArgumentError as error:
            problem = f"{leaf.last}: {error.summary}"
            if problem not in self.problems:
                self.problems.append(problem)
            return (leaf.text,)

    def check_tree(self, leaves: Sequence[_Leaf], paths: Sequence[Path]) -> None:
        """Finds leaves that would be in one place or below each other."""
        at: dict[Path, _Leaf] = {}
        for leaf, path in zip(leaves, paths, strict=True):
            other = at.setdefault(path, leaf)
            if other is not leaf:
                self.problems.append(
                    f"{other.last or leaf.last}: {other.text} and {leaf.text} are one path"
                )
        for leaf, path in zip(leaves, paths, strict=True):
            for depth in range(1, len(path)):
                above = at.get(path[:depth])
                if above is not None and (rule := leaf.last or above.last) is not None:
                    self.problems.append(
                        f"{rule}: {leaf.text} would be below the leaf {above.text}"
                    )
