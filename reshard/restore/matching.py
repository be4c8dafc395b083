"""Which saved leaf is which leaf of a target, and all mismatches. Pure.

A saved path is a leaf's own path, give or take levels named `value` that hold nothing else: Orbax
writes one for each of Linen's boxes and NNX's variables, and none for raw arrays.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.dtypes import kind_of
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint, Leaf
from reshard.errors import TreeMismatchError
from reshard.tree import Key, Path, as_python, format_glob, format_path

# Python types of target leaves, and the kinds of dtype that fit them.
_SCALARS = {"int": "iu", "float": "f", "bool": "b"}


@dataclasses.dataclass(frozen=True, slots=True)
class TargetLeaf:
    """A leaf of a target."""

    path: Path
    kind: str  # "array", "key" (typed PRNG keys), or the name of a Python type
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    key_impl: str | None = None
    weak: bool = False  # an array that stands for a Python scalar (`weak_type`)
    aliases: tuple[Path, ...] = ()  # its other paths, if a module holds it in several places

    def __str__(self) -> str:
        if self.kind == "key":
            return f"{self.key_impl} keys{list(self.shape)}"
        if self.kind == "array" and self.dtype is not None:
            return f"{self.dtype.name}{list(self.shape)}"
        return f"a Python {self.kind}"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A reason why a target cannot be restored."""

    what: str  # a key of `_WORDS`
    text: str
    path: Path  # in the target; in the checkpoint for an unexpected leaf
    copy: Path | None = None  # the saved path of the second copy of a tied leaf


# Kinds of mismatches. The last three are of targets that are unusable by themselves.
_WORDS = {
    "missing": "missing in the checkpoint",
    "unexpected": "not in the target",
    "tied": "tied in the target only",
    "kind": "of another kind",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "kept": "kept without a value",
    "sharding": "without a usable sharding",
    "x64": "wider than JAX allows by default",
}


def match(
    targets: Sequence[TargetLeaf],
    ckpt: Checkpoint,
    *,
    cast: bool | str = False,
    ignore: bool = False,
) -> tuple[list[Path | None], list[Mismatch]]:
    """Return the saved path of each target leaf, None if it is missing, and all mismatches.

    `cast` is the argument of `reshard.restore`. `ignore` leaves out unexpected leaves."""
    find = _finder(targets, ckpt)
    taken: set[Path] = set()
    saved_paths: list[Path | None] = []
    problems: list[Mismatch] = []
    for leaf in targets:
        hits = [find(path) for path in (leaf.path, *leaf.aliases)]
        present = list(dict.fromkeys(hit for hit in hits if hit is not None and hit not in taken))
        taken.update(present)
        if len(present) > 1:
            names = " and ".join(map(format_path, present))
            text = f"{format_path(leaf.path)}: one leaf of the target, saved as {names}"
            problems.append(Mismatch("tied", text, leaf.path, present[-1]))
        saved_paths.append(present[0] if present else None)
    for leaf, path in zip(targets, saved_paths, strict=True):
        if path is None:
            text = f"{format_path(leaf.path)}  {leaf}: missing"
            problems.append(Mismatch("missing", text, leaf.path))
        elif what := _differing_in(leaf, ckpt[path], cast):
            sides = f"the target has {leaf}, the checkpoint {_describe(ckpt[path])}"
            problems.append(Mismatch(what, f"{format_path(leaf.path)}: {sides}", leaf.path))
    explained = {*saved_paths, *(problem.copy for problem in problems)}
    for path, value in ckpt.items():
        if not (ignore or path in explained or _is_empty(value)):
            text = f"{format_path(path)}  {_describe(value)}: not in the target"
            problems.append(Mismatch("unexpected", text, path))
    return saved_paths, problems


def _canonical(paths: Iterable[Path]) -> dict[Path, Path]:
    """Each path as text, like Orbax keys, without levels named `value` that are only children."""
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


def _finder(targets: Sequence[TargetLeaf], ckpt: Checkpoint) -> Callable[[Path], Path | None]:
    """Return a function that finds the saved path of a target leaf.

    If both trees have the same leaves without the levels that may be a box, those paths decide:
    they are one to one. A part of a tree has fewer siblings that show which levels are boxes. There
    a leaf is looked up by its own path, then in a box, then without all such levels.
    """
    saved = _canonical(ckpt)
    present = [path for path, value in ckpt.items() if not _is_empty(value)]
    plain: dict[Path, Path] = {_texts(path): path for path in present}
    children = _children(plain)
    short = {saved[path]: path for path in present}
    canonical = _canonical([leaf.path for leaf in targets])
    same = set(canonical.values()) == set(short)

    def find(path: Path) -> Path | None:
        text = _texts(path)
        if same and path in canonical:
            return short[canonical[path]]
        if text in plain:
            return plain[text]
        if children.get(text) == {"value"} and (*text, "value") in plain:
            return plain[*text, "value"]
        return short.get(text, short.get(canonical.get(path, text)))

    return find


def _is_empty(value: Leaf) -> bool:
    """Whether a leaf is None or an empty container, which hold no value."""
    return not isinstance(value, ArrayHandle | str)


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


def cast_hints(targets: Sequence[TargetLeaf], ckpt: Checkpoint, cast: bool | str) -> Iterator[str]:
    """The argument `cast` that helps most, if one helps more than the given one."""

    def left(cast: bool | str) -> int:
        return sum(problem.what == "dtype" for problem in match(targets, ckpt, cast=cast)[1])

    if left("lossy") < min(left(True), left(cast)):
        yield 'cast="lossy" allows all float casts'
    elif left(True) < left(cast):
        yield "cast=True allows casts that keep every value"


def mismatch_error(
    problems: Sequence[Mismatch],
    targets: Sequence[TargetLeaf],
    ckpt: Checkpoint,
    of_nnx: bool,
    hints: Sequence[str] = (),
    *,
    given: str = "ckpt",
) -> TreeMismatchError:
    """The error that lists all mismatches.

    If the trees have another structure, its first hint is the call on `given` that changes that:
    stack or unstack layers, convert to the other API, or add or remove a level. The first two may
    resolve everything else, and are then the only hint. `of_nnx`: the target has NNX variables.
    """
    count = collections.Counter(problem.what for problem in problems)
    parts = [f"{count[what]} {text}" for what, text in _WORDS.items() if count[what]]
    ordered = [p.text for what in _WORDS for p in problems if p.what == what]
    calls = _stacking_hints(problems, targets, ckpt, given)
    if not calls:
        levels = _level_hints(targets, ckpt, given) if count["missing"] else []
        calls = _conversion_hints(problems, of_nnx, bool(levels)) or [*levels, *hints]
    text = f"`{ckpt.source.root}` does not match the target: {', '.join(parts)}"
    return TreeMismatchError(text, ordered, calls)


def _level_hints(targets: Sequence[TargetLeaf], ckpt: Checkpoint, given: str) -> list[str]:
    """The call that adds or removes the first level of all paths that differ, if that makes the
    trees equal. In a train state, the model is below one of several first levels."""
    present = [path for path, value in ckpt.items() if not _is_empty(value)]
    saved = set(_canonical(present).values())
    wanted = set(_canonical(leaf.path for leaf in targets).values())
    if () in saved | wanted:
        return []
    same = saved & wanted
    saved, wanted = saved - same, wanted - same
    if not {path[0] for path in saved}.isdisjoint(path[0] for path in same):
        return []
    below = collections.defaultdict(set)
    for path in saved:
        below[path[0]].add(path[1:])
    above = {path[0] for path in wanted}
    tops = [top for top, paths in below.items() if paths == wanted]
    if len(tops) == 1 and not (same and len(below) > 1):
        if len(below) > 1:
            given = f"reshard.select({given}, {as_python(f'{format_glob((*tops,))}/**')})"
        rule = f"^{re.escape(format_path((*tops,)))}/", ""
    elif len(above) == 1 and {path[1:] for path in wanted} == saved:
        moved = "|".join(sorted(re.escape(format_path((top,))) for top in below))
        begin = f"^(?=({moved})(/|$))" if same else "^"
        rule = begin, format_path((*above,)).replace("\\", r"\\") + "/"
    else:
        return []
    return [f"reshard.rename({given}, {as_python([rule])})"]


def _conversion_hints(problems: Sequence[Mismatch], of_nnx: bool, same: bool) -> list[str]:
    """The call that converts to the target's API, if the checkpoint is of Flax's other API: only
    Linen has a collection `params`, and NNX has all arrays in variables. `same`: the trees differ
    in one level alone."""
    wanted = {str(p.path[0]) for p in problems if p.what == "missing" and p.path}
    unexpected = [p.path for p in problems if p.what == "unexpected" and p.path]
    saved = {str(path[0]) for path in unexpected}
    in_variables = all(path[-1] == "value" for path in unexpected)
    if of_nnx and wanted and "params" in saved - wanted and not (in_variables and same):
        return ["reshard.to_nnx(path, model)"]
    if not of_nnx and saved and "params" in wanted - saved and in_variables and not same:
        return ["reshard.to_linen(path, model)"]
    return []


def _stacking_hints(
    problems: Sequence[Mismatch], targets: Sequence[TargetLeaf], ckpt: Checkpoint, given: str
) -> list[str]:
    """The calls that stack or unstack layers, if shapes prove that one side has them stacked."""
    shapes = {leaf.path: leaf.shape for leaf in targets}
    wanted = {p.path: shapes[p.path] for p in problems if p.what == "missing"}
    values = {p.path: ckpt[p.path] for p in problems if p.what == "unexpected"}
    saved = {path: x.shape for path, x in values.items() if isinstance(x, ArrayHandle)}
    calls: list[tuple[str, Path, Path, int]] = []
    for name, apart, together in (("unstack", wanted, saved), ("stack", saved, wanted)):
        near = collections.defaultdict(list)  # at the place of the layers, or directly below it
        for module in {path[:end]: None for path in together for end in range(1, len(path) + 1)}:
            near[module].append(module)
            near[module[:-1]].append(module)
        stacks = stacks_in(apart, together, lambda layer, near=near: near[layer[:-1]], _texts, 1)
        for layer, module, axes in stacks:
            before, into = (module, layer) if name == "unstack" else (layer, module)
            calls += [(name, before, into, axis) for axis in axes]
    main = [call for call in calls if not {"params", "model"}.isdisjoint(call[1])] or calls
    return [stacking_call(*call, given) for call in main]


def stacking_call(name: str, before: Path, into: Path, axis: int, given: str = "ckpt") -> str:
    """A call of `reshard.stack` or `reshard.unstack`, as it is typed."""
    paths = f"{as_python(format_path(before))}, into={as_python(format_path(into))}"
    return f"reshard.{name}({given}, {paths}, axis={axis})"


def stacks_in(
    apart: Mapping[Path, Shape],
    together: Mapping[Path, Shape],
    candidates: Callable[[Path], Iterable[Path]],
    inside: Callable[[Path], Hashable],
    share: float,
) -> Iterator[tuple[Path, Path, tuple[int, ...]]]:
    """Layers that shapes show to be stacked: their path with `{}` for the number, the module that
    may be all of them, and its possible axes.

    Args:
      apart, together: the leaves of both sides.
      candidates: the modules that layers may be, by the path of the layers.
      inside: what paths of leaves in a layer have in common on both sides.
      share: the share of the leaves of a module and a layer that must agree.
    """
    layers: dict[Path, dict[str, list[tuple[Hashable, Shape]]]] = {}
    for path, shape in apart.items():
        for depth, key in enumerate(path):
            if match := re.fullmatch(r"(.*?)(\d+)", str(key)):
                members = layers.setdefault((*path[:depth], match[1] + "{}"), {})
                leaf = inside(_texts(path[depth + 1 :])), shape
                members.setdefault(match[2], []).append(leaf)
    below: dict[Path, list[tuple[Path, Shape]]] = collections.defaultdict(list)
    for path, shape in together.items():
        for end in range(1, len(path) + 1):
            below[path[:end]].append((path[end:], shape))
    for layer, members in layers.items():
        count = len(members)
        if count < 2 or members.keys() != {str(n) for n in range(count)}:
            continue
        for module in dict.fromkeys(candidates(layer)):
            leaves = [(inside(_texts(path)), shape) for path, shape in below[module]]
            same: dict[int, int] = {}
            for axis in range(min((len(shape) for _, shape in leaves), default=0)):
                if {shape[axis] for _, shape in leaves} == {count}:
                    cut = collections.Counter((x, s[:axis] + s[axis + 1 :]) for x, s in leaves)
                    same[axis] = (cut & collections.Counter(members["0"])).total()
            most = max(same.values(), default=0)
            if most and most >= share * max(len(leaves), len(members["0"])):
                yield layer, module, tuple(axis for axis in same if same[axis] == most)
