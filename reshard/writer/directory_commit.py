"""A destination on a disk that is complete or absent: a lock, a directory beside it, one rename."""

import contextlib
import errno
import warnings
from collections.abc import Callable, Iterator

from reshard.errors import DestinationError, DestinationExistsError, ReshardError
from reshard.hints import Hint
from reshard.loader.detection import TEMPORARY
from reshard.storage import posix
from reshard.storage.location import Location
from reshard.storage.lock import Lock
from reshard.tree import shell_quoted
from reshard.units import format_bytes

# What begins so is a job's, beside its destination. Orbax neither lists nor removes it: it would
# take a name that ends in digits for a step, and its CheckpointManager removes what has Orbax's
# own temporary suffix.
UNFINISHED_PREFIX = ".reshard-"
_UNFINISHED_SUFFIX = ".unfinished"
_SHARES_SUFFIX = ".shares"
_LOCK = "lock"
# Beside the destination, earlier versions of this program wrote into a directory of this name.
_EARLIER_SUFFIX = ".reshard.orbax-checkpoint-tmp"
# Not a name of a step, and not temporary: an old checkpoint must not be swept away by a manager.
REPLACED_SUFFIX = ".replaced-by-reshard"
# Errors of writing to a file that is open, which do not name it.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_destination(destination: Location, source: Location, overwrite: bool) -> None:
    """Raises DestinationError unless a job may write `destination`.

    Also where an earlier job was killed between its two renames, with what recovers from it.
    """
    check_apart(destination, source)
    replaced = _beside(destination, REPLACED_SUFFIX)
    if replaced.exists():
        if destination.exists():
            raise DestinationExistsError(
                f"`{destination}` is complete; an earlier run was stopped before it deleted the "
                f"old checkpoint, `{replaced}`",
                hints=[f"rm -r '{replaced}' deletes the old one"],
            )
        raise DestinationExistsError(
            f"an earlier run was stopped before it moved its result to `{destination}`; "
            f"the old checkpoint is complete at `{replaced}`",
            hints=[f"mv '{replaced}' '{destination}' brings the old one back"],
        )
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise DestinationExistsError(f"`{destination}` is a file or a symbolic link")
    if destination.exists() and not overwrite:
        raise DestinationExistsError(
            f"`{destination}` exists",
            hints=[Hint(("overwrite", True), " replaces it once the new one is complete")],
        )


def check_apart(destination: Location, source: Location) -> None:
    """Raises DestinationError if one of them is in the other."""
    real, root = destination.resolved(), source.resolved()
    if real.below(root) is not None or root.below(real) is not None:
        beside = "write beside the source, and rename when you have looked at the result"
        raise DestinationError(
            f"the destination `{destination}` and the source `{source}` are inside one another",
            hints=[beside if destination.is_local else "write to a prefix beside the source"],
        )


def check_room(destination: Location, nbytes: int) -> None:
    """Raises DestinationError if the destination's disk has less than `nbytes` free."""
    free = posix.free_bytes(destination)
    earlier = _beside(destination, _EARLIER_SUFFIX)
    for left in (unfinished_directory(destination), shares_directory(destination), earlier):
        free += posix.own_bytes(left)  # gone on with, or removed
    if free < nbytes:
        raise DestinationError(
            f"not enough room for `{destination}`",
            [f"needed {format_bytes(nbytes)}, free {format_bytes(free)}"],
        )


def unfinished_directory(destination: Location) -> Location:
    """Where a job writes until its destination is complete: the lock, and below it a directory of
    its own for each job that gets the lock."""
    return destination.beside(f"{UNFINISHED_PREFIX}{destination.name}{_UNFINISHED_SUFFIX}")


def shares_directory(destination: Location) -> Location:
    """Where the shares of a job tell what they have written, until they are committed; on a disk
    also where they write."""
    return destination.beside(f"{UNFINISHED_PREFIX}{destination.name}{_SHARES_SUFFIX}")


@contextlib.contextmanager
def committed_directory(
    destination: Location, *, overwrite: bool, unfinished: Callable[[Location], bool]
) -> Iterator[tuple[Location, Lock]]:
    """A temporary directory that becomes `destination` if the block succeeds, and vanishes if not;
    with its lock. The block must call `sync` before it writes its commit marker. A directory that a
    running job holds is an error. One that is `unfinished`, which may raise, holds what a later run
    goes on with: it is not removed at the beginning, nor at the end where this job fails, which is
    noted in its error.
    """
    outer = unfinished_directory(destination)
    try:
        destination.parent.make_directory()
        lock, temporary = _locked(destination, outer, unfinished)
    except OSError as error:
        raise _destination_error(destination, error) from error
    try:
        try:
            yield temporary, lock
            lock.check()
            replaced = swap(temporary, destination, overwrite)
        except OSError as error:
            nameless = error.filename is None and error.errno not in _FULL
            if isinstance(error, ReshardError) or nameless:
                raise
            raise _destination_error(destination, error) from error
    except BaseException as error:
        if unfinished(temporary):
            kept = Hint(
                f"`{outer}` is kept: ", ("same",), " with ", ("resume", True), " goes on with it"
            )
            error.add_note(kept)
        else:
            posix.remove(temporary)
        raise
    finally:
        _release(lock, outer)
    finish(destination, replaced)


def _locked(
    destination: Location, outer: Location, unfinished: Callable[[Location], bool]
) -> tuple[Lock, Location]:
    """Locks a destination. The lock, and the directory to write into, with what is gone on with.

    Its name is this job's alone: one that has lost its lock, and does not know yet, writes nothing
    into it.
    """
    lock = None
    while lock is None:
        with contextlib.suppress(FileExistsError):
            outer.make_directory()
        found = outer.entry()
        if found is not None and not found.is_dir:
            raise _in_the_way(outer)
        with contextlib.suppress(FileNotFoundError):  # its last owner has just removed it
            lock = Lock(outer / _LOCK, outer)
    try:
        temporary = outer / f"{lock.token}{TEMPORARY}"
        _move_earlier(destination, outer / f"earlier-{temporary.name}")
        names = outer.names()
        left = [outer / name for name in names if TEMPORARY in name]
        kept = next((path for path in left if unfinished(path)), None)
        if kept is not None:
            posix.rename(kept, temporary)
        # The others are of jobs that were killed while they removed their locks.
        for path in (*left, *(outer / name for name in names if name.startswith(f"{_LOCK}."))):
            if not posix.remove(path):
                raise _in_the_way(outer)
        temporary.make_directory()
    except BaseException:
        _release(lock, outer)
        raise
    return lock, temporary


def _move_earlier(destination: Location, path: Location) -> None:
    """Moves what an earlier version of this program has left to where it is looked for."""
    earlier = _beside(destination, _EARLIER_SUFFIX)
    try:
        with posix.locked_directory(earlier) as there:  # as that version locked it
            if there:
                posix.rename(earlier, path)
    except BlockingIOError as error:
        raise DestinationError(f"another job is writing `{earlier}`") from error


def _release(lock: Lock, outer: Location) -> None:
    lock.release()
    posix.remove_empty(outer)  # unless something is kept, or the next job is there already


def _in_the_way(path: Location) -> DestinationError:
    hint = f"rm -r {shell_quoted(str(path))}"
    return DestinationError(f"`{path}` is in the way and cannot be removed", hints=[hint])


def swap(temporary: Location, destination: Location, overwrite: bool) -> Location | None:
    """Gives a directory its name; what was there before, under the name that it has got.

    After a kill between any two of these lines, one checkpoint is complete; after an error or an
    interrupt it has the destination's name.
    """
    if not destination.exists():
        posix.rename(temporary, destination)
        return None
    if not overwrite:
        raise DestinationExistsError(f"`{destination}` was made while this job ran")
    replaced = _beside(destination, REPLACED_SUFFIX)
    try:
        posix.rename(destination, replaced)
        posix.rename(temporary, destination)
    except BaseException:
        if replaced.exists() and not destination.exists():
            posix.rename(replaced, destination)
        raise
    return replaced


def finish(destination: Location, replaced: Location | None) -> None:
    """Has the disk keep the destination's name, and only then deletes what was replaced; only warns
    where that fails, for the destination is complete."""
    try:
        posix.sync_directory(destination.parent)
        if replaced is not None:
            posix.remove_tree(replaced)
    except OSError as error:
        reason = error.strerror or error
        told = f"`{error.filename or destination.parent}` could not be synced: {reason}"
        if replaced is not None:
            told = (
                "not all of the checkpoint that it replaces could be deleted: "
                f"`{error.filename or replaced}`: {reason}; "
                f"rm -r {shell_quoted(str(replaced))} deletes what is left"
            )
        warnings.warn(f"`{destination}` is complete, but {told}", stacklevel=2)


def finish_replacing(destination: Location) -> None:
    """Deletes what a checkpoint replaces that has its name by now."""
    replaced = _beside(destination, REPLACED_SUFFIX)
    if destination.exists() and replaced.exists():
        finish(destination, replaced)


def _beside(location: Location, suffix: str) -> Location:
    return location.beside(location.name + suffix)


def _destination_error(destination: Location, error: OSError) -> DestinationError:
    if isinstance(error, DestinationError):
        return error
    return DestinationError(
        f"`{destination}` cannot be written: {error.strerror or error}",
        [str(error.filename)] if error.filename else [],
    )
