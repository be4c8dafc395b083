"""Leaves that a conversion makes, compared with those that the model has."""

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.arrays.handle import ArrayHandle
from reshard.convert.leafmap import LeafMap, Output, Source, Zeros
from reshard.hints import Hint
from reshard.restore.matching import TargetLeaf
from reshard.tree import Path, format_path


def differences(
    found: LeafMap,
    sources: Mapping[Path, ArrayHandle],
    targets: Mapping[Path, Any],
    above: Path = (),
) -> Iterator[tuple[str, str]]:
    """What differs, in words, each with a hint or nothing.

    Args:
      found: from the sources to what is made.
      sources: the arrays of the source.
      targets: the leaves of the model.
      above: what paths of the result are below, as they are told of.
    """
    origins: dict[int, ArrayHandle] = {}

    def source_of(value: Source | Output) -> ArrayHandle:
        return sources[value.path] if isinstance(value, Source) else origins[id(value.call)]

    for call in found.calls():
        first, *others = (source_of(v) for v in call.inputs if not isinstance(v, Zeros))
        origins[id(call)] = first
        for other in others:
            if other.dtype != first.dtype:
                pair = f"{format_path(first.path)} and {format_path(other.path)}"
                yield f"{pair}: {first.dtype.name} and {other.dtype.name} cannot become one", ""
    for path, value in found.values.items():
        if isinstance(value, Zeros):
            continue
        wanted, source, shape = targets.get(path), source_of(value), value.shape
        if not isinstance(wanted, TargetLeaf) or wanted.kind not in ("array", "key"):
            continue
        name = format_path(source.path)
        both = f"{name} -> {format_path((*above, *path))}"
        if wanted.kind == "key":
            if source.key_impl != wanted.key_impl:
                keys = f"{source.key_impl} keys" if source.key_impl else source.dtype.name
                yield f"{both}: {keys}, the model has {wanted}", ""
        elif tuple(shape) != wanted.shape:
            yield f"{both}: shape {list(shape)}, the model has {list(wanted.shape)}", ""
        elif source.dtype != wanted.dtype:
            hint = Hint(("cast", str(wanted.dtype), name))
            yield f"{both}: dtype {source.dtype.name}, the model has {wanted.dtype}", hint
