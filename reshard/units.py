"""Text of numbers: bytes, counts and ranges; and bytes parsed from text."""

import itertools
import math
import numbers
import re
from collections.abc import Sequence

from reshard.errors import ArgumentError

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}


def format_bytes(count: float) -> str:
    """`1.50 GiB`; exact below a KiB."""
    if count < 1024:
        return f"{count:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    while (count := count / 1024) >= 1024 and units[1:]:
        del units[0]
    return f"{count:.2f} {units[0]}"


def format_load(before: float, after: float) -> str:
    """How many times the bytes it needs a restore reads, before and after a job, in words."""
    one, two = (
        "exactly the bytes that it needs" if x < 1.005 else f"{x:.2f} times the bytes that it needs"
        for x in (before, after)
    )
    return f"{one}, before and after the job" if one == two else f"{one}; after the job, {two}"


def format_runs(ascending: Sequence[int], to: str = "-") -> str:
    """`3,7-9` for 3, 7, 8, 9."""
    found = []
    for _, run in itertools.groupby(enumerate(ascending), key=lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        found.append(f"{first}{to}{rest[-1]}" if rest else str(first))
    return ",".join(found)


def count_of(count: int, noun: str, several: str = "") -> str:
    """`1 array`, `2 arrays`; `several` is an irregular plural."""
    return f"{count} {noun if count == 1 else several or noun + 's'}"


def count_leaves(count: int) -> str:
    return count_of(count, "leaf", "leaves")


def whole_kib(count: int) -> str:
    """A number of bytes rounded up to KiB, as `parse_bytes` reads it: `17KiB`."""
    return f"{math.ceil(count / 2**10)}KiB"


def parse_bytes(
    value: float | str, lacks: str = "not a number of bytes", hint: str = "`256MiB`, `1GiB`"
) -> int:
    """Bytes as an int, from a finite number of at least 1, or from text: `"256MiB"`, `"1.5GB"`.
    Raises ArgumentError: the value is `lacks`."""
    size: float = 0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is not None and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
        elif match is not None and f"{match[2]}ib" in _UNITS:
            hint = f"`{match[1]}{match[2].upper()}iB`"
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        size = value
    if not 1 <= size < math.inf:
        raise ArgumentError(f"`{value}` is {lacks}", hints=[hint])
    return int(size)
