"""Tasks in worker processes on this machine, or wherever a caller's executor runs them.

    tasks  ->  [ worker | worker | ... ]  ->  results, in the order of the tasks
                one task at a time each

A worker that is killed costs its task again. A process pool of the standard library would fail all
tasks then; so workers are started and looked after here, each with a pipe to it and one from it.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from reshard.engine.executors import check_imports, in_executor
from reshard.engine.tasks import Pickler, Report, Task, empty_store, imported_by, told_of
from reshard.errors import ReshardError
from reshard.hints import Hint
from reshard.loader.detection import has_large_arrays
from reshard.storage.array_store import ArrayStore
from reshard.storage.machine import share_cores, tune_memory

# Workers that may be killed by one task.
_DEATHS = 3
# A worker that tells nothing more has ended, or does so by itself after so long.
_END_SECONDS = 5.0
# A worker that has told nothing for so long is told of, and tells how far it is this often.
SILENT_SECONDS = 60.0
_TELL_SECONDS = 0.1
# Why one may be silent: what it does is reported batch by batch.
WHY_SILENT = "a batch of large chunks may take so long, or it hangs"
# Processes that were started before there are tasks for them, and for how many workers.
_started: contextvars.ContextVar[tuple[list[subprocess.Popen[bytes]], int]] = (
    contextvars.ContextVar("started", default=([], 0))
)


def check_tasks(
    tasks: Sequence[object], executor: concurrent.futures.Executor | None = None
) -> None:
    """Raises ArgumentError where tasks, or parts of them, do not pickle, or an executor's workers
    cannot import what they need: before anything is begun."""
    imported = imported_by(tasks)
    if executor is not None:
        check_imports(executor, imported)


def run_tasks(
    tasks: Sequence[Task],
    report: Report,
    *,
    workers: int | None = None,
    executor: concurrent.futures.Executor | None = None,
    stop: Callable[[], object] | None = None,
    meanwhile: Callable[[Report], object] | None = None,
    idle: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Runs tasks that were checked, and returns their results in order.

    Args:
      report: called with numbers of bytes that are done; a negative one for a task that is lost.
      workers: processes to run them in; one, if nothing is said.
      executor: runs them instead; what a task reports on the way is not told then.
      stop: tells the tasks of an executor to end, which are waited for then; without it, those
        that run are left alone.
      meanwhile: what this process does while they run, and reports of.
      idle: called where an executor has done no task for a minute.

    Raises:
      ReshardError: what a task has raised; or a task kills its workers, or the executor breaks.
    """
    if executor is not None:
        return in_executor(tasks, executor, report, stop, meanwhile, idle)
    return _in_workers(tasks, min(workers or 1, len(tasks)), report, meanwhile)


@contextlib.contextmanager
def started(count: int, kind: type) -> Iterator[None]:
    """Starts so many workers, for the first tasks that are run in the block: by then they have
    their imports behind them, also those of a kind of task. Those that get none are ended."""
    processes = [_process(count, f"import {kind.__module__}; ") for _ in range(count)]
    token = _started.set((processes, count))
    try:
        yield
    finally:
        _started.reset(token)
        for process in processes:
            process.kill()
            process.communicate()


def _process(among: int, imports: str = "") -> subprocess.Popen[bytes]:
    """A process that answers tasks, one of several on its machine."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from reshard.engine import workers; "
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}{imports}workers.main({among})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # an interrupt from the keyboard is for this process, which ends it
    )


def _in_workers(
    tasks: Sequence[Task],
    count: int,
    report: Report,
    meanwhile: Callable[[Report], object] | None,
) -> list[Any]:
    waiting = collections.deque(range(len(tasks)))
    results: dict[int, Any] = {}
    deaths: collections.Counter[int] = collections.Counter()
    events: queue.SimpleQueue[tuple[_Worker, str, Any]] = queue.SimpleQueue()
    running: dict[_Worker, int] = {}

    def give(worker: _Worker) -> None:
        running[worker] = waiting.popleft()
        worker.give(tasks[running[worker]])

    def told(worker: _Worker, kind: str, value: Any) -> None:
        number = running[worker]
        if kind == "bytes":
            report(worker.add(value))
            return
        del running[worker]
        if kind == "result":
            results[number] = value
            report(tasks[number].nbytes - worker.done)
        elif kind == "error":
            raise value
        else:
            deaths[number] += 1
            if value >= 0 or deaths[number] == _DEATHS:
                raise _killed(tasks[number], value, deaths[number])
            report(-worker.done)
            waiting.appendleft(number)
            worker = ended.enter_context(_Worker(count, events))
        if waiting:
            give(worker)

    def own(nbytes: int) -> None:
        report(nbytes)
        while not events.empty():
            told(*events.get())

    with contextlib.ExitStack() as ended:
        for _ in range(count):
            give(ended.enter_context(_Worker(count, events)))
        if meanwhile is not None:
            meanwhile(own)
        while running:
            for silent in [worker for worker in running if worker.is_silent()]:
                warnings.warn(f"{tasks[running[silent]]}: {silent}", stacklevel=2)
            with contextlib.suppress(queue.Empty):
                told(*events.get(timeout=SILENT_SECONDS / 4))
    return [results[number] for number in range(len(tasks))]


class _Worker:
    """A process that is given one task after another. As a context, it is killed at the end, and
    has ended then."""

    def __init__(self, among: int, events: "queue.SimpleQueue[tuple[_Worker, str, Any]]"):
        early, count = _started.get()
        self._process = early.pop() if early and count == among else _process(among)
        self._events = events
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def give(self, task: Task) -> None:
        """Begins a task."""
        self.done = 0
        self._heard = time.monotonic()
        self._is_told = False
        self._tasks.put(task)

    def add(self, nbytes: int) -> int:
        """Counts bytes of its task as done, and returns them."""
        self.done += nbytes
        self._heard = time.monotonic()
        self._is_told = False
        return nbytes

    def is_silent(self) -> bool:
        """Whether it has told nothing for long; once, until it tells something."""
        if self._is_told or time.monotonic() - self._heard < SILENT_SECONDS:
            return False
        self._is_told = True
        return True

    def __str__(self) -> str:
        told = f"has reported nothing for {time.monotonic() - self._heard:.0f} seconds"
        return f"its worker, process {self._process.pid}, {told}: {WHY_SILENT}"

    def _serve(self) -> None:
        """Gives tasks to the process, and puts what it answers among the events."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            # What it imports, and what it finds in its environment, are as they are here by now.
            pickle.dump((sys.path, dict(os.environ)), self._process.stdin)
            while (task := self._tasks.get()) is not None:
                _Pickler(self._process.stdin).dump(task)
                self._process.stdin.flush()
                kind = "bytes"
                while kind == "bytes":
                    kind, value = pickle.load(self._process.stdout)
                    self._events.put((self, kind, value))
        except (EOFError, OSError, pickle.UnpicklingError):  # it ends, in whatever it wrote
            self._events.put((self, "end", self._ended()))
        except Exception as error:  # what an answer is made of cannot be imported, for one
            self._events.put((self, "error", error))

    def _ended(self) -> int:
        """Its status: what it has written so far says that it has ended, or will."""
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-self._process.pid, signal.SIGKILL)  # and what it has started

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._kill()
        self._tasks.put(None)
        self._thread.join()
        self._process.communicate()


def _killed(task: Task, status: int, deaths: int) -> ReshardError:
    """The error for a task whose workers end without an answer."""
    if status >= 0:
        problem = f"its worker ended with status {status}; what it says is above"
        return ReshardError(f"{task} cannot be done", [problem])
    name = signal.Signals(-status).name
    problem = f"{deaths} workers were killed in the middle of it, the last one by {name}"
    hints = [Hint(("workers",), " and ", ("max_memory",), " multiply: less of both takes less")]
    return ReshardError(f"{task} cannot be done", [problem], hints if name == "SIGKILL" else [])


class _Pickler(Pickler):
    """A pickler of tasks for a worker, which opens a store once, and not for each task again."""

    def persistent_id(self, obj: Any) -> Any:
        return told_of(obj) if type(obj) is ArrayStore else None


class _Unpickler(pickle.Unpickler):
    """Its other end, with the stores that the worker has got."""

    def __init__(self, file: BinaryIO, stores: dict[Any, ArrayStore]):
        super().__init__(file)
        self._stores = stores

    def persistent_load(self, pid: Any) -> ArrayStore:
        if pid not in self._stores:
            self._stores[pid] = empty_store(*pid)
        return self._stores[pid]


def main(among: int) -> None:
    """A worker, one of several on its machine: answers tasks until there are no more."""
    share_cores(among)
    try:
        sys.path[:], environment = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    os.environ.clear()
    os.environ.update(environment)
    stores: dict[Any, ArrayStore] = {}
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what a function of the user's prints is no answer
        task = _next_task(stores)
        large = any(has_large_arrays(store.directory) for store in stores.values())
        tune_memory(large_arrays=large)
        while task is not None:
            pickle.dump(_answer(task, out), out)
            out.flush()
            task = _next_task(stores)


def _next_task(stores: dict[Any, ArrayStore]) -> Task | None:
    """The next task, with its part of the stores; None where there are no more."""
    for store in stores.values():
        store.values.clear()  # of the last task
    try:
        return _Unpickler(sys.stdin.buffer, stores).load()
    except EOFError:
        return None


def _answer(task: Task, out: BinaryIO) -> tuple[str, Any]:
    """What is to be told of a task at its end."""
    untold, last = 0, time.monotonic()

    def report(nbytes: int) -> None:
        nonlocal untold, last
        untold += nbytes
        if time.monotonic() - last >= _TELL_SECONDS:
            pickle.dump(("bytes", untold), out)
            out.flush()  # an error, where nobody hears it any more
            untold, last = 0, time.monotonic()

    try:
        return "result", task.run(report)
    except BrokenPipeError:
        raise
    except (ReshardError, OSError, MemoryError) as error:
        return "error", error
