"""`reshard commit`: the shares of a job become a checkpoint."""

import json

import click

from reshard.cli import output
from reshard.cli.options import AS_JSON, QUIET
from reshard.storage.machine import tune_memory
from reshard.writer.share_commit import commit


@click.command("commit")
@click.argument("dst", type=click.Path())
@AS_JSON
@QUIET
def command(dst: str, as_json: bool, quiet: bool) -> None:
    """Make checkpoint DST of the shares that `ckpt --shard` or `convert --shard` has written.

    All of them must be there, each complete; else those that are missing are listed, as a range for
    an array job. It may be stopped at any moment and run again; where DST is complete, nothing is
    left to do.

    \b
    Example:
      reshard ckpt run/1000 out/1000 --to 1x8 --shard 0/2
      reshard ckpt run/1000 out/1000 --to 1x8 --shard 1/2
      reshard commit out/1000
    """
    tune_memory()
    with output.warnings_told(), output.progress_bar(quiet or as_json) as progress:
        committed = commit(dst, progress=progress)
    if as_json:
        click.echo(json.dumps({"destination": dst, "done": True, "committed": committed}))
    elif not quiet:
        click.echo(f"committed {dst}" if committed else f"{dst} is complete already")
