"""Modules of one class, side by side: which of Linen's is which of NNX's by their order. Pure.

Linen numbers the modules of a class (`Dense_0`, `Dense_1`) as they are made; NNX's are in the order
in which attributes are defined, the members of a list in theirs. A layer that is inside a
`Sequential`, an `RNN` or a norm counts where that is: in Linen it is made beside it.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from reshard.convert import layers
from reshard.convert.module_tree import Module, unlifted
from reshard.convert.pairing import STACKED, stack_hint, unstack_hint
from reshard.tree import format_path

_NUMBERED = re.compile(r"(.*_)(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Modules of one class.

    Attributes:
      kinds: the class, or classes with the same leaves, in NNX.
      linen: Linen's modules.
      nnx: NNX's, those without leaves left out: each the counterpart of the one of Linen's in the
        same place, if `reason` is empty.
      reason: why their order does not decide.
      hint: what may help.
      numbered: whether numbers in names say which is which, whatever they are called.
    """

    kinds: tuple[str, ...]
    linen: tuple[Module, ...]
    nnx: tuple[Module, ...]
    reason: str = ""
    hint: str = ""
    numbered: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """A module of NNX's that counts.

    Attributes:
      module: the module.
      child: the child of the module that counts in which it is.
      container: the list or dict that it is in, if there is one.
      known: whether its place within the child is known.
    """

    module: Module
    child: str
    container: str = ""
    known: bool = True


def grouped(linen: Sequence[Module], nnx: Module, taken: Collection[int]) -> list[Group]:
    """The groups that modules of Linen's in one module form with those of NNX's in another.

    Args:
      linen: Linen's, as far as they have no counterpart yet. Those of unknown class, or of one that
        NNX's module has none of, are in no group.
      nnx: NNX's module that they are to be found in.
      taken: `id`s of modules of NNX's that have a counterpart.
    """
    inside = (layers.counterparts(module.kind) for module in linen if module.children)
    whole = {kind for found in inside for kinds in found for kind in kinds}
    members = [
        member
        for name, child in nnx.children.items()
        if name not in nnx.repeated
        for member in _members(child, _Member(child, name), whole)
        if id(member.module) not in taken
    ]
    present = {member.module.kind for member in members if member.module.filled}
    groups: dict[tuple[str, ...], list[Module]] = {}
    for module in linen:
        for kinds in layers.counterparts(module.kind):
            if not present.isdisjoint(kinds):
                groups.setdefault(kinds, []).append(module)
                break
    places = {kind: kinds for kinds in groups for kind in kinds}
    found: dict[tuple[str, ...], list[_Member]] = {kinds: [] for kinds in groups}
    for member in members:
        if member.module.kind in places:
            found[places[member.module.kind]].append(member)
    return [_group(kinds, modules, found[kinds], nnx.ordered) for kinds, modules in groups.items()]


def numbered(linen: Sequence[Module], nnx: Module, taken: Collection[int]) -> list[Group]:
    """The layers of Linen's that are called `layer_0`, `layer_1`, ..., and the list that NNX has of
    as many, if each side has one such series, of layers that are all alike.

    Args:
      linen, nnx, taken: as for `grouped`; of Linen's those that are in none of its groups.
    """
    series: dict[str, dict[str, Module]] = {}
    for module in linen:
        if match := _NUMBERED.fullmatch(module.path[-1]):
            series.setdefault(match[1], {})[match[2]] = module
    lists = [
        child
        for name, child in nnx.children.items()
        if child.kind in layers.LISTS and name not in nnx.repeated
        if any(x.filled and id(x) not in taken for x in child.children.values())
    ]
    if len(series) != 1 or len(lists) != 1:
        return []
    (here,), (there,) = series.values(), (x.children for x in lists)
    numbers = [str(number) for number in range(len(here))]
    if len(here) < 2 or not here.keys() == there.keys() == {*numbers} or lists[0].repeated:
        return []
    one, other = ([side[number] for number in numbers] for side in (here, there))
    if len({x.tree for x in one}) > 1 or len({x.tree for x in other}) > 1 or not other[0].kind:
        return []
    if any(id(module) in taken or not module.filled for module in other):
        return []
    return [Group((other[0].kind,), tuple(one), tuple(other), numbered=True)]


class Unpaired:
    """Modules without a counterpart, in which there may be those of others.

    Args:
      linen: Linen's.
      nnx: NNX's.
    """

    def __init__(self, linen: Iterable[Module], nnx: Iterable[Module]):
        self._linen: dict[str, Module] = {}  # by the classes in NNX that they have or hold
        self._parts: dict[frozenset[str], Module] = {}  # by what is in those of unknown class
        for module in linen:
            for kinds in itertools.chain(*map(layers.counterparts, module.kinds)):
                self._linen.update(dict.fromkeys(set(kinds) - self._linen.keys(), module))
            for parts in module.unknown:
                self._parts.setdefault(parts, module)
        self._nnx: dict[str, Module] = {}
        for module in nnx:
            self._nnx.update(dict.fromkeys(module.kinds - self._nnx.keys(), module))

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


def _members(module: Module, at: _Member, whole: Collection[str]) -> Iterator[_Member]:
    """The modules that count at a place, in their order.

    Args:
      module: what is there.
      at: the place.
      whole: classes of modules that Linen has with what is in them.
    """
    here = dataclasses.replace(at, module=module)
    inner = layers.WRAPPERS.get(module.kind, ())
    if module.kind in layers.LISTS or module.kind in layers.DICTS:
        # Of the order in which the members of two containers were made nothing is known.
        container = format_path(module.path) if not at.container else "several"
        known = at.known and module.ordered
        here = dataclasses.replace(here, container=container, known=known)
        inner = tuple(module.children)
    else:
        yield here
        if module.kind in whole:
            return
    for name in inner:
        child = module.children.get(name)
        if child is None or name in module.repeated:
            continue
        if module.kind == "Sequential":
            for key, layer in child.children.items():
                if key not in child.repeated:
                    yield from _members(layer, here, whole)
        else:
            yield from _members(child, here, whole)


def _group(
    kinds: tuple[str, ...], linen: Sequence[Module], members: Sequence[_Member], ordered: bool
) -> Group:
    places = [place for place, member in enumerate(members) if member.module.filled]
    nnx = [members[place].module for place in places]
    numbers = _numbers(linen)
    reason, hint = "", ""
    if isinstance(numbers, str):
        reason = numbers
    else:
        linen = [module for _, module in sorted(zip(numbers, linen, strict=True), key=_number)]
        reason = _count(sorted(numbers), places)
        if reason:
            hint = _hint(linen, nnx)
            reason = STACKED if hint else reason
        elif len(linen) > 1 and linen[0].index is None and not members[0].container:
            reason = "they have names of their own"
    if not reason and len(members) > 1:
        reason = _order(members, ordered)
    return Group(kinds, tuple(linen), tuple(nnx), reason, hint)


def _number(pair: tuple[int, Module]) -> int:
    return pair[0]


def _numbers(linen: Sequence[Module]) -> list[int] | str:
    """The place of each of Linen's modules, or why none is known."""
    automatic = [module.index for module in linen if module.index is not None]
    if len(automatic) == len(linen):
        kinds = {module.kind: module.path[-1] for module in linen}
        if len(kinds) > 1:
            return f"which of {' and '.join(kinds.values())} was made first is not known"
        return automatic
    if len(linen) == 1:
        return [0]
    numbered = [_NUMBERED.fullmatch(module.path[-1]) for module in linen]
    if automatic or None in numbered or len({match[1] for match in numbered if match}) > 1:
        return "they have names of their own"
    return [int(match[2]) for match in numbered if match]


def _count(numbers: Sequence[int], places: Sequence[int]) -> str:
    if len(numbers) != len(places):
        return f"{len(numbers)} in Linen, {len(places)} in NNX"
    if list(numbers) != list(places):
        one, other = (", ".join(map(str, found)) for found in (numbers, places))
        return f"in Linen they are numbered {one}, in NNX those with leaves are {other}"
    return ""


def _order(members: Sequence[_Member], ordered: bool) -> str:
    containers = {member.container for member in members}
    if len(containers) > 1 or "several" in containers:
        return "which of them was made first is not known: they are not in one list"
    if (ordered or len({member.child for member in members}) == 1) and all(
        member.known for member in members
    ):
        return ""
    return "the order in which NNX defines them is not known"


def _hint(linen: Sequence[Module], nnx: Sequence[Module]) -> str:
    """How to make the two sides alike where one of them has the layers in one array each."""
    *above, name = ("params", *linen[0].path)
    named = linen[0].index is None
    if len(linen) == 1 and len(nnx) > 1 and layers.may_be_stack(linen[0]):
        apart = name if named else unlifted(linen[0].kind)[-1][0]
        return unstack_hint((*above, name), (*above, f"{apart}_{{}}"))
    if len(linen) > 1 and len(nnx) == 1 and layers.may_be_stack(nnx[0]):
        apart = re.sub(r"\d+$", "{}", name)
        together = apart.removesuffix("_{}") if named else f"Scan{linen[0].kind}_0"
        return stack_hint((*above, apart), (*above, together))
    return ""
