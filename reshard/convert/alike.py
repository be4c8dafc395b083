"""Texts that differ in nothing but numbers of layers, as one. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence

# A number that ends a key: of a member of a list, or of a layer with a name of its own.
_NUMBER = re.compile(r"(?<=[/_])\d+(?![^\W_])")
# The beginning of a group of a regex.
_GROUP = re.compile(r"(?<!\\)(?:\\\\)*\(")


def shown_once(texts: Iterable[str]) -> list[str]:
    """Texts, those that are alike as one: `layers/*/mlp: missing (18 times)`."""
    found = []
    for several in _alike(texts):
        if len(several) > 1 and _in_step(several):
            found.append(f"{_replaced(several, '*', '*')} ({len(several)} times)")
        else:
            found += several
    return found


def as_rules(texts: Iterable[str]) -> list[str]:
    """Texts of rules, those that are alike as one, in which the number is the last group of the
    regex. Where both sides have other numbers, or groups follow, the first of them stays as it
    is."""
    found = []
    for first, *others in _alike(texts):
        several = [first, *others]
        varying = [len(set(column)) > 1 for column in _columns(several)]
        starts = (match.start() for match in _NUMBER.finditer(first))
        start = next((at for at, varies in zip(starts, varying, strict=True) if varies), 0)
        before, after = (len(_GROUP.findall(part)) for part in (first[:start], first[start:]))
        one_number = all(len(set(numbers)) == 1 for numbers in _varying(several))
        fold = others and one_number and not after
        found.append(_replaced(several, r"(\d+)", rf"\{before + 1}") if fold else first)
    return found


def _alike(texts: Iterable[str]) -> Iterator[list[str]]:
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(_NUMBER.sub("*", text), []).append(text)
    yield from groups.values()


def _columns(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The numbers in texts that are alike, by their place."""
    return [*zip(*map(_NUMBER.findall, texts), strict=True)]


def _varying(texts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Of each text the numbers that are not the same in all of them."""
    return zip(*(column for column in _columns(texts) if len(set(column)) > 1), strict=True)


def _in_step(texts: Sequence[str]) -> bool:
    """Whether a number that varies does so alone, or as another one: in `x_0, perhaps y/1` beside
    `x_1, perhaps y/0` neither does."""
    columns = [column for column in _columns(texts) if len(set(column)) > 1]
    return len(columns) == 1 or all(columns.count(column) > 1 for column in columns)


def _replaced(texts: Sequence[str], first: str, later: str) -> str:
    """The first text, with something else for the numbers that vary."""
    columns = iter(_columns(texts))
    put = [first]

    def number(match: re.Match[str]) -> str:
        if len(set(next(columns))) == 1:
            return match[0]
        return put.pop() if put else later

    return _NUMBER.sub(number, texts[0])
