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
_SHARED_CODECS = {"zstd", "gzip", "blosc"}
_ONLY_ZARR3 = {"zstd": {"checksum": False}}
# The shuffles of blosc, by their numbers in zarr v2.
_SHUFFLES = {-1: "auto", 0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}
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


def check(document: Document) -> None:
    """Raises ValueError for metadata whose chunks this package cannot read within bounds. The
    document is as TensorStore writes it, which has checked its form."""
    if document["zarr_format"] == 2:
        if not isinstance(document["dtype"], str):
            raise ValueError("its dtype has no name")
        return
    codecs = document["codecs"]
    names = [codec["name"] for codec in codecs]
    sharded = "sharding_indexed" in names
    if sharded:
        if len(names) > 1:
            raise ValueError("its sharding codec is not the only codec")
        names = [codec["name"] for codec in codecs[0]["configuration"]["codecs"]]
        if "sharding_indexed" in names:
            raise ValueError("its inner chunks have inner chunks")
    outer = [name for name in names if name not in ("transpose", "bytes")]
    # The header of a blosc chunk declares its decoded size.
    if "blosc" in names and (sharded or outer not in (["blosc"], ["blosc", "crc32c"])):
        text = "it is compressed with blosc inside another codec, so a chunk may decode to 2 GiB"
        raise ValueError(text)


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
        return self.transposes, self.endian, self.compressors, self.shards, fill

    @property
    def is_blosc(self) -> bool:
        """Whether chunks begin with a blosc header."""
        return [_name(codec) for codec in self.compressors[:1]] == ["blosc"]

    @property
    def ignores_unit_axes(self) -> bool:
        """Whether axes of size 1 do not change encoded chunks."""
        names = set(map(_name, self.compressors))
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
        own = hasattr(ml_dtypes, dtype.name)  # TensorStore writes JAX's own dtypes by name
        byte_order = "<" if self.endian == "little" else ">"
        compressors = [_zarr2_codec(*_parts(codec)) for codec in self.compressors]
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
        endian = {"endian": self.endian} if dtype.itemsize > 1 else {}  # single bytes have no order
        codecs = [_document("bytes", endian)]
        for name, configuration in map(_parts, self.compressors):
            if name == "blosc":
                configuration["typesize"] = dtype.itemsize
                if configuration["shuffle"] == "auto":
                    configuration["shuffle"] = "bitshuffle" if dtype.itemsize == 1 else "shuffle"
            codecs.append(_document(name, configuration))
        codecs = [json.loads(codec) for codec in self.transposes] + codecs
        if self.shards is not None:
            sharding = {**json.loads(self.shards[1]), "chunk_shape": list(self._inner(chunk))}
            codecs = [{"name": "sharding_indexed", "configuration": sharding | {"codecs": codecs}}]
        fill = json.loads(self.fill)
        if self.fill in ZEROS:
            fill = 0 if "int" in dtype.name else {"b": False, "c": [0.0, 0.0]}.get(dtype.kind, 0.0)
        usual = self.separator == ("." if self.keys == "v2" else "/")
        separator = {} if usual else {"separator": self.separator}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "data_type": dtype.name,
            "chunk_grid": _document("regular", {"chunk_shape": list(chunk)}),
            "chunk_key_encoding": _document(self.keys, separator),
            "codecs": codecs,
            "fill_value": fill,
        }


def _document(name: str, configuration: Document) -> Document:
    return {"name": name} | ({"configuration": configuration} if configuration else {})


def codec(name: str, configuration: Document) -> str:
    """A codec as `Encoding` has it."""
    return _text({"name": name, "configuration": configuration})


@functools.lru_cache(maxsize=256)
def _name(codec: str) -> str:
    """The name of a codec. Each view of an array asks for it."""
    return json.loads(codec)["name"]


def _parts(codec: str) -> tuple[str, Document]:
    """The name and the configuration of a codec."""
    document = json.loads(codec)
    return document["name"], document["configuration"]


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def parse_encoding(metadata: bytes) -> Encoding:
    """The encoding of an array from metadata as TensorStore writes it, which passed `check`."""
    document = json.loads(metadata)
    names = {key: value for key, value in document.items() if key not in _KNOWN}
    rest = (_text(document["fill_value"]), _text(names))
    if document["zarr_format"] == 2:
        order = [*range(len(document["shape"]))][::-1]
        transposed = document["order"] == "F" and len(order) > 1
        compressor = document["compressor"]
        return Encoding(
            2,
            (codec("transpose", {"order": order}),) if transposed else (),
            "big" if document["dtype"].startswith(">") else "little",
            () if compressor is None else (_zarr3_codec(compressor),),
            None,
            "v2",
            document["dimension_separator"],
            *rest,
        )
    codecs, shards = document["codecs"], None
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        inner, codecs = sharding.pop("chunk_shape"), sharding.pop("codecs")
        whole = inner == document["chunk_grid"]["configuration"]["chunk_shape"]
        shards = (None if whole else tuple(inner), _text(sharding))
    keys, transposes, endian, compressors = document["chunk_key_encoding"], [], "little", []
    for name, configuration in ((each["name"], each.get("configuration", {})) for each in codecs):
        if name == "transpose":
            transposes.append(codec(name, configuration))
        elif name == "bytes":
            endian = configuration.get("endian", "little")
        else:
            configuration.pop("typesize", None)  # of blosc: the dtype decides it
            compressors.append(codec(name, configuration))
    separator = "." if keys["name"] == "v2" else "/"
    separator = keys.get("configuration", {}).get("separator", separator)
    layout = (shards, keys["name"], separator)
    return Encoding(3, tuple(transposes), endian, tuple(compressors), *layout, *rest)


def _zarr3_codec(compressor: Document) -> str:
    """A compressor of zarr v2 as a codec of `Encoding`."""
    name = compressor.pop("id")
    if name == "blosc":
        compressor["shuffle"] = _SHUFFLES[compressor["shuffle"]]
    return codec(name, _ONLY_ZARR3.get(name, {}) | compressor)


def _zarr2_codec(name: str, configuration: Document) -> Document:
    """A codec as a compressor of zarr v2."""
    if name == "blosc":
        configuration["shuffle"] = [*_SHUFFLES.values()].index(configuration["shuffle"]) - 1
    kept = configuration.keys() - _ONLY_ZARR3.get(name, {}).keys()
    return {"id": name} | {key: configuration[key] for key in kept}


def converted(encoding: Encoding, zarr_format: int) -> Encoding:
    """The encoding in another version of zarr, without the parts that version lacks: zarr v2 has no
    shards and no checksums, and two orders of axes. Raises ValueError if it lacks the codec."""
    codecs = map(_parts, encoding.compressors)
    codecs = [each for each in codecs if each[0] != "crc32c" or zarr_format == 3]
    names = [name for name, _ in codecs]
    if not {*names} <= _SHARED_CODECS or (zarr_format == 2 and len(names) > 1):
        raise ValueError(f"zarr{zarr_format} does not support its compression: {', '.join(names)}")
    orders = [_parts(text)[1]["order"] for text in encoding.transposes]
    reverses = len(orders) == 1 and orders[0] == sorted(orders[0], reverse=True)
    keys, separator = ("v2", ".") if zarr_format == 2 else ("default", "/")
    return encoding._replace(
        zarr_format=zarr_format,
        transposes=encoding.transposes if zarr_format == 3 or reverses else (),
        endian="little",  # some dtypes of zarr v2 have no other order
        compressors=tuple(codec(*each) for each in codecs),
        shards=None,
        keys=keys,
        separator=separator,
        fill="null" if encoding.fill in ZEROS else encoding.fill,
        names="{}",
    )
