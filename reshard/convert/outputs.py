"""The outputs of both models of a conversion, compared.

Each model runs with the values of its checkpoint: in float32, matrix products at the highest
precision, in evaluation mode. The rest of a difference is the order of operations. So differences
are measured in noise: what each element changes by when every weight of the source model moves by
one unit in the last place.

Equal outputs say nothing of modules that the outputs do not tell apart. So leaves of the modules
that only order has paired are exchanged, and the outputs have to differ.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.convert.align import listed
from reshard.convert.by_order import Modules, leaves_in
from reshard.convert.leafmap import LeafMap
from reshard.convert.map_rules import OPPOSITE
from reshard.convert.model_run import LIMIT, Arguments, Exchange, More, Run, RunModel, times_noise
from reshard.errors import ArgumentError
from reshard.tree import Path, format_path

# Runs with leaves exchanged.
_MOST_EXCHANGES = 32
_MOST_LISTED = 3


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """What the outputs of two models were found to be. `print()` shows it.

    Attributes:
      difference: the largest one, in units of the noise.
      problems: why they are not equal.
      unused: leaves that the outputs do not depend on, so that nothing is known of them.
      not_seen: of the groups of modules that only order has paired, those whose exchange the
        outputs do not show.
      not_tried: those that were not exchanged, as there are too many.
    """

    difference: float
    problems: tuple[str, ...]
    unused: tuple[Path, ...]
    not_seen: tuple[Modules, ...] = ()
    not_tried: tuple[Modules, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether they are equal."""
        return not self.problems

    def __repr__(self) -> str:
        if self.problems:
            return "\n".join(["outputs differ", *(f"  {problem}" for problem in self.problems)])
        text = f"outputs equal: the largest difference is {self.difference:.1g} times the noise"
        if not self.unused:
            return text
        names = ", ".join(map(format_path, self.unused[:_MOST_LISTED]))
        more = f", ... ({len(self.unused)})" if len(self.unused) > _MOST_LISTED else ""
        return f"{text}; leaves that do not affect them are unchecked: {names}{more}"


def arguments_of(inputs: Any) -> dict[str, Arguments]:
    """The arguments of both models.

    Args:
      inputs: a tuple of positional arguments and a dict of keyword ones, for both alike; or a dict
        of such pairs, `{"linen": ..., "nnx": ...}`. Without `"linen"`, or None, for what Linen's
        model is initialised with: see `reshard.convert.model_run.run`.

    Raises:
      ArgumentError: it is something else.
    """
    if inputs is None:
        return {}
    pairs = inputs if isinstance(inputs, dict) else {"linen": inputs, "nnx": inputs}
    problems = [f"unknown side {side!r}" for side in pairs if side not in ("linen", "nnx")]
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
    run: Mapping[str, RunModel],
    inputs: Any,
    found: LeafMap,
    to: str,
    groups: Sequence[Modules],
) -> OutputComparison:
    """Runs both models and compares their outputs; if these differ, also those of their modules,
    and if not, also those of the source model with leaves exchanged.

    Args:
      run: for `"linen"` and `"nnx"` what runs the model: with arguments, or None for those that
        Linen's is initialised with; with what else is found out; and with leaves to be exchanged.
      inputs: what to call them with. See `arguments_of`.
      found: the map of the model's leaves.
      to: the API that it goes to.
      groups: the modules of one class that only order has paired.
    """
    given, source = arguments_of(inputs), OPPOSITE[to]
    more: dict[str, More] = {source: "noise", to: "unused"}
    linen = run["linen"](given.get("linen"), more["linen"])
    nnx = run["nnx"](given.get("nnx", linen.arguments), more["nnx"])
    before, after = (linen, nnx) if to == "nnx" else (nnx, linen)
    unused = tuple(after.unused)
    difference, problems = _compared(before, after, to)
    if difference > LIMIT:
        linen, nnx = run["linen"](linen.arguments, "calls"), run["nnx"](nnx.arguments, "calls")
        problems += _first_difference(linen, nnx, found, to)
    if problems:
        return OutputComparison(difference, tuple(problems), unused)
    exchanges = _exchanges(groups, found, source)
    tried = list(exchanges)[:_MOST_EXCHANGES]
    seen: Sequence[bool] = ()
    if tried:
        seen = run[source](before.arguments, "noise", [exchanges[group] for group in tried]).seen
    not_seen = {group for group, is_seen in zip(tried, seen, strict=True) if not is_seen}
    not_seen |= {group for group in groups if leaves_in([group], unused, to)}
    return OutputComparison(
        difference,
        (),
        unused,
        tuple(group for group in groups if group in not_seen),
        tuple(group for group in groups if group in {*exchanges} - {*tried} - not_seen),
    )


def _exchanges(groups: Sequence[Modules], found: LeafMap, source: str) -> dict[Modules, Exchange]:
    """Group of modules -> two leaves of equal shape in two of them, the largest; the largest groups
    first. Groups without such leaves fit in one order alone."""
    shapes = found.sources()
    exchanges: dict[Modules, Exchange] = {}
    for group in sorted(groups, key=len, reverse=True):
        alike: dict[tuple[Path, Shape], list[Path]] = {}
        for pair in group:
            for path, inner in leaves_in([(pair,)], shapes, source).items():
                alike.setdefault((inner, shapes[path]), []).append(path)
        several = [(math.prod(s), paths) for (_, s), paths in alike.items() if len(paths) > 1]
        if several:
            _, (one, other, *_) = max(several, key=lambda entry: entry[0])
            exchanges[group] = one, other
    return exchanges


def _compared(before: Run, after: Run, to: str) -> tuple[float, list[str]]:
    """The largest difference of outputs, in units of the noise, and what keeps them from being
    equal."""
    names = ("Linen", "NNX") if to == "nnx" else ("NNX", "Linen")
    if [x.shape for _, x in before.outputs] != [x.shape for _, x in after.outputs]:
        sides = sorted(zip(names, (before, after), strict=True), key=lambda side: side[0])
        shapes = [", ".join(str(list(x.shape)) for _, x in run.outputs) for _, run in sides]
        return 0.0, [f"their shapes are {shapes[0]} in Linen, {shapes[1]} in NNX"]
    largest, problems = 0.0, []
    outputs = zip(before.outputs, after.outputs, before.moved[0], strict=True)
    for (name, one), (_, other), (_, again) in outputs:
        apart = times_noise(one, other, again)
        where = f"output{name}" if len(before.outputs) > 1 else "the output"
        largest = max(largest, apart.max(initial=0.0))
        if np.isinf(apart).any() and np.issubdtype(one.dtype, np.floating):
            problems.append(f"{where}: different elements are infinite, or some are NaN")
        elif (apart > LIMIT).any():
            at = np.unravel_index(np.argmax(apart), apart.shape)
            values = [f"{x[at]:.7g} in {side}" for x, side in zip((one, other), names, strict=True)]
            problems.append(
                f"{where}: {list(map(int, at))} is {' and '.join(values)}, {apart[at]:.1g} times "
                f"the noise; equal outputs differ by at most {LIMIT:.0f} times"
            )
    arrays = [x for _, x in before.outputs]
    if not problems and not any(np.isfinite(x).any() and x[np.isfinite(x)].any() for x in arrays):
        problems.append("they are all zero, so they show nothing: try other inputs")
    return largest, problems


def _first_difference(linen: Run, nnx: Run, found: LeafMap, to: str) -> list[str]:
    """The first call in Linen of a module whose output differs from that of its counterpart, and
    the modules before it whose outputs nobody sees."""
    outputs: dict[Path, list[np.ndarray]] = {}
    for path, value in nnx.calls:
        if value is not None:
            outputs.setdefault(path, []).append(value)
    seen = {path for path, value in linen.calls if value is not None}
    counterparts = _counterparts(found, to, seen, outputs)
    compiled: dict[Path, None] = {}
    names = ""
    for (path, value), (_, again) in zip(linen.calls, linen.moved[1], strict=True):
        if value is None or again is None:
            compiled[path] = None
            continue
        other = counterparts.get(path)
        if other is None or not outputs[other]:
            continue
        candidate = outputs[other].pop(0)
        if candidate.shape != value.shape:
            continue
        if (times_noise(value, candidate, again) > LIMIT).any():
            names = f"{format_path(path)} in Linen, {format_path(other)} in NNX"
            break
    texts = [f"the first module whose output differs: {names}"] if names else []
    if compiled:
        before = "before it " if names else ""
        texts.append(
            f"what runs {before}in compiled code (a scan, a jit) was not compared module by "
            f"module: {listed(list(compiled))}"
        )
    return ["; ".join(texts)] if texts else []


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
