"""A model in a process of its own, which answers a task.

The two models of a conversion may be in modules of the same names, for example if a repository was
migrated in place. One process can import only one module of a name.
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
def run_in_subprocess(
    model: str, option: str, task: Callable[[Any], T]
) -> Iterator[Callable[[], T]]:
    """Starts a task with a model, named as for `load_model`, in a process of its own. It yields a
    function that waits for the answer. The task and the answer are pickled. That function raises
    the errors of the task, and ReshardError if the process ends without an answer."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "reshard.cli.subprocess_model", model, option],
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
    """The process: writes the answer, or the error of the task."""
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
