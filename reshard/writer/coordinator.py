"""A job whose shares other processes write, and this one commits."""

import collections
import concurrent.futures
import functools
import warnings
from collections.abc import Callable

from reshard.engine.tasks import task_count
from reshard.engine.workers import WHY_SILENT, check_tasks, run_tasks
from reshard.errors import ArgumentError, raise_all
from reshard.hints import Hint
from reshard.storage import posix
from reshard.storage.lock import Lock
from reshard.verify.values import Progress, counted
from reshard.writer.directory_commit import shares_directory
from reshard.writer.job_plan import Plan
from reshard.writer.share_commit import LOCK, committed_job, discard
from reshard.writer.share_job import (
    JOB,
    MERGED,
    STOP,
    Job,
    begun,
    check_none,
    read_document,
    shares_begun,
)
from reshard.writer.share_writing import ShareTask, rest_bytes, write_rest


def execute_in_shares(
    plan: Plan,
    *,
    workers: int | None,
    executor: concurrent.futures.Executor | None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Writes what a plan says in shares, a few for each worker; arguments and errors are as of
    `save`. Shares that an earlier run has kept are not written again."""
    raise_all(plan.errors)
    destination = plan.destination
    if destination is None:
        raise ArgumentError("there is no destination to save to")
    if not resume:
        check_none(destination)
    count = shares_begun(destination) or task_count(plan.share_bytes, workers)
    shares = [plan.share(number, count) for number in range(count)]
    check_tasks(shares, executor)
    shares_directory(destination).make_directory()
    lock = Lock(shares_directory(destination) / LOCK, destination)
    try:
        job = begun(plan, count)
        document = read_document(job.outer / JOB) or {}
        try:
            (job.outer / STOP).remove()
            tasks = [ShareTask(job, share) for share in shares]
            whole = rest_bytes(plan) + plan.share_bytes
            report = counted(whole + plan.verify * plan.decoded_bytes, progress)
            if job.document(MERGED) is None:
                run_tasks(
                    tasks,
                    report,
                    workers=workers,
                    executor=executor,
                    stop=functools.partial((job.outer / STOP).write, b"stop"),
                    meanwhile=functools.partial(write_rest, plan, job),
                    idle=_telling(job),
                )
            else:
                report(whole)
            committed_job(document, lock, lambda nbytes: report)
        except BaseException as error:
            if resume:
                (job.outer / STOP).remove()
                error.add_note(
                    Hint(
                        f"`{job.outer}` is kept: ",
                        ("same",),
                        " with ",
                        ("resume", True),
                        " goes on with it",
                    )
                )
            else:
                lock.check()
                discard(job, document, lock)
            raise
    finally:
        lock.release()
        if destination.is_local:
            posix.remove_empty(shares_directory(destination))
    return plan


def _telling(job: Job) -> Callable[[], None]:
    """What warns of shares of which nothing was noted since it was called before; of each once, and
    not of those that an earlier run has left, which nobody may be at by now."""
    times = collections.Counter(dict.fromkeys(job.running(range(job.count)), 2))

    def tell() -> None:
        running = job.running(range(job.count))
        times.update(running)
        for text in running:
            if times[text] == 2:
                warnings.warn(f"{text}, and reported nothing since: {WHY_SILENT}", stacklevel=2)

    return tell
