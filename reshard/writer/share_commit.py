"""`commit`: the shares of a job become a checkpoint, whole or not at all.

It knows what the documents of the shares say: no plan, no model. It can be stopped anywhere and run
again: what it merges is written anew until that is durable and noted, and what it renames or marks
is renamed or marked once.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reshard.arrays.digests import Digest
from reshard.arrays.dtypes import parse_dtype
from reshard.checkpoint import Item
from reshard.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DestinationError,
)
from reshard.hints import Hint
from reshard.loader.detection import MARKER, TREE_FILE
from reshard.storage import bucket, posix
from reshard.storage.location import Location, parse_location
from reshard.storage.lock import Lock
from reshard.storage.ocdbt import node_files, ocdbt_spec
from reshard.units import format_runs
from reshard.verify.digest_record import FILE
from reshard.verify.values import Progress, counted
from reshard.writer import database, directory_commit
from reshard.writer.directory_commit import shares_directory
from reshard.writer.recording import check_written, other_values
from reshard.writer.share_job import (
    JOB,
    MERGED,
    NAMED,
    REST,
    Job,
    Written,
    anew,
    damaged,
    is_there,
    parse_written,
    read_document,
)
from reshard.writer.siblings import changed_paths, state_of, write_markers
from reshard.writer.stream import Report

LOCK = "lock"
# Bytes of memory that a key takes which is merged.
_KEY_BYTES = 1024


def commit(destination: str | os.PathLike, *, progress: Progress | None = None) -> bool:
    """Makes a checkpoint of the shares that `save(..., share=(i, n))` has written, once all of them
    are there: merges their databases and digests, and gives it its name, or in a bucket its
    markers. It may be repeated, also after it was stopped.

    Args:
      destination: what was given to `save`.
      progress: called with (bytes done, bytes in all) of what is read back, where the job verifies.

    Returns:
      Whether there was something to commit: False where the destination is complete.

    Raises:
      CheckpointNotFoundError: there are no shares of this destination.
      DestinationError: shares are missing, or what they have written is; or another process is
        committing them.
      CorruptCheckpointError: the source has changed, or what was read is not what its digests were
        recorded of.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "1x8")
      >>> for i in range(4):
      ...     _ = reshard.save(ckpt, "out/1000", share=(i, 4))
      >>> reshard.commit("out/1000")
      True
    """
    place = parse_location(destination)
    outer = shares_directory(place)
    if not place.is_local and not (outer / JOB).exists():
        return _complete_already(place)
    try:
        lock = Lock(outer / LOCK, place)
    except (FileNotFoundError, NotADirectoryError):
        return _complete_already(place)
    try:
        document = read_document(outer / JOB)
        if document is None:  # a commit may have been killed at its very end
            for name in outer.names():
                if name == NAMED or name.startswith(f"{LOCK}."):
                    (outer / name).remove()
            return _complete_already(place)
        committed_job(document, lock, lambda whole: counted(whole, progress))
    finally:
        lock.release()
        if outer.is_local:
            posix.remove_empty(outer)
    return True


def _complete_already(destination: Location) -> bool:
    """False where there is a checkpoint; raises CheckpointNotFoundError where nothing is."""
    if destination.is_local:
        complete = destination.is_dir()
    else:
        complete = any(
            (destination / name / MARKER).exists() for name in ("", *destination.directories())
        )
    if complete:
        return False
    raise CheckpointNotFoundError(
        f"there are no shares of `{destination}`",
        hints=[Hint(("share",), " writes one of them")],
    )


def committed_job(
    document: Mapping[str, Any], lock: Lock, counting: Callable[[int], Report]
) -> None:
    """Commits a job whose lock is held, and removes all that is left of it. `counting`
    gives what is told of bytes that are read back, of so many in all."""
    job = parsed_job(document)
    if not _is_named(job, document):
        _check_source(job, document)
        merged = job.document(MERGED)
        merged = _merged(job, lock) if merged is None else merged
        _check_files(job, merged, [anew(job.outer)])
        _finish(job, document, merged, lock, counting)
    if document["overwrite"] and job.destination.is_local:
        directory_commit.finish_replacing(job.destination)
    _remove(job, lock)


def parsed_job(document: Mapping[str, Any]) -> Job:
    """The job of `job.json`; raises DestinationError for anything else."""
    try:
        return Job.parse(document)
    except (KeyError, TypeError) as error:
        raise damaged(Location(f"{document.get('destination')}") / JOB) from error


def _is_named(job: Job, document: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has its name, or its last marker: all that is left is to clear up."""
    if job.destination.is_local:
        gone = not (job.item_directory(0) / TREE_FILE).exists()
        return job.destination.exists() and gone and job.document(NAMED) is not None
    return (job.destination / document["markers"][-1]).exists()


def _check_source(job: Job, document: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpointError if files of the source have changed since the plan was made."""
    then = document["fingerprint"]["source"]
    changed = changed_paths(then, state_of(map(Location, then)))
    if changed:
        told = [f"`{path}`" for path in changed]
        hints = [anew(job.outer)]
        raise CorruptCheckpointError("the source changed while it was read", told, hints)


def _merged(job: Job, lock: Lock) -> dict[str, Any]:
    """Merges what all shares have written, and says so in a document: for each item its data files,
    and what is recorded of it, digests of all arrays among that. Raises DestinationError where
    shares are missing."""
    names = [f"{number}.json" for number in range(job.count)]
    documents = job.documents([REST, *names])
    missing = [number for number, name in enumerate(names) if name not in documents]
    rest = documents.get(REST)
    if rest is None or missing:
        raise _missing(job, rest is None, missing)
    parts = {name: parse_written(job.outer / name, found) for name, found in documents.items()}
    _check_shares(job, parts)
    items = []
    for number, entry in enumerate(rest["rest"]):
        written = [part[number] for part in parts.values() if number in part]
        record = _with_digests(entry, written)
        if entry["ocdbt"]:
            lock.check()
            _merge(job.item_directory(number), entry, written, job)
        files = {file: size for each in written for file, size in each.files.items()}
        items.append({**entry, "files": files, "record": record})
    if job.outer.is_local:
        posix.sync(job.directory)
    document = {"items": items, "beside": rest["beside"], "last": rest["last"]}
    lock.check()
    job.write_document(MERGED, document)
    return document


def _missing(job: Job, rest: bool, missing: Sequence[int]) -> DestinationError:
    """The error for shares that are to be written, as a range that an array job takes."""
    numbers = sorted({*missing, 0} if rest else missing)
    problems = [f"missing: {format_runs(numbers)}"]
    if rest:
        problems.append("share 0 writes what is in no share, and has not done so")
    problems += job.running(numbers)
    count = len(numbers)
    return DestinationError(
        f"{count} of {job.count} shares of `{job.destination}` {'is' if count == 1 else 'are'} "
        "not complete",
        problems,
        [Hint("write what is missing: ", ("array", format_runs(numbers)))],
    )


def _check_shares(job: Job, parts: Mapping[str, Mapping[int, Written]]) -> None:
    """Raises DestinationError with the shares of which data files are gone, or are not what they
    were; these can be written again."""
    sizes = {number: _sizes(job.item_directory(number)) for number in range(len(job.items))}
    gone = [
        name
        for name, part in parts.items()
        if any(
            not is_there(sizes[number].get(file), size)
            for number, written in part.items()
            for file, size in written.all_files.items()
        )
    ]
    if gone:
        numbers = [int(name.partition(".")[0]) for name in gone if name != REST]
        raise _missing(job, REST in gone, numbers)


def _sizes(directory: Location) -> dict[str, int]:
    return {found.path: found.nbytes for found in directory.walk() if found.is_file}


def _check_files(job: Job, merged: Mapping[str, Any], hints: Sequence[str]) -> None:
    """Raises DestinationError unless all that was written is there: as where a manager of
    checkpoints has swept some of it away."""
    sizes = _sizes(job.directory)
    expected = dict(merged["beside"])
    for place, item in zip(job.items, merged["items"], strict=True):
        prefix = f"{place}/" if place else ""
        expected |= {f"{prefix}{file}": size for file, size in item["files"].items()}
    gone = [file for file, size in expected.items() if not is_there(sizes.get(file), size)]
    if gone:
        told = [f"`{job.directory / file}`" for file in gone]
        raise DestinationError("files were removed or changed since they were written", told, hints)


def _with_digests(entry: Mapping[str, Any], written: Sequence[Written]) -> dict[str, Any]:
    """What is to be recorded of an item, with the digests of what was rewritten: sums of what the
    shares have. Raises CorruptCheckpointError where they are not what is recorded of the source."""
    record = entry["record"]
    wrong, short = [], []
    arrays = dict(record["arrays"])
    for name, (expected, told) in entry["rewritten"].items():
        array = arrays[name]
        digest = Digest(tuple(array["shape"]), parse_dtype(array["dtype"]))
        for each in written:
            if name in each.digests:
                digest.merge(each.digests[name])
        if not digest.complete:
            short.append(told)
            continue
        text = digest.text()
        if expected not in (None, text):
            wrong.append(told)
        arrays[name] = {**array, "digest": text}
    if short:
        raise CorruptCheckpointError("the shares are not all of these arrays, once", short)
    if wrong:
        raise other_values(entry["path"], wrong, Hint(tuple(entry["verify"])))
    return {**record, "arrays": arrays}


def _merge(
    directory: Location, entry: Mapping[str, Any], written: Sequence[Written], job: Job
) -> None:
    """Writes the root database of an item."""
    databases = []
    if entry["linked"] is not None:
        apart = directory / entry["linked"]
        databases.append((ocdbt_spec(directory, apart), entry["linked_keys"]))
    for each in written:
        databases += [
            (database.stage_spec(directory, stage, entry["file_bytes"]), keys)
            for stage, keys in each.stages.items()
        ]
    if databases:
        database.merge_databases(directory, databases, most_keys(job.max_memory))


def most_keys(max_memory: int) -> int:
    """Keys that are merged in one transaction."""
    return max_memory // (2 * _KEY_BYTES)


def _finish(
    job: Job,
    document: Mapping[str, Any],
    merged: Mapping[str, Any],
    lock: Lock,
    counting: Callable[[int], Report],
) -> None:
    """What follows the merge: deletes what nothing refers to, writes records, and gives the
    checkpoint its name, or its markers."""
    destination, markers = job.destination, document["markers"]
    for number, item in enumerate(merged["items"]):
        directory = job.item_directory(number)
        if item["ocdbt"]:
            needed = {*item["files"], *node_files(directory)}
            database.prune_all_but(directory, needed, lock.check)
        if directory.is_local:
            posix.remove_locks(directory)
        (directory / FILE).write(json.dumps(item["record"]).encode())
    if document["verify"]:
        _verify(job, merged, counting)
    lock.check()
    if destination.is_local:
        posix.sync(job.directory)
        write_markers(markers, job.directory, destination)
        job.write_document(NAMED, {})
        directory_commit.swap(job.directory, destination, document["overwrite"])
        directory_commit.finish(destination, None)
        return
    for path, source in merged["last"].items():
        Location(source).copy(destination / path)
    for marker in markers:
        lock.check()
        write_markers([marker], destination, destination)


def _verify(job: Job, merged: Mapping[str, Any], counting: Callable[[int], Report]) -> None:
    """Reads back all that was written."""
    written = [
        (Item(job.directory, kind, v1, step, name, (), ()), item)
        for item in merged["items"]
        for kind, v1, step, name in [item["source"]]
    ]
    arrays = [array for item in merged["items"] for array in item["record"]["arrays"].values()]
    whole = sum(math.prod(a["shape"]) * parse_dtype(a["dtype"]).itemsize for a in arrays)
    report = counting(whole)
    for where, item in written:
        hint = Hint(tuple(item["verify"]))
        check_written(where, item["record"]["arrays"].keys(), hint, job.max_memory, report)


def _remove(job: Job, lock: Lock) -> None:
    """Removes what is left of a job, but the lock: at the end what says that there is one, and that
    it has its name."""
    kept = (JOB, NAMED, LOCK)
    if job.outer.is_local:
        for name in job.outer.names():
            if name not in kept:
                posix.remove(job.outer / name)
    else:
        found = (file.path for file in job.outer.walk() if file.is_file)
        bucket.remove_files(job.outer, [path for path in found if path not in kept], lock.check)
    for name in (JOB, NAMED):
        (job.outer / name).remove()


def discard(job: Job, document: Mapping[str, Any], lock: Lock) -> None:
    """Removes all that a job has written, which nobody writes to any more, unless that is complete:
    then it only clears up."""
    if not (job.destination.is_local or _is_named(job, document)):
        names = [found.path for found in job.destination.walk() if found.is_file]
        bucket.remove_files(job.destination, names, lock.check)
    _remove(job, lock)
