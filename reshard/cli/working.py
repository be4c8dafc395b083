"""The processes that do a command's work: this one, workers of this machine, or a Dask cluster.
Also progress and warnings on stderr."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click

from reshard.cli import options
from reshard.cli.model_argument import marked_output
from reshard.errors import ReshardError, first_line

# How often Dask repeats a task that raised an error.
_RETRIES = 2
_TIMEOUT = "20s"


@contextlib.contextmanager
def working(flags: options.Flags) -> Iterator[dict[str, Any]]:
    """The arguments `workers`, `executor` and `progress` of `save`, `verify` and others. Sends
    warnings and prints of the user's code to stderr."""
    with (
        warnings_told(),
        _workers(flags) as by,
        progress_bar(flags, by["workers"]) as progress,
        marked_output(),  # of the functions of a map
    ):
        yield by | {"progress": progress}


@contextlib.contextmanager
def warnings_told() -> Iterator[None]:
    """Prints warnings to stderr, a line each, without their place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
        yield


@contextlib.contextmanager
def progress_bar(
    flags: options.Flags, workers: int | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws progress on stderr; None if stderr is no terminal."""
    if flags["quiet"] or flags["as_json"] or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bar
    from rich.console import Console

    columns = [bar.BarColumn(), bar.DownloadColumn(binary_units=True)]
    columns += [bar.TransferSpeedColumn(), bar.TimeRemainingColumn()]
    counted = [] if workers is None else [f"{workers} worker{'s' * (workers > 1)}"]
    with bar.Progress(*counted, *columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=None)
        yield lambda done, total: drawn.update(task, completed=done, total=total)


@contextlib.contextmanager
def _workers(flags: options.Flags) -> Iterator[dict[str, Any]]:
    dask, workers = flags["dask"], flags["workers"]
    if dask is None:
        yield {"workers": workers}
        return
    if workers is not None:
        raise click.UsageError("--dask cannot be combined with --workers")
    try:
        from distributed import Client
    except ImportError as error:
        hints = ["pip install 'reshard[dask]'"]
        raise ReshardError("--dask needs dask.distributed", [str(error)], hints) from error
    # The error of the job reports a failed connection.
    for name in ("distributed", "distributed.client"):  # each has a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(dask, timeout=_TIMEOUT, set_as_default=False)
    except (OSError, ValueError) as error:
        problem = first_line(ValueError(str(error)))
        raise ReshardError(f"no Dask scheduler answers at `{dask}`", [problem]) from error
    try:
        threads = [w["nthreads"] for w in client.scheduler_info(n_workers=-1)["workers"].values()]
        if not threads:
            raise ReshardError(f"the Dask cluster at `{dask}` has no workers")
        executor = client.get_executor(retries=_RETRIES, pure=False)
        yield {"workers": sum(threads), "executor": executor}
    finally:
        client.close(timeout=2)
