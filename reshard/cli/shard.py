"""`--shard`: I/N, or `auto` for the numbers in the environment."""

import os
import re

import click

from reshard.storage.location import parse_location
from reshard.writer.commit import share_count

_AUTO = "auto"
_ARRAY, _ARRAY_MIN = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN"
_ARRAY_MAX, _ARRAY_COUNT = "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT"
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
    if text == _AUTO:
        return _numbered(destination)
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        count = int(match[2]) if match and int(match[2]) else 16
        numbers = f"{count} shares are numbered 0/{count} to {count - 1}/{count}"
        raise _bad(f"`{text}` is not a share: {numbers}")
    return int(match[1]), int(match[2])


def _numbered(destination: str) -> tuple[int, int]:
    """The share by the variables of an array job, or of processes that were started together. A job
    that has begun keeps its number of shares, even if only some tasks run again."""
    number = _variable(_ARRAY)
    if number is not None:
        count = share_count(parse_location(destination))
        if count is None:
            first, last, count = map(_variable, (_ARRAY_MIN, _ARRAY_MAX, _ARRAY_COUNT))
            if count is None or first != 0 or last != count - 1:
                raise _bad(f"an array job must begin at task 0, not {first}-{last}")
        if number >= count:
            raise _bad(f"{_ARRAY} is {number}, but the job has {count} shares, numbered from 0")
        return number, count
    for rank, size in _RANKS:
        number, count = _variable(rank), _variable(size)
        if number is not None and count is not None:
            return number, count
    looked = ", ".join([_ARRAY, *(rank for rank, _ in _RANKS)])
    raise _bad(f"auto: none of {looked} is set; give --shard I/N, numbered from 0")


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _bad(text: str) -> click.BadParameter:
    return click.BadParameter(text, param_hint="--shard")
