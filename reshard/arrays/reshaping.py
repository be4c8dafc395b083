"""`Reshape`: TensorStore has no reshape, so views are made of slices."""

import dataclasses
import math
from collections.abc import Sequence

import tensorstore as ts

from reshard.arrays.boxes import Box, Shape, check_size, full_spec, one_shape
from reshard.errors import TreeMismatchError
from reshard.sharding.mesh import Spec


@dataclasses.dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements, in row-major order, in another shape. No array has a size of 0."""

    shape: Shape

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        shape = one_shape(inputs)
        check_size(self.shape)
        if math.prod(shape) != math.prod(self.shape) or min(self.shape, default=0) < 0:
            raise TreeMismatchError(f"{list(shape)} cannot be reshaped to {list(self.shape)}")
        return [self.shape]

    def inverse(self, inputs: Sequence[Shape]) -> "Reshape":
        return Reshape(tuple(inputs[0]))

    def specs(self, specs: Sequence[Spec], inputs: Sequence[Shape]) -> list[Spec]:
        """The first of the merged or split dimensions keeps its mesh axes. The others lose theirs,
        because no spec can express them."""
        full = full_spec(specs[0], inputs[0])
        entries: list[tuple[str, ...]] = []
        for before, after in _groups(inputs[0], self.shape):
            first = full[before.start] if len(before) else ()
            entries += [first, *[()] * (len(after) - 1)][: len(after)]
        return [tuple(entries)]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        """A grid over the new shape that cuts no chunk."""
        sizes: list[int] = []
        for before, after in _groups(inputs[0], self.shape):
            part = slice(before.start, before.stop)
            new = self.shape[after.start : after.stop]
            sizes += _regrouped(chunks[0][part], inputs[0][part], new)
        return [tuple(sizes)]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> list[tuple[int, Box]]:
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

    def views(self, views: Sequence[ts.TensorStore]) -> list[ts.TensorStore]:
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
