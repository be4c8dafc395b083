"""The tree that a conversion is to make: what Orbax would save of the user's own model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.convert.definitions import definition_orders, linen_classes, nnx_outline
from reshard.convert.layout import Layout, detect
from reshard.convert.outline import Module, linen_outline
from reshard.errors import ArgumentError
from reshard.hints import Hint
from reshard.restore.matching import TargetLeaf
from reshard.restore.pytrees import StateLeaf, saved_tree, target_leaf
from reshard.restore.target import state_of
from reshard.tree import Path, format_path


@dataclasses.dataclass(frozen=True)
class Goal:
    """The tree of a model: its structure alone, which can be pickled and read without its classes.

    Attributes:
      leaves: saved path -> leaf, or the empty container that is saved there.
      random: saved paths of the state of random numbers.
      layout: what is where in it.
      outline: its modules.
    """

    leaves: dict[Path, Any]
    random: frozenset[Path]
    layout: Layout
    outline: Module

    def shapes(self) -> dict[Path, Shape]:
        """Path in the model -> shape."""
        return {path: self.leaf(saved).shape for path, saved in self.layout.model.items()}

    def leaf(self, saved: Path) -> TargetLeaf:
        """The leaf that is saved there."""
        found = self.leaves[saved]
        assert isinstance(found, TargetLeaf)
        return found


def goal_of(model: Any, api: str, role: str = "the model to convert to") -> Goal:
    """The tree that a model of an API saves. Nothing is computed.

    Args:
      model: the model.
      api: the API.
      role: what the model is, in errors.

    Raises:
      ArgumentError: the model is one of the other API, or has no tree.
    """
    _check_module(model, api, role)
    with definition_orders() as orders, linen_classes() as classes:
        state = state_of(model)
    _check_api(state, api, role, ran_linen=bool(classes))
    tree = saved_tree(state)
    values = {path: _as_saved(leaf) for path, leaf in tree.items()}
    held = {path: leaf for path, leaf in tree.items() if isinstance(leaf, StateLeaf)}
    leaves = {**tree, **{path: target_leaf(leaf) for path, leaf in held.items()}}
    random = frozenset(path for path, leaf in held.items() if _is_random(leaf))
    if api == "linen":
        layout = detect(values, _linen_kind(values))
        arrays = {path: values[saved] for path, saved in layout.model.items()}
        return Goal(leaves, random, layout, linen_outline(arrays, classes))
    place, outline = nnx_outline(state, orders)
    return Goal(leaves, random, detect(values, _nnx_kind(values, place)), outline)


def _check_module(model: Any, api: str, role: str) -> None:
    """Raises ArgumentError for a Linen module, which is no state and makes none by itself."""
    from flax import linen

    cls = model if isinstance(model, type) else type(model)
    if not issubclass(cls, linen.Module):
        return
    if api == "nnx":
        raise _other_api(f"{role} is the Linen module {cls.__name__}", api)
    raise ArgumentError(
        f"the Linen module {cls.__name__} has no variables without inputs",
        hints=["a function that returns its variables, `model.init(key, x)`, or a TrainState"],
    )


def _check_api(state: Any, api: str, role: str, ran_linen: bool) -> None:
    """Raises ArgumentError if a state is plainly one of the other API."""
    import jax
    from flax import nnx
    from flax.core import meta
    from flax.training.train_state import TrainState

    nnxs = (nnx.Pytree, nnx.Variable, nnx.State)
    nodes = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, (meta.AxisMetadata, *nnxs))
    )
    of_nnx = any(isinstance(node, nnxs) for node in nodes)
    boxed = any(isinstance(node, meta.AxisMetadata) for node in nodes)
    of_linen = ran_linen or boxed or isinstance(state, TrainState)
    if api == "nnx" and of_linen and not of_nnx:
        raise _other_api(f"{role} is a state of Linen's", api)
    if api == "linen" and of_nnx and not of_linen:
        raise _other_api(f"{role} is a state of NNX's", api)


def _other_api(text: str, api: str) -> ArgumentError:
    other, needed = ("linen", "NNX") if api == "nnx" else ("nnx", "Linen")
    return ArgumentError(
        text,
        hints=[
            Hint(
                *(f"it must be {needed}'s: ", ("the_model",), " is what is converted to, "),
                *(("the_source",), " what the checkpoint is of"),
            ),
            Hint((f"to_{other}",), ", if the other way is meant"),
        ],
    )


def _is_random(leaf: StateLeaf) -> bool:
    """Whether it is the state of random numbers."""
    return any(base.__name__ == "RngState" for base in type(leaf.wrapper).__mro__)


def _as_saved(leaf: Any) -> Any:
    """A leaf as it is in a checkpoint, where numbers are arrays."""
    value = leaf.value if isinstance(leaf, StateLeaf) else leaf
    return np.asarray(value) if isinstance(value, int | float) else value


def _linen_kind(leaves: Mapping[Path, Any]) -> str:
    top = {str(path[0]) for path in leaves if path}
    if "params" not in top:
        return "linen-params"
    return "linen-train-state" if top & {"opt_state", "step"} else "linen-variables"


def _nnx_kind(leaves: Mapping[Path, Any], place: Path) -> str:
    top = {str(path[0]) for path in leaves if path}
    if place == ("model",):
        return "nnx-model-and-optimizer" if "opt_state" in top else "nnx-model"
    if place:
        raise ArgumentError(
            f"the NNX model is at `{format_path(place)}`",
            hints=['give the model alone, or `{"model": model, "optimizer": optimizer}`'],
        )
    held = any(path[-1:] == ("value",) for path in leaves)
    return "nnx-state" if held else "nnx-pure-dict"
