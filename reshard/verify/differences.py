"""`Diff`: how two checkpoints differ, as a report and as JSON. Pure."""

import collections
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.tree import Path, format_path
from reshard.units import count_of
from reshard.verify.elementwise import ElementDifference

# Leaves that a repr lists; `Diff.report` lists them all.
_SHOWN = 200
# Characters of a string leaf in a report.
_MAX_TEXT = 60


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between A and B.

    Attributes:
      what: `"removed"` (only in A), `"added"` (only in B), `"moved"` (the same contents at another
        path), `"kind"` (array, string, None, empty container), `"position"` (in a list on one
        side, in a dict on the other), `"key"` (the type of PRNG keys), `"shape"`, `"dtype"`,
        `"values"`, `"invalid"` (a cast or a map does not apply to the values), `"string"`; if asked
        for also `"sharding"`, `"chunks"`, `"format"`.
      path: the leaf's path in A, or in B if A lacks it; `()` for the format.
      a: A's side: text, a list of sizes, or the first element that differs, a numpy scalar; None
        for an added leaf.
      b: B's side; for a moved leaf, its new path.
      elements: for arrays that were read, how many elements differ and by how much.
    """

    what: str
    path: Path
    a: Any
    b: Any
    elements: ElementDifference | None = None

    def texts(self) -> tuple[str, str]:
        """Both sides as in a report. Elements that look the same get their bits."""
        text = repr if self.what == "string" else _text
        a, b = text(self.a), text(self.b)
        if self.elements is not None and a == b:
            a, b = f"{a} ({_bits(self.a)})", f"{b} ({_bits(self.b)})"
        if self.what not in ("moved", "invalid"):
            a, b = (t if len(t) <= _MAX_TEXT else t[:_MAX_TEXT] + "..." for t in (a, b))
        return a, b

    def document(self) -> dict[str, Any]:
        """What `reshard diff --json` has of it."""
        document = {"what": self.what, "path": format_path(self.path), "keys": list(self.path)}
        elements = self.elements
        if elements is None:
            return document | {"a": self.a, "b": self.b}
        a, b = self.texts()
        return document | {
            "a": _number(self.a.item(), a),
            "b": _number(self.b.item(), b),
            "index": list(elements.index),
            "count": elements.count,
            "size": elements.size,
            "non_finite": elements.non_finite,
            "max_abs": _number(elements.max_abs, str(elements.max_abs)),
            "max_rel": _number(elements.max_rel, str(elements.max_rel)),
            "abs_histogram": {str(k): count for k, count in elements.abs_histogram.items()},
            "rel_histogram": {str(k): count for k, count in elements.rel_histogram.items()},
        }


@dataclasses.dataclass(frozen=True)
class Diff:
    """How two checkpoints differ. `print()` shows it, a line a leaf.

    Attributes:
      a, b: where they are.
      differences: in the order of A's tree, then the added leaves.
      values: whether arrays were read.
      rtol, atol: the relative and the absolute tolerance.
      compared: number of arrays whose contents were compared.
      not_compared: number of arrays of equal shape and dtype whose contents were not compared.
      nbytes: bytes of each array, by its path in A, or in B if A lacks it.
      by_digests: number of arrays that were compared by digests recorded on both sides.
    """

    a: str
    b: str
    differences: tuple[Difference, ...]
    values: bool
    rtol: float
    atol: float
    compared: int
    not_compared: int
    nbytes: Mapping[Path, int]
    by_digests: int

    @property
    def equal(self) -> bool | None:
        """Whether A and B are equal; None if no difference was found, but contents of arrays were
        not compared."""
        if self.differences:
            return False
        return None if self.not_compared else True

    def __bool__(self) -> bool:
        """Whether A and B are known to be equal."""
        return self.equal is True

    def of(self, *what: str) -> tuple[Difference, ...]:
        """The differences of some kinds."""
        return tuple(each for each in self.differences if each.what in what)

    def document(self) -> dict[str, Any]:
        """What `reshard diff --json` prints."""
        fields = ("a", "b", "equal", "values", "by_digests", "rtol", "atol")
        fields += ("compared", "not_compared")
        document = {name: getattr(self, name) for name in fields}
        document["differences"] = [each.document() for each in self.differences]
        document["arrays"] = [
            {"path": format_path(path), "keys": list(path), "bytes": nbytes}
            for path, nbytes in self.nbytes.items()
        ]
        return document

    def report(self, limit: int | None = None, phrase: Callable[[str], str] = str) -> str:
        """The differences, a line a leaf, of at most `limit` leaves, and how contents were
        compared. `phrase` rewrites hints, which are calls."""
        by_leaf = itertools.groupby(self.differences, key=lambda each: each.path)
        leaves = [(path, list(each)) for path, each in by_leaf]
        rows = [_row(path, each) for path, each in leaves[:limit]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"A: {self.a}", f"B: {self.b}"]
        for what, path, sides in rows:
            lines.append(f"{what.ljust(widths[0])}  {path.ljust(widths[1])}  {sides}")
        if len(leaves) > len(rows):
            lines.append(f"... and {len(leaves) - len(rows)} more leaves")
        counts = collections.Counter(each.what for each in self.differences)
        kinds = ", ".join(f"{count} {what}" for what, count in counts.items())
        total = _counted(len(self.differences), "difference") + f": {kinds}" * bool(kinds)
        if self.equal is None:
            total = f"no differences found; {self.open_question()}"
        return "\n".join([*lines, total, *self._how(phrase)])

    def open_question(self) -> str:
        """`the contents of 3 arrays were not compared`."""
        return f"the contents of {_counted(self.not_compared, 'array')} were not compared"

    def _how(self, phrase: Callable[[str], str]) -> Iterator[str]:
        """How contents were compared, and what to type for more."""
        recorded = f"{_counted(self.by_digests, 'array')} compared by recorded digests"
        if not self.values:
            yield f"{recorded}, {self.not_compared} not compared"
            if self.not_compared or (self.of("removed") and self.of("added")):
                yield f"hint: {phrase('values=True compares contents, and finds moved leaves')}"
            return
        if self.by_digests:
            yield recorded
        if moved := self.of("moved"):
            yield f"{_counted(len(moved), 'moved array')} compared by digests"
        read = self.compared - self.by_digests
        how = "bit for bit"
        if self.rtol or self.atol:
            how = f"|A - B| <= {self.atol:g} + {self.rtol:g} * |B|, integers exactly"
        mixed = ", as numbers where dtypes differ" if self.of("dtype") else ""
        other = "other array" if moved or self.by_digests else "array"
        yield f"{_counted(read, other)} compared" + f": {how}{mixed}" * (read > 0)

    def _repr_html_(self) -> str:
        from reshard.report.page import framed

        return framed(self)

    def __repr__(self) -> str:
        return self.report(_SHOWN)


def _row(path: Path, differences: Sequence[Difference]) -> tuple[str, str, str]:
    """How a leaf differs, its path, and both sides."""
    pairs = [difference.texts() for difference in differences]
    sides = []
    if differences[0].what not in ("added", "moved"):
        sides.append("A: " + ", ".join(a for a, _ in pairs))
    if differences[0].what != "removed":
        sides.append("B: " + ", ".join(b for _, b in pairs))
    sides += [_measured(d.elements) for d in differences if d.elements is not None]
    return ", ".join(d.what for d in differences), format_path(path), "  ".join(sides)


def _measured(elements: ElementDifference) -> str:
    """`2 of 32 elements, the first at [0,3]; max abs 0.5, max rel 0.25`."""
    text = (
        f"{elements.count} of {elements.size} elements, the first at {_text(list(elements.index))}"
    )
    if elements.max_abs is not None and elements.max_rel is not None:
        largest = (
            elements.max_abs if isinstance(elements.max_abs, int) else f"{elements.max_abs:.6g}"
        )
        text += f"; max abs {largest}, max rel {elements.max_rel:.6g}"
    return text + (f"; {elements.non_finite} NaN or infinite" if elements.non_finite else "")


def _counted(count: int, noun: str) -> str:
    return count_of(count, noun) if count else f"no {noun}s"


def _text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _bits(value: np.generic) -> str:
    data = value.tobytes()
    return f"0x{int.from_bytes(data, sys.byteorder):0{2 * len(data)}x}"


def _number(value: Any, text: str) -> Any:
    """A number as JSON has it; NaN, infinities and complex numbers as text."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return text
    return value
