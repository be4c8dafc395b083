"""One restore into live arrays on eight simulated devices, measured from inside its process.

    python -m tests.benchmarks.restore reshard W1 SRC 1x8 --max-memory 256MiB

Only the call is measured, until every array is there: the imports, jax's start and the abstract
target are a training script's own, and come before. Afterwards the tree is checked for shapes,
dtypes and shardings. Prints one JSON object.
"""

import argparse
import contextlib
import functools
import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.workloads import TARGET, WORKLOADS, abstract, simulate_devices

TOOLS = ("reshard", "orbax")
MESHES = {"1x8": TARGET, "8x1": (8, 1), "replicated": TARGET}


@dataclass(frozen=True)
class Restored:
    """What one restore took: seconds until every array is ready; RSS right before, and at its peak;
    how much more anonymous memory there was than before, at most; and memory of the result, once
    where devices share it."""

    seconds: float
    before_bytes: int
    peak_bytes: int
    anonymous_bytes: int
    result_bytes: int

    @property
    def extra_bytes(self) -> tuple[int, int]:
        """Peak anonymous memory and RSS beyond what was there before and what the result needs."""
        rss = self.peak_bytes - self.before_bytes
        return self.anonymous_bytes - self.result_bytes, rss - self.result_bytes


def _status(field: str) -> int:
    """One of this process's sizes in `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@contextlib.contextmanager
def _sampled(field: str) -> Iterator[list[int]]:
    """One of this process's sizes, again and again: the kernel keeps no peak of most."""
    found, done = [_status(field)], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            found.append(_status(field))

    thread = threading.Thread(target=sample)
    thread.start()
    yield found
    done.set()
    thread.join()


def _restorer(tool: str, max_memory: str | None) -> Callable[[Path, Any], Any]:
    """The function to measure, ready to be called with a path and a target.

    Flax, which `reshard` imports at the first state that it sees, is there in a training script.
    """
    importlib.import_module("flax.nnx")
    if tool == "orbax":
        import orbax.checkpoint as ocp

        return ocp.StandardCheckpointer().restore
    import reshard

    return functools.partial(reshard.restore, max_memory=max_memory)


def _check(tree: Any, target: Any) -> None:
    """Raises `RuntimeError` unless the tree holds arrays such as the target asks for."""
    import jax

    def differs(array: Any, want: jax.ShapeDtypeStruct) -> bool:
        if not isinstance(array, jax.Array) or want.sharding is None:
            return True
        same = array.shape == want.shape and array.dtype == want.dtype
        return not (same and array.sharding.is_equivalent_to(want.sharding, array.ndim))

    # Trees of different structure raise a `ValueError` of jax's.
    wrong = sum(jax.tree.leaves(jax.tree.map(differs, tree, target)))
    if wrong:
        raise RuntimeError(f"{wrong} leaves are not what the target asks for")


def _memory(tree: Any) -> int:
    """Bytes of the arrays' buffers, each buffer once however many devices share it."""
    import jax

    shards = (shard.data for array in jax.tree.leaves(tree) for shard in array.addressable_shards)
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def restore(
    tool: str, name: str, source: Path, mesh: str, max_memory: str | None = None
) -> Restored:
    """Restores a workload once, by one of `TOOLS` on one of `MESHES`; the limit is `reshard`'s."""
    simulate_devices()
    import jax

    call = _restorer(tool, max_memory)
    target = abstract(WORKLOADS[name], MESHES[mesh], replicated=mesh == "replicated")
    # From here on, the kernel's record of the peak is this restore's.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    with _sampled("RssAnon") as anonymous:
        start = time.perf_counter()
        tree = jax.block_until_ready(call(source, target))
        seconds = time.perf_counter() - start
    peak = _status("VmHWM")
    _check(tree, target)
    more = max(anonymous) - anonymous[0]
    return Restored(seconds, before, peak, more, _memory(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one restore of a workload.")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("source", type=Path)
    parser.add_argument("mesh", choices=MESHES)
    parser.add_argument("--max-memory", metavar="SIZE", help="of `reshard`; no limit by default")
    arguments = parser.parse_args()
    if arguments.tool == "orbax" and arguments.max_memory:
        parser.error("--max-memory is for `reshard`")
    source = arguments.source.absolute()
    words = arguments.tool, arguments.name, source, arguments.mesh, arguments.max_memory
    print(json.dumps(asdict(restore(*words))))


if __name__ == "__main__":
    main()
