"""Run both models of a conversion with the values of their checkpoints, and compare the outputs.

Each model runs in float32, matrix products at the highest precision, in evaluation mode. The rest
of a difference is the order of operations. So differences are measured in noise: what each element
changes by when every weight of the source model moves by one unit in the last place.

Equal outputs do not check modules that the outputs do not depend on. So leaves of the modules that
only order has paired are exchanged, and the outputs have to differ.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Leaf
from reshard.convert.align import listed
from reshard.convert.by_order import Modules, leaves_in
from reshard.convert.layout import API_NAMES
from reshard.convert.leafmap import LeafMap
from reshard.convert.map_rules import OPPOSITE
from reshard.convert.model import nnx_outline
from reshard.errors import ArgumentError
from reshard.restore.pytrees import flatten_state
from reshard.restore.target import maker, state_of
from reshard.storage.location import checked
from reshard.tree import Path, format_path

HUGGING_FACE = "Hugging Face"
# How far elements of equal outputs may be apart, in units of the noise.
_LIMIT = 10.0
# The noise of an element is the largest among those of about its magnitude: up to twice as large.
# The smallest may be alone: for these, up to 8 elements that are up to 1000 times as large.
_ALIKE, _NEAR, _FEW = 2.0, 1000.0, 8
_MOST_EXCHANGES = 32
_MOST_LISTED = 3

# Positional and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# What is computed besides the outputs: which leaves do not affect them; the outputs with every
# weight moved by one unit in the last place; the same, and the outputs of modules.
More = Literal["unused", "noise", "calls"]
# Paths of two leaves that are exchanged.
Exchange = tuple[Path, Path]
# A function that runs a model: takes arguments, `More`, and `Exchange`s.
RunModel = Callable[..., "Run"]
# An array that a model returned, with its place; and one that a module returned, with its path.
_Outputs = list[tuple[str, np.ndarray]]
_Calls = list[tuple[Path, np.ndarray | None]]
# A model, called with the values of its leaves and a list for the outputs of modules.
_Call = Callable[[Sequence[Any], list[tuple[Path, Any]]], Any]


class Run(NamedTuple):
    """The result of one run of a model.

    Attributes:
      side: the library of the model, for messages: Linen, NNX or Hugging Face.
      arguments: the arguments that it was called with.
      outputs: the arrays that it returned, each with its place in what was returned.
      calls: path of a module and an array that it returned, in the order in which the calls ended;
        None for one in compiled code, such as a scan. Only if it was asked for.
      unused: paths of leaves of floating-point numbers whose gradient is zero, for example an
        expert that no input was sent to. All if the gradient was not asked for, or there is none.
      moved: `outputs` and `calls` with every weight moved by one unit in the last place.
      seen: whether each exchange of two leaves changes the outputs by more than noise.
    """

    side: str
    arguments: Arguments
    outputs: _Outputs
    calls: _Calls
    unused: list[Path]
    moved: tuple[_Outputs, _Calls]
    seen: list[bool]


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """The comparison of the outputs of two models. `print()` shows it.

    Attributes:
      difference: the largest one, in units of the noise.
      problems: why they are not equal.
      unused: leaves that the outputs do not depend on, so that nothing is known of them.
      not_seen: of the groups of modules that only order has paired, those whose exchange the
        outputs do not show.
      not_tried: those that were not exchanged, as there are too many.
    """

    difference: float
    problems: tuple[str, ...]
    unused: tuple[Path, ...]
    not_seen: tuple[Modules, ...] = ()
    not_tried: tuple[Modules, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether they are equal."""
        return not self.problems

    def __repr__(self) -> str:
        if self.problems:
            return "\n".join(["outputs differ", *(f"  {problem}" for problem in self.problems)])
        text = f"outputs equal: the largest difference is {self.difference:.1g} times the noise"
        if not self.unused:
            return text
        names = ", ".join(map(format_path, self.unused[:_MOST_LISTED]))
        more = f", ... ({len(self.unused)})" if len(self.unused) > _MOST_LISTED else ""
        return f"{text}; leaves that do not affect them are unchecked: {names}{more}"


def arguments_of(inputs: Any) -> dict[str, Arguments]:
    """The arguments of both models.

    Args:
      inputs: a tuple of positional arguments and a dict of keyword arguments, for both models; or
        one such pair for each, `{"linen": ..., "nnx": ...}`. Without `"linen"`, or if it is None,
        the arguments are those that initialise the Linen model: see `run`.

    Raises:
      ArgumentError: it is something else.
    """
    if inputs is None:
        return {}
    found: dict[str, Arguments] = {}
    problems = []
    pairs = inputs if isinstance(inputs, dict) else {"linen": inputs, "nnx": inputs}
    for side, pair in pairs.items():
        match pair:
            case [[*args], {**kwargs}] if side in API_NAMES and all(
                isinstance(k, str) for k in kwargs
            ):
                found[side] = tuple(args), kwargs
            case _:
                known = side in API_NAMES
                problems.append(f"{side}: {pair!r:.80}" if known else f"unknown side {side!r}")
    if problems:
        raise ArgumentError(
            "the inputs are not a pair of a tuple and a dict",
            problems,
            ["((x,), {})", '{"linen": ((x,), {"train": False}), "nnx": ((x,), {})}'],
        )
    return found


def compare_outputs(
    run: Mapping[str, RunModel],
    inputs: Any,
    found: LeafMap,
    to: str,
    groups: Sequence[Modules],
) -> OutputComparison:
    """Run both models and compare their outputs; if these differ, also those of their modules,
    and if not, also those of the source model with leaves exchanged.

    Args:
      run: functions that run the models, by API.
      inputs: what to call them with. See `arguments_of`.
      found: the map of the model's leaves.
      to: the API that it goes to.
      groups: the modules of one class that only order has paired.
    """
    given, source = arguments_of(inputs), OPPOSITE[to]
    more: dict[str, More] = {source: "noise", to: "unused"}
    linen = run["linen"](given.get("linen"), more["linen"])
    nnx = run["nnx"](given.get("nnx", linen.arguments), more["nnx"])
    before, after = (linen, nnx) if to == "nnx" else (nnx, linen)
    unused = tuple(after.unused)
    difference, problems = _compared(before, after)
    if difference > _LIMIT and before.side != HUGGING_FACE:  # whose modules are not recorded
        linen, nnx = run["linen"](linen.arguments, "calls"), run["nnx"](nnx.arguments, "calls")
        problems += _first_difference(linen, nnx, found, to)
    if problems:
        return OutputComparison(difference, tuple(problems), unused)
    exchanges = _exchanges(groups, found, source)
    # The weights of a Hugging Face model have other names.
    tried = list(exchanges)[: 0 if before.side == HUGGING_FACE else _MOST_EXCHANGES]
    seen: Sequence[bool] = ()
    if tried:
        seen = run[source](before.arguments, "noise", [exchanges[group] for group in tried]).seen
    not_seen = {group for group, is_seen in zip(tried, seen, strict=True) if not is_seen}
    not_seen |= {group for group in groups if leaves_in([group], unused, to)}
    return OutputComparison(
        difference,
        (),
        unused,
        tuple(group for group in groups if group in not_seen),
        tuple(group for group in groups if group in {*exchanges} - {*tried} - not_seen),
    )


def _exchanges(groups: Sequence[Modules], found: LeafMap, source: str) -> dict[Modules, Exchange]:
    """Group of modules -> the largest two leaves of equal shape in two of its modules; the largest
    groups first. A group without such leaves fits in one order only, and is left out."""
    shapes = found.sources()
    exchanges: dict[Modules, Exchange] = {}
    for group in sorted(groups, key=len, reverse=True):
        alike: dict[tuple[Path, Shape], list[Path]] = {}
        for pair in group:
            for path, inner in leaves_in([(pair,)], shapes, source).items():
                alike.setdefault((inner, shapes[path]), []).append(path)
        several = [(math.prod(s), paths) for (_, s), paths in alike.items() if len(paths) > 1]
        if several:
            _, (one, other, *_) = max(several, key=lambda entry: entry[0])
            exchanges[group] = one, other
    return exchanges


def _compared(before: Run, after: Run) -> tuple[float, list[str]]:
    """The largest difference of outputs, in units of the noise, and the problems."""
    if [x.shape for _, x in before.outputs] != [x.shape for _, x in after.outputs]:
        shapes = [
            f"{', '.join(str(list(x.shape)) for _, x in run.outputs)} in {run.side}"
            for run in sorted((before, after), key=lambda run: run.side)
        ]
        return 0.0, [f"their shapes are {', '.join(shapes)}"]
    largest, problems = 0.0, []
    outputs = zip(before.outputs, after.outputs, before.moved[0], strict=True)
    for (name, one), (_, other), (_, again) in outputs:
        apart = _times_noise(one, other, again)
        where = f"output{name}" if len(before.outputs) > 1 else "the output"
        largest = max(largest, apart.max(initial=0.0))
        if np.isinf(apart).any() and np.issubdtype(one.dtype, np.floating):
            problems.append(f"{where}: different elements are infinite, or some are NaN")
        elif (apart > _LIMIT).any():
            at = np.unravel_index(np.argmax(apart), apart.shape)
            problems.append(
                f"{where}: {list(map(int, at))} is {one[at]:.7g} in {before.side} and "
                f"{other[at]:.7g} in {after.side}, {apart[at]:.1g} times the noise; "
                f"equal outputs differ by at most {_LIMIT:.0f} times"
            )
    arrays = [x for _, x in before.outputs]
    if not problems and not any(np.isfinite(x).any() and x[np.isfinite(x)].any() for x in arrays):
        problems.append("they are all zero, so they show nothing: try other inputs")
    return largest, problems


def _first_difference(linen: Run, nnx: Run, found: LeafMap, to: str) -> list[str]:
    """The first call in Linen of a module whose output differs from that of its counterpart, and
    the modules before it whose outputs are not visible."""
    outputs: dict[Path, list[np.ndarray]] = {}
    for path, value in nnx.calls:
        if value is not None:
            outputs.setdefault(path, []).append(value)
    seen = {path for path, value in linen.calls if value is not None}
    counterparts = _counterparts(found, to, seen, outputs)
    compiled: dict[Path, None] = {}
    names = ""
    for (path, value), (_, again) in zip(linen.calls, linen.moved[1], strict=True):
        if value is None or again is None:
            compiled[path] = None
            continue
        other = counterparts.get(path)
        if other is None or not outputs[other]:
            continue
        candidate = outputs[other].pop(0)
        if candidate.shape != value.shape:
            continue
        if (_times_noise(value, candidate, again) > _LIMIT).any():
            names = f"{format_path(path)} in Linen, {format_path(other)} in NNX"
            break
    texts = [f"the first module whose output differs: {names}"] if names else []
    if compiled:
        before = "before it " if names else ""
        texts.append(
            f"modules that run {before}in compiled code (a scan, a jit) were not compared one by "
            f"one: {listed(list(compiled))}"
        )
    return ["; ".join(texts)] if texts else []


def _counterparts(
    found: LeafMap, to: str, linen: Collection[Path], nnx: Collection[Path]
) -> dict[Path, Path]:
    """Linen module -> NNX module: all leaves of one are made of all leaves of the other, and of no
    others. If modules hold only another module, the outer ones are counterparts."""
    leaves = [(one, other) for other, sources in found.made_of().items() for one in sources]
    pairs = leaves if to == "nnx" else [pair[::-1] for pair in leaves]
    groups: dict[frozenset[int], tuple[list[Path], list[Path]]] = {}
    for side, modules in enumerate((linen, nnx)):
        below: dict[Path, set[int]] = {}
        for number, pair in enumerate(pairs):
            leaf = tuple(map(str, pair[side][1 - side :]))  # Linen's begins with the collection
            for end in range(1, len(leaf)):
                below.setdefault(leaf[:end], set()).add(number)
        for path in sorted(modules, key=len):
            if path in below:
                groups.setdefault(frozenset(below[path]), ([], []))[side].append(path)
    return {
        one: other
        for ones, others in groups.values()
        if len(ones) == len(others)
        for one, other in zip(ones, others, strict=True)
    }


def run(
    api: str,
    model: Any,
    leaves: Mapping[Path, Leaf],
    arguments: Arguments | None,
    more: More,
    exchanges: Sequence[Exchange] = (),
) -> Run:
    """Run a model.

    Args:
      api: `"linen"` or `"nnx"`.
      model: for Linen a function that initialises a module, or a `TrainState` whose `apply_fn` is
        the module's; for NNX as `reshard.target` takes it.
      leaves: path in the model -> array.
      arguments: the arguments of the call. None, only for Linen: those of its initialisation, with
        arrays of one repeated number replaced by random ones.
      more: what is computed besides the outputs.
      exchanges: pairs of leaves to exchange, each in a run of its own, with `more="noise"`.

    Raises:
      ArgumentError: the module or its arguments are unknown, the model has other leaves or does not
        take these arguments, its outputs depend on leaves that the checkpoint lacks, or there are
        no outputs.
    """
    import jax

    find = _linen_model if api == "linen" else _nnx_model
    call, held, arguments = find(model, leaves, arguments, more)
    api, paths = API_NAMES[api], list(held)
    with jax.default_matmul_precision("highest"):
        values = [_value(leaf) for leaf in held.values()]
        floats = [number for number, value in enumerate(values) if is_floating(value.dtype)]
        _check_present(call, api, held, values)

        def replaced(some: Mapping[int, Any]) -> list[Any]:
            return [some.get(number, value) for number, value in enumerate(values)]

        def total(some: Mapping[int, Any]) -> Any:
            return _weighted_sum(call(replaced(some), []))

        def outputs(some: Mapping[int, Any]) -> tuple[_Outputs, _Calls]:
            kept: list[tuple[Path, Any]] = []
            made, _ = jax.tree_util.tree_flatten_with_path(call(replaced(some), kept))
            return [(jax.tree_util.keystr(keys), _array(api, value)) for keys, value in made], [
                (path, None if value is None else _array(api, value))
                for path, node in kept
                for value in _arrays(node)
            ]

        made, calls = outputs({})
        if not made:
            raise ArgumentError(f"the {api} model returns nothing, so no output can be compared")
        changed, seen, unused = ([], []), [], [paths[n] for n in floats]
        if more == "unused":
            with contextlib.suppress(Exception):  # models that cannot be differentiated
                gradients = jax.grad(total)({n: values[n] for n in floats})
                unused = [paths[n] for n, gradient in gradients.items() if not gradient.any()]
        else:
            changed = outputs({n: jax.numpy.asarray(moved(np.asarray(values[n]))) for n in floats})
        for one, other in (map(paths.index, exchange) for exchange in exchanges):
            exchanged = outputs({one: values[other], other: values[one]})
            pairs = zip(made, exchanged[0], changed[0], strict=True)
            seen.append(
                any(
                    x.shape != y.shape or (_times_noise(x, y, again) > _LIMIT).any()
                    for (_, x), (_, y), (_, again) in pairs
                )
            )
    return Run(api, arguments, made, calls, unused, changed, seen)


def _check_present(
    call: _Call, api: str, leaves: Mapping[Path, Any], values: Sequence[Any]
) -> None:
    """Raises ArgumentError: the outputs of a model depend on leaves that the checkpoint lacks."""
    import jax
    from jax.interpreters import partial_eval

    traced = jax.make_jaxpr(lambda given: call(given, []))(values).jaxpr
    _, live = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    missing = [
        format_path(path)
        for (path, leaf), used in zip(leaves.items(), live, strict=True)
        if used and not isinstance(leaf, ArrayHandle)
    ]
    if missing:
        raise ArgumentError(
            f"the outputs of the {api} model depend on leaves that the checkpoint lacks",
            sorted(missing),
        )


def _weighted_sum(outputs: Any) -> Any:
    """A sum of a model's outputs with random weights."""
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(
        (jnp.sum(x.astype("float32") * random.normal(size=x.shape)) for x in floats), jnp.zeros(())
    )


def _value(leaf: Any) -> Any:
    """The value of a leaf; zeros for one that the checkpoint lacks, which no output depends on."""
    import jax

    if not isinstance(leaf, ArrayHandle):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.numpy.broadcast_to(jax.random.key(0), leaf.shape)
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    read = checked(leaf.view().read(), f"{format_path(leaf.path)}: its stored bytes")
    values = leaf.rounded(np.asarray(read))
    if leaf.key_impl is not None:
        return jax.random.wrap_key_data(jax.numpy.asarray(values), impl=leaf.key_impl)
    return jax.numpy.asarray(values, np.float32 if is_floating(leaf.dtype) else None)


def _array(api: str, value: Any) -> np.ndarray:
    """An output in memory."""
    import jax

    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        raise ArgumentError(f"an output of the {api} model is not an array, but {value!r:.80}")
    found = np.asarray(value)
    if np.iscomplexobj(found):
        found = np.stack([np.real(found), np.imag(found)], axis=-1)
    return found.astype(np.float32) if is_floating(found.dtype) else found


def _arrays(node: Any) -> list[Any]:
    """The arrays that a module returned; None for one that only compiled code sees."""
    import jax
    import jax.core

    arrays = [leaf for leaf in jax.tree.leaves(node) if isinstance(leaf, jax.Array)]
    found = [leaf for leaf in arrays if not isinstance(leaf, jax.core.Tracer)]
    return found or [None] * bool(arrays)


def is_floating(dtype: Any) -> bool:
    import jax

    try:
        return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))
    except TypeError:
        return False


def _linen_model(
    model: Any, leaves: Mapping[Path, Leaf], arguments: Arguments | None, more: More
) -> tuple[_Call, Mapping[Path, Any], Arguments]:
    """The call of a Linen model, its leaves and its arguments."""
    from flax import errors, linen, traverse_util

    other_leaves = (
        errors.ScopeCollectionNotFound,
        errors.ScopeParamNotFoundError,
        errors.ScopeVariableNotFoundError,
    )
    module, method, initial = _linen_call(model)
    if arguments is None and initial is None:
        raise ArgumentError("the arguments of the Linen model are unknown", hints=["check=..."])
    args, kwargs = _as_float32(_varied(initial) if arguments is None else arguments)
    names = [tuple(map(str, path)) for path in leaves]

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

        variables = traverse_util.unflatten_dict(dict(zip(names, values, strict=True)))
        try:
            with linen.intercept_methods(noting):
                if isinstance(module, linen.Module):
                    return module.apply(variables, *args, method=method, **kwargs)
                return module(variables, *args, **kwargs)
        except other_leaves as error:
            raise ArgumentError(
                "the Linen model has other leaves than the checkpoint",
                [str(error).partition(" (https:")[0]],
                [
                    "if reshard.rename(ckpt, [(..., ...)]) has given the leaves other names: a "
                    "rule of map_file=... does so for the conversion alone",
                ],
            ) from error

    return call, leaves, (args, kwargs)


def _nnx_model(
    model: Any, leaves: Mapping[Path, Leaf], arguments: Any, more: More
) -> tuple[_Call, Mapping[Path, Any], Arguments]:
    """The call of an NNX model, its leaves and its arguments."""
    from flax import nnx

    module: Any = state_of(model)
    for key in nnx_outline(module)[0]:
        inside = isinstance(module, Mapping | list | tuple)
        module = module[key] if inside else getattr(module, str(key))
    if not isinstance(module, nnx.Module):
        raise ArgumentError(
            f"the NNX model is a {type(module).__name__}, not a module, so it cannot be run",
            hints=["give the module's class, or a function that returns the module"],
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

    return call, held, (args, kwargs)


class _Reached(BaseException):
    """The first call of a Linen module, which is as far as a model's code runs."""

    def __init__(self, module: Any, method: str, arguments: Arguments):
        super().__init__()
        self.module, self.method, self.arguments = module, method, arguments


def _linen_call(model: Any) -> tuple[Any, str | None, Arguments | None]:
    """The module of a Linen model (or a function like its `apply`), the method that it is
    initialised by, and the arguments; nothing is initialised."""
    from flax import linen

    def reached(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        if module.scope is None or module.scope.path or name == "setup":
            return method(*args, **kwargs)
        raise _Reached(module.unbind()[0], name, (args, kwargs))

    make = maker(model)
    try:
        with linen.intercept_methods(reached):
            state = model if make is None else make()
    except _Reached as found:
        return found.module, found.method, found.arguments
    apply = getattr(state, "apply_fn", None)
    if apply is None:
        raise ArgumentError(
            "the module of the Linen model is unknown, so the model cannot be run",
            hints=["give a function that calls the module's `init`"],
        )
    module = getattr(apply, "__self__", None)
    return (module if isinstance(module, linen.Module) else apply), None, None


def _varied(arguments: Arguments | None) -> Any:
    """Arguments in which arrays of one repeated or unknown number are replaced by random ones:
    normal numbers, or zeros and ones."""
    import jax
    import jax.core

    rng = np.random.default_rng(0)

    def varied(value: Any) -> Any:
        if not hasattr(value, "shape") or not hasattr(value, "dtype") or value.dtype == bool:
            return value
        known = not isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)
        if known and (np.asarray(value) != np.asarray(value).flat[0]).any():
            return value
        if is_floating(value.dtype):
            return rng.standard_normal(value.shape).astype(np.float32)
        return rng.integers(2, size=value.shape).astype(value.dtype)

    return jax.tree.map(varied, arguments)


def _as_float32(arguments: Arguments) -> Arguments:
    """Arguments with arrays of floats in float32."""
    import jax

    return jax.tree.map(
        lambda x: np.asarray(x, np.float32) if is_floating(getattr(x, "dtype", None)) else x,
        arguments,
    )


def _compute_in_float32(module: Any) -> None:
    """Set the dtype of a module to float32 if it is another float."""
    # A `__getattr__` of the user's is a method to Linen, and would be looked at in turn.
    if is_floating(inspect.getattr_static(module, "dtype", None)):
        object.__setattr__(module, "dtype", np.dtype(np.float32))


@contextlib.contextmanager
def _noted(model: Any, kept: list[tuple[Path, Any]]) -> Iterator[None]:
    """Records the outputs of the modules of an NNX model within the context."""
    from flax import nnx

    modules = [(p, node) for p, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
    places = {id(node): tuple(map(str, path)) for path, node in modules}
    running: set[int] = set()

    def noting(call: Any) -> Any:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = id(module) in places and id(module) not in running
            running.add(id(module))
            made = call(module, *args, **kwargs)
            if outermost:  # and not a call of a base class
                running.discard(id(module))
                kept.append((places[id(module)], made))
            return made

        return noted

    with contextlib.ExitStack() as patches:
        for kind in {type(node) for _, node in modules}:
            if any("__call__" in vars(base) for base in kind.__mro__):
                patches.enter_context(mock.patch.object(kind, "__call__", noting(kind.__call__)))
        yield


def moved(values: np.ndarray) -> np.ndarray:
    """Each element moved by one unit in the last place, up or down at random."""
    up = np.random.default_rng(0).integers(2, size=values.shape, dtype=bool)
    return np.nextafter(values, np.where(up, np.inf, -np.inf).astype(values.dtype))


def _times_noise(one: np.ndarray, other: np.ndarray, again: np.ndarray) -> np.ndarray:
    """The difference of each element of two arrays, in units of the largest noise among elements of
    its magnitude. Infinite if one of them is NaN, if only one is infinite, or if integers differ.
    `again`: the first array with every weight moved."""
    exact = not np.issubdtype(one.dtype, np.floating)
    with np.errstate(invalid="ignore", over="ignore"):  # of infinity, and of the largest numbers
        unit = np.zeros(one.shape) if exact else np.nan_to_num(np.spacing(np.abs(one)))
        one, other, again = (np.asarray(x, np.float64) for x in (one, other, again))
        apart, noise = np.abs(one - other), np.abs(one - again)
    known = np.isfinite(one) & np.isfinite(other)
    apart = np.where(known, apart, np.where(one == other, 0.0, np.inf))
    if exact:
        return np.where(apart == 0, 0.0, np.inf)
    level = np.zeros(one.shape)
    level[known] = _level(np.abs(one[known]), np.where(np.isfinite(noise), noise, 0.0)[known])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(apart == 0, 0.0, apart / np.maximum(level, unit))


def _level(magnitude: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The largest noise among elements of the magnitude of each."""
    order = np.argsort(magnitude)
    ranked, largest = magnitude[order], np.maximum.accumulate(noise[order])
    alike = np.searchsorted(ranked, _ALIKE * magnitude, "right")
    near = np.searchsorted(ranked, _NEAR * magnitude, "right")
    zeros = np.searchsorted(ranked, 0.0, "right")
    return largest[np.maximum(alike, np.minimum(near, zeros + _FEW)) - 1]
