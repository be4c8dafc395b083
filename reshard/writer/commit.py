"""A destination on a disk that is complete or absent: a lock, a directory beside it, one rename."""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator

from reshard.errors import DestinationError, DestinationExistsError, ReshardError
from reshard.loader.detection import TEMPORARY
from reshard.storage import durable
from reshard.storage.lock import Lock
from reshard.storage.posix import existing_parent, remove
from reshard.tree import shell_quoted
from reshard.units import format_bytes

# What begins so is a job's, beside its destination. Orbax neither lists nor removes it: it would
# take a name that ends in digits for a step, and its CheckpointManager removes what has Orbax's
# own temporary suffix.
UNFINISHED_PREFIX = ".reshard-"
_UNFINISHED_SUFFIX = ".unfinished"
_LOCK = "lock"
# Beside the destination, earlier versions of this program wrote into a directory of this name.
_EARLIER_SUFFIX = ".reshard.orbax-checkpoint-tmp"
# Not a name of a step, and not temporary: an old checkpoint must not be swept away by a manager.
REPLACED_SUFFIX = ".replaced-by-reshard"
# Errors of writing to a file that is open, which do not name it.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_destination(destination: pathlib.Path, source: pathlib.Path, overwrite: bool) -> None:
    """Raises DestinationError unless a job may write `destination`.

    Also where an earlier job was killed between its two renames, with what recovers from it.
    """
    real, root = _real(destination), _real(source)
    if real == root or root in real.parents or real in root.parents:
        raise DestinationError(
            f"the destination `{destination}` and the source `{source}` are inside one another",
            hints=["write beside the source, and rename when you have looked at the result"],
        )
    replaced = _beside(destination, REPLACED_SUFFIX)
    if replaced.exists():
        if destination.exists():
            raise DestinationExistsError(
                f"`{destination}` is complete; an earlier run with --overwrite was stopped before "
                f"it deleted the old checkpoint, `{replaced}`",
                hints=[f"rm -r '{replaced}' deletes the old one"],
            )
        raise DestinationExistsError(
            f"an earlier run with --overwrite was stopped before it moved its result to "
            f"`{destination}`; the old checkpoint is complete at `{replaced}`",
            hints=[f"mv '{replaced}' '{destination}' brings the old one back"],
        )
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise DestinationExistsError(f"`{destination}` is a file or a symbolic link")
    if destination.exists() and not overwrite:
        raise DestinationExistsError(
            f"`{destination}` exists",
            hints=["--overwrite replaces it once the new one is complete"],
        )


def check_room(destination: pathlib.Path, nbytes: int) -> None:
    """Raises DestinationError if the destination's disk has less than `nbytes` free."""
    free = shutil.disk_usage(existing_parent(destination)).free
    for left in (unfinished_directory(destination), _beside(destination, _EARLIER_SUFFIX)):
        free += _own_bytes(left)  # gone on with, or removed
    if free < nbytes:
        raise DestinationError(
            f"not enough room for `{destination}`",
            [f"needed {format_bytes(nbytes)}, free {format_bytes(free)}"],
        )


def _own_bytes(directory: pathlib.Path) -> int:
    """Bytes that would be free without a directory."""
    found = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it may be a running job's
                status = os.lstat(os.path.join(folder, name))
                found += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return found


def unfinished_directory(destination: pathlib.Path) -> pathlib.Path:
    """Where a job writes until its destination is complete: the lock, and below it a directory of
    its own for each job that gets the lock."""
    return destination.with_name(f"{UNFINISHED_PREFIX}{destination.name}{_UNFINISHED_SUFFIX}")


@contextlib.contextmanager
def committed_directory(
    destination: pathlib.Path, *, overwrite: bool, unfinished: Callable[[pathlib.Path], bool]
) -> Iterator[pathlib.Path]:
    """A temporary directory that becomes `destination` if the block succeeds, and vanishes if not.

    The block must call `sync` before it writes its commit marker. A directory that a running job
    holds is an error.

    Args:
      destination: what is to be there in the end.
      overwrite: whether there may be something already.
      unfinished: whether the directory holds what a later run goes on with: then what a job left is
        not removed at the beginning, and not at the end where this one fails, which is noted in its
        error. It may raise.
    """
    outer = unfinished_directory(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock, temporary = _locked(destination, outer, unfinished)
    except OSError as error:
        raise _destination_error(destination, error) from error
    try:
        try:
            yield temporary
            lock.check()
            replaced = _swap(temporary, destination, overwrite)
        except OSError as error:
            nameless = error.filename is None and error.errno not in _FULL
            if isinstance(error, ReshardError) or nameless:
                raise
            raise _destination_error(destination, error) from error
    except BaseException as error:
        if unfinished(temporary):
            error.add_note(f"`{outer}` is kept: the same command with --resume goes on with it")
        else:
            remove(temporary)
        raise
    finally:
        _release(lock, outer)
    if replaced is not None:
        _remove_replaced(replaced, destination)


def _locked(
    destination: pathlib.Path, outer: pathlib.Path, unfinished: Callable[[pathlib.Path], bool]
) -> tuple[Lock, pathlib.Path]:
    """Locks a destination. The lock, and the directory to write into, with what is gone on with.

    Its name is this job's alone: one that has lost its lock, and does not know yet, writes nothing
    into it.
    """
    lock = None
    while lock is None:
        with contextlib.suppress(FileExistsError):
            outer.mkdir()
        with contextlib.suppress(FileNotFoundError):  # its last owner has just removed it
            if not stat.S_ISDIR(os.lstat(outer).st_mode):
                raise _in_the_way(outer)
            lock = Lock(outer / _LOCK, outer)
    try:
        temporary = outer / f"{lock.token}{TEMPORARY}"
        _move_earlier(destination, outer / f"earlier-{temporary.name}")
        for path in outer.glob(f"{_LOCK}.*"):  # of a job that was killed while it removed its lock
            remove(path)
        left = sorted(path for path in outer.iterdir() if TEMPORARY in path.name)
        kept = next((path for path in left if unfinished(path)), None)
        if kept is not None:
            os.rename(kept, temporary)
        for path in left:
            remove(path)
            if os.path.lexists(path):
                raise _in_the_way(outer)
        temporary.mkdir(exist_ok=True)
    except BaseException:
        _release(lock, outer)
        raise
    return lock, temporary


def _move_earlier(destination: pathlib.Path, path: pathlib.Path) -> None:
    """Moves what an earlier version of this program has left to where it is looked for."""
    earlier = _beside(destination, _EARLIER_SUFFIX)
    try:
        descriptor = os.open(earlier, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what that version locked with
        os.rename(earlier, path)
    except BlockingIOError as error:
        raise DestinationError(f"another job is writing `{earlier}`") from error
    finally:
        os.close(descriptor)


def _release(lock: Lock, outer: pathlib.Path) -> None:
    lock.release()
    with contextlib.suppress(OSError):  # something is kept, or the next job is there already
        outer.rmdir()


def _in_the_way(path: pathlib.Path) -> DestinationError:
    hint = f"rm -r {shell_quoted(str(path))}"
    return DestinationError(f"`{path}` is in the way and cannot be removed", hints=[hint])


def _swap(
    temporary: pathlib.Path, destination: pathlib.Path, overwrite: bool
) -> pathlib.Path | None:
    """Gives a directory its name; what was there before, under the name that it has got.

    After a kill between any two of these lines, one checkpoint is complete; after an error or an
    interrupt it has the destination's name.
    """
    if not destination.exists():
        os.rename(temporary, destination)
        durable.sync_directory(destination.parent)
        return None
    if not overwrite:
        raise DestinationExistsError(f"`{destination}` was made while this job ran")
    replaced = _beside(destination, REPLACED_SUFFIX)
    try:
        os.rename(destination, replaced)
        os.rename(temporary, destination)
    except BaseException:
        if replaced.exists() and not destination.exists():
            os.rename(replaced, destination)
        raise
    durable.sync_directory(destination.parent)
    return replaced


def _remove_replaced(replaced: pathlib.Path, destination: pathlib.Path) -> None:
    """Deletes what was replaced; only warns where that fails, for the destination is complete."""
    try:
        shutil.rmtree(replaced)
    except OSError as error:
        warnings.warn(
            f"`{destination}` is complete, but not all of the checkpoint that it replaces could be "
            f"deleted: `{error.filename or replaced}`: {error.strerror or error}; "
            f"rm -r {shell_quoted(str(replaced))} deletes what is left",
            stacklevel=2,
        )


def _real(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path))


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(path.name + suffix)


def _destination_error(destination: pathlib.Path, error: OSError) -> DestinationError:
    if isinstance(error, DestinationError):
        return error
    return DestinationError(
        f"`{destination}` cannot be written: {error.strerror or error}",
        [str(error.filename)] if error.filename else [],
    )
