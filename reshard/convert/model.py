"""The model that is converted to or from: the tree that Orbax would save of it, the classes of its
modules, and the order in which it defines them.

Flax sorts the attributes of an NNX module whenever it rebuilds a model, as `nnx.eval_shape`,
`nnx.jit`, `nnx.vmap` and `nnx.merge` do. Only the constructor shows the order of definition, so
`definition_orders` watches constructors run. If none was watched, a module that no transform has
rebuilt still has its order, unless the code of its class assigns one attribute in two places.
"""

import contextlib
import dataclasses
import dis
import functools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.convert.layout import OPTIMIZERS, Layout, detect
from reshard.convert.module_tree import (
    AUTOMATIC,
    AUXILIARY,
    GIVEN,
    OWN,
    Leaf,
    Module,
    linen_outline,
    path_outline,
)
from reshard.convert.optimizer import random_state
from reshard.errors import ArgumentError
from reshard.restore.matching import TargetLeaf
from reshard.restore.pytrees import StateLeaf, flatten_state, key_path, saved_tree
from reshard.restore.target import state_of
from reshard.tree import Path, format_path, natural

# Class -> the names of attributes in each order that constructors left; `()` is among these if a
# module replaced another one, which may be a part of it.
Orders = Mapping[type, Collection[tuple[str, ...]]]
# Attributes of NNX itself in a module. After a constructor they come first and in this order; in a
# rebuilt module all attributes are sorted.
_NOTES = ("_pytree__state", "_pytree__nodes")
# Watching replaces methods of flax, in one thread at a time.
_WATCHING = threading.RLock()


@dataclasses.dataclass(frozen=True)
class TargetTree:
    """The structure of a model, which can be pickled and read without the model's classes.

    Attributes:
      leaves: saved path -> leaf, or the empty container that is saved there.
      random: saved paths of random state.
      layout: the layout of the tree.
      outline: its modules.
    """

    leaves: dict[Path, Any]
    random: frozenset[Path]
    layout: Layout
    outline: Module

    def shapes(self) -> dict[Path, Shape]:
        """Path in the model -> shape."""
        return {path: self.leaf(saved).shape for path, saved in self.layout.model.items()}

    def names(self) -> dict[Path, Path]:
        """Name -> saved path; leaves of the model have a name in the whole tree and one in it."""
        filled = {p: leaf for p, leaf in self.leaves.items() if isinstance(leaf, TargetLeaf)}
        return {leaf.path: saved for saved, leaf in filled.items()} | self.layout.model

    def random_names(self) -> set[Path]:
        """Paths in the model of random state: also of a pure dict's, which has no variables."""
        leaves = {path: self.leaf(saved) for path, saved in self.layout.model.items()}
        variables = {path for path, saved in self.layout.model.items() if saved in self.random}
        return random_state(leaves) | variables

    def leaf(self, saved: Path) -> TargetLeaf:
        """The leaf at a saved path."""
        found = self.leaves[saved]
        assert isinstance(found, TargetLeaf)
        return found


def target_tree_of(model: Any, api: str, role: str = "the model to convert to") -> TargetTree:
    """The tree that a model of an API saves. Nothing is computed. Raises ArgumentError: the model
    is of the other API, or has no tree."""
    _check_module(model, api, role)
    with definition_orders() as orders, linen_classes() as classes:
        state = state_of(model)
    _check_api(state, api, role, of_linen=bool(classes))
    tree = saved_tree(state)
    values = {path: _as_saved(leaf) for path, leaf in tree.items()}
    held = {path: leaf for path, leaf in tree.items() if isinstance(leaf, StateLeaf)}
    leaves = {**tree, **{path: leaf.target for path, leaf in held.items()}}
    random = frozenset(
        path
        for path, leaf in held.items()
        if any(base.__name__ == "RngState" for base in type(leaf.wrapper).__mro__)
    )
    boxes = {path for path, leaf in held.items() if leaf.wrapper is not None}
    boxes |= {(*path, "value") for path in flatten_state(state).masked}
    if api == "linen":
        layout = detect(values, _linen_kind(values), held=boxes)
        arrays = {path: values[saved] for path, saved in layout.model.items()}
        return TargetTree(leaves, random, layout, linen_outline(arrays, classes))
    place, outline = nnx_outline(state, orders, [*held.values()])
    layout = detect(values, _nnx_kind(values, place, bool(boxes)), held=boxes)
    return TargetTree(leaves, random, layout, outline)


def _check_module(model: Any, api: str, role: str) -> None:
    """Raises ArgumentError for a Linen module, which has no state without inputs."""
    from flax import linen

    cls = model if isinstance(model, type) else type(model)
    if not issubclass(cls, linen.Module):
        return
    if api == "nnx":
        raise _other_api(f"{role} is the Linen module {cls.__name__}", api)
    raise ArgumentError(
        f"the Linen module {cls.__name__} needs inputs to make its variables",
        hints=["a function that returns its variables, `model.init(key, x)`, or a TrainState"],
    )


def _check_api(state: Any, api: str, role: str, of_linen: bool) -> None:
    """Raises ArgumentError if a state is plainly one of the other API."""
    import jax
    from flax import nnx
    from flax.core import meta
    from flax.training.train_state import TrainState

    nnxs, boxes = (nnx.Pytree, nnx.Variable, nnx.State), meta.AxisMetadata
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, (boxes, *nnxs)))
    of_nnx = any(isinstance(node, nnxs) for node in nodes)
    of_linen = of_linen or isinstance(state, TrainState) or any(isinstance(x, boxes) for x in nodes)
    if of_nnx != of_linen and of_linen == (api == "nnx"):
        name = "a Linen" if of_linen else "an NNX"
        raise _other_api(f"{role} is {name} state", api)


def _other_api(text: str, api: str) -> ArgumentError:
    other, needed = ("linen", "NNX") if api == "nnx" else ("nnx", "Linen")
    which = "model=... is the model to convert to, source=... the model of the checkpoint"
    other_way = f"reshard.to_{other}(ckpt, ...), if the other way is meant"
    return ArgumentError(text, hints=[f"it must be {needed}'s: {which}", other_way])


def _as_saved(leaf: Any) -> Any:
    """A leaf as it is in a checkpoint, where numbers are arrays."""
    value = leaf.value if isinstance(leaf, StateLeaf) else leaf
    return np.asarray(value) if isinstance(value, int | float) else value


def _linen_kind(leaves: Mapping[Path, Any]) -> str:
    top = {str(path[0]) for path in leaves if path}
    if "params" not in top:
        return "linen-params"
    if AUXILIARY in top:
        return "maxtext"
    return "linen-train-state" if top & {"opt_state", "step"} else "linen-variables"


def _nnx_kind(leaves: Mapping[Path, Any], place: Path, held: bool) -> str:
    top = {str(path[0]) for path in leaves if path}
    if place == ("model",):
        return "nnx-model-and-optimizer" if "opt_state" in top else "nnx-model"
    if place:
        raise ArgumentError(
            f"the NNX model is at `{format_path(place)}`",
            hints=['give the model alone, or `{"model": model, "optimizer": optimizer}`'],
        )
    return "nnx-state" if held else "nnx-pure-dict"


@contextlib.contextmanager
def definition_orders() -> Iterator[Orders]:
    """Records the order in which constructors of NNX modules define attributes within the context.

    An attribute counts from when it holds a module: if it was `None` before, it moves to the end.
    The result is empty if this version of flax constructs modules in another way.
    """
    from flax import nnx

    orders: dict[type, set[tuple[str, ...]]] = {}
    base: Any = nnx.Pytree
    meta: Any = type(base)
    construct: Any = getattr(meta, "_pytree_meta_construct", None)
    if construct is None:
        yield orders
        return

    def noting(cls: type, node: Any, *args: Any, **kwargs: Any) -> None:
        construct(cls, node, *args, **kwargs)
        orders.setdefault(cls, set()).add(tuple(vars(node)))

    def assigning(node: Any, name: str, value: Any) -> None:
        held = vars(node)
        known, before = name in held, held.get(name)
        assign(node, name, value)
        if not known or held[name] is before or not _is_node(held[name]):
            return
        if _is_node(before) and not (isinstance(before, list | tuple | Mapping) and not before):
            orders.setdefault(type(node), set()).add(())
        held[name] = held.pop(name)

    with _WATCHING:
        construct, assign = meta._pytree_meta_construct, base.__setattr__
        meta._pytree_meta_construct, base.__setattr__ = noting, assigning
        try:
            yield orders
        finally:
            meta._pytree_meta_construct, base.__setattr__ = construct, assign


@contextlib.contextmanager
def linen_classes() -> Iterator[dict[tuple[str, ...], str]]:
    """Records path and class of every Linen module that runs within the context."""
    from flax import linen

    classes: dict[tuple[str, ...], str] = {}

    def note(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        # The first at a path is the module. Lifted classes follow, at the same path.
        module = context.module
        if module.scope is not None:
            given = GIVEN if _is_named(module) else ""
            classes.setdefault(tuple(module.path), given + _class(type(module)))
        return method(*args, **kwargs)

    with linen.intercept_methods(note):
        yield classes


def _is_named(module: Any) -> bool:
    """Whether a Linen module was given a name like `Dense_1`: its parent has not counted so far.
    False if this version of flax does not show it."""
    automatic = AUTOMATIC.fullmatch(module.name or "")
    counted = getattr(getattr(module.parent, "_state", None), "autoname_cursor", None)
    if automatic is None or counted is None:
        return False
    return int(automatic[2]) >= counted.get(automatic[1], 0)


def nnx_outline(
    state: Any, orders: Orders | None = None, leaves: Sequence[StateLeaf] | None = None
) -> tuple[Path, Module]:
    """The outline of the NNX model in a state.

    Args:
      state: an NNX module, abstract or real, alone, in a `ModelAndOptimizer`, or next to optimizers
        in a dict or tuple; or a state without modules, of which only the paths are known.
      orders: those that `definition_orders` recorded while the state was made.
      leaves: the leaves of the state, if they are known.

    Returns:
      The path of the model in the state, and its outline, with paths relative to the model.

    Raises:
      ArgumentError: it has several models, or an optimizer and no model.
    """
    from flax import nnx

    places = _modules(state)
    leaves = flatten_state(state).leaves if leaves is None else leaves
    if not places:
        return (), path_outline({tuple(map(str, x.path)): x.value for x in leaves if x.is_array})
    found = []
    for path, module in places:
        if not isinstance(module, nnx.Optimizer):
            found.append((path, module))
        elif isinstance(module, nnx.ModelAndOptimizer):
            found.append(((*path, "model"), module.model))
    models = {id(model): (path, model) for path, model in reversed(found)}
    if len(models) != 1:
        what = ", ".join(f"{format_path(p)} ({type(m).__name__})" for p, m in places)
        raise ArgumentError(
            f"one NNX model is needed, not {len(models)}: {what}",
            hints=['give the model alone, or `{"model": model, "optimizer": optimizer}`'],
        )
    ((place, model),) = models.values()
    prefix = tuple(map(str, place))
    return place, _Walk(leaves, prefix, orders or {}).visit(model, ())


def _modules(state: Any) -> list[tuple[Path, Any]]:
    """The NNX modules and optimizers in a pytree, with their paths. A module that holds the model
    and its optimizer counts as these two."""
    import jax
    from flax import nnx

    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Pytree | nnx.Variable)
    )
    found = []
    for keys, node in nodes:
        path, held = key_path(keys), vars(node) if _is_module(node) else {}
        parts = [name for name in OPTIMIZERS if isinstance(held.get(name), nnx.Optimizer)]
        if parts and _is_module(held.get("model")):
            found += [((*path, name), held[name]) for name in ("model", *parts)]
        elif _is_module(node):
            found.append((path, node))
    return found


class _Walk:
    """A walk that visits each module of a model once."""

    def __init__(self, leaves: Sequence[StateLeaf], prefix: tuple[str, ...], orders: Orders):
        self._leaves: dict[tuple[str, ...], Leaf] = {}
        for leaf in leaves:
            paths = [tuple(map(str, path)) for path in (leaf.path, *leaf.aliases)]
            inside = [path[len(prefix) :] for path in paths if path[: len(prefix)] == prefix]
            if leaf.is_array and inside:
                kind = "" if leaf.wrapper is None else type(leaf.wrapper).__name__
                made = Leaf(inside[0], tuple(leaf.value.shape), leaf.value.dtype, kind)
                self._leaves.update(dict.fromkeys(inside, made))
        self._orders = orders
        self._made: dict[int, Module] = {}
        self._around: set[int] = set()

    def visit(self, node: Any, path: tuple[str, ...]) -> Module:
        """The outline of a module or a container."""
        names, ordered = self._definition(node)
        children: dict[str, Module] = {}
        leaves: dict[str, tuple[Leaf, ...]] = {}
        repeated = set()
        self._around.add(id(node))
        held_by_name = vars(node) if _is_module(node) else node
        for key in names:
            name, value = str(key), held_by_name[key]
            here = (*path, name)
            if not _is_node(value):
                held = self._held(value, here)
                if isinstance(held, Module):
                    children[name] = held
                elif held is not None:
                    leaves[name] = (held,)
            elif id(value) not in self._around:  # or it is a cycle
                seen = self._made.get(id(value))
                child = seen or self.visit(value, here)
                if _is_module(value) or child.children or child.leaves:
                    children[name] = child
                    repeated |= {name} if seen else set()
        self._around.remove(id(node))
        made = Module(
            path=path,
            kind=_class(type(node)),
            children=children,
            leaves=leaves,
            ordered=ordered,
            repeated=frozenset(repeated),
        )
        self._made[id(node)] = made
        return made

    def _definition(self, node: Any) -> tuple[Sequence[Any], bool]:
        """Names in a module or container, and whether they are in the order of definition."""
        from flax import nnx

        if isinstance(node, list | tuple):
            return range(len(node)), True
        if not _is_module(node):
            return list(node), False  # flax sorts dicts, and leaves no mark
        names = [name for name in vars(node) if name not in _NOTES]
        if isinstance(node, nnx.List):
            return sorted(names, key=lambda name: natural((name,))), True
        inner = {name for name in names if _is_node(vars(node)[name])}
        noted = self._orders.get(type(node), ())
        if () in noted:
            return names, False
        if tuple(name for name in vars(node) if name in _NOTES) == _NOTES:
            return names, bool(noted) or inner.isdisjoint(_assigned_again(type(node)))
        seen = {
            tuple(name for name in order if name in inner) for order in noted if inner <= set(order)
        }
        if len(seen) != 1:
            return names, False
        return [*seen.pop(), *(name for name in names if name not in inner)], True

    def _held(self, value: Any, path: tuple[str, ...]) -> Leaf | Module | None:
        """The leaf that a variable or an array is; the leaves of one that is a pytree."""
        import jax
        from flax import nnx

        if path in self._leaves:
            return self._leaves[path]
        found, _ = jax.tree_util.tree_flatten_with_path(value)
        cut = 1 if isinstance(value, nnx.Variable) else 0
        inner = [tuple(map(str, key_path(keys[cut:]))) for keys, _ in found]
        leaves = {
            keys: self._leaves[*path, *keys] for keys in inner if (*path, *keys) in self._leaves
        }
        return path_outline(leaves, path) if leaves else None


def _class(kind: type) -> str:
    """The name of a class, marked if it is the user's own and like that of one in flax."""
    from flax import linen, nnx

    name = kind.__name__
    own = kind.__module__.partition(".")[0] not in ("flax", "builtins")
    return f"{name}{OWN}" if own and (hasattr(linen, name) or hasattr(nnx, name)) else name


@functools.lru_cache(maxsize=1024)
def _assigned_again(kind: type) -> frozenset[str]:
    """Names of attributes that the code of a user's class assigns in several places."""
    bases = (base for base in kind.__mro__ if base.__module__.partition(".")[0] != "flax")
    values = [value for base in bases for value in vars(base).values()]
    codes = [value.__code__ for value in values if hasattr(value, "__code__")]
    seen: set[str] = set()
    again: set[str] = set()
    for code in codes:
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR":
                (again if instruction.argval in seen else seen).add(instruction.argval)
    return frozenset(again)


def _is_module(value: Any) -> bool:
    from flax import nnx

    return isinstance(value, nnx.Pytree)


def _is_node(value: Any) -> bool:
    """Whether it is a module, or a container that may hold modules."""
    return _is_module(value) or isinstance(value, list | tuple | Mapping)
