"""The restorer in processes of its own: what they read, and what interrupts them."""

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import forked
import jax
import layouts
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import few
from test_formed import FORMATS

HERE = pathlib.Path(__file__).parent
TIMEOUT = 300  # seconds, after which a process hangs
FLAGS = os.environ["XLA_FLAGS"]


@pytest.fixture(scope="module", autouse=True)
def environment():
    """That of the processes: eight devices, and the modules beside this one."""
    assert len(jax.devices()) == 16  # of this process, which asks no more
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", re.sub("device_count=16", "device_count=8", FLAGS))
        patch.setenv("PYTHONPATH", f"{HERE.parent}{os.pathsep}{HERE}", prepend=os.pathsep)
        yield


def start(script, *arguments, popen=subprocess.Popen):
    """A Python process that runs a script, given as text."""
    return popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        return process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()


def run(script, *arguments):
    process = start(script, *arguments, popen=forked.Popen)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    return output


# What is read.

READS = """
    import json, sys, time
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import reshard
    from reshard.storage import posix

    posix.on_local_disk = lambda path: False  # what is mapped does not count as read

    def rchar():
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("rchar")).split()[1])

    def count():
        now, last = rchar(), -1
        while now - last > 1024:  # a read may count a moment after it has ended
            time.sleep(0.05)
            last, now = now, rchar()
        return now

    def target(sizes, *spec):
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("data", "model"))
        sharding = NamedSharding(mesh, P(*spec))
        return {
            handle.path[0]: jax.ShapeDtypeStruct(handle.shape, handle.dtype, sharding=sharding)
            for handle in ckpt.arrays
        }

    ckpt = reshard.open(sys.argv[1])
    stored = sum(sum(handle.stored_sizes()) for handle in ckpt.arrays)
    targets = {
        "column": target((1, 8), None, "model"),
        "row": target((8, 1), "data"),
        "both": target((2, 4), "model", "data"),
        "replicated": target((1, 8)),
    }
    jax.block_until_ready(reshard.restore(ckpt, targets["row"]))  # what is imported on the way
    ratios = {}
    for memory in (None, "3MiB", "20MiB"):
        for name, wanted in targets.items():
            before = count()
            jax.block_until_ready(reshard.restore(ckpt, wanted, max_memory=memory))
            ratios[f"{name} {memory}"] = (count() - before) / stored
    print(json.dumps(ratios))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not count reads")
@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", FORMATS)
def test_a_process_reads_each_stored_byte_once(tmp_path, flags):
    """Column, row and replicated shards, with and without a limit that is smaller than an array:
    nothing is read twice, but for a few per cent of file names, metadata and B-tree nodes."""
    rng = np.random.default_rng(0)
    on = layouts.mesh((2, 4))
    specs = {"both": P("data", "model"), "row": P("data"), "column": P(None, "model"), "whole": P()}
    tree = {
        name: jax.device_put(layouts.random_array(rng, (1024, 1024)), NamedSharding(on, spec))
        for name, spec in specs.items()
    }
    layouts.save_pytree(tmp_path / "saved", tree, **FORMATS[flags])
    ratios = json.loads(run(READS, tmp_path / "saved"))
    assert len(ratios) == 12
    assert {name: ratio for name, ratio in ratios.items() if not 1 <= ratio < 1.03} == {}


# Ctrl-C.


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 48 MiB."""
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
    """As it ends any other Python program, wherever it falls."""
    process = start(FOREVER, large, memory)
    try:
        for _ in range(lines):
            assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGINT)
        _, errors = finish(process)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


INTERRUPTED = """
    import signal, sys
    import jax, numpy as np
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import reshard

    mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "model"))
    ckpt = reshard.open(sys.argv[1])
    zeros = jax.device_put(np.zeros((1024, 1024), "float32"), NamedSharding(mesh, P(None, "model")))
    module = nnx.Dict({handle.path[0]: nnx.Param(zeros) for handle in ckpt.arrays})
    expected = {handle.path[0]: handle.view().read().result() for handle in ckpt.arrays}

    for turn in range(1, 8, 2):
        calls = []

        def progress(count):
            calls.append(count)
            if len(calls) == turn:
                signal.raise_signal(signal.SIGINT)

        try:
            reshard.restore(ckpt, module, max_memory="10MiB", progress=progress)
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("not interrupted")
        assert len(calls) == turn
        assert all(module[name][...] is zeros for name in expected)
    assert reshard.restore(ckpt, module) is module
    for name, value in expected.items():
        assert np.asarray(module[name][...]).tobytes() == value.tobytes()
    print("right")
"""


def test_a_program_may_go_on_after_an_interrupt(large):
    """The module that was to be filled is untouched, and is filled by the next call."""
    assert run(INTERRUPTED, large) == "right\n"
