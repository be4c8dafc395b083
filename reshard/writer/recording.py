"""Digests of what a job writes, and of what it reads where those are on record."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.errors import CorruptCheckpointError
from reshard.hints import Hint
from reshard.tree import Path, format_path
from reshard.verify.digest_record import FILE, ArrayRecord, Record, forget_hint, read_record
from reshard.verify.values import read_digests
from reshard.verify.verification import (
    arrays_of_other_kinds,
    changed_file,
    changed_files,
    gone_arrays,
    on_record,
    reason,
    recorded_files,
    stored_record,
)
from reshard.writer.prepare import Job
from reshard.writer.siblings import is_sibling

Known = Mapping[str, ArrayRecord]


def source_record(job: Job) -> Record:
    """What is on record of the source, by names in its store.

    The files that are carried over as they are need only be there: they are compared when they are
    copied, with `check_copied`.

    Raises:
      CorruptCheckpointError: the record is of other arrays or files than those that are there.
    """
    source = job.ckpt.source
    file = source.store.directory / FILE
    record = read_record(file)
    if record is None:
        return Record({}, {}, {}, {})
    kinds = arrays_of_other_kinds([h for _, h in _stored(job.handles)], record, "on record")
    problems = [f"{format_path(path)}: {text}" for path, text in kinds]
    problems += gone_arrays(source, record, "on record")
    files = [*changed_files(source, record, lambda file: is_sibling(job.ckpt, file))]
    if problems or files:
        raise _not_as_recorded(job, problems, files)
    return record


def check_copied(job: Job, record: Record, hashes: Mapping[str, str]) -> None:
    """Raises CorruptCheckpointError unless the files that were carried over as they are have the
    hashes on record.

    Args:
      job: the item.
      record: what `source_record` gave.
      hashes: path below the source's root -> SHA-256 of what was read.
    """
    source = job.ckpt.source
    read = {source.root / path: sha256 for path, sha256 in hashes.items()}
    on_record = recorded_files(source, record)
    files = [
        changed_file(file) for file, known in on_record.items() if read.get(file, known) != known
    ]
    if files:
        raise _not_as_recorded(job, [], files)


def _not_as_recorded(job: Job, problems: list[str], files: list[str]) -> CorruptCheckpointError:
    source = job.ckpt.source
    forget = [] if problems else [forget_hint(source.store.directory / FILE)]
    return CorruptCheckpointError(
        f"`{source.path}` is not what its digests were recorded of",
        problems + files,
        [*verify_hints(job), *forget],
    )


def new_digests(job: Job) -> dict[Path, Digest]:
    """A digest for each array that is decoded, to which its values are to be added."""
    return {h.path: Digest(h.shape, h.dtype) for h in _decoded(job)}


class ReadAgain(NamedTuple):
    """What is read beside what is copied, for its digests.

    Attributes:
      sources: arrays on record that cast or derived arrays are computed from; these are not written
        as they were read, and have no digest that could be carried over.
      moved: arrays that are moved undecoded and have no digest.
    """

    sources: list[ArrayHandle]
    moved: list[ArrayHandle]


def read_again(job: Job, known: Known, moved_too: bool) -> ReadAgain:
    """What of an item is to be read beside what is copied.

    Args:
      job: the item.
      known: what is on record of the source.
      moved_too: whether arrays that are moved undecoded are to get a digest.
    """
    decoded = _decoded(job)
    straight = {h.stored.name for h in decoded if h.stored is not None}
    moved = [h for h in job.linked + job.copied if moved_too and _carried(known, h) is None]
    made = _stored(h for h in job.handles if h.stored is None)
    sources = [h for name, h in made if name not in straight and _digest(known, h)]
    return ReadAgain(sources, moved)


def records(
    job: Job,
    known: Known,
    digests: Mapping[Path, Digest],
    again: ReadAgain,
    max_memory: int,
    report: Callable[[int], None],
) -> dict[str, ArrayRecord]:
    """What is to be recorded of the arrays that were written, by their names in the destination.
    What is on record of the source is compared with what was read of it.

    Args:
      job: the item.
      known: what is on record of the source.
      digests: complete ones of all arrays that were decoded.
      again: what is read now.
      max_memory: bytes in flight at most, for what is read.
      report: called with numbers of bytes that were read.

    Raises:
      CorruptCheckpointError: arrays that cannot be read, or whose values are not those on record:
        all of them.
    """
    texts = {path: digest.text() for path, digest in digests.items()}
    by_name = {
        (name,): replace(h, path=(name,), dtype=h.stored_dtype)
        for name, h in _stored(again.sources)
    }
    read, failed = read_digests([*by_name.values(), *again.moved], max_memory, report)
    if failed:
        raise CorruptCheckpointError(
            f"arrays of `{job.ckpt.source.path}` cannot be read",
            [f"{format_path(path)}: {reason(error, path)}" for path, error in failed.items()],
            verify_hints(job),
        )
    wrong = [h for h in _decoded(job) if h.stored is not None and _differs(texts[h.path], known, h)]
    wrong += [h for name, h in _stored(again.sources) if _differs(read[name,], known, h)]
    if wrong:
        raise CorruptCheckpointError(
            f"values were read from `{job.ckpt.source.path}` that are not those its digests were "
            "recorded of",
            [f"{format_path(h.path)}  {stored_record(h)}" for h in wrong],
            verify_hints(job),
        )
    texts |= {h.path: read[h.path] for h in again.moved}
    return {
        stored_name(h.path): ArrayRecord(
            h.dtype.name, h.shape, texts.get(h.path, _carried(known, h))
        )
        for h in job.handles
    }


def _decoded(job: Job) -> list[ArrayHandle]:
    return [h for h, plan in zip(job.handles, job.plans, strict=True) if not plan.moved]


def verify_hints(job: Job) -> list[str]:
    """What to type to look at the source."""
    source = job.ckpt.source
    step = str(source.root / source.step)
    return [Hint(("verify_item", step, source.item) if len(source.items) > 1 else ("verify", step))]


def _stored(handles: Iterable[ArrayHandle]) -> list[tuple[str, ArrayHandle]]:
    """The stored arrays that these are, or are derived from, each once, with their names."""
    found: dict[str, ArrayHandle] = {}
    for handle in handles:
        for root, data in handle.roots():
            found.setdefault(data.name, root)
    return list(found.items())


def _digest(known: Known, handle: ArrayHandle) -> str | None:
    entry = on_record(known, handle)
    return None if entry is None else entry.digest


def _carried(known: Known, handle: ArrayHandle) -> str | None:
    """The digest on record of what an array is moved from undecoded."""
    return _digest(known, handle) if handle.stored is not None else None


def _differs(text: str, known: Known, handle: ArrayHandle) -> bool:
    return _digest(known, handle) not in (None, text)
