"""A small hub on the loopback device that the Hugging Face hub's real client works with."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from .hub_state import PAGE, Answer, Asked, Fault, Hub

_NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES: list[tuple[str, str, str]] = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "yaml"),
    ("GET", rf"/api/models/{_NAME}", "info"),
    ("GET", rf"/api/models/{_NAME}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"/api/models/{_NAME}/tree/(?P<revision>[^/]+)", "tree"),
    ("GET", rf"/api/models/{_NAME}/refs", "refs"),
    ("POST", rf"/api/models/{_NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/put/(?P<oid>\w+)", "put"),
    ("PUT", r"/part/(?P<oid>\w+)/(?P<number>\d+)", "part"),
    ("POST", r"/complete/(?P<oid>\w+)", "complete"),
    ("POST", r"/verify", "verify"),
    ("POST", rf"/api/models/{_NAME}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/api/models/{_NAME}/tag/(?P<revision>[^/]+)", "tag"),
    ("DELETE", rf"/api/models/{_NAME}/tag/(?P<tag>[^/]+)", "untag"),
    ("HEAD|GET", rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("HEAD|GET", r"/cdn/(?P<oid>\w+)", "cdn"),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of the loopback device."""
    hub: Hub

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def handle_any(self) -> None:
            address = urlsplit(self.path)
            step, values = "", {}
            for methods, pattern, name in ROUTES:
                match = re.fullmatch(pattern, address.path)
                if match is not None and self.command in methods.split("|"):
                    step, values = name, match.groupdict()
                    break
            step = "head" if step == "resolve" and self.command == "HEAD" else step
            held = self.headers.get("Authorization", "")
            with hub.lock:
                hub.log.append((step, self.path, self.headers.get("Host", ""), held))
            fault = hub.fault(step, address.path)
            try:
                self.serve(step, values, held.removeprefix("Bearer "), fault)
            except Answer as answer:
                self.answer(answer, fault)
            except ConnectionError:
                self.close_connection = True

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815

        def serve(self, step: str, values: dict[str, str], token: str, fault: Fault | None) -> None:
            kind = fault.kind if fault else ""
            if kind == "before":
                raise ConnectionError
            if kind == "during":
                self.rfile.read(min(64, int(self.headers.get("Content-Length", 0)) // 2))
                raise ConnectionError
            body = self.body()
            with hub.lock:
                hub.received += len(body)
            if fault is not None and kind == "slow":
                hub.ended.wait(fault.seconds)
            if fault is not None and fault.status:
                raise Answer(fault.status, code=fault.code, message=fault.message, **fault.headers)
            if kind == "page":
                raise Answer(200, PAGE, Content_Type="text/html")
            if not step:
                raise Answer(404, message=f"no such address: {self.path}")
            asked = Asked(token, body)
            hub.on_step(step, "before")
            done = getattr(hub, "resolve" if step == "head" else step)(asked, **values)
            hub.on_step(step, "after")
            raise Answer(200, done)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            blocks = []
            while size := int(self.rfile.readline(), 16):
                blocks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(blocks)

        def answer(self, answer: Answer, fault: Fault | None) -> None:
            kind = fault.kind if fault else ""
            if kind == "after":
                self.close_connection = True
                return
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            if kind == "flip" and body:
                body = body[:-1] + bytes([body[-1] ^ 1])
            status, start = answer.status, 0
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and status == 200:
                status, start = 206, int(wanted[1])
                answer.headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.send_response(status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            if self.command != "HEAD":
                half = kind == "half"
                self.wfile.write(body[start : start + (len(body) - start) // 2] if half else body[start:])
                if half:
                    self.close_connection = True

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:  # clients hang up in these tests
            pass

    listening = Quiet(("127.0.0.1", 0), Handler)
    hub = Hub(listening.server_address[1])
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        listening.shutdown()
        listening.server_close()
        thread.join()
