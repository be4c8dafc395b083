"""Objects of buckets on gs and s3, with the functions that `disk` has for files.

A directory is what the keys of objects have before a slash: it is there as long as anything is
below it. TensorStore reads and writes objects; obstore lists them, see `listing`.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorstore as ts

from reshard.errors import StoreError
from reshard.storage import disk, listing
from reshard.storage.disk import Entry
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


@functools.cache
def _context() -> ts.Context:
    return ts.Context(resources())


def split(path: str) -> tuple[str, str, str]:
    """`gs` or `s3`, the bucket, and the key."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return scheme, bucket, key


def spec(path: str) -> dict[str, Any]:
    """The key-value store of what is below a key."""
    scheme, bucket, key = split(path)
    below = f"{key}/" if key else ""
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": below}
    found: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": below}
    endpoint, region = listing.s3_endpoint(), listing.s3_region()
    if endpoint:
        found["endpoint"] = endpoint
    if region:
        found["aws_region"] = region
    home = f"{os.environ.get('HOME', '')}/.aws"
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/credentials"
    config = os.environ.get("AWS_CONFIG_FILE") or f"{home}/config"
    # TensorStore's own search logs an error for each place in which it finds nothing.
    if listing.s3_has_keys():
        found["aws_credentials"] = {"type": "environment"}
    elif disk.is_file(credentials):
        found["aws_credentials"] = {
            "type": "profile",
            "profile": os.environ.get("AWS_PROFILE") or "default",
            "credentials_file": credentials,
            "config_file": config if disk.is_file(config) else credentials,
        }
    return found


def _store(path: str) -> ts.KvStore:
    """The key-value store of a whole bucket."""
    scheme, bucket, _ = split(path)
    return _opened(json.dumps(spec(f"{scheme}://{bucket}")))


@functools.lru_cache(maxsize=64)
def _opened(text: str) -> ts.KvStore:
    return ts.KvStore.open(json.loads(text), context=_context()).result()


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

    def is_whole(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{top}/") for top in self.whole)

    def list_below(self, top: str) -> None:
        """Lists all that is below a directory, unless that is known."""
        if self.is_whole(top):
            return
        found = _below(top)
        self.children[top] = {}
        for entry in found:
            *above, name = entry.path.split("/")
            folder = top
            for part in above:
                _add(self.children[folder], Entry(part, False, True))
                folder = f"{folder}/{part}"
                self.children.setdefault(folder, {})
            _add(self.children[folder], entry._replace(path=name))
        self.whole.add(top)

    def walk(self, top: str, below: str = "") -> Iterator[Entry]:
        """All that is known to be below a directory."""
        children = self.children.get(f"{top}/{below}".removesuffix("/"), {})
        for name, found in sorted(children.items()):
            yield found._replace(path=below + name)
            if found.is_dir:
                yield from self.walk(top, f"{below}{name}/")


_cache: contextvars.ContextVar[_Cache | None] = contextvars.ContextVar("cache", default=None)


def _cache_of(path: str) -> _Cache | None:
    """What has been read, if that is of a path."""
    cache = _cache.get()
    return cache if cache is not None and f"{path}/".startswith(f"{cache.top}/") else None


@contextlib.contextmanager
def remembered(top: str) -> Iterator[None]:
    """While it lasts, of what is below a directory each directory is listed once, and not asked for
    its files one by one; and each small document is read once."""
    token = _cache.set(_cache_of(top) or _Cache(top))
    try:
        yield
    finally:
        _cache.reset(token)


def ahead(
    directory: str,
    documents: Iterable[str] = (),
    lists: Sequence[str] = (),
    below: bool = False,
    unseen: Iterable[str] = (),
) -> None:
    """Asks, while it is remembered, for what will be read of a directory: documents, if they are
    there, in requests that nobody waits for here, of those that are `unseen` before that is known;
    lists of some directories in it, at once; and all that is `below`, in one list."""
    cache = _cache_of(directory)
    if cache is None:
        return
    wanted = [f"{directory}/{name}" for name in unseen]
    for path in (f"{directory}/{name}" for name in documents):
        found = entry(path)
        if found is not None and found.is_file and found.nbytes <= _AHEAD:
            wanted.append(path)
    for path in wanted:
        if path not in cache.documents:
            cache.documents[path] = _store(path).read(split(path)[2])
    if below:
        cache.list_below(directory)
    paths = [f"{directory}/{name}" for name in lists]
    paths = [p for p in paths if p not in cache.children and not cache.is_whole(p)]
    with concurrent.futures.ThreadPoolExecutor(_LISTS) as pool:
        cache.children.update(zip(paths, pool.map(_list_children, paths), strict=True))


def _children(path: str) -> dict[str, Entry]:
    """What is in a directory, by name."""
    cache = _cache_of(path)
    if cache is None:
        return _list_children(path)
    if path not in cache.children:
        found = entry(path) if path != cache.top else Entry("", False, True)
        is_there = found is not None and found.is_dir
        cache.children[path] = _list_children(path) if is_there else {}
    return cache.children[path]


def _list_children(path: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in _below(path, shallow=True):
        name, slash, _ = entry.path.partition("/")  # of a server that knows no delimiters
        _add(found, Entry(name, False, True) if slash else entry)
    return found


def _add(names: dict[str, Entry], entry: Entry) -> None:
    """An object may have the name of a directory."""
    other = names.get(entry.path, entry)
    if other.is_file != entry.is_file:
        entry = (other if other.is_file else entry)._replace(is_dir=True)
    names[entry.path] = entry


def _below(path: str, shallow: bool = False) -> list[Entry]:
    """The objects below a directory. If `shallow`, only the objects and the directories directly
    below it."""
    with asking(f"the list of `{path}`"):
        try:
            found = listing.below(*split(path), shallow)
        except OnlyTensorStoreError:
            return _keys_below(path, shallow)
        if shallow or all(entry.nbytes for entry in found):
            return found
        # Is an empty object `a` the object `a/` that some tools put for a directory?
        names = {entry.path for entry in _keys_below(path, shallow)}
        return [entry for entry in found if entry.path in names]


def _keys_below(path: str, shallow: bool) -> list[Entry]:
    """As TensorStore lists them: without sizes, and all of them."""
    key = split(path)[2]
    prefix = f"{key}/" if key else ""
    below = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" is after "/"
    keys = _store(path).list(below, len(prefix.encode())).result()
    names = [key.decode(errors="surrogateescape") for key in keys]
    if not shallow:
        return [Entry(name, True, False) for name in names if name and not name.endswith("/")]
    parts = dict.fromkeys(name.partition("/")[:2] for name in names if name)
    return [Entry(name, not slash, bool(slash)) for name, slash in parts]


def entry(path: str) -> Entry | None:
    """What has a name; None where nothing has."""
    cache = _cache_of(path)
    if cache is None:
        return _object(path) or _directory(path)
    if path == cache.top:
        return _directory(path) or _object(path)
    above, _, name = path.rpartition("/")
    found = _children(above).get(name)
    return found and found._replace(path="")


def _directory(path: str) -> Entry | None:
    return Entry("", False, True) if _children(path) else None


def _object(path: str) -> Entry | None:
    """An object; None where there is none."""
    scheme, bucket, key = split(path)
    if not key:
        return None
    with asking(f"`{path}`"):
        try:
            return listing.entry(scheme, bucket, key)
        except OnlyTensorStoreError:
            asked = _store(path).read(key, byte_range=slice(0, 0)).result()
            return Entry("", True, False) if asked.state == "value" else None


def names(directory: str) -> list[str]:
    """Names in a directory, in order."""
    return sorted(_children(directory))


def directories(directory: str) -> list[str]:
    """Names of directories in a directory, in order."""
    return sorted(n for n, found in _children(directory).items() if found.is_dir)


def walk(top: str) -> Iterator[Entry]:
    """All that is below a directory, each directory before what is in it, in order."""
    cache = _cache_of(top) or _Cache(top)
    cache.list_below(top)
    return cache.walk(top)


def read(path: str) -> bytes | None:
    """An object whole; None where there is none."""
    cache = _cache_of(path)
    known = {} if cache is None else cache.documents
    future = known.pop(path, None) or _store(path).read(split(path)[2])
    with asking(f"`{path}`"), listing.patience(f"`{path}`"):
        result = future.result()
    if len(result.value) <= _SMALL:
        known[path] = future
    return result.value if result.state == "value" else None


def blocks(path: str, nbytes: int) -> Iterator[bytes]:
    """What is in an object of so many bytes, which may be `UNKNOWN`. Raises StoreError where it is
    gone, or another one is in its place by the end."""
    size = nbytes
    if size == disk.UNKNOWN and (found := entry(path)):
        size = found.nbytes
    for block in [read(path)] if size <= _BLOCK else _ranges(path, size):
        if block is None:
            raise StoreError(f"`{path}` cannot be read", ["it was changed or removed meanwhile"])
        if size <= _BLOCK and nbytes not in (disk.UNKNOWN, len(block)):
            said = f"it has {len(block)} bytes, and had {nbytes} when it was listed"
            raise StoreError(f"`{path}` cannot be read", [said])
        yield block


def _ranges(path: str, nbytes: int) -> Iterator[bytes | None]:
    """So many bytes of an object, and None where it has another version than at first."""
    generations = set()
    for begin in range(0, nbytes, _BLOCK):
        part = slice(begin, min(begin + _BLOCK, nbytes))
        with asking(f"`{path}`"):
            result = _store(path).read(split(path)[2], byte_range=part).result()
        generations.add(result.stamp.generation)
        yield result.value if result.state == "value" and len(generations) == 1 else None


def versions(paths: Sequence[str]) -> list[str]:
    """A text for each object, which another version of it does not have."""
    asked = [_store(path).read(split(path)[2], byte_range=slice(0, 0)) for path in paths]
    found = []
    for path, future in zip(paths, asked, strict=True):
        with asking(f"`{path}`"):
            found.append(repr(future.result().stamp.generation))
    return found


def beginning(path: str, nbytes: int) -> bytes:
    return next(blocks(path, disk.UNKNOWN), b"")[:nbytes]


def write(path: str, data: bytes | None) -> None:
    """Writes an object, which is durable when the call returns; None deletes it, if it is there."""
    with asking(f"`{path}`", "deleted" if data is None else "written"):
        _store(path).write(split(path)[2], data).result()


def remove_file(path: str) -> None:
    """Deletes an object, if it is there."""
    write(path, None)


def remove_files(directory: str, names: Iterable[str]) -> None:
    """Deletes objects below a directory, many at once. What cannot be deleted stays."""
    store, (scheme, bucket, above) = _store(directory), split(directory)
    keys = [f"{above}/{name}" for name in names]
    for begin in range(0, len(keys), _DELETIONS):
        some = keys[begin : begin + _DELETIONS]
        if scheme == "s3" and listing.delete(bucket, some):  # gs has no such request
            continue
        for future in [store.write(key, None) for key in some]:
            with contextlib.suppress(ValueError):
                future.result()


def create(path: str, data: bytes) -> bool:
    """Creates an object if it is absent; False where it was not, or the answer was lost."""
    scheme, bucket, key = split(path)
    with asking(f"`{path}`", "written"):
        # Where TensorStore asks first whether it is there, obstore does not.
        with contextlib.suppress(OnlyTensorStoreError):
            if scheme == "s3":
                return listing.create(bucket, key, data)
        return bool(_store(path).write(key, data, if_equal=_absent()).result().generation)


@functools.cache
def _absent() -> bytes:
    """The generation of what is not there."""
    return ts.KvStore.open("memory://").result().read("x").result().stamp.generation
