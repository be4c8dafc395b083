"""Stack the arrays of layers, as `nn.scan` and `nnx.vmap` have them, and unstack them."""

import collections
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard import tree
from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle, Derived
from reshard.arrays.operations import Stack, Unstack
from reshard.checkpoint import Checkpoint, Leaf, check_checkpoints, name_clashes
from reshard.convert import optimizer
from reshard.convert.described import with_true_metadata
from reshard.convert.layout import OPTIMIZERS
from reshard.convert.leafmap import LeafMap, Row, Value, from_rows, sources_of
from reshard.errors import ArgumentError, ShardingError, TreeMismatchError
from reshard.sharding.mesh import NamedSharding, spec_problems
from reshard.tree import Path, format_path

_DIGITS = 5  # of the number of layers in a cycle
_HINT = "`params/layer_{}` stands for params/layer_0, params/layer_1 and so on; `*` for any key"
# Keys of the parameters, which have their optimizer state next to them.
_COLLECTIONS = frozenset(("params", "model"))
# The leaves of layers: the path below the root of their tree, as text -> the shape and the dtype of
# an array, None and the text of another leaf.
_Layers = dict[Path, tuple[Shape | None, Any]]


def stack(
    ckpt: Checkpoint,
    layers: str,
    into: str,
    axis: int = 0,
    *,
    indices: Sequence[int] | None = None,
    names: str | Sequence[str] = (),
) -> Checkpoint:
    """Stack the arrays of layers into one array each, along a new axis.

    Optimizer state follows its parameters: the state next to the `params` or `model` that holds
    them. So does another tree next to these, such as an average, if it has exactly the same layers.

    Args:
      ckpt: the checkpoint.
      layers: the path of a layer, with `{}` for its number: `params/layer_{}`. `*` matches any
        text within a key, and makes groups; each group is stacked on its own.
      into: the path of the stacked layers, with the `*` of `layers` in their order. `{%6}` is the
        position of a layer in a cycle of six, from 0: each one is stacked over the cycles.
      axis: the position of the new axis in each array.
      indices: numbers of the layers, in order; by default all of them, which must be 0, 1, ...
      names: mesh axes over which the new axis is partitioned.

    Raises:
      ArgumentError: the arguments do not name the layers.
      TreeMismatchError: no layer matches, layers differ in their leaves or shapes, a number is
        missing, paths collide, or optimizer state cannot follow: all problems.
      ShardingError: the new axis cannot be partitioned over `names`.

    Example:
      >>> ckpt = reshard.stack(reshard.open("run/1000"), "params/layer_{}", into="params/layers")
      >>> ckpt["params/layers/kernel"]
      <params/layers/kernel: float32[2,32,32] P(None, None, 'model')>
    """
    given = into
    layers, into, period = _parsed(layers, into, indices)
    mesh_axes = (names,) if isinstance(names, str) else tuple(names)
    groups, problems = _grouped(ckpt, layers, indices)
    if not groups:
        near = tree.nearest(layers.replace("{}", "0"), ckpt)[:1]
        hints = [f"the leaf nearest to `{layers}` is `{name}`" for name in near]
        raise TreeMismatchError(f"no layer matches `{layers}`", hints=[*hints, _HINT])
    rows, hints = [], []
    for stars, members in groups.items():
        order = list(range(len(members)) if indices is None else indices)
        lacking = [number for number in order if number not in members]
        target = format_path(_filled(into, stars, 0))
        left = len(order) % period
        if lacking:
            have, gone = (", ".join(map(str, numbers)) for numbers in (sorted(members), lacking))
            problems.append(f"{target}: there is no layer {gone}, only {have}")
            hints.append(_call(layers, given, axis, str(sorted(members)), mesh_axes))
            continue
        if left:
            problems.append(f"{target}: {len(order)} layers are not whole cycles of {period}")
            if indices is None and period < len(order):
                whole = _call(layers, given, axis, f"range({len(order) - left})", mesh_axes)
                hints.append(f"{whole} leaves the last {left} as they are")
            continue
        for position in range(period):
            made, numbers = _filled(into, stars, position), order[position::period]
            for rest in dict.fromkeys(rest for number in numbers for rest in members[number]):
                inputs = {n: members[n][rest] for n in numbers if rest in members[n]}
                target = _like(made + rest, next(iter(inputs.values())))
                problems += _unlike(ckpt, target, inputs, numbers)
                rows.append(Row((*inputs.values(),), (target,), Stack(axis, mesh_axes)))
    if problems:
        raise TreeMismatchError("the layers cannot be stacked", problems, hints)
    return _applied(ckpt, rows, layers)


def unstack(
    ckpt: Checkpoint,
    stacked: str,
    into: str,
    axis: int = 0,
    *,
    indices: Sequence[int] | None = None,
) -> Checkpoint:
    """Split stacked layers into arrays of their own: the inverse of `stack`.

    Args:
      ckpt: the checkpoint.
      stacked: the path of the stacked layers: `params/layers`, with `*` as in `stack`.
      into: the path of a layer, with `{}` for its number and the `*` of `stacked` in their order.
        With `{%6}` in `stacked`, the numbers go through the cycles.
      axis: the axis of the layers in each array.
      indices: numbers of the layers, in order; 0, 1, ... by default.

    Raises:
      ArgumentError: as `stack`.
      TreeMismatchError: as `stack`; also if arrays of one group have different numbers of layers.

    Example:
      >>> ckpt = reshard.stack(reshard.open("run/1000"), "params/layer_{}", into="params/layers")
      >>> ckpt = reshard.unstack(ckpt, "params/layers", into="params/block_{}")
      >>> ckpt["params/block_1/kernel"]
      <params/block_1/kernel: float32[32,32] P(None, 'model')>
    """
    into, stacked, period = _parsed(into, stacked, indices)
    groups, problems = _grouped(ckpt, stacked)
    if not groups:
        near = tree.nearest(stacked, ckpt)[:1]
        hints = [f"the leaf nearest to `{stacked}` is `{name}`" for name in near]
        raise TreeMismatchError(f"no leaf is below `{stacked}`", hints=hints)
    rows = []
    for stars, members in groups.items():
        whole = format_path(_filled(stacked, stars, 0))
        if sorted(members) != [*range(period)]:
            have = ", ".join(map(str, sorted(members)))
            problems.append(f"{whole}: the layers of its cycle are {have}, not 0 to {period - 1}")
            continue
        counts: dict[int | None, Path] = {}
        leaves = [(n, rest, path) for n in members for rest, path in members[n].items()]
        for _, _, path in leaves:
            if isinstance(leaf := ckpt[path], ArrayHandle):
                inside = -len(leaf.shape) <= axis < len(leaf.shape)
                counts.setdefault(leaf.shape[axis] if inside else None, path)
        count, *_ = (*counts, None)
        numbers = range((count or 0) * period) if indices is None else indices
        if len(counts) != 1 or not count or len(numbers) != count * period:
            texts = {n: "no such axis" if n is None else f"{n} layers" for n in counts}
            problems += [f"{format_path(path)}: {texts[n]}" for n, path in counts.items()]
            problems += [f"{whole}: no array"] * (not counts)
            continue
        for place, rest, path in leaves:
            outputs = [_filled(into, stars, n) + rest for n in numbers[place::period]]
            outputs = tuple(_like(output, path) for output in outputs)
            rows.append(Row((path,), outputs, Unstack(axis, count)))
    if problems:
        number = "" if indices is None else f" {len(indices)}"
        raise TreeMismatchError(f"not all arrays have the{number} layers on axis {axis}", problems)
    return _applied(ckpt, rows, stacked)


def _parsed(layers: str, stacked: str, indices: Sequence[int] | None) -> tuple[str, str, int]:
    """The patterns, `{}` in the place of `{%6}`, and the number of layers in a cycle."""
    if layers.endswith("/**") and stacked.endswith("/**"):
        layers, stacked = layers[:-3], stacked[:-3]
    problems = []
    if layers.count("{}") != 1:
        problems.append(f"`{layers}` must have one `{{}}`, for the number of a layer")
    if "{}" in stacked:
        problems.append(f"`{stacked}` must have no `{{}}`: it holds all layers")
    if layers.count("*") != stacked.count("*"):
        problems.append(f"`{layers}` and `{stacked}` must have the same number of `*`")
    if indices is not None and (len(set(indices)) < len(indices) or min(indices, default=-1) < 0):
        problems.append(f"indices {list(indices)} must be numbers of layers, each once")
    periods = re.findall(r"\{%(\d+)\}", stacked)
    if len(periods) > 1 or any(len(text) > _DIGITS or not int(text) for text in periods):
        problems.append(f"`{stacked}` must have at most one `{{%6}}`, for a cycle of six layers")
    if problems:
        raise ArgumentError("the path does not name the layers", problems, [_HINT])
    return layers, re.sub(r"\{%\d+\}", "{}", stacked), int(*periods or (1,))


def _grouped(
    ckpt: Checkpoint, pattern: str, indices: Sequence[int] | None = None
) -> tuple[dict[Path, dict[int, dict[Path, Path]]], list[str]]:
    """The matching leaves: texts of the stars -> number of the layer (or 0) -> keys below it ->
    path. And the problems: pairs of leaves with the same keys."""
    check_checkpoints(ckpt)
    keys = tree.split_path(pattern)
    groups: dict[Path, dict[int, dict[Path, Path]]] = {}
    layers: dict[tuple[Path, int], Path] = {}
    problems: dict[str, None] = {}
    for path, hits in _matches(ckpt, keys):
        stars, number = [], 0
        for key, given, hit in zip(keys, path, hits, strict=False):
            found = iter(hit.groups())
            for place in re.findall(r"\*|\{\}", key):
                if place == "*":
                    stars.append(given if key == "*" else next(found))
                else:
                    number = int(next(found))
        if indices is None or number in indices:
            groups.setdefault(tuple(stars), {}).setdefault(number, {})[path[len(keys) :]] = path
            layer = path[: len(keys)]
            if (other := layers.setdefault((tuple(stars), number), layer)) != layer:
                problems[f"{format_path(other)} and {format_path(layer)} are both {number}"] = None
    return groups, [*problems]


def _matches(paths: Iterable[Path], keys: Path) -> Iterator[tuple[Path, list[re.Match[str]]]]:
    """The paths that begin with keys of a pattern, with the matches of these keys."""
    texts = [re.escape(str(k)).replace(r"\*", "(.*)").replace(r"\{\}", "([0-9]+)") for k in keys]
    regexes = [re.compile(text, re.DOTALL) for text in texts]
    for path in paths:
        hits = [regex.fullmatch(str(key)) for regex, key in zip(regexes, path, strict=False)]
        if len(path) >= len(keys) and None not in hits:
            yield path, [hit for hit in hits if hit is not None]


def _call(before: str, after: str, axis: int, indices: str, names: Sequence[str]) -> str:
    more = f", axis={axis}" * bool(axis) + f", indices={indices}"
    more += f", names={tree.as_python([*names])}" * bool(names)
    return f"reshard.stack(ckpt, {tree.as_python(before)}, into={tree.as_python(after)}{more})"


def _unlike(
    ckpt: Checkpoint, target: Path, inputs: Mapping[int, Path], numbers: Sequence[int]
) -> list[str]:
    """Why the leaves of layers cannot be stacked."""
    without = [str(number) for number in numbers if number not in inputs]
    kinds = dict.fromkeys(_kind(ckpt[path]) for path in inputs.values())
    if without:
        layers = "layer {} has" if len(without) == 1 else "layers {} have"
        return [f"{format_path(target)}: {layers.format(', '.join(without))} no such leaf"]
    return [f"{format_path(target)}: its layers differ: {', '.join(kinds)}"] * (len(kinds) > 1)


def _kind(leaf: Leaf) -> str:
    """The kind of a leaf, which all leaves of a stack must share."""
    if not isinstance(leaf, ArrayHandle):
        return repr(leaf)
    kind = leaf.value_type if leaf.key_impl is None else f"{leaf.key_impl} key"
    return f"{kind} {leaf.dtype.name}{list(leaf.shape)}"


def _filled(pattern: str, stars: Path, number: int) -> Path:
    """The path of a pattern, its stars and its number filled in. A key that is a star may become a
    list position."""
    left = iter(stars)

    def filled(place: re.Match[str]) -> str:
        return str(next(left) if place[0] == "*" else number)

    return tuple(
        next(left) if key == "*" else re.sub(r"\*|\{\}", filled, key)
        for key in tree.split_path(pattern)
    )


def _like(path: Path, other: Path) -> Path:
    """A path, with the list positions of another path in the keys that both begin with."""
    pairs = zip(path, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if str(a) != str(b)), len(path))
    return other[:same] + path[same:]


def _applied(ckpt: Checkpoint, rows: Sequence[Row], pattern: str) -> Checkpoint:
    """The checkpoint after operations on the layers of a pattern. Their optimizer state follows
    them. Leaves that are no arrays only change their paths."""
    arrays = {leaf.path: leaf for leaf in ckpt.arrays}
    large = [row for row in rows if row.inputs[0] in arrays]
    small = [row for row in rows if row.inputs[0] not in arrays]
    taken = {path for row in large for path in row.inputs}
    model = from_rows(large, {path: arrays[path].shape for path in arrays if path in taken})
    parts = list(_followed(ckpt, model, arrays, tree.split_path(pattern)))
    problems = [problem for part, *_ in parts for problem in part.problems]
    if problems:
        raise TreeMismatchError(
            "optimizer state that cannot follow its parameters",
            problems,
            ["reshard.select(ckpt, drop=[...]) leaves it out"],
        )
    without = {path: row.inputs for row in small for path in row.outputs}
    values, must_be_zero = dict(model.values), {}
    copies: collections.Counter[Path] = collections.Counter()
    for part, depth, _ in parts:
        state = (*part.map.values, *part.placeholders)
        copies.update(p[: depth + 1] for p in state if {*OPTIMIZERS}.isdisjoint(map(str, p)))
        without |= part.placeholders
        values |= part.map.values
        must_be_zero |= part.map.must_be_zero
    whole = LeafMap(values, {}, (), must_be_zero)
    not_zero = whole.not_zero(ckpt)
    if not_zero:
        raise TreeMismatchError(
            "optimizer state that optax does not use must be zero, and is not",
            [format_path(path) for path in not_zero],
        )
    made: dict[Path, Leaf] = whole.bind(ckpt)
    problems = [text for leaf in made.values() for text in _partition_problems(leaf)]
    if problems:
        raise ShardingError("the layers cannot be stacked with these partition specs", problems)
    made |= {path: ckpt[sources[0]] for path, sources in without.items()}
    gone = {*whole.sources(), *must_be_zero}.union(*without.values())
    kept = {path: leaf for path, leaf in ckpt.items() if path not in gone}
    if collisions := _collisions(made, kept):
        raise TreeMismatchError("leaves exist at these paths already", collisions)
    leaves = kept | made
    tree.check_lists(leaves, ckpt)
    notes = [optimizer.follows_note(root, count) for root, count in copies.items()]
    same = "has other layers than the parameters, and stays"
    notes += [f"`{format_path(root)}` {same}" for *_, roots in parts for root in roots]
    return with_true_metadata(ckpt.replace(leaves, notes=notes, retyped=True))


def _followed(
    ckpt: Checkpoint, model: LeafMap, arrays: Mapping[Path, ArrayHandle], pattern: Path
) -> Iterator[tuple[optimizer.Followed, int, list[Path]]]:
    """The map of the optimizer state next to each collection of parameters, the depth of the keys
    of both, and the roots of trees that stay, although they have such layers."""
    taken = model.sources()
    parts: dict[Path, dict[Path, Value]] = {}
    for path, value in model.values.items():
        root = _collection(sources_of(value))
        parts.setdefault(root, {})[path] = value
    if len(parts) > 1:  # without statistics, which have no optimizer state
        parts.pop((), None)
    for root, own in parts.items():
        parameters, others = {}, {}
        for path, leaf in ckpt.items():
            inside = path[: len(root)] == root if root else str(path[0]) not in OPTIMIZERS
            if inside and path in arrays:
                parameters[path] = arrays[path].shape
            elif not inside and path not in taken and path[: len(root[:-1])] == root[:-1]:
                if isinstance(leaf, ArrayHandle):
                    others[path] = leaf.shape, leaf.dtype
                elif not isinstance(leaf, str):
                    others[path] = None
        depth = max(len(root) - 1, 0)
        stay = _other_models(ckpt, pattern, parameters, others, root[:-1])
        for other, layers in stay.items():
            for path in [path for path in others if path[: len(other)] == other]:
                if tuple(map(str, path[len(other) :])) in layers:
                    del others[path]
        beside = {path for path in others if str(path[depth]) not in OPTIMIZERS}
        yield optimizer.followed(LeafMap(own), parameters, others, beside=beside), depth, [*stay]


def _other_models(
    ckpt: Checkpoint,
    pattern: Path,
    parameters: Mapping[Path, Shape],
    others: optimizer.Leaves,
    home: Path,
) -> dict[Path, _Layers]:
    """The layers of other models than that of the parameters, which is at `home`, and of their
    optimizer state, by the root of their tree.

    A tree that is no optimizer state is another model's if its layers differ in anything. Optimizer
    state is if it is next to such trees alone, if it has layers that the parameters lack, or if its
    shapes are those of such a tree.
    """
    found: dict[Path, _Layers] = {}
    beside, states = dict[Path, _Layers](), list[tuple[Path, int, _Layers, _Layers, int]]()
    for root, members in optimizer.mirroring_subtrees(parameters, others)[0].items():
        parameter, path = next(iter(members.items()))
        start = len(parameter) - (len(path) - len(root))
        below = pattern[start:]
        layers, own = (_layers_below(ckpt, at, below) for at in (root, parameter[:start]))
        depth = next((depth for depth, key in enumerate(root) if key in OPTIMIZERS), None)
        if layers and depth is not None:
            states.append((root, depth, layers, own, len(below)))
        elif layers:
            beside[root] = layers
            if layers != own or not below or "{}" in format_path(pattern[:start]):
                found[root] = layers
    # A tree below a position in a tuple is state of some optimizer: its shapes tell no model.
    models = (root for root in found if not any(isinstance(key, int) for key in root))
    theirs = [_shapes(found[root]) for root in models]
    for root, depth, layers, own, size in states:
        near = {other for other in beside if other[:depth] == root[:depth] != home}
        more = {path[:size] for path in layers} - {path[:size] for path in own}
        fits_theirs = _shapes(layers) != _shapes(own) and _shapes(layers) in theirs
        if (near and near <= found.keys()) or more or fits_theirs:
            found[root] = layers
    return found


def _layers_below(ckpt: Checkpoint, root: Path, pattern: Path) -> _Layers:
    found: _Layers = {}
    inside = (path[len(root) :] for path in ckpt if path[: len(root)] == root)
    for path, _ in _matches(inside, pattern):
        leaf = ckpt[root + path]
        is_array = isinstance(leaf, ArrayHandle)
        found[tuple(map(str, path))] = (leaf.shape, leaf.dtype) if is_array else (None, repr(leaf))
    return found


def _shapes(layers: _Layers) -> dict[Path, Shape | None]:
    return {path: shape for path, (shape, _) in layers.items()}


def _collection(inputs: Collection[Path]) -> Path:
    """The path of the collection of all inputs; the root if there is no known name."""
    first, *_ = inputs
    for depth, key in enumerate(first[:-1]):
        root = first[: depth + 1]
        if str(key) in _COLLECTIONS and all(path[: depth + 1] == root for path in inputs):
            return root
    return ()


def _partition_problems(leaf: Leaf) -> list[str]:
    """Why the new axis of stacked layers cannot be partitioned over its mesh axes."""
    if not isinstance(leaf, ArrayHandle) or not isinstance(leaf.data, Derived):
        return []
    operation, inputs = leaf.data.operation, leaf.data.inputs
    if not isinstance(operation, Stack) or not operation.names:
        return []
    sharding, named = leaf.sharding, [array.sharding for array in inputs]
    specs = [each.spec for each in named if isinstance(each, NamedSharding)]
    if not isinstance(sharding, NamedSharding) or len(specs) < len(inputs):
        return [f"{format_path(leaf.path)}: not all layers are on one mesh"]
    (spec,) = operation.specs(specs, [array.shape for array in inputs])
    return [
        f"{format_path(leaf.path)}  {leaf.dtype.name}{list(leaf.shape)}: {problem}"
        for problem in spec_problems(leaf.shape, sharding.mesh, spec)
    ]


def _collisions(made: Mapping[Path, Leaf], kept: Mapping[Path, Leaf]) -> list[str]:
    """New leaves that collide with each other, or with leaves that are kept."""
    leaves = [((path, new), path) for new, paths in enumerate((kept, made)) for path in paths]
    problems = [
        format_path(path) + (f", below the leaf {format_path(other)}" if above else "")
        for (other, is_new), (path, new), above in tree.overlaps(leaves)
        if is_new or new
    ]
    return problems or name_clashes([*kept, *made], kept.__contains__)
