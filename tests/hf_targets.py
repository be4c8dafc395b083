"""The trees of JAX projects, made by NumPy of tensors in Hugging Face's names: what ready maps are
compared with. Keys are printed paths."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, Any]


def heads_apart(weight: np.ndarray, config: Config) -> np.ndarray:
    """[heads x size, width] -> [heads, size, width]."""
    return weight.reshape(-1, config["head_dim"], weight.shape[1])


def tunix(tensors: Tensors, config: Config) -> dict[str, np.ndarray]:
    kind = config["model_type"]
    made = (_tunix_gemma if "gemma" in kind else _tunix_llama)(tensors, config)
    return {f"{name}/value": values for name, values in made.items()}


def _tunix_llama(t: Tensors, config: Config) -> dict[str, np.ndarray]:
    found = {
        "embedder/input_embedding": t["model.embed_tokens.weight"],
        "final_norm/w": t["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        found["lm_head/w"] = t["lm_head.weight"].T
    for n in range(config["num_hidden_layers"]):
        hf, to = f"model.layers.{n}", f"layers/{n}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{to}/{norm}/w"] = t[f"{hf}.{norm}.weight"]
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = heads_apart(t[f"{hf}.self_attn.{name}.weight"], config)
            found[f"{to}/attn/{name}/w"] = np.einsum("nhd->dnh", weight)
        out = t[f"{hf}.self_attn.o_proj.weight"].T
        found[f"{to}/attn/o_proj/w"] = out.reshape(-1, config["head_dim"], out.shape[1])
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"{to}/mlp/{name}/kernel"] = t[f"{hf}.mlp.{name}.weight"].T
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                found[f"{to}/attn/{name}/w"] = t[f"{hf}.self_attn.{name}.weight"]
    return found


def _tunix_gemma(t: Tensors, config: Config) -> dict[str, np.ndarray]:
    kind = config["model_type"]
    found = {
        "embedder/input_embedding": t["model.embed_tokens.weight"],
        "final_norm/scale": t["model.norm.weight"],
    }
    norms = {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "pre_ffw_norm"}
    if kind != "gemma":
        norms["post_attention_layernorm"] = (
            "post_attn_norm" if kind == "gemma2" else "post_attention_norm"
        )
        norms |= {"pre_feedforward_layernorm": "pre_ffw_norm"}
        norms |= {"post_feedforward_layernorm": "post_ffw_norm"}
    for n in range(config["num_hidden_layers"]):
        hf, to = f"model.layers.{n}", f"layers/{n}"
        for name, norm in norms.items():
            found[f"{to}/{norm}/scale"] = t[f"{hf}.{name}.weight"]
        q, k, v = (
            np.einsum("nhd->ndh", heads_apart(t[f"{hf}.self_attn.{name}_proj.weight"], config))
            for name in "qkv"
        )
        if len(q) == len(k):
            found[f"{to}/attn/qkv_einsum/w"] = np.stack([q, k, v])
        else:
            found[f"{to}/attn/q_einsum/w"] = q
            found[f"{to}/attn/kv_einsum/w"] = np.stack([k, v])
        out = t[f"{hf}.self_attn.o_proj.weight"]
        found[f"{to}/attn/attn_vec_einsum/w"] = out.T.reshape(len(q), -1, len(out))
        if kind == "gemma3_text":
            found[f"{to}/attn/_query_norm/scale"] = t[f"{hf}.self_attn.q_norm.weight"]
            found[f"{to}/attn/_key_norm/scale"] = t[f"{hf}.self_attn.k_norm.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"{to}/mlp/{name}/kernel"] = t[f"{hf}.mlp.{name}.weight"].T
    return found


TARGETS: dict[str, Callable[[Tensors, Config], dict[str, np.ndarray]]] = {"tunix": tunix}
