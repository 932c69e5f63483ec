"""Hubs at any address: a disk, a bucket (in memory here), a web server's folder; with the local hub's promises."""

from __future__ import annotations

import http.server
import threading
from functools import partial

import fsspec
import pytest

import zoo
from zoo.errors import InputError, RunError
from zoo.publishing import AtHub, Plan, publish_to, pull
from zoo.weights.bundle import SUMS
from zoo.weights.hubs.folder import FolderHub, split_address
from zoo.weights.hubs.local import LocalHub
from zoo.weights.hubs.stores import FsspecStore
from zoo.weights.hubs.transport import Patience, Unreachable
from zoo.weights.reference import parse_reference

from .published import assert_clear, command, describe, flip, publish  # noqa: F401

NAME = "me/small"
QUICK = Patience(timeout=5.0, attempts=1, pause=0.0)


@pytest.fixture
def bucket():
    """An object store in memory, empty."""
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/models"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(params=["file", "memory"])
def home(request, tmp_path, bucket):
    return bucket if request.param == "memory" else f"file://{tmp_path}/shared disk/models"


@pytest.fixture
def web(tmp_path):
    """The local hub, shown by a web server."""
    folder = tmp_path / "home" / "hub"
    folder.mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def send(home, seed=0, **how):
    publish(NAME, seed=seed, what=describe(licence="mit"))
    return publish_to(NAME, f"{home}/{NAME}", progress=False, **how)


def load(home, revision=""):
    return zoo.load(f"{home}/{NAME}{revision}", progress=False)


def weights():
    return LocalHub().resolve(NAME).weights_sha256


def test_there_and_back(home, command):  # noqa: F811
    publish(NAME, what=describe(licence="mit"))
    code, out, err = command("publish", NAME, "--to", f"{home}/{NAME}", "--tag", "v1")
    assert code == 0, err
    assert "published" in out and "as v1" in out
    model = load(home, "@v1")
    assert model.zoo_info["weights_sha256"] == weights()
    assert model.zoo_info["reference"].startswith("hub:")
    done = pull(f"{home}/{NAME}@v1", name="me/copy", progress=False)
    assert LocalHub().refs("me/copy")["v1"] == done.revision == model.zoo_info["revision"]
    for words in ("verify", "show"):
        code, _, err = command(words, f"{home}/{NAME}")
        assert code == 0, err


def test_a_model_is_pulled_under_another_name(home, command):  # noqa: F811
    publish(NAME, what=describe(licence="mit"))
    send(home)
    code, out, err = command("pull", f"{home}/{NAME}", "--name", "me/other")
    assert code == 0 and "is me/other@" in out, err
    assert LocalHub().resolve("me/other").weights_sha256 == weights()
    assert_clear(command("pull", f"{home}/{NAME}", "--name", "../x"), "org/name")
    assert LocalHub().names() == ["me/other", NAME]


def test_publishing_again_sends_nothing(home, monkeypatch):
    first = send(home)
    monkeypatch.setattr(FsspecStore, "put", None)
    again = send(home)
    assert isinstance(again, AtHub) and (again.revision, again.new, again.moved) == (
        first.revision,
        False,
        False,
    )


def test_revisions_stay_latest_moves_and_tags_don_t(home):
    first = send(home, tag="v1")
    old = load(home, "@v1").zoo_info["weights_sha256"]
    assert isinstance(send(home, seed=1, dry_run=True), Plan)
    with pytest.raises(InputError, match="tags don't move"):
        send(home, seed=1, tag="v1")
    second = send(home, seed=1)
    assert load(home).zoo_info["revision"] == second.revision
    assert load(home, f"@{first.revision}").zoo_info["weights_sha256"] == old
    send(home, seed=1, tag="v1", force=True)
    assert load(home, "@v1").zoo_info["revision"] == second.revision
    with pytest.raises(InputError, match="no such revision") as caught:
        load(home, "@v7")
    assert "latest, v1" in caught.value.fix
    with pytest.raises(InputError, match="A tag is"):
        send(home, tag="latest")


def test_a_fetched_revision_needs_nobody(home, monkeypatch):
    done = send(home, tag="v1")
    load(home, "@v1")
    monkeypatch.setattr(FsspecStore, "get", None)
    assert load(home, "@v1").zoo_info["revision"] == done.revision
    monkeypatch.setattr(FsspecStore, "read", None)
    load(home, f"@{done.revision}")


@pytest.mark.parametrize("fails", [0, 3, 4])
def test_what_failed_goes_on_and_is_seen_by_nobody_before(home, monkeypatch, fails):
    """The store fails at the first file, in the middle, and at the list of hashes, which comes last."""
    send(home)
    before = load(home).zoo_info["revision"]
    real, sent = FsspecStore.put, []

    def put(self, source, path):
        if len(sent) == fails:
            raise RunError("the store failed", where=path)
        sent.append(path)
        real(self, source, path)

    monkeypatch.setattr(FsspecStore, "put", put)
    with pytest.raises(RunError):
        send(home, seed=1)
    assert load(home).zoo_info["revision"] == before
    fails, first = 99, list(sent)
    sent.clear()
    done = send(home, seed=1)
    assert not set(first) & set(sent), "a file was sent twice"
    assert len(first) + len(sent) == 5
    assert sent[-1].endswith(SUMS)
    assert load(home).zoo_info["revision"] == done.revision


def test_a_damaged_file_there_is_not_used(tmp_path):
    home = f"file://{tmp_path}/disk"
    done = send(home)
    flip(tmp_path / "disk" / NAME / "revisions" / done.revision / "model.safetensors")
    with pytest.raises(InputError, match="not what was published"):
        load(home)
    assert FolderHub(home)._kept.revisions(NAME) == []
    config = tmp_path / "disk" / NAME / "revisions" / done.revision / "config.json"
    config.unlink()
    with pytest.raises(InputError, match="not whole") as caught:
        load(home)
    assert "publish it again" in caught.value.fix
    send(home)
    assert config.is_file(), "what was lost is sent again"
    with pytest.raises(InputError, match="not what was published") as caught:
        load(home)
    assert "--force" in caught.value.fix
    send(home, force=True)
    load(home)


def test_a_damaged_copy_in_the_cache_is_fetched_again(web, monkeypatch, tmp_path):
    publish(NAME)
    for address, heals in ((f"hub:{web}", False), (f"file://{tmp_path}/home/hub", True)):
        load(address)
        (sums,) = FolderHub(address.removeprefix("hub:"))._kept.home.rglob(SUMS)
        sums.write_text("nothing\n")
        if heals:  # a disk is no network
            monkeypatch.setenv("ZOO_OFFLINE", "1")
        load(address)
        assert sums.read_text() != "nothing\n"


def test_a_cache_that_can_t_be_written(monkeypatch, tmp_path):
    home = f"file://{tmp_path}/disk"
    send(home)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(RunError, match="Not a directory") as caught:
        load(home)
    assert str(tmp_path / "file") in caught.value.where


def test_a_place_that_isn_t_there_and_can_t_be_made(command):  # noqa: F811
    publish(NAME, what=describe(licence="mit"))
    answer = command("publish", NAME, "--to", f"file:///proc/nothing/{NAME}")
    assert answer[0] == 1 and "Sending failed" in answer[2] and "/proc/nothing/me/small" in answer[2]
    assert "unexpected" not in answer[2]


def test_a_publisher_whose_tags_were_overwritten_writes_them_again(bucket, monkeypatch):
    send(bucket)
    real, others = FsspecStore.write, []

    def write(self, path, content):
        real(self, path, content)
        if not others:
            others.append(path)
            real(self, path, b'{"schema": 1, "tags": {"theirs": "0123456789abcdef"}}')

    monkeypatch.setattr(FsspecStore, "write", write)
    done = send(bucket, seed=1, tag="v2")
    tags = FolderHub(bucket)._tags(FsspecStore(bucket), NAME)
    assert tags == {"theirs": "0123456789abcdef", "latest": done.revision, "v2": done.revision}


# --- a web server's folder ---


def test_a_web_servers_folder_is_a_hub_to_read(web, monkeypatch, tmp_path):
    done = publish(NAME, tag="v1")
    reference = f"hub:{web}/{NAME}@v1"
    model = zoo.load(reference, progress=False)
    assert model.zoo_info["revision"] == done.revision
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert zoo.load(reference, progress=False).zoo_info["revision"] == done.revision
    with pytest.raises(InputError, match="ZOO_OFFLINE forbids"):
        zoo.load(f"hub:{web}/me/other", progress=False)
    monkeypatch.delenv("ZOO_OFFLINE")
    with pytest.raises(InputError, match="no such model"):
        zoo.load(f"hub:{web}/me/other", progress=False)
    with pytest.raises(InputError, match="no such model"):
        zoo.load(f"file://{tmp_path}/home/hub/me/smal@v1", progress=False)
    with pytest.raises(InputError, match="Only published models") as caught:
        pull(f"{web}/{NAME}", progress=False)
    assert f"hub:{web}/{NAME}" in caught.value.fix


def test_a_web_server_s_folder_is_not_published_to():
    publish(NAME, what=describe(licence="mit"))
    with pytest.raises(InputError, match="can only be read") as caught:  # nobody is asked
        publish_to(NAME, f"http://127.0.0.1:9/{NAME}", progress=False)
    assert "s3://" in caught.value.fix


def test_a_web_server_that_is_gone_is_as_good_as_offline_if_the_cache_has_it(web, monkeypatch, caplog):
    with pytest.raises(RunError, match="can't be fetched"):
        FolderHub("http://127.0.0.1:9", QUICK, progress=False).fetch(NAME)
    publish(NAME, tag="v1")
    hub = FolderHub(web, QUICK, progress=False)
    found = hub.fetch(NAME, "v1").path

    def gone(*_, **__):
        raise Unreachable("the connection failed")

    monkeypatch.setattr("zoo.weights.hubs.stores.get", gone)
    assert hub.fetch(NAME, "v1").path == found
    assert "meant last" in caplog.text
    with pytest.raises(InputError, match="no such revision"):
        hub.fetch(NAME, "v2")


# --- bad addresses ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://bucket", "ADDRESS/org/name"),
        ("s3://me/small", "ADDRESS/org/name"),
        ("hub:me/small", "ADDRESS/org/name"),
        ("hub:", "ADDRESS/org/name"),
        ("s3://bucket/x/../small", "org/name"),
        ("memory://bucket/me/.hidden", "org/name"),
    ],
)
def test_an_address_of_no_model(text, words):
    with pytest.raises(InputError) as caught:
        parse_reference(text)
    assert words in str(caught.value)


def test_a_kind_of_store_that_isn_t_there(command):  # noqa: F811
    publish(NAME, what=describe(licence="mit"))
    assert_clear(command("publish", NAME, "--to", "nonsense://bucket/models/me/small"), "nonsense://")
    answer = command("publish", NAME, "--to", "s3://bucket/models/me/small")
    if "s3fs" not in answer[2]:
        pytest.skip("s3fs is installed")
    assert_clear(answer, "pip install s3fs")


def test_secrets_of_an_address_are_not_shown(tmp_path):
    address, name, revision = split_address("sftp://me:secret@host/models/me/small@v1")
    assert (name, revision) == (NAME, "v1") and "secret" in address
    reference = parse_reference("sftp://me:secret@host/models/me/small@v1")
    assert "secret" not in str(reference) and "secret" not in FolderHub(address).shown


def test_a_file_by_its_address_is_still_a_file(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"x")
    assert parse_reference(f"file://{file}").kind == "file"
    assert parse_reference(f"url:file://{file}").kind == "url"
