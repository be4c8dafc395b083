"""What a share of a plan consists of."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from reshard.arrays.handle import ArrayHandle
from reshard.engine.plan import ArrayPlan
from reshard.writer.target_format import TargetFormat


class BoxRange(NamedTuple):
    """Boxes of arrays that are read together, of each from one number to another: all, without a
    last one."""

    arrays: Sequence[ArrayPlan]
    start: int = 0
    stop: int | None = None


class ValueRange(NamedTuple):
    """Stored values of an array that is copied as it is, from one number to another: all, without a
    last one."""

    handle: ArrayHandle
    start: int = 0
    stop: int | None = None


class ItemShare(NamedTuple):
    """What of an item is in a share.

    Attributes:
      item: the item's number.
      directory: its directory, below the destination's root.
      format: how its arrays are stored.
      handles: the arrays, all that is known of which is what it takes to read them.
      values: what is copied as it is.
      boxes: what is rewritten.
    """

    item: int
    directory: str
    format: TargetFormat
    handles: Sequence[ArrayHandle]
    values: Sequence[ValueRange]
    boxes: Sequence[BoxRange]


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a plan that a process can carry out alone, which pickles without anything open.

    Attributes:
      number, count: which share it is, from 0, and of how many.
      items: what it has of the items.
      max_memory: bytes.
      nbytes: bytes that are written: decoded ones of what is rewritten, and stored ones of what is
        copied.
      weight: what it weighs beside others: bytes that are read and written, and its chunks.
    """

    number: int
    count: int
    items: tuple[ItemShare, ...]
    max_memory: int
    nbytes: int
    weight: int
