"""Batches: the same whatever the workers, the history or the starting point."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tiny import half_jpeg, image_folder, save_image
from zoo.data.folder import open_folder
from zoo.data.loader import EpochOrder, view_batches
from zoo.data.views.apply import apply_view
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import DRAWS_PER_VIEW, CropSpec, ViewPlan, draw_view
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation, keyed_uniforms

PLAN = ViewPlan((CropSpec(16, 0.3, 1.0), CropSpec(16, 0.3, 1.0), CropSpec(8, 0.1, 0.3)))


def batches(source, batch_size=4, first=0, last=None, workers=0, seed=5, **options):
    order = EpochOrder(len(source), batch_size, seed)
    last = 2 * order.batches if last is None else last
    return list(
        view_batches(
            source, PlannedViews(PLAN), order, first_step=first, last_step=last, workers=workers, **options
        )
    )


def assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.epoch == b.epoch
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.labels, b.labels)
        assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_folder(image_folder(tmp_path_factory.mktemp("images"), 14))


@pytest.fixture(scope="module")
def alone(source):
    return batches(source)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(source, alone, workers):
    assert_equal(batches(source, workers=workers), alone)


def test_the_shape_of_a_batch(source, alone):
    large, small = alone[0].views
    assert large.shape == (8, 3, 16, 16)  # crop-major: two views of four images
    assert small.shape == (4, 3, 8, 8)
    assert large.dtype == torch.uint8
    assert large.is_contiguous(memory_format=torch.channels_last)
    assert alone[0].size == 4
    assert alone[0].labels.tolist() == [source.label(int(i)) for i in alone[0].ids]


@pytest.mark.parametrize("step", [1, 4])
def test_rows_of_a_view_belong_to_the_ids(source, alone, step):
    batch = alone[step]
    for view in range(3):
        for row, sample in enumerate(batch.ids.tolist()):
            u = keyed_uniforms(keyed_key(5, "views", batch.epoch, sample), 3 * DRAWS_PER_VIEW).reshape(3, -1)
            params = draw_view(PLAN, PLAN.crops[view], 20, 20, u[view].tolist())
            expected = apply_view(source.read(sample), params, PLAN)
            got = batch.views[0][view * 4 + row] if view < 2 else batch.views[1][row]
            assert np.array_equal(got.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("first", [1, 3, 5])
def test_starting_anywhere_gives_the_tail(source, alone, first):
    assert_equal(batches(source, first=first), alone[first:])


def test_the_last_step_is_respected_in_the_middle_of_an_epoch(source, alone):
    assert_equal(batches(source, first=2, last=4), alone[2:4])
    assert batches(source, first=4, last=4) == []


def test_every_sample_at_most_once_an_epoch_and_the_short_batch_dropped(source, alone):
    assert len(alone) == 2 * 3  # 14 images, batches of 4: two images are left over each epoch
    assert [batch.epoch for batch in alone] == [0, 0, 0, 1, 1, 1]
    epochs = [torch.cat([b.ids for b in alone if b.epoch == e]).tolist() for e in (0, 1)]
    for ids in epochs:
        assert len(set(ids)) == 12
        assert set(ids) <= set(range(14))
    assert epochs[0] != epochs[1]
    assert all(batch.size == 4 for batch in alone)


def test_everything_is_seen_over_the_epochs():
    order = EpochOrder(10, 4, 0)
    seen = Counter(int(i) for epoch in range(50) for i in order.epoch(epoch).ravel())
    assert set(seen) == set(range(10))
    assert min(seen.values()) > 25  # each image is in 8 of 10 places: 40 expected


def test_a_seed_is_another_sequence(source, alone):
    other = batches(source, seed=6)
    assert not torch.equal(torch.cat([b.ids for b in other]), torch.cat([b.ids for b in alone]))


def test_keyed_numbers_are_uniform_and_stable():
    u = keyed_uniforms(keyed_key(0, "x"), 20000)
    assert (u >= 0).all() and (u < 1).all()
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.var() - 1 / 12) < 0.005
    assert np.array_equal(u[:10], keyed_uniforms(keyed_key(0, "x"), 10))  # a prefix stays a prefix
    assert sorted(keyed_permutation(7, 100)) == list(range(100))
    # SplitMix64's first outputs for the state 0, from the paper's reference code.
    assert [int(v * 2**53) for v in keyed_uniforms(0, 2)] == [
        0xE220A8397B1DCDAF >> 11,
        0x6E789E6AA1B965F4 >> 11,
    ]


def test_the_callers_generators_are_not_touched(source):
    torch.manual_seed(3)
    np.random.seed(3)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    batches(source, last=2)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


@pytest.fixture()
def one_bad(tmp_path):
    for i in range(3):
        save_image(tmp_path / f"good{i}.jpg", i)
    half_jpeg(tmp_path / "zbad.jpg")
    return open_folder(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_stops_and_is_named(one_bad, workers):
    with pytest.raises(InputError) as caught:
        batches(one_bad, workers=workers)
    assert caught.value.where.endswith("zbad.jpg")
    assert "--on-error skip" in caught.value.fix


def test_skipping_substitutes_reports_and_is_repeatable(one_bad):
    first = batches(one_bad, skip_bad=True)
    assert_equal(first, batches(one_bad, skip_bad=True, workers=1))
    for batch in first:
        assert batch.size == 4
        assert 3 not in batch.ids.tolist()
        assert {bad.sample for bad in batch.bad} == {3}
        assert all(bad.where.endswith("zbad.jpg") and bad.problem for bad in batch.bad)
    ids = torch.cat([b.ids for b in first])
    assert set(ids.tolist()) == {0, 1, 2}
    # Views are those of the substitute under its own key, so the doubled image shows the same view.
    batch = first[0]
    double = next(i for i, n in Counter(batch.ids.tolist()).items() if n == 2)
    rows = [r for r, i in enumerate(batch.ids.tolist()) if i == double]
    assert torch.equal(batch.views[1][rows[0]], batch.views[1][rows[1]])


def test_a_substitute_that_is_bad_itself_is_substituted_too(tmp_path):
    for i in range(4):
        save_image(tmp_path / f"good{i}.jpg", i)
        half_jpeg(tmp_path / f"zbad{i}.jpg")
    found = batches(open_folder(tmp_path), batch_size=8, last=4, skip_bad=True)
    assert all(set(batch.ids.tolist()) <= {0, 1, 2, 3} for batch in found)
    assert all({bad.sample for bad in batch.bad} == {4, 5, 6, 7} for batch in found)
    assert any(len(batch.bad) > 4 for batch in found)  # it did happen


def test_skipping_gives_up_when_nothing_can_be_read(tmp_path):
    for i in range(4):
        half_jpeg(tmp_path / f"{i}.jpg")
    with pytest.raises(InputError, match="in a row could not be read"):
        batches(open_folder(tmp_path), skip_bad=True)
