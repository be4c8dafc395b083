"""The subtrees of an optimizer's state that mirror the parameters, and what operations on
parameters are on moments that have only a part of their axes. Pure.

No name that an optimizer gives to its state is looked for (see
`reshard.sharding.optimizer_state`).
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Operation, Pad, Stack, Transpose, Unstack
from reshard.sharding.mesh import Spec
from reshard.sharding.optimizer_state import Parameters, matching_part
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


def adapted(
    operation: Operation,
    shapes: Sequence[Shape],
    parameters: Sequence[Shape],
    paths: Sequence[Path],
) -> Operation | str:
    """An operation on parameters as one on their moments, or why there is none.

    Args:
      operation: what is done to the parameters.
      shapes: shapes of the moments.
      parameters: shapes of the parameters.
      paths: paths of the moments.
    """
    if list(shapes) == list(parameters):
        if isinstance(operation, Pad) and operation.fill != 0:
            return f"a moment cannot be padded with {operation.fill}: that is no linear operation"
        return operation
    found = list(map(_kept_axes, paths, shapes, parameters))
    reasons = [kept for kept in found if isinstance(kept, str)]
    if reasons:
        return reasons[0]
    kept = found[0]
    if isinstance(kept, str) or any(other != kept for other in found):
        return "they have different parts of their parameters"
    shape = parameters[0]
    factored = [axis for axis in range(len(shape)) if axis not in kept]
    if len(factored) == 1 and _largest(shape).issuperset(factored):
        whole = operation.shapes(parameters)[0] if isinstance(operation, Stack) else shape
        # The sort by which adafactor tells equal sizes apart is a stable one up to three of them.
        if _tied(whole) and (isinstance(operation, Transpose) or len(whole) > 3):
            return "it is a part of a parameter that has several largest dimensions"
        if isinstance(operation, Transpose):
            order = [axis for axis in operation.axes if axis in kept]
            return Transpose(tuple(kept.index(axis) for axis in order))
        if isinstance(operation, Stack):
            axis = operation.axis % len(whole)
            if axis in _largest(whole):
                return f"the layers, axis {axis} of {list(whole)}, would be factored over"
            return Stack(sum(place < axis for place in kept), operation.names)
        if isinstance(operation, Unstack):
            axis = operation.axis % len(shape)
            if axis in _largest(shape):
                return f"it is factored over the layers, axis {axis} of {list(shape)}"
            return Unstack(kept.index(axis), operation.count)
    return (
        f"it has {list(shapes[0])} of its parameter's {list(shape)}, and "
        f"{type(operation).__name__.lower()} cannot be carried over to a part"
    )


def _kept_axes(path: Path, shape: Shape, parameter: Shape) -> list[int] | str:
    """Which axes of its parameter a reduced moment has, or why that is not known."""
    tags: Spec = tuple((str(axis),) for axis in range(len(parameter)))
    part = matching_part(path, shape, parameter, tags)
    if isinstance(part, str):
        return part
    if len(part) != len(shape) or not all(part):
        return f"its shape is {list(shape)} and its parameter's {list(parameter)}"
    return [int(tag) for (tag,) in part]


def second_size(shape: Shape) -> int:
    """The size of the second largest dimension; 0 if there is none."""
    return sorted((0, 0, *shape))[-2]


def _largest(shape: Shape) -> set[int]:
    """The axes that adafactor may factor over: the two largest, and those of equal size."""
    return {axis for axis, size in enumerate(shape) if size >= second_size(shape)}


def _tied(shape: Shape) -> bool:
    return len(_largest(shape)) > 2 or len({*sorted(shape)[-2:]}) < 2
