"""A saved tree as it is looked at to find out what it is: nested dicts with text keys, a leaf with
the level named `value` that may be a box's or a variable's. Where a train state has what. Pure.
"""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import TreeMismatchError
from reshard.hints import Hint
from reshard.tree import Path, format_path

# What a module that is saved itself has beside its attributes.
BOOKKEEPING = "_pytree__state"
# `Dense_0`: what Linen calls modules without a name.
AUTOMATIC = re.compile(r"[A-Z][A-Za-z0-9_]*_\d+")
COLLECTIONS = frozenset(
    (
        "params",
        "batch_stats",
        "cache",
        "intermediates",
        "perturbations",
        "_overwrite_with_gradient",
    )
)
# Names of arrays in the layers of both APIs; in NNX these are always variables.
_STANDARD = frozenset(("kernel", "bias", "scale", "embedding", "mean", "var", "key", "count"))
_OPTIMIZERS = ("opt_state", "optimizer", "opt", "optimizer_state")


class SavedLeaf(NamedTuple):
    """A leaf.

    Attributes:
      keys: its path, with keys as text.
      path: its saved path.
      value: the leaf; an array is what has a dtype.
      lone: the depth of the last level that is named `value` and alone in its container.
    """

    keys: tuple[str, ...]
    path: Path
    value: Any
    lone: int | None

    @property
    def is_array(self) -> bool:
        """Whether it is an array, and not empty or text."""
        return hasattr(self.value, "dtype")

    @property
    def is_held(self) -> bool:
        """Whether it is all there is in a level named `value`."""
        return self.lone == len(self.keys) - 1

    @property
    def is_standard(self) -> bool:
        """Whether it has a name that the layers of both APIs use."""
        return self.keys[-2 if self.is_held else -1] in _STANDARD

    def below(self, start: int, held: bool) -> Path:
        """Its path below the first keys, without the lone level if that holds it."""
        if not held or self.lone is None or self.lone < start:
            return self.keys[start:]
        return self.keys[start : self.lone] + self.keys[self.lone + 1 :]


Node = dict[str, Any]  # of further ones, and a SavedLeaf at the end of each path


def nested(ckpt: Mapping[Path, Any]) -> tuple[Node, list[SavedLeaf]]:
    """The tree as nested dicts, and its leaves in order.

    Raises:
      TreeMismatchError: a list position and a key that is printed as it is are in one place.
    """
    root: Node = {}
    problems = []
    texts = [tuple(map(str, path)) for path in ckpt]
    for keys in texts:
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if node is None:  # a leaf
                break
        if node is None or keys[-1] in node:
            problems.append(named(keys))
        else:
            node[keys[-1]] = None
    if problems:
        raise TreeMismatchError(
            "a list position and a key of the same name are in one place", problems
        )
    leaves = []
    for keys, (path, value) in zip(texts, ckpt.items(), strict=True):
        node, lone = root, None
        for depth, key in enumerate(keys[:-1]):
            if key == "value" and depth and len(node) == 1:
                lone = depth
            node = node[key]
        if keys[-1] == "value" and node is not root and len(node) == 1:
            lone = len(keys) - 1
        node[keys[-1]] = SavedLeaf(keys, path, value, lone)
        leaves.append(node[keys[-1]])
    return root, leaves


def leaves_of(node: Any) -> Iterator[SavedLeaf]:
    """The leaves of a node, in order; None has none."""
    if isinstance(node, SavedLeaf):
        yield node
    elif node is not None:
        for child in node.values():
            yield from leaves_of(child)


def child(node: Any, key: str) -> Any:
    """What a node has under a key, if anything."""
    return node.get(key) if isinstance(node, dict) else None


def is_mapping(node: Any) -> bool:
    """Whether it is a dict, if an empty one."""
    return isinstance(node, dict) or (isinstance(node, SavedLeaf) and node.value == {})


def array(node: Any) -> SavedLeaf | None:
    """The array that a node is, or that it holds in a level named `value`."""
    if isinstance(node, dict) and list(node) == ["value"]:
        node = node["value"]
    return node if isinstance(node, SavedLeaf) and node.is_array else None


def dtype_name(node: Any) -> str:
    """The dtype of such an array, `key` for typed PRNG keys; nothing for other nodes."""
    leaf = array(node)
    if leaf is None:
        return ""
    name = leaf.value.dtype.name
    typed = getattr(leaf.value, "key_impl", None) is not None or name.startswith("key<")
    return "key" if typed else name


def named(*paths: Sequence[str | int]) -> str:
    """Paths, as they are told."""
    return ", ".join(f"`{format_path(tuple(path))}`" for path in paths)


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
        globs = [format_path(path) + "/**" for paths in twice.values() for path in paths]
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
