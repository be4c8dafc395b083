"""A process: logits of Hugging Face directories by mlx-lm.

python logits_by_mlx.py TOKENS.npy [HF_DIR CONFIG.json LOGITS.npy]...
"""

import pathlib
import sys

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx_lm.models import gpt_oss
from mlx_lm.utils import load_model

_sanitize = gpt_oss.Model.sanitize


def _experts_in_bfloat16(model: gpt_oss.Model, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """mlx-lm reads the experts of GPT-OSS as MXFP4 has them: with these names, and the inputs of a
    weight in its last axis."""
    found = {}
    for name, values in weights.items():
        expert = name.endswith((".gate_up_proj", ".down_proj"))
        found[f"{name}.weight" if expert else name] = values.swapaxes(1, 2) if expert else values
    return _sanitize(model, found)


gpt_oss.Model.sanitize = _experts_in_bfloat16
# mlx-lm's Gemma 1 has the exact GELU; Hugging Face's and JAX's have the approximate one.
mlx.nn.gelu = mlx.nn.gelu_approx
mx.set_default_device(mx.cpu)
tokens = mx.array(np.load(sys.argv[1]))
for directory, _, logits in zip(*[iter(sys.argv[2:])] * 3, strict=True):
    model, _ = load_model(pathlib.Path(directory))
    np.save(logits, np.array(model(tokens)))
