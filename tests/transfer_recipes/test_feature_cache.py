"""Kept features: used when all that they depend on is equal, and never otherwise."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil

import pytest
import torch

from tiny import image_folder, save_image
from transfer.run import open_context
from weights.published import assert_clear
from zoo.probe.feature_cache import kept_features


@pytest.fixture
def photos(tmp_path):
    """A set of its own: its files are touched."""
    image_folder(tmp_path / "photos" / "train", 8, 2, 40)
    for index in range(4):
        save_image(tmp_path / "photos" / "val" / f"class{index % 2}" / f"v{index}.png", 100 + index, 40)
    return tmp_path / "photos"


@pytest.fixture
def kept(tmp_path):
    return lambda: sorted((tmp_path / "cache" / "features").glob("*"))


def opened(model, photos, **how):
    return open_context(model, str(photos), cache_features=True, **how)


def test_a_later_call_computes_nothing(small, photos, kept, monkeypatch):
    asked = [
        ("train", ("final",), None, 0),
        ("val", ("layer2", "final"), None, 0),
        ("train", ("final",), 1, 3),
    ]
    first = opened(small, photos)
    before = [first.features(*each) for each in asked]
    assert len(kept()) == 3
    plain = open_context(small, str(photos))
    monkeypatch.setattr("transfer.run.source_features", None)
    again = opened(small, photos)
    after = [again.features(*each) for each in asked]
    for (features, labels), (found, theirs) in zip(before, after, strict=True):
        assert torch.equal(features, found) and torch.equal(labels, theirs)
    monkeypatch.undo()
    assert torch.equal(plain.features("train")[0], before[0][0])


def test_whatever_differs_makes_other_features(small, photos, kept):
    def features(how=(), **options):
        context = opened(small, photos, **options)
        return context, context.features("train", *how)[0]

    context, first = features()
    count = 1

    def another(found):
        nonlocal count
        count += 1
        assert len(kept()) == count
        return found

    another(features((("layer4",),))[1])
    assert another(features((("layer1",),))[1]).shape != first.shape
    assert not torch.equal(another(features((("final",), 0, 0))[1]), first)
    assert not torch.equal(another(features((("final",), 0, 1))[1]), first)
    assert not torch.equal(another(features(resize=48)[1]), first)
    with torch.no_grad():  # weights as they are, not as they were loaded
        context.trunk.layer4[1].bn2.bias += 1
    context._features.clear()
    assert not torch.equal(another(context.features("train")[0]), first)
    context, _ = features()  # what was kept before
    context.trunk.maxpool = torch.nn.AvgPool2d(3, stride=2, padding=1)  # no weights of its own
    context._features.clear()
    assert not torch.equal(another(context.features("train")[0]), first)
    path = photos / "train" / "class0" / "000.png"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes())  # as many bytes, another time
    assert path.stat().st_size == size
    another(features()[1])
    save_image(photos / "train" / "class1" / "new.png", 50, 40)
    assert len(another(features()[1])) == 9
    assert len(kept()) == count


def test_a_damaged_file_or_another_ones_is_never_used(small, photos, kept, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("zoo"), "propagate", True)
    first = opened(small, photos).features("train")[0]
    (path,) = kept()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    opened(small, photos).features("val")
    (other,) = set(kept()) - {path}
    for content in (flipped, whole[:50], b"", other.read_bytes()):
        path.write_bytes(content)
        caplog.clear()
        assert torch.equal(opened(small, photos).features("train")[0], first)
        assert "damaged: computing them anew" in caplog.text
        assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_no_result(small, photos, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("zoo"), "propagate", True)
    expected = open_context(small, str(photos)).features("train")[0]
    context = opened(small, photos)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").write_text("a file")
    assert torch.equal(context.features("train")[0], expected)
    assert "can't be kept" in caplog.text


def _hammer(number, failed):
    def compute():
        return torch.arange(4000, dtype=torch.float32).reshape(100, 40)

    for turn in range(60):
        if not torch.equal(kept_features({"of": turn % 3}, 100, compute), compute()):
            failed.value = 1
        if turn % 7 == number:
            for path in list(_folder().glob("*.safetensors")):
                path.unlink(missing_ok=True)


def _folder():
    from zoo.homes import cache_home

    return cache_home() / "features"


def test_processes_at_once_do_not_break_it():
    context = multiprocessing.get_context("fork")  # no torch kernel with threads runs in them
    failed = context.Value("i", 0)
    processes = [context.Process(target=_hammer, args=(number, failed)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and failed.value == 0
    assert not list(_folder().glob(".*")) and len(list(_folder().glob("*"))) <= 3


def test_on_the_command_line(command, small, photos, tmp_path, kept):
    words = ("transfer", "knn", "--model", small, "--data", photos, "--k", 1, "--json")
    code, plain, _ = command(*words, "--out", tmp_path / "a")
    assert code == 0 and kept() == []  # off unless asked for
    for out in ("b", "c"):
        code, _, notes = command(*words, "--cache-features", "--out", tmp_path / out)
        assert code == 0 and len(kept()) == 2
    assert "from the cache" in notes
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in "abc"]
    assert results[0]["metrics"] == results[1]["metrics"] == results[2]["metrics"]
    assert (
        os.listdir(tmp_path / "a") == ["result.json"]
        and json.loads(plain)["metrics"] == results[0]["metrics"]
    )
    assert_clear(command("transfer", "detect", "--model", small, "--cache-features"), "--cache-features")
    words = ("transfer", "all", "--model", small, "--data", photos, "--set", "epochs=1")
    assert "from the cache" in command(*words, "--cache-features")[2]


def test_raw_pixels_have_no_weights_and_are_kept_by_their_size(photos, kept):
    first = opened("pixels:4", photos).features("train")[0]
    assert opened("pixels:6", photos).features("train")[0].shape == (8, 108) and first.shape == (8, 48)
    assert torch.equal(opened("pixels:4", photos).features("train")[0], first) and len(kept()) == 2
