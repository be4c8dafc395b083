"""Exports as safetensors files: the `safetensors` library reads them, on a disk and in buckets;
what is refused; and what a stopped job leaves."""

import json
import math
import shutil
from unittest import mock

import jax
import layouts
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import servers
from in_process import reshard_in, shown
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import refused
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_safetensors import DTYPES, NAMES, assert_tensors, named, random_bits, written

import reshard
from reshard.errors import (
    CorruptCheckpointError,
    DestinationError,
    DestinationExistsError,
    ReshardError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from reshard.loader.detection import RECORD, is_copied
from reshard.storage import disk
from reshard.storage.bucket import BucketLocation
from reshard.storage.location import parse_location
from reshard.writer import commit, plan
from reshard.writer.export import plan_export

INDEX = "model.safetensors.index.json"


def sharded(shape, *spec, seed=0, dtype="float32"):
    values = layouts.random(shape, dtype, seed)
    return jax.device_put(values, NamedSharding(layouts.mesh((2, 4)), P(*spec)))


@pytest.fixture(scope="module")
def tree():
    return {
        "layers": {
            str(n): {
                "both": sharded((24, 40, 16), None, "data", "model", seed=n),
                "columns": sharded((30, 56), None, "model", seed=n + 20),
                "rows": sharded((64, 9), ("data", "model"), seed=n + 40),
            }
            for n in (1, 2, 10)
        },
        "count": np.asarray(layouts.random((), "int32")),
        "half": sharded((8, 24), "data", "model", dtype="bfloat16"),
        "odd": np.asarray(layouts.random((7, 3, 5), "float32", 3)),
    }


@pytest.fixture(scope="module")
def source(tree, tmp_path_factory):
    return layouts.save_pytree(tmp_path_factory.mktemp("source") / "saved", tree)


def tensors(tree):
    return {name: np.asarray(value) for name, value in named(tree).items()}


def loaded(directory):
    """All tensors of a directory, as the library reads them, and the file that has each."""
    found, files = {}, {}
    for file in sorted(directory.glob("*.safetensors")):
        own = load_file(file)
        files |= dict.fromkeys(own, file.name)
        found |= own
    return found, files


def test_a_file_has_the_bytes_that_the_library_writes(tree, source, tmp_path):
    out, by_library = tmp_path / "out", tmp_path / "library.safetensors"
    made = reshard.export(reshard.open(source), out)
    save_file(tensors(tree), by_library, metadata={"format": "pt"})
    assert (out / "model.safetensors").read_bytes() == by_library.read_bytes()
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "reshard_digests.json"]
    assert made.nbytes == by_library.stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["library.safetensors", "out"]


@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"max_memory": "64KiB"}])
def test_several_files_and_their_index(tree, source, tmp_path, how):
    out, expected = tmp_path / "out", tensors(tree)
    with mock.patch.object(disk, "_MAPPED", 1 << 12):
        made = reshard.export(reshard.open(source), out, file_size="70KiB", **how)
    got, files = loaded(out)
    assert_tensors(got, expected)
    count = len(made.files)
    assert count > 2
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert sorted({*files.values()}) == names
    index = json.loads((out / INDEX).read_text())
    size = sum(values.nbytes for values in expected.values())
    assert index == {"metadata": {"total_size": size}, "weight_map": files}
    sizes = [sum(a.nbytes for n, a in got.items() if files[n] == name) for name in names]
    assert max(sizes) <= 70 << 10
    assert files["layers.2.rows"] <= files["layers.10.rows"], "in the order of numbers"
    with safe_open(out / names[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.every_combination
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path, dtype):
    shapes = [(5, 3, 2), (7,), (), (0, 4), (1, 1)]
    values = {f"a.{n}": random_bits(shape, dtype, n) for n, shape in enumerate(shapes)}
    path, out = tmp_path / "all.safetensors", tmp_path / "out"
    if dtype in NAMES:
        written(path, {name: (NAMES[dtype], value) for name, value in values.items()})
    else:
        save_file(values, path)
    reshard.export(reshard.open(path), out)
    if not dtype.startswith("float8") and dtype not in NAMES:  # which it does not load for numpy
        assert_tensors(load_file(out / "model.safetensors"), values)
    with safe_open(out / "model.safetensors", "numpy") as file:
        got = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert got.keys() == values.keys()
    assert dtype not in NAMES or {*got.values()} == {NAMES[dtype]}
    assert reshard.diff(path, out, values=True).equal


def test_there_and_back(source, tmp_path):
    reshard.export(reshard.open(source), tmp_path / "hf", file_size="50KB")
    reshard.save(reshard.open(tmp_path / "hf"), tmp_path / "back")
    digests = reshard.digest(source)
    assert reshard.digest(tmp_path / "hf") == digests == reshard.digest(tmp_path / "back")
    found = reshard.verify(tmp_path / "hf")
    assert found.ok and found.compared == len(digests)
    assert reshard.verify(tmp_path / "hf", against=source)


def test_digests_find_a_changed_byte(source, tmp_path):
    reshard.export(reshard.open(source), tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = reshard.verify(tmp_path / "hf")
    assert not found and found.problems == ("half: its values are not those on record",)


def test_cast_renamed_and_of_one_layer(source, tree, tmp_path):
    ckpt = reshard.rename(reshard.select(reshard.open(source), "layers/2/**"), {"layers": "h"})
    reshard.export(reshard.cast(ckpt, "bfloat16"), tmp_path / "out")
    own = tensors({"h": {"2": tree["layers"]["2"]}})
    expected = {name: values.astype(ml_dtypes.bfloat16) for name, values in own.items()}
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == expected.keys()
    for name, values in expected.items():  # a NaN stays one, of any payload
        layouts.assert_equal_or_nan(got[name].astype("f4"), values.astype("f4"))


@pytest.mark.parametrize("chunk", [1, 4])
def test_unstacked_layers(tmp_path, chunk, monkeypatch):
    """Of one stored array; `chunk` layers are in one chunk. Workers divide the files."""
    spec = {1: ("model",), 4: (None, "model")}[chunk]
    saved = {"layers": {"w": sharded((4, 24, 8), *spec)}}
    source = layouts.save_pytree(tmp_path / "saved", saved)
    ckpt = reshard.unstack(reshard.open(source), "layers", into="layer_{}", axis=0)
    planned = reshard.export(ckpt, tmp_path / "out", file_size="1KiB", max_memory="1MiB")
    values = np.asarray(saved["layers"]["w"])
    expected = {f"layer_{n}.w": values[n] for n in range(4)}
    assert_tensors(loaded(tmp_path / "out")[0], expected)
    monkeypatch.setattr(plan, "_SMALLEST", 1)
    assert [planned.share_count(workers) for workers in (None, 2)] == [1, 2]
    assert [len(each.items[0].files) for each in planned.shares(2)] == [2, 2]
    shared = tmp_path / "shared"
    for number in range(2):
        reshard.export(ckpt, shared, file_size="1KiB", max_memory="1MiB", share=(number, 2))
    reshard.commit(shared)
    assert objects(shared) == objects(tmp_path / "out")


MAP = """
[[rule]]
from = '^w$'
split = { axis = 0, into = ['one', 'two', 'three', 'four'] }
scale = 2
[[rule]]
to = 'bias'
fill = { value = 0.5, shape = [7], dtype = 'float32' }
"""


@pytest.mark.parametrize("how", [{}, {"workers": 2}])
def test_computed_and_filled_arrays(tmp_path, how):
    """Files whose arrays share stored chunks are written by one share, others by theirs."""
    values = np.arange(2400, dtype="f4").reshape(8, 300)
    sharding = NamedSharding(layouts.mesh((2, 4)), P(None, "model"))
    source = layouts.save_pytree(tmp_path / "saved", {"w": jax.device_put(values, sharding)})
    (tmp_path / "map.toml").write_text(MAP)
    ckpt = reshard.remap(reshard.open(source), tmp_path / "map.toml")
    reshard.export(ckpt, tmp_path / "out", file_size="2KiB", **how)
    parts = np.split(values * 2, 4)
    expected = dict(zip(("one", "two", "three", "four"), parts, strict=True))
    expected["bias"] = np.full(7, 0.5, "f4")
    got, files = loaded(tmp_path / "out")
    assert len({*files.values()}) > 2
    assert_tensors(got, expected)


def test_states_without_elements_are_left_out_with_a_note(tmp_path):
    params = {"w": np.arange(3.0, dtype="f4")}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"params": params, "opt_state": tx.init(params), "empty": {}}
    source = layouts.save_pytree(tmp_path / "run", state)
    ckpt = reshard.open(source)
    plan = reshard.export(ckpt, tmp_path / "out")
    empty = "empty, opt_state/0, opt_state/1/1, opt_state/1/2"
    assert plan.notes == (f"left out, because they have no elements: {empty}",)
    assert plan.notes[0] in str(plan)
    got, _ = loaded(tmp_path / "out")
    moments = {f"opt_state.1.0.{name}.w": np.zeros(3, "f4") for name in ("mu", "nu")}
    moments["opt_state.1.0.count"] = np.int32(0)
    assert_tensors(got, {"params.w": params["w"], **moments})
    nothing = reshard.select(ckpt, "empty")
    text = refused(TreeMismatchError, reshard.export, nothing, tmp_path / "none")
    assert text == "there is no array to export"


def test_what_the_format_has_no_type_for(tmp_path):
    lacks = {
        "key": (jax.random.key(0), "PRNG keys (threefry2x32)"),
        "nibble": (np.zeros(2, ml_dtypes.int4), "int4"),
        "number": (3, "Python scalars"),
        "small": (np.zeros(2, ml_dtypes.float8_e4m3b11fnuz), "float8_e4m3b11fnuz"),
        "text": ("a", "string"),
        "wide": (np.zeros(2, "complex128"), "complex128"),
    }
    tree = {"w": np.arange(3.0), **{name: leaf for name, (leaf, _) in lacks.items()}}
    source = layouts.save_pytree(tmp_path / "saved", tree)
    text = refused(TreeMismatchError, reshard.export, reshard.open(source), tmp_path / "out")
    told = [f"  {name}: safetensors has no {what}" for name, (_, what) in lacks.items()]
    assert text.split("\n")[:7] == ["6 leaves cannot be written as safetensors", *told]
    wanted = [word for name in lacks for word in ("--drop", name)]
    assert not (tmp_path / "out").exists()
    shown(tmp_path, "export", "saved", "out", *wanted, "--quiet")
    assert_tensors(load_file(tmp_path / "out/model.safetensors"), {"w": tree["w"]})


def test_two_leaves_of_one_name(tmp_path):
    save_file({"c": np.arange(2.0)}, tmp_path / "x.safetensors")
    ckpt = reshard.open(tmp_path / "x.safetensors")
    other = ckpt.replace({path: ckpt["c"].at(path) for path in (("a", "b"), ("a.b",))})
    text = refused(TreeMismatchError, reshard.export, other, tmp_path / "out")
    assert "a/b and a.b -> `a.b`" in text


def test_a_taken_destination(source, tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    told = dict.fromkeys(("file", "link"), "is a file or a symbolic link, not a directory")
    for name, words in (told | {"directory": "exists"}).items():
        out = tmp_path / name
        text = refused(DestinationExistsError, reshard.export, reshard.open(source), out)
        assert text.startswith(f"`{out}` {words}")
    assert {p.name for p in tmp_path.iterdir()} == {"directory", "file", "link"}


def test_an_earlier_export_is_replaced_and_nothing_else(source, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    reshard.export(reshard.open(source), out, file_size="70KiB")
    ckpt = reshard.select(reshard.open(source), "half")
    reshard.export(ckpt, out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "reshard_digests.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    other.mkdir()
    (other / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    text = refused(DestinationExistsError, reshard.export, ckpt, other, overwrite=True)
    assert text.startswith(f"`{other}` would be deleted: it is not a checkpoint")


@pytest.mark.parametrize(
    "name",
    [
        *("sub/model.safetensors", "adapter.safetensors", "weights.bin"),
        *("README.md", "modeling_mine.py", "tokenizer.json", ".DS_Store"),
    ],
)
def test_what_an_export_does_not_write_is_not_replaced(source, tmp_path, name):
    out, ckpt = tmp_path / "out", reshard.open(source)
    reshard.export(ckpt, out)
    assert "note     " in str(plan_export(ckpt, out, overwrite=True))
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_bytes(b"mine")
    for write in (reshard.export, reshard.save):
        text = refused(DestinationExistsError, write, ckpt, out, overwrite=True)
        path = out / name.partition("/")[0]
        told = f"`{out}` holds files that are not part of the checkpoint\n  `{path}`\n"
        hint = "choose another destination, or move these files away"
        assert text.startswith(f"{told}\nhint: {hint}\nhint: rm -r '{path}'")
    assert (out / name).read_bytes() == b"mine"


def test_its_own_like_is_not_replaced(source, tmp_path):
    out, ckpt = tmp_path / "out", reshard.open(source)
    reshard.export(ckpt, out)
    for place in (out, tmp_path, out / "new"):
        text = refused(DestinationError, reshard.export, ckpt, place, like=out, overwrite=True)
        assert text.startswith(f"the destination `{place}` and the directory of `like` `{out}`")


def test_no_step_of_a_root(tmp_path):
    root, out = tmp_path / "run", tmp_path / "out" / "4"
    with layouts.open_manager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jax.numpy.ones(4)}), metrics={"loss": 1})
    ckpt = reshard.open(root)
    text = refused(DestinationError, reshard.export, reshard.open(root / "3"), root / "4")
    assert text.startswith(f"Orbax would take `{root / '4'}` for a step")
    reshard.export(ckpt, out)
    reshard.export(ckpt, out, overwrite=True)


def test_in_shares(source, tmp_path):
    near, out, ckpt = tmp_path / "near", tmp_path / "out", reshard.open(source)
    reshard.export(ckpt, near, file_size="70KiB")
    for number in (0, 2, 1, 1):
        reshard.export(ckpt, out, file_size="70KiB", share=(number, 3))
    file = next(tmp_path.rglob("ocdbt.process_*/model-00001-of-*"))
    file.write_bytes(file.read_bytes()[:-1])
    refused(DestinationError, reshard.commit, out)
    reshard.export(ckpt, out, file_size="70KiB", share=(0, 3))
    assert reshard.commit(out) and not reshard.commit(out)
    assert objects(out) == objects(near)


def test_a_killed_job_is_resumed(source, tmp_path):
    ckpt, out = reshard.open(source), tmp_path / "out"
    sizes = {"file_size": "70KiB", "workers": 3}
    with layouts.killed_at_the_end():
        reshard.export(ckpt, out, **sizes)
    text = refused(DestinationExistsError, reshard.export, ckpt, out, **sizes)
    assert text.startswith("a stopped job left finished shares")
    file = next(tmp_path.rglob("ocdbt.process_*/model-00002-of-*"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    text = refused(CorruptCheckpointError, reshard.export, ckpt, out, resume=True, **sizes)
    assert text.startswith("the values read back differ from those written")
    assert text.endswith("hint: resume=True writes their shares again")
    text = refused(DestinationError, reshard.commit, out)
    assert "1 of" in text and "not complete" in text
    reshard.export(ckpt, out, resume=True, **sizes)
    assert reshard.verify(out, against=source)


def test_a_commit_is_killed_where_no_file_has_two_names(source, tmp_path):
    ckpt, out = reshard.open(source), tmp_path / "out"
    for number in range(2):
        reshard.export(ckpt, out, file_size="70KiB", share=(number, 2))

    def half(self, destination):
        destination.write(self.part(0, 1000))
        raise KeyboardInterrupt

    with mock.patch.object(disk, "link", lambda *_: False):
        with mock.patch.object(disk.Location, "copy", half), pytest.raises(KeyboardInterrupt):
            reshard.commit(out)
        assert reshard.commit(out)
    assert reshard.verify(out, against=source)
    assert not list(tmp_path.rglob("ocdbt.process_*"))


@pytest.mark.parametrize("short", [1 << 11, 1])
@pytest.mark.parametrize("shape", [(6, 40), (3, 8, 40), (2, 3, 8, 40), (2, 600, 40), (40,)])
def test_a_box_of_an_array_is_written_into_its_file(tmp_path, monkeypatch, shape, short):
    monkeypatch.setattr(disk, "_MAPPED", 200)
    monkeypatch.setattr(disk, "_SHORT", short)
    values, mapped = np.arange(math.prod(shape), dtype="u2").reshape(shape), [0]
    memmap = np.memmap

    def watched(file, dtype, mode, offset, nbytes):
        mapped.append(nbytes)
        return memmap(file, dtype, mode, offset, nbytes)

    monkeypatch.setattr(np, "memmap", watched)
    disk.make_file(tmp_path / "file", b"head", values.nbytes)
    for columns in (slice(0, 7), slice(7, 39), slice(39, 40)):
        for rows in (slice(0, shape[0] - 1), slice(shape[0] - 1, shape[0])):
            box = (rows, *(slice(0, size) for size in shape[1:-1]), columns)[-len(shape) :]
            disk.write_box(tmp_path / "file", 4, shape, box, values[box])
    assert np.array_equal(np.fromfile(tmp_path / "file", "u2", offset=4).reshape(shape), values)
    assert max(mapped) <= 200 and (max(mapped) > 0) == (short > 1 and len(shape) > 1)


def test_a_source_that_is_damaged(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    file = max(copy.rglob("d/*"), key=lambda path: path.stat().st_size)
    half = file.stat().st_size // 2
    file.write_bytes(file.read_bytes()[:half].ljust(file.stat().st_size, b"\0"))
    refused(CorruptCheckpointError, reshard.export, reshard.open(copy), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


@pytest.fixture
def model(tree, tmp_path):
    """A Hugging Face directory with weights of the same names and shapes."""
    folder = tmp_path / "model"
    folder.mkdir()
    zeros = {name: np.zeros_like(values) for name, values in tensors(tree).items()}
    save_file(zeros, folder / "model.safetensors")
    texts = ("config.json", "tokenizer.json", "generation_config.json", "README.md", "LICENSE")
    for name in texts:
        (folder / name).write_text(json.dumps({"of": name}))
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "reshard_digests.json"):
        (folder / name).write_text("{}")
    (folder / "onnx").mkdir()
    return folder, texts


def test_like_a_directory(source, tree, model, tmp_path):
    folder, texts = model
    made = reshard.export(reshard.open(source), tmp_path / "out", like=folder)
    assert sorted(made.copied) == sorted(texts)
    found = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert found.keys() == {*texts, "model.safetensors", "reshard_digests.json"}
    assert {name: json.loads(found[name]) for name in texts} == {n: {"of": n} for n in texts}
    assert_tensors(load_file(tmp_path / "out/model.safetensors"), tensors(tree))


CONFIG = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "eps": 1e-05,
    "name": "Ünï",
    "text_config": {"dtype": "bfloat16", "inner_config": {"torch_dtype": "float16"}, "size": 8},
    "vision_config": {"dtype": None, "patch": 2},
    "audio_config": {"patch": 2},
    "quantization_config": {"dtype": "bfloat16"},
}


def with_dtype(dtype):
    config = json.loads(json.dumps(CONFIG))
    config["torch_dtype"] = config["text_config"]["dtype"] = dtype
    config["text_config"]["inner_config"]["torch_dtype"] = dtype
    return config


@pytest.fixture
def configured(model):
    (model[0] / "config.json").write_text(json.dumps(CONFIG))
    return model[0]


CHANGED = "config.json is copied with `torch_dtype` and `dtype` = float32, the dtype of the tensors"


def test_the_dtype_in_the_configuration_is_that_of_the_tensors(source, configured, tmp_path):
    ckpt, out = reshard.cast(reshard.open(source), "float32"), tmp_path / "out"
    planned = plan_export(ckpt, out, like=configured)
    assert planned.notes == (CHANGED,)
    assert "config.json" not in planned.copied and "README.md" in planned.copied
    assert planned.document()["changed"] == ["config.json"]
    made = reshard.export(ckpt, out, like=configured, workers=2)
    assert made.notes == planned.notes
    text = (out / "config.json").read_text()
    assert text == json.dumps(with_dtype("float32"), indent=2) + "\n"
    assert json.loads((configured / "config.json").read_text()) == CONFIG
    words = ["export", source, "told", "--dtype", "float32", "--like", configured]
    told = shown(tmp_path, *words, "--dry-run")
    assert told.endswith(f"\nnote     {CHANGED}\n")
    for number in (0, 1):
        reshard.export(ckpt, tmp_path / "shares", like=configured, share=(number, 2))
    reshard.commit(tmp_path / "shares")
    assert objects(tmp_path / "shares") == objects(out)


CASTING = """
[[rule]]
from = '^odd$'
drop = true
[[rule]]
to = 'odd'
fill = { value = 0.5, shape = [7, 3, 5], dtype = 'float16' }
"""


def test_the_dtype_of_a_map(source, configured, tmp_path):
    """Tensors that are no floats do not count, nor those of 8 bits."""
    saved = reshard.open(source)
    both = layouts.held(saved["layers/1/both"].read(), "float8_e4m3fn")
    tree = {
        "odd": saved["odd"].read(),
        "count": saved["count"].read(),
        "layers": {"1": {"both": both}},
    }
    saved = reshard.open(layouts.save_pytree(tmp_path / "held", tree))
    rules = "[[rule]]\nfrom = '^(count|layers/1/both)$'\nto = '\\1'\n"
    (tmp_path / "map.toml").write_text(CASTING + rules)
    ckpt = reshard.cast(saved, "float8_e4m3fn", "layers/**")
    ckpt = reshard.remap(ckpt, tmp_path / "map.toml")
    zeros = load_file(configured / "model.safetensors")
    zeros = {name: zeros[name] for name in ("odd", "count", "layers.1.both")}
    save_file(zeros, configured / "model.safetensors")
    made = reshard.export(ckpt, tmp_path / "out", like=configured)
    assert made.notes == (CHANGED.replace("float32", "float16"),)
    assert json.loads((tmp_path / "out/config.json").read_text()) == with_dtype("float16")


def test_tensors_of_several_dtypes(source, configured, tmp_path):
    """The configuration has the dtype of most values: `transformers` casts all to it."""
    planned = reshard.export(reshard.open(source), tmp_path / "most", like=configured)
    assert planned.notes == (
        f"{CHANGED.replace('the tensors', 'most values')}: transformers casts the bfloat16 tensors "
        "to it",
    )
    assert json.loads((tmp_path / "most/config.json").read_text()) == with_dtype("float32")
    ckpt = reshard.cast(reshard.open(source), "bfloat16", "layers/**")
    (configured / "config.json").write_text(json.dumps(with_dtype("bfloat16")))
    planned = reshard.export(ckpt, tmp_path / "kept", like=configured)
    assert planned.notes == (
        "config.json is copied with `torch_dtype` and `dtype` = bfloat16, the dtype of most "
        "values: transformers casts the float32 tensors to it",
    )
    kept = (tmp_path / "kept/config.json").read_text()
    assert kept == json.dumps(with_dtype("bfloat16")), "copied"


def test_a_configuration_without_a_dtype_is_copied(source, configured, tmp_path):
    config = '{"size":8 , "vision_config": {"dtype": null}}'
    (configured / "config.json").write_text(config)
    planned = reshard.export(reshard.open(source), tmp_path / "out", like=configured)
    assert planned.notes == () and "config.json" in planned.copied
    assert (tmp_path / "out/config.json").read_text() == config
    (configured / "config.json").write_text("{")
    text = refused(
        CorruptCheckpointError,
        reshard.export,
        reshard.open(source),
        tmp_path / "2",
        like=configured,
    )
    assert text.startswith(f"`{configured / 'config.json'}` is not JSON")


def test_files_of_like_that_cannot_be_copied(source, configured, tmp_path):
    """A link to nothing, and a pointer of git-lfs. Directories are never copied."""
    (configured / "vocab.txt").symlink_to("nowhere")
    (configured / "LICENSES").mkdir()
    (configured / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid")
    text = refused(
        ReshardError, reshard.export, reshard.open(source), tmp_path / "out", like=configured
    )
    assert f"`{configured}/vocab.txt` is a symbolic link to `nowhere`, which does not exist" in text
    assert f"`{configured}/tokenizer.json` is a pointer of git-lfs, not the file itself" in text
    assert text.endswith(f"\n\nhint: git -C {configured} lfs pull")


@pytest.mark.parametrize("whole", [True, False])
def test_unlike_a_directory(source, tree, model, tmp_path, whole):
    folder, _ = model
    zeros = load_file(folder / "model.safetensors")
    zeros["lost"] = zeros.pop("half")
    zeros["odd"] = zeros["odd"].reshape(3, 7, 5)
    save_file(zeros, folder / "model.safetensors")
    if not whole:
        (folder / "model.safetensors").unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(zeros, "x")}))
    ckpt = reshard.open(source)
    text = refused(TreeMismatchError, reshard.export, ckpt, tmp_path / "out", like=folder)
    if not whole:
        (folder / INDEX).write_text('{"weight_map": null}')
        told = refused(CorruptCheckpointError, reshard.export, ckpt, tmp_path / "out", like=folder)
        assert told == f"`{folder / INDEX}` has no `weight_map`"
    first, *lines = text.partition("\n\n")[0].split("\n")
    assert first == f"the tensors differ from those of `{folder}`"
    assert {*lines} == {
        f"  missing: `lost`, which `{folder}` has",
        f"  unexpected: `half` bfloat16[8,24], which `{folder}` lacks",
        *[f"  mismatch: `odd` is float32[7,3,5], but [3, 7, 5] in `{folder}`"] * whole,
    }
    assert not (tmp_path / "out").exists()


def test_the_command(source, tree, tmp_path):
    words = ["export", source, "hf", "--select", "layers/**", "--file-size", "60KiB"]
    out = shown(tmp_path, *words, "--dry-run")
    assert not (tmp_path / "hf").exists() and "9 arrays" in out and "wrote" not in out
    assert shown(tmp_path, *words).endswith("wrote hf\n")
    got, files = loaded(tmp_path / "hf")
    assert_tensors(got, tensors({"layers": tree["layers"]}))
    status, out, _ = reshard_in(tmp_path, *words, "--json")
    assert status == 2 and json.loads(out)["done"] is False
    words[2] = "other"
    document = json.loads(shown(tmp_path, *words, "--json"))
    assert document["done"] is True
    assert {t: f["name"] for f in document["files"] for t in f["tensors"]} == files
    assert "nothing is wrong" in shown(tmp_path, "verify", "hf")


def test_a_record_of_a_single_file_is_refused(source, tmp_path):
    reshard.export(reshard.open(source), tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    text = refused(DestinationError, reshard.digest, file, write=True)
    assert text == (
        f"`{file}` is a single file: a record of digests needs a directory\n\n"
        f"hint: reshard.digest('{tmp_path}/hf', write=True)"
    )


@pytest.fixture(params=["s3", "conditional"])
def bucket(stores, request):
    return stores.bucket(request.param)


def objects(url):
    place = parse_location(url)
    return {e.path: (place / e.path).read_whole() for e in place.walk() if e.is_file}


def test_too_little_room_for_temporary_files(source, bucket, stores, monkeypatch):
    usage, stores.requests = mock.Mock(free=100_000), []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    text = refused(DestinationError, reshard.export, reshard.open(source), f"{bucket}/hf")
    first, second, *_, hint = text.splitlines()
    assert first == f"not enough disk space for temporary files of the export to `{bucket}/hf`"
    assert second.endswith(", free 97.66 KiB")
    assert hint == "hint: TMPDIR names another directory for them"
    assert not stores.answered("write")


@pytest.mark.parametrize("size", ["5GB", "70KiB"])
def test_in_a_bucket(source, model, bucket, stores, tmp_path, size, monkeypatch):
    monkeypatch.setattr(commit, "_LARGE", 1 << 12)  # more is copied on the server
    url, ckpt = f"{bucket}/hf", reshard.open(source)
    (model[0] / "config.json").write_text(json.dumps(CONFIG))
    reshard.export(ckpt, tmp_path / "near", like=model[0], file_size=size)
    assert json.loads((tmp_path / "near/config.json").read_text()) == with_dtype("float32")
    stores.reset()
    reshard.export(ckpt, url, like=model[0], file_size=size)
    near, found = objects(tmp_path / "near"), objects(url)
    del found[RECORD]
    copied = json.loads(near["reshard_digests.json"])  # on a disk, a later job may replace these
    assert copied.pop("copied").keys() == {
        name for name in near if (model[0] / name).exists() and is_copied(name)
    }
    near["reshard_digests.json"] = json.dumps(copied).encode()
    assert found == near
    written = [r.key.rpartition("/")[2] for r in stores.requests if r.operation == "write"]
    last = [name for name in written if name in near][-1]
    assert last == ("config.json" if size == "5GB" else INDEX)
    assert reshard.verify(url, against=source)
    text = refused(DestinationExistsError, reshard.export, ckpt, url)
    assert text.startswith(f"`{url}` is complete")


def test_stopped_in_a_bucket(source, bucket, stores):
    url, ckpt = f"{bucket}/hf", reshard.open(source)
    stores.faults = [servers.Fault(f"^write .*/hf/{INDEX}", "cut", times=100)]
    with pytest.raises(ReshardError):
        reshard.export(ckpt, url, file_size="70KiB")
    stores.reset()
    text = refused(UncommittedCheckpointError, reshard.open, url)
    assert text.startswith(f"the export to `{url}` is not complete: the last files are missing")
    assert reshard.commit(url)
    assert reshard.verify(url, against=source)


@pytest.mark.parametrize("change", ["committed", "committed by another job", "written", "lost"])
def test_a_name_that_exists_when_its_file_is_copied(source, bucket, monkeypatch, change):
    """Another process has committed the job and deleted the file, or the copy is refused."""
    monkeypatch.setattr(commit, "_LARGE", 1 << 12)
    url, ckpt, copy = f"{bucket}/hf", reshard.open(source), BucketLocation.copy_on_server

    def changed(old, place):
        copy(old, place)
        if change == "written":
            place.write(bytes(place.file_bytes()))
        if change == "committed by another job":
            place.write(b"other")
        if change.startswith("committed"):
            old.remove()
            return copy(old, place)
        return False

    monkeypatch.setattr(BucketLocation, "copy_on_server", changed)
    if change in ("committed", "lost"):
        reshard.export(ckpt, url, file_size="70KiB")
        assert reshard.verify(url, against=source)
    else:
        text = refused(DestinationError, reshard.export, ckpt, url, file_size="70KiB")
        assert "holds other content than this job writes" in text


def test_another_program_writes_to_the_bucket_meanwhile(source, bucket):
    url = f"{bucket}/hf"
    place = parse_location(url)

    def uploaded(*_):
        (place / "run" / "other").write(b"of another program")
        raise KeyboardInterrupt

    with (
        mock.patch.object(type(place), "upload", side_effect=uploaded),
        pytest.raises(KeyboardInterrupt),
    ):
        reshard.export(reshard.open(source), url)
    assert "run/other" in objects(url)


@pytest.mark.parametrize("name", ["hf2", "hf_2", "a_40", "2"])
def test_an_export_has_no_siblings(source, tmp_path, name):
    """What else is in the directory around it matters only if Orbax would take it for a step."""
    parent = tmp_path / "run"
    for step in ("a_20", "b_20", "c20", "notes_7"):
        (parent / step).mkdir(parents=True)
    for step in ("a_20", "b_20"):
        layouts.save_pytree(parent / step / "default", {"w": np.ones(3)})
    if name != "a_40":
        reshard.export(reshard.open(parent / "b_20"), parent / name)
        assert [*reshard.open(parent / name)] == [("w",)]
        return
    text = refused(DestinationError, reshard.export, reshard.open(parent / "b_20"), parent / name)
    assert text.startswith(f"Orbax would take `{parent / name}` for a step")
