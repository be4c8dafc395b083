"""What `reshard ckpt` takes from one bucket to another one, or to a disk; servers are on loopback.

    python -m tests.benchmarks.buckets SRC --delay 0.05
    python -m tests.benchmarks.buckets SRC --kind s3 --out DST --workers 4 --concurrency 1

Every request is answered so many seconds later than it could be. The command is timed from outside,
without what the servers need to start and to be filled.
"""

import argparse
import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

from tests.benchmarks.bench import RESHARD
from tests.servers import Stores


def _filled(stores: Stores, kind: str, source: Path) -> str:
    """The URL of a copy of a checkpoint."""
    url = f"{stores.bucket(kind)}/run"
    subprocess.run(
        [RESHARD, "ckpt", source, url, "--quiet"], env=os.environ | stores.environment, check=True
    )
    return url


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time `reshard ckpt` between two buckets.",
        epilog="Other options are for `reshard ckpt`.",
    )
    parser.add_argument("source", type=Path, help="a workload")
    parser.add_argument("--kind", default="conditional", help="of the servers in tests/servers.py")
    parser.add_argument("--out", type=Path, help="write to this directory")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, of each request")
    parser.add_argument("--log", type=Path, help="write when each request began and ended here")
    arguments, flags = parser.parse_known_args()
    with contextlib.closing(Stores()) as stores:
        source = _filled(stores, arguments.kind, arguments.source.absolute())
        out = arguments.out or f"{stores.bucket(arguments.kind)}/out"
        command = [RESHARD, "ckpt", source, out, *flags]
        stores.reset()
        stores.delay = arguments.delay
        start = time.monotonic()
        environment = os.environ | stores.environment
        subprocess.run([*command, "--to", "1x8", "--quiet"], env=environment, check=True)
        seconds = time.monotonic() - start
        requests = sorted(stores.requests, key=lambda request: request.begin)
    print(json.dumps({"seconds": seconds, "requests": len(requests)}))
    if arguments.log:
        lines = (
            f"{r.begin - start:8.3f} {r.end - start:8.3f} {r.status} {r.operation:6} "
            f"{r.sent:>10} {r.received:>10} {r.key}\n"
            for r in requests
        )
        arguments.log.write_text("".join(lines))


if __name__ == "__main__":
    main()
