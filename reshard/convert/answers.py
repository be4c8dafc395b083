"""What an alignment of two models answers, leaves open, and finds at odds. Pure."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from reshard.arrays.boxes import Shape
from reshard.convert.leafmap import LeafMap, Row, Zeros, from_rows
from reshard.convert.outline import Leaf
from reshard.hints import Hint
from reshard.tree import Path, format_path

# Where one side has an array for each layer, and the other has one for all of them.
STACKED = "one side is stacked and the other is not"
_MOST_LISTED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Abstention:
    """What structure does not decide.

    Attributes:
      linen: paths on Linen's side: of modules, without a collection, or of leaves.
      nnx: paths of what they may be in NNX.
      reason: why it is not decided.
      hint: what may help, where that is known.
    """

    linen: tuple[Path, ...]
    nnx: tuple[Path, ...]
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        candidates = f", perhaps {listed(self.nnx)}" if self.nnx else ""
        return f"{listed(self.linen)}{candidates}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """Leaves that should be one by their names, and cannot be.

    Attributes:
      linen: Linen's: one, or those that would be joined.
      nnx: NNX's.
      reason: what stands against it.
    """

    linen: tuple[Leaf, ...]
    nnx: Leaf
    reason: str

    def __str__(self) -> str:
        inputs = " + ".join(format_path(leaf.path) for leaf in self.linen)
        return f"{inputs} and {format_path(self.nnx.path)}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Alignment:
    """What is known of a conversion.

    Attributes:
      steps: from Linen's leaves to NNX's.
      must_be_zero: leaves of Linen's without a place in NNX, which have no effect if they are zero.
      abstentions: what is left open.
      mismatches: leaves that should be one and differ in shape or collection.
      modules: paths of the modules of both sides that are one.
      groups: those of them that class and order have paired, by class.
    """

    steps: tuple[Row, ...]
    must_be_zero: tuple[Path, ...]
    abstentions: tuple[Abstention, ...]
    mismatches: tuple[Mismatch, ...]
    modules: tuple[tuple[Path, Path], ...] = ()
    groups: tuple[tuple[tuple[Path, Path], ...], ...] = ()

    def leaf_map(self, leaves: Mapping[Path, Shape], zeros: dict[Path, Zeros]) -> LeafMap:
        """The map of what is decided.

        Args:
          leaves: Linen's, with their shapes.
          zeros: those that must be zero.
        """
        taken = {path for row in self.steps for path in row.inputs}
        made = from_rows(self.steps, {p: shape for p, shape in leaves.items() if p in taken})
        return LeafMap(made.values, made.origin, (), zeros)


def listed(paths: Sequence[Path]) -> str:
    """Paths as text, of many the first and the last."""
    texts = [format_path(path) for path in paths]
    if len(texts) > _MOST_LISTED:
        return f"{', '.join(texts[: _MOST_LISTED - 1])}, ... {texts[-1]} ({len(texts)})"
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def stack_hint(apart: Path, together: Path) -> str:
    """How to stack layers of Linen's. `{}` in `apart` is the number of a layer."""
    return f'reshard.stack(ckpt, "{format_path(apart)}", into="{format_path(together)}")'


def unstack_hint(together: Path, apart: Path) -> str:
    """How to unstack layers of Linen's. `{}` in `apart` is the number of a layer."""
    return f'reshard.unstack(ckpt, "{format_path(together)}", into="{format_path(apart)}")'


def rule_hint(abstentions: Sequence[Abstention], leaves: Iterable[Path], to: str) -> str:
    """What a map is to decide one of several abstentions; the candidate is any of those there are.

    Args:
      abstentions: what is open.
      leaves: the leaves of the source.
      to: the API that is converted to.
    """
    entry = next((entry for entry in abstentions if entry.nnx), abstentions[0])
    linen, nnx = entry.linen[0], (*entry.nnx, ("NAME",))[0]
    known = set(leaves)
    inside = sorted({str(path[0]) for path in known if path[1 : len(linen) + 1] == linen})
    before, after = format_path(linen), format_path(nnx)
    if to == "linen":
        before, after = (
            (f"{after}$", before) if nnx in known else (f"{after}/", f"params/{before}/")
        )
    elif len(inside) > 1:
        before, after = f"({'|'.join(inside)})/{before}/", f"\\1/{after}/"
    elif inside:
        before, after = f"{inside[0]}/{before}/", f"{inside[0]}/{after}/"
    else:  # it is a leaf
        before += "$"
    return Hint(("map_file",), f" decides, by rules such as: from = '^{before}', to = '{after}'")


def difference(linen: Shape, nnx: Shape) -> str:
    """How two shapes differ, and what they look like."""
    text = f"{list(linen)} in Linen, {list(nnx)} in NNX"
    if linen == nnx[::-1]:
        return f"{text}: transposed"
    if sorted(linen) == sorted(nnx):
        return f"{text}: its axes are in another order"
    more, less = sorted((linen, nnx), key=len, reverse=True)
    if len(more) == len(less) + 1:
        for axis, size in enumerate(more):
            if more[:axis] + more[axis + 1 :] == less:
                side = "Linen" if more is linen else "NNX"
                return f"{text}: {side} has a stack of {size} along axis {axis}"
    if math.prod(linen) == math.prod(nnx):
        return f"{text}: reshaped"
    return text
