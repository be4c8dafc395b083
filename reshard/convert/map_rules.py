"""The rules of a map between two trees of leaves, and their operations for given shapes. Pure."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import (
    Apply,
    Concat,
    Crop,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.convert.path_template import pattern_template, replacement_template
from reshard.convert.replacement import Pattern, Replacement, number, parse_replacement
from reshard.errors import TreeMismatchError

OPPOSITE = {"nnx": "linen", "linen": "nnx"}


@dataclasses.dataclass(frozen=True, slots=True)
class Reshaped:
    """A new shape for a leaf.

    Attributes:
      to: the sizes; one may be -1.
      before: the shape that the leaf must have; None for any.
    """

    to: Shape
    before: Shape | None

    def operation(self, shape: Shape) -> Reshape:
        """For a leaf of this shape."""
        if self.before is not None and self.before != shape:
            raise TreeMismatchError(f"its shape is {list(shape)}, not {list(self.before)}")
        rest = math.prod(size for size in self.to if size >= 0)
        if -1 in self.to and (rest == 0 or math.prod(shape) % rest):
            raise TreeMismatchError(f"{list(shape)} cannot be reshaped to {list(self.to)}")
        return Reshape(tuple(math.prod(shape) // rest if size < 0 else size for size in self.to))


@dataclasses.dataclass(frozen=True, slots=True)
class Divided:
    """One leaf becomes several.

    Attributes:
      kind: whether the axis stays or goes.
      axis: the axis.
      sizes: of the parts, for `split`; None for equal ones.
      into: a path for each part, or one for all of them in which `{}` is the position.
    """

    kind: Literal["split", "unstack"]
    axis: int
    sizes: tuple[int, ...] | None
    into: tuple[Replacement, ...] | Replacement

    def operation(self, shape: Shape) -> Split | Unstack:
        """For a leaf of this shape."""
        if not -len(shape) <= self.axis < len(shape):
            raise TreeMismatchError(f"{list(shape)} has no axis {self.axis}")
        size = shape[self.axis]
        if self.kind == "unstack" and not size:
            raise TreeMismatchError(f"axis {self.axis} of {list(shape)} has no parts")
        if self.kind == "unstack":
            return Unstack(self.axis, len(self.into) if isinstance(self.into, tuple) else size)
        if self.sizes is not None:
            return Split(self.axis, self.sizes)
        count = len(self.into) if isinstance(self.into, tuple) else 1
        if size % count:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} has no {count} equal parts; give `sizes`"
            )
        return Split(self.axis, (size // count,) * count)

    def replacements(self, count: int) -> list[Replacement]:
        """One for each of so many parts."""
        return list(self.into) if isinstance(self.into, tuple) else [self.into] * count


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """All leaves that would get the same path become one.

    Attributes:
      kind: along an axis that they have, or along a new one.
      axis: the axis.
      by: which piece a leaf is: its number from 0, or a text of `order`; None if the position of
        the pattern says so.
      order: the pieces.
      sizes: of the pieces along the axis, for `concat`; None for any.
      names: of the mesh axes that a new axis is partitioned over, for `stack`.
    """

    kind: Literal["concat", "stack"]
    axis: int
    by: Replacement | None = None
    order: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()

    def operation(self, shapes: Sequence[Shape]) -> Concat | Stack:
        """For leaves of these shapes."""
        if self.kind == "stack":
            return Stack(self.axis, self.names)
        concat = Concat(self.axis)
        concat.shapes(shapes)
        sizes = tuple(shape[self.axis] for shape in shapes)
        if self.sizes is not None and self.sizes != sizes:
            raise TreeMismatchError(
                f"its pieces have the sizes {list(sizes)}, not {list(self.sizes)}"
            )
        return concat


@dataclasses.dataclass(frozen=True, slots=True)
class Nest:
    """Numbers that count through groups of these sizes, and numbers of groups and within them.

    Attributes:
      sizes: of the groups.
      flat: the number that counts through; it gives the names `outer` and `inner`.
      outer: the number of the group; with `inner` it gives the name `flat`.
      inner: the number within the group.
    """

    sizes: tuple[int, ...]
    flat: Replacement | None
    outer: Replacement | None
    inner: Replacement | None

    def names(self, number_of: Callable[[Replacement], int]) -> dict[str, int]:
        """The names that it gives for a match.

        Raises:
          ValueError: there is no such group, or it is not as large.
        """
        if self.flat is not None:
            inner = flat = number_of(self.flat)
            for outer, size in enumerate(self.sizes):
                if inner < size:
                    return {"outer": outer, "inner": inner}
                inner -= size
            raise ValueError(f"number {flat} is in none of groups of {list(self.sizes)}")
        assert self.outer is not None and self.inner is not None
        outer, inner = number_of(self.outer), number_of(self.inner)
        if outer >= len(self.sizes) or inner >= self.sizes[outer]:
            raise ValueError(f"groups of {list(self.sizes)} have no number {inner} in {outer}")
        return {"flat": sum(self.sizes[:outer]) + inner}


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
      number: its place in the file, from 1.
      patterns: which leaves; several for the pieces that are gathered, in their order.
      to: their new paths; None where they keep them, and where `regroup` has them.
      drop: whether they are dropped; then there is nothing else.
      each: what is done to each of them, in this order.
      regroup: what is done to them then.
      nest: names for arithmetic.
      optional: it may match nothing.
    """

    number: int
    patterns: tuple[Pattern, ...]
    to: Replacement | None = None
    drop: bool = False
    each: tuple[Apply | Transpose | Reshaped | Pad | Crop, ...] = ()
    regroup: Divided | Gathered | None = None
    nest: Nest | None = None
    optional: bool = False

    def names(self, match: re.Match[str], position: int | None = None) -> dict[str, int]:
        """The names for arithmetic in the replacement of a match, by a part at a position.

        Raises:
          ValueError: `nest` has none for it.
        """
        names = {} if position is None else {"i": position}
        if self.nest is not None:
            names |= self.nest.names(lambda text: number(text.expanded(match, names)))
        return names

    def piece(self, gathered: Gathered, position: int, text: str) -> tuple[str, int]:
        """The path that a leaf under a printed path becomes a piece of, and which piece.

        Args:
          gathered: `regroup`.
          position: of the pattern that matches.
          text: the printed path.

        Raises:
          ValueError: nothing says which.
        """
        assert self.to is not None
        pattern = self.patterns[position]
        target = self.to.replaced(pattern, text, self.names)
        if gathered.by is None:
            return target, position
        first, *more = pattern.regex.finditer(text)
        if more:
            raise ValueError("the regex matches more than once in it; anchor it with `^` and `$`")
        name = gathered.by.expanded(first, self.names(first))
        if gathered.order is None:
            return target, number(name)
        if name not in gathered.order:
            raise ValueError(f"`{name}` is not in `order`")
        return target, gathered.order.index(name)

    def pieces(self) -> Sequence[str] | None:
        """What says which pieces a whole has; None if that is a number."""
        if isinstance(self.regroup, Gathered) and self.regroup.by is not None:
            return self.regroup.order
        return [pattern.text for pattern in self.patterns]

    def __str__(self) -> str:
        return f"rule {self.number}, {' + '.join(f'`{p.text}`' for p in self.patterns)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """The rules of a file.

    Attributes:
      name: of the file.
      rules: in order.
      initial: globs of leaves of the target that keep the model's own initial value.
      optional: the same, of leaves that may not be there.
      ignored: globs of leaves of the source that are dropped if they are there.
      to: the API that it converts to, if it says so: `"nnx"` or `"linen"`.
    """

    name: str
    rules: tuple[Rule, ...]
    initial: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    to: str | None = None


def inverse(rules: Map) -> Map:
    """The map in the opposite direction. What is dropped here is initial there, and what is initial
    here is dropped there, if it is there; what is optional here is so there.

    Rules that are for more than one path may take leaves that they did not make: see
    `reshard.convert.mapped.apply_inverse`.

    Raises:
      TreeMismatchError: rules whose regex and replacement cannot change places, or that do not say
        what they undo: all of them.
    """
    undone: list[Rule] = []
    dropped: list[str] = []
    optional = list(rules.ignored)
    problems: list[str] = []
    for rule in reversed(rules.rules):
        try:
            if rule.drop:
                globs = [pattern_template(pattern).glob for pattern in rule.patterns]
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
            ["a map that a conversion has written can be"],
        )
    may = {rule.number for rule in rules.rules if rule.optional}
    to = OPPOSITE.get(rules.to or "")
    undone = [dataclasses.replace(back, optional=back.number in may) for back in undone]
    ignored = (*rules.initial, *rules.optional)
    return Map(rules.name, tuple(undone), tuple(dropped[::-1]), tuple(optional), ignored, to)


def _undone(rule: Rule) -> list[Rule]:
    """The rules that undo one. Raises ValueError or TreeMismatchError if there are none."""
    each = tuple(_undone_each(kind) for kind in reversed(rule.each))
    changed = [Rule(rule.number, (pattern,), each=each) for pattern in rule.patterns if each]
    sources = [pattern_template(pattern) for pattern in rule.patterns]
    whole, regroup = sources[0].whole, rule.regroup
    if any(source.whole != whole for source in sources):
        raise ValueError("some of its regexes are for whole paths, and some for modules")
    target = sources[0] if rule.to is None else replacement_template(rule.to, whole)
    if regroup is None:
        to = sources[0].replacement(target)
        return [Rule(rule.number, (target.pattern(),), to, each=each)]
    if isinstance(regroup, Divided):
        one = not isinstance(regroup.into, tuple)
        parts = [replacement_template(part, whole) for part in regroup.replacements(1)]
        groups = parts[0].groups
        if any(part.groups != groups for part in parts) or (0 in groups) != one:
            raise ValueError("the paths of its parts do not have the same numbers in them")
        patterns = tuple(part.pattern() for part in parts)
        by = parse_replacement(rf"\{groups.index(0) + 1}", patterns) if one else None
        kind = "concat" if regroup.kind == "split" else "stack"
        gathered = Gathered(kind, regroup.axis, by, sizes=regroup.sizes)
        to = sources[0].replacement(parts[0])
        return [Rule(rule.number, patterns, to, regroup=gathered), *changed]
    if regroup.order is not None:
        raise ValueError("its pieces are neither numbers nor a list of regexes")
    if regroup.kind == "concat" and regroup.sizes is None:
        raise ValueError("`concat` does not say the `sizes` of the pieces")
    kind = "split" if regroup.kind == "concat" else "unstack"
    into = None
    if regroup.by is not None:
        by = replacement_template(regroup.by, True)
        if len(by.pieces) > len(by.groups) or by.groups in [(), *zip(target.groups)]:
            raise ValueError(f"`{regroup.by.text}` is not the number of a piece alone")
        into = sources[0].numbered(by.groups[0]).replacement(target)
    divided = Divided(
        kind,
        regroup.axis,
        regroup.sizes,
        into or tuple(source.replacement(target) for source in sources),
    )
    return [Rule(rule.number, (target.pattern(),), regroup=divided), *changed]


def _undone_each(
    kind: Apply | Transpose | Reshaped | Pad | Crop,
) -> Transpose | Reshaped | Pad | Crop:
    if isinstance(kind, Apply):
        raise TreeMismatchError(f"what `{kind.name}` makes cannot be run backwards")
    if isinstance(kind, Reshaped):
        if kind.before is None:
            raise TreeMismatchError("`reshape` does not say the shape that it is `from`")
        return Reshaped(kind.before, kind.operation(kind.before).shape)
    if isinstance(kind, Transpose):
        axes = kind.axes
        if sorted(axes) != list(range(len(axes))):
            raise TreeMismatchError(f"axes {list(axes)} are no order of axes")
        return Transpose(tuple(axes.index(axis) for axis in range(len(axes))))
    if isinstance(kind, Pad):
        return Crop(kind.widths, kind.fill)
    raise TreeMismatchError("a crop cannot be undone: what it cuts off is gone")
