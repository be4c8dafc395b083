"""What several commands share: options."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from reshard.loader.detection import lacks_item, manager_steps
from reshard.storage.bucket import REQUESTS
from reshard.storage.location import parse_location

F = TypeVar("F", bound=Callable[..., Any])

ITEM = click.option("--item", help="Item of a step that has several.")
MAX_MEMORY = click.option(
    "--max-memory",
    default="1GiB",
    metavar="SIZE",
    show_default=True,
    help="Bytes in flight at most.",
)
CONCURRENCY = click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=REQUESTS,
    metavar="N",
    show_default=True,
    help="Requests to a bucket at once.",
)
WORKERS = click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes of this machine that share the work, and its processors; --max-memory is for "
    "each.",
)
DASK = click.option(
    "--dask",
    metavar="ADDRESS",
    help="The workers of a Dask cluster share the work: of the scheduler tcp://HOST:8786, for one.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors and warnings.")
STEP = click.option("--step", type=int, help="Step of a manager's root; the latest by default.")


def options(of: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Adds options to a command, in this order."""

    def add(command: F) -> F:
        for option in reversed(of):
            command = option(command)
        return command

    return add


reading_options = options((STEP, ITEM, MAX_MEMORY, CONCURRENCY, WORKERS, DASK, AS_JSON, QUIET))

Place = dict[str, Any]  # `step` and `item`, as `reshard.open` takes them


def places(one: str, other: str, step: int | None, item: str | None) -> tuple[Place, Place]:
    """Of two checkpoints the step and the item that `--step` and `--item` mean: of each as far as
    it has any, and of the first, which says so, where neither has."""
    mine, theirs = _own(one, step, item), _own(other, step, item)
    for name, asked in (("step", step), ("item", item)):
        if theirs[name] is None and mine[name] is None:
            mine[name] = asked
    return mine, theirs


def _own(path: str, step: int | None, item: str | None) -> Place:
    if step is None and item is None:  # then nobody has to look
        return {"step": None, "item": None}
    root = parse_location(path)
    steps = manager_steps(root)
    inner = root / steps[step if step in steps else max(steps)] if steps else root
    # Where there are other items alone, it is asked for as well: that is refused.
    asks = item is not None and ((inner / item).is_dir() or lacks_item(inner, item))
    return {"step": step if steps else None, "item": item if asks else None}
