"""What a store says where it refuses a request, in words."""

import contextlib
import re
from collections.abc import Iterator

from reshard.errors import ReshardError, StoreError, first_line

# What TensorStore and obstore say of the status, of what was read, and of the connection.
_STATUS = re.compile(r"(?:http_response_code='|status code: )(\d+)")
_PLACE = re.compile(r"Error reading (?:\"(.+?)\"|((?:gs|s3)://.+?))(?=:? |:$)")
_BROKEN = re.compile(r"(?:CURL|HTTP) error:? (.*?)(?: \[|\n|$)", re.DOTALL)
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
# What TensorStore and obstore say where they do not tell the status.
_UNTOLD = {
    "Forbidden": "403",
    "Unauthorized": "401",
    "Too Many Requests": "429",
    "Service Unavailable": "503",
    "Internal Server Error": "500",
}


def status(text: str) -> str:
    """The status of a store's answer, by the text of an error; empty where it tells none."""
    found = _STATUS.search(text)
    return found[1] if found else next((_UNTOLD[said] for said in _UNTOLD if said in text), "")


def refusal(error: ValueError, what: str, done: str = "read") -> StoreError | None:
    """What a store has said to a request, in words; None for an error that no store has made."""
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
    else:
        return None
    place = _PLACE.search(text)
    read = f"{place[1] or place[2]}: " if place is not None else ""
    return StoreError(f"{what} cannot be {done}", [read + reason])


@contextlib.contextmanager
def translated_errors(
    what: str, done: str = "read", other: type[ReshardError] = StoreError
) -> Iterator[None]:
    """Translates errors of TensorStore and obstore that concern `what`: StoreError if a store
    refused the request, and `other` for everything else."""
    try:
        yield
    except ReshardError:  # raised inside the block, and already in words
        raise
    except ValueError as error:
        found = refusal(error, what, done)
        raise found or other(f"{what} cannot be {done}", [first_line(error)]) from error
