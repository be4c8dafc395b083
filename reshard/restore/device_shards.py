"""The shards of an array on the devices of this process, and buffers for them."""

import functools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays import boxes
from reshard.arrays.boxes import Box, Shape
from reshard.arrays.dtypes import is_floating
from reshard.restore.lazy_jax import jax
from reshard.sharding.mesh import Spec, spec_entries

# JAX uses a host buffer as a CPU array if it is aligned to this many bytes.
ALIGNMENT = 64
# Buffers from this size on are mapped on ordinary pages, because NumPy asks for huge pages. For a
# result of 1 GB, huge pages save 0.2 s of system time, but cost 1.2 s if a virtual machine has
# returned its free memory to the host.
_MAPPED = 1 << 22
# Integers with the bits of other dtypes, by bytes of an element.
UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}


def named_sharding(mesh: Any, spec: Spec) -> Any:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec_entries(spec)))


class Part(NamedTuple):
    """The overlap of a box and the shard at `start`, in the array, in the shard and in the box."""

    start: Shape
    common: Box
    in_shard: Box
    in_box: Box


class Shards:
    """The distinct shards of an array on devices of this process, by their first elements.

    `fills_bounding_box`: they leave no gaps. With several processes there may be gaps."""

    def __init__(self, shards: Sequence[Box]):
        self.boxes = {boxes.start_of(box): box for box in shards}
        self.bounding_box = boxes.bounding_box(list(self.boxes.values())) if self.boxes else ()
        self.elements = sum(math.prod(boxes.shape_of(box)) for box in self.boxes.values())
        around = math.prod(boxes.shape_of(self.bounding_box))
        self.fills_bounding_box = self.elements == around
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
        """An uninitialised array for each shard, in one allocation."""
        nbytes = self.elements * dtype.itemsize
        memory = _uninitialised(nbytes + ALIGNMENT * (len(self.boxes) + 1))
        address, end = memory.ctypes.data, 0
        buffers = {}
        for start, box in self.boxes.items():
            position = end + -(address + end) % ALIGNMENT
            end = position + math.prod(boxes.shape_of(box)) * dtype.itemsize
            buffers[start] = memory[position:end].view(dtype).reshape(boxes.shape_of(box))
        return buffers


def _uninitialised(nbytes: int) -> np.ndarray:
    """Fresh memory, on ordinary pages if it is large. Raises MemoryError."""
    if nbytes < _MAPPED:
        return np.empty(nbytes, np.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes") from error
    return np.frombuffer(pages, np.uint8)


@functools.lru_cache(maxsize=1024)
def local_shards(shape: Shape, sharding: Any) -> Shards:
    """The shards of an array. They are cached, because models have many arrays of each shape."""
    if sharding is None:
        return Shards([boxes.whole_box(shape)])
    places = sharding.addressable_devices_indices_map(shape).values()
    return Shards([boxes.from_index(index, shape) for index in places])


class DeviceShards:
    """The shards of an array on accelerators, filled box by box. Floats are transferred as integers
    of their width: computations may change the bits of a NaN."""

    def __init__(self, shape: Shape, dtype: np.dtype, sharding: Any):
        self._shape = shape
        self._dtype = dtype
        self._sharding = sharding
        self._bits = UNSIGNED[dtype.itemsize] if is_floating(dtype) else dtype
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
        """Transfer a box of values to all devices that hold a part of it."""
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
        return from_bits(self._shape, self._dtype, self._sharding, self._shards)


def from_bits(
    shape: Shape, dtype: np.dtype, sharding: Any, shards: Mapping[Any, Any]
) -> "jax.Array":
    """An array made of its shards, of its dtype or of integers with its bits. Consumes them."""
    convert = jax.jit(_viewed, static_argnums=1, donate_argnums=0)
    made = []
    for device, shard in shards.items():
        with _alone(device):
            made.append(shard if shard.dtype == dtype else convert(shard, dtype))
    kind = sharding.memory_kind
    if kind is None:
        return jax.make_array_from_single_device_arrays(shape, sharding, made)
    # Computed in the memory of the device, and transferred from there.
    own = sharding.with_memory_kind(made[0].sharding.memory_kind)
    return jax.device_put(jax.make_array_from_single_device_arrays(shape, own, made), sharding)


def _viewed(bits: "jax.Array", dtype: np.dtype) -> "jax.Array":
    return bits.view(dtype)


def _alone(device: Any) -> Any:
    """A context for computations on one device, for any mesh that the user has set."""
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("_",)))
