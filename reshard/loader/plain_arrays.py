"""Arrays that lie in files of another format as they are, rows first: safetensors and msgpack.

An array is read as zarr chunks, each of some of its rows: see `reshard.storage.btree`.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoint import Checkpoint, Item, Leaf, Source
from reshard.errors import CorruptCheckpointError
from reshard.loader.json_documents import read_json
from reshard.loader.orbax import array
from reshard.storage.array_store import ArrayStore
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.tree import Path, format_path

# Bytes of a chunk, at most, unless a single row has more; of an array in several runs, whose chunks
# on a seam are kept in memory; and chunks along an axis.
_CHUNK, _SEAM, _MOST = 8 << 20, 1 << 20, 1 << 16
# Bytes of chunks on seams that are always kept; more are if they are few of all bytes.
_MOST_SEAMS = 1 << 26


class PlainArray(NamedTuple):
    """An array in a file.

    Attributes:
      file: the file, below what was opened.
      dtype: zarr's name of the dtype.
      runs: where the bytes are in the file: the beginning of each run, and its length.
      inline: the bytes themselves, if they are in no file.
      value_type: as of an `ArrayHandle`.
      name: the name that the file has for it; without one, its path.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    inline: bytes | None = None
    value_type: str = "np.ndarray"
    name: str = ""

    @property
    def itemsize(self) -> int:
        name = self.dtype
        return int(name[2:]) if name[0] in "<|" else 2 if name == "bfloat16" else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def checkpoint(
    item: Item,
    kind: str,
    leaves: Mapping[Path, Any],
    requests: int,
    problems: list[str],
    notes: Sequence[str] = (),
) -> Checkpoint:
    """The checkpoint of plain arrays, and of other leaves. Raises CorruptCheckpointError if there
    are problems."""
    root = item.root
    store = ArrayStore(False, root, ("",), False, requests, ranged=True)
    vars(store)["values"] = {}
    found: dict[Path, Leaf] = {}
    seams, total = 0, sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, PlainArray))
    for path, leaf in leaves.items():
        if isinstance(leaf, PlainArray):
            name = leaf.name or format_path(path)
            chunk = _chunk_shape(leaf)
            seams += (len(leaf.runs) - 1) * math.prod(chunk) * leaf.itemsize
            if seams > max(_MOST_SEAMS, total // 16):
                problems.append(f"{name:.80}: it is in {len(leaf.runs)} parts: they are too small")
                break
            metadata, store.values[name] = _chunks(root, leaf, chunk)
            found[path] = array(path, name, leaf.value_type, store, metadata, {}, {}, problems)
        else:
            found[path] = leaf
    if problems:
        raise CorruptCheckpointError(f"`{root}` cannot be read as {kind}", problems)
    state = "" if root.is_local else root.state(())
    document = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    source = Source(**vars(item), store=store, metadata=document, described=True, state=state)
    return Checkpoint(found, source, tuple(notes))


def index_problems(index: Location, files: Mapping[str, str]) -> Iterator[str]:
    """In what an index, if there is one, and the files that arrays are in differ."""
    document = read_json(index)
    if document is None:
        return
    named = document.get("weight_map")
    if not isinstance(named, dict):
        yield f"`{index}` has no `weight_map`"
        return
    for name in {**named, **files}:
        expected, found = named.get(name), files.get(name)
        if found is None:
            yield f"`{name:.80}`: the index names it in `{expected}`, and no file has it"
        elif found != expected:
            where = f"in `{expected}`" if expected else "nowhere"
            yield f"`{name:.80}`: it is in `{found}`, and the index names it {where}"


def _chunk_shape(plain: PlainArray) -> list[int]:
    """The shape of the chunks of an array: some rows, of which all have equally many, or a part of
    one row."""
    chunk = [max(size, 1) for size in plain.shape]
    largest = _CHUNK if len(plain.runs) < 2 else _SEAM
    for axis, size in enumerate(chunk):
        most = max(largest // (math.prod(chunk[axis + 1 :]) * plain.itemsize), 1)
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
    """The zarr metadata of an array, and where each of its chunks is."""
    nbytes = math.prod(chunk) * plain.itemsize
    grid = [size // part for size, part in zip(plain.shape, chunk, strict=True)]
    keys = itertools.product(*map(range, grid)) if math.prod(plain.shape) else ()
    values = {
        ".".join(map(str, key)) or "0": _value(root, plain, number * nbytes, nbytes)
        for number, key in enumerate(keys)
    }
    document = {
        "zarr_format": 2,
        "shape": plain.shape,
        "chunks": chunk,
        "dtype": plain.dtype,
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
    }
    return json.dumps(document).encode(), values


def _value(root: Location, plain: PlainArray, start: int, nbytes: int) -> StoredValue:
    """Some bytes of an array: a range of its file, or, where they are in several runs, themselves,
    which are read for that."""
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
