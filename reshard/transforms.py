"""Lazy transforms: `Checkpoint` -> `Checkpoint`.

A transform changes what a checkpoint says about its leaves (path, dtype, sharding) and reads no
array; the planner and the writer execute it.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorstore as ts

from reshard import tree
from reshard.arrays.dtypes import is_floating, parse_dtype
from reshard.arrays.handle import ArrayHandle, collision_error
from reshard.checkpoint import Checkpoint, Leaf, name_clashes
from reshard.compat import missing_dtype
from reshard.errors import ArgumentError, ShardingError, TreeMismatchError
from reshard.hints import Hint
from reshard.sharding.mesh import (
    MAX_DEVICE_IDS,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
    Spec,
    fitting_spec,
    parse_mesh,
    rename_axes,
    spec_problems,
    spec_text,
)
from reshard.sharding.rules import match_specs
from reshard.tree import Path, format_key, format_path


def select(
    ckpt: Checkpoint, patterns: str | Sequence[str] = "**", *, drop: str | Sequence[str] = ()
) -> Checkpoint:
    """The leaves that some glob of `patterns` names and none of `drop` does: a glob that matches a
    module names what is in it.

    Raises:
      TreeMismatchError: a glob names nothing, nothing is left, or a list would lose positions.
      CorruptCheckpointError: one of two leaves stored under one name would be left.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "params/**", drop="**/bias")
      >>> [*ckpt]
      [('params', 'layer_0', 'kernel'), ('params', 'layer_1', 'kernel')]
    """
    patterns = tree.parse_globs("patterns", patterns)
    drop = tree.parse_globs("drop", drop)
    kept = tree.match_globs(ckpt, patterns)
    dropped = tree.match_globs(ckpt, drop)
    leaves = {path: leaf for path, leaf in ckpt.items() if path in kept and path not in dropped}
    if not leaves:
        raise TreeMismatchError("no leaf is left", [f"`{p}` is dropped" for p in drop])
    _check_left(ckpt, leaves, dropped)
    notes = tree.passed_over(ckpt, [*patterns, *drop])
    return ckpt.replace(leaves, notes=notes, retyped=len(leaves) < len(ckpt))


def without(ckpt: Checkpoint, dropped: Collection[Path]) -> Checkpoint:
    """The checkpoint less some leaves; raises what `select` raises."""
    leaves = {path: leaf for path, leaf in ckpt.items() if path not in dropped}
    _check_left(ckpt, leaves, dropped)
    return ckpt.replace(leaves, retyped=len(leaves) < len(ckpt))


def _check_left(ckpt: Checkpoint, leaves: Mapping[Path, Leaf], dropped: Collection[Path]) -> None:
    """Raises what `select` raises where leaves cannot be left without those that are dropped."""
    halves = [
        leaf
        for leaf in leaves.values()
        if isinstance(leaf, ArrayHandle) and leaf.same_name in dropped
    ]
    if halves:
        raise collision_error(halves)
    tree.check_lists(leaves, ckpt)


def rename(ckpt: Checkpoint, rules: Sequence[tuple[str, str]] | Mapping[str, str]) -> Checkpoint:
    """Leaves under new paths: (regex, replacement) pairs applied in order to the printed path.

    Raises:
      TreeMismatchError: see `reshard.tree.rename_paths`; also two leaves that would be stored
        under one name.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "**/kernel")
      >>> [*reshard.rename(ckpt, [(r"layer_(\\d)", r"block_\\1")])]
      [('params', 'block_0', 'kernel'), ('params', 'block_1', 'kernel')]
    """
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    new_paths = tree.rename_paths(tuple(ckpt), pairs)
    leaves: dict[Path, Leaf] = {}
    for old, leaf in ckpt.items():
        new = new_paths[old]
        if isinstance(leaf, ArrayHandle) and new != old:
            leaf = leaf.at(new)
        leaves[new] = leaf
    tree.check_lists(leaves, ckpt)
    clashes = name_clashes(leaves, lambda path: new_paths.get(path) == path)
    if clashes:
        raise TreeMismatchError("two leaves would be stored under one name", clashes)
    return ckpt.replace(leaves, retyped=set(leaves) != set(ckpt))


def cast(ckpt: Checkpoint, dtype: Any, where: str | Sequence[str] = "**") -> Checkpoint:
    """Floating-point arrays in another floating-point dtype, rounded to nearest even.

    Args:
      dtype: a floating-point dtype or its name (`"bfloat16"`).
      where: globs; of the leaves they name, floating-point arrays are cast. Integers, PRNG keys
        and Python scalars stay as they are.

    Raises:
      ArgumentError: the dtype is not floating-point, or TensorStore has none such.
      TreeMismatchError: nothing would be cast.

    Example:
      >>> ckpt = reshard.cast(reshard.open("run/1000"), "bfloat16", where="**/kernel")
      >>> ckpt["params/layer_0/kernel"], ckpt["params/layer_0/bias"].dtype.name
      (<params/layer_0/kernel: bfloat16[32,32] P(None, 'model')>, 'float32')
    """
    new, problem = parse_dtype(dtype), ""
    if not is_floating(new):
        problem = "only floating-point arrays are cast, to floating-point dtypes"
    elif not hasattr(ts, new.name):
        problem = missing_dtype(new.name) or "TensorStore does not store it"
    if problem:
        hint = "`bfloat16`, `float16`, `float32`, `float8_e4m3fn`"
        raise ArgumentError(f"cast to {new.name}: {problem}", hints=[hint])
    patterns = tree.parse_globs("where", where)
    matched = tree.match_globs(ckpt, patterns)
    chosen = [a for a in ckpt.arrays if a.path in matched and a.value_type != "scalar"]
    leaves = {a.path: dataclasses.replace(a, dtype=new) for a in chosen if is_floating(a.dtype)}
    if not leaves:
        raise TreeMismatchError(
            "no floating-point array to cast", [f"`{p}` matches none" for p in patterns]
        )
    return ckpt.replace({**ckpt, **leaves}, notes=tree.passed_over(ckpt, patterns))


def to_mesh(
    ckpt: Checkpoint,
    mesh: Any,
    specs: Sequence[tuple[str, Any]] | Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
    known: Mapping[Path, Spec] | None = None,
) -> Checkpoint:
    """Every device array laid out on `mesh`: `reshard.to_mesh` without a target. `known` are specs
    in the place of the saved ones; `specs` override these, too.

    Raises:
      ShardingError: every leaf whose spec does not fit, with what to type for each.
    """
    new_mesh = parse_mesh(mesh, ckpt.meshes)
    if new_mesh.device_ids is None and new_mesh.size <= MAX_DEVICE_IDS:
        new_mesh = dataclasses.replace(new_mesh, device_ids=tuple(range(new_mesh.size)))
    if new_mesh.axis_types is None:
        new_mesh = dataclasses.replace(
            new_mesh, axis_types=_saved_axis_types(new_mesh, ckpt.meshes)
        )
    axes = dict(axes or {})
    _check_axes(axes, new_mesh, ckpt.meshes)
    candidates = [a.path for a in ckpt.arrays if a.value_type != "scalar"]
    rules = specs.items() if isinstance(specs, Mapping) else specs or ()
    chosen = dict(known or {}) | match_specs(candidates, list(rules))
    leaves = dict(ckpt)
    problems, unfitting, replicated, unknown = [], [], [], []
    for array in ckpt.arrays:
        spec = chosen.get(array.path)
        if spec is None and array.sharding is None and array.value_type != "jax.Array":
            continue
        text = f"{format_path(array.path)}  {array.dtype.name}{list(array.shape)}: "
        saved = array.sharding
        if spec is None and saved is None:
            problems.append(f"{text}it was saved without a sharding")
            unknown.append(array)
            continue
        if spec is None:
            spec = rename_axes(saved.spec, axes) if isinstance(saved, NamedSharding) else ()
            if isinstance(saved, SingleDeviceSharding):
                replicated.append(array)
        found = spec_problems(array.shape, new_mesh, spec)
        problems += [text + problem for problem in found]
        if found:
            unfitting.append((array, spec))
        leaves[array.path] = dataclasses.replace(
            array, sharding=NamedSharding(new_mesh, spec), value_type="jax.Array"
        )
    if problems:
        raise ShardingError(
            f"specs that do not fit the mesh `{new_mesh}`",
            problems,
            _spec_hints(ckpt, unfitting, new_mesh)
            + [Hint(("specs", _regex(a.path), ""), " replicates it") for a in unknown],
        )
    notes = []
    if replicated:
        nbytes = sum(a.nbytes for a in replicated)
        one = len(replicated) == 1
        names = ", ".join(format_path(a.path) for a in replicated[:3])
        more = ", ..." if len(replicated) > 3 else ""
        notes.append(
            f"{'1 leaf' if one else f'{len(replicated)} leaves'} saved on a single device "
            f"{'is' if one else 'are'} replicated on the new mesh "
            f"({nbytes} bytes a device): {names}{more}"
        )
    retyped = any(a.value_type != "jax.Array" for a in ckpt.arrays if a.path in chosen)
    return ckpt.replace(leaves, notes=notes, retyped=retyped)


def _saved_axis_types(target: Mesh, saved: Sequence[Mesh]) -> tuple[str, ...] | None:
    """Axis types of the saved meshes, by axis name; Auto for axes that are new."""
    known: dict[str, str] = {}
    for mesh in saved:
        known |= dict(zip(mesh.axis_names, mesh.axis_types or (), strict=False))
    return tuple(known.get(name, "Auto") for name in target.axis_names) if known else None


def _check_axes(axes: Mapping[str, str], target: Mesh, saved: Sequence[Mesh]) -> None:
    known = {name for mesh in saved for name in mesh.axis_names}
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


def _spec_hints(
    ckpt: Checkpoint, unfitting: Sequence[tuple[ArrayHandle, Spec]], target: Mesh
) -> list[Hint]:
    """What to type: for axes that the mesh lacks, and specs that fit, one for each last key if all
    its leaves agree, else one for each leaf."""
    axes = {axis for _, spec in unfitting for entry in spec for axis in entry}
    saved = list(dict.fromkeys(axis for mesh in ckpt.meshes for axis in mesh.axis_names))
    lacking = sorted(axes - set(target.axis_names))
    old = [axis for axis in saved if axis not in target.axis_names]
    new = [name for name in target.axis_names if name not in saved]
    if len(old) != len(new):  # else one is the other's, in their order
        old = [axis for axis in old if axis in lacking]
        new = [name for name in new if target.shape[name] > 1]
    new += ["NEW"] * (len(old) - len(new))
    hints = [
        Hint(("axes", axis, name), " renames, ", ("axes", axis, ""), " replicates")
        for axis, name in zip(old, new, strict=False)
        if axis in lacking
    ]
    if not lacking:
        hints += [
            Hint(("axes", axis, ""), " replicates what is split over it")
            for axis in saved
            if axis in axes and target.shape[axis] > 1
        ]
    fitting = {
        array.path: spec_text(fitting_spec(array.shape, target, spec))
        for array, spec in unfitting
        if not any(axis in lacking for entry in spec for axis in entry)
    }
    by_key: dict[str, set[str | None]] = {}
    for array in ckpt.arrays:
        by_key.setdefault(_last_key(array.path), set()).add(fitting.get(array.path))
    for path, text in fitting.items():
        key = _last_key(path)
        shared = f"(^|/){re.escape(key)}$" if len(by_key[key]) == 1 else _regex(path)
        hints.append(Hint(("specs", shared, text), " fits"))
    return hints


def _regex(path: Path) -> str:
    return f"^{re.escape(format_path(path))}$"


def _last_key(path: Path) -> str:
    return format_key(path[-1]) if path else ""
