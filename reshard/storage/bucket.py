"""Objects of buckets on gs and s3, with the functions that `posix` has for files.

A directory is what the keys of objects have before a slash: it is there as long as anything is
below it. All requests go through TensorStore, which finds the credentials.
"""

import concurrent.futures
import contextlib
import contextvars
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorstore as ts

from reshard.errors import StoreError
from reshard.storage import listing, posix
from reshard.storage.known import Known, directory_entry, file_entry, joined, nothing_known
from reshard.storage.posix import AnyPath, Entry
from reshard.storage.refusals import asking

# Requests at once, unless said otherwise.
REQUESTS = 128
# How often one is tried again, after about so long: 429, 503, and connections that end.
RETRIES = {"max_retries": 5, "initial_delay": "300ms", "max_delay": "5s"}
# Names that one request lists.
_PAGE = 1000
# Objects that are deleted at once.
_DELETIONS = 100
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
    drivers = ("gcs", "s3", "http")
    limits: dict[str, Any] = {
        f"{name}_request_concurrency": {"limit": concurrency} for name in drivers
    }
    return limits | {f"{name}_request_retries": RETRIES for name in drivers}


@functools.cache
def _context() -> ts.Context:
    return ts.Context(resources())


def split(path: AnyPath) -> tuple[str, str, str]:
    """`gs` or `s3`, the bucket, and the key."""
    text = os.fspath(path)
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    return scheme, bucket, key


def spec(path: AnyPath) -> dict[str, Any]:
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
    credentials, config = listing.s3_files()
    # TensorStore's own search logs an error for each place in which it finds nothing.
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        found["aws_credentials"] = {"type": "environment"}
    elif posix.is_file(credentials):
        found["aws_credentials"] = {
            "type": "profile",
            "profile": listing.s3_profile(),
            "credentials_file": credentials,
            "config_file": config if posix.is_file(config) else credentials,
        }
    return found


def _store(path: AnyPath) -> ts.KvStore:
    """The key-value store of a whole bucket."""
    scheme, bucket, _ = split(path)
    return _opened(json.dumps(spec(f"{scheme}://{bucket}")))


@functools.lru_cache(maxsize=64)
def _opened(text: str) -> ts.KvStore:
    return ts.KvStore.open(json.loads(text), context=_context()).result()


_known: contextvars.ContextVar[Known | None] = contextvars.ContextVar("known", default=None)


def at_once(*asked: Callable[[], Any]) -> list[Any]:
    """What functions return that ask a bucket, which they do at once, each as if nothing were
    remembered; raises the first error, in their order."""
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(ask) for ask in asked]
    return [future.result() for future in futures]


@contextlib.contextmanager
def remembered(top: AnyPath) -> Iterator[None]:
    """While it lasts, of what is below a directory each directory is listed once, and not asked for
    its files one by one; and each small document is read once."""
    if _remembered(os.fspath(top)) is not None:
        yield
        return
    token = _known.set(nothing_known(os.fspath(top)))
    try:
        yield
    finally:
        _known.reset(token)


def ahead(
    directory: AnyPath,
    documents: Iterable[str] = (),
    lists: Sequence[str] = (),
    below: bool = False,
    unseen: Iterable[str] = (),
) -> None:
    """Asks, while it is remembered, for what will be read of a directory: documents, if they are
    there, in requests that nobody waits for here, of those that are `unseen` before that is known;
    lists of some directories in it, at once; and all that is `below`, in one list."""
    text = os.fspath(directory)
    known = _remembered(text)
    if known is None:
        return
    wanted = [f"{text}/{name}" for name in unseen]
    for name in documents:
        path = f"{text}/{name}"
        found = entry(path)
        if found is not None and found.is_file and found.nbytes <= _AHEAD:
            wanted.append(path)
    for path in wanted:
        if path not in known.documents and path not in known.coming:
            known.coming[path] = _store(path).read(split(path)[2])
    if below:
        _know_whole(text, known)
    paths = [f"{text}/{name}".rstrip("/") for name in lists]
    paths = [p for p in paths if p not in known.children and not known.is_whole(p)]
    with concurrent.futures.ThreadPoolExecutor(_LISTS) as pool:
        known.children.update(zip(paths, pool.map(_list_children, paths), strict=True))


def _know_whole(path: str, known: Known) -> None:
    if not known.is_whole(path):
        known.add(path, _below(path))


def _remembered(path: str) -> Known | None:
    """What is known, if that is of a path."""
    known = _known.get()
    return known if known is not None and f"{path}/".startswith(f"{known.top}/") else None


def _children(path: AnyPath) -> dict[str, Entry]:
    """What is in a directory, by name."""
    text = os.fspath(path)
    known = _remembered(text)
    if known is None:
        return _list_children(text)
    if text not in known.children:
        nothing = known.is_whole(text) or known.is_gone(text)
        known.children[text] = {} if nothing else _list_children(text)
    return known.children[text]


def _list_children(path: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in _below(path, delimiter="/"):
        name, slash, _ = entry.path.partition("/")  # of a server that knows no delimiters
        found[name] = joined(found.get(name), directory_entry(name) if slash else entry)
    return found


def _below(path: str, delimiter: str = "", most: int = _PAGE) -> Iterator[Entry]:
    """The objects below a directory, and, with a delimiter, the directories in it."""
    scheme, bucket, key = split(path)
    prefix = f"{key}/" if key else ""
    with asking(f"the list of `{path}`"):
        pages = listing.pages(scheme, bucket, prefix, delimiter, most, _context())
        if pages is None:
            yield from _keys_below(path, prefix, delimiter)
            return
        for page in pages:
            for one in page.objects:
                name = one.key[len(prefix) :]
                if name and not name.endswith("/"):  # what some tools put for a directory
                    yield file_entry(name, one.nbytes, one.version)
            for one in page.prefixes:
                yield directory_entry(one[len(prefix) : -1])


def _keys_below(path: str, prefix: str, delimiter: str) -> Iterator[Entry]:
    """As TensorStore lists them: without sizes, and all of them."""
    below = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" is after "/"
    keys = _store(path).list(below, len(prefix.encode())).result()
    names = [key.decode(errors="surrogateescape") for key in keys]
    if not delimiter:
        yield from (file_entry(name) for name in names if name and not name.endswith("/"))
        return
    parts = dict.fromkeys(name.partition("/")[:2] for name in names if name)
    yield from (directory_entry(name) if slash else file_entry(name) for name, slash in parts)


def entry(path: AnyPath) -> Entry | None:
    """What has a name; None where nothing has."""
    text = os.fspath(path)
    known = _remembered(text)
    if known is not None and text != known.top:
        above, _, name = text.rpartition("/")
        found = _children(above).get(name)
        return found and found._replace(path="")
    below = known is not None and _children(text)
    if not below and (found := _object(text)):
        return found
    if not below and known is None:
        below = next(_below(text, most=1), None)
    return directory_entry("") if below else None


def _object(path: str) -> Entry | None:
    """An object; None where there is none."""
    scheme, bucket, key = split(path)
    if not key:
        return None
    with asking(f"`{path}`"):
        pages = listing.pages(scheme, bucket, key, "/", 1, _context())
        if pages is None:
            asked = _store(path).read(key, byte_range=slice(0, 0)).result()
            return file_entry("") if asked.state == "value" else None
        # A page may be empty, and not the last.
        objects = next((page.objects for page in pages if page.objects or page.prefixes), [])
    return file_entry("", *objects[0][1:]) if objects and objects[0].key == key else None


def exists(path: AnyPath) -> bool:
    return entry(path) is not None


def is_file(path: AnyPath) -> bool:
    text = os.fspath(path)
    found = _object(text) if _remembered(text) is None else entry(text)
    return found is not None and found.is_file


def is_dir(path: AnyPath) -> bool:
    found = entry(path)
    return found is not None and found.is_dir


def is_symlink(path: AnyPath) -> bool:
    return False


def names(directory: AnyPath) -> list[str]:
    """Names in a directory, in order."""
    return sorted(_children(directory))


def directories(directory: AnyPath) -> list[str]:
    """Names of directories in a directory, in order."""
    return sorted(name for name, found in _children(directory).items() if found.is_dir)


def walk(top: AnyPath) -> Iterator[Entry]:
    """All that is below a directory, each directory before what is in it, in order."""
    text = os.fspath(top)
    known = _remembered(text) or nothing_known(text)
    _know_whole(text, known)
    yield from _walk_known(text, "", known)


def _walk_known(top: str, below: str, known: Known) -> Iterator[Entry]:
    for name, found in sorted(known.children.get(f"{top}/{below}".rstrip("/"), {}).items()):
        yield found._replace(path=below + name)
        if found.is_dir:
            yield from _walk_known(top, f"{below}{name}/", known)


def read(path: AnyPath) -> bytes | None:
    """An object whole; None where there is none."""
    text = os.fspath(path)
    known = _remembered(text)
    if known is not None and text in known.documents:
        return known.documents[text]
    begun = None if known is None else known.coming.pop(text, None)
    with asking(f"`{text}`"):
        result = listing.waited(begun or _store(text).read(split(text)[2]), f"`{text}`")
    data = result.value if result.state == "value" else None
    if known is not None and len(data or b"") <= _SMALL:
        known.documents[text] = data
    return data


def blocks(path: AnyPath, nbytes: int) -> Iterator[bytes]:
    """What is in an object of so many bytes, which may be `UNKNOWN`. Raises StoreError where it is
    gone, or another one is in its place by the end."""
    text, key, store, first = os.fspath(path), split(path)[2], _store(path), None
    if nbytes == posix.UNKNOWN:
        found = entry(text)
        nbytes = nbytes if found is None else found.nbytes
    whole = nbytes <= _BLOCK
    if whole and _remembered(text) is not None:
        data = read(text)
        if data is None:
            raise StoreError(f"`{text}` cannot be read", ["it was changed or removed meanwhile"])
        yield data
        return
    for begin in [0] if whole else range(0, nbytes, _BLOCK):
        part = None if whole else slice(begin, min(begin + _BLOCK, nbytes))
        with asking(f"`{text}`"):
            result = store.read(key, byte_range=part).result()
        first = first or result.stamp.generation
        if result.state != "value" or first != result.stamp.generation:
            raise StoreError(f"`{text}` cannot be read", ["it was changed or removed meanwhile"])
        yield result.value


def versions(paths: Sequence[AnyPath]) -> list[str]:
    """A text for each object, which another version of it does not have."""
    asked = [_store(path).read(split(path)[2], byte_range=slice(0, 0)) for path in paths]
    found = []
    for path, future in zip(paths, asked, strict=True):
        with asking(f"`{os.fspath(path)}`"):
            found.append(repr(future.result().stamp.generation))
    return found


def beginning(path: AnyPath, nbytes: int) -> bytes:
    found = entry(path)
    size = nbytes if found is None or found.nbytes == posix.UNKNOWN else min(nbytes, found.nbytes)
    with asking(f"`{os.fspath(path)}`"):
        return _store(path).read(split(path)[2], byte_range=slice(0, size)).result().value


def write(path: AnyPath, data: bytes, durable: bool = False) -> None:
    """Writes an object, which is durable when the call returns."""
    with asking(f"`{os.fspath(path)}`", "written"):
        _store(path).write(split(path)[2], data).result()


def make_directories(path: AnyPath) -> None:
    """Nothing: a directory is there once something is in it."""


def remove_file(path: AnyPath) -> None:
    """Deletes an object, if it is there."""
    with asking(f"`{os.fspath(path)}`", "deleted"):
        _store(path).write(split(path)[2], None).result()


def remove_files(
    directory: AnyPath, names: Iterable[str], check: Callable[[], None] = lambda: None
) -> list[str]:
    """Deletes objects below a directory, many at once; those that could not be deleted. Before it
    goes on with some, it `check`s whether it may."""
    store, above = _store(directory), split(directory)[2]
    left = []
    every = list(names)
    for begin in range(0, len(every), _DELETIONS):
        check()
        some = every[begin : begin + _DELETIONS]
        for name, future in [(name, store.write(f"{above}/{name}", None)) for name in some]:
            try:
                future.result()
            except ValueError:
                left.append(name)
    return left


class LockFile:
    """What `posix.LockFile` is on a disk, in conditional writes: an object is replaced or removed
    only if its generation is the one that was read."""

    def __init__(self, path: AnyPath):
        self._path = os.fspath(path)
        self._generation = b""
        self._last: ts.KvStore.ReadResult | None = None

    def create(self, data: bytes) -> bool:
        """Creates the object, which is then one's own; False where there is one."""
        found = self._read()
        return found.state != "value" and self._write(found.stamp.generation, data)

    def write(self, data: bytes) -> bool:
        """Replaces the object, if it is what one has written last; whether it was."""
        return self._write(self._generation, data)

    def read(self) -> bytes | None:
        """Its content; None where there is none."""
        found = self._read()
        return found.value if found.state == "value" else None

    def take(self, seen: bytes, data: bytes) -> bool:
        """Replaces the object if its content is what was read; whether it is one's own then."""
        found = self._read()
        return found.value == seen and self._write(found.stamp.generation, data)

    def remove(self, seen: bytes) -> None:
        """Removes the object if its content is what was read."""
        found = self._last if self._last is not None else self._read()
        if found.value == seen:
            self._write(found.stamp.generation, None)

    def close(self) -> None:
        """Nothing: no object is open."""

    def _read(self) -> ts.KvStore.ReadResult:
        with asking(f"`{self._path}`"):
            self._last = _store(self._path).read(split(self._path)[2]).result()
        return self._last

    def _write(self, generation: bytes, data: bytes | None) -> bool:
        with asking(f"`{self._path}`", "written"):
            write = _store(self._path).write(split(self._path)[2], data, if_equal=generation)
            done = write.result().generation
        if not done and data is not None:  # or it was, and the answer was lost
            found = self._read()
            done = found.stamp.generation if found.value == data else b""
        self._generation = done or self._generation
        return bool(done)
