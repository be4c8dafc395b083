"""Planning a job from disk to disk: everything that can be known before a byte is written."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.arrays.derived import stored_share, stored_values
from reshard.arrays.handle import ArrayHandle, Derived, collision_error
from reshard.checkpoint import Checkpoint
from reshard.engine.budget import cores, in_flight
from reshard.engine.cost import Decoded, co_read_groups, decoded_together, first_cell
from reshard.engine.plan import (
    ArrayLayout,
    ArrayPlan,
    Plan,
    co_read,
    grid_size,
    plan_array,
    too_large,
)
from reshard.errors import (
    ArgumentError,
    DestinationExistsError,
    MemoryLimitError,
    ReshardError,
    ShardingError,
    TreeMismatchError,
)
from reshard.hints import Hint
from reshard.loader.detection import step_number, why_not_replaceable
from reshard.sharding.mesh import NamedSharding, shard_shape, spec_problems
from reshard.storage import posix
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.tree import Path, format_path
from reshard.units import parse_bytes
from reshard.writer import commit
from reshard.writer.codec_sample import encoded_ratio
from reshard.writer.shared_files import data_file_bytes, files_to_link, is_linked
from reshard.writer.siblings import siblings
from reshard.writer.stored_names import name_errors
from reshard.writer.target_format import FormatArguments, TargetFormat

# Encoded estimates may be this far off when the room on the disk is checked.
_ESTIMATE_ERROR = 1.1


@dataclasses.dataclass(frozen=True)
class Job:
    """One item to write.

    Attributes:
      ckpt: its tree.
      handles: its arrays.
      plans: how each of them is rewritten or copied.
      target: how they are to be stored.
      files: data files to share with the source; None where nothing may be shared.
    """

    ckpt: Checkpoint
    target: TargetFormat
    handles: tuple[ArrayHandle, ...]
    plans: tuple[ArrayPlan, ...]
    files: frozenset[str] | None

    @functools.cached_property
    def linked(self) -> list[ArrayHandle]:
        """Arrays whose stored chunks stay where they are, in shared data files."""
        return [h for h in self._moved if is_linked(self.values(h), self.files)]

    @functools.cached_property
    def copied(self) -> list[ArrayHandle]:
        """Arrays whose stored chunks are copied undecoded."""
        return [h for h in self._moved if not is_linked(self.values(h), self.files)]

    def values(self, handle: ArrayHandle) -> list[StoredValue]:
        """The stored values that an array consists of in the destination as they are."""
        return stored_values(handle, self.target.encoding(handle)) or []

    @functools.cached_property
    def _moved(self) -> list[ArrayHandle]:
        return [h for h, plan in zip(self.handles, self.plans, strict=True) if plan.moved]


def prepare(
    checkpoints: Sequence[Checkpoint],
    target: Location | None,
    *,
    max_memory: int,
    chunks: int | str,
    form: FormatArguments,
    link: bool,
    overwrite: bool,
) -> tuple[list[Job], Plan, list[ReshardError]]:
    """The items to write, the plan of it all, and everything that stands in the way.

    Args:
      checkpoints: one, or several steps of one manager's root.
      target: where to write; None where that is not known yet.
      max_memory: bytes.
      chunks: as `parse_chunks` gives it.
      form: as `parse_format` gives it.
      link: whether data files may be shared with the source.
      overwrite: whether an existing target is to be replaced.
    """
    found: list[ReshardError] = []
    _check_together(checkpoints)
    root = checkpoints[0].source.root
    replaced = False
    if target is not None:
        try:
            commit.check_destination(target, root, overwrite)
            replaced = _check_replaced(target, checkpoints)
        except ReshardError as error:
            found.append(error)
    jobs = [
        _prepare_item(c, target, max_memory, chunks, form.of(c), link, found) for c in checkpoints
    ]
    total = _total(jobs, target, max_memory, link, found)
    if replaced:
        note = f"`{target}` is replaced once the new checkpoint is complete"
        total = dataclasses.replace(total, notes=(*total.notes, note))
    if target is not None:
        try:
            commit.check_room(target, int(total.bytes_written * _ESTIMATE_ERROR))
        except ReshardError as error:
            found.append(error)
    return jobs, total, _one_memory_error(found)


def _check_replaced(target: Location, checkpoints: Sequence[Checkpoint]) -> bool:
    """Whether there is something to replace; raises DestinationExistsError if that may not be."""
    if not target.exists():
        return False
    manager = checkpoints[0].source.kind == "manager"
    steps = {step_number(c.source.step) for c in checkpoints} if manager else None
    reason = why_not_replaceable(target, steps)
    if reason is not None:
        raise DestinationExistsError(
            f"`{target}` would be deleted: {reason}",
            hints=["name a new destination, or move what is there out of the way"],
        )
    return True


def _one_memory_error(found: list[ReshardError]) -> list[ReshardError]:
    """The same errors, with those about memory as one, whose hints are enough for all of them."""
    memory = [error for error in found if isinstance(error, MemoryLimitError)]
    if len(memory) < 2:
        return found
    largest = max(memory, key=lambda error: error.least)
    problems = [line for error in memory for line in (error.summary, *error.problems)]
    summary = f"{len(memory)} arrays do not fit into memory"
    one = MemoryLimitError(summary, problems, largest.hints, largest.least)
    return [error for error in found if error not in memory] + [one]


def parse_chunks(chunks: int | str) -> int | str:
    """`"shard"`, `"keep"`, or a number of bytes, at least 1.

    Raises:
      ArgumentError: it is none of these.
    """
    if chunks in ("shard", "keep"):
        return chunks
    try:
        size = parse_bytes(chunks)
    except ArgumentError:
        size = 0
    if size < 1:
        raise ArgumentError(
            f"`{chunks}` is no size of a chunk", hints=["`shard`, `keep`, or bytes: `64MiB`"]
        )
    return size


def _check_together(checkpoints: Sequence[Checkpoint]) -> None:
    sources = [c.source for c in checkpoints]
    if not sources:
        raise ArgumentError("there is no checkpoint to save")
    together = {(source.root, source.kind) for source in sources}
    if len(together) > 1 or len({source.step for source in sources}) < len(sources):
        raise ArgumentError(
            "checkpoints are saved together only if they are different steps of one manager's root",
            [f"{source.root} {source.step}".rstrip() for source in sources],
        )


def _prepare_item(
    ckpt: Checkpoint,
    target: Location | None,
    max_memory: int,
    chunks: int | str,
    form: TargetFormat,
    link: bool,
    found: list[ReshardError],
) -> Job:
    """Plans one item; errors of its leaves are added to `found`."""
    collided = [handle for handle in ckpt.arrays if handle.same_name is not None]
    if collided:
        found.append(collision_error(collided))
    found += name_errors(ckpt, form)
    handles: list[ArrayHandle] = []
    plans: list[ArrayPlan] = []
    ratios: dict[tuple[Any, ...], float] = {}
    whole = []
    for handle in ckpt.arrays:
        try:
            _check_fits(handle)
            handle.stored_sizes()  # says so if chunks are missing
            whole.append(handle)
        except ReshardError as error:
            found.append(error)
    groups: dict[int, tuple[int, int, int]] = {}
    for group, numbers in enumerate(co_read_groups(whole)):
        decoded = decoded_together([whole[number] for number in numbers])
        groups |= dict.fromkeys(numbers, (group, len(numbers), decoded.nbytes))
    for number, handle in enumerate(whole):
        try:
            layout = _layout(handle, form, *groups[number], ratios, max_memory)
            plans.append(plan_array(layout, chunks, max_memory))
            handles.append(handle)
        except ReshardError as error:
            found.append(error)
    plans = with_passes(plans, handles)
    store = ckpt.source.store
    can_link = link and form.shares
    if can_link and target is not None:
        can_link = posix.same_filesystem(store.directory, target)
    files = files_to_link(store, form, handles, plans) if can_link else None
    for i, (handle, plan) in enumerate(zip(handles, plans, strict=True)):
        if not plan.moved:
            continue
        layout = plan.layout
        if is_linked(stored_values(handle, form.encoding(handle)) or (), files):
            layout = dataclasses.replace(layout, linked_bytes=layout.stored_bytes)
            plans[i] = dataclasses.replace(plan, layout=layout)
        elif 2 * layout.largest_stored > max_memory:
            found.append(too_large(layout, 2 * layout.largest_stored, max_memory))
    return Job(ckpt, form, tuple(handles), tuple(plans), files)


def _layout(
    handle: ArrayHandle,
    form: TargetFormat,
    group: int,
    co_read: int,
    group_bytes: int,
    ratios: dict[tuple[Any, ...], float],
    max_memory: int,
) -> ArrayLayout:
    """What the planner needs to know.

    Args:
      handle: the array.
      form: how it is to be stored.
      group, co_read, group_bytes: as of `ArrayLayout`.
      ratios: measured ratios so far, of arrays in another dtype or with another codec; arrays that
        compress alike as they are stored are taken to compress alike then, too.
      max_memory: bytes that a sample for such a ratio may take.
    """
    sizes = handle.stored_sizes()
    encoding = form.encoding(handle)
    moved = stored_values(handle, encoding)
    stored = stored_share(handle)
    if isinstance(handle.data, Derived) and moved is not None:
        stored = sum(value.size for value in moved)
    decoded = math.prod(handle.shape) * handle.stored_dtype.itemsize
    cell = math.prod(part.stop - part.start for part in first_cell(handle))
    alone = decoded_together([handle])
    layout = ArrayLayout(
        path=handle.path,
        shape=handle.shape,
        source_itemsize=handle.stored_dtype.itemsize,
        target_itemsize=handle.dtype.itemsize,
        read_itemsize=handle.read_dtype.itemsize,
        source_chunk=handle.chunk_shape,
        source_shard=shard_shape(handle.shape, handle.saved_sharding),
        target_shard=shard_shape(handle.shape, handle.sharding),
        stored_bytes=stored,
        largest_stored=max(sizes, default=0),
        linked_bytes=0,
        same_bytes=moved is not None,
        encoded_ratio=stored / decoded if decoded and sizes else 1.0,
        chunk_bytes=alone.nbytes,
        amplification=_amplification(alone, cell),
        group=group,
        co_read=co_read,
        group_bytes=group_bytes,
    )
    compressors = {data.encoding.compressors for _, data in handle.roots()}
    same = handle.dtype == handle.stored_dtype and compressors == {encoding.compressors}
    sample = layout.chunk_bytes + cell * layout.read_itemsize
    if same or handle.same_name is not None:
        return layout
    if not encoding.compressors:
        return dataclasses.replace(layout, encoded_ratio=1.0)
    if sample > max_memory:
        return layout
    ratio = round(layout.encoded_ratio, 2)
    alike: tuple[Any, ...] = (handle.stored_dtype, handle.dtype, ratio, decoded > 1 << 20)
    if () in compressors:  # then what is stored says nothing
        alike = (*alike, handle.shape, handle.path[-1])
    if alike not in ratios:
        ratios[alike] = encoded_ratio(handle, form)
    return dataclasses.replace(layout, encoded_ratio=ratios[alike])


def _amplification(decoded: Decoded, elements: int) -> float:
    """Elements decoded for each of these; of values in memory, none are."""
    return max(decoded.elements / elements, 1.0) if elements else 1.0


def with_passes(plans: Sequence[ArrayPlan], handles: Sequence[ArrayHandle]) -> list[ArrayPlan]:
    """The plans of some arrays, in which each array of a co-read group reads its part of what they
    share."""
    by_path = {handle.path: handle for handle in handles}
    passes: dict[Path, float] = {}
    for group in co_read(plans):
        if not group[0].serial:
            members = [by_path[array.layout.path] for array in group]
            cell = math.prod(part.stop - part.start for part in first_cell(members[0]))
            each = _amplification(decoded_together(members), cell * len(members))
            passes |= {array.layout.path: each for array in group}
    return [
        dataclasses.replace(array, passes=passes.get(array.layout.path, array.passes))
        for array in plans
    ]


def _check_fits(handle: ArrayHandle) -> None:
    """Raises ShardingError where an array keeps a saved sharding that cannot be its own."""
    if isinstance(handle.sharding, NamedSharding):
        mesh = handle.sharding.mesh
        problems = spec_problems(handle.shape, mesh, handle.sharding.spec)
        if problems:
            fits = ",".join(f"{name}=1" for name in mesh.axis_names)
            raise ShardingError(
                f"{format_path(handle.path)} does not fit `{mesh}`",
                problems,
                [Hint(("to_mesh", fits), " fits any array")],
            )


def _total(
    jobs: Sequence[Job],
    target: Location | None,
    max_memory: int,
    link: bool,
    found: list[ReshardError],
) -> Plan:
    plans = tuple(plan for job in jobs for plan in job.plans)
    copied = {handle.path for job in jobs for handle in job.copied}
    costs = [cost for plan in plans for cost in _costs(plan, plan.layout.path in copied)]
    largest = max((cost for cost, _ in costs), default=0)
    limit = max(in_flight(max_memory, cores(), largest), largest)
    shared = sum(
        data_file_bytes(job.ckpt.source.store.directory / file)
        for job in jobs
        for file in job.files or ()
    )
    other = 0
    try:
        for sibling in siblings([job.ckpt for job in jobs], target, link):
            if sibling.linked:
                shared += sibling.nbytes
            else:
                other += sibling.nbytes
    except ReshardError as error:
        found.append(error)
    return Plan(
        plans,
        shared_bytes=shared,
        other_bytes=other,
        peak_memory=min(sum(cost * count for cost, count in costs), limit),
        notes=tuple(dict.fromkeys(note for job in jobs for note in _notes(job))),
    )


def _notes(job: Job) -> Iterator[str]:
    """What the user should know of an item."""
    yield from job.ckpt.notes
    store = job.ckpt.source.store
    if (job.target.ocdbt, job.target.zarr3) != (store.ocdbt, store.zarr3):
        yield f"the arrays are stored as {job.target.format}, and not {job.ckpt.source.format}"
    if job.target.codec is not None and not all(plan.moved for plan in job.plans):
        yield (
            f"what is encoded anew is compressed with {job.target.codec}; its bytes are estimated "
            "from samples"
        )


def _costs(plan: ArrayPlan, copied: bool) -> list[tuple[int, int]]:
    """Bytes in flight that one step of rewriting or copying an array takes, and how many steps
    there are; empty where nothing is read."""
    layout = plan.layout
    if plan.box is None:
        return [(2 * layout.largest_stored, grid_size(layout.shape, plan.chunk))] if copied else []
    return [
        (
            plan.box_bytes,
            math.ceil(grid_size(layout.shape, plan.box) / (1 if plan.serial else layout.co_read)),
        )
    ]
