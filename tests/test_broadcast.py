"""Processes that restore together: who reads what, what is exchanged, and what fails in one."""

import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import broadcast_worker
import hypothesis
import jax
import layouts
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import few
from test_restorer_processes import FLAGS, HERE, TIMEOUT

import reshard
from reshard import errors
from reshard.arrays import boxes
from reshard.restore import exchange, restore
from reshard.restore.broadcast import (
    Group,
    in_waves,
    memory_bytes,
    plan_exchange,
    row_bytes,
    stretches,
)

# The plan, which all processes make alike.


class Device(NamedTuple):
    process_index: int
    id: int


class Laid:
    """A sharding of which each device holds any box."""

    def __init__(self, places):
        self._places = places

    def devices_indices_map(self, shape):
        return {Device(process, n): box for n, (process, box) in enumerate(self._places)}


def any_box(rng, shape):
    ends = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
    return tuple(slice(start, stop) for start, stop in ends)


def any_group(rng, first, processes):
    """Arrays of any grid, of which each process holds any boxes, some of them none."""
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 3)))
    chunk = tuple(rng.randint(1, size) for size in shape)
    together = boxes.chunks_together(shape, chunk, rng.randint(1, 5))
    held = [
        Laid([(process, any_box(rng, shape)) for process in range(processes) for _ in range(2)])
        if rng.random() < 0.7
        else None
        for _ in range(rng.randint(1, 2))
    ]
    count = rng.randint(1, 2)
    itemsizes = [rng.choice([1, 2, 4, 8, 16]) for _ in range(count)]
    numbers = list(range(first, first + count))
    places = {boxes.start_of(box): rng.randint(0, 5) for box in boxes.grid_boxes(shape, chunk)}
    return Group(
        numbers, itemsizes, shape, chunk, together, tuple(held), lambda b: places[boxes.start_of(b)]
    ), held


@hypothesis.given(st.integers(0, 2**32 - 1))
def test_each_box_is_read_once_and_given_to_all_who_hold_a_part_of_it(seed):
    rng = random.Random(seed)
    processes, row = rng.randint(1, 4), rng.choice([16, 48, 1024])
    groups, held, values = [], [], {}
    for _ in range(rng.randint(1, 3)):
        group, those = any_group(rng, len(values), processes)
        groups.append(group)
        held.append(those)
        for number, itemsize in zip(group.numbers, group.itemsizes, strict=True):
            data = rng.randbytes(math.prod(group.shape) * itemsize)
            values[number] = np.frombuffer(data, f"V{itemsize}").reshape(group.shape)
    plans = [plan_exchange(groups, processes, here, row) for here in range(processes)]
    rounds = plans[0].rounds
    assert {(plan.rounds, plan.digest) for plan in plans} == {(rounds, plans[0].digest)}
    # What is read, by whom; and the rows that are sent.
    reads = [(number, boxes.start_of(b)) for plan in plans for number, b, _ in plan.reads]
    assert len(reads) == len(set(reads))
    got = [{n: np.zeros_like(v) for n, v in values.items()} for _ in range(processes)]
    rows = np.zeros((rounds, processes, row), np.uint8)
    taken = np.zeros((rounds, processes, row), bool)
    for here, plan in enumerate(plans):
        last = 0
        for number, box, pieces in plan.reads:
            got[here][number][box] = values[number][box]
            data = values[number][box].reshape(-1)
            for piece in pieces:
                part = np.frombuffer(data[piece.start : piece.stop].tobytes(), np.uint8)
                ends = slice(piece.offset, piece.offset + len(part))
                assert piece.owner == here and last <= piece.round and ends.stop <= row
                assert piece.offset % data.itemsize == 0
                last = piece.round
                assert not taken[piece.round, here, ends].any()
                taken[piece.round, here, ends] = True
                rows[piece.round, here, ends] = part
    for here, plan in enumerate(plans):
        assert len(plan.received) == rounds
        for number, pieces in enumerate(plan.received):
            for piece in pieces:
                assert piece.round == number and piece.owner != here
                array = got[here][piece.number]
                begin = piece.offset
                for part in stretches(boxes.shape_of(piece.box), piece.start, piece.stop):
                    shape = boxes.shape_of(part)
                    size = math.prod(shape) * array.itemsize
                    data = rows[number, piece.owner, begin : begin + size].view(array.dtype)
                    array[boxes.outside(part, piece.box)] = data.reshape(shape)
                    begin += size
    for group, those in zip(groups, held, strict=True):
        for here in range(processes):
            for sharding in those:
                places = [(here, (...,))] if sharding is None else sharding._places
                for process, box in places:
                    for number in group.numbers if process == here else ():
                        assert got[here][number][box].tobytes() == values[number][box].tobytes()


@hypothesis.given(st.lists(st.integers(1, 5), max_size=4), st.integers(0), st.integers(0))
def test_a_run_of_elements_is_few_boxes(shape, one, other):
    values = np.arange(math.prod(shape)).reshape(shape)
    start, stop = sorted((one % (values.size + 1), other % (values.size + 1)))
    found = list(stretches(tuple(shape), start, stop))
    parts = [values[box].reshape(-1) for box in found]
    assert np.concatenate([np.zeros(0, int), *parts]).tolist() == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_processes_read_runs_of_what_is_stored_next_to_one_another():
    """As much each; what one process alone holds it reads, in its place."""
    one = Laid([(process, (slice(0, 64),)) for process in range(4)])
    group = Group([0], [4], (64,), (1,), (1,), (one,), lambda box: 100 - box[0].start)
    plans = [plan_exchange([group], 4, here, 16) for here in range(4)]
    runs = [[box[0].start for _, box, _ in plan.reads] for plan in plans]
    assert [*itertools.chain(*runs)] == list(range(64))[::-1]
    assert list(map(len, runs)) == [16] * 4
    assert plans[0].rounds == 4
    halves = Laid([(process, (slice(32 * process, 32 * process + 32),)) for process in range(2)])
    group = group._replace(shardings=(halves,))
    assert not group.is_shared(2)
    assert [len(plan_exchange([group], 2, here, 16).reads) for here in range(2)] == [32, 32]
    assert group._replace(chunk=(3,), together=(3,)).is_shared(2)  # chunk 10 is of both halves


@pytest.mark.parametrize("processes", [2, 3, 64, 1000])
def test_rows_take_a_quarter_of_the_memory(processes):
    for memory in (1 << 20, 1 << 25, 1 << 30, 1 << 40):
        row = row_bytes(1 << 40, processes, memory)
        assert row % 16 == 0 and 4096 <= row <= 1 << 22
        assert row == 4096 or memory_bytes(row, processes) <= memory // 4
    assert row_bytes(1 << 40, processes, None) == min(1 << 22, (1 << 25) // processes // 16 * 16)
    assert row_bytes(10, processes, None) == 4096


def test_arrays_go_in_waves_that_have_room():
    groups: Any = ["a", "b", "c", "d", "e"]
    waves = in_waves(groups, [3, 4, 4, 0, 9], 8)
    assert waves == [["a", "b"], ["c", "d"], ["e"]]
    assert in_waves([], [], 8) == []


# What processes tell one another.


def test_what_others_are_told_fits_in_a_row():
    error = reshard.CorruptCheckpointError("wörse " * 1000, ["x" * 1000] * 100, ["do this"])
    told = exchange._told(error)
    assert len(exchange._encoded(told)) <= 4096
    assert told.name == "CorruptCheckpointError" and told.summary == ("wörse " * 1000)[:700]
    short = exchange._told(reshard.StoreError("none", ["a", "b"], ["c"]))
    assert short == ("StoreError", "none", ("a", "b"), ("c",))
    assert exchange._of_json(json.loads(exchange._encoded(short))) == short
    assert exchange._told(KeyboardInterrupt()).summary == "KeyboardInterrupt"
    assert exchange._told(OSError("why")).summary == "OSError: why"


def test_the_error_that_all_raise_names_the_processes():
    one, other = (
        exchange._told(reshard.StoreError(text, ["p"], [f"do {text}"])) for text in ("x", "y")
    )
    error = exchange._failure([None, one, None])
    assert type(error) is errors.StoreError
    assert str(error) == "process 1: x\n  p\n\nhint: do x"
    error = exchange._failure([other, None, one])
    assert str(error) == (
        "2 of 3 processes could not restore\n  process 0: y\n  process 0: p\n"
        "  process 2: x\n  process 2: p\n\nhint: do y"
    )


# One process.


def test_one_process_exchanges_nothing(tmp_path, monkeypatch):
    on = layouts.mesh((2, 4))
    tree = layouts.small_tree(on, {"w": P("data"), "b": P()}, (8, 16))
    layouts.save_pytree(tmp_path / "saved", tree)
    monkeypatch.setattr(restore, "Exchange", None)
    got = reshard.restore(tmp_path / "saved", tree, replicas="broadcast")
    layouts.assert_same_tree(got, tree)
    arguments = reshard.ArgumentError, reshard.restore, tmp_path / "saved", tree
    assert layouts.refused(*arguments, replicas="all") == (
        "replicas='all' is not known\n\nhint: replicas='read'\nhint: replicas='broadcast'"
    )


# Several processes.


class Processes:
    """Processes that do what they are told, all of them the same at once."""

    def __init__(self, count):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        worker = [sys.executable, HERE / "broadcast_worker.py", address, str(count)]
        paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": FLAGS.partition(" ")[2]}
        self._running = [
            subprocess.Popen(
                [*worker, str(number)],
                env=os.environ | own,  # as many devices as each says
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def __len__(self):
        return len(self._running)

    def answers(self, *words) -> list[dict[str, Any]]:
        """What a function of `broadcast_worker` gives in each process."""
        for process in self._running:
            assert process.stdin is not None
            print(json.dumps(words, default=str), file=process.stdin, flush=True)
        return [self._answer(process) for process in self._running]

    def values(self, *words) -> list[Any]:
        found = self.answers(*words)
        assert [answer.get("error") for answer in found] == [None] * len(found)
        return [answer["value"] for answer in found]

    def errors(self, *words) -> list[Any]:
        return [answer.get("error") for answer in self.answers(*words)]

    def _answer(self, process):
        for line in process.stdout:
            if line.startswith(broadcast_worker.ANSWER):
                return json.loads(line.removeprefix(broadcast_worker.ANSWER))
        raise AssertionError(f"a process has ended: {process.wait(TIMEOUT)}")

    def close(self):
        for process in self._running:
            process.kill()
        for process in self._running:
            process.communicate()


@pytest.fixture(scope="module", params=few([2, 4], 2))
def processes(request):
    found = Processes(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A checkpoint with all kinds of leaves: as it was saved, and with chunks that do not decode,
    of all arrays, or of one that is sharded over processes."""
    folder = tmp_path_factory.mktemp("copies")
    tree = layouts.random_tree(layouts.mesh((2, 4)), 0, strings=False)
    layouts.save_pytree(folder / "whole", tree, use_ocdbt=False)
    for name, pattern in {"damaged": "**/.zarray", "damaged_embed": "params.embed/.zarray"}.items():
        shutil.copytree(folder / "whole", folder / name)
        for metadata in (folder / name).glob(pattern):
            for file in metadata.parent.iterdir():
                if file != metadata and file.is_file():
                    file.write_bytes(bytes(file.stat().st_size))
    return folder


MEMORY = pytest.mark.parametrize("memory", [None, "256KiB"])
KIND = pytest.mark.parametrize("kind", ["cpu", "accelerator"])


@MEMORY
@KIND
@pytest.mark.parametrize("layout", ["saved", "replicated", "rows"])
def test_what_is_broadcast_is_what_orbax_restores(processes, copies, layout, memory, kind):
    """Bit for bit, NaNs and zeros with signs among them; within the memory."""
    for found in processes.values("compared", copies / "whole", layout, memory, kind):
        assert (found["orbax"], found["alone"]) == ([], [])
        assert memory is None or found["peak"] <= 256 << 10


@MEMORY
@KIND
def test_derived_arrays_are_broadcast(processes, tmp_path, memory, kind):
    """Layers of one stored array, one array of several, casts, and a narrower integer dtype."""
    on, rng = layouts.mesh((2, 4)), np.random.default_rng(0)

    def put(shape, *spec):
        values = rng.standard_normal(shape, "float32")
        return jax.device_put(values, NamedSharding(on, P(*spec)))

    tree = {
        "layers": {"kernel": put((6, 40, 24), None, "model")},
        **{f"part_{i}": {"w": put((24, 16), "model")} for i in range(3)},
        "count": jax.device_put(np.arange(96, dtype="int32"), NamedSharding(on, P("model"))),
        "wide": put((200, 96)),
    }
    layouts.save_pytree(tmp_path / "saved", tree)
    found = processes.values("transformed", tmp_path / "saved", memory, kind)
    assert found == [[]] * len(processes)


def all_restore(processes, whole):
    restored = processes.values("failing", [whole] * len(processes), "replicated", None)
    assert restored == ["restored"] * len(processes)


def failing(processes, whole, other, layout, interrupted=None):
    """What each says where process 1 has another checkpoint; and then all go on."""
    paths = [whole, other, *[whole] * (len(processes) - 2)]
    found = processes.errors("failing", paths, layout, interrupted)
    all_restore(processes, whole)
    return found


@pytest.mark.parametrize(
    ("layout", "copy"), [("replicated", "damaged"), ("saved", "damaged_embed")]
)
def test_a_read_that_fails_in_one_process_fails_in_all(processes, copies, layout, copy):
    """Of what is exchanged, or of what that process alone needs."""
    (kind, text), *others = failing(processes, copies / "whole", copies / copy, layout)
    assert others == [[kind, text]] * len(others)
    assert kind == "CorruptCheckpointError"
    leaf = "params/embed" if copy == "damaged_embed" else ".*"
    assert re.match(f"process 1: {leaf}: its stored bytes", text)


def test_a_checkpoint_that_one_process_lacks_fails_in_all(processes, copies):
    found = failing(processes, copies / "whole", copies / "none", "saved")
    text = f"process 1: there is nothing at `{copies / 'none'}`\n\n"
    text += f"hint: `{copies}` has: damaged, damaged_embed, whole"
    assert found == [["CheckpointNotFoundError", text]] * len(processes)


def test_an_interrupt_of_one_process_ends_the_others(processes, copies):
    found = failing(processes, copies / "whole", copies / "whole", "replicated", 1)
    expected: list[Any] = [["ReshardError", "process 1: KeyboardInterrupt"]] * len(processes)
    expected[1] = ["KeyboardInterrupt", ""]
    assert found == expected


def test_what_is_wrong_everywhere_is_said_as_if_it_were_alone(processes, copies):
    found = processes.errors("mismatched", copies / "whole", True)
    assert found == [found[0]] * len(processes)
    kind, text = found[0]
    assert kind == "TreeMismatchError"
    assert text.startswith(f"`{copies / 'whole'}` does not match the target")


@pytest.mark.every_combination
@pytest.mark.parametrize("other", ["target", "checkpoint"])
def test_processes_that_do_not_restore_the_same_are_told_so(processes, copies, tmp_path, other):
    """Another target, or another checkpoint of the same leaves."""
    whole = copies / "whole"
    if other == "target":
        found = processes.errors("mismatched", whole, False)
    else:
        tree = layouts.random_tree(layouts.mesh((2, 4)), 1, strings=False)
        layouts.save_pytree(tmp_path / "other", tree)
        found = failing(processes, whole, tmp_path / "other", "saved")
    assert found == [found[0]] * len(processes)
    kind, text = found[0]
    assert kind == "ArgumentError"
    first, *lines = text.splitlines()
    assert first == "processes that restore together restore the same, and these do not"
    digests = [
        re.fullmatch(rf"  process {n}: \d+ arrays of digest (\w{{12}}), \d+ bytes a round", line)
        for n, line in enumerate(lines)
    ]
    assert len({digest[1] for digest in digests if digest}) == 2 and all(digests)


def test_a_process_that_does_not_come_is_named(processes, copies):
    found = processes.answers("absent", copies / "whole")
    text = "process 1: it has not begun to restore within 1 seconds"
    expected: list[Any] = [{"error": ["ReshardError", text]}] * len(processes)
    expected[1] = {"value": "absent"}
    assert found == expected
    all_restore(processes, copies / "whole")


def test_a_module_is_updated_when_all_have_read(processes, copies):
    paths = [copies / "whole"] * len(processes)
    paths[len(processes) // 2] = copies / "damaged"  # who reads the only box
    found = processes.values("updated", paths)
    assert found == [[True, True, [], True, []]] * len(processes)


def assert_held(boxes_held, value):
    """What a process holds of an array, as `broadcast_worker.hashed` says it."""
    for box, digest in boxes_held.items():
        part = value if box == "host" else value[tuple(slice(*ends) for ends in json.loads(box))]
        assert digest == hashlib.sha256(part.tobytes()).hexdigest()


# Without a broadcast.

ALONE = {
    "both": ("data", "model"),
    "swapped": ("model", "data"),
    "row": (("data", "model"),),
    "column": (None, ("data", "model")),
    "whole": (),
    "interleaved": (("model", "data"),),  # every other shard belongs to the same process
}


@MEMORY
def test_each_process_reads_what_its_own_shards_need(processes, tmp_path, memory):
    """The chunks that they touch, each of them once; bit for bit, as part of one global array on
    which a jitted function computes."""
    put = layouts.random_on(layouts.mesh((2, 4)))
    saved: dict = dict.fromkeys(ALONE, ("data", "model"))
    saved |= {"whole": (), "row": ("data",), "interleaved": (("data", "model"),)}
    tree = {name: put((256, 512), *spec, dtype="uint32") for name, spec in saved.items()}
    values = {name: np.asarray(array) for name, array in tree.items()}
    layouts.save_pytree(tmp_path / "saved", tree, use_ocdbt=False)
    for found in processes.values("alone", tmp_path / "saved", ALONE, memory):
        for name, value in values.items():
            held, total, read, needed = found["each"][name]
            assert_held(held, value)
            assert (total, read) == (int((value % 1000).astype("int32").sum()), needed)
            assert_held(found["bare"][name], value)


# What is fetched from a bucket.

SPECS: dict[str, tuple | None] = {
    "all_over": (),
    "columns": (None, "model"),
    "rows": ("data",),
    "one_chunk": ("data", "model"),
    "host": None,
}


@pytest.fixture(scope="module")
def in_a_bucket(_stores, tmp_path_factory):
    """A checkpoint of 13 MiB in a bucket of s3, and its values."""
    specs = dict.fromkeys(SPECS, P("data", "model"))
    tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (1024, 768))
    values = {name: np.asarray(array) for name, array in tree.items()}
    tree["one_chunk"] = jax.device_put(values["one_chunk"], jax.devices()[0])
    path = layouts.save_pytree(tmp_path_factory.mktemp("bucket") / "saved", tree)
    url = f"{_stores.bucket('s3')}/saved"
    reshard.save(reshard.open(path), url)
    return url, values


@pytest.mark.parametrize("replicas", ["broadcast", "read"])
def test_each_stored_byte_is_fetched_once(processes, stores, in_a_bucket, replicas):
    """By all processes together; without a broadcast, by each that needs it."""
    url, values = in_a_bucket
    stored = {h.path[0]: sum(h.stored_sizes()) for h in reshard.open(url).arrays}
    stores.reset()
    found = processes.values("fetched", url, stores.environment, SPECS, replicas)
    fetched = sum(request.received for request in stores.answered("read"))
    for held in found:
        for name, boxes_held in zip(sorted(SPECS), held, strict=True):
            assert_held(boxes_held, values[name])
    total = sum(stored.values())
    if replicas == "broadcast":
        assert total <= fetched <= 1.02 * total
    else:
        by_each = len(processes) * (total - stored["rows"] // 2)  # a half of these on either half
        assert by_each <= fetched <= 1.02 * by_each
