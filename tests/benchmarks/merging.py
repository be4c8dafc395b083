"""Merges the databases of shares whose keys are interleaved, as a commit does.

    python -m tests.benchmarks.merging --keys 100000

Each key has a value of its own in a data file, just too large for the B-tree. The databases are
made first, by another process; of the merge, seconds and peak memory above the imports are told.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

import tensorstore as ts

from reshard.storage.location import Location
from reshard.storage.ocdbt import MANIFEST, build_root, new_context, ocdbt_spec, stage_spec
from reshard.units import parse_bytes
from reshard.writer.arrays import CACHE_BYTES

_VALUE = bytes(1025)
_FILE_BYTES = 2 << 30
_ROOT = "ocdbt.process_root"


def stages(shares: int) -> list[str]:
    return [f"ocdbt.process_{share}" for share in range(shares)]


def make(directory: Location, keys: int, shares: int) -> None:
    """The databases: key i is in share i modulo their number."""
    for share, stage in enumerate(stages(shares)):
        spec = stage_spec(directory, stage, _FILE_BYTES)
        store = ts.KvStore.open(spec, context=new_context()).result()
        transaction = ts.Transaction(atomic=True)
        into = store.with_transaction(transaction)
        for number in range(share, keys, shares):
            into.write(f"params.layer_{number // 100:06}/{number % 100}.0", _VALUE)
        transaction.commit_async().result()


def merge(directory: Location, keys: int, shares: int, max_memory: int) -> dict[str, float]:
    """Seconds and bytes that a merge takes."""
    databases = [
        (stage_spec(directory, stage, _FILE_BYTES), keys // shares) for stage in stages(shares)
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    manifest = build_root(directory, _ROOT, databases, max_memory, CACHE_BYTES)
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (directory / _ROOT / MANIFEST).write(manifest)
    spec = ocdbt_spec(directory, directory / _ROOT)
    merged = ts.KvStore.open(spec, context=new_context()).result()
    return {
        "keys": len(merged.list().result()),
        "seconds": seconds,
        "peak_bytes": (after - before) * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a merge of databases.")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--shares", type=int, default=64)
    parser.add_argument("--max-memory", type=parse_bytes, default="1GiB")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keys, shares = arguments.keys, arguments.shares
    if arguments.into:
        found = merge(Location(arguments.into), keys, shares, arguments.max_memory)
        print(json.dumps({**found, "shares": shares, "max_memory": arguments.max_memory}))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Location(folder), keys, shares)
        words = [sys.executable, "-m", "tests.benchmarks.merging", "--into", folder, *sys.argv[1:]]
        subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
