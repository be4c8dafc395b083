"""Operations on whole arrays: they move elements, join and split arrays, or compute values.
Nothing here reads an array.

    inputs  ->  operation  ->  outputs        inverse(shapes of the inputs)
    1           Transpose      1              Transpose
    1           Reshape        1              Reshape
    1           Split          n              Concat
    n           Concat         1              Split
    n           Stack          1              Unstack
    1           Unstack        n              Stack
    1           Pad            1              Crop
    1           Interleave     1              Interleave
    1           Copies         n              Equal
    n           Equal          1              Copies
    1           Scale, Add     1              Scale, Add
    0, 1        Constant, Apply 1             none
    1           Cast            1             none
"""

import dataclasses
import itertools
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import ml_dtypes
import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import (
    Box,
    Shape,
    check_size,
    from_front,
    full_spec,
    one_shape,
    replaced,
    shape_text,
    whole_box,
    without,
)
from reshard.errors import ReshardError, TreeMismatchError
from reshard.sharding.mesh import Spec

_MOST_PARTS = 1 << 16  # of an array, far above any model
# The user's functions run one at a time.
_APPLYING = threading.Lock()
# Elements that are computed at once, so that they stay in the cache.
_BLOCK = 1 << 14

Shapes = Sequence[Shape]
Views = Sequence[ts.TensorStore]
Sources = list[tuple[int, Box]]
Offsets = Iterable[tuple[int, Sequence[int]]]
# Casts the values of a box.
Rounded = Callable[[np.ndarray, Box], np.ndarray]


class _Boxes:
    """Operations whose outputs consist of boxes of their inputs, and of padding.

    `shapes` returns the shapes of the outputs, and raises TreeMismatchError if the operation does
    not apply. `inverse` is the operation that undoes it on inputs of these shapes.
    """

    __slots__ = ()

    names: tuple[str, ...] = ()

    def shapes(self, inputs: Shapes) -> list[Shape]:
        raise NotImplementedError

    def origins(self, rank: int) -> Sequence[int | None]:
        """For each axis of the outputs its axis of the inputs, which have this rank; None for a new
        axis along which the inputs are stacked."""
        return range(rank)

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        """The inputs, by their numbers, that a box of output `part` may have elements of. For each
        axis of an input: its first place minus that in the output, or the place on an axis that
        the output lacks."""
        return [(0, (0,) * len(inputs[0]))]

    def specs(self, specs: Sequence[Spec], inputs: Shapes) -> list[Spec]:
        """Partition specs of the outputs, of full rank. An axis in which the specs of the inputs
        differ is not partitioned."""
        full = [full_spec(spec, shape) for spec, shape in zip(specs, inputs, strict=True)]
        agreed = [each[0] if len({*each}) == 1 else () for each in zip(*full, strict=True)]
        axes = self.origins(len(inputs[0]))
        made = tuple(self.names if axis is None else agreed[axis] for axis in axes)
        return [made] * len(self.shapes(inputs))

    def chunks(self, chunks: Sequence[Shape], inputs: Shapes) -> list[Shape]:
        """For each output the finest known grid that cuts no chunk of an input."""
        steps = [math.lcm(*sizes) for sizes in zip(*chunks, strict=True)]
        axes, made, cut = self.origins(len(steps)), self.shapes(inputs), set[int]()
        for part, shape in enumerate(made):
            for _, offset in self.offsets(part, whole_box(shape), inputs):
                cut |= {axis for axis, step in enumerate(steps) if offset[axis] % step}
        return [
            tuple(
                1 if axis is None else max(size if axis in cut else min(steps[axis], size), 1)
                for axis, size in zip(axes, shape, strict=True)
            )
            for shape in made
        ]

    def sources(self, part: int, box: Box, inputs: Shapes) -> Sources:
        """The boxes of inputs, by their numbers, that a box of output `part` consists of."""
        found = []
        axes = self.origins(len(inputs[0]))
        for number, offset in self.offsets(part, box, inputs):
            source = [slice(place, place + 1) for place in offset]
            for ends, axis in zip(box, axes, strict=True):
                if axis is not None:
                    by, size = offset[axis], inputs[number][axis]
                    source[axis] = slice(max(ends.start + by, 0), min(ends.stop + by, size))
            if all(ends.start < ends.stop for ends in source):
                found.append((number, tuple(source)))
        return found


class _Moving(_Boxes):
    """Such operations without computed elements."""

    __slots__ = ()

    def views(self, views: Views) -> list[ts.TensorStore]:
        """Views of the outputs."""
        inputs = [tuple(view.shape) for view in views]
        axes, made = self.origins(len(inputs[0])), []
        for part, shape in enumerate(self.shapes(inputs)):
            layers = []
            for number, offset in self.offsets(part, whole_box(shape), inputs):
                new = ts.Dim(inclusive_min=number, size=1)
                domain = ts.IndexDomain([new if axis is None else ts.Dim() for axis in axes])
                places = [ts.OutputIndexMap(offset=place) for place in offset]
                for dim, axis in enumerate(axes):
                    if axis is not None:
                        places[axis] = ts.OutputIndexMap(offset=offset[axis], input_dimension=dim)
                layers.append(views[number][ts.IndexTransform(domain, output=places)])
            whole = layers[0] if len(layers) == 1 else ts.overlay(layers)
            made.append(whole[whole_box(shape)])
        return made


def _along(shape: Shape, axis: int, place: int) -> Shape:
    """A place along an axis, with the first place on all others."""
    return replaced((0,) * len(shape), axis % len(shape), place)


@dataclasses.dataclass(frozen=True, slots=True)
class Transpose(_Moving):
    """Axes in another order: axis `i` of the output is axis `axes[i]` of the input."""

    axes: tuple[int, ...]

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        if sorted(self.axes) != list(range(len(shape))):
            raise TreeMismatchError(
                f"axes {list(self.axes)} are not an order of all axes of {list(shape)}, "
                f"which are {list(range(len(shape)))}"
            )
        return [tuple(shape[axis] for axis in self.axes)]

    def inverse(self, inputs: Shapes) -> "Operation":
        return Transpose(tuple(self.axes.index(axis) for axis in range(len(self.axes))))

    def origins(self, rank: int) -> Sequence[int]:
        return self.axes


@dataclasses.dataclass(frozen=True, slots=True)
class Split(_Moving):
    """Parts of these sizes along an axis."""

    axis: int
    sizes: tuple[int, ...]

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        axis = from_front(self.axis, shape)
        if shape[axis] != sum(self.sizes) or min(self.sizes, default=0) < 0:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} cannot be split into {list(self.sizes)}: "
                f"positive sizes must add up to {shape[axis]}"
            )
        return [replaced(shape, axis, size) for size in self.sizes]

    def inverse(self, inputs: Shapes) -> "Operation":
        return Concat(self.axis)

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        return [(0, _along(inputs[0], self.axis, sum(self.sizes[:part])))]


@dataclasses.dataclass(frozen=True, slots=True)
class Concat(_Moving):
    """Arrays one after another along an axis."""

    axis: int

    def shapes(self, inputs: Shapes) -> list[Shape]:
        axis = from_front(self.axis, inputs[0])
        others = {replaced(shape, axis, 0) for shape in inputs if len(shape) == len(inputs[0])}
        if len(others) > 1 or len({len(shape) for shape in inputs}) > 1:
            raise TreeMismatchError(
                f"{shape_text(inputs)} cannot be joined along axis {self.axis}: "
                "their other axes must be equal"
            )
        return [replaced(inputs[0], axis, sum(shape[axis] for shape in inputs))]

    def inverse(self, inputs: Shapes) -> "Operation":
        return Split(self.axis, tuple(shape[self.axis] for shape in inputs))

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        starts = itertools.accumulate((shape[self.axis] for shape in inputs), initial=0)
        for number, start in zip(range(len(inputs)), starts, strict=False):
            yield number, _along(inputs[0], self.axis, -start)


@dataclasses.dataclass(frozen=True, slots=True)
class Stack(_Moving):
    """Arrays of one shape along a new axis, which is partitioned over the mesh axes `names`."""

    axis: int
    names: tuple[str, ...] = ()

    def shapes(self, inputs: Shapes) -> list[Shape]:
        if len(set(inputs)) != 1:
            raise TreeMismatchError(
                f"{shape_text(inputs)} cannot be stacked: their shapes must be equal"
            )
        shape = inputs[0]
        axis = from_front(self.axis, (*shape, 1))
        made = (*shape[:axis], len(inputs), *shape[axis:])
        check_size(made)
        return [made]

    def inverse(self, inputs: Shapes) -> "Operation":
        return Unstack(self.axis, len(inputs))

    def origins(self, rank: int) -> Sequence[int | None]:
        axis = self.axis % (rank + 1)
        return [*range(axis), None, *range(axis, rank)]

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        ends = box[self.axis]
        return [(number, (0,) * len(inputs[0])) for number in range(ends.start, ends.stop)]


@dataclasses.dataclass(frozen=True, slots=True)
class Unstack(_Moving):
    """The `count` parts of an axis, without that axis."""

    axis: int
    count: int

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        axis = from_front(self.axis, shape)
        if shape[axis] != self.count:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} makes {shape[axis]} arrays, not {self.count}"
            )
        if self.count > _MOST_PARTS:
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} would become {self.count} arrays, more than "
                "any model has"
            )
        return [without(shape, axis)] * self.count

    def inverse(self, inputs: Shapes) -> "Operation":
        return Stack(self.axis)

    def origins(self, rank: int) -> Sequence[int]:
        return without(tuple(range(rank)), self.axis % rank)

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        return [(0, _along(inputs[0], self.axis, part))]


@dataclasses.dataclass(frozen=True, slots=True)
class Pad(_Moving):
    """More elements of value `fill`, `widths[i]` of them before and after along axis `i`."""

    widths: tuple[tuple[int, int], ...]
    fill: float

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        if len(shape) != len(self.widths) or any(min(pair) < 0 for pair in self.widths):
            raise TreeMismatchError(
                f"{list(self.widths)} cannot pad {list(shape)}: "
                "each axis needs two widths, of 0 or more"
            )
        made = tuple(a + size + b for size, (a, b) in zip(shape, self.widths, strict=True))
        check_size(made)
        return [made]

    def inverse(self, inputs: Shapes) -> "Operation":
        return Crop(self.widths, self.fill)

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        return [(0, [-before for before, _ in self.widths])]

    def views(self, views: Views) -> list[ts.TensorStore]:
        view = views[0]
        value = np.array(self.fill, view.dtype.numpy_dtype)
        for axis, (before, after) in enumerate(self.widths):  # all at once has 3 ** axes layers
            if before or after:
                shape = replaced(tuple(view.shape), axis, before + view.shape[axis] + after)
                padding = ts.array(np.broadcast_to(value, shape), copy=False)
                view = ts.overlay([padding, view[ts.d[axis].translate_by[before]]])
        return [view]


@dataclasses.dataclass(frozen=True, slots=True)
class Crop(_Moving):
    """An array without its outermost elements: the inverse of `Pad`, without an inverse itself.

    Attributes:
      widths: as for `Pad`.
      fill: the only value that the cut elements may have; None for any.
    """

    widths: tuple[tuple[int, int], ...]
    fill: float | None = None

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        if len(shape) != len(self.widths) or any(
            min(a, b) < 0 or size < a + b for size, (a, b) in zip(shape, self.widths, strict=True)
        ):
            raise TreeMismatchError(
                f"{list(shape)} cannot be the result of padding by {list(self.widths)}"
            )
        return [tuple(size - a - b for size, (a, b) in zip(shape, self.widths, strict=True))]

    def inverse(self, inputs: Shapes) -> NoReturn:
        raise TreeMismatchError("a crop cannot be inverted: the cut elements are lost")

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        return [(0, [before for before, _ in self.widths])]


@dataclasses.dataclass(frozen=True, slots=True)
class Interleave(_Moving):
    """Blocks of an axis, each of which is `parts` equal parts, with the parts interleaved:

        [a0 a1 a2 b0 b1 b2]  ->  [a0 b0 a1 b1 a2 b2]        parts = 2

    Attributes:
      axis: the axis.
      parts: the number of parts of a block.
      block: the size of a block; the whole axis if None.
      undo: whether interleaved elements go back into parts.
    """

    axis: int
    parts: int
    block: int | None = None
    undo: bool = False

    def __str__(self) -> str:
        blocks = "" if self.block is None else f" in blocks of {self.block}"
        verb = "deinterleaved into" if self.undo else "interleaved from"
        return f"axis {self.axis} {verb} {self.parts} parts{blocks}"

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        size = shape[from_front(self.axis, shape)]
        block = self._block(size)
        if self.parts < 1 or block < 1 or size % block or block % self.parts:
            blocks = "" if self.block is None else f"blocks of {self.block}, each of "
            raise TreeMismatchError(
                f"axis {self.axis} of {list(shape)} cannot be divided into {blocks}{self.parts} "
                "equal parts"
            )
        return [shape]

    def _block(self, size: int) -> int:
        return size if self.block is None else self.block

    def inverse(self, inputs: Shapes) -> "Operation":
        return dataclasses.replace(self, undo=not self.undo)

    def chunks(self, chunks: Sequence[Shape], inputs: Shapes) -> list[Shape]:
        axis = from_front(self.axis, inputs[0])
        size = inputs[0][axis]
        step = min(math.lcm(chunks[0][axis], self._block(size)), size)
        return [replaced(chunks[0], axis, step)]

    def sources(self, part: int, box: Box, inputs: Shapes) -> Sources:
        """Whole blocks."""
        axis = from_front(self.axis, inputs[0])
        block, ends = self._block(inputs[0][axis]), box[axis]
        start, stop = ends.start // block * block, -(-ends.stop // block) * block
        return [(0, replaced(box, axis, slice(start, stop)))]

    def views(self, views: Views) -> list[ts.TensorStore]:
        shape = tuple(views[0].shape)
        self.shapes([shape])
        axis = from_front(self.axis, shape)
        rows = self._block(shape[axis]) // self.parts
        form = (-1, rows, self.parts) if self.undo else (-1, self.parts, rows)
        order = np.arange(shape[axis]).reshape(form).swapaxes(1, 2).reshape(-1)
        return [views[0][ts.d[axis][order]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements, in row-major order, in another shape. No array has a size of 0.
    TensorStore has no reshape, so views are made of slices."""

    shape: Shape

    def shapes(self, inputs: Shapes) -> list[Shape]:
        shape = one_shape(inputs)
        check_size(self.shape)
        if math.prod(shape) != math.prod(self.shape) or min(self.shape, default=0) < 0:
            raise TreeMismatchError(f"{list(shape)} cannot be reshaped to {list(self.shape)}")
        return [self.shape]

    def inverse(self, inputs: Shapes) -> "Reshape":
        return Reshape(tuple(inputs[0]))

    def specs(self, specs: Sequence[Spec], inputs: Shapes) -> list[Spec]:
        """The first of the merged or split dimensions keeps its mesh axes. The others lose theirs,
        because no spec can express them."""
        full = full_spec(specs[0], inputs[0])
        entries: list[tuple[str, ...]] = []
        for before, after in _groups(inputs[0], self.shape):
            first = full[before.start] if len(before) else ()
            entries += [first, *[()] * (len(after) - 1)][: len(after)]
        return [tuple(entries)]

    def chunks(self, chunks: Sequence[Shape], inputs: Shapes) -> list[Shape]:
        """A grid over the new shape that cuts no chunk."""
        sizes: list[int] = []
        for before, after in _groups(inputs[0], self.shape):
            part = slice(before.start, before.stop)
            new = self.shape[after.start : after.stop]
            sizes += _regrouped(chunks[0][part], inputs[0][part], new)
        return [tuple(sizes)]

    def sources(self, part: int, box: Box, inputs: Shapes) -> Sources:
        """The smallest box of the input that holds all elements of a box."""
        found: list[slice] = []
        for before, after in _groups(self.shape, inputs[0]):
            if len(before) == len(after) == 1:
                found.append(box[before.start])
                continue
            first = last = 0
            for axis in before:
                first = first * self.shape[axis] + box[axis].start
                last = last * self.shape[axis] + box[axis].stop - 1
            own: list[slice] = []
            for axis in reversed(after):
                size = inputs[0][axis]
                first, start = divmod(first, size)
                last, end = divmod(last, size)
                # Between two rows of the axes before it, this axis is covered completely.
                own.append(slice(start, end + 1) if first == last else slice(0, size))
            found += own[::-1]
        return [(0, tuple(found))]

    def views(self, views: Views) -> list[ts.TensorStore]:
        """A view made of slices along the merged or split dimensions."""
        view = views[0]
        # Merge first: with the axes of both shapes there may be more axes than are allowed.
        groups, axis = _groups(tuple(view.shape), self.shape), 0
        for before, after in groups:
            for _ in before[1:]:
                rows = [view[ts.d[axis][i]] for i in range(view.shape[axis])]
                view = rows[0] if len(rows) == 1 else ts.concat(rows, axis=axis)
            if not len(after):
                view = view[ts.d[axis][0]]
            elif len(before):
                axis += 1
        axis = 0
        for before, after in groups:
            if not len(before):
                view = view[ts.d[axis][ts.newaxis]]
            for place in after[:-1]:
                step = view.shape[axis] // self.shape[place]
                starts = range(0, view.shape[axis], step)
                rows = [view[ts.d[axis][s : s + step]][ts.d[axis].translate_to[0]] for s in starts]
                view = ts.stack(rows, axis=axis)
                axis += 1
            axis += 1 if len(after) else 0
        return [view]


def _groups(old: Shape, new: Shape) -> list[tuple[range, range]]:
    """The smallest groups of neighbouring dimensions with the same number of elements before and
    after a reshape. No size is 0. Dimensions of size 1 are groups of their own if possible."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first = i, j
        a = old[i] if i < len(old) else 1
        b = new[j] if j < len(new) else 1
        if i < len(old) and (j == len(new) or (a == 1 != b)):
            i += 1
        elif j < len(new) and (i == len(old) or (b == 1 != a)):
            j += 1
        else:
            i, j = i + 1, j + 1
            while a != b:
                if a < b:
                    a, i = a * old[i], i + 1
                else:
                    b, j = b * new[j], j + 1
        groups.append((range(first[0], i), range(first[1], j)))
    return groups


def _regrouped(chunk: Shape, old: Shape, new: Shape) -> Sequence[int]:
    """The grid over a group of dimensions that cuts no chunk, from the grid before a reshape."""
    if not len(old) == len(new) == 1:
        # Chunks of one row of the first dimensions that are whole in the last: runs of elements.
        lead = True
        for size, whole in zip(reversed(chunk), reversed(old), strict=True):
            if whole % size or (not lead and size != 1):
                return new
            lead = lead and size == whole
        run, made = math.prod(chunk), []
        for size in reversed(new):
            made.append(math.gcd(run, size))
            if made[-1] not in (run, size):
                return new
            run //= made[-1]
        return made[::-1]
    return chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Copies(_Moving):
    """An array, `count` times."""

    count: int

    def __str__(self) -> str:
        return f"copied to {self.count} paths"

    def shapes(self, inputs: Shapes) -> list[Shape]:
        if not 0 < self.count <= _MOST_PARTS:
            raise TreeMismatchError(
                f"the number of copies must be 1 to {_MOST_PARTS}, not {self.count}"
            )
        return [one_shape(inputs)] * self.count

    def inverse(self, inputs: Shapes) -> "Operation":
        return Equal(self.count)


def computed_view(
    operation: "Computed", views: Views, chunk: Shape, dtype: np.dtype, paths: Sequence[str] = ()
) -> ts.TensorStore:
    """A view of the output of an operation that is read as `dtype`. It is computed in chunks when
    it is read. Errors name the `paths` of the inputs."""
    made_dtype = AFFINE if isinstance(operation, _Affine) else views[0].dtype.numpy_dtype

    def computed(values: Sequence[np.ndarray], _: Box) -> np.ndarray:
        given = [each.reshape(-1) for each in values]
        flat = np.empty(given[0].size, made_dtype)
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            try:
                with np.errstate(all="ignore"):
                    operation.compute([each[block] for each in given], flat[block], dtype)
            except TreeMismatchError as error:
                raise TreeMismatchError(error.summary, paths, error.hints) from error
        return flat.reshape(values[0].shape)

    def reads(domain: ts.IndexDomain) -> list[ts.Future]:
        return [view[domain].read() for view in views]

    return _computed_view(reads, computed, made_dtype, tuple(views[0].shape), chunk)


def _computed_view(
    reads: Callable[[ts.IndexDomain], list[ts.Future]],
    computed: Callable[[Sequence[np.ndarray], Box], np.ndarray],
    dtype: np.dtype,
    shape: Shape,
    chunk: Shape,
) -> ts.TensorStore:
    """A view whose chunks are computed from what `reads` reads for a domain."""

    def read(domain: ts.IndexDomain, into: np.ndarray, _: object) -> ts.Future:
        promise, future = ts.Promise.new()
        begun = reads(domain)
        left = threading.Semaphore(len(begun) - 1)

        def done(_: object) -> None:
            if left.acquire(blocking=False):
                return  # another read has not ended
            try:
                values = [np.asarray(each.result()) for each in begun]
                into[...] = computed(values, domain.index_exp)
            except BaseException as error:
                promise.set_exception(error)
            else:
                promise.set_result(None)

        for each in begun:
            each.add_done_callback(done)
        return future

    layout = ts.ChunkLayout(read_chunk_shape=chunk)
    return ts.virtual_chunked(read, dtype=ts.dtype(dtype), shape=shape, chunk_layout=layout)


@dataclasses.dataclass(frozen=True, slots=True)
class Equal(_Boxes):
    """Arrays that must be equal, bit for bit, as one. Where they are not, reading fails."""

    count: int
    exact = True

    def __str__(self) -> str:
        return f"merged from {self.count} equal arrays"

    def shapes(self, inputs: Shapes) -> list[Shape]:
        if len(inputs) != self.count or len({*inputs}) != 1:
            raise TreeMismatchError(f"arrays of {shape_text(inputs)} cannot be equal")
        return [inputs[0]]

    def inverse(self, inputs: Shapes) -> "Operation":
        return Copies(self.count)

    def offsets(self, part: int, box: Box, inputs: Shapes) -> Offsets:
        return [(number, (0,) * len(shape)) for number, shape in enumerate(inputs)]

    def compute(self, values: Sequence[np.ndarray], into: np.ndarray, dtype: np.dtype) -> None:
        first = np.ascontiguousarray(values[0])
        for other in values[1:]:
            different = first.view(np.uint8) != np.ascontiguousarray(other).view(np.uint8)
            if different.any():
                raise TreeMismatchError("arrays that must be equal differ")
        into[...] = first


# The dtype of what `Scale` and `Add` compute.
AFFINE = np.dtype(np.float64)


class _Affine(_Boxes):
    """Arithmetic with a constant in float64. For values of at most 16 bits the constant is a
    float32, so that their product is exact and only the result is rounded."""

    __slots__ = ()

    constant: float
    arithmetic: Callable[..., np.ndarray]
    # Whether the inverse gives back the same bits. If not, results are rounded.
    exact: bool
    # Whether an element that becomes zero is no error.
    zeroes: bool = True

    def shapes(self, inputs: Shapes) -> list[Shape]:
        if not self.constant or not math.isfinite(self.constant):
            raise TreeMismatchError(
                f"an array cannot be {self}: the number must be finite, and not 0"
            )
        return [one_shape(inputs)]

    def compute(self, values: Sequence[np.ndarray], into: np.ndarray, dtype: np.dtype) -> None:
        given = values[0].astype(into.dtype)
        narrow = dtype.itemsize <= 2
        constant = float(np.float32(self.constant)) if narrow else self.constant
        into[...] = self.arithmetic(given, constant)
        # In this range nothing can overflow or become zero, and no power of two rounds.
        sizes, limits = np.abs(into), ml_dtypes.finfo(dtype)
        factor = abs(self.constant) if self.exact else 1.0
        lowest = np.min(sizes, where=sizes > 0, initial=np.inf) * min(1, 1 / factor)
        if sizes.max() * max(1, 1 / factor) <= float(limits.max) and (
            self.zeroes
            or (
                lowest >= float(limits.smallest_normal)
                and np.count_nonzero(sizes) == np.count_nonzero(given)
            )
        ):
            return
        before, after = values[0].astype(dtype), into.astype(dtype)
        lost = np.count_nonzero(np.isfinite(before) & ~np.isfinite(after))
        if lost:
            raise TreeMismatchError(f"elements {self} overflow in {dtype.name}")
        if self.zeroes:
            return
        same = (before == 0) == (after == 0)
        if self.exact:
            expected = self.arithmetic(before.astype(into.dtype), constant)
            same &= after.astype(into.dtype) == expected
        lost = np.count_nonzero(~same & (before == before))
        if lost:
            raise TreeMismatchError(
                f"elements {self} underflow in {dtype.name}, which "
                + ("rounds them" if self.exact else "makes them zero"),
                hints=["`rounds = true` in the rule's `scale` allows that"],
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Scale(_Affine):
    """Values times a factor. A power of two is exact: underflow is an error, unless it `rounds`.
    So is an element that becomes zero by any factor. Overflow is always one."""

    constant: float
    rounds: bool = False

    arithmetic = staticmethod(np.multiply)

    def __str__(self) -> str:
        return f"scaled by {self.constant}"

    @property
    def exact(self) -> bool:
        return not self.rounds and abs(math.frexp(self.constant)[0]) == 0.5

    @property
    def zeroes(self) -> bool:
        return self.rounds

    def inverse(self, inputs: Shapes) -> "Operation":
        return Scale(1 / self.constant, self.rounds)


@dataclasses.dataclass(frozen=True, slots=True)
class Add(_Affine):
    """Values plus a constant. That rounds; overflow is an error."""

    constant: float

    arithmetic = staticmethod(np.add)
    exact = False

    def __str__(self) -> str:
        return f"increased by {self.constant}"

    def inverse(self, inputs: Shapes) -> "Operation":
        return Add(-self.constant)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Values in memory."""

    values: np.ndarray

    def shapes(self, inputs: Shapes) -> list[Shape]:
        return [self.values.shape]

    def inverse(self, inputs: Shapes) -> NoReturn:
        raise TreeMismatchError("values that are not from the checkpoint cannot be converted back")

    def sources(self, part: int, box: Box, inputs: Shapes) -> Sources:
        return []

    def views(self, views: Views) -> list[ts.TensorStore]:
        return [ts.array(self.values, copy=False)]


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
    """The result of a function `package.module:function` on a whole array, NumPy to NumPy.

    `shape` and `dtype` are those of the input if they are None. A job can only be resumed with the
    same loading of the function, because two loadings cannot be compared."""

    function: Callable[[np.ndarray], np.ndarray] = dataclasses.field(repr=False)
    name: str
    shape: Shape | None = None
    dtype: np.dtype | None = None
    loaded: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    def __str__(self) -> str:
        return f"apply {self.name}"

    def shapes(self, inputs: Shapes) -> list[Shape]:
        made = inputs[0] if self.shape is None else self.shape
        check_size(made)
        return [made]

    def inverse(self, inputs: Shapes) -> NoReturn:
        raise TreeMismatchError(f"the function `{self.name}` has no inverse")

    def specs(self, specs: Sequence[Spec], inputs: Shapes) -> list[Spec]:
        """An array of another shape is not partitioned."""
        (made,) = self.shapes(inputs)
        return [full_spec(specs[0] if made == inputs[0] else (), made)]

    def chunks(self, chunks: Sequence[Shape], inputs: Shapes) -> list[Shape]:
        return [tuple(max(size, 1) for size in self.shapes(inputs)[0])]

    def sources(self, part: int, box: Box, inputs: Shapes) -> Sources:
        return [(0, whole_box(inputs[0]))]

    def view(
        self, view: ts.TensorStore, dtype: np.dtype, rounded: Rounded, _: Shape
    ) -> ts.TensorStore:
        """A view of the function's result. The function is called once for each batch that reads
        it, with values of `dtype` that `rounded` makes from those of `view`."""
        (shape,) = self.shapes([tuple(view.shape)])
        new_dtype = dtype if self.dtype is None else self.dtype

        def computed(values: Sequence[np.ndarray], _: Box) -> np.ndarray:
            return self._made(rounded(values[0], whole_box(values[0].shape)), shape, new_dtype)

        chunk = tuple(max(size, 1) for size in shape)
        return _computed_view(lambda _: [view.read()], computed, new_dtype, shape, chunk)

    def _made(self, values: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
        given = f"{values.dtype.name}{list(values.shape)}"
        with _APPLYING:
            try:
                made = np.asarray(self.function(values))
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise ReshardError(
                    f"the function `{self.name}` failed on {given}", [told]
                ) from error
        made = made.astype(made.dtype.newbyteorder("="), copy=False)
        if made.shape != shape or made.dtype != dtype:
            raise TreeMismatchError(
                f"the function `{self.name}` returned {made.dtype.name}{list(made.shape)} for "
                f"{given}, expected {dtype.name}{list(shape)}",
                hints=[f"apply = {{ function = '{self.name}', shape = [...], dtype = '...' }}"],
            )
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class Cast(_Boxes):
    """An array in the dtype that it is cast to, which a second cast rounds again."""

    def view(
        self, view: ts.TensorStore, dtype: np.dtype, rounded: Rounded, chunk: Shape
    ) -> ts.TensorStore:
        """A view of the values of `dtype` that `rounded` makes from those of `view`."""

        def computed(values: Sequence[np.ndarray], box: Box) -> np.ndarray:
            return rounded(values[0], box)

        shape = tuple(view.shape)
        return _computed_view(lambda domain: [view[domain].read()], computed, dtype, shape, chunk)


Computed = Equal | Scale | Add
Moving = Transpose | Reshape | Split | Concat | Stack | Unstack | Pad | Crop | Interleave
Operation = Moving | Copies | Computed | Apply
# What makes a derived array.
Made = Operation | Constant | Cast
