"""A user's own transforms: any callable, repeatable by key, and clear words when something is off."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tiny import image_folder, pixels
from zoo.data.decode import ArrayPicture
from zoo.data.folder import open_folder
from zoo.data.loader import EpochOrder, view_batches
from zoo.data.views.own import OwnViews
from zoo.errors import InputError

EXAMPLE = ArrayPicture(pixels(0, 40))
OTHER = ArrayPicture(pixels(1, 30))


def crops(size, **options):
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(size, scale=(0.3, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            *options.get("then", ()),
        ]
    )


FLOATS = (v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3))


class Several(torch.nn.Module):
    """One callable that gives all views: two large, one small."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = crops(16), crops(8)

    def forward(self, image):
        return [self.large(image), self.large(image), self.small(image)]


KINDS = {
    "one that gives several": Several(),
    "a list": [crops(16), crops(16), crops(8)],
    "a list of floats": [crops(16, then=FLOATS), crops(16, then=FLOATS), crops(8, then=FLOATS)],
    "pictures": [crops(16, then=(v2.ToPILImage(),))] * 2 + [crops(8, then=(v2.ToPILImage(),))],
    "arrays": [lambda image, size=size: crops(size)(image).numpy().transpose(1, 2, 0) for size in (16, 16, 8)],
    "numpy's and Python's generators": [
        lambda image, size=size: np.roll(
            np.asarray(image.resize((size, size))), (np.random.randint(size), random.randrange(size)), (0, 1)
        )
        for size in (16, 16, 8)
    ],
}  # fmt: skip


def same(first, second):
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_sizes(kind):
    maker = OwnViews(KINDS[kind], EXAMPLE)
    assert maker.groups == ((16, 2), (8, 1))
    views, params = maker.make(OTHER, 5)
    assert [view.shape for view in views] == [(16, 16, 3), (16, 16, 3), (8, 8, 3)]
    assert params == []
    wanted = np.float32 if kind == "a list of floats" else np.uint8
    assert all(view.dtype == wanted and view.flags.c_contiguous for view in views)


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_alone_decides_and_no_generator_is_moved(kind):
    maker = OwnViews(KINDS[kind], EXAMPLE)
    torch.manual_seed(8), np.random.seed(8), random.seed(8)
    first, _ = maker.make(OTHER, 5)
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    second, _ = maker.make(OTHER, 5)
    assert same(first, second)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert random.getstate() == before[2]
    assert not same(first, maker.make(OTHER, 6)[0])
    assert not same(first[:1], first[1:2])  # the second view goes on with the generator


def test_a_failing_transform_leaves_the_generators_alone():
    def failing(image):
        if image.width == 30:
            torch.rand(3), np.random.rand(3), random.random()
            raise ZeroDivisionError
        return image.resize((8, 8))

    maker = OwnViews(failing, EXAMPLE)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(ZeroDivisionError):
        maker.make(OTHER, 5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_values_are_those_of_the_transform():
    maker = OwnViews([v2.Compose([v2.CenterCrop(24), v2.PILToTensor()])], EXAMPLE)
    (view,), _ = maker.make(EXAMPLE, 5)
    assert np.array_equal(view, EXAMPLE.pixels()[8:32, 8:32])
    maker = OwnViews([v2.Compose([v2.CenterCrop(24), v2.PILToTensor(), *FLOATS])], EXAMPLE)
    (view,), _ = maker.make(EXAMPLE, 5)
    assert np.allclose(view, (EXAMPLE.pixels()[8:32, 8:32] / 255 - 0.5) / 0.2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_of_any_width(dtype):
    maker = OwnViews(v2.Compose([v2.CenterCrop(8), v2.PILToTensor(), v2.ToDtype(dtype, scale=True)]), EXAMPLE)
    (view,), _ = maker.make(EXAMPLE, 1)
    assert np.allclose(view, EXAMPLE.pixels()[16:24, 16:24] / 255, atol=0.01)


def test_a_tensor_with_gradients_and_of_a_subclass():
    weight = torch.nn.Parameter(torch.ones(3, 1, 1))
    maker = OwnViews(lambda image: weight * v2.functional.to_image(image.resize((8, 8))) / 255, EXAMPLE)
    assert maker.make(EXAMPLE, 1)[0][0].shape == (8, 8, 3)


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels(channels):
    picture = ArrayPicture(np.concatenate([pixels(0, 40), pixels(1, 40)], axis=2)[:, :, :channels].copy())
    seen = []

    def crop(image):
        seen.append(image)
        tensor = v2.functional.to_image(image) if channels == 1 else torch.from_numpy(image).permute(2, 0, 1)
        return v2.functional.center_crop(tensor, [8])

    (view,), _ = OwnViews(crop, picture).make(picture, 1)
    assert np.array_equal(view, picture.pixels()[16:24, 16:24])
    assert all(isinstance(image, Image.Image if channels == 1 else np.ndarray) for image in seen)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda image: image.resize((8, 9)), ["(9, 8, 3)", "not a square picture"]),
        (lambda image: {"image": image}, ["dict", "not a square picture"]),
        (lambda image: None, ["NoneType"]),
        (lambda image: [image.resize((8, 8)), 3], ["int"]),
        (lambda image: torch.zeros(8), ["(8,)"]),
        (lambda image: torch.zeros(2, 3, 8, 8), ["(2, 3, 8, 8)"]),
        (lambda image: torch.zeros(3, 8, 8, dtype=torch.int64), ["int64"]),
        (lambda image: image.convert("1").resize((8, 8)), ["bool"]),
        (lambda image: image.convert("L").resize((8, 8)), ["made 3 channels into 1", "--channels"]),
        (lambda image: image.convert("RGBA").resize((8, 8)), ["made 3 channels into 4"]),
        (lambda image: np.zeros((8, 8)), ["made 3 channels into 1"]),
        (lambda image: [], ["gave no views"]),
        ([], ["gave no views"]),
        ("resize", ["a str", "can't be called"]),
        ([lambda image: image.resize((8, 8)), 3], ["a int", "can't be called"]),
        (v2.CenterCrop, ["the class CenterCrop"]),
        (lambda: None, ["failed on its first picture (TypeError"]),
    ],
)
def test_what_is_no_view_is_said_clearly(transform, words):
    with pytest.raises(InputError) as caught:
        OwnViews(transform, EXAMPLE)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.where == "views"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda image: image.resize((image.width, image.width)), ["1 x 30 px", "1 x 40 px"]),
        (lambda image: [image.resize((8, 8))] * (image.width // 10), ["3 x 8 px", "4 x 8 px"]),
        (
            lambda image: np.zeros((8, 8, 3), np.uint8 if image.width == 40 else np.float32),
            ["1 x 8 px (float32)", "1 x 8 px (uint8)"],
        ),
    ],
)
def test_views_that_vary_from_image_to_image_are_refused(transform, words):
    maker = OwnViews(transform, EXAMPLE)
    maker.make(EXAMPLE, 3)
    with pytest.raises(InputError) as caught:
        maker.make(OTHER, 3)
    assert all(word in caught.value.what for word in words)
    assert "crop or a resize" in caught.value.fix


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["one that gives several", "a list of floats"])
def test_batches_are_the_same_whatever_the_workers(tmp_path, kind):
    source = open_folder(image_folder(tmp_path, 9))
    maker = OwnViews(KINDS[kind], EXAMPLE)
    assert pickle.loads(pickle.dumps(maker)).groups == maker.groups
    order = EpochOrder(len(source), 4, 7)

    def all_views(workers, first=0):
        found = view_batches(source, maker, order, first_step=first, last_step=4, workers=workers)
        return [view for batch in found for view in batch.views]

    alone = all_views(0)
    assert [tuple(view.shape) for view in alone[:2]] == [(8, 3, 16, 16), (4, 3, 8, 8)]
    assert alone[0].dtype == (torch.float32 if "floats" in kind else torch.uint8)
    assert all(torch.equal(a, b) for a, b in zip(alone, all_views(2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone[4:], all_views(0, first=2), strict=True))
