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
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Transpose, Unstack
from reshard.convert import layers
from reshard.convert.layers import NO_MOVE, Match, moves
from reshard.convert.leafmap import Filled, LeafMap, Row, Source, Value, applied
from reshard.convert.module_tree import AUXILIARY, RNG_KINDS, Leaf, Module, without
from reshard.convert.record import Modules
from reshard.tree import Path, format_path

# Where one side has an array for each layer, and the other has one for all of them.
STACKED = "one side is stacked, the other is not"
NO_ORDER = "their names do not show their order"
_MAX_LISTED = 4
_COUNTED = re.compile(r"(.*_)(\d+)")


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
      mismatch: why the two modules, apart from their submodules, are not the same.
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
    mismatch: str = ""

    def include(self, other: "Alignment") -> None:
        """Adds the result for two submodules."""
        for field in dataclasses.fields(self):
            held = getattr(self, field.name)
            if isinstance(held, list):
                held += getattr(other, field.name)


def align(linen: Module, nnx: Module) -> Alignment:
    """Which leaf is which."""
    auxiliary = {leaf.path[1:]: leaf for leaf in linen.all_leaves() if leaf.kind == AUXILIARY}
    named = {leaf.path: leaf for leaf in nnx.all_leaves() if leaf.path in auxiliary}
    if named:
        linen = without(linen, [auxiliary[path].path for path in named])
        nnx = without(nnx, named)
    made = _pair(linen, nnx, "path", False)
    made.found += (Match((auxiliary[p],), leaf, origin="path") for p, leaf in named.items())
    _match_norms(made)
    makers: dict[Path, list[Match]] = {}
    used: collections.Counter[Path] = collections.Counter()
    for match in made.found:
        makers.setdefault(match.output.path, []).append(match)
        used.update(leaf.path for leaf in match.inputs)
    values, origin = {}, {}
    for path, several in makers.items():
        inputs = tuple(leaf.path for match in several for leaf in match.inputs)
        if len(several) > 1:
            made.abstentions.append(Abstention(inputs, (path,), "NNX has one leaf for them"))
        elif any(used[path] > 1 for path in inputs):
            made.abstentions.append(Abstention(inputs, (path,), "NNX has several leaves for it"))
        else:
            values[path], origin[path] = _value_of(several[0]), several[0].origin
    zeros: dict[Path, Filled] = {x.path: Filled(x.shape, x.dtype) for x in made.zeros}
    made.map = LeafMap(values, origin, (), zeros)
    return made


def _value_of(match: Match) -> Value:
    """The value of the NNX leaf."""
    value, *others = [Source(leaf.path, leaf.shape) for leaf in match.inputs]
    if match.join is not None:
        (value,) = applied(match.join, [value, *others])
    order = match.move.order(len(value.shape))
    return value if order == tuple(range(len(order))) else applied(Transpose(order), [value])[0]


def _match_norms(made: Alignment) -> None:
    """Matches the leaves that norms have for those of other layers, now that those are known."""
    outputs: dict[Path, Path] = {
        match.inputs[0].path[1:]: match.output.path
        for match in made.found
        if match.join is None and match.move == NO_MOVE and layers.is_parameter(match.inputs[0])
    }
    for linen, nnx, origin in made.norms:
        matched = set()
        for match in layers.normed(linen, nnx, outputs):
            matched.add(match.inputs[0].path)
            fits = match.shape == match.output.shape
            (made.found if fits else made.mismatches).append(
                dataclasses.replace(match, origin=origin)
            )
        named = [x.path for name, held in linen.leaves.items() for x in held if "/" in name]
        if rest := tuple(path for path in named if path not in matched):
            reason = "the leaves that they normalise have no counterparts"
            made.abstentions.append(Abstention(rest, _named_paths(nnx), reason))


def _pair(linen: Module, nnx: Module, origin: str, stacked: bool) -> Alignment:
    """Pairs what is in two modules."""
    if stacked or not layers.is_stack(linen, nnx):
        return _Level(linen, nnx, origin, stacked).pair()
    made = _Level(linen, nnx, origin, True).pair()
    _place_axes(made, linen, nnx)
    return made


def _place_axes(made: Alignment, linen: Module, nnx: Module) -> None:
    """Finds which axis moves in a stack, the same one for all leaves of a collection."""
    by_collection: dict[str, list[Match]] = {}
    for match in made.found:
        by_collection.setdefault(match.inputs[0].kind, []).append(match)
    made.found = []
    for kind, group in by_collection.items():
        candidates = moves(group)
        if all(x.shape == x.output.shape for x in group):
            # With as many layers as features the axis may be another one than NNX's all the same.
            others = [m for m in candidates if m.before != m.after and 0 in (m.before, m.after)]
            candidates = [NO_MOVE, *(others if layers.may_lie_elsewhere(linen) else ())]
        if candidates == [NO_MOVE]:
            made.found += group
        elif len(candidates) == 1:
            made.found += [match.moved(candidates[0]) for match in group]
        else:
            reason = f"no axis of the layers fits all leaves in {kind}"
            if candidates:
                choices = " or ".join(map(str, candidates))
                reason = f"the axis of the layers in {kind} is unknown: {choices}"
            else:
                made.mismatches += [x for x in group if x.shape != x.output.shape]
            made.abstentions.append(Abstention(_named_paths(linen), _named_paths(nnx), reason))
            made.mismatch = made.mismatch or reason


def _named_paths(module: Module) -> tuple[Path, ...]:
    """The path of a module; for the whole model, the paths of its submodules and leaves."""
    if module.path:
        return (module.path,)
    leaves = (leaf.path for held in module.leaves.values() for leaf in held)
    return (*(child.path for child in module.children.values() if child.filled), *leaves)


# Modules of one class in their order.
#
# Linen numbers the modules of a class (`Dense_0`, `Dense_1`) as they are made. NNX's are in the
# order in which attributes are defined, and list members in the order of the list. A layer inside a
# `Sequential`, an `RNN` or a norm counts at the place of that module: in Linen it is a sibling.


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Modules of one class."""

    kinds: tuple[str, ...]  # the class, or classes with the same leaves, in NNX
    linen: tuple[Module, ...]
    nnx: tuple[Module, ...]  # with leaves; in the order of their counterparts without a `reason`
    reason: str = ""  # why their order does not decide
    numbered: bool = False  # whether numbers in names pair them

    def pairs(self) -> Iterable[tuple[Module, Module]]:
        """Each Linen module with its counterpart."""
        return zip(self.linen, self.nnx, strict=True)


# An NNX module that counts, after the modules that it is in.
_Member = tuple[Module, ...]


def _grouped(linen: Sequence[Module], nnx: Module, taken: Collection[int]) -> list[Group]:
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
    nnx = tuple(members[place][-1] for place in places)
    numbers = _numbers(linen)
    if isinstance(numbers, str):
        return Group(kinds, tuple(linen), nnx, numbers)
    numbers, linen = zip(*sorted(zip(numbers, linen, strict=True), key=lambda x: x[0]), strict=True)
    containers = {
        tuple(x for x in m[:-1] if x.kind in layers.LISTS + layers.DICTS) for m in members
    }
    reason = ""
    if len(numbers) != len(places):
        reason = f"{len(numbers)} in Linen, {len(places)} in NNX"
    elif list(numbers) != places:
        one, other = (", ".join(map(str, found)) for found in (numbers, places))
        reason = f"in Linen they are numbered {one}, in NNX those with leaves are {other}"
    one, several = sorted((linen, nnx), key=len)
    if reason and len(one) == 1 < len(several) and layers.may_be_stack(one[0]):
        reason = STACKED
    elif len(linen) > 1 and linen[0].index is None and containers == {()}:
        reason = NO_ORDER
    elif not reason and len(members) > 1:
        ordered = ordered or len({id(first) for first, *_ in members}) == 1
        if len(containers) > 1 or any(len(several) > 1 for several in containers):
            reason = "which of them was made first is unknown: they are not in one list"
        elif not (ordered and all(x.ordered for held in containers for x in held)):
            reason = "the order in which NNX defines them is unknown"
    return Group(kinds, tuple(linen), nnx, reason)


def _numbers(linen: Sequence[Module]) -> Sequence[int] | str:
    """The place of each of Linen's modules, or why none is known."""
    automatic = [module.index for module in linen if module.index is not None]
    if len(automatic) == len(linen):
        kinds = {module.kind: module.path[-1] for module in linen}
        if len(kinds) > 1:
            return f"which of {' and '.join(kinds.values())} was made first is unknown"
        return automatic
    if len(linen) == 1:
        return [0]
    counted = [_COUNTED.fullmatch(module.path[-1]) for module in linen]
    if automatic or None in counted or len({match[1] for match in counted if match}) > 1:
        return NO_ORDER
    return [int(match[2]) for match in counted if match]


def _numbered(linen: Sequence[Module], nnx: Module, taken: Collection[int]) -> list[Group]:
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


def _doubt(group: Group, linen: Iterable[Module], nnx: Iterable[Module]) -> str:
    """Why the order in a group does not decide: a module without a counterpart may be, or hold, the
    counterpart of one of them. Empty if it decides."""
    known = {module.parts for module in group.linen}
    layered = any(module.children for module in group.linen)
    for module in linen:
        kinds = {x for kind in module.kinds for found in layers.counterparts(kind) for x in found}
        # Two layers without a bias may be of one class, and two modules that differ inside.
        alike = any(
            parts <= x or x <= parts or (layered and parts & x)
            for parts in module.unknown
            for x in known
        )
        if alike or not kinds.isdisjoint(group.kinds):
            return f"{format_path(module.path)} in Linen may be, or hold, one of them"
    of_linen = (found for module in group.linen for found in layers.counterparts(module.kind))
    kinds = {*group.kinds}.union(*of_linen)
    for module in nnx:
        if not module.kinds.isdisjoint(kinds):
            return f"{format_path(module.path)} in NNX may hold one of them"
    return ""


def _unlike(group: Group, made: Sequence[Alignment], stacked: bool) -> str:
    """Why modules that class and order pair are not the same. Empty if they are, or are apart from
    shapes of parameters, and in any other order would be no more alike."""
    if whole := next((pairing.mismatch for pairing in made if pairing.mismatch), ""):
        return whole
    more = next(filter(None, map(_more, group.pairs(), made, [stacked] * len(made))), "")
    clashes = [x for pairing in made for x in pairing.mismatches if x.counts]
    linen = {(x.inputs[0].path[-1], x.values[0]) for x in clashes}
    nnx = {(x.output.path[-1], x.values[1]) for x in clashes}
    if clashes and (more or linen & nnx):
        return str(clashes[0])
    if not (more or any(pairing.found or pairing.norms or clashes for pairing in made)):
        return "the two sides have no name in common"
    return more


def _more(modules: tuple[Module, Module], made: Alignment, stacked: bool) -> str:
    """Which parameter is open in one of two modules and has none of its name and shape in the
    other; empty if there is none."""
    matches = (*made.found, *made.mismatches)
    stacked = stacked or layers.is_stack(*modules)
    wrapped = {(*nnx.path, name) for _, nnx, _ in made.norms for name in nnx.children}
    linen, nnx = (
        {leaf.path: leaf for leaf in module.all_leaves() if layers.is_parameter(leaf)}
        for module in modules
    )
    for match in matches:
        nnx.pop(match.output.path, None)
        for leaf in match.inputs:
            linen.pop(leaf.path, None)
    for leaf in made.zeros:
        linen.pop(leaf.path, None)
    at, more = modules[1].path, collections.Counter[tuple[str, Shape]]()
    for leaf in linen.values():
        if not (made.norms and "/" in leaf.path[-1]):  # or it is matched last
            more[_named_shape(leaf, stacked)] += 1
    for path, leaf in nnx.items():
        # Another module may have defined it.
        if path[: len(at)] == at and not any(path[: len(x)] == x for x in wrapped):
            more[_named_shape(leaf, stacked)] -= 1
    for (name, shape), count in more.items():
        if count:
            side, other = ("Linen", "NNX") if count > 0 else ("NNX", "Linen")
            return f"{side} has one {name} {list(shape)} more than {other}"
    return ""


def _named_shape(leaf: Leaf, stacked: bool) -> tuple[str, Shape]:
    return leaf.path[-1], tuple(sorted(leaf.shape)) if stacked else leaf.shape


class _Level:
    """A pair of modules, and the pairs of their leaves and submodules."""

    def __init__(self, linen: Module, nnx: Module, origin: str, stacked: bool):
        self._linen, self._nnx, self._origin, self._stacked = linen, nnx, origin, stacked
        self._made = Alignment(modules=[(linen.path, nnx.path)])
        self._elsewhere: dict[str, list[Module | Leaf]] = {}
        for name, held in layers.contents(nnx):
            self._elsewhere.setdefault(name, []).append(held)
        self._norm = layers.is_norm(nnx)
        self._open: list[Module] = []  # of Linen's
        self._open_leaves: list[Leaf] = []
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
            one, other = _named_paths(self._linen), _named_paths(self._nnx)
            self._made.abstentions.append(Abstention(one, other, reason))
            return self._made
        self._pair_leaves()
        self._pair_names()
        if self._norm:
            self._made.norms.append((self._linen, self._nnx, self._origin))
            # In Linen the wrapped layer may be a sibling of the norm, and is paired there.
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
        (self._made.found if same else self._made.mismatches).append(match)

    def _abstain(
        self, linen: Sequence[Module | Leaf], nnx: Sequence[Module | Leaf], reason: str
    ) -> None:
        """Abstains on Linen modules or leaves, with their candidates in NNX."""
        one, other = (tuple(held.path for held in side) for side in (linen, nnx))
        self._made.abstentions.append(Abstention(one, other, reason))

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
                self._open_leaves += held
                continue
            unmatched.pop(name, None)
            fitting = [leaf for leaf in held if layers.in_collection(leaf, candidates[0])]
            if len(candidates) > 1:
                self._abstain(held, candidates, "the same name for several")
            elif len(held) == 1 and not fitting:
                self._made.mismatches.append(Match(held, candidates[0]))
            elif len(held) == 1 or (len(fitting) == 1 and candidates[0].kind):
                self._add(Match((fitting[0],), candidates[0], origin=self._origin))
                self._open_leaves += [leaf for leaf in held if leaf is not fitting[0]]
            else:
                self._abstain(held, candidates, "the same name in several collections")
        spare = [leaf for held in unmatched.values() for leaf in held]
        for leaves, module in ((spare, self._linen), (self._open_leaves, self._nnx)):
            for leaf in [*filter(layers.is_parameter, leaves)][:1]:
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
                self._abstain([child], candidates, STACKED)
            else:
                self._made.include(_pair(child, candidates[0], self._origin, self._stacked))
        self._find_stacked()

    def _find_stacked(self) -> None:
        """Abstains on layers that NNX has in one array each: `blocks_0` and `blocks_1` where it has
        `blocks`."""
        series: dict[str, list[Module]] = {}
        for child in self._open:
            if match := _COUNTED.fullmatch(child.path[-1]):
                series.setdefault(match[1].removesuffix("_"), []).append(child)
        for name, modules in series.items():
            stack = self._nnx.children.get(name)
            if stack is None or id(stack) in self._taken or len(modules) < 2:
                continue
            if layers.may_be_stack(stack):
                self._taken.add(id(stack))
                self._open = [child for child in self._open if child not in modules]
                self._abstain(modules, [stack], STACKED)

    def _pair_classes(self) -> None:
        """Pairs modules by class and order, as far as that decides."""
        if not self._open:
            return
        decided: list[tuple[Group, list[Alignment]]] = []
        groups = _grouped(self._open, self._nnx, self._taken)
        by_class = {id(module) for group in groups for module in (*group.linen, *group.nnx)}
        rest = [module for module in self._open if id(module) not in by_class]
        for group in (*groups, *_numbered(rest, self._nnx, self._taken | by_class)):
            made = [] if group.reason else self._tried(group)
            reason = group.reason or _unlike(group, made, self._stacked)
            if group.numbered and all(pairing.found for pairing in made):
                reason = ""  # Differences inside them are reported on their own.
            if reason:
                self._undecided.append(dataclasses.replace(group, reason=reason))
                # What differs in the only two candidates is evidence about the modules around them.
                inside = made[0].mismatches if len(made) == 1 else []
                self._made.mismatches += [x for x in inside if str(x) != reason]
            else:
                decided.append((group, made))
        # What is not decided may hold the counterparts of what is.
        while True:
            linen, nnx = self._unpaired([group for group, _ in decided])
            doubts = [_doubt(group, linen, nnx) for group, _ in decided]
            if not any(doubts):
                break
            for (group, _), why in zip(decided, doubts, strict=True):
                self._undecided += [dataclasses.replace(group, reason=why)] if why else []
            decided = [entry for entry, why in zip(decided, doubts, strict=True) if not why]
        self._open = linen
        for group, made in decided:
            self._taken |= {id(module) for module in group.nnx}
            self._made.groups.append(tuple((one.path, other.path) for one, other in group.pairs()))
            if group.numbered and group.linen[0].index is None:
                self._made.numbered.append(self._made.groups[-1])
            for pairing in made:
                self._made.include(pairing)

    def _tried(self, group: Group) -> list[Alignment]:
        # Linen numbers modules without a name of their own in their order.
        named = group.numbered and group.linen[0].index is None
        origin = self._origin if named else "structure"
        return [_pair(linen, nnx, origin, self._stacked) for linen, nnx in group.pairs()]

    def _unpaired(self, decided: Sequence[Group]) -> tuple[list[Module], list[Module]]:
        """Modules of both sides without a counterpart."""
        linen = {id(module) for group in decided for module in group.linen}
        nnx = self._taken | {id(module) for group in decided for module in group.nnx}
        rest = [module for module in self._open if id(module) not in linen]
        return rest, list(_remaining(self._nnx, nnx))

    def _leave_open(self) -> None:
        """Abstains on everything that is not paired."""
        for group in self._undecided:
            self._abstain(group.linen, group.nnx, group.reason)
        grouped = {id(x) for group in self._undecided for x in (*group.linen, *group.nnx)}
        remaining = list(_remaining(self._nnx, self._taken))
        matched = {match.output.path for match in (*self._made.found, *self._made.mismatches)}
        own = [leaf for held in self._nnx.leaves.values() for leaf in held]
        spare = [leaf for leaf in own if leaf.path not in matched and leaf.kind not in RNG_KINDS]
        inside = (held for module in remaining for held in module.leaves.values())
        free = [*spare, *(leaf for held in inside for leaf in held)]
        linen: list[Module | Leaf] = [*self._open_leaves, *self._open]
        linen = [held for held in linen if id(held) not in grouped]
        for held in [*linen]:
            if entry := _apart(held, free):
                linen.remove(held)
                self._made.abstentions.append(entry)
        if linen:
            others = [module for module in remaining if id(module) not in grouped]
            why = "NNX has no counterpart"
            if spare or others:
                why = "ambiguous: neither names nor classes decide"
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


def _is_unrolled(nnx: Module) -> bool:
    """Whether it is a list of several modules."""
    several = [name for name, child in nnx.children.items() if child.filled]
    return len(several) > 1 and (nnx.kind in layers.LISTS or all(map(str.isdigit, several)))


def _apart(held: Module | Leaf, leaves: Iterable[Leaf]) -> Abstention | None:
    """The abstention of a Linen parameter, alone in its module or not in one, that may be several
    NNX leaves in one array. None if NNX does not have exactly as many leaves of their shape as it
    has parts."""
    leaf, *more = held.all_leaves() if isinstance(held, Module) else (held,)
    if more or not layers.is_parameter(leaf):
        return None
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
