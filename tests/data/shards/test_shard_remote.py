"""Shards at an address: fetched whole into a bounded cache, with patience, and words for what goes wrong."""

from __future__ import annotations

import io
import logging
import os
import shutil
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from made_shards import pairs, png, shard_folder, write_tar
from PIL import Image

from tiny import image_folder
from zoo.data.folder import open_folder
from zoo.data.loader import view_batches
from zoo.data.open import open_source
from zoo.data.shards import remote
from zoo.data.shards.index import INDEX
from zoo.data.shards.order import order_of
from zoo.data.shards.write import write_shards
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.errors import InputError, RunError

PLAN = ViewPlan((CropSpec(8, 0.3, 1.0),))


class Store(MemoryFileSystem):
    """A store that can refuse, hang and fail, and that counts what is asked."""

    protocol = "teststore"
    store: dict = {}  # noqa: RUF012 - as the base class has it
    asked: list = []  # noqa: RUF012
    trouble = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("teststore://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        Store.asked.append((os.path.basename(path), start, end))
        if Store.trouble is not None:
            Store.trouble(path)
        return super().cat_file(path, start=start, end=end, **kwargs)


@pytest.fixture(autouse=True)
def _fresh(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.01, 0.01))
    fsspec.register_implementation("teststore", Store, clobber=True)
    Store.store.clear()
    Store.asked.clear()
    Store.trouble = None


def put(folder, place="bucket/set"):
    for path in folder.iterdir():
        Store().pipe_file(f"/{place}/{path.name}", path.read_bytes())


@pytest.fixture()
def foreign(tmp_path):
    put(shard_folder(tmp_path))
    return "teststore://bucket/set/{00..02}.tar"


def assert_reads(source, seeds):
    assert len(source) == len(seeds)
    for index, seed in enumerate(seeds):
        assert np.array_equal(source.read(index), np.asarray(Image.open(io.BytesIO(png(seed)))))


def cached():
    return sorted(path.name[9:] for path in remote.cache_home().rglob("*.tar"))


def test_shards_are_fetched_and_read(foreign):
    source = open_source(foreign)
    assert_reads(source, range(15))
    assert source.label(4) == 1
    assert source.stretches.tolist() == [5, 5, 5]
    Store.asked.clear()
    again = open_source(foreign)
    assert_reads(again, range(15))
    assert [name for name, _, _ in Store.asked if name.endswith(".tar")] == []
    assert again.fingerprint() == source.fingerprint()
    assert again.where(0) == "teststore://bucket/set/00.tar: (at byte 0)"
    assert_reads(open_source("teststore://bucket/set/*.tar"), range(15))


def test_with_an_index_beside_them_nothing_is_fetched_before_it_is_read(tmp_path):
    write_shards(open_folder(image_folder(tmp_path / "images", 12)), tmp_path / "shards", count=4)
    put(tmp_path / "shards")
    source = open_source("teststore://bucket/set/{000000..000002}.tar")
    assert len(source) == 12
    assert source.classes == ("class0", "class1")
    assert cached() == []
    local = open_source(str(tmp_path / "shards"))
    for index in (11, 0):
        assert np.array_equal(source.read(index), local.read(index))
    assert cached() == ["000000.tar", "000002.tar"]
    assert source.fingerprint() == local.fingerprint()


def test_a_newer_index_replaces_the_copy(tmp_path):
    images = image_folder(tmp_path / "images", 12)
    write_shards(open_folder(images), tmp_path / "shards", count=4)
    put(tmp_path / "shards")
    assert len(open_source("teststore://bucket/set/{000000..000002}.tar")) == 12
    write_shards(open_folder(images), tmp_path / "others", count=5)
    put(tmp_path / "others")
    Store.asked.clear()
    assert open_source("teststore://bucket/set/{000000..000002}.tar").stretches.tolist() == [5, 5, 2]
    Store.asked.clear()
    open_source("teststore://bucket/set/{000000..000002}.tar")
    assert len(Store.asked) == 2  # its length and its header


def test_large_files_come_in_blocks(foreign, monkeypatch):
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    assert_reads(open_source(foreign), range(15))
    first = [(start, end) for name, start, end in Store.asked if name == "00.tar"]
    size = len(Store.store["/bucket/set/00.tar"].getvalue())
    assert first == [(n, min(n + 4096, size)) for n in range(0, size, 4096)]
    assert len(first) > 2


def test_a_failure_that_passes_is_not_noticed(foreign, monkeypatch):
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    failing = iter([True, True, False] * 1000)

    def trouble(path):
        if path.endswith(".tar") and next(failing):
            raise ConnectionResetError("reset by peer")

    Store.trouble = trouble
    assert_reads(open_source(foreign), range(15))


def test_a_network_that_fails_is_said_and_leaves_no_half_file(foreign, monkeypatch):
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    count = iter(range(1000))

    def trouble(path):
        if path.endswith("01.tar") and next(count) > 1:
            raise ConnectionResetError("reset by peer at https://me:secret@host/x?sig=abc")

    Store.trouble = trouble
    with pytest.raises(RunError, match="network failed 4 times") as caught:
        open_source(foreign)
    assert caught.value.where == "teststore://bucket/set/01.tar"
    assert "secret" not in str(caught.value)
    assert "abc" not in str(caught.value)
    assert cached() == ["00.tar"]
    assert list(remote.cache_home().rglob("*.tmp")) == []
    Store.trouble = None
    assert_reads(open_source(foreign), range(15))


def test_a_network_that_hangs_is_given_up(foreign, monkeypatch):
    monkeypatch.setattr(remote, "_WAIT", 0.05)
    Store.trouble = lambda path: time.sleep(0.5)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no answer within 0\.05 s, 4 times") as caught:
        open_source(foreign)
    assert time.monotonic() - began < 5
    assert "--resume" in caught.value.fix


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("nope"),
        OSError("An error occurred (AccessDenied)"),
        RuntimeError("Unable to locate credentials"),
    ],
)
def test_a_bucket_without_rights(foreign, error):
    def trouble(path):
        raise error

    Store.trouble = trouble
    with pytest.raises(InputError, match="may not be read") as caught:
        open_source(foreign)
    assert caught.value.where == "teststore://bucket/set/00.tar"
    assert "credentials" in caught.value.fix
    assert len([1 for name, _, _ in Store.asked if name == "00.tar"]) == 1  # not asked again and again


def test_what_is_not_there_is_named(foreign):
    with pytest.raises(InputError, match="nothing at this address") as caught:
        open_source("teststore://bucket/set/{00..03}.tar")
    assert caught.value.where == "teststore://bucket/set/03.tar"
    with pytest.raises(InputError, match="matches no shard"):
        open_source("teststore://bucket/other/*.tar")


def test_another_shard_than_the_index_knows(tmp_path):
    write_shards(open_folder(image_folder(tmp_path / "images", 6)), tmp_path / "shards", count=3)
    put(tmp_path / "shards")
    Store().pipe_file("/bucket/set/000001.tar", write_tar(tmp_path / "x.tar", pairs(0, 9)).read_bytes())
    source = open_source("teststore://bucket/set/{000000..000001}.tar")
    source.read(0)
    with pytest.raises(InputError, match="the index knows one of"):
        source.read(3)


def test_a_copy_of_another_size_is_fetched_again(tmp_path):
    write_shards(open_folder(image_folder(tmp_path / "images", 6)), tmp_path / "shards", count=3)
    put(tmp_path / "shards")
    source = open_source("teststore://bucket/set/{000000..000001}.tar")
    expected = source.read(4)
    (copy,) = remote.cache_home().rglob("*000001.tar")
    copy.write_bytes(copy.read_bytes()[:-512])
    source = open_source("teststore://bucket/set/{000000..000001}.tar")
    assert np.array_equal(source.read(4), expected)


def test_what_was_fetched_is_enough_without_a_network(tmp_path, monkeypatch, caplog):
    write_shards(open_folder(image_folder(tmp_path / "images", 6)), tmp_path / "shards", count=3)
    put(tmp_path / "shards")
    address = "teststore://bucket/set/{000000..000001}.tar"
    expected = [open_source(address).read(index) for index in range(6)]

    def trouble(path):
        raise ConnectionError("no network")

    Store.trouble = trouble
    found = open_source(address)
    assert all(np.array_equal(found.read(index), expected[index]) for index in range(6))
    assert "fetched before is used" in caplog.text
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert len(open_source(address)) == 6


def test_addresses_that_nothing_is_known_of():
    with pytest.raises(InputError, match="can't be used"):
        open_source("nosuch://bucket/{0..3}.tar")


def test_the_network_can_be_forbidden(foreign, monkeypatch):
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="ZOO_OFFLINE forbids"):
        open_source(foreign)


def test_the_cache_keeps_to_its_limit(foreign, monkeypatch, tmp_path):
    size = (tmp_path / "00.tar").stat().st_size
    monkeypatch.setenv("ZOO_SHARD_CACHE", str(2 * size + 100))
    source = open_source(foreign)
    assert cached() == ["01.tar", "02.tar"]
    assert_reads(source, range(15))  # 00 is fetched again, 01 goes
    assert len(cached()) == 2
    monkeypatch.setenv("ZOO_SHARD_CACHE", "many")
    with pytest.raises(InputError, match="no size") as caught:
        open_source("teststore://bucket/set/00.tar").read(0)
        shutil.rmtree(remote.cache_home())
        open_source("teststore://bucket/set/00.tar").read(0)
    assert caught.value.where == "ZOO_SHARD_CACHE"


def test_the_next_shards_are_fetched_ahead(tmp_path):
    write_shards(open_folder(image_folder(tmp_path / "images", 24)), tmp_path / "shards", count=2)
    put(tmp_path / "shards")
    source = open_source("teststore://bucket/set/{000000..000011}.tar")
    order = order_of(source, 2, 0)
    order.window = 2
    rows = order.rows(0, 0, order.batches)
    first = next(rows)
    until = time.monotonic() + 20
    while len(cached()) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(cached()) == 4  # this window and the next one
    Store.trouble = lambda path: pytest.fail("it should be there")
    for sample in first.tolist():
        source.read(sample)


def test_several_readers_fetch_a_shard_once(foreign):
    Store.trouble = lambda path: time.sleep(0.05)
    places = [remote.RemoteShards(["teststore://bucket/set/00.tar"]) for _ in range(4)]
    threads = [threading.Thread(target=place.path, args=(0,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _, _ in Store.asked] == ["00.tar"]


class _Quiet(SimpleHTTPRequestHandler):
    answers: dict = {}  # noqa: RUF012 - name -> statuses that it is answered with, before the file itself

    def log_message(self, *args):
        pass

    def send_head(self):
        statuses = self.answers.get(self.path[1:])
        if statuses:
            self.send_error(statuses.pop(0))
            return None
        return super().send_head()


@pytest.fixture()
def web(tmp_path):
    """A web server that knows no parts of files, as Python's own."""
    pytest.importorskip("aiohttp")
    folder = shard_folder(tmp_path / "web")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_over_http(web, monkeypatch, caplog):
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    caplog.set_level(logging.INFO, "zoo")
    assert_reads(open_source(f"{web}/{{00..02}}.tar"), range(15))
    assert "headers of 3 shards" in caplog.text
    with pytest.raises(InputError, match="nothing at this address"):
        open_source(f"{web}/{{02..03}}.tar")
    # Data workers are forked, and may have to fetch by themselves.
    source = open_source(f"{web}/{{00..02}}.tar")
    for path in remote.cache_home().rglob("*.tar"):
        path.unlink()
    order = order_of(source, 5, 0)
    found = view_batches(source, PlannedViews(PLAN), order, first_step=0, last_step=3, workers=1)
    assert sorted(sample for batch in found for sample in batch.ids.tolist()) == list(range(15))
    secret = open_source(f"{web}/00.tar?signature=abc")
    assert "abc" not in secret.name + secret.where(0) + str(secret.fingerprint())
    assert not list(remote.cache_home().rglob(f"fetched-{INDEX}"))


def test_what_a_web_server_refuses_is_no_missing_file(web, monkeypatch):
    """fsspec says "not found" of any answer, where it only asks for the size."""
    monkeypatch.setattr(_Quiet, "answers", {"00.tar": [403] * 99})
    with pytest.raises(InputError, match="may not be read") as caught:
        open_source(f"{web}/{{00..02}}.tar")
    assert caught.value.where == f"{web}/00.tar"
    _Quiet.answers["00.tar"] = [503] * 99
    with pytest.raises(RunError, match=r"network failed 4 times .*503"):
        open_source(f"{web}/{{00..02}}.tar")
    _Quiet.answers["00.tar"] = [503] * 4  # two for each time that the size is asked for
    assert_reads(open_source(f"{web}/{{00..02}}.tar"), range(15))
    assert _Quiet.answers["00.tar"] == []
    with pytest.raises(InputError, match="nothing at this address"):
        open_source(f"{web}/{{02..03}}.tar")
