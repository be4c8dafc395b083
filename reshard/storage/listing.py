"""Requests to buckets through obstore, and the credentials for them.

TensorStore lists all keys below a prefix, without sizes. To find the steps of a training, it would
list a billion chunks. obstore uses the credentials of the environment, or those that an installed
`boto3` or `google-auth` finds. If a bucket refuses them, `OnlyTensorStoreError` is raised.
"""

import contextlib
import datetime
import functools
import importlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from reshard.errors import CheckpointFormatError
from reshard.storage.disk import is_file
from reshard.storage.store_errors import status

# Retries of failed requests, and the delays between them: 429, 503, broken connections.
RETRIES: dict[str, Any] = {"max_retries": 5, "initial_delay": "300ms", "max_delay": "5000ms"}
# The longest time that a request may take.
_ANSWER = "30s"
# Seconds without an answer until a warning is logged.
_PATIENCE = 1.8
# The answer to a request to create an object that exists.
EXISTS = object()
_log = logging.getLogger("reshard")
_importing = threading.Lock()
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


def ask(
    scheme: str, bucket: str, key: str, request: Callable[[Any, Any], Any], timeout: str = _ANSWER
) -> Any:
    """The answer to a request about a key, or `EXISTS`. The request is a function of `obstore` and
    a store. Raises ValueError or FileNotFoundError for an error."""
    obstore = _obstore()
    for tries_left in reversed(range(RETRIES["max_retries"] + 1)):
        store = _store(scheme, bucket, timeout)
        try:
            with patience(f"`{scheme}://{bucket}/{key}`"):
                return request(obstore, store)
        except obstore.exceptions.AlreadyExistsError:
            return EXISTS
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
