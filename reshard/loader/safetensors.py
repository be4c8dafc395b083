"""safetensors: a file, or a directory of files with its index, as Hugging Face stores weights.

    8 bytes    length of the header, little-endian
    header     {"name": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]}, ...}
    data       the tensors, one after another, rows first

A tensor is read as zarr chunks, each of some of its rows: see `reshard.storage.ranges`.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.checkpoint import Checkpoint, Item, Leaf, Source
from reshard.errors import CorruptCheckpointError, UncommittedCheckpointError
from reshard.loader.detection import SAFETENSORS
from reshard.loader.json_documents import parse_json, read_json
from reshard.loader.orbax import array, tree_problems
from reshard.storage.array_store import ArrayStore
from reshard.storage.location import Location, checked
from reshard.storage.ocdbt import StoredValue
from reshard.tree import Path, natural
from reshard.units import format_bytes

INDEX = "model.safetensors.index.json"
# There while an export to a bucket is not complete.
UNFINISHED = ".reshard-export"
# Bytes of a header; more is refused, as safetensors itself does.
MAX_HEADER = 100_000_000
# Bytes of a chunk, at most, unless a single row has more.
_CHUNK = 8 << 20
# Its names of dtypes, and zarr's.
DTYPES = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    **{f"{kind}{size * 8}": f"<{kind.lower()}{size}" for kind in "UIF" for size in (2, 4, 8)},
    "BF16": "bfloat16",
    "C64": "<c8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor: its file, below what was opened, and where it is there."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read(item: Item, requests: int) -> Checkpoint:
    """The checkpoint of a file or a directory; see `reshard.open` for the errors.

    A tensor's name is split at its dots. If one name would then be below another, no name is split.
    """
    root = item.root
    files = [""] if root.is_file() else [n for n in root.names() if n.endswith(SAFETENSORS)]
    if not root.is_local and (root / UNFINISHED).is_file():
        raise UncommittedCheckpointError(
            f"an export to `{root}` has not ended, or was stopped",
            hints=["wait until it has ended", "delete what is there, and export again"],
        )
    problems: list[str] = []
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for name, tensor in _tensors(root, file, problems):
            if other := tensors.get(name):
                problems.append(f"`{name}` is in `{other.file}` and in `{file}`")
            tensors[name] = tensor
    problems += _index_problems(root, tensors) if files != [""] else []
    store = ArrayStore(False, root, ("",), False, requests, ranged=True)
    vars(store)["values"] = {name: {} for name in tensors}
    paths: dict[str, Path] = {name: tuple(name.split(".")) for name in tensors}
    if tree_problems(paths.values()):
        paths = {name: (name,) for name in tensors}
        problems += tree_problems(paths.values())
    leaves: dict[Path, Leaf] = {}
    for name, tensor in sorted(tensors.items(), key=lambda pair: natural((pair[0],))):
        metadata, store.values[name] = _chunks(tensor)
        leaves[paths[name]] = array(
            paths[name], name, "np.ndarray", store, metadata, {}, {}, problems
        )
    if problems:
        raise CorruptCheckpointError(f"`{root}` cannot be read as safetensors", problems)
    state = "" if root.is_local else root.state(())
    document = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    source = Source(**vars(item), store=store, metadata=document, described=True, state=state)
    return Checkpoint(leaves, source)


def _tensors(root: Location, file: str, problems: list[str]) -> Iterator[tuple[str, _Tensor]]:
    """The tensors of a file, by name; what is wrong with it is added to the problems."""
    place = root / file
    size = place.file_bytes() or 0
    header, start = _header(place, size, problems)
    ends = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = (
                entry["dtype"],
                tuple(entry["shape"]),
                entry["data_offsets"],
            )
            numbers = [*shape, begin, end]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("a shape and offsets are whole numbers")
            if dtype not in DTYPES:
                raise ValueError(f"the dtype {dtype!r:.40} is not supported")
            tensor = _Tensor(file, dtype, shape, start + begin, start + end)
            needed = math.prod(shape) * _itemsize(dtype)
            if end - begin != needed:
                raise ValueError(
                    f"it has {end - begin} bytes, and {dtype}{list(shape)} has {needed}"
                )
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"`{place}`: `{name:.80}`: {error}")
        else:
            ends.append((begin, end, name))
            yield name, tensor
    ends = [(0, 0, ""), *sorted(ends), (size - start, size - start, "the end of the file")]
    for (_, end, one), (begin, _, other) in itertools.pairwise(ends):
        if begin != end:
            what = "overlap" if begin < end else "leave a hole"
            problems.append(f"`{place}`: `{one:.80}` and `{other:.80}` {what} at {end}")
            break


def _header(place: Location, size: int, problems: list[str]) -> tuple[Mapping[str, Any], int]:
    """The tensors as a header describes them, and where the data begins."""

    def part(begin: int, end: int) -> bytes:
        if place.is_local:  # where an older TensorStore reads no range
            return place.beginning(end)[begin:]
        read = place.parent.open().read(place.name, byte_range=slice(begin, end))
        return checked(read, f"the header of `{place}`").value

    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        length = int.from_bytes(part(0, 8), "little")
        if length > min(MAX_HEADER, size - 8):
            raise ValueError(
                f"a header of {format_bytes(length)} in a file of {format_bytes(size)}"
            )
        header = parse_json(part(8, 8 + length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header, 8 + length
    except ValueError as error:
        problems.append(f"`{place}`: {error}")
        return {}, size


def _index_problems(root: Location, tensors: Mapping[str, _Tensor]) -> Iterator[str]:
    """In what an index, if there is one, and the files differ."""
    index = read_json(root / INDEX)
    if index is None:
        return
    named = index.get("weight_map")
    if not isinstance(named, dict):
        yield f"`{root / INDEX}` has no `weight_map`"
        return
    for name in {**named, **tensors}:
        expected, found = named.get(name), tensors.get(name)
        if found is None:
            yield f"`{name:.80}`: the index names it in `{expected}`, and no file has it"
        elif found.file != expected:
            where = f"in `{expected}`" if expected else "nowhere"
            yield f"`{name:.80}`: it is in `{found.file}`, and the index names it {where}"


def _itemsize(dtype: str) -> int:
    name = DTYPES[dtype]
    return int(name[-1]) if name[0] in "<|" else 2 if name == "bfloat16" else 1


def _chunks(tensor: _Tensor) -> tuple[bytes, dict[str, StoredValue]]:
    """The zarr metadata of a tensor, and where each of its chunks is: some rows, all of which have
    equally many, or a part of one row."""
    chunk = [max(size, 1) for size in tensor.shape]
    itemsize = _itemsize(tensor.dtype)
    for axis, size in enumerate(chunk):
        most = max(_CHUNK // (math.prod(chunk[axis + 1 :]) * itemsize), 1)
        if size <= most:
            break
        chunk[axis] = next(n for n in range(most, 0, -1) if size % n == 0)
        if most > 1:
            break
    nbytes = math.prod(chunk) * itemsize
    grid = [size // part for size, part in zip(tensor.shape, chunk, strict=True)]
    keys = itertools.product(*map(range, grid)) if math.prod(tensor.shape) else ()
    values = {
        ".".join(map(str, key)) or "0": StoredValue(
            nbytes, file=tensor.file, offset=tensor.begin + number * nbytes
        )
        for number, key in enumerate(keys)
    }
    document = {
        "zarr_format": 2,
        "shape": tensor.shape,
        "chunks": chunk,
        "dtype": DTYPES[tensor.dtype],
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
    }
    return json.dumps(document).encode(), values
