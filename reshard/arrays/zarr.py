"""zarr metadata documents, v2 and v3: the same array with another shape, grid or dtype."""

import copy
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from reshard.arrays.boxes import Shape

Document = dict[str, Any]

# Codecs of zarr v3 whose bytes do not depend on axes of size 1.
_PLAIN_CODECS = {"bytes", "zstd", "gzip", "blosc", "crc32c", "sharding_indexed"}
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
        compressor = document.get("compressor")
        _check_bounded([compressor.get("id") if isinstance(compressor, dict) else None])
        return
    grid = document.get("chunk_grid")
    regular = grid.get("configuration") if isinstance(grid, dict) else None
    if not isinstance(regular, dict) or not isinstance(regular.get("chunk_shape"), list):
        raise ValueError("it has no shape of chunks")
    codecs = _checked_codecs(document.get("codecs"))
    _check_bounded([codec["name"] for codec in codecs])
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
    """All codecs but one stop where a chunk is full. Orbax has never written that one."""
    if "blosc" in codecs:
        raise ValueError("it is compressed with blosc, whose chunks decode to 2 GiB if they say so")


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
    count = math.prod(math.ceil(size / c) for size, c in zip(shape, chunk, strict=True))
    if count > _MOST_CHUNKS:
        raise ValueError(
            f"an array of {list(shape)} in chunks of {list(chunk)} has {count} of them"
        )


def dump(document: Document) -> bytes:
    """The document as it is stored."""
    return json.dumps(document, separators=(",", ":")).encode()


def with_chunks(document: Document, chunk: Sequence[int]) -> Document:
    """For another chunk shape. Inner chunks that divide it stay, if they were not whole chunks."""
    if document["zarr_format"] == 2:
        return document | {"chunks": list(chunk)}
    document = copy.deepcopy(document)
    grid = document["chunk_grid"]["configuration"]
    outer, grid["chunk_shape"] = grid["chunk_shape"], list(chunk)
    for codec in _sharding_codecs(document):
        inner = codec["chunk_shape"]
        fits = len(inner) == len(chunk) and not any(
            c % i for c, i in zip(chunk, inner, strict=True)
        )
        codec["chunk_shape"] = inner if fits and inner != outer else list(chunk)
    return document


def with_shape(document: Document, shape: Shape, chunk: Shape) -> Document:
    """For an array of another shape, whose chunks have no inner chunks."""
    if document["zarr_format"] == 3:
        document = copy.deepcopy(document)
        document.pop("dimension_names", None)
        document["chunk_grid"]["configuration"]["chunk_shape"] = []
        for codec in _sharding_codecs(document):
            codec["chunk_shape"] = []
    return with_chunks(document, chunk) | {"shape": list(shape)}


def with_dtype(document: Document, dtype: np.dtype) -> Document:
    """For another dtype; the fill value is that of zarrs that Orbax writes."""
    if document["zarr_format"] == 2:
        return document | {"dtype": zarr2_dtype(dtype), "fill_value": None}
    document = copy.deepcopy(document)
    for codec in _sharding_codecs(document):
        _set_endian(codec["codecs"], dtype)
    _set_endian(document["codecs"], dtype)
    zero: Any = 0 if "int" in dtype.name else {"b": False, "c": [0.0, 0.0]}.get(dtype.kind, 0.0)
    return document | {"data_type": dtype.name, "fill_value": zero}


def _sharding_codecs(document: Document) -> list[Document]:
    return [
        codec["configuration"]
        for codec in document["codecs"]
        if codec["name"] == "sharding_indexed"
    ]


def _set_endian(codecs: list[Document], dtype: np.dtype) -> None:
    """zarr v3 names a byte order exactly for elements of several bytes."""
    for codec in codecs:
        if codec["name"] == "bytes":
            codec.pop("configuration", None)
            if dtype.itemsize > 1:
                codec["configuration"] = {"endian": "little"}


def zarr2_dtype(dtype: np.dtype) -> str:
    """A dtype as zarr v2 writes it; TensorStore writes JAX's own dtypes by name."""
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def encoding(document: Document) -> bytes | None:
    """What two arrays must share for a chunk of one, with axes of size 1 more or less, to be one of
    the other; None where such axes matter."""
    same = json.loads(dump(document))
    del same["shape"]
    if same["zarr_format"] == 2:
        del same["chunks"]
        return None if same.get("filters") or same.get("order", "C") != "C" else _sorted(same)
    outer = same.pop("chunk_grid")["configuration"]["chunk_shape"]
    same.pop("dimension_names", None)
    names = {codec["name"] for codec in same["codecs"]}
    for codec in _sharding_codecs(same):
        names |= {inner["name"] for inner in codec["codecs"]}
        if codec.pop("chunk_shape") != outer:
            return None
    plain = names <= _PLAIN_CODECS and same["chunk_key_encoding"]["name"] == "default"
    return _sorted(same) if plain else None


def _sorted(document: Document) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def chunk_index(document: Document, key: str) -> Shape:
    """The place of a chunk in its grid, from its key."""
    rank = len(document["shape"])
    return tuple(map(int, key.split(_separator(document))[-rank:])) if rank else ()


def chunk_keys(document: Document) -> re.Pattern[str]:
    """A pattern of the keys of chunks, with a group for each place of `chunk_index`."""
    separator = re.escape(_separator(document))
    places = separator.join([r"(0|[1-9]\d{0,18})"] * len(document["shape"]))
    if _has_v2_keys(document):
        return re.compile(places or "0", re.ASCII)
    return re.compile(f"c{separator}{places}" if places else "c", re.ASCII)


def chunk_key(document: Document, index: Shape) -> str:
    """The key of a chunk, from its place."""
    texts = list(map(str, index))
    if _has_v2_keys(document):
        return _separator(document).join(texts) or "0"
    return _separator(document).join(["c", *texts])


def _separator(document: Document) -> str:
    if document["zarr_format"] == 2:
        return document.get("dimension_separator", ".")
    default = "." if _has_v2_keys(document) else "/"
    return document["chunk_key_encoding"].get("configuration", {}).get("separator", default)


def _has_v2_keys(document: Document) -> bool:
    """Whether keys of chunks are as in zarr v2, which arrays of v3 may have as well."""
    return document["zarr_format"] == 2 or document["chunk_key_encoding"]["name"] == "v2"
