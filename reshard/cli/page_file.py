"""`--html FILE`: where the commands write their page."""

import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import click

from reshard.cli.options import Flags, value
from reshard.errors import DestinationError, DestinationExistsError
from reshard.report.page import MARK, page
from reshard.storage.location import parse_location

_HELP = "write one self-contained HTML page, with pictures. An older one is replaced."
_PATH = click.Path(dir_okay=False)
HTML = value("--html page_file", "FILE", f"Also {_HELP}", type=_PATH)
HTML_OF_PLAN = value("--html page_file", "FILE", f"With --dry-run, also {_HELP}", type=_PATH)


def check_page(file: str | None, *checkpoints: str) -> None:
    """Raises DestinationError where no page can be written to FILE, or it is in a checkpoint."""
    if file is None:
        return
    path = pathlib.Path(file)
    if problem := _problem(file, path):
        raise DestinationError(f"--html {file}: {problem}", hints=["--html page.html"])
    place = parse_location(str(path.resolve()))
    for checkpoint in map(parse_location, checkpoints):
        if place.below(checkpoint.resolved()) is not None:
            text = f"--html {file}: it would be inside the checkpoint {checkpoint}"
            raise DestinationError(text, hints=["write the page to another directory"])
    begins = b""
    if path.exists():
        with path.open("rb") as existing:
            begins = existing.read(len(MARK))
    if begins not in (b"", MARK.encode()):
        text = f"--html {file}: there is another file"
        raise DestinationExistsError(text, hints=["give it another name"])


def _problem(file: str, path: pathlib.Path) -> str:
    """Why there can be no file there; empty if there can be one."""
    if file in ("", "-"):
        return "this is not the name of a file"
    if "://" in file:
        return "a page must be a file on this machine"
    if path.is_symlink() and not path.exists():
        return "a symbolic link to a missing file"
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no directory {folder}"
    if path.exists() and not path.is_file():
        return "it is not a file"
    try:  # for who may do everything, too, on a file system that cannot be written to
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return f"{folder} cannot be written to"
    return ""


def write_page(flags: Flags, document: Callable[[], Mapping[str, Any]]) -> None:
    """The page of a JSON document, if there is a FILE for it; all of it or nothing."""
    file = flags["page_file"]
    if file is None:
        return
    path = pathlib.Path(file).resolve()
    text = page(document())
    try:
        with tempfile.TemporaryDirectory(prefix=".page-", dir=path.parent) as folder:
            made = pathlib.Path(folder) / path.name
            made.write_text(text, encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        raise DestinationError(f"--html {file}: {error.strerror}") from error
    if not flags["as_json"] and not flags.get("quiet"):
        click.echo(f"wrote {file}")
