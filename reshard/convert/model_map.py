"""The map of a model's leaves: what a map file says, in whichever direction it was written, and
what the alignment of both models makes of the rest.

Models are aligned from Linen to NNX; the other direction is the inverse.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.convert.align import Alignment, align
from reshard.convert.contradictions import ordered
from reshard.convert.layout import Layout
from reshard.convert.leafmap import LeafMap, Zeros, renaming
from reshard.convert.map_rules import OPPOSITE, Map
from reshard.convert.mapped import apply_inverse, apply_map
from reshard.convert.module_tree import (
    Leaf,
    Module,
    bare_leaves,
    classes_after,
    joined,
    linen_outline,
    path_outline,
    without,
)
from reshard.convert.pairing import listed
from reshard.convert.value_levels import COLLECTIONS
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_glob, format_path, glob_text, named_by, nearest

_RENAMES = (
    "`to = 'params/NAME/'` gives a module another name on Linen's side, and leaves it to the "
    "standard conversions"
)


@dataclasses.dataclass(frozen=True)
class Side:
    """The leaves of the model in one of the APIs.

    Attributes:
      api: `"linen"` or `"nnx"`.
      shapes: path -> shape.
      dtypes: path -> dtype.
      known: its modules, if there is the model.
    """

    api: str
    shapes: Mapping[Path, Shape]
    dtypes: Mapping[Path, Any]
    known: Module | None = None

    @functools.cached_property
    def modules(self) -> Module:
        """Its modules, as far as they are known."""
        return self.known or _outline(self.api, bare_leaves(self.shapes, self.dtypes))


def side_of(ckpt: Mapping[Path, Any], layout: Layout, known: Module | None = None) -> Side:
    """The leaves of the model in a checkpoint."""
    dtypes = {path: ckpt[saved].dtype for path, saved in layout.model.items()}
    return Side(layout.api, layout.shapes(ckpt), dtypes, known)


@dataclasses.dataclass(frozen=True)
class Said:
    """What a map file says.

    Attributes:
      map: of the leaves that its rules are for: those of the source, or those of the target, if
        it is run backwards. Leaves that it leaves open have no origin.
      to: the API that its rules lead to.
      initial: globs of leaves of the target that keep the model's own initial value.
      optional: the same, of leaves that may not be there.
      dropped: leaves of the source that are left out where it is run backwards.
      problems: what stands against it.
      hints: what may help.
      notes: what came of rules and globs that may match nothing.
      unexpected: leaves that it puts where there are none, and no conversion goes on from.
    """

    map: LeafMap
    to: str
    initial: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    dropped: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unexpected: frozenset[Path] = frozenset()


def by_map(
    rules: Map | None, source: Side, target: Side | None, left_out: Collection[Path] = ()
) -> Said:
    """What a map file says about leaves.

    Args:
      rules: what is in the file, if there is one.
      source: the leaves that are converted.
      target: those that are to be made, if there is a model.
      left_out: leaves that the source does not have any more.

    Raises:
      TreeMismatchError: its rules do not apply.
    """
    to, shapes = OPPOSITE[source.api], source.shapes
    if rules is None:
        return Said(renaming({path: path for path in shapes}, shapes), to)
    backwards = rules.to == source.api and target is not None
    start, end = (target, source) if backwards and target else (source, target)
    try:
        if rules.to == source.api and not backwards:
            mapped = apply_inverse(rules, start.shapes)
        else:
            mapped = apply_map(rules, start.shapes, () if backwards else left_out)
    except TreeMismatchError as error:
        unmatched = [text for text in error.problems if text.endswith("matches no leaf")]
        if rules.to is not None or len(unmatched) < len(rules.rules):
            raise
        other = f'`to = "{source.api}"` above the rules'
        hint = f"{other}, if it was written for that: it runs backwards"
        raise TreeMismatchError(error.summary, error.problems, [hint, *error.hints]) from error
    if end is None:
        problems = [
            f"{format_path(path)}: no rule of the map applies to it" for path in mapped.untouched
        ]
        return Said(
            mapped.map,
            to,
            mapped.initial,
            mapped.optional,
            problems=tuple(problems),
            notes=mapped.notes,
        )
    initial, optional, dropped, notes = mapped.initial, mapped.optional, [], []
    if backwards:
        texts = {glob_text(path): path for path in shapes}
        may = {text for glob in optional for text in named_by(texts, glob)}
        named = may.union(*(named_by(texts, glob) for glob in initial))
        dropped = [path for text, path in texts.items() if text in named]
        if may:
            gone = [path for text, path in texts.items() if text in may]
            notes.append(f"left out, as `optional` says: {listed(gone)}")
        initial, optional = tuple(map(format_glob, mapped.map.dropped)), ()
    linen = start if start.api == "linen" else end
    collections = COLLECTIONS.union(path[0] for path in linen.shapes)
    # On Linen's side paths begin with a collection.
    unexpected = [
        path
        for path in mapped.map.origin
        if path not in end.shapes and (path[0] in collections) == (end.api == "linen")
    ]
    problems = []
    for path in map(format_path, unexpected):
        near = "".join(f"; the nearest is {name}" for name in nearest(path, end.shapes)[:1])
        problems.append(
            f"{path}: the map needs it, and the checkpoint lacks it"
            if backwards
            else f"{path}: the model has no such leaf{near}"
        )
    return Said(
        mapped.map,
        end.api,
        initial,
        optional,
        tuple(dropped),
        tuple(problems),
        (_RENAMES,) if unexpected and to == "nnx" and not backwards else (),
        (*mapped.notes, *notes),
        frozenset(unexpected),
    )


def model_map(
    said: Said, source: Side, target: Side, initial: Collection[Path]
) -> tuple[LeafMap, Alignment]:
    """The map of the model's leaves, and what was found of those that a map file leaves open.
    Leaves of the source that nothing is found for stay.

    Args:
      said: what the map file says.
      source: the leaves that are converted.
      target: those that are to be made.
      initial: those of them that keep their initial value.
    """
    backwards = said.to == source.api
    start, end = (target, source) if backwards else (source, target)
    reached = said.map.origin.keys() & end.shapes.keys()
    gone = {*reached, *said.dropped, *initial}
    found = _aligned(said, start, end, gone)
    aligned = found.map if start.api == "linen" else found.map.inverse()
    whole = said.map.then(aligned)
    if not backwards:
        return whole, found
    back = whole.inverse()
    reached |= aligned.values.keys()
    values = {
        path: value
        for path, value in back.values.items()
        if reached.issuperset(LeafMap({path: value}).sources())
    }
    origin = {path: text for path, text in back.origin.items() if path in values}
    zeros = {path: Zeros(source.shapes[path], source.dtypes[path]) for path in back.must_be_zero}
    return LeafMap(values, origin, said.dropped, zeros), found


def _aligned(said: Said, start: Side, end: Side, gone: Collection[Path]) -> Alignment:
    """What is found of the leaves that a map leaves open.

    Args:
      said: what the map says.
      start: the side that its rules are for.
      end: the other side.
      gone: leaves of either side that come from nothing or from the map, or go nowhere.
    """
    rest = {p: s for p, s in said.map.shapes.items() if p not in gone and p not in said.unexpected}
    made = {path: sources for path, sources in said.map.made_of().items() if path in rest}
    before = {path: made.get(path, [path]) for path in rest}
    leaves = bare_leaves(rest, {path: start.dtypes[sources[0]] for path, sources in before.items()})
    if start.known is None:
        modules = _outline(start.api, leaves)
    elif start.api == "linen":
        modules = linen_outline(leaves, classes_after(start.known, before))
    else:
        moved = {path: leaf for path, leaf in leaves.items() if before[path] != [path]}
        kept = leaves.keys() - moved.keys()
        known = without(start.known, start.shapes.keys() - kept)
        modules = joined(known, path_outline(moved))
    there = without(end.modules, gone)
    found = align(modules, there) if start.api == "linen" else align(there, modules)
    if not said.map.origin:
        return found
    linen, nnx = (start, end) if start.api == "linen" else (end, start)
    return ordered(said.map, found, linen.modules, nnx.modules, said.to)


def _outline(api: str, leaves: Mapping[Path, Leaf]) -> Module:
    return linen_outline(leaves) if api == "linen" else path_outline(leaves)
