"""Logical axes in Linen: saved under one set of rules, restored under another, on another mesh.

    python examples/linen_logical_axes.py [2x4 [1x8]]

Eight devices are simulated on the CPU, unless XLA_FLAGS says otherwise. The parameters are
annotated with names (`nn.with_logical_partitioning`), and rules map the names to mesh axes. The
model does not change. The checkpoint holds raw arrays, without names or rules.
"""

import functools
import math
import os
import pathlib
import sys
import tempfile

# JAX reads these once, when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.linen import spmd
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import reshard

LAYERS, DEPTH, BATCH = 3, 64, 16

# Both shard the batch over `data` and replicate the axis of the layers.
ALWAYS = (("batch", "data"), ("hidden", "model"), ("layer", None))
RULES = {
    "tensor parallel": (*ALWAYS, ("embed", None)),
    "fully sharded": (*ALWAYS, ("embed", "data")),
}


class DotReluDot(nn.Module):
    """Two products with a relu between them, over axes with logical names."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        init = nn.initializers.xavier_normal()
        kernel_init = nn.with_logical_partitioning(init, ("embed", "hidden"))
        y = nn.relu(nn.Dense(self.depth, kernel_init=kernel_init, use_bias=False)(x))
        y = spmd.with_logical_constraint(y, ("batch", "hidden"))
        w2_init = nn.with_logical_partitioning(init, ("hidden", "embed"))
        z = y @ self.param("W2", w2_init, (self.depth, x.shape[-1]))
        return spmd.with_logical_constraint(z, ("batch", "embed")), None


class MLP(nn.Module):
    """DotReluDot layers: one after another, or scanned, with their weights along `layer`."""

    layers: int
    depth: int
    scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            stack = nn.scan(
                DotReluDot,
                length=self.layers,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: "layer"},
            )
            return stack(self.depth)(x)[0]
        for _ in range(self.layers):
            x, _ = DotReluDot(self.depth)(x)
        return x


def create_state(model: nn.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """A new state, with its arrays in boxes."""
    params = model.init(jax.random.key(0), jnp.ones((BATCH, DEPTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def create_on(mesh: Mesh, rules, create) -> TrainState:
    """The new state, with shardings from its names and the rules, as in Flax's guide."""
    specs = nn.get_partition_spec(jax.eval_shape(create))
    return jax.jit(create, out_shardings=spmd.logical_to_mesh_sharding(specs, mesh, rules))()


def train_step(state: TrainState, x: jax.Array, y: jax.Array, rules) -> TrainState:
    """A training step. `jax.jit` compiles it for each set of rules, as they are an argument."""

    def loss(params):
        with nn.logical_axis_rules(rules):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train(state: TrainState, mesh: Mesh, rules, steps: range) -> TrainState:
    """The state after training steps. The number of a step determines its batch."""
    step = jax.jit(train_step, static_argnums=3, out_shardings=shardings_of(state))
    with jax.set_mesh(mesh):
        for number in steps:
            x = jax.random.normal(jax.random.key(number), (BATCH, DEPTH))
            x = jax.device_put(x, spmd.logical_to_mesh_axes(("batch", "embed"), rules))
            state = step(state, x, jnp.sin(x), rules)
    return state


def save(path: pathlib.Path, state: TrainState) -> None:
    """Saves the state's raw arrays, without boxes."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nn.meta.unbox(state))


def shardings_of(state: TrainState) -> TrainState:
    """The state with shardings instead of arrays. The state may be abstract."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def largest_difference(one: TrainState, other: TrainState) -> float:
    """The largest difference between corresponding elements."""
    both = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in both)


def mesh_of(text: str) -> Mesh:
    """The first devices as a mesh: `2x4` has 2 along `data` and 4 along `model`."""
    sizes = [int(size) for size in text.split("x")]
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("data", "model"))


def main(first: str = "2x4", second: str = "1x8") -> None:
    """Saves with the first rules on the first mesh. Continues with both on the second mesh."""
    create = functools.partial(create_state, MLP(LAYERS, DEPTH, scanned=True), optax.adam(1e-3))
    start, end = mesh_of(first), mesh_of(second)
    (saved, saved_rules), *_ = RULES.items()
    state = train(create_on(start, saved_rules, create), start, saved_rules, range(3))
    stayed = train(state, start, saved_rules, range(3, 6))
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "state"
        save(path, state)
        print(f"Saved after step 3, {saved}, on {first}.\n")
        for name, rules in RULES.items():
            print(f"Restored as {name}, on {second}:\n")
            print(reshard.coverage(create, mesh=end, rules=rules), end="\n\n")
            target = reshard.target(create, mesh=end, rules=rules)
            restored = train(reshard.restore(path, target), end, rules, range(3, 6))
            moved = jax.device_put(state, shardings_of(target))
            moved = train(moved, end, rules, range(3, 6))
            print(f"After step {restored.step}, the largest difference to the run that")
            print(f"  was moved in memory is {largest_difference(restored, moved):.1g}")
            print(f"  stayed on its mesh is {largest_difference(restored, stayed):.1g}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
