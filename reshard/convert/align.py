"""Pairs of leaves of a Linen model and an NNX model, as far as structure decides them. Pure.

Modules are paired from the root down:

1. by name, with the standard conversions of lists and dicts (`layers_0` is `layers/0`);
   then by number: `layer_0`, `layer_1`, ... are the members of the one list of the same length;
2. by class and order: the k-th `Dense` of a Linen module is the k-th `Linear` that its counterpart
   defines. Both must have the same number of them, no other module there may be one of them, and
   names and shapes of leaves must agree all the way down.

Everything else is an abstention, which names the candidates of both sides. Equal shapes never pair
two leaves; different shapes keep them apart.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Concat, Transpose, Unstack
from reshard.convert import layers
from reshard.convert.by_order import Modules
from reshard.convert.layers import NO_MOVE, Match, Placed, moves
from reshard.convert.leafmap import Filled, LeafMap, Row, Source, Value, applied
from reshard.convert.module_tree import (
    AUXILIARY,
    RNG_KINDS,
    Leaf,
    Module,
    without,
)
from reshard.tree import Path, format_path

# Where one side has an array for each layer, and the other has one for all of them.
STACKED = "one side is stacked, the other is not"
NO_ORDER = "their names do not show their order"
_MAX_LISTED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Abstention:
    """Modules or leaves whose counterparts structure does not decide.

    Attributes:
      linen: paths in Linen: of modules, without a collection, or of leaves.
      nnx: paths of their candidates in NNX.
      reason: why they are not decided.
      rule: a rule of a map to NNX that may decide them.
    """

    linen: tuple[Path, ...]
    nnx: tuple[Path, ...]
    reason: str
    rule: Row | None = None

    def __str__(self) -> str:
        candidates = f", perhaps {listed(self.nnx)}" if self.nnx else ""
        return f"{listed(self.linen)}{candidates}: {self.reason}"


def listed(paths: Sequence[Path]) -> str:
    """Paths as text, of many the first and the last."""
    texts = [format_path(path) for path in paths]
    if len(texts) > _MAX_LISTED:
        return f"{', '.join(texts[: _MAX_LISTED - 1])}, ... {texts[-1]} ({len(texts)})"
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def apart(leaf: Leaf, leaves: Iterable[Leaf]) -> Abstention | None:
    """The abstention of a Linen leaf that may be several NNX leaves in one array. None if NNX does
    not have exactly as many leaves of their shape as it has parts."""
    by_shape: dict[Shape, list[Leaf]] = {}
    for other in filter(layers.is_parameter, leaves):
        by_shape.setdefault(other.shape, []).append(other)
    shapes = [(*leaf.shape[:axis], *leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape))]
    axes = [a for a, x in enumerate(shapes) if 1 < len(by_shape.get(x, ())) == leaf.shape[a]]
    if len(axes) != 1:
        return None
    (axis,) = axes
    parts = tuple(other.path for other in by_shape[shapes[axis]])
    rule = Row((leaf.path,), parts, Unstack(axis, len(parts)))
    reason = f"one array for {len(parts)}, and the order of its parts is unknown"
    return Abstention((leaf.path,), parts, reason, rule=rule)


@dataclasses.dataclass(slots=True)
class Alignment:
    """The result for a pair of modules; in the end, for two models.

    Attributes:
      map: from Linen's leaves to NNX's, of whole models. Leaves without a place in NNX that have no
        effect if they are zero must be zero.
      abstentions: undecided modules and leaves.
      mismatches: leaves whose names agree and whose shapes or collections differ.
      modules: paths of paired modules.
      groups: those that class and order have paired, by class.
      numbered: those of these that numbers in names have paired.
      found: pairs of leaves.
      zeros: leaves that must be zero.
      norms: modules whose leaves are named after those of other modules, to be matched last.
      rest: how many more parameters of a name and shape are open in Linen than in NNX.
      mismatch: why the two modules, apart from their submodules, are not the same.
      stacked: whether shapes may differ in the order of axes.
    """

    map: LeafMap = dataclasses.field(default_factory=lambda: LeafMap({}))
    abstentions: list[Abstention] = dataclasses.field(default_factory=list)
    mismatches: list[Match] = dataclasses.field(default_factory=list)
    modules: list[tuple[Path, Path]] = dataclasses.field(default_factory=list)
    groups: list[Modules] = dataclasses.field(default_factory=list)
    numbered: list[Modules] = dataclasses.field(default_factory=list)
    found: list[Match] = dataclasses.field(default_factory=list, compare=False)
    zeros: list[Leaf] = dataclasses.field(default_factory=list, compare=False)
    norms: list[tuple[Module, Module, str]] = dataclasses.field(default_factory=list, compare=False)
    rest: collections.Counter = dataclasses.field(
        default_factory=collections.Counter, compare=False
    )
    mismatch: str = ""
    stacked: bool = False

    def include(self, other: "Alignment") -> None:
        """Adds the result for two submodules."""
        for field in dataclasses.fields(self):
            held = getattr(self, field.name)
            if isinstance(held, list):
                held += getattr(other, field.name)
        self.rest.update(other.rest)

    def count(self, leaves: Iterable[Leaf], sign: int) -> None:
        """Counts leaves that are open, with 1 for Linen's and -1 for NNX's."""
        for leaf in leaves:
            if layers.is_parameter(leaf):
                shape = tuple(sorted(leaf.shape)) if self.stacked else leaf.shape
                self.rest[leaf.path[-1], shape] += sign


def value_of(match: Match) -> Value:
    """The value of the NNX leaf."""
    value, *others = [Source(leaf.path, leaf.shape) for leaf in match.inputs]
    if match.join is not None:
        (value,) = applied(match.join, [value, *others])
    if match.move == NO_MOVE:
        return value
    order = match.move.order(len(value.shape))
    return value if order == tuple(range(len(order))) else applied(Transpose(order), [value])[0]


def place_axes(pairing: Alignment, linen: Module, nnx: Module) -> None:
    """Finds which axis moves in a stack, the same one for all leaves of a collection."""
    by_collection: dict[str, list[Match]] = {}
    for found in pairing.found:
        by_collection.setdefault(found.inputs[0].kind, []).append(found)
    pairing.found = []
    for kind, group in by_collection.items():
        weights = [Placed(x.inputs[0].shape, x.output.shape, len(x.inputs)) for x in group]
        candidates = moves(weights)
        if all(x.shape == x.output.shape for x in group):
            # With as many layers as features the axis may be another one than NNX's all the same.
            others = [m for m in candidates if m.before != m.after and 0 in (m.before, m.after)]
            candidates = [NO_MOVE, *(others if layers.may_lie_elsewhere(linen) else ())]
        if candidates == [NO_MOVE]:
            pairing.found += group
            continue
        if len(candidates) == 1:
            for found, weight in zip(group, weights, strict=True):
                join = Concat(weight.joined_at(candidates[0])) if found.join else None
                moved = dataclasses.replace(found, join=join, move=candidates[0])
                pairing.found.append(moved)
            continue
        if candidates:
            choices = " or ".join(map(str, candidates))
            reason = f"the axis of the layers in {kind} is unknown: {choices}"
        else:
            reason = f"no axis of the layers fits all leaves in {kind}"
            for found in group:
                if found.shape != found.output.shape:
                    pairing.mismatches.append(found)
        pairing.abstentions.append(Abstention(named_paths(linen), named_paths(nnx), reason))
        pairing.mismatch = pairing.mismatch or reason


def named_paths(module: Module) -> tuple[Path, ...]:
    """The path of a module; for the whole model, the paths of its submodules and leaves."""
    if module.path:
        return (module.path,)
    leaves = (leaf.path for held in module.leaves.values() for leaf in held)
    return (*(child.path for child in module.children.values() if child.filled), *leaves)


def unlike(made: Sequence[Alignment]) -> str:
    """Why modules that class and order pair are not the same; empty if they are."""
    if whole := next((pairing.mismatch for pairing in made if pairing.mismatch), ""):
        return whole
    for pairing in made:
        if clashes := [mismatch for mismatch in pairing.mismatches if mismatch.counts]:
            return str(clashes[0])
        for (name, shape), more in pairing.rest.items():
            if more:
                side, other = ("Linen", "NNX") if more > 0 else ("NNX", "Linen")
                return f"{side} has one {name} {list(shape)} more than {other}"
    if not any(pairing.found or pairing.norms for pairing in made):
        return "the two sides have no name in common"
    return ""


def other_shapes(made: Sequence[Alignment]) -> bool:
    """Whether modules that class and order pair are the same apart from shapes of parameters, and
    in any other order would be no more alike."""
    clashes = [x for pairing in made for x in pairing.mismatches if x.counts]
    linen = {(x.inputs[0].path[-1], x.values[0]) for x in clashes}
    nnx = {(x.output.path[-1], x.values[1]) for x in clashes}
    return (
        bool(clashes)
        and not linen & nnx
        and not any(pairing.mismatch or any(pairing.rest.values()) for pairing in made)
    )


def match_norms(pairing: Alignment) -> None:
    """Matches the leaves that norms have for those of other layers, now that those are known."""
    sources: dict[Path, Path] = {
        found.output.path: found.inputs[0].path
        for found in pairing.found
        if found.join is None and found.move == NO_MOVE
    }
    for linen, nnx, origin in pairing.norms:
        matched = set()
        for match in layers.normed(linen, nnx, sources):
            matched.add(match.inputs[0].path)
            if match.shape == match.output.shape:
                pairing.found.append(dataclasses.replace(match, origin=origin))
            else:
                pairing.mismatches.append(match)
        named = [x.path for name, held in linen.leaves.items() for x in held if "/" in name]
        if rest := tuple(path for path in named if path not in matched):
            reason = "the leaves that they normalise have no counterparts"
            pairing.abstentions.append(Abstention(rest, named_paths(nnx), reason))


# Modules of one class in their order.
#
# Linen numbers the modules of a class (`Dense_0`, `Dense_1`) as they are made. NNX's are in the
# order in which attributes are defined, and list members in the order of the list. A layer inside a
# `Sequential`, an `RNN` or a norm counts at the place of that: Linen makes it beside it.

_COUNTED = re.compile(r"(.*_)(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Modules of one class."""

    kinds: tuple[str, ...]  # the class, or classes with the same leaves, in NNX
    linen: tuple[Module, ...]
    nnx: tuple[Module, ...]  # with leaves; in the order of their counterparts without a `reason`
    reason: str = ""  # why their order does not decide
    numbered: bool = False  # whether numbers in names pair them


# An NNX module that counts, after the modules that it is in.
_Member = tuple[Module, ...]


def grouped(linen: Sequence[Module], nnx: Module, taken: Collection[int]) -> list[Group]:
    """The groups of Linen modules and of the modules in an NNX module. Linen modules of unknown
    class, or of one that the NNX module has none of, are in no group.

    Args:
      linen: Linen modules without a counterpart.
      nnx: the NNX module.
      taken: `id`s of NNX modules that have a counterpart.
    """
    inside = (layers.counterparts(module.kind) for module in linen if module.children)
    whole = {kind for found in inside for kinds in found for kind in kinds}
    members = [
        member
        for name, child in nnx.children.items()
        if name not in nnx.repeated
        for member in _members((child,), whole)
        if id(member[-1]) not in taken
    ]
    present = {module.kind for *_, module in members if module.filled}
    groups: dict[tuple[str, ...], list[Module]] = {}
    for module in linen:
        for kinds in layers.counterparts(module.kind):
            if not present.isdisjoint(kinds):
                groups.setdefault(kinds, []).append(module)
                break
    return [
        _group(kinds, modules, [m for m in members if m[-1].kind in kinds], nnx.ordered)
        for kinds, modules in groups.items()
    ]


def numbered(linen: Sequence[Module], nnx: Module, taken: Collection[int]) -> list[Group]:
    """The Linen layers `layer_0`, `layer_1`, ... and the NNX list of the same length, if each side
    has exactly one such series, of layers with the same structure."""
    series: dict[str, dict[str, Module]] = {}
    for module in linen:
        if match := _COUNTED.fullmatch(module.path[-1]):
            series.setdefault(match[1], {})[match[2]] = module
    lists = [
        child
        for name, child in nnx.children.items()
        if child.kind in layers.LISTS and name not in nnx.repeated
        if any(x.filled and id(x) not in taken for x in child.children.values())
    ]
    if len(series) != 1 or len(lists) != 1 or lists[0].repeated:
        return []
    (here,), there = series.values(), lists[0].children
    numbers = [str(number) for number in range(len(here))]
    if len(here) < 2 or not here.keys() == there.keys() == {*numbers}:
        return []
    one, other = (tuple(side[number] for number in numbers) for side in (here, there))
    alike = len({x.tree for x in one}) == len({x.tree for x in other}) == 1 and other[0].kind
    free = all(module.filled and id(module) not in taken for module in other)
    return [Group((other[0].kind,), one, other, numbered=True)] if alike and free else []


class Unpaired:
    """Modules without a counterpart, which may be, or hold, the counterparts of paired ones."""

    def __init__(self, linen: Iterable[Module], nnx: Iterable[Module]):
        self._linen: dict[str, Module] = {}  # by the classes in NNX that they have or hold
        self._parts: dict[frozenset[str], Module] = {}  # by what is in those of unknown class
        for module in linen:
            for kinds in itertools.chain(*map(layers.counterparts, module.kinds)):
                self._linen = dict.fromkeys(kinds, module) | self._linen
            for parts in module.unknown:
                self._parts.setdefault(parts, module)
        self._nnx: dict[str, Module] = {}
        for module in nnx:
            self._nnx = dict.fromkeys(module.kinds, module) | self._nnx

    def ambiguity(self, group: Group) -> str:
        """Why the order in a group does not decide; empty if it does."""
        known = {module.parts for module in group.linen}
        layered = any(module.children for module in group.linen)
        found = [self._linen[kind] for kind in group.kinds if kind in self._linen]
        for parts, module in self._parts.items():
            # Two layers without a bias may be of one class, and two modules that differ inside.
            if any(parts <= x or x <= parts or (layered and parts & x) for x in known):
                found.append(module)
        if found:
            return f"{format_path(found[0].path)} in Linen may be, or hold, one of them"
        kinds = itertools.chain(*(k for m in group.linen for k in layers.counterparts(m.kind)))
        for kind in dict.fromkeys((*group.kinds, *kinds)):
            if kind in self._nnx:
                return f"{format_path(self._nnx[kind].path)} in NNX may hold one of them"
        return ""


def _members(at: _Member, whole: Collection[str]) -> Iterator[_Member]:
    """The modules that count at a place, in their order."""
    module = at[-1]
    names: Iterable[str] = module.children
    if module.kind not in layers.LISTS + layers.DICTS:
        yield at
        names = () if module.kind in whole else layers.WRAPPERS.get(module.kind, ())
    for name in names:
        child = module.children.get(name)
        if child is None or name in module.repeated:
            continue
        inside = [child]
        if module.kind == "Sequential":
            inside = [x for key, x in child.children.items() if key not in child.repeated]
        for each in inside:
            yield from _members((*at, each), whole)


def _group(
    kinds: tuple[str, ...], linen: Sequence[Module], members: Sequence[_Member], ordered: bool
) -> Group:
    places = [place for place, member in enumerate(members) if member[-1].filled]
    nnx = [members[place][-1] for place in places]
    numbers = _numbers(linen)
    if isinstance(numbers, str):
        return Group(kinds, tuple(linen), tuple(nnx), numbers)
    linen = [linen[at] for at in sorted(range(len(linen)), key=numbers.__getitem__)]
    reason = _count(sorted(numbers), places)
    if reason and _in_one_array(linen, nnx):
        reason = STACKED
    elif len(linen) > 1 and linen[0].index is None and not _containers(members[0]):
        reason = NO_ORDER
    elif not reason and len(members) > 1:
        reason = _order(members, ordered)
    return Group(kinds, tuple(linen), tuple(nnx), reason)


def _numbers(linen: Sequence[Module]) -> list[int] | str:
    """The place of each of Linen's modules, or why none is known."""
    automatic = [module.index for module in linen if module.index is not None]
    if len(automatic) == len(linen):
        kinds = {module.kind: module.path[-1] for module in linen}
        if len(kinds) > 1:
            return f"which of {' and '.join(kinds.values())} was made first is unknown"
        return automatic
    if len(linen) == 1:
        return [0]
    numbered = [_COUNTED.fullmatch(module.path[-1]) for module in linen]
    if automatic or None in numbered or len({match[1] for match in numbered if match}) > 1:
        return NO_ORDER
    return [int(match[2]) for match in numbered if match]


def _count(numbers: Sequence[int], places: Sequence[int]) -> str:
    if len(numbers) != len(places):
        return f"{len(numbers)} in Linen, {len(places)} in NNX"
    if list(numbers) != list(places):
        one, other = (", ".join(map(str, found)) for found in (numbers, places))
        return f"in Linen they are numbered {one}, in NNX those with leaves are {other}"
    return ""


def _containers(member: _Member) -> list[Module]:
    """The lists and dicts that a member is in."""
    return [module for module in member[:-1] if module.kind in layers.LISTS + layers.DICTS]


def _order(members: Sequence[_Member], ordered: bool) -> str:
    containers = {tuple(map(id, _containers(member))) for member in members}
    if len(containers) > 1 or any(len(several) > 1 for several in containers):
        return "which of them was made first is unknown: they are not in one list"
    ordered = ordered or len({id(first) for first, *_ in members}) == 1
    if ordered and all(module.ordered for module in _containers(members[0])):
        return ""
    return "the order in which NNX defines them is unknown"


def _in_one_array(linen: Sequence[Module], nnx: Sequence[Module]) -> bool:
    """Whether one of the two sides has the layers in one array each."""
    one, several = sorted((linen, nnx), key=len)
    return len(one) == 1 < len(several) and layers.may_be_stack(one[0])


def align(linen: Module, nnx: Module) -> Alignment:
    """Which leaf is which."""
    auxiliary = {leaf.path[1:]: leaf for leaf in linen.all_leaves() if leaf.kind == AUXILIARY}
    named = {leaf.path: leaf for leaf in nnx.all_leaves() if leaf.path in auxiliary}
    if named:
        linen = without(linen, [auxiliary[path].path for path in named])
        nnx = without(nnx, named)
    pairing = _pair(linen, nnx, "path", False)
    pairing.found += (Match((auxiliary[p],), leaf, origin="path") for p, leaf in named.items())
    match_norms(pairing)
    makers: dict[Path, list[Match]] = {}
    used: collections.Counter[Path] = collections.Counter()
    for found in pairing.found:
        makers.setdefault(found.output.path, []).append(found)
        used.update(leaf.path for leaf in found.inputs)
    values, origin, shared = {}, {}, []
    for path, several in makers.items():
        inputs = tuple(leaf.path for found in several for leaf in found.inputs)
        if len(several) > 1:
            shared.append(Abstention(inputs, (path,), "NNX has one leaf for them"))
        elif any(used[path] > 1 for path in inputs):
            shared.append(Abstention(inputs, (path,), "NNX has several leaves for it"))
        else:
            values[path], origin[path] = value_of(several[0]), several[0].origin
    # As the model defines them, the weights of a layer before its biases.
    order = {leaf.path[:-1]: number for number, leaf in enumerate(nnx.all_leaves())}

    zeros: dict[Path, Filled] = {x.path: Filled(x.shape, x.dtype) for x in pairing.zeros}
    pairing.map = LeafMap(values, origin, (), zeros)
    pairing.abstentions += shared
    pairing.mismatches.sort(key=lambda x: (order[x.output.path[:-1]], -len(x.output.shape)))
    return pairing


def _pair(linen: Module, nnx: Module, origin: str, stacked: bool) -> Alignment:
    """Pairs what is in two modules."""
    if stacked or not layers.is_stack(linen, nnx):
        return _Level(linen, nnx, origin, stacked).pair()
    pairing = _Level(linen, nnx, origin, True).pair()
    place_axes(pairing, linen, nnx)
    return pairing


class _Level:
    """A pair of modules, and the pairs of their leaves and submodules."""

    def __init__(self, linen: Module, nnx: Module, origin: str, stacked: bool):
        self._linen, self._nnx, self._origin, self._stacked = linen, nnx, origin, stacked
        self._made = Alignment(modules=[(linen.path, nnx.path)], stacked=stacked)
        self._elsewhere: dict[str, list[Module | Leaf]] = {}
        for name, held in layers.contents(nnx):
            self._elsewhere.setdefault(name, []).append(held)
        self._norm = layers.is_norm(nnx)
        self._open: list[Module | Leaf] = []  # of Linen's
        self._taken: set[int] = set()  # of NNX's modules
        self._undecided: list[Group] = []

    def pair(self) -> Alignment:
        """The result."""
        cell = layers.cell(self._linen, self._nnx)
        if cell is not None:
            matches, zeros = cell
            for match in matches:
                self._add(dataclasses.replace(match, origin=self._origin))
            self._made.zeros += zeros
            return self._made
        if layers.is_cell(self._nnx):
            # One with other gates: a name that both have may be another part of it.
            reason = self._made.mismatch = "they are different recurrent cells"
            one, other = named_paths(self._linen), named_paths(self._nnx)
            self._made.abstentions.append(Abstention(one, other, reason))
            self._made.count(self._linen.all_leaves(), 1)
            self._made.count(self._nnx.all_leaves(), -1)
            return self._made
        self._pair_leaves()
        self._pair_names()
        if self._norm:
            self._made.norms.append((self._linen, self._nnx, self._origin))
            # In Linen what it wraps may be beside it, and is paired there.
            self._taken |= {id(child) for child in self._nnx.children.values()}
        self._pair_classes()
        self._leave_open()
        return self._made

    def _add(self, match: Match) -> None:
        """Adds a match if shapes agree; in a stack, where the axis of the layers is still open, as
        far as that can be seen."""
        before, after = match.shape, match.output.shape
        same = before == after
        if self._stacked and match.join is None:
            same = sorted(before) == sorted(after)
        elif self._stacked:
            same = math.prod(before) == math.prod(after) and len(before) == len(after)
        if same:
            self._made.found.append(match)
        else:
            self._made.mismatches.append(match)

    def _abstain(
        self, linen: Sequence[Module | Leaf], nnx: Sequence[Module | Leaf], reason: str
    ) -> None:
        """Abstains on Linen modules or leaves, with their candidates in NNX."""
        one, other = (tuple(held.path for held in side) for side in (linen, nnx))
        self._made.abstentions.append(Abstention(one, other, reason))
        self._made.count(_leaves(linen), 1)

    def _pair_leaves(self) -> None:
        """Pairs the leaves of the two modules themselves."""
        unmatched = dict(self._nnx.leaves)
        for name, held in self._linen.leaves.items():
            if self._norm and "/" in name:
                continue
            candidates = [
                leaf
                for leaf in (*self._nnx.leaves.get(name, ()), *self._elsewhere.get(name, ()))
                if isinstance(leaf, Leaf) and leaf.kind not in RNG_KINDS
            ]
            if not candidates:
                self._open += held
                continue
            unmatched.pop(name, None)
            fitting = [leaf for leaf in held if layers.in_collection(leaf, candidates[0])]
            if len(candidates) > 1:
                self._abstain(held, candidates, "the same name for several")
            elif len(held) == 1 and not fitting:
                self._made.mismatches.append(Match(held, candidates[0]))
            elif len(held) == 1 or (len(fitting) == 1 and candidates[0].kind):
                self._add(Match((fitting[0],), candidates[0], origin=self._origin))
                self._open += [leaf for leaf in held if leaf is not fitting[0]]
            else:
                self._abstain(held, candidates, "the same name in several collections")
        lacking = [x for x in self._open if isinstance(x, Leaf) and layers.is_parameter(x)]
        spare = [x for held in unmatched.values() for x in held if layers.is_parameter(x)]
        self._made.count(spare, -1)
        pairs = [*((x, self._nnx) for x in lacking), *((x, self._linen) for x in spare)]
        for leaf, module in pairs[:1]:
            self._made.mismatch = f"{format_path(module.path)} has no {leaf.path[-1]}"

    def _pair_names(self) -> None:
        """Pairs modules of the same name."""
        for name, child in self._linen.children.items():
            if not child.filled:
                continue
            candidates = [
                module
                for module in (self._nnx.children.get(name), *self._elsewhere.get(name, ()))
                if isinstance(module, Module) and module.filled
            ]
            self._taken |= {id(module) for module in candidates}
            if not candidates:
                self._open.append(child)
            elif len(candidates) > 1:
                self._abstain([child], candidates, "the same name for several")
            elif _is_unrolled(candidates[0]) and layers.may_be_stack(child):
                self._made.count(candidates[0].all_leaves(), -1)
                self._abstain([child], candidates, STACKED)
            else:
                self._made.include(_pair(child, candidates[0], self._origin, self._stacked))
        self._pair_numbered()

    def _pair_numbered(self) -> None:
        """Abstains on layers that NNX has in one array each: `blocks_0` and `blocks_1` where it has
        `blocks`."""
        series: dict[str, list[Module]] = {}
        for child in self._open:
            match = _COUNTED.fullmatch(child.path[-1])
            if match and isinstance(child, Module):
                series.setdefault(match[1].removesuffix("_"), []).append(child)
        for name, modules in series.items():
            stack = self._nnx.children.get(name)
            if stack is None or id(stack) in self._taken or len(modules) < 2:
                continue
            if layers.may_be_stack(stack):
                self._taken.add(id(stack))
                self._made.count(stack.all_leaves(), -1)
                self._open = [held for held in self._open if held not in modules]
                self._abstain(modules, [stack], STACKED)

    def _pair_classes(self) -> None:
        """Pairs modules by class and order, as far as that decides."""
        modules = [held for held in self._open if isinstance(held, Module)]
        if not modules:
            return
        decided: list[tuple[Group, list[Alignment]]] = []
        groups = grouped(modules, self._nnx, self._taken)
        by_class = {id(module) for group in groups for module in (*group.linen, *group.nnx)}
        rest = [module for module in modules if id(module) not in by_class]
        for group in (*groups, *numbered(rest, self._nnx, self._taken | by_class)):
            made = [] if group.reason else self._tried(group)
            reason = group.reason or unlike(made)
            if group.numbered and all(pairing.found for pairing in made):
                reason = ""  # What is not alike in them is told of them.
            if reason and (group.reason or not other_shapes(made)):
                self._undecided.append(dataclasses.replace(group, reason=reason))
                # Only two modules can be these: all that stands against it is of use.
                inside = made[0].mismatches if len(made) == 1 else []
                self._made.mismatches += [x for x in inside if str(x) != reason]
            else:
                decided.append((group, made))
        # What is not decided may hold the counterparts of what is.
        while True:
            unpaired = Unpaired(*self._unpaired([group for group, _ in decided]))
            doubts = [unpaired.ambiguity(group) for group, _ in decided]
            if not any(doubts):
                break
            for (group, _), why in zip(decided, doubts, strict=True):
                self._undecided += [dataclasses.replace(group, reason=why)] if why else []
            decided = [entry for entry, why in zip(decided, doubts, strict=True) if not why]
        paired = {id(module) for group, _ in decided for module in group.linen}
        self._open = [held for held in self._open if id(held) not in paired]
        for group, made in decided:
            self._taken |= {id(module) for module in group.nnx}
            pairs = zip(group.linen, group.nnx, strict=True)
            self._made.groups.append(tuple((linen.path, nnx.path) for linen, nnx in pairs))
            if group.numbered and group.linen[0].index is None:
                self._made.numbered.append(self._made.groups[-1])
            for pairing in made:
                self._made.include(pairing)

    def _tried(self, group: Group) -> list[Alignment]:
        pairs = zip(group.linen, group.nnx, strict=True)
        # Linen numbers modules without a name of their own in their order.
        named = group.numbered and group.linen[0].index is None
        origin = self._origin if named else "structure"
        return [_pair(linen, nnx, origin, self._stacked) for linen, nnx in pairs]

    def _unpaired(self, decided: Sequence[Group]) -> tuple[list[Module], list[Module]]:
        """Modules of both sides without a counterpart."""
        linen = {id(module) for group in decided for module in group.linen}
        nnx = self._taken | {id(module) for group in decided for module in group.nnx}
        modules = [held for held in self._open if isinstance(held, Module)]
        return (
            [module for module in modules if id(module) not in linen],
            list(_remaining(self._nnx, nnx)),
        )

    def _leave_open(self) -> None:
        """Abstains on everything that is not paired."""
        grouped_linen = {id(module) for group in self._undecided for module in group.linen}
        grouped_nnx = {id(module) for group in self._undecided for module in group.nnx}
        for group in self._undecided:
            self._abstain(group.linen, group.nnx, group.reason)
        remaining = [*_remaining(self._nnx, self._taken)]
        matched = {found.output.path for found in self._made.found}
        matched |= {mismatch.output.path for mismatch in self._made.mismatches}
        for module in remaining:
            self._made.count((x for x in module.all_leaves() if x.path not in matched), -1)
        linen = [held for held in self._open if id(held) not in grouped_linen]
        own = [leaf for held in self._nnx.leaves.values() for leaf in held]
        spare = [leaf for leaf in own if leaf.path not in matched and leaf.kind not in RNG_KINDS]
        free = [
            *spare,
            *(x for module in remaining for held in module.leaves.values() for x in held),
        ]
        for held in [*linen]:
            first, *more = _leaves([held])
            entry = None if more or not layers.is_parameter(first) else apart(first, free)
            if entry is not None:
                linen.remove(held)
                self._made.abstentions.append(entry)
                self._made.count([first], 1)
        if linen:
            others = [module for module in remaining if id(module) not in grouped_nnx]
            why = "ambiguous by name and class" if spare or others else "NNX has no counterpart"
            self._abstain(linen, [*others, *spare], why)


def _remaining(nnx: Module, taken: Collection[int]) -> Iterator[Module]:
    """The modules in one of NNX's that have no counterpart, without the lists that they are in."""
    for name, child in nnx.children.items():
        if not child.filled or id(child) in taken or name in nnx.repeated:
            continue
        if child.kind in (*layers.LISTS, *layers.DICTS, *layers.WRAPPERS):
            yield from _remaining(child, taken)
        else:
            yield child


def _leaves(held: Sequence[Module | Leaf]) -> Iterator[Leaf]:
    for one in held:
        if isinstance(one, Module):
            yield from one.all_leaves()
        else:
            yield one


def _is_unrolled(nnx: Module) -> bool:
    """Whether it is a list of several modules."""
    several = [name for name, child in nnx.children.items() if child.filled]
    return len(several) > 1 and (nnx.kind in layers.LISTS or all(map(str.isdigit, several)))
