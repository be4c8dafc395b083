"""The user's code: models, and functions that a map file names. A checkpoint or its record never
names code that is imported."""

import collections
import contextlib
import dataclasses
import difflib
import importlib
import os
import pathlib
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from reshard.errors import ReshardError

# Beginnings of the file names of all other code; `<` begins names of no file.
_OTHERS = (
    "<",
    str(pathlib.Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
# Folder that `findable` has put on the path -> its number of users at this moment.
_PLACED: collections.Counter[str] = collections.Counter()
_PLACING = threading.Lock()


@contextlib.contextmanager
def findable(name: str) -> Iterator[None]:
    """Within the context, Python finds the modules in the folder of the file of a name first."""
    file, _ = _parts(name)
    folder = os.path.dirname(os.path.abspath(file)) if file.endswith(".py") else ""
    with _PLACING:
        if folder and not _PLACED[folder]:
            sys.path.insert(0, folder)
        _PLACED[folder] += 1
    try:
        yield
    finally:
        with _PLACING:
            _PLACED[folder] -= 1
            if folder and not _PLACED[folder]:
                with contextlib.suppress(ValueError):  # the user's code has removed it
                    sys.path.remove(folder)


def load(name: str, what: str) -> Any:
    """Import the object `package.module:name` or `path/to/file.py:name`. Raises ReshardError: it
    cannot be imported."""
    module, attribute = _parts(name)
    if not module or not attribute:
        file = name.rstrip(":")
        example = f"{file}:NAME" if file.endswith(".py") else "my_project.model:create_train_state"
        raise ReshardError(
            f"{what} {name}: this name does not have the form `package.module:callable`",
            hints=[f"{what} {example}"],
        )
    file = pathlib.Path(module).absolute() if module.endswith(".py") else None
    places = "the current directory and on PYTHONPATH"
    if file is not None:
        if not file.is_file():
            raise ReshardError(f"{what} {name}: there is no such file")
        module, places = file.stem, f"{file.parent}, {places}"
    part = ""
    try:
        with findable(name):
            found: Any = importlib.import_module(module)
        origin = getattr(found, "__file__", None)
        if file is not None and (origin is None or not file.samefile(origin)):
            raise ReshardError(
                f"{what} {name}: another module has the name `{module}`",
                [origin or "it is built in"],
                ["give the file another name"],
            )
        for part in attribute.split("."):
            found = getattr(found, part)
    except ReshardError:
        raise
    except (Exception, SystemExit) as error:
        why, hints = f"importing it raised {type(error).__name__}", []
        if isinstance(error, ImportError | AttributeError):
            why, hints = "it cannot be imported", [f"modules are looked for in {places}"]
        if part and isinstance(error, AttributeError):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hints = [f"the nearest name is `{other}`" for other in near]
        problems = [str(error), *own_line(error, module)]
        raise ReshardError(f"{what} {name}: {why}", problems, hints) from error
    return found


@dataclasses.dataclass(frozen=True)
class NamedFunction:
    """A user's function, which another process loads by its name."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        with findable(self.name):
            return self.function(*arguments)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function itself, for `inspect`."""
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        return load_function, (self.name,)


def load_function(name: str) -> NamedFunction:
    """The function that a key `apply` names, as for `load`."""
    module, attribute = _parts(name)
    function = load(name, "apply")
    file = f"{os.path.abspath(module)}:{attribute}" if module.endswith(".py") else name
    return NamedFunction(file, function)


def _parts(name: str) -> tuple[str, str]:
    """The module, or its file, and the name in it."""
    module, _, attribute = name.rpartition(":")
    return module, attribute


def own_line(error: BaseException, module: str) -> list[str]:
    """The last line of the user's code in the traceback of an error, if any: code in the package of
    a module, or code that is neither installed nor part of Python."""
    package = module.partition(".")[0]
    lines = [
        f"in {frame.f_code.co_filename}, line {number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
        or not frame.f_code.co_filename.startswith(_OTHERS)
    ]
    return lines[-1:]
