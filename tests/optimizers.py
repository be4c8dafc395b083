"""Optimizers of optax, one for every form that their state takes."""

import jax
import optax


def decayed(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def kernels(params):
    """Which parameters are kernels, by name: by rank, that changes when layers are stacked."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "heads"), params
    )


def labelled(mask, matrix, vector):
    """Of two optimizers one for the parameters that a mask is true of, the other for all others."""

    def labels(params):
        return jax.tree.map(lambda is_matrix: "matrix" if is_matrix else "vector", mask(params))

    return optax.multi_transform({"matrix": matrix, "vector": vector}, labels)


def _optimizers(mask):
    """Those that OPTIMIZERS and BY_NAME have in common."""
    adam, momentum = optax.adam(1e-3), optax.sgd(1e-3, momentum=0.9)
    return {
        "adam": adam,
        "lion": optax.lion(1e-3),
        "MultiSteps": optax.MultiSteps(adam, 2).gradient_transformation(),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        "masked": optax.masked(adam, mask),
        "multi_transform": labelled(mask, adam, momentum),
    }


OPTIMIZERS = _optimizers(decayed) | {
    "adamw": optax.adamw(1e-3, mask=decayed),
    "sgd": optax.sgd(1e-3, momentum=0.9),
    "chain": optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1.0, 0.0, 9))),
}
# Whose state has not the shapes of the parameters: Flax's own functions fail on these.
_adafactor = optax.adafactor(1e-3, min_dim_size_to_factor=2)
RESHAPING = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2, momentum=0.9),
    "lbfgs": optax.scale_by_lbfgs(memory_size=3),
    "accumulated adafactor": optax.MultiSteps(_adafactor, 2).gradient_transformation(),
    "some adafactor": labelled(decayed, _adafactor, optax.adam(1e-3)),
}
# Whose masks and labels go by names.
BY_NAME = _optimizers(kernels) | {
    "adamw": optax.chain(
        optax.clip(1.0),
        optax.masked(optax.add_decayed_weights(0.1), kernels),
        optax.adamw(optax.linear_schedule(1.0, 0.5, 9), mask=kernels),
    ),
    "momentum": optax.sgd(1e-3, momentum=0.9),
}
