"""One of several processes that restore together, as they are told.

    python broadcast_worker.py COORDINATOR PROCESSES NUMBER

A line of input names a function of this module, with its arguments; a line of output, which begins
with `ANSWER`, has what it returned, or the error that it raised.
"""

import contextlib
import hashlib
import itertools
import json
import sys
import time
from typing import Any

import jax
import layouts
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from watched import Watched, own_memory

import reshard
from reshard.engine.batches import in_groups
from reshard.restore import replicas

ANSWER = "answer: "
DEVICES = 8  # of all processes


def the_mesh() -> Any:
    """A mesh with processes along the first axis, and perhaps along the second."""
    return Mesh(np.array(jax.devices()).reshape(2, DEVICES // 2), ("data", "model"))


def shards(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__, np.asarray(leaf).tobytes()
    sharding = leaf.sharding
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    held = [(str(s.index), np.asarray(s.data).tobytes()) for s in leaf.addressable_shards]
    return str(leaf.dtype), leaf.shape, str(sharding), sorted(held)


def differences(got: Any, expected: Any) -> list[str]:
    """Paths of leaves that are not the same, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    return [
        jax.tree_util.keystr(path) for (path, one), other in pairs if shards(one) != shards(other)
    ]


@contextlib.contextmanager
def devices_of(kind: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if kind != "cpu":
            own_memory(patch)
        yield


def target_of(path: str, layout: str) -> Any:
    """What a checkpoint's arrays are restored to: on the specs that they were saved with, in rows
    where they have some, or replicated."""
    on = the_mesh()

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = leaf.sharding.spec
        if layout == "rows" and leaf.ndim and leaf.shape[0] % 2 == 0:
            spec = P("data")
        if layout == "replicated":
            spec = P()
        return layouts.laid_out(leaf, NamedSharding(on, spec))

    return jax.tree.map(abstract, reshard.restore(path, on))


def compared(path: str, layout: str, memory: str | None, kind: str) -> dict[str, Any]:
    """What differs from what Orbax restores, and from what is restored without a broadcast; and
    bytes of memory that were in use."""
    target = target_of(path, layout)
    with devices_of(kind), watched() as peak:
        got = reshard.restore(path, target, max_memory=memory, replicas="broadcast")
    return {
        "orbax": differences(got, layouts.load_standard(path, target)),
        "alone": differences(got, reshard.restore(path, target)),
        "peak": peak(),
    }


def transformed(path: str, memory: str | None, kind: str) -> list[str]:
    on = the_mesh()
    ckpt = reshard.unstack(reshard.open(path), "layers/kernel", into="layer_{}/kernel", axis=0)
    ckpt = reshard.stack(ckpt, "part_{}/w", into="parts/w", axis=1)
    ckpt = reshard.cast(ckpt, "bfloat16", where="parts/**")

    def abstract(leaf: Any) -> Any:
        dtype = np.int16 if leaf.dtype == np.int32 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    target = jax.tree.map(abstract, reshard.restore(ckpt, on))
    with devices_of(kind):
        got, alone = (
            reshard.restore(ckpt, target, cast=True, max_memory=memory, replicas=replicas)
            for replicas in ("broadcast", "read")
        )
    return differences(got, alone)


def read(path: str, specs: dict[str, Any], memory: str | None, kind: str) -> Any:
    """Digests of what this process holds of the arrays of a checkpoint, and bytes that it read."""
    ckpt = reshard.open(path)
    target = laid_out(ckpt, specs)
    before = layouts.bytes_read()
    with devices_of(kind):
        got = reshard.restore(ckpt, target, max_memory=memory, replicas="broadcast")
    count = layouts.bytes_read() - before
    assert all(
        leaf.sharding == target[name].sharding
        for name, leaf in got.items()
        if specs[name] is not None
    )
    return {name: hashed(leaf) for name, leaf in got.items()}, count


def laid_out(ckpt: Any, specs: dict[str, Any]) -> dict[str, Any]:
    on = the_mesh()
    return {
        name: np.zeros(ckpt[name,].shape, ckpt[name,].dtype)
        if spec is None
        else layouts.laid_out(ckpt[name,], NamedSharding(on, P(*spec)))
        for name, spec in specs.items()
    }


def alone(path: str, specs: dict[str, Any], memory: str | None) -> dict[str, Any]:
    """Each array restored on its own, without a broadcast: what this process holds of it, the sum
    of all its elements, and bytes that were read and that its shards need; and what it holds of
    those that are restored on a bare mesh."""
    ckpt, found = reshard.open(path), {}
    for name, target in laid_out(ckpt, specs).items():
        before = layouts.bytes_read()
        state = reshard.restore(ckpt, {name: target}, unexpected="ignore", max_memory=memory)
        read = layouts.bytes_read() - before
        needed = needed_bytes(ckpt[name,], target.sharding)
        total = jax.jit(lambda x: (x % 1000).astype("int32").sum())(state[name])
        found[name] = [hashed(state[name]), int(total), read, needed]
        assert state[name].sharding == target.sharding
    bare = reshard.restore(ckpt, the_mesh(), max_memory=memory)
    return {"each": found, "bare": {name: hashed(bare[name]) for name in specs}}


def needed_bytes(handle: Any, sharding: Any) -> int:
    values = handle.data.store.values[handle.data.name]
    touched = set()
    for index in sharding.addressable_devices_indices_map(handle.shape).values():
        parts = [part.indices(size) for part, size in zip(index, handle.shape, strict=True)]
        ranges = [
            range(start // chunk, (stop - 1) // chunk + 1)
            for (start, stop, _), chunk in zip(parts, handle.chunk_shape, strict=True)
        ]
        touched |= set(itertools.product(*ranges))
    return sum(values[".".join(map(str, chunk))].size for chunk in touched)


def hashed(leaf: Any) -> dict[str, str]:
    if not isinstance(leaf, jax.Array):
        return {"host": hashlib.sha256(leaf.tobytes()).hexdigest()}
    return {
        json.dumps([[part.start, part.stop] for part in shard.index]): hashlib.sha256(
            np.asarray(shard.data).tobytes()
        ).hexdigest()
        for shard in leaf.addressable_shards
    }


def failing(paths: list[str], layout: str, interrupted: int | None) -> str:
    """A restore of which each process has a copy of its own of the checkpoint, and one may be
    interrupted."""
    here = jax.process_index()

    def progress(count: int) -> None:
        if here == interrupted:
            raise KeyboardInterrupt

    target = target_of(paths[0], layout)
    reshard.restore(paths[here], target, replicas="broadcast", progress=progress)
    return "restored"


def late(path: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_PATIENCE", 2)
        if jax.process_index() == jax.process_count() - 1:
            time.sleep(4)
        return failing([path] * jax.process_count(), "replicated", None)


def mismatched(path: str, everywhere: bool) -> str:
    """A restore to a target that lacks something on all processes, or that is another on one."""
    target = target_of(path, "saved")
    if everywhere:
        del target["params"]
    elif jax.process_index() == 1:
        target = target_of(path, "replicated")
    reshard.restore(path, target, replicas="broadcast")
    return "restored"


def updated(paths: list[str]) -> list[Any]:
    """Whether a failed restore changes a module, and differences after one that succeeds."""
    rows = NamedSharding(the_mesh(), P())
    shape = (64, 96)
    zeros = jax.make_array_from_callback(shape, rows, lambda index: np.zeros(shape, "float32"))
    module = nnx.Dict(embed=nnx.Param(zeros))

    def ckpt(path: str) -> Any:
        return reshard.rename(
            reshard.select(reshard.open(path), "params/embed"), [("^params/", "")]
        )

    try:
        reshard.restore(ckpt(paths[jax.process_index()]), module, replicas="broadcast")
    except reshard.CorruptCheckpointError:
        untouched = module.embed[...] is zeros
    else:
        untouched = False
    expected = reshard.restore(ckpt(paths[0]), {"embed": zeros})
    found = [untouched]
    for way in ("broadcast", "read"):
        same = reshard.restore(ckpt(paths[0]), module, replicas=way) is module
        found += [same, differences({"embed": module.embed[...]}, expected)]
        module.embed[...] = zeros
    return found


@contextlib.contextmanager
def watched() -> Any:
    """A function that says how many bytes were in use at most, those that are exchanged with
    them."""
    waves = [0]

    def noted(items: Any, nbytes: Any, limit: int) -> Any:
        for wave in in_groups(items, nbytes, limit):
            waves.append(sum(map(nbytes, wave)))
            yield wave

    with pytest.MonkeyPatch.context() as patch:
        found = Watched(patch)
        patch.setattr(replicas, "in_groups", noted)
        yield lambda: found.peak + max(waves)


def main(coordinator: str, processes: int, number: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, number)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": globals()[name](*arguments)}
        except BaseException as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
