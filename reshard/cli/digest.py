"""`reshard digest`: digests of values, which do not depend on mesh, chunks or format."""

from typing import Any

import click

from reshard.checkpoint import describe
from reshard.cli import options, output
from reshard.cli.working import working
from reshard.tree import format_path
from reshard.verify.digest_record import FILE
from reshard.verify.verification import digest, record


@click.command("digest")
@click.argument("path", type=click.Path())
@options.flag("--write", "Record the digests beside the arrays, in reshard_digests.json.")
@options.reading_options
@options.per_step
def command(path: str, write: bool, **flags: Any) -> None:
    """Read every array and show its digest, which depends on dtype, shape and values alone.

    `reshard verify`, `ckpt` and `convert` compare with recorded digests. The output of --json is a
    file for `reshard verify --against`.

    \b
    Example:
      reshard digest run/1000 --write
      reshard digest run/1000 --json > known.json
    """
    (ckpt,) = options.opened(flags, path)
    with working(flags) as by:
        found = digest(ckpt, write=write, max_memory=flags["max_memory"], **by)
    if options.wants_text(flags, record(ckpt, found).document):
        rows = [(format_path(a.path), describe(a), found[a.path]) for a in ckpt.arrays]
        click.echo(options.latest_text(ckpt.source, flags["step"]), nl=False)
        output.table(("path", "array", "digest"), rows)
        if write:
            click.echo(f"wrote {ckpt.source.store.directory / FILE}")
