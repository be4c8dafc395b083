"""Objects of buckets on gs and s3, with what `disk` has of files.

A directory is what the keys of objects have before a slash: it is there as long as anything is
below it. TensorStore reads and writes objects; obstore lists them, see `listing`.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import tensorstore as ts

from reshard.errors import CorruptCheckpointError, StoreError
from reshard.storage import listing
from reshard.storage.disk import UNKNOWN, Entry, Location
from reshard.storage.listing import RETRIES, OnlyTensorStoreError
from reshard.storage.refusals import asking

# Requests at once, unless said otherwise.
REQUESTS = 128
# Objects that are deleted at once.
_DELETIONS = 1000
# Bytes of a document that may be asked for several times.
_SMALL = 1 << 16
# Directories that are listed at once.
_LISTS = 32
# Bytes of a document that is read before it is asked for.
_AHEAD = 1 << 26
# Bytes of an object that are read at once.
_BLOCK = 1 << 24


def resources(concurrency: int = REQUESTS) -> dict[str, Any]:
    """What a context says of requests: how many at once, and how often each is tried."""
    each = {"concurrency": {"limit": concurrency}, "retries": RETRIES}
    drivers = ("gcs", "s3", "http")
    return {f"{name}_request_{what}": limit for name in drivers for what, limit in each.items()}


@functools.lru_cache(maxsize=64)
def _opened(text: str) -> ts.KvStore:
    return ts.KvStore.open(json.loads(text), context=ts.Context(resources())).result()


@functools.cache
def _absent() -> bytes:
    """The generation of what is not there."""
    return ts.KvStore.open("memory://").result().read("x").result().stamp.generation


@dataclasses.dataclass(frozen=True)
class _Cache:
    """What has been read below a directory, while nobody needs to know of changes.

    Attributes:
      top: the directory.
      children: directory -> what is directly in it, by name.
      whole: directories of which `children` has all that is below them.
      documents: object -> a read of it that was begun, or, of a small one, is done.
    """

    top: str
    children: dict[str, dict[str, Entry]] = dataclasses.field(default_factory=dict)
    whole: set[str] = dataclasses.field(default_factory=set)
    documents: dict[str, ts.Future] = dataclasses.field(default_factory=dict)

    def list_below(self, top: "BucketLocation") -> None:
        """Lists all that is below a directory, unless that is known."""
        if any(f"{top}/".startswith(f"{known}/") for known in self.whole):
            return
        found = top._below()
        self.children[top.path] = {}
        for entry in found:
            *above, name = entry.path.split("/")
            folder = top.path
            for part in above:
                _add(self.children[folder], Entry(part, False, True))
                folder = f"{folder}/{part}"
                self.children.setdefault(folder, {})
            _add(self.children[folder], entry._replace(path=name))
        self.whole.add(top.path)

    def walk(self, top: str, below: str = "") -> Iterator[Entry]:
        """All that is known to be below a directory."""
        children = self.children.get(f"{top}/{below}".removesuffix("/"), {})
        for name, found in sorted(children.items()):
            yield found._replace(path=below + name)
            if found.is_dir:
                yield from self.walk(top, f"{below}{name}/")


_remembered: contextvars.ContextVar[_Cache | None] = contextvars.ContextVar("cache", default=None)


def _add(names: dict[str, Entry], entry: Entry) -> None:
    """An object may have the name of a directory."""
    other = names.get(entry.path, entry)
    if other.is_file != entry.is_file:
        entry = (other if other.is_file else entry)._replace(is_dir=True)
    names[entry.path] = entry


@contextlib.contextmanager
def _large_writes(place: "BucketLocation") -> Iterator[None]:
    """Raises StoreError if a large object cannot be written."""
    with asking(f"`{place}`", "written"):
        try:
            yield
        except OnlyTensorStoreError as error:
            hint = "pip install google-auth, or boto3 for s3, which find credentials"
            text = "uploads in parts need credentials that obstore accepts"
            raise StoreError(f"`{place}` cannot be written", [text], [hint]) from error


class BucketLocation(Location):
    """An object, or what is below a key."""

    is_local: ClassVar[bool] = False

    @property
    def _parts(self) -> tuple[str, str, str]:
        """`gs` or `s3`, the bucket, and the key."""
        scheme, _, rest = self.path.partition("://")
        bucket, _, key = rest.partition("/")
        return scheme, bucket, key

    @property
    def _key(self) -> str:
        return self._parts[2]

    @property
    def spec(self) -> dict[str, Any]:
        scheme, bucket, key = self._parts
        driver = {"driver": "gcs"} if scheme == "gs" else {"driver": "s3"} | listing.s3_options()
        return driver | {"bucket": bucket, "path": f"{key}/" if key else ""}

    @property
    def _store(self) -> ts.KvStore:
        """The key-value store of the whole bucket."""
        return _opened(json.dumps(self.spec | {"path": ""}))

    # What is there.

    @property
    def _cache(self) -> _Cache | None:
        """What has been read, if that is of this place."""
        cache = _remembered.get()
        return cache if cache is not None and f"{self}/".startswith(f"{cache.top}/") else None

    @contextlib.contextmanager
    def remembered(self) -> Iterator[None]:
        token = _remembered.set(self._cache or _Cache(self.path))
        try:
            yield
        finally:
            _remembered.reset(token)

    def ahead(
        self,
        documents: Iterable[str] = (),
        lists: Sequence[str] = (),
        below: bool = False,
        unseen: Iterable[str] = (),
    ) -> None:
        cache = self._cache
        if cache is None:
            return
        wanted = [self / name for name in unseen]
        for place in (self / name for name in documents):
            found = place.entry()
            if found is not None and found.is_file and found.nbytes <= _AHEAD:
                wanted.append(place)
        for place in wanted:
            if place.path not in cache.documents:
                cache.documents[place.path] = self._store.read(place._key)
        if below:
            cache.list_below(self)
        tops = [top for name in lists if (top := self / name).path not in cache.children]
        with concurrent.futures.ThreadPoolExecutor(_LISTS) as pool:
            for top, children in zip(tops, pool.map(type(self)._list_children, tops), strict=True):
                cache.children[top.path] = children

    def _children(self) -> dict[str, Entry]:
        """What is in a directory, by name."""
        cache = self._cache
        if cache is None:
            return self._list_children()
        if self.path not in cache.children:
            found = self.entry() if self.path != cache.top else Entry("", False, True)
            is_there = found is not None and found.is_dir
            cache.children[self.path] = self._list_children() if is_there else {}
        return cache.children[self.path]

    def _list_children(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for entry in self._below(shallow=True):
            name, slash, _ = entry.path.partition("/")  # of a server that knows no delimiters
            _add(found, Entry(name, False, True) if slash else entry)
        return found

    def _below(self, shallow: bool = False) -> list[Entry]:
        """The objects below a directory. If `shallow`, only the objects and the directories
        directly below it."""
        with asking(f"the list of `{self}`"):
            try:
                found = listing.below(*self._parts, shallow)
            except OnlyTensorStoreError:
                return self._list_keys(shallow)
            if shallow or all(entry.nbytes for entry in found):
                return found
            # Is an empty object `a` the object `a/` that some tools put for a directory?
            names = {entry.path for entry in self._list_keys(shallow)}
            return [entry for entry in found if entry.path in names]

    def _list_keys(self, shallow: bool) -> list[Entry]:
        """As TensorStore lists them: without sizes, and all of them."""
        prefix = f"{self._key}/" if self._key else ""
        below = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" is after "/"
        keys = self._store.list(below, len(prefix.encode())).result()
        names = [key.decode(errors="surrogateescape") for key in keys]
        if not shallow:
            return [Entry(name, True, False) for name in names if name and not name.endswith("/")]
        parts = dict.fromkeys(name.partition("/")[:2] for name in names if name)
        return [Entry(name, not slash, bool(slash)) for name, slash in parts]

    def entry(self, follow: bool = False) -> Entry | None:
        cache = self._cache
        if cache is None:
            return self._object() or self._directory()
        if self.path == cache.top:
            return self._directory() or self._object()
        found = self.parent._children().get(self.name)
        return found and found._replace(path="")

    def _directory(self) -> Entry | None:
        return Entry("", False, True) if self._children() else None

    def _object(self) -> Entry | None:
        """An object; None where there is none."""
        if not self._key:
            return None
        with asking(f"`{self}`"):
            try:
                return listing.entry(*self._parts)
            except OnlyTensorStoreError:
                asked = self._store.read(self._key, byte_range=slice(0, 0)).result()
                return Entry("", True, False) if asked.state == "value" else None

    def names(self) -> list[str]:
        return sorted(self._children())

    def directories(self) -> list[str]:
        return sorted(name for name, found in self._children().items() if found.is_dir)

    def walk(self) -> Iterator[Entry]:
        cache = self._cache or _Cache(self.path)
        cache.list_below(self)
        return cache.walk(self.path)

    def _versions(self, files: Sequence[Self]) -> list[str]:
        asked = [file._store.read(file._key, byte_range=slice(0, 0)) for file in files]
        found = []
        for file, future in zip(files, asked, strict=True):
            with asking(f"`{file}`"):
                found.append(repr(future.result().stamp.generation))
        return found

    # Reading.

    def read_whole(self) -> bytes | None:
        cache = self._cache
        known = {} if cache is None else cache.documents
        future = known.pop(self.path, None) or self._store.read(self._key)
        with asking(f"`{self}`"), listing.patience(f"`{self}`"):
            result = future.result()
        if len(result.value) <= _SMALL:
            known[self.path] = future
        return result.value if result.state == "value" else None

    def blocks(self, nbytes: int = UNKNOWN) -> Generator[bytes, None, None]:
        size = nbytes
        if size == UNKNOWN and (found := self.entry()):
            size = found.nbytes
        for block in [self.read_whole()] if size <= _BLOCK else self._ranges(size):
            if block is None:
                said = "it changed or was removed while it was read"
                raise StoreError(f"`{self}` cannot be read", [said])
            if size <= _BLOCK and nbytes not in (UNKNOWN, len(block)):
                said = f"it has {len(block)} bytes, but had {nbytes} when it was listed"
                raise StoreError(f"`{self}` cannot be read", [said])
            yield block

    def _ranges(self, nbytes: int) -> Iterator[bytes | None]:
        """So many bytes of an object, and None where it has another version than at first."""
        generations = set()
        for begin in range(0, nbytes, _BLOCK):
            part = slice(begin, min(begin + _BLOCK, nbytes))
            with asking(f"`{self}`"):
                result = self._store.read(self._key, byte_range=part).result()
            generations.add(result.stamp.generation)
            yield result.value if result.state == "value" and len(generations) == 1 else None

    def beginning(self, nbytes: int) -> bytes:
        found = self.entry()
        return self.part(0, min(nbytes, found.nbytes)) if found and found.nbytes else b""

    def part(self, begin: int, end: int) -> bytes:
        read = self._store.read(self._key, byte_range=slice(begin, end))
        with asking(f"`{self}`", other=CorruptCheckpointError):
            return read.result().value

    # Writing.

    @contextlib.contextmanager
    def new_file(self) -> Iterator[Callable[[bytes], object]]:
        blocks: list[bytes] = []
        yield blocks.append
        self.write(b"".join(blocks))

    def write(self, data: bytes | None) -> None:
        """Writes an object, which is durable when the call returns; None deletes it, if it is
        there."""
        with asking(f"`{self}`", "deleted" if data is None else "written"):
            self._store.write(self._key, data).result()

    def replace(self, data: bytes, temporary: str) -> None:
        self.write(data)

    def create(self, data: bytes) -> bool:
        scheme, bucket, key = self._parts
        with asking(f"`{self}`", "written"):
            # Where TensorStore asks first whether it is there, obstore does not.
            with contextlib.suppress(OnlyTensorStoreError):
                if scheme == "s3":
                    return listing.create(bucket, key, data)
            return bool(self._store.write(key, data, if_equal=_absent()).result().generation)

    def upload(self, file: Location) -> None:
        """Writes a file of a disk as an object, however large, in parts."""
        with _large_writes(self):
            listing.upload(*self._parts, file)

    def copy_on_server(self, new: "BucketLocation") -> None:
        """Gives an object a second name in its bucket, unless something has that name."""
        with _large_writes(new):
            listing.copy(*self._parts, new._key)

    def make_directory(self) -> None:
        pass

    def remove(self) -> None:
        self.write(None)

    def remove_files(self, names: Iterable[str]) -> None:
        scheme, bucket, above = self._parts
        keys = [f"{above}/{name}" for name in names]
        for begin in range(0, len(keys), _DELETIONS):
            some = keys[begin : begin + _DELETIONS]
            if scheme == "s3" and listing.delete(bucket, some):  # gs has no such request
                continue
            for future in [self._store.write(key, None) for key in some]:
                with contextlib.suppress(ValueError):
                    future.result()

    def remove_tree(self) -> None:
        self.remove_files([found.path for found in self.walk() if found.is_file])

    def remove_empty(self) -> None:
        pass
