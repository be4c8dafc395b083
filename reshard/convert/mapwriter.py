"""A conversion as the text of a map file that says all of it, in as few rules. Pure."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.arrays.operations import (
    Apply,
    Concat,
    Constant,
    Crop,
    Operation,
    Pad,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from reshard.convert.leafmap import LeafMap, Row, Source, Value, Zeros
from reshard.convert.map_rules import inverse
from reshard.convert.mapfile import map_of
from reshard.convert.mapped import apply_map
from reshard.convert.repeated_rows import Block, blocks_of, literal_block
from reshard.convert.replacement import toml_text
from reshard.errors import ReshardError, TreeMismatchError
from reshard.tree import Path, format_glob, format_path, glob_text, named_by

_HEADER = """\
# A whole map between the leaves of two checkpoints. Each rule is for a leaf, for all leaves of a
# module (`^a/b/`), or for those that differ in numbers alone (`(\\d+)`), and sees what the rules
# before it have left. Any of it can be edited: `from` is a regex that is searched for in printed
# paths, `to` a replacement as `re.sub` takes it. As long as `from` has no other wildcards, and all
# of its numbers are in the new paths, the map can be used in the opposite direction, too: with the
# model that is made then, where an optimizer's state or a step is beside it. Where the
# source was renamed, selected from or cast before, that is not in it.
"""
_ORIGINS = """\
# Behind `[[rule]]` is what it was found by: equal paths after the standard conversions (path), or
# the order of modules of one class (structure).
"""
_WIDTH = 100
# The key and the value of a rule's operation.
Setting = tuple[str, Any] | None


def write_map(
    found: LeafMap, initial: Sequence[str] = (), to: str | None = None, own: Collection[Path] = ()
) -> str:
    """The text of a map file that `read_map` and `apply_map` make the same map of, and `inverse`
    and `apply_map` the way back. Rules that say more than their own leaves are not written.

    Args:
      found: the map.
      initial: globs of leaves of the target that keep the model's own initial value.
      to: the API that it converts to, `"nnx"` or `"linen"`.
      own: more leaves of the target that do.

    Raises:
      TreeMismatchError: a leaf is made of values that were given.
    """
    drops = [Row((path,), (), None, "map") for path in found.dropped]
    rows, settings = [*drops, *found.sequence()], []
    shapes = {**dict.fromkeys(found.dropped, ()), **found.sources()}
    for row in rows:
        inputs = [shapes.pop(path) for path in row.inputs]
        if row.outputs:
            made = inputs if row.operation is None else row.operation.shapes(inputs)
            shapes.update(zip(row.outputs, made, strict=True))
        if isinstance(row.operation, Constant):
            names = " and ".join(map(format_path, row.outputs))
            raise TreeMismatchError(f"no map can hold the values of {names}")
        settings.append(_setting(row.operation, inputs))
    resets = [Row((path,), (), None, "map") for path in own]
    globs = [block.inputs[0].glob for block in blocks_of(resets, [""] * len(resets), found.values)]
    others = {*found.sources(), *found.values, *found.must_be_zero, *own}
    short = _written(
        rows, settings, blocks_of(rows, list(map(repr, settings)), others), [*initial, *globs], to
    )
    if _says(short, found, own):
        return short
    every = [*initial, *map(format_glob, own)]
    return _written(rows, settings, list(map(literal_block, range(len(rows)), rows)), every, to)


def _written(
    rows: Sequence[Row],
    settings: Sequence[Setting],
    blocks: Sequence[Block],
    initial: Sequence[str],
    to: str | None,
) -> str:
    """The text of a map, with a rule for each block of rows."""
    texts = [_HEADER + (_ORIGINS if any(row.origin != "map" for row in rows) else "")]
    top = [("to", to)] * (to is not None) + [("init", initial)] * bool(initial)
    if top:
        texts.append("".join(f"{_assigned(key, value)}\n" for key, value in top))
    return "\n".join([*texts, *(_rule(rows[b.rows[0]], settings[b.rows[0]], b) for b in blocks)])


def _says(text: str, found: LeafMap, own: Collection[Path]) -> bool:
    """Whether a text says a map, in both directions if it has both."""
    values: dict[Path, Value] = {
        p: value for p, value in found.values.items() if not isinstance(value, Zeros)
    }
    whole = LeafMap(values)
    zeros = {path: zeros.shape for path, zeros in found.must_be_zero.items()}
    leaves = {**whole.sources(), **zeros, **dict.fromkeys(found.dropped, ())}
    stay = {path: Source(path, shape) for path, shape in zeros.items()}
    try:
        made = whole.inverse()
    except TreeMismatchError:  # an operation has none
        made = None
    try:
        rules = map_of(tomllib.loads(text), "the map")
        forth = apply_map(rules, leaves).map
        if made is None:
            return _are(forth, values | stay, found.dropped)
        undone = inverse(rules)
        back = apply_map(undone, whole.shapes | dict.fromkeys(own, ())).map
    except ReshardError:
        return False
    texts = {glob_text(path): path for path in leaves}
    named = {texts[text] for glob in undone.initial for text in named_by(texts, glob)}
    return (
        named == {*found.dropped}
        and _are(forth, values | stay, found.dropped)
        and _are(back, made.values, own)
    )


def _are(found: LeafMap, values: Mapping[Path, Value], dropped: Collection[Path]) -> bool:
    return found.values == values and {*found.dropped} == {*dropped}


def _rule(row: Row, setting: Setting, block: Block) -> str:
    """The rule of a block of rows like this one."""
    sources = [template.pattern().text for template in block.inputs]
    paths = [template.replacement(block.inputs[0]).text for template in block.outputs]
    numbers = block.inputs[0].groups
    joins, parts = (isinstance(row.operation, kind) for kind in (Concat | Stack, Split | Unstack))
    lines = ["[[rule]]" if row.origin == "map" else f"[[rule]]  # {row.origin}"]
    lines.append(_assigned("from", sources if joins and 0 not in numbers else sources[0]))
    if not paths:
        lines.append("drop = true")
    if setting is not None:
        key, value = setting
        if joins and 0 in numbers:
            value = value | {"by": numbers.index(0) + 1}
        if parts:
            value = value | {"into": paths[0] if 0 in block.outputs[0].groups else paths}
        lines.append(_assigned(key, value))
    if paths and not parts:
        lines.append(_assigned("to", paths[0]))
    return "\n".join(lines) + "\n"


def _setting(operation: Operation | None, inputs: Sequence[Shape]) -> Setting:
    """The key and the value of an operation on leaves of these shapes, less what paths have."""
    match operation:
        case None:
            return None
        case Transpose(axes=axes):
            return "transpose", axes
        case Reshape(shape=shape):
            return "reshape", {"from": inputs[0], "to": shape}
        case Pad(widths=widths, fill=fill):
            return "pad", {"widths": widths, "fill": fill}
        case Crop(widths=widths):
            return "crop", {"widths": widths}
        case Split(axis=axis, sizes=sizes):
            return "split", {"axis": axis, "sizes": sizes}
        case Unstack(axis=axis):
            return "unstack", {"axis": axis}
        case Concat(axis=axis):
            return "concat", {"axis": axis, "sizes": [shape[axis] for shape in inputs]}
        case Stack():
            names = {"names": operation.names} if operation.names else {}
            return "stack", {"axis": operation.axis} | names
        case Apply(name=name, shape=shape, dtype=dtype):
            sizes = {} if shape is None else {"shape": shape}
            kind = {} if dtype is None else {"dtype": dtype.name}
            return "apply", {"function": name, **sizes, **kind} if sizes or kind else name


def _assigned(key: str, value: Any) -> str:
    """A line of TOML; a list that makes it long is broken into lines."""
    line = f"{key} = {_toml(value)}"
    return line if len(line) <= _WIDTH else f"{key} = {_toml(value, broken=True)}"


def _toml(value: Any, broken: bool = False) -> str:
    """A value as TOML; if it is to be broken, with a line for each text of a list."""
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_toml(entry, broken)}" for key, entry in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, Sequence):
        entries = [_toml(entry, broken) for entry in value]
        if broken and entries and isinstance(value[0], str):
            return "".join(["[\n", *(f"    {entry},\n" for entry in entries), "]"])
        return f"[{', '.join(entries)}]"
    return repr(value)
