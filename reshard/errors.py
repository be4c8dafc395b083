"""The exceptions that reshard raises.

Each one also inherits the builtin that callers already catch. A message is a summary line,
one line for each problem (all of them, in the order of the tree), and hints that can be typed.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ReshardError(Exception):
    """The root of the hierarchy.

    Attributes:
      summary: one line that says what could not be done.
      problems: every problem found, a line each; never cut short.
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
        """The message, with at most `limit` problems and hints of each kind written out.

        Args:
          limit: None for all of them.
          phrase: how hints are written: as calls, if nothing else is said.
        """
        lines = [self.summary, *_capped(self.problems, limit, "  ")]
        if self.hints:
            lines += ["", *_capped([*map(phrase, self.hints)], limit, "hint: ")]
        return "\n".join(map(printable, lines))


def lines_of(errors: Iterable[ReshardError]) -> list[str]:
    """What several errors say together: each summary, before its problems."""
    return [line for error in errors for line in (error.summary, *error.problems)]


def raise_all(found: Sequence[ReshardError]) -> None:
    """Raises the errors of several leaves as one, of the type of the first."""
    if len(found) == 1:
        raise found[0]
    if found:
        hints = [hint for error in found for hint in error.hints]
        raise type(found[0])(f"{len(found)} problems", lines_of(found), hints)


def printable(text: str) -> str:
    """Text with what a terminal would act on, or could not show, as escapes: names in a checkpoint
    may be untrusted. Lines stay lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    """As in a JSON string."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return re.sub("....", r"\\u\g<0>", units)


def _capped(lines: Sequence[str], limit: int | None, prefix: str) -> list[str]:
    shown = lines if limit is None else lines[:limit]
    rest = len(lines) - len(shown)
    return [prefix + line for line in shown] + ([f"  ... and {rest} more"] if rest else [])


class ArgumentError(ReshardError, ValueError):
    """An argument is none that the function takes, whatever the checkpoint."""


class CheckpointNotFoundError(ReshardError, FileNotFoundError):
    """There is no checkpoint, step or item at the place that was named."""


class CheckpointFormatError(ReshardError, ValueError):
    """What is there is not a checkpoint that this version reads; the message says what it is."""


class UncommittedCheckpointError(CheckpointFormatError):
    """The checkpoint was still being written when its writer stopped."""


class CorruptCheckpointError(ReshardError, ValueError):
    """The checkpoint's own parts contradict each other, or stored bytes do not decode."""


class TreeMismatchError(ReshardError, ValueError):
    """The leaves that were asked for are not the leaves that are there.

    Attributes:
      outcomes: of a conversion, what is decided of each leaf all the same, a
        `reshard.convert.decision.Outcome` each; empty if it did not get as far.
      draft: what returns the text of a map file of what is decided, with `TODO` for what is open;
        None if there is none.
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
    """The job cannot run within `max_memory`; the message names the least that would do.

    Attributes:
      least: bytes that would do, 0 where that is not the question.
    """

    def __init__(
        self, summary: str, problems: Sequence[str] = (), hints: Sequence[str] = (), least: int = 0
    ):
        super().__init__(summary, problems, hints)
        self.least = least


class StoreError(ReshardError, OSError):
    """A bucket, or the way to it, has not given what it was asked for: the message says what, and
    why not."""


class DestinationError(ReshardError, OSError):
    """The destination cannot be written: no room, no permission, or another job is writing it."""


class DestinationExistsError(DestinationError, FileExistsError):
    """There is something at the destination already."""


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ArgumentError for the value of an argument that is not one of its choices."""
    if value not in choices:
        hints = [f"{name}={choice!r}" for choice in choices if choice is not None]
        raise ArgumentError(f"{name}={value!r} is not known", hints=hints)


def first_line(error: ValueError) -> str:
    """What TensorStore says, without the specification that it appends."""
    return str(error).partition(" [")[0].partition("\n")[0]
