"""Reads of stored chunks into shards: any chunk grid, any sharding, little memory."""

import contextlib
import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from layouts import bits, random, refused
from sampling import examples
from test_mesh import cases as sharded_cases
from watched import Watched, own_memory

import reshard
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.engine.memory import READ_OVERHEAD
from reshard.restore import device_reads, device_shards
from reshard.restore.device_reads import Request, read_arrays
from reshard.storage.array_store import ArrayStore
from reshard.storage.location import parse_location

DTYPES = ["float32", "bfloat16", "int8", "int4", "bool", "uint16", "complex64"]


def stored_array(folder: pathlib.Path, values, chunk, *, zarr3=False, dtype=None) -> ArrayHandle:
    """An array on disk in chunks of any shape, all of them stored."""
    name = f"array{len(list(folder.iterdir()))}"
    spec = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": f"file://{folder}/{name}/",
        "store_data_equal_to_fill_value": True,
        "metadata": {} if zarr3 else {"compressor": {"id": "zstd", "level": 1}},
    }
    grid = ts.ChunkLayout(chunk_shape=chunk) if values.ndim else None
    made = {"dtype": values.dtype, "shape": values.shape, "chunk_layout": grid}
    ts.open(spec, create=True, **made).result().write(values).result()
    store = ArrayStore(zarr3, parse_location(folder), (), omits_fill=False)
    return ArrayHandle(
        path=(name,),
        shape=values.shape,
        dtype=values.dtype if dtype is None else jnp.dtype(dtype),
        chunk_shape=tuple(chunk),
        sharding=None,
        saved_sharding=None,
        value_type="jax.Array",
        key_impl=None,
        stored_dtype=values.dtype,
        data=StoredArray(store, name, (folder / name / store.metadata_key).read_bytes()),
    )


def memory_of(chunks, *handles):
    """Bytes that so many of the largest chunk take, stored and decoded, and once more to be cut
    up."""

    def nbytes(handle):
        decoded = math.prod(handle.chunk_shape) * handle.stored_dtype.itemsize
        return max(handle.stored_sizes(), default=0) + 2 * decoded + READ_OVERHEAD

    return None if chunks is None else chunks * max(map(nbytes, handles))


def read(handle, *shardings, memory=None):
    return read_arrays([Request(handle, handle.dtype, sharding) for sharding in shardings], memory)


@contextlib.contextmanager
def each_chunk_read_once(*handles):
    before = layouts.bytes_read()
    yield
    assert layouts.bytes_read() - before == sum(sum(handle.stored_sizes()) for handle in handles)


def assert_on_devices(array, sharding, values):
    assert array.sharding == sharding and array.committed
    assert bits(array) == bits(jnp.asarray(values))
    for shard in array.addressable_shards:
        assert bits(np.asarray(shard.data)) == bits(np.asarray(values[shard.index]))


@st.composite
def cases(draw):
    """An array of up to a few thousand elements in any chunks, and a sharding that divides it:
    values, chunk, whether of zarr v3, sharding."""
    case = draw(sharded_cases(most_devices=16))
    values = random(case.shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 30)))
    chunk = tuple(draw(st.integers(1, size + 1)) for size in case.shape)
    if math.prod(math.ceil(s / c) for s, c in zip(case.shape, chunk, strict=True)) > 100:
        chunk = tuple(math.ceil(size / 3) for size in case.shape)
    mesh = layouts.mesh(case.sizes, case.names)
    spec = P(*(axes or None for axes in case.spec))
    return values, chunk, draw(st.booleans()), NamedSharding(mesh, spec)


@settings(deadline=None, max_examples=examples(80))
@given(cases(), st.sampled_from([None, 1, 2, 10]), st.sampled_from([0, 1 << 20]), st.booleans())
def test_any_chunks_into_any_shards(tmp_path_factory, case, chunks, whole, aliases):
    values, chunk, zarr3, sharding = case
    handle = stored_array(tmp_path_factory.mktemp("any"), values, chunk, zarr3=zarr3)
    memory = memory_of(chunks, handle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_reads, "READ_WHOLE", whole)
        if not aliases:
            own_memory(patch)
        with each_chunk_read_once(handle):
            (array,) = read(handle, sharding, memory=memory)
        with each_chunk_read_once(handle):
            (host,) = read(handle, None, memory=memory)
    assert_on_devices(array, sharding, values)
    assert bits(host) == bits(values)
    if aliases and values.dtype != "int4":  # which JAX copies
        assert_replicas_share_buffers(array)


@pytest.mark.parametrize(
    "sharding",
    [
        lambda: SingleDeviceSharding(jax.devices()[11]),
        lambda: NamedSharding(layouts.mesh((2, 4), ("x", "y"), explicit=True), P("y", "x")),
        lambda: NamedSharding(Mesh(np.array(jax.devices()[::-1]), "x"), P("x")),
        lambda: NamedSharding(layouts.mesh((2, 4)), P(("model", "data"))),
        lambda: NamedSharding(layouts.mesh((2, 4)), P(None, "model"), memory_kind="pinned_host"),
        lambda: NamedSharding(layouts.mesh((2, 4)), P("data"), memory_kind="unpinned_host"),
    ],
)
@pytest.mark.parametrize("chunks", [None, 2])
def test_other_shardings(tmp_path, sharding, chunks):
    values = random((48, 16))
    handle = stored_array(tmp_path, values, (7, 5))
    with each_chunk_read_once(handle):
        (array,) = read(handle, sharding(), memory=memory_of(chunks, handle))
    assert_on_devices(array, sharding(), values)


@pytest.mark.parametrize("memory", [None, 1 << 15])
@pytest.mark.parametrize("aliases", [True, False])
@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0, 4)])
def test_arrays_without_elements(tmp_path, monkeypatch, shape, aliases, memory):
    if not aliases:
        own_memory(monkeypatch)
    values = random(shape)
    handle = stored_array(tmp_path, values, tuple(max(size, 1) for size in shape))
    for spec in (P(), P("data"), P(None, "model")[: len(shape)]):
        sharding = NamedSharding(layouts.mesh((2, 4)), P(*spec))
        array, host = read(handle, sharding, None, memory=memory)
        assert_on_devices(array, sharding, values)
        assert bits(host) == bits(values)


EIGHT = (2, 4)


def assert_replicas_share_buffers(array):
    """There is one aligned buffer for each shard."""
    by_shard = {}
    for shard in array.addressable_shards:
        by_shard.setdefault(str(shard.index), set()).add(shard.data.unsafe_buffer_pointer())
    pointers = set().union(*by_shard.values())
    assert [len(found) for found in by_shard.values()] == [1] * len(pointers)
    assert [pointer % device_shards.ALIGNMENT for pointer in pointers] == [0] * len(pointers)


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model")])
def test_donation_overwrites_no_replica(tmp_path, spec):
    """Replicas share a buffer, so a donated replica must not be overwritten."""
    values = random((64, 64), "uint16").astype("float32")
    handle = stored_array(tmp_path, values, (16, 64))
    sharding = NamedSharding(layouts.mesh(EIGHT), spec)
    array, other = read(handle, sharding, sharding)
    step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding)
    for count in range(1, 4):
        array = step(array)
        assert_on_devices(array, sharding, values + count)
    # In parts, by device: no step of one device is seen by another.
    assert_on_devices(other, sharding, values)
    parts = [shard.data for shard in other.addressable_shards]
    indexes = [shard.index for shard in other.addressable_shards]
    moved = jax.jit(lambda x: x * 2, donate_argnums=0)(parts[0])
    assert bits(np.asarray(moved)) == bits(values[indexes[0]] * 2)
    for part, index in zip(parts[1:], indexes[1:], strict=True):
        assert bits(np.asarray(part)) == bits(np.asarray(values[index]))


SPECS = {"row": P("data"), "column": P(None, "model"), "both": P("data", "model"), "whole": P()}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    values = {name: layouts.held(random((256, 1024), seed=i)) for i, name in enumerate(SPECS)}
    return {name: (stored_array(folder, x, (16, 1024)), x) for name, x in values.items()}


@pytest.mark.parametrize("aliases", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory", [140 << 10, 300 << 10, 1 << 20, 4 << 20, 64 << 20])
def test_arrays_larger_than_the_memory(large, monkeypatch, dtype, memory, aliases):
    if not aliases:
        own_memory(monkeypatch)
    requests, on = [], layouts.mesh(EIGHT)
    for name, (handle, _) in large.items():
        cast = dataclasses.replace(handle, dtype=jnp.dtype(dtype))
        requests.append(Request(cast, cast.dtype, NamedSharding(on, SPECS[name])))
    watched = Watched(monkeypatch)
    try:
        with each_chunk_read_once(*[handle for handle, _ in large.values()]):
            arrays = read_arrays(requests, memory)
    except reshard.MemoryLimitError as error:  # for a chunk, stored and decoded, and what is made
        memory = error.least
        assert memory <= 210 << 10
        arrays = read_arrays(requests, memory)
    assert watched.batches and watched.used == 0
    for array, request, (_, values) in zip(arrays, requests, large.values(), strict=True):
        assert array.sharding == request.sharding
        with np.errstate(invalid="ignore"):
            expected = values.astype(jnp.dtype(dtype))
        layouts.assert_equal_or_nan(array, expected)
    assert watched.peak <= memory


@pytest.mark.parametrize("memory", [3 << 20, 4 << 20, 5 << 20])
def test_arrays_are_read_while_others_are_transferred(tmp_path, monkeypatch, memory):
    own_memory(monkeypatch)
    values = [random((256, 256), seed=seed) for seed in range(12)]
    handles = [stored_array(tmp_path, value, value.shape) for value in values]
    watched, view, pending = Watched(monkeypatch), ArrayHandle.view, []

    def watched_view(handle):
        pending.append(sum(len(limiter.pending) for limiter in watched.budgets))
        return view(handle)

    monkeypatch.setattr(ArrayHandle, "view", watched_view)
    sharding = NamedSharding(layouts.mesh((1, 1)), P())
    arrays = read_arrays([Request(handle, handle.dtype, sharding) for handle in handles], memory)
    assert len(pending) == len(handles)
    assert sum(count > 0 for count in pending) > len(handles) // 2
    assert watched.peak <= memory and watched.used == 0
    for array, value in zip(arrays, values, strict=True):
        assert_on_devices(array, sharding, value)


INTS = ["int2", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32"]


@pytest.mark.parametrize("target", [*INTS, "uint2", "uint4"])
@pytest.mark.parametrize("source", [*INTS, "int64", "uint64"])
def test_integers_that_fit_and_that_do_not(tmp_path, source, target):
    infos = jnp.iinfo(source), jnp.iinfo(target)
    low, high = max(int(info.min) for info in infos), min(int(info.max) for info in infos)
    fitting = np.array([low, high, 0, 1, high // 2, low // 2, 0, high], "object")
    sharding = NamedSharding(layouts.mesh(EIGHT), P("data"))
    handle = stored_array(tmp_path, fitting.astype(jnp.dtype(source)), (3,))
    (array,) = read_arrays([Request(handle, jnp.dtype(target), sharding)], None)
    assert_on_devices(array, sharding, fitting.astype(jnp.dtype(target)))
    for value in (low - 1, high + 1):
        if not int(infos[0].min) <= value <= int(infos[0].max):
            continue
        values = np.array([0, 1, value, 1, 0, 0, 1, 1], "object").astype(jnp.dtype(source))
        handle = stored_array(tmp_path, values, (8,))
        requests = [Request(handle, jnp.dtype(target), sharding)]
        assert refused(reshard.TreeMismatchError, read_arrays, requests, None) == (
            f"{handle.data.name}: {target} cannot hold its values "
            f"from {min(value, 0)} to {max(value, 1)}, saved as {source}"
        )
