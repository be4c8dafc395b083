"""The format of what is written: the source's, but for what the user asks for."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import chunks_together, shape_of
from reshard.arrays.derived import stored_values
from reshard.arrays.handle import ArrayHandle, Derived
from reshard.arrays.zarr import ZEROS, Encoding, codec, converted, parse_encoding
from reshard.checkpoint import Checkpoint
from reshard.engine.batches import Unit, in_batches
from reshard.engine.budget import Budget, copy_bytes
from reshard.engine.cost import first_cell
from reshard.engine.read import Read, read
from reshard.errors import ArgumentError
from reshard.storage.array_store import ZarrVersion
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.tree import format_path
from reshard.units import format_bytes, parse_bytes
from reshard.writer.safetensors import File

# Data files of an OCDBT database; Orbax's own default.
_FILE_BYTES = 2 << 30
# The same of those that Orbax writes to gs. TensorStore holds each in memory until it is there.
_GS_FILE_BYTES = 400 << 20
# What an array is stored as where no other one of the checkpoint says: as Orbax does it.
_ORBAX = b'{"zarr_format":2,"shape":[],"dtype":"<f4","compressor":{"id":"zstd","level":1}}'
_FILE_SIZE = 'file_size="256MiB"'
# Elements of a sample of a codec, at most: enough for it to settle, little to read.
_SAMPLE = 1 << 18
# Bytes that blosc takes at once: `BLOSC_MAX_BUFFERSIZE`.
_MAX_BLOSC = (1 << 31) - 17
# What blosc compresses with.
_BLOSC = ("lz4", "lz4hc", "blosclz", "zlib", "zstd")


class Codec(NamedTuple):
    """What chunks are to be compressed with.

    Attributes:
      name: `"none"`, `"zstd"` or `"blosc"`.
      level: None for the source's if it has that codec, else the usual one.
      inner: what blosc compresses with; None as for the level.
    """

    name: str
    level: int | None = None
    inner: str | None = None

    def applied(self, encoding: Encoding) -> Encoding:
        """An encoding with this codec in the place of its own. Checksums stay."""
        kept = tuple(text for text in encoding.compressors if json.loads(text)["name"] == "crc32c")
        if self.name == "none":
            return encoding._replace(compressors=kept)
        own = [json.loads(text) for text in encoding.compressors if text not in kept]
        same = own[0]["configuration"] if [c["name"] for c in own] == [self.name] else {}
        if self.name == "zstd":
            asked = {"level": self.level}
            usual = {"level": 1}
        else:
            asked = {"cname": self.inner, "clevel": self.level}
            usual = {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "auto"}
        asked = {key: value for key, value in asked.items() if value is not None}
        new = codec(self.name, {**usual, **same, **asked})
        # Inside of shards nothing would bound what a chunk of blosc decodes to.
        shards = None if self.name == "blosc" else encoding.shards
        return encoding._replace(compressors=(new, *kept), shards=shards)

    def __str__(self) -> str:
        parts = (self.name, self.inner, self.level)
        return ":".join(str(part) for part in parts if part is not None)


@dataclasses.dataclass(frozen=True)
class TargetFormat(ZarrVersion):
    """How the arrays of an item are stored in the destination.

    Attributes:
      ocdbt: in an OCDBT database rather than plain files.
      codec: what chunks are compressed with, None for what each of them is in the source.
      file_bytes: bytes that data files of the database have, about.
      shares: data files of the source may become data files of the destination.
      fills: chunks that hold the fill value alone are left out, as they are in the source.
      usual: the encoding of arrays that come from no stored one.
      files: safetensors files that hold the arrays, in the place of chunks.
    """

    ocdbt: bool
    codec: Codec | None
    file_bytes: int
    shares: bool
    fills: bool
    usual: Encoding
    files: tuple[File, ...] = ()

    @property
    def format(self) -> str:
        """It in words, as `Source.format` has it."""
        if self.files:
            return "safetensors"
        return f"{'OCDBT' if self.ocdbt else 'plain files'}, {'zarr3' if self.zarr3 else 'zarr2'}"

    def __str__(self) -> str:
        codec = "" if self.codec is None else f", {self.codec}"
        size = (
            "" if self.file_bytes == _FILE_BYTES else f", files of {format_bytes(self.file_bytes)}"
        )
        return f"{self.format}{codec}{size}"

    def encoding(self, handle: ArrayHandle) -> Encoding:
        """How an array's chunks are encoded; raises ValueError where zarr has no such codec."""
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
        """Raises ValueError where this version of zarr lacks the codec or the fill value."""
        encoding = self.encoding(handle)
        _, root = next(handle.roots(), (None, None))
        if root is None or encoding.fill in ZEROS or self.zarr3 == root.store.zarr3:
            return
        document = encoding.document(handle.shape, handle.chunk_shape, handle.dtype)
        spec = {"driver": self.driver, "kvstore": "memory://", "assume_metadata": True}
        made = ts.open({**spec, "metadata": json.loads(document)}).result()
        if np.asarray(made.fill_value).tobytes() != np.asarray(root.view().fill_value).tobytes():
            raise ValueError(f"zarr{3 if self.zarr3 else 2} has no fill value {encoding.fill}")

    def check_chunk(self, handle: ArrayHandle, chunk: tuple[int, ...]) -> None:
        """Raises ArgumentError for a chunk that the codec of an array does not take."""
        nbytes = math.prod(chunk) * handle.dtype.itemsize
        if nbytes > _MAX_BLOSC and not self.files and self.encoding(handle).is_blosc:
            raise ArgumentError(
                f"{format_path(handle.path)}: blosc takes no chunks of more than {_MAX_BLOSC} "
                f"bytes, and one of {list(chunk)} has {nbytes}",
                hints=['chunks="1GiB"'],
            )

    def verbatim(self, handle: ArrayHandle) -> list[StoredValue] | None:
        """The stored values that an array consists of as they are; None if it is rewritten."""
        return None if self.files else stored_values(handle, self.encoding(handle))

    def metadata(self, handle: ArrayHandle, chunk: tuple[int, ...]) -> bytes:
        return self.encoding(handle).document(handle.shape, chunk, handle.dtype)

    def is_verbatim(self, handle: ArrayHandle) -> bool:
        """Whether all that is stored of an array is as it is in the source, key for key."""
        stored = handle.stored
        if stored is None or stored.store.ranged:
            return False
        return stored.encoding == self.encoding(handle)

    def encoded_ratio(self, handle: ArrayHandle, max_memory: int) -> float | None:
        """Encoded bytes for each decoded byte, measured on part of the first chunk, which is read;
        None where it does not fit into memory."""
        if not handle.nbytes:
            return 1.0
        cell = shape_of(first_cell(handle))
        sample = chunks_together(cell, (1,) * len(cell), _SAMPLE)
        elements, itemsize = math.prod(sample), handle.dtype.itemsize
        buffer = elements * handle.read_dtype.itemsize
        encoded = self.encoding(handle).most_encoded((elements,), itemsize)
        held = buffer + elements * itemsize + copy_bytes(encoded)
        box = tuple(slice(0, size) for size in sample)
        (batch,) = in_batches([Unit([Read(handle, box)], buffer, held)], max_memory, max_memory)
        if batch.reading > max_memory:
            return None
        with Budget(max_memory) as budget:
            for filled in read([batch], budget):
                filled.check()
                values = np.asarray(filled.values[0]).reshape(-1)
        encoding = self.encoding(handle)._replace(transposes=())
        context = ts.Context()
        store = ts.KvStore.open("memory://sample/", context=context).result()
        spec = {
            "driver": self.driver,
            "kvstore": "memory://sample/",
            "metadata": json.loads(encoding.document(values.shape, values.shape, handle.dtype)),
        }
        ts.open(spec, context=context, create=True).result().write(values).result()
        keys = [k for k in store.list().result() if not k.endswith((b".zarray", b"zarr.json"))]
        return sum(len(store.read(key).result().value) for key in keys) / values.nbytes


@functools.lru_cache(maxsize=4096)
def _encoding(
    encoding: Encoding, derived: bool, cast: bool, codec: Codec | None, version: int
) -> Encoding:
    """The encoding of an array that is derived, or cast, from one that has another."""
    if derived:
        encoding = encoding.of_derived()
    if cast:
        encoding = encoding.of_other_dtype()
    if codec is not None:
        encoding = codec.applied(encoding)
    return encoding if encoding.zarr_format == version else converted(encoding, version)


def safetensors_format(files: Iterable[File]) -> TargetFormat:
    """The format of an export."""
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
    """The format of an item: as asked for, else the source's. In a bucket data files are small
    enough to be held in memory until they are there, and all chunks are there: one that is not is
    seen to be lost. Raises ArgumentError for wrong arguments, or where arrays have codecs that this
    version of zarr lacks."""
    if format not in (None, "zarr2", "zarr3"):
        hints = ['format="zarr2"', 'format="zarr3"']
        raise ArgumentError(f"`{format}` is not a format", hints=hints)
    if ocdbt is not None and type(ocdbt) is not bool:
        raise ArgumentError(f"ocdbt is True, False or None, not `{ocdbt!r:.40}`")
    store = ckpt.source.store
    if codec is None and store.ranged:  # such files are not compressed, and Orbax's are
        codec = "zstd:1"
    parsed = None if codec is None else _parse_codec(codec)
    file_bytes = (
        None if file_size is None else parse_bytes(file_size, "not a file size", _FILE_SIZE)
    )
    ocdbt = store.ocdbt if ocdbt is None else ocdbt
    if not ocdbt and file_bytes is not None:
        raise ArgumentError(
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
        parsed,
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
            problems.append(f"{format_path(array.path)}: {error}")
    if problems:
        raise ArgumentError(
            f"arrays that cannot be stored as {found.format}",
            problems,
            ['codec="zstd" compresses them again'],
        )
    return found


def _parse_codec(text: str) -> Codec:
    pattern = r"none|(zstd)(?::(-?\d{1,6}))?|(blosc)(?::([a-z]\w+))?(?::(\d))?"
    match = re.fullmatch(pattern, text, re.ASCII) if isinstance(text, str) else None
    if match is not None:
        zstd, level, blosc, inner, blosc_level = match.groups()
        number = level or blosc_level
        found = Codec(zstd or blosc or "none", None if number is None else int(number), inner)
        if inner in (None, *_BLOSC) and (zstd is None or (found.level or 0) in range(-131072, 23)):
            return found
    raise ArgumentError(
        f"`{text}` is not a codec",
        hints=[
            'codec="none"',
            'codec="zstd:9", of levels up to 22',
            'codec="blosc:lz4:5", of levels up to 9; or ' + ", ".join(_BLOSC[1:]),
        ],
    )
