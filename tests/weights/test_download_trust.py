"""What a download must be: the published file, the one of the first time, from wherever the user says."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiny import ROOT
from zoo.errors import InputError, RunError
from zoo.weights import lock
from zoo.weights.catalog import Remote, find_card
from zoo.weights.hubs.transport import Patience
from zoo.weights.hubs.url import fetch

from .file_server import direct, serving
from .published import flip

CONTENT = hashlib.sha256(b"weights").digest() * 3000
OTHER = hashlib.sha256(b"others").digest() * 3000
SHA256, OTHER_SHA256 = hashlib.sha256(CONTENT).hexdigest(), hashlib.sha256(OTHER).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()
QUICK = Patience(timeout=5.0, attempts=2, pause=0.01)


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    direct(monkeypatch)


@pytest.fixture
def server():
    with serving() as server:
        yield server


def get(what, **arguments):
    return fetch(what, progress=False, patience=QUICK, **arguments)


def downloads() -> Path:
    return Path(os.environ["ZOO_CACHE"]) / "downloads"


def clean_the_cache() -> None:
    shutil.rmtree(os.environ["ZOO_CACHE"])


def pins() -> dict[str, dict[str, object]]:
    return json.loads(lock.lock_path().read_text())["pins"]


# --- what the publisher states ---


@pytest.mark.parametrize(
    "stated", [{"md5": MD5[:8]}, {"sha256": SHA256[:8]}, {"sha256": SHA256}, {"size": len(CONTENT)}]
)
def test_what_is_stated_is_checked(server, stated):
    wrong, right = server.put("/wrong/w.pth", OTHER + b"x"), server.put("/right/w.pth", CONTENT)
    with pytest.raises(InputError, match=r"w\.pth is not the file that was published") as caught:
        get(Remote("w.pth", (wrong,), **stated))
    assert wrong in caught.value.where and str(next(iter(stated.values()))) in caught.value.where
    assert not (downloads() / "w.pth").exists() and not lock.lock_path().exists()
    assert get(Remote("w.pth", (wrong, right), **stated)).read_bytes() == CONTENT
    assert pins()["w.pth"]["sha256"] == SHA256 and pins()["w.pth"]["from"] == right


def test_mirrors_are_tried_in_order_and_all_failures_are_named(server):
    missing, wrong = server.address("/missing/w.pth"), server.put("/wrong/w.pth", OTHER)
    page, right = server.put("/page/w.pth", b"<html>"), server.put("/right/w.pth", CONTENT)
    with pytest.raises(InputError) as caught:
        get(Remote("w.pth", (missing, wrong, page), md5=MD5[:8]))
    for address, words in ((missing, "404 Not Found"), (wrong, "its MD5 is"), (page, "a web page")):
        assert f"{address}: " in caught.value.where and words in caught.value.where
    assert get(Remote("w.pth", (missing, wrong, page, right), md5=MD5[:8])).read_bytes() == CONTENT
    with pytest.raises(RunError, match="could not be downloaded") as caught:
        get(Remote("v.pth", (missing, page)))
    assert "404 Not Found" in caught.value.where and "ZOO_MIRROR" in caught.value.fix


# --- trust on first use ---


def test_later_downloads_must_be_the_first_one(server):
    address = server.put("/w.pth", CONTENT)
    remote = Remote("w.pth", (address,))
    get(remote)
    clean_the_cache()
    server.put("/w.pth", OTHER)
    with pytest.raises(InputError, match="not the file that was downloaded first") as caught:
        get(remote)
    told = str(caught.value)
    assert SHA256 in told and OTHER_SHA256 in told and "'w.pth'" in told and str(lock.lock_path()) in told
    assert not (downloads() / "w.pth").exists()
    # As the message says: without the entry the new file is the first one.
    content = json.loads(lock.lock_path().read_text())
    del content["pins"]["w.pth"]
    lock.lock_path().write_text(json.dumps(content))
    assert get(remote).read_bytes() == OTHER and pins()["w.pth"]["sha256"] == OTHER_SHA256


def test_another_mirror_may_have_the_first_one(server):
    first = server.put("/w.pth", CONTENT)
    get(Remote("w.pth", (first,)))
    clean_the_cache()
    server.put("/w.pth", OTHER)
    second = server.put("/second/w.pth", CONTENT)
    assert get(Remote("w.pth", (first, second))).read_bytes() == CONTENT


def test_the_pins_survive_the_cache_and_live_beside_the_hub(server):
    get(Remote("w.pth", (server.put("/w.pth", CONTENT),)))
    assert lock.lock_path() == Path(os.environ["ZOO_HOME"]) / "lock.json"
    clean_the_cache()
    assert lock.pinned("w.pth") == SHA256 and lock.pinned("v.pth") is None


def test_a_damaged_file_in_the_cache_is_fetched_again(server, caplog):
    address = server.put("/w.pth", CONTENT)
    path = get(address)
    flip(path)
    with caplog.at_level(logging.WARNING, "zoo"):
        assert get(address).read_bytes() == CONTENT
    assert "damaged" in caplog.text and SHA256 in caplog.text
    assert len(server.requests) == 2


def test_a_damaged_file_is_gone_before_it_can_be_trusted(server):
    remote = Remote("w.pth", (server.put("/w.pth", CONTENT),))
    path = get(remote)
    flip(path)
    server.put("/w.pth", OTHER)
    with pytest.raises(InputError):
        get(remote)
    lock.lock_path().unlink()
    assert get(remote).read_bytes() == OTHER


def test_a_damaged_file_offline_is_told_and_kept(server, monkeypatch):
    path = get(Remote("w.pth", (server.put("/w.pth", CONTENT),)))
    flip(path)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="damaged in the cache, and ZOO_OFFLINE forbids") as caught:
        get(Remote("w.pth", (server.address("/w.pth"),)))
    damaged = hashlib.sha256(path.read_bytes()).hexdigest()
    assert SHA256 in caught.value.where and damaged in caught.value.where
    assert "unset ZOO_OFFLINE" in caught.value.fix
    assert "lock.json" not in caught.value.fix  # a damaged file is nothing to trust


def test_a_receipt_saves_the_hashing_and_verify_does_it_all_the_same(server):
    address = server.put("/w.pth", CONTENT)
    path = get(address)
    (receipt,) = (Path(os.environ["ZOO_CACHE"]) / "receipts").iterdir()
    told = json.loads(receipt.read_text())
    assert told["sha256"] == SHA256
    receipt.write_text(json.dumps({**told, "sha256": OTHER_SHA256}))
    # Were the file hashed, the wrong receipt would do no harm.
    assert lock.file_sha256(path) == OTHER_SHA256
    assert lock.file_sha256(path, full=True) == SHA256
    assert lock.file_sha256(path) == SHA256
    receipt.write_text("{")
    assert get(address) == path and len(server.requests) == 1
    receipt.write_text(json.dumps({**told, "sha256": OTHER_SHA256}))
    assert get(address, verify=True) == path and len(server.requests) == 1


def test_a_file_in_the_cache_that_nobody_pinned_is_checked_and_pinned(server):
    address = server.put("/w.pth", CONTENT)
    remote = Remote("w.pth", (address,), md5=MD5[:8])
    downloads().mkdir(parents=True)
    (downloads() / "w.pth").write_bytes(CONTENT)
    assert get(remote).read_bytes() == CONTENT
    assert server.requests == [] and pins()["w.pth"]["sha256"] == SHA256
    lock.lock_path().unlink()
    (downloads() / "w.pth").write_bytes(OTHER)
    assert get(remote).read_bytes() == CONTENT and len(server.requests) == 1


def test_writers_of_pins_dont_lose_one_anothers(tmp_path):
    threads = [threading.Thread(target=lock.pin, args=(f"w{i}", SHA256, 1, "here")) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pins()) == sorted(f"w{i}" for i in range(12))
    assert lock.pin("w0", OTHER_SHA256, 1, "there") == SHA256
    assert pins()["w0"]["from"] == "here"


def test_processes_that_pin_at_once_agree():
    code = (
        "import hashlib, sys\nfrom zoo.weights.lock import pin\n"
        "for i in range(20):\n    print(pin(f'w{i}', hashlib.sha256(sys.argv[1].encode()).hexdigest(), 1, 'x'))\n"
    )
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen([*command, str(i)], cwd=ROOT, stdout=subprocess.PIPE) for i in range(2)]
    assert len({process.communicate(timeout=60)[0] for process in running}) == 1
    assert len(pins()) == 20


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"pins": {}}', '{"schema": 2, "pins": {}}', '{"schema": 1, "pins": {"w": {"sha256": "12"}}}',
     '{"schema": 1, "pins": {"w": 3}}', '{"schema": 1}', "\udcff"],
)  # fmt: skip
def test_a_damaged_list_of_pins_is_no_list(server, text):
    lock.lock_path().parent.mkdir(parents=True, exist_ok=True)
    lock.lock_path().write_text(text, errors="surrogateescape")
    address = server.put("/w.pth", CONTENT)
    with pytest.raises(InputError, match="pinned downloads can't be read") as caught:
        get(address)
    assert str(lock.lock_path()) in caught.value.where
    assert server.requests == []


def test_a_home_that_cant_be_written_is_told(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "file"))
    with pytest.raises((RunError, InputError)) as caught:
        get(server.put("/w.pth", CONTENT))
    assert str(tmp_path / "file") in caught.value.where
    assert not list(downloads().rglob("*.pth"))


# --- the user's own mirrors, and no network ---


def test_a_folder_of_ones_own_comes_first(server, tmp_path, monkeypatch):
    folder = tmp_path / "my weights"
    folder.mkdir()
    (folder / "w.pth").write_bytes(CONTENT)
    monkeypatch.setenv("ZOO_MIRROR", str(folder))
    path = get(Remote("w.pth", (server.put("/w.pth", OTHER),)))
    assert path.read_bytes() == CONTENT and downloads() in path.parents and server.requests == []
    assert get(Remote("v.pth", (server.put("/v.pth", OTHER),))).read_bytes() == OTHER


def test_several_mirrors_of_ones_own(server, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "u.pth").write_bytes(CONTENT)
    server.put("/mirror/v.pth", CONTENT)
    secret = server.address("/mirror/", user="me:PASS@") + "?key=1"
    monkeypatch.setenv("ZOO_MIRROR", f"{tmp_path / 'a'}  {secret} {(tmp_path / 'b').as_uri()}")
    for name in ("u.pth", "v.pth", "w.pth"):
        remote = Remote(name, (server.put(f"/publisher/{name}", OTHER),))
        assert get(remote).read_bytes() == (OTHER if name == "w.pth" else CONTENT)
    assert [path for path, _ in server.requests] == [
        "/mirror/v.pth?key=1", "/mirror/w.pth?key=1", "/publisher/w.pth",
    ]  # fmt: skip
    with pytest.raises(RunError) as caught:
        get(Remote("x.pth"))
    for place in (tmp_path / "a" / "x.pth", server.address("/mirror/x.pth"), tmp_path / "b" / "x.pth"):
        assert str(place) in caught.value.where
    assert "PASS" not in str(caught.value)


def test_mirrors_are_for_the_catalogs_files(server, tmp_path, monkeypatch):
    (tmp_path / "w.pth").write_bytes(OTHER)
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    assert get(server.put("/w.pth", CONTENT)).read_bytes() == CONTENT


def test_a_mirror_that_is_no_address_is_refused(monkeypatch):
    monkeypatch.setenv("ZOO_MIRROR", "s3://bucket/models")
    with pytest.raises(InputError, match="not an address") as caught:
        get(Remote("w.pth"))
    assert caught.value.where == "ZOO_MIRROR: s3://bucket/models"


def test_a_file_address_works_like_any_other(tmp_path):
    source = tmp_path / "a b" / "w.pth"
    source.parent.mkdir()
    source.write_bytes(CONTENT)
    path = get(source.as_uri())
    assert path.read_bytes() == CONTENT and path != source
    source.unlink()
    assert get(source.as_uri()) == path
    with pytest.raises(RunError) as caught:
        get((tmp_path / "none.pth").as_uri())
    assert "No such file" in caught.value.where
    (tmp_path / "page.pth").write_bytes(b"<html>")
    (tmp_path / "empty.pth").write_bytes(b"")
    for name, words in ((".", "can't be read"), ("page.pth", "a web page"), ("empty.pth", "an empty file")):
        with pytest.raises(RunError) as caught:
            get((tmp_path / name).as_uri())
        assert words in caught.value.where


@pytest.mark.parametrize("variable", ["ZOO_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_asks_nobody(server, tmp_path, monkeypatch, variable):
    kept, wanted = server.put("/kept.pth", CONTENT), server.put("/wanted.pth", CONTENT)
    path = get(kept)
    monkeypatch.setenv(variable, "1")
    assert get(kept) == path
    with pytest.raises(InputError, match=f"not in the cache, and {variable} forbids the network") as caught:
        get(wanted)
    assert wanted in caught.value.where and variable in caught.value.fix
    assert len(server.requests) == 1
    (tmp_path / "w.pth").write_bytes(CONTENT)
    monkeypatch.setenv("ZOO_MIRROR", f"{server.address('/')} {tmp_path}")
    assert get(Remote("w.pth", (wanted,))).read_bytes() == CONTENT
    monkeypatch.setenv(variable, "0")
    assert get(wanted).read_bytes() == CONTENT


def test_once_cached_no_network_is_touched(server, monkeypatch):
    import socket

    address = server.put("/w.pth", CONTENT)
    path = get(address)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    assert get(address) == path


def test_what_is_in_the_cache_needs_no_place_to_write(server):
    """Such as a shared cache, or a home where nothing can be written any more."""
    remote = Remote("w.pth", (server.put("/w.pth", CONTENT),))
    path = get(remote)
    folders = [Path(os.environ[name]) for name in ("ZOO_CACHE", "ZOO_HOME")]
    for lock_file in [file for folder in folders for file in folder.rglob(".*.lock")]:
        lock_file.unlink()
    before = {file: file.stat().st_mtime_ns for folder in folders for file in folder.rglob("*")}
    assert get(remote) == path
    assert before == {file: file.stat().st_mtime_ns for folder in folders for file in folder.rglob("*")}


def test_the_catalogs_hashes_are_heeded(tmp_path, monkeypatch):
    card = find_card("moco_v2_resnet50.800ep")
    (tmp_path / card.file.name).write_bytes(CONTENT)
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="is not the file that was published") as caught:
        get(card)
    assert f"its MD5 is {MD5}, and the publisher's begins with a04e12f8" in caught.value.where
    assert f"{card.file.mirrors[0]}: not asked, for ZOO_OFFLINE is set" in caught.value.where


def test_storage_that_is_gone_is_said_to_be(tmp_path, monkeypatch):
    card = find_card("amdim_medium.in128")
    with pytest.raises(InputError, match="its publisher's storage is gone") as caught:
        get(card)
    assert "amdimmodels.blob.core.windows.net" in caught.value.where
    assert "ZOO_MIRROR" in caught.value.fix and "path of a copy" in caught.value.fix
    (tmp_path / card.file.name).write_bytes(CONTENT)
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    assert get(card).read_bytes() == CONTENT
