"""Which levels named `value` Orbax wrote for Linen's boxes and NNX's variables, and which are the
user's own: a parameter may be called `value`. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

from reshard.convert.saved import AUTOMATIC, SavedLeaf
from reshard.tree import Path


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
      doubtful: a leaf that was taken for a parameter only because nothing else is in a box.
    """

    def __init__(self, leaves: Mapping[Path, Sequence[SavedLeaf]]):
        self._holders = {
            leaf.keys[len(root) : -1]: leaf
            for root, below in leaves.items()
            for leaf in below
            if leaf.is_held
        }
        self._boxes: set[Path] = set()
        self.doubtful: SavedLeaf | None = None
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
            self.doubtful = self._holders[found[0]]

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
