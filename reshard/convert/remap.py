"""Rewrite a tree as another tree by a map alone, without a model and its framework; and ready maps.

A ready map is from Hugging Face's tensors to the trees of JAX projects, `hf:MODEL-TARGET`.

Each TOML file in `maps_hf/` describes the tensors of some models and their places in one project:

    models.llama = { model_type = ["llama"], tie_word_embeddings = false }
    targets.tunix = { api = "nnx" }        # its own variables

    [[block]]                              # for each number of a layer, each tensor of a list
    each = { n = 'layers' }
    tensors = 'layer'
    hf = 'model/layers/{n}/'
    to = 'layers/{n}/'

    [[tensors.layer]]
    hf = 'mlp/up_proj/weight'
    shape = ['ffn', 'width']
    transpose = [1, 0]                     # and other operations of a map file, in its order
    to = 'mlp/up_proj/kernel/value'

A model has the values of `model_type`, and defaults for `config.json`. A text in the place of a
number is an expression, and so is the text in the braces of a path. Expressions know the sizes in
`config.json` (see `_variables`), the variables of the target, and what a block defines with `let`.
A block or a tensor with `when` counts only if that is true. `require` lists what must be true.
Tensors with the same new path are stacked, along the axis `stack`. The operations in `first` come
before the others. If they split a tensor, it has no `to`: other tensors of the list are its parts.

`ignored` has keys of `config.json` that no array shows and that the JAX model does not take from
the user. If such a key has another value than `is`, a note says so. `without` is the value that
Hugging Face's model has if the key is missing or null, `is` by default.

A ready map becomes an ordinary map with a rule for each leaf. So a tensor that is missing, or has
another shape, is an error in both directions.
"""

import collections
import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes

from reshard import tree
from reshard.arrays.dtypes import kind_of
from reshard.arrays.handle import ArrayHandle, array_text
from reshard.arrays.operations import Moving
from reshard.checkpoint import Checkpoint, Leaf, check_checkpoints, name_clashes, type_name
from reshard.convert import map_rules, mapfile
from reshard.convert.described import with_true_metadata
from reshard.convert.layout import OPTIMIZERS
from reshard.convert.leafmap import LeafMap, Output, Source, sources_of
from reshard.convert.optimizer import followers
from reshard.errors import ArgumentError, ReshardError, TreeMismatchError
from reshard.loader.hf_files import snapshot
from reshard.loader.json_documents import read_json

PREFIX = "hf:"
_FILES = importlib.resources.files("reshard.convert") / "maps_hf"
_CONFIG = "config.json"
# The most layers of a model.
_MOST_LAYERS = 4096
# Problems of `apply_map`.
_NO_RULE = "no rule applies to "
_OTHER_SHAPE = re.compile(r"its shape is (\[[\d, ]*\]), not (\[[\d, ]*\])")
# Leaves that no output of a text model depends on: those below a key at the top, those with a name
# at their end, and the random state of NNX. Nothing else is known to be without effect.
_OTHER_TREES = {*OPTIMIZERS, "step", "vision_tower", "multi_modal_projector"}
_BUFFERS = {"inv_freq", "position_ids", "masked_bias", "cos_cached", "sin_cached"}
_DEQUANTIZE = "dequantize its tensors, and remove `quantization_config` from its `config.json`"
_NO_OPERATIONS = {"hf", "to", "shape", "when", "first", "stack"}


def remap(
    ckpt: Checkpoint,
    map_file: str | os.PathLike[str] | map_rules.Map,
    *,
    reverse: bool = False,
    config: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Rewrite the tree of a checkpoint by a map, without a model. Reads no array.

    Every leaf needs a rule, which gives its new path or drops it. The new path may be the old one.

    Args:
      ckpt: the checkpoint.
      map_file: TOML, or a ready map such as `"hf:llama-tunix"`: see `reshard help maps`. A map from
        `reshard.ready_map` is accepted, too.
      reverse: whether the map is used in the opposite direction.
      config: a Hugging Face directory, or its `config.json`. Expressions in the map may name its
        numbers. By default, the `config.json` in the directory of `ckpt`.

    Raises:
      ArgumentError: the file is not a map.
      TreeMismatchError: the map does not fit the leaves, or leaves have no rule: all problems.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "**/kernel")
      >>> with open("map.toml", "w") as file:
      ...     _ = file.write("[[rule]]\\nfrom = 'layer_(.)'\\nto = 'block_\\\\1'")
      >>> [*reshard.remap(ckpt, "map.toml")]
      [('params', 'block_0', 'kernel'), ('params', 'block_1', 'kernel')]
    """
    check_checkpoints(ckpt)
    rules = dataclasses.replace(find_map(map_file, ckpt, config=config), keeps=True)
    old: dict[tree.Path, tree.Path] = {tuple(map(str, path)): path for path in ckpt}
    leaves: dict[tree.Path, Leaf] = {text: ckpt[path] for text, path in old.items()}
    shapes = {p: x.shape if isinstance(x, ArrayHandle) else () for p, x in leaves.items()}
    try:
        result = (map_rules.apply_inverse if reverse else map_rules.apply_map)(rules, shapes)
    except TreeMismatchError as error:
        if not rules.name.startswith(PREFIX):
            raise
        hints = [*_fitting_arguments(shapes, error.problems)]
        raise TreeMismatchError(error.summary, error.problems, hints) from error
    problems = [*_problems(rules, result.map, leaves, reverse)]
    if len(old) < len(ckpt):
        problems += ["a list element and a dict entry have the same path"]
    if problems:
        raise TreeMismatchError(f"{rules.name}: the map cannot be applied to this tree", problems)
    made: dict[tree.Path, Leaf] = {}
    for path, leaf in result.map.bind(leaves).items():
        was = next(iter(sources_of(result.map.values[path])), path)
        new = tree.with_positions(tuple(map(str, path)), old.get(was, was), moves=True)
        made[new] = leaf.at(new) if isinstance(leaf, ArrayHandle) else leaf
    tree.check_lists(made, ckpt)
    if clashes := name_clashes(made):
        raise TreeMismatchError("two leaves would be stored under one name", clashes)
    return with_true_metadata(ckpt.replace(made, notes=result.notes, retyped=True), by_map=True)


def _problems(
    rules: map_rules.Map, found: LeafMap, leaves: Mapping[tree.Path, Leaf], reverse: bool
) -> Iterator[str]:
    """Why a map cannot be used without a model."""
    for glob in () if reverse else rules.initial:
        yield f"`init` has `{glob}`, and only a model has initial values"
    for call in found.calls():
        for value in call.inputs:
            if isinstance(value, Source) and not isinstance(leaves[value.path], ArrayHandle):
                path, kind = tree.format_path(value.path), type_name(leaves[value.path])
                yield f"{path}: {call.operation} is for arrays, not for {kind}"
    yield from _stateful(found)


def _stateful(found: LeafMap) -> Iterator[str]:
    """Optimizer state of parameters that a rule computes, compares or leaves out as a constant."""
    changed = dict.fromkeys(found.must_be_zero)
    for call in found.calls():
        if not isinstance(call.operation, Moving):
            changed |= dict.fromkeys(sources_of(Output(call, 0)))
    state = [path for path in found.sources() if not {*OPTIMIZERS}.isdisjoint(map(str, path))]
    constant = {path: value.shape for path, value in found.must_be_zero.items()}
    parameters = {**found.sources(), **constant}
    for path in state:
        parameters.pop(path)
    yield from (
        f"{tree.format_path(path)}: it looks like optimizer state of {tree.format_path(owner)}, "
        "whose values a rule changes: add a rule for it, or drop it"
        for path, owner in _mirrors(changed, parameters)
    )
    owners = followers(dict.fromkeys(parameters, ()), dict.fromkeys(state)) if changed else {}
    for path, owner in owners.items():
        if owner in changed:
            yield (
                f"{tree.format_path(path)}: it is optimizer state of {tree.format_path(owner)}, "
                "whose values a rule changes: it cannot follow, so drop it"
            )


def _mirrors(
    changed: Collection[tree.Path], leaves: Mapping[tree.Path, Sequence[int]]
) -> Iterator[tuple[tree.Path, tree.Path]]:
    """Leaves that stay as they are, but follow one that is `changed`, with that one: leaves of its
    shape whose paths end with its path below another top-level key. The top-level key of the
    changed leaf may be missing if the leaves below both keys have the same names."""
    below: dict[str, set[tree.Path]] = collections.defaultdict(set)
    texts = {tuple(map(str, path)): path for path in leaves}
    for path in filter(None, texts):  # a tree may be one leaf
        below[path[0]].add(path[1:])
    owners: dict[tree.Path, list[tree.Path]] = collections.defaultdict(list)
    for path in changed:
        text = tuple(map(str, path))
        owners[text].append(path)
        if len(text) > 1 and (text[0] == "params" or any(len(tail) > 1 for tail in below[text[0]])):
            owners[text[1:]].append(path)

    @functools.cache
    def mirrored(root: tree.Path, top: str) -> bool:
        return all((*root, *tail) in texts for tail in below[top])

    for text, path in texts.items():
        for start in range(1, len(text)):
            for owner in owners.get(text[start:], ()) if path not in changed else ():
                one, other = (re.sub(r"\d+", "", str(each[0])) for each in (path, owner))
                whole = len(owner) == len(text) - start or mirrored(text[:start], str(owner[0]))
                if one != other and whole and leaves[path] == leaves[owner]:
                    yield path, owner


def ready_map(
    name: str,
    config: str | os.PathLike[str],
    *,
    vocab: int | None = None,
    scan_axis: int | None = None,
    to: str | None = None,
) -> map_rules.Map:
    """The ready map for a model. `reshard help maps` lists their names.

    Args:
      name: `"hf:MODEL-TARGET"`, or `"hf:auto-TARGET"`, which takes the model from the
        configuration.
      config: a Hugging Face directory, or its `config.json`.
      vocab: the number of rows of the JAX model's embedding. Rows beyond the vocabulary are zeros.
        If `vocab` is smaller, the map removes rows and has no inverse.
      scan_axis: the axis of layers in the JAX model's scanned arrays, 1 by default.
      to: for `to_nnx`, `"nnx"`. By default, the map is for `remap`.

    Raises:
      ArgumentError: there is no such map, an argument does not fit, or the configuration lacks a
        size, or belongs to another model or to a quantized one.

    Example:
      >>> with open("config.json", "w") as file:
      ...     _ = file.write('{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, '
      ...         '"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}')
      >>> len(reshard.ready_map("hf:llama-tunix", "config.json").rules)
      12
    """
    values = read_config(config)
    if quantization := values.get("quantization_config"):
        problems = [f"`quantization_config` is {quantization}"]
        raise ArgumentError(f"the model of `{config}` is quantized", problems, [_DEQUANTIZE])
    maps, wanted = ready_maps(), name.removeprefix(PREFIX)
    kind, fitting = values.get("model_type"), maps_for(values)
    model = (fitting or [""])[0].partition("-")[0]
    key = wanted.replace("auto", model, 1) if wanted.startswith("auto-") else wanted
    if key not in fitting:
        raise ArgumentError(
            f"there is no ready map `{name}` for `{config}`, whose `model_type` is {kind!r}",
            [f"for this model: {', '.join(fitting) or 'none'}", f"all: {', '.join(maps)}"],
            [PREFIX + each for each in fitting],
        )
    document = maps[key]
    _, _, target = key.partition("-")
    variables = _variables(document["models"][model] | values, f"`{config}`")
    variables |= document["targets"][target] | {"model": model, "target": target}
    # Of a model of text and images, the tensors of the text model.
    variables["prefix"] = "language_model/" if "text_config" in values else ""
    if scan_axis is not None:
        if "scan_axis" not in variables:
            raise ArgumentError(f"{name} has no scanned layers: scan_axis has no effect")
        variables["scan_axis"] = scan_axis
    variables["padding"] = 0 if vocab is None else vocab - variables["vocab"]
    untrue = [rule for rule in document.get("require", ()) if not _evaluated(rule, variables)]
    if untrue:
        words = dict.fromkeys(re.findall(r"[a-z_]+", " ".join(untrue)))
        known = [f"{name} is {variables[name]!r}" for name in words if name in variables]
        problems = [*(f"it requires `{rule}`" for rule in untrue), "here, " + ", ".join(known)]
        raise ArgumentError(f"{name} does not fit the model of `{config}`", problems)
    if to not in (None, variables.get("api")):
        text = f"a conversion to {to} cannot use the map {name}: pass it to `reshard.remap`"
        raise ArgumentError(text)
    made = mapfile.map_of({"rule": [*_rules(document, variables, to is not None)]}, name)
    return dataclasses.replace(made, notes=tuple(_ignored(document, values, variables, name)))


def _ignored(
    document: Mapping[str, Any], config: Mapping[str, Any], variables: Mapping[str, Any], name: str
) -> Iterator[str]:
    """Notes on keys of `config.json` with values that the JAX model is not known to have."""
    given = {**(config.get("rope_parameters") or {}), "rope_type": variables["rope_type"]}
    given |= {key: value for key, value in config.items() if value is not None}
    for entry in document.get("ignored", ()):
        key, known = entry["key"], entry["is"]
        value = given.get(key, entry.get("without", known))
        if value != known and _evaluated(entry.get("when", "True"), variables):
            text = f"`{key}` is {value!r}: outputs are known to agree only with {known!r}"
            yield f"{name}: {text}"


def find_map(
    map_file: str | os.PathLike[str] | map_rules.Map,
    ckpt: Checkpoint,
    to: str | None = None,
    config: str | os.PathLike[str] | None = None,
) -> map_rules.Map:
    """The map that an argument means: a map, a file, or the ready map for a Hugging Face
    checkpoint, whose configuration is beside it if no other is given. Raises ArgumentError, as
    `ready_map` and `read_map`; TreeMismatchError: a ready map, and weights that are quantized."""
    if isinstance(map_file, str) and map_file.startswith(PREFIX):
        map_file = ready_map(map_file, config or ckpt.source.root, to=to)
    if isinstance(map_file, map_rules.Map):
        if map_file.name.startswith(PREFIX) and (packed := [*_quantized(ckpt)]):
            raise TreeMismatchError(
                f"{map_file.name}: the weights are quantized", packed, [_DEQUANTIZE]
            )
        return map_file
    try:
        numbers = mapfile.config_numbers(read_config(config or ckpt.source.root))
    except ReshardError:
        if config:
            raise
        numbers = {}
    return mapfile.read_map(map_file, numbers)


def ready_maps() -> dict[str, dict[str, Any]]:
    """The name of each ready map, without its prefix, and the document that describes it."""
    found = {}
    for file in sorted(_FILES.iterdir(), key=lambda file: file.name):
        document = tomllib.loads(file.read_text("utf-8"))
        pairs = itertools.product(document["models"], document["targets"])
        found |= {f"{model}-{target}": document for model, target in pairs}
    return found


def maps_for(config: Mapping[str, Any]) -> list[str]:
    """The names of the ready maps for the model of a `config.json`, without their prefix."""
    kind = config.get("model_type")
    models = {name: d["models"][name.partition("-")[0]] for name, d in ready_maps().items()}
    return [name for name, model in models.items() if kind in model["model_type"]]


def _glob_without_effect(path: tree.Path) -> str | None:
    """A glob for a leaf and others that no output of a model depends on; None if one may."""
    if _OTHER_TREES.intersection(path[:1]):  # a tree may be one leaf, without a path
        return tree.format_glob(path[:1]) + "/**" * (len(path) > 1)
    if _BUFFERS.intersection(path[-1:]):
        return f"**/{path[-1]}"
    return "**/rngs/**" if "rngs" in path else None


def _quantized(ckpt: Checkpoint) -> Iterator[str]:
    """The arrays that hold integers, or floating-point numbers of 8 bits or fewer, before casts."""
    for leaf in ckpt.arrays:
        if not leaf.shape or leaf.key_impl is not None or _glob_without_effect(leaf.path):
            continue
        for dtype in dict.fromkeys(root.stored_dtype for root, _ in leaf.roots()):
            if kind_of(dtype) in ("i", "u") or (kind_of(dtype) == "f" and dtype.itemsize == 1):
                yield f"{tree.format_path(leaf.path)}  {array_text(dtype.name, leaf.shape)}"


def _fitting_arguments(leaves: Collection[tree.Path], problems: Sequence[str]) -> Iterator[str]:
    """Hints for a ready map whose only problems are more leaves, or more rows of the embedding."""
    unmatched = {text.removeprefix(_NO_RULE) for text in problems if text.startswith(_NO_RULE)}
    shapes = [match.groups() for text in problems if (match := _OTHER_SHAPE.search(text))]
    if len(unmatched) + len(shapes) < len(problems):
        return
    left = [path for path in leaves if tree.format_path(path) in unmatched]
    globs = dict.fromkeys(map(_glob_without_effect, left))
    if None in globs:
        return
    if globs:
        yield f"reshard.select(ckpt, drop={tree.as_python([*globs])}) leaves these leaves out"
    pairs = {
        pair
        for one, other in shapes
        for pair in zip(json.loads(one), json.loads(other), strict=False)
    }
    sizes = [(size, expected) for size, expected in pairs if size > expected]
    if len(sizes) == 1:
        yield f"vocab={sizes[0][0]}, if the embedding of the JAX model has {sizes[0][0]} rows"


def read_config(config: str | os.PathLike[str]) -> dict[str, Any]:
    """The document `config.json` of a directory, beside a file, or of its own path."""
    place = snapshot(config)
    if place.name != _CONFIG:
        place = (place.parent if place.is_file() else place) / _CONFIG
    document = read_json(place, follow=True)
    if document is None:
        raise ArgumentError(f"there is no `{place}`", hints=["config=..."])
    inner = document.get("text_config")
    if not isinstance(inner, dict | None):
        raise ArgumentError(f"`{place}`: `text_config` is {inner!r}, not an object")
    return document if inner is None else inner | document


def _variables(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What expressions may use: sizes of the model, and whether its embeddings are tied."""
    problems = []

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if type(value) is not int or value < 1:
            problems.append(f"`{key}` is {value!r}, not a size")
            return 1
        return value

    heads, width = size("num_attention_heads"), size("hidden_size")
    found = {
        "width": width,
        "ffn": size("intermediate_size"),
        "layers": size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", width // heads),
        "vocab": size("vocab_size"),
        "experts": size("num_local_experts", 1),
        "tied": config.get("tie_word_embeddings"),
    }
    if found["layers"] > _MOST_LAYERS:
        problems.append(f"`num_hidden_layers` is {found['layers']}, more than {_MOST_LAYERS}")
    if not isinstance(found["tied"], bool):
        problems.append(f"`tie_word_embeddings` is {found['tied']!r}, not true or false")
    found["rope_type"] = "default"
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if not isinstance(rope, dict | None):
            problems.append(f"`{key}` is {rope!r}, not an object")
        elif rope:
            found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    scalar = config.get("query_pre_attn_scalar")
    found["query_scalar"] = found["head_dim"] if scalar is None else scalar
    if type(found["query_scalar"]) not in (int, float) or not 0 < found["query_scalar"] < math.inf:
        problems.append(f"`query_pre_attn_scalar` is {scalar!r}, not a number above 0")
    if problems:
        raise ArgumentError(f"{name} does not describe a model", problems)
    return found


def _rules(
    document: Mapping[str, Any], variables: Mapping[str, Any], conversion: bool
) -> Iterator[dict[str, Any]]:
    """The rules of a map file, with the whole path of every leaf. A conversion has the tensors
    below `params`, and attributes of NNX modules."""
    below, suffix = ("params/", "/value") if conversion else ("", "")
    for block in document["block"]:
        if not _evaluated(block.get("when", "True"), variables):
            continue
        each: dict[str, str] = block.get("each", {})
        numbers = itertools.product(
            *(range(_evaluated(count, variables)) for count in each.values())
        )
        gathered: dict[str, dict[str, Any]] = {}  # by the new path
        for values in numbers:
            scope = {**variables, **dict(zip(each, values, strict=True))}
            scope |= {key: _evaluated(text, scope) for key, text in block.get("let", {}).items()}
            for tensor in document["tensors"][block["tensors"]]:
                if not _evaluated(tensor.get("when", "True"), scope):
                    continue
                names = tensor["hf"] if isinstance(tensor["hf"], list) else [tensor["hf"]]
                sources = [f"^{re.escape(below + _text(block['hf'] + n, scope))}$" for n in names]
                first, operations = _operations(tensor, scope)
                yield from ({"from": source, **first} for source in sources if first)
                if "to" not in tensor:  # `first` has split it
                    continue
                to = _text(block["to"] + tensor["to"], scope).removesuffix(suffix)
                if (axis := tensor.get("stack", block.get("stack"))) is not None:
                    operations["stack"] = {"axis": _filled(axis, scope)}
                rule = gathered.setdefault(to, {"from": [], "to": to, **operations})
                rule["from"] += sources
        for rule in gathered.values():
            yield rule if "stack" in rule else rule | {"from": rule["from"][0]}


def _operations(
    tensor: Mapping[str, Any], scope: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operations of a rule, after those of another one if there are any to do `first`. Their
    `reshape` always says which shape the tensor must have."""
    shape, found = _filled(tensor["shape"], scope), []
    for table in (tensor.get("first", {}), tensor):
        own = {key: value for key, value in table.items() if key not in _NO_OPERATIONS}
        made = {key: _filled(value, scope) for key, value in own.items()}
        shape = [shape[axis] for axis in made.get("transpose", range(len(shape)))]
        if table:
            made["reshape"] = {"from": shape, "to": made.get("reshape", shape)}
            shape = made["reshape"]["to"]
        widths = made.get("pad", {}).get("widths", [])
        if not any(after > 0 for _, after in widths):
            made.pop("pad", None)
        if any(after < 0 for _, after in widths):
            made["crop"] = {"widths": [[0, -after] for _, after in widths]}
        found.append({key: made[key] for key in mapfile.ORDER if key in made})
    return found[0], found[1]


def _evaluated(source: str, names: Mapping[str, Any]) -> Any:
    """The value of a Python expression of a ready map."""
    known = {"__builtins__": {}, "bfloat16": lambda x: float(ml_dtypes.bfloat16(x))}
    return eval(source, known, dict(names))


def _filled(value: Any, scope: Mapping[str, Any]) -> Any:
    """A value of TOML with the value of each text in it that is an expression."""
    if isinstance(value, list):
        return [_filled(each, scope) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, scope) for key, each in value.items()}
    return _evaluated(value, scope) if isinstance(value, str) else value


def _text(template: str, scope: Mapping[str, Any]) -> str:
    """A path with the values of the expressions in its braces."""
    return re.sub(r"\{([^}]*)\}", lambda match: str(_evaluated(match[1], scope)), template)
