"""One save of a workload on 1x8, with digests or without, timed without its imports.

python -m tests.benchmarks.trust SRC DST [--without-digests]
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import reshard
from reshard.arrays.digests import Digest
from reshard.cli.options import tune_memory


def _count(self: Digest, box: Any, values: Any) -> None:
    """Only what makes a digest complete."""
    self.elements += values.size


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one save.")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--without-digests", action="store_true")
    arguments = parser.parse_args()
    if arguments.without_digests:
        Digest.add = _count
    tune_memory()
    save, ckpt = reshard.save, reshard.to_mesh(reshard.open(arguments.source), "1x8")
    start = time.perf_counter()
    save(ckpt, arguments.destination)
    os.sync()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
