"""Where a map contradicts the order of modules, that order decides nothing. Pure.

The k-th module of a class in Linen is taken for the k-th that NNX defines. A map that puts
`Conv_2` into what NNX defines before the other convolutions shows that the two sides make their
modules in different orders; then those of other classes beside them may be in another order too.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reshard.convert.answers import Abstention, Alignment
from reshard.convert.outline import Module
from reshard.convert.steps import Step
from reshard.tree import Path

_AUTOMATIC = re.compile(r"(_*[A-Z]\w*)_(\d+)")
_REASON = "the map has others beside them in another order than NNX defines them in"
# A leaf of Linen's, the collection first, and the leaf of NNX's that it is.
Pair = tuple[Path, Path]


Keys = tuple[str, ...]


class _Level(NamedTuple):
    """Modules of one class, side by side."""

    linen: Keys
    nnx: Keys
    kind: str


def ordered(said: Iterable[Step], found: Alignment, nnx: Module, to: str = "nnx") -> Alignment:
    """What was found, less what goes by an order that a map contradicts: that is open.

    Args:
      said: what the map says.
      found: what structure says of the leaves that it leaves open.
      nnx: the outline of the NNX model.
      to: the API that the map's steps lead to.
    """
    moved = [(step.inputs[0], step.outputs[0]) for step in said if step.operation is None]
    pairs = moved if to == "nnx" else [(linen, other) for other, linen in moved]
    wrong = set(_against_order(pairs, nnx))
    members: dict[_Level, dict[Keys, Keys]] = {}
    for step in found.steps:
        for path in step.inputs if step.origin == "structure" else ():
            for level, one, other in _levels((path, step.outputs[0])):
                if level.nnx in wrong:
                    members.setdefault(level, {})[one] = other
    doubtful = [group for group in members.values() if len(group) > 1]
    modules = {one for group in doubtful for one in group}
    return dataclasses.replace(
        found,
        steps=tuple(
            step
            for step in found.steps
            if step.origin != "structure"
            or not any(path[1:end] in modules for path in step.inputs for end in range(len(path)))
        ),
        abstentions=(
            *found.abstentions,
            *(Abstention(tuple(group), tuple(group.values()), _REASON) for group in doubtful),
        ),
    )


def _against_order(said: Iterable[Pair], nnx: Module) -> Iterator[Keys]:
    """Modules of NNX's in which a map has those of one class in another order."""
    levels: dict[_Level, dict[int, int]] = {}
    for pair in said:
        for level, one, other in _levels(pair):
            place = _place(nnx, other)
            number = _AUTOMATIC.fullmatch(one[-1])
            if place is not None and number is not None:
                levels.setdefault(level, {})[int(number[2])] = place
    for level, places in levels.items():
        order = [places[number] for number in sorted(places)]
        if order != sorted(order):
            yield level.nnx


def _levels(pair: Pair) -> Iterator[tuple[_Level, Keys, Keys]]:
    """Modules on the ways to two leaves that have as many keys: of each that Linen has named after
    its class the level, its path, and the path of the module in its place."""
    linen, nnx = tuple(map(str, pair[0][1:])), tuple(map(str, pair[1]))
    if len(linen) != len(nnx):
        return
    for depth, name in enumerate(linen[:-1]):
        automatic = _AUTOMATIC.fullmatch(name)
        if automatic is not None:
            level = _Level(linen[:depth], nnx[:depth], automatic[1])
            yield level, linen[: depth + 1], nnx[: depth + 1]


def _place(nnx: Module, path: Keys) -> int | None:
    """The place of a module among those that are defined beside it, if that is known."""
    module = nnx
    for name in path[:-1]:
        if name not in module.children:
            return None
        module = module.children[name]
    names = list(module.children)
    return names.index(path[-1]) if module.ordered and path[-1] in names else None
