"""The maps of the conversions that are measured, and the same jobs done with Orbax and JAX.

    python -m tests.benchmarks.convert orbax|reshard rename|fused W1 SRC DST

Orbax loads the whole tree, JAX renames, stacks and splits it, Orbax saves it. `reshard` goes by the
job's map. Prints the seconds of the work alone, without the imports before it.
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

# Paths only.
RENAME = """\
[[rule]]
from = '^params/layer_(\\d+)/'
to = 'layers/\\1/'

[[rule]]
from = '^params/'
to = ''
"""
# Layers in one array each, and the halves of the head.
FUSED = """\
[[rule]]
from = '^params/layer_(\\d+)/(.*)$'
stack = { axis = 0, by = 1 }
to = 'layers/\\2'

[[rule]]
from = '^params/lm_head$'
split = { axis = 1, into = ['head/low', 'head/high'] }

[[rule]]
from = '^params/'
to = ''
"""
MAPS = {"rename": RENAME, "fused": FUSED}


def _by_reshard(job: str, name: str, source: Path, destination: Path) -> Callable[[], None]:
    """Has `reshard` imported; does a job on paths, on the saved mesh, when it is called."""
    import reshard

    to_nnx, save = reshard.to_nnx, reshard.save  # which imports what they are made of
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(MAPS[job])

    def work() -> None:
        save(to_nnx(source, map_file=file.name), destination)

    return work


def _by_orbax(job: str, name: str, source: Path, destination: Path) -> Callable[[], None]:
    """Has Orbax and JAX imported; does a job with them, on the saved mesh, or fused on the new one,
    when it is called."""
    simulate_devices()
    import jax
    import orbax.checkpoint as ocp

    jax.devices()
    return lambda: _convert(jax, ocp, job, name, source, destination)


def _convert(jax: Any, ocp: Any, job: str, name: str, source: Path, destination: Path) -> None:
    workload = WORKLOADS[name]
    target = abstract(workload, TARGET if job == "fused" else SAVED)
    checkpointer = ocp.PyTreeCheckpointer(use_compression=workload.compress)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    params = checkpointer.restore(source, item=target, restore_args=restore_args)["params"]
    layers = [params.pop(f"layer_{i}") for i in range(sum("layer_" in key for key in params))]
    if job == "rename":
        made: dict[str, Any] = {**params, "layers": {str(i): x for i, x in enumerate(layers)}}
    else:
        made = params | {"layers": jax.tree.map(_stacked, *layers)}
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


TOOLS = {"reshard": _by_reshard, "orbax": _by_orbax}


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a workload, and time it.")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("job", choices=MAPS)
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
