"""One of several processes that restore a checkpoint together.

    python distributed_worker.py COORDINATOR PROCESSES NUMBER FOLDER MESH

Restores `FOLDER/saved` onto a mesh over all processes, compares every shard that this process holds
with `FOLDER/values.npz`, and writes what it found to `FOLDER/report_NUMBER.json`.
"""

import itertools
import json
import pathlib
import sys
from typing import Any

import jax

DEVICES = 4
MESHES = {"1x8": (1, 8), "8x1": (8, 1), "2x4": (2, 4)}
# Name of an array -> what it is restored to on a mesh of the axes "data" and "model".
SPECS: dict[str, tuple] = {
    "both": ("data", "model"),
    "swapped": ("model", "data"),
    "row": (("data", "model"),),
    "column": (None, ("data", "model")),
    "whole": (),
    # On 2x4, every other shard belongs to the same process.
    "interleaved": (("model", "data"),),
}


def needed_bytes(handle: Any, sharding: Any) -> int:
    """Stored bytes of the chunks that the shards of this process touch."""
    values = handle.data.store.values[handle.data.name]
    touched = set()
    for index in sharding.addressable_devices_indices_map(handle.shape).values():
        parts = [part.indices(size) for part, size in zip(index, handle.shape, strict=True)]
        ranges = [
            range(start // chunk, (stop - 1) // chunk + 1)
            for (start, stop, _), chunk in zip(parts, handle.chunk_shape, strict=True)
        ]
        touched |= set(itertools.product(*ranges))
    return sum(values[".".join(map(str, chunk))].size for chunk in touched)


def bytes_read() -> int:
    import tensorstore as ts

    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def shards_are_right(array: Any, values: Any) -> bool:
    import numpy as np

    return len(array.addressable_shards) == DEVICES and all(
        np.asarray(shard.data).tobytes() == values[shard.index].tobytes()
        for shard in array.addressable_shards
    )


def report_of(mesh: Any, checkpoint: Any, values: Any, memory: str | None) -> dict[str, Any]:
    """What came of restoring every array onto one mesh."""
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import reshard

    targets = {
        name: jax.ShapeDtypeStruct(
            values[name].shape,
            values[name].dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*SPECS[name])),
        )
        for name in SPECS
    }
    found: dict[str, Any] = {}
    for name, target in targets.items():
        before = bytes_read()
        state = {"arrays": {name: target}}
        array = reshard.restore(checkpoint, state, unexpected="ignore", max_memory=memory)
        array = array["arrays"][name]
        found[name] = {
            "right": shards_are_right(array, values[name]),
            "sharding": array.sharding == target.sharding,
            "read": bytes_read() - before,
            "needed": needed_bytes(checkpoint["arrays", name], target.sharding),
            "sum": int(jax.jit(lambda x: (x % 1000).astype("int32").sum())(array)),
            "expected": int((values[name] % 1000).astype("int32").sum()),
        }
    keys = jax.ShapeDtypeStruct(
        (16,),
        jax.random.key(0).dtype,
        sharding=NamedSharding(mesh, PartitionSpec(("data", "model"))),
    )
    key = jax.ShapeDtypeStruct((), keys.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    target = {"arrays": targets, "keys": keys, "key": key}
    target |= {"step": 0, "host": np.zeros(3), "name": ""}
    state = reshard.restore(checkpoint, target, max_memory=memory)
    bare = reshard.restore(checkpoint, mesh, max_memory=memory)
    for which, tree in {"state": state, "bare": bare}.items():
        found[which] = {
            name: shards_are_right(tree["arrays"][name], values[name]) for name in SPECS
        } | {
            "keys": shards_are_right(jax.random.key_data(tree["keys"]), values["keys"]),
            "key": shards_are_right(jax.random.key_data(tree["key"]), values["key"]),
            "rest": [tree["step"], tree["host"].tolist(), tree["name"]],
            "drawn": float(jax.jit(lambda keys: jax.random.uniform(keys[9]))(tree["keys"])),
        }
    found["specs"] = {name: str(bare["arrays"][name].sharding.spec) for name in SPECS}
    return found


def module_is_right(mesh: Any, folder: pathlib.Path, values: Any) -> bool:
    """Whether a module is updated in place, its variables laid out over both processes."""
    import numpy as np
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    import reshard

    sharding = NamedSharding(mesh, PartitionSpec(None, ("data", "model")))
    shape, dtype = values["column"].shape, values["column"].dtype
    zeros = jax.make_array_from_callback(
        shape, sharding, lambda index: np.zeros(shape, dtype)[index]
    )
    module = nnx.Dict(column=nnx.Param(zeros))
    variable = module.column
    ckpt = reshard.rename(reshard.open(folder / "saved"), [("^arrays/", "")])
    reshard.restore(ckpt, module, unexpected="ignore")
    return module.column is variable and shards_are_right(variable[...], values["column"])


def main(coordinator: str, processes: int, number: int, folder: pathlib.Path, name: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, number)

    import numpy as np

    import reshard

    values = dict(np.load(folder / "values.npz"))
    checkpoint = reshard.open(folder / "saved")
    found: dict[str, Any] = {"devices": [jax.local_device_count(), jax.device_count()]}
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(MESHES[name]), ("data", "model"))
    for memory in (None, "200KiB"):
        found[str(memory)] = report_of(mesh, checkpoint, values, memory)
    found["module"] = module_is_right(mesh, folder, values)
    (folder / f"report_{number}.json").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]), sys.argv[5])
