"""A model saved on a 2x4 mesh, rewritten for 1x8, and restored there by Orbax alone.

    python examples/quickstart.py [DIRECTORY]

Eight devices are simulated on the CPU. If you give a DIRECTORY, the files stay there: the source
`run/1000`, the result `run_1x8/1000`, the model, `mlp.py`, and `rules.toml`, which maps its axis
names to mesh axes.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import Any

# JAX reads these once, when it is imported.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import mlp
import numpy as np
import orbax.checkpoint as ocp
from flax.linen.spmd import logical_to_mesh_sharding
from jax.sharding import Mesh, NamedSharding

STEP = 1000
AXES = ("data", "model")
RULES = [("hidden", "model")]
KERNEL = "params/DotReluDot_0/Dense_0/kernel"


def main() -> None:
    """Saves, reshards, restores and compares, in the given or a temporary directory."""
    if len(sys.argv) > 1:
        directory = pathlib.Path(sys.argv[1]).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            sys.exit(f"{directory} is not empty")
        quickstart(directory)
    else:
        with tempfile.TemporaryDirectory() as name:
            quickstart(pathlib.Path(name))


def quickstart(directory: pathlib.Path) -> None:
    """The whole example, below `directory`."""
    boxed, saved = start(directory)
    print(f"Orbax saved {len(jax.tree.leaves(saved))} arrays on a 2x4 mesh.\n")

    reshard(directory, "inspect", f"run/{STEP}", "--sharding", KERNEL)
    reshard(directory, "ckpt", f"run/{STEP}", f"run_1x8/{STEP}", "--to", "1x8")
    reshard(directory, "inspect", f"run_1x8/{STEP}", "--sharding", KERNEL)

    # From here on, only Orbax reads the result.
    on_1x8 = shardings(boxed, mesh_of(1, 8))
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), saved, on_1x8
    )
    with ocp.CheckpointManager(directory / "run_1x8") as manager:
        with_target = manager.restore(STEP, args=ocp.args.StandardRestore(target))
        without_target = manager.restore(STEP, args=ocp.args.StandardRestore())
    count = compare(with_target, saved, on_1x8)
    assert compare(without_target, saved, on_1x8) == count
    print(f"Orbax restored {count} arrays on 1x8, with and without a target. Every bit is equal.")


def start(directory: pathlib.Path) -> Any:
    """Writes the model, its rules and its checkpoint. Returns its weights, in boxes and saved."""
    shutil.copy(mlp.__file__, directory / "mlp.py")
    (directory / "rules.toml").write_text('rules = [["embed", "data"], ["hidden", "model"]]\n')
    boxed = mlp.variables()
    saved = jax.device_put(nn.unbox(boxed), shardings(boxed, mesh_of(2, 4)))
    with ocp.CheckpointManager(directory / "run") as manager:
        manager.save(STEP, args=ocp.args.StandardSave(saved))
    return boxed, saved


def mesh_of(data: int, model: int) -> Mesh:
    """The eight devices as a data x model mesh."""
    return Mesh(np.array(jax.devices()[:8]).reshape(data, model), AXES)


def shardings(boxed, mesh: Mesh):
    """The sharding of each weight on `mesh`."""
    return logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)


def compare(restored, saved, shardings) -> int:
    """Checks bits and shardings of every array. Returns the number of arrays."""

    def check(new: jax.Array, old: jax.Array, sharding: NamedSharding) -> None:
        assert new.sharding == sharding, f"{new.sharding} is not {sharding}"
        assert new.dtype == old.dtype and new.shape == old.shape
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes(), "the bits differ"

    jax.tree.map(check, restored, saved, shardings)
    return len(jax.tree.leaves(restored))


def reshard(directory: pathlib.Path, *arguments: str) -> None:
    """Runs the command line in `directory`."""
    print(f"$ reshard {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "reshard", *arguments], cwd=directory, check=True)
    print(flush=True)


if __name__ == "__main__":
    main()
