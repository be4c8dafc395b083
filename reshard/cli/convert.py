"""`reshard convert`: a Linen checkpoint as one of NNX, or back."""

import json
import pathlib
import re
import sys
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import output
from reshard.cli.conversion_options import conversion_options, converter
from reshard.cli.job import job_options, laid_out, prepared, run
from reshard.convert.by_order import without_notes
from reshard.convert.conversion import Conversion
from reshard.errors import DestinationExistsError, ReshardError
from reshard.tree import format_path


class _Api(click.Choice):
    """One of Flax's APIs; what `--to` of other commands takes is told as such."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if re.fullmatch(r"\d+(x\d+)*|.*=.*", value):
            self.fail(f"`{value}` is a mesh: --mesh {value}", param, ctx)
        return super().convert(value, param, ctx)


@click.command("convert")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option("--to", type=_Api(["nnx", "linen"]), required=True, help="The API to convert to.")
@conversion_options
@click.option("--emit-map", metavar="FILE", help="Write the whole map of the conversion.")
@click.option("--mesh", metavar="MESH", help="A new mesh, too: 1x8, or data=1,model=8.")
@click.option(
    "--check",
    is_flag=True,
    help="Run --model and --source-model, and write nothing unless their outputs are equal.",
)
@click.option(
    "--inputs",
    metavar="MODULE:NAME",
    help="A function that returns what --check calls the models with: a tuple and a dict, "
    "positional and keyword arguments, or {'linen': ..., 'nnx': ...} of such pairs. Without it, "
    "what Linen's model is initialised with.",
)
@job_options
def command(
    src: str, dst: str, to: str, emit_map: str | None, mesh: str | None, check: bool, **flags: Any
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
    if check and not (flags["model"] and flags["source_model"]):
        raise click.UsageError("--check runs both models: give --model and --source-model")
    if flags["inputs"] and not check:
        raise click.UsageError("--inputs goes with --check")
    found: list[Conversion] = []
    warnings: dict[str, None] = {}
    convert = converter(to, flags)

    def change(ckpt: Checkpoint) -> Checkpoint:
        # What is dropped is known to the conversion, so that optimizer state goes with it.
        later = not (flags["selected"] or flags["renames"])
        ckpt = prepared(ckpt, flags | {"drop": ()} if later else flags)
        made = convert(ckpt, flags["drop"] if later else ())
        if emit_map is not None and not made.map.values:
            raise ReshardError(
                f"--emit-map {emit_map}: there is no map, as the record of the conversion from "
                "Linen is followed",
                hints=["--model MODULE:NAME, the Linen model"],
            )
        if check:
            made = _checked(made, dst, flags)
        found.append(made)
        warnings.update(dict.fromkeys(map(output.as_flags, made.warnings)))
        if flags["dry_run"] and not flags["quiet"] and not flags["as_json"]:
            click.echo(made)
        ckpt = without_notes(made.checkpoint, made.warnings)  # they go to stderr
        return laid_out(ckpt, mesh, flags["model"] if flags["rules"] else None, flags, "--mesh")

    def answer() -> dict[str, Any]:
        made = found[0]
        return {
            "layout": made.layout.kind,
            "why": list(made.layout.why),
            "map": [
                {
                    "from": [format_path(path) for path in row.inputs],
                    "to": [format_path(path) for path in row.outputs],
                    "operation": None if row.operation is None else str(row.operation),
                    "origin": row.origin,
                }
                for row in made.map.rows()
            ],
            "rows": [row.document() for row in made.outcomes],
            "dropped": [format_path(path) for path in made.dropped],
            "initial": [format_path(path) for path in made.initial],
            "warnings": list(warnings),
        }

    run(src, dst, change, flags, answer=answer)
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    if emit_map is not None:
        pathlib.Path(emit_map).write_text(found[0].map_text())


def _checked(made: Conversion, dst: str, flags: dict[str, Any]) -> Conversion:
    """A conversion with a note that its outputs are equal; if they are not, this is the end."""
    # Which takes as long to import as a small checkpoint takes to read.
    from reshard.cli.check import check_outputs

    compared = check_outputs(made, flags)
    if compared.equal:
        return made.compared(compared)
    if flags["as_json"]:
        problems = ["the outputs differ", *compared.problems]
        click.echo(json.dumps({"destination": dst, "done": False, "problems": problems}))
    elif not flags["quiet"]:
        click.echo(f"{compared}\nwrote nothing")
    sys.exit(1)
