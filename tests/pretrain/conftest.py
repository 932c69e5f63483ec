"""Runs in tests take one thread: parallel test processes would fight for processors."""

from __future__ import annotations

import pytest

from tiny import image_folder, train


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch):
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: 1)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """24 images: three steps of 8 an epoch."""
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def finished(images, tmp_path_factory):
    """A finished tiny run of 6 steps; treat it as read-only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.engine.precision.processors", lambda: 1)
        return train(images, tmp_path_factory.mktemp("runs") / "finished")
