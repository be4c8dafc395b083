"""Which item a path, a step and an item name; with the errors that say what is there instead."""

import dataclasses
import functools
import os
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from reshard.checkpoint import Item
from reshard.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UncommittedCheckpointError,
)
from reshard.loader import detection, inventory
from reshard.loader.detection import MARKER
from reshard.loader.hf_files import check_no_pointer, snapshot
from reshard.loader.inventory import Inventory, State, Status, check_committed, step_number
from reshard.loader.json_documents import read_json
from reshard.storage.location import Location, parse_location
from reshard.storage.ocdbt import PROCESS
from reshard.tree import as_python

# Names that a hint lists.
_SHOWN = 5
# Orbax's names for an item that was saved without a name.
_UNNAMED = ("default", "pytree")
# Handlers of items that are not a model's tree of arrays, although they have a `_METADATA`.
_NOT_TREES = ("ArrayCheckpointHandler", "RandomKeyCheckpointHandler", "JsonCheckpointHandler")


def locate(path: str | os.PathLike, step: int | None, item: str | None) -> Item:
    """Finds the item to read. See `reshard.open` for the arguments and the errors."""
    text, root = os.fspath(path), parse_location(path)
    if (entry := root.entry(follow=True)) is None:
        raise CheckpointNotFoundError(f"nothing exists at `{text}`", hints=_siblings(root))
    if not entry.is_dir:
        is_safetensors = root.name.endswith(detection.SAFETENSORS) or detection.is_index(root.name)
        if not is_safetensors and (what := detection.describe_file(root)) != detection.MSGPACK:
            check_no_pointer(root)
            raise CheckpointFormatError(f"`{text}` is {what}")
        _refuse(text, step, item)
        return Item(root, "safetensors" if is_safetensors else "msgpack")
    inventory.prefetch_documents(root)
    check_committed(root)
    if not (is_one := inventory.is_checkpoint(root)):
        listed = inventory.list_root(root)
        if listed.is_root(step):
            _check_no_files(listed)
            return _in_root(text, listed, step, item)
        if files := detection.flax_steps(root):
            _refuse(text, None, item)
            return _flax_item(text, files, step)
    _refuse(text, step, None)
    if not is_one and (current := snapshot(root)) != root:
        return locate(current, None, item)
    if foreign := detection.of_another_program(root):
        _refuse(text, None, item)
        return foreign
    return _in_step(Item(root, "step"), item)


def _check_no_files(listed: Inventory) -> None:
    """Raises CheckpointFormatError if Flax has written some steps of a root as files, and others
    with Orbax. A file may be the latest step."""
    root, folders = listed.place, [*listed.steps.values()]
    if folders[0].rpartition("_")[0] == "checkpoint" and (found := detection.flax_steps(root)):
        files = [*found.values()]
        raise CheckpointFormatError(
            f"some steps of `{root}` are directories, and others are files",
            [f"directories: {', '.join(folders)}", f"files: {', '.join(files)}"],
            [f"open one of them: {root / name}" for name in (folders[-1], files[-1])],
        )


def _in_root(text: str, listed: Inventory, step: int | None, item: str | None) -> Item:
    """The item of a step: of the latest that can be used, or of another one that is asked for."""
    number = listed.latest if step is None else step
    if number is None:
        raise _no_usable_step(listed)
    if number not in listed.steps:
        others = (n.name for n in listed.names if n.why and step_number(n.name) == number)
        hints = [f"open it alone: {listed.place / name}" for name in others]
        raise _no_step(text, number, *listed.find_steps(), hints)
    name, left_out = listed.steps[number], list[str]()
    if step is not None:
        check_committed(listed.place / name, marked=True)
    else:
        newer = dict.fromkeys(listed.begun, Status(State.UNFINISHED)) | listed.looked
        left_out = [
            f"step {n} was never committed and is left out"
            if found.state is State.UNFINISHED
            else f"step {n} is left out: {found.why}"
            for n, found in sorted(newer.items())
            if n > number
        ]
    others = [n for n in listed.names if n.why and inventory.is_step(listed.place / n.name)]
    left_out += [f"`{each.name}` is left out: {each.why}" for each in others]
    notes = tuple(left_out)
    found = Item(listed.place, "manager", step=name, left_out=notes, find_steps=listed.find_steps)
    return _in_step(found, item)


def _no_step(
    text: str,
    number: float,
    steps: Collection[float],
    unfinished: Collection[int] = (),
    hints: Iterable[str] = (),
) -> CheckpointNotFoundError:
    """The error for a step that a root does not have."""
    lines = [f"its steps: {', '.join(map(str, steps))}"]
    lines += [f"never committed: {', '.join(map(str, unfinished))}"] * bool(unfinished)
    whole = [step for step in steps if isinstance(step, int)]
    near = sorted(whole, key=lambda step: abs(step - number))[:1]
    hints = [*(f"step={step}" for step in near), *hints]
    return CheckpointNotFoundError(f"`{text}` has no step {number}", lines, hints)


def _no_usable_step(listed: Inventory) -> Exception:
    """The error for a root without a step that can be used."""
    root, found = listed.place, {listed.steps[n]: listed.looked[n] for n in sorted(listed.looked)}
    if lines := [f"`{n}`: {s.why}" for n, s in found.items() if s.state is State.UNREADABLE]:
        return StoreError(f"no step of `{root}` can be read", lines)
    names = [name for name in found if found[name].state is State.UNFINISHED]
    return UncommittedCheckpointError(
        f"`{root}` holds only checkpoints that were never committed",
        sorted(listed.temporary or names),
        uncommitted_hints(listed),
    )


def uncommitted_hints(listed: Inventory) -> list[str]:
    """What to do about the latest step of a root in a bucket if it is not committed."""
    number, name = [*listed.steps.items()][-1]
    hint = "" if listed.place.is_local else listed.status(number).hint
    named = hint.replace("it is", f"`{listed.place / name}` is") if MARKER in hint else hint
    return [named] if named else []


def _flax_item(text: str, files: Mapping[float, str], step: int | None) -> Item:
    """A file of `flax.training.checkpoints`: the latest, or that of a step."""
    root = parse_location(text)
    number = max(files) if step is None else step
    numbers = tuple(number for number in files if isinstance(number, int))
    if number not in files:
        raise _no_step(text, number, files)
    if (what := detection.describe_file(root / files[number])) != detection.MSGPACK:
        check_no_pointer(root / files[number])
        raise CheckpointFormatError(f"`{root / files[number]}` is {what}")
    if len(numbers) == len(files):
        known = functools.partial(tuple, (numbers, ()))
        return Item(root, "msgpack", file=files[number], find_steps=known)
    notes = (f"`{files[number]}` is the latest of {len(files)} files",) if step is None else ()
    return Item(root, "msgpack", file=files[number], left_out=notes)


def steps_at(path: str | os.PathLike, committed: bool = False) -> dict[int, str]:
    """The steps of a path: number -> name of its directory or file, ascending; or only those that
    are not known to be unfinished. Empty for anything that has no steps. Raises
    CheckpointFormatError for steps of Flax that are not whole numbers."""
    root = parse_location(path)
    if not root.is_dir() or inventory.is_checkpoint(root):
        return {}
    listed = inventory.list_root(root)
    if listed.is_root():
        _check_no_files(listed)
        states = listed.states() if committed else {}
        unused = {n for n in states if states[n] in (State.UNFINISHED, State.EMPTY)}
        return {n: name for n, name in listed.steps.items() if n not in unused}
    files = detection.flax_steps(root)
    if odd := [name for number, name in files.items() if not isinstance(number, int)]:
        raise CheckpointFormatError(
            f"the steps of `{root}` are not whole numbers",
            [*files.values()],
            [f"open one of them: {root / odd[-1]}"],
        )
    return {int(number): name for number, name in files.items()}


def takes_item(directory: Location, item: str) -> bool:
    """Whether to ask a directory for an item: a step that has it, or that has other items alone,
    which is refused. An item without a name counts as any item."""
    there = [name for name in (item, *_UNNAMED) if (directory / name).is_dir()]
    return item in there or (not there and directory.is_dir() and not inventory.is_item(directory))


def check_inside(item: Item) -> None:
    """Raises CheckpointFormatError if a step or an item is a symbolic link. Its target may be
    outside of the opened directory."""
    for directory in () if item.is_foreign else (item.root / item.step, item.directory):
        if directory != item.root and directory.is_symlink():
            raise CheckpointFormatError(
                f"`{directory}` is a symbolic link, which reshard does not follow",
                hints=[f"open what it points to: {directory.resolved()}"],
            )


def _in_step(found: Item, item: str | None) -> Item:
    """The item of a step, or of a directory that may be one."""
    directory = found.place
    inventory.prefetch_documents(directory)
    if inventory.is_item(directory):
        _refuse(str(directory), None, item)
        kind = found.kind
        if not found.step:
            is_whole = detection.CHECKPOINT_FILE in directory.names()
            kind = "standalone" if is_whole else "item"
        if kind == "item" and _deleted_item(directory.parent) == directory.name:
            raise _being_deleted(directory)
        if found.step or not directory.is_local:  # otherwise `locate` has checked it
            check_committed(directory, marked=True)
        return dataclasses.replace(found, kind=kind)
    deleted = _deleted_item(directory)
    items = inventory.step_items(directory, deleted)
    for name in items:
        check_committed(directory / name)
    trees = [
        name
        for name, handler in items.items()
        if inventory.is_item(directory / name) and not str(handler).endswith(_NOT_TREES)
    ]
    if deleted and (item == deleted or (item is None and not trees)):
        raise _being_deleted(directory / deleted, [f"other items: {', '.join(items)}"])
    if item is None and not trees:
        if any(name.startswith(PROCESS) for name in directory.directories()):  # being written
            check_committed(directory, marked=True)
        raise _unrecognised(directory)
    steps = [] if found.step or inventory.item_handlers(directory) else _steps_in(directory, items)
    if item is None and len(trees) + len(steps) > 1:
        raise _several(directory, sorted([*trees, *steps]))
    if item is not None and item not in items:
        hint = f"its items: {', '.join(items)}"
        raise CheckpointNotFoundError(f"`{directory}` has no item '{item}'", hints=[hint])
    if item is not None and not inventory.is_item(directory / item):
        text = f"item '{item}' of `{directory}` holds no arrays"
        raise CheckpointFormatError(text, hints=[f"item={as_python(name)}" for name in trees])
    check_committed(directory, marked=True)
    inventory.prefetch_documents(directory / (item or trees[0]))
    left_out = found.left_out
    if deleted:
        left_out += (f"item {deleted!r:.80} is left out: its deletion is unfinished",)
    return dataclasses.replace(
        found,
        v1=(directory / detection.V1_MARKER).exists(),
        item=item or trees[0],
        items=tuple(items),
        deleted=deleted,
        left_out=left_out,
    )


def _steps_in(directory: Location, items: Iterable[str]) -> list[str]:
    """Steps that are not `items`, in a directory that may be a folder of checkpoints."""
    names = [n for n in directory.directories() if n not in items and detection.TEMPORARY not in n]
    return [name for name in names if inventory.item_handlers(directory / name)]


def _several(directory: Location, trees: list[str]) -> CheckpointNotFoundError:
    """The error for several items of a step, or for several checkpoints in a directory."""
    paths = (directory / name / detection.CHECKPOINT_FILE for name in trees)
    if (directory / detection.CHECKPOINT_FILE).exists() or not all(p.exists() for p in paths):
        what, hints = "items", [f"item={as_python(name)}" for name in trees]
    else:
        what, hints = "checkpoints", [f"open one of them: {directory / trees[0]}"]
    return CheckpointNotFoundError(f"`{directory}` has several {what}", trees, hints)


def _deleted_item(step: Location) -> str:
    """The item of a step whose deletion is unfinished, or "". Orbax ignores such an item."""
    record = read_json(step / detection.DELETION_FILE)
    if record is None:
        return ""
    name = record.get("checkpointable_name")
    if not isinstance(name, str) or not name:
        raise CorruptCheckpointError(
            f"`{step / detection.DELETION_FILE}` does not name the item that Orbax was deleting"
        )
    return name


def _being_deleted(item: Location, hints: Iterable[str] = ()) -> CheckpointNotFoundError:
    call = f'delete("{item.parent}", checkpointable_name="{item.name}")'
    return CheckpointNotFoundError(
        f"`{item}` is being deleted: `{detection.DELETION_FILE}` next to it records an unfinished "
        "deletion",
        hints=[*hints, f"orbax.checkpoint.experimental.v1.{call} finishes the deletion"],
    )


def _refuse(text: str, step: int | None, item: str | None) -> None:
    """Raises CheckpointNotFoundError if a step or an item is given for a single checkpoint."""
    for name, value, what in (("step", step, "checkpoint"), ("item", item, "tree")):
        if value is not None:
            hints = [f"leave out {name}=..."]
            raise CheckpointNotFoundError(f"`{text}` is one {what} and has no {name}s", hints=hints)


def _unrecognised(directory: Location) -> Exception:
    """The error for a directory that is no checkpoint."""
    names = directory.names()
    unfinished = [name for name in names if detection.TEMPORARY in name]
    if unfinished:
        return UncommittedCheckpointError(
            f"`{directory}` holds only checkpoints that were never committed", unfinished
        )
    return CheckpointFormatError(
        f"`{directory}` is not a checkpoint",
        [
            f"no {detection.TREE_FILE}, no {detection.CHECKPOINT_FILE}, no step directories, "
            "no zarr arrays",
            *detection.foreign_files(directory),
        ],
        [] if directory.is_local else [_some_names(directory, names)],
    )


def _siblings(path: Location) -> list[str]:
    while not (parent := path.parent).exists() and parent != parent.parent:
        path = parent
    if not parent.is_dir():
        return []
    every = parent.directories()
    if own := [name for name in every if name.startswith(path.name + detection.TEMPORARY)]:
        return [f"`{parent / own[0]}` was never committed"]
    names = [name for name in every if detection.TEMPORARY not in name]
    near = get_close_matches(path.name, names, 1)
    none = "only checkpoints that were never committed" if every else "no directories"
    listed = _some_names(parent, names, none)
    return [f"the nearest is `{parent / near[0]}`" if near else listed]


def _some_names(directory: Location, names: list[str], none: str = "nothing") -> str:
    more = ["..."] if len(names) > _SHOWN else []
    return f"`{directory}` has: {', '.join([*names[:_SHOWN], *more]) or none}"
