"""The outputs of both models of a conversion: equal, or where they begin to differ."""

import json
import re

import in_process
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from converted import Compact, Of, map_of, refused
from flax import linen as nn
from flax import nnx

import reshard
from reshard.cli import apart, check
from reshard.cli.apart import told_apart
from reshard.convert.outputs import arguments_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")
WIDTH = 6
RANDOM = "**/rngs/**"


class Linen(nn.Module):
    """Two norms of one class, which only order tells apart, and what differs in training."""

    dtype: str | None = None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(WIDTH, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(nn.LayerNorm(dtype=self.dtype)(x)))
        return nn.LayerNorm(dtype=self.dtype)(x)


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs, dtype=None):
        self.first = nnx.Linear(4, WIDTH, rngs=rngs, dtype=dtype)
        self.bn = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, dtype=dtype)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs, dtype=dtype)
        self.last = nnx.LayerNorm(WIDTH, rngs=rngs, dtype=dtype)

    def __call__(self, x):
        x = self.dropout(self.bn(self.first(x)))
        return self.last(self.second(nnx.gelu(self.norm(x))))


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


def swapped(tmp_path):
    """A map that puts each norm in the place of the other."""
    places = {"LayerNorm_0": "last", "LayerNorm_1": "norm", "Dense_0": "first", "Dense_1": "second"}
    return map_of(tmp_path, *((f"^params/{a}/", f"{b}/") for a, b in places.items()))


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
    """Gradients are taken of the target alone, and not where the calls of modules are compared."""
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


def test_modules_of_one_class_that_change_places_are_found(saved, tmp_path):
    options = {"source": linen, "init": RANDOM, "map_file": swapped(tmp_path), "check": True}
    error = refused(reshard.to_nnx, saved, Nnx, **options)
    assert error.summary == f"`{saved}` is converted, and the outputs of the models differ"
    first, module = error.problems
    assert first.startswith("the output: the largest difference is 0.")
    assert module == "the first module whose output differs: LayerNorm_0 in Linen, last in NNX"


def test_leaves_with_other_names_than_the_model_of_the_source_has_need_a_rule(saved, tmp_path):
    rename = (r"^params/Dense_(\d)/", r"params/layer\1/")
    ckpt = reshard.rename(reshard.open(saved), [rename])

    class Named(Nnx):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layer0, self.layer1 = self.first, self.second
            del self.first, self.second

        def __call__(self, x):
            x = self.dropout(self.bn(self.layer0(x)))
            return self.last(self.layer1(nnx.gelu(self.norm(x))))

    options = {"source": linen, "init": RANDOM, "check": True}
    error = refused(reshard.to_nnx, ckpt, Named, of=reshard.ArgumentError, **options)
    assert str(error) == (
        "the Linen model has other leaves than the checkpoint\n"
        '  Could not find parameter named "kernel" in scope "/Dense_0".\n\n'
        "hint: if reshard.rename(ckpt, [(..., ...)]) has given the leaves other names: a rule of "
        "map_file=... does so for the conversion alone"
    )
    assert equal(reshard.to_nnx(saved, Named, map_file=map_of(tmp_path, rename), **options))


def test_models_that_say_bfloat16_are_compared_in_float32(tmp_path):
    def model():
        return linen(Linen("bfloat16"))

    def net():
        return Nnx(nnx.Rngs(0), dtype=jnp.bfloat16)

    check = (jnp.asarray(inputs(), "bfloat16"),), {}
    assert equal(compared(tmp_path, model, net, check, random(model), init=RANDOM))


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


def test_modules_that_compute_something_else_are_found(saved):
    def net():
        made = Nnx(nnx.Rngs(0))
        made.norm.epsilon = 1e-2
        return made

    error = refused(reshard.to_nnx, saved, net, source=linen, init=RANDOM, check=True)
    first = "the first module whose output differs: LayerNorm_0 in Linen, norm in NNX"
    assert error.problems[1:] == (first,)


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


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0.0, "they are all zero, which tells nothing: other inputs may"),
        (np.nan, "the output: not the same numbers are infinite, or some are NaN"),
    ],
)
def test_outputs_that_tell_nothing_are_not_equal(tmp_path, value, problem):
    def net():
        return Net(lambda net, x: net.Dense_0(x) * 0 + value, Dense_0=linear())

    model = of_ones(Compact(lambda x: nn.Dense(WIDTH)(x) * 0 + value))
    assert refused(compared, tmp_path, model, net).problems == (problem,)


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
    assert note.endswith("leaves without a part in them: head/bias, head/kernel")
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
    assert note.endswith("leaves without a part in them: down/bias, down/kernel")
    swapped = map_of(tmp_path, ("^params/up/", "down/"), ("^params/down/", "up/"))
    (problem,) = refused(compared, *models, map_file=swapped).problems
    assert re.match("the output: the largest difference is 0.[0-9]+ of the largest value;", problem)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ((1, 2), "linen: (1, 2)"),
        ({"linen": ((), {}), "x": ((), {})}, "there is a side 'x'"),
        ({"nnx": ((), {1: 2})}, "nnx: ((), {1: 2})"),
    ],
)
def test_inputs_of_no_such_form(inputs, problem):
    error = refused(arguments_of, inputs, of=reshard.ArgumentError)
    assert "not positional and keyword" in error.summary and problem in error.problems


def test_both_models_are_needed(saved):
    error = refused(reshard.to_nnx, saved, Nnx, of=reshard.ArgumentError, init=RANDOM, check=True)
    assert "one of them is not known" in str(error)
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
    told = ["Linen model", "NNX model", "Linen model, once more,", "NNX model, once more,"]
    lines = [line for line in err.splitlines() if line.startswith("check: ")]
    assert [line.partition(" takes about ")[0] for line in lines] == [
        f"check: running the {name}" for name in told
    ]


@pytest.mark.usefixtures("forked")
def test_the_command_runs_the_model_of_the_source_in_a_process_of_its_own(project):
    def told(model, option, task):
        own = task.func is check._run
        return (told_apart if own else in_process.told_here)(model, option, task)

    with in_process.inside(project) as patch:
        patch.setattr(apart, "told_apart", told)
        words = [*CHECK, "--model", "models:Net", "--inputs"]
        missing = in_process.command([*words, "models:none"])
        assert missing[0] == 2 and "--inputs models:none: it cannot be imported" in missing[2]
        status, out, err = in_process.command([*words, "models:inputs"])
    assert (status, (project / "nnx").exists()) == (0, True)
    assert "\nnote     outputs equal: the largest difference is " in out
    assert "check: running the NNX model takes about " in err


def test_the_command_runs_two_models_or_none(project):
    with in_process.inside(project):
        status, _, err = in_process.command(CHECK)
        assert status == 2 and "--check runs both models: give --model and --source-model" in err
        words = [word for word in CHECK if word != "--check"]
        status, _, err = in_process.command([*words, "--model", "models:Net", "--inputs", "x:y"])
        assert status == 2 and "--inputs goes with --check" in err
