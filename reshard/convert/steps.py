"""A conversion as a list of steps: which leaves become which, by which operation. Pure.

Steps are carried out in order on a tree of leaves; each takes its inputs out of the tree and puts
its outputs in. Run backwards, in the opposite order and with inverse operations, they undo it.

Paths are relative to the model: on Linen's side the collection comes first (`batch_stats/...`,
`params/Dense_0/kernel`), on NNX's side the attributes do (`linear/kernel`). Keys are text, and the
levels named `value` that Orbax writes for boxes and variables are not part of them.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Operation
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_path


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Some leaves become others.

    Attributes:
      inputs: paths before.
      outputs: paths after.
      operation: what is done; None for one leaf that only changes its path.
      origin: what says so: `"map"` (the user's file), `"path"` (the same path, after the standard
        conversions of layers and containers), `"structure"` (the order of modules of one class).
    """

    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    operation: Operation | None = None
    origin: str = "map"

    def __str__(self) -> str:
        before, after = (" + ".join(map(format_path, p)) for p in (self.inputs, self.outputs))
        return f"{before} -> {after}" + ("" if self.operation is None else f"  {self.operation}")


def carried_out(steps: Iterable[Step], shapes: Mapping[Path, Shape]) -> dict[Path, Shape]:
    """The leaves, with their shapes, after all steps.

    Args:
      steps: the steps.
      shapes: the leaves before.

    Raises:
      TreeMismatchError: steps whose inputs are not there, whose outputs are there already, or
        whose operations do not apply: all of them.
    """
    leaves, problems = dict(shapes), []
    for step in steps:
        missing = [path for path in step.inputs if path not in leaves]
        if missing:
            problems += [f"{step}: there is no {format_path(path)}" for path in missing]
            continue
        inputs = [leaves.pop(path) for path in step.inputs]
        try:
            made = inputs if step.operation is None else step.operation.shapes(inputs)
        except TreeMismatchError as error:
            problems.append(f"{step}: {error.summary}")
            continue
        for path, shape in zip(step.outputs, made, strict=True):
            if path in leaves:
                problems.append(f"{step}: there is a {format_path(path)} already")
            leaves[path] = shape
    if problems:
        raise TreeMismatchError("steps that cannot be carried out", problems)
    return leaves


def origins(steps: Iterable[Step]) -> dict[Path, tuple[Path, ...]]:
    """The leaves that those which steps make are made of, before all steps."""
    found: dict[Path, tuple[Path, ...]] = {}
    for step in steps:
        sources = [source for path in step.inputs for source in found.pop(path, (path,))]
        found.update(dict.fromkeys(step.outputs, tuple(sources)))
    return found


def backwards(steps: Sequence[Step], shapes: Mapping[Path, Shape]) -> list[Step]:
    """The steps that undo `steps`, which begin with leaves of these shapes.

    Raises:
      TreeMismatchError: an operation has no inverse.
    """
    leaves, undone = dict(shapes), []
    for step in steps:
        inputs = [leaves.pop(path) for path in step.inputs]
        inverse, made = None, inputs
        if step.operation is not None:
            made = step.operation.shapes(inputs)
            inverse = step.operation.inverse(inputs)
        leaves.update(zip(step.outputs, made, strict=True))
        undone.append(Step(step.outputs, step.inputs, inverse, step.origin))
    return undone[::-1]


def condensed(steps: Iterable[Step]) -> list[Step]:
    """The same conversion in fewer steps, to be read: what is only renamed on its way to or from an
    operation, or several times, is one step."""
    made: list[tuple[list[Path], list[Path], Step, str]] = []
    by_output: dict[Path, tuple[int, int]] = {}
    for step in steps:
        origins = [step.origin]
        inputs = []
        for path in step.inputs:
            number, place = by_output.get(path, (-1, 0))
            before = made[number] if number >= 0 else None
            if before is not None and before[2].operation is None:
                inputs.append(before[0][0])
                origins.insert(0, before[3])
                made[number] = ([], [], before[2], "")
            elif before is not None and step.operation is None:
                before[1][place] = step.outputs[0]
                by_output[step.outputs[0]] = (number, place)
                inputs = []
                break
            else:
                inputs.append(path)
        else:
            origin = ", ".join(dict.fromkeys(o for text in origins for o in text.split(", ")))
            by_output.update((path, (len(made), i)) for i, path in enumerate(step.outputs))
            made.append((inputs, list(step.outputs), step, origin))
    return [
        Step(tuple(inputs), tuple(outputs), step.operation, origin)
        for inputs, outputs, step, origin in made
        if outputs
    ]
