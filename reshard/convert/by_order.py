"""Leaves that only the order of modules of one class matched: a warning, and a record in the result
and in all checkpoints that are made of it, until the outputs of both models were compared."""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from reshard.checkpoint import Checkpoint
from reshard.convert.leafmap import LeafMap
from reshard.tree import Path, format_path

KEY = "reshard.order"
# Why `--check` does not say that an order is right.
NOT_SEEN = "not seen: exchanging them does not change the outputs"
NOT_TRIED = "not tried: at most 32 groups are exchanged"
# Modules of one class, each with its counterpart: paths in Linen, without a collection, and in NNX.
Modules = tuple[tuple[Path, Path], ...]
_SHOWN = 3


class ByOrder(NamedTuple):
    """How many leaves went by the order of modules, and which module each of these was taken for:
    printed paths before and after, Linen's without a collection."""

    leaves: int
    modules: tuple[tuple[str, str], ...]


def by_order(model: LeafMap, to: str) -> ByOrder | None:
    """What went by order in the map of a model's leaves; None if nothing did."""
    paths = _by_structure(model)
    if not paths:
        return None
    made, pairs = model.made_of(), {}
    for path in paths:
        for before in made[path]:
            one, other = (before[1:], path) if to == "nnx" else (before, path[1:])
            while one[1:] and other[1:] and one[-1] == other[-1]:  # to the outermost modules
                one, other = one[:-1], other[:-1]
            pairs[format_path(one), format_path(other)] = None
    return ByOrder(len(paths), tuple(pairs))


def _by_structure(model: LeafMap) -> list[Path]:
    return [path for path, origin in model.origin.items() if "structure" in origin]


def leaves_in(groups: Collection[Modules], leaves: Iterable[Path], api: str) -> dict[Path, Path]:
    """Of a model's leaves in an API those in some modules -> their paths in these."""
    side, found = ("linen", "nnx").index(api), {}
    modules = {pair[side] for group in groups for pair in group}
    for leaf in leaves:
        path = tuple(map(str, leaf))
        above, below = ((), path) if api == "nnx" else (path[:1], path[1:])
        for end in range(len(below)):
            if below[:end] in modules:
                found[leaf] = above + below[end:]
    return found


def by_order_in(groups: Collection[Modules], model: LeafMap, to: str) -> ByOrder | None:
    """What went by order in some groups of modules; arguments as for `by_order`."""
    pairs = [pair if to == "nnx" else pair[::-1] for group in groups for pair in group]
    modules = tuple((format_path(one), format_path(other)) for one, other in pairs)
    leaves = leaves_in(groups, _by_structure(model), to)
    return ByOrder(len(leaves), modules) if groups else None


def both(one: ByOrder | None, other: ByOrder | None) -> ByOrder | None:
    """What went by order in a conversion, and in another one before it."""
    if one is None or other is None:
        return one or other
    modules = tuple(dict.fromkeys((*one.modules, *other.modules)))
    return ByOrder(one.leaves + other.leaves, modules)


def order_text(order: ByOrder) -> str:
    """It in words, with some of the pairs."""
    leaves = "1 leaf was" if order.leaves == 1 else f"{order.leaves} leaves were"
    pairs = ", ".join(f"{one} -> {other}" for one, other in order.modules[:_SHOWN])
    more = len(order.modules) - _SHOWN
    pairs += f" and {more} more" if more > 0 else ""
    return f"{leaves} matched only by the order of modules of one class: {pairs}"


def order_warning(order: ByOrder, why: str = "") -> str:
    """What to tell whoever converts; `why` outputs that were compared do not say that it is
    right."""
    return f"{order_text(order)}; {why or 'check=True compares outputs'}"


def without_notes(ckpt: Checkpoint, notes: Collection[str]) -> Checkpoint:
    """A checkpoint without some of its notes."""
    kept = tuple(note for note in ckpt.notes if note not in notes)
    return Checkpoint(ckpt, ckpt.source, kept, ckpt.retyped)


def with_order(ckpt: Checkpoint, order: ByOrder | None) -> Checkpoint:
    """A checkpoint in whose custom metadata that is recorded; None takes such a record away, as
    when the outputs of both models were compared and are equal."""
    custom = ckpt.source.metadata.get("custom_metadata")
    custom = {k: v for k, v in custom.items() if k != KEY} if isinstance(custom, dict) else {}
    if order is None and not order_of(ckpt):
        return ckpt
    if order is not None:
        custom[KEY] = order_json(order)
    return ckpt.with_metadata({"custom_metadata": custom or None})


def order_of(ckpt: Checkpoint) -> ByOrder | None:
    """What is recorded of a checkpoint; None if nothing is, or nothing that can be read."""
    custom = ckpt.source.metadata.get("custom_metadata")
    return order_in(custom.get(KEY)) if isinstance(custom, dict) else None


def order_json(order: ByOrder) -> dict[str, Any]:
    """It as JSON."""
    return {"leaves": order.leaves, "modules": list(map(list, order.modules))}


def order_in(found: Any) -> ByOrder | None:
    """The inverse of `order_json`; None for what cannot be read."""
    try:
        modules = tuple((str(one), str(other)) for one, other in found["modules"])
        return ByOrder(int(found["leaves"]), modules)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
