"""The arrays of an item on their way to a directory, or some of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.derived import stored_chunks
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.engine.budget import Budget, in_flight
from reshard.engine.plan import ArrayPlan
from reshard.storage import posix
from reshard.storage.location import Location
from reshard.storage.ocdbt import new_context
from reshard.tree import Path
from reshard.writer import database
from reshard.writer.job_plan import Plan
from reshard.writer.journal import ItemProgress
from reshard.writer.share_parts import BoxRange, ValueRange
from reshard.writer.stream import Target, move_values, write_boxes, write_values
from reshard.writer.target_format import TargetFormat


class ItemWork(NamedTuple):
    """What is written of an item.

    Attributes:
      directory: the item's.
      stages: the databases that batches are committed to, where arrays are not in plain files.
      format: how arrays are stored.
      handles: those that are rewritten.
      metadata: metadata that are written apart from arrays, by their keys.
      values: what is copied as it is.
      boxes: what is rewritten.
      described: nothing else is written of metadata.
    """

    directory: Location
    stages: Sequence[str]
    format: TargetFormat
    handles: Sequence[ArrayHandle]
    metadata: Mapping[str, bytes]
    values: Sequence[ValueRange]
    boxes: Sequence[BoxRange]
    described: bool


def write_arrays(
    work: ItemWork,
    progress: ItemProgress,
    max_memory: int,
    cores: int,
    committed: Callable[[], None],
    report: Callable[[int], None],
) -> dict[Path, Digest]:
    """Writes some of an item, less what has been committed according to its progress. The digests
    of what was rewritten, of all that is known of it by now. `committed` and `report` are as of
    `write_boxes`."""
    directory, form = work.directory, work.format
    writeback = None
    if directory.is_local and work.stages:
        writeback = posix.Writeback(directory / work.stages[0] / "d")
    specs = [directory.spec]
    if form.ocdbt:
        specs = [database.stage_spec(directory, stage, form.file_bytes) for stage in work.stages]
    context = new_context(database.STAGE_CACHE_BYTES)
    target = Target(directory, specs, context, form, work.described)
    digests = {handle.path: Digest(handle.shape, handle.dtype) for handle in work.handles}
    progress.resume(digests)

    def written() -> None:
        if writeback is not None:
            writeback.advance()
        committed()

    values = []
    for handle, start, stop in work.values:
        name, (_, root) = stored_name(handle.path), next(handle.roots())
        kvstore = functools.cache(root.store.kvstore)
        chunks = stored_chunks(handle, form.encoding(handle)) or {}
        for key, chunk in [*chunks.items()][start:stop]:
            values.append((kvstore(chunk.name), chunk.key, f"{name}/{key}", chunk.value.size))
    arrays: list[ArrayPlan] = [array for group in work.boxes for array in group.arrays]
    sources = {handle.path: handle for handle in work.handles}
    try:
        largest = max((array.box_bytes for array in arrays), default=0)
        with Budget(in_flight(max_memory, cores, largest, _is_remote(work))) as budget:
            if not progress.merged:
                write_values(work.metadata, target, budget)
            move_values(values, target, progress, budget, written, report)
            write_boxes(work.boxes, sources, target, digests, progress, budget, written, report)
    finally:
        if writeback is not None:
            writeback.finish()
    return digests


def _is_remote(work: ItemWork) -> bool:
    """Whether something is read from a bucket, or written to one."""
    handles = (*work.handles, *(some.handle for some in work.values))
    stores = (data.store for handle in handles for _, data in handle.roots())
    return not (work.directory.is_local and all(s.directory.is_local for s in stores))


def link_files(plan: Plan, directory: Location) -> bool:
    """Shares files with the source, as a plan says; False where the file system makes no links."""
    for item in plan.items:
        store = item.ckpt.source.store
        if item.linked and not database.link_data_files(
            store, item.directory(directory), item.files or ()
        ):
            return False
    return all(posix.link(s.source, directory / s.path) for s in plan.siblings if s.linked)
