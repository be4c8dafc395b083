"""The record of digests: what is in it, who writes it, and that Orbax does not look at it."""

import functools
import hashlib
import json
import pathlib
import shutil
import unittest.mock

import jax
import jax.numpy as jnp
import layouts
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from layouts import LAYOUTS, READERS, STEPS, refused
from sampling import few

import reshard
from reshard.arrays.digests import digest_of
from reshard.storage.location import parse_location
from reshard.verify import digest_record
from reshard.verify.digest_record import FILE, ArrayRecord, Record

TEMPORARY = "reshard_digests.json.tmp"


def read_record(file):
    return digest_record.read_record(parse_location(file))


def expected_arrays(tree, record):
    """What is to be on record of a tree, from its leaves in memory: of keys their data."""
    found = {}
    for path, leaf in layouts.saved_leaves(tree).items():
        if leaf is None or isinstance(leaf, str | dict | list | tuple):
            continue
        name = ".".join(map(str, path))
        dtype = record.arrays[name].dtype if isinstance(leaf, int | float) else None
        is_key = isinstance(leaf, jax.Array) and layouts.is_key(leaf)
        values = np.asarray(jax.random.key_data(leaf) if is_key else leaf, dtype)
        found[name] = ArrayRecord(values.dtype.name, values.shape, digest_of(values))
    return found


def check_hashes(record, directory):
    """The files of a record are the documents of the tree, and nothing else."""
    names = ["_METADATA", "_sharding", "_strings.json"]
    files = [directory / name for name in names] + [*(directory / "array_metadatas").glob("*")]
    expected = {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.exists()
    }
    assert (record.files, record.beside) == (expected, {})
    assert "_METADATA" in record.files


@pytest.fixture(scope="module")
def digested(saved, tmp_path_factory):
    """A copy of the checkpoint of a layout, with its digests recorded; and what was returned."""

    @functools.cache
    def get(layout):
        source = saved(layout)
        path = tmp_path_factory.mktemp("digested") / source.path.name
        shutil.copytree(source.path, path)
        return path, reshard.digest(reshard.open(path, **source.open), write=True)

    return get


# What is in it.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_has_every_array_and_every_document_of_its_tree(saved, digested, tmp_path, layout):
    """And a job records the same on another mesh."""
    source = saved(layout)
    path, texts = digested(layout)
    item = path / source.inner
    record = read_record(item / FILE)
    assert record.arrays == expected_arrays(source.tree, record)
    assert {".".join(map(str, p)): text for p, text in texts.items()} == {
        name: entry.digest for name, entry in record.arrays.items()
    }
    check_hashes(record, item)
    assert not list(path.rglob(TEMPORARY))
    assert [file.parent for file in path.rglob(FILE)] == [item]
    ckpt, out = reshard.open(source.path, **source.open), tmp_path / "out"
    reshard.save(reshard.to_mesh(ckpt, "1x8"), out, digest=True, verify=True)
    item = out / source.inner
    written = read_record(item / FILE)
    assert written.arrays == record.arrays
    check_hashes(written, item)
    assert [file.parent for file in out.rglob(FILE)] == [item]
    before = layouts.hashes(source.path)
    read = source.inner if layout in ("manager", "items", "step") else ""
    found = reshard.verify(ckpt)
    told = f"{len(texts)} arrays read; no digests to compare them with"
    assert repr(found) == f"`{source.path / read}`: {told}"
    assert found.ok and found and found.digests == texts
    assert layouts.hashes(source.path) == before
    again = reshard.verify(reshard.open(out, **source.open), ckpt)
    assert (again.ok, again.compared, again.digests) == (True, len(texts), texts)


def test_a_record_is_read_as_it_was_written(tmp_path):
    arrays = {"a/b.größe": ArrayRecord("bfloat16", (3, 0, 5), "0f" * 16)}
    arrays |= {"\udcff \x1b": ArrayRecord("float32", (), None)}
    files = {"_METADATA": "ab" * 32, "\udcff/ü": "01" * 32}
    record = Record(arrays, {"name": "cd" * 32}, files, {"x/y": "ff" * 32})
    (tmp_path / FILE).write_text(json.dumps(record.document()))
    assert read_record(tmp_path / FILE) == record
    assert read_record(tmp_path / "nothing" / FILE) is None


def dumped(**changes):
    """A record with other parts; those that are None are left out."""
    document = {"version": 1, "arrays": {}, "strings": {}, "files": {}, "beside": {}} | changes
    return json.dumps({k: v for k, v in document.items() if v is not None}).encode()


def one_array(**changes):
    entry = {"dtype": "float32", "shape": [2], "digest": "0" * 32} | changes
    return dumped(arrays={"a": entry})


GARBAGE = [
    (b"", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    (b"\xff\xfe\xff", None),
    (b"[" * 200_000, None),
    (b"[]", "ValueError: it is a different kind of document"),
    (b"1" * 5000, None),
    (b'{"version": 1, "version": 1}', 'ValueError: the key "version" occurs twice'),
    (dumped(version=None), "ValueError: it is a different kind of document"),
    (dumped(version=2), "ValueError: its format version is 2; only 1 is supported"),
    (dumped(arrays=None), "KeyError: 'arrays'"),
    (dumped(arrays=[]), "AttributeError: 'list' object has no attribute 'items'"),
    (dumped(arrays={"a": 3}), "TypeError: 'int' object is not subscriptable"),
    (dumped(files=3), "AttributeError: 'int' object has no attribute 'items'"),
    (one_array(dtype=3), "ValueError: an array of 3 [2]"),
    (one_array(shape=[-1]), "ValueError: an array of 'float32' [-1]"),
    (one_array(shape=[True]), "ValueError: an array of 'float32' [True]"),
    (one_array(shape="12"), "ValueError: an array of 'float32' '12'"),
    (one_array(shape=None), "TypeError: 'NoneType' object is not iterable"),
    (one_array(digest="0" * 31), f"ValueError: not a digest: '{'0' * 31}'"),
    (one_array(digest=f"{'0' * 32}\n"), f"ValueError: not a digest: '{'0' * 32}\\n'"),
    (one_array(digest=5), "TypeError: expected string or bytes-like object, got 'int'"),
    *(
        (dumped(files={path: "0" * 64}), f"ValueError: a path outside of the checkpoint: {path!r}")
        for path in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b")
    ),
    (dumped(beside={"../x": "0" * 64}), "ValueError: a path outside of the checkpoint: '../x'"),
    (dumped(strings={"a": "0" * 63}), f"ValueError: not a hash: '{'0' * 63}'"),
    (dumped(files={"a": "0" * 32}), f"ValueError: not a hash: '{'0' * 32}'"),
]


@pytest.mark.parametrize(("data", "problem"), GARBAGE)
def test_garbage_is_no_record(tmp_path, data, problem):
    file = tmp_path / FILE
    file.write_bytes(data)
    summary, told, *rest = refused(reshard.CorruptCheckpointError, read_record, file).split("\n")
    assert summary == f"`{file}` is not a record of digests"
    assert rest == ["", f"hint: rm '{file}' deletes the record"]
    assert told == f"  {problem}" if problem else told.startswith("  ")  # Python's own words


# Orbax does not look at it.


@pytest.mark.parametrize(
    ("layout", "reader"), few(layouts.SOME_ORACLES, *layouts.SOME_ORACLES[::4])
)
def test_orbax_reads_what_has_a_record(saved, read_by_orbax, digested, layout, reader):
    got = READERS[reader](saved(layout), digested(layout)[0])
    layouts.assert_same_tree(got, read_by_orbax(layout, reader))


# Who writes what.


def digests_in(path, item=""):
    """Name -> digest on record."""
    record = read_record(pathlib.Path(path) / item / FILE)
    return {name: entry.digest for name, entry in record.arrays.items()}


@pytest.fixture
def plain(tmp_path):
    """A checkpoint without a record, on a 2x4 mesh; and its values."""
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 24), "v": (8, 32), "b": (24,), "s": ()}
    values = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    specs = {"w": ("data", "model"), "v": ("model", "data"), "b": (), "s": ()}
    tree = {name: layouts.put(x, *specs[name]) for name, x in values.items()}
    return layouts.save_pytree(tmp_path / "plain", tree), values


def digests_of(values):
    return {name: digest_of(array) for name, array in values.items()}


def moved(plan):
    return {a.path[0] for a in plan.arrays if a.verbatim}


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("chunks", ["keep", "shard"])
def test_what_is_moved_undecoded_is_recorded_if_it_is_asked_for(plain, tmp_path, link, chunks):
    path, values = plain
    texts = digests_of(values)
    out = tmp_path / "out"
    plan = reshard.save(reshard.open(path), out, chunks=chunks, link=link)
    assert moved(plan) == set(values)
    assert digests_in(out) == dict.fromkeys(values)
    asked = tmp_path / "asked"
    reshard.save(reshard.open(path), asked, chunks=chunks, link=link, digest=True)
    assert digests_in(asked) == texts
    # From then on it is carried along, whatever is decoded.
    last = tmp_path / "last"
    plan = reshard.save(reshard.open(asked), last, chunks=chunks, link=link, verify=True)
    assert moved(plan) == set(values)
    assert digests_in(last) == texts
    assert reshard.verify(last).compared == 4


def test_what_is_decoded_is_recorded_without_being_asked_for(plain, tmp_path):
    path, values = plain
    plan = reshard.save(reshard.to_mesh(reshard.open(path), "1x8"), tmp_path / "out")
    assert moved(plan) == {"b", "s"}
    assert digests_in(tmp_path / "out") == digests_of(values) | {"b": None, "s": None}
    found = reshard.verify(tmp_path / "out")
    assert (found.ok, found.compared, len(found.digests)) == (True, 2, 4)


def test_a_digest_is_carried_along_under_the_new_name(plain, tmp_path):
    path, values = plain
    reshard.digest(path, write=True)
    ckpt = reshard.select(reshard.open(path), ["w", "b"])
    ckpt = reshard.rename(ckpt, {"^w$": "new/kernel", "^b$": "w"})
    texts = digests_of({"new.kernel": values["w"], "w": values["b"]})
    for chunks, changed in (("keep", ckpt), ("shard", reshard.to_mesh(ckpt, "1x8"))):
        out = tmp_path / chunks
        reshard.save(changed, out, chunks=chunks, verify=True)
        assert digests_in(out) == texts
        assert reshard.verify(out).compared == 2


def test_a_leaf_that_has_the_name_of_a_source_is_not_taken_for_it(plain, tmp_path):
    path, values = plain
    reshard.digest(reshard.select(reshard.open(path), "w"), write=True)
    ckpt = reshard.rename(reshard.open(path), [("^w$", "x"), ("^v$", "w")])
    out = tmp_path / "out"
    reshard.save(reshard.cast(ckpt, "bfloat16", "x"), out, chunks="keep", digest=True)
    new = {"x": values["w"].astype(ml_dtypes.bfloat16), "w": values["v"]}
    assert digests_in(out) == digests_of({"b": values["b"], "s": values["s"], **new})


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_cast_is_recorded_as_it_is_written(plain, tmp_path, recorded):
    path, values = plain
    if recorded:
        reshard.digest(path, write=True)
    out = tmp_path / "out"
    reshard.save(reshard.cast(reshard.open(path), "bfloat16", ["w", "s"]), out, verify=True)
    cast = digests_of({n: values[n].astype(ml_dtypes.bfloat16) for n in ("w", "s")})
    assert digests_in(out) == cast | {n: digest_of(values[n]) if recorded else None for n in "vb"}
    assert read_record(out / FILE).arrays["w"].dtype == "bfloat16"


@pytest.mark.parametrize("form", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def test_layers_that_are_stacked_and_taken_apart(tmp_path, form):
    layers = np.random.default_rng(0).normal(size=(3, 8, 16)).astype("f4")
    tree = {f"layer_{i}": {"w": layouts.put(x, "data", "model")} for i, x in enumerate(layers)}
    layouts.save_pytree(tmp_path / "apart", {"params": tree}, **form)
    whole = digest_of(np.stack(layers))
    parts = {f"params.layer_{i}.w": digest_of(x) for i, x in enumerate(layers)}

    stacked = reshard.open(tmp_path / "apart")
    stacked = reshard.stack(stacked, "params/layer_{}", "params/layers")

    def written(ckpt, name, **kwargs):
        plan = reshard.save(ckpt, tmp_path / name, verify=True, **kwargs)
        return digests_in(tmp_path / name), {a.verbatim for a in plan.arrays}

    name, keep = "params.layers.w", {"chunks": "keep"}
    assert written(stacked, "undecoded", **keep) == ({name: None}, {True})
    assert written(stacked, "together", **keep, digest=True) == ({name: whole}, {True})
    assert written(reshard.to_mesh(stacked, "1x8"), "again") == ({name: whole}, {False})
    together = tmp_path / "together"
    assert reshard.digest(together, write=True) == {("params", "layers", "w"): whole}
    apart = reshard.unstack(reshard.open(together), "params/layers", "params/layer_{}")
    assert written(reshard.to_mesh(apart, "8x1"), "parts") == (parts, {False})


def test_chunks_that_are_left_out_count_as_what_they_stand_for(tmp_path):
    """An older checkpoint's: chunks that hold the fill value alone are not stored."""
    path = tmp_path / "old"
    values = np.zeros((8, 16), np.float32)
    values[5, 3] = 2
    tree = {"w": layouts.put(values, "data", "model"), "zeros": np.zeros(3)}
    layouts.save_pytree(path, tree, use_ocdbt=False, use_zarr3=True)
    document = json.loads((path / "_METADATA").read_text())
    document["store_array_data_equal_to_fill_value"] = False
    (path / "_METADATA").write_text(json.dumps(document))
    for file in [*path.glob("w/c/?/?"), path / "zeros" / "c" / "0"]:
        if file != path / "w" / "c" / "1" / "0":
            file.unlink()
    texts = {("w",): digest_of(values), ("zeros",): digest_of(np.zeros(3))}
    assert reshard.digest(path, write=True) == texts
    out = tmp_path / "out"
    reshard.save(reshard.to_mesh(reshard.open(path), "8x1"), out, verify=True)
    assert [*out.glob("w/c/?/?"), *out.glob("zeros/c/?")] == [out / "w" / "c" / "5" / "0"]
    assert digests_in(out) == {"w": texts["w",], "zeros": texts["zeros",]}
    assert reshard.verify(out, path).ok
    (path / "w" / "c" / "1" / "0").unlink()
    assert reshard.verify(path).problems == ("w: its values are not those on record",)


def test_every_step_has_a_record_of_its_own(saved, tmp_path):
    """And a manager goes on, and deletes steps with it."""
    source = saved("manager")
    out = tmp_path / "out"
    steps = [reshard.open(source.path, step=step) for step in STEPS]
    reshard.save([reshard.to_mesh(c, "1x8") for c in steps], out, digest=True, verify=True)
    records = []
    for step, ckpt in zip(STEPS, steps, strict=True):
        texts = {ckpt[path].data.name: text for path, text in reshard.digest(ckpt).items()}
        records.append(digests_in(out, f"{step}/default"))
        assert records[-1] == texts
        item = out / str(step) / "default"
        check_hashes(read_record(item / FILE), item)
        assert reshard.verify(reshard.open(out, step=step)).compared == len(texts)
    assert records[0] != records[1]
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(out, options=options) as manager:
        got = manager.restore(20, args=ocp.args.StandardRestore())
        layouts.assert_same_tree(got, layouts.read_manager(source, source.path))
        manager.save(30, args=ocp.args.StandardSave({"a": jnp.arange(3)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [20, 30]
    assert sorted(p.name for p in out.iterdir() if p.name.isdecimal()) == ["20", "30"]
    assert reshard.verify(reshard.open(out, step=20)).compared == len(texts)


def test_items_that_are_written_one_after_another(tmp_path):
    """The record of one says nothing of the other, nor of what is beside them."""
    tree = {"w": layouts.put(np.arange(64.0).reshape(8, 8), "data")}
    path = tmp_path / "run"
    with ocp.CheckpointManager(path, item_names=("one", "two", "config")) as manager:
        items = {name: ocp.args.StandardSave(tree) for name in ("one", "two")}
        config = ocp.args.JsonSave({"width": 3})
        manager.save(0, args=ocp.args.Composite(**items, config=config))

    def write(source, item, mesh, name):
        ckpt = reshard.to_mesh(reshard.open(source, item=item), mesh)
        reshard.save(ckpt, tmp_path / name, digest=True, verify=True)
        return tmp_path / name

    first = write(path, "one", "1x8", "first")
    both = write(first, "two", "1x8", "both")
    for item in ("one", "two"):
        found = reshard.verify(reshard.open(both, item=item))
        assert (found.problems, found.compared) == ((), 1)
    last = write(both, "one", "8x1", "last")
    (last / "0" / "config" / "metadata").write_text('{"width": 4}')
    for item in ("one", "two"):
        assert reshard.verify(reshard.open(last, item=item)).ok


# `reshard.digest`.


def test_digests_of_some_leaves(plain):
    path, values = plain
    some = reshard.select(reshard.open(path), ["w", "s"])
    w, s = digest_of(values["w"]), digest_of(values["s"])
    assert reshard.digest(some) == {("w",): w, ("s",): s}
    assert not (path / FILE).exists()
    renamed = reshard.rename(some, {"^w$": "x/y"})
    assert reshard.digest(renamed, write=True) == {("x", "y"): w, ("s",): s}
    assert digests_in(path) == {"w": w, "s": s}
    found = reshard.verify(path)
    assert (found.ok, found.compared, len(found.digests)) == (True, 2, 4)
    # The others stay on record, and casts have digests and no record.
    reshard.digest(path, write=True)
    before = json.loads((path / FILE).read_bytes())
    reshard.digest(reshard.select(reshard.open(path), "w"), write=True)
    assert json.loads((path / FILE).read_bytes()) == before
    cast = reshard.cast(reshard.open(path), "bfloat16", "w")
    text = digest_of(values["w"].astype(ml_dtypes.bfloat16))
    assert reshard.digest(cast, write=True)["w",] == text
    assert digests_in(path) == digests_of(values)
    (path / FILE).unlink()
    reshard.digest(cast, write=True)
    assert set(read_record(path / FILE).arrays) == {"v", "b", "s"}


def test_an_earlier_record_is_checked_and_replaced(plain):
    path, _ = plain
    reshard.digest(path, write=True)
    once = (path / FILE).read_bytes()
    (path / TEMPORARY).write_bytes(b"half a rec")  # of a command that was killed
    reshard.digest(path, write=True)
    assert (path / FILE).read_bytes() == once
    assert not (path / TEMPORARY).exists()
    document = json.loads(once)
    document["arrays"]["w"]["digest"] = "0" * 32
    (path / FILE).write_text(json.dumps(document))
    text = refused(reshard.CorruptCheckpointError, reshard.digest, path, write=True)
    assert text == f"`{path}` is damaged\n  w: its values are not those on record"
    assert json.loads((path / FILE).read_text()) == document


def test_a_record_that_cannot_be_written(plain, monkeypatch):
    path, _ = plain
    before = layouts.hashes(path)
    for function, number, text in (
        ("os.fsync", 28, "No space left on device"),
        ("os.replace", 30, "Read-only file system"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(function, unittest.mock.Mock(side_effect=OSError(number, text)))
            told = refused(reshard.DestinationError, reshard.digest, path, write=True)
        assert told == f"`{path / FILE}` cannot be written: {text}"
    monkeypatch.setattr("os.replace", unittest.mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        reshard.digest(path, write=True)
    assert layouts.hashes(path) == before


@pytest.mark.parametrize("flag", ["digest", "verify"])
def test_a_job_that_cannot_read_for_its_digests_writes_nothing(tmp_path, monkeypatch, flag):
    path, out = tmp_path / "plain", tmp_path / "out"
    layouts.save_pytree(path, {"large": np.ones((1024, 1024), "f4"), "small": np.ones(3)})
    reshard.save(reshard.open(path), out, max_memory="2MiB")  # undecoded, it fits
    monkeypatch.delattr("reshard.writer.commit.begin")
    asked = {"max_memory": "2MiB", flag: True}
    args = reshard.open(path), tmp_path / "more"
    assert refused(reshard.MemoryLimitError, reshard.save, *args, **asked) == (
        "one chunk, encoded and decoded, takes more than the memory limit of 2.00 MiB\n"
        "  large: 8.02 MiB\n\n"
        'hint: max_memory="8209KiB" is the least that is enough'
    )


@pytest.mark.parametrize("codec", [None, "none", "zstd:1"])
@pytest.mark.parametrize("flag", ["digest", "verify"])
def test_the_least_memory_that_a_plan_names_is_enough_for_its_digests(tmp_path, flag, codec):
    """Random bytes are larger compressed than they were."""
    path, words = tmp_path / "plain", np.random.default_rng(0).bytes(1 << 20)
    layouts.save_pytree(path, {"w": np.frombuffer(words, "<u4").reshape(512, 512)})
    asked = {"chunks": "keep", "codec": codec, flag: True}
    ckpt, out, least = reshard.open(path), tmp_path / "out", 1
    while found := reshard.plan(ckpt, out, max_memory=least, **asked).errors:
        least = found[0].least  # first of what rewrites an array, then of what reads it
    assert reshard.plan(ckpt, out, max_memory=least - 1, **asked).errors
    reshard.save(ckpt, out, max_memory=least, **asked)
    assert reshard.digest(path) == reshard.digest(tmp_path / "out")


@pytest.mark.parametrize("flags", [{}, {"digest": True}, {"verify": True}])
def test_what_is_read_for_digests_counts_as_progress(plain, tmp_path, flags):
    path, values = plain
    ckpt = reshard.cast(reshard.to_mesh(reshard.open(path), "1x8"), "bfloat16", "v")
    told = []
    reshard.save(ckpt, tmp_path / "out", progress=lambda *now: told.append(now), **flags)
    done, whole = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(whole) == {done[-1]}
    sizes = {name: array.nbytes // (1 + (name == "v")) for name, array in values.items()}
    without = reshard.save(ckpt, tmp_path / "again")
    [item] = without.items
    copied = sum(v.size for array in item.arrays if array.verbatim for v in array.values)
    copied += sum(handle.nbytes for handle in item.rewritten) + without.other_bytes
    more = {"digest": sizes["b"] + sizes["s"], "verify": sum(sizes.values())}
    assert done[-1] == copied + sum(more[flag] for flag in flags)
