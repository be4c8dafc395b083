"""How answers look: tables, pictures, progress, hints phrased as flags. stdout carries answers,
stderr the rest."""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from reshard.hints import Hint
from reshard.tree import shell_quoted
from reshard.units import format_runs

# rich lays a whole table out before it prints: past this it takes seconds, so columns are streamed.
_RICH_ROWS = 200
# Cells longer than this stand out: padding all rows to one of them takes memory for nothing.
_WIDEST = 200
# An argument is typed as `--name value`, if it is not one of these.
_FLAGS = {
    "array": "the array job again, of tasks {} alone",
    "axes": "--axis {}={}",
    "cast": "--dtype '{1}={0}'",
    "commit": "reshard commit '{}'",
    "digest": "reshard digest PATH --json > '{}'",
    "drop": "--drop '{}'",
    "drop_both": "--drop '{}' --drop '{}'",
    "init": "--init '{}'",
    "ocdbt": "--ocdbt",
    "overwrite": "--overwrite",
    "replicate": '["{}", []]',
    "rename": "--rename '{}={}'",
    "resume": "--resume",
    "rule": '["{}", "{}"]',
    "select_drop": "--drop '{}'",
    "select_layout": "--select '{}' --rename '{}=' --layout {}",
    "select_rename": "--select '{}' --rename '{}={}'",
    "specs": "--spec '{}={}'",
    "split": "--spec '{}=AXIS,'",
    "to_mesh": "--to {}",
    "values": "--values",
    "verify": "reshard verify '{}'",
    "verify_item": "reshard verify '{}' --item '{}'",
}
# And without a value of its own as `--name`, if it is not one of these.
_METAVARS = {
    "all_rules": 'rules = [["embed", "data"], ["vocab", ["data", "model"]], ["kv", []]]',
    "as_linen": "reshard convert SRC DST --to linen --model MODULE:NAME",
    "as_nnx": "reshard convert SRC DST --to nnx --model MODULE:NAME",
    "cast": "--dtype 'GLOB=DTYPE'",
    "drop": "--drop GLOB",
    "init": "--init GLOB",
    "inputs": "--inputs MODULE:NAME",
    "map_file": "--map FILE",
    "model": "--model MODULE:NAME",
    "model_inputs": "--model MODULE:NAME of its variables",
    "no_rules": "`rules = []` in it",
    "plan": "--dry-run",
    "rules": '--rules FILE with `rules = [["embed", "data"], ...]`',
    "same": "the same command",
    "share": "--shard I/N",
    "source": "--source-model MODULE:NAME",
    "the_model": "--model",
    "the_source": "--source-model",
    "to_linen": "--to linen",
    "to_nnx": "--to nnx",
}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on stdout; plain aligned columns where it is long or piped."""
    if len(rows) > _RICH_ROWS or not sys.stdout.isatty():
        widths = [
            min(max(map(len, column)), _WIDEST) for column in zip(columns, *rows, strict=True)
        ]
        lines = []
        for row in (columns, *rows):
            cells = [
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        click.echo("\n".join(lines))
        return
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)


def coloured() -> bool:
    """Whether stdout is a terminal whose user has not asked for no colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def shard_picture(
    owners: Mapping[tuple[int, ...], list[int]],
    shape: Sequence[int],
    shard: Sequence[int],
    most_cells: int,
) -> str:
    """Which devices hold which part: a grid of the first two sharded dimensions, or, for more than
    `most_cells` shards, a list. `owners` are device ids by index of the shard in each dimension."""
    counts = [math.ceil(size / part) for size, part in zip(shape, shard, strict=True)]
    split = [dim for dim, count in enumerate(counts) if count > 1]
    if len(split) > 2 or len(owners) > most_cells:
        return "\n".join(
            f"[{_slices(index, shape, shard)}]  {format_runs(sorted(ids))}"
            for index, ids in sorted(owners.items())
        )
    is_row = split and (len(split) == 2 or split[-1] == len(shape) - 1)
    columns = counts[split[-1]] if is_row else 1
    cells = [format_runs(sorted(ids)) for _, ids in sorted(owners.items())]
    width = max(map(len, cells)) + 2
    rule = "+" + "+".join(["-" * width] * columns) + "+"
    lines = [rule]
    for start in range(0, len(cells), columns):
        row = (cell.center(width) for cell in cells[start : start + columns])
        lines += ["|" + "|".join(row) + "|", rule]
    return "\n".join(lines)


def _slices(index: Sequence[int], shape: Sequence[int], shard: Sequence[int]) -> str:
    return ", ".join(
        f"{i * part}:{min((i + 1) * part, size)}"
        for i, size, part in zip(index, shape, shard, strict=True)
    )


@contextlib.contextmanager
def warnings_told() -> Iterator[None]:
    """Warnings go to stderr as errors do, a line each, without where in the code they are from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
        yield


@contextlib.contextmanager
def progress_bar(
    quiet: bool, workers: int | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws bytes, rate, time left and the number of workers on stderr; None where
    nobody is looking."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        *([] if workers is None else [f"{workers} worker{'s' * (workers > 1)}"]),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


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
