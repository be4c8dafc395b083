"""Tasks in worker processes: killed, hanging, failing; and in executors."""

import os
import re
import signal
import threading
import time
import warnings

import psutil
import pytest
from worker_tasks import Tiny

import reshard
from reshard.engine import workers
from reshard.engine.workers import run_tasks


class Counted:
    """Numbers of bytes that were reported."""

    def __init__(self):
        self.told = []

    def __call__(self, nbytes):
        self.told.append(nbytes)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def no_worker_is_left():
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return not [command for command in commands if "workers.main" in command]


def test_results_come_in_order_and_a_task_whose_worker_is_killed_is_done_again(log, capfd):
    tasks = [Tiny(0, log), Tiny(1, log, "killed once"), Tiny(2, log, "slow"), Tiny(3, log)]
    report = Counted()
    results = run_tasks(tasks, report, workers=2)
    assert [number for number, _, _ in results] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid, _ in results}
    assert {found for _, _, found in results} == {max(len(os.sched_getaffinity(0)) // 2, 1)}
    assert sorted(log.read_text().split()) == ["0", "1", "1", "2", "3"]
    assert sum(report.told) == 400
    assert -60 in report.told  # what the worker that was killed had done
    assert no_worker_is_left()
    assert capfd.readouterr().err == "no answer\n" * 4


def test_a_task_that_kills_its_workers_ends_the_job(log):
    with pytest.raises(reshard.ReshardError) as caught:
        run_tasks([Tiny(0, log, "killed"), Tiny(1, log, "hangs")], Counted(), workers=2)
    assert str(caught.value).splitlines() == [
        "task 0 cannot be done",
        "  3 workers were killed in the middle of it, the last one by SIGKILL",
        "",
        "hint: workers=... and max_memory=... multiply: less of both takes less",
    ]
    assert sorted(log.read_text().split()) == ["0", "0", "0", "1"]
    assert no_worker_is_left()


@pytest.mark.parametrize("does", ["corrupt", "full", "bug"])
def test_an_error_of_one_is_raised_whole_and_ends_the_others(log, capfd, does):
    with pytest.raises((reshard.ReshardError, OSError)) as caught:
        run_tasks([Tiny(0, log, "hangs"), Tiny(1, log, does)], Counted(), workers=2)
    error = caught.value
    if does == "corrupt":
        assert type(error) is reshard.CorruptCheckpointError
        assert str(error) == "two are wrong\n  a: one\n  b: two\n\nhint: type this"
        assert error.__notes__ == ["a note"]
    elif does == "full":
        assert (error.errno, error.filename) == (28, "out")
    else:
        assert str(error).splitlines() == [
            "task 1 cannot be done",
            "  its worker ended with status 1; what it says is above",
        ]
        assert capfd.readouterr().err.endswith("AssertionError: a bug\n")
    assert no_worker_is_left()


def test_an_interrupt_ends_all_workers(log):
    def interrupt():
        while not log.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_tasks([Tiny(0, log, "hangs")], Counted(), workers=1)
    assert no_worker_is_left()


def test_a_worker_that_does_not_go_on_is_told_of_once(log, monkeypatch):
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_tasks([Tiny(0, log, "slow")], Counted(), workers=1)
    assert re.fullmatch(
        r"task 0: its worker, process \d+, has not gone on for 0 seconds", str(told[0].message)
    )
    assert len(told) <= 2  # while it starts, and while it sleeps


def test_what_workers_cannot_import_is_told_before_anything_runs(log):
    tasks = [Tiny(0, log), Tiny(1, lambda: log)]
    with pytest.raises(reshard.ArgumentError) as caught:
        run_tasks(tasks, Counted(), workers=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "workers cannot be given what they are to do"
    assert "<lambda>" in lines[1]
    assert lines[3] == "hint: define functions at the top level of a module, which workers import"
    assert not log.exists()
