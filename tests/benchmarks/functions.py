"""Counts the functions of the project that a small local job calls.

    python -m tests.benchmarks.functions [PACKAGE]

The job is `reshard ckpt` of 8 arrays of 1 MiB. PACKAGE is the directory of another version of
`reshard`. Lambdas, comprehensions and the bodies of classes and modules do not count.
"""

import contextlib
import importlib
import io
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def _save(path: Path) -> None:
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    random = np.random.default_rng(0)
    tree = {f"layer_{n}": random.random((512, 512), np.float32) for n in range(8)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, jax.device_put(tree, sharding))


def functions_called(source: Path, out: Path) -> list[str]:
    """The functions of the package that `reshard ckpt` calls, by module and name."""
    package = Path(importlib.import_module("reshard").__path__[0])
    main = importlib.import_module("reshard.cli").main
    called: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.argv = ["reshard", "ckpt", str(source), str(out), "--to", "data=1,model=8"]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if not out.exists():
        raise SystemExit("the job has failed")
    files = {code: Path(code.co_filename) for code in called if not code.co_name.startswith("<")}
    return sorted(
        f"{file.relative_to(package)}:{code.co_qualname}"
        for code, file in files.items()
        if file.is_relative_to(package) and not _is_body(code)
    )


def _is_body(code: CodeType) -> bool:
    """Whether code is the body of a class, which has no fast locals."""
    return not code.co_flags & 0x2


if __name__ == "__main__":
    sys.path[:0] = [str(Path(argument).parent) for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        _save(Path(scratch, "source"))
        names = functions_called(Path(scratch, "source"), Path(scratch, "out"))
    print("\n".join(names))
    print(f"{len(names)} functions")
