"""A destination in a bucket, where nothing is renamed: it is written where it will be, and is no
checkpoint for anybody until its markers are there, which are written last."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from reshard.arrays.handle import stored_name
from reshard.checkpoint import Checkpoint
from reshard.engine.budget import copy_bytes
from reshard.errors import (
    DestinationError,
    DestinationExistsError,
    MemoryLimitError,
    ReshardError,
)
from reshard.hints import Hint
from reshard.loader.detection import MARKER, PROGRESS_FILE, TREE_FILE, manager_steps
from reshard.storage import bucket, posix
from reshard.storage.location import Location
from reshard.storage.lock import Lock
from reshard.storage.posix import Entry
from reshard.units import format_bytes, whole_kib
from reshard.writer.directory_commit import UNFINISHED_PREFIX, check_apart
from reshard.writer.job_plan import Plan
from reshard.writer.journal import CLEAR, Journal
from reshard.writer.share_job import check_none
from reshard.writer.siblings import WRITTEN, Sibling, is_marker, marker_places, write_markers
from reshard.writer.target_format import TargetFormat

# Bytes of data files that Orbax writes to gs. TensorStore holds each in memory until it is there.
GS_FILE_BYTES = 400 << 20
_BY_HAND = "name a new destination, or delete what is there"
# The lock of a destination: where that is, and its name.
_LOCK = re.compile(rf"^(.*/)?{re.escape(UNFINISHED_PREFIX)}([^/]+)\.lock$", re.DOTALL)


def check_destination(destination: Location, checkpoints: Sequence[Checkpoint]) -> None:
    """Raises DestinationError unless a job may write these there. What an earlier run has not
    completed is looked at when the lock is held."""
    check_apart(destination, checkpoints[0].source.root)
    if destination == destination.parent:
        raise DestinationError(
            f"`{destination}` is a whole bucket", hints=[f"a name in it: {destination}/1000"]
        )
    parent = destination.parent
    with concurrent.futures.ThreadPoolExecutor(1) as pool, parent.remembered():
        # While it is seen what is in the parent.
        above = pool.submit((parent.parent / MARKER).is_file)
        inside = (parent / MARKER).is_file()
        if inside or above.result():  # and what is in it is taken to be so, too
            raise DestinationError(
                f"`{destination}` is inside of `{parent if inside else parent.parent}`, which is "
                "complete",
                hints=["write to a prefix beside it"],
            )
        if destination.is_file():
            text = f"`{destination}` is an object, and not a prefix of others"
            raise DestinationExistsError(text)
        there = destination.is_dir()
        folders = [destination]
        if there and checkpoints[0].source.kind == "manager":
            folders += [destination / name for name in destination.directories()]
        complete = there and any((folder / MARKER).exists() for folder in folders)
        complete = complete and not (destination / PROGRESS_FILE).exists()
        complete = complete and _left_journal(destination) is None
    if complete:
        raise DestinationExistsError(
            f"`{destination}` is complete, and a bucket has no renames to replace it with",
            hints=["write to another prefix, and delete this one when you have looked at it"],
        )


def warnings_of(destination: Location) -> list[str]:
    """What the user should know of where a job writes."""
    parent = destination.parent
    if not set(manager_steps(parent).values()) - {destination.name}:
        return []
    return [
        f"`{parent}` holds steps: a CheckpointManager that cleans up deletes what is not complete "
        "there, and so this job's; another prefix is safe"
    ]


def limited(form: TargetFormat, destination: Location, max_memory: int) -> TargetFormat:
    """A format whose data files are small enough to be held in memory until they are there, and
    with which all chunks are there: one that is not is seen to be lost."""
    most = GS_FILE_BYTES if destination.path.startswith("gs:") else form.file_bytes
    return dataclasses.replace(
        form, file_bytes=min(form.file_bytes, most, max_memory // 4), fills=False
    )


def object_errors(found: Sequence[Sibling], max_memory: int) -> list[ReshardError]:
    """Files that are copied as one object each, of which one does not fit into memory."""
    large = [sibling for sibling in found if copy_bytes(sibling.nbytes) > max_memory]
    if not large:
        return []
    least = copy_bytes(max(sibling.nbytes for sibling in large))
    return [
        MemoryLimitError(
            f"files that are copied do not fit in {format_bytes(max_memory)}",
            [f"`{s.source}` has {format_bytes(s.nbytes)}, and is written at once" for s in large],
            [Hint(("max_memory", whole_kib(least)), " is the least that copies it")],
            least,
        )
    ]


@contextlib.contextmanager
def committed_prefix(
    plan: Plan,
    destination: Location,
    stages: Sequence[str],
    *,
    resume: bool,
    unfinished: Callable[[Location], bool],
) -> Iterator[tuple[Location, Lock]]:
    """`destination`, with its lock, for a block that writes all of it. If it fails, what the plan
    has written is deleted, unless it is `unfinished`, as in `commit.committed_directory`. `stages`
    are the databases of staged writes."""
    lock = Lock(destination.beside(f"{UNFINISHED_PREFIX}{destination.name}.lock"), destination)
    done = [lock.release]
    try:
        with destination.parent.remembered():
            check_destination(destination, plan.checkpoints)
            check_none(destination)
            there = destination.is_dir()
            journal = _left_journal(destination)
            stopped = _journal_beside(destination).exists()
        if journal is not None:
            (destination / PROGRESS_FILE).write(journal)
        if stopped:
            _forget(destination)
        if there and not unfinished(destination):
            _clear_left(destination, lock, plan.overwrite, resume)
        try:
            yield destination, lock
        except BaseException as error:
            if note := _abandoned(plan, destination, stages, lock, unfinished):
                error.add_note(note)
            raise
        done.append(functools.partial(_forget, destination))
    finally:
        bucket.at_once(*done)


def commit(plan: Plan, there: Mapping[str, Entry], journal: Journal, lock: Lock) -> None:
    """Writes the markers of what a plan has written, which is `there`; before the last one, with
    which all is a checkpoint, the journal is removed, and is there again if that marker cannot be
    written. In between it is beside the destination, for a run after one that is killed then."""
    destination = plan.destination
    assert destination is not None
    *others, last = marker_places(plan.checkpoints, destination)
    for marker in others:
        lock.check()
        write_markers([marker], destination, destination)
    trees = [item.directory(destination) / TREE_FILE for item in plan.items]
    paths = [tree.below(destination) or "" for tree in trees]
    versions = {path: there[path].modified if path in there else posix.UNKNOWN for path in paths}
    kept = {"last": last, "trees": versions, "journal": journal.content().decode()}
    beside = _journal_beside(destination)
    told = posix.UNKNOWN not in versions.values()
    bucket.at_once(lock.check, journal.check)
    if told:
        beside.write(json.dumps(kept).encode())
    lock.check()  # as late as possible, before anything of another job's could be removed
    try:
        journal.close()
        write_markers([last], destination, destination)
    except BaseException:
        journal.begin()
        _forget(destination)
        raise


def _forget(destination: Location) -> None:
    """Removes the journal that is beside a destination: it says nothing of what is complete."""
    with contextlib.suppress(ReshardError):
        _journal_beside(destination).remove()


def _journal_beside(destination: Location) -> Location:
    return destination.beside(f"{UNFINISHED_PREFIX}{destination.name}.journal")


def _left_journal(destination: Location) -> bytes | None:
    """The journal of a job that was stopped between its removal and the last marker; None where
    there is none, or what is at the destination is not what that job has written."""
    data = _journal_beside(destination).read()
    if data is None or (destination / PROGRESS_FILE).exists():
        return None
    try:
        kept = json.loads(data)
        last, versions, journal = kept["last"], kept["trees"].items(), kept["journal"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    found = [((destination / path).entry(), version) for path, version in versions]
    same = all(entry is not None and entry.modified == version for entry, version in found)
    return journal if found and same and not (destination / last).exists() else None


def _clear_left(destination: Location, lock: Lock, overwrite: bool, resume: bool) -> None:
    """Deletes what an earlier run has left, if it is that, and if it may be."""
    names = _files(destination)
    if PROGRESS_FILE not in names:
        raise DestinationExistsError(
            f"`{destination}` exists, and is no unfinished job's", hints=[_BY_HAND]
        )
    # A job that had another plan, or the training itself, may have completed something here.
    if kept := [name for name in names if is_marker(name) or _LOCK.search(name)]:
        raise DestinationExistsError(
            f"`{destination}` holds what an earlier run has not completed, and also what is "
            "complete, or what another job writes",
            [f"`{destination / name}`" for name in kept],
            [_BY_HAND],
        )
    if not overwrite:
        going_on = Hint(("resume", True), " goes on with it if that was given then, too")
        raise DestinationExistsError(
            f"`{destination}` holds what an earlier run has not completed",
            hints=[CLEAR] if resume else [going_on, CLEAR],
        )
    if left := _delete(destination, names, lock):
        raise DestinationError(
            f"what an earlier run has left in `{destination}` cannot be deleted",
            [f"`{destination / name}`" for name in left],
        )


def _files(directory: Location) -> list[str]:
    return [found.path for found in directory.walk() if found.is_file]


def _written(plan: Plan, destination: Location, stages: Sequence[str]) -> list[str]:
    """What is there that a plan writes, and nothing that is another job's: nothing below a marker
    that is not the plan's, nor of a destination that is locked."""
    own = {
        PROGRESS_FILE,
        *marker_places(plan.checkpoints, destination),
        *(sibling.path for sibling in plan.siblings),
    }
    tops = []
    for item in plan.items:
        inside = item.directory(destination).below(destination)
        names = {*WRITTEN, *stages}
        if not item.format.ocdbt:
            names |= {stored_name(handle.path).partition("/")[0] for handle in item.handles}
        tops += [f"{inside}/{name}/".lstrip("/") for name in names]
    found = _files(destination)
    others = [name.removesuffix(MARKER) for name in found if is_marker(name) and name not in own]
    others += [f"{match[1] or ''}{match[2]}/" for name in found if (match := _LOCK.search(name))]
    return [
        name
        for name in found
        if (name in own or f"{name}/".startswith(tuple(tops)))
        and not any(name.startswith(other) for other in others)
    ]


def _delete(destination: Location, names: Sequence[str], lock: Lock) -> list[str]:
    """Deletes files as long as the lock is held: what makes it a checkpoint first, and what makes
    it known as an unfinished one last. What could not be deleted."""
    markers = [name for name in names if is_marker(name)]
    last = [name for name in names if name == PROGRESS_FILE]
    others = [name for name in names if name not in {*markers, *last}]
    left: list[str] = []
    for some in (markers, others, last):
        left += bucket.remove_files(destination, some, lock.check) if not left else some
    return left


def _abandoned(
    plan: Plan,
    destination: Location,
    stages: Sequence[str],
    lock: Lock,
    unfinished: Callable[[Location], bool],
) -> str:
    """Deletes what a job that has failed has written. What is to be said of what is left."""
    try:
        lock.check()
        if unfinished(destination) or _journal_beside(destination).exists():
            return Hint(
                f"`{destination}` is kept, uncommitted: ",
                ("same",),
                " with ",
                ("resume", True),
                " goes on with it",
            )
        left = _delete(destination, _written(plan, destination, stages), lock)
    except ReshardError as error:
        return Hint(f"`{destination}` is left, uncommitted ({error.summary}): ", *CLEAR.parts)
    if not left:
        return ""
    return Hint(
        f"`{destination}` is left, uncommitted, with {len(left)} objects that could not be "
        "deleted: ",
        *CLEAR.parts,
    )
