"""Mutants of the package, and which of them the default tests kill. Not run by default:

    python tests/mutants.py --count 50 --seed 0 --calls /tmp/calls

Each mutant is one change in one place: a comparison flipped, a constant off by one, a condition
negated, a statement dropped, two arguments swapped. The seed draws them, as many from each room of
the package (a folder, or a file at its top) as from any other. One is made in a copy of the tree,
where those tests run that call the function it changes, and is killed where one of them fails; a
survivor is shown as a diff. Which tests call what is noted first, in one run of the default tests
(`--calls` keeps the notes and takes them the next time; `-- WORDS` are for pytest in that run).
"""

import argparse
import ast
import collections
import copy
import dataclasses
import difflib
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PAIRS = "Lt LtE  Gt GtE  Eq NotEq  Is IsNot  In NotIn"
OPPOSITES = [[getattr(ast, name) for name in pair.split()] for pair in PAIRS.split("  ")]
FLIPPED = dict(OPPOSITES) | {other: one for one, other in OPPOSITES}
AS_IT_IS = ("decorator_list", "annotation", "returns", "type_params", "bases")
# In the copy whose calls are noted, each function says that it was called, and a plugin of pytest
# writes down what each test that passes has called, and how long it took. A process that a test
# starts writes each function down at once, since it may be killed.
NOTE = "getattr(__import__('builtins'), 'called_functions', set()).add({!r})"
SITE = """
import builtins, json, os

class Called(set):
    own = None

    def add(self, name):
        if name not in self and os.getpid() != self.own:
            if test := os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]:
                note(test, 0, [name])
        super().add(name)

def note(*words):
    if "CALLS" in os.environ:
        with open(f"{os.environ['CALLS']}.{os.getpid()}", "a") as file:
            print(json.dumps(words), file=file)

called = builtins.called_functions = Called()
"""
PLUGIN = """
import os, time, pytest
from sitecustomize import called, note

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    called.own = os.getpid()
    called.clear()
    begin, failed = time.perf_counter(), item.session.testsfailed
    yield
    if item.session.testsfailed == failed:
        note(item.nodeid, time.perf_counter() - begin, sorted(called))
"""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: in which file and function, what stands there, and what is put in its place."""

    file: str
    function: str
    node: ast.AST
    changed: str

    def apply(self, source: str) -> str:
        """The file with the change."""
        lines, node = source.encode().splitlines(keepends=True), self.node
        first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
        changed = first[: node.col_offset] + self.changed.encode() + last[node.end_col_offset :]
        return b"".join([*lines[: node.lineno - 1], changed, *lines[node.end_lineno :]]).decode()

    def diff(self, source: str) -> str:
        """What it changes."""
        before, after = source.splitlines(), self.apply(source).splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.file, n=2, lineterm=""))


def nodes(tree: ast.AST, name: str, is_open: bool = True) -> Iterator[tuple[str, ast.AST]]:
    """Every node that runs, with its function, `name` itself at the top. A function inside of
    another is that one, and f-strings have no places in all versions of Python."""
    for field, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.Import | ast.ImportFrom | ast.JoinedStr
            if field in AS_IT_IS or isinstance(child, skipped) or not isinstance(child, ast.AST):
                continue
            named = is_open and isinstance(child, ast.FunctionDef | ast.ClassDef)
            inside = f"{name}::{child.name}" if named else name
            yield inside, child
            yield from nodes(child, inside, is_open and not isinstance(child, ast.FunctionDef))


def mutants(file: str) -> Iterator[tuple[str, Mutant]]:
    """Each mutant of a file, with its kind."""
    for function, node in nodes(ast.parse((ROOT / file).read_text()), file):
        kind, changed = "", copy.deepcopy(node)
        match node:
            case ast.Compare():
                kind, changed.ops[0] = "comparison", FLIPPED[type(node.ops[0])]()
                changed = f"({ast.unparse(changed)})"
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                kind, changed = "constant", str(value + 1)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if ast.unparse(test) != "TYPE_CHECKING":
                    kind, node, changed = "condition", test, f"(not ({ast.unparse(test)}))"
            case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Expr(value=ast.Call()):
                kind, changed = "statement", "pass"
            case ast.Call(func=func, args=[one, other, *_]) if ast.unparse(func) != "isinstance":
                if ast.dump(one) != ast.dump(other) and ast.Starred not in map(type, node.args):
                    changed.args[:2] = other, one
                    kind, changed = "arguments", ast.unparse(changed)
        if kind:
            yield kind, Mutant(file, function, node, changed)


def drawn(count: int, seed: int) -> Iterator[Mutant]:
    """Mutants of one room after the other, of any kind that it has."""
    rng = random.Random(seed)
    rooms = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in sorted((ROOT / "reshard").rglob("*.py")):
        for kind, mutant in mutants(str(path.relative_to(ROOT))):
            rooms[path.relative_to(ROOT).parts[1]][kind].append(mutant)
    order = rng.sample(sorted(rooms), len(rooms))
    for number in range(count):
        kinds = rooms[order[number % len(order)]]
        yield rng.choice(kinds[rng.choice(sorted(kinds))])


def copied(folder: str) -> pathlib.Path:
    """A copy of the tree, beside an environment in which it is the package that is installed."""
    hidden = [path.name for path in ROOT.glob(".*")]  # and no files of the checkpoints in `data`
    ignored = shutil.ignore_patterns(*hidden, "__pycache__")
    tree = shutil.copytree(ROOT, pathlib.Path(folder, "tree"), ignore=ignored)
    venv.create(tree.parent / "venv", symlinks=True)
    paths = [str(tree), *(path for path in sys.path if path.endswith("site-packages"))]
    (site(tree) / "tree.pth").write_text("\n".join(paths))
    scripts = sysconfig.get_path("scripts")
    for name in ("pytest", "reshard"):
        script = shutil.copy(f"{scripts}/{name}", tree.parent / "venv/bin" / name)
        script.write_text(script.read_text().replace(scripts, str(script.parent), 1))
    return tree


def site(tree: pathlib.Path) -> pathlib.Path:
    """Where that environment has its packages."""
    return pathlib.Path(sysconfig.get_path("purelib", "venv", {"base": tree.parent / "venv"}))


def run(tree: pathlib.Path, *words: str, **variables: str) -> int:
    """The exit status of pytest in a copy of the tree."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [tree.parent / "venv/bin/pytest", "-p", "no:cacheprovider", *words]
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            return process.wait(1800)
        except subprocess.TimeoutExpired:
            process.kill()
            return 1


def note_calls(file: pathlib.Path, words: list[str]) -> None:
    """Runs the tests, and writes down what each of them calls."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(folder)
        for path in (tree / "reshard").rglob("*.py"):
            parsed = ast.parse(path.read_text())
            name = str(path.relative_to(tree))
            for function, node in [(name, parsed), *nodes(parsed, name)]:
                if isinstance(node, ast.FunctionDef | ast.Module):
                    at = ast.get_docstring(node) is not None
                    node.body[at:at] = ast.parse(NOTE.format(function)).body
            path.write_text(ast.unparse(parsed))
        (site(tree) / "sitecustomize.py").write_text(SITE)
        (site(tree) / "notes_of_calls.py").write_text(PLUGIN)
        run(tree, "-p", "notes_of_calls", *words, CALLS=f"{folder}/calls")
        took, calls = collections.Counter(), collections.defaultdict(set)
        lines = itertools.chain(*map(open, pathlib.Path(folder).glob("calls.*")))
        own_first = sorted(map(json.loads, lines), key=lambda note: not note[1])  # as they ran
        for test, seconds, called in own_first:
            took[test] += seconds
            calls[test] |= {*called}
        notes = [[test, took[test], sorted(calls[test])] for test in calls if took[test]]
        file.write_text("".join(json.dumps(note) + "\n" for note in notes))


def survives(tree: pathlib.Path, mutant: Mutant, notes: list) -> bool:
    """Whether no test fails; files that take little time go first. What no test calls runs when its
    file is imported."""
    wanted, files = [], collections.Counter()
    for at in (mutant.function, mutant.file):
        for name, seconds, called in notes if not wanted else ():
            if any(f"{function}::".startswith(f"{at}::") for function in called):
                wanted.append(name)
                files[name.partition("::")[0]] += seconds
    wanted.sort(key=lambda name: files[name.partition("::")[0]])
    (tree.parent / "names").write_text("\n".join(wanted))
    file, begin = tree / mutant.file, time.perf_counter()
    genuine = file.read_text()
    file.write_text(mutant.apply(genuine))
    killed = wanted and run(tree, "-x", "-n", "0", f"@{tree.parent}/names")
    file.write_text(genuine)
    seconds = time.perf_counter() - begin
    print(f"{'killed' if killed else 'SURVIVED'}, {len(wanted)} tests, {seconds:.0f} s")
    print(mutant.diff(genuine), flush=True)
    return not killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=pathlib.Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = options.calls or pathlib.Path(folder) / "calls"
        if not calls.exists():
            note_calls(calls, options.words)
        notes, tree = [*map(json.loads, calls.open())], copied(folder)
        survived = sum([survives(tree, m, notes) for m in drawn(options.count, options.seed)])
    print(f"{options.count - survived} of {options.count} killed")


if __name__ == "__main__":
    main()
