"""What the commands that write share: their options, and how a job runs and reports."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import output
from reshard.cli.dask_cluster import working
from reshard.cli.model_argument import build_target, read_rules
from reshard.cli.options import (
    AS_JSON,
    CONCURRENCY,
    DASK,
    ITEM,
    MAX_MEMORY,
    QUIET,
    WORKERS,
    options,
)
from reshard.cli.page_file import HTML_OF_PLAN, check_page, write_page
from reshard.cli.shard import parse_share
from reshard.engine.workers import started
from reshard.errors import DestinationError, ReshardError, ShardingError, TreeMismatchError
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import has_large_arrays
from reshard.restore.target_mesh import to_mesh
from reshard.sharding.mesh import parse_mesh
from reshard.storage.machine import tune_memory
from reshard.transforms import cast, rename, select
from reshard.units import format_bytes, parse_bytes
from reshard.writer.execution import save
from reshard.writer.job_plan import Plan
from reshard.writer.prepare import plan
from reshard.writer.share_writing import ShareTask

_OPTIONS = (
    click.option("--from", "saved", metavar="MESH", help="Fail unless it was saved on this mesh."),
    click.option(
        "--axis",
        "axes",
        metavar="OLD=NEW",
        multiple=True,
        help="Use mesh axis NEW where OLD was saved; `OLD=` replicates.",
    ),
    click.option(
        "--spec",
        "specs",
        metavar="REGEX=AXES",
        multiple=True,
        help="Partition spec of the leaves whose path matches: one entry a dimension, "
        "`,` between dimensions, `+` between axes of one: 'kernel$=data,model'. "
        "The first match wins.",
    ),
    click.option(
        "--rules",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="TOML with `rules` from the model's logical axis names to mesh axes, and `specs` from "
        "path regexes to partition specs.",
    ),
    click.option("--select", "selected", metavar="GLOB", multiple=True, help="Only these leaves."),
    click.option("--drop", metavar="GLOB", multiple=True, help="Leave these leaves out."),
    click.option(
        "--rename",
        "renames",
        metavar="REGEX=REPL",
        multiple=True,
        help="Rename leaves: re.sub on the printed path, in order.",
    ),
    click.option(
        "--dtype",
        "dtypes",
        metavar="[GLOB=]DTYPE",
        multiple=True,
        help="Cast floating-point arrays, rounding to nearest even.",
    ),
    click.option(
        "--step", metavar="N|all", help="Step of a manager's root; the latest by default."
    ),
    ITEM,
    click.option(
        "--chunks",
        default="shard",
        metavar="shard|keep|SIZE",
        show_default=True,
        help="One chunk a shard, the source's chunks, or chunks of at most SIZE.",
    ),
    click.option(
        "--format", metavar="zarr2|zarr3", help="Version of zarr; that of SRC by default."
    ),
    click.option(
        "--ocdbt/--no-ocdbt",
        default=None,
        help="An OCDBT database, or plain files; as SRC by default.",
    ),
    click.option(
        "--codec",
        metavar="CODEC",
        help="What chunks are compressed with: none, zstd[:LEVEL] or blosc[:NAME][:LEVEL]; as in "
        "SRC by default.",
    ),
    click.option(
        "--file-size",
        metavar="SIZE",
        help="About how large the data files of the OCDBT database become; 2GiB by default.",
    ),
    MAX_MEMORY,
    CONCURRENCY,
    WORKERS,
    DASK,
    click.option("--no-link", is_flag=True, help="Copy data files that stay; do not share them."),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace DST once the new checkpoint is complete; in a bucket, clear what an "
        "unfinished job has left there.",
    ),
    click.option(
        "--verify", is_flag=True, help="Read back all that was written, before the commit."
    ),
    click.option(
        "--digest",
        is_flag=True,
        help="Also read arrays that are moved undecoded and have no digest on record, for one.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Keep what is written if the job is stopped, and go on with what an earlier run kept.",
    ),
    click.option(
        "--shard",
        "share",
        metavar="I/N|auto",
        help="Write share I of N, numbered from 0, and nothing more: `reshard commit DST` follows, "
        "once all are there. `auto`: as SLURM or MPI has numbered this process.",
    ),
    click.option("--dry-run", is_flag=True, help="Show the plan and stop."),
    HTML_OF_PLAN,
    AS_JSON,
    QUIET,
)
job_options = options(_OPTIONS)


def run(
    src: str,
    dst: str,
    change: Callable[[Checkpoint], Checkpoint],
    flags: dict[str, Any],
    *,
    answer: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Opens, changes, plans and writes; reports, with what `answer` adds to the JSON document
    then."""
    tune_memory(parse_bytes(flags["max_memory"]), has_large_arrays(src))
    dry_run, as_json, quiet = flags["dry_run"], flags["as_json"], flags["quiet"]
    share = parse_share(flags["share"], dst)
    if share is not None and (flags["resume"] or flags["workers"] or flags["dask"]):
        raise click.UsageError(
            "a share is written whole or again, by one process: --shard goes without --resume, "
            "--workers and --dask"
        )
    page_file = flags["page_file"]
    if page_file is not None and not dry_run:
        raise click.UsageError("--html goes with --dry-run")
    check_page(page_file, src, dst)
    if flags["workers"] and not dry_run:  # they start while this process opens and plans
        click.get_current_context().with_resource(started(flags["workers"], ShareTask))
    opened: list[Checkpoint] = []
    try:
        opened = _open(src, flags)
        checkpoints = [change(ckpt) for ckpt in opened]
    except ReshardError as error:  # the document of a plan that could not be made at all
        problems = [error.summary, *error.problems]
        document = {"destination": dst, "done": False, "problems": problems}
        document["hints"] = [*map(output.as_flags, error.hints)]
        if isinstance(error, TreeMismatchError) and error.outcomes:
            document["rows"] = [row.document() for row in error.outcomes]
        if as_json:
            click.echo(json.dumps(document))
        if opened:
            try:
                write_page(page_file, opened[0].document() | document)
            except DestinationError as unwritten:  # which is not why there is no plan
                click.echo(f"Warning: {unwritten.summary}", err=True)
        raise
    same = ("max_memory", "chunks", "format", "ocdbt", "codec", "file_size")
    same += ("overwrite", "digest", "verify")
    arguments: dict[str, Any] = {name: flags[name] for name in same}
    arguments["link"] = not flags["no_link"]
    if dry_run:
        planned = plan(checkpoints, dst, **arguments)
        _report(planned, dst, as_json, quiet, answer(), done=False)
        write_page(page_file, planned.document(output.as_flags) | {"destination": dst} | answer())
        if planned.problems:
            raise ReshardError("the plan cannot be executed", planned.problems, planned.hints)
        return
    with working(flags["dask"], flags["workers"], flags["max_memory"], quiet or as_json) as by:
        planned = save(checkpoints, dst, **arguments, resume=flags["resume"], share=share, **by)
    if share is None:
        _report(planned, dst, as_json, quiet, answer(), done=True)
        return
    number, count = share
    _report(planned, dst, as_json, quiet, {**answer(), "share": [number, count]}, done=False)
    if not (as_json or quiet):
        click.echo(f"wrote share {number} of {count}; once all are there: reshard commit {dst}")


def prepared(ckpt: Checkpoint, flags: dict[str, Any]) -> Checkpoint:
    """After --from, --select, --drop, --rename and --dtype, as far as they are in `flags`."""
    if flags["saved"] is not None:
        _check_saved(ckpt, flags["saved"])
    if flags["selected"] or flags["drop"]:
        ckpt = select(ckpt, flags["selected"] or "**", drop=flags["drop"])
    if flags["renames"]:
        ckpt = rename(ckpt, [_pair(text, "--rename") for text in flags["renames"]])
    for text in flags["dtypes"]:
        where, _, dtype = text.rpartition("=")
        ckpt = cast(ckpt, dtype, where or "**")
    return ckpt


def laid_out(
    ckpt: Checkpoint, mesh: str | None, model: str | None, flags: dict[str, Any], to: str
) -> Checkpoint:
    """On the new mesh (given by the option `to`), as the model says if there is one, else as
    saved."""
    specs, axes, rules = flags["specs"], flags["axes"], flags["rules"]
    if mesh is None:
        if specs or axes or model or rules:
            raise click.UsageError(f"--spec, --axis, --model and --rules go with {to} MESH")
        return ckpt
    pairs = tuple(_pair(text, "--spec") for text in specs)
    named, more = (None, ()) if rules is None else read_rules(rules)
    if model is None:
        if named is not None:
            raise click.UsageError("`rules` are for the axes of a model: give --model MODULE:NAME")
        return to_mesh(ckpt, mesh, pairs + more, axes=_axes(axes))
    if axes:
        raise click.UsageError("--axis renames saved specs, and with --model none of them counts")
    new_mesh = parse_mesh(mesh, ckpt.meshes)
    return to_mesh(ckpt, new_mesh, target=build_target(model, named, pairs + more, new_mesh))


def _open(src: str, flags: dict[str, Any]) -> list[Checkpoint]:
    step, which = flags["step"], {name: flags[name] for name in ("item", "concurrency")}
    if step == "all":
        first = open_checkpoint(src, **which)
        return [open_checkpoint(src, step=number, **which) for number in first.source.steps] or [
            first
        ]
    if step is not None and not step.isdecimal():
        raise click.BadParameter(f"`{step}` is neither a number nor `all`", param_hint="--step")
    return [open_checkpoint(src, step=None if step is None else int(step), **which)]


def _axes(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [_pair(text, "--axis") for text in texts]
    axes = dict(pairs)
    if len(axes) < len(pairs):
        raise click.BadParameter("an axis is named twice", param_hint="--axis")
    return axes


def _pair(text: str, option: str) -> tuple[str, str]:
    left, equals, right = text.rpartition("=")
    if not equals or not left:
        raise click.BadParameter(f"`{text}` has no `=` after its first part", param_hint=option)
    return left, right


def _check_saved(ckpt: Checkpoint, text: str) -> None:
    wanted = str(parse_mesh(text, ckpt.meshes))
    others = [mesh for mesh in ckpt.meshes if str(mesh) != wanted]
    if others or not ckpt.meshes:
        raise ShardingError(
            f"--from {text}: that is not the mesh it was saved on",
            [f"saved on `{mesh}`" for mesh in others] or ["no leaf was saved on a mesh"],
            [f"--from {mesh}" for mesh in ckpt.meshes[:1]],
        )


def _report(
    planned: Plan, dst: str, as_json: bool, quiet: bool, answer: dict[str, Any], *, done: bool
) -> None:
    planned = dataclasses.replace(planned, notes=tuple(map(output.as_flags, planned.notes)))
    if as_json:
        document = planned.document(output.as_flags) | {"destination": dst, "done": done}
        click.echo(json.dumps(document | answer))
    elif not quiet:
        click.echo(planned)
        if done:
            shared = f", shares {format_bytes(planned.shared_bytes)} with SRC"
            click.echo(f"wrote {dst}" + (shared if planned.shared_bytes else ""))
