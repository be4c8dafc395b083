"""The commit: the parts of a job become a checkpoint, completely or not at all.

There is no lock and no clock. Other jobs may write to the same destination. Any process may stop
anywhere, for any time, and go on. A request may arrive late, twice, or be done although its answer
is lost. One step decides:

- on a disk, the rename of the job's directory to the destination. It fails if the name is taken;
with `overwrite` it exchanges the two. Before that, the directory gets a name that no other process
uses: of two commits at once, the second would exchange the old checkpoint back;
- in a bucket, the creation of the commit record, if it is absent. It names the parts that count,
and the contents of all names without a token. Before it, no such name exists, and it is never
replaced. Every process that finds it only goes forward: it creates each of these names if it is
absent, the markers last, and then deletes the files that the record does not name.
"""

import base64
import concurrent.futures
import contextlib
import itertools
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import (
    DestinationError,
    DestinationExistsError,
    KeptFilesError,
    ReshardError,
)
from reshard.loader import detection, inventory
from reshard.storage import disk
from reshard.storage.bucket import BucketLocation
from reshard.storage.location import Location
from reshard.storage.machine import has_ended
from reshard.storage.ocdbt import MANIFEST, PROCESS, value_files
from reshard.tree import as_python, shell_quoted
from reshard.units import format_runs
from reshard.writer import replaced
from reshard.writer.job import (
    ROOT,
    UNSHARED,
    Attempt,
    Found,
    Job,
    dumped,
    is_of_an_attempt,
    look,
    parsed,
    writers,
)

# Ends the name of a job's directory while an attempt commits it; the attempt's token is before it.
_COMMITTING = ".commit"
_PREFIX, _ENDS = re.escape(inventory.UNFINISHED_PREFIX), re.escape(_COMMITTING)
JOB_NAME = re.compile(rf"{_PREFIX}(.+)\.([0-9a-f]{{16}})({_ENDS})?", re.DOTALL)
# Requests at once, and bytes of an object that is copied on the server.
_REQUESTS = 32
_LARGE = 16 << 20
# Commands that `--resume` continues.
_COMMANDS = ("reshard ckpt ", "reshard convert ", "reshard export ")
RESUME = "resume=True continues it"
OVERWRITE = "overwrite=True starts again"
REWRITE = "resume=True writes their shares again"


class Result(NamedTuple):
    """The result of a job: the contents of all names without a token, after the commit.

    Attributes:
      files: path -> its bytes, or the path of an attempt's file that has them.
      markers: the same for the commit markers, in order.
      kept: files of attempts that the checkpoint refers to.
      dropped: files at names without a token that it does not refer to.
      folders: directories, which exist on a disk even if they are empty.
    """

    files: Mapping[str, bytes | str]
    markers: Sequence[tuple[str, bytes | str]]
    kept: Sequence[str]
    dropped: Sequence[str]
    folders: Sequence[str]


# Before anything is written.


def begin(
    destination: Location,
    token: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    shared: bool = False,
) -> tuple[Location, Found | None, frozenset[str]] | None:
    """The directory of a job, the parts that it can use, and the tokens of attempts that do not
    count. None if the job to resume is complete.

    Args:
      token: of the job.
      resume: use the parts that an earlier run has written.
      overwrite: ignore leftovers, and on a disk an existing destination.
      shared: other processes write other shares of the job.

    Raises:
      DestinationError: another job writes there or has left parts, the job to resume is a
        different one, or the destination is complete.
    """
    if destination.is_local:
        _recover(destination)
    start = _beside(destination, token if shared else secrets.token_hex(8)), None, frozenset[str]()
    for path, found in jobs(destination).items():
        if not path.is_local and _is_committed(path, found, token if resume else None):
            return None
        foreign = [d for d in found.documents if d["job"] != token]
        alone = not shared or path.name.endswith(_COMMITTING)
        begun = [d for d in found.begun if alone or d["job"] != token]
        ended = [(document, has_ended(document["owner"])) for document in begun]
        running = [document for document, has in ended if has is False]
        unknown = [document for document, has in ended if has is None]
        if running or (unknown and not (resume or overwrite)):
            text = f"another job is writing `{destination}`"
            hints = ["wait until it ends", RESUME, OVERWRITE]
            raise DestinationError(text, writers(running or unknown), hints)
        goes_on = resume or shared
        if goes_on and foreign and found.parts:
            text = f"the unfinished job for `{destination}` is not this job"
            problems = [
                "its arguments, its source or its version of reshard differ from those of this job"
            ]
            hints = [restart_hint(path) if shared else OVERWRITE]
            raise DestinationError(text, [*problems, *writers(foreign)], hints)
        if not (goes_on or overwrite) and (found.parts or not (path.is_local or not found.sizes)):
            left = "finished" if found.parts.keys() - {UNSHARED} else "files but no finished"
            text = f"a stopped job left {left} shares of `{destination}`"
            raise DestinationExistsError(text, writers(found.documents), [RESUME, OVERWRITE])
        if goes_on and found.documents and not foreign:
            start = taken(destination, path, found), found, frozenset[str]()
        elif not path.is_local:
            start = path, None, found.tokens
        elif path != start[0] and not (found.parts or unknown or overwrite):
            remove_aside(destination, path)
    return start


def replaced_checkpoints(destination: Location) -> list[Location]:
    """The checkpoints that jobs for a destination on a disk have put aside."""
    parent, name = destination.parent, re.escape(f"{destination.name}{inventory.REPLACED_SUFFIX}")
    names = parent.names() if parent.is_dir() else ()
    return [parent / each for each in names if re.fullmatch(rf"{name}(\.[0-9a-f]{{16}})?", each)]


def standing(destination: Location) -> Location:
    """Where the checkpoint of a destination is: a job that was stopped between two renames has put
    it aside, and the next job gives it its name back."""
    if not destination.exists():
        for directory in directories(destination):
            aside = _aside(directory, destination)
            if directory.name.endswith(_COMMITTING) and aside.exists():
                return aside
    return destination


def _recover(destination: Location) -> None:
    """Goes on with what a job has begun that was stopped at its commit: gives an old checkpoint
    its name back, or deletes it. All that no plan has seen stays.

    Each name is used once, so no other job puts a checkpoint under one of these names meanwhile.
    """
    for place in directories(destination):
        if not _holds_job(place, look(place)):  # stopped after an exchange
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                disk.rename(place, _aside(place, destination))
    if (place := standing(destination)) != destination:
        disk.rename(place, destination)
    elif aside := replaced_checkpoints(destination):
        unshared = look(destination).parts.get(UNSHARED, {}).values()
        seen = [each for document in unshared for each in document.get("replaced") or ()]
        for place in aside:
            replaced.remove_seen(place, seen)


def _aside(directory: Location, destination: Location) -> Location:
    """Where the old checkpoint is put that an attempt has left in a directory."""
    return destination.parent / f"{destination.name}{inventory.REPLACED_SUFFIX}.{_token(directory)}"


def _beside(destination: Location, token: str) -> Location:
    return destination.parent / f"{inventory.UNFINISHED_PREFIX}{destination.name}.{token}"


def jobs(destination: Location) -> dict[Location, Found]:
    """The directories of a destination's jobs, with their contents."""
    if not destination.is_local:
        return {destination: look(destination)}
    every = {place: look(place) for place in directories(destination)}
    return {place: found for place, found in every.items() if _holds_job(place, found)}


def directories(destination: Location) -> list[Location]:
    """The directories beside a destination that have names of jobs."""
    names = destination.parent.names() if destination.parent.is_dir() else ()
    matches = filter(None, map(JOB_NAME.fullmatch, names))
    return [destination.parent / match[0] for match in matches if match[1] == destination.name]


def _holds_job(directory: Location, found: Found) -> bool:
    """Whether a directory that has the name of a job holds one. A directory that an attempt
    commits holds files of this attempt, and after the exchange it holds the old checkpoint."""
    return not directory.name.endswith(_COMMITTING) or any(
        _token(directory) in path for path in found.sizes
    )


def _token(directory: Location) -> str:
    return directory.name.removesuffix(_COMMITTING).rpartition(".")[2]


def taken(destination: Location, directory: Location, found: Found) -> Location:
    """The directory of a job. If an attempt to commit was stopped, its private name is given up:
    nobody writes under such a name, so that what is there is the job or the old checkpoint."""
    if not directory.name.endswith(_COMMITTING):
        return directory
    if running := [d for d in found.begun if has_ended(d["owner"]) is False]:
        text = f"another process commits the job for `{destination}`"
        raise DestinationError(text, writers(running), ["wait until it ends"])
    place = _beside(destination, secrets.token_hex(8))
    disk.rename(directory, place)
    if not any(_token(directory) in entry.path for entry in place.walk()):  # it has just exchanged
        disk.rename(place, directory)
        raise DestinationError(f"another process has committed the job for `{destination}`")
    return place


def share_count(destination: Location) -> int | None:
    """The number of shares of a destination's unfinished job; None without one."""
    return next((found.count for found in jobs(destination).values() if found.documents), None)


def restart_hint(left: Location) -> str:
    """How to start without the leftovers of a job."""
    removes = f"rm -r {shell_quoted(str(left))}" if left.is_local else f"delete `{left}`"
    return f"{removes}, then start again"


def _is_committed(destination: Location, found: Found, token: str | None) -> bool:
    """Whether a prefix holds the checkpoint of a job, which is then completed. Raises
    DestinationError if it holds anything else."""
    names = [path for path in found.sizes if not is_of_an_attempt(path)]
    if detection.RECORD in names and forward(destination)[0]["job"] == token:
        return True
    if detection.RECORD in names or any(
        path.rpartition("/")[2] == detection.MARKER for path in names
    ):
        raise DestinationExistsError(
            f"`{destination}` is complete, and a complete checkpoint in a bucket is never replaced",
            hints=["write to another prefix, check the result, then delete this prefix"],
        )
    if names:
        raise DestinationExistsError(
            f"`{destination}` holds objects that reshard did not write",
            [f"`{destination / name}`" for name in names],
            ["write to another prefix, or delete these while no job runs"],
        )
    return False


def remove_aside(destination: Location, directory: Location) -> None:
    """Renames the directory of a job that has ended, then deletes it. A process that still writes
    there finds nothing to publish."""
    aside = _beside(destination, secrets.token_hex(8))
    with contextlib.suppress(FileNotFoundError):  # another process does the same
        disk.rename(directory, aside)
    aside.remove_tree()


def discard(job: Job, parts: Mapping[str, Mapping[str, Any]], result: Result) -> None:
    """Removes the documents of parts whose values are wrong, so that no commit uses them and
    `resume` writes them again. On a disk, the names without a token may refer to these parts and
    are removed too. Meanwhile the job's directory has another name, so nobody publishes it."""
    place = job.directory
    if place.is_local:
        place = _beside(job.destination, secrets.token_hex(8))
        disk.rename(job.directory, place)
        place.remove_files([*result.files, *(path for path, _ in result.markers)])
    for part, documents in look(place).parts.items():
        for token, document in documents.items():
            if document == parts.get(part):
                (place / job.path(0, f"{PROCESS}{token}/{part}.json")).remove()
    if place != job.directory:
        disk.rename(place, job.directory)


# The parts.


def whole_parts(job: Job, found: Found) -> dict[str, Mapping[str, Any]]:
    """For each part, the document of an attempt whose files are all complete."""
    whole: dict[str, Mapping[str, Any]] = {}
    for part, documents in found.parts.items():
        for token, document in sorted(documents.items()):
            counts = document["job"] == job.token and token not in job.ignored
            counts = counts and document["count"] == job.count
            sizes = ((found.sizes.get(path), size) for path, size in needed(job, document))
            if counts and all(
                n == size or (n is not None and disk.UNKNOWN in (n, size)) for n, size in sizes
            ):
                whole.setdefault(part, document)
    return whole


def chosen(job: Job, found: Found) -> dict[str, Mapping[str, Any]]:
    """The parts that become the checkpoint. Raises DestinationError with the missing shares, as a
    range for an array job."""
    whole = whole_parts(job, found)
    missing = [number for number in range(job.count) if str(number) not in whole]
    if missing or UNSHARED not in whole:
        numbers = sorted({*missing} if UNSHARED in whole else {*missing, 0})
        problems = [f"missing share numbers: {format_runs(numbers)}"]
        if UNSHARED not in whole:
            problems.append("share 0, which also writes documents and other items, is not finished")
        problems += [f"begun: {line}" for line in writers(found.begun)]
        count = len(numbers)
        commands = sorted({document["command"] for document in found.documents})
        jobs = [c for c in commands if c.startswith(_COMMANDS) and "--shard" not in c]
        hints = [*map(continued, jobs)]
        raise DestinationError(
            f"{count} of {job.count} shares of `{job.destination}` {'is' if count == 1 else 'are'} "
            "not complete",
            problems,
            hints or [f"write the missing shares: {format_runs(numbers)}"],
        )
    return whole


def continued(command: str) -> str:
    """The shell command that continues the job of a command."""
    return f"{command.removesuffix(' --resume')} --resume"


def needed(job: Job, document: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """Paths and bytes of all files that a part's document names."""
    for number, written in document["items"].items():
        for name, size in {**written["files"], **written["nodes"]}.items():
            yield job.path(number, name), size
    yield from document.get("files", {}).values()


@contextlib.contextmanager
def attempted(attempt: Attempt, whole: bool = False) -> Iterator[None]:
    """Runs an attempt. If it fails, its unpublished files are removed. For a `whole` job or its
    commit, the error then says what is left."""
    try:
        with disk_errors(attempt.job.destination):
            attempt.begin()
            yield
    except BaseException as error:
        with contextlib.suppress(ReshardError, OSError):
            attempt.abandon()
        if whole:
            with contextlib.suppress(ReshardError, OSError):
                _note_parts(attempt, error)
        raise
    if not whole:
        with contextlib.suppress(ReshardError):  # what it has done stands
            attempt.end()


def _note_parts(attempt: Attempt, error: BaseException) -> None:
    """Adds a note to the error that has ended a job: which parts are left."""
    job = attempt.job
    found = look(job.directory)
    count = sum(part != UNSHARED for part in found.parts)
    begun = [d for d in found.begun if has_ended(d["owner"]) is not True]
    others = begun or found.tokens - {attempt.token}
    if job.directory.is_local and not others and (job.count == 1 or not count):
        remove_aside(job.destination, job.directory)
    elif found.parts:
        kept = f"{count} of {job.count} shares are complete, and stay in"
        kept = kept if count else "the documents and other items are complete, and stay in"
        error.add_note(f"{kept} `{job.directory}`: {RESUME}")


@contextlib.contextmanager
def disk_errors(destination: Location) -> Iterator[None]:
    """Turns errors of the operating system into DestinationError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ReshardError):
            raise
        raise DestinationError(
            f"`{destination}` cannot be written: {error.strerror or error}",
            [str(error.filename)] if error.filename else [],
        ) from error


# The commit.


def publish(
    attempt: Attempt,
    result: Result,
    seen: Sequence[replaced.Seen] | None,
    check: Callable[[], object],
) -> None:
    """Makes a checkpoint of a job whose parts are all written, after `check`. On a disk it replaces
    what the plan has `seen`; nothing if that is None. Raises DestinationExistsError if the
    destination has changed meanwhile, and KeptFilesError if it changed at the last moment."""
    job = attempt.job
    attempt.published.add(ROOT)
    if job.destination.is_local:
        _publish_on_disk(attempt, result, seen, check)
        return
    check()
    record = {
        "job": job.token,
        "files": {path: _text(content) for path, content in result.files.items()},
        "markers": [[path, _text(content)] for path, content in result.markers],
        "kept": list(result.kept),
    }
    created = (job.destination / detection.RECORD).create(dumped(record))
    # A refusal proves nothing: the record may be this one's nevertheless.
    if forward(job.destination, record if created else None)[0]["job"] != job.token:
        raise DestinationExistsError(f"`{job.destination}` was created by another job meanwhile")


def forward(
    destination: Location, record: Mapping[str, Any] | None = None
) -> tuple[Mapping[str, Any], bool]:
    """Completes the checkpoint of a commit record in a bucket. The record is read unless it is
    given. Returns it, and whether anything was left to do."""
    record = record or parsed(destination / detection.RECORD)
    if record is None:
        raise DestinationError(
            f"the commit record `{destination / detection.RECORD}` could not be written"
        )
    sizes = {entry.path: entry.nbytes for entry in destination.walk() if entry.is_file}
    left = not {*record["files"], *(path for path, _ in record["markers"])} <= sizes.keys()
    missing = [f"`{destination / path}`" for path in record["kept"] if path not in sizes]
    if missing:
        hint = f"delete `{destination}` while no job runs, and write it again"
        raise DestinationError("files that the commit record names are missing", missing, [hint])
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        items = record["files"].items()
        list(pool.map(lambda item: _fix(destination, item[0], item[1], sizes), items))
    for path, content in record["markers"]:
        _fix(destination, path, content, sizes)
    kept = {*record["kept"], *record["files"]}  # another item may be of a job, too
    contents = [*record["files"].values(), *(content for _, content in record["markers"])]
    sources = {content["from"] for content in contents if "from" in content}
    items = {_item(path) for path in kept | sources}  # no other checkpoint below this one
    attempts = [path for path in sizes if is_of_an_attempt(path) and _item(path) in items]
    destination.remove_files([path for path in attempts if path not in kept])
    return record, left


def _item(path: str) -> str:
    """The directory of the item that an attempt's file belongs to."""
    return path.partition(PROCESS)[0]


def _text(content: bytes | str) -> dict[str, str]:
    if isinstance(content, str):
        return {"from": content}
    return {"bytes": base64.b64encode(content).decode()}


def _fix(
    destination: Location, path: str, content: Mapping[str, str], sizes: Mapping[str, int]
) -> None:
    """Creates a name without a token, if it is absent. Raises DestinationError if it has other
    contents. `sizes` are the objects that existed before."""
    place = destination / path
    if "bytes" in content:
        data = base64.b64decode(content["bytes"])
        done = place.create_or_match(data)
    elif sizes.get(content["from"], 0) > _LARGE:
        source = destination / content["from"]
        assert isinstance(source, BucketLocation) and isinstance(place, BucketLocation)
        try:
            created = path not in sizes and source.copy_on_server(place)
            done = place.file_bytes() == sizes[content["from"]]
            done = done and (created or place.sha256() == source.sha256())
        except ReshardError:
            if source.exists() or not place.exists():
                raise
            # Another process has gone on, and deleted it.
            done = place.file_bytes() == sizes[content["from"]]
    else:
        data = (destination / content["from"]).read_whole()
        if data is None and place.exists():  # another process has gone on, and deleted it
            return
        done = data is not None and place.create_or_match(data)
    if not done:
        raise DestinationError(
            f"`{place}` holds other content than this job writes",
            hints=["delete it while no job runs", f"reshard.commit({as_python(str(destination))})"],
        )


def _publish_on_disk(
    attempt: Attempt,
    result: Result,
    seen: Sequence[replaced.Seen] | None,
    check: Callable[[], object],
) -> None:
    directory, destination = attempt.job.directory, attempt.job.destination
    for folder in result.folders:
        (directory / folder).make_directory()
    kept = {*result.kept}
    for path, content in [*result.files.items(), *result.markers]:
        place = directory / path
        place.parent.make_directory()
        if isinstance(content, bytes):
            if not place.create_or_match(content):
                # The manifest of another attempt to commit, which counts then.
                prefix = path.removesuffix(MANIFEST)
                own = prefix + attempt.name(ROOT, "")
                kept = {file for file in kept if not file.startswith(own)}
                kept |= {prefix + file for file in value_files(place.parent, nodes=True)}
        elif not place.exists():
            disk.link_or_copy(directory / content, place, attempt.begun.parent / "copy")
    check()
    found = _synced(directory, attempt)
    named = {*result.files, *kept}  # files of another item may have the names of an attempt's
    missing = [f"`{directory / path}`" for path in named if path not in found]
    if missing:
        raise DestinationError("files were removed during the job", sorted(missing))
    unneeded = [path for path in found if is_of_an_attempt(path) and path not in named]
    _prune(directory, result.dropped)
    aside = _rename(attempt, seen)
    kept = []
    try:
        disk.sync(destination.parent)
        every = replaced_checkpoints(destination)  # an attempt that was stopped may have left one
        own = [place for place in every if any(_token(place) in path for path in found)]
        for place in own:
            kept += [f"`{place / path}`" for path in replaced.remove_seen(place, seen or ())]
        _prune(destination, unneeded)
        if seen is not None:
            for path, found in jobs(destination).items():
                if all(has_ended(document["owner"]) for document in found.begun):
                    remove_aside(destination, path)
    except OSError as error:  # the destination is complete
        path, reason = error.filename or destination.parent, error.strerror or error
        text = f"`{destination}` is complete, but the cleanup failed: `{path}`: {reason}"
        if aside.exists():
            text += f"; rm -r {shell_quoted(str(aside))} deletes the replaced checkpoint"
        warnings.warn(text, stacklevel=2)
    if kept:
        raise KeptFilesError(
            f"`{destination}` is complete, but the old one got other files during the job",
            kept,
            [f"move them, then rm -r {' '.join(shell_quoted(str(place)) for place in own)}"],
        )


def _synced(directory: Location, attempt: Attempt) -> set[str]:
    """Makes everything durable that is not in a share. Returns the paths of all files."""
    found = set()
    for entry in directory.walk():
        if entry.is_dir or not is_of_an_attempt(entry.path) or attempt.token in entry.path:
            disk.sync(directory / entry.path)
        if entry.is_file:
            found.add(entry.path)
    disk.sync(directory)
    return found


def _rename(attempt: Attempt, seen: Sequence[replaced.Seen] | None) -> Location:
    """Gives the job's directory the destination's name. Returns the place of the replaced
    checkpoint. An error proves nothing, since a file server may repeat a request and refuse it
    then: the attempt's token says where the job's directory is."""
    directory, destination = attempt.job.directory, attempt.job.destination
    own = _beside(destination, f"{attempt.token}{_COMMITTING}")
    aside = _aside(own, destination)
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.rename(directory, own)
        if not (own / (attempt.begun.below(directory) or "")).exists():  # another process has it
            raise attempt.job.ended()
        if seen is None or not destination.exists():
            disk.rename(own, destination)
        else:
            _check_seen(destination, destination, seen)
            if not disk.exchange(own, destination):
                disk.rename(destination, aside)
                _check_seen(aside, destination, seen)
                disk.rename(own, destination)
    except BaseException as error:
        if not attempt.is_in(destination):
            for place, name in ((aside, destination), (own, directory)):
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    disk.rename(place, name)
            if isinstance(error, FileExistsError) and not isinstance(error, ReshardError):
                text = f"`{destination}` was created by another job meanwhile"
                raise DestinationExistsError(text, hints=[OVERWRITE]) from error
            raise
        if not isinstance(error, OSError | ReshardError):
            raise
    with contextlib.suppress(FileNotFoundError):
        disk.rename(own, aside)
    return aside


def _check_seen(directory: Location, destination: Location, seen: Sequence[replaced.Seen]) -> None:
    """Raises DestinationExistsError if a destination, which is in this directory, is not as the
    plan has seen it."""
    if changed := replaced.unseen(directory, seen):
        raise DestinationExistsError(
            f"`{destination}` has changed during the job",
            [f"`{destination / path}`" for path in changed],
            ["move these files to another place, then start again"],
        )


def _prune(directory: Location, unneeded: Sequence[str]) -> None:
    """Deletes files that the checkpoint does not refer to, and directories that are then empty. No
    other checkpoint has files of these names."""
    directory.remove_files(unneeded)
    above = (itertools.accumulate(path.split("/")[:-1], "{}/{}".format) for path in unneeded)
    for folder in sorted({*itertools.chain.from_iterable(above)}, reverse=True):
        disk.remove_empty(directory / folder)
