"""What the first restore of a plain pytree takes in a process, beyond what the second one does.

    python -m tests.benchmarks.first SRC

jax, with its devices, and reshard are there before, as in a training script; Flax is not.
"""

import argparse
import json
import time
from pathlib import Path

from tests.benchmarks.workloads import TARGET, WORKLOADS, abstract, simulate_devices


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the first restore in a process.")
    parser.add_argument("source", type=Path, help="the workload `tiny`")
    source = parser.parse_args().source.absolute()
    simulate_devices()
    import jax

    import reshard

    target = abstract(WORKLOADS["tiny"], TARGET)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(reshard.restore(source, target))
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds[0] - seconds[1]}))


if __name__ == "__main__":
    main()
