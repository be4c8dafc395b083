"""Operations on parameters as operations on moments that have only a part of their axes. Pure."""

from collections.abc import Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Operation, Pad, Stack, Transpose, Unstack
from reshard.sharding.mesh import Spec
from reshard.sharding.optimizer_state import matching_part
from reshard.tree import Path


def adapted(
    operation: Operation,
    shapes: Sequence[Shape],
    parameters: Sequence[Shape],
    paths: Sequence[Path],
) -> Operation | str:
    """An operation on parameters as one on their moments, or why there is none.

    Args:
      operation: what is done to the parameters.
      shapes: shapes of the moments.
      parameters: shapes of the parameters.
      paths: paths of the moments.
    """
    if list(shapes) == list(parameters):
        if isinstance(operation, Pad) and operation.fill != 0:
            return f"a moment cannot be padded with {operation.fill}: that is no linear operation"
        return operation
    found = list(map(_kept_axes, paths, shapes, parameters))
    reasons = [kept for kept in found if isinstance(kept, str)]
    if reasons:
        return reasons[0]
    kept = found[0]
    if isinstance(kept, str) or any(other != kept for other in found):
        return "they have different parts of their parameters"
    shape = parameters[0]
    factored = [axis for axis in range(len(shape)) if axis not in kept]
    if len(factored) == 1 and _largest(shape).issuperset(factored):
        whole = operation.shapes(parameters)[0] if isinstance(operation, Stack) else shape
        # The sort by which adafactor tells equal sizes apart is a stable one up to three of them.
        if _tied(whole) and (isinstance(operation, Transpose) or len(whole) > 3):
            return "it is a part of a parameter that has several largest dimensions"
        if isinstance(operation, Transpose):
            order = [axis for axis in operation.axes if axis in kept]
            return Transpose(tuple(kept.index(axis) for axis in order))
        if isinstance(operation, Stack):
            axis = operation.axis % len(whole)
            if axis in _largest(whole):
                return f"the layers, axis {axis} of {list(whole)}, would be factored over"
            return Stack(sum(place < axis for place in kept), operation.names)
        if isinstance(operation, Unstack):
            axis = operation.axis % len(shape)
            if axis in _largest(shape):
                return f"it is factored over the layers, axis {axis} of {list(shape)}"
            return Unstack(kept.index(axis), operation.count)
    return (
        f"it has {list(shapes[0])} of its parameter's {list(shape)}, and "
        f"{type(operation).__name__.lower()} cannot be carried over to a part"
    )


def _kept_axes(path: Path, shape: Shape, parameter: Shape) -> list[int] | str:
    """Which axes of its parameter a reduced moment has, or why that is not known."""
    tags: Spec = tuple((str(axis),) for axis in range(len(parameter)))
    part = matching_part(path, shape, parameter, tags)
    if isinstance(part, str):
        return part
    if len(part) != len(shape) or not all(part):
        return f"its shape is {list(shape)} and its parameter's {list(parameter)}"
    return [int(tag) for (tag,) in part]


def second_size(shape: Shape) -> int:
    """The size of the second largest dimension; 0 if there is none."""
    return sorted((0, 0, *shape))[-2]


def _largest(shape: Shape) -> set[int]:
    """The axes that adafactor may factor over: the two largest, and those of equal size."""
    return {axis for axis, size in enumerate(shape) if size >= second_size(shape)}


def _tied(shape: Shape) -> bool:
    return len(_largest(shape)) > 2 or len({*sorted(shape)[-2:]}) < 2
