"""Random damage to genuine checkpoints: to documents, to any byte, and to the kind of files.

Each damaged checkpoint is opened, carried over and reshaped, and put through two of the other jobs:
restored, verified, compared with what it was, converted, or what a stopped job has left of it gone
on with.

`test_hostile.py` draws the damage, and fails where `reshard` does anything else than succeed or
raise a `ReshardError`.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.serialization
import fuzz_jobs
import jax
import layouts
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
import tensorstore as ts
from flax.traverse_util import unflatten_dict
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import database
from tensorstore import ocdbt

import reshard
from reshard.convert.record import KEY
from reshard.storage.btree import crc32c

# Which file, which place, which value.
Numbers = tuple[int, ...]
# Each with the keyword arguments of `PyTreeCheckpointer`, and whether its B-tree nodes are stored
# without compression: damage to them then goes deeper than their codec. `recorded` has digests on
# record; `linen` and `nnx` are the training of one model, the latter converted from the former,
# which is on record in it.
FORMATS = {
    "zarr2-ocdbt": ({}, False),
    "zarr2-nodes": ({}, True),
    "zarr3-ocdbt": ({"use_zarr3": True}, False),
    "zarr3-nodes": ({"use_zarr3": True}, True),
    "zarr2-files": ({"use_ocdbt": False}, False),
    "zarr3-files": ({"use_ocdbt": False, "use_zarr3": True}, False),
    "recorded": ({}, False),
    "linen": ({"use_ocdbt": False}, False),
    "nnx": ({"use_ocdbt": False}, False),
}
# What programs other than Orbax have written.
FOREIGN = ("safetensors", "msgpack", "zarr-tree")
# Values that an attacker might use.
NASTY: list[Any] = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**62, 2**64, 10**30),
    *(0.5, -0.0, float("nan"), float("inf")),
    *("", "0", "..", "../../x", "/abs", "a/b", "a\0b", "\ud800", "\u202e\x1b[2J", "x" * 300),
    *("|O", "bfloat16", ">f8", "<M8[s]", "jax.Array", "string", "None", "P(" + "(" * 500),
    *([], {}, [[]], [0], [-1], [2**40], [2**31, 2**31], [1] * 40, {"a": {"b": 1}}),
    *({"id": "zstd", "level": 99}, {"name": "sharding_indexed"}),
]


def make_base(folder: pathlib.Path, form: str) -> pathlib.Path:
    """A small genuine checkpoint, with every kind of leaf or of a model."""
    path = folder / form
    if form in FOREIGN:
        _make_foreign(path, form)
        return path
    arguments, plain_nodes = FORMATS[form]
    if form == "nnx":
        before = make_base(folder / "before", "linen")
        reshard.save(reshard.to_nnx(before, fuzz_jobs.nnx_training), path, digest=True)
        return path
    tree = fuzz_jobs.linen_training() if form == "linen" else _tree(list(FORMATS).index(form))
    with ocp.PyTreeCheckpointer(**arguments) as checkpointer:
        checkpointer.save(path, tree, custom_metadata={"note": "kept"})
    if plain_nodes:
        config = {"max_decoded_node_bytes": 1000, "max_inline_value_bytes": 100}
        layouts.rewrite_database(path, config={"compression": None, **config})
    if form == "recorded":
        reshard.digest(path, write=True)
    return path


def _tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def put(shape: tuple[int, ...], *spec: Any) -> jax.Array:
        values = rng.standard_normal(shape).astype("float32")
        return jax.device_put(values, NamedSharding(fuzz_jobs.mesh(), P(*spec)))

    return {
        "w": put((8, 12), "data", "model"),
        "large": put((64, 32), "data"),
        "layers": [put((4,), "model"), put(())],
        "key": jax.random.key(3),
        "a/b": put((6,), "data"),
        "host": rng.integers(0, 9, (3, 5)),
        "step": 7,
        "name": "text",
        "none": None,
        "empty": {},
    }


def _make_foreign(path: pathlib.Path, form: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 12), "large": (64, 32), "layers/0": (4,), "step": ()}
    arrays = {n: np.asarray(rng.standard_normal(shape), "f4") for n, shape in shapes.items()}
    path.mkdir()
    if form == "safetensors":
        index: dict[str, str] = {}
        for number in (1, 2):
            file = f"model-0000{number}-of-00002.safetensors"
            part = {n.replace("/", "."): arrays[n] for n in [*arrays][number - 1 :: 2]}
            safetensors.numpy.save_file(part, path / file)
            index |= dict.fromkeys(part, file)
        (path / "model.safetensors.index.json").write_bytes(_text({"weight_map": index}))
    elif form == "msgpack":
        tree = unflatten_dict(arrays, sep="/")
        (path / "checkpoint_3").write_bytes(flax.serialization.msgpack_serialize(tree))
    else:
        for name, values in arrays.items():
            spec = {"driver": "zarr3", "kvstore": f"file://{path}/{name}/"}
            store = ts.open(spec, create=True, dtype=values.dtype, shape=values.shape).result()
            store.write(values).result()


def sealed(data: bytes) -> bytes:
    """A node or a manifest with the length and the checksum that its content asks for."""
    data = data[:4] + struct.pack("<Q", len(data)) + data[12:-4]
    return data + struct.pack("<I", crc32c(data))


def damage_flip(path: pathlib.Path, numbers: Numbers) -> None:
    file = _pick(_files(path), numbers[0])
    data = bytearray(file.read_bytes())
    data[numbers[1] % max(len(data), 1)] ^= 1 << numbers[2] % 8
    file.write_bytes(data)


def damage_splice(path: pathlib.Path, numbers: Numbers) -> None:
    """Replaces the end of a file, or inserts bytes into it."""
    file = _pick(_files(path), numbers[0])
    data = file.read_bytes()
    at = numbers[1] % (len(data) + 1)
    more = random.Random(numbers[2]).randbytes(numbers[3] % 40)
    file.write_bytes(data[:at] + more + (data[at:] if numbers[4] % 2 else b""))


def damage_swap(path: pathlib.Path, numbers: Numbers) -> None:
    files = _files(path)
    one, other = _pick(files, numbers[0]), _pick(files, numbers[1])
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def damage_replace(path: pathlib.Path, numbers: Numbers) -> None:
    file = _pick(_files(path), numbers[0])
    file.unlink()
    what = numbers[1] % 6
    if what == 0:
        file.mkdir()
    elif what == 1:
        os.mkfifo(file)
    elif what == 2:
        secret = path.parent / fuzz_jobs.SECRET  # never a file that matters: a job may write to it
        secret.write_bytes(b"s" * 40)
        file.symlink_to(secret)
    elif what == 3:
        file.symlink_to(file)
    elif what == 4:
        file.write_bytes(b"")


def damage_directory(path: pathlib.Path, numbers: Numbers) -> None:
    """Removes a directory, moves it, or replaces it by a file."""
    folders = sorted(f for f in path.rglob("*") if f.is_dir() and not f.is_symlink())
    folder = _pick(folders, numbers[0])
    elsewhere = path.parent / f"{path.name}-elsewhere"
    if numbers[1] % 3 == 1 and not elsewhere.exists():
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        return
    shutil.rmtree(folder)
    if numbers[1] % 3 == 2:
        folder.write_bytes(b"x")


def damage_document(path: pathlib.Path, numbers: Numbers) -> None:
    """Changes a JSON document, zarr metadata or a sharding."""
    read, write = _pick(list(_documents(path)), numbers[0])
    with contextlib.suppress(ValueError, TypeError, LookupError):  # it was damaged before
        write(_text(changed(json.loads(read()), numbers[1:])))


def damage_node(path: pathlib.Path, numbers: Numbers) -> None:
    """Changes bytes of a B-tree node or a manifest, and corrects the checksum."""
    file, offset, size = _pick(list(nodes(path)), numbers[0])
    data = file.read_bytes()
    node = bytearray(data[offset : offset + size])
    if len(node) < 20:
        return
    for at, value in zip(numbers[1::2], numbers[2::2], strict=False):
        node[12 + at % (len(node) - 16)] = value % 256
    file.write_bytes(data[:offset] + sealed(bytes(node)) + data[offset + size :])


def damage_record(path: pathlib.Path, numbers: Numbers) -> None:
    """Changes the record of a conversion, if there is one."""
    file = path / "_METADATA"
    if not file.is_file():  # an earlier damage may have left a pipe
        return
    with contextlib.suppress(ValueError, TypeError, LookupError):
        outer = json.loads(file.read_bytes())
        custom = outer["custom_metadata"]
        custom[KEY] = changed(custom[KEY], numbers)
        file.write_bytes(_text(outer))


KINDS = {
    name.removeprefix("damage_"): function
    for name, function in list(globals().items())
    if name.startswith("damage_")
}


_DOCUMENTS = {
    *(".zarray", "zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "_sharding"),
    *("reshard_digests.json", "model.safetensors.index.json"),
}


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _pick(items: list[Any], number: int) -> Any:
    """One of some items. Raises IndexError if there is none."""
    return items[number % max(len(items), 1)]


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(f for f in path.rglob("*") if f.is_file() and not f.is_symlink())


def _documents(path: pathlib.Path) -> Iterator[tuple[Callable[[], Any], Callable[[bytes], Any]]]:
    """How to read and how to write each JSON document of a checkpoint."""
    for file in _files(path):
        if file.name in _DOCUMENTS or file.parent.name == "array_metadatas":
            yield file.read_bytes, file.write_bytes
        elif file.suffix == ".safetensors":
            yield _header(file)
    if (path / "_sharding").is_file():
        # Earlier damage may have left any JSON.
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            for name in sorted(json.loads((path / "_sharding").read_bytes())):
                yield _inside(path / "_sharding", name)
    if _has_database(path):
        with contextlib.suppress(ValueError):
            store = database(path)
            for key in sorted(store.list().result()):
                if key.endswith((b".zarray", b"zarr.json")):
                    yield (
                        lambda key=key, store=store: store.read(key).result().value,
                        lambda data, key=key, store=store: store.write(key, data).result(),
                    )


def _header(file: pathlib.Path) -> tuple[Callable[[], Any], Callable[[bytes], Any]]:
    """The header of a safetensors file, which is written with its length."""

    def end() -> int:
        return 8 + min(int.from_bytes(file.read_bytes()[:8], "little"), 1 << 30)

    def write(data: bytes) -> None:
        file.write_bytes(struct.pack("<Q", len(data)) + data + file.read_bytes()[end() :])

    return lambda: file.read_bytes()[8 : end()], write


def _has_database(path: pathlib.Path) -> bool:
    """Whether there is one that TensorStore can read: it would wait for a pipe."""
    whole = all(f.is_file() or f.is_dir() for f in path.rglob("*") if not f.is_symlink())
    return whole and (path / "manifest.ocdbt").is_file()


def _inside(file: pathlib.Path, name: str) -> tuple[Callable[[], Any], Callable[[bytes], Any]]:
    def write(data: bytes) -> None:
        outer = json.loads(file.read_bytes())
        file.write_bytes(_text(outer | {name: data.decode()}))

    return lambda: json.loads(file.read_bytes())[name], write


def changed(node: Any, numbers: Numbers, nasty: Sequence[Any] = NASTY) -> Any:
    """A document with one change, some levels below its top: to one of the nasty values."""
    down, rest = (numbers[0], numbers[1:]) if len(numbers) > 1 else (0, numbers)
    if isinstance(node, dict | list) and node and len(rest) > 1 and down % 8:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = keys[down // 8 % len(keys)]
        if isinstance(node, dict):
            return node | {key: changed(node[key], rest, nasty)}
        return [*node[:key], changed(node[key], rest, nasty), *node[key + 1 :]]
    value = nasty[rest[0] % len(nasty)]
    if isinstance(node, list) and node:
        return [[*node, value], node[1:], node * 2, value][down // 8 % 4]
    if isinstance(node, dict) and node:
        first = next(iter(node))
        without = {key: inner for key, inner in node.items() if key != first}
        added = node | {str(value): node[first]}
        return [added, without, without | {str(value): node[first]}, value][down // 8 % 4]
    return value


def nodes(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, int, int]]:
    """File, offset and length of each B-tree node and manifest."""
    if not _has_database(path):
        return
    yield path / "manifest.ocdbt", 0, (path / "manifest.ocdbt").stat().st_size
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    with contextlib.suppress(ValueError, KeyError, IndexError, OSError):
        places = [ocdbt.dump(base).result()["versions"][-1]["root"]["location"]]
        for _ in range(100):
            if not places:
                return
            place = places.pop()
            start, offset, size = place.rsplit(":", 2)
            yield path / "".join(start.split(":")[1:]), int(offset), int(size)
            node = ocdbt.dump(base, place).result()
            places += [entry["location"] for entry in node["entries"]] if node["height"] else []


def cases() -> st.SearchStrategy[tuple[str, list[tuple[str, Numbers]]]]:
    """A format, and some damage to a checkpoint of it: its kind and its numbers."""
    numbers = st.lists(st.integers(0, 1 << 16), min_size=8, max_size=8).map(tuple)
    damage = st.tuples(st.sampled_from([*KINDS, "document", "document", "node"]), numbers)
    return st.tuples(
        st.sampled_from([*FORMATS, *FOREIGN]), st.lists(damage, min_size=1, max_size=3)
    )


def check(base: pathlib.Path, damages: list[tuple[str, Numbers]], folder: pathlib.Path) -> None:
    """Has `reshard` do some jobs on a damaged copy of a genuine checkpoint, in an empty folder.

    Raises AssertionError for anything but success and errors of its own: another exception, a write
    outside of the destination, a changed source, or a job that takes longer than `LIMIT_SECONDS`.
    """

    def damage(path: pathlib.Path) -> None:
        for kind, numbers in damages:
            # Damage may find nothing left to damage.
            with contextlib.suppress(OSError, IndexError):
                KINDS[kind](path, numbers)

    case = fuzz_jobs.Case(base, folder, damage)
    shutil.copytree(base, case.source)
    case.out.mkdir()
    case.damage(case.source)
    (folder / "map.toml").write_text(fuzz_jobs.MAP)
    jobs = case.jobs(random.Random(repr(damages)))
    before = snapshot(folder) | snapshot(base)
    for job in jobs:
        fuzz_jobs.outcome(job.__name__, functools.partial(job, case))
    for left in [path for pattern in fuzz_jobs.LEFT for path in case.out.glob(pattern)]:
        shutil.rmtree(left, ignore_errors=True)
    after = snapshot(folder) | snapshot(base)
    changed = sorted(dict(before.items() ^ after.items()))
    assert not changed, f"{changed} were changed by {[job.__name__ for job in jobs]}"


def snapshot(folder: pathlib.Path) -> dict[str, str]:
    """What everything below a directory is, as far as paths reach; nothing is followed. Of large
    files, which are sparse, only the size is looked at."""
    found, folders = {}, [os.fspath(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    found[entry.path] = f"link to {os.readlink(entry.path)}"
                elif entry.is_dir():
                    found[entry.path] = "directory"
                    folders.append(entry.path)
                elif entry.is_file() and entry.stat().st_size < 1 << 26:
                    data = pathlib.Path(entry.path).read_bytes()
                    found[entry.path] = hashlib.sha256(data).hexdigest()
                else:
                    found[entry.path] = f"something of {entry.stat().st_size} bytes"
    return found
