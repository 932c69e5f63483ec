"""``zoo extract`` of a network of the user's own: it goes on where it was with the same code, and only then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import zoo
from tiny import image_folder
from zoo.errors import InputError
from zoo.models.own_code import code_sha256

from .test_extract_parts import HOW, Counted, stop_at

NETWORK = """
import torch
from torch import nn

from our_blocks import steps

SLOPE = 0.1


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*steps(8))

    def forward(self, x):
        return nn.functional.leaky_relu(self.body(x), SLOPE)


def narrow():
    return Narrow()
"""
BLOCKS = """
from torch import nn


def steps(width):
    return nn.Conv2d(3, width, 3, 8), nn.BatchNorm2d(width)
"""
MODEL = "random:our_network:narrow"


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    (tmp_path / "our_network.py").write_text(NETWORK)
    (tmp_path / "our_blocks.py").write_text(BLOCKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_OWN_TRUNKS", "our_network:narrow")
    yield
    for name in ("our_network", "our_blocks"):
        sys.modules.pop(name, None)


@pytest.fixture
def images(tmp_path):
    return image_folder(tmp_path / "images", 12, 2, 40)


def test_it_goes_on_with_the_same_code_and_refuses_another(images, tmp_path):
    out = tmp_path / "f.safetensors"
    with pytest.raises(KeyboardInterrupt):
        zoo.extract(MODEL, stop_at(Counted(images), 9), out=out, **HOW)
    folder = tmp_path / ".f.safetensors.parts"
    assert len(list(folder.glob("part-*"))) == 2
    # A constant of the network's own module, then a module that it is built with.
    for name, text, old, new in [
        ("our_network", NETWORK, "SLOPE = 0.1", "SLOPE = 0.2"),
        ("our_blocks", BLOCKS, "3, 8)", "3, 8, padding_mode='zeros')"),
    ]:
        assert old in text
        Path(f"{name}.py").write_text(text.replace(old, new))
        with pytest.raises(InputError, match="something else: the network's own code") as caught:
            zoo.extract(MODEL, str(images), out=out, **HOW)
        assert caught.value.where == str(folder) and "delete that folder" in caught.value.fix
        Path(f"{name}.py").write_text(text)
    rest = Counted(images)
    found = zoo.extract(MODEL, rest, out=out, **HOW)
    assert sorted(rest.read_of) == [8, 9, 10, 11] and not folder.exists()
    assert torch.equal(found["features"], zoo.extract(MODEL, str(images), **HOW)["features"])
    manifest = json.loads(Path(f"{out}.json").read_text())
    assert len(manifest["code_sha256"]) == 64 and manifest["arch"] == "our_network:narrow"


def test_the_hash_is_of_what_the_code_uses_of_the_users(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    import our_network  # noqa: F401

    Path("unused.py").write_text("")
    import unused  # noqa: F401

    before = code_sha256(["our_network"])
    assert before == code_sha256(["our_network"]) != code_sha256(["our_blocks"])
    Path("unused.py").write_text("changed = True")
    assert code_sha256(["our_network"]) == before
    Path("our_blocks.py").write_text(BLOCKS + "\n")
    assert code_sha256(["our_network"]) != before
    sys.modules.pop("unused")


def test_code_that_has_no_file_is_never_the_same(monkeypatch):
    import types

    module = types.ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, "typed_in", module)
    assert code_sha256(["typed_in"]) != code_sha256(["typed_in"])
