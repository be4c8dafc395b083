"""Digests: of what a job writes, of what it reads where those are recorded, and of what it has
written, read back."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from reshard.arrays.boxes import grid_size
from reshard.arrays.derived import stored_chunks
from reshard.arrays.digests import Digest
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
        [*_hints(source), *forget],
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


def records(
    item: ItemPlan, digests: Mapping[Path, Digest], max_memory: int, report: Callable[[int], None]
) -> dict[str, ArrayRecord]:
    """What is to be recorded of the arrays that were written, by their names in the destination.
    What is recorded of the source is compared with what was read of it: `digests`, and more. Raises
    CorruptCheckpointError with all arrays that cannot be read, or whose values are others."""
    record, source = item.record, item.ckpt.source
    # By name: another leaf may have been renamed to the path of a source.
    sources = _stored(item.read_sources)
    by_name = [dataclasses.replace(h, path=(name,)) for name, h in sources.items()]
    read, failed = read_digests([*by_name, *item.read_verbatim], max_memory, report)
    if failed:
        raise CorruptCheckpointError(
            f"arrays of `{source.path}` cannot be read",
            [f"{format_path(path)}: {reason(error, path)}" for path, error in failed.items()],
            _hints(source),
        )
    texts = {path: digest.text() for path, digest in digests.items()}
    compared = [(h, texts[h.path]) for h in item.rewritten]
    compared += [(h, read[name,]) for name, h in sources.items()]
    wrong = [h for h, text in compared if record.digest(h) not in (None, text)]
    if wrong:
        raise CorruptCheckpointError(
            f"values were read from `{source.path}` that are not those its digests were "
            "recorded of",
            [f"{format_path(h.path)}  {stored_record(h)}" for h in wrong],
            _hints(source),
        )
    texts |= {h.path: read[h.path] for h in item.read_verbatim}
    return {
        stored_name(h.path): ArrayRecord(h.dtype.name, h.shape, texts.get(h.path, record.digest(h)))
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
    written = _written(item, directory)
    chosen = {leaf.path: leaf for leaf in written.arrays if stored_name(leaf.path) in names}
    found = check(written.replace(chosen), max_memory, report)
    if not found.ok:
        raise CorruptCheckpointError(
            "what was written is not what is read back", found.problems, _hints(item.ckpt.source)
        )


def check_whole(item: ItemPlan, directory: Location) -> list[StoredValue]:
    """All that is stored of an item, after it was written. Raises CorruptCheckpointError if
    something of it is gone, by an earlier run or, in a bucket, since."""
    written = _written(item, directory)
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


def _written(item: ItemPlan, directory: Location) -> Checkpoint:
    source = item.ckpt.source
    return orbax.read(Item(directory, source.kind, source.v1, source.step, source.item, (), ()))


def _hints(source: Source) -> list[Hint]:
    """What to type to look at a source."""
    step = str(source.root / source.step)
    return [Hint(("verify_item", step, source.item) if len(source.items) > 1 else ("verify", step))]


def _stored(handles: Iterable[ArrayHandle]) -> dict[str, ArrayHandle]:
    """Name -> stored array, uncast: those that these are, or are derived from."""
    found: dict[str, ArrayHandle] = {}
    for handle in handles:
        for root, data in handle.roots():
            found.setdefault(data.name, dataclasses.replace(root, dtype=root.stored_dtype))
    return found
