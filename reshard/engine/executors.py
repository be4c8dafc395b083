"""Tasks in whatever `concurrent.futures.Executor` a caller has: a process pool, Dask's, MPI's."""

import concurrent.futures
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reshard.engine.tasks import Report, Task, pickled
from reshard.errors import ReshardError


def in_executor(
    tasks: Sequence[Task],
    executor: concurrent.futures.Executor,
    report: Report,
    stop: Callable[[], object] | None,
) -> list[Any]:
    """Runs tasks as `reshard.engine.workers.run_tasks` says."""
    results: dict[int, Any] = {}
    futures: dict[concurrent.futures.Future, int] = {}
    try:
        for number, task in enumerate(tasks):
            futures[executor.submit(_answer_pickled, pickled(task))] = number
        for future in concurrent.futures.as_completed(futures):
            kind, value = future.result()
            if kind == "error":
                raise value
            results[futures[future]] = value
            report(tasks[futures[future]].nbytes)
    except BaseException as error:
        if stop is None:
            for future in futures:
                future.cancel()
        else:  # some executors say that they have cancelled what runs on
            stop()
            concurrent.futures.wait(futures)
        if isinstance(error, concurrent.futures.BrokenExecutor):
            raise _broken(tasks, results, error) from error
        raise
    return [results[number] for number in range(len(tasks))]


def _broken(tasks: Sequence[Task], done: Iterable[int], error: Exception) -> ReshardError:
    """The error for an executor that has lost tasks."""
    left = [str(task) for number, task in enumerate(tasks) if number not in {*done}]
    what = f"{type(error).__name__}: {error}"
    return ReshardError(f"the executor has lost {len(left)} of {len(tasks)} tasks", [what, *left])


def _answer_pickled(data: bytes) -> tuple[str, Any]:
    """What a task answers. What the executor may try again is raised: a bucket has not answered,
    for one."""
    try:
        return "result", pickle.loads(data).run(lambda nbytes: None)
    except ReshardError as error:
        if isinstance(error, OSError):
            raise
        return "error", error
