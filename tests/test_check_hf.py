"""`convert --check --source-model hf:DIR`: the logits of a library that reads the Hugging Face
directory itself, against those of an NNX model."""

import importlib.util
import os
import shutil
import subprocess
import sys

import hf_models
import in_process
import numpy as np
import pytest
import tunix_llama

import reshard
from reshard.cli import subprocess_model
from reshard.cli.subprocess_model import run_in_subprocess
from reshard.convert import hf_model

CHECK = ("--to", "nnx", "--map", "hf:llama-tunix", "--model", "tunix_llama:Llama", "--check")
EXCHANGED = ("--rename", "q_proj=other", "--rename", "k_proj=q_proj", "--rename", "other=k_proj")
SOURCE = ("--source-model", "hf:hf")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with a model and a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("project")
    shutil.copy(tunix_llama.__file__, directory)
    config = hf_models.CONFIGS["llama"] | {"num_key_value_heads": 4}
    hf_models.write(directory / "hf", config, hf_models.tensors(config))
    return directory


def converted(project, *words):
    """Status, stdout and stderr of a conversion whose source model runs in a process."""
    with in_process.inside(project) as patch:
        patch.setattr(subprocess_model, "run_in_subprocess", run_in_subprocess)
        return in_process.command(["convert", "hf", "out", *words])


@pytest.fixture
def library(request, monkeypatch):
    """Lets the process of the source import a library, from this environment or another one."""
    module, variable = request.param
    if importlib.util.find_spec(module) is None:
        code = f"import {module}, sysconfig; print(sysconfig.get_path('purelib'))"
        python = os.environ.get(variable, sys.executable)
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if ran.returncode:
            pytest.skip(f"`{module}` cannot be imported; {variable} names another Python")
        places = [os.environ.get("PYTHONPATH", ""), ran.stdout.strip()]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))


# Each with the variable that names another Python, from whose packages it is imported.
LIBRARIES = [("mlx_lm", "RESHARD_MLX_PYTHON"), ("torch", "RESHARD_TORCH_PYTHON")]


@pytest.mark.exhaustive
@pytest.mark.every_combination
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_logits(project):
    for more in [(), ("--inputs", "tunix_llama:inputs")]:
        status, out, _ = converted(project, *CHECK, *SOURCE, *more, "--dry-run")
        assert status == 0 and "note     outputs equal: the largest difference is " in out
    status, out, _ = converted(project, *CHECK, *SOURCE, *EXCHANGED)
    assert status == 1 and not (project / "out").exists()
    assert " in Hugging Face and " in out and " times the noise; " in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (((), {}), "there is none"),
        (((np.ones((2, 4)),), {}), "it is array"),
        (((np.ones(4, int),), {}), "it is array"),
        (((np.full((2, 4), 48),), {}), "from 0 to 47"),
        (((np.full((2, 4), -1),), {}), "from 0 to 47"),
    ],
)
def test_inputs_that_are_no_token_ids_are_refused(project, arguments, told):
    with pytest.raises(reshard.ArgumentError, match="is not an array of token ids") as error:
        hf_model.run(str(project / "hf"), arguments, [])
    assert told in str(error.value)


def test_without_a_library_the_error_says_what_to_install(project, monkeypatch):
    for module in ("torch", "mlx", "mlx.core"):
        monkeypatch.setitem(sys.modules, module, None)
    text = "neither transformers nor mlx-lm runs the model of "
    with pytest.raises(reshard.ArgumentError, match=text) as error:
        hf_model.run(str(project / "hf"), None, [])
    assert error.value.hints == (
        "pip install transformers torch",
        "pip install mlx-lm 'mlx[cpu]'",
    )


def test_the_command_refuses_what_it_cannot_check(project):
    status, _, err = converted(project, *CHECK, "--source-model", "hf:nowhere")
    assert status == 2 and "`nowhere` is not a local directory with `config.json`" in err
    for words in (CHECK[:-1], ("--to", "linen", *CHECK[2:])):
        status, _, err = converted(project, *words, *SOURCE)
        assert status == 2 and "hf:DIR requires `convert --to nnx --check`" in err


def test_the_directory_of_a_cache(project, tmp_path, monkeypatch):
    shutil.copytree(project / "hf", tmp_path / "hf")
    model = hf_models.in_cache(tmp_path / "hf", tmp_path / "hub")
    (snapshot,) = (model / "snapshots").iterdir()
    monkeypatch.setattr(hf_model, "_load", lambda directory: pytest.fail(str(directory)))
    for path in (model, snapshot):
        with pytest.raises(pytest.fail.Exception, match=f"^{snapshot}$"):
            hf_model.run(str(path), None, [])
