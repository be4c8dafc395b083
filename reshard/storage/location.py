"""Locations: a URL or a path, and the files of a disk or the objects of a bucket behind it."""

import os
import re
from typing import Any

import tensorstore as ts

from reshard.errors import CheckpointFormatError, CorruptCheckpointError
from reshard.storage import disk
from reshard.storage.bucket import BucketLocation
from reshard.storage.disk import Location as Location
from reshard.storage.store_errors import translated_errors


def checked(future: ts.Future, what: str) -> Any:
    """The result of a read. Raises StoreError, about `what`, if a bucket refuses it, and
    CorruptCheckpointError if it fails otherwise."""
    with translated_errors(what, other=CorruptCheckpointError):
        return future.result()


def parse_location(path: str | os.PathLike) -> Location:
    """The location of a path or a URL: `gs://`, `s3://` or `file://`. Raises CheckpointFormatError
    for any other URL."""
    if isinstance(path, Location):
        return path
    text = os.fspath(path)
    url = re.match(r"([a-z][a-z0-9+.-]*)://(.*)", text, re.DOTALL)
    if url is None:
        # A typing error, or a URL that pathlib has changed.
        if near := re.match(r"(gs|s3|file):/+(.*)", text, re.DOTALL | re.IGNORECASE):
            scheme = near[1].lower()
            hint = f"{scheme}://{'/' * (scheme == 'file')}{near[2]}"
            hints = [f"{hint}, as text", f"./{text}, if it is a path"]
            raise CheckpointFormatError(f"`{text}` is not a valid URL", hints=hints)
        return Location(disk.absolute(text))
    scheme, rest = url[1], url[2].rstrip("/")
    local = url[2].removeprefix("localhost")
    if scheme == "file" and local.startswith("/"):
        return Location(disk.absolute(local))
    if scheme == "file":
        problem = ": the part after `file://` must be an absolute path"
        hint = "file:///runs/1000, or a path alone"
    elif scheme not in ("gs", "s3"):
        problem = f": `{scheme}://` is not supported"
        hint = "a path, or a URL that begins with gs://, s3:// or file://"
    elif not {"", ".", ".."}.isdisjoint(rest.split("/")):
        problem, hint = " is not a valid name in a bucket", f"{scheme}://bucket/run/1000"
    else:
        return BucketLocation(f"{scheme}://{rest}")
    raise CheckpointFormatError(f"`{text}`{problem}", hints=[hint])
