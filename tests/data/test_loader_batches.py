"""Batches: the same whoever makes them, and nothing in them that was not drawn for them."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.data._utils.pin_memory as torch_pinning
from PIL import Image
from streams import PLAN, SEED, bits, stream

from tiny import half_jpeg, image_folder, pixels, save_image
from zoo.data.builtin import PhotoPatches
from zoo.data.decode import ArrayPicture, Picture, open_image
from zoo.data.folder import FileImages, open_folder
from zoo.data.loader import EpochOrder, _ViewDataset
from zoo.data.open import ConcatImages
from zoo.data.views.maker import PlannedViews
from zoo.data.views.own import OwnViews
from zoo.data.views.params import CropSpec, ViewParams, ViewPlan, shrink_for
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_uniforms

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FileImages:
    return open_folder(image_folder(tmp_path_factory.mktemp("images"), 14))


@pytest.mark.parametrize("colors", [True, False])
def test_batches_are_the_same_for_any_workers_and_after_resuming(source: FileImages, colors: bool) -> None:
    maker = PlannedViews(PLAN, colors=colors)
    alone = [bits(batch) for batch in stream(source, workers=0, maker=maker, last=7)]
    assert len(alone) == 7  # epochs of 3 steps: the last short batch is dropped
    for workers, first in ((1, 0), (3, 0), (2, 4)):
        found = [bits(batch) for batch in stream(source, workers=workers, maker=maker, first=first, last=7)]
        assert found == alone[first:]


def test_colors_left_to_the_device_come_row_by_row(source: FileImages) -> None:
    maker = PlannedViews(PLAN, colors=False)
    for batch in stream(source, workers=1, maker=maker, last=2):
        assert batch.colors is not None
        assert [len(table) for table in batch.colors] == [len(view) for view in batch.views]
        for row, sample in enumerate(batch.ids.tolist()):
            params = maker.params(20, 20, keyed_key(SEED, "views", batch.epoch, sample))
            for view, table, at in ((0, 0, row), (1, 0, 4 + row), (2, 1, row)):
                found = batch.colors[table]
                assert found.gray[at] == params[view].gray
                assert found.blur[at] == (params[view].blur_radius or 0.0)
                assert (found.order[at] >= 0) == (params[view].jitter is not None)


def test_no_two_crops_are_the_same_whatever_the_workers(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for i in range(8):
        Image.fromarray(noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    source = open_folder(tmp_path)
    maker = PlannedViews(ViewPlan((CropSpec(16, 0.2, 0.6), CropSpec(16, 0.2, 0.6))), colors=False)

    def drawn(workers: int) -> list[bytes]:
        found = list(stream(source, workers=workers, maker=maker, last=4))  # two epochs
        assert sorted(int(i) for batch in found for i in batch.ids) == sorted([*range(8)] * 2)
        return [view.numpy().tobytes() for batch in found for view in batch.views[0]]

    two = drawn(2)
    assert len(set(two)) == len(two) == 2 * 8 * 2
    assert drawn(1) == drawn(3) == two


def test_skipping_reports_exactly_what_the_keys_say(tmp_path: Path) -> None:
    count, damaged = 40, {7, 31}
    image_folder(tmp_path, count, classes=0)
    for sample in damaged:
        half_jpeg(tmp_path / f"{sample:03d}.png")
    source = open_folder(tmp_path)
    order = EpochOrder(count, 8, SEED)
    met = 0
    for step, batch in enumerate(stream(source, workers=2, batch_size=8, last=30, skip_bad=True)):
        epoch, position = divmod(step, order.batches)
        ids, bad = [], []
        for wanted in order.epoch(epoch)[position].tolist():
            sample, attempt = wanted, 0
            while sample in damaged:
                bad.append(sample)
                draw = keyed_uniforms(keyed_key(SEED, "substitute", epoch, wanted, attempt), 1)[0]
                sample, attempt = int(draw * count), attempt + 1
            ids.append(sample)
        assert batch.ids.tolist() == ids
        assert [left.sample for left in batch.bad] == bad
        met += len(set(bad))
    assert met == 6 * len(damaged)  # 5 %, each of them once an epoch


def test_decoding_at_a_smaller_scale_draws_the_same(tmp_path: Path) -> None:
    for i in range(4):
        Image.fromarray(pixels(i, 320)).save(tmp_path / f"{i}.jpg", quality=95)
    source = open_folder(tmp_path)
    plan = ViewPlan((CropSpec(32, 0.3, 1.0), CropSpec(16, 0.1, 0.3)))
    whole, scaled = (PlannedViews(plan, colors=False, scaled_decoding=on) for on in (False, True))
    picture = open_image(source.where(0))
    params = scaled.params(picture.height, picture.width, 1)
    assert params == whole.params(picture.height, picture.width, 1)
    assert shrink_for(params) > 1  # else this test says nothing
    for a, b in zip(
        stream(source, workers=0, maker=whole, last=3),
        stream(source, workers=0, maker=scaled, last=3),
        strict=True,
    ):
        assert torch.equal(a.ids, b.ids)
        assert a.colors is not None and b.colors is not None
        for left, right in zip(a.colors, b.colors, strict=True):
            for part in ("order", "factors", "gray", "blur"):
                assert np.array_equal(getattr(left, part), getattr(right, part))
        differences = torch.cat(
            [(x.float() - y.float()).abs().flatten() for x, y in zip(a.views, b.views, strict=True)]
        )
        assert 0 < differences.mean() < 2  # the same crops, decoded another way


def test_generators_are_not_touched(source: FileImages) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    before = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
    for workers in (0, 2):
        list(stream(source, workers=workers, last=4))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert pickle.dumps(np.random.get_state()) == before[1]
    assert random.getstate() == before[2]


class _Uneven(PlannedViews):
    """Views that are not alike: those of tall pictures are floating-point."""

    def make(self, picture: Picture, key: int) -> tuple[list[np.ndarray], list[ViewParams]]:
        views, params = super().make(picture, key)
        return [view.astype(np.float32) if picture.height > 20 else view for view in views], params


@pytest.mark.parametrize("workers", [0, 1])
def test_views_that_are_not_alike_are_named(tmp_path: Path, workers: int) -> None:
    image_folder(tmp_path, 3, classes=0)
    odd = save_image(tmp_path / "odd.png", 1, side=24)
    with pytest.raises(InputError, match=r"are float32 of shape .* are uint8 of shape") as caught:
        next(stream(open_folder(tmp_path), workers=workers, maker=_Uneven(PLAN)))
    assert caught.value.where == str(odd)  # the last of this order


def two_halves(image: Image.Image) -> list[Image.Image]:
    """A user's own views."""
    return [image.resize((16, 16)), image.crop((0, 0, 8, 8))]


def test_what_travels_to_a_spawned_worker_survives_the_trip(source: FileImages) -> None:
    own = OwnViews(two_halves, ArrayPicture(pixels(0)))
    for images in (source, PhotoPatches("val"), ConcatImages([source, source])):
        for maker in (PlannedViews(PLAN), PlannedViews(PLAN, colors=False), own):
            dataset = _ViewDataset(images, maker, SEED, skip_bad=True)
            copy = pickle.loads(pickle.dumps(dataset))
            keys = [(0, 3), (0, 11)]
            assert bits(copy.__getitems__(keys)) == bits(dataset.__getitems__(keys))  # type: ignore[arg-type]


def test_pinning_a_batch_pins_its_views(source: FileImages, monkeypatch: pytest.MonkeyPatch) -> None:
    # Page-locked memory needs a GPU's driver: torch's part is replaced by a copy with a mark.
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = next(stream(source, workers=0))
    before = [view.clone() for view in batch.views]
    found = torch_pinning.pin_memory(batch)
    assert found is batch
    assert pinned == [view.data_ptr() for view in batch.views]
    assert all(torch.equal(a, b) for a, b in zip(batch.views, before, strict=True))
    assert all(view.is_contiguous(memory_format=torch.channels_last) for view in batch.views)
    error = InputError("what")
    assert torch_pinning.pin_memory(error) is error  # how a bad file travels
