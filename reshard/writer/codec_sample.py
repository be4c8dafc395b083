"""How well an array will compress, from a sample, where nothing in the source says so: in another
dtype, or with another codec."""

import json

import numpy as np
import tensorstore as ts

from reshard.arrays.handle import ArrayHandle
from reshard.engine.plan import grid_boxes
from reshard.storage.location import checked
from reshard.tree import format_path
from reshard.writer.target_format import TargetFormat

# Elements of a sample: enough for the codec to settle, little to read.
_SAMPLE = 1 << 18


def encoded_ratio(handle: ArrayHandle, target: TargetFormat) -> float:
    """Encoded bytes for each decoded byte of the array in a format, measured on part of its first
    chunk.

    Reads and decodes that one chunk.
    """
    box = next(grid_boxes(handle.shape, handle.chunk_shape), None)
    if box is None:
        return 1.0
    read = checked(handle.view()[box].read(), f"{format_path(handle.path)}: its stored bytes")
    values = handle.rounded(np.asarray(read).reshape(-1)[:_SAMPLE])
    encoding = target.encoding(handle)._replace(transposes=())
    document = encoding.document(values.shape, values.shape, handle.dtype)
    context = ts.Context()
    array = ts.open(
        {
            "driver": target.driver,
            "kvstore": "memory://sample/",
            "metadata": json.loads(document),
        },
        context=context,
        create=True,
    ).result()
    array.write(values).result()
    store = ts.KvStore.open("memory://sample/", context=context).result()
    keys = [key for key in store.list().result() if not key.endswith((b".zarray", b"zarr.json"))]
    return sum(len(store.read(key).result().value) for key in keys) / values.nbytes
