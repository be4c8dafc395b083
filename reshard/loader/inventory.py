"""What a directory holds: each name in it has exactly one role.

A root knows its steps and `metadata/_ROOT_METADATA`, a step knows its items, and an item knows its
documents and chunks. Anything else belongs to somebody else. Facts about names on disk are those
of orbax-checkpoint 0.4.4 to 0.12.8.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    UncommittedCheckpointError,
)
from reshard.loader import detection
from reshard.loader.detection import CHECKPOINT_FILE, MARKER, RECORD, TEMPORARY, TREE_FILE
from reshard.loader.json_documents import read_json
from reshard.storage.disk import Entry
from reshard.storage.location import Location
from reshard.storage.ocdbt import FOLDERS, MANIFEST, PROCESS
from reshard.tree import as_python

# The directory of a root with the metadata of the whole run, and the only name in it.
ROOT_FOLDER, ROOT_FILE = "metadata", "_ROOT_METADATA"
# The prefix of a job's directory, next to its destination. Orbax does not list or remove it. Orbax
# would take a name that ends in digits for a step, and its CheckpointManager removes names with
# Orbax's own temporary suffix.
UNFINISHED_PREFIX = ".reshard-"
# Part of the name of a checkpoint that a job has put aside. It is not a name of a step, and not
# temporary: an old checkpoint must not be swept away by a manager.
REPLACED_SUFFIX = ".replaced-by-reshard"
# `prefix_100` or `100`. Orbax's steps have ASCII digits only.
_STEP_NAME = re.compile(r"(?:(.*)_)?([0-9]+)", re.DOTALL)


class Level(enum.Enum):
    """What a directory is: a manager's root, a step, or an item. A checkpoint of one item without
    a directory of its own is an item."""

    ROOT = "root"
    STEP = "step"
    ITEM = "item"


class Role(enum.Enum):
    """What a name in a directory is."""

    STEP = "step"
    ITEM = "item"
    DOCUMENT = "document"  # a file of metadata, or a directory of such files
    CHUNKS = "chunks"  # a file or a directory with values of arrays
    MARKER = "marker"  # of a commit
    JOB = "job"  # what a job of reshard writes beside, or leaves
    TEMPORARY = "temporary"  # Orbax has not finished it
    OTHER = "other"  # somebody else's


# What the names are that a level knows.
_KNOWN = {Level.ROOT: Role.STEP, Level.STEP: Role.ITEM, Level.ITEM: Role.CHUNKS}
# Documents of each level. An item may have all those of a step.
_DOCUMENTS = {
    Level.ROOT: {ROOT_FOLDER},
    Level.STEP: {CHECKPOINT_FILE, detection.DELETION_FILE, detection.V1_MARKER},
    Level.ITEM: {*detection.DOCUMENTS, *detection.RECORD_FILES, detection.V1_MARKER}
    | {detection.ARRAYS_FOLDER, "checkpoint"},
}


class Named(NamedTuple):
    """A name in a directory: its role, and why it has that role if its name suggests another."""

    name: str
    role: Role
    entry: Entry
    why: str = ""


class Form(NamedTuple):
    """A form of the names of steps: `prefix_` or nothing, then a number of at least `width` digits.
    Orbax pads a number with zeros to this width."""

    prefix: str | None
    width: int

    def step_name(self, number: int | str) -> str:
        prefix = "" if self.prefix is None else f"{self.prefix}_"
        return prefix + str(number).rjust(self.width, "0")

    def __str__(self) -> str:
        return self.step_name("N")


def step_number(name: str) -> int | None:
    """The number of a step's name, of any form; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[2]) if match else None


def step_forms(names: Iterable[str]) -> dict[Form, dict[int, str]]:
    """The forms that names of steps have, each with its steps: number -> name, ascending. Plain
    numbers without zeros come first. A form is left out if another one has all of its names."""
    parsed = [match for match in map(_STEP_NAME.fullmatch, names) if match]
    forms = {Form(m[1], len(m[2]) if m[2][0] == "0" else 1) for m in parsed}
    numbers = sorted((int(m[2]), m[0]) for m in parsed)
    found = {
        form: {number: name for number, name in numbers if name == form.step_name(number)}
        for form in sorted(forms, key=lambda form: (form.prefix is not None, form))
    }
    return {
        form: steps
        for form, steps in found.items()
        if not any({*steps.values()} < {*others.values()} for others in found.values())
    }


def roles(
    entries: Iterable[Entry], level: Level, known: Collection[str] = frozenset()
) -> list[Named]:
    """The role of each name in a directory, sorted by name.

    Args:
      entries: the directory's listing.
      level: what the directory is.
      known: the names that belong to it: of a root its steps, of a step its items, of an item its
        arrays (the first part of a name that has a slash).
    """
    return [_named(entry, level, known) for entry in sorted(entries)]


def _named(entry: Entry, level: Level, known: Collection[str]) -> Named:
    name, role, why = entry.path, Role.OTHER, ""
    if TEMPORARY in name:
        role = Role.TEMPORARY
    elif name.startswith(UNFINISHED_PREFIX) or REPLACED_SUFFIX in name or name == RECORD:
        role = Role.JOB
    elif name == MARKER and level is not Level.ROOT:
        role = Role.MARKER
    elif name in known and (entry.is_dir or level is Level.ITEM):
        role = _KNOWN[level]
    elif level is Level.ITEM and (name in FOLDERS or name.startswith(PROCESS)):
        role = Role.CHUNKS
    elif name in _DOCUMENTS[level] and (entry.is_dir or level is not Level.ROOT):
        role = Role.DOCUMENT
    elif level is Level.ROOT and entry.is_dir and step_number(name) is not None:
        why = "its name is not of the form of the steps"
    return Named(name, role, entry, why)


# Directories.


class State(enum.Enum):
    """Whether a step can be used. A damaged one counts as whole: its error says what is damaged."""

    WHOLE = "whole"
    UNFINISHED = "unfinished"  # its writer stopped
    UNREADABLE = "unreadable"  # for this user
    EMPTY = "empty"  # it holds no checkpoint


class Status(NamedTuple):
    """The state of a step, why, and what to do about it."""

    state: State
    why: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What a root holds, from one listing. A step is looked into when it is asked for: there may be
    thousands, and in a bucket each look is a request."""

    place: Location
    names: Sequence[Named]
    steps: Mapping[int, str]  # number -> name, ascending, of steps in any state
    looked: dict[int, Status] = dataclasses.field(default_factory=dict)  # so far

    @property
    def temporary(self) -> list[str]:
        """The names of what Orbax has begun."""
        return [each.name for each in self.names if each.role is Role.TEMPORARY]

    @property
    def begun(self) -> set[int]:
        """Steps that Orbax has only under temporary names."""
        numbers = {step_number(name.partition(TEMPORARY)[0]) for name in self.temporary}
        return {n for n in numbers if n is not None} - self.steps.keys()

    def status(self, step: int) -> Status:
        """The status of a step at the first look."""
        if step not in self.looked:
            self.looked[step] = status(self.place / self.steps[step])
        return self.looked[step]

    @functools.cached_property
    def latest(self) -> int | None:
        """The latest step that can be used. Those after it were looked into."""
        newest = reversed([*self.steps])
        return next((step for step in newest if self.status(step).state is State.WHOLE), None)

    def is_root(self, step: int | None = None) -> bool:
        """Whether it is a manager's root: one of its steps, this `step` first, holds something. In
        a bucket, markers of steps say so, and without them their contents."""
        if not self.place.is_local:
            return step in self.steps or self.latest is not None or has_step(self.place, self.steps)
        looked = [*self.steps.keys() & {step}, *reversed([*self.steps])]
        return any(self.status(each).state is not State.EMPTY for each in looked)

    def states(self) -> dict[int, State]:
        """The state of each step. In a bucket, a step that was not looked into counts as whole."""
        known = self.steps if self.place.is_local else self.looked
        return {n: self.status(n).state if n in known else State.WHOLE for n in self.steps}

    def find_steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The committed steps, and those that were never committed, each ascending."""
        states = self.states()
        unfinished = {step for step in states if states[step] is State.UNFINISHED}
        whole = tuple(step for step in states if states[step] is State.WHOLE)
        return whole, tuple(sorted(unfinished | self.begun))


def list_root(place: Location) -> Inventory:
    """The inventory of a manager's root. If the names of steps have several forms, those count that
    a directory with a checkpoint has, and plain numbers without zeros come first. Raises
    CheckpointFormatError if several are left."""
    entries = place.entries()
    forms = step_forms(each.name for each in roles(entries, Level.ROOT) if each.why)
    held = {}
    for form, steps in forms.items():
        if len(forms) == 1 or has_step(place, steps):
            held[form] = steps
            if form == Form(None, 1):
                break
    if len(held) > 1:
        raise CheckpointFormatError(
            f"the names of the steps of `{place}` have several forms",
            [f"{form}: {', '.join(steps.values())}" for form, steps in held.items()],
            [f"open one of them: {place / steps[max(steps)]}" for steps in held.values()],
        )
    steps = next(iter(held.values()), {})
    return Inventory(place, roles(entries, Level.ROOT, {*steps.values()}), steps)


def step_items(step: Location, deleted: str = "") -> dict[str, object]:
    """The items of a step, each with its handler: the directories that its document names. Without
    such a document, or if an item was renamed, the directories that are items count, too. An item
    that is being `deleted` is none."""
    handlers = item_handlers(step)
    names = sorted(entry.path for entry in step.entries() if entry.is_dir)
    names = [name for name in names if TEMPORARY not in name and REPLACED_SUFFIX not in name]
    names = [name for name in names if not name.startswith((".", PROCESS)) and name != deleted]
    named = [name for name in names if name in handlers]
    is_complete = handlers and handlers.keys() <= {*named, deleted}
    step.prefetch(lists=named if is_complete else names)
    items = named if is_complete else [n for n in names if n in named or is_item(step / n)]
    return {name: handlers.get(name) for name in items}


def item_handlers(step: Location) -> dict[str, object]:
    """The items of a step, each with its handler, as its document names them."""
    handlers = (read_json(step / CHECKPOINT_FILE) or {}).get("item_handlers")
    return handlers if isinstance(handlers, dict) else {}


def has_step(root: Location, steps: Mapping[int, str]) -> bool:
    """Whether one of the names of steps is a step's: in a bucket, one of the latest."""
    latest = [*steps.values()][::-1]
    return any(is_step(root / name) for name in latest[: None if root.is_local else detection.SOME])


def is_step(directory: Location) -> bool:
    """Whether a directory has the contents of a step. One that cannot be read may have them."""
    try:
        return is_checkpoint(directory) or any(
            is_item(directory / n) for n in directory.directories() if TEMPORARY not in n
        )
    except PermissionError:
        return True


def is_checkpoint(directory: Location) -> bool:
    """Whether a directory is one checkpoint, and not a root of several."""
    return (directory / CHECKPOINT_FILE).exists() or is_item(directory)


def is_item(directory: Location) -> bool:
    """Whether a directory has the contents of an item: a tree of arrays."""
    if (directory / TREE_FILE).exists() or (directory / MANIFEST).exists():
        return True
    if (directory / CHECKPOINT_FILE).exists() or (directory / detection.V1_MARKER).exists():
        return False
    # A root of many steps has no arrays, and none of its steps is looked into.
    names = [name for name in directory.directories() if step_number(name) is None]
    names = names if directory.is_local else names[: detection.SOME]
    return detection.describe_file(directory / "checkpoint") == detection.MSGPACK or any(
        name.startswith(PROCESS) or _is_array(directory / name) for name in names
    )


def _is_array(directory: Location) -> bool:
    """Whether a directory has the metadata of an array. One that cannot be read is not taken for
    one: somebody's notes beside the steps of a root may be such."""
    try:
        return any((directory / key).exists() for key in detection.ZARR)
    except PermissionError:
        return False


def prefetch_documents(directory: Location) -> None:
    """In a bucket, starts all reads of an item's or a step's documents."""
    directory.prefetch(detection.DOCUMENTS)
    if not directory.is_local and (directory / TREE_FILE).exists():
        directory.prefetch(below=True)
        described = directory / detection.ARRAYS_FOLDER
        described.prefetch(described.names())


def status(step: Location) -> Status:
    """The status of a step. In a bucket, reads its marker and its document."""
    try:
        if step.is_local and not is_step(step):
            if any(TEMPORARY in name for name in step.names()):
                return Status(State.UNFINISHED)
            return Status(State.EMPTY, "it holds no checkpoint")
        check_committed(step, marked=True)
    except UncommittedCheckpointError as error:
        return Status(State.UNFINISHED, hint=error.hints[0])
    except CorruptCheckpointError:
        return Status(State.WHOLE)
    except OSError as error:
        if not step.is_local:
            raise
        return Status(State.UNREADABLE, f"it cannot be read: {error.strerror or error}")
    return Status(State.WHOLE)


def check_committed(directory: Location, marked: bool = False) -> None:
    """Raises UncommittedCheckpointError for a checkpoint whose writer never finished.

    Orbax writes into a directory with a temporary name, and writes the time of the commit last. On
    a disk, `commit_success.txt` may be missing: Orbax before 0.12.3 did not write it. In a bucket,
    it is written last, so an item or a step must be `marked` with one. The marker of a step also
    counts for its items.
    """

    def uncommitted(why: str, hint: str) -> UncommittedCheckpointError:
        text = f"`{directory}` was never committed: {why}"
        return UncommittedCheckpointError(text, hints=[hint])

    hint = "use an earlier step: the writer stopped before this one was complete"
    if TEMPORARY in directory.name:
        raise uncommitted("its name is that of a checkpoint in progress", hint)
    times = read_json(directory / CHECKPOINT_FILE)
    unfinished = [name for name in directory.names() if TEMPORARY in name]
    if unfinished and times is not None:
        raise uncommitted(f"its `{unfinished[0]}` was never finished", hint)
    if times and times.get("init_timestamp_nsecs") and not times.get("commit_timestamp_nsecs"):
        raise uncommitted(f"its {CHECKPOINT_FILE} has no commit time", hint)
    markers = (directory / MARKER, directory.parent / MARKER)
    if directory.is_local or not marked or any(marker.is_file() for marker in markers):
        return
    hint = f"if it is a copy of a complete checkpoint, put a file `{MARKER}` into it"
    if (directory / RECORD).exists():
        hint = f"reshard.commit({as_python(str(directory))}) completes it"
    raise uncommitted(f"its `{MARKER}`, which is written last in a bucket, is missing", hint)
