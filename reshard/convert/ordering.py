"""Changes of a tree of leaves, put into an order in which they can be carried out. Pure."""

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from reshard.arrays.operations import Operation
from reshard.convert.steps import Step
from reshard.tree import Path


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A leaf from one change to the next."""

    path: Path


@dataclasses.dataclass(eq=False, slots=True)
class Change:
    """Some leaves become others.

    Attributes:
      inputs: the leaves before; each is an input of one change.
      outputs: the leaves after.
      operation: what is done; None for a leaf that only changes its path.
    """

    inputs: list[Value]
    outputs: list[Value]
    operation: Operation | None


def in_order(changes: Sequence[Change], others: Iterable[Path], origin: str) -> list[Step]:
    """Steps that make the changes one after another, each when its inputs are there and the paths
    of its outputs are free.

    Where leaves change places, one of them is moved out of the way first, to a path with `~`. The
    paths of values between changes may be changed in the same way.

    Args:
      changes: in the order that is kept where it can be. No two leaves that are there in the
        beginning share a path, nor two that are there in the end.
      others: the leaves that no change touches.
      origin: of the steps.
    """
    order = _Order(changes, others)
    order.carry_out_all()
    return [
        Step(
            tuple(value.path for value in change.inputs),
            tuple(value.path for value in change.outputs),
            change.operation,
            origin,
        )
        for change in order.ordered
    ]


class _Order:
    """Changes while they are put into order. They are numbered, and tried in that order."""

    def __init__(self, changes: Sequence[Change], others: Iterable[Path]):
        self.changes = list(changes)
        self.ordered: list[Change] = []
        self.consumer = {v: n for n, change in enumerate(changes) for v in change.inputs}
        made = {v for change in changes for v in change.outputs}
        self.missing = [sum(v in made for v in change.inputs) for change in changes]
        self.rank = list(range(len(changes)))
        self.here = {v.path: n for v, n in self.consumer.items() if v not in made}
        self.here.update((path, -1) for path in others)
        self.known = {*self.here, *(v.path for v in made)}
        self.done: set[int] = set()
        self.open: set[int] = set()
        self.waiting: dict[Path, list[int]] = {}
        self.ready = [(n, n) for n, count in enumerate(self.missing) if not count]  # is a heap

    def carry_out_all(self) -> None:
        """Puts all changes into order."""
        count = len(self.changes)
        for n in range(count):
            self.part(n)
        stuck: list[tuple[int, int]] = []
        while self.ready or stuck:
            forced = not self.ready
            entry = heapq.heappop(stuck if forced else self.ready)
            n = entry[1]
            if n in self.done:
                continue
            blocked = self.blocked(n)
            if blocked and not forced and not self.leads_back(n):
                self.waiting.setdefault(blocked[0].path, []).append(n)
                if n < count:  # what has been moved aside is not moved aside again
                    heapq.heappush(stuck, entry)
                continue
            for value in blocked:
                self.move_aside(n, value)
            self.carry_out(n)

    def part(self, n: int) -> None:
        """Gives outputs of one change paths of their own. (They may share one, if one of them has
        moved on before another gets there.)"""
        seen: set[Path] = set()
        for value in sorted(self.changes[n].outputs, key=lambda value: value in self.consumer):
            if value.path in seen:
                self.move_aside(n, value)
            seen.add(value.path)

    def blocked(self, n: int) -> list[Value]:
        """The outputs of a change whose paths are not free."""
        own = {value.path for value in self.changes[n].inputs}
        return [v for v in self.changes[n].outputs if v.path in self.here and v.path not in own]

    def leads_back(self, n: int) -> bool:
        """Whether a change waits for one that waits for one that ... waits for it."""
        seen: set[int] = set()
        at = n
        while at >= 0 and at not in self.open and not self.missing[at]:
            seen.add(at)
            blocked = self.blocked(at)
            at = self.here[blocked[0].path] if blocked else -1
            if at == n:
                return True
            if at in seen:
                break
        self.open |= seen
        return False

    def move_aside(self, n: int, value: Value) -> None:
        """Gives an output of a change another path, from which it moves on when its own is free."""
        *outer, key = value.path
        while (*outer, key) in self.known:
            key = f"{key}~"
        self.known.add((*outer, key))
        if value in self.consumer:
            value.path = (*outer, key)
            return
        aside = Value((*outer, key))
        outputs = self.changes[n].outputs
        outputs[outputs.index(value)] = aside
        self.consumer[aside] = len(self.changes)
        self.changes.append(Change([aside], [value], None))
        self.missing.append(1)
        self.rank.append(self.rank[n])

    def carry_out(self, n: int) -> None:
        change = self.changes[n]
        self.ordered.append(change)
        self.done.add(n)
        before = [value.path for value in change.inputs]
        for path in before:
            del self.here[path]
        for value in change.outputs:
            consumer = self.consumer.get(value, -1)
            self.here[value.path] = consumer
            if consumer >= 0:
                self.missing[consumer] -= 1
                if not self.missing[consumer]:
                    heapq.heappush(self.ready, (self.rank[consumer], consumer))
        for path in before:
            for other in self.waiting.pop(path, ()) if path not in self.here else ():
                heapq.heappush(self.ready, (self.rank[other], other))
