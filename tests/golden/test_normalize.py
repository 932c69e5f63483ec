"""Pixels: normalisation, blur and translation against the reference's transforms."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zoo.data.views.apply import blur, normalize, translate_reflect
from zoo.data.views.params import DRAWS_PER_VIEW, CropSpec, ViewParams, ViewPlan, draw_view

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


@pytest.mark.parametrize("name", case_ids("normalize"))
def test_normalize_of_a_batch_in_channels_last_memory(shared: Path, name: str) -> None:
    case = load(shared, name)
    batch = torch.stack([case.inputs["image_hwc"]] * 3).permute(0, 3, 1, 2)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    for output in case.outputs:
        for row in normalize(batch, *_statistics(shared, output)):
            case.check(output, row)


# Round radii, as those of the cases, go through Pillow itself; one that is drawn never does.
@pytest.mark.parametrize("beside", [0.0, 1e-5])
@pytest.mark.parametrize("name", case_ids("blur_r", without=["blur_random"]))
def test_blur(shared: Path, name: str, beside: float) -> None:
    case = load(shared, name)
    pixels = case.inputs["image_hwc"].numpy()
    view = _view(pixels.shape[0], blur_radius=case.args["radius"] + beside)
    case.check("image_hwc", torch.from_numpy(blur(pixels, view, ViewPlan(()))))


@pytest.mark.parametrize("name", case_ids("blur_random_decisions"))
def test_the_decision_to_blur_and_the_radius(shared: Path, name: str) -> None:
    """From the same uniform numbers: the reference draws one from NumPy, the other from Python's ``random``."""
    case = load(shared, name)
    plan = ViewPlan((CropSpec(24, 0.14, 1.0),))

    def radius_of(*last: float) -> float | None:
        draws = [0.0] * (DRAWS_PER_VIEW - 2)  # those before the decision and the radius
        return draw_view(plan, plan.crops[0], 24, 20, [*draws, *last]).blur_radius

    applied, radii = [], []
    for seed in case.args["seeds"]:
        decision, radius = np.random.RandomState(seed).rand(), random.Random(seed).random()
        applied.append(radius_of(decision, radius) is not None)
        radii.append(radius_of(0.0, radius))  # stated for every seed
    case.check("applied", torch.tensor(applied))
    case.check("radius", torch.tensor(radii, dtype=torch.float64))


@pytest.mark.parametrize("name", case_ids("amdim_translate"))
def test_translation(shared: Path, name: str) -> None:
    case = load(shared, name)
    moved = translate_reflect(
        case.inputs["image_hwc"].numpy(), case.args["xtranslation"], case.args["ytranslation"]
    )
    case.check("image_hwc", torch.from_numpy(moved))


def _view(size: int, **changes: Any) -> ViewParams:
    plain = ViewParams(
        top=0,
        left=0,
        height=size,
        width=size,
        size=size,
        flip=False,
        jitter=None,
        jitter_order=(0, 1, 2, 3),
        gray=False,
        blur_radius=None,
    )
    return replace(plain, **changes)
