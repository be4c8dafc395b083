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
import tensorstore as ts
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


def write_t5x(path, tree):
    """A checkpoint as T5X writes it: TensorStore's specifications in the file, arrays beside it."""
    state = flax.serialization.to_state_dict(tree)
    for key, values in leaves(state).items():
        name = "target." + ".".join(key)
        kvstore = {"driver": "file", "path": str(path / name)}
        metadata = {"compressor": {"id": "gzip"}, "shape": list(values.shape)}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
        ts.open(spec, create=True, dtype=ts.dtype(values.dtype)).result()[...] = values
        *above, last = key
        node = state
        for each in above:
            node = node[each]
        node[last] = spec | {"dtype": values.dtype.name, "kvstore": kvstore | {"path": name}}
    written = {"version": 3, "optimizer": {"target": state, "state": {"step": np.int32(7)}}}
    (path / "checkpoint").write_bytes(flax.serialization.to_bytes(written))


def test_checkpoints_of_t5x_are_refused(tmp_path):
    """Its dicts would otherwise be leaves, and the arrays beside them would be lost."""
    tree = {"encoder": {"w": random_bits((3, 4), "float32"), "b": random_bits((4,), "float32")}}
    run = tmp_path / "run"
    write_t5x(run / "checkpoint_1000", tree)
    for path in (run, run / "checkpoint_1000", run / "checkpoint_1000" / "checkpoint"):
        assert refused(reshard.CheckpointFormatError, reshard.open, path) == (
            f"`{run}/checkpoint_1000/checkpoint` is a file of T5X: it names arrays in other files, "
            "which `reshard` does not read\n\n"
            "hint: t5x.checkpoints.load_t5x_checkpoint(path) reads them; save them with Orbax"
        )
    both = {"driver": "text", "kvstore": np.arange(3), "module": {"driver": {"w": np.arange(2)}}}
    (tmp_path / "state.msgpack").write_bytes(pack(both))
    assert_read(reshard.open(tmp_path / "state.msgpack"), both)


@pytest.mark.parametrize("name", ["streaming_params", "streaming_train_state_500", "model.stream"])
def test_streaming_files_of_easylm_are_refused(tmp_path, name):
    state = flax.serialization.to_state_dict(train_state())
    flat = flax.traverse_util.flatten_dict(state["params"])
    packer, path = msgpack.Packer(), tmp_path / "run" / name
    path.parent.mkdir()
    data = [packer.pack((key, flax.serialization.to_bytes(v))) for key, v in flat.items()]
    path.write_bytes(b"".join(data))
    what = "a streaming file of EasyLM, which is not supported"
    text = refused(reshard.CheckpointFormatError, reshard.open, path)
    assert text == f"`{path}` is {what}"
    text = refused(reshard.CheckpointFormatError, reshard.open, path.parent)
    assert (f"\n  `{name}` is {what}" in text) == name.startswith("streaming_")


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


STEPS = (9, 10, 100)


@pytest.fixture
def flax_steps(tmp_path):
    """Files of several steps, each with its own values, and logs beside them."""
    run = tmp_path.resolve() / "run"
    run.mkdir()
    for step in STEPS:
        tree = {"params": {"w": random_bits((4, 6), "float32", step)}, "step": step}
        (run / f"checkpoint_{step}").write_bytes(pack(tree))
    (run / "events_5").mkdir()
    (run / "events_5" / "log").write_text("log")
    return run


def assert_root(out, run, steps):
    """Orbax's manager restores each of these steps, and no other one."""
    with ocp.CheckpointManager(out) as manager:
        assert manager.all_steps() == list(steps)
        for step in steps:
            file = run / f"checkpoint_{step}"
            expected = flax.serialization.msgpack_restore(file.read_bytes())
            found = manager.restore(step, args=ocp.args.PyTreeRestore())
            assert found["params"]["w"].tobytes() == expected["params"]["w"].tobytes()
            assert np.asarray(found["step"]) == expected["step"] == step


@pytest.mark.parametrize(
    ("words", "steps"),
    [("all", STEPS), ("9..10", (9, 10)), ("9,10", (9, 10)), ("10..99", (10,)), ("latest", (100,))],
)
def test_several_steps_of_flax_become_a_root(flax_steps, tmp_path, words, steps):
    at = tmp_path.resolve()
    told = shown(at, "ckpt", "run", "out", "--step", words, "--verify")
    assert "\nwrote out" in told
    if len(steps) > 1:
        assert_root(at / "out", flax_steps, steps)
        assert all(f"note     step {n} of `{flax_steps}` -> `{at}/out/{n}`" in told for n in steps)
    else:  # a tree
        assert int(reshard.open(at / "out")["step"].read()) == steps[0]
    ckpts = [reshard.open(flax_steps, step=step) for step in steps]
    reshard.save(ckpts if len(steps) > 1 else ckpts[0], at / "again", workers=2)
    if len(steps) > 1:
        assert_root(at / "again", flax_steps, steps)
    assert_same_files(at / "out", at / "again")


def assert_same_files(one, other):
    assert {p.relative_to(one) for p in one.glob("*/*/_METADATA")} == {
        p.relative_to(other) for p in other.glob("*/*/_METADATA")
    }


@pytest.mark.parametrize("kind", ["conditional"])
def test_several_steps_of_flax_in_a_bucket(flax_steps, stores, tmp_path, kind):
    url = f"{stores.bucket(kind)}/out"
    reshard.save([reshard.open(flax_steps, step=step) for step in STEPS], url)
    assert reshard.open(url).source.steps == STEPS
    for step in STEPS:
        assert reshard.verify(reshard.open(url, step=step), reshard.open(flax_steps, step=step)).ok


def test_every_command_takes_a_step_of_flax(flax_steps, tmp_path):
    at = tmp_path.resolve()
    ckpt = reshard.open(flax_steps)
    assert (ckpt.source.number, ckpt.source.steps) == (100, STEPS)
    assert str(ckpt.source.path) == f"{flax_steps}/checkpoint_100"
    assert "steps: 9, 10, 100; shown: 100" in shown(at, "inspect", "run")
    assert json.loads(shown(at, "inspect", "run", "--step", "9", "--json"))["step"] == 9
    assert "steps    9, 10, 100; shown: 100" in shown(at, "doctor", "run")
    told = shown(at, "verify", "run", "--step", "all")
    assert [line.partition(": ")[0] for line in told.splitlines()[1::2]] == [
        f"`{flax_steps}/checkpoint_{step}`" for step in STEPS
    ]
    shown(at, "ckpt", "run/checkpoint_9", "nine", "--quiet")
    shown(at, "verify", "nine", "--against", "run", "--step", "9")
    status, out, _ = reshard_in(at, "diff", "run", "nine", "--values", "--step", "10")
    assert status == 1 and "step" in out
    shown(at, "export", "run", "hf", "--step", "9", "--select", "params/**", "--quiet")
    assert reshard.open(at / "hf")["params/w"].read().tobytes() == (
        reshard.open(flax_steps, step=9)["params/w"].read().tobytes()
    )
    text = "Error: `run` has no step 11\n  its steps: 9, 10, 100\n\nhint: --step 10\n"
    assert reshard_in(at, "inspect", "run", "--step", "11")[2] == text


def test_steps_of_flax_that_are_not_whole_numbers(tmp_path):
    at = tmp_path.resolve()
    run = at / "run"
    run.mkdir()
    steps = [0.5, 1, 2.25, 1e-05]
    with flax.config.temp_flip_flag("use_orbax_checkpointing", False):
        for step in sorted(steps):
            checkpoints.save_checkpoint(run, {"w": np.full(3, step)}, step, keep=9)
    assert checkpoints.latest_checkpoint(run) == f"{run}/checkpoint_2.25"
    for step in steps:  # each alone
        assert np.array_equal(reshard.open(run / f"checkpoint_{step}")["w"].read(), [step] * 3)
    ckpt = reshard.open(run)
    assert np.array_equal(ckpt["w"].read(), [2.25] * 3) and ckpt.source.number is None
    assert ckpt.notes == ("`checkpoint_2.25` is the latest of 4 files",)
    assert np.array_equal(reshard.open(run, step=1)["w"].read(), [1] * 3)
    text = f"Error: the steps of `{run}` are not whole numbers\n"
    text += "".join(f"  checkpoint_{step}\n" for step in sorted(steps))
    text += f"\nhint: open one of them: {run}/checkpoint_2.25\n"
    for words in (["ckpt", "run", "out"], ["inspect", "run"], ["verify", "run"]):
        assert reshard_in(at, *words, "--step", "all") == (2, "", text)
    shown(at, "ckpt", "run", "out", "--quiet")
    shutil.copy(run / "checkpoint_1", run / "checkpoint_01")
    text = f"`{run}` has two files for one step: `checkpoint_01` and `checkpoint_1`"
    assert refused(reshard.CheckpointFormatError, reshard.open, run).startswith(text)


def test_steps_of_flax_that_are_files_beside_directories(tmp_path):
    """Flax writes directories with Orbax, and files without; of both, the highest is its latest."""
    at = tmp_path.resolve()
    run = at / "run"
    for step, as_directory in ((1, False), (20, True), (300, False)):
        with flax.config.temp_flip_flag("use_orbax_checkpointing", as_directory):
            checkpoints.save_checkpoint(run, {"w": np.full(3, step)}, step, keep=9)
    assert (run / "checkpoint_20").is_dir() and (run / "checkpoint_300").is_file()
    assert checkpoints.latest_checkpoint(run) == f"{run}/checkpoint_300"
    text = f"Error: some steps of `{run}` are directories, and others are files\n"
    text += "  directories: checkpoint_20\n  files: checkpoint_1, checkpoint_300\n\n"
    text += "".join(f"hint: open one of them: {run}/checkpoint_{n}\n" for n in (20, 300))
    for words in (["ckpt", "run", "out"], ["inspect", "run"], ["verify", "run"]):
        for more in ([], ["--step", "all"], ["--step", "20"]):
            assert reshard_in(at, *words, *more) == (2, "", text)
    for step in (1, 20, 300):
        assert np.array_equal(reshard.open(run / f"checkpoint_{step}")["w"].read(), [step] * 3)
    shown(at, "ckpt", "run/checkpoint_20", "out", "--quiet")
    shutil.copytree(run / "checkpoint_20", run / "7")  # a manager's steps come first
    assert reshard.open(run).source.step == "7"


@pytest.fixture
def aggregated(data, tmp_path):
    """A root as Orbax 0.4 wrote it: two steps, each with an aggregated item and another one."""
    run = tmp_path.resolve() / "run"
    for step, version in ((1, "orbax-0.4.4"), (2, "orbax-0.4.4-b")):
        shutil.copytree(data / version / "aggregate", run / str(step) / "state")
        extra = {"rate": np.float32(step), "table": random_bits((3, 5), "float32", step)}
        layouts.save_pytree(run / str(step) / "extra", extra)
    (run / "2" / "state" / "notes").write_text("kept")
    return run


def test_a_step_with_an_aggregated_item_keeps_its_form(aggregated, tmp_path):
    at = tmp_path.resolve()
    ckpt = reshard.open(aggregated, item="state")
    source = ckpt.source
    assert (source.kind, source.step, source.item) == ("manager", "2", "state")
    assert (source.items, source.steps, source.format) == (("extra", "state"), (1, 2), "msgpack")
    shown(at, "ckpt", "run", "out", "--step", "all", "--item", "state", "--quiet")
    before = layouts.hashes(aggregated)
    after = layouts.hashes(at / "out")
    beside = {p: h for p, h in before.items() if "/extra" in p or p.endswith("notes")}
    assert beside.items() <= after.items()
    assert not any(path.endswith("/checkpoint") for path in after.keys() - beside.keys())
    with ocp.CheckpointManager(at / "out") as manager:
        assert manager.all_steps() == [1, 2]
        for step in (1, 2):
            items = {name: ocp.args.PyTreeRestore() for name in ("state", "extra")}
            restored = manager.restore(step, args=ocp.args.Composite(**items))
            with ocp.PyTreeCheckpointer() as checkpointer:
                for name in items:
                    expected = checkpointer.restore(aggregated / str(step) / name)
                    assert leaves(restored[name]).keys() == leaves(expected).keys()
                    for path, value in leaves(expected).items():
                        found = leaves(restored[name])[path]
                        if isinstance(value, dict | list | str | None):
                            assert found == value
                        else:
                            assert np.asarray(found).tobytes() == np.asarray(value).tobytes(), path
    for item in ("state", "extra"):
        copy, original = (
            reshard.open(path, step=2, item=item) for path in (at / "out", aggregated)
        )
        assert reshard.verify(copy, original).ok
    # A step alone, and the item alone.
    reshard.save(reshard.open(aggregated / "1", item="state"), at / "step")
    assert reshard.open(at / "step", item="extra").source.items == ("extra", "state")
    reshard.save(reshard.open(aggregated / "1" / "state"), at / "item")
    assert sorted(reshard.open(at / "item")) == sorted(reshard.open(aggregated / "1", item="state"))
    spread = reshard.to_mesh(reshard.open(aggregated, item="state"), "data=8")
    assert {a.sharding.mesh.size for a in spread.arrays if a.sharding is not None} == {8}
    assert "--write" not in "".join(shown(at, "doctor", "run", "--item", "state"))
    reshard.save(reshard.open(aggregated, item="state"), at / "plain", ocdbt=False)
    assert reshard.verify(reshard.open(at / "plain", item="state"), ckpt).ok
    # The other item: the aggregated one is copied as it is.
    reshard.save(reshard.open(aggregated, item="extra"), at / "other")
    assert (at / "other" / "2" / "state" / "checkpoint").read_bytes() == (
        (aggregated / "2" / "state" / "checkpoint").read_bytes()
    )
