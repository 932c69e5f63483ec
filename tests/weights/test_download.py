"""Downloads from a real server with real faults: whole or not at all, and gone on with where possible."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiny import ROOT
from zoo.errors import RunError
from zoo.weights.catalog import Remote
from zoo.weights.hubs.transport import Patience
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


def test_a_file_is_fetched_once(server):
    address = server.put("/models/weights.pth", CONTENT)
    path = get(address)
    assert path.read_bytes() == CONTENT and path.name == "weights.pth" and cache() in path.parents
    assert leftovers() == []
    assert get(address) == path
    assert len(server.requests) == 1
    assert server.requests[0][1]["accept-encoding"] == "identity"


def test_a_file_of_the_catalog_lies_under_its_own_name(server):
    address = server.put("/x", CONTENT)
    assert get(Remote("weights.pth.tar", (address,))) == cache() / "weights.pth.tar"


def test_addresses_with_one_base_name_are_kept_apart(server):
    one, two = server.put("/a/w.pth", CONTENT), server.put("/b/w.pth", OTHER)
    assert get(one).read_bytes() == CONTENT and get(two).read_bytes() == OTHER
    server.files["/c"] = server.files["/a/w.pth"]
    first, second = get(server.address("/c?id=1")), get(server.address("/c?id=2"))
    assert first != second and first.read_bytes() == CONTENT
    assert len(server.requests) == 4


@pytest.mark.parametrize("path", ["/..", "/a/%2e%2e%2fescape", "/.hidden", "/", "", "/%00x", "/a%20b"])
def test_no_name_leads_out_of_the_cache(server, path):
    server.put(path.split("?")[0] or "/", CONTENT)
    found = get(server.address(path))
    assert found.parent.parent == cache() and not found.name.startswith(".") and "/" not in found.name


# --- connections that end, stall and go on ---


def test_what_is_cut_off_goes_on_where_it_ended(server):
    address = server.put("/w.pth", CONTENT, cuts=[70_000, 50_000])
    assert get(address).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=70000-", "bytes=120000-"]
    assert {headers["if-range"] for _, headers in server.requests[1:]} == {server.files["/w.pth"].tag}


def test_a_server_without_ranges_starts_again(server):
    address = server.put("/w.pth", CONTENT, ranges=False, cuts=[70_000])
    assert get(address).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_without_a_mark_of_the_file_nothing_is_gone_on_with(server):
    address = server.put("/w.pth", CONTENT, etag=False, cuts=[70_000])
    assert get(address).read_bytes() == CONTENT
    assert server.ranges() == [None, None]


def test_a_date_marks_the_file_too(server):
    headers = {"Last-Modified": "Wed, 21 Oct 2020 07:28:00 GMT"}
    address = server.put("/w.pth", CONTENT, etag=False, checks=False, cuts=[70_000], headers=headers)
    assert get(address).read_bytes() == CONTENT
    assert server.requests[1][1]["if-range"] == headers["Last-Modified"]


@pytest.mark.parametrize("checks", [True, False], ids=["heeds If-Range", "ignores If-Range"])
@pytest.mark.parametrize("size", [len(OTHER), 30_000], ids=["as long", "shorter"])
def test_a_file_that_changed_starts_anew(server, checks, size):
    address = server.put("/w.pth", CONTENT, cuts=[70_000])
    with pytest.raises(RunError, match="could not be downloaded"):
        get(address, ONCE)
    assert len(leftovers()) == 2
    server.put("/w.pth", OTHER[:size], checks=checks)
    assert get(address).read_bytes() == OTHER[:size]
    assert server.ranges()[1] == "bytes=70000-"
    assert leftovers() == []


def test_a_part_of_one_mirror_is_not_gone_on_with_at_another(server):
    first = server.put("/one/w.pth", OTHER, cuts=[70_000])
    second = server.put("/two/w.pth", CONTENT)
    assert get(Remote("w.pth", (first, second)), ONCE).read_bytes() == CONTENT
    assert server.ranges() == [None, None]


def test_a_file_that_always_ends_early_is_given_up(server):
    address = server.put("/w.pth", CONTENT, cuts=[70_000, 0, 0, 0, 0])
    with pytest.raises(RunError, match=r"w\.pth could not be downloaded") as caught:
        get(address)
    assert len(server.requests) == 3
    assert "stopped after 70000 of 192000 bytes" in caught.value.where
    assert not list(cache().rglob("*.pth"))


def test_a_server_that_never_gets_further_is_given_up_even_if_it_starts_anew(server):
    address = server.put("/w.pth", CONTENT, ranges=False, cuts=[70_000] * 20)
    with pytest.raises(RunError):
        get(address)
    assert len(server.requests) == 3


def test_a_stalled_connection_is_left_and_gone_on_with(server):
    address = server.put("/w.pth", CONTENT, cuts=[70_000], stalls=True)
    began = time.monotonic()
    assert get(address, Patience(timeout=0.3, attempts=2, pause=0.01)).read_bytes() == CONTENT
    assert time.monotonic() - began < 5
    assert server.ranges() == [None, "bytes=70000-"]


def test_a_stalled_server_is_named(server):
    address = server.put("/w.pth", CONTENT, delay=20.0)
    with pytest.raises(RunError) as caught:
        get(address, Patience(timeout=0.2, attempts=2, pause=0.01))
    assert f"{address}: nothing came for too long" in caught.value.where


def test_no_one_is_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RunError) as caught:
        get(f"http://127.0.0.1:{port}/w.pth")
    assert "the connection failed (Connection refused)" in caught.value.where


def test_without_a_size_the_end_is_the_end(server):
    address = server.put("/w.pth", CONTENT, length=False)
    assert get(address).read_bytes() == CONTENT


CLIENT = """
import sys
from zoo.weights.hubs.transport import Patience
from zoo.weights.hubs.url import fetch
print(fetch(sys.argv[1], progress=False, patience=Patience(timeout=30.0, attempts=1, pause=0.01)))
"""


def client(address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, address], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_client_is_gone_on_with(server):
    address = server.put("/w.pth", CONTENT, cuts=[150_000], stalls=True)
    with client(address) as running:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not any(
            part.stat().st_size == 150_000 for part in cache().rglob(".*.part")
        ):
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
    assert get(address).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=150000-"]


def test_one_that_was_killed_just_before_the_end_asks_for_nothing(server):
    address = server.put("/w.pth", CONTENT, cuts=[150_000])
    with pytest.raises(RunError):
        get(address, ONCE)
    (part,) = cache().rglob(".*.part")
    with part.open("ab") as file:
        file.write(CONTENT[150_000:])
    assert get(address).read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_two_processes_download_once(server):
    address = server.put("/w.pth", CONTENT, delay=1.0)
    with client(address) as one, client(address) as two:
        paths = {process.communicate(timeout=60)[0] for process in (one, two)}
    assert one.returncode == two.returncode == 0 and len(paths) == 1
    assert Path(paths.pop().strip()).read_bytes() == CONTENT
    assert len(server.requests) == 1


# --- disks ---


def test_a_disk_without_room_is_told_before_anything_is_written(server, monkeypatch):
    address = server.put("/w.pth", CONTENT)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(RunError, match=r"needs 0\.2 MB, and 0\.1 MB are free") as caught:
        get(address)
    assert "ZOO_CACHE" in caught.value.fix
    assert not [part for part in cache().rglob("*.part") if part.stat().st_size]


def test_what_is_there_needs_no_room_again(server, monkeypatch):
    address = server.put("/w.pth", CONTENT, cuts=[150_000])
    with pytest.raises(RunError):
        get(address, ONCE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    assert get(address).read_bytes() == CONTENT


def test_a_disk_that_fails_leaves_nothing_under_the_name(server):
    """A limit on the size of files, which the system enforces as it does a full disk."""
    address = server.put("/w.pth", CONTENT)
    code = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from zoo.errors import RunError\nfrom zoo.weights.hubs.url import fetch\n"
        "try:\n    fetch(sys.argv[1], progress=False)\nexcept RunError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Writing a download failed: File too large" in done.stdout, done.stderr
    assert [file.name for file in cache().rglob("*.pth")] == []
    assert get(address).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=100000-"]


def test_a_cache_that_cant_be_written_is_told(server, tmp_path, monkeypatch):
    address = server.put("/w.pth", CONTENT)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(RunError, match="Preparing a download failed"):
        get(address)
    assert server.requests == []


# --- what people see ---


def test_progress_is_a_line_on_standard_error(server, capsys):
    address = server.put("/w.pth", CONTENT)
    fetch(address)
    assert capsys.readouterr() == ("", f"fetching w.pth from 127.0.0.1:{server.port}\n")
    fetch(address)
    get(server.put("/v.pth", CONTENT))
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(server):
    address = server.put("/w.pth", CONTENT)
    code = "import sys\nfrom zoo.weights.hubs.url import fetch\nfetch(sys.argv[1])\n"
    main, other = pty.openpty()
    with os.fdopen(main, "rb", buffering=0) as terminal:
        with os.fdopen(other, "wb") as end:
            done = subprocess.run(
                [sys.executable, "-c", code, address], cwd=ROOT, stdout=subprocess.PIPE, stderr=end,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}, timeout=60, check=True,
            )  # fmt: skip
        seen = terminal.read(100_000).decode(errors="replace")
    assert "w.pth from 127.0.0.1" in seen and "192" in seen
    assert done.stdout == b""


def test_what_is_written_down_of_a_download(server):
    address = server.put("/w.pth", CONTENT)
    get(address)
    (entry,) = json.loads((Path(os.environ["ZOO_HOME"]) / "lock.json").read_text())["pins"].items()
    assert entry[0] == entry[1]["from"] == address
    assert entry[1]["sha256"] == hashlib.sha256(CONTENT).hexdigest() and entry[1]["size"] == len(CONTENT)
