"""`Outcome`: what becomes of a leaf in a conversion and what decided that, or why nothing did."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from reshard.convert.leafmap import LeafMap, Output, Source, Zeros
from reshard.tree import Path, format_path


class Outcome(NamedTuple):
    """What one leaf of the target is made of, or what becomes of one of the source that no leaf of
    the target is made of.

    Attributes:
      before: the leaves of the source, by their saved paths.
      after: the leaf of the target, by its saved path.
      origin: what decided: `"map"`, `"path"` or `"structure"`, as in `LeafMap.origin`, or
        `"record"`; `"dropped"` and `"initial"`, as the user has asked for; `"zeros"`. Of what is
        not decided: `"unexpected"`, `"missing"`, `"mismatch"`, `"ambiguous"`, or `"undecided"`, for
        optimizer state that other leaves of it keep from going on.
      operation: what is done, in words.
      problem: why it is not decided.
    """

    before: tuple[Path, ...]
    after: Path | None
    origin: str
    operation: str = ""
    problem: str = ""

    def document(self) -> dict[str, Any]:
        """What `--json` has of it."""
        return {
            "from": [format_path(path) for path in self.before],
            "to": [] if self.after is None else [format_path(self.after)],
            "operation": self.operation or None,
            "origin": self.origin,
            "problem": self.problem or None,
        }


def outcomes(
    found: LeafMap, default: str = "path", initial: Iterable[Path] = ()
) -> Iterator[Outcome]:
    """What becomes of the leaves of a map, and of those that keep their initial value; `default`
    decided those that have no origin."""
    for path, value in found.values.items():
        if isinstance(value, Zeros):
            yield Outcome((), path, "zeros")
            continue
        origin = found.origin.get(path) or default
        if isinstance(value, Source):
            yield Outcome((value.path,), path, origin)
        else:
            yield _made(path, value, origin)
    yield from (Outcome((), path, "initial") for path in initial)
    yield from (Outcome((path,), None, "zeros") for path in found.must_be_zero)
    yield from (Outcome((path,), None, "dropped") for path in found.dropped)


def _made(path: Path, value: Output, origin: str) -> Outcome:
    alone = LeafMap({path: value})
    operation = ", ".join(str(call.operation) for call in alone.calls())
    return Outcome(tuple(alone.sources()), path, origin, operation)
