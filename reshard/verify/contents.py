"""What is known of the contents of the leaves of two checkpoints: by digests on record, or read."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping

from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, collision_error
from reshard.checkpoint import Leaf
from reshard.errors import CorruptCheckpointError, ReshardError
from reshard.storage.location import Location
from reshard.tree import Path
from reshard.verify.differences import Difference
from reshard.verify.digest_record import FILE, Record, read_record
from reshard.verify.elementwise import ElementComparison
from reshard.verify.values import Group, counted, read_values

Progress = Callable[[int, int], None]
Leaves = Mapping[Path, Leaf]
Both = Mapping[Path, tuple[Leaf, Leaf]]


@dataclasses.dataclass(frozen=True)
class Contents:
    """What is known of the contents of leaves.

    Attributes:
      differences: path in A -> in what contents differ.
      removed: path -> what tells contents apart, of arrays in A alone that may have moved.
      added: the same of arrays in B alone.
      compared: arrays that were compared.
      not_compared: arrays of equal shape and dtype that were not.
    """

    differences: Mapping[Path, Difference]
    removed: Mapping[Path, Hashable]
    added: Mapping[Path, Hashable]
    compared: int
    not_compared: int = 0


def recorded_contents(both: Both, removed: Leaves, added: Leaves) -> Contents:
    """Contents by the digests beside the arrays, where there are any; reads no array.

    Args:
      both: path in A -> the leaves of A and of B.
      removed: path -> leaf, in A alone.
      added: path -> leaf, in B alone.

    Raises:
      CorruptCheckpointError: a record cannot be read.
    """
    records = _Records()
    differences = {}
    compared = not_compared = 0
    for path, (a, b) in _pairs(both).items():
        if a.dtype != b.dtype:
            continue
        one, other = records.digest(a), records.digest(b)
        if one is None or other is None:
            not_compared += 1
            continue
        compared += 1
        if one != other:
            differences[path] = Difference("values", path, f"digest {one}", f"digest {other}")
    left, right = (
        {path: (digest, _kind(h)) for path, h in side.items() if (digest := records.digest(h))}
        for side in _candidates(removed, added)
    )
    return Contents(differences, left, right, compared, not_compared)


def read_contents(
    both: Both,
    removed: Leaves,
    added: Leaves,
    *,
    names: tuple[str, str],
    rtol: float,
    atol: float,
    max_memory: int,
    progress: Progress | None,
) -> Contents:
    """Reads arrays on both sides and compares them; also those that may have moved.

    Args:
      both: path in A -> the leaves of A and of B.
      removed: path -> leaf, in A alone.
      added: path -> leaf, in B alone.
      names: what A and B are, for errors.
      rtol: the relative tolerance.
      atol: the absolute tolerance.
      max_memory: bytes in flight at most.
      progress: called with (bytes done, bytes in all).

    Raises:
      CorruptCheckpointError: arrays that cannot be read, or that belong to two leaves: all of them.
      MemoryLimitError: stored chunks that do not fit into `max_memory`.
    """
    pairs = _pairs(both)
    left, right = _candidates(removed, added)
    groups: list[Group] = [*pairs.values(), *((h,) for h in (left | right).values())]
    sides = ["AB"] * len(pairs) + ["A"] * len(left) + ["B"] * len(right)
    collided = [handle for group in groups for handle in group if handle.same_name is not None]
    if collided:
        raise collision_error(collided)
    comparisons = {path: ElementComparison(a.shape, rtol, atol) for path, (a, _) in pairs.items()}
    digests = [Digest(handle.shape, handle.dtype) for handle in (left | right).values()]
    takers = [*comparisons.values(), *digests]
    failed: dict[int, Mapping[int, ReshardError]] = {}
    count = counted((handle for group in groups for handle in group), progress)
    for group, box, values, errors in read_values(groups, max_memory, count):
        if errors:
            failed[group] = errors
            continue
        takers[group].add(box, *values)
        del values  # memory is counted without it
    if failed:
        raise CorruptCheckpointError(
            f"arrays cannot be read; A is `{names[0]}`, B is `{names[1]}`",
            [
                ": ".join((sides[group][place], error.summary, *error.problems))
                for group, errors in failed.items()
                for place, error in sorted(errors.items())
            ],
        )
    differences = {
        path: Difference("values", path, found.a, found.b, found)
        for path, comparison in comparisons.items()
        if (found := comparison.difference()) is not None
    }
    texts = iter(digests)
    in_a, in_b = (
        {path: (next(texts).text(), _kind(handle)) for path, handle in side.items()}
        for side in (left, right)
    )
    return Contents(differences, in_a, in_b, len(pairs))


def _pairs(both: Both) -> dict[Path, tuple[ArrayHandle, ArrayHandle]]:
    """Arrays on both sides that can be compared."""
    return {
        path: (a, b)
        for path, (a, b) in both.items()
        if isinstance(a, ArrayHandle) and isinstance(b, ArrayHandle) and a.shape == b.shape
    }


def _candidates(removed: Leaves, added: Leaves) -> list[dict[Path, ArrayHandle]]:
    """The arrays on one side alone to which there is one of the same kind on the other. Those
    without elements have no contents to know them by."""
    arrays = [
        {p: leaf for p, leaf in side.items() if isinstance(leaf, ArrayHandle) and leaf.nbytes}
        for side in (removed, added)
    ]
    one, other = ({_kind(handle) for handle in side.values()} for side in arrays)
    return [{p: h for p, h in side.items() if _kind(h) in one & other} for side in arrays]


def _kind(handle: ArrayHandle) -> Hashable:
    return handle.shape, handle.dtype.name, handle.key_impl


class _Records:
    """The records beside arrays, each read once."""

    def __init__(self) -> None:
        self._read: dict[Location, Record | None] = {}

    def digest(self, handle: ArrayHandle) -> str | None:
        """The digest on record of an array as it is read; None if there is none."""
        stored = handle.stored
        if stored is None or handle.same_name is not None:
            return None
        path = stored.store.directory / FILE
        if path not in self._read:
            self._read[path] = read_record(path)
        record = self._read[path]
        known = None if record is None else record.arrays.get(stored.name)
        if known is None or (known.dtype, known.shape) != (handle.dtype.name, handle.shape):
            return None
        return known.digest
