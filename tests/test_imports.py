"""The package: one direction of imports, short functions, no jax to open a checkpoint."""

import ast
import functools
import graphlib
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from layouts import save_pytree

import reshard

ROOT = pathlib.Path(reshard.__file__).parent
FIXTURE = pathlib.Path(__file__).parent / "data" / "orbax-0.4.4" / "default"

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
    """The room of a dotted name in the package; None for the package itself."""
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
    names = imports(ROOT / "__init__.py", everywhere=False)
    assert {name for name in names if room(name) is not None} == set()


@pytest.mark.parametrize("name", ["restore", "verify"])
@pytest.mark.parametrize("first", [False, True])
def test_functions_have_the_names_of_rooms_in_a_new_process(name, first):
    """Whether the function or its room is imported first, and again after both."""
    module = {"restore": "restore.target", "verify": "verify.values"}[name]
    lines = [f"import reshard.{module}", f"print(reshard.{name}.__qualname__)"]
    _, printed = loaded_after(
        "\n".join(
            ["import reshard", *lines[:: -1 if first else 1], *lines, f"from reshard import {name}"]
        )
        + f"\nprint({name} is reshard.{name})"
    )
    assert printed == [name, name, "True"]


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


# What exceeds the two limits today. These numbers may only shrink.
LONG_FUNCTIONS = {}
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
    "reshard.verify.verification": 26,
    "reshard.verify.values": 29,
    "reshard.writer.arrays": 34,
    "reshard.writer.commit": 26,
    "reshard.writer.documents": 27,
    "reshard.writer.format": 29,
    "reshard.writer.plan": 31,
    "reshard.writer.planning": 51,
    "reshard.writer.save": 50,
}


def over(found, exceptions):
    """The names whose numbers exceed their exceptions, and exceptions that are no longer needed."""
    grown = {name: number for name, number in found.items() if number > exceptions.get(name, 0)}
    return grown | dict.fromkeys(exceptions.keys() - found.keys(), "not needed")


def test_functions_have_at_most_60_lines():
    long = {
        f"{name}.{node.name}": lines
        for name, file in modules().items()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := lines_of(node)) > 60
    }
    assert over(long, LONG_FUNCTIONS) == {}


def test_modules_import_at_most_25_names_of_the_package():
    many = {
        name: count
        for name, file in modules().items()
        if (count := sum(room(imported) is not None for imported in imports(file))) > 25
    }
    assert over(many, MANY_IMPORTS) == {}


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


def test_opening_a_checkpoint_and_planning_leave_jax_alone():
    """Even for thousands of devices; and the import of the package alone is cheap."""
    loaded, printed = loaded_after(
        "import sys\n"
        "import reshard\n"
        "reshard.ReshardError\n"
        "print(*{n.partition('.')[0] for n in sys.modules})\n"
        f"ckpt = reshard.open({str(FIXTURE)!r})\n"
        "print(len(ckpt) > 0, all(a.shape == a.read().shape for a in ckpt.arrays))\n"
        "laid_out = reshard.to_mesh(ckpt, 'd=4096', [('.', '')])\n"
        "print(len(reshard.plan(laid_out).arrays) == len(ckpt.arrays) > 0)"
    )
    imported, *printed = printed
    costly = FRAMEWORKS | {"numpy", "tensorstore", "ml_dtypes", "click", "rich"}
    assert set(imported.split()) & costly == set()
    assert printed == ["True True", "True"]
    assert "tensorstore" in loaded
    assert loaded & FRAMEWORKS == set()
    assert "obstore" not in loaded, "only a bucket needs it"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint of containers that are not of Flax's: arrays whose values tell them apart."""
    names = ("kernel", "bias", "count", "mu", "left", "step")
    leaves = {x: jnp.arange(8, dtype="float32") + 8 * i for i, x in enumerate(names)}
    tree = {
        "params": {"dense": {"kernel": leaves["kernel"], "bias": [leaves["bias"]]}},
        "opt": ({"count": leaves["count"], "mu": {"bias": leaves["mu"]}}, {}),
        "node": {"left": leaves["left"]},
        "step": 7,
    }
    return save_pytree(tmp_path_factory.mktemp("plain") / "saved", tree)


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
"""


def test_restoring_into_a_plain_pytree_leaves_flax_alone(plain):
    """Nor do a real target, a bare mesh, a target made of specs, and a mismatch need it."""
    loaded, printed = loaded_after(
        f"{PLAIN}\n"
        f"got = reshard.restore({str(plain)!r}, target)\n"
        "print(jax.tree.structure(got) == jax.tree.structure(target))\n"
        "print(*(int(np.asarray(x).ravel()[0]) for x in jax.tree.leaves(got)))\n"
        "print({x.sharding for x in jax.tree.leaves(got) if x is not got['step']}"
        " == {array.sharding})\n"
        f"again = reshard.restore({str(plain)!r}, got)\n"
        f"bare = reshard.restore({str(plain)!r}, mesh)\n"
        "made = reshard.target(target, mesh=mesh, specs=[('.', P('x'))])\n"
        "print(made == target)\n"
        f"ckpt = reshard.to_mesh(reshard.open({str(plain)!r}), mesh)\n"
        "try:\n"
        "    reshard.restore(ckpt, {'params': target['params']})\n"
        "except reshard.TreeMismatchError as error:\n"
        "    print(str(error).splitlines()[-1])\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_PLATFORMS="cpu",
    )
    hint = 'hint: unexpected="ignore" restores the rest'
    assert printed == ["True", "32 16 24 8 0 7", "True", "True", hint]
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
