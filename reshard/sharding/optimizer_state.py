"""The parameter that a leaf of optimizer state belongs to, and its part of the parameter's spec.

A leaf belongs to the parameter whose path it ends with: `opt_state/0/mu/Dense_0/kernel` to
`params/Dense_0/kernel`. Names such as `mu` are not used.
"""

import collections
import itertools
from collections.abc import Collection, Iterable

from reshard.sharding.mesh import Shape, Spec
from reshard.tree import Path

# A leaf that fits more parameters than this belongs to none.
_MAX_OWNERS = 8


def below_params(paths: Collection[Path], name: str = "params") -> set[Path]:
    """The paths below the key `name` closest to the root."""
    depth = min((path.index(name) for path in paths if name in path), default=-1)
    return {path for path in paths if depth >= 0 and path[depth : depth + 1] == (name,)}


class Parameters:
    """The parameters of a state, found by the ends of other paths.

    A path may end like several parameters: `mu/w` like `params/w` and like `params/mu/w`. Then the
    prefix decides below which the most leaves end like parameters, because optimizer state consists
    of trees with the parameters' structure.
    """

    def __init__(self, paths: Iterable[Path], others: Iterable[Path]):
        self._by_ending: dict[tuple[str, ...], list[Path]] = {}
        for path in sorted(paths, key=len):
            keys = tuple(map(str, path))
            for start in range(len(keys)):
                owners = self._by_ending.setdefault(keys[start:], [])
                if not owners or (len(path) == len(owners[0]) and len(owners) <= _MAX_OWNERS):
                    owners.append(path)
        self._below: collections.Counter[tuple[str, ...]] = collections.Counter()
        for path in others:
            keys = tuple(map(str, path))
            starts = range(len(keys))
            self._below.update(keys[:start] for start in starts if keys[start:] in self._by_ending)

    def followed_by(self, path: Path) -> list[Path]:
        """The parameters with the shortest paths that share an ending with `path`."""
        keys = tuple(map(str, path))
        starts = [start for start in range(len(keys)) if keys[start:] in self._by_ending]
        if not starts:
            return []
        start = max(starts, key=lambda start: (self._below[keys[:start]], -start))
        owners = self._by_ending[keys[start:]]
        return owners if len(owners) <= _MAX_OWNERS else []


def matching_part(path: Path, shape: Shape, parameter: Shape, spec: Spec) -> Spec | str:
    """The part of a parameter's spec that fits a leaf that belongs to it, or why no part does.

    The leaf may have the parameter's shape; that shape after further axes (a history of updates);
    that shape with some dimensions of size 1 (a sum that keeps them); some of its dimensions (a
    factored moment); or a single element. If two dimensions of the parameter have one size,
    the names `v_row` and `v_col` of `optax.scale_by_factored_rms` in the path decide.
    """
    if shape == parameter:
        return spec
    full = spec + ((),) * (len(parameter) - len(spec))
    ahead = len(shape) - len(parameter)
    if ahead >= 0 and shape[ahead:] == parameter:
        return ((),) * ahead + full
    if all(size == 1 for size in shape):
        return ()
    if ahead == 0 and all(a in (b, 1) for a, b in zip(shape, parameter, strict=True)):
        pairs = zip(shape, parameter, full, strict=True)
        return tuple(entry if a == b else () for a, b, entry in pairs)
    kept = [
        dims
        for dims in itertools.combinations(range(len(parameter)), len(shape))
        if tuple(parameter[dim] for dim in dims) == shape
    ]
    parts = {tuple(full[dim] for dim in dims) for dims in kept}
    if len(parts) > 1:
        named = _factor_dims(path, parameter)
        if named in kept:
            parts = {tuple(full[dim] for dim in named)}
    if len(parts) == 1:
        return parts.pop()
    if not parts:
        return f"its shape is not a part of the parameter's, {list(parameter)}"
    choices = " or ".join(sorted(map(str, kept)))
    return f"it may be over dimensions {choices} of the parameter's {list(parameter)}"


def _factor_dims(path: Path, parameter: Shape) -> tuple[int, ...] | None:
    """The dimensions that adafactor's `v_row` and `v_col` keep: all but the largest, and all but
    the second largest. Of equal dimensions the later one counts as larger."""
    if len(parameter) < 2:
        return None
    if len(parameter) > 3 and len(set(parameter)) < len(parameter):
        return None  # optax's sort is not stable then, on some processors
    second, largest = sorted(range(len(parameter)), key=lambda dim: parameter[dim])[-2:]
    dropped = {"v_row": largest, "v_col": second}
    dims = [dropped[key] for key in path if key in dropped]
    if len(dims) != 1:
        return None
    return tuple(dim for dim in range(len(parameter)) if dim != dims[0])
