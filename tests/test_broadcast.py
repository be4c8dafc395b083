"""Processes that restore together: reads, exchanges, and errors in one of them; and interrupts."""

import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import types
from typing import Any

import broadcast_worker
import jax
import layouts
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import few

import reshard
from reshard.restore import replicas, restore

HERE = pathlib.Path(__file__).parent
TIMEOUT = 300  # seconds, after which a process hangs
FLAGS = os.environ["XLA_FLAGS"]


def test_one_process_exchanges_nothing(tmp_path, monkeypatch):
    on = layouts.mesh((2, 4))
    tree = layouts.small_tree(on, {"w": P("data"), "b": P()}, (8, 16))
    layouts.save_pytree(tmp_path / "saved", tree)
    monkeypatch.setattr(restore, "agreement", None)
    got = reshard.restore(tmp_path / "saved", tree, replicas="broadcast")
    layouts.assert_same_tree(got, tree)
    arguments = reshard.ArgumentError, reshard.restore, tmp_path / "saved", tree
    assert layouts.refused(*arguments, replicas="all") == (
        "replicas='all' is unknown\n\nhint: replicas='read'\nhint: replicas='broadcast'"
    )


class Processes:
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


# What does not depend on the number of processes.
TWO = pytest.mark.parametrize("processes", [2], indirect=True)
MEMORY = pytest.mark.parametrize("memory", [None, "256KiB"])
KIND = pytest.mark.parametrize("kind", ["cpu", "accelerator"])


@MEMORY
@KIND
@pytest.mark.parametrize("layout", ["saved", "replicated", "rows"])
def test_a_broadcast_gives_the_arrays_that_orbax_restores(processes, copies, layout, memory, kind):
    for found in processes.values("compared", copies / "whole", layout, memory, kind):
        assert (found["orbax"], found["alone"]) == ([], [])
        assert memory is None or found["peak"] <= 256 << 10


@TWO
@MEMORY
@KIND
def test_derived_arrays_are_broadcast(processes, tmp_path, memory, kind):
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


FAILED = "the restore failed in process 1\n\nhint: see the error of that process"


def failing(processes, whole, other, layout, interrupted=None):
    """The errors if process 1 has another checkpoint. Then all processes restore again."""
    paths = [whole, other, *[whole] * (len(processes) - 2)]
    found = processes.errors("failing", paths, layout, interrupted)
    all_restore(processes, whole)
    return found


@pytest.mark.parametrize(
    ("layout", "copy", "kind", "text"),
    [
        ("replicated", "damaged", "CorruptCheckpointError", ".*: its stored bytes"),
        ("saved", "damaged_embed", "CorruptCheckpointError", "params/embed: its stored bytes"),
        ("saved", "none", "CheckpointNotFoundError", "nothing exists at `.*/none`\n"),
        ("replicated", "whole", "KeyboardInterrupt", "$"),
    ],
)
def test_a_failure_of_one_process_ends_all(processes, copies, layout, copy, kind, text):
    """One process fails in a read for the exchange or for itself alone, finds no checkpoint, or is
    interrupted."""
    interrupted = 1 if copy == "whole" else None
    found = failing(processes, copies / "whole", copies / copy, layout, interrupted)
    own, told = found.pop(1)
    assert own == kind and re.match(text, told)
    assert found == [["ReshardError" if interrupted else kind, FAILED]] * len(found)


@TWO
def test_a_process_that_restores_too_late(processes, copies):
    found = processes.errors("late", copies / "whole")
    assert {kind for kind, _ in found} == {"ReshardError"}
    assert found[0][1].startswith("not all processes called `restore` within 2 s\n")
    all_restore(processes, copies / "whole")


def test_processes_with_unequal_numbers_of_devices(monkeypatch):
    devices = [types.SimpleNamespace(process_index=n, id=n) for n in [0, 0, 0, 1]]
    monkeypatch.setattr(replicas.jax, "devices", lambda: devices)
    monkeypatch.setattr(replicas.jax, "process_count", lambda: 2)
    text = "the processes have unequal numbers of devices\n  process 0: 3\n  process 1: 1\n"
    with pytest.raises(reshard.ReshardError, match=text):
        replicas._gathered(np.zeros(1, np.uint8))


@TWO
def test_an_error_of_all_processes_is_the_same_in_each(processes, copies):
    found = processes.errors("mismatched", copies / "whole", True)
    assert found == [found[0]] * len(processes)
    kind, text = found[0]
    assert kind == "TreeMismatchError"
    assert text.startswith(f"`{copies / 'whole'}` does not match the target")


@TWO
@pytest.mark.every_combination
@pytest.mark.parametrize("other", ["target", "checkpoint"])
def test_processes_that_restore_different_targets_or_checkpoints(
    processes, copies, tmp_path, other
):
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
    assert text.startswith("the processes restore different targets or checkpoints\n")
    one, other = re.findall(r"\n  process \d: digest (\w{12})\b", text)
    assert one != other


def test_a_module_is_updated_when_all_have_read(processes, copies):
    paths = [copies / "whole"] * len(processes)
    paths[len(processes) // 2] = copies / "damaged"  # who reads the only box
    found = processes.values("updated", paths)
    assert found == [[True, True, [], True, []]] * len(processes)


def assert_held(boxes_held, value):
    """A process holds these parts of an array, as digests of `broadcast_worker.hashed`."""
    for box, digest in boxes_held.items():
        part = value if box == "host" else value[tuple(slice(*ends) for ends in json.loads(box))]
        assert digest == hashlib.sha256(part.tobytes()).hexdigest()


# Specs on which an array is saved, and to which it is restored: in chunks that go to several
# processes, or whose borders are not those of the shards.
LAID: dict[str, tuple[tuple, tuple | None]] = {
    "all_over": (("data", "model"), ()),
    "columns": (("data", "model"), (None, "model")),
    "swapped": (("data", "model"), ("model", "data")),
    "interleaved": (("data",), (("model", "data"),)),
    "one_chunk": ((), ("data", "model")),
    "one_chunk_all_over": ((), ()),
    "thirds": ((None, "third"), (None, "data")),
    "thirds_all_over": (("third",), ()),
    "host": ((None, "third"), None),
}


def saved_at(path, values):
    """Arrays in a checkpoint, a chunk for each place on the axes of their specs; the bytes that
    are stored of each."""
    tree = {}
    for name, (value, spec) in values.items():
        axes = [axis for axis in spec if axis] or ["model"]
        sizes = {"data": 2, "model": 2 if spec else 1, "third": 3}
        on = layouts.mesh([sizes[axis] for axis in axes], axes)
        tree[name] = jax.device_put(value, NamedSharding(on, P(*spec)))
    layouts.save_pytree(path, tree, use_ocdbt=False)
    return {handle.path[0]: sum(handle.stored_sizes()) for handle in reshard.open(path).arrays}


@KIND
def test_each_stored_chunk_is_read_once(processes, tmp_path, kind):
    """One process reads each chunk, also where the borders of shards cut chunks. Each process reads
    its own host arrays, and all its arrays if memory has no room for the exchange."""
    values = {
        name: (layouts.random((24, 36), seed=n), LAID[name][0]) for n, name in enumerate(LAID)
    }
    stored = saved_at(tmp_path / "saved", values)
    specs = {name: spec for name, (_, spec) in LAID.items()}
    for memory in (None, "1MiB", "48KiB"):
        found = processes.values("read", tmp_path / "saved", specs, memory, kind)
        for held, _ in found:
            for name, (value, _) in values.items():
                assert_held(held[name], value)
        total = sum(count for _, count in found)
        once = sum(stored.values()) + (len(processes) - 1) * stored["host"]
        assert total > once if memory == "48KiB" else total == once


@TWO
@KIND
def test_every_dtype_comes_bit_by_bit(processes, tmp_path, kind):
    """NaNs with payloads and zeros with signs among them, from one process or from all. Elements of
    less than a byte, and complex ones, are read by each process."""
    alone = {"complex64", "float4_e2m1fn", "int2", "int4"}
    values = {}
    for dtype in layouts.DTYPES:
        value = layouts.random((24, 16), dtype)
        if value.dtype.kind == "f":
            value[::2, ::2] = -0.0
        values |= {f"{dtype}_one": (value, ()), f"{dtype}_all": (value, ("data", "model"))}
    stored = saved_at(tmp_path / "saved", values)
    found = processes.values("read", tmp_path / "saved", dict.fromkeys(values, ()), None, kind)
    for held, _ in found:
        for name, (value, _) in values.items():
            assert_held(held[name], value)
    by_each = sum(count for name, count in stored.items() if name.rpartition("_")[0] in alone)
    total = sum(stored.values()) + by_each * (len(processes) - 1)
    assert sum(count for _, count in found) == total


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


# Interrupts.


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "saved"
    on = layouts.mesh((2, 4))
    tree = {f"w{i}": P("data", "model") for i in range(12)}
    tree = layouts.small_tree(on, tree, (1024, 1024))
    return layouts.save_pytree(path, tree)


FOREVER = """
import gc, sys
import jax, numpy as np
from jax.sharding import Mesh
import reshard

gc.disable()  # JAX is called by it, and Python ignores an interrupt that falls there
mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "model"))
ckpt = reshard.open(sys.argv[1])
while True:
    memory = None if sys.argv[2] == "None" else sys.argv[2]
    state = reshard.restore(
        ckpt, mesh, max_memory=memory, progress=lambda count: print(count, flush=True)
    )
    del state
"""


@pytest.mark.parametrize(
    ("memory", "lines"), few(itertools.product((None, "16MiB"), (1, 3, 20)), (None, 3))
)
def test_an_interrupt_ends_a_process_that_restores(large, memory, lines):
    own = {"XLA_FLAGS": FLAGS.replace("device_count=16", "device_count=8")}
    own["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", FOREVER, str(large), str(memory)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, env=os.environ | own, **streams)
    try:
        for _ in range(lines):
            assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("turn", [1, 4])
def test_a_program_may_go_on_after_an_interrupt(large, turn):
    """The module is unchanged. The next call updates it."""
    ckpt, calls = reshard.open(large), []
    sharding = NamedSharding(layouts.mesh((1, 8)), P(None, "model"))
    zeros = jax.device_put(np.zeros((1024, 1024), "float32"), sharding)
    module = nnx.Dict({handle.path[0]: nnx.Param(zeros) for handle in ckpt.arrays})

    def progress(count):
        calls.append(count)
        if len(calls) == turn:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        reshard.restore(ckpt, module, max_memory="10MiB", progress=progress)
    assert len(calls) == turn
    assert all(module[handle.path[0]][...] is zeros for handle in ckpt.arrays)
    assert reshard.restore(ckpt, module) is module
    for handle in ckpt.arrays:
        expected = handle.view().read().result()
        assert layouts.bits(np.asarray(module[handle.path[0]][...])) == layouts.bits(expected)
