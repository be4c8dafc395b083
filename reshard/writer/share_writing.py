"""What a process writes of a job in shares: a share, or all that is in no share."""

import dataclasses
import hashlib
import itertools
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.boxes import chunk_ranges
from reshard.arrays.derived import from_memory, stored_chunks
from reshard.arrays.handle import stored_name
from reshard.engine.budget import WINDOW, cores
from reshard.engine.plan import co_read
from reshard.errors import (
    CorruptCheckpointError,
    raise_all,
)
from reshard.storage import posix
from reshard.storage.location import Location
from reshard.storage.lock import Lock
from reshard.storage.ocdbt import MANIFEST, PROCESS, StoredValue, stored_values
from reshard.tree import format_path
from reshard.verify.digest_record import record_of, stored_record
from reshard.verify.values import Progress, counted
from reshard.writer import database
from reshard.writer.item_arrays import ItemWork, link_files, write_arrays
from reshard.writer.job_plan import ItemPlan, Plan
from reshard.writer.journal import ItemProgress
from reshard.writer.orbax_documents import write_documents
from reshard.writer.prepare import copy_errors
from reshard.writer.recording import (
    array_records,
    check_copied,
    check_recorded,
    read_apart,
    verify_hint,
)
from reshard.writer.share_job import JOB, REST, Job, Written, begun, is_written, shares_begun
from reshard.writer.share_parts import BoxRange, Share, ValueRange
from reshard.writer.siblings import CopiedFile, clear, copy_siblings, is_marker
from reshard.writer.stream import Report


@dataclasses.dataclass(frozen=True)
class ShareTask:
    """A share as a process writes it that knows nothing else of the job."""

    job: Job
    share: Share

    @property
    def nbytes(self) -> int:
        return self.share.nbytes

    def __str__(self) -> str:
        return f"share {self.share.number} of {self.share.count}"

    def run(self, report: Report) -> None:
        """Writes it, unless that has been done; `report` is called with numbers of bytes."""
        if is_written(self.job, f"{self.share.number}.json"):
            report(self.nbytes)
            return
        attempt = f"{self.share.number}_{secrets.token_hex(4)}"
        try:
            self._write(attempt, report)
        except BaseException:
            self._remove_late(attempt)
            raise

    def _remove_late(self, attempt: str) -> None:
        """Removes an attempt's databases from a disk, if its job has ended: they are nobody's."""
        job = self.job
        if not job.outer.is_local or (job.outer / JOB).exists():
            return
        for item in self.share.items:
            directory = job.directory / item.directory
            for stage in _stages(directory, item.format.ocdbt, attempt):
                posix.remove(directory / stage)
            while directory.below(job.outer):
                posix.remove_empty(directory)
                directory = directory.parent
        posix.remove_empty(job.outer)

    def _write(self, attempt: str, report: Report) -> None:
        job, number, done = self.job, self.share.number, 0

        def told(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report(nbytes)

        look = job.looking(lambda: job.note_running(number, done, self.nbytes))
        look()
        items = {}
        for item in self.share.items:
            directory = job.directory / item.directory
            work = ItemWork(
                directory,
                _stages(directory, item.format.ocdbt, attempt),
                item.format,
                [h for h in item.handles if h.path not in {v.handle.path for v in item.values}],
                {},
                item.values,
                item.boxes,
                True,
            )
            items[item.item] = _write(work, self.share.max_memory, look, told)
        if job.outer.is_local:
            posix.sync(job.directory)
        job.check()
        job.write_document(f"{number}.json", {"items": _dumped(items)})
        job.forget_running(number)


def _dumped(items: Mapping[int, Written]) -> dict[int, dict[str, Any]]:
    return {number: written._asdict() for number, written in items.items()}


def _stages(directory: Location, ocdbt: bool, attempt: str) -> list[str]:
    """Databases of an attempt's own: in a bucket several, as of `database.job_stages`."""
    if not ocdbt:
        return []
    return [f"{PROCESS}{attempt}_{n}" for n in range(1 if directory.is_local else WINDOW)]


def _write(work: ItemWork, max_memory: int, look: Callable[[], None], report: Report) -> Written:
    """Writes what is to be written of an item. What that was."""
    digests = write_arrays(work, ItemProgress(), max_memory, cores(), look, report)
    states = {stored_name(path): digest.state for path, digest in digests.items()}
    keys = set(_keys(work))
    if not work.format.ocdbt:
        files = {}
        for key in keys:
            size = (work.directory / key).file_bytes() if work.directory.is_local else posix.UNKNOWN
            files |= {} if size is None else {key: size}
        _check_there(work, keys - files.keys(), [])
        return Written({}, files, {}, states)
    found: dict[str, StoredValue] = {}
    stages, parts = {}, {}
    for stage in work.stages:
        directory = work.directory / stage
        if (directory / MANIFEST).exists():
            own = dict(stored_values(directory, stage, work.format.metadata_key))
            stages[stage] = len(own)
            found |= own
            files = (file for file in directory.walk() if file.is_file)
            parts |= {f"{stage}/{file.path}": file.nbytes for file in files}
    truncated = [value.file or "" for value in found.values() if value.truncated is not None]
    _check_there(work, keys - found.keys(), truncated)
    names = {value.file for value in found.values() if value.file is not None}
    files = {name: (work.directory / name).file_bytes() or 0 for name in sorted(names)}
    nodes = {name: size for name, size in parts.items() if name not in names}
    return Written(stages, files, nodes, states)


def _check_there(work: ItemWork, gone: Collection[str], truncated: Sequence[str]) -> None:
    """Raises CorruptCheckpointError where something is not there that was written. A chunk that
    holds a fill value alone may be absent on a disk."""
    problems = [f"`{work.directory / file}` is truncated" for file in dict.fromkeys(truncated)]
    if gone and not work.format.fills:
        problems.append(f"{len(gone)} chunks, one of them `{min(gone)}`, are not there")
    if problems:
        raise CorruptCheckpointError("what was written cannot be read back", problems)


def _keys(work: ItemWork) -> Iterator[str]:
    """The keys of all that is written."""
    yield from work.metadata
    for handle, start, stop in work.values:
        name = stored_name(handle.path)
        chunks = stored_chunks(handle, work.format.encoding(handle)) or {}
        yield from (f"{name}/{key}" for key in [*chunks][start:stop])
    handles = {handle.path: handle for handle in work.handles}
    for group in work.boxes:
        for array in group.arrays:
            handle = handles[array.layout.path]
            name, encoding = stored_name(handle.path), work.format.encoding(handle)
            for box in array.boxes(group.start, group.stop):
                places = (range(*ends) for ends in chunk_ranges(box, array.chunk))
                for index in itertools.product(*places):
                    yield f"{name}/{encoding.chunk_key(index)}"


def write_rest(plan: Plan, job: Job, report: Report) -> None:
    """Writes all that is in no share, unless that has been done: files beside the arrays, documents
    and metadata, values in memory, and what is shared with the source."""
    if is_written(job, REST):
        report(rest_bytes(plan))
        return
    job.check()
    lock = Lock(job.outer / f"{REST}.lock", job.outer)
    try:
        document = _write_rest(plan, job, lock, report)
        if job.outer.is_local:
            posix.sync(job.directory)
        lock.check()
        job.check()
        job.write_document(REST, document)
    finally:
        lock.release()


def rest_bytes(plan: Plan) -> int:
    """Bytes that `write_rest` reads or writes, as it reports them."""
    again = [h for item in plan.items for h in (*item.read_sources, *item.read_verbatim)]
    made = [h for item in plan.items for h in item.rewritten if from_memory(h)]
    return sum(h.nbytes for h in (*again, *made)) + sum(s.nbytes for s in plan.siblings)


def _write_rest(plan: Plan, job: Job, lock: Lock, report: Report) -> dict[str, Any]:
    directory = job.directory
    clear(plan.checkpoints, plan.siblings, directory)
    linked = link_files(plan, directory)
    now = plan if linked else plan.without_links()
    raise_all(copy_errors(now))
    last = [] if directory.is_local else [s for s in now.siblings if is_marker(s.path)]
    first = [sibling for sibling in now.siblings if sibling not in last]
    copied: dict[str, CopiedFile] = {}
    copy_siblings(first, directory, plan.max_memory, copied, job.looking(), report)
    hashes = {path: file.sha256 for path, file in copied.items()}
    with plan.checkpoints[0].source.root.remembered():
        for item in plan.items:
            check_copied(item, hashes)
    items, rest = {}, []
    beside = {s.path: s.nbytes for s in first if s.is_file}
    for number, item in enumerate(plan.items):
        place = job.item_directory(number)
        items[number], entry = _write_item_rest(
            item, linked, place, job, f"rest_{lock.token}", plan.max_memory, report
        )
        for path, data in write_documents(item, place).items():
            name = path.below(directory) or ""
            beside[name] = len(data)
            if not directory.is_local:  # to read them back takes requests
                hashes[name] = hashlib.sha256(data).hexdigest()
        sources, verbatim = read_apart(item, plan.max_memory, report)
        check_recorded(item, sources)
        arrays = array_records(item, verbatim)
        record = record_of(item.ckpt, directory, arrays, item.format.ocdbt, hashes)
        rest.append({**entry, "record": json.loads(record.dump())})
    return {
        "items": _dumped(items),
        "rest": rest,
        "beside": beside,
        "last": {s.path: str(s.source) for s in last},
    }


def _write_item_rest(
    item: ItemPlan,
    linked: bool,
    directory: Location,
    job: Job,
    attempt: str,
    max_memory: int,
    report: Report,
) -> tuple[Written, dict[str, Any]]:
    """What has been written of an item, and what else the commit is to know of it."""
    made = [handle for handle in item.rewritten if from_memory(handle)]
    paths = {handle.path for handle in made}
    groups = [group for group in co_read(item.arrays) if group[0].layout.path in paths]
    work = ItemWork(
        directory,
        _stages(directory, item.format.ocdbt, attempt),
        item.format,
        made,
        item.metadata(True),
        [] if linked else [ValueRange(handle) for handle in item.linked],
        [BoxRange(group) for group in groups],
        True,
    )
    written = _write(work, max_memory, job.looking(), report)
    apart, linked_keys = None, 0
    if linked and item.linked:
        apart = f"{PROCESS}{attempt}_linked"
        handles = {stored_name(h.path): h for h in item.linked}
        store = item.ckpt.source.store
        database.merge(store, directory, handles, item.format, (), directory / apart)
        values = [value for h in item.linked for value in item.values(h)]
        files = {file: (directory / file).file_bytes() or 0 for v in values if (file := v.file)}
        linked_keys = len(values)
        written = written._replace(files={**written.files, **files})
    source = item.ckpt.source
    entry = {
        "linked": apart,
        "linked_keys": linked_keys,
        "ocdbt": item.format.ocdbt,
        "file_bytes": item.format.file_bytes,
        "source": [source.kind, source.v1, source.step, source.item],
        "path": str(source.path),
        "verify": verify_hint(source).parts[0],
        "rewritten": {
            stored_name(h.path): [
                item.record.digest(h),
                f"{format_path(h.path)}  {stored_record(h)}",
            ]
            for h in item.rewritten
        },
    }
    return written, entry


def write_share(plan: Plan, number: int, count: int, progress: Progress | None = None) -> Plan:
    """Writes a share of a plan; the first one also what is in no share. The plan, with what the
    user should know."""
    raise_all(plan.errors)
    share = plan.share(number, count)
    assert plan.destination is not None
    begins = shares_begun(plan.destination) is None
    job = begun(plan, count)
    if begins and plan.destination.is_local and plan.destination.exists():
        plan = dataclasses.replace(plan, notes=(*plan.notes, _replaces(job)))
    rest = 0 if number else rest_bytes(plan)
    report = counted(share.nbytes + rest, progress)
    if not number:
        write_rest(plan, job, report)
    ShareTask(job, share).run(report)
    return plan


def _replaces(job: Job) -> str:
    """What the first share of a job that replaces something tells: an earlier job, of which it may
    be a task that runs again, has left no trace."""
    return (
        f"it begins a job that is to replace `{job.destination}`: if that is what this very job "
        f"has made, and a task of it ran again, remove `{job.outer}`"
    )
