"""`reshard digest`: what the values of a checkpoint are, whatever the mesh, chunks or format."""

import click

from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import describe
from reshard.cli import output
from reshard.cli.dask_cluster import working
from reshard.cli.options import reading_options
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import has_large_arrays
from reshard.storage.machine import tune_memory
from reshard.tree import format_path
from reshard.verify.digest_record import FILE
from reshard.verify.verification import digest, record


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
    concurrency: int,
    workers: int | None,
    dask: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read every array and show its digest, which depends on dtype, shape and values alone.

    `reshard ckpt` and `convert` record the digests of what they decode; --write does that for a
    checkpoint made by others, in reshard_digests.json beside the arrays. `reshard verify` compares
    with them, and so do `ckpt` and `convert` where they read the checkpoint. What --json shows is
    such a record, too: a file for `reshard verify --against`.

    \b
    Example:
      reshard digest run/1000
      reshard digest run/1000 --write
      reshard digest run/1000 --json > known.json
      reshard verify out/1000 --against known.json
    """
    tune_memory(large_arrays=has_large_arrays(path))
    ckpt = open_checkpoint(path, step=step, item=item, concurrency=concurrency)
    with working(dask, workers, max_memory, quiet or as_json) as by:
        found = digest(ckpt, write=write, max_memory=max_memory, **by)
    if as_json:
        click.echo(record(ckpt, found).dump())
    elif not quiet:
        leaves = [leaf for leaf in ckpt.values() if isinstance(leaf, ArrayHandle)]
        rows = [(format_path(leaf.path), describe(leaf), found[leaf.path]) for leaf in leaves]
        output.table(("path", "array", "digest"), rows)
        if write:
            click.echo(f"wrote {ckpt.source.store.directory / FILE}")
