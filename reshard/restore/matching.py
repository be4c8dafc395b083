"""Which saved leaf is which leaf of a target, and all mismatches. Pure.

A saved path is a leaf's own path, give or take levels named `value` that hold nothing else: Orbax
writes one for each of Linen's boxes and NNX's variables, and none for raw arrays.
"""

import collections
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from reshard.arrays.dtypes import kind_of
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint, Leaf
from reshard.errors import TreeMismatchError
from reshard.tree import Key, Path, format_path, nearest

# Missing leaves for which a similar saved leaf is looked for: a hint must not take long.
_MAX_HINTED, _MAX_COMPARED = 20, 2000
# Kinds of a target leaf that are no arrays, and the kinds of dtype that fit them.
_SCALARS = {"int": "iu", "float": "f", "bool": "b"}


@dataclasses.dataclass(frozen=True, slots=True)
class TargetLeaf:
    """A leaf of a target.

    Attributes:
      kind: `"array"`, `"key"` (typed PRNG keys), or the name of a Python type: `"int"`, `"float"`,
        `"bool"`, `"str"`.
      dtype: its dtype; of the data, for keys.
      key_impl: the PRNG implementation, for keys.
      weak: an array that stands for a Python scalar (`weak_type`).
      aliases: other paths of the same leaf, where a module holds it in several places.
    """

    path: Path
    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    key_impl: str | None = None
    weak: bool = False
    aliases: tuple[Path, ...] = ()

    def __str__(self) -> str:
        if self.kind == "key":
            return f"{self.key_impl} keys{list(self.shape)}"
        if self.kind == "array" and self.dtype is not None:
            return f"{self.dtype.name}{list(self.shape)}"
        return f"a Python {self.kind}"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A reason why a target cannot be restored, of one kind.

    Attributes:
      what: the kind: `"missing"`, `"unexpected"`, `"shape"`, `"dtype"`, `"kind"`, `"tied"`; of the
        target alone, `"kept"`, `"sharding"`, `"x64"`.
      text: the problem.
      path: the leaf, as the target calls it (as the checkpoint does, if it is unexpected).
      renamed: for a missing leaf, the path of the saved leaf that it may be, without levels named
        `value`; for a tied one, the path of its second copy.
    """

    what: str
    text: str
    path: Path
    renamed: Path | None = None


def match(
    targets: Sequence[TargetLeaf],
    ckpt: Checkpoint,
    *,
    cast: bool | str = False,
    ignore: bool = False,
) -> tuple[list[Path | None], list[Mismatch]]:
    """The saved path of each leaf of a target, None where it is missing, and all mismatches. `cast`
    is as of `reshard.restore`; with `ignore`, saved leaves are left out that the target lacks."""
    saved = _canonical(ckpt)
    find = _finder(targets, ckpt, saved)
    taken: set[Path] = set()
    found: list[Path | None] = []
    problems: list[Mismatch] = []
    for leaf in targets:
        places = [leaf.path, *leaf.aliases]
        hits = [find(path) for path in places]
        present = list(dict.fromkeys(hit for hit in hits if hit is not None and hit not in taken))
        taken.update(present)
        if len(present) > 1:
            names = " and ".join(map(format_path, present))
            text = f"{format_path(leaf.path)}: one leaf of the target, saved as {names}"
            problems.append(Mismatch("tied", text, leaf.path, present[-1]))
        found.append(present[0] if present else None)
    used = set(found)
    left = [path for path, value in ckpt.items() if path not in used and not _is_empty(value)]
    lacking = [leaf for leaf, path in zip(targets, found, strict=True) if path is None]
    if lacking:
        problems += _missing(lacking, ckpt, saved, left)
    for leaf, path in zip(targets, found, strict=True):
        if path is not None:
            problems += _compare(leaf, ckpt[path], cast)
    explained = {problem.renamed for problem in problems if problem.what == "tied"}
    for path in left:
        if not ignore and path not in explained:
            text = f"{format_path(path)}  {_describe(ckpt[path])}: not in the target"
            problems.append(Mismatch("unexpected", text, path))
    return found, problems


def _canonical(paths: Iterable[Path]) -> dict[Path, Path]:
    """Each path less its levels named `value` that are the only child of their container; keys are
    text, since Orbax stores int keys of dicts as text."""
    texts: dict[Path, Path] = {path: tuple(map(str, path)) for path in paths}
    children = _children(texts.values())
    return {
        path: tuple(key for depth, key in enumerate(text) if children[text[:depth]] != {"value"})
        for path, text in texts.items()
    }


def _children(texts: Iterable[Path]) -> dict[Path, set[Key]]:
    """The keys in each container."""
    children: dict[Path, set[Key]] = collections.defaultdict(set)
    for text in texts:
        for depth, key in enumerate(text):
            children[text[:depth]].add(key)
    return children


def _finder(
    targets: Sequence[TargetLeaf], ckpt: Checkpoint, saved: dict[Path, Path]
) -> Callable[[Path], Path | None]:
    """Finds the saved path of a target leaf; `saved` are the canonical paths of all saved ones.

    Trees of the same leaves are compared less all levels that may be a box's, which is one to one.
    A part of a tree has fewer siblings to tell such a level by: there a leaf is looked for as it
    is, then in a box, then less all such levels.
    """
    present = [path for path, value in ckpt.items() if not _is_empty(value)]
    plain: dict[Path, Path] = {tuple(map(str, path)): path for path in present}
    children = _children(plain)
    boxed = {
        text[:-1]: path
        for text, path in plain.items()
        if text[-1:] == ("value",) and children[text[:-1]] == {"value"}
    }
    short = {saved[path]: path for path in present}
    canonical = _canonical([leaf.path for leaf in targets])
    same = set(canonical.values()) == set(short)

    def find(path: Path) -> Path | None:
        text = tuple(map(str, path))
        if same and path in canonical:
            return short[canonical[path]]
        own = canonical.get(path, text)
        lookups = ((plain, text), (boxed, text), (short, text), (short, own))
        return next((places[key] for places, key in lookups if key in places), None)

    return find


def _is_empty(value: Leaf) -> bool:
    """None and empty containers hold nothing that could be lost or missed."""
    return not isinstance(value, ArrayHandle | str)


def _missing(
    lacking: Sequence[TargetLeaf], ckpt: Checkpoint, saved: dict[Path, Path], left: Sequence[Path]
) -> list[Mismatch]:
    containers = {tuple(map(str, path[:end])) for path in ckpt for end in range(len(path))}
    near = _nearest_of_type(lacking[:_MAX_HINTED], ckpt, left)
    problems = []
    for leaf in lacking:
        container = tuple(map(str, leaf.path)) in containers
        text = "the checkpoint has a container there" if container else "missing"
        other = near.get(leaf.path)
        if other is not None:
            text += f"; the nearest is {format_path(other)}"
        text = f"{format_path(leaf.path)}  {leaf}: {text}"
        renamed = None if other is None else saved[other]
        problems.append(Mismatch("missing", text, leaf.path, renamed))
    return problems


def _nearest_of_type(
    lacking: Sequence[TargetLeaf], ckpt: Checkpoint, left: Sequence[Path]
) -> dict[Path, Path]:
    """For missing leaves, the saved leaf of equal shape and dtype with the most similar path; each
    saved leaf for one of them only."""
    by_type = collections.defaultdict(dict)
    for path in left:
        by_type[_type_of(ckpt[path])][format_path(path)] = path
    scores = []
    for leaf in lacking:
        alike = by_type[(leaf.key_impl, leaf.shape, leaf.dtype)]
        likely = sorted(alike.values(), key=lambda path: _last(path) != _last(leaf.path))
        for name in nearest(format_path(leaf.path), likely[: _MAX_COMPARED // len(lacking)]):
            ratio = difflib.SequenceMatcher(None, format_path(leaf.path), name).ratio()
            scores.append((ratio, leaf.path, alike[name]))
        last = [path for path in alike.values() if _last(path) == _last(leaf.path)]
        scores += [(0.0, leaf.path, path) for path in last[:1] if len(last) == 1]
    chosen: dict[Path, Path] = {}
    for _, path, saved in sorted(scores, key=lambda score: -score[0]):
        if path not in chosen and saved not in chosen.values():
            chosen[path] = saved
    return chosen


def _last(path: Path) -> str:
    return str(path[-1]) if path else ""


def _type_of(value: Leaf) -> Any:
    if not isinstance(value, ArrayHandle):
        return None
    if value.key_impl is not None:
        return value.key_impl, value.shape[:-1], None
    return None, value.shape, value.dtype


def _describe(value: Leaf) -> str:
    if not isinstance(value, ArrayHandle):
        return repr(value)
    if value.value_type == "scalar":
        return f"a Python scalar ({value.dtype.name})"
    if value.key_impl is not None:
        return f"{value.key_impl} keys{list(value.shape[:-1])}"
    return f"{value.dtype.name}{list(value.shape)}"


def _compare(leaf: TargetLeaf, value: Leaf, cast: bool | str) -> list[Mismatch]:
    """Why a saved leaf cannot become the target's."""
    what = _differing_in(leaf, value, cast)
    if what is None:
        return []
    sides = f"the target has {leaf}, the checkpoint {_describe(value)}"
    return [Mismatch(what, f"{format_path(leaf.path)}: {sides}", leaf.path)]


def _differing_in(leaf: TargetLeaf, value: Leaf, cast: bool | str) -> str | None:
    if not isinstance(value, ArrayHandle):
        return None if leaf.kind == "str" and isinstance(value, str) else "kind"
    if leaf.kind in _SCALARS:
        fits = value.shape == () and kind_of(value.dtype) in _SCALARS[leaf.kind]
        return None if fits else "kind"
    if leaf.kind == "key":
        fits = (leaf.key_impl, leaf.shape) == (value.key_impl, value.shape[:-1])
        return None if fits else "kind"
    if leaf.kind != "array" or value.key_impl is not None:
        return "kind"
    if leaf.shape != value.shape:
        return "shape"
    fits = leaf.dtype is None or _fits(leaf, value, leaf.dtype, cast)
    return None if fits else "dtype"


def _fits(leaf: TargetLeaf, value: ArrayHandle, dtype: np.dtype, cast: bool | str) -> bool:
    """Whether values may be cast to the target's dtype. Integers are checked one by one as they are
    read; a Python scalar has no dtype of its own."""
    old, new = kind_of(value.dtype), kind_of(dtype)
    if value.dtype == dtype:
        return True
    if value.dtype != value.stored_dtype:  # a cast by the user, which another would undo
        return False
    if value.value_type == "scalar" and old in "iu" and new in "iu":
        return True
    if value.value_type == "scalar" and old == new == "f" and leaf.weak:
        return True
    if not cast:
        return False
    if old in "iu" and new in "iu":
        return True
    return old == new == "f" and (cast == "lossy" or keeps_values(value.dtype, dtype))


@functools.lru_cache
def keeps_values(old: np.dtype, new: np.dtype) -> bool:
    """Whether every value of one floating-point dtype is a value of another: there and back. Bits
    of a NaN do not count."""
    if old == new or (old == np.float32 and new == np.float64):
        return True
    if old.itemsize > 2:
        return False
    values = np.arange(1 << (8 * old.itemsize)).astype(f"u{old.itemsize}").view(old)
    with np.errstate(all="ignore"):
        if ml_dtypes.finfo(old).bits < 8:
            values = values[: 1 << ml_dtypes.finfo(old).bits]
        try:
            back = values.astype(new).astype(old)
        except TypeError:  # numpy has no such cast
            return False
        bits = f"u{old.itemsize}"
        same = back.view(bits) == values.view(bits)
        return bool(np.all(same | (np.isnan(values) & np.isnan(back))))


def mismatch_error(
    where: str, problems: Sequence[Mismatch], hints: Sequence[str]
) -> TreeMismatchError:
    words = {
        "missing": "missing from it",
        "unexpected": "that the target lacks",
        "tied": "tied in the target only",
        "kind": "of another kind",
        "shape": "of another shape",
        "dtype": "of another dtype",
        "kept": "kept without a value",
        "sharding": "without a place to go",
        "x64": "wider than JAX makes arrays",
    }
    count = collections.Counter(problem.what for problem in problems)
    parts = [f"{count[what]} {text}" for what, text in words.items() if count[what]]
    ordered = [p.text for what in words for p in problems if p.what == what]
    return TreeMismatchError(
        f"{where} does not match the target: {', '.join(parts)}", ordered, hints
    )


def likely_renames(problems: Sequence[Mismatch]) -> list[tuple[str, str]]:
    """Renames (regex, replacement) that would bring saved leaves where missing ones would be."""
    pairs = []
    for problem in problems:
        if problem.what == "missing" and problem.renamed is not None:
            old, new, whole = _differing(problem.renamed, problem.path)
            pairs.append((f"^{re.escape(old)}{'(?=/|$)' * whole}", new.replace("\\", r"\\")))
    return list(dict.fromkeys(pairs))


def _differing(old: Path, new: Path) -> tuple[str, str, bool]:
    """The printed beginnings of two paths up to where they end alike, the first of them not empty,
    and whether that is all there is."""
    ending = 0
    while ending < min(len(old) - 1, len(new)) and str(old[-1 - ending]) == str(new[-1 - ending]):
        ending += 1

    def beginning(path: Path) -> str:
        if len(path) == ending:
            return ""
        return format_path(path[: len(path) - ending]) + "/" * (ending > 0)

    return beginning(old), beginning(new), ending == 0
