"""`reshard ckpt`: a checkpoint rewritten for another mesh, or as another tree."""

from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import options
from reshard.cli.changes import MAP, REVERSE, remapped
from reshard.cli.job import job_options, laid_out, run


@click.command("ckpt")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@options.value(
    "--to --mesh mesh", "MESH", "The new mesh: 1x8, or data=1,model=8. By default, the saved mesh."
)
@options.value(
    "--model",
    "MODULE:NAME",
    "Shard the checkpoint as this model is annotated. Fail if their leaves differ. NAME is "
    "called for the model's state: this runs the code of MODULE.",
)
@MAP
@REVERSE
@job_options
def command(
    src: str,
    dst: str,
    mesh: str | None,
    model: str | None,
    **flags: Any,
) -> None:
    """Rewrite checkpoint SRC as DST for another mesh, or as another tree.

    The job runs in bounded memory, needs no devices and never touches SRC. DST is complete or
    absent afterwards.

    \b
    Example:
      reshard ckpt run/1000 out/1000 --to 1x8
      reshard ckpt run/1000 out/1000 --to 1x8 --spec 'embedding$=model,' --dry-run
      reshard ckpt run/1000 out/1000 --map map.toml
    """
    if mesh in ("nnx", "linen"):
        raise click.UsageError(
            f"`--to {mesh}` is not a mesh; to convert: reshard convert SRC DST --to {mesh}"
        )

    def change(ckpt: Checkpoint) -> Checkpoint:
        return laid_out(remapped(ckpt, flags), mesh, model, flags, "--to")

    run(src, dst, change, flags)
