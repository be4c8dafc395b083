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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from reshard.arrays.boxes import Shape
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Leaf
from reshard.convert.align import listed
from reshard.convert.layout import API_NAMES
from reshard.convert.leafmap import LeafMap
from reshard.convert.map_rules import OPPOSITE
from reshard.convert.model import nnx_outline
from reshard.convert.record import MOST_EXCHANGES, Modules, leaves_in
from reshard.errors import ArgumentError
from reshard.restore.pytrees import flatten_state
from reshard.restore.target import maker, state_of
from reshard.tree import Path, format_path

# How far elements of equal outputs may be apart, in units of the noise.
_LIMIT = 10.0
# The noise of an element is the largest among those of about its magnitude: up to twice as large.
# The smallest may be alone: for these, up to 8 elements that are up to 1000 times as large.
_ALIKE, _NEAR, _FEW = 2.0, 1000.0, 8
_MOST_LISTED = 3

# Positional and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Paths of two leaves that are exchanged.
Exchange = tuple[Path, Path]
# The arrays that a model returned, with their places; and the first array that each call of a
# module returned, with the path of the module. None for one in compiled code, such as a scan.
_Outputs = Sequence[tuple[str, np.ndarray]]
_Calls = Sequence[tuple[Path, np.ndarray | None]]
# A model, called with the values of its leaves and a list for what its modules return.
_Call = Callable[[Sequence[Any], list[tuple[Path, Any]]], Any]


class Run(NamedTuple):
    """The result of running a model.

    Attributes:
      side: the library of the model, for messages: Linen, NNX or Hugging Face.
      arguments: the arguments that it was called with.
      outputs: the arrays that it returned, each with its place in what was returned.
      calls: arrays that its modules returned, in the order in which the calls ended.
      noisy: `outputs` and `calls` with every weight moved by one unit in the last place. Only of
        the source model, like `seen`.
      seen: whether each exchange of two leaves changes the outputs by more than noise.
      unused: paths of leaves of floating-point numbers whose gradient is zero, for example an
        expert that no input was sent to. All if there is no gradient. Only of the target model.
    """

    side: str
    arguments: Arguments
    outputs: _Outputs
    calls: _Calls = ()
    noisy: tuple[_Outputs, _Calls] = ((), ())
    seen: Sequence[bool] = ()
    unused: Sequence[Path] = ()


# A function that runs a model with arguments, or with its own if they are None. It runs the source
# model again with each of some exchanges; these are None for the target model.
RunModel = Callable[[Arguments | None, Sequence[Exchange] | None], Run]


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
    pairs = inputs if isinstance(inputs, dict) else dict.fromkeys(API_NAMES, inputs)
    for side, pair in pairs.items():
        match pair:
            case [[*args], {**kwargs}] if side in API_NAMES and all(
                isinstance(k, str) for k in kwargs
            ):
                found[side] = tuple(args), kwargs
            case _:
                problems.append(f"{side}: {pair!r:.80}")
    if problems:
        raise ArgumentError(
            "the inputs are not a pair of a tuple and a dict, or such a pair for each API",
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
    """Run both models and compare their outputs, also with leaves of the source model exchanged.

    Args:
      run: functions that run the models, by API.
      inputs: what to call them with. See `arguments_of`.
      found: the map of the model's leaves.
      to: the API that it goes to.
      groups: the modules of one class that only order has paired.
    """
    given, source = arguments_of(inputs), OPPOSITE[to]
    exchanges = _exchanges(groups, found, source)
    asked = {source: [*exchanges.values()][:MOST_EXCHANGES], to: None}
    linen = run["linen"](given.get("linen"), asked["linen"])
    nnx = run["nnx"](given.get("nnx", linen.arguments), asked["nnx"])
    before, after = (linen, nnx) if to == "nnx" else (nnx, linen)
    unused = tuple(after.unused)
    difference, problems = _compared(before, after)
    if difference > _LIMIT:
        problems += _first_difference(before, after, found)
    if problems:
        return OutputComparison(difference, tuple(problems), unused)
    seen = dict(zip(exchanges, before.seen, strict=False))
    not_seen = [g for g in groups if not seen.get(g, True) or leaves_in([g], unused, to)]
    not_tried = [g for g in groups if g in exchanges and g not in (*seen, *not_seen)]
    return OutputComparison(difference, (), unused, tuple(not_seen), tuple(not_tried))


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
    outputs = zip(before.outputs, after.outputs, before.noisy[0], strict=True)
    for (name, one), (_, other), (_, noisy) in outputs:
        apart = _times_noise(one, other, noisy)
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
    if not problems and not any((np.isfinite(x) & (x != 0)).any() for _, x in before.outputs):
        problems.append("they are all zero, so they show nothing: try other inputs")
    return largest, problems


def _first_difference(before: Run, after: Run, found: LeafMap) -> list[str]:
    """The first call of a module of the source whose output differs from that of its counterpart,
    and the modules before it whose outputs are not visible."""
    outputs: dict[Path, list[np.ndarray]] = {}
    for path, value in after.calls:
        if value is not None:
            outputs.setdefault(path, []).append(value)
    counterparts = _counterparts(before, after, found)
    compiled: dict[Path, None] = {}
    names = ""
    for (path, value), (_, noisy) in zip(before.calls, before.noisy[1], strict=True):
        if value is None or noisy is None:
            compiled[path] = None
        elif (other := counterparts.get(path)) and outputs[other]:
            made = outputs[other].pop(0)
            if made.shape == value.shape and (_times_noise(value, made, noisy) > _LIMIT).any():
                pair = (path, before.side), (other, after.side)
                names = ", ".join(f"{format_path(module)} in {side}" for module, side in pair)
                break
    texts = [f"the first module whose output differs: {names}"] if names else []
    if compiled:
        place = "before it " if names else ""
        texts.append(
            f"modules that run {place}in compiled code (a scan, a jit) were not compared one by "
            f"one: {listed(list(compiled))}"
        )
    return ["; ".join(texts)] if texts else []


def _counterparts(before: Run, after: Run, found: LeafMap) -> dict[Path, Path]:
    """Module before -> module after: all leaves of one are made of all leaves of the other, and of
    no others. If a module holds only another module, the inner one counts."""
    pairs = [(one, other) for other, sources in found.made_of().items() for one in sources]
    by_leaves: list[dict[frozenset[int], Path]] = []
    for side, run in enumerate((before, after)):
        called = {path for path, value in run.calls if value is not None}
        below: dict[Path, set[int]] = {}
        for number, pair in enumerate(pairs):
            # Linen's paths begin with the collection.
            leaf = tuple(map(str, pair[side][run.side == API_NAMES["linen"] :]))
            for end in range(1, len(leaf)):
                if leaf[:end] in called:
                    below.setdefault(leaf[:end], set()).add(number)
        by_leaves.append({frozenset(leaves): path for path, leaves in below.items()})
    ones, others = by_leaves
    return {module: others[leaves] for leaves, module in ones.items() if leaves in others}


def run(
    api: str,
    model: Any,
    leaves: Mapping[Path, Leaf],
    arguments: Arguments | None,
    exchanges: Sequence[Exchange] | None,
) -> Run:
    """Run a model.

    Args:
      api: `"linen"` or `"nnx"`.
      model: for Linen a function that initialises a module, or a `TrainState` whose `apply_fn` is
        the module's; for NNX as `reshard.target` takes it.
      leaves: path in the model -> array.
      arguments: the arguments of the call. None, only for Linen: those of its initialisation, with
        arrays of one repeated number replaced by random ones.
      exchanges: for the source model, pairs of leaves to exchange, each in a run of its own; None
        for the target model.

    Raises:
      ArgumentError: the module or its arguments are unknown, the model has other leaves or does not
        take these arguments, its outputs depend on leaves that the checkpoint lacks, or there are
        no outputs.
    """
    import jax
    import jax.core

    find = _linen_model if api == "linen" else _nnx_model
    call, held, arguments = find(model, leaves, arguments)
    api, paths = API_NAMES[api], list(held)

    def called(some: Mapping[int, Any]) -> tuple[_Outputs, _Calls]:
        kept: list[tuple[Path, Any]] = []
        made = call([some.get(number, value) for number, value in enumerate(values)], kept)
        outputs, _ = jax.tree_util.tree_flatten_with_path(made)
        calls = []
        for path, node in kept:
            for first in [x for x in jax.tree.leaves(node) if isinstance(x, jax.Array)][:1]:
                compiled = isinstance(first, jax.core.Tracer)
                calls.append((path, None if compiled else _array(api, first)))
        return [(jax.tree_util.keystr(keys), _array(api, x)) for keys, x in outputs], calls

    def total(some: Mapping[int, Any]) -> Any:
        """A sum of the outputs with random weights."""
        random = np.random.default_rng(0)
        made = call([some.get(number, value) for number, value in enumerate(values)], [])
        floats = [x for x in jax.tree.leaves(made) if is_floating(x.dtype)]
        return sum((x.astype("float32") * random.normal(size=x.shape)).sum() for x in floats)

    with jax.default_matmul_precision("highest"):
        values = [_value(leaf) for leaf in held.values()]
        _check_present(call, api, held, values)
        floats = {n: value for n, value in enumerate(values) if is_floating(value.dtype)}
        outputs, calls = called({})
        if not outputs:
            raise ArgumentError(f"the {api} model returns nothing, so no output can be compared")
        made = Run(api, arguments, outputs, calls)
        if exchanges is None:
            gradients = dict.fromkeys(floats, np.zeros(()))
            with contextlib.suppress(Exception):  # models that cannot be differentiated
                gradients = jax.grad(total)(floats)
            return made._replace(unused=[paths[n] for n, x in gradients.items() if not x.any()])
        noisy = called({n: jax.numpy.asarray(moved(np.asarray(x))) for n, x in floats.items()})
        seen = []
        for one, other in (map(paths.index, exchange) for exchange in exchanges):
            exchanged, _ = called({one: values[other], other: values[one]})
            pairs = zip(outputs, exchanged, noisy[0], strict=True)
            seen.append(
                any(
                    x.shape != y.shape or (_times_noise(x, y, again) > _LIMIT).any()
                    for (_, x), (_, y), (_, again) in pairs
                )
            )
    return made._replace(noisy=noisy, seen=seen)


def _check_present(call: _Call, api: str, held: Mapping[Path, Any], values: Sequence[Any]) -> None:
    """Raises ArgumentError: the outputs of a model depend on leaves that the checkpoint lacks."""
    import jax
    from jax.interpreters import partial_eval

    traced = jax.make_jaxpr(lambda given: call(given, []))(values).jaxpr
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    missing = [
        format_path(path)
        for (path, leaf), is_used in zip(held.items(), used, strict=True)
        if is_used and not isinstance(leaf, ArrayHandle)
    ]
    if missing:
        text = f"the outputs of the {api} model depend on leaves that the checkpoint lacks"
        raise ArgumentError(text, sorted(missing))


def _value(leaf: Any) -> Any:
    """The value of a leaf; zeros if the checkpoint lacks it."""
    import jax

    if not isinstance(leaf, ArrayHandle):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.numpy.broadcast_to(jax.random.key(0), leaf.shape)
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    values = leaf.read()
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


def is_floating(dtype: Any) -> bool:
    import jax

    try:
        return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))
    except TypeError:
        return False


def _linen_model(
    model: Any, leaves: Mapping[Path, Leaf], arguments: Arguments | None
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
            if context.method_name == "__call__" and context.module.scope is not None:
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
                    "if you renamed leaves, use a rule of map_file=... instead: then the source "
                    "keeps its Linen names",
                ],
            ) from error

    return call, leaves, (args, kwargs)


def _nnx_model(
    model: Any, leaves: Mapping[Path, Leaf], arguments: Any
) -> tuple[_Call, Mapping[Path, Any], Arguments]:
    """The call of an NNX model, its leaves and its arguments."""
    from flax import nnx

    module: Any = state_of(model)
    for key in nnx_outline(module)[0]:
        inside = isinstance(module, Mapping | list | tuple)
        module = module[key] if inside else getattr(module, str(key))
    if not (isinstance(module, nnx.Module) and callable(module)):
        raise ArgumentError(
            f"the NNX model is a {type(module).__name__}, not a module with `__call__`, so it "
            "cannot be run",
            hints=["give the module's class, or a function that returns the module"],
        )
    apart = flatten_state(module)
    args, kwargs = _as_float32(arguments)
    own: dict[Path, Any] = {tuple(map(str, x.path)): x.value for x in apart.leaves}
    held: dict[Path, Any] = {path: leaves.get(path, value) for path, value in own.items()}

    def call(values: Sequence[Any], kept: list[tuple[Path, Any]]) -> Any:
        made = apart.unflatten(values)
        made.eval()
        with _noted(made, kept):
            return made(*args, **kwargs)

    return call, held, (args, kwargs)


@contextlib.contextmanager
def _noted(model: Any, kept: list[tuple[Path, Any]]) -> Iterator[None]:
    """Has the modules of an NNX model compute in float32, and records their outputs within the
    context."""
    from flax import nnx

    nodes = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
    places = {id(node): tuple(map(str, path)) for path, node in nodes}

    def noting(kind: type, call: Any) -> Any:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            made = call(module, *args, **kwargs)
            if type(module) is kind and id(module) in places:  # and not a call of a base class
                kept.append((places[id(module)], made))
            return made

        return noted

    with contextlib.ExitStack() as patches:
        for _, node in nodes:
            _compute_in_float32(node)
        for kind in {type(node) for _, node in nodes}:
            if any("__call__" in vars(base) for base in kind.__mro__):
                call = noting(kind, kind.__call__)
                patches.enter_context(mock.patch.object(kind, "__call__", call))
        yield


class _Reached(BaseException):
    """The first call of a Linen module ends a model's code here. `args`: see `_linen_call`."""


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
        module, method, arguments = found.args
        return module, method, arguments
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
    # Linen takes a `__getattr__` of the user's for a method, and would intercept it.
    if is_floating(inspect.getattr_static(module, "dtype", None)):
        object.__setattr__(module, "dtype", np.dtype(np.float32))


def moved(values: np.ndarray) -> np.ndarray:
    """Each element moved by one unit in the last place, up or down at random."""
    up = np.random.default_rng(0).integers(2, size=values.shape, dtype=bool)
    return np.nextafter(values, np.where(up, np.inf, -np.inf).astype(values.dtype))


def _times_noise(one: np.ndarray, other: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """The difference of each element of two arrays, in units of the largest noise among elements of
    its magnitude. Infinite if one of them is NaN, if only one is infinite, or if integers differ.
    `noisy`: the first array with every weight moved."""
    if not np.issubdtype(one.dtype, np.floating):
        return np.where(one == other, 0.0, np.inf)
    with np.errstate(all="ignore"):  # of infinity, and of the largest numbers
        unit = np.nan_to_num(np.spacing(np.abs(one)))
        one, other, noisy = (np.asarray(x, np.float64) for x in (one, other, noisy))
        known = np.isfinite(one) & np.isfinite(other)
        apart = np.where(known, np.abs(one - other), np.where(one == other, 0.0, np.inf))
        noise, level = np.abs(one - noisy), np.zeros(one.shape)
        level[known] = _level(np.abs(one[known]), np.where(np.isfinite(noise), noise, 0.0)[known])
        return np.where(apart == 0, 0.0, apart / np.maximum(level, unit))


def _level(magnitude: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The largest noise among elements of the magnitude of each."""
    order = np.argsort(magnitude)
    ranked, largest = magnitude[order], np.maximum.accumulate(noise[order])
    alike = np.searchsorted(ranked, _ALIKE * magnitude, "right")
    near = np.searchsorted(ranked, _NEAR * magnitude, "right")
    zeros = np.searchsorted(ranked, 0.0, "right")
    return largest[np.maximum(alike, np.minimum(near, zeros + _FEW)) - 1]
