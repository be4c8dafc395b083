"""`diff`: how two checkpoints differ, on any meshes and in any chunks and formats."""

import collections
import functools
import math
import numbers
import os
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from reshard import tree
from reshard.arrays.handle import ArrayHandle, check_names, sharding_text
from reshard.checkpoint import Checkpoint, Leaf, check_known, kind_text
from reshard.errors import ArgumentError, CorruptCheckpointError, TreeMismatchError
from reshard.loader import open as open_checkpoint
from reshard.sharding.mesh import NamedSharding, format_spec
from reshard.storage.identity import unchanged
from reshard.tree import Path, format_path
from reshard.units import parse_bytes
from reshard.verify import digest_record
from reshard.verify.differences import Diff, Difference
from reshard.verify.elementwise import ElementComparison
from reshard.verify.values import Progress, counted, read_digests, read_values

_Pairs = dict[Path, tuple[ArrayHandle, ArrayHandle]]


def diff(
    a: Checkpoint | str | os.PathLike,
    b: Checkpoint | str | os.PathLike,
    *,
    values: bool | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    layout: bool = False,
    select: str | Sequence[str] = "**",
    drop: str | Sequence[str] = (),
    max_memory: int | str = "1GiB",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints: their trees and the contents of their arrays.

    Meshes, partition specs, chunks and formats are compared only with `layout`. Contents are
    compared by recorded digests. Arrays without a digest on both sides are read. Other items,
    metrics and custom metadata are not compared.

    A leaf has moved if its contents occur once on each side, at different paths. If several leaves
    have the same contents, for example zeros, they count as removed and added.

    Args:
      a: a checkpoint, or the path of one.
      b: another checkpoint, or its path.
      values: True reads all arrays. False reads none: if some have no digests and nothing else
        differs, `equal` of the result is None. Arrays of one dtype are compared bit for bit, so
        0.0 differs from -0.0, and NaNs differ by their payloads. Arrays of different dtypes are
        compared as numbers.
      rtol: with `values`, floating-point and complex elements are equal if |a - b| <= atol + rtol
        * |b| in float64 or complex128. NaN equals NaN. An infinity equals only itself.
      atol: see `rtol`.
      layout: also compare partition specs, meshes (names and sizes of their axes), chunk shapes
        and formats.
      select: globs of the leaves to compare; each must match a leaf of one side.
      drop: globs of leaves to leave out.
      max_memory: the most bytes of arrays in memory, in each worker.
      workers: how many processes of this machine read. With `executor`, the number of its workers.
      executor: any `concurrent.futures.Executor` that reads instead.
      progress: called with (bytes done, bytes in all).

    Returns:
      The differences; `equal` is True, False, or None if contents were not compared.

    Raises:
      ArgumentError: a tolerance without `values`, or one that is not a finite number of 0 or more.
      TreeMismatchError: a glob matches nothing, or no leaf is left.
      ChangedCheckpointError: one of the checkpoints has changed since it was opened.
      CorruptCheckpointError: arrays that cannot be read: all of them.
      MemoryLimitError: stored chunks that do not fit into `max_memory`.

    Example:
      >>> ckpt = reshard.open("run/1000")
      >>> found = reshard.diff(ckpt, reshard.rename(ckpt, {"layer_1": "head"}), values=True)
      >>> found.equal, [each.what for each in found.differences]
      (False, ['moved', 'moved'])
    """
    _check_tolerances(values, rtol=rtol, atol=atol)
    one, other = (c if isinstance(c, Checkpoint) else open_checkpoint(c) for c in (a, b))
    in_a, in_b = _selected(one, other, select, drop)
    same = partners(in_a, in_b)
    in_both = set(same.values())
    removed = {path: leaf for path, leaf in in_a.items() if path not in same}
    added = {path: leaf for path, leaf in in_b.items() if path not in in_both}
    pairs = {
        path: (left, right)
        for path, partner in same.items()
        if isinstance(left := in_a[path], ArrayHandle)
        if isinstance(right := in_b[partner], ArrayHandle)
        if left.shape == right.shape and (values is not False or left.dtype == right.dtype)
    }
    alone = _alike(removed, added)
    contents, digests = ({}, {}) if values else _recorded(pairs, alone)
    unknown = {path: pair for path, pair in pairs.items() if path not in contents}
    unread = {path: handle for path, handle in alone.items() if path not in digests}
    names = _name(one), _name(other)
    reads = values is not False and bool(values or unknown or unread)
    with unchanged(one.source.identity, other.source.identity):
        if reads:
            how = parse_bytes(max_memory), workers, executor, progress
            differing, more = _read(unknown, unread, in_a, names, (rtol, atol), *how)
            contents, digests = contents | differing, digests | more
    kinds = {path: (digest, _kind(alone[path])) for path, digest in digests.items()}
    moved = _moves(*({p: kinds[p] for p in side if p in kinds} for side in (removed, added)))
    formats = one.source.format, other.source.format
    rows = [Difference("format", (), *formats)] if layout and formats[0] != formats[1] else []
    for path, leaf in in_a.items():
        if path in same:
            rows += _differences(path, same[path], leaf, in_b[same[path]], layout)
            rows += [each] if (each := contents.get(path)) else []
        elif path in moved:
            rows.append(Difference("moved", path, format_path(path), format_path(moved[path])))
        else:
            rows.append(Difference("removed", path, kind_text(leaf), None))
    for path in moved.values():
        del added[path]
    rows += [Difference("added", path, None, kind_text(leaf)) for path, leaf in added.items()]
    nbytes = {p: a.nbytes for p, a in (in_a | added).items() if isinstance(a, ArrayHandle)}
    not_compared = len(unknown) if values is False else sum(x.what == "invalid" for x in rows)
    counts = len(pairs) - not_compared, not_compared
    by_digests = len(pairs) - len(unknown)
    return Diff(*names, tuple(rows), reads, float(rtol), float(atol), *counts, nbytes, by_digests)


def _check_tolerances(values: bool | None, **tolerances: Any) -> None:
    wrong = [
        f"{name}={value!r}"
        for name, value in tolerances.items()
        if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf
    ]
    if wrong:
        raise ArgumentError("a tolerance must be a finite number, 0 or more", wrong)
    if any(tolerances.values()) and not values:
        raise ArgumentError("tolerances require values=True", hints=["values=True"])


def _name(ckpt: Checkpoint) -> str:
    source = ckpt.source
    item = f", item {source.item}" if len(source.items) > 1 else ""
    return f"{source.place}{item}"


def _selected(
    a: Checkpoint, b: Checkpoint, select: str | Sequence[str], drop: str | Sequence[str]
) -> tuple[dict[Path, Leaf], dict[Path, Leaf]]:
    select = tree.parse_globs("select", select)
    drop = tree.parse_globs("drop", drop)
    paths = dict.fromkeys((*a, *b))
    kept = tree.match_globs(paths, select) - tree.match_globs(paths, drop)
    if not kept:
        raise TreeMismatchError(
            "no leaf is left to compare", [f"`{glob}` is dropped" for glob in drop]
        )
    in_a, in_b = ({p: leaf for p, leaf in ckpt.items() if p in kept} for ckpt in (a, b))
    check_known(in_a)
    check_known(in_b)
    return in_a, in_b


def partners(a: Iterable[Path], b: Iterable[Path]) -> dict[Path, Path]:
    """Path in A -> path in B of the same leaf. A position in a list is also the key of digits."""
    in_b = dict.fromkeys(b)
    by_text = {tuple(map(str, path)): path for path in in_b}
    same = {path: path for path in a if path in in_b}
    for path in a:
        partner = by_text.get(tuple(map(str, path)))
        if path not in in_b and partner is not None and partner not in same:
            same[path] = partner
    return same


def _alike(removed: Mapping[Path, Leaf], added: Mapping[Path, Leaf]) -> dict[Path, ArrayHandle]:
    """The arrays on one side that may have moved: the other side has an array of the same kind.
    Arrays without elements have no contents to identify them."""
    arrays, others = (
        {p: leaf for p, leaf in side.items() if isinstance(leaf, ArrayHandle) and leaf.nbytes}
        for side in (removed, added)
    )
    kinds = set(map(_kind, arrays.values())) & set(map(_kind, others.values()))
    return {p: handle for p, handle in (arrays | others).items() if _kind(handle) in kinds}


def _kind(handle: ArrayHandle) -> Hashable:
    return handle.shape, handle.dtype.name, handle.key_impl


def _recorded(
    pairs: _Pairs, alone: Mapping[Path, ArrayHandle]
) -> tuple[dict[Path, Difference | None], dict[Path, str]]:
    """By recorded digests: how the contents of a pair differ, None if they are equal; and the
    digests of arrays on one side. Leaves without digests are left out."""
    records = functools.cache(digest_record.read_record)

    def recorded(handle: ArrayHandle) -> str | None:
        if handle.stored is None or handle.same_name is not None:
            return None
        record = records(handle.stored.store.directory / digest_record.FILE)
        return None if record is None else record.digest(handle)

    contents: dict[Path, Difference | None] = {}
    for path, (left, right) in pairs.items():
        a, b = recorded(left), recorded(right)
        if a and b and left.dtype == right.dtype:
            values = Difference("values", path, f"digest {a}", f"digest {b}")
            contents[path] = None if a == b else values
    return contents, {p: text for p, handle in alone.items() if (text := recorded(handle))}


def _read(
    pairs: _Pairs,
    alone: Mapping[Path, ArrayHandle],
    in_a: Collection[Path],
    names: tuple[str, str],
    tolerances: tuple[float, float],
    max_memory: int,
    workers: int | None,
    executor: Executor | None,
    progress: Progress | None,
) -> tuple[dict[Path, Difference | None], dict[Path, str]]:
    """As `_recorded`, from the values. Raises CorruptCheckpointError with all arrays that cannot
    be read, or that were stored under one name."""
    handles = [*(handle for pair in pairs.values() for handle in pair), *alone.values()]
    check_names(handles)
    report = counted(sum(handle.nbytes for handle in handles), progress)
    how = max_memory, report, workers, executor
    comparisons = {path: ElementComparison(a.shape, *tolerances) for path, (a, _) in pairs.items()}
    failed = read_values([*pairs.values()], [*comparisons.values()], *how)
    digests, unread = read_digests(alone.values(), *how)
    errors = [("AB"[side], error) for found in failed.values() for side, error in found.items()]
    errors += [("A" if path in in_a else "B", error) for path, error in unread.items()]
    # Nothing is damaged where a cast or an operation of a map does not apply to the values.
    errors = [(side, e) for side, e in errors if not isinstance(e, TreeMismatchError)]
    if errors:
        raise CorruptCheckpointError(
            f"arrays cannot be read; A is `{names[0]}`, B is `{names[1]}`",
            [": ".join((side, error.summary, *error.problems)) for side, error in errors],
        )
    contents = {
        path: (found := comparison.state) and Difference("values", path, found.a, found.b, found)
        for path, comparison in comparisons.items()
    }
    for number, found in failed.items():
        path, handles = [*pairs.items()][number]
        texts = {side: " ".join((e.summary, *e.problems)) for side, e in found.items()}
        a, b = (texts.get(side) or kind_text(handle) for side, handle in enumerate(handles))
        contents[path] = Difference("invalid", path, a, b)
    return contents, digests


def _moves(removed: Mapping[Path, Any], added: Mapping[Path, Any]) -> dict[Path, Path]:
    """Old path -> new path, of contents that one leaf has on each side. Contents by path."""
    paths = {contents: path for path, contents in added.items()}
    counts = collections.Counter(removed.values()), collections.Counter(added.values())
    return {
        path: paths[contents]
        for path, contents in removed.items()
        if counts[0][contents] == counts[1][contents] == 1
    }


def _differences(path: Path, partner: Path, a: Leaf, b: Leaf, layout: bool) -> Iterator[Difference]:
    """In what two leaves differ, less the contents of arrays."""
    compared: list[tuple[str, Any, Any]] = [
        ("position", marked_positions(path), marked_positions(partner))
    ]
    if isinstance(a, ArrayHandle) and isinstance(b, ArrayHandle):
        compared += [
            ("key", a.key_impl or "no key", b.key_impl or "no key"),
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
        compared.append(("kind", kind_text(a), kind_text(b)))
    for what, one, other in compared:
        if one != other:
            yield Difference(what, path, one, other)


def marked_positions(path: Path) -> str:
    """A path as text, with its positions in lists in brackets: `layers/[0]/kernel`."""
    return "/".join(f"[{k}]" if isinstance(k, int) else tree.format_key(k) for k in path)


def _laid_out(handle: ArrayHandle) -> str:
    """A sharding in words; entries of a spec at its end that split nothing are left out."""
    sharding = handle.sharding
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        while spec and not spec[-1]:
            spec = spec[:-1]
        return f"{format_spec(spec)} on {sharding.mesh}"
    return sharding_text(handle) or "no sharding"
