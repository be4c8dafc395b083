"""Files of a local disk: the only module that touches them; and what no bucket has: links, renames,
sync, directories.

What only Linux has is used where it is there: elsewhere, work is slower and no less durable.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, TextIO

AnyPath = str | os.PathLike[str]

# A size or a time that nobody has told.
UNKNOWN = -1
# Bytes that are copied at once.
_BLOCK = 1 << 18
# Bytes of a lock file that are read.
_MAX_LOCK_BYTES = 4096
# What statfs calls ext2 to ext4, XFS, Btrfs, ZFS, F2FS, overlays and tmpfs.
_LOCAL_DISKS = {0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x01021994}
# Flags of sync_file_range.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)

is_symlink, absolute, real = os.path.islink, os.path.abspath, os.path.realpath


class Entry(NamedTuple):
    """What has a name on a disk; a symbolic link is itself, not what it points to.

    Attributes:
      path: its path, below where the walk began.
      is_file: it is a file.
      is_dir: it is a directory; what is neither is a link, a pipe or the like.
      nbytes: bytes of a file.
      modified: when it was last changed, in nanoseconds; of an object in a bucket, a number that
        no other version of it has. Both may be `UNKNOWN` there.
      file: the same for all names of one file: device and inode.
      links: how many names it has.
      allocated: bytes that it takes on the disk.
    """

    path: str
    is_file: bool
    is_dir: bool
    nbytes: int
    modified: int
    file: tuple[int, int]
    links: int
    allocated: int


def _entry(path: str, found: os.stat_result) -> Entry:
    return Entry(
        path,
        stat.S_ISREG(found.st_mode),
        stat.S_ISDIR(found.st_mode),
        found.st_size,
        found.st_mtime_ns,
        (found.st_dev, found.st_ino),
        found.st_nlink,
        found.st_blocks * 512,
    )


def entry(path: AnyPath) -> Entry | None:
    """What has a name; None where nothing has."""
    try:
        return _entry("", os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: AnyPath) -> bool:
    """Whether there is something; of a symbolic link, what it points to."""
    try:
        return _mode(path) is not None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # nothing has such a name
            return False
        raise


def is_file(path: AnyPath) -> bool:
    """Whether there is a file, or a symbolic link to one."""
    return stat.S_ISREG(_mode(path) or 0)


def is_dir(path: AnyPath) -> bool:
    """Whether there is a directory, or a symbolic link to one."""
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: AnyPath) -> int | None:
    """None where nothing is. What may not be looked at is an error, and not nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def names(directory: AnyPath) -> list[str]:
    """Names in a directory, in order."""
    return sorted(os.listdir(directory))


def directories(directory: AnyPath) -> list[str]:
    """Names of directories in a directory, in order; links to some are among them."""
    with os.scandir(directory) as found:
        return sorted(each.name for each in found if each.is_dir())


def walk(top: AnyPath) -> Iterator[Entry]:
    """All that is below a directory, each directory before what is in it, in order. Nothing is
    followed, and what vanishes meanwhile is left out. Not recursive: directories may be nested
    deeper than Python's stack."""
    left = [("", None)]
    while left:
        path, found = left.pop()
        if found is not None:
            yield found
        if found is None or found.is_dir:
            prefix = path and f"{path}/"
            inside = []
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(os.path.join(top, path)) as each,
            ):
                for one in each:
                    with contextlib.suppress(FileNotFoundError):
                        name = prefix + one.name
                        inside.append((name, _entry(name, one.stat(follow_symlinks=False))))
            left += sorted(inside, reverse=True)


def beginning(path: AnyPath, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(nbytes)


def blocks(path: AnyPath, nbytes: int = UNKNOWN) -> Iterator[bytes]:
    """So many first bytes of a file, or all that it has when it is opened: one that somebody still
    writes to is not followed. Nor is a symbolic link."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as reader:
        left = os.fstat(reader.fileno()).st_size if nbytes == UNKNOWN else nbytes
        while block := reader.read(min(left, _BLOCK)):
            left -= len(block)
            yield block


def create(path: AnyPath) -> BinaryIO:
    """A new file, to be written."""
    return open(path, "xb")


def write(path: AnyPath, data: bytes, durable: bool = False) -> None:
    """Writes a file, in the place of what is there: nothing is written through a link or into a
    pipe of others. If it is to be durable, it is on the disk when the call returns; others are once
    `sync` has been called."""
    remove_file(path)
    with open(path, "xb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_directory(os.path.dirname(path))


def replace(path: AnyPath, data: bytes, temporary: AnyPath) -> None:
    """Writes a durable file that is there whole or not at all, by way of another one beside it."""
    try:
        write(temporary, data, durable=True)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_directory(os.path.dirname(path))


def make_directories(path: AnyPath) -> None:
    os.makedirs(path, exist_ok=True)


def remove(path: AnyPath) -> bool:
    """Deletes a file or a tree; several times if need be, for a write in flight may land while it
    is walked. Whether nothing is left."""
    for _ in range(3):
        if is_dir(path) and not is_symlink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if not os.path.lexists(path):
            return True
    return False


def rename(path: AnyPath, new: AnyPath) -> None:
    os.rename(path, new)


def remove_empty(directory: AnyPath) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def remove_tree(path: AnyPath) -> None:
    """Deletes a tree; raises OSError where it cannot."""
    shutil.rmtree(path)


def remove_file(path: AnyPath) -> None:
    """Deletes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_locks(directory: AnyPath) -> None:
    """Deletes what TensorStore had begun to write when it was killed."""
    for found in walk(directory):
        if found.is_file and found.path.endswith(".__lock"):
            os.unlink(os.path.join(directory, found.path))


def own_bytes(directory: AnyPath) -> int:
    """Bytes that would be free without a directory."""
    return sum(found.allocated for found in walk(directory) if found.links == 1)


def link(source: AnyPath, destination: AnyPath) -> bool:
    """A second name for an immutable file; False where the file system or its owner forbids it."""
    make_directories(os.path.dirname(destination))
    try:
        os.link(source, destination, follow_symlinks=False)
    except FileExistsError:  # from an earlier run of the same job
        os.unlink(destination)
        return link(source, destination)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True


def device(destination: AnyPath) -> int:
    """The file system that a destination is on, or will be."""
    return os.stat(_there(destination)).st_dev


def on_local_disk(path: AnyPath) -> bool:
    """Whether a file system is known to be of this host alone. Linux says of which kind it is."""
    if not hasattr(_LIBC, "syncfs"):
        return False
    found = (ctypes.c_long * 32)()
    return _LIBC.statfs(os.fsencode(path), found) == 0 and found[0] in _LOCAL_DISKS


def free_bytes(destination: AnyPath) -> int:
    return shutil.disk_usage(_there(destination)).free


def _there(path: AnyPath) -> str:
    """The nearest directory above a path that is there."""
    above = os.path.dirname(path)
    return above if exists(above) else _there(above)


def sync(directory: AnyPath) -> None:
    """Makes everything below `directory` durable: one call for its file system."""
    if not hasattr(_LIBC, "syncfs"):
        os.sync()
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if _LIBC.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(directory))
    finally:
        os.close(descriptor)


def sync_directory(directory: AnyPath) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writeback:
    """Keeps the disk busy with the data files of a directory while the cores work.

    What is not durable when the job ends must be waited for then; and every page of the page cache
    that a new file takes is memory that nobody has touched yet, which is what writing costs most.
    So each file is handed to the disk as soon as it is there, and its pages are given back when
    the disk has it, to be used for the next ones. Makes nothing durable by itself; see `sync`.
    """

    def __init__(self, directory: AnyPath):
        self._directory = directory
        self._seen: set[str] = set()
        self._started: list[int] = []

    def advance(self) -> None:
        """Finishes with the files that the last call started on, and starts on new ones."""
        self.finish()
        if not hasattr(_LIBC, "sync_file_range") or not exists(self._directory):
            return
        for found in os.scandir(self._directory):
            if found.name in self._seen:
                continue
            self._seen.add(found.name)
            with contextlib.suppress(FileNotFoundError):  # a lock file, gone with its writer
                descriptor = os.open(found.path, os.O_RDONLY)
                self._call(descriptor, _WRITE)
                self._started.append(descriptor)

    def finish(self) -> None:
        """Waits for the files that were started on."""
        while self._started:
            descriptor = self._started.pop()
            self._call(descriptor, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _call(self, descriptor: int, flags: int) -> None:
        whole = ctypes.c_int64(0)
        _LIBC.sync_file_range(descriptor, whole, whole, flags)


@contextlib.contextmanager
def locked_directory(directory: AnyPath) -> Iterator[bool]:
    """Whether there is a directory, while no other process of this host has a lock on it; if one
    has, that is BlockingIOError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    finally:
        os.close(descriptor)


def kernel_text(name: str) -> str:
    """What Linux tells in a file or a link below `/proc`; empty where it does not."""
    try:
        if is_symlink(f"/proc/{name}"):
            return os.readlink(f"/proc/{name}")
        with open(f"/proc/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def own_stderr() -> TextIO:
    """Standard error for Python alone: what libraries of this process write there goes nowhere."""
    kept = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return kept


class LockFile:
    """What the lock asks of a file system: to create if absent, to read, to overwrite one's own,
    and to remove or replace what has not changed since it was read. `bucket.LockFile` has all of it
    in conditional writes."""

    def __init__(self, path: AnyPath):
        self._path = os.fspath(path)
        self._descriptor = -1

    def create(self, data: bytes) -> bool:
        """Creates the file, which is then one's own; False where there is one."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self._path, flags, 0o644)
        except FileExistsError:
            return False
        try:
            self.write(data)
        except OSError:
            self.close()
            remove_file(self._path)
            raise
        return True

    def write(self, data: bytes) -> bool:
        """Overwrites the file that was created, whatever has its name now."""
        os.pwrite(self._descriptor, data, 0)
        os.close(os.dup(self._descriptor))  # NFS sends it to the server when a descriptor is closed
        return True

    def read(self) -> bytes | None:
        """Its content; None where there is none."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return os.read(descriptor, _MAX_LOCK_BYTES)
        finally:
            os.close(descriptor)

    def take(self, seen: bytes, data: bytes) -> bool:
        """Creates the file anew if its content is what was read; whether it is one's own then."""
        self.remove(seen)
        return self.create(data)

    def remove(self, seen: bytes) -> None:
        """Removes the file if its content is what was read."""
        aside = f"{self._path}.{secrets.token_hex(8)}"
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        if LockFile(aside).read() != seen:  # a new owner's
            with contextlib.suppress(OSError):
                os.link(aside, self._path, follow_symlinks=False)
        remove_file(aside)

    def close(self) -> None:
        """Lets go of the file, if it is one's own."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
