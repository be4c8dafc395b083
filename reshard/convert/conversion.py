"""Conversion of Linen checkpoints to NNX, and back: `to_nnx` and `to_linen`.

    source tree -> layout -> map file -> alignment with the model -> optimizer -> target tree

Everything is decided from paths, shapes and dtypes, and all problems are reported, before an array
is read. The result is a `Checkpoint` whose leaves are computed when they are written or restored.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.arrays.derived import constant
from reshard.arrays.handle import ArrayHandle
from reshard.arrays.operations import Crop
from reshard.checkpoint import Checkpoint, Leaf, check_known, describe
from reshard.convert import map_rules
from reshard.convert.decision import Ledger, Outcome, outcomes
from reshard.convert.layout import Layout, detect
from reshard.convert.leafmap import LeafMap, an_array
from reshard.convert.mapfile import write_map
from reshard.convert.model import TargetTree, target_tree_of
from reshard.convert.model_run import OutputComparison, RunModel, compare_outputs, run
from reshard.convert.record import (
    NOT_SEEN,
    NOT_TRIED,
    Modules,
    beside,
    both,
    by_order,
    by_order_in,
    counter,
    from_record,
    has_record,
    order_of,
    order_warning,
    recorded,
    recorded_kind,
    with_order,
    without_record,
)
from reshard.convert.remap import PREFIX
from reshard.errors import ArgumentError, MemoryLimitError, TreeMismatchError
from reshard.loader import open as open_checkpoint
from reshard.restore.pytrees import saved_tree
from reshard.restore.target import maker
from reshard.transforms import select, without
from reshard.tree import (
    LISTING,
    Path,
    check_lists,
    format_path,
    named_in,
    parse_globs,
)
from reshard.units import format_bytes, parse_bytes


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that has been decided. `print()` shows the map, leaf by leaf.

    Attributes:
      checkpoint: the converted checkpoint.
      layout: the layout of the source.
      map: the map of the model's leaves, from the source to the result.
      initial: paths in the model of leaves that keep the model's own initial value.
      to: the API of the result, `"nnx"` or `"linen"`.
      source: the checkpoint that is converted.
      kind: the layout of the result, one of `reshard.convert.layout.KINDS`.
      outcomes: the verdict on each leaf of the source and of the result.
      places: path of a leaf in the model that is converted to -> its saved path in the result.
      warnings: decisions that may be wrong.
      groups: the modules of one class that only order has paired.
    """

    checkpoint: Checkpoint
    layout: Layout
    map: LeafMap
    initial: tuple[Path, ...]
    to: str
    source: Checkpoint
    kind: str
    outcomes: tuple[Outcome, ...]
    places: dict[Path, Path]
    warnings: tuple[str, ...] = ()
    groups: tuple[Modules, ...] = ()

    def leaves(self, api: str) -> dict[Path, Leaf]:
        """The model's leaves before or after, as an API has them: path in the model -> leaf."""
        if api == self.to:
            return {path: self.checkpoint[saved] for path, saved in self.places.items()}
        return {path: self.source[saved] for path, saved in self.layout.model.items()}

    def compare_outputs(self, run: Mapping[str, RunModel], inputs: Any) -> OutputComparison:
        """Runs both models: see `reshard.convert.model_run.compare_outputs`."""
        return compare_outputs(run, inputs, self.map, self.to, self.groups)

    def checked(self, model: Any, source: Any, check: Any) -> Checkpoint:
        """The result, with the warnings as notes. Unless `check` is False, the outputs of both
        models must be equal. Arguments as for `to_nnx`."""
        if check is False:
            return self.checkpoint.replace(self.checkpoint, notes=self.warnings)
        models = {self.to: model, self.layout.api: source}
        if None in models.values():
            hint = "model=... and source=..."
            raise ArgumentError("comparing outputs needs both models", hints=[hint])
        runs = {api: functools.partial(run, api, m, self.leaves(api)) for api, m in models.items()}
        found = self.compare_outputs(runs, None if check is True else check)
        if not found.equal:
            raise TreeMismatchError(
                f"`{self.source.source.root}` is converted, but the outputs of the models differ",
                found.problems,
                ["a plan lists which leaf became which: look there for exchanged leaves"],
            )
        return self.compared(found).checked(model, source, False)

    def compared(self, found: OutputComparison, step: str = "") -> "Conversion":
        """The conversion after its outputs were found to be equal. The warning of order no longer
        names groups whose exchange changes the outputs. `step`: the beginning of the note."""
        open_ = [
            (by_order_in(groups, self.map, self.to), why)
            for groups, why in ((found.not_seen, NOT_SEEN), (found.not_tried, NOT_TRIED))
        ]
        warnings = tuple(order_warning(order, why) for order, why in open_ if order is not None)
        order = functools.reduce(both, (order for order, _ in open_), order_of(self.source))
        ckpt = self.checkpoint.replace(self.checkpoint, notes=[f"{step}{found!r}"])
        return dataclasses.replace(self, checkpoint=with_order(ckpt, order), warnings=warnings)

    @property
    def dropped(self) -> tuple[Path, ...]:
        """The leaves of the model that are left out."""
        return self.map.dropped

    def map_text(self) -> str:
        """The whole map as the text of a map file."""
        return write_map(self.map, to=self.to, own=self.initial)

    def __repr__(self) -> str:
        lines = [f"{self.layout.kind}: {reason}" for reason in self.layout.why]
        rows = [(row.origin, str(row)) for row in self.map.rows()]
        rows += [("dropped", format_path(path)) for path in self.dropped]
        rows += [("initial", format_path(path)) for path in self.initial]
        width = max((len(origin) for origin, _ in rows), default=0)
        lines += [f"{origin:<{width}}  {text}" for origin, text in rows]
        return "\n".join(lines)


def to_nnx(
    checkpoint: Checkpoint | str | os.PathLike,
    model: Any = None,
    *,
    map_file: str | os.PathLike | map_rules.Map | None = None,
    drop: str | Sequence[str] = (),
    init: str | Sequence[str] = (),
    layout: str | None = None,
    source: Any = None,
    check: Any = False,
) -> Checkpoint:
    """Convert a Linen checkpoint to an NNX checkpoint. Reads no array, except for `check`.

    Args:
      checkpoint: a checkpoint, or the path of one.
      model: the NNX model, as `reshard.target` takes it: its class, a function that returns it (or
        a dict or tuple of the model and its optimizer), or abstract or real instances. Without it,
        the map alone decides, and only the source is checked.
      map_file: a map file or a ready map; see `reshard help maps`. Other leaves are paired by their
        paths, or by the order of modules of one class.
      drop: globs of leaves of the source to leave out.
      init: globs of leaves of the target that keep the model's own initial value, which is
        computed: random state, or constants that the model owns.
      layout: the layout of the source, one of `reshard.convert.layout.KINDS`, if it is not
        detected.
      source: the Linen model of the checkpoint. It supplies the classes of modules, which paths do
        not show.
      check: run both models, and require equal outputs. True calls them with the arguments that
        initialise the Linen model; or give the arguments, as
        `reshard.convert.model_run.arguments_of` takes them. Each model is in memory once, in
        float32, one after the other.

    Returns:
      A checkpoint in the form that Orbax gives `nnx.state(model)`. Optimizer state is included. If
      the model is a module alone, the two are below the keys `model` and `optimizer`.

    Raises:
      ArgumentError: the model belongs to the other API or returns no model, the map cannot be read,
        or there is neither a model nor a map.
      TreeMismatchError: leaves of the source without a place, leaves of the target without a
        source, shapes, dtypes and collections that differ, optimizer state that cannot follow: all
        of them. Or, with `check`, the outputs of the models differ.

    Example:
      >>> from flax import nnx
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layer_0 = nnx.Linear(32, 32, rngs=rngs)
      ...         self.layer_1 = nnx.Linear(32, 32, rngs=rngs)
      >>> ckpt = reshard.to_nnx("run/1000", MLP)
      >>> ckpt["layer_0/kernel/value"]
      <layer_0/kernel/value: float32[32,32] P(None, 'model')>
      >>> model = reshard.restore(ckpt, MLP(nnx.Rngs(0)))
    """
    given = {"map_file": map_file, "drop": drop, "init": init, "layout": layout, "source": source}
    return conversion(checkpoint, "nnx", model, **given).checked(model, source, check)


def to_linen(
    checkpoint: Checkpoint | str | os.PathLike,
    model: Any = None,
    *,
    map_file: str | os.PathLike | map_rules.Map | None = None,
    drop: str | Sequence[str] = (),
    init: str | Sequence[str] = (),
    layout: str | None = None,
    source: Any = None,
    check: Any = False,
) -> Checkpoint:
    """Convert an NNX checkpoint to a Linen checkpoint: the inverse of `to_nnx`.

    A checkpoint that `to_nnx` made converts back to the same bits without a model. If you have
    trained it since, give the Linen model.

    Args:
      checkpoint: a checkpoint, or the path of one.
      model: the Linen model: a function that returns its variables or its `TrainState`, or such a
        state, abstract or real.
      map_file: a map file or a ready map. A map for the conversion to NNX is inverted.
      drop: as for `to_nnx`.
      init: as for `to_nnx`.
      layout: as for `to_nnx`.
      source: the NNX model of the checkpoint. It supplies the classes of modules and the order in
        which they are defined, which paths do not show.
      check: as for `to_nnx`.

    Raises:
      ArgumentError, TreeMismatchError: as for `to_nnx`.

    Example:
      >>> from flax import nnx
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layer_0 = nnx.Linear(32, 32, rngs=rngs)
      ...         self.layer_1 = nnx.Linear(32, 32, rngs=rngs)
      >>> plan = reshard.save(reshard.to_nnx("run/1000", MLP), "nnx/1000")
      >>> ckpt = reshard.to_linen("nnx/1000")
      >>> reshard.diff("run/1000", ckpt, values=True).equal
      True
    """
    given = {"map_file": map_file, "drop": drop, "init": init, "layout": layout, "source": source}
    return conversion(checkpoint, "linen", model, **given).checked(model, source, check)


def conversion(
    checkpoint: Checkpoint | str | os.PathLike,
    to: str,
    model: Any = None,
    *,
    map_file: str | os.PathLike | map_rules.Map | None = None,
    drop: str | Sequence[str] = (),
    init: str | Sequence[str] = (),
    layout: str | None = None,
    source: Any = None,
    max_memory: int | str | None = None,
) -> Conversion:
    """The conversion of `to_nnx` (`to="nnx"`) or `to_linen` (`to="linen"`).

    Args:
      source: as for `to_nnx` and `to_linen`, or the tree that `target_tree_of` made of it.
      max_memory: limit for the bytes of the initial values; none by default.

    Raises:
      ArgumentError, TreeMismatchError: as for `to_nnx`.
      MemoryLimitError: initial values take more than `max_memory`.
    """
    original = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    init = parse_globs("init", init)
    rules = map_file.name if isinstance(map_file, map_rules.Map) else map_file
    if to == "nnx" and isinstance(rules, str) and rules.startswith(PREFIX):
        layout = layout or "linen-params"  # the names of tensors do not prove it
    ckpt, found, left_out = _laid_out(
        original, layout, map_rules.OPPOSITE[to], parse_globs("drop", drop)
    )
    check_known(ckpt)
    if found.api == to:
        raise TreeMismatchError(
            f"`{ckpt.source.root}` is {found.kind} already",
            found.why,
            [
                f"reshard.to_{map_rules.OPPOSITE[to]}(ckpt, ...) converts it",
                "layout=... with the right layout, if this one is wrong",
            ],
        )
    if model is None and map_file is None:
        return _by_record(ckpt, found, to, init, known=source is not None)
    target = None if model is None else target_tree_of(model, to)
    if source is not None and not isinstance(source, TargetTree):
        source = target_tree_of(source, found.api, "the model of the source")
    decided = Ledger(ckpt, found, to, target, source, left_out)
    decided.decide(map_file, init)
    lost = [path for path in original if path not in ckpt]
    limit = None if max_memory is None else parse_bytes(max_memory)
    made = _made(ckpt, found, to, target, decided, model, limit, lost)
    model_map = dataclasses.replace(made.map, dropped=(*left_out, *made.map.dropped))
    left = (Outcome((path,), None, "dropped") for path in lost)
    return dataclasses.replace(made, map=model_map, outcomes=(*made.outcomes, *left))


def _by_record(
    ckpt: Checkpoint, layout: Layout, to: str, init: Sequence[str], known: bool
) -> Conversion:
    """The conversion by the record of the conversion from Linen. `known`: there is the model of the
    source."""
    if to == "nnx":
        raise ArgumentError(
            "a conversion needs a model or a map", hints=["model=...", "map_file=..."]
        )
    if init:
        globs = [f"`{glob}`" for glob in init]
        raise ArgumentError("without a model, no leaf has an initial value", globs, ["model=..."])
    if not has_record(ckpt):
        classes = "" if known else "; source=... supplies the classes of the NNX model"
        raise TreeMismatchError(
            f"`{ckpt.source.root}` has no record of a conversion from Linen: it was not made by "
            "one, or was trained and saved since then",
            hints=[
                f"model=..., the Linen model{classes}",
                "map_file=..., the map of the conversion to NNX",
            ],
        )
    made, back = from_record(ckpt)
    rows = tuple(outcomes(back, "record"))
    return Conversion(made, layout, LeafMap({}), (), to, ckpt, "linen-variables", rows, {})


def _laid_out(
    ckpt: Checkpoint, kind: str | None, api: str, drop: Sequence[str]
) -> tuple[Checkpoint, Layout, dict[Path, ArrayHandle]]:
    """The checkpoint without the leaves that globs name, by saved paths or by paths in the model;
    its layout; and the leaves of the model that were dropped."""
    recorded = recorded_kind(ckpt) if kind is None else None
    try:
        layout = detect(ckpt, kind or recorded, api)
    except TreeMismatchError as error:
        if not drop:
            raise
        rest = select(ckpt, drop=drop)
        found = detect(rest, kind or recorded, api)
        try:
            layout = detect(ckpt, found.kind, api)
        except TreeMismatchError:
            tops = {path[0] for path in found.model.values()}
            if found.optimizer and any(path[0] in tops for path in ckpt if path not in rest):
                raise error from None  # it may be the state of dropped parameters
            return rest, found, {}
    if recorded is not None:
        layout = dataclasses.replace(layout, why=("the record of its conversion says so",))
    state = [(("opt_state", *path), saved) for path, saved in layout.optimizer.items()]
    names = ([(path, path) for path in ckpt], [*layout.model.items(), *state])
    dropped = named_in(names, drop, otherwise=LISTING)
    left_out = {
        path: leaf
        for path, saved in layout.model.items()
        if saved in dropped and isinstance(leaf := ckpt[saved], ArrayHandle)
    }
    return without(ckpt, dropped) if dropped else ckpt, layout.without(dropped), left_out


def _made(
    ckpt: Checkpoint,
    layout: Layout,
    to: str,
    target: TargetTree | None,
    decided: Ledger,
    model: Any,
    max_memory: int | None,
    left_out: Sequence[Path],
) -> Conversion:
    """The conversion that was decided. `left_out`: leaves that were dropped before."""
    not_zero = decided.map.not_zero(ckpt)
    if not_zero:
        raise TreeMismatchError(
            "leaves without a place in the result are not zero",
            [f"{format_path(path)}  {describe(ckpt[path])}" for path in not_zero],
            ["NNX's GRUCell has no bias in its recurrent part: use your own cell with that bias"],
        )
    made = decided.map.bind(ckpt)
    like = an_array(ckpt)
    for path, (dtype, value_type) in decided.counters.items():
        made[path] = counter(made[path], dtype, value_type, like)
    initial = [decided.prefix + path for path in decided.initial]
    if initial:
        values_of = _initial_values(model, decided.initial, max_memory)
        for path, (values, impl) in values_of.items():
            place = decided.prefix + path
            made[place] = beside(constant(place, values, like, impl), like)
    made |= decided.empty
    leaves = () if target is None else target.leaves  # other leaves come last
    places = {decided.prefix + path: place for place, path in enumerate(leaves)}
    order = sorted(made, key=lambda path: places.get(path, len(places)))
    check_lists(made)
    ordered = by_order(decided.model, to)
    result = ckpt.replace({path: made[path] for path in order}, notes=decided.notes, retyped=True)
    if any(leaf.key_impl for leaf in result.arrays):
        result = result.with_source(metadata_apart=True)
    default = "nnx-state" if to == "nnx" else "linen-variables"
    modeled = {} if target is None else target.layout.model
    kind = "nnx-model" if decided.prefix else default if target is None else target.layout.kind
    if layout.api == "nnx":
        result = without_record(result)
    elif not any(isinstance(call.operation, Crop) for call in decided.map.calls()):
        dropped = dict.fromkeys((*left_out, *decided.map.dropped))
        kept = {path: leaf for path, leaf in ckpt.items() if path not in dropped}
        own = [*initial, *decided.empty]
        result = recorded(result, kept, ckpt.source.metadata, decided.map, own, kind, dropped)
    return Conversion(
        with_order(result, both(ordered, order_of(ckpt))),
        layout,
        decided.model,
        decided.initial_names,
        to,
        ckpt,
        kind,
        tuple(outcomes(decided.map, initial=initial)),
        {path: decided.prefix + saved for path, saved in modeled.items()},
        () if ordered is None else (order_warning(ordered),),
        decided.groups,
    )


def _initial_values(
    model: Any, paths: Sequence[Path], max_memory: int | None
) -> dict[Path, tuple[np.ndarray, str | None]]:
    """The initial values of a model's leaves by saved path, to the bit, with the PRNG
    implementation of typed keys.

    XLA rounds as it fuses, so the values depend on what is compiled together. So the constructor is
    traced, the operations that the leaves do not need are dropped, and the rest is evaluated one
    operation at a time, as JAX itself runs it. A function that is jitted stays whole.
    """
    import jax
    import jax.core
    from flax import nnx

    def chosen(state: Any) -> list[Any]:
        leaves: Any = saved_tree(state)
        return [leaves[path].value for path in paths]

    def variables(atoms: Sequence[Any]) -> set[Any]:
        return {atom for atom in atoms if not hasattr(atom, "val")}  # no literals

    make = maker(model)
    if make is None:
        found = saved_tree(model)
        if abstract := [path for path in paths if getattr(found[path], "abstract", False)]:
            raise ArgumentError(
                "an abstract model has no initial values",
                list(map(format_path, abstract)),
                ["give the model's class, or a function that returns the model"],
            )
        values = chosen(model)
    else:
        with nnx.use_eager_sharding(False):  # or an annotated model asks for a mesh
            traced = jax.make_jaxpr(lambda: chosen(make()))()
            size = sum(x.aval.size * x.aval.dtype.itemsize for x in traced.jaxpr.outvars)
            if max_memory is not None and size > max_memory:
                raise MemoryLimitError(
                    f"initial values of {len(paths)} leaves take {format_bytes(size)}, more than "
                    f"{format_bytes(max_memory)}",
                    hints=[f'max_memory="{-(-size // 2**20)}MiB"'],
                    least=size,
                )
            live, needed = variables(traced.jaxpr.outvars), []
            for equation in reversed(traced.jaxpr.eqns):
                if equation.effects or not live.isdisjoint(equation.outvars):
                    live |= variables(equation.invars)
                    needed.append(equation)
            values = jax.core.eval_jaxpr(traced.jaxpr.replace(eqns=needed[::-1]), traced.consts)
    result = {}
    for path, value in zip(paths, values, strict=True):
        impl = None
        if jax.numpy.issubdtype(getattr(value, "dtype", np.int64), jax.dtypes.prng_key):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        result[path] = (np.asarray(value), impl)
    return result
