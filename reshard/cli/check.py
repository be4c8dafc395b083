"""`--check`: the outputs of both models of a conversion, compared."""

import functools
from typing import Any

import click

from reshard.cli import apart
from reshard.cli.model_argument import load_model, model_errors
from reshard.convert.conversion import Conversion
from reshard.convert.model_run import Arguments, More, Run, Tell, linen_run, nnx_run
from reshard.convert.outputs import OutputComparison
from reshard.hints import Hint

_RUNS = {"linen": linen_run, "nnx": nnx_run}


def check_outputs(made: Conversion, flags: dict[str, Any]) -> OutputComparison:
    """Runs both models of a conversion: that of the source in a process of its own."""
    model, source, inputs = flags["model"], flags["source_model"], flags["inputs"]
    tell = _unheard if flags["quiet"] else _tell
    given = None
    if inputs is not None:
        with model_errors("--inputs", inputs):
            given = load_model(inputs, "--inputs")()

    def run(api: str, arguments: Arguments | None, more: More) -> Run:
        option, name = ("--model", model) if api == made.to else ("--source-model", source)
        task = functools.partial(_run, api, option, name, made.leaves(api), tell, arguments, more)
        if api == made.to:
            return task(load_model(model, "--model"))
        with apart.told_apart(source, "--source-model", task) as told:
            return told()

    return made.compare_outputs({api: functools.partial(run, api) for api in _RUNS}, given)


def _run(
    api: str,
    option: str,
    name: str,
    leaves: Any,
    tell: Tell,
    arguments: Arguments | None,
    more: More,
    model: Any,
) -> Run:
    hint = Hint(("inputs",), " may have other arguments, such as `train=False`")
    with model_errors(option, name, [hint]):
        return _RUNS[api](model, leaves, tell, arguments, more)


def _tell(text: str) -> None:
    click.echo(f"check: {text}", err=True)


def _unheard(text: str) -> None:
    pass
