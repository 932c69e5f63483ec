"""Every test has a hub, a cache, runs and results of its own; small labelled pictures for all."""

from __future__ import annotations

import pytest

from tiny import image_folder
from weights.published import bundle_at, class_folders, command, describe, isolate, small_run

__all__ = ["command"]

GREYS = {"a": 40, "b": 120, "c": 210}


@pytest.fixture(autouse=True)
def _homes(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished tiny run; treat it as read-only."""
    return small_run(tmp_path_factory)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A bundle of a narrow ResNet-18 (32-pixel crops), as a reference; treat it as read-only."""
    return str(bundle_at(tmp_path_factory.mktemp("bundles") / "small").path)


@pytest.fixture(scope="session")
def standard(tmp_path_factory):
    """A bundle that wants 256 / 224 pixels, as a reference; treat it as read-only."""
    how = {**describe().preprocessing, "resize": 256, "crop": 224}
    # Not narrower: the gradient of a strided convolution of 8 channels, channels last, crashes torch 2.14.
    what = describe(preprocessing=how, base_planes=16, num_features=128)
    return str(bundle_at(tmp_path_factory.mktemp("bundles") / "standard", what).path)


@pytest.fixture(scope="session")
def facts(shared):
    """The shared text on the papers' protocols."""
    return (shared / "facts" / "protocols.md").read_text("utf-8")


@pytest.fixture(scope="session")
def greys(tmp_path_factory):
    """train and val, three classes that anybody can tell apart; treat it as read-only."""
    folder = tmp_path_factory.mktemp("data") / "greys"
    class_folders(folder / "train", GREYS, 12, seed=0)
    class_folders(folder / "val", GREYS, 4, seed=1)
    return folder


@pytest.fixture(scope="session")
def noise(tmp_path_factory):
    """train and val, two classes that mean nothing; treat it as read-only."""
    folder = tmp_path_factory.mktemp("data") / "noise"
    image_folder(folder / "train", 24, 2, 16)
    image_folder(folder / "val", 12, 2, 12)
    return folder
