"""Bundles that somebody meddled with, and what was found: what tests of verification share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.weights.bundle import write_bundle
from zoo.weights.card import model_card
from zoo.weights.fingerprint import record_features

from .published import describe, weights_of


def states(found):
    return {check.name: check.state for check in found.checks}


def failed(found):
    """What failed: its name -> what was said."""
    return {check.name: check.detail for check in found.checks if check.state == "FAILED"}


def write(folder, what, trunk, heads=None, classifier=None):
    folder.mkdir()
    return write_bundle(folder, what, trunk, heads or {}, model_card("me/it", what), classifier).path


def relist(folder: Path) -> None:
    """A listing that fits what is there: what a publisher who makes mistakes would write."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def rewrite(folder: Path, **changes: Any) -> None:
    """Another description, listed as it is; ``...`` takes a field away."""
    info = {**json.loads((folder / "zoo.json").read_text()), **changes}
    info = {key: value for key, value in info.items() if value is not ...}
    (folder / "zoo.json").write_text(json.dumps(info))
    relist(folder)


@pytest.fixture
def recorded(tmp_path):
    """A bundle that says everything."""
    trunk = weights_of(describe(), 1)
    features = record_features(describe().network, trunk, describe().preprocessing, "test")
    what = describe(features=features, licence="mit", num_classes=5)
    classifier = {"weight": torch.ones(5, 64), "bias": torch.zeros(5)}
    return write(tmp_path / "whole", what, trunk, {"prototypes.weight": torch.ones(3, 2)}, classifier)
