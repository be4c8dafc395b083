"""The map of a model's leaves: the rules of a map file, written for either direction, and the
alignment of both models for the other leaves.

Models are aligned from Linen to NNX; the other direction is the inverse.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Transpose
from reshard.convert.align import Abstention, Alignment, align, listed
from reshard.convert.layers import DICTS, LISTS
from reshard.convert.layout import COLLECTIONS, Layout
from reshard.convert.leafmap import Filled, LeafMap, Source, renaming
from reshard.convert.map_rules import OPPOSITE, Map, MapResult, apply_inverse, apply_map
from reshard.convert.module_tree import (
    Module,
    bare_leaves,
    by_path,
    classes_after,
    joined,
    modules_before,
    outline,
    unlifted,
    without,
)
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_glob, format_path, glob_text, named_by, nearest

# The rules of a map are evidence for other leaves. An alignment that contradicts them is dropped.
#
# Two things follow from where a map puts a leaf.
#
# - All leaves of one module, in every collection, have one counterpart. A map that puts the scale
#   of `BatchNorm_0` into `bn2` says where its statistics belong.
# - The k-th module of a class in Linen is taken for the k-th that NNX defines. A map that puts
#   `Conv_2` into what NNX defines before the other convolutions shows that the two sides make their
#   modules in different orders; then those of other classes beside them may be in another order
#   too, there and in modules of the same class.
#
# One thing follows if a map reorders the axes of a leaf: leaves of the same shape in layers of the
# same class may have their axes in that order, too.

_REASON = "the map pairs other modules of their class in another order than NNX defines them"
_MOVED = "the map moves the axes of other leaves of its class and shape"
_NUMBER = re.compile(r"\d+")

Keys = tuple[str, ...]
# A Linen leaf, with its collection, and the NNX leaf that it becomes, or becomes a part of.
Pair = tuple[Keys, Keys]


def ordered(
    rule_map: LeafMap, found: Alignment, linen: Module, nnx: Module, to: str = "nnx"
) -> Alignment:
    """An alignment without the leaves that a map contradicts.

    Args:
      rule_map: the map of the rules.
      found: the alignment of the other leaves.
      linen: the outline of the Linen model, without the map.
      nnx: the outline of the NNX model, without the map.
      to: the API that the rules convert to.
    """
    if not found.map.values:
        return found
    return _Evidence(rule_map, found, linen, nnx, to).kept()


class _Evidence:
    """Compares the rules of a map with an alignment."""

    def __init__(self, rule_map: LeafMap, found: Alignment, linen: Module, nnx: Module, to: str):
        self._found = found
        self._linen, self._nnx = by_path(linen), by_path(nnx)
        made = rule_map.made_of()
        before: tuple[dict, dict] = (made, {}) if to == "nnx" else ({}, made)
        # Paths of both sides' modules without the map, by their paths with the map.
        matched = found.map.made_of()
        sides = ([path for inputs in matched.values() for path in inputs], matched)
        self._was = tuple(
            modules_before({path: before[side].get(path, (path,)) for path in paths}, 1 - side)
            for side, paths in enumerate(sides)
        )
        self._by_map: list[Pair] = []
        self._by_structure: list[Pair] = []
        turned = {_text(path) for path in _turned(rule_map)}
        # Class and shape of leaves whose axes the map reorders; and of other leaves, by NNX path.
        self._moved: set[Any] = set()
        self._unmoved: dict[Path, Any] = {}
        reached: set[Path] = set()
        for output, inputs in matched.items():
            reached.update(inputs if to == "nnx" else [output])
            ends = [
                [_text(source) for path in paths for source in before[side].get(path, (path,))]
                for side, paths in enumerate((inputs, [output]))
            ]
            # New names from a map are evidence, too.
            renamed = ends != [list(map(_text, inputs)), [_text(output)]]
            pairs = [(one, other) for one in ends[0] for other in ends[1]]
            value = found.map.values[output]
            like = _likeness(self._nnx, ends[1][0][:-1]), value.shape
            if not turned.isdisjoint(ends[to == "linen"]):
                self._moved.add(like)
            elif isinstance(value, Source):
                self._unmoved[output] = like
            (self._by_map if renamed else self._by_structure).extend(pairs)
        for path, sources in made.items():
            for source in sources if path not in reached else ():
                ends_of = (source, path) if to == "nnx" else (path, source)
                pair = (_text(ends_of[0]), _text(ends_of[1]))
                self._by_map.append(pair)
                if pair[to == "linen"] in turned:
                    shape = rule_map.values[path].shape
                    self._moved.add((_likeness(self._nnx, pair[1][:-1]), shape))
        # The pairs of the map by the modules that contain them, in Linen and in NNX; and by leaf.
        self._below: tuple[dict[Keys, list[Pair]], ...] = ({}, {})
        self._of_leaf: tuple[dict[Keys, list[Pair]], ...] = ({}, {})
        for pair in self._by_map:
            for side, keys in enumerate((pair[0][1:], pair[1])):
                self._of_leaf[side].setdefault(pair[side], []).append(pair)
                for end in range(len(keys)):
                    self._below[side].setdefault(keys[:end], []).append(pair)

    def kept(self) -> Alignment:
        """The alignment without contradicted leaves."""
        abstentions: list[Abstention] = []
        whole: set[Keys] = set()  # Linen modules without any decided leaf
        own: set[Keys] = set()  # Linen modules with decided leaves only in their submodules
        by_class = {pair for group in self._found.groups for pair in group}
        for pair in self._found.modules:
            ambiguity = self._ambiguity(pair, pair in by_class)
            if ambiguity is not None:
                abstentions.append(ambiguity)
                (whole if pair in by_class else own).add(_text(pair[0]))
        wrong = set(self._against_order())
        for group in self._found.groups:
            if len(group) < 2 or wrong.isdisjoint(self._parents(group)):
                continue
            linen, nnx = ([_text(pair[side]) for pair in group] for side in (0, 1))
            if not any(keys[-1:] in self._names_before(keys) for keys in linen):
                continue  # the map has numbered them
            if not whole.issuperset(linen):
                abstentions.append(Abstention(tuple(linen), tuple(nnx), _REASON))
            whole.update(linen)

        def ambiguous(path: Keys) -> bool:
            return path[1:-1] in own or any(path[1:end] in whole for end in range(1, len(path)))

        known = self._found.map
        kept = []
        for path, inputs in known.made_of().items():
            if any(ambiguous(_text(source)) for source in inputs):
                continue
            if self._unmoved.get(path) in self._moved:
                abstentions.append(Abstention(tuple(inputs), (path,), _MOVED))
            else:
                kept.append(path)
        return dataclasses.replace(
            self._found,
            map=dataclasses.replace(
                known,
                values={path: known.values[path] for path in kept},
                origin={path: known.origin[path] for path in kept},
            ),
            abstentions=[*self._found.abstentions, *abstentions],
        )

    def _ambiguity(self, pair: tuple[Path, Path], by_class: bool) -> Abstention | None:
        """Why two aligned modules are not counterparts; None if no evidence is against it. For
        modules that are aligned by name, only their direct leaves count."""
        now = tuple(map(_text, pair))
        then = [was.get(keys, {keys}) for keys, was in zip(now, self._was, strict=True)]
        for side, outlines in enumerate((self._nnx, self._linen)):
            for module in then[side]:
                for ends in self._below[side].get(module, ()):
                    here, there = (ends[0][1:], ends[1])[:: 1 - 2 * side]
                    if not by_class and here[:-1] != module:
                        continue
                    for other in then[1 - side]:
                        place = _like(outlines, other, there[:-1])
                        if place is not None and self._is_also(side, ends, other, outlines):
                            continue
                        if place is not None and not side:
                            reason = "the map puts other leaves of it there"
                            return Abstention((now[0],), (place,), reason)
                        if place is not None:
                            reason = f"the map puts leaves of {format_path(place)} there"
                            return Abstention((now[0],), (now[1],), reason)
        return None

    def _is_also(self, side: int, pair: Pair, module: Keys, outline: Mapping[Keys, Module]) -> bool:
        """Whether the map also has another pair for the leaf, whose other end is in this module of
        the other side, and belongs there."""
        found = (other for other in self._of_leaf[side][pair[side]] if other != pair)
        ends = ((other[0][1:], other[1])[1 - side] for other in found)
        return any(
            keys[: len(module)] == module and _like(outline, module, keys[:-1]) is None
            for keys in ends
        )

    def _against_order(self) -> Iterator[Any]:
        """The likeness, as in `_parents`, of modules on both sides in which a map pairs submodules
        of one class in another order."""
        places = _places(self._nnx)
        series: dict[Any, dict[int, list[tuple[Keys, bool]]]] = {}
        for by_rule, pairs in ((True, self._by_map), (False, self._by_structure)):
            for one, other in pairs:
                for end in range(2, len(one)):
                    module = self._linen.get(one[1:end])
                    if module is None or module.index is None:
                        continue
                    key = (one[0], one[1 : end - 1], module.kind, one[end:])
                    series.setdefault(key, {}).setdefault(module.index, []).append((other, by_rule))
        for (_, parent, _, _), by_index in series.items():
            for (_, first), (_, second) in itertools.pairwise(sorted(by_index.items())):
                if not any(by_rule for held in by_index.values() for _, by_rule in held):
                    break
                for (one, _), (other, _) in zip(sorted(first), sorted(second), strict=False):
                    common = _common(one[:-1], other[:-1])
                    if places.get(one[:-1], ()) > places.get(other[:-1], ()) and (
                        self._nnx[common].ordered or self._nnx[common].kind in LISTS
                    ):
                        yield 0, _likeness(self._linen, parent)
                        yield 1, _likeness(self._nnx, common)

    def _names_before(self, keys: Keys) -> set[Keys]:
        """The last keys of a Linen module's paths without the map."""
        return {was[-1:] for was in self._was[0].get(keys, (keys,))}

    def _parents(self, group: Sequence[tuple[Path, Path]]) -> set[Any]:
        """The likenesses of the modules that contain a group, on both sides."""
        found = set()
        for linen, _ in group:
            for module in self._was[0].get(_text(linen), {_text(linen)}):
                found.add((0, _likeness(self._linen, module[:-1])))
        nnx = [_text(other) for _, other in group]
        then = [module for keys in nnx for module in self._was[1].get(keys, {keys})]
        found.add((1, _likeness(self._nnx, functools.reduce(_common, then))))
        return found


def _turned(rule_map: LeafMap) -> Iterator[Path]:
    """The leaves whose axes a map reorders without changing the shape."""
    for call in rule_map.calls():
        for value in call.inputs if isinstance(call.operation, Transpose) else ():
            if isinstance(value, Source) and call.shapes == (value.shape,):
                yield value.path


def _text(path: Path) -> Keys:
    return tuple(map(str, path))


def _like(outline: Mapping[Keys, Module], module: Keys, place: Keys) -> Keys | None:
    """The module around a place that could be confused with a module: it has the same class or, if
    the class is unknown, the same parts. None if there is none, or it is the module itself."""
    this = outline.get(module)
    if this is None or this.kind in LISTS + DICTS:
        return None
    for end in range(len(place), -1, -1):
        other = outline.get(place[:end])
        if place[:end] == module:
            return None
        if other is None or place[:end] == module[:end] or other.kind != this.kind:
            continue
        if this.kind or other.parts == this.parts:
            return place[:end]
    return None


def _places(outline: Mapping[Keys, Module]) -> dict[Keys, tuple[int, ...]]:
    """The places of modules, as numbers that sort in the order of definition."""
    found: dict[Keys, tuple[int, ...]] = {(): ()}
    pending: list[Keys] = [()]
    while pending:
        path = pending.pop()
        for place, name in enumerate(outline[path].children):
            found[*path, name] = (*found[path], place)
            pending.append((*path, name))
    return found


def _common(one: Keys, other: Keys) -> Keys:
    """The innermost module that contains two others."""
    end = 0
    while one[end : end + 1] == other[end : end + 1] and end < min(len(one), len(other)):
        end += 1
    return one[:end]


def _likeness(outline: Mapping[Keys, Module], path: Keys) -> Any:
    """A key that modules with the same constructor share: the class; or, if it is unknown, the path
    without its numbers."""
    while path in outline and outline[path].kind in LISTS + DICTS and path:
        path = path[:-1]
    kind = outline[path].kind if path in outline else ""
    return unlifted(kind)[-1][0] or tuple(_NUMBER.sub("", key) for key in path)


_RENAMES = (
    "`to = 'params/NAME/'` gives a module another name on Linen's side, and leaves it to the "
    "standard conversions"
)


@dataclasses.dataclass(frozen=True)
class Side:
    """The leaves of the model in one of the APIs.

    Attributes:
      api: `"linen"` or `"nnx"`.
      shapes: path -> shape.
      dtypes: path -> dtype.
      known: its modules, if there is the model.
    """

    api: str
    shapes: Mapping[Path, Shape]
    dtypes: Mapping[Path, Any]
    known: Module | None = None

    @functools.cached_property
    def modules(self) -> Module:
        """Its modules; without the model, an outline from its leaves."""
        return self.known or outline(self.api, bare_leaves(self.shapes, self.dtypes))


def side_of(ckpt: Mapping[Path, Any], layout: Layout, known: Module | None = None) -> Side:
    """The leaves of the model in a checkpoint."""
    dtypes = {path: ckpt[saved].dtype for path, saved in layout.model.items()}
    return Side(layout.api, layout.shapes(ckpt), dtypes, known)


def by_map(
    rules: Map | None, source: Side, target: Side | None, left_out: Collection[Path] = ()
) -> MapResult:
    """The result of a map file's rules for source leaves; or for target leaves, if the map is used
    in the opposite direction. Other leaves have no origin.

    Args:
      rules: the rules, if there is a map file.
      source: the source leaves.
      target: the target leaves, if there is a model.
      left_out: leaves that were dropped from the source.

    Raises:
      TreeMismatchError: its rules do not fit.
    """
    to, shapes = OPPOSITE[source.api], source.shapes
    if rules is None:
        return MapResult(renaming({path: path for path in shapes}, shapes), to)
    backwards = rules.to == source.api and target is not None
    start, end = (target, source) if backwards and target else (source, target)
    try:
        if rules.to == source.api and not backwards:
            found = apply_inverse(rules, shapes)
        else:
            found = apply_map(rules, start.shapes, () if backwards else left_out)
    except TreeMismatchError as error:
        unmatched = [text for text in error.problems if text.endswith("matches no leaf")]
        if rules.to is not None or len(unmatched) < len(rules.rules):
            raise
        other = f'`to = "{source.api}"` above the rules'
        hint = f"{other}, if it was written for that: it is then inverted"
        raise TreeMismatchError(error.summary, error.problems, [hint, *error.hints]) from error
    if end is None:
        texts = map(format_path, found.untouched)
        problems = tuple(f"{text}: no rule of the map applies to it" for text in texts)
        return dataclasses.replace(found, to=to, problems=problems)
    if backwards:
        found = _backwards(found, shapes)
    linen = start if start.api == "linen" else end
    # An NNX model may have an attribute of such a name.
    attributes = {path[0] for path in end.shapes} if end.api == "nnx" else set()
    collections = (COLLECTIONS - attributes).union(path[0] for path in linen.shapes)
    # On Linen's side paths begin with a collection.
    unexpected = [
        path
        for path in found.map.origin
        if path not in end.shapes
        and (
            (path[0] in collections) == (end.api == "linen")
            or isinstance(found.map.values[path], Filled)
        )
    ]
    problems = []
    for path in map(format_path, unexpected):
        near = "".join(f"; the nearest is {name}" for name in nearest(path, end.shapes)[:1])
        wrong = f"the model has no such leaf{near}"
        if backwards:
            wrong = "the map needs it, and the checkpoint lacks it"
        problems.append(f"{path}: {wrong}")
    hints = (_RENAMES,) if unexpected and to == "nnx" and not backwards else ()
    return dataclasses.replace(
        found, to=end.api, problems=tuple(problems), hints=hints, unexpected=frozenset(unexpected)
    )


def _backwards(map_result: MapResult, shapes: Mapping[Path, Shape]) -> MapResult:
    """The result of a map that is used in the opposite direction: its initial leaves are left out
    of the source, and its dropped leaves keep their initial values."""
    texts = {glob_text(path): path for path in shapes}
    may = {text for glob in map_result.optional for text in named_by(texts, glob)}
    named = may.union(*(named_by(texts, glob) for glob in map_result.initial))
    gone = [path for text, path in texts.items() if text in may]
    notes = (f"left out, as `optional` says: {listed(gone)}",) if may else ()
    return dataclasses.replace(
        map_result,
        initial=tuple(map(format_glob, map_result.map.dropped)),
        optional=(),
        dropped=tuple(path for text, path in texts.items() if text in named),
        notes=(*map_result.notes, *notes),
    )


def model_map(
    map_result: MapResult, source: Side, target: Side, initial: Collection[Path]
) -> tuple[LeafMap, Alignment]:
    """The map of the model's leaves, and the alignment of the leaves without a rule. Source leaves
    without a counterpart stay.

    Args:
      map_result: the result of the map file.
      source: the source leaves.
      target: the target leaves.
      initial: target leaves that keep their initial value.
    """
    backwards = map_result.to == source.api
    start, end = (target, source) if backwards else (source, target)
    reached = map_result.map.origin.keys() & end.shapes.keys()
    gone = {*reached, *map_result.dropped, *initial}
    found = _aligned(map_result, start, end, gone)
    aligned = found.map if start.api == "linen" else found.map.inverse()
    whole = map_result.map.then(aligned)
    if not backwards:
        return whole, found
    back = whole.inverse()
    reached |= aligned.values.keys()
    values = {
        path: value
        for path, value in back.values.items()
        if reached.issuperset(LeafMap({path: value}).sources())
    }
    origin = {path: text for path, text in back.origin.items() if path in values}
    zeros = {
        path: zero._replace(shape=source.shapes[path], dtype=source.dtypes[path])
        for path, zero in back.must_be_zero.items()
    }
    return LeafMap(values, origin, map_result.dropped, zeros), found


def _aligned(map_result: MapResult, start: Side, end: Side, gone: Collection[Path]) -> Alignment:
    """The alignment of the leaves without a rule."""
    rest = {
        p: s
        for p, s in map_result.map.shapes.items()
        if p not in gone and p not in map_result.unexpected
    }
    made = {path: sources for path, sources in map_result.map.made_of().items() if path in rest}
    before = {path: made.get(path, [path]) for path in rest}
    leaves = bare_leaves(rest, {path: start.dtypes[sources[0]] for path, sources in before.items()})
    if start.known is None:
        modules = outline(start.api, leaves)
    elif start.api == "linen":
        modules = outline("linen", leaves, classes_after(start.known, before))
    else:
        moved = {path: leaf for path, leaf in leaves.items() if before[path] != [path]}
        kept = leaves.keys() - moved.keys()
        known = without(start.known, start.shapes.keys() - kept)
        modules = joined(known, outline("nnx", moved))
    there = without(end.modules, gone)
    found = align(modules, there) if start.api == "linen" else align(there, modules)
    if not map_result.map.origin:
        return found
    linen, nnx = (start, end) if start.api == "linen" else (end, start)
    return ordered(map_result.map, found, linen.modules, nnx.modules, map_result.to)
