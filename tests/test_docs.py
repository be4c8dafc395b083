"""The commands and the Python of README and topics run, and print what they show. Examples in
docstrings run, too. The README runs in one shell. Each topic has its own copy of the
demonstrations' files."""

import contextlib
import doctest
import importlib
import inspect
import io
import itertools
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
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import reshard
from reshard.arrays.digests import digest_of
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


def topics_with(language: str) -> list[str]:
    return [name for name in TOPICS if texts(name, language)]


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
@pytest.mark.parametrize("name", topics_with("console"))
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


# What holds at the end of the README's Python in a section.
CHECKS = """
import numpy as np
from flax import linen as nn

saved = reshard.restore("run/1000", nn.unbox(variables()))
assert jax.tree.structure(weights) == jax.tree.structure(variables())
for new, old in zip(*map(jax.tree.leaves, (weights, saved)), strict=True):
    assert np.asarray(new).tobytes() == np.asarray(old).tobytes()
    assert len(new.sharding.device_set) == 8

start = create()
expected = start.apply_gradients(grads=jax.grad(loss)(start.params))
states = [(x.step, x.params, x.opt_state) for x in (state, expected)]
assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
for new, old in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-6)
assert state.params["DotReluDot_0"]["W2"].value.sharding.shard_shape((512, 512)) == (64, 512)
"""


def in_a_shell(fenced: list[Block]) -> str:
    """The lines of a shell. It prints each console block's commands with their outputs. Python
    blocks without another block between them are one session."""
    lines = ["set -e"]
    for language, group in itertools.groupby(fenced, lambda block: block.language):
        text = "\n".join(block.text for block in group)
        if language == "console":
            for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                lines += [f"echo {shlex.quote(f'$ {command}')}", f"{command} 2>&1"]
        elif language == "python":
            checks = CHECKS if "create" in text else ""
            lines.append(f"python - >&2 <<'END'\n{text}{checks}END")
        else:
            assert language == "sh"
            lines.append(f"{{\n{text}}} >&2")
    return "\n".join(lines)


def test_the_readme_runs_in_one_shell(tmp_path):
    """All blocks after those for a fresh clone, in their order."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / ".venv").symlink_to(sys.prefix)
    (clone / "examples").symlink_to(ROOT / "examples")
    fenced = blocks("README")
    assert [block.language for block in fenced[:2]] == ["sh", "sh"]
    script = in_a_shell(fenced[2:]).replace("/tmp/", f"{tmp_path}/")
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    ran = subprocess.run(["bash", "-c", script], cwd=clone, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    expected = "".join(text for text in texts("README", "console"))
    found = ran.stdout.replace(f"{tmp_path}/", "/tmp/")
    pair = [re.sub(r"\n+", "\n", without_stored_bytes(text)) for text in (found, expected)]
    assert pair[0] == pair[1]
    written = reshard.open(tmp_path / "demo/out/1001")
    assert [str(mesh) for mesh in written.meshes] == ["data=1,model=8"]
    assert len(read := reshard.open(tmp_path / "demo/out/weights").arrays) == 9
    assert {leaf.path[0] for leaf in read} == {"step", "params"}


def test_options_that_the_readme_names_fit_its_checkpoint(at):
    section = README.partition("## Another mesh")[2].partition("\n## ")[0]
    named = re.findall(r"`(--[^`]+)`", section)
    assert len(named) == 5 and named.pop(3) == "--map FILE"
    for number, option in enumerate(named):
        words = ["run/1000", f"option/{number}", "--to", "1x8", "--quiet", *shlex.split(option)]
        status, _, err = in_process.reshard_in(at("/tmp/demo"), "ckpt", *words)
        assert (status, err) == (0, ""), option


def python(name: str, at) -> dict[str, Any]:
    """Runs the Python of a topic and returns its names. The output must equal the next block of
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


def test_python_of_trust(at):
    names = python("trust", at)
    step = at("/tmp/demo") / "trained/10"
    live = jax.tree.leaves(names["variables"]())
    assert [digest_of(np.asarray(x)) for x in live] == [*reshard.digest(step).values()]
    found = reshard.verify(step)
    assert found and found.compared == len(live) == 8
    names["manager"].save(11, args=ocp.args.StandardSave(names["variables"]()))  # it goes on
    names["manager"].close()
    with pytest.raises(TypeError, match="not dict"):
        reshard.digest(names["variables"]())  # as the topic says


def test_python_of_errors(at):
    python("errors", at)
    # The others have tests of their own, above.
    assert topics_with("python") == ["conversion", "errors", "python", "trust"]


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
    first, second = texts("README", "sh")[:2]
    assert README.index(first) < README.index(second) < README.index("```console")
    made = "python3 -m venv .venv &&\n.venv/bin/python -m pip install "
    assert first == f"{made}. &&\n.venv/bin/python examples/quickstart.py\n"
    assert second == f"{made}'.[test]' &&\n.venv/bin/pytest\n"
    assert (ROOT / "examples" / "quickstart.py").is_file()


def test_the_readme_is_short_and_names_every_topic_and_room():
    assert len(README.splitlines()) <= 250
    assert len(README.encode()) <= 9 << 10
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
