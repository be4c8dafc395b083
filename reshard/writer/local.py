"""What only a local disk has: rename, hard links, locks, sync. Nothing else may use them."""

import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

from reshard.errors import CheckpointFormatError, DestinationError, DestinationExistsError
from reshard.units import format_bytes

# Orbax ignores, and its CheckpointManager removes, what carries this in its name.
TEMPORARY_SUFFIX = ".reshard.orbax-checkpoint-tmp"
# Not a name of a step, and not temporary: an old checkpoint must not be swept away by a manager.
REPLACED_SUFFIX = ".replaced-by-reshard"
# Flags of sync_file_range.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


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
    free = shutil.disk_usage(_existing_parent(destination)).free
    if free < nbytes:
        raise DestinationError(
            f"not enough room for `{destination}`",
            [f"needed {format_bytes(nbytes)}, free {format_bytes(free)}"],
        )


def same_filesystem(source: pathlib.Path, destination: pathlib.Path) -> bool:
    """Whether hard links from one to the other can be tried."""
    return os.stat(source).st_dev == os.stat(_existing_parent(destination)).st_dev


@contextlib.contextmanager
def committed_directory(destination: pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
    """A temporary directory that becomes `destination` if the block succeeds, and vanishes if not.

    The block must call `sync` before it writes its commit marker. A directory that a killed job
    left is removed first; one that a running job holds is an error.
    """
    temporary = _beside(destination, TEMPORARY_SUFFIX)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(temporary)
    except OSError as error:
        raise _destination_error(destination, error) from error
    try:
        try:
            yield temporary
            _swap(temporary, destination, overwrite)
        except OSError as error:
            if isinstance(error, DestinationError) or error.filename is None:
                raise
            raise _destination_error(destination, error) from error
    finally:
        _remove(temporary)
        os.close(lock)


def _locked(directory: pathlib.Path) -> int:
    """Creates a directory and locks it; the lock goes with the process, however it ends."""
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DestinationError(f"another job is writing `{directory}`") from error
        if not _is_still(descriptor, directory):
            os.close(descriptor)  # another job has removed what was opened here
        elif any(directory.iterdir()):
            _remove(directory)  # what a killed job left, under our lock
            os.close(descriptor)
        else:
            return descriptor


def _is_still(descriptor: int, directory: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(directory))
    except FileNotFoundError:
        return False


def _remove(directory: pathlib.Path) -> None:
    """Deletes a tree; twice if need be, for a write in flight may land while it is walked."""
    for _ in range(3):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return


def _swap(temporary: pathlib.Path, destination: pathlib.Path, overwrite: bool) -> None:
    """After a kill between any two of these lines, one checkpoint is complete; after an error or
    an interrupt it has the destination's name."""
    if not destination.exists():
        os.rename(temporary, destination)
        sync_directory(destination.parent)
        return
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
    sync_directory(destination.parent)
    shutil.rmtree(replaced)


def sync(directory: pathlib.Path) -> None:
    """Makes everything below `directory` durable: one call for its file system."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(directory))
    finally:
        os.close(descriptor)


class Writeback:
    """Keeps the disk busy with the data files of a directory while the cores work.

    What is not durable when the job ends must be waited for then; and every page of the page cache
    that a new file takes is memory that nobody has touched yet, which is what writing costs most.
    So each file is handed to the disk as soon as it is there, and its pages are given back when
    the disk has it, to be used for the next ones. Makes nothing durable by itself; see `sync`.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._seen: set[str] = set()
        self._started: list[int] = []
        self._libc = ctypes.CDLL(None)

    def advance(self) -> None:
        """Finishes with the files that the last call started on, and starts on new ones."""
        self.finish()
        if not hasattr(self._libc, "sync_file_range") or not self._directory.exists():
            return
        for entry in os.scandir(self._directory):
            if entry.name in self._seen:
                continue
            self._seen.add(entry.name)
            with contextlib.suppress(FileNotFoundError):  # a lock file, gone with its writer
                descriptor = os.open(entry.path, os.O_RDONLY)
                self._call(descriptor, _WRITE)
                self._started.append(descriptor)

    def finish(self) -> None:
        """Waits for the files that were started on."""
        while self._started:
            descriptor = self._started.pop()
            self._call(descriptor, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _call(self, descriptor: int, flags: int) -> None:
        whole = ctypes.c_int64(0)
        self._libc.sync_file_range(descriptor, whole, whole, flags)


def sync_directory(directory: pathlib.Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: pathlib.Path, data: bytes) -> None:
    """A new small file, on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def link(source: pathlib.Path, destination: pathlib.Path) -> bool:
    """A second name for an immutable file; False where the file system or its owner forbids it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True


def copy_tree(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies a file or a directory byte for byte.

    Raises:
      CheckpointFormatError: there is something else than files and directories in it.
    """
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        destination.mkdir(parents=True, exist_ok=True)
        for name in sorted(os.listdir(source)):
            copy_tree(source / name, destination / name)
    elif stat.S_ISREG(mode):
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)
    else:
        raise CheckpointFormatError(
            f"`{source}` is neither a file nor a directory",
            hints=["replace a symbolic link by what it points to"],
        )


def tree_bytes(path: pathlib.Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    if not path.is_dir():
        return os.lstat(path).st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
    )


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(path.name + suffix)


def _real(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path))


def _existing_parent(path: pathlib.Path) -> pathlib.Path:
    return next(parent for parent in path.parents if parent.exists())


def _destination_error(destination: pathlib.Path, error: OSError) -> DestinationError:
    if isinstance(error, DestinationError):
        return error
    return DestinationError(
        f"`{destination}` cannot be written: {error.strerror or error}",
        [str(error.filename)] if error.filename else [],
    )
