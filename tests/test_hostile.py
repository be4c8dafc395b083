"""Untrusted checkpoints: whatever they contain, the result is a clear error, and nothing else."""

import ast
import functools
import json
import os
import pathlib
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import fuzz
import fuzz_jobs
import fuzz_maps
import in_process
import layouts
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import flip
from sampling import examples
from tensorstore import ocdbt

import reshard
from reshard.arrays.operations import Reshape
from reshard.cli.model_argument import read_rules
from reshard.storage.btree import _numbers as numbers
from reshard.storage.btree import decoded_bytes, range_database

Json = dict[str, Any]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A small checkpoint of each of `fuzz.FORMATS`, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("base")
    return functools.cache(lambda form: fuzz.make_base(folder, form))


def edit(file: pathlib.Path, change: Callable[[Json], Any]) -> None:
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(json.dumps(document).encode())


def edit_text(file: pathlib.Path, old: str, new: str | bytes) -> None:
    """Replaces the first occurrence of a text in a file."""
    new = new if isinstance(new, bytes) else new.encode()
    data = file.read_bytes()
    assert old.encode() in data
    file.write_bytes(data.replace(old.encode(), new, 1))


def put_in(file: pathlib.Path, text: str) -> None:
    edit_text(file, '"tree_metadata"', f'"note": {text}, "tree_metadata"')


def edit_array(path: pathlib.Path, name: str, **entries: Any) -> None:
    """Changes the zarr metadata of an array. None removes a key."""
    (file,) = (
        path / name / each for each in (".zarray", "zarr.json") if (path / name / each).exists()
    )
    document = json.loads(file.read_bytes()) | entries
    kept = {key: value for key, value in document.items() if entries.get(key, key) is not None}
    file.write_text(json.dumps(kept))


def edit_sharding(path: pathlib.Path, **entries: Any) -> None:
    before = json.loads((path / "_sharding").read_bytes())["dw=="]
    layouts.edit_document(path / "_sharding", **{"dw==": json.dumps(json.loads(before) | entries)})


def add_leaf(path: pathlib.Path, *keys: str | int, kind: str = "None", name: str = "hostile"):
    entry = {
        "key_metadata": [
            {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys
        ],
        "value_metadata": {"value_type": kind, "skip_deserialize": kind == "None"},
    }
    edit(path / "_METADATA", lambda document: document["tree_metadata"].update({name: entry}))


def node(height: int, body: bytes, *, compression: int = 0) -> bytes:
    content = body if compression else bytes([height]) + body
    return fuzz.sealed(struct.pack(">IQ2B", 0x0CDB20DE, 0, 0, compression) + content + bytes(4))


def inner(height: int, file: str, *children: tuple[bytes, int, int]) -> bytes:
    """A node of nodes in a file: the first key of each child, its offset and its length."""
    keys, offsets, lengths = zip(*children, strict=True)
    none = [0] * len(keys)
    body = numbers([1, len(file), 0]) + file.encode()
    body += numbers([len(keys), *none[1:], *map(len, keys), *none]) + b"".join(keys)
    return node(height, body + numbers([*none, *offsets, *lengths, *[1] * 3 * len(keys)]))


def plant(path: pathlib.Path, nodes: Sequence[bytes], height: int, file: str = "d/nodes") -> None:
    """Makes the last of some nodes the root of a checkpoint's database; they are in one file."""
    (path / file).write_bytes(b"".join(nodes))
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    manifest = ocdbt.dump(base).result()
    version = manifest["versions"][-1]
    offset = sum(map(len, nodes[:-1]))
    version["root"]["location"] = f"btreenode::{file}:{offset}:{len(nodes[-1])}"
    version["root_height"] = height
    (path / "manifest.ocdbt").write_bytes(ocdbt.undump_manifest(manifest))


def plant_value(path: pathlib.Path, key: bytes, *place: Any) -> None:
    """Changes the place of one value of a database: its file, its offset and its length."""
    store, data, places = layouts.database(path), b"", {}
    for name in store.list().result():
        value = store.read(name).result().value
        places[name] = ("d/values", len(data), len(value))
        data += value
    (path / "d/values").write_bytes(data)
    values = [(name, *found) for name, found in {**places, key: place}.items()]
    for name, made in range_database(values, "d/nodes").items():
        (path / (name or "manifest.ocdbt")).write_bytes(made)


def zstd_zeros(total: int) -> bytes:
    """A zstd frame that decodes to many zeros, in blocks of 2^17."""
    block, last = (struct.pack("<I", end | 2 | 1 << 20)[:3] + b"\0" for end in (0, 1))
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * ((total >> 17) - 1) + last


def long_keys(count: int, *, compression: int = 0) -> bytes:
    """A leaf node of keys of 60 kB. Each shares all but its end with the one before."""
    shared = 60_000
    body = numbers([0, count, 0, *[shared] * (count - 2), 1, shared + 3, *[3] * (count - 2)])
    body += b"A" + b"a" * shared + b"".join(struct.pack(">I", i)[1:] for i in range(count - 1))
    body += b"\1" * count + bytes(count) + b"x" * count
    body = zstandard.compress(b"\0" + body) if compression else body
    return node(0, body, compression=compression)


Corrupt, Format = reshard.CorruptCheckpointError, reshard.CheckpointFormatError


class Fault(NamedTuple):
    """The error for a damaged checkpoint of one of `fuzz.FORMATS`. `PATH` stands for its path."""

    text: str
    damage: Callable[[pathlib.Path], Any]
    form: str = "zarr2-ocdbt"
    error: type[reshard.ReshardError] = Corrupt


def replace_by_link(file: pathlib.Path) -> None:
    target = file.parents[1] / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


def replace_by(make: Callable[[pathlib.Path], Any], file: pathlib.Path) -> None:
    file.unlink()
    make(file)


replace_by_pipe = functools.partial(replace_by, os.mkfifo)
replace_by_directory = functools.partial(replace_by, pathlib.Path.mkdir)


def outside(path: pathlib.Path) -> pathlib.Path:
    """A file outside the checkpoint."""
    secret = path.parent / "secret"
    secret.write_bytes(b"s" * 4096)
    return secret


def truncate(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def shared_node() -> list[bytes]:
    """Two children that are one node: 2^height leaves of a few hundred bytes."""
    nodes, at = [range_database([(b"w/.zarray", "", 0, 2)], "node")["node"]], 0
    for height in range(1, 40):
        size = len(nodes[-1])
        nodes.append(inner(height, "d/nodes", (b"", at, size), (b"z", at, size)))
        at += size
    return nodes


TREE = "_METADATA"
WHOLE = "`PATH` is damaged: some of its leaves cannot be found or read\n  w: "
MEMBER = 'Error parsing object member "metadata": Error parsing object member '
IN_RANGE = "Error parsing value at position 0: Expected integer in the range"
DATABASE = "the OCDBT database in `PATH` "
NO_ENTRY = " is damaged: an entry of `tree_metadata` cannot be read\n  "
NOT_A_FILE = (
    "` is neither a file nor a directory\n\n"
    "hint: make a copy that has files in place of symbolic links: cp -rL DIRECTORY COPY"
)


def in_tree(text: str, change: Callable[[pathlib.Path], Any]) -> Fault:
    return Fault(f"`PATH/{TREE}`{text}", lambda p: change(p / TREE))


def not_json(text: str, change: Callable[[pathlib.Path], Any]) -> Fault:
    return in_tree(f" is not JSON: {text}", change)


def named(text: str, *keys: str, form: str = "zarr2-ocdbt", kind: str = "None") -> Fault:
    text = f"`PATH/{TREE}` does not describe a tree\n  {text}"
    return Fault(text, lambda p: add_leaf(p, *keys, kind=kind), form)


def array(text: str, form: str = "zarr2-files", **entries: Any) -> Fault:
    text = f"{WHOLE}its metadata cannot be read: {text}"
    return Fault(text, lambda p: edit_array(p, "w", **entries), form)


def sharding(text: str, **entries: Any) -> Fault:
    text = f"{WHOLE}its metadata cannot be read: {text}"
    return Fault(text, lambda p: edit_sharding(p, **entries))


def no_file(name: str, replace: Callable[[pathlib.Path], Any], form: str = "zarr2-ocdbt") -> Fault:
    return Fault(f"`PATH/{name}{NOT_A_FILE}", lambda p: replace(p / name), form, Format)


def nodes(text: str, height: int, made: Callable[[], Sequence[bytes]]) -> Fault:
    text = f"{DATABASE}cannot be read\n  {text}"
    return Fault(text, lambda p: plant(p, made(), height), "zarr2-nodes")


def elsewhere(text: str, *place: Any, make: Callable[[pathlib.Path], Any] = outside) -> Fault:
    """A chunk of `w` that lies in another file, at its beginning or at an offset."""

    def damage(path: pathlib.Path) -> None:
        make(path)
        file = place[0].replace("PARENT", str(path.parent))
        plant_value(path, b"w/0.0", file, *(place[1:] or (0, 96)))

    return Fault(text, damage, "zarr2-nodes", Format if NOT_A_FILE in text else Corrupt)


FAULTS = [
    not_json("expecting property name enclosed in double quotes at character 100", truncate),
    not_json("it holds text that is not Unicode", lambda f: edit_text(f, '"host"', b'"h\xffst"')),
    not_json("it holds text that is not Unicode", lambda f: edit_text(f, '"host"', r'"h\ud800st"')),
    not_json("the JSON is nested too deeply", lambda f: put_in(f, "[" * 100_000)),
    not_json("it is nested more than 100 levels deep", lambda f: put_in(f, "[" * 300 + "]" * 300)),
    not_json('the key "w" occurs twice', lambda f: put_in(f, '{"w": 1, "w": 1}')),
    not_json("it holds a number of 100000 digits", lambda f: put_in(f, "9" * 100_000)),
    in_tree(" has 1.00 TiB, too much for such a file", lambda f: os.truncate(f, 1 << 40)),
    in_tree(" is a directory, not a file", replace_by_directory)._replace(error=Format),
    in_tree(" is JSON, but not an object", lambda f: f.write_text("[]")),
    in_tree(
        ": its value_metadata_tree cannot be read: the JSON is nested too deeply",
        lambda f: layouts.edit_document(f, value_metadata_tree="[" * 100_000),
    ),
    in_tree(
        " is damaged: it lacks `tree_metadata`, the list of leaves",
        lambda f: layouts.edit_document(f, tree_metadata=[]),
    ),
    in_tree(f"{NO_ENTRY}3", lambda f: edit(f, lambda d: d["tree_metadata"].update(x=3))),
    named('"../../evil": its name points outside the checkpoint', "../../evil"),
    named(
        '"a/.."/"/../evil": its name points outside the checkpoint',
        *("a/..", "/../evil"),
        form="zarr2-files",
        kind="jax.Array",
    ),
    named('"/tmp/evil": its name points outside the checkpoint', "/tmp/evil", form="zarr3-files"),
    named('"a\\u0000b": its name holds a NUL', "a\0b", form="zarr3-ocdbt"),
    named(f"{'x' * 80}: its name has 100000 bytes", "x" * 100_000),
    named(f"{'x/' * 40}...: it is 5000 levels deep", *"x" * 5000),
    named("w: it occurs twice", "w"),
    named("w: it is a leaf, and w/x below it", "w", "x"),
    in_tree(  # a position below zero
        f"{NO_ENTRY}{{'key_metadata': [{{'key': 'layers', 'key_type': 2}}, "
        "{'key': '-1', 'key_type': 1}], 'value_metadata': {'value_type': 'None', "
        "'skip_deserialize': True}}",
        lambda f: add_leaf(f.parent, "layers", -1),
    ),
    array(
        'Error opening "zarr" driver: Cannot create using specified "metadata" and schema: '
        "domain must be specified",
        shape=[2**62, 2**62],
    ),
    array("it holds a number that is too large", shape=[2**70, 12]),
    array(
        "an array of [1099511627776, 1048576] has 4611686018427387904 bytes, "
        "more than any model has",
        shape=[2**40, 2**20],
    ),
    array(
        "an array of [1048576, 1048576] has 45813071872 chunks of [4, 6]",
        "zarr3-files",
        shape=[2**20, 2**20],
    ),
    array("chunks of [1048576, 1048576] are larger than the array, [8, 12]", chunks=[2**20, 2**20]),
    array(f'{MEMBER}"chunks": {IN_RANGE}', chunks=[0, 6]),
    array(f'{MEMBER}"dtype": Unsupported zarr dtype: "|O"', dtype="|O", filters=[{"id": "pickle"}]),
    # TensorStore would choose one, but Orbax always writes one.
    array("it has no chunk shape", chunks=None),
    array("it has no chunk shape", "zarr3-files", chunk_grid=None),
    array("its dtype has no name", dtype=[["a", "<f4"]]),
    array("char is not a numeric dtype", dtype="|S4"),
    array(
        f'{MEMBER}"compressor": Error parsing object member "id": "pickle" is not registered',
        compressor={"id": "pickle"},
    ),
    array(
        "it is compressed with blosc inside another codec, so a chunk may decode to 2 GiB",
        "zarr3-files",
        codecs=[{"name": "zstd"}, {"name": "blosc"}],
    ),
    Fault(
        WHOLE + "its metadata cannot be read: unterminated string starting at character 93",
        lambda p: truncate(p / "w" / ".zarray"),
        "zarr2-files",
    ),
    Fault(
        "the metadata of `w` has 1.00 TiB, more than 64.00 KiB",
        lambda p: os.truncate(p / "w" / ".zarray", 1 << 40),
        "zarr2-files",
    ),
    sharding(
        "P('data', 'model', None) is for 3 dimensions, but the array has 2",
        partition_spec=["data", "model", None],
    ),
    sharding(
        "P('data', 'x') names axis 'x', which `data=2,model=2` lacks", partition_spec=["data", "x"]
    ),
    sharding(
        "the mesh `data=1099511627776,model=1099511627776` has "
        "1208925819614629174706176 devices, more than 1048576",
        shape=[2**40, 2**40],
    ),
    sharding("its mesh `data=2,model=4` has 8 devices, but 4 device ids", shape=[2, 4]),
    sharding("the list of devices is 'abc'", device_mesh={"mesh": "abc"}),
    sharding(f"not a partition spec: 'P{'(' * 78}", partition_spec=f"P{'(' * 100_000})"),
    sharding(
        "its sharding has a name that is not printable text: '\\x1b[2J'",
        axis_names=["data", "\x1b[2J"],
    ),
    Fault(
        WHOLE + "it is float32, but PRNG keys are not",
        lambda p: edit_text(
            p / "array_metadatas/process_0", '"param_name": "key"', '"param_name": "w"'
        ),
    ),
    Fault(
        "`PATH/array_metadatas/process_0` is damaged: its entries do not describe arrays",
        lambda p: edit(p / "array_metadatas/process_0", lambda d: d["array_metadatas"].append("w")),
    ),
    no_file("_sharding", replace_by_pipe),
    no_file("_sharding", replace_by_link),
    no_file("w/0.0", replace_by_link, "zarr2-files"),
    no_file("w/c/0/0", replace_by_pipe, "zarr3-files"),
    no_file("ocdbt.process_0", replace_by_link),
    no_file("manifest.ocdbt", replace_by_link),
    Fault(WHOLE + "its array is missing: `w`", lambda p: replace_by_link(p / "w"), "zarr2-files"),
    Fault(
        WHOLE + "its chunk `0.0` has 1.00 TiB, more than any of [4, 6] can have",
        lambda p: os.truncate(p / "w" / "0.0", 1 << 40),
        "zarr2-files",
    ),
    Fault(
        DATABASE + "cannot be read\n  it is not a B-tree node",
        lambda p: (p / "manifest.ocdbt").write_bytes(bytes(1000)),
    ),
    elsewhere(DATABASE + "refers to `../secret`, which is outside of it", "../secret"),
    elsewhere(DATABASE + "refers to `PARENT/secret`, which is outside of it", "PARENT/secret"),
    elsewhere(
        "`PATH/d/link" + NOT_A_FILE,
        "d/link",
        make=lambda p: (p / "d/link").symlink_to(outside(p)),
    ),
    elsewhere("`PATH/d/pipe" + NOT_A_FILE, "d/pipe", make=lambda p: os.mkfifo(p / "d/pipe")),
    elsewhere(
        WHOLE + "its chunk `0.0` has 1048576.00 TiB, more than any of [4, 6] can have",
        *("d/nodes", 5, 1 << 60),
    ),
    # A node that is its own child, and nodes that share their children.
    nodes(
        "several nodes of its B-tree refer to node btreenode::d/nodes:0:38",
        *(1, lambda: [inner(1, "d/nodes", (b"", 0, 38))]),
    ),
    nodes("several nodes of its B-tree refer to node btreenode::d/nodes:1881:50", 39, shared_node),
    nodes("the data file `d/none` is missing", 1, lambda: [inner(1, "d/none", (b"", 7, 500))]),
    nodes("its B-tree is larger than any checkpoint's", 0, lambda: [long_keys(20_000)]),
    nodes(
        "its B-tree is larger than any checkpoint's",
        *(0, lambda: [node(0, zstd_zeros(8 << 30), compression=1)]),
    ),
]


def ours(job: Callable[[], Any], error: type[Exception] | None = None) -> str:
    """The text of the error that a job raises, within a short time."""
    with fuzz_jobs.limited("it", 5), pytest.raises(reshard.ReshardError) as caught:
        job()
    assert error in (None, type(caught.value))
    return str(caught.value)


command = functools.partial(in_process.reshard_in, pathlib.Path())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.text.split("\n")[-1][:80])
def test_faults(tmp_path, base, fault):
    """`open`, `restore` and the commands raise the same error, and change and write nothing."""
    path = copied(base, fault.form, tmp_path / "saved")
    fault.damage(path)
    text = fault.text.replace("PATH", str(path)).replace("PARENT", str(tmp_path))
    before = fuzz.snapshot(tmp_path)
    assert ours(lambda: reshard.open(path), fault.error) == text
    assert ours(lambda: reshard.restore(path, layouts.mesh((1, 4))), fault.error) == text
    refused = (2, "", f"Error: {text}\n")
    assert command("inspect", path) == refused
    assert command("ckpt", path, tmp_path / "out", "--to", "1x4") == refused
    assert fuzz.snapshot(tmp_path) == before


def copied(base, form: str, path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(base(form), path)


ZEROS = bytes(4 * 6 * 4)
CHUNKS = [
    (zlib.compress(ZEROS[:-1]), "Not enough data"),
    (zlib.compress(ZEROS + b"\0"), "End of data expected"),
    (zlib.compress(bytes(1 << 20)), "End of data expected"),
    (zlib.compress(os.urandom(96))[:-10], "Not enough data"),
    (b"\x80\x04\x95garbage", "failed"),
]


@pytest.mark.parametrize(("data", "words"), CHUNKS, ids=["shorter", "longer", "long", "cut", "bad"])
def test_chunks_of_the_wrong_size(tmp_path, base, data, words):
    path = copied(base, "zarr2-files", tmp_path / "saved")
    edit_array(path, "w", compressor={"id": "zlib", "level": 1})
    for file in (path / "w").iterdir():
        if file.name != ".zarray":
            file.write_bytes(zlib.compress(ZEROS))
    (path / "w" / "1.1").write_bytes(data)
    before = fuzz.snapshot(tmp_path)
    for job in (
        lambda: reshard.save(reshard.to_mesh(reshard.open(path), "1x4"), tmp_path / "out"),
        lambda: reshard.restore(path, layouts.mesh((1, 4))),
    ):
        summary, problem = ours(job, Corrupt).split("\n")
        assert summary == "w: its stored bytes cannot be read"
        assert words in problem and f'"{path}/w/1.1"' in problem
    assert fuzz.snapshot(tmp_path) == before


def test_a_sharding_that_does_not_divide(tmp_path, base):
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    edit_sharding(path, shape=[16, 1], device_mesh=None)
    ckpt, out = reshard.open(path), tmp_path / "out"
    text = "`w` does not fit the mesh `data=16,model=1`\n"
    text += "  dimension 0 has size 8, not a multiple of 16 (data)\n\nhint: "
    saves = f'{text}reshard.to_mesh(ckpt, "data=1,model=1") fits any array'
    assert ours(lambda: reshard.save(ckpt, out), reshard.ShardingError) == saves
    inspects = f"Error: {text}--mesh data=1,model=1 fits any array\n"
    assert command("inspect", path, "--sharding", "w") == (2, "", inspects)
    assert not out.exists()
    reshard.save(reshard.to_mesh(ckpt, "data=1,model=4"), out)
    reshard.open(out)


def test_keys_of_an_unknown_kind(tmp_path, base):
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    edit_text(path / "array_metadatas/process_0", '"threefry2x32"', '"os.system"')
    reshard.save(reshard.open(path), tmp_path / "out")  # it is only text
    text = "the checkpoint records PRNG keys of the kind `os.system`, which JAX cannot make from an"
    assert ours(lambda: reshard.restore(path, layouts.mesh((1, 4))), Corrupt).startswith(text)


def test_huge_arrays_of_absent_chunks(tmp_path, base):
    """A chunk that is absent holds zeros in some checkpoints: then nothing speaks against tebibytes
    of them but the room that they need."""
    path = copied(base, "zarr2-files", tmp_path / "saved")
    layouts.edit_document(path / TREE, store_array_data_equal_to_fill_value=False)
    shutil.rmtree(path / "large")
    (path / "large").mkdir()
    shutil.copy(path / "w" / ".zarray", path / "large")
    edit_array(path, "large", shape=[1 << 20, 1 << 22], chunks=[1 << 14, 1 << 13])
    ckpt, out = reshard.open(path), tmp_path / "out"
    assert ckpt["large"].nbytes == 1 << 44
    said = ours(lambda: reshard.save(reshard.to_mesh(ckpt, "1x4"), out), reshard.DestinationError)
    assert said.startswith(f"not enough disk space for `{out}`\n")
    said = ours(lambda: reshard.restore(path, layouts.mesh((1, 4))), reshard.MemoryLimitError)
    assert said.startswith("large: this machine has too little memory for its shards of the array")


def test_links_and_pipes_among_the_siblings(tmp_path, base):
    for name, add in {
        "link": lambda path: path.symlink_to("/etc/hostname"),
        "pipe": os.mkfifo,
        "dangling": lambda path: path.symlink_to("nowhere"),
    }.items():
        path = copied(base, "zarr2-ocdbt", tmp_path / name)
        (path / "assets").mkdir()
        add(path / "assets" / name)
        text = f"`{path}/assets/{name}{NOT_A_FILE}"
        ckpt, out = reshard.open(path), tmp_path / "out"
        assert ours(lambda ckpt=ckpt, out=out: reshard.save(ckpt, out), Format) == text
        assert list(reshard.plan(ckpt, out).problems) == [text.partition("\n")[0]]
        assert command("ckpt", path, out) == (2, "", f"Error: {text}\n")
        assert not out.exists()


@pytest.mark.parametrize("levels", [150, 1500, 3000])
def test_deep_directories(tmp_path, base, levels):
    """More than anybody means, than Python's stack holds, than a path can name."""
    path = copied(base, "zarr2-files", tmp_path / "saved")
    out = tmp_path / "out"
    (path / "assets").mkdir()
    try:
        with in_process.inside(path / "assets"):
            for _ in range(levels):
                os.mkdir("deep")
                os.chdir("deep")
        if levels < 1000:
            ckpt = reshard.open(path)
            text = f"directories below `{path}/assets` are nested too deep"
            assert ours(lambda: reshard.save(ckpt, out), Format) == text
        else:
            text = f"`{path}` cannot be read: File name too long\n  {path}/assets/deep/deep/"
            assert ours(lambda: reshard.open(path), Corrupt).startswith(text)
        assert not out.exists()
    finally:  # pytest's own removal is recursive
        subprocess.run(["rm", "-r", path], check=True)


@pytest.mark.parametrize("level", ["7", "7/default"])
def test_steps_and_items_that_are_symbolic_links(tmp_path, base, level):
    root = tmp_path / "root"
    copied(base, "zarr2-ocdbt", root / "7" / "default")
    copied(base, "zarr2-ocdbt", root / "3" / "default")
    replace_by_link(root / level)
    target = os.path.realpath(root / level)
    text = f"`{root}/{level}` is a symbolic link, which reshard does not follow\n\n"
    text += f"hint: open what it points to: {target}"
    assert ours(lambda: reshard.open(root), Format) == text
    ckpt = reshard.open(root, step=3)
    (tmp_path / "latest").symlink_to(root / "3" / "default")  # a user may open one
    reshard.save(reshard.open(tmp_path / "latest"), tmp_path / "out")
    assert list(reshard.open(tmp_path / "out")) == list(ckpt)


def test_opening_a_pipe_or_a_socket(tmp_path):
    for what, kind in {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK}.items():
        os.mknod(tmp_path / what, kind | 0o600)
        text = f"`{tmp_path / what}` is a file, not a checkpoint directory"
        assert ours(functools.partial(reshard.open, tmp_path / what), Format) == text


def test_stray_files_are_ignored(tmp_path, base):
    """Nobody reads them, so they neither stand for a missing chunk nor are carried over."""
    for form, chunk in (("zarr2-files", "1.1"), ("zarr3-files", "c/1/1")):
        path = copied(base, form, tmp_path / form)
        expected = reshard.open(base(form))["w"].view().read().result()
        for stray in (".DS_Store", "0.0.0", "2.0", "00.1", "-1.0", "c/2/0", "c/0/x"):
            (path / "w" / stray).parent.mkdir(exist_ok=True, parents=True)
            (path / "w" / stray).write_bytes(b"stray")
        ckpt = reshard.open(path)
        assert len(ckpt["w"].stored_sizes()) == 4
        for i, job in enumerate((ckpt, reshard.to_mesh(ckpt, "1x4"))):
            out = tmp_path / f"{form}{i}"
            reshard.save(job, out)
            strays = {f.name for f in (out / "w").rglob("*") if f.is_file()}
            assert not strays & {".DS_Store", "0.0.0", "2.0", "00.1", "-1.0", "x"}
            assert np.array_equal(reshard.open(out)["w"].view().read().result(), expected)
        (path / "w" / chunk).unlink()
        text = "w: 1 of its 4 stored chunks are missing"
        ckpt = reshard.open(path)
        assert ours(lambda ckpt=ckpt: reshard.save(ckpt, tmp_path / "o"), Corrupt) == text


def test_control_characters_and_long_names(tmp_path, base):
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    add_leaf(path, "\x1b[2J\x9b\u202e\U000e0001")
    add_leaf(path, "x" * 4000, name="long")
    assert '"\\u001b[2J\\u009b\\u202e\\udb40\\udc01"' in repr(reshard.open(path))
    error = in_process.refused(tmp_path, "inspect", tmp_path / os.fsdecode(b"\x1b]0;\xff"))
    assert error.startswith(f"Error: nothing exists at `{tmp_path}/\\u001b]0;\\udcff`\n")
    # A long name does not pad the table.
    lengths = sorted(map(len, command("inspect", path)[1].split("\n")))
    assert lengths[-1] > 4000 and lengths[-2] < 400


LIMITED = """
import resource, sys
from reshard import cli, checkpoint, loader, writer
before = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
limit = before + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
cli.main()
"""


def chunk_bomb(path: pathlib.Path, data: bytes) -> None:
    if (path / "w" / "zarr.json").exists():
        bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
        edit_array(path, "w", codecs=[bytes_codec, {"name": "zstd", "configuration": {}}])
        (path / "w" / "c" / "0" / "0").write_bytes(data)
    else:
        (path / "w" / "0.0").write_bytes(data)


BOMBS: dict[str, tuple[str, Callable[[pathlib.Path], Any]]] = {
    "long keys": ("zarr2-nodes", lambda p: plant(p, [long_keys(1_000_000, compression=1)], 0)),
    "a sparse document": ("zarr2-nodes", lambda p: os.truncate(p / TREE, 1 << 40)),
    "a sparse manifest": ("zarr2-nodes", lambda p: os.truncate(p / "manifest.ocdbt", 1 << 40)),
    **{
        f"zeros, {form}, {total}": (form, functools.partial(chunk_bomb, data=data))
        for form in ("zarr2-files", "zarr3-files")
        for total, data in {25: zstd_zeros(1 << 25), 36: zstd_zeros(1 << 36)[:4000]}.items()
    },
}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", BOMBS)
def test_memory_of_bombs(tmp_path, base, name):
    """The command takes at most so much more memory than `--help` does."""
    form, damage = BOMBS[name]
    path = copied(base, form, tmp_path / "saved")
    damage(path)
    words = [str(1 << 30), "ckpt", path, tmp_path / "out", "--to", "1x4"]
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("Error: ") and "Traceback" not in ran.stderr, ran.stderr
    assert not (tmp_path / "out").exists()


WATCHED = """
import sys
import reshard, reshard.cli.inspect, reshard.writer
seen, bad = [], ('pickle.find_class', 'os.system', 'os.exec', 'subprocess.Popen')
sys.addaudithook(lambda event, _: seen.append(event) if event in bad else None)
ckpt = reshard.open('saved')
reshard.save(ckpt, 'moved')
try:
    reshard.save(reshard.to_mesh(ckpt, '1x4'), 'reshaped')
except reshard.CorruptCheckpointError:
    print(seen)
"""


@pytest.mark.usefixtures("forked")
def test_no_code_is_run(tmp_path, base):
    """Of a checkpoint with a pickle wherever a file can be, nothing is unpickled or run."""
    path = copied(base, "zarr2-files", tmp_path / "saved")
    payload = b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "owned") + b"'\ntR."
    for name in ("checkpoint", "__init__.py", "sitecustomize.py", "state.pkl", "reshard.py"):
        (path / name).write_bytes(payload)
    (path / "w" / "0.0").write_bytes(payload)
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moved", "saved"]


def test_no_module_unpickles_or_evaluates():
    """No module can, except the two that exchange pickles with processes of their own, and the one
    that evaluates expressions in files of this package."""
    root = pathlib.Path(reshard.__file__).parent
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    means = {"eval", "exec", "compile", "__import__"}
    names = ("cli/subprocess_model.py", "engine/run.py", "convert/remap.py")
    for file in set(root.rglob("*.py")) - {root / name for name in names}:
        text = file.read_text()
        if not re.search("|".join(banned | means), text):
            continue
        for part in ast.walk(ast.parse(text)):
            if isinstance(part, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in part.names} | {getattr(part, "module", None)}
                assert not {str(name).partition(".")[0] for name in names} & banned, file
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                assert part.func.id not in means, file
            if isinstance(part, ast.keyword) and part.arg == "allow_pickle":
                raise AssertionError(file)


@given(
    st.dictionaries(st.binary(max_size=40), st.binary(max_size=60), min_size=1, max_size=60),
    st.sampled_from([{"id": "zstd"}, None]),
    st.sampled_from([500, 100_000_000]),
)
@settings(max_examples=examples(30), deadline=None)
def test_the_bound_of_decoded_nodes(values, compression, node_bytes):
    config = {"compression": compression, "max_decoded_node_bytes": node_bytes}
    with tempfile.TemporaryDirectory() as name:
        store = layouts.database(pathlib.Path(name), config=config)
        with ts.Transaction(atomic=True) as transaction:
            for key, value in values.items():
                store.with_transaction(transaction).write(key, value)
        manifest, *bounds = (
            decoded_bytes(file.read_bytes()[offset : offset + size])
            for file, offset, size in fuzz.nodes(pathlib.Path(name))
        )
    assert 0 < manifest < 5000
    assert sum(map(len, values)) <= sum(bounds) < 300_000 * len(bounds)


def test_a_directory_in_place_of_a_data_file(tmp_path, base):
    """Found by fuzzing: the size of a data file that is to be shared was taken for granted."""
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    # A busy machine writes several.
    values = reshard.open(path).source.store.values["large"].values()
    file, *_ = {value.file for value in values if value.file}
    replace_by_directory(path / file)
    text = f"`{path}/{file}` is a directory, not a file"
    assert ours(lambda: reshard.save(reshard.open(path), tmp_path / "out")) == text
    assert ours(lambda: reshard.diff(path, base("zarr2-ocdbt"), values=True)).endswith(text)
    assert not (tmp_path / "out").exists()


FUZZING = settings(
    deadline=None,
    derandomize=settings.default.max_examples == 10,  # the exhaustive run draws others
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(fuzz.cases())
@settings(FUZZING, max_examples=examples(100))
def test_random_damage(base, case):
    form, damages = case
    with tempfile.TemporaryDirectory() as name:
        fuzz.check(base(form), damages, pathlib.Path(name))


@pytest.fixture(scope="session")
def conversions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversions")
    fuzz_maps.make_bases(folder)
    return folder


@given(fuzz_maps.cases())
@settings(FUZZING, max_examples=examples(60))
def test_random_maps(conversions, case):
    fuzz_maps.check(conversions, case)


def by_map(base, tmp_path: pathlib.Path, rule: str) -> reshard.Checkpoint:
    file = tmp_path / "map.toml"
    rest = "[[rule]]\nfrom = '^params/'\nto = ''\n"
    file.write_text(f"[[rule]]\nfrom = '^params/large$'\n{rule}\n{rest}")
    dropped = ["name", "none", "empty", "key", "layers/**"]
    return reshard.to_nnx(base("zarr2-files"), map_file=file, layout="linen-params", drop=dropped)


TOML = {
    "the TOML is nested too deeply": [
        "x = " + "[" * 5000,
        "x = " + "{ a = " * 5000,
        "x = " + "[" * 51 + "]" * 51,
        "init" + ".a" * 1500 + " = 1\nrules" + ".a" * 1500 + " = 1",
    ],
    "it has a number of more than 64 bits": [
        "x = 9223372036854775808",
        "x = [{ a = -9223372036854775809 }]",
        f"[[rule]]\npad = {{ widths = [[0, 0]], fill = {'9' * 400} }}",
        f"init = 0x{'f' * 5000}\nrules = 0x{'f' * 5000}",
    ],
}


@pytest.mark.parametrize(("why", "text"), [(why, text) for why in TOML for text in TOML[why]])
def test_refused_toml(tmp_path, base, why, text):
    """By the readers of map files and of rule files."""
    file, path = tmp_path / "file.toml", base("linen")
    file.write_text(text)
    told = ours(lambda: reshard.to_nnx(path, map_file=file), reshard.ArgumentError)
    assert told.startswith(f"{file}: it cannot be read\n  {why}\n\nhint: ")
    told = ours(lambda: read_rules(str(file)), reshard.ShardingError)
    assert told.startswith(f"--rules {file}: it cannot be read\n  {why}\n\nhint: ")


def test_arithmetic_of_any_depth(tmp_path, base):
    made = by_map(base, tmp_path, f"to = '{{{'-' * 196}1}}{{{'1 + ' * 49}1}}'")
    assert "150/value" in made
    rule = f"to = '{{{'(' * 5000}1}}'"
    assert ours(lambda: by_map(base, tmp_path, rule), reshard.ArgumentError) == (
        f"{tmp_path}/map.toml: its rules cannot be read\n"
        f"  rule 1, `^params/large$`: `to`: `{{{'(' * 39}...` is longer than 200 characters"
    )


def test_regexes_of_specs_that_cannot_be_compiled(base):
    ckpt = reshard.open(base("zarr2-files"))
    deep = "(" * 5000 + ")" * 5000
    specs = [(deep, "data"), ("x{9999999999}", "data")]
    told = ours(lambda: reshard.to_mesh(ckpt, "1x4", specs), reshard.ShardingError)
    assert f"`{deep}` is not a regex: maximum recursion depth exceeded" in told
    assert "`x{9999999999}` is not a regex: the repetition number is too large" in told


def padded(count: int) -> str:
    return f"pad = {{ widths = [[0, 0], [0, {count}]], fill = 0 }}"


RULE = "  rule 1, `^params/large$`: "
MAKING = {
    padded(2**63 - 1): f"{RULE}params/large: an array of [64, 9223372036854775839] would have "
    "590295810358705653696 elements, more than any model has",
    f"reshape = [{'1, ' * 32}2048]": f"{RULE}`reshape`: `to` must be a list of at most 32 sizes; "
    f"one may be -1, not [{'1, ' * 26}1",
    f"reshape = [64, 32{', 1' * 30}]\nto = 'l'\nstack = {{ axis = 0, by = '0' }}": (
        f"{RULE}l: an array has at most 32 axes, not 33"
    ),
    padded(65505) + "\nunstack = { axis = 1, into = '{}' }": f"{RULE}params/large: axis 1 of "
    "[64, 65537] would become 65537 arrays, more than any model has",
    # Results that could not be opened again.
    padded(1 << 39): "large/value: an array of [64, 549755813920] has 140737488363520 bytes, "
    "more than any model has",
    padded(1 << 35): "large/value: an array of [64, 34359738400] has 4294967300 chunks of [16, 32]",
}


@pytest.mark.parametrize(("rule", "why"), MAKING.items())
def test_rules_for_impossible_arrays(tmp_path, base, rule, why):
    base("zarr2-files")
    error = reshard.ArgumentError if "`reshape`" in why else reshard.TreeMismatchError
    told = ours(lambda: reshard.save(by_map(base, tmp_path, rule), tmp_path / "out"), error)
    assert told.split("\n")[:2][-1] == why
    assert not (tmp_path / "out").exists()


def test_too_many_chunks(tmp_path, base):
    path = copied(base, "zarr2-files", tmp_path / "saved")
    layouts.edit_document(path / TREE, store_array_data_equal_to_fill_value=False)
    edit_array(path, "large", shape=[4099, 4099])
    ckpt = reshard.select(reshard.to_mesh(reshard.open(path), "data=1,model=1"), "large")
    told = ours(lambda: reshard.save(ckpt, tmp_path / "out", chunks=64), reshard.MemoryLimitError)
    text = "large: the new grid would have 16801801 chunks of [1, 1], more than 4194304\n\n"
    assert told == f'{text}hint: chunks="keep" keeps the stored grid'
    assert reshard.plan(ckpt, chunks="keep").chunks_written == 257 * 129


def test_reshapes_with_many_axes_before_and_after():
    """TensorStore's views have at most 32 axes, also the intermediate ones."""
    x = np.arange(64)
    for before, after in [
        ((2, *[1] * 20, 32), (32, *[1] * 20, 2)),
        ((64, *[1] * 31), (*[1] * 31, 64)),
        ((32, 2, *[1] * 25), (*[2] * 6, *[1] * 26)),
        ((4, *[1] * 16, *[2] * 4), (*[2] * 4, *[1] * 16, 4)),
    ]:
        (view,) = Reshape(after).views([ts.array(x.reshape(before))])
        assert np.array_equal(view.read().result(), x.reshape(after))


@pytest.mark.parametrize("custom", ["text", 3, 0.5, ["note"], [["note", 1]], True])
def test_custom_metadata_that_are_not_an_object(tmp_path, base, custom):
    path = copied(base, "linen", tmp_path / "linen")
    layouts.edit_document(path / TREE, custom_metadata=custom)
    told = ours(lambda: reshard.to_nnx(path, fuzz_jobs.nnx_training), Corrupt)
    assert told == f"`{path}`: its custom metadata are not a JSON object, but {custom!r}"


def operation(**fields: Any) -> Callable[[Json], Any]:
    step = {"from": [["a"]], "to": [["b"]], **fields}
    return lambda record: record["route"]["steps"].append(step)


def kind(made: Any = None, **fields: Any) -> Callable[[Json], Any]:
    """Replaces or changes the kind of the first leaf of a record, the number `step`."""

    def change(record: Json) -> None:
        record["leaves"][0][1] = made or record["leaves"][0][1] | fields

    return change


def more(*paths: list[Any]) -> Callable[[Json], Any]:
    return lambda record: record["leaves"].extend([path, "None"] for path in paths)


def huge_zeros(record: Json) -> None:
    path, shape = ["params", "zeros"], [1 << 40, 1 << 20]
    kind = {"shape": shape, "dtype": "float32", "type": "jax.Array", "keys": None}
    record["leaves"].append([path, kind])
    record["route"]["vanish"].append([path, shape, "float32"])


# The problem of a damaged record, and the damage.
RECORDED: dict[str, Callable[[Json], Any]] = {
    "its containers are not JSON: {'a': 1}": lambda record: record.update(containers={"a": 1}),
    "its containers are not JSON: 'x'": lambda record: record.update(containers="x"),
    "unexpected value: 0.5": more([0.5]),
    "unexpected value: 'step'": lambda record: record["route"]["moved"].append(["step", ["step"]]),
    "its paths do not form one tree: step/x": more(["step", "x"]),
    "its paths do not form one tree: 7": more([7], ["7"]),
    f"its paths do not form one tree: {'a/' * 100}": more(["a"] * 101),
    "not a kind of leaf: ['x']": kind(["x"]),
    "not a kind of leaf: {'shape': []}": kind({"shape": []}),
    "leaves cannot have the type 'jax.Arrays'": kind(type="jax.Arrays"),
    "int32[] are not PRNG keys, 'threefry2x32'": kind(keys="threefry2x32"),
    "float32[2] are not PRNG keys, 'threefry2x32'": kind(
        keys="threefry2x32", dtype="float32", shape=[2]
    ),
    "int32[] are not PRNG keys, 7": kind(keys=7),
    "not a dtype: None": kind(dtype=None),
    'No TensorStore data type with name: "float128"': kind(dtype="float128"),
    "not a dtype of arrays of numbers: 'json'": kind(dtype="json"),
    "unexpected value: '8'": kind(shape="8"),
    "unexpected value: 8.0": kind(shape=[8.0]),
    f"not a shape: {[1] * 33!r:.80}": kind(shape=[1] * 33),
    "params/zeros: [1099511627776, 1048576] is too large for an array": huge_zeros,
    "unexpected value: 'x'": operation(Transpose={"axes": "x"}),
    "unexpected value: 0": operation(Transpose={"axes": 0}),
    "unexpected value: 4.0": operation(Split={"axis": 0, "sizes": [4.0]}),
    "unexpected value: 1.0": operation(Pad={"widths": [[0, 1.0]], "fill": 0}),
    "unexpected value: '0'": operation(Pad={"widths": [[0, 1]], "fill": "0"}),
}


def refused_record(base, tmp_path: pathlib.Path, change: Callable[[Json], Any]) -> str:
    """The error when a checkpoint is converted back to Linen by a damaged record."""
    path = copied(base, "nnx", tmp_path / "nnx")
    edit(path / TREE, lambda document: change(document["custom_metadata"]["reshard.linen"]))
    told = ours(lambda: reshard.to_linen(path), reshard.TreeMismatchError)
    hint = "hint: model=..., the model of the result, converts without the record"
    assert told.endswith(f"\n\n{hint}")
    return told.removesuffix(f"\n\n{hint}")


@pytest.mark.parametrize("problem", RECORDED)
def test_damaged_records_of_conversions(tmp_path, base, problem):
    text = f"the record of the conversion from Linen cannot be read\n  {problem}"
    assert refused_record(base, tmp_path, RECORDED[problem]) == text


def test_values_that_contradict_the_record(tmp_path, base):
    """Step counters may have another integer dtype. Zeros must stay zeros."""

    def change(record: Json) -> None:
        kind(dtype="bool")(record)
        old, new = record["route"]["moved"].pop(1)
        for name, path in {"vanish": old, "appear": new}.items():
            record["route"][name].append([path, [6, 8], "float32"])

    assert refused_record(base, tmp_path, change) == (
        "the checkpoint differs from the result of the conversion from Linen\n"
        "  step: dtype uint32, it was bool\n"
        "  model/first/kernel/value: it was zero, but is not now"
    )


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_links_and_pipes_in_place_of_a_temporary_record(tmp_path, base, what):
    """A link in a stranger's checkpoint is not written through, and a pipe not waited for."""
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    begun, secret = path / "reshard_digests.json.tmp", outside(path)
    begun.symlink_to(secret) if what == "link" else os.mkfifo(begun)
    with fuzz_jobs.limited("it", 5):
        reshard.digest(path, write=True)
    assert secret.read_bytes() == b"s" * 4096 and not begun.exists()
    assert reshard.verify(path).compared == 8


@pytest.mark.parametrize("name", ["unshared.json", "0.json", "0._METADATA", "0._sharding"])
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_unfinished_jobs_with_links_and_pipes(tmp_path, base, what, name):
    """Their parts are written again: nothing outside is written, and nothing waited for."""
    left = fuzz_jobs.stopped(base("recorded"), tmp_path / "out")
    (file,), secret = left.rglob(name), outside(left)
    file.unlink()
    file.symlink_to(secret) if what == "link" else os.mkfifo(file)
    with fuzz_jobs.limited("it", 5):
        go_on(base, tmp_path)
    assert secret.read_bytes() == b"s" * 4096
    assert reshard.diff(base("recorded"), tmp_path / "out", values=True).equal


def go_on(base, tmp_path: pathlib.Path) -> None:
    fuzz_jobs.go_on(base("recorded"), tmp_path / "out")


@pytest.mark.parametrize("change", ["exchanged", "huge"])
def test_damaged_documents_of_a_job(tmp_path, base, change):
    left = fuzz_jobs.stopped(base("recorded"), tmp_path / "out")
    [file], [other] = left.rglob("0.json"), left.rglob("1.json")
    shutil.copyfile(other, file) if change == "exchanged" else os.truncate(file, 1 << 40)
    told = ours(lambda: go_on(base, tmp_path), reshard.DestinationError)
    assert told.startswith(f"`{file}` is damaged\n\nhint: rm '{file}'")


def test_a_flipped_bit_in_a_staged_document(tmp_path, base):
    left = fuzz_jobs.stopped(base("recorded"), tmp_path / "out")
    (file,) = left.rglob("0._sharding")
    flip(file)
    told = ours(lambda: go_on(base, tmp_path), Corrupt)
    assert told.startswith(f"the values read back differ from those written\n  `{file}`\n\nhint: ")
