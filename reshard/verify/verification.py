"""`verify` and `digest`: whether a checkpoint is complete, readable, and as recorded."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from reshard.checkpoint import Checkpoint, kind_text
from reshard.errors import CorruptCheckpointError, DestinationError, ReshardError
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import is_record_file
from reshard.storage import identity, location
from reshard.tree import Path, format_path
from reshard.units import count_of, parse_bytes
from reshard.verify.comparison import marked_positions, partners
from reshard.verify.digest_record import (
    FILE,
    Record,
    document_hashes,
    forget_hint,
    read_record,
    record_of,
    stored_record,
)
from reshard.verify.values import Progress, counted, read_digests

# Path -> problems of a leaf.
_Texts = defaultdict[Path, list[str]]
# Path -> digests that an array must have, each with its origin.
_Expected = defaultdict[Path, list[tuple[str, str]]]
# Problems that a repr lists.
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. `print()` shows it, with at most ten problems.

    Attributes:
      path: the checkpoint: the step of a root, the item of a step that has several.
      problems: all problems, a line each, in the order of the tree.
      digests: path -> digest of each array that could be read.
      compared: number of arrays that were compared with at least one digest.
    """

    path: location.Location
    problems: tuple[str, ...]
    digests: Mapping[Path, str]
    compared: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; also the truth value of the result."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        read = f"{count_of(len(self.digests), 'array')} read"
        wrong = count_of(len(self.problems), "problem") if self.problems else "nothing is wrong"
        result = f"{read}, {self.compared} compared with digests, {wrong}"
        if self.digests and not self.compared and self.ok:
            result = f"{read}; no digests to compare them with"
        return ReshardError(f"`{self.path}`: {result}", self.problems).render(_SHOWN)


def verify(
    checkpoint: Checkpoint | str | os.PathLike,
    against: Checkpoint | str | os.PathLike | None = None,
    *,
    max_memory: int | str = "1GiB",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check that a checkpoint is complete, undamaged and unchanged. Reads every array.

    Checks that every leaf exists, that every chunk decodes, and that the values equal the recorded
    digests.

    Args:
      checkpoint: a checkpoint, or the path of one.
      against: also compare with a checkpoint of the same tree, on any mesh and in any format, or
        with its path; or with the path of a record of digests. If the trees differ, first make them
        equal with `to_nnx`, `rename` or another transform.
      max_memory: the most bytes of arrays in memory, in each worker.
      workers: how many processes of this machine read. With `executor`, the number of its workers.
      executor: any `concurrent.futures.Executor` that reads instead.
      progress: called with (bytes done, bytes in all).

    Returns:
      The result, which is true if nothing is wrong.

    Raises:
      CheckpointNotFoundError, CheckpointFormatError, CorruptCheckpointError: it cannot be opened.
      ChangedCheckpointError: one of the checkpoints has changed since it was opened.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> plan = reshard.save(ckpt, "out/1000")
      >>> bool(reshard.verify("out/1000", against="run/1000"))
      True
    """
    ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    other: Any = against
    if against is not None and not isinstance(against, Checkpoint):
        file = location.parse_location(against)
        hint = "reshard.digest(path, write=True)"
        other = read_record(file, hint) if is_record_file(file) else open_checkpoint(against)
    compared = [each for each in (ckpt, other) if isinstance(each, Checkpoint)]
    total = sum(each.nbytes for each in compared)
    how = parse_bytes(max_memory), counted(total, progress), workers, executor
    wrong: _Texts = defaultdict(list)
    expected: _Expected = defaultdict(list)
    files: list[str] = []
    with identity.unchanged(*(each.source.identity for each in compared)):
        try:
            own = read_record(ckpt.source.store.directory / FILE)
        except ReshardError as error:
            files += [error.summary, *error.problems]
        else:
            if own is not None:
                files += _expect(own, ckpt, "on record", wrong, expected)
                files += own.changed_files(ckpt.source)
        if isinstance(other, Record):
            files += _expect(other, ckpt, f"of `{against}`", wrong, expected)
            for path, leaf in ckpt.items():
                if lacking := other.lacks(path, leaf):
                    wrong[path].append(f"`{against}` {lacking}")
        elif other is not None:
            _expect_equal(other, ckpt, how, wrong, expected)
        digests, failed = read_digests(ckpt.arrays, *how)
    for path, error in failed.items():
        wrong[path].append(reason(error, path))
    for path, text in digests.items():
        differing = [where for digest, where in expected.get(path, ()) if digest != text]
        wrong[path] += [f"its values are not those {where}" for where in differing]
    order = dict.fromkeys([*(path for path in ckpt if path in wrong), *wrong])
    problems = [f"{format_path(path)}: {text}" for path in order for text in wrong[path]]
    compared = sum(path in expected for path in digests)
    return Verification(ckpt.source.path, (*problems, *files), digests, compared)


def _expect(
    record: Record, ckpt: Checkpoint, where: str, wrong: _Texts, expected: _Expected
) -> list[str]:
    """Adds the recorded digests of a checkpoint's arrays, and arrays of another kind than recorded.
    Returns a line for each recorded array that is not stored."""
    for leaf in ckpt.arrays:
        if other_kind := record.other_kind(leaf):
            wrong[leaf.path].append(f"{other_kind} {where}")
        elif recorded := record.digest(leaf):
            expected[leaf.path].append((recorded, where))
    return record.missing_arrays(ckpt.source, where)


def _expect_equal(
    other: Checkpoint, ckpt: Checkpoint, how: Any, wrong: _Texts, expected: _Expected
) -> None:
    """Adds the digests of another checkpoint's arrays, and all other differences of the leaves."""
    name, same = f"`{other.source.path}`", partners(ckpt, other)
    own_paths = {other_path: path for path, other_path in same.items()}
    digests, failed = read_digests(other.arrays, *how)
    for path in ckpt.keys() - same.keys():
        wrong[path].append(f"{name} does not have it")
    wrong |= {path: [f"only {name} has it"] for path in other if path not in own_paths}
    for path, other_path in same.items():
        if path != other_path:  # Orbax restores a list on one side and a dict on the other.
            paths = f"{marked_positions(path)}, in {name} {marked_positions(other_path)}"
            wrong[path].append(f"its path is {paths}")
        kind, its = kind_text(ckpt[path]), kind_text(other[other_path])
        if kind != its:
            wrong[path].append(f"it is {kind}, in {name} {its}")
        elif other_path in digests:
            expected[path].append((digests[other_path], f"of {name}"))
    for other_path, error in failed.items():
        wrong[own_paths.get(other_path, other_path)].append(
            f"in {name}, {reason(error, other_path)}"
        )


def reason(error: ReshardError, path: Path) -> str:
    """Why an array cannot be read, as a line without the path of the array."""
    return " ".join((error.summary.removeprefix(f"{format_path(path)}: "), *error.problems))


def digest(
    checkpoint: Checkpoint | str | os.PathLike,
    *,
    write: bool = False,
    max_memory: int | str = "1GiB",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> dict[Path, str]:
    """Compute the digest of every array. It does not depend on how the array is stored.

    `reshard.arrays.digests` defines it.

    Args:
      checkpoint: a checkpoint, or the path of one.
      write: record the digests beside the arrays, with hashes of the tree's documents. Records of
        arrays that are not in this checkpoint (`select`) stay.
      max_memory: the most bytes of arrays in memory, in each worker.
      workers: how many processes of this machine read. With `executor`, the number of its workers.
      executor: any `concurrent.futures.Executor` that reads instead.
      progress: called with (bytes done, bytes in all).

    Returns:
      Path -> digest, 32 hexadecimal digits.

    Raises:
      ChangedCheckpointError: the checkpoint has changed since it was opened.
      CorruptCheckpointError: arrays that cannot be read, or differ from their record: all of them.
      DestinationError: the record cannot be written.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.

    Example:
      >>> digests = reshard.digest("run/1000")
      >>> len(digests[("params", "layer_0", "kernel")])
      32
      >>> digests == reshard.digest(reshard.to_mesh(reshard.open("run/1000"), "1x8"))
      True
    """
    ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    directory = ckpt.source.store.directory
    if write and directory.is_file():
        raise DestinationError(
            f"`{directory}` is a single file: a record of digests needs a directory",
            hints=[f"reshard.digest({str(directory.parent)!r}, write=True)"],
        )
    file = directory / FILE
    with identity.unchanged(ckpt.source.identity):
        recorded = read_record(file)
        checked = verify(
            ckpt, max_memory=max_memory, workers=workers, executor=executor, progress=progress
        )
        if not checked.ok:
            changed = [] if recorded is None else recorded.changed_files(ckpt.source)
            hints = [forget_hint(file)] if {*checked.problems} <= {*changed} else []
            raise CorruptCheckpointError(f"`{checked.path}` is damaged", checked.problems, hints)
        made = record(ckpt, checked.digests) if write else None
    if made is not None:
        made.write(file)
    return dict(checked.digests)


def record(ckpt: Checkpoint, digests: Mapping[Path, str]) -> Record:
    """The record of a checkpoint: of arrays with these digests, by path, and of arrays that are
    recorded already. Strings are recorded under their saved paths."""
    recorded = read_record(ckpt.source.store.directory / FILE)
    arrays = dict(recorded.arrays) if recorded is not None else {}
    arrays |= {
        leaf.stored.name: stored_record(leaf, digests[leaf.path])
        for leaf in ckpt.arrays
        if leaf.stored is not None
    }
    if ckpt.retyped or any(isinstance(leaf, str) for leaf in ckpt.values()):
        ckpt = ckpt.replace(open_checkpoint(ckpt.source.path))
    found = record_of(ckpt, arrays, document_hashes(ckpt.source.store.directory))
    copied = recorded.copied if recorded is not None else {}
    return dataclasses.replace(found, copied=copied)
