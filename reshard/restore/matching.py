"""Which saved leaf is which leaf of a target, and all mismatches. Pure.

A saved path is a leaf's own path, give or take levels named `value` that hold nothing else: Orbax
writes one for each of Linen's boxes and NNX's variables, and none for raw arrays.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.dtypes import kind_of
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint, Leaf
from reshard.errors import ReshardError, TreeMismatchError
from reshard.transforms import rename
from reshard.tree import Key, Path, as_python, format_path

# Rules, times leaves, that are tried before they are shown: a hint must not take long.
_MAX_TRIED = 10**7
# Kinds of a target leaf that are no arrays, and the kinds of dtype that fit them.
_SCALARS = {"int": "iu", "float": "f", "bool": "b"}
_LACKING = ("missing", "unexpected")
# Keys of optax's states that are like the parameters: one does not become another.
_MOMENTS = {"mu", "nu", "trace", "sum_of_squares", "acc_grads", "ema"}


@dataclasses.dataclass(frozen=True, slots=True)
class TargetLeaf:
    """A leaf of a target.

    Attributes:
      kind: `"array"`, `"key"` (typed PRNG keys), or the name of a Python type.
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
    """A reason why a target cannot be restored.

    Attributes:
      what: `"missing"`, `"unexpected"`, `"shape"`, `"dtype"`, `"kind"`, `"tied"`; of the target
        alone, `"kept"`, `"sharding"`, `"x64"`.
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
    lacking = [leaf for leaf, path in zip(targets, found, strict=True) if path is None]
    renamed = _renamed(targets, found, ckpt, saved, cast) if lacking else {}
    containers = {_texts(path[:end]) for path in ckpt for end in range(len(path)) if lacking}
    for leaf in lacking:
        path = _texts(leaf.path)
        text = "the checkpoint has a container there" if path in containers else "missing"
        if pair := renamed.get(path):
            text += f"; the nearest is {format_path(pair[0] + path[len(pair[1]) :])}"
        text = f"{format_path(leaf.path)}  {leaf}: {text}"
        problems.append(Mismatch("missing", text, leaf.path, renamed=pair))
    for leaf, path in zip(targets, found, strict=True):
        what = None if path is None else _differing_in(leaf, ckpt[path], cast)
        if path is not None and what is not None:
            sides = f"the target has {leaf}, the checkpoint {_describe(ckpt[path])}"
            problems.append(Mismatch(what, f"{format_path(leaf.path)}: {sides}", leaf.path))
    explained = {*found, *(problem.copy for problem in problems)}
    for path, value in ckpt.items():
        if not (ignore or path in explained or _is_empty(value)):
            text = f"{format_path(path)}  {_describe(value)}: not in the target"
            problems.append(Mismatch("unexpected", text, path))
    return found, problems


def _canonical(paths: Iterable[Path]) -> dict[Path, Path]:
    """Each path less its levels named `value` that are the only child of their container; keys are
    text, since Orbax stores int keys of dicts as text."""
    texts: dict[Path, Path] = {path: _texts(path) for path in paths}
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
    plain: dict[Path, Path] = {_texts(path): path for path in present}
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
        text = _texts(path)
        if same and path in canonical:
            return short[canonical[path]]
        own = canonical.get(path, text)
        lookups = ((plain, text), (boxed, text), (short, text), (short, own))
        return next((places[key] for places, key in lookups if key in places), None)

    return find


def _is_empty(value: Leaf) -> bool:
    """None and empty containers hold nothing that could be lost or missed."""
    return not isinstance(value, ArrayHandle | str)


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
    more than a leaf. That is so of a whole level if all its leaves fit, or of none of it. If the
    renames cannot be done together, none is told: a list would lose positions, or leaves meet.
    """
    wanted = {_texts(leaf.path): leaf for leaf in targets}
    lacking = {_texts(leaf.path) for leaf, path in zip(targets, found, strict=True) if path is None}
    places = {saved[path]: path for path, value in ckpt.items() if not _is_empty(value)}
    left = places.keys() - {saved[path] for path in found if path is not None}
    olds, news = _below(places), _below(wanted)
    renamed: dict[Path, tuple[Path, Path]] = {}

    def agree(old: Path, new: Path) -> bool:
        ends = olds.get(old, set())
        return (
            ends == news.get(new)
            and () not in ends
            and all(old + end in left and new + end in lacking for end in ends)
        )

    def fit(old: Path, new: Path) -> bool:
        pairs = [(wanted[new + end], places[old + end]) for end in olds[old]]
        return all(
            _texts(path[: len(old)]) == old and _differing_in(leaf, ckpt[path], cast) is None
            for leaf, path in pairs
        )

    def descend(at: Path) -> None:
        old_keys, new_keys = ({end[:1] for end in below[at] if end} for below in (olds, news))
        both = old_keys & new_keys
        ways = [(at + key, at) for key in old_keys] + [(at, at + key) for key in new_keys]
        spare = [k for k in old_keys if any(at + k + end in left for end in olds[at + k])]
        unfound = [k for k in new_keys if any(at + k + end in lacking for end in news[at + k])]
        if len(spare) == len(unfound) == 1 and not _may_be_others(*spare, *unfound, *both):
            ways.append((at + spare[0], at + unfound[0]))
        ways = [way for way in ways if agree(*way)]
        if len(ways) == 1 and fit(*ways[0]):
            new = ways[0][1]
            renamed.update({new + end: ways[0] for end in news[new]})
        for key in () if ways else both:
            descend(at + key)

    if olds and news:
        descend(())
    rules = _rename_rules(renamed.values())
    try:
        if rules and len(rules) * len(ckpt) < _MAX_TRIED:
            rename(ckpt, rules)
    except ReshardError:
        return {}
    return renamed


def _below(paths: Iterable[Path]) -> dict[Path, set[Path]]:
    """How the paths go on below each of their beginnings."""
    found: dict[Path, set[Path]] = collections.defaultdict(set)
    for path in paths:
        for end in range(len(path) + 1):
            found[path[:end]].add(path[end:])
    return found


def _may_be_others(*keys: Path) -> bool:
    """Whether the first two keys may be of different things all the same: optimizer state, or
    layers that may all be counted from another number."""
    kinds = [re.sub(r"\d+", "#", str(key)) for (key,) in keys]
    return not _MOMENTS.isdisjoint(kinds[:2]) or kinds[0] == kinds[1] in kinds[2:]


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


def _differing_in(leaf: TargetLeaf, value: Leaf, cast: bool | str) -> str | None:
    if not isinstance(value, ArrayHandle):
        fits = leaf.kind == "str" and isinstance(value, str)
    elif leaf.kind in _SCALARS:
        fits = value.shape == () and kind_of(value.dtype) in _SCALARS[leaf.kind]
    elif leaf.kind == "key":
        fits = (leaf.key_impl, leaf.shape) == (value.key_impl, value.shape[:-1])
    elif leaf.kind != "array" or value.key_impl is not None:
        fits = False
    elif leaf.shape != value.shape:
        return "shape"
    else:
        return None if leaf.dtype is None or _fits(leaf, value, leaf.dtype, cast) else "dtype"
    return None if fits else "kind"


def _fits(leaf: TargetLeaf, value: ArrayHandle, dtype: np.dtype, cast: bool | str) -> bool:
    """Whether values may be cast to the target's dtype. Integers are checked one by one as they are
    read; a Python scalar has no dtype of its own."""
    old, new, scalar = kind_of(value.dtype), kind_of(dtype), value.value_type == "scalar"
    if value.dtype == dtype:
        return True
    if value.dtype != value.stored_dtype:  # a cast by the user, which another would undo
        return False
    if old in "iu" and new in "iu":
        return bool(cast) or scalar
    if not old == new == "f":
        return False
    keeps = cast is True and keeps_values(value.dtype, dtype)
    return cast == "lossy" or keeps or (scalar and leaf.weak)


@functools.lru_cache
def keeps_values(old: np.dtype, new: np.dtype) -> bool:
    """Whether every value of one floating-point dtype, but for bits of NaNs, is one of another."""
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
        same = back.view(f"u{old.itemsize}") == values.view(f"u{old.itemsize}")
        return bool(np.all(same | (np.isnan(values) & np.isnan(back))))


def mismatch_error(
    problems: Sequence[Mismatch],
    hints: Sequence[str],
    targets: Sequence[TargetLeaf],
    ckpt: Checkpoint,
    given: str = "ckpt",
) -> TreeMismatchError:
    """The error of all mismatches. Where layers are stacked on one side, its hints are calls on
    `given` that change that: they may decide the rest."""
    words = {
        "missing": "missing from it",
        "unexpected": "that the target lacks",
        "tied": "tied in the target only",
        "kind": "of another kind",
        "shape": "of another shape",
        "dtype": "of another dtype",
        "kept": "kept without a value",
        "sharding": "without a place to go",
        "x64": "wider than JAX allows by default",
    }
    count = collections.Counter(problem.what for problem in problems)
    parts = [f"{count[what]} {text}" for what, text in words.items() if count[what]]
    ordered = [p.text for what in words for p in problems if p.what == what]
    return TreeMismatchError(
        f"`{ckpt.source.root}` does not match the target: {', '.join(parts)}",
        ordered,
        _stacking_hints(problems, targets, ckpt, given) or hints,
    )


def _stacking_hints(
    problems: Sequence[Mismatch], targets: Sequence[TargetLeaf], ckpt: Checkpoint, given: str
) -> list[str]:
    """Calls that stack or unstack layers, where shapes show that one side has them in one array
    each. Optimizer state follows its parameters, and has no call of its own."""
    shapes = {leaf.path: leaf.shape for leaf in targets}
    paths = {what: [p.path for p in problems if p.what == what] for what in _LACKING}
    wanted = {path: shapes[path] for path in paths["missing"]}
    arrays = {path: ckpt[path] for path in paths["unexpected"]}
    saved = {path: a.shape for path, a in arrays.items() if isinstance(a, ArrayHandle)}
    calls = [("unstack", stack, layer, *x) for layer, stack, *x in _stacked(wanted, saved)]
    calls += [("stack", *pair) for pair in _stacked(saved, wanted)]
    main = [call for call in calls if not {"params", "model"}.isdisjoint(call[1])] or calls
    return [
        f"reshard.{name}({given}, {as_python(format_path(before))}, "
        f"into={as_python(format_path(after))}, axis={axis})"
        for name, before, after, axis in main
    ]


def _stacked(
    apart: Mapping[Path, Shape], together: Mapping[Path, Shape]
) -> Iterator[tuple[Path, Path, int]]:
    """Layers, with `{}` for their number, the module that may be all of them, and its axis."""
    layers: dict[Path, dict[int, dict[Path, Shape]]] = {}
    for path, shape in apart.items():
        for depth, key in enumerate(path):
            if match := re.fullmatch(r"(.*?)(\d+)", str(key)):
                members = layers.setdefault((*path[:depth], match[1] + "{}"), {})
                members.setdefault(int(match[2]), {})[_texts(path[depth + 1 :])] = shape
    modules: dict[Path, dict[Path, Shape]] = {}
    for path, shape in together.items():
        for end in range(1, len(path) + 1):
            modules.setdefault(path[:end], {})[_texts(path[end:])] = shape
    near = collections.defaultdict(list)  # at the place of the layers, or directly below it
    for module in modules:
        near[module].append(module)
        near[module[:-1]].append(module)
    for layer, members in layers.items():
        first = members.get(0)
        alike = all(member == first for member in members.values())
        if (
            first is None
            or not alike
            or sorted(members) != [*range(len(members))]
            or len(members) < 2
        ):
            continue
        rank = min(map(len, first.values()))
        stacks = [
            {rest: (*x[:axis], len(members), *x[axis:]) for rest, x in first.items()}
            for axis in range(rank + 1)
        ]
        for module in near[layer[:-1]]:
            yield from ((layer, module, a) for a, x in enumerate(stacks) if x == modules[module])


def renames(problems: Sequence[Mismatch]) -> list[tuple[str, str]]:
    """Renames (regex, replacement) that bring saved leaves where missing ones would be."""
    return _rename_rules(problem.renamed for problem in problems if problem.renamed is not None)


def _rename_rules(pairs: Iterable[tuple[Path, Path]]) -> list[tuple[str, str]]:
    found = []
    for pair in dict.fromkeys(pairs):
        old, new = (format_path(path) + "/" if path else "" for path in pair)
        found.append(("^" + re.escape(old), new.replace("\\", r"\\")))
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
