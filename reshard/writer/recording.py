"""Digests of what a job writes, and of what it reads where those are on record."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from reshard.checkpoint import ArrayHandle, stored_name
from reshard.digests import Digest
from reshard.errors import CorruptCheckpointError
from reshard.reading import read_digests
from reshard.records import FILE, ArrayRecord, read_record
from reshard.tree import Path, format_path, shell_quoted
from reshard.verification import changed_files, stored_record
from reshard.writer.prepare import Job

Known = Mapping[str, ArrayRecord]


def known_arrays(job: Job) -> Known:
    """What is on record of the source's arrays, by their names in its store.

    Raises:
      CorruptCheckpointError: the record is of other arrays or files than those that are there.
    """
    source = job.ckpt.source
    record = read_record(source.store.directory / FILE)
    if record is None:
        return {}
    problems = []
    for handle in _stored(job.handles):
        entry, stored = record.arrays.get(handle.name), stored_record(handle)
        if entry is not None and str(entry) != str(stored):
            problems.append(f"{format_path(handle.path)}: it is {stored}, and {entry} on record")
    there = source.store.values
    gone = [name for name in record.arrays if name not in there]
    problems += [f"the array `{name}`: on record, and not there" for name in gone]
    problems += changed_files(source, record)
    if problems:
        raise CorruptCheckpointError(
            f"`{source.root}` is not what its digests were recorded of", problems, _hints(job)
        )
    return record.arrays


def new_digests(job: Job) -> dict[Path, Digest]:
    """A digest for each array that is decoded, to which its values are to be added."""
    plans = zip(job.handles, job.plans, strict=True)
    return {h.path: Digest(h.shape, h.dtype) for h, plan in plans if not plan.moved}


def records(
    job: Job,
    known: Known,
    digests: Mapping[Path, Digest],
    moved_too: bool,
    max_memory: int,
) -> dict[str, ArrayRecord]:
    """What is to be recorded of the arrays that were written, by their names in the destination.

    What is on record of the source is compared with what was read of it. Arrays that are cast or
    formed of others are not written as they were read: what they are made of is read once more.

    Args:
      job: the item.
      known: what is on record of the source.
      digests: complete ones of all arrays that were decoded.
      moved_too: arrays that were moved undecoded, and are not on record, are read for their digest.
      max_memory: bytes in flight at most, for what is read.

    Raises:
      CorruptCheckpointError: arrays whose values are not those on record: all of them.
    """
    texts = {path: digest.text() for path, digest in digests.items()}
    carried = {h.path: _digest(known, h) for h in job.handles if _is_stored(h)}
    bare = [h for h in job.handles if h.path not in texts and carried.get(h.path) is None]
    decoded = [h for h in job.handles if h.path in digests]
    straight = [h for h in decoded if _is_stored(h)]
    wrong = [h for h in straight if _differs(texts[h.path], known.get(h.name))]
    read = {h.name for h in straight}
    others = [
        h
        for h in _stored(h for h in decoded + bare * moved_too if not _is_stored(h))
        if h.name not in read and _digest(known, h) is not None
    ]
    by_name = _read((replace(h, path=(h.name,), dtype=h.stored_dtype) for h in others), max_memory)
    wrong += [h for h in others if _differs(by_name[h.name,], known.get(h.name))]
    if wrong:
        raise CorruptCheckpointError(
            f"values were read from `{job.ckpt.source.root}` that are not those its digests were "
            "recorded of",
            [f"{format_path(h.path)}  {stored_record(h)}" for h in wrong],
            _hints(job),
        )
    if moved_too:
        texts |= _read(bare, max_memory)
    return {
        stored_name(h.path): ArrayRecord(
            h.dtype.name, h.shape, texts.get(h.path, carried.get(h.path))
        )
        for h in job.handles
    }


def _read(handles: Iterable[ArrayHandle], max_memory: int) -> dict[Path, str]:
    """Digests of arrays that must be readable."""
    digests, failed = read_digests(handles, max_memory, lambda count: None)
    for error in failed.values():
        raise error
    return digests


def _hints(job: Job) -> list[str]:
    return [f"reshard verify {shell_quoted(str(job.ckpt.source.root))}"]


def _stored(handles: Iterable[ArrayHandle]) -> Iterator[ArrayHandle]:
    """The stored arrays that these are, or are made of, each once."""
    seen = set()
    todo = list(handles)[::-1]
    while todo:
        handle = todo.pop()
        if handle.formed is not None:
            todo += handle.formed.inputs[::-1]
        elif handle.name not in seen:
            seen.add(handle.name)
            yield handle


def _is_stored(handle: ArrayHandle) -> bool:
    """Whether an array has the values that are stored under its name."""
    return handle.formed is None and handle.dtype == handle.stored_dtype


def _digest(known: Known, handle: ArrayHandle) -> str | None:
    return known[handle.name].digest if handle.name in known else None


def _differs(text: str, entry: ArrayRecord | None) -> bool:
    return entry is not None and entry.digest is not None and entry.digest != text
