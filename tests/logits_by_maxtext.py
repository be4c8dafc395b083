"""A process: logits of a checkpoint of MaxText's, by MaxText.

    python logits_by_maxtext.py TOKENS.npy [CHECKPOINT CONFIG.json LOGITS.npy]...

The checkpoint is scanned if `layers` is in its decoder.
"""

import os
import pathlib
import sys

os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import orbax.checkpoint as ocp
from logits_process import save_all
from maxtext.common.common_types import DECODING_ACTIVE_SEQUENCE_INDICATOR, MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.layers import decoders, embeddings, nnx_decoders
from maxtext.models import models
from maxtext.utils import maxtext_utils


def logits(tokens, checkpoint, config):
    with ocp.PyTreeCheckpointer() as reader:
        params = reader.restore(checkpoint)["params"]
    kind, layers = config["model_type"], config["num_hidden_layers"]
    gemma, tied = "gemma" in kind, config.get("tie_word_embeddings", True)
    given = {
        "base_emb_dim": config["hidden_size"],
        "base_mlp_dim": config["intermediate_size"],
        "base_num_decoder_layers": layers // 2 if kind == "gemma2" else layers,
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "normalization_layer_epsilon": config["rms_norm_eps"],
        "rope_max_timescale": int(config["rope_theta"]),
        "decoder_block": {"llama": "llama2", "gemma3_text": "gemma3"}.get(kind, kind),
        "mlp_activations": ["gelu" if gemma else "silu", "linear"],
        "logits_via_embedding": tied,
        "normalize_embedding_logits": gemma,
        "use_qk_norm": kind == "qwen3",
        "use_post_attn_norm": gemma,
        "use_post_ffw_norm": gemma,
    }
    if gemma or kind == "gpt_oss":
        given["sliding_window_size"] = config["sliding_window"]
    if kind == "gemma2":
        given["final_logits_soft_cap"] = config["final_logit_softcapping"]
        given["attn_logits_soft_cap"] = config["attn_logit_softcapping"]
    if kind == "gemma3_text":  # whose queries are scaled by the name of the model
        given["model_name"], given["override_model_config"] = "gemma3-4b", True
        given["local_rope_max_timescale"] = int(config["rope_local_base_freq"])
        given["rope_linear_scaling_factor"] = 1.0
    if kind == "gpt_oss":
        given |= {
            "attention_bias": True,
            "attention_sink": True,
            "mlp_activations": ["sigmoid", "linear"],
            "mlp_activations_limit": 7.0,
            "mlp_bias": True,
            "routed_bias": True,
            "base_moe_mlp_dim": config["intermediate_size"],
            "num_experts": config["num_local_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
            "sparse_matmul": False,
            "inhomogeneous_layer_cycle_interval": 2,
            "rope_type": "yarn",
            "rope_interleave": False,
            "rope_attention_scaling": True,
            "rope_factor": config["rope_scaling"]["factor"],
            "max_position_embeddings": config["max_position_embeddings"],
        }
    elif config.get("rope_scaling"):
        given["rope_type"], given["rope_use_scale"] = "llama3.1", True
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = pyconfig.initialize(
        [sys.argv[0], str(base)],
        run_name="test",
        per_device_batch_size=float(len(tokens)),
        max_target_length=tokens.shape[1],
        enable_checkpointing=False,
        attention="dot_product",
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        float32_qk_product=True,
        float32_logits=True,
        scan_layers="layers" in params["params"]["decoder"],
        skip_jax_distributed_system=True,
        **given,
    )
    # For logits, MaxText rounds tied embeddings to bfloat16, whatever `dtype` is.
    for module in (decoders, embeddings, nnx_decoders):
        module.attend_on_embedding = lambda query, table, *_, **__: jnp.dot(query, table.T)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(settings), settings.mesh_axes)
    model = models.transformer_as_linen(settings, mesh, None, MODEL_MODE_TRAIN)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype="int32"), tokens.shape)
    segments = np.full(tokens.shape, DECODING_ACTIVE_SEQUENCE_INDICATOR, "int32")
    arguments = [jnp.asarray(each) for each in (tokens, positions, segments)]
    key = jax.random.key(0)
    with mesh:
        return model.apply(
            {"params": params["params"]},
            *arguments,
            enable_dropout=False,
            model_mode=MODEL_MODE_TRAIN,
            rngs={"aqt": key, "dropout": key, "params": key},
            mutable=False,
        )


save_all(logits)
