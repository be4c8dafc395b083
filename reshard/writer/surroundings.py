"""Everything around the arrays of an item: other items and files, and the commit markers; and
whether any of it has changed."""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

from reshard import durable, records
from reshard.checkpoint import Checkpoint, stored_name
from reshard.loader.layout import CHECKPOINT_FILE, TEMPORARY, step_directories
from reshard.writer import local

MARKER = "commit_success.txt"


def surroundings(checkpoints: Sequence[Checkpoint]) -> list[tuple[str, pathlib.Path]]:
    """What is copied byte for byte: path below the destination -> path in the source.

    Everything in a manager's root but its steps, everything in a step but the item that is
    written, and everything in that item but its arrays and the documents that describe them.
    """
    found: dict[str, pathlib.Path] = {}
    source = checkpoints[0].source
    items = {(c.source.step, c.source.item) for c in checkpoints}

    def add(folder: str, skip: Callable[[str], bool]) -> None:
        for name in sorted(os.listdir(source.root / folder)):
            if not skip(name) and name != records.PROGRESS_FILE:
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
        records.FILE,
        records.TEMPORARY,
    }
    if ckpt.retyped:
        own.add("checkpoint")  # an older Orbax's copy of the tree, which is no longer true
    roots = {name.partition("/")[0] for name in ckpt.source.store.values}
    ocdbt_source = ckpt.source.store.ocdbt
    return lambda name: (
        name in own or name.startswith("ocdbt.process_") or (not ocdbt_source and name in roots)
    )


def copy_surroundings(checkpoints: Sequence[Checkpoint], directory: pathlib.Path) -> None:
    """Copies them, in the place of what an earlier run has copied."""
    arrays = {
        os.path.join(c.source.step, c.source.item, stored_name(handle.path).partition("/")[0])
        for c in checkpoints
        for handle in c.arrays
    }
    for relative, path in surroundings(checkpoints):
        copy = directory / relative
        if relative not in arrays:  # an array may have got the name of what was beside it
            _remove(copy)
        local.copy_tree(path, copy)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
        beside = [path for _, path in surroundings(checkpoints) if path.parent != steps]
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
        if os.path.basename(file) not in (records.FILE, records.TEMPORARY):
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
