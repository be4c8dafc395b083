"""`to_html`: one self-contained page. Names in a checkpoint become text of elements, never markup.
The page's policy forbids the browser to fetch anything or to run another script."""

import base64
import hashlib
import html
import importlib.resources
import json
import string
from collections.abc import Mapping
from typing import Any

from reshard.errors import ArgumentError, printable
from reshard.report.facts import Fact, Page, page_of

# A file that begins so is a page of `reshard`.
MARK = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="reshard">'
_HEIGHT = 720  # of a page in a notebook, in pixels
_FILES = importlib.resources.files("reshard.report")
_SCRIPTS = ("elements", "globs", "leaves", "tables", "treemap", "arrays", "conversion", "sections")
_KINDS = {
    "checkpoint": "checkpoint",
    "plan": "plan of a job",
    "conversion": "plan of a conversion",
    "refused": "plan that could not be made",
    "diff": "differences",
    "coverage": "coverage of a model",
}


def to_html(x: Any) -> str:
    """Return a self-contained HTML page of a checkpoint, a plan, a diff, a coverage or an array.

    The page shows the bytes of each part of the tree, the shards of each device, and the changes of
    a job. No array is read. The page needs no network and no other file. For 10,000 leaves it has
    about 1 MB, on any number of devices.

    Raises:
      ArgumentError: the object has no page.

    Example:
      >>> plan = reshard.plan(reshard.to_mesh(reshard.open("run/1000"), "1x8"), "out/1000")
      >>> reshard.to_html(plan).splitlines()[0]
      '<!doctype html>'
    """
    if not callable(getattr(type(x), "document", None)):
        text = f"an object of type `{type(x).__name__}` has no page"
        raise ArgumentError(text, hints=["reshard.to_html(reshard.open(path))"])
    return page(x.document())


def page(document: Mapping[str, Any]) -> str:
    """The page of a document that `--json` prints."""
    if len(steps := {array.get("step") for array in document.get("arrays", ())}) > 1:
        hints = ["reshard.to_html(reshard.plan(ckpt, path)) for each step"]
        raise ArgumentError(f"a page shows one step, and the plan has {len(steps)}", hints=hints)
    if "leaves" not in document and "chunk_shape" in document:  # one array
        one = {"format": "one array", "meshes": [], "device_ids": [], "leaves": [document]}
        document = one | {"path": document["path"]}
    shown = page_of(document)
    style = (_FILES / "page.css").read_text("utf-8")
    parts = [(_FILES / "script" / f"{name}.js").read_text("utf-8") for name in _SCRIPTS]
    # The browser paints the facts first, since a large page takes longer to draw.
    after = 'addEventListener("load", () => requestAnimationFrame(() => setTimeout(drawAll)));'
    script = "\n".join(['"use strict";\nfunction drawAll() {', *parts, "}", after])
    return string.Template((_FILES / "page.html").read_text("utf-8")).substitute(
        mark=MARK,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        kind=shown.kind,
        kicker=f"reshard · {_KINDS[shown.kind]}",
        title=_escaped(shown.title),
        lead=_escaped(shown.lead),
        facts="\n".join(map(_fact, shown.facts)),
        lists="\n".join(_list(heading, lines) for heading, lines in shown.lists.items() if lines),
        data=_embedded(shown),
    )


def framed(x: Any) -> str:
    """The page in a frame, for a notebook."""
    text = html.escape(to_html(x))
    return (
        f'<iframe sandbox="allow-scripts" width="100%" height="{_HEIGHT}" srcdoc="{text}"></iframe>'
    )


def _fact(fact: Fact) -> str:
    details = "".join(f"<p>{_broken(line)}</p>" for line in fact.details)
    name = f' id="fact-{fact.name}"' if fact.name else ""
    return (
        f'<section class="fact {fact.tone}"{name}>'
        f"<h2>{_escaped(fact.question)}</h2>"
        f"<strong>{_broken(fact.answer)}</strong>{details}"
        "</section>"
    )


def _list(heading: str, lines: Any) -> str:
    items = "".join(f"<li>{_escaped(line)}</li>" for line in lines)
    opened = " open" if heading in ("Problems", "Hints") else ""
    return (
        f'<details class="list {heading.split()[0].lower()}"{opened}>'
        f"<summary>{_escaped(heading)} ({len(lines)})</summary><ul>{items}</ul></details>"
    )


def _broken(text: str) -> str:
    """Text whose lines may break after the `/` of a path."""
    return _escaped(text).replace("/", "/<wbr>")


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _embedded(shown: Page) -> str:
    """The data as JSON without the characters of markup."""
    text = json.dumps({"kind": shown.kind, **shown.data}, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """The name of an element's text in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
