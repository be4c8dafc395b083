"""Lazy transforms: `Checkpoint` -> `Checkpoint`.

A transform changes what a checkpoint says about its leaves (path, dtype, sharding) and reads no
array; the planner and the writer execute it.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard import tree
from reshard.arrays.dtypes import is_floating, is_scale, parse_dtype
from reshard.arrays.handle import ArrayHandle, collision_error
from reshard.checkpoint import Checkpoint, Leaf, check_checkpoints, name_clashes
from reshard.errors import ArgumentError, ShardingError, TreeMismatchError
from reshard.sharding.mesh import (
    MAX_DEVICE_IDS,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
    Spec,
    fitting_spec,
    largest_sizes,
    parse_mesh,
    rename_axes,
    spec_problems,
    spec_text,
)
from reshard.sharding.rules import match_specs, spec_pairs
from reshard.tree import Path, format_path
from reshard.units import count_leaves, count_of

# Dtypes that JAX truncates on devices if x64 is not enabled.
_WIDE = ("int64", "uint64", "float64", "complex128")

_SCALES = "arrays that stay float8_e8m0fnu: "


def select(
    ckpt: Checkpoint, patterns: str | Sequence[str] = "**", *, drop: str | Sequence[str] = ()
) -> Checkpoint:
    """Keep the leaves that match a glob of `patterns` and no glob of `drop`.

    A glob that matches a module means all leaves in it.

    Raises:
      TreeMismatchError: a glob matches nothing, no leaf is left, or a list would lose positions.
      CorruptCheckpointError: of two leaves that are stored under one name, only one would be left.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "params/**", drop="**/bias")
      >>> [*ckpt]
      [('params', 'layer_0', 'kernel'), ('params', 'layer_1', 'kernel')]
    """
    check_checkpoints(ckpt)
    patterns = tree.parse_globs("patterns", patterns)
    drop = tree.parse_globs("drop", drop)
    kept = tree.match_globs(ckpt, patterns)
    dropped = tree.match_globs(ckpt, drop)
    leaves = {path: leaf for path, leaf in ckpt.items() if path in kept and path not in dropped}
    if not leaves:
        raise TreeMismatchError("no leaf is left", [f"`{p}` is dropped" for p in drop])
    return _left(ckpt, leaves, dropped, tree.passed_over(ckpt, [*patterns, *drop]))


def without(ckpt: Checkpoint, dropped: Collection[Path]) -> Checkpoint:
    """The checkpoint without some leaves. Raises as `select` does."""
    leaves = {path: leaf for path, leaf in ckpt.items() if path not in dropped}
    return _left(ckpt, leaves, dropped)


def _left(
    ckpt: Checkpoint,
    leaves: Mapping[Path, Leaf],
    dropped: Collection[Path],
    notes: Sequence[str] = (),
) -> Checkpoint:
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, ArrayHandle)]
    if halves := [array for array in arrays if array.same_name in dropped]:
        raise collision_error(halves)
    tree.check_lists(leaves, ckpt)
    return ckpt.replace(leaves, notes=notes, retyped=len(leaves) < len(ckpt))


def rename(ckpt: Checkpoint, rules: Sequence[tuple[str, str]] | Mapping[str, str]) -> Checkpoint:
    """Give leaves new paths: (regex, replacement) pairs, applied in order to the printed path.

    Raises:
      TreeMismatchError: see `reshard.tree.rename_paths`; also two leaves that would be stored
        under one name.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "**/kernel")
      >>> [*reshard.rename(ckpt, [(r"layer_(\\d)", r"block_\\1")])]
      [('params', 'block_0', 'kernel'), ('params', 'block_1', 'kernel')]
    """
    check_checkpoints(ckpt)
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    new_paths = tree.rename_paths(tuple(ckpt), pairs)
    leaves: dict[Path, Leaf] = {
        new_paths[old]: leaf.at(new_paths[old]) if isinstance(leaf, ArrayHandle) else leaf
        for old, leaf in ckpt.items()
    }
    tree.check_lists(leaves, ckpt)
    clashes = name_clashes(leaves, lambda path: new_paths.get(path) == path)
    if clashes:
        raise TreeMismatchError("two leaves would be stored under one name", clashes)
    return ckpt.replace(leaves, retyped=set(leaves) != set(ckpt))


def cast(ckpt: Checkpoint, dtype: Any, where: str | Sequence[str] = "**") -> Checkpoint:
    """Cast floating-point arrays to another floating-point dtype, rounding to nearest even.

    Args:
      dtype: a floating-point dtype or its name (`"bfloat16"`).
      where: globs. Floating-point arrays among their leaves are cast. Integers, PRNG keys and
        Python scalars stay as they are. `float8_e8m0fnu`, the dtype of block scales, is cast only
        if a glob other than `**` names the array.

    Raises:
      ArgumentError: the dtype is not floating-point, or TensorStore does not have it.
      TreeMismatchError: no array would be cast.

    Example:
      >>> ckpt = reshard.cast(reshard.open("run/1000"), "bfloat16", where="**/kernel")
      >>> ckpt["params/layer_0/kernel"], ckpt["params/layer_0/bias"].dtype.name
      (<params/layer_0/kernel: bfloat16[32,32] P(None, 'model')>, 'float32')
    """
    check_checkpoints(ckpt)
    new, problem = parse_dtype(dtype), ""
    if not is_floating(new):
        problem = "only floating-point arrays are cast, to floating-point dtypes"
    elif not hasattr(ts, new.name):
        problem = "TensorStore cannot store this dtype"
    if problem:
        hint = "`bfloat16`, `float16`, `float32`, `float8_e4m3fn`"
        raise ArgumentError(f"cast to {new.name}: {problem}", hints=[hint])
    patterns = tree.parse_globs("where", where)
    matched = tree.match_globs(ckpt, patterns)
    named = tree.match_globs(ckpt, [pattern for pattern in patterns if pattern != "**"])
    chosen = [a for a in ckpt.arrays if a.path in matched and a.value_type != "scalar"]
    floats = [a for a in chosen if is_floating(a.dtype)]
    kept = [a.path for a in floats if is_scale(a.dtype) and a.path not in named]
    notes = [*tree.passed_over(ckpt, patterns), *_kept_scales(kept, new)]
    leaves = {a.path: dataclasses.replace(a, dtype=new) for a in floats if a.path not in kept}
    if not leaves:
        problems = notes if kept else [f"`{p}` matches none" for p in patterns]
        raise TreeMismatchError("no floating-point array to cast", problems)
    made = ckpt.replace({**ckpt, **leaves}, notes=notes)
    if not any(is_scale(a.dtype) for a in made.arrays):  # what an earlier cast has kept, too
        made.notes = tuple(note for note in made.notes if _SCALES not in note)
    return made


def _kept_scales(kept: Sequence[Path], dtype: np.dtype) -> list[str]:
    """A note on block scales that a cast without a glob keeps, with the calls that cast them."""
    globs = dict.fromkeys("**/" + tree.format_glob(path[-1:]) for path in kept)
    casts = [f'reshard.cast(ckpt, "{dtype.name}", {tree.as_python(glob)})' for glob in globs]
    text = f"{_SCALES}{len(kept)}; block scales are cast only if a glob names them: "
    return [text + ", ".join(casts)] if kept else []


def to_mesh(
    ckpt: Checkpoint,
    mesh: Any,
    specs: Sequence[tuple[str, Any]] | Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
    known: Mapping[Path, Spec] | None = None,
) -> Checkpoint:
    """Shard every device array on `mesh`: `reshard.to_mesh` without a target. `known` specs replace
    the saved ones, and `specs` replace both.

    Raises:
      ShardingError: all leaves whose specs do not fit, with hints for each.
    """
    new_mesh = parse_mesh(mesh, ckpt.meshes)
    if new_mesh.device_ids is None and new_mesh.size <= MAX_DEVICE_IDS:
        new_mesh = dataclasses.replace(new_mesh, device_ids=tuple(range(new_mesh.size)))
    if new_mesh.axis_types is None:
        pairs = (zip(m.axis_names, m.axis_types or (), strict=False) for m in ckpt.meshes)
        if types := dict(itertools.chain(*pairs)):
            new = tuple(types.get(name, "Auto") for name in new_mesh.axis_names)
            new_mesh = dataclasses.replace(new_mesh, axis_types=new)
    axes = dict(axes or {})
    sizes = largest_sizes(ckpt.meshes)
    _check_axes(axes, new_mesh, sizes)
    # No array is split over an axis of size 1, so the mesh may lack it.
    axes = {name: "" for name in sizes.keys() - new_mesh.shape if sizes[name] == 1} | axes
    candidates = [a.path for a in ckpt.arrays if a.value_type != "scalar"]
    rules = spec_pairs(specs)
    matched = match_specs(candidates, rules, otherwise=tree.LISTING)
    chosen, notes = dict(known or {}), _leave_on_host(ckpt, rules, matched)
    chosen |= matched
    is_plain = ckpt.source.is_foreign or ckpt.source.store.ranged
    leaves, misfits, replicated = dict(ckpt), [], []
    for array in ckpt.arrays:
        spec, saved = chosen.get(array.path), array.sharding
        if spec is None and is_plain and array.dtype.name not in _WIDE:
            spec = ()
            replicated.append(array)
        if spec is None and saved is None:
            if array.value_type == "jax.Array":
                misfits.append(_Misfit(array, None, ("it was saved without a sharding",), False))
            continue
        if spec is None:
            spec = rename_axes(saved.spec, axes) if isinstance(saved, NamedSharding) else ()
            if isinstance(saved, SingleDeviceSharding):
                replicated.append(array)
        if found := spec_problems(array.shape, new_mesh, spec):
            misfits.append(_Misfit(array, spec, tuple(found), array.path in chosen))
        leaves[array.path] = dataclasses.replace(
            array, sharding=NamedSharding(new_mesh, spec), value_type="jax.Array"
        )
    if misfits:
        misfits.sort(key=lambda misfit: tree.natural(misfit.array.path))
        raise ShardingError(
            f"specs that do not fit the mesh `{new_mesh}`",
            [
                f"{format_path(array.path)}  {array.dtype.name}{list(array.shape)}: {problem}"
                for array, _, problems, _ in misfits
                for problem in problems
            ],
            _axis_hints(sizes, misfits, new_mesh, axes) + _spec_hints(ckpt, misfits, new_mesh),
        )
    notes += [_replicated_note(replicated)] if replicated else _unplaced_note(leaves.values())
    retyped = any(a.value_type != "jax.Array" for a in ckpt.arrays if a.path in chosen)
    return ckpt.replace(leaves, notes=notes, retyped=retyped)


def _replicated_note(arrays: Sequence[ArrayHandle]) -> str:
    saved = "on a single device" if arrays[0].sharding else "without a sharding"
    return (
        f"{count_leaves(len(arrays))} saved {saved} {'are' if arrays[1:] else 'is'} "
        f"replicated on the new mesh ({sum(a.nbytes for a in arrays)} bytes a device): "
        + _first_three([format_path(array.path) for array in arrays])
    )


def _unplaced_note(leaves: Iterable[Leaf]) -> list[str]:
    """A note on NumPy arrays, if no array is on the new mesh."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, ArrayHandle)]
    host = [format_path(a.path) for a in arrays if a.shape and a.value_type == "np.ndarray"]
    if not host or any(array.sharding for array in arrays):
        return []
    stay = count_of(len(host), "NumPy array stays", "NumPy arrays stay")
    return [
        f"no array is on the new mesh, as no spec names one: {stay} as saved: {_first_three(host)}"
    ]


def _first_three(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *["..."] * (len(names) > 3)])


def _check_axes(axes: Mapping[str, str], target: Mesh, known: Collection[str]) -> None:
    problems = [f"'{old}' is not an axis of any saved mesh" for old in axes if old not in known]
    problems += [
        f"'{new}' is not an axis of `{target}`"
        for new in axes.values()
        if new and new not in target.axis_names
    ]
    if problems:
        raise ShardingError(
            "axis renames that do not apply",
            problems,
            [f"saved axes: {', '.join(sorted(known)) or 'none'}"],
        )


def _leave_on_host(
    ckpt: Checkpoint, rules: Sequence[tuple[str, Any]], matched: dict[Path, Spec]
) -> list[str]:
    """Removes host arrays of 64 bits from the leaves that rules match, unless a rule matches only
    that array. Returns notes. On devices, JAX without x64 truncates such arrays."""
    wide = {a.path for a in ckpt.arrays if a.value_type == "np.ndarray" and a.dtype.name in _WIDE}
    hits = [{p for p in matched if re.search(rule[0], format_path(p))} for rule in rules]
    named = {path for paths in hits if len(paths) == 1 for path in paths}
    left = [path for path in matched if path in wide - named]
    for path in left:
        del matched[path]
    cases = (("stay off devices", left), ("become arrays on devices", wide & named))
    return [
        f"host arrays of 64 bits {what}, where JAX without x64 truncates them: "
        + _first_three(sorted(map(format_path, paths)))
        for what, paths in cases
        if paths
    ]


class _Misfit(NamedTuple):
    """An array whose spec does not fit a mesh, or is None; `given` if the caller chose the spec."""

    array: ArrayHandle
    spec: Spec | None
    problems: tuple[str, ...]
    given: bool


def _axis_hints(
    sizes: Mapping[str, int], misfits: Sequence[_Misfit], target: Mesh, axes: Mapping[str, str]
) -> list[str]:
    """A hint for each axis of saved specs whose removal reduces the problems."""
    specs = [(m.array.shape, m.spec or (), len(m.problems)) for m in misfits if not m.given]
    helpful = {
        axis
        for shape, spec, count in specs
        for axis in itertools.chain(*spec)
        if len(spec_problems(shape, target, rename_axes(spec, {axis: ""}))) < count
    }
    old = [axis for axis in sizes if axis not in target.axis_names]
    new = [name for name in target.axis_names if name not in sizes]
    near = {name: get_close_matches(name, helpful.intersection(old), 1, 0.5) for name in new}
    names = tuple("".join(near.get(name) or name) for name in target.axis_names)
    hints: list[str] = []
    if names != target.axis_names and len({*names}) == len(names):
        hints.append(f"did you mean `{Mesh(names, target.axis_sizes)}`?")
    renames = dict(zip(old, new, strict=True)) if len(old) == len(new) else {}
    for axis in (each for each in sizes if each in helpful and each not in axes.values()):
        text = tree.as_python(axis)
        renamed = f"axes={{{text}: {tree.as_python(renames.get(axis))}}} renames, "
        hints.append(
            renamed * (axis in renames) + f'axes={{{text}: ""}} replicates dimensions split over it'
        )
    return hints


def _spec_hints(ckpt: Checkpoint, misfits: Sequence[_Misfit], target: Mesh) -> list[str]:
    """Specs that fit, each for the shortest ending of paths whose leaves agree on the spec."""
    fitting: dict[Path, str] = {}
    hints = []
    for array, spec, _, given in misfits:
        if {*itertools.chain(*(spec or ()))} <= {*target.axis_names}:
            fitting[array.path] = spec_text(fitting_spec(array.shape, target, spec or ()))
        elif given:  # hints about saved axes do not concern it
            hints.append(f"the mesh has the axes {', '.join(target.axis_names)}")
    texts: dict[str, set[str | None]] = {}
    for array in ckpt.arrays:
        for ending in _endings(array.path):
            texts.setdefault(ending, set()).add(fitting.get(array.path))
    for array, spec, _, given in misfits:
        if array.path in fitting:
            *shorter, whole = _endings(array.path)
            ending = next((each for each in shorter if len(texts[each]) == 1), None)
            regex = f"^{re.escape(whole)}$" if ending is None else f"(^|/){re.escape(ending)}$"
            says = " replicates it" if spec is None else " fits" + ", if it comes first" * given
            hints.append(f"specs={tree.as_python([(regex, fitting[array.path])])}{says}")
    return hints


def _endings(path: Path) -> list[str]:
    """The last key of a printed path, the last two, and so on up to the whole path."""
    return [format_path(path[start:]) for start in range(len(path) - 1, -1, -1)] or ["."]
