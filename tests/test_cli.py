"""The command line: its two streams, its exit status, and what is its process's own affair."""

import importlib.metadata
import itertools
import os
import pathlib
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from typing import NamedTuple

import in_process
import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.usefixtures("forked")
TOPICS = pathlib.Path(__file__).parents[1] / "reshard" / "cli" / "topics"
RESHARD = pathlib.Path(sysconfig.get_path("scripts")) / "reshard"
SPECS = {
    "params": {
        "embedding": ((64, 32), P("model", None)),
        "layer_0": {"bias": ((64,), P("model")), "kernel": ((32, 64), P("data", "model"))},
        "layer_1": {"bias": ((32,), P()), "kernel": ((64, 32), P(("data", "model"), None))},
    }
}
DRAWN = {
    "column": ((4, 8), P(None, "model")),
    "cube": ((4, 8, 8), P("data", None, "model")),
    "cells": ((4, 8, 6), P("data", "model", "pipe")),
    "middle": ((4, 8, 8), P(None, "model", None)),
    "replicated": ((4, 4), P()),
    "rows": ((16, 8), P(("data", "model"), None)),
    "scalar": ((), P()),
    "swapped": ((16, 8), P(None, ("model", "data"))),
    "vector": ((8,), P("data")),
}


class Ran(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> pathlib.Path:
    """`run`: a manager's root, steps 500 and 1000. `shapes`: one array for each picture, and leaves
    of other kinds. `long`: 300 leaves."""
    directory = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    devices = np.array(jax.devices()[:8])
    mesh = Mesh(devices.reshape(2, 4), ("data", "model"))
    deep = Mesh(devices.reshape(2, 2, 2), ("data", "model", "pipe"))

    def array(described):
        shape, spec = described
        sharding = NamedSharding(deep if "pipe" in spec else mesh, spec)
        return jax.device_put(rng.normal(size=shape).astype(np.float32), sharding)

    def tree(specs):
        return jax.tree.map(array, specs, is_leaf=lambda x: isinstance(x, tuple))

    with ocp.CheckpointManager(directory / "run") as manager:
        for step in (500, 1000):
            manager.save(step, args=ocp.args.StandardSave(tree(SPECS)))
    with ocp.PyTreeCheckpointer() as checkpointer:
        others = {
            "host": np.arange(3),
            "none": None,
            "number": 3,
            "empty": {},
            "text": "some",
            "single": jax.device_put(np.float32([1, 2]), devices[0]),
            "a/b": array(((8,), P())),
        }
        checkpointer.save(directory / "shapes", tree(DRAWN) | others)
        checkpointer.save(
            directory / "long", {f"leaf_{i:03d}": np.full((2, 3), i, "i4") for i in range(300)}
        )
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> pathlib.Path:
    """96 MiB that do not compress: long enough to be stopped in the middle."""
    path = tmp_path_factory.mktemp("large") / "run"
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    bits = np.random.default_rng(0).bytes(24 << 20)
    array = np.frombuffer(bits, np.uint32).reshape(1536, 4096)
    sharded = jax.device_put(array, NamedSharding(mesh, P("data", "model")))
    return layouts.save_standard(path, {f"array_{i}": sharded for i in range(4)})


@pytest.fixture
def cwd(checkpoints, tmp_path) -> pathlib.Path:
    """A directory with copies of the checkpoints."""
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    return tmp_path


def reshard(cwd: pathlib.Path, *arguments: object) -> Ran:
    return Ran(*in_process.reshard_in(cwd, *arguments))


def typed(cwd: pathlib.Path, command: str) -> Ran:
    """A line of `reshard` as it is typed."""
    program, *words = shlex.split(command)
    assert program == "reshard"
    return reshard(cwd, *words)


def shell(cwd: pathlib.Path, command: str) -> Ran:
    """A line that the shell runs."""
    path = f"{RESHARD.parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    ran = subprocess.run(
        command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def on_terminal(cwd: pathlib.Path, stream: str, *arguments: object) -> tuple[Ran, str]:
    """Runs a command with stdout or stderr on a terminal of 100 columns; also what that shows."""
    master, slave = pty.openpty()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: slave}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        patch.delenv("NO_COLOR", raising=False)
        process = subprocess.Popen(  # which closes the slave
            [RESHARD, *map(str, arguments)], cwd=cwd, text=True, **streams
        )
    shown = b""
    try:
        while data := os.read(master, 1 << 16):
            shown += data
    except OSError:  # how Linux says that the other end of a terminal was closed
        pass
    out, err = process.communicate()
    os.close(master)
    text = shown.decode().replace("\r\n", "\n")
    return Ran(process.returncode, out or "", err or ""), text


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def files(directory: pathlib.Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*")}


# --- help ----------------------------------------------------------------------------------------


def test_help_examples_run(cwd):
    """The lines below `Example:` in the help of every command."""
    found = []
    for arguments in ((), ("inspect",), ("ckpt",)):
        text = reshard(cwd, *arguments, "--help").out
        block = re.search(r"^  Example:\n((?:    .*\n)+)", text, re.MULTILINE)
        assert block, f"the help of {arguments} has no example"
        found += [line.strip() for line in block[1].splitlines()]
    for command in dict.fromkeys(found):
        ran = typed(cwd, command)
        assert (ran.status, ran.err) == (0, ""), command
        assert ran.out, command
        shutil.rmtree(cwd / "out", ignore_errors=True)


def test_help_fits_a_terminal(tmp_path):
    for arguments in ((), ("inspect",), ("ckpt",)):
        ran = reshard(tmp_path, *arguments, "-h")
        assert (ran.status, ran.err) == (0, "")
        assert ran.out == reshard(tmp_path, *arguments, "--help").out
        prose = [line for line in ran.out.splitlines() if not line.startswith("    reshard ")]
        assert max(map(len, prose)) <= 80


def test_version(tmp_path):
    names = ("jax", "flax", "orbax-checkpoint", "tensorstore")
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    assert reshard(tmp_path, "--version") == (0, f"reshard 0.1.0\n{libraries}\n", "")


def test_help_lists_the_topics_and_how_completion_is_switched_on(tmp_path):
    ran = reshard(tmp_path, "help")
    assert (ran.status, ran.err) == (0, "")
    listed, _, rest = ran.out.partition("\n\n")
    titles = dict(line.split(maxsplit=1) for line in listed.splitlines())
    topics = sorted(TOPICS.glob("*.md"))
    assert list(titles) == [file.stem for file in topics]
    assert [f"# {title}" for title in titles.values()] == [
        file.read_text().splitlines()[0] for file in topics
    ]
    switches_on = re.search("^Shell completion.*(eval .*)", rest, re.MULTILINE)[1]
    script = f"""{switches_on}
        COMP_WORDS=(reshard help m); COMP_CWORD=2
        _reshard_completion reshard; echo ${{COMPREPLY[@]}}"""
    completed = shell(tmp_path, f"bash -c {shlex.quote(script)}")
    assert completed.out.split() == [name for name in titles if name.startswith("m")] != []


def test_help_of_a_topic_is_markdown_in_a_pipe_and_rendered_in_a_terminal(tmp_path):
    text = (TOPICS / "meshes.md").read_text()
    assert reshard(tmp_path, "help", "meshes") == (0, text, "")
    ran, shown = on_terminal(tmp_path, "stdout", "help", "meshes")
    shown = without_styles(shown)
    assert (ran.status, ran.err) == (0, "")
    title = text.splitlines()[0].removeprefix("# ")
    assert title in shown and f"# {title}" not in shown and "```" in text and "```" not in shown


def test_help_of_no_topic(tmp_path):
    ran = reshard(tmp_path, "help", "mesh")
    assert (ran.status, ran.out) == (2, "")
    names = ", ".join(file.stem for file in sorted(TOPICS.glob("*.md")))
    told = f"there is no topic `mesh`\n  topics: {names}\n\nhint: reshard help"
    assert ran.err == f"Error: {told}\n"


def test_runs_as_a_module_and_as_a_program(cwd):
    for program in ([sys.executable, "-P", "-m", "reshard"], [RESHARD]):
        ran = subprocess.run([*program, "inspect", "run"], cwd=cwd, capture_output=True, text=True)
        shown = Ran(ran.returncode, ran.stdout, ran.stderr)
        assert shown == reshard(cwd, "inspect", "run")
        assert shown.status == 0 and shown.out


# --- inspect -------------------------------------------------------------------------------------

TABLE = """\
path                   shape  dtype       bytes  chunks     spec
params/embedding       64x32  float32  8.00 KiB  8 x 8x32   P('model', None)
params/layer_0/bias    64     float32     256 B  8 x 8      P('model')
params/layer_0/kernel  32x64  float32  8.00 KiB  8 x 16x16  P('data', 'model')
params/layer_1/bias    32     float32     128 B  8 x 4      P()
params/layer_1/kernel  64x32  float32  8.00 KiB  8 x 8x32   P(('data', 'model'), None)
"""


def test_long_tables_stream_as_plain_columns(cwd):
    rows = [f"leaf_{i:03d}  2x3    int32   24 B  1       numpy" for i in range(300)]
    expected = [
        f"{cwd}/long: a standalone checkpoint, OCDBT, zarr2",
        "saved meshes: none",
        "path      shape  dtype  bytes  chunks  spec",
        *rows,
        "300 leaves, 300 arrays, 7.03 KiB",
        "",
    ]
    assert reshard(cwd, "inspect", "long").out.split("\n") == expected
    ran, shown = on_terminal(cwd, "stdout", "inspect", "long")
    assert (ran.status, ran.err) == (0, "")
    assert shown.split("\n") == expected


def test_short_tables_are_drawn_on_a_terminal(cwd):
    ran, shown = on_terminal(cwd, "stdout", "inspect", "run/1000")
    assert (ran.status, ran.err) == (0, "")
    lines = [line.rstrip() for line in without_styles(shown).splitlines()]
    assert lines[3:] == [
        "",
        " path                    shape   dtype        bytes   chunks      spec",
        " " + "─" * 91,
        " params/embedding        64x32   float32   8.00 KiB   8 x 8x32    P('model', None)",
        " params/layer_0/bias     64      float32      256 B   8 x 8       P('model')",
        " params/layer_0/kernel   32x64   float32   8.00 KiB   8 x 16x16   P('data', 'model')",
        " params/layer_1/bias     32      float32      128 B   8 x 4       P()",
        " params/layer_1/kernel   64x32   float32   8.00 KiB   8 x 8x32    "
        "P(('data', 'model'), None)",
        "",
        "5 leaves, 5 arrays, 24.38 KiB",
    ]


def test_a_reader_that_leaves_is_no_error(cwd):
    ran = shell(cwd, "reshard inspect long | head -n 1")
    assert ran == (0, f"{cwd}/long: a standalone checkpoint, OCDBT, zarr2\n", "")


MESH = "on data=2,model=4"
# Leaf, mesh -> what is said of it, and the rows of its picture.
PICTURES = {
    ("column", None): (f"[4x8]  P(None, 'model') {MESH}: 4 shards of 4x2", "0,4 1,5 2,6 3,7"),
    ("rows", "data=2,model=2"): (
        "[16x8]  P(('data', 'model'), None) on data=2,model=2: 4 shards of 4x8",
        *"0123",
    ),
    ("swapped", None): (
        f"[16x8]  P(None, ('model', 'data')) {MESH}: 8 shards of 16x1",
        "0 4 1 5 2 6 3 7",
    ),
    ("replicated", "data=8,model=512"): (
        "[4x4]  P() on data=8,model=512: 1 shard of 4x4",
        "0-4095",
    ),
    ("scalar", None): (f"[]  P() {MESH}: 1 shard of ()", "0-7"),
    ("vector", "data=4,model=2"): (
        "[8]  P('data') on data=4,model=2: 4 shards of 2",
        "0-1 2-3 4-5 6-7",
    ),
    ("cube", None): (
        f"[4x8x8]  P('data', None, 'model') {MESH}: 8 shards of 2x8x2",
        *("0 1 2 3", "4 5 6 7"),
    ),
    ("middle", None): (
        f"[4x8x8]  P(None, 'model', None) {MESH}: 4 shards of 4x2x8",
        *("0,4", "1,5", "2,6", "3,7"),
    ),
}


@pytest.mark.parametrize(("leaf", "mesh"), PICTURES)
def test_inspect_sharding(checkpoints, leaf, mesh):
    given = [] if mesh is None else ["--mesh", mesh]
    ran = reshard(checkpoints, "inspect", "shapes", "--sharding", leaf, *given)
    title, *rows = PICTURES[leaf, mesh]
    rows = [f"| {row.replace(' ', ' | ')} |" for row in rows]
    line = re.sub("[^|]", "-", rows[0]).replace("|", "+")
    picture = "".join(f"{row}\n{line}\n" for row in rows)
    assert ran == (0, f"{leaf}  float32{title}\n{line}\n{picture}", "")


def test_inspect_sharding_of_three_axes(checkpoints):
    boxes = itertools.product(("0:2", "2:4"), ("0:4", "4:8"), ("0:3", "3:6"))
    lines = [f"[{', '.join(box)}]  {number}\n" for number, box in enumerate(boxes)]
    title = "P('data', 'model', 'pipe') on data=2,model=2,pipe=2: 8 shards of 2x4x3\n"
    ran = reshard(checkpoints, "inspect", "shapes", "--sharding", "cells")
    assert ran == (0, f"cells  float32[4x8x6]  {title}{''.join(lines)}", "")


# --- ckpt ----------------------------------------------------------------------------------------


def test_ckpt_writes_for_the_new_mesh(cwd):
    source = layouts.hashes(cwd / "run")
    ran = reshard(cwd, "ckpt", "run/1000", "out/1000", "--to", "1x8", "--no-link")
    assert (ran.status, ran.err) == (0, "")
    head, *_, last = ran.out.splitlines()
    assert head == "5 arrays, 24.38 KiB: 1 rewritten, 4 copied verbatim"
    assert last == "wrote out/1000"
    assert reshard(cwd, "inspect", "out/1000").out == (
        f"{cwd}/out/1000: a step, OCDBT, zarr2\n"
        "items: default; shown: default\n"
        "saved meshes: data=1,model=8\n"
        + TABLE.replace("8 x 16x16", "8 x 32x8")
        .replace("chunks   ", "chunks  ")
        .replace("8 x 8x32 ", "8 x 8x32")
        .replace("8 x 8 ", "8 x 8")
        .replace("8 x 4 ", "8 x 4")
        + "5 leaves, 5 arrays, 24.38 KiB\n"
    )
    assert layouts.hashes(cwd / "run") == source
    assert files(cwd / "out") >= {"1000/_CHECKPOINT_METADATA", "1000/default/_METADATA"}
    assert os.listdir(cwd / "out") == ["1000"]


def test_ckpt_says_what_is_shared(large, tmp_path):
    words = ("ckpt", large, "--to", "1x8", "--chunks", "keep")
    ran = reshard(tmp_path, *words, "out")
    assert (ran.status, ran.err) == (0, "")
    names = [path for path in (tmp_path / "out").rglob("d/*") if path.stat().st_nlink > 1]
    shared = sum(path.stat().st_size for path in names) / 2**20
    assert shared > 96
    assert ran.out.splitlines()[-1] == f"wrote out, shares {shared:.2f} MiB with SRC"
    copied = reshard(tmp_path, *words, "copy", "--no-link")
    assert copied.out.splitlines()[-1] == "wrote copy"
    assert {p.stat().st_nlink for p in (tmp_path / "copy").rglob("*") if p.is_file()} == {1}


def test_ckpt_dry_run_writes_nothing(cwd):
    before = files(cwd)
    arguments = ("ckpt", "run/1000", "out/1000", "--to", "1x8", "--no-link")
    planned = reshard(cwd, *arguments, "--dry-run")
    assert (planned.status, planned.err) == (0, "")
    assert files(cwd) == before
    assert reshard(cwd, *arguments).out == planned.out + "wrote out/1000\n"
    before = files(cwd)
    ran = reshard(cwd, *arguments, "--dry-run")
    assert (ran.status, ran.err) == (
        2,
        f"Error: the plan cannot be executed\n  `{cwd}/out/1000` exists\n\n"
        "hint: --overwrite replaces it once the new one is complete\n",
    )
    assert ran.out == f"{planned.out}problem  `{cwd}/out/1000` exists\n"
    assert files(cwd) == before


def test_ckpt_one_step_of_a_root(cwd):
    for given, step in (((), 1000), (("--step", "500"), 500)):
        out = f"out_{step}"
        assert reshard(cwd, "ckpt", "run", out, "--to", "1x8", *given).status == 0
        shown = reshard(cwd, "inspect", out).out.splitlines()
        assert shown[1] == f"steps: {step}; shown: {step}"


# --- mistakes ------------------------------------------------------------------------------------


def test_the_hint_for_axes_works(cwd):
    command = "reshard ckpt run/1000 out --to data=1,tensor=8"
    ran = typed(cwd, command)
    assert (ran.status, ran.out) == (2, "")
    renames, replicates = re.findall(r"--axis \S+", ran.err)
    assert typed(cwd, f"{command} {renames}").status == 0
    assert "P('data', 'tensor')" in reshard(cwd, "inspect", "out").out
    assert typed(cwd, f"{command} {replicates} --overwrite").status == 0
    assert "P('data', None)" in reshard(cwd, "inspect", "out").out


def test_the_hints_for_dimensions_that_do_not_divide_work(cwd):
    command = "reshard ckpt run/1000 out --to 1x3"
    ran = typed(cwd, command)
    assert (ran.status, ran.out) == (2, "")
    _, _, hints = ran.err.partition("\n\n")
    first, *rest = hints.splitlines()
    assert first == "hint: --axis model= replicates what is split over it"
    assert typed(cwd, f"{command} --dry-run --axis model=").status == 0
    fits = re.findall(r"^hint: (--spec '[^']+') fits$", hints, re.MULTILINE)
    assert len(fits) == len(rest)
    assert typed(cwd, f"{command} {' '.join(fits)}").status == 0
    shown = reshard(cwd, "inspect", "out").out.partition("model=3\n")[2]
    specs = ("P(None, None)", "P()", "P('data', None)", "P()", "P('data', None)")
    head, *rows = TABLE.splitlines()
    rows = [row[: head.index("spec")] + spec for row, spec in zip(rows, specs, strict=True)]
    assert shown.splitlines() == [head, *rows, "5 leaves, 5 arrays, 24.38 KiB"]


def test_the_hint_for_memory_works(cwd):
    command = "reshard ckpt run/1000 out --to 1x8 --dtype bfloat16 --max-memory"
    ran = typed(cwd, f"{command} 1KiB")
    assert (ran.status, ran.out) == (2, "")
    least = re.search(r"^hint: --max-memory (\S+) is the least", ran.err, re.MULTILINE)
    assert least is not None
    assert typed(cwd, f"{command} {least[1]}").status == 0


# --- signals, terminals, imports -----------------------------------------------------------------


def running(large, cwd, *around):
    """A job that has begun to write."""
    process = subprocess.Popen(
        [*around, RESHARD, "ckpt", large, "out/1000", "--to", "1x8", "--chunks", "64KiB"],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not list(cwd.glob("out/.reshard-*/**/d/*")):
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("more", [(), (signal.SIGINT, signal.SIGTERM)])
def test_a_signal_leaves_nothing(large, tmp_path, number, more):
    """And more signals do not disturb the clean-up."""
    process = running(large, tmp_path)
    process.send_signal(number)
    while more and process.poll() is None:
        for each in more:
            process.send_signal(each)
        time.sleep(0.001)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err == "\nInterrupted; nothing half-written was left behind.\n"
    assert files(tmp_path) <= {"out"}


def test_an_interrupt_of_the_terminal_is_none_of_a_job_in_the_background(large, tmp_path):
    process = running(large, tmp_path, "sh", "-c", 'trap "" INT; exec "$@"', "sh")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.endswith("wrote out/1000\n")


def test_progress_is_drawn_on_a_terminal(large, tmp_path):
    arguments = ("ckpt", large, "out", "--to", "1x8", "--max-memory", "16MiB")
    ran, shown = on_terminal(tmp_path, "stderr", *arguments)
    assert ran.status == 0
    assert ran.out.endswith("wrote out\n")
    assert re.search(r"━+ +[\d.]+/96\.0 +MiB +[\d.]+ [kM]B/s +\d:\d\d:\d\d", without_styles(shown))


def test_progress_says_how_many_workers_there_are(cwd):
    ran, shown = on_terminal(cwd, "stderr", "digest", "run/1000", "--quiet", "--workers", "2")
    assert (ran, shown) == (Ran(0, "", ""), "")
    ran, shown = on_terminal(cwd, "stderr", "digest", "run/1000", "--workers", "2")
    assert ran.status == 0
    assert re.search(r"2 workers ━+ ", without_styles(shown))
    ran, shown = on_terminal(cwd, "stderr", "digest", "run/1000")
    assert ran.status == 0
    assert "━" in shown and "workers" not in shown


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_progress_is_not_drawn_when_nobody_wants_it(cwd, option):
    ran, shown = on_terminal(cwd, "stderr", "ckpt", "run/1000", "out", "--to", "1x8", option)
    assert (ran.status, shown) == (0, "")
    assert (ran.out == "") == (option == "--quiet")


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
    named = {"click", "flax", "jax", "jaxlib", "numpy", "orbax", "rich", "tensorstore"}
    print("loaded", *sorted(loaded & named))
"""


def test_commands_import_little(cwd, monkeypatch):
    monkeypatch.undo()  # it is forked from no other
    words = ["--help", "inspect run", "inspect run --sharding params/embedding --mesh 1x8"]
    words += ["ckpt run out --to 1x8 --dtype bfloat16"]
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words], cwd=cwd, capture_output=True, text=True
    )
    found = re.findall("^loaded (.*)$", ran.stdout, re.MULTILINE)
    assert found == ["click", *["click numpy tensorstore"] * 3], ran.stderr
