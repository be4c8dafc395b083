"""`reshard doctor`: what is at a path, whether it is complete, and what to run next."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import click

from reshard.checkpoint import Checkpoint, UnknownLeaf
from reshard.cli import options
from reshard.cli.unfinished import explained, ways_on
from reshard.convert.layout import KINDS, detect
from reshard.convert.record import has_record
from reshard.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ReshardError,
    StoreError,
    TreeMismatchError,
    UncommittedCheckpointError,
    printable,
)
from reshard.loader import open as open_checkpoint
from reshard.tree import format_path
from reshard.units import count_of, format_bytes
from reshard.verify.digest_record import FILE, read_record

# The exit status of each state of a checkpoint.
_STATUS = {"complete": 0, "damaged": 1, "uncommitted": 1, "not a checkpoint": 2}
# Problems that the terminal shows; `--json` has all.
_SHOWN = 10


@click.command("doctor")
@click.argument("path", type=click.Path())
@options.PLACE
@options.CONCURRENCY
@options.as_json
@options.per_step
def command(path: str, **flags: Any) -> None:
    """Show what is at PATH, whether it is complete, and what to run next.

    Reads metadata and the sizes of data files, but no array: `reshard verify` reads the arrays.
    Exits with 0 if the checkpoint can be used, 1 if PATH itself is damaged or unfinished, 2 if it
    has no checkpoint.

    \b
    Example:
      reshard doctor run/1000
      reshard doctor gs://bucket/run --step all
    """
    document = _examined(path, options.places(flags, path)[0])
    if options.wants_text(flags, lambda: document):
        for tree in document["trees"] or [document]:
            click.echo(printable("\n".join(_lines(tree))))
    if status := _STATUS[document["state"]]:
        sys.exit(status)


def _examined(path: str, place: dict[str, Any], first: bool = True) -> dict[str, Any]:
    """The JSON document: the worst state of the trees at a path, and each tree. The first one has
    the unfinished jobs."""
    try:
        with explained(path, place["step"], f"reshard doctor {shlex.quote(path)}"):
            trees = [_tree(open_checkpoint(path, **place), first)]
    except (StoreError, RuntimeError):  # or its files change
        raise
    except ReshardError as error:
        # A step of several items: the problems of this error are their names.
        items = error.problems if error.hints and error.hints[0].startswith("item=") else ()
        if not items or not isinstance(error, CheckpointNotFoundError):
            return _refused(path, error)
        found = [_examined(path, {**place, "item": n}, n == items[0]) for n in items]
        trees = [tree for each in found for tree in each["trees"] or [each]]
    state = max((tree["state"] for tree in trees), key=lambda state: _STATUS[state])
    return {"path": path, "state": state, "trees": trees}


def _refused(path: str, error: ReshardError) -> dict[str, Any]:
    state = "not a checkpoint"
    if isinstance(error, UncommittedCheckpointError):
        state = "uncommitted"
    elif isinstance(error, CorruptCheckpointError):
        state = "damaged"
    document = options.refusal(error, None)
    return {"path": path, "state": state, **document, "unfinished": [], "trees": []}


def _tree(ckpt: Checkpoint, first: bool) -> dict[str, Any]:
    """The document of a tree, from its metadata and the sizes of its files."""
    source, document = ckpt.source, ckpt.document()
    try:
        layout = detect(ckpt)
        api = {"api": layout.api, "layout": layout.kind, "why": list(layout.why)}
    except TreeMismatchError as error:
        api = {"api": None, "layout": None, "why": [error.summary]}
    values = [v for values in source.store.values.values() for v in values.values()]
    files = {v.file for v in values if v.file is not None}
    problems, recorded = list(_problems(ckpt)), 0
    try:
        record = read_record(source.store.directory / FILE)
        recorded = sum(record is not None and record.digest(a) is not None for a in ckpt.arrays)
    except ReshardError as error:
        problems += [error.summary, *error.problems]
    jobs, finish = list[str](), list[str]()
    try:
        if first:
            jobs, finish = ways_on(source)
    except ReshardError as error:  # a document of a job is damaged
        jobs = [error.summary]
    types = ((p, leaf) for p, leaf in ckpt.items() if isinstance(leaf, UnknownLeaf))
    unknown = [f"{format_path(path)}: {leaf.value_type}" for path, leaf in types]
    if unknown:
        finish += ["a newer Orbax may have written it: pip install -U orbax-checkpoint reshard"]
    keys = ("kind", "v1", "format", "meshes", "steps", "step", "items", "item", "bytes")
    return {
        "path": str(source.path),
        "state": "damaged" if problems else "complete",
        **{key: document[key] for key in keys},
        **api,
        "uncommitted": list(source.uncommitted),
        "arrays": len(ckpt.arrays),
        "files": len(files),
        "unknown_types": unknown,
        "recorded_digests": recorded,
        "orbax": _orbax(ckpt),
        "problems": problems,
        "unfinished": jobs,
        "hints": finish + _hints(ckpt, api["api"], bool(problems), recorded),
    }


def _problems(ckpt: Checkpoint) -> Iterator[str]:
    """Arrays whose chunks or files are missing or truncated, a line each."""
    for array in ckpt.arrays:
        try:
            array.stored_sizes()
        except CorruptCheckpointError as error:
            yield from (error.summary, *error.problems)
        if array.same_name is not None:
            yield f"{format_path(array.path)}: another leaf was saved under the same name"


def _orbax(ckpt: Checkpoint) -> str:
    """How the installed Orbax reads a checkpoint."""
    installed = f"{version('orbax-checkpoint')} is installed; "
    if ckpt.source.is_foreign:
        return installed + "reshard ckpt makes a checkpoint for it"
    if str(ckpt.source.root).startswith("s3://"):
        return "it cannot read s3://: copy the checkpoint to a disk or to gs://"
    devices = max((mesh.size for mesh in ckpt.meshes), default=1)
    return f"{installed}to restore without a target, it needs {count_of(devices, 'device')}"


def _hints(ckpt: Checkpoint, api: str | None, damaged: bool, recorded: int) -> list[str]:
    """The commands to run next."""
    source, path = ckpt.source, shlex.quote(str(ckpt.source.path))
    if damaged:
        earlier = [step for step in source.steps if step < (source.number or 0)]
        root = shlex.quote(str(source.root))
        return [f"reshard verify {path}"] + [
            f"reshard doctor {root} --step {step}" for step in earlier[-1:]
        ]
    # Of a step with several items, the whole step: the other items belong to it.
    whole, item = shlex.quote(str(source.place)), ""
    if len(source.items) > 1:
        item = f" --item {shlex.quote(source.item)}"
    hints = [f"reshard ckpt {whole} DST{item} --to MESH"]
    if not ckpt.meshes:  # then there are no specs either
        hints = [f"reshard ckpt {whole} DST{item} --to data=1,model=8 --spec 'REGEX=AXES'"]
    if source.kind == "safetensors":
        hints = [f"reshard ckpt {path} DST --map {name}" for name in _ready_maps(ckpt)] + hints
    if recorded < len(ckpt.arrays) and not (source.is_foreign or source.store.ranged):
        hints.insert(0, f"reshard digest {path} --write")
    if has_record(ckpt):
        hints.append(f"reshard convert {whole} DST{item} --to linen")
    elif api:
        other = "linen" if api == "nnx" else "nnx"
        hints.append(f"reshard convert {whole} DST{item} --to {other} --model MODULE:NAME")
    return hints


def _ready_maps(ckpt: Checkpoint) -> Iterator[str]:
    """The ready maps that take a Hugging Face directory."""
    from reshard.convert.remap import PREFIX, find_map, maps_for, read_config

    with contextlib.suppress(ReshardError):  # no configuration, or one that no map takes
        for name in maps_for(read_config(ckpt.source.root)):
            find_map(PREFIX + name, ckpt)
            yield PREFIX + name


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    yield f"{tree['path']}: {tree['state']}"
    if "kind" in tree:
        yield from (f"{name:9}{text}" for name, text in _facts(tree).items() if text)
    problems = tree["problems"]
    yield from (f"problem  {problem}" for problem in problems[:_SHOWN])
    if len(problems) > _SHOWN:
        yield f"problem  ... and {len(problems) - _SHOWN} more"
    yield from (f"job      {line}" for line in tree.get("unfinished", ()))
    yield from (f"next     {hint}" for hint in tree["hints"])


def _facts(tree: dict[str, Any]) -> dict[str, str]:
    def listed(name: str, end: str = "") -> str:
        return ", ".join(map(str, tree[name])) + end if tree[name] else ""

    counts = f"{count_of(tree['arrays'], 'array')}, {format_bytes(tree['bytes'])}"
    meshes = [",".join(f"{name}={size}" for name, size in mesh.items()) for mesh in tree["meshes"]]
    left_out = listed("uncommitted")
    left_out = f"; never committed: {left_out}" if left_out else ""
    kind, undetected = KINDS.get(tree["layout"]), f"not detected: {(tree['why'] or [''])[0]}"
    if any("--map hf:" in hint for hint in tree["hints"]):
        undetected = "tensors as in Hugging Face's model: a ready map converts them"
    return {
        "holds": f"{counts} in {count_of(tree['files'], 'data file')}",
        "unknown": listed("unknown_types"),
        "format": f"{options.kind_text(tree['kind'], tree['v1'])}, {tree['format']}",
        "model": f"{tree['layout']}: {kind}" if kind else undetected,
        "mesh": "; ".join(dict.fromkeys(meshes)) or "none",
        "steps": listed("steps", f"; shown: {tree['step']}{left_out}"),
        "items": listed("items", f"; shown: {tree['item']}"),
        "digests": f"recorded for {tree['recorded_digests']} of {tree['arrays']} arrays",
        "orbax": tree["orbax"],
    }
