"""`reshard verify`: whether a checkpoint is complete, undamaged and unchanged."""

from collections.abc import Sequence
from typing import Any

import click

from reshard import tree
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint
from reshard.cli import options, output
from reshard.cli.changes import chosen_map
from reshard.cli.conversion_options import conversion_options, converter
from reshard.cli.working import working
from reshard.errors import (
    ArgumentError,
    CorruptCheckpointError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from reshard.loader import detection
from reshard.storage.location import parse_location
from reshard.storage.machine import tune_memory
from reshard.verify.comparison import partners
from reshard.verify.verification import verify

_CONVERSION = ("model", "source_model", "map_file", "init", "layout")


@click.command("verify")
@click.argument("path", type=click.Path())
@options.value(
    "--against",
    "OTHER",
    "Compare with another checkpoint, on any mesh and in any format, or with a file of digests: a "
    "checkpoint's reshard_digests.json, or the output of `reshard digest --json`.",
)
@conversion_options
@options.reading_options
@options.per_step
def command(path: str, against: str | None, **flags: Any) -> None:
    """Check that a checkpoint is complete, undamaged and unchanged.

    Reads every array. Checks that the checkpoint is committed, that every chunk decodes, and that
    the values equal the recorded digests. --step and --item also apply to OTHER. If OTHER belongs
    to Flax's other API, it is converted first, by the record that `reshard convert` wrote, or by
    the options below. Otherwise --map applies to it as in `reshard ckpt`. Exits with 0 if
    nothing is wrong, else with 1.

    \b
    Example:
      reshard verify out/1000 --against run/1000
      reshard verify nnx/1000 --against linen/1000 --map map.toml
      reshard verify out/0 --against hf --map hf:llama-tunix
    """
    asked = any(flags[name] for name in _CONVERSION)
    if asked and against is None:
        raise click.UsageError("--map, --model and other options of a conversion require --against")
    tune_memory()
    mine, *theirs = options.places(flags, path, *([] if against is None else [against]))
    try:
        ckpt = options.open_at(path, **mine)
    except (UncommittedCheckpointError, CorruptCheckpointError) as error:
        problems = [error.summary, *error.problems]
        refused = {"path": path, "ok": False, "problems": problems}
        options.answer_no(flags, lambda: refused, error.render(10, output.as_flags))
    other: Checkpoint | str | None = against
    if against is not None and not detection.is_record_file(parse_location(against)):
        opened = options.open_at(against, **theirs[0])
        other = _in_one_api(ckpt, opened, flags if asked else None)
        if other is not opened:
            other = _with_positions_of(ckpt, other)
        _repeat_warnings([ckpt, opened, other])
    with working(flags) as by:
        found = verify(ckpt, other, max_memory=flags["max_memory"], **by)
    document = {
        "path": str(found.path),
        "ok": found.ok,
        "problems": list(found.problems),
        "digests": {tree.format_path(path): digest for path, digest in found.digests.items()},
        "compared": found.compared,
    }
    text = f"{options.latest_text(ckpt.source, flags['step'])}{found}"
    if not found.ok:
        options.answer_no(flags, lambda: document, text)
    if options.wants_text(flags, lambda: document):
        click.echo(text)


def _repeat_warnings(checkpoints: Sequence[Checkpoint]) -> None:
    """Warns of leaves that a conversion matched by the order of modules: if two modules were
    exchanged, the result still equals its source."""
    from reshard.convert.record import order_of, order_text

    orders = dict.fromkeys(order for ckpt in checkpoints if (order := order_of(ckpt)) is not None)
    for order in orders:
        click.echo(f"Warning: {order_text(order)}; equal values do not prove the pairing", err=True)


def _in_one_api(ckpt: Checkpoint, other: Checkpoint, flags: dict[str, Any] | None) -> Checkpoint:
    """The other checkpoint in the API of this one, converted by the options or by the record of one
    of the two; unchanged if there is neither."""
    from reshard.convert import record  # its import takes as long as a small job

    if flags is not None:
        return _converted(ckpt, other, flags)
    recorded = record.has_record(ckpt)
    alike = recorded == record.has_record(other)
    if alike and not ckpt.keys().isdisjoint(other.keys()):
        return other
    unknown = (ckpt, other) if alike else (other if recorded else ckpt,)
    try:
        kinds = [_layout(each) for each in unknown]
    except TreeMismatchError:  # unknown, so it is compared unchanged
        return other
    if alike and kinds[0].api != kinds[1].api:
        raise TreeMismatchError(
            "one checkpoint is from Linen, the other from NNX, and they have no path in common",
            [f"`{c.source.path}` is {k.kind}" for c, k in zip(unknown, kinds, strict=True)],
            ["--model MODULE:NAME, the model of PATH; --map FILE, if names are ambiguous"],
        )
    if alike or kinds[0].api != "linen":
        return other
    return record.like_recorded(other, ckpt) if recorded else record.from_record(other)[0]


def _converted(ckpt: Checkpoint, other: Checkpoint, flags: dict[str, Any]) -> Checkpoint:
    """The other checkpoint, rewritten by the options: by a map alone, as `reshard ckpt --map` does,
    or converted to the API of this one. If only one API is known, the result of the map alone is
    used if it has paths of this checkpoint."""
    from reshard.convert.record import recorded_drop
    from reshard.convert.remap import remap

    apis = _api(ckpt), _api(other)
    if (file := flags["map_file"]) and not flags["model"]:
        reverse = ckpt.source.kind == "safetensors"
        rules = chosen_map(ckpt if reverse else other, flags)
        if file.startswith("hf:") or not (rules.to or {*apis} == {"linen", "nnx"}):
            for name in ("source_model", "init", "layout"):
                if flags[name]:
                    option = "--" + name.replace("_", "-")
                    raise click.UsageError(f"with this --map, {option} requires --model")
            made = remap(other, rules, reverse=reverse)
            if file.startswith("hf:") or apis[0] == apis[1] or not ckpt.keys().isdisjoint(made):
                return made
    api = apis[0] or ("nnx" if _layout(other).api == "linen" else "linen")
    dropped = [tree.format_glob(path) for path in recorded_drop(ckpt) if path in other]
    try:
        return converter(api, flags)(other, dropped).checkpoint
    except (ArgumentError, TreeMismatchError) as error:
        flags_of = map(output.as_flags, error.hints)  # `verify` has neither --to nor --drop
        error.hints = tuple(hint for hint in flags_of if not hint.startswith(("--to ", "--drop ")))
        raise


def _api(ckpt: Checkpoint) -> str | None:
    """The API that a checkpoint is from; None if it is not known."""
    try:
        return _layout(ckpt).api
    except TreeMismatchError:
        return None


def _layout(ckpt: Checkpoint) -> Any:
    """The layout of a checkpoint, by the record of its conversion if it has one."""
    from reshard.convert.layout import detect
    from reshard.convert.record import recorded_kind

    return detect(ckpt, recorded_kind(ckpt))


def _with_positions_of(ckpt: Checkpoint, converted: Checkpoint) -> Checkpoint:
    """A converted checkpoint with lists and dicts as in another checkpoint: Orbax saves a list of
    modules as one or the other, by the API."""
    here = {there: path for path, there in partners(ckpt, converted).items()}
    pairs = [(here.get(path, path), leaf) for path, leaf in converted.items()]
    return converted.replace(
        {path: leaf.at(path) if isinstance(leaf, ArrayHandle) else leaf for path, leaf in pairs}
    )
