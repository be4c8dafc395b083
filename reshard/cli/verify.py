"""`reshard verify`: whether a checkpoint is whole, and what it was recorded to be."""

import json
import sys
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import output
from reshard.cli.memory import tune_memory
from reshard.errors import CorruptCheckpointError, UncommittedCheckpointError
from reshard.loader import open as open_checkpoint
from reshard.tree import format_path
from reshard.verification import Verification, verify


@click.command("verify")
@click.argument("path", type=click.Path())
@click.option(
    "--against",
    metavar="OTHER",
    help="Compare with another checkpoint, on any mesh and in any format, or a file of digests.",
)
@click.option(
    "--map",
    "map_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="With --against: OTHER is of Flax's other API, and becomes PATH's by this map.",
)
@click.option("--step", type=int, help="Step of a manager's root; the latest by default.")
@click.option("--item", help="Item of a step that has several.")
@click.option(
    "--max-memory",
    default="1GiB",
    metavar="SIZE",
    show_default=True,
    help="Bytes in flight at most.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors: the exit status tells.")
def command(
    path: str,
    against: str | None,
    map_file: str | None,
    step: int | None,
    item: str | None,
    max_memory: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read all of a checkpoint: is it committed and whole, does every chunk decode, and are the
    values those that its digests were recorded of.

    Exits with 0 if nothing is wrong, and with 1, after a list of what is, otherwise.

    \b
    Example:
      reshard verify out/1000
      reshard verify out/1000 --against run/1000
      reshard verify nnx/1000 --against linen/1000 --map map.toml
    """
    if map_file is not None and against is None:
        raise click.UsageError("--map goes with --against OTHER")
    tune_memory()
    try:
        ckpt = open_checkpoint(path, step=step, item=item)
    except (UncommittedCheckpointError, CorruptCheckpointError) as error:
        _answer(path, False, [error.summary, *error.problems], as_json, quiet, str(error))
        return
    other = against if map_file is None else _converted(ckpt, str(against), map_file)
    with output.progress_bar(quiet or as_json) as progress:
        found = verify(ckpt, other, max_memory=max_memory, progress=progress)
    _answer(path, found.ok, list(found.problems), as_json, quiet, repr(found), found)


def _converted(ckpt: Checkpoint, against: str, map_file: str) -> Checkpoint:
    """A checkpoint of the other API in the API of this one."""
    # Which takes as long to import as a small checkpoint takes to read.
    from reshard.convert.conversion import to_linen, to_nnx
    from reshard.convert.layout import detect
    from reshard.convert.record import recorded_kind

    convert = to_nnx if detect(ckpt, recorded_kind(ckpt)).api == "nnx" else to_linen
    return convert(against, map_file=map_file)


def _answer(
    path: str,
    ok: bool,
    problems: list[str],
    as_json: bool,
    quiet: bool,
    text: str,
    found: Verification | None = None,
) -> None:
    document: dict[str, Any] = {"path": path, "ok": ok, "problems": problems}
    if found is not None:
        digests = {format_path(path): digest for path, digest in found.digests.items()}
        document |= {"digests": digests, "compared": found.compared}
    if as_json:
        click.echo(json.dumps(document))
    elif not quiet:
        click.echo(text)
    if not ok:
        sys.exit(1)
