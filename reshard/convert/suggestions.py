"""What would make a refused conversion go on, tried before it is shown."""

import collections
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
) -> tuple[str, list[Hint]] | None:
    """A level of the source that is above the model, like `transformer`, or keys that hold several
    levels, and how to take it away: by new names, and, where one rule says the same, by that, which
    a record keeps for the way back. None if it does not find places for half of the leaves, and for
    more than have one.

    Args:
      ckpt: the source.
      layout: what it is.
      target: the model.
      initial: its leaves that keep their initial value.
      placed: how many leaves have a place.
    """
    for text, pattern, replacement, rule in _levels(layout):
        try:
            renamed = rename(ckpt, [(pattern, replacement)])
            source = side_of(renamed, detect(renamed, layout.kind))
        except ReshardError:
            continue
        if source.api != layout.api or len(source.shapes) < len(layout.model):
            continue
        found = _placed(None, source, target, initial)
        if placed < found and 2 * found >= len(source.shapes):
            hints = [Hint(("rename", pattern, replacement), " takes it away")]
            if rule is not None:
                by_rule = Map("", (_rule(*rule),), to="nnx")
                if _placed(by_rule, side_of(ckpt, layout), target, initial) == found:
                    said = f" does so for the way back, too: from = '{rule[0]}', to = '{rule[1]}'"
                    hints.append(Hint(("map_file",), said))
            return text, hints
    return None


def _rule(pattern: str, replacement: str) -> Rule:
    regex = parse_pattern(pattern)
    return Rule(1, (regex,), parse_replacement(replacement, [regex]))


def _one_of(names: Collection[str]) -> tuple[str, str]:
    """A regex for any of several names, and what stands for it in a replacement."""
    first, *others = sorted(names)
    return (f"({'|'.join((first, *others))})", r"\1") if others else (first, first)


def _placed(rules: Map | None, source: Side, target: Side, initial: Collection[Path]) -> int:
    """How many leaves have a place by a map, and by what the alignment makes of the rest."""
    said = by_map(rules, source, target)
    if said.problems:
        return 0
    found, _ = model_map(said, source, target, initial)
    return len(found.values.keys() & target.shapes.keys())


def _levels(layout: Layout) -> Iterator[tuple[str, str, str, tuple[str, str] | None]]:
    """What may be said of the names in a source, a regex and its replacement that would do without,
    the least of it first; and those of a rule that does the same."""
    begin = 1 if layout.api == "linen" else 0
    modules = [tuple(map(str, path[begin:-1])) for path in layout.model]
    split = [tuple("/".join(path).split("/")) for path in modules]
    common = split[0] if split else ()
    for keys in split:
        while keys[: len(common)] != common:
            common = common[:-1]
    joined = [key for path in modules for key in path if "/" in key]
    if joined:
        text = f"keys like {format_key(joined[0])} hold several levels"
        yield text, r'"([^"]*/[^"]*)"', r"\1", None
    for end in range(1, len(common) + 1):
        level = format_path(common[:end])
        text = f"all leaves are below `{level}`, which the model has not"
        if joined:
            yield text, rf'"{re.escape(level)}/([^"]*)"', r"\1", None
            continue
        rule = None
        if begin:
            pattern, kept = _one_of({format_key(path[0]) for path in layout.model})
            rule = f"^{pattern}/{re.escape(level)}/", f"{kept}/"
        yield text, rf"(^|/){re.escape(level)}/", r"\1", rule


def numbered_rules(
    abstentions: Sequence[Abstention],
    rules: Map,
    source: Side,
    target: Side,
    initial: Collection[Path],
) -> tuple[Abstention, ...]:
    """What is open, with the rule that makes layers with numbers in their names those of a list
    where one does so, for no other layers and no other list.

    Args:
      abstentions: what is open.
      rules: what the map says beside rules, of which it has none: they may put some of the layers
        elsewhere.
      source: the leaves that are converted.
      target: the model.
      initial: its leaves that keep their initial value.
    """
    linen = source if source.api == "linen" else target
    placed = _placed(rules, source, target, initial)
    found = []
    for entry in abstentions:
        fitting: dict[tuple[str, Path], str] = {}
        for there, count, pattern, replacement in _numberings(entry, linen):
            try:
                more = dataclasses.replace(rules, rules=(_rule(pattern, replacement),))
                better = _placed(more, source, target, initial) - placed
            except (ReshardError, ValueError):  # it does not apply, or names are not plain
                continue
            if 2 * better >= count:
                text = f"from = '{pattern}'\nto = '{replacement}'"
                fitting.setdefault((pattern, there), text)
        layers = collections.Counter(pattern for pattern, _ in fitting)
        lists = collections.Counter(there for _, there in fitting)
        sure = [text for (one, there), text in fitting.items() if layers[one] == lists[there] == 1]
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
        if not leaves:
            continue
        kinds, kept = _one_of({str(path[0]) for path in leaves})
        pattern = f"^{kinds}/"
        pattern += "".join(f"{re.escape(format_key(key))}/" for key in above)
        pattern += rf"{re.escape(str(name))}_(\d+)/"
        number = rf"\{2 if kinds != kept else 1}"
        for there, others in lists.items():
            if others == numbers and there:
                yield there, len(leaves), pattern, f"{format_path(there)}/{number}/"
                new = "/".join((kept, *map(format_key, above), f"{there[-1]}_"))
                yield there, len(leaves), pattern, f"{new}{number}/"
