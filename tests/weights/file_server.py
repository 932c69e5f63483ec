"""A small real server of files, with the faults that real ones have."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest


@dataclass
class Served:
    """A file, and how it is served.

    Args:
        content: its bytes.
        etag: False for none.
        ranges: whether a part can be asked for.
        checks: whether If-Range is heeded.
        length: whether the size is told.
        answers: (status, headers) instead of the file, one a request, until they are used up.
        cuts: bytes after which the connection ends, one a request, until they are used up; None: whole.
        stalls: a cut connection stays open and silent.
        delay: seconds before the first byte.
        headers: more of them.
    """

    content: bytes
    etag: bool = True
    ranges: bool = True
    checks: bool = True
    length: bool = True
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    cuts: list[int | None] = field(default_factory=list)
    stalls: bool = False
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:12]}"'


class FileServer:
    """Files by path, and what was asked for.

    Args:
        port: where it listens on the loopback device.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.ended = threading.Event()

    def put(self, path: str, content: bytes, **how: object) -> str:
        """Serve a file; returns its address."""
        self.files[path] = Served(content, **how)  # type: ignore[arg-type]
        return self.address(path)

    def address(self, path: str, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.port}{path}"

    def ranges(self) -> list[str | None]:
        """The Range of each request."""
        return [headers.get("range") for _, headers in self.requests]


@contextmanager
def serving() -> Iterator[FileServer]:
    """A server on a free port of the loopback device."""
    server: FileServer

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            server.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
            served = server.files.get(urlsplit(self.path).path)
            if served is None:
                self.send_error(404)
                return
            if served.answers:
                status, headers = served.answers.pop(0)
                self._head(status, {"Content-Length": "0", **headers})
                return
            server.ended.wait(served.delay)
            self._send(served)

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()

        def _send(self, served: Served) -> None:
            status, start, whole = 200, 0, len(served.content)
            headers = dict(served.headers)
            wanted, same = self.headers.get("Range"), self.headers.get("If-Range")
            if served.etag:
                headers["ETag"] = served.tag
            if wanted and served.ranges and (same in (None, served.tag) or not served.checks):
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= whole:
                    self._head(416, {"Content-Range": f"bytes */{whole}", "Content-Length": "0"})
                    return
                status = 206
                headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
            if served.length:
                headers["Content-Length"] = str(whole - start)
            self._head(status, headers)
            cut = served.cuts.pop(0) if served.cuts else None
            self.wfile.write(served.content[start:][:cut])
            self.wfile.flush()
            if cut is not None and served.stalls:
                server.ended.wait(20)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # clients hang up in these tests
            pass

    listening = Quiet(("127.0.0.1", 0), Handler)
    server = FileServer(listening.server_address[1])
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        listening.shutdown()
        listening.server_close()
        thread.join()


def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, no mirror and no ban of the network from the machine's own settings."""
    proxies = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    for name in ("ZOO_MIRROR", "ZOO_OFFLINE", "HF_HUB_OFFLINE", *proxies):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
