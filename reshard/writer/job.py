"""Jobs from disk to disk: plan one, carry it out, commit it."""

import collections
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from reshard.checkpoint import ArrayHandle, Checkpoint, collision_error, stored_name
from reshard.errors import CorruptCheckpointError, MemoryLimitError, ReshardError
from reshard.mesh import shard_shape
from reshard.planner import ArrayLayout, ArrayPlan, Plan, grid_size, plan_array, too_large
from reshard.schedule import IN_FLIGHT_PER_CORE, batches, peak_memory
from reshard.store import StoredValue, file_spec, new_context
from reshard.tree import format_path
from reshard.units import parse_bytes
from reshard.writer import local, ocdbt
from reshard.writer.documents import documents
from reshard.writer.estimate import encoded_ratio
from reshard.writer.stream import Pending, Target, move_values, stream_boxes
from reshard.writer.surroundings import copy_surroundings, surroundings, write_markers

# A data file is shared with the source if at least this part of it stays in use.
_WORTH_LINKING = 0.5
# Encoded estimates may be this far off when the room on the disk is checked.
_ESTIMATE_ERROR = 1.1

Checkpoints = Checkpoint | Sequence[Checkpoint]
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class _Job:
    """One item to write: its tree, each array's plan, and the data files to share with the source
    (None where nothing may be shared)."""

    ckpt: Checkpoint
    arrays: tuple[ArrayPlan, ...]
    files: frozenset[str] | None

    @property
    def linked(self) -> list[ArrayHandle]:
        """Arrays whose stored chunks stay where they are, in shared data files."""
        return [
            h
            for h, a in zip(self.ckpt.arrays, self.arrays, strict=True)
            if a.moved and _is_linked(h, self.files)
        ]

    @property
    def moved(self) -> list[ArrayHandle]:
        """Arrays whose stored chunks are copied undecoded."""
        return [
            h
            for h, a in zip(self.ckpt.arrays, self.arrays, strict=True)
            if a.moved and not _is_linked(h, self.files)
        ]


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
    found: list[ReshardError] = []
    target = None if destination is None else _absolute(destination)
    checkpoints = _as_list(ckpt)
    if target is not None:
        try:
            local.check_destination(target, checkpoints[0].source.root, overwrite)
        except ReshardError as error:
            found.append(error)
    memory = parse_bytes(max_memory)
    jobs = [_job(c, target, memory, _parse_chunks(chunks), link, found) for c in checkpoints]
    result = _total(jobs, memory)
    return dataclasses.replace(
        result,
        problems=tuple(line for e in found for line in (e.problems or ()) or (e.summary,)),
        hints=tuple(dict.fromkeys(hint for e in found for hint in e.hints)),
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
    local.check_destination(target, checkpoints[0].source.root, overwrite)
    memory = parse_bytes(max_memory)
    grid = _parse_chunks(chunks)

    def make_jobs(link: bool) -> list[_Job]:
        found: list[ReshardError] = []
        jobs = [_job(c, target, memory, grid, link, found) for c in checkpoints]
        raise_all(found)
        return jobs

    jobs = make_jobs(link)
    total = _total(jobs, memory)
    local.check_room(target, int(total.bytes_written * _ESTIMATE_ERROR))
    with local.committed_directory(target, overwrite=overwrite) as directory:
        copy_surroundings(checkpoints, directory)
        for job in jobs:
            source = job.ckpt.source
            item = directory / source.step / source.item
            item.mkdir(parents=True, exist_ok=True)
            if job.linked and not ocdbt.link_data_files(source.store, item, job.files or ()):
                jobs = make_jobs(False)  # the file system forbids links: copy instead
                total = _total(jobs, memory)
                break
        report = _reporter(total, progress)
        for job in jobs:
            source = job.ckpt.source
            _write_item(job, directory / source.step / source.item, memory, report)
        local.sync(directory)
        write_markers(checkpoints, directory, target)
    return total


def raise_all(found: Sequence[ReshardError]) -> None:
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


def _parse_chunks(chunks: int | str) -> int | str:
    if chunks in ("shard", "keep"):
        return chunks
    size = parse_bytes(chunks)
    if size < 1:
        raise MemoryLimitError(f"chunks of {chunks} hold nothing", hints=["--chunks 64MiB"])
    return size


def _job(
    ckpt: Checkpoint,
    target: pathlib.Path | None,
    memory: int,
    chunks: int | str,
    link: bool,
    found: list[ReshardError],
) -> _Job:
    """Plans one item; errors of its leaves are added to `found`."""
    collided = [h for h in ckpt.arrays if h.same_name is not None]
    if collided:
        found.append(collision_error(collided[::2]))
    plans, handles = [], []
    ratios: dict[tuple[Any, ...], float] = {}
    for handle in ckpt.arrays:
        try:
            plans.append(plan_array(_layout(handle, ratios), chunks, memory))
            handles.append(handle)
        except ReshardError as error:
            found.append(error)
    store = ckpt.source.store
    can_link = (
        link and store.ocdbt and (target is None or local.same_filesystem(store.directory, target))
    )
    files = _files_to_link(handles, plans) if can_link and not found else None
    arrays = tuple(
        dataclasses.replace(
            a, layout=dataclasses.replace(a.layout, linked_bytes=a.layout.stored_bytes)
        )
        if a.moved and _is_linked(h, files)
        else a
        for h, a in zip(handles, plans, strict=True)
    )
    job = _Job(ckpt, arrays, files)
    if not found:
        copied = {handle.path for handle in job.moved}
        for layout in (a.layout for a in arrays if a.layout.path in copied):
            if 2 * layout.largest_stored > memory:
                found.append(too_large(layout, 2 * layout.largest_stored, memory))
    return job


def _layout(handle: ArrayHandle, ratios: dict[tuple[Any, ...], float]) -> ArrayLayout:
    """What the planner needs to know. Missing chunks are found here, before anything is written.

    Args:
      handle: the array.
      ratios: measured ratios of cast arrays so far; arrays that compress alike as they are stored
        are taken to compress alike when they are cast.
    """
    sizes = [value.size for value in chunk_values(handle).values()]
    expected = grid_size(handle.shape, handle.chunk_shape)
    if len(sizes) < expected and not handle.store.fills:
        raise CorruptCheckpointError(
            f"{format_path(handle.path)}: {expected - len(sizes)} of its {expected} stored chunks "
            "are missing"
        )
    stored = sum(sizes)
    decoded = math.prod(handle.shape) * handle.stored_dtype.itemsize
    ratio = stored / decoded if decoded else 1.0
    if handle.dtype != handle.stored_dtype and handle.same_name is None:
        alike = (handle.stored_dtype, handle.dtype, round(ratio, 2), decoded > 1 << 20)
        if alike not in ratios:
            ratios[alike] = encoded_ratio(handle)
        ratio = ratios[alike]
    return ArrayLayout(
        path=handle.path,
        shape=handle.shape,
        source_itemsize=handle.stored_dtype.itemsize,
        target_itemsize=handle.dtype.itemsize,
        source_chunk=handle.chunk_shape,
        source_shard=shard_shape(handle.shape, handle.saved_sharding),
        target_shard=shard_shape(handle.shape, handle.sharding),
        stored_bytes=stored,
        largest_stored=max(sizes, default=0),
        linked_bytes=0,
        same_bytes=handle.dtype == handle.stored_dtype,
        encoded_ratio=ratio,
    )


def chunk_values(handle: ArrayHandle) -> dict[str, StoredValue]:
    """Where an array's chunks are stored: key below its name -> value."""
    values = handle.store.values[handle.name]
    return {key: value for key, value in values.items() if key != handle.store.metadata_key}


def _files_to_link(handles: Sequence[ArrayHandle], plans: Sequence[ArrayPlan]) -> frozenset[str]:
    """Data files of which enough stays in use."""
    kept: collections.Counter[str] = collections.Counter()
    for handle, array in zip(handles, plans, strict=True):
        if array.moved:
            for value in handle.store.values[handle.name].values():
                if value.file is not None:
                    kept[value.file] += value.size
    directory = handles[0].store.directory if handles else pathlib.Path()
    return frozenset(
        file
        for file, size in kept.items()
        if size >= _WORTH_LINKING * os.stat(directory / file).st_size
    )


def _is_linked(handle: ArrayHandle, files: frozenset[str] | None) -> bool:
    """Whether all that is stored of an array is in shared files, or inlined in the B-tree."""
    values = handle.store.values[handle.name].values()
    return files is not None and all(v.file is None or v.file in files for v in values)


def _total(jobs: Sequence[_Job], memory: int) -> Plan:
    arrays = tuple(array for job in jobs for array in job.arrays)
    charges = [b.charge for b in batches(arrays, memory, _cores())]
    charges += [
        2 * a.layout.largest_stored
        for job in jobs
        for a in job.arrays
        if a.moved and not a.layout.linked_bytes
    ]
    shared = sum(
        os.stat(job.ckpt.source.store.directory / file).st_size
        for job in jobs
        for file in job.files or ()
    )
    return Plan(
        arrays,
        shared_bytes=shared,
        other_bytes=sum(local.tree_bytes(p) for _, p in surroundings([j.ckpt for j in jobs])),
        peak_memory=peak_memory(charges, memory),
        notes=tuple(dict.fromkeys(note for job in jobs for note in job.ckpt.notes)),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _reporter(total: Plan, progress: Progress | None) -> Callable[[int], None]:
    whole = sum(a.decoded_bytes for a in total.arrays if not a.moved) + sum(
        a.bytes_written for a in total.arrays if a.moved
    )
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, whole)

    return report


def _write_item(
    job: _Job, directory: pathlib.Path, memory: int, report: Callable[[int], None]
) -> None:
    store = job.ckpt.source.store
    writeback = local.Writeback(directory / ocdbt.STAGE / "d")
    spec = ocdbt.stage_spec(directory) if store.ocdbt else file_spec(directory)
    target = Target(spec, new_context(), store.driver)
    sources = {handle.path: handle for handle in job.ckpt.arrays}
    names = {path: stored_name(path) for path in sources}
    pending = Pending(memory, writeback.advance)
    values = [
        (stored, key, f"{names[h.path]}/{key}", value.size)
        for h in job.moved
        for stored in [store.kvstore(h.name)]
        for key, value in store.values[h.name].items()
    ]
    try:
        move_values(
            values, target, min(memory, IN_FLIGHT_PER_CORE * _cores()) // 4, pending, report
        )
        stream_boxes(batches(job.arrays, memory, _cores()), sources, target, names, pending, report)
        pending.finish()
    finally:
        pending.abandon()
        writeback.finish()
    if store.ocdbt and job.arrays:
        linked = {h.name: names[h.path] for h in job.linked}
        staged = bool(values) or any(not a.moved for a in job.arrays)
        ocdbt.merge(store, directory, target.context, linked, staged)
    chunks = {a.layout.path: a.chunk for a in job.arrays}
    for name, data in documents(job.ckpt, chunks).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
