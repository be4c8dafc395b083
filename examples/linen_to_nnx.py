"""Converts a Linen checkpoint to NNX, continues training there, and converts it back.

    python examples/linen_to_nnx.py [DIRECTORY]

Eight devices are simulated on the CPU. If you give a DIRECTORY, the files stay there: the
checkpoints `linen/10`, `nnx/10` and `back/10` (converted back), the models, `lm_linen.py` and
`lm_nnx.py`, and the map between them, `map.toml`.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

# JAX reads these once, when it is imported.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import lm_linen
import lm_nnx
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 10
MAP = r"""# Linen stores two projections in one array. The third has several candidates.
[[rule]]
from = '^params/layer_(\d+)/mlp/gating_einsum$'
unstack = { axis = 0, into = ['layers/\1/mlp/gate_proj/kernel', 'layers/\1/mlp/up_proj/kernel'] }

[[rule]]
from = '^params/layer_(\d+)/mlp/Dense_0/'
to = 'layers/\1/mlp/down_proj/'
"""


def main() -> None:
    """Trains, converts, continues training with both models and compares."""
    if len(sys.argv) > 1:
        directory = pathlib.Path(sys.argv[1]).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            sys.exit(f"{directory} is not empty")
        linen_to_nnx(directory)
    else:
        with tempfile.TemporaryDirectory() as name:
            linen_to_nnx(pathlib.Path(name))


def linen_to_nnx(directory: pathlib.Path) -> None:
    """The whole example, below `directory`."""
    state = start(directory)
    source, converted = directory / "linen" / str(STEPS), directory / "nnx" / str(STEPS)
    print(f"Orbax saved step {int(state.step)} of a Linen TrainState.\n")

    paths = (f"linen/{STEPS}", f"nnx/{STEPS}", "--to", "nnx", "--model", "lm_nnx:LanguageModel")
    reshard(directory, "convert", *paths, "--map", "map.toml", "--init", "**/dropout/rngs/**")

    model = lm_nnx.LanguageModel(rngs=nnx.Rngs(1))
    model.eval()
    optimizer = nnx.Optimizer(model, state.tx, wrt=nnx.Param)
    states = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    restored = ocp.StandardCheckpointer().restore(converted, states)
    nnx.update(model, restored["model"])
    nnx.update(optimizer, restored["optimizer"])
    print(f"\nOrbax restored it into the NNX model, at step {int(optimizer.step[...])}.")
    for _ in range(3):
        state, linen_loss = linen_step(state)
        nnx_loss = nnx_step(model, optimizer)
        print(f"step {int(optimizer.step[...])}: loss {linen_loss:.6f} and {nnx_loss:.6f}")
        np.testing.assert_allclose(nnx_loss, linen_loss, rtol=1e-5)

    reshard(directory, "convert", f"nnx/{STEPS}", f"back/{STEPS}", "--to", "linen")
    with ocp.PyTreeCheckpointer() as checkpointer:
        before = checkpointer.restore(source)
        after = checkpointer.restore(directory / "back" / str(STEPS))
    jax.tree.map(assert_same_bits, before, after)
    print("\nConverted back, every bit is the same.")


def start(directory: pathlib.Path) -> lm_linen.TrainState:
    """Trains the Linen model. Writes both models, the map and the checkpoint. Returns the state."""
    for module in (lm_linen, lm_nnx):
        shutil.copy(str(module.__file__), directory)
    (directory / "map.toml").write_text(MAP)
    state = lm_linen.train_state()
    for _ in range(STEPS):
        state = linen_step(state)[0]
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    replicated = NamedSharding(Mesh(devices, ("data", "model")), P())
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory / "linen" / str(STEPS), jax.device_put(state, replicated))
    return state


@jax.jit
def linen_step(state: lm_linen.TrainState) -> tuple[lm_linen.TrainState, jax.Array]:
    """One training step, and the loss before it."""

    def loss(params: dict) -> jax.Array:
        return cross_entropy(state.apply_fn({"params": params}, lm_linen.TOKENS))

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


@nnx.jit
def nnx_step(model: lm_nnx.LanguageModel, optimizer: nnx.Optimizer) -> jax.Array:
    """The same for the NNX model, in place."""
    value, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(lm_linen.TOKENS)))(model)
    optimizer.update(model, gradients)
    return value


def cross_entropy(logits: jax.Array) -> jax.Array:
    """The cross entropy of each next token."""
    labels = lm_linen.TOKENS[:, 1:]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels))


def assert_same_bits(one: jax.Array, other: jax.Array) -> None:
    """Raises AssertionError if arrays differ."""
    pair = np.asarray(one), np.asarray(other)
    assert pair[0].dtype == pair[1].dtype and pair[0].shape == pair[1].shape
    assert pair[0].tobytes() == pair[1].tobytes()


def reshard(directory: pathlib.Path, *arguments: str) -> None:
    """Prints and runs a command."""
    print("$ reshard", shlex.join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "reshard", *arguments], cwd=directory, check=True)


if __name__ == "__main__":
    main()
