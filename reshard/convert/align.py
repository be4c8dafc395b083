"""Which leaf of an NNX model is which leaf of a Linen model, as far as structure says so. Pure.

Modules are paired from the root down:

1. by name, with the standard conversions of lists and dicts (`layers_0` is `layers/0`);
   then by number: `layer_0`, `layer_1`, ... are the members of the one list of as many;
2. by class and order: the k-th `Dense` of a Linen module is the k-th `Linear` that its counterpart
   defines. Only if both have the same number of them, if nothing else there may be one of them, and
   if names and shapes of leaves agree all the way down.

What that leaves open is an abstention, which names the candidates of both sides. That two shapes
are equal never pairs anything; that they differ keeps things apart.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Sequence

from reshard.convert import layers
from reshard.convert.class_order import Group, Unpaired, grouped, numbered
from reshard.convert.layers import Match
from reshard.convert.leafmap import LeafMap, Zeros
from reshard.convert.module_tree import RNG_KINDS, Leaf, Module, unlifted
from reshard.convert.pairing import (
    STACKED,
    Abstention,
    Alignment,
    Found,
    Mismatch,
    Pairing,
    apart,
    match_norms,
    mismatch_of,
    other_shapes,
    place_axes,
    stack_hint,
    unlike,
    unstack_hint,
    value_of,
)
from reshard.tree import Path, format_path

_NUMBERED = re.compile(r"(.+)_(\d+)")


def align(linen: Module, nnx: Module) -> Alignment:
    """Which leaf is which.

    Args:
      linen: the outline of the Linen model.
      nnx: the outline of the NNX model.
    """
    pairing = _pair(linen, nnx, "path", False)
    match_norms(pairing)
    makers: dict[Path, list[Found]] = {}
    used: collections.Counter[Path] = collections.Counter()
    for found in pairing.found:
        makers.setdefault(found.match.output.path, []).append(found)
        used.update(leaf.path for leaf in found.match.inputs)
    values, origin, shared = {}, {}, []
    for path, several in makers.items():
        inputs = tuple(leaf.path for found in several for leaf in found.match.inputs)
        if len(several) > 1:
            shared.append(Abstention(inputs, (path,), "NNX has one leaf for them"))
        elif any(used[path] > 1 for path in inputs):
            shared.append(Abstention(inputs, (path,), "NNX has several leaves for it"))
        else:
            values[path], origin[path] = value_of(several[0]), several[0].origin
    # As the model defines them, the weights of a layer before its biases.
    order = {leaf.path[:-1]: number for number, leaf in enumerate(nnx.all_leaves())}

    def place(mismatch: Mismatch) -> tuple[int, int]:
        return order[mismatch.nnx.path[:-1]], -len(mismatch.nnx.shape)

    zeros: dict[Path, Zeros] = {x.path: Zeros(x.shape, x.dtype) for x in pairing.zeros}
    return Alignment(
        LeafMap(values, origin, (), zeros),
        (*pairing.abstentions, *shared),
        tuple(sorted(pairing.mismatches, key=place)),
        tuple(pairing.modules),
        tuple(pairing.groups),
        tuple(pairing.numbered),
    )


def _pair(linen: Module, nnx: Module, origin: str, stacked: bool) -> Pairing:
    """Pairs what is in two modules.

    Args:
      linen: Linen's module.
      nnx: NNX's module.
      origin: what says that they are one: `"path"` or `"structure"`.
      stacked: whether they are in a stack, whose axes the caller looks at.
    """
    if stacked or not layers.is_stack(linen, nnx):
        return _Level(linen, nnx, origin, stacked).pair()
    pairing = _Level(linen, nnx, origin, True).pair()
    place_axes(pairing, linen, nnx)
    return pairing


class _Level:
    """Two modules that are one, and what is directly in them.

    Args:
      linen, nnx, origin, stacked: as for `_pair`.
    """

    def __init__(self, linen: Module, nnx: Module, origin: str, stacked: bool):
        self._linen, self._nnx, self._origin, self._stacked = linen, nnx, origin, stacked
        self._made = Pairing(modules=[(linen.path, nnx.path)], stacked=stacked)
        self._elsewhere: dict[str, list[Module | Leaf]] = {}
        for name, held in layers.contents(nnx):
            self._elsewhere.setdefault(name, []).append(held)
        self._norm = layers.is_norm(nnx)
        self._open: list[Module | Leaf] = []  # of Linen's
        self._taken: set[int] = set()  # of NNX's modules
        self._undecided: list[Group] = []

    def pair(self) -> Pairing:
        """What comes of it."""
        cell = layers.cell(self._linen, self._nnx)
        if cell is not None:
            for match in cell.matches:
                self._add(match)
            self._made.zeros += cell.zeros
            return self._made
        if layers.is_cell(self._nnx):
            # One with other gates: a name that both have may be another part of it.
            self._abstain([self._linen], [self._nnx], "they are not the same recurrent cell")
            self._made.count(self._nnx.all_leaves(), -1)
            self._made.mismatch = "they are not the same recurrent cell"
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
            self._made.found.append(Found(match, self._origin))
        else:
            self._made.mismatches.append(mismatch_of(match))

    def _abstain(
        self,
        linen: Sequence[Module | Leaf],
        nnx: Sequence[Module | Leaf],
        reason: str,
        hint: str = "",
    ) -> None:
        """Leaves open what something of Linen's is, with the candidates in NNX."""
        one, other = (tuple(held.path for held in side) for side in (linen, nnx))
        self._made.abstentions.append(Abstention(one, other, reason, hint))
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
                kinds = held[0].kind, candidates[0].kind
                self._made.mismatches.append(Mismatch(held, candidates[0], kinds))
            elif len(held) == 1 or (len(fitting) == 1 and candidates[0].kind):
                self._add(Match((fitting[0],), candidates[0]))
                self._open += [leaf for leaf in held if leaf is not fitting[0]]
            else:
                self._abstain(held, candidates, "the same name in several collections")
        lacking = [x for x in self._open if isinstance(x, Leaf) and layers.is_parameter(x)]
        spare = [x for held in unmatched.values() for x in held if layers.is_parameter(x)]
        self._made.count(spare, -1)
        for leaf, module in [
            *((x, self._nnx) for x in lacking),
            *((x, self._linen) for x in spare),
        ]:
            reason = f"{format_path(module.path)} has no {leaf.path[-1]}"
            self._made.mismatch = self._made.mismatch or reason

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
                above = ("params", *self._linen.path)
                base = re.sub(r"_\d+$", "", unlifted(name)[-1][0])
                hint = unstack_hint((*above, name), (*above, f"{base}_{{}}"))
                self._made.count(candidates[0].all_leaves(), -1)
                self._abstain([child], candidates, STACKED, hint)
            else:
                self._made.include(_pair(child, candidates[0], self._origin, self._stacked))
        self._pair_numbered()

    def _pair_numbered(self) -> None:
        """Finds layers with arrays of their own that NNX has in one array each: `blocks_0` and
        `blocks_1` where it has `blocks`."""
        numbered: dict[str, list[Module]] = {}
        for child in self._open if self._nnx.children else ():
            match = _NUMBERED.fullmatch(child.path[-1])
            if match and isinstance(child, Module):
                numbered.setdefault(match[1], []).append(child)
        for name, modules in numbered.items():
            stack = self._nnx.children.get(name)
            if stack is None or id(stack) in self._taken or len(modules) < 2:
                continue
            if not layers.may_be_stack(stack):
                continue
            self._taken.add(id(stack))
            self._made.count(stack.all_leaves(), -1)
            gone = {id(module) for module in modules}
            self._open = [held for held in self._open if id(held) not in gone]
            above = ("params", *self._linen.path)
            hint = stack_hint((*above, f"{name}_{{}}"), (*above, name))
            self._abstain(modules, [stack], STACKED, hint)

    def _pair_classes(self) -> None:
        """Pairs modules by class and order, as far as that decides."""
        modules = [held for held in self._open if isinstance(held, Module)]
        if not modules:
            return
        decided: list[tuple[Group, list[Pairing]]] = []
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
            ambiguities = [unpaired.ambiguity(group) for group, _ in decided]
            if not any(ambiguities):
                break
            pairs = list(zip(decided, ambiguities, strict=True))
            decided = [entry for entry, ambiguity in pairs if not ambiguity]
            self._undecided += [
                dataclasses.replace(group, reason=ambiguity)
                for (group, _), ambiguity in pairs
                if ambiguity
            ]
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

    def _tried(self, group: Group) -> list[Pairing]:
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
        """Says what nothing was found for."""
        grouped_linen = {id(module) for group in self._undecided for module in group.linen}
        grouped_nnx = {id(module) for group in self._undecided for module in group.nnx}
        for group in self._undecided:
            self._abstain(group.linen, group.nnx, group.reason, group.hint)
        remaining = [*_remaining(self._nnx, self._taken)]
        matched = {found.match.output.path for found in self._made.found}
        matched |= {mismatch.nnx.path for mismatch in self._made.mismatches}
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
            why = (
                "no name and no class tells which" if spare or others else "NNX has nothing for it"
            )
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
