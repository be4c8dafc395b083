"""Arrays that several processes hold: each process reads a part, and their devices exchange it.

    read on P("data", "model")        target P(None, "model")
    process 0  | a | b |              process 0  | a | b |
    process 1  | c | d |       ->                | c | d |
                                      process 1  the same

Mesh axes across processes move to a dimension where their shards cut no stored chunk. If there is
no such dimension, the devices in one place of the axis read, the others supply zeros, and the sum
is taken. One jitted function per array does both; its output has the target's sharding. It works on
unsigned integers, because XLA changes NaNs of narrow floats even where it computes nothing.

A process that failed would leave the others waiting in an exchange. Before each wave of arrays, the
processes gather a flag that says whether one has failed.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard import errors
from reshard.arrays import boxes
from reshard.arrays.boxes import Shape
from reshard.engine.batches import in_groups
from reshard.engine.cost import co_read_groups
from reshard.engine.memory import IN_FLIGHT_PER_CORE
from reshard.errors import ArgumentError, ReshardError
from reshard.restore.device_reads import Request, check_stored, least_memory, read_arrays
from reshard.restore.device_shards import UNSIGNED, from_bits, local_shards, named_sharding
from reshard.restore.lazy_jax import jax
from reshard.sharding.mesh import Spec, normalize_spec
from reshard.storage.identity import Identity, check_unchanged, unchanged

# Waits for all processes, which must restore the same text; raises if one has failed.
Agree = Callable[[str], None]

# Bytes that are exchanged at once, unless `max_memory` says less.
_WAVE = 4 * IN_FLIGHT_PER_CORE
# Seconds to wait for all processes before each exchange, in which they have less time.
_PATIENCE = 600
_meetings = itertools.count()
# Dtypes whose elements take less than a byte on a device.
_NARROW = ("int2", "int4", "uint2", "uint4", "float4", "float6")


# The classes of errors. Processes send their numbers, counted from 1.
_KINDS: list[Any] = [kind for kind in vars(errors).values() if isinstance(kind, type)]
_KINDS = [kind for kind in _KINDS if issubclass(kind, ReshardError)]


@contextlib.contextmanager
def agreement() -> Iterator[Agree]:
    """One restore by all processes of a job. If it fails in one process, all processes raise an
    error of the same class, so that a program that handles it goes on in the same way."""
    over = False  # all processes know that it has failed

    def agree(what: str, error: BaseException | None = None) -> None:
        nonlocal over
        kind = type(error) if type(error) in _KINDS else ReshardError
        flag = 0 if error is None else 1 + _KINDS.index(kind)
        digest = hashlib.sha256(what.encode()).digest()[:6]
        over = True  # if this fails, no process can be told
        rows = _gathered(np.frombuffer(bytes([flag]) + digest, np.uint8))
        failed = np.flatnonzero(rows[:, 0])
        digests = [row[1:].tobytes().hex() for row in rows]
        over = bool(failed.size) or len(set(digests)) > 1
        if failed.size and error is None:
            raise _KINDS[rows[failed[0], 0] - 1](
                f"the restore failed in process {', '.join(map(str, failed))}",
                hints=["see the error of that process"],
            )
        if over and not failed.size:
            raise ArgumentError(
                "the processes restore different targets or checkpoints",
                [f"process {n}: digest {text}" for n, text in enumerate(digests)],
            )

    try:
        yield agree
    except BaseException as error:
        if not over:
            agree("", error)
        raise


def _gathered(row: np.ndarray) -> np.ndarray:
    """The rows of all processes. Raises ReshardError if a process does not call it."""
    from jax.experimental.multihost_utils import process_allgather

    counts = collections.Counter(device.process_index for device in jax.devices())
    if len({*counts.values()}) > 1 or len(counts) < jax.process_count():
        lines = [f"process {n}: {counts[n]}" for n in range(jax.process_count())]
        text = "the processes have unequal numbers of devices"
        raise ReshardError(text, lines, ['replicas="read" reads in each process'])
    _wait_for_all()
    return process_allgather(row)


def _wait_for_all() -> None:
    """Waits until all processes have called it as often. Raises ReshardError if some do not."""
    name = f"reshard-{next(_meetings)}"
    package: Any = jax
    client = package._src.distributed.global_state.client
    if client is None:  # another runtime has started the processes
        return
    try:
        client.wait_at_barrier(name, _PATIENCE * 1000)
    except RuntimeError as error:
        raise ReshardError(
            f"not all processes called `restore` within {_PATIENCE} s",
            [str(error).partition("\n")[0]],
            ["all processes must restore at the same time", 'replicas="read" does not wait'],
        ) from error


class Spread(NamedTuple):
    """How processes read one array together."""

    target: Any  # the sharding of the exchanged array, as the target's
    read: Any  # the sharding of what each process reads
    rows: Any  # `read` below a first axis, with a row for each place of the devices that read
    count: int  # the number of rows
    # Elements in memory of each process, beyond the result: those that it reads, on the host and on
    # its devices, and those that are exchanged if they are not the result.
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
    identity: Identity,
) -> list[Any]:
    """Read arrays like `read_arrays`, of files that have not changed. If the processes agree, one
    process reads each stored chunk that several need, where memory allows the exchange."""
    if agree is None:
        with unchanged(identity):
            return read_arrays(requests, max_memory, progress)
    check_unchanged([identity])
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
    arrays = dict(zip(own, alone, strict=True))
    shared = list(spreads)
    groups = co_read_groups([requests[n].handle for n in shared])
    turns = {shared[place]: turn for turn, group in enumerate(groups) for place in group}
    for wave in in_groups(turns, sizes.__getitem__, limit):
        # A request fetches the bytes between two chunks that are near. So the devices in one row
        # read neighbouring arrays.
        first, last = turns[wave[0]], turns[wave[-1]]
        rows = {n: (turns[n] - first) * spreads[n].count // (last - first + 1) for n in wave}
        mine = [n for n in wave if spreads[n].reads(rows[n], requests[n].handle.shape)]
        parts = [
            dataclasses.replace(requests[n], sharding=spreads[n].read, on_host=True) for n in mine
        ]
        read = dict(zip(mine, read_arrays(parts, left), strict=True))
        agree("")
        for n in wave:
            arrays[n] = _exchanged(requests[n], spreads[n], rows[n], read.pop(n, None))
            shards = local_shards(requests[n].handle.shape, requests[n].sharding)
            progress(shards.elements * requests[n].dtype.itemsize)
    check_unchanged([identity])
    agree("")
    return [arrays[n] for n in range(len(requests))]


def _described(
    requests: Sequence[Request], spreads: Mapping[int, Spread], max_memory: int | None
) -> str:
    """All that the processes must have in common, as text."""
    parts: list[Any] = [max_memory]
    for number, request in enumerate(requests):
        handle, spread = request.handle, spreads.get(number)
        chunks = handle.chunk_shape, *(data.chunks for _, data in handle.roots())
        devices = spread and [device.id for device in spread.target.mesh.devices.flat]
        parts.append((handle.path, handle.shape, handle.dtype.name, chunks, spread, devices))
    return repr(parts)


def _spread(request: Request) -> Spread | None:
    """How processes read an array together; None if each process reads its own part."""
    handle, dtype, target = request.handle, request.dtype, request.sharding
    words = UNSIGNED.get(dtype.itemsize)
    if words is None or jax.dtypes.canonicalize_dtype(words) != words or 0 in handle.shape:
        return None
    if dtype.kind == "c" or dtype.name.startswith(_NARROW):
        return None
    if not isinstance(target, jax.sharding.NamedSharding):
        return None
    devices: Any = target.mesh.devices
    mesh = jax.sharding.Mesh(devices, target.mesh.axis_names)  # with axes of type Auto
    return _spread_over(handle.shape, handle.chunk_shape, mesh, normalize_spec(target.spec))


@functools.lru_cache(maxsize=1024)
def _spread_over(shape: Shape, chunk: Shape, mesh: Any, target: Spec) -> Spread | None:
    """As `_spread`. It is cached, because models have many arrays of each shape."""
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
    """An array, after the devices in one row have read it into buffers by their first elements."""
    shape, dtype = request.handle.shape, request.dtype
    words = UNSIGNED[dtype.itemsize]

    def part(index: Any) -> np.ndarray:
        box = boxes.from_index(index[1:], shape)
        if (index[0].start or 0) == row:
            return read[boxes.start_of(box)].view(words)[None]
        return np.zeros((1, *boxes.shape_of(box)), words)

    with jax.set_mesh(spread.target.mesh):
        rows = jax.make_array_from_callback((spread.count, *shape), spread.rows, part, dtype=words)
        array = _sum_of_rows(spread.target)(rows).block_until_ready()
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return from_bits(shape, dtype, request.sharding, shards)


@functools.lru_cache(maxsize=64)
def _sum_of_rows(sharding: Any) -> Any:
    """A function that adds rows. All but one are zeros."""
    return jax.jit(lambda rows: rows.sum(0, dtype=rows.dtype), out_shardings=sharding)
