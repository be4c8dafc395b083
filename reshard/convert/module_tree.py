"""Outlines: the modules of a model as a tree, with what is known of each: its class, the order in
which it was made, its leaves. Pure: made of paths.

Linen's paths say more than names. A submodule without a name of its own is called after its class
and a counter (`Dense_0`, `Dense_1`), so its name tells class and order. NNX's paths are attributes;
classes and order come from the model itself (see `reshard.convert.model`).
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
# Transforms that name a class after themselves, as in `ScanCheckpointBlock`. `Map_variables` is not
# among them: what it stores need not be what the class uses.
_LIFT = re.compile(r"(Checkpoint|Jit|Vmap|Scan|Remat_scan|Fold_rngs)(?=_*[A-Z])")
# Ends the name of a class of the user's own that is called like one of flax's.
OWN = "'"
# Begins the class of a Linen module with a name that only looks like one that Linen gives.
GIVEN = "="
# The collection of what only NNX has, below its paths there: MaxText's runs of NNX save it so.
AUXILIARY = "nnx_aux"
# Variables that hold random numbers.
RNG_KINDS = ("RngState", "RngKey", "RngCount")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a model.

    Attributes:
      path: its path relative to the model, all text: of several the primary one, as
        `reshard.restore.pytrees.flatten_state` has it. In Linen the collection comes first.
      shape: its shape.
      dtype: its dtype.
      kind: its collection in Linen; the class of its variable in NNX, `""` for an array without a
        variable and where only paths are known.
    """

    path: tuple[str, ...]
    shape: Shape
    dtype: Any
    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A module, or a container of modules.

    Attributes:
      path: where it is; without a collection.
      kind: its class, `""` where it is not known. In Linen as a name has it, with the names of
        transforms before it (`ScanBlock`); in NNX also `List`, `list`, `Dict`, `dict`, `tuple`.
        With `OWN` behind it if it is known to be only called like a class of flax's.
      index: in Linen the counter in an automatic name; None for a name that was given.
      children: what is in it, by name.
      leaves: its own leaves, by name; in Linen one for each collection that has it.
      ordered: whether `children` are in the order in which they were defined.
      repeated: names of children that are also elsewhere, and were defined there first.
    """

    path: tuple[str, ...]
    kind: str = ""
    index: int | None = None
    children: Mapping[str, "Module"] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, tuple[Leaf, ...]] = dataclasses.field(default_factory=dict)
    ordered: bool = False
    repeated: frozenset[str] = frozenset()

    @functools.cached_property
    def filled(self) -> bool:
        """Whether there is a leaf in it, other than random numbers."""
        own = any(leaf.kind not in RNG_KINDS for held in self.leaves.values() for leaf in held)
        return own or any(child.filled for child in self.children.values())

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The classes of what is in it, itself included, as far as there are leaves."""
        if not self.filled:
            return frozenset()
        below = (child.kinds for child in self.children.values())
        return frozenset((self.kind,)).union(*below) - {""}

    @functools.cached_property
    def unknown(self) -> frozenset[frozenset[str]]:
        """What the modules without a known class in it, itself included, consist of."""
        own = frozenset((self.parts,)) if not self.kind and self.filled else frozenset()
        return own.union(*(child.unknown for child in self.children.values()))

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Names of its own leaves and of its children."""
        return frozenset(self.leaves) | {n for n, child in self.children.items() if child.filled}

    @functools.cached_property
    def tree(self) -> tuple[Any, ...]:
        """All that is in it, less where it is: equal for layers that are alike."""
        own = ((n, tuple((x.kind, x.shape) for x in held)) for n, held in self.leaves.items())
        inside = ((name, child.tree) for name, child in self.children.items())
        return self.kind, tuple(sorted(own)), tuple(sorted(inside))

    def all_leaves(self) -> Iterator[Leaf]:
        """Every leaf in it."""
        for held in self.leaves.values():
            yield from held
        for child in self.children.values():
            yield from child.all_leaves()


def linen_outline(
    leaves: Mapping[Path, Any], classes: Mapping[tuple[str, ...], str] | None = None
) -> Module:
    """The outline of a Linen model.

    Args:
      leaves: path with the collection first -> anything with a shape and a dtype. Their order does
        not matter.
      classes: path of a module without collection -> its class, as `linen_classes` notes them;
        needed only for modules with names of their own.
    """
    classes = classes or {}
    entries: dict[tuple[str, ...], list[Leaf]] = {}
    for path in sorted(leaves, key=natural):
        keys, value = tuple(map(str, path)), leaves[path]
        leaf = Leaf(keys, tuple(value.shape), value.dtype, keys[0])
        entries.setdefault(keys[1:], []).append(leaf)

    def describe(path: tuple[str, ...]) -> dict[str, Any]:
        automatic = AUTOMATIC.fullmatch(path[-1]) if path else None
        named = classes.get(path, "")
        if automatic is not None and not named.startswith(GIVEN):
            kind = automatic[1] + (OWN if named.endswith(OWN) else "")
            if not named or named in (base for base, _ in unlifted(kind)):
                return {"kind": kind, "index": int(automatic[2])}
        return {"kind": named.removeprefix(GIVEN)}

    return _module((), _nested(entries), describe)


def bare_leaves(shapes: Mapping[Path, Shape], dtypes: Mapping[Path, Any]) -> dict[Path, Leaf]:
    """Leaves of which nothing but paths, shapes and dtypes is known."""
    return {
        path: Leaf(tuple(map(str, path)), shape, dtypes[path], "") for path, shape in shapes.items()
    }


def path_outline(leaves: Mapping[Path, Any]) -> Module:
    """The outline of an NNX model of which only the paths are known."""
    found = {}
    for path in sorted(leaves, key=natural):
        keys, value = tuple(map(str, path)), leaves[path]
        found[keys] = Leaf(keys, tuple(value.shape), value.dtype, "")
    return outline_below((), found)


def outline(
    api: str, leaves: Mapping[Path, Any], classes: Mapping[tuple[str, ...], str] | None = None
) -> Module:
    """The outline of a model of an API, of whose classes no more than these are known."""
    return linen_outline(leaves, classes) if api == "linen" else path_outline(leaves)


def outline_below(path: tuple[str, ...], leaves: Mapping[tuple[str, ...], Leaf]) -> Module:
    """The outline of a part of a model of which only paths are known."""
    entries = {inner: [leaf] for inner, leaf in leaves.items()}
    return _module(path, _nested(entries), lambda path: {})


def by_path(module: Module) -> dict[tuple[str, ...], Module]:
    """The modules in one, by path: every path of those that have several."""
    found: dict[tuple[str, ...], Module] = {}
    pending: list[tuple[tuple[str, ...], Module]] = [((), module)]
    while pending:
        path, at = pending.pop()
        found[path] = at
        pending += [((*path, name), child) for name, child in at.children.items()]
    return found


def modules_before(
    leaves: Mapping[Path, Collection[Path]], begin: int
) -> dict[tuple[str, ...], dict[tuple[str, ...], None]]:
    """The paths of modules after a map has given leaves other paths -> their paths before: a module
    is still the same if leaves have the same names in it.

    Args:
      leaves: path of a leaf -> the paths that it comes from.
      begin: where the path of a module begins in that of a leaf, in Linen behind the collection.
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for path, sources in leaves.items():
        for source in sources:
            here, there = tuple(map(str, path[begin:])), tuple(map(str, source[begin:]))
            while here and there and here[-1] == there[-1]:
                here, there = here[:-1], there[:-1]
                found.setdefault(here, {})[there] = None
    return found


def classes_after(
    module: Module, leaves: Mapping[Path, Collection[Path]]
) -> dict[tuple[str, ...], str]:
    """The classes of Linen modules after a map has given leaves other paths, as `linen_outline`
    takes them. Arguments: the outline before; the leaves as `modules_before` takes them."""
    known, found = by_path(module), {}
    for here, before in modules_before(leaves, 1).items():
        there = next(iter(before))
        was = known.get(there, Module(there))
        given = was.kind and was.index is None and here[-1:] == there[-1:]
        found[here] = f"{GIVEN if given else ''}{was.kind}"
    return found


def joined(module: Module, other: Module) -> Module:
    """An NNX outline with what is in another one besides, of which only the paths are known."""
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
    """An outline less some leaves. Modules stay, and count, even if nothing is left in them."""
    if not paths:
        return module
    gone = {tuple(map(str, path)) for path in paths}
    made: dict[int, Module] = {}

    def less(module: Module) -> Module:
        if id(module) not in made:
            held = {
                name: tuple(leaf for leaf in leaves if leaf.path not in gone)
                for name, leaves in module.leaves.items()
            }
            made[id(module)] = dataclasses.replace(
                module,
                children={name: less(child) for name, child in module.children.items()},
                leaves={name: leaves for name, leaves in held.items() if leaves},
            )
        return made[id(module)]

    return less(module)


@functools.lru_cache(maxsize=1024)
def unlifted(kind: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What the class may be that a Linen name has: the name itself, and what is left of it without
    the names of transforms; each with those transforms."""
    found: list[tuple[str, tuple[str, ...]]] = [(kind, ())]
    while match := _LIFT.match(found[-1][0]):
        kind, lifts = found[-1]
        found.append((kind[match.end() :], (*lifts, match[1])))
    return tuple(found)


def _nested(entries: Mapping[tuple[str, ...], list[Leaf]]) -> dict[tuple[str, str], Any]:
    """Nested dicts with lists of leaves at the ends. A name may be both, so keys say what it is."""
    root: dict[tuple[str, str], Any] = {}
    for path, leaves in entries.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(("module", key), {})
        node[("leaves", path[-1] if path else "")] = leaves
    return root


def _module(path: tuple[str, ...], node: dict[Any, Any], describe: Any) -> Module:
    children, leaves = {}, {}
    for (what, name), value in node.items():
        if what == "leaves":
            leaves[name] = tuple(value)
        else:
            children[name] = _module((*path, name), value, describe)
    return Module(path=path, children=children, leaves=leaves, **describe(path))
