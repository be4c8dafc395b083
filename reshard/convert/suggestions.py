"""Hints of a refused conversion; and texts that differ only in the numbers of layers, as one."""

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.convert.align import Abstention
from reshard.convert.layout import COLLECTIONS
from reshard.convert.map_rules import MapResult
from reshard.convert.mapfile import renaming_rules, rules_of, toml_text, unstacking_rules
from reshard.convert.model_map import Side
from reshard.convert.optimizer import shared_keys
from reshard.restore.matching import stacking_call, stacks_in
from reshard.tree import (
    Path,
    as_python,
    format_glob,
    format_path,
    glob_text,
    named_by,
)

MAX_GLOBS = 5
# A number that ends a key: of a member of a list, or of a layer with a name of its own.
_NUMBER = re.compile(r"(?<=[/_])\d+(?![^\W_])")
# A leaf in a module: how far below it, and its shape.
_Inside = tuple[int, Shape]
# Paths before and after, and whether they are of leaves.
_Rename = tuple[Path, Path, bool]


def hints_for(
    abstentions: Sequence[Abstention],
    result: MapResult,
    source: Side,
    target: Side,
    known: bool,
    saved: Mapping[Path, Path],
) -> list[str]:
    """Hints for what is open after a map has been applied, which may be for the other direction.
    `known`: the model of the source is given. `saved`: the source's saved paths."""
    forth = target.api == "nnx"
    leaves, others = result.map.shapes, (target if result.to == target.api else source).shapes
    linen, nnx = (leaves, others) if result.to == "nnx" else (others, leaves)
    header = [] if forth else ['to = "nnx"\n']
    if not result.map.origin:  # these may decide what else is open
        if rules := _unstack_rules(abstentions, linen, nnx):
            return [_shown([*header, *rules])]
        calls = [] if known else _stack_calls(abstentions, linen, nnx, saved, forth)
        if calls or (calls := _level_hints(source, target)):
            return calls
    hints = []
    if rows := [entry.rule for entry in abstentions if entry.rule]:
        rules = [f"{rule.rstrip()}  # or in another order\n" for rule in rules_of(rows, linen)]
        hints.append(_shown([*header, *rules]))
    rest = [entry for entry in abstentions if not entry.rule]
    if not known and any(COLLECTIONS.isdisjoint(p[:1]) for entry in rest for p in entry.linen):
        api = "Linen" if forth else "NNX"
        hints.append(f"source=..., the {api} model, supplies the classes")
    rules = renaming_rules(_renames(rest, linen, nnx, result), leaves)
    if len(rules) > 1:
        hints.append(_shown([f"[[rule]]\n{rule}\n" for rule in rules]))
    elif rules:
        hints.append(f"map_file=... decides, by rules such as: {', '.join(rules[0].splitlines())}")
    return hints


def _shown(rules: Sequence[str]) -> str:
    """A hint of rules, each as the lines of a map file."""
    kind = "a rule" if sum("[[" in rule for rule in rules) == 1 else "rules"
    text = "".join(f"\n      {line}" for line in "\n".join(rules).rstrip("\n").split("\n"))
    return f"map_file=... decides, by {kind} such as:{text}"


def _level_hints(source: Side, target: Side) -> list[str]:
    """Hints for keys of the source that hold several levels, and for levels above the whole model,
    like `transformer`."""
    begin = int(source.api == "linen")
    paths = [tuple(map(str, path[begin:-1])) for path in source.shapes]
    modules = [tuple("/".join(path).split("/")) for path in paths]
    tops = {str(path[target.api == "linen"]) for path in target.shapes}
    common: Path = modules[0][: shared_keys(modules)] if modules else ()
    above = common[: next((at for at, key in enumerate(common) if key in tops), len(common))]
    level = format_path(above)
    regex = re.escape(level)
    renames, texts = [], []
    if joined := [key for path in paths for key in path if "/" in key]:
        renames.append((r'"([^"]*/[^"]*)"', r"\1"))
        texts.append(f"splits keys like {format_path((joined[0],))}, which hold several levels")
    # The only module of a model may be its counterpart in another form, and so may a list.
    below = {path[len(above)] for path in modules if len(path) > len(above)}
    if above and not all(map(str.isdecimal, below)) and (len(tops) > 1 or above != common):
        renames.append((rf"(^|/){regex}/", r"\1"))
        texts.append(f"removes `{level}`, if the model lacks that level")
    if not texts:
        return []
    hints = [f"reshard.rename(ckpt, {as_python(renames)}) {' and '.join(texts)}"]
    if begin and not joined:
        kinds = {str(path[0]) for path in source.shapes}
        kind, kept = (*kinds, *kinds) if len(kinds) == 1 else (r"([^/]+)", r"\1")
        rule = f"from = {toml_text(f'^{kind}/{regex}/')}, to = {toml_text(f'{kept}/')}"
        hints.append(f"map_file=... also works in the opposite direction: {rule}")
    return hints


def _renames(
    abstentions: Sequence[Abstention],
    linen: Mapping[Path, Shape],
    nnx: Mapping[Path, Shape],
    result: MapResult,
) -> list[_Rename]:
    """Renames of the modules or leaves of two series of numbers, and of a module that has one
    candidate. No numbers in modules that hold leaves which the map has made: it may have another
    order."""
    made = {p[begin:end] for p in result.map.origin for begin in (0, 1) for end in range(1, len(p))}
    forth = result.to == "nnx"
    renames: list[_Rename] = []
    for entry in abstentions:
        ones, others = _below(entry.linen, linen, (0, 1)), _below(entry.nnx, nnx)
        free = made.isdisjoint(entry.nnx if forth else entry.linen)
        pairs = _numbered(ones, others) if free else []
        if len(ones) == len(others) == 1:
            pairs = [(*ones, *others)] if [*ones.values()] == [*others.values()] else []
        for one, other in pairs:
            kinds = sorted({path[:1] for path in linen if path[1 : len(one) + 1] == one})
            if one == other:  # the standard conversions match these
                continue
            if one in linen or other in nnx:
                renames.append((one, other, True) if forth else (other, one, True))
            elif forth:
                renames += [((*kind, *one), (*kind, *other), False) for kind in kinds]
            else:
                renames.append((other, ("params", *one), False))
    return renames


def _numbered(
    linen: Mapping[Path, Sequence[_Inside]], nnx: Mapping[Path, Sequence[_Inside]]
) -> list[tuple[Path, Path]]:
    """Paths that differ in a number, and those of as many with the same shapes, if no others are
    like these."""
    fits: dict[tuple[Any, Any], list[tuple[Path, Path]]] = {}
    for (one, before), (other, after) in itertools.product(_series(linen), _series(nnx)):
        pairs = list(zip(sorted(before.items()), sorted(after.items()), strict=False))
        steps = {number - n for (n, _), (number, _) in pairs}
        alike = all(linen[a] == nnx[b] for (_, a), (_, b) in pairs)
        if 1 < len(before) == len(after) and len(steps) == 1 and alike:
            fits[one, other] = [(a, b) for (_, a), (_, b) in pairs]
    ones, others = (collections.Counter(fit[side] for fit in fits) for side in (0, 1))
    sure = (pairs for (one, other), pairs in fits.items() if ones[one] == others[other] == 1)
    return list(itertools.chain(*sure))


def _series(paths: Iterable[Path]) -> Iterable[tuple[Any, dict[int, Path]]]:
    """Paths that differ in one number of the last key, by it."""
    found: dict[Any, dict[int, Path]] = {}
    for path in filter(None, paths):  # the model itself has no name
        if match := re.fullmatch(r"(.*?)(\d+)(\D*)", str(path[-1])):
            found.setdefault((path[:-1], match[1], match[3]), {})[int(match[2])] = path
    return found.items()


def _below(
    paths: Iterable[Path], tree: Mapping[Path, Shape], begins: Sequence[int] = (0,)
) -> dict[Path, list[_Inside]]:
    """The leaves below each path, which begins at one of these depths."""
    found: dict[Path, list[_Inside]] = {path: [] for path in paths}
    lengths = {len(path) for path in found}
    for path, shape in tree.items():
        for at, length in itertools.product(begins, lengths):
            if (part := path[at : at + length]) in found:
                found[part].append((len(path) - at - length, shape))
    return {path: sorted(leaves) for path, leaves in found.items()}


def _unstack_rules(
    abstentions: Sequence[Abstention], linen: Mapping[Path, Shape], nnx: Mapping[Path, Shape]
) -> list[str]:
    """The rules that unstack modules of Linen's, as the shapes of their leaves show."""
    pairs: dict[tuple[int, ...], list[tuple[Path, Path]]] = {}
    for stack, list_path, axes in _stacked(abstentions, linen, nnx, "linen"):
        into = (*(stack[:-1] or list_path[:-1]), f"{list_path[-1]}_")
        for kind in sorted({path[:1] for path in linen if path[1 : len(stack) + 1] == stack}):
            pairs.setdefault(axes, []).append(((*kind, *stack), (*kind, *into)))
    return [rule for axes, of in pairs.items() for rule in unstacking_rules(of, linen, axes)]


def _stack_calls(
    abstentions: Sequence[Abstention],
    linen: Mapping[Path, Shape],
    nnx: Mapping[Path, Shape],
    saved: Mapping[Path, Path],
    forth: bool,
) -> list[str]:
    """The calls that give a source the form of the other side, where NNX has the stack."""
    calls: dict[str, None] = {}
    for stack, list_path, axes in _stacked(abstentions, linen, nnx, "nnx"):
        apart, whole = (*list_path[:-1], f"{list_path[-1]}_{{}}"), (*list_path[:-1], stack[-1])
        if not forth:
            apart, whole = (*stack[:-1], apart[-1]), stack
        for path, name in saved.items():
            part = path[1 : 1 + len(list_path)] if forth else path[: len(stack)]
            if (_list_of(part) if forth else part) != (list_path if forth else stack):
                continue
            texts = tuple(map(str, name))  # the collection may not be saved
            begin = next(i for i in range(len(name)) if texts[i : i + len(part)] == part)
            layers, module = (*name[:begin], *apart), (*name[:begin], *whole)
            call = ("stack", layers, module) if forth else ("unstack", module, layers)
            calls |= dict.fromkeys(stacking_call(*call, axis) for axis in axes)
    return list(calls)


def _stacked(
    abstentions: Sequence[Abstention],
    linen: Mapping[Path, Shape],
    nnx: Mapping[Path, Shape],
    api: str,
) -> Iterator[tuple[Path, Path, tuple[int, ...]]]:
    """Open modules of an API that are stacked, the lists that they are in the other, and the axes
    that may be those of the layers; paths without a collection. Not where several may be meant."""
    inside = {path[1:]: shape for path, shape in linen.items()}
    stacks, apart = (inside, nnx) if api == "linen" else (nnx, inside)
    open_ = []
    for entry in abstentions:
        sides = [part for path in entry.linen for part in (path, path[1:])], entry.nnx
        ones, others = sides if api == "linen" else sides[::-1]
        near = {part for path in others if path for part in (path, _list_of(path))}
        open_.append(([part for path in ones for part in (path, path[:-1]) if part], near))

    def candidates(layer: Path) -> Iterator[Path]:
        list_path = _list_of(layer)
        for modules, near in open_ if list_path != layer else ():
            if any(list_path[: len(path)] == path[: len(list_path)] for path in near):
                yield from modules

    arrays = {path: shape for path, shape in apart.items() if shape}  # scalars are in no stack
    found = {
        (stack, _list_of(layer)): axes
        for layer, stack, axes in stacks_in(arrays, stacks, candidates, len, 0.5)
    }
    firsts, seconds = (collections.Counter(pair[side] for pair in found) for side in (0, 1))
    for (stack, list_path), axes in found.items():
        if firsts[stack] == seconds[list_path] == 1:
            yield stack, list_path, axes


def _list_of(path: Path) -> Path:
    """The list that a path is a member of, `x` for `x/0` and for `x_0`; else the path itself."""
    *above, name = path
    if match := re.fullmatch(r"(.+)_(?:\d+|\{\})", str(name)):
        return (*above, match[1])
    return path[:-1] if re.fullmatch(r"\d+|\{\}", str(name)) and above else path


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
    """Texts, those that differ only in numbers as one: `layers/*/mlp: missing (18 times)`. Numbers
    that vary have to do so together: `x_0, perhaps y/1` and `x_1, perhaps y/0` stay two texts."""
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(_NUMBER.sub("*", text), []).append(text)
    found = []
    for several in groups.values():
        columns = [*zip(*map(_NUMBER.findall, several), strict=True)]
        varying = [column for column in columns if len(set(column)) > 1]
        together = len(varying) == 1 or all(varying.count(column) > 1 for column in varying)
        if len(several) == 1 or not together:
            found += several
            continue
        marks = ["*" if column in varying else column[0] for column in columns]
        pieces = zip(_NUMBER.split(several[0]), [*marks, ""], strict=True)
        text = "".join(itertools.chain(*pieces))
        found.append(f"{text} ({len(several)} times)")
    return found
