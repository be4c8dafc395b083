"""The maps of the conversions that are measured, and the same jobs done with Orbax and JAX.

    python -m tests.benchmarks.convert rename|fused W1 SRC DST

Orbax loads the whole tree, JAX renames, stacks and splits it, Orbax saves it.
"""

import argparse
import os
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


def convert(job: str, name: str, source: Path, destination: Path) -> None:
    """Does a job with Orbax and JAX: on the saved mesh, or fused on the new one."""
    simulate_devices()
    import jax
    import orbax.checkpoint as ocp

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
    os.sync()


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a workload with Orbax and JAX.")
    parser.add_argument("job", choices=MAPS)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    convert(
        arguments.job, arguments.name, arguments.source.absolute(), arguments.destination.absolute()
    )


if __name__ == "__main__":
    main()
