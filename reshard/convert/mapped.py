"""What the rules of a map make of a tree of leaves. Pure.

Rules are applied one after another, each to every leaf as earlier ones left it. What comes out are
the steps from the leaves of the source to those that no rule changes any more: a leaf that several
rules only rename goes to its last path in one step.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Operation
from reshard.convert.maprules import Divided, Gathered, Map, Reshaped, Rule
from reshard.convert.ordering import Change, Value, in_order
from reshard.convert.patterns import Pattern, Replacement
from reshard.convert.steps import Step
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.tree import Path, compile_glob, format_path, glob_text, nearest, split_path

# Looking for the nearest leaf takes longer than all else: it is done for so many rules.
_MOST_HINTS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """What a map makes of leaves.

    Attributes:
      steps: from the leaves that are not dropped to `final`. A leaf that a rule applies to has one
        even if it keeps its path.
      dropped: leaves of the source that are dropped.
      initial: globs of leaves of the target that keep the model's own initial value.
      untouched: leaves of the source that no rule applies to.
      final: all leaves after the rules, untouched ones too, with their shapes.
    """

    steps: list[Step]
    dropped: list[Path]
    initial: tuple[str, ...]
    untouched: list[Path]
    final: dict[Path, Shape]


def apply_map(rules: Map, leaves: Mapping[Path, Shape]) -> Mapped:
    """The steps that a map says.

    Args:
      rules: from `read_map` or `inverse`.
      leaves: the leaves of the source with their shapes; all keys are text. The steps are for those
        of them that are not dropped.

    Raises:
      TreeMismatchError: rules that match nothing, leaves that would meet in one path or be below
        another, pieces that are missing, operations that do not fit, numbers that are none: all of
        them, by rule.
    """
    tree = _Tree(leaves)
    for rule in rules.rules:
        tree.apply(rule)
    tree.ignore(rules.ignored)
    return tree.mapped(rules)


@dataclasses.dataclass(eq=False, slots=True)
class _Leaf:
    """A leaf of the source, or what an operation made, under the path that rules have given it.

    Attributes:
      text: the printed path.
      source: the path in the source, if it is a leaf of that.
      shape: its shape; None after an operation that did not fit.
      place: where it is in the tree, to sort by.
      first: which rule, in order, was the first that applied to it since it was made; 0 for none.
      last: the last rule that named it.
    """

    text: str
    source: Path | None
    shape: Shape | None
    place: tuple[int, ...]
    first: int = 0
    last: Rule | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Made:
    """An operation on leaves, and what it made; `key` says where it comes among the steps."""

    key: tuple[int, tuple[int, ...], int]
    inputs: list[_Leaf]
    outputs: list[_Leaf]
    operation: Operation


@dataclasses.dataclass(eq=False, slots=True)
class _Move:
    """Leaves that become others together: those under the paths `before`, as `leaves` after what is
    done to each of them, then by `operation` or by a new path alone. No shapes are known after an
    operation that does not fit."""

    before: list[str]
    leaves: list[_Leaf]
    after: list[str]
    operation: Operation | None = None
    fits: bool = True


class _Tree:
    """The leaves while rules are applied to them."""

    def __init__(self, leaves: Mapping[Path, Shape]):
        self.here: dict[str, _Leaf] = {}
        for place, (path, shape) in enumerate(leaves.items()):
            text = format_path(path)
            self.here[text] = _Leaf(text, path, tuple(shape), (place,))
        self.applied = 0
        self.made: list[_Made] = []
        self.dropped: list[Path] = []
        self.problems: list[str] = []
        self.hints: list[str] = []
        # Whether leaves are missing because a rule failed: then later ones may well match nothing.
        self.incomplete = False

    def ignore(self, globs: Sequence[str]) -> None:
        """Drops the leaves that globs match and no rule has applied to."""
        for leaf, _ in self.under(globs):
            if leaf.source is not None and not leaf.first:
                self.drop(leaf)

    def under(self, globs: Sequence[str]) -> list[tuple[_Leaf, str]]:
        """The leaves that globs match, with one that does."""
        literals = {format_path(split_path(glob)): glob for glob in globs}
        regexes = [(glob, compile_glob(glob)) for glob in globs if set(glob) & set("*?")]
        found = []
        for text, leaf in self.here.items() if globs else ():
            glob = literals.get(text)
            if glob is None and regexes:
                keys = glob_text(self.path(leaf))
                glob = next((glob for glob, regex in regexes if regex.fullmatch(keys)), None)
            if glob is not None:
                found.append((leaf, glob))
        return found

    def drop(self, leaf: _Leaf) -> None:
        """Drops a leaf of the source."""
        del self.here[leaf.text]
        if leaf.source is not None:
            self.dropped.append(leaf.source)

    def apply(self, rule: Rule) -> None:
        """Applies a rule to every leaf that it matches."""
        self.applied += 1
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
            if not hits:
                self.matches_nothing(rule, pattern)
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
        return _Move([before], [leaf], [after])

    def operated(self, rule: Rule, leaf: _Leaf) -> _Leaf:
        """A leaf after what a rule does to each, under the path that it has."""
        for kind in rule.each:
            operation, shape = None, None
            if leaf.shape is not None:
                try:
                    operation = kind.operation(leaf.shape) if isinstance(kind, Reshaped) else kind
                    (shape,) = operation.shapes([leaf.shape])
                except TreeMismatchError as error:
                    self.problem(rule, leaf.text, error.summary)
            made = _Leaf(leaf.text, None, shape, leaf.place, last=leaf.last)
            if operation is not None:
                self.note([leaf], [made], operation)
            leaf = made
        return leaf

    def divided(self, rule: Rule, divided: Divided, before: str, leaf: _Leaf) -> _Move:
        """One leaf as several."""
        operation, count = None, 0
        if leaf.shape is not None:
            try:
                operation = divided.operation(leaf.shape)
                count = len(operation.shapes([leaf.shape]))
            except TreeMismatchError as error:
                self.problem(rule, before, error.summary)
                operation = None
        into = divided.into if isinstance(divided.into, tuple) else (divided.into,) * count
        self.incomplete = self.incomplete or operation is None
        after = []
        for position, replacement in enumerate(into):
            try:
                after.append(self.replaced(rule, replacement, before, position))
            except ValueError as error:
                self.problem(rule, before, str(error))
                self.incomplete = True
        fits = operation is not None and len(after) == count
        return _Move([before], [leaf], after, operation, fits)

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
            shapes = [leaf.shape for leaf in leaves if leaf.shape is not None]
            operation = None
            if not wrong and len(shapes) == len(leaves):
                try:
                    operation = gathered.operation(shapes)
                    operation.shapes(shapes)
                except TreeMismatchError as error:
                    self.problem(rule, text, error.summary)
                    operation = None
            moves.append(_Move(before, leaves, [text], operation, operation is not None))
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
            if rule.regroup is None:
                outputs = move.leaves
                if not rule.each:
                    move.leaves[0].first = move.leaves[0].first or self.applied
            else:
                shapes: Sequence[Shape | None] = [None] * len(move.after)
                if move.fits and move.operation is not None:
                    shapes = move.operation.shapes([leaf.shape or () for leaf in move.leaves])
                place = min(leaf.place for leaf in move.leaves)
                outputs = [
                    _Leaf("", None, shape, (*place, *([n] if len(shapes) > 1 else [])))
                    for n, shape in enumerate(shapes)
                ]
                if move.fits and move.operation is not None:
                    self.note(move.leaves, outputs, move.operation)
            for leaf, text in zip(outputs, move.after, strict=True):
                leaf.text, leaf.last = text, rule
                if text in self.here:
                    self.meets(rule, move, new.get(text), text)
                else:
                    self.here[text] = leaf
                    new[text] = move

    def meets(self, rule: Rule, move: _Move, other: _Move | None, text: str) -> None:
        mine = " + ".join(move.before)
        self.incomplete = True
        if other is None:
            self.problems.append(f"{rule}: {mine} -> {text}: there is such a leaf already")
        else:
            self.problems.append(f"{rule}: {' + '.join(other.before)} and {mine} -> {text}")

    def note(self, inputs: list[_Leaf], outputs: list[_Leaf], operation: Operation) -> None:
        for leaf in inputs:
            leaf.first = leaf.first or self.applied
        key = min(leaf.first for leaf in inputs), min(leaf.place for leaf in inputs)
        self.made.append(_Made((*key, len(self.made)), inputs, outputs, operation))

    def matches_nothing(self, rule: Rule, pattern: Pattern) -> None:
        if self.incomplete:
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
        values: dict[_Leaf, Value] = {}
        keyed = []
        for made in self.made:
            ends = [
                [self.value(leaf, values) for leaf in side] for side in (made.inputs, made.outputs)
            ]
            keyed.append((made.key, Change(ends[0], ends[1], made.operation)))
        last = sorted(self.here.values(), key=lambda leaf: leaf.place)
        paths = [self.path(leaf) for leaf in last]
        for leaf, path in zip(last, paths, strict=True):
            if leaf.source is not None and leaf.first:
                change = Change([self.value(leaf, values)], [Value(path)], None)
                keyed.append(((leaf.first, leaf.place, 0), change))
        if not self.incomplete:
            self.check_tree(last, paths)
        for leaf, glob in self.under(rules.initial):
            if leaf.last is not None:
                self.problem(leaf.last, leaf.text, f"`init` has `{glob}`, but it is made here")
        if self.problems:
            raise TreeMismatchError(
                f"{rules.name}: the map does not fit the leaves", self.problems, self.hints
            )
        untouched = [leaf.source for leaf in last if leaf.source is not None and not leaf.first]
        keyed.sort(key=lambda entry: entry[0])
        return Mapped(
            in_order([change for _, change in keyed], untouched, "map"),
            self.dropped,
            rules.initial,
            untouched,
            {path: leaf.shape or () for path, leaf in zip(paths, last, strict=True)},
        )

    def value(self, leaf: _Leaf, values: dict[_Leaf, Value]) -> Value:
        if leaf not in values:
            values[leaf] = Value(self.path(leaf) if leaf.source is None else leaf.source)
        return values[leaf]

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
