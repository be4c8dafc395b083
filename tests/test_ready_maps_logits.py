"""What models compute with the weights that ready maps make: logits of a JAX project against those
of mlx-lm, from the same Hugging Face directory.

Each library is in a process of its own, in this environment or in another one: `RESHARD_MLX_PYTHON`
and the like name its interpreter. Tests of a library that cannot be imported are skipped.

    mlx      pip install '.[test-hf]'
    tunix    pip install --no-deps google-tunix==0.1.7 google-metrax, and what its import asks for
    gemma    pip install --no-deps gemma==3.3.0 kauldron==1.4.2, and what its import asks for
    flax     examples/gemma of Flax's repository on PYTHONPATH
    maxtext  src of MaxText's repository on PYTHONPATH, and what its import asks for
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
from reshard.convert.remap import ready_maps

pytestmark = pytest.mark.exhaustive

HERE = pathlib.Path(__file__).parent
TOLERANCE, DIFFERS = 2e-5, 1e-2  # of the largest logit
LENGTH = 16  # more than the sliding windows
SEEDS = range(3)
MODULES = {
    "mlx": "mlx_lm",
    "tunix": "tunix",
    "gemma": "gemma",
    "flax": "transformer_cfg",
    "maxtext": "maxtext",
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def variants(name):
    """Changes to the configuration of the model of a map."""
    yield {}
    yield {"num_key_value_heads": 4}
    if name.startswith(("llama", "qwen3")):
        yield {"tie_word_embeddings": True}
    if name.startswith("llama-maxtext"):  # Tunix does not scale RoPE
        yield {"rope_scaling": LLAMA_3_1}


@functools.cache
def interpreter(library):
    """The Python that has a library; None if there is none."""
    python = os.environ.get(f"RESHARD_{library.upper()}_PYTHON", sys.executable)
    command = [python, "-W", "ignore", "-c", f"import {MODULES[library]}"]
    return None if subprocess.run(command, capture_output=True, check=False).returncode else python


def logits(library, folder, given):
    """By the script of a library: of each model that is in these folders."""
    python, outs = interpreter(library), [folder / f"{library}-{n}.npy" for n in range(len(given))]
    if python is None:
        variable = f"RESHARD_{library.upper()}_PYTHON"
        pytest.skip(f"`{MODULES[library]}` cannot be imported; {variable} names another Python")
    np.save(
        folder / "tokens.npy",
        np.random.default_rng(1).integers(0, 48, (2, LENGTH)).astype("int32"),
    )
    command = [python, "-W", "ignore", HERE / f"logits_by_{library}.py", folder / "tokens.npy"]
    for (checkpoint, config), out in zip(given, outs, strict=True):
        command += [checkpoint, config, out]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert made.returncode == 0, made.stderr
    return [np.load(out) for out in outs]


def differences(folder, name, cases):
    """For each case, a configuration, a seed and a change to the weights that the map takes: the
    largest difference of logits, of the largest logit."""
    sources, results = [], []
    for number, (config, seed, change) in enumerate(cases):
        source, given, out = (folder / f"{part}{number}" for part in ("hf", "given", "out"))
        tensors = hf_models.tensors(config, seed)
        hf_models.write(source, config, tensors)
        hf_models.write(given, config, change(tensors))
        reshard.save(reshard.remap(reshard.open(given), f"hf:{name}"), out)
        sources.append((source, source / "config.json"))
        results.append((out, source / "config.json"))
    pairs = zip(
        logits("mlx", folder, sources), logits(name.split("-")[1], folder, results), strict=True
    )
    return [float(np.abs(one - other).max() / np.abs(one).max()) for one, other in pairs]


def exchanged(one, other):
    """Changes weights: those of two modules change places."""

    def change(tensors):
        return {
            name.replace(one, "?").replace(other, one).replace("?", other): values
            for name, values in tensors.items()
        }

    return change


def rope_otherwise(tensors):
    """Changes weights: pairs of RoPE are neighbours in each head, and not a half apart."""

    def permuted(weight):
        halves = weight.reshape(-1, 2, 4, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    return {
        name: permuted(values) if "q_proj" in name or "k_proj" in name else values
        for name, values in tensors.items()
    }


def columns_exchanged(tensors):
    """Changes weights: in each pair of columns, gate and up change places."""
    return {
        name: values.reshape(-1, 2)[:, ::-1].reshape(values.shape) if "gate_up" in name else values
        for name, values in tensors.items()
    }


@pytest.mark.every_combination
@pytest.mark.parametrize("name", ready_maps())
def test_logits(tmp_path, name):
    config = hf_models.CONFIGS[name.partition("-")[0]]
    cases = [(config | changes, seed, dict) for changes in variants(name) for seed in SEEDS]
    right = differences(tmp_path, name, cases)
    print(f"{name}: {max(right):.1e}")
    assert max(right) <= TOLERANCE, right


@pytest.mark.every_combination
@pytest.mark.parametrize("name", ready_maps())
def test_wrong_weights_give_other_logits(tmp_path, name):
    """So that `test_logits` would find a wrong map."""
    config = hf_models.CONFIGS[name.partition("-")[0]] | {"num_key_value_heads": 4}
    gate_and_up = columns_exchanged if "gpt_oss" in name else exchanged("gate_proj", "up_proj")
    changes = [exchanged("q_proj", "k_proj"), gate_and_up, rope_otherwise]
    if "gpt_oss" in name:
        changes.append(exchanged("layers.0.", "layers.1."))  # one has a sliding window
    wrong = differences(tmp_path, name, [(config, 0, change) for change in changes])
    print(f"{name}: {min(wrong):.1e}")
    assert min(wrong) > DIFFERS, wrong
