"""`reshard inspect`: what a checkpoint holds."""

import json
from typing import Any

import click

from reshard import tree
from reshard.arrays.boxes import grid_size
from reshard.arrays.handle import ArrayHandle, collision_error, sharding_text
from reshard.checkpoint import Checkpoint, Leaf
from reshard.cli import output
from reshard.cli.options import AS_JSON, CONCURRENCY, ITEM, STEP
from reshard.errors import ShardingError, TreeMismatchError, printable
from reshard.loader import open as open_checkpoint
from reshard.loader.detection import step_number
from reshard.sharding.mesh import (
    NamedSharding,
    SingleDeviceSharding,
    format_spec,
    parse_mesh,
    shard_owners,
    shard_shape,
    spec_problems,
)
from reshard.tree import Path, format_path
from reshard.units import format_bytes

# A terminal as wide as a person reads; more devices are listed rather than drawn.
_CELLS = 64


@click.command("inspect")
@click.argument("path", type=click.Path())
@STEP
@ITEM
@CONCURRENCY
@click.option("--filter", "pattern", metavar="GLOB", help="Only leaves that match.")
@click.option("--sharding", metavar="LEAF", help="Draw which device holds which part of a leaf.")
@click.option("--mesh", metavar="MESH", help="With --sharding: on this mesh, not the saved one.")
@AS_JSON
def command(
    path: str,
    step: int | None,
    item: str | None,
    concurrency: int,
    pattern: str | None,
    sharding: str | None,
    mesh: str | None,
    as_json: bool,
) -> None:
    """Show the tree: shape, dtype, bytes, chunks and saved sharding of each leaf.

    Reads metadata only, needs no devices, and says which format, steps and items there are.

    \b
    Example:
      reshard inspect run/1000
      reshard inspect run --step 1000 --filter 'params/**'
      reshard inspect run/1000 --sharding params/layer_0/kernel --mesh 1x8
    """
    if mesh is not None and sharding is None:
        raise click.UsageError("--mesh goes with --sharding LEAF")
    if pattern is not None and sharding is not None:
        raise click.UsageError("--sharding shows one leaf: leave out --filter")
    ckpt = open_checkpoint(path, step=step, item=item, concurrency=concurrency)
    if sharding is not None:
        _show_sharding(ckpt, sharding, mesh, as_json)
        return
    chosen = tree.match_globs(ckpt, [pattern]) if pattern else None
    leaves = [(p, leaf) for p, leaf in ckpt.items() if chosen is None or p in chosen]
    if as_json:
        click.echo(json.dumps(_document(ckpt, leaves)))
        return
    for line in _header(ckpt):
        click.echo(printable(line))
    columns = ("path", "shape", "dtype", "bytes", "chunks", "spec")
    output.table(columns, [_row(p, leaf) for p, leaf in leaves], right=(3,))
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, ArrayHandle)]
    total = sum(array.nbytes for array in arrays)
    click.echo(f"{len(leaves)} leaves, {len(arrays)} arrays, {format_bytes(total)}")
    collided = [a for a in arrays if a.same_name is not None]
    if collided:
        click.echo(f"Warning: {collision_error(collided).render(10, output.as_flags)}", err=True)


def _header(ckpt: Checkpoint) -> list[str]:
    source = ckpt.source
    kinds = {
        "item": "a PyTree item",
        "standalone": "a standalone checkpoint",
        "step": "a step",
        "manager": "a CheckpointManager root",
    }
    lines = [f"{source.root}: {'v1, ' if source.v1 else ''}{kinds[source.kind]}, {source.format}"]
    if source.steps:
        steps = ", ".join(map(str, source.steps))
        lines.append(f"steps: {steps}; shown: {source.step}")
    if source.items:
        lines.append(f"items: {', '.join(source.items)}; shown: {source.item}")
    lines.append("saved meshes: " + ("; ".join(dict.fromkeys(map(str, ckpt.meshes))) or "none"))
    return lines


def _row(path: Path, leaf: Leaf) -> tuple[str, ...]:
    if not isinstance(leaf, ArrayHandle):
        return (format_path(path), "", _kind(leaf), "", "", repr(leaf) if leaf else "")
    count = grid_size(leaf.shape, leaf.chunk_shape)
    chunks = f"{count} x {_dims(leaf.chunk_shape)}" if count != 1 else "1"
    kind = leaf.dtype.name if leaf.key_impl is None else f"key<{leaf.key_impl}>"
    return (
        format_path(path),
        _dims(leaf.shape),
        kind,
        format_bytes(leaf.nbytes),
        chunks,
        sharding_text(leaf),
    )


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"


def _kind(leaf: Leaf) -> str:
    return {str: "string", type(None): "None"}.get(type(leaf), f"empty {type(leaf).__name__}")


def _document(ckpt: Checkpoint, leaves: list[tuple[Path, Leaf]]) -> dict[str, Any]:
    source = ckpt.source
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, ArrayHandle)]
    return {
        "path": str(source.root),
        "kind": source.kind,
        "v1": source.v1,
        "format": source.format,
        "step": step_number(source.step) if source.step else None,
        "steps": list(source.steps),
        "item": source.item or None,
        "items": list(source.items),
        "meshes": [mesh.shape for mesh in ckpt.meshes],
        "bytes": sum(array.nbytes for array in arrays),
        "leaves": [_leaf_document(path, leaf) for path, leaf in leaves],
    }


def _leaf_document(path: Path, leaf: Leaf) -> dict[str, Any]:
    document: dict[str, Any] = {"path": format_path(path), "keys": list(path)}
    if not isinstance(leaf, ArrayHandle):
        return document | {"type": _kind(leaf), "value": leaf}
    document |= {
        "type": leaf.value_type,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "bytes": leaf.nbytes,
        "chunk_shape": list(leaf.chunk_shape),
        "key_impl": leaf.key_impl,
        "mesh": None,
        "spec": None,
    }
    if isinstance(leaf.sharding, NamedSharding):
        document["mesh"] = leaf.sharding.mesh.shape
        document["spec"] = [list(axes) for axes in leaf.sharding.spec]
    elif isinstance(leaf.sharding, SingleDeviceSharding):
        document["device"] = leaf.sharding.device
    return document


def _show_sharding(ckpt: Checkpoint, name: str, mesh: str | None, as_json: bool) -> None:
    leaf = next((a for a in ckpt.arrays if format_path(a.path) == name), None)
    if leaf is None:
        near = tree.nearest(name, (a.path for a in ckpt.arrays))
        hints = [f"the nearest is `{n}`" for n in near[:1]]
        raise TreeMismatchError(f"no array at `{name}`", hints=hints)
    sharding = leaf.sharding
    if mesh is not None:
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        sharding = NamedSharding(parse_mesh(mesh, ckpt.meshes), spec)
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            f"{name} was saved without a mesh ({sharding_text(leaf)})",
            hints=[f"--sharding {name} --mesh data=1,model=8"],
        )
    problems = spec_problems(leaf.shape, sharding.mesh, sharding.spec)
    if problems:
        fits = "x".join("1" for _ in sharding.mesh.axis_sizes)
        hints = [f"--mesh {fits} fits any array"]
        raise ShardingError(f"{name} does not fit `{sharding.mesh}`", problems, hints)
    owners = shard_owners(leaf.shape, sharding)
    shard = shard_shape(leaf.shape, sharding)
    if as_json:
        parts = [{"index": list(index), "devices": ids} for index, ids in sorted(owners.items())]
        document = {
            "path": name,
            "shape": list(leaf.shape),
            "mesh": sharding.mesh.shape,
            "spec": [list(axes) for axes in sharding.spec],
            "shard_shape": list(shard),
            "shards": parts,
        }
        click.echo(json.dumps(document))
        return
    click.echo(
        f"{name}  {leaf.dtype.name}[{_dims(leaf.shape) if leaf.shape else ''}]  "
        f"{format_spec(sharding.spec)} on {sharding.mesh}: "
        f"{len(owners)} shard{'s' if len(owners) > 1 else ''} of {_dims(shard)}"
    )
    click.echo(output.shard_picture(owners, leaf.shape, shard, _CELLS))
