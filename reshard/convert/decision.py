"""The verdict on every leaf of a conversion.

Every leaf of the source is used, or dropped by name. Every leaf of the target is filled, or keeps
the model's own initial value by name. All problems are reported together: ambiguous leaves, leaves
without a place or a source, and leaves of another shape or dtype. Paths are relative to the model,
or to the optimizer state, until `Ledger._join`.
"""

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.dtypes import is_floating
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Apply
from reshard.checkpoint import Checkpoint, Leaf, describe
from reshard.convert import map_rules
from reshard.convert.align import Alignment, listed
from reshard.convert.layout import API_NAMES, Layout
from reshard.convert.leafmap import Filled, LeafMap, Output, Row, Source, Value, renaming
from reshard.convert.mapfile import MAX_CANDIDATES, draft_map
from reshard.convert.model import TargetTree
from reshard.convert.model_map import Side, by_map, model_map, side_of
from reshard.convert.module_tree import Module
from reshard.convert.optimizer import (
    Followed,
    Leaves,
    followed,
    followers,
    follows_note,
    mirrored,
    parameters_of,
    random_state,
)
from reshard.convert.record import Modules
from reshard.convert.remap import find_map
from reshard.convert.suggestions import (
    covering_globs,
    hints_for,
    shown_once,
)
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.restore.matching import TargetLeaf
from reshard.tree import (
    Path,
    as_python,
    format_glob,
    format_path,
    named_in,
)
from reshard.units import count_leaves

# The keys of an NNX model and its optimizer if the target has no optimizer.
_MODEL, _OPTIMIZER = ("model",), ("optimizer",)
# The target of a conversion by a map alone.
_NO_MODEL = TargetTree({}, frozenset(), Layout("", "", (), {}, {}, None, (), None), Module(()))


class Outcome(NamedTuple):
    """The sources of one leaf of the target, or the verdict on a leaf of the source that no leaf of
    the target is made of.

    Attributes:
      before: the leaves of the source, by their saved paths.
      after: the leaf of the target, by its saved path.
      origin: what decided: `"map"`, `"path"` or `"structure"`, as in `LeafMap.origin`, or
        `"record"`; `"dropped"` and `"initial"`, as the user has asked for; `"zeros"`. Of what is
        not decided: `"unexpected"`, `"missing"`, `"mismatch"`, `"ambiguous"`, or `"undecided"`, for
        optimizer state that cannot be converted, because of a parameter or of other state.
      operation: the operation, in words.
      problem: why it is not decided.
    """

    before: tuple[Path, ...]
    after: Path | None
    origin: str
    operation: str = ""
    problem: str = ""

    def document(self) -> dict[str, Any]:
        """The form of `--json`."""
        return {
            "from": [format_path(path) for path in self.before],
            "to": [] if self.after is None else [format_path(self.after)],
            "operation": self.operation or None,
            "origin": self.origin,
            "problem": self.problem or None,
        }


def outcomes(
    found: LeafMap, default: str = "path", initial: Iterable[Path] = ()
) -> Iterator[Outcome]:
    """The outcomes of the leaves of a map, and of those that keep their initial value; `default` is
    the origin of leaves that have none."""
    for path, value in found.values.items():
        if isinstance(value, Filled):
            yield Outcome((), path, "zeros")
            continue
        before, operation = [value.path] if isinstance(value, Source) else [], ""
        if isinstance(value, Output):
            alone = LeafMap({path: value})
            before, operation = alone.sources(), value.in_words()
        yield Outcome(tuple(before), path, found.origin.get(path) or default, operation)
    yield from (Outcome((), path, "initial") for path in initial)
    yield from (Outcome((path,), None, "zeros") for path in found.must_be_zero)
    yield from (Outcome((path,), None, "dropped") for path in found.dropped)


# Why a leaf is not decided: a word of `Outcome.origin`, and the problem.
_Verdict = tuple[str, str]
_UNEXPECTED, _MISSING, _STUCK = ("unexpected", ""), ("missing", ""), ("undecided", "")


class Ledger:
    """A conversion while it is decided: all verdicts, and in the end the map.

    Attributes:
      map: from the saved leaves of the source to those of the target.
      model: that of the model's leaves, by their paths in the model.
      initial: saved paths of leaves of the target that keep the model's own initial value.
      initial_names: the same, as a map names them, less optimizer state.
      counters: saved paths of step counters of the target -> their dtype and how they are saved.
      empty: leaves of the target that are empty containers.
      prefix: where the target has the model's own tree.
      notes: notes for the user.
      groups: the modules of one class that only order has paired.
    """

    map: LeafMap
    model: LeafMap
    initial: tuple[Path, ...]
    initial_names: tuple[Path, ...]
    counters: dict[Path, tuple[np.dtype, str]]
    empty: dict[Path, Leaf]

    def __init__(
        self,
        ckpt: Checkpoint,
        layout: Layout,
        to: str,
        target: TargetTree | None,
        other: TargetTree | None,
        left_out: Mapping[Path, ArrayHandle],
    ):
        self._ckpt, self._layout, self._to = ckpt, layout, to
        self._by_map_alone = target is None
        self._target, self._other, self._left_out = target or _NO_MODEL, other, left_out
        self._arrays: dict[Path, ArrayHandle] = {leaf.path: leaf for leaf in ckpt.arrays}
        self._shapes = layout.shapes(ckpt)
        leaves = {**{path: ckpt[saved] for path, saved in layout.model.items()}, **left_out}
        shapes = self._shapes | {path: leaf.shape for path, leaf in left_out.items()}
        self._parameters = parameters_of(shapes, layout.api)
        self._random = random_state(leaves) | (set() if other is None else other.random_names())
        # Copies of the parameters next to the model, like an average.
        self._copies = _copies_of_parameters(ckpt, layout, self._parameters)
        target_layout = self._target.layout
        # The result has the model below a key if the target has no place for optimizer state.
        training = bool(layout.optimizer) or bool(self._copies)  # a step alone is no optimizer
        alone = not (target_layout.optimizer or target_layout.step or target_layout.beside)
        self.prefix: Path = _MODEL if to == "nnx" and training and alone else ()
        # The result has no place of the target's for optimizer state.
        self._apart = self._by_map_alone or bool(self.prefix)
        self._target_leaves: Mapping[Path, Any] = self._target.leaves
        # Where the optimizer's state is saved in the target, and copies of the parameters.
        self._target_state, self._target_copies = target_layout.optimizer, target_layout.beside
        self._target_copy_keys = {
            path[0] for path in self._target_copies
        }  # keys of copies in the model
        self._target_parameters = parameters_of(self._target.shapes(), to)
        self.notes: list[str] = []
        self.groups: tuple[Modules, ...] = ()
        self._problems: list[str] = []
        self._hints: list[str] = []
        # Leaves and modules of each API that structure does not decide.
        self._open: dict[str, dict[Path, _Verdict]] = {"linen": {}, "nnx": {}}
        # What is not decided: leaves of the source by saved path, of the target by place.
        self._verdicts: dict[Path, _Verdict] = {}
        self._target_verdicts: dict[Path, _Verdict] = {}
        # The rules for those of Linen's that are some of NNX's in one array.
        self._rules: dict[Path, Row] = {}
        self._surplus: list[Path] = []  # saved paths of leaves without a place

    def decide(
        self, map_file: str | os.PathLike | map_rules.Map | None, init: Sequence[str]
    ) -> None:
        """Decides everything. Raises TreeMismatchError: all problems."""
        chosen = self._decide_model(map_file, init)
        reset = self._reset(chosen)
        optimizer = self._optimizer()
        copies = self._copied()
        names = self._join(optimizer, copies)
        self._check(names, {*chosen, *reset})
        if self._problems:
            summary = f"`{self._ckpt.source.root}` does not become the {API_NAMES[self._to]} model"
            error = TreeMismatchError(summary, self._problems, self._hints, self._outcomes())
            if not self._by_map_alone:
                error.draft = functools.partial(self._draft, chosen)
            raise error
        self._finish(optimizer, copies, chosen, reset)

    # The model.

    def _decide_model(
        self, map_file: str | os.PathLike | map_rules.Map | None, init: Sequence[str]
    ) -> set[Path]:
        """Decides the model's leaves. Returns the saved paths of those that keep their initial
        value."""
        target, layout = self._target, self._layout
        known = None if self._other is None else self._other.outline
        source_side = side_of(self._ckpt, layout, known)
        target_side = None
        if not self._by_map_alone:
            target_side = side_of(target.leaves, target.layout, target.outline)
        rules = None if map_file is None else find_map(map_file, self._ckpt, self._to)
        map_result = by_map(rules, source_side, target_side, self._left_out)
        self._problems += map_result.unexpected.values()
        self._hints += map_result.hints
        for found in self._open.values():
            found |= {path: ("unexpected", why) for path, why in map_result.unexpected.items()}
        self.notes += map_result.notes
        initial = self._initial([*map_result.initial, *init], map_result.optional)
        if target_side is None:
            self.model = map_result.map
            return initial
        own = [path for path, saved in target.layout.model.items() if saved in initial]
        self.model, found = model_map(map_result, source_side, target_side, own)
        self.notes += shown_once(
            f"{listed(one)} were matched to {listed(other)} by number"
            for one, other in (zip(*pairs, strict=True) for pairs in found.numbered)
        )
        self._undecided(found, map_result, source_side, target_side)
        self.groups = tuple(group for group in found.groups if group not in found.numbered)
        return initial

    def _initial(self, globs: Sequence[str], optional: Sequence[str]) -> set[Path]:
        """Saved paths of the leaves of the target that globs name, by their path in the model or in
        the whole tree; of those that are optional there may be none."""
        if not globs and not optional:
            return set()
        if self._by_map_alone:
            names = [f"`{glob}`" for glob in (*globs, *optional)]
            raise ArgumentError(
                "without a model, no leaf has an initial value", names, ["model=..."]
            )
        names = self._target.names()
        below = [(("model", *path), saved) for path, saved in self._target.layout.model.items()]
        namespaces = (names.items(), below, [(path, path) for path in names.values()])
        named = named_in(namespaces, globs)
        if may := named_in(namespaces, (), optional) - named:
            shown = listed(sorted(may))
            self.notes.append(f"the model's own initial value, as `optional` says: {shown}")
        return named | may

    def _undecided(
        self, found: Alignment, map_result: map_rules.MapResult, source: Side, target: Side
    ) -> None:
        """Adds the undecided leaves that the map has no rule for. The map may be one for the other
        direction."""
        self._problems += shown_once(map(str, found.mismatches))
        self._problems += shown_once(map(str, found.abstentions))
        for entry in found.abstentions:
            if entry.rule is not None:
                self._rules[entry.rule.inputs[0]] = entry.rule
            kind = "ambiguous"
            if not (entry.linen and entry.nnx):  # it has no candidates
                kind = "unexpected" if bool(entry.linen) == (self._to == "nnx") else "missing"
            why = (kind, str(entry))
            self._open["linen"] |= dict.fromkeys(entry.linen, why)
            self._open["nnx"] |= dict.fromkeys(entry.nnx, why)
        for entry in found.mismatches:
            why = ("mismatch", str(entry))
            self._open["linen"] |= {leaf.path: why for leaf in entry.inputs}
            self._open["nnx"][entry.output.path] = why
        known, saved = self._other is not None, self._layout.model
        if found.abstentions:
            self._hints += hints_for(found.abstentions, map_result, source, target, known, saved)

    # Optimizer state and copies of the parameters.

    def _reset(self, initial: set[Path]) -> dict[Path, Path]:
        """The optimizer state in the target that keeps its initial value because its parameters do:
        saved path -> the parameter."""
        if not initial:
            return {}
        state = {
            path: (leaf.shape, leaf.dtype)
            for path, saved in self._target_state.items()
            if isinstance(leaf := self._target_leaves[saved], TargetLeaf) and leaf.dtype is not None
        }
        return {
            self._target_state[path]: owner
            for path, owner in followers(self._target_parameters, state).items()
            if self._target.layout.model[owner] in initial
        }

    def _optimizer(self) -> Followed:
        """The map of the optimizer state, which follows the model's leaves."""
        leaves = {
            path: (leaf.shape, leaf.dtype) if (leaf := self._arrays.get(saved)) else None
            for path, saved in self._layout.optimizer.items()
        }
        part = self._following(leaves, self._target_state)
        if part.problems:
            self._cannot_follow(self._layout.optimizer, self._target_state)
            self._problems += [f"opt_state/{text}" for text in part.problems]
            root = self._target.layout.optimizer_root if self._target_state else None
            dropped = (self._layout.optimizer_root, None if root else self._layout.step)
            given = [f"drop={as_python([format_glob(path)])}" for path in dropped if path]
            given += [f"init={as_python([format_glob(root)])}"] if root else []
            end = "resets the optimizer state" if root else "leaves the optimizer state out"
            self._hints.append(f"{' with '.join(given)} {end}")
        return part

    def _copied(self) -> Followed:
        """The map of copies of the parameters, which follow the model's leaves."""
        arrays = {path: self._arrays[saved] for path, saved in self._copies.items()}
        leaves = {path: (leaf.shape, leaf.dtype) for path, leaf in arrays.items()}
        part = self._following(leaves, self._target_copies, leaves)
        if part.problems:
            self._cannot_follow(self._copies, self._target_copies)
            self._problems += part.problems
        return part

    def _cannot_follow(self, leaves: Mapping[Path, Path], target: Mapping[Path, Path]) -> None:
        """Adds the verdicts on leaves that cannot follow the model's: path -> saved path."""
        self._verdicts |= dict.fromkeys(leaves.values(), _STUCK)
        places = (self.prefix + saved for saved in target.values())
        self._target_verdicts |= dict.fromkeys(places, _STUCK)

    def _following(
        self, leaves: Leaves, target_paths: Mapping[Path, Path], copies: Collection[Path] = ()
    ) -> Followed:
        """The map of leaves that follow the model's: optimizer state or copies of parameters.
        `target_paths`: their paths in the target -> saved paths."""
        if not leaves and not target_paths:
            return Followed(LeafMap({}), {}, ())
        model, parameters = self.model, self._parameters
        owners = followers(parameters, leaves)
        unused, zero = {*model.dropped, *self._left_out}, model.must_be_zero.keys()
        unconverted = unused | zero
        rest = {path: leaf for path, leaf in leaves.items() if owners.get(path) not in unconverted}
        kept = {path: shape for path, shape in parameters.items() if path not in unconverted}
        fewer = bool((unconverted & parameters.keys()) - self._random)
        random = self._target.random_names()
        more = bool(self._target_parameters.keys() - _made(model).keys() - random)
        mirrors = mirrored(self._target_parameters, target_paths)
        # The collection of the parameters, if the paths in the target lack that key.
        lacks = any(len(p) - len(root) < len(own) for p, own, root in mirrors)
        lacks = lacks or (bool(copies) and not mirrors)
        ahead: Path = ("params",) if self._to == "linen" and lacks else ()
        found = followed(model, kept, rest, ahead, fewer or more, copies)
        if found.problems:
            return Followed(LeafMap({}), {}, found.problems)
        arrays = {path: leaf[0] for path, leaf in rest.items() if leaf}
        whole = renaming({path: path for path in arrays}, arrays).then(found.map)
        values = dict(whole.values)
        for path, owner, _ in mirrors:
            leaf, value = self._target_leaves[target_paths[path]], model.values.get(owner)
            if isinstance(value, Filled) and isinstance(leaf, TargetLeaf) and leaf.dtype:
                if value.fill is not None:  # by a rule: its state is not known
                    continue
                values[path] = Filled(leaf.shape, leaf.dtype)
        zeros = {
            path: Filled(*leaf)
            for path, owner in owners.items()
            if owner in zero and (leaf := leaves[path]) is not None
        }
        dropped = tuple(path for path, owner in owners.items() if owner in unused)
        if dropped and not copies:
            shown = listed(list(dict.fromkeys(owners[path] for path in dropped)))
            text = f"{len(dropped)} leaves of optimizer state are dropped with their parameters"
            self.notes.append(f"{text}: {shown}")
        found_map = LeafMap(values, whole.origin, dropped, {**whole.must_be_zero, **zeros})
        return dataclasses.replace(found, map=found_map)

    # The places of leaves in the target: None if a leaf has none.

    def _model_place(self, path: Path) -> Path | None:
        if self._by_map_alone:
            return (*self.prefix, *path, "value") if self._to == "nnx" else path
        saved = self._target.layout.model.get(path)
        return None if saved is None else self.prefix + saved

    def _state_place(self, path: Path) -> Path | None:
        if self._apart:
            return (*_OPTIMIZER, "opt_state", *path, "value") if self._to == "nnx" else None
        saved = self._target_state.get(path)
        return saved if saved and isinstance(self._target_leaves[saved], TargetLeaf) else None

    def _masked_place(self, path: Path) -> Path | None:
        """The place of optimizer state without a value, which only NNX saves."""
        root = (*_OPTIMIZER, "opt_state") if self._apart else self._target.layout.optimizer_root
        if self._to == "linen" or root is None or path in self._target_state:
            return None
        return (*root, *path, "value")

    def _copy_place(self, path: Path) -> Path | None:
        """The place of a leaf of a copy of the parameters. If the model has no copy under the same
        key, the leaf keeps its path."""
        if path[0] in self._target_copy_keys:
            return self._target_copies.get(path)
        return (*path, "value") if self._to == "nnx" else path

    def _step_place(self) -> tuple[Path, np.dtype, str] | None:
        """The place of the step counter, with its dtype and how it is saved."""
        saved = self._target.layout.step
        if self.prefix:
            return (*_OPTIMIZER, "step", "value"), np.dtype(np.uint32), "jax.Array"
        if saved is None:
            return None
        dtype = self._target.leaf(saved).dtype
        return (saved, dtype, "jax.Array") if dtype else (saved, np.dtype(np.int64), "scalar")

    def _join(self, optimizer: Followed, copies: Followed) -> dict[Path, Path]:
        """Makes the map of all leaves that have a place, by their saved paths. Returns the names of
        leaves of the target. Adds the leaves of the source that have no place."""
        values: dict[Path, Value] = {}
        origin: dict[Path, str] = {}
        dropped: list[Path] = []
        must_be_zero: dict[Path, Filled] = {}
        names: dict[Path, Path] = {}
        sides = (
            (self.model, self._layout.model, self._model_place, ()),
            (optimizer.map, self._layout.optimizer, self._state_place, ("opt_state",)),
            (copies.map, self._copies, self._copy_place, ()),
        )
        for found, saved, place, above in sides:
            shapes = {at: a.shape if (a := self._arrays.get(at)) else () for at in saved.values()}
            named = {*found.sources(), *found.dropped, *found.must_be_zero}
            paths = {at: path for path, at in saved.items() if found is self.model or path in named}
            whole = renaming(paths, shapes).then(found)
            dropped += whole.dropped
            must_be_zero |= whole.must_be_zero
            for path, value in whole.values.items():
                own = found is self.model
                # An open leaf has kept its path, which another leaf of the target may have.
                is_open = own and path not in found.origin and not isinstance(value, Filled)
                at = place(path) if path in found.values and not is_open else None
                if at is not None:
                    values[at] = value
                    origin[at] = whole.origin.get(path) or "path"
                    names[at] = above + path
                if isinstance(value, Filled) or (at is not None and not self._verdicts):
                    continue
                # Where state goes whose parameter goes nowhere is not decided.
                sources = LeafMap({path: value}).sources()
                why = next(filter(None, map(self._owners_verdict, sources)), None)
                if why is not None and at is not None:
                    self._target_verdicts[at] = _MISSING if why[0] == "unexpected" else why
                elif why is None and at is None:
                    why = self._why_open(path, self._layout.api) if own else None
                    if why is None:
                        why = self._unexpected(saved.get(path), above + path)
                if why is not None:
                    self._verdicts |= dict.fromkeys(sources, why)
        step = self._step_place()
        if self._layout.step is not None and step is not None:
            values[step[0]] = Source(self._layout.step, ())
        self.map = LeafMap(values, origin, tuple(dropped), must_be_zero)
        return names

    def _owners_verdict(self, saved: Path) -> _Verdict | None:
        """The verdict on the parameter that optimizer state follows, if it is not decided."""
        owner = self._owners.get(saved) if self._verdicts else None
        return None if owner is None else self._verdicts.get(self._layout.model[owner])

    @functools.cached_property
    def _owners(self) -> dict[Path, Path]:
        """The parameters that optimizer state follows: by its saved path."""
        return _owners_of(self._layout, self._shapes)

    # Problems.

    def _check(self, names: Mapping[Path, Path], initial: set[Path]) -> None:
        """Adds what has no place, no source, or another shape or dtype."""
        self._check_beside()
        if self._by_map_alone:
            return
        self._check_target(initial)
        leaves = {self.prefix + path: leaf for path, leaf in self._target.leaves.items()}
        for places, text, hint in differences(self.map, self._arrays, leaves, names):
            self._problems.append(text)
            for place in places:
                self._target_verdicts.setdefault(place, ("mismatch", text))
            self._hints += [hint] if hint else []

    def _check_beside(self) -> None:
        """Adds the step counter, and other leaves next to the model, if they have no place."""
        layout, step, place = self._layout, self._layout.step, self._step_place()
        if step is not None and place is None:
            self._unexpected(step, ("step",))
        if step is not None and (leaf := self._arrays[step]).shape:
            text = f"{format_path(step)}  {describe(leaf)}: a step counter is one number"
            self._problems.append(text)
            if place is not None:
                self._target_verdicts[place[0]] = ("mismatch", text)
        copied = set(self._copies.values())
        for saved in layout.rest:
            if saved not in copied and isinstance(self._ckpt[saved], ArrayHandle | str):
                self._unexpected(saved, saved)
        for glob, count in covering_globs(self._surplus, {path: path for path in self._ckpt}):
            self._hints.append(f"drop={as_python([glob])} leaves out {count_leaves(count)}")

    def _unexpected(self, saved: Path | None, path: Path) -> _Verdict:
        """Adds a leaf of the source, or one that the map made, without a place in the target."""
        leaf = "" if saved is None else f"  {describe(self._ckpt[saved])}"
        self._problems.append(f"{format_path(path)}{leaf}: unexpected")
        if self._by_map_alone and path[0] in ("opt_state", "step"):
            self._hints.append("model=..., the `TrainState`, has places for an optimizer")
        if saved is not None:
            self._surplus.append(saved)
            self._verdicts[saved] = _UNEXPECTED
        return _UNEXPECTED

    def _check_target(self, initial: set[Path]) -> None:
        """Adds the leaves of the target without a source. The hint to reset them is shown only if
        no leaf of the model is left to be placed, since that may be their source."""
        target_layout = self._target.layout
        lacking = [
            saved
            for saved, leaf in self._target.leaves.items()
            if isinstance(leaf, TargetLeaf) and self.prefix + saved not in self.map.values
        ]
        names = {saved: path for path, saved in target_layout.model.items()}
        missing = {*lacking} - initial
        owners = _owners_of(target_layout, self._target.shapes()) if missing else {}
        left = self._verdicts.keys() & self._layout.model.values()
        spare = left or any(self._open.values())
        resettable = []
        for saved in lacking:
            leaf, random = self._target.leaf(saved), saved in self._target.random
            owner, place = owners.get(saved), self.prefix + saved
            why = self._target_verdicts.get(place)
            why = why or self._why_open(names.get(saved, owner), self._to)
            if saved in initial:
                why = ("initial", "")
            elif random or not (why or (owner and target_layout.model[owner] in missing)):
                self._problems.append(
                    f"{format_path(names.get(saved, leaf.path))}  {leaf}: missing"
                )
                resettable += [saved] if random or not spare else []
            self._target_verdicts[place] = why or _MISSING
        for glob, count in covering_globs(resettable, self._target.names()):
            text = f"keeps the model's own initial value: {count_leaves(count)}"
            self._hints.append(f"init={as_python([glob])} {text}")
        for saved in initial - {*lacking}:
            name = format_path(names.get(saved, self._target.leaf(saved).path))
            text = f"{name}: `init` names it, but the checkpoint has it"
            self._problems.append(text)
            self._target_verdicts[self.prefix + saved] = ("ambiguous", text)

    def _why_open(self, path: Path | None, api: str) -> _Verdict | None:
        """The verdict on an undecided leaf of the model, or on a module around it; else None."""
        if path is None:
            return None
        inner = path if api == "nnx" else path[1:]  # Linen's modules have no collection
        places = (path, *(inner[:end] for end in range(len(inner))))
        return next(filter(None, map(self._open[api].get, places)), None)

    def _outcomes(self) -> list[Outcome]:
        """The outcome of each leaf, decided or not."""
        found = []
        for row in outcomes(self.map):
            if self._verdicts.keys().isdisjoint(row.before):
                why = None if row.after is None else self._target_verdicts.get(row.after)
                found.append(row._replace(origin=why[0], problem=why[1]) if why else row)
        for saved, leaf in self._ckpt.items():
            why = self._verdicts.get(saved)
            if why is not None and isinstance(leaf, ArrayHandle | str):
                found.append(Outcome((saved,), None, why[0], "", why[1]))
        made = {row.after for row in found}
        for saved, leaf in self._target_leaves.items():
            place = self.prefix + saved
            if place not in made and isinstance(leaf, TargetLeaf):
                why = self._target_verdicts.get(place, _MISSING)
                found.append(Outcome((), place, why[0], "", why[1]))
        return found

    def _draft(self, initial: set[Path]) -> str:
        """The text of a map of the model's decided leaves, with a `TODO` for each open leaf."""
        model, shapes, names = self.model, self._target.shapes(), self._target.layout.model
        made = [path for path in model.values if path in model.origin and path in shapes]
        decided = dataclasses.replace(
            model,
            values={path: model.values[path] for path in made},
            origin={path: model.origin[path] for path in made},
        )
        used = {*decided.sources(), *decided.dropped, *decided.must_be_zero}
        own = [path for path, saved in names.items() if saved in initial]
        taken = {*made, *own}.union(*(row.outputs for row in self._rules.values()))
        # By shape, and by what is open: None is anything.
        fits: dict[tuple[Shape, _Verdict | None], list[Path]] = {}
        for path, shape in shapes.items():
            whys = dict.fromkeys((self._why_open(path, self._to), None))
            for why in whys if path not in taken else ():
                fits.setdefault((shape, why), []).append(path)
        rows, near = [], set()
        for path, shape in self._shapes.items():
            if path in self._rules:
                rows.append(self._rules[path])
            elif path not in used:
                why = self._why_open(path, self._layout.api)
                key = shape, why if (shape, why) in fits else None
                near.add(key)
                rows.append(Row((path,), tuple(fits.get(key, ())[: MAX_CANDIDATES + 1])))
        candidates = {path for key in near for path in fits.get(key, ())}
        filled = taken | candidates
        missing = [path for path in shapes if path not in filled]
        return draft_map(decided, self._to, own, rows, missing)

    # The result.

    def _finish(
        self, optimizer: Followed, copies: Followed, chosen: set[Path], reset: Mapping[Path, Path]
    ) -> None:
        """Sets the attributes and adds the notes of a conversion that is decided."""
        step = self._step_place()
        self.counters = {step[0]: step[1:]} if self._layout.step is not None and step else {}
        leaves = self._target_leaves
        names = {saved: path for path, saved in self._target.layout.model.items()}
        made = _made(optimizer.map)
        if self._by_map_alone:
            self.notes.append("without a model, only the source was checked against the map")
        elif self.prefix and made:
            self.notes.append(
                f"the model has no optimizer: {len(made)} leaves of optimizer state are below "
                "`optimizer`, unchecked"
            )
        for root, count in collections.Counter(path[:1] for path in _made(copies.map)).items():
            self.notes.append(follows_note(root, count, root[0] in self._target_copy_keys))
        if reset:
            self.notes.append(
                f"{len(reset)} leaves of optimizer state keep the model's own initial values "
                f"with their parameters: {listed(list(dict.fromkeys(reset.values())))}"
            )
        self.notes += _applied_notes(self.map)
        self.empty = {
            self.prefix + path: leaf
            for path, leaf in leaves.items()
            if not isinstance(leaf, TargetLeaf)
        }
        self.empty |= dict.fromkeys(filter(None, map(self._masked_place, optimizer.placeholders)))
        self.initial = tuple(saved for saved in leaves if saved in {*chosen, *reset})
        self.initial_names = tuple(
            names.get(saved) or leaves[saved].path for saved in leaves if saved in chosen
        )


def _made(found: LeafMap) -> dict[Path, Value]:
    """The leaves of a map that are made of others."""
    return {path: value for path, value in found.values.items() if not isinstance(value, Filled)}


def _copies_of_parameters(
    ckpt: Checkpoint, layout: Layout, parameters: Mapping[Path, Shape]
) -> dict[Path, Path]:
    """The leaves below keys at the top that hold the same leaves as the parameters: path in the
    tree -> saved path. A copy may lack some, such as statistics, but no layer."""
    found: dict[Path, Path] = {}
    by_key: dict[Path, dict[Path, Path]] = {}
    for path, saved in layout.beside.items():
        by_key.setdefault(path[:1], {})[path] = saved
    for leaves in by_key.values():
        owners = {path: owner for path, owner, _ in mirrored(parameters, leaves)}
        absent = {_without_numbers(path) for path in parameters.keys() - {*owners.values()}}
        is_copy = absent.isdisjoint(map(_without_numbers, owners.values()))
        is_copy = is_copy and owners.keys() == leaves.keys()
        if is_copy and all(
            isinstance(leaf := ckpt[leaves[path]], ArrayHandle) and leaf.shape == parameters[own]
            for path, own in owners.items()
        ):
            found |= leaves
    return found


def _without_numbers(path: Path) -> str:
    return re.sub(r"\d+", "", format_path(path))


def _owners_of(layout: Layout, shapes: Mapping[Path, Shape]) -> dict[Path, Path]:
    """The parameters that optimizer state follows: by its saved path."""
    found = mirrored(parameters_of(shapes, layout.api), layout.optimizer)
    return {layout.optimizer[path]: owner for path, owner, _ in found}


def _applied_notes(found: LeafMap) -> list[str]:
    """Notes on functions that make leaves."""
    names: dict[str, list[Path]] = {}
    for path, value in found.values.items():
        for call in LeafMap({path: value}).calls() if isinstance(value, Output) else ():
            if isinstance(call.operation, Apply):
                names.setdefault(call.operation.name, []).append(path)
    return [
        f"`{name}` makes the values of {listed(list(dict.fromkeys(paths)))}, a whole leaf at a time"
        for name, paths in names.items()
    ]


def differences(
    whole: LeafMap,
    arrays: Mapping[Path, ArrayHandle],
    targets: Mapping[Path, Any],
    names: Mapping[Path, Path],
) -> Iterator[tuple[list[Path], str, str]]:
    """Differences between the arrays that a map makes and the leaves of the model: the places; the
    problem; and a hint or nothing. `names`: of the leaves of the model."""
    made: dict[int, ArrayHandle] = {}  # the first array that a call is made of
    values = whole.values

    def first_of(value: Value) -> ArrayHandle:
        assert not isinstance(value, Filled)
        return arrays[value.path] if isinstance(value, Source) else made[id(value.call)]

    for call in whole.calls():
        first, *others = [first_of(value) for value in call.inputs if not isinstance(value, Filled)]
        if isinstance(call.operation, Apply):
            first = dataclasses.replace(first, dtype=call.operation.dtype or first.dtype)
        made[id(call)] = first
        for other in others:
            if other.dtype != first.dtype:
                pair = f"{format_path(first.path)} and {format_path(other.path)}"
                both = f"{first.dtype.name} and {other.dtype.name}"
                made_of = ((at, LeafMap({at: value}).calls()) for at, value in values.items())
                places = [at for at, calls in made_of if any(each is call for each in calls)]
                yield places, f"{pair}: {both} cannot be combined", ""
    for place, value in values.items():
        wanted = targets.get(place)
        if place not in names or not isinstance(wanted, TargetLeaf):
            continue
        if isinstance(value, Filled):
            filled = f"{value.dtype.name}{list(value.shape)}"
            expected = f"{wanted.dtype}{list(wanted.shape)}"
            if filled != expected:
                text = f"filled as {filled}, the model has {expected}"
                yield [place], f"{format_path(names[place])}: {text}", ""
            continue
        source, text, hint = first_of(value), "", ""
        if wanted.kind == "key":
            shape = value.shape[:-1] if source.key_impl else value.shape
            if (source.key_impl, shape) != (wanted.key_impl, wanted.shape):
                given = f"{source.key_impl} keys" if source.key_impl else source.dtype.name
                text = f"{given}{list(shape)}, the model has {wanted}"
        elif wanted.kind == "array" and tuple(value.shape) != wanted.shape:
            text = f"shape {list(value.shape)}, the model has {list(wanted.shape)}"
        elif wanted.kind == "array" and wanted.dtype and source.dtype != wanted.dtype:
            text = f"dtype {source.dtype.name}, the model has {wanted.dtype}"
            calls = LeafMap({place: value}).calls()
            floats = is_floating(source.dtype) and is_floating(wanted.dtype)
            if floats and not any(isinstance(call.operation, Apply) for call in calls):
                glob = as_python(format_glob(source.path))
                hint = f'reshard.cast(ckpt, "{wanted.dtype}", {glob})'
        if text:
            both = f"{format_path(source.path)} -> {format_path(names[place])}"
            yield [place], f"{both}: {text}", hint
