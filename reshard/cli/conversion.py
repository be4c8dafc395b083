"""How a checkpoint becomes one of Flax's other API: the options, for the commands that do it."""

from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli.model import load_model, model_errors
from reshard.cli.options import options
from reshard.convert.kinds import KINDS

if TYPE_CHECKING:
    from reshard.convert.conversion import Conversion

_OPTIONS = (
    click.option(
        "--model",
        metavar="MODULE:NAME",
        help="The model to convert to: an NNX class or a function that returns the model (or a "
        "dict of `model` and `optimizer`); for Linen, a function that returns variables or a "
        "TrainState. This runs the code of MODULE.",
    ),
    click.option(
        "--source-model",
        metavar="MODULE:NAME",
        help="The model of the checkpoint that is converted, for the classes and the order that "
        "paths do not tell. This runs the code of MODULE.",
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


def converted(ckpt: Checkpoint, to: str, flags: dict[str, Any]) -> "Conversion":
    """The conversion of a checkpoint to the API `to` that the values of these options ask for."""
    # Which takes as long to import as a small checkpoint takes to read.
    from reshard.convert.conversion import conversion

    model, source = flags["model"], flags["source_model"]
    with model_errors("--model", model):
        return conversion(
            ckpt,
            to,
            None if model is None else load_model(model, "--model"),
            map_file=flags["map_file"],
            init=flags["init"],
            layout=flags["layout"],
            max_memory=flags["max_memory"],
            source=None if source is None else load_model(source, "--source-model"),
        )
