"""msgpack files as Flax writes them: every kind of leaf and of file, on a disk and in buckets;
wrong files; and what opening one reads."""

import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import flax.linen as nn
import flax.serialization
import hf_models
import jax
import jax.numpy as jnp
import layouts
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import reshard_in, shown
from layouts import refused
from sampling import examples
from test_safetensors import random_bits

import reshard
from reshard.storage.location import parse_location

DTYPES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64"
DTYPES = f"{DTYPES} complex64 complex128 float8_e4m3fn float8_e5m2".split()
pack = flax.serialization.msgpack_serialize


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (24, 7):
            x = nn.Dense(features)(x)
        return x


def train_state(seed=0):
    variables = Model().init(jax.random.key(seed), jnp.ones((1, 16)))
    tx = optax.adamw(1e-3)
    state = TrainState.create(apply_fn=Model().apply, params=variables["params"], tx=tx)
    grads = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(seed + 1), p.shape), state.params
    )
    return state.apply_gradients(grads=grads).replace(step=jnp.array(3))


def leaves(tree):
    """Path of strings -> leaf, of a tree that Flax restored."""

    def is_leaf(node):
        return node is None or (isinstance(node, dict | list) and not node)

    pairs, _ = jax.tree.flatten_with_path(tree, is_leaf=is_leaf)
    return {tuple(jax.tree_util.keystr((k,), simple=True) for k in path): x for path, x in pairs}


def assert_read(ckpt, tree):
    expected = leaves(tree)
    assert {tuple(map(str, path)) for path in ckpt} == expected.keys()
    for path, leaf in ckpt.items():
        value = expected[tuple(map(str, path))]
        if isinstance(leaf, reshard.ArrayHandle):
            value, read = np.asarray(value), leaf.read()
            assert (read.dtype, read.shape) == (value.dtype, value.shape), path
            assert read.tobytes() == value.tobytes(), path
        else:
            assert leaf == value


@pytest.fixture
def tree(monkeypatch):
    """All kinds of leaves. `rows` and `column` have parts that end within rows and chunks."""
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
    arrays = {dtype: random_bits((3, 5), dtype, n) for n, dtype in enumerate(DTYPES)}
    numbers = {"step": 5, "big": 2**63 + 1, "small": -(2**40), "rate": 2.5, "flag": True}
    others = {"none": None, "text": "abc", "complex": 1 - 2j, "scalar": np.float32(3), "dict": {}}
    lists = {"list": [np.arange(3), {"a": np.ones(2)}, []], "deep": {"a.b": {"c/d": np.arange(4)}}}
    rows, column = random_bits((50, 7), "float32"), random_bits((1777,), "float64")
    large = {"rows": rows, "column": column, "cube": random_bits((11, 3, 13), "bfloat16")}
    return {"arrays": arrays, **numbers, **others, **lists, **large, "scalar_array": np.array(7)}


@pytest.fixture
def file(tree, tmp_path):
    path = tmp_path / "state.msgpack"
    path.write_bytes(pack(tree))
    return path


def test_every_leaf_that_flax_writes(file):
    restored = flax.serialization.msgpack_restore(file.read_bytes())
    ckpt = reshard.open(file)
    assert_read(ckpt, restored)
    assert b"__msgpack_chunked_array__" in file.read_bytes()
    assert (ckpt.source.kind, ckpt.source.format) == ("msgpack", "msgpack")
    assert ckpt.notes == ()
    part = (slice(17, 31), slice(2, 6))
    assert np.array_equal(ckpt["rows"].read(part), restored["rows"][part], equal_nan=True)


def test_every_command_on_a_file(file, tmp_path):
    assert "rows " in shown(tmp_path, "inspect", file)
    assert "complete" in shown(tmp_path, "doctor", file)
    assert reshard_in(tmp_path, "ckpt", file, "out", "--verify")[0] == 0
    assert reshard_in(tmp_path, "diff", file, "out", "--values")[0] == 0
    assert reshard_in(tmp_path, "verify", "out", "--against", file)[0] == 0
    restored = flax.serialization.msgpack_restore(file.read_bytes())
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = leaves(checkpointer.restore(tmp_path / "out"))
    for path, value in leaves(restored).items():
        assert type(found[path]) is type(value) or isinstance(value, np.generic | complex)
        if isinstance(value, dict | list | str | None):
            assert found[path] == value
        else:
            assert np.asarray(found[path]).tobytes() == np.asarray(value).tobytes(), path
    reshard.save(reshard.open(file), tmp_path / "workers", workers=2, codec="none")
    assert reshard.diff(file, tmp_path / "workers", values=True).equal


def write_checkpoints(path, state):
    for step in (9, 10):
        with flax.config.temp_flip_flag("use_orbax_checkpointing", False):
            checkpoints.save_checkpoint(path, state.replace(step=jnp.array(step)), step, keep=5)
    assert sorted(p.name for p in path.iterdir()) == ["checkpoint_10", "checkpoint_9"]


def write_model(path, state):
    path.mkdir()
    (path / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(state))
    (path / "config.json").write_text("{}")


def write_shards(path, state):
    path.mkdir()
    weight_map = {}
    for n, (key, part) in enumerate(flax.serialization.to_state_dict(state).items(), 1):
        name = f"flax_model-0000{n}-of-00003.msgpack"
        (path / name).write_bytes(flax.serialization.to_bytes({key: part}))
        arrays = [p for p, leaf in leaves({key: part}).items() if hasattr(leaf, "dtype")]
        weight_map |= {"/".join(p): name for p in arrays}
    document = json.dumps({"weight_map": weight_map})
    (path / "flax_model.msgpack.index.json").write_text(document)


@pytest.mark.parametrize("write", [write_checkpoints, write_model, write_shards])
def test_a_train_state_is_restored(tmp_path, write):
    path, state = tmp_path / "there", train_state()
    write(path, state)
    if write == write_checkpoints:
        state = state.replace(step=jnp.array(10))
        assert reshard.open(path, step=9)["step"].read() == 9
        text = refused(reshard.CheckpointNotFoundError, reshard.open, path, step=8)
        assert text == f"`{path}` has no step 8\n  its steps: 9, 10\n\nhint: step=9"
    data = flax.serialization.to_bytes(state)
    ckpt = reshard.open(path)
    assert_read(ckpt, flax.serialization.msgpack_restore(data))
    assert "stay dicts" in "".join(ckpt.notes)
    expected = flax.serialization.from_bytes(train_state(5), data)
    target = flax.serialization.to_state_dict(expected)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: layouts.laid_out(leaf, sharding), target)
    found = flax.serialization.from_state_dict(train_state(5), reshard.restore(ckpt, target))
    for leaf, value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, value)


@pytest.mark.parametrize("version", ["orbax-0.2.7", "orbax-0.4.4", "orbax-0.4.4-b"])
def test_aggregate_files_of_orbax(data, version):
    path = data / version / "aggregate"
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_read(reshard.open(path), checkpointer.restore(path))


def test_links_to_files(data, tmp_path):
    """They are followed in the cache of Hugging Face, and not in an item of Orbax."""
    tree = {"w": random_bits((3, 5), "float32")}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "flax_model.msgpack").write_bytes(pack(tree))
    model = hf_models.in_cache(tmp_path / "hf", tmp_path / "hub")
    assert_read(reshard.open(model), tree)
    item = shutil.copytree(data / "orbax-0.4.4" / "aggregate", tmp_path / "item")
    (item / "checkpoint").rename(tmp_path / "elsewhere")
    (item / "checkpoint").symlink_to(tmp_path / "elsewhere")
    text = refused(reshard.CheckpointFormatError, reshard.open, item)
    assert text.startswith(f"`{item / 'checkpoint'}` is neither a file nor a directory")


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_in_a_bucket(stores, kind):
    url = f"{stores.bucket(kind)}/run"
    tree = {str(n): random_bits((3, 5), "bfloat16", n) for n in range(9)}
    tree["large"] = random_bits((900, 1024), "float32", 3)
    for step in (2, 10):
        parse_location(f"{url}/checkpoint_{step}").write(pack(tree | {"step": step}))
    stores.reset()
    ckpt = reshard.open(url)
    assert sum(r.received for r in stores.requests) < tree["large"].nbytes
    assert_read(ckpt, flax.serialization.msgpack_restore(pack(tree | {"step": 10})))


def test_files_that_are_not_one_tree(tmp_path):
    for name in ("flax_model.msgpack", "opt_state.msgpack"):
        (tmp_path / name).write_bytes(pack({"w": np.arange(3)}))
    text = refused(reshard.CheckpointNotFoundError, reshard.open, tmp_path)
    assert text == (
        f"`{tmp_path}` has several checkpoints\n  flax_model.msgpack\n  opt_state.msgpack\n\n"
        f"hint: open one of them: {tmp_path}/flax_model.msgpack"
    )
    index = tmp_path / "flax_model.msgpack.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "flax_model.msgpack", "v": "x"}}))
    text = refused(reshard.CorruptCheckpointError, reshard.open, tmp_path)
    assert "\n  w: it occurs twice\n  `x` is missing, with 1 tensor that the index names in" in text


def test_arrays_in_other_files_are_refused(data, tmp_path):
    """Several processes wrote one of the checkpoints, and Orbax 0.2 the other."""
    (tmp_path / "checkpoint").write_bytes(pack({"w": "//GDAPlaceholder:w", "b": np.arange(3)}))
    for path in (tmp_path, data / "orbax-0.2.7" / "ocdbt_False"):
        assert refused(reshard.CheckpointFormatError, reshard.open, path) == (
            f"`{path}/checkpoint` holds a tree whose arrays are in other files. Orbax 0.2 and Flax "
            "wrote such files, which `reshard` does not read\n\n"
            "hint: restore it with the program that saved it, and save it with a newer Orbax"
        )


def test_an_array_without_elements_is_read_and_not_written(tmp_path):
    path = tmp_path / "x.msgpack"
    path.write_bytes(pack({"a": {"empty": np.zeros((0, 3), "f4")}, "w": np.arange(3)}))
    assert reshard.open(path)["a/empty"].read().shape == (0, 3)
    text = refused(reshard.TreeMismatchError, reshard.save, reshard.open(path), tmp_path / "out")
    assert text == (
        "Orbax stores no arrays without elements\n  a/empty  float32[0,3]\n\n"
        'hint: reshard.select(ckpt, drop=["a/empty"])'
    )


def ext(code, *values, data=None):
    return msgpack.ExtType(code, msgpack.packb(values) if data is None else data)


def packed(leaf):
    return msgpack.packb({"a": {"w": leaf}}, use_bin_type=True)


def chunked(shape, *chunks, **more):
    parts = {str(n): ext(1, [len(c)], "float32", c.tobytes()) for n, c in enumerate(chunks)}
    shape = {str(n): size for n, size in enumerate(shape)}
    return packed({"__msgpack_chunked_array__": True, "shape": shape, "chunks": parts, **more})


F4 = np.arange(4, dtype="f4")
GOOD = packed(ext(1, [2, 2], "float32", F4.tobytes()))
# The problem of a file, a pattern -> files that have it.
WRONG = {
    "a msgpack extension of 30 bytes does not fit in a file of 38 bytes": [GOOD[:-1]],
    "a text of length 2 does not fit in the file, which has 3 bytes": [b"\x81\xa2a"],
    "the tree ends, but the file has 2 bytes more": [GOOD + b"\xc0\xc0"],
    "a map of length 4294967295 does not fit in the file, which has 8 bytes": [
        b"\xdf\xff\xff\xff\xff\xa1a\xc0"
    ],
    "a list of length 4294967295 does not fit in the file": [b"\x81\xa1a\xdd\xff\xff\xff\xff"],
    "a text of length 4294967295 does not fit in the file": [b"\x81\xdb\xff\xff\xff\xff"],
    "an? extension of length 4294967295": [b"\x81\xa1w\xc9\xff\xff\xff\xff\x01"],
    "it has over 1048576 entries": [b"\x81\xa1a\xdd\x00\x20\x00\x00" + bytes(1 << 21)],
    "it is nested more than 100 levels deep": [
        b"\x81\xa1a" * 5000 + b"\xc0",
        b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
    ],
    "the key 'a' occurs twice": [b"\x82\xa1a\xc0\xa1a\xc0"],
    "the key '1' occurs twice": [b"\x82\x01\xc0\xa11\xc0"],
    "a key is neither text nor a number": [b"\x81\xc0\xc0"],
    "no msgpack value begins with the byte 0xc1": [b"\x81\xa1a\xc1"],
    "can't decode byte 0xff": [b"\x81\xa1\xff\xc0"],
    "a/w holds bytes, which are not a leaf": [packed(b"123")],
    "a/w: at byte 8: an extension of type 9 that Flax does not": [packed(ext(9, 1))],
    "an extension of type 255 that Flax does not": [packed(msgpack.Timestamp(1))],
    "an extension of type 2 that Flax does not write": [packed(ext(2, 1.0, "x"))],
    "an extension of type 1 that Flax does not write": [
        packed(ext(1, 1)),
        packed(ext(1, data=ext(1, [4], "int8", b"1234")[1] + b"1")),
    ],
    "its shape is not a list of sizes": [
        packed(ext(1, shape, "float32", data))
        for shape, data in (
            (4, bytes(16)),
            ([-4], b""),
            ([4.0], bytes(16)),
            ([1] * 40, bytes(4)),
        )
    ],
    **{
        f"the dtype '{name.replace('[', '.').replace(']', '.')}' is not supported": [
            packed(ext(1, [2], name, bytes(16)))
        ]
        for name in ("object", "finfo", "datetime64[ns]")
    },
    r"it has 16 bytes, and float32\[3\] has 12": [packed(ext(1, [3], "float32", bytes(16)))],
    r"it has 0 bytes, and int8\[1099511627776": [packed(ext(1, [2**40, 2**40], "int8", b""))],
    "it has 4 bytes, and int8": [packed(ext(1, [4], "int8", "abcd"))],
    "its name points outside the": [msgpack.packb({"..": ext(1, [1], "int8", b"1")})],
    r"a/w: its parts do not form \[3, 3\] of one dtype": [chunked((3, 3), F4, F4)],
    "a/w is not a chunked array in the form that Flax writes": [
        chunked((3, 3)),
        chunked((4,), F4, extra=1),
        chunked((4, -1), F4),
    ],
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file(tmp_path, text):
    path = tmp_path / "x.msgpack"
    for data in WRONG[text]:
        path.write_bytes(data)
        said = refused(reshard.CorruptCheckpointError, reshard.open, path)
        assert said.startswith(f"`{path}` cannot be read as msgpack\n  ")
        assert re.search(text, said), said


def test_all_wrong_arrays_are_listed(tmp_path):
    path = tmp_path / "x.msgpack"
    arrays = {"a": ext(1, [3], "int8", b"12"), "b": ext(3, [], "int8", b"1"), "c": ext(7, 1)}
    path.write_bytes(msgpack.packb(arrays))
    lines = refused(reshard.CorruptCheckpointError, reshard.open, path).splitlines()
    assert [line.split(": ")[1] for line in lines[1:]] == ["a", "c"]


NASTY = st.sampled_from(b"\x00\x01\x7f\x8f\xc9\xdb\xdd\xdf\xff")
CHANGES = st.tuples(st.integers(0, 150), st.integers(0, 9), st.lists(NASTY, max_size=2).map(bytes))


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=3))
def test_damage_is_an_error_or_other_values(tmp_path_factory, changes):
    """A file with bytes that are replaced, cut out or added: opened and read, or refused."""
    tree = {"a": {"w": random_bits((5, 3), "float32"), "n": 3}, "t": "x", "l": [1.5]}
    data = pack(tree)
    for at, cut, new in changes:
        data = data[:at] + new + data[at + cut :]
    path = tmp_path_factory.mktemp("damage") / "x.msgpack"
    path.write_bytes(data)
    try:
        ckpt = reshard.open(path)
    except reshard.ReshardError:
        return
    for array in ckpt.arrays:
        assert array.read().nbytes == array.nbytes <= len(data)


PEAK = """
import sys, threading
import reshard
import reshard.writer.save

def anonymous():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) << 10

before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
thread.start()
reshard.save(reshard.open(sys.argv[1]), sys.argv[2], max_memory="64MiB")
done.set()
thread.join()
print(peak - before)
"""


@pytest.mark.exhaustive
def test_memory_stays_within_the_budget(tmp_path):
    """Of a file of five times as much, with an array of many parts."""
    tree = {
        "parts": random_bits((160 << 7, 1023), "float32"),
        "one": random_bits((120 << 17,), "int32"),
    }
    tree["many"] = {str(n): random_bits((1 << 20,), "float32", n) for n in range(45)}
    with mock.patch.object(flax.serialization, "MAX_CHUNK_SIZE", 75_000_000):
        path = tmp_path / "x.msgpack"
        path.write_bytes(pack(tree, in_place=True))
    assert path.stat().st_size >= 4.99 * (64 << 20)
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "out")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(result.stdout) < 2.5 * (64 << 20), "with what it imports, and the allocator keeps"
    expected = leaves(flax.serialization.msgpack_restore(path.read_bytes()))
    restored = leaves(layouts.load_pytree(tmp_path / "out"))
    assert restored.keys() == expected.keys()
    for name, value in restored.items():
        assert np.asarray(value).tobytes() == expected[name].tobytes()
