"""Tables, and the library's hints as options of the command line."""

import ast
import json
import re
import shlex
from collections.abc import Sequence

import click

# Columns are at most this wide: padding all rows to a longer cell would only take memory.
_WIDEST = 200
# Parts of hints that the tables below do not cover, as they are typed.
_TYPED = {
    " with ": " ",
    "check=...": "--inputs MODULE:NAME",
    "config=...": "--config HF_DIR",
    "drop=[...]": "--drop GLOB",
    "map_file=...": "--map FILE",
    "model=...": "--model MODULE:NAME",
    'rules=[("embed", "data"), ...]': '--rules FILE with `rules = [["embed", "data"], ...]`',
    "rules=[]": "`rules = []` in it",
    "share=(..., ...)": "--shard I/N",
    "source=...": "--source-model MODULE:NAME",
    "reshard.cast(ckpt, ..., ...)": "--dtype 'GLOB=DTYPE'",
    "reshard.open(path)": "reshard inspect PATH",
    "reshard.digest(path, write=True)": "reshard digest PATH --json > FILE",
    "reshard.rename(ckpt, [(..., ...)])": "--rename REGEX=REPLACEMENT",
    "reshard.select(ckpt, drop=[...])": "--drop GLOB",
    "reshard.to_linen(ckpt, ...)": "--to linen",
    "reshard.to_linen(path, model)": "reshard convert SRC DST --to linen --model MODULE:NAME",
    "reshard.to_nnx(ckpt, ...)": "--to nnx",
    "reshard.to_nnx(path, model)": "reshard convert SRC DST --to nnx --model MODULE:NAME",
}
# Calls and arguments -> what is typed before each of their values.
_BEFORE = {
    "axes": "--axis",
    "cast": "--dtype",
    "commit": "reshard commit",
    "open": "reshard verify",  # in a call of `verify`
    "rename": "--rename",
    "specs": "--spec",
    "to_mesh": "--to",
    "verify": "reshard verify",
}
_SAME = ("check", "chunks", "codec", "drop", "file_size", "format", "init", "item", "layout")
_SAME += ("max_memory", "ocdbt", "overwrite", "resume", "select", "stack", "step", "unstack")
_SAME += ("values", "vocab", "workers")
_BEFORE |= {name: f"--{name.replace('_', '-')}" for name in _SAME}
# Python's text, and brackets with up to three levels of others inside.
_TEXT = r"""(?:"(?:[^"\\\n]|\\.)*"|(?<!\w)'(?:[^'\\\n]|\\.)*')"""
_BRACKETS = r"(?!)"
for _ in range(4):
    _BRACKETS = rf"""[\[({{](?:{_TEXT}|{_BRACKETS}|[^][(){{}}"'])*[])}}]"""
# What may be an argument or a call. Quoted names and values match too, so that no argument is found
# inside them.
_CODE = re.compile(
    rf"`[^`]*`| with (?=layout=)|{_TEXT}"
    rf"|(?P<code>(?<![\w./,-])\w+=(?:r?{_TEXT}|{_BRACKETS}|True\b|\d+\b|\.\.\.)"
    rf"|(?:reshard\.\w+|(?=\([\"'])){_BRACKETS})"
)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on stdout."""
    click.echo("\n".join(aligned([columns, *rows], right)))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows as lines. Each column is as wide as its cells; those of `right` are right-aligned."""
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*rows, strict=True)]
    aligns = [">" if number in right else "<" for number in range(len(widths))]
    line = "  ".join(f"{{:{a}{w}}}" for a, w in zip(aligns, widths, strict=True))
    return [line.format(*row).rstrip() for row in rows]


def as_flags(text: str) -> str:
    """A hint of the library as it is typed on the command line: its arguments and calls as
    options."""
    return _CODE.sub(lambda m: _TYPED.get(m[0]) or _typed(m["code"] or "") or m[0], text)


def note_as_flags(note: str) -> str:
    """A note, with only its calls as options: the path of a leaf may look like an argument."""
    return _CODE.sub(lambda m: as_flags(m[0]) if m[0].startswith("reshard.") else m[0], note)


def _typed(code: str) -> str:
    """An argument, a call or a rule as it is typed; empty for other code."""
    try:
        match ast.parse(code).body:
            case [ast.Assign([ast.Name(name)], value)]:
                return _option(name, value)
            case [ast.Expr(ast.Call() as call)]:
                return _call(call)
            case [ast.Expr(ast.Tuple() as rule)]:  # in a file
                name, axis = ast.literal_eval(rule)
                return json.dumps([name, [] if axis is None else axis], ensure_ascii=False)
    except (SyntaxError, ValueError, KeyError, IndexError):
        pass
    return ""


def _option(name: str, value: ast.expr) -> str:
    option = _BEFORE[name]
    if isinstance(value, ast.Constant) and (value.value is True or value.value is ...):
        return option
    return " ".join(f"{option} {shlex.quote(word)}" for word in _words(value))


def _words(value: ast.expr) -> list[str]:
    """The values of an option: the elements of a list, and pairs as `A=B`."""
    match value:
        case ast.List(elements):
            return [word for element in elements for word in _words(element)]
        case ast.Tuple([one, other]) | ast.Dict([ast.expr() as one], [other]):
            return ["=".join((*_words(one), *_words(other)))]
        case ast.Call(ast.Name("P")):
            return ["AXIS,"]
    return [str(ast.literal_eval(value))]


def _call(call: ast.Call) -> str:
    """A call, after the calls that it is applied to."""
    assert isinstance(call.func, ast.Attribute)
    name, more = call.func.attr, {each.arg or "": each.value for each in call.keywords}
    inner = [_call(given) for given in call.args if isinstance(given, ast.Call)]
    given = [arg for arg in call.args if isinstance(arg, ast.Constant | ast.List)]
    words = [word for arg in given for word in _words(arg)]
    if name == "cast" and isinstance(call.args[1], ast.Dict):  # beside the options that were given
        casts = ast.literal_eval(call.args[1])
        words = [f"{glob}={dtype}" for glob, dtype in casts.items() if glob != "**"]
    elif name == "cast":
        words = ["{1}={0}".format(*words)]
    elif name in ("stack", "unstack"):
        axis = f"@{ast.unparse(more.pop('axis'))}" if "axis" in more else ""
        text = f"{words[0]}={ast.literal_eval(more.pop('into'))}{axis}"
        match more.pop("indices", None):
            case ast.Call(_, [ast.Constant(count)]):
                text = text.replace("{}", f"{{:{count}}}")
            case ast.List(numbers):
                text = text.replace("{}", "{" + ",".join(map(ast.unparse, numbers)) + "}")
        words = [text]
    typed = [f"{_BEFORE[name]} {shlex.quote(word)}" for word in words]
    return " ".join((*inner, *typed, *(_option(*each) for each in more.items())))
