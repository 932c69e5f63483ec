"""A publisher that is killed at any moment leaves both sides whole, and the next one goes on."""

from __future__ import annotations

import os
import signal

import pytest

from zoo.weights.hubs.hf_download import fetch_model

from .hub_world import NAME, forget, model, send, settle

STEPS = ["create", "put", "commit", "tag"]
if os.environ.get("ZOO_EVERY_MOMENT") == "1":  # 20 moments
    STEPS += ["whoami", "preupload", "yaml", "batch", "verify", "tree"]


def killed_at(hub, step, when, skip=0):
    """Publish in a child process, which is killed when the hub is at a step."""
    left = [skip]

    def kill(at, moment):
        if (at, moment) == (step, when):
            if left[0] == 0:
                os.kill(child, signal.SIGKILL)
                hub.on_step = lambda *_: None
            left[0] -= 1

    child = os.fork()
    if child == 0:
        try:
            # The hub's threads are the parent's; the child waits until the parent knows its number.
            signal.sigwait({signal.SIGUSR1})
            send(tag="v1")
        finally:
            os._exit(0)
    hub.on_step = kill
    os.kill(child, signal.SIGUSR1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"it never came to {when} {step}"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_going_on_after_kill_9(server, monkeypatch, tmp_path, step, when):  # case 50
    hub = settle(monkeypatch, server, tmp_path)
    model()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        # Of two files the second one: the first one has arrived.
        killed_at(hub, step, when, skip=1 if step == "put" and when == "before" else 0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    for repo in hub.repos.values():
        assert all(
            ("model.safetensors" in files) == ("README.md" in files) for files in repo.commits.values()
        )
    arrived = set(hub.stored)
    hub.log.clear()
    done = send(tag="v1")
    sent = [path.rpartition("/")[2] for step, path, _, _ in hub.log if step == "put"]
    assert not arrived & set(sent), "what had arrived was sent again"
    assert hub.repos[NAME].tags == {"v1": done.commit}
    assert len(hub.repos[NAME].history) == 2
    assert list((tmp_path / "cache" / "publishing").iterdir()) == []  # the killed one's folder is gone, too
    forget()
    fetch_model(NAME, "v1", progress=False).verify(full=True)
