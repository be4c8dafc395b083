"""Objects of buckets on gs and s3, with the interface of a disk's files.

A directory is the part of an object's key before a slash. It exists as long as an object is below
it. TensorStore reads and writes objects. It lists all keys below a prefix, without sizes: to find
the steps of a training, a billion chunks. So obstore lists objects, with the credentials of the
environment, or those that an installed `boto3` or `google-auth` finds.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import tensorstore as ts

from reshard.errors import CheckpointFormatError, CorruptCheckpointError, StoreError
from reshard.storage.disk import UNKNOWN, Entry, Location, is_file
from reshard.storage.store_errors import status, translated_errors

# Requests at once, by default.
REQUESTS = 128
# Retries of failed requests, and the delays between them: 429, 503, broken connections.
RETRIES: dict[str, Any] = {"max_retries": 5, "initial_delay": "300ms", "max_delay": "5000ms"}
# The longest time that a request may take.
_ANSWER = "30s"
# Seconds without an answer until a warning is logged.
_PATIENCE = 1.8
# The answer to a request to create an object that exists.
_EXISTS = object()
_log = logging.getLogger("reshard")
_importing = threading.Lock()
# Statuses for unknown credentials, and for a signature for another region.
_UNKNOWN, _OTHER_REGION = {"401", "403"}, {"301", "307", "400"}
# Prefixes of the environment variables that configure requests.
_VARIABLES = ("AWS_", "GOOGLE_", "TENSORSTORE_GCS_", "HOME")
# Bytes of a document whose contents are cached, and of one that is read before it is needed.
_SMALL, _PREFETCHED = 1 << 16, 1 << 26
# Directories that are listed at once.
_LISTS = 32
# Bytes of an object that are read at once.
_BLOCK = 1 << 24
# Bytes of a part of an upload, the most parts, and the parts that are sent at once.
_PART, _PARTS, _AT_ONCE = 8 << 20, 5000, 4
# The longest time for a copy on the server, which answers when gigabytes are copied.
_COPIED = "3600s"


class OnlyTensorStoreError(Exception):
    """obstore cannot answer: it has no credentials, or does not support the name of an object."""


def _obstore() -> Any:
    """The library. Only one thread imports it: its modules import each other, and a second thread
    would see a part of them."""
    with _importing:
        import obstore
        import obstore.exceptions
        import obstore.store
    return obstore


def resources(concurrency: int = REQUESTS) -> dict[str, Any]:
    """TensorStore's context resources for requests: how many at once, and the retries of each."""
    each = {"concurrency": {"limit": concurrency}, "retries": RETRIES}
    drivers = ("gcs", "s3", "http")
    return {f"{name}_request_{what}": limit for name in drivers for what, limit in each.items()}


@functools.lru_cache(maxsize=64)
def _opened(text: str) -> ts.KvStore:
    return ts.KvStore.open(json.loads(text), context=ts.Context(resources())).result()


@functools.cache
def _absent() -> bytes:
    """The generation of an object that does not exist."""
    return ts.KvStore.open("memory://").result().read("x").result().stamp.generation


@dataclasses.dataclass(frozen=True)
class ListingCache:
    """Listings and documents below a directory, while nothing there is expected to change.

    Attributes:
      top: the directory.
      children: directory -> its entries, by name.
      complete: directories for which `children` has everything below them.
      documents: object -> its read: one in progress, or a finished one of a small object.
    """

    top: str
    children: dict[str, dict[str, Entry]] = dataclasses.field(default_factory=dict)
    complete: set[str] = dataclasses.field(default_factory=set)
    documents: dict[str, ts.Future] = dataclasses.field(default_factory=dict)

    def list_below(self, top: "BucketLocation") -> None:
        """Lists everything below a directory, unless that is cached."""
        if not any(f"{top}/".startswith(f"{listed}/") for listed in self.complete):
            self.add(top.path, top._below())
            self.complete.add(top.path)

    def add(self, top: str, entries: Iterable[Entry]) -> None:
        """Adds a list of a directory. Documents may have been read since an earlier list, so what
        that says of them counts."""
        known = self.children.get(top, {})
        self.children[top] = {}
        for entry in entries:
            *above, name = entry.path.split("/")
            folder = top
            for part in above:
                _add(self.children[folder], Entry(part, False, True))
                folder = f"{folder}/{part}"
                self.children.setdefault(folder, {})
            entry = entry._replace(path=name)
            _add(self.children[folder], known.get(name, entry) if not above else entry)

    def walk(self, top: str, below: str = "") -> Iterator[Entry]:
        """All cached entries below a directory."""
        children = self.children.get(f"{top}/{below}".removesuffix("/"), {})
        for name, entry in sorted(children.items()):
            yield entry._replace(path=below + name)
            if entry.is_dir:
                yield from self.walk(top, f"{below}{name}/")


_current_cache = contextvars.ContextVar[ListingCache | None]("cache", default=None)


def _add(names: dict[str, Entry], entry: Entry) -> None:
    """Adds an entry. An object may have the name of a directory."""
    other = names.get(entry.path, entry)
    if other.is_file != entry.is_file:
        entry = (other if other.is_file else entry)._replace(is_dir=True)
    names[entry.path] = entry


def _entry(meta: Any, begin: int) -> Entry:
    """An object that obstore describes."""
    # The answers to a list and to a single request differ in quotation marks and fractions.
    version = f"{(meta['e_tag'] or '').strip(chr(34))} {int(meta['last_modified'].timestamp())}"
    return Entry(meta["path"][begin:], True, False, meta["size"], version)


class BucketLocation(Location):
    """An object, or a prefix of the keys of objects."""

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
        driver = {"driver": "gcs"} if scheme == "gs" else {"driver": "s3"} | s3_options()
        return driver | {"bucket": bucket, "path": f"{key}/" if key else ""}

    @property
    def _store(self) -> ts.KvStore:
        """The key-value store of the whole bucket."""
        return _opened(json.dumps(self.spec | {"path": ""}))

    # Listing.

    @property
    def _cache(self) -> ListingCache | None:
        """The cache that this location is in, if any."""
        cache = _current_cache.get()
        return cache if cache is not None and f"{self}/".startswith(f"{cache.top}/") else None

    @contextlib.contextmanager
    def cached_listing(self) -> Iterator[None]:
        token = _current_cache.set(self._cache or ListingCache(self.path))
        try:
            yield
        finally:
            _current_cache.reset(token)

    def prefetch(
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
        for document in (self / name for name in documents):
            entry = document.entry()
            if entry is not None and entry.is_file and entry.nbytes <= _PREFETCHED:
                wanted.append(document)
        for document in wanted:
            if document.path not in cache.documents:
                cache.documents[document.path] = self._store.read(document._key)
        if below:
            cache.list_below(self)
        tops = [top for name in lists if (top := self / name).path not in cache.children]
        with concurrent.futures.ThreadPoolExecutor(_LISTS) as pool:
            for top, children in zip(tops, pool.map(type(self)._list_children, tops), strict=True):
                cache.children[top.path] = children

    def _children(self) -> dict[str, Entry]:
        """The entries of a directory, by name."""
        cache = self._cache
        if cache is None:
            return self._list_children()
        if self.path not in cache.children:
            entry = self.entry() if self.path != cache.top else Entry("", False, True)
            is_dir = entry is not None and entry.is_dir
            cache.children[self.path] = self._list_children() if is_dir else {}
        return cache.children[self.path]

    def _list_children(self) -> dict[str, Entry]:
        listed = ListingCache(self.path)
        listed.add(self.path, self._below(shallow=True))
        return listed.children[self.path]

    def _ask(self, request: Callable[[Any, Any], Any], timeout: str = _ANSWER) -> Any:
        """The answer, or `_EXISTS`. A request is a function of `obstore` and a store."""
        obstore = _obstore()
        for tries_left in reversed(range(RETRIES["max_retries"] + 1)):
            store = _store(*self._parts[:2], timeout)
            try:
                with patience(f"`{self}`"):
                    return request(obstore, store)
            except obstore.exceptions.AlreadyExistsError:
                return _EXISTS
            except (obstore.exceptions.InvalidPathError, ValueError) as error:
                raise OnlyTensorStoreError from error
            except obstore.exceptions.BaseError as error:
                text = str(error)
                if "response body" in text and tries_left:  # obstore retries all others
                    continue
                code = status(text) or ("301" if "redirect" in text else "")
                if code in _OTHER_REGION or (code in _UNKNOWN and "skip_signature" in store.config):
                    raise OnlyTensorStoreError from error
                raise ValueError(text) from error
        raise AssertionError

    def _below(self, shallow: bool = False) -> list[Entry]:
        """All objects below a directory, or if `shallow`, the entries directly below it."""
        key, prefixes = self._key, []
        with translated_errors(f"the list of `{self}`"):
            try:
                if shallow:
                    answer = self._ask(lambda obs, store: obs.list_with_delimiter(store, key))
                    objects, prefixes = answer["objects"], answer["common_prefixes"]
                else:
                    objects = self._ask(lambda obs, store: obs.list(store, key).collect())
            except OnlyTensorStoreError:
                return self._list_keys()
            begin = len(key) + 1 if key else 0
            entries = [Entry(path[begin:], False, True) for path in prefixes]
            entries += [_entry(meta, begin) for meta in objects if meta["path"] != key]
            if shallow or all(entry.nbytes for entry in entries):
                return entries
            # Is an empty object `a` the object `a/` that some tools make for a directory?
            names = {entry.path for entry in self._list_keys()}
            return [entry for entry in entries if entry.path in names]

    def _list_keys(self) -> list[Entry]:
        """All objects below a directory by TensorStore, which lists all keys, without sizes."""
        prefix = f"{self._key}/" if self._key else ""
        below = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" is after "/"
        keys = self._store.list(below, len(prefix.encode())).result()
        names = [key.decode(errors="surrogateescape") for key in keys]
        return [Entry(name, True, False) for name in names if name and not name.endswith("/")]

    def entry(self, follow: bool = False) -> Entry | None:
        cache = self._cache
        if cache is None:
            return self._object() or self._directory()
        if self.path == cache.top:
            return self._directory() or self._object()
        entry = self.parent._children().get(self.name)
        return entry and entry._replace(path="")

    def _directory(self) -> Entry | None:
        return Entry("", False, True) if self._children() else None

    def _object(self) -> Entry | None:
        """The object of this key, or None."""
        if not self._key:
            return None
        with translated_errors(f"`{self}`"):
            try:
                meta = self._ask(lambda obs, store: obs.head(store, self._key))
                return _entry(meta, len(self._key))
            except FileNotFoundError:
                return None
            except OnlyTensorStoreError:
                read = self._store.read(self._key, byte_range=slice(0, 0)).result()
                return Entry("", True, False) if read.state == "value" else None

    def names(self) -> list[str]:
        return sorted(self._children())

    def directories(self) -> list[str]:
        return sorted(name for name, entry in self._children().items() if entry.is_dir)

    def entries(self) -> list[Entry]:
        return [*self._children().values()]

    def walk(self, inner: bool = False) -> Iterator[Entry]:
        cache = self._cache or ListingCache(self.path)
        cache.list_below(self)
        return cache.walk(self.path)

    def look(self, files: Iterable[str]) -> dict[str, Entry]:
        files, found = [*files], {}
        if files == [""]:  # it is an object itself
            found = {"": entry} if (entry := self.entry()) else {}
        elif files:
            ends = zip(*(file.split("/")[:-1] for file in (min(files), max(files))), strict=False)
            same = itertools.takewhile(lambda names: names[0] == names[1], ends)
            folder = "".join(f"{name}/" for name, _ in same)
            listed = {folder + entry.path: entry for entry in (self / folder).walk()}
            found = {file: listed[file] for file in files if file in listed}
        unknown = [file for file, entry in found.items() if entry.modified == UNKNOWN]
        reads = [self._store.read((self / f)._key, byte_range=slice(0, 0)) for f in unknown]
        for file, read in zip(unknown, reads, strict=True):
            with translated_errors(f"`{self / file}`"):
                version = repr(read.result().stamp.generation)
            found[file] = found[file]._replace(modified=version)
        return found

    # Reading.

    def read_whole(self) -> bytes | None:
        cache = self._cache
        documents = {} if cache is None else cache.documents
        read = documents.pop(self.path, None) or self._store.read(self._key)
        with translated_errors(f"`{self}`"), patience(f"`{self}`"):
            result = read.result()
        if len(result.value) <= _SMALL:
            documents[self.path] = read
        return result.value if result.state == "value" else None

    def blocks(self, nbytes: int = UNKNOWN) -> Generator[bytes, None, None]:
        size, generations = nbytes, set()
        if size == UNKNOWN and (entry := self.entry()):
            size = entry.nbytes
        for begin in range(0, max(size, 1), _BLOCK):
            if size <= _BLOCK:
                block = self.read_whole()
            else:
                part = slice(begin, min(begin + _BLOCK, size))
                with translated_errors(f"`{self}`"):
                    result = self._store.read(self._key, byte_range=part).result()
                generations.add(result.stamp.generation)
                block = result.value if result.state == "value" else None
            changed = size <= _BLOCK and block is not None and nbytes not in (UNKNOWN, len(block))
            if block is None or changed or len(generations) > 1:
                reason = "it changed or was removed while it was read"
                raise StoreError(f"`{self}` cannot be read", [reason])
            yield block

    def part(self, begin: int, end: int) -> bytes:
        read = self._store.read(self._key, byte_range=slice(begin, end))
        with translated_errors(f"`{self}`", other=CorruptCheckpointError):
            return read.result().value

    # Writing.

    def write(self, data: bytes | Iterable[bytes]) -> None:
        data = data if isinstance(data, bytes) else b"".join(data)
        with translated_errors(f"`{self}`", "written"):
            self._store.write(self._key, data).result()

    def replace(self, data: bytes, temporary: str) -> None:
        self.write(data)

    def create(self, data: bytes) -> bool:
        scheme, _, key = self._parts
        with translated_errors(f"`{self}`", "written"):
            if scheme == "s3":  # TensorStore sends another request first, and obstore does not
                with contextlib.suppress(OnlyTensorStoreError):
                    put = self._ask(lambda obs, store: obs.put(store, key, data, mode="create"))
                    return put is not _EXISTS
            return bool(self._store.write(key, data, if_equal=_absent()).result().generation)

    def upload(self, file: Location) -> None:
        """Writes a file of a disk as an object, however large, in parts: with all of its bytes or
        not at all."""
        part = max(_PART, (file.file_bytes() or 0) // _PARTS)
        options = {"chunk_size": part, "max_concurrency": _AT_ONCE}
        self._write_large(lambda obs, store: obs.put(store, self._key, file, **options))

    def copy_on_server(self, new: "BucketLocation") -> bool:
        """Gives an object a second name in its bucket. On gs, returns False if something has that
        name, perhaps by an earlier try of this request. Raises StoreError if there is no object."""
        replaces = self._parts[0] == "s3"
        one, other = self._key, new._key
        try:
            return new._write_large(
                lambda obs, store: obs.copy(store, one, other, overwrite=replaces), timeout=_COPIED
            )
        except FileNotFoundError as error:
            raise StoreError(f"`{self}` cannot be read", ["it was removed meanwhile"]) from error

    def _write_large(self, request: Callable[[Any, Any], Any], **options: str) -> bool:
        with translated_errors(f"`{self}`", "written"):
            try:
                return self._ask(request, **options) is not _EXISTS
            except OnlyTensorStoreError as error:
                hint = "pip install google-auth, or boto3 for s3, which find credentials"
                text = "uploads in parts need credentials that obstore accepts"
                raise StoreError(f"`{self}` cannot be written", [text], [hint]) from error

    def make_directory(self) -> None:
        pass

    def remove(self) -> None:
        with translated_errors(f"`{self}`", "deleted"):
            self._store.write(self._key, None).result()

    def remove_files(self, names: Sequence[str]) -> None:
        for deletion in [self._store.write(f"{self._key}/{name}", None) for name in names]:
            with contextlib.suppress(ValueError):
                deletion.result()

    def remove_tree(self) -> None:
        self.remove_files([entry.path for entry in self.walk() if entry.is_file])

    def remove_empty(self) -> None:
        pass


@contextlib.contextmanager
def patience(what: str) -> Iterator[None]:
    """Logs a warning if the block takes long, for example because failed requests are repeated."""
    text = "waiting for %s: failed requests are repeated for some seconds"
    timer = threading.Timer(_PATIENCE, _log.warning, (text, what))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store(scheme: str, bucket: str, timeout: str = _ANSWER) -> Any:
    variables = [pair for pair in os.environ.items() if pair[0].startswith(_VARIABLES)]
    return _obstore_opened(scheme, bucket, timeout, tuple(variables))


@functools.lru_cache(maxsize=64)
def _obstore_opened(scheme: str, bucket: str, timeout: str, variables: object) -> Any:
    obstore = _obstore()
    config, provider = _gs_access() if scheme == "gs" else _s3_access()
    delays = (int(RETRIES[name].removesuffix("ms")) for name in ("initial_delay", "max_delay"))
    first, last = (datetime.timedelta(milliseconds=delay) for delay in delays)
    try:
        return (obstore.store.GCSStore if scheme == "gs" else obstore.store.S3Store)(
            bucket,
            config=config,
            client_options={"allow_http": True, "timeout": timeout},
            credential_provider=provider,
            retry_config={
                "max_retries": RETRIES["max_retries"],
                "backoff": {"init_backoff": first, "max_backoff": last, "base": 2},
                "retry_timeout": datetime.timedelta(minutes=3),
            },
        )
    except obstore.exceptions.BaseError as error:
        raise OnlyTensorStoreError from error


def _gs_access() -> tuple[dict[str, Any], Any]:
    """Configuration and credential provider."""
    config: dict[str, Any] = {}
    if url := os.environ.get("TENSORSTORE_GCS_HTTP_URL"):
        server = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        server |= {"gcs_base_url": url, "disable_oauth": True}
        config["service_account_key"] = json.dumps(server)
    if token := os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING"):
        return config, lambda: {"token": token, "expires_at": None}
    provider = None if url else _google_credentials()
    return config if provider else config | {"skip_signature": True}, provider


def _google_credentials() -> Any:
    """The application default credentials; None if `google-auth` finds none."""
    try:
        auth = importlib.import_module("google.auth")
        provider = importlib.import_module("obstore.auth.google").GoogleCredentialProvider
        scopes = ["https://www.googleapis.com/auth/devstorage.read_write"]
        return provider(auth.default(scopes=scopes)[0])
    except ImportError:
        return None
    except importlib.import_module("google.auth.exceptions").DefaultCredentialsError:
        return None


def _s3_access() -> tuple[dict[str, Any], Any]:
    """Configuration and credential provider: None for the keys of the environment."""
    config = {"region": s3_region(), "endpoint": s3_endpoint()}
    config = {name: value for name, value in config.items() if value}
    if s3_has_keys() and "region" in config:
        return config, None
    provider = _boto3_credentials()
    if "region" not in config | getattr(provider, "config", {}):
        raise OnlyTensorStoreError
    return config if provider else config | {"skip_signature": True}, provider


def _boto3_credentials() -> Any:
    """The credentials of a profile or of the role of a machine; None if `boto3` finds none."""
    try:
        session = importlib.import_module("boto3").Session()
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
        return provider(session) if session.get_credentials() else None
    except ImportError:
        return None
    except importlib.import_module("botocore.exceptions").BotoCoreError as error:
        raise ValueError(str(error)) from error


def s3_options() -> dict[str, Any]:
    """TensorStore's options for the server and the credentials of s3."""
    options: dict[str, Any] = {"endpoint": s3_endpoint(), "aws_region": s3_region()}
    options = {name: value for name, value in options.items() if value}
    home = f"{os.environ.get('HOME', '')}/.aws"
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/credentials"
    config = os.environ.get("AWS_CONFIG_FILE") or f"{home}/config"
    # TensorStore's own search logs an error for each place without credentials.
    if s3_has_keys():
        options["aws_credentials"] = {"type": "environment"}
    elif is_file(credentials):
        options["aws_credentials"] = {
            "type": "profile",
            "profile": os.environ.get("AWS_PROFILE") or "default",
            "credentials_file": credentials,
            "config_file": config if is_file(config) else credentials,
        }
    return options


def s3_endpoint() -> str:
    """The URL of the s3 server, empty for Amazon's. Raises CheckpointFormatError if the environment
    gives something else than a URL."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    name = next((name for name in names if os.environ.get(name)), "")
    url = os.environ.get(name, "")
    if url and not url.startswith(("http://", "https://")):
        raise CheckpointFormatError(
            f"{name} is `{url}`, which is not a URL", hints=[f"export {name}=http://{url}"]
        )
    return url.rstrip("/")


def s3_region() -> str:
    """The region of the environment; without one, any region for a server that is not Amazon's."""
    given = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return given or ("us-east-1" if s3_endpoint() else "")


def s3_has_keys() -> bool:
    """Whether the environment has credentials."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))
