"""A job in shares that processes write one by one, on any number of hosts: the documents by which
they and the commit know of one another. Beside the destination:

    .reshard-NAME.shares/
        job.json         the plan's fingerprint, and how many shares there are
        rest.json        all that is in no share is written: files beside the arrays, for one
        3.json           share 3 is written: by which attempt, to which files
        3.running        who is or was writing it, and how far that is
        stop             nobody is to go on
        checkpoint-JOB/  what becomes the destination; in a bucket it is written where it will be
        merged.json      all of them are merged: no share is written any more
        named.json       it is about to get its name

Who comes first writes `job.json`, and the others compare. An attempt at a share has databases of
its own, so two cannot mix; its document is written last, and durable. Each document has a hash of
what it says.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import DestinationError, DestinationExistsError
from reshard.hints import Hint
from reshard.storage import bucket, posix
from reshard.storage.location import Location
from reshard.tree import shell_quoted
from reshard.writer.directory_commit import shares_directory
from reshard.writer.job_plan import Plan
from reshard.writer.journal import differences, fingerprint, json_object
from reshard.writer.siblings import marker_places

JOB, REST, STOP = "job.json", "rest.json", "stop"
# What has been merged, in the place of the documents of all shares.
MERGED = "merged.json"
# That the checkpoint is about to get its name: without its directory, it has it.
NAMED = "named.json"
_RUNNING = ".running"
_SHARE = re.compile(rf"(\d+)\.json|{re.escape(REST)}")
# Where the data of a job's shares are on a disk, until the commit: no share of another job, that
# still runs, writes there.
_CHECKPOINT = "checkpoint-"
# How long `job.json` may be there, on a disk, with nothing in it: then its writer was killed.
_EMPTY_SECONDS = 5.0
# How often it is looked whether the job goes on: on a disk, and in a bucket.
_LOOK_SECONDS = {True: 0.5, False: 5.0}
_WRITES = " writes those that are missing, and completes them"
# How often a share notes how far it is.
_NOTE_SECONDS = {True: 5.0, False: 30.0}


class Written(NamedTuple):
    """What has been written of an item, by one attempt.

    Attributes:
      stages: databases in the item's directory, and how many keys each has; none for plain files.
      files: data files below the item's directory, and their bytes.
      nodes: the same of what else the databases consist of, and is not needed once they are merged.
      digests: name of an array -> the state of its digest, of what was written of it.
    """

    stages: Mapping[str, int]
    files: Mapping[str, int]
    nodes: Mapping[str, int]
    digests: Mapping[str, Sequence[int]]

    @property
    def all_files(self) -> dict[str, int]:
        """All that is to be there until it is merged."""
        return {**self.files, **self.nodes}


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that has begun, wherever its shares are written.

    Attributes:
      destination: where it will be.
      count: how many shares there are.
      token: what no other job has, nor the same plan in another number of shares.
      items: the directories of its items, below the destination.
      max_memory: bytes.
    """

    destination: Location
    count: int
    token: str
    items: tuple[str, ...]
    max_memory: int

    @staticmethod
    def parse(document: Mapping[str, Any]) -> "Job":
        """A job of `job.json`; raises KeyError or TypeError for anything else."""
        destination = Location(document["destination"])
        return Job(
            destination,
            document["shares"],
            document["job"],
            tuple(document["items"]),
            document["fingerprint"]["max_memory"],
        )

    @property
    def outer(self) -> Location:
        """Where its documents are."""
        return shares_directory(self.destination)

    @property
    def directory(self) -> Location:
        """Where checkpoints are written."""
        if not self.destination.is_local:
            return self.destination
        return self.outer / f"{_CHECKPOINT}{self.token}"

    def item_directory(self, number: int) -> Location:
        """Where an item is written."""
        return self.directory / self.items[number]

    def check(self) -> None:
        """Raises DestinationError if the job is not to go on."""
        if (self.outer / STOP).exists() or self.document(JOB) is None:
            raise DestinationError(f"the job in `{self.outer}` was stopped, or is complete")
        if (self.outer / MERGED).exists():
            raise DestinationError(
                f"the shares of `{self.destination}` are merged already",
                hints=[Hint(("commit", str(self.destination)), " completes it")],
            )

    def looking(self, note: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """What checks it, if that has not been done for a while, and then notes, if that has not,
        how far a share is."""
        until, next_note = 0.0, 0.0

        def look() -> None:
            nonlocal until, next_note
            if time.monotonic() >= until:
                self.check()
                if time.monotonic() >= next_note:
                    note()
                    next_note = time.monotonic() + _NOTE_SECONDS[self.outer.is_local]
                until = time.monotonic() + _LOOK_SECONDS[self.outer.is_local]

        return look

    def note_running(self, number: int, done: int, nbytes: int) -> None:
        """Notes that this process has written so many bytes of a share; or not, if it cannot."""
        process = f"process {os.getpid()} on {platform.node()}"
        part = f"{100 * done // max(nbytes, 1)}%"
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with contextlib.suppress(OSError):
            self.write_document(f"{number}{_RUNNING}", {"by": process, "done": part, "time": now})

    def forget_running(self, number: int) -> None:
        """Removes that note; or not, if it cannot."""
        with contextlib.suppress(OSError):
            (self.outer / f"{number}{_RUNNING}").remove()

    def running(self, numbers: Sequence[int]) -> list[str]:
        """What is noted of shares that are not complete, a line each, as far as it can be read. The
        time is that of the clock there, which nobody compares with another one."""
        names = {f"{number}{_RUNNING}": number for number in numbers}
        found: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(OSError), self.outer.remembered():
            self.outer.ahead(names)
            for name in self.outer.names():
                with contextlib.suppress(OSError, DestinationError):  # it may be complete by now
                    if name in names and (note := self.document(name)) is not None:
                        found[names[name]] = note
        return [
            f"share {number}: {note['by']} had written {note['done']} of it at {note['time']}"
            for number, note in sorted(found.items())
        ]

    def document(self, name: str) -> dict[str, Any] | None:
        """One of its documents; None where there is none, or it is another job's."""
        found = read_document(self.outer / name)
        return found if found is not None and found.get("job") == self.token else None

    def documents(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those of its documents that are there, in this order; a bucket is asked for all at
        once."""
        with self.outer.remembered():
            self.outer.ahead(names)
            found = {name: self.document(name) for name in names}
        return {name: document for name, document in found.items() if document is not None}

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a document, durable, whole or not at all."""
        data = _dumped({"job": self.token, **document})
        (self.outer / name).replace(data, f"{name}.{secrets.token_hex(4)}.new")


def read_document(path: Location) -> dict[str, Any] | None:
    """What `job.json` or another document says; None where there is none yet. Raises
    DestinationError where it is not what was written."""
    data = path.read()
    if not data:
        return None
    document = json_object(data, damaged(path))
    if document.pop("sha256", None) != _hash(document):
        raise damaged(path)
    return document


def _dumped(document: Mapping[str, Any]) -> bytes:
    """A document as it is written, with a hash of what it says."""
    return json.dumps({**document, "sha256": _hash(document)}).encode()


def _hash(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def damaged(path: Location) -> DestinationError:
    hints = [anew(path.parent)]
    share = _SHARE.fullmatch(path.name)
    if share is not None:
        removes = f"rm {shell_quoted(str(path))}" if path.is_local else f"delete `{path}`"
        hints.insert(0, f"{removes}, then write share {share[1] or 0} again")
    return DestinationError(f"`{path}` is damaged", hints=hints)


def anew(outer: Location) -> str:
    """What to type where nothing of what was written is to count."""
    if outer.is_local:
        return f"rm -r {shell_quoted(str(outer))} begins anew"
    return f"delete `{outer}/`, and what is at the destination, to begin anew"


def check_none(destination: Location) -> None:
    """Raises DestinationError where shares of a job for this destination wait for their commit."""
    outer = shares_directory(destination)
    if (outer / JOB).exists():
        raise DestinationError(
            f"shares of a job for `{destination}` are in `{outer}`",
            hints=[
                Hint(("commit", str(destination)), " completes them"),
                Hint(("same",), " with ", ("workers",), " and ", ("resume", True), _WRITES),
                anew(outer),
            ],
        )


def shares_begun(destination: Location) -> int | None:
    """How many shares the job of a destination has; None where none has begun."""
    document = read_document(shares_directory(destination) / JOB)
    return None if document is None else document.get("shares")


def begun(plan: Plan, count: int) -> Job:
    """The job of a plan in so many shares, which this process may be the first one of. Raises
    DestinationError, with what differs, where there are shares of another one."""
    destination = plan.destination
    assert destination is not None
    fields = {
        # As it is after JSON.
        "fingerprint": json.loads(json.dumps(fingerprint(plan, loaded=False))),
        "shares": count,
        "destination": str(destination),
        "overwrite": plan.overwrite,
        "verify": plan.verify,
        "items": [item.directory(destination).below(destination) for item in plan.items],
        "markers": marker_places(plan.checkpoints, destination),
    }
    text = json.dumps(fields, sort_keys=True)
    document = {"job": hashlib.sha256(text.encode()).hexdigest()[:32], **fields}
    job = Job.parse(document)
    path = job.outer / JOB
    then = read_document(path)
    if then is None:
        if not destination.is_local and next(destination.walk(), None) and not path.exists():
            raise DestinationExistsError(
                f"`{destination}` exists, and is no unfinished job's",
                hints=["name a new destination, or delete what is there"],
            )
        job.outer.make_directory()
        (job.outer / NAMED).remove()  # of an earlier job, the last of it
        then = _first(path, _dumped(document))
    if then is not None and then.get("job") != job.token:
        raise _another(job, then, document)
    for number in range(len(job.items)):
        job.item_directory(number).make_directory()
    return job


def _first(path: Location, data: bytes) -> dict[str, Any] | None:
    """Creates `job.json`; what is in it where another process has been faster."""
    store = posix if path.is_local else bucket
    file = store.LockFile(path)
    try:
        until = time.monotonic() + _EMPTY_SECONDS
        while not file.create(data):
            seen = file.read()
            if seen:
                return read_document(path)
            if seen is not None and time.monotonic() > until and file.take(seen, data):
                break
            time.sleep(0.01)
    finally:
        file.close()
    return None


def _another(job: Job, then: Mapping[str, Any], now: Mapping[str, Any]) -> DestinationError:
    """The error for shares of another job, which says what differs."""
    problems: list[str] = []
    hints: list[str] = []
    if then.get("fingerprint") != now["fingerprint"]:
        problems, hints = differences(then.get("fingerprint", {}), now["fingerprint"])
    for name in ("shares", "overwrite", "verify"):
        if then.get(name) != now[name]:
            problems.append(f"{name}: {then.get(name)} then, {now[name]} now")
    return DestinationError(
        f"`{job.outer}` holds shares of another job", problems, [*hints, anew(job.outer)]
    )


def is_written(job: Job, name: str) -> bool:
    """Whether a document says that its part is written, and the files are there."""
    document = job.document(name)
    if document is None:
        return False
    found = parse_written(job.outer / name, document)
    return all(
        is_there((job.item_directory(number) / file).file_bytes(), size)
        for number, written in found.items()
        for file, size in written.all_files.items()
    )


def is_there(found: int | None, nbytes: int) -> bool:
    """Whether a file that was found is there, with so many bytes where both are known."""
    return found is not None and (found == nbytes or posix.UNKNOWN in (found, nbytes))


def parse_written(path: Location, document: Mapping[str, Any]) -> dict[int, Written]:
    """What a document says that was written, by the number of an item."""
    try:
        return {int(number): Written(**found) for number, found in document["items"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path) from error
