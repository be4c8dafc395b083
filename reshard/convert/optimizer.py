"""Optimizer state goes where its parameters go: the steps for every subtree that mirrors them.

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
from reshard.convert.mirrors import Leaves, Subtrees, mirroring_subtrees, shared_keys
from reshard.convert.parts import adapted, second_size
from reshard.convert.steps import Step
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_path


@dataclasses.dataclass(frozen=True)
class OptimizerSteps:
    """What becomes of optimizer state.

    Attributes:
      steps: steps on paths below the optimizer state. A path with an empty key is one where a leaf
        waits until its place is free.
      placeholders: leaves without a value (optax's `MaskedNode`), path after -> paths before.
      vanish: leaves before that have no place after, which is right only if they are zeros.
      appear: leaves after that are zeros, with their shapes and dtypes.
      problems: what cannot be carried along, and why.
    """

    steps: tuple[Step, ...]
    placeholders: dict[Path, tuple[Path, ...]]
    vanish: tuple[Path, ...]
    appear: dict[Path, tuple[Shape, np.dtype]]
    problems: tuple[str, ...]


# What adafactor has in the place of a moment that it does not keep.
_UNUSED = (1,)
# Adafactor's `min_dim_size_to_factor`, unless it has factored less. Then nothing is known of it but
# what it has not factored.
_LEAST_FACTORED = 128
# Of the data of a PRNG key, `threefry2x32` and `rbg`.
_KEY_SHAPES = ((2,), (4,))


def optimizer_steps(
    steps: Sequence[Step],
    parameters: Mapping[Path, Shape],
    leaves: Leaves,
    ahead: Path | None = None,
    others: bool = False,
    beside: Collection[Path] = (),
) -> OptimizerSteps:
    """The steps of optimizer state that follow from those of the parameters.

    Args:
      steps: what becomes of the parameters, in order. They can be carried out.
      parameters: all parameters before, with the collection ahead (or no collection).
      leaves: optimizer state before: path below it -> shape and dtype, None for a leaf without a
        value.
      ahead: what the parameters' paths begin with after the steps, and the subtrees' do not; by
        default what it is before them.
      others: whether there are more parameters before or after.
      beside: leaves that may be no optimizer's at all, and follow if they mirror parameters.
    """
    subtrees, unknown = mirroring_subtrees(parameters, leaves)
    factoring = _factoring(subtrees, parameters, leaves)
    made = _Followed()
    near, alone = _strays(steps, parameters, leaves, subtrees)
    made.problems += near
    if unknown or not alone.keys() <= {*beside}:
        places = _places(steps, parameters)
        for members in unknown.values():
            made.problems += _doubts(members, places, ahead)
        if others or places is None or not _keep_order(places):
            made.problems += [text for path, text in alone.items() if path not in beside]
    for root, members in subtrees.items():
        subtree = _Subtree(root, members, parameters, leaves, factoring[root[:-1]], made, ahead)
        for step in steps:
            subtree.follow(step)
        subtree.finish()
    return OptimizerSteps(
        tuple(made.steps),
        made.placeholders,
        tuple(made.vanish),
        made.appear,
        tuple(made.problems),
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


def _places(steps: Sequence[Step], parameters: Collection[Path]) -> dict[Path, Path] | None:
    """Parameter -> its path after the steps; None if there are operations on parameters."""
    origins = {path: path for path in parameters}
    for step in steps:
        if step.operation is None:
            (before,), (after,) = step.inputs, step.outputs
            if before in origins:
                origins[after] = origins.pop(before)
        elif not step.inputs or not origins.keys().isdisjoint(step.inputs):
            return None
    return {before: after for after, before in origins.items()}


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


def _strays(
    steps: Sequence[Step],
    parameters: Mapping[Path, Shape],
    leaves: Leaves,
    subtrees: Subtrees,
) -> tuple[list[str], dict[Path, str]]:
    """Problems with what is near the place of a parameter that changes, and not at it: a list in
    place of a moment, or a moment that is boxed where its parameter is not. And with arrays that
    are near none, by path: they may be all moments in one vector (`optax.flatten`), which is wrong
    as soon as parameters change."""
    shared = shared_keys(parameters)
    ends: dict[Path, Path] = {}
    for path in parameters:
        keys = tuple(map(str, path[min(shared, max(len(path) - 2, 1)) :]))
        if len(keys) > 1:  # one is often the name of something else too
            ends[keys] = path
    changed: set[Path | None] = {path for step in steps for path in step.inputs}
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


def _doubts(
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


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a subtree has for a parameter.

    Attributes:
      paths: where it is; of leaves without a value, all that have become it; none for the zeros
        that have taken the place of unused ones.
      shape: its shape; None without a value.
      dtype: its dtype.
      least: from which size on adafactor may factor its parameter; None if it is not adafactor's,
        or a factor.
      origin: of the last step that it went through, if any.
    """

    paths: tuple[Path, ...]
    shape: Shape | None = None
    dtype: np.dtype | None = None
    least: int | None = None
    origin: str | None = None


@dataclasses.dataclass
class _Followed:
    """What has been found so far."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    placeholders: dict[Path, tuple[Path, ...]] = dataclasses.field(default_factory=dict)
    vanish: list[Path] = dataclasses.field(default_factory=list)
    appear: dict[Path, tuple[Shape, np.dtype]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


class _Subtree:
    """One subtree, while the parameters' steps are carried out on it.

    Args:
      root: where it is.
      members: parameter -> its mirror in the subtree.
      parameters: shapes of the parameters.
      leaves: shapes and dtypes of the mirrors.
      factoring: what is known of adafactor.
      made: what is found is added here.
      ahead: as for `optimizer_steps`.
    """

    def __init__(
        self,
        root: Path,
        members: Mapping[Path, Path],
        parameters: Mapping[Path, Shape],
        leaves: Leaves,
        factoring: _Factoring,
        made: _Followed,
        ahead: Path | None,
    ):
        parameter, path = next(iter(members.items()))
        self._root = root
        self._before = parameter[: len(parameter) - (len(path) - len(root))]
        self._ahead = self._before if ahead is None else ahead
        self._made = made
        self._shapes: dict[Path, Shape] = dict(parameters)
        self._held: dict[Path, _Held] = {}
        for parameter, path in members.items():
            leaf = leaves[path]
            shape, dtype = leaf or (None, None)
            unfactored = parameter in factoring.whole and shape == parameters[parameter]
            least = factoring.least if unfactored else None
            self._held[parameter] = _Held((path,), shape, dtype, least)
        self._occupied = set(members.values())
        self._given_up: set[Path] = set()

    def follow(self, step: Step) -> None:
        """Goes on with the next step of the parameters."""
        before = [self._shapes.pop(path) for path in step.inputs if path in self._shapes]
        if len(before) == len(step.inputs):
            after = before if step.operation is None else step.operation.shapes(before)
            self._shapes.update(zip(step.outputs, after, strict=True))
        names = [self._name(path) for path in step.inputs]
        have = [self._held.pop(path, None) for path in step.inputs]
        if not self._given_up.isdisjoint(step.inputs):
            self._given_up.update(step.outputs)
        elif any(have):
            found = self._become(step, have, before)
            if isinstance(found, str):
                text = " + ".join(map(format_path, names))
                self._made.problems.append(f"{text}: {found}")
                self._given_up.update(step.outputs)
            else:
                self._held.update(zip(step.outputs, found, strict=True))

    def finish(self) -> None:
        """Puts everything in its place."""
        for path, held in self._held.items():
            place = self._inside(path)
            if held.origin is None:
                continue
            if held.shape is None:
                self._made.placeholders[place] = held.paths
            elif held.dtype is not None and not held.paths:
                self._made.appear[place] = (held.shape, held.dtype)
            elif held.paths != (place,):
                self._made.steps.append(Step(held.paths, (place,), None, held.origin))

    def _inside(self, path: Path) -> Path:
        """The place in the subtree of what the parameters have at a path after a step."""
        start = len(self._ahead)
        return self._root + (path[start:] if path[:start] == self._ahead else path)

    def _name(self, path: Path) -> Path:
        """What the subtree has, or lacks, for a parameter, as it is told of."""
        held, start = self._held.get(path), len(self._before)
        if held is not None and held.origin is None:
            return held.paths[0]
        return self._root + path[start:] if path[:start] == self._before else self._inside(path)

    def _become(
        self, step: Step, have: Sequence[_Held | None], before: Sequence[Shape]
    ) -> list[_Held] | str:
        """What leaves become in a step, or why they cannot."""
        pairs = list(zip(step.inputs, have, strict=True))
        valued = [held for held in have if held is not None and held.shape is not None]
        absent = [path for path, held in pairs if held is None or (valued and held.shape is None)]
        if absent:
            names = [format_path(self._name(path)) for path in absent]
            verb = "has" if len(names) == 1 else "have"
            return f"they become one, but {' and '.join(names)} {verb} no value"
        first, *_ = there = [held for held in have if held is not None]
        if not valued:
            paths = tuple(path for held in there for path in held.paths)
            return [_Held(paths, origin=step.origin)] * len(step.outputs)
        moments = [held.shape for held in valued if held.shape is not None]
        if step.operation is not None or not first.paths:
            unused = [
                not held.paths or self._is_unused(held, shape)
                for held, shape in zip(there, before, strict=True)
            ]
            if all(unused):
                self._made.vanish += [path for held in there for path in held.paths]
                zeros = _Held((), _UNUSED, first.dtype, origin=step.origin)
                return [zeros] * len(step.outputs)
            if any(unused):
                return "a moment is kept of some of them, and not of others"
        paths = tuple(path for held in there for path in held.paths)
        follows = adapted(step.operation, moments, before, paths)
        if isinstance(follows, str):
            return follows
        try:
            after = moments if follows is None else follows.shapes(moments)
        except TreeMismatchError as error:
            return error.summary
        if step.operation is not None and first.least is not None:
            factored = [shape for shape in after if second_size(shape) >= first.least]
            if factored:
                return f"adafactor may factor a parameter of the shape {list(factored[0])}"
        self._occupied.difference_update(paths)
        places = tuple(map(self._free, map(self._inside, step.outputs)))
        self._occupied.update(places)
        if follows is not None or paths != places:
            self._made.steps.append(Step(paths, places, follows, step.origin))
        return [
            _Held((place,), shape, first.dtype, first.least, step.origin)
            for place, shape in zip(places, after, strict=True)
        ]

    def _is_unused(self, held: _Held, parameter: Shape) -> bool:
        """Whether a leaf is only there in the place of a moment. Of a parameter of one element that
        is told by the names of adafactor's factors, which it has none of."""
        factor = "v_row" in self._root or "v_col" in self._root
        return held.shape == _UNUSED and (parameter != _UNUSED or factor)

    def _free(self, place: Path) -> Path:
        """The place, or where to wait until it is free."""
        root = self._root
        return (*root, "", *place[len(root) :]) if place in self._occupied else place
