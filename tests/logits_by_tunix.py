"""A process: logits of a checkpoint of Tunix's, which Orbax reads, by Tunix.

python logits_by_tunix.py TOKENS.npy [CHECKPOINT CONFIG.json LOGITS.npy]...
"""

import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from logits_process import save_all


def logits(tokens, checkpoint, config):
    kind = config["model_type"]
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "num_kv_heads": config["num_key_value_heads"],
    }
    if kind in ("llama", "qwen3"):
        if kind == "llama":
            from tunix.models.llama3 import model as library

            create, tied = library.Llama3, "weight_tying"
        else:
            from tunix.models.qwen3 import model as library

            create, tied = library.Qwen3, "use_tied_embedding"
        given = library.ModelConfig(
            **sizes,
            **{tied: config["tie_word_embeddings"]},
            vocab_size=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=int(config["rope_theta"]),
        )
    elif kind == "gemma3_text":
        from tunix.models.gemma3 import model as library

        create = library.Gemma3
        given = library.ModelConfig(
            **sizes,
            num_embed=config["vocab_size"],
            sliding_window_size=config["sliding_window"],
            local_base_frequency=int(config["rope_local_base_freq"]),
            global_base_frequency=int(config["rope_theta"]),
            param_dtype=jnp.float32,
        )
    else:
        from tunix.models.gemma import model as library

        create, second, types = library.Gemma, kind == "gemma2", library.AttentionType
        given = library.ModelConfig(
            **sizes,
            num_embed=config["vocab_size"],
            final_logit_softcap=config.get("final_logit_softcapping"),
            attn_logits_soft_cap=config.get("attn_logit_softcapping"),
            sliding_window_size=config.get("sliding_window"),
            use_post_attn_norm=second,
            use_post_ffw_norm=second,
            attention_types=[
                types.LOCAL_SLIDING if second and n % 2 == 0 else types.GLOBAL
                for n in range(sizes["num_layers"])
            ],
        )
    model = create(given, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    with ocp.PyTreeCheckpointer() as reader:
        nnx.update(model, reader.restore(checkpoint, item=state))
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), bool)), (len(tokens), length, length)
    )
    return model(jnp.asarray(tokens), positions, None, mask)[0]


save_all(logits)
