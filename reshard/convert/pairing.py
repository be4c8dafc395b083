"""What comes of pairing the modules of two models: matches of leaves, what is left open, and what
is at odds. Pure.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Concat, Transpose
from reshard.convert import layers
from reshard.convert.layers import Match
from reshard.convert.leafmap import LeafMap, Source, Value, applied
from reshard.convert.module_tree import Leaf, Module
from reshard.convert.replacement import literal_replacement, toml_text, whole_path
from reshard.convert.scan_axis import NO_MOVE, Move, Placed, moves
from reshard.tree import Path, format_path

# Where one side has an array for each layer, and the other has one for all of them.
STACKED = "one side is stacked and the other is not"
_MAX_LISTED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Abstention:
    """What structure does not decide.

    Attributes:
      linen: paths on Linen's side: of modules, without a collection, or of leaves.
      nnx: paths of what they may be in NNX.
      reason: why it is not decided.
      hint: what may help, where that is known.
      rule: of a map for the way to NNX, that may decide it.
    """

    linen: tuple[Path, ...]
    nnx: tuple[Path, ...]
    reason: str
    hint: str = ""
    rule: str = ""

    def __str__(self) -> str:
        candidates = f", perhaps {listed(self.nnx)}" if self.nnx else ""
        return f"{listed(self.linen)}{candidates}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """Leaves that should be one by their names, and cannot be.

    Attributes:
      linen: Linen's: one, or those that would be joined.
      nnx: NNX's.
      values: what differs, in words: that of Linen's and that of NNX's.
      how: how that differs, where it can be said.
    """

    linen: tuple[Leaf, ...]
    nnx: Leaf
    values: tuple[str, str]
    how: str = ""

    def __str__(self) -> str:
        return f"{' and '.join(self._names)}: {self._differ('Linen', 'NNX')}"

    def told(self, to: str) -> str:
        """It in the words of a conversion to one of the APIs."""
        one, other = self._names
        if [leaf.path[1:] for leaf in self.linen] == [self.nnx.path]:
            return f"{other}: {self._differ('the checkpoint', 'the model', to)}"
        names = f"{one} and {other}" if to == "nnx" else f"{other} and {one}"
        return f"{names}: {self._differ('the checkpoint', 'the model', to)}"

    @property
    def counts(self) -> bool:
        """Whether it says that modules are not the same. A cache has the size of the batch: only
        parameters do."""
        return any(map(layers.is_parameter, (*self.linen, self.nnx)))

    @property
    def _names(self) -> tuple[str, str]:
        return " + ".join(format_path(x.path) for x in self.linen), format_path(self.nnx.path)

    def _differ(self, before: str, after: str, to: str = "nnx") -> str:
        one, other = self.values if to == "nnx" else self.values[::-1]
        return f"{one} in {before}, {other} in {after}{self.how and f': {self.how}'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Alignment:
    """What is known of a conversion.

    Attributes:
      map: from Linen's leaves to NNX's. Those without a place in NNX, which have no effect if they
        are zero, must be that.
      abstentions: what is left open.
      mismatches: leaves that should be one and differ in shape or collection.
      modules: paths of the modules of both sides that are one.
      groups: those of them that class and order have paired, by class.
      numbered: those of these that numbers in names have paired.
    """

    map: LeafMap
    abstentions: tuple[Abstention, ...]
    mismatches: tuple[Mismatch, ...]
    modules: tuple[tuple[Path, Path], ...] = ()
    groups: tuple[tuple[tuple[Path, Path], ...], ...] = ()
    numbered: tuple[tuple[tuple[Path, Path], ...], ...] = ()


def listed(paths: Sequence[Path]) -> str:
    """Paths as text, of many the first and the last."""
    texts = [format_path(path) for path in paths]
    if len(texts) > _MAX_LISTED:
        return f"{', '.join(texts[: _MAX_LISTED - 1])}, ... {texts[-1]} ({len(texts)})"
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def stack_hint(apart: Path, together: Path) -> str:
    """How to stack layers of Linen's. `{}` in `apart` is the number of a layer."""
    return f'reshard.stack(ckpt, "{format_path(apart)}", into="{format_path(together)}")'


def unstack_hint(together: Path, apart: Path) -> str:
    """How to unstack layers of Linen's. `{}` in `apart` is the number of a layer."""
    return f'reshard.unstack(ckpt, "{format_path(together)}", into="{format_path(apart)}")'


def apart(leaf: Leaf, leaves: Iterable[Leaf]) -> Abstention | None:
    """What is open of a leaf of Linen's that may be some of NNX's in one array, which has no more
    of the shape of its parts than it has parts; None if it is none."""
    by_shape: dict[Shape, list[Leaf]] = {}
    for other in filter(layers.is_parameter, leaves):
        by_shape.setdefault(other.shape, []).append(other)
    shapes = [(*leaf.shape[:axis], *leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape))]
    axes = [a for a, x in enumerate(shapes) if 1 < len(by_shape.get(x, ())) == leaf.shape[a]]
    if len(axes) != 1:
        return None
    (axis,) = axes
    parts = tuple(other.path for other in by_shape[shapes[axis]])
    pattern = toml_text(whole_path(format_path(leaf.path)).text)
    into = ", ".join(toml_text(literal_replacement(format_path(part)).text) for part in parts)
    rule = f"from = {pattern}\nunstack = {{ axis = {axis}, into = [{into}] }}"
    rule += "  # or in another order"
    reason = f"one array for {len(parts)}, and nothing tells which part is which"
    return Abstention((leaf.path,), parts, reason, rule=rule)


def difference(linen: Shape, nnx: Shape) -> str:
    """How two shapes differ, by what they look like; empty if that says nothing."""
    if linen == nnx[::-1]:
        return "transposed"
    if sorted(linen) == sorted(nnx):
        return "its axes are in another order"
    more, less = sorted((linen, nnx), key=len, reverse=True)
    if len(more) == len(less) + 1:
        for axis, size in enumerate(more):
            if more[:axis] + more[axis + 1 :] == less:
                side = "Linen" if more is linen else "NNX"
                return f"{side} has a stack of {size} along axis {axis}"
    return "reshaped" if math.prod(linen) == math.prod(nnx) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A match of leaves.

    Attributes:
      match: the match.
      origin: what says so: `"path"` or `"structure"`.
      move: the axis that moves.
    """

    match: Match
    origin: str
    move: Move = NO_MOVE


@dataclasses.dataclass(eq=False, slots=True)
class Pairing:
    """What comes of pairing two modules.

    Attributes:
      found: matches of leaves.
      zeros: leaves that must be zero.
      norms: modules whose leaves are named after those of other modules, to be matched last.
      abstentions: what is open.
      mismatches: leaves that should be one and cannot be.
      modules: paths of modules that are one.
      groups: those of them that class and order have paired, by class.
      numbered: those of these that numbers in names have paired.
      rest: how many more parameters of a name and shape are open in Linen than in NNX.
      mismatch: why the two modules themselves, apart from what is in them, are not the same.
      stacked: whether shapes may differ in the order of axes.
    """

    found: list[Found] = dataclasses.field(default_factory=list)
    zeros: list[Leaf] = dataclasses.field(default_factory=list)
    norms: list[tuple[Module, Module, str]] = dataclasses.field(default_factory=list)
    abstentions: list[Abstention] = dataclasses.field(default_factory=list)
    mismatches: list[Mismatch] = dataclasses.field(default_factory=list)
    modules: list[tuple[Path, Path]] = dataclasses.field(default_factory=list)
    groups: list[tuple[tuple[Path, Path], ...]] = dataclasses.field(default_factory=list)
    numbered: list[tuple[tuple[Path, Path], ...]] = dataclasses.field(default_factory=list)
    rest: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    mismatch: str = ""
    stacked: bool = False

    def include(self, other: "Pairing") -> None:
        """Takes over what comes of two modules inside."""
        self.found += other.found
        self.zeros += other.zeros
        self.norms += other.norms
        self.abstentions += other.abstentions
        self.mismatches += other.mismatches
        self.modules += other.modules
        self.groups += other.groups
        self.numbered += other.numbered
        self.rest.update(other.rest)

    def count(self, leaves: Iterable[Leaf], sign: int) -> None:
        """Counts leaves that are open, with 1 for Linen's and -1 for NNX's."""
        for leaf in leaves:
            if layers.is_parameter(leaf):
                shape = tuple(sorted(leaf.shape)) if self.stacked else leaf.shape
                self.rest[leaf.path[-1], shape] += sign


def value_of(found: Found) -> Value:
    """What the leaf of NNX's is made of."""
    match = found.match
    value, *others = (Source(leaf.path, leaf.shape) for leaf in match.inputs)
    if match.join is not None:
        (value,) = applied(match.join, [value, *others])
    order = found.move.order(len(value.shape))
    return value if order == tuple(range(len(order))) else applied(Transpose(order), [value])[0]


def place_axes(pairing: Pairing, linen: Module, nnx: Module) -> None:
    """Finds which axis moves in a stack, the same one for all leaves of a collection.

    Args:
      pairing: what is known below two modules that are a stack. Matches whose axes are not clear
        are taken out.
      linen: Linen's module.
      nnx: NNX's module.
    """
    by_collection: dict[str, list[Found]] = {}
    for found in pairing.found:
        by_collection.setdefault(found.match.inputs[0].kind, []).append(found)
    pairing.found = []
    for kind, group in by_collection.items():
        weights = [
            Placed(x.match.inputs[0].shape, x.match.output.shape, len(x.match.inputs))
            for x in group
        ]
        candidates = moves(weights)
        if all(x.match.shape == x.match.output.shape for x in group):
            # With as many layers as features the axis may be another one than NNX's all the same.
            others = [m for m in candidates if m.before != m.after and 0 in (m.before, m.after)]
            candidates = [NO_MOVE, *(others if layers.may_lie_elsewhere(linen) else ())]
        if candidates == [NO_MOVE]:
            pairing.found += group
            continue
        if len(candidates) == 1:
            for found, weight in zip(group, weights, strict=True):
                join = Concat(weight.joined_at(candidates[0])) if found.match.join else None
                match = dataclasses.replace(found.match, join=join)
                pairing.found.append(Found(match, found.origin, candidates[0]))
            continue
        if candidates:
            choices = " or ".join(map(str, candidates))
            reason = f"the axis of the layers in {kind} is not known: {choices}"
        else:
            reason = f"no axis of the layers fits all leaves in {kind}"
            for found in group:
                if found.match.shape != found.match.output.shape:
                    pairing.mismatches.append(mismatch_of(found.match))
        pairing.abstentions.append(Abstention(_whole(linen), _whole(nnx), reason))
        pairing.mismatch = pairing.mismatch or reason


def _whole(module: Module) -> tuple[Path, ...]:
    """The path of a module; of a model, which has none, those of all that is in it."""
    if module.path:
        return (module.path,)
    leaves = (leaf.path for held in module.leaves.values() for leaf in held)
    return (*(child.path for child in module.children.values() if child.filled), *leaves)


def mismatch_of(match: Match) -> Mismatch:
    """What to say of leaves whose shapes differ."""
    linen, nnx = match.shape, match.output.shape
    shapes = str(list(linen)), str(list(nnx))
    return Mismatch(match.inputs, match.output, shapes, difference(linen, nnx))


def unlike(made: Sequence[Pairing]) -> str:
    """Why modules that class and order pair are not the same; empty if they are."""
    for pairing in made:
        if pairing.mismatch:
            return pairing.mismatch
    for pairing in made:
        for mismatch in pairing.mismatches:
            if mismatch.counts:
                return str(mismatch)
        for (name, shape), more in pairing.rest.items():
            if more:
                side, other = ("Linen", "NNX") if more > 0 else ("NNX", "Linen")
                return f"in {side} there is a {name} {list(shape)} more than in {other}"
    if not any(pairing.found or pairing.norms for pairing in made):
        return "nothing in them has the same name"
    return ""


def other_shapes(made: Sequence[Pairing]) -> bool:
    """Whether modules that class and order pair are the same apart from shapes of parameters, and
    in any other order would be no more alike."""
    clashes = [x for pairing in made for x in pairing.mismatches if x.counts]
    linen = {(x.linen[0].path[-1], x.values[0]) for x in clashes}
    nnx = {(x.nnx.path[-1], x.values[1]) for x in clashes}
    return (
        bool(clashes)
        and not linen & nnx
        and not any(pairing.mismatch or any(pairing.rest.values()) for pairing in made)
    )


def match_norms(pairing: Pairing) -> None:
    """Matches the leaves that norms have for those of other layers, now that those are known."""
    sources: dict[Path, Path] = {
        found.match.output.path: found.match.inputs[0].path
        for found in pairing.found
        if found.match.join is None and found.move == NO_MOVE
    }
    for linen, nnx, origin in pairing.norms:
        matched = set()
        for match in layers.normed(linen, nnx, sources):
            matched.add(match.inputs[0].path)
            if match.shape == match.output.shape:
                pairing.found.append(Found(match, origin))
            else:
                pairing.mismatches.append(mismatch_of(match))
        rest = [
            leaf.path
            for name, held in linen.leaves.items()
            for leaf in held
            if "/" in name and leaf.path not in matched
        ]
        if rest:
            reason = "the leaves that they are for have no counterparts"
            pairing.abstentions.append(Abstention(tuple(rest), (nnx.path,), reason))
