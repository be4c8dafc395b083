"""What a saved tree is: which of Flax's APIs wrote it, and where in it the model's leaves, the
optimizer's state and the step counter are. Pure: it looks at paths, dtypes and empty leaves.

Three things decide. First the keys at the top, as the containers that people save have them
(`params` beside `batch_stats`, a `TrainState`, an `nnx.Optimizer`, a dict with `model`). Then what
one of the APIs writes and the other does not: names like `Dense_0`, streams of random numbers, a
node that holds parameters and statistics together. A level named `value` decides nothing: Orbax
writes one for each of Linen's boxes and for each of NNX's variables. Last, what is converted to one
API is of the other one, unless something speaks against it. If several readings remain, an error
lists all of them.
"""

import collections
import dataclasses
import itertools
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.boxes import Shape
from reshard.convert.module_tree import AUTOMATIC, AUXILIARY
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.tree import Path, as_python, format_glob, format_key, format_path

# A saved tree as nested dicts with text keys, and the levels named `value` in it: which of them
# Orbax wrote for Linen's boxes and NNX's variables, and which are the user's own, as a parameter
# may be called `value`.

# What a module that is saved itself has beside its attributes.
BOOKKEEPING = "_pytree__state"
COLLECTIONS = frozenset(
    ("params", "batch_stats", "cache", "intermediates", "perturbations", "_overwrite_with_gradient")
)
# Names of arrays in the layers of both APIs; in NNX these are always variables.
_STANDARD = frozenset(("kernel", "bias", "scale", "embedding", "mean", "var", "key", "count"))


class SavedLeaf(NamedTuple):
    """A leaf.

    Attributes:
      keys: its path, with keys as text.
      path: its saved path.
      value: the leaf; an array is what has a dtype.
      lone: the depth of the last level that is named `value` and alone in its container.
    """

    keys: tuple[str, ...]
    path: Path
    value: Any
    lone: int | None

    @property
    def is_array(self) -> bool:
        """Whether it is an array, and not empty or text."""
        return hasattr(self.value, "dtype")

    @property
    def is_held(self) -> bool:
        """Whether it is all there is in a level named `value`."""
        return self.lone == len(self.keys) - 1

    @property
    def is_standard(self) -> bool:
        """Whether it has a name that the layers of both APIs use."""
        return self.keys[-2 if self.is_held else -1] in _STANDARD

    def below(self, start: int, held: bool) -> Path:
        """Its path below the first keys, without the lone level if that holds it."""
        if not held or self.lone is None or self.lone < start:
            return self.keys[start:]
        return self.keys[start : self.lone] + self.keys[self.lone + 1 :]


Node = dict[str, Any]  # of further ones, and a SavedLeaf at the end of each path


def nested(ckpt: Mapping[Path, Any]) -> tuple[Node, list[SavedLeaf]]:
    """The tree as nested dicts, and its leaves in order. Raises TreeMismatchError: a list position
    and a key that is printed as it is are in one place."""
    root: Node = {}
    problems = []
    texts = [tuple(map(str, path)) for path in ckpt]
    for keys in texts:
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if node is None:  # a leaf
                break
        if node is None or keys[-1] in node:
            problems.append(named(keys))
        else:
            node[keys[-1]] = None
    if problems:
        raise TreeMismatchError(
            "a list position and a key of the same name are in one place", problems
        )
    leaves = []
    for keys, (path, value) in zip(texts, ckpt.items(), strict=True):
        node, lone = root, None
        for depth, key in enumerate(keys[:-1]):
            if key == "value" and depth and len(node) == 1:
                lone = depth
            node = node[key]
        if keys[-1] == "value" and node is not root and len(node) == 1:
            lone = len(keys) - 1
        node[keys[-1]] = SavedLeaf(keys, path, value, lone)
        leaves.append(node[keys[-1]])
    return root, leaves


def leaves_of(node: Any) -> Iterator[SavedLeaf]:
    """The leaves of a node, in order; None has none."""
    if isinstance(node, SavedLeaf):
        yield node
    elif node is not None:
        for child in node.values():
            yield from leaves_of(child)


def child(node: Any, key: str) -> Any:
    """What a node has under a key, if anything."""
    return node.get(key) if isinstance(node, dict) else None


def is_mapping(node: Any) -> bool:
    """Whether it is a dict, if an empty one."""
    return isinstance(node, dict) or (isinstance(node, SavedLeaf) and node.value == {})


def array(node: Any) -> SavedLeaf | None:
    """The array that a node is, or that it holds in a level named `value`."""
    if isinstance(node, dict) and list(node) == ["value"]:
        node = node["value"]
    return node if isinstance(node, SavedLeaf) and node.is_array else None


def dtype_name(node: Any) -> str:
    """The dtype of such an array, `key` for typed PRNG keys; nothing for other nodes."""
    leaf = array(node)
    if leaf is None:
        return ""
    name = leaf.value.dtype.name
    typed = getattr(leaf.value, "key_impl", None) is not None or name.startswith("key<")
    return "key" if typed else name


def named(*paths: Sequence[str | int]) -> str:
    """Paths, as they are told."""
    return ", ".join(f"`{format_path(tuple(path))}`" for path in paths)


def in_variables(leaves: Iterable[SavedLeaf]) -> list[bool]:
    """Whether the leaves of an NNX state are in variables: what may be.

    In a state they are, but for attributes that are arrays themselves. In a pure dict none is, but
    a parameter may be called `value`. What the layers of both APIs hold tells these apart.
    """
    arrays = [leaf for leaf in leaves if leaf.is_array]
    held = [leaf.is_standard for leaf in arrays if leaf.lone is not None]
    bare = [leaf.is_standard for leaf in arrays if leaf.lone is None]
    if not held or not bare:
        return [bool(held)]
    return [True, False] if any(held) == any(bare) else [any(held)]


class Boxes:
    """The boxes of Linen variables.

    What holds nothing but `value` is a module with a parameter of that name, and no box, if it has
    a name as Linen gives modules or if another collection has other things in it. Any other is a
    box if one of them must be, by its name, or if there is nothing outside of them.

    Attributes:
      ambiguous: a leaf that was taken for a parameter only because nothing else is in a box."""

    def __init__(self, leaves: Mapping[Path, Sequence[SavedLeaf]]):
        self._holders = {
            leaf.keys[len(root) : -1]: leaf
            for root, below in leaves.items()
            for leaf in below
            if leaf.is_held
        }
        self._boxes: set[Path] = set()
        self.ambiguous: SavedLeaf | None = None
        if not self._holders:
            return
        modules: set[Path] = {()}
        for root, below in leaves.items():
            for leaf in below:
                path = leaf.keys[len(root) : -2 if leaf.is_held else -1]
                while path not in modules:
                    modules.add(path)
                    path = path[:-1]
        found = [
            path
            for path in self._holders
            if path not in modules and not AUTOMATIC.fullmatch(str(path[-1]))
        ]
        sure = any(self._holders[path].is_standard for path in found)
        if sure or all(leaf.is_held for below in leaves.values() for leaf in below):
            self._boxes.update(found)
        elif found:
            self.ambiguous = self._holders[found[0]]

    def hold(self, leaf: SavedLeaf, start: int) -> bool:
        """Whether a leaf of the model, or of an optimizer's state that mirrors it, is in a box."""
        if not self._boxes or not leaf.is_held:
            return False
        path = leaf.keys[start:-1]
        endings = (path[i:] for i in range(len(path) + 1))
        return next((end for end in endings if end in self._holders), None) in self._boxes


# What speaks for one of Flax's APIs in a saved tree: what one of them writes and not the other;
# and where a train state has what. Pure; the reasons are words, for users to judge.

# The trees that Linen and NNX save: kind -> what has it.
KINDS = {
    "linen-variables": "collections at the top: `params`, `batch_stats`, ...",
    "linen-params": "the contents of `params` alone",
    "linen-train-state": "`params` beside `opt_state` or `step`, or all variables below `params`",
    "maxtext": "a train state, and below `nnx_aux` what only NNX has",
    "nnx-state": "`nnx.state(model)`, or a module: a `value` level under each variable",
    "nnx-pure-dict": "`nnx.to_pure_dict(nnx.state(model))`",
    "nnx-optimizer": "`nnx.Optimizer`: `opt_state` and `step`",
    "nnx-model-and-optimizer": "`nnx.ModelAndOptimizer`: `model`, `opt_state` and `step`",
    "nnx-model": "a state below `model`, perhaps beside `optimizer`",
}
OPTIMIZERS = ("opt_state", "optimizer", "opt", "optimizer_state")


class Training(NamedTuple):
    """What a train state has beside a model.

    Attributes:
      root: where the optimizer's state is saved, if there is one.
      state: that state.
      step: the step counter.
      names: the keys at the top of both.
      wrapped: both are below one key, as those of an `nnx.Optimizer`.
    """

    root: Path | None = None
    state: Any = None
    step: SavedLeaf | None = None
    names: tuple[str, ...] = ()
    wrapped: bool = False


def training(top: Node) -> Training:
    """What the tree has beside a model."""
    name = next((name for name in OPTIMIZERS if _is_state(name, top.get(name))), None)
    root, state, wrapped = None, None, False
    steps = [("step", top.get("step"))]
    if name is not None:
        root, state = (name,), top[name]
        inner = state.keys() - {BOOKKEEPING} if isinstance(state, dict) else set()
        wrapped = name != "opt_state" and ("opt_state" in inner or inner == {"step"})
        if wrapped:
            steps.append((name, state.get("step")))
            root = (name, "opt_state") if "opt_state" in inner else None
            state = state.get("opt_state")
    counts = [pair for pair in steps if dtype_name(pair[1]).startswith(("int", "uint"))]
    names = [*([] if name is None else [name]), *(key for key, _ in counts[:1] if key != name)]
    return Training(root, state, array(counts[0][1]) if counts else None, tuple(names), wrapped)


def _is_state(name: str, node: Any) -> bool:
    """Whether it may be the state of an optimizer; a single array, only under the usual name."""
    if isinstance(node, SavedLeaf):
        return not isinstance(node.value, str) and (name == "opt_state" or not node.is_array)
    return isinstance(node, dict)


def holds_variables(params: Any) -> bool:
    """Whether what is below `params` is all variables, with `params` among the collections."""
    return is_mapping(child(params, "params")) and all(
        is_mapping(node) and not AUTOMATIC.fullmatch(name) for name, node in params.items()
    )


def check_variables(params: Node, beside: Training) -> None:
    """Raises TreeMismatchError if the containers beside `params/params` may be modules: no name
    among theirs is one of Flax's collections."""
    others = params.keys() - {"params"}
    if not others or others & COLLECTIONS:
        return
    paths = named(*(("params", name) for name in sorted(others)))
    modules, collections = 'layout="linen-variables"', 'layout="linen-train-state"'
    if beside.names:  # both are train states
        names = "|".join(re.escape(format_key(name)) for name in sorted(params))
        modules, collections = (
            f"reshard.rename(ckpt, {as_python([rule])})"
            for rule in (("^params/", "params/params/"), (f"^params/({names})/", r"\1/"))
        )
    raise TreeMismatchError(
        "the keys below `params` may be modules or collections",
        [
            f"modules: one is called `params`, as `params/params`, beside {paths}",
            f"collections: the parameters are `params/params`, and none are in {paths}",
        ],
        [f"{modules}, if they are modules", f"{collections}, if they are collections"],
    )


def collection_roots(top: Node, beside: Training, nested: bool) -> dict[Path, str]:
    """Where collections are saved -> their names; `nested`: all of them are below `params`. Raises
    TreeMismatchError: one is saved in two places."""
    params = top.get("params")
    roots: dict[Path, str] = {}
    if isinstance(params, dict) and nested:
        roots = {("params", name): name for name in params}
        params = params["params"]
    elif is_mapping(params):
        roots = {("params",): "params"}
    for name, node in top.items():
        if name in ("params", *beside.names) or not is_mapping(node):
            continue
        inner = node if isinstance(node, dict) else {}
        if name == AUXILIARY and is_mapping(inner.get("model")):
            roots[name, "model"] = name
        elif name in COLLECTIONS:
            roots[(name,)] = name
        elif inner and all(key in COLLECTIONS and is_mapping(c) for key, c in inner.items()):
            roots |= {(name, key): key for key in inner}
        elif _is_collection(inner, params, bool(beside.names)):
            roots[(name,)] = name
    places = collections.defaultdict(list)
    for path, name in roots.items():
        places[name].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    if twice:
        globs = [format_glob(path) + "/**" for paths in twice.values() for path in paths]
        raise TreeMismatchError(
            "a collection is saved in two places",
            [f"`{name}`: {named(*paths)}" for name, paths in twice.items()],
            [f"drop={as_python([glob])}" for glob in globs],
        )
    return roots


def _is_collection(node: Node, params: Any, trained: bool) -> bool:
    """Whether a container beside `params` is a collection of the user's own: of arrays, which are
    no copy of the parameters; in a train state, of the same modules as the parameters."""
    leaves = list(leaves_of(node))
    if not leaves or isinstance(leaves[0].path[1], int) or not all(map(_may_vary, leaves)):
        return False
    modules = params if isinstance(params, dict) else {}
    return (not trained or node.keys() <= modules.keys()) and not _same_leaves(node, modules)


def _may_vary(leaf: SavedLeaf) -> bool:
    """Whether a leaf may be a variable of Linen's: an array, and neither a number nor a key."""
    number = getattr(leaf.value, "value_type", "") == "scalar"
    return leaf.is_array and not number and dtype_name(leaf) != "key"


def _same_leaves(node: Any, other: Any) -> bool:
    """Whether two trees have arrays at the same paths, in boxes or not."""
    if array(node) or array(other):
        return bool(array(node) and array(other))
    if not isinstance(node, dict) or not isinstance(other, dict) or node.keys() != other.keys():
        return False
    return all(_same_leaves(node[key], other[key]) for key in node)


@dataclasses.dataclass
class Evidence:
    """Reasons in words.

    Attributes:
      linen: what Linen writes.
      proof: what only NNX writes, whatever names there are.
      nnx: what NNX writes.
    """

    linen: list[str] = dataclasses.field(default_factory=list)
    proof: list[str] = dataclasses.field(default_factory=list)
    nnx: list[str] = dataclasses.field(default_factory=list)

    @property
    def for_nnx(self) -> list[str]:
        """All that speaks for NNX."""
        return self.proof + self.nnx

    @property
    def api(self) -> str | None:
        """The API, if it is decided."""
        if self.proof or (self.nnx and not self.linen):
            return "nnx"
        return "linen" if self.linen and not self.nnx else None


def model_marks(top: Any, at: Path = ()) -> Evidence:
    """What the modules and variables of a model say; of each mark, where it is first."""
    found: dict[str, Path] = {}
    stack = [(at, top)] if isinstance(top, dict) else []
    while stack:
        path, node = stack.pop()
        stack += [((*path, k), c) for k, c in reversed(node.items()) if isinstance(c, dict)]
        for mark, place in _node_marks(path, node):
            found.setdefault(mark, place)
    marks = Evidence()
    for reasons, mark, words in (
        (marks.linen, "automatic", "has a name as Linen gives them"),
        (marks.linen, "no attribute", "cannot be an attribute"),
        (marks.proof, "module", "is a module that was saved itself (`_pytree__state`)"),
        (marks.proof, "stream", "is a stream of random numbers (`key`, `count`)"),
        (marks.nnx, "norm", "holds parameters and statistics together"),
        (marks.nnx, "attention", "holds parameters and a cache together"),
        (marks.nnx, "tuple", "is a tuple as a key"),
    ):
        reasons += [f"{named(found[mark])} {words}"] if mark in found else []
    standard = [leaf for leaf in leaves_of(top) if leaf.is_array and leaf.is_standard]
    held = next((leaf.path for leaf in standard if leaf.lone is not None), None)
    bare = next((leaf.path for leaf in standard if leaf.lone is None), None)
    if held and bare:
        words = f"{named(held)} is in a box and {named(bare)} is not"
        marks.linen.append(f"{words}, where NNX has variables throughout")
    return marks


def _node_marks(path: Path, node: Node) -> Iterator[tuple[str, Path]]:
    """The marks of a container and its keys."""
    for key, below in node.items():
        if keyword.iskeyword(key) or "/" in key:
            yield "no attribute", (*path, key)
        elif key.startswith("(") and key.endswith(")"):
            yield "tuple", (*path, key)
        elif isinstance(below, dict) and AUTOMATIC.fullmatch(key) and not array(below):
            yield "automatic", (*path, key)
    if BOOKKEEPING in node:
        yield "module", path
    if "count" in node and is_stream(node):
        yield "stream", path
    if "var" in node or "query" in node:
        arrays = {key for key, below in node.items() if array(below)}
        if {"mean", "var"} <= arrays and arrays & {"scale", "bias"}:
            yield "norm", path
        if {"cached_key", "cached_value"} <= arrays and "query" in node:
            yield "attention", path


def is_stream(node: Any) -> bool:
    """Whether it is an `nnx.RngStream`."""
    key, count = dtype_name(child(node, "key")), dtype_name(child(node, "count"))
    return count == "uint32" and key in ("key", "uint32")


def add_training_marks(beside: Training, marks: Evidence) -> None:
    """Adds what the optimizer's state and the step counter say."""
    if beside.wrapped:
        words = "holds the state and the steps of an optimizer, as `nnx.Optimizer` does"
        marks.nnx.append(f"{named(beside.names[:1])} {words}")
    if beside.root is not None:
        where, leaves = named(beside.root), list(leaves_of(beside.state))
        listed = any(isinstance(key, int) for leaf in leaves for key in leaf.path)
        if listed and all(leaf.lone is None for leaf in leaves):
            marks.linen.append(f"{where} has list positions, as optax's tuples are saved")
        states = beside.state if isinstance(beside.state, dict) else {}
        if states and not isinstance(leaves[0].path[len(beside.root)], int):
            filled = all(isinstance(state, dict) or array(state) for state in states.values())
            if filled and all(key.isdecimal() for key in states):
                words = "has positions as keys, and only those with a value"
                marks.nnx.append(f"{where} {words}, as `nnx.Optimizer` does")


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
      api: the API that it is of where nothing contradicts it: the one that is converted from.

    Raises:
      TreeMismatchError: the tree can be read in several ways or in none, or it cannot be what it is
        said to be.
      ArgumentError: there is no such kind.
    """
    if layout is not None and layout not in KINDS:
        kinds = [f"{kind}: {text}" for kind, text in KINDS.items()]
        raise ArgumentError(f"`{layout}` is not a layout; the layouts are", kinds)
    if not any(path and hasattr(leaf, "dtype") for path, leaf in ckpt.items()):
        raise TreeMismatchError("the tree has no array below a key, so it holds no model")
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
    collections = all(key in COLLECTIONS and is_mapping(node) for key, node in top.items())
    if collections or (is_mapping(params) and not is_stream(params)):
        return _decide_linen(top, beside, leaves, api)
    if isinstance(model, dict) and (beside.names or not _others(top, beside)):
        return _decide_model(model, top, beside, api)
    if trained or (list(top) == ["step"] and dtype_name(top["step"]) == "uint32"):
        return _decide_optimizer(top, beside, api)
    marks = model_marks(top)
    _check_top(top, ("opt_state",) if marks.proof else ("opt_state", "params"))
    readings = [_Reading("linen-params", marks.linen)]
    readings += [_Reading(kind, marks.for_nnx) for kind in _nnx_kinds(leaves)]
    if isinstance(model, dict):
        readings.append(_Reading("nnx-model", ["`model` is at the top"]))
    return _chosen(readings, marks, api)


def _decide_linen(
    top: Node, beside: Training, leaves: Sequence[SavedLeaf], api: str | None
) -> tuple[str, list[str]]:
    """For a tree with collections at the top."""
    params, at = top.get("params"), ("params",)
    nested = holds_variables(params)
    roots = collection_roots(top, beside, nested)
    if nested:
        params, at = child(params, "params"), ("params", "params")
    if AUXILIARY in roots.values():
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
    if marks.for_nnx:
        whole = _nnx_kinds(leaves) if kind == "linen-variables" else ["NNX's"]
        readings = [_Reading(kind, why), *(_Reading(other, marks.for_nnx) for other in whole)]
        raise _ambiguous(readings, api)
    if nested:
        check_variables(top["params"], beside)
    return kind, why


def _decide_model(
    model: Node, top: Node, beside: Training, api: str | None
) -> tuple[str, list[str]]:
    """For a tree with a model below `model`."""
    marks = model_marks(model, ("model",))
    add_training_marks(beside, marks)
    variables = is_mapping(model.get("params"))
    if variables:
        marks.linen.append("`model/params` is a collection")
    both = beside.root == ("opt_state",) or dtype_name(top.get("step")) == "uint32"
    readings = [_Reading("nnx-model-and-optimizer" if both else "nnx-model", marks.for_nnx)]
    if not variables and not beside.names:
        readings.append(_Reading("linen-params", marks.linen))
    what, new = ("variables", "") if variables else ("parameters", "params/")
    hint = f'reshard.rename(ckpt, [("^model/", "{new}")])'
    readings.append(_Reading(f"Linen's {what} below `model`", marks.linen, hint))
    return _chosen(readings, marks, api)


def _decide_optimizer(top: Node, beside: Training, api: str | None) -> tuple[str, list[str]]:
    """For an optimizer's state with neither `params` nor `model`."""
    marks = Evidence()
    add_training_marks(beside, marks)
    others = _others(top, beside)
    if not others:
        _check_top(top, ("opt_state",))
    if top.keys() - {"opt_state", "step"}:
        above = "model/" if marks.for_nnx else "params/"
        raise TreeMismatchError(
            "there is the state of an optimizer, but neither `params` nor `model`",
            [f"at the top there is {named(*((key,) for key in top))}"],
            [f"reshard.rename(ckpt, {as_python([(_beginning(key), above)])})" for key in others],
        )
    if marks.linen:
        linen = _Reading("a Linen train state without `params`", marks.linen)
        raise _ambiguous([linen, _Reading("nnx-optimizer", marks.for_nnx)], api)
    return "nnx-optimizer", [f"the tree holds only {_names(beside)}", *marks.for_nnx]


def _check_top(top: Node, names: Sequence[str]) -> None:
    """Raises TreeMismatchError if states of these names are not at the top, but one level lower."""
    states = {
        key: [(key, name) for name in names if is_mapping(child(node, name))]
        for key, node in top.items()
        if any(is_mapping(child(node, name)) for name in names)
    }
    if states:
        raise TreeMismatchError(
            "the state is not at the top of the tree",
            [f"there is {named(*paths)}" for paths in states.values()],
            [_lifted(format_glob((key,)) + "/**", _beginning(key)) for key in states],
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


def _lifted(glob: str, beginning: str) -> str:
    """How to select leaves, and take away what their paths begin with."""
    return (
        f"reshard.rename(reshard.select(ckpt, {as_python(glob)}), {as_python([(beginning, '')])})"
    )


class _Reading(NamedTuple):
    """What a tree may be: a kind or something else; what speaks for it; what selects it, if that
    is not the layout."""

    name: str
    why: Sequence[str]
    hint: str = ""

    @property
    def api(self) -> str:
        return "nnx" if self.name.lower().startswith("nnx") else "linen"


def _chosen(
    readings: Sequence[_Reading], marks: Evidence, api: str | None
) -> tuple[str, list[str]]:
    """The one kind that is of the API that the marks decide; or, if there are none, of the API
    that is converted from. Raises TreeMismatchError if that is no kind, or several."""
    decided, why = marks.api, []
    if not marks.linen and not marks.for_nnx and api is not None:
        decided = api
        name = "NNX" if api == "nnx" else "Linen"
        why = [f"the conversion is from {name}, and nothing contradicts it"]
    fitting = [reading for reading in readings if decided in (None, reading.api)]
    if len(fitting) > 1:
        raise _ambiguous(fitting, api)
    if fitting[0].name not in KINDS:
        name, reasons, hint = fitting[0]
        raise TreeMismatchError(f"no layout has {name}", reasons, [hint])
    return fitting[0].name, [*fitting[0].why, *why]


def _ambiguous(readings: Sequence[_Reading], api: str | None = None) -> TreeMismatchError:
    """The error: with what says that it is this or that, as far as it goes with the direction."""
    fitting = [reading for reading in readings if reading.api == api] or readings
    hints = [r.hint or f"layout={as_python(r.name)}" for r in fitting if r.hint or r.name in KINDS]
    return TreeMismatchError(
        f"the tree can be read as {' or as '.join(reading.name for reading in readings)}",
        [f"{name}: {'; '.join(why) or 'nothing against it'}" for name, why, _ in readings],
        hints,
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
        nested = kind != "linen-variables" and holds_variables(top.get("params"))
        if nested and beside.names:  # the kind does not say it
            check_variables(top["params"], beside)
        roots = {path: (name,) for path, name in collection_roots(top, beside, nested).items()}
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
        own = {root: model[root] for root, begin in roots.items() if begin != (AUXILIARY,)}
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
        ("maxtext", (AUXILIARY,) not in roots.values(), "there is no `nnx_aux/model`"),
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
        up = _lifted("model/**", "^model/")
        raise _ambiguous(
            [_Reading(f"{x} below `model`", [], f'{up} with layout="{x}"') for x in kinds]
        )
    in_optimizer = in_variables(optimizer)
    if len(in_optimizer) > 1:
        in_optimizer = in_model if model else [step is None or step.is_held]
    return in_model[0], in_optimizer[0]


def _unique(pairs: Iterable[tuple[Path, Path]]) -> dict[Path, Path]:
    """Path -> saved path; raises TreeMismatchError if a path occurs twice."""
    found: dict[Path, Path] = {}
    problems = []
    for path, saved in pairs:
        if found.setdefault(path, saved) is not saved:
            problems.append(f"{format_path(path)}: {named(found[path], saved)}")
    if problems:
        raise TreeMismatchError("several leaves would have one path", problems)
    return found
