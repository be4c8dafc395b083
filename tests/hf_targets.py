"""The trees of JAX projects, made by NumPy of tensors in Hugging Face's names: what ready maps are
compared with. Keys are printed paths."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, Any]


def heads_apart(weight: np.ndarray, config: Config) -> np.ndarray:
    """[heads x size, width] -> [heads, size, width]."""
    return weight.reshape(-1, config["head_dim"], weight.shape[1])


def tunix(tensors: Tensors, config: Config) -> dict[str, np.ndarray]:
    if "gemma" in config["model_type"]:
        return _nnx_gemma(tensors, config, "w", "input_embedding")
    return {f"{name}/value": values for name, values in _tunix_llama(tensors, config).items()}


def flax(tensors: Tensors, config: Config) -> dict[str, np.ndarray]:
    return _nnx_gemma(tensors, config, "kernel", "embedding")


def gemma_flat(tensors: Tensors, config: Config) -> dict[str, np.ndarray]:
    found = {}
    for name, values in gemma(tensors, config).items():
        module, _, leaf = name.rpartition("/")
        if module.endswith("/mlp"):
            module, leaf = name, "w"
        found[f'"transformer/{module}"/{leaf}'] = values
    return found


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


def _nnx_gemma(t: Tensors, config: Config, weight: str, embedding: str) -> dict[str, np.ndarray]:
    """Gemma as an NNX model, whose projections have this name for their weights."""
    found = {}
    for name, values in gemma(t, config).items():
        place = re.sub(r"layer_(\d+)", r"layers/\1", name)
        if "gating_einsum" in place:
            for part, values_of in zip(("gate_proj", "up_proj"), values, strict=True):
                kernel = values_of if config["model_type"] == "gemma" else values_of.T
                found[place.replace("gating_einsum", f"{part}/kernel/value")] = kernel
            continue
        place = re.sub("linear$", "down_proj/kernel", place)
        place = re.sub("/w$", f"/{weight}", place).replace("input_embedding", embedding)
        if weight == "w" and config["model_type"] == "gemma2":
            place = place.replace("post_attention_norm", "post_attn_norm")
        found[f"{place}/value"] = values
    return found


def gemma(t: Tensors, config: Config) -> dict[str, np.ndarray]:
    """As google-deepmind/gemma has it."""
    kind = config["model_type"]
    found = {
        "embedder/input_embedding": t["model.embed_tokens.weight"],
        "final_norm/scale": t["model.norm.weight"],
    }
    norms = {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "pre_ffw_norm"}
    if kind != "gemma":
        norms["post_attention_layernorm"] = "post_attention_norm"
        norms |= {"pre_feedforward_layernorm": "pre_ffw_norm"}
        norms |= {"post_feedforward_layernorm": "post_ffw_norm"}
    for n in range(config["num_hidden_layers"]):
        hf, to = f"model.layers.{n}", f"layer_{n}"
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
        gating = np.stack([t[f"{hf}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        found[f"{to}/mlp/gating_einsum"] = gating.swapaxes(1, 2) if kind == "gemma" else gating
        found[f"{to}/mlp/linear"] = t[f"{hf}.mlp.down_proj.weight"].T
    return found


def maxtext(t: Tensors, config: Config) -> dict[str, np.ndarray]:
    """As MaxText's converter has it, scanned along axis 1."""
    layers, found = _maxtext_layers(t, config), {}
    count, cycle = len(layers), {"gemma3_text": 6, "gpt_oss": 2}.get(config["model_type"], 1)
    for name in layers[0] if cycle == 1 else ():
        found[f"decoder/layers/{name}"] = np.stack([layer[name] for layer in layers], 1)
    for place in range(cycle if cycle > 1 else 0):
        whole = layers[: count - count % cycle][place::cycle]
        for name in layers[0]:
            values = np.stack([layer[name] for layer in whole], 1)
            found[f"decoder/layers/layers_{place}/{name}"] = values
    for place, layer in enumerate(layers[count - count % cycle :]):
        for name, values in layer.items():
            found[f"decoder/layers_remainder/layers_{place}/{name}"] = values
    return _maxtext_top(t, config, found)


def maxtext_unscanned(t: Tensors, config: Config) -> dict[str, np.ndarray]:
    found = {}
    for n, layer in enumerate(_maxtext_layers(t, config)):
        found |= {f"decoder/layers_{n}/{name}": values for name, values in layer.items()}
    return _maxtext_top(t, config, found)


def _maxtext_top(t: Tensors, config: Config, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kind, root = config["model_type"], np.float32(config["hidden_size"] ** 0.5)
    if kind == "gemma3_text":
        root = np.float32(ml_dtypes.bfloat16(root))
    gemma = np.float32("gemma" in kind)
    factor = root if gemma else np.float32(1)
    found["token_embedder/embedding"] = t["model.embed_tokens.weight"] * factor
    found["decoder/decoder_norm/scale"] = t["model.norm.weight"] + gemma
    if "lm_head.weight" in t:
        found["decoder/logits_dense/kernel"] = t["lm_head.weight"].T
    return {f"params/params/{name}": values for name, values in found.items()}


def _maxtext_layers(t: Tensors, config: Config) -> list[dict[str, np.ndarray]]:
    """The leaves of each layer; of each pair of layers, for Gemma 2."""
    kind, size = config["model_type"], config["head_dim"]
    gemma = "gemma" in kind
    attention = "GptOssAttention" if kind == "gpt_oss" else "self_attention"
    norms = {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "self_attention/query_norm",
        "self_attn.k_norm": "self_attention/key_norm",
    }
    layers = []
    for n in range(config["num_hidden_layers"]):
        hf, layer = f"model.layers.{n}", {}
        for name, norm in norms.items():
            if (weight := t.get(f"{hf}.{name}.weight")) is not None:
                place = norm.replace("_layer_norm", "_norm") if gemma else norm
                layer[f"{place}/scale"] = weight + np.float32(gemma)
        for name, projection in (("q", "query"), ("k", "key"), ("v", "value")):
            heads = heads_apart(t[f"{hf}.self_attn.{name}_proj.weight"], config)
            if kind == "llama" and config.get("rope_scaling") and name != "v":
                heads = np.stack([heads[:, : size // 2], heads[:, size // 2 :]], 2)
                heads = heads.reshape(len(heads), size, -1)
            if name == "q" and kind in ("llama", "gemma2"):
                heads = heads * np.float32(size**-0.5)
            layer[f"{attention}/{projection}/kernel"] = np.einsum("nhd->dnh", heads)
        out = t[f"{hf}.self_attn.o_proj.weight"].T
        layer[f"{attention}/out/kernel"] = out.reshape(-1, size, out.shape[1])
        if kind == "gpt_oss":
            layer |= _gpt_oss_layer(t, hf, size)
        else:
            for name, place in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
                layer[f"mlp/{place}/kernel"] = t[f"{hf}.mlp.{name}_proj.weight"].T
        layers.append(layer)
    if kind != "gemma2":
        return layers
    pairs = zip(layers[::2], layers[1::2], strict=True)
    return [
        {
            re.sub("^[^/]*", rf"\g<0>_{part}", name): values
            for part, layer in zip(("local", "global"), pair, strict=True)
            for name, values in layer.items()
        }
        for pair in pairs
    ]


def _gpt_oss_layer(t: Tensors, hf: str, size: int) -> dict[str, np.ndarray]:
    """What only GPT-OSS has: biases, sinks and experts."""
    attention, mlp, experts = f"{hf}.self_attn", f"{hf}.mlp", f"{hf}.mlp.experts"
    return {
        "GptOssAttention/query/bias": t[f"{attention}.q_proj.bias"].reshape(-1, size),
        "GptOssAttention/key/bias": t[f"{attention}.k_proj.bias"].reshape(-1, size),
        "GptOssAttention/value/bias": t[f"{attention}.v_proj.bias"].reshape(-1, size),
        "GptOssAttention/out/bias": t[f"{attention}.o_proj.bias"],
        "GptOssAttention/sinks": t[f"{attention}.sinks"],
        "GptOssMlp/gate/kernel": t[f"{mlp}.router.weight"].T,
        "GptOssMlp/gate/bias": t[f"{mlp}.router.bias"],
        "GptOssMlp/wi_0": t[f"{experts}.gate_up_proj"][..., 0::2],
        "GptOssMlp/wi_1": t[f"{experts}.gate_up_proj"][..., 1::2],
        "GptOssMlp/wi_0_bias": t[f"{experts}.gate_up_proj_bias"][..., 0::2],
        "GptOssMlp/wi_1_bias": t[f"{experts}.gate_up_proj_bias"][..., 1::2],
        "GptOssMlp/wo": t[f"{experts}.down_proj"],
        "GptOssMlp/wo_bias": t[f"{experts}.down_proj_bias"],
    }


TARGETS: dict[str, Callable[[Tensors, Config], dict[str, np.ndarray]]] = {
    "tunix": tunix,
    "flax": flax,
    "gemma": gemma,
    "gemma-flat": gemma_flat,
    "maxtext": maxtext,
    "maxtext-unscanned": maxtext_unscanned,
}
