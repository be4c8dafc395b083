"""Errors of TensorStore and obstore that a bucket caused, translated."""

import contextlib
import http
import re
from collections.abc import Iterator

from reshard.errors import ReshardError, StoreError, first_line

# The status, the object and the broken connection in messages of TensorStore and obstore.
_STATUS = re.compile(r"(?:http_response_code='|status code: )(\d+)")
_PLACE = re.compile(r"Error reading (?:\"(.+?)\"|((?:gs|s3)://.+?))(?=:? |:$)")
_BROKEN = re.compile(r"(?:CURL|HTTP) error:? (.*?)(?: \[|\n|$)", re.DOTALL)
# A file of a disk that this user may not read.
_DENIED = re.compile(r'PERMISSION_DENIED: .*Failed to open: "(.+?)"', re.DOTALL)
_MEANINGS = {
    "400": "the request is not accepted: check the region and the endpoint",
    "401": "the credentials are not valid there",
    "403": "no credentials allow it",
    "404": "there is no such bucket or object",
    "412": "it changed while it was read",
    "429": "too many requests, also after retries",
    "500": "the store failed, also after retries",
    "503": "the store was not available, also after retries",
}
# Messages may have the phrase of a status instead of its number.
_PHRASES = {http.HTTPStatus(int(code)).phrase: code for code in _MEANINGS}


def status(text: str) -> str:
    """The HTTP status in the text of an error; empty if there is none."""
    match = _STATUS.search(text)
    return match[1] if match else next((_PHRASES[p] for p in _PHRASES if p in text), "")


def store_error(error: ValueError, what: str, done: str = "read") -> StoreError | None:
    """The error of a store about `what`, which cannot be `done`; None for any other error."""
    text = str(error)
    code, broken = status(text), _BROKEN.search(text)
    if code:
        reason = f"{code}: {_MEANINGS.get(code, first_line(error))}"
    elif broken is not None:
        reason = f"the connection failed, also after retries: {broken[1]}"
    elif "invalid list response" in text:
        reason = "the answer is not a list of objects"
    elif "credentials" in text:
        reason = first_line(error)
    elif denied := _DENIED.search(text):
        return StoreError(f"{what} cannot be {done}", [f"{denied[1]}: permission denied"])
    else:
        return None
    place = _PLACE.search(text)
    read = f"{place[1] or place[2]}: " if place is not None else ""
    return StoreError(f"{what} cannot be {done}", [read + reason])


@contextlib.contextmanager
def translated_errors(
    what: str, done: str = "read", other: type[ReshardError] = StoreError
) -> Iterator[None]:
    """Raises StoreError if a store refuses a request about `what`, and `other` if the request fails
    for another reason."""
    try:
        yield
    except ReshardError:
        raise
    except ValueError as error:
        refused = store_error(error, what, done)
        raise refused or other(f"{what} cannot be {done}", [first_line(error)]) from error
