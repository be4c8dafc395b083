"""`--shard`: I/N, or `auto` for the numbers in the environment."""

import os

import click

from reshard.storage.location import parse_location
from reshard.writer.commit import share_count

_ARRAY = "SLURM_ARRAY_TASK_"
# Variables with the number of a process, and with the number of processes.
_RANKS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def parse_share(text: str | None, destination: str) -> tuple[int, int] | None:
    """Share i of n, numbered from 0. Raises click.BadParameter if the text is no share."""
    if text is None:
        return None
    share = _numbered(destination) if text == "auto" else text
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise _bad(f"`{share}` is not a share: shares are numbered 0/N to N-1/N")
    return int(number), int(count)


def _numbered(destination: str) -> str:
    """The share by the variables of an array job, or of processes that were started together."""
    known = os.environ.get
    if number := known(f"{_ARRAY}ID"):
        count = share_count(parse_location(destination))
        if count is not None:  # a job keeps its number of shares if only some tasks run again
            return f"{number}/{count}"
        first, last, tasks = (known(_ARRAY + name, "") for name in ("MIN", "MAX", "COUNT"))
        if not last.isdecimal() or (first, tasks) != ("0", str(int(last) + 1)):
            told = f", not some of {first}-{last}" if first and last else ""
            raise _bad(f"an array job must have all tasks from 0{told}")
        return f"{number}/{tasks}"
    for rank, size in _RANKS:
        if rank in os.environ and size in os.environ:
            return f"{known(rank)}/{known(size)}"
    looked = ", ".join([f"{_ARRAY}ID", *(rank for rank, _ in _RANKS)])
    raise _bad(f"auto: none of {looked} is set; give --shard I/N, numbered from 0")


def _bad(text: str) -> click.BadParameter:
    return click.BadParameter(text, param_hint="--shard")
