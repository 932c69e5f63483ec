"""``hf:org/name[@revision]``: resolved, fetched by the hub's real client, checked, and there without network."""

from __future__ import annotations

import errno
import os
import shutil
import socket

import pytest
import torch

import zoo
from zoo.errors import InputError, RunError
from zoo.publishing import pull
from zoo.weights.bundle import SUMS
from zoo.weights.hubs.hf_client import Client
from zoo.weights.hubs.hf_download import cache_folder, fetch_model
from zoo.weights.hubs.hf_refused import Refused, hub_httpx
from zoo.weights.hubs.local import LocalHub
from zoo.weights.reference import parse_reference

from .hub_state import TOKEN, Fault
from .hub_world import HF, NAME, ONCE, QUICK, forget, model, send, settle
from .published import command, flip  # noqa: F401

X = torch.randn(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def commits(server, tmp_path_factory):
    """Two published models: files of each commit, made once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("publisher")
        for variable in ("ZOO_HOME", "ZOO_CACHE"):
            patch.setenv(variable, str(folder / variable))
        settle(patch, server, folder)
        model(0)
        send(tag="v1")
        model(1)
        send()
        return server.repos[NAME]


@pytest.fixture
def hub(server, commits, monkeypatch, tmp_path):
    """The server with both, and an empty cache."""
    settle(monkeypatch, server, tmp_path)
    server.repos = {NAME: commits}
    commits.gated = commits.private = False
    return server


def fetch(revision=None, **how):
    return fetch_model(NAME, revision, **{"progress": False, "patience": QUICK, **how})


def commit(hub, revision="main"):
    return hub.commit_of(hub.repos[NAME], revision)


# --- what it is good for ---


def test_a_tag_a_branch_and_a_commit_are_loaded(hub):
    v1, main = (zoo.load(f"{HF}{revision}", progress=False) for revision in ("@v1", ""))
    by_commit = zoo.load(f"{HF}@{commit(hub, 'v1')}", progress=False)
    assert v1.zoo_info["revision"] == by_commit.zoo_info["revision"] == commit(hub, "v1")
    assert main.zoo_info["revision"] == commit(hub) != commit(hub, "v1")
    assert torch.equal(v1.eval()(X), by_commit.eval()(X))
    assert not torch.equal(v1(X), main.eval()(X))


def test_a_cached_commit_asks_nobody_and_a_branch_asks_once(hub):
    fetch("v1")
    hub.log.clear()
    fetch(commit(hub, "v1"))
    assert hub.steps() == []
    fetch("v1")
    assert hub.steps() == ["head"]


def test_a_moved_branch_is_noticed(hub):
    first = fetch().path.name
    hub.repos[NAME].head, kept = commit(hub, "v1"), hub.repos[NAME].head
    try:
        assert fetch().path.name == commit(hub, "v1") != first
    finally:
        hub.repos[NAME].head = kept


def test_without_network_a_branch_and_a_tag_are_what_they_were(hub, monkeypatch):  # cases 7 and 49
    expected = {revision: fetch(revision).path.name for revision in (None, "main", "v1")}

    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert {revision: fetch(revision).path.name for revision in expected} == expected
    assert zoo.load(f"{HF}@main", progress=False).zoo_info["revision"] == expected["main"]


def test_a_hub_that_is_gone_is_as_good_as_offline_if_the_cache_has_it(hub, monkeypatch):
    first = fetch("v1").path
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert fetch("v1").path == first
        forget()
        with pytest.raises(RunError, match="can't be reached") as caught:
            fetch("v1", patience=ONCE)
        assert "connection" in caught.value.fix


@pytest.mark.parametrize(
    ("failure", "words", "kind", "asked"),
    [
        ("ConnectError", "", "unreachable", 1),
        ("ConnectTimeout", "", "unreachable", 1),
        ("ReadTimeout", "no connection", "network", 3),
        ("ConnectError", "[SSL: CERTIFICATE_VERIFY_FAILED]", "certificate", 1),
    ],
)
def test_a_hub_that_can_t_be_reached_is_given_up_sooner(hub, monkeypatch, failure, words, kind, asked):
    """Where the hub's client has tried for long by itself; its words don't matter."""
    monkeypatch.setattr("zoo.weights.hubs.hf_client._LONG", -1.0)
    calls = []

    def fail():
        calls.append(1)
        raise getattr(hub_httpx(), failure)(words)

    with pytest.raises(Refused) as caught:
        Client(QUICK).call(fail)
    assert caught.value.kind == kind and len(calls) == asked
    assert caught.value.passing == (kind != "certificate")
    assert "127.0.0.1" in str(Client(QUICK).explain(caught.value, HF, "Fetching the model"))


def test_torch_hub_loads_it(hub):
    from tiny import ROOT

    ours = torch.hub.load(str(ROOT), "load", f"{HF}@v1", source="local", progress=False).eval()
    torch.testing.assert_close(ours(X), zoo.load(f"{HF}@v1", progress=False).eval()(X), rtol=1e-5, atol=1e-5)


def test_pull_puts_it_into_the_local_hub(hub, command):  # noqa: F811
    code, _, err = command("pull", f"{HF}@v1")
    assert code == 0, err
    local = LocalHub()
    assert local.refs(NAME)["v1"] == local.refs(NAME)["latest"]
    bundle = local.resolve(NAME, "v1")
    bundle.verify(full=True)
    assert bundle.weights_sha256 == fetch("v1").weights_sha256
    assert pull(f"{HF}@v1", progress=False).new is False
    with pytest.raises(InputError, match="Only published models"):
        pull("random:resnet18", progress=False)


def test_verify_convert_and_show_take_it(hub, command):  # noqa: F811
    code, out, err = command("verify", f"{HF}@v1")
    assert code == 0 and "a published model; 120 of 120" in out, out + err
    code, out, err = command("show", f"{HF}@v1")
    assert code == 0 and f'zoo.load("{HF}")' in out, err
    code, _, err = command("diff", f"{HF}@v1", f"{HF}@v1")
    assert code == 0, err


# --- what can be wrong with it ---


def test_an_unknown_revision_gets_the_existing_ones(hub):
    with pytest.raises(InputError, match="no such revision") as caught:
        fetch("v2")
    assert "v1, main" in caught.value.fix and "did you mean v1" in caught.value.fix


@pytest.mark.parametrize("revision", ["../../x", "a b", "-x", "a..b"])
def test_a_revision_can_not_lead_anywhere(hub, revision):
    with pytest.raises(InputError, match="A revision is"):
        fetch(revision)
    assert hub.steps() == []


def test_a_missing_a_private_and_a_gated_repository(hub, monkeypatch):
    with pytest.raises(InputError, match="no such repository, or it is private") as caught:
        fetch_model("me/nothing", progress=False, patience=QUICK)
    assert "hf auth login" in caught.value.fix
    monkeypatch.delenv("HF_TOKEN")
    hub.repos[NAME].gated = True
    with pytest.raises(InputError, match="gated") as caught:
        fetch()
    assert f"accept them at {hub.endpoint}/{NAME}" in caught.value.fix
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch()


def test_a_token_that_is_refused_is_named_without_being_shown(hub, monkeypatch):
    hub.faults = [
        Fault("head", 401, message=f"Invalid credentials in Authorization header: {TOKEN}", times=9)
    ]
    with pytest.raises(InputError, match="doesn't accept your token") as caught:
        fetch()
    assert TOKEN not in str(caught.value)


def test_a_repository_of_others_is_told_from_one_of_ours(hub):
    hub.repos["you/other"] = type(hub.repos[NAME])()
    hub.repos["you/other"].add({"model.safetensors": b"x"})
    with pytest.raises(InputError, match="no published model of the zoo") as caught:
        fetch_model("you/other", progress=False, patience=QUICK)
    assert "url:" in caught.value.fix


@pytest.mark.parametrize(
    "name",
    ["a", "a/b/c", "./a", "/tmp/x", "../a/b", "~/a", "a--b/c", "a/b..c", "a/b.git", "-a/b", "a/b.", "a/" + "b" * 99, "ä/b", "a b/c", "a/", "C:/x"],
)  # fmt: skip
def test_a_name_by_which_no_repository_goes(hub, name):
    with pytest.raises(InputError) as caught:
        parse_reference(f"hf:{name}")
    assert "org/name" in str(caught.value) or "Hugging Face hub takes no such name" in str(caught.value)
    assert hub.steps() == []


def test_a_repository_where_a_path_was_meant_and_the_reverse(hub, tmp_path, monkeypatch):
    with pytest.raises(InputError) as caught:
        zoo.load("me/nowhere", progress=False)
    assert "hf:me/nowhere" in caught.value.fix
    with pytest.raises(InputError, match="This is a path") as caught:
        zoo.load("hf:runs/a/b", progress=False)
    assert "leave hf: away" in caught.value.fix
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(InputError, match="no such repository") as caught:
        fetch_model("runs/mine", progress=False, patience=QUICK)
    assert "leave hf: away for runs/mine" in caught.value.fix


def test_a_file_that_the_repository_lacks_is_named(hub):
    hub.faults = [Fault("head", 404, path="zoo.json", code="EntryNotFound", times=9)]
    with pytest.raises(InputError, match=r"lacks a file \(zoo\.json\)"):
        fetch("v1")
    hub.faults = []
    fetch("v1").verify(full=True)


def test_a_flipped_byte_is_fetched_again_and_never_used(hub):
    # Only the content's hash tells: the size is right.
    hub.faults = [Fault("cdn", kind="flip", skip=1)]
    fetch("v1").verify(full=True)
    forget()
    hub.faults = [Fault("cdn", kind="flip", times=99)]
    with pytest.raises(InputError, match=r"not what was published.*model\.safetensors"):
        fetch("v1")
    hub.faults = []
    fetch("v1").verify(full=True)


@pytest.mark.parametrize("file", [SUMS, "zoo.json", "README.md"])
def test_a_flipped_byte_of_a_small_file(hub, file):
    hub.faults = [Fault("resolve", kind="flip", path=file)]
    fetch("v1").verify(full=True)


def test_a_page_instead_of_weights(hub):
    hub.faults = [Fault("cdn", kind="page", times=99)]
    with pytest.raises((InputError, RunError)) as caught:
        fetch("v1", patience=ONCE)
    assert "hf:me/small@v1" in str(caught.value)
    hub.faults = [Fault("head", kind="page", times=99)]
    forget()
    with pytest.raises(RunError, match="doesn't answer as a hub does") as caught:
        fetch("v1", patience=ONCE)
    assert "proxy" in caught.value.fix
    hub.faults = []
    fetch("v1").verify(full=True)


@pytest.mark.parametrize(
    ("step", "fault"),
    [("head", "503"), ("head", "429"), ("head", "after"), ("resolve", "500"), ("resolve", "before"),
     ("cdn", "500"), ("cdn", "429"), ("cdn", "before"), ("cdn", "half")],
)  # fmt: skip
def test_what_passes_is_tried_again(hub, step, fault):
    status = int(fault) if fault.isdigit() else 0
    headers = {"Retry-After": "0"} if status == 429 else {}
    hub.faults = [Fault(step, status, "" if status else fault, headers=headers)]
    fetch("v1").verify(full=True)


def test_what_stays_is_told_in_a_line(hub):
    for status, words in ((500, "the hub has a problem"), (429, "asks to wait 7 s")):
        hub.faults = [Fault("head", status, times=99, headers={"Retry-After": "7"})]
        with pytest.raises(RunError, match=words):
            fetch("v1", patience=ONCE)


def test_a_slow_hub_is_waited_for_and_not_for_ever(hub, monkeypatch):
    hub.faults = [Fault("head", kind="slow", seconds=0.3)]
    fetch("v1")
    forget()
    hub.faults = [Fault("head", kind="slow", seconds=2.0, times=99)]
    # It asks once more, more patiently, where the cache has nothing.
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.1, raising=False)
    with pytest.raises(RunError, match="can't be reached"):
        fetch("v1", patience=ONCE._replace(timeout=0.1))


def test_an_incomplete_copy_without_network_names_what_is_missing(hub, monkeypatch):
    folder = fetch("v1").path
    (folder / "model.safetensors").unlink()
    (folder / "zoo.json").unlink()
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match=r"incomplete: it lacks model\.safetensors, zoo\.json") as caught:
        fetch("v1")
    assert "ZOO_OFFLINE" in caught.value.fix
    (folder / SUMS).unlink()
    with pytest.raises(InputError, match=f"it lacks {SUMS}"):
        fetch("v1")
    with pytest.raises(InputError, match="not in the cache") as caught:
        fetch("v9")
    assert "in the cache: v1" in caught.value.fix
    monkeypatch.delenv("ZOO_OFFLINE")
    fetch("v1").verify(full=True)


def test_a_damaged_copy_is_completed_with_network_and_refused_without(hub, monkeypatch):
    folder = fetch("v1").path
    (folder / "model.safetensors").resolve().chmod(0o644)
    flip((folder / "model.safetensors").resolve())
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="damaged"):
        fetch("v1")
    monkeypatch.delenv("ZOO_OFFLINE")
    fetch("v1").verify(full=True)


def test_links_of_a_copy_lead_into_its_own_store_only(hub, tmp_path):
    folder = fetch("v1").path
    elsewhere = tmp_path / "elsewhere"
    shutil.copyfile(folder / "config.json", elsewhere)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(elsewhere)
    with pytest.raises(InputError, match="holds no links"):
        fetch("v1")


def test_a_full_disk_is_told_and_leaves_nothing_half(hub, monkeypatch):
    from huggingface_hub import file_download

    real = file_download.http_get

    def full(url, temp_file, **how):
        temp_file.write(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(RunError, match="No space left") as caught:
        fetch("v1")
    assert "HF_HOME" in caught.value.fix
    assert not list(cache_folder(NAME).glob("snapshots/*/*"))
    monkeypatch.setattr(file_download, "http_get", real)
    fetch("v1").verify(full=True)


def test_what_the_disk_refuses_is_not_taken_for_the_network(hub, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(RunError, match="Fetching the model failed: Not a directory") as caught:
        fetch("v1")
    assert "HF_HOME" in caught.value.fix
