"""Which saved leaf is which leaf of a target, and all mismatches. Pure.

A saved path is a leaf's own path, give or take levels named `value` that hold nothing else: Orbax
writes one for each of Linen's boxes and NNX's variables, and none for raw arrays.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence

import ml_dtypes
import numpy as np

from reshard.arrays.dtypes import kind_of
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint, Leaf
from reshard.errors import ReshardError, TreeMismatchError
from reshard.transforms import rename
from reshard.tree import Key, Path, format_path

# Rules, times leaves, that are tried before they are shown: a hint must not take long.
_MAX_TRIED = 10**7
# Kinds of a target leaf that are no arrays, and the kinds of dtype that fit them.
_SCALARS = {"int": "iu", "float": "f", "bool": "b"}
# Keys of optax's states that are like the parameters: one does not become another.
_MOMENTS = {"mu", "nu", "trace", "sum_of_squares", "acc_grads", "ema"}


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
      copy: for a tied leaf, the path of its second copy.
      renamed: for a missing one, the beginning of a saved path and of its own, if these differ in
        one level, and the paths in nothing else.
    """

    what: str
    text: str
    path: Path
    copy: Path | None = None
    renamed: tuple[Path, Path] | None = None


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
        problems += _missing(lacking, ckpt, _renamed(targets, found, ckpt, saved, cast))
    for leaf, path in zip(targets, found, strict=True):
        if path is not None:
            problems += _compare(leaf, ckpt[path], cast)
    explained = {problem.copy for problem in problems}
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
    lacking: Sequence[TargetLeaf], ckpt: Checkpoint, renamed: dict[Path, tuple[Path, Path]]
) -> list[Mismatch]:
    containers = {tuple(map(str, path[:end])) for path in ckpt for end in range(len(path))}
    problems = []
    for leaf in lacking:
        path = tuple(map(str, leaf.path))
        text = "the checkpoint has a container there" if path in containers else "missing"
        pair = renamed.get(path)
        if pair is not None:
            old, new = pair
            text += f"; the nearest is {format_path(old + path[len(new) :])}"
        text = f"{format_path(leaf.path)}  {leaf}: {text}"
        problems.append(Mismatch("missing", text, leaf.path, renamed=pair))
    return problems


def _renamed(
    targets: Sequence[TargetLeaf],
    found: Sequence[Path | None],
    ckpt: Checkpoint,
    saved: dict[Path, Path],
    cast: bool | str,
) -> dict[Path, tuple[Path, Path]]:
    """Path of a missing leaf -> the beginnings of its saved path and of its own, where a level was
    added, taken off or renamed.

    Names alone say so, and in one way only: below both beginnings are the same paths, none of them
    found before; a level is renamed if it is the only one in its container that is not found, and
    more than a leaf. That is so of a whole level if all its leaves fit, or of none of it.
    """
    wanted = {_texts(leaf.path): leaf for leaf in targets}
    lacking = {_texts(leaf.path) for leaf, path in zip(targets, found, strict=True) if path is None}
    places = {saved[path]: path for path, value in ckpt.items() if not _is_empty(value)}
    left = places.keys() - {saved[path] for path in found if path is not None}
    renamed: dict[Path, tuple[Path, Path]] = {}

    def agree(old: Path, new: Path, olds: Sequence[Path], news: Sequence[Path]) -> bool:
        if len(olds) != len(news) or not (left.issuperset(olds) and lacking.issuperset(news)):
            return False
        below = {path[len(old) :] for path in olds}
        return () not in below and below == {path[len(new) :] for path in news}

    def fit(old: Path, new: Path, olds: Sequence[Path]) -> bool:
        pairs = [(wanted[new + path[len(old) :]], places[path]) for path in olds]
        return all(
            _texts(path[: len(old)]) == old and _differing_in(leaf, ckpt[path], cast) is None
            for leaf, path in pairs
        )

    def descend(at: Path, olds: Sequence[Path], news: Sequence[Path]) -> None:
        old_keys, new_keys = _by_key(olds, len(at)), _by_key(news, len(at))
        ways = [((*at, key), at, paths, news) for key, paths in old_keys.items()]
        ways += [(at, (*at, key), olds, paths) for key, paths in new_keys.items()]
        spare = [key for key, paths in old_keys.items() if not left.isdisjoint(paths)]
        unfound = [key for key, paths in new_keys.items() if not lacking.isdisjoint(paths)]
        if len(spare) == len(unfound) == 1:
            (one,), (other,) = spare, unfound
            if not _may_be_others(one, other, old_keys.keys() & new_keys.keys()):
                ways.append(((*at, one), (*at, other), old_keys[one], new_keys[other]))
        ways = [way for way in ways if agree(*way)]
        if len(ways) == 1:
            old, new, paths, own = ways[0]
            if fit(old, new, paths):
                renamed.update(dict.fromkeys(own, (old, new)))
        if not ways:
            for key in old_keys.keys() & new_keys.keys():
                descend((*at, key), old_keys[key], new_keys[key])

    descend((), list(places), list(wanted))
    return renamed


def _may_be_others(one: Key, other: Key, found: Iterable[Key]) -> bool:
    """Whether two keys may be of different things all the same: they are those of optimizer state,
    or differ in a number, beside others like them, which may all be counted from another one."""
    kinds = [re.sub(r"\d+", "#", str(key)) for key in (one, other, *found)]
    return not _MOMENTS.isdisjoint(kinds[:2]) or kinds[0] == kinds[1] in kinds[2:]


def _by_key(paths: Sequence[Path], depth: int) -> dict[Key, list[Path]]:
    """The paths that go deeper, by their key there."""
    found: dict[Key, list[Path]] = collections.defaultdict(list)
    for path in paths:
        if len(path) > depth:
            found[path[depth]].append(path)
    return found


def _texts(path: Path) -> Path:
    return tuple(map(str, path))


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


def renames(problems: Sequence[Mismatch], ckpt: Checkpoint) -> list[tuple[str, str]]:
    """Renames (regex, replacement) that bring saved leaves where missing ones would be; none where
    they cannot be done: an empty container is there, or a list would lose positions."""
    pairs = dict.fromkeys(problem.renamed for problem in problems if problem.renamed is not None)
    found = [
        ("^" + re.escape(_beginning(old)), _beginning(new).replace("\\", r"\\"))
        for old, new in pairs
    ]
    try:
        if len(found) * len(ckpt) < _MAX_TRIED:
            rename(ckpt, found)
    except ReshardError:
        return []
    return found


def other_api(problems: Sequence[Mismatch], of_nnx: bool) -> str:
    """The API of Flax's that a target is of, `"nnx"` or `"linen"`, where the checkpoint is of the
    other one: Linen's alone has a collection `params`, and NNX's has all arrays in variables. Empty
    where they may be of one."""
    missing, unexpected = (
        [problem.path for problem in problems if problem.what == what and problem.path]
        for what in ("missing", "unexpected")
    )
    wanted, saved = ({str(path[0]) for path in paths} for paths in (missing, unexpected))
    in_variables = all(path[-1] == "value" for path in unexpected)
    renamed = any(problem.renamed for problem in problems)
    if of_nnx and wanted and "params" in saved - wanted and not (in_variables and renamed):
        return "nnx"
    if not of_nnx and saved and "params" in wanted - saved and in_variables and not renamed:
        return "linen"
    return ""


def _beginning(path: Path) -> str:
    """What the printed paths below a container begin with."""
    return format_path(path) + "/" if path else ""
