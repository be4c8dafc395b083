"""What only a local disk has: hard links, sync, copies of files. Nothing else may use them."""

import contextlib
import ctypes
import errno
import hashlib
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Iterator

from reshard.errors import (
    CheckpointFormatError,
)
from reshard.storage.array_store import not_a_file

# Directories inside one another that are copied: deleting more could run out of stack.
_MOST_LEVELS = 100
# Bytes that are copied at once.
_BLOCK = 1 << 18
# Flags of sync_file_range.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


def same_filesystem(source: pathlib.Path, destination: pathlib.Path) -> bool:
    """Whether hard links from one to the other can be tried."""
    return os.stat(source).st_dev == device(destination)


def device(destination: pathlib.Path) -> int:
    """The file system that a destination is on, or will be."""
    return os.stat(existing_parent(destination)).st_dev


def remove(path: pathlib.Path) -> None:
    """Deletes a file or a tree; twice if need be, for a write in flight may land while it is
    walked."""
    for _ in range(3):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
        if not os.path.lexists(path):
            return


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


def link(source: pathlib.Path, destination: pathlib.Path) -> bool:
    """A second name for an immutable file; False where the file system or its owner forbids it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination, follow_symlinks=False)
    except FileExistsError:  # from an earlier run of the same job
        destination.unlink()
        return link(source, destination)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True


def remove_locks(directory: pathlib.Path) -> None:
    """Deletes what TensorStore had begun to write when it was killed."""
    for path in directory.rglob("*.__lock"):
        if path.is_file():
            path.unlink()


def copy_file(
    source: pathlib.Path,
    destination: pathlib.Path | None,
    report: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Copies a file, or only reads it if there is no destination; the SHA-256 of what was read.

    Whatever is at the destination is replaced, and not written to: it may be a link to the source.
    """
    found = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb"))
        writer = None
        if destination is not None:
            destination.unlink(missing_ok=True)
            writer = stack.enter_context(open(destination, "xb"))
        while block := reader.read(_BLOCK):
            found.update(block)
            if writer is not None:
                writer.write(block)
            report(len(block))
    return found.hexdigest()


def tree_bytes(path: pathlib.Path) -> int:
    """Bytes of a file, or of all files below a directory.

    Raises:
      CheckpointFormatError: as `walk`.
    """
    return sum(found.st_size for _, found in walk(path) if stat.S_ISREG(found.st_mode))


def walk(source: pathlib.Path) -> Iterator[tuple[str, os.stat_result]]:
    """A file; or a directory and all that is below it, each directory before what is in it.

    Raises:
      CheckpointFormatError: there is something else than files and directories in it, or they are
        nested too deep.
    """
    paths = [(str(source), 0)]
    while paths:
        path, level = paths.pop()
        if level > _MOST_LEVELS:
            raise CheckpointFormatError(f"directories below `{source}` are nested too deep")
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            names = sorted(os.listdir(path))
            paths += [(os.path.join(path, name), level + 1) for name in names]
        elif not stat.S_ISREG(found.st_mode):
            raise not_a_file(path)
        yield path, found


def existing_parent(path: pathlib.Path) -> pathlib.Path:
    return next(parent for parent in path.parents if parent.exists())
