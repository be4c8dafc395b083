"""Stored chunks into the shards of arrays on devices, each chunk fetched and decoded once.

    stored chunks            shards of this process          devices
    +-----+-----+            +---+---+---+---+               replicas share
    |     |     |   -read->  |   |   |   |   |   -alias->    one buffer
    +-----+-----+            +---+---+---+---+

Each distinct shard of an array gets one buffer, and all that is read of a chunk is read in one
TensorStore batch: such reads share its decode. On CPU devices the JAX arrays are these buffers, for
every replica; to accelerators they are transferred while the next batch is read.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts

from reshard.arrays import boxes
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.derived import amplification, family, largest_stored
from reshard.arrays.dtypes import is_floating
from reshard.arrays.handle import ArrayHandle
from reshard.engine.batches import BOX_OVERHEAD, IN_FLIGHT_PER_CORE, WINDOW, cores, room
from reshard.engine.plan import grid_boxes
from reshard.errors import CorruptCheckpointError, MemoryLimitError, ReshardError, TreeMismatchError
from reshard.restore.device_shards import local_shards
from reshard.storage.array_store import checked
from reshard.tree import format_path
from reshard.units import format_bytes

if TYPE_CHECKING:
    import jax

# Arrays up to this size (decoded bytes) are read whole, and cut into shards in memory: cheaper than
# a read for each shard.
READ_WHOLE = 1 << 20

_UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


@dataclasses.dataclass(frozen=True)
class Request:
    """One array to read.

    Attributes:
      handle: the saved array; `handle.dtype` is the one that is wanted where floats are cast.
      dtype: the dtype that is wanted: the handle's, or another integer dtype.
      sharding: where it goes; None for a numpy array on the host.
    """

    handle: ArrayHandle
    dtype: np.dtype
    sharding: "jax.sharding.Sharding | None"


def read_arrays(
    requests: Sequence[Request],
    max_memory: int | None,
    progress: Callable[[int], None] = lambda count: None,
) -> list[Any]:
    """The arrays, on their devices, in the order of the requests.

    Args:
      requests: what to read. Each process reads what its own devices hold.
      max_memory: bytes in flight at most beyond the results: chunks, stored and decoded, and what
        is on its way to an accelerator. None for as much as keeps all cores busy.
      progress: called with numbers of decoded bytes.

    Raises:
      MemoryLimitError: one stored chunk does not fit into `max_memory`; all such arrays are named.
      CorruptCheckpointError: chunks are missing, or stored bytes do not decode.
      TreeMismatchError: an integer does not fit the dtype that is wanted.
    """
    landings, found = [], []
    for request in requests:
        try:
            landings.append(_Landing(request))
        except ReshardError as error:
            found.append(error)
    if found:
        raise CorruptCheckpointError("stored chunks are missing", [str(error) for error in found])
    largest = max((landing.chunk_charge for landing in landings), default=0)
    if max_memory is None:
        limit = max(IN_FLIGHT_PER_CORE * cores(), (cores() + 1) * largest)
    else:
        limit = min(room(max_memory), IN_FLIGHT_PER_CORE * cores())
    groups = _arranged(landings, limit // WINDOW, max_memory)
    if max_memory is not None:
        _check_memory(landings, max_memory)
    # A B-tree stays in memory as long as its store is open.
    one_of_each = {id(landing.handle.store): landing.handle for landing in landings}
    stores = [handle.store.kvstore(handle.name) for handle in one_of_each.values()]
    window = _Window(limit, progress)
    for landing in landings:
        if not landing.boxes:
            landing.finish()
    for group in groups:
        for together in zip(*(landing.boxes for landing in group), strict=True):
            window.add(list(zip(group, together, strict=True)))
    window.finish()
    stores.clear()
    return [landing.result for landing in landings]


def _arranged(
    landings: "Sequence[_Landing]", limit: int, max_memory: int | None
) -> "list[list[_Landing]]":
    """Arrays that are read box by box together, since they share stored chunks and memory has room
    for a box of each; all others on their own. All of them are cut into boxes."""
    for group in _together(landings):
        for landing in group:
            landing.cut(limit // len(group), len(group))
    groups = []
    for group in _together(landings):
        for landing in group:
            landing.together = len(group)
        if max_memory is None or sum(landing.least for landing in group) <= max_memory:
            groups.append(group)
            continue
        for landing in group:
            landing.cut(limit, 1)
            groups.append([landing])
    return groups


def _together(landings: "Sequence[_Landing]") -> "list[list[_Landing]]":
    """Arrays that share stored chunks and whose boxes, if there are any, are in the same places."""
    groups: dict[Hashable, list[_Landing]] = {}
    for number, landing in enumerate(landings):
        shared = landing.family
        starts = tuple(map(boxes.start_of, landing.boxes))
        key = number if shared is None else (shared.key, starts)
        groups.setdefault(key, []).append(landing)
    return list(groups.values())


def _check_memory(landings: "Sequence[_Landing]", max_memory: int) -> None:
    large = [landing for landing in landings if landing.least > max_memory]
    if large:
        least = max(landing.least for landing in large)
        raise MemoryLimitError(
            f"one stored chunk does not fit in {format_bytes(max_memory)}",
            [
                f"{format_path(landing.handle.path)}: a chunk of {list(landing.handle.chunk_shape)}"
                f" takes {format_bytes(landing.least)}, stored and decoded"
                for landing in large
            ],
            [f'max_memory="{math.ceil(least / 2**10)}KiB" is the least that restores it'],
            least,
        )


class _Landing:
    """The shards of one array, as they are filled.

    Attributes:
      handle: the saved array.
      family: the arrays that share stored chunks with it, if there are any.
      together: arrays that share stored chunks and are read together with it, itself among them.
      boxes: what is read at once; whole chunks, or all of the array that this process needs.
      staging: bytes of the shards' buffers if they are not the result themselves, else 0.
      result: the array, once all boxes have landed.
    """

    def __init__(self, request: Request):
        self.handle = handle = request.handle
        self._dtype = request.dtype
        self._sharding = request.sharding
        self.together = 1
        self.family, self._amplified = family(handle), amplification(handle)
        self._decoded_together = self.family.decoded if self.family else self._amplified
        decoded = math.prod(handle.chunk_shape) * handle.stored_dtype.itemsize
        self._chunk_charge = largest_stored(handle) + math.ceil(decoded * self._amplified)
        self._shards = local_shards(handle.shape, request.sharding)
        self._converts = handle.read_dtype != handle.dtype or handle.dtype != request.dtype
        held = sum(map(math.prod, self._shards.shapes)) * request.dtype.itemsize
        small = held <= READ_WHOLE and self._shards.fill_around and len(self._shards.boxes) > 1
        self._staged = self._converts or small
        self.staging = 0 if _aliases(request.sharding) else held
        self.boxes: list[Box] = []
        self.result: Any = None
        self._buffers: dict[Shape, np.ndarray] = {}
        self._piecewise = False
        self._on_devices: _DeviceShards | None = None
        self._left = 0

    def cut(self, limit: int, together: int) -> None:
        """Decides what is read at once: everything, or boxes of whole chunks that take no more
        than `limit` bytes, and at least one chunk.

        Args:
          limit: bytes.
          together: as the attribute.
        """
        self.together = together
        shape, chunk = self.handle.shape, self.handle.chunk_shape
        if self.staging > 2 * limit:
            self._piecewise, self._staged, self.staging = True, True, 0
        if not self._shards.boxes:
            self.boxes = []
        elif self.charge(self._shards.around) <= limit:
            self.boxes = [self._shards.around]
        else:
            self._staged = self._converts or self._piecewise
            count = max(1, limit // self.least)
            grid = grid_boxes(shape, boxes.chunks_together(shape, chunk, count))
            self.boxes = [box for box in grid if self._shards.parts(box)]
        self._left = len(self.boxes)

    @property
    def chunk_charge(self) -> int:
        """Bytes that one stored chunk takes, stored and decoded; of chunks that others share, this
        array's part."""
        if self.together == 1:
            return self._chunk_charge
        part = self._decoded_together / (self.together * self._amplified)
        return math.ceil(self._chunk_charge * min(part, 1))

    @property
    def least(self) -> int:
        """Bytes that reading a single chunk takes."""
        return self.chunk_charge + math.prod(self.handle.chunk_shape) * self._temporary

    @property
    def _temporary(self) -> int:
        """Bytes an element that is not read into its shards right away: converting takes copies."""
        if not self._staged:
            return 0
        return self.handle.read_dtype.itemsize * (3 if self._converts else 1)

    def charge(self, box: Box) -> int:
        """Bytes that reading a box takes: the chunks it touches, and what is cut up afterwards."""
        pairs = zip(box, self.handle.chunk_shape, strict=True)
        chunks = math.prod(math.ceil(part.stop / c) - part.start // c for part, c in pairs)
        elements = math.prod(boxes.shape_of(box))
        return chunks * self.chunk_charge + elements * self._temporary + BOX_OVERHEAD

    def read(self, box: Box, batch: ts.Batch) -> tuple[list[ts.Future], np.ndarray | None]:
        """Starts to read a box. The second part is what it is read into, if not into the shards."""
        view = self._view
        if self._staged:
            values = np.empty(boxes.shape_of(box), self.handle.read_dtype)
            return [ts.array(values, copy=False).write(view[box], batch=batch).commit], values
        reads = []
        for part in self._shards.parts(box):
            buffer = self._buffer(part.start)[(*part.in_shard, ...)]
            write = ts.array(buffer, copy=False).write(view[part.common], batch=batch)
            reads.append(write.commit)
        return reads, None

    def land(self, box: Box, values: np.ndarray | None) -> None:
        """Takes what was read of a box; with the last one the array is made."""
        if values is not None:
            values = self._converted(values)
            if self._piecewise:
                if self._on_devices is None:
                    shape, sharding = self.handle.shape, self._sharding
                    self._on_devices = _DeviceShards(shape, self._dtype, sharding)
                self._on_devices.put(box, values)
            else:
                for part in self._shards.parts(box):
                    self._buffer(part.start)[part.in_shard] = values[part.in_box]
        self._left -= 1
        if not self._left:
            self.finish()

    def _buffer(self, start: Shape) -> np.ndarray:
        if not self._buffers:
            try:
                self._buffers = self._shards.buffers(self._dtype)
            except MemoryError as error:
                size = format_bytes(self.handle.nbytes)
                path = format_path(self.handle.path)
                raise MemoryLimitError(f"{path}: there is no memory for its {size}") from error
        return self._buffers[start]

    @functools.cached_property
    def _view(self) -> ts.TensorStore:
        return self.handle.view()

    def _converted(self, values: np.ndarray) -> np.ndarray:
        values = self.handle.rounded(values)
        if values.dtype == self._dtype:
            return values
        fitting = values.astype(self._dtype)
        if not np.array_equal(fitting, values):
            raise TreeMismatchError(
                f"{format_path(self.handle.path)}: its values do not fit {self._dtype.name}",
                [f"from {values.min()} to {values.max()}, saved as {values.dtype.name}"],
            )
        return fitting

    def finish(self) -> None:
        """Makes the array."""
        import jax

        shape, sharding = self.handle.shape, self._sharding
        if sharding is None:
            self.result = self._buffer((0,) * len(shape))
        elif self._on_devices is not None:
            self.result = self._on_devices.array()
        else:
            self.result = jax.make_array_from_callback(
                shape,
                sharding,
                lambda index: self._buffer(tuple(part.start or 0 for part in index or ())),
                dtype=self._dtype,
            )
        self.__dict__.pop("_view", None)
        self._buffers = {}


class _Window:
    """Batches of reads under way, oldest first, and the memory that they hold.

    Args:
      limit: bytes that they may hold together; a single batch may hold more.
      progress: called with the decoded bytes of each batch that has landed.
    """

    def __init__(self, limit: int, progress: Callable[[int], None]):
        self._limit = limit
        self._progress = progress
        self._next: list[tuple[_Landing, Box]] = []
        self._charge = 0
        self._under_way: collections.deque[tuple[int, list[Any]]] = collections.deque()
        self._staging: dict[_Landing, int] = {}

    def add(self, together: list[tuple[_Landing, Box]]) -> None:
        """Reads boxes in one batch, with those after them that fit into it."""
        charge = sum(landing.charge(box) for landing, box in together)
        if self._next and self._charge + charge > self._limit // WINDOW:
            self._start()
        self._next += together
        self._charge += charge

    def finish(self) -> None:
        """Waits for everything."""
        if self._next:
            self._start()
        while self._under_way:
            self._wait_oldest()

    def _start(self) -> None:
        new = {landing: landing.staging for landing, _ in self._next}
        self._make_room(self._charge + sum(v for k, v in new.items() if k not in self._staging))
        self._staging |= {landing: size for landing, size in new.items() if size}
        with ts.Batch() as batch:
            reads = [(landing, box, *landing.read(box, batch)) for landing, box in self._next]
        self._under_way.append((self._charge, reads))
        self._next, self._charge = [], 0

    def _make_room(self, charge: int) -> None:
        """Waits for as much as it takes: for transfers first, which are older than the reads."""
        reads, staging = self._under_way, self._staging
        while len(reads) >= WINDOW:
            self._wait_oldest()
        while sum(held for held, _ in reads) + sum(staging.values()) + charge > self._limit:
            sent = next((landing for landing in staging if landing.result is not None), None)
            if sent is not None:
                sent.result.block_until_ready()
                del staging[sent]
            elif reads:
                self._wait_oldest()
            else:
                break

    def _wait_oldest(self) -> None:
        _, reads = self._under_way.popleft()
        for landing, box, futures, values in reads:
            for future in futures:
                checked(future, f"{format_path(landing.handle.path)}: its stored bytes")
            landing.land(box, values)
        self._progress(sum(_nbytes(landing, box) for landing, box, _, _ in reads))


class _DeviceShards:
    """The shards of an array on accelerators, filled piece by piece.

    For arrays whose host buffers would take more memory than there may be in flight. Floats travel
    as integers of their width: computations may change the bits of a NaN.
    """

    def __init__(self, shape: Shape, dtype: np.dtype, sharding: Any):
        import jax
        import jax.numpy as jnp

        self._shape = shape
        self._dtype = dtype
        self._sharding = sharding
        self._bits = _UNSIGNED.get(dtype.itemsize, dtype) if is_floating(dtype) else dtype
        places = sharding.addressable_devices_indices_map(shape)
        self._boxes = {d: boxes.from_index(index, shape) for d, index in places.items()}
        self._shards = {}
        for device, box in self._boxes.items():
            with _alone(device):
                self._shards[device] = jnp.zeros(boxes.shape_of(box), self._bits, device=device)
        self._update = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)

    def put(self, box: Box, values: np.ndarray) -> None:
        """Transfers a box of values to all devices that hold a part of it."""
        import jax

        for device, shard in self._boxes.items():
            common = boxes.common_part(shard, box)
            if common is not None:
                piece = values[boxes.inside(common, box)].view(self._bits)
                start = boxes.start_of(boxes.inside(common, shard))
                with _alone(device):
                    part = jax.device_put(piece, device, may_alias=False)
                    self._shards[device] = self._update(self._shards[device], part, start)
        jax.block_until_ready(list(self._shards.values()))

    def array(self) -> "jax.Array":
        """The whole array."""
        import jax

        convert = jax.jit(jax.lax.bitcast_convert_type, static_argnums=1)
        shards = []
        for device, shard in self._shards.items():
            with _alone(device):
                shards.append(shard if self._bits == self._dtype else convert(shard, self._dtype))
        kind, sharding = self._sharding.memory_kind, self._sharding
        if kind is not None:  # computed in the memory of the device, and moved from there
            sharding = sharding.with_memory_kind(shards[0].sharding.memory_kind)
        made = jax.make_array_from_single_device_arrays(self._shape, sharding, shards)
        return made if kind is None else jax.device_put(made, self._sharding)


def _alone(device: Any) -> Any:
    """A context for computations on one device, whatever mesh the user has set."""
    import jax

    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("_",)))


def _aliases(sharding: Any) -> bool:
    """Whether JAX arrays can be the host's buffers."""
    if sharding is None:
        return True
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _nbytes(landing: _Landing, box: Box) -> int:
    return math.prod(boxes.shape_of(box)) * landing.handle.dtype.itemsize
