"""`reshard diff`: the differences of two checkpoints."""

import sys
from typing import Any

import click

from reshard.cli import options, output
from reshard.cli.page_file import HTML, check_page, write_page
from reshard.cli.working import working
from reshard.errors import ReshardError
from reshard.verify.comparison import diff

_ARGUMENTS = ("values", "rtol", "atol", "layout", "select", "drop", "max_memory")


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--values/--no-values", default=None, help="Read all arrays; or none.")
@options.value(
    "--rtol",
    "X",
    "With --values: floating-point elements are equal if |A - B| <= atol + rtol * |B|.",
    type=click.FloatRange(min=0),
)
@options.value("--atol", "X", "See --rtol.", type=click.FloatRange(min=0))
@options.flag("--layout", "Also compare specs, meshes, chunks and formats.")
@options.SELECTION
@HTML
@options.reading_options
@options.per_step
def command(a: str, b: str, **flags: Any) -> None:
    """Compare checkpoints A and B, on any meshes and in any chunks and formats.

    Lists the leaves that were added, removed or moved, and those that differ in shape, dtype,
    string or contents. Contents are compared by recorded digests. Arrays without a digest on both
    sides are read and compared bit for bit, or with --values within a tolerance. Exits with 0 if
    all contents were compared and nothing differs, with 1 if something differs, and else with 2.

    \b
    Example:
      reshard diff run/1000 out/1000 --values
      reshard diff run/1000 run/2000 --select 'params/**' --values --rtol 1e-3
    """
    given = {name: flags[name] for name in _ARGUMENTS if flags[name] not in (None, ())}
    if not given.get("values") and not given.keys().isdisjoint(("rtol", "atol")):
        raise click.UsageError("--rtol and --atol require --values")
    check_page(flags["page_file"], a, b)
    with working(flags) as by:
        found = diff(*options.opened(flags, a, b), **given, **by)
    has_report = options.wants_text(flags, found.document)
    if has_report:
        click.echo(found.report(phrase=output.as_flags))
    write_page(flags, found.document)
    if found.equal is None:  # the report has a hint
        hints = [] if has_report else ["values=True reads them"]
        raise ReshardError(found.open_question(), hints=hints)
    if found.differences:
        sys.exit(1)
