"""`reshard export`: a checkpoint as safetensors files."""

from typing import Any

import click

from reshard.cli import options
from reshard.cli.changes import CHANGES, MAP, REVERSE, remapped
from reshard.cli.job import OVERWRITE, RESUME, SHARD, share_of, wrote_share
from reshard.cli.working import working
from reshard.errors import raise_all
from reshard.writer.export import export, plan_export


@click.command("export")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@options.value(
    "--like",
    "HF_DIR",
    "Copy the configuration, tokenizer, licence and model card of this directory. Fail if its "
    "tensors have other names or shapes.",
)
@options.value("--file-size", "SIZE", "Largest size of a file.", default="5GB")
@CHANGES
@MAP
@REVERSE
@options.value("--step", "N", "Step of a root to export; the latest by default.")
@options.ITEM
@options.WORK
@OVERWRITE
@RESUME
@SHARD
@options.flag("--dry-run", "Show the files and stop.")
@options.ANSWER
def command(src: str, dst: str, dry_run: bool, **flags: Any) -> None:
    """Write checkpoint SRC as safetensors files into the new directory DST.

    The name of a tensor is the path of its leaf, joined with dots. DST is complete or absent
    afterwards.

    \b
    Example:
      reshard export run/1000 out/hf --select 'params/**' --dtype bfloat16
    """
    steps = options.chosen_steps(flags, [src], committed=True)
    if len(steps) > 1:
        raise click.UsageError("export writes one step: add --step N")
    (ckpt,) = options.opened(flags | {"step": steps[0]}, src)
    ckpt = remapped(ckpt, flags | {"saved": None})
    share = share_of(flags, dst)
    arguments = {name: flags[name] for name in ("like", "file_size", "max_memory", "overwrite")}
    if dry_run:
        found = plan_export(ckpt, dst, **arguments)
        raise_all(found.errors)
    else:
        with working(flags) as by:
            found = export(ckpt, dst, **arguments, resume=flags["resume"], share=share, **by)
    done = not dry_run and share is None
    if options.wants_text(flags, lambda: found.document() | {"done": done}):
        click.echo(found)
        if done:
            click.echo(f"wrote {dst}")
        elif share is not None and not dry_run:
            click.echo(wrote_share(share, dst))
