"""`reshard diff`: in what two checkpoints differ."""

import json
import sys
from typing import Any

import click

from reshard.cli import output
from reshard.cli.dask_cluster import working
from reshard.cli.options import places, reading_options
from reshard.cli.page_file import HTML, check_page, write_page
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import has_large_arrays
from reshard.storage.machine import tune_memory
from reshard.verify.comparison import diff


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--values", is_flag=True, help="Read and compare the contents of arrays.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    metavar="X",
    help="With --values: floating-point elements are equal if |A - B| <= atol + rtol * |B|.",
)
@click.option("--atol", type=click.FloatRange(min=0), metavar="X", help="See --rtol.")
@click.option("--layout", is_flag=True, help="Also compare specs, meshes, chunks and formats.")
@click.option("--select", metavar="GLOB", multiple=True, help="Only these leaves.")
@click.option("--drop", metavar="GLOB", multiple=True, help="Leave these leaves out.")
@HTML
@reading_options
def command(
    a: str,
    b: str,
    step: int | None,
    item: str | None,
    concurrency: int,
    workers: int | None,
    dask: str | None,
    as_json: bool,
    quiet: bool,
    page_file: str | None,
    **flags: Any,
) -> None:
    """Compare checkpoints A and B, whatever the mesh, chunks or format of either.

    Tells leaves that were added, removed or moved, and other shapes, dtypes and strings. With
    --values also contents: bit for bit, or within a tolerance, in which NaN equals NaN. Without it
    arrays are compared by their recorded digests, where both have them; a line on stderr tells if
    some do not. Exits with 0 if no difference was found, with 1 otherwise.

    \b
    Example:
      reshard diff run/1000 out/1000 --values
      reshard diff run/1000 run/2000 --select 'params/**' --values --rtol 1e-3
      reshard diff run/1000 out/1000 --layout
    """
    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    if not flags["values"] and not flags.keys().isdisjoint(("rtol", "atol")):
        raise click.UsageError("--rtol and --atol go with --values")
    check_page(page_file, a, b)
    tune_memory(large_arrays=has_large_arrays(a) or has_large_arrays(b))
    one, other = places(a, b, step, item)
    checkpoints = [
        open_checkpoint(p, **at, concurrency=concurrency) for p, at in ((a, one), (b, other))
    ]
    with working(dask, workers, flags["max_memory"], quiet or as_json) as by:
        found = diff(*checkpoints, **flags, **by)
    if as_json:
        click.echo(json.dumps(found.document()))
    elif not quiet:
        click.echo(found.report(phrase=output.as_flags))
    write_page(page_file, found.document())
    if found.equal is None:
        click.echo(f"{found.open_question()}: --values compares them", err=True)
    if found.differences:
        sys.exit(1)
