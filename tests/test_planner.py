"""The arithmetic of a job, compared with brute force over arrays of indices.

The brute force labels each element of an array with the chunk that it is in. Everything else
(which boxes touch which chunks, what a load decodes) is counted from the labels.
"""

import itertools
import math
import re
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import refused
from sampling import examples

from reshard.engine import plan as planner
from reshard.engine.memory import READ_OVERHEAD, usable
from reshard.engine.plan import ArrayPlan, plan_array
from reshard.errors import DestinationExistsError, MemoryLimitError
from reshard.sharding.mesh import Mesh, NamedSharding, parse_mesh, shard_shape
from reshard.storage.disk import Entry
from reshard.storage.location import Location
from reshard.units import parse_bytes
from reshard.writer.plan import Plan
from reshard.writer.siblings import Sibling

MIB = 1 << 20


def layout(shape, source_chunk, target_shard, **fields):
    """A layout; float32 by default, read alone, with stored chunks as large as decoded ones."""
    handle = types.SimpleNamespace(
        path=fields.pop("path", ("params", "w")),
        saved_sharding=None,
        sharding=NamedSharding(parse_mesh("x=8"), ()),
        data=types.SimpleNamespace(operation=None, inputs=()),
    )
    itemsize = fields.get("source_itemsize", 4)
    decoded = math.prod(source_chunk) * itemsize
    return ArrayPlan(
        **(
            {
                "handle": handle,
                "shape": shape,
                "source_itemsize": 4,
                "target_itemsize": 4,
                "read_itemsize": fields.get("target_itemsize", 4),
                "source_chunk": source_chunk,
                "source_shard": source_chunk,
                "target_shard": target_shard,
                "stored_bytes": math.prod(shape) * itemsize,
                "largest_stored": decoded,
                "encoding": None,
                "same_bytes": False,
                "encoded_ratio": 1.0,
                "group": 0,
                "co_read": 1,
                "group_bytes": decoded + fields.get("largest_stored", decoded),
            }
            | fields
        )
    )


def labels(shape, chunk):
    """For each element, the number of the chunk that holds it."""
    result = np.zeros(shape, int)
    for dim, (size, step) in enumerate(zip(shape, chunk, strict=True)):
        along = np.arange(size) // step
        result = result * math.ceil(size / step)
        result += along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return result


def decoded_elements(chunk_labels, box):
    return np.isin(chunk_labels, np.unique(chunk_labels[box])).sum()


def amplification(shape, chunk, shard):
    in_chunk, in_shard = labels(shape, chunk), labels(shape, shard)
    decoded = sum(decoded_elements(in_chunk, in_shard == n) for n in np.unique(in_shard))
    return decoded / math.prod(shape)


@st.composite
def layouts(draw, max_rank=3):
    """Arrays of up to a few thousand elements whose elements weigh as much as rows of weights."""
    rank = draw(st.integers(0, max_rank))
    shard = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    shape = tuple(b * draw(st.integers(1, 3)) for b in shard)
    chunk = tuple(draw(st.integers(1, size)) for size in shape)
    unit = draw(st.sampled_from([1, 1 << 12, 1 << 13]))
    source, target = draw(st.sampled_from([(4, 4), (4, 2), (2, 4), (1, 8), (8, 1)]))
    stored = math.prod(shape) * source * unit
    return layout(
        shape,
        chunk,
        shard,
        source_itemsize=source * unit,
        target_itemsize=target * unit,
        read_itemsize=draw(st.sampled_from([target, max(source, target)])) * unit,
        source_shard=draw(st.sampled_from([chunk, shard, shape])),
        stored_bytes=stored,
        largest_stored=draw(st.integers(1, math.prod(chunk) * source * unit)),
        same_bytes=source == target and draw(st.booleans()),
    )


@st.composite
def jobs(draw):
    """An array, `chunks`, and a `max_memory` from far too little to more than enough."""
    array = draw(layouts())
    memory = max(1, array.bytes_of(array.shape) * draw(st.integers(0, 64)) // 24)
    nbytes = math.prod(array.shape) * array.target_itemsize
    bounds = st.integers(array.target_itemsize, 2 * nbytes)
    return array, draw(st.sampled_from(["shard", "keep"]) | bounds), memory


def plan_within(array, chunks, memory):
    """The plan. If `memory` is not enough, with the least memory that the error names."""
    try:
        return plan_array(array, chunks, memory), memory
    except MemoryLimitError as error:
        least = named_minimum(error)
    assert least > memory
    if least > 1024:
        with pytest.raises(MemoryLimitError):
            plan_array(array, chunks, least - 1024)
    return plan_array(array, chunks, least), least


def named_minimum(error):
    """The bytes of the first hint. The message names the same number."""
    hint = " is the least that is enough"
    hinted = re.fullmatch(rf'max_memory="(\d+)KiB"{hint}', error.hints[0])
    assert hinted is not None
    least = int(hinted[1]) * 1024
    named = re.search(r" takes (.*), more than", error.summary)
    assert named is not None
    assert least - 1024 < parse_bytes(named[1]) * 1.01
    return least


def memory_of(plan, box):
    """Bytes for one box: while it is read, encoded and decoded source chunks and a buffer;
    afterwards, the buffer and the encoded chunks."""
    elements = math.prod(part.stop - part.start for part in box)
    held = elements * (plan.target_itemsize + max(plan.read_itemsize, plan.target_itemsize))
    chunk = math.prod(plan.source_chunk) * plan.source_itemsize + plan.largest_stored
    count = len(np.unique(labels(plan.shape, plan.source_chunk)[box]))
    return max(count * chunk + elements * plan.read_itemsize + READ_OVERHEAD, held)


@settings(deadline=None, max_examples=examples(1000))
@given(jobs())
def test_a_plan_equals_brute_force(job):
    """Boxes are whole target chunks and partition the array. No box needs more than `max_memory`,
    or than the least memory that the error names. Passes count the reads of a source chunk."""
    array, chunks, memory = job
    plan, memory = plan_within(array, chunks, memory)
    # Amplification, before and after.
    assert plan.amplification == (
        pytest.approx(amplification(array.shape, array.source_chunk, array.target_shard)),
        pytest.approx(amplification(array.shape, plan.chunk, array.target_shard)),
    )
    # Chunks.
    divides = all(b % c == 0 for b, c in zip(array.target_shard, plan.chunk, strict=True))
    if chunks == "keep":
        assert (plan.chunk, plan.passes) == (array.source_chunk, 1.0)
    elif chunks == "shard":
        assert divides
        if plan.chunk != array.source_chunk:
            assert plan.split == math.prod(array.target_shard) // math.prod(plan.chunk)
    else:
        assert divides and math.prod(plan.chunk) * array.target_itemsize <= chunks
    assert plan.verbatim == (array.same_bytes and plan.chunk == array.source_chunk)
    # Boxes and passes.
    boxes = list(plan.boxes())
    source, target = labels(array.shape, array.source_chunk), labels(array.shape, plan.chunk)
    reads = np.zeros(source.max(initial=0) + 1, int)
    if plan.verbatim:
        assert (boxes, plan.passes, plan_of(plan).chunks_read) == ([], 1.0, len(reads))
        return
    covered = np.zeros(array.shape, int)
    for box in boxes:
        covered[box] += 1
        reads[np.unique(source[box])] += 1
        assert decoded_elements(target, box) == covered[box].size
    assert (covered == 1).all()
    starts = [tuple(part.start for part in box) for box in boxes]
    assert starts == sorted(starts)
    assert plan.passes == pytest.approx(reads.mean(), rel=1e-12)
    assert plan_of(plan).chunks_read == reads.sum()
    # Memory.
    assert max(memory_of(plan, box) for box in boxes) <= plan.box_bytes <= memory


# Chunks


@settings(deadline=None, max_examples=examples(200))
@given(layouts(), st.sampled_from(["shard", "keep"]))
def test_with_enough_memory_box_bytes_and_whole_shards(array, chunks):
    plan = plan_array(array, chunks, 1 << 60)
    assert plan.passes == 1.0
    assert plan.chunk in (array.target_shard, array.source_chunk)


def test_a_number_of_bytes_subdivides_shards():
    # 64 MiB shards in 64 KiB chunks; the other dimension would do as well as the first.
    plan = plan_array(layout((4096, 8192), (1024, 8192), (4096, 4096)), 64 << 10, 1 << 30)
    assert math.prod(plan.chunk) * 4 == 64 << 10
    assert plan.split == 1024
    assert plan.amplification == (2.0, 1.0)
    whole = plan_array(layout((4096, 8192), (1024, 8192), (4096, 4096)), 64 << 20, 1 << 30)
    assert (whole.chunk, whole.split) == ((4096, 4096), 1)


@pytest.mark.parametrize("chunks", ["shard", "keep", 64 << 10])
def test_an_array_without_elements(chunks):
    array = layout((0, 4), (1, 4), (0, 2), stored_bytes=0, largest_stored=0, same_bytes=True)
    plan = plan_array(array, chunks, 1 << 20)
    assert (plan.chunk, plan.verbatim, plan.amplification) == ((1, 4), True, (1.0, 1.0))
    assert (plan.bytes_read, plan.bytes_written, plan.decoded_bytes) == (0, 0, 0)


@pytest.mark.parametrize("same_bytes", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bound_below_one_element_leaves_one_element(same_bytes, rank):
    array = layout((3,) * rank, (3,) * rank, (3,) * rank, same_bytes=same_bytes)
    assert plan_array(array, 2, 1 << 20).chunk == (1,) * rank


def test_uneven_source_chunks_and_prime_sizes():
    # Chunks of 3 over 7 rows, the last one clipped; shards of 1 by 11.
    array = layout((7, 22), (3, 5), (1, 11))
    rows = [(slice(start, end), slice(0, 22)) for start, end in ((0, 3), (3, 6), (6, 7))]
    rows_of_weights = {"source_itemsize": 8192, "target_itemsize": 8192}
    plan = plan_array(layout((7, 22), (3, 5), (1, 11), **rows_of_weights), "shard", 1 << 30)
    assert (plan.chunk, plan.box, plan.passes, plan.split) == ((1, 11), (3, 22), 1.0, 1)
    assert list(plan.boxes()) == rows
    # A small array is one box, where that fits.
    plan = plan_array(array, "shard", 1 << 20)
    assert (plan.chunk, plan.passes) == ((1, 11), 1.0)
    assert list(plan.boxes()) == [(slice(0, 7), slice(0, 22))]
    # 15 chunks of 15 elements, 8 bytes each, and a buffer of 154 elements, 4 bytes each.
    whole = 15 * 15 * 8 + 154 * 4 + READ_OVERHEAD
    assert array.bytes_of((7, 22)) == whole
    enough = next(memory for memory in itertools.count(2 * whole) if usable(memory) >= 2 * whole)
    assert plan_array(array, "shard", enough).box == (7, 22)
    assert plan_array(array, "shard", enough - 1).box == (3, 22)


@pytest.mark.parametrize(
    ("shape", "source_chunk", "source_shard", "target_shard", "kept"),
    [
        ((8, 8), (2, 4), (4, 8), (4, 4), True),  # two chunks a shard
        ((8, 8), (2, 2), (2, 2), (8, 8), True),  # sixteen
        ((9, 9), (1, 9), (9, 9), (9, 9), True),  # the mesh has not changed
        ((34, 8), (1, 8), (1, 8), (17, 8), False),  # seventeen: too many
        ((40, 8), (1, 8), (20, 8), (20, 8), True),  # many, but as they were
        ((8, 8), (4, 4), (4, 4), (2, 8), False),  # chunks larger than a shard
        ((12, 8), (4, 8), (4, 8), (6, 8), False),  # chunks across the edge of a shard
    ],
)
def test_grids_that_fit_the_new_shards_are_kept(
    shape, source_chunk, source_shard, target_shard, kept
):
    array = layout(shape, source_chunk, target_shard, source_shard=source_shard, same_bytes=True)
    moved = plan_array(array, "shard", 1 << 30)
    assert (moved.verbatim, moved.chunk == source_chunk) == (kept, kept)
    cast = plan_array(array._replace(same_bytes=False, target_itemsize=2), "shard", 1 << 30)
    assert cast.chunk == (source_chunk if kept else target_shard)
    assert not cast.verbatim


def test_verbatim_arrays_cost_their_stored_bytes_once():
    array = layout((8, 8), (2, 4), (4, 4), stored_bytes=100, largest_stored=30, same_bytes=True)
    plan = plan_array(array, "shard", 1)
    assert (plan.bytes_read, plan.bytes_written, plan.decoded_bytes) == (100, 100, 256)
    linked = plan._replace(linked=True)
    assert (linked.bytes_read, linked.bytes_written, linked.decoded_bytes) == (0, 0, 256)


def test_a_chunk_that_cannot_fit_names_the_minimum():
    # 4 MiB encoded and decoded, a buffer of 64 KiB, and 16 KiB.
    text = (
        "params/w: rewriting one stored chunk of [1048576] (4.00 MiB) takes 8.08 MiB, more than "
        "the memory limit of 1.00 MiB\n\n"
        'hint: max_memory="8272KiB" is the least that is enough'
    )
    array = layout((4 * MIB,), (MIB,), (MIB // 2,))
    refused(MemoryLimitError, text, plan_array, array, "shard", MIB)


@pytest.mark.parametrize(
    ("array", "kib", "chunk", "passes"),
    [
        # 2 GiB in chunks of 16 MiB onto 4 shards of 512 MiB: one pass, 16 MiB at a time.
        (layout((8192, 65536), (64, 65536), (2048, 65536)), 129 << 10, (64, 65536), 1.0),
        # Rows to columns: a chunk of a whole shard, 128 KiB, would touch 8 source chunks.
        *(
            (layout((256, 1024), (32, 1024), (256, 128)), kib, (rows, 128), 8.0)
            for kib, rows in ((1200, 128), (600, 64), (420, 32), (288, 32))
        ),
    ],
)
def test_a_shard_is_split_until_two_boxes_fit(array, kib, chunk, passes):
    plan = plan_array(array, "shard", kib << 10)
    assert (plan.chunk, plan.box, plan.passes) == (chunk, chunk, passes)
    if kib == 288:
        with pytest.raises(MemoryLimitError):
            plan_array(array, "shard", (kib << 10) - 1)


def test_splitting_to_the_source_grid_copies_it_verbatim():
    # 32 chunks a shard are too many to keep, unless little memory requires chunks of that size.
    array = layout((32 * MIB,), (MIB,), (32 * MIB,), same_bytes=True)
    plan = plan_array(array, "shard", 20 * MIB)
    assert (plan.chunk, plan.verbatim, plan.bytes_read) == ((MIB,), True, array.stored_bytes)


# Totals


def plan_of(*arrays, files=None, **attributes):
    """A plan of one item on a disk, with these arrays and shared files."""
    ckpt = types.SimpleNamespace(source=types.SimpleNamespace(root=Location("/run"), number=None))
    item = types.SimpleNamespace(arrays=arrays, files=files, ckpt=ckpt)
    return Plan((item,), **attributes)


def plan_of_three():
    rewritten = plan_array(
        layout((64, 64), (32, 64), (64, 8), stored_bytes=8192, encoded_ratio=0.5), "shard", 1 << 20
    )
    fields = {"stored_bytes": 100, "largest_stored": 30, "same_bytes": True}
    moved = plan_array(layout((8, 8), (2, 4), (4, 4), path=("b",), **fields), "shard", 1 << 20)
    large = layout((1024, 1024), (1024, 1024), (1024, 512), path=("c", "d/e"))
    several = plan_array(large, "shard", 10 * MIB + READ_OVERHEAD)
    entry = Entry("metrics", True, False, 10, 0)
    return plan_of(
        rewritten,
        moved,
        several,
        files={"d/1": 2000, "d/2": 48},
        siblings=(Sibling("metrics", Location("/saved/metrics"), entry),),
        max_memory=10 * MIB + READ_OVERHEAD,
        errors=(DestinationExistsError("the destination exists"),),
        notes=("1 leaf is replicated",),
    )


def test_totals():
    plan = plan_of_three()
    assert [array.passes for array in plan.arrays] == [1.0, 1.0, 2.0]
    assert [array.chunk for array in plan.arrays] == [(64, 8), (2, 4), (1024, 512)]
    assert plan.bytes_read == 8192 + 100 + 2 * 4 * MIB + 10
    assert plan.bytes_written == 8192 + 100 + 4 * MIB + 10
    assert plan.decoded_bytes == 16384 + 256 + 4 * MIB
    assert (plan.chunks_read, plan.chunks_written) == (2 + 8 + 2, 8 + 8 + 2)
    assert plan.passes == pytest.approx((8192 + 2 * 4 * MIB) / (8192 + 4 * MIB))
    before = (8 * 16384 + 256 + 2 * 4 * MIB) / plan.decoded_bytes
    assert plan.amplification == (pytest.approx(before), 1.0)
    split = 'split    c/"d/e": 1 chunk a shard, [1024, 512] each, read 2.00 times'
    assert repr(plan) == (
        "3 arrays, 4.02 MiB: 2 rewritten, 1 copied verbatim\n"
        "read     8.01 MiB in 12 chunks, 2.00 times on average\n"
        "write    4.01 MiB in 18 chunks, and share 2.00 KiB\n"
        "memory   10.02 MiB in flight at most\n"
        "device   not known before, 2.00 MiB after\n"
        "load     a restore reads 2.02 times the bytes that it needs; after the job, exactly the "
        "bytes that it needs\n"
        f"{split}\n"
        "note     1 leaf is replicated\n"
        "problem  the destination exists"
    )
    for count, more in ((10, []), (13, ["split    ... and 3 more"])):
        shown = repr(plan_of(*plan.arrays[2:] * count)).splitlines()
        assert shown[6:] == [split] * 10 + more


def test_steps_that_differ_have_lines_of_their_own():
    arrays, items = plan_of_three().arrays, []
    for number, held in ((3, arrays[:2]), (10, arrays[2:]), (20, arrays[2:])):
        (item,) = plan_of(*held).items
        item.ckpt.source.number = number
        items.append(item)
    exact = "exactly the bytes that it needs"
    assert repr(Plan(tuple(items))).splitlines()[4:8] == [
        "device   not known before, 2.06 KiB after (step 3)",
        f"load     a restore reads 7.89 times the bytes that it needs; after the job, {exact} "
        "(step 3)",
        "device   not known before, 2.00 MiB after (steps 10, 20)",
        f"load     a restore reads 2.00 times the bytes that it needs; after the job, {exact} "
        "(steps 10, 20)",
    ]


def test_a_plan_of_nothing():
    plan = plan_of()
    assert (plan.bytes_read, plan.bytes_written, plan.chunks_read, plan.passes) == (0, 0, 0, 1.0)
    assert plan.amplification == (1.0, 1.0)
    assert repr(plan) == (
        "0 arrays, 0 B: 0 rewritten, 0 copied verbatim\n"
        "read     0 B in 0 chunks\n"
        "write    0 B in 0 chunks\n"
        "memory   0 B in flight at most\n"
        "device   not known before, not known after\n"
        "load     a restore reads exactly the bytes that it needs, before and after the job"
    )


def test_bytes_per_device_are_those_of_the_device_with_the_most():
    ids = [(0, 1, 2), (2, 3), None]
    meshes = [Mesh(("x",), (len(each or range(4)),), device_ids=each) for each in ids]
    arrays = []
    for shard, mesh in zip(((8,), (12,), (24,)), meshes, strict=True):
        array = plan_array(layout((24,), (24,), shard, source_shard=shard), "shard", 1 << 20)
        sharding = NamedSharding(mesh, (("x",),))
        handle = types.SimpleNamespace(saved_sharding=sharding, sharding=None)
        arrays.append(array._replace(handle=handle))

    def item(*numbers):
        return types.SimpleNamespace(arrays=[arrays[n] for n in numbers])

    # Device 2 is on all meshes, 3 on two of them. A device that is on a mesh twice counts twice.
    for numbers, elements in {
        (0, 1): 8 + 12,
        (0, 1, 2): 8 + 12 + 24,
        (1, 1, 2): 48,
        (0,): 8,
    }.items():
        assert Plan((item(*numbers),)).bytes_per_device == (4 * elements, None)
    # A device holds one step at a time.
    assert Plan((item(0, 1), item(1, 1, 2), item(0))).bytes_per_device == (4 * 48, None)


def test_format_bytes():
    counts = (0, 1023, 1024, 1536, MIB, 3 << 29, 1 << 40, 1 << 52)
    texts = "0 B, 1023 B, 1.00 KiB, 1.50 KiB, 1.00 MiB, 1.50 GiB, 1.00 TiB, 4096.00 TiB"
    assert ", ".join(map(planner.format_bytes, counts)) == texts


def test_arrays_of_many_axes_are_split_along_the_first():
    """Trying all combinations of the divisors of twenty axes would take too long."""
    array = layout((4,) * 20, (4,) * 20, (4,) * 20)
    small = plan_array(array, max_memory=1 << 50, chunks=1 << 32)
    assert (small.split, small.chunk[10:]) == (1024, (4,) * 10)
    assert sorted(small.chunk[:10]) == [1] * 5 + [4] * 5


def work(function):
    """Calls of functions, built-in ones included, that one call makes with cold caches."""
    for cached in vars(planner).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, calls


def plan_for(mesh, spec, shape, chunks):
    sharding = NamedSharding(mesh, spec)
    saved = NamedSharding(Mesh(("s",), (64,)), ((), ("s",)))
    array = layout(shape, shard_shape(shape, saved), shard_shape(shape, sharding))
    plan = plan_array(array, chunks, 1 << 30)
    return plan, sum(1 for _ in plan.boxes())


@pytest.mark.parametrize("chunks", ["shard", "keep", 1 << 16])
def test_devices_that_hold_replicas_cost_nothing(chunks):
    shape, spec = (4096, 4096), (("data",),)
    few, few_calls = work(lambda: plan_for(Mesh(("data",), (8,)), spec, shape, chunks))
    mesh = Mesh(("replica", "data", "stage"), (64, 8, 8))
    many, many_calls = work(lambda: plan_for(mesh, spec, shape, chunks))
    assert mesh.size == 4096
    assert many == few
    assert few_calls > 100
    assert many_calls <= few_calls + 20  # two more axes are multiplied out


def test_4096_shards_cost_as_much_as_8_with_equal_chunks():
    shape, spec = (1 << 16, 256), (("data",),)
    (few, _), few_calls = work(lambda: plan_for(Mesh(("data",), (8,)), spec, shape, 1 << 14))
    (many, _), many_calls = work(lambda: plan_for(Mesh(("data",), (4096,)), spec, shape, 1 << 14))
    assert planner.grid_size(shape, few.chunk) == planner.grid_size(shape, many.chunk) == 4096
    assert few.split == 512
    assert many.split == 1
    assert many_calls <= 16 * 4096
    assert few_calls <= 16 * 4096
