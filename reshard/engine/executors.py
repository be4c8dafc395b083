"""Tasks in whatever `concurrent.futures.Executor` a caller has: a process pool, Dask's, MPI's."""

import concurrent.futures
import importlib.metadata
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reshard.engine.tasks import Report, Task, pickled
from reshard.errors import ArgumentError, ReshardError

# How long tasks are waited for that were told to stop.
STOP_SECONDS = 60.0
# How long none is done until it is asked whether those that run go on.
IDLE_SECONDS = 60.0


def in_executor(
    tasks: Sequence[Task],
    executor: concurrent.futures.Executor,
    report: Report,
    stop: Callable[[], object] | None,
    meanwhile: Callable[[Report], object] | None,
    idle: Callable[[], object],
) -> list[Any]:
    """Runs tasks as `reshard.engine.workers.run_tasks` says."""
    futures: dict[concurrent.futures.Future, Task] = {}
    try:
        for task in tasks:
            futures[executor.submit(_answer, pickled(task))] = task
        if meanwhile is not None:
            meanwhile(report)
        left = {*futures}
        while left:
            done, left = concurrent.futures.wait(
                left, IDLE_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                idle()
            for future in done:
                kind, value = future.result()
                if kind == "error":
                    raise value
                report(futures[future].nbytes)
    except BaseException as error:
        if stop is None:
            for future in futures:
                future.cancel()
        else:  # some executors say that they have cancelled what runs on
            stop()
            concurrent.futures.wait(futures, STOP_SECONDS)
        if _is_lost(error):
            raise _broken(tasks, futures, error) from error
        raise
    return [future.result()[1] for future in futures]


def check_imports(executor: concurrent.futures.Executor, imported: Sequence[bytes]) -> None:
    """Raises ArgumentError unless a worker imports what tasks need, from this very release, and
    ReshardError where no worker answers."""
    try:
        there = executor.submit(_release, imported).result()
    except (ImportError, AttributeError) as error:
        hint = "install there what is installed here, with the modules of your functions"
        raise ArgumentError(
            "the executor's workers cannot import what they are to run", [str(error)], [hint]
        ) from error
    except BaseException as error:
        if _is_lost(error):
            raise ReshardError("the executor has lost its workers", [_told(error)]) from error
        raise
    here = _release(())
    if there != here:
        problem = f"there it is {there}, here it is {here}"
        raise ArgumentError("the executor's workers have another release of reshard", [problem])


def _release(imported: Sequence[bytes]) -> str:
    """The release of this package, where all of that can be imported."""
    for data in imported:
        pickle.loads(data)
    return importlib.metadata.version("reshard")


def _is_lost(error: BaseException) -> bool:
    """Whether an executor has lost a task, rather than that the task has failed. What Dask raises
    has nothing in common but where it is defined."""
    own = (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError)
    return isinstance(error, own) or type(error).__module__.startswith("distributed.")


def _broken(
    tasks: Sequence[Task], futures: Iterable[concurrent.futures.Future], error: BaseException
) -> ReshardError:
    """The error for an executor that has lost tasks; which it has not done, by now, of those that
    it was given, in their order, and of others."""
    done = [*map(_has_result, futures)]
    left = [str(task) for task, is_done in itertools.zip_longest(tasks, done) if not is_done]
    count = f"{len(left)} of {len(tasks)} tasks are not done"
    return ReshardError(f"the executor has lost its workers, and {count}", [_told(error), *left])


def _has_result(future: concurrent.futures.Future) -> bool:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return False
    return future.result()[0] == "result"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _answer(data: bytes) -> tuple[str, Any]:
    """What a task answers. What the executor may try again is raised: a bucket has not answered,
    for one."""
    try:
        return "result", pickle.loads(data).run(lambda nbytes: None)
    except ReshardError as error:
        if isinstance(error, OSError):
            raise
        return "error", error
