"""Where checkpoints are: URLs and paths, with the key-value store behind each; and all access to
the files there that needs nothing but what every store has.

`disk` and `bucket` have the same functions for files and for objects. What only a local disk has
is in `disk` too, and is asked for where a location `is_local`.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import os
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorstore as ts

from reshard.compat import why_no_buckets
from reshard.errors import CheckpointFormatError, CorruptCheckpointError, StoreError
from reshard.storage import bucket, disk
from reshard.storage.disk import Entry
from reshard.storage.refusals import asking
from reshard.units import format_bytes

# Bytes of a JSON document (of a tree of half a million leaves) or of a node of a B-tree. Larger
# files are not read whole.
MAX_DOCUMENT = 1 << 28
# Directories inside one another that are copied: deleting more could run out of stack.
_MAX_LEVELS = 100


def checked(future: ts.Future, what: str) -> Any:
    """The result of a read; raises CorruptCheckpointError, about `what`, if it fails, or StoreError
    if a bucket has not given it."""
    with asking(what, other=CorruptCheckpointError):
        return future.result()


def not_a_file(location: "Location") -> CheckpointFormatError:
    if not location.is_local:
        return CheckpointFormatError(
            f"`{location}` is an object, and the name of others begins as if it were a directory",
            hints=["give one of them another name: no disk has both"],
        )
    return CheckpointFormatError(
        f"`{location}` is neither a file nor a directory",
        hints=["replace a symbolic link by what it points to"],
    )


@dataclasses.dataclass(frozen=True, order=True)
class Location:
    """A file or a directory, whether it is there or not: an absolute path, or the URL of what is in
    a bucket. `str()` shows it; `/` is what is below."""

    path: str

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk, and not in a bucket."""
        return "://" not in self.path

    @property
    def _files(self) -> types.ModuleType:
        return disk if self.is_local else bucket

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path

    def __truediv__(self, below: str) -> "Location":
        below = below.rstrip("/")
        return Location(f"{self.path.rstrip('/')}/{below}") if below else self

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """The directory that it is in; a bucket and the root of a disk are in themselves."""
        if not self.is_local and self.path.count("/") == 2:
            return self
        return Location(self.path.rpartition("/")[0] or "/")

    def beside(self, name: str) -> "Location":
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
        if not self.is_local:
            return bucket.spec(self.path)
        return {"driver": "file", "path": f"{self.path.rstrip('/')}/"}

    def open(self, context: ts.Context | None = None) -> ts.KvStore:
        """The key-value store of what is below it."""
        return ts.KvStore.open(self.spec, context=context).result()

    def remembered(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, what is below it in a bucket is taken not to change: each directory is
        listed once."""
        return contextlib.nullcontext() if self.is_local else bucket.remembered(self.path)

    def ahead(
        self,
        documents: Iterable[str] = (),
        lists: Sequence[str] = (),
        below: bool = False,
        unseen: Iterable[str] = (),
    ) -> None:
        """Asks a bucket at once for what will be read of this directory, while it is `remembered`:
        see `bucket.ahead`."""
        if not self.is_local:
            bucket.ahead(self.path, documents, lists, below, unseen)

    # What is there. Links are followed, but not by `entry` and `walk`.

    def _target(self) -> Entry | None:
        return disk.entry(self, follow=True) if self.is_local else bucket.entry(self.path)

    def exists(self) -> bool:
        try:
            return self._target() is not None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # nothing has such a name
                return False
            raise

    def is_file(self) -> bool:
        found = self._target()
        return found is not None and found.is_file

    def is_dir(self) -> bool:
        found = self._target()
        return found is not None and found.is_dir

    def is_symlink(self) -> bool:
        return self.is_local and disk.is_symlink(self)

    def names(self) -> list[str]:
        return self._files.names(self.path)

    def directories(self) -> list[str]:
        return self._files.directories(self.path)

    def entry(self) -> Entry | None:
        return self._files.entry(self.path)

    def walk(self) -> Iterator[Entry]:
        return self._files.walk(self.path)

    def beginning(self, nbytes: int) -> bytes:
        return self._files.beginning(self.path, nbytes)

    def write(self, data: bytes) -> None:
        self._files.write(self.path, data)

    def create(self, data: bytes) -> bool:
        """Creates a file if it is absent, whole or not at all. False where it is there; in a bucket
        also where the answer was lost, so that the file has to be read to know whose it is."""
        return self._files.create(self.path, data)

    def make_directory(self) -> None:
        """Makes a directory. In a bucket, it is there once something is in it."""
        if self.is_local:
            disk.make_directories(self)

    def remove(self) -> None:
        """Deletes a file, if it is there."""
        self._files.remove_file(self.path)

    def remove_tree(self) -> None:
        """Deletes all that is below it, and it."""
        if self.is_local:
            disk.remove(self)
        else:
            self.remove_files([found.path for found in self.walk() if found.is_file])

    def remove_empty(self) -> None:
        """Deletes directories below it that are empty, and then it, where it is. A bucket has
        none."""
        if self.is_local:
            for found in reversed([*self.walk()]):
                if found.is_dir:
                    disk.remove_empty(self / found.path)
            disk.remove_empty(self)

    def resolved(self) -> "Location":
        """It without symbolic links."""
        return Location(disk.real(self)) if self.is_local else self

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
        first, untold, state = self.entry(), [], hashlib.sha256()
        for found in [*filter(None, [first]), *self.walk()]:
            file = self / found.path
            if (found.is_file or not found.is_dir) and file.name not in without:
                line = repr((str(file), found.nbytes, found.modified))
                state.update(f"{line}\n".encode(errors="surrogateescape"))
                if found.modified == disk.UNKNOWN:
                    untold.append(file.path)
        for version in bucket.versions(untold):
            state.update(f"{version}\n".encode(errors="surrogateescape"))
        return state.hexdigest()

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
            raise CheckpointFormatError(f"`{self}` is a directory, and not a file")
        raise not_a_file(self)

    def read(self) -> bytes | None:
        """A small file whole, or None where there is none. Raises CorruptCheckpointError if it
        cannot be read, or is not small, and CheckpointFormatError if it is something else."""
        size = self.file_bytes()
        if size is None:
            return None
        if size > MAX_DOCUMENT:
            raise CorruptCheckpointError(f"`{self}` has {format_bytes(size)}: no checkpoint's has")
        try:
            data = self.read_whole()
        except StoreError:
            raise
        except OSError as error:
            raise CorruptCheckpointError(f"`{self}` cannot be read", [str(error)]) from error
        if data is None:
            raise StoreError(f"`{self}` cannot be read", ["it was removed meanwhile"])
        return data

    def read_whole(self) -> bytes | None:
        """A file whole, however large; None where there is none."""
        return self._files.read(self.path)

    def remove_files(self, names: Sequence[str]) -> None:
        """Deletes files below it, of a bucket many at once. What cannot be deleted stays."""
        if self.is_local:
            for name in names:
                (self / name).remove()
        else:
            bucket.remove_files(self.path, names)

    def sha256(self) -> str:
        """The SHA-256 of a file."""
        found = hashlib.sha256()
        for block in self._files.blocks(self.path, disk.UNKNOWN):
            found.update(block)
        return found.hexdigest()

    def copy(
        self,
        destination: "Location",
        report: Callable[[int], None] = lambda nbytes: None,
        nbytes: int = disk.UNKNOWN,
    ) -> None:
        """Copies a file, of so many bytes. On a disk it may have got longer: its first bytes are
        what was there, as of a log that a training still writes. Whatever is at the destination is
        replaced, and not written to: it may be a link to the source. On the way to a bucket all of
        it is in memory: an object is written at once."""
        blocks: list[bytes] = []
        with contextlib.ExitStack() as stack:
            add = blocks.append
            if destination.is_local:
                add = stack.enter_context(disk.new_file(destination)).write
            reader = contextlib.closing(self._files.blocks(self.path, nbytes))
            for block in stack.enter_context(reader):
                add(block)
                report(len(block))
        if not destination.is_local:
            destination.write(b"".join(blocks))

    def replace(self, data: bytes, temporary: str) -> None:
        """Writes a durable file, whole or not at all: on a disk by way of another name in its
        directory."""
        if self.is_local:
            disk.replace(self, data, self.beside(temporary))
        else:
            self.write(data)


def parse_location(path: str | os.PathLike) -> Location:
    """The location of a path or of a URL: `gs://`, `s3://` or `file://`; raises
    CheckpointFormatError for any other, or one that `pathlib` has changed."""
    if isinstance(path, Location):
        return path
    text = os.fspath(path)
    url = re.match(r"([a-z][a-z0-9+.-]*)://(.*)", text, re.DOTALL)
    if url is None:
        schemes = "(?i:gs|s3|file)" if isinstance(path, str) else "[a-z][a-z0-9]+"
        if near := re.match(f"({schemes}):/+(.*)", text, re.DOTALL):
            scheme = near[1].lower()
            meant = f"{scheme}://{'/' * (scheme == 'file')}{near[2]}"
            what, hints = "looks like a URL, and is none", [meant, f"./{text}, if it is a path"]
            if not isinstance(path, str):
                what = "was a URL before pathlib made a path of it"
                hints = [f"give it as text: {meant}"]
            raise CheckpointFormatError(f"`{text}` {what}", hints=hints)
        return Location(disk.absolute(text))
    scheme, rest = url[1], url[2].rstrip("/")
    local = url[2].removeprefix("localhost")
    if scheme == "file" and local.startswith("/"):
        return Location(disk.absolute(local))
    if scheme == "file":
        problem = ": what follows `file://` is a path from the root"
        hint = "file:///runs/1000, or a path alone"
    elif scheme not in ("gs", "s3"):
        problem = f": there is no way to read `{scheme}://`"
        hint = "a path, or a URL that begins with gs://, s3:// or file://"
    elif not {"", ".", ".."}.isdisjoint(rest.split("/")):
        problem, hint = " is no name in a bucket", f"{scheme}://bucket/run/1000"
    elif reason := why_no_buckets():
        raise CheckpointFormatError(f"`{text}`: {reason}")
    else:
        return Location(f"{scheme}://{rest}")
    raise CheckpointFormatError(f"`{text}`{problem}", hints=[hint])
