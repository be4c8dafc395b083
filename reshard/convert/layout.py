"""Layout of a saved tree: which of Flax's APIs wrote it, and where in it the model's leaves, the
optimizer state and the step counter are. Pure: it looks at paths, dtypes and empty leaves.

The keys at the top say which kinds of tree it may be. What only one of the APIs writes is a proof:
names like `Dense_0` and optax's list positions (Linen); modules that were saved themselves, streams
of random numbers and `nnx.Optimizer` (NNX). Without a proof, a tree
is of the API that is converted from. If several kinds remain, the error lists them, and `layout=`
chooses one.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.boxes import Shape
from reshard.convert.module_tree import AUTOMATIC, AUXILIARY
from reshard.errors import ArgumentError, TreeMismatchError
from reshard.tree import Path, as_python, format_glob, format_key, format_path

# The trees that Linen and NNX save: kind -> what has it.
KINDS = {
    "linen-variables": "collections at the top: `params`, `batch_stats`, ...",
    "linen-params": "the contents of `params` alone",
    "linen-train-state": "`params` next to `opt_state` or `step`, or all variables below `params`",
    "maxtext": "a train state, with NNX's other leaves below `nnx_aux`",
    "nnx-state": "`nnx.state(model)`, or a module: a `value` level under each variable",
    "nnx-pure-dict": "`nnx.to_pure_dict(nnx.state(model))`",
    "nnx-optimizer": "`nnx.Optimizer`: `opt_state` and `step`",
    "nnx-model-and-optimizer": "`nnx.ModelAndOptimizer`: `model`, `opt_state` and `step`",
    "nnx-model": "a state below `model`, with or without `optimizer`",
}
OPTIMIZERS = ("opt_state", "optimizer", "opt", "optimizer_state")
COLLECTIONS = frozenset(
    ("params", "batch_stats", "cache", "intermediates", "perturbations", "_overwrite_with_gradient")
)
# What a module that is saved itself has beside its attributes.
_BOOKKEEPING = "_pytree__state"
# Names of arrays in the layers of both APIs; in NNX these are always variables.
_STANDARD = frozenset(("kernel", "bias", "scale", "embedding", "mean", "var", "key", "count"))
_WHOLE = ("linen-params", "nnx-state", "nnx-pure-dict")  # the tree is the model
API_NAMES = {"linen": "Linen", "nnx": "NNX"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Kind of a saved tree, and the place of everything in it.

    Attributes:
      kind: one of `KINDS`.
      api: `"linen"` or `"nnx"`.
      why: the reasons, in words.
      model: path of an array in the model -> its saved path. In Linen the path begins with the
        collection, in NNX with an attribute. Keys are text; levels of boxes and variables are left
        out. In kind `maxtext`, `nnx_aux` is a collection whose leaves have NNX's paths.
      optimizer: path below the optimizer state, in the same form -> saved path, for all leaves but
        text: None and empty containers stand for states and masked leaves without a value.
      step: saved path of the step counter, if there is one.
      rest: saved paths of all other leaves.
      roots: beginning of the paths in `model` -> where these leaves are saved.
      optimizer_root: where the optimizer state is saved, if there is any.
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
    beside: dict[Path, Path] = dataclasses.field(default_factory=dict, compare=False)

    def shapes(self, leaves: Mapping[Path, Any]) -> dict[Path, Shape]:
        """Path in the model -> shape, in the tree that this is the layout of."""
        return {path: leaves[saved].shape for path, saved in self.model.items()}

    def without(self, dropped: Collection[Path]) -> "Layout":
        """The layout of the tree without the leaves at some saved paths."""

        def kept(paths: Mapping[Path, Path]) -> dict[Path, Path]:
            return {path: saved for path, saved in paths.items() if saved not in dropped}

        return dataclasses.replace(
            self,
            model=kept(self.model),
            optimizer=kept(self.optimizer),
            beside=kept(self.beside),
            step=None if self.step in dropped else self.step,
            rest=tuple(path for path in self.rest if path not in dropped),
        )


def detect(ckpt: Mapping[Path, Any], layout: str | None = None, api: str | None = None) -> Layout:
    """The layout of a saved tree.

    Args:
      ckpt: the checkpoint, or another mapping from saved paths to leaves, in which arrays are what
        has a dtype.
      layout: the kind, one of `KINDS`, if it is not to be detected.
      api: the API of the tree if there is no proof: the one that is converted from.

    Raises:
      TreeMismatchError: the tree can be read in several ways or in none, or it cannot be of the
        kind that was asked for.
      ArgumentError: there is no such kind.
    """
    if layout is not None and layout not in KINDS:
        kinds = [f"{kind}: {text}" for kind, text in KINDS.items()]
        raise ArgumentError(f"`{layout}` is not a layout; the layouts are", kinds)
    if not any(path and hasattr(leaf, "dtype") for path, leaf in ckpt.items()):
        raise TreeMismatchError("the tree has no array below a key, so it holds no model")
    root, leaves = _nested(ckpt)
    top = {key: node for key, node in root.items() if key != _BOOKKEEPING}
    training = _training(top)
    if layout is not None:
        return _read(layout, [f"`{layout}` was asked for"], top, training, leaves)
    kind, why = _decide(root, top, training, leaves, api)
    return _read(kind, why, top, training, leaves)


# The tree as nested dicts with text keys.


class _SavedLeaf(NamedTuple):
    """A leaf."""

    keys: tuple[str, ...]  # its path, as text
    path: Path  # its saved path
    value: Any  # an array is what has a dtype
    # The depth of the last level that is named `value` and alone in its container. Orbax writes one
    # for each of Linen's boxes and of NNX's variables; a parameter may have that name.
    lone: int | None

    @property
    def is_array(self) -> bool:
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


_Node = dict[str, Any]  # of further ones, and a `_SavedLeaf` at the end of each path


def _nested(ckpt: Mapping[Path, Any]) -> tuple[_Node, list[_SavedLeaf]]:
    """The tree as nested dicts, and its leaves in order. Raises TreeMismatchError: a list position
    and a key have the same text."""
    root: _Node = {}
    problems = []
    texts = [tuple(map(str, path)) for path in ckpt]
    for keys in texts:
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if node is None:  # a leaf
                break
        if node is None or keys[-1] in node:
            problems.append(_named(keys))
        else:
            node[keys[-1]] = None
    if problems:
        raise TreeMismatchError(
            "a list position and a key of the same name are in one place", problems
        )
    leaves = []
    for keys, (path, value) in zip(texts, ckpt.items(), strict=True):
        node, lone = root, None
        for depth, key in enumerate(keys):
            if key == "value" and depth and len(node) == 1:
                lone = depth
            above, node = node, node[key]
        above[keys[-1]] = _SavedLeaf(keys, path, value, lone)
        leaves.append(above[keys[-1]])
    return root, leaves


def _leaves_of(node: Any) -> Iterator[_SavedLeaf]:
    if isinstance(node, _SavedLeaf):
        yield node
    elif node is not None:
        for child in node.values():
            yield from _leaves_of(child)


def _is_mapping(node: Any) -> bool:
    """Whether it is a dict, perhaps an empty one."""
    return isinstance(node, dict) or (isinstance(node, _SavedLeaf) and node.value == {})


def _array(node: Any) -> _SavedLeaf | None:
    """The array that a node is, or that it holds in a level named `value`."""
    if isinstance(node, dict) and list(node) == ["value"]:
        node = node["value"]
    return node if isinstance(node, _SavedLeaf) and node.is_array else None


def _dtype_name(node: Any) -> str:
    """The dtype of such an array, `key` for typed PRNG keys; nothing for other nodes."""
    leaf = _array(node)
    if leaf is None:
        return ""
    name = leaf.value.dtype.name
    typed = getattr(leaf.value, "key_impl", None) is not None or name.startswith("key<")
    return "key" if typed else name


def _is_stream(node: Any) -> bool:
    """Whether it is an `nnx.RngStream`."""
    if not isinstance(node, dict):
        return False
    key, count = _dtype_name(node.get("key")), _dtype_name(node.get("count"))
    return count == "uint32" and key in ("key", "uint32")


def _named(*paths: Sequence[str | int]) -> str:
    """Paths as text."""
    return ", ".join(f"`{format_path(tuple(path))}`" for path in paths)


class _Training(NamedTuple):
    """Optimizer state and step counter in a tree."""

    root: Path | None = None  # where the optimizer state is saved
    state: Any = None
    step: _SavedLeaf | None = None
    names: tuple[str, ...] = ()  # the keys at the top of both
    wrapped: bool = False  # both are below one key, as those of an `nnx.Optimizer`


def _training(top: _Node) -> _Training:
    """The optimizer state and the step counter."""

    def is_state(name: str, node: Any) -> bool:  # a single array only under the usual name
        if isinstance(node, _SavedLeaf):
            return not isinstance(node.value, str) and (name == "opt_state" or not node.is_array)
        return isinstance(node, dict)

    name = next((name for name in OPTIMIZERS if is_state(name, top.get(name))), None)
    root, state, wrapped = None, None, False
    steps = [("step", top.get("step"))]
    if name is not None:
        root, state = (name,), top[name]
        inner = state.keys() - {_BOOKKEEPING} if isinstance(state, dict) else set()
        wrapped = name != "opt_state" and ("opt_state" in inner or inner == {"step"})
        if wrapped:
            steps.append((name, state.get("step")))
            root = (name, "opt_state") if "opt_state" in inner else None
            state = state.get("opt_state")
    counts = [pair for pair in steps if _dtype_name(pair[1]).startswith(("int", "uint"))]
    names = [*([] if name is None else [name]), *(key for key, _ in counts[:1] if key != name)]
    return _Training(root, state, _array(counts[0][1]) if counts else None, tuple(names), wrapped)


# Which kind it is.


def _decide(
    root: _Node, top: _Node, training: _Training, leaves: Sequence[_SavedLeaf], api: str | None
) -> tuple[str, list[str]]:
    """The kind, and why."""
    params, model = top.get("params"), top.get("model")
    trained = training.root is not None or training.wrapped
    names = _named(*((name,) for name in training.names))
    if _BOOKKEEPING in root and not trained and not (model and training.names):
        return "nnx-state", ["the tree is a module that was saved directly (`_pytree__state`)"]
    others = top.keys() - {"model", *training.names}
    others = [key for key, node in top.items() if key in others and isinstance(node, dict)]
    below: dict[str, str] = {}
    if all(key in COLLECTIONS and _is_mapping(node) for key, node in top.items()) or (
        _is_mapping(params) and not _is_stream(params)
    ):
        kind, reason, at = _linen_kind(top, training, names)
        proofs = _proofs(top["params"]["params"] if at[1:] else params, at, training, certain=False)
        proofs["linen"].insert(0, reason)
        kinds = [kind, *(_nnx_kinds(leaves) if kind == "linen-variables" else [])]
    elif isinstance(model, dict) and (training.names or not others):
        proofs = _proofs(model, ("model",), training)
        variables = _is_mapping(model.get("params"))
        proofs["linen"] += ["`model/params` is a collection"] * variables
        both = training.root == ("opt_state",) or _dtype_name(top.get("step")) == "uint32"
        kinds = ["nnx-model-and-optimizer" if both else "nnx-model"]
        kinds += ["linen-params"] * (not variables and not training.names)
        what, new = ("variables", "") if variables else ("parameters", "params/")
        below[f"Linen's {what} below `model`"] = f'reshard.rename(ckpt, [("^model/", "{new}")])'
    elif trained or (list(top) == ["step"] and _dtype_name(top["step"]) == "uint32"):
        if not others:
            _check_top(top, ("opt_state",))
        proofs = _proofs(None, (), training)
        if top.keys() - {"opt_state", "step"}:
            above = "model/" if proofs["nnx"] else "params/"
            raise TreeMismatchError(
                "the tree holds optimizer state, but neither `params` nor `model`",
                [f"at the top there is {_named(*((key,) for key in top))}"],
                [f"reshard.rename(ckpt, {as_python([(_beginning(k), above)])})" for k in others],
            )
        proofs["nnx"].insert(0, f"the tree holds only {names}")
        kinds = ["nnx-optimizer"]
    else:
        proofs = _proofs(top)
        _check_top(top, ("opt_state",) if proofs["nnx"] else ("opt_state", "params"))
        kinds = ["linen-params", *_nnx_kinds(leaves), *["nnx-model"] * isinstance(model, dict)]
    return _chosen({**{kind: f"layout={as_python(kind)}" for kind in kinds}, **below}, proofs, api)


def _linen_kind(top: _Node, training: _Training, names: str) -> tuple[str, str, Path]:
    """The kind of a tree with collections at the top, why, and where its parameters are. `names`:
    the optimizer state and the step."""
    nested = _holds_variables(top.get("params"))
    roots = _collection_roots(top, training, nested)
    if nested:
        _check_variables(top["params"], training)
    at: Path = ("params", "params") if nested else ("params",)
    if AUXILIARY in roots.values():
        return "maxtext", "`nnx_aux` is next to `params`, as MaxText saves NNX runs", at
    if nested:
        return "linen-train-state", "`params/params`: all variables are below `params`", at
    if training.names:
        return "linen-train-state", f"`params` is next to {names}", at
    return "linen-variables", f"collections are at the top: {_named(*roots)}", at


def _proofs(
    top: Any, at: Path = (), training: _Training | None = None, certain: bool = True
) -> dict[str, list[str]]:
    """What only one of the APIs writes, by API, in words, with the first place of each. `certain`:
    modules and streams of NNX outweigh names, which an attribute may have as well."""
    found: dict[str, Path] = {}
    stack = [(at, top)] if isinstance(top, dict) else []
    while stack:
        path, node = stack.pop()
        inner = [((*path, key), child) for key, child in node.items() if isinstance(child, dict)]
        stack += reversed(inner)
        for place, child in inner:
            if AUTOMATIC.fullmatch(place[-1]) and not _array(child):
                found.setdefault("automatic", place)
        if _BOOKKEEPING in node:
            found.setdefault("module", path)
        if _is_stream(node):
            found.setdefault("stream", path)
        arrays = {key for key in ("mean", "var", "scale", "bias") if _array(node.get(key))}
        if {"mean", "var"} < arrays:  # Linen has a collection for each
            found.setdefault("norm", path)
    proofs: dict[str, list[str]] = {"linen": [], "nnx": []}
    for api, mark, words in (
        ("linen", "automatic", "has a name that Linen generates"),
        ("nnx", "module", "is a module that was saved directly (`_pytree__state`)"),
        ("nnx", "stream", "is a stream of random numbers (`key`, `count`)"),
        ("nnx", "norm", "holds parameters and statistics together"),
    ):
        proofs[api] += [f"{_named(found[mark])} {words}"] if mark in found else []
    outweighs = certain and not found.keys().isdisjoint(("module", "stream"))
    if training and training.wrapped:
        words = "holds the state and the steps of an optimizer, as `nnx.Optimizer` does"
        proofs["nnx"].append(f"{_named(training.names[:1])} {words}")
    if training and training.root:
        leaves = list(_leaves_of(training.state))
        listed = any(isinstance(key, int) for leaf in leaves for key in leaf.path)
        if listed and all(leaf.lone is None for leaf in leaves):
            words = "has list positions, as in saved optax tuples"
            proofs["linen"].append(f"{_named(training.root)} {words}")
        states = training.state if isinstance(training.state, dict) and not listed else {}
        valued = all(isinstance(state, dict) or _array(state) for state in states.values())
        if states and valued and all(map(str.isdecimal, states)):
            words = "has keys only for positions with a value, as in `nnx.Optimizer`"
            proofs["nnx"].append(f"{_named(training.root)} {words}")
    return {**proofs, "linen": []} if outweighs else proofs


def _api_of(kind: str) -> str:
    return "nnx" if kind.startswith("nnx") else "linen"


def _chosen(
    readings: Mapping[str, str], proofs: Mapping[str, Sequence[str]], api: str | None
) -> tuple[str, list[str]]:
    """The one kind that is of the API of the proofs, or without proofs of the API that is converted
    from. Raises TreeMismatchError if none is, or several are. `readings`: kind, or what has none ->
    what selects it."""
    proved = [name for name, reasons in proofs.items() if reasons]
    apis = proved or ([api] if api else [])
    fitting = {
        kind: hint for kind, hint in readings.items() if _api_of(kind) in (apis or API_NAMES)
    }
    if len(fitting) != 1 or len(proved) > 1:
        of_direction = {kind: h for kind, h in fitting.items() if _api_of(kind) == api}
        raise _ambiguous(fitting, proofs, of_direction)
    ((kind, hint),) = fitting.items()
    why = list(proofs[_api_of(kind)])
    if kind not in KINDS:
        raise TreeMismatchError(f"no supported layout has {kind}", why, [hint])
    if not proved and api:
        why.append(f"the conversion is from {API_NAMES[api]}, and nothing contradicts it")
    return kind, why or ["no other layout fits"]


def _ambiguous(
    readings: Mapping[str, str],
    proofs: Mapping[str, Sequence[str]],
    hinted: Mapping[str, str] | None = None,
) -> TreeMismatchError:
    """The error of several readings, with the proofs. `hinted`: those to choose from, by default
    all."""
    return TreeMismatchError(
        f"the tree can be read as {' or as '.join(readings)}",
        [f"{API_NAMES[api]}: {reason}" for api, found in proofs.items() for reason in found],
        list((hinted or readings).values()),
    )


def _check_top(top: _Node, names: Sequence[str]) -> None:
    """Raises TreeMismatchError if states of these names are not at the top, but one level lower."""
    states = {
        key: [(key, name) for name in names if _is_mapping(node.get(name))]
        for key, node in top.items()
        if isinstance(node, dict)
    }
    if any(states.values()):
        raise TreeMismatchError(
            "the state is not at the top of the tree",
            [f"there is {_named(*paths)}" for paths in states.values() if paths],
            [_lifted(key) for key, paths in states.items() if paths],
        )


def _beginning(key: str) -> str:
    """A regex of what paths below a key begin with."""
    return f"^{re.escape(format_key(key))}/"


def _lifted(key: str) -> str:
    """The calls that take what is below a key out of the tree."""
    part = f"reshard.select(ckpt, {as_python(format_glob((key,)) + '/**')})"
    return f"reshard.rename({part}, {as_python([(_beginning(key), '')])})"


def _nnx_kinds(leaves: Sequence[_SavedLeaf]) -> list[str]:
    """Of the two kinds of an NNX state those that the tree may be."""
    return ["nnx-state" if held else "nnx-pure-dict" for held in _in_variables(leaves)]


def _in_variables(leaves: Iterable[_SavedLeaf]) -> list[bool]:
    """Whether the leaves of an NNX state are in variables: all that may be.

    In a state they are, but for attributes that are arrays themselves. In a pure dict none is, but
    a parameter may be called `value`. Names of standard layers decide which of these it is.
    """
    arrays = [leaf for leaf in leaves if leaf.is_array]
    held = [leaf.is_standard for leaf in arrays if leaf.lone is not None]
    bare = [leaf.is_standard for leaf in arrays if leaf.lone is None]
    if not held or not bare:
        return [bool(held)]
    return [True, False] if any(held) == any(bare) else [any(held)]


# Collections.


def _holds_variables(params: Any) -> bool:
    """Whether what is below `params` is all variables, with `params` among the collections."""
    return (
        isinstance(params, dict)
        and _is_mapping(params.get("params"))
        and all(_is_mapping(x) and not AUTOMATIC.fullmatch(name) for name, x in params.items())
    )


def _check_variables(params: _Node, training: _Training) -> None:
    """Raises TreeMismatchError if the containers beside `params/params` may be modules: no name
    among theirs is one of Flax's collections."""
    others = params.keys() - {"params"}
    if not others or others & COLLECTIONS:
        return
    paths = _named(*(("params", name) for name in sorted(others)))
    modules, collections = 'layout="linen-variables"', 'layout="linen-train-state"'
    if training.names:  # both are train states
        modules = 'reshard.rename(ckpt, [("^params/", "params/params/")])'
        collections = 'reshard.rename(ckpt, [("^params/", "")])'
    raise TreeMismatchError(
        "it is unclear whether the keys below `params` are modules or collections",
        [
            f"modules: one is called `params`, as `params/params`, beside {paths}",
            f"collections: the parameters are `params/params`, and none are in {paths}",
        ],
        [f"{modules}, if they are modules", f"{collections}, if they are collections"],
    )


def _collection_roots(top: _Node, training: _Training, nested: bool) -> dict[Path, str]:
    """Where collections are saved -> their names; `nested`: all of them are below `params`."""
    params = top.get("params")
    roots: dict[Path, str] = {}
    if isinstance(params, dict) and nested:
        roots = {("params", name): name for name in params}
        params = params["params"]
    elif _is_mapping(params):
        roots = {("params",): "params"}
    for name, node in top.items():
        if name in ("params", *training.names) or not _is_mapping(node):
            continue
        inner = node if isinstance(node, dict) else {}
        if name == AUXILIARY and _is_mapping(inner.get("model")):
            roots[name, "model"] = name
        elif name in COLLECTIONS or _is_collection(inner, params, bool(training.names)):
            roots[(name,)] = name
        elif inner and all(key in COLLECTIONS and _is_mapping(c) for key, c in inner.items()):
            roots |= {(name, key): key for key in inner}
    return roots


def _is_collection(node: _Node, params: Any, trained: bool) -> bool:
    """Whether a container beside `params` is a collection of the user's own: of arrays, which are
    no copy of the parameters; in a train state, of the same modules as the parameters."""
    if node and all(key in COLLECTIONS and _is_mapping(inner) for key, inner in node.items()):
        return False  # it holds collections
    leaves = list(_leaves_of(node))
    if not leaves or isinstance(leaves[0].path[1], int):
        return False
    for leaf in leaves:
        number = getattr(leaf.value, "value_type", "") == "scalar"
        if not leaf.is_array or number or _dtype_name(leaf) == "key":
            return False
    modules = params if isinstance(params, dict) else {}
    return (not trained or node.keys() <= modules.keys()) and not _same_leaves(node, modules)


def _same_leaves(node: Any, other: Any) -> bool:
    """Whether two trees have arrays at the same paths, in boxes or not."""
    if _array(node) or _array(other):
        return bool(_array(node) and _array(other))
    if not isinstance(node, dict) or not isinstance(other, dict) or node.keys() != other.keys():
        return False
    return all(_same_leaves(node[key], other[key]) for key in node)


def _boxes(
    leaves: Mapping[Path, Sequence[_SavedLeaf]],
) -> tuple[Callable[[_SavedLeaf, int], bool], _SavedLeaf | None]:
    """A function that says whether a leaf of the model, or of optimizer state that mirrors it, is
    in a box of Linen's; and a leaf that may be in one and is taken for a parameter called `value`.

    A level that holds nothing but `value` is a module with a parameter of that name if it has a
    name as Linen gives modules, or if another collection has other leaves in it. All others are
    boxes if one of them must be, by its name, or if there is nothing outside of them.
    """
    modules: set[Path] = {()}
    holders: dict[Path, _SavedLeaf] = {}
    for root, below in leaves.items():
        for leaf in below:
            path = leaf.keys[len(root) : -1]
            if leaf.is_held:
                holders[path] = leaf
                path = path[:-1]
            while path not in modules:
                modules.add(path)
                path = path[:-1]
    found = [p for p in holders if p not in modules and not AUTOMATIC.fullmatch(str(p[-1]))]
    sure = any(holders[path].is_standard for path in found)
    sure = sure or all(leaf.is_held for below in leaves.values() for leaf in below)
    ambiguous = holders[found[0]] if found and not sure else None
    boxes = set(found) if sure else set()

    def hold(leaf: _SavedLeaf, start: int) -> bool:
        if not boxes or not leaf.is_held:
            return False
        path = leaf.keys[start:-1]
        endings = (path[i:] for i in range(len(path) + 1))
        return next((end for end in endings if end in holders), None) in boxes

    return hold, ambiguous


# Where everything is.


def _read(
    kind: str, why: list[str], top: _Node, training: _Training, leaves: Sequence[_SavedLeaf]
) -> Layout:
    """The layout of a tree of a kind."""
    linen = _api_of(kind) == "linen"
    if kind in _WHOLE:
        roots: dict[Path, Path] = {(): ("params",) if linen else ()}
    elif linen:
        nested = kind != "linen-variables" and _holds_variables(top.get("params"))
        if nested and training.names:  # the kind does not say it
            _check_variables(top["params"], training)
        roots = {path: (name,) for path, name in _collection_roots(top, training, nested).items()}
    else:
        roots = {("model",): ()} if kind != "nnx-optimizer" else {}
    if unfit := _objections(kind, top, training, roots, leaves):
        raise TreeMismatchError(f"the tree cannot be {kind}", unfit)
    if kind in (*_WHOLE, "linen-variables"):
        training = _Training()
    model: dict[Path, list[_SavedLeaf]] = {root: [] for root in roots}
    optimizer, rest = [], []
    size, depths = len(training.root or ()), sorted({len(root) for root in roots}, reverse=True)
    for leaf in leaves:
        if leaf is training.step:
            continue
        at = next((begin for n in depths if (begin := leaf.keys[:n]) in roots), None)
        if training.root and leaf.keys[:size] == training.root and leaf.keys[-1] != _BOOKKEEPING:
            # Text is neither a state nor a masked leaf.
            (rest if isinstance(leaf.value, str) else optimizer).append(leaf)
        else:
            (model[at] if at is not None and leaf.is_array else rest).append(leaf)
    if linen:
        hold, ambiguous = _boxes({p: x for p, x in model.items() if roots[p] != (AUXILIARY,)})
        in_model = in_optimizer = hold
        if ambiguous:
            words = "is taken for a parameter of that name: nothing else is in a box"
            why = [*why, f"{_named(ambiguous.path)} {words}"]
    else:
        one, other = _variables(kind, [*itertools.chain(*model.values())], optimizer, training.step)
        in_model, in_optimizer = lambda leaf, start: one, lambda leaf, start: other
    arrays = [leaf for leaf in rest if leaf.is_array]
    return Layout(
        kind=kind,
        api=_api_of(kind),
        why=tuple(why),
        model=_unique(
            (roots[root] + leaf.below(len(root), in_model(leaf, len(root))), leaf.path)
            for root, below in model.items()
            for leaf in below
        ),
        optimizer=_unique(
            (leaf.below(size, in_optimizer(leaf, size)), leaf.path) for leaf in optimizer
        ),
        step=training.step.path if training.step else None,
        rest=tuple(leaf.path for leaf in rest),
        roots=_unique((beginning, path) for path, beginning in roots.items()),
        optimizer_root=training.root,
        beside=_unique((leaf.below(0, in_model(leaf, 1)), leaf.path) for leaf in arrays),
    )


def _objections(
    kind: str,
    top: _Node,
    training: _Training,
    roots: Mapping[Path, Path],
    leaves: Sequence[_SavedLeaf],
) -> list[str]:
    """Why a tree cannot be of a kind."""
    modules = [leaf.path[:-1] for leaf in leaves if leaf.keys[-1] == _BOOKKEEPING]
    held = [leaf for leaf in leaves if leaf.is_array and leaf.lone is not None]
    variables = [leaf.path for leaf in held if leaf.is_held and leaf.is_standard]
    more = [(key,) for key in top if key not in ("opt_state", "step")]
    params, model = _is_mapping(top.get("params")), isinstance(top.get("model"), dict)
    saved_itself = f"{_named(*modules[:1])} is an NNX module that was saved directly"
    checks = (
        (("linen-", "maxtext"), modules, saved_itself),
        ("linen-params", params, "`params` is a collection at the top"),
        ("linen-params", "opt_state" in top, "`opt_state` is at the top"),
        ("linen-variables", training.root, f"{_named(training.root or ())} is at the top"),
        ("linen-variables", not roots, "no collection is at the top"),
        (("linen-train-state", "maxtext"), not params, "there is no `params` at the top"),
        ("maxtext", (AUXILIARY,) not in roots.values(), "there is no `nnx_aux/model`"),
        ("nnx-state", not held and not modules, "no array is in a `value` level"),
        ("nnx-pure-dict", variables, f"{_named(*variables[:1])} is in a `value` level"),
        ("nnx-optimizer", more, f"there is more at the top: {_named(*more)}"),
        ("nnx-model", not model, "there is no `model` at the top"),
        ("nnx-model-and-optimizer", len(more) == len(top), "there is no `opt_state` or `step`"),
    )
    return [text for kinds, wrong, text in checks if kind.startswith(kinds) and wrong]


def _variables(
    kind: str,
    model: Sequence[_SavedLeaf],
    optimizer: Sequence[_SavedLeaf],
    step: _SavedLeaf | None,
) -> tuple[bool, bool]:
    """Whether leaves are in variables: those of the model, and those of the optimizer state."""
    kinds = {"nnx-state": [True], "nnx-pure-dict": [False]}
    in_model = kinds.get(kind) or _in_variables(model)
    if len(in_model) > 1:
        readings = {
            f"{x} below `model`": f"{_lifted('model')} with layout={as_python(x)}" for x in kinds
        }
        raise _ambiguous(readings, {})
    in_optimizer = _in_variables(optimizer)
    if len(in_optimizer) > 1:
        in_optimizer = in_model if model else [step is None or step.is_held]
    return in_model[0], in_optimizer[0]


def _unique(pairs: Iterable[tuple[Path, Path]]) -> dict[Path, Path]:
    """Path -> saved path; raises TreeMismatchError if a path occurs twice."""
    found: dict[Path, Path] = {}
    problems = []
    for path, saved in pairs:
        if found.setdefault(path, saved) is not saved:
            problems.append(f"{format_path(path)}: {_named(found[path], saved)}")
    if problems:
        raise TreeMismatchError("several leaves would have the same path", problems)
    return found
