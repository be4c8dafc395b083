"""Detects the format of a path: an item, a step, a manager's root, or a file of another program.

Facts about names on disk are those of orbax-checkpoint 0.4.4 to 0.12.8.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from reshard.checkpoint import Item
from reshard.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UncommittedCheckpointError,
)
from reshard.loader.hf_files import check_no_pointer, snapshot
from reshard.loader.json_documents import read_json
from reshard.storage.location import Location, parse_location
from reshard.storage.ocdbt import MANIFEST, PROCESS
from reshard.tree import as_python

TREE_FILE = "_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"
ARRAYS_FOLDER = "array_metadatas"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
V1_MARKER = "orbax.checkpoint"
TEMPORARY = ".orbax-checkpoint-tmp"
SAFETENSORS = ".safetensors"
MSGPACK_FILE = ".msgpack"
MARKER = "commit_success.txt"
# The commit record of a job in a bucket, written before any file that Orbax reads: see
# `reshard.writer.commit`.
RECORD = "reshard_commit.json"
# The v1 API's record of an item that is being deleted.
DELETION_FILE = "_CHECKPOINT_DELETION"
# Documents of an item or a step that are read.
_DOCUMENTS = (CHECKPOINT_FILE, DELETION_FILE, TREE_FILE, SHARDING_FILE, STRINGS_FILE, MANIFEST)
# Names in an item or a step of Orbax that no other program writes, and names of zarr metadata.
_ORBAX = {*_DOCUMENTS, V1_MARKER, ARRAYS_FOLDER, MARKER, RECORD, "checkpoint"} - {MANIFEST}
_ZARR = (".zarray", "zarr.json")
# The digest record of an item, written at any time: see `reshard.verify.digest_record`.
RECORD_FILE = "reshard_digests.json"
RECORD_TEMPORARY = f"{RECORD_FILE}.tmp"
RECORD_FILES = (RECORD_FILE, RECORD_TEMPORARY)
# Ends and beginnings of names that are copied with the weights of a Hugging Face directory.
_ENDS = (".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt")
_BEGINS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_NOT_COPIED = (RECORD_FILE, RECORD)
# The name of an index: `model.safetensors.index.json`, or of a variant of the weights,
# `model.safetensors.index.fp16.json`.
_INDEX = re.compile(r"(.*)\.index(\.[^.]+)?\.json")
# Names that an error lists.
_MOST_LISTED = 10
_STEP_NAME = re.compile(r"(?:.*_)?(\d+)")
_FLAX_NAME = re.compile(r"checkpoint(?:_(\d+))?")
MSGPACK = "a Flax msgpack checkpoint"
_PICKLE = "a pickle, which is never opened: reading it can run any code"
# The first bytes of files of other programs.
_UNSUPPORTED = {
    b"GGUF": "a GGUF file, which is not supported",
    b"\x89HDF": "an HDF5 file, which is not supported",
    b"PK\3\4": "a zip file, as PyTorch and NumPy write them, which is not supported",
    b"\x93NUMPY": "a NumPy file, which is not supported",
}
_UNKNOWN = "a file, not a checkpoint directory"
# Names of files that may hold weights in an unsupported format, and how many of them are examined.
_WEIGHTS = (".gguf", ".h5", ".bin", ".pt", ".pth", ".npz", ".pkl", ".pickle")
_EXAMINED = 20
# Subdirectories in a bucket that are examined for arrays.
_SOME = 8
# Names that a hint lists.
_SHOWN = 5
# Orbax's names for an item that was saved without a name.
_UNNAMED = ("default", "pytree")
# Handlers of items that are not a model's tree of arrays, although they have a `_METADATA`.
_NOT_TREES = ("ArrayCheckpointHandler", "RandomKeyCheckpointHandler", "JsonCheckpointHandler")


def locate(path: str | os.PathLike, step: int | None, item: str | None) -> Item:
    """Finds the item to read. See `reshard.open` for the arguments and the errors."""
    text, root = os.fspath(path), parse_location(path)
    if not root.exists():
        raise CheckpointNotFoundError(f"nothing exists at `{text}`", hints=_siblings(root))
    if not root.is_dir():
        is_safetensors = root.name.endswith(SAFETENSORS) or is_index(root.name)
        if not is_safetensors and (description := describe_file(root)) != MSGPACK:
            check_no_pointer(root)
            raise CheckpointFormatError(f"`{text}` is {description}")
        _refuse(text, step, item)
        return Item(root, "safetensors" if is_safetensors else "msgpack")
    prefetch_documents(root)
    check_committed(root)
    is_one = _is_item(root) or (root / CHECKPOINT_FILE).exists()
    if steps := {} if is_one else step_directories(root):
        committed = _committed(root, steps, step)
        if not committed:
            raise _unrecognised(root, _directories(root))
        if step in steps and step not in committed:
            check_committed(root / steps[step], marked=True)
        number = _chosen_step(text, committed, step)
        located = _in_step(root, committed[number], tuple(sorted(committed)), item)
        return dataclasses.replace(located, uncommitted=tuple(sorted(set(steps) - set(committed))))
    if files := {} if is_one else _flax_steps(root):
        return locate(root / files[_chosen_step(text, files, step)], None, item)
    _refuse(text, step, None)
    if not is_one and (current := snapshot(root)) != root:
        return locate(current, None, item)
    if foreign := _of_another_program(root):
        _refuse(text, None, item)
        return foreign
    return _in_step(root, "", (), item)


def _chosen_step(text: str, steps: Collection[int], step: int | None) -> int:
    number = max(steps) if step is None else step
    if number not in steps:
        near = min(sorted(steps), key=lambda one: abs(one - number))
        lines = [f"its steps: {', '.join(map(str, sorted(steps)))}"]
        raise CheckpointNotFoundError(f"`{text}` has no step {number}", lines, [f"step={near}"])
    return number


def _flax_steps(root: Location) -> dict[int, str]:
    """Step -> name of its file, for the files of `flax.training.checkpoints`."""
    matches = [match for match in map(_FLAX_NAME.fullmatch, root.names()) if match and match[1]]
    named = {int(match[1]): match[0] for match in matches if (root / match[0]).is_file()}
    return named if any(describe_file(root / name) == MSGPACK for name in named.values()) else {}


def _of_another_program(root: Location) -> Item | None:
    """A directory of safetensors or msgpack files, or of zarr arrays that Orbax did not write."""
    names = root.names()
    files = [name for name in names if name.endswith(SAFETENSORS)]
    if files:
        return Item(root, "safetensors")
    files = [name for name in names if name.endswith(MSGPACK_FILE)]
    if any(name.endswith(f"{MSGPACK_FILE}.index.json") for name in names if files):
        return Item(root, "msgpack")
    if len(files) > 1:
        hints = [f"open one of them: {root / files[0]}"]
        raise CheckpointNotFoundError(f"`{root}` has several checkpoints", files, hints)
    if files:
        return Item(root / files[0], "msgpack")
    return Item(root, "zarr") if _is_zarr_tree(root, names) else None


def _is_zarr_tree(root: Location, names: list[str]) -> bool:
    """Whether TensorStore wrote the arrays of a directory for another program than Orbax.

    Then no name that Orbax writes is in it, below it or next to it. One array is two or more levels
    deep, and not all arrays are in one directory: an item of Orbax has each array in a directory of
    its own, directly below it.
    """
    siblings = (root.parent / name for name in (CHECKPOINT_FILE, DELETION_FILE, V1_MARKER))
    if any(map(_is_orbax, names)) or any(sibling.exists() for sibling in siblings):
        return False
    if MANIFEST in names:
        return True
    pending, examined = [root], 0
    while pending and examined < _EXAMINED:
        directory, examined = pending.pop(), examined + 1
        if directory.parent != root and any((directory / key).is_file() for key in _ZARR):
            paths = [entry.path.rpartition("/") for entry in root.walk()]
            arrays = [array for array, _, name in paths if array and name in _ZARR]
            directories = {array.rpartition("/")[0] for array in arrays}
            return len(directories) > 1 and not any(_is_orbax(name) for _, _, name in paths)
        pending += [directory / name for name in directory.directories()[:_SOME][::-1]]
    return False


def _is_orbax(name: str) -> bool:
    return name in _ORBAX or name.startswith(PROCESS) or TEMPORARY in name


def prefetch_documents(directory: Location) -> None:
    """In a bucket, starts all reads of an item's or a step's documents."""
    directory.prefetch(_DOCUMENTS)
    if not directory.is_local and (directory / TREE_FILE).exists():
        directory.prefetch(below=True)
        described = directory / ARRAYS_FOLDER
        described.prefetch(described.names())


def _committed(root: Location, steps: dict[int, str], step: int | None) -> dict[int, str]:
    """The committed steps. In a bucket, all steps before a committed one count as committed: there
    may be thousands, and each check is a request."""
    if root.is_local:
        return {number: name for number, name in steps.items() if is_committed(root / name)}
    if step is not None:
        return {n: name for n, name in steps.items() if n != step or is_committed(root / name)}
    newest = next((n for n in sorted(steps, reverse=True) if is_committed(root / steps[n])), -1)
    return {number: name for number, name in steps.items() if number <= newest}


def manager_steps(root: Location, committed: bool = False) -> dict[int, str]:
    """The steps of a manager's root, or only its `committed` ones; empty for anything else."""
    if not root.is_dir() or _is_item(root) or (root / CHECKPOINT_FILE).exists():
        return {}
    steps = step_directories(root)
    return _committed(root, steps, None) if committed else steps


def lacks_item(directory: Location, item: str) -> bool:
    """Whether a step has items, but not this one. An item without a name counts as any item."""
    names = [item, *_UNNAMED]
    step = directory.is_dir() and not _is_item(directory)
    return step and not any((directory / name).is_dir() for name in names)


def check_inside(item: Item) -> None:
    """Raises CheckpointFormatError if a step or an item is a symbolic link. Its target may be
    outside of the opened directory."""
    for directory in (item.root / item.step, item.directory):
        if directory != item.root and directory.is_symlink():
            raise CheckpointFormatError(
                f"`{directory}` is a symbolic link, which reshard does not follow",
                hints=[f"open what it points to: {directory.resolved()}"],
            )


def step_directories(root: Location) -> dict[int, str]:
    """Step -> name of its directory, for the steps of a manager's root, committed or not. In a
    bucket, only names are examined. Raises CheckpointFormatError if a step has two directories."""
    steps: dict[int, str] = {}
    for name in _directories(root):
        match = _STEP_NAME.fullmatch(name)
        if match is None or (root.is_local and not is_step(root / name)):
            continue
        other = steps.setdefault(int(match[1]), name)
        if other != name:
            raise CheckpointFormatError(
                f"`{root}` has two directories for step {int(match[1])}: `{other}` and `{name}`",
                hints=[f"open one of them: {root / name}"],
            )
    return steps


def is_step(directory: Location) -> bool:
    """Whether a directory has the contents of a step."""
    return (
        (directory / CHECKPOINT_FILE).exists()
        or _is_item(directory)
        or any(_is_item(directory / name) for name in _directories(directory))
    )


def is_copied(name: str) -> bool:
    """Whether a file of a Hugging Face directory is copied with its weights, by its name."""
    ours = name.endswith(_NOT_COPIED) or _INDEX.fullmatch(name)
    return not ours and (name.endswith(_ENDS) or name.startswith(_BEGINS))


def is_index(name: str) -> bool:
    """Whether a file is an index of safetensors files, by its name."""
    match = _INDEX.fullmatch(name)
    return match is not None and match[1].endswith(SAFETENSORS)


def _in_step(root: Location, step: str, steps: tuple[int, ...], item: str | None) -> Item:
    directory = root / step
    kind = "manager" if step else "step"
    prefetch_documents(directory)
    if _is_item(directory):
        _refuse(str(directory), None, item)
        if not step:
            kind = "standalone" if (root / CHECKPOINT_FILE).exists() else "item"
        if kind == "item" and _deleted_item(root.parent) == root.name:
            raise _being_deleted(root)
        check_committed(directory, marked=True)
        return Item(root, kind, step=step, steps=steps)
    names, deleted = _directories(directory), _deleted_item(directory)
    items = tuple(n for n in names if n != deleted and not n.startswith((".", PROCESS)))
    directory.prefetch(lists=items)
    for name in items:
        check_committed(directory / name)
    handlers = (read_json(directory / CHECKPOINT_FILE) or {}).get("item_handlers")
    handlers = handlers if isinstance(handlers, dict) else {}
    trees = [
        name
        for name in items
        if _is_item(directory / name) and not str(handlers.get(name)).endswith(_NOT_TREES)
    ]
    if deleted and (item == deleted or (item is None and not trees)):
        raise _being_deleted(directory / deleted, [f"other items: {', '.join(items)}"])
    if item is None and not trees:
        if any(name.startswith(PROCESS) for name in names):  # of an item that is being written
            check_committed(directory, marked=True)
        raise _unrecognised(directory, items)
    if item is None and len(trees) > 1:
        raise _several(directory, trees)
    if item is not None and item not in items:
        hint = f"its items: {', '.join(items)}"
        raise CheckpointNotFoundError(f"`{directory}` has no item '{item}'", hints=[hint])
    if item is not None and not _is_item(directory / item):
        text = f"item '{item}' of `{directory}` holds no arrays"
        raise CheckpointFormatError(text, hints=[f"item={as_python(name)}" for name in trees])
    check_committed(directory, marked=True)
    v1 = (directory / V1_MARKER).exists()
    return Item(root, kind, v1, step, item or trees[0], steps, items, deleted)


def _several(directory: Location, trees: list[str]) -> CheckpointNotFoundError:
    """The error for several items of a step, or for several checkpoints in a directory."""
    is_step = (directory / CHECKPOINT_FILE).exists()
    if is_step or not all((directory / name / CHECKPOINT_FILE).exists() for name in trees):
        what, hints = "items", [f"item={as_python(name)}" for name in trees]
    else:
        what, hints = "checkpoints", [f"open one of them: {directory / trees[0]}"]
    return CheckpointNotFoundError(f"`{directory}` has several {what}", trees, hints)


def _deleted_item(step: Location) -> str:
    """The item of a step whose deletion is unfinished, or "". Orbax ignores such an item."""
    record = read_json(step / DELETION_FILE)
    if record is None:
        return ""
    name = record.get("checkpointable_name")
    if not isinstance(name, str) or not name:
        raise CorruptCheckpointError(
            f"`{step / DELETION_FILE}` does not name the item that Orbax was deleting"
        )
    return name


def _being_deleted(item: Location, hints: Iterable[str] = ()) -> CheckpointNotFoundError:
    call = f'delete("{item.parent}", checkpointable_name="{item.name}")'
    return CheckpointNotFoundError(
        f"`{item}` is being deleted: `{DELETION_FILE}` next to it records an unfinished deletion",
        hints=[*hints, f"orbax.checkpoint.experimental.v1.{call} finishes the deletion"],
    )


def _refuse(text: str, step: int | None, item: str | None) -> None:
    """Raises CheckpointNotFoundError if a step or an item is given for a single checkpoint."""
    for name, value, what in (("step", step, "checkpoint"), ("item", item, "tree")):
        if value is not None:
            hints = [f"leave out {name}=..."]
            raise CheckpointNotFoundError(f"`{text}` is one {what} and has no {name}s", hints=hints)


def _directories(directory: Location) -> list[str]:
    return [name for name in directory.directories() if TEMPORARY not in name]


def _is_item(directory: Location) -> bool:
    if (directory / TREE_FILE).exists() or (directory / MANIFEST).exists():
        return True
    if (directory / CHECKPOINT_FILE).exists() or (directory / V1_MARKER).exists():
        return False
    names = directory.directories()
    if not directory.is_local:
        names = [name for name in names if not name.isdecimal()][:_SOME]
    return describe_file(directory / "checkpoint") == MSGPACK or any(
        name.startswith(PROCESS) or any((directory / name / key).exists() for key in _ZARR)
        for name in names
    )


def is_committed(directory: Location) -> bool:
    return _why_uncommitted(directory, marked=True) is None


def check_committed(directory: Location, marked: bool = False) -> None:
    """Raises UncommittedCheckpointError for a checkpoint whose writer never finished."""
    if why := _why_uncommitted(directory, marked):
        text = f"`{directory}` was never committed: {why[0]}"
        raise UncommittedCheckpointError(text, hints=why[1:])


def _why_uncommitted(directory: Location, marked: bool) -> tuple[str, str] | None:
    """The reason why a checkpoint counts as uncommitted, and a hint; None if it is committed.

    Orbax writes into a directory with a temporary name, and writes the time of the commit last. On
    a disk, `commit_success.txt` may be missing: Orbax before 0.12.3 did not write it. In a bucket,
    it is written last, so an item or a step must be `marked` with one. The marker of a step also
    counts for its items.
    """
    hint = "use an earlier step: the writer stopped before this one was complete"
    if TEMPORARY in directory.name:
        return "its name is that of a checkpoint in progress", hint
    times = read_json(directory / CHECKPOINT_FILE)
    unfinished = [name for name in directory.names() if TEMPORARY in name]
    if unfinished and times is not None:
        return f"its `{unfinished[0]}` was never finished", hint
    if times and times.get("init_timestamp_nsecs") and not times.get("commit_timestamp_nsecs"):
        return f"its {CHECKPOINT_FILE} has no commit time", hint
    markers = (directory / MARKER, directory.parent / MARKER)
    if directory.is_local or not marked or any(marker.is_file() for marker in markers):
        return None
    hint = f"if it is a copy of a complete checkpoint, put a file `{MARKER}` into it"
    if (directory / RECORD).exists():
        hint = f"reshard.commit({as_python(str(directory))}) completes it"
    return f"its `{MARKER}`, which is written last in a bucket, is missing", hint


def _unrecognised(directory: Location, names: list[str] | tuple[str, ...]) -> Exception:
    names_here = directory.names()
    weights = [n for n in names_here if _FLAX_NAME.fullmatch(n) or n.endswith(_WEIGHTS)]
    described = {name: describe_file(directory / name) for name in weights[:_EXAMINED]}
    unfinished = [name for name in names_here if TEMPORARY in name]
    unfinished = unfinished or [
        name
        for name in names
        if (directory.is_local or (_STEP_NAME.fullmatch(name) and is_step(directory / name)))
        and not is_committed(directory / name)
    ]
    if unfinished:
        return UncommittedCheckpointError(
            f"`{directory}` holds only checkpoints that were never committed", unfinished
        )
    return CheckpointFormatError(
        f"`{directory}` is not a checkpoint",
        [f"no {TREE_FILE}, no {CHECKPOINT_FILE}, no step directories, no zarr arrays"]
        + [f"`{name}` is {what}" for name, what in described.items() if what != _UNKNOWN],
        [] if directory.is_local else [_some_names(directory, names_here)],
    )


def is_record_file(path: Location) -> bool:
    """Whether a path is a file that may be a digest record, and not a checkpoint."""
    if not path.is_file() or path.name.endswith(SAFETENSORS):
        return False
    return describe_file(path) != MSGPACK


def describe_file(path: Location) -> str:
    """The format of a file, in words, from its name and its first bytes."""
    entry = path.entry(follow=True)
    # Only of a file: a pipe may never end.
    start = path.part(0, min(8, entry.nbytes)) if entry and entry.is_file and entry.nbytes else b""
    for magic, description in _UNSUPPORTED.items():
        if start.startswith(magic):
            return description
    # A pickle has a version after this byte. An empty msgpack map ends with it.
    if path.name.endswith((".pkl", ".pickle")) or (start[:1] == b"\x80" and start[1:]):
        return _PICKLE
    # A msgpack map: fixmap, map16 or map32.
    if start and (0x80 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)):
        return MSGPACK
    return _UNKNOWN


def _siblings(path: Location) -> list[str]:
    while not (parent := path.parent).exists() and parent != parent.parent:
        path = parent
    if not parent.is_dir():
        return []
    every = parent.directories()
    if own := [name for name in every if name.startswith(path.name + TEMPORARY)]:
        return [f"`{parent / own[0]}` was never committed"]
    names = [name for name in every if TEMPORARY not in name]
    near = get_close_matches(path.name, names, 1)
    none = "only checkpoints that were never committed" if every else "no directories"
    listed = _some_names(parent, names, none)
    return [f"the nearest is `{parent / near[0]}`" if near else listed]


def _some_names(directory: Location, names: list[str], none: str = "nothing") -> str:
    more = ["..."] if len(names) > _SHOWN else []
    return f"`{directory}` has: {', '.join([*names[:_SHOWN], *more]) or none}"
