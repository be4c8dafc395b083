"""`reshard doctor` on every state that a checkpoint may be in."""

import json
import shlex
import shutil
import sys
from importlib.metadata import version

import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from in_process import reshard_in
from test_loader import uncommit

import reshard
from reshard.units import count_of
from reshard.writer.job import dumped

ORBAX = version("orbax-checkpoint")
DEVICES = f"orbax    {ORBAX} is installed; to restore without a target, it needs 8 devices"
NOTHING = "no _METADATA, no _CHECKPOINT_METADATA, no step directories, no zarr arrays"
GENERATED = "has a name that Linen generates"
VARIABLES = "model    linen-variables: collections at the top: `params`, `batch_stats`, ..."


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """A directory with `run`, a root of two steps."""
    folder = tmp_path_factory.mktemp("at").resolve()
    put = layouts.random_on(layouts.mesh((2, 4)))
    with ocp.CheckpointManager(folder / "run") as manager:
        for step in (3, 20):
            tree = {"params": {"Dense_0": {"kernel": put((256, 128), "data", "model")}}}
            manager.save(step, args=ocp.args.StandardSave(tree))
    return folder


@pytest.fixture
def copy(at, tmp_path):
    return shutil.copytree(at / "run", tmp_path.resolve() / "run")


def doctor(folder, *words):
    status, out, err = reshard_in(folder, "doctor", *words)
    assert err == ""
    return status, out.splitlines()


def data_files(path):
    """The files that hold the kernel's chunks."""
    chunks = reshard.open(path).source.store.values["params.Dense_0.kernel"].values()
    return {chunk.file for chunk in chunks} - {None}


def next_steps(path, *first):
    return [
        *(f"next     {command}" for command in first),
        f"next     reshard ckpt {path} DST --to MESH",
        f"next     reshard convert {path} DST --to nnx --model MODULE:NAME",
    ]


def test_a_complete_root(at):
    path = at / "run" / "20"
    files = data_files(path)
    assert doctor(at, "run") == (
        0,
        [
            f"{path}: complete",
            f"holds    1 array, 128.00 KiB in {count_of(len(files), 'data file')}",
            "format   a CheckpointManager root, OCDBT, zarr2",
            VARIABLES,
            "mesh     data=2,model=4",
            "steps    3, 20; shown: 20",
            "items    default; shown: default",
            "digests  recorded for 0 of 1 arrays",
            DEVICES,
            *next_steps(path, f"reshard digest {path} --write"),
        ],
    )
    status, lines = doctor(at, "run", "--step", "all")
    assert status == 0
    assert [line for line in lines if line.endswith(": complete")] == [
        f"{at / 'run' / step}: complete" for step in ("3", "20")
    ]


def test_the_document_of_a_whole_item_with_digests(copy):
    item = copy / "3" / "default"
    reshard.digest(copy / "3", write=True)
    status, out, _ = reshard_in(copy, "doctor", str(item), "--json")
    document = json.loads(out)
    assert (status, document["state"], document["path"]) == (0, "complete", str(item))
    [tree] = document["trees"]
    assert tree == {
        "path": str(item),
        "state": "complete",
        "kind": "item",
        "v1": False,
        "format": "OCDBT, zarr2",
        "api": "linen",
        "layout": "linen-variables",
        "why": ["collections are at the top: `params`", f"`params/Dense_0` {GENERATED}"],
        "meshes": [{"data": 2, "model": 4}],
        "steps": [],
        "step": None,
        "uncommitted": [],
        "items": [],
        "item": None,
        "arrays": 1,
        "bytes": 1 << 17,
        "files": len(data_files(item)),
        "unknown_types": [],
        "recorded_digests": 1,
        "orbax": DEVICES.removeprefix("orbax    "),
        "problems": [],
        "unfinished": [],
        "hints": [line.removeprefix("next     ") for line in next_steps(item)],
    }


def test_an_uncommitted_step(copy):
    uncommit(copy / "20")
    status, lines = doctor(copy, str(copy))
    assert (status, lines[0]) == (0, f"{copy / '3'}: complete")
    assert "steps    3; shown: 3; never committed: 20" in lines
    reason = "was never committed: its _CHECKPOINT_METADATA has no commit time"
    assert doctor(copy, "20") == (
        1,
        [
            "20: uncommitted",
            f"problem  `{copy / '20'}` {reason}",
            "next     use an earlier step: the writer stopped before this one was complete",
        ],
    )


def begin(copy, monkeypatch, words):
    """Writes the first of two shares of a job by a command; the directory of the job."""
    with monkeypatch.context() as patch:
        patch.chdir(copy)
        patch.setattr(sys, "argv", ["reshard", *words.split()])
        write = reshard.export if words.startswith("export") else reshard.save
        write(reshard.open(copy / "3"), copy / "out", share=(0, 2))
    [directory] = copy.glob(".reshard-out.*")
    return f"1 of 2 shares of an unfinished job are complete, in `{directory}`"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("ckpt 3 out", "reshard ckpt 3 out --resume"),
        ("ckpt 3 out --resume", "reshard ckpt 3 out --resume"),
        ("export 3 out --workers 2", "reshard export 3 out --workers 2 --resume"),
        ("ckpt 3 out --shard 0/2", "reshard ckpt 3 out --shard 1/2"),
    ],
)
def test_an_unfinished_job(copy, monkeypatch, words, command):
    text = begin(copy, monkeypatch, words)
    status, (state, *problems, by, hint) = doctor(copy, "out")
    assert (status, state, hint) == (1, "out: uncommitted", f"next     {command}")
    assert problems == ["problem  nothing exists at `out`", f"problem  {text}"]
    assert by.endswith(f": reshard {words}")
    assert doctor(copy / "3", "../out")[1][-1] == f"next     cd {copy} && {command}"


def test_a_running_job_is_not_continued(copy, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reshard", "ckpt", "run/3", "run/30"])
    with layouts.killed_at_the_end():
        reshard.save(reshard.open(copy / "3"), copy / "30")
    monkeypatch.setattr("reshard.cli.unfinished.has_ended", lambda owner: False)
    status, lines = doctor(copy, "30")
    assert (status, lines[-1][-16:]) == (1, " (still running)")


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"count": 1 << 40},
        {"owner": {}},
        {"owner": [1]},
        {"command": 5},
        {"folder": 7},
        {"part": 3},
        {"command": "reshard ckpt 3 out; rm -r x"},
        {"command": "reshard ckpt 3 'o\nut'"},
        {"folder": "a\nb"},
    ],
)
def test_the_document_of_a_job_may_be_untrusted(copy, wrong):
    """Its hash is no secret. It is damaged, or its command is not shown."""
    about = {"job": "j", "count": 2, "owner": {"pid": 1, "host": "h", "machine": ""}}
    about |= {"command": "reshard ckpt 3 out", "since": "now", "folder": "/nowhere"} | wrong
    name = f"{0:016x}"
    place = copy / f".reshard-x.{name}" / f"ocdbt.process_{name}" / "begun.json"
    place.parent.mkdir(parents=True)
    place.write_bytes(dumped(about))
    status, lines = doctor(copy, str(copy))
    assert status == 0 and any(line.startswith("job ") for line in lines)
    assert not [line for line in lines if "--resume" in line and line.startswith("next ")]


def test_a_job_in_a_directory_that_is_no_checkpoint(copy, monkeypatch):
    """The directory is no uncommitted checkpoint; the job is named nevertheless."""
    (copy / "work").mkdir()
    monkeypatch.setattr(sys, "argv", ["reshard", "ckpt", "3", "work/out"])
    with layouts.killed_at_the_end():
        reshard.save(reshard.open(copy / "3"), copy / "work" / "out")
    status, (first, *lines) = doctor(copy, "work")
    assert (status, first) == (2, "work: not a checkpoint")
    assert f"next     reshard commit {copy / 'work/out'}" in lines or "work/out" in lines[-1]


def test_other_commands_name_the_unfinished_job(copy, monkeypatch):
    text = begin(copy, monkeypatch, "ckpt 3 out")
    for words in (("inspect", "out"), ("digest", "out"), ("ckpt", "out", "x"), ("verify", "out")):
        status, out, err = reshard_in(copy, *words)
        first, second, *_, last = (out + err).splitlines()
        assert status == (1 if words[0] == "verify" else 2)
        assert first.removeprefix("Error: ") == "nothing exists at `out`"
        assert (second, last) == (f"  {text}", "hint: reshard ckpt 3 out --resume")


def problems_in(lines):
    return [line for line in lines if line.startswith("problem")]


def test_an_unfinished_job_in_a_root(copy, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reshard", "ckpt", "run/3", "run/30"])
    with layouts.killed_at_the_end():
        reshard.save(reshard.open(copy / "3"), copy / "30")
    monkeypatch.undo()
    status, lines = doctor(copy, str(copy))
    [directory] = copy.glob(".reshard-30.*")
    text = f"job      1 of 1 shares of an unfinished job are complete, in `{directory}`"
    first, who, finish, *_ = lines[lines.index(text) :]
    assert (status, first, finish) == (0, text, f"next     reshard commit {copy / '30'}")
    assert who.endswith(": reshard ckpt run/3 run/30 (ended)")


def test_a_converted_checkpoint_converts_back_without_a_model(copy):
    (copy / "map.toml").write_text("[[rule]]\nfrom = '^params/Dense_0/'\nto = 'dense/'")
    reshard.save(reshard.to_nnx(copy / "3", map_file=copy / "map.toml"), copy / "nnx")
    command = doctor(copy, "nnx")[1][-1]
    assert command == f"next     reshard convert {copy / 'nnx'} DST --to linen"
    assert reshard_in(copy, *command.replace("DST", "back").split()[2:])[0] == 0
    assert reshard.diff(copy / "back", copy / "3", values=True).equal


def test_missing_and_truncated_data_files(copy):
    path = copy / "20"
    files = (path / "default" / "ocdbt.process_0" / "d").iterdir()
    file = max(files, key=lambda file: file.stat().st_size)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    status, lines = doctor(copy, str(copy))
    assert (status, lines[0]) == (1, f"{path}: damaged")
    [problem] = problems_in(lines)
    assert f"params/Dense_0/kernel: its data file `{file}` has {len(data) // 2} bytes" in problem
    verify = f"next     reshard verify {path}"
    assert lines[-2:] == [verify, f"next     reshard doctor {copy} --step 3"]
    file.unlink()
    missing = f"problem  params/Dense_0/kernel: its data file `{file}` is missing"
    assert doctor(copy, "20")[1][-2:] == [missing, verify]


def test_many_problems_are_capped_on_the_terminal_alone(tmp_path):
    put = layouts.random_on(layouts.mesh((2, 4)))
    tree = {f"a{n}": put((16, 8), "data", "model") for n in range(12)}
    path = layouts.save_pytree(tmp_path / "saved", tree, use_ocdbt=False)
    for name in tree:
        (path / name / "0.0").unlink()
    status, lines = doctor(tmp_path, "saved")
    first, *others, last = problems_in(lines)
    assert (status, len(others), last) == (1, 9, "problem  ... and 2 more")
    assert first == "problem  a0: 1 of its 8 stored chunks are missing"
    document = json.loads(reshard_in(tmp_path, "doctor", "saved", "--json")[1])
    assert len(document["trees"][0]["problems"]) == 12


def test_a_tree_of_a_newer_orbax(copy):
    file = copy / "20" / "default" / "_METADATA"
    file.write_text(file.read_text().replace('"jax.Array"', '"jax.Array3"'))
    status, lines = doctor(copy, "20")
    assert (status, lines[0]) == (0, f"{copy / '20'}: complete")
    assert "unknown  params/Dense_0/kernel: jax.Array3" in lines
    update = "a newer Orbax may have written it: pip install -U orbax-checkpoint reshard"
    assert lines[[line.startswith("next") for line in lines].index(True)] == f"next     {update}"


def test_each_item_of_a_step(tmp_path):
    folder = tmp_path.resolve()
    tree = {"w": np.arange(6.0)}
    items = ocp.args.Composite(state=ocp.args.StandardSave(tree), ema=ocp.args.StandardSave(tree))
    with ocp.CheckpointManager(folder / "run", item_names=("state", "ema")) as manager:
        manager.save(1, args=items)
    status, lines = doctor(folder, "run")
    assert (status, lines.count("mesh     none")) == (0, 2)
    assert [x for x in lines if ": complete" in x or x.startswith("items")] == [
        f"{folder / 'run' / '1' / 'ema'}: complete",
        "items    ema, state; shown: ema",
        f"{folder / 'run' / '1' / 'state'}: complete",
        "items    ema, state; shown: state",
    ]
    shutil.rmtree(folder / "run" / "1" / "state" / "d")
    document = json.loads(reshard_in(folder, "doctor", "run", "--json")[1])
    assert document["state"] == "damaged"


def test_paths_that_are_not_checkpoints(tmp_path):
    """`test_loader.py` has the other kinds of files."""
    folder = tmp_path.resolve()
    (folder / "weights").mkdir()
    (folder / "weights/model.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    what = "is an HDF5 file, which is not supported"
    for path, *problems in (
        ("weights/model.h5", f"`weights/model.h5` {what}"),
        ("weights", f"`{folder / 'weights'}` is not a checkpoint", NOTHING, f"`model.h5` {what}"),
    ):
        found = [f"{path}: not a checkpoint", *(f"problem  {problem}" for problem in problems)]
        assert doctor(folder, path) == (2, found)
    status, lines = doctor(folder, "nowhere")
    assert (status, lines[0]) == (2, "nowhere: not a checkpoint")


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_a_bucket(at, stores, kind):
    url = f"{stores.bucket(kind)}/run/3"
    reshard.save(reshard.to_mesh(reshard.open(at / "run" / "3"), "1x8"), url)
    stores.reset()
    status, lines = doctor(at, url)
    assert status == 0
    assert lines[0] == f"{url}: complete"
    assert "mesh     data=1,model=8" in lines
    assert "digests  recorded for 1 of 1 arrays" in lines
    s3 = "orbax    it cannot read s3://: copy the checkpoint to a disk or to gs://"
    assert (s3 if kind == "s3" else DEVICES) in lines
    assert stores.answered("write") == []
    assert sum(r.received for r in stores.requests) < 1 << 16, "metadata alone"


def test_the_hint_for_a_damaged_latest_step(copy):
    for file in data_files(copy / "20"):
        (copy / "20" / "default" / file).unlink()
    err = reshard_in(copy, "ckpt", ".", "../out", "--to", "1x8")[2]
    assert "is missing\n" in err and "--step" not in err  # only errors of the metadata have a hint
    (copy / "20" / "default" / "_METADATA").write_text("{")
    for words in (("inspect", "."), ("ckpt", ".", "out")):
        err = reshard_in(copy, *words)[2]
        assert err.endswith("\n\nhint: --step 3 is the step before it\n")
    assert "--step" not in reshard_in(copy, "inspect", ".", "--step", "20")[2]
    assert doctor(copy, ".")[1][-1] == "next     reshard doctor . --step 3"


def test_a_step_of_several_items_is_proposed_whole(tmp_path):
    """A command for one of its items would lose the others."""
    folder, tree = tmp_path.resolve(), {"w": jax.numpy.arange(16.0)}
    names = ("state", "ema", "best")
    items = {name: ocp.args.StandardSave(tree) for name in names}
    with ocp.CheckpointManager(folder / "run", item_names=names) as manager:
        manager.save(50, args=ocp.args.Composite(**items))
    for path in ("run", "run/50"):
        commands = [x.removeprefix("next     ") for x in doctor(folder, path)[1] if "ckpt" in x]
        assert commands == [
            f"reshard ckpt {folder}/run/50 DST --item {name} --to data=1,model=8 "
            "--spec 'REGEX=AXES'"
            for name in sorted(names)
        ]
    words = shlex.split(commands[0])[1:]
    words = [{"DST": "out", "REGEX=AXES": "^w$=model"}.get(word, word) for word in words]
    status, _, err = reshard_in(folder, *words)
    assert (status, err) == (0, "")
    assert reshard.open(folder / "out", item="best").source.items == tuple(sorted(names))


def test_a_root_with_half_written_steps(copy):
    """All of them are named: unfinished ones, those that are only begun, and older ones."""
    (copy / "10" / "default.orbax-checkpoint-tmp").mkdir(parents=True)
    (copy / "40" / "default.orbax-checkpoint-tmp").mkdir(parents=True)
    (copy / "50.orbax-checkpoint-tmp-17").mkdir()
    uncommit(copy / "20")
    status, lines = doctor(copy, str(copy))
    assert (status, lines[0]) == (0, f"{copy / '3'}: complete")
    assert "steps    3; shown: 3; never committed: 10, 20, 40, 50" in lines
    assert reshard.open(copy).notes == tuple(
        f"step {step} was never committed and is left out" for step in (10, 20, 40, 50)
    )
