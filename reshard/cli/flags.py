"""Hints phrased as flags."""

from typing import Any

from reshard.hints import Hint
from reshard.tree import shell_quoted

# An argument is typed as `--name value`, if it is not one of these.
_FLAGS = {
    "axes": "--axis {}={}",
    "cast": "--dtype '{1}={0}'",
    "digest": "reshard digest PATH --json > '{}'",
    "drop": "--drop '{}'",
    "drop_both": "--drop '{}' --drop '{}'",
    "init": "--init '{}'",
    "ocdbt": "--ocdbt",
    "overwrite": "--overwrite",
    "rename": "--rename '{}={}'",
    "resume": "--resume",
    "select_drop": "--drop '{}'",
    "select_layout": "--select '{}' --rename '{}=' --layout {}",
    "select_rename": "--select '{}' --rename '{}={}'",
    "specs": "--spec '{}={}'",
    "to_mesh": "--to {}",
    "values": "--values",
    "verify": "reshard verify '{}'",
    "verify_item": "reshard verify '{}' --item '{}'",
}
# And without a value of its own as `--name`, if it is not one of these.
_METAVARS = {
    "cast": "--dtype 'GLOB=DTYPE'",
    "drop": "--drop GLOB",
    "init": "--init GLOB",
    "inputs": "--inputs MODULE:NAME",
    "map_file": "--map FILE",
    "model": "--model MODULE:NAME",
    "plan": "--dry-run",
    "same": "the same command",
    "source": "--source-model MODULE:NAME",
    "the_model": "--model",
    "the_source": "--source-model",
    "to_linen": "--to linen",
    "to_nnx": "--to nnx",
}


def as_flags(text: str) -> str:
    """A hint as it is typed on the command line; other text as it is."""
    if not isinstance(text, Hint):
        return text
    return "".join(part if isinstance(part, str) else _typed(*part) for part in text.parts)


def _typed(name: str, *values: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if not values:
        return _METAVARS.get(name, option)
    inside_quotes = [shell_quoted(str(value))[1:-1] for value in values]
    return _FLAGS.get(name, f"{option} {{}}").format(*inside_quotes)
