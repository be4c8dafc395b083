"""`Checkpoint`: an immutable, lazy view of a saved tree, and the transforms that return new ones.

Nothing here reads an array. A transform changes what the checkpoint says about its leaves (path,
dtype, sharding); the planner and the writer carry it out.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from reshard import tree
from reshard.errors import CorruptCheckpointError, ShardingError, TreeMismatchError
from reshard.mesh import (
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    Spec,
    format_spec,
    parse_mesh,
    rename_axes,
    spec_problems,
    spec_text,
)
from reshard.rules import match_specs
from reshard.store import ArrayStore
from reshard.tree import Path, format_key, format_path


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayHandle:
    """One saved array, not read yet.

    Attributes:
      path: where it is in the tree.
      shape: its shape.
      dtype: the dtype it is read as.
      chunk_shape: shape of the chunks it is stored in.
      sharding: how it is to be laid out, None for host values.
      saved_sharding: how it was laid out when it was saved.
      value_type: what Orbax gives back: `"jax.Array"`, `"np.ndarray"` or `"scalar"`.
      key_impl: the PRNG implementation, if the array is the data of typed PRNG keys.
      stored_dtype: the dtype on disk.
      store: the store that holds it.
      name: its name in the store.
      metadata: its zarr metadata, as stored.
      same_name: the path of another leaf stored under the same name, if there is one: then what
        is stored belongs to one of the two, and nothing says to which.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]
    sharding: Sharding | None
    saved_sharding: Sharding | None
    value_type: str
    key_impl: str | None
    stored_dtype: np.dtype
    store: ArrayStore
    name: str
    metadata: bytes
    same_name: Path | None = None

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self) -> ts.TensorStore:
        """A TensorStore view to read boxes from, of `dtype` and `shape`.

        Raises:
          CorruptCheckpointError: another leaf is stored under the same name.
        """
        if self.same_name is not None:
            raise collision_error([self])
        array = self.store.open_array(self.name, json.loads(self.metadata))
        return array if self.dtype == self.stored_dtype else ts.cast(array, self.dtype)

    def __repr__(self) -> str:
        return f"<{format_path(self.path)}: {describe(self)}>"


# Leaves that a repr lists; `reshard inspect` lists them all.
_SHOWN = 200

Leaf = ArrayHandle | str | dict | list | tuple | None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a checkpoint was opened, and what surrounds its tree.

    Attributes:
      root: the directory that was opened.
      kind: `"item"` (a bare PyTree directory), `"standalone"`, `"step"` or `"manager"`.
      v1: written by Orbax's v1 API.
      step: name of the step's directory below a manager's root, else "".
      item: name of the item's directory below the step, else "".
      steps: committed steps of a manager's root, oldest first.
      items: names of the step's items.
      store: the arrays.
      metadata: the parsed `_METADATA` document, less its tree.
      described: the item had per-array metadata files (PRNG key types are in them).
    """

    root: pathlib.Path
    kind: str
    v1: bool
    step: str
    item: str
    steps: tuple[int, ...]
    items: tuple[str, ...]
    store: ArrayStore
    metadata: dict[str, Any]
    described: bool

    @property
    def format(self) -> str:
        """The on-disk format in words: `OCDBT, zarr2`."""
        layout = "plain files"
        if self.store.ocdbt:
            layout = "OCDBT" if self.store.parts == ("",) else "OCDBT, never merged"
        return f"{layout}, {'zarr3' if self.store.zarr3 else 'zarr2'}"


class Checkpoint(Mapping[Path, Leaf]):
    """A saved tree: path -> `ArrayHandle`, or a small leaf (`str`, `None`, an empty container).

    Iterates in the order of the saved tree. `print()` shows the table.

    Attributes:
      source: where it was opened.
      notes: what transforms did that the user should see, a line each.
      retyped: the tree is no longer the one that was saved (renamed or selected leaves).
    """

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        source: Source,
        notes: tuple[str, ...] = (),
        retyped: bool = False,
    ):
        self._leaves = dict(leaves)
        self.source = source
        self.notes = notes
        self.retyped = retyped

    def __getitem__(self, path: Path | str) -> Leaf:
        key = path if isinstance(path, tuple) else self._by_text.get(path, (path,))
        return self._leaves[key]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    @functools.cached_property
    def _by_text(self) -> dict[str, Path]:
        return {format_path(path): path for path in self._leaves}

    @functools.cached_property
    def arrays(self) -> tuple[ArrayHandle, ...]:
        """The array leaves, in order."""
        return tuple(leaf for leaf in self._leaves.values() if isinstance(leaf, ArrayHandle))

    @functools.cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The distinct meshes of the leaves."""
        named = (a.sharding for a in self.arrays if isinstance(a.sharding, NamedSharding))
        by_identity = {id(sharding.mesh): sharding.mesh for sharding in named}
        return tuple(dict.fromkeys(by_identity.values()))

    @property
    def nbytes(self) -> int:
        """Decoded bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def replace(
        self, leaves: Mapping[Path, Leaf], *, notes: Sequence[str] = (), retyped: bool = False
    ) -> "Checkpoint":
        """A checkpoint of other leaves from the same source."""
        if retyped and not self.retyped and "value_metadata_tree" in self.source.metadata:
            notes = (
                *notes,
                "the record of which containers were tuples, namedtuples or classes "
                "is left out: it describes the tree that was saved",
            )
        return Checkpoint(leaves, self.source, (*self.notes, *notes), self.retyped or retyped)

    def __repr__(self) -> str:
        shown = list(self.items())[:_SHOWN]
        lines = [f"Checkpoint({self.source.root}, {len(self)} leaves, {self.nbytes} bytes)"]
        lines += [f"  {format_path(path)}  {describe(leaf)}" for path, leaf in shown]
        more = len(self) - len(shown)
        return "\n".join(lines + [f"  ... and {more} more"] * (more > 0))


def describe(leaf: Leaf) -> str:
    """A leaf in a few words: `float32[16,24] P('data', None)`, `'text'`, `{}`."""
    if not isinstance(leaf, ArrayHandle):
        return repr(leaf)
    text = f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"
    if isinstance(leaf.sharding, NamedSharding):
        text += f" {format_spec(leaf.sharding.spec)}"
    return text


def collision_error(handles: Sequence[ArrayHandle]) -> CorruptCheckpointError:
    """The error for leaves whose stored array may belong to another leaf."""
    return CorruptCheckpointError(
        "two leaves were saved under one name, so one of them has overwritten the other",
        [
            f"{format_path(h.path)} and {format_path(h.same_name or ())} are both stored as "
            f"`{h.name}`"
            for h in handles
        ],
        [
            f"drop both: --drop '{format_path(h.path)}' --drop '{format_path(h.same_name or ())}'"
            for h in handles[:1]
        ],
    )


def select(
    ckpt: Checkpoint, patterns: str | Sequence[str] = "**", *, drop: str | Sequence[str] = ()
) -> Checkpoint:
    """The leaves that some glob of `patterns` matches and none of `drop` does.

    Raises:
      TreeMismatchError: a glob matches nothing, nothing is left, or a list would lose positions.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    drop = [drop] if isinstance(drop, str) else list(drop)
    kept = tree.match_globs(ckpt, patterns)
    dropped = tree.match_globs(ckpt, drop)
    leaves = {}
    for path, leaf in ckpt.items():
        if path not in kept or path in dropped:
            continue
        if isinstance(leaf, ArrayHandle) and leaf.same_name in dropped:
            raise collision_error([leaf])
        leaves[path] = leaf
    if not leaves:
        raise TreeMismatchError("no leaf is left", [f"`{p}` is dropped" for p in drop])
    tree.check_lists(leaves)
    return ckpt.replace(leaves, retyped=len(leaves) < len(ckpt))


def rename(ckpt: Checkpoint, rules: Sequence[tuple[str, str]]) -> Checkpoint:
    """Leaves under new paths: (regex, replacement) pairs applied in order to the printed path.

    Raises:
      TreeMismatchError: see `reshard.tree.rename_paths`; also two arrays that would be stored
        under one name.
    """
    new_paths = tree.rename_paths(tuple(ckpt), rules)
    leaves: dict[Path, Leaf] = {}
    for old, leaf in ckpt.items():
        new = new_paths[old]
        if isinstance(leaf, ArrayHandle) and new != old:
            leaf = dataclasses.replace(leaf, path=new)
        leaves[new] = leaf
    tree.check_lists(leaves)
    names: dict[str, Path] = {}
    problems = []
    for path in leaves:
        other = names.setdefault(stored_name(path), path)
        if other != path and new_paths.get(path) != path:
            problems.append(
                f"{format_path(other)} and {format_path(path)} -> `{stored_name(path)}`"
            )
    if problems:
        raise TreeMismatchError("two leaves would be stored under one name", problems)
    return ckpt.replace(leaves, retyped=set(leaves) != set(ckpt))


def stored_name(path: Path) -> str:
    """The name that Orbax stores a leaf under: its keys joined with `.`."""
    return ".".join(map(str, path))


def cast(ckpt: Checkpoint, dtype: Any, where: str | Sequence[str] = "**") -> Checkpoint:
    """Floating-point arrays in another floating-point dtype, rounded to nearest even.

    Args:
      dtype: a floating-point dtype or its name (`"bfloat16"`).
      where: globs; of the leaves they match, floating-point arrays are cast. Integers, PRNG keys
        and Python scalars stay as they are.

    Raises:
      TreeMismatchError: the dtype is not floating-point, or nothing would be cast.
    """
    new = parse_dtype(dtype)
    if not is_floating(new):
        raise TreeMismatchError(
            f"cast to {new.name}: only floating-point arrays are cast, to floating-point dtypes",
            hints=["`bfloat16`, `float16`, `float32`, `float8_e4m3fn`"],
        )
    patterns = [where] if isinstance(where, str) else list(where)
    leaves = dict(ckpt)
    count = 0
    for path in tree.match_globs(ckpt, patterns):
        leaf = leaves[path]
        if not isinstance(leaf, ArrayHandle) or leaf.value_type == "scalar":
            continue
        if is_floating(leaf.dtype):
            leaves[path] = dataclasses.replace(leaf, dtype=new)
            count += 1
    if not count:
        raise TreeMismatchError(
            "no floating-point array to cast", [f"`{p}` matches none" for p in patterns]
        )
    return ckpt.replace(leaves)


def parse_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype from its name; JAX's own (`bfloat16`, `float8_*`, `int4`) among them."""
    if isinstance(dtype, str) and hasattr(ml_dtypes, dtype):
        dtype = getattr(ml_dtypes, dtype)
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise TreeMismatchError(
            f"not a dtype: {dtype!r}", hints=["`bfloat16`, `float16`, `float32`"]
        ) from error


def is_floating(dtype: np.dtype) -> bool:
    """Whether a dtype is floating-point, JAX's own included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def to_mesh(
    ckpt: Checkpoint,
    mesh: Any,
    specs: Sequence[tuple[str, Any]] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Every device array laid out on `mesh`.

    The saved spec is projected by axis name. Arrays saved from a single device become replicated,
    and a note says which. Host values stay on the host: Python scalars always, numpy arrays
    unless a spec of `specs` matches them.

    Args:
      mesh: any form that `reshard.mesh.parse_mesh` takes; no devices are needed.
      specs: ordered (path regex, partition spec) pairs that override the saved specs; the first
        match wins.
      axes: saved axis name -> axis of `mesh`, or `""` to replicate.

    Raises:
      ShardingError: every leaf whose spec does not fit, with what to type for each.
    """
    target = parse_mesh(mesh, ckpt.meshes)
    if target.device_ids is None:
        target = dataclasses.replace(target, device_ids=tuple(range(target.size)))
    if target.axis_types is None:
        target = dataclasses.replace(target, axis_types=_carried_types(target, ckpt.meshes))
    axes = dict(axes or {})
    _check_axes(axes, target, ckpt.meshes)
    candidates = [a.path for a in ckpt.arrays if a.value_type != "scalar"]
    chosen = match_specs(candidates, list(specs or ()))
    leaves = dict(ckpt)
    problems, misfits, replicated = [], [], []
    for array in ckpt.arrays:
        spec = chosen.get(array.path)
        if spec is None and array.sharding is None and array.value_type != "jax.Array":
            continue
        saved = array.sharding
        if spec is None:
            spec = rename_axes(saved.spec, axes) if isinstance(saved, NamedSharding) else ()
            if isinstance(saved, SingleDeviceSharding):
                replicated.append(array)
        found = spec_problems(array.shape, target, spec)
        text = f"{format_path(array.path)}  {array.dtype.name}{list(array.shape)}: "
        problems += [text + problem for problem in found]
        if found:
            misfits.append((array, spec))
        leaves[array.path] = dataclasses.replace(
            array, sharding=NamedSharding(target, spec), value_type="jax.Array"
        )
    if problems:
        raise ShardingError(
            f"specs that do not fit the mesh `{target}`",
            problems,
            _spec_hints(ckpt.arrays, misfits, target),
        )
    notes = []
    if replicated:
        nbytes = sum(a.nbytes for a in replicated)
        names = ", ".join(format_path(a.path) for a in replicated[:3])
        more = ", ..." if len(replicated) > 3 else ""
        notes.append(
            f"{len(replicated)} leaves saved on a single device are replicated on the new mesh "
            f"({nbytes} bytes a device): {names}{more}"
        )
    return ckpt.replace(leaves, notes=notes)


def _carried_types(target: Mesh, saved: Sequence[Mesh]) -> tuple[str, ...] | None:
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
    arrays: Sequence[ArrayHandle], misfits: Sequence[tuple[ArrayHandle, Spec]], target: Mesh
) -> list[str]:
    """What to type: for axes that the mesh lacks, and specs that fit, one for each last key if all
    its leaves agree, else one for each leaf."""
    axes = {axis for _, spec in misfits for entry in spec for axis in entry}
    lacking = sorted(axes - set(target.axis_names))
    new = next((name for name in target.axis_names if name not in axes), "NEW")
    hints = [f"--axis {axis}= replicates, --axis {axis}={new} renames" for axis in lacking]
    fitting = {
        array.path: spec_text(_fitting_spec(array.shape, spec, target))
        for array, spec in misfits
        if not any(axis in lacking for entry in spec for axis in entry)
    }
    by_key: dict[str, set[str | None]] = {}
    for array in arrays:
        by_key.setdefault(_last_key(array.path), set()).add(fitting.get(array.path))
    for path, text in fitting.items():
        key = _last_key(path)
        whole = len(by_key[key]) > 1
        regex = f"^{re.escape(format_path(path))}$" if whole else f"(^|/){re.escape(key)}$"
        hints.append(f"--spec '{regex}={text}' fits")
    return hints


def _last_key(path: Path) -> str:
    return format_key(path[-1]) if path else ""


def _fitting_spec(shape: Sequence[int], spec: Spec, target: Mesh) -> Spec:
    """`spec` less the axes that do not divide their dimension or are used already."""
    used: set[str] = set()
    result = []
    for size, entry in zip(shape, spec, strict=False):
        kept: list[str] = []
        for axis in entry:
            parts = math.prod(target.shape[a] for a in (*kept, axis))
            if axis not in used and size % parts == 0:
                kept.append(axis)
                used.add(axis)
        result.append(tuple(kept))
    return tuple(result)
