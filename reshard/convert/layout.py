"""What a saved tree is: which of Flax's APIs wrote it, and where in it the model's leaves, the
optimizer's state and the step counter are. Pure: it looks at paths, dtypes and empty leaves.

Three things decide. First the keys at the top, as the containers that people save have them
(`params` beside `batch_stats`, a `TrainState`, an `nnx.Optimizer`, a dict with `model`). Then what
one of the APIs writes and the other does not: names like `Dense_0`, streams of random numbers, a
node that holds parameters and statistics together. Last, two or more things that are only likely
under one API. A level named `value` alone decides nothing: Orbax writes one for each of Linen's
boxes and for each of NNX's variables. Where nothing speaks against it, what is converted to one API
is of the other one. Where several readings remain, an error tells all of them.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.boxes import Shape
from reshard.convert.evidence import (
    KINDS,
    Evidence,
    Training,
    add_training_marks,
    collection_roots,
    holds_variables,
    is_stream,
    model_marks,
    training,
)
from reshard.convert.value_levels import (
    BOOKKEEPING,
    COLLECTIONS,
    Boxes,
    Node,
    SavedLeaf,
    child,
    dtype_name,
    in_variables,
    is_mapping,
    named,
    nested,
)
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.hints import Hint
from reshard.tree import Path, format_glob, format_key, format_path

_WHOLE = ("linen-params", "nnx-state", "nnx-pure-dict")  # the tree is the model


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a saved tree is, and where in it everything is.

    Attributes:
      kind: one of `KINDS`.
      api: `"linen"` or `"nnx"`.
      why: the reasons, in words.
      model: path of an array in the model -> its saved path. In Linen the path begins with the
        collection, in NNX with an attribute. Keys are text; levels of boxes and variables are left
        out. In kind `maxtext`, `nnx_aux` is a collection whose leaves have NNX's paths.
      optimizer: path below the optimizer's state, in the same form -> saved path, for all leaves
        but text: None and empty containers stand for states and masked leaves without a value.
      step: saved path of the step counter, if there is one.
      rest: saved paths of all other leaves: arrays that are in none of these, and leaves that are
        no arrays.
      roots: beginning of the paths in `model` -> where these leaves are saved.
      optimizer_root: where the optimizer's state is saved, if there is one.
      beside: path of an array of `rest` in the tree, in the same form -> its saved path.
    """

    kind: str
    api: str
    why: tuple[str, ...]
    model: dict[Path, Path]
    optimizer: dict[Path, Path]
    step: Path | None
    rest: tuple[Path, ...]
    roots: dict[Path, Path]
    optimizer_root: Path | None
    beside: dict[Path, Path] = dataclasses.field(default_factory=dict, compare=False)  # of `rest`

    def shapes(self, leaves: Mapping[Path, Any]) -> dict[Path, Shape]:
        """Path in the model -> shape, in the tree that this is the layout of."""
        return {path: leaves[saved].shape for path, saved in self.model.items()}


def detect(ckpt: Mapping[Path, Any], layout: str | None = None, api: str | None = None) -> Layout:
    """What a saved tree is.

    Args:
      ckpt: the checkpoint, or another mapping from saved paths to leaves, in which arrays are what
        has a dtype.
      layout: one of `KINDS`: what the tree is said to be, instead of being found out.
      api: the API that it is of where nothing speaks against it: the one that is converted from.

    Raises:
      TreeMismatchError: the tree can be read in several ways or in none, or it cannot be what it is
        said to be.
      ArgumentError: there is no such kind.
    """
    if layout is not None and layout not in KINDS:
        kinds = [f"{kind}: {text}" for kind, text in KINDS.items()]
        raise ArgumentError(f"there is no layout `{layout}`; there are", kinds)
    if not any(path and hasattr(leaf, "dtype") for path, leaf in ckpt.items()):
        raise TreeMismatchError("the tree has no array below a key, so nothing of a model")
    root, leaves = nested(ckpt)
    top = {key: node for key, node in root.items() if key != BOOKKEEPING}
    beside = training(top)
    if layout is not None:
        return _read(layout, [f"`{layout}` was asked for"], top, beside, leaves)
    kind, why = _decide(root, top, beside, leaves, api)
    return _read(kind, why, top, beside, leaves)


# Which kind it is.


def _decide(
    root: Node, top: Node, beside: Training, leaves: Sequence[SavedLeaf], api: str | None
) -> tuple[str, list[str]]:
    """The kind, and why."""
    params, model = top.get("params"), top.get("model")
    trained = beside.root is not None or beside.wrapped
    if BOOKKEEPING in root and not trained and not (model and beside.names):
        return "nnx-state", ["the tree is a module that was saved itself (`_pytree__state`)"]
    if is_mapping(params) and not is_stream(params):
        return _decide_linen(top, beside, leaves, api)
    if isinstance(model, dict) and (beside.names or not _others(top, beside)):
        return _decide_model(model, top, beside, api)
    if trained or (list(top) == ["step"] and dtype_name(top["step"]) == "uint32"):
        return _decide_optimizer(top, beside, api)
    if all(key in COLLECTIONS and is_mapping(node) for key, node in top.items()):
        return _decide_linen(top, beside, leaves, api)
    marks = model_marks(top)
    _check_top(top, ("opt_state",) if marks.proof else ("opt_state", "params"))
    if marks.api == "linen":
        return "linen-params", marks.linen
    kinds = _nnx_kinds(leaves)
    if marks.api == "nnx" and len(kinds) == 1 and not isinstance(model, dict):
        return kinds[0], marks.for_nnx
    readings = [] if marks.api else [_reading("linen-params", marks.linen)]
    readings += [_reading(kind, marks.for_nnx) for kind in kinds]
    if isinstance(model, dict):
        readings.append(_reading("nnx-model", ["`model` is at the top"]))
    return _by_direction(readings, marks, api)


def _decide_linen(
    top: Node, beside: Training, leaves: Sequence[SavedLeaf], api: str | None
) -> tuple[str, list[str]]:
    """For a tree with collections at the top."""
    roots = collection_roots(top, beside)
    params, at = top.get("params"), ("params",)
    if holds_variables(params):
        params, at = child(params, "params"), ("params", "params")
    if "nnx_aux" in roots.values():
        kind, reason = "maxtext", "`nnx_aux` is beside `params`, as MaxText's runs of NNX save it"
    elif len(at) > 1:
        kind, reason = "linen-train-state", "`params/params`: all variables are below `params`"
    elif beside.names:
        kind, reason = "linen-train-state", f"`params` is beside {_names(beside)}"
    else:
        kind, reason = "linen-variables", f"collections are at the top: {named(*roots)}"
    marks = model_marks(params, at)
    add_training_marks(beside, marks)
    why = [reason, *marks.linen]
    if not marks.maybe_nnx:
        return kind, why
    readings = [_reading(kind, why)]
    if kind == "linen-variables":
        readings += [_reading(other, marks.for_nnx) for other in _nnx_kinds(leaves)]
    else:
        below, inside = format_path(at), [leaf for leaf in leaves if leaf.keys[: len(at)] == at]
        for other in _nnx_kinds(inside):
            hint = _moved_up(below, other)
            readings.append(_Reading(f"{other} below `{below}`", marks.for_nnx, "nnx", hint))
    raise _ambiguous(readings, api)


def _decide_model(
    model: Node, top: Node, beside: Training, api: str | None
) -> tuple[str, list[str]]:
    """For a tree with a model below `model`."""
    marks = model_marks(model, ("model",))
    add_training_marks(beside, marks)
    variables = is_mapping(model.get("params"))
    if variables:
        marks.linen.append("`model/params` is a collection")
    if beside.names:
        marks.likely.append(f"`model` is beside {_names(beside)}")
    both = beside.root == ("opt_state",) or dtype_name(top.get("step")) == "uint32"
    kind = "nnx-model-and-optimizer" if both else "nnx-model"
    if marks.api == "nnx":
        return kind, marks.for_nnx
    what, new = ("variables", "") if variables else ("parameters", "params/")
    hint = Hint(("rename", "^model/", new))
    readings = [_reading(kind, marks.for_nnx)] if marks.api is None else []
    if not variables and not beside.names:
        readings.append(_reading("linen-params", marks.linen))
    if readings:
        below = _Reading(f"Linen's {what} below `model`", marks.linen, "linen", hint)
        return _by_direction([*readings, below], marks, api)
    raise TreeMismatchError(f"no layout has Linen's {what} below `model`", marks.linen, [hint])


def _decide_optimizer(top: Node, beside: Training, api: str | None) -> tuple[str, list[str]]:
    """For an optimizer's state with neither `params` nor `model`."""
    marks = Evidence()
    add_training_marks(beside, marks)
    others = _others(top, beside)
    if not others:
        _check_top(top, ("opt_state",))
    if top.keys() - {"opt_state", "step"}:
        above = "model/" if marks.maybe_nnx else "params/"
        raise TreeMismatchError(
            "there is the state of an optimizer, but neither `params` nor `model`",
            [f"at the top there is {named(*((key,) for key in top))}"],
            [Hint(("rename", _beginning(key), above)) for key in others],
        )
    if marks.linen:
        optimizer = _reading("nnx-optimizer", marks.for_nnx)
        linen = _Reading("a Linen train state without `params`", marks.linen, "linen")
        raise _ambiguous([linen, optimizer], api)
    return "nnx-optimizer", [f"there is nothing but {_names(beside)}", *marks.for_nnx]


def _check_top(top: Node, names: Sequence[str]) -> None:
    """Raises TreeMismatchError if states of these names are not at the top, but one level lower."""
    states = {
        key: [(key, name) for name in names if is_mapping(child(node, name))]
        for key, node in top.items()
        if any(is_mapping(child(node, name)) for name in names)
    }
    if states:
        raise TreeMismatchError(
            "what looks like a state is not at the top of the tree",
            [f"there is {named(*paths)}" for paths in states.values()],
            [
                Hint(("select_rename", format_glob((key,)) + "/**", _beginning(key), ""))
                for key in states
            ],
        )


def _names(beside: Training) -> str:
    return named(*((name,) for name in beside.names))


def _others(top: Node, beside: Training) -> list[str]:
    """The keys at the top of further containers."""
    known = ("model", *beside.names)
    return [key for key, node in top.items() if key not in known and isinstance(node, dict)]


def _nnx_kinds(leaves: Sequence[SavedLeaf]) -> list[str]:
    """Of the two kinds of an NNX state those that the tree may be."""
    return ["nnx-state" if held else "nnx-pure-dict" for held in in_variables(leaves)]


def _beginning(key: str) -> str:
    """A regex of what paths below a key begin with."""
    return f"^{re.escape(format_key(key))}/"


def _moved_up(below: str, kind: str) -> Hint:
    """How to read what is below a key as a tree of its own."""
    return Hint(("select_layout", f"{below}/**", f"^{below}/", kind))


class _Reading(NamedTuple):
    """What a tree may be: a kind or something else, what speaks for it, the API, what says so."""

    name: str
    why: Sequence[str]
    api: str
    hint: str = ""


def _reading(kind: str, reasons: Sequence[str]) -> _Reading:
    api = "nnx" if kind.startswith("nnx") else "linen"
    return _Reading(kind, reasons, api, Hint(("layout", kind)))


def _by_direction(
    readings: Sequence[_Reading], marks: Evidence, api: str | None
) -> tuple[str, list[str]]:
    """The one kind that is of the API that is converted from, if nothing speaks against that API;
    raises TreeMismatchError if there is none, or another reading of that API."""
    against = marks.linen if api == "nnx" else marks.maybe_nnx
    fitting = [reading for reading in readings if reading.api == api]
    if against or len(fitting) != 1 or fitting[0].name not in KINDS:
        raise _ambiguous(readings if against or len(fitting) < 2 else fitting, api)
    told = "NNX" if api == "nnx" else "Linen"
    why = f"the conversion is from {told}, and nothing speaks against it"
    return fitting[0].name, [*fitting[0].why, why]


def _ambiguous(readings: Sequence[_Reading], api: str | None = None) -> TreeMismatchError:
    """The error: with what says that it is this or that, as far as it goes with the direction."""
    names = " or as ".join(reading.name for reading in readings)
    fitting = [reading for reading in readings if reading.api == api]
    return TreeMismatchError(
        f"the tree can be read as {names}",
        [f"{name}: {'; '.join(why) or 'nothing against it'}" for name, why, _, _ in readings],
        [reading.hint for reading in fitting or readings if reading.hint],
    )


# Where everything is.


def _read(
    kind: str, why: list[str], top: Node, beside: Training, leaves: Sequence[SavedLeaf]
) -> Layout:
    """The layout of a tree that is of a kind, or is said to be."""
    linen = not kind.startswith("nnx")
    if kind in _WHOLE:
        roots: dict[Path, Path] = {(): ("params",) if linen else ()}
    elif linen:
        roots = {path: (name,) for path, name in collection_roots(top, beside).items()}
    else:
        roots = {("model",): ()} if kind != "nnx-optimizer" else {}
    unfit = _objections(kind, top, beside, roots, leaves)
    if unfit:
        raise TreeMismatchError(f"the tree cannot be {kind}", unfit)
    if kind in (*_WHOLE, "linen-variables"):
        beside = Training()

    model: dict[Path, list[SavedLeaf]] = {root: [] for root in roots}
    optimizer, rest = [], []
    others: list[SavedLeaf] = []
    size, depths = len(beside.root or ()), sorted({len(root) for root in roots}, reverse=True)
    for leaf in leaves:
        if leaf is beside.step:
            continue
        at = next((begin for n in depths if (begin := leaf.keys[:n]) in roots), None)
        if beside.root and leaf.keys[:size] == beside.root and leaf.keys[-1] != BOOKKEEPING:
            if isinstance(leaf.value, str):  # no state, and no masked leaf either
                rest.append(leaf.path)
            else:
                optimizer.append(leaf)
        elif at is not None and leaf.is_array:
            model[at].append(leaf)
        else:
            rest.append(leaf.path)
            others += [leaf] if leaf.is_array else []
    if linen:
        own = {root: model[root] for root, begin in roots.items() if begin != ("nnx_aux",)}
        boxes = Boxes(own)
        in_model, in_optimizer = boxes.hold, boxes.hold
        if boxes.ambiguous:
            words = "is taken for a parameter of that name: nothing else is in a box"
            why = [*why, f"{named(boxes.ambiguous.path)} {words}"]
    else:
        one, other = _variables(kind, [*itertools.chain(*model.values())], optimizer, beside.step)
        in_model, in_optimizer = lambda leaf, start: one, lambda leaf, start: other
    return Layout(
        kind=kind,
        api="linen" if linen else "nnx",
        why=tuple(why),
        model=_unique(
            (roots[root] + leaf.below(len(root), in_model(leaf, len(root))), leaf.path)
            for root, below in model.items()
            for leaf in below
        ),
        optimizer=_unique(
            (leaf.below(size, in_optimizer(leaf, size)), leaf.path) for leaf in optimizer
        ),
        step=beside.step.path if beside.step else None,
        rest=tuple(rest),
        beside=_unique((leaf.below(0, in_model(leaf, 1)), leaf.path) for leaf in others),
        roots={beginning: path for path, beginning in roots.items()},
        optimizer_root=beside.root,
    )


def _objections(
    kind: str, top: Node, beside: Training, roots: Mapping[Path, Path], leaves: Sequence[SavedLeaf]
) -> list[str]:
    """Why a tree cannot be of a kind."""
    modules = [leaf.path[:-1] for leaf in leaves if leaf.keys[-1] == BOOKKEEPING]
    held = [leaf for leaf in leaves if leaf.is_array and leaf.lone is not None]
    variables = [leaf.path for leaf in held if leaf.is_held and leaf.is_standard]
    more = [(key,) for key in top if key not in ("opt_state", "step")]
    params, model = is_mapping(top.get("params")), isinstance(top.get("model"), dict)
    checks = (
        (
            ("linen-", "maxtext"),
            modules,
            f"{named(*modules[:1])} is a module of NNX that was saved itself",
        ),
        ("linen-params", params, "`params` is a collection at the top"),
        ("linen-params", "opt_state" in top, "`opt_state` is at the top"),
        ("linen-variables", beside.root, f"{named(beside.root or ())} is at the top"),
        ("linen-variables", not roots, "no collection is at the top"),
        (("linen-train-state", "maxtext"), not params, "there is no `params` at the top"),
        ("maxtext", ("nnx_aux",) not in roots.values(), "there is no `nnx_aux/model`"),
        ("nnx-state", not held and not modules, "no array is in a `value` level"),
        ("nnx-pure-dict", variables, f"{named(*variables[:1])} is in a `value` level"),
        ("nnx-optimizer", more, f"there is more at the top: {named(*more)}"),
        ("nnx-model", not model, "there is no `model` at the top"),
        ("nnx-model-and-optimizer", len(more) == len(top), "there is no `opt_state` or `step`"),
    )
    return [text for kinds, wrong, text in checks if kind.startswith(kinds) and wrong]


def _variables(
    kind: str, model: Sequence[SavedLeaf], optimizer: Sequence[SavedLeaf], step: SavedLeaf | None
) -> tuple[bool, bool]:
    """Whether leaves are in variables: those of the model, and those of the optimizer's state."""
    kinds = {"nnx-state": [True], "nnx-pure-dict": [False]}
    in_model = kinds.get(kind) or in_variables(model)
    if len(in_model) > 1:
        raise _ambiguous(
            [
                _Reading(f"{kind} below `model`", [], "nnx", _moved_up("model", kind))
                for kind in kinds
            ]
        )
    in_optimizer = in_variables(optimizer)
    if len(in_optimizer) > 1:
        in_optimizer = in_model if model else [step is None or step.is_held]
    return in_model[0], in_optimizer[0]


def _unique(pairs: Iterable[tuple[Path, Path]]) -> dict[Path, Path]:
    """Path -> saved path; raises TreeMismatchError if a path is there twice."""
    found: dict[Path, Path] = {}
    problems = []
    for path, saved in pairs:
        if found.setdefault(path, saved) is not saved:
            problems.append(f"{format_path(path)}: {named(found[path], saved)}")
    if problems:
        raise TreeMismatchError("several leaves would have one path", problems)
    return found
