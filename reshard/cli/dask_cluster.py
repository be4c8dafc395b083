"""Who does a command's work: this process, workers of this machine, or a Dask cluster, which alone
imports Dask; and what is shown meanwhile."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import click

from reshard.cli import output
from reshard.errors import ReshardError, first_line
from reshard.units import format_bytes, parse_bytes

# How often Dask tries again what a task has raised.
_RETRIES = 2
_TIMEOUT = "20s"
# Bytes of the interpreter and its libraries, which come on top of `--max-memory`.
_OVERHEAD = 512 << 20


@contextlib.contextmanager
def working(
    dask: str | None, workers: int | None, max_memory: str, quiet: bool
) -> Iterator[dict[str, Any]]:
    """What `save`, `verify` and others take as `workers`, `executor` and `progress`, which is drawn
    unless the command is `quiet`. Warnings are told meanwhile."""
    with (
        output.warnings_told(),
        _workers(dask, workers, max_memory) as by,
        output.progress_bar(quiet, by["workers"]) as progress,
    ):
        yield by | {"progress": progress}


@contextlib.contextmanager
def _workers(dask: str | None, workers: int | None, max_memory: str) -> Iterator[dict[str, Any]]:
    if dask is None:
        yield {"workers": workers}
        return
    if workers is not None:
        raise click.UsageError("--dask and --workers exclude each other: a cluster has its own")
    try:
        from distributed import Client
    except ImportError as error:
        hints = ["pip install 'reshard[dask]'"]
        raise ReshardError("--dask needs dask.distributed", [str(error)], hints) from error
    # What a connection comes to is told by the error of the job.
    for name in ("distributed", "distributed.client"):  # each has a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(dask, timeout=_TIMEOUT, set_as_default=False)
    except (OSError, ValueError) as error:
        problem = first_line(ValueError(str(error)))
        raise ReshardError(f"no Dask scheduler answers at `{dask}`", [problem]) from error
    try:
        there = client.scheduler_info(n_workers=-1)["workers"]
        if not there:
            raise ReshardError(f"the Dask cluster at `{dask}` has no workers")
        _warn_of_memory(there, parse_bytes(max_memory))
        executor = client.get_executor(retries=_RETRIES, pure=False)
        yield {"workers": sum(w["nthreads"] for w in there.values()), "executor": executor}
    finally:
        client.close(timeout=2)


def _warn_of_memory(workers: dict[str, Any], max_memory: int) -> None:
    """Warns of workers that Dask may kill for the memory that they are to use: each runs as many
    tasks at once as it has threads."""
    for address, worker in workers.items():
        needed = worker["nthreads"] * max_memory + _OVERHEAD
        limit = worker["memory_limit"]
        if limit and limit < needed:
            warnings.warn(
                f"the Dask worker at {address} may use {format_bytes(limit)}, and "
                f"{worker['nthreads']} x {format_bytes(max_memory)} with "
                f"{format_bytes(_OVERHEAD)} on top are {format_bytes(needed)}: Dask may kill it",
                stacklevel=2,
            )
