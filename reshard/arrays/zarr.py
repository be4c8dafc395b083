"""zarr metadata documents, v2 and v3, and the encoding of chunks that they describe."""

import functools
import json
import math
import re
from collections.abc import Hashable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard.arrays.boxes import Shape, grid_size

Document = dict[str, Any]

# Codecs from bytes to bytes that do not depend on shapes.
_PLAIN_CODECS = {"zstd", "gzip", "zlib", "bz2", "blosc", "crc32c"}
# Codecs that zarr v2 and v3 share, and the parts of their configurations that only v3 has.
_SHARED_CODECS: dict[str, Document] = {
    "zstd": {"checksum": False, "level": 1},
    "gzip": {"level": 6},
    "blosc": {},
}
# The shuffles of blosc, by their numbers in zarr v2.
_SHUFFLES = {-1: "auto", 0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}
# A part of a zstd configuration that only zarr v3 has, and that it may leave out.
_NO_CHECKSUM = '"checksum": false, '
# Fill values that are zero, as JSON.
ZEROS = ("null", "0", "0.0", "false", "[0.0, 0.0]")
# Keys of a document that the shape, chunk shape, dtype and encoding of an array account for.
_KNOWN = {
    *("zarr_format", "node_type", "shape", "dtype", "data_type", "chunks", "chunk_grid"),
    *("compressor", "filters", "order", "dimension_separator", "chunk_key_encoding", "codecs"),
    "fill_value",
}
# Limits for one array, far above any model: decoded bytes, and chunks.
_MOST_BYTES = 1 << 46
_MOST_CHUNKS = 1 << 22


def check(document: Any) -> None:
    """Raises ValueError for a document that is not in Orbax's form: abbreviations that other
    readers of zarr accept are not supported."""
    known = isinstance(document, dict) and document.get("zarr_format") in (2, 3)
    _require(known, "it is not zarr metadata")
    _require(isinstance(document.get("shape"), list), "it has no shape")
    if document["zarr_format"] == 2:
        _require(isinstance(document.get("chunks"), list), "it has no chunk shape")
        _require(isinstance(document.get("dtype"), str), "its dtype has no name")
        return
    grid = document.get("chunk_grid")
    regular = grid.get("configuration") if isinstance(grid, dict) else None
    _require(_has_chunk_shape(regular), "it has no chunk shape")
    names = _codec_names(document.get("codecs"))
    outer = [name for name in names if name not in ("transpose", "bytes")]
    if outer[:1] != ["blosc"] or not set(outer[1:]) <= {"crc32c"}:
        _check_bounded(outer)  # the header of a blosc chunk says its decoded size
    sharded = "sharding_indexed" in names
    _require(len(names) == 1 or not sharded, "its sharding codec is not the only codec")
    if sharded:
        inside = document["codecs"][0].get("configuration")
        _require(_has_chunk_shape(inside), "its sharding codec has no inner chunk shape")
        inner = _codec_names(inside.get("codecs"))
        _check_bounded(inner)
        _require("sharding_indexed" not in inner, "its inner chunks have inner chunks")
    keys = document.get("chunk_key_encoding")
    known = isinstance(keys, dict) and keys.get("name") in ("default", "v2")
    _require(known, "its chunk keys have an unknown format")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _has_chunk_shape(configuration: Any) -> bool:
    return isinstance(configuration, dict) and isinstance(configuration.get("chunk_shape"), list)


def _check_bounded(codecs: list[str]) -> None:
    """Raises ValueError if chunks may decode to more than their size, which only blosc does."""
    _require(
        "blosc" not in codecs,
        "it is compressed with blosc inside another codec, so a chunk may decode to 2 GiB",
    )


def _codec_names(codecs: Any) -> list[str]:
    _require(isinstance(codecs, list) and len(codecs) > 0, "it has no list of codecs")
    names = [codec.get("name") if isinstance(codec, dict) else None for codec in codecs]
    _require(all(isinstance(name, str) for name in names), "it has a codec without a name")
    return [*map(str, names)]


def check_size(shape: Shape, chunk: Shape, itemsize: int) -> None:
    """Raises ValueError for an array with more bytes or chunks than any model: loops and numbers
    elsewhere rely on these limits."""
    nbytes = math.prod(shape) * itemsize
    if nbytes > _MOST_BYTES:
        raise ValueError(f"an array of {list(shape)} has {nbytes} bytes, more than any model has")
    count = grid_size(shape, chunk)
    if count > _MOST_CHUNKS:
        raise ValueError(f"an array of {list(shape)} has {count} chunks of {list(chunk)}")


class Encoding(NamedTuple):
    """How values become stored bytes, apart from shape, chunk shape and dtype.

    Codecs are in the terms of zarr v3, as JSON, also for zarr v2, without the parts that depend on
    the dtype.

    Attributes:
      zarr_format: 2 or 3.
      transposes: codecs from arrays to arrays, in order.
      endian: byte order of elements.
      compressors: codecs from bytes to bytes, in order.
      shards: the sharding codec around all these, if any: the shape of the inner chunks, None if
        they are whole chunks, and its other parameters, as JSON.
      keys: the form of chunk keys: `"default"`, or `"v2"`.
      separator: the text between the places in a chunk's key.
      fill: the fill value of absent chunks, as JSON.
      names: the rest of the document, for example names of dimensions, as JSON.
    """

    zarr_format: int
    transposes: tuple[str, ...]
    endian: str
    compressors: tuple[str, ...]
    shards: tuple[Shape | None, str] | None
    keys: str
    separator: str
    fill: str
    names: str = "{}"

    @property
    def codecs(self) -> Hashable:
        """The part that two arrays of one dtype and chunk shape must share, so that encoded chunks
        of one are chunks of the other."""
        fill = "null" if self.fill in ZEROS else self.fill
        compressors = tuple(text.replace(_NO_CHECKSUM, "") for text in self.compressors)
        return self.transposes, self.endian, compressors, self.shards, fill

    @property
    def is_blosc(self) -> bool:
        """Whether chunks begin with a blosc header."""
        return bool(self.compressors) and _codec_name(self.compressors[0]) == "blosc"

    @property
    def ignores_unit_axes(self) -> bool:
        """Whether axes of size 1 do not change encoded chunks."""
        names = set(map(_codec_name, self.compressors))
        whole = self.shards is None or self.shards[0] is None
        return whole and not self.transposes and names <= _PLAIN_CODECS

    def chunk_index(self, key: str, rank: int) -> Shape:
        """The place of a chunk in the grid, from its key and the rank of the array."""
        return tuple(map(int, key.split(self.separator)[-rank:])) if rank else ()

    def chunk_key(self, index: Shape) -> str:
        """The key of a chunk, from its place."""
        texts = list(map(str, index))
        if self.keys == "v2":
            return self.separator.join(texts) or "0"
        return self.separator.join(["c", *texts])

    def chunk_keys(self, rank: int) -> re.Pattern[str]:
        """A pattern of the keys of chunks, with a group for each place of `chunk_index`."""
        separator = re.escape(self.separator)
        places = separator.join([r"(0|[1-9]\d{0,18})"] * rank)
        if self.keys == "v2":
            return re.compile(places or "0", re.ASCII)
        return re.compile(f"c{separator}{places}" if places else "c", re.ASCII)

    def most_encoded(self, chunk: Shape, itemsize: int) -> int:
        """The most bytes of an encoded chunk: values that do not compress become larger, and inner
        chunks have an index."""
        decoded = math.prod(chunk) * itemsize
        return decoded + decoded // 64 + 1024 * grid_size(chunk, self._inner(chunk))

    def _inner(self, chunk: Shape) -> Shape:
        """Shape of the inner chunks of a chunk; its own if it has none or they do not divide it."""
        inner = self.shards and self.shards[0]
        if inner is None or len(inner) != len(chunk):
            return chunk
        return chunk if any(c % i for c, i in zip(chunk, inner, strict=True)) else inner

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def document(self, shape: Shape, chunk: Shape, dtype: np.dtype) -> bytes:
        """An array's stored metadata. Inner chunks that do not divide its chunks become whole."""
        document = self._zarr2(chunk, dtype) if self.zarr_format == 2 else self._zarr3(chunk, dtype)
        whole = {**json.loads(self.names), **document, "shape": list(shape)}
        return json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()

    def _zarr2(self, chunk: Shape, dtype: np.dtype) -> Document:
        compressors = [_zarr2_codec(json.loads(codec)) for codec in self.compressors]
        byte_order = "<" if self.endian == "little" else ">"
        own = hasattr(ml_dtypes, dtype.name)  # TensorStore writes JAX's own dtypes by name
        return {
            "zarr_format": 2,
            "chunks": list(chunk),
            "dtype": dtype.name if own else dtype.newbyteorder(byte_order).str,
            "order": "F" if self.transposes else "C",
            "compressor": compressors[0] if compressors else None,
            "filters": None,
            "fill_value": json.loads(self.fill),
            "dimension_separator": self.separator,
        }

    def _zarr3(self, chunk: Shape, dtype: np.dtype) -> Document:
        stored: Document = {"name": "bytes"}
        if dtype.itemsize > 1:  # single bytes have no order
            stored["configuration"] = {"endian": self.endian}
        codecs = [json.loads(codec) for codec in self.transposes]
        codecs += [stored, *(_of_dtype(json.loads(codec), dtype) for codec in self.compressors)]
        if self.shards is not None:
            sharding = {**json.loads(self.shards[1]), "chunk_shape": list(self._inner(chunk))}
            codecs = [{"name": "sharding_indexed", "configuration": sharding | {"codecs": codecs}}]
        fill = json.loads(self.fill)
        if self.fill in ZEROS:
            fill = 0 if "int" in dtype.name else {"b": False, "c": [0.0, 0.0]}.get(dtype.kind, 0.0)
        keys: Document = {"name": self.keys}
        if self.separator != ("." if self.keys == "v2" else "/"):
            keys["configuration"] = {"separator": self.separator}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "chunk_key_encoding": keys,
            "codecs": codecs,
            "fill_value": fill,
        }


def _of_dtype(codec: Document, dtype: np.dtype) -> Document:
    """A codec of zarr v3, with the parts that depend on the dtype."""
    if codec["name"] == "blosc":
        codec["configuration"]["typesize"] = dtype.itemsize
        if codec["configuration"].get("shuffle") == "auto":
            codec["configuration"]["shuffle"] = "bitshuffle" if dtype.itemsize == 1 else "shuffle"
    return codec if codec["configuration"] else {"name": codec["name"]}


@functools.lru_cache(maxsize=4096)
def parse_encoding(metadata: bytes) -> Encoding:
    """The encoding of an array from metadata that passed `check`."""
    document = json.loads(metadata)
    names = {key: value for key, value in document.items() if key not in _KNOWN}
    rest = (_text(document.get("fill_value")), _text(names))
    if document["zarr_format"] == 2:
        order = list(range(len(document["shape"])))[::-1]
        transposed = document.get("order", "C") == "F" and len(order) > 1
        compressor = document.get("compressor")
        return Encoding(
            2,
            (codec("transpose", {"order": order}),) if transposed else (),
            "big" if document["dtype"].startswith(">") else "little",
            () if compressor is None else (_zarr3_codec(compressor),),
            None,
            "v2",
            document.get("dimension_separator", "."),
            *rest,
        )
    codecs, shards = document["codecs"], None
    if codecs[0]["name"] == "sharding_indexed":
        sharding = dict(codecs[0]["configuration"])
        inner, codecs = tuple(sharding.pop("chunk_shape")), sharding.pop("codecs")
        whole = list(inner) == document["chunk_grid"]["configuration"]["chunk_shape"]
        shards = (None if whole else inner, _text(sharding))
    keys, transposes, endian, compressors = document["chunk_key_encoding"], [], "little", []
    for each in codecs:
        configuration = dict(each.get("configuration") or {})
        if each["name"] == "transpose":
            transposes.append(_text(each))
        elif each["name"] == "bytes":
            endian = configuration.get("endian", "little")
        else:
            if each["name"] == "blosc":
                configuration.pop("typesize", None)  # the dtype decides it
            compressors.append(codec(each["name"], configuration))
    separator = "." if keys["name"] == "v2" else "/"
    separator = (keys.get("configuration") or {}).get("separator", separator)
    layout = (shards, keys["name"], separator)
    return Encoding(3, tuple(transposes), endian, tuple(compressors), *layout, *rest)


def codec(name: str, configuration: Document) -> str:
    """A codec as `Encoding` has it."""
    return _text({"name": name, "configuration": configuration})


@functools.lru_cache(maxsize=1024)
def _codec_name(codec: str) -> str:
    return json.loads(codec)["name"]


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True)


def _zarr3_codec(compressor: Document) -> str:
    """A compressor of zarr v2 as a codec of `Encoding`."""
    configuration = {key: value for key, value in compressor.items() if key != "id"}
    if compressor["id"] == "blosc":
        configuration["shuffle"] = _SHUFFLES[configuration.get("shuffle", -1)]
    return codec(compressor["id"], configuration)


def _zarr2_codec(codec: Document) -> Document:
    """A codec as a compressor of zarr v2."""
    compressor = {"id": codec["name"], **codec["configuration"]}
    compressor.pop("checksum", None)
    if codec["name"] == "blosc":
        numbers = {name: number for number, name in _SHUFFLES.items()}
        compressor["shuffle"] = numbers[compressor.get("shuffle", "auto")]
    return compressor


def converted(encoding: Encoding, zarr_format: int) -> Encoding:
    """The encoding in another version of zarr, without the parts that version lacks: zarr v2 has no
    shards and no checksums, and two orders of axes. Raises ValueError if it lacks the codec."""
    codecs = [(c["name"], c["configuration"]) for c in map(json.loads, encoding.compressors)]
    names = [name for name, _ in codecs if name != "crc32c" or zarr_format == 3]
    if not set(names) <= _SHARED_CODECS.keys() or (zarr_format == 2 and len(names) > 1):
        raise ValueError(f"zarr{zarr_format} has no compressor {', '.join(names)}")
    orders = [json.loads(text)["configuration"]["order"] for text in encoding.transposes]
    reverses = len(orders) == 1 and orders[0] == sorted(orders[0], reverse=True)
    keys, separator = ("v2", ".") if zarr_format == 2 else ("default", "/")
    return encoding._replace(
        zarr_format=zarr_format,
        transposes=encoding.transposes if zarr_format == 3 or reverses else (),
        endian="little",  # some dtypes of zarr v2 have no other order
        compressors=tuple(codec(n, _SHARED_CODECS[n] | rest) for n, rest in codecs if n in names),
        shards=None,
        keys=keys,
        separator=separator,
        fill="null" if encoding.fill in ZEROS else encoding.fill,
        names="{}",
    )
