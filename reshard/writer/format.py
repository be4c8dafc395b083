"""How an item is stored: codecs and encodings, names, and safetensors files.

The format is the source's, unless the user asks for another. An export has safetensors files:

    model-00001-of-00002.safetensors      header, then tensors, at offsets that the plan knows
    model-00002-of-00002.safetensors
    model.safetensors.index.json          which file has which tensor; a single file has no index

Their bytes are those that the library writes: in a file, tensors are in the order of their dtypes,
the widest first, so that each is aligned; then in the order of their names.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from reshard import errors, tree, units
from reshard.arrays.dtypes import name_of
from reshard.arrays.handle import ArrayHandle, Derived, StoredArray, stored_name
from reshard.arrays.zarr import ZEROS, Encoding, codec, converted, parse_encoding
from reshard.checkpoint import Checkpoint, Leaf, name_clashes, type_name
from reshard.engine.batches import in_groups
from reshard.loader.safetensors import DTYPES
from reshard.storage.array_store import ZarrVersion, name_problem
from reshard.storage.location import Location
from reshard.storage.ocdbt import FOLDERS, PROCESS
from reshard.writer.siblings import WRITTEN, is_sibling

# The library's order in a file.
_ORDER = "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 "
_ORDER += "F8_E5M2 I8 U8 BOOL"
_RANKS = {name: rank for rank, name in enumerate(_ORDER.split())}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The library of the tensors, which transformers requires.
_ABOUT = {"format": "pt"}


class File(NamedTuple):
    """A safetensors file.

    Attributes:
      header: the bytes before the tensors.
      offsets: path of an array -> where its values begin in the file.
      nbytes: bytes of the file.
    """

    name: str
    header: bytes
    offsets: Mapping[tree.Path, int]
    nbytes: int


def why_not_written(leaf: Leaf) -> str | None:
    """Why safetensors cannot hold a leaf; None if it can."""
    if not isinstance(leaf, ArrayHandle):
        return f"safetensors has no {type_name(leaf)}"
    if leaf.key_impl is not None:
        return f"safetensors has no PRNG keys ({leaf.key_impl})"
    if leaf.value_type == "scalar":
        return "safetensors has no Python scalars"
    if leaf.dtype not in _NAMES:
        return f"safetensors has no {name_of(leaf.dtype)}"
    return None


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


def index(files: Sequence[File]) -> bytes:
    """The document that maps each tensor to its file."""
    names = {stored_name(path): file.name for file in files for path in file.offsets}
    size = sum(file.nbytes - len(file.header) for file in files)
    document = {"metadata": {"total_size": size}, "weight_map": names}
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


# zarr.

# Data files of an OCDBT database; Orbax's own default.
_FILE_BYTES = 2 << 30
# The same on gs, as in Orbax. TensorStore holds each file in memory until it is uploaded.
_GS_FILE_BYTES = 400 << 20
# The encoding of an array if no array of the checkpoint is stored: that of Orbax.
_ORBAX = (
    b'{"zarr_format":2,"shape":[],"dtype":"<f4","compressor":{"id":"zstd","level":1},"order":"C",'
    b'"fill_value":null,"dimension_separator":"."}'
)
_FILE_SIZE = 'file_size="256MiB"'
# Codecs of blosc, levels, and configurations.
_BLOSC = ("lz4", "lz4hc", "blosclz", "zlib", "zstd")
_LEVELS = {"none": range(0), "zstd": range(-131072, 23), "blosc": range(10)}
_USUAL = {
    "zstd": {"checksum": False, "level": 1},
    "blosc": {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "auto"},
}


def _parse_codec(text: str) -> tuple[str, str | None, int | None]:
    """The name of a codec, blosc's own codec, and the level. Raises ArgumentError for anything
    else."""
    pattern = r"(none|zstd|blosc)(?::([a-z]\w+))?(?::(-?\d{1,6}))?"
    match = re.fullmatch(pattern, text, re.ASCII) if isinstance(text, str) else None
    if match is not None:
        name, inner, level = match[1], match[2], None if match[3] is None else int(match[3])
        inners = (None, *_BLOSC) if name == "blosc" else (None,)
        if inner in inners and (level is None or level in _LEVELS[name]):
            return name, inner, level
    raise errors.ArgumentError(
        f"`{text}` is not a codec",
        hints=[
            'codec="none"',
            'codec="zstd:9", with a level up to 22',
            'codec="blosc:lz4:5", with a level up to 9; or ' + ", ".join(_BLOSC[1:]),
        ],
    )


def _compressed(encoding: Encoding, text: str) -> Encoding:
    """An encoding with another codec. Checksums stay. The rest of the codec's configuration is the
    source's if it has that codec, or else the default."""
    name, inner, level = _parse_codec(text)
    kept = tuple(text for text in encoding.compressors if json.loads(text)["name"] == "crc32c")
    if name == "none":
        return encoding._replace(compressors=kept)
    own = [json.loads(text) for text in encoding.compressors if text not in kept]
    same = own[0]["configuration"] if [c["name"] for c in own] == [name] else {}
    asked = {"level": level} if name == "zstd" else {"cname": inner, "clevel": level}
    asked = {key: value for key, value in asked.items() if value is not None}
    # Inside of shards nothing would bound what a chunk of blosc decodes to.
    shards = None if name == "blosc" else encoding.shards
    new = codec(name, {**_USUAL[name], **same, **asked})
    return encoding._replace(compressors=(new, *kept), shards=shards)


@dataclasses.dataclass(frozen=True)
class TargetFormat(ZarrVersion):
    """How the arrays of an item are stored in the destination.

    Attributes:
      ocdbt: in an OCDBT database rather than plain files.
      codec: the requested compression; None keeps the source's.
      file_bytes: approximate bytes of a data file of the database.
      linkable: data files of the source may become data files of the destination.
      omits_fill: chunks that hold only the fill value are left out, as in the source.
      usual: the encoding of arrays that have no stored source.
      files: safetensors files, which hold the arrays instead of chunks.
    """

    ocdbt: bool
    codec: str | None
    file_bytes: int
    linkable: bool
    omits_fill: bool
    usual: Encoding
    files: tuple[File, ...] = ()

    @property
    def format(self) -> str:
        """Its name, as in `Source.format`."""
        if self.files:
            return "safetensors"
        return f"{'OCDBT' if self.ocdbt else 'plain files'}, {'zarr3' if self.zarr3 else 'zarr2'}"

    def encoding(self, handle: ArrayHandle) -> Encoding:
        """How an array's chunks are encoded. Raises ValueError if zarr has no such codec."""
        version = 3 if self.zarr3 else 2
        if self.codec is None and handle.stored is not None:
            encoding = handle.stored.encoding
            if encoding.zarr_format == version:
                return encoding
        _, root = next(handle.roots(), (None, None))
        derived = isinstance(handle.data, Derived)
        cast = root is None or handle.dtype != handle.stored_dtype
        encoding = self.usual if root is None else root.encoding
        return _encoding(encoding, derived, cast, self.codec, version)

    def check(self, handle: ArrayHandle) -> None:
        """Raises ValueError if this version of zarr lacks the codec or the fill value."""
        encoding = self.encoding(handle)
        _, root = next(handle.roots(), (None, None))
        if root is None or encoding.fill in ZEROS or self.zarr3 == root.store.zarr3:
            return
        document = encoding.document(handle.shape, handle.chunk_shape, handle.dtype)
        spec = {"driver": self.driver, "kvstore": "memory://", "assume_metadata": True}
        made = ts.open({**spec, "metadata": json.loads(document)}).result()
        filled = root.store.open_array(None, root.metadata, True)
        if np.asarray(made.fill_value).tobytes() != np.asarray(filled.fill_value).tobytes():
            raise ValueError(
                f"zarr{3 if self.zarr3 else 2} cannot express its fill value {encoding.fill}"
            )


@functools.lru_cache(maxsize=4096)
def _encoding(
    encoding: Encoding, derived: bool, cast: bool, codec: str | None, version: int
) -> Encoding:
    """The encoding of an array that is derived, or cast, from one with another encoding."""
    if derived:  # of another shape: inner chunks are whole, and dimensions have no names
        shards = encoding.shards and (None, encoding.shards[1])
        encoding = encoding._replace(transposes=(), shards=shards, names="{}")
    if cast:  # the fill value that Orbax writes
        encoding = encoding._replace(endian="little", fill="null")
    if codec is not None:
        encoding = _compressed(encoding, codec)
    return encoding if encoding.zarr_format == version else converted(encoding, version)


def safetensors_format(handles: Sequence[ArrayHandle], file_size: int) -> TargetFormat:
    """The format of an export: files with at most `file_size` bytes of tensors, or one tensor."""
    groups = list(in_groups(handles, lambda handle: handle.nbytes, file_size)) or [[]]
    files = []
    for number, group in enumerate(groups, 1):
        of = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        files.append(_file(f"model{of}.safetensors", group))
    encoding = parse_encoding(_ORBAX)
    return TargetFormat(False, False, None, _FILE_BYTES, False, False, encoding, tuple(files))


def target_format(
    ckpt: Checkpoint,
    destination: Location | None,
    max_memory: int,
    format: str | None,
    ocdbt: bool | None,
    codec: str | None,
    file_size: int | str | None,
) -> TargetFormat:
    """The format of an item: the requested one, or else the source's. In a bucket, data files are
    small enough to be held in memory, and no chunk is left out, so that a lost chunk is
    detected. Raises ArgumentError for wrong arguments, or if this version of zarr lacks a codec
    of an array."""
    if format not in (None, "zarr2", "zarr3"):
        hints = ['format="zarr2"', 'format="zarr3"']
        raise errors.ArgumentError(f"`{format}` is not a format", hints=hints)
    if ocdbt is not None and type(ocdbt) is not bool:
        raise errors.ArgumentError(f"ocdbt must be True, False or None, not `{ocdbt!r:.40}`")
    store = ckpt.source.store
    if codec is None and store.ranged:  # such files are not compressed, and Orbax's are
        codec = "zstd:1"
    if codec is not None:
        _parse_codec(codec)
    file_bytes = None
    if file_size is not None:
        file_bytes = units.parse_bytes(file_size, "not a file size", _FILE_SIZE)
    ocdbt = store.ocdbt if ocdbt is None else ocdbt
    if not ocdbt and file_bytes is not None:
        raise errors.ArgumentError(
            "file_size does not apply to plain files: each file holds one chunk",
            hints=["file_size=... requires ocdbt=True"],
        )
    size, fills = file_bytes or _FILE_BYTES, store.omits_fill
    if destination is not None and not destination.is_local:
        most = _GS_FILE_BYTES if destination.path.startswith("gs:") else size
        size, fills = min(size, most, max_memory // 4), False
    stored = (data.metadata for array in ckpt.arrays for _, data in array.roots())
    found = TargetFormat(
        store.zarr3 if format is None else format == "zarr3",
        ocdbt,
        codec,
        size,
        store.ocdbt and ocdbt and file_bytes is None and not store.ranged,
        fills,
        parse_encoding(next(stored, _ORBAX)),
    )
    problems = []
    for array in ckpt.arrays:
        try:
            found.check(array)
        except ValueError as error:
            problems.append(f"{tree.format_path(array.path)}: {error}")
    if problems:
        raise errors.ArgumentError(
            f"some arrays cannot be stored as {found.format}",
            problems,
            ['codec="zstd" compresses them again'],
        )
    return found


# Names.

# Bytes of the name of a file or a directory.
_MAX_NAME = 255
_SLASH = "its name ends in `/`"


def name_errors(ckpt: Checkpoint, form: TargetFormat) -> Iterator[errors.ReshardError]:
    """Problems with the names of an item's leaves in this format."""
    hints = ["reshard.rename(ckpt, [(..., ...)])"]
    if clashes := _clashes(ckpt, form):
        yield errors.TreeMismatchError("two leaves would be stored under one name", clashes, hints)
    problems = {path: name_problem(stored_name(path)) for path in ckpt}
    problems |= {a.path: _SLASH for a in ckpt.arrays if stored_name(a.path).endswith("/")}
    if unusable := [
        f"{tree.format_path(path):.80}: {why}" for path, why in problems.items() if why
    ]:
        yield errors.TreeMismatchError("some names cannot be stored", unusable, hints)
    if empty := [a for a in ckpt.arrays if 0 in a.shape]:
        lines = [f"{tree.format_path(a.path)}  {a.describe()}" for a in empty]
        drop = tree.as_python([tree.format_path(a.path) for a in empty])
        hints = [f"reshard.select(ckpt, drop={drop})"]
        yield errors.TreeMismatchError("Orbax stores no arrays without elements", lines, hints)
    if not form.ocdbt and (unusable := list(_not_files(ckpt))):
        yield errors.ArgumentError(
            "some arrays cannot be stored as plain files",
            unusable,
            ["ocdbt=True stores them in a database"],
        )


def _not_files(ckpt: Checkpoint) -> Iterator[str]:
    """Arrays whose names cannot be names of directories, or are names of other files."""
    directory = ckpt.source.directory
    names = [] if ckpt.source.is_foreign else directory.names()  # none of its other files is copied
    taken = {name for name in names if is_sibling(ckpt, directory / name)}
    if not ckpt.source.store.ocdbt:  # directories are arrays, in the source too
        taken = {name for name in taken if not (directory / name).is_dir()}
    taken |= WRITTEN - {*FOLDERS}  # which are in databases alone
    for array in ckpt.arrays:
        parts = stored_name(array.path).rstrip("/").split("/")
        if not array.path:
            why = "a tree of one array has no name for its directory"
        elif not {"", "."}.isdisjoint(parts):
            why = "its name is not a valid path"
        elif any("\\" in part or part.endswith(".__lock") for part in parts):
            why = "TensorStore takes `\\` for `/`, and keeps names that end in `.__lock` for locks"
        elif any(len(part.encode(errors="replace")) > _MAX_NAME for part in parts):
            why = f"its name is longer than a file name, which has at most {_MAX_NAME} bytes"
        elif parts[0] in taken or parts[0].startswith(PROCESS):
            why = f"`{parts[0]}` is another file of the checkpoint"
        else:
            continue
        yield f"{tree.format_path(array.path):.80}: {why}"


def _clashes(ckpt: Checkpoint, form: TargetFormat) -> list[str]:
    """Leaves of which one would overwrite the other, or a file of the other."""
    arrays = {handle.path: handle for handle in ckpt.arrays}
    strings = [path for path, leaf in ckpt.items() if isinstance(leaf, str)]

    def is_unchanged(path: tree.Path) -> bool:
        data = arrays[path].data
        return isinstance(data, StoredArray) and data.name == stored_name(path)

    clashes = name_clashes(arrays, is_unchanged) + name_clashes(strings)
    for kind in (arrays, strings):
        names = {stored_name(path): path for path in kind}
        for name, path in names.items():
            for above in itertools.accumulate(name.split("/")[:-1], "{}/{}".format):
                outer = names.get(above)
                if outer is None:
                    continue
                two = f"{tree.format_path(outer)} and {tree.format_path(path)}"
                if outer not in arrays:
                    clashes.append(f"{two}: the string `{name}` would be inside `{above}`")
                    continue
                below = name[len(above) + 1 :]
                if file := _file_above(form, arrays[outer], arrays[path], below):
                    clashes.append(f"{two}: `{above}/{file}` is a file of `{above}`")
    return clashes


def _file_above(
    form: TargetFormat, outer: ArrayHandle, inner: ArrayHandle, below: str
) -> str | None:
    """The key of an outer array that is also a file or directory of an inner one, `below` it."""
    chunks = form.encoding(outer).chunk_keys(len(outer.shape))
    first = form.encoding(inner).chunk_key((0,) * len(inner.shape))
    *directories, whole = itertools.accumulate(f"{below}/{first}".split("/"), "{}/{}".format)
    for key in [whole] if form.ocdbt else [*directories, whole]:
        if key == form.metadata_key or chunks.fullmatch(key):
            return key
    return None
