"""Plans a checkpoint of 405 billion parameters with adam's moments, and divides the plan.

    python -m tests.benchmarks.planning

Nothing of it is stored: shapes are those of Llama-3.1-405B, values are float32 (4.9 TB), saved on
16x64 and planned for 64x64, which makes 10.9 million chunks. What a B-tree would tell of 2.7
million stored chunks is made up, and is part of the memory, but not of the time.
"""

import argparse
import json
import math
import resource
import tempfile
import time
from typing import Any

import numpy as np

from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.arrays.zarr import parse_encoding
from reshard.checkpoint import Checkpoint, Source
from reshard.restore.target_mesh import to_mesh
from reshard.sharding.mesh import Mesh, NamedSharding, shard_shape
from reshard.storage.array_store import ArrayStore
from reshard.storage.identity import Identity
from reshard.storage.location import Location
from reshard.storage.ocdbt import StoredValue
from reshard.writer.plan import Share
from reshard.writer.planning import plan
from tests.benchmarks.workloads import AXES, leaves, llama

SAVED, TARGET = (16, 64), (64, 64)
_ENCODING = {"zarr_format": 2, "compressor": {"id": "zstd", "level": 1}, "dtype": "<f4"}
_ENCODING |= {"fill_value": None, "filters": None, "order": "C", "dimension_separator": "."}


def checkpoint(root: str) -> Checkpoint:
    """One that is nowhere: a store that knows of chunks, and an empty directory."""
    params = llama(d=16384, ff=53248, kv=1024, vocab=128256, layers=126)
    store = ArrayStore(False, Location(root), ("",), True)
    mesh = Mesh(AXES, SAVED)
    values: dict[str, dict[str, StoredValue]] = {}
    handles: dict[tuple[str, ...], Any] = {}
    for path, leaf in leaves({"params": params, "mu": params, "nu": params}):
        name = ".".join(path)
        sharding = NamedSharding(mesh, tuple((axis,) for axis in leaf.spec))
        chunk = shard_shape(leaf.shape, sharding)
        document = {**_ENCODING, "shape": leaf.shape, "chunks": chunk}
        grid = [math.ceil(size / part) for size, part in zip(leaf.shape, chunk, strict=True)]
        value = StoredValue(math.prod(chunk) * 4, "", "ocdbt.process_0/d/0")
        metadata = json.dumps(document).encode()
        values[name] = {
            ".".join(map(str, index)): value._replace(size=value.size)
            for index in np.ndindex(*grid)
        }
        values[name][".zarray"] = StoredValue(len(metadata), "", None, metadata)
        stored = StoredArray(store, name, metadata)
        dtype = np.dtype("float32")
        layout = (leaf.shape, dtype, chunk, sharding, sharding)
        handles[path] = ArrayHandle(path, *layout, "jax.Array", None, dtype, stored)
    parse_encoding(metadata)  # as a reader would accept it
    vars(store)["values"] = values
    place = {"root": store.directory, "kind": "standalone", "v1": False, "step": "", "item": ""}
    identity = Identity(store.directory, {})
    facts = {"metadata": {}, "metadata_apart": True, "identity": identity}
    source = Source(**place, steps=(), items=("",), store=store, **facts)
    return Checkpoint(handles, source)


def chunks_of(share: Share) -> int:
    """Chunks that a share writes, each of which is enumerated."""
    return sum(
        math.prod(
            math.ceil((part.stop - part.start) / size)
            for part, size in zip(box, array.chunk, strict=True)
        )
        for item in share.items
        for group in item.pieces
        for array in group.arrays
        for box in array.boxes(group.start, group.stop)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time planning, in shares, of 4.9 TB.")
    parser.add_argument("--shares", type=int, default=1024)
    count = parser.parse_args().shares
    with tempfile.TemporaryDirectory() as root:
        source = checkpoint(root)
        begin = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        planned = plan(to_mesh(source, Mesh(AXES, TARGET)), max_memory="1GiB", link=False)
        seconds = time.perf_counter() - begin
        shares = [planned.share(number, count) for number in range(count)]
        divided = time.perf_counter() - begin - seconds
        weights = [share.nbytes for share in shares]
        some = [shares[number] for number in (0, count // 2 - 1, count - 1)]
        document = {
            "shares": count,
            "bytes": planned.decoded_bytes,
            "chunks": planned.chunks_written,
            "planning_seconds": seconds,
            "dividing_seconds": divided,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "index_peak_bytes": before * 1024,
            "balance": max(weights) / (sum(weights) / count),
            "enumerated": {share.number: [share.nbytes, chunks_of(share)] for share in some},
            "problems": planned.problems,
        }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
