"""safetensors: a file, or a directory of files with its index, as Hugging Face stores weights.

    8 bytes    length of the header, little-endian
    header     {"name": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]}, ...}
    data       the tensors, one after another, rows first

The tensors are plain arrays: see `plain_arrays`.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.dtypes import parse_dtype
from reshard.checkpoint import Checkpoint, Item
from reshard.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    UncommittedCheckpointError,
)
from reshard.loader.detection import RECORD, SAFETENSORS, is_index
from reshard.loader.hf_files import check_no_pointer
from reshard.loader.json_documents import parse_json, read_json
from reshard.loader.orbax import tree_problems
from reshard.loader.plain_arrays import PlainArray, checkpoint, index_problems, weight_map
from reshard.storage.disk import Entry
from reshard.storage.location import Location
from reshard.tree import Path, as_python, natural
from reshard.units import format_bytes

INDEX = "model.safetensors.index.json"
# The most bytes of a header: the limit of safetensors itself.
MAX_HEADER = 100_000_000
# safetensors' names of dtypes, each with NumPy's or JAX's.
_NAMES = (
    "BOOL:bool U8:uint8 U16:uint16 U32:uint32 U64:uint64 I8:int8 I16:int16 I32:int32 I64:int64 "
    "F16:float16 F32:float32 F64:float64 C64:complex64 BF16:bfloat16 F8_E4M3:float8_e4m3fn "
    "F8_E5M2:float8_e5m2 F8_E8M0:float8_e8m0fnu F8_E4M3FNUZ:float8_e4m3fnuz "
    "F8_E5M2FNUZ:float8_e5m2fnuz"
)
_PAIRS = (pair.split(":") for pair in _NAMES.split())
DTYPES = {name: parse_dtype(dtype) for name, dtype in _PAIRS}


def read(item: Item, requests: int, seen: dict[str, Entry]) -> Checkpoint:
    """The checkpoint of a file or a directory; see `reshard.open` for the errors.

    If there is an index, only the files that it names are read. A tensor's name is split at its
    dots. If one name would then be below another, no name is split.
    """
    _check_complete(item.root)
    directory, files, named, left = _files(item.root, seen)
    seen |= directory.look(files)
    problems: list[str] = []
    hints = [f"open a file that is not in the index: {directory / name}" for name in left[:1]]
    tensors: dict[str, PlainArray] = {}
    for file in files:
        for name, tensor in _tensors(directory, file, problems, hints):
            if other := tensors.get(name):
                problems.append(f"`{name}` is in `{other.file}` and in `{file}`")
                hints += [f"open one of the files: {directory / files[0]}"] * (not named)
            tensors[name] = tensor
    problems += index_problems(named, tensors) if named else _missing_files(files)
    listed = ", ".join(f"`{name}`" for name in left)
    notes = [f"the index does not name {listed}: not read"] * bool(left)
    paths: dict[str, Path] = {name: tuple(name.split(".")) for name in tensors}
    if tree_problems(paths.values()):
        paths = {name: (name,) for name in tensors}
        problems += tree_problems(paths.values())
    names = sorted(tensors, key=lambda name: natural((name,)))
    leaves = {paths[name]: tensors[name] for name in names}
    return checkpoint(
        item, "safetensors", leaves, requests, seen, problems, notes, directory, hints
    )


def find_index(directory: Location) -> Location | None:
    """The index of a directory, or None. Raises CheckpointNotFoundError if there are several."""
    names = [name for name in directory.names() if is_index(name)]
    if len(names) > 1:
        hints = [f"open one of them: {directory / name}" for name in names]
        raise CheckpointNotFoundError(f"`{directory}` has several indexes", names, hints)
    return directory / names[0] if names else None


def _files(
    root: Location, seen: dict[str, Entry]
) -> tuple[Location, list[str], Mapping[str, Any], list[str]]:
    """The directory, the files to read, the file of each tensor by the index, and the files that
    the index does not name. The root is the directory, its index, or the only file."""
    is_file = root.is_file()
    if is_file and not is_index(root.name):
        return root, [""], {}, []
    directory, index = (root.parent, root) if is_file else (root, find_index(root))
    names = directory.names()
    files = [name for name in names if name.endswith(SAFETENSORS)]
    if index is None:
        return directory, files, {}, []
    seen |= directory.look([index.name])
    named = weight_map(index)
    wanted = {*map(str, named.values())}
    left = [name for name in files if name not in wanted]
    return directory, [name for name in names if name in wanted], named, left


def _missing_files(files: Sequence[str]) -> list[str]:
    """Files that are missing by the names of the others, a line each."""
    problems = []
    parts = filter(None, (re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", f) for f in files))
    for start, count in sorted({(part[1], part[3]) for part in parts}):
        names = (f"{start}{n:05d}-of-{count}.safetensors" for n in range(1, int(count) + 1))
        problems += [f"`{name}` is missing" for name in names if name not in files]
    return problems


def _check_complete(root: Location) -> None:
    """Raises UncommittedCheckpointError if the last files of an export to a bucket are missing."""
    record = None if root.is_local or root.is_file() else read_json(root / RECORD)
    if record and not all((root / path).is_file() for path, _ in record.get("markers", ())):
        raise UncommittedCheckpointError(
            f"the export to `{root}` is not complete: the last files are missing",
            hints=[f"reshard.commit({as_python(str(root))}) writes them"],
        )


def _tensors(
    root: Location, file: str, problems: list[str], hints: list[str]
) -> Iterator[tuple[str, PlainArray]]:
    """The tensors of a file, by name. Appends the file's defects to the problems, and hints."""
    place = root / file
    try:
        size = place.file_bytes(follow=True) or 0
        header, start = _header(place, size, problems)
    except CheckpointFormatError as error:  # a link to no file, or a pointer of git-lfs
        problems.append(error.summary)
        hints += error.hints
        return
    ends = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = (entry[k] for k in ("dtype", "shape", "data_offsets"))
            if not all(type(number) is int and number >= 0 for number in [*shape, begin, end]):
                raise ValueError("a shape or an offset is not a whole number")
            if dtype not in DTYPES:
                raise ValueError(f"the dtype {dtype!r:.40} is not supported")
            runs = ((start + begin, end - begin),)
            tensor = PlainArray(file, DTYPES[dtype], tuple(shape), runs, name=name)
            if end - begin != tensor.nbytes:
                text = f"{dtype}{list(shape)} has {tensor.nbytes}"
                raise ValueError(f"it has {end - begin} bytes, and {text}")
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"`{place}`: `{name:.80}`: {error}")
        else:
            ends.append((begin, end, name))
            yield name, tensor
    last = max((end for _, end, _ in ends), default=0)
    if start + last > size:
        problems.append(f"`{place}` is truncated: {size} bytes, expected {start + last}")
        return
    ends = [(0, 0, ""), *sorted(ends), (size - start, size - start, "the end of the file")]
    for (_, end, one), (begin, _, other) in itertools.pairwise(ends):
        if begin != end:
            what = "overlap" if begin < end else "leave a hole"
            problems.append(f"`{place}`: `{one:.80}` and `{other:.80}` {what} at {end}")
            break


def _header(place: Location, size: int, problems: list[str]) -> tuple[Mapping[str, Any], int]:
    """The descriptions of the tensors, and the offset of the data."""
    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes, too few for a header")
        length = int.from_bytes(place.part(0, 8), "little")
        if length > min(MAX_HEADER, size - 8):
            text = f"a header of {format_bytes(length)} in a file of {format_bytes(size)}"
            raise ValueError(text)
        header = parse_json(place.part(8, 8 + length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header, 8 + length
    except ValueError as error:
        check_no_pointer(place)
        problems.append(f"`{place}`: {error}")
        return {}, size
