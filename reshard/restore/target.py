"""The target builder: a model, a mesh and rules -> an abstract state with shardings.

Linen and NNX annotate the axes of their parameters. `reshard.sharding.annotations` decides the
spec of each leaf. This module evaluates the user's model and puts the shardings into its state.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reshard.errors import ArgumentError, ShardingError
from reshard.restore.device_shards import named_sharding
from reshard.restore.lazy_jax import jax
from reshard.restore.pytrees import (
    MESH_HINT,
    State,
    StateLeaf,
    annotation,
    flatten_state,
    imported,
    is_module,
    is_variable,
    is_wrapper_or_module,
    key_path,
)
from reshard.sharding.annotations import AnnotatedLeaf, Coverage, cover
from reshard.sharding.mesh import Spec, normalize_spec, parse_mesh, spec_entries
from reshard.sharding.optimizer_state import below_params
from reshard.tree import Path, format_path, nearest


def target(
    model: Any,
    *,
    mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh",
    rules: Any = None,
    specs: Any = None,
    semantics: str | None = None,
    inputs: Sequence[Any] = (),
) -> Any:
    """Compute the abstract state of a model, with a sharding on every array. Needs no device.

    Args:
      model: the model, in one of these forms:
        a Linen module, with `inputs`, for the variables that its `init` returns;
        a callable that returns variables, a `TrainState`, an NNX module, or any other pytree;
        an NNX module class (called with `rngs=nnx.Rngs(0)` if it asks for `rngs`);
        an NNX module, optimizer or state; or any pytree of arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh.
      rules: logical axis names to mesh axes: ordered pairs, a dict, or a callable (`MeshRules`).
        Each name has a mesh axis, a tuple of axes, or None. Without rules, the names in NNX and in
        `Partitioned` are mesh axes.
      specs: for leaves without annotations, and as overrides: ordered (path regex, partition spec)
        pairs or a dict of them, the first match wins; or a pytree of `PartitionSpec`s with the
        structure of the state, as `flax.linen.get_partition_spec` returns it. Its names go through
        `rules`.
      semantics: how to read `rules` in which a name or a mesh axis occurs twice, `"linen"` or
        `"nnx"` (see `reshard.sharding.rules`); by default, as the model's API does.
      inputs: example arguments for a Linen module or a callable. Arrays and
        `jax.ShapeDtypeStruct`s are traced; other values are passed on as they are.

    Returns:
      The state in its own containers. Each array leaf is a `jax.ShapeDtypeStruct` with a
      `NamedSharding` on `mesh`, inside its box. Optimizer state is sharded as its parameters. An
      NNX module is returned as a new, abstract module.

    Warns:
      UserWarning: an axis name has no rule; the warning has the replicated bytes. Or a rule matches
        no leaf.

    Raises:
      ArgumentError: the model, or what it returns, has none of these forms.
      ShardingError: specs that do not fit: all of them.

    Example:
      >>> from flax import nnx
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layer_0 = nnx.Linear(32, 32, rngs=rngs)
      ...         self.layer_1 = nnx.Linear(32, 32, rngs=rngs)
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.AbstractMesh((1, 8), ("data", "model"))
      >>> model = reshard.target(MLP, mesh=mesh, specs={"kernel$": P(None, "model"), "bias$": P()})
      >>> tuple(model.layer_0.kernel.sharding.spec)
      (None, 'model')
    """
    made, covered = target_and_coverage(mesh, model, rules, specs, semantics, inputs)
    if covered.unmatched or not any(covered.reached):  # other rules may be for activations
        for note in covered.notes:
            warnings.warn(note, stacklevel=2)
    return made


def target_and_coverage(mesh: Any, *arguments: Any) -> tuple[Any, Coverage]:
    """The results of `target` and `coverage`, without warnings."""
    state, covered = _covered(mesh, *arguments)
    if covered.problems:
        raise ShardingError(
            f"the model does not fit the mesh `{covered.mesh}`", covered.problems, covered.hints
        )
    specs = iter(covered.leaves)
    values = [
        jax.ShapeDtypeStruct(
            leaf.value.shape,
            leaf.value.dtype,
            sharding=named_sharding(mesh, next(specs).spec),
            weak_type=getattr(leaf.value, "weak_type", False),
        )
        if leaf.is_array
        else leaf.value
        for leaf in state.leaves
    ]
    return state.unflatten(values), covered


def coverage(
    model: Any,
    *,
    mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh",
    rules: Any = None,
    specs: Any = None,
    semantics: str | None = None,
    inputs: Sequence[Any] = (),
) -> Coverage:
    """Show which leaves each rule matches, and what replication costs. Takes what `target` takes.

    Problems that `target` would raise are listed in `Coverage.problems`.

    Raises:
      ShardingError: rules or specs that cannot be read, or a regex that matches no leaf.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.AbstractMesh((1, 8), ("data", "model"))
      >>> params = {"kernel": jax.ShapeDtypeStruct((32, 32), "float32")}
      >>> reshard.coverage(params, mesh=mesh, specs={"kernel$": P(None, "model")})
      1 array leaves on `data=1,model=8`, 512 B a device: 1 by the given specs
      replicated  0 leaves, 0 B a device
    """
    return _covered(mesh, model, rules, specs, semantics, inputs)[1]


def _covered(
    mesh: Any, model: Any, rules: Any, specs: Any, semantics: Any = None, inputs: Any = ()
) -> tuple[State, Coverage]:
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise ShardingError(
            f"the mesh of a target must be a jax.sharding.Mesh or AbstractMesh, not {mesh!r}",
            hints=[MESH_HINT, "jax.sharding.AbstractMesh(...)"],
        )
    made = state_of(model, mesh, inputs)
    state = flatten_state(made)
    arrays = [leaf for leaf in state.leaves if leaf.is_array]
    tree = _spec_tree(specs, {leaf.path for leaf in arrays})
    parameters = _parameters(made, arrays)
    leaves = [_annotated(x, tree.get(x.path), x.path in parameters) for x in arrays]
    return state, cover(leaves, parse_mesh(mesh), rules, () if tree else specs, semantics)


def _parameters(state: Any, leaves: Sequence[StateLeaf]) -> set[Path]:
    """Paths of the parameters, which optimizer state follows.

    These are NNX's `Param`s, or the variables of other types that an NNX optimizer has state for;
    leaves below the key `params` closest to the root; else all leaves outside optax's states, which
    are namedtuples.
    """
    nnx = imported("flax.nnx")
    held = [leaf for leaf in leaves if is_variable(leaf.wrapper)]
    parameters = {leaf.path for leaf in held if isinstance(leaf.wrapper, nnx.Param)}
    if not parameters and any(isinstance(leaf.wrapper, nnx.OptState) for leaf in held):
        kinds = (nnx.OptState, nnx.RngState)
        parameters = {leaf.path for leaf in held if not isinstance(leaf.wrapper, kinds)}
    rest = [leaf.path for leaf in leaves if not is_variable(leaf.wrapper)]
    parameters |= below_params(rest)
    if parameters:
        return parameters

    def is_named(node: Any) -> bool:
        return isinstance(node, tuple) and hasattr(node, "_fields")

    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_named)
    optimizers = {key_path(keys)[:1] for keys, node in nodes if is_named(node)}
    return {path for path in rest if path[:1] not in optimizers} if optimizers else set()


def _spec_tree(specs: Any, paths: set[Path]) -> dict[Path, Spec]:
    """`specs` by path if it is a pytree with specs for leaves; empty if it is pairs."""
    kinds = (jax.sharding.PartitionSpec, jax.sharding.NamedSharding)
    leaves, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, kinds))
    if not all(isinstance(leaf, kinds) for _, leaf in leaves):
        return {}
    tree = {key_path(keys): normalize_spec(getattr(leaf, "spec", leaf)) for keys, leaf in leaves}
    # Flax keeps the variables around the specs of an NNX state.
    tree = {p[:-1] if p[-1:] == ("value",) and p not in paths else p: x for p, x in tree.items()}
    if isinstance(specs, Mapping) and all(len(path) == 1 for path in tree) and set(tree) != paths:
        return {}  # a dict of regexes
    if unknown := [format_path(path) for path in tree if path not in paths]:
        hints = [f"the model has `{name}`" for name in nearest(unknown[0], paths)[:1]]
        raise ShardingError("the tree of specs has leaves that the model lacks", unknown, hints)
    return tree


def _annotated(leaf: StateLeaf, spec: Spec | None, parameter: bool) -> AnnotatedLeaf:
    """A leaf with its annotation; a `spec` replaces the names of its axes."""
    names, kind, rules = annotation(leaf)
    names = names if spec is None else spec_entries(spec)
    for name in names or ():
        axes = name if isinstance(name, tuple) else () if name is None else (name,)
        if not all(isinstance(axis, str) for axis in axes):
            raise ShardingError(
                f"{format_path(leaf.path)}: {names!r} is not a valid annotation of its axes",
                hints=["for each axis: a logical axis, a mesh axis, a tuple of mesh axes, or None"],
            )
    sharding = getattr(leaf.value, "sharding", None)
    named = isinstance(sharding, jax.sharding.NamedSharding)
    return AnnotatedLeaf(
        path=leaf.path,
        shape=tuple(leaf.value.shape),
        itemsize=leaf.value.dtype.itemsize,
        names=names,
        kind=kind,
        own_rules=rules,
        saved=normalize_spec(sharding.spec) if named else None,
        parameter=parameter,
        variable=is_variable(leaf.wrapper),
    )


def state_of(model: Any, mesh: Any = None, inputs: Sequence[Any] = ()) -> Any:
    """The state of a model in any form that `target` takes; abstract if it had to be made."""
    make = maker(model, inputs)
    return model if make is None else _evaluated(make, inputs, mesh)


def maker(model: Any, inputs: Sequence[Any] = ()) -> Callable[..., Any] | None:
    """The function that makes the state of a model from `inputs`; None if the model is a state."""
    linen, nnx = imported("flax.linen"), imported("flax.nnx")
    if isinstance(model, str):
        hint = "import it, and give its class, or a function that returns its state"
        raise ArgumentError(f"the model is the text {model!r}", hints=[hint])
    if linen is not None and isinstance(model, linen.Module):
        if not inputs:
            raise ArgumentError(
                f"the Linen module {type(model).__name__} needs inputs to make its variables",
                hints=["give `inputs`, or a function that returns its variables"],
            )
        return lambda *args: model.init(jax.random.key(0), *args)
    if nnx is not None and isinstance(model, type) and issubclass(model, nnx.Pytree) and not inputs:
        parameter = inspect.signature(model.__init__).parameters.get("rngs")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            constructor: Any = model
            _check_call(model, (), "rngs")
            return lambda: constructor(rngs=nnx.Rngs(0))
    if callable(model) and not is_module(model):
        _check_call(model, inputs)
        return model
    if inputs:
        raise ArgumentError(
            f"the model is a {type(model).__name__}: only a module or a function takes `inputs`"
        )
    return None


def _check_call(function: Callable[..., Any], inputs: Sequence[Any], *keywords: str) -> None:
    """Raises ArgumentError if a function does not take these arguments."""
    called, given = function, inputs
    if isinstance(function, type):  # Flax's metaclasses take any arguments
        called, given = function.__init__, (function, *inputs)
    try:
        inspect.signature(called).bind(*given, **dict.fromkeys(keywords))
    except ValueError:  # perhaps a function of C
        return
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ArgumentError(
            f"`{name}` cannot be called: {error}",
            hints=[f"use a function without arguments, which calls `{name}`"],
        ) from error


def _evaluated(function: Any, inputs: Sequence[Any], mesh: Any) -> Any:
    """The abstract result of a function, by `nnx.eval_shape`, which keeps what modules share.

    First no mesh is in context: with one, flax applies annotations, which fails if they do not fit
    or if axes are Explicit. A model that constrains values by bare partition specs needs a mesh. It
    gets the target's mesh; then, for models that are not written for Explicit axes, the same mesh
    with Auto axes. If all fail, the first error is raised: later ones may be about the context.
    """
    from flax import nnx

    leaves, treedef = jax.tree.flatten(tuple(inputs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    traced = {n: leaf for n, leaf in enumerate(leaves) if is_array[n]}

    def call(arrays: dict[int, Any]) -> Any:
        given = [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
        made = function(*treedef.unflatten(given))
        _check_made(function, made)
        return made

    contexts = [jax.sharding.AbstractMesh((), ())]
    if mesh is not None:
        given = mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh
        auto = (jax.sharding.AxisType.Auto,) * len(given.axis_names)
        contexts += dict.fromkeys((given, given.update(axis_types=auto)))
    made, errors = None, []
    with nnx.use_eager_sharding(False):
        for context in contexts:
            try:
                with jax.sharding.use_abstract_mesh(context):
                    made = nnx.eval_shape(call, traced)
                break
            except Exception as error:  # any: it is the user's code
                errors.append(error)
        else:
            raise errors[0]
    if nnx.using_eager_sharding():  # variables record whether it was on, and compare by it
        for leaf in jax.tree.leaves(made, is_leaf=is_wrapper_or_module):
            for _, node in nnx.iter_graph(leaf):
                if isinstance(node, nnx.Variable):
                    node.set_metadata(eager_sharding=True)
    return made


def _check_made(function: Callable[..., Any], made: Any) -> None:
    """Raises ArgumentError if a function has returned nothing, or a module without variables."""
    from flax import linen, nnx

    name = getattr(function, "__name__", type(function).__name__)
    for leaf in jax.tree.leaves(made, is_leaf=lambda node: isinstance(node, nnx.Pytree)):
        if isinstance(leaf, linen.Module):
            kind = type(leaf).__name__
            raise ArgumentError(
                f"`{name}` returned the Linen module {kind}, which holds no variables",
                hints=[f"return the variables: `{kind}(...).init(jax.random.key(0), x)`"],
            )
    if made is None:
        raise ArgumentError(f"`{name}` returned None, not a state")
