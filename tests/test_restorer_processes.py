"""Interrupts of processes that restore."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys

import jax
import layouts
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import few

import reshard

HERE = pathlib.Path(__file__).parent
TIMEOUT = 300  # seconds, after which a process hangs
FLAGS = os.environ["XLA_FLAGS"]


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
