"""The restorer in processes of its own: what they read, and what interrupts them."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import layouts
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import few
from test_formed import FORMATS

import reshard
from reshard.storage import posix

HERE = pathlib.Path(__file__).parent
TIMEOUT = 300  # seconds, after which a process hangs
FLAGS = os.environ["XLA_FLAGS"]

# What is read.


def count():
    """Bytes that this process has read."""
    now, last = 0, -1
    while now - last > 1024:  # a read may count a moment after it has ended
        time.sleep(0.05)
        lines = pathlib.Path("/proc/self/io").read_text().splitlines()
        last, now = now, int(next(line for line in lines if line.startswith("rchar")).split()[1])
    return now


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not count reads")
@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", FORMATS)
def test_a_process_reads_each_stored_byte_once(tmp_path, monkeypatch, flags):
    """Column, row and replicated shards, with and without a limit that is smaller than an array:
    nothing is read twice, but for a few per cent of file names, metadata and B-tree nodes."""
    monkeypatch.setattr(posix, "on_local_disk", lambda path: False)  # what is mapped does not count
    specs = {"both": P("data", "model"), "row": P("data"), "column": P(None, "model"), "whole": P()}
    tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (1024, 1024))
    layouts.save_pytree(tmp_path / "saved", tree, **FORMATS[flags])
    ckpt = reshard.open(tmp_path / "saved")
    stored = sum(sum(handle.stored_sizes()) for handle in ckpt.arrays)
    jax.block_until_ready(reshard.restore(ckpt, tree))  # what is imported on the way
    ratios = {}
    for spec, memory in itertools.product(specs.values(), (None, "3MiB", "20MiB")):
        sharding = NamedSharding(layouts.mesh((4, 2)), spec)
        target = jax.tree.map(lambda array, to=sharding: layouts.laid_out(array, to), tree)
        before = count()
        jax.block_until_ready(reshard.restore(ckpt, target, max_memory=memory))
        ratios[spec, memory] = (count() - before) / stored
    assert {case: ratio for case, ratio in ratios.items() if not 1 <= ratio < 1.03} == {}


# Ctrl-C.


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 48 MiB."""
    path = tmp_path_factory.mktemp("large") / "saved"
    specs = {f"w{i}": P("data", "model") for i in range(12)}
    return layouts.save_pytree(path, layouts.small_tree(layouts.mesh((2, 4)), specs, (1024, 1024)))


FOREVER = """
import gc, sys
import jax, numpy as np
from jax.sharding import Mesh
import reshard

gc.disable()  # JAX is called by it, and Python ignores an interrupt that falls there
mesh = Mesh(np.array(jax.devices()).reshape(2, 8), ("data", "model"))
ckpt = reshard.open(sys.argv[1])
while True:
    reshard.restore(
        ckpt, mesh, max_memory=sys.argv[2], progress=lambda count: print(count, flush=True)
    )
"""


@pytest.mark.parametrize(
    ("memory", "lines"), few(itertools.product(("1GiB", "16MiB"), (1, 3, 20)), ("1GiB", 3))
)
def test_an_interrupt_ends_a_process_that_restores(large, memory, lines):
    """As it ends any other Python program, wherever it falls."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", FOREVER, large, memory], **pipes)
    try:
        for _ in range(lines):
            assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_program_may_go_on_after_an_interrupt(large):
    """The module that was to be filled is untouched, and is filled by the next call."""
    ckpt = reshard.open(large)
    on = NamedSharding(layouts.mesh((1, 8)), P(None, "model"))
    zeros = jax.device_put(np.zeros((1024, 1024), "float32"), on)
    module = nnx.Dict({handle.path[0]: nnx.Param(zeros) for handle in ckpt.arrays})
    for turn in range(1, 8, 2):
        calls = []

        def progress(count, calls=calls, turn=turn):
            calls.append(count)
            if len(calls) == turn:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            reshard.restore(ckpt, module, max_memory="10MiB", progress=progress)
        assert len(calls) == turn
        assert all(module[handle.path[0]][...] is zeros for handle in ckpt.arrays)
    assert reshard.restore(ckpt, module) is module
    for handle in ckpt.arrays:
        values = handle.view().read().result()
        assert np.asarray(module[handle.path[0]][...]).tobytes() == values.tobytes()
