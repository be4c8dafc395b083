"""Names in a bucket, listed as a directory's: TensorStore lists all keys below a prefix, without
their sizes, and so would walk a billion chunks to find the steps of a training.

The requests are those of Google's and Amazon's interfaces, sent through TensorStore; with the
credentials that the environment, a profile or an installed `google-auth` or `botocore` has. Where
these are none that the bucket takes, `pages` gives None.
"""

import configparser
import functools
import hashlib
import hmac
import importlib
import json
import logging
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import tensorstore as ts

from reshard.errors import CheckpointFormatError
from reshard.storage import posix

_NO_BODY = hashlib.sha256(b"").hexdigest()
_MAX_CONFIG_BYTES = 1 << 20
# Seconds without an answer after which that is said.
_PATIENCE = 1.8
_log = logging.getLogger("reshard")
# What a server says to whom it does not know, and to a signature for another region.
_UNKNOWN, _ELSEWHERE = ("PERMISSION_DENIED", "UNAUTHENTICATED"), ("INVALID_ARGUMENT", "UNKNOWN")


class Object(NamedTuple):
    """An object of a bucket: its key, its bytes, and a number of this version of it."""

    key: str
    nbytes: int
    version: int


class Page(NamedTuple):
    """Objects below a prefix, the prefixes that hide others, and how to ask for what is next."""

    objects: list[Object]
    prefixes: list[str]
    token: str


def pages(
    scheme: str, bucket: str, prefix: str, delimiter: str, most: int, context: ts.Context
) -> Iterator[Page] | None:
    """What is below a prefix, up to `most` names a page: keys that have the delimiter after it are
    one prefix. None where it takes credentials that only TensorStore finds."""
    ask = _gs_page if scheme == "gs" else _s3_page
    get = functools.partial(ask, bucket, prefix, delimiter, most, context)
    try:
        first = get("")
    except ValueError as error:
        known = _gs_token() if scheme == "gs" else _s3_keys()[0]
        if str(error).startswith(_ELSEWHERE if known else (*_UNKNOWN, *_ELSEWHERE)):
            return None
        raise
    return None if first is None else _all(first, get)


def _all(page: Page, get: Callable[[str], Page | None]) -> Iterator[Page]:
    yield page
    while page.token:
        found = get(page.token)
        if found is None:
            raise ValueError("there is no such page of the list any more")
        page = found
        yield page


def _get(url: str, headers: dict[str, str], context: ts.Context) -> bytes | None:
    """What is at a URL; None where nothing is."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    spec = {"driver": "http", "base_url": url, "headers": lines}
    store = ts.KvStore.open(spec, context=context).result()
    result = waited(store.read(""), url.partition("?")[0])
    return result.value if result.state == "value" else None


def waited(future: ts.Future, what: str) -> Any:
    """The result of a request; what is asked is logged where there is none for a while, in which
    the request may have failed and been tried again."""
    try:
        return future.result(timeout=_PATIENCE)
    except TimeoutError:
        _log.warning("waiting for %s: what fails is tried again for some seconds", what)
        return future.result()


def _missing(token: str) -> None:
    """Raises ValueError where a bucket has no list, and so is not there; None for a later page."""
    if not token:
        raise ValueError("there is no such bucket [http_response_code='404']")


def _query(parameters: dict[str, str]) -> str:
    """Sorted, as signatures have it."""
    given = sorted((name, value) for name, value in parameters.items() if value)
    return urllib.parse.urlencode(given, quote_via=urllib.parse.quote, safe="")


def _gs_page(
    bucket: str, prefix: str, delimiter: str, most: int, context: ts.Context, token: str
) -> Page | None:
    base = os.environ.get("TENSORSTORE_GCS_HTTP_URL") or "https://storage.googleapis.com"
    query = _query(
        {
            "prefix": prefix,
            "delimiter": delimiter,
            "maxResults": str(most),
            "pageToken": token,
            "fields": "prefixes,items(name,size,generation),nextPageToken",
        }
    )
    bearer = _gs_token()
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    data = _get(f"{base}/storage/v1/b/{bucket}/o?{query}", headers, context)
    if data is None:
        return _missing(token)
    document: Any = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("the answer is no list of objects")
    objects = [
        Object(item["name"], int(item["size"]), int(item["generation"]))
        for item in document.get("items", ())
    ]
    return Page(objects, document.get("prefixes", []), document.get("nextPageToken", ""))


def _gs_token() -> str:
    """An access token, as TensorStore looks for one; empty where none is found."""
    given = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    if given or os.environ.get("TENSORSTORE_GCS_HTTP_URL"):  # an emulator asks for none
        return given or ""
    credentials = _gs_credentials()
    if credentials is None:
        return ""
    if not credentials.valid:
        requests = importlib.import_module("google.auth.transport.requests")
        credentials.refresh(requests.Request())
    return credentials.token


@functools.cache
def _gs_credentials() -> Any:
    """Those that `google-auth` finds, which is there where Orbax reads buckets."""
    try:
        auth = importlib.import_module("google.auth")
        importlib.import_module("google.auth.transport.requests")
        scopes = ["https://www.googleapis.com/auth/devstorage.read_only"]
        return auth.default(scopes=scopes)[0]
    except ImportError:
        return None
    except importlib.import_module("google.auth.exceptions").DefaultCredentialsError:
        return None


def _s3_page(
    bucket: str, prefix: str, delimiter: str, most: int, context: ts.Context, token: str
) -> Page | None:
    endpoint, region = s3_endpoint(), s3_region()
    if endpoint:
        url = f"{endpoint}/{bucket}/"
    elif not region:
        return None
    elif "." in bucket:
        url = f"https://s3.{region}.amazonaws.com/{bucket}/"
    else:
        url = f"https://{bucket}.s3.{region}.amazonaws.com/"
    query = _query(
        {
            "list-type": "2",
            "prefix": prefix,
            "delimiter": delimiter,
            "max-keys": str(most),
            "continuation-token": token,
        }
    )
    data = _get(f"{url}?{query}", _signature(url, query, region), context)
    if data is None:
        return _missing(token)
    try:
        found = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise ValueError("the answer is no list of objects") from error
    if not found.tag.endswith("ListBucketResult"):
        raise ValueError("the answer is no list of objects")
    token = _text(found, "NextContinuationToken")
    if _text(found, "IsTruncated") == "true" and not token:
        raise ValueError("the list is cut short, with no way to ask for the rest of it")
    objects = [
        Object(
            _text(item, "Key"),
            int(_text(item, "Size")),
            _number(_text(item, "ETag") + _text(item, "LastModified")),
        )
        for item in found.iterfind("{*}Contents")
    ]
    prefixes = [_text(item, "Prefix") for item in found.iterfind("{*}CommonPrefixes")]
    return Page(objects, prefixes, token)


def _text(item: ElementTree.Element, name: str) -> str:
    return item.findtext(f"{{*}}{name}") or ""


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def s3_endpoint() -> str:
    """The server that speaks s3, if it is not Amazon's; raises CheckpointFormatError for what is
    no URL."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    name = next((name for name in names if os.environ.get(name)), "")
    url = os.environ.get(name, "")
    if url and not url.startswith(("http://", "https://")):
        raise CheckpointFormatError(
            f"{name} is `{url}`, and no URL", hints=[f"export {name}=http://{url}"]
        )
    return url.rstrip("/")


def s3_region() -> str:
    """The region: of the environment, or of the profile; another server's, if none is told."""
    names = ("AWS_REGION", "AWS_DEFAULT_REGION")
    given = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return given or _profile("region") or ("us-east-1" if s3_endpoint() else "")


def s3_files() -> tuple[str, str]:
    """Where profiles are: the file of credentials, and that of all else."""
    names = [("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")]
    home = os.environ.get("HOME", "")
    one, other = (os.environ.get(name) or f"{home}/.aws/{file}" for name, file in names)
    return one, other


def s3_profile() -> str:
    return os.environ.get("AWS_PROFILE") or "default"


def _profile(key: str) -> str:
    """A value of the profile in use; empty where it has none."""
    credentials, config = s3_files()
    name = s3_profile()
    for file, section in ((credentials, name), (config, f"profile {name}"), (config, name)):
        if posix.is_file(file):
            parsed = configparser.ConfigParser(interpolation=None, strict=False)
            parsed.read_string(posix.beginning(file, _MAX_CONFIG_BYTES).decode(errors="replace"))
            if value := parsed.get(section, key, fallback=""):
                return value
    return ""


def _s3_keys() -> tuple[str, str, str]:
    """The id of a key, the key, and a session's token, each empty where there is none."""
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    for get in (lambda name: os.environ.get(name.upper(), ""), _profile):
        key, secret, token = map(get, names)
        if key and secret:
            return key, secret, token
    try:
        session = importlib.import_module("botocore.session").get_session()
        wrong = importlib.import_module("botocore.exceptions").BotoCoreError
    except ImportError:
        return "", "", ""
    try:
        found = session.get_credentials()
    except wrong as error:
        raise ValueError(str(error)) from error
    if found is None:
        return "", "", ""
    frozen = found.get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token or ""


def _signature(url: str, query: str, region: str) -> dict[str, str]:
    """The headers of a signed request; see "Signature Calculations for the Authorization Header" in
    Amazon's documentation of s3."""
    key, secret, token = _s3_keys()
    if not key:
        return {}
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    parts = urllib.parse.urlsplit(url)
    headers = {"x-amz-content-sha256": _NO_BODY, "x-amz-date": now}
    if token:
        headers["x-amz-security-token"] = token
    signed = {"host": parts.netloc, **headers}
    names = ";".join(signed)
    lines = [f"{name}:{value}" for name, value in signed.items()]
    request = "\n".join(["GET", parts.path, query, *lines, "", names, _NO_BODY])
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    signing = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        signing = hmac.digest(signing, part.encode(), "sha256")
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, "
        f"Signature={signing.hex()}"
    )
    return headers
