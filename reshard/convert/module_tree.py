"""Outlines: the tree of a model's modules, each with its class, order and leaves. Pure.

A Linen submodule without a name of its own is named after its class and a counter (`Dense_0`,
`Dense_1`), so its name shows class and order. NNX's paths are attributes; classes and order come
from the model itself (see `reshard.convert.model`).
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.tree import Path, natural

# A name that Linen gives: a class and a counter. Classes begin with a capital: `layers_0` is the
# first of a list.
AUTOMATIC = re.compile(r"(_*[A-Z]\w*)_(\d+)")
# Transforms that name a class after themselves, as in `ScanCheckpointBlock`. Not `Map_variables`,
# which may store other variables than the class uses.
_LIFT = re.compile(r"(Checkpoint|Jit|Vmap|Scan|Remat_scan|Fold_rngs)(?=_*[A-Z])")
# Ends the name of a user's class that has the name of one in flax.
OWN = "'"
# Begins the class of a Linen module that was given a name like those that Linen makes.
GIVEN = "="
# The collection in which MaxText's runs of NNX save what only NNX has, below its NNX paths.
AUXILIARY = "nnx_aux"
# Variables that hold random numbers.
RNG_KINDS = ("RngState", "RngKey", "RngCount")
# A path of which all keys are text.
Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a model.

    Attributes:
      path: its path in the model, all text; of several paths the primary one, as in
        `reshard.restore.pytrees.flatten_state`. In Linen the collection comes first.
      shape: its shape.
      dtype: its dtype.
      kind: its collection in Linen; the class of its variable in NNX, `""` for an array without a
        variable and where only paths are known.
    """

    path: Names
    shape: Shape
    dtype: Any
    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A module, or a container of modules.

    Attributes:
      path: its path, without a collection.
      kind: its class, `""` if it is not known. In Linen with the names of transforms before it
        (`ScanBlock`); in NNX also `List`, `list`, `Dict`, `dict`, `tuple`. `OWN` is appended to a
        user's class that has the name of one in flax.
      index: in Linen the counter in an automatic name; None for a name that was given.
      children: its submodules, by name.
      leaves: its own leaves, by name; in Linen one for each collection.
      ordered: whether `children` are in the order in which they were defined.
      repeated: names of children that another module defined first.
    """

    path: Names
    kind: str = ""
    index: int | None = None
    children: Mapping[str, "Module"] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, tuple[Leaf, ...]] = dataclasses.field(default_factory=dict)
    ordered: bool = False
    repeated: frozenset[str] = frozenset()

    @functools.cached_property
    def filled(self) -> bool:
        """Whether it has a leaf other than random numbers."""
        own = any(leaf.kind not in RNG_KINDS for held in self.leaves.values() for leaf in held)
        return own or any(child.filled for child in self.children.values())

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The classes of all modules with leaves in it, itself included."""
        if not self.filled:
            return frozenset()
        below = (child.kinds for child in self.children.values())
        return frozenset((self.kind,)).union(*below) - {""}

    @functools.cached_property
    def unknown(self) -> frozenset[frozenset[str]]:
        """The `parts` of all modules without a known class in it, itself included."""
        own = frozenset((self.parts,)) if not self.kind and self.filled else frozenset()
        return own.union(*(child.unknown for child in self.children.values()))

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Names of its own leaves and of its children."""
        return frozenset(self.leaves) | {n for n, child in self.children.items() if child.filled}

    @functools.cached_property
    def tree(self) -> tuple[Any, ...]:
        """Its structure without its path: equal for layers with the same structure."""
        own = ((n, tuple((x.kind, x.shape) for x in held)) for n, held in self.leaves.items())
        inside = ((name, child.tree) for name, child in self.children.items())
        return self.kind, tuple(sorted(own)), tuple(sorted(inside))

    def all_leaves(self) -> Iterator[Leaf]:
        """Every leaf in it."""
        for held in self.leaves.values():
            yield from held
        for child in self.children.values():
            yield from child.all_leaves()


def linen_outline(leaves: Mapping[Any, Any], classes: Mapping[Names, str] | None = None) -> Module:
    """The outline of a Linen model.

    Args:
      leaves: path with the collection first -> anything with a shape and a dtype. Their order does
        not matter.
      classes: path of a module without collection -> its class, as `linen_classes` notes them;
        needed only for modules with names of their own.
    """
    classes = classes or {}
    entries: dict[Names, list[Leaf]] = {}
    for path in sorted(leaves, key=natural):
        leaf = Leaf(path, tuple(leaves[path].shape), leaves[path].dtype, path[0])
        entries.setdefault(path[1:], []).append(leaf)

    def describe(path: Names) -> dict[str, Any]:
        automatic = AUTOMATIC.fullmatch(path[-1]) if path else None
        named = classes.get(path, "")
        if automatic is not None and not named.startswith(GIVEN):
            kind = automatic[1] + (OWN if named.endswith(OWN) else "")
            if not named or named in (base for base, _ in unlifted(kind)):
                return {"kind": kind, "index": int(automatic[2])}
        return {"kind": named.removeprefix(GIVEN)}

    return _module((), entries, describe)


def path_outline(leaves: Mapping[Any, Any], above: Names = ()) -> Module:
    """The outline of an NNX model, or of the part of one that is at a path, of which only the paths
    are known. `leaves`: `Leaf`s, or anything with a shape and a dtype."""
    entries = {}
    for path in sorted(leaves, key=natural):
        leaf = leaves[path]
        if not isinstance(leaf, Leaf):
            leaf = Leaf(path, tuple(leaf.shape), leaf.dtype, "")
        entries[path] = [leaf]
    return _module(above, entries, lambda path: {})


def by_path(module: Module) -> dict[Any, Module]:
    """All modules in a module, in the order of definition, by path; a shared one has several."""
    found: dict[Names, Module] = {}
    pending: list[tuple[Names, Module]] = [((), module)]
    while pending:
        path, at = pending.pop()
        found[path] = at
        pending += reversed([((*path, name), child) for name, child in at.children.items()])
    return found


def modules_before(leaves: Mapping[Any, Collection[Any]], begin: int) -> dict[Any, dict[Any, None]]:
    """The paths of modules after a map has renamed leaves -> their paths before. A module is the
    same if its leaves have the same names in it.

    Args:
      leaves: path of a leaf -> the paths of its sources.
      begin: the number of keys before the module in the path of a leaf: in Linen 1, the collection.
    """
    found: dict[Names, dict[Names, None]] = {}
    for path, sources in leaves.items():
        for source in sources:
            here, there = path[begin:], source[begin:]
            while here and there and here[-1] == there[-1]:
                here, there = here[:-1], there[:-1]
                found.setdefault(here, {})[there] = None
    return found


def classes_after(module: Module, leaves: Mapping[Any, Collection[Any]]) -> dict[Names, str]:
    """The classes of Linen modules after a map has renamed leaves, as `linen_outline` takes them.
    Arguments: the outline before; the leaves as `modules_before` takes them."""
    known, found = by_path(module), {}
    for here, before in modules_before(leaves, 1).items():
        there = next(iter(before))
        was = known.get(there, Module(there))
        given = was.kind and was.index is None and here[-1:] == there[-1:]
        found[here] = f"{GIVEN if given else ''}{was.kind}"
    return found


def joined(module: Module, other: Module) -> Module:
    """An NNX outline together with another one, of which only the paths are known."""
    children = dict(module.children)
    for name, child in other.children.items():
        children[name] = joined(children[name], child) if name in children else child
    return dataclasses.replace(
        module,
        children=children,
        leaves={**module.leaves, **other.leaves},
        ordered=module.ordered and len(children) == len(module.children),
    )


def without(module: Module, paths: Collection[Path]) -> Module:
    """An outline without some leaves. Modules stay, and count, even if they are empty then."""
    gone, made = {*paths}, dict[int, Module]()

    def less(module: Module) -> Module:
        if id(module) not in made:
            leaves = {
                name: held
                for name, leaves in module.leaves.items()
                if (held := tuple(leaf for leaf in leaves if leaf.path not in gone))
            }
            children = {name: less(child) for name, child in module.children.items()}
            made[id(module)] = dataclasses.replace(module, children=children, leaves=leaves)
        return made[id(module)]

    return less(module) if gone else module


@functools.lru_cache(maxsize=1024)
def unlifted(kind: str) -> tuple[tuple[str, Names], ...]:
    """The classes that a Linen name may stand for: the name itself, and the rest of it without the
    names of transforms; each with those transforms."""
    found: list[tuple[str, Names]] = [(kind, ())]
    while match := _LIFT.match(found[-1][0]):
        kind, lifts = found[-1]
        found.append((kind[match.end() :], (*lifts, match[1])))
    return tuple(found)


def _module(path: Names, entries: Mapping[Names, list[Leaf]], describe: Any) -> Module:
    """The outline of leaves by their paths below a path. A name may be a module's and a leaf's."""
    leaves: dict[str, tuple[Leaf, ...]] = {}
    inside: dict[str, dict[Names, list[Leaf]]] = {}
    for keys, held in entries.items():
        if len(keys) < 2:
            leaves["".join(keys)] = tuple(held)
        else:
            inside.setdefault(keys[0], {})[keys[1:]] = held
    children = {name: _module((*path, name), part, describe) for name, part in inside.items()}
    return Module(path=path, children=children, leaves=leaves, **describe(path))
