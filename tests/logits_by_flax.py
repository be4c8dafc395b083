"""A process: logits of a checkpoint by Flax's Gemma example, whose folder is on `PYTHONPATH`.

python logits_by_flax.py TOKENS.npy [CHECKPOINT CONFIG.json OUT.npy]...
"""

import jax.numpy as jnp
import orbax.checkpoint as ocp
import transformer
import transformer_cfg
from flax import nnx
from logits_process import gemma_arguments, save_all


def logits(tokens, checkpoint, config):
    sizes = gemma_arguments(config, transformer_cfg.AttentionType)
    sizes["num_layers"] = config["num_hidden_layers"]
    model = transformer.Transformer(transformer_cfg.TransformerConfig(**sizes), rngs=nnx.Rngs(0))
    model.eval()
    with ocp.PyTreeCheckpointer() as reader:
        nnx.update(model, reader.restore(checkpoint, item=nnx.state(model)))
    mask = transformer.make_causal_attn_mask(jnp.ones(tokens.shape, bool))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(jnp.asarray(tokens), positions, None, mask)[0]


save_all(logits)
