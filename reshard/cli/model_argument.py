"""`--model` and `--rules`: the user's model, and the file of rules for its axes."""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from reshard.convert.user_code import load, own_line
from reshard.errors import ReshardError, ShardingError
from reshard.sharding.mesh import Mesh, normalize_spec
from reshard.sharding.rules import parse_rules, spec_pairs

_EXAMPLE = [
    'rules = [["embed", "data"], ["vocab", ["data", "model"]], ["kv", []]]',
    'specs = [["kernel$", ["data", []]]]',
]
Pairs = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=1)
def build_target(model: str, rules: Pairs | None, specs: Pairs, mesh: Mesh) -> tuple[Any, Any]:
    """The abstract state of a model on a mesh, and its `Coverage`."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from reshard.restore.target import target_and_coverage

    abstract = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names)
    with model_errors("--model", model):
        return target_and_coverage(abstract, load_model(model, "--model"), rules, specs)


class _Marked(io.RawIOBase):
    """A stream that writes to stderr, with a mark before each line."""

    line = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *lines, self.line = (self.line + bytes(data)).split(b"\n")
        for line in lines:
            click.echo(f"your code: {line.decode(errors='replace')}", err=True)
        return len(data)


@contextlib.contextmanager
def marked_output() -> Iterator[None]:
    """Sends prints of the user's code to stderr, with a mark: stdout is for answers."""
    marked: Any = _Marked()
    with contextlib.redirect_stdout(io.TextIOWrapper(marked, "utf-8", write_through=True)):
        try:
            yield
        finally:
            marked.write(b"\n" if marked.line else b"")


@contextlib.contextmanager
def model_errors(option: str, model: str | None, hints: Sequence[str] = ()) -> Iterator[None]:
    """Raises errors of the model's code as errors of its option. Marks its prints."""
    try:
        with marked_output():
            yield
    except ReshardError:
        raise
    except Exception as error:
        line = own_line(error, "" if model is None else model.rpartition(":")[0])
        if not line:  # a bug elsewhere
            raise
        raise ReshardError(
            f"{option} {model}: its code raised {type(error).__name__}", [str(error), *line], hints
        ) from error


def load_model(model: str, option: str) -> Any:
    """The object that `package.module:name` or `path/to/file.py:name` names. Its code finds modules
    in the folder of the file and in the current directory. Raises ReshardError if it cannot be
    imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    look_here()
    file, _, _ = model.rpartition(":")
    if file.endswith(".py"):  # its functions may import modules later
        folder = os.path.dirname(os.path.abspath(file))
        sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    return load(model, option)


def look_here() -> None:
    """Lets the user's modules be found in the current directory, too."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def read_rules(path: str) -> tuple[Pairs | None, Pairs]:
    """The `rules` of a file, None if it has none, and its `specs`."""
    from reshard.convert.mapfile import read_toml

    try:
        document = read_toml(path)
    except (OSError, ValueError) as error:
        raise ShardingError(f"--rules {path}: it cannot be read", [str(error)], _EXAMPLE) from error
    readers = {"rules": lambda rules: parse_rules(rules, ()), "specs": _specs}
    problems, found = [], {}
    for key, value in document.items():
        if key not in readers:
            problems.append(f"`{key}` is neither `rules` nor `specs`")
            continue
        try:
            found[key] = readers[key](value)
        except ShardingError as error:
            problems += [f"{key}: {error.summary}", *error.problems]
    if problems:
        raise ShardingError(f"--rules {path}: some entries are not rules", problems, _EXAMPLE)
    return found.get("rules"), found.get("specs", ())


def _specs(entries: Any) -> Pairs:
    return tuple((regex, normalize_spec(spec)) for regex, spec in spec_pairs(entries))
