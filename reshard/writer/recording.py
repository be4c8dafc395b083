"""Digests: of what a job writes, of what it reads where those are recorded, and of what it has
written, read back."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from reshard.arrays.boxes import grid_size
from reshard.arrays.derived import stored_chunks
from reshard.arrays.digests import Digest
from reshard.arrays.dtypes import name_of
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint, Item, Source
from reshard.engine.budget import in_memory
from reshard.engine.plan import ArrayPlan
from reshard.errors import CorruptCheckpointError
from reshard.hints import Hint
from reshard.loader import orbax
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.tree import Path, format_path
from reshard.verify.digest_record import (
    FILE,
    ArrayRecord,
    Record,
    forget_hint,
    read_record,
    stored_record,
)
from reshard.verify.values import least_memory, read_digests
from reshard.verify.verification import check, reason
from reshard.writer.job_plan import ItemPlan
from reshard.writer.journal import ItemProgress
from reshard.writer.siblings import is_sibling

NO_RECORD = Record({}, {}, {}, {})


def source_record(ckpt: Checkpoint, handles: Sequence[ArrayHandle]) -> Record:
    """What is recorded of the source, by names in its store; raises CorruptCheckpointError where
    that is of other arrays or files. Sibling items and files need only be there: they are compared
    when they are copied, with `check_copied`."""
    source = ckpt.source
    record = read_record(source.store.directory / FILE)
    if record is None:
        return NO_RECORD
    kinds = [(root.path, record.other_kind(root)) for root in _stored(handles).values()]
    problems = [f"{format_path(path)}: {text} on record" for path, text in kinds if text]
    problems += record.gone_arrays(source, "on record")
    source.store.directory.ahead(record.files)
    files = record.changed_files(
        source, lambda file: None if is_sibling(ckpt, file) else file.sha256()
    )
    if problems or files:
        raise _not_as_recorded(source, problems, files)
    return record


def check_copied(item: ItemPlan, hashes: Mapping[str, str]) -> None:
    """Raises CorruptCheckpointError unless siblings, by path, have the recorded hashes."""
    source = item.ckpt.source
    read = {source.root / path: sha256 for path, sha256 in hashes.items()}
    folders = {"", *(path.rpartition("/")[0] for path in item.record.files)}
    source.store.directory.ahead(lists=sorted(folders))
    if files := item.record.changed_files(source, read.get):
        raise _not_as_recorded(source, [], files)


def _not_as_recorded(
    source: Source, problems: list[str], files: list[str]
) -> CorruptCheckpointError:
    forget = [] if problems else [forget_hint(source.store.directory / FILE)]
    return CorruptCheckpointError(
        f"`{source.path}` is not what its digests were recorded of",
        problems + files,
        [verify_hint(source), *forget],
    )


def read_again(
    handles: Sequence[ArrayHandle], arrays: Sequence[ArrayPlan], record: Record, digest: bool
) -> tuple[list[ArrayHandle], list[ArrayHandle]]:
    """What else is read for its digests: with `digest`, also arrays that are copied without one."""
    pairs = [*zip(handles, arrays, strict=True)]
    as_read = {h.stored.name for h, a in pairs if h.stored is not None and not a.moved}
    roots = _stored(h for h in handles if h.stored is None)
    sources = [h for name, h in roots.items() if name not in as_read and record.digest(h)]
    verbatim = [h for h, a in pairs if digest and a.moved and not record.digest(h)]
    return sources, verbatim


def read_costs(item: ItemPlan, verify: bool) -> Iterator[tuple[Path, int]]:
    """Path, and bytes that a chunk takes, of all that is read beside what is rewritten."""
    for handle in (*item.read_sources, *item.read_verbatim):
        yield handle.path, least_memory((handle,))
    if verify:
        for handle, array in zip(item.handles, item.arrays, strict=True):
            yield handle.path, _read_back_cost(item, handle, array)


def _read_back_cost(item: ItemPlan, handle: ArrayHandle, array: ArrayPlan) -> int:
    """Bytes that a chunk takes, once it is written; at most, where it is encoded anew."""
    if array.moved:
        return least_memory((handle,))
    itemsize = handle.dtype.itemsize
    encoded = item.format.encoding(handle).most_encoded(array.chunk, itemsize)
    decoded = math.prod(array.chunk) * itemsize
    return in_memory(encoded + decoded, decoded, decoded)


# Arrays that were read, with the digests of what was read.
ReadDigests = list[tuple[ArrayHandle, str]]


def records(
    item: ItemPlan, digests: Mapping[Path, Digest], max_memory: int, report: Callable[[int], None]
) -> dict[str, ArrayRecord]:
    """What is to be recorded of the arrays that were written, by their names in the destination.
    What is recorded of the source is compared with what was read of it: `digests`, and more. Raises
    CorruptCheckpointError with all arrays that cannot be read, or whose values are others."""
    sources, verbatim = read_apart(item, max_memory, report)
    rewritten = [(h, digests[h.path].text()) for h in item.rewritten]
    check_recorded(item, [*rewritten, *sources])
    return array_records(item, [*rewritten, *verbatim])


def read_apart(
    item: ItemPlan, max_memory: int, report: Callable[[int], None]
) -> tuple[ReadDigests, ReadDigests]:
    """What is read beside what is rewritten: arrays that others are made of, as they are stored,
    and arrays that are copied verbatim."""
    # By name: another leaf may have been renamed to the path of a source.
    sources = _stored(item.read_sources)
    by_name = [h.at((name,)) for name, h in sources.items()]
    read, failed = read_digests([*by_name, *item.read_verbatim], max_memory, report)
    if failed:
        source = item.ckpt.source
        raise CorruptCheckpointError(
            f"arrays of `{source.path}` cannot be read",
            [f"{format_path(path)}: {reason(error, path)}" for path, error in failed.items()],
            [verify_hint(source)],
        )
    return (
        [(h, read[name,]) for name, h in sources.items()],
        [(h, read[h.path]) for h in item.read_verbatim],
    )


def check_recorded(item: ItemPlan, read: ReadDigests) -> None:
    """Raises CorruptCheckpointError where what was read is not what is recorded of the source."""
    wrong = [h for h, text in read if item.record.digest(h) not in (None, text)]
    if wrong:
        told = [f"{format_path(h.path)}  {stored_record(h)}" for h in wrong]
        source = item.ckpt.source
        raise other_values(str(source.path), told, verify_hint(source))


def other_values(source: str, told: Sequence[str], hint: Hint) -> CorruptCheckpointError:
    """The error for arrays of a source that are not what is recorded of them, a line each."""
    return CorruptCheckpointError(
        f"values were read from `{source}` that are not those its digests were recorded of",
        told,
        [hint],
    )


def array_records(item: ItemPlan, read: ReadDigests) -> dict[str, ArrayRecord]:
    """What is to be recorded of all arrays, by their names in the destination; of those that were
    not read, what is recorded of the source."""
    texts = {h.path: text for h, text in read}
    return {
        stored_name(h.path): ArrayRecord(
            name_of(h.dtype), h.shape, texts.get(h.path, item.record.digest(h))
        )
        for h in item.handles
    }


def to_read_back(
    item: ItemPlan, progress: ItemProgress, max_memory: int, verify: bool
) -> list[ArrayHandle]:
    """The arrays of an item that are read back once they are written: all of them, or those that an
    earlier run has written something of, as far as their chunks fit into memory. What it has added
    to their digests is what it read; what it wrote may have changed on the disk since."""
    return [
        handle
        for handle, array in zip(item.handles, item.arrays, strict=True)
        if verify
        or (handle.path in progress.digests and _read_back_cost(item, handle, array) <= max_memory)
    ]


def read_back(
    item: ItemPlan,
    directory: Location,
    handles: Sequence[ArrayHandle],
    max_memory: int,
    report: Callable[[int], None],
) -> None:
    """Reads back some arrays of an item; raises CorruptCheckpointError where they differ."""
    names = {stored_name(handle.path) for handle in handles}
    hint = verify_hint(item.ckpt.source)
    check_written(_item(item, directory), names, hint, max_memory, report)


def check_written(
    item: Item,
    names: Collection[str],
    hint: Hint,
    max_memory: int,
    report: Callable[[int], None],
) -> None:
    """Reads back arrays of an item, by their names; raises CorruptCheckpointError where they are
    not what is recorded beside them. The hint says how to look at the source."""
    written = orbax.read(item)
    chosen = {leaf.path: leaf for leaf in written.arrays if stored_name(leaf.path) in names}
    found = check(written.replace(chosen), max_memory, report)
    if not found.ok:
        raise CorruptCheckpointError(
            "what was written is not what is read back", found.problems, [hint]
        )


def check_whole(item: ItemPlan, directory: Location) -> list[StoredValue]:
    """All that is stored of an item, after it was written. Raises CorruptCheckpointError if
    something of it is gone, by an earlier run or, in a bucket, since."""
    written = orbax.read(_item(item, directory))
    store = written.source.store
    plans = {array.layout.path: array for array in item.arrays}
    sources = {handle.path: handle for handle in item.handles}
    for handle in written.arrays:
        found = len(handle.stored_sizes())
        files = {value.file for value in store.values[stored_name(handle.path)].values()}
        for file in sorted(file for file in files if file is not None):
            if not (store.directory / file).exists():
                text = f"the data file `{file}` is gone from `{directory}`"
                raise CorruptCheckpointError(text)
        if directory.is_local:  # where a chunk that is not there may stand for a fill value
            continue
        chunks = grid_size(handle.shape, plans[handle.path].chunk)
        if plans[handle.path].moved:
            source = sources[handle.path]
            moved = stored_chunks(source, item.format.encoding(source)) or ()
            chunks = sum(key != store.metadata_key for key in moved)
        if found < chunks:
            raise CorruptCheckpointError(
                f"{chunks - found} of the {chunks} chunks of {format_path(handle.path)} are "
                f"gone from `{directory}`"
            )
    return [value for values in store.values.values() for value in values.values()]


def _item(item: ItemPlan, directory: Location) -> Item:
    """An item where it is written."""
    source = item.ckpt.source
    return Item(directory, source.kind, source.v1, source.step, source.item, (), ())


def verify_hint(source: Source) -> Hint:
    """What to type to look at a source."""
    step = str(source.root / source.step)
    return Hint(("verify_item", step, source.item) if len(source.items) > 1 else ("verify", step))


def _stored(handles: Iterable[ArrayHandle]) -> dict[str, ArrayHandle]:
    """Name -> stored array, uncast: those that these are, or are derived from."""
    found: dict[str, ArrayHandle] = {}
    for handle in handles:
        for root, data in handle.roots():
            cast = root.dtype != root.stored_dtype
            found.setdefault(
                data.name, dataclasses.replace(root, dtype=root.stored_dtype) if cast else root
            )
    return found
