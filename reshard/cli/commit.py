"""`reshard commit`: the shares of a job become a checkpoint."""

from typing import Any

import click

from reshard.cli import options
from reshard.cli.working import progress_bar, warnings_told
from reshard.storage.machine import tune_memory
from reshard.writer.save import commit


@click.command("commit")
@click.argument("dst", type=click.Path())
@options.ANSWER
def command(dst: str, **flags: Any) -> None:
    """Combine the shares that `ckpt`, `convert` or `export` wrote with --shard into DST.

    If shares are missing, the error lists them as a range for an array job. You can stop the
    command at any moment and run it again. If DST is complete, the command does nothing.

    \b
    Example:
      reshard commit out/1000
    """
    tune_memory()
    with warnings_told(), progress_bar(flags) as progress:
        committed = commit(dst, progress=progress)
    document = {"destination": dst, "done": True, "committed": committed}
    if options.wants_text(flags, lambda: document):
        click.echo(f"committed {dst}" if committed else f"{dst} is complete already")
