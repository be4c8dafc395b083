"""The zarr metadata and the sharding of one array, which may be untrusted.

Other modules rely on the bounds checked here: shapes that fit into numbers and loops, chunks within
the array, and meshes of a possible size.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts

from reshard.arrays import zarr
from reshard.arrays.boxes import Shape
from reshard.arrays.handle import chunk_shape_of
from reshard.errors import first_line
from reshard.loader.json_documents import parse_json
from reshard.sharding.mesh import (
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    normalize_spec,
    parse_mesh,
    spec_problems,
)

_AXIS_TYPES = ("Auto", "Explicit", "Manual")


class ZarrArray(NamedTuple):
    """A zarr metadata document.

    Attributes:
      metadata: the document, as TensorStore writes it.
      largest_chunk: the most stored bytes of a chunk.
      plain_chunk: stored bytes of each chunk; None if chunks are encoded.
      has_chunk: whether a key below the array's name belongs to a chunk of its grid.
    """

    shape: Shape
    chunks: Shape
    dtype: np.dtype
    metadata: bytes
    largest_chunk: int
    plain_chunk: int | None
    has_chunk: Callable[[str], bool]


@functools.lru_cache(maxsize=4096)
def parse_zarr(metadata: bytes, driver: str) -> ZarrArray:
    """Parses a zarr metadata document. Raises ValueError if no array can be read with it.
    TensorStore interprets it, so that there is one interpretation. Equal documents share their
    result: checkpoints repeat them."""
    document = parse_json(metadata)
    match document:
        case {"order": "F", "shape": [] | [_]}:  # which a specification may not say
            document["order"] = "C"
    spec = {"driver": driver, "kvstore": "memory://", "metadata": document, "assume_metadata": True}
    try:
        array = ts.open(spec).result()
    except OverflowError as error:
        raise ValueError("it holds a number that is too large") from error
    except ValueError as error:
        raise ValueError(first_line(error)) from error
    normalized = array.spec().to_json()["metadata"]
    # Without a chunk shape, TensorStore chooses one.
    if any(document.get(key) != normalized.get(key) for key in ("chunks", "chunk_grid")):
        raise ValueError("it has no chunk shape")
    zarr.check(normalized)
    if document != normalized:  # not as TensorStore stores it, so a part may be missing
        _check_stored(metadata, driver)
    normalized["fill_value"] = document["fill_value"]  # TensorStore writes another NaN for some
    dtype = array.dtype.numpy_dtype
    if dtype.kind not in "biufc" and not hasattr(ml_dtypes, dtype.name):
        raise ValueError(f"{array.dtype.name} is not a numeric dtype")
    shape = tuple(array.shape)
    chunks = chunk_shape_of(array)
    zarr.check_size(shape, chunks, dtype.itemsize)
    pairs = zip(shape, chunks, strict=True)
    if 0 not in shape and any(chunk > size for size, chunk in pairs):
        raise ValueError(f"chunks of {list(chunks)} are larger than the array, {list(shape)}")
    metadata = json.dumps(normalized, separators=(",", ":"), sort_keys=True).encode()
    encoding = zarr.parse_encoding(metadata)
    largest = 2 * encoding.most_encoded(chunks, dtype.itemsize)
    is_plain = not encoding.compressors and encoding.shards is None
    plain = math.prod(chunks) * dtype.itemsize if is_plain else None

    @functools.lru_cache(maxsize=64)  # arrays with equal metadata have equal keys
    def has_chunk(key: str) -> bool:
        match = keys.fullmatch(key)
        return match is not None and all(
            int(place) * chunk < size
            for place, size, chunk in zip(match.groups(), shape, chunks, strict=True)
        )

    keys = encoding.chunk_keys(len(shape))
    return ZarrArray(shape, chunks, dtype, metadata, largest, plain, has_chunk)


def _check_stored(metadata: bytes, driver: str) -> None:
    """Raises ValueError for a document that TensorStore does not open where it is stored. In a
    specification it takes defaults for parts that are missing."""
    context, name = ts.Context(), ".zarray" if driver == "zarr" else "zarr.json"
    ts.KvStore.open("memory://", context=context).result().write(name, metadata).result()
    spec = {"driver": driver, "kvstore": "memory://"}
    try:
        ts.open(spec, open=True, context=context).result()
    except ValueError as error:
        raise ValueError(first_line(error)) from error


@functools.lru_cache(maxsize=4096)
def parse_sharding(encoded: str, rank: int) -> Sharding | None:
    """Parses a sharding of Orbax, which is a JSON document inside a JSON string. Raises ValueError
    if it is invalid for that rank. The mesh need not divide the array's shape: that matters only
    when the sharding is used."""
    try:
        document = parse_json(encoded)
        if document["sharding_type"] == "SingleDeviceSharding":
            return SingleDeviceSharding(*_names([document["device_str"]]))
        if document["sharding_type"] != "NamedSharding":
            return None
        names, sizes = _names(document["axis_names"]), document["shape"]
        if not all(type(size) is int for size in sizes) or len(sizes) != len(names):
            raise ValueError(f"the axes {list(names)} do not have sizes {sizes!r:.80}")
        types, devices = document.get("axis_types"), document.get("device_mesh")
        if types:
            types = tuple(text.rpartition(".")[2] for text in types)
            if len(types) != len(names) or not set(types) <= set(_AXIS_TYPES):
                raise ValueError(f"axis types {list(types)!r:.80}")
        mesh = parse_mesh(Mesh(names, tuple(sizes), types or None))
        if devices:
            ids = tuple(_device_ids(devices["mesh"]))
            if len(ids) != mesh.size:
                raise ValueError(
                    f"its mesh `{mesh}` has {mesh.size} devices, but {len(ids)} device ids"
                )
            mesh = Mesh(names, mesh.axis_sizes, mesh.axis_types, ids)
        spec = document["partition_spec"]
        if not isinstance(spec, list):
            raise ValueError(f"not a partition spec: {spec!r:.80}")
        sharding = NamedSharding(mesh, normalize_spec(spec))
        if problems := spec_problems((0,) * rank, mesh, sharding.spec):
            raise ValueError("; ".join(problems))
        return sharding
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its sharding is malformed: {error!r:.80}") from error


def _names(texts: list[Any]) -> tuple[str, ...]:
    """Names that can be printed."""
    for text in texts:
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"its sharding has a name that is not printable text: {text!r:.80}")
    return tuple(texts)


def _device_ids(nested: Any) -> list[int]:
    if isinstance(nested, dict):
        if type(nested["id"]) is not int:
            raise ValueError(f"not the id of a device: {nested['id']!r:.80}")
        return [nested["id"]]
    if not isinstance(nested, list):
        raise ValueError(f"the list of devices is {nested!r:.80}")
    return [device for part in nested for device in _device_ids(part)]
