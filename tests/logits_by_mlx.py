"""A process: logits of a Hugging Face directory by mlx-lm.

python logits_by_mlx.py HF_DIR TOKENS.npy LOGITS.npy
"""

import pathlib
import sys

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx_lm.utils import load_model

directory, tokens, logits = sys.argv[1:]
# mlx-lm's Gemma 1 has the exact GELU; Hugging Face's and JAX's have the approximate one.
mlx.nn.gelu = mlx.nn.gelu_approx
mx.set_default_device(mx.cpu)
model, _ = load_model(pathlib.Path(directory))
np.save(logits, np.array(model(mx.array(np.load(tokens)))))
