"""`save` and `commit`: the execution of a plan. Its shares are written, one after another or at the
same time. Then they are merged, checked and published."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard import errors
from reshard.arrays.digests import Digest
from reshard.arrays.dtypes import parse_dtype
from reshard.arrays.handle import ArrayHandle, array_text, stored_name
from reshard.checkpoint import Checkpoint
from reshard.engine.run import check_tasks, check_workers, run_tasks
from reshard.loader import detection
from reshard.loader import open as open_checkpoint
from reshard.loader.safetensors import INDEX
from reshard.storage import identity, location
from reshard.storage.array_store import ArrayStore
from reshard.storage.ocdbt import (
    MANIFEST,
    SAME_CHUNK,
    build_root,
    node_files,
    ocdbt_spec,
    stage_spec,
)
from reshard.tree import format_path
from reshard.verify.digest_record import FILE
from reshard.verify.values import Progress, counted
from reshard.writer import commit as committing
from reshard.writer import documents, siblings
from reshard.writer.arrays import CACHE_BYTES, ItemShare, Report, Written, sync, write_item
from reshard.writer.job import (
    ROOT,
    UNSHARED,
    Attempt,
    Found,
    Job,
    is_of_an_attempt,
    job_token,
    look,
    written_of,
)
from reshard.writer.links import write_linked
from reshard.writer.plan import ItemPlan, Plan, Share
from reshard.writer.planning import P, plan
from reshard.writer.replaced import Seen

# Documents that are written, or read, at once.
_DOCUMENTS = 32
# Seconds after which a share checks again that its job has not ended.
_LOOK_SECONDS = 1.0


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
    """Write a checkpoint, complete or not at all, in the layout of its source.

    A step stays a step with its other items. A manager's root stays a root with that step. A v1
    checkpoint stays v1. The format, the codec and its level stay those of the source unless you
    give others. At most `max_memory` bytes of arrays are in flight at any time. Unchanged chunks
    are not decoded. If nearly all of an item stays as it is, its data files are hard-linked. This
    is safe: Orbax and TensorStore never write to a data file again.

    A job is written in shares of about 1 GiB. If it fails, its finished shares stay for `resume`.

    Digests of the values are recorded beside the arrays (see `reshard.arrays.digests`). If the
    source has recorded digests, the arrays that are read are compared with them.

    Args:
      ckpt: the checkpoint, or several steps of one manager's root.
      destination: a path or a URL. It must not exist unless `overwrite` is given.
      max_memory: bytes, or text such as `"256MiB"`.
      chunks: `"shard"` for one chunk per shard of the new mesh (split if memory requires it),
        `"keep"` for the source's chunks, or the largest number of decoded bytes in a chunk.
      format: `"zarr2"` or `"zarr3"`.
      ocdbt: True for an OCDBT database, False for plain files.
      codec: `"none"`, `"zstd:9"`, `"blosc:lz4:5"`; the level may be left out.
      file_size: approximate bytes of a data file of an OCDBT database.
      link: hard-link data files if possible; otherwise stored chunks are copied.
      overwrite: replace a checkpoint on a disk once the new one is complete; ignore the leftovers
        of unfinished jobs.
      digest: also read arrays that are copied verbatim and have no recorded digest, and record
        one.
      verify: read back everything that was written, before the commit.
      resume: use the shares that an earlier run of the same job has finished.
      share: (i, n) writes only share i of n, numbered from 0. Any processes that see the source
        and the destination may write the shares, in any order. Then `reshard.commit` makes the
        checkpoint. If a share was stopped, the same call writes it again.
      workers: how many processes of this machine write the shares. Each uses `max_memory`, and
        they divide this process's cores. With `executor`, the number of its workers.
      executor: any `concurrent.futures.Executor` that runs the shares instead.
      progress: called with (bytes done, bytes in all) after each batch.

    Returns:
      The plan that was executed.

    Raises:
      ArgumentError: an argument is wrong for any checkpoint, the checkpoints are not steps of one
        root, or there is no such share.
      DestinationError: the destination exists, is being written, or cannot be written.
      MemoryLimitError: a stored chunk does not fit in `max_memory`.
      ChangedCheckpointError: the source has changed since it was opened.
      CorruptCheckpointError: stored data is missing, does not decode, belongs to two leaves, or
        differs from its recorded digest; or the written values differ when they are read back.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> plan = reshard.save(ckpt, "out/1000", max_memory="1GiB")
      >>> print(str(plan).splitlines()[0])
      4 arrays, 8.25 KiB: 2 rewritten, 2 copied verbatim
      >>> [str(mesh) for mesh in reshard.open("out/1000").meshes]
      ['data=1,model=8']
    """
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
    return execute(planned, resume, share, workers, executor, progress)


def execute(
    plan: P,
    resume: bool = False,
    share: tuple[int, int] | None = None,
    workers: int | None = None,
    executor: concurrent.futures.Executor | None = None,
    progress: Progress | None = None,
) -> P:
    """Executes a plan, completely or not at all. Arguments and errors are those of `save`. Returns
    the plan, with a note if an earlier run's shares were used."""
    if share is not None and (resume or workers is not None or executor is not None):
        text = "a share cannot be combined with resume, workers or executor"
        raise errors.ArgumentError(text, hints=["leave these out"])
    errors.raise_all([_resumed(error) for error in plan.errors] if resume else plan.errors)
    by_tasks = workers is not None or executor is not None
    if by_tasks:
        check_workers(workers)
    begun = _begun(plan, resume, share, by_tasks, workers)
    if begun is None:
        return plan
    attempt, parts = begun
    job = attempt.job
    numbers = range(job.count) if share is None else [share[0]]
    if resume and parts:
        done = f"{len(parts.keys() - {UNSHARED})} of {job.count} shares were complete"
        plan = dataclasses.replace(plan, notes=(*plan.notes, f"resumed: {done}"))
    every = plan.shares(job.count)
    shares = [every[number] for number in numbers if str(number) not in parts]
    unshared = UNSHARED not in parts and 0 in numbers
    whole = sum(each.nbytes for each in shares) + unshared * unshared_bytes(plan)
    whole += (share is None and plan.verify) * plan.decoded_bytes
    report = counted(whole, progress)
    first = functools.partial(write_unshared, plan, attempt) if unshared else lambda _: None
    tasks = [ShareTask(job, attempt.begun, each) for each in shares]
    with _source_errors(plan, job):
        if by_tasks:
            check_tasks(tasks, executor)
        with committing.attempted(attempt, whole=share is None):
            if by_tasks:
                options = {"workers": workers, "executor": executor, "stop": attempt.end}
                run_tasks(tasks, report, **options, meanwhile=first)
            else:
                first(report)
                for each in shares:
                    write_share(attempt, each, report)
            if share is None:
                # Digests of an earlier run are of what it read; what it wrote may have changed.
                written = (each for part in parts.values() for each in written_of(part).values())
                doubted = {name for each in written for name in each.digests}
                complete(attempt, report, plan.seen, plan.verify, doubted, plan.identity)
    return plan


def _resumed(error: errors.ReshardError) -> errors.ReshardError:
    """An error of a plan whose job is to be resumed: says why that does not use the destination."""
    if not isinstance(error, errors.DestinationExistsError):
        return error
    text = "a job can be continued only until its destination exists"
    return type(error)(error.summary, [*error.problems, text], error.hints)


def _begun(
    plan: Plan, resume: bool, share: tuple[int, int] | None, by_tasks: bool, workers: int | None
) -> tuple[Attempt, Mapping[str, Mapping[str, Any]]] | None:
    """An attempt, and the documents of parts that are written. None if the job is complete."""
    destination = plan.destination
    if destination is None:
        raise errors.ArgumentError("no destination was given")
    if share is not None:
        plan.share(*share)  # raises if it does not exist
    token = job_token(plan, loaded=share is None and not by_tasks)
    with committing.disk_errors(destination):
        begun = committing.begin(
            destination, token, resume=resume, overwrite=plan.overwrite, shared=share is not None
        )
    if begun is None:
        return None
    directory, found, ignored = begun
    items = tuple(item.directory(destination).below(destination) or "" for item in plan.items)
    earlier = None if found is None else found.count
    count = share[1] if share else earlier or plan.share_count(workers)
    job = Job(destination, directory, items, token, count, ignored)
    if earlier not in (None, count):
        text = f"the job of `{destination}` has {earlier} shares, not {count}"
        hints = [f"share=(..., ...) writes one of the {earlier} shares of that job"]
        raise errors.DestinationError(text, hints=hints)
    return Attempt(job), {} if found is None else committing.whole_parts(job, found)


@contextlib.contextmanager
def _source_errors(plan: Plan, job: Job) -> Iterator[None]:
    """Raises ChangedCheckpointError instead if the source has changed since it was opened."""
    try:
        yield
    except (errors.ReshardError, OSError) as error:
        check_source(plan.identity, job, error)
        raise


def check_source(
    source: Iterable[identity.Identity], job: Job, error: Exception | None = None
) -> None:
    """Raises ChangedCheckpointError if the source of a job has changed since it was opened."""
    try:
        identity.check_unchanged(source, error)
    except errors.ChangedCheckpointError as changed:
        if job.directory.exists():
            changed.hints = (committing.restart_hint(job.directory),)
        raise


# The parts.


@dataclasses.dataclass(frozen=True)
class ShareTask:
    """A share for a process that knows nothing else of the job.

    Attributes:
      begun: the document of the process that commits, which exists until the job ends.
    """

    job: Job
    begun: location.Location
    share: Share

    @property
    def nbytes(self) -> int:
        return self.share.nbytes

    def __str__(self) -> str:
        return f"share {self.share.number} of {self.share.count}"

    def run(self, report: Report) -> None:
        """Writes the share; `report` is called with numbers of bytes."""
        next_look = 0.0

        def look_and_report(nbytes: int) -> None:
            nonlocal next_look
            report(nbytes)
            if time.monotonic() >= next_look:
                if not self.begun.exists():
                    raise self.job.ended()
                next_look = time.monotonic() + _LOOK_SECONDS

        attempt = Attempt(self.job)
        with committing.attempted(attempt):
            look_and_report(0)
            write_share(attempt, self.share, look_and_report)


def write_share(attempt: Attempt, share: Share, report: Report) -> None:
    """Writes a share and its document."""
    part = str(share.number)
    items = {}
    for item in share.items:
        directory = attempt.job.item_directory(item.item)
        written = write_item(item, directory, attempt.name(part, ""), share.max_memory, report)
        items[item.item] = written._asdict()
    arrays = (array for item in share.items for array in item.arrays)
    read = (files for array in arrays for files in array.handle.identities())
    identity.check_unchanged(files for files in read if files.directory.is_local)
    attempt.publish(part, {"items": items})


def unshared_bytes(plan: Plan) -> int:
    """The bytes that `write_unshared` reports."""
    again = [h for item in plan.items for h in (*item.read_sources, *item.read_verbatim)]
    made = sum(piece.nbytes for item in plan.items for piece in item.from_memory())
    return made + sum(each.nbytes for each in (*again, *plan.siblings))


def write_unshared(plan: Plan, attempt: Attempt, report: Report) -> None:
    """Writes the part that is in no share: other items and files, documents and metadata, values in
    memory, and links to the source. Its document has everything else that the commit needs to
    know of the plan."""
    job = attempt.job
    folder = job.item_directory(0) / attempt.name(UNSHARED, "files")
    exported = [file.name for item in plan.items for file in item.format.files]
    markers = {} if exported else siblings.marker_texts(plan.checkpoints, job.destination)
    described = [documents.documents(item) for item in plan.items]
    texts = {
        job.path(number, name): (f"{number}.{name.replace('/', '.')}", data)
        for number, found in enumerate(described)
        for name, data in found.items()
    }
    changed = documents.step_documents(plan.checkpoints)
    for path in [sibling.path for sibling in plan.siblings if sibling.path in changed]:
        texts[path] = f"{len(texts)}.step", changed[path]
    # Markers of other items have another path in them.
    copied = [sibling for sibling in plan.siblings if sibling.path not in {*markers, *texts}]
    if texts or copied:
        folder.make_directory()
    files = siblings.copy_siblings(copied, folder, plan.max_memory, report)
    with concurrent.futures.ThreadPoolExecutor(_DOCUMENTS) as pool:
        list(pool.map(lambda text: (folder / text[0]).write(text[1]), texts.values()))
    files |= {path: (name, len(data)) for path, (name, data) in texts.items()}
    sync(folder, [name for name, _ in files.values()])
    items, entries = {}, []
    for number, (item, found) in enumerate(zip(plan.items, described, strict=True)):
        items[number] = _write_item(attempt, number, item, plan.max_memory, report)._asdict()
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
        entries.append(_entry(item, hashes, plan.max_memory, report))
    if job.destination.is_local and copied:
        hashed = {s.path: (folder / files[s.path][0]).sha256() for s in copied if s.is_file}
        entries[0]["record"]["copied"] = hashed
    top = folder.below(job.directory)
    attempt.publish(
        UNSHARED,
        {
            "items": items,
            "files": {path: (f"{top}/{name}", size) for path, (name, size) in files.items()},
            "folders": [*job.items, *(s.path for s in plan.siblings if not s.is_file)],
            "entries": entries,
            "last": _last_files(files, exported),
            "markers": markers,
            "source": siblings.source_document(plan.identity),
            "max_memory": plan.max_memory,
            "replaced": plan.seen,
            "verify": plan.verify,
        },
    )


def _last_files(files: Collection[str], exported: Sequence[str]) -> list[str]:
    """The files that are written last in a bucket: markers, or the index of an export."""
    if not exported:
        return [path for path in files if path.endswith(detection.MARKER)]
    return [next(name for name in (INDEX, "config.json", *exported) if name in {*files, *exported})]


def _write_item(
    attempt: Attempt, number: int, item: ItemPlan, max_memory: int, report: Report
) -> Written:
    """Writes the unshared part of an item."""
    directory = attempt.job.item_directory(number)
    written, linked = Written(), Written()
    if pieces := item.from_memory():
        share = ItemShare(number, item.format, {}, pieces)
        written = write_item(share, directory, attempt.name(UNSHARED, ""), max_memory, report)
    if item.files:
        linked = write_linked(item, directory, attempt.name(UNSHARED, "linked"))
    return written._replace(
        databases={**written.databases, **linked.databases},
        files={**written.files, **linked.files},
        nodes={**written.nodes, **linked.nodes},
    )


def _entry(
    item: ItemPlan, hashes: Mapping[str, str], max_memory: int, report: Report
) -> dict[str, Any]:
    """Everything that the commit needs to know of an item."""
    record = documents.item_record(item, hashes, max_memory, report)
    return {
        "format": item.format.format,
        "ocdbt": item.format.ocdbt,
        "zarr3": item.format.zarr3,
        "omits_fill": item.format.omits_fill,
        "file_bytes": item.format.file_bytes,
        "path": str(item.ckpt.source.path),
        "verify": documents.verify_hint(item.ckpt.source),
        "record": record.document(),
        "rewritten": {
            stored_name(h.path): (item.record.digest(h), format_path(h.path))
            for h in item.rewritten
        },
    }


# The commit.


def commit(destination: str | os.PathLike, *, progress: Progress | None = None) -> bool:
    """Make a checkpoint of the shares that `save(..., share=(i, n))` has written.

    Merges the databases and digests of the shares. Then renames the result, or in a bucket writes
    its markers.
    You can repeat the call, also after it was stopped.

    Args:
      destination: the path or URL that was given to `save`.
      progress: called with (bytes done, bytes in all) while values are read back, if the job
        verifies.

    Returns:
      True if it committed the shares, False if the destination is already complete.

    Raises:
      CheckpointNotFoundError: there are no shares for this destination.
      DestinationError: shares are missing, or some of their files.
      ChangedCheckpointError: the source has changed since it was opened.
      CorruptCheckpointError: values differ from their recorded digests.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> for i in range(4):
      ...     _ = reshard.save(ckpt, "out/1000", share=(i, 4))
      >>> reshard.commit("out/1000")
      True
    """
    place = location.parse_location(destination)
    if not place.is_local and (place / detection.RECORD).exists():
        return committing.forward(place)[1]
    every = committing.jobs(place)
    jobs = {path: found for path, found in every.items() if found.parts}
    jobs = jobs or {path: found for path, found in every.items() if found.begun}
    if not jobs:
        if _is_complete(place):
            return False
        raise errors.CheckpointNotFoundError(
            f"no shares exist for `{place}`", hints=["share=(..., ...) writes one of them"]
        )
    kinds = {(p, d["job"], d["count"]) for p, found in jobs.items() for d in found.documents}
    if len(kinds) > 1:
        lines = [f"`{path}`: job {job}, {count} shares" for path, job, count in sorted(kinds)]
        hints = [committing.restart_hint(path) for path in jobs]
        raise errors.DestinationError(f"several unfinished jobs exist for `{place}`", lines, hints)
    [(directory, found)] = jobs.items()
    return _commit(place, directory, found, progress)


def _commit(
    place: location.Location, directory: location.Location, found: Found, progress: Progress | None
) -> bool:
    """Commits the job in a directory."""
    about = found.documents[0]
    job = Job(place, directory, tuple(about["directories"]), about["job"], about["count"])
    try:
        with committing.disk_errors(place):
            job = dataclasses.replace(job, directory=committing.taken(place, directory, found))
        unshared = committing.chosen(job, found)[UNSHARED]
        arrays = [a for entry in unshared["entries"] for a in entry["record"]["arrays"].values()]
        nbytes = (math.prod(a["shape"]) * parse_dtype(a["dtype"]).itemsize for a in arrays)
        attempt = Attempt(job)
        with committing.attempted(attempt, whole=True):
            report = counted(sum(nbytes) if unshared["verify"] else 0, progress)
            complete(attempt, report, unshared.get("replaced"), unshared["verify"])
    except (errors.ReshardError, ValueError) as error:
        if not (place.is_local and found.parts):
            raise
        left = [path for path, each in committing.jobs(place).items() if each.parts]
        if not left and _is_complete(place):  # another process has completed the job meanwhile
            return False
        if job.directory not in left:
            raise job.ended() from error
        raise
    return True


def _is_complete(place: location.Location) -> bool:
    """Whether a job has been completed at a place."""
    name = FILE if place.is_local else detection.MARKER
    return any(entry.path.rpartition("/")[2] == name for entry in place.walk())


def complete(
    attempt: Attempt,
    report: Report,
    seen: Sequence[Seen] | None,
    verify: bool,
    doubted: Collection[str] = (),
    source: Iterable[identity.Identity] = (),
) -> None:
    """Commits a job whose parts are all written, if the source has not changed: merges databases
    and digests. If it is to `verify`, it first reads back all arrays; otherwise it reads back
    the arrays whose names are `doubted`. The `source` is as this process has opened it, if
    it has."""
    job = attempt.job
    with concurrent.futures.ThreadPoolExecutor(_DOCUMENTS) as pool:
        parts = committing.chosen(job, look(job.directory))
        unshared = parts[UNSHARED]
        unchanged = pool.submit(check_source, source or siblings.source_of(unshared["source"]), job)
        staged = {path: name for path, (name, _) in unshared["files"].items()}
        hashes = {
            staged[job.path(number, name)]: text
            for number, entry in enumerate(unshared["entries"])
            for name, text in entry["record"]["files"].items()
        }
        hashed = pool.map(lambda name: (job.directory / name).sha256(), hashes)
        unchanged.result()
        written = [written_of(document) for document in parts.values()]
        files: dict[str, bytes | str] = {**staged}
        kept: list[str] = []
        checked: dict[int, tuple[bytes | None, Mapping[str, Any]]] = {}
        for number, entry in enumerate(unshared["entries"]):
            own = [each[number] for each in written if number in each]
            arrays = _with_digests(entry, own)
            record = {**entry["record"], "arrays": arrays}
            files[job.path(number, FILE)] = json.dumps(record).encode()
            chunks = [pair for each in own for pair in each.chunks.items()]
            if len(dict(chunks)) < len(chunks):
                raise errors.CorruptCheckpointError(SAME_CHUNK)
            files |= {job.path(number, name): job.path(number, file) for name, file in chunks}
            manifest = None
            if entry["ocdbt"] and arrays:
                manifest, nodes = _merge(attempt, number, entry, own, unshared["max_memory"])
                files[job.path(number, MANIFEST)] = manifest
                data = (file for each in own for file in each.files)
                kept += [job.path(number, file) for file in dict.fromkeys([*data, *nodes])]
            again = {name: a for name, a in arrays.items() if verify or name in doubted}
            if again and (manifest or job.destination.is_local):
                checked[number] = manifest, again
        if wrong := [n for n, found in zip(hashes, hashed, strict=True) if found != hashes[n]]:
            text = "the values read back differ from those written"
            places = [f"`{job.directory / name}`" for name in wrong]
            raise errors.CorruptCheckpointError(text, places, [committing.OVERWRITE])
    markers = [(path, files.pop(path)) for path in unshared["last"]]
    markers += [(path, text.encode()) for path, text in unshared["markers"].items()]
    needed = {path for document in parts.values() for path, _ in committing.needed(job, document)}
    dropped = [path for path in needed - {*kept} if not is_of_an_attempt(path)]
    result = committing.Result(files, markers, kept, dropped, unshared["folders"])
    check = functools.partial(_check, attempt, parts, result, checked, report)
    committing.publish(attempt, result, seen, check)


def _check(
    attempt: Attempt,
    parts: Mapping[str, Mapping[str, Any]],
    result: committing.Result,
    checked: Mapping[int, tuple[bytes | None, Mapping[str, Any]]],
    report: Report,
) -> None:
    """Reads back arrays of items. Raises CorruptCheckpointError if values differ, and discards the
    parts that wrote them."""
    unshared = parts[UNSHARED]
    for number, (manifest, arrays) in checked.items():
        entry = unshared["entries"][number]
        handles = _unpublished(attempt, number, entry, manifest, arrays)
        if wrong := documents.read_back(handles, arrays, unshared["max_memory"], report):
            bad = {}
            for part, document in parts.items():
                own = written_of(document).get(number, Written()).digests
                if not wrong.keys().isdisjoint(own):
                    bad[part] = document
            committing.discard(attempt.job, bad, result)
            raise errors.CorruptCheckpointError(
                documents.NOT_READ_BACK,
                list(wrong.values()),
                [committing.REWRITE if bad else entry["verify"]],
            )


def _merge(
    attempt: Attempt, number: int, entry: Mapping[str, Any], written: Sequence[Written], limit: int
) -> tuple[bytes, set[str]]:
    """Builds the root database of an item. Returns its manifest, and the files of its nodes."""
    directory = attempt.job.item_directory(number)
    databases = []
    for each in written:
        for own, keys in each.databases.items():
            if own.endswith("linked"):
                spec = ocdbt_spec(directory, directory / own)
            else:
                spec = stage_spec(directory, own, entry["file_bytes"])
            databases.append((spec, keys))
    manifest = build_root(directory, attempt.name(ROOT, ""), databases, limit, CACHE_BYTES)
    return manifest, node_files(directory, manifest)


def _unpublished(
    attempt: Attempt,
    number: int,
    entry: Mapping[str, Any],
    manifest: bytes | None,
    names: Iterable[str],
) -> Iterator[ArrayHandle]:
    """The arrays of an item with these names, before the commit."""
    directory, place = attempt.job.item_directory(number), None
    if entry["format"] == "safetensors":
        yield from (h for h in open_checkpoint(directory).arrays if stored_name(h.path) in names)
        return
    if manifest is not None and not directory.is_local:
        place = directory / attempt.name(ROOT, "")
        (place / MANIFEST).write(manifest)
    parts = () if manifest is None else ("",)
    store = ArrayStore(entry["zarr3"], directory, parts, entry["omits_fill"], manifest=place)
    yield from documents.stored_arrays(store, names)


def _with_digests(entry: Mapping[str, Any], written: Sequence[Written]) -> dict[str, Any]:
    """The record of an item's arrays, with the digests of rewritten arrays: the sums of the shares'
    digests. Raises CorruptCheckpointError if they differ from the recorded digests of the
    source."""
    wrong, short = [], []
    arrays = dict(entry["record"]["arrays"])
    for name, (expected, path) in entry["rewritten"].items():
        array = arrays[name]
        shape = tuple(array["shape"])
        digest = Digest(shape, parse_dtype(array["dtype"]))
        for each in written:
            if name in each.digests:
                digest.merge(each.digests[name])
        if not digest.complete:
            short.append(f"{path}  {array_text(array['dtype'], shape)}")
            continue
        text = digest.text()
        if expected not in (None, text):
            wrong.append(f"{path}  {array_text(array['dtype'], shape)}")
        arrays[name] = {**array, "digest": text}
    if short:
        raise errors.CorruptCheckpointError("the shares do not hold each array exactly once", short)
    if wrong:
        raise documents.other_values(entry["path"], wrong, entry["verify"])
    return arrays
