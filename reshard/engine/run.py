"""Tasks in worker processes of this machine, or wherever a caller's executor runs them.

    tasks  ->  [ worker | worker | ... ]  ->  results, in the order of the tasks
                one task at a time each

A process pool whose worker is killed fails all its tasks. A new pool runs those that are not done.
"""

import concurrent.futures
import contextlib
import importlib.metadata
import os
import pickle
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from reshard.arrays.handle import StoredArray
from reshard.errors import ArgumentError, ReshardError
from reshard.storage.array_store import ArrayStore
from reshard.storage.machine import share_cores, tune_memory

if TYPE_CHECKING:  # what only jobs of workers import
    from multiprocessing.connection import Connection

# Tasks of each worker, bytes of one at least, and workers of an executor, unless that is said.
_TASKS = 4
_SMALLEST = 32 << 20
_WORKERS = 16
# Pools that may break, one after another, without a result.
_BREAKS = 3
# Seconds to wait for tasks of an executor that were told to stop.
STOP_SECONDS = 60.0
# How often workers are looked at.
_LOOK_SECONDS = 0.1

Report = Callable[[int], None]


class Task(Protocol):
    """A part of a job. It pickles, and so does its result; `str()` names it. It reports at most
    `nbytes` bytes."""

    @property
    def nbytes(self) -> int: ...

    def run(self, report: Report) -> Any: ...


def task_count(nbytes: int, workers: int | None) -> int:
    """The number of tasks for a job of this size: several for each worker, since a lost task is
    repeated; not too small; and the same number for each worker, so that they end together."""
    check_workers(workers)
    each = nbytes // _SMALLEST // (workers or 1)
    most = _TASKS if workers else _TASKS * _WORKERS
    return max(min(most, each) * (workers or 1), min(nbytes, workers or 1), 1)


def check_workers(workers: int | None) -> None:
    """Raises ArgumentError for a wrong number of workers."""
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ArgumentError(f"`{workers}` is not a number of workers")


def check_tasks(
    tasks: Sequence[object], executor: concurrent.futures.Executor | None = None
) -> None:
    """Raises ArgumentError if a task does not pickle, or an executor's workers lack a module or
    have another release of this package. Raises ReshardError if no worker answers. To be called
    before a job begins."""
    try:
        imported = [bytes(_Checker(task).pickled) for task in tasks]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            "the tasks cannot be sent to the workers",
            [str(error)],
            ["define functions at the top level of a module, which workers import"],
        ) from error
    if executor is None:
        return
    try:
        there = executor.submit(_release, imported).result()
    except (ImportError, AttributeError) as error:
        hint = "install the same packages there, and the modules of your functions"
        raise ArgumentError(
            "the executor's workers cannot import a module that they need", [str(error)], [hint]
        ) from error
    except BaseException as error:
        if _is_lost(error):
            raise ReshardError("the executor has lost its workers", [_describe(error)]) from error
        raise
    here = _release(())
    if there != here:
        problem = f"the workers have {there}, this process has {here}"
        raise ArgumentError("the executor's workers have another version of reshard", [problem])


class _Checker(pickle.Pickler):
    """Pickles a task without its stored values."""

    def __init__(self, task: object):
        self.pickled = bytearray()
        super().__init__(self)
        self.dump(task)

    def write(self, data: bytes) -> None:
        self.pickled += data

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (StoredArray, ArrayStore):
            return object, ()
        if getattr(obj, "__module__", None) == "__main__":
            raise pickle.PicklingError(f"`{obj.__qualname__}` is not defined in a module")
        return NotImplemented


def _release(imported: Sequence[bytes]) -> str:
    """The release of this package, once everything has been imported."""
    for data in imported:
        pickle.loads(data)
    return importlib.metadata.version("reshard")


def run_tasks(
    tasks: Sequence[Task],
    report: Report,
    *,
    workers: int | None = None,
    executor: concurrent.futures.Executor | None = None,
    stop: Callable[[], object] | None = None,
    meanwhile: Callable[[Report], object] | None = None,
) -> list[Any]:
    """Runs tasks that were checked, and returns their results in order.

    Args:
      report: called with numbers of bytes that are done; with a negative one if a task is lost.
      workers: the number of processes; one by default.
      executor: runs the tasks instead, and reports only when one is done.
      stop: makes the executor's tasks end, after an error; they are waited for then. Without it,
        running tasks go on.
      meanwhile: work of this process while the tasks run.

    Raises:
      ReshardError: a task has raised it, a task kills its workers, or the executor breaks.
    """
    run = _Run(tasks, report, workers or 1, executor)
    with run.ended:
        try:
            run.begin()
            if meanwhile is not None:
                meanwhile(run.report_own)
            while run.futures:
                run.accept(_LOOK_SECONDS)
        except BaseException as error:
            if executor is not None and stop is not None:
                stop()  # some executors say that they have cancelled what runs on
                concurrent.futures.wait(run.futures, STOP_SECONDS)
            elif executor is not None:
                for future in run.futures:
                    future.cancel()
            if _is_lost(error):
                left = run.left()
                text = f"the executor has lost its workers, and {len(left)} of {len(tasks)} tasks"
                raise ReshardError(f"{text} are not done", [_describe(error), *left]) from error
            raise
    return [run.results[number] for number in range(len(tasks))]


class _Run:
    """Tasks that run in an executor, or in a process pool of their own.

    Attributes:
      futures: future -> number of its task, for tasks that are not known to be done.
      results: number of a task -> its result.
      ended: ends the pool and all its workers at once.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        report: Report,
        workers: int,
        executor: concurrent.futures.Executor | None,
    ):
        self.futures: dict[concurrent.futures.Future, int] = {}
        self.results: dict[int, Any] = {}
        self.ended = contextlib.ExitStack()
        self._tasks = tasks
        self._report = report
        self._workers = min(workers, len(tasks))
        self._executor = executor
        self._reported = 0
        self._breaks = 0
        self._done: Any = [0] * len(tasks)  # bytes of each task

    def begin(self) -> None:
        """Submits all tasks that are not done."""
        self._events: queue.SimpleQueue[concurrent.futures.Future] = queue.SimpleQueue()
        self.futures.clear()
        with contextlib.ExitStack() as submitted:
            executor = self._executor
            if executor is None and self._workers:
                executor = self._new_pool()
                submitted.enter_context(_spawning())
            for number, task in enumerate(self._tasks):
                if number in self.results:
                    self._done[number] = task.nbytes
                    continue
                assert executor is not None
                future = executor.submit(_answer, number, pickle.dumps(task))
                self.futures[future] = number
                future.add_done_callback(self._events.put)

    def _new_pool(self) -> concurrent.futures.Executor:
        import multiprocessing

        self.ended.close()
        context = multiprocessing.get_context("spawn")
        self._done = context.RawArray("q", len(self._tasks))
        end, owner = context.Pipe(duplex=False)
        arguments = self._workers, end, self._done
        pool = concurrent.futures.ProcessPoolExecutor(
            self._workers, context, _begin_worker, arguments
        )
        self.ended.enter_context(pool)
        self.ended.callback(owner.close)
        return pool

    def report_own(self, nbytes: int) -> None:
        """Reports bytes that this process has done."""
        self._report(nbytes)
        while not self._events.empty():
            self.accept(0)

    def accept(self, seconds: float) -> None:
        """Accepts the result of a task, if one ends in so many seconds, and reports progress."""
        with contextlib.suppress(queue.Empty):
            future = self._events.get(timeout=seconds)
            try:
                kind, value = future.result()
            except concurrent.futures.BrokenExecutor as error:
                self._breaks += 1
                if self._executor is None and self._breaks < _BREAKS:
                    self.begin()
                    return
                if self._executor is None:
                    hint = "each worker uses max_memory: reduce workers=... or max_memory=..."
                    text = f"{_BREAKS} workers were killed, one after another"
                    problems = [f"{task} is not done" for task in self.left()]
                    raise ReshardError(text, problems, [hint]) from error
                raise
            if kind == "error":
                raise value
            number = self.futures.pop(future)
            self.results[number] = value
            self._done[number] = self._tasks[number].nbytes
            self._breaks = 0
        done = sum(self._done)
        if done != self._reported:
            self._report(done - self._reported)
            self._reported = done

    def left(self) -> list[str]:
        """The tasks that are not done, in order."""
        done = set(self.results)
        for future, number in self.futures.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                done |= {number} if future.result()[0] == "result" else set()
        return [str(task) for number, task in enumerate(self._tasks) if number not in done]


def _is_lost(error: BaseException) -> bool:
    """Whether an executor has lost a task. Dask's own errors have only their module in common."""
    own = (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError)
    return isinstance(error, own) or type(error).__module__.startswith("distributed.")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    """Processes that are spawned meanwhile do not run this script, and ignore the keyboard."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.modules["__main__"] = main


# In a worker.

# Bytes of each task that are done.
_done: Any = None


def _begin_worker(among: int, end: "Connection", done: Any) -> None:
    """Initializes a worker, one of several on its machine."""
    global _done
    _done = done
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=[end], daemon=True).start()
    os.dup2(2, 1)  # what a function of the user's prints is no answer
    sys.stdout = sys.stderr
    share_cores(among)
    tune_memory()


def _end_with(end: "Connection") -> None:
    """Ends this process and its children once nobody holds the other end of the pipe."""
    with contextlib.suppress(EOFError, OSError):
        end.recv_bytes()
    os.kill(0, signal.SIGKILL)  # all of its process group


def _answer(number: int, data: bytes) -> tuple[str, Any]:
    """Runs a task. Raises errors of buckets: an executor may try again. Returns other errors."""

    def report(nbytes: int) -> None:
        if _done is not None:
            _done[number] += nbytes

    try:
        return "result", pickle.loads(data).run(report)
    except ReshardError as error:
        if isinstance(error, OSError):
            raise
        return "error", error
