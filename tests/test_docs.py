"""The commands and the Python of README and topics run, and print what they show. Examples in
docstrings run, too. Each document has its own copy of the demonstrations' files."""

import contextlib
import doctest
import importlib
import inspect
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from typing import Any, NamedTuple

import in_process
import jax
import layouts
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import reshard
from reshard.convert.map_rules import apply_map
from reshard.convert.mapfile import map_of, read_map

pytestmark = pytest.mark.usefixtures("quickly_compiled")
ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOPICS = {file.stem: file for file in sorted((ROOT / "reshard/cli/topics").glob("*.md"))}
DOCUMENTS = {"README": README} | {name: file.read_text() for name, file in TOPICS.items()}
# Where documents have their demonstrations, and the examples that leave them there.
DEMOS = {"/tmp/demo": "quickstart", "/tmp/lm": "linen_to_nnx"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block, the directory named last before it, and the number of its section."""

    language: str
    text: str
    place: str
    section: int


def blocks(name: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(DOCUMENTS[name]):
        before = DOCUMENTS[name][: match.start()]
        places = re.findall(r"examples/\w+\.py (/tmp/\w+)", before)
        place = places[-1] if places else ""
        found.append(Block(match[1], match[2], place, before.count("\n## ")))
    return found


def texts(name: str, language: str) -> list[str]:
    return [block.text for block in blocks(name) if block.language == language]


def with_blocks_of(language: str) -> list[str]:
    return [name for name in DOCUMENTS if texts(name, language)]


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The files of the demonstrations: the documents' directory -> the test's."""
    made = {}
    jax.devices()  # before the examples set a number of devices
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
            patch.setenv(name, os.environ[name])
        patch.syspath_prepend(ROOT / "examples")
        for place, name in DEMOS.items():
            made[place] = tmp_path_factory.mktemp(name)
            importlib.import_module(name).start(made[place])
        for name in (*DEMOS.values(), "mlp", "lm_linen", "lm_nnx"):
            del sys.modules[name]
    return made


@pytest.fixture
def at(demos, tmp_path):
    """A place -> this test's copy of it."""

    def get(place: str) -> pathlib.Path:
        copy = tmp_path / pathlib.Path(place).name
        if not copy.exists():
            shutil.copytree(demos[place], copy)
        return copy

    return get


def shown(command: str, directory: pathlib.Path) -> str:
    """The output of a command line, with stderr. A shell runs lines with a pipe."""
    program, *words = shlex.split(command)
    if program == "reshard" and "|" not in words:
        _, out, err = in_process.command(words)
        return out + err
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    given = {"shell": True, "cwd": directory, "env": os.environ | {"PATH": path}, "text": True}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, **given, **streams).stdout


def without_stored_bytes(output: str) -> str:
    """Orbax distributes chunks to data files in any order, so the hard-linked bytes differ from one
    save to the next."""
    output = re.sub(r"(, and|,| and) shares? [\d.]+ \wi?B( with SRC)?", "", output)
    output = re.sub(r"\d+ data files?|^orbax +[\d.]+", "*", output, flags=re.MULTILINE)
    return re.sub(r"^(read|write|memory)( +)[\d.]+ \wi?B", r"\1\2*", output, flags=re.MULTILINE)


@pytest.mark.every_combination
@pytest.mark.parametrize("name", with_blocks_of("console"))
def test_console_blocks_show_what_the_commands_print(name, at, request):
    if "gs://" in "".join(texts(name, "console")):
        stores = request.getfixturevalue("stores")
        stores.bucket("conditional", "training")
        stores.bucket("s3", "archive")
    for block in blocks(name):
        if block.language != "console":
            continue
        with in_process.inside(at(block.place)) as patch:
            patch.setenv("PYTHONPATH", str(at(block.place)))
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, expected = part.partition("\n")
                output = shown(command, at(block.place)).replace(str(at(block.place)), block.place)
                found, expected = (without_stored_bytes(x.strip("\n")) for x in (output, expected))
                assert found == expected, command


def python(name: str, at) -> dict[str, Any]:
    """Runs the Python of a document and returns its names. The output must equal the next block of
    the section, if that block has no language."""
    names: dict[str, Any] = {}
    fenced = blocks(name)
    for block, after in zip(fenced, [*fenced[1:], None], strict=True):
        if block.language != "python":
            continue
        printed = io.StringIO()
        with in_process.inside(at(block.place)), contextlib.redirect_stdout(printed):
            sys.path.insert(0, str(at(block.place)))
            exec(compile(block.text, name, "exec"), names)
        if after is not None and (after.language, after.section) == ("", block.section):
            assert printed.getvalue().replace(str(at(block.place)), block.place) == after.text
    return names


def test_python_of_the_readme(at):
    code = texts("README", "python")[0]
    assert len([line for line in code.splitlines() if line]) == 4
    names = python("README", at)
    written = reshard.open(at("/tmp/demo") / "out/1001")
    assert [str(mesh) for mesh in written.meshes] == ["data=1,model=8"]
    state, variables = names["state"], names["variables"]()
    assert jax.tree.structure(state) == jax.tree.structure(variables)
    saved = reshard.restore(at("/tmp/demo") / "run/1000", nn.unbox(variables))
    for new, old in zip(*map(jax.tree.leaves, (state, saved)), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()
        assert len(new.sharding.device_set) == 8


def test_python_of_conversion(at):
    assert "reshard" not in texts("conversion", "python")[1]
    names = python("conversion", at)
    state, made = names["state"], names["made"]
    saved = reshard.open(at("/tmp/lm") / "linen/10")
    nu = state["optimizer"].opt_state[0].nu
    for i, name in enumerate(("gate_proj", "up_proj")):
        for path, leaf in (
            ("params", getattr(state["model"].layers[1].mlp, name).kernel),
            ("opt_state/0/nu", nu.layers[1].mlp[name].kernel),
        ):
            fused = saved[f"{path}/layer_1/mlp/gating_einsum"].view().read().result()
            assert np.asarray(leaf[...]).tobytes() == fused[i].tobytes()
    assert state["optimizer"].step[...] == made["optimizer"].step[...] == 10
    for module in (names["model"], made["model"]):
        pairs = [jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (module, state["model"])]
        assert len(pairs[0]) > 9
        jax.tree.map(np.testing.assert_array_equal, *pairs)


def test_python_of_the_library(at):
    names = python("python", at)
    initial = names["variables"]()["params"]
    saved = reshard.restore(at("/tmp/demo") / "run/1000", nn.unbox(names["variables"]()))["params"]
    for layer, weights in names["params"]["params"].items():
        expected = initial if layer == "DotReluDot_3" else saved
        jax.tree.map(np.testing.assert_array_equal, nn.unbox(weights), nn.unbox(expected[layer]))


def test_python_of_errors(at):
    python("errors", at)
    # The others have tests of their own, above.
    assert with_blocks_of("python") == ["README", "conversion", "errors", "python"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The files for examples in docstrings: `run/1000`, two layers on a 2x4 mesh."""
    put = layouts.random_on(layouts.mesh((2, 4)))
    directory = tmp_path_factory.mktemp("small")
    layers = {
        f"layer_{i}": {"kernel": put((32, 32), None, "model"), "bias": put((32,), "model")}
        for i in range(2)
    }
    layouts.save_standard(directory / "run/1000", {"params": layers})
    return directory


FUNCTIONS = [name for name in dir(reshard) if inspect.isfunction(getattr(reshard, name))]


@pytest.mark.every_combination
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_docstring(name, small, tmp_path):
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    function = getattr(reshard, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={"reshard": reshard})
    assert test.examples
    told = io.StringIO()
    with in_process.inside(tmp_path):
        doctest.DocTestRunner().run(test, out=told.write)
    assert told.getvalue() == ""


def test_the_demonstrations_do_not_change_this_process(demos):
    """Their rules and map are those of the topics."""
    assert len(jax.devices()) == 16
    assert "device_count=16" in os.environ["XLA_FLAGS"]
    assert texts("meshes", "toml") == [(demos["/tmp/demo"] / "rules.toml").read_text()]
    assert texts("conversion", "toml") == [(demos["/tmp/lm"] / "map.toml").read_text()]


def test_the_rules_for_whole_modules_work(tmp_path):
    computed, text = texts("maps", "toml")
    numbers = {"hidden_size": 16, "head_dim": 8, "vocab_size": 32000}
    assert len(map_of(tomllib.loads(computed), "map.toml", numbers).rules) == 2
    (tmp_path / "map.toml").write_text(text)
    leaves = {("params", "ConvBlock_0", "x"): (2,), ("batch_stats", "ConvBlock_0", "x"): (3,)}
    leaves |= {("params", "blocks", "a", "w"): (2, 5)}
    mapped = apply_map(read_map(tmp_path / "map.toml"), leaves)
    assert mapped.map.shapes == {
        ("params", "block1", "x"): (2,),
        ("batch_stats", "block1", "x"): (3,),
        ("params", "layers_0", "a", "w"): (5,),
        ("params", "layers_1", "a", "w"): (5,),
    }


def test_shell_blocks_are_for_a_fresh_clone():
    first, second = texts("README", "sh")
    assert README.index(first) < README.index(second) < README.index("```console")
    made = "python3 -m venv .venv\n.venv/bin/python -m pip install "
    assert first == f"{made}.\n.venv/bin/python examples/quickstart.py\n"
    assert second == f"{made}'.[test]'\n.venv/bin/pytest\n"
    assert (ROOT / "examples" / "quickstart.py").is_file()


def test_the_readme_is_short_and_names_every_topic_and_room():
    assert len(README.splitlines()) <= 250
    assert len(README.encode()) <= 8_500
    assert "Usage:" not in README
    named = README.partition("## Where to read on")[2].partition(":\n")[2].partition(".")[0]
    assert set(named.replace("\n", " ").split(", ")) == set(TOPICS)
    assert all((ROOT / link).exists() for link in re.findall(r"\]\((?!http)(\S+?)\)", README))
    rooms = {path.parent.name for path in (ROOT / "reshard").glob("*/__init__.py")}
    assert rooms <= {*re.findall(r"`(\w+)`", README.partition("## The code")[2])}


def test_documents_name_topics_functions_and_tests_that_exist():
    for name, text in DOCUMENTS.items():
        named = set(re.findall(r"`reshard help (\w+)`", text))
        assert named <= {*TOPICS, "TOPIC"}, name
        assert set(re.findall(r"`reshard\.(\w+)", text)) <= {*dir(reshard), "cli"}, name
        tests = {file.name for file in (ROOT / "tests").glob("test_*.py")}
        assert set(re.findall(r"\btest_\w+\.py", text)) <= tests, name
        for module in re.findall(r"`python -m (tests\.[\w.]+)", text):
            place = ROOT / module.replace(".", "/")
            assert (place / "__main__.py").is_file() or place.with_suffix(".py").is_file(), module
