"""The examples run, some of them in a separate process."""

import functools
import importlib
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import optax
import pytest
from sampling import few

import reshard

pytestmark = pytest.mark.usefixtures("quickly_compiled")
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
HERE = ("2x4", "1x8", False)
# Pairs of meshes, in this process or in one of its own.
MESHES = few([HERE, ("8x1", "2x2", True)], HERE)
on_meshes = pytest.mark.parametrize(("first", "second", "alone"), MESHES)


def run(name: str, *arguments: str, cwd: pathlib.Path) -> str:
    """The output of an example as a user runs it, without the settings of `conftest.py`."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    words = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    ran = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def quickstart_here(monkeypatch, *arguments):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])  # the example sets them
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments])
    try:
        example("quickstart", monkeypatch).main()
    finally:
        del sys.modules["quickstart"], sys.modules["mlp"]  # other tests have modules of these names


@pytest.mark.parametrize("alone", few([False, True], False))
def test_quickstart_restores_every_bit(alone, tmp_path, monkeypatch, capfd):
    if alone:
        printed = run("quickstart", cwd=tmp_path)
    else:
        quickstart_here(monkeypatch)
        printed = capfd.readouterr().out
    first, *_, last = printed.splitlines()
    assert first == "Orbax saved 8 arrays on a 2x4 mesh."
    assert last == "Orbax restored 8 arrays on 1x8, with and without a target. Every bit is equal."
    for row in ("| 0,4 | 1,5 | 2,6 | 3,7 |", "| 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |"):
        line = re.sub("[^|]", "-", row).replace("|", "+")
        assert f"\n{line}\n{row}\n{line}\n" in printed
    assert list(tmp_path.iterdir()) == []


def test_quickstart_keeps_a_directory_that_is_in_use(tmp_path, monkeypatch):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SystemExit) as caught:
        quickstart_here(monkeypatch, str(tmp_path))
    assert caught.value.code == f"{tmp_path} is not empty"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


# The output of the examples with the user's own model


@pytest.fixture
def ran_on(tmp_path, monkeypatch, capsys):
    """The output of an example, without the difference from another order of sums."""

    def get(name: str, first: str, second: str, alone: bool) -> str:
        given = () if (first, second) == HERE[:2] else (first, second)
        if alone:
            printed = run(name, *given, cwd=tmp_path)
        else:
            capsys.readouterr()
            example(name, monkeypatch).main(*given)
            printed = capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []
        pattern = r"(?<=stayed on its mesh is )\S+"
        assert all(float(found) < 1e-6 for found in re.findall(pattern, printed))
        return re.sub(pattern, "TINY", printed)

    return get


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


DIFFERENCES = """the largest difference to the run that
  was moved in memory is 0
  stayed on its mesh is TINY
"""


@on_meshes
def test_linen_train_state_goes_on(first, second, alone, ran_on, monkeypatch):
    module = example("linen_train_state", monkeypatch)

    def of(kind: str, scanned: bool) -> str:
        model = module.MLP(module.LAYERS, module.DEPTH, scanned)
        create = functools.partial(module.create_state, model, optax.adam(1e-3))
        found = reshard.coverage(create, mesh=module.mesh_of(second))
        title = f"{kind} layers, from {first} to {second}:"
        return f"{title}\n\n{found}\n\nAfter step 6, {DIFFERENCES}\n"

    printed = ran_on("linen_train_state", first, second, alone)
    assert printed == of("Looped", False) + of("Scanned", True)


@on_meshes
def test_linen_logical_axes_go_on(first, second, alone, ran_on, monkeypatch):
    module = example("linen_logical_axes", monkeypatch)
    model = module.MLP(module.LAYERS, module.DEPTH, scanned=True)
    create = functools.partial(module.create_state, model, optax.adam(1e-3))

    def of(name: str) -> str:
        found = reshard.coverage(create, mesh=module.mesh_of(second), rules=module.RULES[name])
        return f"Restored as {name}, on {second}:\n\n{found}\n\nAfter step 6, {DIFFERENCES}\n"

    printed = ran_on("linen_logical_axes", first, second, alone)
    title = f"Saved after step 3, tensor parallel, on {first}.\n\n"
    assert printed == title + of("tensor parallel") + of("fully sharded")


@on_meshes
@pytest.mark.parametrize(
    ("name", "create"), [("nnx_own_optimizer", "create_model"), ("nnx_optimizer", "create")]
)
def test_nnx_goes_on(name, create, first, second, alone, ran_on, monkeypatch):
    module = example(name, monkeypatch)
    found = reshard.coverage(getattr(module, create), mesh=module.mesh_of(second))
    assert ran_on(name, first, second, alone) == (
        f"{found}\n\nThree steps on {first}, three on {second}: {DIFFERENCES}"
    )
