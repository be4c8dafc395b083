"""`--html FILE`: where the commands write their page."""

import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import click

from reshard.cli import options
from reshard.errors import DestinationError, DestinationExistsError
from reshard.report.page import MARK, page
from reshard.storage.location import parse_location

_HELP = "write one self-contained HTML page. It replaces an older page."
HTML = options.value("--html page_file", "FILE", f"Also {_HELP}")
HTML_OF_PLAN = options.value("--html page_file", "FILE", f"With --dry-run, also {_HELP}")


def check_page(file: str | None, *checkpoints: str) -> None:
    """Raises DestinationError if FILE cannot be written, is no page, or is in a checkpoint."""
    if file is None:
        return
    path = pathlib.Path(file).resolve()
    hints = ["--html page.html"]
    if file == "-" or "://" in file or (path.exists() and not path.is_file()):
        raise DestinationError(f"--html {file}: a page must be a file on this machine", hints=hints)
    try:  # permissions alone do not show whether a file system can be written to
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        begins = path.read_text("utf-8", "replace") if path.exists() else ""
    except OSError as error:
        text = f"--html {file}: it cannot be written: {error.strerror}"
        raise DestinationError(text, hints=hints) from error
    for checkpoint in map(parse_location, checkpoints):
        if parse_location(str(path)).below(checkpoint.resolved()) is not None:
            text = f"--html {file}: the page would be inside the checkpoint {checkpoint}"
            raise DestinationError(text, hints=["write the page to another directory"])
    if begins and not begins.startswith(MARK):
        text = f"--html {file}: the file exists and is not a page of reshard"
        raise DestinationExistsError(text, hints=["write the page to another file"])


def write_page(flags: options.Flags, document: Callable[[], Mapping[str, Any]]) -> None:
    """Writes the page of a JSON document, if there is a FILE for it; all of it or nothing."""
    file = flags["page_file"]
    if file is None:
        return
    path = pathlib.Path(file).resolve()
    try:
        with tempfile.TemporaryDirectory(prefix=".page-", dir=path.parent) as folder:
            made = pathlib.Path(folder) / path.name
            made.write_text(page(document()), encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        raise DestinationError(f"--html {file}: {error.strerror}") from error
    if not flags["as_json"] and not flags.get("quiet"):
        click.echo(f"wrote {file}")
