"""A conversion carried out on the leaves of a checkpoint.

What only changes its path is moved; what an operation changes goes in under its path relative to
the model, through the steps, and out under its path in the other tree.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.derived import apply, constant
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Crop
from reshard.checkpoint import Leaf
from reshard.convert.steps import Step, backwards
from reshard.errors import TreeMismatchError
from reshard.storage.location import checked
from reshard.tree import Path, format_path

Zeros = Mapping[Path, tuple[Shape, np.dtype]]


@dataclasses.dataclass(frozen=True)
class Route:
    """How the leaves of one tree become those of another.

    Attributes:
      moved: leaves that only change their path: before -> after.
      enter: leaves that the steps take: path before -> path in the steps.
      steps: the steps, in order.
      leave: leaves that the steps make: path in the steps -> path after.
      vanish: leaves before that have no place after and hold nothing but zeros.
      appear: leaves after that have none before and hold nothing but zeros.
    """

    moved: dict[Path, Path]
    enter: dict[Path, Path]
    steps: tuple[Step, ...]
    leave: dict[Path, Path]
    vanish: Zeros
    appear: Zeros

    def carried(self, leaves: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
        """The leaves of the other tree. Reads nothing but what padding has added; see `not_zero`.

        Raises:
          TreeMismatchError: arrays that cannot become one, or padding that is no padding any more.
        """
        made = {new: _renamed(leaves[old], new) for old, new in self.moved.items()}
        held = {new: _renamed(leaves[old], new) for old, new in self.enter.items()}
        for step in self.steps:
            inputs = [held.pop(path) for path in step.inputs]
            if step.operation is None:
                held[step.outputs[0]] = _renamed(inputs[0], step.outputs[0])
                continue
            arrays = [leaf for leaf in inputs if isinstance(leaf, ArrayHandle)]
            if isinstance(step.operation, Crop):
                _check_cut(arrays[0], step.operation)
            outputs = apply(step.operation, arrays, step.outputs)
            held.update(zip(step.outputs, outputs, strict=True))
        made.update({new: _renamed(held[path], new) for path, new in self.leave.items()})
        near = {path: leaves[path] for path in self.vanish} or leaves
        for path, (shape, dtype) in self.appear.items():
            like = an_array(near)
            # One zero, however many they are.
            zeros = constant(path, np.broadcast_to(np.zeros((), dtype), shape), like)
            value_type = "np.ndarray" if like.value_type == "scalar" else like.value_type
            made[path] = dataclasses.replace(zeros, value_type=value_type)
        return made

    def not_zero(self, leaves: Mapping[Path, Leaf]) -> list[Path]:
        """Of the leaves that vanish, those that hold something else than zeros. Reads them."""
        found = []
        for path in self.vanish:
            leaf = leaves[path]
            if isinstance(leaf, ArrayHandle):
                values = checked(leaf.view().read(), f"{format_path(path)}: its stored bytes")
                if np.ascontiguousarray(values).view(np.uint8).any():
                    found.append(path)
        return found

    def backwards(self, shapes: Mapping[Path, Shape]) -> "Route":
        """The way back.

        Args:
          shapes: shapes of the leaves before.

        Raises:
          TreeMismatchError: an operation has no inverse.
        """
        inside = {new: shapes[old] for old, new in self.enter.items()}
        return Route(
            _swapped(self.moved),
            _swapped(self.leave),
            tuple(backwards(self.steps, inside)),
            _swapped(self.enter),
            self.appear,
            self.vanish,
        )


@dataclasses.dataclass
class Part:
    """What becomes of the model's leaves, or of the optimizer's.

    Attributes:
      steps: from the source to the target.
      made: leaves after the steps, with their shapes.
      dropped: leaves of the source that are dropped.
      vanish: leaves of the source that must be zeros and have no place.
      appear: leaves of the target that are zeros and have no source.
      masked: leaves of the target without a value.
      owners: the parameters that those of `dropped` are optimizer state of.
    """

    steps: list[Step]
    made: dict[Path, Shape]
    dropped: list[Path]
    vanish: list[Path]
    appear: dict[Path, tuple[Shape, np.dtype]]
    masked: Sequence[Path] = ()
    owners: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True)
class Decision:
    """A conversion.

    Attributes:
      way: from the saved leaves of the source to those of the target.
      steps: the map of the model's leaves.
      dropped: paths of leaves that the map drops.
      dropped_saved: the same and what belongs to them in the optimizer's state, as saved.
      initial: saved paths of leaves of the target that keep the model's own initial value.
      initial_names: the same, as the map names them, less optimizer state that does so because its
        parameters do.
      counters: saved paths of step counters of the target -> their dtype and how they are saved.
      empty: leaves of the target that are empty containers.
      prefix: what the target has ahead of the model's own tree.
      notes: what the user should know.
    """

    way: Route
    steps: tuple[Step, ...]
    dropped: tuple[Path, ...]
    dropped_saved: frozenset[Path]
    initial: tuple[Path, ...]
    initial_names: tuple[Path, ...]
    counters: dict[Path, tuple[np.dtype, str]]
    empty: dict[Path, Leaf]
    prefix: Path
    notes: tuple[str, ...]


def route(
    steps: Sequence[Step],
    before: Mapping[Path, Path],
    after: Mapping[Path, Path],
    vanish: Zeros,
    appear: Zeros,
) -> Route:
    """A route from steps on relative paths.

    Args:
      steps: the steps.
      before: relative path -> path in the tree before, of the leaves that the steps take.
      after: relative path -> path in the tree after, of those that they make.
      vanish: as in `Route`.
      appear: as in `Route`.
    """
    origins: dict[Path, Path | None] = {path: path for path in before}
    changed: set[Path | None] = set()
    for step in steps:
        inputs = [origins.pop(path) for path in step.inputs]
        if step.operation is None:
            origins[step.outputs[0]] = inputs[0]
        else:
            changed.update(inputs)
            origins.update(dict.fromkeys(step.outputs))
    moved = {old: new for new, old in origins.items() if old is not None and old not in changed}
    taken = [path for path in before if path in changed]
    return Route(
        {before[old]: after[new] for old, new in moved.items()},
        {before[path]: path for path in taken},
        tuple(_reached(steps, taken)),
        {path: after[path] for path, origin in origins.items() if origin is None},
        vanish,
        appear,
    )


def _check_cut(handle: ArrayHandle, crop: Crop) -> None:
    """Raises TreeMismatchError if what padding has added is not what it was any more."""
    if crop.fill is None:
        return
    view = handle.view()
    for axis, (before, after) in enumerate(crop.widths):
        size = handle.shape[axis]
        for part in (slice(0, before), slice(size - after, size)):
            read = view[(*[slice(None)] * axis, part)].read()
            values = np.asarray(checked(read, f"{format_path(handle.path)}: its stored bytes"))
            if values.size and (values != np.array(crop.fill, values.dtype)).any():
                raise TreeMismatchError(
                    f"{format_path(handle.path)}: it was padded with {crop.fill}, and holds other "
                    "values there now",
                    hints=["a map to linen with `crop` cuts them off"],
                )


def an_array(leaves: Mapping[Path, Leaf]) -> ArrayHandle:
    """A leaf that others are stored like: a device array if there is one."""
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, ArrayHandle)]
    return min(arrays, key=lambda leaf: (leaf.value_type != "jax.Array", leaf.key_impl is not None))


def recounted(leaf: ArrayHandle, dtype: np.dtype) -> ArrayHandle:
    """A step counter in another integer dtype.

    Raises:
      TreeMismatchError: that does not hold its value.
    """
    value = np.asarray(checked(leaf.view().read(), f"{format_path(leaf.path)}: its stored bytes"))
    if int(value) != int(value.astype(dtype)):
        raise TreeMismatchError(
            f"{format_path(leaf.path)}: the step {int(value)} does not fit {dtype.name}"
        )
    return dataclasses.replace(leaf, dtype=dtype)


def on_host(leaf: ArrayHandle) -> ArrayHandle:
    """A leaf that is no device array, and so has no place on devices."""
    return dataclasses.replace(leaf, sharding=None, saved_sharding=None)


def _reached(steps: Sequence[Step], taken: Iterable[Path]) -> list[Step]:
    """The steps that leaves of these paths go through."""
    reached = set(taken)
    needed = []
    for step in steps:
        if any(path in reached for path in step.inputs):
            needed.append(step)
            reached.difference_update(step.inputs)
            reached.update(step.outputs)
    return needed


def _swapped(paths: Mapping[Path, Path]) -> dict[Path, Path]:
    return {new: old for old, new in paths.items()}


def _renamed(leaf: Leaf, path: Path) -> Leaf:
    return dataclasses.replace(leaf, path=path) if isinstance(leaf, ArrayHandle) else leaf
