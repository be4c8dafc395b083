"""`--html FILE`: where the commands write their page."""

import pathlib
from collections.abc import Mapping
from typing import Any

import click

from reshard.errors import DestinationExistsError
from reshard.report.page import MARK, page

HTML = click.option(
    "--html",
    "page_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Also write one self-contained HTML page, with pictures. An older one is replaced.",
)


def check_page(file: str | None) -> None:
    """Raises DestinationExistsError if there is something at FILE that is no such page."""
    if file is None or not pathlib.Path(file).exists():
        return
    with pathlib.Path(file).open("rb") as existing:
        if existing.read(len(MARK)) != MARK.encode():
            raise DestinationExistsError(f"--html {file}: there is another file")


def write_page(file: str | None, document: Mapping[str, Any]) -> None:
    """The page of a JSON document, if there is a FILE for it."""
    if file is not None:
        check_page(file)
        pathlib.Path(file).write_text(page(document), encoding="utf-8")
