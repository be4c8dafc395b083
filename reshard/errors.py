"""The exceptions that reshard raises.

Each also inherits the builtin that callers already catch. A message is a summary, one line for each
problem, in the order of the tree, and hints that can be typed.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ReshardError(Exception):
    """The root of the hierarchy.

    Attributes:
      summary: one line: what could not be done.
      problems: all problems, a line each.
      hints: what to type instead, most likely first.
    """

    def __init__(self, summary: str, problems: Sequence[str] = (), hints: Sequence[str] = ()):
        super().__init__(summary)
        self.summary = summary
        self.problems = tuple(problems)
        self.hints = tuple(dict.fromkeys(hints))

    def __str__(self) -> str:
        return self.render(limit=None)

    def render(self, limit: int | None, phrase: Callable[[str], str] = str) -> str:
        """The message, with at most `limit` problems and `limit` hints (None: all). `phrase`
        rewrites hints, which are calls."""
        lines = [self.summary, *_capped(self.problems, limit, "  ")]
        if self.hints:
            lines += ["", *_capped([*map(phrase, self.hints)], limit, "hint: ")]
        return "\n".join(map(printable, lines))


def lines_of(errors: Iterable[ReshardError]) -> list[str]:
    """The summaries of several errors, each before its problems."""
    return [line for error in errors for line in (error.summary, *error.problems)]


def raise_all(found: Sequence[ReshardError]) -> None:
    """Raises the errors of several leaves as one, of the type of the first."""
    if len(found) == 1:
        raise found[0]
    if found:
        hints = [hint for error in found for hint in error.hints]
        lines = [line for e in found for line in (e.summary, *(f"  {text}" for text in e.problems))]
        raise type(found[0])(f"{len(found)} problems", lines, hints)


def printable(text: str) -> str:
    """Text with unprintable characters, except line ends, as JSON escapes: names in a checkpoint
    may be untrusted, and a terminal acts on control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return re.sub("....", r"\\u\g<0>", units)


def _capped(lines: Sequence[str], limit: int | None, prefix: str) -> list[str]:
    shown = lines if limit is None else lines[:limit]
    rest = len(lines) - len(shown)
    return [prefix + line for line in shown] + ([f"  ... and {rest} more"] if rest else [])


class ArgumentError(ReshardError, ValueError):
    """An argument is invalid, whatever the checkpoint."""


class CheckpointNotFoundError(ReshardError, FileNotFoundError):
    """No checkpoint, step or item exists at this place."""


class CheckpointFormatError(ReshardError, ValueError):
    """This version cannot read the files at this place; the message says what they are."""


class UncommittedCheckpointError(CheckpointFormatError):
    """The checkpoint was still being written when its writer stopped."""


class CorruptCheckpointError(ReshardError, ValueError):
    """The checkpoint's own parts contradict each other, or stored bytes do not decode."""


class ChangedCheckpointError(ReshardError, RuntimeError):
    """Files of the checkpoint have changed or were removed since it was opened."""


class TreeMismatchError(ReshardError, ValueError):
    """The leaves of a checkpoint are not those that were asked for.

    Attributes:
      outcomes: of a conversion that was refused, the verdicts on all leaves, each a
        `reshard.convert.decision.Outcome`; empty if it did not get that far.
      draft: a function that returns the text of a map file of what is decided, with `TODO` for what
        is open; None if there is none.
    """

    draft: Callable[[], str] | None = None

    def __init__(
        self,
        summary: str,
        problems: Sequence[str] = (),
        hints: Sequence[str] = (),
        outcomes: Sequence[Any] = (),
    ):
        super().__init__(summary, problems, hints)
        self.outcomes = tuple(outcomes)


class ShardingError(ReshardError, ValueError):
    """A mesh or a partition spec does not fit, or does not fit an array."""


class MemoryLimitError(ReshardError, ValueError):
    """The job cannot run within `max_memory`; the message names the least that is enough.

    Attributes:
      least: bytes that are enough; 0 if that is not known.
    """

    def __init__(
        self, summary: str, problems: Sequence[str] = (), hints: Sequence[str] = (), least: int = 0
    ):
        super().__init__(summary, problems, hints)
        self.least = least


class StoreError(ReshardError, OSError):
    """A bucket or the network has failed a request, or a disk has refused it; the message says
    which, and why."""


class DestinationError(ReshardError, OSError):
    """The destination cannot be written: no space, no permission, or another job writes it."""


class DestinationExistsError(DestinationError, FileExistsError):
    """The destination exists."""


class KeptFilesError(DestinationError):
    """The new checkpoint is complete. Files that the job had not seen in the old one are kept."""


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ArgumentError if the value of an argument is not one of its choices."""
    if value not in choices:
        hints = [f"{name}={choice!r}" for choice in choices if choice is not None]
        raise ArgumentError(f"{name}={value!r} is unknown", hints=hints)


def first_line(error: ValueError) -> str:
    """The message of TensorStore, without the specification that it appends."""
    return str(error).partition(" [")[0].partition("\n")[0]
