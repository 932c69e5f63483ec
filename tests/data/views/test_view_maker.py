"""From a picture and a key to views: scaled decoding, colours left to the device, other channels."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from pillow_views import differences, plain_view

from tiny import pixels
from zoo.data.decode import ArrayPicture, open_image
from zoo.data.views.apply import apply_view, cut
from zoo.data.views.maker import PlannedViews
from zoo.data.views.own import OwnViews
from zoo.data.views.params import CropSpec, ViewPlan, shrink_for
from zoo.data.views.presets import find_preset
from zoo.keyed import keyed_key

PLAIN = {"jitter_p": 0.0, "gray_p": 0.0, "blur_p": 0.0}
SMALL_CROPS = ViewPlan((CropSpec(64, 0.3, 1.0), CropSpec(64, 0.3, 1.0), CropSpec(32, 0.05, 0.3)), **PLAIN)


class Watched:
    """A picture that can shrink, and remembers what it was asked for."""

    can_shrink = True

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.asked: list[int] = []

    def pixels(self, shrink: int = 1) -> np.ndarray:
        self.asked.append(shrink)
        return np.zeros((-(-self.height // shrink), -(-self.width // shrink), 3), np.uint8)


# --- scaled decoding ---


@pytest.mark.parametrize(
    ("box", "size", "shrink"),
    [
        ((100, 100), 224, 1),  # an enlargement
        ((224, 300), 224, 1),
        ((447, 900), 224, 1),
        ((448, 448), 224, 2),
        ((900, 895), 224, 2),
        ((896, 896), 224, 4),
        ((1792, 1792), 224, 8),
        ((9000, 9000), 224, 8),  # more isn't to be had
        ((96, 95), 96, 1),
    ],
)
def test_how_much_smaller_a_picture_may_be_decoded(box, size, shrink):
    view = plain_view(np.empty((1, 1, 3), np.uint8), height=box[0], width=box[1], size=size)
    assert shrink_for([view]) == shrink
    large = replace(view, height=9000, width=9000)
    assert shrink_for([large, view, large]) == shrink  # the most demanding view decides
    assert shrink_for([replace(view, size=10_000), large]) == 1


@pytest.mark.parametrize("name", ["swav", "small-32", "small-64", "amdim-128"])
def test_no_crop_becomes_smaller_than_its_output(name):
    plan = find_preset(name).plan
    seen = set()
    for key in range(400):
        height, width = 100 + 37 * key % 3000, 100 + 53 * key % 4000
        views = PlannedViews(plan).params(height, width, key)
        shrink = shrink_for(views)
        seen.add(shrink)
        if shrink == 1:
            continue
        pixels_there = np.empty((-(-height // shrink), -(-width // shrink)), bool)
        for view in views:
            rows = slice(round(view.top / shrink), round((view.top + view.height) / shrink))
            columns = slice(round(view.left / shrink), round((view.left + view.width) / shrink))
            assert min(pixels_there[rows, columns].shape) >= view.size
        assert shrink == 8 or min(min(v.height, v.width) / v.size for v in views) < 2 * shrink
    assert {1, 2} <= seen


@pytest.mark.parametrize("scaled", [True, False])
def test_the_picture_is_asked_for_what_the_crops_need(scaled):
    picture = Watched(2000, 3000)
    maker = PlannedViews(SMALL_CROPS, scaled_decoding=scaled)
    views, _ = maker.make(picture, 3)
    assert picture.asked == [shrink_for(maker.params(2000, 3000, 3)) if scaled else 1]
    assert [view.shape for view in views] == [(64, 64, 3), (64, 64, 3), (32, 32, 3)]
    enlarged = Watched(50, 60)
    PlannedViews(find_preset("swav").plan, scaled_decoding=scaled).make(enlarged, 3)
    assert enlarged.asked == [1]


def test_a_picture_that_cannot_shrink_is_decoded_whole():
    picture = Watched(2000, 3000)
    picture.can_shrink = False
    PlannedViews(SMALL_CROPS).make(picture, 3)
    assert picture.asked == [1]


@pytest.fixture(scope="module")
def page(photos):
    """3000 x 2000 pixels full of detail: thirty photographs side by side."""
    image = Image.new("RGB", (3000, 2000))
    for place in range(30):
        tile = Image.fromarray(photos[place % len(photos)]).resize((500, 400))
        image.paste(tile, (place % 6 * 500, place // 6 * 400))
    return image


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_views_of_a_picture_decoded_smaller_are_close(page, interpolation, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    page.save(file, "JPEG", quality=92, exif=exif)
    picture = open_image(file.getvalue())
    assert picture.can_shrink
    assert (picture.width, picture.height) == ((3000, 2000) if orientation == 1 else (2000, 3000))
    plan = replace(SMALL_CROPS, interpolation=interpolation)
    pairs, shrinks = [], set()
    for key in range(4):
        fast, exact = (PlannedViews(plan, scaled_decoding=s).make(picture, key)[0] for s in (True, False))
        pairs += zip(fast, exact, strict=True)
        shrinks.add(shrink_for(PlannedViews(plan).params(picture.height, picture.width, key)))
    assert shrinks == {8}
    # Of 255 levels, on pictures whose own levels vary by 55.
    assert differences(pairs)[1] <= 3
    assert max(differences([pair])[1] for pair in pairs) <= 6
    turned = [(fast[::-1], exact) for fast, exact in pairs]
    assert differences(turned)[1] > 20


# --- the two halves ---


def test_colours_are_made_here_or_handed_out(photos):
    plan = find_preset("swav").plan
    picture, key = ArrayPicture(photos[0]), keyed_key(0, "views", 1, 2)
    whole, nothing = PlannedViews(plan).make(picture, key)
    assert nothing == []
    bare, params = PlannedViews(plan, colors=False).make(picture, key)
    assert params == PlannedViews(plan).params(picture.height, picture.width, key)
    assert PlannedViews(plan).groups == plan.groups == ((224, 2), (96, 6))
    for view, cut_only, drawn in zip(whole, bare, params, strict=True):
        assert np.array_equal(view, apply_view(photos[0], drawn, plan))
        assert np.array_equal(cut_only, cut(photos[0], drawn, plan))


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels(channels):
    image = np.ascontiguousarray(np.concatenate([pixels(0, 60), pixels(1, 60)], axis=2)[:, :, :channels])
    plan = ViewPlan(
        (CropSpec(16, 0.3, 1.0), CropSpec(8, 0.1, 0.3)),
        jitter=(0.4, 0.4, 0.0, 0.0),
        gray_p=0.0,
        mean=(0.5,) * channels,
        std=(0.2,) * channels,
    )
    jittered = 0
    for key in range(20):
        views, _ = PlannedViews(plan).make(ArrayPicture(image), key)
        assert [view.shape for view in views] == [(16, 16, channels), (8, 8, channels)]
        bare, params = PlannedViews(plan, colors=False).make(ArrayPicture(image), key)
        assert [view.shape for view in bare] == [view.shape for view in views]
        jittered += params[0].jitter is not None and not np.array_equal(bare[0], views[0])
    assert jittered > 5


def test_the_memory_of_an_images_views_is_known_beforehand():
    five = ViewPlan(
        (CropSpec(16, 0.3, 1.0), CropSpec(8, 0.3, 1.0)), jitter_p=0, gray_p=0, mean=(0.5,) * 5, std=(0.5,) * 5
    )
    picture = ArrayPicture(np.zeros((20, 20, 5), dtype=np.uint8))
    views, _ = PlannedViews(five).make(picture, 0)
    assert PlannedViews(five).image_bytes == sum(view.nbytes for view in views) == 5 * (16**2 + 8**2)
    own = OwnViews(lambda image: [torch.zeros(5, 4, 4), torch.zeros(5, 4, 4)], picture)
    assert own.image_bytes == 2 * 5 * 16 * 4
