"""Jobs from disk to disk: carry a plan out and commit the result."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from reshard.arrays.derived import stored_chunks
from reshard.arrays.digests import Digest
from reshard.arrays.handle import stored_name
from reshard.checkpoint import Checkpoint
from reshard.engine.budget import Budget, cores, in_flight
from reshard.engine.plan import Plan
from reshard.errors import CorruptCheckpointError, ReshardError
from reshard.hints import Hint
from reshard.storage import posix
from reshard.storage.location import Location, parse_location
from reshard.storage.ocdbt import new_context
from reshard.tree import Path
from reshard.units import parse_bytes
from reshard.verify.digest_record import FILE, ArrayRecord, Record, record_of
from reshard.verify.values import check_fits
from reshard.writer import commit, database
from reshard.writer.item_progress import ItemProgress
from reshard.writer.journal import Journal, fingerprint, is_unfinished, went_on
from reshard.writer.orbax_documents import documents
from reshard.writer.prepare import Job, parse_chunks, prepare
from reshard.writer.readback import (
    bytes_read,
    check_whole,
    chunks_read,
    read_back,
    to_read_back,
)
from reshard.writer.recording import (
    check_copied,
    new_digests,
    read_again,
    records,
    source_record,
)
from reshard.writer.siblings import (
    Sibling,
    changed_paths,
    clear,
    copy_siblings,
    link_siblings,
    siblings,
    source_state,
    write_markers,
)
from reshard.writer.stream import (
    Target,
    move_values,
    write_boxes,
    write_values,
)
from reshard.writer.target_format import parse_format

Checkpoints = Checkpoint | Sequence[Checkpoint]
Progress = Callable[[int, int], None]


def plan(
    ckpt: Checkpoints,
    destination: str | os.PathLike | None = None,
    *,
    max_memory: int | str = "1GiB",
    chunks: int | str = "shard",
    format: str | None = None,
    ocdbt: bool | None = None,
    codec: str | None = None,
    file_size: int | str | None = None,
    link: bool = True,
    overwrite: bool = False,
) -> Plan:
    """What `save` would do with the same arguments, without doing it.

    Args:
      ckpt: what to save; see `save`.
      destination: where to; without it, data files are taken to be shareable.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"`, `"keep"`, or the most decoded bytes of a chunk.
      format, ocdbt, codec, file_size: the format of the destination; see `save`.
      link: whether unchanged data files may be shared with the source.
      overwrite: whether an existing destination is to be replaced.

    Returns:
      The plan; what would make `save` raise is in its `problems`.
    """
    jobs, result, found = prepare(
        _as_list(ckpt),
        None if destination is None else parse_location(destination),
        max_memory=parse_bytes(max_memory),
        chunks=parse_chunks(chunks),
        form=parse_format(format, ocdbt, codec, file_size),
        link=link,
        overwrite=overwrite,
    )
    found += _known(jobs)[1]
    return dataclasses.replace(
        result,
        problems=tuple(line for error in found for line in (error.summary, *error.problems)),
        hints=tuple(dict.fromkeys(hint for error in found for hint in error.hints)),
    )


def save(
    ckpt: Checkpoints,
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
      progress: called with (bytes done, bytes in all) after each batch.

    Returns:
      The plan that was carried out.

    Raises:
      ArgumentError: `max_memory` or `chunks` is no number of bytes, or the checkpoints are not
        steps of one root.
      DestinationError: the destination exists, is being written, or cannot be written.
      MemoryLimitError: a stored chunk does not fit in `max_memory`.
      CorruptCheckpointError: stored data is missing, does not decode, belongs to two leaves, or
        is not what the source's digests were recorded of; or what was written reads differently.
    """
    target = parse_location(destination)
    checkpoints = _as_list(ckpt)
    memory = parse_bytes(max_memory)
    grid = parse_chunks(chunks)
    form = parse_format(format, ocdbt, codec, file_size)

    def prepared(link: bool) -> tuple[list[Job], Plan]:
        jobs, total, found = prepare(
            checkpoints,
            target,
            max_memory=memory,
            chunks=grid,
            form=form,
            link=link,
            overwrite=overwrite,
        )
        _raise_all(found)
        return jobs, total

    jobs, total = prepared(link)
    known, changed = _known(jobs)
    _raise_all(changed)
    again = [
        read_again(job, record.arrays, digest) for job, record in zip(jobs, known, strict=True)
    ]
    check_fits(
        (c for job, more in zip(jobs, again, strict=True) for c in chunks_read(job, more, verify)),
        memory,
    )
    before = source_state(checkpoints)
    same = fingerprint(jobs, memory, before) if resume else {}
    kept = functools.partial(is_unfinished, fingerprint=same) if resume else lambda directory: False
    with commit.committed_directory(target, overwrite=overwrite, unfinished=kept) as directory:
        journal = Journal(directory, same, cores(), len(jobs), resume)
        with _unchanged(checkpoints, before, journal):
            others = siblings(checkpoints, target, link and journal.links)
            clear(checkpoints, others, directory)
            for job in jobs:
                _item_directory(job, directory).make_directory()
                posix.remove_locks(_item_directory(job, directory))
            if not (journal.links and _link(jobs, others, directory)):
                jobs, total = prepared(link=False)  # the file system forbids links
                others = siblings(checkpoints, target, link=False)
                journal.without_links()
            journal.begin()
            if journal.resumed:
                note = went_on(jobs, journal.items)
                total = dataclasses.replace(total, notes=(*total.notes, note))
            written = [
                to_read_back(job, so_far, memory, verify)
                for job, so_far in zip(jobs, journal.items, strict=True)
            ]
            whole = bytes_read(again, written) + sum(other.nbytes for other in others)
            report = _reporter(total, whole, progress)
            copy_siblings(others, directory, journal.copied, journal.advance, report)
            hashes = {
                other.path: journal.copied[other.path].sha256 for other in others if other.is_file
            }
            with _correct(journal):
                for job, record in zip(jobs, known, strict=True):
                    check_copied(job, record, hashes)
            for job, record, more, back, so_far in zip(
                jobs, known, again, written, journal.items, strict=True
            ):
                digests = _write_item(
                    job, _item_directory(job, directory), memory, so_far, journal, report
                )
                with _correct(journal):
                    arrays = records(job, record.arrays, digests, more, memory, report)
                    _record(job, directory, arrays, hashes)
                    if journal.resumed:
                        check_whole(job, directory)
                    if verify or back:
                        read_back(job, directory, back, memory, report)
        posix.sync(directory)
        write_markers(checkpoints, directory, target)
        journal.close()
    return total


def _known(jobs: Sequence[Job]) -> tuple[list[Record], list[ReshardError]]:
    """What is on record of each source, and what is wrong with that."""
    known: list[Record] = []
    found: list[ReshardError] = []
    for job in jobs:
        try:
            known.append(source_record(job))
        except CorruptCheckpointError as error:
            found.append(error)
    return known, found


def _raise_all(found: Sequence[ReshardError]) -> None:
    """Raises the errors of several leaves as one, of the type of the first."""
    if len(found) == 1:
        raise found[0]
    if found:
        problems = [line for error in found for line in (error.summary, *error.problems)]
        hints = [hint for error in found for hint in error.hints]
        raise type(found[0])(f"{len(found)} problems", problems, hints)


def _as_list(ckpt: Checkpoints) -> list[Checkpoint]:
    return [ckpt] if isinstance(ckpt, Checkpoint) else list(ckpt)


def _item_directory(job: Job, directory: Location) -> Location:
    source = job.ckpt.source
    return directory / source.step / source.item


def _link(jobs: Sequence[Job], others: Sequence[Sibling], directory: Location) -> bool:
    """Shares data files with the source; False if that is forbidden."""
    for job in jobs:
        store, item = job.ckpt.source.store, _item_directory(job, directory)
        if job.linked and not database.link_data_files(store, item, job.files or ()):
            return False
    return link_siblings(others, directory)


def _record(
    job: Job,
    directory: Location,
    arrays: Mapping[str, ArrayRecord],
    hashes: Mapping[str, str],
) -> None:
    """Writes the record of an item."""
    record = record_of(job.ckpt, directory, arrays, job.target.ocdbt, hashes)
    (_item_directory(job, directory) / FILE).write(record.dump())


@contextlib.contextmanager
def _correct(journal: Journal) -> Iterator[None]:
    """Where what was read or written turns out to be wrong, no later run may go on with it."""
    try:
        yield
    except CorruptCheckpointError as error:
        journal.forget()
        if not journal.resumed:
            raise
        hints = [*error.hints, Hint(("same",), " begins anew: what was kept is removed")]
        raise CorruptCheckpointError(error.summary, error.problems, hints) from error


def _reporter(total: Plan, more: int, progress: Progress | None) -> Callable[[int], None]:
    whole = (
        more
        + sum(a.decoded_bytes for a in total.arrays if not a.moved)
        + sum(a.bytes_written for a in total.arrays if a.moved)
    )
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, whole), whole)  # metadata of moved arrays are not in `whole`

    return report


@contextlib.contextmanager
def _unchanged(
    checkpoints: Sequence[Checkpoint], before: Mapping[str, str], journal: Journal
) -> Iterator[None]:
    """Raises CorruptCheckpointError if files of the source have changed since they were listed: in
    the place of errors that this has led to."""
    error = None
    try:
        yield
    except (ReshardError, OSError) as caught:
        error = caught
    changed = [f"`{path}`" for path in changed_paths(before, source_state(checkpoints))]
    gone = error.filename if isinstance(error, FileNotFoundError) else None
    if not changed and gone and Location(str(gone)).below(checkpoints[0].source.root):
        changed = [f"`{gone}`"]
    if changed:
        journal.forget()
        raise CorruptCheckpointError("the source changed while it was read", changed) from error
    if error is not None:
        raise error


def _write_item(
    job: Job,
    directory: Location,
    memory: int,
    so_far: ItemProgress,
    journal: Journal,
    report: Callable[[int], None],
) -> dict[Path, Digest]:
    """Writes the arrays and the documents of an item. The digests of the arrays that it decoded."""
    store, form = job.ckpt.source.store, job.target
    writeback = posix.Writeback(directory / database.STAGE / "d")
    spec = directory.spec
    if form.ocdbt:
        spec = database.stage_spec(directory, form.file_bytes)
    context = new_context(database.STAGE_CACHE_BYTES)
    target = Target(spec, context, form)
    sources = {handle.path: handle for handle in job.handles}
    names = {path: stored_name(path) for path in sources}
    digests = new_digests(job)
    so_far.go_on(digests)

    def committed() -> None:
        writeback.advance()
        journal.advance()

    stores = functools.cache(store.kvstore)
    values = [
        (stores(chunk.name), chunk.key, f"{names[h.path]}/{chunk.new_key}", chunk.value.size)
        for h in job.copied
        for chunk in stored_chunks(h, form.encoding(h)) or ()
    ]
    rewritten = {
        f"{names[h.path]}/{form.metadata_key}": form.metadata(h, h.chunk_shape)
        for h in (*job.linked, *job.copied)
        if not form.is_verbatim(h)
    }
    try:
        if not so_far.merged:
            write_values(rewritten, target)
        largest = max((plan.box_bytes for plan in job.plans), default=0)
        with Budget(in_flight(memory, journal.cores, largest)) as budget:
            move_values(values, target, so_far, budget, committed, report)
            write_boxes(
                job.plans, sources, target, names, digests, so_far, budget, committed, report
            )
    finally:
        writeback.finish()
    if form.ocdbt and job.plans:
        linked = {names[h.path]: h for h in job.linked}
        staged = bool(values or rewritten) or any(not a.moved for a in job.plans)
        again = so_far.merged
        if not again:
            database.merge(store, directory, linked, form, staged)
            so_far.merged = True
            journal.write()
        kept = (value for h in job.linked for value in job.values(h))
        database.prune(directory, kept, staged, again)
    chunks = {a.layout.path: a.chunk for a in job.plans}
    for name, data in documents(job.ckpt, chunks, form).items():
        (directory / name).parent.make_directory()
        (directory / name).write(data)
    return digests
