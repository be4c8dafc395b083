"""safetensors files, which the `safetensors` library writes: every dtype, in files and directories,
on a disk and in buckets; and files that are wrong."""

import json
import shutil

import hf_models
import layouts
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import refused
from releases import older
from safetensors.numpy import load_file, save_file

import reshard
from reshard.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DestinationError,
)
from reshard.storage.location import parse_location

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
DTYPES += [] if older("tensorstore", "0.1.85") else ["float8_e8m0fnu"]
# What the library calls dtypes that it does not write from numpy.
NAMES = {"float8_e8m0fnu": "F8_E8M0"}
NAMES |= {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64"}


def packed(entries, data=b""):
    """A file, by the description of the format."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def written(path, tensors):
    """Writes tensors of dtypes that the library does not write."""
    entries, data = {}, b""
    for name, (dtype, values) in tensors.items():
        entries[name] = entry(len(data), len(data) + values.nbytes, values.shape, dtype)
        data += values.tobytes()
    path.write_bytes(packed(entries, data))


def random_bits(shape, dtype, seed=0):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    values = np.frombuffer(bits, "u1")
    return (values % 2 if dtype.name == "bool" else values).view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    made = {f"model.layers.{n}.w": rng.standard_normal((6, 40, 24)).astype("f4") for n in range(11)}
    made["model.embed.weight"] = rng.standard_normal((301, 16)).astype(ml_dtypes.bfloat16)
    made["large"] = rng.standard_normal((6, 700, 1024)).astype("f4")  # of several chunks
    made["step"] = np.array(7)
    return made


@pytest.fixture(scope="module")
def file(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def parts(tensors, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = {}
    for number, name in enumerate(names):
        own = dict(list(tensors.items())[number::3])
        save_file(own, folder / name)
        index |= dict.fromkeys(own, name)
    document = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    (folder / "config.json").write_text("{}")
    return folder


def named(tree):
    return flatten_dict(tree, sep=".")


def assert_tensors(got, tensors):
    assert got.keys() == tensors.keys()
    for name, values in tensors.items():
        assert (got[name].dtype, got[name].shape) == (values.dtype, values.shape), name
        assert np.asarray(got[name]).tobytes() == values.tobytes(), name


@pytest.mark.every_combination
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path, dtype):
    shapes = [(5, 3, 2), (7,), (), (0, 4), (1, 1)]
    values = {f"a.{n}": random_bits(shape, dtype, n) for n, shape in enumerate(shapes)}
    path = tmp_path / "all.safetensors"
    if dtype in NAMES:
        written(path, {name: (NAMES[dtype], array) for name, array in values.items()})
    else:
        save_file(values, path)
    ckpt = reshard.open(path)
    assert_tensors({".".join(p): a.view().read().result() for p, a in ckpt.items()}, values)


def test_a_file_is_one_checkpoint(file, parts):
    ckpt = reshard.open(file)
    layers = [key[2] for key in ckpt if key[:2] == ("model", "layers")]
    assert layers == [str(n) for n in range(11)]
    assert (ckpt.source.kind, ckpt.source.format) == ("safetensors", "safetensors")
    assert [*reshard.open(parts)] == [*ckpt]
    text = refused(CheckpointNotFoundError, reshard.open, file, step=3)
    assert text == f"`{file}` is one checkpoint and has no steps\n\nhint: leave out step=..."


@pytest.mark.parametrize("mesh", [None, "1x8"])
def test_it_becomes_an_orbax_checkpoint(tensors, parts, tmp_path, mesh):
    ckpt, out = reshard.open(parts), tmp_path / "out"
    if mesh is not None:
        specs = {r"layers/\d+/w$": P(None, "model"), "^large$": P(None, None, "model")}
        ckpt = reshard.to_mesh(ckpt, "data=1,model=8", specs)
    plan = reshard.save(ckpt, out, verify=True, max_memory="64MiB")
    assert plan.passes == 1.0
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_tensors(named(checkpointer.restore(out)), tensors)
    assert reshard.diff(parts, out, values=True).equal
    assert reshard.digest(parts) == reshard.digest(out)
    assert reshard.verify(out, against=parts)
    written = reshard.open(out)
    assert {p.name for p in out.iterdir()} & {"config.json"} == set()
    assert written["large"].data.encoding.compressors
    if mesh is not None:
        assert [str(mesh) for mesh in written.meshes] == ["data=1,model=8"]
        assert written["large"].chunk_shape[1:] == (700, 128)


@pytest.mark.parametrize("form", ["zarr2", "zarr3"])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_chunks_that_are_not_compressed(tensors, file, tmp_path, form, ocdbt):
    plan = reshard.save(
        reshard.open(file), tmp_path / "out", ocdbt=ocdbt, format=form, codec="none"
    )
    assert all(array.box is None for array in plan.arrays), "copied verbatim"
    assert_tensors(named(layouts.load_pytree(tmp_path / "out")), tensors)


def test_workers_and_shares(tensors, file, tmp_path):
    ckpt = reshard.to_mesh(
        reshard.open(file), "data=1,model=8", {"^large$": P(None, None, "model")}
    )
    for n in range(3):
        reshard.save(ckpt, tmp_path / "shares", share=(n, 3))
    assert reshard.commit(tmp_path / "shares")
    reshard.save(ckpt, tmp_path / "workers", workers=2, max_memory="64MiB")
    for out in ("shares", "workers"):
        assert_tensors(named(layouts.load_pytree(tmp_path / out)), tensors)


def test_restored_into_a_state(tensors, file):
    mesh, specs = layouts.mesh((1, 8)), {"large": P(None, None, "model")}
    own = {name: values for name, values in tensors.items() if name != "step"}
    shardings = {name: NamedSharding(mesh, specs.get(name, P())) for name in own}
    target = {name: layouts.laid_out(values, shardings[name]) for name, values in own.items()}
    target = unflatten_dict(target, sep=".")
    state = reshard.restore(reshard.select(reshard.open(file), drop="step"), target)
    assert_tensors(named(state), own)
    assert named(state)["large"].sharding.spec == P(None, None, "model")


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_in_a_bucket(tensors, parts, stores, tmp_path, kind):
    url = f"{stores.bucket(kind)}/hf"
    for file in parts.iterdir():
        reshard.storage.location.parse_location(f"{url}/{file.name}").write(file.read_bytes())
    stores.reset()
    ckpt = reshard.open(url)
    assert sum(r.received for r in stores.requests) < 1 << 16, "headers alone"
    rows = ckpt["large"].view()[2, 100:102].read().result()
    assert np.array_equal(rows, tensors["large"][2, 100:102])
    assert sum(r.received for r in stores.requests) < tensors["large"].nbytes
    opened = {"out": ckpt, "by_index": reshard.open(f"{url}/model.safetensors.index.json")}
    for name, each in opened.items():
        reshard.save(reshard.to_mesh(each, "data=8"), tmp_path / name)
        assert_tensors(named(layouts.load_pytree(tmp_path / name)), tensors)


def test_names_below_one_another_are_not_split(tmp_path):
    values = {"a": np.arange(3.0), "a.b": np.arange(4.0)}
    save_file(values, tmp_path / "x.safetensors")
    ckpt = reshard.open(tmp_path / "x.safetensors")
    assert_tensors({path[0]: a.view().read().result() for path, a in ckpt.items()}, values)


def one(*args, data=bytes(8), **fields):
    return packed({"a": entry(*args, **fields)}, data)


# The problem of a file, and the file.
WRONG = {
    "it has 4 bytes, too few for a header": b"1234",
    "a header of 1.00 TiB in a file of 10 B": (1 << 40).to_bytes(8, "little") + b"{}",
    "expecting property name enclosed in double quotes at character 1": packed(b"{..."),
    "its header is not a JSON object": packed([]),
    'the key "a" occurs twice': packed(b'{"a": 1, "a": 2}'),
    "the JSON is nested too deeply": packed(b"[" * 5000 + b"]" * 5000),
    "`a`: the dtype 'F4' is not supported": one(0, 8, dtype="F4"),
    "`a`: a shape or an offset is not a whole number": one(0, 8, (2.0,)),
    "`a`: a shape or an offset is not a whole": one(-8, 0, data=b""),
    "`a`: it has 8 bytes, and F32[3] has 12": one(0, 8, (3,)),
    "`a`: it has 8 bytes, and F32[1099511627776, 10": one(0, 8, (2**40, 2**40)),
    "`a`: 'data_offsets'": packed({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "`a`: 'int' object is not subscriptable": packed({"a": 3}),
    **{
        text: packed({"a": entry(0, 8), "b": entry(begin, begin + 8)}, bytes(size))
        for text, begin, size in (
            ("is truncated: 143 bytes, expected 147", 8, 12),
            ("`a` and `b` overlap at 8", 4, 12),
            ("`a` and `b` leave a hole at 8", 12, 20),
        )
    },
}


@pytest.mark.every_combination
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file(tmp_path, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(WRONG[text])
    said = refused(CorruptCheckpointError, reshard.open, path)
    assert said.startswith(f"`{path}` cannot be read as safetensors\n  `{path}`")
    assert text in said


def test_an_index_that_contradicts_the_files(parts, tensors):
    index = parts / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    first, second = [name for name, file in document["weight_map"].items() if "1-of" in file][:2]
    moved = document["weight_map"] | {first: "model-00002-of-00003.safetensors", "lost": "x"}
    del moved[second]
    index.write_text(json.dumps({"weight_map": moved}))
    own = "model-00001-of-00003.safetensors"
    lines = refused(CorruptCheckpointError, reshard.open, parts).splitlines()
    assert sorted(lines[1:]) == sorted(
        [
            f"  `{first}` is in `{own}`, but the index names `model-00002-of-00003.safetensors`",
            "  `x` is missing, with 1 tensor that the index names in it: `lost`",
            f"  `{second}` is in `{own}`, but the index does not list it",
        ]
    )
    index.write_text(json.dumps(document))
    (parts / "model-00002-of-00003.safetensors").unlink()
    names = [name for name, file in document["weight_map"].items() if "2-of" in file]
    said = refused(CorruptCheckpointError, reshard.open, parts)
    text = f"with {len(names)} tensors that the index names in it: `{names[0]}`, ..."
    assert said.endswith(f"\n  `model-00002-of-00003.safetensors` is missing, {text}")
    index.write_text("{}")
    said = refused(CorruptCheckpointError, reshard.open, parts)
    assert said == f"`{index}` has no `weight_map`"


def test_a_file_that_is_missing_where_there_is_no_index(parts, tensors):
    (parts / "model.safetensors.index.json").unlink()
    assert {".".join(path) for path in reshard.open(parts)} == {*tensors}
    (parts / "model-00002-of-00003.safetensors").unlink()
    said = refused(CorruptCheckpointError, reshard.open, parts)
    assert said.endswith("  `model-00002-of-00003.safetensors` is missing")
    assert len(reshard.open(parts / "model-00001-of-00003.safetensors"))


@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model", "a.fp16"])
def test_only_the_files_of_the_index_are_read(parts, tensors, name):
    (parts / "model.safetensors.index.json").rename(parts / f"{name}.safetensors.index.json")
    others = ("consolidated", "model.fp16", "model")
    for other in others:
        save_file(
            {key: np.asarray(values * 2) for key, values in tensors.items()},
            parts / f"{other}.safetensors",
        )
    (parts / "broken.safetensors").write_bytes(b"1234")
    ckpt = reshard.open(parts)
    assert_tensors({".".join(p): a.view().read().result() for p, a in ckpt.items()}, tensors)
    left = "`broken.safetensors`, `consolidated.safetensors`, `model.fp16.safetensors`"
    assert ckpt.notes == (f"the index does not name {left}, `model.safetensors`: not read",)


def test_an_index_whose_files_are_missing_beside_another_file(parts, tensors):
    save_file(tensors, parts / "model.safetensors")
    for file in parts.glob("model-*"):
        file.unlink()
    lines = refused(CorruptCheckpointError, reshard.open, parts).splitlines()
    assert len(lines) == 6 and all(" is missing, with " in line for line in lines[1:4])
    assert lines[4:] == [
        "",
        f"hint: open a file that is not in the index: {parts}/model.safetensors",
    ]
    assert [*reshard.open(parts / "model.safetensors")]


@pytest.mark.parametrize(
    "variant", ["model.fp16.safetensors.index", "model.safetensors.index.fp16"]
)
def test_two_indexes(parts, tensors, tmp_path, variant):
    halves = {name: values.astype("f2") for name, values in tensors.items()}
    save_file(halves, parts / "model-00001-of-00001.fp16.safetensors")
    index = dict.fromkeys(halves, "model-00001-of-00001.fp16.safetensors")
    both = sorted([f"{variant}.json", "model.safetensors.index.json"])
    (parts / f"{variant}.json").write_text(json.dumps({"weight_map": index}))
    text = refused(CheckpointNotFoundError, reshard.open, parts)
    assert text == f"`{parts}` has several indexes\n  {both[0]}\n  {both[1]}\n\n" + "\n".join(
        f"hint: open one of them: {parts / name}" for name in both
    )
    for name, expected in ((f"{variant}.json", halves), ("model.safetensors.index.json", tensors)):
        ckpt = reshard.open(parts / name)
        got = {".".join(p): a.view().read().result() for p, a in ckpt.items()}
        assert_tensors(got, expected)
        out = tmp_path / name
        reshard.export(ckpt, out, like=parts / name)
        assert reshard.diff(parts / name, out, values=True).equal
        assert sorted(p.name for p in out.iterdir()) == [
            "config.json",
            "model.safetensors",
            "reshard_digests.json",
        ]
        text = refused(DestinationError, reshard.export, ckpt, parts, overwrite=True)
        assert "overlap" in text
    assert "`model-00001-of-00001.fp16.safetensors`: not read" in ckpt.notes[0]


def test_tensors_in_several_files_without_an_index(parts, tensors):
    (parts / "model.safetensors.index.json").unlink()
    save_file(tensors, parts / "consolidated.safetensors")
    *lines, empty, hint = refused(CorruptCheckpointError, reshard.open, parts).splitlines()
    twice = [f"  `{name}` is in `consolidated.safetensors` and in `model-0000" for name in tensors]
    assert all(any(line.startswith(text) for line in lines) for text in twice)
    assert (empty, hint) == ("", f"hint: open one of the files: {parts}/consolidated.safetensors")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"


def test_pointers_of_git_lfs(parts, tmp_path):
    first, _, last = sorted(parts.glob("*.safetensors"))
    hint = f"\n\nhint: git -C {parts} lfs pull"
    what = "is a pointer of git-lfs, not the file itself"
    for file in (first, last):
        file.write_text(POINTER)
    text = refused(CorruptCheckpointError, reshard.open, parts)
    assert text.startswith(f"`{parts}` cannot be read as safetensors\n  `{first}` {what}\n")
    assert f"  `{last}` {what}\n" in text and text.endswith(hint)
    text = refused(CorruptCheckpointError, reshard.open, first)
    assert text == f"`{first}` cannot be read as safetensors\n  `{first}` {what}{hint}"
    (parts / "model.safetensors.index.json").write_text(POINTER)
    text = refused(CheckpointFormatError, reshard.open, parts)
    assert text == f"`{parts}/model.safetensors.index.json` {what}{hint}"
    (tmp_path / "flax").mkdir()
    for file in (tmp_path / "flax" / "flax_model.msgpack", tmp_path / "pytorch_model.bin"):
        file.write_text(POINTER)
        for path in (file, file.parent)[: 1 + (file.parent != tmp_path)]:
            text = refused(CheckpointFormatError, reshard.open, path)
            assert text == f"`{file}` {what}\n\nhint: git -C {file.parent} lfs pull"


def test_a_cache_of_hugging_face(parts, tensors, tmp_path):
    model = hf_models.in_cache(parts, tmp_path / "hub")
    (snapshot,) = (model / "snapshots").iterdir()
    for path in (model, snapshot):
        assert_tensors(
            {".".join(p): a.view().read().result() for p, a in reshard.open(path).items()}, tensors
        )
    reshard.save(reshard.open(model), tmp_path / "out", max_memory="64MiB")
    reshard.export(reshard.open(model), tmp_path / "back", like=model)
    for out in ("out", "back"):
        assert reshard.diff(model, tmp_path / out, values=True).equal
        assert not any(path.is_symlink() for path in (tmp_path / out).rglob("*"))
    (one, *_) = snapshot.glob("model-00001-*")
    assert len(reshard.open(one)) == len(load_file(one))
    assert reshard.open(model).source.root == parse_location(snapshot)


def test_a_cache_without_its_snapshot(parts, tensors, tmp_path):
    model = hf_models.in_cache(parts, tmp_path / "hub")
    (snapshot,) = (model / "snapshots").iterdir()
    (model / "refs" / "main").write_text("f" * 40)
    shutil.copytree(snapshot, other := model / "snapshots" / ("a" * 40), symlinks=True)
    hints = f"\n\nhint: {snapshot}\nhint: {other}"
    text = refused(CheckpointNotFoundError, reshard.open, model)
    assert text == f"`{model}` has no snapshot `{'f' * 40}`, which its `refs/main` names{hints}"
    for wrong in ("../../elsewhere", ""):
        (model / "refs" / "main").write_text(wrong)
        text = refused(CheckpointNotFoundError, reshard.open, model)
        assert text == f"`{model}` has no snapshot `{wrong}`, which its `refs/main` names{hints}"
    (model / "refs" / "main").unlink()
    text = refused(CheckpointNotFoundError, reshard.open, model)
    assert text == f"`{model}` has no `refs/main`, which names the snapshot to open{hints}"
    for hint in (other, snapshot):
        assert len(reshard.open(hint)) == len(tensors)


def test_links_of_a_directory_that_lead_to_no_file(parts, tmp_path):
    first, second, _ = sorted(parts.glob("*.safetensors"))
    for file, target in ((first, "nowhere"), (second, tmp_path)):
        file.unlink()
        file.symlink_to(target)
    lines = refused(CorruptCheckpointError, reshard.open, parts).splitlines()
    assert f"  `{first}` is a symbolic link to `nowhere`, which does not exist" in lines
    assert f"  `{second}` is a directory, not a file" in lines
    index = parts / "model.safetensors.index.json"
    index.unlink()
    index.symlink_to("nowhere")
    text = refused(CheckpointFormatError, reshard.open, parts)
    assert text == f"`{index}` is a symbolic link to `nowhere`, which does not exist"
