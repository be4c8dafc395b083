"""Stacks of layers: which axis the layers are along on either side. Pure arithmetic on shapes.

`nn.scan` and `nn.vmap` put them on any axis of a weight, the same one for a whole collection, and
so does `nnx.vmap`. Neither notes which.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from reshard.boxes import Shape


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


def moves(pairs: Sequence[tuple[Shape, Shape]]) -> list[Move]:
    """The moves of one axis that make the first shape of every pair the second. Of those that come
    to the same for all of them, one."""
    rank = min(len(before) for before, _ in pairs)
    found: dict[tuple[tuple[int, ...], ...], Move] = {}
    places = [*range(rank), *range(-rank, 0)]
    for before, after in itertools.product(places, repeat=2):
        move = Move(before, after)
        orders = []
        for shape, wanted in pairs:
            order = move.order(len(shape))
            if tuple(shape[axis] for axis in order) != wanted:
                break
            orders.append(order)
        else:
            found.setdefault(tuple(orders), move)
    return list(found.values())
