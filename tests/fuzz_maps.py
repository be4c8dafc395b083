"""Map files and files of rules that are malformed, or that ask for what cannot be.

`test_hostile.py` draws the files, and fails where `reshard` does anything else than succeed or
raise a `ReshardError`.
"""

import contextlib
import functools
import json
import pathlib
import shutil
import tomllib
from collections.abc import Callable
from typing import Any

import fuzz
import layouts
import numpy as np
from fuzz_jobs import linen_training, mesh, nnx_training, outcome, saved
from hypothesis import strategies as st

import reshard
from reshard.cli.model_argument import read_rules
from reshard.convert.conversion import conversion

# Every operation, on `the checkpoint `tree``.
MAP = r"""
to = 'nnx'

[vars]
rows = 4
wide = 'rows * 2'

[[rule]]
from = '^params/layer_(\d+)/kernel$'
transpose = [1, 0]
stack = { axis = 0, by = 1, names = ['model'] }
to = 'layers/kernel'

[[rule]]
from = '^params/layer_(?P<n>\d+)/bias$'
concat = { axis = -1, by = 'x\g<n>', order = ['x0', 'x1'], sizes = [6, 6] }
to = 'layers/bias'

[[rule]]
from = ['^params/gate$', '^params/up$']
concat = { axis = 1 }
to = 'gate_up'

[[rule]]
from = '^params/qkv$'
split = { axis = 1, sizes = [4, 2, 2], into = ['q', 'k', 'v'] }

[[rule]]
from = '^params/experts$'
unstack = { axis = 0, into = 'experts/{outer}/{inner}/w' }
nest = { sizes = [1, 2], flat = '{}' }

[[rule]]
from = '^params/table$'
reshape = { from = [4, 6], to = [8, -1] }
pad = { widths = [[0, 0], [1, 3]], fill = 0.5 }
to = 'table'

[[rule]]
from = '^params/wide$'
reshape = [8, -1]
crop = { widths = [[0, 2], [1, 0]] }
to = 'wide'

[[rule]]
from = '^params/block_(\d)/'
to = 'stages/{\1 // 2}/{\1 % 2}/'

[[rule]]
from = '^params/old$'
drop = true

[[rule]]
from = '^params/query$'
scale = { by = 'rows ** -0.5', rounds = true }
interleave = { axis = 1, parts = 2, block = 4 }
rope = { axis = 0, head_size = 'rows', to = 'pairs' }
pad = { axis = 1, from = 8, to = 'wide + 1', value = -1 }
to = ['query', 'again/query']

[[rule]]
from = ['^params/one$', '^params/other$']
add = 0.5
deinterleave = { axis = 0, parts = 3 }
equal = true
to = 'one'

[[rule]]
when = 'rows - 4'
to = 'never'
fill = { value = 1, shape = [3], dtype = 'float32' }

[[rule]]
to = 'filled/{}'
fill = { value = 1, shape = [3, 'rows'], dtype = 'bfloat16', count = 2 }

[[rule]]
from = ['^params/twos$']
fill = { value = 2, shape = [3], dtype = 'float64' }
"""
RULES = r"""
rules = [["embed", "data"], ["mlp", ["data", "model"]], ["kv", []]]
specs = [["first/kernel", [[], "model"]], ["second/kernel", "data,model"], ["bias", []]]
"""
NASTY = [
    *(value for value in fuzz.NASTY if value is not None),
    # Patterns, and what is put in their place.
    *("(", "(" * 5000, "(?P<n>.)(?P<n>.)", "^(.*)$", "^params/(.*)$", "^params/(qkv|table)$", "["),
    *("x{9999999999}", "\\1", "\\9", "\\g<n>", "\\g<99999999999999999999>", "\\"),
    *("{", "{}", "{{}}", "{i}", "{1 // 0}", "{\\1 // 0}", "{\\1 - 99}", "{\\1 ** 9}"),
    *("{\\1 * " + "9" * 4000 + "}", "{" + "9" * 5000 + "}", "{" + "-" * 5000 + "1}"),
    *("{" + "(" * 5000 + "1" + ")" * 5000 + "}", "{" + "1 + " * 5000 + "1}"),
    *("{_}", "{\\g<²>}", "{x\0}", "{lambda: 1}", "{__import__('os')}"),
    *("layers", "layers/kernel/x", "q", "a//b", '"a', '"a/b"', "**", "params/" * 5000),
    # Arguments of operations.
    *([1, 0], [0, 0], [0, 1, 2], [-1, -1], [2**62, 4]),
    *([[0, 0], [0, 2**62]], [[0, 0], [0, 2**70]], [[0, 2**20], [0, 2**30]]),
    {"from": [6, 8], "to": [2**40, -1]},
    *({"axis": 0}, {"axis": 2**70, "into": "a{}"}, {"axis": -9, "by": 1}),
    {"axis": 0, "into": "same"},
    {"axis": 0, "sizes": [0, 6], "into": ["a", "b"]},
    {"axis": 0, "sizes": [2**62, 2**62], "into": ["a", "b"]},
    {"widths": [[0, 0], [9, 9]]},
    {"widths": [[0, 0], [0, 0]], "fill": float("nan")},
    {"widths": [[0, 0], [0, 1]], "fill": 10**400},
    *(
        "rows",
        "9 ** 9 ** 9",
        "1 / 0",
        "-" * 5000 + "1",
        "(" * 5000,
        "1e999",
        "rows.real",
        "0*rows",
    ),
    *({"axis": 0, "parts": 0}, {"axis": 2**70, "parts": 2}, {"axis": 0, "parts": 2, "block": -4}),
    *({"by": 0}, {"by": 1e-320}, {"by": float("inf")}, {"value": 10**400, "shape": [2**40]}),
    {"axis": 0, "to": 2**62, "value": float("nan")},
    {"value": 1, "shape": [2**62, 2**62], "dtype": "int4", "count": 2**62},
    *({"sizes": [0], "flat": 1}, {"sizes": [2**70], "outer": 1, "inner": "\\1"}),
]


@functools.cache
def make_bases(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Small checkpoints to convert, by what they are."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("gate", "up", "table", "wide"), (4, 6))
    shapes |= {"qkv": (6, 8), "experts": (3, 4, 5), "old": (), "query": (8, 8), "one": (6,)}
    tree = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    tree |= {"other": tree["one"], "twos": np.full(3, 2.0)}
    for i in range(2):
        tree[f"layer_{i}"] = {"kernel": rng.normal(size=(3, 6)), "bias": rng.normal(size=6)}
    for i in range(3):
        tree[f"block_{i}"] = {"w": rng.normal(size=(2, 2))}
    layouts.save_pytree(folder / "tree", {"params": tree})
    return {
        "tree": folder / "tree",
        "linen": fuzz.make_base(folder, "linen"),
        "nnx": fuzz.make_base(folder, "nnx"),
    }


@functools.cache
def genuine(folder: pathlib.Path, job: str) -> str:
    """A file that is in order, for a job."""
    if job in ("tree", "rules"):
        return MAP if job == "tree" else RULES
    return conversion(make_bases(folder)["linen"], "nnx", nnx_training).map_text()


def toml(value: Any) -> str:
    """A value as TOML, as far as it can be: TOML has no surrogates and no null."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def document(top: Any) -> bytes:
    """A whole document."""
    if not isinstance(top, dict):
        return toml(top).encode()
    return "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in top.items()).encode()


def cases() -> st.SearchStrategy[tuple[str, str, tuple[int, ...]]]:
    """A job, and how its file is damaged."""
    numbers = st.lists(st.integers(0, 1 << 16), min_size=8, max_size=8).map(tuple)
    return st.tuples(st.sampled_from(list(JOBS)), st.sampled_from(["changed", "bytes"]), numbers)


def content(folder: pathlib.Path, case: tuple[str, str, Any]) -> bytes:
    """The file of a case."""
    job, kind, what = case
    text = genuine(folder, job)
    if kind == "changed":
        return document(fuzz.changed(tomllib.loads(text), what, NASTY))
    data = text.encode()
    at = what[0] % len(data)
    more = [b"", b"\xff", b"\0", b"]", b"[" * 5000, b"'", b"\n", bytes([what[2] % 256])]
    return data[:at] + more[what[1] % len(more)] + data[at + what[3] % 30 :]


def check(folder: pathlib.Path, case: tuple[str, str, Any]) -> str:
    """What `reshard` says about the file of one of `cases()`: "done", or the error. Raises
    AssertionError for all else, or what was raised."""
    file, out = folder / "file.toml", folder / "out"
    # What TOML cannot say.
    with contextlib.suppress(UnicodeEncodeError):
        file.write_bytes(content(folder, case))
    try:
        return outcome(case[0], lambda: JOBS[case[0]](make_bases(folder), file, out))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _convert(
    source: pathlib.Path, to: str, model: Any, file: pathlib.Path, out: pathlib.Path, **options: Any
) -> None:
    """Converts and saves; and again by the map that was found, which must do the same."""
    made = conversion(source, to, model, map_file=file, **options)
    repr(made)
    ckpt = made.checkpoint
    repr(reshard.plan(ckpt, out))
    saved(ckpt, out, max_memory="64MiB")
    file.write_text(made.map_text(), encoding="utf-8")
    again = conversion(source, to, model, map_file=file, **options).checkpoint
    assert reshard.diff(out, again, values=True).equal, made.map_text()


def _lay_out(bases: dict[str, pathlib.Path], file: pathlib.Path, out: pathlib.Path) -> None:
    rules, specs = read_rules(str(file))
    reshard.to_mesh(reshard.open(bases["nnx"]), "data=2,model=2", specs)
    reshard.target(nnx_training, mesh=mesh(), rules=rules, specs=specs)


JOBS: dict[str, Callable[[dict[str, pathlib.Path], pathlib.Path, pathlib.Path], None]] = {
    "tree": lambda bases, file, out: _convert(bases["tree"], "nnx", None, file, out),
    "to_nnx": lambda bases, file, out: _convert(bases["linen"], "nnx", nnx_training, file, out),
    "by map alone": lambda bases, file, out: _convert(bases["linen"], "nnx", None, file, out),
    "back": lambda bases, file, out: _convert(
        bases["nnx"], "linen", None, file, out, drop="optimizer/**"
    ),
    "to_linen": lambda bases, file, out: _convert(bases["nnx"], "linen", linen_training, file, out),
    "rules": _lay_out,
}
