"""Stacks of layers: which axis the layers are along on either side. Pure arithmetic on shapes.

`nn.scan` and `nn.vmap` put them on any axis of a weight, the same one for a whole collection, and
so does `nnx.vmap`. Neither notes which.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from reshard.arrays.boxes import Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The axis of the layers, before and after.

    Attributes:
      before: where it is; from the end if it is negative.
      after: where it goes.
    """

    before: int
    after: int

    def __str__(self) -> str:
        return f"axis {self.before} to {self.after}"

    def order(self, rank: int) -> tuple[int, ...]:
        """The axes of an array of this rank, as `Transpose` takes them."""
        axes = list(range(rank))
        if axes:
            axes.insert(self.after % rank, axes.pop(self.before % rank))
        return tuple(axes)


NO_MOVE = Move(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A weight on either side.

    Attributes:
      before: its shape; of each part, if it is made of several of one shape.
      after: its shape on the other side.
      parts: how many are joined along the last axis that is not that of the layers.
    """

    before: Shape
    after: Shape
    parts: int = 1

    def joined_at(self, move: Move) -> int:
        """The axis that parts are joined along, from the end, before the move."""
        return -2 if move.before % len(self.before) == len(self.before) - 1 else -1

    def fits(self, move: Move) -> bool:
        """Whether the move makes the first shape the second."""
        shape = list(self.before)
        if self.parts > 1:
            shape[self.joined_at(move)] *= self.parts
        return tuple(shape[axis] for axis in move.order(len(shape))) == self.after


def moves(weights: Sequence[Placed]) -> list[Move]:
    """The moves of one axis that fit all weights, and that has the same size in all. Of those that
    come to the same, one. Axes counted from the end are looked at only beside the first."""
    rank = min(len(weight.before) for weight in weights)
    if rank < (2 if any(weight.parts > 1 for weight in weights) else 1):
        return []
    found: dict[tuple[tuple[tuple[int, ...], int], ...], Move] = {}
    for before, after in itertools.product([*range(rank), *range(-rank, 0)], repeat=2):
        move = Move(before, after)
        if min(before, after) < 0 and before != 0 != after:
            continue
        if len({weight.before[before] for weight in weights}) == 1 and all(
            weight.fits(move) for weight in weights
        ):
            effect = (
                (move.order(len(w.before)), w.joined_at(move) if w.parts > 1 else 0)
                for w in weights
            )
            found.setdefault(tuple(effect), move)
    return list(found.values())
