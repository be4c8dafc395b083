"""Hugging Face's format: a file written with Orbax and the `safetensors` library, a restore from it
by `reshard` or by Orbax, and a large model's files planned.

    python -m tests.benchmarks.safetensors save W2 SRC DST

Only the work itself is timed, not the imports. Prints one JSON object.
"""

import argparse
import json
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.workloads import (
    SAVED,
    TARGET,
    WORKLOADS,
    abstract,
    leaves,
    llama,
    simulate_devices,
)

# The 80 layers of a model of 70B parameters, in tiny arrays.
LAYERS, FILES = 80, 30


def save(name: str, source: Path, destination: Path) -> float:
    """Restores a workload with Orbax, and saves it with the `safetensors` library: what a script
    does."""
    simulate_devices()
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    import safetensors.numpy

    jax.devices()
    target = abstract(WORKLOADS[name], SAVED)
    args = ocp.checkpoint_utils.construct_restore_args(target)
    start = time.perf_counter()
    tree = ocp.PyTreeCheckpointer().restore(source, item=target, restore_args=args)
    arrays = {".".join(path): np.asarray(value) for path, value in leaves(tree)}
    destination.mkdir(parents=True)
    safetensors.numpy.save_file(arrays, destination / "model.safetensors")
    os.sync()
    return time.perf_counter() - start


def restore(tool: str, name: str, source: Path) -> float:
    """Restores the file of a workload onto 1x8."""
    simulate_devices()
    import jax

    nested = abstract(WORKLOADS[name], TARGET)
    flat = {".".join(path): value for path, value in leaves(nested)}
    if tool == "reshard":
        import flax.nnx  # noqa: F401 a training script has it

        import reshard

        start = time.perf_counter()
        result = reshard.restore(source, nested)
    else:
        import orbax.checkpoint.experimental.v1 as ocp

        layout = ocp.options.CheckpointLayout.SAFETENSORS
        with ocp.Context(checkpoint_layout=layout):
            start = time.perf_counter()
            result = ocp.load(source, flat)
    jax.block_until_ready(result)
    seconds = time.perf_counter() - start
    found: Any = jax.tree.leaves(result)
    wanted: Any = jax.tree.leaves(nested if tool == "reshard" else flat)
    assert all(
        value.sharding.is_equivalent_to(want.sharding, want.ndim) and value.dtype == want.dtype
        for value, want in zip(found, wanted, strict=True)
    )
    return seconds


def planned() -> float:
    """Opens and plans the files of a large model."""
    import reshard

    names = [".".join(path) for path, _ in leaves(llama(1, 1, 1, 1, LAYERS))]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            header = {
                name: {"dtype": "BF16", "shape": [8, 8], "data_offsets": [128 * i, 128 * (i + 1)]}
                for i, name in enumerate(names[number::FILES])
            }
            text = json.dumps(header).encode()
            data = struct.pack("<Q", len(text)) + text + bytes(128 * len(header))
            (Path(folder) / f"model-{number + 1:05}-of-{FILES:05}.safetensors").write_bytes(data)
        files = {
            name: f"model-{i % FILES + 1:05}-of-{FILES:05}.safetensors"
            for i, name in enumerate(names)
        }
        index = {"metadata": {"total_size": 128 * len(names)}, "weight_map": files}
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
        dir(reshard.to_mesh), dir(reshard.plan)  # imported before the clock starts
        start = time.perf_counter()
        ckpt = reshard.to_mesh(reshard.open(folder), "data=1,model=8", [(".", (None, "model"))])
        reshard.plan(ckpt, Path(folder) / "out")
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Time work on safetensors.")
    parser.add_argument("work", choices=("save", "reshard", "orbax", "plan"))
    parser.add_argument("name", nargs="?", choices=WORKLOADS)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("destination", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.work == "save":
        destination = arguments.destination.absolute()
        seconds = save(arguments.name, arguments.source.absolute(), destination)
    elif arguments.work == "plan":
        seconds = planned()
    else:
        seconds = restore(arguments.work, arguments.name, arguments.source.absolute())
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
