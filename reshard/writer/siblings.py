"""Everything around the arrays of an item: other items and files, and the commit markers; and
whether any of it has changed."""

import contextlib
import functools
import hashlib
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.arrays.handle import stored_name
from reshard.checkpoint import Checkpoint
from reshard.loader.detection import CHECKPOINT_FILE, TEMPORARY, TREE_FILE, step_directories
from reshard.storage import durable, posix
from reshard.verify import digest_record
from reshard.writer import commit
from reshard.writer.item_progress import CopiedFile

MARKER = "commit_success.txt"
# Files of a tree of arrays that hold nothing but encoded values or nodes of a B-tree, by what is in
# the directory above: neither Orbax nor TensorStore writes to one again once it is complete.
_IMMUTABLE = (
    (re.compile(r"(.+)/d/[0-9a-f]+", re.DOTALL), "manifest.ocdbt"),
    (re.compile(r"(.+)/\d+(?:\.\d+)*", re.DOTALL), ".zarray"),
    (re.compile(r"(.+)/c(?:/\d+)*", re.DOTALL), "zarr.json"),
)


class Sibling(NamedTuple):
    """A file or a directory that is the same in the destination.

    Attributes:
      path: below the destination, and below the source's root.
      source: in the source.
      status: of the source, when it was listed.
      linked: whether it is shared with the source by a hard link, or else copied.
    """

    path: str
    source: pathlib.Path
    status: os.stat_result
    linked: bool

    @property
    def is_file(self) -> bool:
        """Whether it is no directory."""
        return stat.S_ISREG(self.status.st_mode)

    @property
    def nbytes(self) -> int:
        """Bytes of a file."""
        return self.status.st_size if self.is_file else 0


def siblings(
    checkpoints: Sequence[Checkpoint], target: pathlib.Path | None, link: bool
) -> list[Sibling]:
    """All that is carried over as it is, each directory before what is in it.

    Everything in a manager's root but its steps, everything in a step but the item that is
    written, and everything in that item but its arrays and the documents that describe them.

    Args:
      checkpoints: what is written.
      target: where to; None where that is not known yet.
      link: whether files that nobody writes to again may be shared with the source.

    Raises:
      CheckpointFormatError: there is something else than files and directories in it, or they are
        nested too deep.
    """
    root = checkpoints[0].source.root
    device = None if target is None else posix.device(target)

    @functools.cache
    def in_tree(folder: str) -> bool:
        """Whether it is an item with a tree of arrays, or below one."""
        above = os.path.dirname(folder)
        return os.path.isfile(os.path.join(folder, TREE_FILE)) or (
            len(above) >= len(str(root)) and in_tree(above)
        )

    def is_shared(path: str, status: os.stat_result) -> bool:
        if not (link and stat.S_ISREG(status.st_mode) and device in (None, status.st_dev)):
            return False
        found = ((pattern.fullmatch(path), document) for pattern, document in _IMMUTABLE)
        return in_tree(os.path.dirname(path)) and any(
            match is not None and os.path.isfile(os.path.join(match[1], document))
            for match, document in found
        )

    return [
        Sibling(os.path.relpath(path, root), pathlib.Path(path), status, is_shared(path, status))
        for _, top in _tops(checkpoints)
        for path, status in posix.walk(top)
    ]


def _tops(checkpoints: Sequence[Checkpoint]) -> list[tuple[str, pathlib.Path]]:
    """Path below the destination -> path in the source, of the files and directories that all
    siblings are, or are below."""
    found: dict[str, pathlib.Path] = {}
    source = checkpoints[0].source
    items = {(c.source.step, c.source.item) for c in checkpoints}

    def add(folder: str, skip: Callable[[str], bool]) -> None:
        for name in sorted(os.listdir(source.root / folder)):
            of_a_job = name == digest_record.PROGRESS_FILE or name.startswith(
                commit.UNFINISHED_PREFIX
            )
            if not skip(name) and not of_a_job:
                relative = os.path.join(folder, name)
                found[relative] = source.root / relative

    if source.kind == "manager":
        steps = set(step_directories(source.root).values())
        add("", lambda name: name in steps or TEMPORARY in name)
    for step, item in items:
        if item:
            add(step, lambda name, item=item: name in (item, MARKER))
    for c in checkpoints:
        add(os.path.join(c.source.step, c.source.item), _is_written(c))
    return sorted(found.items())


def is_sibling(ckpt: Checkpoint, file: pathlib.Path) -> bool:
    """Whether a file of the source is carried over as it is."""
    item = ckpt.source.store.directory
    return item not in file.parents or not _is_written(ckpt)(file.relative_to(item).parts[0])


def _is_written(ckpt: Checkpoint) -> Callable[[str], bool]:
    """Names in an item's directory that the writer makes itself."""
    own = {
        "_METADATA",
        "_sharding",
        "array_metadatas",
        "_strings.json",
        "manifest.ocdbt",
        "d",
        MARKER,
        digest_record.FILE,
        digest_record.TEMPORARY,
    }
    if ckpt.retyped:
        own.add("checkpoint")  # an older Orbax's copy of the tree, which is no longer true
    roots = {name.partition("/")[0] for name in ckpt.source.store.values}
    ocdbt_source = ckpt.source.store.ocdbt
    return lambda name: (
        name in own or name.startswith("ocdbt.process_") or (not ocdbt_source and name in roots)
    )


def clear(
    checkpoints: Sequence[Checkpoint], found: Sequence[Sibling], directory: pathlib.Path
) -> None:
    """Makes the directories of siblings, and removes what else an earlier run may have left there:
    what is no sibling, or is a file in a directory's place."""
    arrays = {
        os.path.join(c.source.step, c.source.item, stored_name(handle.path).partition("/")[0])
        for c in checkpoints
        for handle in c.arrays
    }
    wanted = {sibling.path: sibling.is_file for sibling in found}
    for top, _ in _tops(checkpoints):
        if top in arrays:  # an array may have got the name of what was beside it
            continue
        for folder, folders, names in os.walk(directory / top):
            for name in (*folders, *names):
                path = pathlib.Path(folder, name)
                if wanted.get(os.path.relpath(path, directory)) != (name in names):
                    posix.remove(path)
    for sibling in found:
        copy = directory / sibling.path
        if os.path.lexists(copy) and copy.is_file() != sibling.is_file:
            posix.remove(copy)
        (copy.parent if sibling.is_file else copy).mkdir(parents=True, exist_ok=True)


def link_siblings(found: Sequence[Sibling], directory: pathlib.Path) -> bool:
    """Shares files with the source; False if that is forbidden."""
    return all(posix.link(s.source, directory / s.path) for s in found if s.linked)


def copy_siblings(
    found: Sequence[Sibling],
    directory: pathlib.Path,
    copied: dict[str, CopiedFile],
    advance: Callable[[], None],
    report: Callable[[int], None],
) -> None:
    """Copies files that are not shared with the source. All of them are hashed while they are read,
    each once.

    Args:
      found: the siblings.
      directory: where to.
      copied: what an earlier run has copied or hashed, by path; it is completed.
      advance: called after each file.
      report: called with numbers of bytes that have been read.
    """
    for sibling in found:
        if not sibling.is_file:
            continue
        then, copy = copied.get(sibling.path), directory / sibling.path
        size, mtime = sibling.status.st_size, sibling.status.st_mtime_ns
        same = then is not None and (then.nbytes, then.mtime_ns) == (size, mtime)
        if then is not None and same and (sibling.linked or _is_copy(copy, sibling, then.sha256)):
            report(size)
            continue
        sha256 = posix.copy_file(sibling.source, None if sibling.linked else copy, report)
        copied[sibling.path] = CopiedFile(size, mtime, sha256)
        advance()


def _is_copy(copy: pathlib.Path, sibling: Sibling, sha256: str) -> bool:
    """Whether an earlier run's copy is whole, and no link."""
    try:
        status = os.lstat(copy)
    except FileNotFoundError:
        return False
    linked = os.path.samestat(status, sibling.status)
    return not linked and status.st_size == sibling.nbytes and posix.copy_file(copy, None) == sha256


def source_state(checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Of each item's directory, and of all that is copied beside it, a hash of which files there
    are, of their sizes and when they were last changed.

    Not of records of digests, which may be written at any time and change nothing; nor of what is
    beside the steps in a manager's root, where a training may be writing its logs.
    """
    items = [checkpoint.source.store.directory for checkpoint in checkpoints]
    beside: list[pathlib.Path] = []
    with contextlib.suppress(OSError):  # it is not there any more, and so counts as changed
        source = checkpoints[0].source
        steps = source.root if source.kind == "manager" else None
        beside = [path for _, path in _tops(checkpoints) if path.parent != steps]
    own = {*items}
    others = [path for path in beside if own.isdisjoint(path.parents)]
    state = {}
    for path in (*items, *others):
        lines = "".join(f"{line}\n" for line in _listed(path))
        state[str(path)] = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
    return state


def _listed(path: pathlib.Path) -> Iterator[str]:
    """A file, or every file below a directory, with its size and when it was last changed."""
    files = [str(path)] if path.is_file() else []
    for folder, folders, names in os.walk(path):
        folders.sort()
        files += [os.path.join(folder, name) for name in sorted(names)]
    for file in files:
        if os.path.basename(file) not in (digest_record.FILE, digest_record.TEMPORARY):
            with contextlib.suppress(FileNotFoundError):  # it is not there any more
                status = os.lstat(file)
                yield repr((file, status.st_size, status.st_mtime_ns))


def changed_paths(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, of what `source_state` gave at two times."""
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]


def write_markers(
    checkpoints: Sequence[Checkpoint], directory: pathlib.Path, target: pathlib.Path
) -> None:
    """The commit markers, last of all, each on the disk before the directory gets its name."""
    for ckpt in checkpoints:
        source = ckpt.source
        for folder in dict.fromkeys((os.path.join(source.step, source.item), source.step)):
            marked = (source.root / folder / MARKER).exists()
            if marked or (source.root / folder / CHECKPOINT_FILE).exists():
                text = f"Checkpoint commit was successful to {target / folder}"
                durable.write(directory / folder / MARKER, text.encode())
