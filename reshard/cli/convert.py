"""`reshard convert`: a Linen checkpoint as one of NNX, or back."""

import pathlib
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli.job import job_options, laid_out, prepared, run
from reshard.cli.model import load_model, model_errors
from reshard.convert.conversion import Conversion, conversion
from reshard.convert.layout import KINDS
from reshard.convert.steps import condensed
from reshard.errors import DestinationExistsError, ReshardError
from reshard.tree import format_path


@click.command("convert")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["nnx", "linen"]),
    required=True,
    help="The API to convert to.",
)
@click.option(
    "--model",
    metavar="MODULE:NAME",
    help="The model to convert to: an NNX class or a function that returns the model (or a dict of "
    "`model` and `optimizer`); for Linen, a function that returns variables or a TrainState. "
    "This runs the code of MODULE.",
)
@click.option(
    "--source-model",
    metavar="MODULE:NAME",
    help="The model that SRC is of, for the classes and the order that paths do not tell. "
    "This runs the code of MODULE.",
)
@click.option(
    "--map",
    "map_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="TOML with rules from leaf to leaf; they come before what the model says.",
)
@click.option("--emit-map", metavar="FILE", help="Write the whole map of the conversion.")
@click.option(
    "--init",
    metavar="GLOB",
    multiple=True,
    help="Leaves of the model that keep its own initial value, which is computed.",
)
@click.option(
    "--layout",
    type=click.Choice(list(KINDS)),
    metavar="KIND",
    help=f"What SRC is, if that is not seen: {', '.join(KINDS)}.",
)
@click.option("--mesh", metavar="MESH", help="A new mesh, too: 1x8, or data=1,model=8.")
@job_options
def command(
    src: str,
    dst: str,
    to: str,
    model: str | None,
    source_model: str | None,
    map_file: str | None,
    emit_map: str | None,
    init: tuple[str, ...],
    layout: str | None,
    mesh: str | None,
    **flags: Any,
) -> None:
    """Convert Linen checkpoint SRC to NNX checkpoint DST, or back, optimizer state included.

    Every leaf must have a place, and every leaf of the model a source; nothing is guessed. Where
    only paths change, no array is read. --select, --drop, --rename and --dtype are for SRC as it
    is; --spec and --rules for DST.

    \b
    Example:
      reshard convert run/1000 out/1000 --to nnx --model my_project.model:Transformer --dry-run
      reshard convert run/1000 out/1000 --to nnx --model my_project.model:Transformer \\
        --map map.toml --init 'dropout/rngs/**' --mesh 1x8
      reshard convert out/1000 back/1000 --to linen
    """
    if emit_map is not None and pathlib.Path(emit_map).exists():
        raise DestinationExistsError(f"--emit-map {emit_map}: it exists")
    found: list[Conversion] = []

    def change(ckpt: Checkpoint) -> Checkpoint:
        ckpt = prepared(ckpt, flags)
        with model_errors("--model", model):
            made = conversion(
                ckpt,
                to,
                None if model is None else load_model(model, "--model"),
                map_file=map_file,
                init=init,
                layout=layout,
                source=None if source_model is None else load_model(source_model, "--source-model"),
            )
        if emit_map is not None and not made.steps:
            raise ReshardError(
                f"--emit-map {emit_map}: there is no map, as the record of the conversion from "
                "Linen is followed",
                hints=["--model MODULE:NAME, the Linen model"],
            )
        found.append(made)
        if flags["dry_run"] and not flags["quiet"] and not flags["as_json"]:
            click.echo(made)
        return laid_out(made.checkpoint, mesh, model if flags["rules"] else None, flags, "--mesh")

    def answer() -> dict[str, Any]:
        made = found[0]
        return {
            "layout": made.layout.kind,
            "why": list(made.layout.why),
            "map": [
                {
                    "from": [format_path(path) for path in step.inputs],
                    "to": [format_path(path) for path in step.outputs],
                    "operation": None if step.operation is None else str(step.operation),
                    "origin": step.origin,
                }
                for step in condensed(made.steps)
            ],
            "dropped": [format_path(path) for path in made.dropped],
            "initial": [format_path(path) for path in made.initial],
        }

    run(src, dst, change, flags, answer=answer)
    if emit_map is not None:
        pathlib.Path(emit_map).write_text(found[0].map_text())
