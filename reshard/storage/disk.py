"""Files and directories of a local disk. No other module imports `os` for files.

`Location` is a file or a directory. Its subclass for buckets is in `bucket`. System calls that only
Linux has are used there: elsewhere, jobs are slower and as durable.
"""

import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import itertools
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TextIO

import numpy as np
import tensorstore as ts

from reshard.errors import CheckpointFormatError, CorruptCheckpointError, StoreError
from reshard.units import format_bytes

AnyPath = str | os.PathLike[str]

# A size or a modification time that a store did not report.
UNKNOWN = -1
# The most bytes of a JSON document (of half a million leaves) or a B-tree node that is read.
MAX_DOCUMENT = 1 << 28
# The deepest nesting of directories that is copied: deleting more could run out of stack.
_MAX_LEVELS = 100
# Bytes per read of a copy.
_BLOCK = 1 << 18
# Bytes of a file that are mapped at once, and of a run that is written without mapping. A page
# that is mapped takes several times as long to make as one that is written.
_MAPPED, _SHORT = 16 << 20, 1 << 11
# Characters of a file's name that the name of its temporary file repeats.
_LONG = 100
# The magic numbers of ext2 to ext4, XFS, Btrfs, ZFS, F2FS, overlays and tmpfs in statfs.
_LOCAL_DISKS = {0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x01021994}
# Flags of renameat2, and its number of the working directory.
_NO_REPLACE, _EXCHANGE, _HERE = 1, 2, -100
# Flags of sync_file_range.
_WAIT_BEFORE, _WRITE = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)

is_file, absolute, remove_tree = os.path.isfile, os.path.abspath, shutil.rmtree


class Entry(NamedTuple):
    """A file, a directory, or neither: a link, a pipe or the like.

    Attributes:
      path: its path below the directory that was listed.
      is_file: whether it is a file. In a bucket, an object may have the name of a directory.
      is_dir: whether it is a directory.
      nbytes: bytes of a file.
      modified: of a file, the time of the last change, in nanoseconds. Of an object in a bucket,
        the identity of its version. There, both may be `UNKNOWN`.
      inode: of a file on a disk. It is not pickled: another host may see another number.
    """

    path: str
    is_file: bool
    is_dir: bool
    nbytes: int = UNKNOWN
    modified: int | str = UNKNOWN
    inode: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry, self[:-1]


@dataclasses.dataclass(frozen=True, order=True)
class Location:
    """An absolute path on a disk, or a URL of a bucket; need not exist. `/` adds a name to it."""

    path: str
    is_local: ClassVar[bool] = True  # on a disk

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path

    def __truediv__(self, below: str) -> Self:
        below = below.rstrip("/")
        return type(self)(f"{self.path.rstrip('/')}/{below}") if below else self

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The directory that contains it. A bucket and the root of a disk are their own parents."""
        if not self.is_local and self.path.count("/") == 2:
            return self
        return type(self)(self.path.rpartition("/")[0] or "/")

    def below(self, outer: "Location") -> str | None:
        """Its path relative to another location: empty if they are equal, None if it is not below
        that location."""
        prefix = outer.path.rstrip("/")
        if self == outer:
            return ""
        return self.path[len(prefix) + 1 :] if self.path.startswith(f"{prefix}/") else None

    @property
    def spec(self) -> dict[str, Any]:
        """The TensorStore spec of the key-value store below it."""
        return {"driver": "file", "path": f"{self.path.rstrip('/')}/"}

    def open(self, context: ts.Context | None = None) -> ts.KvStore:
        """The key-value store below it."""
        return ts.KvStore.open(self.spec, context=context).result()

    def check_opens(self) -> None:
        """Raises CheckpointFormatError for a path that TensorStore does not open."""
        if (self.is_local and "\\" in self.path) or not is_utf8(self.path):
            raise CheckpointFormatError(
                f"`{self}` holds a backslash, or a byte that is not UTF-8",
                ["TensorStore opens no such path"],
                ["give it another name"],
            )

    def cached_listing(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, nothing below a directory of a bucket is expected to change. Each
        directory is listed once, and each small document is read once."""
        return contextlib.nullcontext()

    def prefetch(
        self,
        documents: Iterable[str] = (),
        lists: Sequence[str] = (),
        below: bool = False,
        unseen: Iterable[str] = (),
    ) -> None:
        """In a bucket, inside `cached_listing`, sends requests before their answers are needed.

        Args:
          documents: files to read if the listing has them. The call does not wait for them.
          lists: directories to list, in parallel.
          below: list everything below this directory, in one request.
          unseen: files to read even if nothing has listed them. They may not exist.
        """

    # Listing. Only `exists`, `is_file`, `is_dir` and `entry(follow=True)` follow symbolic links.

    def entry(self, follow: bool = False) -> Entry | None:
        """The file, directory or link of this name, or None. With `follow`, the target of a link.
        Raises OSError if it cannot be looked at, for example without permission."""
        return _looked(self, follow)

    def exists(self) -> bool:
        return self.entry(follow=True) is not None

    def is_file(self) -> bool:
        entry = self.entry(follow=True)
        return entry is not None and entry.is_file

    def is_dir(self) -> bool:
        entry = self.entry(follow=True)
        return entry is not None and entry.is_dir

    def is_symlink(self) -> bool:
        return self.is_local and os.path.islink(self)

    def resolved(self) -> Self:
        """The same location without symbolic links."""
        return type(self)(os.path.realpath(self)) if self.is_local else self

    def names(self) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(self))

    def directories(self) -> list[str]:
        """Names of directories in a directory, and of links to directories, sorted."""
        with os.scandir(self) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def entries(self) -> list[Entry]:
        """The names in a directory, without sizes. A link counts as what it points to."""
        found = []
        with os.scandir(self) as listed:
            for each in listed:
                is_file = is_dir = False
                with contextlib.suppress(OSError):  # of a link
                    is_file, is_dir = each.is_file(), each.is_dir()
                found.append(Entry(each.name, is_file, is_dir))
        return found

    def walk(self, inner: bool = False) -> Iterator[Entry]:
        """Everything below a directory, sorted, each directory before its contents. Ignores files
        that vanish meanwhile. Not recursive: the nesting may be deeper than Python's stack. If
        `inner`, files that are in no folder of it may be left out."""
        pending = [Entry("", False, True)]
        while pending:
            entry = pending.pop()
            if entry.path:
                yield entry
            if entry.is_dir:
                inside, gone = [], contextlib.suppress(FileNotFoundError, NotADirectoryError)
                with gone, os.scandir(os.path.join(self, entry.path)) as listed:
                    for each in listed:
                        below = os.path.join(entry.path, each.name)
                        if each.is_dir(follow_symlinks=False):
                            inside.append(Entry(below, False, True))
                        elif entry.path or not inner:
                            with contextlib.suppress(FileNotFoundError):
                                inside.append(_entry(below, os.lstat(each.path)))
                pending += sorted(inside, reverse=True)

    def checked_walk(self) -> Iterator[Entry]:
        """A file, or a directory and everything below it, as of `walk`. Raises FileNotFoundError if
        it does not exist. Raises CheckpointFormatError if it contains anything but files and
        directories, or is nested too deeply."""
        first = self.entry()
        if first is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        for entry in itertools.chain([first], self.walk() if first.is_dir else ()):
            if entry.path.count("/") >= _MAX_LEVELS:
                raise CheckpointFormatError(f"directories below `{self}` are nested too deep")
            if entry.is_file == entry.is_dir:
                raise not_a_file(self / entry.path)
            yield entry

    def look(self, files: Iterable[str]) -> dict[str, Entry]:
        """The entries of those files below it that exist. Follows symbolic links. In a bucket, each
        entry has the identity of its version."""
        top = self.path.rstrip("/")
        entries = ((file, _looked(f"{top}/{file}" if file else top, True)) for file in files)
        return {file: entry for file, entry in entries if entry is not None}

    def file_entry(self, follow: bool = False) -> Entry | None:
        """A file, or None if it does not exist. Raises CheckpointFormatError for anything else. The
        target of a symbolic link may be outside the checkpoint, and a pipe may never end. With
        `follow`, a link to a file is that file."""
        entry = self.entry(follow)
        if entry is None and follow and self.is_symlink():
            raise CheckpointFormatError(
                f"`{self}` is a symbolic link to `{os.readlink(self)}`, which does not exist"
            )
        if entry is None or entry.is_file:
            return entry
        if entry.is_dir:
            raise CheckpointFormatError(f"`{self}` is a directory, not a file")
        raise not_a_file(self)

    def file_bytes(self, follow: bool = False) -> int | None:
        """Bytes of a file, as of `file_entry`."""
        entry = self.file_entry(follow)
        return None if entry is None else entry.nbytes

    # Reading.

    def blocks(self, nbytes: int = UNKNOWN) -> Generator[bytes, None, None]:
        """The first bytes of a file, or all bytes that it has when it is opened. Bytes that another
        process appends meanwhile are not read. Does not follow a symbolic link. In a bucket, raises
        StoreError if the object is shorter, was removed, or is replaced meanwhile."""
        with open(os.open(self, os.O_RDONLY | os.O_NOFOLLOW), "rb") as reader:
            left = os.fstat(reader.fileno()).st_size if nbytes == UNKNOWN else nbytes
            while block := reader.read(min(left, _BLOCK)):
                left -= len(block)
                yield block

    def part(self, begin: int, end: int) -> bytes:
        """The bytes of a file from `begin` to `end`."""
        with open(self, "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def read_whole(self) -> bytes | None:
        """All bytes of a file, however large, or None if it does not exist."""
        try:
            with open(self, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, follow: bool = False) -> bytes | None:
        """All bytes of a small file, or None if it does not exist. Raises CorruptCheckpointError if
        it is large or unreadable, and CheckpointFormatError if it is not a file. `follow`: as of
        `file_bytes`."""
        size = self.file_bytes(follow)
        if size is None:
            return None
        if size > MAX_DOCUMENT:
            raise CorruptCheckpointError(
                f"`{self}` has {format_bytes(size)}, too much for such a file"
            )
        try:
            data = self.read_whole()
        except StoreError:
            raise
        except OSError as error:
            kind = StoreError if isinstance(error, PermissionError) else CorruptCheckpointError
            raise kind(f"`{self}` cannot be read", [str(error)]) from error
        if data is None:
            raise StoreError(f"`{self}` cannot be read", ["it was removed while it was read"])
        return data

    def sha256(self) -> str:
        """The SHA-256 of a file."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    # Writing.

    def write(self, data: bytes | Iterable[bytes]) -> None:
        """Writes a file, which replaces what had its name: nothing is written through a link or
        into a pipe. On a disk, `sync` makes it durable."""
        self.remove()
        with open(self, "xb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)

    def create(self, data: bytes) -> bool:
        """Creates a file if it is absent, with all of its bytes or not at all. Returns False if it
        exists. In a bucket, also returns False if the answer to a request was lost: read the file
        to know who created it."""
        self.parent.make_directory()
        temporary = self.parent / f".{self.name[:_LONG]}.{secrets.token_hex(8)}"
        try:
            temporary.write(data)
            if not link(temporary, self) and not _renamed(temporary, self, _NO_REPLACE):
                with open(self, "xb") as file:
                    file.write(data)
        except FileExistsError:
            return False
        finally:
            temporary.remove()
        return True

    def create_or_match(self, data: bytes) -> bool:
        """Creates a file if it is absent. Returns whether the file now has these bytes. An earlier
        request may have created it, also one whose answer was an error."""
        return self.create(data) or self.read_whole() == data

    def check_conditions(self, data: bytes, destination: Self) -> None:
        """Raises StoreError, for a job that writes to `destination`, if a bucket creates this file
        again, which already exists with these bytes. Its store ignores conditions of writes."""
        if not self.is_local and self.create(data):
            raise StoreError(
                f"`{destination}` cannot be written",
                ["this store ignores conditional writes, so two jobs could overwrite each other"],
                ["write to a disk, and copy the result"],
            )

    def replace(self, data: bytes, temporary: str) -> None:
        """Writes a durable file, with all of its bytes or not at all: on a disk, under a temporary
        name in its directory first."""
        new = self.parent / temporary
        try:
            new.write(data)
            sync(new)
            os.replace(new, self)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(new)
        sync(self.parent)

    def copy(self, destination: "Location", nbytes: int = UNKNOWN) -> None:
        """Copies the first bytes of a file, as of `blocks`: a training may still append to a log.
        Replaces the destination instead of writing to it: it may be a link to the source."""
        destination.write(self.blocks(nbytes))

    def make_directory(self) -> None:
        """Makes a directory. In a bucket, directories exist through their contents alone."""
        os.makedirs(self, exist_ok=True)

    def remove(self) -> None:
        """Deletes a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self)

    def remove_files(self, names: Sequence[str]) -> None:
        """Deletes files below it. In a bucket, files that cannot be deleted stay."""
        for name in names:
            (self / name).remove()

    def remove_tree(self) -> None:
        """Deletes it with its contents, as far as possible. Tries again, because a write in flight
        may finish meanwhile."""
        for _ in range(3):
            shutil.rmtree(self, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self)

    def remove_empty(self) -> None:
        """Deletes empty directories below it, and itself if it is empty then."""
        for directory, _, _ in os.walk(self, topdown=False):
            remove_empty(directory)


def is_utf8(path: str) -> bool:
    """Whether the bytes of a path are UTF-8. Python keeps others as surrogates."""
    return path == path.encode(errors="replace").decode()


def is_mount_point(path: AnyPath) -> bool:
    """Whether a file system is mounted there: on Linux, also one from the same disk."""
    real = os.path.realpath(path).translate({ord(c): f"\\{ord(c):03o}" for c in "\\ \t\n"})
    lines = kernel_text("self/mountinfo").splitlines()
    return os.path.ismount(path) or any(line.split()[4] == real for line in lines)


def write_box(
    file: AnyPath, begin: int, shape: Sequence[int], box: Sequence[slice], values: np.ndarray
) -> None:
    """Writes a box of an array into a file that holds the array, in row-major order, from byte
    `begin` on. Other processes may write other boxes meanwhile."""
    strides = [math.prod(shape[axis + 1 :]) * values.itemsize for axis in range(len(shape))]
    corner = begin + sum(s * part.start for s, part in zip(strides, box, strict=True))
    partial = (axis for axis, size in enumerate(shape) if values.shape[axis] != size)
    outer = max(partial, default=0)
    run = math.prod(values.shape[outer:])
    with open(file, "r+b", buffering=0) as target:
        if outer and run * values.itemsize < _SHORT:
            _write_mapped(target, corner, values, strides)
            return
        corners = np.array(corner)
        for size, stride in zip(values.shape[:outer], strides, strict=False):
            corners = np.add.outer(corners, np.arange(size) * stride)
        runs = np.ascontiguousarray(values).reshape(-1, run).view(np.uint8)
        for data, offset in zip(runs, corners.reshape(-1).tolist(), strict=True):
            while len(data):
                written = os.pwrite(target.fileno(), data.data, offset)
                data, offset = data[written:], offset + written


def _write_mapped(target: Any, corner: int, values: np.ndarray, strides: Sequence[int]) -> None:
    """Writes short runs into a mapped file, of which at most about `_MAPPED` bytes are mapped."""
    if values.ndim > 1 and (len(values) == 1 or _span(values[0], strides[1:]) > _MAPPED):
        for row, part in enumerate(values):
            _write_mapped(target, corner + row * strides[0], part, strides[1:])
        return
    rows = max(_MAPPED // strides[0], 1)
    for first in range(0, len(values), rows):
        part, offset = values[first : first + rows], corner + first * strides[0]
        pages = np.memmap(target, np.uint8, "r+", offset, _span(part, strides))
        np.ndarray(part.shape, part.dtype, pages.data, 0, tuple(strides))[...] = part


def _span(values: np.ndarray, strides: Sequence[int]) -> int:
    """Bytes from the beginning of the first value to the end of the last one, with strides."""
    steps = ((size - 1) * step for size, step in zip(values.shape, strides, strict=True))
    return sum(steps) + values.itemsize


def make_file(file: AnyPath, head: bytes, nbytes: int) -> None:
    """Makes a file of `nbytes` bytes that begins with `head`."""
    with open(file, "xb") as new:
        new.write(head)
        new.truncate(nbytes)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Location]:
    """A directory for temporary files, deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as path:
        yield Location(path)


def not_a_file(location: Location) -> CheckpointFormatError:
    if not location.is_local:
        return CheckpointFormatError(
            f"`{location}` is an object, and also a directory of other objects",
            hints=["rename one of them: a disk cannot hold both"],
        )
    return CheckpointFormatError(
        f"`{location}` is neither a file nor a directory",
        hints=["make a copy that has files in place of symbolic links: cp -rL DIRECTORY COPY"],
    )


def _looked(path: AnyPath, follow: bool) -> Entry | None:
    try:
        return _entry("", os.stat(path, follow_symlinks=follow))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):  # a link to itself
            return None
        raise


def _entry(path: str, status: os.stat_result) -> Entry:
    is_file, is_dir = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
    return Entry(path, is_file, is_dir, status.st_size, status.st_mtime_ns, status.st_ino)


def rename(path: AnyPath, new: AnyPath) -> None:
    """Renames a directory. Raises FileExistsError if the new name exists: a plain rename would
    replace an empty directory."""
    if not _renamed(path, new, _NO_REPLACE):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(new))
        os.rename(path, new)


def exchange(one: AnyPath, other: AnyPath) -> bool:
    """Exchanges two names in one step. Returns False if the system cannot."""
    return _renamed(one, other, _EXCHANGE)


def _renamed(path: AnyPath, new: AnyPath, flag: int) -> bool:
    """Calls renameat2. Returns False if the system or the file system does not support the flag."""
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


def own_bytes(directory: Location) -> int:
    """Bytes that deleting a directory would free."""
    nbytes = 0
    for entry in directory.walk():
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(directory / entry.path)
            nbytes += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return nbytes


def link(source: AnyPath, destination: AnyPath) -> bool:
    """Makes a hard link. Returns False if the file system or its permissions forbid it. Raises
    FileExistsError if the destination exists."""
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True


def link_or_copy(source: Location, destination: Location, temporary: Location) -> None:
    """Gives a file a second name. Where hard links are refused, copies it under a temporary name
    first, so that the destination always has all of its bytes."""
    if not link(source, destination):
        source.copy(temporary)
        sync(temporary)
        os.replace(temporary, destination)


def device(destination: AnyPath) -> int:
    """The file system that a destination is on, or will be."""
    return os.stat(_nearest_directory(destination)).st_dev


def free_bytes(destination: AnyPath) -> int:
    return shutil.disk_usage(_nearest_directory(destination)).free


def temporary_free_bytes() -> int:
    """Free bytes where `temporary_directory` makes directories."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def _nearest_directory(path: AnyPath) -> str:
    """The nearest directory above a path that exists."""
    above = os.path.dirname(path)
    return above if os.path.exists(above) else _nearest_directory(above)


def on_local_disk(path: AnyPath) -> bool:
    """Whether a path is on a file system that no other host shares. Known on Linux only."""
    if not hasattr(_LIBC, "syncfs"):
        return False
    status = (ctypes.c_long * 32)()
    return _LIBC.statfs(os.fsencode(path), status) == 0 and status[0] in _LOCAL_DISKS


def sync(path: AnyPath) -> None:
    """Makes the bytes of a file durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_back(path: AnyPath) -> None:
    """Starts to write a file to the disk, and gives back the pages that the disk has.

    Otherwise a job would wait for the disk at its end. And a new file would take new pages of the
    page cache. The first touch of a page is the largest cost of writing, so pages are used again.
    Makes nothing durable: see `sync`.
    """
    if hasattr(_LIBC, "sync_file_range") and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(FileNotFoundError):  # a lock file, removed by its writer
            descriptor, whole = os.open(path, os.O_RDONLY), ctypes.c_int64(0)
            _LIBC.sync_file_range(descriptor, whole, whole, _WAIT_BEFORE | _WRITE)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def kernel_text(name: str) -> str:
    """The text of a file, or the target of a link, below Linux's `/proc`; empty without it."""
    path = f"/proc/{name}"
    with contextlib.suppress(OSError):
        if os.path.islink(path):
            return os.readlink(path)
        with open(path, errors="replace") as file:
            return file.read()
    return ""


def own_stderr() -> TextIO:
    """Standard error for Python alone. Anything that libraries of this process write to it is
    discarded."""
    kept = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    return kept
