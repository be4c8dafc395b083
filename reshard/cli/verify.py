"""`reshard verify`: whether a checkpoint is whole, and what it was recorded to be."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import output
from reshard.cli.conversion_options import conversion_options, converter
from reshard.cli.dask_cluster import working
from reshard.cli.options import places, reading_options
from reshard.errors import (
    ArgumentError,
    CorruptCheckpointError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import has_large_arrays
from reshard.storage.location import parse_location
from reshard.storage.machine import tune_memory
from reshard.tree import format_path
from reshard.verify.verification import verify


@click.command("verify")
@click.argument("path", type=click.Path())
@click.option(
    "--against",
    metavar="OTHER",
    help="Compare with another checkpoint, on any mesh and in any format, or a file of digests: a "
    "checkpoint's own reshard_digests.json, or what `reshard digest --json` shows.",
)
@conversion_options
@reading_options
def command(
    path: str,
    against: str | None,
    step: int | None,
    item: str | None,
    max_memory: str,
    concurrency: int,
    workers: int | None,
    dask: str | None,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Read all of a checkpoint: is it committed and whole, does every chunk decode, and are the
    values those that its digests were recorded of.

    --step and --item count for OTHER, too, if it has steps and items. It may be of Flax's other
    API: then it is converted as `reshard convert` has noted it in the NNX one of the two, or as
    --map, --model and the other options of `reshard convert` say. Exits with 0 if nothing is wrong,
    and with 1, after a list of what is, otherwise.

    \b
    Example:
      reshard verify out/1000
      reshard verify out/1000 --against run/1000
      reshard verify nnx/1000 --against linen/1000 --map map.toml
    """
    asked = any(flags.values())
    if asked and against is None:
        raise click.UsageError("--map, --model and the like go with --against OTHER")
    tune_memory(large_arrays=has_large_arrays(path))
    mine, theirs = places(path, against or path, step, item)
    try:
        ckpt = open_checkpoint(path, **mine, concurrency=concurrency)
    except (UncommittedCheckpointError, CorruptCheckpointError) as error:
        document = {"path": path, "ok": False, "problems": [error.summary, *error.problems]}
        _answer(document, error.render(None, output.as_flags), as_json, quiet)
        return
    other: Checkpoint | str | None = against
    if against is not None and not parse_location(against).is_file():
        options = flags | {"max_memory": max_memory} if asked else None
        opened = open_checkpoint(against, **theirs, concurrency=concurrency)
        other = _in_one_api(ckpt, opened, options)
        _repeat_warnings([ckpt, opened, other])
    with working(dask, workers, max_memory, quiet or as_json) as by:
        found = verify(ckpt, other, max_memory=max_memory, **by)
    document = {
        "path": str(found.path),
        "ok": found.ok,
        "problems": list(found.problems),
        "digests": {format_path(path): digest for path, digest in found.digests.items()},
        "compared": found.compared,
    }
    _answer(document, repr(found), as_json, quiet)


def _repeat_warnings(checkpoints: Sequence[Checkpoint]) -> None:
    """Tells what went by the order of modules: a conversion with two of them swapped compares equal
    with what it was made of."""
    from reshard.convert.by_order import order_of, order_text

    orders = dict.fromkeys(order for ckpt in checkpoints if (order := order_of(ckpt)) is not None)
    for order in orders:
        click.echo(
            f"Warning: {order_text(order)}; equal values do not say that it is right", err=True
        )


def _in_one_api(ckpt: Checkpoint, other: Checkpoint, flags: dict[str, Any] | None) -> Checkpoint:
    """The other checkpoint in the API of this one: as the user says, or the record of a conversion
    of one of them; as it is, where there is neither."""
    # Which takes as long to import as a small checkpoint takes to read.
    from reshard.convert.layout import detect
    from reshard.convert.roundtrip import from_record, has_record, like_recorded, recorded_kind

    if flags is not None:
        api = detect(ckpt, recorded_kind(ckpt)).api
        try:
            return converter(api, flags)(other).checkpoint
        except (ArgumentError, TreeMismatchError) as error:
            hints = [
                hint
                for hint in error.hints
                if not output.as_flags(hint).startswith(("--to ", "--drop "))
            ]
            raise type(error)(error.summary, error.problems, hints) from error
    if has_record(ckpt) == has_record(other):
        if ckpt.keys().isdisjoint(other.keys()):
            _check_same_api(ckpt, other)
        return other
    try:
        if detect(other if has_record(ckpt) else ckpt).api != "linen":
            return other
    except TreeMismatchError:  # it is not known, and so compared as it is
        return other
    return like_recorded(other, ckpt) if has_record(ckpt) else from_record(other)[0]


def _check_same_api(ckpt: Checkpoint, other: Checkpoint) -> None:
    """Raises TreeMismatchError for checkpoints of two APIs, which have no leaf in common."""
    from reshard.convert.layout import detect
    from reshard.convert.roundtrip import recorded_kind

    try:
        one, two = (detect(c, recorded_kind(c)) for c in (ckpt, other))
    except TreeMismatchError:  # it is not known
        return
    if one.api != two.api:
        raise TreeMismatchError(
            "they are of two of Flax's APIs, and no leaf has the same path in both",
            [f"`{c.source.path}` is {found.kind}" for c, found in ((ckpt, one), (other, two))],
            ["--model MODULE:NAME, the model that PATH is of; --map FILE, if names do not tell"],
        )


def _answer(document: dict[str, Any], text: str, as_json: bool, quiet: bool) -> None:
    if as_json:
        click.echo(json.dumps(document))
    elif not quiet:
        click.echo(text)
    if not document["ok"]:
        sys.exit(1)
