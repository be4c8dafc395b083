"""In what order boxes are carried over, and how many of them at once. Pure, as the planner is."""

import collections
import dataclasses
import math
import os
from collections.abc import Hashable, Iterator, Sequence

from reshard.engine.plan import BOX_OVERHEAD, ArrayPlan, Box
from reshard.tree import Path

# Beyond this, more bytes in flight make no core busier; they only touch more memory.
IN_FLIGHT_PER_CORE = 128 << 20
# Batches in memory together: one is read while the ones before it are encoded and written. With
# fewer, cores wait for the last chunk of a batch; with more, batches are too small.
WINDOW = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Boxes that are read together and then written in one transaction.

    Attributes:
      boxes: pairs of an array's plan and one of its boxes.
      charge: bytes of memory that the batch takes.
    """

    boxes: tuple[tuple[ArrayPlan, Box], ...]
    charge: int


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def room(max_memory: int) -> int:
    """Bytes of `max_memory` that several batches may hold together; one batch may hold it all. The
    rest is for what the allocator keeps of memory that was freed."""
    return max_memory - max_memory // 4


def batches(arrays: Sequence[ArrayPlan], max_memory: int, cores: int) -> Iterator[Batch]:
    """All boxes in order, in batches of which `WINDOW` fit into memory where they can.

    Boxes of arrays that share source chunks are in one batch, which decodes such a chunk once.
    """
    limit = min(room(max_memory), IN_FLIGHT_PER_CORE * cores) // WINDOW
    boxes: list[tuple[ArrayPlan, Box]] = []
    charge = 0
    for group in families(arrays):
        for together in zip(*(array.boxes() for array in group), strict=True):
            pairs = list(zip(group, together, strict=True))
            cost = _charge(pairs)
            if boxes and (charge + BOX_OVERHEAD + cost > limit or group[0].serial):
                yield Batch(tuple(boxes), charge)
                boxes, charge = [], 0
            boxes += pairs
            charge += cost + (BOX_OVERHEAD if charge else 0)
    if boxes:
        yield Batch(tuple(boxes), charge)


def _charge(pairs: Sequence[tuple[ArrayPlan, Box]]) -> int:
    """Bytes of memory that boxes take which are read together: what they share is decoded once."""
    charge = sum(array.box_charge(box) for array, box in pairs) + BOX_OVERHEAD * (len(pairs) - 1)
    if len(pairs) == 1:
        return charge
    (array, box), *_ = pairs
    elements = math.prod(part.stop - part.start for part in box)
    alone = sum(math.ceil(elements * other.layout.amplified) for other, _ in pairs)
    twice = max(alone - math.ceil(elements * array.layout.decoded), 0)
    return charge - 2 * twice * array.layout.source_itemsize


def shared_passes(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """The same plans. Of arrays that are read together, each reads its part of what they share."""
    passes: dict[Path, float] = {}
    for group in families(arrays):
        if len(group) > 1:
            each = group[0].layout.decoded / len(group)
            passes |= {array.layout.path: min(array.passes, each) for array in group}
    return [
        dataclasses.replace(array, passes=passes[array.layout.path])
        if array.layout.path in passes
        else array
        for array in arrays
    ]


def families(arrays: Sequence[ArrayPlan]) -> list[list[ArrayPlan]]:
    """Arrays that are read box by box together, in the place of the first of them; all others, and
    those whose boxes are not in the same places, on their own. Without those that are moved."""
    groups: dict[Hashable, list[ArrayPlan]] = {}
    for number, array in enumerate(arrays):
        if array.moved:
            continue
        layout = array.layout
        shared = layout.family is not None and not array.serial
        key = (layout.family, layout.shape, array.box) if shared else number
        groups.setdefault(key, []).append(array)
    # Parts that are there twice are read twice: memory is planned for a family at a time.
    return [
        group[start : start + group[0].layout.together]
        for group in groups.values()
        for start in range(0, len(group), group[0].layout.together)
    ]


def peak_memory(charges: Sequence[int], max_memory: int) -> int:
    """Most bytes in flight, for batches of these charges: each is begun when, with what is still
    under way of the ones before it, it is within `room(max_memory)` and within `WINDOW` batches."""
    limit = room(max_memory)
    under_way: collections.deque[int] = collections.deque()
    held = peak = 0
    for charge in charges:
        while under_way and (held + charge > limit or len(under_way) >= WINDOW):
            held -= under_way.popleft()
        under_way.append(charge)
        held += charge
        peak = max(peak, held)
    return peak
