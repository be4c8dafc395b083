"""The command line: its two streams, its exit status, and what is its process's own affair."""

import importlib.metadata
import itertools
import json
import os
import pathlib
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import in_process
import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from in_process import refused, reshard_in, shown
from jobs import RESHARD
from releases import older

pytestmark = pytest.mark.usefixtures("forked")
TOPICS = pathlib.Path(__file__).parents[1] / "reshard" / "cli" / "topics"
# Shapes, and the entries of their specs.
SPECS = {
    "params": {
        "embedding": ((64, 32), "model", None),
        "layer_0": {"bias": ((64,), "model"), "kernel": ((32, 64), "data", "model")},
        "layer_1": {"bias": ((32,),), "kernel": ((64, 32), ("data", "model"), None)},
    }
}
DRAWN = {
    "column": ((4, 8), None, "model"),
    "cube": ((4, 8, 8), "data", None, "model"),
    "middle": ((4, 8, 8), None, "model", None),
    "replicated": ((4, 4),),
    "rows": ((16, 8), ("data", "model"), None),
    "scalar": ((),),
    "swapped": ((16, 8), None, ("model", "data")),
    "vector": ((8,), "data"),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> pathlib.Path:
    """`run`: a manager's root, steps 500 and 1000. `shapes`: one array for each picture. `long`:
    300 leaves."""
    directory = tmp_path_factory.mktemp("cli")
    array = layouts.random_on(layouts.mesh((2, 4)))
    deep = layouts.random_on(layouts.mesh((2, 2, 2), ("data", "model", "pipe")))

    def tree(specs):
        return jax.tree.map(lambda x: array(*x), specs, is_leaf=lambda x: isinstance(x, tuple))

    with ocp.CheckpointManager(directory / "run") as manager:
        for step in (500, 1000):
            manager.save(step, args=ocp.args.StandardSave(tree(SPECS)))
    cells = {"cells": deep((4, 8, 6), "data", "model", "pipe")}
    layouts.save_pytree(directory / "shapes", tree(DRAWN) | cells)
    rows = {f"leaf_{i:03d}": np.full((2, 3), i, "i4") for i in range(300)}
    layouts.save_pytree(directory / "long", rows)
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> pathlib.Path:
    """96 MiB that do not compress: long enough to be stopped in the middle."""
    bits = np.random.default_rng(0).bytes(24 << 20)
    array = layouts.put(np.frombuffer(bits, np.uint32).reshape(1536, 4096), "data", "model")
    path = tmp_path_factory.mktemp("large") / "run"
    return layouts.save_standard(path, {f"array_{i}": array for i in range(4)})


@pytest.fixture
def cwd(checkpoints, tmp_path) -> pathlib.Path:
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    return tmp_path


def shell(cwd: pathlib.Path, command: str) -> tuple[int, str, str]:
    path = f"{RESHARD.parent}{os.pathsep}{os.environ['PATH']}"
    given = {"shell": True, "cwd": cwd, "env": os.environ | {"PATH": path}}
    ran = subprocess.run(command, **given, capture_output=True, text=True)
    return ran.returncode, ran.stdout, ran.stderr


def on_terminal(cwd: pathlib.Path, streams: str, *arguments: object) -> tuple[str, str]:
    """Runs a command with these streams, stdout or stderr and perhaps stdin, on a terminal of 100
    columns: what the other stream has, and what the terminal shows."""
    master, slave = pty.openpty()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = pipes | dict.fromkeys(streams.split(), slave)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        patch.delenv("NO_COLOR", raising=False)
        process = subprocess.Popen(  # which closes the slave
            [RESHARD, *map(str, arguments)], cwd=cwd, text=True, **given
        )
    data = b""
    try:
        while more := os.read(master, 1 << 16):
            data += more
    except OSError:  # how Linux says that the other end of a terminal was closed
        pass
    out, err = process.communicate()
    os.close(master)
    assert process.returncode == 0
    return out or err or "", data.decode().replace("\r\n", "\n")


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def files(directory: pathlib.Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*")}


# --- help ----------------------------------------------------------------------------------------


def test_help_fits_a_terminal_and_its_examples_run(cwd):
    """The lines below `Example:` in the help of every command."""
    found = []
    for arguments in ((), ("inspect",), ("ckpt",)):
        text = shown(cwd, *arguments, "-h")
        assert text == shown(cwd, *arguments, "--help")
        prose = [line for line in text.splitlines() if not line.startswith("    reshard ")]
        assert max(map(len, prose)) <= 80
        block = re.search(r"^  Example:\n((?:    .*\n)+)", text, re.MULTILINE)
        assert block, f"the help of {arguments} has no example"
        found += [line.strip() for line in block[1].splitlines()]
    (cwd / "map.toml").write_text("[[rule]]\nfrom = '^(.*)$'\nto = '\\1'\n")
    for command in dict.fromkeys(found):
        assert shown(cwd, *shlex.split(command)[1:]), command
        shutil.rmtree(cwd / "out", ignore_errors=True)


def test_version(tmp_path):
    names = ("jax", "flax", "orbax-checkpoint", "tensorstore")
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    assert shown(tmp_path, "--version") == f"reshard 0.1.0\n{libraries}\n"


def test_help_lists_the_topics_and_how_completion_is_switched_on(tmp_path):
    listed, _, rest = shown(tmp_path, "help").partition("\n\n")
    titles = dict(line.split(maxsplit=1) for line in listed.splitlines())
    topics = sorted(TOPICS.glob("*.md"))
    assert list(titles) == [file.stem for file in topics]
    assert [f"# {title}" for title in titles.values()] == [
        file.read_text().splitlines()[0] for file in topics
    ]
    switches_on = re.search("^For shell completion.*(eval .*)", rest, re.MULTILINE)[1]
    script = f"""{switches_on}
        COMP_WORDS=(reshard help m); COMP_CWORD=2
        _reshard_completion reshard; echo ${{COMPREPLY[@]}}"""
    _, completed, _ = shell(tmp_path, f"bash -c {shlex.quote(script)}")
    assert completed.split() == [name for name in titles if name.startswith("m")] != []


def test_help_of_a_topic_is_markdown_in_a_pipe_and_rendered_in_a_terminal(tmp_path):
    text = (TOPICS / "meshes.md").read_text()
    assert shown(tmp_path, "help", "meshes") == text
    err, drawn = on_terminal(tmp_path, "stdout", "help", "meshes")
    assert err == ""
    drawn = without_styles(drawn)
    title = text.splitlines()[0].removeprefix("# ")
    assert title in drawn and f"# {title}" not in drawn and "```" in text and "```" not in drawn


@pytest.mark.parametrize("topic", ["meshes", "ckpt", None])
def test_help_is_paged_in_a_terminal(topic, tmp_path, monkeypatch):
    """With styles. The pager ends if all fits on one screen, and does not clear the screen."""
    less = tmp_path / "less"
    # Older releases of click first run it without input.
    less.write_text('#!/bin/sh\nif [ -t 0 ]; then exit; fi\necho "less $LESS"\nexec cat\n')
    less.chmod(0o755)
    words = ["help", topic] if topic else ["help"]
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path), os.environ["PATH"])))
    for name in ("PAGER", "LESS"):
        monkeypatch.delenv(name, raising=False)
    err, paged = on_terminal(tmp_path, "stdin stdout", *words)
    assert err == ""
    name, _, text = paged.partition("\n")
    assert name == "less -FRX"
    assert ("\x1b[" in text) == (topic == "meshes")
    _, direct = on_terminal(tmp_path, "stdout", *words)
    assert without_styles(text) == without_styles(direct)
    monkeypatch.setenv("LESS", "-i")  # what the user has set stays
    _, paged = on_terminal(tmp_path, "stdin stdout", *words)
    assert paged.startswith("less -i\n")
    assert without_styles(text) == paged.partition("\n")[2]


def test_help_of_a_command_is_its_own(tmp_path):
    """It names the command, whatever the name of the program."""
    for command in ("ckpt", "inspect", "help"):
        assert shown(tmp_path, "help", command) == shown(tmp_path, command, "--help")
    names = ", ".join(file.stem for file in sorted(TOPICS.glob("*.md")))
    commands = "ckpt, commit, convert, diff, digest, doctor, export, help, inspect, verify"
    assert refused(tmp_path, "help", "mesh") == (
        f"Error: there is no topic or command `mesh`\n  topics: {names}\n  commands: {commands}\n"
        "\nhint: reshard help meshes\n"
    )


def test_runs_as_a_module_and_as_a_program(cwd):
    for program in ([sys.executable, "-P", "-m", "reshard"], [RESHARD]):
        ran = subprocess.run([*program, "inspect", "run"], cwd=cwd, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout == shown(cwd, "inspect", "run") != ""


# --- inspect -------------------------------------------------------------------------------------


def test_tables_are_plain_columns_in_a_pipe_and_on_a_terminal(cwd):
    rows = [f"leaf_{i:03d}  2x3    int32   24 B  1       numpy" for i in range(300)]
    expected = [
        f"{cwd}/long: a standalone checkpoint, OCDBT, zarr2",
        "saved meshes: none",
        "path      shape  dtype  bytes  chunks  spec",
        *rows,
        "300 leaves, 300 arrays, 7.03 KiB",
        "",
    ]
    assert shown(cwd, "inspect", "long").split("\n") == expected
    assert on_terminal(cwd, "stdout", "inspect", "long") == ("", "\n".join(expected))


def test_a_reader_that_leaves_is_no_error(cwd):
    ran = shell(cwd, "reshard inspect long | head -n 1")
    assert ran == (0, f"{cwd}/long: a standalone checkpoint, OCDBT, zarr2\n", "")


MIDDLE = ("0,4", "1,5", "2,6", "3,7")
PICTURES = [  # leaf, the mesh if it is another, spec, shards, and the rows of the picture
    ("column", "", "[4x8]  P(None, 'model')", "4 shards of 4x2", "0,4 1,5 2,6 3,7"),
    ("rows", "data=2,model=2", "[16x8]  P(('data', 'model'), None)", "4 shards of 4x8", *"0123"),
    ("swapped", "", "[16x8]  P(None, ('model', 'data'))", "8 shards of 16x1", "0 4 1 5 2 6 3 7"),
    ("replicated", "data=8,model=512", "[4x4]  P()", "1 shard of 4x4", "0-4095"),
    ("scalar", "", "[]  P()", "1 shard of ()", "0-7"),
    ("vector", "data=4,model=2", "[8]  P('data')", "4 shards of 2", "0-1 2-3 4-5 6-7"),
    ("cube", "", "[4x8x8]  P('data', None, 'model')", "8 shards of 2x8x2", "0 1 2 3", "4 5 6 7"),
    ("middle", "", "[4x8x8]  P(None, 'model', None)", "4 shards of 4x2x8", *MIDDLE),
]


@pytest.mark.parametrize("case", PICTURES, ids=lambda case: case[0])
def test_inspect_sharding(checkpoints, case):
    leaf, mesh, spec, shards, *rows = case
    rows = [f"| {row.replace(' ', ' | ')} |" for row in rows]
    line = re.sub("[^|]", "-", rows[0]).replace("|", "+")
    picture = "".join(f"{row}\n{line}\n" for row in rows)
    words = ("inspect", "shapes", "--sharding", leaf, *(("--mesh", mesh) if mesh else ()))
    title = f"{leaf}  float32{spec} on {mesh or 'data=2,model=4'}: {shards}"
    assert shown(checkpoints, *words) == f"{title}\n{line}\n{picture}"


def test_inspect_sharding_of_three_axes(checkpoints):
    boxes = itertools.product(("0:2", "2:4"), ("0:4", "4:8"), ("0:3", "3:6"))
    lines = [f"[{', '.join(box)}]  {number}" for number, box in enumerate(boxes)]
    title = "P('data', 'model', 'pipe') on data=2,model=2,pipe=2: 8 shards of 2x4x3"
    told = shown(checkpoints, "inspect", "shapes", "--sharding", "cells")
    assert told.splitlines() == [f"cells  float32[4x8x6]  {title}", *lines]


# --- ckpt ----------------------------------------------------------------------------------------


def test_ckpt_says_what_is_shared(large, tmp_path):
    words = ("ckpt", large, "--to", "1x8", "--chunks", "keep")
    told = shown(tmp_path, *words, "out")
    names = [path for path in (tmp_path / "out").rglob("d/*") if path.stat().st_nlink > 1]
    shared = sum(path.stat().st_size for path in names) / 2**20
    assert shared > 96
    assert told.splitlines()[-1] == f"wrote out, shares {shared:.2f} MiB with SRC"
    assert shown(tmp_path, *words, "copy", "--no-link").splitlines()[-1] == "wrote copy"
    assert {p.stat().st_nlink for p in (tmp_path / "copy").rglob("*") if p.is_file()} == {1}


def test_ckpt_dry_run_writes_nothing(cwd):
    before = files(cwd)
    arguments = ("ckpt", "run/1000", "out/1000", "--to", "1x8", "--no-link")
    planned = shown(cwd, *arguments, "--dry-run")
    assert files(cwd) == before
    assert shown(cwd, *arguments) == planned + "wrote out/1000\n"
    before = files(cwd)
    problem = f"`{cwd}/out/1000` exists"
    hint = "hint: --overwrite replaces it once the new one is complete"
    assert in_process.reshard_in(cwd, *arguments, "--dry-run") == (
        2,
        f"{planned}problem  {problem}\n",
        f"Error: the plan cannot be executed\n  {problem}\n\n{hint}\n",
    )
    assert files(cwd) == before


# --- mistakes ------------------------------------------------------------------------------------


def test_an_error_is_a_document_of_json(cwd):
    """Whether it is found before or after the checkpoint was read; on stderr it is as it was."""
    job = {"destination": "long", "done": False}
    exists = (f"`{cwd}/long` exists", "--overwrite replaces it once the new one is complete")
    nothing = ("nothing exists at `lone`", f"the nearest is `{cwd}/long`")
    for document, (problem, hint), *words in (
        (job, exists, "ckpt", "run/1000", "long", "--to", "1x8"),
        (job, nothing, "ckpt", "lone", "long", "--to", "1x8"),
        ({}, nothing, "inspect", "lone"),
        ({}, nothing, "digest", "lone"),
        ({}, nothing, "verify", "lone"),
        ({}, nothing, "verify", "long", "--against", "lone"),
        ({}, nothing, "diff", "long", "lone"),
    ):
        told = refused(cwd, *words)
        status, out, err = reshard_in(cwd, *words, "--json")
        assert (status, err) == (2, told)
        assert json.loads(out) == document | {"problems": [problem], "hints": [hint]}
    status, out, err = reshard_in(cwd, "commit", "lone", "--json")
    document = json.loads(out)
    assert (status, document["destination"], document["done"]) == (2, "lone", False)
    assert err.startswith(f"Error: {document['problems'][0]}\n")


def test_a_folder_of_checkpoints_is_no_step_of_several_items(cwd):
    (cwd / "both").mkdir()
    for name in ("long", "shapes"):
        (cwd / name).rename(cwd / "both" / name)
    hint = f"hint: open one of them: {cwd}/both/long\n"
    told = f"Error: `{cwd}/both` has several checkpoints\n  long\n  shapes\n\n{hint}"
    assert refused(cwd, "ckpt", "both", "out") == told
    shown(cwd, "ckpt", hint.split()[-1], "out")


def test_what_was_mistyped_has_a_hint(cwd):
    told = refused(cwd, "inspct", "run")
    assert "Error: No such command 'inspct'." in told
    assert older("click", "8.5") or told.endswith(" Did you mean 'inspect'?\n")
    hint = f"hint: the nearest is `{cwd}/shapes`\n"
    assert refused(cwd, "inspect", "shpes/inside/it").endswith(hint)
    hint = "hint: the nearest leaf is `params/layer_1/kernel`\n"
    assert refused(cwd, "ckpt", "run/500", "out", "--rename", "kernal$=w").endswith(hint)
    told = refused(cwd, "ckpt", "run/500", "out", "--max-memory", "64m")
    assert told.endswith("\n\nhint: `64MiB`\n")


def test_a_leaf_that_looks_like_an_argument_keeps_its_name(tmp_path):
    one = jax.device_put(np.ones(3, "f4"), jax.devices()[0])
    tree = {"overwrite=True": one, "step=3": {"w": one}, "drop=[1]": one}
    layouts.save_pytree(tmp_path / "run", tree)
    told = shown(tmp_path, "ckpt", "run", "out", "--to", "data=8", "--dry-run")
    assert told.endswith(": drop=[1], overwrite=True, step=3/w\n")


# --- signals, terminals, imports -----------------------------------------------------------------


def running(words, cwd, begun):
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(words, cwd=cwd, text=True, **streams)
    while process.poll() is None and not begun(process):
        time.sleep(0.001)
    return process


def writing(large, cwd, *around):
    words = [*around, RESHARD, "ckpt", large, "out/1000", "--to", "1x8", "--chunks", "64KiB"]
    return running(words, cwd, lambda _: list(cwd.glob("out/.reshard-*/**/d/*")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("more", [(), (signal.SIGINT, signal.SIGTERM)])
def test_a_signal_leaves_nothing(large, tmp_path, number, more):
    """And more signals do not disturb the clean-up."""
    process = writing(large, tmp_path)
    process.send_signal(number)
    while more and process.poll() is None:
        for each in more:
            process.send_signal(each)
        time.sleep(0.001)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err == "\nInterrupted.\n"
    assert files(tmp_path) <= {"out"}


def test_an_interrupt_of_the_terminal_is_none_of_a_job_in_the_background(large, tmp_path):
    process = writing(large, tmp_path, "sh", "-c", 'trap "" INT; exec "$@"', "sh")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.endswith("wrote out/1000\n")


@pytest.mark.parametrize("command", [("verify",), ("digest", "--write")])
def test_an_interrupted_command_leaves_nothing(large, tmp_path, command):
    def reads(process):
        """Whether it reads arrays, whose files it may have mapped."""
        try:
            links = [os.readlink(entry) for entry in os.scandir(f"/proc/{process.pid}/fd")]
            maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            return False
        return any(f"{large}/ocdbt.process_0/d/" in each for each in (maps, *links))

    before = layouts.hashes(large.parent)
    process = running([RESHARD, *command, large, "--max-memory", "16MiB"], tmp_path, reads)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "\nInterrupted.\n")
    assert layouts.hashes(large.parent) == before


def test_progress_is_drawn_on_a_terminal(large, tmp_path):
    arguments = ("ckpt", large, "out", "--to", "1x8", "--max-memory", "16MiB")
    out, drawn = on_terminal(tmp_path, "stderr", *arguments)
    assert out.endswith("wrote out\n")
    assert re.search(r"━+ +[\d.]+/96\.0 +MiB +[\d.]+ [kM]B/s +\d:\d\d:\d\d", without_styles(drawn))


def test_progress_says_how_many_workers_there_are(cwd):
    words = ("digest", "run/1000")
    assert on_terminal(cwd, "stderr", *words, "--quiet", "--workers", "2") == ("", "")
    _, drawn = on_terminal(cwd, "stderr", *words, "--workers", "2")
    assert re.search(r"2 workers ━+ ", without_styles(drawn))
    for command in (words, ("diff", "run/1000", "run/1000", "--values")):
        _, drawn = on_terminal(cwd, "stderr", *command)
        assert "━" in drawn and "bytes" in drawn and "workers" not in drawn


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_progress_is_not_drawn_when_nobody_wants_it(cwd, option):
    out, drawn = on_terminal(cwd, "stderr", "ckpt", "run/1000", "out", "--to", "1x8", option)
    assert (out == "", drawn) == (option == "--quiet", "")


IMPORTED = """
import sys
from reshard.cli import main
for words in sys.argv[1:]:
    sys.argv = ["reshard", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    loaded = {name.partition(".")[0] for name in sys.modules}
    named = "click flax jax jaxlib numpy obstore optax orbax rich tensorstore".split()
    print("loaded", *sorted(loaded & {*named}))
"""


def test_commands_import_little(cwd, monkeypatch):
    monkeypatch.undo()  # it is forked from no other
    words = ["--help", "inspect run", "inspect run --sharding params/embedding --mesh 8x32"]
    words += ["ckpt run out --to 1x8 --dtype bfloat16"]
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words], cwd=cwd, capture_output=True, text=True
    )
    found = re.findall("^loaded (.*)$", ran.stdout, re.MULTILINE)
    assert found == ["click", *["click numpy tensorstore"] * 3], ran.stderr


@pytest.mark.parametrize("option", ["--item", "--step"])
def test_an_option_with_one_value_is_not_given_twice(tmp_path, option):
    status, _, err = reshard_in(tmp_path, "inspect", "x", option, "1", option, "2")
    assert status == 2
    assert err.endswith(f"Error: Invalid value for '{option}': one value is taken, not 1, 2\n")
