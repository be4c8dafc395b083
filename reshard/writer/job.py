"""Jobs from disk to disk: carry a plan out and commit the result."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence

from reshard.checkpoint import Checkpoint, stored_name
from reshard.errors import ReshardError
from reshard.formed import stored_chunks
from reshard.planner import Plan
from reshard.schedule import IN_FLIGHT_PER_CORE, WINDOW, batches
from reshard.store import file_spec, new_context
from reshard.units import parse_bytes
from reshard.writer import local, ocdbt
from reshard.writer.documents import documents
from reshard.writer.prepare import Job, cores, parse_chunks, prepare
from reshard.writer.stream import (
    Pending,
    Target,
    move_values,
    stream_boxes,
    target_metadata,
    write_values,
)
from reshard.writer.surroundings import copy_surroundings, write_markers

Checkpoints = Checkpoint | Sequence[Checkpoint]
Progress = Callable[[int, int], None]


def plan(
    ckpt: Checkpoints,
    destination: str | os.PathLike | None = None,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    link: bool = True,
    overwrite: bool = False,
) -> Plan:
    """What `save` would do with the same arguments, without doing it.

    Args:
      ckpt: what to save; see `save`.
      destination: where to; without it, data files are taken to be shareable.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"`, `"keep"`, or the most decoded bytes of a chunk.
      link: whether unchanged data files may be shared with the source.
      overwrite: whether an existing destination is to be replaced.

    Returns:
      The plan; what would make `save` raise is in its `problems`.
    """
    _, result, found = prepare(
        _as_list(ckpt),
        None if destination is None else _absolute(destination),
        max_memory=parse_bytes(max_memory),
        chunks=parse_chunks(chunks),
        link=link,
        overwrite=overwrite,
    )
    return dataclasses.replace(
        result,
        problems=tuple(line for error in found for line in (error.summary, *error.problems)),
        hints=tuple(dict.fromkeys(hint for error in found for hint in error.hints)),
    )


def save(
    ckpt: Checkpoints,
    destination: str | os.PathLike,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    link: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Writes a checkpoint, in the layout that its source has; whole or not at all.

    A step stays a step with its other items, a manager's root stays a root with that step, v1
    stays v1; format, codec and its level stay the source's. Nothing but `max_memory` bytes is in
    flight at any time. Chunks that do not change are not decoded; data files that stay in use are
    shared with the source by hard links, which is safe: Orbax and TensorStore never write to a
    data file again.

    Args:
      ckpt: the checkpoint, or several steps of one manager's root.
      destination: a local path; nothing may be there unless `overwrite`.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"` for one chunk a shard of the new mesh (split where memory asks for it),
        `"keep"` for the source's chunks, or the most decoded bytes of a chunk.
      link: share data files where that is possible; otherwise stored chunks are copied.
      overwrite: replace what is there, once the new checkpoint is complete.
      progress: called with (bytes done, bytes in all) after each batch.

    Returns:
      The plan that was carried out.

    Raises:
      DestinationError: the destination exists, is being written, or cannot be written.
      MemoryLimitError: a stored chunk does not fit in `max_memory`.
      CorruptCheckpointError: stored data is missing, does not decode, or belongs to two leaves.
    """
    target = _absolute(destination)
    checkpoints = _as_list(ckpt)
    memory = parse_bytes(max_memory)
    grid = parse_chunks(chunks)

    def prepared(link: bool) -> tuple[list[Job], Plan]:
        jobs, total, found = prepare(
            checkpoints, target, max_memory=memory, chunks=grid, link=link, overwrite=overwrite
        )
        _raise_all(found)
        return jobs, total

    jobs, total = prepared(link)
    with local.committed_directory(target, overwrite=overwrite) as directory:
        copy_surroundings(checkpoints, directory)
        linked = [_link(job, directory) for job in jobs]
        if not all(linked):
            jobs, total = prepared(link=False)  # the file system forbids links
        report = _reporter(total, progress)
        for job in jobs:
            _write_item(job, _item_directory(job, directory), memory, report)
        local.sync(directory)
        write_markers(checkpoints, directory, target)
    return total


def _raise_all(found: Sequence[ReshardError]) -> None:
    """Raises the errors of several leaves as one, of the type of the first."""
    if len(found) == 1:
        raise found[0]
    if found:
        problems = [line for error in found for line in (error.summary, *error.problems)]
        hints = [hint for error in found for hint in error.hints]
        raise type(found[0])(f"{len(found)} problems", problems, hints)


def _as_list(ckpt: Checkpoints) -> list[Checkpoint]:
    return [ckpt] if isinstance(ckpt, Checkpoint) else list(ckpt)


def _absolute(path: str | os.PathLike) -> pathlib.Path:
    return pathlib.Path(os.path.abspath(os.fspath(path).removeprefix("file://")))


def _item_directory(job: Job, directory: pathlib.Path) -> pathlib.Path:
    source = job.ckpt.source
    return directory / source.step / source.item


def _link(job: Job, directory: pathlib.Path) -> bool:
    """Makes the directory of an item and shares data files with it; False if that is forbidden."""
    item = _item_directory(job, directory)
    item.mkdir(parents=True, exist_ok=True)
    store = job.ckpt.source.store
    return not job.linked or ocdbt.link_data_files(store, item, job.files or ())


def _reporter(total: Plan, progress: Progress | None) -> Callable[[int], None]:
    whole = sum(a.decoded_bytes for a in total.arrays if not a.moved) + sum(
        a.bytes_written for a in total.arrays if a.moved
    )
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, whole), whole)  # metadata of moved arrays are not in `whole`

    return report


def _write_item(
    job: Job, directory: pathlib.Path, memory: int, report: Callable[[int], None]
) -> None:
    store = job.ckpt.source.store
    writeback = local.Writeback(directory / ocdbt.STAGE / "d")
    spec = ocdbt.stage_spec(directory) if store.ocdbt else file_spec(directory)
    context = new_context(ocdbt.STAGE_CACHE_BYTES)
    target = Target(spec, context, store.driver, store.fills)
    sources = {handle.path: handle for handle in job.handles}
    names = {path: stored_name(path) for path in sources}
    pending = Pending(memory, writeback.advance)
    stores = functools.cache(store.kvstore)
    values = [
        (stores(chunk.name), chunk.key, f"{names[h.path]}/{chunk.new_key}", chunk.value.size)
        for h in job.copied
        for chunk in stored_chunks(h) or ()
    ]
    regridded = {
        f"{names[h.path]}/{store.metadata_key}": target_metadata(h, h.chunk_shape)
        for h in (*job.linked, *job.copied)
        if h.formed is not None
    }
    try:
        write_values(regridded, target)
        move_values(
            values,
            target,
            min(memory, IN_FLIGHT_PER_CORE * cores()) // (2 * WINDOW),
            pending,
            report,
        )
        stream_boxes(batches(job.plans, memory, cores()), sources, target, names, pending, report)
        pending.finish()
    finally:
        pending.abandon()
        writeback.finish()
    if store.ocdbt and job.plans:
        linked = {names[h.path]: h for h in job.linked}
        staged = bool(values or regridded) or any(not a.moved for a in job.plans)
        ocdbt.merge(store, directory, linked, staged)
    chunks = {a.layout.path: a.chunk for a in job.plans}
    for name, data in documents(job.ckpt, chunks).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
