"""What the processes `logits_by_*` for JAX projects have in common."""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def gemma_arguments(config: dict[str, Any], types: Any) -> dict[str, Any]:
    """A configuration of Gemma from Hugging Face's. `types`: the kinds of attention."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    local, every = types.LOCAL_SLIDING, types.GLOBAL
    patterns = {"gemma": [every], "gemma2": [local, every], "gemma3_text": [local] * 5 + [every]}
    return {
        "num_embed": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "num_kv_heads": config["num_key_value_heads"],
        "final_logit_softcap": config.get("final_logit_softcapping"),
        "attn_logits_soft_cap": config.get("attn_logit_softcapping"),
        "sliding_window_size": config.get("sliding_window"),
        "use_post_attn_norm": kind != "gemma",
        "use_post_ffw_norm": kind != "gemma",
        "use_qk_norm": kind == "gemma3_text",
        "attention_types": (patterns[kind] * layers)[:layers],
        "local_base_frequency": int(config.get("rope_local_base_freq", config["rope_theta"])),
        "global_base_frequency": int(config["rope_theta"]),
    }


def save_all(logits: Callable[[np.ndarray, pathlib.Path, dict[str, Any]], Any]) -> None:
    """Writes the logits of all checkpoints on the command line."""
    tokens, words = np.load(sys.argv[1]), iter(sys.argv[2:])
    for checkpoint, config, out in zip(words, words, words, strict=True):
        document = json.loads(pathlib.Path(config).read_text())
        np.save(out, np.asarray(logits(tokens, pathlib.Path(checkpoint).resolve(), document)))
