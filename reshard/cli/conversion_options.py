"""Options of a conversion to Flax's other API: the models, the map, and the check of outputs."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import options, subprocess_model
from reshard.cli.changes import chosen_map, map_options
from reshard.cli.model_argument import load_model, model_errors
from reshard.convert.layout import KINDS

# Imported where they are used: their import takes as long as a small job.
if TYPE_CHECKING:
    from reshard.convert.conversion import Conversion
    from reshard.convert.model import TargetTree
    from reshard.convert.model_run import OutputComparison, Run

conversion_options = options.all_of(
    options.value(
        "--model",
        "MODULE:NAME",
        "The model to convert to. For NNX, a class or a function that returns the model, or a dict "
        "of `model` and `optimizer`. For Linen, a function that returns variables or a TrainState. "
        "This runs the code of MODULE, which may be a file: path/to/train.py:NAME.",
    ),
    options.value(
        "--source-model",
        "MODULE:NAME|hf:DIR",
        "The model of the checkpoint to convert. It supplies the classes and the order of modules. "
        "This runs the code of MODULE, in a process of its own. hf:DIR is the model of a Hugging "
        "Face directory, for --check only.",
    ),
    map_options(
        "TOML with rules from leaf to leaf, which have precedence over names and order, or a ready "
        "map: `reshard help maps`."
    ),
    options.values("--init", "GLOB", "Leaves that get the model's own initial value."),
    options.value(
        "--layout",
        "KIND",
        f"Layout of the checkpoint to convert, if it is not detected: {', '.join(KINDS)}.",
        type=click.Choice(list(KINDS)),
    ),
)


def converter(to: str, flags: options.Flags) -> Callable[..., "Conversion"]:
    """A function that converts checkpoints to the API `to`. The models are loaded once."""
    model, source = flags["model"], flags["source_model"]
    if source is not None and source.startswith("hf:"):
        if to != "nnx" or not flags.get("check"):
            raise click.UsageError("--source-model hf:DIR requires `convert --to nnx --check`")
        source = None  # it has no Flax modules

    @functools.cache
    def models() -> tuple[Any, "TargetTree | None"]:
        loaded = None if model is None else load_model(model, "--model")
        if source is None:
            return loaded, None
        from reshard.convert.model import target_tree_of

        api = "linen" if to == "nnx" else "nnx"
        task = functools.partial(target_tree_of, api=api, role="the model of the source")
        return loaded, subprocess_model.run_in_subprocess(source, "--source-model", task)

    def convert(ckpt: Checkpoint, drop: Sequence[str] = ()) -> "Conversion":
        from reshard.convert.conversion import conversion

        with model_errors("--model", model):
            loaded, of_source = models()
            same = {name: flags[name] for name in ("init", "layout", "max_memory")}
            same["map_file"] = chosen_map(ckpt, flags, to)
            return conversion(ckpt, to, loaded, drop=drop, source=of_source, **same)

    return convert


def check_outputs(made: "Conversion", flags: options.Flags) -> "OutputComparison":
    """Runs both models of a conversion, that of the source in a process of its own."""
    given = None
    if flags["inputs"] is not None:
        with model_errors("--inputs", flags["inputs"]):
            given = load_model(flags["inputs"], "--inputs")()
    if flags["source_model"].startswith("hf:") and isinstance(given, dict):
        given = given.get("nnx", given)  # the token ids are those of the NNX model

    def run(api: str, *asked: Any) -> "Run":
        option = "--model" if api == made.to else "--source-model"
        name = flags[option[2:].replace("-", "_")]
        if not flags["quiet"]:
            click.echo(f"check: running {name}", err=True)
        task = functools.partial(_run, api, option, name, made.leaves(api), asked)
        if api == made.to:
            return task(load_model(name, option))
        return subprocess_model.run_in_subprocess(name, option, task)

    runs = {api: functools.partial(run, api) for api in ("linen", "nnx")}
    return made.compare_outputs(runs, given)


def _run(api: str, option: str, name: str, leaves: Any, asked: Sequence[Any], model: Any) -> "Run":
    from reshard.convert import hf_model, model_run

    hint = "check=... may have other arguments, such as `train=False`"
    with model_errors(option, name, [hint]):
        if name.startswith("hf:"):
            return hf_model.run(name.removeprefix("hf:"), *asked)
        return model_run.run(api, model, leaves, *asked)
