"""What speaks for one of Flax's APIs in a saved tree: what one of them writes and not the other;
and where a train state has what. Pure; the reasons are words, for users to judge.
"""

import collections
import dataclasses
import keyword
from collections.abc import Iterator
from typing import Any, NamedTuple

from reshard.convert.module_tree import AUTOMATIC
from reshard.convert.value_levels import (
    BOOKKEEPING,
    COLLECTIONS,
    Node,
    SavedLeaf,
    array,
    child,
    dtype_name,
    is_mapping,
    leaves_of,
    named,
)
from reshard.errors import TreeMismatchError
from reshard.hints import Hint
from reshard.tree import Path, format_glob

# The trees that Linen and NNX save: kind -> what has it.
KINDS = {
    "linen-variables": "collections at the top: `params`, `batch_stats`, ...",
    "linen-params": "the contents of `params` alone",
    "linen-train-state": "`params` beside `opt_state` or `step`, or all variables below `params`",
    "maxtext": "a train state, and below `nnx_aux` what only NNX has",
    "nnx-state": "`nnx.state(model)`, or a module: a `value` level under each variable",
    "nnx-pure-dict": "`nnx.to_pure_dict(nnx.state(model))`",
    "nnx-optimizer": "`nnx.Optimizer`: `opt_state` and `step`",
    "nnx-model-and-optimizer": "`nnx.ModelAndOptimizer`: `model`, `opt_state` and `step`",
    "nnx-model": "a state below `model`, perhaps beside `optimizer`",
}
_OPTIMIZERS = ("opt_state", "optimizer", "opt", "optimizer_state")


class Training(NamedTuple):
    """What a train state has beside a model.

    Attributes:
      root: where the optimizer's state is saved, if there is one.
      state: that state.
      step: the step counter.
      names: the keys at the top of both.
      wrapped: both are below one key, as those of an `nnx.Optimizer`.
    """

    root: Path | None = None
    state: Any = None
    step: SavedLeaf | None = None
    names: tuple[str, ...] = ()
    wrapped: bool = False


def training(top: Node) -> Training:
    """What the tree has beside a model."""
    name = next((name for name in _OPTIMIZERS if _is_state(name, top.get(name))), None)
    root, state, wrapped = None, None, False
    steps = [("step", top.get("step"))]
    if name is not None:
        root, state = (name,), top[name]
        inner = state.keys() - {BOOKKEEPING} if isinstance(state, dict) else set()
        wrapped = name != "opt_state" and ("opt_state" in inner or inner == {"step"})
        if wrapped:
            steps.append((name, state.get("step")))
            root = (name, "opt_state") if "opt_state" in inner else None
            state = state.get("opt_state")
    counts = [pair for pair in steps if dtype_name(pair[1]).startswith(("int", "uint"))]
    names = [*([] if name is None else [name]), *(key for key, _ in counts[:1] if key != name)]
    return Training(root, state, array(counts[0][1]) if counts else None, tuple(names), wrapped)


def _is_state(name: str, node: Any) -> bool:
    """Whether it may be the state of an optimizer; a single array, only under the usual name."""
    if isinstance(node, SavedLeaf):
        return not isinstance(node.value, str) and (name == "opt_state" or not node.is_array)
    return isinstance(node, dict)


def holds_variables(params: Any) -> bool:
    """Whether what is below `params` is all variables, with `params` among the collections."""
    return is_mapping(child(params, "params")) and all(
        is_mapping(node) and not AUTOMATIC.fullmatch(name) for name, node in params.items()
    )


def collection_roots(top: Node, beside: Training) -> dict[Path, str]:
    """Where collections are saved -> their names.

    Raises:
      TreeMismatchError: one is saved in two places.
    """
    params = top.get("params")
    roots: dict[Path, str] = {}
    if isinstance(params, dict) and holds_variables(params):
        roots = {("params", name): name for name in params}
        params = params["params"]
    elif is_mapping(params):
        roots = {("params",): "params"}
    for name, node in top.items():
        if name in ("params", *beside.names) or not is_mapping(node):
            continue
        inner = node if isinstance(node, dict) else {}
        if name == "nnx_aux" and is_mapping(inner.get("model")):
            roots[name, "model"] = name
        elif name in COLLECTIONS:
            roots[(name,)] = name
        elif inner and all(key in COLLECTIONS and is_mapping(c) for key, c in inner.items()):
            roots |= {(name, key): key for key in inner}
        elif _is_collection(inner, params, bool(beside.names)):
            roots[(name,)] = name
    places = collections.defaultdict(list)
    for path, name in roots.items():
        places[name].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    if twice:
        globs = [format_glob(path) + "/**" for paths in twice.values() for path in paths]
        raise TreeMismatchError(
            "a collection is saved in two places",
            [f"`{name}`: {named(*paths)}" for name, paths in twice.items()],
            [Hint(("drop", glob)) for glob in globs],
        )
    return roots


def _is_collection(node: Node, params: Any, trained: bool) -> bool:
    """Whether a container beside `params` is a collection of the user's own: of arrays, which are
    no copy of the parameters; in a train state, of the same modules as the parameters."""
    leaves = list(leaves_of(node))
    if not leaves or isinstance(leaves[0].path[1], int) or not all(map(_may_vary, leaves)):
        return False
    modules = params if isinstance(params, dict) else {}
    return (not trained or node.keys() <= modules.keys()) and not _same_leaves(node, modules)


def _may_vary(leaf: SavedLeaf) -> bool:
    """Whether a leaf may be a variable of Linen's: an array, and neither a number nor a key."""
    number = getattr(leaf.value, "value_type", "") == "scalar"
    return leaf.is_array and not number and dtype_name(leaf) != "key"


def _same_leaves(node: Any, other: Any) -> bool:
    """Whether two trees have arrays at the same paths, in boxes or not."""
    if array(node) or array(other):
        return bool(array(node) and array(other))
    if not isinstance(node, dict) or not isinstance(other, dict) or node.keys() != other.keys():
        return False
    return all(_same_leaves(node[key], other[key]) for key in node)


@dataclasses.dataclass
class Evidence:
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


def model_marks(top: Any, at: Path = ()) -> Evidence:
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
    marks = Evidence()
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


def add_training_marks(beside: Training, marks: Evidence) -> None:
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
