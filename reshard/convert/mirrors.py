"""The subtrees of an optimizer's state that mirror the parameters.

No name that an optimizer gives to its state is looked for (see
`reshard.sharding.optimizer_state`).
"""

import itertools
from collections.abc import Collection, Mapping

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.sharding.optimizer_state import Parameters
from reshard.tree import Path

Leaves = Mapping[Path, tuple[Shape, np.dtype] | None]
Subtrees = dict[Path, dict[Path, Path]]


def parameters_of(shapes: Mapping[Path, Shape], api: str) -> dict[Path, Shape]:
    """Of the model's leaves those that an optimizer may have state for."""
    named = {p: s for p, s in shapes.items() if p[0] == "params"} if api == "linen" else {}
    return named or dict(shapes)


def mirrored(
    parameters: Mapping[Path, Shape], leaves: Mapping[Path, object]
) -> list[tuple[Path, Path, Path]]:
    """The leaves that mirror a parameter: their paths, the parameter's, and what is ahead of the
    part that both have. A mirror has the whole path of the parameter, less at most what the paths
    of all parameters begin with.

    Where one mirror lacks the collection, none has it: all were made of the same tree. Then a
    `params` ahead is a name of the optimizer's (the copy that `lbfgs` keeps).
    """
    if not leaves:  # many parameters take long
        return []
    known = Parameters(parameters, leaves)
    shared = shared_keys(parameters)
    found = []
    for path in leaves:
        owners = known.followed_by(path)
        if len(owners) != 1:
            continue
        (parameter,) = owners
        shorter = min(len(path), len(parameter))
        pairs = zip(reversed(path), reversed(parameter), strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if str(a) != str(b)), shorter)
        if common >= max(len(parameter) - shared, 1):
            found.append((path, parameter, common))
    if any(common < len(parameter) for _, parameter, common in found):
        found = [(p, o, min(common, len(o) - (o[0] == "params"))) for p, o, common in found]
    return [(path, parameter, path[: len(path) - common]) for path, parameter, common in found]


def shared_keys(parameters: Collection[Path]) -> int:
    """How many keys the paths of all parameters begin with."""
    paths = [tuple(map(str, path)) for path in parameters]
    pairs = zip(min(paths, default=()), max(paths, default=()), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def followers(parameters: Mapping[Path, Shape], leaves: Leaves) -> dict[Path, Path]:
    """The leaves that follow a parameter -> the parameter."""
    subtrees, _ = mirroring_subtrees(parameters, leaves)
    return {path: own for members in subtrees.values() for own, path in members.items()}


def mirroring_subtrees(
    parameters: Mapping[Path, Shape], leaves: Leaves
) -> tuple[Subtrees, Subtrees]:
    """The subtrees that mirror parameters, root -> parameter -> mirror; and those of which that is
    not known.

    Numbers directly below a root may only be called as parameters are, like a counter beside a
    parameter `count`. They are of parameters if all parameters have one, or those that have a
    moment; and of the optimizer's own if there are others beside them, or moments of others.
    """
    found: Subtrees = {}
    for path, parameter, root in mirrored(parameters, leaves):
        found.setdefault(root, {})[parameter] = path
    numbers = [root for root, members in found.items() if _are_numbers(root, members, leaves)]
    known = {frozenset(members) for root, members in found.items() if root not in numbers}
    open_: Subtrees = {}
    for root in numbers:
        names = frozenset(found[root])
        inside = sum(path[: len(root)] == root for path in leaves)
        if inside == len(names) and (len(names) == len(parameters) or names in known):
            continue
        members = found.pop(root)
        if inside == len(names) and not known:
            open_[root] = members
    return found, open_


def _are_numbers(root: Path, members: Mapping[Path, Path], leaves: Leaves) -> bool:
    """Whether leaves are scalars directly below the root; some may have no value."""
    found = [leaves[path] for path in members.values()]
    shapes = {None if leaf is None else leaf[0] for leaf in found}
    return () in shapes <= {(), None} and all(
        len(path) == len(root) + 1 for path in members.values()
    )
