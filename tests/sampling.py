"""What the default run takes of tests with many cases; `-m exhaustive` takes all the others."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import hypothesis
import pytest

# A test's parameters, each with its value's identity; those of one decorator are one choice.
Choices = frozenset[tuple[str | int, ...]]
Case = TypeVar("Case")
EXHAUSTIVE = pytest.mark.exhaustive


def examples(count: int) -> int:
    """The number of examples of a property test: a tenth of `count` in the default run, and three
    tenths in the exhaustive run."""
    return max(count * hypothesis.settings.default.max_examples // 100, 5)


def some(values: Sequence[Any]) -> Sequence[Any]:
    """Every fifth of what a test goes through in the exhaustive run."""
    return values[:: 5 if hypothesis.settings.default.max_examples == 10 else 1]


def few(values: Iterable[Any], *default: Any) -> list[Any]:
    """The values of a parameter, those that are no default ones for the exhaustive run."""
    return [
        value
        if value in default
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=EXHAUSTIVE)
        for value in values
    ]


def choices(item: pytest.Item) -> Choices:
    """What has been chosen for the parameters of a test."""
    values = dict(item.callspec.params)
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        found.append((*names, *(id(values.pop(name, None)) for name in names)))
    return frozenset([*found, *((name, id(value)) for name, value in values.items())])


def covering(
    cases: Mapping[Case, Choices], together: int = 1, most: int | None = None
) -> set[Case]:
    """Few cases, `most` of them at most, that make every choice at least once, or every so many
    choices together. The cases are drawn: in the order of their values, the first ones would come
    together with the first ones."""
    made = {
        case: {*map(frozenset, itertools.combinations(one, min(together, len(one))))}
        for case, one in cases.items()
    }
    left = set().union(*made.values())
    drawn = random.Random(0).sample(list(cases), len(cases))
    found = set()
    while left and len(found) != most:
        case = max(drawn, key=lambda case: len(made[case] & left))
        found.add(case)
        left -= made[case]
    return found
