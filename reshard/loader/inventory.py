"""What a directory holds: each name in it has exactly one role.

A root knows its steps and `metadata/_ROOT_METADATA`, a step knows its items, and an item knows its
documents and chunks. Anything else belongs to somebody else. Facts about names on disk are those
of orbax-checkpoint 0.4.4 to 0.12.8.
"""

import enum
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from reshard.loader.detection import (
    ARRAYS_FOLDER,
    CHECKPOINT_FILE,
    DELETION_FILE,
    MARKER,
    RECORD,
    RECORD_FILES,
    SHARDING_FILE,
    STRINGS_FILE,
    TEMPORARY,
    TREE_FILE,
    V1_MARKER,
)
from reshard.storage.disk import Entry
from reshard.storage.ocdbt import FOLDERS, MANIFEST, PROCESS

# The directory of a root with the metadata of the whole run, and the only name in it.
ROOT_FOLDER, ROOT_FILE = "metadata", "_ROOT_METADATA"
# The prefix of a job's directory, next to its destination. Orbax does not list or remove it. Orbax
# would take a name that ends in digits for a step, and its CheckpointManager removes names with
# Orbax's own temporary suffix.
UNFINISHED_PREFIX = ".reshard-"
# Part of the name of a checkpoint that a job has put aside. It is not a name of a step, and not
# temporary: an old checkpoint must not be swept away by a manager.
REPLACED_SUFFIX = ".replaced-by-reshard"
# Documents of a step, and of an item: an item may have all those of a step.
_STEP_DOCUMENTS = {CHECKPOINT_FILE, DELETION_FILE, V1_MARKER}
_ITEM_DOCUMENTS = {*_STEP_DOCUMENTS, TREE_FILE, SHARDING_FILE, STRINGS_FILE, ARRAYS_FOLDER}
_ITEM_DOCUMENTS |= {MANIFEST, "checkpoint", *RECORD_FILES}
# `prefix_100` or `100`. Orbax's steps have ASCII digits only.
_STEP_NAME = re.compile(r"(?:(.+)_)?([0-9]+)", re.DOTALL)


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

    def __str__(self) -> str:
        number = "0" * (self.width - 1) + "N"
        return number if self.prefix is None else f"{self.prefix}_{number}"


def step_number(name: str) -> int | None:
    """The number of a step's name, of any form; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[2]) if match else None


def step_forms(names: Iterable[str]) -> dict[Form, dict[int, str]]:
    """The forms that names of steps have, each with its steps: number -> name, ascending. Plain
    numbers without zeros come first. A form is left out if another one has all of its names."""
    parsed = [(m[1], m[2], name) for name in names if (m := _STEP_NAME.fullmatch(name))]
    forms = {Form(prefix, len(digits) if digits[0] == "0" else 1) for prefix, digits, _ in parsed}
    found = {
        form: {
            int(digits): name
            for prefix, digits, name in sorted(parsed, key=lambda each: int(each[1]))
            if prefix == form.prefix
            and (len(digits) == form.width if digits[0] == "0" else len(digits) >= form.width)
        }
        for form in sorted(forms, key=lambda form: (form.prefix or "", form.width))
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
    name = entry.path
    if TEMPORARY in name:
        return Named(name, Role.TEMPORARY, entry, "its name is that of a checkpoint in progress")
    if name.startswith(UNFINISHED_PREFIX) or REPLACED_SUFFIX in name or name == RECORD:
        return Named(name, Role.JOB, entry)
    if level is Level.ROOT:
        if name in known and entry.is_dir:
            return Named(name, Role.STEP, entry)
        if name == ROOT_FOLDER and entry.is_dir:
            return Named(name, Role.DOCUMENT, entry)
        why = "its name is not of the form of the steps" if step_number(name) is not None else ""
        return Named(name, Role.OTHER, entry, why if entry.is_dir else "")
    if name == MARKER:
        return Named(name, Role.MARKER, entry)
    if level is Level.STEP:
        if name in known and entry.is_dir:
            return Named(name, Role.ITEM, entry)
        return Named(name, Role.DOCUMENT if name in _STEP_DOCUMENTS else Role.OTHER, entry)
    if name in FOLDERS or name.startswith(PROCESS) or name in known:
        return Named(name, Role.CHUNKS, entry)
    return Named(name, Role.DOCUMENT if name in _ITEM_DOCUMENTS else Role.OTHER, entry)
