"""Whole checkpoints converted between Linen and NNX, as users call it: what is refused, what is
made, and that it is what Orbax and Flax alone would have made."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil

import flax
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import v1
from converted import Compact, Of, by_path, filled, map_of, refusal, refused, sharded
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CUSTOM
from layouts import load_standard as load
from layouts import save_pytree as save_any
from layouts import save_standard as save
from optimizers import OPTIMIZERS, RESHAPING
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from random_rows import bits
from releases import older
from sampling import examples, few
from twins import TrainState

import reshard
from reshard.arrays.derived import constant
from reshard.cli.output import as_flags
from reshard.convert.conversion import conversion
from reshard.convert.record import like_recorded
from reshard.restore.pytrees import saved_tree
from reshard.tree import as_python, format_path

pytestmark = pytest.mark.usefixtures("quickly_compiled")
RANDOM = "**/rngs/**"
LEFT_OUT = 'drop=["opt_state"] with drop=["step"] leaves the optimizer state out'
UNDECIDED = ("missing", "unexpected", "mismatch", "ambiguous", "undecided")
RESET = 'drop=["opt_state"] with init=["optimizer/opt_state"] resets the optimizer state'
RESET_IN_LINEN = 'drop=["optimizer/opt_state"] with init=["opt_state"] resets the optimizer state'
OF_NO_PARAMETER = "is of no parameter, and parameters change their order, shape or number"
INPUTS = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")


SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(1e-3)
LION = optax.lion(1e-3)


class Mlp(nn.Module):
    """Classes and order tell which layer is which. `boxed`: with names for some axes."""

    boxed: bool = False

    @nn.compact
    def __call__(self, x):
        kernel, bias = nn.initializers.lecun_normal(), nn.initializers.zeros
        if self.boxed:
            kernel = nn.with_partitioning(kernel, ("data", "model"))
            bias = nn.with_partitioning(bias, ("model",))
        x = nn.relu(nn.Dense(6, kernel_init=kernel)(x))
        x = nn.BatchNorm(use_running_average=True, bias_init=bias)(x)
        x = nn.Dropout(0.1, deterministic=True)(x)
        return nn.Dense(2, kernel_init=kernel)(x)


class Twin(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs, boxed=False):
        kernel, bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        if boxed:
            kernel = nnx.with_partitioning(kernel, ("data", "model"))
            bias = nnx.with_partitioning(bias, ("model",))
        self.first = nnx.Linear(4, 6, kernel_init=kernel, rngs=rngs)
        self.norm = nnx.BatchNorm(6, use_running_average=True, bias_init=bias, rngs=rngs)
        self.drop = nnx.Dropout(0.1, deterministic=True, rngs=rngs)
        self.second = nnx.Linear(6, 2, kernel_init=kernel, rngs=rngs)


NAMES = {"Dense_0": "first", "BatchNorm_0": "norm", "Dense_1": "second"}
# The classes of streams of random numbers, which only NNX has.
STREAM = ("drop", "rngs")


@functools.cache
def variables(boxed=False):
    """Abstract ones."""
    return jax.eval_shape(Mlp(boxed).init, jax.random.key(0), INPUTS)


def train(tx, boxed=False):
    """A train state as users make it, but abstract."""
    made = functools.partial(TrainState.create, apply_fn=None, tx=tx)
    return jax.eval_shape(lambda parts: made(**parts), dict(variables(boxed)))


def twin(seed=1):
    return Twin(nnx.Rngs(seed))


drawn = functools.cache(twin)  # to be looked at only


def with_optimizer(model, tx):
    """What users save of NNX: the model beside its optimizer."""
    return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


def training(tx, seed=1):
    return with_optimizer(twin(seed), tx)


class Trainer(nnx.Module):
    """A module of the user's that holds the model and its optimizer."""

    def __init__(self, tx, name="optimizer", seed=1):
        self.model = twin(seed)
        setattr(self, name, nnx.Optimizer(self.model, tx, wrt=nnx.Param))


def saved_by_nnx(made):
    return {key: nnx.state(value) for key, value in made.items()}


# What a conversion back is told once the record is lost.
BACK = {"source": Twin, "drop": f"model/{RANDOM}"}


class Parts(nnx.Module):
    """Attributes have the names that the Linen tree has."""

    def __init__(self, rngs):
        self.a = nnx.Linear(4, 5, rngs=rngs)
        self.b = nnx.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=rngs)
        self.c = nnx.Param(jnp.zeros((2, 3)))
        self.d = nnx.BatchStat(jnp.zeros(4))
        self.f = nnx.Param(jnp.zeros(3))
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def some(*shape, dtype="float32", seed=0):
    return jnp.asarray(layouts.random_array(np.random.default_rng([seed, *shape]), shape, dtype))


PARTS = {"a": {"kernel": some(4, 5), "bias": some(5)}, "b": {"kernel": some(3, 2), "bias": some(2)}}


def state(tx, *, boxed=False, step=None):
    """A train state with random leaves."""
    return filled(train(tx, boxed)).replace(step=jnp.int32(9) if step is None else step)


def save_described(path, tree):
    """With metadata of the user's, of the checkpoint and of the tree."""
    arguments = ocp.args.PyTreeSave(tree, custom_metadata=CUSTOM)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, arguments, custom_metadata={"of": "the checkpoint"})
    return path


def described(path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(path)
    return found.custom_metadata, found.item_metadata.custom_metadata


def load_any(path):
    """With its own types of containers, where they are recorded and this Orbax restores them."""
    options = PyTreeMetadataOptions(support_rich_types=not older("orbax-checkpoint", "0.12"))
    handler = ocp.PyTreeCheckpointHandler(pytree_metadata_options=options)
    with ocp.Checkpointer(handler) as checkpointer:
        return checkpointer.restore(path)


def leaves_of(tree):
    """Path -> leaf, by JAX; a masked leaf is None."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    pairs, _ = jax.tree_util.tree_flatten_with_path(nn.unbox(tree), is_leaf=is_masked)

    def text(key):
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))))

    return {tuple(map(text, keys)): None if is_masked(leaf) else leaf for keys, leaf in pairs}


def moved(linen, random=None):
    """What `training` is to be saved as, by hand: the leaves of variables or of a train state under
    their names in `Twin`. `random`: the model whose random numbers are expected."""
    whole = hasattr(linen, "opt_state")
    parts = linen if not whole else {"params": linen.params}
    if hasattr(linen, "batch_stats"):
        parts |= {"batch_stats": linen.batch_stats}
    below = "params" in parts["params"]
    parts = parts["params"] if below else parts
    above = ("model",) if whole else ()
    made = {}
    for path, leaf in leaves_of(dict(parts)).items():
        made[*above, *(NAMES.get(key, key) for key in path[1:]), "value"] = leaf
    for path, leaf in leaves_of(getattr(linen, "ema_params", {})).items():
        made["ema_params", *(NAMES.get(key, key) for key in path), "value"] = leaf
    for path, leaf in leaves_of(linen.opt_state).items() if whole else ():
        keys = [NAMES.get(key, key) for key in path if not (below and key == "params")]
        if leaf is not None or not NAMES.keys().isdisjoint(path):
            made["optimizer", "opt_state", *keys, "value"] = leaf
    if whole:
        made["optimizer", "step", "value"] = jnp.uint32(linen.step)
    for name in ("key", "count") if random is not None else ():
        made[*above, *STREAM, name, "value"] = getattr(random.drop.rngs, name)[...]
    return {format_path(path): layouts.bits(leaf) for path, leaf in made.items()}


def held(tree):
    """The same of a state of NNX, whose variables Orbax saves as a level of their own."""
    return {f"{path}/value": leaf for path, leaf in by_path(tree).items()}


def pure_of(made):
    """The leaves of modules in a dict."""
    return {key: nnx.to_pure_dict(nnx.state(value)) for key, value in made.items()}


def named(dtype="float32", **shapes):
    """An NNX model with one parameter under each name."""
    return Of(**{name: nnx.Param(jnp.zeros(shape, dtype)) for name, shape in shapes.items()})


def beside_optimizer(tx, **shapes):
    return with_optimizer(named(**shapes), tx)


def train_state_of(params, tx):
    """A train state of Flax's own, with random moments."""
    moments = filled(jax.eval_shape(tx.init, params))
    return train_state.TrainState(jnp.int32(7), None, params, tx, moments)


def trained(linen, function):
    """What is to be saved of a model and an optimizer like adam, where a function says what becomes
    of parameters, and of their moments."""
    count, mu, nu = linen.opt_state[0]
    moments = {"count": count, "mu": function(mu), "nu": function(nu)}
    optimizer = {"opt_state": {"0": moments}, "step": jnp.uint32(linen.step)}
    return held({"model": function(linen.params), "optimizer": optimizer})


def restored(ckpt, folder):
    """What Orbax gives back of a checkpoint that is not saved yet."""
    path = folder / f"restored_{len(list(folder.iterdir()))}"
    reshard.save(ckpt, path)
    return load(path)


def recast(ckpt, error):
    """A checkpoint after the calls that the hints of an error say."""
    for hint in error.hints:
        if hint.startswith("reshard.cast("):
            ckpt = eval(hint, {"reshard": reshard, "ckpt": ckpt})
    return ckpt


# What does not fit


def test_all_that_stands_against_nnx_is_told_at_once_and_before_anything_is_read(tmp_path):
    params = {**PARTS, "c": some(3, 2), "d": some(4), "e": some(3)}
    tree = {
        "params": params,
        "opt_state": MOMENTUM.init(params),
        "step": jnp.int32(4),
        "ema": some(3),
        "name": "mine",
    }
    ckpt = reshard.open(save_any(tmp_path / "linen", tree))
    shutil.rmtree(tmp_path / "linen")

    def model():
        return with_optimizer(Parts(nnx.Rngs(0)), LION)

    message = f"""\
`{tmp_path}/linen` does not become the NNX model
  params/c and c: [3, 2] in Linen, [2, 3] in NNX
  params/d and d: params in Linen, BatchStat in NNX
  params/e, perhaps f: ambiguous: neither names nor classes decide
  opt_state/0/trace/a/bias  float32[5]: unexpected
  opt_state/0/trace/a/kernel  float32[4,5]: unexpected
  opt_state/0/trace/b/bias  float32[2]: unexpected
  opt_state/0/trace/b/kernel  float32[3,2]: unexpected
  ema  float32[3]: unexpected
  name  'mine': unexpected
  drop/rngs/count  uint32[]: missing
  drop/rngs/key  threefry2x32 keys[]: missing
  optimizer/opt_state/0/count  int32[]: missing
  optimizer/opt_state/0/mu/a/bias  float32[5]: missing
  optimizer/opt_state/0/mu/a/kernel  float32[4, 5]: missing
  optimizer/opt_state/0/mu/b/bias  bfloat16[2]: missing
  optimizer/opt_state/0/mu/b/kernel  bfloat16[3, 2]: missing
  params/b/bias -> b/bias: dtype float32, the model has bfloat16
  params/b/kernel -> b/kernel: dtype float32, the model has bfloat16

hint: map_file=... decides, by rules such as: from = '^params/e$', to = 'f'
hint: drop=["opt_state/**/a"] leaves out 2 leaves
hint: drop=["opt_state/**/b"] leaves out 2 leaves
hint: drop=["ema"] leaves out 1 leaf
hint: drop=["name"] leaves out 1 leaf
hint: init=["**/rngs"] keeps the model's own initial value: 2 leaves
hint: reshard.cast(ckpt, "bfloat16", "params/b/bias")
hint: reshard.cast(ckpt, "bfloat16", "params/b/kernel")"""
    assert refusal(reshard.to_nnx, ckpt, model) == message


def test_all_that_stands_against_linen_is_told_at_once_and_before_anything_is_read(tmp_path):
    tree = saved_by_nnx(with_optimizer(Parts(nnx.Rngs(0)), LION))
    ckpt = reshard.open(save(tmp_path / "nnx", tree))
    shutil.rmtree(tmp_path / "nnx")

    def linen():
        wider = {**PARTS["a"], "bias": some(6)}
        params = {**PARTS, "a": wider, "c": some(2, 3), "e": some(3)}
        return {"params": params, "opt_state": MOMENTUM.init(params)}

    message = f"""\
`{tmp_path}/nnx` does not become the Linen model
  params/a/bias and a/bias: [6] in Linen, [5] in NNX
  params/e, perhaps d and f: ambiguous: neither names nor classes decide
  drop/rngs/count  uint32[]: unexpected
  drop/rngs/key  uint32[2]: unexpected
  opt_state/0/count  int32[]: unexpected
  opt_state/0/mu/a/kernel  float32[4,5]: unexpected
  opt_state/0/mu/b/bias  bfloat16[2]: unexpected
  opt_state/0/mu/b/kernel  bfloat16[3,2]: unexpected
  opt_state/0/mu/c  float32[2,3]: unexpected
  step  uint32[]: unexpected
  opt_state/0/trace/a/kernel  float32[4, 5]: missing
  opt_state/0/trace/b/bias  float32[2]: missing
  opt_state/0/trace/b/kernel  float32[3, 2]: missing
  opt_state/0/trace/c  float32[2, 3]: missing
  model/b/kernel/value -> params/b/kernel: dtype bfloat16, the model has float32
  model/b/bias/value -> params/b/bias: dtype bfloat16, the model has float32

hint: drop=["**/rngs"] leaves out 2 leaves
hint: drop=["**/count"] leaves out 2 leaves
hint: drop=["optimizer/**/kernel"] leaves out 2 leaves
hint: drop=["optimizer/**/b"] leaves out 2 leaves
hint: drop=["optimizer/opt_state/0/mu/c/value"] leaves out 1 leaf
hint: reshard.cast(ckpt, "float32", "model/b/kernel/value")
hint: reshard.cast(ckpt, "float32", "model/b/bias/value")"""
    assert refusal(reshard.to_linen, ckpt, linen, source=Parts) == message


def test_what_the_hints_say_can_be_typed(tmp_path):
    ckpt = reshard.open(save(tmp_path / "linen", {"params": PARTS, "ema": some(3)}))
    told = {"drop": [], "init": []}
    for _ in range(3):
        try:
            made = reshard.to_nnx(ckpt, Parts, **told)
            break
        except reshard.TreeMismatchError as error:
            ckpt = recast(ckpt, error)
            for hint in error.hints:
                if found := re.match(r"(drop|init)=(\[.*?\]) ", hint):
                    told[found[1]] += eval(found[2])
    assert told == {"drop": ["ema"], "init": ["c", "d", "**/rngs", "f"]}
    model = Parts(nnx.Rngs(0))
    expected = {
        "a": PARTS["a"],
        "b": jax.tree.map(lambda x: x.astype("bfloat16"), PARTS["b"]),
        **{name: getattr(model, name)[...] for name in "cdf"},
        "drop": {"rngs": {name: getattr(model.drop.rngs, name)[...] for name in ("key", "count")}},
    }
    assert by_path(restored(made, tmp_path)) == held(expected)


def test_the_state_of_another_optimizer_has_no_place(tmp_path):
    path = save(tmp_path / "linen", train_state_of({"a": some(3)}, optax.lion(0.1)))
    assert refused(reshard.to_nnx, path, lambda: beside_optimizer(MOMENTUM, a=(3,))).problems == (
        "opt_state/0/count  int32[]: unexpected",
        "opt_state/0/mu/a  float32[3]: unexpected",
        "optimizer/opt_state/0/trace/a  float32[3]: missing",
    )


def test_a_moment_does_not_go_where_the_model_masks_it(tmp_path):
    """The trees of the two optimizers differ in one leaf, which one of them has as None."""
    both, one = (optax.masked(MOMENTUM, {"a": True, "b": mask}) for mask in (True, False))
    params = {"a": some(3), "b": some(2)}
    path = save(tmp_path / "linen", train_state_of(params, both))
    reshard.save(reshard.to_nnx(path, lambda: named(a=(3,), b=(2,))), tmp_path / "nnx")
    error = refused(reshard.to_linen, tmp_path / "nnx", train_state_of(params, one))
    assert error.problems == ("opt_state/inner_state/0/trace/b  float32[2]: unexpected",)
    hint = 'drop=["optimizer/opt_state/inner_state/0/trace/b/value"] leaves out 1 leaf'
    assert error.hints == (hint,)


def test_factored_moments_that_cannot_follow_are_told_beside_all_else(tmp_path):
    params = {"q": some(4, 6), "k": some(4, 6), "left": some(2)}
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    path = save(tmp_path / "linen", train_state_of(params, tx))
    file = map_of(tmp_path, "from = ['^params/q$', '^params/k$'], concat = { axis = 1 }, to = 'qk'")
    error = refused(reshard.to_nnx, path, lambda: named(qk=(4, 12)), map_file=file)
    assert error.problems == (
        "params/left: NNX has no counterpart",
        *(
            f"opt_state/0/{v}/q + 0/{v}/k: its shape [{size}] is a part of its parameter's [4, 6], "
            "and concat cannot be applied to a part"
            for v, size in (("v_row", 4), ("v_col", 6))
        ),
    )
    assert error.hints == (LEFT_OUT,)


@pytest.mark.parametrize("with_model", [True, False])
def test_state_that_cannot_follow_starts_anew_as_the_hint_says(with_model, tmp_path):
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    params = {"q": some(4, 6), "k": some(4, 6)}
    path = save(tmp_path / "linen", train_state_of(params, tx))
    file = map_of(tmp_path, "from = ['^params/q$', '^params/k$'], concat = { axis = 1 }, to = 'qk'")

    def model():
        if with_model:
            return beside_optimizer(tx, qk=(4, 12))
        return named(qk=(4, 12))

    (hint,) = refused(reshard.to_nnx, path, model, map_file=file).hints
    assert hint == (RESET if with_model else LEFT_OUT)
    told = {"drop": [], "init": []}
    for option, value in re.findall(r"(drop|init)=(\[.*?\])", hint):
        told[option] += eval(value)
    made = by_path(restored(reshard.to_nnx(path, model, map_file=file, **told), tmp_path))
    qk = jnp.concatenate([params["q"], params["k"]], axis=1)
    if not with_model:
        assert made == held({"qk": qk})
        return
    fresh = tx.init({"qk": qk})
    expected = held({"model": {"qk": qk}, "optimizer": {"step": jnp.uint32(7)}})
    state = by_path({"opt_state": jax.tree.map(lambda x: x, fresh)})
    moments = {f"optimizer/{name}/value": leaf for name, leaf in state.items() if "/" in name}
    assert made == expected | {p: x for p, x in moments.items() if x != layouts.bits(None)}


def test_what_cannot_be_a_conversion_is_refused(tmp_path):
    linen, nnx_path = save(tmp_path / "linen", {"params": {"a": some(3)}}), tmp_path / "nnx"
    model = functools.partial(named, a=(3,))
    message = """\
a conversion needs a model or a map

hint: model=...
hint: map_file=..."""
    assert refusal(reshard.to_nnx, linen, of=reshard.ArgumentError) == message
    message = f"""\
`{linen}` is linen-variables already
  collections are at the top: `params`

hint: reshard.to_nnx(ckpt, ...) converts it
hint: layout=... with the right layout, if this one is wrong"""
    assert refusal(reshard.to_linen, linen) == message
    reshard.save(reshard.to_nnx(linen, model), nnx_path)
    message = f"""\
`{nnx_path}` is nnx-state already
  the record of its conversion says so

hint: reshard.to_linen(ckpt, ...) converts it
hint: layout=... with the right layout, if this one is wrong"""
    assert refusal(reshard.to_nnx, nnx_path, model) == message
    message = """\
`flax` is not a layout; the layouts are
  linen-variables: collections at the top: `params`, `batch_stats`, ...
  linen-params: the contents of `params` alone
  linen-train-state: `params` next to `opt_state` or `step`, or all variables below `params`
  maxtext: a train state, with NNX's other leaves below `nnx_aux`
  nnx-state: `nnx.state(model)`, or a module: a `value` level under each variable
  nnx-pure-dict: `nnx.to_pure_dict(nnx.state(model))`
  nnx-optimizer: `nnx.Optimizer`: `opt_state` and `step`
  nnx-model-and-optimizer: `nnx.ModelAndOptimizer`: `model`, `opt_state` and `step`
  nnx-model: a state below `model`, with or without `optimizer`"""
    assert refusal(reshard.to_nnx, linen, model, of=reshard.ArgumentError, layout="flax") == message


def test_a_model_of_the_other_api_is_refused(tmp_path):
    paths = {
        "NNX": save(tmp_path / "linen", state(SGD)),
        "Linen": save(tmp_path / "nnx", nnx.state(twin())),
    }
    for wanted, model, what in (
        ("NNX", Mlp, "the Linen module Mlp"),
        ("NNX", Mlp(), "the Linen module Mlp"),
        ("NNX", lambda: Mlp().init(jax.random.key(0), INPUTS), "a Linen state"),
        ("NNX", variables(boxed=True), "a Linen state"),
        ("NNX", train(SGD), "a Linen state"),
        ("Linen", Twin, "an NNX state"),
        ("Linen", lambda: nnx.state(twin()), "an NNX state"),
        ("Linen", lambda: training(SGD), "an NNX state"),
    ):
        call, other = (reshard.to_nnx, "linen") if wanted == "NNX" else (reshard.to_linen, "nnx")
        message = f"""\
the model to convert to is {what}

hint: it must be {wanted}'s: model=... is the model to convert to, source=... the model of the \
checkpoint
hint: reshard.to_{other}(ckpt, ...), if the other way is meant"""
        assert refusal(call, paths[wanted], model, of=reshard.ArgumentError) == message
    message = """\
the Linen module Mlp needs inputs to make its variables

hint: a function that returns its variables, `model.init(key, x)`, or a TrainState"""
    told = refusal(reshard.to_linen, paths["Linen"], Mlp(), of=reshard.ArgumentError)
    assert told == message


# What is left out, and what keeps its initial value


def test_what_is_dropped_is_left_out(tmp_path):
    params = {"a": some(3), "old": {"b": some(2), "c": some(4)}}
    linen = train_state_of(params, optax.adam(0.1))
    path = save(tmp_path / "linen", linen)
    model = functools.partial(beside_optimizer, optax.adam(0.1), a=(3,))
    ckpt = reshard.to_nnx(path, model, drop=["params/old/b", "**/old/c", "opt_state/0/*/old/b"])
    expected = trained(linen, lambda tree: {"a": tree["a"]})
    assert by_path(restored(ckpt, tmp_path)) == expected
    ckpt = reshard.to_nnx(path, model, drop="params/old/*")
    assert by_path(restored(ckpt, tmp_path)) == expected
    message = """\
no leaf matches
  `params/missing`

hint: the nearest leaf is `params/a`"""
    assert refusal(reshard.to_nnx, path, model, drop="params/missing") == message


def test_a_tree_is_read_once_what_makes_it_ambiguous_is_dropped(tmp_path):
    """Unless there may be optimizer state of dropped parameters."""
    params, extra = {"a": some(3), "b": some(2)}, {"m": some(4)}
    tree = {"params": {"params": params, "batch_stats": extra}, "batch_stats": extra}
    path = save(tmp_path / "linen", tree | {"opt_state": [{"mu": {"params": params}}]})
    convert, drop = functools.partial(reshard.to_nnx, path), ["batch_stats"]
    summary = "without the levels of collections and values, several leaves have the same path"
    model = functools.partial(named, a=(3,), b=(2,))
    assert refusal(convert, model).startswith(summary)
    assert refusal(convert, model, drop=[*drop, "params/params/b"]).startswith(summary)
    problems = refused(convert, model, drop=drop).problems
    assert problems == ("batch_stats/m: NNX has no counterpart",)


def test_initial_values_are_those_of_the_constructor(tmp_path):
    """Typed keys and counts, too: of a function, of a class, which is called with the first seed,
    and of a real model."""
    linen = state(SGD)
    path = save(tmp_path / "linen", linen)
    real = training(SGD)
    real["model"].drop.rngs.key[...] = jax.random.key(71, impl="threefry2x32")
    real["model"].drop.rngs.count[...] = jnp.uint32(13)
    for model, globs, expected in (
        (lambda: training(SGD, seed=3), RANDOM, drawn(3)),
        (lambda: training(SGD, seed=3), ["model/drop/rngs/key", "*/rngs/count"], drawn(3)),
        (Twin, "drop/**", drawn(0)),
        (real, ["drop/rngs/*"], real["model"]),
    ):
        made = restored(reshard.to_nnx(path, model, init=globs), tmp_path)
        assert by_path(made) == moved(linen, expected)


class Owner(nnx.Module):
    """Has constants of its own; `used` notes when a weight is computed, and not only traced."""

    def __init__(self, rngs, used=None):
        self.a = nnx.Param(jnp.zeros(3))
        self.table = nnx.Variable(sinusoids(200, 64))
        self.codes = nnx.Param(unit(rngs.params()))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        if used is not None:
            self.weight = nnx.Param(noted(used))


def sinusoids(count, width):
    """A table as Transformers have it. Compiled as a whole it differs in the last bits."""
    rates = jnp.exp(jnp.arange(0, width, 2) * (-np.log(10000.0) / width))
    angles = jnp.arange(count)[:, None] * rates
    made = jnp.zeros((count, width)).at[:, 0::2].set(jnp.sin(angles))
    return made.at[:, 1::2].set(jnp.cos(angles))


def unit(key):
    """Random rows of length 1. They, too, differ if they are compiled as a whole."""
    rows = jax.random.normal(key, (150, 48))
    return rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)


def noted(used):
    def value():
        used.append("weight")
        return np.float32(0.5)

    return jnp.full((9, 7), jax.pure_callback(value, jax.ShapeDtypeStruct((), "float32")))


@pytest.mark.parametrize("transform", [lambda function: function, nnx.jit], ids=["eager", "jitted"])
def test_initial_values_are_computed_as_by_the_constructor(transform, tmp_path):
    """To the bit: one operation at a time, and compiled where the constructor compiles. Of what is
    not compiled, only what is asked for is computed."""
    used = []
    params = {"a": some(3), "weight": some(9, 7)}
    ckpt = reshard.to_nnx(
        save(tmp_path / "linen", {"params": params}),
        transform(lambda: Owner(nnx.Rngs(5), used)),
        init=["table", "codes", RANDOM],
    )
    assert bool(used) == (transform is nnx.jit)
    own = nnx.to_pure_dict(nnx.state(transform(lambda: Owner(nnx.Rngs(5)))()))
    assert by_path(restored(ckpt, tmp_path)) == held(own | params)


def test_initial_values_of_linen_are_those_of_an_eager_init(tmp_path):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = self.variable("constants", "table", sinusoids, 200, 64)
            codes = self.param("codes", unit)
            return x + table.value + nn.Dense(64)(codes @ jnp.ones((48, 64)))[:1]

    def make():
        return Model().init(jax.random.key(3), INPUTS[:1, :1])

    own = make()
    dense = filled(own["params"]["Dense_0"])
    path = save(tmp_path / "nnx", {"Dense_0": {key: {"value": x} for key, x in dense.items()}})
    ckpt = reshard.to_linen(path, make, init=["params/codes", "constants/**"], layout="nnx-state")
    expected = {"params": own["params"] | {"Dense_0": dense}, "constants": own["constants"]}
    layouts.assert_same_tree(restored(ckpt, tmp_path), expected)


def test_the_memory_of_initial_values_is_limited(tmp_path):
    class Large(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.zeros(3))
            self.unused = nnx.Param(jnp.zeros((4096, 4096)))
            self.table = nnx.Param(sinusoids(512, 1024))

    path = save(tmp_path / "linen", {"params": {"a": some(3)}})
    make = functools.partial(
        conversion, path, "nnx", Large, init=["table", "unused"], layout="linen-variables"
    )
    error = refused(make, of=reshard.MemoryLimitError, max_memory="1MiB")
    assert str(error) == (
        'initial values of 2 leaves take 66.00 MiB, more than 1.00 MiB\n\nhint: max_memory="66MiB"'
    )
    make(max_memory=error.least)


def test_initial_values_that_there_are_not(tmp_path):
    path = save(tmp_path / "linen", {"params": {"a": some(3)}})
    model = functools.partial(named, a=(3,), b=(2,))
    abstract = nnx.eval_shape(model)
    assert refusal(reshard.to_nnx, path, abstract, of=reshard.ArgumentError, init="b") == (
        "an abstract model has no initial values\n  b/value\n\n"
        "hint: give the model's class, or a function that returns the model"
    )
    assert refusal(reshard.to_nnx, path, model, init="c") == "no leaf matches\n  `c`"
    told = functools.partial(reshard.to_nnx, path, map_file=map_of(tmp_path, ("^params/", "")))
    reshard.save(reshard.to_nnx(path, functools.partial(named, a=(3,))), tmp_path / "nnx")
    back = functools.partial(reshard.to_linen, tmp_path / "nnx")
    for call, name in ((told, "b"), (back, "params/b")):
        assert refusal(call, init=name, of=reshard.ArgumentError) == (
            f"without a model, no leaf has an initial value\n  `{name}`\n\nhint: model=..."
        )
    summary = f"`{path}` does not become the NNX model\n"
    assert refusal(told, model, init=["a", "b"]) == (
        f"{summary}  a: `init` names it, but the checkpoint has it"
    )
    assert refusal(reshard.to_nnx, path, model, init=["a", "b"]) == (
        f"{summary}  params/a: NNX has no counterpart"
    )


# Map files


MAP = r"""
to = 'nnx'
rule = [
    { from = '^params/layer_(\d+)/', to = 'layers/\1/' },
    { from = '/fused$', split = { axis = -1, sizes = [2, 4], into = ['/query', '/key'] } },
    { from = '/w$', transpose = [1, 0], to = '/kernel' },
    { from = '/(gate|up)$', concat = { axis = -1, by = 1, order = ['up', 'gate'] }, to = '/both' },
    { from = '^params/expert_(\d+)$', stack = { axis = 1, by = 1 }, to = 'experts' },
    { from = '^params/gate_and_up$', unstack = { axis = 0, into = ['gate', 'up'] } },
    { from = '^params/table$', drop = true },
]
"""


def mapped_model():
    made = named(experts=(4, 3, 2), gate=(5, 3), up=(5, 3))
    layer = {"query": (3, 2), "key": (3, 4), "kernel": (5, 3), "both": (7,)}
    made.layers = nnx.List([named(**layer) for _ in range(2)])
    return made


def mapped_training():
    return with_optimizer(mapped_model(), ADAM)


def to_map():
    """A train state for `MAP`."""
    layer = {"fused": some(3, 6), "w": some(3, 5), "gate": some(3), "up": some(4)}
    params = {f"layer_{i}": filled(layer, i) for i in range(2)}
    params |= {f"expert_{i}": some(4, 2, seed=i) for i in range(3)}
    return train_state_of(params | {"gate_and_up": some(2, 5, 3), "table": some(7)}, ADAM)


def map_by_hand(tree):
    """What `MAP` says of parameters, or of their moments."""
    layers = {}
    for i in range(2):
        layer = tree[f"layer_{i}"]
        query, key = jnp.split(layer["fused"], [2], axis=1)
        layers[str(i)] = {"query": query, "key": key, "kernel": layer["w"].T}
        layers[str(i)]["both"] = jnp.concatenate([layer["up"], layer["gate"]])
    gate, up = tree["gate_and_up"]
    experts = jnp.stack([tree[f"expert_{i}"] for i in range(3)], axis=1)
    return {"layers": layers, "experts": experts, "gate": gate, "up": up}


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """A folder with the map, a checkpoint, what it becomes, and that saved by Orbax once more."""
    folder = tmp_path_factory.mktemp("mapped")
    (folder / "map.toml").write_text(MAP)
    ckpt = reshard.to_nnx(
        save(folder / "linen", to_map()), mapped_training, map_file=folder / "map.toml"
    )
    reshard.save(ckpt, folder / "nnx")
    save(folder / "saved_again", load(folder / "nnx"))
    return folder


@pytest.mark.parametrize("model", [None, mapped_model, mapped_training])
def test_moments_follow_the_operations_of_a_map(model, mapped, tmp_path):
    ckpt = reshard.to_nnx(mapped / "linen", model, map_file=mapped / "map.toml")
    assert by_path(restored(ckpt, tmp_path)) == trained(to_map(), map_by_hand)
    notes = {
        None: ["without a model, only the source was checked against the map"],
        mapped_model: [
            "the model has no optimizer: 23 leaves of optimizer state are below `optimizer`, "
            "unchecked"
        ],
        mapped_training: [],
    }
    dropped = "2 leaves of optimizer state are dropped with their parameters: params/table"
    assert list(ckpt.notes) == [dropped, *notes[model]]


def test_what_a_map_drops_comes_back_from_the_initial_values(mapped, tmp_path):
    """A map that was made for the way to NNX, run backwards. Without a model all the rest comes
    back, by the record."""
    linen = to_map()
    again = dataclasses.replace(linen, opt_state=ADAM.init(linen.params), step=0)
    told = {"map_file": mapped / "map.toml", "init": "opt_state/0/*/table"}
    ckpt = reshard.to_linen(mapped / "saved_again", again, **told)
    count, mu, nu = linen.opt_state[0]
    lost = {"table": jnp.zeros(7)}
    moments = optax.ScaleByAdamState(count, mu | lost, nu | lost)
    expected = linen.replace(opt_state=(moments, linen.opt_state[1]), step=7)
    layouts.assert_same_tree(reshard.restore(ckpt, expected), expected)
    save_any(tmp_path / "expected", expected)
    layouts.assert_same_tree(restored(ckpt, tmp_path), load(tmp_path / "expected"))
    for tree in (linen.params, mu, nu):
        del tree["table"]
    got = restored(reshard.to_linen(mapped / "nnx"), tmp_path)
    layouts.assert_same_tree(got, load(save(tmp_path / "less", linen)))


def test_a_written_map_says_it_all(mapped, tmp_path):
    """Forwards without a model, and backwards with one."""
    decided = conversion(mapped / "linen", "nnx", mapped_training, map_file=mapped / "map.toml")
    (tmp_path / "written.toml").write_text(decided.map_text())
    again = conversion(mapped / "linen", "nnx", map_file=tmp_path / "written.toml")
    assert (again.map.values, again.dropped) == (decided.map.values, decided.dropped)
    assert by_path(restored(again.checkpoint, tmp_path)) == trained(to_map(), map_by_hand)
    assert again.map_text() == decided.map_text()
    back = [
        restored(
            reshard.to_linen(
                mapped / "saved_again", to_map, map_file=file, init="opt_state/0/*/table"
            ),
            tmp_path,
        )
        for file in (tmp_path / "written.toml", mapped / "map.toml")
    ]
    layouts.assert_same_tree(*back)


def test_without_a_model_a_map_must_reach_every_leaf(tmp_path):
    tree = {"params": {"a": some(3), "b": some(2)}, "batch_stats": {"c": some(2)}, "other": some(1)}
    path = save(tmp_path / "linen", tree)
    error = refused(reshard.to_nnx, path, map_file=map_of(tmp_path, ("^params/a$", "a")))
    assert error.problems == (
        "params/b: no rule of the map applies to it",
        "batch_stats/c: no rule of the map applies to it",
        "other  float32[1]: unexpected",
    )
    assert error.hints[0] == "model=... pairs the leaves that no rule names"


# Layouts and optimizers


OPTIMIZERS = OPTIMIZERS | RESHAPING
# In the default run: each form of a state.
FORMS = ["sgd", "chain", "MultiSteps", "inject_hyperparams", "masked", "multi_transform"]
FORMS += ["lbfgs", "some adafactor"]


@pytest.mark.parametrize("name", few(OPTIMIZERS, *FORMS))
def test_every_optimizer_comes_along(name, tmp_path):
    """Of a module alone, too, below `model` and `optimizer`. `lbfgs` keeps a copy of the
    parameters, called `params`, which is no collection."""
    tx = OPTIMIZERS[name]
    linen = state(tx)
    source = save(tmp_path / "linen", linen)
    ckpt = reshard.to_nnx(source, lambda: training(tx), init=RANDOM)
    reshard.save(ckpt, tmp_path / "nnx")
    assert by_path(load(tmp_path / "nnx")) == moved(linen, drawn())
    alone = reshard.to_nnx(source, twin, init=RANDOM)
    assert reshard.diff(alone, tmp_path / "nnx", values=True).equal
    # Orbax and Flax alone: what they load for their own optimizer, they save again.
    loaded = load(tmp_path / "nnx", saved_by_nnx(training(tx, seed=5)))
    save(tmp_path / "again", loaded)
    assert by_path(load(tmp_path / "again")) == moved(linen, drawn())
    layouts.assert_same_tree(restored(reshard.to_linen(tmp_path / "nnx"), tmp_path), load(source))
    if name in ("adamw", "MultiSteps", "multi_transform", "lbfgs", "some adafactor"):
        back = reshard.to_linen(tmp_path / "again", linen, **BACK)
        layouts.assert_same_tree(restored(back, tmp_path), load(source))


@pytest.mark.parametrize("name", ["optimizer", "opt"])
@pytest.mark.every_combination
def test_a_module_may_hold_the_model_and_its_optimizer(name, tmp_path):
    linen = state(ADAM)
    source = save(tmp_path / "linen", linen)
    ckpt = reshard.to_nnx(source, lambda: Trainer(ADAM, name), init=RANDOM)
    assert not any("no optimizer" in note for note in ckpt.notes)
    expected = moved(linen, drawn()).items()
    made = restored(ckpt, tmp_path)
    assert by_path(made) == {re.sub("^optimizer/", f"{name}/", path): x for path, x in expected}
    own = nnx.state(Trainer(ADAM, name, seed=5))
    again = save(tmp_path / "again", load(save(tmp_path / "own", made), own))
    back = reshard.to_linen(again, linen, source=lambda: Trainer(ADAM, name), drop=BACK["drop"])
    layouts.assert_same_tree(restored(back, tmp_path), load(source))


def listed(path):
    """The leaves that `_METADATA` lists, in order."""
    return list(json.loads((path / "_METADATA").read_text())["tree_metadata"])


def test_leaves_are_listed_as_orbax_lists_them(tmp_path):
    """Empty states in their places among others: older Orbax reads lists position by position."""
    tx = optax.chain(optax.clip(1.0), OPTIMIZERS["masked"], optax.scale(-1.0))
    linen = save(tmp_path / "linen", state(tx))
    nnx_own = save(tmp_path / "nnx_own", saved_by_nnx(training(tx)))
    reshard.save(reshard.to_nnx(linen, lambda: training(tx), init=RANDOM), tmp_path / "nnx")
    assert listed(tmp_path / "nnx") == listed(nnx_own)
    reshard.save(reshard.to_linen(tmp_path / "nnx"), tmp_path / "recorded")
    assert listed(tmp_path / "recorded") == listed(linen)
    reshard.save(reshard.to_linen(nnx_own, train(tx), **BACK), tmp_path / "back")
    assert listed(tmp_path / "back") == listed(linen)


def test_text_in_the_state_of_an_optimizer_is_no_masked_leaf(tmp_path):
    linen = state(MOMENTUM)
    moments = {"trace": linen.opt_state[0].trace, "schedule": "cosine"}
    tree = {"params": linen.params, "batch_stats": linen.batch_stats, "opt_state": moments}
    source = save_any(tmp_path / "linen", tree)
    problems = refused(reshard.to_nnx, source, twin, init=RANDOM).problems
    assert problems == ("opt_state/schedule  'cosine': unexpected",)
    ckpt = reshard.to_nnx(source, twin, init=RANDOM, drop="opt_state/schedule")
    assert "optimizer/opt_state/trace/first/kernel/value" in map(format_path, ckpt)


@pytest.mark.parametrize("map_drops", [False, True])
@pytest.mark.parametrize("tx", [ADAM, optax.novograd(1e-3)], ids=["adam", "novograd"])
def test_moments_go_where_their_parameters_do(tx, map_drops, tmp_path):
    """Of parameters that are dropped or keep their initial value, one of which is called as the
    optimizer's counter is."""
    linen = train_state_of({"a": some(4, 6), "count": some(3), "c": some(5)}, tx)
    source = save(tmp_path / "linen", linen)

    def model():
        made = beside_optimizer(tx, a=(4, 6), c=(5,), x=(2,), y=(2, 2))
        made["optimizer"].opt_state[0].mu["x"][...] = jnp.float32([7, 8])
        return made

    rules = [("^params/a$", "a"), ("^params/c$", "c")]
    rules += ["from = '^params/count$', drop = true"] * map_drops
    options = {} if map_drops else {"drop": "params/count"}
    made = conversion(
        source, "nnx", model, map_file=map_of(tmp_path, *rules), init=["x", "y"], **options
    )
    assert made.checkpoint.notes == (
        "2 leaves of optimizer state are dropped with their parameters: params/count",
        "4 leaves of optimizer state keep the model's own initial values with their parameters: "
        "x and y",
    )
    expected = trained(linen, lambda tree: {key: tree[key] for key in "ac"})
    own = by_path(load(save(tmp_path / "own", saved_by_nnx(model()))))
    expected |= {path: leaf for path, leaf in own.items() if re.search("/[xy]/value$", path)}
    reshard.save(made.checkpoint, tmp_path / "nnx")
    assert by_path(load(tmp_path / "nnx")) == expected
    assert (made.initial, made.dropped) == ((("x",), ("y",)), (("params", "count"),))
    # What is written as a map does the same.
    (tmp_path / "whole.toml").write_text(made.map_text())
    again = conversion(source, "nnx", model, map_file=tmp_path / "whole.toml")
    assert by_path(restored(again.checkpoint, tmp_path)) == expected
    back = by_path(restored(reshard.to_linen(tmp_path / "nnx"), tmp_path))
    gone = {"params/count", "opt_state/0/mu/count", "opt_state/0/nu/count"}
    assert back == {path: leaf for path, leaf in by_path(load(source)).items() if path not in gone}


def test_a_moment_with_a_source_does_not_keep_its_initial_value(tmp_path):
    """Its parameter is not in the checkpoint: then nothing says whose it is."""
    linen = train_state_of({"a": some(3), "x": some(2)}, MOMENTUM)
    tree = {"params": {"a": linen.params["a"]}, "opt_state": linen.opt_state, "step": linen.step}
    source = save(tmp_path / "linen", tree)
    model = functools.partial(beside_optimizer, MOMENTUM, a=(3,), x=(2,))
    error = refused(reshard.to_nnx, source, model, init="x")
    assert error.problems == (f"opt_state/0/trace/x: float32[2] {OF_NO_PARAMETER}",)
    assert error.hints == (RESET,)


class Averaged(TrainState):
    ema_params: dict


def averaged(tx, boxed=False):
    """A train state with an average of the parameters, random."""
    state = train(tx, boxed)
    return filled(Averaged(**vars(state), ema_params=state.params), seed=3)


FOLLOWS = "`ema_params` follows the parameters: 6 leaves"


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("goal", ["alone", "beside", "whole"])
def test_a_copy_of_the_parameters_follows_them(goal, boxed, tmp_path):
    """As in a stack, and it is told."""
    linen = averaged(MOMENTUM, boxed)
    source = save(tmp_path / "linen", linen)
    model = {
        "alone": twin,
        "beside": lambda: training(MOMENTUM),
        "whole": lambda: {**training(MOMENTUM), "ema_params": nnx.state(twin(), nnx.Param)},
    }[goal]
    ckpt = reshard.to_nnx(source, model, init=RANDOM)
    unchecked = "" if goal == "whole" else ", unchecked"
    assert f"{FOLLOWS}{unchecked}" in ckpt.notes
    reshard.save(ckpt, tmp_path / "nnx")
    got = by_path(load(tmp_path / "nnx"))
    assert got == moved(linen, drawn())
    layouts.assert_same_tree(restored(reshard.to_linen(tmp_path / "nnx"), tmp_path), load(source))
    again = save(tmp_path / "again", load(tmp_path / "nnx"))
    back = reshard.to_linen(again, linen, source=model, drop=BACK["drop"])
    assert FOLLOWS in back.notes
    layouts.assert_same_tree(restored(back, tmp_path), load(source))


def test_a_copy_of_the_parameters_follows_operations_and_dropped_ones(tmp_path):
    params, ema = ({"a": some(4, 6, seed=i), "b": some(3, seed=i)} for i in range(2))
    source = save(tmp_path / "linen", {"params": params, "ema_params": ema})
    rules = [
        "from = '^params/a$', to = 'x', transpose = [1, 0]",
        "from = '^params/b$', drop = true",
    ]
    ckpt = reshard.to_nnx(source, named(x=(6, 4)), map_file=map_of(tmp_path, *rules))
    expected = {"model": {"x": params["a"].T}, "ema_params": {"x": ema["a"].T}}
    assert by_path(restored(ckpt, tmp_path)) == held(expected)


@pytest.mark.parametrize(
    ("more", "goal", "expected"),
    [
        ({"a": (4,), "b": (6,)}, {}, ["a", "b"]),
        ({"a": (4,), "b": (5,), "decay": (2,)}, {}, ["a", "b", "decay"]),
        ({"a": (4,), "b": (5,)}, {"a": (4,)}, ["b"]),
    ],
    ids=["another shape", "more beside", "no place in the model"],
)
def test_what_is_no_copy_of_the_parameters_is_told(more, goal, expected, tmp_path):
    linen = train_state_of({"a": some(4), "b": some(5)}, SGD)
    tree = {"params": linen.params, "step": linen.step, "opt_state": linen.opt_state}
    ema = {name: some(*shape) for name, shape in more.items()}
    source = save(tmp_path / "linen", {**tree, "ema_params": ema})

    def model():
        average = {"ema_params": nnx.state(named(**goal), nnx.Param)} if goal else {}
        return beside_optimizer(SGD, a=(4,), b=(5,)) | average

    told = refusal(reshard.to_nnx, source, model)
    assert re.findall(r"  ema_params/(\w+)  .*: unexpected", told) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_tree_with_other_layers_is_no_copy_of_the_parameters(count, tmp_path):
    """A copy may lack parameters, such as biases, but no layer: in Linen it is a collection."""
    sizes = {"w": 4, "b": 2}
    shapes = {f"{leaf}_{i}": (sizes[leaf],) for i in range(4) for leaf in sizes}
    layers = {name: some(*shape) for name, shape in shapes.items()}
    params, other = ({name: layers[name] for name in [*layers][: 2 * n]} for n in (3, count))
    linen = train_state_of(params, SGD)
    tree = {"params": params, "step": linen.step, "opt_state": linen.opt_state}
    forth = save(tmp_path / "linen", {**tree, "disc_params": other})
    model = functools.partial(beside_optimizer, SGD, **{name: shapes[name] for name in params})
    kernels = {name: leaf for name, leaf in params.items() if name[0] == "w"}
    state = {"model": params, "disc_params": other, "ema_params": kernels}
    back = save(tmp_path / "nnx", jax.tree.map(lambda leaf: {"value": leaf}, state))
    to_linen = functools.partial(reshard.to_linen, layout="nnx-model")
    if count == 3:
        tops = {"model", "optimizer", "disc_params"}
        assert {path[0] for path in reshard.to_nnx(forth, model)} == tops
        found = by_path(restored(to_linen(back, lambda: {"params": params}), tmp_path))
        assert found == by_path({"params": params, "disc_params": other, "ema_params": kernels})
        return
    error = refused(reshard.to_nnx, forth, model)
    assert any(text.startswith("disc_params/b_0") for text in error.problems)
    error = refused(to_linen, back, lambda: {"params": params})
    assert error.problems == tuple(
        f"disc_params/{name}/value  float32[{sizes[name[0]]}]: unexpected" for name in sorted(other)
    )


def test_numbers_that_may_be_of_parameters_or_not_are_told(tmp_path):
    """From NNX all variables may be parameters, and only two of these three have a number."""
    numbered = optax.GradientTransformation(
        lambda params: {"trust": jax.tree.map(lambda _: jnp.zeros(()), params)},
        lambda updates, state, params=None: (updates, state),
    )
    made = beside_optimizer(numbered, a=(4, 6), b=(3,))
    made["model"].c = nnx.BatchStat(jnp.ones(2))
    source = save(tmp_path / "nnx", saved_by_nnx(made))
    params = {"a": some(3), "b": some(4, 6)}
    linen = TrainState(jnp.int32(1), None, params, numbered, numbered.init(params), {"c": some(2)})
    file = map_of(tmp_path, ("^a$", "params/b"), ("^b$", "params/a"), ("^c$", "batch_stats/c"))
    error = refused(reshard.to_linen, source, linen, map_file=file)
    assert error.problems == tuple(
        f"opt_state/trust/{name}: it may be a number of parameter {name}, or one of the "
        "optimizer's own"
        for name in "ab"
    )
    assert error.hints == (RESET_IN_LINEN,)


FLAT = optax.chain(optax.flatten(optax.adam(1e-3)), optax.scale(-1.0))


def assert_flat_refused(size, hint, *arguments, **options):
    """A conversion is refused, because of moments in vectors of this size."""
    error = refused(*arguments, **options)
    assert error.problems == tuple(
        f"opt_state/0/0/{moment}: float32[{size}] {OF_NO_PARAMETER}" for moment in ("mu", "nu")
    )
    assert error.hints == (hint,)


def test_moments_in_one_vector_are_refused_where_parameters_change_their_order(tmp_path):
    source = save(tmp_path / "linen", state(FLAT))
    for model, hint in (twin, LEFT_OUT), (lambda: training(FLAT), RESET):
        assert_flat_refused(56, hint, reshard.to_nnx, source, model, init=RANDOM)
    source = save(tmp_path / "nnx", saved_by_nnx(training(FLAT)))
    assert_flat_refused(56, RESET_IN_LINEN, reshard.to_linen, source, train(FLAT), **BACK)
    # NNX sorts positions in a list as numbers, and Linen sorts names.
    linen = train_state_of({f"layers_{i}": some(3, seed=i) for i in range(11)}, FLAT)
    source = save(tmp_path / "layers", linen)
    model = Of(layers=nnx.List([nnx.Param(jnp.zeros(3)) for _ in range(11)]))
    file = map_of(tmp_path, (r"^params/layers_(\d+)$", r"layers/\1"))
    assert_flat_refused(33, LEFT_OUT, reshard.to_nnx, source, model, map_file=file)


def test_moments_in_one_vector_are_refused_where_a_parameter_is_dropped(tmp_path):
    linen = train_state_of({"a": some(3), "b": some(4, 6), "c": some(5)}, FLAT)
    source, model = save(tmp_path / "linen", linen), functools.partial(named, a=(3,), c=(5,))
    rules = [("^params/a$", "a"), ("^params/c$", "c")]
    for more, drop in (["from = '^params/b$', drop = true"], ()), ([], "params/b"):
        options = {"map_file": map_of(tmp_path, *rules, *more), "drop": drop}
        assert_flat_refused(32, LEFT_OUT, reshard.to_nnx, source, model, **options)


def streams(name, draw=nnx.Rngs, optimizer=True):
    """Two parameters and a state of random numbers, beside an optimizer."""
    model = named(x=(3,), y=(4, 6))
    setattr(model, name, draw(5))
    return with_optimizer(model, FLAT) if optimizer else model


STREAMS = {
    "Rngs": nnx.Rngs,
    "two streams": lambda seed: nnx.Rngs(params=seed, dropout=jax.random.key(seed)),
    "stream": lambda seed: nnx.Rngs(seed).params,
    "dropout": lambda seed: Of(inner=nnx.Dropout(0.5, rngs=nnx.Rngs(seed))),
    "layers": lambda seed: nnx.Rngs(seed).fork(split=3),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", ["rngs", "keys", "a0"])
def test_random_state_is_no_parameter_by_whatever_name(name, stream, tmp_path):
    """So moments in one vector stay where parameters keep their order, behind other names: whether
    random state is initialised, dropped, or dropped by a map, and whether its model is known."""
    linen = train_state_of({"a": some(3), "b": some(4, 6)}, FLAT)
    source = save(tmp_path / "linen", linen)
    make = functools.partial(streams, name, STREAMS[stream])
    rules = ("^params/a$", "x"), ("^params/b$", "y")
    file = map_of(tmp_path, *rules)
    ckpt = reshard.to_nnx(source, make, map_file=file, init=f"**/{name}/**")
    made = restored(ckpt, tmp_path)
    for moment in ("mu", "nu"):
        before = getattr(linen.opt_state[0][0], moment)
        after = by_path(made)[f"optimizer/opt_state/0/0/{moment}/value"]
        assert after == layouts.bits(before)
    saved = save(tmp_path / "saved", made)  # less the record
    back = (r"^x$", "params/a"), (r"^y$", "params/b")
    (tmp_path / "drop").mkdir()
    files = (
        map_of(tmp_path, *back),
        map_of(tmp_path / "drop", *back, rf"from = '^{name}/', drop = true"),
    )
    for known in ({}, {"source": make}):
        for how in ({"map_file": files[0], "drop": f"model/{name}/**"}, {"map_file": files[1]}):
            again = reshard.to_linen(saved, linen, **how, **known)
            layouts.assert_same_tree(restored(again, tmp_path), load(source))


def test_parameters_called_as_random_state_are_parameters(tmp_path):
    """Their moments are in the vector, which is another one without them."""
    make = functools.partial(streams, "rngs", lambda seed: Of(count=nnx.Param(jnp.zeros(5))))
    source = save(tmp_path / "nnx", saved_by_nnx(make()))
    linen = train_state_of({"x": some(3), "y": some(4, 6)}, FLAT)
    for known in ({}, {"source": make}):
        options = {"drop": "model/rngs/**", **known}
        assert_flat_refused(32, RESET_IN_LINEN, reshard.to_linen, source, linen, **options)
    source = save(tmp_path / "linen", linen)
    for model, hint in (make, RESET), (functools.partial(make, optimizer=False), LEFT_OUT):
        assert_flat_refused(27, hint, reshard.to_nnx, source, model, init="**/rngs/**")


def test_a_map_alone_has_no_place_for_an_optimizer_of_linens(tmp_path):
    """Which containers it has, and which of them are empty, only the model says."""
    source = save(tmp_path / "nnx", saved_by_nnx(beside_optimizer(MOMENTUM, a=(3,))))
    error = refused(reshard.to_linen, source, map_file=map_of(tmp_path, ("^a$", "params/x/a")))
    assert error.problems == (
        "opt_state/0/trace/params/x/a: unexpected",
        "step  uint32[]: unexpected",
    )
    assert error.hints[0] == "model=..., the `TrainState`, has places for an optimizer"


# As users have it, and what Orbax says it is.
STEPS = {
    "int": 7,
    "numpy": np.int32(7),
    "numpy int64": np.int64(7),
    "array": np.asarray(7),
    "int32": jnp.int32(7),
    "uint32": jnp.uint32(7),
    "int16": jnp.int16(7),
}


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("step", few(STEPS, "int", "numpy int64", "uint32", "int16"))
def test_steps_and_host_values(step, host, tmp_path):
    """NNX counts in uint32. Linen's counter, and what was on the host, comes back as it was."""
    linen = state(SGD, step=STEPS[step])
    linen = jax.device_get(linen) if host else linen
    source = save_any(tmp_path / "linen", linen)
    ckpt = reshard.to_nnx(source, lambda: training(SGD), init=RANDOM)
    reshard.save(ckpt, tmp_path / "nnx")
    kind = np.ndarray if host else jax.Array
    got, expected = by_path(load(tmp_path / "nnx")), moved(linen, drawn())
    key = got.pop("model/drop/rngs/key/value")
    assert key == expected.pop("model/drop/rngs/key/value")
    assert got == {path: (kind, *leaf[1:]) for path, leaf in expected.items()}
    back = restored(reshard.to_mesh(reshard.to_linen(tmp_path / "nnx"), "data=2"), tmp_path)
    layouts.assert_same_tree(back, load(source))


def test_the_step_must_fit(tmp_path):
    def path(number):
        return save_any(tmp_path / f"{number}", state(SGD, step=np.int64(number)))

    for number in (-1, 1 << 32):
        told = refusal(reshard.to_nnx, path(number), twin, init=RANDOM)
        assert told == f"optimizer/step/value: the step {number} does not fit uint32"
    reshard.save(reshard.to_nnx(path((1 << 32) - 1), twin, init=RANDOM), tmp_path / "nnx")
    assert int(load(tmp_path / "nnx")["optimizer"]["step"]["value"]) == (1 << 32) - 1
    told = refusal(reshard.to_linen, tmp_path / "nnx", state(SGD), **BACK)
    assert told == "step: the step 4294967295 does not fit int32"


def maxtext(linen):
    """As MaxText has it, all variables below `params`."""
    params = {"params": linen.params, "batch_stats": linen.batch_stats}
    mask = {"params": True, "batch_stats": False}
    return train_state_of(params, optax.masked(ADAM, mask))


def test_what_a_map_renames_is_as_open_as_its_new_name(tmp_path):
    source = save(tmp_path / "linen", {"params": {"old_a": some(3), "old_b": some(3)}})
    rules = map_of(tmp_path, ("^params/old_(.)$", r"params/new_\1"))
    model = functools.partial(named, x=(3,), y=(3,))
    told = refused(reshard.to_nnx, source, model, map_file=rules)
    text = "params/new_a and params/new_b, perhaps x and y: "
    text += "ambiguous: neither names nor classes decide"
    assert told.problems == (text,)
    assert {(row.before, row.after): (row.origin, row.problem) for row in told.outcomes} == {
        ((("params", "old_a"),), None): ("ambiguous", text),
        ((("params", "old_b"),), None): ("ambiguous", text),
        ((), ("x", "value")): ("ambiguous", text),
        ((), ("y", "value")): ("ambiguous", text),
    }


def nested(shapes):
    """An NNX model of the modules and parameters in nested dicts."""
    return Of(
        **{
            name: nested(inner) if isinstance(inner, dict) else nnx.Param(jnp.zeros(*inner))
            for name, inner in shapes.items()
        }
    )


def verdicts(error):
    """The printed path of each undecided leaf, before or after -> the verdict and the problem."""
    return {
        format_path(path): (row.origin, row.problem)
        for row in error.outcomes
        if row.origin in UNDECIDED
        for path in (*row.before, *filter(None, [row.after]))
    }


def test_a_leaf_is_not_ambiguous_because_another_path_ends_like_it(tmp_path):
    params = {"q": {"kernel": some(3, 4)}, "a": {"c": {"kernel": some(5, 6)}}}
    source = save(tmp_path / "linen", {"params": params})
    kernel, other = {"kernel": ((3, 4),)}, {"kernel": ((7, 8),)}
    inner = {"b": other, "c": {"kernel": ((5, 6),)}}
    error = refused(reshard.to_nnx, source, functools.partial(nested, {"b": kernel, "a": inner}))
    text = "q, perhaps b: ambiguous: neither names nor classes decide"
    assert error.problems == (text, "a/b/kernel  float32[7, 8]: missing")
    assert verdicts(error) == {
        "params/q/kernel": ("ambiguous", text),
        "b/kernel/value": ("ambiguous", text),
        "a/b/kernel/value": ("missing", ""),
    }


def test_an_open_leaf_has_no_place_at_its_own_path_in_the_other_model(tmp_path):
    source = save(tmp_path / "linen", {"params": {"q": {"kernel": some(3, 4)}}})
    model = functools.partial(nested, {"params": {"q": {"kernel": ((3, 4),)}}})
    error = refused(reshard.to_nnx, source, model)
    (text,) = error.problems
    assert text == "q, perhaps params: ambiguous: neither names nor classes decide"
    leaves = ("params/q/kernel", "params/q/kernel/value")
    assert verdicts(error) == dict.fromkeys(leaves, ("ambiguous", text))


def test_leaves_of_several_dtypes_that_a_rule_joins_are_undecided(tmp_path):
    parts = {"q": some(3, 4), "r": some(3, 4, dtype="bfloat16"), "s": some(2)}
    source = save(tmp_path / "linen", {"params": parts})
    joined = "from = ['^params/q$', '^params/r$'], to = 'b', concat = { axis = 0 }"
    model = functools.partial(named, b=(6, 4), s=(2,))
    error = refused(reshard.to_nnx, source, model, map_file=map_of(tmp_path, joined))
    text = "params/q and params/r: float32 and bfloat16 cannot be combined"
    assert error.problems == (text,)
    leaves = ("params/q", "params/r", "b/value")
    assert verdicts(error) == dict.fromkeys(leaves, ("mismatch", text))


def test_a_leaf_that_init_names_and_a_rule_makes_is_undecided(tmp_path):
    source = save(tmp_path / "linen", {"params": {"q": some(3, 4), "r": some(2)}})
    rules = map_of(tmp_path, ("^params/q$", "x"))
    model = functools.partial(named, x=(3, 4), r=(2,))
    error = refused(reshard.to_nnx, source, model, map_file=rules, init="x")
    text = "x: `init` names it, but the checkpoint has it"
    assert error.problems == (text,)
    leaves = ("params/q", "x/value")
    assert verdicts(error) == dict.fromkeys(leaves, ("ambiguous", text))


def test_a_leaf_that_no_rule_of_a_map_alone_names_is_undecided(tmp_path):
    source = save(tmp_path / "linen", {"params": {"q": some(3, 4), "r": some(2)}})
    error = refused(reshard.to_nnx, source, map_file=map_of(tmp_path, ("^params/q$", "x")))
    text = "params/r: no rule of the map applies to it"
    assert error.problems == (text,)
    assert verdicts(error) == {"params/r": ("unexpected", text)}


NAMES_OF_MODULES = st.sampled_from(["a", "b", "c", "params", "Dense_0"])
LEAVES_OF_MODULES = st.dictionaries(
    st.sampled_from(["kernel", "bias", "w"]),
    st.tuples(st.sampled_from([(3,), (4,), (3, 4)]), st.sampled_from(["float32", "bfloat16"])),
    min_size=1,
    max_size=2,
)
MODELS = st.recursive(
    LEAVES_OF_MODULES,
    lambda inner: st.dictionaries(NAMES_OF_MODULES, inner, min_size=1, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def saved_pair(tmp_path_factory):
    """A checkpoint whose leaves are to be replaced."""
    return reshard.open(save(tmp_path_factory.mktemp("pair") / "saved", {"a": some(1)}))


@given(
    linen=st.dictionaries(NAMES_OF_MODULES, MODELS, min_size=1),
    model=st.dictionaries(NAMES_OF_MODULES, MODELS, min_size=1),
    statistics=LEAVES_OF_MODULES,
    tx=st.sampled_from([None, ADAM, SGD]),
    average=st.booleans(),
    init=st.sampled_from([(), "**/kernel", "a"]),
    mapped=st.sampled_from([(), ("^params/a/", "b/"), ("^params/a/", "params/c/"), ("w$", "v")]),
    back=st.booleans(),
)
@settings(deadline=None, max_examples=examples(150))
def test_each_problem_has_a_leaf_and_each_undecided_leaf_a_problem(
    linen, model, statistics, tx, average, init, mapped, back, saved_pair
):
    def zeros(shapes):
        return jax.tree.map(lambda x: jnp.zeros(*x), shapes, is_leaf=lambda x: type(x) is tuple)

    tree = {"params": zeros(linen), "batch_stats": {"a": zeros(statistics)}}
    if tx:
        tree = {"params": zeros(linen), "opt_state": tx.init(zeros(linen)), "step": jnp.int32(3)}
        tree |= {"ema": zeros(linen)} if average else {}
    whole = lambda: with_optimizer(nested(model), tx) if tx else nested(model)  # noqa: E731
    call, source, target = reshard.to_nnx, tree, whole
    if back:
        call, target = reshard.to_linen, tree
        source = saved_by_nnx(whole()) if tx else nnx.state(whole())
    folder = pathlib.Path(saved_pair.source.root).parent
    options = {"map_file": map_of(folder, mapped)} if mapped else {}
    like = next(iter(saved_pair.arrays))
    leaves = {
        path: constant(path, np.asarray(leaf.value), like) if hasattr(leaf, "value") else leaf
        for path, leaf in saved_tree(source).items()
    }
    try:
        call(saved_pair.replace(leaves), target, init=init, **options)
    except reshard.TreeMismatchError as error:
        if error.outcomes:  # otherwise nothing was decided
            assert_verdicts_are_the_problems(error)


def assert_verdicts_are_the_problems(error):
    """Optimizer state is undecided with its parameter, without a problem of its own."""
    undecided = verdicts(error)
    names = {
        path: re.sub("^(model/|optimizer/|params/(?=params/))|/value$", "", path)
        for path in undecided
    }
    for path, (_, problem) in undecided.items():
        own = problem in error.problems if problem else names[path] in " ".join(error.problems)
        assert own or "opt_state" in path or path.startswith("ema/"), path
    for problem in error.problems:
        assert any(
            problem == text or any(name in problem for name in (path, names[path]))
            for path, (_, text) in undecided.items()
        ), problem


class Value(nn.Module):
    """A module whose only parameter is called `value`."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("value", nn.initializers.ones, (4,))


@pytest.mark.parametrize("name", ["scale", "bias", "v"])
@pytest.mark.parametrize("tx", [None, ADAM])
def test_a_parameter_called_value_is_no_box(name, tx, tmp_path):
    """The types of the model show it, whatever the name of its module."""
    linen = Compact(lambda x: nn.Dense(4, name="z")(Value(name=name)(x)))
    params = jax.eval_shape(linen.init, jax.random.key(0), INPUTS)["params"]
    model = nested({name: {"value": ((4,),)}, "z": {"kernel": ((4, 4),), "bias": ((4,),)}})
    made = with_optimizer(model, tx) if tx else model
    source = filled(saved_by_nnx(made) if tx else nnx.state(model))
    goal = jax.eval_shape(functools.partial(train_state_of, tx=tx), params) if tx else params
    goal = goal if tx else {"params": params}
    ckpt = reshard.to_linen(save(tmp_path / "nnx", source), goal, check=False)
    expected = nnx.to_pure_dict(source["model"] if tx else source)
    assert by_path(restored(ckpt, tmp_path)["params"]) == by_path(expected)
    if tx:
        moments = nnx.to_pure_dict(source["optimizer"])["opt_state"][0]["mu"]
        assert by_path(restored(ckpt, tmp_path)["opt_state"][0]["mu"]) == by_path(moments)


def test_outputs_of_a_model_with_a_parameter_called_value(tmp_path):
    linen = Compact(lambda x: Value(name="scale")(x))

    class Scaling(nnx.Module):
        def __init__(self):
            self.scale = named(value=(4,))

        def __call__(self, x):
            return x * self.scale.value

    source = save(tmp_path / "nnx", filled(nnx.state(Scaling()), bits=False))
    run = {"linen": lambda: linen.init(jax.random.key(0), INPUTS), "nnx": Scaling}
    ckpt = reshard.to_linen(source, run["linen"], source=Scaling, check=True)
    assert any("outputs" in note for note in ckpt.notes)


def test_a_pure_dict_with_parameters_called_value_has_no_variables(tmp_path):
    """Which its leaves alone would not show: `scale` is a name of Flax's."""
    params = {"s": some(4), "w": some(3)}
    source = save(tmp_path / "linen", {"params": params})
    model = nnx.to_pure_dict(nnx.state(nested({"scale": {"value": ((4,),)}, "w": ((3,),)})))
    rules = map_of(tmp_path, ("^params/s$", "scale/value"), ("^params/w$", "w"))
    ckpt = reshard.to_nnx(source, model, map_file=rules)
    expected = {"scale": {"value": params["s"]}, "w": params["w"]}
    assert by_path(restored(ckpt, tmp_path)) == by_path(expected)


KEY = jax.random.key(3)


def with_random_state(key=KEY):
    """As MaxText's runs of NNX have it, with what only NNX has below `nnx_aux`."""
    stream, made = {"key": key, "count": jnp.uint32(5)}, state(ADAM)
    linen = train_state_of({"params": made.params}, ADAM)
    tree = {"params": linen.params, "opt_state": linen.opt_state, "step": linen.step}
    aux = {"model": {"drop": {"rngs": stream}}}
    return tree | {"batch_stats": made.batch_stats, "nnx_aux": aux}


def test_random_state_of_nnx_in_a_linen_layout_goes_to_its_place_and_back(tmp_path):
    tree = with_random_state()
    source = save(tmp_path / "linen", tree)
    ckpt = reshard.to_nnx(source, lambda: training(ADAM))
    made = restored(ckpt, tmp_path)
    rngs = made["model"]["drop"]["rngs"]
    assert rngs["count"]["value"] == 5
    assert jnp.array_equal(rngs["key"]["value"], KEY)
    again = save(tmp_path / "again", made)
    back = reshard.to_linen(again, lambda: tree, source=Twin)
    layouts.assert_same_tree(restored(back, tmp_path), load(source))


def test_another_kind_of_keys_is_told_with_all_else(tmp_path):
    source = save(tmp_path / "linen", with_random_state(jnp.zeros(2, "uint32")) | {"more": some(2)})
    told = refused(reshard.to_nnx, source, lambda: training(ADAM))
    assert told.problems == (
        "more  float32[2]: unexpected",
        "nnx_aux/model/drop/rngs/key -> drop/rngs/key: uint32[2], the model has "
        "threefry2x32 keys[]",
    )


TREES = {
    "variables": lambda: filled(variables()),
    "boxed variables": lambda: filled(variables(boxed=True)),
    "frozen variables": lambda: flax.core.freeze(filled(variables(boxed=True))),
    "state": lambda: state(ADAM),
    "boxed state": lambda: state(OPTIMIZERS["masked"], boxed=True),
    "frozen state": lambda: state(ADAM).replace(params=flax.core.freeze(state(ADAM).params)),
    "maxtext": lambda: maxtext(state(ADAM)),
    "boxed maxtext": lambda: maxtext(state(ADAM, boxed=True)),
}


@pytest.mark.parametrize(
    "name", few(TREES, "variables", "boxed state", "frozen state", "boxed maxtext")
)
def test_linen_trees_come_back_as_they_were(name, tmp_path):
    """Boxes, empty containers and the user's own metadata, too; through another mesh."""
    tree = TREES[name]()
    source = save_described(tmp_path / "linen", tree)
    reshard.save(reshard.to_nnx(source, twin, init=RANDOM), tmp_path / "nnx")
    assert by_path(load(tmp_path / "nnx")) == moved(tree, drawn())
    elsewhere = reshard.to_mesh(reshard.open(tmp_path / "nnx"), "data=2,model=4")
    reshard.save(elsewhere, tmp_path / "elsewhere")
    whole, own = described(tmp_path / "elsewhere")
    assert own.pop("reshard.order") == {
        "leaves": 8,
        "modules": [["BatchNorm_0", "norm"], ["Dense_0", "first"], ["Dense_1", "second"]],
    }
    assert own.pop("reshard.linen") and (whole, own) == described(source)
    reshard.save(reshard.to_linen(tmp_path / "elsewhere"), tmp_path / "back")
    layouts.assert_same_tree(load(tmp_path / "back"), load(source))
    layouts.assert_same_tree(reshard.restore(tmp_path / "back", tree), tree)
    assert described(tmp_path / "back") == ({"of": "the checkpoint"}, CUSTOM)


def save_as(kind, path, tree):
    """In one of Orbax's formats."""
    if kind == "v1":
        v1.save(path, tree)
        return path
    options = PyTreeMetadataOptions(support_rich_types=kind == "rich")
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt="files" not in kind, use_zarr3="zarr3" in kind, pytree_metadata_options=options
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree)
    return path


@pytest.mark.parametrize("kind", ["zarr2 files", "zarr3", "zarr3 files", "rich", "v1"])
def test_every_format_comes_back_as_it_was(kind, tmp_path):
    """Its record of the types of containers, too, where it has one."""
    linen = state(OPTIMIZERS["chain"])
    source = save_as(kind, tmp_path / "linen", linen)
    reshard.save(reshard.to_nnx(source, twin, init=RANDOM), tmp_path / "nnx")
    reshard.save(reshard.to_linen(tmp_path / "nnx"), tmp_path / "back")
    read = v1.load if kind == "v1" else load_any
    assert by_path(read(tmp_path / "nnx")) == moved(linen, drawn())
    layouts.assert_same_tree(read(tmp_path / "back"), read(source))


GOALS = {
    "state": twin,
    "model": lambda: {"model": twin()},
    "training": lambda: training(ADAM),
    "ModelAndOptimizer": lambda: nnx.ModelAndOptimizer(twin(), ADAM, wrt=nnx.Param),
}


@pytest.mark.parametrize("name", GOALS)
def test_nnx_trees_come_back_from_linen(name, tmp_path):
    """By the models of both sides. Streams of random numbers are those of the model."""
    made = GOALS[name]()
    fresh = saved_by_nnx(made) if isinstance(made, dict) else nnx.state(made)
    tree = filled(fresh)
    source = save(tmp_path / "nnx", tree)
    trained = "optimizer" in tree or "opt_state" in tree
    model = filled(train(ADAM) if trained else variables())
    ckpt = reshard.to_linen(source, model, source=GOALS[name], drop=RANDOM)
    linen = save(tmp_path / "linen", reshard.restore(ckpt, model))
    layouts.assert_same_tree(restored(ckpt, tmp_path), load(linen))
    expected = by_path(load(source))
    random = by_path(load(save(tmp_path / "model", fresh)))
    expected |= {path: leaf for path, leaf in random.items() if "/rngs/" in path}
    assert by_path(restored(reshard.to_nnx(linen, GOALS[name], init=RANDOM), tmp_path)) == expected


def test_what_orbax_saves_again_has_lost_the_record(tmp_path):
    source = save(tmp_path / "linen", state(ADAM))
    reshard.save(reshard.to_nnx(source, twin, init=RANDOM), tmp_path / "nnx")
    again = save(tmp_path / "again", load(tmp_path / "nnx", saved_by_nnx(training(ADAM))))
    message = f"""\
`{again}` has no record of a conversion from Linen: it was not made by one, or was trained and \
saved since then

hint: model=..., the Linen model; source=... supplies the classes of the NNX model
hint: map_file=..., the map of the conversion to NNX"""
    assert refusal(reshard.to_linen, again) == message
    known = message.replace("; source=... supplies the classes of the NNX model", "")
    assert refusal(reshard.to_linen, again, source=Twin) == known


class Exact(nnx.Module):
    """Its attributes have the names of the Linen tree: no class and no order is needed."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 5, rngs=rngs), nnx.Param(jnp.zeros(2))


def exact():
    return Exact(nnx.Rngs(1))


def exact_params():
    return {"a": {"kernel": some(4, 5), "bias": some(5)}, "b": some(2)}


MODELS = {
    "class": Exact,
    "module": exact,
    "below model": lambda: {"model": exact()},
    "state": lambda: nnx.state(exact()),
    "abstract state": lambda: nnx.eval_shape(lambda: nnx.state(exact())),
    "abstract module": lambda: nnx.eval_shape(exact),
    "pure dict": lambda: nnx.to_pure_dict(nnx.state(exact())),
}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("called", [False, True], ids=["itself", "called"])
@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_a_model(name, called, bare, tmp_path):
    """For variables, and for bare parameters."""
    params = exact_params()
    tree = params if bare else {"params": params}
    source = save(tmp_path / "linen", tree)
    model = MODELS[name] if called or name == "class" else MODELS[name]()
    reshard.save(reshard.to_nnx(source, model), tmp_path / "nnx")
    made = {"model": params} if name == "below model" else params
    expected = by_path(made) if name == "pure dict" else held(made)
    assert by_path(load(tmp_path / "nnx")) == expected
    layouts.assert_same_tree(restored(reshard.to_linen(tmp_path / "nnx"), tmp_path), tree)


UNCLEAR = """\
it is unclear whether the keys below `params` are modules or collections
  modules: one is called `params`, as `params/params`, beside `params/head`
  collections: the parameters are `params/params`, and none are in `params/head`"""


def called_params(tx=None):
    """What is below `params` where a module is called so, with one beside it: as saved, and as the
    NNX model that it is to become."""
    params = {"params": {"kernel": some(4, 5), "bias": some(5)}, "head": {"kernel": some(5, 2)}}
    rngs = nnx.Rngs(0)
    model = Of(params=nnx.Linear(4, 5, rngs=rngs), head=nnx.Linear(5, 2, use_bias=False, rngs=rngs))
    if tx is None:
        return {"params": params}, params, model
    return train_state_of(params, tx), params, with_optimizer(model, tx)


def test_a_module_called_params_is_not_taken_for_a_collection(tmp_path):
    """What is beside it would be collections, and no parameters."""
    tree, params, model = called_params()
    source = save(tmp_path / "linen", tree)
    assert refusal(reshard.to_nnx, source, model) == (
        f"{UNCLEAR}\n\n"
        'hint: layout="linen-variables", if they are modules\n'
        'hint: layout="linen-train-state", if they are collections'
    )
    ckpt = reshard.to_nnx(source, model, layout="linen-variables")
    made = restored(ckpt, tmp_path)
    assert by_path(made) == held(params)
    again = save(tmp_path / "nnx", made)
    back = reshard.to_linen(again, lambda: tree, layout="nnx-state")
    layouts.assert_same_tree(restored(back, tmp_path), tree)
    # Collections, of which a map says where they go.
    rules = [(f"^{a}/{b}$", f"{a}_{b}") for a in tree["params"] for b in tree["params"][a]]
    rules[-1:] = [("^head/kernel$", "head_kernel")]
    file = map_of(tmp_path, *rules)
    collections = reshard.to_nnx(source, map_file=file, layout="linen-train-state")
    expected = {f"{a}_{b}": value for a, x in params.items() for b, value in x.items()}
    assert by_path(restored(collections, tmp_path)) == held(expected)


def test_a_module_called_params_in_a_train_state(tmp_path):
    """Where its moments follow it. No layout says which of the two it is: a hint does."""
    linen, params, model = called_params(ADAM)
    source = save(tmp_path / "linen", linen)
    for layout in (None, "linen-train-state"):
        error = refused(reshard.to_nnx, source, model, layout=layout)
        assert str(error) == (
            f"{UNCLEAR}\n\n"
            'hint: reshard.rename(ckpt, [("^params/", "params/params/")]), if they are modules\n'
            'hint: reshard.rename(ckpt, [("^params/", "")]), if they are collections'
        )
    names = {"reshard": reshard, "ckpt": reshard.open(source)}
    one, other = (eval(hint.partition(", if")[0], names) for hint in error.hints)
    got = by_path(restored(reshard.to_nnx(one, model), tmp_path))
    assert got == trained(linen, lambda tree: tree)
    # The same leaves, and `head` is no parameter.
    rules = [("^params/kernel$", "a"), ("^params/bias$", "b"), ("^head/kernel$", "c")]
    got = by_path(restored(reshard.to_nnx(other, map_file=map_of(tmp_path, *rules)), tmp_path))
    values = {"a": params["params"]["kernel"], "b": params["params"]["bias"]}
    model = held({"model": values | {"c": params["head"]["kernel"]}})
    assert {path: leaf for path, leaf in got.items() if path.startswith("model/")} == model


def test_a_record_that_does_not_fit_is_an_error(tmp_path):
    ckpt = reshard.to_nnx(save(tmp_path / "linen", exact_params()), Exact)
    ckpt = reshard.rename(reshard.select(ckpt, drop="a/bias/*"), [("^b/", "second/")])
    reshard.save(ckpt, tmp_path / "nnx")
    error = refused(reshard.to_linen, tmp_path / "nnx")
    assert error.summary == "the record of the conversion from Linen does not fit the checkpoint"
    assert error.problems == (
        "a/bias/value: not in the checkpoint",
        "b/value: not in the checkpoint",
        "second/value: not in the record of the conversion",
    )


def test_a_record_changes_the_dtype_of_the_step_alone_and_only_if_it_fits(tmp_path):
    linen = state(ADAM)
    ckpt = reshard.to_nnx(save(tmp_path / "linen", linen), lambda: training(ADAM), init=RANDOM)
    reshard.save(ckpt, tmp_path / "nnx")
    whole, rest = (reshard.to_linen(tmp_path / "nnx", drop=drop) for drop in ((), RANDOM))
    assert reshard.diff(whole, rest, values=True).equal

    def trained_on(name, path, value):
        """With another value in a leaf, saved by Orbax, and the record."""
        leaves = layouts.saved_leaves(load(tmp_path / "nnx"))
        out = save(tmp_path / name, unflatten_dict(leaves | {path: value}))
        old, new = (json.loads((x / "_METADATA").read_text()) for x in (tmp_path / "nnx", out))
        new["custom_metadata"] = old["custom_metadata"]
        (out / "_METADATA").write_text(json.dumps(new))
        return out

    step = ("optimizer", "step", "value")
    later = trained_on("later", step, jnp.uint32((1 << 31) - 1))
    expected = linen.replace(step=jnp.int32((1 << 31) - 1))
    layouts.assert_same_tree(
        restored(reshard.to_linen(later), tmp_path), load(save(tmp_path / "e", expected))
    )
    large = trained_on("large", step, jnp.uint32(3_000_000_000))
    assert refusal(reshard.to_linen, large) == "step: the step 3000000000 does not fit int32"
    other = trained_on("other", ("optimizer", "opt_state", "0", "count", "value"), jnp.uint32(3))
    assert refusal(reshard.to_linen, other).startswith(
        "the checkpoint differs from the result of the conversion from Linen\n"
        "  opt_state/0/count: dtype uint32, it was int32\n"
    )


def test_a_record_that_cannot_be_read_is_an_error(tmp_path):
    ckpt = reshard.to_nnx(save(tmp_path / "linen", exact_params()), Exact)
    custom = ckpt.source.metadata["custom_metadata"]
    record = custom["reshard.linen"]
    (path, *more), *others = record["leaves"]
    steps = [{"from": [["a"]], "to": [["b"]]}]
    for broken in (
        *(record | {"version": 2}, record | {"route": {}}, {}, 3, None),
        {key: value for key, value in record.items() if key != "own"},
        record | {"leaves": [[path, *more, 1], *others]},
        record | {"leaves": [[["params"], {"shape": [1]}]]},
        record | {"route": record["route"] | {"steps": steps}},
        record | {"route": record["route"] | {"moved": 7}},
    ):
        changed = ckpt.with_metadata({"custom_metadata": custom | {"reshard.linen": broken}})
        reshard.save(changed, tmp_path / "nnx", overwrite=True)
        told = refusal(reshard.to_linen, tmp_path / "nnx", layout="nnx-state").splitlines()
        assert (told[0], told[-2:]) == (
            "the record of the conversion from Linen cannot be read",
            ["", "hint: model=..., the model of the result, converts without the record"],
        )


def test_what_pads_a_parameter_pads_its_moments_and_comes_off_again(tmp_path):
    linen = train_state_of({"table": some(3, 4)}, ADAM)
    path = save(tmp_path / "linen", linen)
    pad = "pad = { widths = [[0, 2], [0, 0]], fill = 0.0 }"
    file = map_of(tmp_path, f"from = '^params/table$', {pad}, to = 'table'")
    model = functools.partial(beside_optimizer, ADAM, table=(5, 4))
    reshard.save(reshard.to_nnx(path, model, map_file=file), tmp_path / "nnx")
    expected = trained(linen, lambda tree: {"table": jnp.pad(tree["table"], ((0, 2), (0, 0)))})
    assert by_path(load(tmp_path / "nnx")) == expected
    layouts.assert_same_tree(restored(reshard.to_linen(tmp_path / "nnx"), tmp_path), load(path))


def test_where_only_paths_change_no_array_is_decoded_or_copied(tmp_path):
    shapes = {"Dense_0": (64, 96), "Dense_1": (96, 32)}
    params = {k: {"kernel": some(*shape), "bias": some(shape[1])} for k, shape in shapes.items()}
    linen = sharded(
        train_state_of(params, ADAM),
        {"kernel": P("data", "model"), "bias": P("model")},
        layouts.mesh((2, 4)),
    )
    source, out = save(tmp_path / "linen", linen), tmp_path / "nnx"

    def model():
        """Large enough that its arrays are in files of their own."""
        one, other = (nnx.Linear(*shape, rngs=nnx.Rngs(3)) for shape in shapes.values())
        drop = nnx.Dropout(0.1, rngs=nnx.Rngs(3))
        return with_optimizer(Of(one=one, other=other, drop=drop), ADAM)

    ckpt = reshard.to_nnx(source, model, init=RANDOM)
    planned = reshard.plan(ckpt, out)
    reshard.save(ckpt, out)
    written = [os.stat(file) for file in out.rglob("d/*")]
    shared = layouts.data_inodes(source).keys() & layouts.data_inodes(out).keys()
    linked = sum(found.st_size for found in written if found.st_ino in shared)
    assert {format_path(a.path) for a in planned.arrays if not a.verbatim} == {
        "model/drop/rngs/count/value",
        "model/drop/rngs/key/value",
        "optimizer/step/value",
    }
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves((linen.params, linen.opt_state)))
    assert planned.bytes_read < 1000 < arrays
    assert planned.shared_bytes == linked
    assert sum(found.st_size for found in written) - linked < 10_000 < linked


def fused():
    made = named("bfloat16", embed=(16, 24))
    made.layers = named("bfloat16", kernel=(4, 16, 32), bias=(4, 32))
    return made


@pytest.mark.parametrize("max_memory", ["24KiB", "1GiB"])
def test_all_of_it_in_one_pass(max_memory, tmp_path):
    """Selection, casts, a stack, a map, the conversion and a new mesh, as Orbax and JAX do it."""
    layer = {"kernel": some(16, 32), "bias": some(32)}
    params = {f"layer_{i}": layer for i in range(4)} | {"extra": some(8), "embed": some(24, 16)}
    linen = filled(train_state_of(params, ADAM), bits=False).replace(step=jnp.int32(7))
    specs = {"kernel": P("data", "model"), "bias": P("model"), "embed": P("model", "data")}
    linen = sharded(linen, specs, layouts.mesh((2, 4)))
    source = save(tmp_path / "linen", linen)
    file = map_of(tmp_path, "from = '^params/embed$', transpose = [1, 0], to = 'embed'")
    ckpt = reshard.select(reshard.open(source), drop="**/extra")
    ckpt = reshard.cast(ckpt, "bfloat16")
    ckpt = reshard.stack(ckpt, "params/layer_{}", into="params/layers")
    ckpt = reshard.to_nnx(ckpt, lambda: with_optimizer(fused(), ADAM), map_file=file)
    ckpt = reshard.to_mesh(ckpt, "data=4,model=2")
    reshard.save(ckpt, tmp_path / "nnx", max_memory=max_memory)

    def by_jax(tree):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(tree[f"layer_{i}"] for i in range(4)))
        made = {"layers": stacked, "embed": tree["embed"].T}
        return jax.tree.map(lambda x: x.astype("bfloat16"), made)

    loaded = jax.tree.map(jnp.asarray, jax.device_get(load(source)))
    moments = loaded["opt_state"][0]
    moments = {name: by_jax(moments[name]) for name in ("mu", "nu")} | {"count": moments["count"]}
    optimizer = {"opt_state": {"0": moments}, "step": jnp.uint32(7)}
    expected = {"model": by_jax(loaded["params"]), "optimizer": optimizer}
    got = load(tmp_path / "nnx")
    assert by_path(got) == held(expected)
    specs = {
        "kernel": P(None, "data", "model"),
        "bias": P(None, "model"),
        "embed": P("data", "model"),
    }
    on = layouts.mesh((4, 2))
    placed = layouts.saved_leaves(got)
    assert {path: leaf.sharding for path, leaf in placed.items()} == {
        path: NamedSharding(on, specs.get(path[-2], P())) for path in placed
    }


def test_dtypes_of_moments_are_told(tmp_path):
    path = save(tmp_path / "linen", train_state_of({"a": some(3)}, ADAM))
    ckpt = reshard.cast(reshard.open(path), "bfloat16", "opt_state/0/mu/**")
    model = functools.partial(beside_optimizer, ADAM, a=(3,))
    error = refused(reshard.to_nnx, ckpt, model)
    assert error.problems == (
        "opt_state/0/mu/a -> opt_state/0/mu/a: dtype bfloat16, the model has float32",
    )
    made = reshard.to_nnx(recast(ckpt, error), model)
    assert {leaf.dtype.name for leaf in made.arrays} == {"float32", "int32", "uint32"}


@pytest.mark.parametrize(
    ("saved", "wanted", "helps"),
    [
        ("int32", "float32", False),
        ("float32", "int32", False),
        ("int8", "int32", False),
        ("bfloat16", "float32", True),
    ],
)
def test_a_cast_is_proposed_where_there_is_one(saved, wanted, helps, tmp_path):
    path = save(tmp_path / "linen", {"params": {"a": jnp.ones(3, saved), "b": some(2)}})
    model = functools.partial(nested, {"a": ((3,), wanted), "b": ((2,),)})
    error = refused(reshard.to_nnx, path, model)
    assert error.problems == (f"params/a -> a: dtype {saved}, the model has {wanted}",)
    assert error.hints == (f'reshard.cast(ckpt, "{wanted}", "params/a")',) * helps
    if helps:
        assert reshard.to_nnx(recast(reshard.open(path), error), model)["a/value"].dtype == wanted


# Maps for something else


@pytest.mark.parametrize("name", ["cache", "batch_stats", "intermediates", "layer"])
def test_a_map_says_where_its_rules_lead_to_nothing(name, tmp_path):
    """An attribute that is called as a collection is not taken for a name of Linen's."""
    source = save(tmp_path / "linen", {"params": {"Dense_0": {"kernel": some(4, 5)}}})
    model = Of(**{name: named(kernel=(4, 5))})
    file = map_of(tmp_path, ("^params/Dense_0/", f"{name}/inner/"))
    error = refused(reshard.to_nnx, source, model, map_file=file)
    assert error.problems == (
        f"{name}/inner/kernel: the model has no such leaf; the nearest is {name}/kernel",
        f"{name}/kernel  float32[4, 5]: missing",
    )
    assert error.hints == (
        "`to = 'params/NAME/'` gives a module another name on Linen's side, and leaves it to the "
        "standard conversions",
    )
    file = map_of(tmp_path, ("^params/Dense_0/", f"{name}/"))
    made = restored(reshard.to_nnx(source, model, map_file=file), tmp_path)
    assert by_path(made) == held({name: {"kernel": some(4, 5)}})


def test_a_map_for_the_other_way_is_told(tmp_path):
    source = save(tmp_path / "nnx", nnx.state(named(kernel=(4, 5))))
    linen = {"params": {"Dense_0": {"kernel": some(4, 5)}}}
    options = {"map_file": map_of(tmp_path, ("^params/Dense_0/", "./")), "layout": "nnx-state"}
    assert refusal(reshard.to_linen, source, linen, **options).splitlines()[3] == (
        'hint: if the rules make nnx leaves, put `to = "nnx"` above them: then they are inverted'
    )


def test_a_step_alone_is_no_optimizer(tmp_path):
    source = save(tmp_path / "linen", state(MOMENTUM))
    options = {"init": RANDOM, "drop": ["opt_state/**"]}
    text = refusal(reshard.to_nnx, source, twin, **options)
    assert text.splitlines()[1:] == [
        "  step  int32[]: unexpected",
        "",
        'hint: drop=["step"] leaves out 1 leaf',
    ]
    options["drop"].append("step")
    made = restored(reshard.to_nnx(source, twin, **options), tmp_path)
    assert list(made) == ["drop", "first", "norm", "second"]


# Into memory


def test_a_linen_checkpoint_is_restored_into_nnx(tmp_path):
    on = layouts.mesh((2, 2))
    linen = state(ADAM, boxed=True)
    ckpt = reshard.to_nnx(save(tmp_path / "linen", linen), lambda: training(ADAM), init=RANDOM)

    def model():
        return with_optimizer(Twin(nnx.Rngs(9), boxed=True), ADAM)

    expected = moved(linen, drawn())
    made = reshard.restore(ckpt, reshard.target(model, mesh=on))
    assert held(pure_of(made)) == expected
    kernel = made["optimizer"].opt_state[0].mu["first"]["kernel"][...]
    assert kernel.sharding == NamedSharding(on, P("data", "model"))
    assert made["model"].second.kernel[...].sharding == kernel.sharding
    assert made["model"].second.bias[...].sharding == NamedSharding(on, P())
    # In place, where it is real already.
    with jax.set_mesh(on):
        real = model()
    kept = real["model"].first.kernel
    assert reshard.restore(ckpt, real)["model"] is real["model"]
    assert held(pure_of(real)) == expected
    assert real["model"].first.kernel is kept


def test_an_nnx_checkpoint_is_restored_into_linen(tmp_path):
    on = layouts.mesh((2, 2))
    linen = state(ADAM, boxed=True)
    source = save(tmp_path / "linen", linen)
    reshard.save(reshard.to_nnx(source, twin, init=RANDOM), tmp_path / "nnx")
    again = save(tmp_path / "again", load(tmp_path / "nnx"))
    target = reshard.target(linen, mesh=on)
    for ckpt in (reshard.to_linen(tmp_path / "nnx"), reshard.to_linen(again, target, **BACK)):
        made = reshard.restore(ckpt, target)
        layouts.assert_same_tree(made, linen)
        kernel = made.opt_state[0].nu["Dense_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned)
        assert kernel.value.sharding == NamedSharding(on, P("data", "model"))


def test_a_checkpoint_of_the_other_api_is_told_in_a_restore(tmp_path):
    """In the words of the library and of the command line, and nothing else is."""
    params = {"params": {"Dense_0": {"bias": jnp.ones(3)}, "out": {"bias": jnp.ones(3)}}}
    modules, on = Of(hidden=named(bias=(3,)), out=named(bias=(3,))), layouts.mesh((1, 2))
    linen, of_nnx = save(tmp_path / "linen", params), save(tmp_path / "nnx", nnx.state(modules))
    # Where all names agree, too.
    for api, path, target in (
        ("nnx", linen, modules),
        ("nnx", linen, Of(Dense_0=named(bias=(3,)), out=named(bias=(3,)))),
        ("linen", of_nnx, params),
    ):
        told = refusal(reshard.restore, path, target).splitlines()
        hint = f"hint: reshard.to_{api}(path, model)"
        assert [line for line in told if line.startswith("hint")] == [hint]
        on_mesh = reshard.target(target, mesh=on)
        (hint,) = refused(reshard.to_mesh, reshard.open(path), on, target=on_mesh).hints
        typed = f"reshard convert SRC DST --to {api} --model MODULE:NAME"
        assert (hint, as_flags(hint)) == (f"reshard.to_{api}(path, model)", typed)
    # Trees of one API, boxed or not, are renamed.
    below = save(tmp_path / "below", {"params": nnx.state(modules)})
    for path, target, rule in (
        (of_nnx, {"params": Of(hidden=modules.hidden, out=modules.out)}, ("^", "params/")),
        (below, modules, ("^params/", "")),
    ):
        hint = f"hint: reshard.rename(reshard.open(path), {as_python([rule])})"
        assert hint in refusal(reshard.restore, path, target).splitlines()


def test_scales_that_are_in_no_variable_are_converted_and_restored(tmp_path):
    def model():
        rngs = nnx.Rngs(3)
        return Of(normed=nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs))

    normed = Compact(lambda x: nn.WeightNorm(nn.Dense(3))(x))
    linen = filled(normed.init(jax.random.key(0), INPUTS), bits=False)
    ckpt = reshard.to_nnx(save(tmp_path / "linen", linen), model)
    reshard.save(ckpt, tmp_path / "nnx")
    expected = normed.apply(linen, INPUTS)
    real = reshard.restore(tmp_path / "nnx", model())
    target = reshard.target(model, mesh=layouts.mesh((1, 2)))
    made = reshard.restore(tmp_path / "nnx", target)
    again = save(tmp_path / "again", nnx.state(made))
    for restored_into in (real, made):  # a call changes the kernels in place
        np.testing.assert_array_equal(restored_into.normed(INPUTS), expected)
    back = reshard.to_linen(again, linen, source=model)
    layouts.assert_same_tree(restored(back, tmp_path), load(tmp_path / "linen"))


KEYS = st.sampled_from(["a", "b_1", "c", "Dense_0", "x.y", "two words", "w"])
TREES_OF_NAMES = st.recursive(
    st.sampled_from([(), (3,), (2, 3)]),
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=5,
).filter(lambda tree: isinstance(tree, dict))


@given(
    collections=st.dictionaries(
        st.sampled_from(["params", "batch_stats", "cache"]), TREES_OF_NAMES, min_size=1
    ),
    data=st.data(),
)
@settings(deadline=None, max_examples=examples(15))
def test_any_tree_goes_there_and_back(collections, data, tmp_path_factory):
    """With a map of other names, lists among them: without a model, by the record, and by the map
    backwards."""
    folder = tmp_path_factory.mktemp("tree")
    shapes = flatten_dict(collections | {"params": collections.get("params", {"p": (2,)})})
    rng = np.random.default_rng(0)
    leaves, names, rules = {}, {}, []
    order = data.draw(st.permutations(list(shapes)))
    lists = data.draw(st.integers(0, len(order)))
    for number, path in enumerate(order):
        leaves[path] = jnp.asarray(layouts.random_array(rng, shapes[path]))
        name = ("items", str(number), "w") if number < lists else ("m", *path[::-1])
        names[path] = name
        source, to = re.escape(format_path(path)), format_path(name).replace("\\", r"\\")
        rules.append((f"^{source}$", to))
    file = map_of(folder, *rules)
    file.write_text(f"to = 'nnx'\n{file.read_text()}")
    tree = unflatten_dict(leaves)
    source = save(folder / "linen", tree)
    reshard.save(reshard.to_nnx(source, map_file=file), folder / "nnx")
    assert by_path(load(folder / "nnx")) == {
        format_path((*name, "value")): layouts.bits(leaves[path]) for path, name in names.items()
    }
    layouts.assert_same_tree(restored(reshard.to_linen(folder / "nnx"), folder), tree)
    again = save(folder / "again", load(folder / "nnx"))
    back = reshard.to_linen(again, map_file=file, layout="nnx-state")
    layouts.assert_same_tree(restored(back, folder), tree)


def stack():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return nnx.Dict(cell=nnx.GRUCell(4, 5, rngs=rngs))

    return Of(layers=make(nnx.Rngs(0)))


def test_recurrent_cells_in_layers_that_a_map_stacks(tmp_path):
    shapes = {f"i{gate}": {"kernel": (4, 5), "bias": (5,)} for gate in "rzn"}
    shapes |= {f"h{gate}": {"kernel": (5, 5)} for gate in "rz"}
    shapes |= {"hn": {"kernel": (5, 5), "bias": (5,)}}
    layers = [
        {
            part: {k: some(*shape, seed=n) for k, shape in own.items()}
            for part, own in shapes.items()
        }
        for n in range(3)
    ]
    params = {f"layer_{n}": {"cell": cell} for n, cell in enumerate(layers)}
    tree = {"params": params, "opt_state": [{"trace": params}]}
    stacked = r"from = '^params/layer_(\d+)/(.*)$', stack = { axis = 0, by = 1 }"
    file = map_of(tmp_path, stacked + r", to = 'params/layers/\2'")
    convert = functools.partial(reshard.to_nnx, model=stack, map_file=file)
    error = refused(convert, save(tmp_path / "wrong", tree))
    assert error.summary == "leaves without a place in the result are not zero"
    roots = ("params", "opt_state/0/trace")
    paths = [f"{root}/layer_{n}/cell/hn/bias" for root in roots for n in range(3)]
    assert error.problems == tuple(f"{path}  float32[5]" for path in paths)
    hint = "NNX's GRUCell has no bias in its recurrent part: use your own cell with that bias"
    assert error.hints == (hint,)
    for cell in layers:
        cell["hn"]["bias"] = np.array([0, -0.0, 0, 0, -0.0], "float32")
    save(tmp_path / "minus", tree)
    for cell in layers:
        cell["hn"]["bias"] = np.zeros(5, "float32")
    save(tmp_path / "linen", tree)
    reshard.save(convert(tmp_path / "linen"), tmp_path / "nnx")
    assert reshard.diff(convert(tmp_path / "minus"), tmp_path / "nnx", values=True).equal
    with pytest.raises(reshard.TreeMismatchError) as error:
        like_recorded(reshard.open(tmp_path / "wrong"), reshard.open(tmp_path / "nnx"))
    assert error.value.problems == tuple(f"{path}: it was zero, but is not now" for path in paths)
    expected = {
        (*at, "layers", "cell", f"dense_{side}", leaf, "value"): np.stack(
            [np.concatenate([cell[f"{side}{gate}"][leaf] for gate in "rzn"], -1) for cell in layers]
        )
        for at in (("model",), ("optimizer", "opt_state", "0", "trace"))
        for side, leaf in (("i", "kernel"), ("i", "bias"), ("h", "kernel"))
    }
    found = {path: np.asarray(x) for path, x in flatten_dict(load(tmp_path / "nnx")).items()}
    assert bits(found) == bits(expected)
    again = save(tmp_path / "again", load(tmp_path / "nnx"))
    file.write_text(f"to = 'nnx'\n{file.read_text()}")
    by_map = reshard.to_linen(again, lambda: tree, source=stack, map_file=file)
    for back in (reshard.to_linen(tmp_path / "nnx"), by_map):
        assert reshard.diff(tmp_path / "linen", back, values=True).equal
