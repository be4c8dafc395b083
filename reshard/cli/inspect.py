"""`reshard inspect`: the tree of a checkpoint, its format, steps and meshes."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from reshard import tree
from reshard.arrays.boxes import grid_size
from reshard.arrays.handle import ArrayHandle, collision_error, sharding_text
from reshard.checkpoint import Checkpoint, Leaf, kind_text, type_name
from reshard.cli import options, output
from reshard.cli.page_file import HTML, check_page, write_page
from reshard.errors import ShardingError, TreeMismatchError, printable
from reshard.report.outline import outline
from reshard.sharding.mesh import (
    NamedSharding,
    format_spec,
    parse_mesh,
    shard_owners,
    shard_shape,
    spec_problems,
)
from reshard.tree import Path, format_path
from reshard.units import count_leaves, count_of, format_bytes, format_runs

# Shards that a picture shows; more are listed.
_CELLS = 64
# Characters of the bar for all bytes.
_BAR = 20


@click.command("inspect")
@click.argument("path", type=click.Path())
@options.PLACE
@options.CONCURRENCY
@options.value("--filter pattern", "GLOB", "Show only leaves that match.")
@options.flag("--tree as_tree", "Show levels with their bytes; equal levels once.")
@options.value("--sharding", "LEAF", "Draw the devices that hold each part of a leaf.")
@options.value("--mesh", "MESH", "With --sharding: on this mesh; the saved mesh by default.")
@HTML
@options.as_json
@options.per_step
def command(
    path: str,
    pattern: str | None,
    as_tree: bool,
    sharding: str | None,
    mesh: str | None,
    **flags: Any,
) -> None:
    """Show the tree: shape, dtype, bytes, chunks and saved sharding of each leaf.

    Also shows the format, the steps and the items. Reads only metadata and needs no devices.

    \b
    Example:
      reshard inspect run --step 1000 --filter 'params/**'
      reshard inspect run/1000 --sharding params/layer_0/kernel --mesh 1x8
    """
    if mesh is not None and sharding is None:
        raise click.UsageError("--mesh requires --sharding LEAF")
    if pattern is not None and sharding is not None:
        raise click.UsageError("--sharding shows one leaf: leave out --filter")
    if sharding is not None and (as_tree or flags["page_file"] is not None):
        raise click.UsageError("--sharding shows one leaf: leave out --tree and --html")
    check_page(flags["page_file"], path)
    ckpt = options.open_at(path, **options.places(flags, path)[0])
    if sharding is not None:
        _show_sharding(*_sharding(ckpt, sharding, mesh), flags)
        return
    chosen = tree.match_globs(ckpt, [pattern]) if pattern else ckpt.keys()
    leaves = {p: leaf for p, leaf in ckpt.items() if p in chosen}
    if options.wants_text(flags, lambda: ckpt.document(leaves)):
        _show(ckpt, leaves, as_tree)
    write_page(flags, lambda: ckpt.document(leaves))


def _show(ckpt: Checkpoint, leaves: Mapping[Path, Leaf], as_tree: bool) -> None:
    click.echo(_header(ckpt))
    if as_tree:
        click.echo("\n".join(output.aligned(_tree_rows(ckpt, leaves), (1, 3))))
    else:
        columns = ("path", "shape", "dtype", "bytes", "chunks", "spec")
        output.table(columns, [_row(p, leaf) for p, leaf in leaves.items()], right=(3,))
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, ArrayHandle)]
    total = format_bytes(sum(array.nbytes for array in arrays))
    click.echo(f"{count_leaves(len(leaves))}, {count_of(len(arrays), 'array')}, {total}")
    if collided := [a for a in arrays if a.same_name is not None]:
        click.echo(f"Warning: {collision_error(collided).render(10, output.as_flags)}", err=True)


def _header(ckpt: Checkpoint) -> str:
    source = ckpt.source
    lines = [f"{source.root}: {options.kind_text(source.kind, source.v1)}, {source.format}"]
    if source.steps:
        lines.append(
            f"steps: {', '.join(map(str, source.steps))}; shown: {source.step or source.number}"
        )
    if source.items:
        lines.append(f"items: {', '.join(source.items)}; shown: {source.item}")
    lines.append("saved meshes: " + ("; ".join(dict.fromkeys(map(str, ckpt.meshes))) or "none"))
    lines += [f"note: {note}" for note in ckpt.notes]
    return printable("\n".join(lines))


def _row(path: Path, leaf: Leaf) -> tuple[str, ...]:
    name = format_path(path)
    if not isinstance(leaf, ArrayHandle):
        return name, "", type_name(leaf), "", "", repr(leaf) if leaf else ""
    count = grid_size(leaf.shape, leaf.chunk_shape)
    chunks = f"{count} x {_dims(leaf.chunk_shape)}" if count != 1 else "1"
    kind = leaf.dtype.name if leaf.key_impl is None else f"key<{leaf.key_impl}>"
    nbytes = format_bytes(leaf.nbytes)
    return name, _dims(leaf.shape), kind, nbytes, chunks, sharding_text(leaf)


def _tree_rows(ckpt: Checkpoint, leaves: Mapping[Path, Leaf]) -> list[tuple[str, ...]]:
    """Levels and leaves, each with its bytes and its part of all bytes."""
    rows = outline(ckpt.document(leaves)["leaves"])
    total = sum(row.nbytes for row in rows if not row.depth) or 1
    cells = []
    for row in rows:
        kind = spec = ""
        if row.leaf is not None:
            leaf = leaves[tuple(row.leaf["keys"])]
            kind = kind_text(leaf) if isinstance(leaf, ArrayHandle) else type_name(leaf)
            spec = sharding_text(leaf) if isinstance(leaf, ArrayHandle) else ""
        name, size = "  " * row.depth + row.name, format_bytes(row.nbytes)
        bar = "#" * round(_BAR * row.nbytes / total)
        cells.append((name, size, bar, f"{row.count} leaves" * (row.count > 1), kind, spec))
    return cells


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "()"


def _sharding(ckpt: Checkpoint, name: str, mesh: str | None) -> tuple[ArrayHandle, NamedSharding]:
    """A leaf, and its sharding on a mesh, or as saved."""
    leaf = next((a for a in ckpt.arrays if format_path(a.path) == name), None)
    if leaf is None:
        near = tree.nearest(name, (a.path for a in ckpt.arrays))
        hints = [f"the nearest array is `{n}`" for n in near[:1]]
        raise TreeMismatchError(f"no array at `{name}`", hints=hints)
    sharding = leaf.sharding
    if mesh is not None:
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        sharding = NamedSharding(parse_mesh(mesh, ckpt.meshes), spec)
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            f"`{name}` was saved without a mesh ({sharding_text(leaf)})",
            hints=[f"--sharding {shlex.quote(name)} --mesh data=1,model=8"],
        )
    if problems := spec_problems(leaf.shape, sharding.mesh, sharding.spec):
        fits = ",".join(dict.fromkeys(f"{axis}=1" for entry in sharding.spec for axis in entry))
        hints = [f"--mesh {fits} fits any array"]
        raise ShardingError(f"`{name}` does not fit the mesh `{sharding.mesh}`", problems, hints)
    return leaf, sharding


def _show_sharding(leaf: ArrayHandle, sharding: NamedSharding, flags: options.Flags) -> None:
    owners, shard = shard_owners(leaf.shape, sharding), shard_shape(leaf.shape, sharding)
    document = {
        "path": format_path(leaf.path),
        "shape": list(leaf.shape),
        "mesh": sharding.mesh.shape,
        "spec": [list(axes) for axes in sharding.spec],
        "shard_shape": list(shard),
        "shards": [{"index": [*at], "devices": ids} for at, ids in sorted(owners.items())],
    }
    if options.wants_text(flags, lambda: document):
        click.echo(
            f"{document['path']}  {leaf.dtype.name}[{_dims(leaf.shape) if leaf.shape else ''}]  "
            f"{format_spec(sharding.spec)} on {sharding.mesh}: "
            f"{count_of(len(owners), 'shard')} of {_dims(shard)}"
        )
        click.echo(_picture(owners, leaf.shape, shard))


def _picture(
    owners: Mapping[tuple[int, ...], list[int]], shape: Sequence[int], shard: Sequence[int]
) -> str:
    """The devices that hold each shard. A grid of the first two sharded dimensions, or, for more
    than 64 shards, a list. `owners` are device ids by index of the shard in each dimension."""
    parts = [(at, format_runs(sorted(ids))) for at, ids in sorted(owners.items())]
    counts = [math.ceil(size / part) for size, part in zip(shape, shard, strict=True)]
    split = [dim for dim, count in enumerate(counts) if count > 1]
    if len(split) > 2 or len(owners) > _CELLS:
        return "\n".join(f"[{_slices(at, shape, shard)}]  {ids}" for at, ids in parts)
    is_row = split and (len(split) == 2 or split[-1] == len(shape) - 1)
    columns = counts[split[-1]] if is_row else 1
    cells = [ids for _, ids in parts]
    width = max(map(len, cells)) + 2
    lines = [rule := "+" + "+".join(["-" * width] * columns) + "+"]
    for start in range(0, len(cells), columns):
        row = (cell.center(width) for cell in cells[start : start + columns])
        lines += ["|" + "|".join(row) + "|", rule]
    return "\n".join(lines)


def _slices(index: Sequence[int], shape: Sequence[int], shard: Sequence[int]) -> str:
    parts = zip(index, shape, shard, strict=True)
    return ", ".join(f"{i * part}:{min((i + 1) * part, size)}" for i, size, part in parts)
