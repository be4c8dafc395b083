"""A headless Chromium, driven over its DevTools protocol through a pipe: no port, no driver.

with browser.started() as chromium:
    page = chromium.open(html)
    page.value("document.title")
"""

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SECONDS = 60


class Chromium:
    """A browser, and the events of its pages."""

    def __init__(self, process: subprocess.Popen, reading: int, writing: int, folder: pathlib.Path):
        self._process, self._reading, self._writing = process, reading, writing
        self._folder = folder
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], until - time.monotonic())
            assert ready, "the browser does not answer"
            more = os.read(self._reading, 1 << 16)
            assert more, f"the browser has ended: {self._process.poll()}"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, html: str, width: int = 1280, dark: bool = False) -> "Tab":
        """Opens a page of this text from a file, and waits until it is drawn."""
        file = self._folder / f"{self._number}.html"
        file.write_text(html, encoding="utf-8")
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, file)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.resize(width)
        tab.call("Page.navigate", url=file.as_uri())
        until = time.monotonic() + SECONDS
        drawing = "document.querySelector('#sections:not([data-drawn])')"
        while not tab.value(f"document.readyState === 'complete' && !{drawing}"):
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.01)
        return tab


class Tab:
    def __init__(self, chromium: Chromium, session: str, file: pathlib.Path):
        self._chromium, self._session, self._file = chromium, session, file

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._chromium.call(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def texts(self, selector: str) -> list[str]:
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.value(f"{found}.map((node) => node.textContent)")

    def rows(self, section: str = "leaves") -> list[list[str]]:
        """The texts of the cells of a section's table."""
        rows = f"[...document.querySelectorAll('#{section} tbody tr')]"
        return self.value(f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))")

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39}[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        for kind, text in (("keyDown", "\r" if key == "Enter" else ""), ("keyUp", "")):
            self.call("Input.dispatchKeyEvent", type=kind, text=text, **named)

    def click(self, selector: str, corner: bool = False) -> None:
        """Clicks in the middle of an element, or in its upper left corner."""
        x, y, width, height = self.value(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            "return [box.x, box.y, box.width, box.height]; })()"
        )
        at = {"x": x + (6 if corner else width / 2), "y": y + (6 if corner else height / 2)}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def write(self, selector: str, text: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        """What is seen of the page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """Messages on the console, and requests for other files."""
        found = []
        for event in self._chromium.events:
            method, parameters = event["method"], event["params"]
            if event.get("sessionId") != self._session:
                continue
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(json.dumps(parameters))
            url = parameters["request"]["url"] if method == "Network.requestWillBeSent" else "data:"
            if url != self._file.as_uri() and not url.startswith("data:"):
                found.append(f"requests {url}")
        return found


@contextlib.contextmanager
def started(folder: pathlib.Path) -> Iterator[Chromium]:
    """A browser with its files in this folder. Without a browser, the test that asks for it is
    skipped, except in CI."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("no Chromium is installed: apt-get install chromium")
    theirs, writing = os.pipe()
    reading, answers = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]
    flags += ["--hide-scrollbars", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={folder / 'profile'}"]
    words = ["bash", "-c", script, "bash", str(theirs), str(answers), program, *flags]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(words, pass_fds=(theirs, answers), **streams)
    os.close(theirs)
    os.close(answers)
    chromium = Chromium(process, reading, writing, folder)
    try:
        yield chromium
        chromium.call("Browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(writing)
        os.close(reading)
