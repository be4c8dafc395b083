"""The outputs of both models of a conversion, compared.

Each model runs once with the values of its checkpoint: in float32, matrix products at the highest
precision, in evaluation mode. What is left of a difference then is the order of operations, which
is far below what a leaf in the wrong place makes.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.convert.leafmap import LeafMap
from reshard.convert.model_run import Arguments, More, Run
from reshard.errors import ArgumentError
from reshard.tree import Path, format_path

# How far outputs may be apart, relative to the largest value of each.
TOLERANCE = 1e-5
_MOST_LISTED = 3


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """What the outputs of two models were found to be. `print()` shows it.

    Attributes:
      difference: the largest one, relative to the largest value of that output.
      problems: why they are not equal.
      unused: leaves that the outputs do not depend on, so that nothing is known of them.
    """

    difference: float
    problems: tuple[str, ...]
    unused: tuple[Path, ...]

    @property
    def equal(self) -> bool:
        """Whether they are equal."""
        return not self.problems

    def __repr__(self) -> str:
        if self.problems:
            return "\n".join(["outputs differ", *(f"  {problem}" for problem in self.problems)])
        text = (
            f"outputs equal: the largest difference is {self.difference:.1g} of the largest value"
        )
        if not self.unused:
            return text
        names = ", ".join(map(format_path, self.unused[:_MOST_LISTED]))
        more = f", ... ({len(self.unused)})" if len(self.unused) > _MOST_LISTED else ""
        return f"{text}; they say nothing of leaves without a part in them: {names}{more}"


def arguments_of(inputs: Any) -> dict[str, Arguments]:
    """The arguments of both models.

    Args:
      inputs: a tuple of positional arguments and a dict of keyword ones, for both alike; or a dict
        of such pairs, `{"linen": ..., "nnx": ...}`. Without `"linen"`, or None, for what Linen's
        model is initialised with: see `linen_run`.

    Raises:
      ArgumentError: it is something else.
    """
    if inputs is None:
        return {}
    pairs = inputs if isinstance(inputs, dict) else {"linen": inputs, "nnx": inputs}
    problems = [f"there is a side {side!r}" for side in pairs if side not in ("linen", "nnx")]
    problems += [
        f"{side}: {pair!r:.80}" for side, pair in pairs.items() if not _are_arguments(pair)
    ]
    if problems:
        raise ArgumentError(
            "the inputs are not positional and keyword arguments",
            problems,
            ["((x,), {})", '{"linen": ((x,), {"train": False}), "nnx": ((x,), {})}'],
        )
    return {side: (tuple(args), dict(kwargs)) for side, (args, kwargs) in pairs.items()}


def _are_arguments(pair: Any) -> bool:
    return (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and isinstance(pair[0], tuple | list)
        and isinstance(pair[1], dict)
        and all(isinstance(name, str) for name in pair[1])
    )


def compare_outputs(
    run: Mapping[str, Callable[[Arguments | None, More], Run]], inputs: Any, found: LeafMap, to: str
) -> OutputComparison:
    """Runs both models and compares their outputs; if these differ, also those of their modules.

    Args:
      run: for `"linen"` and `"nnx"` what runs the model: with arguments, or None for those that
        Linen's is initialised with, and what else is found out.
      inputs: what to call them with. See `arguments_of`.
      found: the map of the model's leaves.
      to: the API that it goes to.
    """
    given = arguments_of(inputs)
    more: dict[str, More] = {"linen": "", "nnx": "", to: "unused"}
    linen = run["linen"](given.get("linen"), more["linen"])
    nnx = run["nnx"](given.get("nnx", linen.arguments), more["nnx"])
    difference, problems = _compared(linen.outputs, nnx.outputs)
    if difference > TOLERANCE:
        linen, nnx = run["linen"](linen.arguments, "calls"), run["nnx"](nnx.arguments, "calls")
        problems += _first_difference(linen, nnx, found, to)
    return OutputComparison(difference, tuple(problems), tuple((nnx, linen)[to == "linen"].unused))


def _compared(
    linen: Sequence[tuple[str, np.ndarray]], nnx: Sequence[tuple[str, np.ndarray]]
) -> tuple[float, list[str]]:
    """The largest difference of outputs, relative to the largest value of each, and what keeps them
    from being equal."""
    if [x.shape for _, x in linen] != [x.shape for _, x in nnx]:
        shapes = [", ".join(str(list(x.shape)) for _, x in side) for side in (linen, nnx)]
        return 0.0, [f"their shapes are {shapes[0]} in Linen, {shapes[1]} in NNX"]
    largest, problems = 0.0, []
    for (name, one), (_, other) in zip(linen, nnx, strict=True):
        apart = _difference(one, other)
        where = f"output{name}" if len(linen) > 1 else "the output"
        if np.isnan(apart):
            problems.append(f"{where}: not the same numbers are infinite, or some are NaN")
            apart = np.inf
        elif apart > TOLERANCE:
            problems.append(
                f"{where}: the largest difference is {apart:.1g} of the largest value; another "
                f"order of operations makes less than {TOLERANCE:.0e}"
            )
        largest = max(largest, apart)
    if not problems and not any(np.isfinite(x).any() and x[np.isfinite(x)].any() for _, x in linen):
        problems.append("they are all zero, which tells nothing: other inputs may")
    return largest, problems


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """How far arrays of one shape are apart, relative to the largest value where they are apart at
    all: what masks fill in is the same in both, and no measure. NaN if there is one in them, or
    they are not infinite in the same places."""
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    finite = np.isfinite(one)
    if np.isnan(one).any() or (finite != np.isfinite(other)).any():
        return np.nan
    if (one[~finite] != other[~finite]).any():
        return np.nan
    apart = one != other
    if not (finite & apart).any():
        return 0.0
    one, other = one[finite & apart], other[finite & apart]
    return float(np.abs(one - other).max() / np.abs([one, other]).max())


def _first_difference(linen: Run, nnx: Run, found: LeafMap, to: str) -> list[str]:
    """The first call in Linen of a module whose output differs from that of its counterpart."""
    counterparts = _counterparts(found, to, set(dict(linen.calls)), set(dict(nnx.calls)))
    outputs: dict[Path, list[np.ndarray]] = {}
    for path, value in nnx.calls:
        outputs.setdefault(path, []).append(value)
    for path, value in linen.calls:
        other = counterparts.get(path)
        if other is None or not outputs[other]:
            continue
        candidate = outputs[other].pop(0)
        if candidate.shape == value.shape and not _difference(value, candidate) <= TOLERANCE:
            names = f"{format_path(path)} in Linen, {format_path(other)} in NNX"
            return [f"the first module whose output differs: {names}"]
    return []


def _counterparts(
    found: LeafMap, to: str, linen: Collection[Path], nnx: Collection[Path]
) -> dict[Path, Path]:
    """Module of Linen's -> NNX's: all leaves of the one are made of all leaves of the other, and of
    nothing else. Of modules that hold nothing but another one, the outer ones belong together."""
    whole: dict[Path, int] = {}  # leaf -> what it becomes a part of, or is a part of
    pairs: list[tuple[Path, Path]] = []
    for path, sources in found.made_of().items():
        number = min((whole[source] for source in sources if source in whole), default=len(pairs))
        for source in sources:
            whole[source] = number
            pairs.append((source, path) if to == "nnx" else (path, source))
    groups: dict[frozenset[int], tuple[list[Path], list[Path]]] = {}
    for side, modules in enumerate((linen, nnx)):
        below: dict[Path, set[int]] = {}
        for pair in pairs:
            number = whole[pair[0 if to == "nnx" else 1]]
            leaf = tuple(map(str, pair[side][1 - side :]))  # Linen's begins with the collection
            for end in range(1, len(leaf)):
                below.setdefault(leaf[:end], set()).add(number)
        for path in sorted(modules, key=len):
            if path in below:
                groups.setdefault(frozenset(below[path]), ([], []))[side].append(path)
    return {
        one: other
        for ones, others in groups.values()
        if len(ones) == len(others)
        for one, other in zip(ones, others, strict=True)
    }
