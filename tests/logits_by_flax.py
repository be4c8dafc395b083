"""A process: logits of a checkpoint by Flax's Gemma example, whose folder is on `PYTHONPATH`.

python logits_by_flax.py TOKENS.npy [CHECKPOINT CONFIG.json OUT.npy]...
"""

import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import transformer
import transformer_cfg
from flax import nnx


def save(tokens: np.ndarray, checkpoint: str, config_file: str, logits_file: str) -> None:
    """Writes the logits of one checkpoint."""
    config = json.loads(pathlib.Path(config_file).read_text())
    types, kind = transformer_cfg.AttentionType, config["model_type"]
    local, every = types.LOCAL_SLIDING, types.GLOBAL
    pattern = {"gemma": [every], "gemma2": [local, every], "gemma3_text": [local] * 5 + [every]}[
        kind
    ]
    layers = config["num_hidden_layers"]
    given = transformer_cfg.TransformerConfig(
        num_layers=layers,
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
        local_base_frequency=int(config.get("rope_local_base_freq", config["rope_theta"])),
        global_base_frequency=int(config["rope_theta"]),
    )
    model = transformer.Transformer(given, rngs=nnx.Rngs(0))
    model.eval()
    with ocp.PyTreeCheckpointer() as reader:
        state = reader.restore(pathlib.Path(checkpoint).resolve(), item=nnx.state(model))
    nnx.update(model, state)
    mask = transformer.make_causal_attn_mask(jnp.ones(tokens.shape, bool))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    np.save(logits_file, np.asarray(model(jnp.asarray(tokens), positions, None, mask)[0]))


words = iter(sys.argv[2:])
for each in zip(words, words, words, strict=True):
    save(np.load(sys.argv[1]), *each)
