"""A user's state, flattened to leaves with tuple paths, and unflattened.

A state is any pytree of JAX: dicts, `TrainState`, optax's namedtuples, Linen's boxes, `nnx.State`.
NNX modules and optimizers are graphs, in which a variable may be in several places. All modules of
a state are split together, so that they keep sharing variables.

Linen's boxes (`Partitioned` and any other `AxisMetadata`) and NNX's `Variable`s hold one value and
describe its axes. They add no key to the path of a leaf. Orbax saves both as a level named `value`.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import ArgumentError
from reshard.restore.lazy_jax import jax
from reshard.restore.matching import TargetLeaf
from reshard.sharding.rules import Names
from reshard.tree import Path

MESH_HINT = 'jax.make_mesh((1, 8), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)'


@dataclasses.dataclass(frozen=True, eq=False)
class StateLeaf:
    """A leaf of a state: an array of any kind, a Python scalar or a string."""

    path: Path  # without the levels of boxes and variables
    value: Any
    wrapper: Any = None  # the box or variable that holds it
    aliases: tuple[Path, ...] = ()  # its other paths, if a module holds it in several places

    @property
    def is_array(self) -> bool:
        """Whether it is an array of any kind, abstract or real."""
        return hasattr(self.value, "shape") and hasattr(self.value, "dtype")

    @property
    def abstract(self) -> bool:
        """Whether it has no value."""
        real = jax.Array | np.ndarray | np.generic
        return self.is_array and not isinstance(self.value, real)

    @functools.cached_property
    def target(self) -> TargetLeaf:
        """The saved leaf that it needs."""
        value, like = self.value, functools.partial(TargetLeaf, self.path, aliases=self.aliases)
        if not self.is_array:
            return like(type(value).__name__)
        shape = tuple(value.shape)
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return like("key", shape, key_impl=_key_impls().get(value.dtype, str(value.dtype)))
        weak = bool(getattr(value, "weak_type", False))
        return like("array", shape, np.dtype(value.dtype), weak=weak)


@dataclasses.dataclass(frozen=True)
class State:
    """A flattened state."""

    leaves: tuple[StateLeaf, ...]  # in the order of the pytree, those of modules last
    masked: tuple[Path, ...]  # boxes and variables without a leaf: they hold optax's `MaskedNode`
    # Makes the same containers with other values, in the order of `leaves`. With `in_place`, it
    # updates real modules.
    unflatten: Callable[..., Any]


def check_state(target: Any) -> None:
    """Raises ArgumentError if a target is a Linen module, a class, a function or text."""
    name, call = getattr(target, "__name__", None), "model, mesh=mesh"
    linen, kind = imported("flax.linen"), target if isinstance(target, type) else type(target)
    if linen is not None and issubclass(kind, linen.Module):
        what, call = "a Linen module", f"{kind.__name__}(...), mesh=mesh, inputs=(x,)"
    elif isinstance(target, str):
        what = f"the text {target!r}"
    elif callable(target) and name is not None:
        what = f"a {'class' if isinstance(target, type) else 'function'}, `{name}`"
    else:
        return
    raise ArgumentError(
        f"the target is {what}, not a state or a `jax.sharding.Mesh`",
        hints=[f"reshard.target({call})", MESH_HINT],
    )


def flatten_state(state: Any) -> State:
    """Flatten a state."""
    nnx = imported("flax.nnx")
    places, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_wrapper_or_module)
    shared: Any = ()
    if any(is_module(value) for _, value in places):
        shared = nnx.Pytree | nnx.Variable  # modules may share these variables
    plain = [(key_path(keys), value) for keys, value in places if not isinstance(value, shared)]
    roots = [key_path(keys) for keys, value in places if isinstance(value, shared)]
    modules = tuple(value for _, value in places if isinstance(value, shared))
    graphdef, graph_state = nnx.split(modules) if modules else (None, ())
    aliases = _aliases(nnx.find_duplicates(modules)) if modules else {}
    inner, _ = jax.tree_util.tree_flatten_with_path(graph_state, is_leaf=is_wrapper_or_module)
    held = [(key_path(keys), value) for keys, value in inner]
    bare = _bare(modules, {path for path, _ in held})
    parts = [value for _, value in plain], graph_state, [value for _, value in bare]
    structure = jax.tree.structure(parts)

    leaves: list[StateLeaf] = []
    masked: list[Path] = []

    def add(path: Path, value: Any, others: Sequence[Path] = ()) -> None:
        keyed, _ = jax.tree_util.tree_flatten_with_path(value)
        wrapper = value if is_wrapper(value) else None
        for keys, leaf in keyed:
            below = key_path(keys[1:] if wrapper is not None else keys)
            also = tuple((*other, *below) for other in others)
            leaves.append(StateLeaf((*path, *below), leaf, wrapper, also))
        if wrapper is not None and not keyed:
            masked.append(path)

    for path, value in plain:
        add(path, value)
    in_plain = len(leaves)
    for path, value in (*held, *((tuple(map(str, path)), value) for path, value in bare)):
        others = _other_paths(aliases, tuple(map(str, path)))
        at, *also = ((*roots[int(number)], *rest) for number, *rest in (path, *others))
        add(at, value, also)

    def unflatten(values: Sequence[Any], in_place: bool = False) -> Any:
        outer, inside, loose = structure.unflatten(values)
        if in_place and modules and not any(leaf.abstract for leaf in leaves[in_plain:]):
            nnx.update(modules, inside)
            made = modules
        else:
            made = nnx.merge(graphdef, inside) if modules else ()
            for (path, _), value in zip(bare, loose, strict=True):
                _put(made, path, value)
        sources = iter(outer), iter(made)
        return jax.tree.unflatten(
            treedef, [next(sources[isinstance(value, shared)]) for _, value in places]
        )

    return State(tuple(leaves), tuple(masked), unflatten)


def _bare(modules: tuple[Any, ...], others: Collection[Path]) -> list[tuple[tuple, Any]]:
    """Abstract arrays that flax treats as structure of a module, with their paths in the graph:
    those in a container and in no variable, such as the scales of an `nnx.WeightNorm`; before flax
    0.12.5, all arrays in no variable."""
    return [
        (path, value)
        for path, value in (imported("flax.nnx").iter_graph(modules) if modules else ())
        if isinstance(value, jax.ShapeDtypeStruct) and tuple(map(str, path)) not in others
    ]


def _put(node: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a value in a container below modules."""
    for place, key in enumerate(path, 1):
        attribute = isinstance(key, str) and not issubclass(type(node), Mapping)
        if place < len(path):
            node = getattr(node, key) if attribute else node[key]
        elif attribute:
            setattr(node, key, value)
        else:
            node[key] = value


def saved_tree(state: Any) -> dict[Path, StateLeaf | dict | list | tuple | None]:
    """The leaves of a state and its empty containers, under the paths that Orbax gives them.

    Boxes and variables are a level named `value`, which is None if they hold no array. Empty dicts,
    lists and tuples stay as they are; namedtuples without fields (`EmptyState`) become None.
    """
    apart = flatten_state(state)
    tree: dict[Path, Any] = {(*path, "value"): None for path in apart.masked}
    for leaf in apart.leaves:
        level = () if leaf.wrapper is None else ("value",)
        tree[leaf.path + level] = leaf

    def is_empty(node: Any) -> bool:
        return not jax.tree.leaves(node, is_leaf=lambda inner: inner is not node)

    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: is_wrapper_or_module(node) or is_empty(node)
    )
    for keys, node in nodes:
        if is_wrapper_or_module(node) or not is_empty(node):
            continue
        mapping = {} if isinstance(node, Mapping) else None
        tree[key_path(keys)] = type(node)() if type(node) in (list, tuple) else mapping
    places = {key_path(keys): place for place, (keys, _) in enumerate(nodes)}

    def order(path: Path) -> tuple:
        place = next(places[path[:end]] for end in range(len(path) + 1) if path[:end] in places)
        return place, [(isinstance(key, str), key) for key in path]  # modules list theirs sorted

    return {path: tree[path] for path in sorted(tree, key=order)}


def imported(name: str) -> Any:
    """A module of Flax if the process has imported it, else None: an import is slow."""
    module = sys.modules.get(name)
    if module is not None and getattr(module.__spec__, "_initializing", False):
        return importlib.import_module(name)  # waits for the thread that imports it
    return module


def is_wrapper(value: Any) -> bool:
    """Whether it is a box of Linen or a variable of NNX."""
    meta = imported("flax.core.meta")
    return is_variable(value) or (meta is not None and isinstance(value, meta.AxisMetadata))


def is_variable(value: Any) -> bool:
    nnx = imported("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def is_module(value: Any) -> bool:
    """Whether it is a module or another graph of NNX."""
    nnx = imported("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def is_wrapper_or_module(value: Any) -> bool:
    return is_wrapper(value) or is_module(value)


def key_path(keys: Sequence[Any]) -> Path:
    """JAX's keys as a path in Orbax: positions are ints, all other keys are text."""
    return tuple(
        key.idx
        if isinstance(key, jax.tree_util.SequenceKey)
        else str(getattr(key, "name", getattr(key, "key", key)))
        for key in keys
    )


def _aliases(duplicates: Sequence[Sequence[Sequence[Any]]]) -> dict[Path, list[Path]]:
    """Path of a shared node or variable -> all its paths."""
    groups: list[list[Path]] = [[tuple(map(str, p)) for p in group] for group in duplicates]
    return {path: group for group in groups for path in group}


def _other_paths(aliases: dict[Path, list[Path]], path: Path) -> list[Path]:
    """All other paths of a leaf, through shared nodes."""
    paths = [path]
    for current in paths:  # which grows
        for end in range(1, len(current) + 1):
            for other in aliases.get(current[:end], ()):
                new = (*other, *current[end:])
                around = other[:end] == current[:end]  # a cycle of the graph
                if new not in paths and not around:
                    paths.append(new)
    return sorted(paths[1:])


def annotation(leaf: StateLeaf) -> tuple[Names | None, str, Any]:
    """The names of a leaf's axes in its box or variable, None without an annotation; their kind, as
    in `AnnotatedLeaf`; and the rules in the annotation."""
    wrapper, nnx, linen = leaf.wrapper, imported("flax.nnx"), imported("flax.linen")
    names, kind, rules = None, "mesh", getattr(wrapper, "rules", None)
    if is_variable(wrapper):
        metadata = wrapper.get_metadata()
        values = [metadata.get(key) for key in ("out_sharding", "sharding_names", "sharding")]
        names = next((names for names in values if names is not None), None)
        names = getattr(names, "spec", names)
        kind, rules = "nnx", metadata.get("sharding_rules")
    elif wrapper is not None and isinstance(wrapper, imported("flax.core.meta").Partitioned):
        names = wrapper.names
        if linen is not None and isinstance(wrapper, linen.LogicallyPartitioned):
            kind = "logical"
    elif wrapper is not None:
        # NNX in Linen makes a variable here, which by default needs a mesh.
        with contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False):
            names = getattr(wrapper, "get_partition_spec", lambda: None)()
    if names is not None:
        names = tuple(tuple(name) if isinstance(name, list | tuple) else name for name in names)
    return names, kind, rules


@functools.cache
def _key_impls() -> dict[Any, str]:
    """The dtype of keys -> the name of their implementation."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(lambda n=n: jax.random.key(0, impl=n)).dtype: n for n in names}
