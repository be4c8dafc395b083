"""`reshard convert`: a Linen checkpoint converted to NNX, or back."""

import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import options, output
from reshard.cli.changes import prepared
from reshard.cli.conversion_options import check_outputs, conversion_options, converter
from reshard.cli.job import job_options, laid_out, run
from reshard.convert.conversion import Conversion
from reshard.convert.mapfile import is_open
from reshard.errors import DestinationExistsError, ReshardError, TreeMismatchError
from reshard.tree import format_path


class _Api(click.Choice):
    """One of Flax's APIs. The error for a mesh, as `ckpt --to` takes it, says --mesh."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if re.fullmatch(r"\d+(x\d+)*|.*=.*", value):
            self.fail(f"`{value}` is a mesh: --mesh {value}", param, ctx)
        return super().convert(value, param, ctx)


@click.command("convert")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@options.value("--to", None, "The API to convert to.", type=_Api(["nnx", "linen"]), required=True)
@conversion_options
@options.value("--emit-map", "FILE", "Write the complete map of the conversion.")
@options.value("--mesh", "MESH", "Also change the mesh: 1x8, or data=1,model=8.")
@options.flag(
    "--check", "Run --model and --source-model. Write nothing unless their outputs are equal."
)
@options.value(
    "--inputs",
    "MODULE:NAME",
    "A function that returns the arguments for --check: a tuple and a dict (positional and "
    "keyword arguments), or {'linen': ..., 'nnx': ...} of such pairs. By default, the arguments "
    "that initialise the Linen model.",
)
@job_options
def command(
    src: str, dst: str, to: str, emit_map: str | None, mesh: str | None, **flags: Any
) -> None:
    """Convert Linen checkpoint SRC to NNX checkpoint DST, or back, optimizer state included.

    Every leaf of SRC needs a place in the model, and every leaf of the model needs a source. If
    only paths change, no array is read. The options from --select to --dtype apply to SRC, --spec
    and --rules to DST.

    \b
    Example:
      reshard convert run/1000 out/1000 --to nnx --model my_project.model:Transformer --dry-run
      reshard convert run/1000 out/1000 --to nnx --model my_project.model:Transformer \\
        --map map.toml --init 'dropout/rngs/**' --mesh 1x8
      reshard convert out/1000 back/1000 --to linen
    """
    if emit_map is not None and pathlib.Path(emit_map).exists():
        raise DestinationExistsError(f"--emit-map {emit_map}: the file exists")
    if flags["check"] and not (flags["model"] and flags["source_model"]):
        raise click.UsageError("--check requires --model and --source-model")
    if flags["inputs"] and not flags["check"]:
        raise click.UsageError("--inputs requires --check")
    found: list[Conversion] = []
    warnings: dict[str, None] = {}
    convert = converter(to, flags)

    def change(ckpt: Checkpoint) -> Checkpoint:
        # The conversion drops leaves together with their optimizer state.
        later = not any(flags[name] for name in ("select", "rename", "stack", "unstack"))
        ckpt = prepared(ckpt, flags | {"drop": ()} if later else flags)
        with _draft(emit_map):
            made = convert(ckpt, flags["drop"] if later else ())
        if emit_map is not None and not made.map.values:
            raise ReshardError(
                f"--emit-map {emit_map}: no map is written, because this conversion follows the "
                "record in SRC",
                hints=["--model MODULE:NAME, with the Linen model, makes a map"],
            )
        if flags["check"]:
            made = _checked(made, dst, flags)
        found.append(made)
        warnings.update(dict.fromkeys(map(output.as_flags, made.warnings)))
        if flags["dry_run"] and not flags["quiet"] and not flags["as_json"]:
            click.echo(made)
        model = flags["model"] if flags["rules"] else None
        return laid_out(made.checkpoint, mesh, model, flags, "--mesh")

    def answer(number: int) -> dict[str, Any]:
        made = found[number]
        return {"to": to, "model": flags["model"]} | {
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
        with open(emit_map, "x", encoding="utf-8") as file:  # never over an existing file
            file.write(found[0].map_text())


@contextlib.contextmanager
def _draft(file: str | None) -> Iterator[None]:
    """If a conversion is refused, writes a draft of its map, with `TODO` for open leaves."""
    try:
        yield
    except TreeMismatchError as error:
        if file is not None and error.draft is not None:
            text = error.draft()
            with open(file, "x", encoding="utf-8") as out:
                out.write(text)
            if any(map(is_open, text.splitlines())):
                hint = f"--map {file}, after you replace each `TODO` in it"
                error.hints = (hint, *error.hints)
        elif any(row.origin == "ambiguous" for row in error.outcomes) and not any(
            hint.startswith(("map_file", "resh")) for hint in error.hints
        ):
            hint = "--emit-map FILE writes a draft of a map: each open leaf with its candidates"
            error.hints = (*error.hints, hint)
        raise


def _checked(made: Conversion, dst: str, flags: options.Flags) -> Conversion:
    """The conversion with a note that its outputs are equal. Exits if they differ."""
    compared = check_outputs(made, flags)
    number = made.source.source.number
    step = f"step {number}: " if flags["step"] == "all" and number is not None else ""
    if not compared.equal:
        problems = [f"{step}the outputs differ", *compared.problems]
        document = {"destination": dst, "done": False, "problems": problems}
        options.answer_no(flags, lambda: document, f"{step}{compared}\nwrote nothing")
    return made.compared(compared, step)
