"""Optimizer state goes where its parameters go: their map is evaluated with every subtree that
mirrors them.

Operations that move elements are linear, so they hold for
moments as they do for parameters. Where a moment has another shape than its parameter, they are
adapted to the axes that it has, or refused.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import array_text
from reshard.arrays.operations import Apply
from reshard.convert.leafmap import (
    Call,
    LeafMap,
    Output,
    Source,
    Value,
    Zeros,
    applied,
    input_names,
    names_of,
)
from reshard.convert.mirrors import (
    Leaves,
    Subtrees,
    adapted,
    mirroring_subtrees,
    second_size,
    shared_keys,
)
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_path


@dataclasses.dataclass(frozen=True)
class Followed:
    """What becomes of optimizer state.

    Attributes:
      map: of the leaves below the optimizer state that follow parameters which change.
      placeholders: leaves without a value (optax's `MaskedNode`), path after -> paths before.
      problems: what cannot be carried along, and why.
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
    """What becomes of optimizer state: the map of the parameters, evaluated for each subtree that
    mirrors them.

    Args:
      model: what becomes of the parameters; of those that it does not name, nothing.
      parameters: all parameters before, with the collection ahead (or no collection).
      leaves: optimizer state before: path below it -> shape and dtype, None for a leaf without a
        value.
      ahead: what the parameters' paths begin with after the conversion, and the subtrees' do not;
        by default what it is before.
      others: whether there are more parameters before or after.
      beside: leaves that may be no optimizer's at all, and follow if they mirror parameters.
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
    made = [
        _Subtree(root, members, parameters, leaves, factoring[root[:-1]], ahead).follow(model)
        for root, members in subtrees.items()
    ]
    found = LeafMap(
        {path: value for part in made for path, value in part.map.values.items()},
        {path: text for part in made for path, text in part.map.origin.items()},
        (),
        {path: zeros for part in made for path, zeros in part.map.must_be_zero.items()},
    )
    return Followed(
        found,
        {path: before for part in made for path, before in part.placeholders.items()},
        (*problems, *(text for part in made for text in part.problems)),
    )


def follows_note(root: Path, count: int, checked: bool = True) -> str:
    """What the user should know of leaves that are no optimizer's, and have followed parameters.

    Args:
      root: what they are below.
      count: how many they are.
      checked: whether they have been compared with what is to be there.
    """
    text = (
        f"`{format_path(root)}` follows the parameters: {count} lea{'f' if count == 1 else 'ves'}"
    )
    return text if checked else f"{text}, checked against nothing"


def _places(model: LeafMap, parameters: Collection[Path]) -> dict[Path, Path] | None:
    """Parameter -> its path afterwards; None if there are operations on parameters."""
    for call in model.calls():
        inside = LeafMap({(): Output(call, 0)}).sources()
        if not inside or not inside.keys().isdisjoint(parameters):
            return None
    places = {value.path: path for path, value in model.values.items() if isinstance(value, Source)}
    return {path: places.get(path, path) for path in parameters}


def _keep_order(places: Mapping[Path, Path]) -> bool:
    """Whether parameters are in one order before and after. NNX sorts positions of lists as
    numbers, and Linen sorts all names as text: which of the two it is does not matter here."""
    pairs = list(places.items())
    if all(before[0] != "params" for before, _ in pairs):  # from NNX: what is none in Linen
        pairs = [pair for pair in pairs if pair[1][0] == "params"] or pairs
    orders = [
        [before for before, _ in sorted(pairs, key=lambda pair, side=side: key(pair[side]))]
        for side in (0, 1)
        for key in (_as_text, _as_numbers)
    ]
    return all(order == orders[0] for order in orders)


def _as_text(path: Path) -> list[str]:
    return list(map(str, path))


def _as_numbers(path: Path) -> list[tuple[bool, int, str]]:
    keys = map(str, path)
    return [(False, int(key), "") if key.isdecimal() else (True, 0, key) for key in keys]


def _unplaced(
    changed: Collection[Path], parameters: Mapping[Path, Shape], leaves: Leaves, subtrees: Subtrees
) -> tuple[list[str], dict[Path, str]]:
    """Problems with what is near the place of a parameter that changes, and not at it: a list in
    place of a moment, or a moment that is boxed where its parameter is not. And with arrays that
    are near none, by path: they may be all moments in one vector (`optax.flatten`), which is wrong
    as soon as parameters change."""
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
    """Whether an array that mirrors no parameter has nothing of them in their order: one element,
    the data of a PRNG key, or a number for each update of a history beside it (`lbfgs`)."""
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
    """What the moments of one transformation tell of adafactor.

    Attributes:
      whole: parameters that it keeps a whole moment of.
      least: from which size of the second largest dimension on it may factor others.
    """

    whole: frozenset[Path]
    least: int


def _factoring(
    subtrees: Subtrees, parameters: Mapping[Path, Shape], leaves: Leaves
) -> dict[Path, _Factoring]:
    """What is ahead of the last key of subtrees' roots -> what these tell of adafactor."""
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
    """What a subtree has for a parameter.

    Attributes:
      paths: where it is in the state; of leaves without a value, all that have become it.
      value: its value; None for leaves without one.
      dtype: its dtype.
      least: from which size on adafactor may factor its parameter; None if it is not adafactor's,
        or a factor.
    """

    paths: tuple[Path, ...]
    value: Value | None = None
    dtype: np.dtype | None = None
    least: int | None = None


class _Subtree:
    """One subtree, in which the map of the parameters is evaluated.

    Args:
      root: where it is.
      members: parameter -> its mirror in the subtree.
      parameters: shapes of the parameters.
      leaves: shapes and dtypes of the mirrors.
      factoring: what is known of adafactor.
      ahead: as for `followed`.
    """

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
        self._must_be_zero: dict[Path, Zeros] = {}

    def follow(self, model: LeafMap) -> Followed:
        """What becomes of it."""
        problems: list[str] = []
        given_up: set[int] = set()
        names = names_of(model)
        for call in model.calls():
            have = list(map(self._has, call.inputs))
            found: list[_Held] | str | None = None
            if any(isinstance(v, Output) and id(v.call) in given_up for v in call.inputs):
                given_up.add(id(call))
            elif any(have):
                inputs = zip(input_names(call, names), call.inputs, have, strict=True)
                named = [self._name(path, value, held) for path, value, held in inputs]
                found = self._become(call, have, named)
            if isinstance(found, str):
                problems.append(f"{' + '.join(map(format_path, named))}: {found}")
                given_up.add(id(call))
            made = found if isinstance(found, list) else [None] * len(call.shapes)
            self._made[id(call)] = list(made)
        values: dict[Path, Value] = {}
        placeholders: dict[Path, tuple[Path, ...]] = {}
        origin: dict[Path, str] = {}
        for path, value in model.values.items():
            held, place = self._has(value), self._inside(path)
            if held is not None and held.value is None:
                placeholders[place] = held.paths
            elif held is not None and held.value not in (None, Source(place, value.shape)):
                values[place] = held.value
                if path in model.origin:
                    origin[place] = model.origin[path]
        found_map = LeafMap(values, origin, (), self._must_be_zero)
        return Followed(found_map, placeholders, tuple(problems))

    def _has(self, value: Value) -> _Held | None:
        """What the subtree has for a value of the parameters."""
        if isinstance(value, Source):
            return self._held.get(value.path)
        return self._made[id(value.call)][value.part] if isinstance(value, Output) else None

    def _inside(self, path: Path) -> Path:
        """The place in the subtree of what the parameters have at a path afterwards."""
        start = len(self._ahead)
        return self._root + (path[start:] if path[:start] == self._ahead else path)

    def _name(self, path: Path, value: Value, held: _Held | None) -> Path:
        """What the subtree has, or lacks, for a value, as it is told of."""
        start = len(self._before)
        if not isinstance(value, Source):
            return self._inside(path)
        if held is not None:
            return held.paths[0]
        return self._root + path[start:] if path[:start] == self._before else self._inside(path)

    def _become(
        self, call: Call, have: Sequence[_Held | None], named: Sequence[Path]
    ) -> list[_Held] | str:
        """What leaves become by an operation, or why they cannot."""
        there = [held for held in have if held is not None]
        valued = [held for held in there if held.value is not None]
        absent = [
            format_path(name)
            for name, held in zip(named, have, strict=True)
            if held is None or (valued and held.value is None)
        ]
        if absent:
            verb = "has" if len(absent) == 1 else "have"
            return f"they become one, but {' and '.join(absent)} {verb} no value"
        paths = tuple(path for held in there for path in held.paths)
        if not valued:
            return [_Held(paths)] * len(call.shapes)
        if isinstance(call.operation, Apply):
            return f"its parameter is given to `{call.operation.name}`, which is for that alone"
        first, values = valued[0], [held.value for held in valued if held.value is not None]
        before, moments = [v.shape for v in call.inputs], [value.shape for value in values]
        unused = [
            isinstance(value, Zeros) or self._is_unused(value.shape, shape)
            for value, shape in zip(values, before, strict=True)
        ]
        if all(unused):
            assert first.dtype is not None
            zeros = Zeros(_UNUSED, first.dtype)
            self._must_be_zero |= dict.fromkeys(paths, zeros)
            return [_Held((), zeros, first.dtype)] * len(call.shapes)
        if any(unused):
            return "a moment is kept of some of them, and not of others"
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
        """Whether a leaf is only there in the place of a moment. Of a parameter of one element that
        is told by the names of adafactor's factors, which it has none of."""
        factor = "v_row" in self._root or "v_col" in self._root
        return shape == _UNUSED and (parameter != _UNUSED or factor)
