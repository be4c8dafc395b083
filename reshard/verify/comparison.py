"""`diff`: in what two checkpoints differ, whatever the mesh, chunk grid and format of either."""

import collections
import functools
import itertools
import math
import numbers
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from reshard import tree
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, check_names, sharding_text
from reshard.checkpoint import Checkpoint, Leaf, kind_text
from reshard.errors import ArgumentError, CorruptCheckpointError, TreeMismatchError
from reshard.hints import Hint
from reshard.loader import open as open_checkpoint
from reshard.sharding.mesh import NamedSharding, format_spec
from reshard.tree import Path, format_path, parse_globs
from reshard.units import parse_bytes
from reshard.verify.differences import Diff, Difference
from reshard.verify.digest_record import FILE, read_record
from reshard.verify.elementwise import ElementComparison
from reshard.verify.values import Failed, Progress, counted, read_values

_Arrays = dict[Path, ArrayHandle]
_Pairs = dict[Path, tuple[ArrayHandle, ArrayHandle]]
_Contents = dict[Path, Difference]
# What a path starts with and what it ends with.
_Ends = tuple[Path, Path]


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
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compares two checkpoints: their trees and, with `values`, the contents of their arrays.

    Meshes, partition specs, chunk grids and formats are no differences unless `layout` asks for
    them. Without `values` no array is read, and contents are compared by recorded digests; if some
    have none and nothing else differs, `equal` of the result is None: not known. Not compared
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
      max_memory: bytes in flight at most, in each worker.
      workers: processes of this machine that read, beside this one; or how many `executor` has.
      executor: any `concurrent.futures.Executor`, which has parts of it read.
      progress: called with (bytes done, bytes in all).

    Raises:
      ArgumentError: a tolerance without `values`, or one that is no finite number from 0.
      TreeMismatchError: a glob matches nothing, or nothing is left.
      CorruptCheckpointError: arrays that cannot be read, all of them.
      MemoryLimitError: stored chunks that do not fit into `max_memory`.

    Example:
      >>> ckpt = reshard.open("run/1000")
      >>> found = reshard.diff(ckpt, reshard.rename(ckpt, {"layer_1": "head"}), values=True)
      >>> found.equal, [each.what for each in found.differences]
      (False, ['moved', 'moved'])
    """
    tolerances = {"rtol": rtol, "atol": atol}
    wrong = [
        f"{name}={value!r}"
        for name, value in tolerances.items()
        if not isinstance(value, numbers.Real) or not 0 <= value < math.inf
    ]
    if wrong:
        raise ArgumentError("a tolerance is a finite number, 0 or more", wrong)
    if (rtol or atol) and not values:
        raise ArgumentError("tolerances are for values", hints=[Hint(("values", True))])
    one, other = (c if isinstance(c, Checkpoint) else open_checkpoint(c) for c in (a, b))
    names = _name(one), _name(other)
    in_a, in_b = _selected(one, other, select, drop)
    same = partners(in_a, in_b)
    here = set(same.values())
    pairs = {
        path: (left, right)
        for path, partner in same.items()
        if isinstance(left := in_a[path], ArrayHandle)
        if isinstance(right := in_b[partner], ArrayHandle)
        if left.shape == right.shape and (values or left.dtype == right.dtype)
    }
    removed = {path: leaf for path, leaf in in_a.items() if path not in same}
    added = {path: leaf for path, leaf in in_b.items() if path not in here}
    alone = _alike(removed, added)
    if values:
        read = functools.partial(
            read_values, max_memory=parse_bytes(max_memory), workers=workers, executor=executor
        )
        contents, digests = _read(pairs, alone, names, (rtol, atol), read, progress)
        not_compared = 0
    else:
        contents, digests, not_compared = _recorded(pairs, alone)
    old, new = (
        {path: (digests[path], _kind(handle)) for path, handle in side.items() if path in digests}
        for side in alone
    )
    moved = moves(old, new)
    found: list[Difference] = []
    if layout and one.source.format != other.source.format:
        found.append(Difference("format", (), one.source.format, other.source.format))
    for path, leaf in in_a.items():
        if path in same:
            partner = same[path]
            found += _differences(path, partner, leaf, in_b[partner], layout)
            if path in contents:
                found.append(contents[path])
        elif path in moved:
            found.append(Difference("moved", path, format_path(path), format_path(moved[path])))
        else:
            found.append(Difference("removed", path, kind_text(leaf), None))
    here |= set(moved.values())
    only_in_b = {path: leaf for path, leaf in in_b.items() if path not in here}
    for path, leaf in only_in_b.items():
        found.append(Difference("added", path, None, kind_text(leaf)))
    leaves = {**in_a, **only_in_b}.items()
    nbytes = {path: leaf.nbytes for path, leaf in leaves if isinstance(leaf, ArrayHandle)}
    compared = len(pairs) - not_compared
    how = values, float(rtol), float(atol), compared, not_compared
    return Diff(*names, tuple(found), *how, nbytes)


def _name(ckpt: Checkpoint) -> str:
    source = ckpt.source
    item = f", item {source.item}" if len(source.items) > 1 else ""
    return f"{source.root / source.step}{item}"


def _selected(
    a: Checkpoint, b: Checkpoint, select: str | Sequence[str], drop: str | Sequence[str]
) -> tuple[dict[Path, Leaf], dict[Path, Leaf]]:
    select = parse_globs("select", select)
    drop = parse_globs("drop", drop)
    paths = dict.fromkeys((*a, *b))
    kept = tree.match_globs(paths, select) - tree.match_globs(paths, drop)
    if not kept:
        raise TreeMismatchError("no leaf is left", [f"`{glob}` is dropped" for glob in drop])
    in_a, in_b = ({p: leaf for p, leaf in ckpt.items() if p in kept} for ckpt in (a, b))
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


def _alike(removed: Mapping[Path, Leaf], added: Mapping[Path, Leaf]) -> list[_Arrays]:
    """The arrays on one side alone to which there is one of the same kind on the other. Those
    without elements have no contents to know them by."""
    arrays = [
        {p: leaf for p, leaf in side.items() if isinstance(leaf, ArrayHandle) and leaf.nbytes}
        for side in (removed, added)
    ]
    one, other = ({_kind(handle) for handle in side.values()} for side in arrays)
    return [{p: h for p, h in side.items() if _kind(h) in one & other} for side in arrays]


def _kind(handle: ArrayHandle) -> Hashable:
    return handle.shape, handle.dtype.name, handle.key_impl


def _recorded(pairs: _Pairs, alone: Iterable[_Arrays]) -> tuple[_Contents, dict[Path, str], int]:
    """In what contents differ by recorded digests, path -> digest of arrays on one side alone, and
    how many pairs there are no digests of."""
    records = functools.cache(read_record)

    def recorded(handle: ArrayHandle) -> str | None:
        if handle.stored is None or handle.same_name is not None:
            return None
        record = records(handle.stored.store.directory / FILE)
        return None if record is None else record.digest(handle)

    contents: _Contents = {}
    not_compared = 0
    for path, pair in pairs.items():
        one, other = map(recorded, pair)
        if one is None or other is None:
            not_compared += 1
        elif one != other:
            contents[path] = Difference("values", path, f"digest {one}", f"digest {other}")
    digests = {p: digest for side in alone for p, h in side.items() if (digest := recorded(h))}
    return contents, digests, not_compared


def _read(
    pairs: _Pairs,
    alone: Sequence[_Arrays],
    names: tuple[str, str],
    tolerances: tuple[float, float],
    read: Callable[..., Failed],
    progress: Progress | None,
) -> tuple[_Contents, dict[Path, str]]:
    """In what contents that are read differ, and path -> digest of arrays on one side alone. Raises
    CorruptCheckpointError with all arrays that cannot be read, or that belong to two leaves."""
    left, right = alone
    singles = left | right
    groups = [*pairs.values(), *((handle,) for handle in singles.values())]
    sides = ["AB"] * len(pairs) + ["A"] * len(left) + ["B"] * len(right)
    handles = [handle for group in groups for handle in group]
    check_names(handles)
    comparisons = {path: ElementComparison(a.shape, *tolerances) for path, (a, _) in pairs.items()}
    digests = {path: Digest(handle.shape, handle.dtype) for path, handle in singles.items()}
    takers = [*comparisons.values(), *digests.values()]
    report = counted(sum(handle.nbytes for handle in handles), progress)
    failed = read(groups, takers, progress=report)
    if failed:
        raise CorruptCheckpointError(
            f"arrays cannot be read; A is `{names[0]}`, B is `{names[1]}`",
            [
                ": ".join((sides[group][place], error.summary, *error.problems))
                for group, errors in failed.items()
                for place, error in errors.items()
            ],
        )
    contents = {
        path: Difference("values", path, found.a, found.b, found)
        for path, comparison in comparisons.items()
        if (found := comparison.difference()) is not None
    }
    return contents, {path: digest.text() for path, digest in digests.items()}


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
        compared.append(("kind", kind_text(a), kind_text(b)))
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
    return sharding_text(handle) or "no sharding"


def moves(removed: Mapping[Path, Any], added: Mapping[Path, Any]) -> dict[Path, Path]:
    """Old path -> new path of leaves on one side alone, from what tells their contents apart."""
    groups: collections.defaultdict[Any, tuple[list[Path], list[Path]]] = collections.defaultdict(
        lambda: ([], [])
    )
    for side, leaves in enumerate((removed, added)):
        for path, contents in leaves.items():
            groups[contents][side].append(path)
    found = {old[0]: new[0] for old, new in groups.values() if len(old) == len(new) == 1}
    parts: collections.defaultdict[Path, set[Path]] = collections.defaultdict(set)
    ends: collections.defaultdict[_Ends, set[_Ends]] = collections.defaultdict(set)
    for old, new in found.items():
        shortest = min(len(old), len(new))
        first = next((i for i in range(shortest) if old[i] != new[i]), shortest)
        rest = shortest - first
        behind = next((i for i in range(rest) if old[-1 - i] != new[-1 - i]), rest)
        before, after = range(first, len(old) - behind), range(first, len(new) - behind)
        parts[old[first : before.stop]].add(new[first : after.stop])
        for one, other in _renamed_ends(old, new, before, after):
            ends[one].add(other)
    for old, new in groups.values():
        if len(old) * len(new) > 1:
            found |= _told_apart(old, set(new), parts, ends)
    return found


def _renamed_ends(
    old: Path, new: Path, before: range, after: range
) -> Iterator[tuple[_Ends, _Ends]]:
    """What stands before and after the longest stretch that the renamed parts of two paths share:
    of `params/a/b` and `a/b/value` the ends `params/` and `/value`. None where there is no such
    stretch, several where there are several."""
    for size in range(min(len(before), len(after)), 0, -1):
        places = [
            (i, j)
            for i in before[: len(before) - size + 1]
            for j in after[: len(after) - size + 1]
            if old[i : i + size] == new[j : j + size]
        ]
        for i, j in places:
            yield (old[:i], old[i + size :]), (new[:j], new[j + size :])
        if places:
            return


def _told_apart(
    old: Sequence[Path],
    new: set[Path],
    parts: Mapping[Path, set[Path]],
    ends: Mapping[_Ends, set[_Ends]],
) -> dict[Path, Path]:
    """Moves of leaves of the same contents that are renamed as others are, and as one alone is."""
    found = {}
    for path in old:
        stretches = list(itertools.combinations_with_replacement(range(len(path) + 1), 2))
        renamed = {
            path[:start] + part + path[stop:]
            for start, stop in stretches
            for part in parts.get(path[start:stop], ())
        }
        renamed |= {
            first + path[start:stop] + last
            for start, stop in stretches
            if start < stop
            for first, last in ends.get((path[:start], path[stop:]), ())
        }
        found[path] = renamed & new
    claims = collections.Counter(itertools.chain(*found.values()))
    alone = {path: next(iter(to)) for path, to in found.items() if len(to) == 1}
    return {path: to for path, to in alone.items() if claims[to] == 1}
