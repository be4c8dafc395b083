"""`reshard ckpt --model --rules`: a checkpoint laid out as the user's own model is, on disk."""

import json
import pathlib
import shutil
import subprocess
import sys

import in_process
import jax
import layouts
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from jobs import RESHARD

import reshard

MODEL = """
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

class Layer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        return nn.Dense(self.width, kernel_init=init)(x)

def state(width=16):
    model = Layer(width)
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

def narrow():
    return state(8)

def fails():
    raise RuntimeError("no weights today")

number = 3
"""
FAILS_AT = MODEL[: MODEL.index("no weights today")].count("\n") + 1
RULES = (
    'rules = [["embed", "data"], ["mlp", ["model"]], ["kv", []]]\nspecs = [["bias$", ["model"]]]\n'
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    """A directory with `mine.py`, `rules.toml`, and `run`, saved by Orbax on 2x4."""
    path = tmp_path_factory.mktemp("made")
    (path / "mine.py").write_text(MODEL)
    (path / "rules.toml").write_text(RULES)
    made = layouts.random_on(layouts.mesh((2, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        import mine

        real = nn.meta.unbox(mine.state())
        del sys.modules["mine"]
    state = real.replace(step=np.zeros((), "i4"))
    state = jax.tree.map(lambda x: made(x.shape, dtype=x.dtype), state)
    layouts.save_standard(path / "run", state)
    return path


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def run(folder: pathlib.Path, *arguments: str, to: str = "2x2") -> str:
    """What `reshard ckpt run out --to MESH ARGUMENTS` says on stderr in the folder; where it does
    not, nothing is refused."""
    words = ("ckpt", "run", "out", *(("--to", to) if to else ()), *arguments)
    status, _, errors = in_process.reshard_in(folder, *words)
    assert (status, (folder / "out").exists()) == ((2, False) if errors else (0, True))
    return errors


def specs(path: pathlib.Path) -> dict[str, P]:
    """Printed path -> saved spec, of every array."""
    return {
        reshard.tree.format_path(array.path): P(*(axes or None for axes in array.sharding.spec))
        for array in reshard.open(path).arrays
    }


MINE = ("--model", "mine:state", "--rules", "rules.toml")


@pytest.mark.usefixtures("forked")
def test_the_models_specs_are_written_and_optimizer_state_follows(folder):
    command = [RESHARD, "ckpt", "run", "out", "--to", "data=2,model=2", *MINE]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    kernel, bias = P(("data",), ("model",)), P(("model",))
    assert specs(folder / "out") == {"step": P(), "opt_state/0/count": P()} | {
        f"{head}/Dense_0/{name}": spec
        for head in ("params", "opt_state/0/mu", "opt_state/0/nu")
        for name, spec in (("bias", bias), ("kernel", kernel))
    }
    got, expected = (layouts.load_standard(folder / name) for name in ("out", "run"))
    layouts.assert_same_tree(got, expected)


def test_specs_of_a_file_need_no_model_and_come_after_those_of_the_command_line(folder):
    (folder / "specs.toml").write_text('specs = [["kernel$", [["data", "model"], []]]]\n')
    assert run(folder, "--rules", "specs.toml") == ""
    found = specs(folder / "out")
    assert found["params/Dense_0/kernel"] == P(("data", "model"), None)
    assert found["params/Dense_0/bias"] == P()
    assert run(folder, *MINE, "--spec", "bias$=data", "--overwrite") == ""
    assert specs(folder / "out")["opt_state/0/mu/Dense_0/bias"] == P(("data",))


def test_a_model_with_other_leaves_is_refused(folder):
    assert run(folder, "--model", "mine:narrow", "--rules", "rules.toml").startswith(
        f"Error: `{folder / 'run'}` does not match the target: 6 of another shape\n"
        "  params/Dense_0/bias: the target has float32[8], the checkpoint float32[16]\n"
    )
    renames = ("--rename", "^params/Dense_0/=params/Dense_9/")
    assert run(folder, *MINE, "--drop", "opt_state/0/nu/**", *renames) == (
        f"Error: `{folder / 'run'}` does not match the target: 4 missing in the checkpoint, "
        "2 not in the target\n"
        "  params/Dense_0/bias  float32[16]: missing\n"
        "  params/Dense_0/kernel  float32[8, 16]: missing\n"
        "  opt_state/0/nu/Dense_0/bias  float32[16]: missing\n"
        "  opt_state/0/nu/Dense_0/kernel  float32[8, 16]: missing\n"
        "  params/Dense_9/bias  float32[16]: not in the target\n"
        "  params/Dense_9/kernel  float32[8, 16]: not in the target\n\n"
        "hint: --drop 'params/Dense_9/**'\n"
    )


def test_what_is_wrong_with_a_model_is_said(folder):
    assert run(folder, "--model", "mine:fails") == (
        "Error: --model mine:fails: its code raised RuntimeError\n  no weights today\n"
        f"  in {folder}/mine.py, line {FAILS_AT}\n"
    )
    for model, hint in (
        ("mine:stat", "the nearest name is `state`"),
        ("mine.py", "--model mine.py:NAME"),
    ):
        assert run(folder, "--model", model).endswith(f"\n\nhint: {hint}\n")
    told = "Error: --spec, --axis, --model and --rules require --to MESH\n"
    assert run(folder, "--model", "mine:state", to="").endswith(told)
    told = "Error: `--to nnx` is not a mesh; to convert: reshard convert SRC DST --to nnx\n"
    assert run(folder, to="nnx").endswith(told)
    told = in_process.refused(folder, "convert", "run", "out", "--to", "1x8")
    assert told.endswith("Error: Invalid value for '--to': `1x8` is a mesh: --mesh 1x8\n")


def test_to_mesh_takes_a_target_in_python(folder):
    import mine

    mesh = layouts.mesh((4, 2))
    target = reshard.target(mine.state, mesh=mesh, rules=[("mlp", "model")])
    ckpt = reshard.to_mesh(reshard.open(folder / "run"), mesh, target=target)
    reshard.save(ckpt, folder / "out")
    assert specs(folder / "out")["opt_state/0/nu/Dense_0/kernel"] == P(None, ("model",))
    layouts.assert_same_tree(
        reshard.restore(folder / "out", target), reshard.restore(folder / "run", target)
    )
    # One on another mesh is refused.
    ckpt = reshard.open(folder / "run")
    text = layouts.refused(reshard.ShardingError, reshard.to_mesh, ckpt, "2x4", target=target)
    assert text == (
        "the target is on the mesh `data=4,model=2`, not on the new mesh `data=2,model=4`\n\n"
        "hint: build it with `reshard.target(model, mesh=...)` for the same mesh"
    )


def test_a_rule_that_reaches_nothing_is_noted(folder):
    (folder / "rules.toml").write_text(RULES.replace('"mlp"', '"mpl"'))
    notes = [
        "no rule has the axis name `mlp`; the nearest rule is `mpl`. Leaves replicated along this "
        "axis: 3, 768 B a device",
        "rules whose axis name no leaf has: `mpl`. Replicated in all: 8 B a device",
    ]
    command = ("ckpt", "run", "out", "--to", "2x2", *MINE)
    lines = in_process.shown(folder, *command, "--dry-run").splitlines()
    assert [line for line in lines if line.startswith("note")] == [f"note     {x}" for x in notes]
    assert json.loads(in_process.shown(folder, *command, "--json"))["notes"] == notes
