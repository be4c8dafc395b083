"""What NNX cannot hold of a Linen checkpoint, as a note in the checkpoint's custom metadata.

With it a converted checkpoint goes back to exactly the tree that it was made of: its paths (boxes
are levels of them), its leaves without a value, the dtype of its step counter, what was zero and is
left out. Orbax keeps custom metadata with a checkpoint and ignores them; a program that loads,
trains and saves again does not carry them on.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reshard.checkpoint import (
    EMPTY_LEAVES,
    ArrayHandle,
    Checkpoint,
    Leaf,
    empty_name,
    is_floating,
    parse_dtype,
)
from reshard.convert.carry import Route, Zeros, on_host
from reshard.convert.kinds import KINDS
from reshard.convert.steps import Step
from reshard.errors import ReshardError, TreeMismatchError
from reshard.operations import Concat, Pad, Reshape, Split, Stack, Transpose, Unstack
from reshard.tree import Path, format_path

KEY = "reshard.linen"
_VERSION = 1
_OPERATIONS = (Transpose, Reshape, Split, Concat, Stack, Unstack, Pad)


def recorded(
    ckpt: Checkpoint,
    linen: Mapping[Path, Leaf],
    metadata: Mapping[str, Any],
    way: Route,
    own: list[Path],
    kind: str,
) -> Checkpoint:
    """A converted checkpoint with the record of what it was made of.

    Args:
      ckpt: the NNX checkpoint.
      linen: the leaves of the Linen checkpoint, without those that were dropped.
      metadata: its `_METADATA` document.
      way: how it became the NNX one.
      own: leaves of the NNX one that the Linen one has nothing of.
      kind: what the NNX one is, one of `reshard.convert.layout.KINDS`.
    """
    document = {
        "version": _VERSION,
        "layout": kind,
        "leaves": [[list(path), _kind(leaf)] for path, leaf in linen.items()],
        "route": _route_json(way),
        "own": [list(path) for path in own],
        "containers": metadata.get("value_metadata_tree"),
    }
    return ckpt.with_metadata({"custom_metadata": _custom(ckpt) | {KEY: document}})


def _custom(ckpt: Checkpoint) -> dict[str, Any]:
    return ckpt.source.metadata.get("custom_metadata") or {}


def has_record(ckpt: Checkpoint) -> bool:
    """Whether a checkpoint has such a record."""
    return KEY in _custom(ckpt)


def recorded_kind(ckpt: Checkpoint) -> str | None:
    """What a checkpoint with such a record is, which its paths alone may not tell."""
    document = _custom(ckpt).get(KEY)
    kind = document.get("layout") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) and kind in KINDS else None


def without_record(ckpt: Checkpoint) -> Checkpoint:
    """A checkpoint less such a record, which describes another tree."""
    if not has_record(ckpt):
        return ckpt
    custom = {key: value for key, value in _custom(ckpt).items() if key != KEY}
    return ckpt.with_metadata({"custom_metadata": custom or None})


def from_record(ckpt: Checkpoint) -> Checkpoint:
    """The Linen checkpoint that an NNX one was made of.

    Raises:
      TreeMismatchError: the record cannot be read, or its leaves are not those of the checkpoint.
    """
    with _readable(_LINEN):
        way, own, leaves = _read(ckpt)
        kinds = {path: kind for path, kind in leaves if isinstance(kind, dict)}
        back = way.backwards({path: tuple(kind["shape"]) for path, kind in kinds.items()})
        expected = dict.fromkeys((*back.moved, *back.enter, *back.vanish, *own))
        problems = [
            f"{format_path(path)}: not in the checkpoint" for path in expected if path not in ckpt
        ]
        problems += [
            f"{format_path(path)}: not in the record" for path in ckpt if path not in expected
        ]
        if problems:
            raise TreeMismatchError(
                "the record of the conversion from Linen does not fit the checkpoint",
                problems,
                [_LINEN],
            )
        made = back.carried(ckpt)
        problems = [text for path, kind in kinds.items() for text in _unlike(made[path], kind)]
        problems += [
            f"{format_path(path)}: it was zero, and is not" for path in back.not_zero(ckpt)
        ]
        if problems:
            raise TreeMismatchError(
                "the checkpoint is not what the conversion from Linen made any more",
                problems,
                [_LINEN],
            )
        whole = {
            path: _as_recorded(made[path], kind) if isinstance(kind, dict) else EMPTY_LEAVES[kind]
            for path, kind in leaves
        }
    made_of = without_record(ckpt).replace(whole, retyped=False)
    containers = _custom(ckpt)[KEY].get("containers")
    return made_of.with_metadata({"value_metadata_tree": containers}) if containers else made_of


def like_recorded(linen: Checkpoint, ckpt: Checkpoint) -> Checkpoint:
    """A Linen checkpoint as the NNX checkpoint that another one like it has become.

    Args:
      linen: the Linen checkpoint.
      ckpt: the NNX one, with its record. What the Linen one has nothing of is taken from it.

    Raises:
      TreeMismatchError: the record cannot be read, or its leaves are not those of the Linen
        checkpoint.
    """
    with _readable(_NNX):
        way, own, leaves = _read(ckpt)
        kinds = dict(leaves)
        problems = [
            f"{format_path(path)}: only in the record" for path in kinds if path not in linen
        ]
        for path, leaf in linen.items():
            kind = kinds.get(path)
            if kind is None:
                problems.append(f"{format_path(path)}: not in the record")
            elif isinstance(kind, dict):
                problems += _unlike(leaf, kind)
        problems = problems or [
            f"{format_path(path)}: it was zero, and is not" for path in way.not_zero(linen)
        ]
        if problems:
            raise TreeMismatchError(
                f"`{linen.source.root}` is not like what `{ckpt.source.root}` was made of",
                problems,
                [_NNX],
            )
        made = way.carried(linen)
    made |= {path: ckpt[path] for path in own if path in ckpt}
    return linen.replace(
        {path: _counted_as(leaf, ckpt.get(path)) for path, leaf in made.items()}, retyped=True
    )


def _counted_as(leaf: Leaf, like: Leaf) -> Leaf:
    """A step counter in the dtype that it has in NNX."""
    if not isinstance(leaf, ArrayHandle) or not isinstance(like, ArrayHandle):
        return leaf
    counter = not leaf.shape and leaf.dtype.kind in "iu" and like.dtype.kind in "iu"
    return dataclasses.replace(leaf, dtype=like.dtype) if counter else leaf


def _read(ckpt: Checkpoint) -> tuple[Route, list[Path], list[tuple[Path, dict[str, Any] | str]]]:
    """A record: the way to NNX, NNX's own leaves, and the leaves of the Linen checkpoint."""
    document = _custom(ckpt)[KEY]
    if document["version"] != _VERSION:
        raise ValueError(f"its version is {document['version']}, not {_VERSION}")
    own = [tuple(path) for path in document["own"]]
    leaves = [(tuple(path), kind) for path, kind in document["leaves"]]
    return _route(document["route"]), own, leaves


@contextlib.contextmanager
def _readable(hint: str) -> Iterator[None]:
    """Whatever a record makes of the checkpoint if it is not one that was written here."""
    try:
        yield
    except ReshardError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise TreeMismatchError(
            "the record of the conversion from Linen cannot be read", [str(error)], [hint]
        ) from error


_HINT = "--model MODULE:NAME, the {} model, converts without the record"
_LINEN, _NNX = _HINT.format("Linen"), _HINT.format("NNX")


def _kind(leaf: Leaf) -> dict[str, Any] | str:
    if isinstance(leaf, ArrayHandle):
        return {
            "shape": list(leaf.shape),
            "dtype": _dtype_name(leaf.dtype),
            "type": leaf.value_type,
            "keys": leaf.key_impl,
        }
    return empty_name(leaf)


@functools.cache
def _dtype_name(dtype: np.dtype) -> str:
    """The name, which NumPy puts together each time that it is asked."""
    return dtype.name


def _unlike(leaf: Leaf, kind: Mapping[str, Any]) -> Iterator[str]:
    """Why a leaf cannot be the one that was recorded. Counters have another dtype in NNX."""
    if not isinstance(leaf, ArrayHandle):
        return
    name, dtype = format_path(leaf.path), parse_dtype(kind["dtype"])
    if list(leaf.shape) != list(kind["shape"]):
        yield f"{name}: shape {list(leaf.shape)}, it was {kind['shape']}"
    elif leaf.dtype != dtype and (leaf.shape or is_floating(dtype)):
        yield f"{name}: dtype {leaf.dtype.name}, it was {dtype.name}"


def _as_recorded(leaf: Leaf, kind: Mapping[str, Any]) -> Leaf:
    if not isinstance(leaf, ArrayHandle):
        return leaf
    dtype = parse_dtype(kind["dtype"])
    leaf = dataclasses.replace(leaf, dtype=dtype, value_type=kind["type"], key_impl=kind["keys"])
    return leaf if kind["type"] == "jax.Array" else on_host(leaf)


def _route_json(way: Route) -> dict[str, Any]:
    pairs = {
        name: [[list(old), list(new)] for old, new in getattr(way, name).items()]
        for name in ("moved", "enter", "leave")
    }
    zeros = {
        name: [[list(path), list(shape), dtype.name] for path, (shape, dtype) in found.items()]
        for name, found in (("vanish", way.vanish), ("appear", way.appear))
    }
    return {**pairs, **zeros, "steps": [_step_json(step) for step in way.steps]}


def _step_json(step: Step) -> dict[str, Any]:
    document: dict[str, Any] = {
        "from": [list(path) for path in step.inputs],
        "to": [list(path) for path in step.outputs],
    }
    if step.operation is not None:
        document[type(step.operation).__name__] = dataclasses.asdict(step.operation)
    return document


def _route(document: Mapping[str, Any]) -> Route:
    """The inverse of `_route_json`; raises KeyError, TypeError or ValueError for anything else."""
    moved, enter, leave = (
        {tuple(old): tuple(new) for old, new in document[name]}
        for name in ("moved", "enter", "leave")
    )
    vanish, appear = (_zeros(document[name]) for name in ("vanish", "appear"))
    return Route(moved, enter, tuple(map(_step, document["steps"])), leave, vanish, appear)


def _zeros(entries: list[Any]) -> Zeros:
    return {tuple(path): (tuple(shape), parse_dtype(dtype)) for path, shape, dtype in entries}


def _step(document: Mapping[str, Any]) -> Step:
    inputs, outputs = (tuple(map(tuple, document[name])) for name in ("from", "to"))
    for operation in _OPERATIONS:
        if operation.__name__ in document:
            fields = {key: _tuples(value) for key, value in document[operation.__name__].items()}
            return Step(inputs, outputs, operation(**fields))
    if document.keys() != {"from", "to"}:
        raise ValueError(f"there is no operation {', '.join(document.keys() - {'from', 'to'})}")
    return Step(inputs, outputs)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
