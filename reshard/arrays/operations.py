"""Operations on whole arrays: they move elements, join and part arrays; `Apply` alone makes values.
Each says what becomes of shapes, of partition specs and of chunks, has an inverse, and makes
TensorStore views of its inputs: what its methods give is said of `Transpose`, once for all. Nothing
here reads an array.

    inputs  ->  operation  ->  outputs        inverse(shapes of the inputs)
    1           Transpose      1              Transpose
    1           Reshape        1              Reshape
    1           Split          n              Concat
    n           Concat         1              Split
    n           Stack          1              Unstack
    1           Unstack        n              Stack
    1           Pad            1              Crop
    0, 1        Constant, Apply 1             none
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from reshard.arrays.applied import Apply
from reshard.arrays.boxes import (
    Box,
    Shape,
    agreed_spec,
    check_size,
    common_multiple,
    from_front,
    full_spec,
    replaced,
    shape_text,
    shifted,
    without,
)
from reshard.arrays.reshaping import cut, reshaped_box, reshaped_chunk, reshaped_spec, reshaped_view
from reshard.errors import TreeMismatchError
from reshard.sharding.mesh import Spec

_MOST_PARTS = 1 << 16  # that an array is taken apart into: no model comes near

Specs = list[Spec]
Views = list[ts.TensorStore]
Sources = list[tuple[int, Box]]


@dataclasses.dataclass(frozen=True, slots=True)
class Transpose:
    """Axes in another order: axis `i` of the output is axis `axes[i]` of the input."""

    axes: tuple[int, ...]

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        """Shapes of the outputs; raises TreeMismatchError where the operation does not apply."""
        (shape,) = _count(inputs, 1)
        if sorted(self.axes) != list(range(len(shape))):
            raise TreeMismatchError(f"axes {list(self.axes)} do not reorder {list(shape)}")
        return [tuple(shape[axis] for axis in self.axes)]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        """The operation that undoes this one on inputs of these shapes."""
        return Transpose(tuple(self.axes.index(axis) for axis in range(len(self.axes))))

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        """Partition specs of the outputs, of full rank, from those of the inputs."""
        full = full_spec(specs[0], inputs[0])
        return [tuple(full[axis] for axis in self.axes)]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        """For each output the finest known grid whose boxes cut no chunk of an input."""
        return self.shapes(chunks)

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        """The boxes of inputs, by their numbers, that a box of output `part` is made of."""
        return [(0, tuple(box[self.axes.index(axis)] for axis in range(len(self.axes))))]

    def views(self, views: Views) -> Views:
        """Views of the outputs."""
        return [views[0][ts.d[self.axes].transpose[:]] if self.axes else views[0]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements, in row-major order, in another shape."""

    shape: Shape

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        (shape,) = _count(inputs, 1)
        check_size(self.shape)
        if math.prod(shape) != math.prod(self.shape) or min(self.shape, default=0) < 0:
            raise TreeMismatchError(f"{list(shape)} cannot be reshaped to {list(self.shape)}")
        return [self.shape]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        return Reshape(tuple(inputs[0]))

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        """Mesh axes stay with the first of the dimensions that are merged or split; those of
        further ones are dropped, since no spec can say where they go."""
        return [reshaped_spec(full_spec(specs[0], inputs[0]), inputs[0], self.shape)]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        return [reshaped_chunk(chunks[0], inputs[0], self.shape)]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        return [(0, reshaped_box(box, self.shape, inputs[0]))]

    def views(self, views: Views) -> Views:
        return [reshaped_view(views[0], self.shape)]


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Parts of these sizes along an axis."""

    axis: int
    sizes: tuple[int, ...]

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        (shape,) = _count(inputs, 1)
        axis = from_front(self.axis, shape)
        if shape[axis] != sum(self.sizes) or min(self.sizes, default=0) < 0:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} cannot be split into {list(self.sizes)}"
            )
        return [replaced(shape, axis, size) for size in self.sizes]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        return Concat(self.axis)

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        return [full_spec(specs[0], inputs[0])] * len(self.sizes)

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        axis = from_front(self.axis, inputs[0])
        chunk = chunks[0][axis]
        aligned = all(size % chunk == 0 for size in self.sizes[:-1])
        sizes = [min(chunk, s or chunk) if aligned else max(s, 1) for s in self.sizes]
        return [replaced(chunks[0], axis, size) for size in sizes]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        axis = from_front(self.axis, inputs[0])
        return [(0, replaced(box, axis, shifted(box[axis], sum(self.sizes[:part]))))]

    def views(self, views: Views) -> Views:
        view = views[0]
        axis = from_front(self.axis, tuple(view.shape))
        stops = list(itertools.accumulate(self.sizes))
        return [
            cut(view, axis, stop - size, stop) for size, stop in zip(self.sizes, stops, strict=True)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Concat:
    """Arrays one after another along an axis."""

    axis: int

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        axis = from_front(self.axis, inputs[0])
        others = {replaced(shape, axis, 0) for shape in inputs if len(shape) == len(inputs[0])}
        if len(others) > 1 or len({len(shape) for shape in inputs}) > 1:
            raise TreeMismatchError(f"{shape_text(inputs)} cannot be joined along axis {self.axis}")
        return [replaced(inputs[0], axis, sum(shape[axis] for shape in inputs))]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        axis = from_front(self.axis, inputs[0])
        return Split(self.axis, tuple(shape[axis] for shape in inputs))

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        """A dimension in which the inputs differ is not partitioned."""
        return [agreed_spec(specs, inputs)]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        axis = from_front(self.axis, inputs[0])
        together = common_multiple(chunks, self.shapes(inputs)[0])
        own = {chunk[axis] for chunk in chunks}
        aligned = len(own) == 1 and all(shape[axis] % min(own) == 0 for shape in inputs[:-1])
        whole = max(sum(shape[axis] for shape in inputs), 1)
        return [replaced(together, axis, min(own) if aligned else whole)]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        axis = from_front(self.axis, inputs[0])
        found, start = [], 0
        for number, shape in enumerate(inputs):
            ends = shifted(box[axis], -start, shape[axis])
            if ends.start < ends.stop:
                found.append((number, replaced(box, axis, ends)))
            start += shape[axis]
        return found

    def views(self, views: Views) -> Views:
        return [ts.concat(views, axis=self.axis)]


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Arrays of one shape along a new axis, which is partitioned over the mesh axes `names`."""

    axis: int
    names: tuple[str, ...] = ()

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        if len(set(inputs)) != 1:
            raise TreeMismatchError(f"{shape_text(inputs)} cannot be stacked")
        shape = inputs[0]
        axis = from_front(self.axis, (*shape, 1))
        made = (*shape[:axis], len(inputs), *shape[axis:])
        check_size(made)
        return [made]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        return Unstack(self.axis, len(inputs))

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        axis = from_front(self.axis, (*inputs[0], 1))
        agreed = agreed_spec(specs, inputs)
        return [(*agreed[:axis], self.names, *agreed[axis:])]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        axis = from_front(self.axis, (*inputs[0], 1))
        together = common_multiple(chunks, inputs[0])
        return [(*together[:axis], 1, *together[axis:])]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        axis = from_front(self.axis, (*inputs[0], 1))
        return [(n, without(box, axis)) for n in range(box[axis].start, box[axis].stop)]

    def views(self, views: Views) -> Views:
        return [ts.stack(views, axis=self.axis)]


@dataclasses.dataclass(frozen=True, slots=True)
class Unstack:
    """The `count` parts of an axis, without that axis."""

    axis: int
    count: int

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        (shape,) = _count(inputs, 1)
        axis = from_front(self.axis, shape)
        if shape[axis] != self.count:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} does not have {self.count} parts"
            )
        if self.count > _MOST_PARTS:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} would become {self.count} arrays: no model "
                "has as many"
            )
        return [without(shape, axis)] * self.count

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        return Stack(self.axis)

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        return [
            without(full_spec(specs[0], inputs[0]), from_front(self.axis, inputs[0]))
        ] * self.count

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        return [without(chunks[0], from_front(self.axis, inputs[0]))] * self.count

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        axis = from_front(self.axis, inputs[0])
        return [(0, (*box[:axis], slice(part, part + 1), *box[axis:]))]

    def views(self, views: Views) -> Views:
        view = views[0]
        axis = from_front(self.axis, tuple(view.shape))
        return [view[ts.d[axis][i]] for i in range(self.count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Pad:
    """More elements of value `fill`, `widths[i]` of them before and after along axis `i`."""

    widths: tuple[tuple[int, int], ...]
    fill: float

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        (shape,) = _count(inputs, 1)
        if len(shape) != len(self.widths) or any(min(pair) < 0 for pair in self.widths):
            raise TreeMismatchError(f"{list(self.widths)} are no widths to pad {list(shape)} with")
        made = tuple(a + size + b for size, (a, b) in zip(shape, self.widths, strict=True))
        check_size(made)
        return [made]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        return Crop(self.widths, self.fill)

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        return [full_spec(specs[0], inputs[0])]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        whole = self.shapes(inputs)[0]
        dims = zip(chunks[0], whole, self.widths, strict=True)
        return [tuple(c if before % c == 0 else size for c, size, (before, _) in dims)]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        dims = zip(box, inputs[0], self.widths, strict=True)
        found = tuple(shifted(ends, -before, size) for ends, size, (before, _) in dims)
        return [(0, found)] if all(ends.start < ends.stop for ends in found) else []

    def views(self, views: Views) -> Views:
        view = views[0]
        for axis, widths in enumerate(self.widths):
            shape = tuple(view.shape)
            value = np.array(self.fill, view.dtype.numpy_dtype)
            before, after = (
                [ts.array(np.broadcast_to(value, replaced(shape, axis, width)), copy=False)]
                if width
                else []
                for width in widths
            )
            if before or after:
                view = ts.concat([*before, view, *after], axis=axis)
        return [view]


@dataclasses.dataclass(frozen=True, slots=True)
class Crop:
    """Without the outermost elements: what undoes `Pad`. It has no inverse of its own.

    Attributes:
      widths: as for `Pad`.
      fill: what is cut off is to hold nothing else, as `Pad` made it; None for anything.
    """

    widths: tuple[tuple[int, int], ...]
    fill: float | None = None

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        (shape,) = _count(inputs, 1)
        if len(shape) != len(self.widths) or any(
            min(a, b) < 0 or size < a + b for size, (a, b) in zip(shape, self.widths, strict=True)
        ):
            raise TreeMismatchError(f"{list(shape)} is not padded by {list(self.widths)}")
        return [tuple(size - a - b for size, (a, b) in zip(shape, self.widths, strict=True))]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        raise TreeMismatchError("a crop cannot be run backwards: what it cuts off is gone")

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        return [full_spec(specs[0], inputs[0])]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        whole = self.shapes(inputs)[0]
        dims = zip(chunks[0], whole, self.widths, strict=True)
        return [
            tuple(max(size if before % c else min(c, size), 1) for c, size, (before, _) in dims)
        ]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        pairs = zip(box, self.widths, strict=True)
        return [(0, tuple(shifted(ends, before) for ends, (before, _) in pairs))]

    def views(self, views: Views) -> Views:
        view = views[0]
        for axis, (before, after) in enumerate(self.widths):
            view = cut(view, axis, before, view.shape[axis] - after)
        return [view]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Values in memory, made of nothing that is stored."""

    values: np.ndarray

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        _count(inputs, 0)
        return [self.values.shape]

    def inverse(self, inputs: Sequence[Shape]) -> "Operation":
        raise TreeMismatchError("values that were given cannot be run backwards")

    def specs(self, specs: Specs, inputs: Sequence[Shape]) -> Specs:
        return [((),) * self.values.ndim]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        return [tuple(max(size, 1) for size in self.values.shape)]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> Sources:
        return []

    def views(self, views: Views) -> Views:
        return [ts.array(self.values, copy=False)]


Operation = Transpose | Reshape | Split | Concat | Stack | Unstack | Pad | Crop | Constant | Apply


def _count(inputs: Sequence[Shape], count: int) -> Sequence[Shape]:
    if len(inputs) != count:
        raise TreeMismatchError(f"{len(inputs)} arrays where {count} is needed")
    return inputs
