"""Rewrite a tree as another tree by a map alone, without a model and its framework."""

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Moving
from reshard.checkpoint import Checkpoint, Leaf, name_clashes, type_name
from reshard.convert.layout import OPTIMIZERS
from reshard.convert.leafmap import LeafMap, Output, Source, sources_of
from reshard.convert.map_rules import Map, apply_inverse, apply_map
from reshard.convert.optimizer import followers
from reshard.convert.ready_maps import PREFIX, find_map, fitting_arguments
from reshard.errors import TreeMismatchError
from reshard.tree import Path, check_lists, format_path, with_positions


def remap(
    ckpt: Checkpoint,
    map_file: str | os.PathLike[str] | Map,
    *,
    reverse: bool = False,
    config: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Rewrite the tree of a checkpoint by a map, without a model. Reads no array.

    Every leaf needs a rule, which gives its new path or drops it. The new path may be the old one.

    Args:
      ckpt: the checkpoint.
      map_file: TOML, or a ready map such as `"hf:llama-tunix"`: see `reshard help maps`. A map from
        `reshard.ready_map` is accepted, too.
      reverse: whether the map is used in the opposite direction.
      config: a Hugging Face directory, or its `config.json`. Expressions in the map may name its
        numbers. By default, the `config.json` in the directory of `ckpt`.

    Raises:
      ArgumentError: the file is not a map.
      TreeMismatchError: the map does not fit the leaves, or leaves have no rule: all problems.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "**/kernel")
      >>> with open("map.toml", "w") as file:
      ...     _ = file.write("[[rule]]\\nfrom = 'layer_(.)'\\nto = 'block_\\\\1'")
      >>> [*reshard.remap(ckpt, "map.toml")]
      [('params', 'block_0', 'kernel'), ('params', 'block_1', 'kernel')]
    """
    rules = dataclasses.replace(find_map(map_file, ckpt, config=config), keeps=True)
    old: dict[Path, Path] = {tuple(map(str, path)): path for path in ckpt}
    leaves: dict[Path, Leaf] = {text: ckpt[path] for text, path in old.items()}
    shapes = {p: x.shape if isinstance(x, ArrayHandle) else () for p, x in leaves.items()}
    try:
        result = (apply_inverse if reverse else apply_map)(rules, shapes)
    except TreeMismatchError as error:
        if not rules.name.startswith(PREFIX):
            raise
        hints = [*fitting_arguments(shapes, error.problems)]
        raise TreeMismatchError(error.summary, error.problems, hints) from error
    problems = [*_problems(rules, result.map, leaves, reverse)]
    if len(old) < len(ckpt):
        problems += ["a list and a dict in one place have keys of the same text"]
    if problems:
        raise TreeMismatchError(
            f"{rules.name}: the new paths of the map do not form a tree", problems
        )
    made: dict[Path, Leaf] = {}
    for path, leaf in result.map.bind(leaves).items():
        was = next(iter(sources_of(result.map.values[path])), path)
        new = with_positions(tuple(map(str, path)), old.get(was, was), moves=True)
        made[new] = leaf.at(new) if isinstance(leaf, ArrayHandle) else leaf
    check_lists(made, ckpt)
    if clashes := name_clashes(made):
        raise TreeMismatchError("two leaves would be stored under one name", clashes)
    return ckpt.replace(made, notes=result.notes, retyped=True)


def _problems(
    rules: Map, found: LeafMap, leaves: Mapping[Path, Leaf], reverse: bool
) -> Iterator[str]:
    """Why a map cannot be used without a model."""
    for glob in () if reverse else rules.initial:
        yield f"`init` has `{glob}`, and only a model has initial values"
    for call in found.calls():
        for value in call.inputs:
            if isinstance(value, Source) and not isinstance(leaves[value.path], ArrayHandle):
                kind = type_name(leaves[value.path])
                yield f"{format_path(value.path)}: {call.operation} is for arrays, not for {kind}"
    yield from _stateful(found)


def _stateful(found: LeafMap) -> Iterator[str]:
    """Optimizer state of parameters that a rule computes, compares or leaves out as a constant."""
    changed = dict.fromkeys(found.must_be_zero)
    for call in found.calls():
        if not isinstance(call.operation, Moving):
            changed |= dict.fromkeys(sources_of(Output(call, 0)))
    state = [path for path in found.sources() if not {*OPTIMIZERS}.isdisjoint(map(str, path))]
    constant = {path: value.shape for path, value in found.must_be_zero.items()}
    parameters = {**found.sources(), **constant}
    for path in state:
        parameters.pop(path)
    yield from (
        f"{format_path(path)}: it mirrors {format_path(owner)} as optimizer state does, and a rule "
        "changes only the values of that: change both, or drop it"
        for path, owner in _mirrors(changed, parameters)
    )
    owners = followers(dict.fromkeys(parameters, ()), dict.fromkeys(state)) if changed else {}
    for path, owner in owners.items():
        if owner in changed:
            yield (
                f"{format_path(path)}: it is optimizer state of {format_path(owner)}, whose values "
                "a rule changes: it cannot follow, so drop it"
            )


def _mirrors(
    changed: Collection[Path], leaves: Mapping[Path, Shape]
) -> Iterator[tuple[Path, Path]]:
    """Leaves that stay as they are, but follow one that is `changed`, with that one: leaves of its
    shape whose paths end with its path below another top-level key. The top-level key of the
    changed leaf may be missing if the leaves below both keys have the same names."""
    below: dict[str, set[Path]] = collections.defaultdict(set)
    texts = {tuple(map(str, path)): path for path in leaves}
    for path in texts:
        below[path[0]].add(path[1:])
    owners: dict[Path, list[Path]] = collections.defaultdict(list)
    for path in changed:
        text = tuple(map(str, path))
        owners[text].append(path)
        if len(text) > 1 and (text[0] == "params" or any(len(tail) > 1 for tail in below[text[0]])):
            owners[text[1:]].append(path)

    @functools.cache
    def mirrored(root: Path, top: str) -> bool:
        return all((*root, *tail) in texts for tail in below[top])

    for text, path in texts.items():
        for start in range(1, len(text)):
            for owner in owners.get(text[start:], ()) if path not in changed else ():
                one, other = (re.sub(r"\d+", "", str(each[0])) for each in (path, owner))
                whole = len(owner) == len(text) - start or mirrored(text[:start], str(owner[0]))
                if one != other and whole and leaves[path] == leaves[owner]:
                    yield path, owner
