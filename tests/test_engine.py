"""Boxes that are read within a limiter: what that counts, in what order, what a failure leaves."""

import functools
import gc
import itertools
import math
import threading
import types
import weakref

import layouts
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs import values
from layouts import bits
from sampling import examples
from test_planner import labels
from watched import Watched

import reshard
from reshard.arrays.boxes import shape_of
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.engine import cost
from reshard.engine import read as engine
from reshard.engine.batches import Unit, in_batches
from reshard.engine.cost import ChunkUnion, chunks_of, total
from reshard.engine.memory import READ_OVERHEAD, MemoryLimiter, Reservation
from reshard.engine.read import READ_AHEAD, Batch, Filled, Read, read
from reshard.writer import arrays as stream


class Views:
    """A handle whose reads wait for a gate."""

    path = ("w",)

    def __init__(self, values, dtype=None):
        self.values = values
        self.dtype = np.dtype(dtype or values.dtype)
        self.read_dtype = values.dtype
        self.shape = values.shape
        self.gate = threading.Event()
        self.gate.set()

    def view(self):
        def fill(domain, array, _):
            assert self.gate.wait(20)
            array[...] = self.values[domain.index_exp]

        grid = ts.ChunkLayout(chunk_shape=[8])
        options = {"dtype": self.values.dtype, "shape": self.shape, "chunk_layout": grid}
        return ts.virtual_chunked(fill, **options)

    def rounded(self, values, box):
        assert values.shape == shape_of(box)
        return values.astype(self.dtype)


def batch_of(handle, start, stop, reading=10, held=5):
    return Batch([Read(handle, (slice(start, stop),))], reading, held)


def batches_of(handle, count):
    return [batch_of(handle, 8 * n, 8 * n + 8) for n in range(count)]


@pytest.fixture
def handle():
    return Views(np.arange(64, dtype="f8"), "f4")


def test_reservations_are_waited_for_in_order_and_only_for_want_of_room():
    limiter, ended = MemoryLimiter(10), []
    with limiter:
        for size in (4, 3, 2):
            limiter.reserve(size).free_after(
                lambda size=size: ended.append(size), lambda size=size: ended.append(-size)
            )
        limiter.make_room(1)
        assert (limiter.used, ended) == (9, [])
        limiter.make_room(4)
        assert (limiter.used, ended) == (5, [4, -4])
        limiter.make_room(100)
        assert (limiter.used, ended) == (0, [4, -4, 3, -3, 2, -2])
        one = limiter.reserve(100)
        one.shrink(7)
        assert (limiter.used, limiter.fits(3), limiter.fits(4)) == (7, True, False)
        one.shrink()
        limiter.reserve(1).free_after(lambda: ended.append("last"))
    assert (limiter.used, ended[6:]) == (0, ["last"])


@pytest.mark.parametrize("raised", [None, ValueError("consumer"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", [ValueError("transfer"), KeyboardInterrupt()])
def test_after_a_failure_all_is_waited_for_and_nothing_is_done(raised, failing):
    """What was begun after something that failed may have succeeded: it does not count. What was
    only interrupted has not failed."""
    ended, done = [], []

    def wait(number):
        ended.append(number)
        if number == 1 and ended.count(1) == 1:
            raise failing

    def job():
        with MemoryLimiter(10) as limiter:
            for number in range(4):
                limiter.reserve(1).free_after(
                    lambda number=number: wait(number), lambda number=number: done.append(number)
                )
            if raised is not None:
                limiter.make_room(10)  # waits for the first alone
                raise raised

    if isinstance(failing, KeyboardInterrupt) and raised is not None:
        failing = ValueError("transfer")
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        job()
    assert caught.value is failing or caught.value is raised
    counted = [0] if isinstance(failing, ValueError) else [0, 1, 2, 3]
    assert (sorted(set(ended)), done) == ([0, 1, 2, 3], counted)


# Reading.


def test_the_next_batch_is_read_while_one_is_used(handle, monkeypatch):
    seen = Watched(monkeypatch)
    batches = batches_of(handle, 8)
    with MemoryLimiter(1000) as limiter:
        for number, filled in enumerate(read(batches, limiter)):
            expected = np.arange(8 * number, 8 * number + 8, dtype="f4")
            np.testing.assert_array_equal(filled.values, [expected], strict=True)
            begun = min(number + READ_AHEAD, len(batches))
            assert seen.batches == batches[:begun]
            assert limiter.used == 5 + 10 * (begun - number - 1)
        assert (number, limiter.used) == (7, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "0 -0 1 -1 2 3 4 -2 -3 -4"), ({"is_ready": lambda: False}, "0 1 2 3 -0 4 -1 -2 -3 -4")],
)
def test_what_the_consumer_holds_is_waited_for_before_reads_are(handle, options, expected):
    """For want of memory: with its oldest transaction gone, the next batch can be read. As long as
    a bucket is asked, cores have something to do."""
    events = []
    with MemoryLimiter(25) as limiter:
        for number, filled in enumerate(read(iter(batches_of(handle, 5)), limiter)):
            events.append(f"{number}")
            free = functools.partial(events.append, f"-{number}")
            filled.reservation.free_after(free, **options)
            assert limiter.used <= 25
    assert " ".join(events) == expected


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60)), max_size=12), st.booleans())
@example([(10, 5), (70, 35), (10, 5)], True)
@settings(deadline=None, max_examples=examples(50))
def test_no_more_is_reserved_than_the_budget_or_one_batch(sizes, holds):
    one = Views(np.arange(8.0))
    with pytest.MonkeyPatch.context() as patch:
        seen = Watched(patch)
        with MemoryLimiter(50) as limiter:
            for filled in read((batch_of(one, 0, 8, *size) for size in sizes), limiter):
                if holds:
                    filled.reservation.free_after(lambda: None)
    assert seen.peak <= max([50, *map(max, sizes)])
    assert [tuple(batch[1:3]) for batch in seen.batches] == sizes
    assert seen.used == 0


def test_buffers_of_a_batch_are_gone_when_the_next_is_asked_for(handle):
    with MemoryLimiter(1000) as limiter:
        reads = read(batches_of(handle, 3), limiter)
        first = weakref.ref(next(reads).values[0])
        assert first() is not None
        next(reads)
        gc.collect()
        assert first() is None
        reads.close()


@pytest.mark.parametrize("error", [ValueError("consumer"), KeyboardInterrupt()])
def test_reads_that_have_begun_are_waited_for(handle, error):
    written = np.zeros(24)

    def into(number):
        return [((slice(8 * number, 8 * number + 8),), written[8 * number : 8 * number + 8])]

    batches = [
        Batch([Read(handle, (slice(8 * n, 8 * n + 8),), None, lambda n=n: into(n))], 10, 5)
        for n in range(3)
    ]

    def consume():
        with MemoryLimiter(1000) as limiter:
            for _ in read(batches, limiter):
                handle.gate.clear()
                threading.Timer(0.1, handle.gate.set).start()
                raise error

    with pytest.raises(type(error)):
        consume()
    handle.gate.clear()
    assert written[:16].tolist() == list(range(16))


def test_an_interrupted_wait_is_waited_for_again(handle, monkeypatch):
    def interrupted(future, what):
        raise KeyboardInterrupt

    waited = []
    monkeypatch.setattr(engine, "checked", interrupted)
    batches = (batch_of(handle, 0, 8) for _ in range(2))
    begin = Filled.begin

    def noted(filled, views):
        begin(filled, views)
        filled.parts[:] = [
            (*part, types.SimpleNamespace(exception=functools.partial(waited.append, future)))
            for *part, future in filled.parts
        ]

    monkeypatch.setattr(Filled, "begin", noted)
    with MemoryLimiter(100) as limiter, pytest.raises(KeyboardInterrupt):
        list(read(batches, limiter))
    assert len(waited) == 2


# What batches decode.


class Nothing:
    def largest_chunk(self, name):
        return 7


def stored(shape, chunk, name, store):
    """A handle of float32 that nothing is stored of."""
    return ArrayHandle(
        path=(name,),
        shape=shape,
        dtype=np.dtype("f4"),
        chunk_shape=chunk,
        sharding=None,
        saved_sharding=None,
        value_type="jax.Array",
        key_impl=None,
        stored_dtype=np.dtype("f4"),
        data=StoredArray(store, name, b""),
    )


@st.composite
def arrays_and_boxes(draw):
    handles, store = [], Nothing()
    for number in range(draw(st.integers(1, 2))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        chunk = tuple(draw(st.integers(1, size + 1)) for size in shape)
        handles.append(stored(shape, chunk, f"w{number}", store))
    found = []
    for _ in range(draw(st.integers(0, 8))):
        handle = draw(st.sampled_from(handles))
        ends = [
            sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
            for n in handle.shape
        ]
        found.append((handle, tuple(slice(*pair) for pair in ends)))
    return found


def decoded_by(pairs):
    """Bytes and elements of the chunks that boxes touch, each once."""
    touched = {}
    for handle, box in pairs:
        in_chunk = labels(handle.shape, handle.chunk_shape)
        touched.setdefault(handle, set()).update(np.unique(in_chunk[box]))
    nbytes = elements = 0
    for handle, numbers in touched.items():
        nbytes += len(numbers) * (math.prod(handle.chunk_shape) * 4 + 7)
        elements += np.isin(labels(handle.shape, handle.chunk_shape), [*numbers]).sum()
    return nbytes, elements


@given(arrays_and_boxes())
@settings(deadline=None, max_examples=examples(300))
def test_boxes_decode_the_union_of_their_chunks(pairs):
    union = ChunkUnion()
    added = [part for handle, box in pairs for part in union.add(chunks_of(handle, box))]
    assert total(added) == decoded_by(pairs)
    for handle, box in pairs:
        assert all(union.missing(chunks) == [] for chunks in chunks_of(handle, box))


@given(arrays_and_boxes(), st.integers(0, 4000), st.integers(0, 4000))
@settings(deadline=None, max_examples=examples(200))
def test_batches_hold_all_units_in_order(pairs, limit, more):
    units = [Unit([Read(handle, box)], 3, 5) for handle, box in pairs]
    batches = list(in_batches(units, limit, limit + more))
    assert [one for batch in batches for one in batch.reads] == [u.reads[0] for u in units]
    for batch in batches:
        count = len(batch.reads)
        there = [(one.handle, one.box) for one in batch.reads]
        assert batch.reading == decoded_by(there)[0] + count * (READ_OVERHEAD + 3)
        assert batch.consumer_bytes == 5 * count
        assert count == 1 or max(batch.reading, batch.consumer_bytes) <= limit + more
    for one, other in itertools.pairwise(batches):
        first = other.reads[0]
        there = [(r.handle, r.box) for r in (*one.reads, first)]
        assert decoded_by(there)[0] + len(there) * (READ_OVERHEAD + 3) > limit


def test_planning_takes_as_much_for_each_layer_however_many_share_a_chunk(tmp_path, monkeypatch):
    asked, counts = cost.chunks_of, []

    def counted(handle, box):
        counts[-1] += 1
        return asked(handle, box)

    monkeypatch.setattr(cost, "chunks_of", counted)
    for layers in (8, 32):
        path = tmp_path / f"{layers}"
        layouts.save_pytree(path, {"layers": {"w": np.ones((layers, 6, 4), "f4")}})
        ckpt = reshard.unstack(reshard.open(path), "layers", into="layer_{}", axis=0)
        counts.append(0)
        plan = reshard.plan(reshard.to_mesh(ckpt, "x=2", [(".", "x,")]), chunks=16)
        assert (len(plan.arrays), plan.passes, plan.problems) == (layers, 1.0, ())
    assert counts[0] >= 8 and counts[1] <= 4 * counts[0]


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """Two arrays of 4 MiB, in 64 chunks of 16 columns, that do not compress."""
    rng = np.random.default_rng(0)
    tree = {f"w{n}": layouts.random_array(rng, (1024, 1024), "uint32") for n in range(2)}
    folder = tmp_path_factory.mktemp("saved")
    layouts.save_pytree(folder / "whole", tree, use_ocdbt=False)
    reshard.save(reshard.open(folder / "whole"), folder / "columns", chunks="64KiB")
    (chunk,) = {handle.chunk_shape for handle in reshard.open(folder / "columns").arrays}
    assert chunk == (1024, 16)
    return folder / "columns", {(name,): bits(leaf) for name, leaf in tree.items()}


def to_rows(path):
    ckpt = reshard.to_mesh(reshard.open(path), "model=8", specs=[(".", ("model",))])
    plan = reshard.plan(ckpt, max_memory="8MiB")
    assert plan.problems == () and plan.passes == 1
    return ckpt, plan


def test_a_job_reads_ahead_while_it_writes(columns, tmp_path, monkeypatch):
    path, tree = columns
    ckpt, plan = to_rows(path)
    seen, ahead, told = Watched(monkeypatch), [], []
    taken = Filled.check

    def watched(filled):
        here = next(n for n, batch in enumerate(seen.batches) if batch is filled.batch)
        ahead.append(len(seen.batches) - 1 - here)
        taken(filled)

    monkeypatch.setattr(Filled, "check", watched)
    monkeypatch.setattr(
        MemoryLimiter, "is_ready", lambda limiter: True
    )  # no commit is slower than reads
    reshard.save(ckpt, tmp_path / "out", max_memory="8MiB", progress=lambda *c: told.append(c))
    assert max(ahead) < READ_AHEAD
    assert sum(count > 0 for count in ahead) > len(ahead) / 2
    assert seen.peak <= plan.peak_memory <= 8 << 20
    assert seen.used == 0
    assert values(tmp_path / "out") == tree
    # Progress counts each byte once.
    done, whole = [done for done, _ in told], (8 << 20) + plan.other_bytes
    assert told[-1] == (whole, whole)
    assert done == sorted(done) and max(np.diff(done)) < whole / 2


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_batch_that_cannot_be_written_fails_its_share(columns, tmp_path, monkeypatch, failing):
    path, _ = columns
    ckpt, _ = to_rows(path)
    # Room for several batches that are written at once.
    monkeypatch.setattr(stream.memory, "limiter_bytes", lambda *_: 24 << 20)
    wait, free_after = stream.wait_written, Reservation.free_after
    commits = []

    def noted(reservation, waits, *rest):
        commits.append(waits.args[0])
        free_after(reservation, waits, *rest)

    def full(future, directory):
        if len(commits) > failing and future is commits[failing]:
            raise reshard.DestinationError("the disk is full")
        wait(future, directory)

    monkeypatch.setattr(Reservation, "free_after", noted)
    monkeypatch.setattr(stream, "wait_written", full)
    with pytest.raises(reshard.DestinationError, match="the disk is full"):
        reshard.save(ckpt, tmp_path / "out", max_memory="8MiB")
    assert len(commits) > failing + 1
    assert list(tmp_path.iterdir()) == []
