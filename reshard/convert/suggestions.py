"""What would make a refused conversion go on, tried before it is shown."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from reshard.checkpoint import Checkpoint
from reshard.convert.layout import Layout, detect
from reshard.convert.map_rules import Map, Rule
from reshard.convert.model_map import Side, by_map, model_map, side_of
from reshard.convert.pairing import Abstention
from reshard.convert.replacement import parse_pattern, parse_replacement
from reshard.errors import ReshardError
from reshard.hints import Hint
from reshard.transforms import rename
from reshard.tree import Path, format_key, format_path


def level_above(
    ckpt: Checkpoint, layout: Layout, target: Side, initial: Collection[Path], placed: int
) -> tuple[str, Hint] | None:
    """A level of the source that is above the model, like `transformer`, or keys that hold several
    levels, and how to take it away; None if that does not find places for half of the leaves, and
    for more than have one.

    Args:
      ckpt: the source.
      layout: what it is.
      target: the model.
      initial: its leaves that keep their initial value.
      placed: how many leaves have a place.
    """
    for text, pattern, replacement in _levels(layout):
        try:
            renamed = rename(ckpt, [(pattern, replacement)])
            source = side_of(renamed, detect(renamed, layout.kind))
        except ReshardError:
            continue
        if source.api != layout.api or len(source.shapes) < len(layout.model):
            continue
        made, _ = model_map(by_map(None, source, target), source, target, initial)
        found = len(made.values.keys() & target.shapes.keys())
        if placed < found and 2 * found >= len(source.shapes):
            return text, Hint(("rename", pattern, replacement), " takes it away")
    return None


def _levels(layout: Layout) -> Iterator[tuple[str, str, str]]:
    """What may be said of the names in a source, and a regex and its replacement that would do
    without, the least of it first."""
    begin = 1 if layout.api == "linen" else 0
    modules = [tuple(map(str, path[begin:-1])) for path in layout.model]
    split = [tuple("/".join(path).split("/")) for path in modules]
    common = split[0] if split else ()
    for keys in split:
        while keys[: len(common)] != common:
            common = common[:-1]
    joined = [key for path in modules for key in path if "/" in key]
    if joined:
        yield f"keys like {format_key(joined[0])} hold several levels", r'"([^"]*/[^"]*)"', r"\1"
    for end in range(1, len(common) + 1):
        level = format_path(common[:end])
        text = f"all leaves are below `{level}`, which the model has not"
        if joined:
            yield text, rf'"{re.escape(level)}/([^"]*)"', r"\1"
        else:
            yield text, rf"(^|/){re.escape(level)}/", r"\1"


def numbered_rules(
    abstentions: Sequence[Abstention],
    rules: Map,
    source: Side,
    target: Side,
    initial: Collection[Path],
) -> tuple[Abstention, ...]:
    """What is open, with the rule that makes layers with numbers in their names those of a list
    where one does so, and for no other list.

    Args:
      abstentions: what is open.
      rules: of the map, if it is for the way to NNX.
      source: the leaves that are converted.
      target: the model.
      initial: its leaves that keep their initial value.
    """

    def placed(*more: Rule) -> int:
        """How many leaves have a place."""
        said = by_map(dataclasses.replace(rules, rules=rules.rules + more), source, target)
        if said.problems:
            return 0
        found, _ = model_map(said, source, target, initial)
        return len(found.values.keys() & target.shapes.keys())

    linen = source if source.api == "linen" else target
    found = []
    for entry in abstentions:
        fitting: dict[str, dict[Path, str]] = {}
        for there, count, pattern, replacement in _numberings(entry, linen):
            try:
                regex = parse_pattern(pattern)
                to = parse_replacement(replacement, [regex])
                better = placed(Rule(len(rules.rules) + 1, (regex,), to)) - placed()
            except (ReshardError, ValueError):  # it does not apply, or names are not plain
                continue
            if 2 * better >= count > 0:
                text = f"from = '{pattern}'\nto = '{replacement}'"
                fitting.setdefault(pattern, {}).setdefault(there, text)
        sure = [
            text for by_list in fitting.values() if len(by_list) == 1 for text in by_list.values()
        ]
        found.append(dataclasses.replace(entry, rule=[*sure, entry.rule][0]))
    return tuple(found)


def _numberings(entry: Abstention, linen: Side) -> Iterator[tuple[Path, int, str, str]]:
    """Lists of NNX's with the same numbers as layers of Linen's, how many leaves these have, and a
    regex and its replacements that may lead there, the simplest first."""
    series: dict[Path, set[str]] = {}
    for path in entry.linen:
        if match := re.fullmatch(r"(.+)_(\d+)", str(path[-1])):
            series.setdefault((*path[:-1], match[1]), set()).add(match[2])
    lists: dict[Path, set[str]] = {}
    for path in entry.nnx:
        lists.setdefault(path[:-1], set()).add(str(path[-1]))
    for (*above, name), numbers in series.items():
        if len(numbers) < 2 or numbers != {str(number) for number in range(len(numbers))}:
            continue
        at = len(above) + 1
        modules = {(*above, f"{name}_{number}") for number in numbers}
        leaves = [path for path in linen.shapes if path[1 : at + 1] in modules]
        kinds = "|".join(sorted({str(path[0]) for path in leaves}))
        several = "|" in kinds
        pattern = f"^{f'({kinds})' if several else kinds}/"
        pattern += "".join(f"{re.escape(format_key(key))}/" for key in above)
        pattern += rf"{re.escape(str(name))}_(\d+)/"
        number = rf"\{1 + several}"
        for there, others in lists.items():
            if others == numbers and there:
                yield there, len(leaves), pattern, f"{format_path(there)}/{number}/"
                new = "/".join(
                    (r"\1" if several else kinds, *map(format_key, above), f"{there[-1]}_")
                )
                yield there, len(leaves), pattern, f"{new}{number}/"
