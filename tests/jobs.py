"""Jobs that are killed and resumed, or divided: their sources, and a process for each."""

import inspect
import json
import pathlib
import signal
import subprocess
import sys

import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard

FORMATS = {
    "zarr2": {},
    "zarr2-files": {"use_ocdbt": False},
    "zarr3": {"use_zarr3": True},
    "zarr3-files": {"use_ocdbt": False, "use_zarr3": True},
}
# Split projections, the layers of a scanned block (two of which share a chunk), a stack of layers.
MAP = r"""
to = 'nnx'

[[rule]]
from = '^params/fused_(\d+)/kernel$'
split = { axis = 1, into = ['fused/\1/left', 'fused/\1/right'] }

[[rule]]
from = '^params/scanned/(\w+)$'
unstack = { axis = 0, into = 'layers/{}/\1' }

[[rule]]
from = '^params/block_(\d+)/kernel$'
stack = { axis = 0, by = 1 }
to = 'blocks/kernel'

[[rule]]
from = '^params/plain_'
to = 'plain/'
"""


def put(rng, shape, *spec):
    sharding = NamedSharding(layouts.mesh((2, 4)), P(*spec))
    return jax.device_put(layouts.random_array(rng, shape), sharding)


def plain_tree(seed, count):
    """Arrays that are rewritten, kept, and read in several passes; and leaves of other kinds."""
    rng = np.random.default_rng(seed)
    shape = (512, 512)
    alone = [jax.device_put(layouts.random_array(rng, shape), jax.devices()[0]) for _ in range(2)]
    return {
        "params": {
            **{f"w{i}": put(rng, shape, "data", "model") for i in range(count)},
            **{f"kept{i}": put(rng, shape, None, None) for i in range(count)},
            **{f"serial{i}": alone[i] for i in range(2)},
            "small": {name: put(rng, (64,), "model") for name in ("a", "b.c/d")},
        },
        "text": "ü",
        "number": 3,
        "none": None,
    }


def linen_tree(seed, count):
    """What `MAP` is for."""
    rng = np.random.default_rng(seed)

    def kernels(name, count, side):
        return {
            f"{name}_{i}": {"kernel": put(rng, (side, side), "data", "model")} for i in range(count)
        }

    scanned = {
        "kernel": put(rng, (8, 256, 256), "data", None, "model"),
        "bias": put(rng, (8, 64), None, "model"),
    }
    return {
        "params": {
            "scanned": scanned,
            **kernels("fused", count, 512),
            **kernels("block", count, 256),
            **kernels("plain", count, 512),
        }
    }


def make(path, kind, count):
    """Saves a source: `ckpt zarr2`, `ckpt manager`, `convert zarr3-files`, ..."""
    api, layout = kind.split()
    if layout == "manager":
        with ocp.CheckpointManager(path) as manager:
            for step in (1, 2):
                tree = {"params": plain_tree(step, count // 2)["params"]}
                manager.save(step, args=ocp.args.StandardSave(tree), metrics={"loss": step})
        return path
    tree = (plain_tree if api == "ckpt" else linen_tree)(0, count)
    with ocp.PyTreeCheckpointer(**FORMATS[layout]) as checkpointer:
        checkpointer.save(path, tree)
    if api == "convert":
        path.with_name("map.toml").write_text(MAP)
    return path


def changed(source):
    """What is saved."""
    source = pathlib.Path(source)
    map_file = source.with_name("map.toml")
    if map_file.exists():
        return [reshard.to_mesh(reshard.to_nnx(source, map_file=map_file), "1x4")]
    steps = reshard.open(source).source.steps or (None,)
    opened = [reshard.open(source, step=step) for step in steps]
    return [reshard.to_mesh(ckpt, "1x8", [("serial", ("model", None))]) for ckpt in opened]


# Saves, all or a share, or commits what is at a destination; and kills itself at a call of some
# functions, if there are any.
JOB = f"""
import importlib, json, os, pathlib, signal, sys
import reshard
from reshard.writer import journal

{inspect.getsource(changed)}
"""
JOB += """
source, out, options, names, count, after = json.loads(sys.argv[1])
calls = 0


def deadly(original):
    def called(*args, **kwargs):
        global calls
        calls += 1
        dies = calls == count
        if dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return original(*args, **kwargs)
        finally:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    return called


for name in names:
    module, _, name = name.partition(":")
    *owner, name = name.split(".")
    holder = importlib.import_module(module)
    for attribute in owner:
        holder = getattr(holder, attribute)
    setattr(holder, name, deadly(getattr(holder, name)))
journal._SYNC_SECONDS, journal._SYNC_SHARE = 0, 0.5
if options is None:
    reshard.commit(out)
else:
    reshard.save(changed(source), out, max_memory="3MiB", **options)
"""


def started(source, out, options, names=(), count=0, after=False):
    """Such a process. It dies at the call with this number of one of the functions, `module:name`,
    before it or after it. Without options it commits."""
    words = json.dumps([str(source), str(out), options, names, count, after])
    return subprocess.Popen([sys.executable, "-c", JOB, words], stderr=subprocess.PIPE, text=True)


def ended(process):
    """Its status; but for one that was killed, without a word."""
    _, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode
