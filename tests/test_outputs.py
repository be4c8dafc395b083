"""The outputs of both models of a conversion: equal, or where they begin to differ."""

import json
import re

import in_process
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
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


def differ(call, *arguments, **options):
    """What is told of outputs that differ."""
    with pytest.raises(reshard.TreeMismatchError) as info:
        call(*arguments, **options)
    return info.value.problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of Linen's."""
    return layouts.save_standard(tmp_path_factory.mktemp("saved") / "linen", random(linen))


def swapped(tmp_path):
    """A map that puts each norm in the place of the other."""
    file = tmp_path / "map.toml"
    pairs = [("LayerNorm_0", "last"), ("LayerNorm_1", "norm")]
    pairs += [("Dense_0", "first"), ("Dense_1", "second")]
    rules = (f"[[rule]]\nfrom = '^params/{a}/'\nto = '{b}/'\n" for a, b in pairs)
    file.write_text("".join(rules))
    return file


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
    with pytest.raises(reshard.TreeMismatchError, match="the outputs of the models differ") as info:
        reshard.to_nnx(
            saved, Nnx, source=linen, init=RANDOM, map_file=swapped(tmp_path), check=True
        )
    first, module = info.value.problems
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

    with pytest.raises(reshard.ArgumentError) as info:
        reshard.to_nnx(ckpt, Named, source=linen, init=RANDOM, check=True)
    assert str(info.value) == (
        "the Linen model has other leaves than the checkpoint\n"
        '  Could not find parameter named "kernel" in scope "/Dense_0".\n\n'
        "hint: if reshard.rename(ckpt, [(..., ...)]) has given the leaves other names: a rule of "
        "map_file=... does so for the conversion alone"
    )
    (tmp_path / "map.toml").write_text("[[rule]]\nfrom = '{}'\nto = '{}'\n".format(*rename))
    file = tmp_path / "map.toml"
    assert equal(reshard.to_nnx(saved, Named, source=linen, init=RANDOM, map_file=file, check=True))


def test_models_that_say_bfloat16_are_compared_in_float32(tmp_path):
    def model():
        return linen(Linen("bfloat16"))

    def net():
        return Nnx(nnx.Rngs(0), dtype=jnp.bfloat16)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), "bfloat16")
    assert equal(compared(tmp_path, model, net, ((x,), {}), random(model), init=RANDOM))


class Delegating(nn.Module):
    """Looks elsewhere for what it has not, which Linen takes for a method of its own."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)

    def __getattr__(self, name):
        return super().__getattr__(name)


class Dense(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)


def test_a_module_that_finds_attributes_by_itself_is_run(tmp_path):
    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    assert equal(compared(tmp_path, lambda: linen(Delegating()), Dense, ((x,), {})))


def test_modules_that_compute_something_else_are_found(saved):
    def net():
        made = Nnx(nnx.Rngs(0))
        made.norm.epsilon = 1e-2
        return made

    told = differ(reshard.to_nnx, saved, net, source=linen, init=RANDOM, check=True)
    assert told[1:] == ("the first module whose output differs: LayerNorm_0 in Linen, norm in NNX",)


def test_nothing_is_initialised_to_learn_what_a_model_is_called_with(tmp_path):
    computed = []

    def init(key, shape, dtype):
        computed.append(not isinstance(key, jax.core.Tracer))
        return jax.random.normal(key, shape, dtype)

    model = of_ones(nn.Dense(2, kernel_init=init))
    values = model()
    assert computed == [True]
    net = lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0))  # noqa: E731
    assert equal(compared(tmp_path, model, net, values=values))
    assert True not in computed[1:]


class Constant(nn.Module):
    """What it returns, whatever it is called with."""

    value: float

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x) * 0 + self.value


class ConstantNnx(Dense):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def __call__(self, x):
        return self.dense(x) * 0 + self.value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0.0, "they are all zero, which tells nothing: other inputs may"),
        (np.nan, "the output: not the same numbers are infinite, or some are NaN"),
    ],
)
def test_outputs_that_tell_nothing_are_not_equal(tmp_path, value, problem):
    told = differ(compared, tmp_path, of_ones(Constant(value)), lambda: ConstantNnx(value))
    assert told == (problem,)


class Headed(nn.Module):
    """A head that only training uses."""

    @nn.compact
    def __call__(self, x, both=True):
        head = nn.Dense(3, name="head")(x)
        made = nn.Dense(2, name="body")(x)
        return (made, head) if both else made


class HeadedNnx(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(4, 2, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.body(x)


def test_leaves_without_a_part_in_the_outputs_are_told(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 4))
    inputs = {"linen": ((x,), {"both": False}), "nnx": ((x,), {})}
    models = tmp_path, of_ones(Headed()), HeadedNnx
    note = equal(compared(*models, inputs))
    assert note.endswith("leaves without a part in them: head/bias, head/kernel")
    shapes = "their shapes are [2, 2], [2, 3] in Linen, [2, 2] in NNX"
    assert differ(compared, *models) == (shapes,)


class Routed(nn.Module):
    """Two layers, of which the sign of an input takes one, beside what a mask fills in."""

    @nn.compact
    def __call__(self, x):
        made = jnp.where(x[:, :1] > 0, nn.Dense(3, name="up")(x), nn.Dense(3, name="down")(x))
        return jnp.where(jnp.arange(3) < 2, made, -1e9)


class RoutedNnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        made = jnp.where(x[:, :1] > 0, self.up(x), self.down(x))
        return jnp.where(jnp.arange(3) < 2, made, -1e9)


def test_what_no_input_reaches_is_told_and_what_masks_fill_in_is_no_measure(tmp_path):
    x = np.random.default_rng(0).normal(size=(5, 4))
    x[:, 0] = np.abs(x[:, 0])
    models = tmp_path, of_ones(Routed()), RoutedNnx, ((x,), {})
    note = equal(compared(*models))
    assert note.endswith("leaves without a part in them: down/bias, down/kernel")
    swapped = tmp_path / "map.toml"
    swapped.write_text(
        "rule = [{ from = '^params/up/', to = 'down/' }, { from = '^params/down/', to = 'up/' }]"
    )
    (problem,) = differ(compared, *models, map_file=swapped)
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
    with pytest.raises(reshard.ArgumentError, match="not positional and keyword") as info:
        arguments_of(inputs)
    assert problem in info.value.problems


def test_both_models_are_needed(saved):
    with pytest.raises(reshard.ArgumentError, match="one of them is not known") as info:
        reshard.to_nnx(saved, Nnx, init=RANDOM, check=True)
    assert info.value.hints == ("model=... and source=...",)


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
