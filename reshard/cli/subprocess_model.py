"""A task with the user's model in a process of its own.

The two models of a conversion may be in modules with the same names, for example if a repository
was migrated in place. One process can import only one module of a name.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from reshard.cli.model_argument import load_model, model_errors
from reshard.errors import ReshardError

T = TypeVar("T")


def run_in_subprocess(model: str, option: str, task: Callable[[Any], T]) -> T:
    """Calls a task with a model, named as for `load_model`, in a new process; or with None if the
    model is `hf:DIR`. The task and its result are pickled. Raises the task's ReshardError, or one
    if the process ends without a result."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "reshard.cli.subprocess_model", model, option],
        input=pickle.dumps(task),
        stdout=subprocess.PIPE,
        process_group=0,  # only this process gets an interrupt from the keyboard, and kills it
    )
    if ran.returncode:
        raise ReshardError(
            f"{option} {model}: the process of its code ended with exit status {ran.returncode}"
        )
    result = pickle.loads(ran.stdout)
    if isinstance(result, ReshardError):
        raise result
    return result


def main() -> None:
    """The process: writes the result of the task, or its error."""
    model, option = sys.argv[1:]
    del sys.argv[1:]
    task = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # prints of the model's code go to stderr
        try:
            with model_errors(option, model):
                result = task(None if model.startswith("hf:") else load_model(model, option))
        except ReshardError as error:
            result = error
        pickle.dump(result, answer)


if __name__ == "__main__":
    main()
