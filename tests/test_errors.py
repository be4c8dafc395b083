"""The hierarchy of errors, and how they are written out."""

import ast
import importlib
import inspect
import itertools
import json
import math
import pathlib
import pickle
import re
import shlex
from collections.abc import Callable
from typing import Any

import click
import layouts
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import reshard
from reshard import cli, errors
from reshard.arrays.dtypes import parse_dtype
from reshard.cli import output
from reshard.tree import as_python
from reshard.units import parse_bytes
from reshard.writer.planning import parse_chunks

ROOT = pathlib.Path(reshard.__file__).parent

# Each error: its parent in the hierarchy, and the builtin that callers catch already.
HIERARCHY = {
    "ArgumentError": ("ReshardError", ValueError),
    "CheckpointNotFoundError": ("ReshardError", FileNotFoundError),
    "CheckpointFormatError": ("ReshardError", ValueError),
    "UncommittedCheckpointError": ("CheckpointFormatError", ValueError),
    "CorruptCheckpointError": ("ReshardError", ValueError),
    "ChangedCheckpointError": ("ReshardError", RuntimeError),
    "TreeMismatchError": ("ReshardError", ValueError),
    "ShardingError": ("ReshardError", ValueError),
    "MemoryLimitError": ("ReshardError", ValueError),
    "StoreError": ("ReshardError", OSError),
    "DestinationError": ("ReshardError", OSError),
    "DestinationExistsError": ("DestinationError", FileExistsError),
    "KeptFilesError": ("DestinationError", OSError),
}

PAIR = "a rename must be a pair: a regex and a replacement\n  "
RENAME = 'reshard.rename(ckpt, [("^params/lm_head/", "params/head/")])'


def test_the_hierarchy_is_all_there_is():
    defined = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__
    }
    assert set(defined) == {"ReshardError", *HIERARCHY}
    assert errors.ReshardError.__bases__ == (Exception,)
    for name, (parent, builtin) in HIERARCHY.items():
        assert defined[name].__bases__[0] is defined[parent]
        assert issubclass(defined[name], builtin)

    exported = {name: getattr(reshard, name) for name in dir(reshard) if name.endswith("Error")}
    assert exported == defined


@pytest.mark.parametrize("name", ["ReshardError", *HIERARCHY])
def test_every_error_says_all_of_it_and_survives_pickling(name):
    """Pickled, it comes from a worker."""
    summary = "2 leaves are missing from `run/1000`"
    problems = ("params/head/kernel   float32[4,8]", "params/head/bias     float32[8]")
    least = {"least": 7} if name == "MemoryLimitError" else {}
    error = getattr(errors, name)(summary, [*problems], hints=[RENAME, "try c"], **least)
    text = f"{summary}\n  {problems[0]}\n  {problems[1]}\n\nhint: "
    assert str(error) == f"{text}{RENAME}\nhint: try c"
    typed = "--rename '^params/lm_head/=params/head/'"
    assert error.render(None, output.as_flags) == f"{text}{typed}\nhint: try c"
    own = {"outcomes": ()} if name == "TreeMismatchError" else least
    said = {"summary": summary, "problems": problems, "hints": (RENAME, "try c")}
    assert vars(error) == said | own
    error.add_note("resume=True continues it")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), vars(found), str(found)) == (type(error), vars(error), str(error))
    assert found.__notes__ == ["resume=True continues it"]


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    *((lambda _, n=n: parse_bytes(n), "") for n in (None, b"", [], True, 0, -1, "0", "9" * 400)),
    *((lambda _, n=n: parse_bytes(n), "") for n in ("much", math.inf, math.nan, 1j, 0.5)),
    *((lambda _, n=n: parse_chunks(n), "") for n in ("much", 0, None, math.inf)),
    (lambda _: parse_dtype("float33"), "not a dtype: 'float33'"),
    (lambda _: reshard.save([], "out"), ""),
    (lambda _: reshard.restore("a", {}, cast="yes"), "cast='yes' is unknown"),
    (lambda _: reshard.restore("a", {}, unexpected="skip"), "unexpected='skip' is unknown"),
    (lambda ckpt: reshard.save(ckpt, None), "no destination was given"),
    (lambda ckpt: reshard.plan(ckpt, max_memory=0), "`0` is not a number of bytes"),
    (lambda ckpt: reshard.plan(ckpt, file_size=math.inf), "`inf` is not a file size"),
    (lambda ckpt: reshard.cast(ckpt, None), "not a dtype: None"),
    (lambda ckpt: reshard.cast(ckpt, "float16", None), "a glob must be text\n  where: None"),
    (lambda ckpt: reshard.select(ckpt, 3), "a glob must be text\n  patterns: 3"),
    (lambda ckpt: reshard.select(ckpt, drop=["w", 3]), "a glob must be text\n  drop: 3"),
    (lambda ckpt: reshard.rename(ckpt, "x"), f"{PAIR}'x'"),
    (lambda ckpt: reshard.rename(ckpt, 3), f"{PAIR}3"),
    (lambda ckpt: reshard.rename(ckpt, {3: "x"}), "rename `3=x` is invalid: first argument must"),
]


def test_wrong_arguments(tmp_path):
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", {"w": np.ones(4, "f4")}))
    for call, text in WRONG:
        assert layouts.refused(reshard.ArgumentError, call, ckpt).startswith(text)
    assert [parse_bytes(1), parse_bytes(" 1B "), parse_chunks("1")] == [1, 1, 1]


# Functions of a checkpoint, with their other arguments.
OF_CHECKPOINTS = {
    "cast": ("bfloat16",),
    "export": ("out",),
    "plan": (),
    "remap": ("map.toml",),
    "rename": ([("a", "b")],),
    "save": ("out",),
    "select": (),
    "stack": ("a_{}", "a"),
    "to_mesh": ("1x8",),
    "unstack": ("a", "a_{}"),
}


def test_a_path_in_place_of_a_checkpoint():
    for name, path in itertools.product(OF_CHECKPOINTS, ("run/1", pathlib.Path("run/1"))):
        call = getattr(reshard, name)
        text = layouts.refused(reshard.ArgumentError, call, path, *OF_CHECKPOINTS[name])
        assert text.endswith(f'\n  {path!r}\n\nhint: reshard.open("run/1")')


# Hints


HINTS = [
    ('max_memory="600KiB" is the least', "--max-memory 600KiB is the least"),
    ("overwrite=True replaces it", "--overwrite replaces it"),
    ("step=5", "--step 5"),
    ("leave out step=...", "leave out --step"),
    ("reduce workers=... or max_memory=...", "reduce --workers or --max-memory"),
    ('item="it\'s"', """--item 'it'"'"'s'"""),
    ('codec="zstd:9", with a level up to 22', "--codec zstd:9, with a level up to 22"),
    (
        'axes={"data": "x"} renames, axes={"data": ""} replicates',
        "--axis data=x renames, --axis data= replicates",
    ),
    (r'specs=[(r"^a\.b$", "data,")] fits', r"--spec '^a\.b$=data,' fits"),
    (r'specs=[(r"^a\.b$", P(...))] says how', r"--spec '^a\.b$=AXIS,' says how"),
    ('drop=["a/**"] with init=["b"] starts', "--drop 'a/**' with --init b starts"),
    ("map_file=... with model=..., a map", "--map FILE with --model MODULE:NAME, a map"),
    ("outputs differ; check=True compares", "outputs differ; --check compares"),
    ("check=... may have others", "--inputs MODULE:NAME may have others"),
    ("share=(..., ...) writes one of the 7", "--shard I/N writes one of the 7"),
    (
        'rules=[("embed", "data"), ...] or rules=[]',
        '--rules FILE with `rules = [["embed", "data"], ...]` or `rules = []` in it',
    ),
    ('rule ("a", "b") splits, ("a", None) not', 'rule ["a", "b"] splits, ["a", []] not'),
    ('reshard.cast(ckpt, "float32", "a/**")', "--dtype 'a/**=float32'"),
    ("reshard.cast(ckpt, ..., ...) casts", "--dtype 'GLOB=DTYPE' casts"),
    ('reshard.select(ckpt, drop=["it\'s", "b"])', """--drop 'it'"'"'s' --drop b"""),
    (RENAME + " removes it", "--rename '^params/lm_head/=params/head/' removes it"),
    ("""reshard.rename(ckpt, [('/+"$', '"')])""", """--rename '/+"$="'"""),
    ('reshard.to_mesh(ckpt, "data=1,model=8") fits', "--to data=1,model=8 fits"),
    ('reshard.verify("run/1")', "reshard verify run/1"),
    ('reshard.verify(reshard.open("run/1", item="state"))', "reshard verify run/1 --item state"),
    ('reshard.commit("run/1") completes it', "reshard commit run/1 completes it"),
    (
        'reshard.rename(reshard.select(ckpt, "a/**"), [("^a/", "")]) with layout="nnx-state"',
        "--select 'a/**' --rename '^a/=' --layout nnx-state",
    ),
    ("reshard.to_nnx(ckpt, ...) converts it", "--to nnx converts it"),
    ('reshard.unstack(ckpt, "a/it\'s", into="a/b_{}")', "--unstack 'a/it'\"'\"'s=a/b_{}'"),
    (
        'reshard.stack(ckpt, "a/b_{}", into="a/b_{%6}", axis=-1, indices=range(24)) leaves two',
        "--stack 'a/b_{:24}=a/b_{%6}@-1' leaves two",
    ),
    ('reshard.stack(ckpt, "a_{}", into="a", indices=[1, 3])', "--stack 'a_{1,3}=a'"),
    ("reshard.to_linen(path, model)", "reshard convert SRC DST --to linen --model MODULE:NAME"),
]
# What is no argument, or is not on the command line; names and values of the user's.
AS_THEY_ARE = [
    "--as it is, `256MiB`",
    'unexpected="ignore" restores the rest',
    "did you mean `data=1,model=8`? --mesh model=1,data=1 fits",
    "the nearest is `overwrite=True`, of 'resume=True' and \"drop=[...]\"",
    'a/overwrite=True, b-step=5, c.item="x" and overwrite=Truest',
    'from = "^resume=True/(.*)", to = \'layout="nnx-state"\'',
    "rm 'it'\"'\"'s overwrite=True' forgets it",
    "the model's own, the user's",
    'drop=["unclosed',
    "reshard.verify(path)",
    'reshard.cast(ckpt, "float32")',
    "reshard.select(ckpt, [1, [2, [3, [4, [5]]]]])",
]


@pytest.mark.parametrize(("hint", "typed"), HINTS + [(text, text) for text in AS_THEY_ARE])
def test_a_hint_is_a_call_and_a_flag(hint, typed):
    assert output.as_flags(hint) == typed
    assert output.as_flags(typed) == typed


@example("\\0", "")
@given(st.text(), st.text())
def test_text_of_a_hint_can_be_typed(text, other):
    assert eval(as_python([(text, other)])) == [(text, other)]
    if (text + other).isprintable():
        typed = output.as_flags(f"init={as_python([text])} axes={as_python({text: other})}")
        assert shlex.split(typed) == ["--init", text, "--axis", f"{text}={other}"]
    names = f"`{text.replace('`', '')}`, {as_python(text)}: "
    assert output.as_flags(f"{names}resume=True") == f"{names}--resume"


def test_flags_of_hints_are_options():
    known = {
        option
        for name in cli._COMMANDS
        for parameter in importlib.import_module(f"reshard.cli.{name}").command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    flags = [*output._TYPED.values(), *output._BEFORE.values()]
    assert {flag for text in flags for flag in re.findall("--[a-z-]+", text)} <= known
    functions = re.findall(r"reshard\.(\w+)\(", "".join(output._TYPED))
    assert all(hasattr(reshard, name) for name in functions)


def test_no_hint_on_the_command_line_is_a_call_of_the_library():
    refusals = json.loads((pathlib.Path(__file__).parent / "data/frozen/refusals.json").read_text())
    told = (t for t in refusals.values() if isinstance(t, dict))
    printed = [line for each in told for line in each.get("err", ()) if "hint: " in line]
    assert len(printed) > 50
    calls = [t for t in printed if re.search(r'\w+=[\[("]|reshard\.\w+\(', t)]
    assert {re.sub(r"\(.*", "", call) for call in calls} <= {"hint: reshard.stack"}  # no command is


FLAG = r"(?<![\w-])--[a-z]"


def test_no_message_of_the_library_says_a_flag():
    found = []
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        if file.parent.name == "cli" or not re.search(FLAG, text):
            continue
        tree = ast.parse(text)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            (str(file.relative_to(ROOT)), node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docstrings and re.search(FLAG, node.value)
        ]
    # The shell command that began a job is shown as it continues the job.
    continued = (str(pathlib.Path("writer", "commit.py")), " --resume")
    assert {*found} == {continued, (continued[0], "--shard")}


LINES = st.lists(st.text("ab", min_size=1), max_size=15)


@given(LINES, st.lists(st.text("ab", min_size=1), max_size=15, unique=True), st.integers(1, 15))
def test_all_is_said_and_of_long_lists_as_much_as_is_asked(problems, hints, limit):
    def lines(limit):
        told = ["2 leaves"]
        for before, found in (("  ", problems), ("hint: ", hints)):
            told += [""] * (found is hints != [])
            told += [f"{before}{each}" for each in found[:limit]]
            told += [f"  ... and {len(found) - limit} more"] * (len(found) > limit)
        return told

    error = errors.TreeMismatchError("2 leaves", problems, [*hints, *hints])  # each once, in order
    assert str(error).split("\n") == lines(100)
    assert error.render(limit=limit).split("\n") == lines(limit)
    assert (error.problems, error.hints) == (tuple(problems), tuple(hints))
