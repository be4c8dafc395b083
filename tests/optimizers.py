"""Optimizers of optax, one for every form that their state takes."""

import jax
import optax


def decayed(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def kernels(params):
    """Which parameters are kernels, by name: by rank, that changes when layers are stacked."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "heads"), params
    )


def kernel_labels(params):
    return jax.tree.map(lambda kernel: "kernel" if kernel else "other", kernels(params))


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, mask=decayed),
    "sgd": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "chain": optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1.0, 0.0, 9))),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "masked": optax.masked(optax.adam(1e-3), decayed),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1e-3), "vector": optax.sgd(1e-3, momentum=0.9)}, labels
    ),
}
# Whose state has not the shapes of the parameters: Flax's own functions fail on these.
RESHAPING = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2, momentum=0.9),
    "lbfgs": optax.scale_by_lbfgs(memory_size=3),
    "accumulated adafactor": optax.MultiSteps(
        optax.adafactor(1e-3, min_dim_size_to_factor=2), 2
    ).gradient_transformation(),
    "some adafactor": optax.multi_transform(
        {"matrix": optax.adafactor(1e-3, min_dim_size_to_factor=2), "vector": optax.adam(1e-3)},
        labels,
    ),
}
# Whose masks and labels go by names.
BY_NAME = {
    "adam": optax.adam(1e-3),
    "adamw": optax.chain(
        optax.clip(1.0),
        optax.masked(optax.add_decayed_weights(0.1), kernels),
        optax.adamw(optax.linear_schedule(1.0, 0.5, 9), mask=kernels),
    ),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "masked": optax.masked(optax.adam(1e-3), kernels),
    "multi_transform": optax.multi_transform(
        {"kernel": optax.adam(1e-3), "other": optax.sgd(1e-3, momentum=0.9)}, kernel_labels
    ),
}
