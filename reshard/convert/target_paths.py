"""Where leaves are saved in the tree that a conversion makes, and its step counter, which has
another integer dtype in the other API.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Leaf
from reshard.convert.layout import Layout
from reshard.convert.leafmap import LeafMap, Zeros
from reshard.convert.model import TargetTree
from reshard.errors import TreeMismatchError
from reshard.restore.matching import TargetLeaf
from reshard.sharding.mesh import SingleDeviceSharding, replicated
from reshard.storage.location import checked
from reshard.tree import Path, format_path

# Where a module and its optimizer are put that a Linen train state has as one.
_MODEL, _OPTIMIZER = ("model",), ("optimizer",)


@dataclasses.dataclass
class Part:
    """What becomes of the model's leaves, or of the optimizer's.

    Attributes:
      map: from the source to the target.
      masked: leaves of the target without a value.
      owners: the parameters that those are optimizer state of which the map drops.
    """

    map: LeafMap
    masked: Sequence[Path] = ()
    owners: Sequence[Path] = ()

    @property
    def made(self) -> dict[Path, Shape]:
        """The leaves of the target that are made of some of the source, with their shapes."""
        values = self.map.values.items()
        return {path: value.shape for path, value in values if not isinstance(value, Zeros)}


class TargetPaths:
    """Where leaves are saved.

    Args:
      layout: what the source is.
      to: the API that it is converted to.
      target: the tree that is to be made, if there is a model.
      copies: whether copies of the parameters are beside them.

    Attributes:
      prefix: what is ahead of the model's own tree, to make place for an optimizer beside it.
    """

    def __init__(self, layout: Layout, to: str, target: TargetTree | None, copies: bool):
        self._to = to
        self._target = target
        training = bool(layout.optimizer) or copies  # a step alone is no optimizer
        alone = target is None or not (
            target.layout.optimizer or target.layout.step or target.layout.beside
        )
        self.prefix: Path = _MODEL if to == "nnx" and training and alone else ()
        self._checked = set() if target is None else {path[0] for path in target.layout.beside}

    def model(self, path: Path) -> Path | None:
        """Where a leaf of the model is saved in the target; None if there is no place for it."""
        if self._target is not None:
            saved = self._target.layout.model.get(path)
            return None if saved is None else self.prefix + saved
        return (*self.prefix, *path, "value") if self._to == "nnx" else path

    def optimizer(self, path: Path) -> Path | None:
        """The same for a leaf of the optimizer's state."""
        if self._target is not None and not self.prefix:
            saved = self._target.layout.optimizer.get(path)
            return saved if saved and isinstance(self._target.leaves[saved], TargetLeaf) else None
        return (*_OPTIMIZER, "opt_state", *path, "value") if self._to == "nnx" else None

    def masked(self, path: Path) -> Path | None:
        """The same for one without a value, which only NNX has a variable for."""
        root = (*_OPTIMIZER, "opt_state")
        if self._target is not None and not self.prefix:
            root = (
                None
                if path in self._target.layout.optimizer
                else self._target.layout.optimizer_root
            )
        return None if root is None or self._to == "linen" else (*root, *path, "value")

    def beside(self, path: Path) -> Path | None:
        """The same for a leaf of a copy of the parameters, which has a key of its own at the top.
        If the model has none there, it is under its path in the model."""
        if self._target is not None and self.is_checked(path):
            return self._target.layout.beside.get(path)
        return (*path, "value") if self._to == "nnx" else path

    def is_checked(self, path: Path) -> bool:
        """Whether the model has a copy of the parameters under the same key."""
        return path[0] in self._checked

    def step(self) -> tuple[Path, np.dtype, str] | None:
        """Where the step counter is saved in the target, its dtype and how it is saved."""
        if self._target is None or self.prefix:
            place = (*_OPTIMIZER, "step", "value")
            training = self._to == "nnx" and self.prefix
            return (place, np.dtype(np.uint32), "jax.Array") if training else None
        saved = self._target.layout.step
        if saved is None:
            return None
        leaf = self._target.leaf(saved)
        if leaf.dtype is not None:
            return saved, leaf.dtype, "jax.Array"
        return saved, np.dtype(np.int64), "scalar"


def recounted(leaf: ArrayHandle, dtype: np.dtype) -> ArrayHandle:
    """A step counter in another integer dtype.

    Raises:
      TreeMismatchError: that does not hold its value.
    """
    value = np.asarray(checked(leaf.view().read(), f"{format_path(leaf.path)}: its stored bytes"))
    if int(value) != int(value.astype(dtype)):
        raise TreeMismatchError(
            f"{format_path(leaf.path)}: the step {int(value)} does not fit {dtype.name}"
        )
    return dataclasses.replace(leaf, dtype=dtype)


def on_host(leaf: ArrayHandle) -> ArrayHandle:
    """A leaf that is no device array, and so has no place on devices."""
    return dataclasses.replace(leaf, sharding=None, saved_sharding=None)


def is_step(path: Path, leaf: ArrayHandle, like: np.dtype) -> bool:
    """Whether leaves are the step counter, which has another integer dtype in NNX: `step` at the
    top, or in an optimizer there. The counts of an optimizer's own have the same in both."""
    integers = leaf.dtype.kind in "iu" and like.kind in "iu"
    keys = [key for key in path if key != "value"]
    return not leaf.shape and integers and len(keys) <= 2 and keys[-1:] == ["step"]


def counter(leaf: Leaf, dtype: np.dtype, value_type: str, like: ArrayHandle) -> Leaf:
    """A step counter in another integer dtype, which must hold its value."""
    assert isinstance(leaf, ArrayHandle)
    made = dataclasses.replace(recounted(leaf, dtype), value_type=value_type)
    if value_type == "scalar":
        return on_host(made)
    return beside(made, like) if made.sharding is None else made


def beside(leaf: ArrayHandle, like: ArrayHandle) -> ArrayHandle:
    """A leaf that is new among device arrays: replicated on the devices of one of them. Beside host
    values it is one, too; but Orbax takes only device arrays for PRNG keys."""
    sharding, kind = replicated(like.sharding), like.value_type
    if kind != "jax.Array" and leaf.key_impl is not None:
        import jax

        sharding, kind = SingleDeviceSharding(str(jax.local_devices()[0])), "jax.Array"
    value_type = kind if kind == "jax.Array" else "np.ndarray"
    return dataclasses.replace(
        leaf, value_type=value_type, sharding=sharding, saved_sharding=sharding
    )
