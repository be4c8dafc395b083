"""What has been decided of a conversion."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.checkpoint import Leaf
from reshard.convert.leafmap import LeafMap, Zeros
from reshard.tree import Path


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


@dataclasses.dataclass(frozen=True)
class Decision:
    """A conversion.

    Attributes:
      map: from the saved leaves of the source to those of the target.
      model: that of the model's leaves, by their paths in the model.
      initial: saved paths of leaves of the target that keep the model's own initial value.
      initial_names: the same, as the map names them, less optimizer state that does so because its
        parameters do.
      counters: saved paths of step counters of the target -> their dtype and how they are saved.
      empty: leaves of the target that are empty containers.
      prefix: what the target has ahead of the model's own tree.
      notes: what the user should know.
    """

    map: LeafMap
    model: LeafMap
    initial: tuple[Path, ...]
    initial_names: tuple[Path, ...]
    counters: dict[Path, tuple[np.dtype, str]]
    empty: dict[Path, Leaf]
    prefix: Path
    notes: tuple[str, ...]
