"""A language model as users write it in Linen and in NNX, and the true map between both.

No two dimensions of a weight are equal where a transposition could hide, and every leaf is random:
fresh weights, ones and zeros, look alike wherever they are. The map here is written by hand, leaf
by leaf, and owes nothing to the package: it says what a conversion should give.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from releases import OUT_SHARDING

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN, LENGTH, LAYERS = 22, 10, 3, 4, 14, 9, 6
INIT = nn.initializers.normal(0.02)
INPUTS = (np.random.default_rng(0).integers(0, VOCABULARY, (2, 7)), np.arange(7))


class TrainState(train_state.TrainState):
    """Of a model with batch statistics."""

    batch_stats: Any


class Linen:
    """The models in Linen."""

    @staticmethod
    def kernel(*names):
        return nn.with_logical_partitioning(INIT, names)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            kernel = Linen.kernel
            y = nn.LayerNorm(scale_init=kernel("embed"), bias_init=kernel("embed"))(x)
            y = nn.MultiHeadDotProductAttention(
                HEADS,
                qkv_features=HEADS * HEAD,
                kernel_init=kernel("embed", "heads", "kv"),
                bias_init=kernel("heads", "kv"),
                out_kernel_init=kernel("heads", "kv", "embed"),
                out_bias_init=kernel("embed"),
                dropout_rate=0.1,
                deterministic=True,
            )(y, mask=mask)
            x = x + nn.Dropout(0.1, deterministic=True)(y)
            y = nn.LayerNorm(scale_init=kernel("embed"), bias_init=kernel("embed"))(x)
            y = nn.Dense(HIDDEN, kernel_init=kernel("embed", "mlp"), bias_init=kernel("mlp"))(y)
            y = nn.Dense(WIDTH, kernel_init=kernel("mlp", "embed"))(nn.gelu(y))
            return x + nn.Dropout(0.1, deterministic=True)(y), None

    class LanguageModel(nn.Module):
        """The layers are stacked along an axis, and recomputed or not."""

        axis: int
        remat: bool

        @nn.compact
        def __call__(self, tokens, positions):
            embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=Linen.kernel("vocab", "embed"))
            init = Linen.kernel(None, "embed")
            table = self.param("pos_embedding", init, (LENGTH, WIDTH))
            x = nn.Dropout(0.1, deterministic=True)(embed(tokens) + table[positions])
            mask = nn.make_causal_mask(tokens)
            stack = nn.scan(
                nn.remat(Linen.Block) if self.remat else Linen.Block,
                variable_axes={"params": self.axis},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = stack()(x, mask)
            return embed.attend(nn.LayerNorm()(x))


class Nnx:
    """The models in NNX."""

    @staticmethod
    def kernel(*names):
        return nnx.with_partitioning(INIT, names)

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            kernel = Nnx.kernel
            norm = functools.partial(
                nnx.LayerNorm, WIDTH, scale_init=kernel("embed"), bias_init=kernel("embed")
            )
            self.norm = norm(rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS,
                WIDTH,
                HEADS * HEAD,
                kernel_init=kernel("embed", "heads", "kv"),
                bias_init=kernel("heads", "kv"),
                out_kernel_init=kernel("heads", "kv", "embed"),
                out_bias_init=kernel("embed"),
                dropout_rate=0.1,
                decode=False,
                rngs=rngs,
            )
            self.mlp_norm = norm(rngs=rngs)
            self.up = nnx.Linear(
                WIDTH,
                HIDDEN,
                kernel_init=kernel("embed", "mlp"),
                bias_init=kernel("mlp"),
                rngs=rngs,
            )
            self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=kernel("mlp", "embed"), rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x, mask):
            x = x + self.dropout(self.attention(self.norm(x), mask=mask))
            return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))

    class LanguageModel(nnx.Module):
        def __init__(self, *, rngs):
            embedding = Nnx.kernel("vocab", "embed")
            self.token_embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=embedding, rngs=rngs)
            table = INIT(rngs.params(), (LENGTH, WIDTH))
            self.pos_embedding = nnx.Param(table, **{OUT_SHARDING: (None, "embed")})
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stack(rngs):
                return Nnx.Block(rngs=rngs)

            self.blocks = stack(rngs)
            self.final_norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, tokens, positions):
            x = self.dropout(self.token_embedding(tokens) + self.pos_embedding[positions])
            mask = nnx.make_causal_mask(tokens)
            scan = nnx.scan(
                lambda x, block: block(x, mask),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
                transform_metadata={nnx.PARTITION_NAME: "layers"},
            )
            return self.token_embedding.attend(self.final_norm(scan(x, self.blocks)))


# Path of a leaf of NNX -> a function, and the Linen path of its argument.
Pairs = Mapping[str, tuple[Any, str]]


def unchanged(leaf):
    return leaf


def stacked_first(leaf):
    """Linen's stack along the second axis as NNX's along the first."""
    return np.moveaxis(leaf, 1, 0)


def _same(nnx_module: str, linen_module: str, *names: str, function=unchanged) -> Pairs:
    """Leaves of the same name in two modules."""
    return {f"{nnx_module}/{n}": (function, f"params/{linen_module}/{n}") for n in names}


def _language_model(block: str, function=unchanged) -> Pairs:
    """`block`: the name of Linen's stack."""
    same = functools.partial(_same, function=function)
    dense, norm = ("kernel", "bias"), ("scale", "bias")
    attention = [f"{part}/{name}" for part in ("query", "key", "value", "out") for name in dense]
    return {
        **_same("token_embedding", "Embed_0", "embedding"),
        "pos_embedding": (unchanged, "params/pos_embedding"),
        **_same("final_norm", "LayerNorm_0", *norm),
        **same("blocks/norm", f"{block}/LayerNorm_0", *norm),
        **same("blocks/attention", f"{block}/MultiHeadDotProductAttention_0", *attention),
        **same("blocks/mlp_norm", f"{block}/LayerNorm_1", *norm),
        **same("blocks/up", f"{block}/Dense_0", *dense),
        **same("blocks/down", f"{block}/Dense_1", *dense),
    }


# Modules of NNX for one test.


def linear(before: int, after: int, **kwargs: Any) -> nnx.Linear:
    """A layer with fresh weights."""
    return nnx.Linear(before, after, rngs=nnx.Rngs(0), **kwargs)


def norm(size: int, **kwargs: Any) -> nnx.LayerNorm:
    """A norm as it is made."""
    return nnx.LayerNorm(size, rngs=nnx.Rngs(0), **kwargs)


def named(kind: str, **attributes: Callable[[], Any]) -> type[nnx.Module]:
    """A class of modules, of this name, that define these attributes in this order, each made by a
    function without arguments."""

    def define(module):
        for name, make in attributes.items():
            setattr(module, name, make())

    return type(kind, (nnx.Module,), {"__init__": define})


made = functools.partial(named, "Made")

# A JAX key path as text.
path_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def linen_leaves(state: Any) -> dict[str, Any]:
    """Path -> leaf of Linen variables or of a `TrainState`, without boxes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(state))
    return {path_of(keys): leaf for keys, leaf in leaves}


def nnx_leaves(made: Any) -> dict[str, Any]:
    """Path -> leaf of an NNX module, or of a dict of them, without random numbers."""
    leaves = nnx.to_flat_state(nnx.state(made, nnx.Not(nnx.RngState)))
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in leaves}


def randomised(tree: Any, seed: int) -> Any:
    """The tree with other values: counters count on, everything else is random."""
    rng = np.random.default_rng(seed)
    counters = iter(range(2, 1000))

    def value(keys, leaf):
        names = path_of(keys).split("/")
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, next(counters), leaf.dtype)
        if {"nu", "hyperparams"} & {*names}:  # never negative
            return jnp.asarray(rng.uniform(0.1, 0.9, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, tree)


@dataclasses.dataclass(frozen=True, eq=False)
class Twin:
    """The language model in Linen, the map to that in NNX, and the optimizer of both. `step` is
    that of the state to convert, `boxed` whether the Linen state has its boxes."""

    linen: nn.Module
    pairs: Pairs
    tx: Any
    step: Any = 7
    boxed: bool = False

    def linen_state(self) -> train_state.TrainState:
        """A `TrainState`, random, moments and all."""
        made = jax.eval_shape(lambda: self.linen.init(jax.random.key(0), *INPUTS))
        params = randomised(made if self.boxed else nn.meta.unbox(made), 0)["params"]
        create = functools.partial(train_state.TrainState.create, apply_fn=None, tx=self.tx)
        state = jax.eval_shape(lambda: create(params=params)).replace(params=params)
        return state.replace(step=self.step, opt_state=randomised(state.opt_state, 1))

    def create(self) -> dict[str, Any]:
        """A fresh NNX model and its optimizer."""
        model = self.create_model()
        return {"model": model, "optimizer": nnx.Optimizer(model, self.tx, wrt=nnx.Param)}

    def create_model(self) -> nnx.Module:
        """A fresh NNX model."""
        with nnx.use_eager_sharding(False):
            return Nnx.LanguageModel(rngs=nnx.Rngs(0))

    def entries(self) -> Pairs:
        """The whole map, of `create()`: path -> where its leaf is from."""
        made = {f"model/{path}": entry for path, entry in self.pairs.items()}
        optimizer = nnx.eval_shape(self.create)["optimizer"]
        for path in nnx_leaves(optimizer):
            parameters = [key for key in self.pairs if path.endswith(f"/{key}")]
            if parameters:  # a moment of the longest of them
                parameter = max(parameters, key=len)
                function, source = self.pairs[parameter]
                moment = path.removesuffix(parameter) + source.removeprefix("params/")
                made[f"optimizer/{path}"] = (function, moment)
            else:
                made[f"optimizer/{path}"] = (unchanged, path)
        return made

    def expected(self, state: train_state.TrainState) -> dict[str, Any]:
        """Path -> leaf of `create()` with the values of a `TrainState`."""
        leaves = {path: np.asarray(leaf) for path, leaf in linen_leaves(state).items()}
        entries = self.entries().items()
        return {path: function(leaves[source]) for path, (function, source) in entries}

    def linen_forward(self, params: Any) -> Any:
        """The outputs of the Linen model."""
        return jax.jit(self.linen.apply)({"params": params}, *INPUTS)

    def nnx_forward(self, model: nnx.Module) -> Any:
        """The outputs of an NNX model."""
        model.eval()
        return nnx.jit(lambda model, inputs: model(*inputs))(model, INPUTS)

    def linen_step(self, state: train_state.TrainState) -> tuple[Any, train_state.TrainState]:
        """The loss, and the state after a step of training without dropout."""

        @jax.jit
        def step(state, inputs):
            def loss(params):
                return _loss(self.linen.apply({"params": params}, *inputs))

            value, grads = jax.value_and_grad(loss)(state.params)
            return value, state.apply_gradients(grads=grads)

        return step(state, INPUTS)

    def nnx_step(self, training: dict[str, Any]) -> Any:
        """The loss of `create()`, whose model and optimizer a step updates in place."""

        @nnx.jit
        def step(model, optimizer, inputs):
            value, grads = nnx.value_and_grad(lambda model: _loss(model(*inputs)))(model)
            optimizer.update(model, grads)
            return value

        training["model"].eval()
        return step(training["model"], training["optimizer"], INPUTS)


def blank(create: Callable[[], Any]) -> Any:
    """What is created, with NaN for its numbers and -1 for its counters; nothing is drawn."""
    made = nnx.eval_shape(create)
    for _, variable in nnx.to_flat_state(nnx.state(made)):
        leaf = variable.get_value()
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            value = jnp.broadcast_to(jax.random.key(0), leaf.shape)
        elif isinstance(variable, nnx.RngState):
            value = jnp.zeros(leaf.shape, leaf.dtype)
        else:
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            fill = np.nan if floating else np.array(-1).astype(leaf.dtype)
            value = jnp.full(leaf.shape, fill, leaf.dtype)
        variable.set_value(value)
    return made


def _loss(out: jax.Array) -> jax.Array:
    wanted = jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return jnp.mean((out - wanted) ** 2)


TWINS = {
    "scanned": Twin(
        Linen.LanguageModel(axis=0, remat=False),
        _language_model("ScanBlock_0"),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
        step=jnp.uint32(7),
    ),
    "scanned remat": Twin(
        Linen.LanguageModel(axis=1, remat=True),
        _language_model("ScanCheckpointBlock_0", stacked_first),
        optax.adam(1e-2),
        step=jnp.int32(7),
        boxed=True,
    ),
}
