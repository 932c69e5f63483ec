"""One file from one address, ``http``, ``https`` or ``file``; an interrupted one is gone on with. No torch here."""

from __future__ import annotations

import base64
import contextlib
import http
import re
import ssl
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener, url2pathname

from ...errors import InputError
from .partial import Known, Partial

__all__ = ["PATIENT", "Patience", "Unreachable", "Watch", "check_address", "get", "shown"]

Watch = Callable[[int, int | None], None]
"""Told how many bytes are there, and of how many (if that is known)."""

_BLOCK = 1 << 18
_PAGES = (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml", b"<!--")
_LFS_POINTER = b"version https://git-lfs"
_BUSY = (408, 425, 429)


class Patience(NamedTuple):
    """How long to wait for a server.

    Args:
        timeout: seconds without a byte.
        attempts: attempts in a row that don't get further than any before.
        pause: seconds before the second attempt; they double up to 30.
    """

    timeout: float = 30.0
    attempts: int = 4
    pause: float = 0.5


PATIENT = Patience()


class Unreachable(Exception):
    """An address doesn't give the file; the message is for people and holds no secrets.

    Args:
        reason: why.
        again: whether another attempt may help.
        wait: seconds that the server asks to wait.
    """

    def __init__(self, reason: str, *, again: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.again = again
        self.wait = wait


def shown(address: str) -> str:
    """An address for people: without user name, password, query and fragment."""
    return re.split(r"[?#]", re.sub(r"^(\w+://)[^/]*@", r"\1", address), maxsplit=1)[0]


def check_address(address: str, place: str = "") -> str:
    """Refuse what is no whole ``http``, ``https`` or ``file`` address; ``place`` says where it stands.

    Raises:
        InputError: another scheme, no host, a relative path, or characters that no address has.
    """
    try:
        parts = urlsplit(address)
        is_file = parts.scheme == "file"
        whole = not parts.netloc and parts.path.startswith("/") if is_file else bool(parts.hostname)
        whole = whole and parts.port != 0  # reading the port checks it
    except ValueError:
        whole = False
    if not whole or parts.scheme not in ("http", "https", "file") or re.search(r"[^\x21-\x7e]", address):
        raise InputError(
            "This is not an address that a file can be fetched from.",
            where=place + shown(address),
            fix="http://..., https://... or file:///..., with %20 for a space",
        )
    return address


def get(address: str, part: Partial, *, patience: Patience, watch: Watch) -> None:
    """Fetch a file from an address into ``part``, whole.

    What an earlier attempt left there is used if the server says that the file is still the same one.

    Args:
        address: see ``check_address``.
        part: where to.
        patience: how long to wait for a server.
        watch: is told of progress.

    Raises:
        Unreachable: the address doesn't give the file.
        RunError: the disk is full or can't be written.
    """
    if urlsplit(address).scheme == "file":
        return _copy(address, part, watch)
    furthest, fruitless = part.size, 0
    while True:
        try:
            return _attempt(address, part, patience.timeout, watch)
        except Unreachable as error:
            fruitless = 1 if part.size > furthest else fruitless + 1
            furthest = max(furthest, part.size)
            if not error.again or fruitless >= patience.attempts:
                raise
            time.sleep(max(error.wait, min(30.0, patience.pause * 2 ** (fruitless - 1))))


def _attempt(address: str, part: Partial, timeout: float, watch: Watch) -> None:
    known = part.known(address)
    if known is not None and known.offset == known.size:  # it was stopped just before the end
        return
    with _as_unreachable(part):
        request = _request(address, known)
        with build_opener(_Redirects).open(request, timeout=timeout) as answer:
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise Unreachable("it sends the file compressed, unasked")
            if answer.status == 206 and known is not None:
                total = _check_range(answer.headers, known, part)
                _receive(answer, part, known.offset, total, b"", watch)
            elif answer.status == 200:
                total = _length(answer.headers)
                first = _first_bytes(answer, total)  # before old bytes are given up for a log-in page
                part.start(address, _validator(answer.headers), total)
                _receive(answer, part, 0, total, first, watch)
            else:
                raise Unreachable(f"it answers {_status(answer.status)}")


def _request(address: str, known: Known | None) -> Request:
    parts = urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    request = Request(urlunsplit((parts.scheme, host, parts.path or "/", parts.query, "")))
    request.add_header("User-Agent", "vision-model-zoo")
    request.add_header("Accept-Encoding", "identity")
    if at:
        name = base64.b64encode(unquote(user).encode()).decode()
        # Only for the host that it is of: a redirect doesn't take it along.
        request.add_unredirected_header("Authorization", f"Basic {name}")
    if known is not None:
        request.add_header("Range", f"bytes={known.offset}-")
        request.add_header("If-Range", known.validator)
    return request


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, but none that leads from https to something else."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        old, new = (urlsplit(address).scheme for address in (req.full_url, newurl))
        if new != "https" and (old, new) != ("http", "http"):
            raise Unreachable(f"it redirects to {shown(newurl)}: from {old} to {new} is not followed")
        # Python 3.10 doesn't know 308.
        return super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)

    http_error_308 = HTTPRedirectHandler.http_error_302


@contextlib.contextmanager
def _as_unreachable(part: Partial) -> Iterator[None]:
    """Everything that networks do becomes ``Unreachable``; their own messages may hold secrets."""
    try:
        yield
    except HTTPError as error:
        code = error.code
        wait = error.headers.get("Retry-After", "") if error.headers else ""
        error.close()
        if code == 416:  # what we have is longer than the file that is there now
            part.discard()
        again = code in (*_BUSY, 416) or code >= 500
        seconds = min(60.0, float(wait)) if again and re.fullmatch(r"\d{1,6}", wait) else 0.0
        raise Unreachable(f"it answers {_status(code)}", again=again, wait=seconds) from None
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Unreachable(f"its certificate is not valid ({reason.verify_message})") from None
        if isinstance(reason, TimeoutError):
            raise Unreachable("nothing came for too long", again=True) from None
        told = reason.strerror if isinstance(reason, OSError) else None
        raise Unreachable(f"the connection failed ({told or type(reason).__name__})", again=True) from None


def _status(code: int) -> str:
    try:
        return f"{code} {http.HTTPStatus(code).phrase}"
    except ValueError:
        return str(code)


def _length(headers: Any) -> int | None:
    value = headers.get("Content-Length", "")
    return int(value) if re.fullmatch(r"[0-9]{1,15}", value) else None


def _validator(headers: Any) -> str | None:
    """What tells whether the file is the same next time: a strong ETag, else its date."""
    tag = headers.get("ETag", "")
    if tag.startswith('"'):
        return str(tag)
    date = headers.get("Last-Modified")
    return None if date is None else str(date)


def _check_range(headers: Any, known: Known, part: Partial) -> int | None:
    """The whole size, if the answer goes on where the partial file ends, in the same file."""
    match = re.fullmatch(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)", headers.get("Content-Range", ""))
    total = known.size if match is None or match[2] == "*" else int(match[2])
    same = match is not None and int(match[1]) == known.offset
    if not same or _validator(headers) not in (None, known.validator) or known.size not in (None, total):
        part.discard()
        raise Unreachable("it sends a part of another file", again=True)
    return total


def _first_bytes(answer: Any, total: int | None) -> bytes:
    """The beginning, if it is no page."""
    wanted = 512 if total is None else min(512, total)
    first = b""
    while len(first) < wanted and (block := answer.read1(wanted - len(first))):
        first += block
    if not first and total != 0:
        raise Unreachable("it stopped before the first byte", again=True)
    _refuse_pages(first)
    return first


def _refuse_pages(first: bytes) -> None:
    start = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_PAGES):
        raise Unreachable("it gives a web page instead of the file (a log-in page, or a proxy's?)")
    if start.startswith(_LFS_POINTER):
        raise Unreachable("it gives a Git LFS pointer instead of the file")
    if not first:
        raise Unreachable("it gives an empty file")


def _receive(answer: Any, part: Partial, offset: int, total: int | None, first: bytes, watch: Watch) -> None:
    """Append what comes to the partial file, in which ``offset`` bytes are."""
    done = offset
    with part.writing(total) as write:
        block = first
        while True:
            write(block)
            done += len(block)
            watch(done, total)
            # Not one byte more than promised is asked for: a server may keep the connection open.
            left = _BLOCK if total is None else min(_BLOCK, total - done)
            if left <= 0:
                return
            block = answer.read1(left)
            if not block:
                break
    if total is not None:
        raise Unreachable(f"it stopped after {done} of {total} bytes", again=True)


def _copy(address: str, part: Partial, watch: Watch) -> None:
    source = Path(url2pathname(urlsplit(address).path))
    part.start(address, None, None)
    try:
        total = source.stat().st_size
        file = open(source, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise Unreachable(f"it can't be read ({error.strerror})") from None
    with file, part.writing(total) as write:
        _refuse_pages(block := _read(file))
        while block:
            write(block)
            watch(file.tell(), total)
            block = _read(file)


def _read(file: IO[bytes]) -> bytes:
    try:
        return file.read(_BLOCK)
    except OSError as error:
        raise Unreachable(f"it can't be read ({error.strerror})") from None
