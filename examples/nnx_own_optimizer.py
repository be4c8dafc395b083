"""An NNX model with a custom optimizer, restored on another mesh.

    python examples/nnx_own_optimizer.py [2x4 [1x8]]

Eight devices are simulated on the CPU, unless XLA_FLAGS says otherwise. `MeshRules` gives the mesh
axes to the model's constructor; the optimizer, SGD with momentum, holds the model's own parameters
and one own variable for each, with the same metadata. The checkpoint is a dict of raw arrays.
"""

import dataclasses
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
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard

WIDTH, BATCH = 64, 32


@dataclasses.dataclass(frozen=True)
class MeshRules:
    """The mesh axis of each kind of dimension; None replicates."""

    embed: str | None = None
    mlp: str | None = None
    data: str | None = None

    def __call__(self, *names: str) -> tuple[str | None, ...]:
        return tuple(getattr(self, name) for name in names)


RULES = MeshRules(mlp="model", data="data")


class MLP(nnx.Module):
    """One hidden layer, with one input and one output."""

    def __init__(self, width: int, rules: MeshRules, *, rngs: nnx.Rngs):
        def parameter(init: nnx.Initializer, shape: tuple[int, ...], *names: str) -> nnx.Param:
            return nnx.Param(nnx.with_partitioning(init, rules(*names))(rngs.params(), shape))

        normal, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        self.w1 = parameter(normal, (1, width), "embed", "mlp")
        self.b1 = parameter(zeros, (width,), "mlp")
        self.w2 = parameter(normal, (width, 1), "mlp", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(x @ self.w1 + self.b1) @ self.w2


class Momentum(nnx.Variable):
    """A running mean of a parameter's gradients."""


class SGD(nnx.Object):
    """Gradient descent with momentum, for parameters that it shares with a model."""

    def __init__(self, params: nnx.State, rate: float, decay: float = 0.9):
        self.rate, self.decay = rate, decay
        self.params = nnx.data(params)
        self.momentum = nnx.data(jax.tree.map(self._start, params, is_leaf=is_variable))

    @staticmethod
    def _start(param: nnx.Variable) -> Momentum:
        return Momentum(jnp.zeros_like(param[...]), **param.get_metadata())

    def update(self, grads: nnx.State) -> None:
        def one(param: nnx.Variable, momentum: Momentum, grad: nnx.Variable) -> None:
            momentum[...] = self.decay * momentum[...] + (1 - self.decay) * grad[...]
            param[...] -= self.rate * momentum[...]

        jax.tree.map(one, self.params, self.momentum, grads, is_leaf=is_variable)


def is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


@nnx.jit
def create_model():
    """A new model and its optimizer. Within a mesh, metadata determines their shardings."""
    model = MLP(WIDTH, RULES, rngs=nnx.Rngs(0))
    optimizer = SGD(nnx.state(model, nnx.Param), rate=0.1)
    state = nnx.state(optimizer)
    specs = nnx.get_partition_spec(state)
    nnx.update(optimizer, jax.lax.with_sharding_constraint(state, specs))
    return {"model": model, "optimizer": optimizer}


@nnx.jit
def train_step(model: MLP, optimizer: SGD, x: jax.Array, y: jax.Array) -> None:
    grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(grads)


def train(training, mesh: Mesh, steps: range):
    """Updates model and optimizer in place. The number of a step determines its batch."""
    with jax.set_mesh(mesh):
        for number in steps:
            x = jax.random.uniform(jax.random.key(number), (BATCH, 1), minval=-2, maxval=2)
            x = jax.device_put(x, NamedSharding(mesh, P(*RULES("data"))))
            train_step(training["model"], training["optimizer"], x, 0.8 * x**2 + 0.1)
    return training


def save(path: pathlib.Path, training) -> None:
    """Saves the raw arrays. Variables that model and optimizer share are saved once."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state(training)))


def moved(training, target):
    """A copy in memory, on the shardings of a target."""
    graph, state = nnx.split(training)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, nnx.state(target))
    return nnx.merge(graph, jax.device_put(state, shardings))


def largest_difference(one, other) -> float:
    """The largest difference between corresponding elements."""
    leaves = (jax.tree.leaves(nnx.state(training)) for training in (one, other))
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
        training = create_model()
    train(training, start, range(3))

    print(reshard.coverage(create_model, mesh=end), end="\n\n")
    target = reshard.target(create_model, mesh=end)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "training"
        save(path, training)
        restored = reshard.restore(path, target)
    assert restored["model"].w1 is restored["optimizer"].params["w1"]

    copy = train(moved(training, target), end, range(3, 6))
    train(restored, end, range(3, 6))
    train(training, start, range(3, 6))
    print(f"Three steps on {first}, three on {second}: the largest difference to the run that")
    print(f"  was moved in memory is {largest_difference(restored, copy):.1g}")
    print(f"  stayed on its mesh is {largest_difference(restored, training):.1g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
