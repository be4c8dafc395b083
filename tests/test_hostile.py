"""Checkpoints from strangers: whatever is in them, a clear error, and nothing else."""

import ast
import functools
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import fuzz
import fuzz_jobs
import fuzz_maps
import layouts
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples
from tensorstore import ocdbt

import reshard
from reshard import cli
from reshard.arrays.reshaping import reshaped_view
from reshard.cli.model_argument import read_rules
from reshard.storage.btree import decoded_bytes

Json = dict[str, Any]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A small checkpoint of each of `fuzz.FORMATS`, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("base")
    return functools.cache(lambda form: fuzz.make_base(folder, form))


def edit(file: pathlib.Path, change: Callable[[Json], Any]) -> None:
    """A JSON document, changed in place."""
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(json.dumps(document).encode())


def edit_text(file: pathlib.Path, old: str, new: str | bytes) -> None:
    """The first such text of a file."""
    new = new if isinstance(new, bytes) else new.encode()
    data = file.read_bytes()
    assert old.encode() in data
    file.write_bytes(data.replace(old.encode(), new, 1))


def put_in(file: pathlib.Path, text: str) -> None:
    """One more value in the document of the tree."""
    edit_text(file, '"tree_metadata"', f'"note": {text}, "tree_metadata"')


def array_file(path: pathlib.Path, name: str) -> pathlib.Path:
    """The metadata file of an array among plain files."""
    zarr3 = path / name / "zarr.json"
    return zarr3 if zarr3.exists() else path / name / ".zarray"


def edit_array(path: pathlib.Path, name: str, **entries: Any) -> None:
    """The zarr metadata of an array, in plain files or in a database."""
    if not (path / "manifest.ocdbt").exists():
        edit(array_file(path, name), lambda document: document.update(entries))
        return
    store, files = fuzz.database(path), (f"{name}/.zarray".encode(), f"{name}/zarr.json".encode())
    (key,) = (key for key in store.list().result() if key in files)
    document = json.loads(store.read(key).result().value) | entries
    store.write(key, json.dumps(document)).result()


def edit_sharding(path: pathlib.Path, **entries: Any) -> None:
    """The sharding of the array `w`."""

    def change(document: Json) -> None:
        document["dw=="] = json.dumps(json.loads(document["dw=="]) | entries)

    edit(path / "_sharding", change)


def add_leaf(path: pathlib.Path, *keys: str | int, kind: str = "None", name: str = "hostile"):
    """One more leaf in the tree."""
    entry = {
        "key_metadata": [
            {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys
        ],
        "value_metadata": {"value_type": kind, "skip_deserialize": kind == "None"},
    }
    edit(path / "_METADATA", lambda document: document["tree_metadata"].update({name: entry}))


def varint(number: int) -> bytes:
    *parts, last = (number >> shift & 127 for shift in range(0, number.bit_length() or 1, 7))
    return bytes([*(part | 128 for part in parts), last])


def varints(numbers: Iterable[int]) -> bytes:
    return b"".join(map(varint, numbers))


def node(height: int, body: bytes, *, compression: int = 0) -> bytes:
    """A B-tree node."""
    content = body if compression else bytes([height]) + body
    data = struct.pack(">IQ", 0x0CDB20DE, 0) + varint(0) + varint(compression) + content
    return fuzz.sealed(data + bytes(4))


def file_table(file: str) -> bytes:
    """One data file, or none."""
    return varints([1, len(file), 0]) + file.encode() if file else varint(0)


class Place(NamedTuple):
    """Where a value is in the file: offset and length."""

    offset: int
    length: int


def leaf(file: str, values: dict[bytes, bytes | Place]) -> bytes:
    """A leaf node: keys, and values that are inlined or elsewhere."""
    keys = sorted(values)
    found = [values[key] for key in keys]
    places = [value for value in found if isinstance(value, Place)]
    body = file_table(file) + varints([len(keys), *[0] * (len(keys) - 1), *map(len, keys)])
    body += b"".join(keys) + varints(v.length if isinstance(v, Place) else len(v) for v in found)
    body += bytes(isinstance(value, Place) for value in found)
    body += varints([0] * len(places)) + varints(place.offset for place in places)
    return node(0, body + b"".join(value for value in found if isinstance(value, bytes)))


def inner(height: int, file: str, *children: tuple[bytes, int, int]) -> bytes:
    """A node of nodes: the first key of each child, its offset and its length."""
    keys, offsets, lengths = zip(*children, strict=True)
    none = [0] * len(keys)
    body = file_table(file) + varints([len(keys), *none[1:], *map(len, keys), *none])
    body += b"".join(keys) + varints([*none, *offsets, *lengths])
    return node(height, body + varints([1] * 3 * len(keys)))


def plant(path: pathlib.Path, nodes: Sequence[bytes], height: int, file: str = "d/nodes") -> None:
    """Makes the last of some nodes the root of a checkpoint's database; they are in one file."""
    (path / file).write_bytes(b"".join(nodes))
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    if not hasattr(ocdbt, "undump_manifest"):
        pytest.skip("TensorStore before 0.1.85 cannot write a manifest")
    manifest = ocdbt.dump(base).result()
    version = manifest["versions"][-1]
    offset = sum(map(len, nodes[:-1]))
    version["root"]["location"] = f"btreenode::{file}:{offset}:{len(nodes[-1])}"
    version["root_height"] = height
    (path / "manifest.ocdbt").write_bytes(ocdbt.undump_manifest(manifest))


def plant_value(path: pathlib.Path, key: bytes, file: str, place: Place) -> None:
    """A database that is as it was, but for one value, which is elsewhere."""
    store = fuzz.database(path)
    values = {key: store.read(key).result().value for key in store.list().result()}
    plant(path, [leaf(file, {**values, key: place})], 0)


def zstd_zeros(total: int) -> bytes:
    """A zstd frame that decodes to many zeros, in blocks of 2^17."""
    block, last = (struct.pack("<I", end | 2 | 1 << 20)[:3] + b"\0" for end in (0, 1))
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * ((total >> 17) - 1) + last


def long_keys(count: int) -> bytes:
    """A leaf node of keys of 60 kB, each of which shares all but its end with the one before."""
    shared = 60_000
    body = varint(0) + varint(count) + varints([0] + [shared] * (count - 2))
    body += varints([1, shared + 3] + [3] * (count - 2))
    body += b"A" + b"a" * shared + b"".join(struct.pack(">I", i)[1:] for i in range(count - 1))
    return node(0, body + varint(1) * count + bytes(count) + b"x" * count)


Corrupt, Format = reshard.CorruptCheckpointError, reshard.CheckpointFormatError


class Fault(NamedTuple):
    """What is done to a checkpoint of one of `fuzz.FORMATS`; and what opening it raises and says,
    where `PATH` stands for it."""

    damage: Callable[[pathlib.Path], Any]
    text: str
    form: str = "zarr2-ocdbt"
    error: type[reshard.ReshardError] = Corrupt


def replace_by_link(file: pathlib.Path) -> None:
    target = file.parents[1] / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


def replace_by_pipe(file: pathlib.Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_directory(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def outside(path: pathlib.Path) -> pathlib.Path:
    """A file of somebody's, beside the checkpoint."""
    secret = path.parent / "secret"
    secret.write_bytes(b"s" * 4096)
    return secret


def deep_directories(path: pathlib.Path, levels: int) -> None:
    """Directories inside one another, more than a path can name."""
    path.mkdir(exist_ok=True)
    here = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("deep", dir_fd=here)
        inside = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inside
    os.close(here)


def truncate(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def shared_node() -> list[bytes]:
    """Two children that are one node: 2^height leaves of a few hundred bytes."""
    nodes, at = [leaf("", {b"w/.zarray": b"{}"})], 0
    for height in range(1, 40):
        size = len(nodes[-1])
        nodes.append(inner(height, "d/nodes", (b"", at, size), (b"z", at, size)))
        at += size
    return nodes


TREE = "_METADATA"
WHOLE = "`PATH` is not whole: leaves of its tree cannot be found or read\n  w: "
MEMBER = 'Error parsing object member "metadata": Error parsing object member '
DATABASE = "the OCDBT database in `PATH` "
NO_ENTRY = " has an entry that cannot be read\n  "
NOT_A_FILE = (
    "` is neither a file nor a directory\n\nhint: replace a symbolic link by what it points to"
)


def in_tree(change: Callable[[pathlib.Path], Any], text: str) -> Fault:
    """In the document of the tree."""
    return Fault(lambda p: change(p / TREE), f"`PATH/{TREE}`{text}")


def not_json(change: Callable[[pathlib.Path], Any], text: str) -> Fault:
    return in_tree(change, f" is not JSON: {text}")


def named(*keys: str | int, text: str, form: str = "zarr2-ocdbt", kind: str = "None") -> Fault:
    """One more leaf in the tree, which cannot be there."""
    text = f"`PATH/{TREE}` describes no tree\n  {text}"
    return Fault(lambda p: add_leaf(p, *keys, kind=kind), text, form)


def array(text: str, form: str = "zarr2-files", **entries: Any) -> Fault:
    """In the zarr metadata of `w`."""
    text = f"{WHOLE}its metadata cannot be read: {text}"
    return Fault(lambda p: edit_array(p, "w", **entries), text, form)


def sharding(text: str, **entries: Any) -> Fault:
    """In the sharding of `w`."""
    text = f"{WHOLE}its metadata cannot be read: {text}"
    return Fault(lambda p: edit_sharding(p, **entries), text)


def no_file(replace: Callable[[pathlib.Path], Any], name: str, form: str = "zarr2-ocdbt") -> Fault:
    """In the place of a file."""
    return Fault(lambda p: replace(p / name), f"`PATH/{name}{NOT_A_FILE}", form, Format)


def nodes(made: Callable[[], Sequence[bytes]], height: int, text: str) -> Fault:
    """Another tree in the database."""
    text = f"{DATABASE}cannot be read\n  {text}"
    return Fault(lambda p: plant(p, made(), height), text, "zarr2-nodes")


def elsewhere(file: Callable[[pathlib.Path], str], text: str, *place: int, error=Corrupt) -> Fault:
    """A chunk of `w` whose bytes are in another file."""
    value = Place(*(place or (0, 96)))
    return Fault(lambda p: plant_value(p, b"w/0.0", file(p), value), text, "zarr2-nodes", error)


def made(name: str, make: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path], str]:
    """Makes what has a name in the checkpoint; the name."""

    def make_in(path: pathlib.Path) -> str:
        make(path / name)
        return name

    return make_in


FAULTS: dict[str, Fault] = {
    "a truncated document": not_json(
        truncate, "expecting property name enclosed in double quotes at character 100"
    ),
    "garbage for a document": not_json(
        lambda f: f.write_bytes(b"\x80\x04\x95garbage"), "it holds text that is not Unicode"
    ),
    "text that is not UTF-8": not_json(
        lambda f: edit_text(f, '"host"', b'"h\xffst"'), "it holds text that is not Unicode"
    ),
    "half a surrogate pair": not_json(
        lambda f: edit_text(f, '"host"', r'"h\ud800st"'), "it holds text that is not Unicode"
    ),
    "deep nesting": not_json(lambda f: put_in(f, "[" * 100_000), "it is nested too deeply"),
    "nesting that Python takes": not_json(
        lambda f: put_in(f, "[" * 300 + "]" * 300), "it is nested more than 100 levels deep"
    ),
    "a key that is there twice": not_json(
        lambda f: edit_text(f, '"use_zarr3"', '"use_zarr3": true, "use_zarr3"'),
        'the key "use_zarr3" is there twice',
    ),
    "a number of many digits": not_json(
        lambda f: put_in(f, "9" * 100_000), "it holds a number of 100000 digits"
    ),
    "a huge document": in_tree(
        lambda f: os.truncate(f, 1 << 40), " has 1.00 TiB: no checkpoint's has"
    ),
    "a document that is a directory": in_tree(
        replace_by_directory, " is a directory, and not a file"
    )._replace(error=Format),
    "a document that is a pipe": no_file(replace_by_pipe, "_sharding"),
    "a document that is a symbolic link": no_file(replace_by_link, "_sharding"),
    "a record of container types that is none": in_tree(
        lambda f: edit(f, lambda d: d.update(value_metadata_tree="[" * 100_000)),
        ": its value_metadata_tree cannot be read: it is nested too deeply",
    ),
    "a tree that is a list": in_tree(
        lambda f: edit(f, lambda d: d.update(tree_metadata=[])), " has no tree_metadata"
    ),
    "a leaf that is a number": in_tree(
        lambda f: edit(f, lambda d: d["tree_metadata"].update(x=3)), NO_ENTRY + "3"
    ),
    "a name that climbs": named(
        "../../evil", text='"../../evil": its name leads out of the checkpoint'
    ),
    "a name that climbs, among plain files": named(
        *("a/..", "/../evil"),
        text='"a/.."/"/../evil": its name leads out of the checkpoint',
        form="zarr2-files",
        kind="jax.Array",
    ),
    "an absolute name": named(
        "/tmp/evil", text='"/tmp/evil": its name leads out of the checkpoint', form="zarr3-files"
    ),
    "a name with a NUL": named(
        "a\0b", text='"a\\u0000b": its name holds a NUL', form="zarr3-ocdbt"
    ),
    "a very long name": named("x" * 100_000, text=f"{'x' * 80}: its name has 100000 bytes"),
    "a path of many keys": named(*"x" * 5000, text=f"{'x/' * 40}...: it is 5000 levels deep"),
    "a path that is there twice": named("w", text="w: it is there twice"),
    "a leaf below a leaf": named("w", "x", text="w: it is a leaf, and w/x below it"),
    "a negative position": Fault(
        lambda p: add_leaf(p, "layers", -1),
        f"`PATH/{TREE}`{NO_ENTRY}{{'key_metadata': [{{'key': 'layers', 'key_type': 2}}, "
        "{'key': '-1', 'key_type': 1}], 'value_metadata': {'value_type': 'None', "
        "'skip_deserialize': True}}",
    ),
    "a shape that overflows": array(
        'Error opening "zarr" driver: Cannot create using specified "metadata" and schema: '
        "domain must be specified",
        shape=[2**62, 2**62],
    ),
    "a shape beyond 64 bits": array(
        "it holds a number that is too large", "zarr2-ocdbt", shape=[2**70, 12]
    ),
    "a gigantic array": array(
        "an array of [1099511627776, 1048576] has 4611686018427387904 bytes: no model does",
        "zarr2-ocdbt",
        shape=[2**40, 2**20],
    ),
    "millions of chunks": array(
        "an array of [1048576, 1048576] in chunks of [4, 6] has 45813071872 of them",
        "zarr3-ocdbt",
        shape=[2**20, 2**20],
    ),
    "a gigantic chunk": array(
        "chunks of [1048576, 1048576] are larger than the array, [8, 12]", chunks=[2**20, 2**20]
    ),
    "a chunk of nothing": array(
        f'{MEMBER}"chunks": Error parsing value at position 0: Expected integer in the range',
        chunks=[0, 6],
    ),
    "a shape of another rank": array(
        f'{MEMBER}"chunk_grid": Error parsing object member "configuration": Error parsing object '
        'member "chunk_shape": Array has length 2 but should have length 1',
        "zarr3-files",
        shape=[8],
    ),
    "a negative shape": array(
        f'{MEMBER}"shape": Error parsing value at position 0: Expected integer in the range',
        "zarr3-files",
        shape=[-8, 12],
    ),
    "objects for numbers": array(
        f'{MEMBER}"dtype": Unsupported zarr dtype: "|O"', dtype="|O", filters=[{"id": "pickle"}]
    ),
    "a structured dtype": array("its dtype has no name", dtype=[["a", "<f4"]]),
    "characters for numbers": array("char is no dtype of arrays of numbers", dtype="|S4"),
    "an unknown codec": array(
        f'{MEMBER}"compressor": Error parsing object member "id": "pickle" is not registered',
        "zarr2-ocdbt",
        compressor={"id": "pickle"},
    ),
    "an abbreviated codec": array("it has a codec without a name", "zarr3-ocdbt", codecs=["bytes"]),
    "a codec without bounds": array(
        "it is compressed with blosc inside of something else, where chunks decode to 2 GiB if "
        "they say so",
        "zarr3-files",
        codecs=[{"name": "zstd"}, {"name": "blosc"}],
    ),
    "zarr metadata that is not JSON": Fault(
        lambda p: truncate(p / "w" / ".zarray"),
        WHOLE + "its metadata cannot be read: unterminated string starting at character 93",
        "zarr2-files",
    ),
    "huge zarr metadata": Fault(
        lambda p: os.truncate(p / "w" / ".zarray", 1 << 40),
        "the metadata of `w` has 1.00 TiB",
        "zarr2-files",
    ),
    "a sharding of another rank": sharding(
        "P('data', 'model', None) has 3 dimensions, the array 2",
        partition_spec=["data", "model", None],
    ),
    "a sharding on an axis that is not there": sharding(
        "P('data', 'x') names axis 'x', which `data=2,model=2` lacks", partition_spec=["data", "x"]
    ),
    "a mesh of more devices than there are": sharding(
        "the mesh `data=1099511627776,model=1099511627776` has 1208925819614629174706176 devices: "
        "no machine does",
        shape=[2**40, 2**40],
    ),
    "a mesh of other devices": sharding("a mesh `data=2,model=4` of 4 devices", shape=[2, 4]),
    "devices without end": sharding("not devices: 'abc'", device_mesh={"mesh": "abc"}),
    "a spec that is an expression": sharding(
        f"not a partition spec: 'P{'(' * 78}", partition_spec="P(" + "(" * 100_000 + ")"
    ),
    "an axis name with escapes": sharding("not a name: '\\x1b[2J'", axis_names=["data", "\x1b[2J"]),
    "keys of a wrong dtype": Fault(
        lambda p: edit_text(
            p / "array_metadatas/process_0", '"param_name": "key"', '"param_name": "w"'
        ),
        WHOLE + "it is float32, which no PRNG keys are",
    ),
    "a description of arrays that is none": Fault(
        lambda p: edit(p / "array_metadatas/process_0", lambda d: d["array_metadatas"].append("w")),
        "`PATH/array_metadatas/process_0` describes no arrays",
    ),
    "a chunk that is a symbolic link": no_file(replace_by_link, "w/0.0", "zarr2-files"),
    "a chunk that is a pipe": no_file(replace_by_pipe, "w/c/0/0", "zarr3-files"),
    "an array that is a symbolic link": Fault(
        lambda p: replace_by_link(p / "w"), WHOLE + "there is no array `w`", "zarr2-files"
    ),
    "a huge chunk": Fault(
        lambda p: os.truncate(p / "w" / "0.0", 1 << 40),
        WHOLE + "its chunk `0.0` has 1.00 TiB, more than any of [4, 6] can have",
        "zarr2-files",
    ),
    "a database in a symbolic link": no_file(replace_by_link, "ocdbt.process_0"),
    "a manifest that is a symbolic link": no_file(replace_by_link, "manifest.ocdbt"),
    "a manifest of garbage": Fault(
        lambda p: (p / "manifest.ocdbt").write_bytes(bytes(1000)),
        DATABASE + "cannot be read\n  it is no node of a B-tree",
    ),
    "a database that refers to a file outside": elsewhere(
        lambda p: f"../{outside(p).name}",
        DATABASE + "refers to `../secret`, which is no name inside it",
    ),
    "a database that refers to a file by its absolute name": elsewhere(
        lambda p: str(outside(p)),
        DATABASE + "refers to `PARENT/secret`, which is no name inside it",
    ),
    "a database that refers to a symbolic link": elsewhere(
        made("d/link", lambda f: f.symlink_to(outside(f.parents[1]))),
        "`PATH/d/link" + NOT_A_FILE,
        error=Format,
    ),
    "a data file that is a pipe": elsewhere(
        made("d/pipe", os.mkfifo), "`PATH/d/pipe" + NOT_A_FILE, error=Format
    ),
    "a value beyond the end of what fits": elsewhere(
        lambda p: "d/nodes",
        WHOLE + "its chunk `0.0` has 1048576.00 TiB, more than any of [4, 6] can have",
        *(5, 1 << 60),
    ),
    "a node that is its own child": nodes(
        lambda: [inner(1, "d/nodes", (b"", 0, 38))],
        1,
        "several nodes refer to node btreenode::d/nodes:0:38",
    ),
    "nodes that share their children": nodes(
        shared_node, 39, "several nodes refer to node btreenode::d/nodes:0:35"
    ),
    "a node that is somewhere else": nodes(
        lambda: [inner(1, "d/none", (b"", 7, 500))],
        1,
        "the data file `d/none` is missing",
    ),
    "a node of too many long keys": nodes(
        lambda: [long_keys(20_000)], 0, "its B-tree decodes to more than any checkpoint's"
    ),
    "a node that is a zip bomb": nodes(
        lambda: [node(0, zstd_zeros(8 << 30), compression=1)],
        0,
        "its B-tree decodes to more than any checkpoint's",
    ),
}


def broken(path: pathlib.Path, fault: Fault, base) -> str:
    """A checkpoint with a fault at a path; returns the message that it deserves."""
    shutil.copytree(base(fault.form), path)
    fault.damage(path)
    return fault.text.replace("PATH", str(path)).replace("PARENT", str(path.parent))


def ours(job: Callable[[], Any], error: type[Exception] = reshard.ReshardError) -> str:
    """That a job is refused, in a short time; what is said."""
    with fuzz_jobs.limited("it", 5), pytest.raises(error) as caught:
        job()
    return str(caught.value)


def refused(job: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(reshard.ReshardError) as caught:
        job()
    assert (type(caught.value), str(caught.value)) == (error, text)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line in this process; returns its exit status and stderr."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["reshard", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("name", FAULTS)
def test_faults(tmp_path, base, command, name):
    """Opening says what is wrong, and so do the commands; nothing is written, nor are what was
    opened and what is beside it changed."""
    fault, path = FAULTS[name], tmp_path / "saved"
    text = broken(path, fault, base)
    before = fuzz.snapshot(tmp_path)
    refused(lambda: reshard.open(path), fault.error, text)
    refused(lambda: reshard.restore(path, layouts.mesh((1, 4))), fault.error, text)
    assert command("inspect", path) == (2, f"Error: {text}\n")
    assert command("ckpt", path, tmp_path / "out", "--to", "1x4") == (2, f"Error: {text}\n")
    assert fuzz.snapshot(tmp_path) == before


def copied(base, form: str, path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(base(form), path)


ZEROS = bytes(4 * 6 * 4)
CHUNKS = {
    "shorter": (zlib.compress(ZEROS[:-1]), "Not enough data"),
    "longer": (zlib.compress(ZEROS + b"\0"), "End of data expected"),
    "much longer": (zlib.compress(bytes(1 << 20)), "End of data expected"),
    "truncated": (zlib.compress(os.urandom(96))[:-10], "Not enough data"),
    "garbage": (b"\x80\x04\x95garbage", "failed"),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_chunks_that_decode_to_something_else(tmp_path, base, kind):
    path = copied(base, "zarr2-files", tmp_path / "saved")
    edit_array(path, "w", compressor={"id": "zlib", "level": 1})
    data, words = CHUNKS[kind]
    for file in (path / "w").iterdir():
        if file.name != ".zarray":
            file.write_bytes(zlib.compress(ZEROS))
    (path / "w" / "1.1").write_bytes(data)
    before = fuzz.snapshot(tmp_path)
    for job in (
        lambda: reshard.save(reshard.to_mesh(reshard.open(path), "1x4"), tmp_path / "out"),
        lambda: reshard.restore(path, layouts.mesh((1, 4))),
    ):
        with pytest.raises(reshard.CorruptCheckpointError) as caught:
            job()
        assert caught.value.summary == "w: its stored bytes cannot be read"
        (problem,) = caught.value.problems
        assert words in problem and f'"{path}/w/1.1"' in problem
    assert fuzz.snapshot(tmp_path) == before


def test_a_sharding_that_does_not_divide(tmp_path, base, command):
    """It is no matter to who lays the array out anew."""
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    edit_sharding(path, shape=[16, 1], device_mesh=None)
    ckpt, out = reshard.open(path), tmp_path / "out"
    text = "w does not fit `data=16,model=1`\n  dimension 0 of 8 does not divide by 16 (data)\n\n"
    saves = f'{text}hint: reshard.to_mesh(ckpt, "data=1,model=1") fits any array'
    refused(lambda: reshard.save(ckpt, out), reshard.ShardingError, saves)
    inspected = command("inspect", path, "--sharding", "w")
    assert inspected == (2, f"Error: {text}hint: --mesh 1x1 fits any array\n")
    assert not out.exists()
    reshard.save(reshard.to_mesh(ckpt, "data=1,model=4"), out)
    reshard.open(out)


def test_keys_of_an_unknown_kind(tmp_path, base):
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    edit_text(path / "array_metadatas/process_0", '"threefry2x32"', '"os.system"')
    reshard.save(reshard.open(path), tmp_path / "out")  # it is only text
    with pytest.raises(reshard.CorruptCheckpointError) as caught:
        reshard.restore(path, layouts.mesh((1, 4)))
    assert caught.value.summary == (
        "[2] is no data of PRNG keys `os.system`, as the checkpoint says"
    )


def test_arrays_of_absent_chunks_that_nothing_could_hold(tmp_path, base):
    """A chunk that is absent holds zeros in some checkpoints: then nothing speaks against tebibytes
    of them but the room that they need."""
    path = copied(base, "zarr2-files", tmp_path / "saved")
    edit(path / TREE, lambda document: document.update(store_array_data_equal_to_fill_value=False))
    shutil.rmtree(path / "large")
    (path / "large").mkdir()
    shutil.copy(path / "w" / ".zarray", path / "large")
    edit_array(path, "large", shape=[1 << 20, 1 << 22], chunks=[1 << 14, 1 << 13])
    ckpt, out = reshard.open(path), tmp_path / "out"
    assert ckpt["large"].nbytes == 1 << 44
    with pytest.raises(reshard.DestinationError) as caught:
        reshard.save(reshard.to_mesh(ckpt, "1x4"), out)
    assert caught.value.summary == f"not enough room for `{out}`"
    with pytest.raises(reshard.MemoryLimitError) as limited:
        reshard.restore(path, layouts.mesh((1, 4)))
    assert str(limited.value) == "large: there is no memory for its 16.00 TiB"


def test_what_is_beside_the_arrays_and_no_file(tmp_path, base, command):
    """Links, pipes and endless directories are not copied."""
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
        refused(lambda ckpt=ckpt, out=out: reshard.save(ckpt, out), Format, text)
        assert list(reshard.plan(ckpt, out).problems) == [text.partition("\n")[0]]
        assert command("ckpt", path, out) == (2, f"Error: {text}\n")
        assert not out.exists()


@pytest.mark.parametrize("levels", [150, 1500, 3000])
def test_endless_directories(tmp_path, base, levels):
    """More than anybody means, than Python's stack holds, than a path can name."""
    path = copied(base, "zarr2-files", tmp_path / "saved")
    out = tmp_path / "out"
    try:
        deep_directories(path / "assets", levels)
        if levels < 1000:
            ckpt = reshard.open(path)
            text = f"directories below `{path}/assets` are nested too deep"
            refused(lambda: reshard.save(ckpt, out), Format, text)
        else:
            with pytest.raises(reshard.CorruptCheckpointError) as caught:
                reshard.open(path)
            assert caught.value.summary == f"`{path}` cannot be read: File name too long"
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
    text = f"`{root}/{level}` is a symbolic link\n\nhint: open what it points to: {target}"
    refused(lambda: reshard.open(root), Format, text)
    assert reshard.open(root, step=3).source.step == "3"


def test_opening_a_symbolic_link(tmp_path, base):
    (tmp_path / "latest").symlink_to(copied(base, "zarr2-ocdbt", tmp_path / "saved"))
    reshard.save(reshard.open(tmp_path / "latest"), tmp_path / "out")
    assert list(reshard.open(tmp_path / "out")) == list(reshard.open(tmp_path / "saved"))


@pytest.mark.parametrize("what", ["pipe", "socket"])
def test_opening_what_is_no_directory(tmp_path, what):
    path = tmp_path / what
    os.mknod(path, (stat.S_IFIFO if what == "pipe" else stat.S_IFSOCK) | 0o600)
    text = f"`{path}` is a file, and not a checkpoint directory"
    refused(lambda: reshard.open(path), Format, text)


def test_files_that_are_no_chunks_are_left_out(tmp_path, base):
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
        refused(lambda path=path: reshard.save(reshard.open(path), tmp_path / "o"), Corrupt, text)


def test_renaming_out_of_the_destination(tmp_path, base):
    for form in ("zarr2-ocdbt", "zarr2-files"):
        ckpt = reshard.rename(reshard.open(base(form)), [(r"^w$", '"../../evil"')])
        refused(
            lambda ckpt=ckpt: reshard.save(ckpt, tmp_path / "out"),
            reshard.TreeMismatchError,
            "nothing can be stored under some names\n"
            '  "../../evil": its name leads out of the checkpoint',
        )
    assert list(tmp_path.iterdir()) == []


def test_names_that_a_terminal_would_act_on(tmp_path, base, command):
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    add_leaf(path, "\x1b[2J\x9b\u202e\U000e0001")
    assert '"\\u001b[2J\\u009b\\u202e\\udb40\\udc01"' in repr(reshard.open(path))
    code, error = command("inspect", tmp_path / os.fsdecode(b"\x1b]0;\xff"))
    told = f"Error: there is nothing at `{tmp_path}/\\u001b]0;\\udcff`"
    assert (code, error.split("\n")[0]) == (2, told)


def test_a_long_name_does_not_pad_the_table(tmp_path, base, capsys, monkeypatch):
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    add_leaf(path, "x" * 4000)
    monkeypatch.setattr(sys, "argv", ["reshard", "inspect", str(path)])
    cli.main()
    lengths = sorted(map(len, capsys.readouterr().out.split("\n")))
    assert lengths[-1] > 4000 and lengths[-2] < 400


BOMBS: dict[str, Callable[[pathlib.Path], Any]] = {
    "long keys": lambda p: plant(p, [long_keys(25_000)], 0),
    "a node": lambda p: plant(p, [node(0, zstd_zeros(64 << 30), compression=1)], 0),
    "a sparse document": lambda p: os.truncate(p / TREE, 1 << 40),
    "a sparse manifest": lambda p: os.truncate(p / "manifest.ocdbt", 1 << 40),
}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", BOMBS)
def test_memory_of_bombs(tmp_path, base, name):
    path = copied(base, "zarr2-nodes", tmp_path / "saved")
    BOMBS[name](path)
    assert ends_within(1 << 30, "inspect", path) == 2


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("form", ["zarr2-files", "zarr3-files"])
def test_memory_of_chunks_that_are_zip_bombs(tmp_path, base, form):
    path = copied(base, form, tmp_path / "saved")
    chunk = path / "w" / ("0.0" if form == "zarr2-files" else "c/0/0")
    if form == "zarr3-files":
        bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
        edit_array(path, "w", codecs=[bytes_codec, {"name": "zstd", "configuration": {}}])
    chunk.write_bytes(zstd_zeros(1 << 25))
    assert ends_within(1 << 30, "ckpt", path, tmp_path / "out", "--to", "1x4") == 2
    chunk.write_bytes(zstd_zeros(64 << 30)[:4000])
    assert ends_within(1 << 30, "ckpt", path, tmp_path / "out", "--to", "1x4") == 2
    assert not (tmp_path / "out").exists()


LIMITED = """
import resource, sys
from reshard import cli, checkpoint, loader, writer
before = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
limit = before + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
cli.main()
"""


def ends_within(memory: int, *arguments: object) -> int:
    """The exit status of a command that takes at most so much more memory than `--help` does."""
    command = [sys.executable, "-c", LIMITED, str(memory), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.stderr.startswith("Error: ") and "Traceback" not in ran.stderr, ran.stderr
    return ran.returncode


WATCHED = """
import sys
import reshard, reshard.cli.inspect, reshard.writer
seen = []
def hook(event, arguments):
    if event in ('pickle.find_class', 'os.system', 'os.exec', 'subprocess.Popen'):
        seen.append(event)
sys.addaudithook(hook)
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


def test_nothing_unpickles_or_evaluates():
    """No module of the package has the means, but those that a process of its own tells what the
    model of a checkpoint is, or what a part of a job has come to: of no file."""
    root = pathlib.Path(reshard.__file__).parent
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    means = {"eval", "exec", "compile", "__import__"}
    engine = {root / "engine" / f"{name}.py" for name in ("executors", "tasks", "workers")}
    for file in set(root.rglob("*.py")) - {root / "cli" / "apart.py", *engine}:
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
def test_what_a_node_takes_is_bounded(values, compression, node_bytes):
    """The bound holds for genuine databases, and is not far off."""
    context = ts.Context()
    base = {"driver": "memory", "path": "saved/"}
    config = {"compression": compression, "max_decoded_node_bytes": node_bytes}
    store = ts.KvStore.open(
        {"driver": "ocdbt", "base": base, "config": config}, context=context
    ).result()
    with ts.Transaction(atomic=True) as transaction:
        for key, value in values.items():
            store.with_transaction(transaction).write(key, value)
    files = ts.KvStore.open(base, context=context).result()
    manifest = ocdbt.dump(files).result()
    assert 0 < decoded_bytes(files.read("manifest.ocdbt").result().value) < 5000
    places, keys, bound, count = [manifest["versions"][-1]["root"]["location"]], 0, 0, 0
    while places:
        place = places.pop()
        data = ocdbt.dump(files, f"value:{place.partition(':')[2]}").result()
        bound += decoded_bytes(data)
        count += 1
        found = ocdbt.dump(files, place).result()
        if found["height"]:
            places += [entry["location"] for entry in found["entries"]]
        else:
            keys += sum(len(entry["key"]) for entry in found["entries"])
    assert keys <= bound < 300_000 * count


@pytest.mark.parametrize("data", [b"", b"\0", bytes(100), b"\x0c\xdb\x20\xde" + b"\xff" * 60])
def test_what_is_no_node(data):
    with pytest.raises(ValueError, match="node of"):
        decoded_bytes(data)


@pytest.mark.parametrize("instead", [pathlib.Path.unlink, replace_by_directory])
def test_data_files_that_are_gone(tmp_path, base, instead):
    """Found by fuzzing: the size of a data file that is to be shared was taken for granted."""
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    ckpt = reshard.open(path)
    # A busy machine writes several.
    file, *_ = {value.file for value in ckpt.source.store.values["large"].values() if value.file}
    instead(path / file)
    text = f"the data file `{path}/{file}` is missing"
    if (path / file).exists():
        text = f"`{path}/{file}` is a directory, and not a file"
    for job in (reshard.plan, lambda ckpt: reshard.save(ckpt, tmp_path / "out")):
        assert ours(lambda job=job: job(reshard.open(path))) == text
    assert not (tmp_path / "out").exists()


@given(fuzz.cases())
@settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_damage(base, case):
    form, damages = case
    with tempfile.TemporaryDirectory() as name:
        fuzz.check(base(form), damages, pathlib.Path(name))


@pytest.fixture(scope="session")
def conversions(tmp_path_factory):
    """What `fuzz_maps` converts."""
    folder = tmp_path_factory.mktemp("conversions")
    fuzz_maps.make_bases(folder)
    return folder


@given(fuzz_maps.cases())
@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_maps(conversions, case):
    fuzz_maps.check(conversions, case)


# What the jobs of `fuzz_jobs` and `fuzz_maps` have found.


def by_map(base, tmp_path: pathlib.Path, rule: str) -> reshard.Checkpoint:
    """The array `large`, 64 x 32, by a rule; all others stay as they are."""
    file = tmp_path / "map.toml"
    rest = "[[rule]]\nfrom = '^params/'\nto = ''\n"
    file.write_text(f"[[rule]]\nfrom = '^params/large$'\n{rule}\n{rest}")
    dropped = ["name", "none", "empty", "key", "layers/**"]
    return reshard.to_nnx(base("zarr2-files"), map_file=file, layout="linen-params", drop=dropped)


TOML = {
    "it is nested too deeply": [
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
def test_toml_that_is_refused(tmp_path, base, why, text):
    """By both readers of such files."""
    file, path = tmp_path / "file.toml", base("linen")
    file.write_text(text)
    told = ours(lambda: reshard.to_nnx(path, map_file=file), reshard.ArgumentError)
    assert told.startswith(f"{file}: it cannot be read\n  {why}\n\nhint: ")
    told = ours(lambda: read_rules(str(file)), reshard.ShardingError)
    assert told.startswith(f"--rules {file}: it cannot be read\n  {why}\n\nhint: ")


@pytest.mark.parametrize("text", ["-" * 5000 + "1", "1 + " * 5000 + "1", "(" * 5000 + "1"])
def test_arithmetic_that_is_nested_too_deeply(tmp_path, base, text):
    base("zarr2-files")
    told = ours(lambda: by_map(base, tmp_path, f"to = '{{{text}}}'"), reshard.ArgumentError)
    assert told.startswith(
        f"{tmp_path}/map.toml: its rules cannot be read\n"
        f"  rule 1, `^params/large$`: `to`: `{{{text[:40]}...}}` is longer than 200 characters\n"
    )


def test_arithmetic_as_long_as_it_may_be(tmp_path, base):
    made = by_map(base, tmp_path, f"to = '{{{'-' * 198}1}}{{{'1 + ' * 49}1}}'")
    assert "150/value" in made


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(" * 5000 + ")" * 5000, "maximum recursion depth exceeded"),
        ("x{9999999999}", "the repetition number is too large"),
    ],
)
def test_regexes_of_specs_that_cannot_be_compiled(base, text, why):
    ckpt = reshard.open(base("zarr2-files"))
    told = ours(lambda: reshard.to_mesh(ckpt, "1x4", [(text, "data")]), reshard.ShardingError)
    assert told.startswith(f"the spec rules cannot be read\n  `{text}` is not a regex: {why}")


MAKING = {
    "sizes": (
        "pad = { widths = [[0, 0], [0, 9223372036854775807]], fill = 0 }",
        "params/large: an array of [64, 9223372036854775839] would have 590295810358705653696 "
        "elements: no model has as many",
    ),
    "33 axes": (f"reshape = [{'1, ' * 32}2048]", "`reshape`: arrays have 32 axes at most"),
    "33 axes of a stack": (
        f"reshape = [64, 32{', 1' * 30}]\nto = 'l'\nstack = {{ axis = 0, by = '0' }}",
        "l: arrays have 32 axes at most, not 33",
    ),
    "parts": (
        "pad = { widths = [[0, 0], [0, 65505]], fill = 0 }\nunstack = { axis = 1, into = '{}' }",
        "params/large: axis 1 of [64, 65537] would become 65537 arrays: no model has as many",
    ),
}


@pytest.mark.parametrize("name", MAKING)
def test_rules_that_make_what_no_array_can_be(tmp_path, base, name):
    rule, why = MAKING[name]
    base("zarr2-files")
    told = ours(
        lambda: reshard.save(by_map(base, tmp_path, rule), tmp_path / "out"),
        reshard.ArgumentError if name == "33 axes" else reshard.TreeMismatchError,
    )
    assert told.split("\n")[1] == f"  rule 1, `^params/large$`: {why}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("width", "why"),
    [
        (1 << 39, "an array of [64, 549755813920] has 140737488363520 bytes: no model does"),
        (1 << 35, "an array of [64, 34359738400] in chunks of [16, 32] has 4294967300 of them"),
    ],
)
def test_results_that_could_not_be_opened_again(tmp_path, base, width, why):
    base("zarr2-files")
    rule = f"pad = {{ widths = [[0, 0], [0, {width}]], fill = 0 }}"
    told = ours(lambda: by_map(base, tmp_path, rule), reshard.TreeMismatchError)
    assert told == f"large/value: {why}"


def test_more_chunks_than_could_be_opened_again(tmp_path, base):
    path = copied(base, "zarr2-files", tmp_path / "saved")
    edit(path / TREE, lambda d: d.update(store_array_data_equal_to_fill_value=False))
    edit_array(path, "large", shape=[4099, 4099])
    ckpt = reshard.select(reshard.to_mesh(reshard.open(path), "data=1,model=1"), "large")
    told = ours(lambda: reshard.save(ckpt, tmp_path / "out", chunks=64), reshard.MemoryLimitError)
    assert told == (
        "large: it would be in 16801801 chunks of [1, 1]\n\n"
        'hint: chunks="keep" leaves the stored grid as it is'
    )
    assert reshard.plan(ckpt, chunks="keep").chunks_written == 257 * 129


def test_reshapes_with_many_axes_before_and_after():
    """TensorStore has views of 32 axes, and what is between is one as well."""
    x = np.arange(64)
    for before, after in [
        ((2, *[1] * 20, 32), (32, *[1] * 20, 2)),
        ((64, *[1] * 31), (*[1] * 31, 64)),
        ((32, 2, *[1] * 25), (*[2] * 6, *[1] * 26)),
        ((4, *[1] * 16, *[2] * 4), (*[2] * 4, *[1] * 16, 4)),
    ]:
        view = reshaped_view(ts.array(x.reshape(before)), after)
        assert np.array_equal(view.read().result(), x.reshape(after))


@pytest.mark.parametrize("custom", ["text", 3, 0.5, ["note"], [["note", 1]], True])
def test_custom_metadata_that_are_none(tmp_path, base, custom):
    """Of a conversion there is a record in them; what else is there is carried on."""
    path = copied(base, "linen", tmp_path / "linen")
    edit(path / TREE, lambda document: document.update(custom_metadata=custom))
    told = ours(lambda: reshard.to_nnx(path, fuzz_jobs.nnx_training), Corrupt)
    assert told == f"`{path}`: its custom metadata are no JSON object, but {custom!r}"


@pytest.mark.parametrize(
    ("form", "key"), [("zarr2-files", "chunks"), ("zarr3-files", "chunk_grid")]
)
def test_zarr_metadata_without_a_chunk_shape(tmp_path, base, form, key):
    """TensorStore makes one up; but what Orbax writes has one."""
    path = copied(base, form, tmp_path / "saved")
    edit(array_file(path, "large"), lambda document: document.pop(key))
    problem = "large: its metadata cannot be read: it has no shape of chunks"
    assert ours(lambda: reshard.open(path), Corrupt) == (
        f"`{path}` is not whole: leaves of its tree cannot be found or read\n  {problem}"
    )


def operation(**fields: Any) -> Callable[[Json], Any]:
    """One more step in a record."""
    step = {"from": [["a"]], "to": [["b"]], **fields}
    return lambda record: record["route"]["steps"].append(step)


def kind(**fields: Any) -> Callable[[Json], Any]:
    """Another kind of the first leaf of a record, `step`, which is a number."""
    return lambda record: record["leaves"][0][1].update(fields)


def one_more(*keys: Any) -> Callable[[Json], Any]:
    """One more leaf in a record."""
    return lambda record: record["leaves"].append([list(keys), "None"])


# What is said of a record, and what has been done to it.
RECORDED: dict[str, Callable[[Json], Any]] = {
    "its containers are not JSON: {'a': 1}": lambda record: record.update(containers={"a": 1}),
    "its containers are not JSON: 'x'": lambda record: record.update(containers="x"),
    "not a path: [0.5]": one_more(0.5),
    "not a path: 'step'": lambda record: record["route"]["moved"].append(["step", ["step"]]),
    "its leaves are not those of one tree: step/x": one_more("step", "x"),
    "its leaves are not those of one tree: a path is there twice": lambda record: (
        one_more(7)(record),
        one_more("7")(record),
    ),
    f"its leaves are not those of one tree: {'a/' * 100}": one_more(*["a"] * 101),
    "there are no such leaves: ['x']": lambda record: record["leaves"][0].__setitem__(1, ["x"]),
    "there are no such leaves: {'shape': []}": (
        lambda record: record["leaves"][0].__setitem__(1, {"shape": []})
    ),
    "there are no leaves of type 'jax.Arrays'": kind(type="jax.Arrays"),
    "int32[] are no PRNG keys, 'threefry2x32'": kind(keys="threefry2x32"),
    "float32[2] are no PRNG keys, 'threefry2x32'": kind(
        keys="threefry2x32", dtype="float32", shape=[2]
    ),
    "int32[] are no PRNG keys, 7": kind(keys=7),
    "not a dtype: None": kind(dtype=None),
    'No TensorStore data type with name: "float128"': kind(dtype="float128"),
    "not a dtype of arrays of numbers: 'json'": kind(dtype="json"),
    "not a shape: '8'": kind(shape="8"),
    "not a shape: [8.0]": kind(shape=[8.0]),
    "arrays have 32 axes at most, not 33": kind(shape=[1] * 33),
    "`axes` of an operation is 'x'": operation(Transpose={"axes": "x"}),
    "`sizes` of an operation is [4.0]": operation(Split={"axis": 0, "sizes": [4.0]}),
    "`axis` of an operation is 1.0": operation(Pad={"widths": [[0, 1.0]], "fill": 0}),
    "`fill` of an operation is '0'": operation(Pad={"widths": [[0, 1]], "fill": "0"}),
}
NO_RECORD = (
    "the record of the conversion from Linen cannot be read\n  PROBLEM\n\n"
    "hint: model=..., the Linen model, converts without the record"
)


def refused_record(base, tmp_path: pathlib.Path, change: Callable[[Json], Any]) -> str:
    """What is said when a checkpoint goes back to Linen by a record that has been changed."""
    path = copied(base, "nnx", tmp_path / "nnx")
    edit(path / TREE, lambda document: change(document["custom_metadata"]["reshard.linen"]))
    return ours(lambda: reshard.to_linen(path), reshard.TreeMismatchError)


@pytest.mark.parametrize("problem", RECORDED)
def test_records_of_conversions_that_are_none(tmp_path, base, problem):
    told = refused_record(base, tmp_path, RECORDED[problem])
    assert told == NO_RECORD.replace("PROBLEM", problem)


def test_values_that_are_not_those_of_a_record(tmp_path, base):
    """Step counters may have another dtype, of integers; what was zero is zero."""

    def change(record: Json) -> None:
        kind(dtype="bool")(record)
        old, new = record["route"]["moved"].pop(1)
        for name, path in {"vanish": old, "appear": new}.items():
            record["route"][name].append([path, [6, 8], "float32"])

    assert refused_record(base, tmp_path, change) == (
        "the checkpoint is not what the conversion from Linen made any more\n"
        "  step: dtype uint32, it was bool\n"
        "  model/first/kernel/value: it was zero, and is not\n\n"
        "hint: model=..., the Linen model, converts without the record"
    )


def test_zeros_of_a_record_that_nothing_could_hold(tmp_path, base):
    shape = [1 << 40, 1 << 20]

    def change(record: Json) -> None:
        kind = {"shape": shape, "dtype": "float32", "type": "jax.Array", "keys": None}
        record["leaves"].append([["params", "zeros"], kind])
        record["route"]["vanish"].append([["params", "zeros"], shape, "float32"])

    problem = "params/zeros: [1099511627776, 1048576] is larger than all arrays"
    assert refused_record(base, tmp_path, change) == NO_RECORD.replace("PROBLEM", problem)


def test_digests_of_files_with_long_names(tmp_path, base):
    """They are not there, as files of any other name may be."""
    path = copied(base, "recorded", tmp_path / "root" / "3" / "default")
    edit(path / "reshard_digests.json", lambda d: d["beside"].update({"x" * 300 + "/y": "0" * 64}))
    (problem,) = reshard.verify(tmp_path / "root").problems
    assert problem.startswith(f"the file `{tmp_path}/root/3/xxx")
    ours(lambda: reshard.save(reshard.open(tmp_path / "root"), tmp_path / "out"), Corrupt)


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_is_where_a_record_is_begun(tmp_path, base, what):
    """A link in a stranger's checkpoint is not written through, and a pipe not waited for."""
    path = copied(base, "zarr2-ocdbt", tmp_path / "saved")
    begun = path / "reshard_digests.json.tmp"
    secret = outside(path)
    begun.symlink_to(secret) if what == "link" else os.mkfifo(begun)
    with fuzz_jobs.limited("it", 5):
        reshard.digest(path, write=True)
    assert secret.read_bytes() == b"s" * 4096
    assert reshard.verify(path).compared == 8
    assert not begun.exists()


def unfinished(base, tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A genuine checkpoint, and what a stopped job that reshapes it has left."""
    path = base("recorded")
    left = fuzz_jobs.left_of(tmp_path / "out")
    shutil.copytree(fuzz_jobs.unfinished(path), left)
    return path, left


@pytest.mark.parametrize("name", ["reshard_progress.json", "_METADATA", "_sharding"])
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_unfinished_jobs_with_links_and_pipes(tmp_path, base, what, name):
    """Nothing outside is written, and nothing waited for."""
    path, left = unfinished(base, tmp_path)
    secret = outside(left)
    (left / name).unlink()
    (left / name).symlink_to(secret) if what == "link" else os.mkfifo(left / name)
    ours(lambda: fuzz_jobs.go_on(path, tmp_path / "out"))
    assert secret.read_bytes() == b"s" * 4096


def test_progress_that_is_huge(tmp_path, base):
    path, left = unfinished(base, tmp_path)
    os.truncate(left / "reshard_progress.json", 1 << 40)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, before[1]))
    try:
        ours(lambda: fuzz_jobs.go_on(path, tmp_path / "out"), reshard.DestinationError)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


PROGRESS: dict[str, Callable[[Json], Any]] = {
    "cores that are no number": lambda job: job.update(cores="2"),
    "other items": lambda job: job.update(items=[]),
    "no items": lambda job: job.pop("items"),
    "a number below zero": lambda job: job["items"][0].update(batches=-1),
    "a digest of no array": lambda job: job["items"][0].update(digests=[[["x"], [1, 2, 3]]]),
    "a digest that is short": lambda job: job["items"][0].update(digests=[[["w"], [1]]]),
    "an entry more": lambda job: job["items"][0].update(x=1),
}


@pytest.mark.parametrize("name", PROGRESS)
def test_progress_that_no_job_has_noted(tmp_path, base, name):
    """Its hash fits: somebody has made it up, or another version has written it."""
    path, left = unfinished(base, tmp_path)
    file = left / "reshard_progress.json"
    job = json.loads(file.read_bytes())["job"]
    PROGRESS[name](job)
    text = json.dumps(job)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(f'{{"sha256": "{sha256}", "job": {text}}}')
    ours(lambda: fuzz_jobs.go_on(path, tmp_path / "out"), reshard.DestinationError)
