"""The directory of a job and the documents in it, by which its processes know of one another.

On a disk the directory lies next to the destination, and one rename gives it the destination's
name. In a bucket it is the destination. Before the commit, every name that an attempt writes holds
its token:

    ITEM/ocdbt.process_TOKEN/begun.json    who writes, while it writes
    ITEM/ocdbt.process_TOKEN/3.json        share 3 is written: its databases, files and digests
    ITEM/ocdbt.process_TOKEN/unshared.json     the unshared part is written: documents, other items
    ITEM/ocdbt.process_TOKEN3x0/           a database of share 3
    ITEM/ocdbt.process_TOKENunsharedxfiles/    files that get their names with the commit
    ITEM/ocdbt.process_TOKENrootx/         nodes of the root's B-tree, by an attempt to commit

So two attempts at one share do no harm: the commit takes one of them.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.digests import digest_of
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.arrays.operations import Apply, Constant
from reshard.errors import DestinationError
from reshard.storage.disk import kernel_text
from reshard.storage.location import Location, parse_location
from reshard.storage.machine import this_process
from reshard.storage.ocdbt import PROCESS
from reshard.tree import shell_quoted
from reshard.writer.arrays import Written
from reshard.writer.plan import Plan
from reshard.writer.siblings import source_document

BEGUN, UNSHARED, ROOT = "begun", "unshared", "root"
_TOKEN = rf"{re.escape(PROCESS)}([0-9a-f]{{16}})"
_OWN = re.compile(rf"(?:.*/)?{_TOKEN}[^/]*/.+", re.DOTALL)
_DOCUMENT = re.compile(rf"(?:.*/)?{_TOKEN}/(\w+)\.json", re.DOTALL)
# Documents that are read at once, and bytes of the largest that is read.
_READS = 32
_LARGEST = 1 << 28
# The most shares of a job: a plan has one for each GiB.
_MOST_SHARES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Job:
    """A plan that is being written.

    Attributes:
      destination: where the checkpoint will be.
      directory: where the job writes.
      items: directories of its items, below that.
      token: the same for all processes that write this plan there, and for no others.
      count: the number of shares.
      ignored: tokens of attempts whose parts do not count.
    """

    destination: Location
    directory: Location
    items: tuple[str, ...]
    token: str
    count: int
    ignored: frozenset[str] = frozenset()

    def item_directory(self, number: int) -> Location:
        return self.directory / self.items[number]

    def path(self, number: int | str, name: str) -> str:
        """The path below the job's directory of a file of an item."""
        return f"{self.items[int(number)]}/{name}".lstrip("/")

    def ended(self) -> DestinationError:
        """The error for an attempt that goes on after the job has ended."""
        return DestinationError(
            f"the job for `{self.destination}` was completed, removed or stopped while a part of "
            "it was being written"
        )


class Attempt:
    """One process that writes some of a job: shares, the unshared part, the commit.

    Attributes:
      token: drawn when it begins; no other attempt has it.
      begun: the document that says who writes.
      published: parts that others may refer to. `abandon` removes nothing of them.
    """

    def __init__(self, job: Job):
        self.job = job
        self.token = secrets.token_hex(8)
        self.published: set[str] = set()
        self._folder = job.item_directory(0) / f"{PROCESS}{self.token}"
        self.begun = self._folder / f"{BEGUN}.json"
        self._about = {
            "job": job.token,
            "count": job.count,
            "directories": job.items,
            "owner": this_process(),
            "command": _command(),
            "folder": kernel_text("self/cwd"),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }

    def name(self, part: str, suffix: str) -> str:
        """The name in an item's directory for the files of a part."""
        return f"{PROCESS}{self.token}{part}x{suffix}"

    def begin(self) -> None:
        """Writes the document that says who writes."""
        self._data = dumped(self._about)
        self.begun.create(self._data)

    def publish(self, part: str, document: Mapping[str, Any]) -> None:
        """Writes the document of a part, as the last step. From then on the part belongs to the
        job. Raises DestinationError if the job is complete or was removed, and StoreError for a
        bucket that ignores conditions."""
        if self.begun.create(self._data):
            self.begun.check_conditions(self._data, self.job.destination)
            raise self.job.ended()
        self.published.add(part)  # before: an interrupt may come between the two
        data = dumped({"part": part, **self._about, **document})
        (self._folder / f"{part}.json").replace(data, f".{part}")

    def is_in(self, destination: Location) -> bool:
        """Whether a directory is the one that it has written into, under another name. Another
        process that has committed the job may have removed some of its files."""
        return any(self.token in entry.path for entry in destination.walk())

    def end(self) -> None:
        """Removes the document that says who writes."""
        self.begun.remove()
        self._folder.remove_empty()  # of one that had nothing left to do

    def abandon(self) -> None:
        """Removes everything that it has written, except published parts."""
        self.end()
        for number in range(len(self.job.items)):
            directory = self.job.item_directory(number)
            if directory.is_dir():
                for name in directory.directories():
                    token, _, part = name.partition(self.token)
                    if token == PROCESS and part.partition("x")[0] not in {*self.published, ""}:
                        (directory / name).remove_tree()
        if not self.published:
            self._folder.remove_tree()
            self.job.directory.remove_empty()


class Found(NamedTuple):
    """The contents of a job's directory.

    Attributes:
      sizes: path of each file below it -> its bytes.
      begun: documents of attempts that are running, or were killed.
      parts: part -> token of an attempt -> its document.
    """

    sizes: Mapping[str, int]
    begun: Sequence[Mapping[str, Any]]
    parts: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def tokens(self) -> frozenset[str]:
        """The tokens of attempts that have written parts."""
        return frozenset(token for part in self.parts.values() for token in part)

    @property
    def count(self) -> int | None:
        """The job's number of shares."""
        return next((document["count"] for document in self.documents), None)

    @property
    def documents(self) -> list[Mapping[str, Any]]:
        return [*self.begun, *(d for part in self.parts.values() for d in part.values())]


def look(directory: Location) -> Found:
    """Reads the contents of a job's directory. Raises DestinationError for a damaged document."""
    sizes = {entry.path: entry.nbytes for entry in directory.walk() if entry.is_file}
    names = [match for path in sizes if (match := _DOCUMENT.fullmatch(path))]
    for match in names:
        if sizes[match[0]] > _LARGEST:
            raise _damaged(directory / match[0])
    begun: list[Mapping[str, Any]] = []
    parts: dict[str, dict[str, Mapping[str, Any]]] = {}
    with concurrent.futures.ThreadPoolExecutor(_READS) as pool:
        read = pool.map(lambda match: parsed(directory / match[0]), names)
        for match, document in zip(names, read, strict=True):
            token, part = match.groups()
            if document is None:
                continue
            if not _is_of_a_job(document) or document.get("part", BEGUN) != part:
                raise _damaged(directory / match[0])
            if part == BEGUN:
                begun.append(document)
            else:
                parts.setdefault(part, {})[token] = document
    return Found(sizes, begun, parts)


def _is_of_a_job(document: Mapping[str, Any]) -> bool:
    """Whether a document says which job it is of, and who writes. It may be untrusted."""
    owner, count = document.get("owner"), document.get("count")
    texts = [document.get(key) for key in ("job", "command", "since")]
    if not isinstance(owner, dict) or type(count) is not int or type(owner.get("pid")) is not int:
        return False
    texts += [owner.get("host"), document.get("folder", "")]
    return 0 < count <= _MOST_SHARES and all(isinstance(text, str) for text in texts)


def is_of_an_attempt(path: str) -> bool:
    """Whether an attempt writes a file of this path before the commit."""
    return _OWN.fullmatch(path) is not None


def _command() -> str:
    """The command that this process runs."""
    program = sys.argv[0].removesuffix("/__main__.py").rpartition("/")[2]
    return shlex.join(["reshard" if program == "reshard" else sys.argv[0], *sys.argv[1:]])


def dumped(document: Mapping[str, Any]) -> bytes:
    """A document as it is written, with its hash."""
    return json.dumps({**document, "sha256": _hash(document)}).encode()


def parsed(path: Location) -> dict[str, Any] | None:
    """A document; None if it is missing. Raises DestinationError if it is damaged."""
    data = path.read_whole()
    if data is None:
        return None
    try:
        document = json.loads(data)
        if document.pop("sha256") == _hash(document):
            return document
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        pass
    raise _damaged(path)


def _damaged(path: Location) -> DestinationError:
    removes = f"rm {shell_quoted(str(path))}" if path.is_local else f"delete `{path}`"
    again = f"{removes}; resume=True writes its part again"
    return DestinationError(f"`{path}` is damaged", hints=[again])


def _hash(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def written_of(document: Mapping[str, Any]) -> dict[int, Written]:
    """The items of a part's document, by their numbers."""
    return {int(number): Written(**found) for number, found in document["items"].items()}


def writers(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The processes that wrote documents, a line each."""
    lines = {
        f"process {d['owner']['pid']} on {d['owner']['host']}, since {d['since']}: {d['command']}"
        for d in documents
    }
    return sorted(lines)


def job_token(plan: Plan, loaded: bool) -> str:
    """What distinguishes a job from all others: a hash of all that its plan depends on. If several
    processes plan it, two functions of the user's are the same if their name and file are. If they
    are `loaded` by one process, they may have changed since an earlier run, so that only functions
    that were loaded at the same time are the same."""
    found = hashlib.sha256()

    def add(*values: object) -> None:
        found.update(f"{values!r}\n".encode(errors="surrogateescape"))

    add(importlib.metadata.version("reshard"), sorted(source_document(plan.identity).items()))
    add(str(plan.destination), plan.max_memory, plan.digest)
    for item in plan.items:
        ckpt, source = item.ckpt, item.ckpt.source
        add(str(source.root), source.step, source.item, ckpt.retyped, item.format)
        add(sorted(item.files or ()), json.dumps(source.metadata, sort_keys=True))
        if item.format.files:  # other files come from elsewhere
            add([(each.path, each.source, each.entry[:-1]) for each in plan.siblings])
        add(*(each for each in ckpt.items() if not isinstance(each[1], ArrayHandle)))
        for array in item.arrays:
            add(*_described(array.handle, loaded), array.chunk, array.box)
    return found.hexdigest()[:16]


def _source_of(operation: Apply) -> str:
    """A hash of the file of a user's function, or "" without one."""
    with contextlib.suppress(OSError, TypeError):
        file = inspect.getsourcefile(inspect.unwrap(operation.function))
        if file is not None:
            return parse_location(file).sha256()
    return ""


def _described(handle: ArrayHandle, loaded: bool) -> Iterator[object]:
    """Everything that an array depends on."""
    yield handle.path, handle.dtype.type, handle.shape, handle.sharding
    yield handle.value_type, handle.key_impl
    data = handle.data
    if isinstance(data, StoredArray):
        yield data.name, data.metadata
        return
    operation = data.operation
    if isinstance(operation, Constant):
        yield data.part, digest_of(operation.values)
    elif isinstance(operation, Apply) and not loaded:
        yield data.part, dataclasses.replace(operation, loaded=""), _source_of(operation)
    else:
        yield data.part, operation
    for other in data.inputs:
        yield from _described(other, loaded)
