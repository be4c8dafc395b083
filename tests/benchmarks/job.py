"""One job done by `reshard` or by Orbax, timed without the imports.

    python -m tests.benchmarks.job orbax fused W1 SRC DST

Jobs are `mesh`, from 2x4 to 1x8, and conversions of which `MAPS` has the maps. Orbax's abstract
target is built from the workload's definition, as a training script that knows its model would, so
that Orbax spends nothing on looking at the checkpoint first. The codec is the one the workload was
saved with.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.workloads import SAVED, TARGET, WORKLOADS, abstract, simulate_devices

MAPS = {
    # Paths only.
    "rename": r"""
rule = [
  { from = '^params/layer_(\d+)/', to = 'layers/\1/' },
  { from = '^params/', to = '' },
]
""",
    # Layers in one array each, and the halves of the head.
    "fused": r"""
rule = [
  { from = '^params/layer_(\d+)/(.*)$', stack = { axis = 0, by = 1 }, to = 'layers/\2' },
  { from = '^params/lm_head$', split = { axis = 1, into = ['head/low', 'head/high'] } },
  { from = '^params/', to = '' },
]
""",
}


def _by_reshard(job: str, name: str, source: Path, destination: Path) -> Callable[[], None]:
    """Has `reshard` imported; does a job on paths when it is called, conversions on the saved
    mesh."""
    import reshard
    from reshard.storage.machine import tune_memory

    save = reshard.save
    if job == "mesh":
        tune_memory()
        ckpt = reshard.to_mesh(reshard.open(source), "1x8")
        return lambda: save(ckpt, destination)
    to_nnx = reshard.to_nnx  # which imports what it is made of
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(MAPS[job])
    return lambda: save(to_nnx(source, map_file=file.name), destination)


def _without_digests(job: str, name: str, source: Path, destination: Path) -> Callable[[], None]:
    """The same, but of digests only what makes them complete."""
    from reshard.arrays.digests import Digest

    def count(self: Digest, box: Any, values: Any) -> None:
        self.elements += values.size

    Digest.add = count
    return _by_reshard(job, name, source, destination)


def _by_orbax(job: str, name: str, source: Path, destination: Path) -> Callable[[], None]:
    """Has Orbax and JAX imported; does a job with them when it is called, a change of paths on the
    saved mesh, all others on the new one."""
    simulate_devices()
    import jax
    import orbax.checkpoint as ocp

    jax.devices()
    return lambda: _converted(jax, ocp, job, name, source, destination)


def _converted(jax: Any, ocp: Any, job: str, name: str, source: Path, destination: Path) -> None:
    workload = WORKLOADS[name]
    target = abstract(workload, SAVED if job == "rename" else TARGET)
    checkpointer = ocp.PyTreeCheckpointer(use_compression=workload.compress)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    made: dict[str, Any] = checkpointer.restore(source, item=target, restore_args=restore_args)
    if job != "mesh":
        made = made["params"]
        layers = [made.pop(f"layer_{i}") for i in range(sum("layer_" in key for key in made))]
        made["layers"] = {str(i): layer for i, layer in enumerate(layers)}
    if job == "fused":
        made["layers"] = jax.tree.map(_stacked, *layers)
        made["head"] = _halves(made.pop("lm_head"))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=workload.chunk_bytes), made)
    checkpointer.save(destination, made, save_args=save_args)


def _stacked(*layers: Any) -> Any:
    """Arrays of one sharding along a new first axis, which is not sharded."""
    import jax
    import jax.numpy as jnp

    sharding = layers[0].sharding
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    out = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.jit(lambda *x: jnp.stack(x), out_shardings=out)(*layers)


def _halves(head: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    split = jax.jit(lambda x: jnp.split(x, 2, axis=1), out_shardings=[head.sharding] * 2)
    return dict(zip(("low", "high"), split(head), strict=True))


TOOLS = {"reshard": _by_reshard, "without-digests": _without_digests, "orbax": _by_orbax}


def main() -> None:
    parser = argparse.ArgumentParser(description="Do a job on a workload, and time it.")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("job", choices=("mesh", *MAPS))
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    paths = arguments.source.absolute(), arguments.destination.absolute()
    work = TOOLS[arguments.tool](arguments.job, arguments.name, *paths)
    start = time.perf_counter()
    work()
    os.sync()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
