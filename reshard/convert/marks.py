"""What speaks for one of Flax's APIs in a saved tree: what one of them writes and not the other.
Pure; the reasons are words, for users to judge.
"""

import dataclasses
import keyword
from collections.abc import Iterator
from typing import Any

from reshard.convert.saved import (
    AUTOMATIC,
    BOOKKEEPING,
    Node,
    Training,
    array,
    child,
    dtype_name,
    leaves_of,
    named,
)
from reshard.tree import Path


@dataclasses.dataclass
class Marks:
    """Reasons in words.

    Attributes:
      linen: what Linen writes.
      proof: what only NNX writes, whatever names there are.
      nnx: what NNX writes.
      likely: what is likely under NNX, and counts from two on.
    """

    linen: list[str] = dataclasses.field(default_factory=list)
    proof: list[str] = dataclasses.field(default_factory=list)
    nnx: list[str] = dataclasses.field(default_factory=list)
    likely: list[str] = dataclasses.field(default_factory=list)

    @property
    def for_nnx(self) -> list[str]:
        """All that speaks for NNX."""
        return self.proof + self.nnx + self.likely

    @property
    def maybe_nnx(self) -> bool:
        """Whether enough speaks for NNX."""
        return bool(self.proof or self.nnx or len(self.likely) > 1)

    @property
    def api(self) -> str | None:
        """The API, if it is decided."""
        if self.proof or (self.maybe_nnx and not self.linen):
            return "nnx"
        return "linen" if self.linen and not self.maybe_nnx else None


def model_marks(top: Any, at: Path = ()) -> Marks:
    """What the modules and variables of a model say; of each mark, where it is first.

    Args:
      top: the tree of a model.
      at: its path.
    """
    found: dict[str, Path] = {}
    stack = [(at, top)] if isinstance(top, dict) else []
    while stack:
        path, node = stack.pop()
        stack += [((*path, k), c) for k, c in reversed(node.items()) if isinstance(c, dict)]
        for mark, place in _node_marks(path, node):
            found.setdefault(mark, place)
    marks = Marks()
    for reasons, mark, words in (
        (marks.linen, "automatic", "has a name as Linen gives them"),
        (marks.linen, "no attribute", "cannot be an attribute"),
        (marks.proof, "module", "is a module that was saved itself (`_pytree__state`)"),
        (marks.proof, "stream", "is a stream of random numbers (`key`, `count`)"),
        (marks.nnx, "norm", "holds parameters and statistics together"),
        (marks.nnx, "attention", "holds parameters and a cache together"),
        (marks.nnx, "tuple", "is a tuple as a key"),
        (marks.likely, "list", "has positions as keys, as `nnx.List` does"),
        (marks.likely, "keyword", "is how an attribute avoids a keyword"),
    ):
        reasons += [f"{named(found[mark])} {words}"] if mark in found else []
    arrays = [leaf for leaf in leaves_of(top) if leaf.is_array]
    standard = [leaf for leaf in arrays if leaf.is_standard]
    held = next((leaf.path for leaf in standard if leaf.lone is not None), None)
    bare = next((leaf.path for leaf in standard if leaf.lone is None), None)
    if held and bare:
        words = f"{named(held)} is in a box and {named(bare)} is not"
        marks.linen.append(f"{words}, where NNX has variables throughout")
    elif arrays and all(leaf.lone is not None for leaf in arrays):
        marks.likely.append("each array is in a `value` level, as NNX's variables are")
    return marks


def _node_marks(path: Path, node: Node) -> Iterator[tuple[str, Path]]:
    """The marks of a container and its keys."""
    for key, below in node.items():
        if keyword.iskeyword(key) or "/" in key:
            yield "no attribute", (*path, key)
        elif key.startswith("(") and key.endswith(")"):
            yield "tuple", (*path, key)
        elif key.endswith("_") and keyword.iskeyword(key[:-1]):
            yield "keyword", (*path, key)
        elif isinstance(below, dict) and AUTOMATIC.fullmatch(key) and not array(below):
            yield "automatic", (*path, key)
    if BOOKKEEPING in node:
        yield "module", path
    if "count" in node and is_stream(node):
        yield "stream", path
    if "var" in node or "query" in node:
        arrays = {key for key, below in node.items() if array(below)}
        if {"mean", "var"} <= arrays and arrays & {"scale", "bias"}:
            yield "norm", path
        if {"cached_key", "cached_value"} <= arrays and "query" in node:
            yield "attention", path
    if all(key.isdecimal() for key in node):
        yield "list", path


def is_stream(node: Any) -> bool:
    """Whether it is an `nnx.RngStream`."""
    key, count = dtype_name(child(node, "key")), dtype_name(child(node, "count"))
    return count == "uint32" and key in ("key", "uint32")


def add_training_marks(beside: Training, marks: Marks) -> None:
    """Adds what the optimizer's state and the step counter say."""
    if beside.wrapped:
        words = "holds the state and the steps of an optimizer, as `nnx.Optimizer` does"
        marks.nnx.append(f"{named(beside.names[:1])} {words}")
    if beside.root is not None:
        where, leaves = named(beside.root), list(leaves_of(beside.state))
        listed = any(isinstance(key, int) for leaf in leaves for key in leaf.path)
        if listed and all(leaf.lone is None for leaf in leaves):
            marks.linen.append(f"{where} has list positions, as optax's tuples are saved")
        states = beside.state if isinstance(beside.state, dict) else {}
        if states and not isinstance(leaves[0].path[len(beside.root)], int):
            filled = all(isinstance(state, dict) or array(state) for state in states.values())
            if filled and all(key.isdecimal() for key in states):
                words = "has positions as keys, and only those with a value"
                marks.nnx.append(f"{where} {words}, as `nnx.Optimizer` does")
    if beside.step is not None and dtype_name(beside.step) == "uint32":
        marks.likely.append(f"{named(beside.step.path)} is uint32, as `nnx.Optimizer` counts")
