"""An NNX model with `nnx.Optimizer`, restored on another mesh.

    python examples/nnx_optimizer.py [2x4 [1x8]]

Eight devices are simulated on the CPU, unless XLA_FLAGS says otherwise. Parameters, adam's moments
and dropout's random state are restored. The checkpoint is a dict of raw arrays.
"""

import math
import os
import pathlib
import sys
import tempfile

# JAX reads these once, when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard

LAYERS, DEPTH, BATCH = 3, 64, 16
ADAM = optax.adam(1e-3)


class DotReluDot(nnx.Module):
    """Two products with a relu between them; both weights are split over the `model` axis."""

    def __init__(self, depth: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        kernel_init = nnx.with_partitioning(init, (None, "model"))
        w2_init = nnx.with_partitioning(init, ("model", None))
        self.dot1 = nnx.Linear(depth, depth, kernel_init=kernel_init, use_bias=False, rngs=rngs)
        self.w2 = nnx.Param(w2_init(rngs.params(), (depth, depth)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.dropout(nnx.relu(self.dot1(x)))
        y = jax.lax.with_sharding_constraint(y, P("data", "model"))
        return jax.lax.with_sharding_constraint(y @ self.w2, P("data", None))


class MLP(nnx.Module):
    """DotReluDot layers, one after another."""

    def __init__(self, layers: int, depth: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([DotReluDot(depth, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def create():
    """A new model and its optimizer."""
    model = MLP(LAYERS, DEPTH, rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, ADAM, wrt=nnx.Param)}


@nnx.jit
def create_sharded():
    """The same within a mesh, with shardings from the metadata, as in Flax's guide."""
    training = create()
    state = nnx.state(training)
    specs = nnx.get_partition_spec(state)
    nnx.update(training, jax.lax.with_sharding_constraint(state, specs))
    return training


@nnx.jit
def train_step(model: MLP, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)


def train(training, mesh: Mesh, steps: range):
    """Updates model and optimizer in place. The number of a step determines its batch."""
    with jax.set_mesh(mesh):
        for number in steps:
            x = jax.random.normal(jax.random.key(number), (BATCH, DEPTH))
            x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
            train_step(training["model"], training["optimizer"], x, jnp.sin(x))
    return training


def save(path: pathlib.Path, training) -> None:
    """Saves the raw arrays."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state(training)))


def moved(training, target):
    """A copy in memory, on the shardings of a target."""
    graph, state = nnx.split(training)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, nnx.state(target))
    return nnx.merge(graph, jax.device_put(state, shardings))


def largest_difference(one, other) -> float:
    """The largest difference between corresponding elements, optimizer state included."""
    leaves = (jax.tree.leaves(nnx.state(t, (nnx.Param, nnx.OptState))) for t in (one, other))
    both = zip(*leaves, strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in both)


def mesh_of(text: str) -> Mesh:
    """The first devices as a mesh: `2x4` has 2 along `data` and 4 along `model`."""
    sizes = [int(size) for size in text.split("x")]
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("data", "model"))


def main(first: str = "2x4", second: str = "1x8") -> None:
    """Trains on the first mesh, saves, and continues from the checkpoint on the second."""
    start, end = mesh_of(first), mesh_of(second)
    with jax.set_mesh(start):
        training = create_sharded()
    train(training, start, range(3))

    print(reshard.coverage(create, mesh=end), end="\n\n")
    target = reshard.target(create, mesh=end)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "training"
        save(path, training)
        restored = reshard.restore(path, target)

    copy = train(moved(training, target), end, range(3, 6))
    train(restored, end, range(3, 6))
    train(training, start, range(3, 6))
    print(f"Three steps on {first}, three on {second}: the largest difference to the run that")
    print(f"  was moved in memory is {largest_difference(restored, copy):.1g}")
    print(f"  stayed on its mesh is {largest_difference(restored, training):.1g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
