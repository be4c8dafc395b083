"""Models written twice, as users write them in Linen and in NNX, and the true map between them.

No two dimensions of a weight are equal where a transposition could hide, and every leaf is random:
fresh weights, ones and zeros, look alike wherever they are. The map here is written by hand, leaf
by leaf, and owes nothing to the package: it says what a conversion should give.
"""

import dataclasses
import functools
import operator
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


class TrainState(train_state.TrainState):
    """Of a model with batch statistics."""

    batch_stats: Any


class Linen:
    """The models in Linen."""

    @staticmethod
    def kernel(*names):
        return nn.with_logical_partitioning(INIT, names)

    class Block(nn.Module):
        deterministic: bool
        decode: bool

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
                deterministic=self.deterministic,
                decode=self.decode,
            )(y, mask=mask)
            x = x + nn.Dropout(0.1, deterministic=self.deterministic)(y)
            y = nn.LayerNorm(scale_init=kernel("embed"), bias_init=kernel("embed"))(x)
            y = nn.Dense(HIDDEN, kernel_init=kernel("embed", "mlp"), bias_init=kernel("mlp"))(y)
            y = nn.Dense(WIDTH, kernel_init=kernel("mlp", "embed"))(nn.gelu(y))
            return x + nn.Dropout(0.1, deterministic=self.deterministic)(y), None

    class LanguageModel(nn.Module):
        """`layers`: how many in a loop, or the axis of a stack."""

        layers: str
        deterministic: bool = True
        decode: bool = False

        @nn.compact
        def __call__(self, tokens, positions):
            embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=Linen.kernel("vocab", "embed"))
            init = Linen.kernel(None, "embed")
            table = self.param("pos_embedding", init, (LENGTH, WIDTH))
            x = nn.Dropout(0.1, deterministic=self.deterministic)(embed(tokens) + table[positions])
            mask = None if self.decode else nn.make_causal_mask(tokens)
            kind, *rest = self.layers.split()
            block = nn.remat(Linen.Block) if "remat" in rest else Linen.Block
            if kind == "looped":
                for _ in range(2):
                    x, _ = block(self.deterministic, self.decode)(x, mask)
            else:
                axis = int(rest[-1])
                stack = nn.scan(
                    block,
                    variable_axes={"params": axis, "cache": 0},
                    split_rngs={"params": True, "dropout": True},
                    in_axes=nn.broadcast,
                    length=LAYERS,
                    metadata_params={nn.PARTITION_NAME: "layers"},
                )
                x, _ = stack(self.deterministic, self.decode)(x, mask)
            return embed.attend(nn.LayerNorm()(x))

    class ResNetBlock(nn.Module):
        features: int
        strides: int
        train: bool

        @nn.compact
        def __call__(self, x):
            norm = functools.partial(nn.BatchNorm, use_running_average=not self.train)
            strides = (self.strides, self.strides)
            y = nn.Conv(self.features, (3, 2), strides, use_bias=False)(x)
            y = nn.relu(norm()(y))
            y = norm()(nn.Conv(self.features, (2, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = nn.Conv(self.features, (1, 1), strides, use_bias=False, name="conv_proj")(x)
                x = norm(name="norm_proj")(x)
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.Conv(5, (4, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            for features, strides in ((5, 1), (7, 2), (11, 1)):
                x = Linen.ResNetBlock(features, strides, train)(x)
            return nn.Dense(13)(x.mean((1, 2)))

    class Forecaster(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.RNN(nn.GRUCell(5))(x)
            x = nn.RNN(nn.GRUCell(7))(x)
            return nn.Dense(11)(x)

    class GatedMlp(nn.Module):
        """Gate and up apart, which NNX's has in one."""

        @nn.compact
        def __call__(self, x):
            gate, up = nn.Dense(HIDDEN, name="gate")(x), nn.Dense(HIDDEN, name="up")(x)
            return nn.Dense(WIDTH, name="down")(nn.silu(gate) * up)

    class GemmaMlp(nn.Module):
        """Gate and up in one, which NNX's has apart."""

        @nn.compact
        def __call__(self, x):
            einsum = self.param("gating_einsum", INIT, (2, WIDTH, HIDDEN))
            gate, up = jnp.einsum("...d,gdh->g...h", x, einsum)
            return (nn.silu(gate) * up) @ self.param("linear", INIT, (HIDDEN, WIDTH))

    class Residual(nn.Module):
        """Two modules, each after a norm and beside what it is given."""

        norm: Any
        inner: tuple[Any, Any]

        @nn.compact
        def __call__(self, x):
            for module in self.inner:
                x = x + module()(self.norm()(x))
            return nn.Dense(17)(x)


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
        def __init__(self, layers, decode=False, *, rngs):
            embedding = Nnx.kernel("vocab", "embed")
            self.token_embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=embedding, rngs=rngs)
            table = INIT(rngs.params(), (LENGTH, WIDTH))
            self.pos_embedding = nnx.Param(table, **{OUT_SHARDING: (None, "embed")})
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.scanned = layers.startswith("scanned")
            self.remat = "remat" in layers
            self.decode = decode
            if self.scanned:

                @nnx.split_rngs(splits=LAYERS)
                @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
                def stack(rngs):
                    return Nnx.Block(rngs=rngs)

                self.blocks = stack(rngs)
            else:
                self.blocks = nnx.List([Nnx.Block(rngs=rngs) for _ in range(2)])
            self.final_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            if decode:
                for block in self.blocks:
                    block.attention.decode = True
                    block.attention.init_cache((2, LENGTH, WIDTH))

        def __call__(self, tokens, positions):
            x = self.dropout(self.token_embedding(tokens) + self.pos_embedding[positions])
            mask = None if self.decode else nnx.make_causal_mask(tokens)

            def apply(x, block):
                return block(x, mask)

            apply = nnx.remat(apply) if self.remat else apply
            if self.scanned:
                scan = nnx.scan(
                    apply,
                    in_axes=(nnx.Carry, 0),
                    out_axes=nnx.Carry,
                    transform_metadata={nnx.PARTITION_NAME: "layers"},
                )
                x = scan(x, self.blocks)
            else:
                for block in self.blocks:
                    x = apply(x, block)
            return self.token_embedding.attend(self.final_norm(x))

    class ResNetBlock(nnx.Module):
        def __init__(self, before, after, strides, *, rngs):
            def conv(before, size, strides=1):
                strides = (strides, strides)
                return nnx.Conv(before, after, size, strides, use_bias=False, rngs=rngs)

            self.first = conv(before, (3, 2), strides)
            self.first_norm = nnx.BatchNorm(after, rngs=rngs)
            self.second = conv(after, (2, 3))
            self.second_norm = nnx.BatchNorm(after, rngs=rngs)
            self.projected = before != after
            if self.projected:
                self.conv_proj = conv(before, (1, 1), strides)
                self.norm_proj = nnx.BatchNorm(after, rngs=rngs)

        def __call__(self, x):
            y = nnx.relu(self.first_norm(self.first(x)))
            y = self.second_norm(self.second(y))
            return nnx.relu((self.norm_proj(self.conv_proj(x)) if self.projected else x) + y)

    class ResNet(nnx.Module):
        def __init__(self, *, rngs):
            self.stem = nnx.Conv(3, 5, (4, 3), use_bias=False, rngs=rngs)
            self.stem_norm = nnx.BatchNorm(5, rngs=rngs)
            sizes = ((5, 5, 1), (5, 7, 2), (7, 11, 1))
            self.stages = nnx.Sequential(*(Nnx.ResNetBlock(*size, rngs=rngs) for size in sizes))
            self.head = nnx.Linear(11, 13, rngs=rngs)

        def __call__(self, x):
            x = self.stages(nnx.relu(self.stem_norm(self.stem(x))))
            return self.head(x.mean((1, 2)))

    class Forecaster(nnx.Module):
        def __init__(self, *, rngs):
            self.lower = nnx.RNN(nnx.GRUCell(3, 5, rngs=rngs), rngs=rngs)
            self.higher = nnx.RNN(nnx.GRUCell(5, 7, rngs=rngs), rngs=rngs)
            self.head = nnx.Linear(7, 11, rngs=rngs)

        def __call__(self, x):
            return self.head(self.higher(self.lower(x)))

    class GatedMlp(nnx.Module):
        def __init__(self, *, rngs):
            self.gate_up = nnx.Linear(WIDTH, 2 * HIDDEN, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x):
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
            return self.down(nnx.silu(gate) * up)

    class GemmaMlp(nnx.Module):
        def __init__(self, *, rngs):
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
            self.gate_proj = linear(WIDTH, HIDDEN)
            self.up_proj = linear(WIDTH, HIDDEN)
            self.down_proj = linear(HIDDEN, WIDTH)

        def __call__(self, x):
            return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))

    class Residual(nnx.Module):
        def __init__(self, norm, first, second, *, rngs):
            self.first_norm = norm(WIDTH, rngs=rngs)
            self.first = first(rngs=rngs)
            self.second_norm = norm(WIDTH, rngs=rngs)
            self.second = second(rngs=rngs)
            self.head = nnx.Linear(WIDTH, 17, rngs=rngs)

        def __call__(self, x):
            x = x + self.first(self.first_norm(x))
            x = x + self.second(self.second_norm(x))
            return self.head(x)


# Where a leaf of NNX is from: a function, and the Linen paths of its arguments.
Entry = tuple[Any, ...]
Pairs = Mapping[str, Entry]


def unchanged(leaf):
    return leaf


def stacked_first(leaf):
    """Linen's stack along the second axis as NNX's along the first."""
    return np.moveaxis(leaf, 1, 0)


def joined(*leaves):
    """Side by side along the last axis."""
    return np.concatenate(leaves, axis=-1)


def _same(nnx_module: str, linen_module: str, *names: str, function=unchanged) -> Pairs:
    """Leaves of the same name in two modules."""
    return {f"{nnx_module}/{n}": (function, f"params/{linen_module}/{n}") for n in names}


def _block(nnx_block: str, linen_block: str, function=unchanged) -> Pairs:
    same = functools.partial(_same, function=function)
    dense, norm = ("kernel", "bias"), ("scale", "bias")
    attention = [f"{part}/{name}" for part in ("query", "key", "value", "out") for name in dense]
    linen_attention = f"{linen_block}/MultiHeadDotProductAttention_0"
    return {
        **same(f"{nnx_block}/norm", f"{linen_block}/LayerNorm_0", *norm),
        **same(f"{nnx_block}/attention", linen_attention, *attention),
        **same(f"{nnx_block}/mlp_norm", f"{linen_block}/LayerNorm_1", *norm),
        **same(f"{nnx_block}/up", f"{linen_block}/Dense_0", *dense),
        **same(f"{nnx_block}/down", f"{linen_block}/Dense_1", *dense),
    }


def _language_model(*blocks: Pairs) -> Pairs:
    return {
        **_same("token_embedding", "Embed_0", "embedding"),
        "pos_embedding": (unchanged, "params/pos_embedding"),
        **_same("final_norm", "LayerNorm_0", "scale", "bias"),
        **functools.reduce(operator.or_, map(dict, blocks)),
    }


def _cache(nnx_block: str, linen_block: str) -> Pairs:
    linen_attention = f"cache/{linen_block}/MultiHeadDotProductAttention_0"
    names = ("cached_key", "cached_value", "cache_index")
    return {f"{nnx_block}/attention/{n}": (unchanged, f"{linen_attention}/{n}") for n in names}


def _batch_norm(nnx_module: str, linen_module: str) -> Pairs:
    stats = f"batch_stats/{linen_module}"
    return {
        **_same(nnx_module, linen_module, "scale", "bias"),
        **{f"{nnx_module}/{n}": (unchanged, f"{stats}/{n}") for n in ("mean", "var")},
    }


def _res_net() -> Pairs:
    pairs = {
        **_same("stem", "Conv_0", "kernel"),
        **_batch_norm("stem_norm", "BatchNorm_0"),
        **_same("head", "Dense_0", "kernel", "bias"),
    }
    for i in range(3):
        block, linen = f"stages/layers/{i}", f"ResNetBlock_{i}"
        pairs |= _same(f"{block}/first", f"{linen}/Conv_0", "kernel")
        pairs |= _batch_norm(f"{block}/first_norm", f"{linen}/BatchNorm_0")
        pairs |= _same(f"{block}/second", f"{linen}/Conv_1", "kernel")
        pairs |= _batch_norm(f"{block}/second_norm", f"{linen}/BatchNorm_1")
        if i:
            pairs |= _same(f"{block}/conv_proj", f"{linen}/conv_proj", "kernel")
            pairs |= _batch_norm(f"{block}/norm_proj", f"{linen}/norm_proj")
    return pairs


def _gates(cell: str, leaf: str, *gates: str) -> Entry:
    return (joined, *(f"params/{cell}/{gate}/{leaf}" for gate in gates))


def _forecaster() -> Pairs:
    pairs = dict(_same("head", "Dense_0", "kernel", "bias"))
    for rnn, cell in (("lower", "GRUCell_0"), ("higher", "GRUCell_1")):
        pairs[f"{rnn}/cell/dense_i/kernel"] = _gates(cell, "kernel", "ir", "iz", "in")
        pairs[f"{rnn}/cell/dense_i/bias"] = _gates(cell, "bias", "ir", "iz", "in")
        pairs[f"{rnn}/cell/dense_h/kernel"] = _gates(cell, "kernel", "hr", "hz", "hn")
    return pairs


def _gated_mlps() -> Pairs:
    split, fused = "params/GatedMlp_0", "params/GemmaMlp_0"
    return {
        **_same("first_norm", "LayerNorm_0", "scale", "bias"),
        "first/gate_up/kernel": (joined, f"{split}/gate/kernel", f"{split}/up/kernel"),
        "first/gate_up/bias": (joined, f"{split}/gate/bias", f"{split}/up/bias"),
        **_same("first/down", "GatedMlp_0/down", "kernel", "bias"),
        **_same("second_norm", "LayerNorm_1", "scale", "bias"),
        "second/gate_proj/kernel": (operator.itemgetter(0), f"{fused}/gating_einsum"),
        "second/up_proj/kernel": (operator.itemgetter(1), f"{fused}/gating_einsum"),
        "second/down_proj/kernel": (unchanged, f"{fused}/linear"),
        **_same("head", "Dense_0", "kernel", "bias"),
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

# Leaves that are never negative, and settings of optimizers.
_POSITIVE = {"var", "nu", "v", "v_row", "v_col", "hyperparams"}


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
        if "cache_index" in names:
            return jnp.full(leaf.shape, 4, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, next(counters), leaf.dtype)
        if names[-2:] == ["hn", "bias"]:  # which NNX's GRUCell does not have
            return jnp.zeros(leaf.shape, leaf.dtype)
        draw = rng.uniform(0.1, 0.9, leaf.shape) if _POSITIVE & {*names} else None
        draw = rng.normal(0, 0.3, leaf.shape) if draw is None else draw
        return jnp.asarray(draw, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, tree)


@dataclasses.dataclass(frozen=True, eq=False)
class Twin:
    """A model written twice.

    Attributes:
      linen: the Linen module.
      nnx: called with `rngs`, the NNX module.
      inputs: what both take.
      pairs: the map between their leaves.
      tx: the optimizer of both.
      step: `TrainState.step` of the state to convert.
      boxed: whether the Linen state has its boxes.
      training: what Linen's module is called with while it is trained.
      map: what a conversion has to be told, as the text of a map file.
    """

    linen: nn.Module
    nnx: Callable[..., nnx.Module]
    inputs: tuple[Any, ...]
    pairs: Pairs
    tx: Any
    step: Any = 7
    boxed: bool = False
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    map: str = ""

    def linen_variables(self, seed: int = 0) -> Any:
        """What Linen's `init` returns, random."""
        tokens = self.inputs
        if getattr(self.linen, "decode", False):  # the cache has the size of the first inputs
            tokens = (np.zeros((2, LENGTH), int), np.arange(LENGTH))
        made = jax.eval_shape(lambda: self.linen.init(jax.random.key(0), *tokens))
        return randomised(made if self.boxed else nn.meta.unbox(made), seed)

    def linen_state(self, seed: int = 0) -> train_state.TrainState:
        """A `TrainState`, random, moments and all."""
        variables = self.linen_variables(seed)
        kind = TrainState if "batch_stats" in variables else train_state.TrainState
        create = functools.partial(kind.create, apply_fn=self.linen.apply, tx=self.tx)
        state = jax.eval_shape(lambda: create(**variables)).replace(**variables)
        return state.replace(step=self.step, opt_state=randomised(state.opt_state, seed + 1))

    def create(self) -> dict[str, Any]:
        """A fresh NNX model and its optimizer."""
        model = self.create_model()
        return {"model": model, "optimizer": nnx.Optimizer(model, self.tx, wrt=nnx.Param)}

    def create_model(self) -> nnx.Module:
        """A fresh NNX model."""
        with nnx.use_eager_sharding(False):
            return self.nnx(rngs=nnx.Rngs(0))

    def blank(self) -> dict[str, Any]:
        """`create()`, blank."""
        return blank(self.create)

    def blank_model(self) -> nnx.Module:
        """`create_model()`, blank."""
        return blank(self.create_model)

    def entries(self, trained: bool) -> dict[str, Entry]:
        """The whole map, of the NNX model or of `create()`: path -> where its leaf is from."""
        if not trained:
            return dict(self.pairs)
        made = {f"model/{path}": entry for path, entry in self.pairs.items()}
        optimizer = nnx.eval_shape(self.create)["optimizer"]
        for path in nnx_leaves(optimizer):
            parameters = [key for key in self.pairs if path.endswith(f"/{key}")]
            if parameters:  # a moment of the longest of them
                parameter = max(parameters, key=len)
                function, *sources = self.pairs[parameter]
                prefix = path.removesuffix(parameter)
                moments = (prefix + source.removeprefix("params/") for source in sources)
                made[f"optimizer/{path}"] = (function, *moments)
            else:
                made[f"optimizer/{path}"] = (unchanged, path)
        return made

    def expected(self, linen: Any) -> dict[str, Any]:
        """Path -> leaf of the NNX model, or of `create()`, that has the values of Linen variables
        or of a `TrainState`."""
        leaves = {path: np.asarray(leaf) for path, leaf in linen_leaves(linen).items()}
        return {
            path: function(*(leaves[source] for source in sources))
            for path, (function, *sources) in self.entries("step" in leaves).items()
        }

    def filled(self, linen: Any) -> Any:
        """A fresh model, or `create()`, with the values of Linen variables or of a `TrainState`."""
        made = self.blank() if hasattr(linen, "step") else self.blank_model()
        values = self.expected(linen)
        for path, variable in nnx.to_flat_state(nnx.state(made, nnx.Not(nnx.RngState))):
            old = variable.get_value()
            new = values["/".join(map(str, path))]
            assert new.shape == old.shape, path
            variable.set_value(jnp.asarray(new, old.dtype))
        return made

    def linen_forward(self, variables: Any) -> Any:
        """What the Linen model gives for the inputs."""
        forward = jax.jit(functools.partial(self.linen.apply, mutable=["cache"]))
        return forward(variables, *self.inputs)[0]

    def nnx_forward(self, model: nnx.Module) -> Any:
        """What an NNX model gives for the inputs."""
        model.eval()
        return nnx.jit(lambda model, inputs: model(*inputs))(model, self.inputs)

    def linen_step(self, state: train_state.TrainState) -> tuple[Any, train_state.TrainState]:
        """The loss, and the state after a step of training without dropout."""
        stats = {"batch_stats": state.batch_stats} if hasattr(state, "batch_stats") else {}

        @jax.jit
        def step(state, stats, inputs):
            def loss(params):
                variables = {"params": params, **stats}
                out, updates = self.linen.apply(
                    variables, *inputs, **self.training, mutable=["batch_stats"]
                )
                return _loss(out), updates

            (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
            return value, state.apply_gradients(grads=grads, **updates)

        return step(state, stats, self.inputs)

    def nnx_step(self, training: dict[str, Any]) -> Any:
        """The loss of `create()`, whose model and optimizer a step updates in place."""

        @nnx.jit
        def step(model, optimizer, inputs):
            value, grads = nnx.value_and_grad(lambda model: _loss(model(*inputs)))(model)
            optimizer.update(model, grads)
            return value

        model = training["model"]
        model.train() if self.training else model.eval()
        return step(model, training["optimizer"], self.inputs)


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


def _language_twin(layers: str, pairs: Pairs, tx: Any, **kwargs: Any) -> Twin:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 7))
    return Twin(
        Linen.LanguageModel(layers),
        functools.partial(Nnx.LanguageModel, layers),
        (tokens, np.arange(7)),
        pairs,
        tx,
        **kwargs,
    )


def _inputs(*shape: int) -> tuple[np.ndarray]:
    return (np.random.default_rng(1).normal(size=shape).astype("float32"),)


_LOOPED = [(f"blocks/{i}", f"Block_{i}") for i in range(2)]
TWINS = {
    "looped": _language_twin(
        "looped",
        _language_model(*(_block(*names) for names in _LOOPED)),
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0.0, 99))
        ),
        boxed=True,
    ),
    "looped remat": _language_twin(
        "looped remat",
        _language_model(*(_block(f"blocks/{i}", f"CheckpointBlock_{i}") for i in range(2))),
        optax.MultiSteps(optax.adam(1e-2), 3),
        step=np.int32(11),
    ),
    "scanned": _language_twin(
        "scanned 0",
        _language_model(_block("blocks", "ScanBlock_0")),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
        step=jnp.uint32(7),
    ),
    "scanned remat": _language_twin(
        "scanned remat 1",
        _language_model(_block("blocks", "ScanCheckpointBlock_0", stacked_first)),
        optax.adam(1e-2),
        step=jnp.int32(7),
        boxed=True,
    ),
    "resnet": Twin(
        Linen.ResNet(),
        Nnx.ResNet,
        _inputs(2, 8, 6, 3),
        _res_net(),
        optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
        training={"train": True},
    ),
    "gru": Twin(
        Linen.Forecaster(),
        Nnx.Forecaster,
        _inputs(2, 6, 3),
        _forecaster(),
        optax.sgd(1e-2, momentum=0.9),
    ),
    "gated": Twin(
        Linen.Residual(nn.LayerNorm, (Linen.GatedMlp, Linen.GemmaMlp)),
        functools.partial(Nnx.Residual, nnx.LayerNorm, Nnx.GatedMlp, Nnx.GemmaMlp),
        _inputs(8, WIDTH),
        _gated_mlps(),
        optax.adamw(1e-2),
        step=jnp.int32(7),
        map=r"""
            to = 'nnx'

            [[rule]]
            from = '^params/GatedMlp_0/(gate|up)/(kernel|bias)$'
            concat = { axis = -1, by = 1, order = ['gate', 'up'] }
            to = 'first/gate_up/\2'

            [[rule]]
            from = '^params/GemmaMlp_0/gating_einsum$'
            unstack = { axis = 0, into = ['second/gate_proj/kernel', 'second/up_proj/kernel'] }

            [[rule]]
            from = '^params/GemmaMlp_0/linear$'
            to = 'second/down_proj/kernel'
        """,
    ),
}
DECODER = Twin(
    Linen.LanguageModel("looped", decode=True),
    functools.partial(Nnx.LanguageModel, "looped", decode=True),
    (np.array([[3], [8]]), np.array([4])),
    {
        **_language_model(*(_block(*names) for names in _LOOPED)),
        **functools.reduce(operator.or_, (dict(_cache(*names)) for names in _LOOPED)),
    },
    None,
)
