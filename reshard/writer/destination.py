"""May a job write here? And what of an existing destination may it replace?

Of a directory on a disk, a job replaces what belongs to a checkpoint and is written again, what it
copies again, and what an earlier job has copied, as its record says. Anything else is somebody's.
"""

import concurrent.futures
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from reshard import errors
from reshard.checkpoint import Checkpoint, Source
from reshard.loader import detection, inventory
from reshard.loader.inventory import Level, Role
from reshard.loader.orbax import array_names
from reshard.loader.safetensors import INDEX
from reshard.storage import disk
from reshard.storage.disk import Entry
from reshard.storage.location import Location
from reshard.storage.ocdbt import FOLDERS, MANIFEST, PROCESS
from reshard.tree import shell_quoted
from reshard.verify.digest_record import read_record
from reshard.writer import commit as committing
from reshard.writer.replaced import Seen, seen_entry
from reshard.writer.siblings import Sibling

# Names that unfinished jobs of earlier versions have next to a destination.
_EARLIER = ("{0}.reshard.orbax-checkpoint-tmp", ".reshard-{0}.unfinished", ".reshard-{0}.shares")
_EARLIER += (".reshard-{0}.lock", ".reshard-{0}.journal")
# The metadata of a run, in a root.
_ROOT_METADATA = f"{inventory.ROOT_FOLDER}/{inventory.ROOT_FILE}"
# The files of an export.
_EXPORTED = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# Paths below an item, of files that it has in directories: of a database, of a job that was
# stopped after its commit, of metadata; and paths below an array's directory.
_IN_ITEM = re.compile(
    rf"({PROCESS}\w+/)?(({'|'.join(FOLDERS)})/[0-9a-f]{{32}}|{re.escape(MANIFEST)})"
    rf"|{PROCESS}[0-9a-f]{{16}}(/(begun|unshared|\d+)\.json|\w+xfiles/[^/]+)"
    rf"|{detection.ARRAYS_FOLDER}/process_\d+"
)
_IN_ARRAY = re.compile(r"\.z(array|attrs)|zarr\.json|c|(c/)?\d+([./]\d+)*")


def check_apart(destination: Location, source: Location, what: str = "source") -> None:
    """Raises DestinationError if one of the two is inside the other."""
    real, root = destination.resolved(), source.resolved()
    if real.below(root) is not None or root.below(real) is not None:
        elsewhere = "write to another path, check the result, then rename it"
        raise errors.DestinationError(
            f"the destination `{destination}` and the {what} `{source}` overlap",
            hints=[elsewhere if destination.is_local else "write to another prefix"],
        )


def check_destination(
    destination: Location,
    checkpoints: Sequence[Checkpoint],
    overwrite: bool,
    exported: bool = False,
) -> list[str]:
    """Notes about a destination. Raises DestinationError if these checkpoints may not be written
    there. Steps of a manager's root that are not `exported` become such a root."""
    parent = destination.parent
    steps = [c.source for c in checkpoints if c.source.step and not exported]
    destination.check_opens()
    check_apart(destination, checkpoints[0].source.root)
    with parent.cached_listing():
        names = parent.names() if not parent.is_local or parent.is_dir() else ()
        for left in (pattern.format(destination.name) for pattern in _EARLIER):
            if left in names:
                raise errors.DestinationError(
                    f"an earlier version of reshard left an unfinished job: `{parent / left}`",
                    ["this version cannot resume it"],
                    [committing.restart_hint(parent / left)],
                )
        if destination.is_local:
            notes = _check_directory(destination, steps, overwrite)
        else:
            notes = _check_prefix(destination)
    return notes + _written_steps(destination, steps)


def _written_steps(destination: Location, steps: Sequence[Source]) -> list[str]:
    """Notes about where each step of a manager's root is written. Raises DestinationError if the
    new root would have the name of a step: the manager of the directory around it would list
    that step, and could not restore it."""
    written = [f"step {s.number} of `{s.root}` -> `{destination / s.step}`" for s in steps]
    name, digits = destination.name, "0123456789"
    prefixes = {"", *(source.step.rstrip(digits) for source in steps)}
    if steps and name[-1:].isdecimal() and name.rstrip(digits) in prefixes:
        raise errors.DestinationError(
            f"`{destination}` is the name of a step, and `{steps[0].root}` is a manager's root",
            written,
            [
                f"to write one step there, open it alone: {steps[0].root / steps[0].step}",
                f"to write a root, give it another name: {destination.parent / f'root-{name}'}",
            ],
        )
    return written


def _check_directory(destination: Location, steps: Sequence[Source], overwrite: bool) -> list[str]:
    """Notes about a destination on a disk. Raises DestinationError if it may not be written."""
    place = committing.standing(destination)
    exists = place.exists()
    if destination.is_symlink() or (exists and not place.is_dir()):
        raise errors.DestinationExistsError(
            f"`{destination}` is a file or a symbolic link, not a directory"
        )
    if exists and disk.is_mount_point(destination):
        raise errors.DestinationError(
            f"`{destination}` is a mount point, which no new checkpoint can replace",
            hints=[f"write to a directory in it: {destination / 'new'}"],
        )
    reserved = inventory.REPLACED_SUFFIX in destination.name
    if reserved or destination.name.startswith(inventory.UNFINISHED_PREFIX):
        text = f"`{destination}` has a name that is reserved for unfinished jobs"
        raise errors.DestinationError(text, hints=["choose another name"])
    if exists and not overwrite:
        raise errors.DestinationExistsError(
            f"`{destination}` exists",
            hints=["overwrite=True replaces it once the new one is complete"],
        )
    notes = [
        f"`{aside}` has files that an earlier job has not deleted with an old checkpoint"
        for aside in committing.replaced_checkpoints(destination)
        if aside != place
    ]
    if not exists:
        return notes
    numbers = {source.number for source in steps if source.number is not None}
    reason = _why_not_replaceable(place, numbers)
    if reason is not None:
        raise errors.DestinationExistsError(
            f"`{destination}` would be deleted: {reason}",
            hints=["choose another destination, or move the existing one away"],
        )
    return [f"`{destination}` is replaced once the new checkpoint is complete", *notes]


def _check_prefix(destination: Location) -> list[str]:
    """Notes about a prefix in a bucket. Raises DestinationError if nothing may be written there."""
    parent = destination.parent
    if destination == parent:
        raise errors.DestinationError(
            f"`{destination}` is a bucket, not a path in a bucket",
            hints=[f"add a path: {destination}/1000"],
        )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        marker = pool.submit((parent.parent / detection.MARKER).read_whole)
        above = {
            parent: (parent / detection.MARKER).is_file(),
            parent.parent: marker.result() is not None,
        }
    for place, is_complete in above.items():
        if is_complete:
            raise errors.DestinationError(
                f"`{destination}` is inside `{place}`, which is a complete checkpoint",
                hints=["write to another prefix"],
            )
    if destination.is_file():
        text = f"`{destination}` is an object, not a prefix"
        raise errors.DestinationExistsError(text)
    beside = [name for name in parent.directories() if name != destination.name]
    if not inventory.step_forms(beside) or inventory.is_checkpoint(parent):
        return []
    return [
        f"`{parent}` has other steps: a CheckpointManager that removes incomplete steps there "
        "would delete this job's files; another prefix is safe"
    ]


def check_no_step(destination: Location) -> None:
    """Raises DestinationError if Orbax would list the new directory as a step."""
    name, parent = destination.name, destination.parent
    if inventory.step_number(name) is None or not parent.is_dir():
        return
    if inventory.is_checkpoint(parent):
        return
    alike = (
        other
        for steps in inventory.step_forms({*parent.directories(), name}).values()
        for other in reversed(steps.values())
        if name in steps.values() and other != name
    )
    if any(not parent.is_local or inventory.is_step(parent / other) for other in alike):
        raise errors.DestinationError(
            f"Orbax would take `{destination}` for a step: `{parent}` holds steps",
            hints=["write to another directory"],
        )


def _why_not_replaceable(directory: Location, steps: set[int]) -> str | None:
    """The reason why a new checkpoint, or a manager's root of these `steps`, may not replace a
    directory; None if it may."""
    names = directory.names()
    if not names:
        return None
    if _is_export(names) or _is_single(names):
        return "it is a single checkpoint, but the new one is a manager's root" if steps else None
    try:
        present = inventory.list_root(directory).steps
    except errors.CheckpointFormatError as error:
        return error.summary
    if not inventory.has_step(directory, present):
        return "it is not a checkpoint"
    if not steps:
        return "it is a manager's root, but the new one is a single checkpoint"
    lost = sorted(set(present) - steps)
    return f"its steps {', '.join(map(str, lost))} would be lost" if lost else None


def _is_single(names: Collection[str]) -> bool:
    return not {detection.TREE_FILE, detection.CHECKPOINT_FILE}.isdisjoint(names)


def _is_export(names: Collection[str]) -> bool:
    return (
        not _is_single(names)
        and detection.RECORD_FILE in names
        and any(name.endswith(detection.SAFETENSORS) for name in names)
    )


def replaced(
    destination: Location | None,
    checkpoints: Sequence[Checkpoint],
    copied: Iterable[Sibling],
    exported: bool = False,
) -> tuple[Seen, ...]:
    """Everything in a directory on a disk that a job for these checkpoints replaces, with files
    that are `copied` again: in an item whatever they hold, elsewhere if an earlier job has copied
    the same bytes, or this one does. Raises DestinationExistsError with all that it may not
    replace."""
    if destination is None or not destination.is_local:
        return ()
    place = committing.standing(destination)
    if not (entries := [*place.walk()]):
        return ()
    sources = () if exported else [c.source for c in checkpoints]
    steps = {each.number if each.step else None: {*each.items, each.item} for each in sources}
    items = {item for each in steps.values() for item in each}
    again = {each.path: each for each in copied if each.is_file}

    def is_written_again(path: str) -> bool:
        of_item = not items.isdisjoint(path.split("/")[:-1][:2])
        return path in again and (of_item or path == _ROOT_METADATA)

    others = [path for path in _others(place, entries, steps) if not is_written_again(path)]
    recorded: dict[str, str] = {}
    for entry in entries if others else ():
        if entry.path.rpartition("/")[2] == detection.RECORD_FILE:
            record = read_record(place / entry.path)
            recorded |= record.copied if record is not None else {}
    own = {entry.path for entry in entries if entry.is_file}

    def is_ours(path: str) -> bool:
        if path not in own or (path not in recorded and path not in again):
            return False
        found = (place / path).sha256()
        return found == recorded.get(path) or (path in again and found == again[path].sha256())

    if others := [path for path in others if not is_ours(path)]:
        names = [str(place / path) for path in _topmost(entries, {*others})]
        raise errors.DestinationExistsError(
            f"`{destination}` holds files that are not part of the checkpoint",
            [f"`{name}`" for name in names],
            [
                "choose another destination, or move these files away",
                f"rm -r {' '.join(map(shell_quoted, names))}",
            ],
        )
    return tuple(map(seen_entry, entries))


def _topmost(entries: Sequence[Entry], others: set[str]) -> list[str]:
    """The paths of some files, with one path for a directory that holds no other files."""
    mixed = {
        folder
        for entry in entries
        if not entry.is_dir and entry.path not in others
        for folder in itertools.accumulate(entry.path.split("/")[:-1], "{}/{}".format)
    }
    found = {}
    for path in sorted(others):
        above = itertools.accumulate(path.split("/"), "{}/{}".format)
        found[next(each for each in above if each not in mixed)] = None
    return [*found]


def _others(
    place: Location, entries: Sequence[Entry], steps: Mapping[int | None, Collection[str]]
) -> Iterator[str]:
    """Paths of files in a directory that do not belong to a checkpoint, or to an item that is not
    written again. `steps` are the numbers of the new steps, each with its items."""
    names = {entry.path for entry in entries if "/" not in entry.path}
    if _is_export(names):
        own = {*detection.RECORD_FILES, INDEX}
        for entry in entries:
            if not (entry.is_dir or entry.path in own or _EXPORTED.fullmatch(entry.path)):
                yield entry.path
    elif _is_single(names) or not steps.keys() - {None}:
        items = {item for each in steps.values() for item in each}
        yield from _others_at(place, entries, _level(names), items)
    else:
        present = inventory.list_root(place).steps
        written = {name for number, name in present.items() if number in steps}
        yield from _others_at(place, entries, Level.ROOT, written, steps)


def _level(names: Collection[str]) -> Level:
    item = {detection.TREE_FILE, MANIFEST, "checkpoint"}.isdisjoint(names)
    return Level.STEP if item else Level.ITEM


def _others_at(
    place: Location,
    entries: Sequence[Entry],
    level: Level,
    known: Collection[str],
    steps: Mapping[int | None, Collection[str]] = {},
) -> Iterator[str]:
    """The same for a directory of a level, in which some names are `known`."""
    arrays = array_names(place) if level is Level.ITEM else frozenset()
    known = {*known, *(name.partition("/")[0] for name in arrays)}
    tops = {entry.path: entry for entry in entries if "/" not in entry.path}
    groups = itertools.groupby(entries, lambda entry: entry.path.partition("/")[0])
    below = {name: [*group][1:] for name, group in groups}
    for name, role, entry, _ in inventory.roles(tops.values(), level, known):
        inside = [each._replace(path=each.path[len(name) + 1 :]) for each in below[name]]
        if role is Role.STEP:
            at = _level({each.path for each in inside})
            others = _others_at(place / name, inside, at, steps[inventory.step_number(name)])
        elif role is Role.ITEM:
            others = _others_at(place / name, inside, Level.ITEM, ())
        elif entry.is_dir:
            own = level is Level.ITEM and role in (Role.DOCUMENT, Role.CHUNKS)
            others = (
                each.path
                for each in inside
                if not (each.is_dir or (own and each.is_file and _in_item(name, each, arrays)))
            )
        else:
            own = role in (Role.DOCUMENT, Role.MARKER) or name == detection.RECORD
            others = [] if own and entry.is_file else [""]
        yield from (f"{name}/{path}".rstrip("/") for path in others)


def _in_item(name: str, below: Entry, arrays: Collection[str]) -> bool:
    """Whether a file in a directory of an item belongs to the item."""
    path = f"{name}/{below.path}"
    cuts = (n for n, character in enumerate(path) if character == "/")
    in_array = any(path[:n] in arrays and _IN_ARRAY.fullmatch(path[n + 1 :]) for n in cuts)
    return in_array or _IN_ITEM.fullmatch(path) is not None
