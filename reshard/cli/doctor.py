"""`reshard doctor`: what is at a path, whether it is complete, and what to run next."""

import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import click

from reshard.checkpoint import Checkpoint
from reshard.cli import options, output
from reshard.convert.layout import KINDS, detect
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
    Exits with 0 if the checkpoint can be used, 1 if something is wrong, 2 if there is none.

    \b
    Example:
      reshard doctor run/1000
      reshard doctor gs://bucket/run --step all
    """
    document = _examined(path, options.places(flags, path)[0])
    if options.wants_text(flags, lambda: document):
        for line in _lines(document):
            click.echo(printable(line))
    if status := _STATUS[document["state"]]:
        sys.exit(status)


def _examined(path: str, place: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: the worst state of the trees that are there, and each of them."""
    try:
        trees = [_tree(open_checkpoint(path, **place))]
    except StoreError:
        raise
    except ReshardError as error:
        # A step of several items: the problems of this error are their names.
        items = error.problems if error.hints and error.hints[0].startswith("item=") else ()
        if not items or not isinstance(error, CheckpointNotFoundError):
            return _refused(path, error)
        trees = [_examined(path, {**place, "item": item}) for item in items]
        trees = [tree for found in trees for tree in found["trees"] or [found]]
    state = max((tree["state"] for tree in trees), key=lambda state: _STATUS[state])
    return {"path": path, "state": state, "trees": trees}


def _refused(path: str, error: ReshardError) -> dict[str, Any]:
    state = "not a checkpoint"
    if isinstance(error, UncommittedCheckpointError):
        state = "uncommitted"
    elif isinstance(error, CorruptCheckpointError):
        state = "damaged"
    hints = [output.as_flags(hint) for hint in error.hints]
    if any("unknown value type" in problem for problem in error.problems):
        hints.append("a newer Orbax may have written it: pip install -U orbax-checkpoint reshard")
    problems = [error.summary, *error.problems]
    return {"path": path, "state": state, "problems": problems, "hints": hints, "trees": []}


def _tree(ckpt: Checkpoint) -> dict[str, Any]:
    """What is known of a tree from its metadata and the sizes of its files."""
    source, step = ckpt.source, shlex.quote(str(ckpt.source.path))
    try:
        layout = detect(ckpt)
        api = {"api": layout.api, "layout": layout.kind, "why": list(layout.why)}
    except TreeMismatchError as error:
        api = {"api": None, "layout": None, "why": [error.summary]}
    values = [v for values in source.store.values.values() for v in values.values()]
    files = {v.file for v in values if v.file is not None}
    problems = list(_problems(ckpt, files))
    recorded = 0
    try:
        record = read_record(source.store.directory / FILE)
        recorded = sum(record is not None and record.digest(a) is not None for a in ckpt.arrays)
    except ReshardError as error:
        problems += [error.summary, *error.problems]
    devices = max((mesh.size for mesh in ckpt.meshes), default=1)
    orbax = (
        f"{version('orbax-checkpoint')} is installed; without a target, it needs {devices} devices"
    )
    if source.is_foreign:
        orbax = (
            f"{version('orbax-checkpoint')} is installed; reshard ckpt makes a checkpoint for it"
        )
    elif str(source.root).startswith("s3://"):
        orbax = "it cannot read s3://: copy the checkpoint to a disk or to gs://"
    hints = [f"reshard ckpt {step} DST --to MESH"]
    if api["api"]:
        other = "linen" if api["api"] == "nnx" else "nnx"
        hints.append(f"reshard convert {step} DST --to {other} --model MODULE:NAME")
    if recorded < len(ckpt.arrays) and not source.is_foreign:
        hints.insert(0, f"reshard digest {step} --write")
    if problems:
        earlier = [n for n in source.steps if n < (source.number or 0)]
        hints = [f"reshard verify {step}"]
        hints += [
            f"reshard doctor {shlex.quote(str(source.root))} --step {n}" for n in earlier[-1:]
        ]
    return {
        "path": str(source.path),
        "state": "damaged" if problems else "complete",
        "kind": source.kind,
        "v1": source.v1,
        "format": source.format,
        **api,
        "meshes": [mesh.shape for mesh in ckpt.meshes],
        "steps": list(source.steps),
        "step": source.number,
        "uncommitted": list(source.uncommitted),
        "items": list(source.items),
        "item": source.item or None,
        "arrays": len(ckpt.arrays),
        "bytes": ckpt.nbytes,
        "files": len(files),
        "recorded_digests": recorded,
        "orbax": orbax,
        "problems": problems,
        "hints": hints,
    }


def _problems(ckpt: Checkpoint, files: set[str]) -> Iterator[str]:
    """What is missing or truncated, a line each."""
    directory = ckpt.source.store.directory
    for file in sorted(files):
        if (directory / file).file_bytes() is None:
            yield f"the data file `{directory / file}` is missing"
    for array in ckpt.arrays:
        try:
            array.stored_sizes()
        except CorruptCheckpointError as error:
            yield from (error.summary, *error.problems)
        if array.same_name is not None:
            yield f"{format_path(array.path)}: another leaf was saved under the same name"


def _lines(document: dict[str, Any]) -> Iterator[str]:
    for tree in document["trees"] or [document]:
        yield f"{tree['path']}: {tree['state']}"
        if "kind" in tree:
            yield from _facts(tree)
        problems = tree["problems"]
        yield from (f"problem  {problem}" for problem in problems[:_SHOWN])
        if len(problems) > _SHOWN:
            yield f"problem  ... and {len(problems) - _SHOWN} more"
        yield from (f"next     {hint}" for hint in tree["hints"])


def _facts(tree: dict[str, Any]) -> Iterator[str]:
    counts = f"{count_of(tree['arrays'], 'array')}, {format_bytes(tree['bytes'])}"
    yield f"holds    {counts} in {count_of(tree['files'], 'data file')}"
    yield f"format   {options.kind_text(tree['kind'], tree['v1'])}, {tree['format']}"
    if tree["api"]:
        yield f"model    {tree['layout']}: {KINDS[tree['layout']]}"
    else:
        yield f"model    not detected: {tree['why'][0]}"
    meshes = [",".join(f"{name}={size}" for name, size in mesh.items()) for mesh in tree["meshes"]]
    yield f"mesh     {'; '.join(dict.fromkeys(meshes)) or 'none'}"
    if tree["steps"]:
        left_out = ", ".join(map(str, tree["uncommitted"]))
        steps = ", ".join(map(str, tree["steps"]))
        yield f"steps    {steps}; this is {tree['step']}" + (
            f"; never committed: {left_out}" if left_out else ""
        )
    if tree["items"]:
        yield f"items    {', '.join(tree['items'])}; this is {tree['item']}"
    yield f"digests  recorded for {tree['recorded_digests']} of {tree['arrays']} arrays"
    yield f"orbax    {tree['orbax']}"
