"""A job in shares that one process has others write: the same result, and nothing left of a job
that fails unless it is to be resumed."""

import concurrent.futures
import importlib
import os
import re
import shutil
import time
import warnings
from types import SimpleNamespace

import pytest
from jobs import Killed, refused, save, stop_at
from layouts import hashes
from sampling import few
from test_shares_written import assert_same, killed_in, outer

import reshard
from reshard.errors import CorruptCheckpointError

# Functions have its name.
share_writing = importlib.import_module("reshard.writer.share_writing")
coordinator = importlib.import_module("reshard.writer.coordinator")
executors = importlib.import_module("reshard.engine.executors")
tasks = importlib.import_module("reshard.engine.tasks")
KINDS = ["ckpt zarr2", "ckpt manager", "ckpt zarr3-files", "convert zarr3"]


@pytest.fixture(autouse=True)
def _many_shares(monkeypatch):
    monkeypatch.setattr(tasks, "_SMALLEST", 1 << 18)


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        yield executor


@pytest.mark.parametrize("kind", few(KINDS, "ckpt zarr2", "ckpt manager"))
def test_an_executor_writes_what_one_process_does(jobs, threads, tmp_path, kind):
    (source, whole), out, told = jobs(kind), tmp_path / "out", []
    options = {"verify": True, "executor": threads, "workers": 3}
    planned = save(source, out, progress=lambda *counts: told.append(counts), **options)
    assert isinstance(planned, reshard.Plan)
    assert_same(out, whole)
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("workers", few([1, 2, 3, 5], 2))
def test_workers_write_what_one_process_does(jobs, tmp_path, workers):
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    save(source, out, workers=workers, overwrite=True)
    assert_same(out, whole)


def test_a_job_that_fails_leaves_nothing_or_is_resumed(jobs, tmp_path, monkeypatch):
    """Its shares are as many as at first, and those that are written are not written again."""
    threads = concurrent.futures.ThreadPoolExecutor(1)
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    writing = share_writing._write
    for resume, notes in (
        (False, []),
        (True, [f"`{outer(out)}` is kept: the same call with resume=True goes on with it"]),
    ):
        begun = []

        def write(*args, begun=begun):
            begun.append(args)
            if len(begun) > 4:  # as do all that are not written by then
                raise CorruptCheckpointError("the fifth one fails")
            return writing(*args)

        with monkeypatch.context() as patch:
            patch.setattr(share_writing, "_write", write)
            options = {"executor": threads, "resume": resume}
            error = refused(
                CorruptCheckpointError, "the fifth one fails", save, source, out, **options
            )
        assert getattr(error, "__notes__", []) == notes
        assert [*tmp_path.iterdir()] == [outer(out)] * resume
    written = {k: v for k, v in hashes(outer(out)).items() if re.fullmatch(r"\d+\.json", k)}
    assert written and not (outer(out) / "stop").exists()
    with pytest.raises(reshard.DestinationError, match=f"shares of a job for `{out}` are in"):
        save(source, out, executor=threads)
    kept, options = {}, {"executor": threads, "resume": True}

    def dies(*_):
        kept.update(hashes(outer(out)))
        raise Killed

    killed_in(monkeypatch, coordinator, "committed_job", dies, save, source, out, **options)
    assert written.items() <= kept.items()
    save(source, out, executor=threads, workers=40, resume=True)
    assert_same(out, whole)


def test_an_interrupt_ends_all_shares(jobs, threads, tmp_path):
    """Those that run are waited for: nothing is written to what is removed."""
    source, whole = jobs("ckpt manager")
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = hashes(out)
    with pytest.raises(KeyboardInterrupt):
        interrupt = stop_at(1 / 3, KeyboardInterrupt)
        save(source, out, executor=threads, overwrite=True, progress=interrupt)
    assert [*tmp_path.iterdir()] == [out]
    assert hashes(out) == before


def test_a_share_that_does_not_go_on_is_told_of_once(jobs, tmp_path, monkeypatch):
    """Of an executor; it is waited for."""
    (source, whole), out = jobs("ckpt zarr2"), tmp_path / "out"
    monkeypatch.setattr(executors, "IDLE_SECONDS", 0.1)
    writing, hung = share_writing._write, []

    def write(work, max_memory, look, report):
        if not hung and any(stage.startswith("ocdbt.process_0_") for stage in work.stages):
            hung.append(time.sleep(1))
        return writing(work, max_memory, look, report)

    monkeypatch.setattr(share_writing, "_write", write)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as thread,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        save(source, out, executor=thread)
    (warning,) = [str(each.message) for each in told if "nothing since" in str(each.message)]
    assert re.fullmatch(
        rf"share 0: process {os.getpid()} on \S+ had written 0% of it at .* UTC, and reported "
        "nothing since: a batch of large chunks may take so long, or it hangs",
        warning,
    )
    assert_same(out, whole)


def test_what_an_earlier_run_has_noted_of_shares_is_no_news():
    notes = ["share 3: it had written 50% of it yesterday"]
    tell = coordinator._telling(SimpleNamespace(count=4, running=lambda numbers: [*notes]))
    with pytest.warns(UserWarning) as told:
        tell()
        notes.append("share 1: it had written 0% of it today")
        for _ in range(3):
            tell()
    assert [str(each.message).partition(",")[0] for each in told] == notes[1:]
