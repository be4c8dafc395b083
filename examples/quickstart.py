"""A model saved on a 2x4 mesh, rewritten for 1x8, and restored there by Orbax alone.

    python examples/quickstart.py [DIRECTORY]

Eight devices are simulated on the CPU. The checkpoints stay in DIRECTORY, if one is given: the
source in `run/1000`, the result in `run_1x8/1000`.
"""

import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from typing import Any

# Before jax is imported, which reads them once.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

STEP, LAYERS, DEPTH = 1000, 4, 512
AXES = ("data", "model")
KERNEL = "params/DotReluDot_0/Dense_0/kernel"


class DotReluDot(nn.Module):
    """Two products with a relu between them; both weights are split over the `model` axis."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.xavier_normal()
        kernel_init = nn.with_partitioning(init, (None, "model"))
        y = nn.relu(nn.Dense(self.depth, kernel_init=kernel_init, use_bias=False)(x))
        w2_init: Any = nn.with_partitioning(init, ("model", None))
        return y @ self.param("W2", w2_init, (self.depth, x.shape[-1]))


class MLP(nn.Module):
    """DotReluDot layers, one after another."""

    layers: int
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = DotReluDot(self.depth)(x)
        return x


def main() -> None:
    """Saves, reshards, restores and compares, in a directory that is given or temporary."""
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
    variables, specs = make_model()
    saved = place(variables, specs, mesh_of(2, 4))
    with ocp.CheckpointManager(directory / "run") as manager:
        manager.save(STEP, args=ocp.args.StandardSave(saved))
    print(f"Orbax saved {len(jax.tree.leaves(saved))} arrays on a 2x4 mesh.\n")

    reshard(directory, "inspect", f"run/{STEP}", "--sharding", KERNEL)
    reshard(directory, "ckpt", f"run/{STEP}", f"run_1x8/{STEP}", "--to", "1x8")
    reshard(directory, "inspect", f"run_1x8/{STEP}", "--sharding", KERNEL)

    # From here on there is nothing but Orbax, which reads the result as its own.
    on_1x8 = jax.tree.map(lambda spec: NamedSharding(mesh_of(1, 8), spec), specs)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), variables, on_1x8
    )
    with ocp.CheckpointManager(directory / "run_1x8") as manager:
        with_target = manager.restore(STEP, args=ocp.args.StandardRestore(target))
        without_target = manager.restore(STEP, args=ocp.args.StandardRestore())
    count = compare(with_target, saved, on_1x8)
    assert compare(without_target, saved, on_1x8) == count
    print(f"Orbax restored {count} arrays on 1x8, with a target and without: every bit is equal.")


def make_model():
    """Random weights as raw arrays, and the partition spec of each."""
    model, x = MLP(LAYERS, DEPTH), jnp.ones((8, DEPTH))
    boxed = model.init(jax.random.key(0), x)
    return nn.unbox(boxed), nn.get_partition_spec(boxed)


def mesh_of(data: int, model: int) -> Mesh:
    """The eight devices as a data x model mesh."""
    return Mesh(np.array(jax.devices()).reshape(data, model), AXES)


def place(variables, specs, mesh: Mesh):
    """The arrays, each on `mesh` as its spec says."""
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), variables, specs
    )


def compare(restored, saved, shardings) -> int:
    """Checks bits and shardings of every array; returns how many there are."""

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
