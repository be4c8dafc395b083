"""zarr metadata documents, v2 and v3, and what they say of how chunks are encoded."""

import functools
import json
import math
import re
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard.arrays.boxes import Shape, grid_size

Document = dict[str, Any]

# Codecs from bytes to bytes, of which it is known that they look at nothing else.
_PLAIN_CODECS = {"zstd", "gzip", "zlib", "bz2", "blosc", "crc32c"}
# Codecs that zarr v2 and v3 both have, under one name.
_SHARED_CODECS = {"zstd", "gzip", "blosc"}
# What their configurations in zarr v3 say, where those of zarr v2 may not.
_REQUIRED: dict[str, Document] = {"zstd": {"checksum": False, "level": 1}, "gzip": {"level": 6}}
# Ways in which blosc shuffles bytes, by their numbers in zarr v2.
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
# What zstd says only in zarr v3, and may leave out there.
_NO_CHECKSUM = '"checksum": false, '
# Fill values that are zero, as JSON.
ZEROS = ("null", "0", "0.0", "false", "[0.0, 0.0]")
# What of a document is in the shape, the chunk shape, the dtype or the encoding of an array.
_KNOWN = {
    *("zarr_format", "node_type", "shape", "dtype", "data_type", "chunks", "chunk_grid"),
    *("compressor", "filters", "order", "dimension_separator", "chunk_key_encoding", "codecs"),
    "fill_value",
}
# Sizes of one array that no model comes near: decoded bytes, and chunks.
_MOST_BYTES = 1 << 46
_MOST_CHUNKS = 1 << 22


def check(document: Any) -> None:
    """Raises ValueError for a document that has not the form in which Orbax writes it: readers of
    zarr take abbreviations, which nothing here knows."""
    if not isinstance(document, dict) or document.get("zarr_format") not in (2, 3):
        raise ValueError("it is no zarr metadata")
    if not isinstance(document.get("shape"), list):
        raise ValueError("it has no shape")
    if document["zarr_format"] == 2:
        if not isinstance(document.get("chunks"), list):
            raise ValueError("it has no shape of chunks")
        if not isinstance(document.get("dtype"), str):
            raise ValueError("its dtype has no name")
        return
    grid = document.get("chunk_grid")
    regular = grid.get("configuration") if isinstance(grid, dict) else None
    if not isinstance(regular, dict) or not isinstance(regular.get("chunk_shape"), list):
        raise ValueError("it has no shape of chunks")
    codecs = _checked_codecs(document.get("codecs"))
    outer = [codec["name"] for codec in codecs if codec["name"] not in ("transpose", "bytes")]
    if outer[:1] == ["blosc"] and set(outer[1:]) <= {"crc32c"}:
        outer = []  # what a chunk begins with says what it decodes to
    _check_bounded(outer)
    if len(codecs) > 1 and "sharding_indexed" in {codec["name"] for codec in codecs}:
        raise ValueError("its sharding codec is not the only codec")
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            inside = codec.get("configuration")
            if not isinstance(inside, dict) or not isinstance(inside.get("chunk_shape"), list):
                raise ValueError("its sharding codec has no shape of inner chunks")
            names = {inner["name"] for inner in _checked_codecs(inside.get("codecs"))}
            _check_bounded(names)
            if "sharding_indexed" in names:
                raise ValueError("its inner chunks have inner chunks")
    keys = document.get("chunk_key_encoding")
    if not isinstance(keys, dict) or keys.get("name") not in ("default", "v2"):
        raise ValueError("its chunks have keys of an unknown form")


def _check_bounded(codecs: Iterable[Any]) -> None:
    """All codecs but one stop where a chunk is full."""
    if "blosc" in codecs:
        raise ValueError(
            "it is compressed with blosc inside of something else, where chunks decode to 2 GiB if "
            "they say so"
        )


def _checked_codecs(codecs: Any) -> list[Document]:
    if not isinstance(codecs, list) or not codecs:
        raise ValueError("it has no list of codecs")
    if not all(isinstance(codec, dict) and isinstance(codec.get("name"), str) for codec in codecs):
        raise ValueError("it has a codec without a name")
    return codecs


def check_size(shape: Shape, chunk: Shape, itemsize: int) -> None:
    """Raises ValueError for an array that is larger, or in more chunks, than any of a model: loops
    and numbers elsewhere count on that."""
    nbytes = math.prod(shape) * itemsize
    if nbytes > _MOST_BYTES:
        raise ValueError(f"an array of {list(shape)} has {nbytes} bytes: no model does")
    count = grid_size(shape, chunk)
    if count > _MOST_CHUNKS:
        raise ValueError(
            f"an array of {list(shape)} in chunks of {list(chunk)} has {count} of them"
        )


class Shards(NamedTuple):
    """The sharding codec of zarr v3: chunks inside of chunks.

    Attributes:
      inner: shape of the inner chunks; None for inner chunks that are whole chunks.
      index: its other parameters, as JSON.
    """

    inner: Shape | None
    index: str


class Encoding(NamedTuple):
    """How values become stored bytes, whatever shape, chunk shape and dtype they have.

    Codecs are in the terms of zarr v3, as JSON, for zarr v2 as well; what depends on the dtype is
    left out of them.

    Attributes:
      zarr_format: 2 or 3.
      transposes: codecs from arrays to arrays, in order.
      endian: byte order of elements.
      compressors: codecs from bytes to bytes, in order.
      shards: the sharding codec around all these, if there is one.
      keys: the form of chunk keys: `"default"`, or `"v2"`.
      separator: what separates the places in a chunk's key.
      fill: the fill value, as JSON: of chunks that are absent.
      names: what else the document says, of dimensions for one, as JSON.
    """

    zarr_format: int
    transposes: tuple[str, ...]
    endian: str
    compressors: tuple[str, ...]
    shards: Shards | None
    keys: str
    separator: str
    fill: str
    names: str = "{}"

    @property
    def codecs(self) -> Hashable:
        """What two arrays of one dtype must share for encoded chunks of one to be readable as
        chunks of the other, of the same chunk shape."""
        fill = "null" if self.fill in ZEROS else self.fill
        compressors = tuple(text.replace(_NO_CHECKSUM, "") for text in self.compressors)
        return self.transposes, self.endian, compressors, self.shards, fill

    @property
    def is_blosc(self) -> bool:
        """Whether chunks begin with a header of blosc."""
        return bool(self.compressors) and _codec_name(self.compressors[0]) == "blosc"

    @property
    def ignores_unit_axes(self) -> bool:
        """Whether encoded chunks are the same with axes of size 1 more or less."""
        names = set(map(_codec_name, self.compressors))
        whole = self.shards is None or self.shards.inner is None
        return whole and not self.transposes and names <= _PLAIN_CODECS

    def chunk_index(self, key: str, rank: int) -> Shape:
        """The place of a chunk in the grid of an array of this rank, from its key."""
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

    def of_derived(self) -> "Encoding":
        """For an array that has this one's values in another shape: inner chunks are whole chunks,
        axes are in order, and dimensions have no names."""
        shards = self.shards and self.shards._replace(inner=None)
        return self._replace(transposes=(), shards=shards, names="{}")

    def of_other_dtype(self) -> "Encoding":
        """For an array of another dtype; the fill value is that of arrays that Orbax writes."""
        return self._replace(endian="little", fill="null")

    def most_encoded(self, chunk: Shape, itemsize: int) -> int:
        """Bytes that a chunk is encoded to at most: values that do not compress become larger, and
        inner chunks have an index."""
        decoded = math.prod(chunk) * itemsize
        inner = self._inner(chunk)
        count = math.prod(size // part for size, part in zip(chunk, inner, strict=True))
        return decoded + decoded // 64 + 1024 * count

    def _inner(self, chunk: Shape) -> Shape:
        """Shape of the inner chunks of a chunk, itself where it has none or they do not divide
        it."""
        inner = self.shards and self.shards.inner
        return inner if inner is not None and _divides(inner, chunk) else chunk

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def document(self, shape: Shape, chunk: Shape, dtype: np.dtype) -> bytes:
        """An array's stored metadata. Inner chunks that do not divide its chunks become whole
        ones."""
        document = self._zarr2(dtype) if self.zarr_format == 2 else self._zarr3(chunk, dtype)
        grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
        chunks = {"chunks": list(chunk)} if self.zarr_format == 2 else {"chunk_grid": grid}
        whole = {**json.loads(self.names), **document, **chunks, "shape": list(shape)}
        return json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()

    def _zarr2(self, dtype: np.dtype) -> Document:
        compressors = [_zarr2_codec(json.loads(codec)) for codec in self.compressors]
        return {
            "zarr_format": 2,
            "dtype": zarr2_dtype(dtype, self.endian),
            "order": "F" if self.transposes else "C",
            "compressor": compressors[0] if compressors else None,
            "filters": None,
            "fill_value": json.loads(self.fill),
            "dimension_separator": self.separator,
        }

    def _zarr3(self, chunk: Shape, dtype: np.dtype) -> Document:
        stored: Document = {"name": "bytes"}
        if dtype.itemsize > 1:  # then, and only then, they have an order
            stored["configuration"] = {"endian": self.endian}
        codecs = [json.loads(codec) for codec in self.transposes]
        codecs += [stored, *(_of_dtype(json.loads(codec), dtype) for codec in self.compressors)]
        if self.shards is not None:
            sharding = {**json.loads(self.shards.index), "chunk_shape": list(self._inner(chunk))}
            sharding["codecs"] = codecs
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
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
            "chunk_key_encoding": keys,
            "codecs": codecs,
            "fill_value": fill,
        }


def zarr2_dtype(dtype: np.dtype, endian: str = "little") -> str:
    """A dtype as zarr v2 writes it; TensorStore writes JAX's own dtypes by name."""
    if hasattr(ml_dtypes, dtype.name):
        return dtype.name
    return dtype.newbyteorder("<" if endian == "little" else ">").str


def _of_dtype(codec: Document, dtype: np.dtype) -> Document:
    """A codec of zarr v3, completed."""
    if codec["name"] == "blosc":
        codec["configuration"]["typesize"] = dtype.itemsize
        if codec["configuration"].get("shuffle") == "auto":
            codec["configuration"]["shuffle"] = "bitshuffle" if dtype.itemsize == 1 else "shuffle"
    return codec if codec["configuration"] else {"name": codec["name"]}


def _divides(inner: Shape, chunk: Shape) -> bool:
    return len(inner) == len(chunk) and not any(c % i for c, i in zip(chunk, inner, strict=True))


@functools.lru_cache(maxsize=4096)
def parse_encoding(metadata: bytes) -> Encoding:
    """The encoding of an array, from its metadata, which `check` has passed."""
    document = json.loads(metadata)
    v2 = document["zarr_format"] == 2
    names = {key: value for key, value in document.items() if key not in _KNOWN}
    rest = (_text(document.get("fill_value")), _text(names))
    if v2:
        order = list(range(len(document["shape"])))[::-1]
        transposed = document.get("order", "C") == "F" and len(order) > 1
        transpose = {"name": "transpose", "configuration": {"order": order}}
        compressor = document.get("compressor")
        return Encoding(
            2,
            (_text(transpose),) if transposed else (),
            "big" if document["dtype"].startswith(">") else "little",
            () if compressor is None else (_text(_zarr3_codec(compressor)),),
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
        shards = Shards(None if whole else inner, _text(sharding))
    keys = document["chunk_key_encoding"]
    separator = "." if keys["name"] == "v2" else "/"
    stored = next((codec for codec in codecs if codec["name"] == "bytes"), {})
    return Encoding(
        3,
        tuple(_text(codec) for codec in codecs if codec["name"] == "transpose"),
        (stored.get("configuration") or {}).get("endian", "little"),
        tuple(_text(_of_any_dtype(c)) for c in codecs if c["name"] not in ("transpose", "bytes")),
        shards,
        keys["name"],
        (keys.get("configuration") or {}).get("separator", separator),
        *rest,
    )


def codec(name: str, configuration: Document) -> str:
    """A codec as `Encoding` has it."""
    return _text({"name": name, "configuration": configuration})


@functools.lru_cache(maxsize=1024)
def _codec_name(codec: str) -> str:
    return json.loads(codec)["name"]


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True)


def _of_any_dtype(codec: Document) -> Document:
    """A codec of zarr v3 without what the dtype decides."""
    configuration = dict(codec.get("configuration") or {})
    if codec["name"] == "blosc":
        configuration.pop("typesize", None)
    return {"name": codec["name"], "configuration": configuration}


def _zarr3_codec(compressor: Document) -> Document:
    """A compressor of zarr v2 in the terms of zarr v3."""
    configuration = {key: value for key, value in compressor.items() if key != "id"}
    if compressor["id"] == "blosc":
        shuffle = configuration.get("shuffle", -1)
        configuration["shuffle"] = _SHUFFLES[shuffle] if shuffle in (0, 1, 2) else "auto"
    return {"name": compressor["id"], "configuration": configuration}


def _zarr2_codec(codec: Document) -> Document:
    """A codec as a compressor of zarr v2."""
    compressor = {"id": codec["name"], **codec["configuration"]}
    compressor.pop("checksum", None)
    if codec["name"] == "blosc":
        shuffle = codec["configuration"].get("shuffle", "auto")
        compressor["shuffle"] = -1 if shuffle == "auto" else _SHUFFLES.index(shuffle)
    return compressor


def converted(encoding: Encoding, zarr_format: int) -> Encoding:
    """For an array of another version of zarr. Chunks are encoded in the same way, but for what
    that version lacks: shards, checksums, and all orders of axes but two in zarr v2.

    Raises:
      ValueError: it has no such codec.
    """
    codecs = [json.loads(text) for text in encoding.compressors]
    if zarr_format == 2:
        codecs = [codec for codec in codecs if codec["name"] != "crc32c"]
    names = [codec["name"] for codec in codecs]
    if not _SHARED_CODECS.issuperset(names) or (zarr_format == 2 and len(names) > 1):
        raise ValueError(f"zarr{zarr_format} does not compress with {' and '.join(names)}")
    for codec in codecs:
        codec["configuration"] = _REQUIRED.get(codec["name"], {}) | codec["configuration"]
    transposes = encoding.transposes
    if zarr_format == 2 and transposes:
        order = [json.loads(codec)["configuration"]["order"] for codec in transposes]
        transposes = transposes if order == [list(range(len(order[0])))[::-1]] else ()
    keys, separator = ("v2", ".") if zarr_format == 2 else ("default", "/")
    return encoding._replace(
        zarr_format=zarr_format,
        transposes=transposes,
        endian="little",  # some dtypes of zarr v2 have no other
        compressors=tuple(map(_text, codecs)),
        shards=None,
        keys=keys,
        separator=separator,
        fill="null" if encoding.fill in ZEROS else encoding.fill,
        names="{}",
    )
