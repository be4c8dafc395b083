"""safetensors files: which tensor is in which file, and at which offset.

    model-00001-of-00002.safetensors      header, then tensors, at offsets that the plan knows
    model-00002-of-00002.safetensors
    model.safetensors.index.json          which file has which tensor; a single file has no index

The bytes are those that the library writes: in a file, tensors are in the order of their dtypes,
the widest first, so that each is aligned; then in the order of their names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.dtypes import name_of, parse_dtype
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Leaf, type_name
from reshard.engine.batches import in_groups
from reshard.loader.safetensors import DTYPES, MAX_HEADER
from reshard.tree import Path
from reshard.units import format_bytes

# The library's order in a file.
_ORDER = "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 "
_ORDER += "F8_E5M2 I8 U8 BOOL"
_RANKS = {name: rank for rank, name in enumerate(_ORDER.split())}
_NAMES = {parse_dtype(text): name for name, text in DTYPES.items()}
# Of which library's tensors the file is, which transformers asks for.
_ABOUT = {"format": "pt"}


class File(NamedTuple):
    """A file of a checkpoint.

    Attributes:
      header: the bytes before the tensors.
      offsets: path of an array -> where its values begin in the file.
      nbytes: bytes of the file.
    """

    name: str
    header: bytes
    offsets: Mapping[Path, int]
    nbytes: int


def why_not_written(leaf: Leaf) -> str | None:
    """Why the format does not hold a leaf; None if it does."""
    if not isinstance(leaf, ArrayHandle):
        return f"safetensors has no {type_name(leaf)}"
    if leaf.key_impl is not None:
        return f"safetensors has no PRNG keys ({leaf.key_impl})"
    if leaf.value_type == "scalar":
        return "safetensors has no Python scalars"
    if leaf.dtype not in _NAMES:
        return f"safetensors has no {name_of(leaf.dtype)}"
    return None


def in_files(handles: Sequence[ArrayHandle], file_size: int) -> Iterator[File]:
    """The files of arrays, in their order: each of tensors of `file_size` bytes at most, unless one
    has more."""
    groups = list(in_groups(handles, lambda handle: handle.nbytes, file_size)) or [[]]
    for number, group in enumerate(groups, 1):
        of = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        yield _file(f"model{of}.safetensors", group)


def _file(name: str, handles: Sequence[ArrayHandle]) -> File:
    entries: dict[str, Any] = {"__metadata__": _ABOUT}
    offsets, end = {}, 0
    for handle in sorted(handles, key=_place):
        begin, end = end, end + handle.nbytes
        entries[stored_name(handle.path)] = {
            "dtype": _NAMES[handle.dtype],
            "shape": handle.shape,
            "data_offsets": [begin, end],
        }
        offsets[handle.path] = begin
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {path: len(header) + begin for path, begin in offsets.items()}
    return File(name, header, offsets, len(header) + end)


def _place(handle: ArrayHandle) -> tuple[int, bytes]:
    return _RANKS[_NAMES[handle.dtype]], stored_name(handle.path).encode()


def header_problems(files: Sequence[File]) -> list[str]:
    """Files whose headers no reader takes, a line each."""
    return [
        f"`{file.name}`: a header of {format_bytes(len(file.header))}, and readers take "
        f"{format_bytes(MAX_HEADER)}"
        for file in files
        if len(file.header) - 8 > MAX_HEADER
    ]


def index(files: Sequence[File]) -> bytes:
    """The document that says which file has which tensor."""
    names = {stored_name(path): file.name for file in files for path in file.offsets}
    size = sum(file.nbytes - len(file.header) for file in files)
    document = {"metadata": {"total_size": size}, "weight_map": names}
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
