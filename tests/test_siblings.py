"""Other items of a step, and other files: their copies, in the plan and in the progress."""

import collections
import functools
import os
import pathlib
import shutil

import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jobs import FORMATS, MARKER, RECORD, assert_pruned, inodes, put, unfinished
from layouts import hashes
from orbax.checkpoint._src.serialization import tensorstore_utils

import reshard
from reshard.storage.location import Location, parse_location

TREES = ("state", "ema")
# Files that look like those of arrays.
DECOYS = ["3/extra/d/ab12", "3/extra/manifest.ocdbt", "3/ema/d/README", "3/ema/1", "notes/d/ab"]
DECOYS += ["3/extra/x/.zarray", "3/extra/x/0.0", "3/extra/y/zarr.json", "3/extra/y/c/0"]


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """A manager's root of each format: a step with two trees and a document, and notes."""

    @functools.cache
    def get(name):
        rng = np.random.default_rng([*FORMATS].index(name))
        root = tmp_path_factory.mktemp("siblings") / "root"
        with ocp.CheckpointManager(root, item_names=(*TREES, "cfg")) as manager:
            items = {item: ocp.args.PyTreeSave({"w": np.ones(1)}) for item in TREES}
            cfg = ocp.args.JsonSave({"width": 3})
            manager.save(3, args=ocp.args.Composite(**items, cfg=cfg))
        for item in TREES:
            shapes = {"w": (96, 64), "c": (8, 8, 2)}
            tree = {name: put(rng, shape, "data", "model") for name, shape in shapes.items()}
            shutil.rmtree(root / "3" / item)
            layouts.save_pytree(root / "3" / item, tree, **FORMATS[name])
        if name == "zarr2":
            layouts.split_database(root / "3" / "ema")
        (root / "notes" / "none").mkdir(parents=True)
        (root / "notes" / "today").write_text("rain")
        for path in DECOYS:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(path)
        (root / ".reshard-9.0123456789abcdef").mkdir()  # another job has left it
        return root

    return get


@pytest.fixture
def root(roots, tmp_path):
    return pathlib.Path(shutil.copytree(roots("zarr2"), tmp_path / "source"))


def opened(root):
    return reshard.to_mesh(reshard.open(root, item="state"), "1x8")


def contents(root, paths):
    return {path: (root / path).read_bytes() for path in paths}


def copies(root, item="state"):
    """The paths that are copied: all but the marker and the files of the written item."""
    kept = f"3/{item}/_CHECKPOINT_METADATA"
    found = {path for path in inodes(root) if path == kept or not path.startswith(f"3/{item}/")}
    return found - {f"3/{MARKER}"}


def bytes_of(root):
    return sum((root / path).stat().st_size for path in copies(root))


def assert_copied(root, out):
    assert contents(out, copies(root)) == contents(root, copies(root))
    for item in TREES:
        assert reshard.verify(reshard.open(out, item=item), reshard.open(root, item=item)).ok


@pytest.fixture
def reads(monkeypatch):
    found = collections.Counter()
    original = Location.copy

    def copy(source, *rest):
        found[str(source)] += 1
        return original(source, *rest)

    monkeypatch.setattr(Location, "copy", copy)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_other_items_are_copied(roots, tmp_path, name):
    root, out = roots(name), tmp_path / "out"
    before = hashes(root)
    planned = reshard.plan(opened(root), out)
    done = reshard.save(opened(root), out)
    assert not {*inodes(root).values()} & {*inodes(out).values()}
    assert (out / "notes" / "none").is_dir() and sorted(os.listdir(out)) == ["3", "notes"]
    written = f"step 3 of `{root}` -> `{out}/3`"
    for made, notes in ((planned, [written]), (done, [written]), (reshard.plan(opened(root)), [])):
        assert made.notes == ("item ema is not part of the job and is copied unchanged", *notes)
        assert (made.shared_bytes, made.other_bytes) == (0, bytes_of(root))
        own = sum(array.bytes_written for array in made.arrays)
        assert made.bytes_written == own + made.other_bytes
    assert hashes(root) == before
    assert_copied(root, out)
    both = (layouts.load_pytree(path / "3" / "ema") for path in (out, root))
    layouts.assert_same_tree(*both)
    # Those that a job has written, too.
    reshard.save(reshard.open(out, item="ema"), tmp_path / "again")
    again = copies(out, "ema")
    assert contents(tmp_path / "again", again) == contents(out, again)


@pytest.fixture(params=["Orbax", "one database"])
def split(request, tmp_path, monkeypatch):
    """A tree, and its checkpoint, with values and nodes in separate folders: in one database, or in
    merged ones by Orbax, which has no public option for that."""
    tree = {"w": put(np.random.default_rng(5), (96, 64), "data", "model"), "one": np.float32(0.3)}
    if request.param == "Orbax":
        name, on = "OcdbtKvStoreWriteOptions", {"store_ocdbt_metadata_and_values_separately": True}
        make = getattr(tensorstore_utils, name, None)
        if make is None:
            pytest.skip("this release of Orbax cannot")
        monkeypatch.setattr(tensorstore_utils, name, lambda **options: make(**options | on))
    path = layouts.save_pytree(tmp_path / "source", tree)
    if request.param != "Orbax":
        layouts.split_database(path)
    monkeypatch.undo()
    assert {"ocdbt_meta", "ocdbt_data"} <= {found.name for found in path.rglob("*")}
    return tree, path


def test_files_of_a_split_database_are_not_copied(split, tmp_path):
    tree, source = split
    before = hashes(source)
    jobs = [("2x4", {}), ("2x4", {"link": False}), ("1x8", {}), ("2x4", {"ocdbt": False})]
    for number, (mesh, options) in enumerate(jobs):
        out = tmp_path / f"out{number}"
        reshard.save(reshard.to_mesh(reshard.open(source), mesh), out, **options)
        assert_pruned(out)
        found = {path.name for path in out.rglob("*")}
        assert ("ocdbt_data" in found) == (number == 0), "linked"
        assert not found & {"ocdbt_meta", "ocdbt_tmp_meta"}
        lost = {path.name for path in source.iterdir()} - found
        assert all("ocdbt" in name for name in lost)
        layouts.assert_same_tree(layouts.load_pytree(out), layouts.plain_scalars(tree))
    assert hashes(source) == before


@pytest.mark.usefixtures("short_tries")
def test_items_that_a_job_has_written_are_copied_into_a_bucket(root, tmp_path, stores):
    url = f"{stores.bucket('s3')}/out"
    for item in (*TREES, "cfg"):
        (root / "3" / item / MARKER).write_text("of the source")
    reshard.save(opened(root), tmp_path / "one")
    reshard.save(reshard.open(tmp_path / "one", item="ema"), url)
    for item in TREES:
        told = f"Checkpoint commit was successful to {url}/3/{item}".encode()
        assert parse_location(f"{url}/3/{item}/{MARKER}").read() == told
        assert reshard.verify(reshard.open(url, item=item), reshard.open(root, item=item)).ok


@pytest.mark.parametrize("part", ["whole", "half", "gone"])
def test_an_item_that_is_being_deleted_is_not_copied(root, tmp_path, part):
    """Nor is the record of the deletion: it would hide another item of that name."""
    layouts.record_deletion(root / "3", "ema")
    if part != "whole":
        (root / "3" / "ema" / "_METADATA").unlink()
    if part == "gone":
        shutil.rmtree(root / "3" / "ema")
    out = tmp_path / "out"
    reshard.save(opened(root), out)
    record = "3/_CHECKPOINT_DELETION"
    expected = {p for p in copies(root) if not p.startswith("3/ema/") and p != record}
    assert contents(out, expected) == contents(root, expected)
    assert not (out / "3" / "ema").exists() and not (out / record).exists()
    copy = reshard.open(out, item="state")
    assert copy.source.items == ("cfg", "extra", "state")
    assert reshard.verify(copy, opened(root)).ok


@pytest.mark.parametrize("recorded", [False, True])
def test_siblings_are_read_once_and_not_for_a_plan(root, tmp_path, reads, recorded):
    if recorded:
        reshard.digest(reshard.open(root, item="state"), write=True)
        reads.clear()
    reshard.plan(opened(root), tmp_path / "out")
    assert not reads.keys() & {f"{root}/{path}" for path in copies(root)}
    reads.clear()
    told = []
    plan = reshard.save(opened(root), tmp_path / "out", progress=lambda *now: told.append(now))
    assert {reads[f"{root}/{path}"] for path in copies(root)} == {1}
    # And they count as progress.
    done, whole = zip(*told, strict=True)
    others = bytes_of(root)
    assert set(whole) == {done[-1]} == {others + sum(a.decoded_bytes for a in plan.arrays)}
    assert list(done) == sorted(done)


def test_siblings_in_the_record_of_an_earlier_version(root, tmp_path):
    reshard.digest(reshard.open(root, item="state"), write=True)
    file = root / "3" / "state" / RECORD
    layouts.edit_document(file, beside={"cfg/metadata": "0" * 64})
    told = f"the file `{root}/3/cfg/metadata`: "
    found = reshard.verify(reshard.open(root, item="state"))
    assert found.problems == (f"{told}it differs from the recorded one",)
    reshard.save(opened(root), tmp_path / "out")
    (root / "3" / "cfg" / "metadata").unlink()
    text = layouts.refused(
        reshard.CorruptCheckpointError, reshard.save, opened(root), tmp_path / "again"
    )
    assert f"{told}recorded, but missing\n" in text
    hint = f'hint: reshard.verify(reshard.open("{root}/3", item="state"))\n'
    assert text.endswith(f"{hint}hint: rm '{file}' deletes the record")


def stopped(root, out, **options):
    """The directory of a job that has copied all siblings, and was killed."""
    with layouts.killed_at_the_end():
        reshard.save(opened(root), out, **options)
    (left,) = unfinished(out)
    return left


def test_a_resumed_job_copies_none_again(root, tmp_path, reads):
    out = tmp_path / "out"
    before = {*inodes(stopped(root, out)).values()}
    reads.clear()
    reshard.save(opened(root), out, resume=True)
    assert not reads.keys() & {f"{root}/{path}" for path in copies(root)}
    after = inodes(out)
    assert {after[path] for path in copies(root)} <= before
    assert_copied(root, out)


@pytest.mark.parametrize("change", [pathlib.Path.unlink, lambda file: os.truncate(file, 1)])
def test_damaged_copies_of_an_earlier_run_are_copied_again(root, tmp_path, change):
    """Where that is not all there; and notes that have other words, as many."""
    out = tmp_path / "out"
    staged = stopped(root, out).glob("3/state/ocdbt.process_*files/*")
    change(max(staged, key=lambda file: file.stat().st_size))
    (root / "notes" / "today").write_text("snow")
    reshard.save(opened(root), out, resume=True)
    assert copies(out) - {f"3/state/{RECORD}"} == copies(root)
    assert_copied(root, out)


BESIDE = [
    ("3/cfg/metadata", lambda path: path.write_text('{"width": 99}')),
    ("3/cfg/metadata", lambda path: shutil.rmtree(path.parent)),
    ("3/_CHECKPOINT_METADATA", pathlib.Path.unlink),
]


@pytest.mark.parametrize(("where", "change"), BESIDE[:2])
def test_resuming_after_the_source_changed(root, tmp_path, where, change):
    out = tmp_path / "new" / "out"
    kept = stopped(root, out)
    before = hashes(kept)
    change(root / where)
    text = f"the unfinished job for `{out}` is not this job\n  its arguments, its source or its "
    error = layouts.raised(reshard.DestinationError, reshard.save, opened(root), out, resume=True)
    assert str(error).startswith(text) and error.hints[-1] == "overwrite=True starts again"
    assert hashes(kept) == before
    reshard.save(opened(root), out, overwrite=True)
    assert copies(out) == copies(root)
    assert_copied(root, out)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("where", "change"), BESIDE)
def test_the_source_changes_during_the_job(root, tmp_path, where, change, resume):
    out, changed = tmp_path / "new" / "out", []

    def progress(done, whole):
        if not changed:
            changed.append(change(root / where))

    end = "has changed since it was opened\n  it had 12 bytes, modified at 20"
    text = f"`{root / where}` {end if change is BESIDE[0][1] else 'was removed'}"
    options = {"resume": resume, "progress": progress}
    told = layouts.refused(
        reshard.ChangedCheckpointError, reshard.save, opened(root), out, **options
    )
    assert text in told
    assert os.listdir(out.parent) == []


def test_names_that_are_new_during_the_job(root, tmp_path):
    """They are of no checkpoint that was opened."""
    out, before = tmp_path / "out", copies(root)

    def progress(done, whole):
        (root / "3" / "cfg" / "more").write_text("{}")
        shutil.copytree(root / "3" / "ema", root / "3" / "ema2", dirs_exist_ok=True)
        (root / "3" / "state" / "new").write_text("new")

    reshard.save(opened(root), out, progress=progress)
    assert (root / "3" / "state" / "new").exists()
    assert copies(out) == before and not (out / "3" / "state" / "new").exists()


def test_changes_outside_the_step(root, tmp_path):
    """A training continues while one of its steps is copied. Logs grow, and are copied as they
    were. Other steps appear and disappear."""
    out, logs = tmp_path / "new" / "out", root / "notes" / "today"
    shutil.copytree(root / "3", root / "2")
    stopped(root, out)
    logs.write_text("sunshine")
    shutil.rmtree(root / "2")
    (root / "5.orbax-checkpoint-tmp").mkdir()
    ckpt = reshard.to_mesh(reshard.open(root, step=3, item="state"), "1x8")
    shutil.copytree(root / "3", root / "4")

    def progress(done, whole):
        if logs.stat().st_size < 1000:  # or nothing would ever end
            logs.write_text(logs.read_text() + ", then rain")
        (root / "4" / "cfg" / "metadata").write_text('{"width": 4}')
        shutil.rmtree(root / "5.orbax-checkpoint-tmp", ignore_errors=True)

    reshard.save(ckpt, out, resume=True, progress=progress)
    copy, source = reshard.open(out, item="state"), reshard.open(root, step=3, item="state")
    assert reshard.verify(copy, source).ok
    assert sorted(os.listdir(out)) == ["3", "notes"]
    assert (out / "notes" / "today").read_text() == "rain"
