"""Interrupts of processes that restore."""

import itertools
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
import pytest
from jax.sharding import PartitionSpec as P
from sampling import few

HERE = pathlib.Path(__file__).parent
TIMEOUT = 300  # seconds, after which a process hangs
FLAGS = os.environ["XLA_FLAGS"]


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Processes have eight devices, and the modules in this folder."""
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
    """The module is unchanged. The next call updates it."""
    assert run(INTERRUPTED, large) == "right\n"
