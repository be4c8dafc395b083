"""The leaves of a page. Each key, layout and mesh is written once. Pure.

The page stays small for any number of devices: a layout is a shape, dtype, spec and chunks, and
leaves refer to it by number; a mesh is the sizes of its axes.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.report.outline import NUMBERED, folded_name
from reshard.tree import format_key, natural

Document = Mapping[str, Any]
# Parts of a state, by the keys above them.
PARTS = ("params", "optimizer state", "other")
# Shares of a device's bytes from which replication is shown in amber, and in red.
_MUCH, _MOST = 0.1, 0.5
_MAX_IDS = 4096  # devices of a mesh whose ids are written


class Leaves:
    """The leaves of a page."""

    def __init__(self, sides: Sequence[str], meshes: Sequence[Document], ids: Sequence[Any]):
        # Names of the layouts of each leaf, such as before and after. The page is about the last.
        self.sides = list(sides)
        self.arrays = self.nbytes = self.without_mesh = 0  # `without_mesh`: a number of arrays
        self.replicated: list[int] = []  # bytes of each leaf that every device holds in full
        self._meshes: dict[str, dict[str, Any]] = {}
        for mesh, devices in zip(meshes, ids, strict=True):
            if devices is not None and len(devices) > _MAX_IDS:
                devices = False
            elif devices == list(range(math.prod(mesh.values()))):
                devices = None
            entry = self._meshes.setdefault(_name(mesh), {"axes": [*mesh.items()], "ids": devices})
            if entry["ids"] != devices:  # two meshes of one shape: ids are ambiguous
                entry["ids"] = False
        self._folders: dict[tuple[str, ...], int] = {(): 0}
        self._layouts: dict[Any, int] = {}
        self._leaves: list[list[Any]] = []
        self._held = [collections.Counter[tuple[str, str]]() for _ in sides]

    def add(self, keys: Sequence[Any], leaf: Document, sides: Sequence[Document]) -> None:
        """Adds a leaf with its layout on each side."""
        # Without a mesh, the part that a device reads is unknown.
        has_mesh = leaf.get("mesh") is not None
        amplification = leaf.get("read_amplification") if has_mesh else None
        layout = [
            *(leaf.get("shape"), leaf.get("bytes"), leaf.get("dtype") or leaf.get("type")),
            [*amplification.values()] if amplification else None,
            *(leaf.get("moved"), leaf.get("source")),
            [
                [
                    None if side.get("mesh") is None else self._mesh(side["mesh"]),
                    *(side.get(name) for name in ("spec", "chunk_shape", "device")),
                ]
                for side in sides
            ],
        ]
        number = self._layouts.setdefault(_frozen(layout), len(self._layouts))
        self._leaves.append([*self.place([*map(format_key, keys)]), number])
        if leaf.get("shape") is not None:
            self._count(keys, leaf, sides)

    def _count(self, keys: Sequence[Any], leaf: Document, sides: Sequence[Document]) -> None:
        nbytes = leaf.get("bytes")
        self.arrays += 1
        self.nbytes += nbytes or 0
        for held, side in zip(self._held, sides, strict=True):
            if side.get("mesh") is not None and nbytes is not None:
                own = _shard_bytes(leaf["shape"], side.get("bytes", nbytes), side)
                held[_name(side["mesh"]), part_of(keys)] += own
        side = sides[-1]
        if side.get("mesh") is None:
            self.without_mesh += 1
        elif math.prod(_parts(side)) == 1 < math.prod(side["mesh"].values()):
            self.replicated.append(nbytes or 0)

    def place(self, texts: Sequence[str]) -> list[Any]:
        """A path of printed keys, as the number of its folder and its last key."""
        for end in range(1, len(texts)):
            self._folders.setdefault(tuple(texts[:end]), len(self._folders))
        return [self._folders[tuple(texts[:-1])], texts[-1] if texts else "."]

    def meshes_of(self, side: int) -> str:
        """The names of a side's meshes; empty without any."""
        names = list(self._meshes)
        used = dict.fromkeys(sides[side][0] for *_, sides in self._layouts)
        return "; ".join(names[number] for number in used if number is not None)

    def most_held(self, side: int) -> int | None:
        """Bytes of a side on the device that holds the most. None without a mesh."""
        held = collections.Counter[str]()
        for (name, _), nbytes in self._held[side].items():
            held[name] += nbytes
        return max(held.values(), default=None)

    @property
    def share(self) -> float:
        """The share of a device's bytes that every device holds in full."""
        return sum(self.replicated) / (self.most_held(-1) or 1)

    @property
    def tone(self) -> str:
        """`"warn"` or `"bad"` for a large share, or ""."""
        return "bad" if self.share >= _MOST else "warn" if self.share >= _MUCH else ""

    def folds(self, leaves: Iterable[tuple[int, str, Any]]) -> list[list[Any]]:
        """Levels that differ only in the number at the end of their names, folded as by
        `inspect --tree`: the common name, and the folders' numbers. `leaves`: for each the number
        of its folder, its last key, and a kind, which is equal for leaves that are alike."""
        inside = collections.defaultdict[int, list[tuple[str, str]]](list)
        for level, key, kind in leaves:
            inside[level].append((key, str(kind)))
        kinds: dict[Any, int] = {}
        groups: dict[Any, list[tuple[int, int]]] = {}
        for keys, level in reversed(self._folders.items()):
            if not keys or level not in inside:
                continue
            kind = kinds.setdefault(tuple(sorted(inside[level])), len(kinds))
            above = self._folders[keys[:-1]]
            inside[above].append((keys[-1], f"/{kind}"))
            if match := NUMBERED.fullmatch(keys[-1]):
                groups.setdefault((above, match[1], kind), []).append((int(match[2]), level))
        several = ((key[1], sorted(each)) for key, each in groups.items() if len(each) > 1)
        return [[folded_name(name, [n for n, _ in e]), [at for _, at in e]] for name, e in several]

    def data(self) -> dict[str, Any]:
        """All leaves as JSON."""
        names = list(self._folders)
        return {
            "folds": self.folds((level, key, kind) for level, key, kind in self._leaves),
            "sides": self.sides,
            "replicated": self.tone if self.sides else "",
            "meshes": [{"name": name, **mesh} for name, mesh in self._meshes.items()],
            "layouts": list(self._layouts),
            "folders": [[self._folders[keys[:-1]], keys[-1]] for keys in self._folders if keys],
            "leaves": sorted(self._leaves, key=lambda leaf: natural((*names[leaf[0]], leaf[1]))),
            "held": [
                [[n, [held[n, part] for part in PARTS]] for n in dict.fromkeys(n for n, _ in held)]
                for held in self._held
            ],
        }

    def _mesh(self, mesh: Document) -> int:
        self._meshes.setdefault(_name(mesh), {"axes": [*mesh.items()], "ids": False})
        return list(self._meshes).index(_name(mesh))


def _parts(side: Document) -> list[int]:
    """The number of parts of each dimension of a leaf with a mesh."""
    return [math.prod(side["mesh"].get(axis, 1) for axis in axes) for axes in side["spec"]]


def _shard_bytes(shape: Sequence[int], nbytes: int, side: Document) -> int:
    parts = itertools.zip_longest(shape, _parts(side)[: len(shape)], fillvalue=1)
    return math.prod(-(-size // n) for size, n in parts) * nbytes // (math.prod(shape) or 1)


def part_of(keys: Sequence[Any]) -> str:
    """The part of a state that a leaf belongs to, by its keys."""
    if "opt_state" in keys or ("optimizer" in keys and "model" not in keys):
        return "optimizer state"
    return "params" if "params" in keys or "model" in keys else "other"


def _name(mesh: Document) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
