"""A conversion as the text of a map file that says all of it, leaf by leaf. Pure."""

import json
from collections.abc import Mapping, Sequence
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
from reshard.convert.leafmap import LeafMap, Row
from reshard.convert.replacement import literal_replacement, whole_path
from reshard.errors import TreeMismatchError
from reshard.tree import Path, format_path

_HEADER = """\
# A whole map between the leaves of two checkpoints. Each rule is for one leaf, or for leaves that
# are joined, and sees what the rules before it have left. Any of it can be edited: `from` is a
# regex that is searched for in printed paths, `to` a replacement as `re.sub` takes it. As long as
# every `from` is a whole path, the map can be used in the opposite direction, too.
"""
_ORIGINS = """\
# Behind `[[rule]]` is what it was found by: equal paths after the standard conversions (path), or
# the order of modules of one class (structure).
"""
_WIDTH = 100


def write_map(found: LeafMap, initial: Sequence[str] = (), to: str | None = None) -> str:
    """The text of a map file that `read_map` and `apply_map` make the same map of.

    Args:
      found: the map.
      initial: globs of leaves of the target that keep the model's own initial value.
      to: the API that it converts to, `"nnx"` or `"linen"`.

    Raises:
      TreeMismatchError: a leaf is made of values that were given.
    """
    rows = found.sequence()
    blocks = [_HEADER + (_ORIGINS if any(row.origin != "map" for row in rows) else "")]
    settings = [("to", to)] * (to is not None) + [("init", list(initial))] * bool(initial)
    if settings:
        blocks.append("".join(f"{_assigned(key, value)}\n" for key, value in settings))
    for path in found.dropped:
        blocks.append(f"[[rule]]\nfrom = {_text(_whole(path))}\ndrop = true\n")
    shapes = found.sources()
    for row in rows:
        inputs = [shapes.pop(path) for path in row.inputs]
        made = inputs if row.operation is None else row.operation.shapes(inputs)
        shapes.update(zip(row.outputs, made, strict=True))
        blocks.append(_rule(row, inputs))
    return "\n".join(blocks)


def _rule(row: Row, inputs: Sequence[Shape]) -> str:
    """The rule of a row on leaves of these shapes."""
    sources: list[str] = [_whole(path) for path in row.inputs]
    paths = [literal_replacement(format_path(path)).text for path in row.outputs]
    lines = ["[[rule]]" if row.origin == "map" else f"[[rule]]  # {row.origin}"]
    gathered = isinstance(row.operation, Concat | Stack)
    operation = [] if row.operation is None else [_operation(row.operation, inputs, paths)]
    lines.append(_assigned("from", sources if gathered else sources[0]))
    lines += [_assigned(key, value) for key, value in operation]
    if not isinstance(row.operation, Split | Unstack):
        lines.append(_assigned("to", paths[0]))
    return "\n".join(lines) + "\n"


def _operation(
    operation: Operation, inputs: Sequence[Shape], paths: Sequence[str]
) -> tuple[str, Any]:
    """The key and the value of an operation on leaves of these shapes."""
    match operation:
        case Transpose(axes=axes):
            return "transpose", axes
        case Reshape(shape=shape):
            return "reshape", {"from": inputs[0], "to": shape}
        case Pad(widths=widths, fill=fill):
            return "pad", {"widths": widths, "fill": fill}
        case Crop(widths=widths):
            return "crop", {"widths": widths}
        case Split(axis=axis, sizes=sizes):
            return "split", {"axis": axis, "sizes": sizes, "into": paths}
        case Unstack(axis=axis):
            return "unstack", {"axis": axis, "into": paths}
        case Concat(axis=axis):
            return "concat", {"axis": axis, "sizes": [shape[axis] for shape in inputs]}
        case Stack():
            names = {"names": operation.names} if operation.names else {}
            return "stack", {"axis": operation.axis} | names
        case Apply(name=name, shape=shape, dtype=dtype):
            sizes = {} if shape is None else {"shape": shape}
            kind = {} if dtype is None else {"dtype": dtype.name}
            return "apply", {"function": name, **sizes, **kind} if sizes or kind else name
        case Constant():
            raise TreeMismatchError(f"no map can hold the values of {' and '.join(paths)}")


def _whole(path: Path) -> str:
    return whole_path(format_path(path)).text


def _assigned(key: str, value: Any) -> str:
    """A line of TOML; a list that makes it long is broken into lines."""
    line = f"{key} = {_toml(value)}"
    return line if len(line) <= _WIDTH else f"{key} = {_toml(value, broken=True)}"


def _toml(value: Any, broken: bool = False) -> str:
    """A value as TOML; if it is to be broken, with a line for each text of a list."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_toml(entry, broken)}" for key, entry in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, Sequence):
        entries = [_toml(entry, broken) for entry in value]
        if broken and entries and isinstance(value[0], str):
            return "".join(["[\n", *(f"    {entry},\n" for entry in entries), "]"])
        return f"[{', '.join(entries)}]"
    return repr(value)


def _text(text: str) -> str:
    """A text as TOML: as it is between single quotes, or escaped between double ones."""
    if "'" not in text and text.isprintable():
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
