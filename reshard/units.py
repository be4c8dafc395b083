"""Numbers of bytes, read and printed."""

import re

from reshard.errors import ArgumentError

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def format_bytes(count: float) -> str:
    """`1.50 GiB`; exact below a KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def parse_bytes(text: float | str) -> int:
    """A number of bytes, or text: `"256MiB"`, `"1.5GB"`; raises ArgumentError for anything else."""
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ArgumentError(f"`{text}` is not a number of bytes", hints=["`256MiB`, `1GiB`"])
    return int(float(match[1]) * _UNITS[match[2]])


def parse_size(text: float | str, what: str, hint: str) -> int:
    """Bytes as of `parse_bytes`, at least 1; raises ArgumentError, about `what`, for all else."""
    try:
        size = parse_bytes(text)
    except ArgumentError:
        size = 0
    if size < 1:
        raise ArgumentError(f"`{text}` is no size of {what}", hints=[hint])
    return size
