"""Average precision: by hand, against scikit-learn, with equal scores and with images that don't count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from transfer.detect.scores import average_precision
from zoo.probe.average_precision import area_average_precision, step_average_precision


def of(scores, positive, **options):
    return float(area_average_precision(torch.tensor(scores), torch.tensor(positive) == 1, **options))


def test_by_hand():
    assert of([4.0, 3, 2, 1], [1, 1, 0, 0]) == 1.0
    assert of([4.0, 3, 2, 1], [0, 1, 0, 1]) == 0.5  # 1/2 at half of the recall, 2/4 at all of it
    assert of([4.0, 3, 2, 1], [1, 0, 1, 0]) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    # 1/3, then 2/4, then 3/5: the envelope is 3/5 everywhere, without it the steps are what they are.
    assert of([5.0, 4, 3, 2, 1], [0, 0, 1, 1, 1]) == pytest.approx(3 / 5)
    steps = step_average_precision(torch.tensor([5.0, 4, 3, 2, 1]), torch.tensor([0, 0, 1, 1, 1]) == 1)
    assert float(steps) == pytest.approx((1 / 3 + 2 / 4 + 3 / 5) / 3)


def test_eleven_points_by_hand():
    # Recall 0.5 at precision 1, recall 1 at 2/3: six levels up to 0.5, five beyond.
    assert of([3.0, 2, 1], [1, 0, 1], eleven_points=True) == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)


def test_a_class_without_positives_has_none():
    for eleven in (False, True):
        assert np.isnan(of([1.0, 2.0], [0, 0], eleven_points=eleven))


def test_the_order_of_equal_scores_says_nothing():
    scores = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for positive in ([1, 1, 0, 0, 0], [1, 0, 0, 1, 0]):
        got = of(scores.tolist(), positive)
        assert got == pytest.approx(0.5 * 1 + 0.5 * 2 / 4)
    # A classifier that says nothing gets the share of the positives, wherever they stand.
    for place in range(4):
        assert of([0.0] * 4, [int(i == place) for i in range(4)]) == 0.25


def test_what_does_not_count_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 50, generator=generator)
    positive = torch.rand(3, 50, generator=generator) < 0.4
    counted = torch.rand(3, 50, generator=generator) < 0.7
    for function in (area_average_precision, step_average_precision):
        got = function(scores, positive, counted)
        for row in range(3):
            keep = counted[row]
            assert float(got[row]) == pytest.approx(float(function(scores[row, keep], positive[row, keep])))
    assert float(area_average_precision(scores[0], positive[0], torch.zeros(50, dtype=torch.bool))) != 0


@pytest.mark.parametrize("levels", [3, 10_000])
def test_against_scikit_learn_and_the_detectors(levels):
    """Few levels: many equal scores."""
    rng = np.random.default_rng(levels)
    scores = rng.integers(0, levels, (5, 200)).astype(np.float64)
    positive = rng.random((5, 200)) < 0.2
    steps = step_average_precision(torch.from_numpy(scores), torch.from_numpy(positive))
    for row in range(5):
        want = average_precision_score(positive[row], scores[row])
        assert float(steps[row]) == pytest.approx(want, abs=1e-12)
    if levels < 200:
        return
    scores += rng.random((5, 200)) * 0.5  # no two are equal
    for kind, eleven in (("area", False), ("11-point", True)):
        got = area_average_precision(torch.from_numpy(scores), torch.from_numpy(positive), None, eleven)
        for row in range(5):
            hits = positive[row][np.argsort(-scores[row])]
            recall, precision = hits.cumsum() / hits.sum(), hits.cumsum() / np.arange(1, 201)
            assert float(got[row]) == pytest.approx(average_precision(recall, precision, kind), abs=1e-12)


def test_images_that_count_several_times_are_as_many_images():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 30, generator=generator)
    positive = torch.rand(2, 30, generator=generator) < 0.4
    times = torch.randint(0, 4, (5, 1, 30), generator=generator)
    for eleven in (False, True):
        got = area_average_precision(scores, positive, times, eleven)
        assert got.shape == (5, 2)
        for n in range(5):
            rows = torch.arange(30).repeat_interleave(times[n, 0])
            want = area_average_precision(scores[:, rows], positive[:, rows], None, eleven)
            torch.testing.assert_close(got[n], want)


def test_one_set_of_labels_for_many_scores():
    scores = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(1))
    positive = torch.arange(20) % 3 == 0
    got = area_average_precision(scores, positive)
    assert got.shape == (4, 3) and got.dtype == torch.float64
    assert float(got[2, 1]) == float(area_average_precision(scores[2, 1], positive))
