"""What of a job is durable, in a file of its temporary directory: for a later run to go on from.

A job is the same one if its fingerprint is: the source's files, the arrays as they are to be, the
grids and boxes of the plan, and its memory. Then its batches are the same, and those that were
committed and synced are not written again.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reshard.arrays.digests import Digest, digest_of
from reshard.arrays.handle import ArrayHandle, StoredArray
from reshard.arrays.operations import Apply, Constant
from reshard.errors import CheckpointFormatError, DestinationError, ReshardError
from reshard.hints import Hint
from reshard.loader.detection import PROGRESS_FILE
from reshard.storage import bucket, posix
from reshard.storage.location import Location
from reshard.tree import Path, format_path
from reshard.units import format_bytes
from reshard.writer.job_plan import ItemPlan, Plan
from reshard.writer.siblings import CopiedFile, changed_paths

# What makes a job the same job, as JSON.
Fingerprint = Mapping[str, Any]

# What is not synced is redone by the next run; to sync more often would keep the cores waiting.
_SYNC_SECONDS = 1.0
# At most this part of the time is for it.
_SYNC_SHARE = 0.05
ANEW = Hint("without ", ("resume", True), " the job begins anew")
# In a bucket, where what is left is where the job writes.
CLEAR = Hint(("overwrite", True), " clears it and begins anew")
_INSTEAD = Hint(("overwrite", True), " instead of ", ("resume", True), " begins anew")


@dataclasses.dataclass
class ItemProgress:
    """What of an item has been committed.

    Attributes:
      values: stored values that were copied, of all in order.
      batches: batches of boxes that were rewritten, of all in order.
      digests: for each array the state of its digest after these.
      merged: the item's root database is complete.
    """

    values: int = 0
    batches: int = 0
    digests: dict[Path, Sequence[int]] = dataclasses.field(default_factory=dict)
    merged: bool = False

    def value_batch(self, values: int, committed: Callable[[], None]) -> None:
        """Notes that so many values have been copied, and says so."""
        self.values = values
        committed()

    def box_batch(
        self, batches: int, digests: Mapping[Path, Sequence[int]], committed: Callable[[], None]
    ) -> None:
        """Notes that so many batches have been rewritten, with the digests of the last one."""
        self.batches = batches
        self.digests |= digests
        committed()

    def resume(self, digests: Mapping[Path, Digest]) -> None:
        """Sets digests to where they were; raises DestinationError for those of other arrays."""
        for path, state in self.digests.items():
            if path not in digests:
                raise DestinationError(f"{format_path(path)}: the unfinished job never wrote it")
            digests[path].merge(state)

    def document(self) -> dict[str, Any]:
        digests = [[list(path), list(state)] for path, state in self.digests.items()]
        return {**vars(self), "digests": digests}

    @staticmethod
    def parse(document: Mapping[str, Any]) -> "ItemProgress":
        """What `document` gave; raises ValueError, KeyError or TypeError for anything else."""
        digests = {tuple(path): state for path, state in document["digests"]}
        found = ItemProgress(**{**document, "digests": digests})
        counts = [found.values, found.batches]
        counts += [
            part for low, high, elements in digests.values() for part in (low, high, elements)
        ]
        if type(found.merged) is not bool or any(type(n) is not int or n < 0 for n in counts):
            raise ValueError("progress that no job has noted")
        return found


class Journal:
    """The progress of a job's items, and its file: without it unless the job `keeps` it for a later
    run. The file is there in any case, with the token of the job's lock: if it is gone at the end,
    so are others, as when a manager of checkpoints has swept the directory away; and if it has
    another token, the directory is another job's.

    Attributes:
      cores: how many this job is cut into batches for.
      links: whether it shares data files with the source, if it is to.
      items: progress of each item.
      copied: files beside the arrays that were copied or shared, by path below the directory.
      resumed: an earlier run of the job has begun it.
    """

    def __init__(
        self,
        directory: Location,
        fingerprint: Fingerprint,
        cores: int,
        items: int,
        keeps: bool,
        token: str,
    ):
        self._directory = directory
        self._file = directory / PROGRESS_FILE
        self._fingerprint = fingerprint
        self._keeps = keeps
        self._token = token
        self._next = time.monotonic() + _SYNC_SECONDS
        self.cores = cores
        self.links = True
        self.items = [ItemProgress() for _ in range(items)]
        self.copied: dict[str, CopiedFile] = {}
        document = _read(self._file) if keeps else None
        self.resumed = document is not None
        if document is not None:
            self.cores, self.links, self.items, self.copied = _parsed(document, items, self._file)

    def without_links(self) -> None:
        """Notes that nothing can be shared: what was done with what was does not count."""
        if self.links:
            self.links = False
            self.items = [ItemProgress() for _ in self.items]

    def begin(self) -> None:
        """Writes the file, all that a run begins with being there."""
        if self._keeps:
            self._write()
        else:
            self._file.write(self.content())

    def advance(self) -> None:
        """Writes what is durable by now, if that has not been done for a while."""
        if self._keeps and time.monotonic() > self._next:
            self.write()

    def write(self) -> None:
        """Makes all that was committed durable, then says so."""
        if self._keeps:
            self.check()
            self._write()

    def content(self) -> bytes:
        """What is in the file: that of a job that does not keep it, its token alone."""
        if not self._keeps:
            return json.dumps({"token": self._token}).encode()
        document = {
            "fingerprint": self._fingerprint,
            "cores": self.cores,
            "links": self.links,
            "items": [item.document() for item in self.items],
            "copied": self.copied,
        }
        text = json.dumps(document)
        whole = f'{{"token": "{self._token}", "sha256": "{_hash(text)}", "job": {text}}}'
        return whole.encode()

    def _write(self) -> None:
        begin = time.monotonic()
        content = self.content()
        if self._directory.is_local:
            posix.sync(self._directory)
        self._file.replace(content, f"{PROGRESS_FILE}.new")
        end = time.monotonic()
        self._next = end + max(_SYNC_SECONDS, (end - begin) / _SYNC_SHARE)

    def close(self) -> None:
        """Removes the file: the job is complete."""
        self._file.remove()

    def forget(self) -> None:
        """Notes that nothing may be gone on with."""
        self._keeps = False
        if self._is_own():
            self.begin()

    def check(self) -> None:
        """Raises DestinationError where the file is gone, or another job's."""
        if not self._is_own():
            raise DestinationError(f"`{self._directory}` was removed while it was written")

    def _is_own(self) -> bool:
        """Whether the file is there, and this job's."""
        if self._file.is_local:  # in a directory whose name is this job's alone
            return self._file.exists()
        data = bucket.read(self._file)
        return (
            data is not None and json_object(data, _damaged(self._file)).get("token") == self._token
        )


def resumed_note(items: Sequence[ItemPlan], progress: Sequence[ItemProgress]) -> str:
    """What the user should know of a job that an earlier run had begun."""
    done = whole = 0
    for item, committed in zip(items, progress, strict=True):
        for array in item.arrays:
            if not array.moved:
                *_, elements = committed.digests.get(array.layout.path, (0,))
                done += elements * array.layout.target_itemsize
                whole += array.decoded_bytes
    rewritten = f": {format_bytes(done)} of {format_bytes(whole)} are rewritten" if whole else ""
    return f"resumed what an earlier run had written{rewritten}"


def is_unfinished(temporary: Location, fingerprint: Fingerprint) -> bool:
    """Whether a directory holds a job that can be gone on with; raises DestinationError where it is
    another job, or nothing says how far it is."""
    document = _read(temporary / PROGRESS_FILE)
    if document is not None and temporary.is_local:
        try:
            for _ in temporary.checked_walk():
                pass
        except CheckpointFormatError as error:  # nothing is written through a link
            raise DestinationError(error.summary, hints=[_anew(temporary)]) from error
    if document is not None and document["fingerprint"] != fingerprint:
        problems, hints = differences(document["fingerprint"], fingerprint)
        raise DestinationError(
            f"the unfinished job in `{temporary}` is another one",
            problems,
            [*hints, _anew(temporary)],
        )
    return document is not None


def _anew(directory: Location) -> Hint:
    """How a job begins anew that has left something there."""
    return ANEW if directory.is_local else _INSTEAD


def differences(then: Fingerprint, now: Fingerprint) -> tuple[list[str], list[str]]:
    """In what a job is another one, and hints. Its plan depends on everything else."""
    if not isinstance(then, dict) or then.keys() != now.keys():
        return ["another version of reshard has written it"], []
    if then["version"] != now["version"]:
        return [f"reshard {then['version']} then, {now['version']} now"], []
    problems, hints = [], []
    if then["items"] != now["items"]:
        sources = [" and ".join(f"`{item}`" for item in job["items"]) for job in (then, now)]
        problems = [f"the source: {sources[0]} then, {sources[1]} now"]
    else:
        changed = changed_paths(then["source"], now["source"])
        problems = [f"the source has changed since: `{path}`" for path in changed]
        if then["format"] != now["format"]:
            formats = ["; ".join(job["format"]) for job in (then, now)]
            problems.append(f"the format: {formats[0]} then, {formats[1]} now")
            hints.append("the format that it had resumes it")
    if then["max_memory"] != now["max_memory"]:
        hints += [] if problems else [Hint(("max_memory", _exactly(then["max_memory"])))]
        sizes = [format_bytes(job["max_memory"]) for job in (then, now)]
        problems.append(
            f"max_memory: {sizes[0]} then, {sizes[1]} now; it decides what is rewritten together"
        )
    if not problems:
        problems, hints = ["other arguments"], ["the arguments that it had"]
    return problems, hints


def _exactly(nbytes: int) -> str:
    """A number of bytes as `parse_bytes` takes it, with the largest unit that it is whole in."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def _read(path: Location) -> dict[str, Any] | None:
    try:
        data = path.read()
    except ReshardError as error:
        raise _damaged(path) from error
    if not data:
        return None
    whole = json_object(data, _damaged(path))
    try:
        if whole.keys() == {"token"}:
            return None
        if whole["sha256"] == _hash(json.dumps(whole["job"])):
            return whole["job"]
    except (KeyError, RecursionError):
        pass
    raise _damaged(path)


def json_object(data: bytes, damaged: DestinationError) -> dict[str, Any]:
    """What a document of an unfinished job says; raises `damaged` where it is no JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged from error
    if not isinstance(found, dict):
        raise damaged
    return found


def _parsed(
    document: dict[str, Any], items: int, path: Location
) -> tuple[int, bool, list[ItemProgress], dict[str, CopiedFile]]:
    """Cores, links, the progress of each item, and the files that were copied."""
    try:
        cores, links = document["cores"], document["links"]
        found = [ItemProgress.parse(item) for item in document["items"]]
        files = document.get("copied", {})  # earlier versions copied everything again
        copied = {path: CopiedFile.parse(entry) for path, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if type(cores) is not int or cores < 1 or type(links) is not bool or len(found) != items:
        raise _damaged(path)
    return cores, links, found, copied


def _damaged(path: Location) -> DestinationError:
    return DestinationError(
        f"`{path}` is damaged: nothing says how far the unfinished job is", hints=[_anew(path)]
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(plan: Plan, *, loaded: bool = True) -> Fingerprint:
    """What a plan depends on. Functions of the user's are the same if they were `loaded` once, or
    else if they have the same name."""
    found = hashlib.sha256()
    for item in plan.items:
        for line in _lines(item, loaded):
            found.update(line.encode(errors="surrogateescape"))
            found.update(b"\n")
    return {
        "version": importlib.metadata.version("reshard"),
        "max_memory": plan.max_memory,
        "items": [str(item.ckpt.source.store.directory) for item in plan.items],
        "source": dict(plan.source_state),
        "format": [str(item.format) for item in plan.items],
        "plan": found.hexdigest(),
    }


def _lines(item: ItemPlan, loaded: bool) -> Iterator[str]:
    ckpt, source = item.ckpt, item.ckpt.source
    linked = None if item.files is None else sorted(item.files)
    yield repr((str(source.root), source.step, source.item, linked, ckpt.retyped, item.format))
    yield json.dumps(source.metadata, sort_keys=True)
    for path, leaf in ckpt.items():
        yield repr(path) if isinstance(leaf, ArrayHandle) else repr((path, leaf))
    for handle, array in zip(item.handles, item.arrays, strict=True):
        yield from _described(handle, loaded)
        yield repr((array.chunk, array.box, array.serial))


def _described(handle: ArrayHandle, loaded: bool) -> Iterator[str]:
    """All there is to an array, and to those that it is derived from."""
    yield repr((handle.path, handle.dtype, handle.shape, handle.sharding))
    yield repr((handle.value_type, handle.key_impl))
    data = handle.data
    if isinstance(data, StoredArray):
        yield repr((data.name, data.metadata))
    else:
        operation = data.operation
        yield repr(data.part)
        if isinstance(operation, Constant):
            yield digest_of(operation.values)
        elif isinstance(operation, Apply) and not loaded:
            yield repr(dataclasses.replace(operation, loaded=""))
        else:
            yield repr(operation)
        for other in data.inputs:
            yield from _described(other, loaded)
