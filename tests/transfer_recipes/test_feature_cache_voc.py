"""Kept features of images with several classes, and of VISSL's maps."""

from __future__ import annotations

import pytest
import torch

from transfer.run import open_context
from transfer.svm.features import svm_features

from .layouts import voc07

SETS = ("trainval", "test")


@pytest.fixture
def voc(tmp_path):
    """A set of its own: its files are touched."""
    return voc07(tmp_path / "voc")


@pytest.fixture
def kept(tmp_path):
    return lambda: sorted((tmp_path / "cache" / "features").glob("*"))


def opened(model, voc, **how):
    return open_context(model, str(voc), image_sets=SETS, cache_features=True, **how)


def test_vissls_features_are_kept_too(small, voc, kept, monkeypatch):
    how = {"crop": 64, "resize": 70}
    plain = svm_features(open_context(small, str(voc), image_sets=SETS, **how), "train", "vissl")
    context = opened(small, voc, **how)
    assert torch.equal(svm_features(context, "train", "vissl"), plain) and len(kept()) == 1
    with monkeypatch.context() as patched:
        patched.setattr("transfer.run.source_features", None)
        assert torch.equal(svm_features(context, "train", "vissl"), plain)  # low-shot after svm
        assert torch.equal(svm_features(opened(small, voc, **how), "train", "vissl"), plain)
    pooled = svm_features(context, "train", "pooled")
    assert pooled.shape == (16, 64) and plain.shape == (16, 256) and len(kept()) == 2
    # Squashed from another size: other pixels of the same crop.
    other = svm_features(opened(small, voc, crop=64, resize=100), "train", "vissl")
    assert not torch.equal(other, plain) and len(kept()) == 3


@pytest.mark.parametrize("kind", ["pooled", "vissl"])
def test_pictures_that_were_painted_over_are_seen(small, voc, kept, kind):
    how = {"crop": 64, "resize": 70}
    first = voc / "VOCdevkit" / "VOC2007" / "JPEGImages" / "000000.jpg"
    content = first.read_bytes()
    other = first.with_name("000001.jpg").read_bytes()
    size = max(len(content), len(other))
    # Another picture of as many bytes: whatever follows a JPEG's end is nothing.
    first.write_bytes(content.ljust(size, b"\0"))
    before = svm_features(opened(small, voc, **how), "train", kind)
    first.write_bytes(other.ljust(size, b"\0"))
    after = svm_features(opened(small, voc, **how), "train", kind)
    assert not torch.equal(before[0], after[0]) and torch.equal(before[1:], after[1:])
    assert len(kept()) == 2
