"""`save`: a plan, executed: written beside the destination, checked, and committed."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.digests import Digest
from reshard.arrays.handle import ArrayHandle, stored_name
from reshard.checkpoint import Checkpoint
from reshard.engine.budget import cores
from reshard.engine.plan import co_read
from reshard.errors import ArgumentError, CorruptCheckpointError, ReshardError, raise_all
from reshard.hints import Hint
from reshard.loader.detection import SHARDING_FILE, TREE_FILE
from reshard.storage import bucket, posix
from reshard.storage.location import Location
from reshard.storage.lock import Lock
from reshard.storage.ocdbt import MANIFEST
from reshard.tree import Path
from reshard.verify.digest_record import FILE, record_of
from reshard.verify.values import Progress, counted
from reshard.writer import bucket_commit, database, directory_commit
from reshard.writer.coordinator import execute_in_shares
from reshard.writer.item_arrays import ItemWork, link_files, write_arrays
from reshard.writer.job_plan import ItemPlan, Plan
from reshard.writer.journal import ItemProgress, Journal, fingerprint, is_unfinished, resumed_note
from reshard.writer.orbax_documents import write_documents
from reshard.writer.prepare import copy_errors, plan
from reshard.writer.recording import check_copied, check_whole, read_back, records, to_read_back
from reshard.writer.share_job import check_none
from reshard.writer.share_parts import BoxRange, ValueRange
from reshard.writer.share_writing import write_share
from reshard.writer.siblings import (
    changed_paths,
    check_there,
    clear,
    copy_siblings,
    is_marker,
    marker_places,
    source_state,
    write_markers,
)
from reshard.writer.stream import Report


class ItemJob(NamedTuple):
    """One item, as it is written: where, in which databases its batches are staged, what has been
    committed, and what is read back at the end."""

    plan: ItemPlan
    directory: Location
    stages: Sequence[str]
    progress: ItemProgress
    read_back: Sequence[ArrayHandle]

    @property
    def bytes_read(self) -> int:
        """Decoded bytes of all that is read beside what is rewritten."""
        again = (*self.plan.read_sources, *self.plan.read_verbatim, *self.read_back)
        return sum(handle.nbytes for handle in again)


def save(
    ckpt: Checkpoint | Sequence[Checkpoint],
    destination: str | os.PathLike,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    format: str | None = None,
    ocdbt: bool | None = None,
    codec: str | None = None,
    file_size: int | str | None = None,
    link: bool = True,
    overwrite: bool = False,
    digest: bool = False,
    verify: bool = False,
    resume: bool = False,
    share: tuple[int, int] | None = None,
    workers: int | None = None,
    executor: concurrent.futures.Executor | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Writes a checkpoint, in the layout that its source has; whole or not at all.

    A step stays a step with its other items, a manager's root stays a root with that step, v1
    stays v1; format, codec and its level stay the source's unless they are given. Nothing but
    `max_memory` bytes is in flight at any time. Chunks that do not change are not decoded; data
    files that stay in use are shared with the source by hard links, which is safe: Orbax and
    TensorStore never write to a data file again.

    Digests of the values are recorded beside the arrays (see `reshard.arrays.digests`), and where
    the source has some, what is read is compared with them.

    Args:
      ckpt: the checkpoint, or several steps of one manager's root.
      destination: a local path; nothing may be there unless `overwrite`.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"` for one chunk a shard of the new mesh (split where memory asks for it),
        `"keep"` for the source's chunks, or the most decoded bytes of a chunk.
      link: share data files where that is possible; otherwise stored chunks are copied.
      overwrite: replace what is there, once the new checkpoint is complete.
      digest: also read arrays that are moved undecoded, if they have no digest on record.
      verify: read back all that was written, before the commit.
      resume: if the job is stopped, what is written stays in its temporary directory; and the job
        goes on with what an earlier run of it has left there, after which it reads back the arrays
        that this one had begun to write. Without it that is removed.
      share: (i, n) writes share i of n, numbered from 0, and nothing more; in any order, by
        processes on any hosts that see source and destination. `reshard.commit` makes a checkpoint
        of them once all are there. A share that was stopped is written again by the same call.
      workers: processes of this machine that write the job's shares, each in `max_memory`; their
        processors are those of this one, divided.
      executor: what runs the shares instead: any `concurrent.futures.Executor`, of `workers`.
      progress: called with (bytes done, bytes in all) after each batch.

    Returns:
      The plan that was executed.

    Raises:
      ArgumentError: `max_memory` or `chunks` is no number of bytes, the checkpoints are not steps
        of one root, or there is no such share.
      DestinationError: the destination exists, is being written, or cannot be written.
      MemoryLimitError: a stored chunk does not fit in `max_memory`.
      CorruptCheckpointError: stored data is missing, does not decode, belongs to two leaves, or
        is not what the source's digests were recorded of; or what was written reads differently.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> plan = reshard.save(ckpt, "out/1000", max_memory="1GiB")
      >>> print(str(plan).splitlines()[0])
      4 arrays, 8.25 KiB: 2 rewritten, 2 copied verbatim
      >>> [str(mesh) for mesh in reshard.open("out/1000").meshes]
      ['data=1,model=8']
    """
    if share is not None and (resume or workers is not None or executor is not None):
        raise ArgumentError(
            "a share is written whole or again, by one process",
            hints=["share=(i, n) without resume, workers and executor"],
        )
    planned = plan(
        ckpt,
        destination,
        max_memory=max_memory,
        chunks=chunks,
        format=format,
        ocdbt=ocdbt,
        codec=codec,
        file_size=file_size,
        link=link,
        overwrite=overwrite,
        digest=digest,
        verify=verify,
    )
    if share is not None:
        return write_share(planned, *share, progress)
    if workers is None and executor is None:
        return execute(planned, resume=resume, progress=progress)
    return execute_in_shares(
        planned, workers=workers, executor=executor, resume=resume, progress=progress
    )


def execute(plan: Plan, *, resume: bool = False, progress: Progress | None = None) -> Plan:
    """Writes what a plan says, whole or not at all; arguments and errors are as of `save`."""
    raise_all(plan.errors)
    destination = plan.destination
    if destination is None:
        raise ArgumentError("there is no destination to save to")
    same = fingerprint(plan) if resume or not destination.is_local else {}
    kept = functools.partial(is_unfinished, fingerprint=same) if resume else lambda directory: False
    stages = [database.STAGE]
    if destination.is_local:
        check_none(destination)
        committing = directory_commit.committed_directory(
            destination, overwrite=plan.overwrite, unfinished=kept
        )
    else:
        stages = database.job_stages(same)
        committing = bucket_commit.committed_prefix(
            plan, destination, stages, resume=resume, unfinished=kept
        )
    for item in plan.items:
        item.ckpt.source.store.begin()
    with committing as (directory, lock):
        journal = Journal(directory, same, cores(), len(plan.items), resume, lock.token)
        with _unchanged(plan, journal) as look:
            plan = _begun(plan, directory, journal)
            jobs = []
            for item, committed in zip(plan.items, journal.items, strict=True):
                again = to_read_back(item, committed, plan.max_memory, plan.verify)
                jobs.append(ItemJob(item, item.directory(directory), stages, committed, again))
            whole = (  # metadata of what is copied are not in it
                sum(job.bytes_read for job in jobs)
                + sum(sibling.nbytes for sibling in plan.siblings)
                + sum(a.bytes_written if a.moved else a.decoded_bytes for a in plan.arrays)
            )
            report = counted(whole, progress)
            there = {}
            last = [] if directory.is_local else [s for s in plan.siblings if is_marker(s.path)]
            first = [sibling for sibling in plan.siblings if sibling not in last]
            copy = functools.partial(
                copy_siblings,
                directory=directory,
                max_memory=plan.max_memory,
                copied=journal.copied,
                advance=journal.advance,
                report=report,
            )
            copy(first)
            hashes = {s.path: journal.copied[s.path].sha256 for s in first if s.is_file}
            with _correct(journal), plan.checkpoints[0].source.root.remembered():
                for item in plan.items:
                    check_copied(item, hashes)
            deletions = []
            for job in jobs:
                digests = _write(job, plan.max_memory, journal, lock, report)
                written = write_documents(job.plan, job.directory)
                if not directory.is_local:  # to read them back takes requests
                    for place, data in written.items():
                        hashes[place.below(directory) or ""] = hashlib.sha256(data).hexdigest()
                with _correct(journal):
                    deletions += _check_and_record(
                        job, plan, directory, digests, hashes, journal, lock, report
                    )
            if not directory.is_local:
                see = functools.partial(check_there, first, directory)
                there, *_ = bucket.at_once(see, *deletions, *([] if last else [look]))
                if last:
                    lock.check()
                copy(last)
        if directory.is_local:
            posix.sync(directory)
            lock.check()
            write_markers(marker_places(plan.checkpoints, directory), directory, destination)
            journal.check()
            journal.close()
        else:
            bucket_commit.commit(plan, there, journal, lock)
    return plan


def _begun(plan: Plan, directory: Location, journal: Journal) -> Plan:
    """Makes the directories of a job, and shares files. The plan; without links where none can
    be."""
    clear(plan.checkpoints, plan.siblings, directory)
    for item in plan.items:
        item.directory(directory).make_directory()
        if directory.is_local:
            posix.remove_locks(item.directory(directory))
    if not (journal.links and link_files(plan, directory)):
        plan = plan.without_links()
        raise_all(copy_errors(plan))
        journal.without_links()
    journal.begin()
    if not journal.resumed:
        return plan
    return dataclasses.replace(plan, notes=(*plan.notes, resumed_note(plan.items, journal.items)))


def _check_and_record(
    job: ItemJob,
    plan: Plan,
    directory: Location,
    digests: Mapping[Path, Digest],
    hashes: Mapping[str, str],
    journal: Journal,
    lock: Lock,
    report: Report,
) -> list[Callable[[], object]]:
    """Compares what was read with what is recorded of the source, records what was written, and
    reads it back. `digests` are of the arrays that were decoded, `hashes` of other files. What
    deletes in a bucket what is not needed any more."""
    item, deletions = job.plan, []
    arrays = records(item, digests, plan.max_memory, report)
    with directory.remembered(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        job.directory.ahead(unseen=[TREE_FILE, SHARDING_FILE, *[MANIFEST] * item.format.ocdbt])
        (directory / item.ckpt.source.step).ahead(below=True)
        record = record_of(item.ckpt, directory, arrays, item.format.ocdbt, hashes)
        recorded = pool.submit((job.directory / FILE).write, record.dump())
        if journal.resumed or not directory.is_local:
            stored = check_whole(item, directory)
            if item.format.ocdbt and not directory.is_local:
                files = database.unneeded_objects(job.directory, stored, job.stages)
                # Before that it is checked whether this job may: who has its lock writes there.
                delete = functools.partial(bucket.remove_files, job.directory, files, lock.check)
                deletions.append(delete)
        recorded.result()
    if plan.verify or job.read_back:
        read_back(item, directory, job.read_back, plan.max_memory, report)
    return deletions


@contextlib.contextmanager
def _correct(journal: Journal) -> Iterator[None]:
    """Where what was read or written turns out to be wrong, no later run may resume it."""
    try:
        yield
    except CorruptCheckpointError as error:
        journal.forget()
        if not journal.resumed:
            raise
        hints = [*error.hints, Hint(("same",), " begins anew: what was kept is removed")]
        raise CorruptCheckpointError(error.summary, error.problems, hints) from error


@contextlib.contextmanager
def _unchanged(plan: Plan, journal: Journal) -> Iterator[Callable[[], None]]:
    """Raises CorruptCheckpointError if files of the source have changed since the plan was made: in
    the place of errors that this has led to. What is given looks at them once all has been read, in
    the place of a look at the end."""
    error, seen = None, []
    try:
        yield lambda: seen.append(source_state(plan.checkpoints))
    except (ReshardError, OSError) as caught:
        error = caught
    state = seen[0] if seen and error is None else source_state(plan.checkpoints)
    changed = [f"`{path}`" for path in changed_paths(plan.source_state, state)]
    gone = error.filename if isinstance(error, FileNotFoundError) else None
    if not changed and gone and Location(str(gone)).below(plan.checkpoints[0].source.root):
        changed = [f"`{gone}`"]
    if changed:
        journal.forget()
        raise CorruptCheckpointError("the source changed while it was read", changed) from error
    if error is not None:
        raise error


def _write(
    job: ItemJob, max_memory: int, journal: Journal, lock: Lock, report: Report
) -> dict[Path, Digest]:
    """Writes the arrays of an item. The digests of those that it decoded."""
    item, directory, progress = job.plan, job.directory, job.progress
    store, form = item.ckpt.source.store, item.format
    described = len(job.stages) > 1
    work = ItemWork(
        directory,
        job.stages,
        form,
        item.rewritten,
        item.metadata(described),
        [ValueRange(handle) for handle in item.copied],
        [BoxRange(group) for group in co_read(item.arrays)],
        described,
    )
    try:
        digests = write_arrays(work, progress, max_memory, journal.cores, journal.advance, report)
    except BaseException:
        with contextlib.suppress(ReshardError, OSError):  # what a later run goes on from
            journal.write()
        raise
    if form.ocdbt and item.arrays:
        linked = {stored_name(h.path): h for h in item.linked}
        copied = any(item.values(handle) for handle in item.copied)
        stages = job.stages if copied or work.metadata or item.rewritten else ()
        again = progress.merged
        if not again:
            if journal.resumed:  # one that was not known to be complete
                lock.check()
                (directory / MANIFEST).remove()
            database.merge(store, directory, linked, form, stages, check=lock.check)
            progress.merged = True
            journal.write()
        if directory.is_local:
            database.prune(directory, item.files or (), stages, again)
    return digests
