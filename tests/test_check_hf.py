"""`convert --check --source-model hf:DIR`: the logits of a library that reads the Hugging Face
directory itself, against those of an NNX model."""

import importlib.util
import os
import subprocess
import sys

import hf_models
import in_process
import numpy as np
import pytest

import reshard
from reshard.cli import subprocess_model
from reshard.cli.subprocess_model import run_in_subprocess
from reshard.convert import hf_model

# Llama with the tree of Tunix.
MODEL = """
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HEADS, KV_HEADS, SIZE, WIDTH, FFN, VOCAB = 4, 4, 8, 24, 40, 48


class Weight(nnx.Module):
    def __init__(self, *shape):
        self.w = nnx.Param(jnp.ones(shape))


class Norm(Weight):
    def __call__(self, x):
        return self.w * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotated(x):
    angle = jnp.arange(x.shape[1])[:, None] * 1e6 ** -(jnp.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self):
        self.q_proj = Weight(WIDTH, HEADS, SIZE)
        self.k_proj, self.v_proj = Weight(WIDTH, KV_HEADS, SIZE), Weight(WIDTH, KV_HEADS, SIZE)
        self.o_proj = Weight(HEADS, SIZE, WIDTH)

    def __call__(self, x):
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", x, part.w[...])
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return jnp.einsum("btnh,nhd->btd", mixed, self.o_proj.w[...])


class Mlp(nnx.Module):
    def __init__(self):
        def linear(one, other):
            return nnx.Linear(one, other, use_bias=False, rngs=nnx.Rngs(0))

        self.gate_proj, self.up_proj = linear(WIDTH, FFN), linear(WIDTH, FFN)
        self.down_proj = linear(FFN, WIDTH)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self):
        self.attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(WIDTH), Norm(WIDTH)

    def __call__(self, x):
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedder(nnx.Module):
    def __init__(self):
        self.input_embedding = nnx.Param(jnp.ones((VOCAB, WIDTH)))


class Llama(nnx.Module):
    def __init__(self):
        self.embedder, self.final_norm = Embedder(), Norm(WIDTH)
        self.lm_head = Weight(WIDTH, VOCAB)
        self.layers = nnx.List([Layer() for _ in range(3)])

    def __call__(self, tokens, scale=1.0):
        x = self.embedder.input_embedding[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return scale * (self.final_norm(x) @ self.lm_head.w[...])


def inputs():
    return {"nnx": ((np.arange(30, dtype="int32").reshape(3, 10),), {"scale": 1.0})}
"""
CHECK = ("--to", "nnx", "--map", "hf:llama-tunix", "--model", "llama:Llama", "--check")
EXCHANGED = ("--rename", "q_proj=other", "--rename", "k_proj=q_proj", "--rename", "other=k_proj")
SOURCE = ("--source-model", "hf:hf")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with a model and a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "llama.py").write_text(MODEL)
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
    for more in [(), ("--inputs", "llama:inputs")]:
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
