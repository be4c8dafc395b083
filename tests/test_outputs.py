"""The outputs of both models of a conversion: equal, or where they begin to differ."""

import concurrent.futures
import functools
import json
import re

import in_process
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import twins
from converted import Compact, Of, map_of, refused
from flax import linen as nn
from flax import nnx

import reshard
from reshard.cli import conversion_options, subprocess_model
from reshard.cli.subprocess_model import run_in_subprocess
from reshard.convert import model_run
from reshard.convert.model_run import arguments_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")
WIDTH = 6
RANDOM = "**/rngs/**"
DIFFERENT = (
    r"the output: \[\d, \d\] is \S+ in Linen and \S+ in NNX, \S+ times the noise; equal outputs "
    "differ by at most 10 times"
)


class Linen(nn.Module):
    """With what differs in training."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))
        return nn.LayerNorm()(nn.Dropout(0.5, deterministic=not train)(x))


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, WIDTH, rngs=rngs)
        self.bn = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(self.bn(self.dense(x))))


def linen(module=None):
    return jax.jit((module or Linen()).init)(jax.random.key(0), jnp.ones((3, 4)))


def random(make):
    """Variables, every leaf random."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.uniform(0.3, 1.0, leaf.shape).astype(np.float32), jax.eval_shape(make)
    )


def of_ones(module):
    """A function that gives its variables."""
    return lambda: module.init(jax.random.key(0), jnp.ones((2, 4)))


def compared(folder, model, net, check=True, values=None, **options):
    """Converts the variables that a Linen model has, and compares outputs."""
    path = folder / "linen"
    if not path.exists():
        layouts.save_standard(path, model() if values is None else values)
    return reshard.to_nnx(path, net, source=model, check=check, **options)


def equal(ckpt):
    """What is told of equal outputs."""
    (note,) = [note for note in ckpt.notes if note.startswith("outputs equal")]
    return note


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of Linen's."""
    return layouts.save_standard(tmp_path_factory.mktemp("saved") / "linen", random(linen))


class Net(Of):
    """With a function for its call."""

    def __init__(self, function, **attributes):
        super().__init__(**attributes)
        self.function = function

    def __call__(self, x):
        return self.function(self, x)


def linear(features=WIDTH):
    return nnx.Linear(4, features, rngs=nnx.Rngs(0))


def inputs(rows=7):
    return np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)


def test_equal_outputs_are_a_note_in_both_directions(saved, tmp_path, monkeypatch):
    """Gradients are taken of the target alone."""
    real, taken = jax.grad, []
    monkeypatch.setattr(jax, "grad", lambda function: taken.append(function) or real(function))
    ckpt = reshard.to_nnx(saved, Nnx, source=linen, init=RANDOM, check=True)
    assert equal(ckpt).startswith("outputs equal: the largest difference is ")
    assert len(taken) == 1
    reshard.save(ckpt, tmp_path / "nnx")
    x = np.random.default_rng(1).normal(size=(5, 4))  # float64, which is cast
    # Without the state of random numbers, which evaluation does not need.
    back = reshard.to_linen(tmp_path / "nnx", linen, source=Nnx, drop=RANDOM, check=((x,), {}))
    assert equal(back)
    assert reshard.diff(saved, back, values=True).equal


def test_leaves_with_other_names_than_the_model_of_the_source_has_need_a_rule(tmp_path):
    rename = (r"^params/Dense_(\d)/", r"params/layer\1/")
    model = of_ones(Compact(lambda x: nn.Dense(WIDTH)(x)))
    ckpt = reshard.rename(
        reshard.open(layouts.save_standard(tmp_path / "linen", model())), [rename]
    )

    def net():
        return Net(lambda net, x: net.layer0(x), layer0=linear())

    options = {"source": model, "check": True}
    error = refused(reshard.to_nnx, ckpt, net, of=reshard.ArgumentError, **options)
    assert str(error) == (
        "the Linen model has other leaves than the checkpoint\n"
        '  Could not find parameter named "kernel" in scope "/Dense_0".\n\n'
        "hint: if you renamed leaves, use a rule of map_file=... instead: then the source keeps "
        "its Linen names"
    )
    assert equal(compared(tmp_path, model, net, map_file=map_of(tmp_path, rename)))


def test_models_that_say_bfloat16_are_compared_in_float32(tmp_path):
    def net():
        dense = nnx.Linear(4, WIDTH, dtype="bfloat16", rngs=nnx.Rngs(0))
        norm = twins.norm(WIDTH, dtype="bfloat16")
        return Net(lambda net, x: net.norm(net.dense(x)), dense=dense, norm=norm)

    def parts(x):
        return nn.LayerNorm(dtype="bfloat16")(nn.Dense(WIDTH, dtype="bfloat16")(x))

    model = of_ones(Compact(parts))
    check = (jnp.asarray(inputs(), "bfloat16"),), {}
    assert equal(compared(tmp_path, model, net, check, random(model)))


class Delegating(nn.Module):
    """Looks elsewhere for what it has not, which Linen takes for a method of its own."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)

    def __getattr__(self, name):
        return super().__getattr__(name)


def test_a_module_that_finds_attributes_by_itself_is_run(tmp_path):
    def net():
        return Net(lambda net, x: net.dense(x), dense=linear())

    assert equal(compared(tmp_path, lambda: linen(Delegating()), net, ((inputs(),), {})))


class Block(nn.Module):
    """Two norms of one shape, in a scan."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(WIDTH, name="dense")(nn.LayerNorm(name="before")(x))
        return x + nn.LayerNorm(name="after")(y), None


def scanned():
    """The same in NNX, and a norm behind it."""
    norm = functools.partial(twins.norm, WIDTH)

    def block(_):
        return Of(before=norm(), dense=twins.linear(WIDTH, WIDTH), after=norm())

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(block, x):
        return x + block.after(block.dense(block.before(x)))

    blocks = nnx.vmap(block)(jnp.arange(3))
    return Net(lambda net, x: net.last(forward(net.blocks, x)), blocks=blocks, last=norm())


def test_modules_in_a_scan_are_not_compared_one_by_one(tmp_path):
    """So the first module after it, whose output differs, is not to blame."""
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}

    def parts(x):
        x, _ = nn.scan(Block, **options)(name="blocks")(x)
        return nn.LayerNorm(name="last")(x)

    def model():
        return Compact(parts).init(jax.random.key(0), jnp.ones((5, WIDTH)))

    models = tmp_path, model, scanned
    assert equal(compared(*models, values=random(model)))
    rules = [(f"^params/blocks/{a}/", f"blocks/{b}/") for a, b in BOTH_WAYS]
    first, module = refused(compared, *models, map_file=map_of(tmp_path, *rules)).problems
    assert re.fullmatch(DIFFERENT, first)
    assert module == (
        "the first module whose output differs: last in Linen, last in NNX; modules that run "
        "before it in compiled code (a scan, a jit) were not compared one by one: blocks/before, "
        "blocks/dense, blocks/after and blocks"
    )


BOTH_WAYS = (("before", "after"), ("after", "before"))


def test_nothing_is_initialised_to_learn_what_a_model_is_called_with(tmp_path):
    computed = []

    def init(key, shape, dtype):
        computed.append(not isinstance(key, jax.core.Tracer))
        return jax.random.normal(key, shape, dtype)

    model = of_ones(nn.Dense(2, kernel_init=init))
    values = model()
    assert computed == [True]
    assert equal(compared(tmp_path, model, lambda: linear(2), values=values))
    assert True not in computed[1:]


def test_other_threads_initialise_their_models_meanwhile(saved):
    """A model starts a thread that initialises another model."""
    made = []

    def other():
        made.append(Linen().init(jax.random.key(1), np.ones((3, 4)))["params"])

    def model():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()
        return linen()

    assert equal(reshard.to_nnx(saved, Nnx, source=model, init=RANDOM, check=True))
    assert made


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0.0, "they are all zero, so they show nothing: try other inputs"),
        (np.nan, "the output: different elements are infinite, or some are NaN"),
    ],
)
def test_outputs_that_tell_nothing_are_not_equal(tmp_path, value, problem):
    def net():
        return Net(lambda net, x: net.Dense_0(x) * 0 + value, Dense_0=linear())

    model = of_ones(Compact(lambda x: nn.Dense(WIDTH)(x) * 0 + value))
    assert refused(compared, tmp_path, model, net).problems == (problem,)


def two_layers(mask):
    """Linen's model and NNX's: two layers of one class and shape, whose outputs a mask covers."""

    def computed(x, one, other):
        return mask(0.02 * other(jnp.tanh(one(x))))

    def net():
        first, second = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(2))
        return Net(lambda net, x: computed(x, net.first, net.second), first=first, second=second)

    module = Compact(lambda x: computed(x, nn.Dense(WIDTH), nn.Dense(WIDTH)))
    return lambda: module.init(jax.random.key(0), jnp.ones((5, WIDTH))), net


def attention_scores(x):
    """In the manner of BERT: zero where a token counts, and a large negative number elsewhere."""
    return x @ x.T + (1.0 - (np.arange(5) < 3)) * -10000.0


PADDED = np.arange(WIDTH) >= WIDTH - 2
MASKS = {
    "added": lambda x: x + jnp.where(PADDED, -1e4, 0.0),
    "attention": attention_scores,
    "multiplied": lambda x: x * ~PADDED - 1e9 * PADDED,
    "filled": lambda x: jnp.where(PADDED, -1e9, x),
    "infinite": lambda x: x.at[:, -2:].set(-jnp.inf),
    "least": lambda x: x + PADDED * jnp.finfo("float32").min,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.every_combination
def test_a_mask_hides_no_exchange_of_layers(mask, tmp_path):
    """However large what it adds is, next to what the layers make."""
    model, net = two_layers(MASKS[mask])
    models = tmp_path, model, net
    ckpt = compared(*models, values=random(model))
    assert equal(ckpt) and not warnings_of(ckpt)
    rules = ("^params/Dense_0/", "second/"), ("^params/Dense_1/", "first/")
    error = refused(compared, *models, map_file=map_of(tmp_path, *rules))
    assert error.summary.endswith("linen` is converted, but the outputs of the models differ")
    first, module = error.problems
    assert re.fullmatch(DIFFERENT, first)
    assert module == "the first module whose output differs: Dense_0 in Linen, second in NNX"


def warnings_of(ckpt):
    """What is told of what went by order."""
    return [note for note in ckpt.notes if "by the order of modules" in note]


def alike(variables, *names):
    """Variables in which modules have the values of the first of them."""
    params = dict(variables["params"])
    return {"params": params | dict.fromkeys(names, params[names[0]])}


def test_only_exchanges_that_are_seen_clear_the_warning_of_order(tmp_path):
    """Two norms that have the same values may be either; two layers that have not may not. Both
    ways, and on record."""

    def model():
        def parts(x):
            for _ in range(2):
                x = nn.Dense(WIDTH)(x)
                x = nn.LayerNorm()(x)
            return x

        return Compact(parts).init(jax.random.key(0), jnp.ones((3, WIDTH)))

    def net():
        parts = {name: twins.linear(WIDTH, WIDTH) for name in ("first", "second")}
        parts |= {name: twins.norm(WIDTH) for name in ("inner", "outer")}
        return Net(lambda net, x: net.outer(net.second(net.inner(net.first(x)))), **parts)

    values = random(model)
    ckpt = compared(tmp_path, model, net, values=values)
    assert equal(ckpt) and not warnings_of(ckpt)
    path = layouts.save_standard(tmp_path / "alike", alike(values, "LayerNorm_0", "LayerNorm_1"))
    unchecked = reshard.to_nnx(path, net, source=model)
    assert warnings_of(unchecked) == [
        "8 leaves were matched only by the order of modules of one class: "
        "Dense_0 -> first, Dense_1 -> "
        "second, LayerNorm_0 -> inner and 1 more; check=True compares outputs"
    ]
    not_seen = "not seen: exchanging them does not change the outputs"
    ckpt = reshard.to_nnx(path, net, source=model, check=True)
    pairs = "4 leaves were matched only by the order of modules of one class: {} -> {}, {} -> {}"
    told = pairs.format("LayerNorm_0", "inner", "LayerNorm_1", "outer")
    assert equal(ckpt) and warnings_of(ckpt) == [f"{told}; {not_seen}"]
    reshard.save(ckpt, tmp_path / "nnx")
    with in_process.inside(tmp_path):
        _, _, err = in_process.command(["verify", "nnx", "--against", "alike"])
    assert err == f"Warning: {told}; equal values do not prove the pairing\n"
    # The other way, of a checkpoint without that record.
    path = layouts.save_standard(tmp_path / "saved", layouts.load_standard(tmp_path / "nnx"))
    x = np.random.default_rng(1).normal(size=(5, WIDTH))
    back = reshard.to_linen(path, model, source=net, check=((x,), {}))
    told = pairs.format("inner", "LayerNorm_0", "outer", "LayerNorm_1")
    assert equal(back) and warnings_of(back) == [f"{told}; {not_seen}"]


def test_what_is_not_tried_stays_in_the_warning_of_order(tmp_path, monkeypatch):
    """If there are too many groups, the largest ones are tried."""
    monkeypatch.setattr(model_run, "MOST_EXCHANGES", 1)

    def parts(x):
        for _ in range(2):
            x = jnp.sin(nn.LayerNorm()(nn.Dense(4, use_bias=False)(x)))
        return nn.Dense(4, use_bias=False)(x)

    def net():
        layers = {name: twins.linear(4, 4, use_bias=False) for name in "abc"}
        norms = {name: twins.norm(4) for name in "de"}

        def call(model, x):
            x = jnp.sin(model.d(model.a(x)))
            return model.c(jnp.sin(model.e(model.b(x))))

        return Net(call, **layers, **norms)

    model = of_ones(Compact(parts))
    ckpt = compared(tmp_path, model, net, values=random(model))
    assert equal(ckpt) and warnings_of(ckpt) == [
        "4 leaves were matched only by the order of modules of one class: LayerNorm_0 -> d, "
        "LayerNorm_1 -> e; not tried: at most 32 groups are exchanged"
    ]


def test_leaves_without_a_part_in_the_outputs_are_told(tmp_path):
    """A head that only training uses."""

    def headed(x, both=True):
        head, body = nn.Dense(3, name="head")(x), nn.Dense(2, name="body")(x)
        return (body, head) if both else body

    def net():
        return Net(lambda net, x: net.body(x), body=linear(2), head=linear(3))

    check = {"linen": ((inputs(2),), {"both": False}), "nnx": ((inputs(2),), {})}
    models = tmp_path, of_ones(Compact(headed)), net
    note = equal(compared(*models, check))
    assert note.endswith("leaves that do not affect them are unchecked: head/bias, head/kernel")
    shapes = "their shapes are [2, 2], [2, 3] in Linen, [2, 2] in NNX"
    assert refused(compared, *models).problems == (shapes,)


def test_what_no_input_reaches_is_told_and_what_masks_fill_in_is_no_measure(tmp_path):
    """Two layers, of which the sign of an input takes one, beside what a mask fills in."""

    def routed(x, up, down):
        return jnp.where(jnp.arange(3) < 2, jnp.where(x[:, :1] > 0, up(x), down(x)), -1e9)

    def net():
        return Net(lambda net, x: routed(x, net.up, net.down), up=linear(3), down=linear(3))

    x = inputs(5)
    x[:, 0] = np.abs(x[:, 0])
    model = Compact(lambda x: routed(x, nn.Dense(3, name="up"), nn.Dense(3, name="down")))
    models = tmp_path, of_ones(model), net, ((x,), {})
    note = equal(compared(*models))
    assert note.endswith("leaves that do not affect them are unchecked: down/bias, down/kernel")
    swapped = map_of(tmp_path, ("^params/up/", "down/"), ("^params/down/", "up/"))
    (problem,) = refused(compared, *models, map_file=swapped).problems
    assert re.fullmatch(DIFFERENT, problem)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ((1, 2), "linen: (1, 2)"),
        ({"linen": ((), {}), "x": ((), {})}, "x: ((), {})"),
        ({"nnx": ((), {1: 2})}, "nnx: ((), {1: 2})"),
    ],
)
def test_inputs_of_no_such_form(inputs, problem):
    error = refused(arguments_of, inputs, of=reshard.ArgumentError)
    assert "not a pair of a tuple and a dict" in error.summary and problem in error.problems


def test_both_models_are_needed(saved):
    error = refused(reshard.to_nnx, saved, Nnx, of=reshard.ArgumentError, init=RANDOM, check=True)
    assert "comparing outputs needs both models" in str(error)
    assert error.hints == ("model=... and source=...",)


MODELS = """
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx


def variables():
    return nn.Sequential([nn.LayerNorm(), nn.Dense(3)]).init(jax.random.key(0), jnp.ones((2, 4)))


class Net(nnx.Module):
    def __init__(self, rngs, epsilon=1e-6):
        self.layers = nnx.List(
            [nnx.LayerNorm(4, epsilon=epsilon, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)]
        )

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def other():
    return Net(nnx.Rngs(0), 0.1)


def inputs():
    return (np.random.default_rng(0).normal(size=(2, 4)),), {}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with models, and a checkpoint of Linen's."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "models.py").write_text(MODELS)
    layouts.save_standard(
        directory / "linen", random(of_ones(nn.Sequential([nn.LayerNorm(), nn.Dense(3)])))
    )
    return directory


CHECK = ["convert", "linen", "nnx", "--to", "nnx", "--source-model", "models:variables", "--check"]


def test_the_command_writes_nothing_where_outputs_differ(project):
    with in_process.inside(project):
        status, out, err = in_process.command([*CHECK, "--model", "models:other", "--json"])
    assert status == 1 and not (project / "nnx").exists()
    answer = json.loads(out)
    assert answer["done"] is False and answer["problems"][0] == "the outputs differ"
    assert answer["problems"][2:] == [
        "the first module whose output differs: layers_0 in Linen, layers/0 in NNX"
    ]
    lines = [line for line in err.splitlines() if line.startswith("check: ")]
    assert lines == ["check: running models:variables", "check: running models:other"]
    with in_process.inside(project):
        status, out, err = in_process.command([*CHECK, "--model", "models:other", "--quiet"])
    assert (status, out) == (1, "")
    assert err.startswith("outputs differ\n  the output: ") and err.endswith("\nwrote nothing\n")


def test_each_step_has_its_own_note(project, tmp_path):
    """Although all that is told of them is the same; and a step whose outputs differ is named."""
    values = layouts.load_standard(project / "linen")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (3, 5, 10):
            manager.save(step, args=ocp.args.StandardSave(values))
    words = [*CHECK, "--step", "all"]
    words[1] = str(tmp_path / "run")
    words[2] = str(tmp_path / "out")
    with in_process.inside(project):
        status, out, err = in_process.command([*words, "--model", "models:Net"])
        assert status == 0, err
        notes = re.findall(r"^note     (.*outputs equal.*)$", out, re.MULTILINE)
        assert len({note.partition(": ")[2] for note in notes}) == 1
        assert [note.partition(": ")[0] for note in notes] == ["step 3", "step 5", "step 10"]
        words[2] = str(tmp_path / "other")
        _, out, _ = in_process.command([*words, "--model", "models:other"])
        assert out.startswith("step 3: outputs differ\n") and out.endswith("\nwrote nothing\n")
        _, out, _ = in_process.command([*words, "--model", "models:other", "--json"])
        assert json.loads(out)["problems"][0] == "step 3: the outputs differ"


@pytest.mark.usefixtures("forked")
def test_the_command_runs_the_model_of_the_source_in_a_process_of_its_own(project):
    def told(model, option, task):
        own = task.func is conversion_options._run
        return (run_in_subprocess if own else in_process.run_here)(model, option, task)

    with in_process.inside(project) as patch:
        patch.setattr(subprocess_model, "run_in_subprocess", told)
        words = [*CHECK, "--model", "models:Net", "--inputs"]
        missing = in_process.command([*words, "models:none"])
        assert missing[0] == 2 and "--inputs models:none: it cannot be imported" in missing[2]
        status, out, err = in_process.command([*words, "models:inputs"])
        again = in_process.command([*words, "models:inputs"])
    assert (status, (project / "nnx").exists()) == (0, True)
    assert "\nnote     outputs equal: the largest difference is " in out
    assert "check: running models:Net" in err
    assert (again[0], "/nnx` exists" in again[2], "running" in again[2]) == (2, True, False)


def test_the_command_runs_two_models_or_none(project):
    with in_process.inside(project):
        status, _, err = in_process.command(CHECK)
        assert status == 2 and "--check requires --model and --source-model" in err
        words = [word for word in CHECK if word != "--check"]
        status, _, err = in_process.command([*words, "--model", "models:Net", "--inputs", "x:y"])
        assert status == 2 and "--inputs requires --check" in err


def counted():
    """A model whose output depends on a whole number, which the Linen model does not have."""
    count = nnx.Variable(jnp.full((), 1, jnp.int32))
    return Net(lambda net, x: net.dense(x) * (1 + net.count[...]), dense=linear(), count=count)


uncounted = of_ones(Compact(lambda x: nn.Dense(WIDTH, name="dense")(x)))


def test_outputs_that_depend_on_a_leaf_that_was_dropped(tmp_path):
    """The leaf is a whole number, for which there is no NaN."""
    saved = layouts.save_standard(tmp_path / "nnx", nnx.state(counted()))
    models = (saved, uncounted)
    check = ((jnp.ones((2, 4)),), {})
    options = {"source": counted, "drop": "count", "check": check}
    error = refused(reshard.to_linen, *models, of=reshard.ArgumentError, **options)
    assert str(error) == (
        "the outputs of the NNX model depend on leaves that the checkpoint lacks\n  count"
    )
    options["source"] = twins.named("Mute", dense=linear, count=lambda: counted().count)
    error = refused(reshard.to_linen, *models, of=reshard.ArgumentError, **options)
    assert "is a Mute, not a module with `__call__`" in error.summary
    # A parameter of both models is missing.
    error = refused(reshard.to_linen, *models, source=counted, drop=("count", "dense/bias"))
    assert error.problems == ("params/dense/bias  float32[6]: missing",)
