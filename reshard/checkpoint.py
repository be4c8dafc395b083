"""`Checkpoint`: an immutable, lazy view of a saved tree. Nothing here reads an array."""

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.handle import ArrayHandle, array_text, stored_name
from reshard.errors import ArgumentError, CheckpointFormatError
from reshard.sharding.mesh import Mesh, NamedSharding
from reshard.storage.array_store import ArrayStore
from reshard.storage.identity import Identity
from reshard.storage.location import Location
from reshard.tree import Path, as_python, format_glob, format_path

# Orbax keeps a namedtuple without fields if it records the types of containers.
EmptyNamedTuple = collections.namedtuple("EmptyNamedTuple", ())
# Leaves that a repr lists; `reshard inspect` lists all.
_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class UnknownLeaf:
    """A leaf of a type that only the program that saved it restores."""

    value_type: str

    def __repr__(self) -> str:
        return f"<{self.value_type}>"


Leaf = ArrayHandle | UnknownLeaf | str | dict | list | tuple | None

# Orbax's name of a leaf without a value -> the leaf.
EMPTY_LEAVES: dict[str, Leaf] = {
    "None": None,
    "Dict": {},
    "List": [],
    "Tuple": (),
    "NamedTuple": EmptyNamedTuple(),
}
_EMPTY_NAMES = {type(leaf): name for name, leaf in EMPTY_LEAVES.items()}

# Kinds of items that other programs than Orbax write.
FOREIGN_KINDS = ("safetensors", "msgpack", "zarr")


@dataclasses.dataclass(frozen=True)
class Item:
    """One item, and the directories around it.

    Attributes:
      root: the directory that was opened.
      kind: `"item"` (a bare PyTree directory), `"standalone"`, `"step"`, `"manager"`, or
        one of `FOREIGN_KINDS`.
      v1: written by Orbax's v1 API.
      step: name of the step's directory below a manager's root, else "".
      item: name of the item's directory below the step, else "".
      items: names of the step's items, without `deleted`.
      deleted: name of the item whose deletion has begun and not ended, else "".
      file: name of the msgpack file with all values: in the item's directory, or if Flax wrote it
        as one of several steps, in the root; else "".
      left_out: what the root and the step have beside this item, and was left out: a line each.
      find_steps: returns the committed steps of a root, and those that were never committed. On a
        disk, it looks into each of them.
    """

    root: Location
    kind: str
    v1: bool = False
    step: str = ""
    item: str = ""
    items: tuple[str, ...] = ()
    deleted: str = ""
    file: str = ""
    left_out: tuple[str, ...] = ()
    find_steps: Callable[[], tuple[tuple[int, ...], tuple[int, ...]]] | None = dataclasses.field(
        default=None, compare=False
    )

    @property
    def directory(self) -> Location:
        """The directory of the item, or the file or directory of another program."""
        return self.root / self.file if self.is_foreign else self.root / self.step / self.item

    @property
    def data(self) -> Location:
        """The file or directory that has its values."""
        return self.directory if self.is_foreign else self.directory / self.file

    @property
    def place(self) -> Location:
        """The step, or the file or directory of another program."""
        return self.directory if self.is_foreign else self.root / self.step

    @property
    def steps(self) -> tuple[int, ...]:
        """Committed steps of a root, oldest first."""
        return self.find_steps()[0] if self.find_steps else ()

    @property
    def uncommitted(self) -> tuple[int, ...]:
        """Steps of a manager's root that were never committed."""
        return self.find_steps()[1] if self.find_steps else ()

    @property
    def is_foreign(self) -> bool:
        """Whether another program than Orbax wrote it, and the files beside the arrays."""
        return self.kind in FOREIGN_KINDS

    @property
    def number(self) -> int | None:
        """The step: 100 in `100`, `ckpt_100` and `checkpoint_100`; None for a number that is not
        whole."""
        digits = (self.step or self.file).rpartition("_")[2]
        return int(digits) if digits.isdecimal() else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Item):
    """The item of a checkpoint that was opened.

    Attributes:
      store: the arrays.
      metadata: the parsed `_METADATA` document, without its tree.
      metadata_apart: the item had per-array metadata files (PRNG key types are in them).
      identity: the documents and the data files that it consists of, when it was opened.
      write_shapes: name of an array -> the shape that each process wrote, of those files.
      step_document: the `_CHECKPOINT_METADATA` document of the step, if a transform changed it.
    """

    store: ArrayStore
    metadata: dict[str, Any]
    metadata_apart: bool
    identity: Identity
    write_shapes: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    step_document: Mapping[str, Any] | None = None

    @functools.cached_property
    def folders(self) -> frozenset[str]:
        """Names of the directories in the item's directory that hold its files."""
        return frozenset(file.partition("/")[0] for file in self.identity.files if "/" in file)

    @property
    def path(self) -> Location:
        """The path that opens this tree: the step, and the item of a step with several."""
        return self.place / self.item if len(self.items) > 1 else self.place

    @property
    def format(self) -> str:
        """The on-disk format in words: `OCDBT, zarr2`."""
        if self.store.ranged:
            return "msgpack" if self.file else self.kind
        layout = "plain files"
        if self.store.ocdbt:
            layout = "OCDBT" if self.store.parts == ("",) else "OCDBT, never merged"
        return f"{layout}, {'zarr3' if self.store.zarr3 else 'zarr2'}"


class Checkpoint(Mapping[Path, Leaf]):
    """A saved tree: path -> `ArrayHandle`, or a small leaf (`str`, `None`, an empty container).

    Iterates in the order of the saved tree. `print()` shows the table.

    Attributes:
      source: where it was opened.
      notes: notes of transforms for the user, a line each.
      retyped: the tree differs from the saved one (renamed or selected leaves).
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
        shardings = (array.sharding for array in self.arrays)
        # Hashing a mesh takes as long as it has devices: most leaves have the same object.
        by_identity = {id(s.mesh): s.mesh for s in shardings if isinstance(s, NamedSharding)}
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
            record = "the record of tuples, namedtuples and classes is left out: it describes"
            notes = (*notes, f"{record} the saved tree")
        return Checkpoint(leaves, self.source, (*self.notes, *notes), self.retyped or retyped)

    def with_metadata(self, entries: Mapping[str, Any]) -> "Checkpoint":
        """The same checkpoint with other entries in its `_METADATA` document."""
        return self.with_source(metadata={**self.source.metadata, **entries})

    def with_source(self, **changes: Any) -> "Checkpoint":
        """The same checkpoint with other attributes of its source."""
        source = dataclasses.replace(self.source, **changes)
        return Checkpoint(self._leaves, source, self.notes, self.retyped)

    def document(self, paths: Collection[Path] | None = None) -> dict[str, Any]:
        """The document of `reshard inspect --json`, of all leaves or of some."""
        source = self.source
        leaves = {p: leaf for p, leaf in self.items() if paths is None or p in paths}
        arrays = [leaf for leaf in leaves.values() if isinstance(leaf, ArrayHandle)]
        return {
            "path": str(source.root),
            "kind": source.kind,
            "v1": source.v1,
            "format": source.format,
            "step": source.number,
            "steps": list(source.steps),
            "item": source.item or None,
            "items": list(source.items),
            "meshes": [mesh.shape for mesh in self.meshes],
            "device_ids": [mesh.device_ids and list(mesh.device_ids) for mesh in self.meshes],
            "bytes": sum(array.nbytes for array in arrays),
            "leaves": [_leaf_document(path, leaf) for path, leaf in leaves.items()],
        }

    def _repr_html_(self) -> str:
        from reshard.report.page import framed

        return framed(self)

    def __repr__(self) -> str:
        lines = [f"Checkpoint({self.source.root}, {len(self)} leaves, {self.nbytes} bytes)"]
        shown = itertools.islice(self.items(), _SHOWN)
        lines += [f"  {format_path(path)}  {describe(leaf)}" for path, leaf in shown]
        return "\n".join(lines + [f"  ... and {len(self) - _SHOWN} more"] * (len(self) > _SHOWN))


def check_checkpoints(*given: Any) -> None:
    """Raises ArgumentError for anything that is no `Checkpoint`, such as a path."""
    wrong = [each for each in given if not isinstance(each, Checkpoint)]
    if wrong:
        paths = [os.fspath(each) for each in wrong if isinstance(each, str | os.PathLike)]
        hints = [f"reshard.open({as_python(path)})" for path in paths] or ["reshard.open(path)"]
        text = "this function needs a checkpoint from `reshard.open`"
        raise ArgumentError(text, [f"{each!r:.80}" for each in wrong], hints)


def check_known(leaves: Mapping[Path, Leaf]) -> None:
    """Raises CheckpointFormatError for leaves of unknown types, before leaves are used."""
    unknown = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, UnknownLeaf)}
    if unknown:
        raise CheckpointFormatError(
            "some leaves have a type that only the program that saved them restores",
            [f"{format_path(path)}: {leaf.value_type}" for path, leaf in unknown.items()],
            [f"reshard.select(ckpt, drop={as_python([*map(format_glob, unknown)])})"],
        )


def describe(leaf: Leaf) -> str:
    """A leaf in a few words: `float32[16,24] P('data', None)`, `'text'`, `{}`."""
    return leaf.describe() if isinstance(leaf, ArrayHandle) else repr(leaf)


def kind_text(leaf: Leaf) -> str:
    """A leaf without its layout: `float32[8,4]`, `key<rbg> uint32[4]`, `'text'`, `{}`."""
    if not isinstance(leaf, ArrayHandle):
        return repr(leaf)
    text = array_text(leaf.dtype.name, leaf.shape)
    return text if leaf.key_impl is None else f"key<{leaf.key_impl}> {text}"


def type_name(leaf: Leaf) -> str:
    """The name of the type of a leaf that is no array: `string`, `None`, `empty dict`."""
    if isinstance(leaf, UnknownLeaf):
        return leaf.value_type
    return {str: "string", type(None): "None"}.get(type(leaf), f"empty {type(leaf).__name__}")


def _leaf_document(path: Path, leaf: Leaf) -> dict[str, Any]:
    keys = {"path": format_path(path), "keys": list(path)}
    if isinstance(leaf, ArrayHandle):
        return leaf.document() | keys
    value = None if isinstance(leaf, UnknownLeaf) else leaf
    return keys | {"type": type_name(leaf), "value": value}


def without_value(name: str) -> Leaf:
    """The leaf with Orbax's name for a leaf without a value, or for a type that it does not
    know."""
    return EMPTY_LEAVES[name] if name in EMPTY_LEAVES else UnknownLeaf(name)


def empty_name(leaf: Leaf) -> str:
    """Orbax's name of a leaf without a value."""
    return _EMPTY_NAMES[type(leaf)]


def name_clashes(
    paths: Iterable[Path], is_unchanged: Callable[[Path], bool] = lambda path: False
) -> list[str]:
    """Pairs of leaves that would be stored under one name. Pairs of the source that are unchanged
    (`is_unchanged`) are left out: see `collision_error`."""
    first: dict[str, Path] = {}
    clashes = []
    for path in paths:
        name = stored_name(path)
        other = first.setdefault(name, path)
        if other != path and not (is_unchanged(other) and is_unchanged(path)):
            clashes.append(f"{format_path(other)} and {format_path(path)} -> `{name}`")
    return clashes
