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
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorstore as ts

from reshard.errors import ReshardError, StoreError, first_line
from reshard.storage import listing, posix
from reshard.storage.posix import AnyPath, Entry

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
_STATUS = re.compile(r"http_response_code='(\d+)'")
# Where TensorStore says what it has read, and what it says of a connection.
_PLACE = re.compile(r"Error reading (?:\"(.+?)\"|((?:gs|s3)://.+?))(?=:? |:$)")
_BROKEN = re.compile(r"CURL error (.*?)(?: \[|$)", re.DOTALL)
_MEANINGS = {
    "400": "it does not take such a request: is it the right region, or endpoint?",
    "401": "the credentials are not known there",
    "403": "there are no credentials that allow it",
    "404": "there is no such bucket or object",
    "412": "it has changed meanwhile",
    "429": "too many requests, also after retries",
    "500": "the store failed, also after retries",
    "503": "the store was not available, also after retries",
}
# What TensorStore says where it does not tell the status.
_UNTOLD = {
    "Forbidden": "403",
    "Unauthorized": "401",
    "Too Many Requests": "429",
    "Service Unavailable": "503",
    "Internal Server Error": "500",
}


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


def refusal(error: ValueError, what: str, done: str = "read") -> StoreError | None:
    """What a store has said to a request, in words; None for an error that no store has made."""
    text = str(error)
    status, broken = _STATUS.search(text), _BROKEN.search(text)
    code = status[1] if status else next((_UNTOLD[said] for said in _UNTOLD if said in text), "")
    if code:
        reason = f"{code}: {_MEANINGS.get(code, first_line(error))}"
    elif broken is not None:
        reason = f"the connection failed, also after retries: {broken[1]}"
    elif "credentials" in text:
        reason = first_line(error)
    else:
        return None
    place = _PLACE.search(text)
    read = f"{place[1] or place[2]}: " if place is not None else ""
    return StoreError(f"{what} cannot be {done}", [read + reason])


@contextlib.contextmanager
def _asking(what: str, done: str = "read") -> Iterator[None]:
    """Raises StoreError where a store refuses, about `what`."""
    try:
        yield
    except ReshardError:  # of what the environment says
        raise
    except ValueError as error:
        found = refusal(error, what, done)
        if found is None:
            found = StoreError(f"{what} cannot be {done}", [first_line(error)])
        raise found from error


class _Known(NamedTuple):
    """What has been found below a directory, while nobody needs to know of changes: what is in
    directories, of which some are known with all that is below them, and documents, of which some
    are on the way."""

    top: str
    children: "dict[str, dict[str, Entry]]"
    whole: set[str]
    documents: dict[str, bytes | None]
    coming: dict[str, ts.Future]

    def is_whole(self, path: str) -> bool:
        """Whether all that is below a directory is known."""
        return any(f"{path}/".startswith(f"{top}/") for top in self.whole)

    def add(self, top: str, found: Iterable[Entry]) -> None:
        """Notes all that is below a directory."""
        self.children[top] = {}
        for entry in found:
            *above, name = entry.path.split("/")
            folder = top
            for part in above:
                names = self.children[folder]
                if part not in names or not names[part].is_dir:
                    names[part] = _also(names.get(part), _directory(part))
                folder = f"{folder}/{part}"
                self.children.setdefault(folder, {})
            names = self.children[folder]
            names[name] = _also(names.get(name), entry._replace(path=name))
        self.whole.add(top)


def _nothing_known(top: str) -> _Known:
    return _Known(top, {}, set(), {}, {})


_known: contextvars.ContextVar[_Known | None] = contextvars.ContextVar("known", default=None)


@contextlib.contextmanager
def remembered(top: AnyPath) -> Iterator[None]:
    """While it lasts, of what is below a directory each directory is listed once, and not asked for
    its files one by one; and each small document is read once."""
    if _remembered(os.fspath(top)) is not None:
        yield
        return
    token = _known.set(_nothing_known(os.fspath(top)))
    try:
        yield
    finally:
        _known.reset(token)


def ahead(
    directory: AnyPath,
    documents: Iterable[str] = (),
    lists: Sequence[str] = (),
    below: bool = False,
) -> None:
    """Asks, while it is remembered, for what will be read of a directory: documents, if they are
    there, in requests that nobody waits for here; lists of some directories in it, at once; and all
    that is `below`, in one list."""
    text = os.fspath(directory)
    known = _remembered(text)
    if known is None:
        return
    for name in documents:
        path = f"{text}/{name}"
        found = entry(path)
        there = found is not None and found.is_file and found.nbytes <= _AHEAD
        if there and path not in known.documents and path not in known.coming:
            known.coming[path] = _store(path).read(split(path)[2])
    if below:
        _know_whole(text, known)
    paths = [f"{text}/{name}".rstrip("/") for name in lists]
    paths = [p for p in paths if p not in known.children and not known.is_whole(p)]
    with concurrent.futures.ThreadPoolExecutor(_LISTS) as pool:
        known.children.update(zip(paths, pool.map(_list_children, paths), strict=True))


def _know_whole(path: str, known: _Known) -> None:
    if not known.is_whole(path):
        known.add(path, _below(path))


def _remembered(path: str) -> _Known | None:
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
        known.children[text] = {} if known.is_whole(text) else _list_children(text)
    return known.children[text]


def _list_children(path: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in _below(path, delimiter="/"):
        name, slash, _ = entry.path.partition("/")  # of a server that knows no delimiters
        found[name] = _also(found.get(name), _directory(name) if slash else entry)
    return found


def _also(one: Entry | None, other: Entry) -> Entry:
    """What has a name that both have: an object may have the name of a directory."""
    if one is None or one.is_file == other.is_file:
        return other
    return (one if one.is_file else other)._replace(is_dir=True)


def _below(path: str, delimiter: str = "", most: int = _PAGE) -> Iterator[Entry]:
    """The objects below a directory, and, with a delimiter, the directories in it."""
    scheme, bucket, key = split(path)
    prefix = f"{key}/" if key else ""
    with _asking(f"the list of `{path}`"):
        pages = listing.pages(scheme, bucket, prefix, delimiter, most, _context())
        if pages is None:
            yield from _keys_below(path, prefix, delimiter)
            return
        for page in pages:
            for one in page.objects:
                name = one.key[len(prefix) :]
                if name and not name.endswith("/"):  # what some tools put for a directory
                    yield _file(name, one.nbytes, one.version)
            for one in page.prefixes:
                yield _directory(one[len(prefix) : -1])


def _keys_below(path: str, prefix: str, delimiter: str) -> Iterator[Entry]:
    """As TensorStore lists them: without sizes, and all of them."""
    below = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" is after "/"
    keys = _store(path).list(below, len(prefix.encode())).result()
    names = [key.decode(errors="surrogateescape") for key in keys]
    if not delimiter:
        yield from (_file(name) for name in names if name and not name.endswith("/"))
        return
    parts = dict.fromkeys(name.partition("/")[:2] for name in names if name)
    yield from (_directory(name) if slash else _file(name) for name, slash in parts)


def _file(name: str, nbytes: int = posix.UNKNOWN, version: int = posix.UNKNOWN) -> Entry:
    return Entry(name, True, False, nbytes, version, (-1, -1), 1, nbytes)


def _directory(name: str) -> Entry:
    return Entry(name, False, True, 0, 0, (-1, -1), 1, 0)


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
    return _directory("") if below else None


def _object(path: str) -> Entry | None:
    """An object; None where there is none."""
    scheme, bucket, key = split(path)
    if not key:
        return None
    with _asking(f"`{path}`"):
        pages = listing.pages(scheme, bucket, key, "/", 1, _context())
        if pages is None:
            asked = _store(path).read(key, byte_range=slice(0, 0)).result()
            return _file("") if asked.state == "value" else None
        # A page may be empty, and not the last.
        objects = next((page.objects for page in pages if page.objects or page.prefixes), [])
    return _file("", *objects[0][1:]) if objects and objects[0].key == key else None


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
    known = _remembered(text) or _nothing_known(text)
    _know_whole(text, known)
    yield from _walk_known(text, "", known)


def _walk_known(top: str, below: str, known: _Known) -> Iterator[Entry]:
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
    with _asking(f"`{text}`"):
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
        with _asking(f"`{text}`"):
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
        with _asking(f"`{os.fspath(path)}`"):
            found.append(repr(future.result().stamp.generation))
    return found


def beginning(path: AnyPath, nbytes: int) -> bytes:
    found = entry(path)
    size = nbytes if found is None or found.nbytes == posix.UNKNOWN else min(nbytes, found.nbytes)
    with _asking(f"`{os.fspath(path)}`"):
        return _store(path).read(split(path)[2], byte_range=slice(0, size)).result().value


def write(path: AnyPath, data: bytes, durable: bool = False) -> None:
    """Writes an object, which is durable when the call returns."""
    with _asking(f"`{os.fspath(path)}`", "written"):
        _store(path).write(split(path)[2], data).result()


def make_directories(path: AnyPath) -> None:
    """Nothing: a directory is there once something is in it."""


def remove_file(path: AnyPath) -> None:
    """Deletes an object, if it is there."""
    with _asking(f"`{os.fspath(path)}`", "deleted"):
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
        with _asking(f"`{self._path}`"):
            self._last = _store(self._path).read(split(self._path)[2]).result()
        return self._last

    def _write(self, generation: bytes, data: bytes | None) -> bool:
        with _asking(f"`{self._path}`", "written"):
            write = _store(self._path).write(split(self._path)[2], data, if_equal=generation)
            done = write.result().generation
        if not done and data is not None:  # or it was, and the answer was lost
            found = self._read()
            done = found.stamp.generation if found.value == data else b""
        self._generation = done or self._generation
        return bool(done)
