"""A conversion as a list of steps: which leaves become which, by which operation. Pure.

Steps are carried out in order on a tree of leaves; each takes its inputs out of the tree and puts
its outputs in. Run backwards, in the opposite order and with inverse operations, they undo it.

Paths are relative to the model: on Linen's side the collection comes first (`batch_stats/...`,
`params/Dense_0/kernel`), on NNX's side the attributes do (`linear/kernel`). Keys are text, and the
levels named `value` that Orbax writes for boxes and variables are not part of them.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from reshard.boxes import Shape
from reshard.errors import TreeMismatchError
from reshard.operations import Operation
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
