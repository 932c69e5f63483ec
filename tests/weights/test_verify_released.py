"""``zoo verify`` of released weights: the file against its card, its publisher's hash and the pin."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from zoo.verify import verify
from zoo.weights import catalog
from zoo.weights.lock import lock_path

from .published import describe, flip, weights_of
from .verifying import failed, states


@pytest.fixture
def small_card(monkeypatch, tmp_path):
    """A card of a small MoCo file on a mirror of the user's."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    trunk = weights_of(describe(), 1)
    encoder = {f"module.encoder_q.{name}": value for name, value in trunk.items()}
    encoder |= {
        "module.encoder_q.fc.0.weight": torch.ones(8, 64),
        "module.encoder_q.fc.0.bias": torch.ones(8),
    }
    torch.save({"epoch": 200, "state_dict": encoder}, mirror / "small.pth.tar")
    content = (mirror / "small.pth.tar").read_bytes()
    file = catalog.Remote(
        "small.pth.tar",
        ("https://nowhere.invalid/small.pth.tar",),
        size=len(content),
        md5=hashlib.md5(content).hexdigest()[:8],
    )
    card = dataclasses.replace(
        catalog.CATALOG["moco_v2_resnet50.200ep"], name="small.200ep", arch="resnet18", base_planes=8, file=file,
        parameters=176_712, num_features=64,
    )  # fmt: skip

    def use(**changes):
        changed = dataclasses.replace(card, **changes)
        known = {changed.name: changed}
        for module in ("catalog", "reference", "load", "listing"):
            monkeypatch.setattr(f"zoo.weights.{module}.CATALOG", known, raising=False)
        monkeypatch.setattr("zoo.verify.CATALOG", known)
        return changed

    monkeypatch.setenv("ZOO_MIRROR", str(mirror))
    use()
    return use


def test_released_weights(small_card):
    found = verify("small.200ep", progress=False)
    assert found.passed, found.checks
    assert states(found) == {
        "download": "ok", "published hash": "ok", "safe": "ok", "format": "ok", "network": "ok", "values": "ok",
        "preprocessing": "ok", "licence": "ok",
    }  # fmt: skip
    detail = {check.name: check.detail for check in found.checks}
    assert (
        detail["licence"] == "MIT" and "size" in detail["published hash"] and "pinned" in detail["download"]
    )


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        ({"parameters": 5}, "network", "parameters is said to be 5"),
        ({"num_features": 5}, "network", "num_features is said to be 5"),
        ({"base_planes": 4}, "network", "don't fit"),
        ({"format": "swav"}, "format", "moco; that of small.200ep is swav"),
        ({"preprocessing": {"mean": [0.5]}}, "preprocessing", "std"),
    ],
)
def test_what_the_card_says_is_held_against_the_file(small_card, changes, check, said):
    small_card(**changes)
    found = verify("small.200ep", progress=False)
    assert check in failed(found) and said in failed(found)[check]


def test_a_released_file_that_nobody_states_a_hash_of(small_card):
    remote = dataclasses.replace(small_card().file, size=None, md5="")
    small_card(file=remote)
    found = verify("small.200ep", progress=False)
    assert found.passed and states(found)["published hash"] == "not recorded"


def test_another_file_than_was_first_used_is_found(small_card, monkeypatch):
    remote = dataclasses.replace(small_card().file, size=None, md5="")
    small_card(file=remote)
    assert verify("small.200ep", progress=False).passed
    pins = json.loads(lock_path().read_text())
    pins["pins"]["small.pth.tar"]["sha256"] = "0" * 64
    lock_path().write_text(json.dumps(pins))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    found = verify("small.200ep", progress=False)
    assert list(failed(found)) == ["download"] and "lock.json" in failed(found)["download"]
    assert states(found)["network"] == "not checked"


def test_an_own_copy_of_a_released_file_is_held_against_its_hash(small_card, tmp_path):
    copy = tmp_path / "small.pth.tar"
    shutil.copy(Path(os.environ["ZOO_MIRROR"]) / "small.pth.tar", copy)
    assert states(verify(str(copy)))["published hash"] == "ok"
    flip(copy, 2000)
    assert "publisher" in failed(verify(str(copy)))["published hash"]
