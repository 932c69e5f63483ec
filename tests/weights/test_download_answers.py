"""What servers answer instead of a file, where they send one to, and what must never be told."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from urllib.request import Request

import pytest

from zoo.errors import InputError, RunError
from zoo.weights.hubs.transport import Patience, Unreachable, _Redirects, check_address, shown
from zoo.weights.hubs.url import fetch

from .file_server import direct, serving

CONTENT = hashlib.sha256(b"weights").digest() * 6000  # 192,000 bytes
OTHER = hashlib.sha256(b"others").digest() * 6000
QUICK = Patience(timeout=5.0, attempts=3, pause=0.01)
ONCE = Patience(timeout=5.0, attempts=1, pause=0.01)


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    direct(monkeypatch)


@pytest.fixture
def server():
    with serving() as server:
        yield server


def cache() -> Path:
    return Path(os.environ["ZOO_CACHE"]) / "downloads"


def leftovers() -> list[str]:
    """Partial files and what is known of them."""
    return sorted(file.name for file in cache().rglob("*") if ".part" in file.name)


def get(what, patience=QUICK, **arguments):
    return fetch(what, progress=False, patience=patience, **arguments)


# --- answers that are no file ---


@pytest.mark.parametrize(
    "body",
    [b"<!DOCTYPE html>\n<title>Log in</title>", b"\n <HTML><body>", b"\xef\xbb\xbf<?xml version='1.0'?>"],
)
def test_a_log_in_page_is_no_file(server, body):
    address = server.put("/w.pth", body)
    with pytest.raises(RunError) as caught:
        get(address)
    assert "a web page instead of the file" in caught.value.where
    assert len(server.requests) == 1 and leftovers() == []


def test_a_log_in_page_costs_nothing_that_was_there(server):
    address = server.put("/w.pth", CONTENT, cuts=[70_000])
    with pytest.raises(RunError):
        get(address, ONCE)
    server.put("/w.pth", b"<html>log in</html>", ranges=False)
    with pytest.raises(RunError, match="could not"):
        get(address)
    server.put("/w.pth", CONTENT)
    assert get(address).read_bytes() == CONTENT
    assert server.ranges()[-1] == "bytes=70000-"


@pytest.mark.parametrize(
    ("body", "how", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", {}, "a Git LFS pointer"),
        (b"", {}, "an empty file"),
        (CONTENT, {"headers": {"Content-Encoding": "gzip"}}, "compressed"),
        (CONTENT, {"answers": [(403, {})]}, "403 Forbidden"),
        (CONTENT, {"answers": [(410, {})]}, "410 Gone"),
        (CONTENT, {"answers": [(204, {})]}, "204 No Content"),
        (CONTENT, {"answers": [(302, {"Location": "file:///etc/hostname"})]}, "302 Found"),
        (
            CONTENT,
            {"answers": [(302, {"Location": "ftp://127.0.0.1/w"})]},
            "from http to ftp is not followed",
        ),
    ],
)
def test_what_is_no_use_is_not_asked_for_again(server, body, how, words):
    address = server.put("/w.pth", body, **how)
    with pytest.raises(RunError) as caught:
        get(address)
    assert words in caught.value.where and len(server.requests) == 1


def test_a_busy_server_is_asked_again(server):
    answers = [(503, {"Retry-After": "0"}), (429, {})]
    address = server.put("/w.pth", CONTENT, answers=answers)
    assert get(address).read_bytes() == CONTENT
    server.put("/v.pth", CONTENT, answers=[(500, {})] * 9)
    with pytest.raises(RunError) as caught:
        get(server.address("/v.pth"))
    assert "500 Internal Server Error" in caught.value.where and len(server.requests) == 6


# --- redirects and secrets ---


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed(server, code):
    address = server.put("/moved", b"", answers=[(code, {"Location": "/w.pth"})] * 2)
    server.put("/w.pth", CONTENT, cuts=[70_000])
    assert get(address).read_bytes() == CONTENT
    assert server.ranges() == [None, None, "bytes=70000-", "bytes=70000-"]


def test_a_circle_of_redirects_ends(server):
    address = server.put("/w.pth", b"", answers=[(302, {"Location": "/w.pth"})] * 30)
    with pytest.raises(RunError):
        get(address)
    assert len(server.requests) < 15


def test_https_is_not_given_up_on_the_way():
    redirects = _Redirects()
    for target in ("http://host/w?key=SECRET", "ftp://host/w", "file:///w"):
        with pytest.raises(Unreachable, match="not followed") as caught:
            redirects.redirect_request(Request("https://host/w"), io.BytesIO(), 302, "", {}, target)
        assert "SECRET" not in str(caught.value)
    for start, target in (("http://host/w", "https://host/w"), ("https://host/w", "https://other/w")):
        followed = redirects.redirect_request(Request(start), io.BytesIO(), 302, "", {}, target)
        assert followed is not None and followed.full_url == target


def test_secrets_are_used_and_never_told(server, capsys):
    server.put("/w.pth", CONTENT, answers=[(503, {})], cuts=[70_000])
    address = server.address("/w.pth", user="me:PASS%21WORD@") + "?token=TOKEN#FRAGMENT"
    told = ""
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            fetch(address, patience=ONCE)
        told += str(caught.value) + everything_written()
    assert fetch(address, patience=ONCE).read_bytes() == CONTENT
    told += "".join(capsys.readouterr()) + everything_written()
    assert f"http://127.0.0.1:{server.port}/w.pth" in told
    assert not [word for word in ("PASS", "WORD", "TOKEN", "FRAGMENT") if word in told]
    assert {headers["authorization"] for _, headers in server.requests} == {"Basic bWU6UEFTUyFXT1JE"}
    assert all(asked == "/w.pth?token=TOKEN" for asked, _ in server.requests)


def everything_written() -> str:
    """Names and content of all files below the user's folders."""
    files = [file for name in ("ZOO_CACHE", "ZOO_HOME") for file in Path(os.environ[name]).rglob("*")]
    return "\n".join(f"{file} {file.read_bytes()!r}" if file.is_file() else str(file) for file in files)


def test_a_password_doesnt_follow_a_redirect(server):
    server.put(
        "/moved",
        b"",
        answers=[(302, {"Location": server.address("/w.pth").replace("127.0.0.1", "localhost")})],
    )
    server.put("/w.pth", CONTENT)
    get(server.address("/moved", user="me:PASS@"))
    assert "authorization" in server.requests[0][1] and "authorization" not in server.requests[1][1]


@pytest.mark.parametrize(
    ("address", "safe"),
    [
        ("https://me:p@ss@host/a/b.pth?token=1#x", "https://host/a/b.pth"),
        ("https://host/a@b/c", "https://host/a@b/c"),
        ("http://me:p?q#r@host/w", "http://host/w"),
        ("file:///a@b/c@d.pth", "file:///a@b/c@d.pth"),
    ],
)
def test_what_is_shown_of_an_address(address, safe):
    assert shown(address) == safe


@pytest.mark.parametrize(
    "address",
    ["ftp://host/w", "w.pth", "https:///w", "file://host", "file://host/w", "file:w", "http://host:99999/w", "http://host/a b", "http://[::1/w",
     "http://me:SECRET@host/\n", "http://höst/w", "data:,x", "http://:80/w"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match="not an address") as caught:
        check_address(address)
    assert "SECRET" not in str(caught.value)
