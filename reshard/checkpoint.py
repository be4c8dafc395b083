"""`Checkpoint`: an immutable, lazy view of a saved tree. Nothing here reads an array."""

import collections
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts

from reshard.arrays import zarr
from reshard.arrays.operations import Operation, Stack, Unstack
from reshard.arrays.rounding import round_once, rounds_twice
from reshard.errors import CorruptCheckpointError, TreeMismatchError
from reshard.sharding.mesh import (
    Mesh,
    NamedSharding,
    Sharding,
    format_spec,
)
from reshard.storage.array_store import ArrayStore, StoredValue
from reshard.tree import Path, format_path, shell_quoted


class PlacedChunk(NamedTuple):
    """A stored chunk that is a chunk of an array as it is.

    Attributes:
      root: the stored array that it belongs to.
      key: its key below that array's name.
      value: where it is.
      index: its place in the grid of the array.
    """

    root: "ArrayHandle"
    key: str
    value: StoredValue
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Formed:
    """What arrays are made of that are not stored as they are: the outputs of one operation.

    Attributes:
      operation: the operation.
      inputs: the arrays that it takes, stored or formed themselves.
    """

    operation: Operation
    inputs: "tuple[ArrayHandle, ...]"

    @functools.cached_property
    def views(self) -> list[ts.TensorStore]:
        """Views of the outputs, of the dtype on disk."""
        return self.operation.views([handle.stored_view() for handle in self.inputs])

    @functools.cached_property
    def placed(self) -> "list[list[PlacedChunk]] | None":
        """The stored chunks that each output consists of: by stacks and unstacks of whole chunks
        alone, None for all else."""
        operation = self.operation
        if isinstance(operation, Stack):
            parts = [handle.placed_chunks() for handle in self.inputs]
            if None in parts or len({handle.chunk_shape for handle in self.inputs}) > 1:
                return None
            axis = operation.axis % (len(self.inputs[0].shape) + 1)
            return [
                [
                    chunk._replace(index=(*chunk.index[:axis], place, *chunk.index[axis:]))
                    for place, part in enumerate(parts)
                    for chunk in part or ()
                ]
            ]
        if isinstance(operation, Unstack):
            (source,) = self.inputs
            chunks = source.placed_chunks() if source.chunk_shape[operation.axis] == 1 else None
            if chunks is None:
                return None
            axis = operation.axis % len(source.shape)
            layers: list[list[PlacedChunk]] = [[] for _ in range(operation.count)]
            for chunk in chunks:
                index = chunk.index[:axis] + chunk.index[axis + 1 :]
                layers[chunk.index[axis]].append(chunk._replace(index=index))
            return layers
        return None

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each output."""
        shapes = self.operation.shapes([handle.shape for handle in self.inputs])
        return tuple(map(math.prod, shapes))


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayHandle:
    """One array, saved or formed of saved ones, not read yet.

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
      formed: what it is made of, if it is not stored as it is. Then `chunk_shape` is a grid whose
        boxes cut no stored chunk, and `store`, `name` and `metadata` are those of an array that
        it is stored like.
      part: which output of `formed.operation` it is.
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
    formed: Formed | None = None
    part: int = 0

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_stored(self) -> bool:
        """Whether its values are those that are stored under its name: neither formed nor cast."""
        return self.formed is None and self.dtype == self.stored_dtype

    def stored_sizes(self) -> list[int]:
        """Stored bytes of each chunk that is there; of a formed array, of all that it is made of.

        Raises:
          CorruptCheckpointError: chunks are missing that do not stand for a fill value, or a file
            is not as long as what it holds.
        """
        if self.formed is not None:
            return [size for handle in self.formed.inputs for size in handle.stored_sizes()]
        metadata_key = self.store.metadata_key
        values = self.store.values[self.name]
        sizes = [value.size for key, value in values.items() if key != metadata_key]
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        expected = math.prod(math.ceil(size / chunk) for size, chunk in pairs)
        if len(sizes) < expected and not self.store.fills:
            raise CorruptCheckpointError(
                f"{format_path(self.path)}: {expected - len(sizes)} of its {expected} stored "
                "chunks are missing"
            )
        if cut := self.store.cut_file(self.name):
            raise CorruptCheckpointError(f"{format_path(self.path)}: its data file {cut}")
        return sizes

    @property
    def read_dtype(self) -> np.dtype:
        """The dtype of `view`: `dtype`, or float64 where TensorStore would round a cast twice."""
        twice = rounds_twice(self.stored_dtype, self.dtype)
        return self.stored_dtype if twice else self.dtype

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """What was read from `view`, as `dtype`."""
        return values if values.dtype == self.dtype else round_once(values, self.dtype)

    def view(self) -> ts.TensorStore:
        """A TensorStore view to read boxes from, of `read_dtype` and `shape`.

        Raises:
          CorruptCheckpointError: another leaf is stored under the same name.
        """
        if self.same_name is not None:
            raise collision_error([self])
        array = self.stored_view()
        return array if self.read_dtype == self.stored_dtype else ts.cast(array, self.read_dtype)

    def stored_view(self) -> ts.TensorStore:
        """A view of `stored_dtype`."""
        if self.formed is not None:
            return self.formed.views[self.part]
        return self.store.open_array(self.name, json.loads(self.metadata))

    def placed_chunks(self) -> list[PlacedChunk] | None:
        """The stored chunks that it consists of as they are, without its metadata; None where it
        has to be decoded to be formed."""
        if self.formed is not None:
            return None if self.formed.placed is None else self.formed.placed[self.part]
        document = json.loads(self.metadata)
        return [
            PlacedChunk(self, key, value, zarr.chunk_index(document, key))
            for key, value in self.store.values[self.name].items()
            if key != self.store.metadata_key
        ]

    def __repr__(self) -> str:
        return f"<{format_path(self.path)}: {describe(self)}>"


# Orbax keeps a namedtuple without fields as such where it records the types of containers.
EmptyNamedTuple = collections.namedtuple("EmptyNamedTuple", ())
# Leaves that a repr lists; `reshard inspect` lists them all.
_SHOWN = 200

Leaf = ArrayHandle | str | dict | list | tuple | None

# What Orbax calls leaves without a value -> the leaf.
EMPTY_LEAVES: dict[str, Leaf] = {
    "None": None,
    "Dict": {},
    "List": [],
    "Tuple": (),
    "NamedTuple": EmptyNamedTuple(),
}
_EMPTY_NAMES = {type(leaf): name for name, leaf in EMPTY_LEAVES.items()}


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
    def path(self) -> pathlib.Path:
        """What opens this very tree: the step, and the item of a step that has several."""
        step = self.root / self.step
        return step / self.item if len(self.items) > 1 else step

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

    def with_metadata(self, entries: Mapping[str, Any]) -> "Checkpoint":
        """The same checkpoint with other entries in its `_METADATA` document."""
        return self.with_source(metadata={**self.source.metadata, **entries})

    def with_source(self, **changes: Any) -> "Checkpoint":
        """The same checkpoint with other attributes of its source."""
        source = dataclasses.replace(self.source, **changes)
        return Checkpoint(self._leaves, source, self.notes, self.retyped)

    def __repr__(self) -> str:
        shown = list(self.items())[:_SHOWN]
        lines = [f"Checkpoint({self.source.root}, {len(self)} leaves, {self.nbytes} bytes)"]
        lines += [f"  {format_path(path)}  {describe(leaf)}" for path, leaf in shown]
        more = len(self) - len(shown)
        return "\n".join(lines + [f"  ... and {more} more"] * (more > 0))


def array_text(dtype: str, shape: tuple[int, ...]) -> str:
    """`float32[16,24]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def describe(leaf: Leaf) -> str:
    """A leaf in a few words: `float32[16,24] P('data', None)`, `'text'`, `{}`."""
    if not isinstance(leaf, ArrayHandle):
        return repr(leaf)
    text = array_text(leaf.dtype.name, leaf.shape)
    if isinstance(leaf.sharding, NamedSharding):
        text += f" {format_spec(leaf.sharding.spec)}"
    return text


def collision_error(handles: Sequence[ArrayHandle]) -> CorruptCheckpointError:
    """The error for leaves whose stored array may belong to another leaf."""
    pairs = {frozenset((h.path, h.same_name or ())): h for h in reversed(handles)}
    names = [
        (format_path(h.path), format_path(h.same_name or ()), h.name)
        for h in reversed(pairs.values())
    ]
    return CorruptCheckpointError(
        "two leaves were saved under one name, so one of them has overwritten the other",
        [f"{one} and {other} are both stored as `{name}`" for one, other, name in names],
        [
            f"drop both: --drop {shell_quoted(one)} --drop {shell_quoted(other)}"
            for one, other, _ in names
        ],
    )


def empty_name(leaf: Leaf) -> str:
    """What Orbax calls a leaf without a value."""
    return _EMPTY_NAMES[type(leaf)]


def stored_name(path: Path) -> str:
    """The name that Orbax stores a leaf under: its keys joined with `.`."""
    return ".".join(map(str, path))


def name_clashes(
    paths: Iterable[Path], is_unchanged: Callable[[Path], bool] = lambda path: False
) -> list[str]:
    """Leaves that would be stored under one name. Two that are so in the source, unchanged, are not
    told: see `collision_error`.

    Args:
      paths: the leaves.
      is_unchanged: whether a leaf is where it was, and what it was.
    """
    first: dict[str, Path] = {}
    clashes = []
    for path in paths:
        name = stored_name(path)
        other = first.setdefault(name, path)
        if other != path and not (is_unchanged(other) and is_unchanged(path)):
            clashes.append(f"{format_path(other)} and {format_path(path)} -> `{name}`")
    return clashes


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
