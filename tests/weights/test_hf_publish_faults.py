"""Publishing to the hub, whatever the hub, the network, other publishers and the disk do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from zoo.errors import InputError, RunError
from zoo.weights.bundle import read_bundle

from .hub_state import PAGE, TOKEN, Fault, Repo
from .hub_world import HF, NAME, ONCE, assert_published, model, send

STEPS = [
    "whoami", "info", "create", "preupload", "tree", "yaml", "batch", "put", "verify", "commit", "refs", "tag",
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        *((step, "500") for step in STEPS),
        *((step, fault) for step in ("create", "put", "commit", "tag") for fault in ("before", "after")),
    ],
)
def test_one_fault_at_any_step_is_got_over(hub, local, step, fault):
    hub.faults = [Fault(step, 500 if fault == "500" else 0, "" if fault == "500" else fault)]
    done = send(tag="v1")
    assert hub.faults[0].times == 0
    assert hub.repos[NAME].tags == {"v1": done.commit} and hub.repos[NAME].head == done.commit
    assert len(hub.repos[NAME].history) == 2, "a commit was made twice"
    assert_published(hub)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_keeps_failing_is_told_and_the_next_try_goes_on(hub, local, step):
    hub.faults = [Fault(step, 500, times=99)]
    with pytest.raises(RunError) as caught:
        send(tag="v1", patience=ONCE)
    assert "the hub has a problem (it answers 500)" in str(caught.value) and HF in caught.value.where
    assert len(hub.repos.get(NAME, Repo()).history) < (3 if step in ("refs", "tag", "tree") else 2)
    hub.faults = []
    tried = hub.steps().count("put")
    send(tag="v1")
    assert hub.steps().count("put") - (tried if step == "put" else 0) == 2, "a file was sent twice"
    assert_published(hub)


@pytest.mark.parametrize(
    ("step", "status", "words"),
    [
        ("whoami", 401, "doesn't accept your token"),
        ("preupload", 403, "Your token doesn't allow that"),
        ("commit", 403, "Your token doesn't allow that"),
        ("commit", 409, "is doing something else"),
        ("put", 403, "storage refused a file"),
        ("preupload", 429, "asks to wait 3 s"),
        ("commit", 429, "asks to wait 3 s"),
        ("tag", 403, "published, but has no tag v1 yet"),
    ],
)
def test_each_refusal_has_its_line(hub, local, step, status, words):
    hub.faults = [Fault(step, status, times=99, headers={"Retry-After": "3"}, message=f"no, {TOKEN}")]
    with pytest.raises((InputError, RunError)) as caught:
        send(tag="v1", patience=ONCE)
    assert words in str(caught.value) and caught.value.fix
    assert TOKEN not in str(caught.value)
    hub.faults = []
    send(tag="v1")
    assert_published(hub)


@pytest.mark.parametrize("step", ["whoami", "info", "tree", "batch", "commit"])
def test_a_page_where_the_hub_should_answer(hub, local, step):
    assert PAGE
    hub.faults = [Fault(step, kind="page", times=99)]
    with pytest.raises(RunError, match="doesn't answer as a hub does") as caught:
        send(patience=ONCE)
    assert "proxy" in caught.value.fix
    hub.faults = []
    send()
    assert_published(hub)


def test_a_commit_is_cut_while_it_is_read(hub, local):
    hub.faults = [Fault("commit", kind="during")]
    send()
    assert len(hub.repos[NAME].history) == 2
    assert_published(hub)


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub, local):
    hub.faults = [Fault("commit", kind="after")]
    done = send(patience=ONCE)
    assert done.commit == hub.repos[NAME].head and len(hub.repos[NAME].history) == 2


def test_somebody_else_publishes_meanwhile(hub, local):
    send()
    model(1)

    def other(repo):
        hub.on_commit = None
        repo.add({**repo.files, "README.md": b"---\nlicense: mit\n---\ntheirs"})

    hub.on_commit = other
    with pytest.raises(RunError, match="Somebody else published meanwhile"):
        send()
    assert hub.repos[NAME].files["README.md"].endswith(b"theirs")
    send()
    assert_published(hub)


def test_of_two_publishers_one_wins_and_nothing_is_mixed(hub, local):
    """Both have looked at the same head before either commits."""
    send()
    models = [model(seed) for seed in (1, 2)]
    both, outcomes = threading.Barrier(2), []
    hub.on_commit = lambda repo: both.wait(60)

    def race(reference):
        try:
            outcomes.append((reference, send(reference).commit))
        except RunError as error:
            outcomes.append((reference, error))

    threads = [threading.Thread(target=race, args=(reference,)) for reference in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.on_commit = None
    won = [reference for reference, outcome in outcomes if isinstance(outcome, str)]
    lost = [outcome for _, outcome in outcomes if isinstance(outcome, RunError)]
    assert len(won) == len(lost) == 1 and "Somebody else" in str(lost[0])
    assert_published(hub, read_bundle(Path(won[0])).weights_sha256)


def test_a_hub_that_stored_something_else_is_caught(hub, local):
    hub.hashes = False
    try:
        repo_of = hub.commit

        def garble(asked, name, revision):
            done = repo_of(asked, name, revision)
            files = hub.repos[name].files
            files["model.safetensors"] = files["model.safetensors"][:-1] + b"?"
            return done

        hub.commit = garble
        with pytest.raises(RunError, match=r"doesn't hold what was sent: model\.safetensors"):
            send(tag="v1")
        assert hub.repos[NAME].tags == {}
    finally:
        del hub.commit
        hub.hashes = True
    send(tag="v1")
    assert_published(hub)


def test_a_slow_hub_is_waited_for_and_not_for_ever(hub, local):
    hub.faults = [Fault("commit", kind="slow", seconds=0.4)]
    send()
    model(1)
    hub.faults = [Fault("whoami", kind="slow", seconds=5.0, times=9)]
    with pytest.raises(RunError, match="nothing came for too long"):
        send(patience=ONCE._replace(timeout=0.2))


def test_a_hub_without_xet(hub, local, monkeypatch):
    """The client would send by Xet; for other hubs than the public one it is told not to."""
    from huggingface_hub import constants

    send()
    assert constants.HF_HUB_DISABLE_XET is False, "other users of the client in this process keep Xet"
    model(1)
    monkeypatch.setattr("zoo.weights.hubs.hf_client._PUBLIC", hub.endpoint)
    with pytest.raises(RunError, match="doesn't speak Xet") as caught:
        send(patience=ONCE)
    assert "HF_HUB_DISABLE_XET=1" in caught.value.fix
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert send().new


def test_a_clock_that_is_wrong(hub, local):
    from zoo.weights.hubs.hf_refused import Refused, classified, hub_httpx

    with pytest.raises(Refused, match="clock"), classified(None):
        raise hub_httpx().ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate is not yet valid")
    hub.faults = [Fault("put", 403, message="RequestTimeTooSkewed", times=9)]
    with pytest.raises(RunError, match="RequestTimeTooSkewed") as caught:
        send(patience=ONCE)
    assert "clock" in caught.value.fix


def test_publishing_where_the_network_is_forbidden(hub, local, monkeypatch):
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(InputError, match="ZOO_OFFLINE forbids it"):
        send()
    assert hub.steps() == []


def test_a_full_disk_here(hub, local, monkeypatch, tmp_path):
    import errno
    import os

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zoo.publishing.write_json", full)
    with pytest.raises(RunError, match="No space left"):
        send()
    assert hub.steps() == [] and list((tmp_path / "cache" / "publishing").iterdir()) == []


def test_publishing_leaves_nothing_in_the_cache(hub, local, tmp_path):
    send()
    hub.faults = [Fault("commit", 403, times=9)]
    model(1)
    with pytest.raises(InputError):
        send()
    assert list((tmp_path / "cache" / "publishing").iterdir()) == []
