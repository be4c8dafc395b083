"""What no rewrite of compressed chunks avoids: decode each source chunk, encode each target chunk.

    python -m tests.benchmarks.bound SRC

Array by array, the stored bytes are put into TensorStore's in-memory store, read back, and
written, in chunks that are the shards of the target mesh, to another in-memory store. Only the
reading and the writing are timed, with every core at TensorStore's disposal, and an array's memory
is dropped before the next one. Prints one JSON object. With `--decode-only` nothing is written and
all arrays are kept, as a restore keeps them: what no restore avoids, whatever its mesh. With
`--files` stored bytes are read from the files while they are decoded, each into fresh memory.

An array is read into memory that TensorStore allocates, which charges the first touch of a whole
array to the bound; a program that streams through memory it has used before can beat that. With
`--warm` all arrays are read into one buffer, touched before the clock starts: the tighter bound.
"""

import argparse
import base64
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tests.benchmarks.workloads import AXES, TARGET


def _store(path: Path) -> ts.KvStore:
    """The OCDBT database in a checkpoint that Orbax saved; the cache is for its B-tree."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
    spec = {"driver": "ocdbt", "base": f"file://{path}/"}
    return ts.KvStore.open(spec, context=context).result()


def _specs(path: Path) -> dict[str, list[Any]]:
    """The saved partition spec of each array, by the array's name in the store."""
    entries = json.loads((path / "_sharding").read_text())
    return {
        base64.urlsafe_b64decode(key).decode(): json.loads(value).get("partition_spec", [])
        for key, value in entries.items()
    }


def _shard(shape: list[int], spec: list[Any]) -> list[int]:
    """The shape of one shard on the target mesh: what the spec leaves of each dimension."""
    mesh: dict[str, int] = dict(zip(AXES, TARGET, strict=True))
    padded = [*spec, *[None] * (len(shape) - len(spec))]
    names = [[axes] if isinstance(axes, str) else axes or [] for axes in padded]
    return [n // math.prod(mesh[x] for x in xs) for n, xs in zip(shape, names, strict=True)]


def _boxes(shape: list[int], chunk: list[int]) -> Iterator[tuple[slice, ...]]:
    starts = (range(0, n, c) for n, c in zip(shape, chunk, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(slice(i, i + c) for i, c in zip(corner, chunk, strict=True))


def _decoded_bytes(metadata: dict[str, Any]) -> int:
    code = metadata["dtype"]
    item = 2 if code == "bfloat16" else np.dtype(code).itemsize
    return item * math.prod(metadata["shape"])


def _decode(
    name: str, stored: ts.KvStore, buffer: np.ndarray | None, files: bool
) -> tuple[np.ndarray, float]:
    """One array's values, in the buffer's memory if given, and the seconds that decoding took."""
    if not files:
        memory = ts.KvStore.open("memory://", context=ts.Context()).result()
        for key in stored.list(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result():
            memory[key] = stored[key]
        stored = memory
    source = ts.open({"driver": "zarr"}, kvstore=stored / f"{name}/").result()
    if buffer is None:
        start = time.perf_counter()
        values = source.read().result()
        return values, time.perf_counter() - start
    dtype = source.dtype.numpy_dtype
    values = buffer[: source.size * dtype.itemsize].view(dtype).reshape(source.shape)
    start = time.perf_counter()
    ts.array(values, copy=False).write(source).result()
    return values, time.perf_counter() - start


def _encode(values: np.ndarray, metadata: dict[str, Any]) -> float:
    """The seconds that encoding the values in the chunks of `metadata` took."""
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    spec["store_data_equal_to_fill_value"] = True
    target = ts.open(spec, create=True, context=ts.Context()).result()
    start = time.perf_counter()
    writes = [
        target[box].write(values[box], can_reference_source_data_indefinitely=True)
        for box in _boxes(metadata["shape"], metadata["chunks"])
    ]
    for write in writes:
        write.result()
    return time.perf_counter() - start


def bound(
    path: Path, *, warm: bool = False, decode_only: bool = False, files: bool = False
) -> dict[str, float]:
    """Seconds to decode and, unless left out, to encode a whole checkpoint, and their sum."""
    stored, specs = _store(path), _specs(path)
    arrays = {name: json.loads(stored[f"{name}/.zarray"]) for name in specs}
    buffer = None
    if warm:
        buffer = np.full(max(map(_decoded_bytes, arrays.values())), 1, np.uint8)
    decode = encode = 0.0
    kept = []
    for name, spec in specs.items():
        metadata = arrays[name]
        values, seconds = _decode(name, stored, buffer, files)
        decode += seconds
        if decode_only:
            kept.append(values)
        else:
            encode += _encode(values, {**metadata, "chunks": _shard(metadata["shape"], spec)})
        del values
    return {"decode": decode, "encode": encode, "seconds": decode + encode}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decoding and encoding in memory.")
    parser.add_argument("source", type=Path)
    parser.add_argument("--warm", action="store_true", help="read into memory touched before")
    parser.add_argument("--decode-only", action="store_true", help="encode nothing")
    parser.add_argument("--files", action="store_true", help="read files while decoding")
    arguments = vars(parser.parse_args())
    print(json.dumps(bound(arguments.pop("source").absolute(), **arguments)))


if __name__ == "__main__":
    main()
