"""Colour and blur of a batch at once: against Pillow, against the path of single images, and row by row.

The stated tolerances against Pillow, in 8-bit levels: brightness, contrast, saturation and grayscale exact,
hue 6 and 0.05 on average, blur 3 (Pillow rounds after each of six passes, a matrix doesn't).
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from pillow_views import ADJUST, differences, only, plain_view
from torchvision.transforms import functional as F

from zoo.data.views.apply import apply_view, cut
from zoo.data.views.device import color_table, recolor_batch
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import ORDERS, CropSpec, ViewPlan
from zoo.data.views.presets import find_preset
from zoo.keyed import keyed_key, keyed_uniforms

PLAN = ViewPlan((CropSpec(224, 0.14, 1.0),), jitter=(1.0, 1.0, 1.0, 0.5))


def batch_of(images) -> torch.Tensor:
    """(N, C, S, S) in channels-last memory, as the loader hands it out."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def arrays(batch: torch.Tensor) -> list[np.ndarray]:
    return list(batch.permute(0, 2, 3, 1).numpy())


@pytest.fixture(scope="module")
def large(squares):
    return [image for image in squares if len(image) == 224]


@pytest.fixture(scope="module")
def small(squares):
    return [image for image in squares if len(image) == 96]


def drawn(plan, images, seed=0):
    """The views of a batch as cut, their parameters, and the same views done image by image."""
    maker = PlannedViews(plan)
    views = [
        maker.params(*image.shape[:2], keyed_key(seed, "views", sample))[0]
        for sample, image in enumerate(images)
    ]
    pairs = list(zip(images, views, strict=True))
    return [cut(i, v, plan) for i, v in pairs], views, [apply_view(i, v, plan) for i, v in pairs]


# --- against Pillow ---


@pytest.mark.parametrize(
    ("which", "low", "high"), [(0, 0.0, 2.0), (1, 0.0, 2.0), (2, 0.0, 2.0), (3, -0.5, 0.5)]
)
def test_jitter_is_pillows(large, small, which, low, high):
    plan = replace(PLAN, jitter=only(which, 0.5))
    pairs = []
    for images in (large, small):
        factors = [low, high, *(low + (high - low) * keyed_uniforms(which, len(images) - 2)).tolist()]
        table = color_table(
            [plain_view(i, jitter=only(which, f)) for i, f in zip(images, factors, strict=True)]
        )
        got = recolor_batch(batch_of(images), table, plan)
        assert got.dtype == torch.float32
        wanted = [
            np.asarray(ADJUST[which](Image.fromarray(i), f)) for i, f in zip(images, factors, strict=True)
        ]
        pairs += zip(arrays(got), wanted, strict=True)
    largest, mean = differences(pairs)
    assert largest <= (6 if which == 3 else 0)
    assert mean <= 0.05


def test_hue_of_every_corner_and_gray():
    """Black, white, grays, pure and nearly gray colours: where the six sectors of the circle meet."""
    levels = [0, 1, 2, 127, 128, 254, 255]
    colours = np.array([(r, g, b) for r in levels for g in levels for b in levels], np.uint8)
    image = np.zeros((19, 19, 3), np.uint8)
    image.reshape(-1, 3)[: len(colours)] = colours
    plan = replace(PLAN, jitter=only(3, 0.5))
    for turns in (-0.5, -0.21, 0.0, 0.1, 0.33, 0.5):
        got = recolor_batch(batch_of([image]), color_table([plain_view(image, jitter=only(3, turns))]), plan)
        wanted = np.asarray(F.adjust_hue(Image.fromarray(image), turns))
        assert differences([(arrays(got)[0], wanted)])[0] <= 6


def test_grayscale_is_pillows(small):
    got = recolor_batch(batch_of(small), color_table([plain_view(i, gray=True) for i in small]), PLAN)
    wanted = [np.asarray(F.rgb_to_grayscale(Image.fromarray(i), 3)) for i in small]
    assert differences(list(zip(arrays(got), wanted, strict=True)))[0] == 0


def test_blur_is_pillows(large, small):
    for images in (large, small):
        radii = [0.1, 2.0, 0.31, *(0.1 + 1.9 * keyed_uniforms(4, len(images) - 3)).tolist()]
        table = color_table([plain_view(i, blur_radius=r) for i, r in zip(images, radii, strict=True)])
        got = recolor_batch(batch_of(images), table, PLAN)
        wanted = [
            np.asarray(Image.fromarray(i).filter(ImageFilter.GaussianBlur(r)))
            for i, r in zip(images, radii, strict=True)
        ]
        assert differences(list(zip(arrays(got), wanted, strict=True)))[0] <= 3


def test_the_true_gaussian(small):
    plan = replace(PLAN, blur="gaussian")
    radii = [0.1, 2.0, *(0.1 + 1.9 * keyed_uniforms(5, len(small) - 2)).tolist()]
    table = color_table([plain_view(i, blur_radius=r) for i, r in zip(small, radii, strict=True)])
    got = recolor_batch(batch_of(small), table, plan)
    wanted = [cv2.GaussianBlur(i, (23, 23), r) for i, r in zip(small, radii, strict=True)]
    assert differences(list(zip(arrays(got), wanted, strict=True)))[0] <= 2


@pytest.mark.parametrize("kind", ["pil", "gaussian"])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_blur_of_views_smaller_than_the_kernel(kind, size):
    image = np.random.default_rng(size).integers(0, 256, (size, size, 3), dtype=np.uint8)
    plan = replace(PLAN, blur=kind)
    view = plain_view(image, blur_radius=2.0)
    got = arrays(recolor_batch(batch_of([image]), color_table([view]), plan))[0]
    assert differences([(got, apply_view(image, view, plan))])[0] <= 3


# --- against the path of single images ---


@pytest.mark.parametrize(
    "name", ["swav", "swav-opencv-2x224+6x96", "moco-v1", "amdim-64", "small-32", "simclr"]
)
def test_whole_views_are_those_of_the_workers(photos, name):
    plan = find_preset(name).plan
    pairs, without_hue = [], []
    for seed in range(2):
        plans = [plan, replace(plan, jitter=(*plan.jitter[:3], 0.0))]
        for which, out in zip(plans, (pairs, without_hue), strict=True):
            images, views, wanted = drawn(which, photos, seed)
            got = recolor_batch(batch_of(images), color_table(views), which)
            assert torch.equal(got, got.floor()) and got.min() >= 0 and got.max() <= 255
            out += zip(arrays(got), wanted, strict=True)
    largest, mean = differences(pairs)
    assert largest <= 24  # contrast and saturation enlarge what hue rounded
    assert mean <= 0.5
    largest, mean = differences(without_hue)
    assert largest <= 5
    assert mean <= 0.3


def test_without_any_colour_nothing_changes(small):
    plan = find_preset("linear").plan
    images, views, wanted = drawn(plan, small)
    got = recolor_batch(batch_of(images), color_table(views), plan)
    assert np.array_equal(np.stack(arrays(got)), np.stack(wanted))


def test_gray_first(small):
    plan = replace(PLAN, gray_first=True, gray_p=1.0, jitter=(0.4, 0.4, 0.4, 0.4), jitter_p=1.0, blur_p=0.0)
    images, views, wanted = drawn(plan, small)
    got = arrays(recolor_batch(batch_of(images), color_table(views), plan))
    assert differences(list(zip(got, wanted, strict=True)))[0] <= 4
    last = arrays(recolor_batch(batch_of(images), color_table(views), replace(plan, gray_first=False)))
    assert differences(list(zip(got, last, strict=True)))[0] > 4


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels(small, channels):
    plan = replace(PLAN, jitter=(0.4, 0.4, 0.0, 0.0), gray_p=0.0)
    pairs = zip(small, reversed(small), strict=True)
    images = [np.ascontiguousarray(np.concatenate(pair, axis=2)[:, :, :channels]) for pair in pairs]
    images, views, wanted = drawn(plan, images)
    got = recolor_batch(batch_of(images), color_table(views), plan)
    assert got.shape[1] == channels
    assert differences(list(zip(arrays(got), wanted, strict=True)))[0] <= 4


# --- form ---


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_memory_order_is_kept_and_changes_nothing(small, memory):
    plan = find_preset("swav").plan
    images, views, _ = drawn(replace(plan, crops=plan.crops[2:3]), small)
    batch = batch_of(images).contiguous(memory_format=memory)
    before = batch.clone()
    got = recolor_batch(batch, color_table(views), plan)
    assert got.is_contiguous(memory_format=memory)
    assert torch.equal(batch, before)
    assert torch.equal(got, recolor_batch(batch_of(images), color_table(views), plan))


@pytest.mark.parametrize("kind", ["pil", "gaussian"])
def test_a_sample_does_not_depend_on_its_batch(small, kind):
    """Bit for bit: alone, in another order, among others with wider blur kernels."""
    plan = replace(find_preset("swav").plan, crops=(CropSpec(96, 0.2, 1.0),), blur=kind)
    images, views, _ = drawn(plan, small)
    batch = batch_of(images)
    whole = recolor_batch(batch, color_table(views), plan)
    for row in range(len(images)):
        alone = recolor_batch(batch[row : row + 1], color_table(views[row : row + 1]), plan)
        assert torch.equal(alone[0], whole[row])
    turned = recolor_batch(batch.flip(0), color_table(views[::-1]), plan)
    assert torch.equal(turned.flip(0), whole)
    changed = [replace(view, blur_radius=9.0, jitter=(0.0, 2.0, 0.0, 0.5)) for view in views]
    mixed = recolor_batch(batch, color_table([views[0], *changed[1:]]), plan)
    assert torch.equal(mixed[0], whole[0])
    assert not torch.equal(mixed[1], whole[1])


def test_operations_that_no_sample_has(small):
    none = [plain_view(image) for image in small]
    assert torch.equal(recolor_batch(batch_of(small), color_table(none), PLAN), batch_of(small).float())
    empty = recolor_batch(batch_of(small)[:0], color_table([]), PLAN)
    assert empty.shape == (0, 3, 96, 96) and empty.dtype == torch.float32


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["pil", "gaussian"])
def test_training_in_half_precision_changes_nothing(small, kind, half):
    plan = replace(find_preset("swav").plan, blur=kind, crops=(CropSpec(96, 0.2, 1.0),), blur_p=1.0)
    cuts, views, _ = drawn(plan, small)
    wanted = recolor_batch(batch_of(cuts), color_table(views), plan)
    with torch.autocast("cpu", dtype=half):  # where the loop prepares its batches
        got = recolor_batch(batch_of(cuts), color_table(views), plan)
    assert got.dtype == torch.float32 and torch.equal(got, wanted)


def test_every_order_is_followed(small):
    image = small[0]
    jitter, plan = (1.4, 0.6, 1.5, 0.0), replace(PLAN, jitter=(0.8, 0.8, 0.8, 0.0))
    views = [plain_view(image, jitter=jitter, jitter_order=order) for order in ORDERS]
    got = arrays(recolor_batch(batch_of([image] * 24), color_table(views), plan))
    wanted = [apply_view(image, view, plan) for view in views]
    assert differences(list(zip(got, wanted, strict=True)))[0] <= 3
    assert len({row.tobytes() for row in got}) == 6  # hue is left out: the others' orders


def test_a_table_holds_the_rows_of_its_views(small):
    plan = find_preset("swav").plan
    _, views, _ = drawn(replace(plan, crops=plan.crops[:1]), small)
    table = color_table(views)
    assert len(table) == len(views)
    # Two views each of six images, view by view: images 2 to 4 are rows 2, 3, 8 and 9.
    part, wanted = table.rows_of(slice(2, 4), 6), color_table([views[row] for row in (2, 3, 8, 9)])
    for name in ("order", "factors", "gray", "blur"):
        assert np.array_equal(getattr(part, name), getattr(wanted, name))
