"""JAX's shardings: made of specs; the shards of this process, and buffers for them, on the host and
on devices."""

import functools
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays import boxes
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.dtypes import is_floating
from reshard.restore.lazy_jax import jax
from reshard.sharding.mesh import Spec, spec_entries

# JAX uses a buffer of the host as a CPU array if it is aligned to this many bytes.
ALIGNMENT = 64
# Buffers from this size on are mapped by us: NumPy asks for huge pages for them, which a kernel has
# to clear, or even to make by moving others, before the first byte is read.
_MAPPED = 1 << 22
_UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


def named_sharding(mesh: Any, spec: Spec) -> Any:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec_entries(spec)))


class Part(NamedTuple):
    """Where a box meets the shard that starts there: in the array, in the shard, and in the box."""

    start: Shape
    common: Box
    in_shard: Box
    in_box: Box


class Shards:
    """The distinct shards of an array that devices of this process hold.

    Attributes:
      boxes: where they are, by their first element.
      shapes: their shapes.
      bounding_box: the smallest box that holds them all.
      fills_bounding_box: they leave no gaps in it, as they may where there are several processes.
    """

    def __init__(self, shards: Sequence[Box]):
        self.boxes = {boxes.start_of(box): box for box in shards}
        self.shapes = [boxes.shape_of(box) for box in self.boxes.values()]
        self.bounding_box = boxes.bounding_box(list(self.boxes.values())) if self.boxes else ()
        elements = math.prod(boxes.shape_of(self.bounding_box))
        self.fills_bounding_box = sum(map(math.prod, self.shapes)) == elements
        self._parts_of_all = list(self._find_parts(self.bounding_box))

    def parts(self, box: Box) -> list[Part]:
        """Where a box meets the shards."""
        return self._parts_of_all if box is self.bounding_box else list(self._find_parts(box))

    def _find_parts(self, box: Box) -> Iterator[Part]:
        for start, shard in self.boxes.items():
            common = boxes.intersection(shard, box)
            if common is not None:
                in_shard, in_box = boxes.inside(common, shard), boxes.inside(common, box)
                yield Part(start, common, in_shard, in_box)

    def buffers(self, dtype: np.dtype) -> dict[Shape, np.ndarray]:
        """An uninitialised array for each shard, all of them in one allocation."""
        sizes = [math.prod(shape) * dtype.itemsize for shape in self.shapes]
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        memory = _uninitialised(sum(steps) + ALIGNMENT)
        position = -memory.ctypes.data % ALIGNMENT
        found = {}
        for start, shape, size, step in zip(self.boxes, self.shapes, sizes, steps, strict=True):
            found[start] = memory[position : position + size].view(dtype).reshape(shape)
            position += step
        return found


def _uninitialised(nbytes: int) -> np.ndarray:
    """Fresh memory, in ordinary pages. Raises MemoryError if there is none."""
    if nbytes < _MAPPED:
        return np.empty(nbytes, np.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes") from error
    return np.frombuffer(pages, np.uint8)


@functools.lru_cache(maxsize=1024)
def local_shards(shape: Shape, sharding: Any) -> Shards:
    """The shards of one array; models have few shapes and many arrays of each."""
    if sharding is None:
        return Shards([tuple(slice(0, size) for size in shape)])
    places = sharding.addressable_devices_indices_map(shape).values()
    return Shards([boxes.from_index(index, shape) for index in places])


class DeviceShards:
    """The shards of an array on accelerators, filled piece by piece.

    For arrays whose host buffers would take more memory than there may be in flight. Floats travel
    as integers of their width: computations may change the bits of a NaN.
    """

    def __init__(self, shape: Shape, dtype: np.dtype, sharding: Any):
        self._shape = shape
        self._dtype = dtype
        self._sharding = sharding
        self._bits = _UNSIGNED.get(dtype.itemsize, dtype) if is_floating(dtype) else dtype
        places = sharding.addressable_devices_indices_map(shape)
        self._boxes = {d: boxes.from_index(index, shape) for d, index in places.items()}
        self._shards = {}
        for device, box in self._boxes.items():
            with _alone(device):
                self._shards[device] = jax.numpy.zeros(
                    boxes.shape_of(box), self._bits, device=device
                )
        self._update = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)

    def put(self, box: Box, values: np.ndarray) -> None:
        """Transfers a box of values to all devices that hold a part of it."""
        for device, shard in self._boxes.items():
            common = boxes.intersection(shard, box)
            if common is not None:
                piece = values[boxes.inside(common, box)].view(self._bits)
                start = boxes.start_of(boxes.inside(common, shard))
                with _alone(device):
                    part = jax.device_put(piece, device, may_alias=False)
                    self._shards[device] = self._update(self._shards[device], part, start)
        jax.block_until_ready(list(self._shards.values()))

    def array(self) -> "jax.Array":
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
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("_",)))
