"""A saved tree as nested dicts with text keys, and the levels named `value` in it: which of them
Orbax wrote for Linen's boxes and NNX's variables, and which are the user's own, as a parameter may
be called `value`. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.convert.module_tree import AUTOMATIC
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_path

# What a module that is saved itself has beside its attributes.
BOOKKEEPING = "_pytree__state"
COLLECTIONS = frozenset(
    ("params", "batch_stats", "cache", "intermediates", "perturbations", "_overwrite_with_gradient")
)
# Names of arrays in the layers of both APIs; in NNX these are always variables.
_STANDARD = frozenset(("kernel", "bias", "scale", "embedding", "mean", "var", "key", "count"))


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


def in_variables(leaves: Iterable[SavedLeaf]) -> list[bool]:
    """Whether the leaves of an NNX state are in variables: what may be.

    In a state they are, but for attributes that are arrays themselves. In a pure dict none is, but
    a parameter may be called `value`. What the layers of both APIs hold tells these apart.
    """
    arrays = [leaf for leaf in leaves if leaf.is_array]
    held = [leaf.is_standard for leaf in arrays if leaf.lone is not None]
    bare = [leaf.is_standard for leaf in arrays if leaf.lone is None]
    if not held or not bare:
        return [bool(held)]
    return [True, False] if any(held) == any(bare) else [any(held)]


class Boxes:
    """The boxes of Linen variables.

    What holds nothing but `value` is a module with a parameter of that name, and no box, if it has
    a name as Linen gives modules or if another collection has other things in it. Any other is a
    box if one of them must be, by its name, or if there is nothing outside of them.

    Args:
      leaves: where collections are saved -> their leaves.

    Attributes:
      ambiguous: a leaf that was taken for a parameter only because nothing else is in a box.
    """

    def __init__(self, leaves: Mapping[Path, Sequence[SavedLeaf]]):
        self._holders = {
            leaf.keys[len(root) : -1]: leaf
            for root, below in leaves.items()
            for leaf in below
            if leaf.is_held
        }
        self._boxes: set[Path] = set()
        self.ambiguous: SavedLeaf | None = None
        if not self._holders:
            return
        modules: set[Path] = {()}
        for root, below in leaves.items():
            for leaf in below:
                path = leaf.keys[len(root) : -2 if leaf.is_held else -1]
                while path not in modules:
                    modules.add(path)
                    path = path[:-1]
        found = [
            path
            for path in self._holders
            if path not in modules and not AUTOMATIC.fullmatch(str(path[-1]))
        ]
        sure = any(self._holders[path].is_standard for path in found)
        if sure or all(leaf.is_held for below in leaves.values() for leaf in below):
            self._boxes.update(found)
        elif found:
            self.ambiguous = self._holders[found[0]]

    def hold(self, leaf: SavedLeaf, start: int) -> bool:
        """Whether a leaf of the model, or of an optimizer's state that mirrors it, is in a box.

        Args:
          leaf: the leaf.
          start: how many of its keys lead to the collection, or to the optimizer's state.
        """
        if not self._boxes or not leaf.is_held:
            return False
        path = leaf.keys[start:-1]
        endings = (path[i:] for i in range(len(path) + 1))
        return next((end for end in endings if end in self._holders), None) in self._boxes
