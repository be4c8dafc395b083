"""Requests to buckets through obstore: lists with sizes, conditional creation, uploads in parts.

TensorStore lists all keys below a prefix, without sizes. To find the steps of a training, it would
list a billion chunks. obstore uses the credentials of the environment, or those that an installed
`boto3` or `google-auth` finds. If a bucket refuses them, `OnlyTensorStoreError` is raised.
"""

import contextlib
import datetime
import functools
import importlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reshard.errors import CheckpointFormatError
from reshard.storage.disk import Entry, Location, is_file, reader
from reshard.storage.store_errors import status

# Retries of failed requests, and the delays between them: 429, 503, broken connections.
RETRIES: dict[str, Any] = {"max_retries": 5, "initial_delay": "300ms", "max_delay": "5000ms"}
# The longest time that a request may take. A server answers the copy of gigabytes when it is done.
_ANSWER, _COPIED = "30s", "3600s"
# Seconds without an answer until a warning is logged.
_PATIENCE = 1.8
# The answer to a request to create an object that exists.
_EXISTS = object()
_log = logging.getLogger("reshard")
_importing = threading.Lock()
# Bytes of a part of an upload, the most parts, and the parts that are sent at once.
_PART, _PARTS, _AT_ONCE = 8 << 20, 5000, 4
# Statuses for unknown credentials, and for a signature for another region.
_UNKNOWN, _OTHER_REGION = {"401", "403"}, {"301", "307", "400"}
# Prefixes of the environment variables that configure requests.
_VARIABLES = ("AWS_", "GOOGLE_", "TENSORSTORE_GCS_", "HOME")


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


def below(scheme: str, bucket: str, prefix: str, shallow: bool) -> list[Entry]:
    """All objects below a prefix, or if `shallow`, the objects and directories directly below it.
    An object `a/` is listed as `a`."""

    def ask(store: Any) -> tuple[Sequence[Any], Sequence[str]]:
        if shallow:
            answer = _obstore().list_with_delimiter(store, prefix)
            return answer["objects"], answer["common_prefixes"]
        return [*itertools.chain.from_iterable(_obstore().list(store, prefix, chunk_size=1000))], []

    objects, prefixes = _asked(scheme, bucket, prefix, ask)
    begin = len(prefix) + 1 if prefix else 0
    entries = [Entry(path[begin:], False, True) for path in prefixes]
    return entries + [_entry(meta, begin) for meta in objects if meta["path"] != prefix]


def entry(scheme: str, bucket: str, key: str) -> Entry | None:
    """An object; None if there is none."""
    try:
        meta = _asked(scheme, bucket, key, lambda store: _obstore().head(store, key))
    except FileNotFoundError:
        return None
    return _entry(meta, len(key))


def _entry(meta: Any, begin: int) -> Entry:
    # The answers to a list and to a single request differ in quotation marks and fractions.
    version = f"{(meta['e_tag'] or '').strip(chr(34))} {int(meta['last_modified'].timestamp())}"
    return Entry(meta["path"][begin:], True, False, meta["size"], version)


def create(bucket: str, key: str, data: bytes) -> bool:
    """Creates an object of s3 if it is absent, in one request. Returns whether it did."""
    ask = functools.partial(_obstore().put, path=key, file=data, mode="create")
    return _asked("s3", bucket, key, ask) is not _EXISTS


def upload(scheme: str, bucket: str, key: str, file: Location) -> bool:
    """Writes a file of a disk as an object, in parts: with all of its bytes or not at all."""
    size = max(_PART, (file.file_bytes() or 0) // _PARTS)

    def ask(store: Any) -> None:
        with reader(file) as data:
            _obstore().put(store, key, data, chunk_size=size, max_concurrency=_AT_ONCE)

    return _asked(scheme, bucket, key, ask) is not _EXISTS


def copy(scheme: str, bucket: str, new: str, key: str) -> bool:
    """Copies an object on the server. On gs, only if the new one is absent. Returns whether it
    did."""
    ask = functools.partial(_obstore().copy, from_=key, to=new, overwrite=scheme == "s3")
    return _asked(scheme, bucket, new, ask, _COPIED) is not _EXISTS


def _asked(
    scheme: str, bucket: str, key: str, ask: Callable[[Any], Any], timeout: str = _ANSWER
) -> Any:
    """The answer of a bucket about a key, or `_EXISTS`. Raises ValueError or FileNotFoundError for
    an error."""
    exceptions = _obstore().exceptions
    for tries_left in reversed(range(RETRIES["max_retries"] + 1)):
        store = _store(scheme, bucket, timeout)
        try:
            with patience(f"`{scheme}://{bucket}/{key}`"):
                return ask(store)
        except exceptions.AlreadyExistsError:
            return _EXISTS
        except (exceptions.InvalidPathError, ValueError) as error:
            raise OnlyTensorStoreError from error
        except exceptions.BaseError as error:
            text = str(error)
            if "response body" in text and tries_left:  # obstore retries all others
                continue
            code = status(text) or ("301" if "redirect" in text else "")
            if code in _OTHER_REGION or (code in _UNKNOWN and "skip_signature" in store.config):
                raise OnlyTensorStoreError from error
            raise ValueError(text) from error
    raise AssertionError


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
    return _opened(scheme, bucket, timeout, tuple(variables))


@functools.lru_cache(maxsize=64)
def _opened(scheme: str, bucket: str, timeout: str, variables: object) -> Any:
    obstore = _obstore()
    config, provider = _gs_access() if scheme == "gs" else _s3_access()
    first, last = (
        datetime.timedelta(milliseconds=int(RETRIES[name].removesuffix("ms")))
        for name in ("initial_delay", "max_delay")
    )
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
