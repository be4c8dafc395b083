"""The checkpoints of `test_frozen.py`: small, seeded, one of every layout and of every Flax tree.

Its functions without arguments are models for `--model frozen_corpus:NAME`.
"""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_loader import never_merged

DATA = pathlib.Path(__file__).parent / "data"
OLD = (
    "orbax-0.2.7/aggregate",
    "orbax-0.2.7/ocdbt_False",
    "orbax-0.4.4/aggregate",
    "orbax-0.4.4/default",
    "orbax-0.4.4/ocdbt_False",
    "orbax-0.4.4-b/ocdbt_False",
)
OPTIMIZER = optax.adam(1e-3)
LAYERS = 2


# Trees of every kind of leaf.


def small_tree(on: Mesh, seed: int, *, strings: bool = True, rich: bool = True) -> dict[str, Any]:
    """As `layouts.random_tree`, with fewer leaves of each kind: documents of it can be read."""
    rng = np.random.default_rng(seed)
    put = layouts.random_on(on, rng)
    tree = {
        "params": {
            "embed": put((24, 16), "model", "data"),
            "uneven": put((6, 40), "data", "model", dtype="bfloat16"),
            "two words/w.0": put((8, 4, 6), "model", None, "data"),
            "replicated": put((16, 8)),
        },
        "opt": {"count": jnp.int32(rng.integers(100))},
        "float8": put((2, 24), None, "model", dtype="float8_e4m3fn"),
        "int4": put((2, 24), None, "model", dtype="int4"),
        "list": [put((8,), "model"), [None]],
        "one_device": jnp.asarray(layouts.random_array(rng, (5, 7))),
        "host": layouts.random_array(rng, (3, 5), "float64"),
        "key": jax.random.key(int(rng.integers(1 << 30))),
        "step": int(rng.integers(1 << 20)),
        "lr": float(rng.standard_normal()),
        "empty": {"dict": {}, "list": []},
    }
    if strings:
        tree["text"] = 'größe/层 "x"'
    if rich:
        tree["tuple"] = (put((7,)), np.float32(rng.standard_normal()))
    return tree


# The same model in both APIs of Flax.


class Linen:
    """In Linen, in a class of its own as both have a `Block`."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(), ("embed", "mlp"))
            return nn.Dense(8, kernel_init=init)(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(12, 8)(tokens)
            for _ in range(LAYERS):
                x = Linen.Block()(x)
            return nn.Dense(16, use_bias=False, name="head")(x)


class Block(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
        self.linear = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)


class Model(nnx.Module):
    """Layers in a list."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(12, 8, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 16, use_bias=False, rngs=rngs)


class Stacked(nnx.Module):
    """Layers in one array each."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(12, 8, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.head = nnx.Linear(8, 16, use_bias=False, rngs=rngs)


def variables() -> Any:
    return Linen.Model().init(jax.random.key(0), jnp.zeros((1, 3), "int32"))


def train_state() -> TrainState:
    params = variables()["params"]
    return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)


def training(model: type[nnx.Module] = Model) -> dict[str, Any]:
    made = model(nnx.Rngs(0))
    return {"model": made, "optimizer": nnx.Optimizer(made, OPTIMIZER, wrt=nnx.Param)}


def stacked_training() -> dict[str, Any]:
    return training(Stacked)


def states(made: dict[str, Any]) -> dict[str, Any]:
    return {name: nnx.state(module) for name, module in made.items()}


def filled(make: Callable[[], Any], seed: int) -> Any:
    """A state with other values, matrices of it split over a 2x4 mesh."""
    rng = np.random.default_rng(seed)
    on = layouts.mesh((2, 4))

    def value(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(int(rng.integers(99)))
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 99, leaf.shape), leaf.dtype)
        spec = P("data", "model") if len(leaf.shape) == 2 else P()
        drawn = rng.normal(size=leaf.shape).astype(leaf.dtype)
        return jax.device_put(drawn, NamedSharding(on, spec))

    with nnx.use_eager_sharding(False):
        return jax.tree.map(value, jax.eval_shape(make))


# The corpus.


def flax_trees() -> dict[str, Any]:
    """Name -> a tree as users save it."""
    boxed = filled(variables, 1)
    return {
        "linen-variables-boxed": boxed,
        "linen-params": nn.meta.unbox(boxed)["params"],
        "linen-train-state": filled(train_state, 2),
        "nnx-state": filled(lambda: nnx.state(Model(nnx.Rngs(0))), 3),
        "nnx-pure-dict": filled(lambda: nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(0)))), 4),
        "nnx-training": filled(lambda: states(training()), 5),
    }


NEVER_MERGED = {"never-merged-zarr2": "standalone", "never-merged-zarr3": "zarr3-ocdbt"}
# Layouts that store their arrays like another one: less of their output is recorded.
ALIKE = ("standard", "manager", "step", "bare", "rich", *NEVER_MERGED, *OLD[2:])


class Corpus:
    """The checkpoints, each made in a folder when it is first asked for."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._made: dict[str, layouts.Saved] = {}

    def __call__(self, name: str) -> layouts.Saved:
        """The checkpoint of that name; its path is relative to the folder."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def path(self, name: str) -> str:
        """Its path, relative to the folder."""
        return str(self(name).path.relative_to(self.folder))

    def _make(self, name: str) -> layouts.Saved:
        on, path = layouts.mesh((2, 4)), self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in layouts.LAYOUTS:
            path.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layouts, "random_tree", small_tree)
                return layouts.save(name, path)
        tree = None
        if name in OLD:
            shutil.copytree(DATA / name, path)
        elif name in NEVER_MERGED:
            whole = self(NEVER_MERGED[name])
            tree, path = whole.tree, never_merged(whole.path, path, 3, 1, apart=True)
        elif name == "dtypes":
            rng = np.random.default_rng(0)
            tree = {kind: layouts.random_array(rng, (3, 7), kind) for kind in layouts.DTYPES}
            layouts.save_pytree(path, tree)
        else:
            tree = flax_trees()[name]
            layouts.save_standard(path, tree)
        return layouts.Saved(path, tree, on)
