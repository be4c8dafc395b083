"""Options that several commands share, a command's run for each step, and its answer."""

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import click

from reshard.checkpoint import Checkpoint, Source
from reshard.cli import output
from reshard.errors import ReshardError
from reshard.loader import open as open_checkpoint
from reshard.loader.locate import steps_at, takes_item
from reshard.storage.bucket import REQUESTS
from reshard.storage.location import parse_location
from reshard.storage.machine import tune_memory

F = TypeVar("F", bound=Callable[..., Any])
Flags = dict[str, Any]  # the options of a command, by name


def value(names: str, metavar: str | None, text: str, **more: Any) -> Callable[[F], F]:
    """An option with a value: its names, the name of its value, and its help."""
    return click.option(*names.split(), metavar=metavar, help=text, show_default=True, **more)


def values(names: str, metavar: str, text: str) -> Callable[[F], F]:
    """An option that may be given several times."""
    return value(names, metavar, text, multiple=True)


def flag(names: str, text: str) -> Callable[[F], F]:
    return click.option(*names.split(), is_flag=True, help=text)


def all_of(*of: Callable[[F], F]) -> Callable[[F], F]:
    """Adds options to a command, in this order."""
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(of), command)


def _scheduler(ctx: click.Context, param: click.Parameter, address: str | None) -> str | None:
    """Refuses an address without a port, for which Dask itself takes 40 seconds."""
    if address is None or re.fullmatch(r"(\w+://)?[^/]+:\d+", address):
        return address
    raise click.BadParameter(f"`{address}` is not tcp://HOST:PORT, such as tcp://localhost:8786")


def as_json(command: F) -> F:
    """Adds `--json`. An error is a document too, unless the command has printed one."""

    @functools.wraps(command)
    def run(**flags: Any) -> None:
        try:
            command(**flags)
        except ReshardError as error:
            if flags["as_json"] and not click.get_current_context().meta.get("answered"):
                click.echo(json.dumps(refusal(error, flags.get("dst"))))
            raise

    made: Any = run
    return flag("--json as_json", "Print one JSON document.")(made)


def refusal(error: ReshardError, dst: str | None) -> dict[str, Any]:
    """The document of an error, of a command that writes DST if that is not None."""
    document = {} if dst is None else {"destination": dst, "done": False}
    document["problems"] = [error.summary, *error.problems]
    document["hints"] = [*map(output.as_flags, error.hints)]
    if outcomes := getattr(error, "outcomes", ()):
        document["rows"] = [row.document() for row in outcomes]
    return document


def _once(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> str | None:
    """The value of an option of which click would take the last one."""
    if len(given) > 1:
        raise click.BadParameter(f"one value is taken, not {', '.join(given)}")
    return given[0] if given else None


COUNT = click.IntRange(1)
CONCURRENCY = value(
    "--concurrency",
    "N",
    "Limit for simultaneous requests to a bucket.",
    type=COUNT,
    default=REQUESTS,
)
ITEM = value("--item", None, "Item to read, if a step has several.", multiple=True, callback=_once)
PLACE = all_of(
    value(
        "--step",
        None,
        "Steps of a root to read: N, N,M, N..M or all; the latest by default.",
        multiple=True,
        callback=_once,
    ),
    ITEM,
)
SELECTION = all_of(
    values("--select", "GLOB", "Keep only these leaves."),
    values("--drop", "GLOB", "Leave these leaves out."),
)
WORK = all_of(
    value("--max-memory", "SIZE", "Limit for arrays in memory, per process.", default="1GiB"),
    CONCURRENCY,
    value("--workers", "N", "Processes of this machine that share the work.", type=COUNT),
    value(
        "--dask",
        "ADDRESS",
        "A Dask scheduler that runs the work: tcp://HOST:PORT.",
        callback=_scheduler,
    ),
)
ANSWER = all_of(as_json, flag("--quiet", "Print nothing but errors and warnings."))
reading_options = all_of(PLACE, WORK, ANSWER)


def chosen_steps(
    flags: Mapping[str, Any], paths: Sequence[str], committed: bool = False
) -> Sequence[int | None]:
    """The steps of these paths that `--step` names, ascending. None is the latest of each."""
    text = flags["step"]
    if text in (None, "latest"):
        return [None]
    if not re.fullmatch(r"all|\d+\.\.\d+|\d+(,\d+)*", text, re.ASCII):
        raise click.UsageError(f"--step {text}: steps are N, N,M, N..M, latest or all")
    steps = sorted({int(number) for number in re.findall(r"\d+", text)})
    if text == "all" or ".." in text:
        known = {n for path in paths for n in steps_at(path, committed)}
        within = [n for n in known if text == "all" or steps[0] <= n <= steps[-1]]
        steps = sorted(within) or steps[:1]
    return steps or [None]


def may_be_several(flags: Flags) -> bool:
    """Whether `--step` may name several steps: their answer has a form of its own."""
    return not re.fullmatch(r"\d+|latest", flags["step"] or "latest")


def for_step(flags: Flags, step: int | None) -> Flags:
    """The flags of one step. If `--step` may name several, the name of its page has the step."""
    own = flags | {"step": step}
    if may_be_several(flags) and (file := flags.get("page_file")):
        own["page_file"] = f"{file.removesuffix('.html')}-{step}.html"
    return own


def per_step(command: Callable[..., None]) -> Callable[..., None]:
    """Runs a command for each of its steps, also after an error. Exits with the worst status."""

    @functools.wraps(command)
    def run(**flags: Any) -> None:
        paths = [flags[name] for name in ("path", "against", "a", "b") if flags.get(name)]
        steps = chosen_steps(flags, paths)
        if not may_be_several(flags):
            return command(**flags | {"step": steps[0]})
        status, meta = 0, click.get_current_context().meta
        documents = meta["documents"] = []
        for step in steps:
            name = f"step {step}" if len(steps) > 1 else ""
            if name and not flags["as_json"] and not flags.get("quiet"):
                click.echo(name)
            count = len(documents)
            try:
                command(**for_step(flags, step))
            except SystemExit as ended:
                status = max(status, int(ended.code or 0))
            except ReshardError as error:
                status = 2
                if len(documents) == count:
                    documents.append(refusal(error, None))
                text = error.render(10, output.as_flags)
                click.echo(f"Error: {name}: {text}" if name else f"Error: {text}", err=True)
            documents[count:] = [{"step": step, **each} for each in documents[count:]]
        if flags["as_json"]:
            click.echo(json.dumps({"steps": documents}))
        sys.exit(status)

    return run


def wants_text(flags: Mapping[str, Any], document: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether a command prints its answer as text. With --json, prints the document; `per_step`
    prints those of several steps."""
    if not flags["as_json"]:
        return not flags.get("quiet")
    meta = click.get_current_context().meta
    meta["answered"] = True
    if "documents" in meta:
        meta["documents"].append(document())
    else:
        click.echo(json.dumps(document()))
    return False


def answer_no(flags: Flags, document: Callable[[], Mapping[str, Any]], text: str) -> NoReturn:
    """Prints the answer no, with --quiet as text on stderr, and exits with 1."""
    if wants_text(flags, document) or not flags["as_json"]:
        click.echo(text, err=flags["quiet"])
    sys.exit(1)


def kind_text(kind: str, v1: bool) -> str:
    """The kind of an `Item` in words."""
    words = {
        "item": "a PyTree item",
        "standalone": "a standalone checkpoint",
        "step": "a step",
        "manager": "a CheckpointManager root",
        "safetensors": "Hugging Face's format",
        "msgpack": "Flax's format",
        "zarr": "arrays of another program",
    }
    return f"v1, {words[kind]}" if v1 else words[kind]


def latest_text(source: Source, step: int | None) -> str:
    """A line that says which step of a root was read, if `--step` did not name one."""
    text = f"step {source.number} is the latest of {len(source.steps)}: --step all reads each\n"
    return text if step is None and source.steps[1:] else ""


def places(flags: Flags, *paths: str) -> list[dict[str, Any]]:
    """The arguments of `reshard.open` for each path. `--step` and `--item` apply to paths that have
    steps and items. If no path has any, the first gets them, and its error says so."""
    asked = {name: flags[name] for name in ("step", "item")}
    found = [_own(path, **asked) for path in paths] if paths[1:] else [{**asked}]
    for name in asked:
        if all(place[name] is None for place in found):
            found[0][name] = asked[name]
    return [{**place, "concurrency": flags["concurrency"]} for place in found]


def opened(flags: Flags, *paths: str) -> list[Checkpoint]:
    """The checkpoints at these paths, whose arrays are read."""
    tune_memory()
    at = places(flags, *paths)
    return [open_at(path, **place) for path, place in zip(paths, at, strict=True)]


def open_at(path: str, **place: Any) -> Checkpoint:
    """`reshard.open`, with errors that name unfinished jobs and earlier steps."""
    from reshard.cli.unfinished import explained  # its import takes as long as opening

    with explained(path, place["step"]):
        return open_checkpoint(path, **place)


def _own(path: str, step: int | None, item: str | None) -> dict[str, Any]:
    if step is None and item is None:  # then nobody has to look
        return {"step": None, "item": None}
    root = parse_location(path)
    steps = steps_at(path)
    inner = root / steps[step if step in steps else max(steps)] if steps else root
    takes = item is not None and takes_item(inner, item)
    return {"step": step if steps else None, "item": item if takes else None}
