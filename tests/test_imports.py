"""The package: one direction of imports, short functions, no jax to open a checkpoint."""

import ast
import functools
import graphlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from layouts import save_pytree

import reshard

ROOT = pathlib.Path(reshard.__file__).parent

# A room imports from itself and from those before it, never from one after it; imports inside of
# functions count.
ROOMS = [
    *("errors", "units", "tree", "report", "storage", "sharding", "arrays"),
    *("checkpoint", "transforms", "loader", "engine", "verify", "writer", "restore", "convert"),
    *("cli", "__main__"),
]
FRAMEWORKS = {"jax", "jaxlib", "flax", "orbax", "optax"}


@functools.cache
def modules():
    """Dotted name -> file, of every module of the package."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        parts = ("reshard", *file.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


@functools.cache
def imports(file, everywhere=True):
    """Dotted names of the modules that a file imports; at its top level, or anywhere.

    `from a.b import c` is `a.b.c`: a name in a module counts as that module in `room`.
    """
    names = set()
    for node in ast.walk(tree_of(file)) if everywhere else at_import(tree_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def at_import(node):
    """The nodes that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_import(child)


def dotted(node):
    """`a` or `a.b`; of any other node, nothing."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def room(name):
    """The room of a dotted name in the package; None for the package itself and other names."""
    parts = name.split(".")
    return parts[1] if parts[0] == "reshard" and len(parts) > 1 else None


def test_every_module_is_in_a_room():
    found = {room(name) for name in modules()} - {None}
    assert found == set(ROOMS)


def test_imports_go_one_way():
    upward = [
        f"{name} imports {imported}"
        for name, file in modules().items()
        if name != "reshard"
        for imported in imports(file)
        if imported.split(".")[0] == "reshard"
        and ROOMS.index(room(imported)) > ROOMS.index(room(name))
    ]
    assert upward == []


def test_no_two_modules_import_each_other():
    known = modules()
    graph = {}
    for name, file in known.items():
        needed = set()
        for imported in imports(file) if name != "reshard" else ():
            if room(imported) is not None:
                needed.add(imported if imported in known else imported.rpartition(".")[0])
        graph[name] = needed - {name}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) >= set(known)


def test_the_arithmetic_needs_only_the_standard_library():
    names = "errors tree sharding.mesh sharding.rules sharding.optimizer_state sharding.annotations"
    for name in [*names.split(), "arrays.boxes", "engine.plan"]:
        outside = {
            imported
            for imported in imports(modules()[f"reshard.{name}"])
            if imported.split(".")[0] not in sys.stdlib_module_names | {"reshard"}
        }
        assert outside == set(), name


def test_no_module_imports_a_framework_at_import():
    found = [
        f"{name} imports {imported}"
        for name, file in modules().items()
        for imported in imports(file, everywhere=False)
        if imported.split(".")[0] in FRAMEWORKS
    ]
    assert found == []


def test_the_package_itself_imports_nothing_of_its_own_until_asked():
    assert not any(map(room, imports(ROOT / "__init__.py", everywhere=False)))


@pytest.mark.parametrize("name", ["restore", "verify"])
@pytest.mark.parametrize("first", [False, True])
def test_functions_have_the_names_of_rooms_in_a_new_process(name, first):
    """Whether the function or its room is imported first, and again after both."""
    module = {"restore": "restore.target", "verify": "verify.values"}[name]
    lines = [f"import reshard.{module}", f"print(reshard.{name}.__qualname__)"]
    lines = ["import reshard", *lines[:: -1 if first else 1], *lines]
    lines += [f"from reshard import {name}", f"print({name} is reshard.{name})"]
    assert loaded_after("\n".join(lines))[1] == [name, name, "True"]


def test_only_the_command_line_prints_or_exits():
    found = [
        f"{name}: {ast.unparse(node)}"
        for name, file in modules().items()
        if room(name) not in ("cli", "__main__")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call)
        and dotted(node.func) in ("print", "exit", "quit", "sys.exit", "os._exit")
    ]
    assert found == []


def lines_of(function):
    """The lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


# What exceeds the limit today. These numbers may only shrink.
MANY_IMPORTS = {
    "reshard.cli.inspect": 31,
    "reshard.convert.conversion": 55,
    "reshard.convert.decision": 51,
    "reshard.convert.model_map": 29,
    "reshard.convert.record": 40,
    "reshard.loader.orbax": 30,
    "reshard.restore.device_reads": 27,
    "reshard.restore.restore": 38,
    "reshard.transforms": 31,
    "reshard.verify.comparison": 27,
    "reshard.verify.values": 29,
    "reshard.writer.arrays": 34,
    "reshard.writer.commit": 27,
    "reshard.writer.documents": 27,
    "reshard.writer.format": 29,
    "reshard.writer.plan": 34,
    "reshard.writer.planning": 51,
    "reshard.writer.save": 51,
}


def test_functions_have_at_most_60_lines():
    long = [
        f"{name}.{node.name} has {lines} lines"
        for name, file in modules().items()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := lines_of(node)) > 60
    ]
    assert long == []


def test_modules_import_at_most_25_names_of_the_package():
    counts = {name: sum(map(bool, map(room, imports(file)))) for name, file in modules().items()}
    many = {name: count for name, count in counts.items() if count > 25}
    assert many.keys() == MANY_IMPORTS.keys()
    assert {name: n for name, n in many.items() if n > MANY_IMPORTS[name]} == {}


def loaded_after(code, **environment):
    """Top-level modules that a fresh interpreter has loaded after `code`, and what it printed."""
    script = f"{code}\nimport sys\nprint(*{{n.partition('.')[0] for n in sys.modules}})"
    environment = os.environ | environment
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert result.stderr == ""
    assert result.returncode == 0
    *printed, names = result.stdout.splitlines()
    return set(names.split()), printed


def test_the_import_of_the_package_is_cheap():
    """`test_cli.py` has what opening and planning need."""
    costly = FRAMEWORKS | {"numpy", "tensorstore", "ml_dtypes", "click", "rich"}
    assert loaded_after("import reshard\nreshard.ReshardError")[0] & costly == set()


PLAIN = """
import collections, dataclasses
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import reshard

Adam = collections.namedtuple("Adam", ("count", "mu"))
Empty = collections.namedtuple("Empty", ())

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    left: object

mesh = jax.sharding.Mesh(jax.devices(), ("x",))
array = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P("x")))
target = {
    "params": {"dense": {"kernel": array, "bias": [array]}},
    "opt": (Adam(array, {"bias": array}), Empty()),
    "node": Node(array),
    "step": 0,
}
got = reshard.restore(path, target)
assert jax.tree.structure(got) == jax.tree.structure(target)
print(*(int(np.asarray(x).ravel()[0]) for x in jax.tree.leaves(got)))
assert {x.sharding for x in jax.tree.leaves(got) if x is not got["step"]} == {array.sharding}
reshard.restore(path, got), reshard.restore(path, mesh)
assert reshard.target(target, mesh=mesh, specs=[(".", P("x"))]) == target
try:
    reshard.restore(reshard.to_mesh(reshard.open(path), mesh), {"params": target["params"]})
except reshard.TreeMismatchError as error:
    print(str(error).splitlines()[-1])
"""


def test_restoring_into_a_plain_pytree_leaves_flax_alone(tmp_path):
    """Nor do a real target, a bare mesh, a target made of specs, and a mismatch need it."""
    kernel, bias, count, mu, left = (np.arange(8, dtype="f4") + 8 * i for i in range(5))
    tree = {
        "params": {"dense": {"kernel": kernel, "bias": [bias]}},
        "opt": ({"count": count, "mu": {"bias": mu}}, {}),
        "node": {"left": left},
        "step": 7,
    }
    path = str(save_pytree(tmp_path / "saved", tree))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    loaded, printed = loaded_after(f"path = {path!r}\n{PLAIN}", **flags)
    assert printed == ["32 16 24 8 0 7", 'hint: unexpected="ignore" restores the rest']
    assert loaded & FRAMEWORKS == {"jax", "jaxlib"}


# Files of the user that are no checkpoint: maps and models that a command is given; and this
# package's own.
OWN_FILES = {"reshard.cli.convert", "reshard.cli.model_argument"}
OWN_FILES |= {"reshard.cli.page_file", "reshard.convert.hf_model", "reshard.convert.mapfile"}
OWN_FILES |= {"reshard.convert.user_code"}
FILES = {"fcntl", "glob", "io", "pathlib", "shutil", "stat", "tempfile"}
# Of `os`, what touches no file.
NO_FILES = {"PathLike", "dup", "dup2", "environ", "fdopen", "fspath", "getpid", "kill", "setpgid"}
NO_FILES |= {"cpu_count", "sched_getaffinity", "strerror"}


def test_only_one_module_touches_files():
    found = []
    for name, file in modules().items():
        if name in OWN_FILES | {"reshard.storage.disk"}:
            continue
        found += [f"{name}: {one}" for one in imports(file) if one.partition(".")[0] in FILES]
        found += [f"{name}: {one}" for one in imports(file) if one.startswith("os.")]
        for node in ast.walk(tree_of(file)):
            if dotted(node).startswith("os.") and dotted(node)[3:] not in NO_FILES:
                found.append(f"{name}: {dotted(node)}")
            opens = isinstance(node, ast.Call) and dotted(node.func) == "open"
            if opens and "reshard.loader.open" not in imports(file):
                found.append(f"{name}: {ast.unparse(node)}")
    assert found == []
