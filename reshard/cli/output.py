"""The look of answers: tables, and hints phrased as flags."""

import ast
import json
import re
import shlex
from collections.abc import Sequence

import click

from reshard.tree import shell_quoted

# Longer cells are not padded to: padding all rows to one of them would only take memory.
_WIDEST = 200
# What is typed otherwise than by rule, of what hints say.
_TYPED = {
    " with ": " ",
    "`model=`": "--model",
    "`reshard convert`": "--emit-map",
    "`source=`": "--source-model",
    "check=...": "--inputs MODULE:NAME",
    "config=...": "--config HF_DIR",
    "drop=[...]": "--drop GLOB",
    "init=[...]": "--init GLOB",
    "map_file=...": "--map FILE",
    "model=...": "--model MODULE:NAME",
    'rules=[("embed", "data"), ...]': '--rules FILE with `rules = [["embed", "data"], ...]`',
    'rules=[("embed", "data"), ("vocab", ("data", "model")), ("kv", None)]': (
        'rules = [["embed", "data"], ["vocab", ["data", "model"]], ["kv", []]]'
    ),
    "rules=[]": "`rules = []` in it",
    "share=(..., ...)": "--shard I/N",
    "share=(i, n) with i in": "the array job again, of tasks",
    "source=...": "--source-model MODULE:NAME",
    "reshard.cast(ckpt, ..., ...)": "--dtype 'GLOB=DTYPE'",
    "reshard.open(path)": "reshard inspect PATH",
    "reshard.digest(path, write=True)": "reshard digest PATH --json > FILE",
    "reshard.rename(ckpt, [(..., ...)])": "--rename",
    "reshard.target(model, inputs=(x,), mesh=mesh)": "--model MODULE:NAME of its variables",
    "reshard.to_linen(ckpt, ...)": "--to linen",
    "reshard.to_linen(path, model)": "reshard convert SRC DST --to linen --model MODULE:NAME",
    "reshard.to_nnx(ckpt, ...)": "--to nnx",
    "reshard.to_nnx(path, model)": "reshard convert SRC DST --to nnx --model MODULE:NAME",
}
# These take values in places of their own, and the others below as `--name VALUE`.
_FLAGS = {
    "axes": "--axis {}={}",
    "cast": "--dtype '{1}={0}'",
    "commit": "reshard commit '{}'",
    "drop": "--drop '{}'",
    "init": "--init '{}'",
    "open": "reshard verify '{}'",  # whose argument it is
    "rename": "--rename '{}={}'",
    "select": "--select '{}'",
    "specs": "--spec '{}={}'",
    "to_mesh": "--to {}",
    "verify": "reshard verify '{}'",
}
_OPTIONS = ("check", "chunks", "codec", "file_size", "format", "item", "layout", "max_memory")
_OPTIONS += ("ocdbt", "overwrite", "resume", "step", "values", "workers")
# Python's text, and brackets with up to three levels of others inside.
_TEXT = r"""(?:"(?:[^"\\\n]|\\.)*"|(?<!\w)'(?:[^'\\\n]|\\.)*')"""
_BRACKETS = r"(?!)"
for _ in range(4):
    _BRACKETS = rf"""[\[({{](?:{_TEXT}|{_BRACKETS}|[^][(){{}}"'])*[])}}]"""
# What may be an argument or a call. Names and values in quotes are looked at, too, so that nothing
# inside of them is taken for one.
_CODE = re.compile(
    rf"`[^`]*`|share=\(i, n\) with i in| with (?=layout=)|{_TEXT}"
    rf"|(?P<code>(?<![\w./,-])\w+=(?:{_TEXT}|{_BRACKETS}|True\b|\d+\b|\.\.\.)"
    rf"|(?:reshard\.\w+|(?=\([\"'])){_BRACKETS})"
)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on stdout."""
    click.echo("\n".join(aligned([columns, *rows], right)))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows as lines, with each column as wide as its cells; some columns end at the right."""
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for number, (cell, widest) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(widest) if number in right else cell.ljust(widest))
        lines.append("  ".join(cells).rstrip())
    return lines


def as_flags(text: str) -> str:
    """A hint as it is typed on the command line: its arguments and calls as flags."""
    return _CODE.sub(lambda m: _TYPED.get(m[0]) or _flags(m["code"] or "") or m[0], text)


def note_as_flags(note: str) -> str:
    """A note, with its calls alone as flags: the path of a leaf may look like an argument."""
    return _CODE.sub(lambda m: as_flags(m[0]) if m[0].startswith("reshard.") else m[0], note)


def _flags(code: str) -> str:
    """An argument, a call or a rule as flags; empty for what is none."""
    try:
        [node] = ast.parse(code).body
        match node:
            case ast.Assign([ast.Name(name)], value):
                return _flag(name, [value])
            case ast.Expr(ast.Call(ast.Attribute(_, "stack" | "unstack" as name), given, keywords)):
                return _stacking(name, given[1], {k.arg or "": k.value for k in keywords})
            case ast.Expr(ast.Call(ast.Attribute(_, name), given, keywords)):
                inner = [ast.unparse(arg) for arg in given if isinstance(arg, ast.Call)]
                own = [arg for arg in given if isinstance(arg, ast.Constant | ast.List)]
                flags = [*map(_flags, inner), *([_flag(name, own)] if own else [])]
                return " ".join([*flags, *(_flag(k.arg or "", [k.value]) for k in keywords)])
            case ast.Expr(ast.Tuple()):  # a rule, as it is typed in a file
                name, axis = ast.literal_eval(node.value)
                return json.dumps([name, [] if axis is None else axis], ensure_ascii=False)
    except (SyntaxError, ValueError, KeyError, IndexError):
        pass
    return ""


def _stacking(name: str, before: ast.expr, more: dict[str, ast.expr]) -> str:
    """`stack` or `unstack` as a flag."""
    axis = f"@{ast.unparse(more['axis'])}" if "axis" in more else ""
    text = f"{ast.literal_eval(before)}={ast.literal_eval(more['into'])}{axis}"
    match more.get("indices"):
        case ast.Call(_, [ast.Constant(count)]):
            text = text.replace("{}", f"{{:{count}}}")
        case ast.List(numbers):
            text = text.replace("{}", "{" + ",".join(map(ast.unparse, numbers)) + "}")
    return f"--{name} {shell_quoted(text)}"


def _flag(name: str, nodes: Sequence[ast.expr]) -> str:
    found = (each for node in nodes for each in ast.walk(node))
    values = [each.value for each in found if isinstance(each, ast.Constant)]
    if name in _OPTIONS:
        option, value = f"--{name.replace('_', '-')}", values[0]
        return option if value is True or value is ... else f"{option} {shlex.quote(str(value))}"
    flag = _FLAGS[name]
    if "'" not in flag:
        option, word = flag.split(" ")
        return f"{option} {shlex.quote(word.format(*values))}"
    texts = ["AXIS," if value is ... else shell_quoted(str(value))[1:-1] for value in values]
    return flag.format(*texts) if flag.count("{") > 1 else " ".join(map(flag.format, texts))
