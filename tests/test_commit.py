"""Whole or not at all: what is at the destination, and at the source, however a job ends."""

import contextlib
import ctypes
import errno
import functools
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jobs import FORMATS, RESHARD, Killed, limited, refused, stop_at, unfinished, values
from layouts import hashes
from sampling import few

import reshard
from reshard.cli import command
from reshard.errors import KeptFilesError
from reshard.storage import disk, machine
from reshard.storage.location import Location, parse_location
from reshard.writer import commit, job, plan
from reshard.writer.export import plan_export
from reshard.writer.save import execute

pytestmark = pytest.mark.usefixtures("forked")
REPLACED = ".replaced-by-reshard"
LAYOUTS = ["standalone", "zarr2-files", "items"]


def aside(out):
    return sorted(out.parent.glob(f"{out.name}{REPLACED}.*"))


def open_on(source, mesh="1x8"):
    return reshard.to_mesh(reshard.open(source.path, **source.open), mesh)


def assert_copied(out, source, mesh="1x8", **kwargs):
    """It has the values of a source, on a mesh."""
    (found,) = reshard.open(out, **kwargs).meshes
    assert str(found) == "data={},model={}".format(*mesh.split("x"))
    assert values(out, **kwargs) == values(source, **kwargs)


def kept(saved):
    """A checkpoint that must be the same when the test ends."""
    before = hashes(saved.path)
    yield saved
    assert hashes(saved.path) == before


@pytest.fixture(params=LAYOUTS)
def source(request, saved):
    yield from kept(saved(request.param))


@pytest.fixture
def one(saved):
    yield from kept(saved("standalone"))


def not_saved(error, text, ckpt, out, **kwargs):
    assert issubclass(error, OSError)
    refused(error, text, reshard.save, ckpt, out, **kwargs)


# Before anything is written.


def test_an_existing_destination(source, tmp_path):
    out = tmp_path / "out"
    reshard.save(open_on(source), out)
    before = hashes(out)
    text = f"`{out}` exists\n\nhint: overwrite=True replaces it once the new one is complete"
    not_saved(reshard.DestinationExistsError, text, open_on(source, "1x4"), out)
    told = "a job can be continued only until its destination exists"
    resumed = text.replace("\n\n", f"\n  {told}\n\n")
    plan = reshard.plan(open_on(source), out)
    for _ in range(2):
        refused(reshard.DestinationExistsError, resumed, execute, plan, resume=True)
    assert plan.problems == (f"`{out}` exists",)
    assert reshard.plan(open_on(source, "2x4"), out).problems == (f"`{out}` exists",)
    assert hashes(out) == before
    reshard.save(open_on(source, "1x4"), out, overwrite=True)
    assert_copied(out, source.path, "1x4", **source.open)
    assert os.listdir(tmp_path) == ["out"]


def test_an_existing_directory_and_file(one, tmp_path):
    out, file = tmp_path / "empty", tmp_path / "file"
    out.mkdir()
    file.write_text("kept")
    with pytest.raises(reshard.DestinationExistsError, match=f"^`{out}` exists\n"):
        reshard.save(open_on(one), out)
    text = f"`{file}` is a file or a symbolic link, not a directory"
    for overwrite in (False, True):
        not_saved(reshard.DestinationExistsError, text, open_on(one), file, overwrite=overwrite)
    for out in (file / "out", file / "deep" / "out"):
        with pytest.raises(reshard.DestinationError, match=f"^`{out}` cannot be written: "):
            reshard.save(open_on(one), out)
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("best", "it is not a checkpoint"),
        ("10", "it is a manager's root, but the new one is a single checkpoint"),
    ],
)
def test_overwrite_deletes_nothing_but_what_it_replaces(one, tmp_path, name, reason):
    out = tmp_path / "out"
    shutil.copytree(one.path, out / name)
    (out / "thesis.tex").write_text("years")
    before = hashes(out)
    text = f"`{out}` would be deleted: {reason}"
    hint = "\n\nhint: choose another destination, or move the existing one away"
    not_saved(reshard.DestinationExistsError, text + hint, open_on(one), out, overwrite=True)
    assert hashes(out) == before
    assert reshard.plan(open_on(one), out, overwrite=True).problems == (text,)


def test_overwrite_loses_no_step(saved, tmp_path):
    source = saved("manager")
    root = reshard.open(source.path)
    out = tmp_path / "out"
    every = [reshard.open(source.path, step=step) for step in root.source.steps]
    reshard.save(every, out)
    before = hashes(out)
    lost = ", ".join(map(str, root.source.steps[:-1]))
    with pytest.raises(reshard.DestinationExistsError, match=f"its steps {lost} would be lost"):
        reshard.save(root, out, overwrite=True)
    assert hashes(out) == before
    plan = reshard.save([reshard.to_mesh(c, "1x8") for c in every], out, overwrite=True)
    assert f"`{out}` is replaced once the new checkpoint is complete" in plan.notes
    assert_copied(out, source.path)


def test_source_and_destination_inside_one_another(saved, tmp_path):
    whole = saved("items")
    before = hashes(whole.path)
    (tmp_path / "alias").symlink_to(whole.path)
    step = whole.path / "3"
    inside = [whole.path, tmp_path / "alias" / "new", step / ".." / "4", whole.path.parent]
    for path, out in [(whole.path, out) for out in inside] + [(step, whole.path)]:
        out = pathlib.Path(os.path.abspath(out))
        text = f"the destination `{out}` and the source `{path}` overlap\n\n"
        text += "hint: write to another path, check the result, then rename it"
        for overwrite in (False, True):
            not_saved(reshard.DestinationError, text, reshard.open(path), out, overwrite=overwrite)
    assert hashes(whole.path) == before


def test_parents_are_made_and_only_begin_like_the_source(one):
    folder = one.path.with_name(one.path.name + "-2")
    reshard.save(open_on(one), folder / "a" / "out", overwrite=True)
    assert os.listdir(folder / "a") == ["out"]
    assert_copied(folder / "a" / "out", one.path)
    shutil.rmtree(folder)


def test_too_little_room(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: mock.Mock(free=3000))
    out = tmp_path / "deep" / "out"
    text = rf"^not enough disk space for `{out}`\n  needed \S+ KiB, free 2.93 KiB$"
    with pytest.raises(reshard.DestinationError, match=text):
        reshard.save(open_on(source), out)
    assert os.listdir(tmp_path) == []


def test_too_little_room_for_a_bound(tmp_path, monkeypatch):
    """The values compress well, which the plan of a cast cannot know. A file's size is exact."""
    saved = layouts.save_pytree(tmp_path / "saved", {"mu": np.zeros((256, 256), "float32")})
    ckpt, usage = reshard.open(saved), mock.Mock()
    usage.free = plan_export(ckpt, tmp_path / "files").bytes_written
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert plan_export(ckpt, tmp_path / "files").problems == ()
    usage.free = 90000
    with pytest.raises(reshard.DestinationError, match=r"^not enough disk space"):
        reshard.export(ckpt, tmp_path / "files")
    half = reshard.cast(ckpt, "bfloat16")
    reshard.save(half, tmp_path / "out")


# While it runs.


def test_a_destination_made_meanwhile(one, tmp_path):
    out = tmp_path / "out"

    def make(*_):
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("kept")

    text = f"`{out}` was created by another job meanwhile\n\nhint: overwrite=True starts again"
    not_saved(reshard.DestinationExistsError, text, open_on(one), out, progress=make)
    assert hashes(tmp_path).keys() == {"out", "out/theirs"}


@pytest.mark.parametrize(("error", "overwrite"), [(KeyboardInterrupt, False), (RuntimeError, True)])
def test_an_interrupt_leaves_nothing(source, tmp_path, error, overwrite):
    out = tmp_path / "out"
    if overwrite:
        reshard.save(open_on(source, "1x4"), out)
    before = hashes(tmp_path)
    with pytest.raises(error):
        reshard.save(open_on(source), out, overwrite=overwrite, progress=stop_at(0, error))
    assert hashes(tmp_path) == before


@pytest.mark.parametrize("step", ["sync", "write", "copy"])
def test_an_io_error_leaves_nothing(saved, tmp_path, monkeypatch, step):
    source, out = saved("items"), tmp_path / "out"
    before = hashes(source.path)

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    where = Location if step in ("write", "copy") else disk
    monkeypatch.setattr(where, step, full)
    text = rf"^`{out}` cannot be written: No space left on device\n  .+$"
    with pytest.raises(reshard.DestinationError, match=text):
        reshard.save(open_on(source), out)
    assert os.listdir(tmp_path) == []
    assert hashes(source.path) == before


@pytest.mark.parametrize("layout", FORMATS)
def test_a_failing_write_leaves_nothing(big, tmp_path, layout):
    path = big(layout)
    before = hashes(path)
    ckpt = reshard.to_mesh(reshard.open(path), "1x8")
    text = r"^the destination cannot be written\n  "
    with limited(100_000), pytest.raises(reshard.DestinationError, match=text):
        reshard.save(ckpt, tmp_path / "out")
    assert os.listdir(tmp_path) == []
    assert hashes(path) == before


def without_override():
    """Root may write anywhere, unless it gives that up."""
    drop_from_bounding_set, override = 24, 1
    ctypes.CDLL(None).prctl(drop_from_bounding_set, override, 0, 0, 0)


@pytest.mark.parametrize("option", few(["--quiet", "--overwrite", "--resume"], "--overwrite"))
def test_a_destination_that_is_read_only(one, tmp_path, option):
    folder = tmp_path / "folder"
    folder.mkdir()
    if option == "--overwrite":
        reshard.save(open_on(one, "1x4"), folder / "out")
    before = hashes(tmp_path)
    folder.chmod(0o555)
    words = [RESHARD, "ckpt", one.path, folder / "out", "--to", "1x8", option]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, preexec_fn=without_override, **streams)
    shown, _ = process.communicate()
    folder.chmod(0o755)
    text = f"Error: `{folder}/out` cannot be written: Permission denied\n"
    assert process.returncode == 2
    assert re.fullmatch(rf"{text}  {folder}/\.reshard-out\.[0-9a-f]{{16}}.*\n", shown)
    assert hashes(tmp_path) == before


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    specs = {f"w{i}": P("data", "model") for i in range(4)}

    @functools.cache
    def get(layout):
        tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (1024, 1024))
        folder = tmp_path_factory.mktemp("big")
        return layouts.save_pytree(folder / "saved", tree, **FORMATS[layout])

    return get


# A file that becomes shorter is not among them: files are mapped, and the system ends a process
# that reads a mapped page beyond the end.
CHANGES = [os.utime, os.unlink]


@pytest.mark.parametrize(
    ("layout", "change", "share_bytes"),
    [
        *(("zarr2", change, 1 << 30) for change in CHANGES),
        ("zarr3", shutil.rmtree, 1 << 30),
        ("zarr3", lambda path: path.rename(f"{path}-2"), 1 << 30),
        ("zarr3", os.utime, 1 << 21),
    ],
)
def test_a_source_that_changes_meanwhile(big, tmp_path, monkeypatch, layout, change, share_bytes):
    monkeypatch.setattr(plan, "SHARE_BYTES", share_bytes)
    copy = shutil.copytree(big(layout), tmp_path / "source" / "copy")
    file = max(copy.glob("**/*/*"), key=lambda file: (file.stat().st_size, file))
    out, changed = tmp_path / "new" / "out", []

    def progress(done, whole):
        if done > whole // 2 and not changed:
            changed.append(file)
            change(file if change in CHANGES else copy)

    ckpt = reshard.to_mesh(reshard.open(copy), "1x8")
    options = {"max_memory": "16MiB", "progress": progress}
    what = "has changed since it was opened" if change is os.utime else "was removed"
    with pytest.raises(reshard.ChangedCheckpointError) as caught:
        reshard.save(ckpt, out, **options)
    assert f"`{file}` {what}" in (caught.value.summary, *caught.value.problems)
    left = [f"rm -r '{out.parent / name}', then start again" for name in os.listdir(out.parent)]
    assert [*caught.value.hints] == (left or ["open it again: reshard.open(path)"])
    assert len(left) == (share_bytes < 1 << 30)


@pytest.mark.parametrize("step", ["7", "step_7"])
def test_a_manager_that_cleans_up_beside_a_job(one, tmp_path, step):
    """It removes what other writers have begun in its root, but nothing of ours; nor does it take
    that for a step."""
    prefix = step.rpartition("_")[0] or None
    root = tmp_path / "root"
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, step_prefix=prefix)
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": np.arange(4)}))
    out = root / step
    reshard.save(open_on(one, "1x4"), out)
    swept = root / "9.orbax-checkpoint-tmp"
    listed = []

    def manage(*_):
        replaced = root / f"{step}{REPLACED}.0123456789abcdef"
        shutil.copytree(out, replaced, dirs_exist_ok=True)
        swept.mkdir(exist_ok=True)
        with ocp.CheckpointManager(root, options=options) as manager:
            manager.wait_until_finished()
            listed.append((sorted(manager.all_steps()), sorted(ocp.utils.checkpoint_steps(root))))
        listed.append([*reshard.open(root).source.steps])
        assert [*unfinished(out)[0].glob("*/begun.json")]
        assert replaced.exists() and not swept.exists()
        shutil.rmtree(replaced)

    reshard.save(open_on(one), out, overwrite=True, progress=manage)
    assert [3, 7] in listed and ([3, 7], [3, 7]) in listed
    assert all(found in ([3, 7], ([3, 7], [3, 7])) for found in listed)
    assert_copied(out, one.path)


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    ("fails", "replaces"), [("sync", False), ("sync", True), ("remove_files", True)]
)
def test_what_cannot_be_done_after_the_commit(one, tmp_path, monkeypatch, capsys, fails, replaces):
    """The command has done its work. What it replaces is deleted only once the disk has the new
    name, and may be left."""
    out = tmp_path / "out"
    if replaces:
        reshard.save(open_on(one, "1x4"), out)
    before = hashes(out)
    where = disk if fails == "sync" else Location
    function = getattr(where, fails)

    def refuse(place, *args, **kwargs):
        refused = [tmp_path] if fails == "sync" else aside(out)
        if str(place) in map(str, refused):
            raise OSError(errno.EIO, "Input/output error", str(place))
        function(place, *args, **kwargs)

    monkeypatch.setattr(where, fails, refuse)
    arguments = ["ckpt", str(one.path), str(out), "--to", "1x8", "--overwrite", "--json"]
    command.main(arguments, standalone_mode=False)
    left = unfinished(out) + aside(out)
    path = tmp_path if fails == "sync" else left[0]
    told = f"`{out}` is complete, but the cleanup failed: `{path}`: Input/output error"
    if replaces:
        told += f"; rm -r '{left[0]}' deletes the replaced checkpoint"
    found = capsys.readouterr()
    assert found.err == f"Warning: {told}\n"
    assert json.loads(found.out)["done"] is True
    assert sorted(os.listdir(tmp_path)) == sorted(["out", *(path.name for path in left)])
    assert [hashes(path) for path in left] == [before] * replaces
    assert_copied(out, one.path)


# A job that is stopped in the middle.
JOB = """
import sys
import reshard

source, out = sys.argv[1:]
ckpt = reshard.to_mesh(reshard.open(source), "1x8")

def wait(done, whole, waited=[]):
    if not waited:
        waited.append(True)
        print("in the middle", flush=True)
        sys.stdin.readline()

reshard.save(ckpt, out, progress=wait, max_memory="16MiB", chunks="keep")
"""


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_two_processes_that_write_one_destination(one, tmp_path, option, dies):
    out = tmp_path / "out"
    command = [RESHARD, "ckpt", one.path, out, "--to", "1x4", "--quiet"]
    words = [sys.executable, "-c", JOB, one.path, out]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **streams) as first:
        try:
            assert first.stdout.readline() == "in the middle\n"
            second = subprocess.run([*command, option], capture_output=True, text=True, check=False)
        finally:
            if dies:
                first.kill()
            first.communicate("\n")
        assert first.returncode == (-signal.SIGKILL if dies else 0)
    assert (second.returncode, second.stdout) == (2, "")
    who = re.escape(f"another job is writing `{out}`\n  process {first.pid} on {platform.node()}, ")
    told = r"since [-\d]+ [:\d]+ UTC: -c .*\n\nhint: wait until it ends\n"
    told += "hint: --resume continues it\nhint: --overwrite starts again\n"
    assert re.fullmatch(f"Error: {who}{told}", second.stderr)
    if dies:
        subprocess.run([*command, "--overwrite"], check=True)
    assert os.listdir(tmp_path) == ["out"]
    assert_copied(out, one.path, "1x4" if dies else "1x8")


def test_a_checkpoint_that_another_job_puts_aside_meanwhile_stays(one, tmp_path, monkeypatch):
    """Where the system cannot exchange names: a job finds an old checkpoint put aside. Before it
    deletes that, another job does, puts the only checkpoint aside, and is killed."""
    out = tmp_path / "out"
    reshard.save(open_on(one), out)
    before = hashes(out)
    shutil.copytree(out, tmp_path / f"out{REPLACED}")
    rename = disk.rename
    done = []

    def killed(source, target):  # after the second rename
        if len(done) == 2:
            raise OSError(errno.EIO, "killed")
        done.append(target)
        return rename(source, target)

    def late(source, target):
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
        monkeypatch.setattr(disk, "rename", killed)
        with pytest.raises(reshard.DestinationError, match="killed"):
            reshard.save(open_on(one, "1x4"), out, overwrite=True)
        monkeypatch.undo()
        return rename(source, target)

    monkeypatch.setattr(disk, "rename", late)
    commit.begin(parse_location(out), "0" * 16, overwrite=True)
    assert before in [hashes(path) for path in tmp_path.iterdir()]


@pytest.mark.parametrize("commits", [False, True])
def test_killed_between_two_renames(one, tmp_path, monkeypatch, commits):
    """Where the system cannot exchange names: the old one gets its name back, or the job is
    committed and the old one is deleted."""
    out, done = tmp_path / "out", []
    reshard.save(open_on(one, "1x4"), out)
    before = hashes(out)
    rename = disk.rename

    def killed(source, target):
        if len(done) == 2:
            raise Killed
        done.append(target)
        return rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        gone = {**machine.this_process(), "started": "before"}
        patch.setattr(job, "this_process", lambda: gone)
        patch.setattr(job.Attempt, "abandon", mock.Mock(side_effect=Killed))
        patch.setattr(disk, "exchange", lambda *_: False)
        patch.setattr(disk, "rename", killed)
        reshard.save(open_on(one), out, overwrite=True)
    assert not out.exists()
    [replaced] = aside(out)
    assert hashes(replaced) == before
    with pytest.raises(reshard.DestinationExistsError, match=f"^`{out}` exists"):
        reshard.save(open_on(one), out)
    assert hashes(replaced) == before
    (mine := replaced / "mine.txt").write_text("mine")
    with pytest.raises(
        reshard.DestinationExistsError, match=f"`{mine}`\n\nhint: .*\nhint: rm -r '{mine}'"
    ):
        reshard.save(open_on(one), out, overwrite=True)
    mine.unlink()
    if commits:
        assert reshard.commit(out)
    else:
        reshard.save(open_on(one), out, overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    assert_copied(out, one.path)


def test_what_is_aside_and_was_not_seen_stays(one, tmp_path):
    out = tmp_path / "out"
    reshard.save(open_on(one), out)
    replaced = tmp_path / f"out{REPLACED}.0123456789abcdef"
    shutil.copytree(out, replaced)
    before = hashes(replaced)
    plan = reshard.plan(open_on(one, "1x4"), out, overwrite=True)
    text = f"`{replaced}` has files that an earlier job has not deleted with an old checkpoint"
    assert text in plan.notes
    execute(plan)
    assert hashes(replaced) == before
    assert_copied(out, one.path, "1x4")


# What is not part of a checkpoint.

NAMES = ["notes.txt", ".DS_Store", "config.yaml", "README.md", "_METADATA.bak", "0.0.bak", "7b"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_of_others_is_ever_deleted(saved, tmp_path_factory, data):
    """Beside steps, beside items, in items, in databases and arrays, in exports; there before the
    job, made while it runs, or in the last moment: it is refused and all is there, or it is done
    and all is there."""
    parent = tmp_path_factory.mktemp("others")
    layout = data.draw(st.sampled_from(["manager", "step", "zarr2-files", "zarr3-files", "export"]))
    source = reshard.open(saved("standalone" if layout == "export" else layout).path)
    if layout == "export":
        source = reshard.select(source, "params/**")
    write = reshard.export if layout == "export" else reshard.save
    out = parent / "out"
    write(source, out)
    old = hashes(out)
    folders = sorted({out, *(path for path in out.rglob("*") if path.is_dir())})
    folder = st.tuples(st.sampled_from(folders), st.sampled_from(["", "new"]))
    places = st.lists(st.tuples(folder, st.sampled_from(NAMES)), min_size=1, max_size=3)
    files = [folder / new / name for (folder, new), name in data.draw(places)]
    when = data.draw(st.sampled_from(["before", "during", "at the exchange"]))
    exchange = disk.exchange

    def put(*_):
        for file in files:
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                file.write_text(str(file))

    def late(*names):
        put()
        return exchange(*names)

    told = dict.fromkeys(["before", "during"], reshard.DestinationExistsError)
    told["at the exchange"] = KeptFilesError
    if when == "before":
        put()
    with (
        mock.patch.object(disk, "exchange", late if when == "at the exchange" else exchange),
        pytest.raises(told[when]),
    ):
        write(source, out, overwrite=True, progress=put if when == "during" else None)
    if when != "at the exchange":
        assert hashes(out).items() >= old.items()
    for _ in range(2):
        found = {path.read_text() for path in parent.rglob("*") if path.name in NAMES}
        assert found == {str(file) for file in files}
        with contextlib.suppress(reshard.DestinationExistsError):
            write(source, out, overwrite=True)
    if when == "at the exchange":
        assert reshard.verify(out).ok


@pytest.mark.parametrize(
    ("layout", "name"),
    [("standalone", "mine.safetensors"), ("manager", "metadata/_ROOT_METADATA")],
)
def test_names_that_other_checkpoints_have(saved, tmp_path, layout, name):
    """They are refused alone: the file of an export in an item, metadata of a run that are not
    copied again."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(saved(layout).path, source)
    shutil.rmtree(source / "metadata", ignore_errors=True)
    reshard.save(reshard.open(source), out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    before = hashes(out)
    text = f"`{out}` holds files that are not part of the checkpoint\n  `{out / name}`\n\n"
    text = text.replace("/_ROOT_METADATA", "")
    with pytest.raises(reshard.DestinationExistsError, match=re.escape(text)):
        reshard.save(reshard.open(source), out, overwrite=True)
    assert hashes(out) == before


@pytest.mark.parametrize("recorded", [True, False])
def test_a_copied_file_that_somebody_has_edited_stays(saved, tmp_path, recorded):
    """Unless it is an item's, which is written again, or has the bytes that are copied."""
    root, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(saved("manager").path, root)
    (root / "config.yaml").write_text("width: 3")
    steps = [reshard.open(root, step=step) for step in reshard.open(root).source.steps]
    if recorded:
        reshard.save(steps, out)
    else:
        shutil.copytree(root, out)
    (out / "config.yaml").write_text("width: 4, by hand")
    metrics = steps[-1].source.step + "/metrics/metrics"
    (out / metrics).write_text("{}")
    before = hashes(out)
    text = f"`{out}` holds files that are not part of the checkpoint\n  `{out / 'config.yaml'}`\n\n"
    for _ in range(2):
        with pytest.raises(reshard.DestinationExistsError, match=re.escape(text)):
            reshard.save(steps, out, overwrite=True)
        assert hashes(out) == before
    (root / "config.yaml").write_text("width: 4, by hand")
    steps = [reshard.open(root, step=step) for step in reshard.open(root).source.steps]
    reshard.save(steps, out, overwrite=True)
    assert (out / "config.yaml").read_text() == "width: 4, by hand"
    assert (out / metrics).read_bytes() == (root / metrics).read_bytes()


def test_what_a_job_has_copied_is_replaced(saved, tmp_path):
    """It is copied again, or it is what an earlier job has copied."""
    root, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(saved("manager").path, root)
    (root / "config.yaml").write_text("width: 3")
    steps = [reshard.open(root, step=step) for step in reshard.open(root).source.steps]
    for _ in range(2):
        reshard.save(steps, out, overwrite=True)
        assert (out / "config.yaml").read_text() == "width: 3"
    reshard.digest(reshard.open(out), write=True)
    (root / "config.yaml").unlink()
    steps = [reshard.open(root, step=step) for step in reshard.open(root).source.steps]
    planned = reshard.plan(steps, out, overwrite=True)
    (out / "config.yaml").write_text("width: 4")
    text = f"`{out}` has changed during the job\n  `{out / 'config.yaml'}`"
    with pytest.raises(reshard.DestinationExistsError, match=re.escape(text)):
        execute(planned)
    text = f"`{out}` holds files that are not part of the checkpoint\n  `{out / 'config.yaml'}`\n\n"
    hints = "hint: choose another destination, or move these files away\n"
    hints += f"hint: rm -r '{out / 'config.yaml'}'"
    refused(reshard.DestinationExistsError, text + hints, reshard.save, steps, out, overwrite=True)
    (out / "config.yaml").write_text("width: 3")
    reshard.save(steps, out, overwrite=True)
    assert not (out / "config.yaml").exists()
