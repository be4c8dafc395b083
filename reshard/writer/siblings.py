"""The siblings of an item's arrays: other items and files, and the commit markers; and the identity
of all that a job reads."""

import concurrent.futures
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoint import Checkpoint
from reshard.engine.batches import in_groups
from reshard.engine.memory import copy_bytes
from reshard.loader.detection import (
    ARRAYS_FOLDER,
    CHECKPOINT_FILE,
    DELETION_FILE,
    MARKER,
    RECORD,
    RECORD_FILES,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
)
from reshard.loader.inventory import UNFINISHED_PREFIX, Role, is_step, list_root
from reshard.storage.disk import Entry
from reshard.storage.identity import Identity, listed
from reshard.storage.location import Location, parse_location
from reshard.storage.ocdbt import FOLDERS, MANIFEST, PROCESS

# Names in an item's directory that the writer makes itself, but for arrays and staged databases.
WRITTEN = frozenset({TREE_FILE, SHARDING_FILE, ARRAYS_FOLDER, STRINGS_FILE, MANIFEST, MARKER})
WRITTEN |= {*FOLDERS, *RECORD_FILES}
# Files that are copied at once.
_COPIES = 32


class Sibling(NamedTuple):
    """A file or a directory that is copied: its path below the destination and the source's root,
    its size and time when it was listed, and the bytes of a file that is changed, of that size."""

    path: str
    source: Location
    entry: Entry
    data: bytes | None = None

    @property
    def is_file(self) -> bool:
        return self.entry.is_file

    @property
    def nbytes(self) -> int:
        return max(self.entry.nbytes, 0) if self.is_file else 0

    def sha256(self) -> str:
        """The SHA-256 of what is copied."""
        return self.source.sha256() if self.data is None else hashlib.sha256(self.data).hexdigest()


def siblings(checkpoints: Sequence[Checkpoint]) -> list[Sibling]:
    """Everything that is copied unchanged, each directory before its contents: in a manager's root
    everything except its steps; in a step everything except the written item, and an item that
    is being deleted; in an item everything except its arrays and their documents.

    Raises:
      CheckpointFormatError: something is neither a file nor a directory, or directories are
        nested too deep.
    """
    root = checkpoints[0].source.root
    found = [
        (root / top / entry.path, entry)
        for top in _sibling_roots(checkpoints)
        for entry in (root / top).checked_walk()
    ]
    return [Sibling(path.below(root) or "", path, entry) for path, entry in found]


def _sibling_roots(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Paths, below the root, of the topmost siblings."""
    root = checkpoints[0].source.root
    if checkpoints[0].source.is_foreign:  # files of another format have no siblings
        return []
    skips: dict[str, Callable[[str], bool]] = {}  # names in a folder that are none
    if checkpoints[0].source.kind == "manager":
        left_out = {
            each.name
            for each in list_root(root).names
            if each.role in (Role.STEP, Role.TEMPORARY) or (each.why and is_step(root / each.name))
        }
        skips[""] = left_out.__contains__
    for c in checkpoints:
        step, item = c.source.step, c.source.item
        if item:
            skips[step] = {item, c.source.deleted, MARKER}.__contains__
        skips[_joined(step, item)] = _is_written(c)
    return sorted(
        _joined(folder, name)
        for folder, skip in skips.items()
        for name in (root / folder).names()
        if not (skip(name) or name in (DELETION_FILE, RECORD))
        and not name.startswith(UNFINISHED_PREFIX)
    )


def _joined(*parts: str) -> str:
    """A path of the parts that are not empty."""
    return "/".join(filter(None, parts))


def is_sibling(ckpt: Checkpoint, file: Location) -> bool:
    """Whether a file of the source is copied unchanged."""
    below = file.below(ckpt.source.directory)
    return below is None or not _is_written(ckpt)(below.partition("/")[0])


def _is_written(ckpt: Checkpoint) -> Callable[[str], bool]:
    """A function: whether the writer itself makes a name in an item's directory."""
    # An older Orbax's copy of the tree may be no longer true.
    own = {*WRITTEN, "checkpoint" if ckpt.retyped else ckpt.source.file}
    folders = ckpt.source.folders
    return lambda name: name in own or name.startswith(PROCESS) or name in folders


def copy_siblings(
    found: Sequence[Sibling], directory: Location, max_memory: int, report: Callable[[int], None]
) -> dict[str, tuple[str, int]]:
    """Copies files into a directory under new names: path -> that name and bytes. Several files are
    copied at once, if they fit into memory."""
    files = [sibling for sibling in found if sibling.is_file]
    names = {sibling.path: str(number) for number, sibling in enumerate(files)}

    def copy(sibling: Sibling) -> None:
        new = directory / names[sibling.path]
        if sibling.data is None:
            sibling.source.copy(new, sibling.entry.nbytes)
        else:
            new.write(sibling.data)

    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        for some in in_groups(files, lambda s: copy_bytes(s.nbytes), max_memory, _COPIES):
            for sibling, _ in zip(some, pool.map(copy, some), strict=True):
                report(sibling.nbytes)
    return {sibling.path: (names[sibling.path], sibling.entry.nbytes) for sibling in files}


def source_identity(
    checkpoints: Sequence[Checkpoint], found: Sequence[Sibling]
) -> tuple[Identity, ...]:
    """The identity of all that a job reads: the items as they were opened, and their siblings as
    they were found. Without records of digests, which may be written at any time; and without
    siblings of steps in a manager's root, where a training may be writing its logs."""
    identities = []
    for source in (c.source for c in checkpoints):
        (directory, own), step = source.identity, source.root / source.step
        if directory.below(step) is None:  # the root is an index of files beside it
            step = directory
        files = {
            below: sibling.entry
            for sibling in found
            if sibling.is_file and sibling.source.name not in RECORD_FILES
            if (below := sibling.source.below(step))
        }
        top = directory.below(step) or ""
        identities.append(listed(step, files | {_joined(top, file): own[file] for file in own}))
    return tuple(identities)


def source_document(source: Iterable[Identity]) -> dict[str, dict[str, Any]]:
    """The sizes and times of files, which are the same for all hosts."""
    found: dict[str, dict[str, Any]] = {}
    for top, files in source:
        found.setdefault(str(top), {}).update((f, e[3:5]) for f, e in files.items())
    return found


def source_of(document: Mapping[str, Mapping[str, Sequence[Any]]]) -> Iterator[Identity]:
    """The files of a document, with their sizes and times."""
    for top, files in document.items():
        entries = {file: Entry("", True, False, *kept) for file, kept in files.items()}
        yield Identity(parse_location(top), entries)


def marker_texts(checkpoints: Sequence[Checkpoint], destination: Location) -> dict[str, str]:
    """Orbax's commit markers and their texts, by their paths below a destination: on a disk as in
    the source; in a bucket one in each item, and then one in each step."""
    places = []
    for inner in (True, False):
        for ckpt in checkpoints:
            source = ckpt.source
            folders = [_joined(source.step, source.item)] if inner else [source.step]
            if inner and not destination.is_local:
                folders = [*(_joined(source.step, item) for item in source.items), *folders]
            for folder in folders:
                marked = not destination.is_local or (source.root / folder / MARKER).exists()
                if marked or (source.root / folder / CHECKPOINT_FILE).exists():
                    places.append(_joined(folder, MARKER))
    last = reversed(dict.fromkeys(reversed(places)))
    text = "Checkpoint commit was successful to"
    return {place: f"{text} {(destination / place).parent}" for place in last}
