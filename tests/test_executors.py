"""Jobs in executors: what they answer, and a real Dask cluster on loopback, whose workers are
killed."""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import socket
import subprocess
import sys

import layouts
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from jobs import refused
from test_shares_written import stored
from worker_tasks import Tiny

import reshard
import reshard.cli
from reshard.engine import run
from reshard.engine.run import check_tasks, run_tasks

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(11)
    tree = {f"w{i}": layouts.random_array(rng, (40 + i, 53), "float32") for i in range(6)}
    folder = tmp_path_factory.mktemp("source")
    layouts.save_pytree(folder / "saved", tree)
    reshard.save(reshard.open(folder / "saved"), folder / "chunked", chunks=2000, digest=True)
    return folder / "chunked"


@contextlib.contextmanager
def started(what, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.{what}", *arguments],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        for each in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()
        process.wait()


@pytest.fixture(scope="module")
def dask():
    """The address of a scheduler with two workers, each a process that is started again if it is
    killed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    here = ["--host", "127.0.0.1", "--no-dashboard"]
    more = ["--nthreads", "1", "--memory-limit", "2GiB", *here]
    with contextlib.ExitStack() as stack:
        scheduler = started("dask_scheduler", "--port", str(port), "--no-show", *here)
        stack.enter_context(scheduler)
        address = f"tcp://127.0.0.1:{port}"
        for _ in range(2):
            stack.enter_context(started("dask_worker", address, *more))
        with client_of(address) as client:
            client.wait_for_workers(2, timeout=60)
        yield address


def client_of(address):
    from distributed import Client

    return Client(address, timeout="30s", set_as_default=False)


@pytest.fixture(scope="module")
def threads_of_dask():
    from distributed import LocalCluster

    options = {"processes": False, "protocol": "tcp://", "host": "127.0.0.1"}
    with LocalCluster(
        n_workers=1, threads_per_worker=2, dashboard_address=None, memory_limit=0, **options
    ) as found:
        yield found.scheduler_address


def invoke(*arguments):
    return CliRunner().invoke(reshard.cli.command, [*map(str, arguments)])


class Elsewhere(concurrent.futures.Executor):
    """An executor whose workers have another release, or lack a module, or tell of a bucket."""

    def __init__(self, release=None, error=None):
        self.release, self.error = release, error

    def submit(self, function, *arguments):
        future = concurrent.futures.Future()
        if function is run._release and self.release is not None:
            future.set_result(self.release)
        elif self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(function(*arguments))
        return future


@pytest.mark.parametrize(
    ("executor", "text"),
    [
        (
            Elsewhere(release="0.0"),
            "the executor's workers have another version of reshard\n"
            f"  the workers have 0.0, this process has {run._release([])}",
        ),
        (
            Elsewhere(error=concurrent.futures.BrokenExecutor("all are gone")),
            "the executor has lost its workers\n  BrokenExecutor: all are gone",
        ),
    ],
)
def test_what_an_executor_cannot_do_is_told_before_anything_runs(tmp_path, executor, text):
    task = Tiny(0, tmp_path / "log")
    error = refused(reshard.ReshardError, text, check_tasks, [task], executor)
    assert isinstance(error, reshard.ArgumentError) == ("lost" not in text)
    assert not (tmp_path / "log").exists()


def test_tasks_that_run_are_told_to_stop_and_waited_for(tmp_path):
    """Those that are done before are not in the error; the marker ends those that run."""
    log = tmp_path / "log"
    tasks, told = [Tiny(0, log, "corrupt"), Tiny(1, log, "slow"), Tiny(2, log)], []

    def stop():
        told.append(sorted(log.read_text().split()))

    with (
        concurrent.futures.ThreadPoolExecutor(2) as pool,
        pytest.raises(reshard.CorruptCheckpointError, match=r"^two are wrong"),
    ):
        run_tasks(tasks, print, executor=pool, stop=stop)
    assert len(told) == 1
    assert sorted(log.read_text().split()) == ["0", "1", "2"]


def test_what_an_executor_cannot_import_is_told_before_anything_is_written(source, tmp_path):
    written = []

    class Watching(Elsewhere):
        def submit(self, function, *arguments):
            written.append(os.listdir(tmp_path))
            return super().submit(function, *arguments)

    text = (
        "the executor's workers cannot import a module that they need\n  No module named 'mine'\n\n"
        "hint: install the same packages on the workers, and the modules of your functions"
    )
    executor = Watching(error=ModuleNotFoundError("No module named 'mine'"))
    options = {"chunks": 3000, "executor": executor}
    save = functools.partial(reshard.save, reshard.open(source), tmp_path / "out", **options)
    refused(reshard.ArgumentError, text, save)
    assert written == [[]]
    assert os.listdir(tmp_path) == []


def test_tasks_are_unpickled_on_a_worker_before_anything_runs(tmp_path, monkeypatch):
    class Lacking(Elsewhere):
        def submit(self, function, *arguments):
            with monkeypatch.context() as there:
                there.delattr("worker_tasks.Tiny")
                try:
                    return super().submit(function, *arguments)
                except AttributeError as error:
                    self.error = error
                    return super().submit(None)

    text = "the executor's workers cannot import a module that they need\n  "
    with pytest.raises(reshard.ArgumentError, match=f"^{text}.*'Tiny'") as caught:
        check_tasks([Tiny(0, tmp_path / "log")], Lacking())
    assert caught.value.hints


def test_what_is_done_is_not_lost_with_an_executor(tmp_path):
    class Breaking(Elsewhere):
        def submit(self, function, number, data):
            broken = concurrent.futures.BrokenExecutor("all are gone")
            self.error = None if number else broken
            return super().submit(function, number, data)

    tasks = [Tiny(number, tmp_path / "log") for number in range(32)]
    text = "the executor has lost its workers before 1 of 32 tasks were done\n"
    text += "  BrokenExecutor: all are gone\n  task 0"
    refused(reshard.ReshardError, text, run_tasks, tasks, print, executor=Breaking())


@pytest.mark.parametrize(
    "where", ["threads_of_dask", pytest.param("dask", marks=pytest.mark.exhaustive)]
)
def test_a_dask_cluster_verifies_and_saves(where, request, source, tmp_path):
    dask = request.getfixturevalue(where)
    whole = invoke("verify", source, "--json")
    found = invoke("verify", source, "--json", "--dask", dask, "--max-memory", "64MiB")
    assert (found.exit_code, found.output) == (whole.exit_code, whole.output)
    arguments = ("ckpt", source, tmp_path / "out", "--dtype", "bfloat16", "--quiet")
    saved = invoke(*arguments, "--dask", dask, "--max-memory", "64MiB")
    assert (saved.exit_code, saved.output) == (0, "")
    reshard.save(reshard.cast(reshard.open(source), "bfloat16"), tmp_path / "one")
    assert stored(tmp_path / "out") == stored(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["one", "out"]


@pytest.mark.exhaustive
def test_a_task_that_kills_dask_workers_is_told_of(dask, tmp_path):
    log = tmp_path / "log"
    with client_of(dask) as client:
        tasks, executor = [Tiny(0, log, "killed")], client.get_executor(retries=2, pure=False)
        arguments = reshard.ReshardError, run_tasks, tasks, print
        lines = layouts.refused(*arguments, executor=executor).splitlines()
        assert lines[0] == "the executor has lost its workers before 1 of 1 tasks were done"
        assert lines[1].startswith("  KilledWorker: ")
        assert lines[-1] == "  task 0"
        client.wait_for_workers(2, timeout=60)


def test_no_scheduler_is_there(source):
    found = invoke("digest", source, "--dask", "nowhere://a:1")
    assert "no Dask scheduler answers at `nowhere://a:1`" in str(found.exception)
    found = invoke("digest", source, "--dask", "tcp://127.0.0.1:1", "--workers", "2")
    assert found.exit_code == 2
    assert "--dask cannot be combined with --workers" in found.output


ADDRESSES = ["localhost", "tcp://localhost", "localhost:port", "tcp://", ""]


@pytest.mark.parametrize(
    ("command", "address"),
    zip(["ckpt", "convert", "diff", "digest", "verify"], ADDRESSES, strict=True),
)
def test_an_address_without_a_port_is_refused_before_anything_is_looked_at(command, address):
    places = ["nowhere"] if command in ("digest", "verify") else ["nowhere", "out"]
    more = ["--to", "nnx"] if command == "convert" else []
    found = invoke(command, *places, *more, "--dask", address)
    assert found.exit_code == 2
    assert found.output.endswith(
        f"Error: Invalid value for '--dask': `{address}` is not tcp://HOST:PORT, "
        "such as tcp://localhost:8786\n"
    )


def test_nothing_of_dask_is_imported_without_it(source):
    code = (
        "import sys; from reshard.cli import command\n"
        f"command.main(['digest', {str(source)!r}, '--quiet'], standalone_mode=False)\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('dask', 'distributed')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
