"""`plan`: a job from storage to storage, and everything known before a byte is written."""

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from reshard import errors
from reshard.arrays.boxes import shape_of
from reshard.arrays.derived import stored_share, stored_values
from reshard.arrays.handle import ArrayHandle, Derived, collision_error
from reshard.checkpoint import Checkpoint, check_checkpoints, check_known
from reshard.engine.cost import co_read_groups, decoded_together, first_cell
from reshard.engine.memory import check_fits, copy_bytes
from reshard.engine.plan import ArrayPlan, co_read, plan_array, too_large
from reshard.loader.detection import TREE_FILE
from reshard.sharding.mesh import NamedSharding, shard_shape, spec_problems
from reshard.storage import disk
from reshard.storage.identity import check_unchanged
from reshard.storage.location import Location, parse_location
from reshard.tree import Path, as_python, format_path
from reshard.units import format_bytes, parse_bytes, whole_kib
from reshard.verify.digest_record import FILE
from reshard.writer import commit as committing
from reshard.writer import destination as destinations
from reshard.writer.documents import NO_RECORD, read_again, read_costs, source_record
from reshard.writer.format import TargetFormat, name_errors, target_format
from reshard.writer.links import files_to_link
from reshard.writer.plan import ItemPlan, Plan
from reshard.writer.siblings import siblings, source_identity

P = TypeVar("P", bound=Plan)

# Encoded estimates may be this far off when the room on the disk is checked.
_ESTIMATE_ERROR = 1.1
# No codec makes weights smaller than by this factor.
_MOST_COMPRESSION = 100
# Bytes that blosc takes at once: `BLOSC_MAX_BUFFERSIZE`.
_MAX_BLOSC = (1 << 31) - 17
# Bytes in flight of a box of an export, so that most boxes are whole rows, one piece of a file.
_LARGE_BOX = 192 << 20


def plan(
    ckpt: Checkpoint | Sequence[Checkpoint],
    destination: str | os.PathLike | None = None,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    format: str | None = None,
    ocdbt: bool | None = None,
    codec: str | None = None,
    file_size: int | str | None = None,
    link: bool = True,
    overwrite: bool = False,
    digest: bool = False,
    verify: bool = False,
) -> Plan:
    """Compute what `save` would do with the same arguments, without doing it.

    Args:
      ckpt: the checkpoint, or several steps of one manager's root.
      destination: a path or a URL. Without it, data files count as linkable.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"`, `"keep"`, or the largest number of decoded bytes in a chunk.
      format, ocdbt, codec, file_size, link, overwrite, digest, verify: as for `save`.

    Returns:
      The plan. Its `problems` are the errors that `save` would raise.

    Example:
      >>> plan = reshard.plan(reshard.to_mesh(reshard.open("run/1000"), "1x8"), "out/1000")
      >>> plan.problems, plan.chunks_written
      ((), 32)
    """
    checkpoints = _checked(ckpt)
    place = None if destination is None else parse_location(destination)
    limit = parse_bytes(max_memory)
    chunks = parse_chunks(chunks)
    formats = [
        target_format(each, place, limit, format, ocdbt, codec, file_size) for each in checkpoints
    ]
    problems, notes, found, replaced = list[errors.ReshardError](), list[str](), (), ()
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,  # both places may be far away
        checkpoints[0].source.root.cached_listing(),
    ):
        checked = place and pool.submit(
            destinations.check_destination, place, checkpoints, overwrite
        )
        for each in checkpoints:
            (each.source.root / each.source.step).prefetch(below=place is not None)
            each.source.directory.prefetch(unseen=[FILE])
        items = tuple(
            plan_item(each, place, limit, chunks, form, link, digest, problems)
            for each, form in zip(checkpoints, formats, strict=True)
        )
        try:
            found = siblings(checkpoints)
        except errors.ReshardError as error:
            problems.append(error)
        except PermissionError as error:
            text = f"`{error.filename}` cannot be read, and is copied with the checkpoint"
            problems.append(errors.StoreError(text, [str(error.strerror)]))
        paths = {each.path for each in found}
        notes += _copied_items(checkpoints, paths)
        identity = () if place is None else source_identity(checkpoints, found)
        try:
            notes += [] if checked is None else checked.result()
            replaced = destinations.replaced(place, checkpoints, found) if overwrite else ()
        except errors.ReshardError as error:
            problems.insert(0, error)
    told = tuple(dict.fromkeys([*(note for item in items for note in _notes(item)), *notes]))
    planned = Plan(
        items, tuple(found), place, limit, overwrite, verify, digest, identity, (), told, replaced
    )
    return with_cost_errors(planned, problems)


def _copied_items(checkpoints: Sequence[Checkpoint], paths: Collection[str]) -> Iterator[str]:
    """Notes about items whose trees are copied, among these paths."""
    for source in (c.source for c in checkpoints):
        for name in source.items:
            if "/".join(filter(None, (source.step, name, TREE_FILE))) in paths:
                yield f"item {name} is not part of the job and is copied unchanged"


def with_cost_errors(plan: P, problems: Sequence[errors.ReshardError]) -> P:
    """The plan with these errors, and with those about memory and the disk."""
    found = [*problems, *_cost_errors(plan)]
    place = plan.destination
    if place is not None and place.is_local:
        free, needed = _free_bytes(place), _least_written(plan)
        if free < needed:
            text = f"not enough disk space for `{place}`"
            line = f"needed {format_bytes(needed)}, free {format_bytes(free)}"
            found.append(errors.DestinationError(text, [line]))
    return dataclasses.replace(plan, errors=tuple(_one_memory_error(found)))


def _least_written(plan: Plan) -> float:
    """The fewest bytes that a job writes: less than planned if only decoded sizes are known."""
    least = plan.other_bytes
    for item in plan.items:
        for array in item.arrays:
            raw = item.format.files or not array.encoding.compressors
            exact = array.verbatim or array.encoded_ratio < 1 or raw
            least += array.bytes_written / (1 if exact else _MOST_COMPRESSION)
    return least if plan.items and plan.items[0].format.files else least * _ESTIMATE_ERROR


def _cost_errors(plan: Plan) -> Iterator[errors.ReshardError]:
    """Copies and reads that do not fit into memory, and what a bucket cannot do."""
    place, limit = plan.destination, plan.max_memory
    for array in plan.arrays:
        needed = copy_bytes(array.largest_stored)
        if array.verbatim and not array.linked and needed > limit:
            yield too_large(array, needed, limit)
    if place is not None and not place.is_local:
        odd = [sibling.path for sibling in plan.siblings if not disk.is_utf8(sibling.path)]
        if odd:
            yield errors.DestinationError("names in a bucket must be UTF-8", odd)
        large = [sibling for sibling in plan.siblings if copy_bytes(sibling.nbytes) > limit]
        if large:
            least = max(copy_bytes(sibling.nbytes) for sibling in large)
            yield errors.MemoryLimitError(
                f"files that are copied do not fit in the memory limit of {format_bytes(limit)}",
                [f"`{s.source}` has {format_bytes(s.nbytes)}, in one piece" for s in large],
                [f'max_memory="{whole_kib(least)}" is the least that is enough'],
                least,
            )
        exported = any(item.format.files for item in plan.items)
        shares = plan.shares(plan.share_count()) if exported else []
        needed = max((share.nbytes for share in shares), default=0)
        if needed > (free := disk.temporary_free_bytes()):
            yield errors.DestinationError(
                f"not enough disk space for temporary files of the export to `{place}`",
                [f"needed {format_bytes(needed)}, free {format_bytes(free)}"],
                ["TMPDIR names another directory for them"],
            )
        if plan.verify and not all(item.format.ocdbt for item in plan.items):
            yield errors.ArgumentError(
                "verify=True cannot read plain files in a bucket before the commit",
                hints=[f"reshard.verify({as_python(str(place))}) reads them afterwards"],
            )
    try:
        check_fits((cost for item in plan.items for cost in read_costs(item, plan.verify)), limit)
    except errors.MemoryLimitError as error:
        yield error


def _free_bytes(destination: Location) -> int:
    """Free bytes of the destination's disk, without leftovers of its jobs."""
    left = committing.directories(destination)  # resumed, or removed
    return disk.free_bytes(destination) + sum(map(disk.own_bytes, left))


def _one_memory_error(found: list[errors.ReshardError]) -> list[errors.ReshardError]:
    """The errors, with all memory errors as one. Its hints are enough for all of them."""
    memory = [error for error in found if isinstance(error, errors.MemoryLimitError)]
    if len(memory) < 2:
        return found
    largest = max(memory, key=lambda error: error.least)
    summary = "the memory limit is too small"
    one = errors.MemoryLimitError(summary, errors.lines_of(memory), largest.hints, largest.least)
    return [error for error in found if error not in memory] + [one]


def parse_chunks(chunks: int | str) -> int | str:
    """`"shard"`, `"keep"`, or bytes, at least 1; raises ArgumentError for anything else."""
    if chunks in ("shard", "keep"):
        return chunks
    return parse_bytes(chunks, "not a chunk size", "`shard`, `keep`, or bytes: `64MiB`")


def _checked(ckpt: Checkpoint | Iterable[Checkpoint]) -> list[Checkpoint]:
    """One checkpoint or several steps of one root; raises ArgumentError for anything else."""
    several = isinstance(ckpt, Iterable) and not isinstance(ckpt, Checkpoint | str | bytes)
    checkpoints: list[Any] = list(ckpt) if several else [ckpt]
    check_checkpoints(*checkpoints)
    sources = [c.source for c in checkpoints]
    if not sources:
        raise errors.ArgumentError("save needs at least one checkpoint")
    together = {(source.root, source.kind) for source in sources}
    if len(together) > 1 or len({source.place for source in sources}) < len(sources):
        raise errors.ArgumentError(
            "checkpoints are saved together only if they are different steps of one manager's root",
            [f"{source.root} {source.step or source.file}".rstrip() for source in sources],
        )
    return as_written(checkpoints)


def as_written(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints in the layout of their result. Several steps of Flax, which are files, become
    a manager's root, whose steps have an item without a name."""
    if len(checkpoints) < 2 or not checkpoints[0].source.is_foreign:
        return checkpoints
    return [c.with_source(step=str(c.source.number), item="default") for c in checkpoints]


def plan_item(
    ckpt: Checkpoint,
    destination: Location | None,
    max_memory: int,
    chunks: int | str,
    form: TargetFormat,
    link: bool,
    digest: bool,
    problems: list[errors.ReshardError],
) -> ItemPlan:
    """The plan of one item. Errors of its leaves are added to `problems`. Raises
    ChangedCheckpointError if its files have changed since they were opened."""
    check_unchanged([ckpt.source.identity] if destination is not None else [])
    try:
        check_known(ckpt)
    except errors.CheckpointFormatError as error:
        problems.append(error)
    if collided := [handle for handle in ckpt.arrays if handle.same_name is not None]:
        problems.append(collision_error(collided))
    problems += [] if form.files else name_errors(ckpt, form)
    whole, sizes = [], []
    for handle in ckpt.arrays:
        try:
            _check_fits(handle)
            sizes.append(handle.stored_sizes())
            whole.append(handle)
        except errors.ReshardError as error:
            problems.append(error)
    arrays: list[ArrayPlan] = []
    for group, numbers in enumerate(co_read_groups(whole)):
        nbytes = decoded_together([whole[number] for number in numbers]).nbytes
        for number in numbers:
            try:
                facts = _facts(whole[number], form, sizes[number], group, len(numbers), nbytes)
                array = plan_array(facts, chunks, max_memory)
                _check_blosc(array)
                if form.files:
                    array = array.with_larger_boxes(min(_LARGE_BOX, max_memory // 4))
                arrays.append(array)
            except errors.ReshardError as error:
                problems.append(error)
    places = {handle.path: number for number, handle in enumerate(whole)}
    arrays = with_passes(sorted(arrays, key=lambda array: places[array.path]))
    files = files_to_link(ckpt.source.store, destination, form, arrays) if link else None
    if files is not None:
        arrays = [array._replace(linked=array.verbatim) for array in arrays]
    record = NO_RECORD
    try:
        record = source_record(ckpt, [array.handle for array in arrays])
    except errors.CorruptCheckpointError as error:
        problems.append(error)
    sources, verbatim = read_again(arrays, record, digest)
    return ItemPlan(ckpt, form, tuple(arrays), files, record, sources, verbatim)


def _facts(
    handle: ArrayHandle,
    form: TargetFormat,
    sizes: Sequence[int],
    group: int,
    co_read: int,
    group_bytes: int,
) -> ArrayPlan:
    """The facts about an array, with stored bytes of each chunk and its co-read group."""
    encoding = form.encoding(handle)
    verbatim = None if form.files else stored_values(handle, encoding)
    if not isinstance(handle.data, Derived):
        stored = sum(sizes)
    elif verbatim is not None:
        stored = sum(value.size for value in verbatim)
    else:
        stored = stored_share(handle)
    decoded = math.prod(handle.shape) * handle.stored_dtype.itemsize
    compressed = verbatim is not None or (
        not form.files
        and handle.dtype == handle.stored_dtype
        and all(data.encoding.compressors for _, data in handle.roots())
        and encoding.compressors
    )
    return ArrayPlan(
        handle=handle,
        shape=handle.shape,
        source_itemsize=handle.stored_dtype.itemsize,
        target_itemsize=handle.dtype.itemsize,
        read_itemsize=handle.read_dtype.itemsize,
        source_chunk=handle.chunk_shape,
        source_shard=shard_shape(handle.shape, handle.saved_sharding),
        target_shard=shard_shape(handle.shape, handle.sharding),
        stored_bytes=stored,
        largest_stored=max(sizes, default=0),
        encoding=encoding,
        same_bytes=verbatim is not None,
        encoded_ratio=stored / decoded if compressed and decoded and sizes else 1.0,  # at most
        group=group,
        co_read=co_read,
        group_bytes=group_bytes,
    )


def with_passes(plans: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """The plans with their passes: boxes of derived arrays, which are read together, decode chunks
    that hold more than these boxes."""
    factors: dict[Path, float] = {}
    for group in co_read(plans):
        handles = [array.handle for array in group]
        elements = math.prod(shape_of(first_cell(handles[0]))) * len(group)
        if elements and isinstance(handles[0].data, Derived):
            factor = max(decoded_together(handles).elements / elements, 1.0)
            factors |= {handle.path: factor for handle in handles}
    return [
        a._replace(passes=a.passes * factors[a.path]) if a.path in factors else a for a in plans
    ]


def _check_blosc(array: ArrayPlan) -> None:
    """Raises ArgumentError for a chunk that is larger than blosc takes."""
    nbytes = math.prod(array.chunk) * array.target_itemsize
    if nbytes > _MAX_BLOSC and array.encoding.is_blosc:
        raise errors.ArgumentError(
            f"{format_path(array.path)}: blosc takes chunks of at most {_MAX_BLOSC} bytes, but one "
            f"of {list(array.chunk)} has {nbytes}",
            hints=['chunks="1GiB"'],
        )


def _check_fits(handle: ArrayHandle) -> None:
    """Raises ShardingError if an array keeps a saved sharding that does not fit its shape."""
    if isinstance(handle.sharding, NamedSharding):
        mesh = handle.sharding.mesh
        problems = spec_problems(handle.shape, mesh, handle.sharding.spec)
        if problems:
            fits = ",".join(f"{name}=1" for name in mesh.axis_names)
            raise errors.ShardingError(
                f"`{format_path(handle.path)}` does not fit the mesh `{mesh}`",
                problems,
                [f"reshard.to_mesh(ckpt, {as_python(fits)}) fits any array"],
            )


def _notes(item: ItemPlan) -> Iterator[str]:
    yield from item.ckpt.notes
    store = item.ckpt.source.store
    if (item.format.ocdbt, item.format.zarr3) != (store.ocdbt, store.zarr3):
        yield f"the arrays are stored as {item.format.format}, not {item.ckpt.source.format}"
    if item.format.codec is not None and not all(array.verbatim for array in item.arrays):
        yield (
            f"rewritten chunks are compressed with {item.format.codec}; their sizes are estimates"
        )
