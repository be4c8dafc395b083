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
from reshard.convert import layers, module_tree
from reshard.convert.align import Abstention, Alignment, align, listed
from reshard.convert.layout import COLLECTIONS, Layout
from reshard.convert.leafmap import Filled, LeafMap, Source, renaming, sources_of
from reshard.convert.map_rules import OPPOSITE, Map, MapResult, apply_inverse, apply_map
from reshard.convert.module_tree import Leaf, Module
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_glob, format_path, glob_text, named_by, nearest

# The pairs of a map's rules are evidence for other leaves. Pairs that contradict them are dropped:
#
# - All leaves of one module, in every collection, have one counterpart. A map that puts the scale
#   of `BatchNorm_0` into `bn2` says where its statistics belong.
# - The k-th module of a class in Linen is taken for the k-th that NNX defines. A map that puts
#   `Conv_2` into what NNX defines before the other convolutions shows that the two sides make their
#   modules in different orders; then those of other classes beside them may be in another order
#   too, there and in modules of the same class.
# - If a map reorders the axes of a leaf, leaves of the same shape in layers of the same class may
#   have their axes in that order, too.

_REASON = "the map pairs other modules beside them in another order than NNX defines them"
_MOVED = "the map moves the axes of other leaves of its class and shape"
_NUMBER = re.compile(r"\d+")

# A Linen leaf, with its collection, and the NNX leaf that it becomes, or becomes a part of.
Pair = tuple[Path, Path]


class _Evidence:
    """Compares the rules of a map with an alignment of the other leaves. The outlines are those of
    the models without the map; `to` is the API that the rules convert to."""

    def __init__(self, rules: LeafMap, found: Alignment, linen: Module, nnx: Module, to: str):
        self._found = found
        self._matched = found.map.made_of()
        self._linen: Mapping[Path, Module] = module_tree.by_path(linen)
        self._nnx: Mapping[Path, Module] = module_tree.by_path(nnx)
        self._order = {path: number for number, path in enumerate(self._nnx)}
        self._start = 0 if to == "nnx" else 1  # the side on which the rules rename
        made = rules.made_of()
        own = itertools.chain(*self._matched.values()) if to == "nnx" else self._matched
        was = {path: made.get(path, [path]) for path in own}
        self._was = module_tree.modules_before(was, 1 - self._start)
        turned = {*_turned(rules)}
        # Class and shape of leaves whose axes the map reorders; and of other leaves, by NNX path.
        self._moved: set[Any] = set()
        self._unmoved: dict[Path, Any] = {}
        self._by_map: list[Pair] = []
        self._by_structure: list[Pair] = []
        for output, inputs in self._matched.items():
            ends = [inputs, [output]]
            renamed = [old for path in ends[self._start] for old in was[path]]
            # New names from a map are evidence, too.
            pairs = self._by_structure if ends[self._start] == renamed else self._by_map
            ends[self._start] = renamed
            pairs += [(one, other) for one in ends[0] for other in ends[1]]
            value = found.map.values[output]
            like = self._like(ends[1][0], value.shape)
            if not turned.isdisjoint(renamed):
                self._moved.add(like)
            elif isinstance(value, Source):
                self._unmoved[output] = like
        for path, sources in made.items():
            for source in sources if path not in was else ():
                pair = (source, path) if to == "nnx" else (path, source)
                self._by_map.append(pair)
                if source in turned:
                    self._moved.add(self._like(pair[1], rules.values[path].shape))
        # The pairs of the map by the modules that contain them, in Linen and in NNX.
        self._below: tuple[dict[Path, list[Pair]], ...] = ({}, {})
        for pair in self._by_map:
            for side, keys in enumerate((pair[0][1:], pair[1])):
                for end in range(len(keys)):
                    self._below[side].setdefault(keys[:end], []).append(pair)

    def kept(self) -> Alignment:
        """The alignment without contradicted leaves."""
        abstentions: list[Abstention] = []
        whole: set[Path] = set()  # Linen modules without any decided leaf
        own: set[Path] = set()  # Linen modules with decided leaves only in their submodules
        by_class = {pair for group in self._found.groups for pair in group}
        for pair in self._found.modules:
            ambiguity = next(self._ambiguities(pair, pair in by_class), None)
            if ambiguity is not None:
                abstentions.append(ambiguity)
                (whole if pair in by_class else own).add(pair[0])
        wrong = set(self._against_order())
        for group in self._found.groups:
            if len(group) < 2 or wrong.isdisjoint(self._parents(group)):
                continue
            linen, nnx = zip(*group, strict=True)
            if not any(path[-1:] == old[-1:] for path in linen for old in self._before(0, path)):
                continue  # the map has numbered them
            if not whole.issuperset(linen):
                abstentions.append(Abstention(linen, nnx, _REASON))
            whole.update(linen)
        known, kept = self._found.map, []
        for path, inputs in self._matched.items():
            above = {leaf[1:end] for leaf in inputs for end in range(1, len(leaf))}
            if not whole.isdisjoint(above) or any(leaf[1:-1] in own for leaf in inputs):
                continue
            if self._unmoved.get(path) in self._moved:
                abstentions.append(Abstention(tuple(inputs), (path,), _MOVED))
            else:
                kept.append(path)
        values = {path: known.values[path] for path in kept}
        origin = {path: known.origin[path] for path in kept}
        rest = dataclasses.replace(known, values=values, origin=origin)
        abstentions = [*self._found.abstentions, *abstentions]
        return dataclasses.replace(self._found, map=rest, abstentions=abstentions)

    def _before(self, side: int, module: Path) -> Collection[Path]:
        """The paths of a module of Linen (0) or NNX (1) without the map."""
        return self._was.get(module, [module]) if side == self._start else [module]

    def _ambiguities(self, modules: Pair, by_class: bool) -> Iterator[Abstention]:
        """Why two aligned modules are not counterparts, if evidence is against it. For modules that
        are aligned by name, only their direct leaves count."""
        before = [self._before(side, module) for side, module in enumerate(modules)]
        for side, module in [(at, path) for at in (0, 1) for path in before[at]]:
            for pair in self._below[side].get(module, ()):
                ends = (pair[0][1:-1], pair[1][:-1])
                for other in before[1 - side] if by_class or ends[side] == module else ():
                    place = self._confused(1 - side, other, ends[1 - side])
                    if place is None or self._is_also(side, pair, other):
                        continue
                    what = f"leaves of {format_path(place)}" if side else "other leaves of it"
                    nnx = modules[1] if side else place
                    yield Abstention(modules[:1], (nnx,), f"the map puts {what} there")

    def _is_also(self, side: int, pair: Pair, module: Path) -> bool:
        """Whether the map also has another pair for the leaf, whose other end is in this module of
        the other side, and belongs there."""
        own = (pair[0][1:-1], pair[1][:-1])[side]
        others = (x for x in self._below[side][own] if x[side] == pair[side] and x != pair)
        ends = ((other[0][1:], other[1])[1 - side] for other in others)
        return any(
            path[: len(module)] == module and self._confused(1 - side, module, path[:-1]) is None
            for path in ends
        )

    def _confused(self, side: int, module: Path, place: Path) -> Path | None:
        """The module around a place that could be confused with a module: it has the same class or,
        if the class is unknown, the same parts. None if there is none, or it is the module
        itself."""
        outline = (self._linen, self._nnx)[side]
        this = outline.get(module)
        if this is None or this.kind in layers.LISTS + layers.DICTS:
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

    def _against_order(self) -> Iterator[Any]:
        """The likeness, as in `_parents`, of modules on both sides in which a map pairs submodules
        of one class in another order."""
        series: dict[Any, dict[int, list[Path]]] = {}
        by_rule = set()
        for pairs in (self._by_map, self._by_structure):
            for one, other in pairs:
                for end in range(2, len(one)):
                    module = self._linen.get(one[1:end])
                    if module is not None and module.index is not None:
                        key = (one[0], one[1 : end - 1], module.kind, one[end:])
                        series.setdefault(key, {}).setdefault(module.index, []).append(other[:-1])
                        if pairs is self._by_map:
                            by_rule.add(key)
        for key in by_rule:
            for (_, first), (_, second) in itertools.pairwise(sorted(series[key].items())):
                for one, other in zip(sorted(first), sorted(second), strict=False):
                    common = _common(one, other)
                    if self._order.get(one, 0) > self._order.get(other, 0) and (
                        self._nnx[common].ordered or self._nnx[common].kind in layers.LISTS
                    ):
                        yield 0, _likeness(self._linen, key[1])
                        yield 1, _likeness(self._nnx, common)

    def _parents(self, group: Sequence[Pair]) -> set[Any]:
        """The likenesses of the modules that contain a group, on both sides."""
        linen = {path[:-1] for one, _ in group for path in self._before(0, one)}
        nnx = (path for _, other in group for path in self._before(1, other))
        found = {(0, _likeness(self._linen, path)) for path in linen}
        return found | {(1, _likeness(self._nnx, functools.reduce(_common, nnx)))}

    def _like(self, leaf: Path, shape: Shape) -> Any:
        """A key that NNX leaves of one shape in layers of one class share."""
        return _likeness(self._nnx, leaf[:-1]), shape


def _turned(rule_map: LeafMap) -> Iterator[Any]:
    """The leaves whose axes a map reorders without changing the shape."""
    for call in rule_map.calls():
        for value in call.inputs if isinstance(call.operation, Transpose) else ():
            if isinstance(value, Source) and call.shapes == (value.shape,):
                yield value.path


def _common(one: Path, other: Path) -> Path:
    """The innermost module that contains two others."""
    pairs = itertools.takewhile(lambda keys: keys[0] == keys[1], zip(one, other, strict=False))
    return tuple(key for key, _ in pairs)


def _likeness(outline: Mapping[Path, Module], path: Path) -> Any:
    """A key that modules with the same constructor share: the class; or, if it is unknown, the path
    without its numbers."""
    while path in outline and outline[path].kind in layers.LISTS + layers.DICTS and path:
        path = path[:-1]
    kind = outline[path].kind if path in outline else ""
    return module_tree.unlifted(kind)[-1][0] or tuple(_NUMBER.sub("", str(key)) for key in path)


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
        if self.known is not None:
            return self.known
        leaves = _bare(self.shapes, self.dtypes)
        if self.api == "linen":
            return module_tree.linen_outline(leaves)
        return module_tree.path_outline(leaves)


def _bare(shapes: Mapping[Any, Shape], dtypes: Mapping[Any, Any]) -> dict[Any, Leaf]:
    """Leaves of which only paths, shapes and dtypes are known."""
    return {path: Leaf(path, shape, dtypes[path], "") for path, shape in shapes.items()}


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
        line = f'`to = "{source.api}"`'
        hint = (
            f"if the rules make {source.api} leaves, put {line} above them: then they are inverted"
        )
        raise TreeMismatchError(error.summary, error.problems, [hint, *error.hints]) from error
    if end is None:
        why = "no rule of the map applies to it"
        unexpected = {path: f"{format_path(path)}: {why}" for path in found.untouched}
        hints = ("model=... pairs the leaves that no rule names",) * bool(unexpected)
        return dataclasses.replace(found, to=to, hints=hints, unexpected=unexpected)
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
    why = {}
    for path in unexpected:
        text = format_path(path)
        near = "".join(f"; the nearest is {name}" for name in nearest(text, end.shapes)[:1])
        wrong = f"the model has no such leaf{near}"
        if backwards:
            wrong = "the map needs it, and the checkpoint lacks it"
        why[path] = f"{text}: {wrong}"
    hints = (_RENAMES,) if unexpected and to == "nnx" and not backwards else ()
    return dataclasses.replace(found, to=end.api, hints=hints, unexpected=why)


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
    found = _aligned(map_result, start, end, {*reached, *map_result.dropped, *initial})
    aligned = found.map if start.api == "linen" else found.map.inverse()
    absent = {*aligned.sources(), *aligned.must_be_zero} - map_result.map.values.keys()
    if absent:  # the source model has leaves that the checkpoint lacks
        values = {p: x for p, x in aligned.values.items() if absent.isdisjoint(sources_of(x))}
        zeros = {p: x for p, x in aligned.must_be_zero.items() if p not in absent}
        origin = {p: text for p, text in aligned.origin.items() if p in values}
        aligned = LeafMap(values, origin, aligned.dropped, zeros)
    whole = map_result.map.then(aligned)
    if not backwards:
        return whole, found
    back = whole.inverse()
    reached |= aligned.values.keys()
    values = {path: x for path, x in back.values.items() if reached.issuperset(sources_of(x))}
    origin = {path: text for path, text in back.origin.items() if path in values}
    zeros = {
        path: zero._replace(shape=source.shapes[path], dtype=source.dtypes[path])
        for path, zero in back.must_be_zero.items()
    }
    return LeafMap(values, origin, map_result.dropped, zeros), found


def _aligned(map_result: MapResult, start: Side, end: Side, gone: Collection[Path]) -> Alignment:
    """The alignment of the leaves without a rule."""
    rules = map_result.map
    made, taken = rules.made_of(), {*gone, *map_result.unexpected}
    before = {path: made.get(path, [path]) for path in rules.values if path not in taken}
    shapes = {path: rules.values[path].shape for path in before}
    leaves = _bare(shapes, {path: start.dtypes[old[0]] for path, old in before.items()})
    if start.api == "linen":
        classes = module_tree.classes_after(start.known, before) if start.known else None
        modules = module_tree.linen_outline(leaves, classes)
    elif start.known is None:
        modules = module_tree.path_outline(leaves)
    else:
        moved = {path: leaf for path, leaf in leaves.items() if before[path] != [path]}
        changed = start.shapes.keys() - (leaves.keys() - moved.keys())
        kept = module_tree.without(start.known, changed)
        modules = module_tree.joined(kept, module_tree.path_outline(moved))
    other = module_tree.without(end.modules, gone)
    found = align(modules, other) if start.api == "linen" else align(other, modules)
    if not (rules.origin and found.map.values):
        return found
    linen, nnx = (start, end) if start.api == "linen" else (end, start)
    return _Evidence(rules, found, linen.modules, nnx.modules, map_result.to).kept()
