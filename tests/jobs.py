"""Jobs that are killed and resumed, or divided: their sources, a process for each, how they are
stopped in this one, and what they say and leave.
"""

import contextlib
import inspect
import json
import pathlib
import resource
import signal
import subprocess
import sys
import sysconfig

import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard
from reshard.storage import ocdbt
from reshard.storage.location import Location

RESHARD = pathlib.Path(sysconfig.get_path("scripts")) / "reshard"
# Small, so that small jobs have several shares.
SHARE_BYTES = 1 << 18
RECORD = "reshard_digests.json"
MARKER = "commit_success.txt"
MEMORY = "3MiB"
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
    source = pathlib.Path(source)
    map_file = source.with_name("map.toml")
    if map_file.exists():
        return [reshard.to_mesh(reshard.to_nnx(source, map_file=map_file), "1x4")]
    steps = reshard.open(source).source.steps or (None,)
    opened = [reshard.open(source, step=step) for step in steps]
    return [reshard.to_mesh(ckpt, "1x8", [("serial", ("model", None))]) for ckpt in opened]


def save(source, out, **options):
    return reshard.save(changed(source), out, **{"max_memory": MEMORY} | options)


# Saves, and kills itself at a call of a function, if there is one.
JOB = f"""
import importlib, json, os, pathlib, signal, sys
import reshard
from reshard.writer import plan

plan.SHARE_BYTES = {SHARE_BYTES}


{inspect.getsource(changed)}
"""
JOB += """
source, out, options, function, count, after = json.loads(sys.argv[1])
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


if function:
    module, _, name = function.partition(":")
    *owner, name = name.split(".")
    holder = importlib.import_module(module)
    for attribute in owner:
        holder = getattr(holder, attribute)
    setattr(holder, name, deadly(getattr(holder, name)))
reshard.save(changed(source), out, max_memory="3MiB", **options)
"""


def started(source, out, options, name="", count=0, after=False):
    """Such a process. It dies at the call with this number of a function, `module:name`, before it
    or after it."""
    words = json.dumps([str(source), str(out), options, name, count, after])
    return subprocess.Popen([sys.executable, "-c", JOB, words], stderr=subprocess.PIPE, text=True)


def ended(process):
    """Its status; but for one that was killed, without a word."""
    _, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode


class StopError(Exception):
    """What the tests throw into a running job."""


class Killed(BaseException):
    """What no handler of errors takes for one."""


def stop_at(part, error=StopError):
    """A callback for progress that raises an error once this part is done."""

    def progress(done, whole):
        if done >= part * whole:
            raise error

    return progress


@contextlib.contextmanager
def limited(nbytes):
    """A limit on the size of files makes the file system refuse a write in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def refused(error, text, call, *args, **kwargs):
    """Asserts that a call raises an error that says this; the error."""
    found = layouts.raised(error, call, *args, **kwargs)
    assert str(found) == text
    return found


# What is there, and what happens to it.


def values(path, **kwargs):
    """All there is to each array that `reshard` reads: path -> bits."""
    ckpt = reshard.open(path, **kwargs)
    return {h.path: layouts.bits(h.view().read().result()) for h in ckpt.arrays}


def unfinished(out):
    return sorted(out.parent.glob(f".reshard-{out.name}.*"))


def assert_pruned(path):
    """Every file of every OCDBT database is in use."""
    for manifest in path.rglob("manifest.ocdbt"):
        top = manifest.parent
        data = [*top.glob("d/**/*"), *top.glob("ocdbt[._]*/**/*")]
        found = {str(file.relative_to(top)) for file in data if file.is_file()}
        assert found == ocdbt.value_files(Location(str(top)), nodes=True)


def inodes(path):
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.stat().st_ino for file in files}


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
