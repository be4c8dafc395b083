"""How a checkpoint becomes one of Flax's other API: the options, for the commands that do it."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli.model_argument import load_model, look_here, model_errors
from reshard.cli.options import options
from reshard.convert.layout import KINDS

if TYPE_CHECKING:
    from reshard.convert.conversion import Conversion
    from reshard.convert.model import TargetTree

_OPTIONS = (
    click.option(
        "--model",
        metavar="MODULE:NAME",
        help="The model to convert to: an NNX class or a function that returns the model (or a "
        "dict of `model` and `optimizer`); for Linen, a function that returns variables or a "
        "TrainState. This runs the code of MODULE, which may be a file: path/to/train.py:NAME, "
        "with its folder first on the path.",
    ),
    click.option(
        "--source-model",
        metavar="MODULE:NAME",
        help="The model of the checkpoint that is converted, for the classes and the order that "
        "paths do not tell. This runs the code of MODULE, in a process of its own.",
    ),
    click.option(
        "--map",
        "map_file",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="TOML with rules from leaf to leaf; they come before what the model says.",
    ),
    click.option(
        "--init",
        metavar="GLOB",
        multiple=True,
        help="Leaves of the model that keep its own initial value, which is computed.",
    ),
    click.option(
        "--layout",
        type=click.Choice(list(KINDS)),
        metavar="KIND",
        help=f"What is converted, if that is not seen: {', '.join(KINDS)}.",
    ),
)
conversion_options = options(_OPTIONS)


def converter(to: str, flags: dict[str, Any]) -> Callable[..., "Conversion"]:
    """What converts checkpoints to the API `to`, as the values of these options say. The models are
    loaded once, when the first of them is converted: that of the source in a process of its own."""
    model, source = flags["model"], flags["source_model"]

    @functools.cache
    def models() -> tuple[Any, "TargetTree | None"]:
        if source is None:
            return None if model is None else load_model(model, "--model"), None
        # Which takes as long to import as a small checkpoint takes to read.
        from reshard.cli.apart import told_apart
        from reshard.convert.model import target_tree_of

        api = "linen" if to == "nnx" else "nnx"
        task = functools.partial(target_tree_of, api=api, role="the model of the source")
        with told_apart(source, "--source-model", task) as told:
            return None if model is None else load_model(model, "--model"), told()

    def convert(ckpt: Checkpoint, drop: Sequence[str] = ()) -> "Conversion":
        from reshard.convert.conversion import conversion

        look_here()  # for the functions of a map
        with model_errors("--model", model):
            loaded, of_source = models()
            return conversion(
                ckpt,
                to,
                loaded,
                map_file=flags["map_file"],
                drop=drop,
                init=flags["init"],
                layout=flags["layout"],
                source=of_source,
                max_memory=flags["max_memory"],
            )

    return convert
