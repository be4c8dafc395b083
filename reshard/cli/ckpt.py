"""`reshard ckpt`: a checkpoint rewritten for another mesh."""

from typing import Any

import click

from reshard.cli.job import job_options, laid_out, prepared, run


@click.command("ckpt")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option(
    "--to",
    "--mesh",
    "mesh",
    metavar="MESH",
    help="The new mesh: 1x8, or data=1,model=8. Without it, the saved one stays.",
)
@click.option(
    "--model",
    metavar="MODULE:NAME",
    help="Lay the checkpoint out as this model is, after checking that it has the model's leaves. "
    "NAME is called for the model's state: this runs the code of MODULE.",
)
@job_options
def command(src: str, dst: str, mesh: str | None, model: str | None, **flags: Any) -> None:
    """Rewrite checkpoint SRC as DST for another mesh.

    Streams in bounded memory, needs no devices, never touches SRC, and leaves DST complete or
    absent. What does not change is not decoded; data files that stay are shared by hard links.

    \b
    Example:
      reshard ckpt run/1000 out/1000 --to 1x8
      reshard ckpt run/1000 out/1000 --from 2x4 --to data=1,model=8 --dry-run
      reshard ckpt run/1000 out/1000 --to 1x8 --spec 'embedding$=model,' --dtype bfloat16
      reshard ckpt run/1000 scratch/1000 --no-ocdbt --codec none
    """
    if mesh in ("nnx", "linen"):
        raise click.UsageError(
            f"`--to {mesh}` is no mesh; to convert to it: reshard convert SRC DST --to {mesh}"
        )
    run(src, dst, lambda ckpt: laid_out(prepared(ckpt, flags), mesh, model, flags, "--to"), flags)
