"""A process: logits of Hugging Face directories by mlx-lm.

python logits_by_mlx.py TOKENS.npy [HF_DIR CONFIG.json LOGITS.npy]...
"""

import pathlib
import sys

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx_lm.utils import load_model

# mlx-lm's Gemma 1 has the exact GELU; Hugging Face's and JAX's have the approximate one.
mlx.nn.gelu = mlx.nn.gelu_approx
mx.set_default_device(mx.cpu)
tokens = mx.array(np.load(sys.argv[1]))
for directory, _, logits in zip(*[iter(sys.argv[2:])] * 3, strict=True):
    model, _ = load_model(pathlib.Path(directory))
    np.save(logits, np.array(model(tokens)))
