"""What a job reads beside what it rewrites: for digests; and what it has written, once more."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint
from reshard.errors import CorruptCheckpointError, MemoryLimitError
from reshard.loader import orbax
from reshard.loader.detection import Item
from reshard.storage.location import Location
from reshard.tree import Path
from reshard.verify import verification
from reshard.verify.values import check_fits
from reshard.writer.item_progress import ItemProgress
from reshard.writer.job_plan import ItemPlan
from reshard.writer.recording import verify_hints


def chunks_read(item: ItemPlan, verify: bool) -> Iterator[tuple[Path, Shape, int]]:
    """Path, chunk shape and bytes of an element of all that is read beside what is rewritten."""
    for handle in (*item.read_again.sources, *item.read_again.verbatim):
        yield handle.path, handle.chunk_shape, handle.stored_dtype.itemsize
    for handle, array in zip(item.handles, item.arrays, strict=True):
        if verify:
            yield handle.path, array.chunk, handle.dtype.itemsize


def to_read_back(
    item: ItemPlan, progress: ItemProgress, max_memory: int, verify: bool
) -> list[ArrayHandle]:
    """The arrays of an item that are read back once they are written: all of them, or those that an
    earlier run has written something of, as far as their chunks fit into memory. What it has added
    to their digests is what it read; what it wrote may have changed on the disk since."""
    if verify:
        return list(item.handles)
    begun = []
    for handle, array in zip(item.handles, item.arrays, strict=True):
        if handle.path in progress.digests:
            with contextlib.suppress(MemoryLimitError):
                check_fits([(handle.path, array.chunk, handle.dtype.itemsize)], max_memory)
                begun.append(handle)
    return begun


def read_back(
    item: ItemPlan,
    directory: Location,
    handles: Sequence[ArrayHandle],
    max_memory: int,
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
    written = _written(item, directory)
    chosen = {leaf.path: leaf for leaf in written.arrays if stored_name(leaf.path) in names}
    found = verification.verify(written.replace(chosen), max_memory=max_memory, progress=progress)
    if not found.ok:
        raise CorruptCheckpointError(
            "what was written is not what is read back",
            found.problems,
            verify_hints(item.ckpt.source),
        )


def check_whole(item: ItemPlan, directory: Location) -> None:
    """Raises CorruptCheckpointError if something is gone of what an earlier run had written."""
    written = _written(item, directory)
    store = written.source.store
    for handle in written.arrays:
        handle.stored_sizes()
        files = {value.file for value in store.values[stored_name(handle.path)].values()}
        for file in sorted(file for file in files if file is not None):
            if not (store.directory / file).exists():
                raise CorruptCheckpointError(f"the data file `{file}` is gone from `{directory}`")


def _written(item: ItemPlan, directory: Location) -> Checkpoint:
    """What was written of an item."""
    source = item.ckpt.source
    found = Item(directory, source.kind, source.v1, source.step, source.item, (), ())
    return orbax.read(found)
