"""What would make a refused conversion go on, tried before it is shown."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.boxes import Shape
from reshard.checkpoint import Checkpoint
from reshard.convert.alike import as_rules
from reshard.convert.layout import Layout, detect
from reshard.convert.map_rules import Map, Rule
from reshard.convert.mapped import apply_map
from reshard.convert.model_map import Side, by_map, model_map, side_of
from reshard.convert.pairing import Abstention
from reshard.convert.replacement import (
    literal_replacement,
    parse_pattern,
    parse_replacement,
    toml_text,
)
from reshard.errors import ReshardError
from reshard.hints import Hint
from reshard.transforms import rename
from reshard.tree import Key, Path, format_key, format_path

# What the user fills in.
NAME = "NAME"


class Level(NamedTuple):
    """A level of the source that the model has not: what to tell of it, its keys if these are keys
    of the tree, new names without it, as `rename` has them, and hints: these, and, where one rule
    says the same, that, which a record keeps for the way back."""

    problem: str
    keys: tuple[str, ...]
    names: tuple[str, str]
    hints: list[Hint]


def level_above(
    ckpt: Checkpoint, layout: Layout, target: Side, initial: Collection[Path], placed: int
) -> Level | None:
    """A level of the source that is above the model, like `transformer`, or keys that hold several
    levels. None if taking it away does not find places for half of the leaves, and for more than
    have one.

    Args:
      ckpt: the source.
      layout: what it is.
      target: the model.
      initial: its leaves that keep their initial value.
      placed: how many leaves have a place.
    """
    for text, pattern, replacement, rule, keys in _levels(layout):
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
                    one, other = map(toml_text, rule)
                    said = f" does so for the way back, too: from = {one}, to = {other}"
                    hints.append(Hint(("map_file",), said))
            return Level(text, keys, (pattern, replacement), hints)
    return None


def rule_hint(
    abstentions: Sequence[Abstention],
    leaves: Mapping[Path, Shape],
    target: Mapping[Path, Shape],
    to: str,
) -> list[Hint]:
    """What a map is to decide one of several abstentions, and those that are alike. Of the side
    that has more of them than the other, the user names the one.

    Args:
      abstentions: what is open.
      leaves: the leaves that rules are about.
      target: those that they lead to.
      to: the API of these.
    """
    ranked = sorted(abstentions, key=lambda entry: len(entry.linen) != len(entry.nnx))
    rules = [_deciding(entry, leaves, target, to) for entry in ranked]
    texts = [f"from = {toml_text(one)}, to = {toml_text(other)}" for one, other in rules]
    for place, rule in enumerate(rules):
        if _applies(*rule, leaves, target, to):
            shown = texts[place] if NAME in rule[0] else as_rules(texts[place:])[0]
            return [Hint(("map_file",), f" decides, by rules such as: {shown}")]
    return []


def _deciding(
    entry: Abstention, leaves: Mapping[Path, Shape], target: Mapping[Path, Shape], to: str
) -> tuple[str, str]:
    """The regex and the replacement of a rule that decides what is open."""
    linen, nnx = _pair(entry, *((leaves, target) if to == "nnx" else (target, leaves)))
    inside = {str(path[0]) for path in leaves if path[1 : len(linen) + 1] == linen}
    is_leaf = nnx in leaves if to == "linen" else not inside
    if is_leaf and to == "nnx" and nnx not in target:  # the one leaf that it may be in a module
        may = [p for p, x in target.items() if p[: len(nnx)] == nnx and x == leaves.get(linen)]
        nnx = may[0] if len(may) == 1 else (NAME,)
    if len(entry.linen) < len(entry.nnx):
        nnx = (NAME,)
    elif len(entry.linen) > len(entry.nnx) > 0:
        linen = (NAME,)
    before, after = (nnx, linen) if to == "linen" else (linen, nnx)
    pattern, replacement = re.escape(format_path(before)), _literal(after)
    if is_leaf:
        return f"^{pattern}$", replacement
    if to == "linen":
        return f"^{pattern}/", f"params/{replacement}/"
    kinds, kept = _one_of(inside)
    return f"^{kinds}/{pattern}/", f"{kept}/{replacement}/"


def _pair(
    entry: Abstention, linen: Mapping[Path, Shape], nnx: Mapping[Path, Shape]
) -> tuple[Path, Path]:
    """The first two of what is open whose leaves have the same shapes, or else the first two."""
    ours = _shapes_below(entry.linen, linen, (0, 1))  # also below a collection
    theirs = _shapes_below(entry.nnx, nnx, (0,)) or {(NAME,): ()}
    first = {shapes: path for path, shapes in reversed(theirs.items())}
    alike = ((path, first[shapes]) for path, shapes in ours.items() if shapes in first)
    return next(alike, (next(iter(ours)), next(iter(theirs))))


def _shapes_below(
    paths: Sequence[Path], tree: Mapping[Path, Shape], begins: Sequence[int]
) -> dict[Path, tuple[Shape, ...]]:
    """The shapes of the leaves below each path, which begins at one of these depths."""
    found: dict[Path, list[Shape]] = {path: [] for path in paths}
    lengths = {len(path) for path in paths}
    for path, shape in tree.items():
        for at, length in itertools.product(begins, lengths):
            if (part := path[at : at + length]) in found:
                found[part].append(shape)
    return {path: tuple(sorted(shapes)) for path, shapes in found.items()}


def _applies(
    pattern: str,
    replacement: str,
    leaves: Mapping[Path, Shape],
    target: Mapping[Path, Shape],
    to: str,
) -> bool:
    """Whether a rule can be applied to the leaves, and leads to leaves of the model, or to others
    of Linen's that are to become them; as far as there is no name to fill in."""
    if NAME in pattern:
        return True
    try:
        made = apply_map(Map("", (_rule(pattern, replacement),)), leaves).map.origin
    except ReshardError:
        return False
    kinds = {path[0] for path in leaves} if to == "nnx" else set()
    return NAME in replacement or all(path in target or path[0] in kinds for path in made)


def _literal(path: Path) -> str:
    """A replacement that is a path."""
    return literal_replacement(format_path(path)).text


def _rule(pattern: str, replacement: str) -> Rule:
    regex = parse_pattern(pattern)
    return Rule(1, (regex,), parse_replacement(replacement, [regex]))


def _one_of(keys: Collection[Key]) -> tuple[str, str]:
    """A regex for any of several keys, and what stands for it in a replacement."""
    names = sorted(map(format_key, keys))
    regex = "|".join(map(re.escape, names))
    return (f"({regex})", r"\1") if len(names) > 1 else (regex, _literal((*keys,)))


def _placed(rules: Map | None, source: Side, target: Side, initial: Collection[Path]) -> int:
    """How many leaves have a place by a map, and by what the alignment makes of the rest."""
    said = by_map(rules, source, target)
    if said.problems:
        return 0
    found, _ = model_map(said, source, target, initial)
    return len(found.values.keys() & target.shapes.keys())


def _levels(
    layout: Layout,
) -> Iterator[tuple[str, str, str, tuple[str, str] | None, tuple[str, ...]]]:
    """What may be said of the names in a source, a regex and its replacement that would do without,
    the least of it first; those of a rule that does the same; and the keys of the level."""
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
        yield text, r'"([^"]*/[^"]*)"', r"\1", None, ()
    for end in range(1, len(common) + 1):
        level = format_path(common[:end])
        text = f"all leaves are below `{level}`, which the model has not"
        if joined:
            yield text, rf'"{re.escape(level)}/([^"]*)"', r"\1", None, ()
            continue
        rule = None
        if begin:
            pattern, kept = _one_of({path[0] for path in layout.model})
            rule = f"^{pattern}/{re.escape(level)}/", f"{kept}/"
        yield text, rf"(^|/){re.escape(level)}/", r"\1", rule, common[:end]


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
                text = f"from = {toml_text(pattern)}\nto = {toml_text(replacement)}"
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
        kinds, kept = _one_of({path[0] for path in leaves})
        pattern = f"^{kinds}/"
        pattern += "".join(f"{re.escape(format_key(key))}/" for key in above)
        pattern += rf"{re.escape(str(name))}_(\d+)/"
        number = rf"\{2 if kinds.startswith('(') else 1}"
        for there, others in lists.items():
            if others == numbers and there:
                yield there, len(leaves), pattern, f"{_literal(there)}/{number}/"
                new = _literal((*above, f"{there[-1]}_"))
                yield there, len(leaves), pattern, f"{kept}/{new}{number}/"
