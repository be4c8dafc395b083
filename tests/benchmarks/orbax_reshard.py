"""The same job done with Orbax: restore on the target mesh, save, sync.

    python -m tests.benchmarks.orbax_reshard W1 SRC DST

The abstract target is built from the workload's definition, as a training script that knows its
model would, so that Orbax spends nothing on looking at the checkpoint first. The codec is the one
the workload was saved with.
"""

import argparse
import os
from pathlib import Path

from tests.benchmarks.workloads import TARGET, WORKLOADS, abstract, simulate_devices


def reshard(name: str, source: Path, destination: Path) -> None:
    """Restores `source` on a 1x8 mesh with the specs it was saved with, and saves the result."""
    simulate_devices()
    import jax
    import orbax.checkpoint as ocp

    workload = WORKLOADS[name]
    target = abstract(workload, TARGET)
    checkpointer = ocp.PyTreeCheckpointer(use_compression=workload.compress)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    arrays = checkpointer.restore(source, item=target, restore_args=restore_args)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=workload.chunk_bytes), arrays)
    checkpointer.save(destination, arrays, save_args=save_args)
    os.sync()


def main() -> None:
    parser = argparse.ArgumentParser(description="Reshard a workload to 1x8 with Orbax.")
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    reshard(arguments.name, arguments.source.absolute(), arguments.destination.absolute())


if __name__ == "__main__":
    main()
