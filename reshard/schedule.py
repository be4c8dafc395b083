"""In what order boxes are carried over, and how many of them at once. Pure, as the planner is."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from reshard.planner import ArrayPlan, Box

# Beyond this, more bytes in flight make no core busier; they only touch more memory.
IN_FLIGHT_PER_CORE = 64 << 20
# What handling a box takes beside its bytes: it matters for checkpoints of many small arrays.
BOX_OVERHEAD = 1 << 14


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Boxes that are read together and then written in one transaction.

    Attributes:
      boxes: pairs of an array's plan and one of its boxes.
      charge: bytes of memory that the batch takes.
    """

    boxes: tuple[tuple[ArrayPlan, Box], ...]
    charge: int


def batches(arrays: Sequence[ArrayPlan], max_memory: int, cores: int) -> Iterator[Batch]:
    """All boxes in order, in batches that fit into memory two at a time where they can."""
    limit = min(max_memory, IN_FLIGHT_PER_CORE * cores) // 2
    boxes: list[tuple[ArrayPlan, Box]] = []
    charge = 0
    for array in arrays:
        for box in array.boxes():
            cost = array.box_charge(box)
            if boxes and (charge + BOX_OVERHEAD + cost > limit or array.serial):
                yield Batch(tuple(boxes), charge)
                boxes, charge = [], 0
            boxes.append((array, box))
            charge += cost + (BOX_OVERHEAD if charge else 0)
    if boxes:
        yield Batch(tuple(boxes), charge)


def peak_memory(charges: Sequence[int], max_memory: int) -> int:
    """Most bytes in flight: one batch is read while the one before it is written, if both fit."""
    peak = max(charges, default=0)
    for one, other in itertools.pairwise(charges):
        if one + other <= max_memory:
            peak = max(peak, one + other)
    return peak
