"""Options of the commands that write, and how their job runs and reports."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import options, output
from reshard.cli.changes import CHANGES, pair
from reshard.cli.model_argument import build_target, read_rules
from reshard.cli.page_file import HTML_OF_PLAN, check_page, write_page
from reshard.cli.shard import parse_share
from reshard.cli.working import working
from reshard.errors import DestinationError, ReshardError
from reshard.restore.target_mesh import to_mesh
from reshard.sharding.mesh import parse_mesh
from reshard.storage.location import parse_location
from reshard.storage.machine import tune_memory
from reshard.units import format_bytes
from reshard.writer.destination import check_destination
from reshard.writer.plan import Plan
from reshard.writer.planning import plan
from reshard.writer.save import save

# Options that are arguments of `plan` and `save`, as they are.
_ARGUMENTS = ("max_memory", "chunks", "format", "ocdbt", "codec", "file_size")
_ARGUMENTS += ("overwrite", "digest", "verify")
OVERWRITE = options.flag(
    "--overwrite", "Replace DST when the new checkpoint is complete. Ignore unfinished jobs."
)
RESUME = options.flag("--resume", "Use the finished shares of an earlier run of this command.")
SHARD = options.value(
    "--shard share",
    "I/N|auto",
    "Write only share I of N, numbered from 0. When all shares are written, run `reshard "
    "commit DST`. `auto` takes the numbers that SLURM or MPI gave this process.",
)
job_options = options.all_of(
    options.value("--from saved", "MESH", "Fail unless SRC was saved on this mesh."),
    options.values(
        "--axis axes", "OLD=NEW", "Rename a mesh axis in saved specs; `OLD=` replicates."
    ),
    options.values(
        "--spec specs",
        "REGEX=AXES",
        "Partition spec of leaves by path, for example 'kernel$=data,model'. `,` separates "
        "dimensions, `+` the axes of one dimension. The first match wins.",
    ),
    options.value(
        "--rules",
        "FILE",
        "TOML with `rules` from logical axis names to mesh axes, and `specs` from path regexes to "
        "partition specs.",
        type=click.Path(exists=True, dir_okay=False),
    ),
    CHANGES,
    options.PLACE,
    options.value(
        "--chunks",
        "shard|keep|SIZE",
        "A chunk per shard, chunks as in SRC, or at most SIZE.",
        default="shard",
    ),
    options.value("--format", "zarr2|zarr3", "Version of zarr to write; as in SRC by default."),
    click.option(
        "--ocdbt/--no-ocdbt", default=None, help="Write an OCDBT database, or plain files."
    ),
    options.value(
        "--codec", "CODEC", "none, zstd[:LEVEL] or blosc[:NAME][:LEVEL]; as in SRC by default."
    ),
    options.value(
        "--file-size", "SIZE", "Most bytes of an OCDBT data file, about; 2GiB by default."
    ),
    options.WORK,
    options.flag("--no-link", "Copy data files, do not hard-link them."),
    OVERWRITE,
    options.flag("--verify", "Read back the new checkpoint before the commit."),
    options.flag("--digest", "Also record digests of arrays that are copied verbatim."),
    RESUME,
    SHARD,
    options.flag("--dry-run", "Show the plan and stop."),
    HTML_OF_PLAN,
    options.ANSWER,
)


def run(
    src: str,
    dst: str,
    change: Callable[[Checkpoint], Checkpoint],
    flags: options.Flags,
    answer: Callable[[int], dict[str, Any]] = lambda number: {},
) -> None:
    """Opens, changes, plans, writes and reports. `answer` adds to the JSON document of the step
    with this number, of those that are processed."""
    tune_memory()
    dry_run = flags["dry_run"]
    share = share_of(flags, dst)
    if flags["page_file"] is not None and not dry_run:
        raise click.UsageError("--html requires --dry-run")
    checkpoints = _changed(src, dst, change, flags)
    arguments: dict[str, Any] = {name: flags[name] for name in _ARGUMENTS}
    arguments["link"] = not flags["no_link"]
    if dry_run:
        planned = plan(checkpoints, dst, **arguments)
    else:
        with working(flags) as by:
            planned = save(checkpoints, dst, **arguments, resume=flags["resume"], share=share, **by)
    notes = tuple(map(output.note_as_flags, planned.notes))
    planned = dataclasses.replace(planned, notes=notes)
    done = not dry_run and share is None

    def document(planned: Plan, number: int = 0) -> dict[str, Any]:
        made = planned.document(output.as_flags) | {"destination": dst, "done": done}
        return made | answer(number) | ({"share": [*share]} if share and not dry_run else {})

    if options.wants_text(flags, lambda: document(planned)):
        click.echo(planned)
        if done:
            click.echo(_written(planned, dst))
        elif share is not None and not dry_run:
            click.echo(wrote_share(share, dst))
    if dry_run:
        for number, item in enumerate(planned.items):
            one = dataclasses.replace(planned, items=(item,))
            step = options.for_step(flags, item.ckpt.source.number)
            write_page(step, functools.partial(document, one, number))
    if dry_run and planned.problems:
        raise ReshardError("the plan cannot be executed", planned.problems, planned.hints)


def share_of(flags: options.Flags, dst: str) -> tuple[int, int] | None:
    """The share that `--shard` names; raises click.UsageError if it is combined with options that
    concern a whole job."""
    share = parse_share(flags["share"], dst)
    if share is not None and (flags["resume"] or flags["workers"] or flags["dask"]):
        raise click.UsageError(
            "--shard cannot be combined with --resume, --workers or --dask: each process writes "
            "one share. Run the same command again if it is stopped"
        )
    return share


def wrote_share(share: tuple[int, int], dst: str) -> str:
    return f"wrote share {share[0]} of {share[1]}; when all are written: reshard commit {dst}"


def _changed(
    src: str, dst: str, change: Callable[[Checkpoint], Checkpoint], flags: options.Flags
) -> list[Checkpoint]:
    """The checkpoints of all steps, changed. The page of a step that is refused says why."""
    steps = options.chosen_steps(flags, [src], committed=True)
    by_step = [options.for_step(flags, step) for step in steps]
    for each in by_step:
        check_page(each["page_file"], src, dst)
    which = {name: flags[name] for name in ("item", "concurrency")}
    opened = [options.open_at(src, step=step, **which) for step in steps]
    if options.may_be_several(flags):
        left = [
            f"step {n} was never committed and is left out" for n in opened[0].source.uncommitted
        ]
        opened[0] = opened[0].replace(opened[0], notes=left)
    if flags.get("check") and not flags["dry_run"]:  # both models take long
        check_destination(parse_location(dst), opened, flags["overwrite"])
    changed: list[Checkpoint] = []
    for ckpt, own in zip(opened, by_step, strict=True):
        try:
            changed.append(change(ckpt))
        except ReshardError as error:
            document = ckpt.document() | options.refusal(error, dst)
            try:
                write_page(own, lambda document=document: document)
            except DestinationError as unwritten:  # which is not why there is no plan
                click.echo(f"Warning: {unwritten.summary}", err=True)
            raise
    return changed


def _written(planned: Plan, dst: str) -> str:
    steps = [ckpt.source.step for ckpt in planned.checkpoints]
    path = "/".join([dst.rstrip("/"), *steps]) if len(steps) == 1 and steps[0] else dst
    shared = f", shares {format_bytes(planned.shared_bytes)} with SRC"
    return f"wrote {path}" + (shared if planned.shared_bytes else "")


def laid_out(
    ckpt: Checkpoint, mesh: str | None, model: str | None, flags: options.Flags, to: str
) -> Checkpoint:
    """On the new mesh, given by the option `to`: as the model says, or else as saved."""
    specs, axes, rules = flags["specs"], flags["axes"], flags["rules"]
    if mesh is None:
        if specs or axes or model or rules:
            raise click.UsageError(f"--spec, --axis, --model and --rules require {to} MESH")
        return ckpt
    pairs = tuple(pair(text, "--spec") for text in specs)
    named, more = (None, ()) if rules is None else read_rules(rules)
    if model is None:
        if named is not None:
            raise click.UsageError("--rules requires --model MODULE:NAME")
        return to_mesh(ckpt, mesh, pairs + more, axes=_axes(axes))
    if axes:
        raise click.UsageError(
            "--axis cannot be combined with --model, whose specs replace saved ones"
        )
    new_mesh = parse_mesh(mesh, ckpt.meshes)
    target, found = build_target(model, named, pairs + more, new_mesh)
    ckpt = to_mesh(ckpt, new_mesh, target=target)
    return ckpt.replace(ckpt, notes=found.notes)


def _axes(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [pair(text, "--axis") for text in texts]
    axes = dict(pairs)
    if len(axes) < len(pairs):
        raise click.BadParameter("an axis is named twice", param_hint="--axis")
    return axes
