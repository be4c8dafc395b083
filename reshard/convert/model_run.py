"""A model of a conversion, run once with the values of its checkpoint."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Leaf
from reshard.convert.initial_values import peak_bytes
from reshard.convert.model import nnx_outline
from reshard.errors import ArgumentError
from reshard.hints import Hint
from reshard.restore.pytrees import flatten_state
from reshard.restore.target import maker, state_of
from reshard.storage.location import checked
from reshard.tree import Path, format_path
from reshard.units import format_bytes

Tell = Callable[[str], object]
# Positional and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# What is found out besides the outputs: which leaves have no part in them, or those of modules.
More = Literal["", "unused", "calls"]


class Run(NamedTuple):
    """What a model has computed.

    Attributes:
      arguments: what it was called with.
      outputs: the arrays that it returned, each with its place in what was returned.
      calls: path of a module and an array that it returned, in the order in which the calls ended;
        none if nobody has asked.
      unused: paths of leaves of floating-point numbers that the outputs do not depend on: their
        gradient is zero, such as that of an expert that no input was sent to. All of them if nobody
        has asked, or the model cannot be differentiated.
    """

    arguments: Arguments
    outputs: list[tuple[str, np.ndarray]]
    calls: list[tuple[Path, np.ndarray]]
    unused: list[Path]


def runs(
    models: Mapping[str, Any], leaves: Callable[[str], Mapping[Path, Leaf]]
) -> dict[str, Callable[[Arguments | None, More], Run]]:
    """What runs both models in this process, by their APIs.

    Args:
      models: the models.
      leaves: called with an API: its model's leaves.

    Raises:
      ArgumentError: one of the models is not known.
    """
    if None in models.values():
        raise ArgumentError(
            "the outputs of two models can be compared, and one of them is not known",
            hints=[Hint(("model",), " and ", ("source",))],
        )
    return {
        api: functools.partial(run, models[api], leaves(api), lambda text: None)
        for api, run in (("linen", linen_run), ("nnx", nnx_run))
    }


def linen_run(
    model: Any, leaves: Mapping[Path, Leaf], tell: Tell, arguments: Arguments | None, more: More
) -> Run:
    """Runs a Linen model.

    Args:
      model: a function that initialises a module, or a `TrainState` whose `apply_fn` is the
        module's.
      leaves: path in the model -> array.
      tell: called with what it takes, before any array is read.
      arguments: what the module is called with; None for what it is initialised with, where numbers
        that are all the same give way to random ones: zeros and ones would tell little.
      more: what else is found out.

    Raises:
      ArgumentError: the model tells no module, or nothing to call it with, or has other leaves.
    """
    from flax import errors, linen

    module, method, initial = _linen_call(model)
    if arguments is None and initial is None:
        raise ArgumentError(
            "the Linen model does not say what it is called with", hints=[Hint(("inputs",))]
        )
    args, kwargs = _as_float32(_varied(initial) if arguments is None else arguments)
    names = list(leaves)

    def call(values: Sequence[Any], kept: list[tuple[Path, Any]]) -> Any:
        def noting(function: Any, given: Any, keywords: Any, context: Any) -> Any:
            _compute_in_float32(context.module)
            made = function(*given, **keywords)
            if (
                more == "calls"
                and context.method_name == "__call__"
                and context.module.scope is not None
            ):
                kept.append((tuple(context.module.path), made))
            return made

        variables: dict[str, Any] = {}
        for path, value in zip(names, values, strict=True):
            node = variables
            for key in path[:-1]:
                node = node.setdefault(str(key), {})
            node[str(path[-1])] = value
        with linen.intercept_methods(noting):
            if isinstance(module, linen.Module):
                return module.apply(variables, *args, method=method, **kwargs)
            return module(variables, *args, **kwargs)

    try:
        return _run(call, "Linen", leaves, tell, (args, kwargs), more)
    except (
        errors.ScopeCollectionNotFound,
        errors.ScopeParamNotFoundError,
        errors.ScopeVariableNotFoundError,
    ) as error:
        raise ArgumentError(
            "the Linen model has other leaves than the checkpoint",
            [str(error).partition(" (https:")[0]],
            [
                Hint(
                    *("if ", ("rename",), " has given the leaves other names: a rule of "),
                    *(("map_file",), " does so for the conversion alone"),
                )
            ],
        ) from error


def nnx_run(
    model: Any, leaves: Mapping[Path, Leaf], tell: Tell, arguments: Arguments, more: More
) -> Run:
    """Runs an NNX model. Arguments as for `linen_run`; the model is as `reshard.target` takes it.

    Raises:
      ArgumentError: there is no module in the model, it does not take these arguments, or its
        outputs depend on what the checkpoint does not have.
    """
    from flax import nnx

    module: Any = state_of(model)
    for key in nnx_outline(module)[0]:
        inside = isinstance(module, Mapping | list | tuple)
        module = module[key] if inside else getattr(module, str(key))
    if not isinstance(module, nnx.Module):
        raise ArgumentError(
            f"the NNX model is no module, but a {type(module).__name__}, which cannot be run",
            hints=["its class, or a function that returns it"],
        )
    apart = flatten_state(module)
    args, kwargs = _as_float32(arguments)
    held: dict[Path, Leaf] = {}
    for leaf in apart.leaves:
        path = tuple(map(str, leaf.path))
        held[path] = leaves.get(path, leaf.value)

    def call(values: Sequence[Any], kept: list[tuple[Path, Any]]) -> Any:
        made = apart.unflatten(values)
        made.eval()
        for _, node in nnx.iter_graph(made):
            if isinstance(node, nnx.Module):
                _compute_in_float32(node)
        with _noted(made, kept) if more == "calls" else contextlib.nullcontext():
            return made(*args, **kwargs)

    return _run(call, "NNX", held, tell, (args, kwargs), more)


def _run(
    call: Callable[[Sequence[Any], list[tuple[Path, Any]]], Any],
    api: str,
    leaves: Mapping[Path, Any],
    tell: Tell,
    arguments: Arguments,
    more: More,
) -> Run:
    """Runs a model.

    Args:
      call: the model, called with the values of its leaves and a list for the outputs of modules.
      api: what it is of, in words.
      leaves: its leaves; abstract ones are those that the checkpoint does not have.
      tell: as for `linen_run`.
      arguments: what it is called with.
      more: as for `linen_run`.
    """
    import jax
    from jax.interpreters import partial_eval

    paths = list(leaves)
    abstract = [_abstract(leaf) for leaf in leaves.values()]
    with jax.default_matmul_precision("highest"):
        known: list[tuple[Path, Any]] = []
        traced = jax.make_jaxpr(lambda values: call(values, known))(abstract).jaxpr
        _, live = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
        used = {path for path, is_used in zip(paths, live, strict=True) if is_used}
        missing = [path for path in used if not isinstance(leaves[path], ArrayHandle)]
        if missing:
            raise ArgumentError(
                f"the outputs of the {api} model depend on leaves that the checkpoint lacks",
                sorted(map(format_path, missing)),
            )
        outputs = [x for _, node in known for x in jax.tree.leaves(node) if hasattr(x, "aval")]
        floats = [n for n, leaf in enumerate(abstract) if _is_floating(leaf.dtype)]

        def total(some: Sequence[Any], others: Sequence[Any]) -> Any:
            values = list(others)
            for number, value in zip(floats, some, strict=True):
                values[number] = value
            return _weighted_sum(call(values, []))

        gradient = backward = None
        if more == "unused":
            gradient = jax.grad(total)
            # The model's own code may fail: of what cannot be differentiated nothing is known.
            with contextlib.suppress(Exception):
                backward = jax.make_jaxpr(gradient)([abstract[n] for n in floats], abstract).jaxpr
        most = peak_bytes(traced) + sum(x.aval.size * x.aval.dtype.itemsize for x in outputs)
        most = max(most, 0 if backward is None else peak_bytes(backward))
        again = ", once more," if more == "calls" else ""
        tell(f"running the {api} model{again} takes about {format_bytes(most)} of memory")
        kept: list[tuple[Path, Any]] = []
        values = [_value(leaf) for leaf in leaves.values()]
        made = call(values, kept)
        unused = [paths[n] for n in floats]
        if gradient is not None and backward is not None:
            gradients = gradient([values[n] for n in floats], values)
            unused = [paths[n] for n, g in zip(floats, gradients, strict=True) if not g.any()]
    found, _ = jax.tree_util.tree_flatten_with_path(made)
    outputs = [(jax.tree_util.keystr(keys), _array(api, value)) for keys, value in found]
    if not outputs:
        raise ArgumentError(f"the {api} model returns nothing, so there is nothing to compare")
    return Run(
        arguments,
        outputs,
        [(path, _array(api, value)) for path, node in kept for value in _arrays(node)],
        unused,
    )


def _weighted_sum(outputs: Any) -> Any:
    """A sum of what a model returns, in which each number counts differently."""
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(
        (jnp.sum(x.astype("float32") * random.normal(size=x.shape)) for x in floats), jnp.zeros(())
    )


class _Reached(BaseException):
    """The initialisation of a Linen module, which is as far as a model's code is to run."""

    def __init__(self, module: Any, method: Any, arguments: Arguments):
        super().__init__()
        self.module, self.method, self.arguments = module, method, arguments


def _linen_call(model: Any) -> tuple[Any, Any, Arguments | None]:
    """The module of a Linen model (or a function like its `apply`), the method that it is
    initialised by, and with what; nothing is initialised."""
    from flax import linen

    def reached(
        module: Any,
        rngs: Any,
        *args: Any,
        method: Any = None,
        mutable: Any = None,
        capture_intermediates: Any = None,
        **kwargs: Any,
    ) -> Any:
        raise _Reached(module, method, (args, kwargs))

    make = maker(model)
    base: Any = linen.Module
    before = base.init, base.init_with_output
    base.init = base.init_with_output = reached
    try:
        state = model if make is None else make()
    except _Reached as found:
        return found.module, found.method, found.arguments
    finally:
        base.init, base.init_with_output = before
    apply = getattr(state, "apply_fn", None)
    if apply is None:
        raise ArgumentError(
            "the Linen model does not say which module it is of, so it cannot be run",
            hints=["a function that calls the `init` of the module"],
        )
    module = getattr(apply, "__self__", None)
    return (module if isinstance(module, linen.Module) else apply), None, None


def _varied(arguments: Arguments | None) -> Any:
    """Arguments, of which arrays of numbers that are all the same, or not known, are random ones:
    normal, or zeros and ones."""
    import jax
    import jax.core

    rng = np.random.default_rng(0)

    def varied(value: Any) -> Any:
        if not hasattr(value, "shape") or not hasattr(value, "dtype") or value.dtype == bool:
            return value
        known = not isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)
        if known and (np.asarray(value) != np.asarray(value).flat[0]).any():
            return value
        if _is_floating(value.dtype):
            return rng.standard_normal(value.shape).astype(np.float32)
        return rng.integers(2, size=value.shape).astype(value.dtype)

    return jax.tree.map(varied, arguments)


def _as_float32(arguments: Arguments) -> Arguments:
    """Arguments with arrays of floats in float32."""
    import jax

    return jax.tree.map(
        lambda x: np.asarray(x, np.float32) if _is_floating(getattr(x, "dtype", None)) else x,
        arguments,
    )


def _compute_in_float32(module: Any) -> None:
    """Has a module compute in float32 if it says that it does so in less."""
    # A `__getattr__` of the user's is a method to Linen, and would be looked at in turn.
    if _is_floating(inspect.getattr_static(module, "dtype", None)):
        object.__setattr__(module, "dtype", np.dtype(np.float32))


@contextlib.contextmanager
def _noted(model: Any, kept: list[tuple[Path, Any]]) -> Iterator[None]:
    """Keeps what the modules of an NNX model return meanwhile."""
    from flax import nnx

    places = {
        id(node): tuple(map(str, path))
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
    }
    running: set[int] = set()

    def noting(call: Any) -> Any:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = id(module) in places and id(module) not in running
            running.add(id(module))
            made = call(module, *args, **kwargs)
            if outermost:  # and not by way of a class that its own is derived from
                running.discard(id(module))
                kept.append((places[id(module)], made))
            return made

        return noted

    kinds: set[Any] = {type(node) for _, node in nnx.iter_graph(model) if id(node) in places}
    own = {kind: vars(kind).get("__call__") for kind in kinds}
    defined = {kind: [base for base in kind.__mro__ if "__call__" in vars(base)] for kind in kinds}
    calls = {kind: noting(bases[0].__call__) for kind, bases in defined.items() if bases}
    try:
        for kind, call in calls.items():
            kind.__call__ = call
        yield
    finally:
        for kind in calls:
            if own[kind] is None:
                del kind.__call__
            else:
                kind.__call__ = own[kind]


def _abstract(leaf: Any) -> Any:
    """What a leaf is traced as."""
    import jax

    if not isinstance(leaf, ArrayHandle):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    dtype = np.float32 if _is_floating(leaf.dtype) else leaf.dtype
    if leaf.key_impl is None:
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    data = jax.ShapeDtypeStruct(leaf.shape, np.uint32)
    return jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=leaf.key_impl), data)


def _value(leaf: Any) -> Any:
    """The value of a leaf; zeros for one that the checkpoint lacks, which counts for nothing."""
    import jax

    if not isinstance(leaf, ArrayHandle):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.numpy.broadcast_to(jax.random.key(0), leaf.shape)
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    read = checked(leaf.view().read(), f"{format_path(leaf.path)}: its stored bytes")
    values = leaf.rounded(np.asarray(read))
    if leaf.key_impl is not None:
        return jax.random.wrap_key_data(jax.numpy.asarray(values), impl=leaf.key_impl)
    return jax.numpy.asarray(values, np.float32 if _is_floating(leaf.dtype) else None)


def _array(api: str, value: Any) -> np.ndarray:
    """An output in memory."""
    import jax

    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        raise ArgumentError(f"an output of the {api} model is no array, but {value!r:.80}")
    found = np.asarray(value)
    if np.iscomplexobj(found):
        found = np.stack([np.real(found), np.imag(found)], axis=-1)
    return found.astype(np.float32) if _is_floating(found.dtype) else found


def _arrays(node: Any) -> list[Any]:
    """The arrays of what a module has returned, less those that only what is compiled has seen."""
    import jax
    import jax.core

    return [
        leaf
        for leaf in jax.tree.leaves(node)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    ]


def _is_floating(dtype: Any) -> bool:
    import jax

    try:
        return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))
    except TypeError:
        return False
