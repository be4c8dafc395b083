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

# Tasks of each worker, the fewest bytes of a task, and the default number of workers.
_TASKS = 4
_SMALLEST = 32 << 20
_WORKERS = 16
# Pools that may break, one after another, without a result.
_BREAKS = 3
# Seconds to wait for tasks of an executor that have to stop.
STOP_SECONDS = 60.0
# Seconds between two looks at the tasks.
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
        raise ArgumentError(f"workers must be a whole number of 1 or more, not {workers!r}")


def check_tasks(
    tasks: Sequence[object], executor: concurrent.futures.Executor | None = None
) -> None:
    """Raises ArgumentError if a task does not pickle, or an executor's workers lack a module or
    have another release of this package. Raises ReshardError if no worker answers. To be called
    before a job begins."""
    try:
        pickled = [bytes(_Checker(task).pickled) for task in tasks]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            "the tasks of this job cannot be pickled for the workers",
            [str(error)],
            ["define functions at the top level of a module, which workers import"],
        ) from error
    if executor is None:
        return
    try:
        release = executor.submit(_release, pickled).result()
    except (ImportError, AttributeError) as error:
        raise _not_imported(error) from error
    except BaseException as error:
        if _is_lost(error):
            raise ReshardError("the executor has lost its workers", [_describe(error)]) from error
        raise
    if release != (own := _release([])):
        problem = f"the workers have {release}, this process has {own}"
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
            name = getattr(obj, "__qualname__", type(obj).__name__)
            raise pickle.PicklingError(f"`{name}` is not defined in a module")
        return NotImplemented


def _not_imported(error: Exception) -> ArgumentError:
    hint = "install the same packages on the workers, and the modules of your functions"
    text = "the executor's workers cannot import a module that they need"
    return ArgumentError(text, [str(error)], [hint])


def _release(pickled: Sequence[bytes]) -> str:
    """The release of this package, after these tasks were unpickled."""
    for data in pickled:
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
    """Runs tasks, and returns their results in order.

    Args:
      report: called with numbers of bytes that are done; with a negative one if a task is lost.
      workers: the number of processes; one by default.
      executor: runs the tasks instead, and reports only when one is done.
      stop: makes the executor's tasks end, after an error; they are waited for then. Without it,
        running tasks go on.
      meanwhile: work of this process while the tasks run.

    Raises:
      ArgumentError: an executor's worker lacks a module.
      ReshardError: a task has raised it, a task kills its workers, or the executor breaks.
    """
    run = _Run(tasks, report)
    with contextlib.ExitStack() as pool:
        try:
            if executor is None:
                run.in_pool(pool, workers or 1, meanwhile)
            else:
                run.submit(executor)
                run.finish(meanwhile)
        except BaseException as error:
            if executor is not None and stop is not None:
                stop()  # some executors say that they have cancelled what runs on
                concurrent.futures.wait(run.futures, STOP_SECONDS)
            elif executor is not None:
                for future in run.futures:
                    future.cancel()
            if _is_lost(error):
                left = run.left()
                text = f"the executor has lost its workers before {len(left)} of {len(tasks)} tasks"
                raise ReshardError(f"{text} were done", [_describe(error), *left]) from error
            raise
    return [run.results[number] for number in range(len(tasks))]


class _Run:
    """Tasks that run in an executor, or in a process pool of their own.

    Attributes:
      futures: future -> number of its task.
      results: number of a task -> its result.
    """

    def __init__(self, tasks: Sequence[Task], report: Report):
        self.futures: dict[concurrent.futures.Future, int] = {}
        self.results: dict[int, Any] = {}
        self._tasks = tasks
        self._report = report
        self._reported = 0
        self._done: Any = [0] * len(tasks)  # bytes of each task

    def in_pool(
        self,
        ended: contextlib.ExitStack,
        workers: int,
        meanwhile: Callable[[Report], object] | None,
    ) -> None:
        """Runs all tasks in a process pool, which `ended` ends. If a worker is killed, a new pool
        runs the tasks that are not done."""
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        breaks, count = 0, min(workers, len(self._tasks))
        while True:
            before = len(self.results)
            try:
                if count:
                    self._done = context.RawArray("q", len(self._tasks))
                    end, owner = context.Pipe(duplex=False)
                    arguments = count, end, self._done
                    pool = concurrent.futures.ProcessPoolExecutor(
                        count, context, _begin_worker, arguments
                    )
                    ended.enter_context(pool)
                    ended.callback(owner.close)
                    with _spawning():
                        self.submit(pool)
                own, meanwhile = meanwhile, None
                return self.finish(own)
            except concurrent.futures.BrokenExecutor as error:
                breaks = 1 if len(self.results) > before else breaks + 1
                if breaks == _BREAKS:
                    hint = "each worker uses max_memory: reduce workers=... or max_memory=..."
                    text = f"{_BREAKS} workers were killed, one after another"
                    problems = [f"{task} is not done" for task in self.left()]
                    raise ReshardError(text, problems, [hint]) from error
            ended.close()

    def submit(self, executor: concurrent.futures.Executor) -> None:
        """Submits all tasks that are not done."""
        self.futures.clear()
        pickled = {
            number: pickle.dumps(task)
            for number, task in enumerate(self._tasks)
            if number not in self.results
        }
        for number in self.results:
            self._done[number] = self._tasks[number].nbytes
        for number, data in pickled.items():
            self.futures[executor.submit(_answer, number, data)] = number

    def finish(self, meanwhile: Callable[[Report], object] | None) -> None:
        """Waits for all results, and reports progress."""
        self._left = {*self.futures}

        def report_own(nbytes: int) -> None:
            self._report(nbytes)
            with contextlib.suppress(concurrent.futures.BrokenExecutor):  # raised again, later
                self._accept(0)

        if meanwhile is not None:
            meanwhile(report_own)
        while self._left:
            self._accept(_LOOK_SECONDS)

    def _accept(self, seconds: float) -> None:
        """Accepts results that come in so many seconds, and reports progress."""
        first = concurrent.futures.FIRST_COMPLETED
        ended, _ = concurrent.futures.wait(self._left, seconds, first)
        for future in sorted(ended, key=_has_failed):
            kind, value = future.result()
            if kind == "error":
                raise value
            number = self.futures[future]
            self.results[number] = value
            self._done[number] = self._tasks[number].nbytes
            self._left.remove(future)
        done = sum(self._done)
        if done != self._reported:
            self._report(done - self._reported)
            self._reported = done

    def left(self) -> list[str]:
        """The tasks that are not done, in order."""
        return [str(task) for n, task in enumerate(self._tasks) if n not in self.results]


def _has_failed(future: concurrent.futures.Future) -> bool:
    return future.cancelled() or future.exception() is not None


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
        task = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        return "error", _not_imported(error)
    try:
        return "result", task.run(report)
    except ReshardError as error:
        if isinstance(error, OSError):
            raise
        return "error", error
