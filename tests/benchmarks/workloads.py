"""Checkpoints to measure with, saved by Orbax on a simulated 2x4 mesh.

    python -m tests.benchmarks.workloads W1 OUT

Values are normal, times 0.02: what weights look like to a codec. Importing this module does not
import jax.
"""

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

AXES = ("data", "model")
SAVED = (2, 4)
TARGET = (1, 8)

_IN_OUT = ("data", "model")
_OUT_IN = ("model", "data")


@dataclass(frozen=True)
class Leaf:
    """One array to save: its shape and its partition spec."""

    shape: tuple[int, ...]
    spec: tuple[str, ...]


Tree: TypeAlias = "dict[str, Leaf | Tree]"


@dataclass(frozen=True)
class Workload:
    """A tree of leaves, and how Orbax is to save it: `chunk_bytes` is None for whole shards, and
    `ocdbt` says whether in a database or in plain files."""

    tree: Callable[[], Tree]
    dtype: str = "float32"
    compress: bool = True
    chunk_bytes: int | None = None
    ocdbt: bool = True


def llama(d: int, ff: int, kv: int, vocab: int, layers: int) -> Tree:
    """The weights of a Llama: embedding, `layers` blocks of nine arrays, final norm and head."""
    tree: Tree = {
        "embed": Leaf((vocab, d), _OUT_IN),
        "norm": Leaf((d,), ()),
        "lm_head": Leaf((d, vocab), _IN_OUT),
    }
    for i in range(layers):
        tree[f"layer_{i}"] = {
            "q": Leaf((d, d), _IN_OUT),
            "k": Leaf((d, kv), _IN_OUT),
            "v": Leaf((d, kv), _IN_OUT),
            "o": Leaf((d, d), _OUT_IN),
            "gate": Leaf((d, ff), _IN_OUT),
            "up": Leaf((d, ff), _IN_OUT),
            "down": Leaf((ff, d), _OUT_IN),
            "attention_norm": Leaf((d,), ()),
            "mlp_norm": Leaf((d,), ()),
        }
    return tree


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The leaves of a nested dict, each with its path."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, node in tree.items():
        below = (*path, name)
        found += leaves(node, below) if isinstance(node, dict) else [(below, node)]
    return found


def _quarter_llama() -> Tree:
    return {"params": llama(d=1024, ff=3584, kv=256, vocab=32064, layers=16)}


def _with_moments() -> Tree:
    return {name: _quarter_llama()["params"] for name in ("params", "mu", "nu")}


def _half_llama() -> Tree:
    return {"params": llama(d=2048, ff=7168, kv=512, vocab=32064, layers=16)}


def _two_layers() -> Tree:
    return {"params": llama(d=4096, ff=14336, kv=1024, vocab=128256, layers=2)}


def _many() -> Tree:
    rows = random.Random(0)
    return {f"a{i}": Leaf((32 * rows.randint(1, 16), 32), _IN_OUT) for i in range(5000)}


def _chunked() -> Tree:
    return {f"a{i}": Leaf((640, 256), _IN_OUT) for i in range(10)}


def _one() -> Tree:
    return {"params": {"big": Leaf((16384, 32768), _IN_OUT)}}


WORKLOADS = {
    "W1": Workload(_quarter_llama),  # Llama-3-8B divided by 4: 147 arrays, 1.1 GB
    "W1-opt": Workload(_with_moments),  # with adam's moments: 441 arrays, 3.4 GB
    "W1-raw": Workload(_quarter_llama, compress=False),
    "W1-4GB": Workload(_half_llama),  # the arrays of W1 in other sizes: 147 arrays, 4.0 GB
    "W2": Workload(_two_layers, dtype="bfloat16"),  # true 8B shapes, two layers of them: 3 GB
    "W4": Workload(_many),  # 5,000 arrays of 4 to 64 KiB
    "W5-files": Workload(_chunked, chunk_bytes=8 << 10, ocdbt=False),  # 1,280 chunks of 5 KiB
    "BIG": Workload(_one, chunk_bytes=16 << 20),  # 2 GiB in one array, in 16 MiB chunks
}


def simulate_devices() -> None:
    """Gives jax eight CPU devices; to be called before jax is imported."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"


def shardings(mesh_shape: tuple[int, int], tree: Tree) -> Any:
    """The tree with each leaf's `NamedSharding` on a mesh of that shape in its place."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(mesh_shape), AXES)
    return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(*leaf.spec)), tree)


def abstract(workload: Workload, mesh_shape: tuple[int, int], *, replicated: bool = False) -> Any:
    """The tree as a training script that knows its model has it before a restore.

    Each leaf is a `jax.ShapeDtypeStruct`, sharded on a mesh of that shape by the spec it was saved
    with, or `replicated` on every device of it.
    """
    import jax

    dtype = jax.numpy.dtype(workload.dtype)

    def struct(leaf: Leaf, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    tree = workload.tree()
    if replicated:
        tree = jax.tree.map(lambda leaf: Leaf(leaf.shape, ()), tree)
    return jax.tree.map(struct, tree, shardings(mesh_shape, tree))


def make(name: str, path: Path) -> None:
    """Saves the workload at `path`, which must not exist."""
    simulate_devices()
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    workload = WORKLOADS[name]
    dtype = jax.numpy.dtype(workload.dtype)
    rng = np.random.default_rng(0)

    def fill(leaf: Leaf, sharding: jax.sharding.Sharding) -> jax.Array:
        values = rng.standard_normal(leaf.shape, dtype=np.float32)
        values *= 0.02
        return jax.device_put(values.astype(dtype, copy=False), sharding)

    tree = workload.tree()
    arrays = jax.tree.map(fill, tree, shardings(SAVED, tree))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=workload.chunk_bytes), arrays)
    checkpointer = ocp.PyTreeCheckpointer(
        use_ocdbt=workload.ocdbt, use_compression=workload.compress
    )
    checkpointer.save(path, arrays, save_args=save_args)


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a workload with Orbax on a 2x4 mesh.")
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    make(arguments.name, arguments.out.absolute())


if __name__ == "__main__":
    main()
