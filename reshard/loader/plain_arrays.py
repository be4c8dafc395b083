"""Uncompressed, row-major arrays in files of another format: safetensors and msgpack.

An array is read as zarr chunks of some of its rows: see `btree.range_database` in
`reshard.storage`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.arrays.zarr import Encoding
from reshard.checkpoint import Checkpoint, Item, Leaf
from reshard.errors import CorruptCheckpointError
from reshard.loader.json_documents import read_json
from reshard.loader.orbax import array, source_of
from reshard.storage.array_store import ArrayStore
from reshard.storage.disk import Entry
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.tree import Path, format_path
from reshard.units import count_of

# The most bytes of a chunk, unless a single row has more. The same for an array in several runs of
# bytes: its chunks that cross two runs are kept in memory. The most chunks along an axis.
_CHUNK, _SEAM, _MOST = 8 << 20, 1 << 20, 1 << 16
# Bytes of such chunks that may always be kept; more may be if they are few of all bytes.
_MOST_SEAMS = 1 << 26
# Chunks of such an array: uncompressed, row-major and little-endian.
_RAW = Encoding(2, (), "little", (), None, "v2", ".", "null")


class PlainArray(NamedTuple):
    """An array in a file.

    Attributes:
      file: the file, relative to the opened path.
      runs: the offset and the length of each run of its bytes in the file.
      inline: its bytes, if they are not in a file.
      value_type: as of an `ArrayHandle`.
      name: its name in the file; by default, its path.
    """

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    inline: bytes | None = None
    value_type: str = "np.ndarray"
    name: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def checkpoint(
    item: Item,
    kind: str,
    leaves: Mapping[Path, Any],
    requests: int,
    seen: dict[str, Entry],
    problems: list[str],
    notes: Sequence[str] = (),
    directory: Location | None = None,
    hints: Sequence[str] = (),
) -> Checkpoint:
    """The checkpoint of plain arrays and other leaves, whose files were `seen` and are relative to
    `directory`, by default the item's. Raises CorruptCheckpointError, with the hints, if there
    are problems."""
    root = directory or item.data
    store = ArrayStore(False, root, ("",), False, requests, ranged=True, files=seen)
    vars(store)["values"] = {}
    opened: dict[Path, Leaf] = {}
    seams, total = 0, sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, PlainArray))
    for path, leaf in leaves.items():
        if isinstance(leaf, PlainArray):
            name = leaf.name or format_path(path)
            chunk = _chunk_shape(leaf)
            seams += (len(leaf.runs) - 1) * math.prod(chunk) * leaf.dtype.itemsize
            if seams > max(_MOST_SEAMS, total // 16):
                problems.append(f"{name:.80}: its {len(leaf.runs)} parts are too small")
                break
            metadata, store.values[name] = _chunks(root, leaf, chunk)
            opened[path] = array(path, name, leaf.value_type, store, metadata, {}, {}, problems)
        else:
            opened[path] = leaf
    if problems:
        raise CorruptCheckpointError(f"`{item.root}` cannot be read as {kind}", problems, hints)
    document = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    source = source_of(item, store, document, seen)
    return Checkpoint(opened, source, (*item.left_out, *notes))


def weight_map(index: Location) -> dict[str, Any]:
    """The file of each array by an index; empty if there is no index."""
    document = read_json(index, follow=True)
    named = {} if document is None else document.get("weight_map")
    if not isinstance(named, dict) or (document and not named):
        raise CorruptCheckpointError(f"`{index}` has no `weight_map`")
    return named


def index_problems(named: Mapping[str, Any], arrays: Mapping[str, PlainArray]) -> Iterator[str]:
    """The differences between the files that an index has `named` and those of the arrays."""
    files = {name: plain.file for name, plain in arrays.items()}
    lost: dict[str, list[str]] = {}
    for name, expected in named.items():
        if name not in files:
            lost.setdefault(f"{expected!s:.80}", []).append(f"`{name:.80}`")
    for file, names in lost.items():
        text = f"{count_of(len(names), 'tensor')} that the index names in it: {names[0]}"
        text += ", ..." * (len(names) > 1)
        yield f"`{file}` {'lacks' if file in files.values() else 'is missing, with'} {text}"
    for name, actual in files.items():
        expected = named.get(name)
        if actual != expected:
            other = f"names `{expected}`" if expected else "does not list it"
            yield f"`{name:.80}` is in `{actual}`, but the index {other}"


def _chunk_shape(plain: PlainArray) -> list[int]:
    """The shape of the chunks of an array: equally many rows each, or a part of one row."""
    chunk = [max(size, 1) for size in plain.shape]
    largest = _CHUNK if len(plain.runs) < 2 else _SEAM
    for axis, size in enumerate(chunk):
        most = max(largest // (math.prod(chunk[axis + 1 :]) * plain.dtype.itemsize), 1)
        if size <= most:
            break
        rows = next(n for n in range(most, 0, -1) if size % n == 0)
        chunk[axis] = rows if size // rows <= _MOST else size
        if most > 1:
            break
    return chunk


def _chunks(
    root: Location, plain: PlainArray, chunk: list[int]
) -> tuple[bytes, dict[str, StoredValue]]:
    """The zarr metadata of an array, and the place of each of its chunks."""
    nbytes = math.prod(chunk) * plain.dtype.itemsize
    grid = [size // part for size, part in zip(plain.shape, chunk, strict=True)]
    keys = itertools.product(*map(range, grid)) if math.prod(plain.shape) else ()
    values = {
        ".".join(map(str, key)) or "0": _value(root, plain, number * nbytes, nbytes)
        for number, key in enumerate(keys)
    }
    return _RAW.document(plain.shape, tuple(chunk), plain.dtype), values


def _value(root: Location, plain: PlainArray, start: int, nbytes: int) -> StoredValue:
    """Some bytes of an array: a range of its file, or if they cross two runs, the read bytes."""
    if plain.inline is not None:
        return StoredValue(nbytes, inline=plain.inline)
    parts = []
    for begin, size in plain.runs:
        first, last = max(start, 0), min(start + nbytes, size)
        if first < last:
            parts.append((begin + first, begin + last))
        start -= size
    if len(parts) == 1:
        return StoredValue(nbytes, file=plain.file, offset=parts[0][0])
    data = b"".join((root / plain.file).part(*part) for part in parts)
    return StoredValue(nbytes, inline=data)
