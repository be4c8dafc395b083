"""Files of a local disk: the only module that touches them; and what no bucket has: links, renames,
sync, directories.

`Location` is a file or a directory; `bucket` has those of buckets. What only Linux has is used
where it is there: elsewhere, work is slower and no less durable.
"""

import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import itertools
import math
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self, TextIO

import numpy as np
import tensorstore as ts

from reshard.errors import CheckpointFormatError, CorruptCheckpointError, StoreError
from reshard.units import format_bytes

AnyPath = str | os.PathLike[str]

# A size or a time that nobody has told.
UNKNOWN = -1
# Bytes of a JSON document (of a tree of half a million leaves) or of a node of a B-tree. Larger
# files are not read whole.
MAX_DOCUMENT = 1 << 28
# Directories inside one another that are copied: deleting more could run out of stack.
_MAX_LEVELS = 100
# Bytes that are copied at once.
_BLOCK = 1 << 18
# Bytes of a file that are mapped at once.
_MAPPED = 16 << 20
# Characters of a file's name that are repeated in that of a temporary one beside it.
_LONG = 100
# What statfs calls ext2 to ext4, XFS, Btrfs, ZFS, F2FS, overlays and tmpfs.
_LOCAL_DISKS = {0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x01021994}
# Flags of renameat2, and what it calls the working directory.
_NO_REPLACE, _EXCHANGE, _HERE = 1, 2, -100
# Flags of sync_file_range.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)

is_file, absolute, remove_tree = os.path.isfile, os.path.abspath, shutil.rmtree


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


@dataclasses.dataclass(frozen=True, order=True)
class Location:
    """A file or a directory, whether it is there or not: an absolute path, or of a bucket a URL.
    `str()` shows it; `/` is what is below."""

    path: str
    is_local: ClassVar[bool] = True  # on a disk, and not in a bucket

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
        """The directory that it is in; a bucket and the root of a disk are in themselves."""
        if not self.is_local and self.path.count("/") == 2:
            return self
        return type(self)(self.path.rpartition("/")[0] or "/")

    def beside(self, name: str) -> Self:
        return self.parent / name

    def below(self, outer: "Location") -> str | None:
        """Its path below another location: empty where both are one, None where it is not below."""
        prefix = outer.path.rstrip("/")
        if self == outer:
            return ""
        return self.path[len(prefix) + 1 :] if self.path.startswith(f"{prefix}/") else None

    @property
    def spec(self) -> dict[str, Any]:
        """The key-value store of what is below it."""
        return {"driver": "file", "path": f"{self.path.rstrip('/')}/"}

    def open(self, context: ts.Context | None = None) -> ts.KvStore:
        """The key-value store of what is below it."""
        return ts.KvStore.open(self.spec, context=context).result()

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

    # What is there. Links are followed, but not by `entry` and `walk`.

    def entry(self, follow: bool = False) -> Entry | None:
        """What has the name; None where nothing has. A symbolic link is itself, or, to `follow` it,
        what it points to. What may not be looked at is an error, and not nothing."""
        try:
            return _entry("", os.stat(self, follow_symlinks=follow))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself
                return None
            raise

    def exists(self) -> bool:
        try:
            return self.entry(follow=True) is not None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # nothing has such a name
                return False
            raise

    def is_file(self) -> bool:
        found = self.entry(follow=True)
        return found is not None and found.is_file

    def is_dir(self) -> bool:
        found = self.entry(follow=True)
        return found is not None and found.is_dir

    def is_symlink(self) -> bool:
        return self.is_local and os.path.islink(self)

    def resolved(self) -> Self:
        """It without symbolic links."""
        return type(self)(os.path.realpath(self)) if self.is_local else self

    def names(self) -> list[str]:
        """Names in a directory, in order."""
        return sorted(os.listdir(self))

    def directories(self) -> list[str]:
        """Names of directories in a directory, in order; links to some are among them."""
        with os.scandir(self) as found:
            return sorted(each.name for each in found if each.is_dir())

    def walk(self) -> Iterator[Entry]:
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
                    os.scandir(os.path.join(self, found.path)) as each,
                ):
                    for one in each:
                        with contextlib.suppress(FileNotFoundError):
                            name = os.path.join(found.path, one.name)
                            inside.append(_entry(name, one.stat(follow_symlinks=False)))
                left += sorted(inside, reverse=True)

    def checked_walk(self) -> Iterator[Entry]:
        """A file, or a directory and all that is below it, as `walk` has it. Raises
        FileNotFoundError where there is nothing, and CheckpointFormatError where there is something
        else in it, or it is nested too deep."""
        first = self.entry()
        if first is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        for found in itertools.chain([first], self.walk() if first.is_dir else ()):
            if found.path.count("/") >= _MAX_LEVELS:
                raise CheckpointFormatError(f"directories below `{self}` are nested too deep")
            if found.is_file == found.is_dir:
                raise not_a_file(self / found.path)
            yield found

    def state(self, without: Collection[str]) -> str:
        """A hash of which files there are, it or below it, of their sizes and when they were last
        changed; but for those of some names. Where a list does not tell, each file is asked for."""
        first, untold, lines = self.entry(), [], []
        for found in [*filter(None, [first]), *self.walk()]:
            file = self / found.path
            if (found.is_file or not found.is_dir) and file.name not in without:
                lines.append(repr((file.path, found.nbytes, found.modified)))
                untold += [file] if found.modified == UNKNOWN else []
        text = "\n".join(lines + self._versions(untold))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()

    def _versions(self, files: Sequence[Self]) -> list[str]:
        """A text for each file, which another version of it does not have."""
        return []

    def file_bytes(self) -> int | None:
        """Bytes of a file, or None where there is none. Raises CheckpointFormatError where it is
        something else: what a symbolic link points to may be outside of the checkpoint, and a pipe
        may never end."""
        found = self.entry()
        if found is None:
            return None
        if found.is_file:
            return found.nbytes
        if found.is_dir:
            raise CheckpointFormatError(f"`{self}` is a directory, not a file")
        raise not_a_file(self)

    # Reading.

    def blocks(self, nbytes: int = UNKNOWN) -> Generator[bytes, None, None]:
        """So many first bytes of a file, or all that it has when it is opened: one that somebody
        still writes to is not followed. Nor is a symbolic link. In a bucket, raises StoreError
        where it has not so many bytes, is gone, or another one is in its place by the end."""
        with open(os.open(self, os.O_RDONLY | os.O_NOFOLLOW), "rb") as reader:
            left = os.fstat(reader.fileno()).st_size if nbytes == UNKNOWN else nbytes
            while block := reader.read(min(left, _BLOCK)):
                left -= len(block)
                yield block

    def beginning(self, nbytes: int) -> bytes:
        with open(self, "rb") as file:
            return file.read(nbytes)

    def part(self, begin: int, end: int) -> bytes:
        """The bytes of a file from `begin` to `end`."""
        with open(self, "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def read_whole(self) -> bytes | None:
        """A file whole, however large; None where there is none."""
        try:
            return self.beginning(-1)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self) -> bytes | None:
        """A small file whole, or None where there is none. Raises CorruptCheckpointError if it
        cannot be read, or is not small, and CheckpointFormatError if it is something else."""
        size = self.file_bytes()
        if size is None:
            return None
        if size > MAX_DOCUMENT:
            raise CorruptCheckpointError(
                f"`{self}` has {format_bytes(size)}, more than any checkpoint's file"
            )
        try:
            data = self.read_whole()
        except StoreError:
            raise
        except OSError as error:
            raise CorruptCheckpointError(f"`{self}` cannot be read", [str(error)]) from error
        if data is None:
            raise StoreError(f"`{self}` cannot be read", ["it was removed while it was read"])
        return data

    def sha256(self) -> str:
        """The SHA-256 of a file."""
        found = hashlib.sha256()
        for block in self.blocks():
            found.update(block)
        return found.hexdigest()

    # Writing.

    @contextlib.contextmanager
    def new_file(self) -> Iterator[Callable[[bytes], object]]:
        """What writes to a new file in the place of what is there: nothing is written through a
        link or into a pipe of others. In a bucket it is in memory, and written at the end."""
        self.remove()
        with open(self, "xb") as file:
            yield file.write

    def write(self, data: bytes) -> None:
        """Writes a file, in the place of what is there. On a disk it is durable once `sync` has
        been called."""
        with self.new_file() as add:
            add(data)

    def create(self, data: bytes) -> bool:
        """Creates a file if it is absent, whole or not at all. False where it is there; in a bucket
        also where the answer was lost, so that the file has to be read to know whose it is."""
        self.parent.make_directory()
        temporary = self.beside(f".{self.name[:_LONG]}.{secrets.token_hex(8)}")
        try:
            temporary.write(data)
            if not link(temporary, self):
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
        """Raises StoreError, for a job that writes to `destination`, if the store creates this file
        again, which already exists with these bytes. Such a store ignores conditions of writes."""
        if self.create(data):
            raise StoreError(
                f"`{destination}` cannot be written",
                ["this store ignores conditions of writes, so two jobs could mix"],
                ["write to a disk, and copy the result"],
            )

    def replace(self, data: bytes, temporary: str) -> None:
        """Writes a durable file, whole or not at all: on a disk by way of another name in its
        directory."""
        new = self.beside(temporary)
        try:
            new.write(data)
            sync(new)
            os.replace(new, self)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(new)
        sync(self.parent)

    def copy(
        self,
        destination: "Location",
        report: Callable[[int], None] = lambda nbytes: None,
        nbytes: int = UNKNOWN,
    ) -> None:
        """Copies a file, of so many bytes. On a disk it may have got longer: its first bytes are
        what was there, as of a log that a training still writes. Whatever is at the destination is
        replaced, and not written to: it may be a link to the source."""
        with destination.new_file() as add, contextlib.closing(self.blocks(nbytes)) as blocks:
            for block in blocks:
                add(block)
                report(len(block))

    def make_directory(self) -> None:
        """Makes a directory. In a bucket, it is there once something is in it."""
        os.makedirs(self, exist_ok=True)

    def remove(self) -> None:
        """Deletes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self)

    def remove_files(self, names: Sequence[str]) -> None:
        """Deletes files below it, of a bucket many at once: there, what cannot be deleted stays."""
        for name in names:
            (self / name).remove()

    def remove_tree(self) -> None:
        """Deletes it, and all that is below it; several times if need be, for a write in flight may
        land while it is walked. What cannot be deleted stays."""
        for _ in range(3):
            shutil.rmtree(self, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self)

    def remove_empty(self) -> None:
        """Deletes directories below it that are empty, and then it, where it is. A bucket has
        none."""
        for found in reversed([*self.walk()]):
            if found.is_dir:
                remove_empty(self / found.path)
        remove_empty(self)


def write_box(
    file: AnyPath, begin: int, shape: Sequence[int], box: Sequence[slice], values: np.ndarray
) -> None:
    """Writes a box of an array into a file that has the whole array, rows first, from `begin` on.
    Some processes may write other boxes meanwhile."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        strides = [math.prod(shape[axis + 1 :]) * values.itemsize for axis in range(len(shape))]
        corner = begin + sum(s * part.start for s, part in zip(strides, box, strict=True))
        _write_strided(descriptor, corner, strides, values)
    finally:
        os.close(descriptor)


def _write_strided(descriptor: int, begin: int, strides: Sequence[int], values: np.ndarray) -> None:
    """Writes values to a file, those that are not in one piece there by way of its pages."""
    steps = [(size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)]
    span = sum(steps) + values.itemsize
    if span == values.nbytes:
        left = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        while left:
            written = os.pwrite(descriptor, left, begin)
            begin, left = begin + written, left[written:]
    elif span <= _MAPPED:
        first = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(descriptor, begin + span - first, offset=first) as pages:
            place = np.frombuffer(pages, np.uint8, span, begin - first)
            np.ndarray(values.shape, values.dtype, place.data, 0, tuple(strides))[...] = values
            del place
    else:
        axis = next(axis for axis, size in enumerate(values.shape) if size > 1)
        half = values.shape[axis] // 2
        for start, part in zip((0, half), np.split(values, [half], axis), strict=True):
            _write_strided(descriptor, begin + start * strides[axis], strides, part)


def make_file(file: AnyPath, head: bytes, nbytes: int) -> None:
    """Makes a file of so many bytes, which begins with `head`."""
    with open(file, "xb") as new:
        new.write(head)
        new.truncate(nbytes)


def reader(file: AnyPath) -> BinaryIO:
    return open(file, "rb")


@contextlib.contextmanager
def temporary_directory() -> Iterator[Location]:
    """A directory for temporary files, which is deleted afterwards."""
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
        hints=["replace a symbolic link by what it points to"],
    )


def _entry(path: str, found: os.stat_result) -> Entry:
    is_file, is_dir = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
    return Entry(path, is_file, is_dir, found.st_size, found.st_mtime_ns)


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


def own_bytes(directory: Location) -> int:
    """Bytes that would be free without a directory."""
    nbytes = 0
    for each in directory.walk():
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(directory / each.path)
            nbytes += found.st_blocks * 512 if found.st_nlink == 1 else 0
    return nbytes


def link(source: AnyPath, destination: AnyPath) -> bool:
    """A second name for a file; False where the file system or its owner forbids it. Raises
    FileExistsError where something has the name."""
    os.makedirs(os.path.dirname(destination), exist_ok=True)
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
        if os.path.islink(path):
            return os.readlink(path)
        return Location(path).beginning(-1).decode(errors="replace")
    except OSError:
        return ""


def own_stderr() -> TextIO:
    """Standard error for Python alone: what libraries of this process write there goes nowhere."""
    kept = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return kept
