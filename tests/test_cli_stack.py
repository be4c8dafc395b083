"""`--stack` and `--unstack`, as a user types them: layers of flax's models in one array each, and
back, with Orbax and the models as the oracle."""

import re
import shlex

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from converted import filled
from flax import nnx
from flax.training.train_state import TrainState
from in_process import refused, reshard_in
from in_process import shown as run

import reshard

MODELS = '''
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(4, name="down")(nn.relu(nn.Dense(5, name="up")(x))), None


class Looped(nn.Module):
    """Of four layers."""

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x, _ = Block(name=f"layers_{i}")(x)
        return nn.Dense(2, name="head")(x)


class Scanned(nn.Module):
    """The same in a stack."""

    axis: int = 1

    @nn.compact
    def __call__(self, x):
        axes, split = {"params": self.axis}, {"params": True}
        scan = nn.scan(Block, variable_axes=axes, split_rngs=split, length=4)
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(2, name="head")(x)


def variables(model):
    return model.init(jax.random.key(0), jnp.ones((1, 4)))


def looped():
    return variables(Looped())


def scanned():
    return variables(Scanned())


class NBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 5, rngs=rngs)
        self.down = nnx.Linear(5, 4, rngs=rngs)


class Stacked(nnx.Module):
    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 4)
        self.layers = nnx.vmap(lambda key: NBlock(nnx.Rngs(key)))(keys)
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
'''
X = layouts.random((3, 4))


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The models, in a file of the working directory."""
    (tmp_path / "stacks.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import stacks

    return stacks


def state_of(model):
    """A train state with every leaf random."""

    def make():
        params = model.init(jax.random.key(0), X)["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    return filled(jax.eval_shape(make))


def saved(folder, state):
    """A train state, saved by Orbax, and its outputs with a model."""
    layouts.save_standard(folder, state)
    return {path: np.asarray(leaf) for path, leaf in leaves(folder).items()}


def leaves(folder):
    """Printed path -> leaf, as Orbax reads them."""
    found = layouts.saved_leaves(layouts.load_standard(folder)).items()
    return {"/".join(map(str, path)): leaf for path, leaf in found if leaf is not None}


def assert_stacked(got, before, numbers_of, axis):
    """By numpy: each leaf is the stack of those that have these paths; others stay."""
    made = {path: numbers_of(path) for path in got}
    assert sorted(x for paths in made.values() for x in paths) == sorted(before)
    for path, paths in made.items():
        parts = [before[each] for each in paths]
        np.testing.assert_array_equal(got[path], np.stack(parts, axis) if parts[1:] else parts[0])


def outputs(model, folder):
    return model.apply({"params": layouts.load_standard(folder)["params"]}, X)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_list_becomes_a_scan_and_back(axis, models, tmp_path):
    looped, scanned = models.Looped(), models.Scanned(axis)
    before = saved(tmp_path / "list", state_of(looped))
    at = f"@{axis}" * axis
    run(tmp_path, "ckpt", "list", "scan", "--stack", f"params/layers_{{}}=params/layers{at}")

    def apart(path):
        hit = "/layers/" in path
        return [path.replace("/layers/", f"/layers_{i}/") for i in range(4)] if hit else [path]

    assert_stacked(leaves(tmp_path / "scan"), before, apart, axis)
    np.testing.assert_allclose(
        outputs(scanned, tmp_path / "scan"), outputs(looped, tmp_path / "list"), rtol=1e-5
    )
    both = f"params/layers/**=params/layers_{{:4}}/**{at}"
    run(tmp_path, "ckpt", "scan", "back", "--unstack", both, "--to", "data=1")
    assert reshard.digest(tmp_path / "back") == reshard.digest(tmp_path / "list")


TAIL = [f"^(.*)/layers_{6 + i}/=\\1/tail/layers_{i}/" for i in range(2)]
HEAD = [f"^(.*)/tail/layers_{i}/=\\1/layers_{6 + i}/" for i in range(2)]


def renamed(rules):
    return [word for rule in rules for word in ("--rename", rule)]


def test_cycles_of_different_layers_with_a_remainder(tmp_path):
    """As Gemma 3 has them: the layers of a cycle are stacked over the cycles."""
    widths = [7 if i % 3 == 2 else 5 for i in range(8)]
    params = {f"layers_{i}": {"up": {"kernel": np.ones((4, n))}} for i, n in enumerate(widths)}
    params["head"] = {"bias": np.ones(2)}
    state = {"params": params, "opt_state": [{"mu": params}], "step": np.int32(3)}
    before = saved(tmp_path / "list", filled(state))
    cycles = "params/layers_{:6}=params/layers/layers_{%3}@1"
    run(tmp_path, "ckpt", "list", "scan", *renamed(TAIL), "--stack", cycles)

    def apart(path):
        if hit := re.search(r"/(layers|tail)/layers_(\d)", path):
            first = int(hit[2])
            numbers = (first, first + 3) if hit[1] == "layers" else (first + 6,)
            return [path.replace(hit[0], f"/layers_{i}") for i in numbers]
        return [path]

    assert_stacked(leaves(tmp_path / "scan"), before, apart, 1)
    back = "params/layers/layers_{%3}=params/layers_{}@1"
    run(tmp_path, "ckpt", "scan", "back", *renamed(HEAD), "--unstack", back)
    assert reshard.digest(tmp_path / "back") == reshard.digest(tmp_path / "list")


def test_some_layers_by_their_numbers(tmp_path):
    """Integers stay what they are."""
    layers = {
        f"layer_{i}": {"w": layouts.random((2, 3), seed=i), "n": jnp.int32(i)} for i in range(5)
    }
    layouts.save_standard(tmp_path / "in", {"params": layers})
    some = [f"params/layer_{numbers}" for numbers in ("{1:5:2}=params/odd", "{4,0}=params/x")]
    run(tmp_path, "ckpt", "in", "out", "--stack", some[0], "--stack", some[1])
    got = layouts.load_standard(tmp_path / "out")["params"]
    wanted = {"odd": [1, 3], "x": [4, 0]}
    assert got.keys() == {*wanted, "layer_2"}
    for name, numbers in wanted.items():
        picked = [layers[f"layer_{i}"] for i in numbers]
        for leaf in ("w", "n"):
            np.testing.assert_array_equal(got[name][leaf], np.stack([x[leaf] for x in picked]))


SIX = {f"l{i}": {"w": np.full((2, 3), i, "float32")} for i in range(6)}
REFUSED = {
    "a cycle that is not whole": (
        "--stack params/l{}=params/x/l{%4}@-1",
        "Error: the layers cannot be stacked\n"
        "  params/x/l0: 6 layers are not whole cycles of 4\n\n"
        "hint: --stack 'params/l{:4}=params/x/l{%4}@-1' leaves the last 2 as they are\n",
    ),
    "numbers that are no cycles": (
        "--stack params/l{0,1,4}=params/x/l{%2}",
        "Error: the layers cannot be stacked\n  params/x/l0: 3 layers are not whole cycles of 2\n",
    ),
    "several, with a number that is missing": (
        "--stack params/l{:7}=params/x --stack params/m{}=params/y --unstack z=y{}",
        "Error: 3 problems\n"
        "  no leaf is below `z`\n"
        "  the layers cannot be stacked\n"
        "    params/x: there is no layer 6, only 0, 1, 2, 3, 4, 5\n"
        "  no layer matches `params/m{}`\n\n"
        "hint: --stack 'params/l{0,1,2,3,4,5}=params/x'\n"
        "hint: the leaf nearest to `params/m{}` is `params/l0/w`\n"
        "hint: `params/layer_{}` stands for params/layer_0, params/layer_1 and so on; `*` for any "
        "key\n",
    ),
    "a cycle without all its layers": (
        "--rename l4=m --unstack params/l{%6}=params/x{}",
        "Error: not all arrays have the layers on axis 0\n"
        "  params/l0: the layers of its cycle are 0, 1, 2, 3, 5, not 0 to 5\n",
    ),
    "two names of one number": (
        "--rename l1=l00 --unstack params/l{%6}=params/x{}",
        "Error: not all arrays have the layers on axis 0\n"
        "  params/l0 and params/l00 are both 0\n"
        "  params/l0: the layers of its cycle are 0, 2, 3, 4, 5, not 0 to 5\n",
    ),
    "other numbers than the axis has": (
        "--unstack params/l{%6}=params/x{:13}",
        "Error: not all arrays have the 13 layers on axis 0\n  params/l0/w: 2 layers\n",
    ),
    "two cycles in one path": (
        "--stack params/l{}=params/{%2}/{%3}",
        "Error: the path does not name the layers\n"
        "  `params/{%2}/{%3}` must have at most one `{%6}`, for a cycle of six layers\n\n"
        "hint: `params/layer_{}` stands for params/layer_0, params/layer_1 and so on; `*` for any "
        "key\n",
    ),
}


def test_a_cycle_begins_with_the_first_layer(tmp_path):
    """So layers keep their order where some that are in no cycle come before them."""
    layouts.save_standard(tmp_path / "in", {"params": SIX})
    run(tmp_path, "ckpt", "in", "out", "--stack", "params/l{1:5}=params/x/l{%2}")
    got = {path: leaf[..., 0, 0].tolist() for path, leaf in leaves(tmp_path / "out").items()}
    stacks = {"params/x/l0/w": [1, 3], "params/x/l1/w": [2, 4]}
    assert got == {"params/l0/w": 0, "params/l5/w": 5, **stacks}
    run(tmp_path, "ckpt", "out", "back", "--unstack", "params/x/l{%2}=params/l{1:5}")
    assert reshard.diff(tmp_path / "back", tmp_path / "in", values=True).equal


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stacked_is_refused_with_all_problems(name, tmp_path):
    words, text = REFUSED[name]
    layouts.save_standard(tmp_path / "in", {"params": SIX})
    assert refused(tmp_path, "ckpt", "in", "out", *words.split()) == text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, problem",
    [
        ("params/l{x}=l", "`{x}` has no numbers of layers: `{:24}`, `{1:24:2}` or `{3,5}`"),
        ("params/l{0:}=l", "`{0:}` has no numbers of layers: `{:24}`, `{1:24:2}` or `{3,5}`"),
        ("params/l{}", "`params/l{}` needs an `=` with text before it"),
    ],
)
def test_a_flag_that_does_not_say_which_layers(text, problem, tmp_path):
    layouts.save_standard(tmp_path / "in", {"params": SIX})
    err = refused(tmp_path, "ckpt", "in", "out", "--stack", text)
    assert err.endswith(f"Error: Invalid value for --stack: {problem}\n")


def hint_of(err):
    """The one hint of a refusal, as it is typed."""
    (hint,) = re.findall(r"(?m)^hint: (.*)$", err)
    return shlex.split(hint)


@pytest.mark.parametrize(
    "before, model, hint",
    [
        ("scanned", "looped", ["--unstack", "params/layers=params/layers_{}@1"]),
        ("looped", "scanned", ["--stack", "params/layers_{}=params/layers@1"]),
    ],
)
def test_the_hint_for_a_model_with_the_other_form_works(before, model, hint, models, tmp_path):
    layouts.save_standard(tmp_path / "in", getattr(models, before)())
    words = ("ckpt", "in", "out", "--to", "data=1", "--model", f"stacks:{model}")
    assert hint_of(refused(tmp_path, *words)) == hint
    run(tmp_path, *words, *hint)
    np.testing.assert_allclose(
        outputs(models.Looped() if model == "looped" else models.Scanned(), tmp_path / "out"),
        outputs(models.Looped() if before == "looped" else models.Scanned(), tmp_path / "in"),
        rtol=1e-5,
    )
    target = jax.eval_shape(getattr(models, model))
    error = layouts.raised(reshard.errors.TreeMismatchError, reshard.restore, "in", target)
    (call,) = error.hints
    ckpt = eval(call.replace("open(path)", "open('in')"), {"reshard": reshard})
    assert reshard.diff(ckpt, tmp_path / "out", values=True).equal


@pytest.mark.parametrize("to", ["nnx", "linen"])
def test_the_hint_for_a_conversion_between_both_forms_works(to, models, tmp_path):
    """Layers of Linen on their own, and of NNX in one array each."""
    linen = jax.tree.map(lambda x: x, models.looped())
    if to == "nnx":
        layouts.save_standard(tmp_path / "in", linen)
        model, hint = "Stacked", ["--stack", "params/layers_{}=params/layers@0"]
    else:
        state = nnx.to_pure_dict(nnx.state(models.Stacked()))
        layouts.save_standard(tmp_path / "in", state)
        model, hint = "looped", ["--unstack", "layers=layers_{}@0"]
    words = ("convert", "in", "out", "--to", to, "--model", f"stacks:{model}")
    assert hint_of(refused(tmp_path, *words)) == hint
    status, _, err = reshard_in(tmp_path, *words, *hint)
    assert status == 0, err
    before, got = leaves(tmp_path / "in"), leaves(tmp_path / "out")
    one, several = (got, before) if to == "nnx" else (before, got)
    one = {re.sub("/value$", "", path): leaf for path, leaf in one.items()}
    several = {path.removeprefix("params/"): leaf for path, leaf in several.items()}
    for path, leaf in one.items():
        parts = [several[path.replace("layers/", f"layers_{i}/")] for i in range(4)]
        np.testing.assert_array_equal(leaf, np.stack(parts) if "layers/" in path else parts[0])
    assert len(several) == 2 + 4 * (len(one) - 2)
