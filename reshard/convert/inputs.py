"""What models are called with, to compare their outputs."""

from typing import Any

from reshard.errors import ArgumentError

# Positional and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(inputs: Any) -> dict[str, Arguments]:
    """The arguments of both models.

    Args:
      inputs: a tuple of positional arguments and a dict of keyword ones, for both alike; or a dict
        of such pairs, `{"linen": ..., "nnx": ...}`. Without `"linen"`, or None, for what Linen's
        model is initialised with: see `linen_run`.

    Raises:
      ArgumentError: it is something else.
    """
    if inputs is None:
        return {}
    pairs = inputs if isinstance(inputs, dict) else {"linen": inputs, "nnx": inputs}
    problems = [f"there is a side {side!r}" for side in pairs if side not in ("linen", "nnx")]
    problems += [
        f"{side}: {pair!r:.80}" for side, pair in pairs.items() if not _are_arguments(pair)
    ]
    if problems:
        raise ArgumentError(
            "the inputs are not positional and keyword arguments",
            problems,
            ["((x,), {})", '{"linen": ((x,), {"train": False}), "nnx": ((x,), {})}'],
        )
    return {side: (tuple(args), dict(kwargs)) for side, (args, kwargs) in pairs.items()}


def _are_arguments(pair: Any) -> bool:
    return (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and isinstance(pair[0], tuple | list)
        and isinstance(pair[1], dict)
        and all(isinstance(name, str) for name in pair[1])
    )
