"""Every test has a hub, a cache, runs and results of its own; those of the Hugging Face hub share a server."""

from __future__ import annotations

import pytest

from .hub_server import serving
from .hub_world import model, settle
from .published import bundle_at, command, describe, isolate, small_run, standard

__all__ = ["command"]


@pytest.fixture(autouse=True)
def _homes(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished tiny run; treat it as read-only."""
    return small_run(tmp_path_factory)


@pytest.fixture(scope="session")
def resnet18(tmp_path_factory):
    """A bundle of a ResNet-18 of the usual width, 45 MB; treat it as read-only."""
    return bundle_at(tmp_path_factory.mktemp("bundles") / "resnet18", standard()).path


@pytest.fixture(scope="session")
def narrow50(tmp_path_factory):
    """A bundle of a narrow ResNet-50; treat it as read-only."""
    return bundle_at(
        tmp_path_factory.mktemp("bundles") / "narrow50", describe(arch="resnet50", num_features=256)
    ).path


@pytest.fixture(scope="module")
def server():
    """A server that answers as the Hugging Face hub does."""
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """The server, with nothing on it."""
    settle(monkeypatch, server, tmp_path)
    yield server
    # Whatever a test did: nobody ever sees a card whose weights aren't there, or weights without a card.
    for repo in server.repos.values():
        for files in repo.commits.values():
            assert ("model.safetensors" in files) == ("README.md" in files)


@pytest.fixture
def local(hub):
    """The folder of a small model to publish to it."""
    return model()
