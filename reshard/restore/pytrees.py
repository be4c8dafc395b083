"""The containers of a user's state: flattened to leaves with tuple paths, and unflattened.

A state is any pytree of JAX: dicts, `TrainState`, optax's namedtuples, Linen's boxes, `nnx.State`.
NNX modules and optimizers are graphs (a variable may be in several places); they are split first,
all of one state together, so that what they share stays shared.

Two kinds of container hold one value and describe its axes, and have no key of their own in the
path of a leaf: Linen's boxes (`Partitioned` and any other `AxisMetadata`) and NNX's `Variable`s.
Orbax saves both as a level named `value`.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.compat import axis_name_keys
from reshard.errors import ArgumentError
from reshard.restore.lazy_jax import jax
from reshard.restore.matching import TargetLeaf
from reshard.sharding.rules import Names
from reshard.tree import Path


@dataclasses.dataclass(frozen=True, eq=False)
class StateLeaf:
    """A leaf of a state: an array of any kind, a Python scalar or a string.

    Attributes:
      path: where it is, without the levels of boxes and variables.
      wrapper: the box or the variable that it is in, if any.
      aliases: other paths of the same leaf, where a module holds it in several places.
    """

    path: Path
    value: Any
    wrapper: Any = None
    aliases: tuple[Path, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is an array of any kind, abstract or real."""
        return hasattr(self.value, "shape") and hasattr(self.value, "dtype")

    @property
    def abstract(self) -> bool:
        """Whether it has no value."""
        real = jax.Array | np.ndarray | np.generic
        return self.is_array and not isinstance(self.value, real)


@dataclasses.dataclass(frozen=True)
class State:
    """A flattened state: its leaves, in the order of the pytree, those of modules last.

    Attributes:
      masked: paths of boxes and variables without a leaf, which hold optax's `MaskedNode`.
      unflatten: the same containers around other values, which are given in the order of `leaves`.
        Modules are new ones.
      update: the same, but modules that are real are updated in place.
    """

    leaves: tuple[StateLeaf, ...]
    masked: tuple[Path, ...]
    unflatten: Callable[[Sequence[Any]], Any]
    update: Callable[[Sequence[Any]], Any]


def check_state(target: Any) -> None:
    """Raises ArgumentError for what makes a state, and is none: a class or a function."""
    name = getattr(target, "__name__", None)
    if callable(target) and name is not None:
        kind = "class" if isinstance(target, type) else "function"
        given = name if name.isidentifier() and not hasattr(target, "__self__") else "model"
        raise ArgumentError(
            f"the target is a {kind}, `{name}`, and not a state",
            hints=[f"reshard.target({given}, mesh=mesh)"],
        )


def flatten_state(state: Any) -> State:
    """The leaves of a state, and how to put others in their places."""
    nnx = imported("flax.nnx")
    places, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_wrapper_or_module)
    shared: Any = ()
    if any(is_module(value) for _, value in places):
        shared = nnx.Pytree | nnx.Variable  # variables beside modules may be theirs
    plain = [(key_path(keys), value) for keys, value in places if not isinstance(value, shared)]
    modules = [(key_path(keys), value) for keys, value in places if isinstance(value, shared)]
    graphdef: Any = None
    aliases, graph_state = {}, ()
    if modules:
        together = tuple(module for _, module in modules)
        graphdef, graph_state = nnx.split(together)
        aliases = _aliases(nnx.find_duplicates(together))
    inner, inner_def = jax.tree_util.tree_flatten_with_path(
        graph_state, is_leaf=_is_wrapper_or_module
    )

    leaves: list[StateLeaf] = []
    masked: list[Path] = []
    cells = []

    def add(path: Path, value: Any, others: Sequence[Path] = ()) -> None:
        cells.append(_open(path, value, others, leaves))
        if not cells[-1][0] and is_wrapper(value):
            masked.append(path)

    for path, value in plain:
        add(path, value)
    in_plain = len(leaves)
    roots = [path for path, _ in modules]
    held = [(key_path(keys), value) for keys, value in inner]
    bare = _bare(tuple(module for _, module in modules), {path for path, _ in held})
    for (number, *rest), value in (*held, *((tuple(map(str, path)), x) for path, x in bare)):
        others = [
            (*roots[int(index)], *tail)
            for index, *tail in _other_paths(aliases, (number, *map(str, rest)))
        ]
        add((*roots[int(number)], *rest), value, others)

    def contents(values: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
        closed, position = [], 0
        for count, close in cells:
            closed.append(close(values[position : position + count]))
            position += count
        outer, inside = closed[: len(plain)], closed[len(plain) : len(plain) + len(inner)]
        return outer, jax.tree.unflatten(inner_def, inside), closed[len(plain) + len(inner) :]

    def assemble(outer: Sequence[Any], made: Sequence[Any]) -> Any:
        sources = iter(outer), iter(made)
        return jax.tree.unflatten(
            treedef, [next(sources[isinstance(value, shared)]) for _, value in places]
        )

    def unflatten(values: Sequence[Any]) -> Any:
        outer, inside, loose = contents(values)
        made = nnx.merge(graphdef, inside) if modules else ()
        for (path, _), value in zip(bare, loose, strict=True):
            _put(made, path, value)
        return assemble(outer, made)

    def update(values: Sequence[Any]) -> Any:
        if any(leaf.abstract for leaf in leaves[in_plain:]):
            return unflatten(values)
        outer, inside, _ = contents(values)
        if modules:
            nnx.update(tuple(module for _, module in modules), inside)
        return assemble(outer, [module for _, module in modules])

    return State(tuple(leaves), tuple(masked), unflatten, update)


def _bare(modules: tuple[Any, ...], known: Collection[Path]) -> list[tuple[tuple, Any]]:
    """Abstract arrays in modules that flax takes for part of their structure: those that are in a
    container of a module's and in no variable, such as the scales of an `nnx.WeightNorm`; before
    flax 0.12.5, all that are in no variable. What is there, with its path in the graph."""
    return [
        (path, value)
        for path, value in (imported("flax.nnx").iter_graph(modules) if modules else ())
        if isinstance(value, jax.ShapeDtypeStruct) and tuple(map(str, path)) not in known
    ]


def _put(node: Any, path: tuple, value: Any) -> None:
    """Sets a value in a container below modules."""
    *above, last = path
    for key in above:
        node = getattr(node, key) if _is_attribute(node, key) else node[key]
    if _is_attribute(node, last):
        setattr(node, last, value)
    else:
        node[last] = value


def _is_attribute(node: Any, key: Any) -> bool:
    return isinstance(key, str) and not isinstance(node, Mapping)


def saved_tree(state: Any) -> dict[Path, StateLeaf | dict | list | tuple | None]:
    """The leaves of a state under the paths that Orbax gives them, empty containers among them in
    their places.

    Boxes and variables are a level named `value`, which is None where they hold no array. What
    Orbax takes for empty is kept as it is: None, empty dicts, lists and tuples; namedtuples without
    fields (`EmptyState`) are None.
    """
    apart = flatten_state(state)
    found: dict[Path, Any] = {(*path, "value"): None for path in apart.masked}
    for leaf in apart.leaves:
        level = () if leaf.wrapper is None else ("value",)
        found[leaf.path + level] = leaf

    def is_empty(node: Any) -> bool:
        return not jax.tree.leaves(node, is_leaf=lambda inner: inner is not node)

    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: _is_wrapper_or_module(node) or is_empty(node)
    )
    for keys, node in nodes:
        if _is_wrapper_or_module(node) or not is_empty(node):
            continue
        mapping = {} if isinstance(node, Mapping) else None
        found[key_path(keys)] = type(node)() if type(node) in (list, tuple) else mapping
    places = {key_path(keys): place for place, (keys, _) in enumerate(nodes)}

    def order(path: Path) -> tuple:
        place = next(places[path[:end]] for end in range(len(path) + 1) if path[:end] in places)
        return place, [(isinstance(key, str), key) for key in path]  # modules list theirs sorted

    return {path: found[path] for path in sorted(found, key=order)}


def imported(name: str) -> Any:
    """A module of Flax's if the process has imported it, as it has if any object is of it; else
    None. It would take half a second, and a plain pytree does without."""
    return importlib.import_module(name) if name in sys.modules else None


def is_wrapper(value: Any) -> bool:
    """Whether it is a box of Linen's or a variable of NNX's."""
    meta = imported("flax.core.meta")
    return is_variable(value) or (meta is not None and isinstance(value, meta.AxisMetadata))


def is_variable(value: Any) -> bool:
    nnx = imported("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def is_module(value: Any) -> bool:
    """Whether it is a module of NNX's, or another of its graphs."""
    nnx = imported("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def _is_wrapper_or_module(value: Any) -> bool:
    return is_wrapper(value) or is_module(value)


def _open(
    path: Path, value: Any, aliases: Sequence[Path], leaves: list[StateLeaf]
) -> tuple[int, Callable[[Sequence[Any]], Any]]:
    """Adds the leaves of one place to `leaves`; how many there are, and how to close it again."""
    found, treedef = jax.tree_util.tree_flatten_with_path(value)
    wrapper = value if is_wrapper(value) else None
    for keys, leaf in found:
        below = key_path(keys[1:] if wrapper is not None else keys)
        others = tuple((*alias, *below) for alias in aliases)
        leaves.append(StateLeaf((*path, *below), leaf, wrapper, others))
    return len(found), treedef.unflatten


def key_path(keys: Sequence[Any]) -> Path:
    """A path of JAX's keys as Orbax names it: positions are ints, everything else is text."""
    path = []
    for key in keys:
        if isinstance(key, jax.tree_util.SequenceKey):
            path.append(key.idx)
        else:
            name = getattr(key, "name", getattr(key, "key", key))
            path.append(str(name))
    return tuple(path)


def _aliases(duplicates: Sequence[Sequence[Sequence[Any]]]) -> dict[Path, list[Path]]:
    """Path of a shared node or variable -> all its paths."""
    groups: list[list[Path]] = [[tuple(map(str, p)) for p in group] for group in duplicates]
    return {path: group for group in groups for path in group}


def _other_paths(aliases: dict[Path, list[Path]], path: Path) -> list[Path]:
    """All other paths of a leaf, of which a part may lead through shared nodes."""
    found, todo = {path}, [path]
    while todo:
        current = todo.pop()
        for end in range(1, len(current) + 1):
            for other in aliases.get(current[:end], ()):
                new = (*other, *current[end:])
                around = other[:end] == current[:end]  # a cycle of the graph
                if new not in found and not around:
                    found.add(new)
                    todo.append(new)
    return sorted(found - {path})


def axis_names(leaf: StateLeaf) -> Names | None:
    """The names of a leaf's axes, as its box or variable gives them; None without an annotation."""
    wrapper = leaf.wrapper
    if wrapper is None:
        return None
    if is_variable(wrapper):
        metadata = wrapper.get_metadata()
        found = [metadata.get(key) for key in axis_name_keys()]
        names = next((names for names in found if names is not None), None)
        return _names(getattr(names, "spec", names))
    if isinstance(wrapper, imported("flax.core.meta").Partitioned):
        return _names(wrapper.names)
    # One of NNX inside of Linen makes a variable to tell, which by default would want a mesh.
    nnx = imported("flax.nnx")
    with contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False):
        return _names(getattr(wrapper, "get_partition_spec", lambda: None)())


def _names(names: Any) -> Names | None:
    if names is None:
        return None
    return tuple(tuple(name) if isinstance(name, list | tuple) else name for name in names)


def own_rules(leaf: StateLeaf) -> Any:
    if is_variable(leaf.wrapper):
        return leaf.wrapper.get_metadata().get("sharding_rules")
    return getattr(leaf.wrapper, "rules", None)


def target_leaf(leaf: StateLeaf) -> TargetLeaf:
    """What a checkpoint has to have for a leaf."""
    value = leaf.value
    if not leaf.is_array:
        return TargetLeaf(leaf.path, type(value).__name__, aliases=leaf.aliases)
    shape = tuple(value.shape)
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl = _key_impls().get(value.dtype, str(value.dtype))
        return TargetLeaf(leaf.path, "key", shape, key_impl=impl, aliases=leaf.aliases)
    weak = bool(getattr(value, "weak_type", False))
    return TargetLeaf(
        leaf.path, "array", shape, np.dtype(value.dtype), weak=weak, aliases=leaf.aliases
    )


@functools.cache
def _key_impls() -> dict[Any, str]:
    """The dtype of keys -> the implementation, for those that JAX has."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(lambda n=n: jax.random.key(0, impl=n)).dtype: n for n in names}
