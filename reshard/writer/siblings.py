"""What is beside the arrays of an item: other items and files, and the commit markers; and
whether any of it has changed."""

import concurrent.futures
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.arrays.handle import stored_name
from reshard.checkpoint import Checkpoint
from reshard.engine.batches import in_groups
from reshard.engine.budget import copy_bytes
from reshard.errors import DestinationError
from reshard.loader.detection import (
    ARRAYS_FOLDER,
    CHECKPOINT_FILE,
    MARKER,
    PROGRESS_FILE,
    SHARDING_FILE,
    STRINGS_FILE,
    TEMPORARY,
    TREE_FILE,
    is_step,
    step_directories,
)
from reshard.storage import posix
from reshard.storage.location import Location
from reshard.storage.ocdbt import MANIFEST, PROCESS
from reshard.storage.posix import Entry
from reshard.verify import digest_record
from reshard.writer import directory_commit

# Names in an item's directory that the writer makes itself, but for arrays and staged databases.
WRITTEN = frozenset(
    {
        TREE_FILE,
        SHARDING_FILE,
        ARRAYS_FOLDER,
        STRINGS_FILE,
        MANIFEST,
        "d",
        MARKER,
        digest_record.FILE,
        digest_record.TEMPORARY,
    }
)
# Files that may be written at any time.
NO_STATE = (digest_record.FILE, digest_record.TEMPORARY)
# Files that are copied at once from or to a bucket.
_COPIES = 32
# Files of a tree of arrays that hold nothing but encoded values or nodes of a B-tree, by what is in
# the directory above: neither Orbax nor TensorStore writes to one again once it is complete.
_IMMUTABLE = (
    (re.compile(r"(.+)/d/[0-9a-f]+", re.DOTALL), MANIFEST),
    (re.compile(rf"(.+)/{re.escape(PROCESS)}[^/]*/d/[0-9a-f]+", re.DOTALL), MANIFEST),
    (re.compile(r"(.+)/\d+(?:\.\d+)*", re.DOTALL), ".zarray"),
    (re.compile(r"(.+)/c(?:/\d+)*", re.DOTALL), "zarr.json"),
)


class CopiedFile(NamedTuple):
    """A file beside the arrays, as it was when it was copied or shared: bytes, time of its last
    change, and SHA-256 of what was read."""

    nbytes: int
    mtime_ns: int
    sha256: str

    @staticmethod
    def parse(entry: Sequence[Any]) -> "CopiedFile":
        """What JSON makes of it; raises ValueError or TypeError for anything else."""
        found = CopiedFile(*entry)
        whole = type(found.nbytes) is type(found.mtime_ns) is int
        if not whole or len(bytes.fromhex(found.sha256)) != 32:
            raise ValueError("a file that no job has copied")
        return found


class Sibling(NamedTuple):
    """A file or a directory that is the same in the destination: its path there and below the
    source's root, what it was when it was listed, and whether it is shared with the source by a
    hard link, or else copied."""

    path: str
    source: Location
    entry: Entry
    linked: bool

    @property
    def is_file(self) -> bool:
        return self.entry.is_file

    @property
    def nbytes(self) -> int:
        return max(self.entry.nbytes, 0) if self.is_file else 0


def siblings(
    checkpoints: Sequence[Checkpoint], target: Location | None, link: bool
) -> list[Sibling]:
    """All that is copied as it is, each directory before what is in it: everything in a manager's
    root but its steps, everything in a step but the item that is written, and everything in that
    item but its arrays and the documents that describe them. With `link`, files that nobody writes
    to again are shared with the source where the target's file system allows it.

    Raises:
      CheckpointFormatError: there is something else than files and directories in it, or they are
        nested too deep.
    """
    root = checkpoints[0].source.root
    link = link and root.is_local and (target is None or target.is_local)
    device = posix.device(target) if link and target is not None else None

    @functools.cache
    def in_tree(folder: Location) -> bool:
        """Whether it is an item with a tree of arrays, or below one."""
        return (folder / TREE_FILE).is_file() or (folder != root and in_tree(folder.parent))

    def is_shared(file: Location, entry: Entry) -> bool:
        if not (link and entry.is_file and device in (None, entry.file[0])):
            return False
        found = ((pattern.fullmatch(str(file)), document) for pattern, document in _IMMUTABLE)
        return in_tree(file.parent) and any(
            match is not None and (Location(match[1]) / document).is_file()
            for match, document in found
        )

    found = [
        (root / top / entry.path, entry)
        for top in _tops(checkpoints)
        for entry in (root / top).checked_walk()
    ]
    return [
        Sibling(path.below(root) or "", path, entry, is_shared(path, entry))
        for path, entry in found
    ]


def _tops(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Paths, below the root, of the files and directories that all siblings are, or are below."""
    root = checkpoints[0].source.root
    skips: dict[str, Callable[[str], bool]] = {}  # names in a folder that are none
    if checkpoints[0].source.kind == "manager":
        steps = set(step_directories(root).values())
        if not root.is_local:  # where steps are told by their names, as `logs_2024` might be
            steps = {name for name in steps if name.isdigit() or is_step(root / name)}
        skips[""] = lambda name: name in steps or TEMPORARY in name
    for c in checkpoints:
        step, item = c.source.step, c.source.item
        if item:
            skips[step] = lambda name, item=item: name in (item, MARKER)
        skips[_joined(step, item)] = _is_written(c)
    return sorted(
        _joined(folder, name)
        for folder, skip in skips.items()
        for name in (root / folder).names()
        if not (skip(name) or name == PROGRESS_FILE)
        and not name.startswith(directory_commit.UNFINISHED_PREFIX)
    )


def _joined(*parts: str) -> str:
    """A path of the parts that are not empty."""
    return "/".join(filter(None, parts))


def is_sibling(ckpt: Checkpoint, file: Location) -> bool:
    """Whether a file of the source is copied as it is."""
    below = file.below(ckpt.source.store.directory)
    return below is None or not _is_written(ckpt)(below.partition("/")[0])


def _is_written(ckpt: Checkpoint) -> Callable[[str], bool]:
    """Names in an item's directory that the writer makes itself."""
    # An older Orbax's copy of the tree may be no longer true.
    own = {*WRITTEN, "checkpoint"} if ckpt.retyped else WRITTEN
    roots = {name.partition("/")[0] for name in ckpt.source.store.values}
    ocdbt_source = ckpt.source.store.ocdbt
    return lambda name: (
        name in own or name.startswith(PROCESS) or (not ocdbt_source and name in roots)
    )


def clear(checkpoints: Sequence[Checkpoint], found: Sequence[Sibling], directory: Location) -> None:
    """Makes the directories of siblings, and removes what else an earlier run may have left there:
    what is no sibling, or is a file in a directory's place. A bucket has no directories, and
    nothing is left in it but what the same job has written."""
    if not directory.is_local:
        return
    tops = _tops(checkpoints)
    arrays = {
        _joined(c.source.step, c.source.item, stored_name(handle.path).partition("/")[0])
        for c in checkpoints
        for handle in c.arrays
        if tops
    }
    wanted = {sibling.path: sibling.is_file for sibling in found}
    for top in tops:
        if top in arrays:  # an array may have got the name of what was beside it
            continue
        for left in (directory / top).walk():
            path = f"{top}/{left.path}"
            if wanted.get(path) != (not left.is_dir):
                posix.remove(directory / path)
    for sibling in found:
        copy = directory / sibling.path
        left = copy.entry()
        if left is not None and left.is_file != sibling.is_file:
            posix.remove(copy)
        (copy.parent if sibling.is_file else copy).make_directory()


def copy_siblings(
    found: Sequence[Sibling],
    directory: Location,
    max_memory: int,
    copied: dict[str, CopiedFile],
    advance: Callable[[], None],
    report: Callable[[int], None],
) -> None:
    """Copies files that are not shared with the source. All of them are hashed while they are read,
    each once; `copied`, what an earlier run has copied or hashed, is completed. From or to a bucket
    several are copied at once, as many as fit into memory."""
    todo = []
    for sibling in found:
        if not sibling.is_file:
            continue
        then, copy = copied.get(sibling.path), directory / sibling.path
        size, mtime = sibling.entry.nbytes, sibling.entry.modified
        same = then is not None and (then.nbytes, then.mtime_ns) == (size, mtime)
        if then is not None and same and (sibling.linked or _is_copy(copy, sibling, then.sha256)):
            report(sibling.nbytes)
        else:
            todo.append(sibling)
    here = directory.is_local and all(sibling.source.is_local for sibling in todo)
    told = report if here else lambda nbytes: None  # by one thread alone

    def hash_of(sibling: Sibling) -> str:
        copy = None if sibling.linked else directory / sibling.path
        return sibling.source.copy(copy, told, sibling.entry.nbytes)

    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        count = 1 if here else _COPIES
        for some in in_groups(todo, lambda s: copy_bytes(s.nbytes), max_memory, count):
            run = map if len(some) == 1 else pool.map
            for sibling, sha256 in zip(some, run(hash_of, some), strict=True):
                entry = sibling.entry
                copied[sibling.path] = CopiedFile(entry.nbytes, entry.modified, sha256)
                if not here:
                    report(sibling.nbytes)
            advance()


def _is_copy(copy: Location, sibling: Sibling, sha256: str) -> bool:
    """Whether an earlier run's copy is whole, and no link."""
    found = copy.entry()
    if found is None or found.nbytes != sibling.nbytes:
        return False
    if copy.is_local and found.file == sibling.entry.file:
        return False
    return copy.sha256() == sha256


def check_there(found: Sequence[Sibling], directory: Location) -> dict[str, Entry]:
    """What is in a directory. Raises DestinationError where copies are gone, or have other sizes,
    as where a manager of checkpoints has swept some of the directory away."""
    there = {entry.path: entry for entry in directory.walk() if entry.is_file}
    gone = []
    for sibling in found:
        if sibling.is_file:
            copy, expected = there.get(sibling.path), sibling.entry.nbytes
            told = copy is not None and posix.UNKNOWN not in (copy.nbytes, expected)
            if copy is None or (told and copy.nbytes != expected):
                gone.append(f"`{directory / sibling.path}`")
    if gone:
        raise DestinationError("files were removed or changed while others were written", gone)
    return there


def source_state(checkpoints: Sequence[Checkpoint], opened: bool = False) -> dict[str, str]:
    """Of each item's directory, and of all that is copied beside it, a hash of which files there
    are, of their sizes and when they were last changed: of items as they were `opened`, where that
    is known.

    Not of records of digests, which may be written at any time and change nothing; nor of what is
    beside the steps in a manager's root, where a training may be writing its logs.
    """
    known = {c.source.store.directory: c.source.state for c in checkpoints if opened}
    with checkpoints[0].source.root.remembered():
        for checkpoint in checkpoints:
            checkpoint.source.store.directory.ahead(below=True)
        return {
            str(path): known.get(path) or path.state(NO_STATE) for path in _state_paths(checkpoints)
        }


def state_of(paths: Iterable[Location]) -> dict[str, str]:
    """Of each path, what `source_state` says of it now."""
    return {str(path): path.state(NO_STATE) for path in paths}


def _state_paths(checkpoints: Sequence[Checkpoint]) -> list[Location]:
    items = [checkpoint.source.store.directory for checkpoint in checkpoints]
    beside: list[Location] = []
    with contextlib.suppress(OSError):  # it is not there any more, and so counts as changed
        source = checkpoints[0].source
        steps = source.root if source.kind == "manager" else None
        tops = (source.root / top for top in _tops(checkpoints))
        beside = [path for path in tops if path.parent != steps]
    return [*items, *(path for path in beside if not any(path.below(item) for item in items))]


def changed_paths(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, of what `source_state` gave at two times."""
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]


def is_marker(path: str) -> bool:
    """Whether it is the path of a commit marker."""
    return path.rpartition("/")[2] == MARKER


def marker_places(checkpoints: Sequence[Checkpoint], directory: Location) -> list[str]:
    """Paths of the commit markers below a destination: on a disk where the source has them; in a
    bucket in every item, and then in the steps."""
    places = []
    for inner in (True, False):
        for ckpt in checkpoints:
            source = ckpt.source
            folders = [_joined(source.step, source.item)] if inner else [source.step]
            if inner and not directory.is_local:
                folders = [*(_joined(source.step, item) for item in source.items), *folders]
            for folder in folders:
                marked = not directory.is_local or (source.root / folder / MARKER).exists()
                if marked or (source.root / folder / CHECKPOINT_FILE).exists():
                    places.append(_joined(folder, MARKER))
    return list(reversed(dict.fromkeys(reversed(places))))


def write_markers(places: Sequence[str], directory: Location, target: Location) -> None:
    """Commit markers, each there before what comes next is done."""
    for place in places:
        text = f"Checkpoint commit was successful to {(target / place).parent}"
        (directory / place).write(text.encode(), durable=True)
