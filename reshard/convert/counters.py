"""Step counters, which have another integer dtype in the other API."""

import dataclasses

import numpy as np

from reshard.arrays.handle import ArrayHandle
from reshard.errors import TreeMismatchError
from reshard.storage.location import checked
from reshard.tree import Path, format_path


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
