"""`reshard digest`: digests of values, which do not depend on mesh, chunks or format."""

import json
from typing import Any

import click

from reshard.checkpoint import describe
from reshard.cli import output
from reshard.cli.options import flag, latest_text, per_step, places, reading_options, wants_text
from reshard.cli.working import working
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import has_large_arrays
from reshard.storage.machine import tune_memory
from reshard.tree import format_path
from reshard.verify.digest_record import FILE
from reshard.verify.verification import digest, record


@click.command("digest")
@click.argument("path", type=click.Path())
@flag("--write", "Record the digests beside the arrays.")
@reading_options
@per_step
def command(path: str, write: bool, **flags: Any) -> None:
    """Read every array and show its digest, which depends on dtype, shape and values alone.

    `reshard ckpt` and `convert` record the digests of the arrays that they decode. --write does
    that for a checkpoint made by others, in reshard_digests.json beside the arrays. `reshard
    verify` compares with recorded digests. So do `ckpt` and `convert` when they read the
    checkpoint. The output of --json is such a record, too: a file for `reshard verify --against`.

    \b
    Example:
      reshard digest run/1000
      reshard digest run/1000 --write
      reshard digest run/1000 --json > known.json
      reshard verify out/1000 --against known.json
    """
    tune_memory(large_arrays=has_large_arrays(path))
    ckpt = open_checkpoint(path, **places(flags, path)[0])
    with working(flags) as by:
        found = digest(ckpt, write=write, max_memory=flags["max_memory"], **by)
    if wants_text(flags, lambda: json.loads(record(ckpt, found).dump())):
        rows = [(format_path(a.path), describe(a), found[a.path]) for a in ckpt.arrays]
        click.echo(latest_text(ckpt.source, flags["step"]), nl=False)
        output.table(("path", "array", "digest"), rows)
        if write:
            click.echo(f"wrote {ckpt.source.store.directory / FILE}")
