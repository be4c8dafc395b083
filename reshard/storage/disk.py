"""Files of a local disk: the only module that touches them; and what no bucket has: links, renames,
sync, directories.

What only Linux has is used where it is there: elsewhere, work is slower and no less durable.
"""

import contextlib
import ctypes
import errno
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
# Characters of a file's name that are repeated in that of a temporary one beside it.
_LONG = 100
# What statfs calls ext2 to ext4, XFS, Btrfs, ZFS, F2FS, overlays and tmpfs.
_LOCAL_DISKS = {0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x01021994}
# Flags of renameat2, and what it calls the working directory.
_NO_REPLACE, _EXCHANGE, _HERE = 1, 2, -100
# Flags of sync_file_range.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)

is_symlink, is_file = os.path.islink, os.path.isfile
absolute, real, remove_tree = os.path.abspath, os.path.realpath, shutil.rmtree


class Entry(NamedTuple):
    """What has a name.

    Attributes:
      path: its path, below where the walk began.
      is_file: it is a file.
      is_dir: it is a directory; what is neither is a link, a pipe or the like. In a bucket, an
        object may have the name of a directory.
      nbytes: bytes of a file.
      modified: when it was last changed, in nanoseconds; of an object in a bucket, what no other
        version of it has. Both may be `UNKNOWN` there.
    """

    path: str
    is_file: bool
    is_dir: bool
    nbytes: int = UNKNOWN
    modified: int | str = UNKNOWN


def _entry(path: str, found: os.stat_result) -> Entry:
    is_file, is_dir = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
    return Entry(path, is_file, is_dir, found.st_size, found.st_mtime_ns)


def entry(path: AnyPath, follow: bool = False) -> Entry | None:
    """What has a name; None where nothing has. A symbolic link is itself, or, to `follow` it, what
    it points to. What may not be looked at is an error, and not nothing."""
    try:
        return _entry("", os.stat(path, follow_symlinks=follow))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
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
    left = [Entry("", False, True)]
    while left:
        found = left.pop()
        if found.path:
            yield found
        if found.is_dir:
            inside = []
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(os.path.join(top, found.path)) as each,
            ):
                for one in each:
                    with contextlib.suppress(FileNotFoundError):
                        name = os.path.join(found.path, one.name)
                        inside.append(_entry(name, one.stat(follow_symlinks=False)))
            left += sorted(inside, reverse=True)


def beginning(path: AnyPath, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(nbytes)


def read(path: AnyPath) -> bytes | None:
    """A file whole; None where there is none."""
    try:
        return beginning(path, -1)
    except (FileNotFoundError, NotADirectoryError):
        return None


def blocks(path: AnyPath, nbytes: int = UNKNOWN) -> Iterator[bytes]:
    """So many first bytes of a file, or all that it has when it is opened: one that somebody still
    writes to is not followed. Nor is a symbolic link."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as reader:
        left = os.fstat(reader.fileno()).st_size if nbytes == UNKNOWN else nbytes
        while block := reader.read(min(left, _BLOCK)):
            left -= len(block)
            yield block


def new_file(path: AnyPath) -> BinaryIO:
    """A new file, to be written in the place of what is there: nothing is written through a link or
    into a pipe of others."""
    remove_file(path)
    return open(path, "xb")


def write(path: AnyPath, data: bytes) -> None:
    """Writes a file, in the place of what is there. It is durable once `sync` has been called."""
    with new_file(path) as file:
        file.write(data)


def create(path: AnyPath, data: bytes) -> bool:
    """Creates a file if it is absent, whole or not at all; whether it did."""
    directory, name = os.path.split(path)
    make_directories(directory)
    temporary = os.path.join(directory, f".{name[:_LONG]}.{secrets.token_hex(8)}")
    try:
        write(temporary, data)
        if not link(temporary, path):
            with open(path, "xb") as file:
                file.write(data)
    except FileExistsError:
        return False
    finally:
        remove_file(temporary)
    return True


def replace(path: AnyPath, data: bytes, temporary: AnyPath) -> None:
    """Writes a durable file that is there whole or not at all, by way of another one beside it."""
    try:
        write(temporary, data)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync(os.path.dirname(path))


def make_directories(path: AnyPath) -> None:
    os.makedirs(path, exist_ok=True)


def remove(path: AnyPath) -> None:
    """Deletes a file or a tree; several times if need be, for a write in flight may land while it
    is walked. What cannot be deleted stays."""
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)


def rename(path: AnyPath, new: AnyPath) -> None:
    """Renames a directory. Raises FileExistsError where something has the new name: a plain rename
    would replace an empty directory."""
    if not _renamed(path, new, _NO_REPLACE):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(new))
        os.rename(path, new)


def exchange(one: AnyPath, other: AnyPath) -> bool:
    """Exchanges two names in one step; False where the system cannot."""
    return _renamed(one, other, _EXCHANGE)


def _renamed(path: AnyPath, new: AnyPath, flag: int) -> bool:
    """Calls Linux's renameat2; False where the system or the file system does not know the flag."""
    if not hasattr(_LIBC, "renameat2"):
        return False
    if not _LIBC.renameat2(_HERE, os.fsencode(path), _HERE, os.fsencode(new), flag):
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(path), None, os.fspath(new))


def remove_empty(directory: AnyPath) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def remove_file(path: AnyPath) -> None:
    """Deletes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def own_bytes(directory: AnyPath) -> int:
    """Bytes that would be free without a directory."""
    nbytes = 0
    for each in walk(directory):
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(os.path.join(directory, each.path))
            nbytes += found.st_blocks * 512 if found.st_nlink == 1 else 0
    return nbytes


def link(source: AnyPath, destination: AnyPath) -> bool:
    """A second name for a file; False where the file system or its owner forbids it. Raises
    FileExistsError where something has the name."""
    make_directories(os.path.dirname(destination))
    try:
        os.link(source, destination, follow_symlinks=False)
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
    return above if os.path.exists(above) else _there(above)


def sync(path: AnyPath) -> None:
    """Makes a file durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
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
        if not hasattr(_LIBC, "sync_file_range") or not os.path.exists(self._directory):
            return
        for name in set(os.listdir(self._directory)) - self._seen:
            self._seen.add(name)
            with contextlib.suppress(FileNotFoundError):  # a lock file, gone with its writer
                descriptor = os.open(os.path.join(self._directory, name), os.O_RDONLY)
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


def kernel_text(name: str) -> str:
    """What Linux tells in a file or a link below `/proc`; empty where it does not."""
    path = f"/proc/{name}"
    try:
        if is_symlink(path):
            return os.readlink(path)
        return beginning(path, -1).decode(errors="replace")
    except OSError:
        return ""


def own_stderr() -> TextIO:
    """Standard error for Python alone: what libraries of this process write there goes nowhere."""
    kept = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return kept
