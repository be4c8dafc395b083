"""What becomes of every leaf in a conversion: decided, and checked, as a whole.

A total map: every leaf of the source is used or dropped by name, every leaf of the target is filled
or left to the model's own initial value by name. What does not fit is collected and reported
together. Paths here are relative to the model, or to the optimizer's state, until `Decision.way`.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Apply
from reshard.checkpoint import Checkpoint, Leaf
from reshard.convert.alike import shown_once
from reshard.convert.layout import Layout, detect
from reshard.convert.leafmap import LeafMap, Output, Source, Value, Zeros, renaming
from reshard.convert.map_rules import Map
from reshard.convert.mapfile import read_map
from reshard.convert.mirrors import Leaves, followers, mirrored, parameters_of
from reshard.convert.model import TargetTree
from reshard.convert.model_map import Side, by_map, model_map, side_of
from reshard.convert.module_tree import inside
from reshard.convert.optimizer import followed, follows_note
from reshard.convert.pairing import listed
from reshard.convert.problems import UNEXPECTED, Problems
from reshard.convert.suggestions import Level, level_above, numbered_rules
from reshard.convert.target_paths import Part, TargetPaths
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.hints import Hint
from reshard.restore.matching import TargetLeaf
from reshard.transforms import rename
from reshard.tree import Path, format_path, named_in, split_path


@dataclasses.dataclass(frozen=True)
class Decision:
    """A conversion.

    Attributes:
      map: from the saved leaves of the source to those of the target.
      model: that of the model's leaves, by their paths in the model.
      initial: saved paths of leaves of the target that keep the model's own initial value.
      initial_names: the same, as the map names them, less optimizer state that does so because its
        parameters do.
      counters: saved paths of step counters of the target -> their dtype and how they are saved.
      empty: leaves of the target that are empty containers.
      prefix: what the target has ahead of the model's own tree.
      notes: what the user should know.
    """

    map: LeafMap
    model: LeafMap
    initial: tuple[Path, ...]
    initial_names: tuple[Path, ...]
    counters: dict[Path, tuple[np.dtype, str]]
    empty: dict[Path, Leaf]
    prefix: Path
    notes: tuple[str, ...]


def decide(
    ckpt: Checkpoint,
    layout: Layout,
    to: str,
    target: TargetTree | None,
    map_file: str | os.PathLike | None,
    init: Sequence[str],
    other: TargetTree | None,
    left_out: Mapping[Path, Shape],
) -> Decision:
    """Decides a conversion.

    Args:
      ckpt: the source.
      layout: what it is.
      to: the API that it is converted to.
      target: the tree that is to be made, if there is a model.
      map_file: path of a map file.
      init: globs of leaves of that tree.
      other: the tree of the model that the source is of, if that is known.
      left_out: leaves of the model that the source does not have any more: dropped before.

    Raises:
      TreeMismatchError: all that stands against it.
    """
    shapes = layout.shapes(ckpt)
    parameters = parameters_of({**shapes, **left_out}, layout.api)
    copies = _copies_of_parameters(ckpt, layout, parameters)
    places = TargetPaths(layout, to, target, bool(copies))
    against = Problems(ckpt, layout, to, target, other, copies, places)
    return _Work(against, shapes, parameters, left_out).decided(map_file, init)


class _Work:
    """A conversion while it is being decided: what is known, and what has been found against it."""

    def __init__(
        self,
        against: Problems,
        shapes: Mapping[Path, Shape],
        parameters: Mapping[Path, Shape],
        left_out: Mapping[Path, Shape],
    ):
        self._against = against
        self._shapes = shapes
        self._parameters = parameters
        self._left_out = left_out
        self._notes: list[str] = []

    def decided(self, map_file: str | os.PathLike | None, init: Sequence[str]) -> Decision:
        """Decides everything, then raises what has been found, or puts it together."""
        model, initial = self._model(map_file, init)
        reset = self._reset(initial)
        optimizer = self._optimizer(model)
        copies = self._copied(model)
        against = self._against
        against.check(model, optimizer, copies, {*initial, *reset})
        whole = self._whole(model, optimizer, copies)
        if against.problems:
            found = against.outcomes(whole, {*initial, *reset})
            raise against.error(against.problems, against.hints, found)
        return self._decision(whole, model, optimizer, copies, initial, reset)

    def _model(
        self, map_file: str | os.PathLike | None, init: Sequence[str]
    ) -> tuple[Part, set[Path]]:
        """What becomes of the model's leaves, and the saved paths of those that keep their initial
        value."""
        target, layout = self._against.target, self._against.layout
        known = None if self._against.other is None else self._against.other.outline
        source_side, target_side = side_of(self._against.ckpt, layout, known), None
        if target is not None:
            dtypes = {path: target.leaf(saved).dtype for path, saved in target.layout.model.items()}
            target_side = Side(self._against.to, target.shapes(), dtypes, target.outline)
        rules = None if map_file is None else read_map(map_file)
        said = by_map(rules, source_side, target_side, self._left_out)
        self._against.problems += said.problems
        self._against.hints += said.hints
        self._against.open |= dict.fromkeys(said.unexpected, UNEXPECTED)
        self._notes += said.notes
        initial = self._initial([*said.initial, *init], said.optional)
        if target_side is None or target is None:
            return Part(said.map), initial
        own = [path for path, saved in target.layout.model.items() if saved in initial]
        model, found = model_map(said, source_side, target_side, own)
        if found.abstentions and rules is None:
            placed = len(model.values.keys() & target_side.shapes.keys())
            level = level_above(self._against.ckpt, layout, target_side, own, placed)
            if level is not None:
                raise self._misplaced(init, level)
        rules = rules or Map("", (), to="nnx")
        if found.abstentions and not rules.rules and (rules.to or self._against.to) == "nnx":
            entries = numbered_rules(found.abstentions, rules, source_side, target_side, own)
            found = dataclasses.replace(found, abstentions=entries)
        self._notes += shown_once(
            f"{listed(one)} are {listed(other)} by their numbers"
            for one, other in (zip(*pairs, strict=True) for pairs in found.numbered)
        )
        self._against.undecided(found, said, self._shapes)
        return Part(model), initial

    def _misplaced(self, init: Sequence[str], level: Level) -> TreeMismatchError:
        """The error of a source with a level above the model: that, and all that stands against the
        source without it."""
        against, problems, hints = self._against, [level.problem], level.hints
        left_out: dict[Path, Shape] = {
            split_path(re.sub(*level.names, format_path(path))): shape
            for path, shape in self._left_out.items()
        }
        try:
            ckpt = rename(against.ckpt, [level.names])
            layout, other = detect(ckpt, against.layout.kind), against.other
            if other is not None and level.keys:
                other = dataclasses.replace(other, outline=inside(other.outline, level.keys))
            decide(ckpt, layout, against.to, against.target, None, init, other, left_out)
        except TreeMismatchError as error:
            problems += error.problems
            hints = [*hints, *error.hints]
        return against.error(problems, hints)

    def _initial(self, globs: Sequence[str], optional: Sequence[str]) -> set[Path]:
        """Saved paths of the leaves of the target that globs name, by their path in the model or in
        the whole tree; of those that are optional there may be none."""
        if not globs and not optional:
            return set()
        if self._against.target is None:
            raise ArgumentError(
                "only a model has initial values",
                [f"`{glob}`" for glob in (*globs, *optional)],
                [Hint(("model",))],
            )
        names = self._against.target.names()
        below = [
            (("model", *path), saved) for path, saved in self._against.target.layout.model.items()
        ]
        saved = [(path, path) for path in names.values()]
        namespaces = (names.items(), below, saved)
        named = named_in(namespaces, globs)
        if may := named_in(namespaces, (), optional) - named:
            told = listed(sorted(may))
            self._notes.append(f"the model's own initial value, as `optional` says: {told}")
        return named | may

    def _reset(self, initial: set[Path]) -> dict[Path, Path]:
        """Of optimizer state in the target what keeps its initial value because its parameters do:
        saved path -> the parameter."""
        if not initial or self._against.target is None:
            return {}
        there, leaves = self._against.target.layout, self._against.target.leaves
        state = {
            path: (leaf.shape, leaf.dtype)
            for path, saved in there.optimizer.items()
            if isinstance(leaf := leaves[saved], TargetLeaf) and leaf.dtype is not None
        }
        found = followers(parameters_of(self._against.target.shapes(), self._against.to), state)
        return {
            there.optimizer[path]: owner
            for path, owner in found.items()
            if there.model[owner] in initial
        }

    def _optimizer(self, model: Part) -> Part:
        """What becomes of the optimizer's leaves: they follow the model's."""
        leaves = {
            path: (self._against.arrays[saved].shape, self._against.arrays[saved].dtype)
            if saved in self._against.arrays
            else None
            for path, saved in self._against.layout.optimizer.items()
        }
        there = {} if self._against.target is None else self._against.target.layout.optimizer
        part, problems = self._following(model, leaves, there)
        self._against.problems += [f"opt_state/{text}" for text in problems]
        self._against.stuck = bool(problems)
        if problems:
            anew = Hint(("drop",), " with ", ("init",), " starts that state anew")
            self._against.hints.append(anew)
        return part

    def _following(
        self,
        model: Part,
        leaves: Leaves,
        there: Mapping[Path, Path],
        beside: Collection[Path] = (),
    ) -> tuple[Part, Sequence[str]]:
        """What becomes of leaves that follow the model's, and why they cannot.

        Args:
          model: what becomes of the model's.
          leaves: the leaves, as for `optimizer_steps`.
          there: their paths in the target -> saved paths.
          beside: as for `optimizer_steps`.
        """
        if not leaves and not there:
            return Part(LeafMap({})), ()
        parameters = self._parameters
        owners = followers(parameters, leaves)
        unused, zero = {*model.map.dropped, *self._left_out}, model.map.must_be_zero.keys()
        gone = unused | zero
        rest = {path: leaf for path, leaf in leaves.items() if owners.get(path) not in gone}
        kept = {path: shape for path, shape in parameters.items() if path not in gone}
        fewer = not (gone & parameters.keys()) <= _random(gone)
        more = self._has_more(model)
        ahead = self._ahead(there, ("params",) if beside else ())
        found = followed(model.map, kept, rest, ahead, fewer or more, beside)
        if found.problems:
            return Part(LeafMap({})), found.problems
        arrays = {path: leaf[0] for path, leaf in rest.items() if leaf}
        whole = renaming({path: path for path in arrays}, arrays).then(found.map)
        values = dict(whole.values)
        if self._against.target is not None:
            known = parameters_of(self._against.target.shapes(), self._against.to)
            for path, owner, _ in mirrored(known, there):
                leaf, value = self._against.target.leaves[there[path]], model.map.values.get(owner)
                if isinstance(value, Zeros) and isinstance(leaf, TargetLeaf) and leaf.dtype:
                    values[path] = Zeros(leaf.shape, leaf.dtype)
        zeros = {
            path: Zeros(*leaf)
            for path, owner in owners.items()
            if owner in zero and (leaf := leaves[path]) is not None
        }
        dropped = [path for path, owner in owners.items() if owner in unused]
        return Part(
            LeafMap(values, whole.origin, tuple(dropped), {**whole.must_be_zero, **zeros}),
            list(found.placeholders),
            list(dict.fromkeys(owners[path] for path in dropped)),
        ), ()

    def _copied(self, model: Part) -> Part:
        """What becomes of copies of the parameters: they follow the model's leaves."""
        arrays = {path: self._against.arrays[saved] for path, saved in self._against.copies.items()}
        leaves = {path: (leaf.shape, leaf.dtype) for path, leaf in arrays.items()}
        there = {} if self._against.target is None else self._against.target.layout.beside
        part, problems = self._following(model, leaves, there, leaves)
        self._against.problems += problems
        return part

    def _has_more(self, model: Part) -> bool:
        """Whether the model has parameters that come from none of the source's."""
        if self._against.target is None:
            return False
        there = parameters_of(self._against.target.shapes(), self._against.to)
        return not there.keys() - model.made.keys() <= _random(there)

    def _ahead(self, there: Mapping[Path, Path], default: Path) -> Path:
        """The collection of the parameters, if what follows them is without that key in the target,
        where it has these paths; what is given if the target has none of them."""
        if self._against.to == "nnx":
            return ()
        if self._against.target is None:
            return default
        known = parameters_of(self._against.target.shapes(), "linen")
        found = mirrored(known, there)
        without = [path for path, owner, root in found if len(path) - len(root) < len(owner)]
        return ("params",) if without else () if found else default

    def _whole(self, model: Part, optimizer: Part, copies: Part) -> LeafMap:
        """The map of all leaves by their saved paths: of those that have a place."""
        values: dict[Path, Value] = {}
        origin: dict[Path, str] = {}
        dropped: list[Path] = []
        must_be_zero: dict[Path, Zeros] = {}
        sides = (
            (model, self._against.layout.model, self._against.places.model),
            (optimizer, self._against.layout.optimizer, self._against.places.optimizer),
            (copies, self._against.copies, self._against.places.beside),
        )
        for part, saved, place in sides:
            shapes = {
                at: a.shape if (a := self._against.arrays.get(at)) else () for at in saved.values()
            }
            named = {*part.map.sources(), *part.map.dropped, *part.map.must_be_zero}
            paths = {at: path for path, at in saved.items() if path in named}
            whole = renaming(paths, shapes).then(part.map)
            dropped += whole.dropped
            must_be_zero |= whole.must_be_zero
            for path in part.map.values:
                at = place(path)
                assert at is not None or self._against.problems
                if at is not None:
                    values[at] = whole.values[path]
                    origin[at] = whole.origin.get(path) or "path"
        step = self._against.places.step()
        if self._against.layout.step is not None and step is not None:
            values[step[0]] = Source(self._against.layout.step, ())
        return LeafMap(values, origin, tuple(dropped), must_be_zero)

    def _decision(
        self,
        whole: LeafMap,
        model: Part,
        optimizer: Part,
        copies: Part,
        chosen: set[Path],
        reset: Mapping[Path, Path],
    ) -> Decision:
        """What has been decided, put together."""
        initial = {*chosen, *reset}
        counters = {}
        step = self._against.places.step()
        if self._against.layout.step is not None and step is not None:
            counters[step[0]] = step[1:]
        target = self._against.target
        leaves = {} if target is None else target.leaves
        names = {} if target is None else {saved: p for p, saved in target.layout.model.items()}
        notes = self._notes
        if target is None:
            notes.append("the map alone decided: only the source was checked")
        elif self._against.places.prefix and optimizer.made:
            notes.append(
                f"the model has no optimizer: {len(optimizer.made)} leaves of optimizer state are "
                "below `optimizer`, checked against nothing"
            )
        for root, count in collections.Counter(path[:1] for path in copies.made).items():
            notes.append(follows_note(root, count, self._against.places.is_checked(root)))
        if optimizer.map.dropped:
            notes.append(
                f"{len(optimizer.map.dropped)} leaves of optimizer state are dropped with their "
                f"parameters: {listed(optimizer.owners)}"
            )
        if reset:
            notes.append(
                f"{len(reset)} leaves of optimizer state keep the model's own initial values "
                f"with their parameters: {listed(list(dict.fromkeys(reset.values())))}"
            )
        notes += _applied_notes(whole)
        return Decision(
            map=whole,
            model=model.map,
            initial=tuple(saved for saved in leaves if saved in initial),
            initial_names=tuple(
                names.get(saved) or leaves[saved].path for saved in leaves if saved in chosen
            ),
            counters=counters,
            empty={
                self._against.places.prefix + path: leaf
                for path, leaf in leaves.items()
                if not isinstance(leaf, TargetLeaf)
            }
            | {
                place: None
                for path in optimizer.masked
                if (place := self._against.places.masked(path))
            },
            prefix=self._against.places.prefix,
            notes=tuple(notes),
        )


def _copies_of_parameters(
    ckpt: Checkpoint, layout: Layout, parameters: Mapping[Path, Shape]
) -> dict[Path, Path]:
    """What `Problems.copies` has."""
    found: dict[Path, Path] = {}
    by_key: dict[Path, dict[Path, Path]] = {}
    for path, saved in layout.beside.items():
        by_key.setdefault(path[:1], {})[path] = saved
    for leaves in by_key.values():
        owners = {path: owner for path, owner, _ in mirrored(parameters, leaves)}
        if owners.keys() == leaves.keys() and all(
            isinstance(leaf := ckpt[leaves[path]], ArrayHandle) and leaf.shape == parameters[own]
            for path, own in owners.items()
        ):
            found |= leaves
    return found


def _random(paths: Iterable[Path]) -> set[Path]:
    """The paths of random numbers' state, by its usual name: no parameters."""
    return {path for path in paths if "rngs" in path}


def _applied_notes(found: LeafMap) -> list[str]:
    """What the user should know of functions that make leaves."""
    names: dict[str, list[Path]] = {}
    for path, value in found.values.items():
        for call in LeafMap({path: value}).calls() if isinstance(value, Output) else ():
            if isinstance(call.operation, Apply):
                names.setdefault(call.operation.name, []).append(path)
    return [
        f"`{name}` makes the values of {listed(list(dict.fromkeys(paths)))}, a whole leaf at a time"
        for name, paths in names.items()
    ]
