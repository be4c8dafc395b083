"""A process: logits of a checkpoint of google-deepmind/gemma's, which it loads, by that library.

python logits_by_gemma.py TOKENS.npy [CHECKPOINT CONFIG.json LOGITS.npy]...
"""

import json
import pathlib
import sys

import jax.numpy as jnp
import kauldron.checkpoints
import numpy as np

if not hasattr(kauldron.checkpoints, "AbstractPartialLoader"):  # which kauldron 1.4 has not
    kauldron.checkpoints.AbstractPartialLoader = object

from gemma import gm
from gemma.gm.nn import _config, _modules, _transformer


def save(tokens: np.ndarray, checkpoint: str, config_file: str, logits_file: str) -> None:
    """Writes the logits of one checkpoint."""
    config = json.loads(pathlib.Path(config_file).read_text())
    types, kind = _modules.AttentionType, config["model_type"]
    local, every = types.LOCAL_SLIDING, types.GLOBAL
    pattern = {"gemma": [every], "gemma2": [local, every], "gemma3_text": [local] * 5 + [every]}[
        kind
    ]
    layers = config["num_hidden_layers"]
    given = _config.TransformerConfig(
        num_embed=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        final_logit_softcap=config.get("final_logit_softcapping"),
        attn_logits_soft_cap=config.get("attn_logit_softcapping"),
        sliding_window_size=config.get("sliding_window"),
        use_post_attn_norm=kind != "gemma",
        use_post_ffw_norm=kind != "gemma",
        use_qk_norm=kind == "gemma3_text",
        attention_types=(pattern * layers)[:layers],
        transpose_gating_einsum=kind != "gemma",
        local_base_frequency=int(config.get("rope_local_base_freq", config["rope_theta"])),
        global_base_frequency=int(config["rope_theta"]),
    )
    model = _transformer.Transformer(config=given, dtype=jnp.float32)
    params = gm.ckpts.load_params(pathlib.Path(checkpoint).resolve())
    out = model.apply({"params": params}, jnp.asarray(tokens))
    np.save(logits_file, np.asarray(out.logits))


words = iter(sys.argv[2:])
for each in zip(words, words, words, strict=True):
    save(np.load(sys.argv[1]), *each)
