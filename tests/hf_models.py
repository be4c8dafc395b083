"""Tiny random models in Hugging Face's names and shapes, written by NumPy alone."""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# Fewer heads for keys and values than for queries, and heads x head_dim is not the hidden size.
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {**SIZES, "model_type": "qwen3", "tie_word_embeddings": False},
    "gemma": {**SIZES, "model_type": "gemma", "rope_theta": 1e4},
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "rope_theta": 1e4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 64,
    },
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "hidden_size": 36,  # mlx-lm rounds its square root to bfloat16
        "num_hidden_layers": 8,  # one more cycle of six is begun
        "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 1e4,
        "sliding_window": 5,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "tie_word_embeddings": False,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of this configuration, in Hugging Face's names."""
    kind = config["model_type"]
    width, ffn = config["hidden_size"], config["intermediate_size"]
    size = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    found["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings", True):
        found["lm_head.weight"] = (config["vocab_size"], width)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        found |= {
            f"{layer}.self_attn.q_proj.weight": (heads * size, width),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * size, width),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * size, width),
            f"{layer}.self_attn.o_proj.weight": (width, heads * size),
        }
        if kind == "gpt_oss":
            experts = config["num_local_experts"]
            found |= {
                f"{layer}.self_attn.q_proj.bias": (heads * size,),
                f"{layer}.self_attn.k_proj.bias": (kv_heads * size,),
                f"{layer}.self_attn.v_proj.bias": (kv_heads * size,),
                f"{layer}.self_attn.o_proj.bias": (width,),
                f"{layer}.self_attn.sinks": (heads,),
                f"{layer}.mlp.router.weight": (experts, width),
                f"{layer}.mlp.router.bias": (experts,),
                f"{layer}.mlp.experts.gate_up_proj": (experts, width, 2 * ffn),
                f"{layer}.mlp.experts.gate_up_proj_bias": (experts, 2 * ffn),
                f"{layer}.mlp.experts.down_proj": (experts, ffn, width),
                f"{layer}.mlp.experts.down_proj_bias": (experts, width),
            }
        else:
            found |= {
                f"{layer}.mlp.gate_proj.weight": (ffn, width),
                f"{layer}.mlp.up_proj.weight": (ffn, width),
                f"{layer}.mlp.down_proj.weight": (width, ffn),
            }
        found[f"{layer}.input_layernorm.weight"] = (width,)
        found[f"{layer}.post_attention_layernorm.weight"] = (width,)
        if kind in ("gemma2", "gemma3_text"):
            found[f"{layer}.pre_feedforward_layernorm.weight"] = (width,)
            found[f"{layer}.post_feedforward_layernorm.weight"] = (width,)
        if kind in ("qwen3", "gemma3_text"):
            found[f"{layer}.self_attn.q_norm.weight"] = (size,)
            found[f"{layer}.self_attn.k_norm.weight"] = (size,)
    return found


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, of a size at which every one of them changes the logits."""
    rng, zero_centred = np.random.default_rng(seed), "gemma" in config["model_type"]
    found = {}
    for name, shape in shapes(config).items():
        values = rng.standard_normal(shape)
        if len(shape) == 1:
            values = values * 0.2 + ("norm" in name and not zero_centred)
        else:
            values *= (1 if "embed" in name or "experts" in name else 2) / shape[1] ** 0.5
        found[name] = values.astype("float32")
    return found


def write(folder: pathlib.Path, config: dict[str, Any], values: dict[str, np.ndarray]) -> None:
    """A Hugging Face directory."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def in_cache(directory: pathlib.Path, home: pathlib.Path) -> pathlib.Path:
    """Moves a directory into a cache, as `huggingface_hub` has it. Returns the model's directory
    there, whose one snapshot is the directory with links to its files."""
    model = home / "models--org--name"
    snapshot = model / "snapshots" / ("0123456789" * 4)
    for each in (snapshot, model / "blobs", model / "refs"):
        each.mkdir(parents=True)
    (model / "refs" / "main").write_text(snapshot.name)
    for file in sorted(directory.iterdir()):
        blob = model / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return model
