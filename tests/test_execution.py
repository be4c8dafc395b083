"""A plan is all that is executed: by this process or another, and nothing is prepared again."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from unittest import mock

import layouts
import numpy as np
import pytest

import reshard
from reshard.verify.digest_record import FILE
from reshard.writer import planning

EXECUTE = """
import pathlib, pickle, sys
import reshard
from reshard.writer.save import execute
for folder in map(pathlib.Path, sys.argv[1:]):
    print(execute(pickle.loads((folder / "plan").read_bytes())))
    reshard.save(pickle.loads((folder / "ckpt").read_bytes()), folder / "again", digest=True)
assert not {"jax", "flax"} & set(sys.modules)
"""

PEAK = """
import sys
import reshard
what, source, out, memory = sys.argv[1:]
if what == "save":
    reshard.save(reshard.cast(reshard.open(source), "bfloat16"), out, max_memory=memory)
elif what == "digest":
    reshard.digest(source, max_memory=memory)
else:
    import jax
    result = reshard.restore(source, jax.make_mesh((1,), ("x",)), max_memory=memory)
with open("/proc/self/status") as file:
    (kib,) = (line.split()[1] for line in file if line.startswith("VmHWM"))
print(int(kib) << 10)
"""


def changed(path):
    """Arrays that are shared, copied, cast, renamed, on another mesh, and derived."""
    ckpt = reshard.select(reshard.open(path), drop="opt/**")
    ckpt = reshard.to_mesh(ckpt, "1x8")
    ckpt = reshard.cast(ckpt, "float64", where="params/embed")
    ckpt = reshard.unstack(ckpt, "params/uneven", "params/row_{}", axis=0)
    return reshard.rename(ckpt, [("^params/embed$", "params/table")])


def test_a_plan_and_a_checkpoint_are_the_same_job_in_a_fresh_process(saved, tmp_path):
    folders, shown = [tmp_path / layout for layout in ("standalone", "manager", "zarr3-files")], ""
    for folder in folders:
        folder.mkdir()
        ckpt = changed(saved(folder.name).path)
        plan = reshard.plan(ckpt, folder / "there", digest=True, verify=True)
        for handle in ckpt.arrays:
            handle.view()  # opens what is not to travel
        for name, travels in (("plan", plan), ("ckpt", ckpt)):
            data = pickle.dumps(travels)
            assert b"tensorstore" not in data
            assert repr(pickle.loads(data)) == repr(travels)
            (folder / name).write_bytes(data)
        reshard.save(ckpt, folder / "here", digest=True)
        shown += f"{plan}\n"
    command = [sys.executable, "-c", EXECUTE, *map(str, folders)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == shown
    for folder in folders:
        here = layouts.hashes(folder / "here")
        documents = [name for name in here if name.endswith(("_METADATA", "_sharding", FILE))]
        for name in ("there", "again"):
            assert reshard.diff(folder / "here", folder / name, values=True).equal
            found = layouts.hashes(folder / name)
            if folder.name == "zarr3-files":  # whose files have no random names
                assert here.keys() == found.keys()
            assert documents and [here[key] for key in documents] == [found[k] for k in documents]


@pytest.mark.parametrize("links", [True, False])
def test_nothing_is_prepared_twice(saved, tmp_path, monkeypatch, links):
    calls = []

    def counted(module, name):
        function = getattr(module, name)

        def call(*arguments, **kwargs):
            calls.append(name)
            return function(*arguments, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("plan_array", "siblings", "source_record", "files_to_link", "read_again"):
        counted(planning, name)
    if not links:
        refused = mock.Mock(side_effect=PermissionError(errno.EPERM, "no links"))
        monkeypatch.setattr(os, "link", refused)
    source = saved("manager").path
    ckpt = reshard.rename(reshard.open(source), [("^params/embed$", "params/e")])
    planned = reshard.plan(ckpt, tmp_path / "out")
    assert planned.shared_bytes > 0
    calls.clear()
    assert reshard.save(ckpt, tmp_path / "out") == planned
    each = ["plan_array"] * len(ckpt.arrays)
    assert calls == [*each, "files_to_link", "source_record", "read_again", "siblings"]
    shared = layouts.data_inodes(tmp_path / "out").keys() & layouts.data_inodes(source).keys()
    assert bool(shared) == links
    assert reshard.verify(tmp_path / "out", against=ckpt).ok


def test_all_problems_of_a_plan_are_told_together(saved, tmp_path):
    source = shutil.copytree(saved("zarr2-files").path, tmp_path / "source")
    (source / FILE).write_text("[]")
    (tmp_path / "out").write_text("a file")
    ckpt = reshard.to_mesh(reshard.open(source), "1x8")
    plan = reshard.plan(ckpt, tmp_path / "out", verify=True, max_memory="17KiB")
    assert [type(error) for error in plan.errors] == [
        reshard.DestinationExistsError,
        reshard.CorruptCheckpointError,
        reshard.MemoryLimitError,
    ]
    assert plan.problems[:2] == (
        f"`{tmp_path}/out` is a file or a symbolic link, not a directory",
        f"`{source}/{FILE}` is not a record of digests",
    )
    with pytest.raises(reshard.DestinationExistsError) as error:
        reshard.save(ckpt, tmp_path / "out", verify=True, max_memory="17KiB")
    assert error.value.summary == "3 problems"
    assert [line.strip() for line in error.value.problems] == [*map(str.strip, plan.problems)]
    assert tuple(dict.fromkeys(error.value.hints)) == plan.hints


@pytest.mark.exhaustive
def test_the_memory_of_a_process_is_bounded(tmp_path):
    """Beyond a job of next to nothing, it takes what it is given, as much again at most for what
    the allocator keeps of it, and the result. All at once would be four times as much."""
    rng = np.random.default_rng(0)
    sources = {
        "small": {"w": np.ones(4, "f4")},
        "large": {f"w{i}": rng.random((512, 512), "f4") for i in range(64)},
    }
    peaks = {}
    for name, tree in sources.items():
        layouts.save_pytree(tmp_path / name, tree)
        for what in ("save", "digest", "restore"):
            words = [what, str(tmp_path / name), str(tmp_path / f"{name}-out"), "16MiB"]
            shown = subprocess.run(
                [sys.executable, "-c", PEAK, *words], check=True, capture_output=True
            )
            peaks[what, name] = int(shown.stdout)
    for what, result in (("save", 0), ("digest", 0), ("restore", 64 << 20)):
        assert peaks[what, "large"] - peaks[what, "small"] <= result + 2 * (16 << 20)
