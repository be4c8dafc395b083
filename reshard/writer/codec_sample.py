"""How well a cast array will compress, from a sample: nothing in the source says so."""

import json

import numpy as np
import tensorstore as ts

from reshard.arrays.handle import ArrayHandle
from reshard.engine.plan import grid_boxes
from reshard.storage.location import checked
from reshard.tree import format_path
from reshard.writer.stream import target_metadata

# Elements of a sample: enough for the codec to settle, little to read.
_SAMPLE = 1 << 18


def encoded_ratio(handle: ArrayHandle) -> float:
    """Encoded bytes for each decoded byte of the cast array, measured on part of its first chunk.

    Reads and decodes that one chunk.
    """
    box = next(grid_boxes(handle.shape, handle.chunk_shape), None)
    if box is None:
        return 1.0
    read = checked(handle.view()[box].read(), f"{format_path(handle.path)}: its stored bytes")
    values = handle.rounded(np.asarray(read).reshape(-1)[:_SAMPLE])
    document = json.loads(target_metadata(handle, handle.chunk_shape))
    codec: dict[str, object] = {"compressor": document.get("compressor")}
    if handle.store.zarr3:
        inner = [
            c["configuration"]["codecs"]
            for c in document["codecs"]
            if c["name"] == "sharding_indexed"
        ]
        codec = {"codecs": inner[0] if inner else document["codecs"]}
    context = ts.Context()
    array = ts.open(
        {"driver": handle.store.driver, "kvstore": "memory://sample/", "metadata": codec},
        context=context,
        create=True,
        dtype=ts.dtype(handle.dtype),
        shape=values.shape,
        chunk_layout=ts.ChunkLayout(chunk_shape=values.shape),
    ).result()
    array.write(values).result()
    store = ts.KvStore.open("memory://sample/", context=context).result()
    keys = [key for key in store.list().result() if not key.endswith((b".zarray", b"zarr.json"))]
    return sum(len(store.read(key).result().value) for key in keys) / values.nbytes
