"""What several processes hold, read once: each reads a part, and their devices exchange it.

    read on P("data", "model")        target P(None, "model")
    process 0  | a | b |              process 0  | a | b |
    process 1  | c | d |       ->                | c | d |
                                      process 1  the same

Mesh axes that lie across processes move to where their shards cut no stored chunk. Where there is
no such place, devices in one place of the axis read, the others give zeros, and all rows are added
up. All is one jitted function per array, whose output has the target's sharding. It works on
unsigned integers: XLA changes NaNs of narrow floats even where nothing is computed.

A process that does not come would leave the others waiting: before each wave of arrays, all agree
that nothing has failed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard import errors
from reshard.arrays import boxes
from reshard.arrays.boxes import Shape
from reshard.compat import coordinator
from reshard.engine.batches import in_groups
from reshard.engine.budget import IN_FLIGHT_PER_CORE
from reshard.engine.cost import co_read_groups
from reshard.errors import ArgumentError, ReshardError
from reshard.restore.device_reads import Request, check_stored, least_memory, read_arrays
from reshard.restore.device_shards import UNSIGNED, from_bits, local_shards, named_sharding
from reshard.restore.lazy_jax import jax
from reshard.sharding.mesh import Spec, normalize_spec

# Waits for all processes, which are to restore the same text; raises what has failed in any.
Agree = Callable[[str], None]

# Bytes that are exchanged at once, unless `max_memory` says less.
_WAVE = 4 * IN_FLIGHT_PER_CORE
# Seconds to wait for the last process to begin; and for a step, which may take as long as it takes.
_PATIENCE, _FOREVER = 600, 1 << 22
# Lines of an error that other processes get.
_MOST_PROBLEMS = 10
# Dtypes whose elements take less than a byte on a device.
_NARROW = ("int2", "int4", "uint2", "uint4", "float4", "float6")

_calls = itertools.count()


@contextlib.contextmanager
def agreement() -> Iterator[Agree]:
    """One restore in which all processes of a job take part: it tells the others what fails in
    this one. ArgumentError if they do not restore the same."""
    client, key, steps = coordinator(), f"reshard/restore/{next(_calls)}", itertools.count()
    if client is None:
        raise ArgumentError(
            'replicas="broadcast" needs jax.distributed, which is not initialised',
            hints=["jax.distributed.initialize()"],
        )
    over = False  # all know that it has failed

    def agree(what: str, error: Any = None) -> None:
        nonlocal over
        number = next(steps)
        step, patience = f"{key}/{number}", _FOREVER if number else _PATIENCE
        client.key_value_set(f"{step}/{jax.process_index():08}", json.dumps((what, error)))
        try:
            client.wait_at_barrier(step, patience * 1000)
        except jax.errors.JaxRuntimeError as error_there:
            over = True
            if "DEADLINE_EXCEEDED" not in str(error_there):
                raise
            came = {int(name.rpartition("/")[2]) for name, _ in client.key_value_dir_get(step)}
            raise ReshardError(
                f"not all processes have begun to restore within {patience} seconds",
                [f"process {n} is missing" for n in range(jax.process_count()) if n not in came],
            ) from error_there
        told = [json.loads(text) for _, text in sorted(client.key_value_dir_get(step))]
        said, failed = ([each[place] for each in told] for place in (0, 1))
        over = any(failed) or len(set(said)) > 1
        # An error that all have, such as another target's, is no error of some processes.
        if any(failed) and any(document != error for document in failed):
            raise _failure(failed)
        if over and not any(failed):
            raise ArgumentError(
                "the processes restore different targets",
                [f"process {number}: {text}" for number, text in enumerate(said)],
            )

    try:
        yield agree
    except ReshardError as error:
        if not over:
            agree("", _document(error))
        raise
    except BaseException as error:
        if not over:
            with contextlib.suppress(ReshardError):
                agree("", _document(error))
        raise


def _document(error: BaseException) -> list[Any]:
    """An error, as JSON."""
    if not isinstance(error, ReshardError):
        return ["ReshardError", f"{type(error).__name__}: {error}".removesuffix(": "), [], []]
    problems = [*error.problems[:_MOST_PROBLEMS]]
    if rest := len(error.problems) - len(problems):
        problems.append(f"... and {rest} more")
    return [type(error).__name__, error.summary, problems, [*error.hints]]


def _failure(failed: Sequence[Any]) -> ReshardError:
    """What all processes raise where some have failed."""
    found = {number: error for number, error in enumerate(failed) if error}
    name, summary, problems, hints = next(iter(found.values()))
    if len(found) == 1:
        summary = f"process {next(iter(found))}: {summary}"
    else:
        summary = f"{len(found)} of {len(failed)} processes could not restore"
        problems = [
            f"process {number}: {line}"
            for number, (_, first, lines, _) in found.items()
            for line in (first, *lines)
        ]
    return getattr(errors, name)(summary, problems, hints)


class Spread(NamedTuple):
    """How processes read one array together.

    Attributes:
      target: the sharding of what they exchange, as the target's.
      read: that of what each process reads.
      rows: the same below a first axis, with a row for each place of the devices that read.
      count: how many rows there are.
      elements: what it takes in each process, beyond the result: what it reads, on the host and on
        its devices, and what they exchange if that is not the result.
    """

    target: Any
    read: Any
    rows: Any
    count: int
    elements: int

    def reads(self, row: int, shape: Shape) -> bool:
        """Whether devices of this process are in a row."""
        places = self.rows.addressable_devices_indices_map((self.count, *shape)).values()
        return any((index[0].start or 0) == row for index in places)


def read_together(
    requests: Sequence[Request],
    max_memory: int | None,
    progress: Callable[[int], None],
    agree: Agree | None,
) -> list[Any]:
    """As `read_arrays`. Processes that agree read a stored chunk that several of them need in one,
    where memory has room for the exchange."""
    if agree is None:
        return read_arrays(requests, max_memory, progress)
    check_stored(requests)
    limit = _WAVE if max_memory is None else max_memory // 4
    left = None if max_memory is None else max_memory - limit
    spreads, sizes = {}, {}
    for n, request in enumerate(requests):
        spread = _spread(request)
        size = 0 if spread is None else spread.elements * request.dtype.itemsize
        if spread and (left is None or (size <= limit and least_memory(request) <= left)):
            spreads[n], sizes[n] = spread, size
    agree(_described(requests, spreads, max_memory))
    own = [n for n in range(len(requests)) if n not in spreads]
    alone = read_arrays([requests[n] for n in own], max_memory, progress)
    found = dict(zip(own, alone, strict=True))
    shared = list(spreads)
    groups = co_read_groups([requests[n].handle for n in shared])
    turns = {shared[place]: turn for turn, group in enumerate(groups) for place in group}
    for wave in in_groups(turns, sizes.__getitem__, limit):
        # A request fetches what is between two chunks that are near: devices in one place read
        # arrays that are next to one another.
        first, last = turns[wave[0]], turns[wave[-1]]
        rows = {n: (turns[n] - first) * spreads[n].count // (last - first + 1) for n in wave}
        mine = [n for n in wave if spreads[n].reads(rows[n], requests[n].handle.shape)]
        parts = [
            dataclasses.replace(requests[n], sharding=spreads[n].read, on_host=True) for n in mine
        ]
        read = dict(zip(mine, read_arrays(parts, left, progress), strict=True))
        agree("")
        for n in wave:
            found[n] = _exchanged(requests[n], spreads[n], rows[n], read.pop(n, None))
        progress(sum(_received(requests[n], spreads[n].read if n in mine else None) for n in wave))
    agree("")
    return [found[n] for n in range(len(requests))]


def _described(
    requests: Sequence[Request], spreads: Mapping[int, Spread], max_memory: int | None
) -> str:
    """What is restored, and in what way, as far as all processes have to agree on it."""
    digest = hashlib.sha256(repr(max_memory).encode())
    for number, request in enumerate(requests):
        handle, way = request.handle, None
        if spread := spreads.get(number):
            devices = [device.id for device in spread.target.mesh.devices.flat]
            stored = [data.chunks for _, data in handle.roots()]
            way = spread, devices, handle.chunk_shape, stored
        digest.update(repr((handle.path, handle.shape, handle.dtype.name, way)).encode())
    return f"{len(requests)} arrays of digest {digest.hexdigest()[:12]}"


def _spread(request: Request) -> Spread | None:
    """How processes read an array together; None where each reads what it needs, since that is as
    little, or its sharding or dtype is not one that they exchange."""
    handle, dtype, target = request.handle, request.dtype, request.sharding
    words = UNSIGNED.get(dtype.itemsize)
    if words is None or jax.dtypes.canonicalize_dtype(words) != words or 0 in handle.shape:
        return None
    if target is None:  # a mesh of all devices, whose names nothing is split over
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        rows = np.array(devices).reshape(jax.process_count(), -1)
        mesh, spec = jax.sharding.Mesh(rows, ("process", "device")), ()
    elif (
        isinstance(target, jax.sharding.NamedSharding)
        and dtype.kind != "c"
        and not dtype.name.startswith(_NARROW)
    ):
        axes_of_type_auto: Any = target.mesh.devices
        mesh = jax.sharding.Mesh(axes_of_type_auto, target.mesh.axis_names)
        spec = normalize_spec(target.spec)
    else:
        return None
    return _spread_over(handle.shape, handle.chunk_shape, mesh, spec)


@functools.lru_cache(maxsize=1024)
def _spread_over(shape: Shape, chunk: Shape, mesh: Any, target: Spec) -> Spread | None:
    """As `_spread`; models have few shapes and many arrays of each."""
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    if np.unique(processes).size < jax.process_count():
        return None

    def cuts_no_chunk(dim: int, axes: tuple[str, ...]) -> bool:
        """Whether a dimension can be split over axes, at borders of stored chunks."""
        parts = math.prod(mesh.shape[axis] for axis in axes)
        return shape[dim] % parts == 0 and shape[dim] // parts % chunk[dim] == 0

    wanted = spec = boxes.full_spec(target, shape)
    first: list[str] = []
    for place, axis in enumerate(mesh.axis_names):
        if (processes == processes.take([0], place)).all():
            continue
        dim = next((dim for dim, axes in enumerate(spec) if axis in axes), None)
        if dim is not None:
            axes = spec[dim]
            if cuts_no_chunk(dim, axes[: axes.index(axis) + 1]):
                continue
            spec = boxes.replaced(spec, dim, tuple(name for name in axes if name != axis))
        moved = (dim for dim, axes in enumerate(spec) if cuts_no_chunk(dim, (*axes, axis)))
        dim = next(moved, None)
        if dim is None:
            first.append(axis)
        else:
            spec = boxes.replaced(spec, dim, (*spec[dim], axis))
    if spec == wanted and not first:
        return None
    common = tuple(
        tuple(a for a in one if a in other) for one, other in zip(spec, wanted, strict=True)
    )
    read, exchanged, held = (
        math.prod(named_sharding(mesh, each).shard_shape(shape)) for each in (spec, common, wanted)
    )
    elements = 2 * read + (0 if exchanged == held else exchanged)
    return Spread(
        target=named_sharding(mesh, target),
        read=named_sharding(mesh, spec),
        rows=named_sharding(mesh, (tuple(first), *spec)),
        count=math.prod(mesh.shape[axis] for axis in first),
        elements=elements * mesh.size // jax.process_count(),
    )


def _exchanged(request: Request, spread: Spread, row: int, read: Any) -> Any:
    """An array of which the devices in one row were read, in buffers by their first elements."""
    shape, dtype = request.handle.shape, request.dtype
    words = UNSIGNED[dtype.itemsize]

    def part(index: Any) -> np.ndarray:
        box = boxes.from_index(index[1:], shape)
        if (index[0].start or 0) == row:
            return read[boxes.start_of(box)].view(words)[None]
        return np.zeros((1, *boxes.shape_of(box)), words)

    with jax.set_mesh(spread.target.mesh):
        rows = jax.make_array_from_callback((spread.count, *shape), spread.rows, part, dtype=words)
        array = _summed(spread.target)(rows).block_until_ready()
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    if request.sharding is None:
        return np.array(next(iter(shards.values()))).view(dtype)
    return from_bits(shape, dtype, request.sharding, shards)


@functools.lru_cache(maxsize=64)
def _summed(sharding: Any) -> Any:
    """A function that adds rows up, of which all but one are zeros."""
    return jax.jit(lambda rows: rows.sum(0, dtype=rows.dtype), out_shardings=sharding)


def _received(request: Request, read: Any) -> int:
    """Bytes that this process holds of an array, less those that it has read on a sharding."""
    held = local_shards(request.handle.shape, request.sharding).elements
    known = 0 if read is None else local_shards(request.handle.shape, read).elements
    return max(held - known, 0) * request.dtype.itemsize
