"""Tasks in worker processes: killed, hanging, failing; and in executors."""

import collections
import concurrent.futures
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import time

import layouts
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from jobs import refused
from sampling import few
from worker_tasks import Tiny

import reshard
import reshard.cli
from reshard.engine.run import check_tasks, run_tasks, task_count


def ignored(nbytes):
    """A report that nobody reads."""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def no_worker_is_left():
    children = psutil.Process().children(recursive=True)
    return not [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_results_come_in_order_and_a_task_whose_worker_is_killed_is_done_again(log, capfd):
    tasks = [Tiny(0, log), Tiny(1, log, "killed once"), Tiny(2, log, "slow"), Tiny(3, log)]
    told = []
    results = run_tasks(tasks, told.append, workers=2)
    assert [number for number, _, _ in results] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid, _ in results}
    assert {found for _, _, found in results} == {max(len(os.sched_getaffinity(0)) // 2, 1)}
    attempts = collections.Counter(log.read_text().split())
    assert attempts["1"] == 2 and attempts.keys() == {"0", "1", "2", "3"}
    assert sum(told) == 400
    assert min(told) < 0  # what the worker that was killed had done
    assert no_worker_is_left()
    assert set(capfd.readouterr().err.splitlines()) == {"no answer"}


def test_a_task_that_kills_its_workers_ends_the_job(log):
    text = (
        "3 workers were killed, one after another\n"
        "  task 0 is not done\n  task 1 is not done\n  task 2 is not done\n\n"
        "hint: each worker uses max_memory: reduce workers=... or max_memory=..."
    )
    tasks = [Tiny(0, log, "killed"), Tiny(1, log), Tiny(2, log)]
    refused(reshard.ReshardError, text, run_tasks, tasks, ignored, workers=1)
    assert log.read_text().split() == ["0", "0", "0"]
    assert no_worker_is_left()


@pytest.mark.parametrize("does", ["corrupt", "full", "bug"])
def test_an_error_of_one_is_raised_whole_and_ends_the_others(log, does):
    with pytest.raises((reshard.ReshardError, OSError, AssertionError)) as caught:
        run_tasks([Tiny(0, log, "hangs"), Tiny(1, log, does)], ignored, workers=2)
    error = caught.value
    if does == "corrupt":
        assert type(error) is reshard.CorruptCheckpointError
        assert str(error) == "two are wrong\n  a: one\n  b: two\n\nhint: type this"
        assert error.__notes__ == ["a note"]
    elif does == "full":
        assert (error.errno, error.filename) == (28, "out")
    else:
        assert str(error) == "a bug"
    assert no_worker_is_left()


def test_a_script_need_not_be_written_for_workers(tmp_path):
    (tmp_path / "script.py").write_text(
        "import pathlib, worker_tasks\n"
        "from reshard.engine.run import run_tasks\n"
        "print('once')\n"
        "tasks = [worker_tasks.Tiny(n, pathlib.Path('log')) for n in range(2)]\n"
        "run_tasks(tasks, lambda nbytes: None, workers=2)\n"
    )
    ran = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Two processes write at once, so the ends of their lines may change places.
    assert (ran.stdout, ran.stderr.replace("\n", "")) == ("once\n", "no answer" * 2)


def test_workers_are_given_tasks_while_this_process_does_something_else(log):
    def meanwhile(report):
        until = time.monotonic() + 60
        while not log.exists() or len(log.read_text().split()) < 3:
            assert time.monotonic() < until
            report(1)
            time.sleep(0.01)

    told = []
    tasks = [Tiny(number, log) for number in range(3)]
    results = run_tasks(tasks, told.append, workers=1, meanwhile=meanwhile)
    assert [number for number, _, _ in results] == [0, 1, 2]
    assert sum(told) == 300 + told.count(1)


def test_a_pool_that_breaks_before_this_process_does_its_own_part(log, monkeypatch):
    pool, calls, done = concurrent.futures.ProcessPoolExecutor, [], []
    submit = pool.submit

    def breaks_once(self, *arguments, **options):
        calls.append(self)
        if len(calls) == 2:
            raise concurrent.futures.process.BrokenProcessPool("a worker has ended")
        return submit(self, *arguments, **options)

    monkeypatch.setattr(pool, "submit", breaks_once)
    tasks = [Tiny(number, log) for number in range(3)]
    results = run_tasks(tasks, ignored, workers=1, meanwhile=lambda report: done.append(report(1)))
    assert [number for number, _, _ in results] == [0, 1, 2]
    assert len(done) == 1


def test_an_error_ends_what_this_process_does_meanwhile(log):
    def meanwhile(report):
        for _ in range(6000):
            report(1)
            time.sleep(0.01)
        raise AssertionError("nobody ends this")

    with pytest.raises(reshard.CorruptCheckpointError, match=r"^two are wrong"):
        run_tasks([Tiny(0, log, "corrupt")], ignored, workers=1, meanwhile=meanwhile)
    assert no_worker_is_left()


def test_each_worker_has_as_many_tasks():
    assert [task_count(nbytes, 3) for nbytes in (0, 2, 40 << 20, 1 << 40)] == [1, 2, 3, 12]
    assert [task_count(nbytes, 2) for nbytes in (170 << 20, 1 << 40)] == [4, 8]
    assert [task_count(nbytes, None) for nbytes in (170 << 20, 1 << 40)] == [5, 64]


def test_what_workers_cannot_import_is_told_before_anything_runs(log):
    tasks = [Tiny(0, log), Tiny(1, lambda: log)]
    lines = layouts.refused(reshard.ArgumentError, check_tasks, tasks).splitlines()
    assert lines[0] == "the tasks of this job cannot be pickled for the workers"
    assert "<lambda>" in lines[1]
    assert lines[3] == "hint: define functions at the top level of a module, which workers import"
    assert not log.exists()


def test_workers_cannot_import_the_program_that_was_started(log):
    def own():
        pass

    own.__module__ = "__main__"
    with pytest.raises(reshard.ArgumentError, match=r"own` is not defined in a module"):
        check_tasks([Tiny(0, own)])


# What is read in parts. Threads are given the same pickled parts as processes.


@pytest.fixture(scope="module")
def threads():
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints of one tree in other chunks, of which some elements differ; uneven shapes."""
    rng = np.random.default_rng(7)
    folder = tmp_path_factory.mktemp("two")
    shapes = {"b": ((37, 11), "bfloat16"), "f": ((40, 53), "float32"), "i": ((997,), "int32")}
    trees = [{n: layouts.random_array(rng, shape, dtype) for n, (shape, dtype) in shapes.items()}]
    trees[0]["scalar"] = np.float32(3.5)
    trees.append({name: np.array(leaf) for name, leaf in trees[0].items()})
    trees[1]["f"][[0, 27, 39], [52, 3, 1]] = [np.nan, 0.25, np.inf]
    trees[1]["i"][500:] += 3
    trees[1]["moved"] = trees[1].pop("b")
    for name, tree, chunks in zip("ab", trees, (1000, 700), strict=True):
        layouts.save_pytree(folder / name, tree)
        ckpt = reshard.open(folder / name)
        reshard.save(ckpt, folder / f"{name}-chunked", chunks=chunks, digest=True)
    return folder / "a-chunked", folder / "b-chunked"


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_reading_in_parts_finds_the_same(two, threads, count):
    (a, b), told = two, []
    parts = {"workers": count, "executor": threads}
    assert reshard.digest(a, **parts) == reshard.digest(a)
    found = reshard.verify(b, a, progress=lambda *counts: told.append(counts), **parts)
    assert found == reshard.verify(b, a)
    whole = sum(reshard.open(path).nbytes for path in two)
    assert told[-1] == (whole, whole) and told == sorted(told)
    for tolerance in ({}, {"rtol": 0.1, "atol": 1e-3}):
        whole = reshard.diff(a, b, values=True, **tolerance)
        found = reshard.diff(a, b, values=True, **tolerance, **parts)
        assert found.document() == whole.document()
        assert {each.what for each in whole.differences} == {"values", "moved"}


@pytest.mark.parametrize("limit", ["1GiB", "40KiB"])
def test_derived_arrays_are_read_in_parts(two, threads, limit):
    ckpt = reshard.open(two[0])
    ckpt = reshard.unstack(reshard.select(ckpt, ["f", "i"]), "f", into="rows/{}", axis=0)
    ckpt = reshard.cast(ckpt, "bfloat16", "rows/*")
    parts = {"workers": 5, "executor": threads, "max_memory": limit}
    assert reshard.digest(ckpt, **parts) == reshard.digest(ckpt)


def test_what_cannot_be_read_is_told_as_in_one_process(two, threads, tmp_path):
    path = pathlib.Path(shutil.copytree(two[0], tmp_path / "bad"))
    plain = tmp_path / "plain"
    reshard.save(reshard.open(path), plain, ocdbt=False, chunks=1000)
    sorted((plain / "f").glob("[0-9]*"))[-2].write_bytes(b"garbage")
    (plain / "b" / "0.0").write_bytes(b"none")
    whole = reshard.verify(plain)
    assert len(whole.problems) == 2
    assert reshard.verify(plain, workers=4, executor=threads) == whole
    diff = functools.partial(reshard.diff, plain, path, values=True)
    with pytest.raises(reshard.CorruptCheckpointError) as expected:
        diff()
    refused(reshard.CorruptCheckpointError, str(expected.value), diff, workers=4, executor=threads)


@pytest.mark.parametrize("workers", [0, -1, "2", 1.5, True])
def test_no_number_of_workers(two, workers):
    with pytest.raises(reshard.ArgumentError, match=f"number of 1 or more, not {workers!r}$"):
        reshard.verify(two[0], workers=workers)


COMMANDS = {
    "digest": lambda a, b: ("digest", a),
    "verify": lambda a, b: ("verify", b, "--against", a),
    "diff": lambda a, b: ("diff", a, b, "--values"),
}


@pytest.mark.parametrize("command", few(COMMANDS, "diff"))
def test_commands_answer_the_same_of_workers(two, command, capfd):
    arguments = [*map(str, COMMANDS[command](*two)), "--json"]
    answers = []
    for more in ([], ["--workers", "2"]):
        result = CliRunner().invoke(reshard.cli.command, arguments + more)
        answers.append((result.exit_code, result.output, capfd.readouterr().err))
        assert not isinstance(result.exception, Exception), result.exc_info
    assert answers[0] == answers[1]
    assert answers[0][1]


def test_the_command_that_writes_ends_its_workers(two, tmp_path):
    words = ["ckpt", two[0], tmp_path / "out", "--chunks", "3000", "--workers", "2", "--quiet"]
    found = CliRunner().invoke(reshard.cli.command, [*map(str, words)])
    assert (found.exit_code, found.output) == (0, "")
    assert reshard.digest(tmp_path / "out") == reshard.digest(two[0])
    found = CliRunner().invoke(reshard.cli.command, [*map(str, words)])
    assert isinstance(found.exception, reshard.DestinationExistsError)
    assert no_worker_is_left()
