"""Other items of a step, and other files: what is shared, copied, hashed and counted."""

import collections
import functools
import hashlib
import json
import os
import pathlib
import shutil

import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jobs import FORMATS, MARKER, RECORD, StopError, flip, inodes, note_all, put, refused, touched
from layouts import hashes
from test_resume import another_job

import reshard
from reshard.storage.location import Location

TREES = ("state", "ema")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """A manager's root of each format: a step with two trees and a document, and notes."""

    @functools.cache
    def get(name):
        rng = np.random.default_rng([*FORMATS].index(name))
        root = tmp_path_factory.mktemp("siblings") / "root"
        shapes, spec = {"w": (96, 64), "c": (8, 8, 2)}, ("data", "model")
        trees = {t: {name: put(rng, shapes[name], *spec) for name in shapes} for t in TREES}
        with ocp.CheckpointManager(root, item_names=(*TREES, "cfg")) as manager:
            items = {item: ocp.args.PyTreeSave(tree) for item, tree in trees.items()}
            cfg = ocp.args.JsonSave({"width": 3})
            manager.save(3, args=ocp.args.Composite(**items, cfg=cfg))
        for item, tree in trees.items():
            shutil.rmtree(root / "3" / item)
            layouts.save_pytree(root / "3" / item, tree, **FORMATS[name])
        (root / "notes" / "none").mkdir(parents=True)
        (root / "notes" / "today").write_text("rain")
        return root

    return get


@pytest.fixture
def root(roots, tmp_path):
    """One of them, that may be changed."""
    return pathlib.Path(shutil.copytree(roots("zarr2"), tmp_path / "source"))


def opened(root):
    return reshard.to_mesh(reshard.open(root, item="state"), "1x8")


def read(root, path):
    return (root / path).read_bytes()


def is_data(path, item="ema"):
    """Files of the other tree that hold values or B-tree nodes."""
    parts = path.split("/")
    return parts[:2] == ["3", item] and (
        "d" in parts or parts[-1].replace(".", "").isdigit() or parts[-1] == "c"
    )


def shared(source, out):
    """Paths of files that are in both, and one."""
    ours, theirs = inodes(out), inodes(source)
    return {path for path in ours if ours[path] == theirs.get(path)}


def copies(root, item="state"):
    """What is carried over: everything but the marker, and what is written of the item."""
    kept = f"3/{item}/_CHECKPOINT_METADATA"
    found = {path for path in inodes(root) if path == kept or not path.startswith(f"3/{item}/")}
    return found - {f"3/{MARKER}"}


def sizes(root, paths):
    return sum((root / path).stat().st_size for path in paths)


def assert_copied(root, out):
    """What is carried over has the same bytes, and the item the same values."""
    assert {path: read(out, path) for path in copies(root)} == {
        path: read(root, path) for path in copies(root)
    }
    for item in TREES:
        assert reshard.verify(reshard.open(out, item=item), reshard.open(root, item=item)).ok


@pytest.fixture
def reads(monkeypatch):
    """How often each file is hashed, or copied."""
    found = collections.Counter()
    original = Location.copy

    def copy(source, *rest):
        found[str(source)] += 1
        return original(source, *rest)

    monkeypatch.setattr(Location, "copy", copy)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_data_files_of_other_items_are_shared(roots, tmp_path, name):
    root, out = roots(name), tmp_path / "out"
    before = hashes(root)
    planned = reshard.plan(opened(root), out)
    done = reshard.save(opened(root), out)
    data = {path for path in copies(root) if is_data(path)}
    assert data and shared(root, out) == data
    assert (out / "notes" / "none").is_dir()
    for plan in (planned, done, reshard.plan(opened(root))):
        assert plan.notes == ("item ema is not part of the job: it is copied as it is",)
        assert plan.shared_bytes == sizes(root, data)
        assert plan.other_bytes == sizes(root, copies(root) - data)
        own = sum(array.bytes_written for array in plan.arrays)
        assert plan.bytes_written == own + plan.other_bytes
    assert hashes(root) == before
    assert_copied(root, out)
    both = (layouts.load_pytree(path / "3" / "ema") for path in (out, root))
    layouts.assert_same_tree(*both)
    # Those of an item whose chunks are the source's are shared, too.
    reshard.save(reshard.open(root, item="state"), tmp_path / "same")
    reshard.save(reshard.open(tmp_path / "same", item="ema"), tmp_path / "again")
    data = {path for path in copies(tmp_path / "same", "ema") if is_data(path, "state")}
    assert data and shared(tmp_path / "same", tmp_path / "again") >= data


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_shared_without_links(roots, tmp_path, monkeypatch, name):
    root = roots(name)

    def forbidden(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    for way, options in {"no": {"link": False}, "forbidden": {}}.items():
        out = tmp_path / way
        with monkeypatch.context() as patched:
            if way == "forbidden":
                patched.setattr(os, "link", forbidden)
            plan = reshard.save(opened(root), out, **options)
        assert shared(root, out) == set()
        assert (plan.shared_bytes, plan.other_bytes) == (0, sizes(root, copies(root)))
        assert_copied(root, out)


def test_what_only_looks_like_a_data_file_is_copied(root, tmp_path):
    """What is in no tree of arrays may be written to by anybody; nothing is that other jobs have
    left."""
    decoys = ["3/extra/d/ab12", "3/extra/manifest.ocdbt", "3/ema/d/README", "3/ema/1", "notes/d/ab"]
    decoys += ["3/extra/x/.zarray", "3/extra/x/0.0", "3/extra/y/zarr.json", "3/extra/y/c/0"]
    for path in decoys:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    (root / ".reshard-9.unfinished" / "x.orbax-checkpoint-tmp").mkdir(parents=True)
    reshard.save(opened(root), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["3", "notes"]
    assert shared(root, tmp_path / "out").isdisjoint(decoys)
    for path in decoys:
        assert (tmp_path / "out" / path).read_text() == path


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("link", [False, True])
def test_each_is_read_once_and_not_for_a_plan(root, tmp_path, reads, recorded, link):
    if recorded:
        reshard.digest(reshard.open(root, item="state"), write=True)
        reads.clear()
    reshard.plan(opened(root), tmp_path / "out", link=link)
    assert not reads.keys() & {f"{root}/{path}" for path in copies(root)}
    reads.clear()
    told = []
    plan = reshard.save(
        opened(root), tmp_path / "out", link=link, progress=lambda *now: told.append(now)
    )
    assert {reads[f"{root}/{path}"] for path in copies(root)} == {1}
    written = {"_METADATA", "_sharding", "array_metadatas/process_0"}
    again = {f"3/state/{name}" for name in written}
    assert {path.rpartition("-tmp/")[2] for path in reads if "-tmp/" in path} == again
    record = json.loads(read(tmp_path / "out", f"3/state/{RECORD}"))
    assert record["beside"] == {
        path.removeprefix("3/"): hashlib.sha256(read(root, path)).hexdigest()
        for path in copies(root)
        if path.startswith("3/") and not path.startswith("3/state/") and MARKER not in path
    }
    # And they count as progress.
    done, whole = zip(*told, strict=True)
    others = sizes(root, copies(root))
    assert set(whole) == {done[-1]} == {others + sum(a.decoded_bytes for a in plan.arrays)}
    assert list(done) == sorted(done)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("link", [False, True])
def test_one_that_is_not_the_one_on_record(root, tmp_path, link, resume):
    """Also where it is shared; all of them are told, and nothing is committed or kept."""
    reshard.digest(reshard.open(root, item="state"), write=True)
    data = max(path for path in copies(root) if is_data(path))
    for path in (data, "3/cfg/metadata"):
        flip(root / path)
    out = tmp_path / "new" / "out"
    assert reshard.plan(opened(root), out, link=link).problems == ()
    text = (
        f"`{root}/3/state` is not what its digests were recorded of\n"
        f"  the file `{root}/3/cfg/metadata`: it is not the one on record\n"
        f"  the file `{root}/{data}`: it is not the one on record\n\n"
        f'hint: reshard.verify(reshard.open("{root}/3", item="state"))\n'
        f"hint: rm '{root}/3/state/{RECORD}' forgets what was recorded"
    )
    not_saved(reshard.CorruptCheckpointError, text, root, out, link=link, resume=resume)
    assert os.listdir(out.parent) == []
    (root / data).unlink()
    assert reshard.plan(opened(root), out).problems == (
        f"`{root}/3/state` is not what its digests were recorded of",
        f"the file `{root}/{data}`: on record, and not there",
    )


def not_saved(error, text, root, out, **options):
    return refused(error, text, reshard.save, opened(root), out, **options)


def stopped(root, out, monkeypatch, **options):
    """A job that has carried all siblings over, and stops."""
    note_all(monkeypatch)
    others = sizes(root, (path for path in copies(root) if not path.startswith("2/")))

    def stop(done, whole):
        if done > others:
            raise StopError

    with pytest.raises(StopError):
        reshard.save(opened(root), out, resume=True, progress=stop, **options)
    return layouts.kept(out)


@pytest.mark.parametrize("link", [False, True])
def test_a_resumed_job_copies_none_again(root, tmp_path, monkeypatch, reads, link):
    out = tmp_path / "out"
    kept = stopped(root, out, monkeypatch, link=link)
    before = {p: i for p, i in inodes(kept).items() if "state/" not in p and "reshard" not in p}
    assert before.keys() | {"3/state/_CHECKPOINT_METADATA"} == copies(root)
    reads.clear()
    reshard.save(opened(root), out, resume=True, link=link)
    assert not [path for path in reads if path.startswith(f"{root}/") and "/state/" not in path]
    after = inodes(out)
    assert before == {path: after[path] for path in before}
    assert_copied(root, out)


@pytest.mark.parametrize("link", [False, True])
def test_links_and_copies_in_each_others_place(roots, tmp_path, monkeypatch, link):
    """What an earlier run with the other flag has left is not written through, and not kept."""
    root, out = roots("zarr2-files"), tmp_path / "out"
    stopped(root, out, monkeypatch, link=not link)
    before = hashes(root)
    reshard.save(opened(root), out, resume=True, link=link)
    assert hashes(root) == before
    data = {path for path in copies(root) if is_data(path)}
    assert shared(root, out) == (data if link else set())


# What of them has changed since an earlier run, or changes meanwhile.


STAGED = {
    "others": lambda step: (
        flip(max(file for file in step.glob("ema/d/*") if file.is_file())),
        (step / "cfg" / "metadata").write_bytes(b"garbage" * 100),
        (step / "_CHECKPOINT_METADATA").unlink(),
    ),
    "no cfg": lambda step: (
        shutil.rmtree(step / "cfg"),
        (step / "_CHECKPOINT_METADATA").unlink(),
        (step / "_CHECKPOINT_METADATA").mkdir(),
    ),
    "a file": lambda step: (shutil.rmtree(step / "cfg"), (step / "cfg").write_text("")),
    "more in cfg": lambda step: (step / "cfg" / "more").write_text("{}"),
}


@pytest.mark.parametrize("change", STAGED)
def test_what_an_earlier_run_has_copied_is_copied_again(root, tmp_path, monkeypatch, change):
    """And notes that have other words, as many."""
    out = tmp_path / "out"
    STAGED[change](stopped(root, out, monkeypatch, link=False) / "3")
    (root / "notes" / "today").write_text("snow")
    reshard.save(opened(root), out, resume=True, link=False)
    assert copies(out) - {f"3/state/{RECORD}"} == copies(root)
    assert_copied(root, out)


BESIDE = [
    ("3/cfg", lambda path: (path / "metadata").write_text('{"width": 99}')),
    ("3/cfg", shutil.rmtree),
    ("3/cfg", lambda path: (path / "more").write_text("{}")),
    ("3/config", lambda path: shutil.copytree(path.with_name("cfg"), path)),
    ("3/_CHECKPOINT_METADATA", pathlib.Path.unlink),
]


@pytest.mark.parametrize(("where", "change"), BESIDE)
def test_something_else_in_the_source_changed_since(root, tmp_path, monkeypatch, where, change):
    out = tmp_path / "new" / "out"
    kept = stopped(root, out, monkeypatch)
    before = hashes(kept)
    change(root / where)
    text = another_job(kept, f"the source has changed since: `{root / where}`")
    not_saved(reshard.DestinationError, text, root, out, resume=True)
    assert hashes(kept) == before
    reshard.save(opened(root), out)
    assert copies(out) == copies(root)
    assert_copied(root, out)


def test_all_that_has_changed_is_told(root, tmp_path, monkeypatch):
    out = tmp_path / "new" / "out"
    kept = stopped(root, out, monkeypatch, max_memory="3MiB")
    (root / "notes" / "today").write_text("sunshine")
    (root / "3" / "cfg" / "more").write_text("{}")
    touched(root / "3" / "state" / "_METADATA")
    text = another_job(
        kept,
        *(f"the source has changed since: `{root / p}`" for p in ("3/state", "3/cfg")),
        "max_memory: 3.00 MiB then, 4.00 MiB now; it decides what is rewritten together",
    )
    not_saved(reshard.DestinationError, text, root, out, resume=True, max_memory="4MiB")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("where", "change"), BESIDE)
def test_something_else_in_the_source_changes_meanwhile(root, tmp_path, where, change, resume):
    out, changed = tmp_path / "new" / "out", []

    def progress(done, whole):
        if not changed:
            changed.append(change(root / where))

    text = f"the source changed while it was read\n  `{root / where}`"
    options = {"resume": resume, "progress": progress}
    not_saved(reshard.CorruptCheckpointError, text, root, out, **options)
    assert os.listdir(out.parent) == []


def test_what_others_do_beside_the_step(root, tmp_path, monkeypatch):
    """A training goes on while one of its steps is taken: logs grow, and are copied as they were;
    other steps come and go."""
    out, logs = tmp_path / "new" / "out", root / "notes" / "today"
    shutil.copytree(root / "3", root / "2")
    stopped(root, out, monkeypatch)
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
    found = reshard.verify(
        reshard.open(out, item="state"), reshard.open(root, step=3, item="state")
    )
    assert found.ok
    assert sorted(os.listdir(out)) == ["3", "notes"]
    assert (out / "notes" / "today").read_text() == "sunshine"


def test_a_log_grows_while_a_share_copies_it(root, tmp_path):
    """The commit knows what was copied of it."""
    logs, out = root / "notes" / "today", tmp_path / "out"

    def progress(done, whole):
        if logs.stat().st_size < 1000:
            logs.write_text(logs.read_text() + ", then sunshine")

    reshard.save(opened(root), out, share=(0, 1), progress=progress)
    assert reshard.commit(out)
    assert (out / "notes" / "today").read_text() == "rain"
