"""What stands against a conversion, told together: what structure leaves open, what has no place,
no source, or another shape or dtype.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Apply
from reshard.checkpoint import Checkpoint, describe
from reshard.convert.align import Alignment
from reshard.convert.alike import as_rules, shown_once
from reshard.convert.layout import Layout
from reshard.convert.leafmap import LeafMap, Output, Source, Zeros
from reshard.convert.mirrors import mirrored, parameters_of
from reshard.convert.model import TargetTree
from reshard.convert.model_map import Said
from reshard.convert.outcomes import Outcome, outcomes
from reshard.convert.suggestions import rule_hint
from reshard.convert.target_paths import Part, TargetPaths
from reshard.convert.value_levels import COLLECTIONS
from reshard.errors import TreeMismatchError
from reshard.hints import Hint
from reshard.restore.matching import TargetLeaf
from reshard.tree import Path, format_glob, format_path, glob_text, named_by

MAX_GLOBS = 5


class Undecided(NamedTuple):
    """Why a leaf has none on the other side.

    Attributes:
      kind: as `Outcome.origin` has it.
      text: in words.
    """

    kind: str
    text: str = ""


UNEXPECTED = Undecided("unexpected")


class Problems:
    """What stands against a conversion, with hints; empty at first.

    Attributes:
      ckpt: the source.
      layout: what it is.
      to: the API that it is converted to.
      target: the tree that is to be made, if there is a model.
      other: the tree of the model that the source is of, if that is known.
      copies: of what is beside the model and the optimizer's state what is the same as parameters
        all through, like an average of them: path in the tree -> saved path.
      places: where leaves go.
      arrays: those of the source by their saved paths.
      problems: what does not fit, in words.
      hints: what to do about it.
      open: leaves and modules that structure does not decide, each with how that is called and
        why it is so.
      stuck: whether the optimizer's state cannot be carried along.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        layout: Layout,
        to: str,
        target: TargetTree | None,
        other: TargetTree | None,
        copies: Mapping[Path, Path],
        places: TargetPaths,
    ):
        self.ckpt = ckpt
        self.layout = layout
        self.to = to
        self.target = target
        self.other = other
        self.copies = copies
        self.places = places
        self.arrays: dict[Path, ArrayHandle] = {leaf.path: leaf for leaf in ckpt.arrays}
        self.problems: list[str] = []
        self.hints: list[str] = []
        self.open: dict[Path, Undecided] = {}
        self._surplus: list[Path] = []  # saved paths of leaves without a place
        self._differs: dict[Path, str] = {}  # by saved paths of leaves of the target
        self.stuck = False

    def undecided(self, found: Alignment, said: Said, shapes: Mapping[Path, Shape]) -> None:
        """Adds what structure does not decide of leaves, which have these shapes, beside what a map
        says, which may be one for the other direction."""
        self.problems += shown_once(entry.told(self.to) for entry in found.mismatches)
        self.problems += shown_once(map(str, found.abstentions))
        for entry in found.abstentions:
            kind = "ambiguous"
            if not (entry.linen and entry.nnx):  # there is nothing that it may be
                kind = "unexpected" if bool(entry.linen) == (self.to == "nnx") else "missing"
            told = Undecided(kind, str(entry))
            self.open |= dict.fromkeys((*entry.linen, *entry.nnx), told)
        for entry in found.mismatches:
            told = Undecided("mismatch", entry.told(self.to))
            self.open |= dict.fromkeys((*(leaf.path for leaf in entry.linen), entry.nnx.path), told)
        if self.to == "nnx":
            self.hints += [entry.hint for entry in found.abstentions if entry.hint]
        direction = [] if self.to == "nnx" else ['to = "nnx"']
        for rule in as_rules(entry.rule for entry in found.abstentions if entry.rule):
            lines = [*direction, "[[rule]]", *rule.split("\n")]
            text = "".join(f"\n      {line}" for line in lines)
            self.hints.append(Hint(("map_file",), f" decides, by a rule such as:{text}"))
        abstentions = [
            entry
            for entry in found.abstentions
            if not entry.rule and not (entry.hint and self.to == "nnx")
        ]
        modules = [p for e in abstentions for p in e.linen if p[0] not in COLLECTIONS]
        if modules and self.other is None:
            api = "Linen" if self.to == "nnx" else "NNX"
            self.hints.append(Hint(("source",), f", the {api} model, tells the classes"))
        if abstentions:
            assert self.target is not None
            leaves, targets = said.map.shapes, self.target.shapes()
            if said.to != self.to:
                leaves, targets = targets, shapes
            self.hints += rule_hint(abstentions, leaves, targets, said.to)

    def error(
        self, problems: Sequence[str], hints: Sequence[str], found: Sequence[Outcome] = ()
    ) -> TreeMismatchError:
        """Why the source does not become the model; and what is decided of it all the same."""
        name = {"nnx": "NNX", "linen": "Linen"}[self.to]
        summary = f"`{self.ckpt.source.root}` does not become the {name} model"
        return TreeMismatchError(summary, problems, hints, found)

    def outcomes(self, whole: LeafMap, initial: set[Path]) -> list[Outcome]:
        """What becomes of each leaf, as far as it is decided, and why of others it is not.

        Args:
          whole: the map of all leaves by their saved paths, of those that have a place.
          initial: saved paths of leaves of the target that keep their initial value.
        """
        used = {*whole.sources(), *whole.dropped, *whole.must_be_zero}
        names, reason = self._reasons(self.layout, self.layout.shapes(self.ckpt), UNEXPECTED)
        # Where state goes whose parameter goes nowhere is not decided.
        used -= {
            saved
            for saved in used
            if saved in names and self.layout.model[names[saved]] not in used
        }
        found = [
            entry._replace(origin="mismatch", problem=self._differs[entry.after])
            if entry.after in self._differs
            else entry
            for entry in outcomes(whole)
            if used.issuperset(entry.before)
        ]
        found += [
            Outcome((saved,), None, (why := reason(saved)).kind, "", why.text)
            for saved, leaf in self.ckpt.items()
            if saved not in used and isinstance(leaf, ArrayHandle | str)
        ]
        if self.target is None:
            return found
        made = {entry.after for entry in found}
        missing = Undecided("missing")
        _, reason = self._reasons(self.target.layout, self.target.shapes(), missing)
        for saved, leaf in self.target.leaves.items():
            place = self.places.prefix + saved
            if place not in made and isinstance(leaf, TargetLeaf):
                why = Undecided("initial") if saved in initial else reason(saved)
                found.append(Outcome((), place, why.kind, "", why.text))
        return found

    def _reasons(
        self, layout: Layout, shapes: Mapping[Path, Shape], otherwise: "Undecided"
    ) -> tuple[dict[Path, Path], Callable[[Path], "Undecided"]]:
        """Saved path of a leaf -> the leaf of the model that it is or, of state, follows; and why
        leaves of this side have none on the other."""
        names = {saved: path for path, saved in layout.model.items()}
        for path, owner, _ in mirrored(parameters_of(shapes, layout.api), layout.optimizer):
            names[layout.optimizer[path]] = owner
        states = {*layout.optimizer.values()} if self.stuck else set()
        stuck = Undecided("undecided")
        return names, (
            lambda saved: stuck if saved in states else self._open(names.get(saved)) or otherwise
        )

    def check(self, model: Part, optimizer: Part, copies: Part, initial: set[Path]) -> None:
        """Adds what has no place, no source, or another shape or dtype. Of optimizer state that
        follows leaves which are told already, nothing is added."""
        used = {*model.map.sources(), *model.map.dropped, *model.map.must_be_zero}
        unused = [path for path in self.layout.model if path not in used]
        unexpected = [path for path in (*model.made, *unused) if self.places.model(path) is None]
        for path in unexpected:
            if not self._open(path):
                self._unexpected(self.layout.model.get(path), path)
        unplaced = [path for path in optimizer.made if self.places.optimizer(path) is None]
        told = _mirrors(unplaced, parameters_of(dict.fromkeys(unexpected, ()), self.layout.api))
        for path in unplaced:
            if path not in told:
                self._unexpected(self.layout.optimizer.get(path), ("opt_state", *path))
        if self.layout.step is not None and self.places.step() is None:
            self._unexpected(self.layout.step, ("step",))
        if self.layout.step is not None and self.arrays[self.layout.step].shape:
            leaf = describe(self.arrays[self.layout.step])
            self.problems.append(
                f"{format_path(self.layout.step)}  {leaf}: a step counter is one number"
            )
        for path in copies.made:
            if self.places.beside(path) is None:
                self._unexpected(self.copies.get(path), path)
        copied = set(self.copies.values())
        for saved in self.layout.rest:
            if saved not in copied and isinstance(self.ckpt[saved], ArrayHandle | str):
                self._unexpected(saved, saved)
        for glob, count in covering_globs(self._surplus, {path: path for path in self.ckpt}):
            self.hints.append(Hint(("drop", glob), f" leaves out {_counted(count)}"))
        if self.target is None:
            return
        filled = {self.places.model(path) for path in model.map.values}
        filled |= {self.places.optimizer(path) for path in optimizer.map.values}
        filled |= {self.places.beside(path) for path in copies.map.values}
        step = self.places.step()
        if step is not None and self.layout.step is not None:
            filled.add(step[0])
        there = self.target.layout
        lacking = [
            saved
            for saved, leaf in self.target.leaves.items()
            if isinstance(leaf, TargetLeaf) and self.places.prefix + saved not in filled
        ]
        missing = {*lacking} - initial
        unfilled = {path for path, saved in there.model.items() if saved in missing}
        below = {path: saved for path, saved in there.optimizer.items() if saved in missing}
        told = {below[path] for path in (below if self.stuck else _mirrors(below, unfilled))}
        names = {saved: path for path, saved in there.model.items()}
        # Where something of the source is still to be placed, it is likely to belong there: nobody
        # is told to reset what is missing.
        spare, anew = bool(unexpected or self.open), []
        for saved in lacking:
            random = saved in self.target.random
            shown = random or not self._open(names.get(saved))
            if saved not in initial and saved not in told and shown:
                leaf = self.target.leaf(saved)
                self.problems.append(f"{format_path(names.get(saved, leaf.path))}  {leaf}: missing")
                anew += [saved] if random or not spare else []
        for glob, count in covering_globs(anew, self.target.names()):
            text = f" keeps the model's own initial value: {_counted(count)}"
            self.hints.append(Hint(("init", glob), text))
        for saved in initial - {*lacking}:
            name = format_path(names.get(saved, self.target.leaf(saved).path))
            self.problems.append(f"{name}: it has a source, and is to keep its initial value")
        sides = (
            (model, self.layout.model, there.model, ()),
            (optimizer, self.layout.optimizer, there.optimizer, ("opt_state",)),
            (copies, self.copies, there.beside, ()),
        )
        for part, before, after, above in sides:
            sources = {p: self.arrays[saved] for p, saved in before.items() if saved in self.arrays}
            targets = {path: self.target.leaves[saved] for path, saved in after.items()}
            for path, text, hint in differences(part.map, sources, targets, above):
                self.problems.append(text)
                if path is not None:
                    self._differs[self.places.prefix + after[path]] = text
                self.hints += [hint] if hint else []

    def _open(self, path: Path | None) -> "Undecided | None":
        """Why a leaf of the model is in what structure does not decide, which is told; None if it
        is not."""
        if path is None:
            return None
        places = (path, path[1:])  # modules of Linen's are named without the collection
        found = (self.open.get(at[:end]) for at in places for end in range(len(at) + 1))
        return next(filter(None, found), None)

    def _unexpected(self, saved: Path | None, path: Path) -> None:
        """A leaf of the source, or what the map has made of some, has no place in the target."""
        leaf = "" if saved is None else f"  {describe(self.ckpt[saved])}"
        self.problems.append(f"{format_path(path)}{leaf}: unexpected")
        if self.target is None and path[0] in ("opt_state", "step"):
            self.hints.append(Hint(("model",), ", the `TrainState`, has places for an optimizer"))
        if saved is not None:
            self._surplus.append(saved)


def _counted(leaves: int) -> str:
    return "1 leaf" if leaves == 1 else f"{leaves} leaves"


def covering_globs(wanted: Sequence[Path], names: Mapping[Path, Path]) -> list[tuple[str, int]]:
    """Globs that name some leaves and no others, with how many each names: the short ones of those
    that name most; at most five.

    Args:
      wanted: the saved paths of the leaves.
      names: name -> saved path, of these and all others; of several names the last counts.
    """
    if not wanted:
        return []
    texts = {glob_text(name): saved for name, saved in names.items()}
    name_of = {saved: name for name, saved in names.items()}
    left, allowed = dict.fromkeys(wanted), {*wanted}
    found = []
    while left and len(found) < MAX_GLOBS:
        first = next(iter(left))
        del left[first]
        best, most = format_glob(name_of[first]), {first}
        for glob in sorted(_globs(name_of[first]), key=lambda glob: (glob != "**/rngs", len(glob))):
            hits = {texts[text] for text in named_by(texts, glob)}
            if first in hits <= allowed and len(hits) > len(most):
                best, most = glob, hits
        found.append((best, len(most)))
        left = {saved: None for saved in left if saved not in most}
    return found


def _globs(path: Path) -> list[str]:
    """Globs that name a leaf: those of modules that it is in, and of the same names elsewhere."""
    named = [place for place, key in enumerate(path) if not str(key).isdigit()]
    return [
        *(format_glob(path[:end]) for end in range(1, len(path))),
        *(f"**/{format_glob((path[place],))}" for place in named),
        *(f"**/{format_glob(path[place:])}" for place in named),
        *(f"{format_glob(path[:1])}/**/{format_glob((path[place],))}" for place in named[1:]),
    ]


def _mirrors(leaves: Iterable[Path], parameters: Iterable[Path]) -> set[Path]:
    """The leaves of an optimizer's state that follow some of these parameters."""
    found = mirrored(dict.fromkeys(parameters, ()), dict.fromkeys(leaves))
    return {path for path, _, _ in found}


def differences(
    found: LeafMap,
    sources: Mapping[Path, ArrayHandle],
    targets: Mapping[Path, Any],
    above: Path = (),
) -> Iterator[tuple[Path | None, str, str]]:
    """What differs: the leaf, if it is one; in words; and a hint or nothing.

    Args:
      found: from the sources to what is made.
      sources: the arrays of the source.
      targets: the leaves of the model.
      above: what paths of the result are below, as they are told of.
    """
    origins: dict[int, ArrayHandle] = {}
    made_by: dict[int, Apply] = {}  # calls whose inputs were made by a function

    def source_of(value: Source | Output) -> ArrayHandle:
        return sources[value.path] if isinstance(value, Source) else origins[id(value.call)]

    for call in found.calls():
        first, *others = (source_of(v) for v in call.inputs if not isinstance(v, Zeros))
        own = [
            made_by[id(v.call)]
            for v in call.inputs
            if isinstance(v, Output) and id(v.call) in made_by
        ]
        if isinstance(call.operation, Apply):
            own = [call.operation]
            if call.operation.dtype is not None:
                first = dataclasses.replace(first, dtype=call.operation.dtype)
        if own:
            made_by[id(call)] = own[0]
        origins[id(call)] = first
        for other in others:
            if other.dtype != first.dtype:
                pair = f"{format_path(first.path)} and {format_path(other.path)}"
                both = f"{first.dtype.name} and {other.dtype.name}"
                yield None, f"{pair}: {both} cannot become one", ""
    for path, value in found.values.items():
        if isinstance(value, Zeros):
            continue
        wanted, source, shape = targets.get(path), source_of(value), value.shape
        if not isinstance(wanted, TargetLeaf) or wanted.kind not in ("array", "key"):
            continue
        function = made_by.get(id(value.call)) if isinstance(value, Output) else None
        name = format_path(source.path)
        both = f"{name} -> {format_path((*above, *path))}"
        if wanted.kind == "key":
            if source.key_impl != wanted.key_impl:
                keys = f"{source.key_impl} keys" if source.key_impl else source.dtype.name
                yield path, f"{both}: {keys}, the model has {wanted}", ""
        elif tuple(shape) != wanted.shape:
            yield (
                path,
                f"{both}: shape {list(shape)}, the model has {list(wanted.shape)}",
                "" if function is None else _says(function, "shape", list(wanted.shape)),
            )
        elif source.dtype != wanted.dtype:
            hint = Hint(("cast", str(wanted.dtype), format_glob(source.path)))
            if function is not None:
                hint = _says(function, "dtype", str(wanted.dtype))
            yield path, f"{both}: dtype {source.dtype.name}, the model has {wanted.dtype}", hint


def _says(function: Apply, key: str, value: Any) -> str:
    """How a rule says what a function makes, if that is not what it is given."""
    return (
        f"apply = {{ function = '{function.name}', {key} = {value!r} }}, if that is what it makes"
    )
