"""The README says what happens: its commands and its Python run, in order, in one directory."""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

from reshard.convert.mapfile import read_map
from reshard.convert.mapped import apply_map

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Where the README has its demonstrations, and what leaves them there; the tests have them in
# temporary directories.
DEMOS = {"/tmp/demo": "quickstart", "/tmp/lm": "linen_to_nnx"}


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def sessions() -> list[tuple[str, str, str]]:
    """Every command of the console blocks with its output, in order, after the directory that it
    is typed in: the one that its section names, or the first."""
    found = []
    for section in re.split(r"^## ", README, flags=re.MULTILINE):
        named = re.findall(r"examples/\w+\.py (/tmp/\w+)", section)
        place = named[-1] if named else next(iter(DEMOS))
        for block in re.findall(r"^```console\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((place, command, output.strip("\n")))
    return found


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """What the examples leave: the README's directory -> the test's."""
    directories = {place: tmp_path_factory.mktemp(name) for place, name in DEMOS.items()}
    for place, name in DEMOS.items():
        subprocess.run(
            [sys.executable, ROOT / "examples" / f"{name}.py", directories[place]],
            check=True,
            capture_output=True,
        )
    return directories


@pytest.fixture(scope="module")
def demo(demos: dict[str, pathlib.Path]) -> pathlib.Path:
    """What `examples/quickstart.py DIRECTORY` leaves."""
    return demos["/tmp/demo"]


def run(command: str, demo: pathlib.Path, place: str = "/tmp/demo") -> str:
    """What a command shows in a demonstration's directory, stderr included."""
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    ran = subprocess.run(
        command,
        shell=True,
        cwd=demo,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ran.stdout.strip("\n").replace(str(demo), place)


def without_stored_bytes(output: str) -> str:
    """Orbax deals chunks out to data files in an order of its own, so what can be shared, and with
    it what is copied, differs from one save to the next."""
    output = re.sub(r"(, and|,| and) shares? [\d.]+ \wi?B( with SRC)?", "", output)
    return re.sub(r"^(read|write|memory)( +)[\d.]+ \wi?B", r"\1\2*", output, flags=re.MULTILINE)


def test_console_blocks_show_what_the_commands_print(demos):
    commands = sessions()
    assert len(commands) == 23
    for place, command, expected in commands:
        printed = run(command, demos[place], place)
        assert without_stored_bytes(printed) == without_stored_bytes(expected), command


def test_command_reference_has_every_command(demo):
    listed = re.search(r"^Commands:\n(.*)", run("reshard --help", demo), re.DOTALL | re.MULTILINE)
    names = re.findall(r"^  (\w+)", listed[1], re.MULTILINE)
    helps = [command for _, command, _ in sessions() if command.endswith(" --help")]
    assert sorted(helps) == sorted(
        ["reshard --help", *(f"reshard {name} --help" for name in names)]
    )


def test_python_block_reshards(demo):
    code, *_ = blocks("python")
    assert len([line for line in code.splitlines() if line]) == 4
    (demo / "python").mkdir()
    (demo / "python" / "run").symlink_to(demo / "run")
    subprocess.run([sys.executable, "-c", code], cwd=demo / "python", check=True)
    written = run("reshard inspect python/out/1000", demo)
    assert "saved meshes: data=1,model=8\n" in written


def test_python_block_restores_and_prints_what_follows_it(demo):
    _, code, *_ = blocks("python")
    after = README.partition(code)[2].partition("```\n")[2]
    printed = re.search(r"^```\n(.*?)^```$", after, re.DOTALL | re.MULTILINE)[1]
    check = (
        "import numpy as np\n"
        "from flax import linen as nn\n"
        "for new, old in zip(*map(jax.tree.leaves, (state, nn.unbox(variables())))):\n"
        "    assert np.asarray(new).tobytes() == np.asarray(old).tobytes()\n"
        "    assert len(new.sharding.device_set) == 8\n"
        "assert jax.tree.structure(state) == jax.tree.structure(variables())\n"
    )
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", code + check],
        cwd=demo,
        env=os.environ | devices,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr


def test_the_rules_are_those_of_the_demonstration(demo):
    text, *_ = blocks("toml")
    assert (demo / "rules.toml").read_text() == text


def test_the_map_is_that_of_the_demonstration(demos):
    _, text, _ = blocks("toml")
    assert (demos["/tmp/lm"] / "map.toml").read_text() == text


def test_the_rules_for_whole_modules_are_some(tmp_path):
    *_, text = blocks("toml")
    (tmp_path / "map.toml").write_text(text)
    leaves = {("params", "ConvBlock_0", "x"): (2,), ("batch_stats", "ConvBlock_0", "x"): (3,)}
    mapped = apply_map(
        read_map(tmp_path / "map.toml"), leaves | {("params", "blocks", "a", "w"): (2, 5)}
    )
    assert mapped.final == {
        ("params", "block1", "x"): (2,),
        ("batch_stats", "block1", "x"): (3,),
        ("params", "layers_0", "a", "w"): (5,),
        ("params", "layers_1", "a", "w"): (5,),
    }


def test_python_blocks_convert(demos):
    *_, code, plain = blocks("python")
    assert "reshard" not in plain
    check = (
        "import jax\n"
        "import numpy as np\n"
        "saved = reshard.open('linen/10')\n"
        "nu = state['optimizer'].opt_state[0].nu\n"
        "for i, name in enumerate(('gate_proj', 'up_proj')):\n"
        "    for path, leaf in (\n"
        "        ('params', getattr(state['model'].layers[1].mlp, name).kernel),\n"
        "        ('opt_state/0/nu', nu.layers[1].mlp[name].kernel),\n"
        "    ):\n"
        "        fused = saved[path + '/layer_1/mlp/gating_einsum'].view().read().result()\n"
        "        assert np.asarray(leaf[...]).tobytes() == fused[i].tobytes()\n"
        "assert state['optimizer'].step[...] == 10\n"
        "def same(a, b):\n"
        "    pairs = [jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (a, b)]\n"
        "    return [np.testing.assert_array_equal(x, y) for x, y in zip(*pairs)]\n"
        "assert len(same(model, state['model'])) > 9\n"
        "same(made['model'], state['model'])\n"
        "assert made['optimizer'].step[...] == 10\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code + plain + check],
        cwd=demos["/tmp/lm"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_shell_blocks_are_for_a_fresh_clone():
    first, second = blocks("sh")
    assert README.index(first) < README.index(second) < README.index("```console")
    assert first == (
        "python3 -m venv .venv\n"
        ".venv/bin/python -m pip install .\n"
        ".venv/bin/python examples/quickstart.py\n"
    )
    assert second == (
        "python3 -m venv .venv\n.venv/bin/python -m pip install '.[test]'\n.venv/bin/pytest\n"
    )
    assert (ROOT / "examples" / "quickstart.py").is_file()


def test_listing_has_every_module():
    listing = re.search(r"^```\nreshard/\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    listed, folder = set(), ""
    for line in listing.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        if not indent:
            break
        if len(indent) == 2:
            folder = name if name.endswith("/") else ""
        if not name.endswith("/"):
            listed.add((folder if len(indent) == 4 else "") + name)
    package = ROOT / "reshard"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    assert listed == {name for name in modules if not name.startswith("cli/") and "__" not in name}
