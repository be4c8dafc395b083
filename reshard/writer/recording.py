"""Digests of what a job writes, and of what it reads where those are recorded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint, Source
from reshard.engine.plan import ArrayPlan
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
from reshard.writer.job_plan import ItemPlan, ReadAgain
from reshard.writer.siblings import is_sibling

Recorded = Mapping[str, ArrayRecord]
NO_RECORD = Record({}, {}, {}, {})


def source_record(ckpt: Checkpoint, handles: Sequence[ArrayHandle]) -> Record:
    """What is recorded of the source, by names in its store.

    The sibling items and files need only be there: they are compared when they are copied, with
    `check_copied`.

    Args:
      ckpt: the tree of an item.
      handles: its arrays.

    Raises:
      CorruptCheckpointError: the record is of other arrays or files than those that are there.
    """
    source = ckpt.source
    file = source.store.directory / FILE
    record = read_record(file)
    if record is None:
        return NO_RECORD
    kinds = arrays_of_other_kinds([h for _, h in _stored(handles)], record, "on record")
    problems = [f"{format_path(path)}: {text}" for path, text in kinds]
    problems += gone_arrays(source, record, "on record")
    files = [*changed_files(source, record, lambda file: is_sibling(ckpt, file))]
    if problems or files:
        raise _not_as_recorded(source, problems, files)
    return record


def check_copied(item: ItemPlan, hashes: Mapping[str, str]) -> None:
    """Raises CorruptCheckpointError unless sibling items and files have the recorded hashes.

    Args:
      item: the item.
      hashes: path below the source's root -> SHA-256 of what was read.
    """
    source = item.ckpt.source
    read = {source.root / path: sha256 for path, sha256 in hashes.items()}
    recorded = recorded_files(source, item.record)
    files = [
        changed_file(file) for file, sha256 in recorded.items() if read.get(file, sha256) != sha256
    ]
    if files:
        raise _not_as_recorded(source, [], files)


def _not_as_recorded(
    source: Source, problems: list[str], files: list[str]
) -> CorruptCheckpointError:
    forget = [] if problems else [forget_hint(source.store.directory / FILE)]
    return CorruptCheckpointError(
        f"`{source.path}` is not what its digests were recorded of",
        problems + files,
        [*verify_hints(source), *forget],
    )


def new_digests(item: ItemPlan) -> dict[Path, Digest]:
    """A digest for each array that is decoded, to which its values are to be added."""
    return {h.path: Digest(h.shape, h.dtype) for h in item.rewritten}


def read_again(
    handles: Sequence[ArrayHandle], arrays: Sequence[ArrayPlan], recorded: Recorded, digest: bool
) -> ReadAgain:
    """What is to be read for its digests, beside what is rewritten.

    Args:
      handles: the arrays of an item.
      arrays: the plan of each of them.
      recorded: what is recorded of the source's arrays.
      digest: whether arrays that are copied verbatim are to get a digest.
    """
    pairs = [*zip(handles, arrays, strict=True)]
    straight = {h.stored.name for h, a in pairs if h.stored is not None and not a.moved}
    verbatim = [h for h, a in pairs if digest and a.moved and _copied_digest(recorded, h) is None]
    roots = _stored(h for h in handles if h.stored is None)
    sources = [h for name, h in roots if name not in straight and _digest(recorded, h)]
    return ReadAgain(sources, verbatim)


def records(
    item: ItemPlan,
    digests: Mapping[Path, Digest],
    max_memory: int,
    report: Callable[[int], None],
) -> dict[str, ArrayRecord]:
    """What is to be recorded of the arrays that were written, by their names in the destination.
    What is recorded of the source is compared with what was read of it.

    Args:
      item: the item.
      digests: complete ones of all arrays that were decoded.
      max_memory: bytes in flight at most, for what is read.
      report: called with numbers of bytes that were read.

    Raises:
      CorruptCheckpointError: arrays that cannot be read, or whose values are not those recorded:
        all of them.
    """
    recorded, again, source = item.record.arrays, item.read_again, item.ckpt.source
    texts = {path: digest.text() for path, digest in digests.items()}
    by_name = {
        (name,): replace(h, path=(name,), dtype=h.stored_dtype)
        for name, h in _stored(again.sources)
    }
    read, failed = read_digests([*by_name.values(), *again.verbatim], max_memory, report)
    if failed:
        raise CorruptCheckpointError(
            f"arrays of `{source.path}` cannot be read",
            [f"{format_path(path)}: {reason(error, path)}" for path, error in failed.items()],
            verify_hints(source),
        )
    wrong = [
        h for h in item.rewritten if h.stored is not None and _differs(texts[h.path], recorded, h)
    ]
    wrong += [h for name, h in _stored(again.sources) if _differs(read[name,], recorded, h)]
    if wrong:
        raise CorruptCheckpointError(
            f"values were read from `{source.path}` that are not those its digests were "
            "recorded of",
            [f"{format_path(h.path)}  {stored_record(h)}" for h in wrong],
            verify_hints(source),
        )
    texts |= {h.path: read[h.path] for h in again.verbatim}
    return {
        stored_name(h.path): ArrayRecord(
            h.dtype.name, h.shape, texts.get(h.path, _copied_digest(recorded, h))
        )
        for h in item.handles
    }


def verify_hints(source: Source) -> list[str]:
    """What to type to look at a source."""
    step = str(source.root / source.step)
    return [Hint(("verify_item", step, source.item) if len(source.items) > 1 else ("verify", step))]


def _stored(handles: Iterable[ArrayHandle]) -> list[tuple[str, ArrayHandle]]:
    """The stored arrays that these are, or are derived from, each once, with their names."""
    found: dict[str, ArrayHandle] = {}
    for handle in handles:
        for root, data in handle.roots():
            found.setdefault(data.name, root)
    return list(found.items())


def _digest(recorded: Recorded, handle: ArrayHandle) -> str | None:
    entry = on_record(recorded, handle)
    return None if entry is None else entry.digest


def _copied_digest(recorded: Recorded, handle: ArrayHandle) -> str | None:
    """The recorded digest of what an array is copied from."""
    return _digest(recorded, handle) if handle.stored is not None else None


def _differs(text: str, recorded: Recorded, handle: ArrayHandle) -> bool:
    return _digest(recorded, handle) not in (None, text)
