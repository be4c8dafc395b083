"""What a map file says about a conversion, in whichever direction it was written."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from reshard.boxes import Shape
from reshard.convert.goal import Goal
from reshard.convert.mapfile import read_map
from reshard.convert.mapped import apply_map
from reshard.convert.maprules import Map, inverse
from reshard.convert.steps import Step, backwards
from reshard.tree import Path, compile_glob, format_path, glob_text


@dataclasses.dataclass(frozen=True)
class ByMap:
    """What a map says.

    Attributes:
      steps: from the source towards the target.
      dropped: leaves of the source that are dropped.
      final: all leaves after the steps, with their shapes.
      initial: globs of leaves of the target that keep the model's own initial value.
      problems: what stands against it.
    """

    steps: list[Step]
    dropped: list[Path]
    final: dict[Path, Shape]
    initial: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def by_map(
    map_file: str | os.PathLike | None, to: str, goal: Goal | None, shapes: Mapping[Path, Shape]
) -> ByMap:
    """What a map file says about leaves.

    Args:
      map_file: path of the file, if there is one.
      to: the API that is converted to. A map for the other one is run backwards.
      goal: the tree that is to be made, if there is a model.
      shapes: the model's leaves in the source.

    Raises:
      TreeMismatchError: the file is no map, or its rules do not apply.
    """
    if map_file is None:
        return ByMap([], [], dict(shapes))
    rules = read_map(map_file)
    if rules.to not in (None, to):
        if goal is not None:
            return _backwards(rules, goal.shapes(), shapes)
        rules = inverse(rules)
    mapped = apply_map(rules, shapes)
    problems = []
    if goal is None:
        untouched = map(format_path, mapped.untouched)
        problems = [f"{path}: no rule of the map applies to it" for path in untouched]
    return ByMap(mapped.steps, mapped.dropped, mapped.final, mapped.initial, tuple(problems))


def _backwards(rules: Map, targets: Mapping[Path, Shape], shapes: Mapping[Path, Shape]) -> ByMap:
    """Of a map for the opposite direction: its rules are applied to the target's leaves, and its
    steps are run backwards."""
    mapped = apply_map(rules, targets)
    dropped = [path for path in shapes if _matches(path, mapped.initial)]
    unused = set(mapped.dropped)
    used = {path: shape for path, shape in targets.items() if path not in unused}
    untouched = set(mapped.untouched)
    needed = [path for path in mapped.final if path not in untouched]
    lacking = [format_path(path) for path in needed if path not in shapes]
    gone = {*needed, *dropped}
    left = {path: shape for path, shape in shapes.items() if path not in gone}
    made = {path: shape for path, shape in used.items() if path not in untouched}
    return ByMap(
        backwards(mapped.steps, used),
        dropped,
        left | made,
        tuple(map(format_path, mapped.dropped)),
        tuple(f"{path}: the map needs it, and the checkpoint lacks it" for path in lacking),
    )


def _matches(path: Path, globs: Sequence[str]) -> bool:
    return any(compile_glob(glob).fullmatch(glob_text(path)) for glob in globs)
