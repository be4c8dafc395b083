"""Meshes and partition specs without devices: parsing, projection, shard shapes, pictures.

A mesh here is names and sizes, and device ids if they are known. A partition spec is a tuple with
one entry for each dimension: the tuple of mesh axes that split it, major axis first.
"""

import ast
import collections
import dataclasses
import functools
import itertools
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import ShardingError
from reshard.tree import natural

Shape = tuple[int, ...]
Spec = tuple[tuple[str, ...], ...]

# For more devices their ids are not written, and readers assume their order.
MAX_DEVICE_IDS = 256
_MAX_DEVICES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh of devices, major axis first; `axis_types` are `"Auto"`, `"Explicit"` or
    `"Manual"`, and `device_ids` in row-major order, None for 0, 1, 2, ..."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_types: tuple[str, ...] | None = None
    device_ids: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.axis_sizes)

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Axis name -> devices along it."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def split_axes(self) -> dict[str, int]:
        """The axes larger than 1."""
        return {name: size for name, size in self.shape.items() if size > 1}

    def __str__(self) -> str:
        pairs = zip(self.axis_names, self.axis_sizes, strict=True)
        return ",".join(f"{name}={size}" for name, size in pairs)


@dataclasses.dataclass(frozen=True)
class NamedSharding:
    """An array's layout: `spec` over the axes of `mesh`, as in `jax.sharding`."""

    mesh: Mesh
    spec: Spec

    @functools.cached_property
    def parts(self) -> tuple[int, ...]:
        """The number of parts of each dimension of its spec."""
        sizes = self.mesh.shape
        return tuple(math.prod(sizes[axis] for axis in entry) for entry in self.spec)


@dataclasses.dataclass(frozen=True)
class SingleDeviceSharding:
    """An array saved from one device, named by `device` as Orbax wrote it (`"cpu:0"`)."""

    device: str


Sharding = NamedSharding | SingleDeviceSharding


def parse_mesh(mesh: Any, saved: Iterable[Mesh] = ()) -> Mesh:
    """Parse any form of mesh that the API and the command line accept.

    Args:
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`, a `Mesh`, a dict `{"data": 1, "model": 8}`, a
        string `"data=1,model=8"`, or the short form `"1x8"`.
      saved: the checkpoint's own meshes. The short form takes its axis names from them: of all
        axes, or of those that are larger than 1. Text and dicts keep the axes of size 1 that they
        do not name.

    Raises:
      ShardingError: it is none of these, or the saved meshes do not name the axes of the short
        form.
    """
    saved = list(saved)
    if isinstance(mesh, str):
        mesh = mesh.strip()
        if re.fullmatch(r"\d+(x\d+)*", mesh):
            return _short_form(mesh, saved)
        pairs = [part.partition("=") for part in mesh.split(",")]
        if all(name.strip() and size.strip().isdecimal() for name, _, size in pairs):
            names = tuple(name.strip() for name, _, _ in pairs)
            return _with_unnamed(Mesh(names, tuple(int(size) for _, _, size in pairs)), saved)
    elif isinstance(mesh, Mapping):
        if all(isinstance(name, str) and _is_count(size) for name, size in mesh.items()):
            return _with_unnamed(Mesh(tuple(mesh), tuple(map(int, mesh.values()))), saved)
    elif hasattr(mesh, "axis_names") and hasattr(mesh, "axis_sizes"):
        return _checked(mesh if isinstance(mesh, Mesh) else _from_jax(mesh))
    given = f"`{mesh}`" if isinstance(mesh, str) else repr(mesh)
    hint = "a mesh is `data=1,model=8`, or `1x8` for short"
    raise ShardingError(f"not a mesh: {given}", hints=[hint])


def _is_count(size: Any) -> bool:
    return isinstance(size, numbers.Integral) and not isinstance(size, bool)


def _from_jax(mesh: Any) -> Mesh:
    types = getattr(mesh, "axis_types", None)
    try:
        devices = mesh.devices
    except (AttributeError, ValueError):  # an AbstractMesh
        devices = None
    return Mesh(
        tuple(map(str, mesh.axis_names)),
        tuple(map(int, mesh.axis_sizes)),
        tuple(str(t).rpartition(".")[2] for t in types) if types else None,
        tuple(int(d.id) for d in devices.flat) if devices is not None else None,
    )


def _short_form(text: str, saved: Sequence[Mesh]) -> Mesh:
    sizes, every = tuple(map(int, text.split("x"))), largest_sizes(saved)

    def named(axes: Sequence[str]) -> Mesh:
        found = dict.fromkeys(every, 1) | dict(zip(axes, sizes, strict=True))
        return Mesh(tuple(found), tuple(found.values()))

    larger = [name for name in every if every[name] > 1]
    agree = len({mesh.axis_names for mesh in saved}) == 1
    for axes in (larger, [*every]):
        if agree and len(axes) == len(sizes):
            return _checked(named(axes))
    reason = f"but they have {len(every)} axes, not {len(sizes)}"
    if not agree:
        reason = "but these have different axes" if saved else "but no mesh was saved"
    names = larger if len(larger) >= len(sizes) else [*every]
    names = names or ["data", "model"][: len(sizes)]
    names += [f"axis{i}" for i in range(len(names), len(sizes))]
    raise ShardingError(
        f"the mesh `{text}` takes its axis names from the saved meshes, {reason}",
        sorted({str(mesh) for mesh in saved}, key=lambda mesh: natural((mesh,))),
        [f"name the axes: `{named(names[-len(sizes) :])}`"],
    )


def _with_unnamed(mesh: Mesh, saved: Sequence[Mesh]) -> Mesh:
    """`mesh` with the saved axes of size 1 that it does not name."""
    _checked(mesh)
    sizes = largest_sizes(saved).items()
    unnamed = tuple(name for name, size in sizes if size == 1 and name not in mesh.axis_names)
    return Mesh(unnamed + mesh.axis_names, (1,) * len(unnamed) + mesh.axis_sizes)


def largest_sizes(meshes: Iterable[Mesh]) -> dict[str, int]:
    """Axis name -> its largest size in all meshes."""
    sizes: dict[str, int] = {}
    for name, size in (each for mesh in meshes for each in mesh.shape.items()):
        sizes[name] = max(size, sizes.get(name, 1))
    return sizes


def _checked(mesh: Mesh) -> Mesh:
    names, sizes = mesh.axis_names, mesh.axis_sizes
    if len(set(names)) < len(names):
        raise ShardingError(f"the mesh `{mesh}` names an axis twice")
    if not names or min(sizes) < 1:
        raise ShardingError(f"every axis of the mesh `{mesh}` needs at least one device")
    if mesh.size > _MAX_DEVICES:
        text = f"the mesh `{mesh}` has {mesh.size} devices, more than {_MAX_DEVICES}"
        raise ShardingError(text)
    return mesh


def normalize_spec(spec: Any) -> Spec:
    """A partition spec as a tuple of tuples of axis names.

    Accepts a `jax.sharding.PartitionSpec`, a sequence of `None`, names and sequences of names, or
    text: dimensions separated by `,`, the axes of one dimension joined by `+`, nothing or `None`
    for an unsharded dimension (`"data,model"`, `"data+model,"`, `""`). Text may also be a printed
    spec: `"P(None, 'model')"`, `"PartitionSpec(None, 'model')"`.
    """
    given = spec
    if isinstance(spec, str):
        spec = spec.strip()
        if printed := re.fullmatch(r"(?:P|PartitionSpec)\((.*?),?\s*\)", spec, re.DOTALL):
            try:
                spec = ast.literal_eval(f"[{printed[1]}]")
            except (ValueError, SyntaxError) as error:
                raise _not_a_spec(given) from error
        else:
            dims = [dim.strip() for dim in spec.split(",")] if spec else []
            names = [[axis.strip() for axis in dim.split("+")] for dim in dims]
            spec = [axes if axes not in ([""], ["None"]) else () for axes in names]
    if spec is not None and not isinstance(spec, Iterable):
        raise _not_a_spec(given)
    result = []
    for entry in spec or ():
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
            raise _not_a_spec(given)
        result.append(tuple(axes))
    return tuple(result)


def _not_a_spec(given: Any) -> ShardingError:
    hint = "a spec is `data,model`, or as JAX prints it: `P('data', 'model')`"
    return ShardingError(f"not a partition spec: {given!r}", hints=[hint])


def spec_entries(spec: Spec) -> tuple[str | tuple[str, ...] | None, ...]:
    """The arguments of `jax.sharding.PartitionSpec`: None, one axis, or a tuple of several."""
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)


def format_spec(spec: Spec) -> str:
    """A spec in the notation of `jax.sharding.PartitionSpec`: `P('data', ('x', 'y'), None)`."""
    return f"P({', '.join(map(repr, spec_entries(spec)))})"


def spec_text(spec: Spec) -> str:
    """A spec as text for the command line; the inverse of `normalize_spec`."""
    return ",".join("+".join(axes) for axes in spec)


def rename_axes(spec: Spec, axes: Mapping[str, str]) -> Spec:
    """`spec` with mesh axes renamed, without axes that are mapped to `""`."""
    return tuple(tuple(axes.get(a, a) for a in entry if axes.get(a, a)) for entry in spec)


def spec_problems(shape: Sequence[int], mesh: Mesh, spec: Spec) -> list[str]:
    """The reasons why an array of `shape` cannot have `spec` on `mesh`."""
    problems = []
    if len(spec) > len(shape):
        problems.append(
            f"{format_spec(spec)} is for {len(spec)} dimensions, but the array has {len(shape)}"
        )
    used = [axis for entry in spec for axis in entry]
    for axis in dict.fromkeys(used):
        if axis not in mesh.axis_names:
            problems.append(f"{format_spec(spec)} names axis '{axis}', which `{mesh}` lacks")
        elif used.count(axis) > 1:
            problems.append(f"{format_spec(spec)} uses axis '{axis}' {used.count(axis)} times")
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        parts = math.prod(mesh.shape.get(axis, 1) for axis in entry)
        if size % parts:
            names = "*".join(entry)
            problems.append(f"dimension {dim} has size {size}, not a multiple of {parts} ({names})")
    return problems


def fitting_spec(shape: Sequence[int], mesh: Mesh, spec: Spec) -> Spec:
    """`spec` without axes that the mesh lacks, that do not divide, or that are used before."""
    used: set[str] = set()
    result = []
    for size, entry in zip(shape, spec, strict=False):
        kept: list[str] = []
        for axis in entry:
            parts = math.prod(mesh.shape.get(a, 1) for a in (*kept, axis))
            if axis in mesh.shape and axis not in used and size % parts == 0:
                kept.append(axis)
                used.add(axis)
        result.append(tuple(kept))
    return tuple(result)


def sharding_document(sharding: Sharding | None) -> dict[str, Any]:
    """A sharding as JSON: `mesh` and `spec`, or `device`."""
    if isinstance(sharding, NamedSharding):
        return {"mesh": sharding.mesh.shape, "spec": [list(axes) for axes in sharding.spec]}
    device = {"device": sharding.device} if sharding else {}
    return {"mesh": None, "spec": None, **device}


def replicated(sharding: Sharding | None) -> Sharding | None:
    """A sharding that holds the whole array on each of the same devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, ())
    return sharding


def shard_shape(shape: Sequence[int], sharding: Sharding | None) -> tuple[int, ...]:
    """The shape of the part of an array on one device."""
    if not isinstance(sharding, NamedSharding):
        return tuple(shape)
    parts = sharding.parts + (1,) * (len(shape) - len(sharding.parts))
    return tuple([size // part for size, part in zip(shape, parts, strict=True)])


def shard_owners(shape: Sequence[int], sharding: NamedSharding) -> dict[tuple[int, ...], list[int]]:
    """Index of each distinct shard in each dimension -> ids of the devices that hold it."""
    mesh = sharding.mesh
    ids = mesh.device_ids or range(mesh.size)
    spec = sharding.spec + ((),) * (len(shape) - len(sharding.spec))
    owners: dict[tuple[int, ...], list[int]] = {}
    for device, places in zip(ids, itertools.product(*map(range, mesh.axis_sizes)), strict=True):
        index = [0] * len(spec)
        for dim, axis in ((dim, axis) for dim, entry in enumerate(spec) for axis in entry):
            place = places[mesh.axis_names.index(axis)]
            index[dim] = index[dim] * mesh.shape[axis] + place
        owners.setdefault(tuple(index), []).append(device)
    return owners


def most_held(arrays: Iterable[tuple[Any, Shape, int]]) -> int | None:
    """Bytes on the device that holds the most of some arrays (sharding, shape of a shard, bytes of
    an element); None if no array has a mesh."""
    meshes, devices = collections.Counter[Mesh](), collections.Counter[int]()
    for sharding, shard, itemsize in arrays:
        if isinstance(sharding, NamedSharding):
            meshes[sharding.mesh] += math.prod(shard) * itemsize
    for mesh, nbytes in meshes.items():
        for device in mesh.device_ids or range(mesh.size):
            devices[device] += nbytes
    return max(devices.values(), default=None)
