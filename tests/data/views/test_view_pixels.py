"""Pixels of each operation and of whole views against Pillow, torchvision and OpenCV, on photographs.

The stated tolerances, in 8-bit levels: resizing (bilinear), brightness, contrast, saturation, grayscale and
Pillow's blur 1; hue 12 and 0.5 on average. Bicubic: 2 with Pillow 10; Pillow 13 takes its passes in another
order, so overshoots are cut off elsewhere and a few values in a thousand differ by more.
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from pillow_views import ADJUST, differences, only, pillow_view, plain_view
from torchvision.transforms import functional as F

from zoo.data.views.apply import (
    apply_view,
    blur,
    box_kernel,
    box_shape,
    cut,
    normalize,
    resize_and_center,
)
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import ORDERS, CropSpec, ViewPlan
from zoo.data.views.presets import find_preset
from zoo.keyed import keyed_key, keyed_uniforms

PLAN = ViewPlan((CropSpec(224, 0.14, 1.0),), jitter=(1.0, 1.0, 1.0, 0.5))
BICUBIC = replace(PLAN, interpolation="bicubic")
GAUSSIAN = replace(PLAN, blur="gaussian")
RADII = (0.1 + 1.9 * keyed_uniforms(keyed_key(0, "radii"), 8)).tolist()


def boxes(photo):
    """Shrinking, about as it is, enlarging, and oddly shaped."""
    height, width = photo.shape[:2]
    return [(3, 5, height - 9, width - 11), (30, 20, 60, 75), (10, 10, 40, 33), (0, 0, 20, height // 2)]


def cuts(photos, plan):
    for photo in photos:
        for top, left, height, width in boxes(photo):
            for size in (224, 96, 32):
                view = plain_view(photo, top=top, left=left, height=height, width=width, size=size)
                yield cut(photo, view, plan), pillow_view(photo, view, plan)


def test_cropping_and_bilinear_resizing(photos):
    largest, mean = differences(list(cuts(photos, PLAN)))
    assert largest <= 1
    assert mean <= 0.2


def test_cropping_and_bicubic_resizing(photos):
    pairs = list(cuts(photos, BICUBIC))
    largest, mean = differences(pairs)
    assert largest <= 16
    assert mean <= 0.2
    beyond = [(np.abs(np.subtract(a, b, dtype=np.int64)) > 1).mean() for a, b in pairs]
    assert np.mean(beyond) <= 0.002


def test_mirroring_is_exact_and_comes_after_the_crop(photos):
    for photo in photos[:3]:
        view = plain_view(photo, top=3, left=40, height=96, width=96, size=96)
        flipped = cut(photo, replace(view, flip=True), PLAN)
        assert np.array_equal(flipped, photo[3:99, 40:136][:, ::-1])
        assert np.array_equal(cut(photo, view, PLAN), photo[3:99, 40:136])


@pytest.mark.parametrize(("which", "low", "high"), [(0, 0.0, 2.0), (1, 0.0, 2.0), (2, 0.0, 2.0)])
def test_brightness_contrast_and_saturation(squares, which, low, high):
    factors = [low, 1.0, high, *(low + (high - low) * keyed_uniforms(which, len(squares))).tolist()]
    pairs = [
        (
            apply_view(
                image, plain_view(image, jitter=only(which, factor)), replace(PLAN, jitter=only(which, 1.0))
            ),
            np.asarray(ADJUST[which](Image.fromarray(image), factor)),
        )
        for image, factor in zip([*squares[:3], *squares], factors, strict=True)
    ]
    assert differences(pairs)[0] <= 1


def test_hue(squares):
    turns = [-0.5, 0.5, 0.0, *(keyed_uniforms(7, len(squares)) - 0.5).tolist()]
    pairs = [
        (
            apply_view(image, plain_view(image, jitter=only(3, turn)), replace(PLAN, jitter=only(3, 0.5))),
            np.asarray(F.adjust_hue(Image.fromarray(image), turn)),
        )
        for image, turn in zip([*squares[:3], *squares], turns, strict=True)
    ]
    largest, mean = differences(pairs)
    assert largest <= 12
    assert mean <= 0.5


def test_grayscale(squares):
    pairs = [
        (apply_view(image, plain_view(image, gray=True), PLAN), np.asarray(F.rgb_to_grayscale(Image.fromarray(image), 3)))
        for image in squares
    ]  # fmt: skip
    assert differences(pairs)[0] <= 1
    assert all((gray == gray[:, :, :1]).all() for gray, _ in pairs)


def test_a_kind_of_jitter_that_the_plan_lacks_is_left_out(squares):
    image = squares[1]
    view = plain_view(image, jitter=(1.0, 1.0, 1.0, 0.0), jitter_order=(3, 2, 1, 0))
    # Even a neutral hue would round; without strength it isn't touched.
    assert np.array_equal(apply_view(image, view, replace(PLAN, jitter=(0.4, 0.4, 0.4, 0.0))), image)


@pytest.mark.parametrize("order", ORDERS[::5])
def test_jitter_follows_the_drawn_order(squares, order):
    jitter = (1.4, 0.6, 1.5, 0.0)
    plan = replace(PLAN, jitter=(0.8, 0.8, 0.8, 0.0))
    pairs = []
    for image in squares[:6]:
        view = plain_view(image, jitter=jitter, jitter_order=order)
        pairs.append((apply_view(image, view, plan), pillow_view(image, view, plan)))
    assert differences(pairs)[0] <= 3  # one level an operation
    other = [apply_view(a, plain_view(a, jitter=jitter, jitter_order=order[::-1]), plan) for a in squares[:6]]
    assert differences([(a, b) for a, (b, _) in zip(other, pairs, strict=True)])[0] > 10


@pytest.mark.parametrize("gray_first", [False, True])
def test_grayscale_before_or_after_the_jitter(squares, gray_first):
    plan = replace(PLAN, gray_first=gray_first)
    image = squares[0]
    view = plain_view(image, gray=True, jitter=(1.2, 0.7, 1.6, 0.2), jitter_order=(2, 3, 0, 1))
    got = apply_view(image, view, plan)
    assert differences([(got, pillow_view(image, view, plan))])[0] <= 4
    swapped = apply_view(image, view, replace(plan, gray_first=not gray_first))
    assert differences([(got, swapped)])[0] > 4


@pytest.mark.parametrize("radius", RADII)
def test_pillows_blur(squares, radius):
    pairs = [
        (
            blur(image, plain_view(image, blur_radius=radius), PLAN),
            np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius))),
        )
        for image in squares
    ]
    assert differences(pairs)[0] <= 1


@pytest.mark.parametrize("radius", [0.1, 0.5, 0.75, 1.0, 2.0])
def test_pillows_blur_of_a_round_radius(squares, radius):
    """Sums end on .5 exactly, every sixth one at a radius of 1: rounded otherwise they would be 3 levels off."""
    image = squares[0]
    want = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)))
    view = plain_view(image, blur_radius=radius)
    assert np.array_equal(blur(image, view, PLAN), want)
    assert np.array_equal(blur(image[:, :, [1, 0]], view, PLAN), want[:, :, [1, 0]])  # two channels
    assert np.array_equal(blur(image[:, :, :1], view, PLAN), want[:, :, :1])
    assert np.array_equal(blur(image[:, :, 0], view, PLAN), want[:, :, 0])


@pytest.mark.parametrize("radius", [0.1, 0.5, 1.0, 1.7, 2.0, 3.3])
def test_the_box_has_the_gaussians_variance(radius):
    """Three passes of the box kernel have the variance that Pillow's ``BoxBlur.c`` aims at."""
    taps = box_kernel(radius).astype(np.float64)
    assert len(taps) % 2 == 1
    assert np.allclose(taps, taps[::-1])
    assert taps.sum() == pytest.approx(1.0, abs=1e-6)
    places = np.arange(len(taps)) - len(taps) // 2
    assert 3 * (taps * places**2).sum() == pytest.approx(radius**2, rel=1e-3)


def test_many_boxes_have_the_shape_of_each():
    radii = np.random.default_rng(0).uniform(0.1, 5.0, 300)
    whole, edge = box_shape(radii)
    alone = [box_shape(float(radius)) for radius in radii]
    assert whole.tolist() == [one for one, _ in alone] and set(whole) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert np.allclose(edge, [one for _, one in alone], rtol=1e-12, atol=1e-12)
    assert (edge >= 0).all() and (edge < 1).all()


@pytest.mark.parametrize("radius", [0.1, 0.31, 0.7, 1.3, 2.0])
def test_the_true_gaussian(squares, radius):
    taps = np.exp(-0.5 * (np.arange(-11, 12) / radius) ** 2)
    taps /= taps.sum()
    for image in squares[:8]:
        got = blur(image, plain_view(image, blur_radius=radius), GAUSSIAN)
        assert np.array_equal(got, cv2.GaussianBlur(image, (23, 23), radius))
        exact = cv2.sepFilter2D(image.astype(np.float64), -1, taps, taps, borderType=cv2.BORDER_REFLECT_101)
        assert np.abs(got - exact).max() <= 1.5


def test_no_blur_is_no_change(squares):
    image = squares[0]
    assert np.array_equal(blur(image, plain_view(image), PLAN), image)


@pytest.mark.parametrize(
    "name", ["swav", "swav-opencv-2x224+6x96", "moco-v1", "amdim-128", "amdim-32", "small-32"]
)
def test_whole_views(photos, name):
    plan = find_preset(name).plan
    maker = PlannedViews(plan)
    pairs, plain = [], []
    for sample, photo in enumerate(photos):
        for view in maker.params(*photo.shape[:2], keyed_key(0, "views", 0, sample)):
            got = apply_view(photo, view, plan)
            assert got.shape == (view.size, view.size, 3) and got.dtype == np.uint8
            pairs.append((got, pillow_view(photo, view, plan)))
            if view.jitter is None:
                plain.append(pairs[-1])
    largest, mean = differences(pairs)
    assert largest <= 24  # contrast and saturation enlarge what hue rounded
    assert mean <= 0.4
    if plain:
        assert differences(plain)[0] <= (4 if plan.interpolation == "bilinear" else 16)


def test_the_image_itself_is_never_changed(photos):
    plan = find_preset("amdim-32").plan
    before = photos[0].copy()
    photos[0].setflags(write=False)  # memory that nobody may write to is fine, too
    try:
        for key in range(40):
            for view in PlannedViews(plan).params(*before.shape[:2], key):
                apply_view(photos[0], view, plan)
    finally:
        photos[0].setflags(write=True)
    assert np.array_equal(photos[0], before)


# --- other channels ---


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("kind", ["pil", "gaussian"])
def test_other_channels_are_treated_one_by_one(photos, channels, kind):
    many = np.ascontiguousarray(
        np.concatenate([photos[0][:300, :300], photos[1][:300, :300]], 2)[:, :, :channels]
    )
    plan = replace(PLAN, jitter=(0.4, 0.0, 0.0, 0.0), blur=kind)
    view = plain_view(many, top=10, height=200, width=250, size=64, flip=True, blur_radius=1.3, shift=(2, -3))
    view = replace(view, jitter=(1.3, 1.0, 1.0, 0.0))
    got = apply_view(many, view, plan)
    assert got.shape == (64, 64, channels)
    for channel in range(channels):
        alone = apply_view(np.ascontiguousarray(many[:, :, channel : channel + 1]), view, plan)
        assert differences([(got[:, :, channel], alone[:, :, 0])])[0] <= 1


def test_contrast_of_other_channels_keeps_their_mean(photos):
    gray = np.array(Image.fromarray(photos[0][:300, :300]).convert("L"))[:, :, None]
    plan = replace(PLAN, jitter=(0.0, 0.4, 0.0, 0.0))
    got = apply_view(gray, plain_view(gray, jitter=(1.0, 0.5, 1.0, 0.0)), plan)
    wanted = np.asarray(F.adjust_contrast(Image.fromarray(gray[:, :, 0]), 0.5))[:, :, None]
    assert differences([(got, wanted)])[0] <= 1


# --- normalisation and the test transform ---


@pytest.mark.parametrize("name", ["swav", "moco-v2", "amdim-64", "amdim-32"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_normalize_is_to_tensor_and_normalize(squares, name, memory):
    mean, std = find_preset(name).plan.mean, find_preset(name).plan.std
    images = np.stack([image for image in squares if len(image) == 96])
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(memory_format=memory)
    before = batch.clone()
    got = normalize(batch, mean, std)
    assert got.dtype == torch.float32
    assert got.is_contiguous(memory_format=memory)
    assert torch.equal(batch, before)
    for row, image in zip(got, images, strict=True):
        expected = F.normalize(F.to_tensor(Image.fromarray(image)), list(mean), list(std))
        torch.testing.assert_close(row, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_normalize_of_other_channels(channels, memory):
    batch = torch.randint(
        0, 256, (3, channels, 4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    mean, std = tuple(0.1 * (i + 1) for i in range(channels)), tuple(0.2 + 0.05 * i for i in range(channels))
    got = normalize(batch.contiguous(memory_format=memory), mean, std)
    expected = F.normalize(batch.float() / 255, list(mean), list(std))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_test_transform_is_torchvisions(photos, interpolation):
    mode = F.InterpolationMode(interpolation)
    for photo in [*photos[:4], photos[4][:40, :30], photos[5][:10, :30]]:
        for resize, crop in ((146, 128), (48, 48), (24, 20)):
            expected = F.center_crop(F.resize(Image.fromarray(photo), [resize], mode), [crop])
            got = resize_and_center(photo, resize, crop, interpolation)
            assert np.array_equal(got, np.asarray(expected))


@pytest.mark.parametrize("channels", [1, 5])
def test_the_test_transform_of_other_channels(photos, channels):
    many = np.concatenate([photos[0][:300, :300], photos[1][:300, :300]], 2)[:, :, :channels]
    got = resize_and_center(np.ascontiguousarray(many), 64, 56)
    assert got.shape == (56, 56, channels) and got.dtype == np.uint8
    for channel in range(channels):
        alone = F.center_crop(
            F.resize(Image.fromarray(np.ascontiguousarray(many[:, :, channel])), [64]), [56]
        )
        assert differences([(got[:, :, channel], np.asarray(alone))])[0] <= 1
