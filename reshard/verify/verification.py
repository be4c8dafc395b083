"""Whether a checkpoint is whole, readable, and what its digests were recorded of."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from reshard.arrays.handle import ArrayHandle, StoredArray, array_text, stored_name
from reshard.checkpoint import Checkpoint, Leaf, Source
from reshard.errors import CorruptCheckpointError, DestinationError, ReshardError, printable
from reshard.hints import Hint
from reshard.loader import open as open_checkpoint
from reshard.storage.location import Location, parse_location
from reshard.tree import Path, format_path
from reshard.units import parse_bytes
from reshard.verify.digest_record import (
    FILE,
    TEMPORARY,
    ArrayRecord,
    Record,
    forget_hint,
    read_record,
    record_of,
    text_hash,
)
from reshard.verify.values import counted, read_digests

Progress = Callable[[int, int], None]
# What a leaf's digest is to be, and what is said where it is another one.
_Expected = tuple[str, str]


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
    progress: Progress | None = None,
) -> Verification:
    """Reads all of a checkpoint: whether every leaf is there, every chunk decodes, and the values
    are those that digests were recorded of.

    Args:
      checkpoint: a checkpoint, or the path of one.
      against: what its values are to be: a checkpoint with the same tree, on any mesh and in any
        format (`to_nnx`, `rename` and others make the tree the same), or the path of one; or the
        path of a record of digests.
      max_memory: bytes in flight at most.
      progress: called with (bytes done, bytes in all).

    Raises:
      CheckpointNotFoundError, CheckpointFormatError, CorruptCheckpointError: it cannot be opened.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.
    """
    ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    memory = parse_bytes(max_memory)
    other, given = _other(against)
    report = counted([*ckpt.arrays, *(other.arrays if other is not None else ())], progress)
    found = _Findings()
    expected: dict[Path, list[_Expected]] = {}
    try:
        own = read_record(ckpt.source.store.directory / FILE)
    except ReshardError as error:
        own = None
        found.of_files += [error.summary, *error.problems]
    if own is not None:
        _expect(ckpt, own, "on record", expected, found)
        found.of_files += changed_files(ckpt.source, own)
    if given is not None:
        _expect(ckpt, given, f"of `{against}`", expected, found)
        for path, lacking in _not_in(given, ckpt):
            found.add(path, f"`{against}` {lacking}")
    if other is not None:
        root = f"`{other.source.path}`"
        same = _compare_trees(ckpt, other, found)
        theirs, failed = read_digests(other.arrays, memory, report)
        for path, text in theirs.items():
            if path in same:
                expected.setdefault(same[path], []).append((text, f"of {root}"))
        for path, error in failed.items():
            found.add(same.get(path, path), f"in {root}, {reason(error, path)}")
    digests, failed = read_digests(ckpt.arrays, memory, report)
    for path, error in failed.items():
        found.add(path, reason(error, path))
    for path, text in digests.items():
        for wanted, where in expected.get(path, ()):
            if wanted != text:
                found.add(path, f"its values are not those {where}")
    compared = sum(path in expected for path in digests)
    return Verification(ckpt.source.path, tuple(found.lines(ckpt)), digests, compared)


def digest(
    checkpoint: Checkpoint | str | os.PathLike,
    *,
    write: bool = False,
    max_memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> dict[Path, str]:
    """The digest of every array, which does not depend on how it is stored: see
    `reshard.arrays.digests`.

    Args:
      checkpoint: a checkpoint, or the path of one.
      write: record them beside the arrays, with hashes of all other files; arrays that are not in
        this checkpoint (`select`) stay as they are on record.
      max_memory: bytes in flight at most.
      progress: called with (bytes done, bytes in all).

    Raises:
      CorruptCheckpointError: arrays that cannot be read, or are not what is on record: all of them.
      DestinationError: the record cannot be written.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.
    """
    ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    file = ckpt.source.store.directory / FILE
    known = read_record(file)
    checked = verify(ckpt, max_memory=max_memory, progress=progress)
    if not checked.ok:
        changed = [] if known is None else [*changed_files(ckpt.source, known)]
        hints = [forget_hint(file)] if {*checked.problems} <= {*changed} else []
        raise CorruptCheckpointError(f"`{checked.path}` is not whole", checked.problems, hints)
    if write:
        try:
            data = record(ckpt, checked.digests).dump()
            file.replace(data, TEMPORARY)
        except OSError as error:
            raise DestinationError(f"`{file}` cannot be written: {error.strerror}") from error
    return dict(checked.digests)


def record(ckpt: Checkpoint, digests: Mapping[Path, str]) -> Record:
    """The record of a checkpoint: of the arrays that there are digests of, and of those that are on
    record already.

    Args:
      ckpt: the checkpoint.
      digests: path -> digest of its arrays.
    """
    known = read_record(ckpt.source.store.directory / FILE)
    arrays = dict(known.arrays) if known is not None else {}
    arrays |= {
        leaf.stored.name: stored_record(leaf, digests[leaf.path])
        for leaf in ckpt.arrays
        if leaf.stored is not None
    }
    return record_of(ckpt, ckpt.source.root, arrays, ckpt.source.store.ocdbt)


class _Findings:
    """What is wrong, by leaf."""

    def __init__(self) -> None:
        self._by_leaf: dict[Path, list[str]] = {}
        self.of_files: list[str] = []

    def add(self, path: Path, text: str) -> None:
        """Adds what is wrong with a leaf."""
        self._by_leaf.setdefault(path, []).append(text)

    def lines(self, ckpt: Checkpoint) -> Iterator[str]:
        """All of it, in the order of the tree."""
        order = [path for path in ckpt if path in self._by_leaf]
        order += [path for path in self._by_leaf if path not in ckpt]
        for path in order:
            for text in self._by_leaf[path]:
                yield f"{format_path(path)}: {text}"
        yield from self.of_files


def _other(against: Any) -> tuple[Checkpoint | None, Record | None]:
    """What to compare with: a checkpoint, or a record."""
    if against is None or isinstance(against, Checkpoint):
        return against, None
    file = parse_location(against)
    if file.is_file():
        return None, read_record(file, Hint(("digest", file)))
    return open_checkpoint(against), None


def _expect(
    ckpt: Checkpoint,
    record: Record,
    where: str,
    expected: dict[Path, list[_Expected]],
    found: _Findings,
) -> None:
    """Adds what a record says of the arrays of a checkpoint."""
    stored = {leaf.data.name: leaf for leaf in ckpt.arrays if isinstance(leaf.data, StoredArray)}
    found.of_files += gone_arrays(ckpt.source, record, where)
    other_kinds = dict(arrays_of_other_kinds(stored.values(), record, where))
    for path, text in other_kinds.items():
        found.add(path, text)
    for name, leaf in stored.items():
        entry = record.arrays.get(name)
        if entry is None or leaf.path in other_kinds or leaf.stored is None:
            continue
        if entry.digest is not None:
            expected.setdefault(leaf.path, []).append((entry.digest, where))


def gone_arrays(source: Source, record: Record, where: str) -> Iterator[str]:
    """Arrays of a record that are not stored, a line each."""
    for name in record.arrays:
        if name not in source.store.values:
            yield f"the array `{name}`: {where}, and not there"


def arrays_of_other_kinds(
    handles: Iterable[ArrayHandle], record: Record, where: str
) -> Iterator[tuple[Path, str]]:
    """Stored arrays whose shape or dtype is not that of a record, with both."""
    for handle in handles:
        entry, stored = on_record(record.arrays, handle), stored_record(handle)
        if entry is not None and str(entry) != str(stored):
            yield handle.path, f"it is {stored}, and {entry} {where}"


def _not_in(record: Record, ckpt: Checkpoint) -> Iterator[tuple[Path, str]]:
    """Leaves of a checkpoint that a record of another one says nothing of, with what it does not
    say."""
    for path, leaf in ckpt.items():
        if isinstance(leaf, str):
            known = record.strings.get(stored_name(path))
            if known != text_hash(leaf):
                yield path, "does not have it" if known is None else "has another text"
        if not isinstance(leaf, ArrayHandle):
            continue
        entry = on_record(record.arrays, leaf)
        if entry is None:
            yield path, "does not have it"
        elif entry.digest is None or leaf.stored is None:
            yield path, "has no digest of it"


def on_record(arrays: Mapping[str, ArrayRecord], handle: ArrayHandle) -> ArrayRecord | None:
    """What is recorded of a stored array; None where nothing is, and for derived ones."""
    return arrays.get(handle.data.name) if isinstance(handle.data, StoredArray) else None


def stored_record(handle: ArrayHandle, digest: str | None = None) -> ArrayRecord:
    """What there is to record of a stored array."""
    return ArrayRecord(handle.stored_dtype.name, handle.shape, digest)


def recorded_files(source: Source, record: Record) -> dict[Location, str]:
    """File -> SHA-256 on record.

    An item beside this one that has a record of its own may have been written since.
    """
    step = source.root / source.step
    files = {source.store.directory / path: known for path, known in record.files.items()}
    if source.item:  # a step was opened, not the item alone
        for path, known in record.beside.items():
            if not (step / path.partition("/")[0] / FILE).exists():
                files[step / path] = known
    return files


def changed_files(
    source: Source, record: Record, unread: Callable[[Location], bool] = lambda file: False
) -> Iterator[str]:
    """Files that are not what they were when they were recorded, a line each.

    Args:
      source: where they are.
      record: their record.
      unread: whether it is enough that a file is there.
    """
    for file, known in recorded_files(source, record).items():
        try:
            if not file.is_file():
                yield f"the file `{file}`: on record, and not there"
            elif not unread(file) and file.sha256() != known:
                yield changed_file(file)
        except OSError as error:
            yield f"the file `{file}`: it cannot be read: {error.strerror}"


def changed_file(file: Location) -> str:
    """The line of a file that is not what it was when it was recorded."""
    return f"the file `{file}`: it is not the one on record"


def _compare_trees(ckpt: Checkpoint, other: Checkpoint, found: _Findings) -> dict[Path, Path]:
    """Adds leaves that only one side has, and those that are not of one kind. Path in the other
    checkpoint -> path in this one, of those that are."""
    own, theirs = (
        {tuple(map(str, path)): (path, leaf) for path, leaf in each.items()}
        for each in (ckpt, other)
    )
    root = f"`{other.source.path}`"
    same = {}
    for keys, (path, leaf) in own.items():
        if keys not in theirs:
            found.add(path, f"{root} does not have it")
        elif _kind(leaf) != _kind(theirs[keys][1]):
            found.add(path, f"it is {_kind(leaf)}, in {root} {_kind(theirs[keys][1])}")
        else:
            same[theirs[keys][0]] = path
    for keys, (path, _) in theirs.items():
        if keys not in own:
            found.add(path, f"only {root} has it")
    return same


def _kind(leaf: Leaf) -> str:
    if not isinstance(leaf, ArrayHandle):
        return repr(leaf)
    keys = f", {leaf.key_impl} keys" if leaf.key_impl else ""
    return array_text(leaf.dtype.name, leaf.shape) + keys


def reason(error: ReshardError, path: Path) -> str:
    """Why an array cannot be read, in a line that its path stands before."""
    return " ".join((error.summary.removeprefix(f"{format_path(path)}: "), *error.problems))
