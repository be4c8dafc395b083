"""A model in a process of its own, which tells what is asked of it.

The models of a conversion may be from two trees with modules of the same names, as when a
repository was migrated in place; and one process has one module of a name.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from reshard.cli.model_argument import load_model, model_errors
from reshard.errors import ReshardError

T = TypeVar("T")


@contextlib.contextmanager
def told_apart(model: str, option: str, task: Callable[[Any], T]) -> Iterator[Callable[[], T]]:
    """Begins to run a task with a model, as for `load_model`, in a process of its own; what it
    yields waits for the answer. The task and what it returns are pickled. Errors of both are raised
    when it is waited for, and ReshardError if the process ends without an answer."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "reshard.cli.apart", model, option],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # an interrupt from the keyboard is for this process alone, which ends it
    )

    def answer() -> T:
        told, _ = process.communicate()
        if process.returncode:
            raise ReshardError(
                f"{option} {model}: its process ended with status {process.returncode}"
            )
        found = pickle.loads(told)
        if isinstance(found, ReshardError):
            raise found
        return found

    with process:
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its status says so
                asked, process.stdin = process.stdin, None
                assert asked is not None
                with asked:
                    pickle.dump(task, asked)
            yield answer
        finally:
            process.kill()


def main() -> None:
    """The process: writes an answer, or what stands against it."""
    model, option = sys.argv[1:]
    del sys.argv[1:]
    task = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what the model's code prints is no answer
        try:
            with model_errors(option, model):
                found = task(load_model(model, option))
        except ReshardError as error:
            found = error
        pickle.dump(found, answer)


if __name__ == "__main__":
    main()
