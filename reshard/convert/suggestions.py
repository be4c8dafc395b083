"""What would make a refused conversion go on: hints, tried before they are shown; and texts that
differ in nothing but numbers of layers, as one."""

import collections
import dataclasses
import itertools
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.boxes import Shape
from reshard.checkpoint import Checkpoint
from reshard.convert.align import Abstention
from reshard.convert.layout import COLLECTIONS, Layout, detect
from reshard.convert.map_rules import Map, Rule, apply_map
from reshard.convert.mapfile import map_of
from reshard.convert.model_map import Said, Side, by_map, model_map, side_of
from reshard.convert.replacement import (
    literal_replacement,
    parse_pattern,
    parse_replacement,
    toml_text,
)
from reshard.errors import ReshardError
from reshard.transforms import rename
from reshard.tree import (
    Key,
    Path,
    as_python,
    format_glob,
    format_key,
    format_path,
    glob_text,
    named_by,
)

MAX_GLOBS = 5
# A number that ends a key: of a member of a list, or of a layer with a name of its own.
_NUMBER = re.compile(r"(?<=[/_])\d+(?![^\W_])")
# The beginning of a group of a regex.
_GROUP = re.compile(r"(?<!\\)(?:\\\\)*\(")
# A reference to a group, after backslashes that stand for themselves.
_REFERENCE = re.compile(r"(?<!\\)((?:\\\\)*)\\(\d+)")
# Between the rules of one abstention.
NEXT_RULE = "\n[[rule]]\n"
# What the user fills in.
NAME = "NAME"


def hints_for(
    abstentions: Sequence[Abstention],
    said: Said,
    to: str,
    known: bool,
    before: Mapping[Path, Shape],
    after: Mapping[Path, Shape],
) -> list[str]:
    """What may decide what is open beside what a map says, which may be for the other direction.

    Args:
      abstentions: what is open.
      said: what the map says.
      to: the API that is converted to.
      known: whether there is the model of the source.
      before, after: the leaves of both models.
    """
    forth = to == "nnx"
    hints = [entry.hint for entry in abstentions if entry.hint and not entry.rule and forth]
    texts = (entry.rule.split(NEXT_RULE) for entry in abstentions if entry.rule)
    if rules := as_rules(itertools.chain(*texts)):
        lines = [] if forth else ['to = "nnx"']
        lines += NEXT_RULE.join(["", *rules])[1:].split("\n")
        text = "".join(f"\n      {line}" for line in lines)
        kind = "a rule" if len(rules) == 1 else "rules"
        hints.append(f"map_file=... decides, by {kind} such as:{text}")
    rest = [entry for entry in abstentions if not entry.rule and not (entry.hint and forth)]
    if not known and any(COLLECTIONS.isdisjoint(p[:1]) for entry in rest for p in entry.linen):
        api = "Linen" if forth else "NNX"
        hints.append(f"source=..., the {api} model, tells the classes")
    if rest:
        leaves, targets = (said.map.shapes, after) if said.to == to else (after, before)
        hints += rule_hint(rest, leaves, targets, said.to, said.map.origin)
    return hints


class Level(NamedTuple):
    """A level of the source that the model has not: what to tell of it, its keys if these are keys
    of the tree, new names without it, as `rename` has them, and hints: these, and, where one rule
    says the same, that, which a record keeps for the way back."""

    problem: str
    keys: tuple[str, ...]
    names: tuple[str, str]
    hints: list[str]


def level_above(
    ckpt: Checkpoint, layout: Layout, target: Side, initial: Collection[Path], placed: int
) -> Level | None:
    """A level of a source that is above the model, like `transformer`, or keys that hold several
    levels. None if taking it away does not find places for half of the leaves, and for more than
    the number that is `placed` with it. `initial`: leaves of the model that keep their value.
    """
    for level, rule in _levels(layout):
        try:
            renamed = rename(ckpt, [level.names])
            source = side_of(renamed, detect(renamed, layout.kind))
        except ReshardError:
            continue
        if source.api != layout.api or len(source.shapes) < len(layout.model):
            continue
        found, _ = tried(None, source, target, initial)
        if placed < found and 2 * found >= len(source.shapes):
            by_rule = Map("", (rule_of(*rule),), to="nnx") if rule else None
            if rule and tried(by_rule, side_of(ckpt, layout), target, initial)[0] == found:
                one, other = map(toml_text, rule)
                said = f"does so for the way back, too: from = {one}, to = {other}"
                level.hints.append(f"map_file=... {said}")
            return level
    return None


def _levels(layout: Layout) -> Iterator[tuple[Level, tuple[str, str] | None]]:
    """The levels that may be above a model, the least of them first; and the regex and the
    replacement of a rule that takes each away."""
    begin = 1 if layout.api == "linen" else 0
    modules = [tuple(map(str, path[begin:-1])) for path in layout.model]
    split = [tuple("/".join(path).split("/")) for path in modules]
    common = split[0] if split else ()
    for keys in split:
        while keys[: len(common)] != common:
            common = common[:-1]

    def level(text: str, pattern: str, into: str, keys: tuple[str, ...] = ()) -> Level:
        hints = [f"reshard.rename(ckpt, {as_python([(pattern, into)])}) takes it away"]
        return Level(text, keys, (pattern, into), hints)

    joined = [key for path in modules for key in path if "/" in key]
    if joined:
        text = f"keys like {format_key(joined[0])} hold several levels"
        yield level(text, r'"([^"]*/[^"]*)"', r"\1"), None
    for end in range(1, len(common) + 1):
        name = format_path(common[:end])
        text, regex = f"all leaves are below `{name}`, which the model has not", re.escape(name)
        if joined:
            yield level(text, rf'"{regex}/([^"]*)"', r"\1"), None
            continue
        rule = None
        if begin:
            pattern, kept = one_of({path[0] for path in layout.model})
            rule = f"^{pattern}/{regex}/", f"{kept}/"
        yield level(text, rf"(^|/){regex}/", r"\1", common[:end]), rule


def rule_hint(
    abstentions: Sequence[Abstention],
    leaves: Mapping[Path, Shape],
    target: Mapping[Path, Shape],
    to: str,
    made: Collection[Path],
) -> list[str]:
    """What a map is to decide one of several abstentions, and those that are alike. Of the side
    that has more of them than the other, the user names the one.

    Args:
      abstentions: what is open.
      leaves: the leaves that rules are about.
      target: those that they lead to.
      to: the API of these.
      made: those that the map has made. No rule for all numbers in names is shown for modules that
        hold some of these: the map may have another order.
    """
    taken = {path[begin:end] for path in made for begin in (0, 1) for end in range(1, len(path))}
    ranked = sorted(abstentions, key=lambda entry: len(entry.linen) != len(entry.nnx))
    for by_number in (True, False):
        rules = [
            _deciding(
                x,
                leaves,
                target,
                to,
                by_number and taken.isdisjoint(x.nnx if to == "nnx" else x.linen),
            )
            for x in ranked
        ]
        texts = [f"from = {toml_text(one)}, to = {toml_text(other)}" for one, other in rules]
        for place, rule in enumerate(rules):
            if _applies(*rule, leaves, target, to):
                shown = texts[place] if NAME in rule[0] else as_rules(texts[place:])[0]
                return [f"map_file=... decides, by rules such as: {shown}"]
    return []


def _deciding(
    entry: Abstention,
    leaves: Mapping[Path, Shape],
    target: Mapping[Path, Shape],
    to: str,
    by_number: bool,
) -> tuple[str, str]:
    """The regex and the replacement of a rule that decides what is open."""
    sides = (leaves, target) if to == "nnx" else (target, leaves)
    shapes = _shapes_below(entry.linen, sides[0], (0, 1)), _shapes_below(entry.nnx, sides[1], (0,))
    linen, nnx = _pair(*shapes)
    inside = {str(path[0]) for path in leaves if path[1 : len(linen) + 1] == linen}
    is_leaf = nnx in leaves if to == "linen" else not inside
    if is_leaf and to == "nnx" and nnx not in target:  # the one leaf that it may be in a module
        may = [p for p, x in target.items() if p[: len(nnx)] == nnx and x == leaves.get(linen)]
        nnx = may[0] if len(may) == 1 else (NAME,)
    if len(entry.linen) < len(entry.nnx):
        nnx = (NAME,)
    elif len(entry.linen) > len(entry.nnx) > 0:
        linen = (NAME,)
    kinds, kept = ("", "params/") if to == "linen" else (f"{x}/" for x in one_of(inside))
    if is_leaf:
        kinds = kept = ""
    before, after, *known = (nnx, linen, *shapes[::-1]) if to == "linen" else (linen, nnx, *shapes)
    pattern, replacement = re.escape(format_path(before)), literal(after)
    if by_number:
        group = 2 if kinds.startswith("(") else 1
        rule = _by_number(before, after, known[0], known[1], group)
        pattern, replacement = rule or (pattern, replacement)
    end = ("$", "") if is_leaf else ("/", "/")
    return f"^{kinds}{pattern}{end[0]}", f"{kept}{replacement}{end[1]}"


def _by_number(
    before: Path,
    after: Path,
    befores: Mapping[Path, Sequence[Shape]],
    afters: Mapping[Path, Sequence[Shape]],
    group: int,
) -> tuple[str, str] | None:
    """A regex and a replacement for all paths that differ from one in a number, and those that they
    become; None unless these are all paths of both sides, with the same shapes."""
    one, other = (
        re.fullmatch(r"(.*?)(\d+)(\D*)", str((*path, "")[-2])) for path in (before, after)
    )
    if one is None or other is None or not 1 < len(befores) == len(afters):
        return None
    more = int(other[2]) - int(one[2])
    for path, shapes in befores.items():
        name = re.fullmatch(rf"{re.escape(one[1])}(\d+){re.escape(one[3])}", str(path[-1]))
        if name is None or path[:-1] != before[:-1]:
            return None
        number = str(int(name[1]) + more) if more else name[1]
        if afters.get((*after[:-1], f"{other[1]}{number}{other[3]}")) != shapes:
            return None
    here, there = (format_path(path[:-1]) + "/" if path[1:] else "" for path in (before, after))
    number = f"{{\\{group} {'-' if more < 0 else '+'} {abs(more)}}}" if more else f"\\{group}"
    name = [literal_replacement(text).text for text in (f"{there}{other[1]}", other[3])]
    return rf"{re.escape(here + one[1])}(\d+){re.escape(one[3])}", f"{name[0]}{number}{name[1]}"


def _pair(
    linen: Mapping[Path, Sequence[Shape]], nnx: Mapping[Path, Sequence[Shape]]
) -> tuple[Path, Path]:
    """The first two of what is open whose leaves have the same shapes, or else the first two. If
    those are two of several on both sides, the user names the second."""
    theirs = nnx or {(NAME,): ()}
    first = {shapes: path for path, shapes in reversed([*theirs.items()])}
    alike = ((path, first[shapes]) for path, shapes in linen.items() if shapes in first)
    several = 1 < len(linen) == len(theirs)
    return next(alike, (next(iter(linen)), (NAME,) if several else next(iter(theirs))))


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
        made = apply_map(Map("", (rule_of(pattern, replacement),)), leaves).map.origin
    except ReshardError:
        return False
    kinds = {path[0] for path in leaves} if to == "nnx" else set()
    return NAME in replacement or all(path in target or path[0] in kinds for path in made)


def literal(path: Path) -> str:
    """A replacement that is a path."""
    return literal_replacement(format_path(path)).text


def rule_of(pattern: str, replacement: str) -> Rule:
    regex = parse_pattern(pattern)
    return Rule(1, (regex,), parse_replacement(replacement, [regex]))


def one_of(keys: Collection[Key]) -> tuple[str, str]:
    """A regex for any of several keys, and what stands for it in a replacement."""
    names = sorted(map(format_key, keys))
    regex = "|".join(map(re.escape, names))
    return (f"({regex})", r"\1") if len(names) > 1 else (regex, literal((*keys,)))


def tried(
    rules: Map | None, source: Side, target: Side, initial: Collection[Path]
) -> tuple[int, set[Path]]:
    """How many leaves have a place by a map, and by what the alignment makes of the rest; and what
    that leaves open of Linen's."""
    said = by_map(rules, source, target)
    if said.problems:
        return 0, set()
    found, alignment = model_map(said, source, target, initial)
    left = {path for entry in alignment.abstentions for path in entry.linen}
    return len(found.values.keys() & target.shapes.keys()), left


def layer_rules(
    abstentions: Sequence[Abstention],
    rules: Map,
    source: Side,
    target: Side,
    initial: Collection[Path],
) -> tuple[Abstention, ...]:
    """What is open, with a rule that decides it: one that makes layers with numbers in their names,
    or in one array each, those of a list, and does so for no other layers and no other list."""
    linen, nnx = (source, target) if source.api == "linen" else (target, source)
    modules = {part for entry in abstentions for path in entry.linen for part in _around(path)}
    in_modules = _in_modules(linen.shapes, modules)
    in_lists = _in_lists(nnx.shapes)
    placed, _ = tried(rules, source, target, initial)

    def attempt(several: Sequence[_Layers]) -> tuple[bool, set[Path]]:
        """Whether rules find places for half of the leaves they are for; what they leave open."""
        try:
            text = NEXT_RULE.join(["", *(layers.text for layers in several)])
            more = dataclasses.replace(rules, rules=map_of(tomllib.loads(text), "").rules)
            found, left = tried(more, source, target, initial)
        except ReshardError:  # they do not apply
            return False, set()
        return 2 * (found - placed) >= sum(layers.count for layers in several), left

    made: list[Abstention | None] = [None] * len(abstentions)
    for number, entry in enumerate(abstentions):
        if made[number] is not None:
            continue
        fitting: dict[tuple[str, Path], _Layers] = {}
        stacks = _stacks(entry, in_modules, in_lists, target.api)
        for layers in (*_numberings(entry, linen), *stacks):
            if attempt([layers])[0]:
                fitting.setdefault((layers.text.partition("\n")[0], layers.there), layers)
        named = collections.Counter(pattern for pattern, _ in fitting)
        lists = collections.Counter(there for _, there in fitting)
        sure = [x for (one, there), x in fitting.items() if named[one] == lists[there] == 1]
        text, left = "", set(entry.linen)
        for end in range(1, len(sure) + 1):
            fits, more = attempt(sure[:end])
            if fits and not left.isdisjoint(entry.linen):
                text, left = NEXT_RULE.join(layers.text for layers in sure[:end]), more
        for other, beside in enumerate(abstentions if text else ()):
            if other == number or (made[other] is None and left.isdisjoint(beside.linen)):
                made[other] = dataclasses.replace(beside, rule=text)
    return tuple(new or entry for new, entry in zip(made, abstentions, strict=True))


class _Layers(NamedTuple):
    """A rule that may make layers those of a list: the list, or what the numbered names of NNX's
    begin with; how many leaves of the model it is to find places for; and the rule as TOML."""

    there: Path
    count: int
    text: str


def _stacks(
    entry: Abstention,
    linen: Mapping[Path, Mapping[Path, Shape]],
    nnx: Mapping[Path, Mapping[str, Collection[Shape]]],
    to: str,
) -> Iterator[_Layers]:
    """The rules that may unstack modules of Linen's, by the shapes of their leaves."""
    stacks = dict.fromkeys(part for path in entry.linen for part in _around(path))
    near = {part for path in filter(None, entry.nnx) for part in (path, _list_of(path))}
    lists = [there for there in nnx if any(there[: len(x)] == x[: len(there)] for x in near)]
    for stack, there in itertools.product(stacks, lists):
        leaves, members = linen.get(stack, {}), nnx.get(there, {})
        axes = _axes(list(leaves.values()), list(members.values()))
        if members.keys() != {str(n) for n in range(len(members))} or not axes:
            continue
        kinds, kept = one_of({path[0] for path in leaves})
        pattern = f"^{kinds}/{re.escape(format_path(stack))}/(.*)$"
        rest = rf"{{}}/\{2 if kinds.startswith('(') else 1}"
        count = len(leaves) * (len(members) if to == "nnx" else 1)
        for above in dict.fromkeys((stack[:-1], there[:-1])):
            into = toml_text(f"{kept}/{literal((*above, f'{there[-1]}_'))}{rest}")
            text = f"from = {toml_text(pattern)}\nunstack = {{ axis = {axes[0]}, into = {into} }}"
            others = " or ".join(map(str, axes[1:]))  # the shapes do not tell
            yield _Layers(there, count, text + (f"  # or axis = {others}" if others else ""))


def _around(path: Path) -> list[Path]:
    """What may be a stack if a path is open: that, or the module that it is in; of a leaf's path
    also without the collection."""
    return [part for part in (path, path[:-1], path[1:], path[1:-1]) if part]


def _list_of(path: Path) -> Path:
    """The list that a path is a member of, or what its name begins with: `x` for `x/0` and `x_0`.
    Any other path itself."""
    *above, name = path
    match = re.fullmatch(r"(.+)_\d+", str(name))
    return (*above, match[1]) if match else path[:-1] if str(name).isdigit() and above else path


def _in_modules(
    shapes: Mapping[Path, Shape], modules: Collection[Path]
) -> dict[Path, dict[Path, Shape]]:
    """The leaves of Linen's in each of these modules."""
    found: dict[Path, dict[Path, Shape]] = {}
    for path, shape in shapes.items():
        for end in range(2, len(path)):
            if path[1:end] in modules:
                found.setdefault(path[1:end], {})[path] = shape
    return found


def _in_lists(shapes: Mapping[Path, Shape]) -> dict[Path, dict[str, list[Shape]]]:
    """The shapes of NNX's leaves in each list, by the number of the layer. Scalars are left out:
    they are in no stack."""
    found: dict[Path, dict[str, list[Shape]]] = {}
    for path, shape in shapes.items():
        for end in range(1, len(path) if shape else 0):
            part = path[:end]
            there = _list_of(part)
            if there != part:
                number = str(part[-1]).rpartition("_")[2]
                found.setdefault(there, {}).setdefault(number, []).append(shape)
    return found


def _axes(stacked: Sequence[Shape], members: Sequence[Collection[Shape]]) -> list[int]:
    """The axes that layers in one array each may be along, so that at least half of the leaves are
    those of one layer: those for which most are."""
    rank = min(map(len, stacked), default=0)
    found: dict[int, int] = {}
    for axis in range(rank if len(members) > 1 else 0):
        if {shape[axis] for shape in stacked} != {len(members)}:
            continue
        apart = collections.Counter((*shape[:axis], *shape[axis + 1 :]) for shape in stacked)
        same = (apart & collections.Counter(members[0])).total()
        if 2 * same >= max(len(stacked), len(members[0])):
            found[axis] = same
    return [axis for axis, same in found.items() if same == max(found.values())]


def _numberings(entry: Abstention, linen: Side) -> Iterator[_Layers]:
    """Lists of NNX's with the same numbers as layers of Linen's: the rules that may lead there, the
    simplest first."""
    series: dict[Path, set[str]] = {}
    for path in filter(None, entry.linen):  # the model itself has no name
        if match := re.fullmatch(r"(.+)_(\d+)", str(path[-1])):
            series.setdefault((*path[:-1], match[1]), set()).add(match[2])
    lists: dict[Path, set[str]] = {}
    for path in filter(None, entry.nnx):
        lists.setdefault(path[:-1], set()).add(str(path[-1]))
    for (*above, name), numbers in series.items():
        if len(numbers) < 2 or numbers != {str(number) for number in range(len(numbers))}:
            continue
        at = len(above) + 1
        modules = {(*above, f"{name}_{number}") for number in numbers}
        leaves = [path for path in linen.shapes if path[1 : at + 1] in modules]
        if not leaves:
            continue
        kinds, kept = one_of({path[0] for path in leaves})
        pattern = f"^{kinds}/"
        pattern += "".join(f"{re.escape(format_key(key))}/" for key in above)
        pattern += rf"{re.escape(str(name))}_(\d+)/"
        number = rf"\{2 if kinds.startswith('(') else 1}"
        for there, others in lists.items():
            if others == numbers and there:
                renamed = literal((*above, f"{there[-1]}_"))
                for into in (f"{literal(there)}/{number}/", f"{kept}/{renamed}{number}/"):
                    text = f"from = {toml_text(pattern)}\nto = {toml_text(into)}"
                    yield _Layers(there, len(leaves), text)


def covering_globs(wanted: Sequence[Path], names: Mapping[Path, Path]) -> list[tuple[str, int]]:
    """Globs that name some leaves and no others, with how many each names: the short ones of those
    that name most; at most five."""
    if not wanted:
        return []
    texts = {glob_text(name): saved for name, saved in names.items()}
    name_of = {saved: name for name, saved in names.items()}
    left, allowed = dict.fromkeys(wanted), {*wanted}
    found = []
    while left and len(found) < MAX_GLOBS:
        first = next(iter(left))
        del left[first]
        best, most = format_glob(name_of[first]), {first}
        for glob in sorted(_globs(name_of[first]), key=lambda glob: (glob != "**/rngs", len(glob))):
            hits = {texts[text] for text in named_by(texts, glob)}
            if first in hits <= allowed and len(hits) > len(most):
                best, most = glob, hits
        found.append((best, len(most)))
        left = {saved: None for saved in left if saved not in most}
    return found


def _globs(path: Path) -> list[str]:
    """Globs that name a leaf: those of modules that it is in, and of the same names elsewhere."""
    named = [place for place, key in enumerate(path) if not str(key).isdigit()]
    return [
        *(format_glob(path[:end]) for end in range(1, len(path))),
        *(f"**/{format_glob((path[place],))}" for place in named),
        *(f"**/{format_glob(path[place:])}" for place in named),
        *(f"{format_glob(path[:1])}/**/{format_glob((path[place],))}" for place in named[1:]),
    ]


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
    """Texts of rules, those that are alike as one, in which the number is a group of the regex.
    Where both sides have other numbers they stay as they are."""
    found = []
    for several in _alike(texts):
        first, *others = several
        varying = [len(set(column)) > 1 for column in _columns(several)]
        starts = (match.start() for match in _NUMBER.finditer(first))
        start = next((at for at, varies in zip(starts, varying, strict=True) if varies), 0)
        group = len(_GROUP.findall(first[:start])) + 1
        if others and all(len(set(numbers)) == 1 for numbers in _varying(several)):
            later = [_later(text, group) for text in several]
            found.append(_replaced(later, r"(\d+)", rf"\{group}"))
        else:
            found += several
    return found


def _later(text: str, group: int) -> str:
    """The text of a rule before whose group of this number another one is put in."""
    return _REFERENCE.sub(
        lambda match: f"{match[1]}\\{int(match[2]) + (int(match[2]) >= group)}", text
    )


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
