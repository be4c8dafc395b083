"""Layout of a saved tree: which of Flax's APIs wrote it, and where in it the model's leaves, the
optimizer state and the step counter are. Pure: it looks at paths, dtypes and empty leaves.

| fact | evidence |
|---|---|
| API | what only one API writes (`_Tree.proofs`); without it, the API that is converted from |
| kind | the keys at the top, and `value` levels |
| optimizer state, step | their names at the top, or below the name of an `nnx.Optimizer` |
| collections | Flax's names; a user's collection has the modules of `params` |
| `value` levels | names of standard layers are variables or boxes; a module has other leaves, too |

If several kinds remain, the error lists them, and `layout=` chooses one.
"""

import collections
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
# The key of a directly saved module that is none of its attributes.
_BOOKKEEPING = "_pytree__state"
# Names of arrays in the layers of both APIs; in NNX these are always variables.
_STANDARD = frozenset(("kernel", "bias", "scale", "embedding", "mean", "var", "key", "count"))
_TOGETHER = "holds parameters and statistics together"
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


def detect(
    ckpt: Mapping[Path, Any],
    layout: str | None = None,
    api: str | None = None,
    held: Collection[Path] | None = None,
) -> Layout:
    """The layout of a saved tree.

    Args:
      ckpt: the checkpoint, or another mapping from saved paths to leaves, in which arrays are what
        has a dtype.
      layout: the kind, one of `KINDS`, if it is not to be detected.
      api: the API of the tree if there is no proof: the one that is converted from.
      held: the saved paths of leaves in boxes and variables, if they are known.

    Raises:
      TreeMismatchError: the tree can be read in several ways or in none, or it cannot be of the
        kind that was asked for.
      ArgumentError: there is no such kind.
    """
    if layout is not None and layout not in KINDS:
        kinds = [f"{kind}: {text}" for kind, text in KINDS.items()]
        raise ArgumentError(f"`{layout}` is not a layout; the layouts are", kinds)
    if not any(path and hasattr(leaf, "dtype") for path, leaf in ckpt.items()):
        raise TreeMismatchError(
            "the checkpoint is not a model: it holds no array, or one array without a path"
        )
    tree = _Tree(ckpt, held)
    if layout is not None:
        return tree.read(layout, [f"`{layout}` was asked for"])
    return tree.read(*tree.decide(api))


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
        """Whether it is alone in a level named `value`."""
        return self.lone == len(self.keys) - 1

    @property
    def is_standard(self) -> bool:
        """Whether it has a name that the layers of both APIs use."""
        return self.keys[-2 if self.is_held else -1] in _STANDARD

    def below(self, start: int, held: bool = True) -> Path:
        """Its path below the first keys, without the lone level if that holds it."""
        if not held or self.lone is None or self.lone < start:
            return self.keys[start:]
        return self.keys[start : self.lone] + self.keys[self.lone + 1 :]


_Node = dict[str, Any]  # of further ones, and a `_SavedLeaf` at the end of each path


def _leaves_of(node: Any) -> Iterator[_SavedLeaf]:
    if isinstance(node, _SavedLeaf):
        yield node
    else:
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


def _of_linen(kind: str) -> bool:
    return not kind.startswith("nnx")


def _moved(key: str, into: str, ckpt: str = "ckpt") -> str:
    """The call that replaces a level at the top."""
    return f"reshard.rename({ckpt}, {as_python([(f'^{re.escape(format_key(key))}/', into)])})"


def _alone(key: str) -> str:
    """The call that takes what is below a key at the top out of the tree."""
    part = f"reshard.select(ckpt, {as_python(format_glob((key,)) + '/**')})"
    return _moved(key, "", part)


class _Tree:
    """A saved tree.

    Attributes:
      leaves: its leaves, in order.
      top: its nodes as nested dicts with text keys.
      names: the keys at the top of the optimizer state and the step counter.
      state_root: where the optimizer state is saved, if there is any.
      state: the optimizer state.
      step: the step counter.
      wrapped: whether both are below one key, as those of an `nnx.Optimizer`.
      typed: whether it is known which leaves are in boxes and variables.
    """

    def __init__(self, ckpt: Mapping[Path, Any], held: Collection[Path] | None = None):
        self.typed = held is not None
        texts = [tuple(map(str, path)) for path in ckpt]
        nodes = {keys[:end] for keys in texts for end in range(1, len(keys) + 1)}
        sizes = collections.Counter(keys[:-1] for keys in nodes)
        seen = collections.Counter(texts)
        if twice := [keys for keys in seen if seen[keys] > 1 or keys in sizes]:
            summary = "the checkpoint has a list element and a dict entry with the same path"
            raise TreeMismatchError(summary, [_named(keys) for keys in twice])
        self.leaves: list[_SavedLeaf] = []
        self.top: _Node = {}
        for keys, (path, value) in zip(texts, ckpt.items(), strict=True):
            values = [end for end, key in enumerate(keys) if key == "value" and end]
            lone = max((end for end in values if sizes[keys[:end]] == 1), default=None)
            if held is not None:
                lone = len(keys) - 1 if path in held else None
            node = self.top
            for key in keys[:-1]:
                node = node.setdefault(key, {})
            node[keys[-1]] = _SavedLeaf(keys, path, value, lone)
            self.leaves.append(node[keys[-1]])
        self.is_module = self.top.pop(_BOOKKEEPING, None) is not None
        self._find_training()

    def _find_training(self) -> None:
        """Finds the optimizer state and the step counter."""

        def is_state(name: str) -> bool:  # a single array only under the usual name
            node = self.top.get(name)
            if isinstance(node, _SavedLeaf):
                return not isinstance(node.value, str) and (
                    name == "opt_state" or not node.is_array
                )
            return isinstance(node, dict)

        self.state_root: Path | None = None
        self.state, self.wrapped = None, False
        names = [name for name in OPTIMIZERS if is_state(name)][:1]
        steps = [("step", self.top.get("step"))]
        for name in names:
            self.state_root, self.state = (name,), self.top[name]
            inner = self.state.keys() - {_BOOKKEEPING} if isinstance(self.state, dict) else set()
            self.wrapped = name != "opt_state" and ("opt_state" in inner or inner == {"step"})
            if self.wrapped:
                steps.append((name, self.state.get("step")))
                self.state = self.state.get("opt_state")
                self.state_root = None if self.state is None else (name, "opt_state")
        counts = [pair for pair in steps if _dtype_name(pair[1]).startswith(("int", "uint"))]
        self.step = _array(counts[0][1]) if counts else None
        self.names = tuple(dict.fromkeys([*names, *(key for key, _ in counts[:1])]))

    # Which kind it is.

    def decide(self, api: str | None) -> tuple[str, list[str]]:
        """The kind, and why: the one kind of the API of the proofs, or without proofs of the API
        that is converted from."""
        params, model = self.top.get("params"), self.top.get("model")
        trained = self.state_root is not None or self.wrapped
        if self.is_module and not trained and not (model and self.names):
            return "nnx-state", ["the tree is a module that was saved directly (`_pytree__state`)"]
        others = [key for key in self.top.keys() - {"model", *self.names} if self._is_dict(key)]
        named = all(key in COLLECTIONS and _is_mapping(node) for key, node in self.top.items())
        below: dict[str, str] = {}  # what no kind is for -> what changes it
        if named or (_is_mapping(params) and not _is_stream(params)):
            kind, reason = self._linen_kind()
            proofs = self._proofs(params, ("params",), certain=False)
            proofs["linen"].insert(0, reason)
            kinds = [kind, *(self._nnx_kinds() if kind == "linen-variables" else [])]
        elif isinstance(model, dict) and (self.names or not others):
            proofs = self._proofs(model, ("model",))
            variables = _is_mapping(model.get("params"))
            proofs["linen"] += ["`model/params` is a collection"] * variables
            both = self.state_root == ("opt_state",) or self._step_dtype() == "uint32"
            kinds = ["nnx-model-and-optimizer" if both else "nnx-model"]
            kinds += ["linen-params"] * (not variables and not self.names)
            what, into = ("variables", "") if variables else ("parameters", "params/")
            below[f"Linen's {what} below `model`"] = _moved("model", into)
        elif trained or (list(self.top) == ["step"] and self._step_dtype() == "uint32"):
            self._check_top(*[] if others else ["opt_state"])
            proofs = self._proofs(None, ())
            if extra := self.top.keys() - {"opt_state", "step"}:
                into = "model/" if proofs["nnx"] else "params/"
                raise TreeMismatchError(
                    "the tree holds optimizer state, but neither `params` nor `model`",
                    [f"at the top are {_named(*((key,) for key in self.top))}"],
                    [_moved(key, into) for key in others if key in extra],
                )
            proofs["nnx"].insert(0, f"the tree holds only {self._named_training()}")
            kinds = ["nnx-optimizer"]
        else:
            proofs = self._proofs(self.top, ())
            self._check_top("opt_state", *[] if proofs["nnx"] else ["params"])
            kinds = ["linen-params", *self._nnx_kinds(), *["nnx-model"] * isinstance(model, dict)]
        readings = {**{kind: f"layout={as_python(kind)}" for kind in kinds}, **below}
        return _chosen(readings, proofs, api)

    def _is_dict(self, key: str) -> bool:
        return isinstance(self.top[key], dict)

    def _step_dtype(self) -> str:
        return _dtype_name(self.top.get("step"))

    def _named_training(self) -> str:
        return _named(*((name,) for name in self.names))

    def _linen_kind(self) -> tuple[str, str]:
        """The kind of a tree with collections at the top, and why."""
        roots, nested = self._collections()
        if nested:
            self._check_variables()
        if AUXILIARY in roots.values():
            return "maxtext", "`nnx_aux` is next to `params`, as MaxText saves NNX runs"
        if nested:
            return "linen-train-state", "`params/params`: all variables are below `params`"
        if self.names:
            return "linen-train-state", f"`params` is next to {self._named_training()}"
        return "linen-variables", f"collections are at the top: {_named(*roots)}"

    def _proofs(self, model: Any, at: Path, certain: bool = True) -> dict[str, list[str]]:
        """What only one of the APIs writes, by API, in words, with the first place of each: in the
        model, and in the optimizer state. `certain`: modules and streams of NNX outweigh names,
        which an attribute may have as well."""
        proofs: dict[str, dict[str, str]] = {"linen": {}, "nnx": {}}

        def prove(api: str, place: Path, words: str) -> None:
            proofs[api].setdefault(words, f"{_named(place)} {words}")

        stack = [(at, model)] if isinstance(model, dict) else []
        while stack:
            path, node = stack.pop()
            inner = [((*path, key), x) for key, x in node.items() if isinstance(x, dict)]
            stack += reversed(inner)
            for place, child in inner:
                if AUTOMATIC.fullmatch(place[-1]) and not _array(child):
                    prove("linen", place, "has a name that Linen generates")
            if _BOOKKEEPING in node:
                prove("nnx", path, "is a module that was saved directly (`_pytree__state`)")
            if _is_stream(node):
                prove("nnx", path, "is a stream of random numbers (`key`, `count`)")
            arrays = {key for key in ("mean", "var", "scale", "bias") if _array(node.get(key))}
            if {"mean", "var"} < arrays:  # Linen has a collection for each
                prove("nnx", path, _TOGETHER)
        outweighs = certain and bool(proofs["nnx"].keys() - {_TOGETHER})
        if self.wrapped and model is not self.top:
            words = "holds the state and the steps of an optimizer, as `nnx.Optimizer` does"
            prove("nnx", self.names[:1], words)
        if self.state_root and model is not self.top:
            leaves = list(_leaves_of(self.state))
            listed = any(isinstance(key, int) for leaf in leaves for key in leaf.path)
            if listed and all(leaf.lone is None for leaf in leaves):
                prove("linen", self.state_root, "has list positions, as in saved optax tuples")
            states = self.state if isinstance(self.state, dict) and not listed else {}
            valued = all(isinstance(state, dict) or _array(state) for state in states.values())
            if states and valued and all(map(str.isdecimal, states)):
                words = "has keys only for positions with a value, as in `nnx.Optimizer`"
                prove("nnx", self.state_root, words)
        if outweighs:
            proofs["linen"].clear()
        return {api: list(found.values()) for api, found in proofs.items()}

    def _check_top(self, *names: str) -> None:
        """Raises TreeMismatchError if states of these names are one level below the top."""
        nodes = [(key, node) for key, node in self.top.items() if isinstance(node, dict)]
        lower = [
            (key, name) for key, node in nodes for name in names if _is_mapping(node.get(name))
        ]
        if lower:
            summary = "the state is not at the top of the tree"
            hints = [_alone(key) for key in dict.fromkeys(key for key, _ in lower)]
            raise TreeMismatchError(summary, [f"there is {_named(*lower)}"], hints)

    def _nnx_kinds(self) -> list[str]:
        """Of the two kinds of an NNX state those that the tree may be."""
        return ["nnx-state" if held else "nnx-pure-dict" for held in _in_variables(self.leaves)]

    # Collections.

    def _collections(self, alone: bool = True) -> tuple[dict[Path, str], bool]:
        """Where collections are saved -> their names; and whether all of them are below `params`.
        `alone`: they may be."""
        params: Any = self.top.get("params")
        nested = alone and _holds_variables(params)
        roots: dict[Path, str] = {}
        if nested:
            roots = {("params", name): name for name in params}
            params = params["params"]
        elif _is_mapping(params):
            roots = {("params",): "params"}
        for name, node in self.top.items():
            if name in ("params", *self.names) or not _is_mapping(node):
                continue
            inner = node if isinstance(node, dict) else {}
            if name == AUXILIARY and _is_mapping(inner.get("model")):
                roots[name, "model"] = name
            elif name in COLLECTIONS:
                roots[(name,)] = name
            elif inner and all(key in COLLECTIONS and _is_mapping(c) for key, c in inner.items()):
                roots |= {(name, key): key for key in inner}
            elif self._is_collection(inner, params if isinstance(params, dict) else {}, 1 + nested):
                roots[(name,)] = name
        return roots, nested

    def _check_variables(self) -> None:
        """Raises TreeMismatchError if the containers next to `params/params` may be modules: none
        has the name of one of Flax's collections."""
        others = self.top["params"].keys() - {"params"}
        if not others or others & COLLECTIONS:
            return
        paths = _named(*(("params", name) for name in sorted(others)))
        modules, together = 'layout="linen-variables"', 'layout="linen-train-state"'
        if self.names:  # both are train states
            modules, together = _moved("params", "params/params/"), _moved("params", "")
        raise TreeMismatchError(
            "it is unclear whether the keys below `params` are modules or collections",
            [
                f"modules: one is called `params`, as `params/params`, beside {paths}",
                f"collections: the parameters are `params/params`, and none are in {paths}",
            ],
            [f"{modules}, if they are modules", f"{together}, if they are collections"],
        )

    def _is_collection(self, node: _Node, modules: _Node, depth: int) -> bool:
        """Whether a container next to `params` is a collection of the user's own: of arrays, which
        are no copy of the parameters; in a train state, of the same modules as the parameters."""
        leaves = list(_leaves_of(node))
        if not leaves or isinstance(leaves[0].path[1], int):
            return False
        for leaf in leaves:
            number = getattr(leaf.value, "value_type", "") == "scalar"
            if not leaf.is_array or number or _dtype_name(leaf) == "key":
                return False
        if self.names and not node.keys() <= modules.keys():
            return False
        return {leaf.below(1) for leaf in leaves} != {
            leaf.below(depth) for leaf in _leaves_of(modules) if leaf.is_array
        }

    # Where everything is.

    def _roots(self, kind: str) -> dict[Path, Path]:
        """Where the leaves of the model are saved -> the beginning of their paths in it."""
        if kind in _WHOLE:
            return {(): ("params",) if _of_linen(kind) else ()}
        if not _of_linen(kind):
            return {("model",): ()} if kind != "nnx-optimizer" else {}
        found, nested = self._collections(alone=kind != "linen-variables")
        if nested and self.names:  # the kind does not say it
            self._check_variables()
        roots: dict[Path, Path] = {path: (name,) for path, name in found.items()}
        _unique((beginning, path) for path, beginning in roots.items())
        return roots

    def read(self, kind: str, why: list[str]) -> Layout:
        """The layout of a tree of a kind."""
        linen, state_root, step = _of_linen(kind), self.state_root, self.step
        roots = self._roots(kind)
        if kind in (*_WHOLE, "linen-variables"):
            state_root = step = None
        model: dict[Path, list[_SavedLeaf]] = {root: [] for root in roots}
        optimizer, rest = [], []
        size, depths = len(state_root or ()), sorted(map(len, roots), reverse=True)
        for leaf in self.leaves:
            if leaf is step:
                continue
            at = next((begin for n in depths if (begin := leaf.keys[:n]) in roots), None)
            if state_root and leaf.keys[:size] == state_root and leaf.keys[-1] != _BOOKKEEPING:
                # Text is neither a state nor a masked leaf.
                (rest if isinstance(leaf.value, str) else optimizer).append(leaf)
            else:
                (model[at] if at is not None and leaf.is_array else rest).append(leaf)
        problems = self._objections(kind, roots)
        if kind != "nnx-optimizer" and not problems and not any(model.values()):
            problems = [f"there is no array in {_named(*roots)}"]
        if problems:
            raise TreeMismatchError(f"the tree does not have the layout {kind}", problems)
        if self.typed:
            in_model = in_optimizer = lambda leaf, start: True
        elif linen:
            in_model = in_optimizer = _boxes(
                {root: held for root, held in model.items() if roots[root] != (AUXILIARY,)}
            )
        else:
            arrays = [*itertools.chain(*model.values())]
            one, other = _variables(kind, arrays, optimizer, step)
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
            step=step.path if step else None,
            rest=tuple(leaf.path for leaf in rest),
            optimizer_root=state_root,
            beside=_unique(
                (leaf.below(0, in_model(leaf, 1)), leaf.path) for leaf in rest if leaf.is_array
            ),
        )

    def _objections(self, kind: str, roots: Mapping[Path, Path]) -> list[str]:
        """Why the tree cannot be of a kind."""
        top, state = self.top, self.state_root
        modules = [leaf.path[:-1] for leaf in self.leaves if leaf.keys[-1] == _BOOKKEEPING]
        held = [leaf for leaf in self.leaves if leaf.is_array and leaf.lone is not None]
        variables = [leaf.path for leaf in held if leaf.is_held and leaf.is_standard]
        more = [(key,) for key in top if key not in ("opt_state", "step")]
        params, model = _is_mapping(top.get("params")), isinstance(top.get("model"), dict)
        saved_itself = f"{_named(*modules[:1])} is an NNX module that was saved directly"
        checks = (
            (("linen-", "maxtext"), modules, saved_itself),
            ("linen-params", params, "`params` is a collection at the top"),
            ("linen-params", "opt_state" in top, "`opt_state` is next to the parameters"),
            ("linen-variables", state, f"{_named(state or ())} is next to the collections"),
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


def _chosen(
    readings: Mapping[str, str], proofs: Mapping[str, Sequence[str]], api: str | None
) -> tuple[str, list[str]]:
    """The one kind that is of the API of the proofs, or without proofs of the API that is converted
    from. Raises TreeMismatchError if none is, or several are. `readings`: kind, or what has none ->
    what selects it."""
    proved = [name for name, reasons in proofs.items() if reasons]
    apis = proved or ([api] if api else [*API_NAMES])
    by_api = {
        name: [kind for kind in readings if _of_linen(kind) == (name == "linen")]
        for name in API_NAMES
    }
    fitting = [kind for kind in readings if any(kind in by_api[name] for name in apis)]
    if len(fitting) != 1 or len(proved) > 1:
        of_direction = [kind for kind in fitting if api and kind in by_api[api]]
        hinted = [readings[kind] for kind in of_direction or fitting or readings]
        reasons = [f"{API_NAMES[name]}: {text}" for name, found in proofs.items() for text in found]
        raise _ambiguous(fitting, reasons, hinted)
    (kind,) = fitting
    why = list(proofs["linen" if _of_linen(kind) else "nnx"])
    if kind not in KINDS:
        raise TreeMismatchError(f"no supported layout has {kind}", why, [readings[kind]])
    if not proved and api:
        why.append(f"the conversion is from {API_NAMES[api]}, and nothing contradicts it")
    return kind, why or ["no other layout fits"]


def _ambiguous(
    readings: Sequence[str], proofs: Sequence[str], hints: Sequence[str]
) -> TreeMismatchError:
    """The error of several readings."""
    return TreeMismatchError(f"the tree can be read as {' or as '.join(readings)}", proofs, hints)


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
        hints = [f"{_alone('model')} with layout={as_python(x)}" for x in kinds]
        raise _ambiguous([f"{x} below `model`" for x in kinds], (), hints)
    in_optimizer = _in_variables(optimizer)
    if len(in_optimizer) > 1:
        in_optimizer = in_model if model else [step is None or step.is_held]
    return in_model[0], in_optimizer[0]


def _holds_variables(params: Any) -> bool:
    """Whether what is below `params` is all variables, with `params` among the collections."""
    return (
        isinstance(params, dict)
        and _is_mapping(params.get("params"))
        and all(_is_mapping(x) and not AUTOMATIC.fullmatch(name) for name, x in params.items())
    )


def _boxes(model: Mapping[Path, Sequence[_SavedLeaf]]) -> Callable[[_SavedLeaf, int], bool]:
    """A function that says whether a leaf of the model, or of optimizer state that mirrors it, is
    in a box of Linen's.

    A level that holds nothing but `value` is a module with a parameter of that name if it has a
    name as Linen gives modules, or if another collection has other leaves in it. All others are
    boxes if one of them must be, by its name, or if all leaves are in them.
    """
    modules: set[tuple[str, ...]] = {()}
    holders: dict[tuple[str, ...], _SavedLeaf] = {}
    for root, below in model.items():
        for leaf in below:
            path = leaf.keys[len(root) : -1]
            if leaf.is_held:
                holders[path] = leaf
                path = path[:-1]
            modules.update(path[:end] for end in range(1, len(path) + 1))
    found = {p for p in holders if p not in modules and not AUTOMATIC.fullmatch(p[-1])}
    sure = any(holders[path].is_standard for path in found)
    boxes = found if sure or all(x.is_held for held in model.values() for x in held) else set()

    def is_boxed(leaf: _SavedLeaf, start: int) -> bool:
        if not boxes or not leaf.is_held:
            return False
        path = leaf.keys[start:-1]
        endings = (path[i:] for i in range(len(path) + 1))
        return next((end for end in endings if end in holders), None) in boxes

    return is_boxed


def _unique(pairs: Iterable[tuple[Path, Path]]) -> dict[Path, Path]:
    """Path -> saved path; raises TreeMismatchError if a path occurs twice."""
    found: dict[Path, Path] = {}
    problems = []
    for path, saved in pairs:
        if found.setdefault(path, saved) is not saved:
            problems.append(f"{format_path(path)}: {_named(found[path], saved)}")
    if problems:
        raise TreeMismatchError(
            "without the levels of collections and values, several leaves have the same path",
            problems,
        )
    return found
