"""Run the model of a Hugging Face directory, for a comparison of outputs with a converted model.

`transformers` runs it if torch is installed, or else `mlx-lm`: in float32, on the CPU. They read
the directory themselves, so the comparison also covers what `reshard` reads.
"""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from reshard.convert.model_run import Arguments, Run, moved
from reshard.convert.remap import read_config
from reshard.errors import ArgumentError
from reshard.loader.hf_files import snapshot


class _Model(NamedTuple):
    """A model that a library has loaded."""

    # Replaces each array of weights by a function of it, in float32.
    change: Callable[[Callable[[np.ndarray], np.ndarray]], None]
    logits: Callable[[np.ndarray], np.ndarray]  # of token ids


def run(directory: str, arguments: Arguments | None, exchanges: object) -> Run:
    """Run the model of a Hugging Face directory. Its output is the logits.

    Args:
      directory: a local directory with `config.json` and safetensors files.
      arguments: the first positional argument is the token ids. None: random ones.
      exchanges: not used. No leaves are exchanged, since they have other names.

    Raises:
      ArgumentError: the directory or the token ids are not usable, or no library runs the model.
    """
    place = pathlib.Path(snapshot(directory))
    if not (place / "config.json").is_file():
        raise ArgumentError(f"`{directory}` is not a local directory with `config.json`")
    arguments, tokens = _tokens(arguments, read_config(place).get("vocab_size"))
    model = _load(place)
    runs = []
    for change in (np.asarray, moved):
        model.change(change)
        runs.append([("", model.logits(tokens))])
    return Run("Hugging Face", arguments, runs[0], noisy=(runs[1], []))


def _tokens(arguments: Arguments | None, vocab: Any) -> tuple[Arguments, np.ndarray]:
    """The arguments, and the token ids in them."""
    if type(vocab) is not int or vocab < 1:
        raise ArgumentError(f"`vocab_size` in config.json is {vocab!r}, not a size")
    if arguments is None:
        arguments = (np.random.default_rng(0).integers(vocab, size=(2, 16), dtype=np.int32),), {}
    tokens = np.asarray(arguments[0][0] if arguments[0] else None)
    are_ids = tokens.dtype.kind in "iu" and tokens.ndim == 2 and tokens.size
    if not are_ids or tokens.min() < 0 or tokens.max() >= vocab:
        raise ArgumentError(
            "the first positional argument is not an array of token ids of shape [batch, length], "
            f"from 0 to {vocab - 1}",
            [f"it is {arguments[0][0]!r:.80}" if arguments[0] else "there is none"],
        )
    return arguments, tokens.astype(np.int64)


def _load(directory: pathlib.Path) -> _Model:
    """The model, by the first library that can load it."""
    problems, hints = [], []
    for library, load, packages in (
        ("transformers", _with_torch, "transformers torch"),
        ("mlx-lm", _with_mlx, "mlx-lm 'mlx[cpu]'"),
    ):
        try:
            return load(directory)
        except Exception as error:  # libraries raise many kinds
            problems.append(f"{library}: {type(error).__name__}: {error}")
            hints += [f"pip install {packages}"] if isinstance(error, ImportError) else []
    raise ArgumentError(
        f"neither transformers nor mlx-lm runs the model of `{directory}`", problems, hints
    )


def _with_torch(directory: pathlib.Path) -> _Model:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    weights = [value for value in model.parameters() if value.is_floating_point()]

    def change(function: Callable[[np.ndarray], np.ndarray]) -> None:
        for value in weights:
            value.copy_(torch.from_numpy(function(value.numpy())))

    def logits(tokens: np.ndarray) -> np.ndarray:
        return model(torch.from_numpy(tokens)).logits.numpy()

    model.eval().requires_grad_(False)
    return _Model(change, logits)


def _with_mlx(directory: pathlib.Path) -> _Model:
    mx = importlib.import_module("mlx.core")
    flatten = importlib.import_module("mlx.utils").tree_flatten
    load = importlib.import_module("mlx_lm.utils").load_model
    mx.set_default_device(mx.cpu)
    model, _ = load(directory, lazy=True, trust_remote_code=False)

    def weights() -> list[tuple[str, Any]]:
        found = flatten(model.parameters())
        return [(name, value) for name, value in found if mx.issubdtype(value.dtype, mx.floating)]

    def change(function: Callable[[np.ndarray], np.ndarray]) -> None:
        for name, value in weights():
            changed = mx.array(function(np.array(value.astype(mx.float32))))
            model.load_weights([(name, changed)], strict=False)

    def logits(tokens: np.ndarray) -> np.ndarray:
        return np.array(model(mx.array(tokens)).astype(mx.float32))

    model.eval()
    return _Model(change, logits)
