"""Pixels: normalisation and blur against the reference's transforms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.data.views.apply import apply_view, normalize
from zoo.data.views.params import ViewParams, ViewPlan

from .cases import case_ids, load

# The case's output -> where the published facts have its mean and deviation.
SOURCES = {
    "swav": "swav_multicrop",
    "moco_amdim_in": "moco_v2",
    "amdim_stl10": "amdim_stl10_64",
    "amdim_cifar": "amdim_cifar32",
}


def _statistics(shared: Path, name: str) -> tuple[Any, Any]:
    facts = json.loads((shared / "golden" / "augmentation_facts.json").read_text(encoding="utf-8"))
    of = facts[SOURCES[name]]
    if "mean_255" in of:
        return tuple(tuple(v / 255.0 for v in of[key]) for key in ("mean_255", "std_255"))  # type: ignore[return-value]
    return tuple(of["mean"]), tuple(of["std"])


@pytest.mark.parametrize("name", case_ids("normalize"))
def test_normalize(shared: Path, name: str) -> None:
    case = load(shared, name)
    images = case.inputs["image_hwc"].permute(2, 0, 1)[None]
    before = images.clone()
    for output in case.outputs:
        got = normalize(images, *_statistics(shared, output))
        assert got.dtype == torch.float32
        case.check(output, got[0])
    assert torch.equal(images, before)


def test_the_views_are_normalised_as_swavs(shared: Path) -> None:
    plan = ViewPlan(crops=())
    assert (plan.mean, plan.std) == _statistics(shared, "swav")


@pytest.mark.parametrize("name", case_ids("blur_r", without=["blur_random"]))
def test_blur(shared: Path, name: str) -> None:
    case = load(shared, name)
    pixels = case.inputs["image_hwc"].numpy()
    height, side, _ = pixels.shape
    assert side < height <= side + 4  # so that every row lies far from a cut of the squares below
    want = case.outputs["image_hwc"]
    half = height // 2
    # A view is square, the image is not. A row depends on the seven around it at most: the upper square
    # is the reference's in its upper half, the lower one in its lower half.
    for top, rows in ((0, slice(0, half)), (height - side, slice(half, height))):
        view = ViewParams(
            top=top,
            left=0,
            height=side,
            width=side,
            size=side,
            flip=False,
            jitter=None,
            jitter_order=(0, 1, 2, 3),
            gray=False,
            blur_radius=case.args["radius"],
        )
        got = torch.from_numpy(np.array(apply_view(Image.fromarray(pixels), view)))
        case.compare("image_hwc", got[rows.start - top : rows.stop - top], want[rows])
