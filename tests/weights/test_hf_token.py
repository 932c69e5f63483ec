"""The user's token goes to the hub alone, and is written nowhere."""

from __future__ import annotations

import importlib

import pytest

from zoo.errors import InputError
from zoo.weights.hubs.hf_client import Client
from zoo.weights.hubs.hf_download import fetch_model
from zoo.weights.hubs.hf_refused import hub_httpx, hub_utils

from .hub_state import TOKEN, Fault
from .hub_world import HF, NAME, QUICK, forget, model, send


@pytest.fixture
def published(hub, local):
    """The hub with a model on it, asked for nothing since."""
    send()
    hub.log.clear()
    return hub


def fetch():
    """The model, as somebody gets it who has nothing of it."""
    forget()
    return fetch_model(NAME, progress=False, patience=QUICK)


# --- where it goes ---


def test_the_token_stays_with_the_hub(published):
    fetch()
    assert any(TOKEN in held for _, _, _, held in published.log)
    assert published.leaks() == []


def test_the_token_stays_with_the_hub_after_a_connection_that_failed(hub):
    """The hub's client then makes itself a new session, in the middle of a call."""
    utils, client = hub_utils(), Client(QUICK)
    limits = []

    def ask(endpoint):
        utils.close_session()
        headers = {"authorization": f"Bearer {client.token}"}
        answer = utils.get_session().get(f"{endpoint}/api/whoami-v2", headers=headers)
        limits.append(answer.request.extensions["timeout"]["read"])

    hub.log.clear()
    client.call(ask, hub.endpoint)
    client.call(ask, hub.storage)
    assert [TOKEN in held for _, _, _, held in hub.log] == [True, False]
    assert hub.leaks() == [] and limits == [QUICK.timeout] * 2
    utils.set_client_factory(hub_httpx().Client)  # a program with a session of its own kind
    try:
        client.call(ask, hub.storage)
        assert hub.leaks() == []
    finally:
        utils.set_client_factory(
            importlib.import_module("huggingface_hub.utils._http").default_client_factory
        )


def test_a_hub_with_another_storage_sees_no_token_there(hub, local):
    hub.verify_at = hub.storage  # even where the hub itself names the address
    send()
    forget()
    fetch_model(NAME, progress=False)
    assert {host for _, _, host, _ in hub.log} == {f"127.0.0.1:{hub.port}", f"localhost:{hub.port}"}
    assert hub.leaks() == []


def test_a_client_whose_requests_are_not_seen_gets_no_token(published, monkeypatch):
    """A version of huggingface_hub that makes its sessions in another way."""
    monkeypatch.delattr("huggingface_hub.utils._http._GLOBAL_CLIENT_FACTORY")
    for work in (fetch, send):
        with pytest.raises(InputError, match="makes its connections unseen") as caught:
            work()
        assert "huggingface_hub>=1,<3" in caught.value.fix
        assert caught.value.where.startswith("huggingface_hub ")
        assert published.log == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    fetch().verify(full=True)
    assert not any(held for _, _, _, held in published.log)


def test_the_token_is_not_sent_over_plain_http_to_another_machine(monkeypatch, hub):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example.org")
    assert Client().token is False and Client().withheld
    monkeypatch.setenv("ZOO_TOKEN_OVER_HTTP", "1")
    assert Client().token == TOKEN
    monkeypatch.delenv("ZOO_TOKEN_OVER_HTTP")
    for endpoint in ("https://hub.example.org", "http://localhost:1", "http://[::1]:1", "http://127.8.8.8"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert Client().token == TOKEN
    for endpoint in ("ftp://x", "nothing", "https://", f"https://me:{TOKEN}@x"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(InputError, match="not the address of a hub") as caught:
            Client()
        assert TOKEN not in str(caught.value)


def test_publishing_over_plain_http_to_another_machine(hub, local, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example.org")
    with pytest.raises(InputError, match="not sent over plain http") as caught:
        send()
    assert "ZOO_TOKEN_OVER_HTTP=1" in caught.value.fix and TOKEN not in str(caught.value)


# --- where it comes from, and what is written ---


def test_the_token_is_read_as_the_hubs_client_reads_it(published, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    assert Client().token is False and "hf auth login" in Client().how_to_log_in
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_stored\n")  # as hf auth login leaves it
    assert Client().token == "hf_stored"
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    assert Client().token == TOKEN
    for bad in ("hf_\u2026abc", "hf_a\x07b"):
        monkeypatch.setenv("HF_TOKEN", bad)
        with pytest.raises(InputError, match="signs that no token has") as caught:
            fetch()
        assert bad not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    published.log.clear()
    fetch()
    assert not any(held for _, _, _, held in published.log)
    assert "HF_HUB_DISABLE_IMPLICIT_TOKEN" in Client().how_to_log_in


def test_the_token_is_written_nowhere(hub, local, command, tmp_path):
    said = "".join(map(str, command("publish", local, "--to", HF, "--tag", "v1")))
    hub.faults = [Fault("commit", 403, message=f"no {TOKEN}", times=9)]
    model(1)
    said += "".join(map(str, command("--debug", "publish", local, "--to", HF)))
    hub.faults = []
    said += "".join(map(str, command("pull", HF)))
    assert TOKEN not in said
    held = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert held == []
    assert not any(TOKEN.encode() in content for content in hub.stored.values())
    for files in hub.repos[NAME].commits.values():
        assert not any(TOKEN.encode() in content for content in files.values())
