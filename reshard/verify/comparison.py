"""`diff`: in what two checkpoints differ, whatever the mesh, chunk grid and format of either."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reshard import tree
from reshard.arrays.handle import ArrayHandle, array_text
from reshard.checkpoint import Checkpoint, Leaf
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.hints import Hint
from reshard.loader import open as open_checkpoint
from reshard.sharding.mesh import NamedSharding, SingleDeviceSharding, format_spec
from reshard.tree import Path, format_path
from reshard.units import parse_bytes
from reshard.verify.contents import Progress, read_contents, recorded_contents
from reshard.verify.differences import Diff, Difference
from reshard.verify.moved_leaves import moves


def diff(
    a: Checkpoint | str | os.PathLike,
    b: Checkpoint | str | os.PathLike,
    *,
    values: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    layout: bool = False,
    select: str | Sequence[str] = "**",
    drop: str | Sequence[str] = (),
    max_memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Diff:
    """Compares two checkpoints: their trees and, with `values`, the contents of their arrays.

    Meshes, partition specs, chunk grids and formats are no differences unless `layout` asks for
    them. Without `values` no array is read, and contents are compared by the digests on record; if
    some have none and nothing else differs, `equal` of the result is None: not known. Not compared
    are what is beside the tree: other items, metrics, custom metadata.

    A leaf has moved if its contents are those of one leaf on the other side alone. Where several
    leaves have the same contents (zeros), those have moved whose paths differ as the paths of a
    leaf do that has.

    Args:
      a: a checkpoint, or what `reshard.open` takes.
      b: another.
      values: read and compare the contents: bit for bit, so that 0.0 and -0.0 differ and so do NaNs
        of different payloads; arrays of different dtypes as numbers.
      rtol: with `values`: floating-point and complex elements are equal where |a - b| <= atol +
        rtol * |b|, in float64 or complex128; NaN equals NaN, and infinities themselves alone.
      atol: see `rtol`.
      layout: also compare partition specs and meshes (names and sizes of their axes), chunk shapes,
        and formats.
      select: globs of the leaves to compare; each must match a leaf of one of the two.
      drop: globs of leaves to leave out.
      max_memory: bytes in flight at most.
      progress: called with (bytes done, bytes in all).

    Raises:
      ArgumentError: a tolerance without `values`, or one that is no finite number from 0.
      TreeMismatchError: a glob matches nothing, or nothing is left.
      CorruptCheckpointError: arrays that cannot be read, all of them.
      MemoryLimitError: stored chunks that do not fit into `max_memory`.
    """
    tolerances = {"rtol": rtol, "atol": atol}
    wrong = [f"{name}={value}" for name, value in tolerances.items() if not 0 <= value < math.inf]
    if wrong:
        raise ArgumentError("a tolerance is a finite number, 0 or more", wrong)
    if (rtol or atol) and not values:
        raise ArgumentError("tolerances are for values", hints=[Hint(("values", True))])
    one, other = (c if isinstance(c, Checkpoint) else open_checkpoint(c) for c in (a, b))
    in_a, in_b = _selected(one, other, select, drop)
    partners = _partners(in_a, in_b)
    removed = {path: leaf for path, leaf in in_a.items() if path not in partners}
    arrived = set(partners.values())
    added = {path: leaf for path, leaf in in_b.items() if path not in arrived}
    both = {path: (in_a[path], in_b[partner]) for path, partner in partners.items()}
    names = _name(one), _name(other)
    if values:
        contents = read_contents(
            both,
            removed,
            added,
            names=names,
            rtol=rtol,
            atol=atol,
            max_memory=parse_bytes(max_memory),
            progress=progress,
        )
    else:
        contents = recorded_contents(both, removed, added)
    moved = moves(contents.removed, contents.added)
    found: list[Difference] = []
    if layout and one.source.format != other.source.format:
        found.append(Difference("format", (), one.source.format, other.source.format))
    for path, leaf in in_a.items():
        if path in partners:
            found += _differences(path, partners[path], *both[path], layout)
            if path in contents.differences:
                found.append(contents.differences[path])
        elif path in moved:
            found.append(Difference("moved", path, format_path(path), format_path(moved[path])))
        else:
            found.append(Difference("removed", path, _described(leaf), None))
    arrived = set(moved.values())
    for path, leaf in added.items():
        if path not in arrived:
            found.append(Difference("added", path, None, _described(leaf)))
    return Diff(
        *names,
        tuple(found),
        values,
        float(rtol),
        float(atol),
        contents.compared,
        contents.not_compared,
    )


def _name(ckpt: Checkpoint) -> str:
    source = ckpt.source
    item = f", item {source.item}" if len(source.items) > 1 else ""
    return f"{source.root / source.step}{item}"


def _selected(
    a: Checkpoint, b: Checkpoint, select: str | Sequence[str], drop: str | Sequence[str]
) -> tuple[dict[Path, Leaf], dict[Path, Leaf]]:
    """The leaves to compare."""
    select = [select] if isinstance(select, str) else list(select)
    drop = [drop] if isinstance(drop, str) else list(drop)
    paths = dict.fromkeys((*a, *b))
    kept = tree.match_globs(paths, select)
    kept -= tree.match_globs(paths, drop)
    if not kept:
        raise TreeMismatchError("no leaf is left", [f"`{glob}` is dropped" for glob in drop])
    in_a, in_b = ({p: leaf for p, leaf in ckpt.items() if p in kept} for ckpt in (a, b))
    return in_a, in_b


def _partners(in_a: Iterable[Path], in_b: Iterable[Path]) -> dict[Path, Path]:
    """Path in A -> path in B of the same leaf. A position in a list is also the key of digits."""
    known = dict.fromkeys(in_b)
    by_text = {tuple(map(str, path)): path for path in known}
    partners = {path: path for path in in_a if path in known}
    for path in in_a:
        partner = by_text.get(tuple(map(str, path)))
        if path not in known and partner is not None and partner not in partners:
            partners[path] = partner
    return partners


def _differences(path: Path, partner: Path, a: Leaf, b: Leaf, layout: bool) -> Iterator[Difference]:
    """In what two leaves differ, less the contents of arrays."""
    compared: list[tuple[str, Any, Any]] = [("position", _positions(path), _positions(partner))]
    if isinstance(a, ArrayHandle) and isinstance(b, ArrayHandle):
        compared += [
            ("key", _key_type(a), _key_type(b)),
            ("shape", list(a.shape), list(b.shape)),
            ("dtype", a.dtype.name, b.dtype.name),
        ]
        if layout:
            compared.append(("sharding", _laid_out(a), _laid_out(b)))
        if layout and a.shape == b.shape:
            compared.append(("chunks", list(a.chunk_shape), list(b.chunk_shape)))
    elif isinstance(a, str) and isinstance(b, str):
        compared.append(("string", a, b))
    else:
        compared.append(("kind", _described(a), _described(b)))
    for what, one, other in compared:
        if one != other:
            yield Difference(what, path, one, other)


def _positions(path: Path) -> str:
    """Which keys of a path are positions in lists: `layers/[0]/kernel`."""
    return "/".join(f"[{k}]" if isinstance(k, int) else tree.format_key(k) for k in path)


def _key_type(handle: ArrayHandle) -> str:
    return "no key" if handle.key_impl is None else handle.key_impl


def _laid_out(handle: ArrayHandle) -> str:
    """A sharding in words; entries of a spec at its end that split nothing are left out."""
    sharding = handle.sharding
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        while spec and not spec[-1]:
            spec = spec[:-1]
        return f"{format_spec(spec)} on {sharding.mesh}"
    if isinstance(sharding, SingleDeviceSharding):
        return f"on {sharding.device}"
    names = {"np.ndarray": "numpy", "scalar": "Python scalar"}
    return names.get(handle.value_type, "no sharding")


def _described(leaf: Leaf) -> str:
    """A leaf without its layout: `float32[8,4]`, `key<rbg> uint32[4]`, `'text'`, `{}`."""
    if isinstance(leaf, ArrayHandle):
        kind = array_text(leaf.dtype.name, leaf.shape)
        return kind if leaf.key_impl is None else f"key<{leaf.key_impl}> {kind}"
    return repr(leaf)
