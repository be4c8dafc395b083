"""Whether a checkpoint is whole, readable, and what its digests were recorded of."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint, kind_text
from reshard.errors import CorruptCheckpointError, DestinationError, ReshardError, printable
from reshard.hints import Hint
from reshard.loader import open as open_checkpoint
from reshard.storage.location import Location, parse_location
from reshard.tree import Path, format_path
from reshard.units import parse_bytes
from reshard.verify.comparison import partners
from reshard.verify.digest_record import (
    FILE,
    TEMPORARY,
    Record,
    forget_hint,
    read_record,
    record_of,
    stored_record,
    text_hash,
)
from reshard.verify.values import Progress, counted, read_digests


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. `print()` shows it.

    Attributes:
      path: what was read: the step of a root, the item of a step that has several.
      problems: what is wrong, a line each, in the order of the tree.
      digests: path -> digest of each array that could be read.
      compared: how many of these there was something to compare with.
    """

    path: Location
    problems: tuple[str, ...]
    digests: Mapping[Path, str]
    compared: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; so is the truth of it."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        counts = f"{len(self.digests)} arrays read, {self.compared} compared with digests"
        wrong = len(self.problems)
        verdict = f"{wrong} problem{'s' * (wrong > 1)}" if wrong else "nothing is wrong"
        lines = [f"`{self.path}`: {counts}, {verdict}"]
        return "\n".join(map(printable, [*lines, *(f"  {line}" for line in self.problems)]))


def verify(
    checkpoint: Checkpoint | str | os.PathLike,
    against: Checkpoint | str | os.PathLike | None = None,
    *,
    max_memory: int | str = "1GiB",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Reads all of a checkpoint: whether every leaf is there, every chunk decodes, and the values
    are those that digests were recorded of.

    Args:
      checkpoint: a checkpoint, or the path of one.
      against: what its values are to be: a checkpoint with the same tree, on any mesh and in any
        format (`to_nnx`, `rename` and others make the tree the same), or the path of one; or the
        path of a record of digests.
      max_memory: bytes in flight at most, in each worker.
      workers: processes of this machine that read, beside this one; or how many `executor` has.
      executor: any `concurrent.futures.Executor`, which has parts of it read.
      progress: called with (bytes done, bytes in all).

    Raises:
      CheckpointNotFoundError, CheckpointFormatError, CorruptCheckpointError: it cannot be opened.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> plan = reshard.save(ckpt, "out/1000")
      >>> bool(reshard.verify("out/1000", against="run/1000"))
      True
    """
    ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    other = _other(against)
    whole = ckpt.nbytes + (other.nbytes if isinstance(other, Checkpoint) else 0)
    report = counted(whole, progress)
    memory = parse_bytes(max_memory)
    return check(ckpt, memory, report, other, f"`{against}`", workers, executor)


def check(
    ckpt: Checkpoint,
    max_memory: int,
    report: Callable[[int], None],
    other: Checkpoint | Record | None = None,
    name: str = "",
    workers: int | None = None,
    executor: Executor | None = None,
) -> Verification:
    """Compares the values of a checkpoint with those recorded beside it, and those of `other`,
    whose name is for a record. `report` is called with numbers of bytes that were read; `workers`
    and `executor` are as of `verify`."""
    wrong: defaultdict[Path, list[str]] = defaultdict(list)
    files: list[str] = []
    # What digests are to be, and what is said where one is another.
    expected: defaultdict[Path, list[tuple[str, str]]] = defaultdict(list)

    def expect(record: Record, where: str) -> None:
        files.extend(record.gone_arrays(ckpt.source, where))
        for leaf in ckpt.arrays:
            if other_kind := record.other_kind(leaf):
                wrong[leaf.path].append(f"{other_kind} {where}")
            elif recorded := record.digest(leaf):
                expected[leaf.path].append((recorded, where))

    own = None
    try:
        own = read_record(ckpt.source.store.directory / FILE)
    except ReshardError as error:
        files += [error.summary, *error.problems]
    if own is not None:
        expect(own, "on record")
        files += own.changed_files(ckpt.source)
    if isinstance(other, Record):
        expect(other, f"of {name}")
        for path, lacking in _not_in(other, ckpt):
            wrong[path].append(f"{name} {lacking}")
    elif other is not None:
        name = f"`{other.source.path}`"
        here = {there: path for path, there in partners(ckpt, other).items()}
        differs = _other_leaves(ckpt, other, here, name)
        for path, text in differs.items():
            wrong[path].append(text)
        digests, failed = read_digests(other.arrays, max_memory, report, workers, executor)
        for there, text in digests.items():
            if there in here and here[there] not in differs:
                expected[here[there]].append((text, f"of {name}"))
        for there, error in failed.items():
            wrong[here.get(there, there)].append(f"in {name}, {reason(error, there)}")
    digests, failed = read_digests(ckpt.arrays, max_memory, report, workers, executor)
    for path, error in failed.items():
        wrong[path].append(reason(error, path))
    for path, text in digests.items():
        for recorded, where in expected.get(path, ()):
            if recorded != text:
                wrong[path].append(f"its values are not those {where}")
    order = dict.fromkeys([*(path for path in ckpt if path in wrong), *wrong])
    problems = [f"{format_path(path)}: {text}" for path in order for text in wrong[path]]
    compared = sum(path in expected for path in digests)
    return Verification(ckpt.source.path, (*problems, *files), digests, compared)


def digest(
    checkpoint: Checkpoint | str | os.PathLike,
    *,
    write: bool = False,
    max_memory: int | str = "1GiB",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> dict[Path, str]:
    """The digest of every array, which does not depend on how it is stored: see
    `reshard.arrays.digests`.

    Args:
      checkpoint: a checkpoint, or the path of one.
      write: record them beside the arrays, with hashes of all other files; arrays that are not in
        this checkpoint (`select`) stay as they are recorded.
      max_memory: bytes in flight at most, in each worker.
      workers: processes of this machine that read, beside this one; or how many `executor` has.
      executor: any `concurrent.futures.Executor`, which has parts of it read.
      progress: called with (bytes done, bytes in all).

    Raises:
      CorruptCheckpointError: arrays that cannot be read, or are not what was recorded: all of them.
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
    file = ckpt.source.store.directory / FILE
    recorded = read_record(file)
    checked = verify(
        ckpt, max_memory=max_memory, workers=workers, executor=executor, progress=progress
    )
    if not checked.ok:
        changed = [] if recorded is None else recorded.changed_files(ckpt.source)
        hints = [forget_hint(file)] if {*checked.problems} <= {*changed} else []
        raise CorruptCheckpointError(f"`{checked.path}` is not whole", checked.problems, hints)
    if write:
        try:
            file.replace(record(ckpt, checked.digests).dump(), TEMPORARY)
        except OSError as error:
            raise DestinationError(f"`{file}` cannot be written: {error.strerror}") from error
    return dict(checked.digests)


def record(ckpt: Checkpoint, digests: Mapping[Path, str]) -> Record:
    """The record of a checkpoint: of the arrays that there are digests of, by path, and of those
    that are recorded already. Strings are those that were saved, under whatever paths they are."""
    recorded = read_record(ckpt.source.store.directory / FILE)
    arrays = dict(recorded.arrays) if recorded is not None else {}
    arrays |= {
        leaf.stored.name: stored_record(leaf, digests[leaf.path])
        for leaf in ckpt.arrays
        if leaf.stored is not None
    }
    if ckpt.retyped or any(isinstance(leaf, str) for leaf in ckpt.values()):
        ckpt = ckpt.replace(open_checkpoint(ckpt.source.path))
    return record_of(ckpt, ckpt.source.root, arrays, ckpt.source.store.ocdbt)


def _other(against: Any) -> Checkpoint | Record | None:
    if against is None or isinstance(against, Checkpoint):
        return against
    file = parse_location(against)
    if file.is_file():
        return read_record(file, Hint(("digest", file)))
    return open_checkpoint(against)


def _not_in(record: Record, ckpt: Checkpoint) -> Iterator[tuple[Path, str]]:
    """Leaves of a checkpoint that the record of another lacks, with what it does not say of
    them."""
    for path, leaf in ckpt.items():
        if isinstance(leaf, str):
            recorded = record.strings.get(stored_name(path))
            if recorded != text_hash(leaf):
                yield path, "does not have it" if recorded is None else "has another text"
        if not isinstance(leaf, ArrayHandle):
            continue
        entry = record.array(leaf)
        if entry is None:
            yield path, "does not have it"
        elif entry.digest is None or leaf.stored is None:
            yield path, "has no digest of it"


def _other_leaves(
    ckpt: Checkpoint, other: Checkpoint, here: Mapping[Path, Path], name: str
) -> dict[Path, str]:
    """Path -> what is said of leaves that one side alone has, or that are of two kinds."""
    there = {path: partner for partner, path in here.items()}
    found = {}
    for path, leaf in ckpt.items():
        if path not in there:
            found[path] = f"{name} does not have it"
        elif (kind := kind_text(leaf)) != (its := kind_text(other[there[path]])):
            found[path] = f"it is {kind}, in {name} {its}"
    return found | {path: f"only {name} has it" for path in other if path not in here}


def reason(error: ReshardError, path: Path) -> str:
    """Why an array cannot be read, in a line that its path stands before."""
    return " ".join((error.summary.removeprefix(f"{format_path(path)}: "), *error.problems))
