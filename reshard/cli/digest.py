"""`reshard digest`: what the values of a checkpoint are, whatever the mesh, chunks or format."""

import json

import click

from reshard.checkpoint import ArrayHandle, describe
from reshard.cli import output
from reshard.cli.memory import tune_memory
from reshard.cli.options import reading_options
from reshard.loader import open as open_checkpoint
from reshard.tree import format_path
from reshard.verification import digest


@click.command("digest")
@click.argument("path", type=click.Path())
@click.option("--write", is_flag=True, help="Record the digests beside the arrays.")
@reading_options
def command(
    path: str,
    write: bool,
    step: int | None,
    item: str | None,
    max_memory: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read every array and show its digest, which depends on dtype, shape and values alone.

    `reshard ckpt` and `convert` record the digests of what they decode; --write does that for a
    checkpoint made by others. `reshard verify` compares with them, and every later job that reads
    the checkpoint does.

    \b
    Example:
      reshard digest run/1000
      reshard digest run/1000 --write
    """
    tune_memory()
    ckpt = open_checkpoint(path, step=step, item=item)
    with output.progress_bar(quiet or as_json) as progress:
        found = digest(ckpt, write=write, max_memory=max_memory, progress=progress)
    if as_json:
        click.echo(json.dumps({format_path(path): text for path, text in found.items()}))
    elif not quiet:
        leaves = [leaf for leaf in ckpt.values() if isinstance(leaf, ArrayHandle)]
        rows = [(format_path(leaf.path), describe(leaf), found[leaf.path]) for leaf in leaves]
        output.table(("path", "array", "digest"), rows)
