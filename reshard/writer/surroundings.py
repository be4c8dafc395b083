"""Everything around the arrays of an item: other items and files, and the commit markers."""

import os
import pathlib
from collections.abc import Callable, Sequence

from reshard import durable, records
from reshard.checkpoint import Checkpoint
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
    for relative, path in surroundings(checkpoints):
        local.copy_tree(path, directory / relative)


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
