"""`verify`: every fault is found, in words; `save` passes none on; the two commands."""

import functools
import importlib
import json
import os
import pathlib
import re
import shutil

import in_process
import jax
import layouts
import numpy as np
import pytest
import tensorstore as ts
from in_process import refused, shown
from jax.sharding import PartitionSpec as P
from jobs import FORMATS
from layouts import save_pytree as save
from sampling import some

import reshard
from reshard.arrays.digests import digest_of
from reshard.errors import printable
from reshard.units import count_of
from reshard.verify.digest_record import FILE, ArrayRecord, Record

execution = importlib.import_module("reshard.writer.save")

FORMS = {
    f"{name}-{codec}": {**form, "use_compression": codec == "zstd"}
    for name, form in FORMATS.items()
    for codec in ("raw", "zstd")
}
SPECS = {
    "b": ((64, 8), ("data", "model"), "int32"),
    "e": ((48, 32), ("model", "data"), "bfloat16"),
    "w": ((64, 96), ("data", "model"), "float32"),
}


@functools.cache
def sharded():
    made = layouts.random_on(layouts.mesh((2, 4)))
    return {name: made(shape, *spec, dtype=dtype) for name, (shape, spec, dtype) in SPECS.items()}


def digests():
    return {name: digest_of(np.asarray(leaf)) for name, leaf in sharded().items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Form -> a checkpoint of `sharded()` with its digests recorded, never to be written to."""

    @functools.cache
    def get(form):
        path = save(tmp_path_factory.mktemp("made") / form, sharded(), **FORMS[form])
        reshard.digest(path, write=True)
        return path

    return get


@pytest.fixture
def copied(made, tmp_path):
    return lambda form: pathlib.Path(shutil.copytree(made(form), tmp_path / "saved"))


# Nothing is wrong.


def test_progress(made):
    path = made("zarr2-files-raw")

    def progress(*arguments, **options):
        calls = []
        reshard.verify(*arguments, progress=lambda *call: calls.append(call), **options)
        return calls

    whole = sum(np.asarray(leaf).nbytes for leaf in sharded().values())
    done, totals = zip(*progress(path, max_memory="64KiB"), strict=True)
    assert {*totals} == {whole}
    assert list(done) == sorted(done)
    assert (len(done) > 3, done[-1]) == (True, whole)
    assert progress(path, path)[-1] == (2 * whole, 2 * whole)
    cast = reshard.cast(reshard.open(path), "float16", "e")  # which is read as float32 first
    assert progress(cast)[-1] == (whole, whole)


# Something is, and all of it is told.


def exchange(one, other):
    """Two files or directories, each in the other's place."""
    one.rename(one.with_name("x"))
    other.rename(one)
    one.with_name("x").rename(other)


def test_exchanged_chunks_and_arrays(tmp_path):
    spec = P("data", "model")
    tree = layouts.small_tree(layouts.mesh((2, 4)), dict.fromkeys("abcd", spec), (8, 8))
    path = save(tmp_path / "saved", tree, use_ocdbt=False)
    reshard.digest(path, write=True)
    exchange(path / "a" / "0.1", path / "a" / "1.3")
    exchange(path / "b", path / "c")
    assert repr(reshard.verify(path)) == (
        f"`{path}`: 4 arrays read, 4 compared with digests, 3 problems\n"
        "  a: its values are not those on record\n"
        "  b: its values are not those on record\n"
        "  c: its values are not those on record"
    )


def test_files_around_the_arrays(saved, tmp_path):
    """The documents of the tree are checked. Files beside the item are not."""
    source = saved("manager")
    path = shutil.copytree(source.path, tmp_path / "run")
    item = path / "20" / "default"
    reshard.digest(path, write=True)
    assert reshard.verify(path).ok
    sharding = item / "_sharding"
    sharding.write_bytes(sharding.read_bytes().replace(b"data", b"dota"))
    (item / "array_metadatas" / "process_0").unlink()
    (path / "20" / "metrics" / "metrics").write_text('{"loss": 0.0}')
    (path / "20" / "_CHECKPOINT_METADATA").unlink()
    (item / "new.txt").write_text("what was added later is nobody's business")
    assert set(reshard.verify(path).problems) == {
        f"the file `{sharding}`: it differs from the recorded one",
        f"the file `{item}/array_metadatas/process_0`: recorded, but missing",
    }


def test_records_of_something_else(copied, tmp_path, monkeypatch):
    path, out = copied("zarr2-files-zstd"), tmp_path / "out"
    text = "0" * 32
    arrays = {
        "b": ArrayRecord("int64", (64, 8), text),
        "e": ArrayRecord("bfloat16", (48, 32), None),
        "w": ArrayRecord("float32", (96, 64), text),
        "gone\x1b": ArrayRecord("float32", (), text),
    }
    files = dict.fromkeys(["_sharding", "x" * 300, "nothing/here"], 2 * text)
    (path / FILE).write_text(json.dumps(Record(arrays, {}, files, {}).document()))
    of_arrays = (
        "b: it is int32[64,8], and int64[64,8] on record",
        "w: it is float32[64,96], and float32[96,64] on record",
    )
    others = (
        "the array `gone\\u001b`: on record, but missing",
        f"the file `{path}/_sharding`: it differs from the recorded one",
        f"the file `{path}/{'x' * 300}`: recorded, but missing",
        f"the file `{path}/nothing/here`: recorded, but missing",
    )
    assert repr(reshard.verify(path)) == "\n  ".join(
        [f"`{path}`: 3 arrays read, 0 compared with digests, 6 problems", *of_arrays, *others]
    )
    # A job tells the same, before a byte is written; and so does its plan.
    monkeypatch.delattr("reshard.writer.commit.begin")
    ckpt = reshard.to_mesh(reshard.cast(reshard.open(path), "float16", "w"), "8x1")
    summary = f"`{path}` does not match its recorded digests"
    hint = f'reshard.verify("{path}")'
    for made, problems in ((ckpt, (*of_arrays, *others)), (reshard.select(ckpt, "e"), others)):
        lines = "\n  ".join((summary, *problems))
        assert refusal(made, out) == f"{lines}\n\nhint: {hint}"
        planned = reshard.plan(made, out)
        assert tuple(map(printable, planned.problems)) == (summary, *problems)
        assert planned.hints == (hint,)
    (path / FILE).write_text("{")
    problem, reason = reshard.verify(path).problems
    assert problem == f"`{path / FILE}` is not a record of digests"
    hint = f"rm '{path / FILE}' deletes the record"
    assert refusal(ckpt, out) == f"{problem}\n  {reason}\n\nhint: {hint}"
    (path / FILE).unlink()
    (path / FILE).mkdir()
    assert reshard.verify(path).problems == (f"`{path / FILE}` is a directory, not a file",)


def test_every_kind_of_fault_at_once(copied):
    path = copied("zarr2-files-raw")
    (path / "b" / "0.0").unlink()
    os.truncate(path / "e" / "0.0", 5)
    corrupt(path)
    (path / "_sharding").unlink()
    assert reshard.verify(path).problems == (
        "b: 1 of its 8 stored chunks are missing",
        f"e: its data file `{path}/e/0.0` has 5 bytes, expected at least 384",
        "w: its values are not those on record",
        f"the file `{path}/_sharding`: recorded, but missing",
    )


# Single bits.


def stored_files(path, form):
    """The files that hold bytes of arrays, or of the B-tree that leads to them; largest first."""
    if "files" not in form:
        found = [*path.glob("d/*"), *path.glob("ocdbt.process_0/d/*"), path / "manifest.ocdbt"]
    else:
        found = [file for name in SPECS for file in (path / name).rglob("*") if file.is_file()]
    return sorted(found, key=lambda file: (-file.stat().st_size, str(file)))


def values_in(path, form):
    """The bytes of every array, read by TensorStore alone; None where it cannot."""
    base, driver = f"file://{path}/", "zarr3" if "zarr3" in form else "zarr"
    found = {}
    for name in SPECS:
        store = f"{base}{name}/"
        if "files" not in form:
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}
        try:
            values = ts.open(spec).result().read().result()
            found[name] = values.dtype, values.shape, values.tobytes()
        except ValueError:
            found[name] = None
    return found


def flip(file, place):
    """Flips a bit of a file; returns its earlier bytes."""
    before = file.read_bytes()
    data = bytearray(before)
    data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)
    return before


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_is_found_by_verify_and_by_a_job(copied, tmp_path, run, form):
    path, out = copied(form), tmp_path / "out"
    expected = values_in(path, form)
    assert None not in expected.values()
    files = stored_files(path, form)
    sizes = [file.stat().st_size for file in files]
    rng = np.random.default_rng(list(FORMS).index(form))
    changed, places = 0, some(range(20))
    for number in places:
        place = int(rng.integers(8 * sum(sizes)))
        which = int(np.searchsorted(np.cumsum(sizes), place // 8, "right"))
        file, place = files[which], place - 8 * sum(sizes[:which])
        before = flip(file, place)
        where = form, number, file.name, place
        if values_in(path, form) != expected:
            changed += 1
            assert run("verify", path)[0] == 1, where
            with pytest.raises(reshard.ReshardError):
                reshard.save(reshard.to_mesh(reshard.open(path), "8x1"), out)
            assert os.listdir(tmp_path) == ["saved"], where
        file.write_bytes(before)
    assert changed >= len(places) // 8
    plan = reshard.save(reshard.to_mesh(reshard.open(path), "8x1"), out)
    assert not any(array.verbatim for array in plan.arrays)
    assert reshard.verify(out, path).ok


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["zarr2-files-raw", "zarr2-zstd"])
def test_single_bits_of_the_record_itself(copied, tmp_path, form):
    path = copied(form)
    rng = np.random.default_rng(list(FORMS).index(form))
    for place in some(rng.integers(8 * (path / FILE).stat().st_size, size=40)):
        whole = flip(path / FILE, int(place))
        assert reshard.verify(path).problems, place
        refusal(reshard.to_mesh(reshard.open(path), "8x1"), tmp_path / "out")
        (path / FILE).write_bytes(whole)


# `save` compares what it reads with what is on record.


def corrupt(path, name="w", chunk="0.0"):
    """Flips a bit of an uncompressed chunk."""
    flip(path / name / chunk, 17 * 8 + 2)


def refusal(ckpt, out, **kwargs):
    """The text of the error of a save that leaves no file."""
    before = os.listdir(out.parent)
    text = layouts.refused(reshard.CorruptCheckpointError, reshard.save, ckpt, out, **kwargs)
    assert os.listdir(out.parent) == before
    return text


def words(path, *leaves):
    lines = "\n".join(f"  {leaf}" for leaf in leaves)
    return (
        f"values read from `{path}` do not match its recorded digests\n"
        f'{lines}\n\nhint: reshard.verify("{path}")'
    )


def test_a_job_refuses_values_that_differ_from_the_record(copied, tmp_path):
    path, out = copied("zarr2-files-raw"), tmp_path / "out"
    corrupt(path)
    corrupt(path, "e")
    ckpt = reshard.open(path)
    e, w = "e  bfloat16[48,32]", "w  float32[64,96]"
    assert refusal(reshard.to_mesh(ckpt, "8x1"), out) == words(path, e, w)
    some = reshard.select(ckpt, ["w", "b"])
    assert refusal(reshard.to_mesh(some, "8x1"), out) == words(path, w)
    renamed = reshard.rename(some, {"^w$": "x", "^b$": "w"})
    assert refusal(reshard.to_mesh(renamed, "8x1"), out) == words(path, w.replace("w", "x", 1))
    assert refusal(reshard.cast(some, "float16", "w"), out) == words(path, w)
    reshard.save(reshard.to_mesh(reshard.select(ckpt, "b"), "8x1"), out)
    assert reshard.verify(out).compared == 1
    # What is moved undecoded is found when it is read back.
    assert refusal(some, tmp_path / "moved", chunks="keep", verify=True) == (
        "the values read back differ from those written\n"
        "  w: its values differ from the written ones\n\n"
        f'hint: reshard.verify("{path}")'
    )
    # Without that nobody reads it: the digest that is carried along still tells.
    reshard.save(some, tmp_path / "moved", chunks="keep")
    assert reshard.verify(tmp_path / "moved").problems == ("w: its values are not those on record",)


@pytest.mark.parametrize("mesh", [None, "8x1"])
def test_sources_of_stacked_arrays_are_compared_with_the_record(tmp_path, mesh):
    made = layouts.random_on(layouts.mesh((2, 4)))
    tree = {f"layer_{i}": {"w": made((16, 16), "data", "model")} for i in range(3)}
    path = save(tmp_path / "saved", {"params": tree}, use_ocdbt=False, use_compression=False)
    reshard.digest(path, write=True)
    corrupt(path, "params.layer_1.w", "1.2")
    ckpt = reshard.stack(reshard.open(path), "params/layer_{}", "params/layers")
    options = {"chunks": "keep", "digest": True} if mesh is None else {}
    ckpt = ckpt if mesh is None else reshard.to_mesh(ckpt, mesh)
    told = words(path, "params/layer_1/w  float32[16,16]")
    assert refusal(ckpt, tmp_path / "out", **options) == told


def test_written_values_are_read_back(copied, tmp_path, monkeypatch):
    path, out = copied("zarr2-files-raw"), tmp_path / "out"
    write_item = execution.write_item

    def and_a_bit_flips(share, directory, database, *rest):
        written = write_item(share, directory, database, *rest)
        chunks = pathlib.Path(str(directory / database)).parent.glob(f"{database}0/w/?.?")
        for file in sorted(chunks)[:1]:
            flip(file, 40)
        return written

    monkeypatch.setattr(execution, "write_item", and_a_bit_flips)
    ckpt = reshard.to_mesh(reshard.open(path), "8x1")
    assert refusal(ckpt, out, verify=True) == (
        "the values read back differ from those written\n"
        "  w: its values differ from the written ones\n\n"
        "hint: resume=True writes their shares again"
    )
    reshard.save(ckpt, out)
    assert not reshard.verify(out).ok


# Against another checkpoint.


def test_differences_from_another_checkpoint(tmp_path):
    a, b = np.random.default_rng(0).normal(size=(2, 4, 6)).astype("f4")
    key, zeros = jax.random.key(0), np.zeros(2)
    tree = {"a": a, "b": b, "dtype": np.zeros(3, "i4"), "key": key, "kind": "text"}
    tree |= {"layers": [zeros, np.ones(2)], "mine": zeros, "shape": np.zeros((2, 3))}
    one = save(tmp_path / "one", tree | {"text": "some"})
    tree = {"a": a, "b": b + np.float32(1e-6), "dtype": np.zeros(3, "u4")}
    tree |= {"key": jax.random.key_data(key), "kind": np.zeros(1), "shape": np.zeros((3, 2))}
    tree |= {"layers": {"0": zeros, "1": zeros}, "text": "other", "yours": zeros}
    other = save(tmp_path / "other", tree, use_zarr3=True, use_ocdbt=False)
    found = reshard.verify(one, other)
    assert repr(found) == (
        f"`{one}`: 8 arrays read, 4 compared with digests, 11 problems\n"
        f"  b: its values are not those of `{other}`\n"
        f"  dtype: it is int32[3], in `{other}` uint32[3]\n"
        f"  key: it is key<threefry2x32> uint32[2], in `{other}` uint32[2]\n"
        f"  kind: it is 'text', in `{other}` float64[1]\n"
        f"  layers/0: its path is layers/[0], in `{other}` layers/0\n"
        f"  layers/1: its path is layers/[1], in `{other}` layers/1\n"
        f"  layers/1: its values are not those of `{other}`\n"
        f"  mine: `{other}` does not have it\n"
        f"  shape: it is float64[2,3], in `{other}` float64[3,2]\n"
        f"  text: it is 'some', in `{other}` 'other'\n"
        "  ... and 1 more"
    )
    assert found.problems[10] == f"yours: only `{other}` has it"
    chunk = next((other / "a").rglob("c/0/0"))
    os.truncate(chunk, 3)
    problems = reshard.verify(one, other).problems
    assert problems[0].startswith(f"a: in `{other}`, its stored bytes cannot be read ")
    assert problems[1:] == found.problems


def test_against_a_record(tmp_path):
    one, other = (
        save(tmp_path / text, {"a": np.ones(3), "b": np.ones(4), "text": text})
        for text in ("some", "more")
    )
    reshard.digest(one, write=True)
    file = tmp_path / "known.json"
    file.write_bytes((one / FILE).read_bytes())
    reshard.save(reshard.open(one), tmp_path / "copy")
    assert reshard.verify(one, file) and reshard.verify(tmp_path / "copy", file)
    found = reshard.verify(other, file)
    assert (found.problems, bool(found)) == ((f"text: `{file}` has another text",), False)
    known = json.loads(file.read_text()) | {"strings": {}}
    arrays = known["arrays"]
    arrays["a"]["digest"], arrays["x"] = "0" * 32, arrays.pop("b")
    file.write_text(json.dumps(known))
    lacks = f"`{file}` does not have it"
    assert repr(reshard.verify(one, file)) == (
        f"`{one}`: 2 arrays read, 2 compared with digests, 4 problems\n"
        f"  a: its values are not those of `{file}`\n"
        f"  b: {lacks}\n"
        f"  text: {lacks}\n"
        f"  the array `x`: of `{file}`, but missing"
    )
    # It may have no digest of an array, and has none of one that is cast.
    arrays["a"]["digest"], arrays["b"] = None, arrays.pop("x")
    file.write_text(json.dumps(known))
    cast = reshard.cast(reshard.open(one), "bfloat16", "b")
    none = f"`{file}` has no digest of it"
    assert reshard.verify(cast, file).problems == (f"a: {none}", f"b: {none}", f"text: {lacks}")
    file.write_text("{}")
    told = layouts.refused(reshard.CorruptCheckpointError, reshard.verify, one, file)
    assert told.startswith(f"`{file}` is not a record of digests\n")
    assert told.endswith("\n\nhint: reshard.digest(path, write=True)")


@pytest.mark.parametrize("recorded", [False, True])
def test_strings_are_recorded_under_their_stored_names(tmp_path, recorded):
    path = save(tmp_path / "a", {"a": np.ones(3), "one": "x", "two": "y"})
    reshard.digest(path, write=True)
    record = json.loads((path / FILE).read_bytes())
    ckpt = reshard.open(path)
    for other in (
        reshard.rename(ckpt, {"^one$": "three"}),
        reshard.rename(ckpt, {"^one$": "other", "^two$": "one", "^other$": "two"}),
        reshard.select(ckpt, ["a", "two"]),
        reshard.select(ckpt, "a"),
    ):
        if not recorded:
            (path / FILE).unlink()
        reshard.digest(other, write=True)
        assert json.loads((path / FILE).read_bytes()) == record


# The commands.


def same(path, count):
    """The result of a `verify` that finds nothing wrong."""
    read = f"{count_of(count, 'array')} read, {count} compared with digests"
    return 0, f"`{path}`: {read}, nothing is wrong\n", ""


@pytest.fixture
def run(tmp_path):
    return functools.partial(in_process.reshard_in, tmp_path)


def test_exit_status_0_of_a_correct_checkpoint(made, run):
    path, other = made("zarr2-zstd"), made("zarr3-files-raw")
    assert run("verify", path) == same(path, 3)
    assert run("verify", path, "--against", other, "--quiet") == (0, "", "")
    out = shown(path, "verify", path, "--against", other / FILE, "--json")
    found = {"path": str(path), "ok": True, "problems": [], "digests": digests(), "compared": 3}
    assert json.loads(out) == found


def test_exit_status_1_of_a_damaged_checkpoint(copied, made, run):
    path = copied("zarr2-files-raw")
    corrupt(path)
    problem = "w: its values are not those on record"
    told = f"`{path}`: 3 arrays read, 3 compared with digests, 1 problem\n  {problem}\n"
    assert run("verify", path) == (1, told, "")
    assert run("verify", path, "--quiet") == (1, "", told)
    other = made("zarr2-raw")
    status, out, err = run("verify", path, "--against", other, "--json")
    document = json.loads(out)
    assert (status, err, document["ok"]) == (1, "", False)
    assert document["problems"] == [problem, f"w: its values are not those of `{other}`"]
    (path / "_METADATA").write_text("{")
    status, out, err = run("verify", path)
    assert (status, err) == (1, "")
    assert run("verify", path, "--quiet") == (1, "", out)
    status, out, err = run("verify", path, "--json")
    problem = layouts.refused(reshard.CorruptCheckpointError, reshard.verify, path)
    assert problem.startswith(f"`{path}/_METADATA` is not JSON: ")
    assert (status, err) == (1, "")
    assert json.loads(out) == {"path": str(path), "ok": False, "problems": [problem]}


def test_exit_status_2_if_verify_cannot_run(made, tmp_path):
    path = made("zarr2-zstd")
    (tmp_path / "map.toml").touch()
    flags = "--map, --model and other options of a conversion require --against"
    for text, *words in (
        (f"nothing exists at `{tmp_path}/nothing`\n", tmp_path / "nothing"),
        (f"nothing exists at `{tmp_path}/nothing`\n", path, "--against", tmp_path / "nothing"),
        ("one chunk, encoded and decoded, takes more ", path, "--max-memory", "1KiB"),
        (f"{flags}\n", path, "--map", tmp_path / "map.toml"),
        ("Got unexpected extra argument (other/1)\n", path, "other/1"),
    ):
        assert f"Error: {text}" in refused(tmp_path, "verify", *words)


def test_steps_and_items(saved, tmp_path, run):
    path = shutil.copytree(saved("manager").path, tmp_path / "run")
    count = len(reshard.open(path).arrays)
    assert run("digest", path, "--step", 3, "--write", "--quiet") == (0, "", "")
    for words in (
        (path, "--step", 3),
        (path, "--step", 3, "--against", path),
        (path / "3", "--item", "default", "--against", path / "3"),
    ):
        assert run("verify", *words) == same(f"{path}/3/default", count)
    latest = "step 20 is the latest of 2: --step all reads each\n"
    status, out, err = run("verify", path, "--against", path / "3")
    assert (status, err) == (1, "")
    assert out.startswith(f"{latest}`{path}/20/default`: {count} arrays read, {count} compared ")
    counted = f"{count} arrays read; no digests to compare them with\n"
    assert run("verify", path) == (0, f"{latest}`{path}/20/default`: {counted}", "")
    one = shutil.copytree(path / "20", tmp_path / "one" / "20").parent
    assert run("verify", one) == (0, f"`{one}/20/default`: {counted}", "")
    assert shown(tmp_path, "digest", path).startswith(f"{latest}path ")
    items = saved("items").path
    for words in ((items,), (items / "3", "--step", 3)):
        assert run("verify", *words, "--item", "state", "--against", items)[0] == 0
    assert run("verify", items, "--item", "config")[0] == 2


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A manager's root with steps 1, 2 and 10, each of other values, with their digests."""
    root = tmp_path_factory.mktemp("three") / "run"
    for step in (1, 2, 10):
        tree = {"w": layouts.random((6, 5), seed=step)}
        save(root / f"{step}" / "default", tree, use_ocdbt=False)
        (root / f"{step}" / "_CHECKPOINT_METADATA").write_text("{}")
        reshard.digest(root / f"{step}", write=True)
    return root


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ("all", (1, 2, 10)),
        ("1,10", (1, 10)),
        ("10,1,1", (1, 10)),
        ("2..10", (2, 10)),
        ("2", (2,)),
        ("1..1", (1,)),
        ("latest", (10,)),
    ],
)
def test_steps_are_read_one_after_another(three, tmp_path, run, asked, steps):
    head = "step {}\n" if len(steps) > 1 else ""
    text = "".join(head.format(step) + same(three / f"{step}", 1)[1] for step in steps)
    latest = "step 10 is the latest of 3: --step all reads each\n" if asked == "latest" else ""
    assert run("verify", three, "--step", asked) == (0, latest + text, "")
    several = asked not in ("2", "latest")  # the form does not depend on how many there are

    def documents(command):
        found = json.loads(shown(tmp_path, command, three, "--step", asked, "--json"))
        return found["steps"] if several else [{"step": steps[0]} | found]

    ones = [json.loads(shown(tmp_path, "verify", three / str(n), "--json")) for n in steps]
    assert documents("verify") == [{"step": n} | one for n, one in zip(steps, ones, strict=True)]
    ones = [json.loads((three / f"{step}/default/{FILE}").read_text()) for step in steps]
    assert documents("digest") == [{"step": n} | one for n, one in zip(steps, ones, strict=True)]
    assert [one["step"] for one in documents("inspect")] == [*steps]
    out = shown(tmp_path, "digest", three, "--step", asked)
    assert re.findall(r"[0-9a-f]{32}", out) == [one["arrays"]["w"]["digest"] for one in ones]
    heads = [f"step {step}" for step in steps if len(steps) > 1]
    assert re.findall(r"^step \d+$", out, re.MULTILINE) == heads
    out = shown(tmp_path, "inspect", three, "--step", asked)
    assert re.findall(r"shown: (\d+)$", out, re.MULTILINE) == [f"{step}" for step in steps]
    shown(tmp_path, "ckpt", three, "out", "--step", asked)
    assert reshard.open(tmp_path / "out").source.steps == steps
    assert run("verify", "out", "--step", asked, "--against", three)[0] == 0


def test_all_steps_of_a_root_of_one_have_the_form_of_several(three, tmp_path, run):
    root = tmp_path / "run"
    shutil.copytree(three / "10", root / "10")
    for command in ("verify", "digest", "inspect"):
        found = json.loads(shown(tmp_path, command, root, "--step", "all", "--json"))
        assert [one["step"] for one in found["steps"]] == [10]
    shutil.rmtree(root / "10" / "default" / "w")
    status, out, err = run("digest", root, "--step", "all", "--json")
    assert status == 2
    told = f"`{root}/10/default` is damaged: "
    assert err.startswith(f"Error: {told}")
    [failed] = json.loads(out)["steps"]  # a document as that of one step, and its number
    assert failed["problems"][0].startswith(told)
    alone = json.loads(run("digest", root, "--step", 10, "--json")[1])
    assert failed == {"step": 10} | alone


def test_the_exit_status_is_the_worst_of_all_steps(three, tmp_path, run):
    root = shutil.copytree(three, tmp_path / "run")
    every = ("--step", "all")
    (root / "1" / "default" / "w" / "0.0").write_bytes(b"garbage")
    status, out, err = run("verify", root, *every)
    assert (status, err) == (1, "")
    assert out.startswith(f"step 1\n`{root}/1`: 0 arrays read, 0 compared with digests, 1 problem")
    assert out.endswith("".join(f"step {n}\n{same(root / f'{n}', 1)[1]}" for n in (2, 10)))
    document = json.loads(run("verify", root, *every, "--json")[1])
    expected = [(1, False), (2, True), (10, True)]
    assert [(one["step"], one["ok"]) for one in document["steps"]] == expected
    # A step that cannot be opened is wrong; one that is not there could not be read.
    (root / "2" / "default" / "_METADATA").write_text("{")
    status, out, err = run("verify", root, *every)
    assert (status, err, out.count("nothing is wrong")) == (1, "", 1)
    shutil.rmtree(root / "2")
    status, out, err = run("verify", root, "--step", "1,2,10")
    assert (status, out.count("nothing is wrong")) == (2, 1)
    missing = f"Error: step 2: `{root}` has no step 2\n  its steps: 1, 10\n\nhint: --step 1\n"
    assert err == missing
    # Errors of other commands: those of all steps, and what can be read.
    status, out, err = run("digest", root, "--step", "1,2,10", "--json")
    documents = json.loads(out)["steps"]
    assert (status, [one["step"] for one in documents]) == (2, [1, 2, 10])
    assert ["problems" in one for one in documents] == [True, True, False]
    assert err.startswith(f"Error: step 1: `{root}/1` is damaged\n")
    assert err.endswith(missing)
    assert run("inspect", root, "--step", "1,2")[::2] == (2, missing)
    # A step that was never committed is one of all.
    (root / "10" / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1}')
    status, out, err = run("verify", root, *every)
    assert (status, err) == (1, "")
    assert f"`{root}/10` was never committed: its _CHECKPOINT_METADATA has no commit time" in out


def test_wrong_steps(three, run):
    for words in (
        *(("inspect", three), ("verify", three), ("digest", three), ("diff", three, three)),
        ("ckpt", three, "out"),
    ):
        for text in ("last", "3..", "1-2", "1,,2", "-1"):
            status, out, err = run(*words, f"--step={text}")
            assert (status, out) == (2, ""), text
            assert err.endswith(f"Error: --step {text}: steps are N, N,M, N..M, latest or all\n")
        status, _, err = run(*words, "--step", "3..9")
        told = f"`{three}` has no step 3\n  its steps: 1, 2, 10\n\nhint: --step 2\n"
        assert (status, err) == (2, f"Error: {told}")
    assert run("verify", three / "1", "--step", "1..2")[2].endswith("hint: leave out --step\n")
    assert run("verify", three / "1", "--step", "all")[0] == 0
    file = three / "1" / "default" / FILE  # which the others are not
    assert run("verify", three, "--step", "all", "--against", file)[0] == 1
    assert run("verify", three, "--step", "1", "--against", file)[0] == 0


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_an_item_that_one_side_lacks(saved, tmp_path, run, command):
    """No other item is compared instead; an item that was saved without a name is."""
    step, other, unnamed = saved("items").path / "3", tmp_path / "other", tmp_path / "unnamed"
    for path, name in ((other, "params"), (unnamed, "default")):
        shutil.copytree(step, path)
        (path / "state").rename(path / name)
    against = ["--against"] * (command == "verify")
    for one, two in ((step, other), (other, step)):
        told = refused(tmp_path, command, one, *against, two, "--item", "state")
        assert told.startswith(f"Error: `{other}` has no item 'state'\n\nhint: its items: ")
    for one, two in ((step, unnamed), (unnamed, step), (step, step / "state")):
        assert run(command, one, *against, two, "--item", "state")[0] == 0


def test_digests_are_shown_and_written(made, tmp_path, run):
    path = shutil.copytree(made("zarr3-zstd"), tmp_path / "saved")
    (path / FILE).unlink()
    out = shown(tmp_path, "digest", path)
    assert re.findall(r"^(\w) .* ([0-9a-f]{32})$", out, re.MULTILINE) == [*digests().items()]
    assert not (path / FILE).exists()
    out = shown(tmp_path, "digest", path, "--json", "--write")
    assert json.loads(out) == json.loads((path / FILE).read_text())
    assert reshard.verify(path).compared == 3
    out = shown(tmp_path, "digest", path, "--write")
    assert out.splitlines()[-1] == f"wrote {path}/{FILE}"
    (tmp_path / "known.json").write_text(shown(tmp_path, "digest", path, "--json"))
    for file in ("../known.json", FILE):
        assert in_process.reshard_in(path, "verify", ".", "--against", file) == same(path, 3)
    (path / "_sharding").unlink()
    told = f"`{path}` is damaged\n  the file `{path}/_sharding`: recorded, but missing\n\n"
    told += f"hint: rm '{path}/reshard_digests.json' deletes the record\n"
    assert run("digest", path, "--write") == (2, "", f"Error: {told}")


def test_against_the_source_of_a_tree_whose_api_is_not_known(tmp_path, run):
    """Neither has to be one of Flax's; and NNX's own tree, saved again without a record, could be
    Linen's as well."""
    file = tmp_path / "map.toml"
    file.write_text("[[rule]]\nfrom = '^(params|model)/(.*)$'\nto = 'other/\\2'\n")
    for top in ("params", "model"):
        source = save(tmp_path / top, {top: {"block": {"w": np.ones((4, 2), "f4")}}})
        out = tmp_path / f"out_{top}"
        assert run("ckpt", source, out, "--map", file, "--quiet") == (0, "", "")
        assert run("verify", out, "--against", source, "--map", file) == same(out, 1)
        changed = save(tmp_path / f"new_{top}", {top: {"block": {"w": np.ones((4, 3))}}})
        assert run("verify", out, "--against", changed, "--map", file)[0] == 1
    kernel = {"kernel": np.ones((4, 2), "f4"), "bias": np.ones(2, "f4")}
    linen = save(tmp_path / "linen", {"params": {"Dense_0": kernel}})
    values = {name: {"value": value} for name, value in kernel.items()}
    nnx = save(tmp_path / "nnx", {"dense": values})
    file.write_text("[[rule]]\nfrom = '^params/Dense_0/'\nto = 'dense/'\n")
    assert run("verify", nnx, "--against", linen, "--map", file) == same(nnx, 2)


def test_lists_against_the_other_api_s_dicts(tmp_path, run):
    """Linen's is saved as a list, and NNX's with keys of digits."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(n, 3)).astype("f4") for n in (1, 2, 3)]
    layers = [{"Dense_0": {"kernel": value}} for value in values]
    linen = save(tmp_path / "linen", {"params": {"layers": layers}})
    blocks = {str(n): {"kernel": {"value": value}} for n, value in enumerate(values)}
    nnx = save(tmp_path / "nnx", {"blocks": blocks})
    file = tmp_path / "map.toml"
    rule = "{ from = '^params/layers/(\\d+)/Dense_0/', to = 'blocks/\\1/' }"
    file.write_text(f"to = 'nnx'\nrule = [{rule}]")
    for path, other in ((nnx, linen), (linen, nnx)):
        assert run("verify", path, "--against", other, "--map", file) == same(path, 3)
