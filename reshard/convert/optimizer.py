"""Optimizer state follows its parameters: each subtree that mirrors them goes through their map.

Operations that move elements are linear, so they hold for moments as they do for parameters. If a
moment has another shape than its parameter, an operation is adapted to the axes that it has, or
refused. No name that an optimizer gives to its state is looked for (see
`reshard.sharding.optimizer_state`).
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import array_text
from reshard.arrays.operations import Apply, Moving, Operation, Pad, Stack, Transpose, Unstack
from reshard.convert.leafmap import (
    Call,
    Filled,
    LeafMap,
    Output,
    Source,
    Value,
    applied,
    sources_of,
)
from reshard.errors import TreeMismatchError
from reshard.sharding.mesh import Spec
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


def adapted(
    operation: Operation,
    shapes: Sequence[Shape],
    parameters: Sequence[Shape],
    paths: Sequence[Path],
) -> Operation | str:
    """An operation on parameters as one on their moments, or why there is none."""
    if list(shapes) == list(parameters):
        if isinstance(operation, Pad) and operation.fill != 0:
            return (
                f"a moment cannot be padded with {operation.fill}: that is not a linear operation"
            )
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


# What adafactor has in the place of a moment that it does not keep.
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
    factoring = _factoring(subtrees, parameters, leaves)
    near, alone = _unplaced(model.sources(), parameters, leaves, subtrees)
    problems = near
    if unknown or not alone.keys() <= {*beside}:
        places = _places(model, parameters)
        for members in unknown.values():
            problems += _ambiguities(members, places, ahead)
        if others or places is None or not _keep_order(places):
            problems += [text for path, text in alone.items() if path not in beside]
    found, placeholders = LeafMap({}), dict[Path, tuple[Path, ...]]()
    for root, members in subtrees.items():
        subtree = _Subtree(root, members, parameters, leaves, factoring[root[:-1]], ahead)
        problems += subtree.follow(model, found, placeholders)
    return Followed(found, placeholders, tuple(problems))


def follows_note(root: Path, count: int, checked: bool = True) -> str:
    """The note on leaves that are not optimizer state and have followed parameters."""
    text = (
        f"`{format_path(root)}` follows the parameters: {count} lea{'f' if count == 1 else 'ves'}"
    )
    return text if checked else f"{text}, unchecked"


def _places(model: LeafMap, parameters: Collection[Path]) -> dict[Path, Path] | None:
    """Parameter -> its path afterwards; None if there are operations on parameters."""
    for call in model.calls():
        inside = LeafMap({(): Output(call, 0)}).sources()
        if not inside or not inside.keys().isdisjoint(parameters):
            return None
    places = {value.path: path for path, value in model.values.items() if isinstance(value, Source)}
    return {path: places.get(path, path) for path in parameters}


def _keep_order(places: Mapping[Path, Path]) -> bool:
    """Whether parameters are in one order before and after, as optimizers flatten them: Linen sorts
    names as text, NNX sorts positions of lists as numbers. Any of the two may have been used."""
    pairs = list(places.items())
    if all(before[0] != "params" for before, _ in pairs):  # from NNX: what is none in Linen
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
    """Problems with leaves near the place of a parameter that changes, and not at it: a list in
    place of a moment, or a moment in a box although its parameter is in none. And problems with
    arrays near no parameter, by path: one may be all moments in one vector (`optax.flatten`), whose
    order depends on the parameters."""
    if not leaves:
        return [], {}
    shared = shared_keys(parameters)
    ends: dict[Path, Path] = {}
    for path in parameters:
        keys = tuple(map(str, path[min(shared, max(len(path) - 2, 1)) :]))
        if len(keys) > 1:  # one is often the name of something else too
            ends[keys] = path
    problems: list[str] = []
    alone: dict[Path, str] = {}
    followed = {path for members in subtrees.values() for path in members.values()}
    for path, leaf in leaves.items():
        if leaf is None or leaf[0] == () or path in followed:  # counters, for one
            continue
        keys = (*map(str, path), "value")
        parts = itertools.combinations(range(len(path) + 2), 2)
        near = (ends.get(keys[a:b]) for a, b in parts if a < len(path) != b)
        parameter = next((found for found in near if found is not None), None)
        if parameter in changed:
            problems.append(
                f"{format_path(path)}: it is not in the place of {format_path(parameter or ())}"
            )
        elif parameter is None and not _is_small(path, leaf, parameters, leaves, subtrees):
            alone[path] = (
                f"{format_path(path)}: {array_text(leaf[1].name, leaf[0])} mirrors no parameter, "
                "and parameters change their order, shape or number"
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


def _ambiguities(
    members: Mapping[Path, Path], places: Mapping[Path, Path] | None, ahead: Path | None
) -> Iterator[str]:
    """Problems with numbers that may be of parameters which change."""
    for parameter, path in members.items():
        start = len(parameter) - 1 if ahead is None else len(ahead)
        if places is None or places[parameter][start:] != parameter[-1:]:
            yield (
                f"{format_path(path)}: it may be a number of parameter {format_path(parameter)}, "
                "or one of the optimizer's own"
            )


class _Factoring(NamedTuple):
    """Adafactor's choices, as the moments of one transformation show them: parameters whose moment
    is whole, and from which size of the second largest dimension on others may be factored."""

    whole: frozenset[Path]
    least: int


def _factoring(
    subtrees: Subtrees, parameters: Mapping[Path, Shape], leaves: Leaves
) -> dict[Path, _Factoring]:
    """The roots of subtrees without the last key -> adafactor's choices there."""
    kinds: dict[Path, dict[Path, set[str]]] = {}
    for root, members in subtrees.items():
        found = kinds.setdefault(root[:-1], {})
        for parameter, path in members.items():
            leaf, shape = leaves[path], parameters[parameter]
            if leaf is not None:
                kind = "whole" if leaf[0] == shape else "unused" if leaf[0] == _UNUSED else "part"
                found.setdefault(parameter, set()).add(kind)
    result = {}
    for parent, found in kinds.items():
        whole, part = (
            [parameter for parameter, has in found.items() if {"unused", kind} <= has]
            for kind in ("whole", "part")
        )
        above = max((second_size(parameters[path]) for path in whole), default=0)
        below = min((second_size(parameters[path]) for path in part), default=_LEAST_FACTORED)
        least = above + 1 if below < _LEAST_FACTORED else max(above + 1, _LEAST_FACTORED)
        result[parent] = _Factoring(frozenset(whole), least)
    return result


class _Held(NamedTuple):
    """The moment of a parameter in a subtree: its paths in the state (several for leaves without a
    value); its value, or None; its dtype; and from which size on adafactor may factor its
    parameter, None if it is not adafactor's or is a factor."""

    paths: tuple[Path, ...]
    value: Value | None = None
    dtype: np.dtype | None = None
    least: int | None = None


class _Subtree:
    """One subtree, in which the map of the parameters is evaluated."""

    def __init__(
        self,
        root: Path,
        members: Mapping[Path, Path],
        parameters: Mapping[Path, Shape],
        leaves: Leaves,
        factoring: _Factoring,
        ahead: Path | None,
    ):
        parameter, path = next(iter(members.items()))
        self._root = root
        self._before = parameter[: len(parameter) - (len(path) - len(root))]
        self._ahead = self._before if ahead is None else ahead
        self._held: dict[Path, _Held] = {}
        for parameter, path in members.items():
            leaf = leaves[path]
            shape, dtype = leaf or (None, None)
            unfactored = parameter in factoring.whole and shape == parameters[parameter]
            least = factoring.least if unfactored else None
            value = None if shape is None else Source(path, shape)
            self._held[parameter] = _Held((path,), value, dtype, least)
        self._made: dict[int, list[_Held | None]] = {}
        self._must_be_zero: dict[Path, Filled] = {}

    def follow(
        self, model: LeafMap, into: LeafMap, placeholders: dict[Path, tuple[Path, ...]]
    ) -> list[str]:
        """Adds the map of the subtree. Returns the problems."""
        problems: list[str] = []
        given_up: set[int] = set()
        for call in model.calls():
            have = list(map(self._has, call.inputs))
            found: list[_Held] | str | None = None
            if any(isinstance(v, Output) and id(v.call) in given_up for v in call.inputs):
                given_up.add(id(call))
            elif any(have):
                found = self._become(call, have)
            if isinstance(found, str):
                places = itertools.chain(*map(self._places, call.inputs))
                problems.append(f"{' + '.join(map(format_path, places))}: {found}")
                given_up.add(id(call))
            made = found if isinstance(found, list) else [None] * len(call.shapes)
            self._made[id(call)] = list(made)
        for path, value in model.values.items():
            held, place = self._has(value), self._inside(path)
            if held is not None and held.value is None:
                placeholders[place] = held.paths
            elif held is not None and held.value not in (None, Source(place, value.shape)):
                into.values[place] = held.value
                if path in model.origin:
                    into.origin[place] = model.origin[path]
        into.must_be_zero.update(self._must_be_zero)
        return problems

    def _has(self, value: Value) -> _Held | None:
        """The moment of a value of the parameters."""
        if isinstance(value, Source):
            return self._held.get(value.path)
        return self._made[id(value.call)][value.part] if isinstance(value, Output) else None

    def _inside(self, path: Path) -> Path:
        """The place in the subtree for a path of the parameters after the conversion."""
        start = len(self._ahead)
        return self._root + (path[start:] if path[:start] == self._ahead else path)

    def _places(self, value: Value) -> list[Path]:
        """The paths of the moments of a value of the parameters, whether they exist or not."""
        start = len(self._before)
        paths = sources_of(value)
        return [self._root + (p[start:] if p[:start] == self._before else p) for p in paths]

    def _become(self, call: Call, have: Sequence[_Held | None]) -> list[_Held] | str:
        """The moments after an operation, or why there are none."""
        present = [held for held in have if held is not None]
        valued = [held for held in present if held.value is not None]
        absent = [
            format_path(path)
            for value, held in zip(call.inputs, have, strict=True)
            if held is None or (valued and held.value is None)
            for path in self._places(value)
        ]
        if absent:
            verb = "has" if len(absent) == 1 else "have"
            return f"they become one, but {' and '.join(absent)} {verb} no value"
        paths = tuple(path for held in present for path in held.paths)
        if not valued:
            return [_Held(paths)] * len(call.shapes)
        if isinstance(call.operation, Apply):
            return f"its parameter is given to `{call.operation.name}`, which is for that alone"
        if not isinstance(call.operation, Moving):
            return f"its parameter is {call.operation}, and optimizer state cannot follow that"
        first, values = valued[0], [held.value for held in valued if held.value is not None]
        before, moments = [v.shape for v in call.inputs], [value.shape for value in values]
        unused = [
            isinstance(value, Filled) or self._is_unused(value.shape, shape)
            for value, shape in zip(values, before, strict=True)
        ]
        if all(unused):
            assert first.dtype is not None
            zeros = Filled(_UNUSED, first.dtype)
            self._must_be_zero |= dict.fromkeys(paths, zeros)
            return [_Held((), zeros, first.dtype)] * len(call.shapes)
        if any(unused):
            return "only some of them have a moment"
        follows = adapted(call.operation, moments, before, paths)
        if isinstance(follows, str):
            return follows
        try:
            after = applied(follows, values)
        except TreeMismatchError as error:
            return error.summary
        if first.least is not None:
            factored = [v.shape for v in after if second_size(v.shape) >= first.least]
            if factored:
                return f"adafactor may factor a parameter of the shape {list(factored[0])}"
        return [_Held(paths[:1], value, first.dtype, first.least) for value in after]

    def _is_unused(self, shape: Shape, parameter: Shape) -> bool:
        """Whether a leaf only takes the place of a moment. If the parameter has one element, the
        names of adafactor's factors decide, since it has no factors."""
        factor = "v_row" in self._root or "v_col" in self._root
        return shape == _UNUSED and (parameter != _UNUSED or factor)
