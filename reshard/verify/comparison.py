"""`diff`: in what two checkpoints differ, whatever the mesh, chunk grid and format of either."""

import collections
import difflib
import functools
import itertools
import math
import numbers
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from reshard import tree
from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, check_names, sharding_text
from reshard.checkpoint import Checkpoint, Leaf, kind_text
from reshard.errors import ArgumentError, CorruptCheckpointError, TreeMismatchError
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
# What the first part of a path that differs becomes, and each other part with what it becomes.
_Renaming = tuple[Any, ...]


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

    A leaf has moved if exactly one leaf of the other side has its contents. If several leaves have
    the same contents, for example zeros, those have moved whose paths differ in the way of a leaf
    that has moved.

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
      max_memory: bytes in flight at most, in each worker.
      workers: how many processes of this machine read. With `executor`, the number of its workers.
      executor: any `concurrent.futures.Executor` that reads instead.
      progress: called with (bytes done, bytes in all).

    Returns:
      The differences; `equal` is True, False, or None if contents were not compared.

    Raises:
      ArgumentError: a tolerance without `values`, or one that is not a finite number of 0 or more.
      TreeMismatchError: a glob matches nothing, or no leaf is left.
      CorruptCheckpointError: arrays that cannot be read: all of them.
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
        raise ArgumentError("a tolerance must be a finite number, 0 or more", wrong)
    if (rtol or atol) and not values:
        raise ArgumentError("tolerances require values=True", hints=["values=True"])
    one, other = (c if isinstance(c, Checkpoint) else open_checkpoint(c) for c in (a, b))
    names = _name(one), _name(other)
    in_a, in_b = _selected(one, other, select, drop)
    same = partners(in_a, in_b)
    pairs = {
        path: (left, right)
        for path, partner in same.items()
        if isinstance(left := in_a[path], ArrayHandle)
        if isinstance(right := in_b[partner], ArrayHandle)
        if left.shape == right.shape and (values is not False or left.dtype == right.dtype)
    }
    here = set(same.values())
    removed = {path: leaf for path, leaf in in_a.items() if path not in same}
    added = {path: leaf for path, leaf in in_b.items() if path not in here}
    alone = _alike(removed, added)
    contents, digests, rest = ({}, {}, pairs) if values else _recorded(pairs, alone)
    unread = {path: handle for path, handle in alone.items() if path not in digests}
    reads = values is not False and bool(values or rest or unread)
    if reads:
        read = functools.partial(
            read_values, max_memory=parse_bytes(max_memory), workers=workers, executor=executor
        )
        sides = ["AB"] * len(rest) + ["A" if path in removed else "B" for path in unread]
        differing, more = _read(rest, unread, sides, names, (rtol, atol), read, progress)
        contents, digests = contents | differing, digests | more
    kinds = {path: (digest, _kind(alone[path])) for path, digest in digests.items()}
    moved = moves(*({p: kinds[p] for p in side if p in kinds} for side in (removed, added)))
    found: list[Difference] = []
    if layout and one.source.format != other.source.format:
        found.append(Difference("format", (), one.source.format, other.source.format))
    for path, leaf in in_a.items():
        if path in same:
            found += _differences(path, same[path], leaf, in_b[same[path]], layout)
            found += [contents[path]] if path in contents else []
        elif path in moved:
            found.append(Difference("moved", path, format_path(path), format_path(moved[path])))
        else:
            found.append(Difference("removed", path, kind_text(leaf), None))
    for path in moved.values():
        del added[path]
    found += [Difference("added", path, None, kind_text(leaf)) for path, leaf in added.items()]
    leaves = {**in_a, **added}.items()
    nbytes = {path: leaf.nbytes for path, leaf in leaves if isinstance(leaf, ArrayHandle)}
    not_compared = len(rest) if values is False else 0
    how = float(rtol), float(atol), len(pairs) - not_compared, not_compared
    return Diff(*names, tuple(found), reads, *how, nbytes, len(pairs) - len(rest))


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


def _alike(removed: Mapping[Path, Leaf], added: Mapping[Path, Leaf]) -> _Arrays:
    """The arrays on one side alone to which there is one of the same kind on the other. Those
    without elements have no contents to know them by."""
    arrays, others = (
        {p: leaf for p, leaf in side.items() if isinstance(leaf, ArrayHandle) and leaf.nbytes}
        for side in (removed, added)
    )
    kinds = set(map(_kind, arrays.values())) & set(map(_kind, others.values()))
    return {p: handle for p, handle in (arrays | others).items() if _kind(handle) in kinds}


def _kind(handle: ArrayHandle) -> Hashable:
    return handle.shape, handle.dtype.name, handle.key_impl


def _recorded(pairs: _Pairs, alone: _Arrays) -> tuple[_Contents, dict[Path, str], _Pairs]:
    """In what contents differ by recorded digests, path -> digest of arrays on one side alone, and
    the pairs without a digest on both sides."""
    records = functools.cache(read_record)

    def recorded(handle: ArrayHandle) -> str | None:
        if handle.stored is None or handle.same_name is not None:
            return None
        record = records(handle.stored.store.directory / FILE)
        return None if record is None else record.digest(handle)

    contents: _Contents = {}
    rest: _Pairs = {}
    for path, pair in pairs.items():
        one, other = map(recorded, pair)
        if one is None or other is None or pair[0].dtype != pair[1].dtype:
            rest[path] = pair
        elif one != other:
            contents[path] = Difference("values", path, f"digest {one}", f"digest {other}")
    return contents, {p: found for p, h in alone.items() if (found := recorded(h))}, rest


def _read(
    pairs: _Pairs,
    alone: _Arrays,
    sides: Sequence[str],
    names: tuple[str, str],
    tolerances: tuple[float, float],
    read: Callable[..., Failed],
    progress: Progress | None,
) -> tuple[_Contents, dict[Path, str]]:
    """In what contents that are read differ, and path -> digest of arrays on one side alone. Raises
    CorruptCheckpointError with all arrays that cannot be read, or that belong to two leaves."""
    groups = [*pairs.values(), *((handle,) for handle in alone.values())]
    handles = [handle for group in groups for handle in group]
    check_names(handles)
    comparisons = {path: ElementComparison(a.shape, *tolerances) for path, (a, _) in pairs.items()}
    digests = {path: Digest(handle.shape, handle.dtype) for path, handle in alone.items()}
    report = counted(sum(handle.nbytes for handle in handles), progress)
    failed = read(groups, [*comparisons.values(), *digests.values()], progress=report)
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
        if (found := comparison.state) is not None
    }
    return contents, {path: digest.text() for path, digest in digests.items()}


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


def moves(removed: Mapping[Path, Any], added: Mapping[Path, Any]) -> dict[Path, Path]:
    """Old path -> new path of leaves on one side alone, from what tells their contents apart. Those
    of the same contents are renamed as others are, and as one alone is."""
    groups: defaultdict[Any, tuple[list[Path], list[Path]]] = defaultdict(lambda: ([], []))
    for side, leaves in enumerate((removed, added)):
        for path, contents in leaves.items():
            groups[contents][side].append(path)
    found = {old[0]: new[0] for old, new in groups.values() if len(old) == len(new) == 1}
    renamings: defaultdict[Path, set[_Renaming]] = defaultdict(set)
    for old, new in found.items():
        codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        parts = [(old[i:j], new[k:m]) for tag, i, j, k, m in codes if tag != "equal"]
        renamings[parts[0][0]].add((parts[0][1], *parts[1:]))
    for old, new in groups.values():
        if len(old) * len(new) > 1:
            free = set(new)
            claims = {path: free.intersection(_renamed(path, renamings)) for path in old}
            claimed = collections.Counter(itertools.chain(*claims.values()))
            alone = {path: next(iter(to)) for path, to in claims.items() if len(to) == 1}
            found |= {path: to for path, to in alone.items() if claimed[to] == 1}
    return found


def _renamed(path: Path, renamings: Mapping[Path, Iterable[_Renaming]]) -> Iterator[Path]:
    """What a path becomes by each of some renamings, wherever its parts stand."""
    for start, stop in itertools.combinations_with_replacement(range(len(path) + 1), 2):
        for new, *others in renamings.get(path[start:stop], ()):
            rest = [path[stop:]]
            if others:
                (part, *after), *further = others
                rest = _renamed(path[stop:], {part: [(*after, *further)]})
            for end in rest:
                yield path[:start] + new + end
