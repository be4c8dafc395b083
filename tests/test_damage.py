"""Truncated checkpoints: detected before anything is written, without reading an array."""

import os
import re
import shutil

import layouts
import pytest
from jax.sharding import PartitionSpec as P

import reshard

CUT = re.compile(r"(\w+): its data file `(.*)` has (\d+) bytes, expected (.*)")


def save(path, names="ab", **form):
    specs = dict.fromkeys(names, P("data", "model"))
    tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (256, 256))
    return layouts.save_pytree(path, tree, **form)


def jobs(path):
    """Jobs that copy chunks verbatim, and one that decodes them."""
    ckpt = reshard.open(path)
    renamed = reshard.rename(ckpt, {"^": "params/"})
    return [
        (reshard.to_mesh(ckpt, "2x4"), {}),
        (reshard.to_mesh(ckpt, "2x4"), {"link": False}),
        (reshard.to_mesh(ckpt, "1x8"), {"chunks": "keep"}),
        (renamed, {}),
        (reshard.to_mesh(ckpt, "1x8"), {}),
    ]


def assert_refused(path, problems):
    """By every job and its plan, which leave no file; `verify` reports the same."""
    beside = sorted(os.listdir(path.parent))
    for ckpt, options in jobs(path):
        out = path.with_name("out")
        told = layouts.refused(reshard.CorruptCheckpointError, reshard.save, ckpt, out, **options)
        named = [line.partition(": ")[2] for line in problems]
        found = list(map(str.strip, told.split("\n")))[len(problems) > 1 :]
        assert [line.partition(": ")[2] for line in found] == named
        assert reshard.plan(ckpt, out, **options).problems == tuple(found)
    assert reshard.verify(path).problems == tuple(problems)
    assert sorted(os.listdir(path.parent)) == beside


@pytest.mark.parametrize("form", [{}, {"use_zarr3": True}])
def test_a_truncated_data_file(tmp_path, form):
    path = save(tmp_path / "saved", "a", **form)
    file = max(path.glob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    least = len(whole)
    for size in (0, len(whole) - (16 << 10)):
        os.truncate(file, size)
        (problem,) = reshard.verify(path).problems
        leaf, name, found, needed = CUT.fullmatch(problem).groups()
        assert (leaf, name, int(found)) == ("a", str(file), size)
        least = int(needed.removeprefix("at least "))
        assert size < least <= len(whole)
        assert_refused(path, [problem])
    file.write_bytes(whole[: least - 1])
    text = f"`{file}` has {least - 1} bytes, expected at least {least}"
    assert_refused(path, [f"a: its data file {text}"])
    file.write_bytes(whole[:least])
    for ckpt, options in jobs(path):
        reshard.save(ckpt, tmp_path / "out", verify=True, **options)
        shutil.rmtree(tmp_path / "out")
    assert reshard.verify(path).ok
    file.unlink()
    assert_refused(path, [f"a: its data file `{file}` is missing"])


RAW = {"use_ocdbt": False, "use_compression": False}


@pytest.mark.parametrize(
    ("form", "key", "size", "needed"),
    [
        ({"use_ocdbt": False}, "1.2", 0, "at least 1"),
        ({"use_ocdbt": False, "use_zarr3": True}, "c/1/2", 0, "at least 1"),
        (RAW, "1.2", 0, "at least 32768"),
        (RAW, "1.2", 32767, "at least 32768"),
        (RAW, "1.2", 32769, "32768"),
    ],
)
def test_a_truncated_chunk_file(tmp_path, form, key, size, needed):
    path = save(tmp_path / "saved", **form)
    file = path / "b" / key
    whole = file.read_bytes()
    os.truncate(file, size)
    text = f"`{file}` has {size} bytes, expected {needed}"
    assert_refused(path, [f"b: its data file {text}"])
    for other in (path / "a").glob("**/*"):
        if other.is_file() and other.name not in (".zarray", "zarr.json"):
            other.write_bytes(b"")
    first = {"1.2": "0.0", "c/1/2": "c/0/0"}[key]
    least = "at least 32768" if form is RAW else needed
    all_of_a = f"`{path}/a/{first}` has 0 bytes, expected {least}"
    assert_refused(path, [f"a: its data file {all_of_a}", f"b: its data file {text}"])
    file.write_bytes(whole)
    picked = reshard.select(reshard.open(path), "b")
    reshard.save(picked, tmp_path / "out", verify=True)
