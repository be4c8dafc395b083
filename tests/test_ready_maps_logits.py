"""What models compute with the weights that ready maps make: logits of a JAX project against those
of mlx-lm, from the same Hugging Face directory.

Each library is in a process of its own, in this environment or in another one: `RESHARD_MLX_PYTHON`
and the like name its interpreter. Tests of a library that cannot be imported are skipped.

    mlx      pip install '.[test-hf]'
    tunix    pip install --no-deps google-tunix==0.1.7 google-metrax, and what its import asks for
    gemma    pip install --no-deps gemma==3.3.0 kauldron==1.4.2, and what its import asks for
    flax     examples/gemma of Flax's repository on PYTHONPATH
"""

import functools
import os
import pathlib
import subprocess
import sys

import hf_models
import numpy as np
import pytest

import reshard
from reshard.convert.ready_maps import ready_maps

pytestmark = pytest.mark.exhaustive

HERE = pathlib.Path(__file__).parent
TOLERANCE, DIFFERS = 2e-5, 1e-2  # of the largest logit
LENGTH = 16  # more than the sliding window of Gemma 3
VARIANTS = {
    "as it is": {},
    "as many key-value heads": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
}
MODULES = {
    "mlx": "mlx_lm",
    "tunix": "tunix.models.llama3.model",
    "gemma": "gemma",
    "flax": "transformer_cfg",
}


@functools.cache
def interpreter(library):
    """The Python that has a library; the test is skipped if there is none."""
    python = os.environ.get(f"RESHARD_{library.upper()}_PYTHON", sys.executable)
    word = f"import {MODULES[library]}"
    if subprocess.run([python, "-W", "ignore", "-c", word], capture_output=True).returncode:
        return None
    return python


def logits(library, folder, *words):
    """By the script of a library, in a process of its own."""
    python = interpreter(library)
    if python is None:
        pytest.skip(f"{MODULES[library]} cannot be imported: RESHARD_{library.upper()}_PYTHON")
    tokens, out = folder / "tokens.npy", folder / f"{library}.npy"
    np.save(tokens, np.random.default_rng(1).integers(0, 48, (2, LENGTH)).astype("int32"))
    command = [python, "-W", "ignore", HERE / f"logits_by_{library}.py", *words, tokens, out]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return np.load(out)


def differences(folder, name, config, seed, *changes):
    """The largest difference of logits, of the largest logit: with the weights as they are, and
    after each change to them, which the map then takes."""
    tensors = hf_models.tensors(config, seed)
    hf_models.write(folder / "hf", config, tensors)
    expected = logits("mlx", folder, folder / "hf")
    found = []
    for number, change in enumerate([dict, *changes]):
        given, out = folder / f"given{number}", folder / f"out{number}"
        hf_models.write(given, config, change(tensors))
        reshard.save(reshard.remap(reshard.open(given), f"hf:{name}"), out)
        got = logits(name.split("-")[1], folder, out, given / "config.json")
        found.append(np.abs(got - expected).max() / np.abs(expected).max())
    return found


def exchanged(one, other):
    """Changes weights: those of two modules change places."""

    def change(tensors):
        names = {name: name.replace(one, "?").replace(other, one).replace("?", other)
                 for name in tensors}  # fmt: skip
        return {name: tensors[names[name]] for name in tensors}

    return change


def rope_otherwise(tensors):
    """Changes weights: pairs of RoPE are neighbours in each head, and not a half apart."""

    def permuted(weight):
        halves = weight.reshape(-1, 2, 4, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    return {
        name: permuted(values) if "q_proj" in name or "k_proj" in name else values
        for name, values in tensors.items()
    }


@pytest.mark.every_combination
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ready_maps())
def test_logits(tmp_path, name, variant, seed):
    config = hf_models.CONFIGS[name.partition("-")[0]] | VARIANTS[variant]
    (found,) = differences(tmp_path, name, config, seed)
    assert found <= TOLERANCE


@pytest.mark.every_combination
@pytest.mark.parametrize("name", ready_maps())
def test_wrong_weights_give_other_logits(tmp_path, name):
    """So that `test_logits` would find a wrong map."""
    config = hf_models.CONFIGS[name.partition("-")[0]] | VARIANTS["as many key-value heads"]
    changes = (exchanged("q_proj", "k_proj"), exchanged("gate_proj", "up_proj"), rope_otherwise)
    right, *wrong = differences(tmp_path, name, config, 0, *changes)
    assert right <= TOLERANCE
    assert min(wrong) > DIFFERS, wrong
