"""What a map file says about a conversion, in whichever direction it was written."""

import dataclasses
import os
from collections.abc import Collection, Mapping

from reshard.arrays.boxes import Shape
from reshard.convert.align import Alignment, align
from reshard.convert.contradictions import ordered
from reshard.convert.leafmap import LeafMap, Source, Zeros, renaming
from reshard.convert.map_rules import Map, inverse
from reshard.convert.mapfile import read_map
from reshard.convert.mapped import Mapped, apply_map
from reshard.convert.model import Goal
from reshard.convert.module_tree import (
    Module,
    bare_leaves,
    classes_after,
    linen_outline,
    path_outline,
    without,
)
from reshard.convert.value_levels import COLLECTIONS
from reshard.errors import TreeMismatchError
from reshard.tree import Key, Path, compile_glob, format_path, glob_text, nearest

_RENAMES = (
    "`to = 'params/NAME/'` gives a module another name on Linen's side, and leaves it to the "
    "standard conversions"
)


@dataclasses.dataclass(frozen=True)
class ByMap:
    """What a map says.

    Attributes:
      map: of the source's leaves. Those that it leaves open have no origin.
      initial: globs of leaves of the target that keep the model's own initial value.
      problems: what stands against it.
      hints: what may help.
      strays: leaves that it puts where the model has none, and no conversion goes on from.
      found: what was found by structure already, where a map is run backwards.
    """

    map: LeafMap
    initial: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    strays: frozenset[Path] = frozenset()
    found: Alignment | None = None


def by_map(
    map_file: str | os.PathLike | None,
    to: str,
    goal: Goal | None,
    shapes: Mapping[Path, Shape],
    known: Module | None,
) -> ByMap:
    """What a map file says about leaves.

    Args:
      map_file: path of the file, if there is one.
      to: the API that is converted to. A map for the other one is run backwards.
      goal: the tree that is to be made, if there is a model.
      shapes: the model's leaves in the source.
      known: the outline of the model that the source is of, if that is known.

    Raises:
      TreeMismatchError: the file is no map, or its rules do not apply.
    """
    if map_file is None:
        return ByMap(renaming({path: path for path in shapes}, shapes))
    rules = read_map(map_file)
    if rules.to not in (None, to):
        if goal is not None:
            return _backwards(rules, goal, shapes, known)
        rules = inverse(rules)
    try:
        mapped = apply_map(rules, shapes)
    except TreeMismatchError as error:
        unmatched = [text for text in error.problems if text.endswith("matches no leaf")]
        if rules.to is not None or len(unmatched) < len(rules.rules):
            raise
        other = "linen" if to == "nnx" else "nnx"
        hint = f'`to = "{other}"` above the rules, if it was written for that: it runs backwards'
        raise TreeMismatchError(error.summary, error.problems, [hint, *error.hints]) from error
    if goal is None:
        problems = [
            f"{format_path(path)}: no rule of the map applies to it" for path in mapped.untouched
        ]
        return ByMap(mapped.map, mapped.initial, tuple(problems))
    there = goal.layout.model
    linen = shapes if to == "nnx" else there
    strays = _strays(mapped, there, COLLECTIONS.union(path[0] for path in linen), to)
    problems = []
    for path in strays:
        near = nearest(format_path(path), there)[:1]
        told = f"; the nearest is {near[0]}" if near else ""
        problems.append(f"{format_path(path)}: the model has no such leaf{told}")
    return ByMap(
        mapped.map,
        mapped.initial,
        tuple(problems),
        (_RENAMES,) if strays and to == "nnx" else (),
        frozenset(strays),
    )


def _strays(
    mapped: Mapped, there: Collection[Path], collections: Collection[Key], to: str
) -> list[Path]:
    """Where rules lead that is no leaf of the model, and no path of the other side's: on Linen's
    side paths begin with a collection."""
    return [
        path
        for path in mapped.map.origin
        if path not in there and (path[0] in collections) == (to == "linen")
    ]


def _backwards(rules: Map, goal: Goal, shapes: Mapping[Path, Shape], known: Module | None) -> ByMap:
    """Of a map for the opposite direction: its rules are applied to the target's leaves, what they
    leave open is aligned with the source, and the inverse of both is the map."""
    mapped = apply_map(rules, goal.shapes())
    made = mapped.map
    globs = [compile_glob(glob) for glob in mapped.initial]
    dropped = [path for path in shapes if any(g.fullmatch(glob_text(path)) for g in globs)]
    hits = {path for path in made.origin if path in shapes}
    collections = {path[0] for path in goal.layout.model}
    rest = {p: s for p, s in made.shapes.items() if p not in hits and p[0] in collections}
    gone = {*hits, *dropped}
    left = {path: shape for path, shape in shapes.items() if path not in gone}
    nnx = path_outline(bare_leaves(left)) if known is None else without(known, gone)
    sources = made.made_of()
    classes = classes_after(goal.outline, {path: sources.get(path, (path,)) for path in rest})
    linen = linen_outline(bare_leaves(rest), classes)
    whole = path_outline(bare_leaves(shapes)) if known is None else known
    found = ordered(made, align(linen, nnx), goal.outline, whole)
    zeros = {}
    for path in found.must_be_zero:
        value = made.values[path]
        leaf = goal.leaf(goal.layout.model[value.path if isinstance(value, Source) else path])
        assert leaf.dtype is not None
        zeros[path] = Zeros(leaf.shape, leaf.dtype)
    aligned = found.leaf_map(rest, zeros)
    reached = {*hits, *aligned.values}
    back = made.then(aligned).inverse()
    values = {
        path: value
        for path, value in back.values.items()
        if reached.issuperset(LeafMap({path: value}).sources())
    }
    origin = {path: text for path, text in back.origin.items() if path in values}
    return ByMap(
        LeafMap(values, origin, tuple(dropped)),
        tuple(map(format_path, made.dropped)),
        tuple(
            f"{format_path(path)}: the map needs it, and the checkpoint lacks it"
            for path in made.origin
            if path not in hits and path[0] not in collections
        ),
        found=found,
    )
