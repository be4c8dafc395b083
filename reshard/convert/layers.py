"""The standard layers of Flax's two APIs: corresponding classes and leaves. Pure.

| Linen                                        | NNX                           |                   |
|----------------------------------------------|-------------------------------|-------------------|
| `Dense`, `DenseGeneral`                      | `Linear`, `LinearGeneral`     | the same leaves   |
| `MultiHeadDotProductAttention` and its kinds | `MultiHeadAttention`          | the same leaves   |
| most others, and classes of the user's       | of the same name              | the same leaves   |
| `LSTMCell`, `OptimizedLSTMCell`              | `LSTMCell`                    | `if` -> `if_`     |
| the same                                     | `OptimizedLSTMCell`           | i, f, g, o joined |
| `GRUCell`                                    | `GRUCell`                     | r, z, n joined    |
| `SimpleCell`                                 | `SimpleCell`                  | `h` -> `dense_h`  |
| `WeightNorm`: `"Dense_0/kernel/scale"`       | `scales/('kernel',)`          | names only        |
| `SpectralNorm`: `"Dense_0/kernel/u"`         | `batch_stats/('kernel', 'u')` | names only        |
| `layers_0`, `d_a`, `n_0_1`                   | `layers/0`, `d/a`, `n/0/1`    | lists and dicts   |

A standard layer is one whose class comes from flax. For NNX that is known. For Linen it is known
only from the model: a name like `Dense_0` may be that of a user's class.

A collection in Linen is the class of a variable in NNX. `MGUCell`, `ConvLSTMCell` and `ConvLocal`
are not in NNX.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import Concat
from reshard.convert.module_tree import OWN, Leaf, Module, by_path, unlifted
from reshard.tree import Path, format_path

_LSTM = ("LSTMCell", "OptimizedLSTMCell")
# Class in Linen -> classes in NNX, where they are not called the same.
_COUNTERPARTS = {
    "Dense": ("Linear",),
    "DenseGeneral": ("LinearGeneral",),
    "MultiHeadDotProductAttention": ("MultiHeadAttention",),
    "SelfAttention": ("MultiHeadAttention",),
    "LSTMCell": _LSTM,
    "OptimizedLSTMCell": _LSTM,
    "MGUCell": (),
    "ConvLSTMCell": (),
    "ConvLocal": (),
    # Linen's users alone have classes of these names.
    "Linear": (),
    "LinearGeneral": (),
}
# Class in NNX -> the attributes that hold other modules. In a compact method of Linen, these are
# siblings of the module.
WRAPPERS = {
    "Sequential": ("layers",),
    "RNN": ("cell",),
    "Bidirectional": ("forward_rnn", "backward_rnn"),
    "WeightNorm": ("layer_instance",),
    "SpectralNorm": ("layer_instance",),
}
LISTS = ("List", "list", "tuple")
DICTS = ("Dict", "dict")
# Class of a variable -> the collection.
_COLLECTIONS = {
    "Param": "params",
    "BatchStat": "batch_stats",
    "Cache": "cache",
    "Intermediate": "intermediates",
    "Perturbation": "perturbations",
}
# Cell in NNX -> the gates in Linen, in the order in which they are joined.
_GATES = {"OptimizedLSTMCell": "ifgo", "GRUCell": "rzn", "SimpleCell": ("",), "LSTMCell": "ifgo"}
# Class in NNX -> the attribute of its own leaves, and the last key that their names lack.
_NORM_KEYS = {"WeightNorm": ("scales", ("scale",)), "SpectralNorm": ("batch_stats", ())}
# Axes that the leaves of a layer always have; one more is an axis of a stack.
_RANKS = {
    "Dense": {"kernel": 2, "bias": 1},
    "Linear": {"kernel": 2, "bias": 1},
    "Embed": {"embedding": 2},
    "BatchNorm": {"scale": 1, "bias": 1, "mean": 1, "var": 1},
    "GroupNorm": {"scale": 1, "bias": 1},
}
_ATTENTION = ("MultiHeadDotProductAttention", "SelfAttention", "MultiHeadAttention")
_STACKING = ("Scan", "Vmap", "Remat_scan")
# Layers whose leaves have one axis or more.
_NORMS = ("LayerNorm", "RMSNorm", "InstanceNorm")


# Stacks of layers: the axis of the layers on either side. Pure arithmetic on shapes.
#
# `nn.scan`, `nn.vmap` and `nnx.vmap` stack layers along any axis of a weight, the same one for a
# whole collection, and do not record which.


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The axis of the layers, before and after; from the end if it is negative."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"axis {self.before} to {self.after}"

    def order(self, rank: int) -> tuple[int, ...]:
        """The axes of an array of this rank, as `Transpose` takes them."""
        axes = list(range(rank))
        if axes:
            axes.insert(self.after % rank, axes.pop(self.before % rank))
        return tuple(axes)


NO_MOVE = Move(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """Linen leaves and the NNX leaf that they become.

    Attributes:
      inputs: the Linen leaves.
      output: the NNX leaf.
      join: how several become one.
      origin: what decided: `"path"` or `"structure"`.
      move: the move of the axis of a stack.
    """

    inputs: tuple[Leaf, ...]
    output: Leaf
    join: Concat | None = None
    origin: str = ""
    move: Move = NO_MOVE

    @property
    def shape(self) -> Shape:
        """The shape of the joined inputs."""
        shapes = [leaf.shape for leaf in self.inputs]
        return shapes[0] if self.join is None else self.join.shapes(shapes)[0]

    @property
    def fits(self) -> bool:
        """Whether the move makes this shape that of the NNX leaf."""
        shape = self.shape
        return tuple(shape[axis] for axis in self.move.order(len(shape))) == self.output.shape

    def moved(self, move: Move) -> "Match":
        """The match with a move. Inputs are joined along the last axis that is not the axis of the
        layers."""
        rank = len(self.inputs[0].shape)
        last = -2 if move.before % rank == rank - 1 else -1
        return dataclasses.replace(self, move=move, join=Concat(last) if self.join else None)

    @property
    def counts(self) -> bool:
        """Whether its shapes show that two modules are not the same. Only those of parameters do: a
        cache has the size of the batch."""
        return any(map(is_parameter, (*self.inputs, self.output)))

    @property
    def values(self) -> tuple[str, str]:
        """The collections of both sides if they do not agree; else the shapes."""
        if all(in_collection(leaf, self.output) for leaf in self.inputs):
            return str(list(self.shape)), str(list(self.output.shape))
        return self.inputs[0].kind, self.output.kind

    def __str__(self) -> str:
        one, other = self.values
        names = " + ".join(format_path(leaf.path) for leaf in self.inputs)
        return f"{names} and {format_path(self.output.path)}: {one} in Linen, {other} in NNX"


def moves(matches: Sequence[Match]) -> list[Move]:
    """The moves of one axis that fit all matches, if it has the same size in all. One of several
    moves with the same effect. Axes from the end are tried only together with the first."""
    shapes = [match.inputs[0].shape for match in matches]
    rank = min(map(len, shapes))
    if rank < (2 if any(match.join for match in matches) else 1):
        return []
    found: dict[Any, Move] = {}
    for before, after in itertools.product([*range(rank), *range(-rank, 0)], repeat=2):
        if min(before, after) < 0 and before != 0 != after:
            continue
        move = Move(before, after)
        moved = [match.moved(move) for match in matches]
        if len({shape[before] for shape in shapes}) == 1 and all(x.fits for x in moved):
            effect = tuple((move.order(len(x.shape)), x.join) for x in moved)
            found.setdefault(effect, move)
    return list(found.values())


# A recurrent cell: the matches of its leaves, and the Linen leaves without a place in NNX, which
# must be zero.
Cell = tuple[list[Match], list[Leaf]]


def counterparts(kind: str) -> list[tuple[str, ...]]:
    """Classes in NNX that a class in Linen may be, the likeliest first; each entry is a set of
    classes with the same leaves. The class may be lifted: `CheckpointBlock` is `Block`."""
    bases = [base for base, _ in unlifted(kind) if base]
    found = [_COUNTERPARTS.get(base, (base,)) for base in bases]
    own = [(f"{base}{OWN}",) for base in bases if not base.endswith(OWN)]
    return [classes for classes in (*found, *own) if classes]


def in_collection(linen: Leaf, nnx: Leaf) -> bool:
    """Whether a Linen leaf is in the collection of an NNX variable, as far as its class shows."""
    wanted = _COLLECTIONS.get(nnx.kind)
    if wanted is None or wanted == linen.kind:
        return True
    # A collection of the user's own may be any variable but a parameter.
    return wanted != "params" and linen.kind not in _COLLECTIONS.values()


def is_parameter(leaf: Leaf) -> bool:
    """Whether a leaf of either API is a parameter for certain."""
    return leaf.kind in ("params", "Param")


def is_container(module: Module) -> bool:
    """Whether it is a list or a dict, or may be one if its class is not known."""
    return module.kind in LISTS + DICTS or (not module.kind and not module.leaves)


def contents(module: Module) -> Iterator[tuple[str, Module | Leaf]]:
    """The members of the lists and dicts of an NNX module, under their names in Linen: `layers_0`
    for `layers/0`."""
    for name, child in module.children.items():
        if module.kind in LISTS:  # the list of a Sequential, by itself
            yield f"layers_{name}", child
        if child.kind == "Sequential" and "layers" in child.children:
            yield from _named(child.children["layers"], name)
        elif is_container(child):
            yield from _named(child, name)


def _named(container: Module, prefix: str) -> Iterator[tuple[str, Module | Leaf]]:
    for name, child in container.children.items():
        yield f"{prefix}_{name}", child
        if is_container(child):
            yield from _named(child, f"{prefix}_{name}")
    for name, (leaf, *_) in container.leaves.items():
        yield f"{prefix}_{name}", leaf


def is_stack(linen: Module, nnx: Module) -> bool:
    """Whether the leaves of a pair of modules are stacked along the axis of a scan or a vmap. A
    stack begins at a Linen name that shows it; if there is none, as high up as possible."""
    found = {_stacked(linen), _stacked(nnx)}
    if False in found:
        return False
    if _stacking(linen.kind) or True not in found:
        return bool(_stacking(linen.kind))
    return not any(map(_stacking, linen.kinds)) and (len(linen.parts) != 1 or bool(linen.leaves))


def may_lie_elsewhere(linen: Module) -> bool:
    """Whether the axis of a stack may be one that a user chose. `remat_scan` uses the first."""
    return "Remat_scan" not in _stacking(linen.kind)


def _stacking(kind: str) -> set[str]:
    """The transforms that stack weights, as the name of a class has them."""
    return {lift for _, lifts in unlifted(kind) for lift in lifts} & {*_STACKING}


def may_be_stack(module: Module) -> bool:
    """Whether a module of either API has several layers in one array each."""
    return bool(_stacking(module.kind) or _stacked(module))


def _stacked(module: Module, attention: bool = False) -> bool | None:
    """Whether all layers of a known rank have more axes than that; None if there are none."""
    found = None
    *_, (kind, _) = unlifted(module.kind)
    ranks = {"kernel": 3} if attention else _RANKS.get(kind, {})
    for name, (leaf, *_) in module.leaves.items():
        rank, least = len(leaf.shape), ranks.get(name)
        if (least is not None and rank <= least) or (kind in _NORMS and rank <= 1):
            return False
        found = found or least is not None or None
    for child in module.children.values():
        below = _stacked(child, kind in _ATTENTION)
        if below is False:
            return False
        found = found or below
    return found


def cell(linen: Module, nnx: Module) -> Cell | None:
    """The matches of a recurrent cell. None if the two modules are not cells, or have different
    classes or gates."""
    kinds = [base for base, _ in unlifted(linen.kind)]
    for kind, gates in _GATES.items():
        if nnx.kind not in ("", kind) or linen.leaves or linen.parts != _gate_names(gates):
            continue
        if linen.kind and not any(kind in _COUNTERPARTS.get(base, (base,)) for base in kinds):
            continue
        if kind == "LSTMCell":
            return _renamed(linen, nnx)
        # The gates of a SimpleCell are called `h` and `i`, which may be anything.
        if {"dense_i", "dense_h"} <= nnx.children.keys() and (
            nnx.kind or linen.kind or gates != ("",)
        ):
            return _joined(linen, nnx, gates)
    return None


def is_cell(nnx: Module) -> bool:
    """Whether a module is of a class that `cell` knows."""
    return nnx.kind in _GATES


def _gate_names(gates: Sequence[str]) -> set[str]:
    return {part + gate for part in "ih" for gate in gates}


def _renamed(linen: Module, nnx: Module) -> Cell | None:
    """The same gates; one has a name that is a keyword of Python."""
    matches = []
    for gate, module in linen.children.items():
        counterpart = nnx.children.get("if_" if gate == "if" else gate)
        if counterpart is None or module.parts != counterpart.parts:
            return None
        matches += [
            Match((leaf,), counterpart.leaves[name][0]) for name, (leaf,) in module.leaves.items()
        ]
    return matches, []


def _joined(linen: Module, nnx: Module, gates: Sequence[str]) -> Cell | None:
    """The kernels of all gates, and their biases, side by side."""
    matches, zeros = [], []
    for part in "ih":
        inside = [linen.children[part + gate].leaves for gate in gates]
        outside = dict(nnx.children[f"dense_{part}"].leaves)
        for name in dict.fromkeys(itertools.chain(*inside)):
            leaves = tuple(leaf for held in inside for leaf in held.get(name, ()))
            output = outside.pop(name, None)
            if output is None and name == "bias" and gates == "rzn":
                # Linen's GRUCell adds it before the product with r. NNX's has no such term.
                zeros += leaves
            elif output is None or len(leaves) != len(gates) or len({x.shape for x in leaves}) > 1:
                return None
            else:
                matches.append(Match(leaves, output[0], Concat(-1) if len(gates) > 1 else None))
        if outside:
            return None
    return matches, zeros


def is_norm(nnx: Module) -> bool:
    """Whether it is an NNX WeightNorm or SpectralNorm, as far as its leaves show."""
    return nnx.kind in ("", *_NORM_KEYS) and bool(_norm_leaves(nnx))


def normed(linen: Module, nnx: Module, outputs: Mapping[Path, Path]) -> list[Match]:
    """The matches of the leaves of a WeightNorm or SpectralNorm. Each is named after the leaf of
    another layer: in Linen from the scope of that layer, in NNX from the layer itself. `outputs`:
    Linen's parameters, without the collection, and their counterparts."""
    leaves = _norm_leaves(nnx)
    inside: dict[Path, Path] = {  # the model may have the layer at another path, too
        leaf.path: (*path, name)
        for path, module in by_path(nnx.children["layer_instance"]).items()
        for name, (leaf, *_) in module.leaves.items()
    }
    matches = []
    for name, held in linen.leaves.items():
        *inner, own = name.split("/")
        # The layer is a submodule, or a sibling.
        for scope in dict.fromkeys((linen.path, linen.path[:-1])):
            path = inside.get(outputs.get((*scope, *inner), ()), ())
            if path and (*path, own) in leaves:
                matches += [Match((leaf,), leaves[*path, own]) for leaf in held]
    return matches


def _norm_leaves(nnx: Module) -> dict[Path, Leaf]:
    """Leaves of a norm, by the path of the leaf that each is for in `layer_instance`, and its own
    name."""
    found: dict[Path, Leaf] = {}
    for kind, (attribute, own) in _NORM_KEYS.items():
        if nnx.kind in ("", kind) and {"layer_instance", attribute} <= nnx.children.keys():
            for name, (leaf, *_) in nnx.children[attribute].leaves.items():
                if name.startswith("("):  # a tuple of keys
                    found[(*re.findall(r"\w+", name), *own)] = leaf
    return found
