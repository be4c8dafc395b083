"""Optimizer state follows its parameters: each subtree that mirrors them goes through their map.

Operations that move elements are linear, so they hold for moments as they do for parameters. If a
moment has another shape than its parameter, an operation is adapted to the axes that it has, or
refused. No name that an optimizer gives to its state is looked for (see
`reshard.sharding.optimizer_state`).
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import array_text
from reshard.arrays.operations import Apply, Moving, Pad, Stack, Transpose, Unstack
from reshard.convert.leafmap import (
    Call,
    Filled,
    LeafMap,
    Source,
    Value,
    applied,
    sources_of,
)
from reshard.errors import TreeMismatchError
from reshard.sharding.optimizer_state import Parameters, matching_part
from reshard.tree import Path, format_path

Leaves = Mapping[Path, tuple[Shape, np.dtype] | None]
Subtrees = dict[Path, dict[Path, Path]]


def parameters_of(shapes: Mapping[Path, Shape], api: str) -> dict[Path, Shape]:
    """The leaves of the model that an optimizer may have state for."""
    named = {p: s for p, s in shapes.items() if p[0] == "params"} if api == "linen" else {}
    return named or dict(shapes)


def random_state(leaves: Mapping[Path, Any]) -> set[Path]:
    """The random state among the model's leaves, which no optimizer has state for: PRNG keys, and
    the `key` and `count` of an `nnx.RngStream` whose key is saved as plain numbers."""
    found = {path for path, leaf in leaves.items() if leaf.key_impl is not None}
    counts = [p for p, leaf in leaves.items() if p[-1] == "count" and leaf.dtype == np.uint32]
    for count in counts:
        key = (*count[:-1], "key")
        if key in found or (key in leaves and leaves[key].dtype == np.uint32):
            found |= {count, key}
    return found


def mirrored(
    parameters: Mapping[Path, Shape], leaves: Mapping[Path, object]
) -> list[tuple[Path, Path, Path]]:
    """The leaves that mirror a parameter: their path, the path of the parameter, and the keys ahead
    of the part that both share. A mirror ends with the whole path of the parameter, except for keys
    that the paths of all parameters begin with.

    All mirrors were made of the same tree, so if one lacks the collection, none has it. Then a
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
    """The subtrees that mirror parameters, root -> parameter -> mirror; and the undecided ones.

    Numbers directly below a root may only share the names of parameters, like a counter and a
    parameter `count`. They belong to parameters if all parameters have one, or all that have a
    moment. They belong to the optimizer if there are other numbers, or moments of other parameters.
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


def _adapted(
    operation: Moving, shapes: Sequence[Shape], parameters: Sequence[Shape], paths: Sequence[Path]
) -> Moving | str:
    """An operation on parameters as one on their moments, or why there is none."""
    if list(shapes) == list(parameters):
        if isinstance(operation, Pad) and operation.fill != 0:
            return (
                f"a moment cannot be padded with {operation.fill}: that is not a linear operation"
            )
        return operation
    kept: list[int] = []  # the axes of its parameter that each moment has
    for number, (path, shape, parameter) in enumerate(zip(paths, shapes, parameters, strict=True)):
        tags = tuple((str(axis),) for axis in range(len(parameter)))
        part = matching_part(path, shape, parameter, tags)
        if isinstance(part, str):
            return part
        if len(part) != len(shape) or not all(part):
            return f"it has the shape {list(shape)}, and its parameter has {list(parameter)}"
        axes = [int(tag) for (tag,) in part]
        if number and axes != kept:
            return "they have different parts of their parameters"
        kept = axes
    shape = parameters[0]
    factored = {*range(len(shape))} - {*kept}
    if len(factored) == 1 and factored <= _largest(shape):
        whole = operation.shapes(parameters)[0] if isinstance(operation, Stack) else shape
        # Adafactor tells equal sizes apart by a sort that is stable for up to three of them.
        tied = len(_largest(whole)) > 2 or len({*sorted(whole)[-2:]}) < 2
        if tied and (isinstance(operation, Transpose) or len(whole) > 3):
            return "it is a part of a parameter that has several largest dimensions"
        if isinstance(operation, Transpose):
            return Transpose(tuple(kept.index(axis) for axis in operation.axes if axis in kept))
        if isinstance(operation, Stack | Unstack):
            axis = operation.axis % len(whole)
            if axis in _largest(whole) and isinstance(operation, Stack):
                return f"adafactor would factor it over the layers, axis {axis} of {list(whole)}"
            if axis in _largest(whole):
                return f"adafactor has factored it over the layers, axis {axis} of {list(whole)}"
            place = sum(other < axis for other in kept)
            return dataclasses.replace(operation, axis=place)
    return (
        f"its shape {list(shapes[0])} is a part of its parameter's {list(shape)}, and "
        f"{type(operation).__name__.lower()} cannot be applied to a part"
    )


def _second_size(shape: Shape) -> int:
    """The size of the second largest dimension; 0 if there is none."""
    return sorted((0, 0, *shape))[-2]


def _largest(shape: Shape) -> set[int]:
    """The axes that adafactor may factor over: the two largest, and those of equal size."""
    return {axis for axis, size in enumerate(shape) if size >= _second_size(shape)}


@dataclasses.dataclass(frozen=True)
class Followed:
    """The map of optimizer state.

    Attributes:
      map: the map of leaves that follow parameters which change.
      placeholders: leaves without a value (optax's `MaskedNode`), path after -> paths before.
      problems: leaves that cannot follow, and why.
    """

    map: LeafMap
    placeholders: dict[Path, tuple[Path, ...]]
    problems: tuple[str, ...]


# The shape of the leaf that adafactor has in place of a moment that it does not keep.
_UNUSED = (1,)
# Adafactor's `min_dim_size_to_factor`, unless it has factored less. Then nothing is known of it but
# what it has not factored.
_LEAST_FACTORED = 128
# Of the data of a PRNG key, `threefry2x32` and `rbg`.
_KEY_SHAPES = ((2,), (4,))


def followed(
    model: LeafMap,
    parameters: Mapping[Path, Shape],
    leaves: Leaves,
    ahead: Path | None = None,
    others: bool = False,
    beside: Collection[Path] = (),
) -> Followed:
    """The map of optimizer state: the map of the parameters, evaluated for each subtree that
    mirrors them.

    Args:
      model: the map of the parameters; those that it does not name stay.
      parameters: all parameters before, with the collection ahead (or no collection).
      leaves: optimizer state before: path below it -> shape and dtype, None for a leaf without a
        value.
      ahead: the keys that the parameters' paths begin with after the conversion and the subtrees'
        paths do not; by default the same as before.
      others: whether there are more parameters before or after.
      beside: leaves that may not be optimizer state, and follow if they mirror parameters.
    """
    subtrees, unknown = mirroring_subtrees(parameters, leaves)
    problems, alone = _unplaced(model.sources(), parameters, leaves, subtrees)
    if unknown or not alone.keys() <= {*beside}:
        places = _places(model, parameters)
        for members in unknown.values():
            for parameter, path in members.items():
                start = len(parameter) - 1 if ahead is None else len(ahead)
                if places is None or places[parameter][start:] != parameter[-1:]:
                    problems.append(
                        f"{format_path(path)}: it may be a number of parameter "
                        f"{format_path(parameter)}, or one of the optimizer's own"
                    )
        if others or places is None or not _keep_order(places):
            problems += [text for path, text in alone.items() if path not in beside]
    found, placeholders = LeafMap({}), dict[Path, tuple[Path, ...]]()
    least = _least_factored(subtrees, parameters, leaves)
    for root, members in subtrees.items():
        parameter, path = next(iter(members.items()))
        before = parameter[: len(parameter) - (len(path) - len(root))]
        subtree = _Subtree(root, before, members, leaves, least, problems, found.must_be_zero)
        inside = before if ahead is None else ahead
        for path, moment in model.evaluated(subtree.moment, subtree.run).items():
            place = _below(root, path, inside)
            if not isinstance(moment, _Moment):
                continue
            if moment.value is None:
                placeholders[place] = moment.paths
            elif moment.value != Source(place, model.values[path].shape):
                found.values[place] = moment.value
                if path in model.origin:
                    found.origin[place] = model.origin[path]
    return Followed(found, placeholders, tuple(problems))


def follows_note(root: Path, count: int, checked: bool = True) -> str:
    """The note on leaves that are not optimizer state and have followed parameters."""
    text = (
        f"`{format_path(root)}` follows the parameters: {count} lea{'f' if count == 1 else 'ves'}"
    )
    return text if checked else f"{text}, unchecked"


def _below(root: Path, path: Path, ahead: Path) -> Path:
    """The path below the root of a subtree, for the path of a parameter."""
    return root + (path[len(ahead) :] if path[: len(ahead)] == ahead else path)


def _places(model: LeafMap, parameters: Collection[Path]) -> dict[Path, Path] | None:
    """Parameter -> its path afterwards; None if there are operations on parameters."""
    places = {path: path for path in parameters}
    for path, value in model.values.items():
        if isinstance(value, Source):
            places[value.path] = path
        elif not places.keys().isdisjoint(sources_of(value)):
            return None
    return {path: places[path] for path in parameters}


def _keep_order(places: Mapping[Path, Path]) -> bool:
    """Whether parameters are in one order before and after, as optimizers flatten them: Linen sorts
    names as text, NNX sorts positions of lists as numbers. Either order may have been used."""
    pairs = list(places.items())
    if all(before[0] != "params" for before, _ in pairs):  # they come from NNX
        pairs = [pair for pair in pairs if pair[1][0] == "params"] or pairs

    def by_text(path: Path) -> list[str]:
        return list(map(str, path))

    def by_number(path: Path) -> list[tuple[bool, int, str]]:
        keys = map(str, path)
        return [(False, int(key), "") if key.isdecimal() else (True, 0, key) for key in keys]

    sorts = itertools.product((0, 1), (by_text, by_number))
    orders = [sorted(pairs, key=lambda pair, s=side, k=key: k(pair[s])) for side, key in sorts]
    return all(order == orders[0] for order in orders)


def _unplaced(
    changed: Collection[Path], parameters: Mapping[Path, Shape], leaves: Leaves, subtrees: Subtrees
) -> tuple[list[str], dict[Path, str]]:
    """Problems with leaves that are near the place of a changed parameter, but not in it: a list in
    place of a moment, or a moment in a box although its parameter is in none. And problems with
    arrays near no parameter, by path: such an array may hold all moments in one vector
    (`optax.flatten`), and their order depends on the parameters."""
    if not leaves:
        return [], {}
    shared = shared_keys(parameters)
    ends: dict[Path, Path] = {}
    for path in parameters:
        keys = tuple(map(str, path[min(shared, max(len(path) - 2, 1)) :]))
        if len(keys) > 1:  # a single key is often the name of something else, too
            ends[keys] = path
    problems: list[str] = []
    alone: dict[Path, str] = {}
    followed = {path for members in subtrees.values() for path in members.values()}
    for path, leaf in leaves.items():
        if leaf is None or leaf[0] == () or path in followed:  # such as counters
            continue
        keys = (*map(str, path), "value")
        parts = itertools.combinations(range(len(path) + 2), 2)
        near = (ends.get(keys[a:b]) for a, b in parts if a < len(path) != b)
        parameter = next((found for found in near if found is not None), None)
        if parameter in changed:
            problems.append(
                f"{format_path(path)}: its path does not match that of its parameter "
                f"{format_path(parameter or ())}"
            )
        elif parameter is None and not _is_small(path, leaf, parameters, leaves, subtrees):
            alone[path] = (
                f"{format_path(path)}: {array_text(leaf[1].name, leaf[0])} is of no parameter, and "
                "parameters change their order, shape or number"
            )
    return problems, alone


def _is_small(
    path: Path,
    leaf: tuple[Shape, np.dtype],
    parameters: Mapping[Path, Shape],
    leaves: Leaves,
    subtrees: Subtrees,
) -> bool:
    """Whether an array that mirrors no parameter does not depend on their order: one element, the
    data of a PRNG key, or a number for each update of a history in the same state (`lbfgs`)."""
    shape, dtype = leaf
    if math.prod(shape) <= 1 or (dtype == np.uint32 and shape in _KEY_SHAPES):
        return True
    histories = (
        (parameters[own], leaves[mirror])
        for root, members in subtrees.items()
        if root[:-1] == path[:-1]
        for own, mirror in members.items()
    )
    return any(found and found[0] == (*shape, *whole) for whole, found in histories)


def _least_factored(
    subtrees: Subtrees, parameters: Mapping[Path, Shape], leaves: Leaves
) -> dict[Path, int]:
    """Adafactor's whole moments -> from which size of the second largest dimension on adafactor may
    factor a parameter. The state of its transformation shows it."""
    states: dict[Path, dict[Path, dict[Path, Shape]]] = {}
    for root, members in subtrees.items():
        for parameter, path in members.items():
            if (leaf := leaves[path]) is not None:
                state = states.setdefault(root[:-1], {})
                state.setdefault(parameter, {})[path] = leaf[0]
    least: dict[Path, int] = {}
    for state in states.values():
        above, below, whole = 0, _LEAST_FACTORED, []
        for parameter, moments in state.items():
            shape, kinds = parameters[parameter], {*moments.values()}
            if _UNUSED not in kinds - {shape}:
                continue  # not adafactor's
            if shape in kinds:
                above = max(above, _second_size(shape))
                whole += [path for path, held in moments.items() if held == shape]
            if kinds - {shape, _UNUSED}:
                below = min(below, _second_size(shape))
        default = _LEAST_FACTORED if below == _LEAST_FACTORED else 0
        least |= dict.fromkeys(whole, max(above + 1, default))
    return least


class _Moment(NamedTuple):
    """The moment of a parameter in a subtree: its paths in the state (several for leaves without a
    value), and its value, if it has one."""

    paths: tuple[Path, ...]
    value: Value | None = None


# In place of a moment that cannot be made, for a reason among the problems.
_STUCK = "stuck"


class _Subtree(NamedTuple):
    """One subtree, in which the map of the parameters is evaluated. `before`: what the paths of
    parameters begin with before the conversion; `least`: see `_least_factored`."""

    root: Path
    before: Path
    members: Mapping[Path, Path]
    leaves: Leaves
    least: Mapping[Path, int]
    problems: list[str]
    must_be_zero: dict[Path, Filled]

    def moment(self, source: Source) -> _Moment | None:
        """The moment of a parameter, if it has one."""
        path = self.members.get(source.path)
        if path is None:
            return None
        leaf = self.leaves[path]
        return _Moment((path,), None if leaf is None else Source(path, leaf[0]))

    def run(self, call: Call, have: Sequence[Any]) -> Sequence[Any]:
        """The moments after an operation."""
        if _STUCK in have:
            return [_STUCK] * len(call.shapes)
        found = self._become(call, have) if any(have) else [None] * len(call.shapes)
        if isinstance(found, str):
            places = " + ".join(x for value in call.inputs for x in self._places(value))
            self.problems.append(f"{places}: {found}")
            return [_STUCK] * len(call.shapes)
        return found

    def _places(self, value: Value) -> list[str]:
        """The paths of the moments of a value of the parameters, whether they exist or not."""
        return [format_path(_below(self.root, path, self.before)) for path in sources_of(value)]

    def _become(self, call: Call, have: Sequence[_Moment | None]) -> Sequence[_Moment] | str:
        """The moments after an operation, or why there are none."""
        present = [held for held in have if held is not None]
        valued = [held for held in present if held.value is not None]
        absent = [
            place
            for value, held in zip(call.inputs, have, strict=True)
            if held is None or (valued and held.value is None)
            for place in self._places(value)
        ]
        if absent:
            verb = "has" if len(absent) == 1 else "have"
            return f"they become one, but {' and '.join(absent)} {verb} no value"
        paths = tuple(path for held in present for path in held.paths)
        if not valued:
            return [_Moment(paths)] * len(call.shapes)
        if isinstance(call.operation, Apply):
            name = call.operation.name
            return f"`{name}` changes its parameter, and does not apply to optimizer state"
        if not isinstance(call.operation, Moving):
            return f"its parameter is {call.operation}, and optimizer state cannot follow that"
        values = [held.value for held in valued if held.value is not None]
        before, shapes = [v.shape for v in call.inputs], [value.shape for value in values]
        unused = [
            isinstance(value, Filled) or self._is_unused(value.shape, shape)
            for value, shape in zip(values, before, strict=True)
        ]
        if all(unused):
            leaf = self.leaves[valued[0].paths[0]]
            assert leaf is not None
            zeros = Filled(_UNUSED, leaf[1])
            self.must_be_zero.update(dict.fromkeys(paths, zeros))
            return [_Moment(paths[:1], zeros)] * len(call.shapes)
        if any(unused):
            return "only some of them have a moment"
        follows = _adapted(call.operation, shapes, before, paths)
        if isinstance(follows, str):
            return follows
        try:
            after = applied(follows, values)
        except TreeMismatchError as error:
            return error.summary
        least = self.least.get(paths[0], math.inf)
        for value in after:
            if _second_size(value.shape) >= least:
                return f"adafactor may factor a parameter of the shape {list(value.shape)}"
        return [_Moment(paths[:1], value) for value in after]

    def _is_unused(self, shape: Shape, parameter: Shape) -> bool:
        """Whether a leaf only takes the place of a moment. If the parameter has one element, the
        names of adafactor's factors decide, since it has no factors."""
        factor = "v_row" in self.root or "v_col" in self.root
        return shape == _UNUSED and (parameter != _UNUSED or factor)
