"""Commands that run in this process instead of a process of their own."""

import contextlib
import ctypes
import gc
import io
import logging
import pathlib
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import reshard.cli
from reshard.cli import subprocess_model
from reshard.cli.model_argument import load_model, model_errors


def command(words: list[str]) -> tuple[int, str, str]:
    """Runs `reshard WORDS`. Returns its exit status, stdout and stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    status = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["reshard", *words])
        try:
            reshard.cli.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def reshard_in(directory: pathlib.Path, *words: object) -> tuple[int, str, str]:
    with inside(directory):
        return command([str(word) for word in words])


def shown(directory: pathlib.Path, *words: object) -> str:
    """The stdout of `reshard WORDS`, which succeeds and prints nothing on stderr."""
    status, out, err = reshard_in(directory, *words)
    assert (status, err) == (0, "")
    return out


def refused(directory: pathlib.Path, *words: object) -> str:
    """The stderr of `reshard WORDS`, which fails with status 2."""
    status, out, err = reshard_in(directory, *words)
    assert (status, out) == (2, "")
    return err


def run_here(model: str, option: str, task: Callable[[Any], Any]) -> Any:
    """The same as `run_in_subprocess`, in this process."""
    asked = pickle.dumps(task)
    with model_errors(option, model):
        return pickle.loads(pickle.dumps(pickle.loads(asked)(load_model(model, option))))


@contextlib.contextmanager
def inside(directory: pathlib.Path) -> Iterator[pytest.MonkeyPatch]:
    """In a directory, on a terminal of 80 columns; and what the command line does to its own
    process is not done to this one. The model of a source is loaded in this process too. Modules of
    the directory are forgotten afterwards."""

    class Library(ctypes.CDLL):
        def __getattr__(self, name):
            if name == "mallopt":
                raise AttributeError(name)
            return super().__getattr__(name)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    thresholds = gc.get_threshold()
    logging.disable(logging.WARNING)  # Orbax warns of what it is told to do here
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sharding info not provided")
            patch.setattr(ctypes, "CDLL", Library)
            patch.setattr(subprocess_model, "run_in_subprocess", run_here)
            patch.chdir(directory)
            patch.setenv("COLUMNS", "80")
            patch.setattr(sys, "path", list(sys.path))
            yield patch
    finally:
        logging.disable(logging.NOTSET)
        gc.set_threshold(*thresholds)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and pathlib.Path(file).is_relative_to(directory):
                del sys.modules[name]
