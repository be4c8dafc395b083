"""Locations: text, paths and URLs, listings of a disk, and other systems than Linux."""

import ctypes
import itertools
import os
import pathlib
import pickle
import re
import shutil
import types

import layouts
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from flax.serialization import msgpack_serialize
from in_process import command, inside
from jobs import refused
from safetensors.numpy import save_file

import reshard
from reshard.storage import disk, machine, ocdbt
from reshard.storage.bucket import BucketLocation
from reshard.storage.location import Location, parse_location

GS = "gs://bucket"


@pytest.mark.parametrize("top", ["", GS])
def test_parts_of_a_location(top):
    place = parse_location(f"{top}/runs/a/") / "100" / "state/"
    assert str(place) == os.fspath(place) == f"{top}/runs/a/100/state"
    assert (place.name, str(place.parent)) == ("state", f"{top}/runs/a/100")
    assert str(place.parent.parent.parent) == f"{top}/runs"
    assert place / "" == place
    root = parse_location(top) if top else Location("/")
    assert str(root / "a") == f"{top}/a" and (root / "a").parent == root == root.parent
    assert place.below(parse_location(f"{top}/runs")) == "a/100/state"
    assert place.below(place) == ""
    assert place.below(parse_location(f"{top}/runs/a/10")) is None
    assert place.below(root) == "runs/a/100/state"
    assert place.below(BucketLocation("s3://bucket")) is None
    gs = {"driver": "gcs", "bucket": "bucket", "path": "runs/a/100/state/"}
    assert place.spec == (gs if top else {"driver": "file", "path": "/runs/a/100/state/"})
    assert place.is_local == (top == "")
    assert pickle.loads(pickle.dumps(place)) == place and len({place, place / ""}) == 1
    for form in (f"{place}/", epath.Path(str(place))):
        assert parse_location(form) == place


def test_the_environment_of_s3(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = parse_location("s3://bucket/run")
    expected = {"driver": "s3", "bucket": "bucket", "path": "run/"}
    assert place.spec == expected
    file = tmp_path / ".aws" / "credentials"
    file.parent.mkdir()
    file.write_text("[default]\n")
    profile = {"type": "profile", "profile": "default"}
    profile |= {"credentials_file": str(file), "config_file": str(file)}
    for name, value, more in (
        ("HOME", str(tmp_path), {"aws_credentials": profile}),
        ("AWS_DEFAULT_REGION", "eu-west-1", {"aws_region": "eu-west-1"}),
        ("AWS_REGION", "auto", {"aws_region": "auto"}),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1/", {"endpoint": "http://127.0.0.1:1"}),
        ("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2", {"endpoint": "http://127.0.0.1:2"}),
        ("AWS_PROFILE", "mine", {"aws_credentials": profile | {"profile": "mine"}}),
        ("AWS_ACCESS_KEY_ID", "a", {}),
        ("AWS_SECRET_ACCESS_KEY", "b", {"aws_credentials": {"type": "environment"}}),
    ):
        monkeypatch.setenv(name, value)
        expected |= more
        assert place.spec == expected, name
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert place.spec == expected | {"aws_region": "us-east-1"}


def test_text_and_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = Location(str(tmp_path / "run"))
    for form in ("run", "./run/", pathlib.Path("run"), f"file://{tmp_path}/run", expected):
        assert parse_location(form) == expected
    assert parse_location("file://localhost/runs/1000") == Location("/runs/1000")


REFUSED = {
    **dict.fromkeys(
        ["gs://", "s3://bucket//run", "gs://bucket/../run", "gs:///run"],
        "`{0}` is not a valid name in a bucket\n\nhint: {1}://bucket/run/1000",
    ),
    # As TensorStore has it: it would become a path below the current directory.
    **dict.fromkeys(
        ["file://run/1000", "file://run", "file://./run", "file://"],
        "`{0}`: the part after `file://` must be an absolute path\n\n"
        "hint: file:///runs/1000, or a path alone",
    ),
    **dict.fromkeys(
        ["s3:/bucket/run", "gs:/bucket", *map(pathlib.Path, ["gs://bucket/a", "s3://bucket/a"])],
        "`{0}` is not a valid URL\n\nhint: {1}://{2}, as text\nhint: ./{0}, if it is a path",
    ),
    "S3://bucket/Run": "`S3://bucket/Run` is not a valid URL\n\n"
    "hint: s3://bucket/Run, as text\nhint: ./S3://bucket/Run, if it is a path",
    "file:/runs/1": "`file:/runs/1` is not a valid URL\n\n"
    "hint: file:///runs/1, as text\nhint: ./file:/runs/1, if it is a path",
}


@pytest.mark.parametrize("form", REFUSED, ids=repr)
def test_invalid_locations(form):
    scheme, _, rest = str(form).partition(":")
    text = REFUSED[form].format(form, scheme, rest.removeprefix("/"))
    for use in (reshard.open, parse_location):
        refused(reshard.CheckpointFormatError, text, use, form)
    for hint in re.findall("(?m)^hint: ([^,\n]*)", text):
        parse_location(hint)


def test_a_path_that_looks_like_a_url(saved, tmp_path):
    with inside(tmp_path):
        (tmp_path / "s3:").mkdir()
        out = ["./s3:/out", tmp_path / "s3:/out"]
        assert command(["ckpt", str(saved("standalone").path), out[0], "--to", "1x8"])[0] == 0
        assert [str(reshard.open(path).source.root) for path in out] == [str(out[1])] * 2
        done = command(["ckpt", str(saved("standalone").path), "gs:/bucket/run", "--to", "1x8"])
        assert done[0] == 2 and "hint: gs://bucket/run, as text\n" in done[2]
        assert not (tmp_path / "gs:").exists()


def test_walk(tmp_path):
    for name in ("b/c/d", "a", "b/e", "f"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    (tmp_path / "b" / "link").symlink_to(tmp_path / "b")
    os.link(tmp_path / "a", tmp_path / "same")
    place = Location(str(tmp_path))
    found = {entry.path: entry for entry in place.walk()}
    assert list(found) == ["a", "b", "b/c", "b/c/d", "b/e", "b/link", "f", "same"]
    files = [path for path, entry in found.items() if entry.is_file]
    assert files == ["a", "b/c/d", "b/e", "f", "same"]
    assert [path for path, entry in found.items() if entry.is_dir] == ["b", "b/c"]
    assert found["b/c/d"].nbytes == len("b/c/d")
    assert found["a"].modified == found["same"].modified > 0
    with pytest.raises(reshard.CheckpointFormatError, match=r"`.*/b/link` is neither a file nor"):
        list(place.checked_walk())
    assert list((place / "none").walk()) == []
    with pytest.raises(FileNotFoundError):
        list((place / "none").checked_walk())


def test_without_system_calls_of_linux(saved, tmp_path, monkeypatch):
    """As on macOS: without these calls in the C library and in `os`, and without `/proc`."""
    without = types.SimpleNamespace()  # `syncfs`, `sync_file_range`, `mallopt`
    with inside(tmp_path):
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: without)
        monkeypatch.setattr(disk, "_LIBC", without)
        monkeypatch.setattr(machine, "kernel_text", lambda name: "")
        for name in ("copy_file_range", "posix_fadvise", "posix_fallocate", "sched_getaffinity"):
            monkeypatch.delattr(os, name)
        monkeypatch.delattr(os, "O_PATH")
        source = saved("standalone")
        assert command(["ckpt", str(source.path), "out", "--to", "1x8"])[0] == 0
        assert command(["verify", "out", "--against", str(source.path)])[0] == 0
        got = reshard.restore("out", layouts.abstract(source.tree, layouts.mesh((1, 8))))
    assert reshard.diff(source.path, tmp_path / "out", values=True).equal
    layouts.assert_same_tree(got, layouts.plain_scalars(source.tree))


def libc_of(kind):
    """A library of C that knows a file system by its number."""

    def statfs(path, found):
        found[0] = kind
        return 0

    return types.SimpleNamespace(statfs=statfs, syncfs=None)


def how_files_are_read(path):
    """The mode of the stores of a checkpoint, after all of it has been read."""
    ckpt = reshard.open(path)
    assert reshard.verify(path).problems == ()
    return ckpt.source.store.context["file_io_mode"].to_json().get("mode", "default")


def test_local_files_are_mapped_and_those_of_a_network_are_read(saved, monkeypatch):
    path = saved("standalone").path
    assert how_files_are_read(path) == "memmap"  # in temporary directories of any test machine
    monkeypatch.setattr(disk, "_LIBC", libc_of(0xEF53))
    assert how_files_are_read(path) == "memmap"
    for kind in (0x6969, 0x65735546, 0):  # NFS, FUSE, and what nobody knows
        monkeypatch.setattr(disk, "_LIBC", libc_of(kind))
        assert how_files_are_read(path) == "default"
    # What is written is never mapped.
    assert ocdbt.new_context()["file_io_mode"].to_json() == {}


def odd(path, more=b"\xff"):
    """The path with one more byte, which then is not UTF-8."""
    return pathlib.Path(os.fsdecode(os.fsencode(path) + more))


def not_opened(path):
    text = f"`{path}` holds a backslash, or a byte that is not UTF-8\n".replace("\udcff", "\\udcff")
    return f"{text}  TensorStore opens no such path\n\nhint: give it another name"


@pytest.fixture
def state(tmp_path):
    return layouts.save_pytree(tmp_path / "state", {"w": np.arange(12.0).reshape(3, 4)})


@pytest.mark.parametrize("kind", ["item", "of a step", "step", "safetensors", "msgpack"])
@pytest.mark.parametrize("byte", [b"\xff", b"\\"])
def test_a_source_whose_path_tensorstore_does_not_open(state, tmp_path, kind, byte):
    path = told = odd(tmp_path / "moved", byte)
    if kind == "item":
        shutil.copytree(state, path)
    elif kind == "of a step":
        path = tmp_path / "step"
        told = odd(path / "state", byte)
        shutil.copytree(state, told)
        (path / "_CHECKPOINT_METADATA").write_text("{}")
    elif kind == "step":
        path = tmp_path / "run"
        told = pathlib.Path(f"{odd(path / 'a', byte)}_3")
        shutil.copytree(state, told)
    elif kind == "safetensors":
        path = told = pathlib.Path(f"{path}.safetensors")
        save_file({"w": np.arange(3)}, path)
    else:
        path.write_bytes(msgpack_serialize({"w": np.arange(3)}))
    text = layouts.refused(reshard.CheckpointFormatError, reshard.open, path)
    assert text == not_opened(told)
    assert command(["inspect", str(path)])[::2] == (2, f"Error: {text}\n")


@pytest.mark.parametrize("byte", [b"\xff", b"\\"])
def test_a_destination_that_tensorstore_does_not_open(state, tmp_path, byte):
    ckpt, out = reshard.open(state), odd(tmp_path / "out", byte)
    for write, more in itertools.product((reshard.save, reshard.export), ({}, {"share": (0, 1)})):
        text = layouts.refused(reshard.CheckpointFormatError, write, ckpt, out, **more)
        assert text == not_opened(out)
    assert [*tmp_path.iterdir()] == [state]


def test_names_that_are_not_utf8_in_a_checkpoint(state, stores, tmp_path):
    """Files that are copied may have any name, and files of tensors; arrays and objects not."""
    step, root = tmp_path / "run" / "3", tmp_path / "run"
    shutil.copytree(state, step)
    odd(root / "log").write_text("text")
    odd(root / "logs").mkdir()
    odd(odd(root / "logs") / "inner").write_text("inner")
    ckpt = reshard.open(root)
    reshard.save(ckpt, tmp_path / "out")
    assert odd(odd(tmp_path / "out" / "logs") / "inner").read_text() == "inner"
    assert odd(tmp_path / "out" / "log").read_text() == "text"
    text = layouts.refused(
        reshard.DestinationError, reshard.save, ckpt, f"{stores.bucket('s3')}/out"
    )
    assert text == (
        "names in a bucket must be UTF-8\n  logs\\udcff\n  logs\\udcff/inner\\udcff\n  log\\udcff"
    )
    values = {"a": np.random.default_rng(0).standard_normal((5, 7))}
    save_file(values, tmp_path / "x")
    (tmp_path / "hf").mkdir()
    (tmp_path / "x").rename(f"{odd(tmp_path / 'hf' / 'x')}.safetensors")
    reshard.save(reshard.open(tmp_path / "hf"), tmp_path / "tensors")
    assert np.array_equal(reshard.open(tmp_path / "tensors")["a"].read(), values["a"])
    for name in ("x/a", odd("x/b"), "y/c"):
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/tree/new"}}
        spec |= {"metadata": {"shape": [4], "dtype": "<f4"}, "create": True}
        ts.open(spec).result().write(np.arange(4, dtype="f4")).result()
        (tmp_path / "tree" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tree" / "new").rename(tmp_path / "tree" / name)
    text = layouts.refused(reshard.CorruptCheckpointError, reshard.open, tmp_path / "tree")
    told = f"`{tmp_path}/tree` cannot be read as a tree of zarr arrays"
    assert text == f"{told}\n  x/b\\udcff: its name is not UTF-8"


@pytest.mark.parametrize("kind", ["other disk", "same disk"])
@pytest.mark.parametrize("name", ["out", "o u"])
def test_a_destination_that_is_a_mount_point(state, tmp_path, monkeypatch, kind, name):
    ckpt, out = reshard.open(state), tmp_path / name
    reshard.save(ckpt, out)
    point = f"{tmp_path.resolve()}/{name}".replace(" ", "\\040")
    lines = f"1 0 1:1 / / rw - ext4 a rw\n64 44 254:0 /s {point} rw,x - ext4 b rw\n"
    if kind == "other disk":
        monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(out))
        lines = ""
    monkeypatch.setattr(disk, "kernel_text", {"self/mountinfo": lines}.__getitem__)
    before = layouts.hashes(tmp_path)
    for write in (reshard.save, reshard.export):
        for overwrite in (True, False):
            text = layouts.refused(reshard.DestinationError, write, ckpt, out, overwrite=overwrite)
            what = "is a mount point, which no new checkpoint can replace"
            assert text == f"`{out}` {what}\n\nhint: write to a directory in it: {out}/new"
    assert layouts.hashes(tmp_path) == before
    reshard.save(ckpt, out / "new")
