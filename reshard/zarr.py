"""zarr metadata documents, v2 and v3: the same array with another shape, grid or dtype."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.boxes import Shape

Document = dict[str, Any]

# Codecs of zarr v3 whose bytes do not depend on axes of size 1.
_PLAIN_CODECS = {"bytes", "zstd", "gzip", "blosc", "crc32c", "sharding_indexed"}


def dump(document: Document) -> bytes:
    """The document as it is stored."""
    return json.dumps(document, separators=(",", ":")).encode()


def with_chunks(document: Document, chunk: Sequence[int]) -> Document:
    """For another chunk shape. Inner chunks that divide it stay, if they were not whole chunks."""
    if document["zarr_format"] == 2:
        return document | {"chunks": list(chunk)}
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
        document.pop("dimension_names", None)
        document["chunk_grid"]["configuration"]["chunk_shape"] = []
        for codec in _sharding_codecs(document):
            codec["chunk_shape"] = []
    return with_chunks(document, chunk) | {"shape": list(shape)}


def with_dtype(document: Document, dtype: np.dtype) -> Document:
    """For another dtype; the fill value is that of zarrs that Orbax writes."""
    if document["zarr_format"] == 2:
        return document | {"dtype": zarr2_dtype(dtype), "fill_value": None}
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
    return dtype.str if dtype.isbuiltin == 1 else dtype.name


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


def chunk_key(document: Document, index: Shape) -> str:
    """The key of a chunk, from its place."""
    texts = list(map(str, index))
    if document["zarr_format"] == 2:
        return _separator(document).join(texts) or "0"
    return _separator(document).join(["c", *texts])


def _separator(document: Document) -> str:
    if document["zarr_format"] == 2:
        return document.get("dimension_separator", ".")
    return document["chunk_key_encoding"].get("configuration", {}).get("separator", "/")
