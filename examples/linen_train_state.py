"""A Linen `TrainState`, trained and saved on one mesh, restored and trained on another.

    python examples/linen_train_state.py [2x4 [1x8]]

Eight devices are simulated on the CPU, unless XLA_FLAGS says otherwise. The parameters are
annotated with mesh axes (`nn.with_partitioning`), and so are adam's moments. The checkpoint holds
raw arrays. The restored state has boxes again.
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
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard

LAYERS, DEPTH, BATCH = 3, 64, 16


class DotReluDot(nn.Module):
    """Two products with a relu between them; both weights are split over the `model` axis."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        init = nn.initializers.xavier_normal()
        kernel_init = nn.with_partitioning(init, (None, "model"))
        y = nn.relu(nn.Dense(self.depth, kernel_init=kernel_init, use_bias=False)(x))
        y = jax.lax.with_sharding_constraint(y, P("data", "model"))
        w2_init = nn.with_partitioning(init, ("model", None))
        z = y @ self.param("W2", w2_init, (self.depth, x.shape[-1]))
        return jax.lax.with_sharding_constraint(z, P("data", None)), None


class MLP(nn.Module):
    """DotReluDot layers: one after another, or scanned, with their weights in a stack."""

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
                metadata_params={nn.PARTITION_NAME: None},
            )
            return stack(self.depth)(x)[0]
        for _ in range(self.layers):
            x, _ = DotReluDot(self.depth)(x)
        return x


def create_state(model: nn.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """A new state, with its arrays in boxes."""
    params = model.init(jax.random.key(0), jnp.ones((BATCH, DEPTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def create_on(mesh: Mesh, create) -> TrainState:
    """The new state, with shardings from its annotations, as in Flax's guide."""
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(create), mesh)
        return jax.jit(create, out_shardings=shardings)()


def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> TrainState:
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train(state: TrainState, mesh: Mesh, steps: range) -> TrainState:
    """The state after training steps. The number of a step determines its batch."""
    step = jax.jit(train_step, out_shardings=shardings_of(state))
    with jax.set_mesh(mesh):
        for number in steps:
            x = jax.random.normal(jax.random.key(number), (BATCH, DEPTH))
            x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
            state = step(state, x, jnp.sin(x))
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
    """Trains on the first mesh, saves, and continues from the checkpoint on the second."""
    start, end = mesh_of(first), mesh_of(second)
    for scanned in (False, True):
        create = functools.partial(create_state, MLP(LAYERS, DEPTH, scanned), optax.adam(1e-3))
        state = train(create_on(start, create), start, range(3))

        print(f"{'Scanned' if scanned else 'Looped'} layers, from {first} to {second}:\n")
        print(reshard.coverage(create, mesh=end), end="\n\n")
        target = reshard.target(create, mesh=end)
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "state"
            save(path, state)
            restored = reshard.restore(path, target)

        restored = train(restored, end, range(3, 6))
        moved = train(jax.device_put(state, shardings_of(target)), end, range(3, 6))
        stayed = train(state, start, range(3, 6))
        print(f"After step {restored.step}, the largest difference to the run that")
        print(f"  was moved in memory is {largest_difference(restored, moved):.1g}")
        print(f"  stayed on its mesh is {largest_difference(restored, stayed):.1g}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
