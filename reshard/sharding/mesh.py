"""Meshes and partition specs without devices: parsing, projection, shard shapes, pictures.

A mesh here is names and sizes (and the device ids, where they are known); a partition spec is a
tuple with, for each dimension, the tuple of mesh axes that split it, major axis first.
"""

import ast
import dataclasses
import functools
import itertools
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import ShardingError

Shape = tuple[int, ...]
Spec = tuple[tuple[str, ...], ...]

# Above this many devices their ids are not written down: readers then take them in order.
MAX_DEVICE_IDS = 256
_MAX_DEVICES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh of devices.

    Attributes:
      axis_names: name of each axis, major axis first.
      axis_sizes: devices along each axis.
      axis_types: `"Auto"`, `"Explicit"` or `"Manual"` for each axis, or None where unknown.
      device_ids: ids of the devices in row-major order, or None for 0, 1, 2, ...
    """

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

    def __str__(self) -> str:
        pairs = zip(self.axis_names, self.axis_sizes, strict=True)
        return ",".join(f"{name}={size}" for name, size in pairs)


@dataclasses.dataclass(frozen=True)
class NamedSharding:
    """How an array is laid out: `spec` over the axes of `mesh`. As in `jax.sharding`."""

    mesh: Mesh
    spec: Spec

    @functools.cached_property
    def parts(self) -> tuple[int, ...]:
        """In how many parts each dimension of its spec is divided."""
        sizes = self.mesh.shape
        return tuple(math.prod(sizes[axis] for axis in entry) for entry in self.spec)


@dataclasses.dataclass(frozen=True)
class SingleDeviceSharding:
    """An array saved from one device, named by `device` as Orbax wrote it (`"cpu:0"`)."""

    device: str


Sharding = NamedSharding | SingleDeviceSharding


def parse_mesh(mesh: Any, saved: Iterable[Mesh] = ()) -> Mesh:
    """Any form of mesh that the API and the command line accept.

    Args:
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`, a `Mesh`, a dict `{"data": 1, "model": 8}`, a
        string `"data=1,model=8"`, or the short form `"1x8"`.
      saved: the checkpoint's own meshes, from which the short form takes its axis names.

    Raises:
      ShardingError: it is none of these, or the short form has no axis names to take.
    """
    if isinstance(mesh, Mesh):
        return _checked(mesh)
    if isinstance(mesh, str):
        mesh = mesh.strip()
        if re.fullmatch(r"\d+(x\d+)*", mesh):
            return _short_form(mesh, list(saved))
        return _checked(_long_form(mesh))
    if isinstance(mesh, Mapping):
        sizes = tuple(mesh.values())
        whole = all(isinstance(s, numbers.Integral) and not isinstance(s, bool) for s in sizes)
        if whole and all(isinstance(name, str) for name in mesh):
            return _checked(Mesh(tuple(mesh), tuple(map(int, sizes))))
    elif hasattr(mesh, "axis_names") and hasattr(mesh, "axis_sizes"):
        return _checked(_from_jax(mesh))
    raise ShardingError(
        f"not a mesh: {mesh!r}",
        hints=["a mesh is `data=1,model=8`, `1x8`, a dict, or a jax Mesh or AbstractMesh"],
    )


def _from_jax(mesh: Any) -> Mesh:
    types = getattr(mesh, "axis_types", None)
    try:
        devices = mesh.devices
    except (AttributeError, ValueError):  # an AbstractMesh has none, and says so
        devices = None
    return Mesh(
        tuple(map(str, mesh.axis_names)),
        tuple(map(int, mesh.axis_sizes)),
        tuple(str(t).rpartition(".")[2] for t in types) if types else None,
        tuple(int(d.id) for d in devices.flat) if devices is not None else None,
    )


def _long_form(text: str) -> Mesh:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and size.strip().isdecimal() for name, _, size in pairs):
        raise ShardingError(
            f"not a mesh: `{text}`", hints=["a mesh is `data=1,model=8`, or `1x8` for short"]
        )
    return Mesh(tuple(n.strip() for n, _, _ in pairs), tuple(int(s) for _, _, s in pairs))


def _short_form(text: str, saved: list[Mesh]) -> Mesh:
    sizes = tuple(map(int, text.split("x")))
    names = {mesh.axis_names for mesh in saved}
    if len(names) == 1 and len(next(iter(names))) == len(sizes):
        return _checked(Mesh(next(iter(names)), sizes))
    if not names:
        reason = "and none was saved"
    elif len(names) > 1:
        reason = "and they do not agree on them"
    else:
        reason = f"which have {len(next(iter(names)))}, not {len(sizes)}"
    known = next(iter(names)) if len(names) == 1 else ()
    filled = dict(zip(known, (1,) * max(len(known) - len(sizes), 0) + sizes, strict=False))
    filled |= {f"axis{i}": size for i, size in enumerate(sizes) if i >= len(known)}
    raise ShardingError(
        f"`{text}` takes its axis names from the saved meshes, {reason}",
        sorted({str(mesh) for mesh in saved}),
        [f"write the axes out: `{','.join(f'{n}={s}' for n, s in filled.items())}`"],
    )


def _checked(mesh: Mesh) -> Mesh:
    names, sizes = mesh.axis_names, mesh.axis_sizes
    if len(set(names)) < len(names):
        raise ShardingError(f"the mesh `{mesh}` names an axis twice")
    if not names or min(sizes) < 1:
        raise ShardingError(f"every axis of the mesh `{mesh}` needs at least one device")
    if mesh.size > _MAX_DEVICES:
        raise ShardingError(f"the mesh `{mesh}` has {mesh.size} devices: no machine does")
    return mesh


def normalize_spec(spec: Any) -> Spec:
    """A partition spec as a tuple of tuples of axis names.

    Accepts a `jax.sharding.PartitionSpec`, a sequence of `None`, names and sequences of names, or
    text: axes of each dimension separated by `,`, several axes of one dimension joined by `+`,
    nothing or `None` for an unsharded dimension (`"data,model"`, `"data+model,"`, `""`).
    """
    if isinstance(spec, str):
        if not spec.strip():
            return ()
        if spec.startswith("P(") and spec.endswith(")"):
            return normalize_spec(_literal(spec))
        dims = [part.strip() for part in spec.split(",")]
        return tuple(
            tuple(a.strip() for a in dim.split("+")) if dim not in ("", "None") else ()
            for dim in dims
        )
    result = []
    if spec is not None and not isinstance(spec, Iterable):
        raise ShardingError(f"not a partition spec: {spec!r}")
    for entry in () if spec is None else spec:
        if entry is None:
            result.append(())
        elif isinstance(entry, str):
            result.append((entry,))
        elif isinstance(entry, Sequence) and all(isinstance(axis, str) for axis in entry):
            result.append(tuple(entry))
        else:
            raise ShardingError(f"not a partition spec: {spec!r}")
    return tuple(result)


def _literal(text: str) -> tuple[Any, ...]:
    """`P(None, 'model')`, as specs are printed."""
    try:
        inside = text[2:-1].strip()
        return ast.literal_eval(f"({inside},)") if inside else ()
    except (ValueError, SyntaxError) as error:
        raise ShardingError(f"not a partition spec: {text}") from error


def spec_entries(spec: Spec) -> tuple[str | tuple[str, ...] | None, ...]:
    """The arguments of `jax.sharding.PartitionSpec`: None, one axis, or a tuple of several."""
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)


def format_spec(spec: Spec) -> str:
    """A spec in the notation of `jax.sharding.PartitionSpec`: `P('data', ('x', 'y'), None)`."""
    return f"P({', '.join(map(repr, spec_entries(spec)))})"


def spec_text(spec: Spec) -> str:
    """A spec as it is typed on the command line; the inverse of `normalize_spec` on text."""
    return ",".join("+".join(axes) for axes in spec)


def rename_axes(spec: Spec, axes: Mapping[str, str]) -> Spec:
    """`spec` with mesh axes renamed; an axis mapped to `""` is left out (replicates)."""
    return tuple(tuple(axes.get(a, a) for a in entry if axes.get(a, a)) for entry in spec)


def spec_problems(shape: Sequence[int], mesh: Mesh, spec: Spec) -> list[str]:
    """Why `spec` cannot lay an array of `shape` out on `mesh`; empty if it can."""
    problems = []
    if len(spec) > len(shape):
        problems.append(f"{format_spec(spec)} has {len(spec)} dimensions, the array {len(shape)}")
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
            problems.append(f"dimension {dim} of {size} does not divide by {parts} ({names})")
    return problems


def fitting_spec(shape: Sequence[int], mesh: Mesh, spec: Spec) -> Spec:
    """`spec` less the axes that the mesh lacks, that do not divide, or that are used already."""
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
    """A sharding as JSON documents have it: `mesh` and `spec`, or `device`."""
    if isinstance(sharding, NamedSharding):
        return {"mesh": sharding.mesh.shape, "spec": [list(axes) for axes in sharding.spec]}
    device = sharding and {"device": sharding.device}
    return {"mesh": None, "spec": None, **(device or {})}


def replicated(sharding: Sharding | None) -> Sharding | None:
    """On the same devices, in full on each of them."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, ())
    return sharding


def shard_shape(shape: Sequence[int], sharding: Sharding | None) -> tuple[int, ...]:
    """The shape of one device's part of an array; the array's own without a sharding."""
    if not isinstance(sharding, NamedSharding):
        return tuple(shape)
    parts = sharding.parts + (1,) * (len(shape) - len(sharding.parts))
    return tuple([size // part for size, part in zip(shape, parts, strict=True)])


def shard_owners(shape: Sequence[int], sharding: NamedSharding) -> dict[tuple[int, ...], list[int]]:
    """Which device ids hold which shard: index of the shard in each dimension -> ids, in order.

    The number of entries is the number of distinct shards; the lists hold all devices together.
    """
    mesh = sharding.mesh
    ids = mesh.device_ids or range(mesh.size)
    owners: dict[tuple[int, ...], list[int]] = {}
    for device, places in zip(ids, itertools.product(*map(range, mesh.axis_sizes)), strict=True):
        position = dict(zip(mesh.axis_names, places, strict=True))
        index = [0] * len(shape)
        for dim, entry in enumerate(sharding.spec):
            for axis in entry:
                index[dim] = index[dim] * mesh.shape[axis] + position[axis]
        owners.setdefault(tuple(index), []).append(device)
    return owners
