"""Where checkpoints are: URLs and paths, with the key-value store behind each; and all access to
the files there that needs nothing but what every store has.

`posix` and `bucket` have the same functions for files and for objects. What only a local disk has
is in `posix` too, and is asked for where a location `is_local`.
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
from reshard.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    ReshardError,
    StoreError,
    first_line,
)
from reshard.storage import bucket, posix
from reshard.storage.posix import Entry
from reshard.storage.refusals import refusal
from reshard.units import format_bytes

# Bytes of a JSON document (of a tree of half a million leaves) or of a node of a B-tree. Larger
# files are not read whole.
MAX_DOCUMENT = 1 << 28
# Directories inside one another that are copied: deleting more could run out of stack.
_MAX_LEVELS = 100


def checked(future: ts.Future, what: str) -> Any:
    """The result of a read; raises CorruptCheckpointError, about `what`, if it fails, or StoreError
    if a bucket has not given it."""
    try:
        return future.result()
    except ReshardError:  # of a function of the user's, on the way
        raise
    except ValueError as error:
        if refused := refusal(error, what):
            raise refused from error
        raise CorruptCheckpointError(f"{what} cannot be read", [first_line(error)]) from error


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
        return posix if self.is_local else bucket

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
            return bucket.spec(self)
        return {"driver": "file", "path": f"{self.path.rstrip('/')}/"}

    def open(self, context: ts.Context | None = None) -> ts.KvStore:
        """The key-value store of what is below it."""
        return ts.KvStore.open(self.spec, context=context).result()

    def remembered(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, what is below it in a bucket is taken not to change: each directory is
        listed once."""
        return contextlib.nullcontext() if self.is_local else bucket.remembered(self)

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
            bucket.ahead(self, documents, lists, below, unseen)

    # What is there. Links are followed, but not by `entry` and `walk`.

    def exists(self) -> bool:
        return self._files.exists(self.path)

    def is_file(self) -> bool:
        return self._files.is_file(self.path)

    def is_dir(self) -> bool:
        return self._files.is_dir(self.path)

    def is_symlink(self) -> bool:
        return self._files.is_symlink(self.path)

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

    def write(self, data: bytes, durable: bool = False) -> None:
        self._files.write(self.path, data, durable)

    def make_directory(self) -> None:
        self._files.make_directories(self.path)

    def remove(self) -> None:
        self._files.remove_file(self.path)

    def resolved(self) -> "Location":
        """It without symbolic links."""
        return Location(posix.real(self)) if self.is_local else self

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

    def state(self, without: Collection[str], ask: bool = True) -> str:
        """A hash of which files there are, it or below it, of their sizes and when they were last
        changed; but for those of some names. Where a list does not tell, each file is asked for;
        or else nothing is known."""
        first, untold, state = self.entry(), [], hashlib.sha256()
        for found in itertools.chain([first] if first is not None else [], self.walk()):
            file = self / found.path
            if (found.is_file or not found.is_dir) and file.name not in without:
                line = repr((str(file), found.nbytes, found.modified))
                state.update(f"{line}\n".encode(errors="surrogateescape"))
                if found.modified == posix.UNKNOWN:
                    untold.append(file)
        if untold and not ask:
            return ""
        for version in bucket.versions(untold):
            state.update(f"{version}\n".encode(errors="surrogateescape"))
        return state.hexdigest()

    def file_bytes(self) -> int | None:
        """Bytes of a file, or None where there is none. Raises CheckpointFormatError where it is
        something else: what a symbolic link points to may be outside of the checkpoint, and a pipe
        may never end."""
        found = self.entry()
        if found is None or found.is_file:
            return None if found is None else found.nbytes
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
        if not self.is_local:
            data = bucket.read(self)
            if data is None:
                raise StoreError(f"`{self}` cannot be read", ["it was removed meanwhile"])
            return data
        result = checked(self.parent.open().read(self.name), f"`{self}`")
        return result.value if result.state == "value" else None

    def sha256(self) -> str:
        """The SHA-256 of a file."""
        return self.copy(None)

    def copy(
        self,
        destination: "Location | None",
        report: Callable[[int], None] = lambda nbytes: None,
        nbytes: int = posix.UNKNOWN,
    ) -> str:
        """Copies a file, of so many bytes, or only reads it if there is no destination; the SHA-256
        of what was read. On a disk it may have got longer: its first bytes are what was there, as
        of a log that a training still writes. Whatever is at the destination is replaced, and not
        written to: it may be a link to the source. On the way to a bucket all of it is in memory:
        an object is written at once."""
        found, read = hashlib.sha256(), 0
        with contextlib.ExitStack() as stack:
            blocks: list[bytes] = []
            add = blocks.append
            if destination is None:
                add = len
            elif destination.is_local:
                destination.remove()
                add = stack.enter_context(posix.create(destination)).write
            reader = contextlib.closing(self._files.blocks(self.path, nbytes))
            for block in stack.enter_context(reader):
                found.update(block)
                add(block)
                report(len(block))
                read += len(block)
        if nbytes not in (posix.UNKNOWN, read) and not self.is_local:
            text = f"it has {read} bytes, and had {nbytes} when it was listed"
            raise StoreError(f"`{self}` cannot be read", [text])
        if destination is not None and not destination.is_local:
            destination.write(b"".join(blocks))
        return found.hexdigest()

    def replace(self, data: bytes, temporary: str) -> None:
        """Writes a durable file, whole or not at all: on a disk by way of another name in its
        directory."""
        if self.is_local:
            posix.replace(self, data, self.beside(temporary))
        else:
            self.write(data)


def parse_location(path: str | os.PathLike) -> Location:
    """The location of a path or of a URL: `gs://`, `s3://` or `file://`; raises
    CheckpointFormatError for any other, or one that `pathlib` has changed."""
    text = os.fspath(path)
    if isinstance(path, Location):
        return path
    url = re.match(r"([a-z][a-z0-9+.-]*)://(.*)", text, re.DOTALL)
    if url is None:
        if not isinstance(path, str) and re.match(r"[a-z][a-z0-9]+:/", text):
            raise CheckpointFormatError(
                f"`{text}` was a URL before pathlib made a path of it",
                hints=[f"give it as text: {text.replace(':/', '://', 1)}"],
            )
        return Location(posix.absolute(text))
    scheme, rest = url.groups()
    if scheme == "file":
        rest = rest.removeprefix("localhost")
        if not rest.startswith("/"):
            raise CheckpointFormatError(
                f"`{text}`: what follows `file://` is a path from the root",
                hints=["file:///runs/1000, or a path alone"],
            )
        return Location(posix.absolute(rest))
    if scheme not in ("gs", "s3"):
        raise CheckpointFormatError(
            f"`{text}`: there is no way to read `{scheme}://`",
            hints=["a path, or a URL that begins with gs://, s3:// or file://"],
        )
    rest = rest.rstrip("/")
    parts = rest.split("/")
    if "" in parts or not {".", ".."}.isdisjoint(parts):
        raise CheckpointFormatError(
            f"`{text}` is no name in a bucket", hints=[f"{scheme}://bucket/run/1000"]
        )
    if reason := why_no_buckets():
        raise CheckpointFormatError(f"`{text}`: {reason}")
    return Location(f"{scheme}://{rest}")
