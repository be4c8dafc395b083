"""A model in a process of its own, which tells its structure.

The models of a conversion may be from two trees with modules of the same names, as when a
repository was migrated in place; and one process has one module of a name.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator

from reshard.cli.model_argument import load_model, model_errors
from reshard.convert.model import Goal, goal_of
from reshard.errors import ReshardError


@contextlib.contextmanager
def told_apart(model: str, option: str, api: str, role: str) -> Iterator[Callable[[], Goal]]:
    """Begins to run the code of a model in a process of its own; what it yields waits for the tree.

    Args:
      model: as for `load_model`.
      option: as for `load_model`.
      api: as for `goal_of`.
      role: as for `goal_of`.

    Raises:
      ReshardError: when it is waited for, as `load_model` and `goal_of` do, and if the process ends
        without an answer.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "reshard.cli.apart", model, option, api, role],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        process_group=0,  # an interrupt from the keyboard is for this process alone, which ends it
    )

    def answer() -> Goal:
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
            yield answer
        finally:
            process.kill()


def main() -> None:
    """The process: writes a tree, or what stands against it."""
    model, option, api, role = sys.argv[1:]
    del sys.argv[1:]
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what the model's code prints is no answer
        try:
            with model_errors(option, model):
                found = goal_of(load_model(model, option), api, role)
        except ReshardError as error:
            found = error
        pickle.dump(found, answer)


if __name__ == "__main__":
    main()
