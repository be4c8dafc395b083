"""What a job reads beside what it copies: for digests; and what it has written, once more."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint
from reshard.errors import CorruptCheckpointError, MemoryLimitError
from reshard.loader import orbax
from reshard.loader.detection import Item
from reshard.storage.location import Location
from reshard.tree import Path
from reshard.verify import verification
from reshard.verify.values import check_fits, nbytes
from reshard.writer.item_progress import ItemProgress
from reshard.writer.prepare import Job
from reshard.writer.recording import ReadAgain, verify_hints


def chunks_read(
    job: Job, again: ReadAgain, verify: bool
) -> Iterator[tuple[Path, tuple[int, ...], int]]:
    """Path, chunk shape and bytes of an element of all that is read beside what is copied."""
    for handle in (*again.sources, *again.moved):
        yield handle.path, handle.chunk_shape, handle.stored_dtype.itemsize
    for handle, plan in zip(job.handles, job.plans, strict=True):
        if verify:
            yield handle.path, plan.chunk, handle.dtype.itemsize


def bytes_read(again: Sequence[ReadAgain], written: Sequence[list[ArrayHandle]]) -> int:
    """Decoded bytes of all that is read beside what is copied."""
    more = [handle for each in again for handle in (*each.sources, *each.moved)]
    back = [handle for handles in written for handle in handles]
    return nbytes(more) + sum(math.prod(h.shape) * h.dtype.itemsize for h in back)


def to_read_back(job: Job, so_far: ItemProgress, memory: int, verify: bool) -> list[ArrayHandle]:
    """The arrays of an item that are read back once they are written: all of them, or those that an
    earlier run has written something of, as far as their chunks fit into memory. What it has added
    to their digests is what it read; what it wrote may have changed on the disk since."""
    if verify:
        return list(job.handles)
    begun = []
    for handle, array in zip(job.handles, job.plans, strict=True):
        if handle.path in so_far.digests:
            with contextlib.suppress(MemoryLimitError):
                check_fits([(handle.path, array.chunk, handle.dtype.itemsize)], memory)
                begun.append(handle)
    return begun


def read_back(
    job: Job,
    directory: Location,
    handles: Sequence[ArrayHandle],
    memory: int,
    report: Callable[[int], None],
) -> None:
    """Reads back some arrays of an item; raises CorruptCheckpointError if they differ from what was
    written."""
    done = 0

    def progress(now: int, whole: int) -> None:
        nonlocal done
        report(now - done)
        done = now

    names = {stored_name(handle.path) for handle in handles}
    written = _written(job, directory)
    chosen = {leaf.path: leaf for leaf in written.arrays if stored_name(leaf.path) in names}
    found = verification.verify(written.replace(chosen), max_memory=memory, progress=progress)
    if not found.ok:
        raise CorruptCheckpointError(
            "what was written is not what is read back", found.problems, verify_hints(job)
        )


def check_whole(job: Job, directory: Location) -> None:
    """Raises CorruptCheckpointError if something is gone of what an earlier run had written."""
    written = _written(job, directory)
    store = written.source.store
    for handle in written.arrays:
        handle.stored_sizes()
        files = {value.file for value in store.values[stored_name(handle.path)].values()}
        for file in sorted(file for file in files if file is not None):
            if not (store.directory / file).exists():
                raise CorruptCheckpointError(f"the data file `{file}` is gone from `{directory}`")


def _written(job: Job, directory: Location) -> Checkpoint:
    """What was written of an item."""
    source = job.ckpt.source
    item = Item(directory, source.kind, source.v1, source.step, source.item, (), ())
    return orbax.read(item)
