"""The target builder: a model, a mesh and rules -> an abstract state with shardings.

Linen and NNX annotate the axes of their parameters; `reshard.annotations` decides what becomes of
each leaf. This module gets the state out of whatever the user has, and puts the shardings in.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.annotations import AnnotatedLeaf, Coverage, cover
from reshard.errors import ShardingError
from reshard.mesh import Spec, normalize_spec, parse_mesh
from reshard.states import State, StateLeaf, axis_names, key_path, own_rules, take_apart
from reshard.tree import Path, format_path, nearest

if TYPE_CHECKING:
    import jax


def target(
    model: Any,
    *,
    mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh",
    rules: Any = None,
    specs: Any = None,
    semantics: str | None = None,
    inputs: Sequence[Any] = (),
) -> Any:
    """The abstract state of a model, laid out on a mesh. Nothing is computed, no device is used.

    Args:
      model: what the state is of:
        a Linen module, with `inputs`, for the variables that its `init` returns;
        a callable that returns variables, a `TrainState`, an NNX module, or any other pytree;
        an NNX module class (called with `rngs=nnx.Rngs(0)` if it asks for `rngs`);
        an NNX module, optimizer or state; or any pytree of arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh.
      rules: logical axis names to mesh axes: ordered pairs, a dict, or a callable (`MeshRules`); a
        value is a mesh axis, a tuple of axes, or None. Without rules, names are mesh axes.
      specs: for leaves without annotations, and before all annotations: ordered (path regex,
        partition spec) pairs or a dict of them, the first match wins; or a pytree of
        `PartitionSpec`s with the structure of the state, as `flax.linen.get_partition_spec` gives
        it, whose names go through `rules`.
      semantics: how `rules` are read where a name or a mesh axis occurs twice, `"linen"` or
        `"nnx"` (see `reshard.rules`); by default as the model's API does.
      inputs: example arguments for a Linen module or a callable. Arrays and
        `jax.ShapeDtypeStruct`s are traced, everything else is passed on as it is.

    Returns:
      The state in its own containers, each array leaf a `jax.ShapeDtypeStruct` with a
      `NamedSharding` on `mesh`: boxes around them, optimizer state sharded as its parameters. An
      NNX module comes back as a new, abstract module.

    Raises:
      ShardingError: specs that do not fit: all of them, with what `coverage` would list.
    """
    state, found = _covered(model, mesh, rules, specs, semantics, inputs)
    if found.problems:
        raise ShardingError(
            f"{len(found.problems)} problems with the specs of the model on `{found.mesh}`",
            found.problems,
            found.hints,
        )
    by_path = {leaf.path: leaf.spec for leaf in found.leaves}
    return state.rebuild(
        [_abstract(x, mesh, by_path[x.path]) if x.is_array else x.value for x in state.leaves]
    )


def coverage(
    model: Any,
    *,
    mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh",
    rules: Any = None,
    specs: Any = None,
    semantics: str | None = None,
    inputs: Sequence[Any] = (),
) -> Coverage:
    """What each rule reached, and what is replicated at which cost. Takes what `target` takes.

    Problems that `target` would raise are listed in `Coverage.problems`.

    Raises:
      ShardingError: rules or specs that cannot be read, or a regex that matches no leaf.
    """
    return _covered(model, mesh, rules, specs, semantics, inputs)[1]


def _covered(
    model: Any, mesh: Any, rules: Any, specs: Any, semantics: str | None, inputs: Sequence[Any]
) -> tuple[State, Coverage]:
    plain_mesh = parse_mesh(mesh)
    state = take_apart(_state_of(model, mesh, inputs))
    paths = {leaf.path for leaf in state.leaves if leaf.is_array}
    tree = _spec_tree(specs, paths)
    leaves = [_annotated(leaf, tree.get(leaf.path)) for leaf in state.leaves if leaf.is_array]
    pairs: Any = () if tree or specs is None else specs
    pairs = list(pairs.items()) if isinstance(pairs, Mapping) else list(pairs)
    return state, cover(leaves, plain_mesh, rules, pairs, semantics)


def _spec_tree(specs: Any, paths: set[Path]) -> dict[Path, Spec]:
    """`specs` by path if it is a pytree of specs in the places of leaves; empty if it is pairs."""
    import jax

    kinds = (jax.sharding.PartitionSpec, jax.sharding.NamedSharding)
    found, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, kinds))
    if not all(isinstance(leaf, kinds) for _, leaf in found):
        return {}
    tree = {key_path(keys): normalize_spec(getattr(leaf, "spec", leaf)) for keys, leaf in found}
    unknown = [path for path in tree if path not in paths]
    if unknown and isinstance(specs, Mapping) and not any(len(path) > 1 for path in tree):
        return {}
    if unknown:
        near = nearest(format_path(unknown[0]), paths)
        raise ShardingError(
            "the tree of specs has leaves that the model lacks",
            [format_path(path) for path in unknown],
            [f"the model has `{name}`" for name in near[:1]],
        )
    return tree


def _annotated(leaf: StateLeaf, spec: Spec | None) -> AnnotatedLeaf:
    """What is known of a leaf; `spec` takes the place of the names of its axes, if there is one."""
    import jax
    from flax import linen, nnx

    holder = leaf.holder
    kind = "mesh"
    if isinstance(holder, nnx.Variable):
        kind = "nnx"
    elif isinstance(holder, linen.LogicallyPartitioned):
        kind = "logical"
    names = axis_names(leaf) if spec is None else tuple(_entry(axes) for axes in spec)
    sharding = getattr(leaf.value, "sharding", None)
    named = isinstance(sharding, jax.sharding.NamedSharding)
    parameter = isinstance(holder, nnx.Param) or (
        not isinstance(holder, nnx.Variable) and "params" in leaf.path[:2]
    )
    return AnnotatedLeaf(
        path=leaf.path,
        shape=tuple(leaf.value.shape),
        itemsize=leaf.value.dtype.itemsize,
        names=names,
        kind=kind if names is not None else "",
        own_rules=own_rules(leaf),
        saved=normalize_spec(sharding.spec) if named else None,
        parameter=parameter,
    )


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """One dimension of a spec, as the names of axes are written."""
    return axes[0] if len(axes) == 1 else axes or None


def _abstract(leaf: StateLeaf, mesh: Any, spec: Spec) -> Any:
    import jax

    entries = [_entry(axes) for axes in spec]
    return jax.ShapeDtypeStruct(
        leaf.value.shape,
        leaf.value.dtype,
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries)),
        weak_type=getattr(leaf.value, "weak_type", False),
    )


def _state_of(model: Any, mesh: Any, inputs: Sequence[Any]) -> Any:
    """The state that a model is of: abstract where it had to be made, else as it was given."""
    import jax
    from flax import linen, nnx

    if isinstance(model, linen.Module):
        if not inputs:
            raise ShardingError(
                f"the Linen module {type(model).__name__} has no variables without inputs",
                hints=["target(model, inputs=(x,), ...)", "or a callable that returns variables"],
            )
        return _evaluated(lambda *args: model.init(jax.random.key(0), *args), inputs, mesh)
    if isinstance(model, type) and issubclass(model, nnx.Pytree) and not inputs:
        wanted = inspect.signature(model.__init__).parameters.get("rngs")
        if wanted is not None and wanted.default is inspect.Parameter.empty:
            constructor: Any = model
            return _evaluated(lambda: constructor(rngs=nnx.Rngs(0)), (), mesh)
    if callable(model) and not isinstance(model, nnx.Pytree):
        return _evaluated(model, inputs, mesh)
    if inputs:
        raise ShardingError(f"`inputs` are for a module or a callable, not {type(model).__name__}")
    return model


def _evaluated(function: Any, inputs: Sequence[Any], mesh: Any) -> Any:
    """What a function returns, abstract: `nnx.eval_shape`, which keeps what modules share.

    First with no mesh in context: within one, flax applies annotations right away, which fails
    where they do not fit or where axes are Explicit. A model that constrains values by bare
    partition specs needs a mesh; it gets the one that the target is for.
    """
    import jax
    from flax import nnx

    leaves, treedef = jax.tree.flatten(tuple(inputs))
    traced = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        mixed = [next(rest) if trace else x for x, trace in zip(leaves, traced, strict=True)]
        return function(*treedef.unflatten(mixed))

    arrays = [leaf for leaf, trace in zip(leaves, traced, strict=True) if trace]
    eager = nnx.using_eager_sharding()
    none = jax.sharding.AbstractMesh((), ())
    given = mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh
    with nnx.use_eager_sharding(False):
        try:
            with jax.sharding.use_abstract_mesh(none):
                made = nnx.eval_shape(call, *arrays)
        except Exception:
            made = None
        if made is None:
            with jax.sharding.use_abstract_mesh(given):
                made = nnx.eval_shape(call, *arrays)
    if eager:
        _restore_eager_sharding(made)
    return made


def _restore_eager_sharding(made: Any) -> None:
    """Variables note whether they were made with eager sharding, and compare by it: the note is
    set to what it would have been."""
    import jax
    from flax import nnx

    for leaf in jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, nnx.Variable | nnx.Pytree)):
        if isinstance(leaf, nnx.Variable):
            leaf.set_metadata(eager_sharding=True)
        elif isinstance(leaf, nnx.Pytree):
            for _, node in nnx.iter_graph(leaf):
                if isinstance(node, nnx.Variable):
                    node.set_metadata(eager_sharding=True)
