"""A process: logits of a checkpoint of google-deepmind/gemma's, which it loads, by that library.

python logits_by_gemma.py TOKENS.npy [CHECKPOINT CONFIG.json LOGITS.npy]...
"""

import jax.numpy as jnp
import kauldron.checkpoints

if not hasattr(kauldron.checkpoints, "AbstractPartialLoader"):  # which kauldron 1.4 has not
    kauldron.checkpoints.AbstractPartialLoader = object

from gemma import gm
from gemma.gm.nn import _config, _modules, _transformer
from logits_process import gemma_arguments, save_all


def logits(tokens, checkpoint, config):
    sizes = gemma_arguments(config, _modules.AttentionType)
    sizes["transpose_gating_einsum"] = config["model_type"] != "gemma"
    given = _config.TransformerConfig(**sizes)
    model = _transformer.Transformer(config=given, dtype=jnp.float32)
    params = gm.ckpts.load_params(checkpoint)
    return model.apply({"params": params}, jnp.asarray(tokens)).logits


save_all(logits)
